"""Two layers side by side, as a story for the page: the answer and its cause, who matches whom, where both look on
the input that shows most of the difference, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from headway.core import checks
from headway.core.examples import Examples
from headway.core.factored import FactoredLayer
from headway.core.match import Match, match
from headway.core.same import TOLERANCE, Comparison
from headway.core.sources import draw
from headway.report import samples
from headway.report.heads import Layer, portraits
from headway.report.story import Story, command, table
from headway.runs.store import versions

SIDES = ("first", "second")
TITLES = {"same": "The same function", "same up to head order": "The same function, with heads in another order",
          "differs": "Different functions"}
DRAWN, LENGTH = 64, 20  # sequences, and their tokens, where no examples were given


def beside(
    a: Layer, b: Layer, found: Comparison, tolerance: float | None, on: Examples | None, config: Mapping[str, Any]
) -> Story:
    """What was found about two layers, whose comparison is ``found``."""
    a, b = (layer.to("cpu").to(torch.float64) for layer in (a, b))
    pairs, paired = _pairs(a, b, on)
    factors = isinstance(a, FactoredLayer) or isinstance(b, FactoredLayer)
    one, other = portraits(a, factors), portraits(b, factors)
    looks = _looks(a, b, found, on)
    columns, heads = table(a, one, None if pairs is None else other, pairs, looks, SIDES[1])
    sentences = [f"{found.where[:1].upper()}{found.where[1:]}."]
    if found.why is not None:
        sentences.append(f"Cause: {found.cause}. {found.why[:1].upper()}{found.why[1:]}.")
    sentences += _alone(pairs)
    names = [str(config.get(key) or f"the {side} layer") for key, side in zip(("one", "other"), SIDES, strict=True)]
    facts = [*((f"heads of the {side}", str(layer.heads)) for side, layer in zip(SIDES, (a, b), strict=True)),
             ("width", str(a.width) if a.width == a.out_width else f"{a.width} → {a.out_width}"),
             *([("largest difference", f"{found.largest:.1e}")] if math.isfinite(found.largest) else []),
             ("counts as none", f"{TOLERANCE if tolerance is None else tolerance:.0e}")]
    facts += [("answers differ by", f"{found.difference:.2g}")] if found.example is not None else []
    form = [f"First: {names[0]}, {_form(a)}. Second: {names[1]}, {_form(b)}."]
    form += [] if paired else ["Their forms differ, so heads are set side by side in their order, without errors."]
    return Story(
        TITLES[found.kind], found.same, tuple(sentences), tuple(facts), command(config), config, versions(),
        columns=columns, heads=heads, form=tuple(form), shown=one, truth=None if pairs is None else other,
        looks=looks, match=pairs, sides=SIDES, kind="comparison", sure=tuple(_sure(found, tolerance, on)))


def _form(layer: Layer) -> str:
    if isinstance(layer, FactoredLayer):
        return layer.form.describe()
    return "plain scores" + (", causal" if layer.mask == "causal" else "")


def _pairs(a: Layer, b: Layer, on: Examples | None) -> tuple[Match | None, bool]:
    """Who matches whom, and whether that could be asked; if not, heads in their order where there are as many."""
    try:
        return match(a, b, on), True
    except checks.InputError:
        if a.heads != b.heads:
            return None, False
        unknown = (math.inf,) * a.heads
        return Match(tuple(range(a.heads)), unknown, unknown, math.inf, (), ()), False


def _alone(pairs: Match | None) -> list[str]:
    """Heads without a partner."""
    said = []
    for heads, side, other in ((pairs.excess, *SIDES), (pairs.missing, *SIDES[::-1])) if pairs is not None else ():
        if heads:
            listed = ", ".join(str(j + 1) for j in heads)
            said.append(f"Head{'s' * (len(heads) > 1)} {listed} of the {side} "
                        f"{'have' if len(heads) > 1 else 'has'} no partner in the {other}.")
    return said


def _sure(found: Comparison, tolerance: float | None, on: Examples | None) -> list[str]:
    """On what the answer rests."""
    limit = TOLERANCE if tolerance is None else tolerance
    if found.by == "weights":
        seen = "every input" if on is None else "every input in the directions that the given examples visit"
        said = [f"Decided by weights, which is an answer for {seen}: all that inputs and outputs can show of a "
                "head was compared, relative to its own size, whatever factors compute it."]
    else:
        said = ["Decided by answers to inputs, and said of those: other inputs may tell the two apart."]
    if math.isfinite(found.largest):
        said.append(f"What differs by at most {limit:.0e} counts as equal; the largest difference is "
                    f"{found.largest:.1e}.")
    if not found.same:
        said.append("Known mistakes were made with one side, and the cause is one that makes the difference vanish "
                    "up to rounding." if found.cause is not None else
                    "None of the known mistakes makes the difference vanish, so no cause is given.")
    if found.example is not None:
        said.append(f"On the input that shows it most the answers differ by {found.difference:.2g} times their "
                    "usual spread. It was found among inputs that were tried and a few steps uphill from the worst "
                    "of them: others may show more.")
    return said


def _looks(a: Layer, b: Layer, found: Comparison, on: Examples | None) -> samples.Looks:
    """Where both look: on the input on which they differ most, and on a usual one. Nothing where no input fits
    both."""
    try:
        data = draw(a, DRAWN, _length(a, b, found), law="gaussian", seed=0) if on is None else on
        part = samples.some(a, data)
        both = [(samples.patterns(layer, part), layer) for layer in (a, b)]
        does = [samples.named_by(layer, P, part) for P, layer in both]
        shown = []
        if found.example is not None:
            why = f"where answers differ most, by {found.difference:.2g} times their spread"
            shown.append(samples.sample(a, b, _worst(a, found), 1, why))
        usual = "the first of the examples" if on is not None else "a random input"
        shown.append(samples.sample(a, b, data.take([0]), len(shown) + 1, usual))
    except checks.InputError:  # keys of another sequence in one alone, positions that only one can take
        return samples.Looks()
    source = "of the examples" if on is not None else "of standard normal tokens"
    return samples.Looks(tuple(shown), does[0], does[1], len(part), source, cross=part.keys is not None)


def _length(a: Layer, b: Layer, found: Comparison) -> int:
    """Tokens of a random sequence, no more than either has places for."""
    places = [len(layer.positions) for layer in (a, b)
              if isinstance(layer, FactoredLayer) and layer.positions is not None]
    return min([LENGTH if found.example is None else len(found.example), samples.MOST, *places])


def _worst(a: Layer, found: Comparison) -> Examples:
    """The input on which they differ most, as one example."""
    assert found.example is not None
    X, Z, places = (None if part is None else part.unsqueeze(0) for part in (
        found.example, found.example_keys, found.example_positions))
    assert X is not None
    return Examples(X, X.new_zeros(1, X.shape[1], a.out_width), keys=Z, positions=places,
                    key_positions=None if Z is None else places)
