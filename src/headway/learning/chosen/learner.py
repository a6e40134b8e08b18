"""Learning from inputs one may choose: what to ask, then the way all learners end.

1. Two answers to one sequence, its tokens in both orders, tell how far answers may be trusted and whether order
   matters. A few lines tell at which size of tokens scores are of order one.
2. On one line of keys: head count, and Θ_iδ for one δ (seed.py).
3. Sequences near that line, x_j = b + t_jδ + τn_j: the rank-one Θ_i of the seed is right there but for τ, so
   Gauss–Newton with W and c eliminated finds the rest. Then sequences drawn at random, where every direction counts
   alike; the common refinement on everything, and the common verdict on random ones kept aside.

Where there are as many heads as outputs the differences on a line do not count them; and where nothing fits the
line exactly it is no layer of this kind, or its heads are too much alike there. Then sequences of equal tokens tell
whether it can be a layer at all, and random ones are asked for, and learned as others are.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.core import checks
from headway.core.counting import Size
from headway.core.examples import Examples
from headway.core.oracle import SHORTEST, Asking, Oracle, SpentError
from headway.core.results import Fit, Status
from headway.core.sources import input_law
from headway.learning.actions import Probe
from headway.learning.candidate import Candidate
from headway.learning.chosen.line import grid
from headway.learning.chosen.plan import LEAST_JUDGE, counted_floor, foreseen
from headway.learning.chosen.seed import Lines, Seed, count, planted
from headway.learning.gauss_newton import Free, OutOfTimeError, gauss_newton
from headway.learning.ladder import FITTED
from headway.learning.loop import Asked, Loop, Progress
from headway.learning.polish import polish
from headway.learning.shapes import Full
from headway.learning.source import Frame, Split
from headway.learning.verdict import conclude, heads_of
from headway.runs.store import Run, Stage

TAU = 0.3  # how far tokens are from the line, as a part of their size
CLOSE, ROUGH_STEPS, ROUGH_INNER = 1e-3, 40, 100  # of Gauss–Newton near the line: until when, how long
EXACT, ASIDES = 1e-11, 4  # noise above which random sequences are at least as many times those kept aside
UNCOUNTED = 1.5  # times the outputs: heads that random sequences are counted for where they could not be
LINES = (1.0, 0.7, 1.4)  # on which a seed is looked for: how large tokens are, as a part of the size found
ATTEMPTS = ((1.0, TAU), (1.5, TAU / 2))  # near the line: times the sequences, and how far from it
ORDER = 1e-2  # of answers to the same tokens in another order: above, order matters
SURE = 4  # times the rounding, the least noise that answers are taken to have
STEEP, FLAT = 2.9, 2.1  # slopes between which the size of tokens is right
SIZES = 16  # tries
LARGEST = 40  # half powers of two: tokens are tried up to 2^20 times as large
AGAIN = 2.0  # times as many random sequences where those asked for were too few
BENT, LEAST_BENT = 1e3, 1e-9  # times the noise, and at least: how far from affine answers to equal tokens must be
NOISY = 30.0  # times the noise of answers that a fit may leave


@dataclass
class Conversation:
    """What was asked so far and what it was for."""

    asking: Asking
    draw: torch.Generator
    progress: Progress | None
    noise: float = 0.0
    scale: float = 1.0
    free: list[int] = field(default_factory=list)  # places of sequences drawn at random
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def d(self) -> int:
        return self.asking.oracle.width

    @property
    def k(self) -> int:
        return self.asking.oracle.length

    def normal(self, *size: int) -> Tensor:
        drawn = torch.randn(*size, generator=self.draw, dtype=torch.float64)
        return drawn.to(self.asking.oracle.box.device)

    def random(self, n: int) -> list[int]:
        """Ask n sequences drawn at random; their places."""
        before = self.asking.calls
        self.asking(self.scale * self.normal(n, self.k, self.d))
        places = list(range(before, self.asking.calls))
        self.free += places
        return places

    def stage(self, name: str, why: str, heads: int = 0) -> _Stage:
        return _Stage(self, name, why, heads)


class _Stage:
    """A stage of asking, as the trace and the progress know stages."""

    def __init__(self, talk: Conversation, name: str, why: str, heads: int) -> None:
        self.talk, self.name, self.why, self.heads = talk, name, why, heads

    def __enter__(self) -> dict[str, Any]:
        self.begun, self.before = time.perf_counter(), self.talk.asking.calls
        self.found: dict[str, Any] = {}
        if self.talk.progress is not None:
            before = {"before": self.talk.events[-1]} if self.talk.events else {}
            self.talk.progress({"stage": self.name, "heads": self.heads, "why": self.why, "residual": None,
                                **before})
        return self.found

    def __exit__(self, *_: object) -> None:
        asked = self.talk.asking.calls - self.before
        self.talk.events.append({"stage": self.name, "why": self.why, "calls": asked, **self.found,
                                 "seconds": time.perf_counter() - self.begun})


def learn_chosen(
    oracle: Oracle, asked: Asked, device: torch.device | str | None, run: Run | None, progress: Progress | None
) -> tuple[Fit, Examples]:
    """Ask until the layer is known, as far as the budget goes; the fit, and all that was answered."""
    if asked.heads is not None:
        oracle.enough(asked.heads)
    folder = None
    if run is not None:
        run.begin()
        folder = run.path / "answers"
    asking = Asking(oracle, folder)
    draw = torch.Generator().manual_seed(oracle.seed)
    talk = Conversation(asking, draw, progress)
    way = Way(talk, asked, device, run)
    try:
        fit = way.go()
    except SpentError:
        fit = way.spent()
    if fit.status.kind == "noise" and 0 < NOISY * talk.noise < fit.stats["noise"]:
        fit = replace(fit, status=Status("not_realisable", (
            f"Not met by {heads_of(fit.layer.heads)}: {fit.stats['held_out_error']:.2e} of the labels' spread is "
            f"left, and it is not noise: the same question is answered alike to {talk.noise:.1e}."),
            {**fit.status.numbers, "residual_floor": fit.stats["held_out_error"]}))
    told = f" {asking.calls} sequences were asked: {way.words}."
    status = replace(fit.status, sentence=fit.status.sentence + told)
    stats = {**fit.stats, "calls": asking.calls, "rows": asking.rows, "plan": way.plan, "answer_noise": talk.noise,
             "failures": asking.failures}
    return replace(fit, status=status, stats=stats), asking.examples()


def at_random(oracle: Oracle, run: Run | None) -> Examples:
    """Random ±1 sequences, as many as the budget allows, or as ``ask`` draws where there is none."""
    if run is not None:
        run.begin()
    asking = Asking(oracle, None if run is None else run.path / "answers")
    d, k = oracle.width, oracle.length
    count = max(2000, math.ceil(10 * d**2 / k)) if oracle.budget is None else oracle.budget
    draw = torch.Generator().manual_seed(oracle.seed)
    asking(input_law("boolean", d, k, oracle.box.dtype)(count, draw))
    return asking.examples()


class Way:
    """From a conversation to a fit."""

    def __init__(self, talk: Conversation, asked: Asked, device: Any, run: Run | None) -> None:
        self.talk, self.asked, self.device, self.run = talk, asked, device, run
        self.heads, self.seed = asked.heads, None
        self.plan, self.words = "chosen", "all chosen"

    seed: Seed | None

    def go(self) -> Fit:
        talk, oracle = self.talk, self.talk.asking.oracle
        if oracle.plan == "auto" and (oracle.mask != "none" or self.talk.k < SHORTEST):
            return self.randomly("random", "all at random, since chosen ones need sequences of five tokens that "
                                 "see each other")
        with talk.stage("trust", "the same tokens in another order: do answers agree, and how well?") as found:
            self.trust()
            found["noise"] = talk.noise
        with talk.stage("size", "tokens at which scores are of order one are looked for") as found:
            talk.scale = size_of_tokens(talk)
            found["scale"] = talk.scale
        seed = self.planted()
        if seed is None:
            with talk.stage("affine", "answers to equal tokens are affine in these, whatever the heads") as found:
                bent = found["bent"] = self.bent()
            if bent > max(BENT * talk.noise, LEAST_BENT):
                return self.no_layer(bent)
            return self.randomly(self.plan, self.words)
        for times, tau in ATTEMPTS:
            fit = self.finished(seed, times, tau)
            if fit is not None:
                return fit
        return self.randomly("both", "chosen ones first, which led nowhere, then at random")

    # -- trust and size ---------------------------------------------------------------------------------------

    def trust(self) -> None:
        talk = self.talk
        X = talk.normal(1, talk.k, talk.d)
        one, other = talk.asking(torch.cat([X, X.flip(1)]))
        talk.free += [0]
        spread, whole = float((one - one.mean(0)).norm()), float(one.norm())
        eps = torch.finfo(talk.asking.Y[0].dtype).eps
        spread = max(spread if spread > 1e3 * eps * whole else whole, 1e-300)  # rows may all be alike
        apart = float((one - other.flip(0)).norm()) / spread
        if apart > ORDER:
            again = float((talk.asking.again(X)[0] - one).norm()) / spread
            if again > ORDER:
                checks.refuse("oracle", "the same answer to the same input", f"two that differ by {again:.0%} of "
                              "their spread", "module.eval(), or learn from stored examples, with their noise")
            if talk.asking.oracle.plan == "chosen":
                checks.refuse("plan", "'random' for an oracle to whose answers the order of tokens matters: chosen "
                              "questions know no positions and no mask", f"answers that differ by {apart:.0%} of "
                              "their spread", "plan='random', with mask= and form=, which find such layers")
        talk.noise = max(apart, SURE * eps * whole / spread)

    # -- the line ---------------------------------------------------------------------------------------------

    def planted(self) -> Seed | None:
        """The seed, or none and a plan that does without."""
        talk, seed = self.talk, None
        like = talk.normal(1)
        for number, part in enumerate(LINES):
            lines = Lines(talk.asking, talk.k, talk.d, part * talk.scale, talk.noise, talk.draw, like)
            with talk.stage(f"count-{number}", "differences of rows on a line of keys span as many dimensions as "
                            "there are heads") as found:
                m = count(lines)
                found["heads"] = 0 if m is None else m
            e = talk.asking.Y[0].shape[-1]
            if m is None or m > talk.d or not m:
                self.heads = self.asked.heads
                self.plan, self.words = "both", (
                    "at random but for the first, which show no head" if m == 0 else
                    "at random but for the first, which show as many heads as outputs or more")
                return None
            self.heads = m if self.asked.heads is None else self.asked.heads
            calls = foreseen(m, talk.d, e, talk.k)
            if talk.asking.oracle.plan == "auto" and calls.random < calls.chosen:
                self.plan, self.words = "both", (
                    f"{talk.asking.calls} chosen to count the heads, the others at random: for {heads_of(m)} these "
                    f"take fewer calls (about {calls.random}) than chosen ones ({calls.chosen})")
                return None
            if calls.least > talk.asking.left:
                raise SpentError
            with talk.stage(f"seed-{number}", "small steps around a point of the line tell the heads apart",
                            m) as found:
                seed = planted(lines, m)
                found["residual"] = seed.fit.residual
            if seed.found:
                self.seed = seed
                return seed
        self.plan, self.words = "both", "at random after the first, to which no heads on a line of keys fit exactly"
        return None

    def bent(self) -> float:
        """‖F(0) + F(2x) − 2F(x)‖ / ‖F(2x) − F(0)‖ for sequences of equal tokens, which a layer answers with
        (ΣW_i)ᵀx + c."""
        talk = self.talk
        x = (talk.scale * talk.normal(1, 1, talk.d)).expand(1, talk.k, talk.d)
        zero, one, two = talk.asking(torch.cat([0 * x, x, 2 * x]))
        sizes = float((two - zero).norm()), 1e-6 * float(one.norm())  # the second where they answer with a constant
        return float((zero + two - 2 * one).norm()) / max(*sizes, 1e-300)

    # -- near the line, and everywhere --------------------------------------------------------------------------

    def finished(self, seed: Seed, times: float, tau: float) -> Fit | None:
        """Ask what remains, refine, judge; none if it led nowhere and there may be more calls."""
        talk, m = self.talk, seed.heads
        e = talk.asking.Y[0].shape[-1]
        calls = foreseen(m, talk.d, e, talk.k)
        near = math.ceil(times * calls.near)
        floor = counted_floor(m, talk.d, e, talk.k)
        # Of few random sequences those kept aside would be missed where noise has to be averaged out.
        free = max(calls.free, ASIDES * (calls.select + calls.judge)) if talk.noise > EXACT else calls.free
        rest = free + calls.select + calls.judge
        if talk.asking.left < near + rest:
            near = int(talk.asking.left) - rest
            if near < floor:
                raise SpentError
        with talk.stage(f"near-{times:g}", "near the line the heads are known but for a little", m):
            before = talk.asking.calls
            talk.asking(self.near(seed, near, tau))
            first = np.arange(before, talk.asking.calls)
        with talk.stage(f"everywhere-{times:g}", "random sequences: every direction of the heads, and a few to "
                        "choose and judge by", m):
            talk.random(free)
            select, judge = talk.random(calls.select), talk.random(calls.judge)
        n = talk.asking.calls
        fitted = np.setdiff1d(np.arange(n), [*select, *judge])
        parts = Split(fitted, np.array(select), np.array(judge), np.arange(0), np.arange(len(fitted)))
        loop = self.loop(talk.asking.examples(), m, parts)
        name = f"chosen-{times:g}"
        best = self.refined(loop, seed, first, name)
        good = max(FITTED, NOISY * talk.noise)
        if best.error > good and best.reason != "time" and talk.asking.left > calls.near:
            return None
        structured = False
        if best.error > max(loop.floor, FITTED, NOISY * talk.noise) and best.reason != "time":
            loop.pool = loop.pool.with_candidate(best)
            structured = bool(loop.do(Probe(f"probe-{times:g}", best.name)))
        fit = conclude(loop, best, structured)
        if fit.status.kind == "not_realisable":
            # On the line a layer did fit. That none does elsewhere a search that ended early cannot say.
            fit = replace(fit, status=Status("limit", (
                f"Stalled with {heads_of(m)}, which fit on a line of keys and leave {best.error:.1e} elsewhere. It "
                "is not the output of such a layer, or the search did not find its way: a larger budget or another "
                "seed may help."), fit.status.numbers))
        return fit

    def near(self, seed: Seed, n: int, tau: float) -> Tensor:
        talk = self.talk
        b = seed.origin + talk.normal(n, seed.B.shape[1]) / math.sqrt(seed.B.shape[1]) @ seed.B.T
        on = b.unsqueeze(1) + grid(talk.k, b).view(1, -1, 1) * seed.delta
        return on + tau * talk.scale * talk.normal(n, talk.k, talk.d)

    def loop(self, examples: Examples, m: int | None, parts: Split | None, told: bool = True) -> Loop:
        loop = Loop(examples, replace(self.asked, heads=m if told else None), self.device, self.run,
                    self.talk.progress, parts=parts)
        loop.trace[:0] = self.talk.events
        return loop

    def refined(self, loop: Loop, seed: Seed, first: np.ndarray, name: str) -> Candidate:
        """From the seed to the floor: on sequences near the line, then on all."""
        source, m, talk = loop.source, seed.heads, self.talk
        assert source.frame is not None
        start = into(source.frame, seed.theta())

        def rough() -> Stage:
            problem = source.problem(first, m, torch.float64)
            found = gauss_newton(
                Free(problem), Full(start), generator=loop.generator(name), limit=ROUGH_STEPS, damping=1e-2,
                inner_limit=ROUGH_INNER, target=max(CLOSE, NOISY * talk.noise), inner=torch.float64,
                report=loop.report, pulse=loop.pulse)
            return {"Theta": found.point.Theta}, {"residual": found.residual, "products": found.products,
                                                  "reason": found.reason}

        def whole(limit: int) -> Candidate:
            return polish(source, start, len(source.fit), rank=loop.asked.rank, generator=loop.generator(name),
                          exact=True, limit=limit, report=loop.report, pulse=loop.pulse)

        try:
            tensors, _ = loop.stage(f"{name}-near", rough, m, ROUGH_STEPS, why="from the seed, near its line")
            start = tensors["Theta"]
            stage = loop.stage(f"{name}-all", lambda: whole(self.asked.limit).stage(), m,
                               why="on everything that was asked, to the floor")
            return Candidate.of(name, stage)
        except OutOfTimeError:
            loop.deadline = math.inf
            return replace(whole(0), reason="time", name=name)

    # -- at random --------------------------------------------------------------------------------------------

    def randomly(self, plan: str, words: str) -> Fit:
        """Random sequences, learned as others are; once more as many where they were too few."""
        talk = self.talk
        self.plan, self.words = plan, words
        fit = None
        e = talk.asking.Y[0].shape[-1] if talk.asking.Y else talk.d
        m = self.heads or math.ceil(UNCOUNTED * e)
        wanted = foreseen(m, talk.d, e, talk.k).random
        if plan == "random" and self.heads is None:
            wanted = max(2000, math.ceil(10 * talk.d**2 / talk.k))
        for number in range(2):
            most = talk.asking.left
            if number and (most < 1 or fit is None or fit.status.kind != "too_few"):
                break
            lacking = max(wanted - len(talk.free), 0)
            more = int(min(lacking, most))
            with talk.stage(f"random-{number}", "random sequences, learned as others are", self.heads or 0):
                if more:
                    talk.random(more)
            if len(talk.free) < 3:
                raise SpentError
            examples = talk.asking.examples().take(talk.free)
            told = self.heads
            kept = max(2, math.ceil(0.15 * len(examples)))  # for choosing and judging
            if told is not None and Size(talk.d, e, talk.k).floor(told) > len(examples) - kept:
                raise SpentError
            loop = self.loop(examples, told, None)
            loop.prefix = f"random-{number}-{len(examples)}-"  # a larger budget is another problem
            fit = conclude(loop, *loop.search())
            if lacking > more and fit.status.kind == "noise" and fit.stats["held_out"] < LEAST_JUDGE:
                left, judged = fit.stats["held_out_error"], fit.stats["held_out"]
                fit = replace(fit, status=replace(fit.status, kind="too_few", sentence=(
                    f"Too few examples: {len(examples)} random sequences leave {left:.2e} of the labels' spread, "
                    f"and {judged} of them to judge by cannot tell noise from heads that were not found.")))
            if lacking > more and not fit.status.ok:
                fit = replace(fit, stats={**fit.stats, "out_of_time": True})  # a run with a larger budget goes on
            wanted = math.ceil(AGAIN * wanted)
        assert fit is not None
        return fit

    # -- when there is no layer, or no budget -----------------------------------------------------------------

    def spent(self) -> Fit:
        """What there is, with a status that says that more calls are needed, and how many."""
        talk = self.talk
        e = talk.asking.Y[0].shape[-1]
        m = self.heads or 1
        need = talk.asking.calls + foreseen(m, talk.d, e, talk.k).fewest
        counted = f"{heads_of(m)} were counted" if self.heads else "heads were not counted yet"
        more = "." if self.heads else f" for {heads_of(m)}, more for more."
        fit = self.rough(m)
        return replace(fit, status=Status(
            "too_few", f"The budget of {talk.asking.oracle.budget} calls does not do: {counted}, and about {need} "
            f"calls are needed{more}", {"needed": float(need), "heads": float(m)}), stats={
                **fit.stats, "out_of_time": True})  # a run with a larger budget goes on

    def no_layer(self, bent: float) -> Fit:
        self.plan, self.words = "chosen", "all chosen"
        fit = self.rough(1)
        return replace(fit, status=Status(
            "not_realisable", "Not the labels of such a layer. Its answer to equal tokens is an affine function of "
            f"the token; here answers to 0, x and 2x differ from one by {bent:.1e} of their size.", {"bent": bent}))

    def rough(self, m: int) -> Fit:
        """The seed if there is one, or heads that attend to all keys alike, on all that was asked."""
        talk = self.talk
        examples = talk.asking.examples()
        judge = np.array(talk.free[-1:])
        fit = np.setdiff1d(np.arange(len(examples)), judge)
        parts = Split(fit, judge, judge, np.arange(0), np.arange(len(fit)))
        loop = self.loop(examples, m, parts, told=False)
        assert loop.source.frame is not None
        d = loop.source.d
        start = torch.zeros(m, d + 1, d, dtype=torch.float64, device=loop.source.device)
        if self.seed is not None:
            start = into(loop.source.frame, self.seed.theta())
        best = polish(loop.source, start, len(fit), rank=None, generator=loop.generator("rough"), exact=True,
                      limit=0)
        return conclude(loop, replace(best, reason="limit", name="rough"), False)


def into(frame: Frame, Theta: Tensor) -> Tensor:
    """[Θ_i; u_iᵀ] in working coordinates: LᵀΘ_iL and Lᵀ(Θ_iᵀμ + u_i)."""
    if frame.plain:
        return Theta
    inner, u = Theta[:, :-1], Theta[:, -1]
    bias = (inner.mT @ frame.mean + u) @ frame.out
    return torch.cat([frame.out.T @ inner @ frame.out, bias.unsqueeze(1)], dim=1)


def size_of_tokens(talk: Conversation) -> float:
    """α such that scores of tokens with entries α·N(0, 1) are of order one.

    Differences of rows on a line grow like α³ while scores are small and like α once patterns are all but 0 and 1:
    in between the slope says where one is. If no size shows such a change 1 is as good as any.
    """
    b, delta = talk.normal(2, talk.d), talk.normal(2, talk.d)
    base = b.unsqueeze(1)
    along = grid(talk.k, b).view(1, -1, 1) * delta.unsqueeze(1)
    known: dict[int, float] = {}

    def spread(j: int) -> float:
        if j not in known:
            Y = talk.asking(2.0 ** (j / 2) * (base + along))
            known[j] = float((Y - Y.mean(1, keepdim=True)).norm())
        return known[j]

    low, high, j, step = -math.inf, math.inf, 0, 2
    for _ in range(SIZES):
        slope = math.log2(max(spread(j), 1e-300) / max(spread(j - 2), 1e-300))
        if FLAT <= slope <= STEEP:
            return float(2.0 ** (j / 2))
        if slope > STEEP:
            low = j
        else:
            high = j
        if high - low <= 1:
            return float(2.0 ** (low / 2))
        if math.isfinite(low) and math.isfinite(high):
            j = int((low + high) // 2)
        else:
            j, step = j + (step if slope > STEEP else -step), 2 * step
            if low >= LARGEST:
                break
            j = min(j, LARGEST)
    return 1.0
