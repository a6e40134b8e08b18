"""learn(): from examples of F(X) = Σ_i softmax(XΘ_iXᵀ + 1(Xu_i)ᵀ) X W_i + 1cᵀ to every Θ_i, u_i, W_i and c.

The order of events: split off held-out sequences; find working coordinates; the span of the Θ_i by moments,
where there are examples enough; the heads inside the span; Gauss–Newton to the floor. What is left unexplained
on held-out sequences decides what happens next: further starts, one more head, one head fewer, all rows. Each
step is a stage with a name and a random generator of its own, so that a resumed run takes the same path.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway import attention, checks
from headway.examples import Examples
from headway.layer import AttentionLayer
from headway.learn import moments
from headway.learn.counting import Size
from headway.learn.descent import descend
from headway.learn.gauss_newton import Rows, evaluate, gauss_newton, least_curvature
from headway.learn.polish import Polished, floor_of, polish
from headway.learn.shapes import Factored, Full, Shape
from headway.learn.source import Source, find_frame, spaced
from headway.learn.unmix import unmix, unseen
from headway.results import Fit, NotLearnedError, Status
from headway.store import Run, Stage

METHODS = ("moments", "descent")
NEAR = 0.05  # a relative residual that only a start in the right basin reaches
Progress = Callable[[Mapping[str, Any]], None]


def learn(
    examples: Examples,
    heads: int | str = "auto",
    method: str = "moments",
    *,
    rank: int | str | None = "auto",
    max_heads: int = 32,
    starts: int = 6,
    limit: int = 100,
    seconds: float | None = None,
    seed: int = 0,
    strict: bool = False,
    device: torch.device | str | None = None,
    run: Run | None = None,
    progress: Progress | None = None,
) -> Fit:
    """Find m, Θ_i, u_i, W_i and c with Y = Σ_i softmax(XΘ_iXᵀ + 1(Xu_i)ᵀ + mask) X W_i + 1cᵀ.

    Assumes random inputs that visit the directions of interest, at least the counting floor of examples
    (``fit.stats["floor"]``), heads that differ. Tokens need not be white: mean and covariance are removed first.

    heads: "auto" finds the count. method: "moments" (span, unmix, polish; straight to Gauss–Newton from
    random starts when examples are few) or "descent" (Adam, the baseline; needs ``heads``). rank: "auto" uses
    a low rank of the Θ_i where it shows, an int imposes it, None never. starts: random starts tried before
    giving up. limit: Gauss–Newton iterations in one solve. seconds: stop after about this long with the best fit so
    far (what a resumed run finds then depends on the clock). A tenth of the examples (2,000 at most) is held out
    and only used to judge. strict=True raises NotLearnedError unless the status is ok. run: a folder that
    keeps the stages. progress: called with {"stage", "residual", "heads"}.

    >>> from headway.examples import draw
    >>> truth = AttentionLayer.random(heads=2, width=6, seed=0)
    >>> fit = learn(draw(truth, count=400, length=6, seed=1))
    >>> fit.layer.heads, fit.status.kind
    (2, 'recovered')
    """
    wanted = checks.count_or("heads", heads, "auto")
    checks.choice("method", method, METHODS)
    rank = checks.count_or("rank", rank, "auto", None)
    if not isinstance(examples, Examples):
        checks.refuse("examples", "an Examples object", type(examples).__name__, "headway.Examples(X, Y)")
    if len(examples) < 2:
        checks.refuse("examples", "at least 2 sequences, one of them held out", len(examples), "more")
    first = examples.take(spaced(np.arange(len(examples)), min(256, len(examples))))
    checks.tokens(first.X, first.padding)
    checks.whole("starts", starts)
    checks.whole("limit", limit)
    checks.whole("seed", seed, 0)
    if seconds is not None:
        checks.number("seconds", seconds, strictly=True)
    if isinstance(rank, int):
        checks.whole("rank", rank, 1, examples.width)
    route = _Route(examples, wanted, rank, checks.whole("max_heads", max_heads), starts, limit, seconds,
                   seed, device, run, progress)
    fit = route.descent() if method == "descent" else route.moments()
    if run is not None:
        run.finish(fit)
    if strict and not fit.status.ok:
        raise NotLearnedError(fit)
    return fit


class _OutOfTimeError(Exception):
    """Raised between iterations when the seconds are used up."""


class _Route:
    """One run of the learner: its settings, the stages done so far and what they cost."""

    def __init__(
        self, examples: Examples, heads: int | str | None, rank: int | str | None, max_heads: int, starts: int,
        limit: int, seconds: float | None, seed: int, device: torch.device | str | None, run: Run | None,
        progress: Progress | None,
    ) -> None:
        self.heads, self.rank, self.max_heads = heads, rank, max_heads
        self.starts, self.limit, self.seed = starts, limit, seed
        self.run, self.progress = run, progress
        self.trace: list[dict[str, Any]] = []
        self.begun = time.perf_counter()
        self.deadline = math.inf if seconds is None else self.begun + seconds
        self.best: Polished | None = None  # so far, for when time runs out
        self.condition: tuple[Polished, float] | None = None  # of the features, the last time it was asked for
        self.source = Source(examples, device)
        self.examples = examples
        self.floor = floor_of(examples.dtype)
        self.current = {"stage": "frame", "heads": 0}
        self.report(None)
        frame = self.source.frame = find_frame(examples, self.source.fit, self.source.device)
        self.trace.append({"stage": "frame", "white": frame.plain, "directions": self.source.d,
                           "seconds": time.perf_counter() - self.begun})
        imposed = rank if isinstance(rank, int) else None
        self.size = Size(self.source.d, examples.out_width, examples.length, examples.mask, imposed)
        self.basis: Tensor | None = None
        if isinstance(heads, int) and self.size.floor(heads) > len(self.source.fit):
            n, need = len(self.source.fit), self.size.floor(heads)
            checks.refuse(
                "heads", f"a count that {n} sequences (after {len(self.source.held)} held out) can determine: "
                f"at most {self.size.most_heads(n)}", f"{heads}, with {self.size.unknowns(heads)} unknowns",
                f"at least {need} sequences, three times that to be safe; or rank=r if the rank is known")

    # -- stages ---------------------------------------------------------------------------------------------

    def stage(self, name: str, compute: Callable[[], Stage], heads: int = 0) -> Stage:
        self.current = {"stage": name, "heads": heads}
        self.report(None)
        begun = time.perf_counter()

        def timed() -> Stage:
            tensors, info = compute()
            return tensors, {**info, "seconds": time.perf_counter() - begun}

        tensors, info = timed() if self.run is None else self.run.stage(name, timed)
        self.trace.append({"stage": name, **info})
        return {n: t.to(self.source.device) for n, t in tensors.items()}, info

    def report(self, residual: float | None) -> None:
        if time.perf_counter() > self.deadline:
            raise _OutOfTimeError
        if self.progress is not None:
            self.progress({**self.current, "residual": residual})

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self.seed}:{name}".encode()))

    def rows_for(self, heads: int) -> int:
        """Sequences for a solve. Conjugate gradients need fewer steps the more rows there are, and each costs more:
        between four and eight times the floor the product of the two hardly changes."""
        return min(max(6 * self.size.floor(heads), 16), len(self.source.fit), self.source.most())

    # -- span -----------------------------------------------------------------------------------------------

    def find_span(self, name: str = "span", taken: Polished | None = None) -> tuple[int, Tensor]:
        """Moments of the labels, or of what ``taken`` leaves of them, on as many rows as make the gap clear."""
        tensors, info = self.stage(name, lambda: self._span(name, taken), 0)
        return int(info["heads"]), tensors["basis"]

    def _span(self, name: str, taken: Polished | None) -> Stage:
        source, d = self.source, self.source.d
        L = self.heads + 4 if isinstance(self.heads, int) else 8
        if taken is not None:
            L = 4
        count = min(len(source.fit), max(256, math.ceil(8 * d * d / self.examples.length)))
        while True:
            index = spaced(source.fit, count)

            def batches(index: np.ndarray = index, L: int = L) -> Iterable[Rows]:
                for rows in source.stream(index, L, torch.float32):
                    yield rows if taken is None else _left_over(rows, taken)

            found = moments.span(batches, L, generator=self.generator(name))
            m, ratio = moments.gap(
                found.values, complete=2 * len(found.values) >= min(d, self.examples.out_width) * d)
            if found.explained > 1 - 1e-6:
                m, ratio = 1, 1.0  # uniform attention says it all; what is left is rounding
                break
            hidden = m >= len(found.values) - 3 or ratio < 1.3  # perhaps more heads than directions looked at
            most = min(self.max_heads + 4, 2 * d)
            if hidden and isinstance(self.heads, str) and len(found.values) == L < most and taken is None:
                L = min(2 * L, most)
            elif ratio < 1.5 and count < len(source.fit):
                count = min(4 * count, len(source.fit))
            else:
                break
        values = [float(s) for s in found.values]
        return {"basis": found.basis}, {"heads": m, "gap": ratio, "singular_values": values,
                                        "linear_part": found.explained, "sequences": count}

    # -- one head count -------------------------------------------------------------------------------------

    def attempt(self, m: int) -> Polished:
        """The best fit with m heads: from the span, then from random starts, until one is at the floor or two
        agree on what they leave."""
        best: Polished | None = None
        if self.basis is not None:
            name = f"unmix-{m}"
            tensors, _ = self.stage(name, lambda: self._unmix(name, m), m)
            for j, Theta in enumerate(tensors["Theta"][:2]):
                best = _better(best, self.polish(f"polish-{m}-{j}", Theta))
                if best.held <= self.floor:
                    return best
            if best is not None and best.held < NEAR:
                return best  # what is left is noise or one more head, not a wrong basin
        return _better(best, self.restart(m, range(self.starts)))

    def restart(self, m: int, numbers: range, settle: bool = True) -> Polished:
        """Rough fits from random starts; the first that comes near is polished, else the best of them.

        With ``settle`` two starts that leave the same are enough: more would hardly leave less.
        """
        rough: list[tuple[float, int, Tensor]] = []
        for j in numbers:
            name = f"start-{m}-{j}"
            tensors, info = self.stage(name, lambda name=name, j=j: self._start(name, m, j), m)  # type: ignore[misc]
            if info["residual"] < NEAR:
                found = self.polish(f"polish-{name}", tensors["Theta"])
                if found.held < NEAR:
                    return found
            rough.append((info["unseen"], j, tensors["Theta"]))
            least = min(rough)[0]
            if settle and sum(left < 1.01 * least for left, _, _ in rough) > 1:
                break
        _, j, Theta = min(rough, key=lambda entry: entry[:2])
        return self.polish(f"polish-start-{m}-{j}", Theta)

    def _unmix(self, name: str, m: int) -> Stage:
        assert self.basis is not None
        source = self.source
        basis = self.basis[: m + 2]
        rows = math.ceil(4 * (m * source.d + m * len(basis)) / self.examples.length)
        count = min(2 * rows, len(source.fit))
        index = spaced(source.fit, count)
        fit, check = (source.problem(part, m, torch.float32) for part in (index[::2], index[1::2]))
        found = unmix(fit, check, basis, m, starts=2 * self.starts, generator=self.generator(name),
                      report=self.report)
        return {"Theta": found.Theta}, {"residuals": list(found.residuals), "starts": list(found.starts),
                                        "agreeing": found.agreeing, "products": found.products}

    def _start(self, name: str, m: int, j: int) -> Stage:
        """Gauss–Newton over all of Θ from a random point, in float32, to a rough fit."""
        source, draw = self.source, self.generator(name)
        Theta = torch.randn(m, source.d + 1, source.d, generator=draw)
        Theta = Theta * ((1.0, 2.0, 0.5)[j % 3] / Theta.flatten(1).norm(dim=1).view(m, 1, 1))
        Theta = Theta.to(source.device)
        shape: Shape = Factored.of(Theta, self.rank) if isinstance(self.rank, int) else Full(Theta)
        problem = source.problem(spaced(source.fit, self.rows_for(m)), m, torch.float32)
        solution = gauss_newton(problem, shape, generator=draw, limit=self.limit, target=1e-4,
                                report=self.report)
        other = source.problem(source.held[: max(1, min(64, len(source.held)))], m, torch.float32)
        return {"Theta": solution.point.Theta}, {
            "residual": solution.residual, "unseen": unseen(solution.point, other),
            "reason": solution.reason, "products": solution.products}

    def polish(self, name: str, Theta: Tensor, sequences: int | None = None) -> Polished:
        m = Theta.shape[0]
        count = sequences or self.rows_for(m)

        def compute() -> Stage:
            found = polish(self.source, Theta, count, rank=self.rank, generator=self.generator(name),
                           limit=self.limit, report=self.report)
            info = asdict(found)
            return {part: info.pop(part) for part in ("Theta", "W", "offset")}, info

        found = _polished(self.stage(name, compute, m))
        self.best = _better(self.best, found)
        return found

    # -- more or fewer heads --------------------------------------------------------------------------------

    def grow(self, best: Polished, name: str) -> Polished:
        """One more head, started from what the others leave unexplained."""
        if self.basis is not None:
            _, basis = self.find_span(f"{name}-span", best)
            new = 2.0 * basis[:1].to(best.Theta)
        else:
            draw = torch.randn(1, *best.Theta.shape[1:], generator=self.generator(name), dtype=torch.float64)
            new = (draw / draw.norm()).to(best.Theta)
        return self.polish(name, torch.cat([best.Theta, new]))

    def prune(self, best: Polished, name: str) -> Polished:
        """One head fewer: without the one that is missed least."""
        source, m = self.source, best.Theta.shape[0]
        problem = source.problem(spaced(source.fit, self.rows_for(m)), m, torch.float64)
        losses = []
        for i in range(m):
            losses.append(evaluate(problem, torch.cat([best.Theta[:i], best.Theta[i + 1 :]])).loss)
        i = int(np.argmin(losses))
        return self.polish(name, torch.cat([best.Theta[:i], best.Theta[i + 1 :]]))

    def pruned(self, best: Polished, name: str) -> Polished:
        """Fewer heads as long as held-out sequences do not object."""
        while best.Theta.shape[0] > 1:
            fewer = self.prune(best, f"{name}-{best.Theta.shape[0] - 1}")
            if fewer.held > max(self.floor, 1.01 * best.held):
                break
            best = fewer
        return best

    def simplified(self, best: Polished) -> Polished:
        """At the floor: heads whose features depend on the others' are taken away, equal ones merged, dead ones
        dropped, and the rest polished again."""
        while best.Theta.shape[0] > 1 and self.redundant(best, 1e-3):
            fewer = self.prune(best, f"spare-{best.Theta.shape[0] - 1}")
            if fewer.held > self.floor:
                break
            best = fewer
        layer = AttentionLayer(best.Theta[:, :-1], best.W, best.Theta[:, -1], best.offset, self.examples.mask)
        short = layer.canonical(1e-3)  # a guess, believed only if it meets the examples as well
        if short.heads == layer.heads:
            return best
        again = self.polish(f"merge-{short.heads}", short.augmented)
        return again if again.held <= self.floor else best

    def redundant(self, best: Polished, tolerance: float = 1e-6) -> bool:
        """Whether the features [P_1X | … | P_mX | 1] depend on each other, so that the W_i are not unique.

        Equal heads do that; so do, with two tokens, a head, its reflection and uniform attention.
        """
        if self.condition is None or self.condition[0] is not best:
            m = best.Theta.shape[0]
            problem = self.source.problem(spaced(self.source.fit, self.rows_for(m)), m, torch.float64)
            s = torch.linalg.svdvals(evaluate(problem, best.Theta).factor)
            self.condition = best, float(s[-1] / s[0])
        return self.condition[1] < tolerance

    # -- the whole way --------------------------------------------------------------------------------------

    def moments(self) -> Fit:
        try:
            return self._moments()
        except _OutOfTimeError:
            self.deadline = math.inf
            if self.best is None:
                self.limit = 3
                self.restart(self.heads if isinstance(self.heads, int) else 1, range(1))
            assert self.best is not None
            return self.close(replace(self.best, reason="time"), False)

    def _moments(self) -> Fit:
        n, k, d = len(self.source.fit), self.examples.length, self.source.d
        if not self.size.most_heads(n):
            # Not even one head is determined: any fit will do to show it, and it is not worth a long one.
            self.limit = min(self.limit, 10)
            return self.close(self.restart(1, range(1)), False)
        guess = 1
        # Below about 4 d² rows the noise floor of the moments hides the heads.
        if n * k >= 4 * d * d:
            guess, self.basis = self.find_span()
        if isinstance(self.heads, int):
            best, structured = self._given(self.heads)
        else:
            best, structured = self._counted(min(guess, self.max_heads, max(1, self.size.most_heads(n))))
        if best.held > self.floor and best.sequences < min(n, self.source.most()):
            best = self.polish("final", best.Theta, n)
            structured = structured or self.leftover(best, "leftover-final")
        return self.close(best, structured)

    def _given(self, m: int) -> tuple[Polished, bool]:
        best = self.attempt(m)
        if best.held <= self.floor or not self.leftover(best, f"leftover-{m}"):
            return best, False
        if self.size.floor(m + 1) <= len(self.source.fit):
            # If one more head helps, either the start was a poor one, and then a head can be spared again, or m
            # is too few.
            grown = self.grow(best, f"grow-{m + 1}")
            if grown.held < 0.95 * best.held:
                best = _better(best, self.prune(grown, f"prune-{m}"))
        if best.held > self.floor:
            best = _better(best, self.restart(m, self._more(m), settle=False))
        return best, best.held > self.floor

    def _counted(self, m: int) -> tuple[Polished, bool]:
        """Heads are added until nothing with structure is left, and taken away while nobody misses them."""
        n = len(self.source.fit)
        best = self.attempt(m)
        tried, misses, structured = m, 0, False
        while best.held > self.floor:
            here = best.Theta.shape[0]
            structured = self.leftover(best, f"leftover-{here}")
            if not structured and best.sequences < min(n, self.source.most()):
                # Few rows show little: before calling the rest noise, look at all of them.
                best = self.polish(f"settle-{here}", best.Theta, n)
                structured = best.held > self.floor and self.leftover(best, f"leftover-{here}-all")
            tried += 1
            if not structured or misses > 1 or not self._within(tried):
                break
            more: Polished | None = None
            if self.basis is not None and tried == best.Theta.shape[0] + 1:
                more = self.grow(best, f"grow-{tried}")
            if more is None or more.held > self.floor:
                more = _better(more, self.attempt(tried))
            misses = 0 if more.held < 0.95 * best.held else misses + 1
            best = _better(best, more) if misses == 0 else best
        if structured and best.held > self.floor:
            best = self._search(best)
        if best.held <= self.floor:
            return self.simplified(best), False
        return self.pruned(best, "prune"), structured

    def _search(self, best: Polished) -> Polished:
        """A wrong basin is left by starting afresh, more often, with a head more or fewer."""
        here = best.Theta.shape[0]
        for m in (here, here + 1, here - 1, here + 2):
            if m < 1 or not self._within(m):
                continue
            best = _better(best, self.restart(m, self._more(m), settle=False))
            if best.held <= self.floor:
                break
        return best

    def _within(self, m: int) -> bool:
        return m <= self.max_heads and self.size.floor(m) <= len(self.source.fit)

    def _more(self, m: int) -> range:
        """Further random starts, fewer of them where one is dear."""
        return range(self.starts, self.starts + max(2, min(2 * self.starts, 2000 // (m * self.source.d))))

    def descent(self) -> Fit:
        if not isinstance(self.heads, int):
            checks.refuse("heads", "a whole number with method='descent'", repr(self.heads),
                          "method='moments', which finds the count, or heads=4")
        assert isinstance(self.heads, int)
        m = self.heads

        def compute() -> Stage:
            found = descend(self.source, m, seed=self.generator("descent"), report=self.report)
            info = asdict(found)
            return {part: info.pop(part) for part in ("Theta", "W", "offset")}, info

        return self.close(_polished(self.stage("descent", compute, m)), False)

    # -- the end --------------------------------------------------------------------------------------------

    def close(self, best: Polished, structured: bool) -> Fit:
        assert self.source.frame is not None
        layer = self.source.frame.leave(best.Theta, best.W, best.offset, self.examples.mask)
        layer = _without_empty(layer.canonical(1e-12), max(best.held, self.floor), self.source.frame.scale)
        m = best.Theta.shape[0]
        size = replace(self.size, rank=best.rank)
        free = max(best.equations - size.unknowns(m), 1)
        noise = best.residual * math.sqrt(best.equations / free)
        products = sum(int(event.get("products", 0)) for event in self.trace)
        stats = {
            "heads": layer.heads, "rank": best.rank, "held_out_error": best.held, "fitted_error": best.residual,
            "noise": noise, "examples": len(self.examples), "held_out": len(self.source.held),
            "used": best.sequences, "floor": size.floor(m), "unknowns": size.unknowns(m),
            "unidentified_directions": self.examples.width - self.source.d, "products": products,
            "seconds": time.perf_counter() - self.begun,
        }
        status = self._status(best, structured, noise, size)
        return Fit(layer, status, stats, tuple(self.trace))

    def _status(self, best: Polished, structured: bool, noise: float, size: Size) -> Status:
        m, n, held = best.Theta.shape[0], self.distinct(), best.held
        numbers = {"held_out_error": held, "floor": self.floor, "heads": float(m)}
        blind = self.examples.width - self.source.d
        tail = (f" {blind} of {self.examples.width} token directions are never visited and stay unidentified."
                if blind else "")
        if held <= self.floor and (self.redundant(best) or not self.determined(best)):
            return Status("too_few", f"The examples are met exactly by {_heads(m)}, but do not determine them: "
                          "other attention matrices do the same on these inputs. Draw more varied ones." + tail,
                          numbers)
        if held <= self.floor:
            return Status("recovered", f"Recovered to the floor of the arithmetic: {_heads(m)}, relative error "
                          f"{held:.1e} on {len(self.source.held)} held-out sequences.{tail}", numbers)
        need = math.ceil(3 * size.floor(m) / (1 - len(self.source.held) / len(self.examples)))
        if n < size.floor(m) or (held > 3 * noise and best.sequences >= n and n < 3 * size.floor(m)):
            return Status("too_few", f"Too few examples: {n} different sequences do not determine {_heads(m)} "
                          f"(held-out error {held:.1e}, fitted {best.residual:.1e}). About {need} sequences are "
                          f"needed.{tail}", {**numbers, "needed": float(need)})
        if best.reason == "time":
            return Status("limit", f"Out of time with {_heads(m)}: held-out error {held:.1e}. Raise seconds.{tail}",
                          numbers)
        if best.reason == "limit":
            return Status("limit", f"Stopped at the limit of {self.limit} iterations with {_heads(m)}: held-out "
                          f"error {held:.1e}, still falling. Raise limit.{tail}", numbers)
        if held > 0.9:
            return Status("not_realisable", f"Nothing learned: {_heads(m)} leave {held:.2f} of the labels' spread "
                          "on held-out sequences. The labels hardly answer to the inputs, or a few outliers rule "
                          "them." + tail, {**numbers, "residual_floor": held})
        if structured or held > 3 * noise:
            return Status("not_realisable", f"Not realisable with {_heads(m)}: the residual floor is {held:.2e} "
                          f"and has structure that further heads would explain in part, so it is not noise.{tail}",
                          {**numbers, "residual_floor": held})
        return Status("noise", f"Stopped at the noise level: {_heads(m)}, label noise estimated at {noise:.2e} of "
                      f"the labels' spread; held-out error {held:.2e}.{tail}", {**numbers, "noise": noise})

    def distinct(self) -> int:
        """How many different sequences were fitted; a long list is taken to have no repeats."""
        if len(self.source.fit) > 4096:
            return len(self.source.fit)
        return self._unique(self.source.fit)

    def _unique(self, index: np.ndarray) -> int:
        return _different(self.examples.take(index).X.flatten(1))

    def determined(self, best: Polished) -> bool:
        """Whether the inputs pin Θ down. Looked at where tokens are so few that they may not: below eight times the
        width, and a generic sample is far above."""
        source, m = self.source, best.Theta.shape[0]
        sample = self.examples.take(spaced(source.fit, min(len(source.fit), 512)))
        flat = sample.X.reshape(-1, self.examples.width)
        if isinstance(self.rank, int) or _different(flat) > 8 * source.d:
            return True
        n = self.distinct()
        everything = np.concatenate([source.fit, source.held])
        if n < 6 * self.size.floor(m) and self._unique(everything) == n:
            return False  # every held-out sequence was fitted: meeting it again proves nothing

        def compute() -> Stage:
            problem = source.problem(spaced(source.fit, best.sequences), m, torch.float64)
            point = evaluate(problem, best.Theta)
            return {}, {"least_curvature": least_curvature(
                problem, point, Full(best.Theta), self.generator("determined"))}

        _, info = self.stage("determined", compute, m)
        return bool(info["least_curvature"] > 1e-9)

    def leftover(self, best: Polished, name: str) -> bool:
        """Whether the residual still answers to the inputs: its leading moment against that of residuals handed
        to other sequences, where every relation to the inputs is cut and the noise is kept.

        Looked at on the rows fitted: there the error of the estimate itself leaves no trace, to first order.
        """
        source = self.source
        index = spaced(source.fit, min(best.sequences, 4096))

        def compute() -> Stage:
            tops = []
            for shift in (0, 1, 2):

                def batches(shift: int = shift) -> Iterable[Rows]:
                    for rows in source.stream(index, 4, torch.float32):
                        rest = _left_over(rows, best)
                        yield replace(rest, Y=rest.Y.roll(shift, 0))

                found = moments.span(batches, 4, generator=self.generator(name), passes=4)
                tops.append(float(found.values[0]))
            return {}, {"top_moment": tops[0], "without_relation": max(tops[1:])}

        _, info = self.stage(name, compute, best.Theta.shape[0])
        return bool(info["top_moment"] > 1.3 * info["without_relation"])


def _polished(stage: Stage) -> Polished:
    tensors, info = stage
    numbers = {name: value for name, value in info.items() if name != "seconds"}
    return Polished(tensors["Theta"], tensors["W"], tensors["offset"], **numbers)


def _different(rows: Tensor) -> int:
    """How many of the rows differ; −0 counts as 0."""
    return len({row.tobytes() for row in (rows.cpu() + 0).numpy()})


def _better(a: Polished | None, b: Polished) -> Polished:
    return b if a is None or b.held < a.held else a


def _left_over(rows: Rows, taken: Polished) -> Rows:
    Theta, W, offset = (t.to(rows.X) for t in (taken.Theta, taken.W, taken.offset))
    R = rows.Y - attention.forward(rows.X, Theta, W, offset, rows.see)
    return replace(rows, Y=R if rows.valid is None else R * rows.valid)


def _without_empty(layer: AttentionLayer, accuracy: float, scale: float) -> AttentionLayer:
    """Without a key bias or an offset that is zero to the accuracy reached at the floor of the arithmetic."""
    if accuracy > 1e-5:
        return layer
    assert layer.key_bias is not None and layer.offset is not None
    if float(layer.key_bias.norm()) < 1e3 * accuracy * float(layer.Theta.norm()):
        layer = replace(layer, key_bias=None)
    if float(layer.offset.norm()) < 1e3 * accuracy * scale * math.sqrt(layer.out_width):  # type: ignore[union-attr]
        layer = replace(layer, offset=None)
    return layer


def _heads(m: int) -> str:
    return f"{m} head" + ("s" if m != 1 else "")
