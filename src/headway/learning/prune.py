"""Fewer heads, and smaller ones: what of a fit may go, and what that costs.

A fit with more heads than needed ends with empty heads, with heads that share a pattern and divide its W between
them, and with factors of more columns than the heads have rank. At a point with residual sum of squares ρ:

* without head i, the others' O and c solved again, ρ grows by tr(O_iᵀ[(G⁻¹)_ii]⁻¹O_i), G the features' Gram matrix;
* head i with the pattern of head j grows ρ by about tr(S δ M_i δᵀ), δ = Θ_i − Θ_j (S, M of ThinProducts.moments),
  and the two are then one head with W_i + W_j;
* columns of Θ_i and W_i that carry singular values σ in that metric cost about Σσ².

Nothing is taken away by a threshold on its size alone: it goes if it costs little of what is left anyway, or if a
short refinement without it gives the loss back (refine.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.learning.thin import ThinModel
from headway.linalg.projected import cholesky
from headway.linalg.thin import Thin, ThinPoint

TRIED = 6  # ways to join two heads (either pattern may be the one that stays) of which the loss is computed
Moments = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Cut:
    """A smaller fit, and by how much the loss is expected to grow."""

    shape: Thin
    cost: float
    what: str


def without_cost(point: Any, heads: int) -> Tensor:
    """By how much ρ grows without each head, the others solved again."""
    inverse = torch.cholesky_inverse(point.factor.double())
    p = len(point.out) // heads
    out = point.out.double().view(heads, p, -1)
    blocks = torch.stack([inverse[i * p : (i + 1) * p, i * p : (i + 1) * p] for i in range(heads)])
    cost: Tensor = (out * torch.linalg.solve(blocks, out)).sum((1, 2))
    return cost


def merge_cost(shape: Thin, moments: Moments) -> Tensor:
    """(m, m): by how much ρ grows, to first order, if one of heads i and j takes the pattern of the other."""
    S, M, _ = (part.double() for part in moments)
    A, B = shape.A.double(), shape.B.double()
    m = len(A)
    cost = A.new_zeros(m, m)
    for i in range(m):
        MB = M[i] @ B  # (m, d, q)
        SA = S[i] @ A
        other = ((A.mT @ SA) * (B.mT @ MB)).sum((1, 2))
        cross = ((A[i].mT @ SA) * (B[i].mT @ MB)).sum((1, 2))
        cost[i] = other[i] + other - 2 * cross
    # A saturated head answers to no small change, but a change of its whole pattern is not small: the larger.
    return torch.maximum(cost, cost.mT).clamp_min(0.0).fill_diagonal_(float("inf"))


def singular_values(shape: Thin, point: ThinPoint, moments: Moments) -> tuple[Tensor, Tensor]:
    """Of every Θ_i and W_i in the metric in which they cost: (m, q) and (m, p)."""
    S, M, T = (root_of(part.double()) for part in moments)
    A, B, V = shape.A.double(), shape.B.double(), shape.V.double()
    core = torch.linalg.qr(S @ A)[1] @ torch.linalg.qr(M @ B)[1].mT
    out = torch.linalg.qr(T @ V)[1] @ point.out.double().view(len(V), V.shape[2], -1)
    return torch.linalg.svdvals(core), torch.linalg.svdvals(torch.linalg.qr(out.mT)[1])


def root_of(G: Tensor) -> Tensor:
    """R, upper triangular, with RᵀR = G: the least ridge lets it be inverted, so directions that cost nothing stay
    where they are. (On a GPU a hundred times faster than by eigenvalues.)"""
    return cholesky(G).mT


def leading(V: Tensor, O: Tensor, p: int) -> Tensor:  # noqa: E741 - the paper's letter
    """The p leading left singular vectors of VO, V (…, d, s) and O (…, s, e) thin."""
    Q, R = torch.linalg.qr(V)
    C = torch.linalg.qr((R @ O).mT)[1].mT
    found: Tensor = Q @ torch.linalg.svd(C)[0][..., :p]
    return found


def columns_needed(values: Tensor, allowed: float) -> int:
    """The fewest columns, the same number for all heads, whose neighbours cost at most ``allowed`` together."""
    beyond = values.square().sum(0).flip(0).cumsum(0).flip(0)
    return max(1, int((beyond > allowed).sum()))


def step_down(values: Tensor) -> int:
    """The columns after which the heads' singular values step down most; all of them if by less than two."""
    sizes = values.square().mean(0).sqrt()
    ratios = sizes[:-1] / sizes[1:].clamp_min(1e-300)
    if not len(ratios) or float(ratios.max()) < 2.0:
        return len(sizes)
    return int(ratios.argmax()) + 1


def narrowed(shape: Thin, point: ThinPoint, moments: Moments, q: int, p: int) -> Thin:
    """The best approximation with q and p columns, in the metric in which they cost."""
    S, M, T = (root_of(part.double()) for part in moments)
    A, B = truncated(shape.A.double(), shape.B.double(), S, M, q)
    V = shape.V.double()
    U = leading(T @ V, point.out.double().view(len(V), V.shape[2], -1), p)
    return Thin.joined(A, B, solved(T, U)).to(shape.value.dtype)


def truncated(A: Tensor, B: Tensor, left: Tensor, right: Tensor, q: int) -> tuple[Tensor, Tensor]:
    """ABᵀ with q columns, nearest under ‖left · rightᵀ‖."""
    U, R = torch.linalg.qr(left @ A)
    V, K = torch.linalg.qr(right @ B)
    u, s, vh = torch.linalg.svd(R @ K.mT)
    root = s[:, :q].sqrt().unsqueeze(1)
    return solved(left, U @ (u[:, :, :q] * root)), solved(right, V @ (vh[:, :q].mT * root))


def solved(R: Tensor, Z: Tensor) -> Tensor:
    """R⁻¹Z for upper triangular R."""
    found: Tensor = torch.linalg.solve_triangular(R, Z, upper=True)
    return found


def merged(shape: Thin, point: ThinPoint, i: int, j: int) -> Thin:
    """Head i joins head j: its pattern is that of j, their W are added."""
    m, _, p = shape.V.shape
    V, out = shape.V.double().clone(), point.out.double().view(m, p, -1)
    V[j] = leading(torch.cat([V[i], V[j]], dim=1), torch.cat([out[i], out[j]]), p)
    keep = _but(m, i)
    return Thin.joined(shape.A.double()[keep], shape.B.double()[keep], V[keep]).to(shape.value.dtype)


def heads_kept(shape: Thin, keep: list[int]) -> Thin:
    return Thin(shape.value[keep], shape.width, shape.rows, shape.q)


def free_cuts(model: ThinModel, shape: Thin, point: ThinPoint, allowed: float) -> tuple[Thin, ThinPoint]:
    """Without the heads that cost at most ``allowed`` together, the cheapest first."""
    spent = 0.0
    while len(shape.value) > 1:
        costs = without_cost(point, len(shape.value))
        i = int(costs.argmin())
        spent += float(costs[i])
        if spent > allowed:
            break
        shape = heads_kept(shape, _but(len(shape.value), i))
        point = model.evaluate(shape)
    return shape, point


def cheapest(
    model: ThinModel, shape: Thin, point: ThinPoint, moments: Moments
) -> tuple[Cut, ThinPoint, Moments] | None:
    """The one head fewer that costs least, O and c solved again: left out, or joined with another. The estimates
    say which few to look at. Also what is left of the moments, near enough for estimates: of two heads with about
    one pattern, M of the sum of their W_i is about the sum of theirs."""
    m = len(shape.value)
    if m < 2:
        return None
    drop, join = without_cost(point, m), merge_cost(shape, moments)
    i = int(drop.argmin())
    tried = [("a head less", heads_kept(shape, _but(m, i)), i, i)]
    for flat in join.flatten().argsort()[:TRIED].tolist():
        if float(join.flatten()[flat]) < 2 * float(drop[i]):
            tried.append(("two heads joined", merged(shape, point, flat // m, flat % m), flat // m, flat % m))
    points = [model.evaluate(smaller) for _, smaller, _, _ in tried]
    best = min(range(len(tried)), key=lambda j: points[j].loss)
    what, smaller, gone, stays = tried[best]
    S, M, T = moments
    if gone != stays:
        M = M.clone()
        M[stays] += M[gone]
    keep = _but(m, gone)
    return (Cut(smaller, max(points[best].loss - point.loss, 0.0), what), points[best],
            (S[keep], M[keep], T[keep]))


def _but(m: int, i: int) -> list[int]:
    """All heads but one."""
    return [h for h in range(m) if h != i]


def folds(model: ThinModel, shape: Thin, point: ThinPoint, moments: Moments, allowed: float) -> list[Cut]:
    """One head fewer, two fewer, …, each time the cheapest, while the loss is at most ``allowed``; the first in any
    case. Copies go this way, all at once. The moments are those of ``shape``; formed again after every head they
    would cost more than all else together (of a wide layer), to choose among the same few."""
    found: list[Cut] = []
    begun = point.loss
    while True:
        step = cheapest(model, shape, point, moments)
        if step is None:
            return found
        cut, point, moments = step
        shape = cut.shape
        if not found or point.loss <= allowed:
            what = cut.what if not found else f"{len(found) + 1} heads fewer"
            found.append(Cut(shape, max(point.loss - begun, 0.0), what))
        if point.loss > allowed:
            return found
