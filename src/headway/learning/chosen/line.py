"""Answers to tokens on a line: Y = Σ_i ψ'(ℓ_i) a_iᵀ + affine, and the heads behind them by exact least squares.

Let the tokens be x_j = b + t_jδ. The score of key j at query x_a is t_j ℓ + const with the logit

    ℓ_ia = z_i + t_a κ_i,    z_i = bᵀΘ_iδ + u_iᵀδ,    κ_i = δᵀΘ_iδ,

so head i attends to Σ_j p_j x_j = b + ψ'(ℓ_ia)δ, with ψ(ℓ) = log Σ_j exp(t_jℓ), and row a of the answer is

    y_a = Σ_i ψ'(ℓ_ia) a_i + (ΣW_i)ᵀb + c,    a_i = W_iᵀδ.

z_i is affine in b: with b = b_0 + Bs it is w_i + v_iᵀs. What is sought are v_i, w_i and κ_i; the rest is linear and
eliminated. With two tokens, or others that lie symmetrically, (a_i, ℓ_i) and (−a_i, −ℓ_i) answer alike; with
GRID, whose steps grow, they do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST, MOST = -0.6, 1.6  # of t
STEPS, FAILED, WELL = 200, 5.0, 4.0  # of Levenberg–Marquardt; damping times this, and divided by this
FALLEN = 1e-10  # part of the loss that a step gains when nothing moves any more


def grid(k: int, like: Tensor) -> Tensor:
    """t_1 … t_k, the gaps growing."""
    return LEAST + (MOST - LEAST) * (torch.arange(k, dtype=like.dtype, device=like.device) / (k - 1)) ** 3


def attended(t: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """ψ'(ℓ) and ψ''(ℓ): mean and variance of t under weights exp(t_jℓ)."""
    p = torch.softmax(logits.unsqueeze(-1) * t, dim=-1)
    mean = p @ t
    return mean, p @ t.square() - mean.square()


@dataclass(frozen=True)
class Line:
    """Sequences on lines with one δ: t (k,), coordinates s of their base points (n, r), answers Y (n, k, e)."""

    t: Tensor
    s: Tensor
    Y: Tensor


@dataclass(frozen=True)
class Logits:
    """v (m, r), w (m,), κ (m,): of every head how its logit depends on base point and query."""

    v: Tensor
    w: Tensor
    kappa: Tensor

    def at(self, line: Line) -> Tensor:
        """ℓ, (n, k, m)."""
        z = line.s @ self.v.T + self.w
        return z.unsqueeze(1) + line.t.view(1, -1, 1) * self.kappa

    def moved(self, step: Tensor) -> Logits:
        r = self.v.shape[1]
        return Logits(self.v + step[:, :r], self.w + step[:, r], self.kappa + step[:, r + 1])


@dataclass(frozen=True)
class Exact:
    """A fit of a line: logits, a (m, e), ‖residual‖ / ‖what the heads explain of the answers‖."""

    logits: Logits
    a: Tensor
    residual: float


def eliminated(line: Line, logits: Logits) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Orthonormal basis of the features, ψ'', a and residuals for the best a, ΣW and c."""
    n, k, e = line.Y.shape
    mean, slope = attended(line.t, logits.at(line))
    m = mean.shape[2]
    affine = torch.cat([line.s, torch.ones_like(line.s[:, :1])], 1).unsqueeze(1).expand(n, k, -1)
    H = torch.cat([mean, affine], 2).reshape(n * k, -1)
    U, sizes, Vh = torch.linalg.svd(H, full_matrices=False)
    kept = sizes > 1e-13 * sizes[0]
    U, sizes, Vh = U[:, kept], sizes[kept], Vh[kept]
    Y = line.Y.reshape(n * k, e)
    answer = U.T @ Y
    return U, slope.reshape(n * k, m), (Vh.T @ (answer / sizes.unsqueeze(1)))[:m], Y - U @ answer


def fitted(line: Line, start: Logits, steps: int = STEPS) -> Exact:
    """Levenberg–Marquardt from ``start``, a_i, ΣW_i and c eliminated (Kaufman's form of the Jacobian).

    ∂y/∂(v, w, κ)_i = ψ''(ℓ_i) (s, 1, t) a_iᵀ, so with D_i = (I − Π) ψ''(ℓ_i)(s, 1, t) the normal matrix is
    (D_iᵀD_j)(a_i·a_j): outputs never enter it. Cost: n·k·(m(r + 2))² a step.
    """
    n, k, _ = line.Y.shape
    rows = torch.cat([line.s.unsqueeze(1).expand(n, k, -1), torch.ones_like(line.Y[..., :1]),
                      line.t.view(1, k, 1).expand(n, k, 1)], 2).reshape(n * k, -1)
    centred = (line.Y - line.Y.mean(1, keepdim=True)).square().sum()
    scale = max(float(centred), 1e-300)
    logits, damping = start, 1e-3
    U, slope, a, R = eliminated(line, logits)
    loss = float(R.square().sum())
    for _ in range(steps):
        m, q = slope.shape[1], rows.shape[1]
        D = (slope.unsqueeze(2) * rows.unsqueeze(1)).reshape(n * k, m * q)
        g = torch.einsum("nmq,ne,me->mq", D.view(n * k, m, q), R, a).reshape(-1)
        D = D - U @ (U.T @ D)
        N = (D.T @ D).view(m, q, m, q) * (a @ a.T).view(m, 1, m, 1)
        N = N.reshape(m * q, m * q)
        size = N.diagonal().clamp_min(1e-12 * float(N.diagonal().max()) + 1e-300)
        gained = 0.0
        for _ in range(8):
            factor, wrong = torch.linalg.cholesky_ex(N + torch.diag(damping * size))
            if not int(wrong):
                moved = logits.moved(torch.cholesky_solve(g.unsqueeze(1), factor).view(m, q))
                trial = eliminated(line, moved)
                new = float(trial[3].square().sum())
                if new < loss:
                    gained = 1 - new / loss
                    logits, (U, slope, a, R), loss = moved, trial, new
                    damping = max(damping / WELL, 1e-14)
                    break
            damping *= FAILED
        if gained < FALLEN:
            break
    return Exact(logits, a, (loss / scale) ** 0.5)
