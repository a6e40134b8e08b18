"""What every way to learn shares: named stages with their own randomness, the polish, and the verdict.

A stage is computed once and, with a run folder, read back ever after. Each has a random generator of its own,
seeded by its name, so that a resumed run takes the same path. The verdict turns what is left unexplained on
held-out sequences into a status.
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

from headway.core import attention, checks
from headway.core.convert import key_groups, ranks
from headway.core.counting import Size
from headway.core.examples import Examples
from headway.core.layer import AttentionLayer
from headway.core.results import Fit, Status
from headway.learning.starts import moments
from headway.learning.gauss_newton import OutOfTimeError, least_curvature
from headway.learning.polish import FITTED, Polished, floor_of, polish
from headway.learning.shapes import Full
from headway.learning.source import Source, find_frame, spaced
from headway.learning.thin import Thin, ThinModel
from headway.linalg.projected import Rows, evaluate
from headway.runs.store import Run, Stage

Progress = Callable[[Mapping[str, Any]], None]


class Stages:
    """One run of a learner: its settings, the stages done so far and what they cost."""

    def __init__(
        self, examples: Examples, heads: int | str | None, rank: int | str | None, max_heads: int, starts: int,
        limit: int, seconds: float | None, seed: int, device: torch.device | str | None, run: Run | None,
        progress: Progress | None,
    ) -> None:
        self.heads, self.rank, self.max_heads = heads, rank, max_heads
        self.starts, self.limit, self.seed = starts, limit, seed
        self.run, self.progress = run, progress
        self.trace: list[dict[str, Any]] = []
        self.curve: list[tuple[float, float]] = []  # of the stage under way: when, and the residual then
        self.begun = time.perf_counter()
        self.deadline = math.inf  # until the frame is found, so that there is always something to end with
        self.generous = 1  # times the usual rows for a solve
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
        if isinstance(heads, int) and self.size.floor(heads) > len(self.source.fit):
            n, need = len(self.source.fit), self.size.floor(heads)
            checks.refuse(
                "heads", f"a count that {n} sequences (after {len(self.source.held)} held out) can determine: "
                f"at most {self.size.most_heads(n)}", f"{heads}, with {self.size.unknowns(heads)} unknowns",
                f"at least {need} sequences, three times that to be safe; or rank=r if the rank is known")
        self.deadline = math.inf if seconds is None else self.begun + seconds

    # -- stages ---------------------------------------------------------------------------------------------

    def stage(self, name: str, compute: Callable[[], Stage], heads: int = 0) -> Stage:
        self.current = {"stage": name, "heads": heads}
        self.report(None)
        begun = time.perf_counter()
        self.curve = []

        def timed() -> Stage:
            tensors, info = compute()
            seconds = time.perf_counter() - begun
            curve = [[round(at - begun, 4), float(f"{left:.4g}")] for at, left in self.curve]
            return tensors, {**info, "seconds": seconds, **({"curve": curve} if curve else {})}

        tensors, info = timed() if self.run is None else self.run.stage(name, timed)
        self.trace.append({"stage": name, **info})
        return {n: t.to(self.source.device) for n, t in tensors.items()}, info

    def report(self, residual: float | None) -> None:
        self.pulse()
        if residual is not None:
            self.curve.append((time.perf_counter(), residual))
        if self.progress is not None:
            self.progress({**self.current, "residual": residual})

    def pulse(self) -> None:
        """Called between products: no solve goes on for long after its time."""
        if time.perf_counter() > self.deadline:
            raise OutOfTimeError

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self.seed}:{name}".encode()))

    def rows_for(self, heads: int) -> int:
        """Sequences for a solve. Conjugate gradients need fewer steps the more rows there are, and each costs more:
        between four and eight times the floor the product of the two hardly changes. Where rows turn out to say
        little, as those of saturated patterns do, ``generous`` asks for more."""
        count = max(6 * self.generous * self.size.floor(heads), 16)
        return min(count, len(self.source.fit), self.source.most())

    def polish(
        self, name: str, Theta: Tensor, sequences: int | None = None, rank: int | str | None = "as asked",
        limit: int | None = None,
    ) -> Polished:
        m = Theta.shape[0]
        used = self.rank if rank == "as asked" else rank
        count = sequences or self.rows_for(m)

        def compute() -> Stage:
            found = polish(self.source, Theta, count, rank=used, generator=self.generator(name),
                           exact=sequences is not None, limit=limit or self.limit, report=self.report)
            info = asdict(found)
            return {part: info.pop(part) for part in ("Theta", "W", "offset")}, info

        found = polished(self.stage(name, compute, m))
        if not isinstance(self.heads, int) or m <= self.heads:
            self.best = better(self.best, found)
        return found

    def redundant(self, best: Polished, tolerance: float = 1e-6) -> bool:
        """Whether the features [P_1X | … | P_mX | 1] depend on each other, so that the W_i are not unique.

        Equal heads do that; so do, with two tokens, a head, its reflection and uniform attention.
        """
        if self.condition is None or self.condition[0] is not best:
            m = best.Theta.shape[0]
            if best.rank is not None and best.out_rank is not None:
                # Of thin heads the features are P_iXV_i, with V_i orthonormal.
                model = ThinModel(self.source.problem(spaced(self.source.fit, best.sequences), m, torch.float64))
                shape = Thin.of(best.Theta, best.W, best.rank, best.out_rank)
                self.condition = best, _condition(model.evaluate(shape).factor)
                return self.condition[1] < tolerance
            count = self.rows_for(m)
            if self.examples.take([0]).padding is None:
                count = min(count, math.ceil(6 * (m * self.source.d + 1) / self.examples.length))
            problem = self.source.problem(spaced(self.source.fit, count), m, torch.float64)
            self.condition = best, _condition(evaluate(problem, best.Theta).factor)
        return self.condition[1] < tolerance

    # -- the end --------------------------------------------------------------------------------------------

    def close(self, best: Polished, structured: bool) -> Fit:
        assert self.source.frame is not None
        layer = self.source.frame.leave(best.Theta, best.W, best.offset, self.examples.mask)
        layer = _without_empty(layer.canonical(1e-12), max(best.held, self.floor), self.source.frame.scale)
        m = best.Theta.shape[0]
        if best.out_rank is not None and best.held < 1e-6:
            # Read off a rough estimate; now they can be counted.
            exact = ranks(layer, max(1e-9, 1e3 * best.held))
            best = replace(best, rank=exact[0], out_rank=exact[1])
        size = replace(self.size, rank=best.rank, out_rank=best.out_rank)
        free = max(best.equations - size.unknowns(m), 1)
        noise = best.residual * math.sqrt(best.equations / free)
        products = sum(int(event.get("products", 0)) for event in self.trace)
        stats: dict[str, Any] = {
            "heads": layer.heads, "rank": best.rank, "out_rank": best.out_rank,
            "held_out_error": best.held, "fitted_error": best.residual, "noise": noise,
            "examples": len(self.examples), "held_out": len(self.source.held), "used": best.sequences,
            "floor": size.floor(m), "unknowns": size.unknowns(m),
            "unidentified_directions": self.examples.width - self.source.d, "products": products,
            "out_of_time": best.reason == "time", "seconds": time.perf_counter() - self.begun,
        }
        if best.rank is not None and best.held < 1e-6:
            groups = [group for group in key_groups(layer) if len(group) > 1]
            if groups:
                stats["key_groups"] = groups
        status = self.status(best, structured, noise, size)
        return Fit(layer, status, stats, tuple(self.trace))

    def status(self, best: Polished, structured: bool, noise: float, size: Size) -> Status:
        m, held = best.Theta.shape[0], best.held
        count = heads_of(m)
        numbers = {"held_out_error": held, "arithmetic_floor": self.floor, "heads": float(m)}
        blind = self.examples.width - self.source.d
        tail = (f" {blind} of {self.examples.width} token directions are never visited and stay unidentified."
                if blind else "")
        if held <= self.floor and (self.redundant(best) or not self.determined(best)):
            return Status("too_few", f"The examples are met exactly by {count}, but do not determine them: "
                          "other attention matrices do the same on these inputs. Draw more varied ones." + tail,
                          numbers)
        if held <= self.floor:
            return Status("recovered", f"Recovered to the floor of the arithmetic: {count}, relative error "
                          f"{held:.1e} on {len(self.source.held)} held-out sequences.{tail}", numbers)
        n = self.distinct()
        need = math.ceil(3 * size.floor(m) / (1 - len(self.source.held) / len(self.examples)))
        if n < size.floor(m) or (held > 3 * noise and best.sequences >= n and n < 3 * size.floor(m)):
            return Status("too_few", f"Too few examples: {n} different sequences do not determine {count} "
                          f"(held-out error {held:.1e}, fitted {best.residual:.1e}). About {need} sequences are "
                          f"needed.{tail}", {**numbers, "needed": float(need)})
        if held <= FITTED:
            return Status("fitted", f"Fitted: {count}, relative error {held:.1e} on {len(self.source.held)} "
                          f"held-out sequences, above the floor of the arithmetic ({self.floor:.0e}). What the "
                          f"inputs hardly show of the heads may be known less well than that.{tail}", numbers)
        if best.reason == "time":
            return Status("limit", f"Out of time with {count}: held-out error {held:.1e}. Raise seconds.{tail}",
                          numbers)
        if best.reason == "limit":
            return Status("limit", f"Stopped at the limit of {self.limit} iterations with {count}: held-out "
                          f"error {held:.1e}, still falling. Raise limit.{tail}", numbers)
        if held > 0.9:
            return Status("not_realisable", f"Nothing learned: with {count}, {held:.2f} of the labels' spread is "
                          "left on held-out sequences. The labels hardly answer to the inputs, or a few outliers "
                          "rule them." + tail, {**numbers, "residual_floor": held})
        if structured or held > 3 * noise:
            return Status("not_realisable", f"Not realisable with {count}: the residual floor is {held:.2e} "
                          f"and has structure that further heads would explain in part, so it is not noise.{tail}",
                          {**numbers, "residual_floor": held})
        return Status("noise", f"Stopped at the noise level: {count}, label noise estimated at {noise:.2e} of "
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
                        rest = left_over(rows, best)
                        yield replace(rest, Y=rest.Y.roll(shift, 0))

                found = moments.span(batches, 4, generator=self.generator(name), passes=4)
                tops.append(float(found.values[0]))
            return {}, {"top_moment": tops[0], "without_relation": max(tops[1:])}

        _, info = self.stage(name, compute, best.Theta.shape[0])
        return bool(info["top_moment"] > 1.3 * info["without_relation"])


def _condition(L: Tensor) -> float:
    """Smallest over largest singular value of a Cholesky factor, by power and inverse iteration where it is large:
    the Rayleigh quotients are off by a few per cent, and orders of magnitude are asked for."""
    if len(L) <= 512:
        s = torch.linalg.svdvals(L)
        return float(s[-1] / s[0])
    v = torch.randn(len(L), 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(L)
    w = v
    for _ in range(8):
        v, w = torch.linalg.qr(L @ (L.T @ v))[0], torch.linalg.qr(torch.cholesky_solve(w, L))[0]
    return float((L.T @ w).norm(dim=0).min() / (L.T @ v).norm(dim=0).max())


def polished(stage: Stage) -> Polished:
    tensors, info = stage
    numbers = {name: value for name, value in info.items() if name not in ("seconds", "curve")}
    return Polished(tensors["Theta"], tensors["W"], tensors["offset"], **numbers)


def _different(rows: Tensor) -> int:
    """How many of the rows differ; −0 counts as 0."""
    return len({row.tobytes() for row in (rows.cpu() + 0).to(torch.float64).numpy()})


def better(a: Polished | None, b: Polished) -> Polished:
    return b if a is None or b.held < a.held else a


def left_over(rows: Rows, taken: Polished) -> Rows:
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


def heads_of(m: int) -> str:
    return f"{m} head" + ("s" if m != 1 else "")
