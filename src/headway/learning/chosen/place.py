"""From rank-one terms to logits: a head's curve along its lines says where on ψ' it lies.

The curve of head i is known at queries a and base points s up to a factor and one constant a line, as ψ'(ℓ) with
ℓ = w + β·x_s + κ t_a; x_s = v̂ᵀs is known, v = βv̂. Three numbers a head are looked for on a grid, then on finer ones
around the best. ψ' is a function of one variable and tabulated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headway.learning.chosen.line import attended

REACH, CELLS = 9.0, 31  # of w and κ at first
SLOPES = tuple(2.0 ** (j / 2) for j in range(-8, 5))  # |β| at first, as a part of what is usual
KEPT = 4  # of the places with one sign of β that are looked at more closely
ROUNDS, FINER = 30, 0.8  # of finer and finer grids, and by how much
TABLE = 8192  # places where ψ' is tabulated
FAR = 120.0  # logits beyond are those at the end
Place = tuple[float, float, float]  # w, β, κ
Score = Callable[[Tensor, Tensor, Tensor], Tensor]


class Curve:
    """ψ' looked up."""

    def __init__(self, t: Tensor) -> None:
        at = torch.linspace(-FAR, FAR, TABLE, dtype=t.dtype, device=t.device)
        self.table = attended(t, at)[0]

    def __call__(self, logits: Tensor) -> Tensor:
        at = ((logits + FAR) * ((TABLE - 1) / (2 * FAR))).clamp(0, TABLE - 1.001)
        low = at.long()
        part = at - low
        found: Tensor = self.table[low] * (1 - part) + self.table[low + 1] * part
        return found


def centred(curves: Tensor) -> Tensor:
    """Curves (…, n, k) without what is not known of a line."""
    return curves - curves.mean(-1, keepdim=True)


def placed(curve: Curve, given: Tensor, x: Tensor, t: Tensor, size: float) -> list[tuple[float, Place]]:
    """(w, β, κ) for a curve given (n, k) at x (n,), with the part of it that is missed: a few, the best first.
    size: |β| as it usually is."""
    given = centred(given)
    total = float(given.square().sum())

    def score(w: Tensor, b: Tensor, kappa: Tensor) -> Tensor:
        logits = (w + b * x).unsqueeze(-1) + kappa.unsqueeze(-1) * t
        f = centred(curve(logits))
        along = (f * given).sum((-2, -1))
        rest: Tensor = 1 - along.square() / (f.square().sum((-2, -1)) * total).clamp_min(1e-300)
        return rest

    coarse = [one for sign in (size, -size) for one in _coarse(score, sign, t)]
    return sorted((_refined(score, one, t) for one in coarse), key=lambda one: one[0])


def _coarse(score: Score, size: float, t: Tensor) -> list[Place]:
    """The best on a grid, β of one sign: the other one has a minimum of its own, where the mirrored curve is met
    nearly as well."""
    steps = torch.linspace(-REACH, REACH, CELLS, dtype=t.dtype, device=t.device)
    grid = torch.cartesian_prod(steps, steps)
    found = []
    for slope in SLOPES:
        rest = score(grid[:, :1], t.new_tensor([[slope * size]]), grid[:, 1:])
        at = int(rest.argmin())
        found.append((float(rest[at]), (float(grid[at, 0]), slope * size, float(grid[at, 1]))))
    return [place for _, place in sorted(found)[:KEPT]]


def _refined(score: Score, found: Place, t: Tensor) -> tuple[float, Place]:
    """The best on finer and finer grids around."""
    best, step, factor = float("inf"), 2 * REACH / (CELLS - 1), 1.2
    sides = torch.linspace(-1, 1, 5, dtype=t.dtype, device=t.device)
    for _ in range(ROUNDS):
        grid = torch.cartesian_prod(found[0] + step * sides, found[1] * factor**sides, found[2] + step * sides)
        rest = score(grid[:, :1], grid[:, 1:2], grid[:, 2:])
        at = int(rest.argmin())
        if float(rest[at]) < best:
            best, found = float(rest[at]), (float(grid[at, 0]), float(grid[at, 1]), float(grid[at, 2]))
        step, factor = FINER * step, factor**FINER
    return best, found
