"""Heads whose patterns are all but 0 and 1: which ones, rows weighted for their sake, and their part of a solve.

With the scores of head i a row moves by about c_i = Σ_b p_b²‖W_iᵀ(x_b − h)‖². Where a head is saturated that
differs by ten orders of magnitude from row to row, and with it which directions of queries and keys a row tells: no
product S_i ⊗ M_i of two means is near the curvature, and conjugate gradients preconditioned by one take hundreds of
products. So the curvature of such a head in A_i, and in B_i, is formed. With a random ω for each row and g = ωOᵀ,

    Σ_a (x̃_a ⊗ K_iᵀs_a)(x̃_a ⊗ K_iᵀs_a)ᵀ   and   Σ_a (Xᵀs_a ⊗ q_a)(Xᵀs_a ⊗ q_a)ᵀ,     s_a = dP_a(g_aZ_iᵀ),

have them as their means over ω: (d·q)² entries each, from 4·d·q rows or more. That costs about as much as d·q/10
products, so it is done for these heads alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headway.core import attention
from headway.core.devices import normal
from headway.learning.shapes import Metric, inverse
from headway.linalg.krylov import Linear
from headway.linalg.projected import Problem

SATURATED = 0.1  # part of the heads' median answer to a change of scores below which one is saturated
SEEN = 4  # times the unknowns of a block: rows from which it is formed
NARROW = 4096  # unknowns of a block up to which it is formed in the precision of the products; else in float32
WIDEST = 16_384  # unknowns of a block that is formed, at most: 1 GiB in float32
LIFT = 1e-5  # of the diagonal of a block, added so that it can be inverted
Heads = tuple[Tensor, Tensor, Tensor, Tensor]  # Q, K, Z, P of a chunk


def saturated(W: Tensor, M: Tensor, T: Tensor) -> list[int]:
    """Heads whose output hardly answers to a change of their scores; M and T as in thin.ThinProducts.moments."""
    share = (W * (T @ W)).sum((1, 2))  # of the output
    moved = M.diagonal(dim1=1, dim2=2).sum(1) / share.clamp_min(1e-30)
    found: list[int] = torch.nonzero(moved < SATURATED * moved.median()).flatten().tolist()
    return found


@dataclass(frozen=True)
class Held:
    """Of one head: its curvature with what holds it back, in A_i and in B_i, and the inverses."""

    head: int
    sides: tuple[Tensor, Tensor]
    back: tuple[Tensor, Tensor]


def exactly(near: Metric, heads: list[Held]) -> Metric:
    """``near``, but for these heads."""
    if not heads:
        return near

    def by(all_heads: Linear, sides: list[tuple[Tensor, Tensor]]) -> Linear:
        def made(v: Tensor) -> Tensor:
            x = all_heads(v)
            for one, (DA, DB) in zip(heads, sides, strict=True):
                first, second = len(DA), len(DA) + len(DB)
                part = v[one.head].to(DA)
                x[one.head, :first] = (DA @ part[:first]).to(x)
                x[one.head, first:second] = (DB @ part[first:second]).to(x)
            return x

        return made

    return Metric(by(near.apply, [one.sides for one in heads]), by(near.solve, [one.back for one in heads]))


@dataclass(frozen=True)
class Blocks:
    """The curvature of one head in A_i and in B_i, each with the other left as it is."""

    head: int
    A: Tensor  # (r·q, r·q)
    B: Tensor  # (d·q, d·q)

    def held(self, A: Tensor, B: Tensor, alike: Tensor, K: Tensor) -> Held:
        """With what a step costs beside: alike ⊗ BᵀKB is added for A and K ⊗ Aᵀ(alike)A for B."""
        DA, DB = (_raised(D + torch.kron(a.to(D), b.to(D))) for D, a, b in (
            (self.A, alike, B.mT @ K @ B), (self.B, K, A.mT @ alike @ A)))
        return Held(self.head, (DA, DB), (inverse(DA), inverse(DB)))


def _raised(D: Tensor) -> Tensor:
    """D, its diagonal a little larger, so that it can be inverted."""
    return D + torch.diag(LIFT * D.diagonal().clamp_min(torch.finfo(D.dtype).tiny * 1e6))


def blocks_of(
    head: int, problem: Problem, kept: list[tuple[Heads, Tensor]], A: Tensor, out: Tensor,
    generator: torch.Generator,
) -> Blocks | None:
    """Formed from rows of all chunks; None where the head is too wide for that."""
    r, q = A.shape
    d = problem.chunks[0].X.shape[2]
    if r * q > WIDEST:
        return None
    dtype = A.dtype if r * q <= NARROW else torch.float32
    wanted = SEEN * r * q
    times, every = math.ceil(wanted / problem.rows), max(1, int(problem.rows // wanted))
    GA, GB = (torch.zeros(n * q, n * q, dtype=dtype, device=A.device) for n in (r, d))
    generator = problem.ranks.own(generator)
    for rows, ((Q, K, Z, P), _) in zip(problem.chunks, kept, strict=True):
        X = rows.X[::every]
        asked = attention.queries(X, A.unsqueeze(0))
        Q, K, Z, P = (part[::every, head] for part in (Q, K, Z, P))
        for _ in range(times):
            omega = normal(rows.Y[::every], generator)
            if rows.valid is not None:
                omega = omega * rows.valid[::every]
            s = attention.softmax_rule(P.unsqueeze(1), (omega @ out.mT @ Z.mT).unsqueeze(1)).squeeze(1)
            for G, pair in ((GA, _pairs(asked, s @ K)), (GB, _pairs(s @ X, Q))):
                pair = pair.to(dtype)
                G.addmm_(pair.T, pair)
    GA, GB = problem.ranks.totals(GA, GB)
    return Blocks(head, GA * (every / times), GB * (every / times))


def _pairs(x: Tensor, y: Tensor) -> Tensor:
    """x_a ⊗ y_a for every row."""
    return (x.unsqueeze(3) * y.unsqueeze(2)).flatten(2).flatten(0, 1)


def balanced(problem: Problem, V: Tensor, point: Any) -> Problem:
    """The same rows, those weighted up that say little about the head they say least of.

    Labels of a layer are met by its heads whatever the weights, so these may be chosen for the solve. With the
    scores of head i a row moves by c_i = Σ_b p_b²‖W_iᵀ(x_b − h)‖², which for a saturated head differs by ten orders
    of magnitude from row to row: conjugate gradients then hear the loudest rows alone. The weight of a row is
    1/(min_i c_i + ‖r‖²), r what is left of it (at least its rounding): a row that is not met yet is not made
    louder. Near the end, where next to nothing is left, that makes other heads badly conditioned: whoever uses it
    looks whether it helps (refine.py).
    """
    m, _, p = V.shape
    out = point.out.view(m, p, -1)
    K = out @ out.mT
    weights = []
    for rows, ((_, _, Z, P), _), r in zip(problem.chunks, point.kept, point.residuals, strict=True):
        h, ZK = P @ Z, Z @ K
        apart = (ZK * Z).sum(3).unsqueeze(2) - 2 * h @ ZK.mT + ((h @ K) * h).sum(3, keepdim=True)
        says = (P.square() * apart.clamp_min(0)).sum(3).amin(1).unsqueeze(2)
        rounding = torch.finfo(r.dtype).eps * rows.Y.norm(dim=2, keepdim=True)
        says = says + r.view_as(rows.Y).square().sum(2, keepdim=True) + rounding.square()
        weight = says.clamp_min(torch.finfo(says.dtype).tiny * 1e6).reciprocal()
        weights.append(weight if rows.valid is None else weight * (rows.valid > 0))
    mean = problem.ranks.total(sum(float(weight.sum()) for weight in weights)) / problem.rows
    chunks = []
    for rows, weight in zip(problem.chunks, weights, strict=True):
        root = (weight / mean).sqrt()
        chunks.append(replace(rows, Y=rows.Y * root, valid=root))
    return replace(problem, chunks=tuple(chunks))


