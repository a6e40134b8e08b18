"""Both theorems for one setting, side by side: a priori from a start, a posteriori with what a run showed.

Each has its own list of hypotheses that fail (convergence.py, generalization.py). A number above log 2, which is
what knowing nothing costs, is called vacuous.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from headway.training.constants import constants
from headway.training.convergence import (
    failing_hypotheses,
    heads_needed,
    largest_step,
    mean_loss,
    too_few,
    training_bound,
    travel_bound,
)
from headway.training.data import Labelled
from headway.training.descent import Path
from headway.training.generalization import UNSEEN, gap_bound, heads_for_generalization
from headway.training.network import Network

LOG2 = math.log(2.0)


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
    g0 = math.inf if star is None else max(star.minus(net).norm(), 1.1)
    if observed is None:
        M = math.sqrt(float(net.squares().max())) + 4 * g0 / math.sqrt(float(net.count.min()))
    else:
        M = max(*observed.columns["largest_U"], 0.0 if star is None else star.largest_U())
    c = constants(T, d, data.radius, M, net.heads, form)
    needed, general = heads_needed(c, g0), heads_for_generalization(c, g0)
    largest = largest_step(c, g0, mean_loss(net, data))
    shared = failing_hypotheses(star, data, K, step, largest, rule)
    unseen = () if observed is None else (UNSEEN,)
    ground = "a priori" if observed is None else "a posteriori"
    return Bounds(form, ground, M, c.beta1, c.beta3, g0, needed, general, largest,
                  training_bound(g0, step, K), travel_bound(g0), gap_bound(g0, step, len(data)),
                  (*shared, *too_few(net.heads, needed)), (*shared, *too_few(net.heads, general), *unseen))
