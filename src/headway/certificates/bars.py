"""How far are the heads off, if the labels are noisy? A bound for each, from examples that had no part in the
layer.

Labels y = F(θ*) + noise of one size s, independent of the layer and from row to row. To first order the
least-squares fit to these examples is θ̂ − step, with step = J⁺(F(θ̂) − y), and it misses θ* by e, of covariance
s²(JᵀJ)⁻¹. Hence for a head's Θ_i (or W_i), whatever its error is and however the layer was found,

    ‖Θ̂_i − Θ_i*‖ ≤ ‖step_i‖ + ‖e_i‖,      E‖e_i‖² = s² tr_i,

and ‖e_i‖² is a sum of squares of Gaussians with variances s²λ_j that add up to s² tr_i: it exceeds
s²(tr_i + 2√x f_i + 2x f_i), f_i² = Σλ_j², with probability e^{−x} at most (Laurent and Massart, 2000, Lemma 1; the
largest λ_j is at most f_i). Labels of many rows make e Gaussian, whatever the noise is.

Small layers: (JᵀJ)⁻¹ in full. Large ones: what noise does is tried. PROBES vectors of random labels, each solved
for as the labels are, show ‖e_i‖²/s² with mean tr_i and variance 2f_i²; the mean is taken with three of its
standard errors.

The claim is first order and about noise. Both are looked at: the layer that the step leads to must leave what the
linear model says (BENT), and what is left must not answer to the inputs (STRUCTURE).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from scipy import special
from torch import Tensor

from headway.certificates.accurate import Answers
from headway.certificates.jacobian import Sample, residuals
from headway.certificates.newton import Newton, Step, moved
from headway.core import attention
from headway.core.devices import normal
from headway.core.results import Claim, Verdict
from headway.linalg.projected import features_of

NAME = "error bars"
ASSUMPTION = ("independent label noise of one size, that had no part in how this layer was found, around a layer "
              "of this shape near this one; to first order")
PROBES = 3, 10  # random labels by which the bars of large layers are estimated: at least, and at most
EVEN = 0.1  # deviation of what they show, relative to its mean, at which they end
TOLERANCE = 1e-2  # of their solves: bars a hundredth too short or long
BENT = 0.1  # of what noise lets parameters explain: second-order effects beyond it leave the claim undecided
STRUCTURE = 6.0  # deviations by which a residual may answer to the inputs before it is not taken for noise
ROWS = 400  # below which what answers to the inputs is not told from noise: with 60 a whole head was once not
HEADS = 4  # random heads whose answers it is compared with, beside those of tokens and their mean


@dataclass(frozen=True)
class Bars:
    """Θ first and then W, of every head, (2, m): the step's length, tr_i, f_i."""

    noise: float  # s
    step: Tensor
    trace: Tensor
    spread: Tensor
    Theta: Tensor  # the step
    B: Tensor
    left: Sequence[Tensor]  # what the linear model leaves
    seen: Sequence[float]  # what ``explained`` is of that, over s², and then for random labels
    numbers: Mapping[str, float]


def error_bars(found: Sample, confidence: float = 0.99) -> Claim:
    """From the dense Jacobian."""
    few = _few(found)
    if few is not None:
        return few
    N, g = found.normal
    factor, info = torch.linalg.cholesky_ex(N)
    if int(info):
        return _undecided("the parameters are not determined")
    inverse = torch.cholesky_inverse(factor)

    def of(step: Tensor) -> tuple[Tensor, Tensor]:
        return (step[: found.theta_unknowns].view_as(found.layer.augmented),
                step[found.theta_unknowns :].view(-1, found.layer.out_width))

    Theta, B = of(torch.cholesky_solve(g.unsqueeze(1), factor).squeeze(1))
    left = _left(found, Theta, B, residuals(found))
    sizes = [Theta[0].numel()] * found.layer.heads + [found.layer.W[0].numel()] * found.layer.heads
    ends = list(accumulate(sizes))
    blocks = [inverse[end - size : end, end - size : end] for size, end in zip(sizes, ends, strict=True)]
    trace, spread = (torch.stack([size(block) for block in blocks]).view(2, -1)
                     for size in (torch.trace, torch.norm))
    tried, generator = [], torch.Generator().manual_seed(0)
    for _ in range(PROBES[0]):
        labels = random_labels(found, left, generator)
        change = torch.cholesky_solve(_adjoint(found, labels).unsqueeze(1), factor).squeeze(1)
        tried.append(_left(found, *of(change), labels))
    seen = _seen(found, [left, *tried])
    bars = Bars(_noise(found, left), _lengths(found, Theta, B), trace, spread, Theta, B, left, seen, {})
    return _claim(found, bars, confidence)


@dataclass(frozen=True)
class Tried:
    """The step for the labels, and those for PROBES random labels."""

    step: Step
    probes: tuple[Step, ...]
    sure: bool  # the solves are known to be near

    @classmethod
    def of(cls, found: Sample, newton: Newton, generator: torch.Generator) -> Tried:
        if not newton.usable:
            step = newton.step(residuals(found), TOLERANCE, 3)
            return cls(step, (), False)
        step = newton.step(residuals(found), TOLERANCE)
        probes: list[Step] = []
        while len(probes) < PROBES[0] or (len(probes) < PROBES[1] and _uneven(found, probes)):
            probes.append(newton.step(random_labels(found, step.left, generator), TOLERANCE))
        return cls(step, tuple(probes), newton.usable)

    @property
    def products(self) -> int:
        return self.step.products + sum(probe.products for probe in self.probes)


def error_bars_by_products(found: Sample, tried: Tried, confidence: float) -> Claim:
    """From random labels, each solved for."""
    few = _few(found)
    if few is not None:
        return few
    if not tried.sure:
        return _undecided("the parameters are not known to be determined")
    step = tried.step
    seen = _seen(found, [step.left, *(probe.left for probe in tried.probes)])
    every = torch.stack([_lengths(found, probe.Theta, probe.B).square() for probe in tried.probes])
    deviation, count = every.std(0), len(every)
    trace = every.mean(0) + 3 * deviation / math.sqrt(count)
    # f from so few may be short: a χ² of count − 1 degrees is that small once in a hundred times.
    spread = deviation / math.sqrt(2) * math.sqrt((count - 1) / float(special.chdtri(count - 1, 0.99)))
    numbers = {"probes": float(count), "products": float(tried.products),
               "bars_off": float((deviation / every.mean(0)).max()) / (2 * math.sqrt(count))}
    bars = Bars(_noise(found, step.left), _lengths(found, step.Theta, step.B), trace, torch.minimum(spread, trace),
                step.Theta, step.B, step.left, seen, numbers)
    return _claim(found, bars, confidence)


def _uneven(found: Sample, probes: list[Step]) -> bool:
    every = torch.stack([_lengths(found, probe.Theta, probe.B).square() for probe in probes])
    return bool((every.std(0) > EVEN * every.mean(0)).any())


def _claim(found: Sample, bars: Bars, confidence: float) -> Claim:
    layer, p = found.layer, found.unknowns
    unit = torch.stack([layer.augmented.flatten(1).norm(dim=1), layer.W.flatten(1).norm(dim=1)]).clamp_min(1e-300)
    x = math.log((2 * layer.heads + 1) / (1 - confidence))
    short = 2 * math.sqrt(x / (found.problem.equations - p))  # χ² of f degrees is above f − 2√(fx), but for e^{−x}
    expected = bars.noise * bars.trace.sqrt() / unit
    away = float(bars.step.norm() / (bars.noise * bars.trace.sum().sqrt()).clamp_min(1e-300))
    numbers = {"noise": bars.noise, "away_from_fit": away, **bars.numbers}
    if short >= 0.9:
        return _undecided(f"{found.problem.equations} equations tell the noise of {p} parameters too badly",
                          numbers)
    beyond = (bars.trace + 2 * (math.sqrt(x) + x) * bars.spread).sqrt() * bars.noise / math.sqrt(1 - short)
    most = ((1 + TOLERANCE) * bars.step + beyond) / unit
    for i in range(layer.heads):
        numbers |= {f"theta_{i + 1}": float(expected[0, i]), f"w_{i + 1}": float(expected[1, i]),
                    f"theta_{i + 1}_at_most": float(most[0, i]), f"w_{i + 1}_at_most": float(most[1, i])}
    words = ", ".join(f"head {i + 1}: Θ {float(most[0, i]):.1e}, W {float(most[1, i]):.1e}"
                      for i in range(layer.heads))
    why = _why_not(found, bars, numbers)
    reason = f"noise estimated at {bars.noise:.1e}; " + (
        why or f"this layer is {away:.1g} bars away from the fit to these examples")
    return Claim(NAME, f"Relative errors, with confidence {confidence:g}, are at most: {words}", ASSUMPTION,
                 Verdict.UNDECIDED if why else Verdict.YES, reason, numbers)


def _why_not(found: Sample, bars: Bars, numbers: dict[str, float]) -> str:
    """What is left is no noise, or the linear model is not enough; empty where neither shows."""
    answers, left = Answers.of(found), _squares(bars.left)
    if answers.size <= answers.off:
        return ""  # rounding could have made all of it
    there = Answers.of(replace(found, layer=moved(found, bars.Theta, bars.B))).size ** 2
    numbers["bent"] = max(there - left, 0.0) / (found.unknowns * bars.noise**2)
    if there - left > BENT * found.unknowns * bars.noise**2 + answers.off**2:
        return ("the layer is too far from the fit to these examples for an answer to first order (second-order "
                f"effects are {numbers['bent']:.1e} of what noise explains)")
    if found.problem.rows < ROWS:
        return (f"{found.problem.rows} rows are too few to tell noise from what answers to the inputs; "
                f"{ROWS} would do")
    seen, *others = bars.seen
    usual = sum(others) / len(others)
    # Of f degrees, known from the random labels: their mean is f, a deviation √(2f).
    numbers["structure"] = (seen - usual) / math.sqrt(2 * usual)
    if numbers["structure"] > STRUCTURE:
        return (f"what is left answers to the inputs ({numbers['structure']:.1f} deviations more than noise does): "
                "it is no noise around a layer of this shape")
    return ""


def _seen(found: Sample, every: Sequence[Sequence[Tensor]]) -> list[float]:
    parts = zip(explained(found, every), every, strict=True)
    return [part / max(_noise(found, left) ** 2, 1e-300) for part, left in parts]


def explained(found: Sample, every: Sequence[Sequence[Tensor]]) -> list[float]:
    """The part of Σ‖r‖² that tokens, their mean in sight and random heads explain, for each of these r."""
    layer = found.layer
    generator = torch.Generator().manual_seed(0)
    size = layer.augmented.flatten(1).norm(dim=1).mean()
    Theta = torch.randn(HEADS, *layer.augmented.shape[1:], generator=generator, dtype=torch.float64).to(layer.W)
    Theta = torch.cat([size * Theta / Theta.flatten(1).norm(dim=1).view(-1, 1, 1), torch.zeros_like(Theta[:1])])
    G: Tensor | float = 0.0
    R: Tensor | float = 0.0
    for rows, *left in zip(found.problem.chunks, *every, strict=True):
        n, k, d = rows.X.shape
        H = attention.attend(rows.patterns(Theta), rows.X).reshape(n * k, -1)
        Z = torch.cat([H, rows.X.reshape(n * k, d), H.new_ones(n * k, 1)], dim=1)
        if rows.valid is not None:
            Z = Z * rows.valid.reshape(-1, 1)
        G, R = G + Z.mT @ Z, R + Z.mT @ torch.cat(left, dim=1)
    assert isinstance(G, Tensor) and isinstance(R, Tensor)
    scale = G.diagonal().clamp_min(1e-300).rsqrt()
    values, vectors = torch.linalg.eigh(G * scale[:, None] * scale[None, :])
    there = values > 1e-10 * values[-1]
    shown = (vectors.mT @ (scale.unsqueeze(1) * R))[there] / values[there].sqrt().unsqueeze(1)
    return [float(part.square().sum()) for part in shown.split(layer.out_width, dim=1)]


def _lengths(found: Sample, Theta: Tensor, B: Tensor) -> Tensor:
    """(2, m): of each head's part."""
    W = B[: found.layer.heads * found.layer.width].view_as(found.layer.W)
    return torch.stack([Theta.flatten(1).norm(dim=1), W.flatten(1).norm(dim=1)])


def _left(found: Sample, Theta: Tensor, B: Tensor, of: Sequence[Tensor]) -> list[Tensor]:
    """``of``, rows of (rows, e), less what this change explains."""
    left = []
    for rows, r in zip(found.problem.chunks, of, strict=True):
        P, H = features_of(rows, found.layer.augmented, found.problem.offset)
        dY = attention.project(rows.tangent(P, Theta), found.layer.W)
        dY = dY if rows.valid is None else dY * rows.valid
        left.append(r - dY.flatten(0, 1) - H @ B)
    return left


def _adjoint(found: Sample, of: Sequence[Tensor]) -> Tensor:
    """Jᵀ of rows, in the order Θ̃, W (and c)."""
    total: Tensor | float = 0.0
    for rows, r in zip(found.problem.chunks, of, strict=True):
        P, H = features_of(rows, found.layer.augmented, found.problem.offset)
        U = r.view(*rows.X.shape[:2], -1)
        gTheta = rows.cotangent(P, attention.spread(U, found.layer.W), found.layer.augmented)
        total = total + torch.cat([gTheta.flatten(), (H.mT @ r).flatten()])
    assert isinstance(total, Tensor)
    return total


def random_labels(found: Sample, like: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Standard normal numbers, 0 on filling."""
    labels = [normal(r, generator) for r in like]
    return [label if rows.valid is None else label * rows.valid.reshape(-1, 1)
            for label, rows in zip(labels, found.problem.chunks, strict=True)]


def _squares(rows: Sequence[Tensor]) -> float:
    return sum(float(r.square().sum()) for r in rows)


def _noise(found: Sample, left: Sequence[Tensor]) -> float:
    return math.sqrt(_squares(left) / (found.problem.equations - found.unknowns))


def _few(found: Sample) -> Claim | None:
    if found.problem.equations > found.unknowns:
        return None
    return _undecided(f"{found.problem.equations} equations leave nothing to estimate the noise of "
                      f"{found.unknowns} parameters from")


def _undecided(reason: str, numbers: Mapping[str, float] | None = None) -> Claim:
    return Claim(NAME, "Errors per head", ASSUMPTION, Verdict.UNDECIDED, reason, numbers or {})
