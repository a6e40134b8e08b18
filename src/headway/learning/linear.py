"""From examples of F(X) = Σ_i (XΘ_iXᵀ)XW_i + 1cᵀ to the operator Σ_i vec(Θ_i)vec(W_i)ᵀ, by the fewest heads.

Least squares in the operator is convex, but has d²(d + 1)/2 unknowns for each output. With m heads there are far
fewer, and W, c are eliminated: Gauss–Newton over the Θ_i from a few random points. A residual at the floor of the
arithmetic is the least there is, so it ends the search and proves its own optimality; the count climbs until one is
met. Where none is, the convex problem, solved at small widths, says what no number of heads goes below.

Working coordinates x = Lz keep zero where it is, since a shift would mix orders: Θ_z = LᵀΘL, W_z = LᵀW.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.core import attention, operator
from headway.core.counting import LinearSize
from headway.core.devices import normal
from headway.core.examples import Examples
from headway.core.layer import AttentionLayer
from headway.learning.formed_learn import Clock, Wanted
from headway.learning.gauss_newton import Free, OutOfTimeError, gauss_newton
from headway.learning.ladder import floor_of
from headway.learning.linear_evidence import depends
from headway.learning.shapes import Full
from headway.learning.source import Source, find_frame, spaced
from headway.linalg import convex
from headway.linalg.projected import LinearRows, Problem, evaluate
from headway.runs.store import Stage

PASSES = (2, 4, 10)  # random starts at each count, one pass over the counts after the other
STEPS = 200  # of Gauss–Newton from one start
BUDGET = 8  # products for each unknown, and at least PRODUCTS of them, until a start is given up
PRODUCTS = 3000  # of one start at least
NEAR, DIGITS = 1e-6, 6  # relative residual below which so many steps are made in float64
CLOSE = 1e-2  # relative residual below which it goes on at once
LAST = 4  # times as many for the last steps, from the best start
PATIENCE = 3  # counts in a row that do not lower the error on other sequences, until a pass ends
BETTER = 0.97  # of it: what lowers it
NEARLY = 1.02  # times the least error on other sequences: fewer heads that reach it are taken
ROWS = 8  # times the counting floor of sequences that are fitted before all of them are
FEWEST = 64  # sequences fitted, where there are as many
SAME = 1.01  # times the least residual: starts that end there agree
WHOLE = 64  # rows for each feature of the convex problem, at most
LIKE_NOISE = 1.05  # times the noise left by the convex solution
ENOUGH = 3  # times the counting floor of one head more, from which starts that agree may end the search


class LinearSource(Source):
    """Working rows of examples of a linear layer; mean: whether scores are divided by the number of keys."""

    def __init__(self, examples: Examples, mean: bool, device: torch.device | str | None = None) -> None:
        super().__init__(examples, device)
        self.mean = mean
        self.frame = find_frame(examples, self.fit, self.device, centred=False)

    def rows_of(self, part: Examples, dtype: torch.dtype) -> LinearRows:
        rows = super().rows_of(part, dtype)
        return LinearRows(rows.X, rows.Y, rows.see, rows.valid,
                          attention.linear_weight(rows.X, rows.see, self.mean))

    def answer(self, rows: Any, Theta: Tensor, W: Tensor, offset: Tensor) -> Tensor:
        return convex.answer(rows, Theta, W, offset)

    def leave(self, Theta: Tensor, W: Tensor, offset: Tensor) -> AttentionLayer:
        """The layer in the caller's coordinates, its heads the canonical ones."""
        frame = self.frame
        assert frame is not None
        Theta, W = (part if frame.plain else frame.back.T @ part for part in (Theta, W))
        Theta = Theta if frame.plain else Theta @ frame.back
        c = offset * frame.scale
        return AttentionLayer(Theta, W * frame.scale, None, c if frame.label is None else c + frame.label,
                              self.examples.mask, "linear/k" if self.mean else "linear").canonical(1e-12)

    @property
    def size(self) -> LinearSize:
        """Of the problem as the tokens show it."""
        data = self.examples
        return LinearSize(self.d, data.out_width, data.length, data.mask)


@dataclass(frozen=True)
class Found:
    """Heads in working coordinates, the residual on the rows fitted, the error on others, and how it came about."""

    Theta: Tensor
    W: Tensor
    offset: Tensor
    residual: float
    error: float
    sequences: int
    starts: tuple[float, ...] = ()  # residuals that the starts at this count ended with
    reason: str = ""

    @property
    def heads(self) -> int:
        return self.Theta.shape[0]

    @property
    def agreeing(self) -> int:
        return sum(left <= SAME * min(self.starts) + 1e-12 for left in self.starts) if self.starts else 0


class Search:
    """The climb over head counts; ``convex``: what no count goes below, where that was solved."""

    def __init__(self, source: LinearSource, wanted: Wanted, clock: Clock) -> None:
        self.source, self.wanted, self.clock = source, wanted, clock
        self.floor = floor_of(source.examples.dtype)
        self.convex: convex.Convex | None = None
        self.tried: dict[int, Found] = {}
        self.held: tuple[int, Problem] | None = None  # the last problem that was asked for, by its heads

    def run(self) -> Found:
        """The fewest heads that meet other sequences, else those with the least error there."""
        try:
            self.solve_convex()
            for number, starts in enumerate(PASSES):
                self.climb(starts, number)
                if not self.met and self.best.reason == "limit" and self.best.residual < CLOSE:
                    self.finish()  # a start that was given up on its way
                if self.met or self.settled:
                    break
            self.descend()
            self.finish()
        except OutOfTimeError:
            if not self.tried:
                raise
            return replace(self.best, reason="time")
        return self.best

    @property
    def met(self) -> bool:
        return any(found.error <= self.floor for found in self.tried.values())

    @property
    def best(self) -> Found:
        """Of those that meet other sequences the one with the fewest heads, else as above."""
        met = [found for found in self.tried.values() if found.error <= self.floor]
        if met:
            return min(met, key=lambda found: found.heads)
        least = min(found.error for found in self.tried.values())
        return min((found for found in self.tried.values() if found.error <= NEARLY * least),
                   key=lambda found: found.heads)

    @property
    def settled(self) -> bool:
        """Whether more starts are not worth their time: what the best leaves is noise as far as can be told."""
        best = self.best
        if self.convex is not None and self.convex.free:
            return self.noise_alone
        enough = best.sequences >= ENOUGH * self.source.size.floor(best.heads + 1)
        return enough and best.agreeing > 1 and not depends(self.source, best, self.wanted.seed)

    @property
    def noise_alone(self) -> bool:
        """Whether the best leaves about as much as the convex solution, below all others, has for noise."""
        if self.convex is None or not self.convex.free:
            return False
        best, noise = self.best, math.sqrt(self.convex.loss / self.convex.free)
        left = best.residual * math.sqrt(self.problem(best.heads).variation() / self.equations(best))
        return noise > 0 and left <= LIKE_NOISE * noise and best.residual > self.floor

    def equations(self, found: Found) -> int:
        """Beyond the unknowns."""
        return max(self.problem(found.heads).equations - self.source.size.unknowns(found.heads), 1)

    def counts(self) -> Iterator[int]:
        if self.wanted.heads is not None:
            yield self.wanted.heads
            return
        most = max(1, min(self.source.size.most_heads(len(self.source.fit)), self.source.d * self.source.d))
        yield from range(self.least, most + 1)

    @property
    def least(self) -> int:
        """Heads needed in any case: the convex solution is the layer, where it is exact and the only one."""
        if self.convex is None or not self.convex.determined or self.convex.residual > self.floor:
            return 1
        return self.needed

    @property
    def needed(self) -> int:
        """The number of heads that no layer with the convex solution's operator goes below."""
        assert self.convex is not None
        Z = convex.operator_of(self.convex.coefficients, self.source.d)
        return max(1, operator.fewest_of(Z, self.tolerance))

    @property
    def tolerance(self) -> float:
        """Part of the largest below which an eigenvalue or a singular value may be rounding of the labels."""
        return max(1e-9, 1e3 * self.floor)

    def climb(self, starts: int, number: int) -> None:
        least, waited = math.inf, 0
        for m in self.counts():
            found = self.start(m, starts, number)
            if found.error <= self.floor:
                return
            waited = 0 if found.error < BETTER * least else waited + 1
            least = min(least, found.error)
            if waited >= PATIENCE or self.noise_alone:
                return

    def start(self, m: int, starts: int, number: int) -> Found:
        """Gauss–Newton from random points, up to the first that leaves nothing, as a stage."""
        # The first is begun however little time there is: there must be something to end with.
        problem, hurried = self.problem(m), bool(self.tried)
        report, pulse = (self.clock.report, self.clock.pulse) if hurried else (None, None)

        def compute() -> Stage:
            draw = torch.Generator().manual_seed(zlib.crc32(f"{self.wanted.seed}:linear:{number}:{m}".encode()))
            residuals, best, products = [], None, 0
            for _ in range(starts):
                like = problem.chunks[0].X.new_empty(m, self.source.d, self.source.d)
                found = gauss_newton(Free(problem), Full(normal(like, draw) / self.source.d), generator=draw,
                                     limit=STEPS, budget=max(PRODUCTS, BUDGET * like.numel()), report=report,
                                     pulse=pulse)
                residuals.append(found.residual)
                products += found.products
                if best is None or found.residual < best.residual:
                    best = found
                if found.residual <= self.floor / 4 or not self.clock.left:
                    break
            assert best is not None
            if best.residual < NEAR:  # inner solves in float32 leave the last digits
                last = gauss_newton(Free(problem), best.shape, generator=draw, limit=DIGITS, damping=1e-6,
                                    inner=torch.float64)
                best, products = (last if last.residual < best.residual else best), products + last.products
            point = best.point
            now = Found(point.Theta, point.W, point.offset, best.residual, 0.0, self.sequences(m))
            error = self.error(now)
            agreeing = replace(now, starts=tuple(residuals)).agreeing
            return {"Theta": point.Theta}, {"residual": best.residual, "error": error, "starts": residuals,
                                            "agreeing": agreeing, "reason": best.reason, "products": products}

        before = self.tried.get(m)
        why = ("does this many heads leave nothing?" if number == 0 else
               "no count left nothing: more random starts")
        tensors, info = self.clock.stage("start", m, compute, why)
        found = self.at(tensors["Theta"], tuple(info["starts"]), info["reason"])
        if before is not None:
            both = before.starts + found.starts
            found = replace(found if found.error < before.error else before, starts=both)
        self.tried[m] = found
        return found

    def at(self, Theta: Tensor, starts: tuple[float, ...] = (), reason: str = "") -> Found:
        """The best W and c for these Θ, and the error on other sequences."""
        m = Theta.shape[0]
        problem = self.problem(m)
        point = evaluate(problem, Theta.to(self.source.device).double())
        assert point.offset is not None
        found = Found(point.Theta, point.W, point.offset, math.sqrt(point.loss / problem.variation()), 0.0,
                      self.sequences(m), starts, reason)
        return replace(found, error=self.error(found))

    def error(self, found: Found, index: np.ndarray | None = None) -> float:
        index = self.source.select if index is None else index
        return self.source.error(index, found.Theta, found.W, found.offset)

    def sequences(self, m: int) -> int:
        return min(len(self.source.fit), max(FEWEST, ROWS * self.source.size.floor(m)), self.source.most())

    def problem(self, m: int) -> Problem:
        if self.held is None or self.held[0] != m:
            index = spaced(self.source.fit, self.sequences(m))
            self.held = m, self.source.problem(index, m, torch.float64)
        return self.held[1]

    def descend(self) -> None:
        """Heads that were too many: those of a smaller rank, as long as they still leave nothing."""
        while self.met and self.wanted.heads is None:
            best = self.best
            Theta, _ = operator.canonical(best.Theta, best.W, self.tolerance)
            if len(Theta) == best.heads:
                below = best.heads - 1
                tried = self.tried.get(below)
                if below < self.least or (tried is not None and len(tried.starts) >= PASSES[0]):
                    return
                found = self.start(below, PASSES[1], len(PASSES))
            else:
                found = self.at(Theta)
                self.tried[len(Theta)] = found
            if found.error > self.floor:
                return

    def finish(self) -> None:
        """Steps on all sequences that fit into memory, where those fitted so far leave something, and to an end,
        where steps did not come to one."""
        best = self.best
        index = spaced(self.source.fit, min(len(self.source.fit), self.source.most()))
        if best.error <= self.floor or (best.sequences >= len(index) and best.reason == "converged"):
            return

        def compute() -> Stage:
            draw = torch.Generator().manual_seed(zlib.crc32(f"{self.wanted.seed}:linear:all".encode()))
            found = gauss_newton(Free(problem), Full(best.Theta), generator=draw, limit=STEPS, damping=1e-3,
                                 budget=LAST * max(PRODUCTS, BUDGET * best.Theta.numel()),
                                 report=self.clock.report, pulse=self.clock.pulse)
            point = found.point
            now = Found(point.Theta, point.W, point.offset, found.residual, 0.0, len(index))
            return {"Theta": point.Theta, "W": point.W, "offset": point.offset}, {
                "residual": found.residual, "error": self.error(now), "reason": found.reason,
                "products": found.products}

        problem = self.source.problem(index, best.heads, torch.float64)
        tensors, info = self.clock.stage("polish", best.heads, compute, "the best so far, on all sequences")
        here = {name: value.to(self.source.device) for name, value in tensors.items()}
        self.tried = {best.heads: Found(here["Theta"], here["W"], here["offset"], info["residual"], info["error"],
                                        len(index), best.starts, info["reason"])}

    def whole(self) -> Problem:
        """The sequences of the convex problem."""
        enough = math.ceil(WHOLE * convex.columns(self.source.d) / self.source.examples.length)
        index = spaced(self.source.fit, min(len(self.source.fit), self.source.most(), enough))
        return self.source.problem(index, self.source.d, torch.float64)

    def solve_convex(self) -> None:
        """Over all operators, where that is small and there are equations for it."""
        size = convex.columns(self.source.d)
        rows = len(self.source.fit) * self.source.examples.length
        if size > convex.MOST or not self.clock.left or rows < size:
            return

        def compute() -> Stage:
            found = convex.solve(self.whole())
            return {"coefficients": found.coefficients}, {
                "residual": found.residual, "loss": found.loss, "rank": found.rank, "columns": found.columns,
                "rows": found.rows}

        tensors, info = self.clock.stage("convex", 0, compute, "what does no number of heads go below?")
        self.convex = convex.Convex(tensors["coefficients"].to(self.source.device), *(
            info[name] for name in ("loss", "residual", "rank", "columns", "rows")))

