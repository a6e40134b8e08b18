"""Phase 6, net: every m-tuple of points on a net in the hull, regression for the W_i, validation.

The candidates are Θ̄ + Σ_j c_jV_j with c on a grid of g points an axis. Least squares for W given a tuple needs only
blocks of one Gram matrix over all candidates' features, so the examples are read once and a tuple costs one small
solve. There are C(g^{m−1}, m) tuples: an exponential price in m, refused when too high.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from headway.core import attention, checks
from headway.linalg.projected import Problem

COARSEST = 7  # points an axis below which the net says nothing
BATCH = 4096  # tuples solved at a time


def tuples(points: int, heads: int) -> int:
    """How many m-tuples a net of ``points`` an axis has."""
    return math.comb(points ** (heads - 1), heads)


def net_points(heads: int, most_tuples: int) -> int:
    """The finest net within ``most_tuples``; refused where even a coarse one is too large."""
    if heads == 1:
        return 1
    if tuples(COARSEST, heads) > most_tuples:
        checks.refuse("search", f"a net of at most {most_tuples:,} tuples",
                      f"{tuples(COARSEST, heads):,} for {heads} heads with {COARSEST} points an axis",
                      "search='gauss-newton', or thresholds with a larger most_tuples")
    points = COARSEST
    while tuples(points + 1, heads) <= most_tuples and points < 129:
        points += 1
    return points


def candidates(center: Tensor, V: Tensor, radius: float, points: int) -> Tensor:
    """Θ̄ + Σ_j c_jV_j for c on the grid: (g^{m−1}, d, d)."""
    axis = torch.linspace(-radius, radius, points, dtype=center.dtype, device=center.device)
    if not len(V):
        return center.unsqueeze(0)
    grid = torch.cartesian_prod(*[axis] * len(V)).view(-1, len(V))
    return center + torch.einsum("cj,jpq->cpq", grid, V)


def search(fit: Problem, check: Problem, Theta: Tensor, heads: int) -> tuple[Tensor, float, int]:
    """The tuple of candidates with the least error on ``check`` after regression on ``fit``: (m, d, d), its
    relative error there, and how many tuples were tried."""
    G, R, _ = _moments(fit, Theta)
    G2, R2, total = _moments(check, Theta)
    d = Theta.shape[2]
    best, where, tried = math.inf, None, 0
    for chosen in _batches(len(Theta), heads, Theta.device):
        index = (chosen.unsqueeze(2) * d + torch.arange(d, device=chosen.device)).flatten(1)  # (t, m·d)
        rows, columns = index.unsqueeze(2), index.unsqueeze(1)
        g = G[rows, columns]
        ridge = 1e-9 * g.diagonal(dim1=1, dim2=2).mean(1).view(-1, 1, 1)
        g = g + ridge * torch.eye(g.shape[1], dtype=g.dtype, device=g.device)
        B = torch.cholesky_solve(R[index], torch.linalg.cholesky(g))
        loss = total - 2 * (B * R2[index]).sum((1, 2)) + (B * (G2[rows, columns] @ B)).sum((1, 2))
        j = int(loss.argmin())
        tried += len(chosen)
        if float(loss[j]) < best:
            best, where = float(loss[j]), chosen[j]
    assert where is not None
    return Theta[where], math.sqrt(max(best, 0.0) / check.variation()), tried


def _moments(problem: Problem, Theta: Tensor) -> tuple[Tensor, Tensor, float]:
    """HᵀH, HᵀY and ‖Y‖² with the features of all candidates side by side."""
    size, e = Theta.shape[0] * Theta.shape[2], problem.chunks[0].Y.shape[2]
    G, R = Theta.new_zeros(size, size), Theta.new_zeros(size, e)
    total = 0.0
    for rows in problem.chunks:
        H = attention.attend(attention.patterns(rows.X, Theta), rows.X).flatten(2).flatten(0, 1)
        Y = rows.Y.flatten(0, 1)
        G += H.T @ H
        R += H.T @ Y
        total += float(Y.square().sum())
    return G, R, total


def _batches(count: int, heads: int, device: torch.device) -> Iterator[Tensor]:
    every = itertools.combinations(range(count), heads)
    while chunk := list(itertools.islice(every, BATCH)):
        yield torch.tensor(chunk, device=device)
