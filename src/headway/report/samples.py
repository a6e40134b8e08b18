"""Where heads look, on sequences they were learned from: which sequences tell most, patterns on their tokens, what
each head does, and what it writes where it looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.core import checks
from headway.core.behaviour import KINDS, Behaviour, behaviours
from headway.core.examples import Examples
from headway.core.factored import FactoredLayer
from headway.core.forms import Sight
from headway.core.match import Match
from headway.report.given import Given, Unembedding, fitted, strings
from headway.report.heads import Layer
from headway.runs.store import Run

MOST = 64  # tokens of a sequence that are shown
LOOKED = 128  # sequences by which heads are named, and among which the telling ones are found
CELLS = 1 << 22  # of all their patterns
WRITES, WORDS = 6, 3  # tokens that a head looks at most, and words that it raises most there


@dataclass(frozen=True)
class Written:
    """What a head raises when it looks at a token: words, and by how much more than the mean of all words."""

    token: str
    words: tuple[tuple[str, float], ...]


@dataclass(frozen=True, eq=False)
class Sample:
    """What every head looks at in one of the sequences: patterns (m, queries, keys), and those of true heads."""

    number: int  # of the sequence
    why: str  # it is shown
    patterns: Tensor
    true: Tensor | None
    queries: tuple[str, ...]  # strings of the tokens, or their places
    keys: tuple[str, ...]
    cut: bool  # whether the sequence is longer than what is shown
    writes: tuple[tuple[Written, ...], ...] = ()  # of every head


@dataclass(frozen=True, eq=False)
class Looks:
    """Samples, and what each head does in as many sequences as were looked at."""

    samples: tuple[Sample, ...] = ()
    does: tuple[Behaviour, ...] = ()
    true_does: tuple[Behaviour, ...] = ()  # the heads of the other layer, where there is one
    sequences: int = 0
    source: str = "they were learned from"
    named: bool = False  # whether tokens have strings
    cross: bool = False

    @property
    def order(self) -> list[int]:
        """Heads sorted by what they do, the clearest of a kind first."""
        return sorted(range(len(self.does)), key=lambda j: (
            KINDS.index(self.does[j].kind), -self.does[j].scores.get(self.does[j].kind, 0.0)))


def of_run(run: Run, layer: Layer, truth: Layer | None, given: Given) -> Looks:
    """Of the run's examples, where these still lie there."""
    data = _examples(run)
    if data is None:
        for name, value in given.named.items():
            if value is not None:
                place = run.config.get("examples", "a folder that the run names")
                checks.refuse(name, "a run whose examples lie where it learned from them", f"none at {place}",
                              "leave it out")
        return Looks()
    return looks(layer, truth, data, fitted(given, data, layer.out_width))


def _examples(run: Run) -> Examples | None:
    place, seen = Path(run.config.get("examples") or run.path / "examples"), run.seen()
    if not isinstance(seen, np.ndarray) or not place.is_dir():
        return None
    try:
        data = Examples.open(place)
        here = data.take(range(min(3, len(data)))).hashes()
    except checks.InputError:
        return None
    return data if np.isin(here, seen).all() else None  # else others lie there now


def looks(layer: Layer, truth: Layer | None, data: Examples, given: Given) -> Looks:
    """Where the heads of a layer look in examples, and which sequences show most of it."""
    part = some(layer, data)
    P = patterns(layer, part)
    named = None if part.keys is not None else strings(given, range(len(part)), part)
    chosen = [(number - 1, "asked for") for number in given.sequences] or telling(layer, part, P)
    samples = []
    for at, why in chosen:
        one = data.take([at])
        words = strings(given, [at], one)
        samples.append(sample(layer, truth, one, at + 1, why, None if words is None else words[0],
                              given.unembedding))
    return Looks(tuple(samples), named_by(layer, P, part, named),
                 () if truth is None else named_by(truth, patterns(truth, part), part, named), len(part),
                 named=given.tokens is not None, cross=part.keys is not None)


def some(layer: Layer, data: Examples) -> Examples:
    """The first sequences, as many as patterns are affordable of."""
    first = data.take([0])
    each = layer.heads * first.length * (first.length if first.keys is None else first.keys.shape[1])
    return data.take(range(min(LOOKED, len(data), max(2, CELLS // each))))


def named_by(
    layer: Layer, P: Tensor, part: Examples, named: Sequence[Sequence[str]] | None = None
) -> tuple[Behaviour, ...]:
    """What the heads do in these sequences."""
    sight = layer.form.sight if isinstance(layer, FactoredLayer) else Sight(causal=layer.mask == "causal")
    return behaviours(P, named, part.padding, key_padding=part.key_padding, sight=sight,
                      cross=part.keys is not None)


def patterns(layer: Layer, part: Examples) -> Tensor:
    """(n, m, k, l), in double precision."""
    return layer.to(torch.float64).patterns(**_called(part))


def _called(part: Examples) -> dict[str, Any]:
    """What a layer in double precision is called with."""
    given: dict[str, Any] = {**part.arguments(), "X": part.X.to(torch.float64)}
    return given | ({} if part.keys is None else {"Z": part.keys.to(torch.float64)})


def looked(looks: Looks) -> str:
    """A sentence on what heads are named by."""
    if looks.cross:
        words = "Keys are of another sequence, where no kind but first token, position and broad makes sense."
    elif looks.named:
        words = "Copies are tokens with the same string."
    else:
        words = ("The strings of the tokens are not known: places stand for them, and whether a head looks for "
                 "copies cannot be told.")
        words += " headway report RUN --tokens FILE gives them." if looks.source == Looks.source else ""
    return f"What heads do is told from {looks.sequences} sequences {looks.source}. {words}"


def telling(layer: Layer, part: Examples, P: Tensor) -> list[tuple[int, str]]:
    """The sequences with the largest and the smallest error, and the one in which heads look at fewest keys."""
    real = (torch.ones(part.X.shape[:2], dtype=torch.bool) if part.padding is None else ~part.padding).cpu()
    Y = part.Y.double().cpu()
    off = (layer.to(torch.float64)(**_called(part)).cpu() - Y).square().sum(2) * real
    spread = float((Y[real] - Y[real].mean(0)).square().sum(1).mean()) or 1.0
    error = (off.sum(1) / real.sum(1).clamp_min(1) / spread).sqrt()
    sharp = (P.cpu().max(3).values.mean(1) * real).sum(1) / real.sum(1).clamp_min(1)
    found: list[tuple[int, str]] = []
    for ranked, words in (
            (error.argsort(descending=True), "largest error, {error:.1e} of the labels' spread"),
            (error.argsort(), "smallest error, {error:.1e} of the labels' spread"),
            (sharp.argsort(descending=True), "most peaked, largest weights {sharp:.2f} on average")):
        at = next((int(i) for i in ranked if int(i) not in [j for j, _ in found]), None)
        if at is not None:
            found.append((at, words.format(error=float(error[at]), sharp=float(sharp[at]))))
    return found


def sample(
    layer: Layer, truth: Layer | None, part: Examples, number: int, why: str, named: Sequence[str] | None = None,
    unembedding: Unembedding | None = None,
) -> Sample:
    """What is shown of one sequence."""
    P = patterns(layer, part)[0].cpu()
    rows = _real(part.padding, P.shape[1])
    columns = rows if part.keys is None else _real(part.key_padding, P.shape[2])
    queries = [str(int(i) + 1) if named is None else named[i] for i in rows[:MOST].tolist()]
    keys = queries if part.keys is None else [str(int(i) + 1) for i in columns[:MOST].tolist()]
    cut, shown = max(len(rows), len(columns)) > MOST, P[:, rows[:MOST]][:, :, columns[:MOST]]
    true = None if truth is None else patterns(truth, part)[0].cpu()[:, rows[:MOST]][:, :, columns[:MOST]]
    Z = (part.X if part.keys is None else part.keys)[0].double().cpu()[columns[:MOST]]
    writes = () if unembedding is None else written(layer, shown, Z, keys, unembedding)
    return Sample(number, why, shown, true, tuple(queries), tuple(keys), cut, writes)


def _real(padding: Tensor | None, count: int) -> Tensor:
    """Which tokens of a sequence are no filling."""
    return torch.arange(count) if padding is None else (~padding[0].cpu()).nonzero().flatten()


def written(
    layer: Layer, P: Tensor, Z: Tensor, keys: Sequence[str], unembedding: Unembedding
) -> tuple[tuple[Written, ...], ...]:
    """Of every head, for the tokens that get most of its attention: the largest entries of U(z_b V_iO_i), less
    their mean, which a softmax over words does not see. No norm is put between."""
    U = unembedding.matrix.cpu()
    found = []
    for i in range(layer.heads):
        kept: dict[str, int] = {}
        for b in P[i].sum(0).argsort(descending=True).tolist():
            kept.setdefault(keys[b], b)
        at = list(kept.values())[:WRITES]
        H = _values(layer, Z[at], i)
        raised = (H.to(U.dtype) @ U.T).double()
        raised = raised - raised.mean(1, keepdim=True)
        top = raised.topk(min(WORDS, raised.shape[1]), dim=1)
        found.append(tuple(
            Written(keys[b], tuple((unembedding.words[j], value) for j, value in zip(js, values, strict=True)
                                   if math.isfinite(value)))
            for b, js, values in zip(at, top.indices.tolist(), top.values.tolist(), strict=True)))
    return tuple(found)


def _values(layer: Layer, Z: Tensor, head: int) -> Tensor:
    """What a head adds to the output at full attention on each token, (tokens, e); every gate open."""
    if not isinstance(layer, FactoredLayer):
        return Z @ layer.W[head].double().cpu()
    V = layer.value[head * layer.groups // layer.heads].double().cpu()
    return torch.cat([Z, Z.new_ones(len(Z), 1)], 1) @ V @ layer.out[head].double().cpu()


def true_patterns(sample: Sample, j: int, found: Match | None) -> Tensor | None:
    """Of the true head that learned head j stands for."""
    if sample.true is None or found is None or j not in found.order:
        return None
    return sample.true[found.order.index(j)]
