"""The heads inside a span: Θ_i = Σ_j A_ij B_j with only m·L unknowns, from several random starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway import attention
from headway.learn.gauss_newton import gauss_newton
from headway.learn.shapes import Span
from headway.projected import Point, Problem

WIDE = 128  # from this width on a pass is dear: more directions and more patience pay
AGREE = 2  # starts that must end at the same least residual


@dataclass(frozen=True)
class Unmixed:
    """Distinct results, best first, with their residuals on rows not used to fit, and all starts' residuals."""

    Theta: Tensor  # (s, m, d + 1, d)
    residuals: tuple[float, ...]
    starts: tuple[float, ...]
    products: int

    @property
    def agreeing(self) -> int:
        """How many starts ended at the least residual: agreement is itself evidence."""
        return sum(r <= 1.01 * min(self.starts) for r in self.starts)


def unseen(point: Point, problem: Problem) -> float:
    """Relative residual of a fitted point on other rows."""
    wrong = 0.0
    for rows in problem.chunks:
        R = rows.Y - attention.forward(rows.X, point.Theta, point.W, point.offset, rows.see)
        wrong += float((R if rows.valid is None else R * rows.valid).double().square().sum())
    return math.sqrt(wrong / problem.variation())


def unmix(
    fit: Problem, check: Problem, basis: Tensor, heads: int, *, starts: int, generator: torch.Generator,
    report: Callable[[float], None] | None = None,
) -> Unmixed:
    """min over A of the residual with W and c eliminated, from ``starts`` random starts of several norms.

    Stops early once two starts agree on the least residual on ``check``.
    """
    found: list[tuple[float, Tensor]] = []
    products = 0
    # Wide layers pass through long plateaus on the way; small ones are cheaper to start again.
    wide = basis.shape[2] >= WIDE
    for j in range(starts):
        A = torch.randn(heads, len(basis), generator=generator, dtype=torch.float64)
        A = A * ((1.0, 2.0, 4.0)[j % 3] / A.norm(dim=1, keepdim=True))
        solution = gauss_newton(fit, Span(A.to(basis), basis), generator=generator, limit=60, report=report,
                                patience=4 if wide else 2, least_gain=2e-3 if wide else 1e-2)
        products += solution.products
        found.append((unseen(solution.point, check), solution.point.Theta))
        least = min(r for r, _ in found)
        if sum(r <= 1.01 * least for r, _ in found) >= AGREE:
            break
    ordered = sorted(found, key=lambda pair: pair[0])
    distinct = [ordered[0]]
    for residual, Theta in ordered[1:]:
        if residual > 1.01 * distinct[-1][0]:
            distinct.append((residual, Theta))
    return Unmixed(torch.stack([Theta for _, Theta in distinct]), tuple(r for r, _ in distinct),
                   tuple(r for r, _ in found), products)
