"""How far can the truth be? Newton and Kantorovich where labels are exact, a covariance where they are noisy.

Let G(θ) = F(θ) − Y on the examples, J = G'(θ̂), σ its least singular value, A = J⁺, and L with ‖G'(θ) − G'(θ')‖
≤ L‖θ − θ'‖ on a ball around θ̂. The map T(θ) = θ − A·G(θ) has ‖T'(θ)‖ ≤ (L/σ)‖θ − θ̂‖, fixes every exact solution,
and moves θ̂ by η = ‖A·G(θ̂)‖. If 2ηL/σ < 1, T contracts the ball of radius ρ₋ = (1 − √(1 − 2ηL/σ))·σ/L into itself,
and no two exact solutions lie within ρ₊ = σ/L: the one there is lies within ρ₋.

L from the second derivative of a row: with D the diameter of the tokens in sight, |x̃| the query's length,

    ‖D²y[δ, δ']‖ ≤ Σ_i ‖W_i‖ (D³/4) |x̃|² ‖δΘ_i‖‖δΘ_i'‖ + (D²/4) |x̃| (‖δW_i‖‖δΘ_i'‖ + ‖δΘ_i‖‖δW_i'‖),

since a third moment is at most the diameter times a variance, and a variance at most D²/4. No pattern enters, so
the bound holds on the whole ball.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headway.certificates.jacobian import Sample, residuals
from headway.certificates.newton import apart, moved
from headway.core import attention
from headway.core.layer import AttentionLayer
from headway.core.results import Claim, Verdict

BALL = 0.1  # radius of the ball on which L is taken, in parameter norm
STEPS = 6  # of Newton's method, to where the argument holds
NAME = "distance to the truth"


def lipschitz(found: Sample, ball: float) -> float:
    """L on the ball: the root of the sum of the rows' squared constants."""
    weight = float(torch.linalg.matrix_norm(found.layer.W.double(), 2).max()) + ball
    total = 0.0
    for rows in found.problem.chunks:
        X = rows.X.double()
        apart = torch.cdist(X, X, compute_mode="donot_use_mm_for_euclid_dist")  # (n, k, k)
        if rows.see is None:
            D = apart.flatten(1).max(1).values.unsqueeze(1).expand(X.shape[:2])
        else:
            both = rows.see.unsqueeze(2) & rows.see.unsqueeze(3)  # (1 or n, a, b, c)
            D = torch.where(both, apart.unsqueeze(1), torch.zeros(())).flatten(2).max(2).values
        x = attention.queries(X, found.layer.augmented).norm(dim=2)
        alpha, beta = weight * D**3 / 4 * x.square(), D.square() / 4 * x
        each = (alpha + (alpha.square() + 4 * beta.square()).sqrt()) / 2
        if rows.valid is not None:
            each = each * rows.valid.squeeze(2)
        total += float(each.square().sum())
    return math.sqrt(total)


def rounding(found: Sample) -> float:
    """A bound on ‖computed − exact‖ of the residual: float64 sums of length d and k, seen through the softmax."""
    layer, eps = found.layer, 2.0**-52
    total = 0.0
    weight = float(torch.linalg.matrix_norm(layer.W.double(), 2).sum())
    for rows in found.problem.chunks:
        size = rows.X.double().norm(dim=2).max(1).values
        scores = attention.scores(rows.X, layer.augmented).abs().flatten(1).max(1).values.double()
        d, k = rows.X.shape[2], rows.X.shape[1]
        each = eps * (2 * d + k + 4 * d * (1 + scores)) * weight * size
        total += float(each.square().sum()) * k
        total += float(rows.Y.double().square().sum()) * eps**2
    return math.sqrt(total)


def radius(found: Sample, tolerance: float) -> Claim:
    """Whether the layer is within ``tolerance`` (relative to its smallest head) of an exact solution near it.

    Where the argument fails at the layer itself, Newton's method goes to where it holds, and the distance is from
    the layer to there.
    """
    claim = _tried(found, tolerance, found.layer)
    if claim.holds != Verdict.UNDECIDED or "step" not in claim.numbers:
        return claim

    def step(at: Sample) -> tuple[Tensor, Tensor]:
        N, g = at.normal
        v = torch.linalg.solve(N, g)
        return (v[: at.theta_unknowns].view_as(at.layer.augmented),
                v[at.theta_unknowns :].view(-1, at.layer.out_width))

    near = refined(found, step, rounding(found))
    if near is None:
        return claim
    second = _tried(near, tolerance, found.layer)
    return claim if second.holds == Verdict.UNDECIDED else second


def refined(
    found: Sample, step: Callable[[Sample], tuple[Tensor, Tensor]], floor: float
) -> Sample | None:
    """At the layer that a few of Newton's steps lead to, if its residual is a tenth of what it was or less."""
    first = last = size_of(found)
    at = found
    for _ in range(STEPS):
        there = replace(at, layer=moved(at, *step(at)))
        size = size_of(there)
        if not size < last / 2:
            break
        at, last = there, size
        if size <= floor:
            break
    return at if last < first / 10 else None


def size_of(found: Sample) -> float:
    return math.sqrt(sum(float(r.double().square().sum()) for r in residuals(found)))


def _tried(found: Sample, tolerance: float, origin: AttentionLayer) -> Claim:
    """The argument at ``found.layer``, about the distance from ``origin``."""
    unit = float(origin.augmented.double().flatten(1).norm(dim=1).min())
    goal = tolerance * unit
    statement = (f"The layer that made the labels is within {{}} of this one in all parameters together "
                 f"({goal:.1e} is allowed)")
    assumption = "the labels are exact, and a layer of this shape within {} of " + (
        "this one" if origin is found.layer else "the one that Newton's method leads to from it") + " made them"
    N, g = found.normal
    values = torch.linalg.eigvalsh(N)
    sigma, top = math.sqrt(max(float(values[0]), 0.0)), math.sqrt(float(values[-1]))
    # The normal matrix loses half the digits: below this its least eigenvalue is rounding.
    resolved = float(values[0]) > 1e3 * len(values) * 2.0**-52 * float(values[-1])
    L, noise = lipschitz(found, BALL), rounding(found)
    left = size_of(found)
    numbers = {"residual": left, "least_singular_value": sigma, "largest_singular_value": top, "lipschitz": L,
               "rounding": noise, "tolerance": goal, "unit": unit}
    if origin is found.layer and left - noise > top * goal + L * goal**2 / 2:
        least = (left - noise) / top
        return Claim(NAME, statement.format("…"), assumption.format(f"{BALL:g}"), Verdict.NO,
                     f"the residual {left:.1e} is more than any layer within {goal:.1e} would leave", {
                         **numbers, "at_least": least})
    if not resolved:
        return Claim(NAME, statement.format("…"), assumption.format(f"{BALL:g}"), Verdict.UNDECIDED,
                     f"the least singular value of the Jacobian ({sigma:.1e}) is not told from zero", numbers)
    eta = float(torch.linalg.solve(N, g).norm()) + noise / sigma
    h = 2 * eta * L / sigma
    reach = min(sigma / L, BALL)
    numbers |= {"step": eta, "kantorovich": h, "unique_within": reach}
    if h >= 1:
        return Claim(NAME, statement.format("…"), assumption.format(f"{reach:.1e}"), Verdict.UNDECIDED,
                     f"Kantorovich's quantity 2ηL/σ is {h:.1e}, wanted below 1 (step η {eta:.1e}, Lipschitz "
                     f"constant L {L:.1e}, least singular value σ {sigma:.1e})", numbers)
    rho = (1 - math.sqrt(1 - h)) * sigma / L if h > 1e-8 else eta * (1 + h)
    away = apart(origin, found.layer)
    most, least = (away + rho) * (1 + 1e-12), away * (1 - 1e-12) - rho
    numbers |= {"radius": most, "at_least": max(least, 0.0)}
    holds = Verdict.YES if most <= goal else Verdict.NO if least > goal else Verdict.UNDECIDED
    reason = f"exactly one exact solution lies within {most:.1e}, and no other within {reach:.1e}"
    if holds == Verdict.NO:
        reason = f"the only exact solution near is {least:.1e} away or more"
    elif holds == Verdict.UNDECIDED:
        reason += f"; more than the {goal:.1e} allowed"
    return Claim(NAME, statement.format(f"{most:.1e}"), assumption.format(f"{reach:.1e}"), holds, reason, numbers)
