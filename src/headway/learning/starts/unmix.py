"""The heads inside a span: Θ_i = Σ_j A_ij B_j with only m·L unknowns, from several random starts.

The scores of the basis, S_j = X̃B_jXᵀ, are formed once; after that scores are Σ_j A_ij S_j, and neither they nor
their adjoint cost a product with Θ. Of the labels a few random combinations YR are enough: given A every column
of Y is a regression on the same features, and A is common to all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.core import attention
from headway.core.devices import normal
from headway.learning.gauss_newton import LeastSquares, Operator, gauss_newton
from headway.learning.shapes import Metric, Span, gram_metric
from headway.linalg.projected import Point, Problem, Products, Rows, evaluate

WIDE = 128  # width from which a start costs so much that more patience pays
AGREE = 2  # starts that must end at the same least residual
COLUMNS = 16  # combinations of the labels kept, or an eighth of them


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


@dataclass(frozen=True)
class SpanRows(Rows):
    """Rows whose attention matrices are given by coefficients A (m, L); ``basis`` holds S_j, (n, k, L, k), and
    ``flat`` the same numbers with j last, (n·k·k, L)."""

    basis: Tensor | None = None
    flat: Tensor | None = None

    def patterns(self, A: Tensor) -> Tensor:
        return attention.softmax(self._scores(A), self.see)

    def tangent(self, P: Tensor, dA: Tensor) -> Tensor:
        return attention.attend(attention.softmax_rule(P, self._scores(dA)), self.X)

    def cotangent(self, P: Tensor, gH: Tensor, like: Tensor) -> Tensor:
        assert self.flat is not None
        return attention.score_side(P, self.X, gH).permute(2, 0, 1, 3).reshape(len(like), -1) @ self.flat

    def _scores(self, A: Tensor) -> Tensor:
        assert self.basis is not None
        return torch.matmul(A, self.basis)  # (m, L) by (n, k, L, k)


class InSpan(LeastSquares):
    """The model of gauss_newton: unknowns A, everything else eliminated."""

    @classmethod
    def of(cls, problem: Problem, basis: Tensor, mix: Tensor | None) -> InSpan:
        """``mix`` (e, e'): the combinations of the labels to fit; None for all of them."""
        chunks = []
        for rows in problem.chunks:
            Y = rows.Y if mix is None else rows.Y @ mix.to(rows.Y)
            S = attention.scores(rows.X, basis.to(rows.X))
            chunks.append(SpanRows(rows.X, Y, rows.see, rows.valid, S, S.transpose(2, 3).reshape(-1, len(basis))))
        return cls(replace(problem, chunks=tuple(chunks)))

    def evaluate(self, shape: Span) -> Point:
        return evaluate(self.problem, shape.value)

    def products(self, point: Point, shape: Span, dtype: torch.dtype) -> Operator:
        return _SpanProducts(self.problem, point, dtype)


class _SpanProducts(Products):
    def metric(self, generator: torch.Generator) -> Metric:
        """One L × L block for each head: Σ_rows E[(J_iᵀω)(J_iᵀω)ᵀ] by one random probe ω per row."""
        D = 0.0 * self.Theta.unsqueeze(2) * self.Theta.unsqueeze(1)
        generator = self.problem.ranks.own(generator)
        for i, rows in enumerate(self.problem.chunks):
            assert isinstance(rows, SpanRows) and rows.basis is not None
            omega = normal(rows.Y, generator)
            if rows.valid is not None:
                omega = omega * rows.valid
            gS = attention.score_side(self._at(i)[0], rows.X, attention.spread(omega, self.W))
            t = torch.matmul(gS, rows.basis.mT)  # (n, k, m, L)
            D = D + torch.einsum("namk,naml->mkl", t, t)
        return gram_metric(self.problem.ranks.total(D))


def unseen(point: Point, problem: Problem) -> float:
    """Relative residual of a fitted point on other rows."""
    wrong = 0.0
    for rows in problem.chunks:
        R = rows.Y - attention.project(attention.attend(rows.patterns(point.Theta), rows.X), point.W, point.offset)
        wrong += float((R if rows.valid is None else R * rows.valid).double().square().sum())
    return math.sqrt(problem.ranks.total(wrong) / problem.variation())


def _start(heads: int, directions: int, number: int, generator: torch.Generator) -> Tensor:
    A = torch.randn(heads, directions, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(A, dim=1) * (1.0, 2.0, 4.0)[number % 3]


def unmix(
    fit: Problem, check: Problem, basis: Tensor, heads: int, *, starts: int, generator: torch.Generator,
    enough: float = 0.0, report: Callable[[float], None] | None = None,
) -> Unmixed:
    """min over A of the residual with W and c eliminated, from ``starts`` random starts of several norms.

    Stops early once two starts agree on the least residual on ``check``, or one leaves less than ``enough``.
    """
    e = fit.chunks[0].Y.shape[2]
    columns = max(COLUMNS, e // 8)
    mix = None
    if columns < e:
        mix = torch.linalg.qr(torch.randn(e, columns, generator=generator, dtype=torch.float64))[0].to(basis.device)
    model, other = InSpan.of(fit, basis, mix), InSpan.of(check, basis, mix)
    found: list[tuple[float, Tensor]] = []
    products = 0
    # Wide layers pass through long plateaus on the way; small ones are cheaper to start again.
    wide = basis.shape[2] >= WIDE
    for j in range(starts):
        A = _start(heads, len(basis), j, generator).to(basis)
        solution = gauss_newton(model, Span(A, basis), generator=generator, limit=60, report=report,
                                patience=4 if wide else 2, least_gain=2e-3 if wide else 1e-2)
        products += solution.products
        found.append((unseen(solution.point, other.problem), solution.shape.theta()))
        least = min(r for r, _ in found)
        if least < enough or sum(r <= 1.01 * least for r, _ in found) >= AGREE:
            break
    ordered = sorted(found, key=lambda pair: pair[0])
    distinct = [ordered[0]]
    for residual, Theta in ordered[1:]:
        if residual > 1.01 * distinct[-1][0]:
            distinct.append((residual, Theta))
    return Unmixed(torch.stack([Theta for _, Theta in distinct]), tuple(r for r, _ in distinct),
                   tuple(r for r, _ in found), products)
