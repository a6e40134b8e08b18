"""Align the heads of two layers; errors that know the symmetry."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from headway.core import checks
from headway.core.layer import AttentionLayer


@dataclass(frozen=True)
class Match:
    """The best assignment of learned heads to true ones, with relative errors per true head.

    order[i] is the learned head for true head i, or −1 where none is left (missing). theta_error[i] is
    ‖[Θ; u] − [Θ*; u*]‖/‖[Θ*; u*]‖, w_error[i] is ‖W − W*‖/‖W*‖; both are inf for a missing head.
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


def match(learned: AttentionLayer, truth: AttentionLayer) -> Match:
    """min over permutations π of Σ_i (relative squared error of Θ_π(i)) + (that of W_π(i)): Hungarian.

    >>> layer = AttentionLayer.random(heads=3, width=5, seed=0)
    >>> match(layer, layer).order
    (0, 1, 2)
    """
    if (learned.width, learned.out_width) != (truth.width, truth.out_width):
        checks.refuse("learned", f"width {truth.width} → {truth.out_width}, as the truth",
                      f"{learned.width} → {learned.out_width}", "compare layers of one shape")
    if learned.mask != truth.mask:
        checks.refuse("learned", f"mask {truth.mask!r}, as the truth", repr(learned.mask),
                      "compare layers of one mask")
    A, B = _with_bias(learned), _with_bias(truth)
    V, W = learned.W.double().cpu(), truth.W.double().cpu()
    theta, w = _relative(A, B), _relative(V, W)
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

    size = max(float(zero(truth).norm()), float(W.flatten(1).norm(dim=1).max()))
    return Match(
        order=tuple(int(j) for j in order),
        theta_error=tuple(float(theta[i, j]) if j >= 0 else inf for i, j in enumerate(order)),
        w_error=tuple(float(w[i, j]) if j >= 0 else inf for i, j in enumerate(order)),
        offset_error=float((zero(learned) - zero(truth)).norm()) / max(size, 1e-300),
        missing=tuple(int(i) for i in np.flatnonzero(order < 0)),
        excess=tuple(j for j in range(learned.heads) if j not in set(columns.tolist())),
    )


def _with_bias(layer: AttentionLayer) -> Tensor:
    u = layer.key_bias
    if u is None:
        u = layer.Theta.new_zeros(layer.heads, layer.width)
    return torch.cat([layer.Theta, u.unsqueeze(1)], dim=1).double().cpu()


def _relative(A: Tensor, B: Tensor) -> np.ndarray:
    """‖A_j − B_i‖/‖B_i‖ as an array [i, j]; differences are formed, so small errors are exact."""
    size = B.flatten(1).norm(dim=1)
    size = torch.where(size > 0, size, torch.ones_like(size))  # a zero is missed by an absolute error
    return np.stack([((A - b).flatten(1).norm(dim=1) / s).numpy() for b, s in zip(B, size, strict=True)])


@dataclass(frozen=True)
class Comparison:
    """Whether two layers are one function for every input, up to the order of heads."""

    same: bool
    largest: float  # the largest relative difference of a part, inf where a head has no partner
    where: str
    match: Match

    def __str__(self) -> str:
        return ("The same function" if self.same else "Different functions") + f": {self.where}."


def compare(layer_a: AttentionLayer, layer_b: AttentionLayer, tolerance: float = 1e-9) -> Comparison:
    """Are F_a and F_b equal? In canonical form (equal heads merged, dead ones dropped) heads are paired, and every
    Θ, u, W and the offset compared, each relative to its own size.

    Heads that differ by more than ``tolerance`` are different functions: distinct heads are linearly independent as
    functions of sequences of all lengths, so no other choice of heads gives the same sums.

    >>> layer = AttentionLayer.random(heads=3, width=5, seed=0)
    >>> print(compare(layer, AttentionLayer(layer.Theta.flip(0), layer.W.flip(0))))
    The same function: 3 heads agree exactly.
    """
    checks.number("tolerance", tolerance)
    a, b = layer_a.canonical(tolerance), layer_b.canonical(tolerance)
    found = match(a, b)
    if found.missing or found.excess:
        where = f"{a.heads} heads against {b.heads}, merged and without dead ones"
        return Comparison(False, float("inf"), where, found)
    spots: list[tuple[float, str]] = []
    A, B = _with_bias(a), _with_bias(b)
    for i, j in enumerate(found.order):
        for name, x, y in (("Θ", A[j], B[i]), ("W", a.W[j].double().cpu(), b.W[i].double().cpu())):
            gap = (x - y).abs()
            at = np.unravel_index(int(gap.argmax()), tuple(gap.shape))
            row, column = int(at[0]), int(at[1])
            part = "u" if name == "Θ" and row == a.width else name
            entry = f"entry {column + 1}" if part == "u" else f"entry ({row + 1}, {column + 1})"
            size = found.theta_error[i] if name == "Θ" else found.w_error[i]
            spots.append((size, f"{part} of head {j + 1} against head {i + 1}, {entry}, by {float(gap.max()):.1e}"))
    spots.append((found.offset_error, f"the offset, by {found.offset_error:.1e} of its size"))
    largest, where = max(spots)
    same = largest <= tolerance
    if largest == 0.0:
        where = f"{a.heads} head{'s' if a.heads != 1 else ''} agree exactly"
    else:
        where = f"the largest relative difference is {largest:.1e}, in {where}"
    return Comparison(same, largest, where, found)
