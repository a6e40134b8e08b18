"""Does what a linear layer leaves depend on the inputs? The exact test of evidence.py, with features for it:
tokens, places, neighbours, sizes, other rules for the scores, and heads that were not found."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headway.core import attention
from headway.learning import evidence
from headway.learning.source import Source, spaced
from headway.linalg import convex
from headway.linalg.projected import LinearRows, Rows

CUBIC = 128  # random features of a probe for heads that were not found


class Heads(Protocol):
    """What was found, in working coordinates."""

    @property
    def Theta(self) -> Tensor: ...
    @property
    def W(self) -> Tensor: ...
    @property
    def offset(self) -> Tensor: ...
    @property
    def heads(self) -> int: ...
    @property
    def sequences(self) -> int: ...


def depends(
    source: Source, best: Heads, seed: int, whole: convex.Convex | None = None,
    pulse: Callable[[], None] = lambda: None,
) -> bool:
    """Whether what is left depends on the inputs: wrong once in a hundred times if it is noise, of any size. What
    the convex solution leaves is looked at where it is given, else what these heads do."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{seed}:linear:probes".encode()))
    most = max(32, evidence.ROWS.get(source.device.type, evidence.ROWS["cpu"]) // source.examples.length)
    every = source.parts.different
    index = spaced(every, min(len(every), best.sequences, most))
    halves = [list(_left_over(source, best, whole, half)) for half in (index[::2], index[1::2])]
    ways = []
    for first, second in (halves, halves[::-1]):
        pulse()
        ways.append(evidence.parts_of({name: evidence.by_rule(first, second, features)
                                       for name, features in probes(source, best).items()}, draw))
    return evidence.dependent({name: min(1.0, 2 * min(way[name] for way in ways)) for name in ways[0]})


def _left_over(source: Source, best: Heads, whole: convex.Convex | None, index: np.ndarray) -> Iterator[Rows]:
    for rows in source.stream(index, max(best.heads, 2), torch.float64):
        assert isinstance(rows, LinearRows)
        if whole is not None:
            said = (convex.features(rows) @ whole.coefficients).view_as(rows.Y)
        else:
            said = convex.answer(rows, best.Theta, best.W, best.offset)
            said = said if rows.valid is None else said * rows.valid
        yield replace(rows, Y=rows.Y - said)


def probes(source: Source, best: Heads) -> dict[str, evidence.Features]:
    """What might be left: the token and the mean of the keys, the place, neighbours, sizes, other rules for the
    scores, heads that were not found."""
    d, k = source.d, source.examples.length
    draw = torch.Generator().manual_seed(d)

    def handed(rows: Rows) -> Tensor:
        return attention.attend(rows.patterns(best.Theta), rows.X).flatten(2)

    def curved(rows: Rows) -> Tensor:
        every = torch.cat([evidence.of_token(rows), handed(rows)], dim=2)
        return torch.relu(every @ mix.to(every) + shift.to(every))

    def sharpness(rows: Rows) -> Tensor:
        P = attention.softmax(attention.scores(rows.X, best.Theta), rows.see)
        return attention.attend(P, rows.X).flatten(2)

    def divided(rows: Rows) -> Tensor:
        if rows.see is None:
            return handed(rows)
        keys = rows.see.sum(2).unsqueeze(2).to(rows.X)
        return torch.cat([handed(rows) / keys, handed(rows) * keys], dim=2)

    def heads(rows: Rows) -> Tensor:
        Q, K, V = (rows.X @ part.to(rows.X) for part in one)
        weight = None if not isinstance(rows, LinearRows) else rows.weight
        pairs = K * V
        return Q * (pairs.sum(1, keepdim=True) if weight is None else weight.expand(-1, k, k) @ pairs)

    mix = torch.randn((best.heads + 2) * d, evidence.CURVED, generator=draw) / math.sqrt((best.heads + 2) * d)
    shift = torch.randn(evidence.CURVED, generator=draw)
    one = [torch.randn(d, CUBIC, generator=draw) / math.sqrt(d) for _ in range(3)]
    return {**evidence.ANY, "curved": curved, "sharpness": sharpness, "divided": divided, "heads": heads}
