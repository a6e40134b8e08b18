"""min over q in the simplex of ‖y − Σ_b q_b z_b‖, for very many rows at once and at most eight tokens."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-6  # relative; equal tokens make the Gram matrix singular


def affine_bound(Z: Tensor, Y: Tensor) -> Tensor:
    """min over Σ q = 1 of ‖y_a − qᵀZ‖ for every row of a sequence, (n, k): a lower bound of the simplex's.

    One small inverse a sequence serves all its rows: with D = Z minus its first row the residual is the part of
    y − z_1 outside the row space of D. The ridge ρ = RIDGE · mean ‖z_b − z_1‖² lifts it a little, as a pattern's
    weights have a norm of at most one: its square is below that of the simplex plus ρ.
    """
    base = Z[:, :1]
    D = Z[:, 1:] - base
    R = Y - base
    G = D @ D.mT
    eye = torch.eye(G.shape[1], dtype=G.dtype, device=G.device)
    G = G + (RIDGE * G.diagonal(dim1=1, dim2=2).mean(1) + 1e-30).view(-1, 1, 1) * eye
    coefficients = torch.linalg.solve(G, D @ R.mT)  # (n, k − 1, rows)
    bound: Tensor = (R - coefficients.mT @ D).norm(dim=2)
    return bound


def simplex_fit(Z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """q (n, k) and the residual's norm (n,) for Z (n, k, e), y (n, e): an active-set method on the ridged problem.

    That is min ‖y − qᵀZ‖² + ρ‖q‖² with ρ = RIDGE · mean ‖z_b‖². How far q is from the best pattern p depends on how
    well the tokens are told apart: with σ² the least of ‖vᵀZ‖² over unit v of sum zero,

        ‖q − p‖ ≤ ρ(1 + √k)/(σ² + ρ)  and  ‖y − qᵀZ‖² ≤ ‖y − pᵀZ‖² + 2ρ²(1 + √k)²/(σ² + ρ).

    (Add the variational inequalities of both problems; ρ‖p‖ is the ridge's part, √k that of the multipliers, which
    are let go below ρ.)

    Each row keeps a support. On it the equality-constrained problem is solved; where that leaves the simplex the
    step is cut at the boundary and the token that hit it is dropped; where it does not, the token with the most
    negative multiplier comes back in. Every step lowers the residual, so no support comes twice.
    """
    n, k, _ = Z.shape
    G, b = Z @ Z.mT, (Z @ y.unsqueeze(2)).squeeze(2)
    scale = G.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)
    G = G + (RIDGE * scale).view(-1, 1, 1) * torch.eye(k, dtype=Z.dtype, device=Z.device)
    q = torch.full((n, k), 1.0 / k, dtype=Z.dtype, device=Z.device)
    support = torch.ones(n, k, dtype=torch.bool, device=Z.device)
    todo = torch.arange(n, device=Z.device)
    for _ in range(6 * k):
        if not len(todo):
            break
        g, c, old, on = G[todo], b[todo], q[todo], support[todo]
        new = _on_support(g, c, on)
        shrink = torch.where(on & (new < 0), old / (old - new).clamp_min(1e-30), torch.ones_like(new))
        step, hit = shrink.min(1)
        inside = step >= 1
        moved = torch.where(inside[:, None], new, old + step[:, None] * (new - old)).clamp_min(0)
        rows = torch.arange(len(todo), device=Z.device)
        on = on.clone()
        on[rows[~inside], hit[~inside]] = False
        # Multipliers of the tokens left out: the gradient there, less its common value on the support.
        gradient = (g @ moved.unsqueeze(2)).squeeze(2) - c
        level = (gradient * moved).sum(1, keepdim=True)
        wish = torch.where(on, torch.full_like(gradient, torch.inf), gradient - level)
        least, back = wish.min(1)
        again = inside & (least < -RIDGE * scale[todo])
        on[rows[again], back[again]] = True
        q[todo], support[todo] = moved, on
        todo = todo[~inside | again]
    q = q / q.sum(1, keepdim=True)
    return q, (y - (q.unsqueeze(1) @ Z).squeeze(1)).norm(dim=1)


def _on_support(G: Tensor, b: Tensor, on: Tensor) -> Tensor:
    """argmin of qᵀGq/2 − bᵀq with Σ q = 1 and q = 0 off the support, by two solves with the masked Gram matrix."""
    mask = on.to(G.dtype)
    masked = G * mask.unsqueeze(1) * mask.unsqueeze(2) + torch.diag_embed(1.0 - mask)
    solved = torch.linalg.solve(masked, torch.stack([b * mask, mask], dim=2))
    free, ones = solved[..., 0] * mask, solved[..., 1] * mask
    q: Tensor = free + ones * ((1.0 - free.sum(1)) / ones.sum(1)).unsqueeze(1)
    return q
