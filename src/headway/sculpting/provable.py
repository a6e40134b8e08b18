"""learn(method="sculpt"): the first paper's six phases in order, then, if wanted, the polish of the fast route.

The theorem asks for tokens with independent coordinates of mean 0 and variance 1, no mask, no noise, and heads in
general position. What can be checked beforehand is refused; what shows only afterwards (ΣW_i singular, equal heads,
attention matrices of effective rank 1) is measured and named in the status.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headway.core import checks, conditions
from headway.core.results import Fit, Status
from headway.learning.actions import Polish
from headway.learning.candidate import Candidate
from headway.learning.gauss_newton import OutOfTimeError
from headway.learning.loop import Loop
from headway.learning.settings import Sculpt
from headway.learning.source import spaced
from headway.learning.starts.unmix import unmix
from headway.learning.verdict import conclude, heads_of
from headway.linalg.projected import Rows, evaluate
from headway.runs.store import Stage
from headway.sculpting import net
from headway.sculpting.hull import span_of
from headway.sculpting.resculpt import Sculptor
from headway.sculpting.thresholds import Thresholds

LENGTHS = (2, 8)
MOST = 5  # heads tried with heads="auto"; each more costs several times the examples of the one before


def sculpted(loop: Loop, settings: Sculpt) -> Fit:
    """The six phases, the polish if wanted, and the verdict with the theorem's conditions beside it."""
    return Provable(loop, settings).sculpt()


class Provable:
    """One run of the algorithm: the loop keeps its stages and its time."""

    def __init__(self, loop: Loop, settings: Sculpt) -> None:
        self.loop, self.settings = loop, settings
        self.source, self.size, self.floor = loop.source, loop.size, loop.floor
        self.thresholds = settings.thresholds or Thresholds()
        self.numbers: dict[str, float] = {}
        self.power = 1.0

    def sculpt(self) -> Fit:
        self.admit()
        heads, best = self.loop.asked.heads, None
        counts = [heads] if heads is not None else range(1, min(self.settings.max_heads, MOST) + 1)
        if self.settings.search == "net" and heads is not None:
            net.net_points(heads, self.thresholds.most_tuples)  # refuses before any work
        try:
            for m in counts:
                if self.size.floor(m) > len(self.source.fit):
                    break
                self.attempt(m)
                best = self.loop.pool.best()
                assert best is not None
                if best.error <= self.goal:
                    break
        except OutOfTimeError:
            best = replace(self.loop.in_time(), reason="time")
        assert best is not None
        fit = conclude(self.loop, best, best.error > self.floor)
        return replace(fit, status=self.status(best, fit))

    @property
    def goal(self) -> float:
        """Held-out error that ends the search for a head count: the floor, or what a net can reach."""
        return self.floor if self.settings.polish else 0.05

    def admit(self) -> None:
        """Refuse what the algorithm is not made for."""
        data = self.loop.examples
        other = "method='moments', which takes such examples"
        if not LENGTHS[0] <= data.length <= LENGTHS[1]:
            checks.refuse("examples.X", "sequences of 2 to 8 tokens with method='sculpt'",
                          f"{data.length} tokens", other)
        padded = data.take(np.arange(1)).padding is not None
        if data.mask != "none" or padded:
            checks.refuse("examples.mask", "no mask and no padding with method='sculpt'",
                          "padding" if padded else repr(data.mask), other)
        assert self.source.frame is not None
        if not self.source.frame.plain:
            checks.refuse("examples.X", "tokens of mean 0 and covariance I with method='sculpt'",
                          "others, beyond sampling error", other)

    def attempt(self, m: int) -> None:
        tensors, info = self.loop.stage(f"sculpt-{m}", lambda: self._sculpt(m), m, why="asked for")
        total, center, V = (tensors[name] for name in ("total", "center", "directions"))
        found, _ = self.loop.stage(f"search-{m}", lambda: self._search(m, center, V), m,
                                   why="the heads are looked for inside the body")
        Theta = found["Theta"]
        self.power = float(info["label_power"])
        self.numbers = conditions.measure(Theta, total=total, label_power=self.power)
        start = torch.cat([Theta, Theta.new_zeros(m, 1, Theta.shape[2])], dim=1)
        if self.settings.polish:
            self.loop.pool = self.loop.pool.with_rough(math.inf, f"search-{m}", start)
            self.loop.do(Polish(f"polish-{m}", f"search-{m}"))
            return
        rows = self.loop.facts.rows_for(m)
        problem = self.loop.problem(m, rows)
        point = evaluate(problem, start)
        assert point.offset is not None
        error = self.source.error(self.source.select, start, point.W, point.offset)
        self.loop.pool = self.loop.pool.with_candidate(Candidate(
            start, point.W, point.offset, math.sqrt(point.loss / problem.variation()), error, "search", rows,
            problem.equations, None, 0, name=f"search-{m}"))

    def _sculpt(self, m: int) -> Stage:
        source = self.source
        assert source.frame is not None
        truth = None
        if self.settings.truth is not None:
            truth = replace(self.settings.truth, W=self.settings.truth.W / source.frame.scale)

        def batches() -> Iterable[Rows]:
            return source.stream(source.fit, 2 * m, torch.float32)

        sculptor = Sculptor(batches, m, self.thresholds, truth, self.loop.report)
        found = sculptor.run()
        power = float(source.rows(source.select, torch.float64).Y.square().sum(2).mean())
        return ({"total": found.total, "center": found.hull.center, "directions": found.hull.directions,
                 "values": found.hull.values},
                {"phases": list(found.events), "thresholds": self.thresholds.asdict(), "label_power": power,
                 **({"gap": found.hull.gap} if m > 1 else {}), "heads": m, "sequences": sculptor.given.count})

    def _search(self, m: int, center: Tensor, V: Tensor) -> Stage:
        """Phase 6: heads inside the hull."""
        source = self.source
        if m == 1:
            return {"Theta": center.unsqueeze(0)}, {"search": "none: the hull is a point"}
        rows = max(64, math.ceil(8 * m * source.d / self.loop.examples.length))
        index = spaced(source.fit, min(2 * rows, len(source.fit)))
        fit, check = (replace(source.problem(part, m, torch.float64), offset=False)
                      for part in (index[::2], index[1::2]))
        if self.settings.search == "net":
            points = net.net_points(m, self.thresholds.most_tuples)
            radius = 1.5 * self.thresholds.radius * math.sqrt(m - 1) * float(center.norm())
            Theta, left, tried = net.search(fit, check, net.candidates(center, V, radius, points), m)
            return {"Theta": Theta}, {"search": "net", "points": points, "tuples": tried, "radius": radius,
                                      "residual": left}
        found = unmix(fit, check, span_of(center, V), m, starts=2 * self.settings.starts,
                      generator=self.loop.generator(f"search-{m}"), report=self.loop.report)
        return {"Theta": found.Theta[0]}, {"search": "gauss-newton", "starts": list(found.starts),
                                           "residuals": list(found.residuals), "agreeing": found.agreeing,
                                           "products": found.products}

    def status(self, best: Candidate, fit: Fit) -> Status:
        """The plain verdict, with the theorem's conditions beside it: measured on the layer itself where it was
        recovered, on the phases' estimates otherwise."""
        plain, error = fit.status, float(fit.stats["held_out_error"])
        met = error <= self.floor
        if met:
            # The offset and key bias of the polish are nothing here; heads that are equal or dead show in W.
            self.numbers = conditions.measure(best.Theta[:, :-1], best.W, label_power=self.power)
        numbers = {**plain.numbers, **self.numbers}
        if best.reason == "time":
            return replace(plain, numbers=numbers)
        broken = conditions.broken(numbers)
        if met and not broken:
            return replace(plain, numbers=numbers)
        if met and plain.kind == "recovered":
            return Status("recovered", f"{plain.sentence} The theorem does not cover it: {'; '.join(broken)}.",
                          numbers)
        if broken:
            return Status("degenerate", f"A condition of the theorem does not hold: {'; '.join(broken)}. What was "
                          f"found is not to be relied on (held-out error {error:.1e}).", numbers)
        found = heads_of(best.heads)
        if not self.settings.polish and error < 0.1:
            return Status("limit", f"Found {found} to a held-out error of {error:.1e}, as far as the phases "
                          "go; polish=True goes on from there.", numbers)
        return Status("limit", f"The body did not close in on {found}: held-out error {error:.1e} after all "
                      "rounds. More examples, another head count, or method='moments'.", numbers)
