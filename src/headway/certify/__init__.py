"""layer + unseen examples → Certificate. Imports nothing from the learners."""

from headway.certify.report import certify

__all__ = ["certify"]
