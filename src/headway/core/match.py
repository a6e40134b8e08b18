"""Align the heads of two layers; errors that know the symmetry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from headway.core import checks, gauge
from headway.core.examples import Examples
from headway.core.factored import FactoredLayer
from headway.core.layer import AttentionLayer, of_softmax


@dataclass(frozen=True)
class Match:
    """The best assignment of learned heads to true ones, with relative errors per true head.

    order[i] is the learned head for true head i, or −1 where none is left (missing). theta_error[i] is
    ‖[Θ; u] − [Θ*; u*]‖/‖[Θ*; u*]‖, w_error[i] is ‖W − W*‖/‖W*‖; both are inf for a missing head. Of a layer in
    factors they are those of all that determines a head's scores (QK) and of its V_jO_i (OV), free of gauge.
    """

    order: tuple[int, ...]
    theta_error: tuple[float, ...]
    w_error: tuple[float, ...]
    offset_error: float
    missing: tuple[int, ...]
    excess: tuple[int, ...]

    @property
    def worst(self) -> float:
        """The largest error of any head; inf when a head is missing or in excess."""
        if self.missing or self.excess:
            return float("inf")
        return max(*self.theta_error, *self.w_error, self.offset_error)

    def __str__(self) -> str:
        """Who matches whom and how far it moved, a line for each head."""
        lines = []
        for i, (j, scores, values) in enumerate(zip(self.order, self.theta_error, self.w_error, strict=True)):
            moved = "no partner" if j < 0 else f"head {j + 1}, QK moved by {scores:.1e}, OV by {values:.1e}"
            lines.append(f"head {i + 1}: {moved}")
        if self.excess:
            lines.append(f"left without a partner: head {', '.join(str(j + 1) for j in self.excess)}")
        return "\n".join(lines)


def match(
    learned: AttentionLayer | FactoredLayer, truth: AttentionLayer | FactoredLayer, on: Examples | None = None
) -> Match:
    """min over permutations π of Σ_i (relative squared error of Θ_π(i)) + (that of W_π(i)): Hungarian.

    Layers in factors must have one form (layout, base and factors may differ); their scores stand for Θ. on:
    examples, if only the directions that their tokens visit are to count.

    >>> layer = AttentionLayer.random(heads=3, width=5, seed=0)
    >>> match(layer, layer).order
    (0, 1, 2)
    """
    if not isinstance(learned, AttentionLayer) or not isinstance(truth, AttentionLayer) or on is not None:
        one, other = gauge.as_factored(learned), gauge.as_factored(truth)
        strange = gauge.unlike(one, other)
        if strange is not None:
            checks.refuse("learned", "a layer of the truth's form", strange,
                          "headway.compare, which says what differs")
        return match_heads(gauge.heads_of(one, on), gauge.heads_of(other, on))
    of_softmax("learned", learned)
    of_softmax("truth", truth)
    if (learned.width, learned.out_width) != (truth.width, truth.out_width):
        checks.refuse("learned", f"width {truth.width} → {truth.out_width}, as the truth",
                      f"{learned.width} → {learned.out_width}", "compare layers of one shape")
    if learned.mask != truth.mask:
        checks.refuse("learned", f"mask {truth.mask!r}, as the truth", repr(learned.mask),
                      "compare layers of one mask")
    theta = _relative(_scores_of(learned), learned.heads, _scores_of(truth), truth.heads)
    w = _relative(learned.W.__getitem__, learned.heads, truth.W.__getitem__, truth.heads)
    # Clipping keeps one hopeless pair from deciding the assignment of the others.
    cost = np.minimum(theta, 4.0) ** 2 + np.minimum(w, 4.0) ** 2
    rows, columns = linear_sum_assignment(cost)
    order = np.full(truth.heads, -1)
    order[rows] = columns
    inf = float("inf")

    def zero(layer: AttentionLayer) -> Tensor:
        if layer.offset is None:
            return torch.zeros(layer.out_width, dtype=torch.float64)
        return layer.offset.double().cpu()

    size = max(float(zero(truth).norm()), max(float(W.double().norm()) for W in truth.W))
    return Match(
        order=tuple(int(j) for j in order),
        theta_error=tuple(float(theta[i, j]) if j >= 0 else inf for i, j in enumerate(order)),
        w_error=tuple(float(w[i, j]) if j >= 0 else inf for i, j in enumerate(order)),
        offset_error=float((zero(learned) - zero(truth)).norm()) / max(size, 1e-300),
        missing=tuple(int(i) for i in np.flatnonzero(order < 0)),
        excess=tuple(j for j in range(learned.heads) if j not in set(columns.tolist())),
    )


def with_bias(layer: AttentionLayer) -> Tensor:
    """[Θ_i; u_iᵀ] in float64, u zero where there is none."""
    u = layer.key_bias
    if u is None:
        u = layer.Theta.new_zeros(layer.heads, layer.width)
    return torch.cat([layer.Theta, u.unsqueeze(1)], dim=1).double().cpu()


def _scores_of(layer: AttentionLayer) -> Callable[[int], Tensor]:
    """[Θ_i; u_iᵀ] of one head, u zero where there is none."""
    u = layer.key_bias
    zero = layer.Theta.new_zeros(1, layer.width)
    return lambda i: torch.cat([layer.Theta[i], zero if u is None else u[i : i + 1]])


def _relative(A: Callable[[int], Tensor], many: int, B: Callable[[int], Tensor], count: int) -> np.ndarray:
    """‖A_j − B_i‖/‖B_i‖ as an array [i, j], in float64, one pair at a time: of a wide layer two heads fit where all
    do not. Differences are formed, so small errors are exact."""
    found = np.zeros((count, many))
    for i in range(count):
        b = B(i).double().cpu()
        size = float(b.norm()) or 1.0  # a zero is missed by an absolute error
        for j in range(many):
            found[i, j] = float((A(j).double().cpu() - b).norm()) / size
    return found


def match_heads(learned: gauge.Heads, truth: gauge.Heads) -> Match:
    """The same for heads without gauge."""
    rows, columns = gauge.distances(learned, truth).assignment()
    order = np.full(truth.count, -1)
    order[rows] = columns
    scores, values = gauge.errors(learned.take(columns.tolist()), truth.take(rows.tolist()))
    theta, w = np.full((2, truth.count), float("inf"))
    theta[rows], w[rows] = scores, values
    V, out = truth.values
    size = max(float(truth.offset.norm()), float((V @ out.mT).flatten(1).norm(dim=1).max()))
    return Match(
        order=tuple(int(j) for j in order), theta_error=tuple(theta.tolist()), w_error=tuple(w.tolist()),
        offset_error=float((learned.offset - truth.offset).norm()) / max(size, 1e-300),
        missing=tuple(int(i) for i in np.flatnonzero(order < 0)),
        excess=tuple(j for j in range(learned.count) if j not in set(columns.tolist())),
    )
