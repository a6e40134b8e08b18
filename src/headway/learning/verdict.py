"""From a candidate and the sequences nobody used to a layer, numbers and a status that is a true sentence.

The judge set is read here, once. What may be said:

recovered       its error is at the floor of the arithmetic, and the inputs determine the heads
fitted          its error is small, though not at that floor
too_few         the sequences do not determine the heads
limit           time or iterations ran out first
not_realisable  a probe finds that what is left depends on the inputs (evidence.py), or nothing was learned
noise           none does
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np

from headway.core.convert import key_groups, ranks
from headway.core.counting import Size
from headway.core.layer import AttentionLayer
from headway.core.results import Fit, Status
from headway.core.sources import Answers
from headway.learning import evidence
from headway.learning.candidate import Candidate
from headway.learning.ladder import FITTED
from headway.learning.loop import Loop
from headway.learning.source import CHECKED

NOTHING = 0.9  # error of a fit that has learned nothing
APART = 3.0  # times the noise estimated from the fitted rows: an error above is no noise


def conclude(loop: Loop, best: Candidate, structured: bool, cause: str = "") -> Fit:
    """The layer in the caller's coordinates, and what may be said of it."""
    source, n = loop.source, len(loop.examples)
    assert source.frame is not None
    named = _outliers(loop, best)
    judge = source.judge[~np.isin(source.judge, named)]
    judge = judge if len(judge) else source.judge
    error = source.error(judge, best.Theta, best.W, best.offset)
    # Equal and empty heads are told in working coordinates, where sizes mean something.
    plain = AttentionLayer(best.Theta[:, :-1], best.W, best.Theta[:, -1], best.offset, loop.examples.mask)
    plain = plain.canonical(1e-12)
    assert plain.offset is not None
    layer = source.frame.leave(plain.augmented, plain.W, plain.offset, loop.examples.mask)
    layer = without_empty(layer, max(error, loop.floor), source.frame.scale)
    if best.out_rank is not None and error < FITTED:
        # Read off a rough estimate; now they can be counted.
        exact = ranks(layer, max(1e-9, 1e3 * error))
        best = replace(best, rank=exact[0], out_rank=exact[1])
    size = replace(loop.size, rank=best.rank, out_rank=best.out_rank)
    free = max(best.equations - size.unknowns(best.heads), 1)
    noise = best.residual * math.sqrt(best.equations / free)
    stats: dict[str, Any] = {
        "heads": layer.heads, "rank": best.rank, "out_rank": best.out_rank, "held_out_error": error,
        "fitted_error": best.residual, "noise": noise, "examples": n, "held_out": len(source.judge),
        "selected_by": len(source.select), "used": best.sequences, "outliers": len(named),
        "floor": size.floor(best.heads), "unknowns": size.unknowns(best.heads),
        "unidentified_directions": loop.examples.width - source.d,
        "products": sum(int(event.get("products", 0)) for event in loop.trace),
        "out_of_time": best.reason == "time"}
    if best.rank is not None and error < FITTED:
        groups = [group for group in key_groups(layer) if len(group) > 1]
        if groups:
            stats["key_groups"] = groups
    if isinstance(loop.examples, Answers):
        stats["asked"] = loop.asked_more
    on = f"on {len(judge)} sequences kept for the judgement"
    found = status(loop, best, layer.heads, error, on, structured, noise, size, len(named), cause)
    stats["seconds"] = time.perf_counter() - loop.begun
    return Fit(layer, found, stats, tuple(loop.trace))


def _outliers(loop: Loop, best: Candidate) -> np.ndarray:
    """Sequences whose labels stand far out from what the fit says, of all parts; kept in the trace."""
    parts = loop.source.parts
    found = evidence.outliers(loop.source, best, loop.floor, np.concatenate([parts.judge, parts.aside]))
    if len(parts.aside) or len(found):
        every = np.concatenate([parts.fit, parts.select, parts.judge, parts.aside])
        if len(every) <= CHECKED:
            found = evidence.outliers(loop.source, best, loop.floor, every)
        loop.trace.append({"stage": "outliers", "outliers": sorted(int(i) for i in found), "seconds": 0.0})
    return found


def status(
    loop: Loop, best: Candidate, heads: int, error: float, on: str, structured: bool, noise: float, size: Size,
    outliers: int, cause: str,
) -> Status:
    """What may be said of ``error``, measured ``on`` sequences nobody used."""
    count, source, floor = heads_of(heads), loop.source, loop.floor
    numbers = {"held_out_error": error, "arithmetic_floor": floor, "heads": float(heads)}
    tail = _tail(loop, outliers)
    if error <= floor:
        spare = evidence.dependence(source, best, loop.facts.rows_for(best.heads)) < FITTED
        if spare or not _determined(loop, best):
            return Status("too_few", f"The examples are met exactly by {count}, but do not determine them: "
                          "other attention matrices do the same on these inputs. Draw more varied ones." + tail,
                          numbers)
        return Status("recovered", f"Recovered to the floor of the arithmetic: {count}, relative error "
                      f"{error:.1e} {on}.{tail}", numbers)
    n, least = source.parts.distinct, size.floor(best.heads)
    need = math.ceil(3 * least * len(loop.examples) / max(len(source.fit), 1))
    if n < least or (error > APART * noise and best.sequences >= n and n < 3 * least):
        return Status("too_few", f"Too few examples: {n} different sequences do not determine {count} "
                      f"(error {error:.1e} {on}, fitted {best.residual:.1e}). About {need} sequences are "
                      f"needed.{tail}", {**numbers, "needed": float(need)})
    if error <= FITTED:
        return Status("fitted", f"Fitted: {count}, relative error {error:.1e} {on}, above the floor of the "
                      f"arithmetic ({floor:.0e}). What the inputs hardly show of the heads may be known less well "
                      f"than that.{tail}", numbers)
    if cause in evidence.CAUSES:
        return Status("not_realisable", f"Not the labels of such a layer. {evidence.CAUSES[cause]} With {count}, "
                      f"{error:.2e} of their spread is left {on}.{tail}", {**numbers, "residual_floor": error})
    if best.reason == "time" and structured:
        return Status("limit", f"Out of time with {count}: error {error:.1e} {on}. What is left depends on the "
                      "inputs: more seconds may find more heads, or it is not the output of such a layer." + tail,
                      numbers)
    if best.reason == "time":
        return Status("limit", f"Out of time with {count}: error {error:.1e} {on}. Raise seconds.{tail}", numbers)
    if best.reason == "limit":
        return Status("limit", f"Stopped at the limit of {loop.asked.limit} iterations with {count}: error "
                      f"{error:.1e} {on}, still falling. Raise limit.{tail}", numbers)
    if structured or error > APART * noise:
        why = "it depends on the inputs" if structured else f"that is far more than the {noise:.2e} of fitted ones"
        return Status("not_realisable", f"Not realisable with {count}: {error:.2e} of the labels' spread is left "
                      f"{on}, and {why}, so it is not noise.{tail}", {**numbers, "residual_floor": error})
    if error > NOTHING:
        return Status("not_realisable", f"Nothing learned: with {count}, {error:.2f} of the labels' spread is left "
                      f"{on}, and no relation between labels and inputs was found.{tail}",
                      {**numbers, "residual_floor": error})
    return Status("noise", f"Stopped at the noise level: {count}, label noise estimated at {noise:.2e} of "
                  f"the labels' spread; error {error:.2e} {on}. No probe finds that what is left depends on the "
                  f"inputs (level {evidence.LEVEL:.0%}).{tail}", {**numbers, "noise": noise})


def _determined(loop: Loop, best: Candidate) -> bool:
    def compute() -> Any:
        return {}, {"least_curvature": evidence.determined(loop.source, best, loop.generator("determined"))}

    if best.out_rank is not None or isinstance(loop.asked.rank, int):
        return evidence.determined(loop.source, best, loop.generator("determined")) > evidence.FLAT
    _, info = loop.stage("determined", compute, best.heads)
    return bool(info["least_curvature"] > evidence.FLAT)


def _tail(loop: Loop, outliers: int) -> str:
    blind = loop.examples.width - loop.source.d
    tail = ""
    if outliers:
        tail += (f" {outliers} of {len(loop.examples)} sequences have labels that stand far out; they were set "
                 "aside and are named in the trace.")
    if blind:
        tail += f" {blind} of {loop.examples.width} token directions are never visited and stay unidentified."
    return tail


def without_empty(layer: AttentionLayer, accuracy: float, scale: float) -> AttentionLayer:
    """Without a key bias or an offset that is zero to the accuracy reached at the floor of the arithmetic."""
    if accuracy > 1e-5:
        return layer
    assert layer.key_bias is not None and layer.offset is not None
    if float(layer.key_bias.norm()) < 1e3 * accuracy * float(layer.Theta.norm()):
        layer = replace(layer, key_bias=None)
    if float(layer.offset.norm()) < 1e3 * accuracy * scale * math.sqrt(layer.out_width):  # type: ignore[union-attr]
        layer = replace(layer, offset=None)
    return layer


def heads_of(m: int) -> str:
    return f"{m} head" + ("s" if m != 1 else "")
