"""From examples of a layer whose form is known to all its factors: descent, cuts and refinement, a verdict.

Every head begins with keys of its own, and there are more heads than needed. The first attempt has few heads of a
moderate size; where it does not reach the labels, the next ones have more, larger ones or another start. A run
keeps the factors that every descent and every refinement ended in, and the error of every form that was compared.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from headway.core import checks
from headway.core.counting import Size
from headway.core.devices import normal, peak
from headway.core.examples import Examples
from headway.core.factored import FactoredLayer
from headway.core.forms import Form, Sight
from headway.core.results import Fit, Status
from headway.core.sources import Answers
from headway.learning import evidence
from headway.learning.formed import Formed, FormedModel, chain_of
from headway.learning.formed_evidence import depends
from headway.learning.formed_groups import grouped
from headway.learning.formed_refine import FormCandidate, refine_form
from headway.learning.formed_source import FormSource
from headway.learning.formed_start import form_descended, template
from headway.learning.gauss_newton import OutOfTimeError, gauss_newton
from headway.learning.ladder import FITTED, floor_in_words, floor_of
from headway.learning.source import spaced
from headway.learning.starts.descent import LOOK, SMALL
from headway.learning.starts.descent import STEPS as LONGEST
from headway.learning.verdict import SAFE, STALLED, heads_of
from headway.linalg.thin import features
from headway.runs.store import Run, Stage

FIRST = 8  # heads of the first attempt, where their number is not given
MOST = 64  # heads of the last one
WIDE = 512  # width from which twice as many heads come first
WIDE_HEAD = 64  # size of a head of the first attempt, at most
SPARE = 1.5  # times the heads that are given, to begin with
HOPELESS = 0.9  # error of a descent that is not refined: nothing was found
AGAIN = 3  # starts with as many heads as there are different patterns, where heads share some
SAME = 1e-2  # mean distance of patterns (2 at most) below which they count as the same
LOOKED = 32  # sequences on which they are compared
PUSH = 1e-3  # part of the factors by which they are pushed to see whether they come back
BACK = 1e-4  # part of the change that may be left then
STEPS = 15  # of Gauss–Newton on the way back
GRACE = 1.0  # seconds that this, and a look at what is left, may take in any case
ROUGH = (torch.bfloat16, torch.float16)  # labels whose floor is so high that another form may be below it

Progress = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Wanted:
    """What the caller asked for, resolved."""

    heads: int | None
    size: int | None
    seconds: float | None
    seed: int


class _CutError(Exception):
    """A stage whose time ran out: what it reached is used, but not kept."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage


class Clock:
    """When to stop, who hears of progress, and what was done so far, kept in a run where there is one."""

    def __init__(self, seconds: float | None, progress: Progress | None, run: Run | None = None) -> None:
        self.begun = time.perf_counter()
        self.deadline = math.inf if seconds is None else self.begun + seconds
        self.progress, self.run = progress, run
        self.now: dict[str, Any] = {"stage": "frame", "heads": 0, "why": "tokens are centred and scaled"}
        self.trace: list[dict[str, Any]] = []
        self.curve: list[tuple[float, float]] = []  # of the stage under way: when, and the error then
        self.cut = False  # whether a stage was: what follows is made of less than it should be, and not kept either

    def stage(
        self, kind: str, heads: int, compute: Callable[[], Stage], why: str, most: int | None = None
    ) -> Stage:
        """What ``compute`` finds, as the next stage of this kind: read back where the run has it. Its random
        numbers must be its own: those of later stages do not depend on whether it was computed or read. why: it
        was chosen; most: steps that it reports at most."""
        number = 1 + sum(event["stage"].rpartition("-")[0] == kind for event in self.trace)
        name = f"{kind}-{number}"
        self.now = {"stage": name, "heads": heads, "why": why, "most": most,
                    "before": self.trace[-1] if self.trace else None}
        if self.progress is not None:
            self.progress({**self.now, "residual": None})
        begun, self.curve = self.spent, []

        def timed() -> Stage:
            tensors, info = compute()
            curve = [[round(at - begun, 4), float(f"{left:.4g}")] for at, left in self.curve]
            info = {**info, "seconds": self.spent - begun, **({"curve": curve} if curve else {})}
            if info.get("reason") == "time":
                raise _CutError((tensors, info))
            return tensors, info

        try:
            tensors, info = timed() if self.run is None or self.cut else self.run.stage(name, timed)
        except _CutError as cut:
            self.cut, (tensors, info) = True, cut.stage
        except OutOfTimeError:
            self.cut = True
            raise
        self.trace.append({"stage": name, "heads": heads, "why": why, **info})
        return tensors, info

    def pulse(self) -> None:
        if time.perf_counter() > self.deadline:
            raise OutOfTimeError

    def report(self, residual: float | None) -> None:
        self.pulse()
        if residual is not None and math.isfinite(residual):
            self.curve.append((self.spent, residual))
        if self.progress is not None:
            self.progress({**self.now, "residual": residual})

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.begun

    @property
    def left(self) -> bool:
        """Whether there is time for more."""
        return time.perf_counter() < self.deadline


def learn_form(
    examples: Examples, form: Form, wanted: Wanted, device: torch.device | str | None = None,
    progress: Progress | None = None, clock: Clock | None = None, source: FormSource | None = None,
) -> Fit:
    """All factors of a layer of this form, and what may be said of them."""
    clock = clock or Clock(wanted.seconds, progress)
    form = with_mask(form, examples)
    source = FormSource(examples, form, device) if source is None else source.of_form(form)
    best = search(source, form, wanted, clock)
    return conclude(source, best, wanted, clock)


def with_mask(form: Form, examples: Examples) -> Form:
    """A form that looks back only where the examples say so."""
    if examples.mask == "causal" and not form.sight.causal:
        if form.sight != Sight():
            checks.refuse("form.sight", "causal, as the examples' mask", form.sight.describe(),
                          "Sight(causal=True, ...), or +causal behind --form")
        return replace(form, sight=Sight(causal=True))
    return form


def attempts(form: Form, wanted: Wanted, width: int) -> Iterator[tuple[int, int, int]]:
    """Heads, size and a number for the start of one attempt after the other."""
    size = first_size(form, wanted, width)
    if wanted.heads is not None:
        heads = math.ceil(SPARE * wanted.heads) + 1
        yield heads, size, 0
        yield wanted.heads, size, 10
        sizes = [size] if wanted.size is not None else [min(2 * size, most_size(width)), size]
        yield from ((heads + j * wanted.heads, q, j) for j, q in enumerate(sizes, 1))
        yield from ((2 * heads, sizes[-1], 3 + j) for j in range(2))
        return
    heads = FIRST * (2 if width >= WIDE else 1)
    # A narrow layer has few heads, each with much of the width: their size is wrong before their number is.
    sizes_first = width <= SMALL and wanted.size is None
    for j in range(5):
        yield heads, size, j
        if not sizes_first or j % 2 == 1:
            heads = min(2 * heads, MOST)
        if wanted.size is None and (j % 2 == 0) == sizes_first:
            size = min(2 * size, most_size(width))


def most_size(width: int) -> int:
    return max(2, 1 << (width.bit_length() - 1))


def first_size(form: Form, wanted: Wanted, width: int) -> int:
    """The size given, or that of given frequencies, or a power of two about a quarter of the width, 64 at most as
    in most models: planes of smaller powers are among its planes."""
    if wanted.size is not None:
        return wanted.size
    if form.rotary is not None and form.rotary.frequencies is not None:
        return 2 * len(form.rotary.frequencies)
    size = min(WIDE_HEAD, max(4, 1 << (max(width, 4) // 4 - 1).bit_length()))
    if form.rotary is not None and form.rotary.turned is not None:
        size = max(size, form.rotary.turned)
    return min(size, most_size(width))


def search(
    source: FormSource, form: Form, wanted: Wanted, clock: Clock, todo: Iterable[tuple[int, int, int]] | None = None
) -> FormCandidate:
    """The best of the attempts, those of ``todo`` if given; the first that meets other sequences ends it."""
    data = source.examples
    best: FormCandidate | None = None
    rough: tuple[float, dict[str, Tensor], Form] | None = None
    todo = list(attempts(form, wanted, data.width) if todo is None else todo)
    again, told, met = AGAIN, wanted.heads or 1, met_of(data)
    try:
        while todo:
            heads, size, number = todo.pop(0)
            start = f"{wanted.seed}:{number}:{heads}:{size}"
            out_size = min(size, data.out_width)
            here = source.of_form(template(form, heads, data.width, size, out_size))
            # The first is begun however little time there is: there must be something to end with.
            tensors, down = descent(here, heads, size, out_size, start, clock, hurried=rough is not None)
            if rough is None or down["error"] < rough[0]:
                rough = down["error"], tensors, here.form
            if down["error"] > HOPELESS or not math.isfinite(down["error"]):
                if down["reason"] == "time":
                    raise OutOfTimeError
                continue
            found = refinement(here, tensors, start, told, wanted.size is None, clock)
            if best is None or found.error < best.error or (
                    found.error < met and (found.heads, found.error) < (best.heads, best.error)):
                best = found
            if found.reason == "time" or down["reason"] == "time":
                raise OutOfTimeError  # also where an earlier attempt is the better one
            different = patterns(here, best)
            if best.error < met and different < best.heads and again:
                # Heads that share a pattern but not their gates are not joined; so few may be found at once.
                again, told = again - 1, max(different, wanted.heads or 1)
                todo.insert(0, (math.ceil(SPARE * told) + 1, size, 100 + again))
            elif best.error < met:
                break
    except OutOfTimeError:
        best = None if best is None else replace(best, reason="time")
    if best is None:
        assert rough is not None
        best = refine_form(source.of_form(rough[2]), rough[1], generator=torch.Generator().manual_seed(0),
                           least=wanted.heads or 1, sizes=False, limit=0)
        best = replace(best, reason="time" if clock.spent > (wanted.seconds or math.inf) else best.reason)
    return best


def met_of(data: Examples) -> float:
    """Error from which labels count as met, and nothing else is tried: rounded ones leave half a unit."""
    return max(FITTED, torch.finfo(data.dtype).eps / 2)


def descent(
    here: FormSource, heads: int, size: int, out_size: int, start: str, clock: Clock, hurried: bool
) -> Stage:
    """Factors in working coordinates after a descent from a random start, as a stage."""

    def compute() -> Stage:
        down = form_descended(here, heads, size, out_size, _draw(start), report=clock.report,
                              pulse=clock.pulse if hurried else None)
        return dict(down.factors.tensors), {
            "size": size, "error": down.error, "fitted": down.fitted, "steps": down.steps, "reason": down.reason}

    why = ("the attempts before did not meet the labels: other heads, or another start" if hurried else
           "more heads than there should be find theirs more easily")
    tensors, info = asking(here, clock, "descent", heads, compute, why)
    return here.entered({name: value.to(here.device).double() for name, value in tensors.items()}, True), info


def asking(
    here: FormSource, clock: Clock, kind: str, heads: int, compute: Callable[[], Stage], why: str,
    steps: int = LONGEST,
) -> Stage:
    """A stage that may ask a black box: what it asked counts, whether it is computed or read back."""
    before = here.tally.asked

    def counted() -> Stage:
        tensors, info = compute()
        return tensors, {**info, "asked": here.tally.asked - before}

    found = clock.stage(kind, heads, counted, why, steps // LOOK)
    here.tally.asked = before + found[1]["asked"]
    return found


def refinement(
    here: FormSource, tensors: dict[str, Tensor], start: str, least: int, sizes: bool, clock: Clock
) -> FormCandidate:
    """What the descent ends in, as a stage."""

    def compute() -> Stage:
        said: list[str] = []
        found = refine_form(here, tensors, generator=_draw(f"{start}:refine"), least=least,
                            sizes=sizes, report=clock.report, pulse=clock.pulse, log=said.append)
        numbers = {name: value for name, value in vars(found).items() if name != "tensors"}
        return found.tensors, {**numbers, "heads": found.heads, "cuts": said}

    why = "the descent came near: heads too many are joined, the rest goes to the floor"
    refined, info = clock.stage("refine", len(tensors["query"]), compute, why)
    numbers = {part.name: info[part.name] for part in fields(FormCandidate) if part.name != "tensors"}
    return FormCandidate({name: value.to(here.device) for name, value in refined.items()}, **numbers)


def _draw(words: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(words.encode()))


def patterns(source: FormSource, best: FormCandidate) -> int:
    """How many different patterns the heads have. A head for which any would do, since it hands on the same of
    every key, has that of another."""
    shape = Formed.of({name: value for name, value in best.tensors.items() if name not in ("out", "offset")},
                      source.form)
    chain = chain_of(source.rows(source.select[:LOOKED], torch.float64), shape)
    P, V = chain.P, chain.V @ best.tensors["out"].double()
    whole = (P @ V).square().sum((0, 2, 3)).sqrt()

    def same(i: int, j: int) -> bool:
        apart = P[:, i] - P[:, j]
        return (float(apart.abs().sum(2).mean()) <= SAME
                or float((apart @ V[:, i]).norm()) <= SAME * float(whole[i]))

    kinds: list[int] = []
    for i in sorted(range(shape.heads), key=lambda i: -float((V[:, i] - V[:, i].mean(1, keepdim=True)).norm())):
        if not any(same(i, j) for j in kinds):
            kinds.append(i)
    return len(kinds)


def layer_of(source: FormSource, best: FormCandidate) -> FactoredLayer:
    """The layer in the caller's coordinates."""
    tensors = source.left(best.tensors)
    own = {name: tensors[name] for name in source.form.tensors()}
    form = source.form.with_tensors({**own, **({"cap": tensors["cap"].abs()} if "cap" in tensors else {})})
    return FactoredLayer(tensors["query"], tensors["key"], tensors["value"], tensors["out"], tensors["offset"],
                         form, cross=source.examples.key_width is not None)


def _entered(source: FormSource, layer: FactoredLayer) -> dict[str, Tensor]:
    """A layer's factors in working coordinates, every head with keys and values of its own."""
    assert source.frame is not None
    t, share = layer.tensors(), layer.heads // layer.groups
    label = 0.0 if source.frame.label is None else source.frame.label
    t |= {name: t[name].repeat_interleave(share, 0) for name in ("key", "value")}
    t |= {"out": t["out"] / source.frame.scale, "offset": (t["offset"] - label) / source.frame.scale}
    return source.entered(t)


def conclude(source: FormSource, best: FormCandidate, wanted: Wanted, clock: Clock) -> Fit:
    """The layer, and what may be said of it from sequences that nobody used."""
    data = source.examples
    source = source.of_form(Formed.of(best.tensors, source.form).form)
    m, _, q = best.tensors["query"].shape
    p = best.tensors["value"].shape[2]
    source = source.of_form(template(source.form, m, data.width, q, p))
    error = source.misses(source.judge, best.tensors)
    floor = floor_of(data.dtype)
    layer = layer_of(source, best).canonical()
    shared = grouped(layer, max(1e-9, 1e3 * error)) if error < FITTED else layer
    if shared.groups < m:
        # Keys are shared to within a tolerance, and the error is that of the layer which is handed over.
        with_them = source.misses(source.judge, _entered(source, shared))
        if with_them <= (floor if error <= floor else FITTED):
            layer, error = shared, with_them
    rest = None
    if (error > max(floor, FITTED) and best.reason != "time") or (error <= floor and data.dtype in ROUGH):
        draw = torch.Generator().manual_seed(zlib.crc32(f"{wanted.seed}:probes".encode()))
        rest = _in_time(clock, lambda pulse: depends(source, best, draw, pulse))
    known = None
    if error <= floor and not rest:
        known = _in_time(clock, lambda pulse: determined(source, best, wanted.seed, pulse))
    aside = sorted(int(i) for i in source.parts.aside)
    if aside:
        clock.trace.append({"stage": "outliers", "heads": m, "outliers": aside, "seconds": 0.0})
    size = Size(data.width, data.out_width, data.length, "causal" if source.form.sight.causal else "none",
                min(q, data.width), p)
    stats: dict[str, Any] = {
        "heads": m, "groups": layer.groups, "rank": q, "out_rank": p, "form": layer.form.describe(),
        "held_out_error": error, "fitted_error": best.residual, "examples": len(data),
        "held_out": len(source.judge), "selected_by": len(source.select), "used": best.sequences,
        "floor": size.floor(m), "determined": known, "unidentified_directions": sum(_unseen(source)),
        "depends": rest, "outliers": len(aside),
        "products": sum(int(event.get("products", 0)) for event in clock.trace),
        "out_of_time": best.reason == "time"}
    if isinstance(data, Answers):
        stats["asked"] = source.tally.asked
    status = verdict(source, best, error, floor, known, rest, size, layer)
    stats |= {"seconds": clock.spent, "peak_memory": peak(source.device)}
    return Fit(layer, status, stats, tuple(clock.trace))


def verdict(
    source: FormSource, best: FormCandidate, error: float, floor: float, known: bool | None, rest: bool | None,
    size: Size, layer: FactoredLayer,
) -> Status:
    """What may be said of ``error``; rest: whether what is left depends on the inputs, None where nobody asked."""
    judged = len(source.judge)
    count, on = heads_of(best.heads), f"on {judged} sequence{'s' * (judged != 1)} kept for the judgement"
    count, tail = f"{count} ({layer.form.describe()})", _tail(source)
    numbers = {"held_out_error": error, "arithmetic_floor": floor, "heads": float(best.heads)}
    floor_words = floor_in_words(source.examples.dtype)
    if error <= floor and not rest:
        told = f"to {floor_words}: {count}, relative error {error:.1e} {on}."
        if known:
            return Status("recovered", f"Recovered {told} Pushed a little, the factors come back to the same heads."
                          f"{tail}", numbers)
        why = ("Whether these inputs determine the heads was not asked: time ran out." if known is None else
               "Pushed a little, the factors do not come back to the same heads: these inputs do not determine all "
               "of them.")
        return Status("fitted", f"Fitted {told} {why}{tail}", numbers)
    if error <= FITTED:
        return Status("fitted", f"Fitted: {count}, relative error {error:.1e} {on}, above {floor_words} "
                      f"({floor:.0e}).{tail}", numbers)
    n, least = source.parts.distinct, size.floor(best.heads)
    if n < least or (error > 3 * best.residual and best.sequences >= n and n < SAFE * least):
        need = math.ceil(SAFE * least * len(source.examples) / max(len(source.fit), 1))
        return Status("too_few", f"Too few examples: {n} different sequences do not determine {count} (error "
                      f"{error:.1e} {on}, fitted {best.residual:.1e}). At least {need} different ones are needed."
                      f"{tail}", {**numbers, "needed": float(need)})
    if best.reason == "time":
        return Status("limit", f"Out of time with {count}: error {error:.1e} {on}. Raise seconds.{tail}", numbers)
    level = f"(level {evidence.LEVEL:.0%})"
    if rest is None:
        why = "It is noise, another form, or a search that did not find its way: which of these was not asked."
    elif rest:
        why = (f"It depends on the inputs {level}, so it is not noise alone: the labels are of another form or of "
               "no layer, or the search did not find its way.")
    else:
        why = (f"No probe finds that it depends on the inputs {level}: it is noise, or something that the probes "
               "do not see.")
    if error < STALLED:
        return Status("limit", f"Stalled with {count}: {error:.1e} of the labels' spread is left {on}. {why}{tail}",
                      numbers)
    return Status("not_realisable", f"Not met by {count}: {error:.2e} of the labels' spread is left {on}. {why}"
                  f"{tail}", {**numbers, "residual_floor": error})


def _unseen(source: FormSource) -> tuple[int, int]:
    """Directions of the tokens that the examples never visit, and of those of the keys where they are others."""
    assert source.frame is not None
    lost = [frame.out.shape[0] - frame.out.shape[1] for frame in (source.frame, source.key_frame)]
    return lost[0], lost[1] if source.examples.key_width is not None else 0


def _tail(source: FormSource) -> str:
    data, aside = source.examples, len(source.parts.aside)
    said = "" if not aside else (f" {aside} of {len(data)} sequences have labels that stand far out in size; they "
                                 "were set aside and are named in the trace.")
    return said + "".join(f" {blind} of {width} {of}token directions are never visited and stay unidentified."
                          for blind, width, of in zip(_unseen(source), (data.width, data.key_width),
                                                      ("", "the keys' "), strict=True) if blind)


def _in_time(clock: Clock, ask: Callable[[Callable[[], None]], bool]) -> bool | None:
    """The answer, None where time ran out first. A little time is always taken for it."""
    end = max(clock.deadline, time.perf_counter() + GRACE)

    def pulse() -> None:
        if time.perf_counter() > end:
            raise OutOfTimeError

    try:
        return ask(pulse)
    except OutOfTimeError:
        return None


def determined(
    source: FormSource, best: FormCandidate, seed: int, pulse: Callable[[], None] | None = None
) -> bool:
    """Whether the examples determine the heads: factors pushed by a random part of themselves and refined come
    back to the same answers, and every head to its pattern and its part of them, on tokens of every direction that
    the examples have. A change that these examples do not show is not undone, and a random push has some of every
    change."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{seed}:push".encode()))
    shape = Formed.of({name: value for name, value in best.tensors.items() if name not in ("out", "offset")},
                      source.form)
    model = FormedModel(source.problem(spaced(source.fit, min(best.sequences, len(source.fit))), shape.heads,
                                       torch.float64))
    sizes = {name: part.square().mean().sqrt() for name, part in shape.tensors.items()}
    push = shape.gathered({name: sizes[name] * normal(part, draw) * (shape.heads if part.ndim < 2 else 1)
                           for name, part in shape.tensors.items()})
    begun = shape.moved(PUSH * push)
    there = gauss_newton(model, begun, generator=draw, limit=STEPS, damping=1e-6, inner=torch.float64,
                         pulse=pulse)
    first = next(iter(source.stream(source.fit[:64], shape.heads, torch.float64)))
    rows = replace(first, **{name: _every_direction(getattr(first, name), draw) for name in ("X", "Z")
                             if getattr(first, name) is not None})

    def said(at: Formed) -> list[Tensor]:
        """Answers, patterns head by head, and what each head adds apart from a constant: those are any head's."""
        point, chain = model.evaluate(at), chain_of(rows, at)
        H = features(rows, chain.H, True)
        parts = chain.H @ point.out.view(at.heads, at.p, -1)
        return [H @ torch.cat([point.out, point.offset.unsqueeze(0)]), *chain.P.unbind(1),
                *(parts - parts.mean((0, 2), keepdim=True)).unbind(1)]

    truth, away, back = said(shape), said(begun), said(there.shape)
    return all(float((b - t).norm()) <= BACK * float((a - t).norm())
               for t, a, b in zip(truth, away, back, strict=True))


def _every_direction(X: Tensor, draw: torch.Generator) -> Tensor:
    return torch.cat([normal(X[..., :-1], draw), X[..., -1:]], dim=2)

