"""Seconds to a relative error of 1e-2, 1e-4, 1e-6 and 1e-12 on unseen sequences: learn() and the strongest Adam.

    python bench/time_to.py                          # d = 32, 4 heads, of full rank and of rank 8: one CPU thread
    python bench/time_to.py --device cuda            # layers of a sentence encoder: d = 384, 12 heads of size 32
           [--layers 3] [--model FOLDER] [--count 40000] [--seconds 60]

Adam and learn() are both told the head count and the rank; a further row has learn() told nothing. learn() hands
its layer over at the end, so that its time is the same for every error it reaches. Adam is looked at every 50
steps, with the clock stopped, and of all ways listed here (what is searched, rate, budget, schedule, precision) the
fastest to each error counts, which nobody knows beforehand. Seeds are not those of bench/adam_tuning.py. The
encoder is that of bench/real.py; there each way of Adam ends after ``--seconds``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import torch

import headway as hw
from common import record
from encoder import model_folder
from headway.learning.baselines import Setting
from stopwatch import Way, adam_to, clock, fair, relative_error

TARGETS = (1e-2, 1e-4, 1e-6, 1e-12)
REPEATS = 3  # of learn(), whose median counts
SEEDS, SIZE, RANK, COUNT, LENGTH = (20, 21, 22), {"heads": 4, "width": 32}, 8, 4000, 16
SINGLE = tuple(Setting(rate=rate, steps=steps, rows=rows, warm=warm) for steps, rate, rows, warm in product(
    (500, 700, 1000, 1400, 2000), (5e-3, 1e-2), (512, 1024), (0, 100)))
DOUBLE = tuple(Setting(rate=rate, steps=steps, rows=rows, last=last, dtype=torch.float64)
               for (steps, last), rate, rows in product(
                   ((1500, 1e-3), (2000, 1e-5), (3000, 1e-7)), (5e-3, 1e-2), (512, 1024)))
HEADS, TOKENS = 12, 32  # of the encoder
WIDE = tuple(Setting(rate=rate, steps=steps) for steps, rate in product(
    (1500, 3000, 6000, 12_000), (2e-3, 4e-3)))
EXACT = (*(Setting(rate=rate, steps=steps, fast=False) for steps, rate in product(
    (3000, 12_000), (2e-3, 4e-3))),
    *(Setting(rate=2e-3, steps=steps, last=1e-4, dtype=torch.float64) for steps in (6000, 12_000)))


@dataclass(frozen=True)
class Case:
    layer: str
    data: hw.Examples
    unseen: hw.Examples
    heads: int
    rank: int | None
    ways: Sequence[Way]


def random_layers() -> Iterator[Case]:
    m = SIZE["heads"]
    for rank, seed in product((None, RANK), SEEDS):
        layer = hw.AttentionLayer.random(**SIZE, rank=rank, seed=seed)
        data, unseen = (hw.draw(layer, count=count, length=LENGTH, seed=seed + apart)
                        for count, apart in ((COUNT, 400), (300, 500)))
        ways = [Way(m, setting, size) for setting in (*SINGLE, *DOUBLE) for size in dict.fromkeys((None, rank))]
        yield Case(f"{'full rank' if rank is None else f'rank {rank}'}, seed {seed}", data, unseen, m, rank, ways)


def encoder_layers(asked: argparse.Namespace) -> Iterator[Case]:
    path = model_folder(asked.model) / "model.safetensors"
    for number in asked.layers:
        layer = hw.from_checkpoint(path, number, heads=HEADS).to(asked.device)
        data, unseen = (hw.draw(layer, count=count, length=TOKENS, seed=number + apart)
                        for count, apart in ((asked.count, 400), (300, 500)))
        size = layer.width // HEADS
        ways = [Way(HEADS, setting, size, size) for setting in (*WIDE, *EXACT)]
        yield Case(f"encoder, layer {number}", data, unseen, HEADS, size, ways)


def learned(case: Case, **told: Any) -> dict[str, Any]:
    times, errors = [], []
    for _ in range(REPEATS):
        begun = clock(case.data.device)
        fit = hw.learn(case.data, **told)
        times.append(clock(case.data.device) - begun)
        errors.append(relative_error(fit.layer, case.unseen))
    return row(case, "learn", bool(told), {t: median(times) for t in TARGETS if max(errors) <= t}, max(errors))


def descended(case: Case, limit: float) -> dict[str, Any]:
    found = adam_to(case.data, case.unseen, case.ways, TARGETS, limit=limit)
    by = "; ".join(f"{t:.0e} by {found.by[t]}" for t in TARGETS if t in found.by)
    return {**row(case, "Adam", True, found.to, found.error), "by": by}


def row(case: Case, learner: str, told: bool, to: Mapping[float, float], error: float) -> dict[str, Any]:
    return {"layer": case.layer, "learner": learner, "told": "heads, rank" if told else "nothing",
            **{f"s to {t:.0e}": to.get(t) for t in TARGETS}, "error": error, "by": None}


def ratios(rows: Sequence[dict[str, Any]], target: float) -> list[float]:
    """Adam's seconds over those of learn(), told the same, where both reach the target; a miss of Adam is ∞."""
    mine = {r["layer"]: r[f"s to {target:.0e}"] for r in rows if r["learner"] == "learn" and r["told"] != "nothing"}
    return [(r[f"s to {target:.0e}"] or math.inf) / mine[r["layer"]] for r in rows
            if r["learner"] == "Adam" and mine[r["layer"]]]


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--model")
    words.add_argument("--device", default="cpu")
    words.add_argument("--layers", type=int, nargs="*")
    words.add_argument("--count", type=int, default=40_000)
    words.add_argument("--seconds", type=float, default=60.0)
    asked = words.parse_args()
    real = asked.device != "cpu" or asked.layers is not None
    asked.layers = asked.layers or [3]
    command = "python bench/time_to.py" + (
        f" --device {asked.device} --layers {' '.join(map(str, asked.layers))}" if real else "")
    rows: list[dict[str, Any]] = []
    with fair(asked.device):
        for case in encoder_layers(asked) if real else random_layers():
            if not rows:  # what is set up once
                adam_to(case.data, case.unseen, [Way(case.heads, Setting(steps=50))], TARGETS)
                hw.learn(case.data, heads=case.heads, rank=case.rank)
            rows += [learned(case, heads=case.heads, rank=case.rank), learned(case),
                     descended(case, asked.seconds if real else math.inf)]
            print(*rows[-3:], sep="\n", flush=True)
            record("time_to_real" if real else "time_to", command, {
                "layers": len(rows) // 3, **{f"Adam's seconds over learn's, told the same, to {t:.0e}": ", ".join(
                    f"{x:.1f}" for x in ratios(rows, t)) for t in TARGETS}}, rows, device=asked.device)


if __name__ == "__main__":
    main()
