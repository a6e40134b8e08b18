"""min over Θ of min over (W, c) of ‖Y − F(X)‖² by Gauss–Newton from a random point: good for small widths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.learning.gauss_newton import Free, gauss_newton
from headway.learning.shapes import Factored, Full, Shape
from headway.learning.source import Source, spaced
from headway.learning.starts.unmix import unseen

SIZES = (1.0, 2.0, 0.5)  # norms of Θ_i in turn
BUDGET = 20  # products for each unknown: a fit that is worth a polish has come near by then
TARGET = 1e-4  # relative residual at which it is
OTHERS = 64  # other sequences looked at


@dataclass(frozen=True)
class Started:
    Theta: Tensor
    residual: float  # relative, on the rows fitted
    unseen: float  # on others
    reason: str
    products: int


def start(
    source: Source, heads: int, sequences: int, *, base: Tensor | None, number: int, rank: int | str | None,
    limit: int, generator: torch.Generator, report: Callable[[float], None] | None = None, own: bool = False,
) -> Started:
    """A rough fit in float32 from ``base``, or from the random point of that number; with ``own`` beside a linear
    function of the row's own token."""
    m, d = heads, source.d
    source.afford(m, m * d + 1, thin=False)
    if base is None:
        Theta = torch.randn(m, d + 1, d, generator=generator)
        Theta = Theta * (SIZES[number % len(SIZES)] / Theta.flatten(1).norm(dim=1).view(m, 1, 1))
        Theta = Theta.to(source.device)
    else:
        Theta = base.float()
    shape: Shape = Factored.of(Theta, rank) if isinstance(rank, int) else Full(Theta)
    problem = replace(source.problem(spaced(source.fit, sequences), m, torch.float32), own=own)
    found = gauss_newton(Free(problem), shape, generator=generator, limit=limit, target=TARGET,
                         budget=BUDGET * Theta.numel(), report=report)
    if own:  # what is asked is whether there is such a fit, not what it is
        return Started(found.point.Theta, found.residual, found.residual, found.reason, found.products)
    other = source.problem(spaced(source.select, min(OTHERS, len(source.select))), m, torch.float32)
    return Started(found.point.Theta, found.residual, unseen(found.point, other), found.reason, found.products)
