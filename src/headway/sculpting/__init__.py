"""The first paper's algorithm: a convex body sculpted around the unknown attention matrices, a file for each phase.

1 crude.py, 2 sculpt.py, 3 refine.py, 4 resculpt.py, 5 hull.py, 6 net.py; provable.py runs them. The phases are the
paper's, as far as its description is known to us; their form in linear algebra is a reconstruction. Ours besides:
the constants (thresholds.py), sharpening the hull (sharpen.py), and Gauss–Newton in place of the net.
"""
