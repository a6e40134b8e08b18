"""Full-batch descent with a constant, a normalized or a Polyak step, and a record of what happened on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from headway.core import checks
from headway.core.names import RULES
from headway.training.data import Labelled
from headway.training.network import Network, loss_and_gradient, losses

COLUMNS = ("loss", "gradient", "travel", "norm", "largest_U", "norm_W", "margin", "train_error")


@dataclass
class Path:
    """The run: parameters at the start, at the end and at the steps asked for, and numbers at every step."""

    start: Network
    end: Network
    step: float
    rule: str
    columns: dict[str, list[float]] = field(default_factory=dict)
    test: dict[str, list[float]] = field(default_factory=dict)  # at the steps in test["iteration"]
    kept: dict[int, Network] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return len(self.columns["loss"]) - 1


def descend(
    net: Network, data: Labelled, *, steps: int, step: float = 1.0, rule: str = "constant",
    test: Labelled | None = None, every: int = 10, keep: tuple[int, ...] = (),
    report: Callable[[int, float], None] | None = None,
) -> Path:
    """θ ← θ − η_k ∇L̂(θ): η_k = η, η/‖∇L̂‖ (normalized), or L̂/(2‖∇L̂‖²)·η (Polyak for an infimum of 0).

    Numbers are recorded at every step, on ``test`` every ``every`` steps; networks at the steps in ``keep``.
    """
    checks.choice("rule", rule, RULES)
    checks.whole("steps", steps, 0)
    checks.number("step", step, strictly=True)
    begun = net
    path = Path(net, net, step, rule, {name: [] for name in COLUMNS},
                {"iteration": [], "test_loss": [], "test_error": [], "mass": []})
    for k in range(steps + 1):
        loss, gradient, margins = loss_and_gradient(net, data.X, data.y)
        size = gradient.norm()
        norm = net.norm()
        row = (loss, size, net.minus(begun).norm(), norm, net.largest_U(),
               math.sqrt(float((net.count * net.W.square().sum((1, 2))).sum())),
               float(margins.min()) / max(norm, 1e-300), float((margins <= 0).double().mean()))
        for name, value in zip(COLUMNS, row, strict=True):
            path.columns[name].append(value)
        if k in keep:
            path.kept[k] = net
        if k % every == 0 or k == steps:
            path.test["iteration"].append(float(k))
            path.test["mass"].append(math.nan if data.relevant is None else net.mass(data.X, data.relevant))
            if test is not None:
                scores = test.y * net(test.X)
                path.test["test_loss"].append(float(losses(scores).mean()))
                path.test["test_error"].append(float((scores <= 0).double().mean()))
            if report is not None:
                report(k, loss)
        if k == steps or size == 0.0:
            break
        rate = {"constant": step, "normalized": step / size, "polyak": step * loss / (2 * size**2)}[rule]
        net = net.plus(gradient, -rate)
        if not bool(torch.isfinite(net.U).all()):
            checks.refuse("step", "a step at which descent stays finite", f"{step:g}: it diverged after {k} steps",
                          f"step={step / 10:g}")
    path.end = net
    return path
