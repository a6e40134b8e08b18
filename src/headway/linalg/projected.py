"""min over (W, c) of ‖Y − F(X; Θ, W, c)‖² for given Θ, and products with what is left of the Jacobian in Θ.

Given Θ the best (W, c) solve one linear least-squares problem with the features H = [P_1X | … | P_mX | 1]. With Π
the projector onto the columns of H the Jacobian of the projected residual is taken as J = (I − Π)·(dH W) (Kaufman's
form: the neglected term is of the size of the residual, and at an exact solution nothing is neglected). JᵀJ is then
the Schur complement of the full normal matrix after W and c. Used to solve (learn) and to judge (certify).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from headway.core import attention
from headway.core.budget import BUDGET, Budget
from headway.core.devices import normal
from headway.linalg.totals import ALONE, Alone


@dataclass(frozen=True)
class Rows:
    """Sequences in working coordinates: X (n, k, d), Y (n, k, e), what a query sees, which rows count."""

    X: Tensor
    Y: Tensor
    see: Tensor | None = None
    valid: Tensor | None = None  # (n, k, 1), 1 for rows that count, or the root of a weight; Y is multiplied

    def to(self, dtype: torch.dtype) -> Self:
        return self if self.X.dtype == dtype else replace(self, **{
            name: part.to(dtype) for name, part in vars(self).items()
            if isinstance(part, Tensor) and part.is_floating_point()})

    def patterns(self, Theta: Tensor) -> Tensor:
        return attention.patterns(self.X, Theta, self.see)

    def tangent(self, P: Tensor, dTheta: Tensor) -> Tensor:
        return attention.tangent(P, self.X, dTheta)

    def cotangent(self, P: Tensor, gH: Tensor, like: Tensor) -> Tensor:
        """Adjoint of ``tangent``, in the shape of ``like``."""
        return attention.cotangent(P, self.X, gH, like.shape[1])

    def key_side(self, P: Tensor, gH: Tensor) -> Tensor:
        """The part of ``cotangent`` that the queries' tokens are multiplied with."""
        return attention.key_side(P, self.X, gH)

    @property
    def count(self) -> int:
        """Rows that count."""
        return self.X.shape[0] * self.X.shape[1] if self.valid is None else int((self.valid > 0).sum())


@dataclass(frozen=True)
class LinearRows(Rows):
    """The same for scores without softmax: H_i = (S_i ∘ weight) X is linear in Θ, and so is its own tangent.

    weight (1 or n, k, k): 1 or 1/κ for the keys in sight, κ their number, 0 for others; None: 1 everywhere.
    """

    weight: Tensor | None = None

    def patterns(self, Theta: Tensor) -> Tensor:
        return attention.linear_patterns(self.X, Theta, self.weight)

    def tangent(self, P: Tensor, dTheta: Tensor) -> Tensor:
        return attention.attend(self.patterns(dTheta), self.X)

    def key_side(self, P: Tensor, gH: Tensor) -> Tensor:
        """C_a gH[n, a, i] with C_a = Σ_b weight_ab x_b x_bᵀ."""
        n, k, m, d = gH.shape
        S = torch.bmm(gH.reshape(n, k * m, d), self.X.transpose(1, 2)).view(n, k, m, k)
        return attention.attend(attention.weighted(S, self.weight), self.X)

    def cotangent(self, P: Tensor, gH: Tensor, like: Tensor) -> Tensor:
        n, k, m, d = gH.shape
        T = self.key_side(P, gH).reshape(n * k, m * d)
        return (self.X.reshape(n * k, d).T @ T).view(d, m, d).transpose(0, 1)


@dataclass(frozen=True)
class Problem:
    """Least squares over chunks of rows; ``offset`` says whether a constant c is fitted, ``own`` whether a linear
    function of the row's own token is, as a connection around the layer would add. The rows may be a part of all,
    with the others on other ``ranks``: sums over them are then totals."""

    chunks: tuple[Rows, ...]
    offset: bool = True
    own: bool = False
    ranks: Alone = ALONE
    budget: Budget = BUDGET

    @property
    def dtype(self) -> torch.dtype:
        return self.chunks[0].X.dtype

    @cached_property
    def rows(self) -> int:
        return self.ranks.total(sum(chunk.count for chunk in self.chunks))

    @cached_property
    def sequences(self) -> int:
        return self.ranks.total(sum(len(chunk.X) for chunk in self.chunks if chunk.count))

    @property
    def equations(self) -> int:
        return self.rows * self.chunks[0].Y.shape[2]

    def to(self, dtype: torch.dtype) -> Problem:
        return replace(self, chunks=tuple(chunk.to(dtype) for chunk in self.chunks))

    def variation(self) -> float:
        """Σ‖y − ȳ‖²: what a constant would leave; relative residuals are measured against it."""
        total, N = 0.0, 0.0
        mean: Tensor | float = 0.0
        for c in self.chunks:
            Y = c.Y.double()
            total += float(Y.square().sum())
            N += float(c.X.shape[0] * c.X.shape[1] if c.valid is None else c.valid.double().square().sum())
            mean = mean + (Y if c.valid is None else Y * c.valid).sum((0, 1))
        assert isinstance(mean, Tensor)
        total, N, middle = self.ranks.totals(total, N, mean)
        return max(float(total) - float(middle.square().sum()) / max(float(N), 1e-300), 1e-300)


@dataclass(frozen=True)
class Point:
    """Θ with its best (W, c): loss Σ‖r‖², residuals, the Cholesky factor of HᵀH, kept P and H if small."""

    Theta: Tensor
    W: Tensor
    offset: Tensor | None
    loss: float
    residuals: tuple[Tensor, ...]
    factor: Tensor
    kept: tuple[tuple[Tensor, Tensor], ...] | None


def features_of(rows: Rows, Theta: Tensor, offset: bool, own: bool = False) -> tuple[Tensor, Tensor]:
    P = rows.patterns(Theta)
    n, k = P.shape[:2]
    H = attention.attend(P, rows.X)
    if own:
        H = torch.cat([H, rows.X.unsqueeze(2)], dim=2)
    if rows.valid is not None:
        H = H * rows.valid.unsqueeze(3)
    H = H.view(n * k, -1)
    if offset:
        ones = H.new_ones(n * k, 1) if rows.valid is None else rows.valid.reshape(n * k, 1)
        H = torch.cat([H, ones], dim=1)
    return P, H


def cholesky(G: Tensor) -> Tensor:
    """Factor of G, or of several, plus the least ridge that makes them numerically definite (equal or dead heads do
    not)."""
    factor: Tensor
    eye = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
    mean = G.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    ridge = 8 * torch.finfo(G.dtype).eps * mean + torch.finfo(G.dtype).tiny
    for _ in range(12):
        factor, info = torch.linalg.cholesky_ex(G + ridge * eye)
        if not bool(info.any()):
            return factor
        ridge = ridge * 32
    factor = torch.linalg.cholesky(G + ridge * eye)
    return factor


def evaluate(problem: Problem, Theta: Tensor) -> Point:
    """The best (W, c) for Θ, by normal equations with one step of refinement."""
    m, d = Theta.shape[0], problem.chunks[0].X.shape[2]
    size = (m + problem.own) * d + problem.offset
    e = problem.chunks[0].Y.shape[2]
    width = Theta.element_size() * (size + m * problem.chunks[0].X.shape[1])
    keep = problem.rows * width <= problem.budget.at(Theta.device, "cache")
    G, R = Theta.new_zeros(size, size), Theta.new_zeros(size, e)
    kept: list[tuple[Tensor, Tensor]] = []
    for rows in problem.chunks:
        P, H = features_of(rows, Theta, problem.offset, problem.own)
        G += H.T @ H
        R += H.T @ rows.Y.reshape(-1, e)
        if keep:
            kept.append((P, H))
    G, R = problem.ranks.totals(G, R)
    factor = cholesky(G)

    def features() -> Iterator[tuple[Rows, Tensor]]:
        for i, rows in enumerate(problem.chunks):
            yield rows, kept[i][1] if keep else features_of(rows, Theta, problem.offset, problem.own)[1]

    B = torch.cholesky_solve(R, factor)
    R = torch.zeros_like(R)
    for rows, H in features():
        R += H.T @ (rows.Y.reshape(-1, e) - H @ B)
    B = B + torch.cholesky_solve(problem.ranks.total(R), factor)
    residuals = tuple(rows.Y.reshape(-1, e) - H @ B for rows, H in features())
    loss = problem.ranks.total(sum(float(r.double().square().sum()) for r in residuals))
    offset = B[-1] if problem.offset else None
    return Point(Theta, B[: m * d].view(m, d, e), offset, loss, residuals, factor,
                 tuple(kept) if keep else None)


class Products:
    """v ↦ Jᵀ(I − Π)J v at one point, in a chosen precision."""

    def __init__(self, problem: Problem, point: Point, dtype: torch.dtype) -> None:
        self.problem = problem if problem.dtype == dtype else problem.to(dtype)
        eye = torch.eye(len(point.factor), dtype=point.factor.dtype, device=point.factor.device)
        # L⁻¹ once, so that each projection is two products: triangular solves of this size are slower.
        inverse = torch.linalg.solve_triangular(point.factor, eye, upper=False)
        self.Theta, self.W, self.inverse = (t.to(dtype) for t in (point.Theta, point.W, inverse))
        self.kept = None
        if point.kept is not None:
            self.kept = tuple((P.to(dtype), H.to(dtype)) for P, H in point.kept)

    def _at(self, i: int) -> tuple[Tensor, Tensor]:
        if self.kept is not None:
            return self.kept[i]
        return features_of(self.problem.chunks[i], self.Theta, self.problem.offset, self.problem.own)

    def gradient(self, residuals: Sequence[Tensor]) -> Tensor:
        """Jᵀr; r is orthogonal to the features already, so no projection is needed."""
        G = torch.zeros_like(self.Theta)
        for i, rows in enumerate(self.problem.chunks):
            U = residuals[i].to(G.dtype).view(*rows.X.shape[:2], -1)
            G += rows.cotangent(self._at(i)[0], attention.spread(U, self.W), G)
        return self.problem.ranks.total(G)

    def curvature(self, dTheta: Tensor) -> Tensor:
        images, R = self.images(dTheta)
        return self.back(images, self.solved(R))

    def images(self, dTheta: Tensor) -> tuple[list[Tensor], Tensor]:
        """dH W, (rows, e) for every chunk: what the labels show of dΘ with W known; and HᵀdH W."""
        found: list[Tensor] = []
        R: Tensor | float = 0.0
        for i, rows in enumerate(self.problem.chunks):
            P, H = self._at(i)
            dY = attention.project(rows.tangent(P, dTheta), self.W)
            if rows.valid is not None:
                dY = dY * rows.valid
            found.append(dY.view(-1, dY.shape[2]))
            R = R + H.T @ found[-1]
        assert isinstance(R, Tensor)
        return found, self.problem.ranks.total(R)

    def solved(self, R: Tensor) -> Tensor:
        """G⁻¹R, G = HᵀH."""
        B: Tensor = self.inverse.T @ (self.inverse @ R)
        return B

    def following(self, images: Sequence[Tensor]) -> Tensor:
        """G⁻¹Hᵀ·images: the change of W (and c) that shows most of them, (features, e)."""
        R = torch.stack([self._at(i)[1].T @ image for i, image in enumerate(images)]).sum(0)
        return self.solved(self.problem.ranks.total(R))

    def back(self, images: Sequence[Tensor], B: Tensor) -> Tensor:
        """The adjoint of dH W, of images − HB."""
        G = torch.zeros_like(self.Theta)
        for i, rows in enumerate(self.problem.chunks):
            P, H = self._at(i)
            U = (images[i] - H @ B).view(*rows.X.shape[:2], -1)
            G += rows.cotangent(P, attention.spread(U, self.W), G)
        return self.problem.ranks.total(G)

    def unseen(self, images: Sequence[Tensor], B: Tensor) -> list[Tensor]:
        """images − HB."""
        return [image - self._at(i)[1] @ B for i, image in enumerate(images)]

    def curvature_given_w(self, dTheta: Tensor) -> Tensor:
        """JᵀJ v with nothing projected out: the curvature were W and c known."""
        G = torch.zeros_like(self.Theta)
        for i, rows in enumerate(self.problem.chunks):
            P, _ = self._at(i)
            dY = attention.project(rows.tangent(P, dTheta), self.W)
            if rows.valid is not None:
                dY = dY * rows.valid
            G += rows.cotangent(P, attention.spread(dY, self.W), G)
        return self.problem.ranks.total(G)

    def blocks(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(Q, M): head i's block is about Q ⊗ M_i, Q the queries' second moment and M_i = Σ_rows C W_iW_iᵀ C the
        keys' side, estimated by one random probe ω per row:

        E[(C W_i ω)(C W_i ω)ᵀ] = C W_iW_iᵀ C, and C W_i ω is what ``cotangent`` sends to the key side.
        """
        m, r, d = self.Theta.shape
        M = self.Theta.new_zeros(m, d, d)
        Q = self.Theta.new_zeros(r, r)
        generator = self.problem.ranks.own(generator)
        for i, rows in enumerate(self.problem.chunks):
            omega = normal(rows.Y, generator)
            queries = attention.queries(rows.X, self.Theta)
            if rows.valid is not None:
                omega, queries = omega * rows.valid, queries * rows.valid
            T = rows.key_side(self._at(i)[0], attention.spread(omega, self.W))
            M += torch.einsum("nkmd,nkme->mde", T, T)
            Q += torch.einsum("nkp,nkq->pq", queries, queries)
        M, Q = self.problem.ranks.totals(M, Q)
        return definite(Q / self.problem.rows, M)

    def moments(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """S_i and M_i: as ``blocks``, with each head's queries weighted by their rows' parts of M_i, nothing
        added."""
        m, r, d = self.Theta.shape
        S, M = self.Theta.new_zeros(m, r, r), self.Theta.new_zeros(m, d, d)
        generator = self.problem.ranks.own(generator)
        for i, rows in enumerate(self.problem.chunks):
            omega = normal(rows.Y, generator)
            omega = omega if rows.valid is None else omega * rows.valid
            T = rows.key_side(self._at(i)[0], attention.spread(omega, self.W))
            T = T.flatten(0, 1).transpose(0, 1)
            asking = T.norm(dim=2, keepdim=True) * attention.queries(rows.X, self.Theta).reshape(1, -1, r)
            S, M = S + asking.mT @ asking, M + T.mT @ T
        S, M = self.problem.ranks.totals(S, M)
        total = M.diagonal(dim1=1, dim2=2).sum(1).clamp_min(torch.finfo(M.dtype).tiny * 1e6)
        return S / total[:, None, None], M


def definite(Q: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """Second moments of queries (r, r) and of the keys' side (m, d, d), lifted enough to be inverted."""
    mean = M.diagonal(dim1=1, dim2=2).mean(1)
    lift = 1e-3 * mean + 1e-7 * mean.max() + torch.finfo(M.dtype).tiny * 1e6
    return (Q + 1e-3 * torch.eye(len(Q), dtype=Q.dtype, device=Q.device),
            M + lift.view(-1, 1, 1) * torch.eye(M.shape[1], dtype=M.dtype, device=M.device))
