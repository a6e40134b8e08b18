"""v ↦ R·T·D^{-1/2} N D^{-1/2}·T·R v on the range of T, N = Jᵀ(I − Π)J: definite there exactly when N is on layers
of these ranks.

D holds the Kronecker blocks Q ⊗ M_i. They overrate one direction a head, that of Θ_i itself: a softmax answers
little to scores that only grow, and R stretches it to curvature 1. T projects onto the tangent space of the
matrices of rank r_i, in the scaled coordinates: v ↦ UUᵀv + (I − UUᵀ)v VVᵀ, of dimension Σ_i r_i(rows + d − r_i).
Θ_i lies in it, so R and T commute and the range of T is mapped into itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headway.certificates.jacobian import Sample
from headway.certificates.rounding import Eliminated
from headway.core.layer import AttentionLayer
from headway.linalg.projected import Products, evaluate


class Scaled:
    """The operator of the module's first line at one layer, on the sample's examples, in the sample's precision."""

    def __init__(self, found: Sample, generator: torch.Generator) -> None:
        self.found = found
        # W and c as the layer has them, not as these labels would have them: J is the layer's own.
        point = replace(evaluate(found.problem, found.layer.augmented), W=found.layer.W)
        self.products = Products(found.problem, point, found.problem.dtype)
        G = self.gram = point.factor @ point.factor.T
        root = G.diagonal().clamp_min(1e-300).rsqrt()
        self.features = torch.linalg.eigvalsh(G * root[:, None] * root[None, :])
        Theta = found.layer.augmented
        Q, M = self.products.blocks(generator)
        self.left, self.right = _inverse_root(Q), _inverse_root(M)
        scaled = torch.linalg.solve(self.left, Theta) @ torch.linalg.inv(self.right)
        if found.ranks is not None:
            most = max(found.ranks)
            U, self.singular, Vh = torch.linalg.svd(scaled, full_matrices=False)
            within = (torch.arange(most, device=U.device) < torch.tensor(found.ranks, device=U.device)[:, None])
            self.within = within > 0
            self.U, self.Vh = U[:, :, :most] * within.unsqueeze(1), Vh[:, :most] * within.unsqueeze(2)
        along = self.tangent(scaled)
        self.along = along / along.flatten(1).norm(dim=1).clamp_min(1e-30).view(-1, 1, 1)
        answer = (self.along * self._between(self.along)).sum((1, 2), keepdim=True)
        self.stretch = answer.clamp_min(1e-30).rsqrt().clamp(1.0, 20.0) - 1.0
        self.rounding = Eliminated.of(found, G, float(self.features[0]), self.left, self.right,
                                      1.0 + float(self.stretch.max()))

    @property
    def kappa(self) -> float:
        """κ: how much longer t can be than v."""
        return 1.0 + float(self.stretch.max())

    @property
    def layer(self) -> AttentionLayer:
        """The one that the operator is of."""
        return self.found.layer

    @property
    def dimension(self) -> int:
        """Of the space in which ``start`` is uniform."""
        return self.found.theta_unknowns

    @property
    def everywhere(self) -> int:
        """Of that of ``anywhere``."""
        return self.found.layer.augmented.numel()

    def start(self, generator: torch.Generator) -> Tensor:
        """Its direction is uniform on the sphere of the tangent space: a Gaussian vector, projected."""
        return self.tangent(self.anywhere(generator))

    def anywhere(self, generator: torch.Generator) -> Tensor:
        """The same among all matrices, where ``given_w`` lives."""
        Theta = self.found.layer.augmented
        return torch.randn(Theta.shape, generator=generator, dtype=torch.float64).to(Theta)

    def tangent(self, v: Tensor) -> Tensor:
        if self.found.ranks is None:
            return v
        across = v - self.U @ (self.U.mT @ v)
        inside: Tensor = v - across + (across @ self.Vh.mT) @ self.Vh
        return inside

    def _between(self, v: Tensor, known: bool = False) -> Tensor:
        """T·D^{-1/2} N D^{-1/2}·T v, or with W ``known``, on all matrices: nothing projected out, T = I."""
        if known:
            return self.left @ self.products.curvature_given_w(self.out(v)) @ self.right
        return self.tangent(self.left @ self.products.curvature(self.out(self.tangent(v))) @ self.right)

    def _stretched(self, v: Tensor) -> Tensor:
        longer: Tensor = v + self.stretch * self.along * (self.along * v).sum((1, 2), keepdim=True)
        return longer

    @property
    def thinnest(self) -> float:
        """The least singular value that counts to the rank of a scaled Θ_i."""
        return float(self.singular[:, : self.within.shape[1]][self.within].min())

    @property
    def tail(self) -> float:
        """How far the scaled Θ_i are from matrices of their ranks, rounding included."""
        beyond = self.singular.clone()
        beyond[:, : self.within.shape[1]][self.within] = 0.0
        eps = torch.finfo(beyond.dtype).eps
        return float(beyond.norm() + 10 * eps * len(self.left) * self.singular[:, 0].norm())

    def into(self, G: Tensor) -> Tensor:
        """R·T·D^{-1/2} G: a gradient in Θ as one in v."""
        return self._stretched(self.tangent(self.left @ G @ self.right))

    def gradient(self, labels: Sequence[Tensor]) -> Tensor:
        """J_1ᵀ(I − Π) of rows (rows, e), as v."""
        return self.into(self.products.back(labels, self.products.following(labels)))

    def change(self, t: Tensor, labels: Sequence[Tensor]) -> tuple[Tensor, Tensor, tuple[Tensor, ...], float]:
        """dΘ and d[W; c], which follow the labels; what is then left of these; and how much of them d[W; c]
        shows."""
        Theta = self.out(t)
        rest = [label - image for label, image in zip(labels, self.products.images(Theta)[0], strict=True)]
        B = self.products.following(rest)
        shown = float((B * (self.gram @ B)).sum().clamp_min(0.0).sqrt())
        return Theta, B, tuple(self.products.unseen(rest, B)), shown

    def scaled(self, v: Tensor) -> Tensor:
        """t = T·R v, the change of Θ in the coordinates of D."""
        return self.tangent(self._stretched(v))

    def out(self, t: Tensor) -> Tensor:
        """D^{-1/2} t: the change of Θ."""
        change: Tensor = self.left @ t @ self.right
        return change

    def __call__(self, v: Tensor) -> Tensor:
        return self._stretched(self._between(self._stretched(v)))

    def given_w(self, v: Tensor) -> Tensor:
        return self._stretched(self._between(self._stretched(v), known=True))


def _inverse_root(D: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(D)
    cut = torch.finfo(D.dtype).eps * values[..., -1:].clamp_min(1e-30)
    root: Tensor = (vectors * values.clamp_min(cut).rsqrt().unsqueeze(-2)) @ vectors.mT
    return root
