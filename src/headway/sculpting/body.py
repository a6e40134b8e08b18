"""K = {Θ : |⟨Θ, M_r⟩ − ℓ_r| ≤ ε_r for every r}: the convex body that sculpting carves around the Θ_i.

Two ways to look at it. ``Body`` keeps every constraint and answers by linear programs (HiGHS) and, for the point
of least norm, by Lawson and Hanson's reduction of least distance to non-negative least squares: exact, and meant
for small widths. ``Gram`` keeps only Σ_r M_rM_rᵀ/ε_r² and Σ_r ℓ_rM_r/ε_r², which a stream can add up: directions
in which the body is long are its small eigenvalues, the point of least norm is the least-squares solution without
them (phase 5, hull.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linprog, nnls
from torch import Tensor

from headway.core import checks


@dataclass(frozen=True)
class Body:
    """Normals M (R, d, d), levels ℓ (R,) and slacks ε (R,), in float64."""

    normals: Tensor
    levels: Tensor
    slacks: Tensor

    def __post_init__(self) -> None:
        checks.shape("normals", self.normals, ("R", "d", self.normals.shape[-1]), "one matrix a constraint")
        for name in ("levels", "slacks"):
            checks.shape(name, getattr(self, name), (len(self.normals),), "one number a constraint")

    @property
    def width(self) -> int:
        return self.normals.shape[1]

    def _scaled(self) -> tuple[np.ndarray, np.ndarray]:
        """A Θ ≤ b, both sides divided by the slack, so that every row asks for an accuracy of 1."""
        M = (self.normals.double().flatten(1) / self.slacks.double()[:, None]).cpu().numpy()
        level = (self.levels.double() / self.slacks.double()).cpu().numpy()
        return np.concatenate([M, -M]), np.concatenate([level + 1, 1 - level])

    def excess(self, Theta: Tensor) -> float:
        """max_r |⟨Θ, M_r⟩ − ℓ_r|/ε_r − 1: at most 0 inside."""
        gap = (self.normals.double().flatten(1) @ Theta.double().flatten() - self.levels.double()).abs()
        return float((gap / self.slacks.double()).max()) - 1.0

    def contains(self, Theta: Tensor, tolerance: float = 1e-9) -> bool:
        return self.excess(Theta) <= tolerance

    def support(self, direction: Tensor) -> float:
        """max of ⟨Θ, direction⟩ over K; inf where K is unbounded, −inf where it is empty."""
        A, b = self._scaled()
        found = linprog(-direction.double().flatten().cpu().numpy(), A_ub=A, b_ub=b, bounds=(None, None),
                        method="highs")
        if found.status == 2:
            return -math.inf
        return math.inf if found.status == 3 or found.fun is None else -float(found.fun)

    def diameter(self, direction: Tensor) -> float:
        """Length of K's shadow on a line: the support in a unit direction plus the support in its opposite."""
        unit = direction.double() / direction.double().norm()
        return self.support(unit) + self.support(-unit)

    def min_norm(self) -> Tensor | None:
        """argmin ‖Θ‖ over K, None where K is empty.

        With Gx ≥ h for the constraints, let u ≥ 0 minimise ‖[Gᵀ; hᵀ]u − (0, …, 0, 1)‖ and r be that residual:
        then x = −r_{1..n}/r_{n+1}, and r = 0 exactly when no x meets them all.
        """
        A, b = self._scaled()
        E = np.concatenate([-A.T, -b[None, :]])
        target = np.zeros(len(E))
        target[-1] = 1.0
        u, _ = nnls(E, target, maxiter=50 * E.shape[1])
        r = E @ u - target
        if np.linalg.norm(r) < 1e-9:
            return None
        return torch.from_numpy(-r[:-1] / r[-1]).view(self.width, self.width)


class Gram:
    """Running sums of a body's constraints."""

    def __init__(self, width: int, device: torch.device | None = None) -> None:
        self.width, self.count = width, 0
        self.S = torch.zeros(width * width, width * width, dtype=torch.float64, device=device)
        self.b = torch.zeros(width * width, dtype=torch.float64, device=device)

    def add(self, normals: Tensor, levels: Tensor, slacks: Tensor) -> None:
        for part in range(0, len(normals), 8192):
            at = slice(part, part + 8192)
            A = (normals[at] / slacks[at, None, None]).flatten(1)
            self.S += (A.T @ A).double()
            self.b += (A.T @ (levels[at] / slacks[at])).double()
        self.count += len(normals)
