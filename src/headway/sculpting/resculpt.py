"""Phase 4, re-sculpt: phases 2, 5 and 3 again with fewer, better rows, until the sum of the projections settles.

    Ŵ by phase 1;   then, round by round,   body by phase 2,   Θ̄ and V by phase 5,   a better Ŵ by phase 3;
    at the end the hull is sharpened. Phase 6 finds the heads in it.

That the body is sculpted again with the refined sum is the paper's; the schedule (how many rows each round accepts,
when the sum has settled) is ours, named in ``Thresholds``. What each phase saw is recorded for the trace.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.core.layer import AttentionLayer
from headway.sculpting.body import Body
from headway.sculpting.crude import crude_sum
from headway.sculpting.hull import Hull, hull_angle, hull_of
from headway.sculpting.refine import refine
from headway.sculpting.rows import Batches, Given
from headway.sculpting.sculpt import sculpt
from headway.sculpting.sharpen import sharpen
from headway.sculpting.thresholds import Thresholds


@dataclass(frozen=True)
class Sculpted:
    """What the phases leave: the sum of the projections, the hull, and the best rows of the last body."""

    total: Tensor  # Ŵ ≈ ΣW_i, (d, e)
    hull: Hull
    body: Body
    events: tuple[dict[str, Any], ...]


class Sculptor:
    """Phases 1 to 5 in order, and the state that they hand to each other."""

    def __init__(
        self, batches: Batches, heads: int, thresholds: Thresholds, truth: AttentionLayer | None = None,
        report: Callable[[float | None], None] | None = None,
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.known = None if truth is None else _Known(truth)
        self.hull: Hull | None = None
        self.body: Body | None = None
        begun = time.perf_counter()
        self.total, n = crude_sum(batches)
        k, d = next(iter(batches())).X.shape[1:]
        self.given = Given(batches, heads, thresholds, n, k, d, report)
        self._note("crude sum", 0, begun, rows=n * k)

    def run(self) -> Sculpted:
        """Stops when the rows are as few as they may get and the sum has settled."""
        at, N = self.given.at, self.given.rows
        least = math.ceil(at.last * self.given.width**2 / (self.given.length - 1))
        crude = self.total
        for j in range(at.rounds):
            size = max(least, math.ceil(at.first * at.shrink**j * N))
            self.sculpt(j, min(size, N))
            before = self.total
            self.refine(j)
            if size == least and self._settled(before, crude):
                break
        for j in range(at.sharpen):
            before = self.total
            self.sharpen(j)
            if self._settled(before, crude):
                break
        assert self.hull is not None and self.body is not None
        return Sculpted(self.total, self.hull, self.body, tuple(self.events))

    def _settled(self, before: Tensor, crude: Tensor) -> bool:
        return float((self.total - before).norm()) < self.given.at.settled * float((self.total - crude).norm())

    def sculpt(self, j: int, size: int) -> None:
        """A body from ``size`` rows, and the hull that it shows."""
        begun, m = time.perf_counter(), self.given.heads
        gram, self.body, numbers = sculpt(self.given, self.total, size)
        hull = self.hull = hull_of(gram, m)
        self._note("sculpt", j, begun, **numbers, singular_values=[float(v) for v in hull.values[: m + 3]],
                   gap=hull.gap if m > 1 else None, distance=hull.distance, constraints=gram.count)

    def refine(self, j: int) -> None:
        begun = time.perf_counter()
        assert self.hull is not None
        self.total, numbers = refine(self.given, self.hull)
        self._note("refine", j, begun, **numbers)

    def sharpen(self, j: int) -> None:
        begun = time.perf_counter()
        assert self.hull is not None
        self.total, self.hull, numbers = sharpen(self.given, self.total, self.hull)
        self._note("sharpen", j, begun, **numbers)

    def _note(self, phase: str, j: int, begun: float, **numbers: Any) -> None:
        errors = {} if self.known is None else self.known.errors(self.total, self.hull)
        self.events.append({"phase": phase, "round": j, **numbers, **errors,
                            "seconds": time.perf_counter() - begun})


class _Known:
    """Errors against a known truth, for the trace."""

    def __init__(self, truth: AttentionLayer) -> None:
        self.total = truth.W.double().sum(0)
        Theta = truth.Theta.double()
        base, rest = Theta[0].flatten(), (Theta[1:] - Theta[:1]).flatten(1)
        self.V: Tensor = torch.linalg.qr(rest.T)[0] if len(rest) else base.new_zeros(len(base), 0)
        self.center = base - self.V @ (self.V.T @ base)

    def errors(self, total: Tensor, hull: Hull | None) -> dict[str, float]:
        found = {"sum_error": float((total.cpu() - self.total).norm() / self.total.norm())}
        if hull is not None:
            found["center_error"] = float(
                (hull.center.flatten().cpu() - self.center).norm() / self.center.norm())
            if hull.directions.shape[0] == self.V.shape[1] > 0:
                found["hull_angle"] = hull_angle(hull.directions.flatten(1).cpu(), self.V.T)
        return found
