"""Headway learns a multi-head attention layer from examples of what it does, and says how sure it is."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.certificates import certify
    from headway.core.behaviour import Behaviour, behaviours
    from headway.core.capture import capture
    from headway.core.checkpoints import from_checkpoint, to_checkpoint
    from headway.core.checks import InputError
    from headway.core.convert import from_weights, to_torch
    from headway.core.examples import Examples
    from headway.core.factored import FactoredLayer
    from headway.core.forms import Cap, Form, Gated, Normed, Sight, Sink
    from headway.core.gauge import Heads, heads_of
    from headway.core.layer import AttentionLayer
    from headway.core.match import Match, match
    from headway.core.modules import from_torch
    from headway.core.positions import OffsetTable, Rotary, Slope
    from headway.core.replaced import Replacement, replace
    from headway.core.results import Certificate, Claim, Fit, NotLearnedError, Status, Verdict
    from headway.core.same import Comparison, compare
    from headway.core.sources import ask, draw
    from headway.learning import learn
    from headway.learning.settings import Adam, Auto, Descent, Factors, Lbfgs, Moments, Sculpt, Starts
    from headway.runs.tensorboard import TensorBoard

__version__ = "0.1.0"
__all__ = [
    "Adam",
    "AttentionLayer",
    "Auto",
    "Behaviour",
    "Cap",
    "Certificate",
    "Claim",
    "Comparison",
    "Descent",
    "Examples",
    "FactoredLayer",
    "Factors",
    "Fit",
    "Form",
    "Gated",
    "Heads",
    "InputError",
    "Lbfgs",
    "Match",
    "Moments",
    "Normed",
    "NotLearnedError",
    "OffsetTable",
    "Replacement",
    "Rotary",
    "Sculpt",
    "Sight",
    "Sink",
    "Slope",
    "Starts",
    "Status",
    "TensorBoard",
    "Verdict",
    "ask",
    "behaviours",
    "capture",
    "certify",
    "compare",
    "draw",
    "from_checkpoint",
    "from_torch",
    "from_weights",
    "heads_of",
    "learn",
    "match",
    "replace",
    "to_checkpoint",
    "to_torch",
]
# Names are looked up when first asked for, so that `headway --help` need not wait for torch.
_HOME = {
    "AttentionLayer": "core.layer", "Behaviour": "core.behaviour", "behaviours": "core.behaviour",
    "Certificate": "core.results", "Claim": "core.results",
    "Comparison": "core.same", "Examples": "core.examples", "Fit": "core.results", "InputError": "core.checks",
    "Match": "core.match", "NotLearnedError": "core.results", "Status": "core.results", "Verdict": "core.results",
    "ask": "core.sources", "certify": "certificates",
    "compare": "core.same", "draw": "core.sources", "from_checkpoint": "core.checkpoints",
    "from_torch": "core.modules", "from_weights": "core.convert", "learn": "learning", "match": "core.match",
    "to_torch": "core.convert", "to_checkpoint": "core.checkpoints", "capture": "core.capture",
    "replace": "core.replaced", "Replacement": "core.replaced", "TensorBoard": "runs.tensorboard",
    "FactoredLayer": "core.factored", "Heads": "core.gauge", "heads_of": "core.gauge",
    **dict.fromkeys(("Cap", "Form", "Gated", "Normed", "Sight", "Sink"), "core.forms"),
    **dict.fromkeys(("OffsetTable", "Rotary", "Slope"), "core.positions"),
    **dict.fromkeys(("Adam", "Auto", "Descent", "Factors", "Lbfgs", "Moments", "Sculpt", "Starts"),
                    "learning.settings")}
_ROOMS = ("certificates", "core", "hardness", "learning", "linalg", "racing", "recall", "report", "runs",
          "sculpting", "training")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"headway.{_HOME[name]}"), name)
        globals()[name] = value  # found once
        return value
    if name in _ROOMS:
        return importlib.import_module(f"headway.{name}")
    raise AttributeError(f"module 'headway' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
