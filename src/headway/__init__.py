"""Headway learns a multi-head attention layer from examples of what it does, and says how sure it is."""

from headway.certify import certify
from headway.checks import InputError
from headway.convert import from_checkpoint, from_torch, from_weights, to_torch
from headway.examples import Examples, draw
from headway.layer import AttentionLayer
from headway.learn import learn
from headway.match import Comparison, Match, compare, match
from headway.results import Certificate, Claim, Fit, NotLearnedError, Status

__version__ = "0.1.0"
__all__ = [
    "AttentionLayer",
    "Certificate",
    "Claim",
    "Comparison",
    "Examples",
    "Fit",
    "InputError",
    "Match",
    "NotLearnedError",
    "Status",
    "certify",
    "compare",
    "draw",
    "from_checkpoint",
    "from_torch",
    "from_weights",
    "learn",
    "match",
    "to_torch",
]
