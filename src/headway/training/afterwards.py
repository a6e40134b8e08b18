"""Ours: the training theorem with every constant replaced by what the run showed.

For any θ⋆ let δ_k = max(0, L̂_k + ⟨∇L̂_k, θ⋆ − θ^k⟩ − L̂(θ⋆)) measure how far the loss is from convex as seen from
θ^k. Where descent holds, L̂_{k+1} ≤ L̂_k − (η/2)‖∇L̂_k‖²,

    L̂_{k+1} ≤ L̂(θ⋆) + δ_k + (D_k² − D_{k+1}²)/(2η),   hence   L̂_K ≤ L̂(θ⋆) + mean δ_k + (D_0² − D_K²)/(2ηK)

with D_k = ‖θ^k − θ⋆‖: no head count enters, and the best θ⋆ known gives the best bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headway.training.bounds import LOG2
from headway.training.data import Labelled
from headway.training.descent import Path
from headway.training.network import Network, loss_and_gradient


@dataclass(frozen=True)
class Certificate:
    """L̂_K ≤ bound, from measured quantities: the comparison point's loss, mean δ_k, and the distances."""

    bound: float
    measured: float
    comparison: float
    defect: float
    distance: float
    descent_held: bool

    @property
    def ratio(self) -> float:
        return self.bound / max(self.measured, 1e-300)

    @property
    def vacuous(self) -> bool:
        return not self.bound < LOG2


def a_posteriori(path: Path, data: Labelled, targets: Sequence[Network]) -> list[Certificate]:
    """The bound above against each of the targets; the run is replayed once, and every iterate is used."""
    eta, K = path.step, path.steps
    stars = [loss_and_gradient(target, data.X, data.y)[0] for target in targets]
    defects = [0.0] * len(targets)
    net, held = path.start, True
    # Groups of opposite sign cancel in Φ: each is a sum of √H terms of size 1, known to a rounding of each.
    slack = 1e-15 + 4 * 2.0**-52 * math.sqrt(net.heads)
    firsts = [net.minus(target).norm() for target in targets]
    for k in range(K):
        loss, gradient, _ = loss_and_gradient(net, data.X, data.y)
        here = gradient.dot(net)
        for j, target in enumerate(targets):
            defects[j] += max(0.0, loss + gradient.dot(target) - here - stars[j])
        held = held and path.columns["loss"][k + 1] <= loss - eta / 2 * gradient.norm() ** 2 + slack
        net = net.plus(gradient, -eta)
    found = []
    for j, target in enumerate(targets):
        total = stars[j] + defects[j] / K + (firsts[j] ** 2 - net.minus(target).norm() ** 2) / (2 * eta * K)
        found.append(Certificate(total, path.columns["loss"][K], stars[j], defects[j] / K, firsts[j], held))
    return found


def best_a_posteriori(path: Path, data: Labelled, far: Network) -> Certificate:
    """The least of the bounds against points on the segment from the start to ``far``, the end of a longer run."""
    shares = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    targets = [path.start.plus(far.minus(path.start), share) for share in shares]
    return min(a_posteriori(path, data, targets), key=lambda one: one.bound)
