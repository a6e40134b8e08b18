"""learn(): from examples of F(X) = Σ_i softmax(XΘ_iXᵀ + 1(Xu_i)ᵀ) X W_i + 1cᵀ to every Θ_i, u_i, W_i and c.

The order of events: split off held-out sequences; find working coordinates; the span of the Θ_i by moments,
where there are examples enough; the heads inside the span; Gauss–Newton to the floor. What is left unexplained
on held-out sequences decides what happens next: further starts, one more head, one head fewer, all rows. Each
step is a stage (stages.py). Where the tokens are far from white, or too few for moments, heads come from descent on
factors instead (factoring.py).
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headway.core import checks
from headway.core.convert import as_function
from headway.core.examples import Examples, Shards, ask
from headway.core.layer import MASKS, AttentionLayer
from headway.core.names import BASELINES, METHODS, SEARCHES
from headway.core.results import Fit, NotLearnedError
from headway.learning import moments
from headway.learning.baselines import Setting, adam, lbfgs, sizes
from headway.learning.factoring import Factoring
from headway.learning.gauss_newton import Free, OutOfTimeError, gauss_newton
from headway.learning.polish import FITTED, Polished
from headway.learning.shapes import Factored, Full, Shape
from headway.learning.source import spaced
from headway.learning.stages import Progress, better, left_over, polished
from headway.learning.unmix import ENOUGH, WIDE, unmix, unseen
from headway.linalg.projected import Problem, Rows, evaluate
from headway.runs.store import Run, Stage

if TYPE_CHECKING:
    from headway.sculpting.sculpt import Thresholds

BUDGET = 20  # products for each unknown of a rough fit: one that is worth polishing has come near by then
SHORT = 5  # iterations of a polish that is not expected to help
NEAR = 0.05  # a relative residual that only a start in the right basin reaches


@checks.memory("examples")
def learn(
    examples: Examples | None = None,
    heads: int | str = "auto",
    method: str = "auto",
    *,
    oracle: Callable[[Tensor], Any] | None = None,
    law: str | Any = "boolean",
    count: int | None = None,
    length: int = 16,
    width: int | None = None,
    mask: str = "none",
    rank: int | str | None = "auto",
    max_heads: int = 32,
    starts: int = 6,
    limit: int = 100,
    seconds: float | None = None,
    search: str = "gauss-newton",
    polish: bool = True,
    thresholds: Thresholds | None = None,
    truth: AttentionLayer | None = None,
    seed: int = 0,
    strict: bool = False,
    device: torch.device | str | None = None,
    run: str | os.PathLike[str] | Run | None = None,
    progress: Progress | None = None,
) -> Fit:
    """Find m, Θ_i, u_i, W_i and c with Y = Σ_i softmax(XΘ_iXᵀ + 1(Xu_i)ᵀ + mask) X W_i + 1cᵀ.

    Assumes random inputs that visit the directions of interest, at least the counting floor of examples
    (``fit.stats["floor"]``), heads that differ. Tokens need not be white: mean and covariance are removed first.

    heads: "auto" finds the count. method: "auto" chooses among the next three by the inputs; "moments" (span,
    unmix, polish; straight to Gauss–Newton from random starts when examples are few), "factors" (descent on
    thin factors, pruned and refined), "starts" (random starts in any case); "sculpt" (the first paper's
    algorithm, for 2 to 8 white tokens and many examples), or the baselines "adam" (on thin factors if ``rank`` is
    given, of W_i too beyond width 32), "descent" (Adam on whole Θ_i in whitened coordinates) and "lbfgs", which
    need ``heads`` and, given ``seconds``, use them all. rank: "auto" uses a low rank of the Θ_i where it shows,
    an int imposes it, None never. starts: random starts tried before giving up. limit: Gauss–Newton iterations
    in one solve. seconds: stop after about this long with the best fit so far (what a resumed run finds then
    depends on the clock). A tenth of the examples (2,000 at most) is held out for validation: not fitted, it
    chooses starts, counts and ranks and settles the status. With "sculpt" alone: search, "gauss-newton" or the
    paper's "net"; polish, whether to go on to the floor of the arithmetic; thresholds, the constants of
    sculpting, which are ours; truth, a layer to which the trace then gives distances and at which nothing else
    looks. strict=True raises NotLearnedError unless the status is ok. run: a folder that keeps the stages and
    the result; it belongs to these examples and settings, and others are refused. An interrupted run goes on,
    one whose seconds ran out goes on for as many more, a finished one is read back. progress: called with
    {"stage", "residual", "heads"}.

    In place of examples an ``oracle``: a function of X (n, k, d), or an nn.MultiheadAttention, that is shown
    ``count`` random sequences (default 10·d²/length, at least 2,000) of ``length`` tokens of ``width`` features
    under a ``law`` as in ``draw``, and nothing else; ``mask="causal"`` if it only looks back.

    >>> from headway.core.examples import draw
    >>> truth = AttentionLayer.random(heads=2, width=6, seed=0)
    >>> fit = learn(draw(truth, count=400, length=6, seed=1))
    >>> fit.layer.heads, fit.status.kind
    (2, 'recovered')
    """
    wanted = checks.count_or("heads", heads, "auto")
    checks.choice("method", method, METHODS)
    rank = checks.count_or("rank", rank, "auto", None)
    if oracle is not None:
        if examples is not None:
            checks.refuse("examples", "none, with an oracle", type(examples).__name__, "one of the two")
        examples = _asked(oracle, law, count, length, width, mask, checks.whole("seed", seed, 0))
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
    checks.choice("search", search, SEARCHES)
    checks.whole("max_heads", max_heads)
    kept = _kept(run, examples, {
        "heads": wanted, "method": method, "search": search, "polish": bool(polish), "rank": rank,
        "max_heads": int(max_heads), "starts": int(starts), "limit": int(limit), "seconds": seconds,
        "seed": int(seed), "device": None if device is None else str(device)}, thresholds, truth)
    settings = (examples, wanted, rank, max_heads, starts, limit, seconds, seed, device, kept, progress)
    if kept is not None and kept.finished:
        fit = kept.fit()
    elif method == "sculpt":
        # Sculpting stands below learning and is asked for by name only.
        from headway.sculpting.provable import Provable
        from headway.sculpting.sculpt import Thresholds

        sculpting = Provable(*settings)
        sculpting.search, sculpting.polishing, sculpting.truth = search, polish, truth
        sculpting.thresholds = thresholds or Thresholds()
        fit = sculpting.sculpt()
    else:
        route = _Moments(*settings)
        route.starting, route.method = method == "starts", method
        fit = route.descent(method) if method in BASELINES else route.moments()
    if kept is not None and not kept.finished:
        kept.finish(fit, examples.hashes())
    if strict and not fit.status.ok:
        raise NotLearnedError(fit)
    return fit


def _kept(
    run: str | os.PathLike[str] | Run | None, examples: Examples, options: dict[str, Any],
    thresholds: Thresholds | None, truth: AttentionLayer | None,
) -> Run | None:
    """The run of these examples and settings; a folder that belongs to others is refused."""
    if run is None:
        return None
    if not isinstance(run, (str, os.PathLike, Run)):
        checks.refuse("run", "the path of a folder", type(run).__name__, "run='runs/first'")
    kept = run if isinstance(run, Run) else Run.at(run)
    own: dict[str, Any] = {"digest": examples.digest(), "examples": "in memory", "options": options}
    if isinstance(examples, Shards):
        own["examples"] = str(examples.folder.resolve())
    more: dict[str, Any] = {} if thresholds is None else {"thresholds": asdict(thresholds)}
    if truth is not None:
        more["truth"] = hashlib.sha256(b"".join(
            name.encode() + tensor.detach().cpu().to(torch.float64).contiguous().numpy().tobytes()
            for name, tensor in sorted(truth.tensors().items()))).hexdigest()
    if more:
        own["more"] = more
    if isinstance(examples, Shards) and "thresholds" not in more:
        own["command"] = "learn"  # which makes it again
    kept.claim(own)
    return kept


def _asked(
    oracle: Callable[[Tensor], Any], law: str | Any, count: int | None, length: int, width: int | None, mask: str,
    seed: int,
) -> Examples:
    """Examples of a black box, drawn in the precision and on the device of its parameters if it has any."""
    first = next(oracle.parameters(), None) if isinstance(oracle, torch.nn.Module) else None
    if isinstance(oracle, torch.nn.MultiheadAttention):
        width = oracle.embed_dim if width is None else width
        oracle = as_function(oracle, causal=checks.choice("mask", mask, MASKS) == "causal")
    if width is None and not isinstance(law, str):
        vocabulary = checks.floating("law", law)
        checks.shape("law", vocabulary, ("v", "d"), "one row per word of the vocabulary")
        width = vocabulary.shape[1]
    if width is None:
        checks.refuse("width", "the number of features of a token, with an oracle", None, "width=64")
    width = checks.whole("width", width)
    if count is None:
        count = max(2000, math.ceil(10 * width**2 / checks.whole("length", length)))
    return ask(oracle, count, length, width, law=law, mask=mask, seed=seed,
               dtype=torch.float64 if first is None else first.dtype,
               device="cpu" if first is None else first.device)


class _Moments(Factoring):
    """Span by moments, unmix, polish; more and fewer heads."""

    basis: Tensor | None = None
    starting: bool = False  # no moments: random starts only
    method: str = "auto"
    rough: tuple[float, str, Tensor] | None = None  # the best: what it leaves of rows not fitted, name, Θ
    rest: tuple[int, Tensor] | None = None  # of a wide layer, what stood out from the residual the last time

    @property
    def wide(self) -> bool:
        """Whether moments serve at every turn: a pass over the examples is cheap beside a random start."""
        return self.basis is not None and self.source.d >= WIDE

    # -- span -----------------------------------------------------------------------------------------------

    def find_span(self, name: str = "span", taken: Polished | None = None) -> tuple[int, Tensor, float]:
        """Moments of the labels, or of what ``taken`` leaves of them, on as many rows as make the gap clear: the
        head count, the basis and the gap."""
        tensors, info = self.stage(name, lambda: self._span(name, taken), 0)
        return int(info["heads"]), tensors["basis"], float(info["gap"])

    def leftover(self, best: Polished, name: str) -> bool:
        if not self.wide:
            return super().leftover(best, name)
        count, basis, ratio = self.find_span(name, best)
        self.rest = count, basis
        return ratio > 1.0

    def _span(self, name: str, taken: Polished | None) -> Stage:
        source, d = self.source, self.source.d
        wide = d >= WIDE
        L = self.heads + 4 if isinstance(self.heads, int) else 20 if wide else 8
        if taken is not None:
            L = 12 if wide else 4
        count = min(len(source.fit), max(256, math.ceil(8 * d * d / self.examples.length)))
        while True:
            index = spaced(source.fit, count)

            def batches(index: np.ndarray = index, L: int = L) -> Iterable[Rows]:
                for rows in source.stream(index, L, torch.float32):
                    yield rows if taken is None else left_over(rows, taken)

            begin = None
            if wide:
                # Most of the turning is done on a third of the rows.
                third = spaced(index, math.ceil(len(index) / 3))
                turned = moments.span(partial(batches, third), L, generator=self.generator(name), passes=3,
                                      half=True)
                begin = turned.outputs
            found = moments.span(batches, L, generator=self.generator(name), start=begin,
                                 passes=6 if begin is None else 3, half=wide)
            m, ratio = moments.gap(
                found.values, complete=2 * len(found.values) >= min(d, self.examples.out_width) * d)
            if found.explained > 1 - 1e-6:
                m, ratio = 1, 1.0  # uniform attention says it all; what is left is rounding
                break
            # Perhaps more heads than directions looked at; not above a level floor, which would not be one.
            hidden = m >= len(found.values) - 3 or (ratio < 1.3 and not moments.flat(found.values))
            most = min(self.max_heads + 4, 2 * d)
            if hidden and isinstance(self.heads, str) and len(found.values) == L < most and taken is None:
                L = min(2 * L, most)
            elif ratio < 1.5 and 1.25 * count < len(source.fit):
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
        begin: Tensor | None = None
        if self.basis is not None:
            # The first start that looks good is polished at once; only if that leads nowhere do several have to
            # agree.
            for name, enough in ((f"unmix-{m}", ENOUGH), (f"unmix-{m}-more", 0.0)):
                tensors, info = self.stage(
                    name, lambda name=name, enough=enough: self._unmix(name, m, enough), m)  # type: ignore[misc]
                if min(info["residuals"]) >= ENOUGH and not self.wide:
                    # Nothing in the span explains half: no better a start than a random one.
                    begin = tensors["Theta"][:2]
                    break
                for j, Theta in enumerate(tensors["Theta"][:2]):
                    best = better(best, self.polish(f"{name.replace('unmix', 'polish')}-{j}", Theta))
                    if best.held <= self.floor:
                        return best
                if best is not None and (best.held < NEAR or self.wide):
                    # What is left is noise or one more head, not a wrong basin. Of a wide layer that is taken on
                    # trust: heads below the floor of the moments are common there, and random starts hopeless.
                    return best
        best = better(best, self.restart(m, range(self.starts), begin=None if begin is None else begin[0]))
        if begin is not None and best.held >= NEAR:
            # Of labels that are mostly noise even the right heads leave most, and rough fits on few rows less than
            # they should: the moments, which saw all of them, may have been right after all.
            for j, Theta in enumerate(begin):
                best = better(best, self.polish(f"polish-{m}-unmixed-{j}", Theta))
        return best

    def restart(
        self, m: int, numbers: range, settle: bool = True, begin: Tensor | None = None, word: str = "start"
    ) -> Polished:
        """Rough fits from ``begin`` and random starts; the first that comes near is polished, else the best one.

        With ``settle`` two starts that leave the same are enough: more would hardly leave less.
        """
        rough: list[tuple[float, str, Tensor]] = []
        tried: dict[str, Polished] = {}
        rote: set[str] = set()
        points: dict[str, int | Tensor] = {} if begin is None else {f"{word}-{m}-unmixed": begin}
        points |= {f"{word}-{m}-{j}": j for j in numbers}
        for name, point in points.items():
            tensors, info = self.stage(
                name, lambda name=name, point=point: self._start(name, m, point), m)  # type: ignore[misc]
            rough.append((info["unseen"], name, tensors["Theta"]))
            if self.rough is None or info["unseen"] < self.rough[0]:
                self.rough = rough[-1]
            if info["unseen"] > 0.5 and info["residual"] < 0.5 * info["unseen"]:
                rote.add(name)
            if name in rote and not self.exhausted(m):
                # These rows were met without learning anything about others.
                self.generous *= 4
            elif info["residual"] < NEAR and (info["unseen"] < 1.0 or not self.exhausted(m)):
                tried[name] = self.polish(f"polish-{name}", tensors["Theta"])
                if tried[name].held < NEAR:
                    return tried[name]
            least = min(left for left, _, _ in rough)
            if settle and sum(left < 1.01 * least for left, _, _ in rough) > 1:
                break
        left, name, Theta = min(rough, key=lambda entry: entry[:2])
        if name in tried:
            return tried[name]
        if left < 1.0 or name not in rote or not self.exhausted(m):
            return self.polish(f"polish-{name}", Theta)
        # By rote, worse than nothing on other rows, and no more rows to be had: a long polish would not mend that.
        short = self.polish(f"polish-{name}", Theta, limit=min(self.limit, SHORT))
        return replace(short, reason="stalled") if self.limit > SHORT else short

    def exhausted(self, m: int) -> bool:
        """Whether a solve takes about all the rows there are."""
        return self.rows_for(m) >= 2 * len(self.source.fit) // 3

    def _unmix(self, name: str, m: int, enough: float) -> Stage:
        assert self.basis is not None
        source = self.source
        # A weak head's direction is spread over those at the floor: of a wide layer all are kept.
        basis = self.basis if source.d >= WIDE else self.basis[: m + 2]
        fit, check = self._halves(m, len(basis))
        found = unmix(fit, check, basis, m, starts=2 * self.starts, generator=self.generator(name),
                      enough=enough, report=self.report)
        return {"Theta": found.Theta}, {"residuals": list(found.residuals), "starts": list(found.starts),
                                        "agreeing": found.agreeing, "products": found.products}

    def _halves(self, m: int, directions: int) -> list[Problem]:
        """Rows to unmix on, and as many to check on."""
        source = self.source
        rows = math.ceil(4 * m * (source.d + directions) / self.examples.length)
        index = spaced(source.fit, min(2 * rows, len(source.fit)))
        return [source.problem(part, m, torch.float32) for part in (index[::2], index[1::2])]

    def _join(self, name: str, best: Polished, basis: Tensor, more: int) -> Stage:
        """``more`` heads inside ``basis`` beside those of ``best``, which may still move among themselves."""
        known = best.Theta.to(basis)
        norms = known.flatten(1).norm(dim=1)
        whole = torch.cat([known / norms.view(-1, 1, 1), basis])
        m = len(known) + more
        fit, check = self._halves(m, len(whole))
        found = unmix(fit, check, whole, m, starts=3, generator=self.generator(name), known=torch.diag(norms.cpu()),
                      enough=0.9 * best.held, report=self.report)
        return {"Theta": found.Theta[0]}, {"residuals": list(found.residuals), "products": found.products}

    def _start(self, name: str, m: int, begin: int | Tensor) -> Stage:
        """Gauss–Newton over all of Θ from a point, or the random one of that number, in float32, to a rough fit."""
        source, draw = self.source, self.generator(name)
        if isinstance(begin, Tensor):
            Theta = begin.float()
        else:
            Theta = torch.randn(m, source.d + 1, source.d, generator=draw)
            Theta = Theta * ((1.0, 2.0, 0.5)[begin % 3] / Theta.flatten(1).norm(dim=1).view(m, 1, 1))
            Theta = Theta.to(source.device)
        shape: Shape = Factored.of(Theta, self.rank) if isinstance(self.rank, int) else Full(Theta)
        problem = source.problem(spaced(source.fit, self.rows_for(m)), m, torch.float32)
        solution = gauss_newton(Free(problem), shape, generator=draw, limit=self.limit, target=1e-4,
                                budget=BUDGET * Theta.numel(), report=self.report)
        other = source.problem(source.held[: max(1, min(64, len(source.held)))], m, torch.float32)
        return {"Theta": solution.point.Theta}, {
            "residual": solution.residual, "unseen": unseen(solution.point, other),
            "reason": solution.reason, "products": solution.products}

    # -- more or fewer heads --------------------------------------------------------------------------------

    def grow(self, best: Polished, name: str, most: int) -> Polished:
        """More heads, started from what the others leave unexplained: of a wide layer, where a pass is dear, all
        that stand out there, else one."""
        if self.wide and self.rest is not None:
            (more, basis), m = self.rest, best.Theta.shape[0]
            more = min(more, most - m)
            unmixing = f"{name}-unmix"
            tensors, _ = self.stage(unmixing, lambda: self._join(unmixing, best, basis, more), m + more)
            return self.polish(name, tensors["Theta"])
        if self.basis is not None:
            _, basis, _ = self.find_span(f"{name}-span", best)
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

    # -- the whole way --------------------------------------------------------------------------------------

    def moments(self) -> Fit:
        try:
            return self._moments()
        except OutOfTimeError:
            self.deadline = math.inf
            self.limit = 3
            if self.rough is not None and (self.best is None or self.rough[0] < self.best.held):
                self.polish(f"late-{self.rough[1]}", self.rough[2])
            if self.best is None:
                # Under a name of its own: with more time the run may be resumed.
                self.restart(self.heads if isinstance(self.heads, int) else 1, range(1), word="late")
            assert self.best is not None
            return self.close(replace(self.best, reason="time"), False)

    def _moments(self) -> Fit:
        n, k, d = len(self.source.fit), self.examples.length, self.source.d
        if not self.size.most_heads(n):
            # Not even one head is determined: any fit will do to show it, and it is not worth a long one.
            self.limit = min(self.limit, 10)
            return self.close(self.restart(1, range(1)), False)
        first = self.method == "factors" or (self.method == "auto" and self.factors_first())
        found = self.factors() if first else None
        if found is not None and (found.held <= FITTED or self.method == "factors"):
            return self.close(found, found.held > FITTED and self.leftover(found, "leftover-factors"))
        guess = 1
        # Below about 4 d² rows the noise floor of the moments hides the heads.
        if n * k >= 4 * d * d and not self.starting:
            guess, self.basis, _ = self.find_span()
        if isinstance(self.heads, int):
            best, structured = self._given(self.heads)
        else:
            best, structured = self._counted(min(guess, self.max_heads, max(1, self.size.most_heads(n))))
        if self.method == "auto" and not first and best.held > FITTED and structured:
            more = self.factors()
            if more is not None and more.held < 0.5 * best.held:
                best, structured = more, more.held > FITTED and self.leftover(more, "leftover-factors")
        if best.held > self.floor and best.out_rank is None and best.sequences < min(n, self.source.most()):
            best = self.polish("final", best.Theta, n)
            structured = structured or self.leftover(best, "leftover-final")
        return self.close(best, structured)

    def _given(self, m: int) -> tuple[Polished, bool]:
        best = self.attempt(m)
        if best.held <= self.floor or not self.leftover(best, f"leftover-{m}"):
            return best, False
        best = self.freed(best)
        if best.held <= self.floor:
            return best, False
        if self.size.floor(m + 1) <= len(self.source.fit):
            # If one more head helps, either the start was a poor one, and then a head can be spared again, or m
            # is too few.
            grown = self.grow(best, f"grow-{m}-{m + 1}", m + 1)
            if grown.held < 0.95 * best.held:
                best = better(best, self.prune(grown, f"prune-{m}"))
        if best.held > self.floor:
            best = better(best, self.restart(m, self._more(m), settle=False))
        return best, best.held > self.floor

    def _counted(self, m: int) -> tuple[Polished, bool]:
        """Heads are added until nothing with structure is left, and taken away while nobody misses them."""
        n = len(self.source.fit)
        best = self.attempt(m)
        tried, misses, structured = m, 0, False
        asked: Polished | None = None
        while best.held > self.floor:
            here = best.Theta.shape[0]
            # Asked once of every fit: what a stage's name stands for must not change.
            if best is not asked:
                structured = self.leftover(best, f"leftover-{here}")
            if best is not asked and not structured and best.sequences < min(n, self.source.most()):
                # Few rows show little: before calling the rest noise, look at all of them.
                best = self.polish(f"settle-{here}", best.Theta, n)
                structured = best.held > self.floor and self.leftover(best, f"leftover-{here}-all")
            asked = best
            tried += 1
            # Too few examples for moments show no structure either: look further before calling it noise. Nor do
            # a few hundred show much of what a fit that explains nothing has left.
            unsure = best.held > 0.9 and n < 512
            blind = best.held > NEAR and (self.basis is None or unsure)
            if not (structured or blind) or misses > (3 if blind else 1) or not self._within(tried):
                break
            more: Polished | None = None
            if self.wide or (self.basis is not None and tried == best.Theta.shape[0] + 1):
                most = max(j for j in range(tried, self.max_heads + 1) if self._within(j))
                more = self.grow(best, f"grow-{here}-{tried}", most)
            joined = more is not None and self.wide and more.held < 0.95 * best.held
            if more is None or (more.held > self.floor and not joined):
                more = better(more, self.attempt(tried))
            tried = max(tried, more.Theta.shape[0])
            misses = 0 if more.held < 0.95 * best.held else misses + 1
            best = better(best, more) if misses == 0 else best
        if structured:
            best = self.freed(best)
        if structured and best.held > self.floor:
            best = self._search(best)
        if best.held <= self.floor:
            return self.simplified(best), False
        return self.pruned(best, "prune"), structured

    def freed(self, best: Polished) -> Polished:
        """Without the ranks that were read off the singular values: they may not be ranks after all."""
        if best.held > self.floor and best.out_rank is not None and not isinstance(self.rank, int):
            return better(best, self.polish("free-rank", best.Theta, rank=None))
        return best

    def _search(self, best: Polished) -> Polished:
        """A wrong basin is left by starting afresh, more often, with a head more or fewer."""
        here = best.Theta.shape[0]
        for m in (here, here + 1, here - 1, here + 2):
            if m < 1 or not self._within(m):
                continue
            best = better(best, self.restart(m, self._more(m), settle=False))
            if best.held <= self.floor:
                break
        return best

    def _within(self, m: int) -> bool:
        return m <= self.max_heads and self.size.floor(m) <= len(self.source.fit)

    def _more(self, m: int) -> range:
        """Further random starts, fewer of them where one is dear."""
        return range(self.starts, self.starts + max(2, min(2 * self.starts, 2000 // (m * self.source.d))))

    def descent(self, method: str) -> Fit:
        if not isinstance(self.heads, int):
            checks.refuse("heads", f"a whole number with method={method!r}", repr(self.heads),
                          "method='moments', which finds the count, or heads=4")
        assert isinstance(self.heads, int)
        m, draw = self.heads, self.generator(method)
        left = None if self.deadline == math.inf else max(self.deadline - time.perf_counter(), 0.1)
        self.deadline = math.inf  # the baselines keep their own time

        def compute() -> Stage:
            if method == "lbfgs":
                found = lbfgs(self.source, m, seed=draw, sequences=self.rows_for(m), seconds=left,
                              report=self.report)
            else:
                size, out_size = sizes(self.examples, self.rank if method == "adam" else None)
                found = adam(self.source, m, Setting(white=method == "descent"), seed=draw, size=size,
                             out_size=out_size, seconds=left, report=self.report)
            info = asdict(found)
            return {part: info.pop(part) for part in ("Theta", "W", "offset")}, info

        return self.close(polished(self.stage(method, compute, m)), False)
