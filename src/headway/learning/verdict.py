"""From a candidate and the sequences nobody used to a layer, numbers and a status that is a true sentence.

The judge set is read here, once. What may be said:

recovered       its error is at the floor of the arithmetic, and the inputs determine every direction of the heads
fitted          its error is small, or at that floor and some directions of the heads are open
too_few         the sequences do not determine the heads: too few to count, or most of a head is open
limit           time or iterations ran out first
not_realisable  a probe finds that what is left depends on the inputs (evidence.py), or it outweighs what is
                explained, or nothing was learned
noise           none does
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import torch

from headway.core.convert import key_groups, ranks
from headway.core.counting import Size
from headway.core.devices import peak
from headway.core.factored import in_factors
from headway.core.layer import AttentionLayer
from headway.core.results import Fit, Status
from headway.core.sources import Answers
from headway.learning import evidence
from headway.learning.candidate import Candidate
from headway.learning.determined import Determined, dependence, determined, small
from headway.learning.gauss_newton import OutOfTimeError
from headway.learning.ladder import FITTED, floor_in_words
from headway.learning.loop import Loop
from headway.learning.source import CHECKED
from headway.runs.store import Stage

TIMES = 4  # as many sequences are asked for where those given were learned by heart
NOTHING = 0.9  # error of a fit that has learned nothing
DOMINATES = 0.5  # part of the labels' variance above which what is left outweighs what is explained
SAFE = 3  # times the counting floor of sequences that are enough
STALLED = 0.05  # error of a fit in factors below which one that stalled may still be near a layer
APART = 3.0  # times the noise estimated from the fitted rows: an error above is no noise
OPEN = 0.5  # part of a head's directions that may be open in a fit that is offered
GROUPS = 3  # of heads, each with a sentence of its own


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
        if best.rank is not None and best.out_rank is not None:
            layer = in_factors(layer, best.rank, best.out_rank)
    shown = replace(best, Theta=plain.augmented, W=plain.W, offset=plain.offset)
    known = _known(loop, shown, error) if error <= max(loop.floor, FITTED) else None
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
    on = f"on {len(judge)} sequence{'s' * (len(judge) != 1)} kept for the judgement"
    found = status(loop, best, layer.heads, error, on, structured, noise, size, len(named), cause, known)
    if found.kind == "noise" and small(shown):
        known = _known(loop, shown, error)
        found = replace(found, sentence=found.sentence + (_open(known) if known is not None else ""))
    stats["undetermined"] = None if known is None else list(known.flat)
    stats["perhaps_undetermined"] = None if known is None else known.more
    stats |= {"seconds": time.perf_counter() - loop.begun, "peak_memory": peak(source.device)}
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
    outliers: int, cause: str, known: Determined | None,
) -> Status:
    """What may be said of ``error``, measured ``on`` sequences nobody used."""
    count, source, floor = heads_of(heads), loop.source, loop.floor
    floor_words = floor_in_words(loop.examples.dtype)
    numbers = {"held_out_error": error, "arithmetic_floor": floor, "heads": float(heads)}
    tail = _tail(loop, outliers)
    if error <= floor:
        spare = dependence(source, best, loop.facts.rows_for(best.heads)) < FITTED
        if spare or (known is not None and _largely_open(known)):
            return Status("too_few", f"The examples are met exactly by {count}, but do not determine them: "
                          f"other heads do the same on these inputs.{_open(known)} Draw more varied ones.{tail}",
                          numbers)
        if known is not None and known.everything:
            return Status("recovered", f"Recovered to {floor_words}: {count}, relative error {error:.1e} {on}."
                          f"{tail}", numbers)
        return Status("fitted", f"Fitted to {floor_words}: {count}, relative error {error:.1e} {on}."
                      f"{_open(known)}{tail}", numbers)
    n, least = source.parts.distinct, size.floor(best.heads)
    # Fitted and judged sequences are of one kind: where others are missed by far more, these were learned by heart.
    apart = error > max(APART * noise, FITTED)
    by_heart = apart and best.sequences >= n and (n < SAFE * least or error > 1)
    if n < least or by_heart:
        need = SAFE * least if n < SAFE * least else 2 * n
        need = math.ceil(need * len(loop.examples) / max(len(source.fit), 1))  # with those kept for the judgement
        return Status("too_few", f"Too few examples: {n} different sequences do not determine {count} "
                      f"(error {error:.1e} {on}, fitted {best.residual:.1e}). At least {need} different ones are "
                      f"needed.{tail}", {**numbers, "needed": float(need)})
    if error <= FITTED:
        return Status("fitted", f"Fitted: {count}, relative error {error:.1e} {on}, above {floor_words} "
                      f"({floor:.0e}).{_open(known)}{_faint(loop, error)} What the inputs hardly show of the heads "
                      f"may be known less well than that.{tail}", numbers)
    if cause == "by heart":
        need = TIMES * len(loop.examples)
        return Status("too_few", f"Too few examples to find the heads: {n} different sequences are learned by "
                      f"heart, and others are missed (error {error:.1e} {on}, fitted {best.residual:.1e}). Try "
                      f"about {need}.{tail}", {**numbers, "needed": float(need)})
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
    if structured and best.reason == "stalled" and best.out_rank is not None and error < STALLED:
        # So close a fit in factors may lack a few more steps, as beside a saturated head: who knows.
        return Status("limit", f"Stalled with {count}: error {error:.1e} {on}, and what is left depends on the "
                      "inputs. It is not the output of such a layer, or the search did not find its way: another "
                      f"seed or more varied examples may help.{tail}", numbers)
    if structured or error > APART * noise:
        why = "it depends on the inputs" if structured else f"that is far more than the {noise:.2e} of fitted ones"
        return Status("not_realisable", f"Not realisable with {count}: {error:.2e} of the labels' spread is left "
                      f"{on}, and {why}, so it is not noise.{tail}", {**numbers, "residual_floor": error})
    if error > NOTHING:
        return Status("not_realisable", f"Nothing learned: with {count}, {error:.2f} of the labels' spread is left "
                      f"{on}, and no relation between labels and inputs was found.{tail}",
                      {**numbers, "residual_floor": error})
    if error**2 > DOMINATES:
        return Status("not_realisable", f"Mostly unexplained: with {count}, {error:.2f} of the labels' spread is "
                      f"left {on}, more than is explained. No probe finds that it depends on the inputs (level "
                      f"{evidence.LEVEL:.0%}): it is noise, or something that the probes do not see.{tail}",
                      {**numbers, "residual_floor": error})
    return Status("noise", f"Stopped at the noise level: {count}, label noise estimated at {noise:.2e} of "
                  f"the labels' spread; error {error:.2e} {on}. No probe finds that what is left depends on the "
                  f"inputs (level {evidence.LEVEL:.0%}).{tail}", {**numbers, "noise": noise})


def _known(loop: Loop, best: Candidate, error: float) -> Determined | None:
    """What the inputs determine of the heads, if there is time to ask."""
    if small(best):
        loop.deadline = math.inf  # it takes less than a second
    elif best.reason == "time":
        return None

    def compute() -> Stage:
        found = determined(loop.source, best, loop.generator("determined"), error <= loop.floor, loop.pulse)
        return {}, {**asdict(found), "flat": list(found.flat), "directions": list(found.directions)}

    try:
        _, info = loop.stage("determined", compute, best.heads, why="do the inputs determine the parameters?")
    except OutOfTimeError:
        return None
    of = {field.name: info[field.name] for field in fields(Determined)}
    return Determined(**{**of, "flat": tuple(of["flat"]), "directions": tuple(of["directions"])})


def _largely_open(known: Determined) -> bool:
    return any(flat > OPEN * of for flat, of in zip(known.flat, known.directions, strict=True))


def _open(known: Determined | None) -> str:
    """Which heads the inputs leave open, and in how many directions."""
    if known is None:
        return " Whether the inputs determine every direction of the heads was not asked: time ran out."
    groups: dict[tuple[int, int], list[int]] = {}
    for head, (flat, of) in enumerate(zip(known.flat, known.directions, strict=True), 1):
        if flat:
            groups.setdefault((flat, of), []).append(head)
    about, said = "" if known.exact else "about ", []
    for (flat, of), heads in groups.items():
        which = f"Head {heads[0]} is" if len(heads) == 1 else f"Heads {listed(heads)} are"
        of_them = f"any of {'its' if len(heads) == 1 else 'their'} {of} directions" if flat == of else (
            f"{about}{flat} of {'its' if len(heads) == 1 else 'their'} {of} directions"
            + (" each" if len(heads) > 1 else ""))
        said.append(f" {which} not determined in {of_them} by these inputs.")
    if len(said) > GROUPS:
        open_heads, counts = [head for heads in groups.values() for head in heads], [flat for flat, _ in groups]
        said = [f" {len(open_heads)} heads are not determined in {about}{min(counts)} to {max(counts)} of their "
                f"{max(known.directions)} directions by these inputs."]
    if known.more:
        which = "the other" if said else "all"
        said.append(f" Whether the inputs determine {which} directions of the heads is not settled: up to "
                    f"{known.more} of {sum(known.directions)} may be open.")
    return "".join(said)


def _faint(loop: Loop, error: float) -> str:
    """Token directions so small that the error could hide what the heads do with them."""
    frame = loop.source.frame
    assert frame is not None
    sizes = torch.linalg.svdvals(frame.out.cpu())
    faint = int((sizes < error * sizes[0]).sum())
    return "" if not faint else (f" {faint} of {loop.examples.width} token directions vary so little that the "
                                 "error may hide what the heads do with them.")


def listed(numbers: list[int]) -> str:
    """1, 2 and 5."""
    words = [str(n) for n in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


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
