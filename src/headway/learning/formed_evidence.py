"""Does what a layer of any form leaves depend on the inputs? The exact test of evidence.py, with features that all
forms have: tokens, places, keys near by and keys out of sight, and how each head would answer if its scores were
sharper, not all that the softmax is over, or depended on the distance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from headway.core.tangents import Chain
from headway.learning import evidence
from headway.learning.formed import Formed, FormRows, chain_of
from headway.learning.formed_refine import FormCandidate
from headway.learning.formed_source import FormSource
from headway.learning.source import spaced
from headway.linalg.projected import Rows
from headway.linalg.thin import features

Pairs = tuple[Tensor, Tensor | None, Tensor]  # queries' tokens, those of keys if others, (n, m, k, l)

NEAR = 2  # places from the own one at which keys are looked at one by one


def depends(
    source: FormSource, best: FormCandidate, generator: torch.Generator, pulse: Callable[[], None] = lambda: None
) -> bool:
    """Whether what ``best`` leaves does: wrong once in a hundred times if it is noise, of any size."""
    every, k = source.parts.different, source.examples.length
    most = max(32, evidence.ROWS.get(source.device.type, evidence.ROWS["cpu"]) // k)
    index = spaced(every, min(len(every), best.sequences or len(every), most))
    halves = [_probed(source, best, half, pulse) for half in (index[::2], index[1::2])]
    ways = []
    for (one, near), (other, far) in (halves, halves[::-1]):
        parts = {name: evidence.by_rule(one[name], other[name], lambda part: part.X) for name in one}
        ways.append(evidence.parts_of({**parts, **_by_scores(near, far)}, generator))
    return evidence.dependent({name: min(1.0, 2 * min(way[name] for way in ways)) for name in ways[0]})


def _probed(
    source: FormSource, best: FormCandidate, index: np.ndarray, pulse: Callable[[], None]
) -> tuple[dict[str, list[Rows]], list[Pairs]]:
    """For every probe its features in place of the tokens, and what is left in place of the labels; and tokens with
    what the scores of their pairs are worth to what is left."""
    shape = Formed.of({name: value.double() for name, value in best.tensors.items()
                       if name not in ("out", "offset")}, source.form)
    out, offset = (best.tensors[name].double() for name in ("out", "offset"))
    found: dict[str, list[Rows]] = {}
    pairs: list[Pairs] = []
    for rows in source.stream(index, shape.heads, torch.float64):
        pulse()
        assert isinstance(rows, FormRows)
        chain = chain_of(rows, shape)
        left = rows.Y - (features(rows, chain.H, False) @ out.flatten(0, 1)).view_as(rows.Y)
        left = left - (offset if rows.valid is None else rows.valid * offset)
        for name, F in _features(rows, chain):
            found.setdefault(name, []).append(Rows(F, left, None, rows.valid))
        worth = left.unsqueeze(1) @ out.mT
        worth = chain.of_scores(worth if chain.gate is None else worth * chain.gate)[0]
        pairs.append((rows.X, rows.Z, worth))
    return found, pairs


def _by_scores(first: list[Pairs], second: list[Pairs]) -> dict[str, Tensor]:
    """c_s of the second half for scores to which w(b − a) x̃_aᵀT_i z̃_b is added, w = 1 or a cosine or sine, with T_i
    the gradient of the first half (evidence.py)."""
    k, keys = first[0][2].shape[2:]
    ways = {"scores": torch.ones(1, k, keys, dtype=torch.float64)}
    if first[0][1] is None:
        ways["distance"] = evidence.turned(k)
    found: dict[str, Tensor] = {}
    for name, weights in ways.items():
        total: list[Tensor] = []
        for way in weights:
            T = sum(torch.einsum("nap,nmab,nbq->mpq", X, worth * way.to(worth), X if Z is None else Z)
                    for X, Z, worth in first)
            total.append(torch.cat([torch.einsum("nap,mpq,nbq,nmab->n", X, T, X if Z is None else Z,
                                                 worth * way.to(worth)) for X, Z, worth in second]))
        found[name] = torch.stack(total).sum(0).cpu()
    return found


def _features(rows: FormRows, chain: Chain) -> Iterator[tuple[str, Tensor]]:
    X, Z = rows.X[..., :-1], rows.keys[..., :-1]
    n, k = len(X), X.shape[1]
    see = torch.ones(1, k, Z.shape[1], dtype=torch.bool, device=X.device) if rows.see is None else rows.see
    mean = _mean(see, Z)
    H = chain.H.transpose(1, 2).flatten(2)
    yield "token", torch.cat([X, mean], dim=2)
    bins = torch.arange(k, device=X.device) * min(k, 64) // k
    yield "position", torch.nn.functional.one_hot(bins).to(X).expand(n, -1, -1)
    norm = X.square().mean(2, keepdim=True)
    yield "size", torch.cat([norm, norm * X, _mean(see, Z.square().mean(2, keepdim=True))], dim=2)
    every = torch.cat([X, mean, H], dim=2)
    shift = math.sqrt(evidence.CURVED) * _drawn(evidence.CURVED, 1)[:, 0].to(X)
    yield "curved", torch.relu(every @ _drawn(every.shape[2], evidence.CURVED).to(X) + shift)
    S = chain.P.clamp_min(torch.finfo(X.dtype).tiny).log()  # scores, apart from a number for each row
    middle = (chain.P * S).sum(3, keepdim=True)
    yield "sharpness", _fewer(_answers(chain, [S, (S - middle).square()]))
    loud = (chain.q_turned @ chain.k_turned.mT).masked_fill(~see.unsqueeze(1), -math.inf).logsumexp(3, keepdim=True)
    yield "loudness", (chain.H * torch.sigmoid(loud.mean((0, 2), keepdim=True) - loud)).transpose(1, 2).flatten(2)
    if rows.Z is not None:
        return
    real = X if rows.valid is None else X * rows.valid
    there = torch.ones(1, 1, k, dtype=torch.bool, device=X.device)
    there = there if rows.valid is None else (rows.valid > 0).mT
    yield "out of sight", _mean(~see & there, real)
    yield "near", torch.cat([_moved(real, far) for far in range(-NEAR, NEAR + 1) if far], dim=2)
    yield "offsets", _fewer(_answers(chain, list(evidence.turned(k).to(X))))


def _mean(see: Tensor, Z: Tensor) -> Tensor:
    """Of the keys that are seen; 0 where there are none."""
    weight = see.to(Z)
    return (weight / weight.sum(2, keepdim=True).clamp_min(1)) @ Z


def _moved(X: Tensor, far: int) -> Tensor:
    """Row a + far in place of row a, zeros beyond the ends."""
    k = X.shape[1]
    moved = torch.zeros_like(X)
    if abs(far) < k:
        moved[:, max(0, -far) : min(k, k - far)] = X[:, max(0, far) : min(k, k + far)]
    return moved


def _answers(chain: Chain, changes: list[Tensor]) -> Tensor:
    """What each head hands on for a change of its scores, to first order, for one change after the other."""
    parts = []
    for dS in changes:
        handed = (chain.P * (dS - (chain.P * dS).sum(3, keepdim=True))) @ chain.V
        parts.append(handed if chain.gate is None else handed * chain.gate)
    return torch.cat(parts, dim=3).transpose(1, 2).flatten(2)


def _fewer(F: Tensor) -> Tensor:
    """Random combinations, where there are too many."""
    return F if F.shape[2] <= evidence.SHARP else F @ _drawn(F.shape[2], evidence.SHARP).to(F)


def _drawn(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) / math.sqrt(rows)
