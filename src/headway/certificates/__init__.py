"""layer + unseen examples → Certificate.

Imports nothing from the learners. What both stand on is tested on its own, against slow twins: attention and its
derivatives (core.attention), and products with the Jacobian once W is eliminated (linalg.projected).
"""

from headway.certificates.report import certify

__all__ = ["certify"]
