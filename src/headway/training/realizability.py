"""Good starts: a start where the tangent features separate the data has a point of small loss within reach.

(P1) ‖θ_h⁰‖ ≤ B₂, (P2) |Φ(X_i; θ⁰)| ≤ B_Φ, (P3) a unit direction θ⋆ with y_i⟨∇Φ(X_i; θ⁰), θ⋆⟩ ≥ γ for every i: then
θ⁰ + g₀(ε)θ⋆ with g₀(ε) = (2B_Φ + log 1/ε)/γ has, to first order, a loss ≤ ε, as both theorems ask for.

γ is exact: the hard-margin support vector machine in the features y_i∇Φ(X_i; θ⁰). Its dual is the point of least
norm in their convex hull, γ² = min over the simplex of aᵀ(yyᵀ∘K)a with K the tangent kernel, by non-negative least
squares; the primal is the margin of the direction that point gives. They must agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from headway.training.data import Labelled
from headway.training.network import Network


@dataclass(frozen=True)
class Margin:
    """primal: least y_i⟨∇Φ_i, θ⋆⟩ of the unit direction found; dual: norm of the hull's least point. Zero: none."""

    primal: float
    dual: float
    weights: Tensor  # a, on the simplex
    direction: Network | None  # θ⋆, unit norm over all heads

    @property
    def separable(self) -> bool:
        return self.primal > 1e-9

    @property
    def value(self) -> float:
        """γ as far as it is certain: the primal, which a direction attains."""
        return max(self.primal, 0.0)


def least_point(points: np.ndarray) -> np.ndarray:
    """Weights a on the simplex for which ‖points·a‖ is least over the hull of the columns of ``points``.

    It is where ‖points·a‖² + (1ᵀa − 1)² is least over a ≥ 0, scaled to the simplex: non-negative least squares.
    """
    size, n = points.shape
    a, _ = nnls(np.concatenate([points, np.ones((1, n))]), np.append(np.zeros(size), 1.0), maxiter=100 * n)
    return np.asarray(a / max(a.sum(), 1e-300))


def tangent_margin(net: Network, data: Labelled) -> Margin:
    """γ of the tangent kernel at ``net``."""
    F = (net.features(data.X) * data.y.unsqueeze(1)).double()
    K = (F @ F.T).cpu().numpy()
    n = len(K)
    scale = math.sqrt(float(np.trace(K)) / n) if np.trace(K) > 0 else 1.0
    # K = EEᵀ: the hull of E's rows has the distances of the features' hull.
    values, vectors = np.linalg.eigh(K / scale**2)
    a = least_point((vectors * np.sqrt(np.clip(values, 0.0, None))).T)
    dual = math.sqrt(max(float(a @ K @ a), 0.0))
    if dual <= 1e-9 * scale:
        return Margin(0.0, dual, torch.from_numpy(a), None)
    primal = float((K @ a).min()) / dual
    pulled = net.pull(data.X, torch.from_numpy(a).to(data.X) * data.y)
    direction = Network(pulled.U / dual, pulled.W / dual, pulled.count)
    return Margin(primal, dual, torch.from_numpy(a), direction)


def margin_along(net: Network, data: Labelled, direction: Network) -> float:
    """min_i y_i⟨∇Φ(X_i; θ⁰), direction⟩."""
    each = direction.count.sqrt()
    flat = torch.cat([(direction.U * each.view(-1, 1, 1)).flatten(), (direction.W * each.view(-1, 1, 1)).flatten()])
    return float((data.y * (net.features(data.X) @ flat)).min())


@dataclass(frozen=True)
class Start:
    """The three conditions, measured: B₂, B_Φ, γ (primal and dual)."""

    largest_head: float
    largest_output: float
    margin: Margin

    def distance(self, epsilon: float) -> float:
        """g₀(ε) = (2B_Φ + log 1/ε)/γ: how far a point of loss ≤ ε is, at most; inf where there is no margin."""
        if not self.margin.separable:
            return math.inf
        return (2 * self.largest_output + math.log(1 / epsilon)) / self.margin.value

    def point(self, net: Network, epsilon: float) -> Network | None:
        """θ⁰ + g₀(ε)·(the direction of margin γ): of loss ≤ ε where Φ is nearly linear so far; None if γ = 0.

        To first order y_iΦ ≥ γg₀ − B_Φ = B_Φ + log 1/ε there. How much curvature takes away is not bounded here:
        whoever relies on the point measures its loss, as ``bounds`` does.
        """
        if self.margin.direction is None or not self.margin.separable:
            return None
        return net.plus(self.margin.direction, self.distance(epsilon))


def check_start(net: Network, data: Labelled) -> Start:
    return Start(math.sqrt(float(net.squares().max())), float(net(data.X).abs().max()), tangent_margin(net, data))
