"""Headway learns a multi-head attention layer from examples of what it does, and says how sure it is."""

from headway.checks import InputError
from headway.examples import Examples, draw
from headway.layer import AttentionLayer
from headway.learn import learn
from headway.match import Match, match
from headway.results import Fit, NotLearnedError, Status

__version__ = "0.1.0"
__all__ = [
    "AttentionLayer",
    "Examples",
    "Fit",
    "InputError",
    "Match",
    "NotLearnedError",
    "Status",
    "draw",
    "learn",
    "match",
]
