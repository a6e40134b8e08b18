"""The Jacobian of F in the parameters (Θ, u, W, c) on a set of examples: dense where small, by products otherwise.

One row a of an example has ∂y/∂[Θ_i; u_i] = x̃_a ⊗ C_iW_i, ∂y/∂W_i = h_i ⊗ I, ∂y/∂c = I. The parameters are those
the layer has: without a key bias or an offset there is no column for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from headway.core import attention
from headway.core.convert import ranks_of
from headway.core.counting import Size
from headway.core.examples import Examples
from headway.core.layer import AttentionLayer
from headway.linalg.projected import Problem, Rows, features_of

CHUNK = 1 << 24  # numbers in one piece of a dense Jacobian
# Times what counting asks for; the second of heads whose projections have low rank too: their floor is lower, and a
# peaked pattern speaks of few of a row's keys, so that counting promises more than there is.
PLENTY = 5, 20


@dataclass(frozen=True)
class Sample:
    """The examples the Jacobian is taken on, and what they can determine at most."""

    problem: Problem
    layer: AttentionLayer
    sequences: int
    equations: int  # what the labels can say: min of e and the pattern's freedom about Θ, summed over rows
    about_theta: int
    unknowns: int
    theta_unknowns: int
    ranks: tuple[int, ...] | None  # each attention matrix's, where the claim is about layers of these ranks
    out_ranks: tuple[int, ...] | None = None  # each projection's, alike; only beside ``ranks``

    @cached_property
    def normal(self) -> tuple[Tensor, Tensor]:
        """JᵀJ and Jᵀr, formed once for all the claims that look at them."""
        return gram(self)


def parameters(layer: AttentionLayer) -> int:
    """Columns of the dense Jacobian."""
    return layer.augmented.numel() + layer.W.numel() + (0 if layer.offset is None else layer.out_width)


def low_ranks(layer: AttentionLayer) -> tuple[int, ...] | None:
    """The rank of every [Θ_i; u_i], if none exceeds half the width. Each its own: below the highest rank allowed
    the matrices of one rank at most have no tangent space."""
    s = torch.linalg.svdvals(layer.augmented.double())
    found = tuple(ranks_of(s).tolist())
    return found if 0 < max(found) <= layer.width // 2 else None


def low_out_ranks(layer: AttentionLayer) -> tuple[int, ...] | None:
    """The same of every W_i."""
    found = tuple(ranks_of(torch.linalg.svdvals(layer.W.double())).tolist())
    return found if 0 < min(found) and max(found) <= min(layer.width, layer.out_width) // 2 else None


def sample(
    layer: AttentionLayer, examples: Examples, sequences: int | None, dtype: torch.dtype,
    ranks: tuple[int, ...] | None = None, out_ranks: tuple[int, ...] | None = None,
) -> Sample:
    """Sequences spread evenly over the examples: by default ``PLENTY`` times what counting asks for."""
    out_ranks = None if ranks is None else out_ranks
    size = Size(layer.width, layer.out_width, examples.length, layer.mask,
                None if ranks is None else max(ranks), None if out_ranks is None else max(out_ranks))
    m = layer.heads
    want = PLENTY[out_ranks is not None] * size.floor(m) if sequences is None else sequences
    count = max(1, min(want, len(examples)))
    index = ((np.arange(count) + 0.5) * len(examples) / count).astype(np.int64)
    chunks = []
    step = max(1, CHUNK // max(1, 4 * examples.length * m * max(layer.width, examples.length)))
    for start in range(0, count, step):
        part = examples.take(index[start : start + step])
        X, Y = part.X.to(dtype), part.Y.to(dtype)
        see = attention.allowed(X, layer.mask, part.padding)
        if part.padding is None:
            chunks.append(Rows(X, Y, see))
        else:
            valid = (~part.padding).unsqueeze(2).to(dtype)
            chunks.append(Rows(X, Y * valid, see, valid))
    keys = range(1, examples.length + 1) if layer.mask == "causal" else [examples.length] * examples.length
    about = count * sum(min(layer.out_width, m * (seen - 1)) for seen in keys)
    whole, (_, r, d) = layer.augmented.numel(), layer.augmented.shape
    theta = whole if ranks is None else sum(q * (r + d - q) for q in ranks)
    unknowns = parameters(layer) - whole + theta
    if out_ranks is not None:
        unknowns -= layer.W.numel() - sum(p * (d + layer.out_width - p) for p in out_ranks)
    return Sample(Problem(tuple(chunks), layer.offset is not None), layer.to(dtype), count,
                  count * examples.length * layer.out_width, about, unknowns, theta, ranks, out_ranks)


def residuals(found: Sample) -> list[Tensor]:
    """F(X) − Y row by row, (rows, e) for every chunk; zero on filling."""
    layer = found.layer
    left = []
    for rows in found.problem.chunks:
        R = attention.forward(rows.X, layer.augmented, layer.W, layer.offset, rows.see) - rows.Y
        left.append((R if rows.valid is None else R * rows.valid).flatten(0, 1))
    return left


def dense_blocks(found: Sample, visit: Callable[[Tensor, Tensor, slice], None]) -> None:
    """Calls ``visit(J, r, rows)`` for pieces of the dense Jacobian, (rows·e, p), with their residuals."""
    layer, left = found.layer, residuals(found)
    e, done = layer.out_width, 0
    for rows, R in zip(found.problem.chunks, left, strict=True):
        P, H = features_of(rows, layer.augmented, found.problem.offset)
        n, k, m, _ = P.shape
        d = layer.width
        queries = attention.queries(rows.X, layer.augmented).reshape(n * k, -1)
        # C_iW_i one output at a time: column o of W_i is what every row sends to the key side.
        sides = torch.stack([
            attention.key_side(P, rows.X, layer.W[:, :, o].expand(n, k, m, d)).reshape(n * k, m, d)
            for o in range(e)], dim=1)  # (rows, e, m, d)
        if rows.valid is not None:
            sides = sides * rows.valid.reshape(n * k, 1, 1, 1)
        step = max(1, CHUNK // (e * found.unknowns))
        for start in range(0, n * k, step):
            at = slice(start, min(start + step, n * k))
            count = at.stop - at.start
            first = torch.einsum("ap,aomq->aompq", queries[at], sides[at]).reshape(count, e, -1)
            second = torch.einsum("af,og->aofg", H[at], torch.eye(e, dtype=H.dtype, device=H.device))
            J = torch.cat([first, second.reshape(count, e, -1)], dim=2).reshape(count * e, -1)
            visit(J, R[at].reshape(-1), slice((done + at.start) * e, (done + at.stop) * e))
        done += n * k


def gram(found: Sample) -> tuple[Tensor, Tensor]:
    """JᵀJ (p, p) and Jᵀr (p,) in the order Θ̃, W (and c), r = F − Y."""
    p = found.unknowns
    N = torch.zeros(p, p, dtype=torch.float64, device=found.layer.W.device)
    g = torch.zeros(p, dtype=torch.float64, device=N.device)

    def add(J: Tensor, r: Tensor, _: slice) -> None:
        nonlocal N, g
        N += J.T @ J
        g += J.T @ r

    dense_blocks(found, add)
    return N, g
