"""v ↦ N v for heads as thin factors, N = J_1ᵀ(I − Π)J_1 in coordinates without gauge.

At Θ_i = A_iB_iᵀ, W_i = V_iO_i of ranks q_i, p_i, with S_i, M_i, T_i the second moments of queries, of the keys'
side and of what a head hands on (linalg.thin), L_i = S_i^{-½}, R_i = M_i^{-½}, E_i = T_i^{-½}:

    L_i⁻¹Θ_iR_i⁻¹ = Uσ𝒱ᵀ,     A_i = L_iUσ^½,   B_i = R_i𝒱σ^½,
    E_i⁻¹W_i = u s wᵀ,        V_i = E_iu,      O_i = s wᵀ.

Every layer of these ranks near this one is written in just one way as

    Θ_i' = (A_i + dA_i)(B_i + dB_i)ᵀ,   dA_i = L_iZσ^{-½},   dB_i = R_iYσ^{-½},   UᵀZ = 0,
    W_i' = (V_i + dV_i)(O_i + dO_i),    dV_i = E_iKs⁻¹,                           uᵀK = 0,

since UᵀL⁻¹Θ'R⁻¹ tells Y, what is left then tells Z, and W' alike. So no gauge of factors is met. To first order the
scaled change of Θ_i is t = Z𝒱ᵀ + UYᵀ, of length ‖(Z, Y)‖, and that of V_iO_i is Kwᵀ, of length ‖K‖. O and c are
eliminated. The dimension is Σ q_i(r + d − q_i) + p_i(d − p_i). Two directions of a head these moments misjudge:
that of Θ_i itself, to which a softmax answers little, and that of the identity, with which every token looks more
at itself in all rows alike. They are stretched or shrunk to curvature 1: (Z, Y, K) = Rv.

The layer that claims made here are about is that of the factors as they are stored: ``base``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.certificates.jacobian import Sample
from headway.certificates.rounding import ThinEliminated
from headway.core import attention
from headway.core.layer import AttentionLayer
from headway.linalg.thin import Thin, ThinProducts, point_at

STRETCH = 20.0  # by which coordinates are stretched or shrunk at most
LIFT = 1e-6  # of the mean eigenvalue, added to S_i, M_i and T_i: what inputs hardly visit stays finite


@dataclass(frozen=True)
class Root:
    """D^{-½} and D^½ of every head, D lifted."""

    down: Tensor
    up: Tensor

    @classmethod
    def of(cls, D: Tensor) -> Root:
        values, vectors = torch.linalg.eigh(D)
        mean = values.mean(1, keepdim=True).clamp_min(1e-300)
        values = values.clamp_min(0.0) + LIFT * mean

        def power(exponent: float) -> Tensor:
            root: Tensor = (vectors * values.pow(exponent).unsqueeze(1)) @ vectors.mT
            return root

        return cls(power(-0.5), power(0.5))


def _within(ranks: Sequence[int], like: Tensor) -> Tensor:
    """(m, 1, most): 1 for columns that a head has."""
    most = torch.arange(max(ranks), device=like.device)
    return (most < torch.tensor(ranks, device=like.device).unsqueeze(1)).to(like).unsqueeze(1)


class ThinScaled:
    """The operator of the module's first line at one layer of low ranks, on the sample's examples."""

    def __init__(self, found: Sample, generator: torch.Generator) -> None:
        assert found.ranks is not None and found.out_ranks is not None
        self.found = found
        layer, problem = found.layer, found.problem
        self.q, self.p = _within(found.ranks, layer.W), _within(found.out_ranks, layer.W)
        q, p = max(found.ranks), max(found.out_ranks)
        plain = Thin.of(layer.augmented, layer.W, q, p)
        first = point_at(problem, plain, plain.V.mT @ layer.W, layer.offset)
        self.moments = ThinProducts(problem, first, plain, problem.dtype).moments(generator)
        self.L, self.R, self.E = (Root.of(D) for D in self.moments)
        U, s, Vh = torch.linalg.svd(self.L.up @ layer.augmented @ self.R.up, full_matrices=False)
        self.U, self.V, self.sigma = U[:, :, :q] * self.q, Vh[:, :q].mT * self.q, s[:, None, :q] * self.q
        u, s, wh = torch.linalg.svd(self.E.up @ layer.W, full_matrices=False)
        self.u, self.s = u[:, :, :p] * self.p, s[:, None, :p] * self.p
        self.w = wh[:, :p] * self.p.mT
        half = self.sigma.sqrt()
        self.base = Thin.joined(self.L.down @ self.U * half, self.R.down @ self.V * half, self.E.down @ self.u)
        self.out_map = self.s.mT * self.w  # O
        self.shrink = torch.where(self.q > 0, half, torch.inf).reciprocal()
        self.narrow = torch.where(self.p > 0, self.s, torch.inf).reciprocal()
        point = point_at(problem, self.base, self.out_map, layer.offset)
        self.products = ThinProducts(problem, point, self.base, problem.dtype)
        G = self.gram = point.factor @ point.factor.T
        root = G.diagonal().clamp_min(1e-300).rsqrt()
        self.features = torch.linalg.eigvalsh(G * root[:, None] * root[None, :])
        self.ways, self.root = self._uneven()
        self.rounding = ThinEliminated.of(
            found, self.base, self.out_map, (self.L.down, self.R.down, self.E.down), self.shrink, self.narrow, G,
            float(self.features[0]), self.kappa)

    def _uneven(self) -> tuple[Tensor, Tensor]:
        """Orthonormal coordinates of Θ_i and of the tangent part of the identity, (m, ·, 2), and what takes their
        curvature to 1, less 1."""
        alone = torch.eye(self.base.rows, self.base.width, dtype=self.U.dtype, device=self.U.device)
        scaled = self.L.up @ alone @ self.R.up
        pairs = [(torch.zeros_like(self.U), self.V * self.sigma), (scaled @ self.V, scaled.mT @ self.U)]
        ways = torch.stack([self.tangent(self._joined(Z, Y, torch.zeros_like(self.u))) for Z, Y in pairs], dim=2)
        ways = torch.linalg.qr(ways)[0]
        answers = torch.stack([self._between(way) for way in ways.unbind(2)], dim=2)
        C = ways.mT @ answers
        values, vectors = torch.linalg.eigh((C + C.mT) / 2)
        root = (vectors * values.clamp(STRETCH**-2, STRETCH**2).rsqrt().unsqueeze(1)) @ vectors.mT
        return ways, root - torch.eye(2, dtype=root.dtype, device=root.device)

    @property
    def kappa(self) -> float:
        """How much longer (Z, Y, K) can be than v."""
        return max(1.0, 1.0 + float(torch.linalg.eigvalsh(self.root).max()))

    @property
    def dimension(self) -> int:
        d = self.found.layer.width
        assert self.found.out_ranks is not None
        return self.found.theta_unknowns + sum(p * (d - p) for p in self.found.out_ranks)

    everywhere = dimension  # of ``anywhere``

    @staticmethod
    def _joined(Z: Tensor, Y: Tensor, K: Tensor) -> Tensor:
        return torch.cat([part.flatten(1) for part in (Z, Y, K)], dim=1)

    def start(self, generator: torch.Generator) -> Tensor:
        """Its direction is uniform on the sphere of the coordinates."""
        v = torch.randn(self.base.value.shape, generator=generator, dtype=torch.float64)
        return self.tangent(v.to(self.base.value))

    anywhere = start

    def tangent(self, v: Tensor) -> Tensor:
        Z, Y, K = self.base.parts(v)
        Z, K = Z - self.U @ (self.U.mT @ Z), K - self.u @ (self.u.mT @ K)
        return self._joined(Z * self.q, Y * self.q, K * self.p)

    def out(self, t: Tensor) -> Tensor:
        """The change of (A, B, V)."""
        Z, Y, K = self.base.parts(t)
        return self._joined(self.L.down @ Z * self.shrink, self.R.down @ Y * self.shrink,
                            self.E.down @ K * self.narrow)

    def _back(self, g: Tensor) -> Tensor:
        """Adjoint of ``out``, on coordinates."""
        A, B, V = self.base.parts(g)
        return self.tangent(self._joined(self.L.down @ A * self.shrink, self.R.down @ B * self.shrink,
                                         self.E.down @ V * self.narrow))

    def _between(self, t: Tensor, known: bool = False) -> Tensor:
        images = self.products.images(self.out(self.tangent(t)))
        if not known:
            images = self.products.unseen(images, self.products.following(images))
        return self._back(self.products.gradient(images))

    def _stretched(self, v: Tensor) -> Tensor:
        along = self.root @ (self.ways.mT @ v.unsqueeze(2))
        longer: Tensor = v + (self.ways @ along).squeeze(2)
        return longer

    def __call__(self, v: Tensor) -> Tensor:
        return self._stretched(self._between(self._stretched(v)))

    def given_w(self, v: Tensor) -> Tensor:
        """The same were O and c known."""
        return self._stretched(self._between(self._stretched(v), known=True))

    def gradient(self, labels: Sequence[Tensor]) -> Tensor:
        """J_1ᵀ(I − Π) of rows (rows, e), as v."""
        rest = self.products.unseen(labels, self.products.following(labels))
        return self._stretched(self._back(self.products.gradient(rest)))

    def scaled(self, v: Tensor) -> Tensor:
        """(Z, Y, K)."""
        return self.tangent(self._stretched(v))

    def change(self, t: Tensor, labels: Sequence[Tensor]) -> tuple[Tensor, Tensor, tuple[Tensor, ...], float]:
        """dΘ and d[W; c] to first order, O and c following the labels; what is then left of these; and how much of
        them O and c show."""
        v = self.out(t)
        rest = [label - image for label, image in zip(labels, self.products.images(v), strict=True)]
        B = self.products.following(rest)
        dV, m, p = self.base.parts(v)[2], len(self.U), self.p.shape[2]
        W = dV @ self.out_map + self.base.V @ B[: m * p].view(m, p, -1)
        whole = torch.cat([W.flatten(0, 1), B[m * p :]])
        shown = float((B * (self.gram @ B)).sum().clamp_min(0.0).sqrt())
        return self.theta(t), whole, tuple(self.products.unseen(rest, B)), shown

    def theta(self, t: Tensor) -> Tensor:
        """dΘ, to first order."""
        dA, dB, _ = self.base.parts(self.out(t))
        change: Tensor = dA @ self.base.B.mT + self.base.A @ dB.mT
        return change

    @property
    def layer(self) -> AttentionLayer:
        """``base``, multiplied out."""
        Theta, key_bias = attention.split(self.base.theta())
        return replace(self.found.layer, Theta=Theta, key_bias=key_bias, W=self.base.V @ self.out_map)

    @property
    def thinnest(self) -> float:
        """The least σ that counts to the rank of a scaled Θ_i."""
        return float(self.sigma[self.q > 0].min())

    @property
    def narrowest(self) -> float:
        """The same of s, for W_i."""
        return float(self.s[self.p > 0].min())
