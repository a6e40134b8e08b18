"""From thin factors that are nearly right to the floor, with as few heads and columns as it takes.

Between its steps the ladder (ladder.py) makes the fit smaller (prune.py): first what costs next to nothing of what
is left, then what a few steps give back, many heads at once where they cost little. So head count and head size
come out of the refinement; nobody tells them.

It matters to be rid of spare heads and columns early: with them the minimum is a valley, and Gauss–Newton creeps
along it; without them it converges quadratically. So steps that creep lead to a larger cut, and if that does not
help, to the end. Heads whose patterns are all but 0 and 1 are made softer first (soften).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.learning.candidate import Candidate
from headway.learning.gauss_newton import NEAR, OutOfTimeError
from headway.learning.ladder import FITTED, Ladder, Pace, Strategy
from headway.learning.prune import (
    Moments,
    columns_needed,
    folds,
    free_cuts,
    narrowed,
    singular_values,
    step_down,
)
from headway.learning.ranks import NARROW
from headway.learning.saturated import balanced, saturated
from headway.learning.snapshots import NONE, Snapshot
from headway.learning.source import Source
from headway.learning.thin import ThinModel
from headway.linalg.thin import Thin

STEPS = 2  # of Gauss–Newton between two looks at what may go
TRIAL = 4  # at most, to see whether a cut is given back
INNER = (150, 500)  # products for one step, at most, in float32 and in float64
BALANCED = 300  # the same, where rows are balanced
GROW = 2  # times the sequences, when others disagree
HARD = 4  # the same where a head is saturated: a row says less of it than counted
BATCH = 16.0  # times the loss that heads taken away together may leave before the steps that give it back
BOLD = 400.0  # the same, when steps gain next to nothing
WIDE = 4096  # unknowns of a head from which rows are weighted at once: trying it without costs too much
LAZY, LAZIER = 4.0, 1.5  # gains of a few steps below which rows are weighted for saturated heads, and no longer
SOFTER, SOFTEST, GIVEN = 0.85, 20, 4.0  # factors on its scores that are tried; times the loss that it may cost
FREE = 0.3  # part of what is left that cuts may cost without being tried
AGAIN = 0.3  # how far the residual must fall before a cut that failed is tried again
MISSED = 0.7  # part of the error on others that columns given back leave at most, or they stay away


class Cuts(Strategy):
    """Heads and columns taken away between steps; saturated heads made softer, rows weighted for their sake."""

    def __init__(self, softening: bool = True) -> None:
        self.softening, self.softened = softening, False  # whether scores may be made smaller, whether some were
        self.refused = self.freed = math.inf  # the residual when a cut was last refused, and when some were free
        self.soft = self.bold = math.inf  # and when heads were last made softer, and a larger cut was tried
        self.failed: dict[tuple[int, int], float] = {}  # columns tried in vain, and the residual then
        self.given_up: list[tuple[int, int]] = []  # columns there were before some were taken away
        self.balance = False  # whether rows are weighted for the sake of saturated heads
        self.others = math.inf  # the error on other sequences before the last steps

    # -- what the ladder asks for ---------------------------------------------------------------------------

    @property
    def pace(self) -> Pace:
        return Pace(stride=STEPS, products=INNER, wary=True, trial=False, rows_first=True)

    def before(self, at: Ladder) -> None:
        """Smaller; the first time on more rows, where a head is saturated, and softer too."""
        if self.soft == math.inf and hard_heads(at):
            self.balance = at.shape.A[0].numel() > WIDE
            at.grow()
            at.fewest = at.count
        self.cut(at)
        if self.soft == math.inf:
            self.soft = at.residual
            self.soften(at)

    def inner(self, at: Ladder) -> int:
        return super().inner(at) if at.model.problem is at.problem else BALANCED

    def more(self, at: Ladder) -> int:
        return HARD if hard_heads(at) else GROW

    def weigh(self, at: Ladder) -> None:
        """Rows balanced, or no longer; only where a head is saturated."""
        self.others = at.other
        if self.balance and hard_heads(at):
            plain = ThinModel(at.problem).evaluate(at.shape)
            at.solve_on(balanced(at.problem, at.shape.V, plain))
        elif at.model.problem is not at.problem:
            at.solve_on(at.problem)

    def after(self, at: Ladder, reason: str, before: float) -> bool:
        """What slows the steps under the one may not under the other; where others disagree, rows that are balanced
        say more of a saturated head than more rows do."""
        least = LAZIER if self.balance else LAZY
        lazy = reason == "limit" and before / least < at.residual < NARROW and self.others / least < at.other
        lazy = lazy and (self.balance or bool(hard_heads(at)))  # without one there is nothing to weight for
        if lazy or (at.slow(reason, before) if self.balance else at.overfitted and bool(hard_heads(at))):
            self.balance = not self.balance
            return True
        return False

    def stuck(self, at: Ladder) -> bool:
        """Steps that creep: scores made softer, then a larger cut."""
        if at.creeping == 1 and at.residual < AGAIN * self.soft:
            self.soft = at.residual
            self.soften(at)
        if at.creeping > 1 and at.residual < AGAIN * self.bold:
            # Spare heads make the minimum a valley. With the right number steps soon give back what they cost.
            self.bold, heads = at.residual, len(at.shape.value)
            self.fold(at, BOLD)
            at.creeping = 0 if len(at.shape.value) < heads else at.creeping
            return True
        return at.creeping > 1 and self.widen(at)

    def last(self, at: Ladder) -> bool:
        """At the floor cuts that were refused are tried once more; above it columns are given back."""
        if at.other > at.floor:
            return self.widen(at)
        if self.refused == at.residual:
            return False
        heads, self.refused = len(at.shape.value), math.inf
        self.cut(at)
        return len(at.shape.value) < heads

    def state(self) -> dict[str, Any]:
        found = {name: value for name, value in vars(self).items() if name != "failed"}
        return {**found, "failed": [[*columns, left] for columns, left in self.failed.items()]}

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.failed = {(wide, narrow): left for wide, narrow, left in state["failed"]}

    def weigh_again(self, at: Ladder) -> None:
        at.solve_on(balanced(at.problem, at.shape.V, ThinModel(at.problem).evaluate(at.shape)))

    def soften(self, at: Ladder) -> None:
        """Scores of saturated heads as small as costs little.

        Where a pattern is nearer to 0 and 1 than the true one, a step has to be larger the smaller what it acts on,
        and fails; where it is farther, each step gains a factor e.
        """
        for i in hard_heads(at) if self.softening else []:
            shapes = [softer(at.shape, i, SOFTER**j) for j in range(SOFTEST)]
            points = [at.model.evaluate(shape) for shape in shapes]
            least = min(point.loss for point in points)
            best = max(j for j in range(SOFTEST) if points[j].loss <= GIVEN * least)
            if best:
                at.say(f"scores of head {i} times {SOFTER**best:.2f}: residual {at.residual:.1e} → "
                       f"{at.rest(points[best]):.1e}")
                self.softened = True
                at.take(shapes[best], points[best])

    # -- cuts -----------------------------------------------------------------------------------------------

    def cut(self, at: Ladder) -> None:
        """Leave out what costs next to nothing, then try what a few steps may give back."""
        heads = len(at.shape.value)
        if at.residual < AGAIN * self.freed:  # again and again it would add up
            shape, point = free_cuts(at.model, at.shape, at.point, FREE * at.point.loss)
            self.freed = at.rest(point)
            if len(shape.value) < heads:
                at.take(shape, point)
                at.say(f"{heads - len(shape.value)} heads left out")
        while at.residual < AGAIN * self.refused or self.refused == math.inf:
            if not self.fold(at):
                self.refused = at.residual
                break
        if at.residual < NARROW and not at.overfitted:
            self.narrow(at)

    def fold(self, at: Ladder, batch: float = BATCH) -> bool:
        """Fewer heads: as many at once as cost little, or else fewer of them, down to one."""
        allowed = min(batch * at.point.loss, at.point.loss + NEAR**2 * at.scale)
        allowed = max(allowed, (at.floor / 16) ** 2 * at.scale)
        cuts = folds(at.model, at.shape, at.point, moments(at), allowed)
        while cuts:
            if tried(at, cuts[-1].shape, cuts[-1].cost, cuts[-1].what):
                return True
            cuts = cuts[: len(cuts) // 2]
        return False

    def narrow(self, at: Ladder) -> None:
        """Fewer columns: those that cost next to nothing go; then the step down of the singular values is tried,
        and heads as wide in Θ as in W."""
        q, p = at.shape.q, at.shape.V.shape[2]
        found = moments(at)
        theta, out = singular_values(at.shape, at.point, found)
        allowed = FREE * at.point.loss
        fewer = min(q, columns_needed(theta, allowed)), min(p, columns_needed(out, allowed))
        if fewer != (q, p):
            smaller = narrowed(at.shape, at.point, found, *fewer)
            point = at.model.evaluate(smaller)
            if point.loss < 4 * at.point.loss:
                at.say(f"columns {q}, {p} → {fewer[0]}, {fewer[1]}")
                self.given_up.append((q, p))
                at.take(smaller, point)
                (q, p), found = fewer, moments(at)
                theta, out = singular_values(at.shape, at.point, found)
        narrow = min(p, step_down(out))
        for wide in sorted({step_down(theta), min(narrow, q)}):
            if (wide, narrow) == (q, p) or at.residual > 0.1 * self.failed.get((wide, narrow), math.inf):
                continue
            cost = float(theta[:, wide:].square().sum() + out[:, narrow:].square().sum())
            if tried(at, narrowed(at.shape, at.point, found, wide, narrow), cost,
                     f"columns {q}, {p} → {wide}, {narrow}"):
                self.given_up.append((q, p))
                return
            self.failed[wide, narrow] = at.residual

    def widen(self, at: Ladder) -> bool:
        """Columns that were taken away, when much was left, are given back if now a few steps with them leave much
        less on other sequences: what they carry was small beside what was left then."""
        while self.given_up and at.other > FITTED and at.left > 0:
            (q, p), now = self.given_up.pop(), (at.shape.q, at.shape.V.shape[2])
            found = at.solve(widened(at.shape, q, p, at.generator), TRIAL, damping=max(at.damping, 1e-3),
                             price=at.price, inner_limit=INNER[0])
            other = at.error_of(found.point)
            kept = other < MISSED * at.other
            at.say(f"columns {now[0]}, {now[1]} → {q}, {p}: {'kept' if kept else 'not kept'}; others "
                   f"{at.other:.1e} → {other:.1e}")
            if kept:
                self.failed[now] = 0.0
                at.damping, at.price, at.creeping = found.damping, found.price, 0
                at.take(found.shape, found.point)
                return True
        return False


def tried(at: Ladder, shape: Any, cost: float, what: str) -> bool:
    """A smaller fit, kept if a few steps give back what it costs, on other sequences too."""
    if cost > NEAR**2 * at.scale:
        return False
    met = math.sqrt(at.point.loss / at.scale)
    found = at.solve(shape, TRIAL, damping=max(at.damping, 1e-3), price=at.price, inner_limit=INNER[0],
                     target=max(0.9 * met, at.floor / 64))
    other, rest = at.error_of(found.point), at.rest(found.point)
    kept = found.residual <= max(met, at.floor / 16) and other <= max(2 * at.other, 3 * rest, at.floor)
    if at.overfitted:  # rows learned by heart say little: others decide
        kept = other <= at.other
    at.say(f"{what}: {'kept' if kept else 'not kept'}; expected {math.sqrt(cost / at.scale):.1e}, "
           f"residual {at.residual:.1e} → {rest:.1e}")
    if kept:
        at.damping, at.price = found.damping, found.price
        at.take(found.shape, found.point)
    return kept


def moments(at: Ladder) -> Moments:
    """In which changes cost, where the ladder stands."""
    operator = at.model.products(at.point, at.shape, at.dtype)
    found: Moments = operator.moments(at.generator)
    return found


def hard_heads(at: Ladder) -> list[int]:
    """Heads that are saturated where the ladder stands."""
    _, M, T = moments(at)
    return saturated(at.point.W, M, T)


def softer(shape: Thin, head: int, factor: float) -> Thin:
    """The scores of one head times ``factor``."""
    A = shape.A.clone()
    A[head] *= factor
    return Thin.joined(A, shape.B, shape.V)


def widened(shape: Thin, q: int, p: int, generator: torch.Generator) -> Thin:
    """The same function with more columns: those of A and V are random, and B and O have none there yet."""
    m = len(shape.value)

    def more(part: Tensor, columns: int, size: float) -> Tensor:
        new = torch.randn(m, part.shape[1], columns - part.shape[2], generator=generator, dtype=torch.float64)
        typical = part.square().mean((1, 2), keepdim=True).sqrt()
        return torch.cat([part, size * typical * new.to(part)], dim=2)

    return Thin.joined(more(shape.A, q, 1.0), more(shape.B, q, 0.0), more(shape.V, p, 1.0))


def refine_factors(
    source: Source, shape: Thin, *, generator: torch.Generator, limit: int = 100,
    report: Callable[[float], None] | None = None, pulse: Callable[[], None] | None = None,
    log: Callable[[str], None] | None = None, snapshot: Snapshot = NONE,
) -> Candidate:
    """The least-squares solution from ``shape`` on, with as few heads and columns as it takes; out of time, what
    was reached, with the reason "time"."""
    cuts = Cuts()
    found = _climbed(Ladder(source, shape, cuts, generator, limit=limit, report=report, pulse=pulse, log=log,
                            snapshot=snapshot, kept=snapshot.found()))
    if cuts.softened and found.reason != "time" and found.error > FITTED:
        # Scores made smaller may lead into another basin: once more with those that were found.
        other = _climbed(Ladder(source, shape, Cuts(softening=False), generator, limit=limit, report=report,
                                pulse=pulse, log=log))
        if other.error < found.error:
            found = replace(other, products=other.products + found.products)
    return found


def _climbed(at: Ladder) -> Candidate:
    try:
        reason = at.climb()
    except OutOfTimeError:
        reason = "time"
    return at.candidate(reason)
