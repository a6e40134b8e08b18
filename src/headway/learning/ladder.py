"""From heads that are nearly right to the floor of the arithmetic: one ladder, however the heads are written.

A fit stands on some sequences, in one precision, with one damping. Steps of Gauss–Newton (gauss_newton.py) are made
in float32 until it has done its part, then in float64 until nothing moves. After each stretch of steps other
sequences are looked at: where they are met much worse, those fitted do not determine the heads, and more are taken.

Written against gauss_newton.Model: heads with free W_i, full or factored (Free), or thin factors (ThinModel). What
is done to the unknowns on the way, such as a rank that is read off or heads that are taken away, is a Strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.counting import Size
from headway.core.devices import fast_products
from headway.learning.candidate import Candidate
from headway.learning.gauss_newton import NEAR, Free, Midway, Solution, gauss_newton
from headway.learning.shapes import Factored
from headway.learning.snapshots import NONE, Snapshot, of_shape, shape_of
from headway.learning.source import Source, spaced
from headway.learning.thin import ThinModel
from headway.linalg.projected import Problem
from headway.linalg.thin import Thin
from headway.runs.store import Stage

FLOORS = {torch.float64: 4096 * 2.0**-52, torch.float32: 64 * 2.0**-23}
FITTED = 1e-6  # relative error on other sequences that counts as small
ROWS = 6  # times the counting floor, for thin factors
FEWEST = 128  # sequences for them: counting knows nothing of saturated patterns, which say little
GROW = 4  # times the sequences, when others disagree
DISAGREE, SETTLED = 2.0, 1.5  # times the residual from which others do: on the way, where few are seen; at the end
LOOKED_AT = {"cuda": 256, "cpu": 64}  # other sequences looked at on the way; all of them at the end
CLOSE = 1e-5  # relative residual at which float32 has done its part
NEARLY = 1e-3  # relative residual below which a stretch that gains little is held back by float32
CREEPS = 1.1  # gain of a stretch below which it creeps
SLOW = 10.0  # gain of a short stretch below which, once the error is small, more are not worth their time
PATIENCE = 4  # stretches in a row that creep, until no more are made
HOPE, CARE = 1e-2, 1.0  # damping of a trial step, and that to begin with if it gains much less than foreseen
FORESEEN = 0.75  # part of the foreseen gain from which it is not much less
AFRESH = 1e-4  # least damping on rows that are new
HASTY = {"patience": 3, "least_gain": 0.02}  # steps in a row that gain less, until a slow fit is given up
KEPT = ("given", "times", "fewest", "count", "damping", "price", "products", "left", "creeping", "begun",
        "residual", "other")  # of a ladder, in a snapshot
NOW = ("history", "steps", "products", "slow", "damping", "price", "ratio")  # of a solve, in a snapshot
ENDS = ("floor", "converged", "stalled", "slow")  # reasons for which a precision has done its part


def floor_of(dtype: torch.dtype) -> float:
    """Relative residual at which labels of this dtype count as met exactly.

    float64 labels carry the rounding of another order of summation, seen through the conditioning of the
    coordinates: 4096 ulp. float32 labels were mostly computed in float32 too: 64 ulp. Half precision is taken as
    rounding alone, 2 ulp: anything wider would call a poor fit exact.
    """
    return FLOORS.get(dtype, 2 * torch.finfo(dtype).eps)


def floor_in_words(dtype: torch.dtype) -> str:
    """What ``floor_of`` is the floor of."""
    name = str(dtype).removeprefix("torch.")
    return "the floor of the arithmetic" if dtype == torch.float64 else f"the floor of labels in {name}"


@dataclass(frozen=True)
class Pace:
    """How Gauss–Newton goes from one look to the next."""

    stride: int | None = None  # steps in a stretch; None: until it ends, or reaches a target
    targets: tuple[float, ...] = ()  # relative residuals at which float32 is interrupted, falling
    hasty: bool = False  # far from the end a slow fit is given up soon: it lacks a head, and the rest says more
    careful: bool = False  # small steps to begin with, far from the end
    trial: bool = True  # whether the damping to begin with comes from a trial step
    rows_first: bool = False  # more sequences before more digits, where others disagree
    products: tuple[int, int] = (300, 300)  # for one step at most, in float32 and in float64
    digits: float = 1e-3  # to which a step is solved, at best
    wary: bool = False  # steps are solved in float64 as soon as float32 does not serve; else where a step fails


class Strategy:
    """What is done to the unknowns on the way. This one does nothing."""

    @property
    def pace(self) -> Pace:
        return Pace(targets=(CLOSE,))

    def before(self, at: Ladder) -> None:
        """Before every stretch: smaller, where that costs nothing that matters."""

    def enough(self, at: Ladder) -> bool:
        """Before every stretch: whether to end here, because what comes next goes on better."""
        return False

    def weigh(self, at: Ladder) -> None:
        """Right before the steps: rows weighted, or no longer."""

    def after(self, at: Ladder, reason: str, before: float) -> bool:
        """After every stretch, which ended for a reason; ``before`` is the residual with which it began. Whether
        something was changed with which to go on first."""
        return False

    def inner(self, at: Ladder) -> int:
        """Products for one step at most."""
        return self.pace.products[at.dtype == torch.float64]

    def more(self, at: Ladder) -> int:
        """How many times the sequences, when others disagree."""
        return GROW

    def wider(self, at: Ladder) -> bool:
        """Other sequences disagree: whether unknowns that were taken away have been given back."""
        return False

    def stuck(self, at: Ladder) -> bool:
        """After a stretch with nothing else to do: whether something was changed that lets steps go on."""
        return False

    def last(self, at: Ladder) -> bool:
        """At the end: whether there was something left to take away."""
        return False

    def state(self) -> dict[str, Any]:
        """What it remembers, in numbers and words."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """The other way round."""

    def weigh_again(self, at: Ladder) -> None:
        """The rows as they were weighted right before the steps, where they were."""


class Ladder:
    """A fit on some sequences, in one precision, and the steps that make it better.

    It begins on ``sequences`` of them; without, for thin factors, on ROWS times what counting asks for. At most
    ``limit`` steps are made in one precision on the same rows.
    """

    def __init__(
        self, source: Source, shape: Any, strategy: Strategy, generator: torch.Generator, *,
        sequences: int | None = None, limit: int = 100,
        report: Callable[[float], None] | None = None, pulse: Callable[[], None] | None = None,
        log: Callable[[str], None] | None = None, snapshot: Snapshot = NONE, kept: Stage | None = None,
    ) -> None:
        self.source, self.strategy, self.generator = source, strategy, generator
        self.report, self.pulse, self.log = report, pulse, log
        self.given, self.times, self.limit, self.left = sequences, 1, limit, limit
        self.fewest = FEWEST
        self.floor = floor_of(source.examples.dtype)
        self.others = spaced(source.select, min(len(source.select), LOOKED_AT.get(source.device.type, 64)))
        self.dtype, self.damping, self.price = torch.float32, HOPE, 1.0
        self.products, self.creeping = 0, 0
        self.inner = torch.float32  # in which steps are solved
        self.begun = False
        self.snapshot, self.kept = snapshot, kept
        self.count = self.sequences(shape)
        if kept is None:
            self.place(shape)

    # -- where it stands ------------------------------------------------------------------------------------

    def most(self, shape: Any) -> int:
        """Sequences there are, as far as they can be held."""
        most = self.source.most()
        if isinstance(shape, Thin):
            most = self.source.most_thin(len(shape.value), shape.q, shape.V.shape[2])
        return min(len(self.source.fit), most)

    def sequences(self, shape: Any) -> int:
        """Those to begin with, as often multiplied as others disagreed; of thin factors as many as they are now."""
        if self.given is not None:
            return min(self.times * self.given, self.most(shape))
        examples = self.source.examples
        size = Size(self.source.d, examples.out_width, examples.length, examples.mask, shape.q, shape.V.shape[2])
        return min(max(self.fewest, ROWS * self.times * size.floor(len(shape.value))), self.most(shape))

    def place(self, shape: Any) -> None:
        """Go on from ``shape``."""
        m, thin = len(shape.value), isinstance(shape, Thin)
        self.source.afford(m, m * (shape.V.shape[2] if thin else self.source.d) + 1, thin)
        self.problem = self.source.problem(spaced(self.source.fit, self.count), len(shape.value), self.dtype)
        self.variation = self.problem.variation()
        self.shape = shape.to(self.dtype)
        self.left, self.creeping = self.limit, 0
        self.solve_on(self.problem)

    def solve_on(self, problem: Problem) -> None:
        """Go on with these rows, weighted or not."""
        self.model: Any = (ThinModel if isinstance(self.shape, Thin) else Free)(problem)
        self.scale = self.model.variation()
        self.take(self.shape, self.model.evaluate(self.shape))

    def take(self, shape: Any, point: Any) -> None:
        """Go on from ``point`` on the same rows."""
        self.shape, self.point = shape, point
        self.look()

    def look(self, everywhere: bool = False) -> None:
        """What is left, on the rows fitted and on others."""
        self.residual = self.rest(self.point)
        self.other = self.error_of(self.point, everywhere)

    def rest(self, point: Any) -> float:
        """The relative residual, every row alike."""
        if self.model.problem is self.problem:
            return math.sqrt(point.loss / self.variation)
        total = 0.0
        for rows, r in zip(self.model.problem.chunks, point.residuals, strict=True):
            assert rows.valid is not None
            total += float((r.view_as(rows.Y) / rows.valid.clamp_min(1e-30)).double().square().sum())
        return math.sqrt(self.problem.ranks.total(total) / self.variation)

    def error_of(self, point: Any, everywhere: bool = False) -> float:
        """The relative error on other sequences, some or all."""
        index = self.source.select if everywhere else self.others
        return self.source.error(index, point.Theta, point.W, point.offset)

    @property
    def overfitted(self) -> bool:
        """Whether other sequences are met much worse than those fitted."""
        return self.disagree(DISAGREE)

    def disagree(self, times: float) -> bool:
        return self.other > times * self.residual and self.other > self.floor

    def sizes(self) -> tuple[int | None, int | None]:
        """Of the heads, where they are written as products: of scores, of outputs."""
        return _ranks(self.shape)

    def say(self, words: str) -> None:
        if self.log is not None:
            self.log(words)

    # -- steps ----------------------------------------------------------------------------------------------

    def solve(self, shape: Any, limit: int, **settings: Any) -> Solution:
        pace = self.strategy.pace
        found = gauss_newton(self.model, shape, generator=self.generator, limit=limit, digits=pace.digits,
                             report=self.report, pulse=self.pulse,
                             inner=self.inner if pace.wary else torch.float32, wary=pace.wary, **settings)
        self.products += found.products
        self.inner = found.inner
        return found

    def stretch(self, before: float, midway: Midway | None = None) -> str:
        """Gauss–Newton until the next look; why it ended."""
        if midway is None:
            if not self.begun:
                self.begin()
            self.strategy.weigh(self)
        pace, fine = self.strategy.pace, self.dtype == torch.float64
        targets = (0.0,) if fine or not pace.targets else pace.targets
        target = next((left for left in targets if left < self.residual), targets[-1])
        patience = HASTY if pace.hasty and self.residual > NEAR else {}
        found = self.solve(self.shape, min(pace.stride or self.left, self.left), target=target,
                           damping=self.damping, price=self.price, inner_limit=self.strategy.inner(self),
                           midway=midway, keep=lambda now: self.remember(now, before), **patience)
        self.left -= max(1, len(found.history) - 1)
        self.damping, self.price = found.damping, found.price
        self.take(found.shape, found.point)
        self.say(f"{len(self.shape.value)} heads of {self.sizes()}; {self.count} sequences, residual "
                 f"{self.residual:.1e}, others {self.other:.1e}, {found.reason}")
        return found.reason

    def begin(self) -> None:
        """The damping to begin with, from the measured gain of a trial step, which is kept if it is as foreseen.

        Where much less is gained the next steps are small: a large one may lead to a head so saturated that there
        is no way back. From far away free heads begin with small steps in any case; thin factors have a price on
        changes of scores.
        """
        self.begun = True
        if not self.strategy.pace.trial:
            return
        if self.strategy.pace.careful and self.residual > NEAR:
            self.damping = CARE
            return
        found = self.solve(self.shape, 1, damping=HOPE, inner_limit=self.strategy.pace.products[0])
        if found.ratio > FORESEEN:
            self.damping, self.left = found.damping, self.left - 1
            self.take(found.shape, found.point)
        else:
            self.damping = max(found.damping, CARE)

    def sharpen(self) -> bool:
        """On to float64, on no more sequences than the unknowns need now."""
        if self.dtype == torch.float64:
            return False
        self.dtype = torch.float64
        if self.residual > CLOSE:
            self.inner = torch.float64  # float32 did not get this far: it cannot solve for these steps
        self.count = self.sequences(self.shape)
        self.place(self.shape)
        return True

    def grow(self) -> bool:
        """More sequences, if there are."""
        most, before, times = self.most(self.shape), self.count, self.strategy.more(self)
        while self.count <= 1.2 * before and self.count < most:
            self.times *= times
            self.count = max(self.count, self.sequences(self.shape))
        if self.count == before:
            return False
        self.damping = max(self.damping, AFRESH)
        self.place(self.shape)
        return True

    def climb(self) -> str:
        """Steps, more digits, more sequences, until nothing moves; why it ended."""
        with fast_products(self.source.device):
            return self._climb()

    def _climb(self) -> str:
        reason = "limit"
        before, midway = self.went_on()
        if midway is None and self.left and self.residual <= CLOSE:
            self.sharpen()
        while self.left > 0:
            if midway is None:
                self.strategy.before(self)
                if self.strategy.enough(self):
                    return "target"
                before = self.residual
            reason = self.stretch(before, midway)
            midway = None
            self.creeping = self.creeping + 1 if self.residual > before / CREEPS else 0
            if self.strategy.after(self, reason, before) and self.left > 0:
                continue
            if self.slow(reason, before):
                reason = "slow"
            ended = reason in ENDS or self.left <= 0
            close = self.residual <= CLOSE or (self.creeping > 0 and self.residual < NEARLY)
            if self.strategy.pace.rows_first and self.overfitted and self.grow():
                continue
            if (ended or close) and self.sharpen():
                continue
            if ended:
                self.look(everywhere=True)
            if self.overfitted and self.strategy.wider(self):
                continue
            if self.disagree(SETTLED if ended else DISAGREE) and self.grow():
                continue
            if self.strategy.stuck(self):
                continue
            if self.creeping >= PATIENCE:
                return "stalled"
            if ended and not self.strategy.last(self):
                break
        return reason

    def slow(self, reason: str, before: float) -> bool:
        """Whether a short stretch in float64 gained little when the error was small already."""
        return (self.dtype == torch.float64 and reason == "limit" and self.left > 0 and self.other < FITTED
                and self.residual > before / SLOW)

    # -- killed and gone on ---------------------------------------------------------------------------------

    def remember(self, now: Midway, before: float) -> None:
        """A snapshot of the stretch under way, if one is due: the ladder as the stretch began, and where it is."""
        if not self.snapshot.due():
            return
        tensors, info = of_shape(self.shape, "begin")
        mine, words = of_shape(now.shape, "now")
        tensors, info = {**tensors, **mine, "generator": now.generator}, {**info, **words}
        if now.metric is not None:
            other, words = of_shape(now.metric[0], "formed")
            tensors, info = {**tensors, **other, "formed generator": now.metric[2]}, {**info, **words}
            info["formed in"] = _name(now.metric[1])
        info["ladder"] = {name: getattr(self, name) for name in KEPT} | {
            "dtype": _name(self.dtype), "before": before, "free": not isinstance(self.shape, Thin),
            "weighed": self.model.problem is not self.problem, "strategy": self.strategy.state()}
        info["now in"] = {name: getattr(now, name) for name in NOW} | {"inner": _name(now.inner)}
        self.snapshot.keep(tensors, info)

    def went_on(self) -> tuple[float, Midway | None]:
        """Where a snapshot says that it was."""
        if self.kept is None:
            return self.residual, None
        tensors, info = self.kept
        said, now, device = info["ladder"], info["now in"], self.source.device
        for name in KEPT:
            setattr(self, name, said[name])
        left, creeping, residual, other = self.left, self.creeping, self.residual, self.other
        self.dtype = getattr(torch, said["dtype"])
        self.strategy.restore(said["strategy"])
        self.place(shape_of(tensors, info, "begin", device))
        if said["weighed"]:
            self.strategy.weigh_again(self)
        self.left, self.creeping, self.residual, self.other = left, creeping, residual, other
        formed = None
        if "formed" in info:
            formed = (shape_of(tensors, info, "formed", device), getattr(torch, info["formed in"]),
                      tensors["formed generator"].cpu())
        numbers = {name: now[name] for name in NOW if name != "history"}
        return said["before"], Midway(
            shape_of(tensors, info, "now", device), tuple(now["history"]), **numbers,
            inner=getattr(torch, now["inner"]), generator=tensors["generator"].cpu(), metric=formed)

    def candidate(self, reason: str) -> Candidate:
        """What was reached, looked at on all sequences that select."""
        point, (rank, out_rank) = self.point, _ranks(self.shape)
        return Candidate(point.Theta.double(), point.W.double(), point.offset.double(), self.residual,
                         self.error_of(point, everywhere=True), reason, self.count, self.problem.equations, rank,
                         self.products, out_rank)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ranks(shape: Any) -> tuple[int | None, int | None]:
    """Of the Θ_i and W_i, where these are written as products."""
    if isinstance(shape, Thin):
        return shape.q, shape.V.shape[2]
    return (shape.value.shape[2] if isinstance(shape, Factored) else None), None
