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
from headway.core.counting import Size
from headway.core.layer import AttentionLayer
from headway.core.results import Fit, Status
from headway.learning.gauss_newton import OutOfTimeError
from headway.learning.polish import Polished
from headway.learning.source import spaced
from headway.learning.stages import Stages, better, heads_of
from headway.learning.unmix import unmix
from headway.linalg.projected import Rows, evaluate
from headway.runs.store import Stage
from headway.sculpting import net
from headway.sculpting.hull import span_of
from headway.sculpting.resculpt import Sculptor
from headway.sculpting.thresholds import Thresholds

LENGTHS = (2, 8)
MOST = 5  # heads tried with heads="auto"; each more costs several times the examples of the one before


class Provable(Stages):
    search: str = "gauss-newton"
    polishing: bool = True
    thresholds: Thresholds = Thresholds()
    truth: AttentionLayer | None = None

    def sculpt(self) -> Fit:
        self.admit()
        counts = [self.heads] if isinstance(self.heads, int) else range(1, min(self.max_heads, MOST) + 1)
        best: Polished | None = None
        self.numbers: dict[str, float] = {}
        self.power = 1.0
        if self.search == "net" and isinstance(self.heads, int):
            net.net_points(self.heads, self.thresholds.most_tuples)  # refuses before any work
        try:
            for m in counts:
                assert isinstance(m, int)
                if self.size.floor(m) > len(self.source.fit):
                    break
                best = better(best, self.attempt(m))
                if best.held <= self.goal:
                    break
        except OutOfTimeError:
            self.deadline = math.inf
            if best is None and self.best is None:
                self.limit = 2
                draw = torch.randn(1, self.source.d + 1, self.source.d, generator=self.generator("late"))
                self.polish("late", draw.to(self.source.device, torch.float64))
            assert self.best is not None
            best = replace(best or self.best, reason="time")
        assert best is not None
        return self.close(best, best.held > self.floor)

    @property
    def goal(self) -> float:
        """Held-out error that ends the search for a head count: the floor, or what a net can reach."""
        return self.floor if self.polishing else 0.05

    def admit(self) -> None:
        """Refuse what the algorithm is not made for."""
        data = self.examples
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

    def attempt(self, m: int) -> Polished:
        tensors, info = self.stage(f"sculpt-{m}", lambda: self._sculpt(m), m)
        total, center, V = (tensors[name] for name in ("total", "center", "directions"))
        found, _ = self.stage(f"search-{m}", lambda: self._search(m, center, V), m)
        Theta = found["Theta"]
        self.power = float(info["label_power"])
        self.numbers = conditions.measure(Theta, total=total, label_power=self.power)
        start = torch.cat([Theta, Theta.new_zeros(m, 1, Theta.shape[2])], dim=1)
        if self.polishing:
            return self.polish(f"polish-{m}", start)
        problem = self.source.problem(spaced(self.source.fit, self.rows_for(m)), m, torch.float64)
        point = evaluate(problem, start)
        assert point.offset is not None
        held = self.source.error(self.source.held, start, point.W, point.offset)
        return Polished(start, point.W, point.offset, math.sqrt(point.loss / problem.variation()), held, "search",
                        self.rows_for(m), problem.equations, None, 0)

    def _sculpt(self, m: int) -> Stage:
        source = self.source
        assert source.frame is not None
        truth = None
        if self.truth is not None:
            truth = replace(self.truth, W=self.truth.W / source.frame.scale)

        def batches() -> Iterable[Rows]:
            return source.stream(source.fit, 2 * m, torch.float32)

        sculptor = Sculptor(batches, m, self.thresholds, truth, self.report)
        found = sculptor.run()
        power = float(source.rows(source.held, torch.float64).Y.square().sum(2).mean())
        return ({"total": found.total, "center": found.hull.center, "directions": found.hull.directions,
                 "values": found.hull.values},
                {"phases": list(found.events), "thresholds": self.thresholds.asdict(), "label_power": power,
                 **({"gap": found.hull.gap} if m > 1 else {}), "heads": m, "sequences": sculptor.given.count})

    def _search(self, m: int, center: Tensor, V: Tensor) -> Stage:
        """Phase 6: heads inside the hull."""
        source = self.source
        if m == 1:
            return {"Theta": center.unsqueeze(0)}, {"search": "none: the hull is a point"}
        rows = max(64, math.ceil(8 * m * source.d / self.examples.length))
        index = spaced(source.fit, min(2 * rows, len(source.fit)))
        fit, check = (replace(source.problem(part, m, torch.float64), offset=False)
                      for part in (index[::2], index[1::2]))
        if self.search == "net":
            points = net.net_points(m, self.thresholds.most_tuples)
            radius = 1.5 * self.thresholds.radius * math.sqrt(m - 1) * float(center.norm())
            Theta, left, tried = net.search(fit, check, net.candidates(center, V, radius, points), m)
            return {"Theta": Theta}, {"search": "net", "points": points, "tuples": tried, "radius": radius,
                                      "residual": left}
        found = unmix(fit, check, span_of(center, V), m, starts=2 * self.starts,
                      generator=self.generator(f"search-{m}"), report=self.report)
        return {"Theta": found.Theta[0]}, {"search": "gauss-newton", "starts": list(found.starts),
                                           "residuals": list(found.residuals), "agreeing": found.agreeing,
                                           "products": found.products}

    def status(self, best: Polished, structured: bool, noise: float, size: Size) -> Status:
        """The plain verdict, with the theorem's conditions beside it: measured on the layer itself where it was
        recovered, on the phases' estimates otherwise."""
        plain = super().status(best, structured, noise, size)
        met = best.held <= self.floor
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
                          f"found is not to be relied on (held-out error {best.held:.1e}).", numbers)
        found = heads_of(best.Theta.shape[0])
        if not self.polishing and best.held < 0.1:
            return Status("limit", f"Found {found} to a held-out error of {best.held:.1e}, as far as the phases "
                          "go; polish=True goes on from there.", numbers)
        return Status("limit", f"The body did not close in on {found}: held-out error {best.held:.1e} after all "
                      "rounds. More examples, another head count, or method='moments'.", numbers)
