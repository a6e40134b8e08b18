"""How long until an error on unseen sequences is reached: shared by the benchmarks that compare with Adam.

On a CPU the benchmarks take one thread and its processor time: what else a shared machine does is not counted, for
nobody. On a GPU they take the wall clock, after all that was started there has ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

import headway as hw
from headway.learning.baselines import Setting, adam
from headway.learning.source import Source, find_frame


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
class Heads:
    """What Adam is told: how many heads, and of what size; None: Θ_i, W_i whole."""

    count: int
    size: int | None = None
    out_size: int | None = None


@dataclass(frozen=True)
class Timed:
    """Seconds to each of the targets that were reached, all seconds, and the least error."""

    to: Mapping[float, float]
    seconds: float
    error: float
    by: Mapping[float, str]


def adam_to(
    data: hw.Examples, unseen: hw.Examples, told: Heads, settings: Iterable[Setting], targets: Iterable[float], *,
    limit: float = math.inf, seed: int = 0,
) -> Timed:
    """The least seconds of any of the settings to each target. The clock stands while the error is looked at; a run
    ends where it cannot be the first to any target any more, or after ``limit`` seconds."""
    targets = tuple(targets)
    to, by, total, least = {}, {}, 0.0, math.inf
    for setting in settings:
        mine: dict[float, float] = {}
        spent, since = 0.0, clock(data.device)
        source = Source(data)
        frame = source.frame = find_frame(data, source.fit, source.device)

        def look(Theta: Tensor, W: Tensor, offset: Tensor, mine: dict[float, float] = mine,
                 frame=frame, setting: Setting = setting) -> bool:
            nonlocal spent, since, least
            spent += clock(data.device) - since
            error = relative_error(frame.leave(Theta, W, offset, data.mask), unseen)
            least = min(least, error)
            for target in targets:
                if error <= target and target not in mine:
                    mine[target] = spent
                    if spent < to.get(target, math.inf):
                        to[target], by[target] = spent, words(setting)
            since = clock(data.device)
            return spent >= min(limit, max((to.get(t, math.inf) for t in targets if t not in mine), default=0.0))

        draw = torch.Generator().manual_seed(seed)
        adam(source, told.count, setting, seed=draw, size=told.size, out_size=told.out_size, watch=look)
        total += spent
    return Timed(to, total, least, by)


def words(setting: Setting) -> str:
    """A setting in words."""
    fall = f"exponential to {setting.last:g}" if setting.last else "cosine"
    kind = "double" if setting.dtype == torch.float64 else "single"
    return (f"{setting.steps:,} steps of {setting.rows or 'the usual'} rows at {setting.rate:g}, {fall}, {kind}"
            + (f", {setting.warm} steps of warm-up" if setting.warm else "")
            + (", whitened" if setting.white else "") + ("" if setting.fast else ", without TF32"))
