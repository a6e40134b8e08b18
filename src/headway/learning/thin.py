"""Heads as thin factors for Gauss–Newton: the products of linalg.thin, and what a step of (A, B, V) costs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headway.learning.gauss_newton import LeastSquares
from headway.learning.saturated import blocks_of, exactly, saturated
from headway.learning.shapes import Metric, inverse, lifted
from headway.linalg.krylov import Linear
from headway.linalg.thin import Thin, ThinPoint, ThinProducts, thin_point

PRICE = 0.03  # part of the loss that a change of all scores by one costs in a step
LIFT = 1e-5  # of the mean of S_i, added so that it can be inverted


class ThinModel(LeastSquares):
    """The model of gauss_newton: unknowns (A, B, V)."""

    def evaluate(self, shape: Thin) -> ThinPoint:
        return thin_point(self.problem, shape)

    def products(self, point: ThinPoint, shape: Thin, dtype: torch.dtype) -> PricedProducts:
        return PricedProducts(self.problem, point, shape, dtype)


class PricedProducts(ThinProducts):
    """With the metric in which steps are measured."""

    def metric(self, generator: torch.Generator) -> Metric:
        """For A: S ⊗ BᵀMB, for B: M ⊗ AᵀSA as in shapes.Factored; for V: T ⊗ O_iO_iᵀ.

        A head whose patterns are saturated has next to no curvature, and a step damped in units of its curvature
        moves its scores by far more than the linear model allows: the step fails, or rows are met by heart. So
        changes of scores have a price of their own, all queries alike: PRICE · the loss, which ends with it and so
        does not slow the last steps; more after a step that failed (gauss_newton.py). With K_i that and the damping
        together, what preconditions is near S_i ⊗ M_i + S ⊗ K_i: (S_i + rS) ⊗ (M_i + K_i/r), r² = tr K_i/tr M_i.
        For saturated heads that is not near enough (saturated.py).
        """
        S, M, T = self.moments(generator)
        eye = torch.eye(self.shape.width, dtype=M.dtype, device=M.device)
        alike = lifted(self.queries()).expand_as(S)
        out = self.O.view(len(M), -1, self.O.shape[1])
        blocks = [blocks_of(i, self.problem, self.kept, self.shape.A[i], out[i], generator)
                  for i in saturated(self.W, M, T)]
        M = lifted(M)
        A, B, V = self.shape.A, self.shape.B, self.shape.V
        last = lifted(T), lifted(out @ out.mT)
        across = V @ inverse(V.mT @ last[0] @ V) @ V.mT
        back_last = inverse(last[0]) - across, inverse(last[1])

        def by(sides: list[tuple[Tensor, Tensor]]) -> Linear:
            return lambda v: torch.cat([
                (a @ x @ b).flatten(1) for x, (a, b) in zip(self.shape.parts(v), sides, strict=True)], dim=1)

        def of(S: Tensor, M: Tensor) -> Metric:
            pairs = [(S, lifted(B.mT @ M @ B)), (M, lifted(A.mT @ S @ A))]
            back = [(inverse(a), inverse(b)) for a, b in pairs]
            # Steps along the gauges are taken out of B and V: A and B then share no direction of Θ under S ⊗ M.
            back[1] = back[1][0] - B @ back[0][1] @ B.mT, back[1][1]
            return Metric(by([*pairs, last]), by([*back, back_last]))

        def under(damping: float, held: float) -> tuple[Linear, Metric]:
            K = damping * M + PRICE * held * eye
            ratio = _size(K) / _size(M).clamp_min(torch.finfo(M.dtype).tiny * 1e6)
            root = ratio.sqrt().clamp(1e-6, 1e3)[:, None, None]
            hold = by([(alike, B.mT @ K @ B), (K, A.mT @ alike @ A), (damping * last[0], last[1])])
            near = of(lifted(S + root * alike, LIFT), lifted(M + K / root))
            found = [part.held(A[part.head], B[part.head], alike[0], K[part.head])
                     for part in blocks if part is not None]
            return hold, exactly(near, found)

        return replace(of(alike, M), under=under)


def _size(D: Tensor) -> Tensor:
    """The mean of each diagonal."""
    return D.diagonal(dim1=1, dim2=2).mean(1)
