"""What a learner returns (a layer, a status that is a sentence, a trace) and what a certificate says. Frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn

from torch import Tensor

from headway.core.convert import Factors, factored
from headway.core.layer import AttentionLayer
from headway.core.measured import Errors


@dataclass(frozen=True)
class Status:
    """How learning ended: ``kind`` for programs, ``sentence`` for people, ``numbers`` for both.

    - recovered: the residual on unseen examples is at the floor of the arithmetic, the heads are determined
    - fitted: it is small (1e-6 of the labels' spread, or less), though not at that floor; or it is, and the inputs
      leave some directions of the heads open, which are named
    - noise: it is at a level that further heads do not lower: label noise
    - not_realisable: m heads leave a residual with structure in it
    - too_few: the examples do not determine the layer
    - degenerate: a condition the method relies on does not hold, with its measured value
    - limit: a limit on iterations or time was reached first, or a close fit stalled
    """

    kind: str
    sentence: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the layer may be used as an answer: recovered, fitted, or as well as the noise allows."""
        return self.kind in ("recovered", "fitted", "noise")

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True)
class Fit:
    """A learned layer, how learning ended, counters, what happened stage by stage, and what was asked for."""

    layer: Any  # AttentionLayer; FactoredLayer where a form was asked for
    status: Status
    stats: Mapping[str, Any]
    trace: tuple[Mapping[str, Any], ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def predict(self, X: Any, padding: Any = None, **beside: Any) -> Tensor:
        """What the learned layer answers to X, (n, k, d) or (k, d); a layer in factors may be given Z, key_padding,
        positions and key_positions as well."""
        answer: Tensor = self.layer(X, padding=padding, **beside)
        return answer

    @property
    def factors(self) -> Factors | None:
        """The heads as thin factors where a low rank of Θ_i and W_i was found and used; None elsewhere."""
        if not isinstance(self.layer, AttentionLayer) or self.layer.linear:
            return None
        rank, out_rank = self.stats.get("rank"), self.stats.get("out_rank")
        return None if rank is None or out_rank is None else factored(self.layer, rank, out_rank)

    def __repr__(self) -> str:
        return f"Fit({self.layer!r}, {self.status.kind}: {self.status.sentence})"


class Verdict(StrEnum):
    """What a claim comes to: yes, no or undecided. Each compares with its word, and none is true or false: "no" is
    a word like the others, and ``if claim.holds`` would take it for a yes."""

    YES = "yes"
    NO = "no"
    UNDECIDED = "undecided"

    def __bool__(self) -> NoReturn:
        raise TypeError(f"a verdict ({self}) is neither true nor false; use certificate.established(name), or "
                        "compare: claim.holds == 'yes'")


@dataclass(frozen=True)
class Claim:
    """One statement about a layer: what it rests on, whether it holds (yes, no, undecided) and why."""

    name: str
    statement: str
    assumption: str
    holds: Verdict
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "holds", Verdict(self.holds))  # a word, where it comes from a file

    def __str__(self) -> str:
        return f"{self.name}: {self.holds}. {self.statement}: {self.reason}."


@dataclass(frozen=True)
class Certificate:
    """Claims about one layer, from examples it was not learned from; ``held_out``: what the held-out claims count,
    for ``certify(layer, more, so_far=certificate)``."""

    claims: tuple[Claim, ...]
    confidence: float
    settings: Mapping[str, Any]
    held_out: Errors | None = field(default=None, repr=False, compare=False)

    def __getitem__(self, name: str) -> Claim:
        for claim in self.claims:
            if claim.name == name:
                return claim
        raise KeyError(f"no claim {name!r}; there are {', '.join(repr(c.name) for c in self.claims)}")

    def established(self, name: str) -> bool:
        """Whether the claim of this name holds; undecided is not established."""
        return self[name].holds == Verdict.YES

    def __str__(self) -> str:
        return "\n".join(str(claim) for claim in self.claims)


class NotLearnedError(RuntimeError):
    """Raised with ``strict=True`` when the status is not ok; carries the fit."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit.status.sentence)
        self.fit = fit
