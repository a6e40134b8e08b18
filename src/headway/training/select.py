"""The token-selecting matrix of largest margin, and how descent turns towards it.

W_mm = argmin ‖W‖ subject to (x_opt − x_t)ᵀ W x_1 ≥ 1 for every sequence and every other token t: the direction in
which descent on one softmax head converges ("Implicit Bias and Fast Convergence Rates for Self-attention"). The
query is the first token, keys on the left as there; in this package's order ⟨Θ, x_1(x_opt − x_t)ᵀ⟩ ≥ 1, Θ = Wᵀ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core import checks
from headway.training.realizability import least_point


@dataclass(frozen=True)
class Selection:
    """One query a sequence and a fixed score u·x for each token; the best token is the optimum.

    L(Θ) = mean ℓ(y_i u·(Xᵀ softmax(XΘᵀx_1))) with y_iu·x_opt largest: only Θ is trained.
    """

    X: Tensor  # (n, T, d)
    y: Tensor  # (n,)
    u: Tensor  # (d,)

    @property
    def best(self) -> Tensor:
        """Index of the optimal token of each sequence."""
        return (self.y.unsqueeze(1) * (self.X @ self.u)).argmax(1)

    def normals(self) -> Tensor:
        """x_1(x_opt − x_t)ᵀ for every other token t, flattened: (n(T − 1), d²)."""
        n, T, d = self.X.shape
        opt = self.X[torch.arange(n), self.best]
        others = torch.ones(n, T, dtype=torch.bool)
        others[torch.arange(n), self.best] = False
        gaps = (opt.unsqueeze(1) - self.X)[others].view(n, T - 1, d)
        return torch.einsum("np,ntq->ntpq", self.X[:, 0], gaps).reshape(-1, d * d)

    def loss(self, Theta: Tensor) -> tuple[float, float, Tensor]:
        """L, L less its infimum, and ∇L, in closed form.

        Near the end nearly all weight is on the best token, and differences of what is left must not be formed from
        numbers close to 1: v_t − Σ_sP_sv_s is summed as Σ_sP_s(v_t − v_s), the excess with log1p and expm1.
        """
        scores = torch.einsum("np,pq,ntq->nt", self.X[:, 0], Theta, self.X)
        P = torch.softmax(scores, 1)
        value = self.y.unsqueeze(1) * (self.X @ self.u)
        above = torch.einsum("ns,nts->nt", P, value.unsqueeze(2) - value.unsqueeze(1))  # v_t − Σ_s P_sv_s
        rows = torch.arange(len(self.y))
        gap, top = above[rows, self.best], value[rows, self.best]
        margin = top - gap
        weight = -torch.sigmoid(-margin) / len(self.y)
        g = weight.unsqueeze(1) * P * above
        gradient = torch.einsum("nt,np,ntq->pq", g, self.X[:, 0], self.X)
        excess = torch.log1p(torch.sigmoid(-top) * torch.expm1(gap))
        return float(-torch.nn.functional.logsigmoid(margin).mean()), float(excess.mean()), gradient


def max_margin(problem: Selection) -> Tensor:
    """W_mm as Θ (d, d): least norm with every constraint at 1 or more, by non-negative least squares."""
    A = problem.normals().double().numpy()
    d = problem.X.shape[2]
    point = A.T @ least_point(A.T)
    squared = float(point @ point)
    if squared < 1e-16 * float((A * A).sum(1).max()):
        checks.refuse("X", "tokens whose optimal ones a matrix can select (margin above 0)", "margin 0",
                      "wider tokens, or fewer sequences")
    return torch.from_numpy(point / squared).view(d, d)


def direction_error(Theta: Tensor, target: Tensor) -> float:
    """‖Θ/‖Θ‖ − W_mm/‖W_mm‖‖."""
    return float((Theta / Theta.norm().clamp_min(1e-300) - target / target.norm()).norm())


def turn(
    problem: Selection, *, steps: int, step: float, rule: str, target: Tensor, goal: float = 0.0
) -> tuple[list[float], list[float]]:
    """Losses and direction errors of descent on Θ from 0; stops at ``goal``."""
    checks.choice("rule", rule, ("constant", "normalized", "polyak"))
    d = problem.X.shape[2]
    Theta = torch.zeros(d, d).to(problem.X)
    lost, errors = [], []
    for _ in range(steps):
        loss, excess, gradient = problem.loss(Theta)
        size = float(gradient.norm())
        lost.append(loss)
        errors.append(direction_error(Theta, target) if float(Theta.norm()) > 0 else math.sqrt(2.0))
        if errors[-1] <= goal or size < 1e-300:
            break
        rate = {"constant": step, "normalized": step / size,
                "polyak": step * excess / (2 * size**2)}[rule]
        Theta = Theta - rate * gradient
    return lost, errors


def selection(count: int, *, tokens: int = 6, width: int = 30, seed: int = 0) -> Selection:
    """Gaussian tokens, moved along u so that one token a sequence scores y and the others 0, the setting in which
    the direction of descent is known; labels at random. Separable when d² is well above the constraints' number."""
    draw = torch.Generator().manual_seed(checks.whole("seed", seed, 0))
    X = torch.randn(checks.whole("count", count), checks.whole("tokens", tokens, 2), checks.whole("width", width),
                    generator=draw, dtype=torch.float64) / width**0.5
    y = 2.0 * torch.randint(0, 2, (count,), generator=draw).double() - 1.0
    u = torch.randn(width, generator=draw, dtype=torch.float64)
    u = u / u.norm()
    score = torch.zeros(count, tokens, dtype=torch.float64)
    score[torch.arange(count), torch.randint(0, tokens, (count,), generator=draw)] = 1.0
    return Selection(X + ((score * y.unsqueeze(1) - X @ u).unsqueeze(2) * u), y, u)
