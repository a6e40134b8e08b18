"""min over thin factors of ‖Y − F(X)‖² with Θ_i = A_iB_iᵀ and W_i = V_iO_i, O and c eliminated.

Layers as they are trained have heads of size q: queries X̃A_i, keys XB_i, values XV_i, each k × q. Given (A, B, V)
the best (O, c) solve one least-squares problem with the features H = [P_1XV_1 | … | P_mXV_m | 1], m·q + 1 columns
in place of m·d + 1. As in projected.py the Jacobian is taken as J = (I − Π) dH O, so that with K = OOᵀ

    JᵀJ v = adjoint of dH applied to (dH − HG⁻¹HᵀdH) K,        G = HᵀH,

and nothing as wide as the labels is met in a product: about 18·d·m·q flops a row, against 12·m·d² with free W_i.
The gauges A → AT, B → BT⁻ᵀ and V → VT are left free: conjugate gradients started at zero never move along them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.core import attention
from headway.core.devices import normal
from headway.linalg.projected import Problem, Rows, cholesky

Heads = tuple[Tensor, Tensor, Tensor, Tensor]  # Q, K, Z, P of a chunk, (n, m, k, q) and (n, m, k, k)


class Thin:
    """(A, B, V) of all heads, held as (m, (r + d)·q + d·p): Θ of rank q, W of rank p, r = d or d + 1."""

    def __init__(self, value: Tensor, width: int, rows: int, q: int) -> None:
        self.value, self.width, self.rows, self.q = value, width, rows, q
        self.A, self.B, self.V = self.parts(value)

    @classmethod
    def of(cls, Theta: Tensor, W: Tensor, q: int, p: int) -> Thin:
        """The best approximation of these ranks; A and B balanced, V orthonormal."""
        # A few singular value decompositions of this size take ten times as long on a GPU.
        U, s, Vh = (part.to(Theta) for part in torch.linalg.svd(Theta.cpu(), full_matrices=False))
        root = s[:, :q].sqrt().unsqueeze(1)
        V = torch.linalg.svd(W.cpu(), full_matrices=False)[0][:, :, :p].to(W)
        parts = [U[:, :, :q] * root, Vh[:, :q].mT * root, V]
        return cls(torch.cat([part.flatten(1) for part in parts], dim=1), Theta.shape[2], Theta.shape[1], q)

    def parts(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """v as (A, B, V)."""
        m, first, second = len(v), self.rows * self.q, (self.rows + self.width) * self.q
        return (v[:, :first].reshape(m, self.rows, self.q), v[:, first:second].reshape(m, self.width, self.q),
                v[:, second:].reshape(m, self.width, -1))

    @classmethod
    def joined(cls, A: Tensor, B: Tensor, V: Tensor) -> Thin:
        return cls(torch.cat([part.flatten(1) for part in (A, B, V)], dim=1), B.shape[1], A.shape[1], A.shape[2])

    def theta(self) -> Tensor:
        return self.A @ self.B.mT

    def growth(self) -> Tensor:
        """The direction in which the Θ_i grow; V has no part in it."""
        A, B, V = self.parts(self.value)
        return torch.cat([A.flatten(1), B.flatten(1), torch.zeros_like(V).flatten(1)], dim=1)

    def like(self, value: Tensor) -> Thin:
        """Other heads of the same sizes."""
        return Thin(value, self.width, self.rows, self.q)

    def moved(self, v: Tensor) -> Thin:
        return self.like(self.value + v)

    def to(self, dtype: torch.dtype) -> Thin:
        return self.like(self.value.to(dtype))


@dataclass(frozen=True)
class ThinPoint:
    """Θ, W = VO and c with their loss; what products need again."""

    Theta: Tensor
    W: Tensor
    offset: Tensor | None
    out: Tensor  # O, (m·p, e)
    loss: float
    residuals: tuple[Tensor, ...]
    factor: Tensor  # Cholesky, of HᵀH
    kept: tuple[tuple[Heads, Tensor], ...]


def thin_point(problem: Problem, shape: Thin) -> ThinPoint:
    """The best (O, c) for these (A, B, V)."""
    m, _, p = shape.V.shape
    kept = []
    for rows in problem.chunks:
        heads = heads_of(rows, shape)
        kept.append((heads, features(rows, heads[3] @ heads[2], problem.offset)))
    best, residuals, loss, factor = outputs(problem, [H for _, H in kept])
    out, offset = (best[:-1], best[-1]) if problem.offset else (best, None)
    W = shape.V @ out.view(m, p, -1)
    return ThinPoint(shape.theta(), W, offset, out, loss, residuals, factor, tuple(kept))


def point_at(problem: Problem, shape: Thin, out: Tensor, offset: Tensor | None) -> ThinPoint:
    """A layer as it is, O (m, p, e) and c given. Columns of V that are 0 take no part."""
    kept, residuals = [], []
    for rows in problem.chunks:
        heads = heads_of(rows, shape)
        kept.append((heads, features(rows, heads[3] @ heads[2], problem.offset)))
        B = out.flatten(0, 1) if offset is None else torch.cat([out.flatten(0, 1), offset.unsqueeze(0)])
        residuals.append(rows.Y.flatten(0, 1) - kept[-1][1] @ B)
    G = torch.stack([H.T @ H for _, H in kept]).sum(0)
    factor = cholesky(G + torch.diag((G.diagonal() == 0).to(G)))
    return ThinPoint(shape.theta(), shape.V @ out, offset, out.flatten(0, 1),
                     sum(float(r.square().sum()) for r in residuals), tuple(residuals), factor, tuple(kept))


class Eliminated:
    """v ↦ Jᵀ(I − Π)J v at one point, in a chosen precision, O and c eliminated. A subclass says what H is."""

    def __init__(self, problem: Problem, point: Any, shape: Any, dtype: torch.dtype) -> None:
        self.problem, self.shape = problem.to(dtype), shape.to(dtype)
        eye = torch.eye(len(point.factor), dtype=point.factor.dtype, device=point.factor.device)
        root = torch.linalg.solve_triangular(point.factor, eye, upper=False)
        self.inverse: Tensor = (root.T @ root).to(dtype)
        self.O: Tensor = point.out.to(dtype)
        self.K = self.O @ self.O.T
        self.kept: list[tuple[Any, Tensor]] = []

    def _parts(self, v: Tensor) -> Any:
        """A change of the unknowns by name."""
        raise NotImplementedError

    def _push(self, rows: Rows, made: Any, parts: Any) -> Tensor:
        """What it changes of H, (n, m, k, p)."""
        raise NotImplementedError

    def _back(self, rows: Rows, made: Any, gH: Tensor) -> Tensor:
        """Adjoint of unknowns ↦ H."""
        raise NotImplementedError

    def gradient(self, residuals: Sequence[Tensor]) -> Tensor:
        """Jᵀr; r is orthogonal to the features already."""
        g = torch.zeros_like(self.shape.value)
        for rows, (made, _), r in zip(self.problem.chunks, self.kept, residuals, strict=True):
            g += self._back(rows, made, r.to(g.dtype) @ self.O.T)
        return self.problem.ranks.total(g)

    def curvature(self, v: Tensor) -> Tensor:
        changes = self._changes(v)
        S = self.following(changes)
        g = torch.zeros_like(v)
        for rows, (made, H), dH in zip(self.problem.chunks, self.kept, changes, strict=True):
            g += self._back(rows, made, (dH - H @ S) @ self.K)
        return self.problem.ranks.total(g)

    def _changes(self, v: Tensor) -> list[Tensor]:
        """dH, (rows, features but the constant) for every chunk."""
        parts = self._parts(v)
        return [features(rows, self._push(rows, made, parts), False)
                for rows, (made, _) in zip(self.problem.chunks, self.kept, strict=True)]

    def images(self, v: Tensor) -> list[Tensor]:
        """dH O, (rows, e) for every chunk: what the labels show of a change with O and c known."""
        return [dH @ self.O for dH in self._changes(v)]

    def following(self, images: Sequence[Tensor]) -> Tensor:
        """G⁻¹Hᵀ·images: the change of O and c that shows most of them."""
        R = torch.stack([H.T @ image for (_, H), image in zip(self.kept, images, strict=True)]).sum(0)
        return self.inverse @ self.problem.ranks.total(R)

    def unseen(self, images: Sequence[Tensor], B: Tensor) -> list[Tensor]:
        """images − HB."""
        return [image - H @ B for (_, H), image in zip(self.kept, images, strict=True)]


class ThinProducts(Eliminated):
    """The same with H_i = P_iXV_i."""

    shape: Thin

    def __init__(self, problem: Problem, point: ThinPoint, shape: Thin, dtype: torch.dtype) -> None:
        super().__init__(problem, point, shape, dtype)
        self.W = point.W.to(dtype)
        self.kept = [((Q.to(dtype), K.to(dtype), Z.to(dtype), P.to(dtype)), H.to(dtype))
                     for (Q, K, Z, P), H in point.kept]

    def _parts(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.shape.parts(v)

    def _push(self, rows: Rows, heads: Heads, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        (Q, K, Z, P), (dA, dB, dV) = heads, parts
        dQ, dK = attention.apart(attention.queries(rows.X, dA), dA), attention.apart(rows.X, dB)
        dP = attention.softmax_rule(P, dQ @ K.mT + Q @ dK.mT)
        return dP @ Z + P @ attention.apart(rows.X, dV)

    def _back(self, rows: Rows, heads: Heads, gH: Tensor) -> Tensor:
        """Adjoint of (A, B, V) ↦ H."""
        Q, K, Z, P = heads
        n, m, k, p = Z.shape
        if rows.valid is not None:
            gH = gH * rows.valid.reshape(n * k, 1)
        g = gH.view(n, k, m, p).transpose(1, 2)
        gS = attention.softmax_rule(P, g @ Z.mT)
        flat = rows.X.reshape(n * k, -1)
        first = attention.queries(rows.X, self.shape.A).reshape(n * k, -1)
        parts = [attention.together(first, gS @ K), attention.together(flat, gS.mT @ Q),
                 attention.together(flat, P.mT @ g)]
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def moments(self, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """(S, M, T), in which a small change costs: of Θ_i about tr(S_i δ M_i δᵀ), of W_i about tr(δᵀT_iδ).

        M_i = Σ_rows C W_iW_iᵀ C is the keys' side (by one random probe a row, as in projected.Products.blocks).
        S_i is the queries' second moment, each row weighted by its part of tr M_i: where a head is saturated on
        most rows its scores are determined by the few others, and directions of queries that only saturated rows
        have cost next to nothing. T_i = Σ_rows h_ih_iᵀ with h_i = P_iX what the head hands on.
        """
        m, r, _ = self.shape.A.shape
        d = self.shape.width
        M, T = (self.W.new_zeros(m, d, d) for _ in range(2))
        S = self.W.new_zeros(m, r, r)
        generator = self.problem.ranks.own(generator)
        for rows, ((_, _, _, P), _) in zip(self.problem.chunks, self.kept, strict=True):
            omega = normal(rows.Y, generator)
            if rows.valid is not None:
                omega = omega * rows.valid
            g = attention.apart(omega, self.W.mT)
            keys = rows.X.unsqueeze(1)
            change = (attention.softmax_rule(P, g @ keys.mT) @ keys).transpose(0, 1).reshape(m, -1, d)
            handed = P @ keys if rows.valid is None else rows.valid.unsqueeze(1) * (P @ keys)
            handed = handed.transpose(0, 1).reshape(m, -1, d)
            asking = change.norm(dim=2, keepdim=True) * attention.queries(rows.X, self.shape.A).reshape(1, -1, r)
            M, T, S = M + change.mT @ change, T + handed.mT @ handed, S + asking.mT @ asking
        S, M, T = self.problem.ranks.totals(S, M, T)
        total = M.diagonal(dim1=1, dim2=2).sum(1).clamp_min(torch.finfo(M.dtype).tiny * 1e6)
        return S / total[:, None, None], M, T

    def queries(self) -> Tensor:
        """The queries' second moment, all rows alike."""
        S: Tensor = self.W.new_zeros(self.shape.rows, self.shape.rows)
        for rows in self.problem.chunks:
            asking = attention.queries(rows.X, self.shape.A)
            asking = (asking if rows.valid is None else asking * rows.valid).flatten(0, 1)
            S = S + asking.mT @ asking
        return self.problem.ranks.total(S) / self.problem.rows


def heads_of(rows: Rows, shape: Thin) -> Heads:
    Q, K, Z = (attention.apart(X, part) for X, part in (
        (attention.queries(rows.X, shape.A), shape.A), (rows.X, shape.B), (rows.X, shape.V)))
    S = Q @ K.mT
    if rows.see is not None:
        S = S.masked_fill(~rows.see.unsqueeze(1), float("-inf"))
    return Q, K, Z, torch.softmax(S, dim=3)


def features(rows: Rows, H: Tensor, offset: bool) -> Tensor:
    """(n, m, k, p) to (n·k, m·p), with a column of ones; zero on rows that do not count."""
    n, m, k, p = H.shape
    flat = H.transpose(1, 2).reshape(n * k, m * p)
    if offset:
        flat = torch.cat([flat, flat.new_ones(n * k, 1)], dim=1)
    return flat if rows.valid is None else flat * rows.valid.reshape(n * k, 1)


def outputs(problem: Problem, kept: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...], float, Tensor]:
    """[O; c] that is best for these features, what it leaves, Σ‖r‖², and the Cholesky factor of HᵀH."""
    G = kept[0].T @ kept[0]
    for H in kept[1:]:
        G += H.T @ H
    G = problem.ranks.total(G)
    factor = cholesky(G)
    pairs = [(rows.Y.reshape(-1, rows.Y.shape[2]), H) for rows, H in zip(problem.chunks, kept, strict=True)]
    best: Tensor | None = None
    for _ in range(2):  # the second time refines
        left = [H.T @ (Y if best is None else Y - H @ best) for Y, H in pairs]
        found = torch.cholesky_solve(problem.ranks.total(torch.stack(left).sum(0)), factor)
        best = found.contiguous() if best is None else best + found
    assert best is not None
    residuals = tuple(Y - H @ best for Y, H in pairs)
    loss = problem.ranks.total(sum(float(r.double().square().sum()) for r in residuals))
    return best, residuals, loss, factor
