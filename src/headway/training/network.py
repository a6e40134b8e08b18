"""Φ(X; θ) = (1/√H) Σ_h ⟨U_h, softmax(XW_hXᵀ)X⟩, the logistic loss, and both gradients in closed form.

Heads that start equal stay equal under any rule that treats heads alike, so a network is held as groups of equal
heads with multiplicities: H = 10¹² costs what one head costs. Norms and inner products count every copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from headway.core import attention, checks

CHUNK = 1 << 23  # numbers in one intermediate (n, T, groups, max(T, d))


@dataclass(frozen=True)
class Network:
    """U (g, T, d), W (g, d, d) and count (g,): how many heads each group stands for."""

    U: Tensor
    W: Tensor
    count: Tensor

    def __post_init__(self) -> None:
        g, _, d = self.U.shape
        checks.shape("W", self.W, (g, d, d), "one square matrix a head")
        checks.shape("count", self.count, (g,), "one multiplicity a group")

    @property
    def heads(self) -> float:
        return float(self.count.sum())

    def norm(self) -> float:
        """‖θ‖ over all heads."""
        return math.sqrt(float((self.count * self.squares()).sum()))

    def squares(self) -> Tensor:
        """‖θ_h‖² for one head of each group."""
        return self.U.square().sum((1, 2)) + self.W.square().sum((1, 2))

    def largest_U(self) -> float:
        """max_h ‖U_h‖."""
        return float(self.U.flatten(1).norm(dim=1).max())

    def minus(self, other: Network) -> Network:
        return Network(self.U - other.U, self.W - other.W, self.count)

    def plus(self, other: Network, scale: float = 1.0) -> Network:
        return Network(self.U + scale * other.U, self.W + scale * other.W, self.count)

    def dot(self, other: Network) -> float:
        each = (self.U * other.U).sum((1, 2)) + (self.W * other.W).sum((1, 2))
        return float((self.count * each).sum())

    def __call__(self, X: Tensor) -> Tensor:
        """Φ for X (n, T, d): (n,)."""
        return torch.cat([self._scores(part) for part in torch.split(X, self._step(X))])

    def _scores(self, X: Tensor) -> Tensor:
        H = attention.attend(attention.patterns(X, self.W), X)  # (n, T, g, d)
        scores: Tensor = torch.einsum("ntgd,gtd,g->n", H, self.U, self.count) / math.sqrt(self.heads)
        return scores

    def _step(self, X: Tensor) -> int:
        return max(1, CHUNK // (X.shape[1] * len(self.U) * max(X.shape[1:])))

    def pull(self, X: Tensor, weight: Tensor) -> Network:
        """Σ_i weight_i ∇Φ(X_i), for one head of each group:

        ∇_UΦ = PX/√H and, with S_ts = u_t·x_s and B = P∘(S − rowsum(P∘S)), ∇_WΦ = XᵀBX/√H.
        """
        scale = 1.0 / math.sqrt(self.heads)
        gU, gW = torch.zeros_like(self.U), torch.zeros_like(self.W)
        step = self._step(X)
        for x, w in zip(torch.split(X, step), torch.split(weight, step), strict=True):
            P = attention.patterns(x, self.W)
            H = attention.attend(P, x)
            gU += torch.einsum("n,ntgd->gtd", w, H) * scale
            side = torch.einsum("n,gtd->ntgd", w, self.U) * scale
            gW += attention.cotangent(P, x, side, x.shape[2])
        return Network(gU, gW, self.count)

    def features(self, X: Tensor) -> Tensor:
        """∇Φ(X_i) as rows, each group's part scaled by √count, so that plain inner products count every copy."""
        scale = self.count.sqrt() / math.sqrt(self.heads)
        P = attention.patterns(X, self.W)
        H = attention.attend(P, X)  # ∇_U of one head, times √H
        n, T, g, d = H.shape
        side = attention.key_side(P, X, self.U.permute(1, 0, 2).expand(n, T, g, d))
        W = torch.einsum("ntp,ntgq->ngpq", X, side)
        each = scale.view(1, g, 1, 1)
        return torch.cat([(H.permute(0, 2, 1, 3) * each).flatten(1), (W * each).flatten(1)], dim=1)

    def mass(self, X: Tensor, relevant: Tensor) -> float:
        """Mean attention weight on the relevant tokens, over heads, rows and sequences."""
        P = attention.patterns(X, self.W)
        share = (P * relevant.to(P).view(len(X), 1, 1, -1)).sum(3).mean((0, 1))
        return float((share * self.count).sum() / self.heads)


def losses(margins: Tensor) -> Tensor:
    """ℓ(t) = log(1 + e^{−t}), accurate down to 1e-300."""
    return -logsigmoid(margins)


def loss_and_gradient(net: Network, X: Tensor, y: Tensor) -> tuple[float, Network, Tensor]:
    """L̂, ∇L̂ for one head of each group, and the margins y_iΦ(X_i)."""
    margins = y * net(X)
    weight = -y * torch.sigmoid(-margins) / len(y)
    return float(losses(margins).mean()), net.pull(X, weight), margins
