"""The Newton step from a layer to the least-squares fit of some labels, by products, and how far it may be off.

With r = F − Y (rows, e), J_1 the Jacobian in Θ, H the features and Π the projector onto them, the step is

    S v = J_1ᵀ(I − Π)r,   S = J_1ᵀ(I − Π)J_1,        B = H⁺(r − J_1v)   for W and c together,

solved by conjugate gradients in the coordinates v of scaled.py, where S has a short spectrum with a least
eigenvalue λ known from below. So what is left of the equation bounds the error: ‖v − ṽ‖ ≤ ‖left‖/λ, with the
rounding of the products part of what is left. Changes t = T·R v of Θ, in the scaled coordinates without stretching,
are at most κ times as long as v.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from headway.certificates.jacobian import Sample
from headway.certificates.spectrum import Spectrum
from headway.core import attention
from headway.core.layer import AttentionLayer
from headway.linalg.krylov import conjugate_gradients

LIMIT = 400  # products of one solve
SLACK = 1e-3  # relative: more than rounding does to a sum of squares, or to the triangular factor of the features


@dataclass(frozen=True)
class Step:
    """Change of Θ (m, r, d) and of W and c (features, e); θ − step is the linearised fit."""

    Theta: Tensor
    t: Tensor  # of Θ, scaled; of heads in thin factors, of (Θ, V)
    B: Tensor
    shown: float  # what of the labels B shows; of thin factors, what O and c do
    off: float  # a bound on the error of t
    left: tuple[Tensor, ...]  # what the linear model leaves of r, (rows, e) for every chunk
    products: int


def less(layer: AttentionLayer, Theta: Tensor, B: Tensor) -> AttentionLayer:
    """The layer less this step."""
    new, key_bias = attention.split(layer.augmented - Theta)
    return replace(layer, Theta=new, key_bias=key_bias,
                   W=layer.W - B[: layer.heads * layer.width].view_as(layer.W),
                   offset=None if layer.offset is None else layer.offset - B[-1])


def moved(found: Sample, Theta: Tensor, B: Tensor) -> AttentionLayer:
    """The sample's layer less this step, brought back to its ranks where the claim is about such layers."""
    there = less(found.layer, Theta, B)
    new, key_bias = attention.split(_of_ranks(there.augmented, found.ranks))
    return replace(there, Theta=new, key_bias=key_bias, W=_of_ranks(there.W, found.out_ranks))


def _of_ranks(M: Tensor, ranks: tuple[int, ...] | None) -> Tensor:
    """The nearest matrices of these ranks."""
    if ranks is None:
        return M
    U, s, Vh = torch.linalg.svd(M, full_matrices=False)
    within = torch.arange(s.shape[1], device=s.device) < torch.tensor(ranks, device=s.device)[:, None]
    near: Tensor = U @ (torch.where(within, s, 0.0).unsqueeze(2) * Vh)
    return near


def apart(a: AttentionLayer, b: AttentionLayer) -> float:
    """Their distance in all parameters together, entry by entry."""
    offsets = 0.0 if a.offset is None or b.offset is None else float((a.offset - b.offset).square().sum())
    return math.sqrt(float((a.augmented - b.augmented).square().sum() + (a.W - b.W).square().sum()) + offsets)


@dataclass(frozen=True)
class Newton:
    """What it takes to solve for steps, and norms of the pseudo-inverse of the whole Jacobian."""

    found: Sample
    spectrum: Spectrum

    @cached_property
    def usable(self) -> bool:
        """Whether the least eigenvalue is known to be above 0 and the projector is close to an exact one."""
        return self.spectrum.clear > 0 and self.spectrum.operator.rounding.projector < 0.05

    @cached_property
    def kappa(self) -> float:
        """κ."""
        return self.spectrum.operator.kappa

    @cached_property
    def inverse(self) -> float:
        """a ≥ ‖((I − Π)J_1)⁺‖, scaled."""
        return (1 + SLACK) * self.kappa / math.sqrt(self.spectrum.clear)

    @cached_property
    def known(self) -> float:
        """c ≥ ‖J_1‖ on all matrices, scaled."""
        return (1 + SLACK) * math.sqrt(self.spectrum.known)

    @cached_property
    def whole(self) -> float:
        """‖J⁺‖ at most, with W and c measured by what they do, ‖HB‖: for r of length 1, split into √(1 − s²) and s
        by Π, the step in Θ is at most a√(1 − s²) and that in W at most s + c·a√(1 − s²)."""
        a, c = self.inverse, self.known
        return float(torch.linalg.matrix_norm(torch.tensor([[a, 0.0], [c * a, 1.0]], dtype=torch.float64), 2))

    @cached_property
    def features(self) -> float:
        """A lower bound of the least eigenvalue of G = HᵀH: that of G scaled to unit diagonal, less its
        rounding."""
        operator = self.spectrum.operator
        least = float(operator.features[0]) * (1 - operator.rounding.projector)
        return max(least, 0.0) * float(operator.gram.diagonal().min())

    def step(self, r: Sequence[Tensor], tolerance: float, limit: int = LIMIT) -> Step:
        """Until the equation is solved to ``tolerance`` of its right side, in its residual's length."""
        operator = self.spectrum.operator
        g = operator.gradient(r)
        v, used = conjugate_gradients(operator, lambda x: x, g, tolerance, limit)
        left = float((g - operator(v)).norm())
        at = operator.rounding
        left += at.ritz(1, self.spectrum.most, self.spectrum.known) * float(v.norm())
        left += (at.jacobian + at.projector * self.known) * math.sqrt(sum(float(part.square().sum()) for part in r))
        t = operator.scaled(v)
        Theta, B, rest, shown = operator.change(t, r)
        return Step(Theta, t, B, shown, self.kappa * left / max(self.spectrum.clear, 1e-300), rest, used + 3)
