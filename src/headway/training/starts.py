"""Where gradient descent begins: zero, one step from zero with a sign for each head, or Gaussian."""

from __future__ import annotations

import torch

from headway.core import checks
from headway.core.names import STARTS
from headway.training.data import Labelled
from headway.training.network import Network


def start(kind: str, heads: int, data: Labelled, *, seed: int = 0, scale: float = 0.1) -> Network:
    """zero: θ = 0, one group. signs: U_h = α_h 1 (½ mean y x̄)ᵀ, W_h = 0 with random signs α_h. balanced: as many
    plus as minus signs, so that Φ ≡ 0. gaussian: entries of deviation ``scale``, every head its own group."""
    checks.choice("start", kind, STARTS)
    H = checks.whole("heads", heads)
    _, T, d = data.X.shape
    draw = torch.Generator().manual_seed(checks.whole("seed", seed, 0))
    if kind == "zero":
        return Network(torch.zeros(1, T, d).to(data.X), torch.zeros(1, d, d).to(data.X),
                       torch.tensor([float(H)], dtype=data.X.dtype, device=data.X.device))
    if kind == "gaussian":
        U = scale * torch.randn(H, T, d, generator=draw, dtype=torch.float64)
        W = scale * torch.randn(H, d, d, generator=draw, dtype=torch.float64)
        return Network(U.to(data.X), W.to(data.X), torch.ones(H).to(data.X))
    if kind == "balanced" and H % 2:
        checks.refuse("heads", "an even number with a balanced start", H, f"heads={H + 1}")
    # A binomial number of plus signs; beyond what can be tossed one by one its normal limit is exact enough.
    if kind == "balanced":
        plus = H // 2
    elif H <= 1 << 20:
        plus = int(torch.randint(0, 2, (H,), generator=draw).sum())
    else:
        plus = round(H / 2 + H**0.5 / 2 * float(torch.randn((), generator=draw, dtype=torch.float64)))
    v = 0.5 * (data.y.view(-1, 1) * data.X.mean(1)).mean(0)
    U = torch.stack([v.expand(T, d), -v.expand(T, d)])
    keep = [j for j, number in enumerate((plus, H - plus)) if number]
    count = torch.tensor([float(plus), float(H - plus)], dtype=data.X.dtype, device=data.X.device)
    return Network(U[keep].contiguous(), torch.zeros(len(keep), d, d).to(data.X), count[keep])
