"""What a linear layer computes, whatever its heads: the operator Z = Σ_i vec(Θ_i)vec(W_i)ᵀ as outputs see it.

With C_a = Σ_b x_bx_bᵀ over the keys in sight, row a of Σ_i (XΘ_iXᵀ)XW_i is

    y_a[s] = Σ_pqr x_a[p] C_a[q, r] Z[p, q, r, s],      Z[p, q, r, s] = Σ_i Θ_i[p, q] W_i[r, s],

and C_a is symmetric, so that only Z̃ = (Z[p, q, r, s] + Z[p, r, q, s])/2 is seen. Two tokens are enough to see all
of it: x_a is free, and C_a = x_ax_aᵀ + bbᵀ. So two linear layers are one function if and only if their Z̃ agree (and
their offsets, masks and divisors), and heads may be mixed: Σ_i G_ji Θ_i and Σ_i (G⁻ᵀ)_ji W_i, for any invertible G,
have the same Z. The symmetric part forgets more: heads Θ = abᵀ, W = fgᵀ and Θ = afᵀ, W = bgᵀ have the same Z̃.

Z̃ has d²(d + 1)/2 · e numbers; it is formed one slice p at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

DRAWS = 32  # pairs of directions in which heads are counted


def slices(Theta: Tensor, W: Tensor) -> Iterator[Tensor]:
    """Z̃[p], (d, d, e), for p = 1 … d."""
    for p in range(Theta.shape[1]):
        Z = torch.einsum("mq,mrs->qrs", Theta[:, p], W)
        yield (Z + Z.transpose(0, 1)) / 2


def norm(Theta: Tensor, W: Tensor) -> float:
    """‖Z̃‖_F."""
    return math.sqrt(sum(float(Z.square().sum()) for Z in slices(Theta, W)))


def distance(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[float, tuple[int, int, int, int]]:
    """‖Z̃_1 − Z̃_2‖_F over the larger of the two norms, and the entry in which they differ most."""
    apart, sizes, top, at = 0.0, [0.0, 0.0], -1.0, (0, 0, 0, 0)
    for p, (Z, V) in enumerate(zip(slices(*one), slices(*other), strict=True)):
        gap = (Z - V).abs()
        apart += float(gap.square().sum())
        sizes = [sizes[0] + float(Z.square().sum()), sizes[1] + float(V.square().sum())]
        if float(gap.max()) > top:
            top = float(gap.max())
            q, r, s = (int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
            at = (p, q, r, s)
    size = max(sizes) ** 0.5
    return (apart**0.5 / size if size > 0 else 0.0), at


def canonical(Theta: Tensor, W: Tensor, tolerance: float = 1e-9) -> tuple[Tensor, Tensor]:
    """Heads √s_i·(left, right) singular vectors of Z, the largest s first, those below ``tolerance`` · s_1 dropped;
    the entry of Θ_i largest in size is positive. One head stays in any case."""
    m, d, _ = Theta.shape
    e = W.shape[2]
    # Z = AᵀB with m rows each: the triangles hold its singular values, and nothing of size d² × de is formed.
    QA, RA = torch.linalg.qr(Theta.reshape(m, -1).mT)
    QB, RB = torch.linalg.qr(W.reshape(m, -1).mT)
    U, s, Vh = torch.linalg.svd(RA @ RB.mT)
    kept = max(int((s > tolerance * s[0]).sum()), 1)
    root = s[:kept].sqrt()
    left, right = (QA @ U[:, :kept] * root).mT, (QB @ Vh.mT[:, :kept] * root).mT
    sign = torch.gather(left, 1, left.abs().argmax(1, keepdim=True)).sign()
    sign = torch.where(sign == 0, torch.ones_like(sign), sign)
    return (sign * left).reshape(kept, d, d), (sign * right).reshape(kept, d, e)


def fewest(Theta: Tensor, W: Tensor, tolerance: float = 1e-9) -> int:
    """A number of heads that no set of heads with this operator goes below.

    For vectors u, v the matrix M = Σ_ps u_p v_s Z̃[p, ·, ·, s] is the symmetric part of Σ_i (Θ_iᵀu)(W_iv)ᵀ: with m
    heads it has at most m positive and at most m negative eigenvalues. So m is at least the larger of the two
    numbers, for any u and v; random ones are tried. Generic heads reach it where 2m ≤ d. Eigenvalues below
    ``tolerance`` times the largest do not count.
    """
    Theta, W = Theta.double().cpu(), W.double().cpu()
    return _most_of_a_sign(lambda u, v: torch.einsum("p,mpq,mrs,s->qr", u, Theta, W, v), Theta.shape[1],
                           W.shape[2], tolerance)


def fewest_of(Z: Tensor, tolerance: float = 1e-9) -> int:
    """The same for Z̃ itself, (d, d, d, e)."""
    Z = Z.double().cpu()
    return _most_of_a_sign(lambda u, v: torch.einsum("p,pqrs,s->qr", u, Z, v), Z.shape[0], Z.shape[3], tolerance)


def _most_of_a_sign(at: Callable[[Tensor, Tensor], Tensor], d: int, e: int, tolerance: float) -> int:
    draw = torch.Generator().manual_seed(0)
    found = 0
    for _ in range(DRAWS):
        u, v = (torch.randn(size, generator=draw, dtype=torch.float64) for size in (d, e))
        M = at(u, v)
        values = torch.linalg.eigvalsh((M + M.mT) / 2)
        bound = tolerance * float(values.abs().max())
        found = max(found, int((values > bound).sum()), int((values < -bound).sum()))
    return found
