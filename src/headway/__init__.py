"""Headway learns a multi-head attention layer from examples of what it does, and says how sure it is."""

from headway.certificates import certify
from headway.core.checks import InputError
from headway.core.convert import from_checkpoint, from_torch, from_weights, to_torch
from headway.core.examples import Examples, draw
from headway.core.layer import AttentionLayer
from headway.core.match import Comparison, Match, compare, match
from headway.core.results import Certificate, Claim, Fit, NotLearnedError, Status, Verdict
from headway.learning import learn

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
    "Verdict",
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
