"""Phase 2, sculpt: the convex body of all Θ that explain the rows on which all heads share one pattern.

A row is accepted when some q in the simplex makes ‖y_a − qᵀXŴ‖ small: then all heads look at the row with the
pattern q, and every pair of tokens with weight gives a constraint that all Θ_i meet,

    |⟨Θ, x_a(x_b − x_c)ᵀ⟩ − log(q_b/q_c)| ≤ ε.

Acceptance by a pattern and the constraints are the paper's; how a row is scored, how many are accepted, and ε are
ours. What is kept of the rows is a d² × d² Gram matrix of the constraints, and the best of them one by one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headway.linalg.projected import Rows
from headway.sculpting.body import Body, Gram
from headway.sculpting.rows import Given, Reservoir, thin
from headway.sculpting.simplex import affine_bound, simplex_fit
from headway.sculpting.thresholds import Thresholds

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


def sculpt(given: Given, total: Tensor, size: int) -> tuple[Gram, Body, dict[str, Any]]:
    """Collect the ``size`` rows that one pattern explains best through Ŵ = ``total``, and build the body from their
    pairs of tokens: its Gram matrix, its best constraints, and numbers for the trace."""
    best = Reservoir(size)
    seen = 0
    for rows in given.stream():
        _collect(given, total.to(rows.X), rows, best)
        seen += rows.X.shape[0] * given.length
    found = best.rows()
    keep = torch.isfinite(found["score"])
    found = {name: part[keep] for name, part in found.items()}
    gram, body = constraints(found, total, given.at)
    r = found["residual"].double()
    quantiles = torch.quantile(thin(r), torch.tensor(QUANTILES, dtype=torch.float64, device=r.device))
    return gram, body, {"rows": seen, "accepted": len(r), "threshold": float(found["score"].max()),
                        "residual_quantiles": [float(v) for v in quantiles]}


def _collect(given: Given, W: Tensor, rows: Rows, best: Reservoir) -> None:
    """Add the rows of one batch that may be among the best, each with its pattern q."""
    k = given.length
    Z = rows.X @ W
    # A row is as good as its best constraint: the residual over what a shift of weight between two tokens
    # would show. Its least possible value, with q = (1/2, 1/2) on the farthest pair, is had without q.
    far = torch.cdist(Z, Z).flatten(1).max(1).values.clamp_min(1e-30)
    lower = given.leave_out(affine_bound(Z, rows.Y) / (far[:, None] / 4), rows.X).flatten()
    # Saturated rows pass the bound and give no constraint, so in the first batch more are looked at.
    limit = best.threshold
    if not math.isfinite(limit):
        part = min(1.0, 4.0 * best.size / given.rows + 0.02)
        limit = float(lower.kthvalue(max(1, math.ceil(part * len(lower)))).values)
        limit = math.inf if part == 1.0 else limit
    chosen = torch.nonzero(lower <= limit).squeeze(1)
    n, a = chosen // k, chosen % k
    q, residual = simplex_fit(Z[n], rows.Y[n, a])
    usable = (q >= given.at.least_weight).sum(1) > 1
    quality = (_pair_weight(q) * torch.cdist(Z[n], Z[n])).flatten(1).max(1).values.clamp_min(1e-30)
    score = torch.where(usable, residual / quality, torch.inf)
    best.add(score, X=rows.X[n], a=a, q=q, residual=residual)


def constraints(found: dict[str, Tensor], total: Tensor, at: Thresholds) -> tuple[Gram, Body]:
    """Constraints of all pairs of tokens with weight.

    A residual r leaves the weights uncertain by r/‖Ŵᵀ(x_b − x_c)‖, hence log(q_b/q_c) by (1/q_b + 1/q_c) times
    that: the slack ε. Rows are weighed by 1/ε.
    """
    X, q, r = found["X"], found["q"], found["residual"]
    k, d = X.shape[1:]
    x = X[torch.arange(len(X), device=X.device), found["a"]]
    rank = min(len(r), math.ceil(at.floor * d**2))
    W = total.to(X)
    # Labels met to the last digit, as saturated patterns are, are still only known to the last digit.
    digit = torch.finfo(X.dtype).eps * float((X @ W).norm(dim=2).max())
    floor = max(float(r.kthvalue(max(1, rank)).values), digit, 1e-30)
    gram = Gram(d, X.device)
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    best = torch.topk(r, min(len(r), 8 * d**2), largest=False).indices
    for b in range(k):
        for c in range(b + 1, k):
            good = (q[:, b] >= at.least_weight) & (q[:, c] >= at.least_weight)
            delta = X[:, b] - X[:, c]
            reach = (delta @ W).norm(dim=1)
            good &= reach > 1e-6 * reach.max().clamp_min(1e-30)
            level = torch.log(q[:, b].clamp_min(1e-30) / q[:, c].clamp_min(1e-30))
            slack = (r + floor) / reach.clamp_min(1e-30) * (
                1 / q[:, b].clamp_min(1e-9) + 1 / q[:, c].clamp_min(1e-9))
            chosen = torch.nonzero(good).squeeze(1)
            gram.add(x[chosen].unsqueeze(2) * delta[chosen].unsqueeze(1), level[chosen], slack[chosen])
            chosen = best[good[best]]
            kept.append((x[chosen].unsqueeze(2) * delta[chosen].unsqueeze(1), level[chosen], slack[chosen]))
    return gram, Body(*(torch.cat(part).double() for part in zip(*kept, strict=True)))


def _pair_weight(q: Tensor) -> Tensor:
    """q_bq_c/(q_b + q_c): what a residual is divided by to give the uncertainty of log(q_b/q_c), (n, k, k)."""
    return (q.unsqueeze(1) * q.unsqueeze(2)) / (q.unsqueeze(1) + q.unsqueeze(2)).clamp_min(1e-9)
