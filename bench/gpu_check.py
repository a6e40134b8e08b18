"""The learner on an accelerator: the same call, examples on the device. Prints one line a case."""

from __future__ import annotations

import sys
import time

import torch

import headway as hw

CASES = [(8, 64, 8, 16, 8000), (12, 384, 32, 32, 40_000)]  # heads, width, rank, length, sequences


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    for m, d, rank, k, n in CASES:
        layer = hw.AttentionLayer.random(heads=m, width=d, rank=rank, scale=3.0, key_bias=True, offset=True, seed=0)
        data = hw.draw(layer.to(device), count=n, length=k, seed=1)
        begun = time.perf_counter()
        fit = hw.learn(data, seconds=400)
        if data.device.type == "cuda":
            torch.cuda.synchronize()
        spent = time.perf_counter() - begun
        worst = hw.match(fit.layer, layer).worst
        print(f"m={m} d={d} n={n}: {spent:.1f} s, worst {worst:.1e}, {fit.status.sentence}", flush=True)
        print([round(s, 3) for s in fit.trace[1].get("singular_values", [])], flush=True)
        for event in fit.trace:
            told = ("seconds", "residual", "error", "sequences", "rank", "gap", "agreeing")
            print("  ", event["stage"], {name: event[name] for name in told if name in event}, flush=True)


if __name__ == "__main__":
    main()
