"""Instances that are provably or visibly hard, and the zoo learners are compared on."""

from headway.hardness.families import FAMILIES, family
from headway.hardness.secrets import Secret, low_degree, parity, parity_output, rounding, rounding_output

__all__ = ["FAMILIES", "Secret", "family", "low_degree", "parity", "parity_output", "rounding", "rounding_output"]
