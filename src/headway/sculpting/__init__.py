"""The first paper's algorithm: a convex body sculpted around the unknown attention matrices."""
