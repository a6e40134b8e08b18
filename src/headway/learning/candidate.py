"""A candidate: heads that explain the examples to some degree, and what is known of it. The pool: all of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from headway.runs.store import Stage

PARTS = ("Theta", "W", "offset")


@dataclass(frozen=True)
class Seen:
    """What the policy knows of a candidate: numbers, no tensors."""

    name: str
    heads: int
    residual: float  # relative, on the rows fitted
    error: float  # relative, on the sequences that select
    reason: str = "converged"  # why its solve ended
    sequences: int = 0  # it was fitted to
    rank: int | None = None  # of the Θ_i, where a low one was used
    out_rank: int | None = None  # of the W_i


@dataclass(frozen=True)
class Candidate:
    """Θ_i (with the key bias as last row), W_i and c in working coordinates, and how they came out."""

    Theta: Tensor
    W: Tensor
    offset: Tensor
    residual: float
    error: float
    reason: str
    sequences: int
    equations: int
    rank: int | None
    products: int
    out_rank: int | None = None
    name: str = ""

    @property
    def heads(self) -> int:
        return int(self.Theta.shape[0])

    @property
    def seen(self) -> Seen:
        return Seen(self.name, self.heads, self.residual, self.error, self.reason, self.sequences, self.rank,
                    self.out_rank)

    def stage(self) -> Stage:
        """Tensors and numbers, as a run keeps them."""
        info = asdict(self)
        del info["name"]
        return {part: info.pop(part) for part in PARTS}, info

    @classmethod
    def of(cls, name: str, stage: Stage) -> Candidate:
        tensors, info = stage
        numbers: dict[str, Any] = {key: value for key, value in info.items() if key not in ("seconds", "curve")}
        return cls(tensors["Theta"], tensors["W"], tensors["offset"], **numbers, name=name)


@dataclass(frozen=True)
class Pool:
    """Every candidate so far, and rough Θ that may become one: by name, in the order they were found."""

    candidates: tuple[Candidate, ...] = ()
    rough: tuple[tuple[float, str, Tensor], ...] = ()  # error, name, Θ

    def with_candidate(self, found: Candidate) -> Pool:
        return replace(self, candidates=(*self.candidates, found))

    def with_rough(self, error: float, name: str, Theta: Tensor) -> Pool:
        return replace(self, rough=(*self.rough, (error, name, Theta)))

    def best(self, most: int | None = None) -> Candidate | None:
        """The least error among candidates of at most ``most`` heads; of equals the first."""
        allowed = [c for c in self.candidates if most is None or c.heads <= most]
        return min(allowed, key=lambda c: c.error, default=None)

    def roughest(self) -> tuple[float, str, Tensor] | None:
        return min(self.rough, key=lambda entry: entry[0], default=None)

    def theta(self, name: str) -> Tensor:
        """Θ of what has this name."""
        for candidate in reversed(self.candidates):
            if candidate.name == name:
                return candidate.Theta
        return next(Theta for _, known, Theta in reversed(self.rough) if known == name)

    def named(self, name: str) -> Candidate:
        return next(c for c in reversed(self.candidates) if c.name == name)
