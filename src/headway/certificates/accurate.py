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
from headway.linalg.thin import Thin

Factors = tuple[Thin, Tensor]  # (A, B, V) and O


@dataclass(frozen=True)
class Answers:
    """What the layer leaves of the labels, (rows, e) for every chunk, 0 on filling, and how far all is off at
    most."""

    left: tuple[Tensor, ...]
    off: float

    @classmethod
    def of(cls, found: Sample, factors: Factors | None = None) -> Answers:
        """Of the sample's layer; of these ``factors`` of it, as they are stored, where they are given."""
        parts = [_rows(found, rows, factors) for rows in found.problem.chunks]
        return cls(tuple(left for left, _ in parts), math.sqrt(sum(off for _, off in parts)))

    @property
    def size(self) -> float:
        """‖F − Y‖, as computed."""
        return math.sqrt(sum(float(r.square().sum()) for r in self.left))


def _rows(found: Sample, rows: Rows, factors: Factors | None) -> tuple[Tensor, float]:
    """Those of one chunk, and the sum of squares of what rows are off."""
    Y, delta, each = _dense_rows(found, rows) if factors is None else _thin_rows(found, rows, *factors)
    each = each + (torch.expm1(2 * delta) * reaches(found, rows, found.layer.W)).sum(2)
    Y = Y if found.layer.offset is None else Y + found.layer.offset
    left = Y - rows.Y
    if rows.valid is not None:
        left, each = left * rows.valid, each * rows.valid.squeeze(2)
    return left.flatten(0, 1), float(each.square().sum())


def _dense_rows(found: Sample, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_i P_iXW_i, what scores are off, and what the rest of a row is."""
    layer, eps = found.layer, torch.finfo(rows.X.dtype).eps
    n, k, d = rows.X.shape
    S, delta = scores(rows.X, layer.augmented)
    P = attention.softmax(S, rows.see)
    Y = torch.zeros_like(rows.Y)
    shown = Y.new_zeros(n, k)
    H, absolute = attention.attend(P, rows.X), attention.attend(P, rows.X.abs())
    for i, W in enumerate(layer.W):
        Y = Y + H[:, :, i] @ W
        shown = shown + (absolute[:, :, i] @ W.abs()).norm(dim=2)
    terms = 2 * (S.amax(3) - S.amin(3)).amax(2) + 3 * k + d + layer.heads + 24
    return Y, delta, eps * terms * (shown + rows.Y.norm(dim=2))


def _thin_rows(found: Sample, rows: Rows, thin: Thin, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same of Σ_i P_iXV_iO_i. XV_i = Z is exact but for its last digit; then sums over keys, of the sizes of Z,
    and over p columns and m heads, of those of the absolute values of O_i."""
    eps, k, p = torch.finfo(rows.X.dtype).eps, rows.X.shape[1], thin.V.shape[2]
    S, delta = thin_scores(rows.X, thin.A, thin.B)
    P = attention.softmax(S, rows.see).transpose(1, 2)  # (n, m, k, k)
    Z, low, z_off = (part.transpose(1, 2) for part in _product(rows.X, thin.V))
    Z, z = Z + low, (Z + low).abs()
    H, absolute, off = P @ Z, P @ z, P @ (z_off.expand_as(z) + eps * z)
    Y = torch.einsum("nmkp,mpe->nke", H, out)
    wide = torch.linalg.matrix_norm(out.abs(), 2).view(1, -1, 1)
    terms = 2 * (S.amax(3) - S.amin(3)).transpose(1, 2) + 3 * k + p * len(out) + 24
    each = ((eps * terms * absolute.norm(dim=3) + off.norm(dim=3)) * wide).sum(1)
    return Y, delta, each + 4 * eps * rows.Y.norm(dim=2)


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


def thin_scores(X: Tensor, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """The same for Θ_i = A_iB_iᵀ, from X̃A_i = Q + q and XB_i = K + κ: S = QKᵀ + (Qκᵀ + q(K + κ)ᵀ)."""
    eps, q = torch.finfo(X.dtype).eps, A.shape[2]
    b = 2.0 ** -bits(X.dtype, q)
    Q, low, q_off = _product(attention.queries(X, A), A)
    K, k_low, k_off = _product(X, B)
    whole, most = K + k_low, (K + k_low).abs().amax(1, keepdim=True)
    (Q1, Q2, rows), (K1, K2, keys) = cut(Q, 3, q), cut(K, 3, q)

    def by(a: Tensor, c: Tensor) -> Tensor:
        return torch.einsum("nkmq,nlmq->nkml", a, c)

    S = by(Q1, K1) + (by(Q1, K2) + by(Q2, K) + by(Q, k_low) + by(low, whole))
    off = 2 * eps * (q + 3) * q * b * rows.squeeze(3) * keys.squeeze(3).amax(1, keepdim=True)
    small = Q.abs() * k_low.abs().amax(1, keepdim=True) + low.abs() * most
    off = off + eps * (q + 3) * small.sum(3) + 3 * eps * S.abs().amax(3)
    off = off + (q_off * most).sum(3) + ((Q.abs() + low.abs()) * k_off.amax(1, keepdim=True)).sum(3)
    return S, off


def _product(X: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """XA_i for every head as an exact sum and a small rest, (n, k, m, q), and what the rest is off."""
    eps, r = torch.finfo(X.dtype).eps, X.shape[2]
    x1, x2, sizes = cut(X, 2, r)
    A1, A2, columns = cut(A, 1, r)

    def by(x: Tensor, part: Tensor) -> Tensor:
        return attention.apart(x, part).transpose(1, 2)

    low = by(x1, A2) + by(x2, A)
    off = 2 * eps * (r + 2) * r * 2.0 ** -bits(X.dtype, r) * sizes.unsqueeze(2) * columns.transpose(0, 1)
    return by(x1, A1), low, off


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
