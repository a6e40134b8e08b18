"""Jᵀ(I − Π)J in white coordinates: what the labels show of a change of the heads, relative to what such a change is
worth if nothing undoes it.

That worth is D_i = S_i ⊗ M_i, with M_i = Σ_rows C W_iW_iᵀ C and S_i the second moment of the queries, each row
weighted by its part of M_i. With D = I the operator is C, of eigenvalues of order one where nothing is wrong.

Some directions D has not: those of queries that S_i has not, of keys that M_i has not. They are *empty*: whatever
stands on their other side, the labels show nothing of it. They are counted and left out. Of heads of low rank only
changes that keep the rank are looked at, and no change of the factors that leaves Θ_i and W_i as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from headway.core import attention
from headway.learning.shapes import Factored
from headway.linalg.projected import Point, Problem, Products
from headway.linalg.thin import Thin, ThinPoint, ThinProducts

EMPTY = 1e-9  # eigenvalue of S_i or M_i, relative to their mean, below which a direction is not there
FAINT = 1e-16  # the same for M_i, relative to the largest head: rounding shows no less
RANK = 1e-9  # singular value, relative to the largest, above which a direction counts to the rank


class White(Protocol):
    """C, on changes of all heads held as (m, …) and projected onto those that count. Of each head's ``directions``
    that many are ``empty``."""

    directions: tuple[int, ...]
    empty: tuple[int, ...]
    count: int

    def like(self) -> Tensor: ...
    def project(self, y: Tensor) -> Tensor: ...
    def curvature(self, y: Tensor) -> Tensor: ...


class Side:
    """One side D of every head, (m, d, d): ``root`` R has RᵀDR = I on directions that ``live``, ``back`` is R⁻¹."""

    def __init__(self, D: Tensor, least: Tensor | float = 0.0) -> None:
        D = (D + D.mT) / 2
        mean = D.diagonal(dim1=1, dim2=2).mean(1)
        bound = (EMPTY * mean + least).clamp_min(torch.finfo(D.dtype).tiny * 1e6)[:, None, None]
        eye = torch.eye(D.shape[1], dtype=D.dtype, device=D.device)
        self.live = D.new_ones(D.shape[:2])
        if not bool(torch.linalg.cholesky_ex(D - bound * eye)[1].any()):  # all eigenvalues are above
            self.back = torch.linalg.cholesky(D).mT
            self.root = torch.linalg.solve_triangular(self.back, eye.expand_as(D), upper=True)
            return
        values, vectors = (part.to(D) for part in torch.linalg.eigh(D.cpu()))
        root = values.unsqueeze(1).clamp_min(bound).sqrt()
        self.root, self.back = vectors / root, (vectors * root).mT
        self.live = (values > bound.squeeze(1)).to(D)

    def counts(self) -> list[int]:
        return [int(n) for n in self.live.sum(1)]


class Scores:
    """Changes δ of Θ_i as white y: δ = R y Kᵀ with the roots of S_i and of M_i.

    Of low rank, Θ_i = A_iB_iᵀ, those changes count that keep it: {y : (I − P_U) y (I − P_V) = 0} with the
    projectors onto the columns of R⁻¹A_i and of K⁻¹B_i.
    """

    def __init__(self, S: Tensor, M: Tensor, low: tuple[Tensor, Tensor] | None) -> None:
        loudest = M.diagonal(dim1=1, dim2=2).mean(1).max()
        self.queries, self.keys = Side(S), Side(M, FAINT * loudest)
        self.mask = self.queries.live.unsqueeze(2) * self.keys.live.unsqueeze(1)
        r, d = S.shape[1], M.shape[1]
        live = list(zip(self.queries.counts(), self.keys.counts(), strict=True))
        self.spaces: tuple[Tensor, Tensor] | None = None
        self.directions = (r * d,) * len(live)
        left = [a * b for a, b in live]
        if low is not None:
            A, B = self.queries.back @ low[0], self.keys.back @ low[1]
            full = _spaces(A, B)[2]
            U, V, ranks = _spaces(A * self.queries.live.unsqueeze(2), B * self.keys.live.unsqueeze(2))
            self.spaces = U, V
            self.directions = tuple(q * (r + d - q) for q in full)
            left = [q * (a + b - q) for q, (a, b) in zip(ranks, live, strict=True)]
        self.empty = tuple(n - some for n, some in zip(self.directions, left, strict=True))

    def out(self, y: Tensor) -> Tensor:
        change: Tensor = self.queries.root @ y @ self.keys.root.mT
        return change

    def into(self, G: Tensor) -> Tensor:
        """Adjoint of ``out``."""
        y: Tensor = self.queries.root.mT @ G @ self.keys.root
        return y

    def project(self, y: Tensor) -> Tensor:
        y = y * self.mask
        if self.spaces is None:
            return y
        U, V = self.spaces
        rest = y - U @ (U.mT @ y)
        return y - rest + (rest @ V) @ V.mT


def _spaces(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Orthonormal bases of the column and row spaces of A_iB_iᵀ, filled up with zeros, and its ranks."""
    (P, a), (Q, b) = torch.linalg.qr(A), torch.linalg.qr(B)
    U, s, Vh = torch.linalg.svd(a @ b.mT)
    own = (s > RANK * s[:, :1].clamp_min(1e-300)).to(s)
    return P @ U * own.unsqueeze(1), Q @ Vh.mT * own.unsqueeze(1), [int(n) for n in own.sum(1)]


class FreeWhite(Products):
    """Θ_i free, or of low rank; W_i free."""

    def __init__(self, problem: Problem, point: Point, low: Factored | None, generator: torch.Generator) -> None:
        super().__init__(problem, point, torch.float64)
        self.count = 0
        self.scores = Scores(*self.moments(generator), None if low is None else (low.A, low.B))
        self.directions, self.empty = self.scores.directions, self.scores.empty

    def like(self) -> Tensor:
        return torch.zeros_like(self.Theta)

    def project(self, y: Tensor) -> Tensor:
        return self.scores.project(y)

    def curvature(self, y: Tensor) -> Tensor:
        self.count += 2
        return self.project(self.scores.into(super().curvature(self.scores.out(y))))

    def dense(self) -> Tensor:
        """C as a matrix (m·r·d, m·r·d), not projected.

        With x̂_i = Rᵀx̃ and T_i = KᵀCW_i of every row, JᵀJ has the blocks Σ_rows x̂_ix̂_jᵀ ⊗ T_iT_jᵀ, and W and c take
        away FG⁻¹Fᵀ with F = Σ_rows x̂_i ⊗ T_i ⊗ h, G = HᵀH: sums over rows of small products, never a Jacobian.
        """
        m, r, d = self.Theta.shape
        C = self.Theta.new_zeros(m, m, r, r, d, d)
        F: Tensor | float = 0.0
        for P, H, X, asking in self._pieces():
            asking = torch.einsum("np,mpq->nmq", asking, self.scores.queries.root)
            T = _responses(P, X, self.W, self.scores.keys.root)
            for a in range(m):
                for b in range(a + 1):
                    pairs = (asking[:, a].unsqueeze(2) * asking[:, b].unsqueeze(1)).flatten(1)
                    C[a, b] += (pairs.T @ (T[:, a] @ T[:, b].mT).flatten(1)).view(r, r, d, d)
            each = (asking.unsqueeze(3) * H[:, None, None]).transpose(0, 1).flatten(2)  # (m, rows, r·features)
            F = F + each.mT @ T.transpose(0, 1).flatten(2)  # (m, r·features, d·e)
        assert isinstance(F, Tensor)
        C, F = self.problem.ranks.total(C), self.problem.ranks.total(F)
        for a in range(m):
            for b in range(a):
                C[b, a] = C[a, b].transpose(0, 1).transpose(2, 3)
        F = F.view(m, r, -1, d, self.W.shape[2]).transpose(2, 3)
        shown = (self.inverse @ F).reshape(m * r * d, -1)
        return C.permute(0, 2, 4, 1, 3, 5).reshape(m * r * d, -1) - shown @ shown.T

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Patterns, features, tokens and queries (0 on rows that do not count) of some sequences at a time."""
        m, r, d = self.Theta.shape
        for i, rows in enumerate(self.problem.chunks):
            (P, H), k = self._at(i), rows.X.shape[1]
            asking = attention.queries(rows.X, self.Theta)
            asking = asking if rows.valid is None else asking * rows.valid
            widest = max(d * k, d * self.W.shape[2], r * H.shape[1], r * r, d * d)
            step = max(1, self.problem.budget.dense // (8 * k * m * widest))
            for at in range(0, len(rows.X), step):
                some = slice(at, at + step)
                yield P[some], H[at * k : (at + step) * k], rows.X[some], asking[some].flatten(0, 1)


def _responses(P: Tensor, X: Tensor, W: Tensor, K: Tensor) -> Tensor:
    """K_iᵀ C_i W_i of every row, (n·k, m, d, e), with C_i = Σ_b p_b (x_b − h)(x_b − h)ᵀ."""
    apart = X[:, None, None] - attention.attend(P, X).unsqueeze(3)  # (n, a, m, b, d)
    return ((P.unsqueeze(4) * (apart @ K)).mT @ (apart @ W)).flatten(0, 1)


def _back(A: Tensor) -> Tensor:
    """A⁺ of every head, whose columns are orthogonal: diag(1/‖a_j‖²)Aᵀ, empty columns left out."""
    squares = A.square().sum(1)
    own = squares > RANK * squares.max(1, keepdim=True).values
    return torch.where(own, 1 / squares.clamp_min(1e-300), 0.0).unsqueeze(2) * A.mT


class ThinWhite(ThinProducts):
    """Θ_i = A_iB_iᵀ and W_i = V_iO_i, of low rank both: a change is [δΘ_i | δV_i], white.

    δV_i costs tr(T_i δV_i O_iO_iᵀ δV_iᵀ), T_i the second moment of what the head hands on. What O_i can undo, V_i
    times anything, is left out.
    """

    def __init__(self, problem: Problem, point: ThinPoint, shape: Thin, generator: torch.Generator) -> None:
        super().__init__(problem, point, shape, torch.float64)
        self.count = 0
        S, M, T = self.moments(generator)
        A, B, V = self.shape.A, self.shape.B, self.shape.V
        self.scores, self.handed = Scores(S, M, (A, B)), Side(T)
        self.size = S.shape[1] * M.shape[1]
        self.solve = [_back(part) for part in (A, B)]
        m, d, p = V.shape
        Z, s, _ = (part.to(V) for part in torch.linalg.svd(self.O.view(m, p, -1).cpu(), full_matrices=False))
        own = (s > RANK * s[:, :1].clamp_min(1e-300)).to(s)  # of each W_i's own rank
        self.out_root = Z / s.clamp_min(1e-300).unsqueeze(1) * own.unsqueeze(1)
        self.mask = self.handed.live.unsqueeze(2) * own.unsqueeze(1)
        self.held = torch.linalg.qr(self.mask * (self.handed.back @ V @ Z))[0]
        ranks = [int(n) for n in own.sum(1)]
        self.directions = tuple(n + q * (d - q) for n, q in zip(self.scores.directions, ranks, strict=True))
        self.empty = tuple(n + q * (d - some) for n, q, some in zip(
            self.scores.empty, ranks, self.handed.counts(), strict=True))

    def like(self) -> Tensor:
        return self.O.new_zeros(len(self.W), self.size + self.shape.V[0].numel())

    def halves(self, y: Tensor) -> tuple[Tensor, Tensor]:
        m, d, p = self.shape.V.shape
        return y[:, : self.size].view(m, -1, d), y[:, self.size :].view(m, d, p)

    def project(self, y: Tensor) -> Tensor:
        first, second = self.halves(y)
        second = (second - self.held @ (self.held.mT @ second)) * self.mask
        return torch.cat([self.scores.project(first).flatten(1), second.flatten(1)], dim=1)

    def curvature(self, y: Tensor) -> Tensor:
        self.count += 2
        first, second = self.halves(y)
        change, (Ai, Bi) = self.scores.out(first), self.solve
        # δΘ = δA Bᵀ + A δBᵀ with δA = δΘ B⁺ᵀ and δBᵀ = A⁺δΘ(I − BB⁺), as δΘ keeps the rank.
        dA, dB = change @ Bi.mT, self._beside(change.mT @ Ai.mT)
        dV = self.handed.root @ second @ self.out_root.mT
        gA, gB, gV = self.shape.parts(super().curvature(torch.cat([part.flatten(1) for part in (dA, dB, dV)], 1)))
        G = gA @ Bi + Ai.mT @ self._beside(gB).mT
        back = self.scores.into(G), self.handed.root.mT @ gV @ self.out_root
        return self.project(torch.cat([part.flatten(1) for part in back], dim=1))

    def _beside(self, b: Tensor) -> Tensor:
        """Without what lies in the columns of B: (I − BB⁺)b, which is its own adjoint."""
        rest: Tensor = b - self.shape.B @ (self.solve[1] @ b)
        return rest
