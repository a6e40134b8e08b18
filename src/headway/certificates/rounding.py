"""How far a computed normal matrix can be from the exact one: part of every claim that its least eigenvalue is
above 0.

A sum of t products is off by at most t·eps·(sum of absolute values). For one row of the Jacobian that sum is
bounded by lengths: |x̃|ᵀ|V_i||x_b| ≤ |x̃|·ϱ·‖V_i‖_F, ϱ the longest token; the pattern then averages, twice, and
W_i follows. A score off by s changes a weight by a factor of at most 1 + 2s, to first order, and a pattern's
covariance by 4s. With S_i the scaling of the columns of Θ_i, the scaled Jacobian K in Θ is off by at most

    δ = eps·t·2ϱ²√(Σ|x̃|²)·√(Σ‖W_i‖_F²|S_i|²) + 4s·ϱ²√(rows)·√(Σ‖W_i‖²|S_i|²),

on the way there and, as its adjoint, on the way back; at the other end stands ‖K‖, or √λ where W is eliminated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.certificates.jacobian import Sample
from headway.core import attention
from headway.linalg.thin import Thin

LARGEST = 1e300  # in place of infinity, where a dead head or dependent features leave no bound: JSON has none


@dataclass(frozen=True)
class Lengths:
    """What the bounds are made of: the examples' and the layer's lengths, and how long the sums are."""

    eps: float
    token: float  # ϱ
    queries: float  # √(Σ|x̃|²)
    rows: int
    piece: int  # terms of a sum over rows: one chunk's, then one a chunk
    score: float  # s
    terms: int  # t, of a sum along one row of the chain

    @classmethod
    def of(cls, found: Sample) -> Lengths:
        Theta, chunks = found.layer.augmented, found.problem.chunks
        m, r, d = Theta.shape
        k, eps = chunks[0].X.shape[1], torch.finfo(found.problem.dtype).eps
        token = max(float(chunk.X.norm(dim=2).max()) for chunk in chunks)
        queries = math.sqrt(sum(float(attention.queries(chunk.X, Theta).square().sum()) for chunk in chunks))
        score = eps * (r + d) * token * math.sqrt(token**2 + r - d) * float(Theta.flatten(1).norm(dim=1).max())
        return cls(eps, token, queries, found.problem.rows, max(len(chunk.X) for chunk in chunks) * k + len(chunks),
                   score, 3 * (r + d) + 4 * k + m * d + found.layer.out_width)

    def jacobian(self, W: Tensor, left: float, right: Tensor, terms: int) -> float:
        """δ, for columns scaled by at most ``left`` on the queries' side and ``right`` (m,) on the keys'."""
        whole = left * float((torch.linalg.matrix_norm(W) * right).norm())
        largest = left * float((torch.linalg.matrix_norm(W, 2) * right).norm())
        return (self.eps * terms * 2 * self.token**2 * self.queries * whole
                + 4 * self.score * self.token**2 * math.sqrt(self.rows) * largest)


def dense(found: Sample, scale: Tensor, largest: float) -> float:
    """Of JᵀJ scaled to unit diagonal: every entry is a sum over all equations, of absolute values at most 1."""
    at, m = Lengths.of(found), found.layer.heads
    W, theta = found.layer.W, found.theta_unknowns
    right = scale[:theta].view(m, -1).max(1).values
    # The features' columns: a mean of tokens, off by the weights' 2s and its own k terms.
    features = (2 * at.score + at.eps * at.terms) * at.token * math.sqrt(at.rows * m * W.shape[2])
    off = at.jacobian(W, 1.0, right, at.terms) + features * float(scale[theta:].max())
    return min(at.eps * found.unknowns * found.problem.equations + 2 * math.sqrt(largest) * off, LARGEST)


@dataclass(frozen=True)
class Bound:
    """What both kinds of products come to: how far the scaled Jacobian, and the projector, are off at most."""

    eps: float
    jacobian: float
    projector: float
    size: int

    def ritz(self, steps: int, largest: float, known: float) -> float:
        """Of Ritz values after ``steps`` products: the errors of all of them together, and of the inner products
        that keep the vectors orthogonal. ``largest`` bounds the eigenvalues, ``known`` those with W known, ‖K‖²."""
        one = 2 * math.sqrt(largest) * self.jacobian + self.projector * known
        return min(math.sqrt(steps) * (one + self.eps * self.size * largest), LARGEST)


class Eliminated(Bound):
    """Of products with Jᵀ(I − Π)J, scaled, W and c eliminated through the features' Gram matrix G.

    With F features, g the least eigenvalue of G scaled to unit diagonal and h the shortest feature column,

        ‖Π̃ − Π‖ ≤ (eps·F·(terms of G + 3F) + ridge)/g + 4s·ϱ√(rows·m)/(h√g),

    by the sums in G, its Cholesky factor and the factor's inverse, the ridge added to it, and the patterns.
    """

    @classmethod
    def of(cls, found: Sample, G: Tensor, least: float, left: Tensor, right: Tensor, stretch: float) -> Eliminated:
        at, m = Lengths.of(found), found.layer.heads
        # Absolute row sums bound the spectral norm, of a matrix and of its absolute values.
        delta = at.jacobian(found.layer.W, stretch * float(left.abs().sum(1).max()),
                            right.abs().sum(2).max(1).values, at.terms + at.piece)
        F, column = len(G), float(G.diagonal().min().clamp_min(1e-300))
        ridge = 8 * at.eps * float(G.diagonal().mean()) / column
        least = max(least, 1e-300)
        turned = 4 * at.score * at.token * math.sqrt(at.rows * m / (column * least))
        return cls(at.eps, delta, (at.eps * F * (at.piece + 3 * F) + ridge) / least + turned,
                   found.layer.augmented.numel())


class ThinEliminated(Bound):
    """Of products in thin factors (thin.py), O and c eliminated.

    |A| has the absolute values of A as its entries. Of a row and a head let a be the length of
    (|x̃||L|)·(|x_b||B|σ^{-½}) and (|x̃||A|σ^{-½})·(|x_b||R|), the largest over keys: what a unit change (Z, Y)
    makes of a score, in absolute values all the way; z that of |x_b||V||O|, τ that of |x_b||E||s⁻¹O|. A score is
    off by s = eps·(r + 2q + 4)·(|x̃||A|)·(|x_b||B|) at most, so a weight by a factor of 1 + 2s and a pattern's
    covariance by 4s:

        δ² = Σ_rows Σ_i ((2·eps·t + 4s)az)² + ((eps·t + 2s)τ)²

    for sums of t terms along a row of the chain, and G and its projector as with free W.
    """

    @classmethod
    def of(
        cls, found: Sample, base: Thin, out: Tensor, roots: tuple[Tensor, Tensor, Tensor], shrink: Tensor,
        narrow: Tensor, G: Tensor, least: float, stretch: float,
    ) -> ThinEliminated:
        eps, chunks = torch.finfo(found.problem.dtype).eps, found.problem.chunks
        m, r, q = base.A.shape
        d, p, k, e = base.width, base.V.shape[2], chunks[0].X.shape[1], out.shape[2]
        piece = max(len(rows.X) for rows in chunks) * k + len(chunks)
        t = 3 * (r + d) + 4 * k + 4 * (q + p) + m * p + e + piece
        L, R, E, A, B, V = (part.abs() for part in (*roots, base.A, base.B, base.V))
        wide = torch.linalg.matrix_norm(out.abs(), 2)
        wide_out = torch.linalg.matrix_norm((narrow.mT * out).abs(), 2)
        delta = turned = 0.0
        for rows in chunks:
            X = rows.X.abs()
            asking = attention.queries(X, base.A)
            keys, queries = attention.apart(X, B), attention.apart(asking, A)  # (n, m, k, q)
            values = _longest(attention.apart(X, V))
            score = eps * (r + 2 * q + 4) * queries.norm(dim=3) * _longest(keys)
            a = torch.hypot(attention.apart(asking, L).norm(dim=3) * _longest(keys * shrink),
                            (queries * shrink).norm(dim=3) * _longest(attention.apart(X, R)))
            tau = _longest(attention.apart(X, E)) * wide_out.view(1, m, 1)
            each = ((2 * eps * t + 4 * score) * a * values * wide.view(1, m, 1)).square() + (
                (eps * t + 2 * score) * tau).square()
            delta += float(each.sum())
            turned += float((2 * score * values).square().sum())
        F, column = len(G), float(G.diagonal()[G.diagonal() > 0].min())
        ridge, least = 8 * eps * float(G.diagonal().mean()) / column, max(least, 1e-300)
        off = (eps * F * (piece + 3 * F) + ridge) / least + 2 * math.sqrt(turned / (column * least))
        return cls(eps, stretch * math.sqrt(delta), off, base.value.numel())


def _longest(parts: Tensor) -> Tensor:
    """Of (n, m, keys, ·) the longest, (n, m, 1)."""
    return parts.norm(dim=3).amax(2, keepdim=True)
