"""How fast can the Jacobian change? A bound for all rows, from lengths of tokens.

Scaled coordinates: δΘ_i = L t_i R_i, and for W and c together ω = Cᵀ[δW; δc] with CCᵀ = G, so that ‖δW‖ ≤ ‖ω‖/√g
with g the least eigenvalue of G. A score of row a changes by s_i(b) = (Lx̃_a)ᵀ t_i (R_i x_b). Let ξ = |Lx̃_a| and
let ρ_i, ϱ_i, ϱ be the largest of |R_i(x_b − x̄)|, |W_iᵀ(x_b − x̄)| and |x_b − x̄| over the keys in sight, x̄ any
point. Whatever the pattern is, a score's deviation under it is at most ξρ_i‖t_i‖, hence

    ‖D²y[δ, δ']‖ ≤ Σ_i 2(ϱ_i + ‖ΔW_i‖ϱ)(ξρ_i)² ‖t_i‖‖t_i'‖ + ϱξ Σ_i ρ_i(‖δW_i‖‖t_i'‖ + ‖t_i‖‖δW_i'‖).

For a row this is a form of two numbers, (‖t‖, ‖ω‖), with the norm (α + √(α² + 4β²))/2, α = max_i 2(…)(ξρ_i)²,
β = ϱξ max_i ρ_i/√g; rows add in squares.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headway.certificates.jacobian import Sample
from headway.certificates.thin import ThinScaled
from headway.core import attention
from headway.linalg.projected import Rows


def second(found: Sample, left: Tensor, right: Tensor, least: float, ball: float) -> float:
    """‖J(θ) − J(θ')‖/‖θ − θ'‖ at most, while W is off by at most ``ball`` in ‖ω‖; L = ``left`` (r, r), R_i =
    ``right`` (m, d, d), g = ``least``."""
    total = 0.0
    for rows in found.problem.chunks:
        xi = (attention.queries(rows.X, found.layer.augmented) @ left).norm(dim=2)  # (n, k)
        X = _centred(rows)
        plain = _reach(rows, X.norm(dim=2), found.layer.mask)
        far, wide = (reaches(found, rows, parts) for parts in (right, found.layer.W))
        wide = wide + (ball / math.sqrt(least)) * plain.unsqueeze(2)
        alpha = (2 * wide * (xi.unsqueeze(2) * far).square()).amax(2)
        beta = plain * xi * far.amax(2) / math.sqrt(least)
        each = (alpha + (alpha.square() + 4 * beta.square()).sqrt()) / 2
        total += float((each if rows.valid is None else each * rows.valid.squeeze(2)).square().sum())
    return math.sqrt(total)


def second_thin(found: Sample, operator: ThinScaled, least: float, ball: float) -> float:
    """The same in the coordinates of thin.py, (Z, Y, K) and ω with ‖d[O; c]‖ ≤ ‖ω‖/√g, on a ball around 0.

    Θ' and W' are products of two factors, so their second derivatives are constant. With σ and s the least values
    of the scaled heads, ξ = |L_ix̃|, and ρ, ϱ, τ the largest |R_i(x_b − x̄)|, |W_iᵀ(x_b − x̄)|, |E_i(x_b − x̄)|,
    τ' that of |E_ix_b|, scores and rows of W_i'ᵀx change on a ball of radius b by

        dS ≤ (1 + b/σ)ξρ‖t‖,   d²S ≤ ξρ‖t‖‖t'‖/σ,   dW ≤ τ((1 + b/(s√g))‖K‖ + (1 + b/s)‖ω‖/√g),
        d²W ≤ τ(‖K‖‖ω'‖ + ‖K'‖‖ω‖)/(s√g),           W' ≤ ϱ + τ(b + b/√g + b²/(s√g)),

    with τ' for τ in d²W, which meets a mean of tokens and no difference. Hence a row's form of (‖t‖, ‖K‖, ‖ω‖):

        α = 2W'(dS)² + W'·d²S,   β = dW_K·dS,   γ = dW_ω·dS,   δ = d²W,      of norm (α + √(α² + 4β² + 4γ²))/2 + δ.
    """
    root, s = math.sqrt(least), operator.narrowest
    steep = 1 + ball / operator.thinnest
    total = 0.0
    for rows in found.problem.chunks:
        asking = attention.queries(rows.X, operator.base.A)
        xi = torch.stack([(asking @ part).norm(dim=2) for part in operator.L.down], dim=2)
        score = xi * reaches(found, rows, operator.R.down)
        tau, wide = (reaches(found, rows, parts) for parts in (operator.E.down, found.layer.W))
        whole = torch.stack([_reach(rows, (rows.X @ part).norm(dim=2), found.layer.mask)
                             for part in operator.E.down], dim=2)
        wide = wide + tau * (ball + ball / root + ball**2 / (s * root))
        alpha = (2 * wide * (steep * score).square() + wide * score / operator.thinnest).amax(2)
        beta = (tau * steep * score).amax(2)
        pair = beta.square() * ((1 + ball / (s * root)) ** 2 + ((1 + ball / s) / root) ** 2)
        each = (alpha + (alpha.square() + 4 * pair).sqrt()) / 2 + whole.amax(2) / (s * root)
        total += float((each if rows.valid is None else each * rows.valid.squeeze(2)).square().sum())
    return math.sqrt(total)


def _centred(rows: Rows) -> Tensor:
    """Tokens less the mean of their sequence, 0 where they are filling."""
    if rows.valid is None:
        return rows.X - rows.X.mean(1, keepdim=True)
    valid = (rows.valid > 0).to(rows.X)
    mean = (rows.X * valid).sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp_min(1.0)
    return (rows.X - mean) * valid


def _reach(rows: Rows, sizes: Tensor, mask: str) -> Tensor:
    """The largest of these (n, k) over the keys in sight of every query."""
    if mask == "causal":
        return torch.cummax(sizes, dim=1).values
    return sizes.amax(1, keepdim=True).expand_as(sizes)


def reaches(found: Sample, rows: Rows, parts: Tensor) -> Tensor:
    """The largest |A_iᵀ(x_b − x̄)| over the keys in sight of every query, (n, k, m), for A_i = ``parts`` (m, d,
    ·)."""
    X = _centred(rows)
    return torch.stack([_reach(rows, (X @ part).norm(dim=2), found.layer.mask) for part in parts], dim=2)
