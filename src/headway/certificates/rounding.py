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
    """Of products in thin factors (thin.py), O and c eliminated: step by step, each with the lengths that it meets.

    Of a row and a head, the largest over keys x_b: ξ = |x̃L|, ρ = |x_bR|, τ = |x_bE|, κ = |x_bBσ^{-½}|,
    χ = |x̃Aσ^{-½}|, z = |x_bV|. A unit change (Z, Y) moves a score by a = √(ξ²κ² + χ²ρ²) at most. What is off in
    units of eps, with ‖·‖ for a spectral norm, ‖·‖_F for Frobenius' and |L| for absolute values, entry by entry:
    of x̃dA and its product with a key, and alike of dB; after patterns, V and O; and of dV,

        h = (r + q + 2)|x̃|(‖L‖ + ‖|L|‖)κ + dξ|x_b|‖Bσ^{-½}‖_F + qξκ,
        (z(2h + (4k + 12 + 4s)a) + 2a·d|x_b|‖V‖_F)‖O‖ + (mp + e)2az‖|O|‖,
        (d + p + 2)|x_b|(‖E‖ + ‖|E|‖) + (k + 2s)τ + (mp + e)τ‖|s⁻¹O|‖,

    with s what a score is off. On the way back a sum over rows comes to it, of ``piece`` terms times the same
    lengths with |x̃|‖L‖ for ξ, |x_b|‖R‖ for ρ, |x_b|‖E‖ for τ.
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
        (L, La), (R, Ra), (E, Ea), (wide, wide_all), (_, wa) = (
            [torch.linalg.matrix_norm(part, 2).view(1, m, 1) for part in (M, M.abs())]
            for M in (*roots, out, narrow.mT * out))
        A, B, V = ((F * by).flatten(1).norm(dim=1).view(1, m, 1)
                   for F, by in ((base.A, shrink), (base.B, shrink), (base.V, 1.0)))
        whole_A, whole_B = (F.flatten(1).norm(dim=1).view(1, m, 1) for F in (base.A, base.B))
        delta = turned = 0.0
        for rows in chunks:
            asking, X = attention.queries(rows.X, base.A), rows.X
            Q, K = attention.apart(asking, base.A), attention.apart(X, base.B)
            ask, key = asking.norm(dim=2).unsqueeze(1), X.norm(dim=2).amax(1).view(-1, 1, 1)
            xi = attention.apart(asking, roots[0]).norm(dim=3)
            rho, tau, z = (_longest(attention.apart(X, F)) for F in (*roots[1:], base.V))
            kappa, chi = _longest(K * shrink), (Q * shrink).norm(dim=3)
            asked, most = Q.norm(dim=3), _longest(K)
            s = r * ask * whole_A * most + d * key * whole_B * asked + q * asked * most
            a = torch.hypot(xi * kappa, chi * rho)
            by_a = (r + q + 2) * ask * (L + La) * kappa + d * xi * key * B + q * xi * kappa
            by_b = (d + q + 2) * key * (R + Ra) * chi + r * rho * ask * A + q * rho * chi
            moved = z * (2 * torch.hypot(by_a, by_b) + (4 * k + 12 + 4 * s) * a) + 2 * a * d * key * V
            back = 2 * piece * z * wide * torch.hypot(ask * L * kappa, chi * key * R)
            theta = moved * wide + (m * p + e) * 2 * a * z * wide_all + back
            value = (d + p + 2) * key * (E + Ea) + (k + 2 * s) * tau + (m * p + e) * tau * wa + piece * key * E
            delta += float((theta.square() + value.square()).sum())
            turned += float((2 * s * z).square().sum())
        F, column = len(G), float(G.diagonal()[G.diagonal() > 0].min())
        ridge, least = 8 * eps * float(G.diagonal().mean()) / column, max(least, 1e-300)
        off = (eps * F * (piece + 3 * F) + ridge) / least + 2 * eps * math.sqrt(turned / (column * least))
        return cls(eps, stretch * eps * math.sqrt(delta), off, base.value.numel())


def _longest(parts: Tensor) -> Tensor:
    """Of (n, m, keys, ·) the longest, (n, m, 1)."""
    longest: Tensor = parts.norm(dim=3).amax(2, keepdim=True)
    return longest
