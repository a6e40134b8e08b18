"""The baseline's settings: steps Adam needs to a relative error of 1e-6, over rates, batches and schedules.

Tuned on seeds that no comparison uses. The schedule ends when the steps do, so each number of steps is a setting.
"""

from __future__ import annotations

import itertools

import torch

import headway as hw
from common import record, timed
from headway.learning.baselines import descend
from headway.learning.source import Source, find_frame


def main() -> None:
    layer = hw.AttentionLayer.random(heads=4, width=32, scale=2.0, seed=900)
    data = hw.draw(layer, count=4000, length=16, seed=901)
    source = Source(data)
    source.frame = find_frame(data, source.fit, source.device)
    rows = []
    settings = itertools.product((1e-3, 3e-3, 1e-2, 3e-2), (64, 256), (1500, 3000, 6000))
    for rate, batch, steps in settings:
        found, seconds = timed(lambda rate=rate, batch=batch, steps=steps: descend(
            source, 4, seed=torch.Generator().manual_seed(0), steps=steps, batch=batch, rate=rate, target=1e-6))
        rows.append({"rate": rate, "batch": batch, "steps": steps, "held out": found.held, "seconds": seconds,
                     "steps made": found.products // 2})
        print(rows[-1], flush=True)
    reached = [r for r in rows if r["held out"] <= 1e-6]
    best = min(reached, key=lambda r: r["seconds"]) if reached else min(rows, key=lambda r: r["held out"])
    record("adam_tuning", "python bench/adam_tuning.py", {"fastest to 1e-6, or nearest": str(best)}, rows)


if __name__ == "__main__":
    main()
