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
from headway.core.convert import as_function
from headway.core.examples import BLOCK, Examples, join, some_columns
from headway.core.factored import FactoredLayer
from headway.core.layer import MASKS, AttentionLayer

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


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
    device: torch.device | str | None = None, fresh: bool | int = False,
) -> Examples:
    """n pairs (X, F(X)) of a black box F, with X from a law as in ``draw``.

    oracle: a function of X (n, k, d) that answers with Y (n, k, e), an nn.Module that is one, or an
    nn.MultiheadAttention. It is shown random inputs and nothing else. One that answers differently to the same
    input is refused: dropout, or a batch norm in training. count: 10·d²/length by default, at least 2,000. width:
    d; read off an nn.MultiheadAttention or a vocabulary. mask: "causal" if the oracle only looks back. dtype and
    device of the X that it is shown: those of its parameters, float64 on the CPU if it has none.

    The oracle is asked here and not again: for ``count`` sequences, and twice for a few, to see that it answers
    alike. fresh=True lets ``learn`` ask it for more, drawn by the same law, so that a descent on factors meets new
    sequences in every batch and learns none by heart. How many is found out on the way: ``fit.stats["asked"]``, in
    the tens of thousands as a rule. fresh=20_000 lets one call of ``learn`` ask for so many at most. Other ways to
    learn do with the ``count`` given here.

    >>> from headway.core.layer import AttentionLayer
    >>> ask(AttentionLayer.random(heads=1, width=4), count=10, length=3, width=4)
    Examples(10 sequences of 3 tokens, width 4 → 4, torch.float64)
    """
    if not callable(oracle):
        checks.refuse("oracle", "a function of X (n, k, d)", type(oracle).__name__, "module.forward, or a lambda")
    checks.choice("mask", mask, MASKS)
    length, seed = checks.whole("length", length), checks.whole("seed", seed, 0)
    box = _box(oracle, mask, dtype, device)
    width = checks.whole("width", _width(oracle, law) if width is None else width)
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

    def __init__(self, given: Examples, box: _Box, law: Law, fresh: int | None, seed: int) -> None:
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


def _box(
    oracle: Callable[[Tensor], Any], mask: str, dtype: torch.dtype | None, device: torch.device | str | None
) -> _Box:
    """The oracle with the precision and the device it is asked in: given, or those of its parameters."""
    first = next(oracle.parameters(), None) if isinstance(oracle, nn.Module) else None
    if dtype is None:
        dtype = torch.float64 if first is None else first.dtype
    if dtype not in DTYPES:
        checks.refuse("dtype", "float16, bfloat16, float32 or float64", dtype, "dtype=torch.float32")
    if device is None:
        device = "cpu" if first is None else first.device
    checks.device("device", device, "device='cpu'")
    if isinstance(oracle, nn.MultiheadAttention):
        oracle = as_function(oracle, causal=mask == "causal")
    return _Box(oracle, dtype, torch.device(device))


@dataclass(frozen=True)
class _Box:
    """A black box, its answers checked."""

    oracle: Callable[[Tensor], Any]
    dtype: torch.dtype
    device: torch.device

    def __call__(self, X: Tensor, out_width: int | str = "e") -> Tensor:
        # Copies both ways: an oracle may work in place, or answer in a buffer that it uses again.
        with torch.no_grad():
            Y = self.oracle(X.to(self.device, self.dtype, copy=True))
        if Y is None or isinstance(Y, (tuple, dict)):
            checks.refuse("the oracle's answer", "one tensor Y (n, k, e)", type(Y).__name__,
                          "lambda X: module(X)[0], where the first of several is meant")
        Y = checks.floating("the oracle's answer", Y, hint="look at what the oracle does to such an X")
        checks.shape("the oracle's answer", Y, (*X.shape[:2], out_width), "one output row per token of X")
        some_columns("the oracle's answer", tuple(Y.shape))
        return Y.to(self.device, copy=True)

    def probe(self, X: Tensor) -> None:
        """Refuse a box that does not take this dtype, or that answers differently to the same input."""
        try:
            one = self(X)
        except RuntimeError as error:
            other = self._other(X) if "type" in str(error) else None
            if other is None:
                raise
            checks.refuse("dtype", "the one that the oracle computes in",
                          f"{self.dtype}, to which it says: {str(error).splitlines()[0]}",
                          f"headway.ask(oracle, ..., dtype={other})")
        # Sums in another order are the same answer; a dropped unit is not.
        if float((one - self(X)).abs().max()) > 1e3 * torch.finfo(one.dtype).eps * float(one.abs().max()):
            checks.refuse("oracle", "the same answer to the same input", "two that differ",
                          "module.eval(), or learn from stored examples, with their noise")

    def _other(self, X: Tensor) -> torch.dtype | None:
        """A dtype that the oracle does take."""
        for dtype in DTYPES:
            try:
                with torch.no_grad():
                    self.oracle(X.to(self.device, dtype, copy=True))
            except RuntimeError:
                continue
            return dtype
        return None


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
