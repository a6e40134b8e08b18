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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.certificates.jacobian import Sample, residuals
from headway.certificates.newton import SLACK, Newton, apart, moved
from headway.certificates.scaled import Scaled
from headway.certificates.slopes import answers_off, second
from headway.certificates.spectrum import Spectrum
from headway.core import attention
from headway.core.layer import AttentionLayer
from headway.core.results import Claim, Verdict

BALL = 0.1  # radius of the ball on which L is taken, in parameter norm
SOLVED = 1e-4  # relative residual of the step; what it is off is part of the claim
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

    near = _refined(found, step, rounding(found))
    if near is None:
        return claim
    second = _tried(near, tolerance, found.layer)
    return claim if second.holds == Verdict.UNDECIDED else second


def _refined(
    found: Sample, step: Callable[[Sample], tuple[Tensor, Tensor]], floor: float
) -> Sample | None:
    """At the layer that a few of Newton's steps lead to, if its residual is a tenth of what it was or less."""
    first = last = _size(found)
    at = found
    for _ in range(STEPS):
        there = replace(at, layer=moved(at.layer, *step(at), at.ranks))
        size = _size(there)
        if not size < last / 2:
            break
        at, last = there, size
        if size <= floor:
            break
    return at if last < first / 10 else None


def _size(found: Sample) -> float:
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
    left = _size(found)
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


# -- by products --------------------------------------------------------------------------------------------------


def radius_by_products(
    found: Sample, spectrum: Spectrum, tolerance: float, again: Callable[[Sample], Spectrum]
) -> Claim:
    """The same of layers too large for a dense Jacobian; ``again`` looks at the Jacobian of another layer."""
    claim = _tried_by_products(found, spectrum, tolerance, found.layer)
    if claim.holds != Verdict.UNDECIDED or "residual" not in claim.numbers:
        return claim

    def step(at: Sample) -> tuple[Tensor, Tensor]:
        operator = spectrum.operator if at is found else Scaled(at, torch.Generator().manual_seed(0))
        taken = Newton(at, replace(spectrum, operator=operator)).step(residuals(at), 1e-4)
        return taken.Theta, taken.B

    near = _refined(found, step, answers_off(found))
    if near is None:
        return claim
    second = _tried_by_products(near, again(near), tolerance, found.layer)
    return claim if second.holds == Verdict.UNDECIDED else second


def _tried_by_products(found: Sample, spectrum: Spectrum, tolerance: float, origin: AttentionLayer) -> Claim:
    """The argument at ``found.layer`` for layers too large for a dense Jacobian, W and c eliminated, in the coordinates of scaled.py.

    Norm: ‖(t, ω)‖, with t the scaled change of Θ and ‖ω‖ = ‖HB‖ what a change B of W and c does. Where the claim is
    about ranks, t is a chart of the matrices of these ranks. In the basis of the singular vectors of the scaled Θ_i,
    S their values, those near Θ_i are all of the form

        φ(t) = Θ_i + t + K(S + M)⁻¹N,      t = [[M, N], [K, 0]],

    and t is the projection of φ(t) − Θ_i onto the tangent space: matrices of rank q within the least value σ_q have
    one t each, no longer than their distance; so no gauge of factors is met. On the ball ‖t‖ ≤ b, with z = b/(σ_q − b),

        ‖Dφ(t) − I‖ ≤ √(1 + z²/4)·‖t‖/(σ_q − b),      ‖φ(t) − Θ_i − t‖ ≤ ‖t‖²/(2(σ_q − b)),

    hence the Jacobian of the composition is off by at most L'‖(t, ω)‖ from that at the layer, with
    L' = L(1 + z/2)(1 + z√(1 + z²/4)) + ‖J_1‖√(1 + z²/4)/(σ_q − b) and L from slopes.py, ‖J_1‖ on all matrices by Lanczos' method.

    T(θ) = θ − A·G(θ) with A = J⁺ at the layer, ℓ = ‖A‖L'. The layer itself may be off the set of those ranks by
    ``tail``, rounding for most; then ‖T'‖ ≤ ℓ(‖θ‖ + tail), and with ε = ℓ·tail and h = 2ηℓ/(1 − ε)² < 1 the argument
    above holds with ρ₋ = (1 − ε)(1 − √(1 − h))/ℓ and ρ₊ = (1 − ε)/ℓ. The solution is a fixed point of T: it lies
    within ℓρ₋(ρ₋/2 + tail) of θ̂ less the step, which is what the claim is made of, on both sides.
    """
    unit = float(origin.augmented.flatten(1).norm(dim=1).min())
    words = _Words(tolerance * unit, origin is found.layer)
    operator, newton = spectrum.operator, Newton(found, spectrum)
    left = residuals(found)
    size, noise = _size(found), answers_off(found)
    numbers = {"residual": size, "rounding": noise, "tolerance": words.goal, "unit": unit}
    if not newton.usable or newton.features <= 0:
        return words.undecided("…", "the least singular value of the Jacobian is not told from zero", numbers)
    chart = _Chart.of(newton, _ball(newton))
    numbers |= {"least_singular_value": 1 / newton.whole, "lipschitz": chart.second, "tail": chart.tail}
    far = chart.top * words.goal
    steep = math.sqrt(2) * max(newton.known, 1.0)  # ‖J‖ at most
    if words.here and far <= chart.ball and size - noise > (steep + chart.second * far / 2) * far:
        return words.no(size, numbers)
    step = newton.step(left, SOLVED)
    shown = newton.known * step.off + operator.rounding.projector * size
    away = math.hypot(step.off, shown) + newton.whole * (noise + newton.known * chart.tail)
    eta = math.hypot(float(step.t.norm()), newton.shown(step.B)) * (1 + SLACK) + away
    slope = newton.whole * chart.second
    sure = 1 - slope * chart.tail
    h = 2 * eta * slope / sure**2 if sure > 0 else math.inf
    reach = min(max(sure, 0.0) / slope, chart.ball)
    numbers |= {"step": eta, "kantorovich": h, "unique_within": reach, "products": float(step.products)}
    rho = sure / slope * (1 - math.sqrt(1 - h)) if 1e-8 < h < 1 else eta / max(sure, 1e-300) * (1 + h)
    if h >= 1 or rho > reach:
        return words.undecided(f"{reach:.1e}", f"Kantorovich's quantity 2ηL/σ is {h:.1e}, wanted below 1 (step η "
                               f"{eta:.1e}, Lipschitz constant L {chart.second:.1e}, least singular value σ "
                               f"{1 / newton.whole:.1e}, all scaled; rounding {noise:.1e})", numbers)
    beyond = chart.out * (away + slope * rho * (rho / 2 + chart.tail) + chart.curved * rho**2 / 2 + chart.tail)
    length = apart(origin, moved(found.layer, step.Theta, step.B))
    return words.around(length, beyond, numbers)


@dataclass(frozen=True)
class _Words:
    """The claim's sentences."""

    goal: float
    here: bool  # the argument is at the layer itself

    def claim(self, at: str, within: str, holds: Verdict, reason: str, numbers: Mapping[str, float]) -> Claim:
        return Claim(NAME, f"The layer that made the labels is within {at} of this one in all parameters together "
                     f"({self.goal:.1e} is allowed)", f"the labels are exact, and a layer of this shape within {within}, in "
                     f"scaled parameters, of {'this one' if self.here else 'where Newton leads from it'} made them; the bound of the least singular value rests on a "
                     "random start of Lanczos' method", holds, reason, numbers)

    def undecided(self, within: str, reason: str, numbers: Mapping[str, float]) -> Claim:
        return self.claim("…", within, Verdict.UNDECIDED, reason, numbers)

    def no(self, size: float, numbers: Mapping[str, float]) -> Claim:
        return self.claim("…", "the allowed distance", Verdict.NO, f"the residual {size:.1e} is more than any layer "
                          f"within {self.goal:.1e} would leave", numbers)

    def around(self, length: float, beyond: float, numbers: Mapping[str, float]) -> Claim:
        """Within ``beyond`` of a point that is so far from the layer lies the only exact solution near."""
        most, least = length * (1 + SLACK) + beyond, length * (1 - SLACK) - beyond
        more = {**numbers, "radius": most, "at_least": max(least, 0.0)}
        within = f"{more['unique_within']:.1e}"
        if least > self.goal:
            return self.claim("…", within, Verdict.NO, f"the only exact solution near is {least:.1e} away or more", more)
        holds = Verdict.YES if most <= self.goal else Verdict.UNDECIDED
        return self.claim(f"{most:.1e}", within, holds, f"exactly one exact solution lies within {most:.1e}, and no "
                          f"other within {within} in scaled parameters" + (
                              "" if holds == Verdict.YES else f"; more than the {self.goal:.1e} allowed"), more)


def _ball(newton: Newton) -> float:
    """Where slopes are taken: W may change by a tenth of its smallest head, Θ_i by a quarter of σ_q."""
    weight = newton.found.layer.W.flatten(1).norm(dim=1).min()
    ball = 0.1 * math.sqrt(newton.features) * float(weight)
    operator = newton.spectrum.operator
    return ball if newton.found.ranks is None else min(ball, 0.25 * operator.thinnest)


@dataclass(frozen=True)
class _Chart:
    """L', ‖J_1‖ and what it takes to go from scaled parameters to plain ones and back."""

    second: float  # L'
    ball: float
    curved: float  # ‖φ(t) − Θ − t‖ ≤ curved·‖t‖²/2
    tail: float
    out: float  # plain length over scaled length, at most
    top: float  # scaled length over plain length, at most

    @classmethod
    def of(cls, newton: Newton, ball: float) -> _Chart:
        operator = newton.spectrum.operator
        L = second(newton.found, operator.left, operator.right, newton.features, ball)
        curved = tail = 0.0
        if newton.found.ranks is not None:
            curved = 1 / (operator.thinnest - ball)
            z = ball * curved
            steep = math.sqrt(1 + z**2 / 4)
            L = L * (1 + z / 2) * (1 + z * steep) + newton.known * steep * curved
            tail = operator.tail
        left, right = (torch.linalg.svdvals(part) for part in (operator.left, operator.right))
        out = max(float(left[0] * right[:, 0].max()), 1 / math.sqrt(newton.features))
        top = max(1 / float(left[-1] * right[:, -1].min()), math.sqrt(float(operator.gram.trace())))
        return cls(L, ball, curved, tail, out, top)
