"""Distance to the truth where no dense Jacobian is formed: the argument of radius.py, W and c eliminated, in the
coordinates of scaled.py.

Norm: ‖(t, ω)‖, with t the scaled change of Θ and ‖ω‖ = ‖HB‖ what a change B of W and c does. Where the claim is
about ranks, t is a chart of the matrices of these ranks. In the basis of the singular vectors of the scaled Θ_i,
S their values, those near Θ_i are all of the form

    φ(t) = Θ_i + t + K(S + M)⁻¹N,      t = [[M, N], [K, 0]],

and t is the projection of φ(t) − Θ_i onto the tangent space: matrices of rank q within the least value σ_q have
one t each, no longer than their distance; so no gauge of factors is met. On the ball ‖t‖ ≤ b,
with z = b/(σ_q − b),

    ‖Dφ(t) − I‖ ≤ √(1 + z²/4)·‖t‖/(σ_q − b),      ‖φ(t) − Θ_i − t‖ ≤ ‖t‖²/(2(σ_q − b)),

hence the Jacobian of the composition is off by at most L'‖(t, ω)‖ from that at the layer, with

    L' = L(1 + z/2)(1 + z√(1 + z²/4)) + ‖J_1‖√(1 + z²/4)/(σ_q − b),

L from slopes.py and ‖J_1‖, on all matrices, by Lanczos' method.

T(θ) = θ − A·G(θ) with A = J⁺ at the layer, ℓ = ‖A‖L'. The layer itself may be off the set of those ranks by
``tail``, rounding for most; then ‖T'‖ ≤ ℓ(‖θ‖ + tail), and with ε = ℓ·tail and h = 2ηℓ/(1 − ε)² < 1 the
argument above holds with ρ₋ = (1 − ε)(1 − √(1 − h))/ℓ and ρ₊ = (1 − ε)/ℓ. The solution is a fixed point of T:
it lies within ℓρ₋(ρ₋/2 + tail) of θ̂ less the step, which is what the claim is made of, on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.certificates.accurate import Answers
from headway.certificates.jacobian import Sample, residuals
from headway.certificates.newton import SLACK, Newton, apart, less
from headway.certificates.radius import NAME, refined
from headway.certificates.slopes import second, second_thin
from headway.certificates.spectrum import Spectrum, scaled
from headway.certificates.thin import ThinScaled
from headway.core.layer import AttentionLayer
from headway.core.results import Claim, Verdict

SOLVED = 1e-4  # relative residual of the step; what it is off is part of the claim


def radius_by_products(
    found: Sample, spectrum: Spectrum, tolerance: float, again: Callable[[Sample], Spectrum]
) -> Claim:
    """The same of layers too large for a dense Jacobian; ``again`` looks at the Jacobian of another layer."""
    claim = _tried_by_products(found, spectrum, tolerance, found.layer)
    if claim.holds != Verdict.UNDECIDED or "residual" not in claim.numbers:
        return claim

    def step(at: Sample) -> tuple[Tensor, Tensor]:
        operator = spectrum.operator if at is found else scaled(at, torch.Generator().manual_seed(0))
        taken = Newton(at, replace(spectrum, operator=operator)).step(residuals(at), 1e-4)
        return taken.Theta, taken.B

    near = refined(found, step, claim.numbers["rounding"])
    if near is None:
        return claim
    second = _tried_by_products(near, again(near), tolerance, found.layer)
    return claim if second.holds == Verdict.UNDECIDED else second


def _tried_by_products(found: Sample, spectrum: Spectrum, tolerance: float, origin: AttentionLayer) -> Claim:
    """The argument at ``found.layer``, about the distance from ``origin``."""
    unit = float(origin.augmented.flatten(1).norm(dim=1).min())
    words = _Words(tolerance * unit, origin is found.layer)
    operator, newton = spectrum.operator, Newton(found, spectrum)
    answers = Answers.of(found, (operator.base, operator.out_map) if isinstance(operator, ThinScaled) else None)
    size, noise = answers.size, answers.off
    numbers = {"residual": size, "rounding": noise, "tolerance": words.goal, "unit": unit}
    if not newton.usable or newton.features <= 0:
        return words.undecided("…", "the least singular value of the Jacobian is not told from zero", numbers)
    chart = Chart.of(newton, _ball(newton))
    numbers |= {"least_singular_value": 1 / newton.whole, "lipschitz": chart.second, "tail": chart.tail}
    far = chart.top * words.goal
    steep = math.sqrt(2) * max(newton.known, 1.0)  # ‖J‖ at most
    if words.here and far <= chart.ball and size - noise > (steep + chart.second * far / 2) * far:
        return words.no(size, numbers)
    step = newton.step(answers.left, SOLVED)
    shown = newton.known * step.off + operator.rounding.projector * size
    away = math.hypot(step.off, shown) + newton.whole * (noise + newton.known * chart.tail)
    eta = math.hypot(float(step.t.norm()), step.shown) * (1 + SLACK) + away
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
    length = apart(origin, less(operator.layer, step.Theta, step.B))
    return words.around(length, beyond, numbers)


@dataclass(frozen=True)
class _Words:
    """The claim's sentences."""

    goal: float
    here: bool  # the argument is at the layer itself

    def claim(self, at: str, within: str, holds: Verdict, reason: str, numbers: Mapping[str, float]) -> Claim:
        centre = "this one" if self.here else "where Newton's method leads from it"
        return Claim(NAME, f"The layer that made the labels is within {at} of this one in all parameters together "
                     f"({self.goal:.1e} is allowed)",
                     f"the labels are exact, and a layer of this shape within {within}, in scaled parameters, of "
                     f"{centre} made them; the bound of the least singular value rests on a random start of "
                     "Lanczos' method",
                     holds, reason, numbers)

    def undecided(self, within: str, reason: str, numbers: Mapping[str, float]) -> Claim:
        return self.claim("…", within, Verdict.UNDECIDED, reason, numbers)

    def no(self, size: float, numbers: Mapping[str, float]) -> Claim:
        return self.claim("…", "the allowed distance", Verdict.NO,
                          f"the residual {size:.1e} is more than any layer within {self.goal:.1e} would leave",
                          numbers)

    def around(self, length: float, beyond: float, numbers: Mapping[str, float]) -> Claim:
        """Within ``beyond`` of a point that is so far from the layer lies the only exact solution near."""
        most, least = length * (1 + SLACK) + beyond, length * (1 - SLACK) - beyond
        more = {**numbers, "radius": most, "at_least": max(least, 0.0)}
        within = f"{more['unique_within']:.1e}"
        if least > self.goal:
            told, holds = f"the only exact solution near is {least:.1e} away or more", Verdict.NO
            return self.claim("…", within, holds, told, more)
        told = (f"exactly one exact solution lies within {most:.1e}, and no other within {within} in scaled "
                "parameters")
        holds = Verdict.YES if most <= self.goal else Verdict.UNDECIDED
        told += "" if holds == Verdict.YES else f"; more than the {self.goal:.1e} allowed"
        return self.claim(f"{most:.1e}", within, holds, told, more)


def _ball(newton: Newton) -> float:
    """Where slopes are taken: W may change by a tenth of its smallest head, Θ_i by a quarter of σ_q; of thin
    factors, O by a quarter of its least singular value."""
    weight = newton.found.layer.W.flatten(1).norm(dim=1).min()
    ball = 0.1 * math.sqrt(newton.features) * float(weight)
    operator = newton.spectrum.operator
    if isinstance(operator, ThinScaled):
        return 0.25 * min(operator.thinnest, operator.narrowest * math.sqrt(newton.features))
    return ball if newton.found.ranks is None else min(ball, 0.25 * operator.thinnest)


@dataclass(frozen=True)
class Chart:
    """L', ‖J_1‖ and what it takes to go from scaled parameters to plain ones and back."""

    second: float  # L'
    ball: float
    curved: float  # ‖φ(t) − Θ − t‖ ≤ curved·‖t‖²/2
    tail: float
    out: float  # plain length over scaled length, at most
    top: float  # scaled length over plain length, at most

    @classmethod
    def of(cls, newton: Newton, ball: float) -> Chart:
        operator = newton.spectrum.operator
        if isinstance(operator, ThinScaled):
            return cls._thin(newton, operator, ball)
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

    @classmethod
    def _thin(cls, newton: Newton, operator: ThinScaled, ball: float) -> Chart:
        """With ‖dΘ‖ ≤ λ‖t‖ and ‖dW‖ ≤ ε‖K‖ + ν‖ω‖, λ = max ‖L_i‖‖R_i‖, ε = max ‖E_i‖, ν = max ‖V_i‖/√g; and back,
        ‖(Z, Y)‖ ≤ 2T for a matrix of its rank at a scaled distance T ≤ σ/2 and ‖K‖ ≤ 2T alike, dO ≤ T."""

        def largest(*parts: Tensor) -> float:
            return float(torch.stack([torch.linalg.matrix_norm(part, 2) for part in parts]).prod(0).max())

        root, s = math.sqrt(newton.features), operator.narrowest
        turn, up = largest(operator.L.down, operator.R.down), largest(operator.L.up, operator.R.up)
        wide, values = largest(operator.E.down), largest(operator.base.V)
        out = max(turn, math.sqrt(2) * wide, math.sqrt(2 * values**2 + 1) / root)
        curved = (turn / operator.thinnest + wide / (s * root)) / out
        far = largest(operator.E.up)
        top = 2 * max(up, far) + math.sqrt(float(operator.gram.trace())) * (far + 1)
        return cls(second_thin(newton.found, operator, newton.features, ball), ball, curved, 0.0, out, top)
