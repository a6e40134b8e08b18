"""How long until an error on unseen sequences is reached: shared by the benchmarks that compare with Adam.

On a CPU the benchmarks take one thread and its processor time: what else a shared machine does is not counted, for
nobody. On a GPU they take the wall clock, after all that was started there has ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

import headway as hw
from headway.learning.baselines import Setting, adam
from headway.learning.source import Source, find_frame

SINGLE_FLOOR = 1e-7  # below, nobody waits for single precision


@contextmanager
def by_processor_time() -> Iterator[None]:
    """Inside, the clock that learners keep their budget by is that of this process."""
    wall = time.perf_counter
    time.perf_counter = time.process_time
    try:
        yield
    finally:
        time.perf_counter = wall


@contextmanager
def fair(device: str = "cpu") -> Iterator[None]:
    """One thread and processor time on a CPU; elsewhere nothing is changed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if device == "cpu" else threads)
    try:
        with by_processor_time() if device == "cpu" else nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def relative_error(layer: hw.AttentionLayer, unseen: hw.Examples) -> float:
    """‖F(X) − Y‖ / ‖Y − mean‖."""
    Y = unseen.Y
    return float((layer(unseen.X) - Y).norm() / (Y - Y.mean((0, 1))).norm())


@dataclass(frozen=True)
class Way:
    """Adam with so many heads of this size (None: Θ_i, W_i whole), and how it runs."""

    heads: int
    setting: Setting
    size: int | None = None
    out_size: int | None = None

    @property
    def searched(self) -> str:
        return "Θ, W" if self.size is None else "A, B, W" if self.out_size is None else "A, B, V, O"

    def __str__(self) -> str:
        s = self.setting
        rate = "the usual rate" if s.rate is None else f"{s.rate:g}"
        return (f"{self.searched}: {s.steps:,} steps of {s.rows or 'the usual'} rows at {rate}, "
                + (f"exponential to {s.last:g}" if s.last else "cosine")
                + (", double" if s.dtype == torch.float64 else ", single")
                + (f", {s.warm} steps of warm-up" if s.warm else "") + (", whitened" if s.white else "")
                + ("" if s.fast else ", without TF32"))


@dataclass(frozen=True)
class Timed:
    """Seconds to each of the targets that were reached, by which way, all seconds, and the least error."""

    to: Mapping[float, float]
    by: Mapping[float, str]
    seconds: float
    error: float


def adam_to(
    data: hw.Examples, unseen: hw.Examples, ways: Iterable[Way], targets: Sequence[float], *,
    limit: float = math.inf, seed: int = 0,
) -> Timed:
    """The least seconds of any of the ways to each target. The clock stands while the error is looked at; a run
    ends where it cannot be the first to any target any more, or after ``limit`` seconds."""
    best = Timed({}, {}, 0.0, math.inf)
    for way in ways:
        best = _first(best, _run(data, unseen, way, targets, best, limit, seed))
    return best


def _run(
    data: hw.Examples, unseen: hw.Examples, way: Way, targets: Sequence[float], best: Timed, limit: float, seed: int
) -> Timed:
    targets = [t for t in targets if way.setting.dtype == torch.float64 or t >= SINGLE_FLOOR]
    to: dict[float, float] = {}
    spent, least, since = 0.0, math.inf, clock(data.device)
    source = Source(data)
    frame = source.frame = find_frame(data, source.fit, source.device)

    def look(Theta: Tensor, W: Tensor, offset: Tensor) -> bool:
        nonlocal spent, least, since
        spent += clock(data.device) - since
        error = relative_error(frame.leave(Theta, W, offset, data.mask), unseen)
        least = min(least, error)
        to.update({target: spent for target in targets if error <= target and target not in to})
        since = clock(data.device)
        open_ = [best.to.get(target, math.inf) for target in targets if target not in to]
        return spent >= min(limit, max(open_, default=0.0))

    adam(source, way.heads, way.setting, seed=torch.Generator().manual_seed(seed), size=way.size,
         out_size=way.out_size, watch=look)
    return Timed(to, {target: str(way) for target in to}, spent, least)


def _first(a: Timed, b: Timed) -> Timed:
    """What either reached first."""
    sooner = [target for target, seconds in b.to.items() if seconds < a.to.get(target, math.inf)]
    return Timed({**a.to, **{t: b.to[t] for t in sooner}}, {**a.by, **{t: b.by[t] for t in sooner}},
                 a.seconds + b.seconds, min(a.error, b.error))
