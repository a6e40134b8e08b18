"""F(X) − Y with scores to the last digit, and a bound on how far it is off.

A score is a sum of d² products, and in float64 the sum of their absolute values times d·eps is what it may be off:
at width 128 some thousand times the rounding of the score itself. So factors are cut in two, A = A_1 + A_2, with so
few bits in A_1 that sums of products of these are exact in any order (Ozaki and others, 2012): with t bits in a
number and n terms each part has b = (t − 2 − ⌈log₂ n⌉)/2, measured from the largest of its row, and |A_2| is 2^−b
of that at most. What is rounded then is smaller by that factor.

    X̃Θ_i = X_1Θ_1 + (X_1Θ_2 + X_2Θ) = Q + q,     S_i = Q_1X_1ᵀ + (Q_1X_2ᵀ + Q_2Xᵀ + qXᵀ).

A score off by δ changes a weight by a factor within e^{±2δ}; weights that still add up to 1 then move a row by at
most (e^{2δ} − 1)ϱ_i (slopes.py). The exponential, its sum, the sums over keys, over features and over heads one
after the other are off by their number of terms times eps times the sum of their absolute values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.certificates.jacobian import Sample
from headway.certificates.slopes import reaches
from headway.core import attention
from headway.linalg.projected import Rows


@dataclass(frozen=True)
class Answers:
    """What the layer leaves of the labels, (rows, e) for every chunk, 0 on filling, and how far all is off at
    most."""

    left: tuple[Tensor, ...]
    off: float

    @classmethod
    def of(cls, found: Sample) -> Answers:
        parts = [_rows(found, rows) for rows in found.problem.chunks]
        return cls(tuple(left for left, _ in parts), math.sqrt(sum(off for _, off in parts)))

    @property
    def size(self) -> float:
        """‖F − Y‖, as computed."""
        return math.sqrt(sum(float(r.square().sum()) for r in self.left))


def _rows(found: Sample, rows: Rows) -> tuple[Tensor, float]:
    """Those of one chunk, and the sum of squares of what rows are off."""
    layer, eps = found.layer, torch.finfo(rows.X.dtype).eps
    n, k, d = rows.X.shape
    S, delta = scores(rows.X, layer.augmented)
    P = attention.softmax(S, rows.see)
    Y = torch.zeros_like(rows.Y)
    shown, wide = Y.new_zeros(n, k), reaches(found, rows, layer.W)
    H, absolute = attention.attend(P, rows.X), attention.attend(P, rows.X.abs())
    for i, W in enumerate(layer.W):
        Y = Y + H[:, :, i] @ W
        shown = shown + (absolute[:, :, i] @ W.abs()).norm(dim=2)
    Y = Y if layer.offset is None else Y + layer.offset
    terms = 2 * (S.amax(3) - S.amin(3)).amax(2) + 3 * k + d + layer.heads + 24
    each = (torch.expm1(2 * delta) * wide).sum(2) + eps * terms * (shown + rows.Y.norm(dim=2))
    left = Y - rows.Y
    if rows.valid is not None:
        left, each = left * rows.valid, each * rows.valid.squeeze(2)
    return left.flatten(0, 1), float(each.square().sum())


def scores(X: Tensor, Theta: Tensor) -> tuple[Tensor, Tensor]:
    """S[n, a, i, b] = x̃_aᵀΘ_ix_b and what any of a row is off, (n, a, i)."""
    asking, eps = attention.queries(X, Theta), torch.finfo(X.dtype).eps
    n, r, d = len(X), asking.shape[2], X.shape[2]
    x1, x2, sizes = cut(asking.unsqueeze(2), 3, r)  # (n, k, 1, r)
    T1, T2, columns = cut(Theta, 1, r)  # (m, r, d)
    Q = torch.einsum("nkr,mrd->nkmd", x1.squeeze(2), T1)
    q = torch.einsum("nkr,mrd->nkmd", x1.squeeze(2), T2) + torch.einsum("nkr,mrd->nkmd", x2.squeeze(2), Theta)
    fine = 2.0 ** -bits(X.dtype, r)
    # Each sum of r terms: r·eps times their absolute values, of which one factor is ``fine`` of its largest.
    q_off = 2 * eps * (r + 2) * r * fine * sizes * columns.squeeze(1)  # (n, k, m, d)
    Q1, Q2, rows = cut(Q, 3, d)
    X1, X2, keys = cut(X, 2, d)  # keys (n, l, 1)

    def by(A: Tensor, B: Tensor) -> Tensor:
        return torch.bmm(A.reshape(n, -1, d), B.mT).view(*A.shape[:3], -1)

    S = by(Q1, X1) + (by(Q1, X2) + by(Q2, X) + by(q, X))
    longest = keys.amax(1).view(n, 1, 1)
    off = 2 * eps * (d + 3) * d * 2.0 ** -bits(X.dtype, d) * rows.squeeze(3) * longest
    off = off + (q_off.sum(3) + eps * (d + 3) * q.abs().sum(3)) * longest + 3 * eps * S.abs().amax(3)
    return S, off


def bits(dtype: torch.dtype, terms: int) -> int:
    """b."""
    return (round(-math.log2(torch.finfo(dtype).eps)) + 1 - 2 - math.ceil(math.log2(max(terms, 2)))) // 2


def cut(A: Tensor, dim: int, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    """A_1, A_2 and the power of two that bounds a row along ``dim``. A_1 is a multiple of half of 2^−b of that:
    beside the ruler, numbers are rounded to 2^−b of the power where they add to it and to half of that where they
    do not."""
    t = round(-math.log2(torch.finfo(A.dtype).eps)) + 1
    largest = A.abs().amax(dim, keepdim=True).clamp_min(1e-30)
    power = torch.exp2(torch.ceil(torch.log2(largest)))
    power = torch.where(power < largest, 2 * power, power)
    ruler = power * 2.0 ** (t - 1 - bits(A.dtype, terms))
    first = (A + ruler) - ruler
    return first, A - first, power
