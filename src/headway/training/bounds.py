"""The second paper's constants and bounds: a priori from a start, a posteriori from what a run showed.

With κ = β₃/√H, g₀ the distance to a point of loss 1/K and M ≥ max‖U_h‖ along the path:

    training         √H ≥ (26/3)β₃g₀², η ≤ min{1/β₁², g₀², g₀²/L̂(θ⁰)}  ⟹  L̂(θ^K) ≤ 2/K + 5g₀²/(4ηK), travel ≤ 4g₀
    generalization   √H ≥ 76β₃g₀² as well                                ⟹  E[L − L̂] ≤ (4/n)(2 + 9g₀²/(4η))

A number above log 2, which is what knowing nothing costs, is called vacuous.

A posteriori every constant is replaced by what the run showed. For any θ⋆ let δ_k = max(0, L̂_k + ⟨∇L̂_k, θ⋆ − θ^k⟩ −
L̂(θ⋆)) measure how far the loss is from convex as seen from θ^k. Where descent holds, L̂_{k+1} ≤ L̂_k − (η/2)‖∇L̂_k‖²,

    L̂_{k+1} ≤ L̂(θ⋆) + δ_k + (D_k² − D_{k+1}²)/(2η),   hence   L̂_K ≤ L̂(θ⋆) + mean δ_k + (D_0² − D_K²)/(2ηK)

with D_k = ‖θ^k − θ⋆‖: no head count enters, and the best θ⋆ known gives the best bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from headway.training.data import Labelled
from headway.training.descent import Path
from headway.training.margin import Start
from headway.training.network import Network, loss_and_gradient

LOG2 = math.log(2.0)


@dataclass(frozen=True)
class Constants:
    """β₁ (‖∇L̂‖ ≤ β₁L̂), β₃ (λ_min ≥ −(β₃/√H)L̂) and β₂ (smoothness) for tokens of length R and ‖U_h‖ ≤ M."""

    beta1: float
    beta2: float
    beta3: float


def constants(tokens: int, width: int, R: float, M: float, heads: float, form: str = "safe") -> Constants:
    """form "paper": as published. "safe": rows of PX are no longer than R, attention covariances no larger than R²,
    third cumulants at most 2R‖u‖R⁴‖C‖²; free of d."""
    T, d = tokens, width
    if form == "paper":
        beta1 = math.sqrt(T) * R * (2 * R**2 * M + 1)
        beta3 = 2 * d * math.sqrt(T) * R**3 * (3 * math.sqrt(d) * R**2 * M + 1)
    else:
        beta1 = math.sqrt(T) * R * math.sqrt(1 + R**4 * M**2)
        beta3 = math.sqrt(T) * R**3 * (2 * R**2 * M + 1)
    return Constants(beta1, beta1**2 / 4 + beta3 / math.sqrt(heads), beta3)


@dataclass(frozen=True)
class Bounds:
    """What the theorem says for one setting, and which of its hypotheses fail."""

    form: str
    ground: str  # "a priori" or "a posteriori"
    M: float
    beta1: float
    beta3: float
    g0: float
    heads_needed: float
    heads_for_generalization: float
    largest_step: float
    training: float
    travel: float
    generalization: float
    failing: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.failing

    def vacuous(self, name: str) -> bool:
        return not float(getattr(self, name)) < LOG2

    def asdict(self) -> dict[str, object]:
        named = {f"{name}_vacuous": self.vacuous(name) for name in ("training", "generalization")}
        return {**asdict(self), "failing": list(self.failing), **named}


def bounds(
    start: Start, data: Labelled, heads: float, step: float, steps: int, first_loss: float, *, form: str = "safe",
    observed: Path | None = None, g0: float | None = None, equal: float = 1.0,
) -> Bounds:
    """A priori M = B₂ + 4g₀/√equal, ``equal`` the least number of heads that start, and so stay, the same: together
    they travel 4g₀ at most. With ``observed`` M is the largest ‖U_h‖ of that run. g₀ may be given: a measured
    distance to a known point of loss at most 1/K."""
    _, T, d = data.X.shape
    g0 = max(start.distance(1 / max(steps, 2)) if g0 is None else g0, 1.1)
    M = start.largest_head + 4 * g0 / math.sqrt(equal) if observed is None else max(observed.columns["largest_U"])
    c = constants(T, d, data.radius, M, heads, form)
    needed, general = ((factor * c.beta3 * g0**2) ** 2 for factor in (26 / 3, 76))
    largest = min(1 / c.beta1**2, g0**2, g0**2 / max(first_loss, 1e-300)) if math.isfinite(g0) else 0.0
    failing = []
    if not math.isfinite(g0):
        failing.append("no direction separates the gradients (γ = 0)")
    if not heads >= needed:
        failing.append(f"heads: {heads:.3g}, needed {needed:.3g}")
    if not step <= largest * (1 + 1e-12):
        failing.append(f"step: {step:.3g}, at most {largest:.3g}")
    ground = "a priori" if observed is None else "a posteriori"
    return Bounds(form, ground, M, c.beta1, c.beta3, g0, needed, general, largest,
                  2 / max(steps, 1) + 5 * g0**2 / (4 * step * max(steps, 1)), 4 * g0,
                  4 / len(data) * (2 + 9 * g0**2 / (4 * step)), tuple(failing))


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
