"""Which form is it? Cheap tests first, then the errors that descents leave.

A black box is asked (questions.py), plain examples are looked at (clues.py): what a query sees, and which parts the
form may and must have. Where that settles the form, it is learned like one that is given. Else the simplest form
that is left is tried to its end, once; where the labels are not met, short descents compare the forms with one part
more, the one that leaves least is tried, and so on as long as the error falls markedly.

What can be read off a fit is not compared: bases of turns (of those in use, from the same factors), the value of a
cap, whether a table of offsets is a slope or T5's buckets. Which coordinates make a plane (halves or pairs) is not
seen in any answer: both layouts compute the same functions, with columns in another order.

What was asked and looked at, every descent and every refinement is a stage of the clock, kept in a run: one that is
resumed neither asks nor descends again for what it has.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headway.core.examples import Examples
from headway.core.forms import Cap, Form, Gated, Normed, Sight, Sink
from headway.core.positions import OffsetTable, Rotary, Slope
from headway.core.results import Fit
from headway.core.sources import Answers
from headway.learning.clues import Clues, clues_of
from headway.learning.formed_learn import (
    FIRST,
    SPARE,
    Clock,
    Progress,
    Wanted,
    asking,
    attempts,
    conclude,
    first_size,
    met_of,
    most_size,
    refinement,
    search,
)
from headway.learning.formed_read import read_off
from headway.learning.formed_refine import FormCandidate
from headway.learning.formed_source import FormSource
from headway.learning.formed_start import form_descended, template
from headway.learning.gauss_newton import OutOfTimeError
from headway.learning.questions import clues_from
from headway.learning.starts.descent import WIDE
from headway.learning.verdict import STALLED
from headway.runs.store import Stage

BASES = (100.0, 100_000.0, 500_000.0, 1_000_000.0)  # of turns, in use beside 10,000
REACH = 32  # offsets at most on either side of a table that has one number for each
CAPPED = 10.0  # where a cap begins
SUNK = -1.0  # where a sink begins beside heads that were fitted without
SHORT = 600  # steps of a descent that compares forms
MARKED = 0.8  # part of the error that a further part of a form must leave at most
DECISIVE = 0.25  # part of the error from which no other part is looked at
AS_WELL = 1.1  # times the least error that counts as equally good
PARTS = 3  # added one after the other, at most
PLACED = ("rotary", "offsets")


def learn_some_form(
    examples: Examples, wanted: Wanted, device: torch.device | str | None = None, progress: Progress | None = None,
    clock: Clock | None = None,
) -> Fit:
    """The form first, then all factors; ``stats`` says what was compared and what else would do."""
    clock = clock or Clock(wanted.seconds, progress)
    clues = clues_in(examples, clock)
    source = FormSource(examples, Form(sight=clues.sights[0]), device)
    source.free_cap, source.tally.asked = True, clues.asked
    way = Way(source, clues, wanted, clock)
    with suppress(OutOfTimeError):
        way.go()
    if not way.met and (clock.left or way.best is None):
        more = list(attempts(way.form, wanted, examples.width))[0 if way.best is None else 1 :]
        way.take(way.form, search(source.of_form(way.form), way.form, wanted, clock, more))
        with suppress(OutOfTimeError):
            way.read()
    assert way.best is not None
    form, found = way.best
    if not (way.met or clock.left):
        found = replace(found, reason="time")
    fit = conclude(source.of_form(form), found, wanted, clock)
    also = as_well(form, way, examples.length)
    words = " ".join([fit.status.sentence, *how(clues, way), f"{also[0].upper()}{also[1:]}."])
    return replace(fit, status=replace(fit.status, sentence=words), stats={
        **fit.stats, "forms_tried": way.tried, "as_well": also, "form_because": list(clues.words)})


def clues_in(examples: Examples, clock: Clock) -> Clues:
    """What the black box or the labels say, as a stage."""

    def compute() -> Stage:
        found = clues_from(examples) if isinstance(examples, Answers) else clues_of(examples)
        return {}, {**asdict(found), "may": sorted(found.may), "must": sorted(found.must)}

    asks = "the black box is asked" if isinstance(examples, Answers) else "the labels are looked at"
    _, info = clock.stage("clues", 0, compute, f"{asks} for what tells one form from another")
    return Clues(tuple(Sight(**sight) for sight in info["sights"]), frozenset(info["may"]), frozenset(info["must"]),
                 info["placed"], info["offsets"], tuple(info["words"]), info["asked"])


@dataclass
class Way:
    """What was tried, and the best so far."""

    source: FormSource
    clues: Clues
    wanted: Wanted
    clock: Clock
    form: Form = field(default_factory=Form)
    best: tuple[Form, FormCandidate] | None = None
    tried: list[dict[str, Any]] = field(default_factory=list)

    def go(self) -> None:
        """Forms with one part after the other, until one meets the labels or nothing helps."""
        options = list(self.first())
        self.form = options[0]
        for _ in range(PARTS + 1):
            form = options[0] if len(options) == 1 else self.chosen(options)
            if form == self.form and self.best is not None:
                break  # nothing more lowers the error markedly
            self.form = form
            more = list(self.further(form))
            self.attempt(form, self.first_size(form))
            if not self.near:
                self.turn(form)
            if self.near:
                return  # no descent could tell what is missing, if anything is
            if not more:
                break
            options = [form, *more]
        if self.size(self.form) > self.first_size(self.form):
            self.attempt(self.form, self.size(self.form))

    def turn(self, form: Form) -> None:
        """Another base of the turns, if a short descent with it leaves markedly less."""
        rotary, size = form.rotary, self.first_size(form)
        if rotary is None or rotary.base != Rotary().base:
            return
        options = [form, *(replace(form, rotary=replace(rotary, base=base)) for base in BASES)]
        errors = self.shorts(options, size)
        least = min(errors)
        if least <= MARKED * errors[0]:
            self.form = options[errors.index(least)]
            self.attempt(self.form, size)

    @property
    def near(self) -> bool:
        return self.best is not None and self.best[1].error < STALLED

    @property
    def met(self) -> bool:
        return self.best is not None and self.best[1].error < self.met_at

    @property
    def met_at(self) -> float:
        return met_of(self.source.examples)

    def first(self) -> Iterator[Form]:
        """The simplest forms that the clues leave."""
        form = Form(sight=self.clues.sights[0])
        for name in sorted(self.clues.must):
            form = next(self.with_part(form, name))
        if self.clues.placed and not self.clues.must & set(PLACED):
            for name in sorted(self.clues.may & set(PLACED), reverse=True):
                yield from self.with_part(form, name)
        else:
            yield form

    def further(self, form: Form) -> Iterator[Form]:
        """Forms with one part more or another sight, those first for which there are clues."""
        first = PLACED[::-1] if self.clues.offsets else PLACED[:1]
        for name in dict.fromkeys([*first, "sink", "normed", "cap", *PLACED, "gate"]):
            alone = name not in PLACED or not form.uses_positions
            if name in self.clues.may and getattr(form, name) is None and alone:
                yield from self.with_part(form, name)
        rotary = form.rotary
        if rotary is not None and rotary.turned is None:
            yield replace(form, rotary=replace(rotary, turned=max(2, self.size(form) // 4 * 2)))
        for sight in self.clues.sights:
            if sight != self.clues.sights[0] and form.sight == self.clues.sights[0]:
                yield replace(form, sight=sight)

    def with_part(self, form: Form, name: str) -> Iterator[Form]:
        """The form with this part, in the ways there are."""
        one, k = torch.zeros(1, dtype=torch.float64), self.source.examples.length
        both = not form.sight.causal or form.sight.prefix > 1
        if name == "rotary":
            yield replace(form, rotary=Rotary())
        elif name == "offsets":
            reach = min(k - 1, REACH)
            yield replace(form, offsets=OffsetTable(one.new_zeros(1, 2 * reach + 1 if both else reach + 1),
                                                    both=both))
            if k - 1 > REACH:
                yield replace(form, offsets=OffsetTable(one.new_zeros(1, 32), kind="t5", both=both))
                yield replace(form, offsets=Slope(one))
        elif name == "sink":
            yield replace(form, sink=Sink(one))
        elif name == "normed":
            yield replace(form, normed=Normed(one, one))
        elif name == "cap":
            yield replace(form, cap=Cap(CAPPED))
        elif name == "gate":
            yield replace(form, gate=Gated(one.new_zeros(1, 2, 1)))

    def first_size(self, form: Form) -> int:
        return first_size(form, self.wanted, self.source.examples.width)

    def size(self, form: Form) -> int:
        """Of heads while forms are compared: half the width, where that is small, so that no form is called wrong
        for the size of its heads."""
        size, width = self.first_size(form), self.source.examples.width
        if self.wanted.size is not None or width >= WIDE:
            return size
        return min(max(size, most_size(width) // 2), most_size(width))

    @property
    def heads(self) -> int:
        return FIRST if self.wanted.heads is None else math.ceil(SPARE * self.wanted.heads) + 1

    def chosen(self, options: list[Form]) -> Form:
        """The form whose short descent leaves least; the first, if the others are not markedly better."""
        errors = self.shorts(options)
        least = min(errors)
        if self.best is not None and least > MARKED * errors[0]:
            return options[0]
        # Of those that do as well the first: it has the fewest unknowns.
        return next(form for form, error in zip(options, errors, strict=False)
                    if error <= AS_WELL * least and (self.best is None or form != options[0]))

    def shorts(self, options: list[Form], size: int | None = None) -> list[float]:
        """What short descents leave, up to one that decides it."""
        errors: list[float] = []
        for form in options:
            errors.append(self.short(form, size or self.size(form)))
            if errors[-1] < DECISIVE * errors[0]:
                break
        return errors

    def short(self, form: Form, size: int) -> float:
        """The error that a short descent leaves on other sequences."""
        words, data = form.describe(), self.source.examples
        known = [entry["error"] for entry in self.tried if entry["form"] == words and entry.get("size") == size]
        if known:
            return float(known[0])
        out_size = min(size, data.out_width)
        here = self.source.of_form(template(form, self.heads, data.width, size, out_size))
        draw = torch.Generator().manual_seed(zlib.crc32(f"{self.wanted.seed}:which".encode()))

        def compute() -> Stage:
            down = form_descended(here, self.heads, size, out_size, draw, limit=SHORT, target=0.0,
                                  report=self.clock.report, pulse=self.clock.pulse)
            return {}, {"form": words, "size": size, "error": down.error, "steps": down.steps,
                        "reason": down.reason}

        _, info = asking(here, self.clock, "form", self.heads, compute,
                         f"how much does a short descent leave: {words}?", SHORT)
        if info["reason"] == "time":
            raise OutOfTimeError  # what fewer steps leave is not compared
        error = float(info["error"]) if math.isfinite(info["error"]) else math.inf
        self.tried.append({"form": words, "by": "descent", "size": size, "error": error})
        return error

    def attempt(self, form: Form, size: int) -> None:
        """One descent to its end, refined, and what can be read off."""
        if self.best is not None:
            self.clock.pulse()
        todo = [(self.heads, size, 0)]
        self.take(form, search(self.source.of_form(form), form, self.wanted, self.clock, todo))
        self.read()

    def take(self, form: Form, found: FormCandidate) -> None:
        self.tried.append({"form": form.describe(), "by": "fit", "error": found.error})
        if self.best is None or found.error < self.best[1].error:
            self.best = form, found

    def read(self) -> None:
        """Other bases of the same turns, another sight, a cap, a simpler table."""
        assert self.best is not None
        form, found = self.best
        for other in self.beside(form, found.error):
            if self.refined(other, found.tensors) < self.met_at:
                break
        form, found = self.best
        if isinstance(form.offsets, OffsetTable) and form.offsets.kind == "clipped" and self.met:
            for simple, tensors in read_off(form, found.tensors, self.source.examples.length):
                if self.refined(simple, tensors) < self.met_at:
                    break

    def beside(self, form: Form, error: float) -> Iterator[Form]:
        """Forms in which these factors are a place to begin."""
        if self.met_at <= error < STALLED:
            for base in BASES if form.rotary is not None else ():
                if form.rotary is not None and base != form.rotary.base:
                    yield replace(form, rotary=replace(form.rotary, base=base))
            for sight in self.clues.sights:
                if sight != form.sight:
                    yield replace(form, sight=sight)
            for name in ("sink", "cap"):
                if name in self.clues.may and getattr(form, name) is None:
                    yield from self.with_part(form, name)

    def refined(self, form: Form, tensors: dict[str, Tensor]) -> float:
        """The error of a form that begins at these factors; taken if it meets the labels."""
        heads, _, size = tensors["query"].shape
        here = self.source.of_form(template(form, heads, self.source.examples.width, size,
                                            tensors["value"].shape[2]))
        if form.cap is not None and "cap" not in tensors:
            tensors = {**tensors, "cap": tensors["query"].new_tensor(form.cap.value)}
        if form.sink is not None and "sink" not in tensors:
            tensors = {**tensors, "sink": tensors["query"].new_full((heads,), SUNK)}
        found = refinement(here, tensors, f"{self.wanted.seed}:which", self.wanted.heads or 1, False, self.clock)
        self.tried.append({"form": form.describe(), "by": "refinement", "error": found.error})
        assert self.best is not None
        # Taken where it explains all: a search that goes on lowers the error in any case.
        if found.error < self.met_at:
            self.best = form, found
        return found.error


def how(clues: Clues, way: Way) -> Iterator[str]:
    """By which evidence the form was taken."""
    if clues.words:
        by = f"The function was asked {clues.asked} sequences for its form" if clues.asked else "Of the form"
        # What no layer has been found to meet may be none, and then these answers are no layer's.
        yield f"{by}{'' if way.met else ', as if it were such a layer'}: {'; '.join(clues.words)}."
    count = sum(entry["by"] == "descent" for entry in way.tried)
    if count:
        yield f"What is left of the form was found by comparing {count} short descents."
    count = len({entry["form"] for entry in way.tried if entry["by"] == "refinement"})
    if count:
        yield f"{count} other form{'s were' if count > 1 else ' was'} tried from the factors of a fit."


def as_well(form: Form, way: Way, length: int) -> str:
    """What else would do, in words."""
    words, said = form.describe(), []

    def of(kind: str, size: int | None = None) -> dict[str, float]:
        return {entry["form"]: entry["error"] for entry in way.tried
                if entry["by"] == kind and entry.get("size") == size}

    mine = [entry for entry in way.tried if entry["form"] == words and entry["by"] == "descent"]
    if mine:
        also = [name for name, error in of("descent", mine[-1]["size"]).items()
                if name != words and error <= AS_WELL * mine[-1]["error"]]
        said += [f"after as many steps these did as well: {'; '.join(also)}"] if also else []
    ends = {name: error for name, error in {**of("fit"), **of("refinement")}.items() if name != words}
    exact = [name for name, error in ends.items() if error < way.met_at]
    said += [f"these meet the labels too: {'; '.join(exact)}"] if exact else []
    if way.best is not None and not way.met:
        also = [name for name, error in ends.items() if error <= AS_WELL * way.best[1].error]
        said += [f"refined to their end these did as well: {'; '.join(also)}"] if also else []
    if form.rotary is not None:
        said.append("whether planes are halves or pairs is not seen in the answers of a layer")
    if form.sight.window is None:
        said.append(f"a window of {length} tokens or more would not be seen in sequences of {length}")
    return "; ".join(said or ["nothing else was found to do as well"])
