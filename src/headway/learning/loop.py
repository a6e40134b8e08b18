"""The loop: the policy asks for an action, it is done as a named stage, the answer goes back.

The only place with a clock. A stage is computed once and, with a run folder, read back ever after. Each has a
random generator of its own, seeded by its name, so that a resumed run takes the same path.

Where examples are split over ranks all of them go the same way: the clock that counts is that of rank 0, it alone
has the run folder, and what a stage found is taken from it, to the last bit.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.core import checks
from headway.core.budget import BUDGET, Budget
from headway.core.counting import Size
from headway.core.examples import Examples
from headway.core.layer import AttentionLayer
from headway.learning import actions, evidence
from headway.learning.candidate import Candidate, Pool, Seen
from headway.learning.determined import dependence
from headway.learning.gauss_newton import OutOfTimeError
from headway.learning.ladder import floor_of
from headway.learning.parts import ranks_of
from headway.learning.policy import End, Facts, Rules, plan
from headway.learning.polish import polish
from headway.learning.refine import refine_factors
from headway.learning.snapshots import Snapshot
from headway.learning.source import Source, Split, find_frame, spaced
from headway.learning.starts import moments, random, unmix
from headway.learning.starts.descent import LOOK, STEPS, Factors, descended, whitened
from headway.linalg.projected import Problem, evaluate
from headway.runs.store import Run, Stage

Progress = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Asked:
    """What the caller asked for, resolved."""

    method: str
    heads: int | None
    rank: int | str | None
    max_heads: int
    starts: int
    limit: int
    seconds: float | None
    seed: int


class Loop:
    """One run of a learner: where its examples are, the stages done so far and what they found."""

    def __init__(
        self, examples: Examples, asked: Asked, device: torch.device | str | None = None, run: Run | None = None,
        progress: Progress | None = None, rules: Rules | None = None, parts: Split | None = None,
        budget: Budget = BUDGET,
    ) -> None:
        self.examples, self.asked, self.run, self.progress = examples, asked, run, progress
        self.rules = rules or Rules()
        self.ranks = ranks_of(examples)
        self.trace: list[dict[str, Any]] = []
        self.curve: list[tuple[float, float]] = []  # of the stage under way: when, and the residual then
        self.pool = Pool()
        self.spans: dict[str, Tensor] = {}
        self.factors: dict[str, Factors] = {}
        self.structured = False  # the last probe's answer, for when time runs out
        self.asked_more = 0  # sequences that a black box was asked for on the way
        self.begun = time.perf_counter()
        self.deadline = math.inf  # until the frame is found, so that there is always something to end with
        self.current: dict[str, Any] = {"stage": "frame", "heads": 0, "why": "tokens are centred and scaled"}
        self.why = ""  # the action under way was chosen
        self.prefix = ""  # of the names its stages are kept under, where a run has more than one loop
        self.report(None)
        budget.need(80.0 * examples.width**2, f"tokens of width {examples.width}")
        self.source = Source(examples, device, parts, budget)
        frame = self.source.frame = find_frame(examples, self.source.fit, self.source.device, budget=budget)
        self.floor = floor_of(examples.dtype)
        self.size = Size(self.source.d, examples.out_width, examples.length, examples.mask,
                         asked.rank if isinstance(asked.rank, int) else None)
        self.trace.append({"stage": "frame", "white": frame.plain, "directions": self.source.d,
                           "set_aside": len(self.source.parts.aside), "seconds": time.perf_counter() - self.begun})
        self._enough()
        self.deadline = math.inf if asked.seconds is None else self.begun + asked.seconds

    def _enough(self) -> None:
        heads, n = self.asked.heads, self.source.parts.distinct
        if heads is not None and self.size.floor(heads) > n:
            checks.refuse(
                "heads", f"a count that {n} different sequences (of {len(self.examples)}, some of them kept for "
                f"choosing and judging) can determine: at most {self.size.most_heads(n)}",
                f"{heads}, with {self.size.unknowns(heads)} unknowns",
                f"at least {self.size.floor(heads)} sequences, three times that to be safe; or rank=r if the rank "
                "is known")

    @property
    def facts(self) -> Facts:
        assert self.source.frame is not None
        asked, parts = self.asked, self.source.parts
        return Facts(asked.method, asked.heads, asked.rank, asked.max_heads, asked.starts, asked.limit,
                     parts.distinct, self.source.most(), self.size, self.source.frame.plain, self.floor,
                     len(parts.fit) / parts.distinct)

    # -- stages and time ------------------------------------------------------------------------------------

    def stage(self, name: str, compute: Callable[[], Stage], heads: int = 0, most: int | None = None,
              why: str | None = None) -> Stage:
        """What ``compute`` finds, read back where the run has it. most: steps that it reports at most; why: it was
        chosen, if no action of the policy asked for it."""
        why = self.why if why is None else why
        self.current = {"stage": name, "heads": heads, "why": why, "most": most, "before": self.trace[-1]}
        self.report(None)
        begun = time.perf_counter()
        self.source.budget.tidy()
        self.curve = []

        def timed() -> Stage:
            tensors, info = compute()
            seconds = time.perf_counter() - begun
            curve = [[round(at - begun, 4), float(f"{left:.4g}")] for at, left in self.curve]
            return tensors, {**info, "seconds": seconds, **({"curve": curve} if curve else {})}

        tensors, info = self._kept(name, timed) if self.ranks.alone else self._shared(name, timed)
        self.trace.append({"stage": name, "why": why, **info})
        return {n: t.to(self.source.device) for n, t in tensors.items()}, info

    def _kept(self, name: str, compute: Callable[[], Stage]) -> Stage:
        return compute() if self.run is None else self.run.stage(self.prefix + name, compute)

    def _shared(self, name: str, compute: Callable[[], Stage]) -> Stage:
        """What rank 0 has or finds; the others take part in finding it."""
        known = self.ranks.decided(self.run is not None and self.run.has(self.prefix + name))
        made = None if known else compute()

        def kept() -> tuple[dict[str, Any], dict[str, Tensor]]:
            assert made is not None or known
            tensors, info = self._kept(name, lambda: made or compute())
            return info, tensors

        info, tensors = self.ranks.led(kept)
        return dict(tensors), info

    def _snapshot(self, name: str) -> Snapshot:
        return Snapshot(self.run, self.prefix + name, self.ranks)

    def _same(self, value: Any) -> Any:
        """What rank 0 found, where all looked at the same."""
        return value if self.ranks.alone else self.ranks.led(lambda: (value, {}))[0]

    def report(self, residual: float | None) -> None:
        self.pulse()
        if residual is not None:
            self.curve.append((time.perf_counter(), residual))
        if self.progress is not None:
            self.progress({**self.current, "residual": residual})

    def pulse(self) -> None:
        """Called between products: no solve goes on for long after its time."""
        if self.deadline < math.inf and self.ranks.decided(time.perf_counter() > self.deadline):
            raise OutOfTimeError

    @property
    def left(self) -> float | None:
        """Seconds until the deadline, if there is one."""
        return None if self.deadline == math.inf else max(self.deadline - time.perf_counter(), 0.1)

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self.asked.seed}:{name}".encode()))

    # -- the loop -------------------------------------------------------------------------------------------

    def search(self) -> tuple[Candidate, bool, str]:
        """The candidate to judge, whether what it leaves was seen to depend on the inputs, and a cause if known."""
        try:
            steps, answer = plan(self.facts, self.rules), None
            while True:
                answer = self.do(steps.send(answer))
        except StopIteration as stop:
            end: End = stop.value
            return self.pool.named(end.best.name), end.structured, end.cause
        except OutOfTimeError:
            return replace(self.in_time(), reason="time"), self.structured, ""

    def in_time(self) -> Candidate:
        """The best so far; a short solve if there is nothing yet."""
        self.deadline = math.inf
        best, rough = self.pool.best(self.asked.heads), self.pool.roughest()
        if rough is not None and (best is None or rough[0] < best.error):
            self.do(actions.Polish(f"late-{rough[1]}", rough[1], limit=3))
        elif best is None and self.factors:
            last = list(self.factors)[-1]
            self.do(actions.Refine(f"late-{last}", last, len(self.factors[last].A), limit=0))
        elif best is None:
            # Under names of their own: with more time the run may be resumed.
            m = self.asked.heads or 1
            self.do(actions.Start("late", m))
            self.do(actions.Polish("late-polish", "late", limit=3))
        best = self.pool.best(self.asked.heads) or self.pool.best()
        assert best is not None
        return best

    def do(self, action: actions.Action) -> actions.Answer:
        """Carry out one action."""
        self.why = action.why
        match action:
            case actions.Glance():
                if action.rows:
                    moved = self._same(evidence.shifted(self.source, self.generator(action.name)))
                    return "shifted" if moved else ""
                cause: str = self._same(evidence.glance(self.source, self.floor))
                return cause
            case actions.Span():
                return self._span(action)
            case actions.Unmix():
                return self._unmix(action)
            case actions.Start():
                return self._start(action)
            case actions.Polish():
                return self._polish(action)
            case actions.Descend():
                return self._descend(action)
            case actions.Refine():
                return self._refine(action)
            case actions.Probe():
                return self._probe(action)
            case actions.Place():
                return self._place(action)
            case actions.Spare():
                return self.ranks.decided(dependence(self.source, self.pool.named(action.base),
                                                     self._rows(action.base)) < action.tolerance)
            case actions.SetAside():
                return self._set_aside(action)

    # -- starts ---------------------------------------------------------------------------------------------

    def _span(self, action: actions.Span) -> actions.Spanned:
        beside = None if action.beside is None else self.pool.named(action.beside)

        def compute() -> Stage:
            found, heads, gap, sequences = moments.find(
                self.source, self.generator(action.name), heads=self.asked.heads, most=self.asked.max_heads,
                left=None if beside is None else lambda rows: evidence.left_over(rows, beside))
            return {"basis": found.basis}, {
                "heads": heads, "gap": gap, "singular_values": [float(s) for s in found.values],
                "linear_part": found.explained, "sequences": sequences}

        tensors, info = self.stage(action.name, compute)
        self.spans[action.name] = tensors["basis"]
        if action.beside is None:
            self.span = tensors["basis"]
        return actions.Spanned(int(info["heads"]), float(info["gap"]))

    def _unmix(self, action: actions.Unmix) -> actions.Unmixed:
        m, source, basis = action.heads, self.source, self.span[: action.heads + 2]

        def compute() -> Stage:
            rows = math.ceil(4 * m * (source.d + len(basis)) / self.examples.length)
            index = spaced(source.fit, min(2 * rows, len(source.fit)))
            fit, check = (source.problem(part, m, torch.float32) for part in (index[::2], index[1::2]))
            found = unmix.unmix(fit, check, basis, m, starts=2 * self.asked.starts, enough=action.enough,
                                generator=self.generator(action.name), report=self.report)
            return {"Theta": found.Theta}, {"residuals": list(found.residuals), "starts": list(found.starts),
                                            "agreeing": found.agreeing, "products": found.products}

        tensors, info = self.stage(action.name, compute, m)
        names = tuple(f"{action.name}:{j}" for j in range(len(tensors["Theta"])))
        for name, Theta, left in zip(names, tensors["Theta"], info["residuals"], strict=True):
            self.pool = self.pool.with_rough(left, name, Theta)
        return actions.Unmixed(names, tuple(info["residuals"]))

    def _start(self, action: actions.Start) -> Seen:
        def compute() -> Stage:
            base = None if action.base is None else self.pool.theta(action.base)
            found = random.start(
                self.source, action.heads, self.facts.rows_for(action.heads, action.times), base=base,
                number=action.number, rank=self.asked.rank, limit=action.limit or self.asked.limit,
                generator=self.generator(action.name), report=self.report, own=action.own)
            return {"Theta": found.Theta}, {"residual": found.residual, "unseen": found.unseen,
                                            "reason": found.reason, "products": found.products}

        tensors, info = self.stage(action.name, compute, action.heads, action.limit or self.asked.limit)
        # A fit beside a linear function is none: last in the pool, though others may begin there.
        self.pool = self.pool.with_rough(math.inf if action.own else info["unseen"], action.name, tensors["Theta"])
        return Seen(action.name, action.heads, info["residual"], info["unseen"], info["reason"])

    def _descend(self, action: actions.Descend) -> Seen:
        rung, draw = action.rung, self.generator(action.name)

        def compute() -> Stage:
            found = descended(self.source, rung.heads, rung.q, rung.p, rung.decay, draw, self.report,
                              pulse=self.pulse, already=self.asked_more, snapshot=self._snapshot(action.name))
            if found.reason == "time":  # no finished stage: with more time a run begins it again
                self.asked_more += found.asked
                assert self.source.frame is not None
                self._add(action.name, refine_factors(
                    self.source, whitened(found.factors, self.source.frame), generator=draw, limit=0))
                raise OutOfTimeError
            parts = dict(zip("ABVOc", found.factors.parts(), strict=True))
            return parts, {"unseen": found.error, "residual": found.fitted, "steps": found.steps,
                           "reason": found.reason, "sequences": found.sequences, "asked": found.asked}

        tensors, info = self.stage(action.name, compute, rung.heads, STEPS // LOOK)
        self.asked_more += int(info.get("asked", 0))
        self.factors[action.name] = Factors(*(tensors[part] for part in "ABVOc"))
        return Seen(action.name, rung.heads, info["residual"], info["unseen"], info["reason"])

    # -- to the floor ---------------------------------------------------------------------------------------

    def _polish(self, action: actions.Polish) -> Seen:
        Theta = self.pool.theta(action.base)
        if action.merge:
            short = self._merged(action.base)
            if short is None:
                return self.pool.named(action.base).seen
            Theta = short

        def compute() -> Stage:
            begin = Theta
            if action.drop:
                begin = self._fewer(begin)
            if action.grow is not None:
                begin = torch.cat([begin, self._new_head(action, begin)])
            m, limit = len(begin), self.asked.limit if action.limit is None else action.limit
            everything = len(self.source.fit) if action.everything else self.facts.rows_for(m, action.times)
            found = polish(self.source, begin, everything, rank=None if action.free else self.asked.rank,
                           generator=self.generator(action.name), exact=action.everything, limit=limit,
                           report=self.report, pulse=self.pulse, snapshot=self._snapshot(action.name))
            return self._ended(found, limit).stage()

        heads = len(Theta) - action.drop + (action.grow is not None)
        return self._add(action.name, Candidate.of(action.name, self.stage(action.name, compute, heads)))

    def _refine(self, action: actions.Refine) -> Seen:
        def compute() -> Stage:
            assert self.source.frame is not None
            limit = self.asked.limit if action.limit is None else action.limit
            done = refine_factors(
                self.source, whitened(self.factors[action.base], self.source.frame),
                generator=self.generator(action.name), limit=limit, report=self.report, pulse=self.pulse,
                snapshot=self._snapshot(action.name))
            if done.reason == "time":  # no finished stage: with more time a run goes on from the descent
                self._add(action.name, done)
                raise OutOfTimeError
            return self._ended(done, limit).stage()

        stage = self.stage(action.name, compute, action.heads)
        return self._add(action.name, Candidate.of(action.name, stage))

    def _ended(self, found: Candidate, limit: int) -> Candidate:
        """The same; a limit that was not the caller's is no limit that the caller can raise."""
        ours = found.reason == "limit" and limit < self.asked.limit
        return replace(found, reason="stalled") if ours else found

    def _add(self, name: str, found: Candidate) -> Seen:
        found = replace(found, name=name)
        self.pool = self.pool.with_candidate(found)
        return found.seen

    def _fewer(self, Theta: Tensor) -> Tensor:
        """Without the head that is missed least."""
        m = len(Theta)
        problem = self.problem(m, self.facts.rows_for(m))
        parts = [torch.cat([Theta[:i], Theta[i + 1 :]]) for i in range(m)]
        return parts[int(np.argmin([evaluate(problem, part).loss for part in parts]))]

    def _new_head(self, action: actions.Polish, Theta: Tensor) -> Tensor:
        assert action.grow is not None
        if action.grow in self.spans:
            return 2.0 * self.spans[action.grow][:1].to(Theta)
        draw = torch.randn(1, *Theta.shape[1:], generator=self.generator(action.name), dtype=torch.float64)
        found: Tensor = (draw / draw.norm()).to(Theta)
        return found

    def _merged(self, name: str) -> Tensor | None:
        """Θ with equal heads made one and empty ones left out: a guess, believed if it meets the examples too."""
        best = self.pool.named(name)
        layer = AttentionLayer(best.Theta[:, :-1], best.W, best.Theta[:, -1], best.offset, self.examples.mask)
        short = layer.canonical(1e-3)
        return None if short.heads == layer.heads else short.augmented

    # -- evidence -------------------------------------------------------------------------------------------

    def _rows(self, name: str) -> int:
        return self.facts.rows_for(self.pool.named(name).heads)

    def problem(self, heads: int, sequences: int) -> Problem:
        return self.source.problem(spaced(self.source.fit, sequences), heads, torch.float64)

    def _probe(self, action: actions.Probe) -> bool:
        best = self.pool.named(action.base)

        def compute() -> Stage:
            return {}, {"probes": evidence.structure(self.source, best, self.generator(action.name), self.pulse)}

        _, info = self.stage(action.name, compute, best.heads)
        self.structured = evidence.dependent(info["probes"])
        return self.structured

    def _place(self, action: actions.Place) -> bool:
        best = self.pool.named(action.base)

        def compute() -> Stage:
            return {}, {"place": evidence.placed(self.source, best, self.generator(action.name))}

        _, info = self.stage(action.name, compute, best.heads)
        return bool(info["place"])

    def _set_aside(self, action: actions.SetAside) -> int:
        best = self.pool.named(action.base)

        def compute() -> Stage:
            return {}, {"set_aside": evidence.standing_out(self.source, best).tolist()}

        _, info = self.stage(action.name, compute, best.heads)
        if info["set_aside"]:
            self.pool = Pool()  # errors before and after do not compare
            self.source = self.source.without(np.array(info["set_aside"], dtype=np.int64))
        return len(info["set_aside"])
