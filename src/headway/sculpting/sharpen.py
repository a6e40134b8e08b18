"""Between phases 5 and 6, ours: the hull made accurate to first order, by alternating least squares on the rows.

    y_a − Ŵᵀh̄_a ≈ Ŵᵀt_0 + Σ_j B_jᵀt_j,   t_j = C̄_aV_jᵀx_a,   V_0 the error of Θ̄,   B_j = Σ_i a_ij W_i

on rows on which the heads disagree little: first (Ŵ, B) for given V, then (V_0, V) for given (Ŵ, B). Only the
residuals know where the hull is; rows chosen by V alone would confirm any V.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.core import attention
from headway.linalg.krylov import conjugate_gradients
from headway.sculpting.hull import Hull
from headway.sculpting.rows import Given, Reservoir, arbitrary, least_squares


def sharpen(given: Given, total: Tensor, hull: Hull) -> tuple[Tensor, Hull, dict[str, Any]]:
    """One round on fresh rows: Ŵ, the hull, and numbers for the trace."""
    at, m, d, k = given.at, given.heads, given.width, given.length
    best = Reservoir(math.ceil(at.sharpen_rows * d**2 / (k - 1)))
    seen = 0
    for rows in given.stream():
        score = given.leave_out(_disagreement(given, hull, rows.X), rows.X)
        chosen = torch.nonzero(score.flatten() < best.threshold).squeeze(1)
        n, a = chosen // k, chosen % k
        best.add(score.flatten()[chosen], X=rows.X[n], a=a, y=rows.Y[n, a])
        seen += score.numel()
    found = best.rows()
    if len(found["a"]) < m * d**2:  # every pattern puts all its weight on one token
        return total, hull, {"rows": seen, "accepted": 0}
    model = FirstOrder(found["X"].double(), found["a"], found["y"].double())
    center, V, W = hull.center, hull.directions, total
    for _ in range(at.sweeps):
        center, V, W = model.sweep(center, V)
    return W, replace(hull, center=center, directions=V), {
        "rows": seen, "accepted": len(found["a"]), "threshold": float(found["score"].max()),
        "residual": model.residual}


def _disagreement(given: Given, hull: Hull, X: Tensor) -> Tensor:
    """Deviation of the scores that hull directions of length ρ add to a row, in the row's own pattern, relative
    to that pattern's spread; rows with all weight on one token tell nothing and get inf: (n, k)."""
    center, V = hull.center.to(X), hull.directions.to(X)
    rho = given.at.radius * math.sqrt(given.heads - 1) * center.norm()
    P = attention.patterns(X, center.unsqueeze(0))
    room = 1.0 - P.square().sum(3).squeeze(2)
    if given.heads > 1:
        S = attention.scores(X, rho * V)
        variance = (P * S.square()).sum(3) - (P * S).sum(3).square()
        score = (variance.clamp_min(0).sum(2) / room.clamp_min(1e-9)).sqrt()
    else:
        score = arbitrary(room)
    enough: Tensor = torch.where(room > 2 * given.at.least_weight, score, torch.inf)
    return enough


class FirstOrder:
    """Alternating least squares for y_a ≈ Ŵᵀh̄ + Σ_j B_jᵀ C̄_a V_jᵀx_a on chosen rows a of sequences X."""

    def __init__(self, X: Tensor, a: Tensor, y: Tensor) -> None:
        self.X, self.y = X, y
        self.rows = torch.arange(len(X), device=X.device)
        self.a = a
        self.residual = math.inf

    def _at(self, whole: Tensor) -> Tensor:
        return whole[self.rows, self.a]

    def sweep(self, center: Tensor, V: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """First (Ŵ, B) for given V, then (V_0, V) for given (Ŵ, B); Θ̄ is moved by V_0 and brought back to the point
        of least norm."""
        d, e = center.shape[0], self.y.shape[1]
        P = attention.patterns(self.X, center.unsqueeze(0))
        h = self._at(attention.attend(P, self.X)).squeeze(1)
        t = self._at(attention.tangent(P, self.X, V)).flatten(1) if len(V) else h[:, :0]
        B = least_squares(torch.cat([h, t], dim=1), self.y)
        W, B = B[:d], B.view(-1, d, e)  # B_0 = Ŵ goes with V_0, the error of Θ̄
        left = self.y - h @ W
        self.residual = float((left - t @ B[1:].flatten(0, 1)).square().sum() / left.square().sum()) ** 0.5

        def image(U: Tensor) -> Tensor:
            return torch.einsum("rmd,mde->re", self._at(attention.tangent(P, self.X, U)), B)

        def adjoint(R: Tensor) -> Tensor:
            full = self.X.new_zeros(*self.X.shape[:2], len(B), d)
            full[self.rows, self.a] = torch.einsum("re,mde->rmd", R, B)
            return attention.cotangent(P, self.X, full, d)

        start = torch.cat([torch.zeros_like(center).unsqueeze(0), V])
        wanted = adjoint(left - image(start))
        step, _ = conjugate_gradients(lambda U: adjoint(image(U)), lambda v: v, wanted, 1e-4, 200)
        U = start + step
        Q: Tensor = torch.linalg.qr(U[1:].flatten(1).T)[0]
        moved = (center + U[0]).flatten()
        moved = moved - Q @ (Q.T @ moved)
        return moved.view(d, d), Q.T.reshape(-1, d, d), W
