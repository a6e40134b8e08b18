"""The second paper's constants and bounds: a priori from a start, a posteriori from what a run showed.

With κ = β₃/√H, θ⋆ a point of loss ≤ 1/K, g₀ = max(‖θ⋆ − θ⁰‖, 1.1), and M ≥ max‖U_h‖ along the path and on the
segments from its points to θ⋆ (the proof bounds the curvature on those segments, κ‖θ^k − θ⋆‖² ≤ ½):

    training         √H ≥ (26/3)β₃g₀², η ≤ min{1/β₁², g₀², g₀²/L̂(θ⁰)}  ⟹  L̂(θ^K) ≤ 2/K + 5g₀²/(4ηK), travel ≤ 4g₀
    generalization   the same with √H ≥ 76β₃g₀²                          ⟹  E[L − L̂] ≤ (4/n)(2 + 9g₀²/(4η))

Each has its own list of hypotheses that fail. The second is an average over samples, and its proof runs descent on
every sample with one example left out: the hypotheses have to hold for all samples, and one is at hand to check.
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
from headway.training.network import Network, loss_and_gradient, losses

LOG2 = math.log(2.0)


@dataclass(frozen=True)
class Constants:
    """β₁ (‖∇L̂‖ ≤ β₁L̂), β₃ (λ_min ≥ −(β₃/√H)L̂) and β₂ (smoothness) for tokens of length R and ‖U_h‖ ≤ M."""

    beta1: float
    beta2: float
    beta3: float


def constants(tokens: int, width: int, R: float, M: float, heads: float, form: str = "safe") -> Constants:
    """form "safe": rows of PX are no longer than R, attention covariances no larger than R², third cumulants at
    most 2R‖u‖R⁴‖C‖²; free of d. "paper": the paper's constants in the form in which they are known to us, not
    compared with its text; none is below the safe one, so what holds with them holds.
    """
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
    """What the theorem says for one setting, and which of its hypotheses fail: ``failing`` for the training bound
    and the travel, ``failing_generalization`` for the generalization bound. With a list that is not empty a bound
    is a number without a claim."""

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
    failing_generalization: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Of the training bound and the travel."""
        return not self.failing

    @property
    def holds_generalization(self) -> bool:
        return not self.failing_generalization

    def vacuous(self, name: str) -> bool:
        return not float(getattr(self, name)) < LOG2

    def asdict(self) -> dict[str, object]:
        named = {f"{name}_vacuous": self.vacuous(name) for name in ("training", "generalization")}
        lists = {name: list(getattr(self, name)) for name in ("failing", "failing_generalization")}
        return {**asdict(self), **lists, **named}


def bounds(
    net: Network, data: Labelled, step: float, steps: int, *, star: Network | None, form: str = "safe",
    observed: Path | None = None, rule: str = "constant",
) -> Bounds:
    """Both bounds for ``steps`` steps from ``net`` with the comparison point ``star`` (None: none is known).

    A priori M = B₂ + 4g₀/√(least number of heads that start, and so stay, the same): together they travel 4g₀ at
    most, and θ⋆, held as the same groups, is g₀ away. With ``observed`` M is the largest ‖U_h‖ of that run and of
    θ⋆, which covers the segments between them: a norm is largest at an end.
    """
    _, T, d = data.X.shape
    K = max(steps, 1)
    first_loss = _loss(net, data)
    g0 = math.inf if star is None else max(star.minus(net).norm(), 1.1)
    if observed is None:
        M = math.sqrt(float(net.squares().max())) + 4 * g0 / math.sqrt(float(net.count.min()))
    else:
        M = max(*observed.columns["largest_U"], 0.0 if star is None else star.largest_U())
    c = constants(T, d, data.radius, M, net.heads, form)
    needed, general = ((factor * c.beta3 * g0**2) ** 2 for factor in (26 / 3, 76))
    largest = min(1 / c.beta1**2, g0**2, g0**2 / max(first_loss, 1e-300)) if math.isfinite(g0) else 0.0
    shared = _shared(star, data, K, step, largest, rule)
    # An average over samples, by runs with one example left out: what one run showed is no bound on theirs.
    unseen = () if observed is None else ("M: seen on this run alone, not on runs with an example left out",)
    ground = "a priori" if observed is None else "a posteriori"
    return Bounds(form, ground, M, c.beta1, c.beta3, g0, needed, general, largest,
                  2 / K + 5 * g0**2 / (4 * step * K), 4 * g0, 4 / len(data) * (2 + 9 * g0**2 / (4 * step)),
                  (*shared, *_too_few(net.heads, needed)), (*shared, *_too_few(net.heads, general), *unseen))


def _shared(
    star: Network | None, data: Labelled, K: int, step: float, largest: float, rule: str
) -> tuple[str, ...]:
    """The hypotheses that both bounds have, where they fail."""
    failing = []
    if rule != "constant":
        failing.append(f"rule: {rule}, the theorem is for a constant step")
    if star is None:
        failing.append("no direction separates the gradients (γ = 0)")
    elif not (loss := _loss(star, data)) <= 1 / K:
        failing.append(f"reach: the point at distance g₀ has loss {loss:.3g}, needed at most {1 / K:.3g}")
    if not step <= largest * (1 + 1e-12):
        failing.append(f"step: {step:.3g}, at most {largest:.3g}")
    return tuple(failing)


def _too_few(heads: float, needed: float) -> tuple[str, ...]:
    return () if heads >= needed else (f"heads: {heads:.3g}, needed {needed:.3g}",)


def _loss(net: Network, data: Labelled) -> float:
    return float(losses(data.y * net(data.X)).mean())


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
