"""What a learner returns: a layer, a status that is a sentence, counters and a trace. Frozen, printable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.layer import AttentionLayer


@dataclass(frozen=True)
class Status:
    """How learning ended: ``kind`` for programs, ``sentence`` for people, ``numbers`` for both.

    recovered       the residual on unseen examples is at the floor of the arithmetic
    noise           it is at a level that further heads do not lower: label noise
    not_realisable  m heads leave a residual with structure in it
    too_few         the examples do not determine the layer
    degenerate      a condition the method relies on does not hold, with its measured value
    limit           a limit on iterations or time was reached first
    """

    kind: str
    sentence: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the layer may be used as an answer: recovered, or as well as the noise allows."""
        return self.kind in ("recovered", "noise")

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True)
class Fit:
    """A learned layer, how learning ended, counters, and what happened stage by stage."""

    layer: AttentionLayer
    status: Status
    stats: Mapping[str, Any]
    trace: tuple[Mapping[str, Any], ...]

    def __repr__(self) -> str:
        return f"Fit({self.layer!r}, {self.status.kind}: {self.status.sentence})"


class NotLearnedError(RuntimeError):
    """Raised with ``strict=True`` when the status is not ok; carries the fit."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit.status.sentence)
        self.fit = fit
