"""Examples → heads by descent on factors (starts/descent.py), pruned and refined (refine.py).

The route for inputs as people have them: activations of a model on its own data, few sequences, saturated heads,
wide layers. It begins with more heads than there should be, of a size that trained heads seldom exceed. If the
sequences are learned by heart instead, the weights are held down; if nothing is found, the W_i get full rank.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from headway.learning.gauss_newton import OutOfTimeError
from headway.learning.polish import FITTED, Polished
from headway.learning.refine import refine_factors
from headway.learning.stages import Stages, better, polished
from headway.learning.starts.descent import SMALL, Factors, descend, random_factors, tables, whitened
from headway.runs.store import Stage

PROMISING = 0.3  # relative error on other sequences from which a refinement is worth its time
DECAY = 3.0  # pull of the weights to zero, in units of the rate, against learning by heart
STEPS = 6000  # of Adam, at most, on one rung


@dataclass(frozen=True)
class Rung:
    """A student: heads of q columns in Θ and p in W, and how hard its weights are held down."""

    heads: int
    q: int
    p: int
    decay: float


class Factoring(Stages):
    """What learn() does where moments do not serve."""

    def ladder(self) -> list[Rung]:
        """Students in the order they are tried."""
        d, e = self.source.d, self.examples.out_width
        q = self.rank if isinstance(self.rank, int) else min(d, max(24, 8 * math.ceil(d / 64)))
        q = min(q, d)
        m = self.heads if isinstance(self.heads, int) else max(6, min(32, self.max_heads, math.ceil(3 * d / q)))
        full = min(d, e)
        p = full if d <= SMALL else min(q, full)
        rungs = [Rung(m, q, p, 0.0), Rung(m, q, p, DECAY)]
        if p < full:
            rungs.append(Rung(m, q, full, 0.0))
        return rungs

    def factors(self) -> Polished | None:
        """The best fit of the ladder; None where no rung came near."""
        best: Polished | None = None
        by_heart = False
        for rung in self.ladder():
            if rung.decay and not by_heart:
                continue
            name = f"{rung.heads}-{rung.q}-{rung.p}" + ("-held" if rung.decay else "")
            found, info = self._descended(f"descent-{name}", rung)
            by_heart = info["reason"] == "by heart"
            if info["error"] > PROMISING:
                continue
            best = better(best, self._refined(f"refine-{name}", found))
            if best.held < FITTED:
                break
        return best

    def _descended(self, name: str, rung: Rung) -> tuple[Factors, dict[str, Any]]:
        source = self.source

        def compute() -> Stage:
            draw = self.generator(name)
            fit, select = tables(source)
            begin = random_factors(rung.heads, self.examples.width, self.examples.out_width, rung.q, rung.p, draw,
                                   source.device)
            wide = source.d >= 128
            found = descend(fit, select, begin, generator=draw, rate=2e-3 if wide else 4e-3, decay=rung.decay,
                            rows=None if wide or source.device.type == "cuda" else 512, limit=STEPS,
                            report=self.report)
            if found.reason == "time":  # no finished stage: with more time a run begins it again
                assert source.frame is not None
                self._consider(replace(refine_factors(
                    source, whitened(found.factors, source.frame), generator=draw, limit=0), reason="time"))
                raise OutOfTimeError
            parts = dict(zip("ABVOc", found.factors.parts(), strict=True))
            return parts, {"error": found.error, "residual": found.fitted, "steps": found.steps,
                           "reason": found.reason}

        tensors, info = self.stage(name, compute, rung.heads)
        return Factors(*(tensors[part] for part in "ABVOc")), info

    def _refined(self, name: str, found: Factors) -> Polished:
        def compute() -> Stage:
            assert self.source.frame is not None
            done = refine_factors(self.source, whitened(found, self.source.frame), generator=self.generator(name),
                                  limit=self.limit, report=self.report, pulse=self.pulse)
            if done.reason == "time":  # no finished stage: with more time a run goes on from the descent
                self._consider(done)
                raise OutOfTimeError
            info = asdict(done)
            return {part: info.pop(part) for part in ("Theta", "W", "offset")}, info

        done = polished(self.stage(name, compute, len(found.A)))
        self._consider(done)
        return done

    def _consider(self, found: Polished) -> None:
        if not isinstance(self.heads, int) or len(found.Theta) <= self.heads:
            self.best = better(self.best, found)

    def factors_first(self) -> bool:
        """Whether this route is tried before moments and random starts: the tokens are far from white, or too few
        for moments, and the layer is too wide for random starts."""
        assert self.source.frame is not None
        rows, d = len(self.source.fit) * self.examples.length, self.source.d
        if self.source.frame.plain:
            return d >= 64 and rows < 8 * d * d
        return d > 24

