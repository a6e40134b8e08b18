"""From a start near the truth to the floor, the rank of the heads read off on the way.

Where Θ_i and W_i both show a low rank, as in layers that are trained with heads of size d/m, the fit is made in
thin factors (thin.py): some fifty times cheaper at width 384.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headway.learning.candidate import Candidate
from headway.learning.gauss_newton import NEAR
from headway.learning.ladder import CLOSE, Ladder, Pace, Strategy
from headway.learning.ranks import NARROW, numerical_rank, visible_rank, visible_rank_with_bias
from headway.learning.shapes import Factored, Full, Shape
from headway.learning.snapshots import NONE, Snapshot
from headway.learning.source import Source, spaced
from headway.learning.starts.unmix import WIDE
from headway.linalg.projected import evaluate
from headway.linalg.thin import Thin

EARLY = 64  # width from which a low rank is looked for in the start
LOOK = 2e-3  # relative residual at which a low rank shows, long before the end, and the last digits cost most
Report = Callable[[float], None]


class ReadRank(Strategy):
    """A low rank of full Θ_i, used as soon as it shows and given back if other sequences disagree."""

    def __init__(self, reading: bool) -> None:
        self.reading = reading

    @property
    def pace(self) -> Pace:
        return Pace(targets=(LOOK, CLOSE), careful=True)

    def state(self) -> dict[str, Any]:
        return vars(self)

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def before(self, at: Ladder) -> None:
        if self.reading and isinstance(at.shape, Full) and at.residual < NARROW:
            rank = numerical_rank(at.shape.theta(), at.residual)
            if rank is not None:
                at.place(Factored.of(at.shape.theta(), rank))

    def wider(self, at: Ladder) -> bool:
        """The gap was not a rank after all: give the empty directions back."""
        if not self.reading or isinstance(at.shape, Full):
            return False
        self.reading = False
        at.place(Full(at.shape.theta()))
        return True


class Fixed(Strategy):
    """Thin factors, their ranks known."""

    @property
    def pace(self) -> Pace:
        return Pace(targets=(LOOK, CLOSE), hasty=True)


def polish(
    source: Source,
    Theta: Tensor,
    sequences: int,
    *,
    rank: int | str | None,
    generator: torch.Generator,
    exact: bool = False,
    limit: int = 100,
    report: Report | None = None,
    pulse: Callable[[], None] | None = None,
    snapshot: Snapshot = NONE,
) -> Candidate:
    """From a start near the truth to the least squares solution on ``sequences`` sequences, more if they do not
    determine it. Thin factors need fewer and begin with those, unless ``exact``.
    """
    kept = snapshot.found()
    free = kept is not None and bool(kept[1]["ladder"]["free"])  # it was past the thin factors
    if rank is not None and source.d >= EARLY and not free:
        thin = thin_start(source, Theta, rank)
        if thin is not None:
            at = Ladder(source, thin, Fixed(), generator, sequences=sequences if exact else None, limit=limit,
                        report=report, pulse=pulse, snapshot=snapshot, kept=kept)
            reason = at.climb()
            if at.residual <= NEAR or source.d >= WIDE or rank != "auto":
                return at.candidate(reason)
            # Perhaps no rank after all, and a fit without one is affordable.
    start = Theta.to(torch.float32)
    shape: Shape = Factored.of(start, rank) if isinstance(rank, int) else Full(start)
    at = Ladder(source, shape, ReadRank(rank == "auto"), generator, sequences=sequences, limit=limit,
                report=report, pulse=pulse, snapshot=snapshot, kept=kept if free else None)
    return at.candidate(at.climb())


def thin_start(source: Source, Theta: Tensor, rank: int | str) -> Thin | None:
    """Thin factors of the rank that Θ and its best W show; None where none does."""
    m, d, k = Theta.shape[0], source.d, source.examples.length
    q = rank if isinstance(rank, int) else visible_rank_with_bias(Theta)
    if q is None or 2 * q > d:
        return None
    rows = min(math.ceil(4 * m * d / k), len(source.fit), source.most())
    first = source.problem(spaced(source.fit, rows), m, torch.float32)
    if first.rows < 2 * m * d:
        return None
    W = evaluate(first, Theta.to(torch.float32)).W
    p = visible_rank(W)
    return None if p is None else Thin.of(Theta.to(torch.float32), W, q, p)
