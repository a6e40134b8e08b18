"""The training theorem: gradient descent with enough heads converges at rate 1/K, and stays near its start.

With κ = β₃/√H, θ⋆ a point of loss ≤ 1/K, g₀ = max(‖θ⋆ − θ⁰‖, 1.1), and M ≥ max‖U_h‖ along the path and on the
segments from its points to θ⋆ (the proof bounds the curvature on those segments, κ‖θ^k − θ⋆‖² ≤ ½):

    √H ≥ (26/3)β₃g₀², η ≤ min{1/β₁², g₀², g₀²/L̂(θ⁰)}  ⟹  L̂(θ^K) ≤ 2/K + 5g₀²/(4ηK),  ‖θ^k − θ⁰‖ ≤ 4g₀ for k ≤ K

The statement is the paper's; docs/training.md derives it again with these constants. A hypothesis that fails is
named with its value.
"""

from __future__ import annotations

import math

from headway.training.constants import Constants
from headway.training.data import Labelled
from headway.training.network import Network, losses

FACTOR = 26 / 3  # √H ≥ FACTOR·β₃g₀²


def heads_needed(c: Constants, g0: float, factor: float = FACTOR) -> float:
    return (factor * c.beta3 * g0**2) ** 2


def largest_step(c: Constants, g0: float, first_loss: float) -> float:
    """min{1/β₁², g₀², g₀²/L̂(θ⁰)}; 0 where no point of small loss is known."""
    return min(1 / c.beta1**2, g0**2, g0**2 / max(first_loss, 1e-300)) if math.isfinite(g0) else 0.0


def training_bound(g0: float, step: float, steps: int) -> float:
    return 2 / steps + 5 * g0**2 / (4 * step * steps)


def travel_bound(g0: float) -> float:
    return 4 * g0


def failing_hypotheses(
    star: Network | None, data: Labelled, K: int, step: float, largest: float, rule: str
) -> tuple[str, ...]:
    """The hypotheses on step, rule and comparison point, which both theorems have, where they fail."""
    failing = []
    if rule != "constant":
        failing.append(f"rule: {rule}, the theorem is for a constant step")
    if star is None:
        failing.append("no direction separates the gradients (γ = 0)")
    elif not (loss := mean_loss(star, data)) <= 1 / K:
        failing.append(f"reach: the point at distance g₀ has loss {loss:.3g}, needed at most {1 / K:.3g}")
    if not step <= largest * (1 + 1e-12):
        failing.append(f"step: {step:.3g}, at most {largest:.3g}")
    return tuple(failing)


def too_few(heads: float, needed: float) -> tuple[str, ...]:
    return () if heads >= needed else (f"heads: {heads:.3g}, needed {needed:.3g}",)


def mean_loss(net: Network, data: Labelled) -> float:
    return float(losses(data.y * net(data.X)).mean())
