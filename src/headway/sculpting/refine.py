"""Phase 3, proxy and refine: a better Ŵ ≈ Σ_i W_i, by least squares of y_a on h̄_a = Xᵀp̄_a where the heads agree.

Θ̄, the body's point of least norm, stands for all heads: ⟨Θ_i, Θ̄⟩ = ‖Θ̄‖² for every i. Where all heads look at a row
alike, p̄_a, the pattern under Θ̄, is theirs, and y_a = (Σ_i W_i)ᵀh̄_a. The paper takes rows with a large margin under
Θ̄; such rows are rare, and here those are taken whose predicted spread over the hull is least.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headway.core import attention
from headway.sculpting.hull import Hull
from headway.sculpting.rows import Given, Reservoir, arbitrary, least_squares, thin


def refine(given: Given, hull: Hull) -> tuple[Tensor, dict[str, Any]]:
    """Ŵ from the rows on which the heads are predicted to agree, and numbers for the trace."""
    at = given.at
    best = Reservoir(math.ceil(at.sum_rows * given.width))
    seen = 0
    for rows in given.stream():
        P = attention.patterns(rows.X, hull.center.to(rows.X).unsqueeze(0))
        h = attention.attend(P, rows.X).squeeze(2)
        error = _spread(given, hull, rows.X) if given.heads > 1 else arbitrary(h)
        error = given.leave_out(error, rows.X)
        best.add(error.flatten(), h=h.flatten(0, 1), y=rows.Y.flatten(0, 1))
        seen += error.numel()
    found = best.rows()
    h, y = found["h"].double(), found["y"].double()
    weight = 1.0 / (found["score"] + found["score"].median().clamp_min(1e-30)).double().unsqueeze(1)
    W = least_squares(h * weight, y * weight)
    wrong = ((y - h @ W) * weight).norm(dim=1)
    keep = wrong <= torch.quantile(thin(wrong), 1.0 - at.trim)
    total = least_squares(h[keep] * weight[keep], y[keep] * weight[keep])
    left = (y[keep] - h[keep] @ total).norm(dim=1)
    return total, {"rows": seen, "accepted": int(keep.sum()), "threshold": float(found["score"].max()),
                   "residual": float(left.median())}


def _spread(given: Given, hull: Hull, X: Tensor) -> Tensor:
    """How far apart the heads' averages of a row lie, as the hull predicts it: (n, k).

    Heads sit about ρ = √(m − 1)·‖Θ̄‖ from Θ̄ when they are orthogonal and of one size; the spread is half the
    distance of Xᵀp under Θ̄ + ρV_j and under Θ̄ − ρV_j, over all j.
    """
    center, V = hull.center.to(X), hull.directions.to(X)
    rho = given.at.radius * math.sqrt(max(given.heads - 1, 1)) * center.norm()
    H = attention.attend(attention.patterns(X, torch.cat([center + rho * V, center - rho * V])), X)
    j = len(V)
    apart: Tensor = (H[:, :, :j] - H[:, :, j:]).flatten(2).norm(dim=2) / 2
    return apart
