"""What the labels of examples say about the form of their layer before anything is fitted.

Values pass through a layer linearly: the best linear rule Y_a ≈ Σ_b C_abᵀx_b + c has C_ab = E P(a, b) · W and
more, and none where b is out of sight of a. So the blocks C_ab show what a query sees; and where tokens are drawn
alike at all places and keys have no places, the C_ab of one query, b ≠ a, are equal.

Both are asked by one least-squares solution: ratios of squares of its coefficients to their variances, 1 where
nothing is seen. They can be small for other reasons (slopes that hardly reach so far, too few examples), so what is
not seen is where to begin, and descents decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.core.examples import Examples
from headway.core.forms import Sight
from headway.learning.source import spaced

POSSIBLE = frozenset({"rotary", "offsets", "sink", "normed", "cap", "gate"})
REGRESSED = 4096  # regressors at most: tokens times features
MET = 3.0  # rows for each regressor that are enough
LOOKED = 16_384  # sequences at most
EXACT = 1e-10  # part of the labels' variance that counts as left at least: rounding is no effect
SEEN = 1.5  # ratio of squares from which a key counts as seen
CLEARLY = 3.0  # ratio above which more does not say more
APART = 1.8  # ratio of squares from which offsets are looked for first


@dataclass(frozen=True)
class Clues:
    """What may be part of the form, what must, and in what order sights are tried; ``words`` say why."""

    sights: tuple[Sight, ...]
    may: frozenset[str] = POSSIBLE
    must: frozenset[str] = frozenset()
    placed: bool = False  # whether one of the parts that know places must be there
    offsets: bool = False  # whether keys have another mean effect at other places
    words: tuple[str, ...] = ()
    asked: int = 0


def clues_of(examples: Examples) -> Clues:
    """What plain examples show."""
    told = examples.mask == "causal"
    plain = (Sight(causal=True),) if told else (Sight(), Sight(causal=True))
    effects = _effects(examples)
    if effects is None:
        return Clues(plain if examples.key_width is None else plain[:1])
    ratios = effects[0]
    best = sight_of((ratios.clamp_max(CLEARLY) - SEEN) / (CLEARLY - SEEN), told)
    also = tuple(one for one in plain if one != best and (one.causal or not best.causal))
    words = (f"the mean effects of keys on queries are those of a layer that is {best.describe()}"
             if best.describe() else "all keys have an effect on all queries")
    return Clues((best, *also), words=(words,), offsets=_different(*effects[1:], _mask(best, len(ratios))) > APART)


def _effects(examples: Examples) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Ratios (k, k) for what query a has of key b; the C_ab as (b, d, a, e) and their variances, as a product of
    one for key and feature and one for query and label."""
    k, d = examples.length, examples.width
    n = min(len(examples), LOOKED)
    if examples.key_width is not None or k < 2 or k * d > REGRESSED or n < MET * (k * d + 1):
        return None
    part = examples.take(spaced(np.arange(len(examples)), n))
    if part.padding is not None:
        return None
    X, Y = part.X.double().flatten(1), part.Y.double()
    X, Y = X - X.mean(0), (Y - Y.mean(0)).flatten(1)
    values, vectors = torch.linalg.eigh(X.mT @ X)
    keep = values > 1e-10 * values[-1]
    inverse = (vectors[:, keep] / values[keep]) @ vectors[:, keep].mT
    C = inverse @ (X.mT @ Y)
    noise = (Y - X @ C).square().sum(0) / (n - int(keep.sum()) - 1)
    noise = noise.clamp_min(EXACT * float(Y.square().mean()))
    each = inverse.diagonal().clamp_min(1e-300)
    if not bool(keep.all()) or not bool((noise > 0).all()):
        return None
    ratios = (C.square() / (each.unsqueeze(1) * noise)).view(k, d, k, -1).mean((1, 3)).mT
    return ratios, C.view(k, d, k, -1), each.view(k, d), noise.view(k, -1)


def _different(C: Tensor, each: Tensor, noise: Tensor, see: Tensor) -> float:
    """How much the C_ab of one query, b ≠ a and in sight, differ from their mean: 1 if only by chance."""
    k, total, count = len(C), 0.0, 0
    for a in range(k):
        seen = [b for b in range(k) if b != a and bool(see[a, b])]
        if len(seen) < 2:
            continue
        rows = C[seen, :, a]
        apart = (rows - rows.mean(0)).square() / (each[seen].unsqueeze(2) * noise[a])
        total += float(apart.mean((1, 2)).sum()) * len(seen) / (len(seen) - 1)
        count += len(seen)
    return total / count if count else 0.0


def sight_of(weights: Tensor, causal: bool = False) -> Sight:
    """The sight that has most of the weights (k, k), the diagonal left out, in view: few keys first."""
    k = len(weights)
    weights = weights.clone().fill_diagonal_(0.0)
    best, most = Sight(causal=causal), -float("inf")
    for one in sights(k, causal):
        weight = float(weights[_mask(one, k)].sum())
        if weight > most + 1e-9:
            best, most = one, weight
    return best


def sights(k: int, causal: bool = False) -> Iterable[Sight]:
    """Every sight that k tokens tell apart, the simplest of each kind first."""
    if not causal:
        yield Sight()
    yield Sight(causal=True)
    yield from (Sight(causal=True, window=w) for w in range(1, k))
    if not causal:
        yield from (Sight(window=w) for w in range(1, k))
    yield from (Sight(causal=True, prefix=p) for p in range(2, k))


def _mask(sight: Sight, k: int) -> Tensor:
    mask = sight.mask(k, k)
    return torch.ones(k, k, dtype=torch.bool) if mask is None else mask
