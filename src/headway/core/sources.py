"""Where examples come from: X from a law, Y = F(X) of a layer that is known (draw) or of a black box (ask)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headway.core import checks
from headway.core.examples import BLOCK, Examples, join
from headway.core.factored import FactoredLayer
from headway.core.layer import MASKS, AttentionLayer
from headway.core.oracle import PLANS, Box, Oracle, box_of


@checks.memory("count, length")
def draw(
    layer: AttentionLayer | FactoredLayer,
    count: int,
    length: int,
    *,
    law: str | Any = "boolean",
    noise: float = 0.0,
    seed: int = 0,
) -> Examples:
    """n pairs (X, F(X) + noise) with X from a law.

    law: "boolean" (entries ±1), "gaussian" (standard normal entries), or a vocabulary matrix (v, d)
    whose rows are drawn uniformly. A layer that reads keys of another sequence gets one of the same law and
    length; positions are those of the layer. noise: standard deviation of Gaussian label noise relative to the root
    mean square of the labels (estimated once from sequences of their own).
    """
    return join(list(draw_batches(layer, count, length, law=law, noise=noise, seed=seed)))


def draw_batches(
    layer: AttentionLayer | FactoredLayer,
    count: int,
    length: int,
    *,
    law: str | Any = "boolean",
    noise: float = 0.0,
    seed: int = 0,
) -> Iterator[Examples]:
    """What ``draw`` draws, ``BLOCK`` sequences at a time."""
    inputs = _inputs(layer, law, checks.whole("length", length))
    count = checks.whole("count", count)
    noise, seed = checks.number("noise", noise), checks.whole("seed", seed, 0)
    causal = layer.mask == "causal" if isinstance(layer, AttentionLayer) else layer.form.sight.causal
    sigma = 0.0
    if noise > 0:
        pilot = layer(**inputs(256, _block_generator(seed, 2**32 - 1)))
        sigma = noise * float(pilot.to(torch.float64).square().mean().sqrt())
    for block, start in enumerate(range(0, count, BLOCK)):
        source = _block_generator(seed, block)
        given = inputs(min(BLOCK, count - start), source)
        Y = layer(**given)
        if sigma:
            Y = Y + sigma * torch.randn(Y.shape, generator=source, dtype=torch.float64).to(Y)
        yield Examples(given["X"], Y, mask="causal" if causal else "none", keys=given.get("Z"),
                       positions=given.get("positions"))


def _inputs(
    layer: AttentionLayer | FactoredLayer, law: str | Any, length: int
) -> Callable[[int, torch.Generator], dict[str, Tensor]]:
    """What the layer is called with, by name: X, keys Z where they are another sequence, its positions."""
    like = next(iter(layer.tensors().values()))
    tokens = input_law(law, layer.width, length, like.dtype)
    if isinstance(layer, AttentionLayer):
        return lambda count, source: {"X": tokens(count, source).to(like.device)}
    keys = input_law(law, layer.key_width, length, like.dtype) if layer.cross else None
    places = layer.positions
    if places is not None and len(places) < length:
        checks.refuse("length", f"at most {len(places)}, as many as the layer has positions", length,
                      f"length={len(places)}")

    def inputs(count: int, source: torch.Generator) -> dict[str, Tensor]:
        found = {"X": tokens(count, source).to(like.device)}
        if keys is not None:
            found["Z"] = keys(count, source).to(like.device)
        if places is not None:
            found["positions"] = places[:length].expand(count, *places[:length].shape)
        return found

    return inputs


@checks.memory("count, length")
def ask(
    oracle: Callable[[Tensor], Any], count: int | None = None, length: int = 16, width: int | None = None, *,
    law: str | Any = "boolean", mask: str = "none", seed: int = 0, dtype: torch.dtype | None = None,
    device: torch.device | str | None = None, fresh: bool | int = False, plan: str = "random",
    budget: int | None = None,
) -> Examples | Oracle:
    """n pairs (X, F(X)) of a black box F, with X from a law as in ``draw``; or F itself, to be asked as ``learn``
    chooses.

    oracle: a function of X (n, k, d) that answers with Y (n, k, e), an nn.Module that is one, or an
    nn.MultiheadAttention. It is shown random inputs, unless a plan says otherwise. One that answers differently to
    the same input is refused: dropout, or a batch norm in training. count: 10·d²/length by default, at least 2,000.
    width: d; read off an nn.MultiheadAttention or a vocabulary. mask: "causal" if the oracle only looks back.
    dtype and device of the X that it is shown: those of its parameters, float64 on the CPU if it has none.

    The oracle is asked here and not again: for ``count`` sequences, and twice for a few, to see that it answers
    alike. fresh=True lets ``learn`` ask it for more, drawn by the same law, so that a descent on factors meets new
    sequences in every batch and learns none by heart. How many is found out on the way: ``fit.stats["asked"]``, in
    the tens of thousands as a rule. fresh=20_000 lets one call of ``learn`` ask for so many at most. Other ways to
    learn do with the ``count`` given here.

    plan="chosen": ``learn`` chooses what to ask, one answer after the other, in sequences of ``length`` tokens: far
    fewer calls, for layers of plain scores with fewer heads than outputs. plan="auto": it chooses or draws,
    whichever takes fewer calls. Nothing is asked here, and at most ``budget`` sequences later, none of them twice;
    with ``run`` every answer is kept as it comes, and a run that was killed goes on with those. With plan="random"
    a budget is the count.

    >>> from headway.core.layer import AttentionLayer
    >>> ask(AttentionLayer.random(heads=1, width=4), count=10, length=3, width=4)
    Examples(10 sequences of 3 tokens, width 4 → 4, torch.float64)
    >>> ask(AttentionLayer.random(heads=1, width=4), width=4, plan="chosen", budget=100)
    Oracle(width 4, sequences of 16 tokens, plan 'chosen', at most 100 calls)
    """
    if not callable(oracle):
        checks.refuse("oracle", "a function of X (n, k, d)", type(oracle).__name__, "module.forward, or a lambda")
    checks.choice("mask", mask, MASKS)
    length, seed = checks.whole("length", length), checks.whole("seed", seed, 0)
    box = box_of(oracle, mask, dtype, device)
    width = checks.whole("width", _width(oracle, law) if width is None else width)
    if checks.choice("plan", plan, PLANS) != "random":
        for name, value, usual in (("count", count, None), ("fresh", fresh, False)):
            if value is not usual:
                checks.refuse(name, f"nothing with plan={plan!r}, which finds out how many calls it takes", value,
                              "budget=, the most calls there may be")
        if not (isinstance(law, str) and law == "boolean"):
            checks.refuse("law", f"nothing with plan={plan!r}: any tokens may be asked", repr(law)[:40],
                          "plan='random' for tokens of a law")
        return Oracle(box, width, length, plan, budget, seed, mask)
    if budget is not None:
        most = checks.whole("budget", budget)
        if fresh is not False or (count is not None and checks.whole("count", count) > most):
            checks.refuse("budget", "no fewer calls than count, and no fresh ones", budget, "count alone")
        count = most if count is None else count
    count = max(2000, math.ceil(10 * width**2 / length)) if count is None else checks.whole("count", count)
    more = None if fresh is True else checks.whole("fresh", 0 if fresh is False else fresh, 0)
    inputs = input_law(law, width, length, box.dtype)
    box.probe(inputs(min(count, 8), _block_generator(seed, 0)))
    parts: list[Examples] = []
    for block, start in enumerate(range(0, count, BLOCK)):
        X = inputs(min(BLOCK, count - start), _block_generator(seed, block))
        parts.append(Examples(X.to(box.device), box(X, parts[0].out_width if parts else "e"), mask=mask))
    whole = join(parts)
    return whole if more == 0 else Answers(whole, box, inputs, more, seed)


class Answers(Examples):
    """Examples of a black box that may be asked for more: ``fresh`` sequences at most, any number if None."""

    def __init__(self, given: Examples, box: Box, law: Law, fresh: int | None, seed: int) -> None:
        self.X, self.Y, self.mask = given.X, given.Y, given.mask  # checked already
        self.padding = self.keys = self.key_padding = self.positions = self.key_positions = None
        self.box, self.law, self.fresh, self.seed = box, law, fresh, seed

    def inputs(self, count: int, key: int, block: int) -> Tensor:
        """X by the law, another one for every key and block, and none of those that are given."""
        return self.law(count, _generator(np.random.SeedSequence(self.seed, spawn_key=(key, block))))

    def to(self, X: Tensor) -> Examples:
        """What the black box answers to X."""
        return Examples(X.to(self.box.device), self.box(X, self.out_width), mask=self.mask)


def _width(oracle: Callable[[Tensor], Any], law: str | Any) -> int:
    if isinstance(oracle, nn.MultiheadAttention):
        return int(oracle.embed_dim)
    if isinstance(law, str):
        checks.refuse("width", "the number of features of a token, with an oracle", None, "width=64")
    vocabulary = checks.floating("law", law)
    checks.shape("law", vocabulary, ("v", "d"), "one row per word of the vocabulary")
    return vocabulary.shape[1]


def _block_generator(seed: int, block: int) -> torch.Generator:
    return _generator(np.random.SeedSequence([seed, block]))


def _generator(words: np.random.SeedSequence) -> torch.Generator:
    return torch.Generator().manual_seed(int(words.generate_state(1, np.uint64)[0] >> np.uint64(1)))


@dataclass(frozen=True)
class Law:
    """How inputs are drawn: entries ±1, standard normal ones, or rows of a vocabulary (v, d)."""

    name: str
    width: int
    length: int
    dtype: torch.dtype
    vocabulary: Tensor | None = None

    def __call__(self, count: int, generator: torch.Generator) -> Tensor:
        """X (count, length, width) on the CPU; ±1 tokens as int8."""
        shape = (count, self.length, self.width)
        if self.vocabulary is not None:
            words = torch.randint(len(self.vocabulary), shape[:2], generator=generator)
            return self.vocabulary[words].to(self.dtype)
        if self.name == "boolean":
            return (2 * torch.randint(2, shape, generator=generator) - 1).to(torch.int8)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

    @property
    def sequences(self) -> float:
        """How many different ones there are."""
        if self.vocabulary is None and self.name != "boolean":
            return math.inf
        words, places = (2, self.length * self.width) if self.vocabulary is None else (
            len(self.vocabulary), self.length)
        return float(words) ** places if places * math.log2(words) < 1000 else math.inf


def input_law(law: str | Any, width: int, length: int, dtype: torch.dtype) -> Law:
    if isinstance(law, str):
        return Law(checks.choice("law", law, ("boolean", "gaussian")), width, length, dtype)
    vocabulary = checks.floating("law", law)
    checks.shape("law", vocabulary, ("v", width), "one row per word of the vocabulary")
    if not len(vocabulary):
        checks.refuse("law", "a vocabulary of at least one word", f"shape {tuple(vocabulary.shape)}",
                      "law='boolean'")
    return Law("vocabulary", width, length, dtype, vocabulary.cpu())
