"""What to do next: from numbers alone, without solving anything, drawing anything or looking at a clock.

``plan`` is a generator: it yields actions, is sent what each found, and returns the candidate to judge. So it reads
from top to bottom like the procedure it is, and can be run against made-up answers in a test. The thresholds that
decide are fields of ``Rules``.

The order of events. Where the inputs call for it, descent on factors, pruned and refined. Otherwise the span of the
Θ_i by moments if there are rows enough, the heads inside it, Gauss–Newton to the floor; or random starts. What is
left on other sequences decides: sequences set aside whose labels are wrong, further starts, one more head, one
fewer, all rows.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from headway.core.counting import Size
from headway.learning.actions import (
    Action,
    Descend,
    Glance,
    Place,
    Polish,
    Probe,
    Refine,
    Rung,
    SetAside,
    Span,
    Spare,
    Start,
    Unmix,
)
from headway.learning.candidate import Seen

ROWS = 6  # times the counting floor of sequences that a solve takes: see rows_for
LEAST = 16  # sequences that it takes at least
T = TypeVar("T")
Steps = Generator[Action, Any, T]


@dataclass(frozen=True)
class Rules:
    """Thresholds of the policy. Relative errors unless said otherwise."""

    fitted: float = 1e-6  # error that counts as small: no other start is looked for
    near: float = 0.05  # only a start in the right basin comes below
    enough: float = 0.5  # an unmixed fit below is polished before others are tried
    clear: float = 1.5  # gap of the moments below which labels may belong to other rows
    shown: int = 256  # sequences from which that is asked: fewer may seem so by chance
    moment_rows: float = 4.0  # times d² rows from which moments are looked at
    white_rows: float = 8.0  # times d² rows below which white tokens are too few for moments of a wide layer
    wide: int = 64  # width from which random starts are hopeless, for white tokens
    very_wide: int = 128  # width from which factors come first in any case
    coloured: int = 31  # the same, for tokens that are not white
    promising: float = 0.3  # error of a descent from which a refinement is worth its time
    lacking: float = 0.7  # the same from which, at most, it may lack heads: twice as many are tried
    hold: float = 3.0  # pull of the weights to zero, in units of the rate, against learning by heart
    scant: float = 20.0  # equations to an unknown of a student below which its weights are held down at once
    crammed: float = 0.9  # part of the error on others below which a descent knows its own rows better
    small: int = 32  # width up to which scores and projections of full rank cost little
    head_size: int = 24  # least columns of a student's heads, where no rank is given
    head_part: int = 8  # widths over such a column count, for wide layers
    student_heads: int = 6  # heads of a student at least
    student_width: int = 3  # widths that the columns of all its heads make up
    halved: float = 0.5  # part of the error that a descent tried last must leave at most to count
    better: float = 0.9  # part of the error that one more head must leave at most
    misses: int = 0  # head counts without gain that are forgiven before the search ends
    blind_misses: int = 3  # the same, where too few rows show what is left
    unsure: float = 30.0  # times the floor of one more head, sequences below which probes see little of it
    done: float = 1e-9  # error at which no further head is looked for, though the floor is lower
    by_heart: float = 0.5  # part of the error, itself larger, below which a residual was learned by heart
    spent: float = 2 / 3  # part of the sequences from which a solve takes about all of them
    more_rows: int = 4  # times the rows, when they are learned by heart
    short: int = 5  # iterations of a polish that is not expected to help
    hopeless: int = 10  # the same, where not even one head is determined
    spare: float = 1e-3  # least singular value of the features, relative, below which a head may be spare
    unmixed: int = 2  # fits inside the span that are polished, of one head count
    same: float = 1.01  # ratio of two errors, or residuals, up to which they are the same
    agree: int = 2  # starts that end at the same least error: more would hardly find less
    search_agree: int = 4  # the same, when a fit with structure left is looked for from further starts
    tries: int = 2  # random starts with one more head, where the rows show what it explains
    search_limit: int = 30  # iterations of a further start: 95 in 100 of those that lead anywhere need no more
    search_starts: int = 2  # further starts at least
    search_size: int = 2000  # over the width of all heads together: further starts at most
    asides: int = 4  # rounds of setting sequences aside
    around: int = 6  # heads up to which a linear function of the row's own token is tried beside them
    met: float = 2e-4  # residual of a rough fit that meets the labels


@dataclass(frozen=True)
class Facts:
    """What is known before anything is tried."""

    method: str
    heads: int | None  # asked for
    rank: int | str | None
    max_heads: int
    starts: int
    limit: int
    n: int  # different sequences to fit
    most: int  # sequences that may be held for one solve
    size: Size
    white: bool
    floor: float
    copies: float = 1.0  # of each sequence, on average

    def rows_for(self, heads: int, times: int = 1) -> int:
        """Sequences for a solve. Conjugate gradients need fewer steps the more rows there are, and each costs more:
        between four and eight times the floor the product of the two hardly changes."""
        return min(max(ROWS * times * self.size.floor(heads), LEAST), self.everything)

    @property
    def everything(self) -> int:
        """The most sequences that one solve can take, copies among them."""
        return min(round(self.n * self.copies), self.most)

    def within(self, heads: int) -> bool:
        return heads <= self.max_heads and self.size.floor(heads) <= self.n

    @property
    def rows(self) -> int:
        return self.n * self.size.k


@dataclass(frozen=True)
class End:
    """The candidate to judge, and whether what it leaves was seen to depend on the inputs."""

    best: Seen
    structured: bool
    cause: str = ""  # of evidence.CAUSES


def plan(facts: Facts, rules: Rules | None = None) -> Steps[End]:
    """The whole way; see the head of this file."""
    return _Plan(facts, rules or Rules()).whole()


def better(a: Seen | None, b: Seen) -> Seen:
    return b if a is None or b.error < a.error else a


class _AroundError(Exception):
    """A layer and a linear function of the row's own token together meet the labels; with the best fit so far."""

    def __init__(self, best: Seen | None) -> None:
        super().__init__()
        self.best = best


class _AgainError(Exception):
    """Sequences were set aside: what was found with them is no start."""


class _Plan:
    def __init__(self, facts: Facts, rules: Rules) -> None:
        self.facts, self.rules = facts, rules
        self.times = 1  # the usual rows of a solve; more once rows were learned by heart
        self.moments = False  # whether there is a span
        self.rounds = 0  # of setting aside
        self.deep: Seen | None = None  # what descent found after moments had failed
        self.looked: set[str] = set()  # fits that were asked which sequences they miss by far
        self.asked = False  # for a cause of what is left
        self.beside = 0  # heads tried beside a linear function of the row's own token
        self.rough: dict[int, list[tuple[int, Seen]]] = {}  # by heads, starts so far and their rows

    def whole(self) -> Steps[End]:
        """The way from the beginning, each time that sequences were set aside under names of its own."""
        again = ""
        while True:
            steps, answer = self.once(), None
            try:
                while True:
                    action = steps.send(answer)
                    named: dict[str, Any] = {"name": action.name + again}
                    if isinstance(action, Polish) and action.grow is not None:
                        named["grow"] = action.grow + again
                    answer = yield replace(action, **named)
            except StopIteration as stop:
                end: End = stop.value
                return end
            except _AgainError:
                again = f"-without-{self.rounds}"

    def once(self) -> Steps[End]:
        facts, rules = self.facts, self.rules
        self.times, self.moments, self.beside, self.rough, self.looked = 1, False, 0, {}, set()
        self.asked = self.crammed = self.descended = False
        self.deep = None
        if not facts.size.most_heads(facts.n):
            # Not even one head is determined: any fit will do to show it, and it is not worth a long one.
            return End((yield from self.restart(1, range(1), limit=rules.hopeless)), False)
        cause = yield Glance("glance")
        if cause:
            return End((yield from self.restart(1, range(1), limit=rules.hopeless)), True, cause)
        first = facts.method == "factors" or (facts.method == "auto" and self.factors_first())
        found = (yield from self.factors()) if first else None
        if found is not None and (found.error <= rules.fitted or self.no_other_start()):
            left = found.error > rules.fitted and (yield Probe("left-factors", found.name))
            return End(found, left, "by heart" if self.crammed and found.error > rules.promising else "")
        guess = 1
        if facts.rows >= rules.moment_rows * facts.size.d**2 and facts.method != "starts":
            found = yield Span("span")
            guess, self.moments = found.heads, True
            if found.gap < rules.clear and facts.n >= rules.shown and (yield Glance(
                    "rows", rows=True, why="the moments show no head: do the labels belong to other rows?")):
                return End((yield from self.restart(1, range(1), limit=rules.hopeless)), True, "shifted")
        try:
            if facts.heads is not None:
                best, left, cause = yield from self.given(facts.heads)
            else:
                most = max(1, facts.size.most_heads(facts.n))
                best, left, cause = yield from self.counted(min(guess, facts.max_heads, most))
            if left and not cause:
                best, cause = yield from self.seen_through(best)
                left = best.error > facts.floor
        except _AroundError as found:
            some = found.best or (yield from self.restart(1, range(1), limit=rules.hopeless))
            return End(some, True, "around")
        if cause:
            return End(best, True, cause)
        if best.error > rules.fitted and left and self.factors_last():
            self.deep = yield from self.factors()
        if left and self.deep is not None and self.deep.error < rules.halved * best.error:
            best = self.deep
            left = best.error > rules.fitted and (yield Probe("left-factors", best.name))
        if best.error > facts.floor and best.out_rank is None and best.sequences < facts.everything:
            best = yield Polish("final", best.name, everything=True,
                                why="what is left may be smaller on all rows")
            left = left or (yield Probe("left-final", best.name))
        if not left:
            yield from self.set_aside(best)  # a fit of more rows may show what an earlier one did not
        return End(best, left)

    # -- factors --------------------------------------------------------------------------------------------

    def factors_first(self) -> bool:
        """Whether descent comes before moments and random starts: the tokens are far from white, or too few for
        moments, and the layer is too wide for random starts."""
        facts, rules, d = self.facts, self.rules, self.facts.size.d
        if facts.white:
            return d >= rules.very_wide or (d >= rules.wide and facts.rows < rules.white_rows * d * d)
        return d > rules.coloured

    def factors_last(self) -> bool:
        """Whether descent is worth its time where the rest has failed: not for white tokens of a small width, of
        which moments and random starts miss none (0 of 140 layers of success.py and few.py were left to it)."""
        untried = self.facts.method == "auto" and not self.descended
        return untried and (not self.facts.white or self.facts.size.d >= self.rules.wide)

    def ladder(self) -> list[Rung]:
        """Students in the order they are tried: more heads than there should be, of a size that trained heads
        seldom exceed, or of full rank in small widths; the same with its weights held down, at once where rows are
        few; with projections of full rank."""
        facts, rules, d, e = self.facts, self.rules, self.facts.size.d, self.facts.size.e
        columns = max(rules.head_size, 8 * math.ceil(d / (8 * rules.head_part)))
        columns = d if d <= rules.small else min(d, columns)
        q = min(d, facts.rank) if isinstance(facts.rank, int) else columns
        m = facts.heads or min(facts.max_heads, max(rules.student_heads, math.ceil(rules.student_width * d / q)))
        full = min(d, e)
        p = full if d <= self.rules.small else min(q, full)
        unknowns = m * ((2 * d + 1) * q + (d + e) * p)
        scant = facts.rows * e < rules.scant * unknowns
        rungs = [Rung(m, q, p, held) for held in (0.0, rules.hold)][scant:]
        return rungs if p == full else [*rungs, Rung(m, q, full, 0.0)]

    def no_other_start(self) -> bool:
        """Whether there is nothing but descent: it was asked for, or the layer is too wide for random starts and
        its rows are too few for moments."""
        facts, rules, d = self.facts, self.rules, self.facts.size.d
        return facts.method == "factors" or (d >= rules.wide and facts.rows < rules.moment_rows * d * d)

    def factors(self) -> Steps[Seen | None]:
        """The best fit of the ladder. Where no rung came near: from the nearest, if there is no other start; then
        with twice as many heads, if some were found; else None."""
        self.descended = True
        rungs = self.ladder()
        best, nearest = yield from self.descents(rungs)
        if best is None and nearest is not None and self.no_other_start():
            best = yield from self.brought_near(nearest)
        most = min(2 * rungs[0].heads, self.facts.max_heads)
        told = self.facts.heads is not None or most == rungs[0].heads
        if (best is None or best.error > self.rules.promising) and not told and (
                nearest is not None and nearest.error <= self.rules.lacking):
            held = self.rules.hold if self.crammed else 0.0
            found, _ = yield from self.descents([replace(rungs[-1], heads=most, decay=held)])
            best = best if found is None else better(best, found)
        return best

    def brought_near(self, nearest: Seen) -> Steps[Seen]:
        """A few steps from a descent that did not come near, and all the others if these bring it there."""
        best: Seen = yield Refine("refine-nearest", nearest.name, nearest.heads, self.rules.short,
                                  why="no descent came near, and there is no other start: the nearest, briefly")
        if self.rules.fitted < best.error <= self.rules.promising:
            best = better(best, (yield Refine("refine-nearest-on", nearest.name, nearest.heads,
                                              why="a few steps brought it near: to the floor")))
            yield from self.set_aside(best)
        return best

    def descents(self, rungs: list[Rung]) -> Steps[tuple[Seen | None, Seen | None]]:
        """The best fit, each descent that came near refined, and the nearest of the descents."""
        best: Seen | None = None
        nearest: Seen | None = None
        late = self.moments or self.rough
        for j, rung in enumerate(rungs):
            # Weights are held down where a descent knows its own rows better than others, until one comes near.
            if j and rung.decay and (best is not None or not self.crammed):
                continue
            why = self.why_descent(rung, again=bool(j), late=bool(late))
            found: Seen = yield Descend(f"descent-{rung.name}", rung, why=why)
            self.crammed = found.reason == "by heart" or found.residual < self.rules.crammed * found.error
            nearest = better(nearest, found) if math.isfinite(found.error) else nearest
            if not found.error <= self.rules.promising:  # nor where it came to nothing at all
                continue
            fit: Seen = yield Refine(f"refine-{rung.name}", found.name, rung.heads)
            best = better(best, fit)
            if best.error < self.rules.fitted:
                break
            yield from self.set_aside(best)
            if self.narrow(rung, fit):
                rungs[j + 1 :] = [self.wider(rung, fit)]
        return best, nearest

    def narrow(self, rung: Rung, fit: Seen) -> bool:
        """Whether a fit that left something used every column its scores could have, and nobody said how many."""
        told = isinstance(self.facts.rank, int)
        return not told and rung.q < self.facts.size.d and fit.rank is not None and fit.rank >= rung.q

    def wider(self, rung: Rung, fit: Seen) -> Rung:
        """The same with scores and projections of full rank."""
        facts = self.facts
        heads = facts.heads or min(facts.max_heads, max(self.rules.student_heads, fit.heads))
        return Rung(heads, facts.size.d, min(facts.size.d, facts.size.e), rung.decay)

    def why_descent(self, rung: Rung, again: bool, late: bool) -> str:
        if rung.heads > self.ladder()[0].heads:
            return "the descents before left a part of the labels: twice as many heads"
        if again and rung.q == self.facts.size.d > self.ladder()[0].q:
            return "the fit before used all the columns of its scores: scores of full rank"
        if rung.decay and again:
            return "the descent before knew its own rows better than others: weights are held down"
        if rung.decay:
            return "rows are few for so many unknowns: descent on factors with weights held down"
        if again:
            return "the descent before did not come near: projections of full rank"
        if self.facts.method == "factors":
            return "asked for: descent on factors"
        if late:
            return "moments and random starts left something: descent on factors"
        if self.facts.white:
            return "wide, and few rows for moments: descent on factors comes first"
        return "tokens are far from white: descent on factors comes first"

    # -- one head count -------------------------------------------------------------------------------------

    def attempt(self, m: int, brief: bool = False) -> Steps[Seen]:
        """The best fit with m heads: from the span, then from random starts, until one is at the floor or two
        agree on what they leave. ``brief``: one fit of the span and few starts."""
        facts, rules = self.facts, self.rules
        best: Seen | None = None
        begin: tuple[str, ...] = ()
        if self.moments:
            # The first start that looks good is polished at once; only if that leads nowhere do several have to
            # agree.
            for name, enough in ((f"unmix-{m}", rules.enough), (f"unmix-{m}-more", 0.0))[: 1 if brief else 2]:
                again = {} if enough else {"why": "what the span gave led nowhere: several starts must agree now"}
                found = yield Unmix(name, m, enough, **again)
                if min(found.residuals) >= rules.enough:
                    # Nothing in the span explains half: no better a start than a random one.
                    begin = found.names[: rules.unmixed]
                    break
                for j, start in enumerate(found.names[: 1 if brief else rules.unmixed]):
                    best = better(best, (yield self.polish(f"{name.replace('unmix', 'polish')}-{j}", start)))
                    if best.error <= facts.floor:
                        return best
                if best is not None and best.error < rules.near:
                    return best  # what is left is noise or one more head, not a wrong basin
        if begin and best is None and not self.beside:
            # Before anything long: there may be more to the labels than heads.
            best = yield from self.around(m)
            if best is not None and best.error <= facts.floor:
                return best
        starts = min(facts.starts, rules.tries) if brief else facts.starts
        best = better(best, (yield from self.restart(m, range(starts), begin=begin[:1])))
        if begin and best.error >= rules.near and not brief:
            # Of labels that are mostly noise even the right heads leave most, and rough fits on few rows less than
            # they should: the moments, which saw all of them, may have been right after all.
            for j, start in enumerate(begin):
                best = better(best, (yield self.polish(f"polish-{m}-unmixed-{j}", start)))
        return best

    def polish(self, name: str, base: str, limit: int | None = None) -> Polish:
        return Polish(name, base, self.times, limit=limit)

    def restart(
        self, m: int, numbers: range, agree: int | None = None, begin: tuple[str, ...] = (),
        limit: int | None = None, rough_limit: int | None = None,
    ) -> Steps[Seen]:
        """Rough fits from ``begin`` and random starts; the first that comes near is polished, else the best one.
        ``agree`` starts that leave the same are enough, those of earlier searches among them."""
        agree = self.rules.agree if agree is None else agree
        near = self.rules.near
        rough: list[Seen] = []
        tried: dict[str, Seen] = {}
        by_heart: set[str] = set()
        points = [Start(f"start-{m}-unmixed", m, base=base, why="what the span of moments gave, refined roughly")
                  for base in begin]
        points += [Start(f"start-{m}-{j}", m, j) for j in numbers]
        for point in points:
            found: Seen = yield replace(point, times=self.times, limit=rough_limit)
            rough.append(found)
            times = self.times
            self.rough.setdefault(m, []).append((times, found))
            if self.by_heart(found):
                by_heart.add(found.name)
            if found.name in by_heart and not self.exhausted(m):
                self.times *= self.rules.more_rows  # these rows were met without learning about others
            elif found.residual < near and (found.error < 1.0 or not self.exhausted(m)):
                tried[found.name] = yield self.polish(f"polish-{found.name}", found.name, limit)
                if tried[found.name].error < near:
                    return tried[found.name]
            if self.agreed(m, times, agree):
                break
        best = min(rough, key=lambda one: (one.error, one.name))
        if best.name in tried:
            return tried[best.name]
        if best.error < 1.0 or best.name not in by_heart or not self.exhausted(m):
            found = yield self.polish(f"polish-{best.name}", best.name, limit)
            return found
        # Worse than nothing on other rows, and no more rows to be had: a long polish would not mend that.
        short = limit if limit is not None else min(self.facts.limit, self.rules.short)
        found = yield self.polish(f"polish-{best.name}", best.name, short)
        return found

    def by_heart(self, found: Seen) -> bool:
        """Whether rows were met without learning about others."""
        part = self.rules.by_heart
        return found.error > part and found.residual < part * found.error

    def agreed(self, m: int, times: int, enough: int) -> bool:
        """Whether so many starts ended at the least error, or, on the same rows, at the least residual: few other
        sequences tell errors apart by chance."""
        found = self.rough.get(m, [])
        errors = [one.error for _, one in found]
        residuals = [one.residual for rows, one in found if rows == times and not self.by_heart(one)]
        return any(sum(one <= self.rules.same * min(kind) for one in kind) >= enough
                   for kind in (errors, residuals) if kind)

    def exhausted(self, m: int) -> bool:
        """Whether a solve takes about all the rows there are."""
        return self.facts.rows_for(m, self.times) >= self.rules.spent * min(self.facts.n, self.facts.most)

    def set_aside(self, best: Seen) -> Steps[None]:
        """Begin again without the sequences whose labels stand far out, if there are any."""
        if self.rounds >= self.rules.asides or best.error <= self.facts.floor or best.name in self.looked:
            return
        self.looked.add(best.name)
        if (yield SetAside(f"aside-{best.name}", best.name)):
            self.rounds += 1
            raise _AgainError

    def seen_through(self, best: Seen) -> Steps[tuple[Seen, str]]:
        """A cause of what is left, if it shows one; or the fit that was looked for, if asking brings it up."""
        first, self.asked = not self.asked, True
        if best.error <= self.rules.fitted:
            return best, ""
        if first and (yield Place(f"place-{best.name}", best.name)):
            return best, "place"
        found = yield from self.around(best.heads + (self.facts.heads is None), best)
        return best if found is None else better(best, found), ""

    def around(self, m: int, best: Seen | None = None) -> Steps[Seen | None]:
        """Whether a layer of m heads and a linear function of the row's own token together meet the labels, and the
        layer alone does not: then this is the end. If it does, it is the fit that was looked for.

        Too many heads do no harm, and one start is enough (72 of 72 with as many heads as there are, or up to two
        more). Asked again only of more heads.
        """
        m = min(m, self.rules.around)
        if m <= self.beside or not self.facts.within(m + 1):
            return None
        self.beside = m
        found: Seen = yield Start(f"around-{m}", m, own=True,
                                  why="something is left: is there a connection around the layer?")
        if found.residual >= self.rules.met:
            return None
        alone: Seen = yield Start(f"alone-{m}", m, base=found.name,
                                  why="met with a linear function of the row's own token: without it too?")
        if alone.residual >= self.rules.met:
            raise _AroundError(best)
        polished: Seen = yield self.polish(f"polish-alone-{m}", alone.name)
        return polished

    # -- more or fewer heads --------------------------------------------------------------------------------

    def grow(self, best: Seen, name: str) -> Steps[Seen]:
        """One more head, started from what the others leave."""
        if self.moments:
            yield Span(f"{name}-span", best.name, why="what the heads leave depends on the inputs: one more head?")
        found: Seen = yield Polish(
            name, best.name, self.times, grow=f"{name}-span" if self.moments else "random",
            why="one more head, begun from what the others leave")
        return found

    def pruned(self, best: Seen) -> Steps[Seen]:
        """Fewer heads as long as other sequences do not object."""
        while best.heads > 1:
            fewer = yield Polish(f"prune-{best.heads - 1}", best.name, self.times, drop=True,
                                 why="do other sequences miss a head that is taken away?")
            if fewer.error > max(self.facts.floor, self.rules.same * best.error):
                break
            best = fewer
        return best

    def simplified(self, best: Seen) -> Steps[Seen]:
        """At the floor: heads whose features depend on the others' are taken away, equal ones merged, dead ones
        dropped, and the rest polished again."""
        floor = self.facts.floor
        while best.heads > 1 and (yield Spare(f"features-{best.heads}", best.name, self.rules.spare)):
            fewer = yield Polish(f"spare-{best.heads - 1}", best.name, self.times, drop=True,
                                 why="one head follows from the others: without it")
            if fewer.error > floor:
                break
            best = fewer
        again: Seen = yield Polish(f"merge-{best.heads}", best.name, self.times, merge=True,
                                   why="equal heads made one, empty ones left out")
        return again if again.error <= floor else best

    def given(self, m: int) -> Steps[tuple[Seen, bool, str]]:
        """The best fit with m heads, whether what it leaves depends on the inputs, and the cause if it shows."""
        floor = self.facts.floor
        best = yield from self.attempt(m)
        yield from self.set_aside(best)
        if best.error <= floor or not (yield Probe(f"left-{m}", best.name)):
            return best, False, ""
        best = yield from self.freed(best)
        if best.error <= floor:
            return best, False, ""
        best, cause = yield from self.seen_through(best)
        if cause or best.error <= floor:
            return best, bool(cause), cause
        if self.facts.size.floor(m + 1) <= self.facts.n:
            # If one more head helps, either the start was a poor one, and then a head can be spared again, or m
            # is too few.
            grown = yield from self.grow(best, f"grow-{m}-{m + 1}")
            if grown.error < self.rules.better * best.error:
                best = better(best, (yield Polish(f"prune-{m}", grown.name, self.times, drop=True,
                                                  why="a head more helped: can another be spared now?")))
        if best.error > floor:
            best = yield from self.searched(m, best)
        return best, best.error > floor, ""

    def counted(self, m: int) -> Steps[tuple[Seen, bool, str]]:
        """Heads are added until nothing that depends on the inputs is left, and taken away while nobody misses
        them. Answers as ``given`` does."""
        facts, rules = self.facts, self.rules
        best = yield from self.attempt(m)
        yield from self.set_aside(best)
        tried, misses, structured = m, 0, False
        asked: Seen | None = None
        while best.error > max(facts.floor, rules.done):
            here = best.heads
            if best is not asked:  # asked once of every fit: what a stage's name stands for must not change
                structured = yield Probe(f"left-{here}", best.name)
            if best is not asked and not structured and best.sequences < facts.everything:
                # Few rows show little: before calling the rest noise, look at all of them.
                best = yield Polish(f"settle-{here}", best.name, everything=True,
                                    why="nothing shows on few rows: before it is called noise, all of them")
                structured = best.error > facts.floor and (yield Probe(f"left-{here}-all", best.name))
                if not structured:
                    yield from self.set_aside(best)
            asked = best
            if structured and not self.asked:
                best, cause = yield from self.seen_through(best)
                if cause:
                    return best, True, cause
                if best is not asked:
                    tried = best.heads
                    continue
            if structured and facts.size.d >= rules.wide and self.factors_last():
                # What moments miss of a wide layer, random starts seldom find.
                self.deep = yield from self.factors()
                if self.deep is not None and self.deep.error <= rules.fitted:
                    return self.deep, False, ""
            tried += 1
            # Few rows show little of what is left: look further before calling it noise.
            sure = self.moments and facts.n >= rules.unsure * facts.size.floor(tried)
            blind = rules.near < best.error < 1.0 and not sure  # above, heads are learned by heart
            if not (structured or blind) or misses > (rules.blind_misses if blind else rules.misses):
                break
            if not facts.within(tried):
                break
            more: Seen | None = None
            if self.moments and tried == here + 1:
                more = yield from self.grow(best, f"grow-{here}-{tried}")
            if more is None or more.error > facts.floor:
                more = better(more, (yield from self.attempt(tried, brief=sure)))
            tried = max(tried, more.heads)
            misses = 0 if more.error < rules.better * best.error else misses + 1
            if misses == 0:
                best = better(best, more)
                yield from self.set_aside(best)
        if best.error <= max(facts.floor, rules.done):
            structured = False
        if structured:
            best = yield from self.freed(best)
        if structured and best.error > facts.floor:
            best = yield from self.search(best)
        if best.error <= facts.floor:
            return (yield from self.simplified(best)), False, ""
        return (yield from self.pruned(best)), structured, ""

    def freed(self, best: Seen) -> Steps[Seen]:
        """Without the ranks that were read off the singular values: they may not be ranks after all."""
        if best.error > self.facts.floor and best.out_rank is not None and not isinstance(self.facts.rank, int):
            return better(best, (yield Polish("free-rank", best.name, self.times, free=True,
                                               why="something is left: without the rank that was read off")))
        return best

    def search(self, best: Seen) -> Steps[Seen]:
        """A wrong basin is left by starting afresh, more often, with a head more too."""
        here = best.heads
        for m in (here, here + 1):
            if self.facts.within(m):
                best = yield from self.searched(m, best)
            if best.error <= self.facts.floor:
                break
        return best

    def searched(self, m: int, best: Seen) -> Steps[Seen]:
        """The better of this fit and further starts with m heads, unless enough have agreed already."""
        if self.agreed(m, self.times, self.rules.search_agree):
            return best
        rules = self.rules
        limit = min(self.facts.limit, rules.search_limit)
        return better(best, (yield from self.restart(m, self.more(m), rules.search_agree, rough_limit=limit)))

    def more(self, m: int) -> range:
        """Further random starts, fewer of them where one costs much."""
        starts, rules = self.facts.starts, self.rules
        most = min(starts, rules.search_size // (m * self.facts.size.d))
        return range(starts, starts + max(rules.search_starts, most))
