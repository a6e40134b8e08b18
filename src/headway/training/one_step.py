"""The paper's example: one step from zero on the token mixture is a good start, with a margin in closed form.

At U_h = α_h1(½ mean y x̄)ᵀ, W_h = 0 (``start`` with signs) and without noise the explicit direction, of norm √2, has

    γ⋆ = ζS√(T/2) + Tζ²(1 − ζ)S⁴/(4√(2(M + 1))).

A linear model has the first term alone; attention saturated on the relevant tokens S√(T/2), a factor 1/ζ above it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headway.core import checks
from headway.training.data import Labelled
from headway.training.network import Network


@dataclass(frozen=True)
class MixtureMargins:
    """Closed forms for the noiseless mixture at the one-step start, unit directions: U alone, W alone, both in
    equal parts, the best mix; and the linear model, and attention saturated on the relevant tokens."""

    U: float
    W: float
    explicit: float
    best: float
    linear: float
    saturated: float


def mixture_margins(tokens: int, zeta: float, strength: float, nuisance: int) -> MixtureMargins:
    """γ⋆ = ζS√(T/2) + Tζ²(1 − ζ)S⁴/(4√(2(M + 1))) for the direction of norm √2; divided by √2 for a unit one."""
    checks.number("strength", strength, strictly=True)
    T, M = checks.whole("tokens", tokens), checks.whole("nuisance", nuisance)
    U = zeta * strength * math.sqrt(T / 2)
    W = T * zeta**2 * (1 - zeta) * strength**4 / (4 * math.sqrt(2 * (M + 1)))
    return MixtureMargins(U, W, (U + W) / math.sqrt(2), math.hypot(U, W), U, strength * math.sqrt(T / 2))


def explicit_direction(net: Network, data: Labelled) -> tuple[Network, Network]:
    """An explicit direction at the one-step start, U and W parts of unit norm each, from the mixture's means:

    U_h ∝ 1(μ₊ − μ₋)ᵀ, W_h ∝ α_h Σ_y (μ_y + Σ_jν_j)μ_yᵀ with α_h the head's sign.
    """
    if data.means is None:
        checks.refuse("data", "a mixture with known means", "arrays without them", "headway.training.mixture(...)")
    assert data.means is not None
    mu, nu = data.means[:2], data.means[2:]
    T = data.X.shape[1]
    ones = torch.ones(len(net.U), 1, 1).to(net.U)
    U = (mu[0] - mu[1]).expand(T, -1) * ones
    sign = torch.sign((net.U.mean(1) * (mu[0] - mu[1])).sum(1)).view(-1, 1, 1)
    W = sign * (torch.outer(mu[0] + nu.sum(0), mu[0]) + torch.outer(mu[1] + nu.sum(0), mu[1]))
    first = Network(U, torch.zeros_like(net.W), net.count)
    second = Network(torch.zeros_like(net.U), W, net.count)
    return (Network(first.U / first.norm(), first.W, net.count),
            Network(second.U, second.W / second.norm(), net.count))
