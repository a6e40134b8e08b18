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

import torch

from headway.certificates.jacobian import Sample, residuals
from headway.core import attention
from headway.core.results import Claim, Verdict

BALL = 0.1  # radius of the ball on which L is taken, in parameter norm
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
    """Whether the layer is within ``tolerance`` (relative to its smallest head) of an exact solution near it."""
    layer = found.layer
    unit = float(layer.augmented.double().flatten(1).norm(dim=1).min())
    goal = tolerance * unit
    statement = (f"The layer that made the labels is within {{}} of this one in all parameters together "
                 f"({goal:.1e} is allowed)")
    assumption = "the labels are exact, and a layer of this shape within {} of this one made them"
    N, g = found.normal
    values = torch.linalg.eigvalsh(N)
    sigma, top = math.sqrt(max(float(values[0]), 0.0)), math.sqrt(float(values[-1]))
    # The normal matrix loses half the digits: below this its least eigenvalue is rounding.
    resolved = float(values[0]) > 1e3 * len(values) * 2.0**-52 * float(values[-1])
    L, noise = lipschitz(found, BALL), rounding(found)
    left = math.sqrt(sum(float(r.double().square().sum()) for r in residuals(found)))
    numbers = {"residual": left, "least_singular_value": sigma, "largest_singular_value": top, "lipschitz": L,
               "rounding": noise, "tolerance": goal, "unit": unit}
    if left - noise > top * goal + L * goal**2 / 2:
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
    numbers["radius"] = rho
    holds = Verdict.YES if rho <= goal else Verdict.UNDECIDED
    return Claim(NAME, statement.format(f"{rho:.1e}"), assumption.format(f"{reach:.1e}"), holds,
                 f"exactly one exact solution lies within {rho:.1e}, and no other within {reach:.1e}"
                 + ("" if holds == Verdict.YES else f"; more than the {goal:.1e} allowed"), numbers)


def error_bars(found: Sample) -> Claim:
    """Under independent label noise of one size: s²(JᵀJ)⁻¹, the errors' covariance to first order, per head.

    s² is estimated from the residual over its degrees of freedom; a bar is the root mean square error of the head's
    parameters together, relative to their size.
    """
    layer, p = found.layer, found.unknowns
    equations = found.problem.equations
    left = sum(float(r.double().square().sum()) for r in residuals(found))
    name, assumption = "error bars", "independent label noise of one size, and this layer the least-squares fit"
    if equations <= p:
        return Claim(name, "Errors per head", assumption, Verdict.UNDECIDED,
                     f"{equations} equations leave nothing to estimate the noise of {p} parameters from", {})
    s = math.sqrt(left / (equations - p))
    N, g = found.normal
    factor, info = torch.linalg.cholesky_ex(N)
    if int(info):
        return Claim(name, "Errors per head", assumption, Verdict.UNDECIDED, "the parameters are not determined",
                     {"noise": s})
    variance = s**2 * torch.cholesky_inverse(factor).diagonal()
    theta = variance[: found.theta_unknowns].view(layer.heads, -1).sum(1).sqrt()
    W = variance[found.theta_unknowns : found.theta_unknowns + layer.W.numel()].view(layer.heads, -1).sum(1).sqrt()
    theta = theta / layer.augmented.flatten(1).norm(dim=1).clamp_min(1e-300)
    W = W / layer.W.flatten(1).norm(dim=1).clamp_min(1e-300)
    # A least-squares fit has Jᵀr = 0; how far this layer is from one, in units of its own error bars.
    away = float((torch.cholesky_solve(g.unsqueeze(1), factor).squeeze(1).square().sum()
                  / variance.sum().clamp_min(1e-300)).sqrt())
    numbers = {"noise": s, "away_from_fit": away}
    for i in range(layer.heads):
        numbers |= {f"theta_{i + 1}": float(theta[i]), f"w_{i + 1}": float(W[i])}
    words = ", ".join(f"head {i + 1}: Θ {float(theta[i]):.1e}, W {float(W[i]):.1e}" for i in range(layer.heads))
    holds = Verdict.YES if away < 3 else Verdict.UNDECIDED
    reason = f"noise estimated at {s:.1e}"
    if holds != Verdict.YES:
        reason += f"; but this layer is {away:.1e} bars away from the least-squares fit"
    return Claim(name, f"Relative errors to expect: {words}", assumption, holds, reason, numbers)

