"""layer + unseen examples → Certificate. Imports nothing from the learners."""

from headway.certificates.report import certify

__all__ = ["certify"]
