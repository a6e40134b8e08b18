"""d = 32, m = 4, k = 16, scale 2, 4,000 examples: learn() against the time Adam takes to a relative error of 1e-6.

Both see the same examples on the same machine in the same run. Adam is told the head count, learn() is not.
Adam's rate and steps are those that bench/adam_tuning.py found fastest on other seeds.
"""

from __future__ import annotations

import torch
from common import record, timed

import headway as hw
from headway.learn.descent import descend
from headway.learn.source import Source, find_frame

SEEDS = (0, 1, 2)
TARGET = 1e-6


def adam(data: hw.Examples, heads: int, seed: int) -> tuple[float, float]:
    source = Source(data)
    source.frame = find_frame(data, source.fit, source.device)
    found, seconds = timed(lambda: descend(
        source, heads, seed=torch.Generator().manual_seed(seed), steps=20_000, target=TARGET))
    return found.held, seconds


def main() -> None:
    rows = []
    for seed in SEEDS:
        layer = hw.AttentionLayer.random(heads=4, width=32, scale=2.0, seed=seed)
        data = hw.draw(layer, count=4000, length=16, seed=100 + seed)
        fit, seconds = timed(lambda data=data: hw.learn(data))
        error, adam_seconds = adam(data, 4, seed)
        rows.append({"seed": seed, "heads found": fit.layer.heads, "worst head error": hw.match(fit.layer, layer).worst,
                     "held out": fit.stats["held_out_error"], "learn, s": seconds, "Adam reached": error,
                     "Adam, s": adam_seconds, "ratio": adam_seconds / seconds})
        print(rows[-1], flush=True)
    record("speed", "python bench/speed.py", {
        "instances": len(rows), "least ratio Adam/learn": min(r["ratio"] for r in rows),
        "worst head error": max(r["worst head error"] for r in rows)}, rows)


if __name__ == "__main__":
    main()
