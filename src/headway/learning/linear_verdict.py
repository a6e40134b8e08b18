"""From the heads of a linear layer to what may be said of its operator.

Zero is the least a sum of squares can be, so a residual at the floor of the arithmetic proves its own optimality.
Where something is left, and the width is small, the convex problem over all operators says what no number of heads
goes below; what that leaves is then looked at, and not what a search ended in.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from scipy import special

from headway.core import operator
from headway.core.devices import normal, peak
from headway.core.examples import Examples
from headway.core.layer import AttentionLayer
from headway.core.results import Fit, Status
from headway.learning import evidence
from headway.learning.formed_learn import Clock, Wanted
from headway.learning.gauss_newton import Free, OutOfTimeError, gauss_newton
from headway.learning.ladder import FITTED, floor_in_words
from headway.learning.linear import Found, LinearSource, Search
from headway.learning.linear_evidence import depends
from headway.learning.shapes import Full
from headway.learning.source import spaced
from headway.learning.verdict import APART, DOMINATES, NOTHING, SAFE, heads_of
from headway.linalg import convex
from headway.linalg.projected import evaluate

PUSH = 1e-3  # part of the Θ_i by which they are pushed to see whether the operator comes back
BACK = 1e-4  # part of the change that may be left then
STEPS = 20  # of Gauss–Newton on the way back
MIXED = ("Only the operator is determined: heads mixed by any invertible matrix are the same function, and those "
         "given, from singular vectors, are a choice.")


def learn_linear(
    examples: Examples, wanted: Wanted, device: torch.device | str | None, *, mean: bool, clock: Clock
) -> Fit:
    """The operator of a layer of linear scores by the fewest heads, and what may be said of it."""
    search = Search(LinearSource(examples, mean, device), wanted, clock)
    best = search.run()
    return conclude(search, best)


def conclude(search: Search, best: Found) -> Fit:
    """The layer in the caller's coordinates, and what may be said of it from sequences that nobody used."""
    source, clock, data = search.source, search.clock, search.source.examples
    error = search.error(best, source.judge)
    size, exact = source.size, error <= search.floor
    whole = search.convex if search.convex is not None and search.convex.free > 0 else None
    known = _in_time(lambda: determined(search, best)) if exact else None
    rest = None
    if not exact and error > FITTED and best.reason != "time":
        rest = _in_time(lambda: depends(source, best, search.wanted.seed, whole, clock.pulse))
    layer = without_offset(source, source.leave(best.Theta, best.W, best.offset), max(error, search.floor))
    least = operator.fewest(layer.Theta, layer.W, search.tolerance) if error <= FITTED else 1
    free = max(best.sequences * data.length * data.out_width - size.unknowns(best.heads), 1)
    noise = best.residual * math.sqrt((free + size.unknowns(best.heads)) / free)
    far = wrong(search, best, error)
    stats: dict[str, Any] = {
        "heads": layer.heads, "rank": None, "out_rank": None, "scores": layer.scores, "operator_rank": layer.heads,
        "fewest_heads": least, "held_out_error": error, "fitted_error": best.residual, "noise": noise,
        "examples": len(data), "held_out": len(source.judge), "selected_by": len(source.select),
        "used": best.sequences, "outliers": far, "floor": size.floor(best.heads),
        "unknowns": size.unknowns(best.heads), "unidentified_directions": data.width - source.d,
        "determined": known, "depends": rest, "starts": len(best.starts), "agreeing": best.agreeing,
        "products": sum(int(event.get("products", 0)) for event in clock.trace),
        "out_of_time": best.reason == "time"}
    if whole is not None:
        stats["convex"] = {"residual": whole.residual, "determined": whole.determined, "free": whole.free}
    found = status(search, best, layer, error, known, rest, noise, least, far)
    stats |= {"seconds": clock.spent, "peak_memory": peak(source.device)}
    return Fit(layer, found, stats, tuple(clock.trace))


def without_offset(source: LinearSource, layer: AttentionLayer, accuracy: float) -> AttentionLayer:
    """Without an offset that is zero to the accuracy reached."""
    assert source.frame is not None and layer.offset is not None
    small = 1e3 * accuracy * source.frame.scale * math.sqrt(layer.out_width)
    if accuracy <= 1e-5 and source.frame.label is None and float(layer.offset.norm()) < small:
        return replace(layer, offset=None)
    return layer


def status(
    search: Search, best: Found, layer: AttentionLayer, error: float, known: bool | None, rest: bool | None,
    noise: float, least: int, far: int,
) -> Status:
    """What may be said of ``error``; rest: whether what is left depends on the inputs, None where nobody asked."""
    source, m, whole = search.source, layer.heads, search.convex
    count = f"an operator of rank {m} ({heads_of(m)} of {layer.scores} scores)"
    judged = len(source.judge)
    on = f"on {judged} sequence{'s' if judged != 1 else ''} kept for the judgement"
    numbers = {"held_out_error": error, "arithmetic_floor": search.floor, "heads": float(m)}
    floor_words, tail = floor_in_words(source.examples.dtype), _tail(source, far)
    if error <= search.floor:
        told = f"to {floor_words}: {count}, relative error {error:.1e} {on}. Nothing can be met better."
        only = whole is not None and whole.determined and whole.residual <= search.floor
        if only or known:
            why = ("The convex problem over all operators has this solution alone." if only else
                   f"Pushed a little, {heads_of(m)} come back to the same operator.")
            return Status("recovered", f"Recovered {told} {why} {_fewest(m, least)} {MIXED}{tail}", numbers)
        why = ("Whether these inputs determine the operator was not asked: time ran out." if known is None else
               f"Pushed a little, the heads do not come back to the same operator in {STEPS} steps: these inputs "
               "do not determine it, or hardly.")
        return Status("fitted", f"Fitted {told} {why}{tail}", numbers)
    if error <= FITTED:
        return Status("fitted", f"Fitted: {count}, relative error {error:.1e} {on}, above {floor_words} "
                      f"({search.floor:.0e}). {MIXED}{tail}", numbers)
    n, floor = source.parts.distinct, source.size.floor(best.heads)
    apart = error > max(APART * noise, FITTED)
    if n < floor or (apart and best.sequences >= n and (n < SAFE * floor or error > 1)):
        need = math.ceil(SAFE * max(floor, 1) * len(source.examples) / max(len(source.fit), 1))
        more = need if need > len(source.examples) else 2 * len(source.examples)
        return Status("too_few", f"Too few examples: {n} different sequences do not determine {count} (error "
                      f"{error:.1e} {on}, fitted {best.residual:.1e}; counting asks for {floor} at least). Try "
                      f"{more} different ones or more.{tail}", {**numbers, "needed": float(more)})
    if best.reason == "time":
        return Status("limit", f"Out of time with {count}: error {error:.1e} {on}. Raise seconds.{tail}", numbers)
    return _left(search, best, count, error, on, rest, noise, numbers, tail)


def _left(
    search: Search, best: Found, count: str, error: float, on: str, rest: bool | None, noise: float,
    numbers: dict[str, float], tail: str,
) -> Status:
    """What may be said where something is left that is more than rounding, and examples and time were enough."""
    whole, level = search.convex, f"(level {evidence.LEVEL:.0%})"
    decided = whole is not None and whole.free > 0
    below = ("" if whole is None or not decided else
             " Over operators of any rank the least that can be left of the labels fitted is "
             f"{whole.residual:.2e} of their spread, a convex problem that was solved; this one leaves "
             f"{best.residual:.2e}.")
    left = f"{error:.2e} of the labels' spread is left {on}"
    if whole is not None and decided and whole.residual <= search.floor:
        told = search.wanted.heads is not None
        why = (f"A linear layer meets them, of {heads_of(search.needed)} at least." if whole.determined else
               "A linear layer of more heads meets the labels fitted.")
        end = ("Ask for more heads, or heads='auto'." if told else
               "The search did not find its heads: another seed, or more examples.")
        return Status("not_realisable" if told else "limit", f"Not met by {count}: {left}. {why}{below} {end}"
                      f"{tail}", {**numbers, "residual_floor": error})
    below += _other_divisor(search)
    if rest is None:
        return Status("limit", f"Not met by {count}: {left}. Whether it depends on the inputs was not asked: time "
                      f"ran out.{below}{tail}", numbers)
    if rest:
        why = ("what no layer of these scores explains" if decided else
               "a layer that is not linear, or heads that the search did not find")
        return Status("not_realisable", f"Not met by {count}: {left}, and it depends on the inputs {level}: {why}."
                      f"{below}{tail}", {**numbers, "residual_floor": error})
    if error > NOTHING or error**2 > DOMINATES:
        return Status("not_realisable", f"Mostly unexplained: with {count}, {left}. No probe finds that it depends "
                      f"on the inputs {level}: it is noise, or something that the probes do not see.{below}{tail}",
                      {**numbers, "residual_floor": error})
    if decided and above(search, best) <= evidence.LEVEL:
        return Status("limit", f"Stopped with {count}: {left}, more than noise makes of it {level}. Heads are "
                      f"missing, or the search did not find its way: another seed, or more examples.{below}{tail}",
                      numbers)
    if error > APART * noise:
        return Status("not_realisable", f"Not met by {count}: {left}, far more than the {noise:.2e} of fitted "
                      f"ones, so it is not noise.{below}{tail}", {**numbers, "residual_floor": error})
    if not decided and (best.agreeing < 2 or best.reason == "limit"):
        ended = "the only random start that did" if best.reason != "limit" else "where steps still gained"
        return Status("limit", f"Stopped with {count}: {left}, {ended}. It is noise, or a search that did not find "
                      f"its way: another seed, or more examples.{tail}", numbers)
    sure = (f" What more unknowns would gain is no more than noise gives {level}, if it is Gaussian: so no number "
            "of heads does better by what can be told." if decided else
            f" {best.agreeing} of {len(best.starts)} random starts end there; that no others do better is not "
            "proved: the convex problem over all operators was not solved, which takes a smaller width or more "
            "examples.")
    return Status("noise", f"Stopped at the noise level: {count}, label noise estimated at {noise:.2e} of the "
                  f"labels' spread; error {error:.2e} {on}. No probe finds that what is left depends on the inputs "
                  f"{level}.{below}{sure} {MIXED}{tail}", {**numbers, "noise": noise})


def above(search: Search, best: Found) -> float:
    """The chance that noise alone puts the loss of these heads so far above that of the convex solution: an F test,
    for Gaussian noise of one size, on the sequences of the convex problem."""
    whole = search.convex
    assert whole is not None
    loss = evaluate(search.whole(), best.Theta).loss
    between = whole.rank * whole.outputs - search.source.size.unknowns(best.heads)
    if between <= 0:
        return 1.0
    F = max(loss - whole.loss, 0.0) / between / max(whole.loss / whole.free, 1e-300)
    return float(special.fdtrc(between, whole.free, F))


def determined(search: Search, best: Found) -> bool:
    """Whether the examples determine the operator among those of as many heads, near this one: Θ_i pushed by a
    random part of themselves, and refined, come back to the same operator. A direction that these examples do not
    show is not undone, and a random push has some of every direction."""
    problem = search.problem(best.heads)
    draw = torch.Generator().manual_seed(zlib.crc32(f"{search.wanted.seed}:linear:push".encode()))
    here = evaluate(problem, best.Theta)
    size = best.Theta.square().mean().sqrt()
    pushed = best.Theta + PUSH * size * normal(best.Theta, draw)
    away = evaluate(problem, pushed)
    back = gauss_newton(Free(problem), Full(pushed), generator=draw, limit=STEPS, damping=1e-6, inner=torch.float64,
                        pulse=search.clock.pulse).point
    far, near = (operator.distance((here.Theta, here.W), (point.Theta, point.W))[0] for point in (away, back))
    return near <= BACK * far


def _other_divisor(search: Search) -> str:
    """Whether the labels are met if scores are divided by the number of keys, or not, the other way than asked."""
    source = search.source
    if search.convex is None or (source.examples.mask == "none" and source.examples.padding is None):
        return ""  # one number of keys for all: the same layers
    other = LinearSource(source.examples, not source.mean, source.device)
    index = spaced(other.fit, min(len(other.fit), other.most()))
    if convex.solve(other.problem(index, other.d, torch.float64)).residual > search.floor:
        return ""
    asked = "not divided" if other.mean is False else "divided"
    return (f" With scores {asked} by the number of keys in sight a linear layer meets the labels: try "
            f"form={'linear/k' if other.mean else 'linear'!r}.")


def _fewest(m: int, least: int) -> str:
    if least >= m:
        return f"Fewer than {heads_of(m)} cannot compute it." if m > 1 else "No layer without heads computes it."
    return (f"Fewer than {heads_of(least)} cannot compute it; whether fewer than {m} can is not proved, and none "
            "were found.")


def wrong(search: Search, best: Found, error: float) -> int:
    """Of the sequences set aside, whose labels are large, how many the layer misses too, where it meets others."""
    aside = search.source.parts.aside
    if error > FITTED:
        return len(aside)
    most = max(APART * error, search.floor, FITTED)
    return sum(search.error(best, aside[i : i + 1]) > most for i in range(len(aside)))


def _tail(source: LinearSource, aside: int) -> str:
    data = source.examples
    said = "" if not aside else (f" {aside} of {len(data)} sequences have labels that stand far out in size; they "
                                 "were set aside.")
    blind = data.width - source.d
    return said + ("" if not blind else
                   f" {blind} of {data.width} token directions are never visited and stay unidentified.")


def _in_time(ask: Callable[[], bool]) -> bool | None:
    """The answer, None where time ran out first."""
    try:
        return ask()
    except OutOfTimeError:
        return None
