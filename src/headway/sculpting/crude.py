"""Phase 1, crude sum: Ŵ = mean of (1/k) Xᵀ J Y ≈ Σ_i W_i, J all ones, on random examples without noise.

Weights of a pattern sum to one, so a shift common to all tokens passes through every head alike: that part of Y
shows Σ_i W_i before any Θ_i is known.
"""

from __future__ import annotations

from torch import Tensor

from headway.sculpting.rows import Batches


def crude_sum(batches: Batches) -> tuple[Tensor, int]:
    """The mean of (1/k) Xᵀ J Y, and the number of sequences.

    E = Σ_i W_i up to a bias; for Gaussian tokens exactly Σ_i (I + Θ_iC_i)W_i with C_i head i's mean attention
    covariance, by Stein's identity for a shift of all tokens at once.
    """
    total: Tensor | float = 0.0
    n = 0
    for rows in batches():
        total = total + (rows.X.sum(1).T @ rows.Y.sum(1)).double() / rows.X.shape[1]
        n += rows.X.shape[0]
    assert isinstance(total, Tensor)
    return total / n, n
