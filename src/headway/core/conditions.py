"""The first paper's non-degeneracy conditions as numbers measured on a layer, or on estimates of its parts.

The kinds of condition are the paper's; the bounds below are ours, and wide: what falls under them is visibly
degenerate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

CONDITIONS = (  # name, least value, what it means to fall below
    ("sum_strength", 0.05, "the projections cancel, power of ΣW_i over that of the labels"),
    ("sum_singular", 1e-3, "ΣW_i is singular, least over largest singular value"),
    ("head_distance", 1e-2, "two heads are equal, relative distance"),
    ("head_weight", 1e-6, "a head is not needed, as when two are equal, least over largest ‖W_i‖"),
    ("norm_ratio", 1e-6, "a head is not needed, as when two are equal, least over largest ‖Θ_i‖"),
    ("gram", 1e-4, "the Θ_i are linearly dependent, least over largest eigenvalue of their Gram matrix"),
    ("w_apart", 1e-3, "the W_i are all parallel, second over first singular value of them together"),
    ("effective_rank", 1.5, "an attention matrix is close to rank one, effective rank"),
    ("apart_from_sum", 1e-3, "a W_i is a multiple of ΣW_i, relative distance"),
)


def measure(
    Theta: Tensor, W: Tensor | None = None, *, total: Tensor | None = None, label_power: float | None = None
) -> dict[str, float]:
    """Numbers for the Θ_i (m, d, d), the W_i (m, d, e) where known, and their sum, known or estimated.

    effective_rank: least ‖Θ‖_F²/‖Θ‖_op². norm_ratio, head_weight: smallest over largest norm of Θ_i and of W_i.
    head_distance: least ‖Θ_i − Θ_j‖ over the larger norm. gram: of the Θ_i scaled to one length. sum_singular,
    sum_strength: of ΣW_i, the latter against the mean square of a label row. apart_from_sum: least distance of a
    W_i from the multiples of ΣW_i, over ‖W_i‖. w_apart: of the W_i scaled to one length.
    """
    Theta = Theta.double()
    if total is None and W is not None:
        total = W.sum(0)
    norms = Theta.flatten(1).norm(dim=1)
    top = torch.linalg.matrix_norm(Theta, 2).clamp_min(1e-300)
    found = {
        "effective_rank": float((norms / top).square().min()),
        "norm_ratio": float(norms.min() / norms.max().clamp_min(1e-300)),
    }
    if total is not None:
        s = torch.linalg.svdvals(total.double())
        found["sum_singular"] = float(s[-1] / s[0].clamp_min(1e-300))
        if label_power is not None:
            found["sum_strength"] = float(s.square().sum()) / max(label_power, 1e-300)
    if len(Theta) > 1:
        flat = Theta.flatten(1)
        size = torch.maximum(norms[:, None], norms[None, :]).clamp_min(1e-300)
        apart = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist") / size
        found["head_distance"] = float((apart + 10 * torch.eye(len(Theta)).to(apart)).min())
        unit = flat / norms.clamp_min(1e-300).unsqueeze(1)
        values = torch.linalg.eigvalsh(unit @ unit.T)
        found["gram"] = float(values[0] / values[-1])
        if W is not None:
            assert total is not None
            V = W.double().flatten(1)
            weight = V.norm(dim=1)
            found["head_weight"] = float(weight.min() / weight.max().clamp_min(1e-300))
            together = torch.linalg.svdvals(V / weight.clamp_min(1e-300).unsqueeze(1))
            found["w_apart"] = float(together[1] / together[0].clamp_min(1e-300)) if len(together) > 1 else 0.0
            along = total.double().flatten() / total.double().norm().clamp_min(1e-300)
            rest = V - torch.outer(V @ along, along)
            found["apart_from_sum"] = float((rest.norm(dim=1) / weight.clamp_min(1e-300)).min())
    return found


def broken(numbers: Mapping[str, float]) -> list[str]:
    """The conditions that fail, each as words with its measured value."""
    return [f"{words} {numbers[name]:.1e} (wanted above {least:g})" for name, least, words in CONDITIONS
            if numbers.get(name, math.inf) < least]
