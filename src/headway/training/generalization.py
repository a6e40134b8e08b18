"""The generalization theorem: with more heads still, the mean gap between test and training loss falls as 1/n.

    hypotheses of the training theorem with √H ≥ 76β₃g₀² in place of (26/3)β₃g₀²  ⟹  E[L − L̂] ≤ (4/n)(2 + 9g₀²/(4η))

An average over samples, by on-average stability: the proof runs descent on every sample with one example left out,
and such a run ends within (2ηβ₁/n)Σ_kℓ_i of the full one. So the hypotheses have to hold for all samples, and one
is at hand to check. The theorem is quoted as it is known to us, not derived again; ``leave_one_out`` measures the
stability.
"""

from __future__ import annotations

import torch

from headway.training.constants import Constants, constants
from headway.training.convergence import heads_needed
from headway.training.data import Labelled
from headway.training.descent import Path, descend
from headway.training.network import loss_and_gradient

FACTOR = 76.0  # √H ≥ FACTOR·β₃g₀²
# What one run showed is no bound on the runs with an example left out.
UNSEEN = "M: seen on this run alone, not on runs with an example left out"


def heads_for_generalization(c: Constants, g0: float) -> float:
    return heads_needed(c, g0, FACTOR)


def gap_bound(g0: float, step: float, examples: int) -> float:
    return 4 / examples * (2 + 9 * g0**2 / (4 * step))


def leave_one_out(data: Labelled, path: Path, count: int, *, seed: int = 0) -> list[dict[str, float]]:
    """‖θ^K − θ^K without example i‖ for ``count`` examples, against (2ηβ₁/n)Σ_kℓ_i(θ^k), β₁ with the M observed."""
    n, T, d = data.X.shape
    beta1 = constants(T, d, data.radius, max(path.columns["largest_U"]), path.start.heads).beta1
    chosen = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:count].tolist()
    lost = dict.fromkeys(chosen, 0.0)
    net = path.start
    for _ in range(path.steps):
        _, gradient, margins = loss_and_gradient(net, data.X, data.y)
        for i in chosen:
            lost[i] += float(-torch.nn.functional.logsigmoid(margins[i]))
        net = net.plus(gradient, -path.step)
    rows = []
    for i in chosen:
        keep = torch.arange(n) != i
        # The leave-one-out loss of the stability argument keeps the factor 1/n: the step is scaled instead.
        part = data.take(keep)
        other = descend(path.start, part, steps=path.steps, step=path.step * (n - 1) / n).end
        rows.append({"left_out": float(i), "moved": net.minus(other).norm(),
                     "allowed": 2 * path.step * beta1 / n * lost[i]})
    return rows
