"""From heads that are nearly right to the floor of the arithmetic, in thin factors.

Gauss–Newton (gauss_newton.py) on as few sequences as determine the factors, more when other sequences disagree.
Between its steps the fit is made smaller (prune.py): first what costs next to nothing of what is left, then what a
few steps give back, many heads at once where they cost little. So head count and head size come out of the
refinement; nobody tells them.

It matters to be rid of spare heads and columns early: with them the minimum is a valley, and Gauss–Newton creeps
along it; without them it converges quadratically. So steps that creep lead to a larger cut, and if that does not
help, to the end. Heads whose patterns are all but 0 and 1 are made softer first (Refinement.soften).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from headway.core.counting import Size
from headway.core.devices import room
from headway.learning.candidate import Candidate
from headway.learning.gauss_newton import NEAR, OutOfTimeError, Solution, gauss_newton
from headway.learning.polish import FITTED, KEPT, floor_of
from headway.learning.prune import (
    Moments,
    columns_needed,
    folds,
    free_cuts,
    narrowed,
    singular_values,
    step_down,
)
from headway.learning.source import Source, spaced
from headway.learning.thin import Thin, ThinModel, ThinPoint, balanced
from headway.linalg.projected import Problem

STEPS = 2  # of Gauss–Newton between two looks at what may go
TRIAL = 4  # at most, to see whether a cut is given back
INNER = {torch.float32: 150, torch.float64: 500}  # products for one step, at most
BALANCED = 300  # the same, where rows are balanced
SLOW = 10.0  # gain of a few steps below which, once the error is small, more are not worth their time
BATCH = 16.0  # times the loss that heads taken away together may leave before the steps that give it back
BOLD = 400.0  # the same, when steps gain next to nothing
HARD = 8  # times the sequences when they are too few and a head is saturated: a row says less of it than counted
LAZY = 2.0  # gain of a few steps below which rows are weighted, or no longer, for saturated heads
CREEPS = 1.1  # gain of a few steps below which they creep
PATIENCE = 4  # times in a row, until no more are made
SATURATED = 0.1  # part of the heads' median answer to a change of scores below which one may be saturated
SOFTER, SOFTEST, GIVEN = 0.85, 20, 4.0  # factors on its scores that are tried; times the loss that it may cost
FREE = 0.3  # part of what is left that cuts may cost without being tried
NARROW = 0.02  # relative residual below which ranks are read off
CLOSE = 1e-5  # relative residual at which float32 has done its part
NEARLY = 1e-3  # relative residual below which a step that gains little is held back by float32
AGAIN = 0.3  # how far the residual must fall before a cut that failed is tried again
ROWS = 6  # times the counting floor, to begin with
FEWEST = 128  # sequences: counting knows nothing of saturated patterns, which say little
LOOKED_AT = {"cuda": 256, "cpu": 64}  # other sequences looked at between steps


class Refinement:
    """A fit in thin factors on some sequences, in one precision, and the steps that make it better or smaller."""

    def __init__(
        self, source: Source, shape: Thin, generator: torch.Generator,
        report: Callable[[float], None] | None = None, pulse: Callable[[], None] | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.source, self.generator, self.report, self.pulse, self.log = source, generator, report, pulse, log
        self.most = min(len(source.fit), source.most())
        self.floor = floor_of(source.examples.dtype)
        self.times, self.damping, self.products = ROWS, 1e-2, 0
        self.refused = self.freed = math.inf  # the residual when a cut was last refused, and when some were free
        self.failed: dict[tuple[int, int], float] = {}  # columns tried in vain, and the residual then
        self.others = spaced(source.select, min(len(source.select), LOOKED_AT.get(source.device.type, 64)))
        self.dtype = torch.float32
        self.soft, self.softened = True, False  # whether scores may be made smaller, and whether some were
        self.balance = False  # whether rows are weighted for the sake of saturated heads
        self.place(shape, ROWS)

    # -- where it stands ------------------------------------------------------------------------------------

    def sequences(self, shape: Thin, times: int) -> int:
        k, e = self.source.examples.length, self.source.examples.out_width
        m, q, p = len(shape.value), shape.q, shape.V.shape[2]
        held = room(self.source.device, KEPT) // (12 * m * k * (2 * q + p + k))
        wanted = times * Size(self.source.d, e, k, self.source.examples.mask, q, p).floor(m)
        return min(max(FEWEST, wanted), self.most, max(16, held))

    def place(self, shape: Thin, times: int | None = None) -> None:
        """Go on from ``shape``, on ``times`` the counting floor of sequences."""
        if times is not None:
            self.count = self.sequences(shape, times)
        index = spaced(self.source.fit, self.count)
        self.problem = self.source.problem(index, len(shape.value), self.dtype)
        self.variation = self.problem.variation()
        self.shape = shape.to(self.dtype)
        self.solve_on(self.problem)

    def solve_on(self, problem: Problem) -> None:
        """Go on with these rows, weighted or not."""
        self.model = ThinModel(problem)
        self.scale = self.model.variation()
        self.point = self.model.evaluate(self.shape)
        self.look()

    def weigh(self) -> None:
        """Rows balanced, or no longer; only where a head is saturated."""
        if self.balance and self.saturated():
            plain = ThinModel(self.problem).evaluate(self.shape)
            self.solve_on(balanced(self.problem, self.shape, plain))
        elif self.model.problem is not self.problem:
            self.solve_on(self.problem)

    def look(self) -> None:
        self.residual = self.left(self.point)
        self.other = self.error_of(self.point.Theta, self.point.W, self.point.offset)

    def left(self, point: ThinPoint) -> float:
        """The relative residual, every row alike."""
        if self.model.problem is self.problem:
            return math.sqrt(point.loss / self.variation)
        total = 0.0
        for rows, r in zip(self.model.problem.chunks, point.residuals, strict=True):
            assert rows.valid is not None
            total += float((r.view_as(rows.Y) / rows.valid.clamp_min(1e-30)).double().square().sum())
        return math.sqrt(total / self.variation)

    def error_of(self, Theta: torch.Tensor, W: torch.Tensor, offset: torch.Tensor | None) -> float:
        assert offset is not None
        return self.source.error(self.others, Theta, W, offset)

    @property
    def overfitted(self) -> bool:
        """Whether other sequences are met much worse than those fitted."""
        return self.other > 2 * self.residual and self.other > self.floor

    def say(self, words: str) -> None:
        if self.log is not None:
            self.log(words)

    # -- steps ----------------------------------------------------------------------------------------------

    def solve(self, shape: Thin, limit: int, **settings: float) -> Solution:
        found = gauss_newton(self.model, shape, generator=self.generator, limit=limit, inner=self.dtype,
                             report=self.report, pulse=self.pulse, **settings)  # type: ignore[arg-type]
        self.products += found.products
        return found

    def step(self) -> str:
        """A few steps of Gauss–Newton; why they ended."""
        self.weigh()
        inner = INNER[self.dtype] if self.model.problem is self.problem else BALANCED
        found = self.solve(self.shape, STEPS, damping=self.damping, inner_limit=inner)
        self.shape, self.point, self.damping = found.shape, found.point, found.damping
        self.look()
        self.say(f"{len(self.shape.value)} heads of {self.shape.q}, {self.shape.V.shape[2]}; {self.count} "
                 f"sequences, residual {self.residual:.1e}, others {self.other:.1e}, {found.reason}")
        return found.reason

    def grow(self) -> bool:
        """More sequences, if there are."""
        if self.count >= self.most:
            return False
        before = self.count
        hard = bool(self.saturated())
        self.balance = self.balance or hard
        while self.count <= 1.2 * before and self.count < self.most:
            self.times *= HARD if hard else 2
            wanted = self.sequences(self.shape, self.times)
            if wanted <= self.count and self.times > 10**6:
                return False
            self.count = max(self.count, wanted)
        self.damping = max(self.damping, 1e-4)
        self.place(self.shape)
        return True

    def sharpen(self) -> bool:
        """On to float64, on no more sequences than the heads need now."""
        if self.dtype == torch.float64:
            return False
        self.dtype = torch.float64
        self.place(self.shape, self.times)
        return True

    def soften(self) -> None:
        """Scores of saturated heads as small as costs little.

        Where a pattern is nearer to 0 and 1 than the true one, a step has to be larger the smaller what it acts on,
        and fails; where it is farther, each step gains a factor e.
        """
        for i in self.saturated() if self.soft else []:
            tried = [self.softer(i, SOFTER**j) for j in range(SOFTEST)]
            losses = [point.loss for _, point in tried]
            best = max(j for j in range(SOFTEST) if losses[j] <= GIVEN * min(losses))
            if best:
                self.say(f"scores of head {i} times {SOFTER**best:.2f}: residual {self.residual:.1e} → "
                         f"{self.left(tried[best][1]):.1e}")
                self.shape, self.point = tried[best]
                self.softened = True
                self.look()

    def saturated(self) -> list[int]:
        """Heads whose output hardly answers to a change of their scores."""
        _, M, T = self.moments()
        share = (self.point.W * (T @ self.point.W)).sum((1, 2))  # of the output
        moved = M.diagonal(dim1=1, dim2=2).sum(1) / share.clamp_min(1e-30)
        found: list[int] = torch.nonzero(moved < SATURATED * moved.median()).flatten().tolist()
        return found

    def softer(self, head: int, factor: float) -> tuple[Thin, ThinPoint]:
        A = self.shape.A.clone()
        A[head] *= factor
        shape = Thin.joined(A, self.shape.B, self.shape.V)
        return shape, self.model.evaluate(shape)

    # -- cuts -----------------------------------------------------------------------------------------------

    def try_cut(self, shape: Thin, cost: float, what: str) -> bool:
        """A smaller fit, kept if a few steps give back what it costs, on other sequences too."""
        if cost > NEAR**2 * self.scale:
            return False
        met = math.sqrt(self.point.loss / self.scale)
        found = self.solve(shape, TRIAL, damping=max(self.damping, 1e-3),
                           inner_limit=INNER[torch.float32], target=max(0.9 * met, self.floor / 64))
        point = found.point
        other, left = self.error_of(point.Theta, point.W, point.offset), self.left(point)
        kept = found.residual <= max(met, self.floor / 16) and other <= max(
            2 * self.other, 3 * left, self.floor)
        if self.overfitted:  # rows met by heart say little: others decide
            kept = other <= self.other
        self.say(f"{what}: {'kept' if kept else 'not kept'}; expected {math.sqrt(cost / self.scale):.1e}, "
                 f"residual {self.residual:.1e} → {left:.1e}")
        if kept:
            self.shape, self.point, self.damping = found.shape, point, found.damping
            self.look()
        return kept

    def cut(self) -> None:
        """Leave out what costs next to nothing, then try what a few steps may give back."""
        before = len(self.shape.value)
        if self.residual < AGAIN * self.freed:  # again and again it would add up
            self.shape, self.point = free_cuts(self.model, self.shape, self.point, FREE * self.point.loss)
            self.freed = self.residual
        if len(self.shape.value) < before:
            self.look()
            self.say(f"{before - len(self.shape.value)} heads left out")
        while self.residual < AGAIN * self.refused or self.refused == math.inf:
            if not self.fold():
                self.refused = self.residual
                break
        if self.residual < NARROW and not self.overfitted:
            self.narrow()

    def fold(self, batch: float = BATCH) -> bool:
        """Fewer heads: as many at once as cost little, or else fewer of them, down to one."""
        allowed = min(batch * self.point.loss, self.point.loss + NEAR**2 * self.scale)
        allowed = max(allowed, (self.floor / 16) ** 2 * self.scale)
        cuts = folds(self.model, self.shape, self.point, self.moments_at, allowed)
        while cuts:
            if self.try_cut(cuts[-1].shape, cuts[-1].cost, cuts[-1].what):
                return True
            cuts = cuts[: len(cuts) // 2]
        return False

    def moments_at(self, shape: Thin, point: ThinPoint) -> Moments:
        return self.model.products(point, shape, self.dtype).moments(self.generator)

    def moments(self) -> Moments:
        return self.moments_at(self.shape, self.point)

    def narrow(self) -> None:
        """Fewer columns: those that cost next to nothing go; then the step down of the singular values is tried,
        and heads as wide in Θ as in W."""
        q, p = self.shape.q, self.shape.V.shape[2]
        moments = self.moments()
        theta, out = singular_values(self.shape, self.point, moments)
        allowed = FREE * self.point.loss
        fewer = min(q, columns_needed(theta, allowed)), min(p, columns_needed(out, allowed))
        if fewer != (q, p):
            smaller = narrowed(self.shape, self.point, moments, *fewer)
            point = self.model.evaluate(smaller)
            if point.loss < 4 * self.point.loss:
                self.say(f"columns {q}, {p} → {fewer[0]}, {fewer[1]}")
                self.shape, self.point = smaller, point
                self.look()
                (q, p), moments = fewer, self.moments()
                theta, out = singular_values(self.shape, self.point, moments)
        narrow = min(p, step_down(out))
        for wide in sorted({step_down(theta), min(narrow, q)}):
            if (wide, narrow) == (q, p) or self.residual > 0.1 * self.failed.get((wide, narrow), math.inf):
                continue
            cost = float(theta[:, wide:].square().sum() + out[:, narrow:].square().sum())
            if self.try_cut(narrowed(self.shape, self.point, moments, wide, narrow), cost,
                            f"columns {q}, {p} → {wide}, {narrow}"):
                return
            self.failed[wide, narrow] = self.residual


def refine_factors(
    source: Source, shape: Thin, *, generator: torch.Generator, limit: int = 100,
    report: Callable[[float], None] | None = None, pulse: Callable[[], None] | None = None,
    log: Callable[[str], None] | None = None,
) -> Candidate:
    """The least-squares solution from ``shape`` on, with as few heads and columns as it takes; out of time, what
    was reached, with the reason "time"."""
    at = Refinement(source, shape, generator, report, pulse, log)
    found = _refined(at, limit)
    if at.softened and found.reason != "time" and found.error > FITTED:
        # Scores made smaller may lead into another basin: once more with those that were found.
        again = Refinement(source, shape, generator, report, pulse, log)
        again.soft = False
        other = _refined(again, limit)
        if other.error < found.error:
            found = replace(other, products=other.products + found.products)
    return found


def _refined(at: Refinement, limit: int) -> Candidate:
    try:
        reason = _run(at, limit)
    except OutOfTimeError:
        reason = "time"
    point, source = at.point, at.source
    assert point.offset is not None
    held = source.error(source.select, point.Theta, point.W, point.offset)
    return Candidate(point.Theta.double(), point.W.double(), point.offset.double(), at.residual, held, reason,
                    at.count, at.model.problem.equations, at.shape.q, at.products, at.shape.V.shape[2])


def _run(at: Refinement, limit: int) -> str:
    """Cut, step, grow, sharpen, until nothing moves; why it ended."""
    reason, creeping, bold, soft = "limit", 0, math.inf, math.inf
    for steps in range(limit):
        at.cut()
        if not steps:
            soft = at.residual
            at.soften()
        before = at.residual
        reason = at.step()
        creeping = creeping + 1 if at.residual > before / CREEPS else 0
        if reason == "limit" and before / LAZY < at.residual < NARROW:
            at.balance = not at.balance  # what slows the steps under the one may not under the other
        if at.dtype == torch.float64 and reason == "limit" and at.other < FITTED and at.residual > before / SLOW:
            reason = "slow"
        ended = reason in ("floor", "converged", "stalled", "slow")
        if at.overfitted and at.grow():  # before more digits: those of too few rows are of no use
            creeping = 0
            continue
        if (ended or at.residual < CLOSE or (creeping and at.residual < NEARLY)) and at.sharpen():
            creeping = 0
            continue
        if creeping == 1 and at.residual < AGAIN * soft:
            soft = at.residual
            at.soften()
        if creeping > 1 and at.residual < AGAIN * bold:
            # Spare heads make the minimum a valley. With the right number steps soon give back what they cost.
            bold, heads = at.residual, len(at.shape.value)
            at.fold(BOLD)
            creeping = 0 if len(at.shape.value) < heads else creeping
            continue
        if creeping >= PATIENCE:
            reason = "stalled"
            break
        if ended:
            if at.other <= at.floor and at.refused != at.residual:
                heads, at.refused = len(at.shape.value), math.inf
                at.cut()
                if len(at.shape.value) < heads:
                    continue
            break
    return reason
