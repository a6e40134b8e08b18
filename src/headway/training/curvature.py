"""λ_min(∇²L̂) ≥ −(β₃/√H)L̂, measured: the least eigenvalue of Σ_i ℓ'_i y_i ∇²Φ(X_i)/n, block diagonal in heads.

What this leaves out of ∇²L̂, the average of ℓ''∇Φ∇Φᵀ, is positive semidefinite: its least eigenvalue is a lower
bound of λ_min(∇²L̂). The part left out vanishes on differences between equal heads, so where the least block belongs
to a group of two heads or more, the bound is λ_min itself.

For one head, with attention p_t, mean h_t, covariance C_t and scores u_t·x_s in row t of a sequence, the blocks are

    ∂²Φ/∂U² = 0,   ∂²Φ/∂U_tq'∂W_pq = x_t[p] C_t[q', q],   ∂²Φ/∂W_pq∂W_p'q' = Σ_t x_t[p]x_t[p'] K_t[q, q'],
    K_t = Σ_s p_ts (u_t·(x_s − h_t)) (x_s − h_t)(x_s − h_t)ᵀ, the third cumulant along u_t,

each divided by √H.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headway.core import attention
from headway.linalg.krylov import lanczos
from headway.training.constants import constants
from headway.training.data import Labelled
from headway.training.descent import Path
from headway.training.network import CHUNK, Network

DENSE = 1200  # unknowns of a head, Td + d², up to which its matrix is formed
PRODUCTS = 60  # of Lanczos beyond that


def least_head_curvature(
    net: Network, X: Tensor, y: Tensor, generator: torch.Generator, *, dense: int = DENSE, products: int = PRODUCTS
) -> tuple[float, bool]:
    """(least eigenvalue over the heads' blocks, whether it is exact).

    Exact where the blocks are formed: then it is a lower bound of λ_min(∇²L̂). Where Td + d² is above ``dense`` it
    is the least Ritz value of Lanczos, which lies above the least eigenvalue: an estimate, and no lower bound.
    """
    weight = -y * torch.sigmoid(-(y * net(X))) / len(y)
    size = net.U[0].numel() + net.W[0].numel()
    exact = size <= dense
    least = math.inf
    for g in range(len(net.U)):
        if exact:
            values = torch.linalg.eigvalsh(head_matrix(net, X, weight, g))
        else:
            start = torch.randn(size, generator=generator, dtype=torch.float64).to(net.U)
            values, _ = lanczos(head_product(net, X, weight, g), start, min(products, size))
        least = min(least, float(values[0]) / math.sqrt(net.heads))
    return least, exact


def head_matrix(net: Network, X: Tensor, weight: Tensor, g: int) -> Tensor:
    """√H times the block of one head of group g, (Td + d², Td + d²), for weights w_i = ℓ'_i y_i/n."""
    U, W = net.U[g], net.W[g : g + 1]
    T, d = U.shape
    cross, within = torch.zeros(T * d, d * d).to(U), torch.zeros(d * d, d * d).to(U)
    step = max(1, CHUNK // (T * d * max(T, d)))
    for x, w in zip(torch.split(X, step), torch.split(weight, step), strict=True):
        P = attention.patterns(x, W).squeeze(2)  # (n, T, T)
        from_mean = x.unsqueeze(1) - (P @ x).unsqueeze(2)  # x_s − h_t, (n, t, s, d)
        along = torch.einsum("ntsd,td->nts", from_mean, U)
        C = torch.einsum("nts,ntsp,ntsq->ntpq", P, from_mean, from_mean)
        K = torch.einsum("nts,ntsp,ntsq->ntpq", P * along, from_mean, from_mean)
        cross += torch.einsum("n,ntp,ntrq->trpq", w, x, C).reshape(T * d, d * d)
        outer = torch.einsum("n,ntp,ntr->ntpr", w, x, x).reshape(-1, d * d)
        moved = (outer.T @ K.reshape(-1, d * d)).view(d, d, d, d)  # p, p', q, q'
        within += moved.permute(0, 2, 1, 3).reshape(d * d, d * d)
    return torch.cat([torch.cat([torch.zeros(T * d, T * d).to(U), cross], 1), torch.cat([cross.T, within], 1)])


def head_product(net: Network, X: Tensor, weight: Tensor, g: int) -> Callable[[Tensor], Tensor]:
    """v ↦ head_matrix·v without forming it."""
    U, W = net.U[g], net.W[g : g + 1]
    T, d = U.shape
    P = attention.patterns(X, W)  # (n, T, 1, T)
    S = torch.einsum("td,nsd->nts", U, X).unsqueeze(2)
    centred = S - (P * S).sum(3, keepdim=True)

    def apply(v: Tensor) -> Tensor:
        """The derivative of (ΣwPX, ΣwXᵀBX) along (dU, dW), B = P∘(S − rowsum(P∘S)), S_ts = u_t·x_s."""
        dU, dW = v[: T * d].view(T, d), v[T * d :].view(1, d, d)
        moved = attention.scores(X, dW)
        dP = P * (moved - (P * moved).sum(3, keepdim=True))
        dS = torch.einsum("td,nsd->nts", dU, X).unsqueeze(2)
        dB = dP * centred - P * (dP * S).sum(3, keepdim=True) + P * (dS - (P * dS).sum(3, keepdim=True))
        first = torch.einsum("n,nts,nsd->td", weight, dP.squeeze(2), X)
        second = torch.einsum("n,ntp,nts,nsq->pq", weight, X, dB.squeeze(2), X)
        return torch.cat([first.flatten(), second.flatten()])

    return apply


def curvature_along(path: Path, data: Labelled, seed: int) -> tuple[dict[str, float], ...]:
    """The least curvature at kept points against −(β₃/√H)L̂ with M the largest ‖U_h‖ there. Where it is not exact
    it is an estimate from above."""
    _, T, d = data.X.shape
    rows = []
    for k, net in sorted(path.kept.items()):
        draw = torch.Generator().manual_seed(seed)
        least, exact = least_head_curvature(net, data.X, data.y, draw)
        loss = path.columns["loss"][k]
        M = path.columns["largest_U"][k]
        beta3 = constants(T, d, data.radius, M, net.heads).beta3
        rows.append({"iteration": float(k), "loss": loss, "least": least, "exact": exact,
                     "allowed": -beta3 / math.sqrt(net.heads) * loss})
    return tuple(rows)
