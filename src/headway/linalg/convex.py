"""Least squares over all operators at once: min over Z̃, c of Σ‖y_a − ⟨x_a ⊗ C_a, Z̃⟩ − c‖², C_a = Σ_b x_bx_bᵀ.

A convex problem, whose solution no layer of linear scores goes below, whatever its number of heads. Features are
x_a[p]·C_a[q, r] for q ≤ r, those with q < r times √2, so that coefficients have the norm of Z̃; all outputs share
them. There are d²(d + 1)/2 of them: this is for small widths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core import attention
from headway.linalg.projected import LinearRows, Problem

MOST = 1000  # features: d ≤ 12
SEEN = 1e-10  # of the largest eigenvalue of the features' Gram matrix: less was not seen


@dataclass(frozen=True)
class Convex:
    """The solution: what it leaves, in squares and relative to the labels' spread, and what the inputs show."""

    coefficients: Tensor  # (features + 1, e), the last row c
    loss: float
    residual: float
    rank: int  # directions of the features that the inputs show, the constant among them
    columns: int
    rows: int

    @property
    def determined(self) -> bool:
        """Whether the inputs show every direction: then the operator is the only one that does as well."""
        return self.rank == self.columns

    @property
    def outputs(self) -> int:
        return self.coefficients.shape[1]

    @property
    def free(self) -> int:
        """Equations beyond the unknowns that the inputs show: 0 where any labels can be met."""
        return (self.rows - self.rank) * self.outputs


def columns(d: int) -> int:
    """How many features there are, with the constant."""
    return d * d * (d + 1) // 2 + 1


def features(rows: LinearRows) -> Tensor:
    """(n·k, features + 1); rows of filling are zero."""
    n, k, d = rows.X.shape
    weight = rows.X.new_ones(1, 1, 1) if rows.weight is None else rows.weight
    upper = torch.triu_indices(d, d, device=rows.X.device)
    pairs = rows.X[:, :, upper[0]] * rows.X[:, :, upper[1]]
    pairs = pairs * _sizes(upper, pairs)
    C = weight.expand(-1, k, k) @ pairs  # (n, k, d(d + 1)/2)
    F = (rows.X.unsqueeze(3) * C.unsqueeze(2)).flatten(2)
    F = torch.cat([F, F.new_ones(n, k, 1)], dim=2)
    return (F if rows.valid is None else F * rows.valid).flatten(0, 1)


def solve(problem: Problem) -> Convex:
    """By normal equations with one step of refinement; directions that the inputs do not show get nothing."""
    size = columns(problem.chunks[0].X.shape[2])
    e = problem.chunks[0].Y.shape[2]
    G: Tensor = problem.chunks[0].X.new_zeros(size, size)
    for rows in problem.chunks:
        F = features(_linear(rows))
        G += F.mT @ F
    values, vectors = torch.linalg.eigh(G)
    seen = values > SEEN * values[-1]
    basis, inverse = vectors[:, seen], 1 / values[seen]
    B = G.new_zeros(size, e)
    for _ in range(2):
        R = torch.zeros_like(B)
        for rows in problem.chunks:
            F = features(_linear(rows))
            R += F.mT @ (rows.Y.flatten(0, 1) - F @ B)
        B = B + basis @ (inverse.unsqueeze(1) * (basis.mT @ R))
    loss = sum(float(left.square().sum()) for left in leftovers(problem, B))
    return Convex(B, loss, math.sqrt(loss / problem.variation()), int(seen.sum()), size, problem.rows)


def leftovers(problem: Problem, B: Tensor) -> list[Tensor]:
    """What is left of the labels, chunk by chunk, (n, k, e)."""
    return [rows.Y - (features(_linear(rows)) @ B).view_as(rows.Y) for rows in problem.chunks]


def operator_of(B: Tensor, d: int) -> Tensor:
    """Z̃ (d, d, d, e) from coefficients."""
    upper = torch.triu_indices(d, d, device=B.device)
    half = B[:-1].view(d, -1, B.shape[1]) / _sizes(upper, B).unsqueeze(1)
    Z = B.new_zeros(d, d, d, B.shape[1])
    Z[:, upper[0], upper[1]] = half
    Z[:, upper[1], upper[0]] = half
    return Z


def _sizes(upper: Tensor, like: Tensor) -> Tensor:
    """1 for a pair q = r, √2 for others."""
    return torch.where(upper[0] == upper[1], like.new_tensor(1.0), like.new_tensor(2.0).sqrt())


def answer(rows: LinearRows, Theta: Tensor, W: Tensor, offset: Tensor | None = None) -> Tensor:
    """What a linear layer says: (n, k, e)."""
    return attention.project(attention.attend(rows.patterns(Theta), rows.X), W, offset)


def _linear(rows: object) -> LinearRows:
    assert isinstance(rows, LinearRows)
    return rows
