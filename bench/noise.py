"""Label noise of 1 %: the learned layer against the least-squares optimum reached from the true layer."""

from __future__ import annotations

import numpy as np
import torch

import headway as hw
from common import record, timed
from headway.core import attention
from headway.learning.gauss_newton import Free, gauss_newton
from headway.learning.shapes import Full
from headway.linalg.projected import Problem, Rows

CASES = [(2, 8, 8, 600), (3, 12, 8, 800), (4, 16, 16, 1000), (2, 16, 4, 1500), (4, 32, 16, 2000)]

SEEDS = range(4)


def optimum(layer: hw.AttentionLayer, data: hw.Examples) -> hw.AttentionLayer:
    """Least squares on all examples, started at the truth, with the same unknowns as the learner."""
    start = attention.augment(layer.Theta, torch.zeros(layer.heads, layer.width, dtype=torch.float64))
    problem = Problem((Rows(data.X.double(), data.Y),))
    found = gauss_newton(Free(problem), Full(start), generator=torch.Generator().manual_seed(0)).point
    Theta, u = attention.split(found.Theta)
    return hw.AttentionLayer(Theta, found.W, u, found.offset)


def size(match: hw.Match) -> float:
    return float(np.sqrt(np.mean(np.square([*match.theta_error, *match.w_error]))))


def main() -> None:
    rows = []
    for m, d, k, n in CASES:
        for seed in SEEDS:
            layer = hw.AttentionLayer.random(heads=m, width=d, seed=seed)
            data = hw.draw(layer, count=n, length=k, noise=0.01, seed=900 + seed)
            fit, seconds = timed(lambda data=data: hw.learn(data))
            found = hw.match(fit.layer, layer)
            learned, best = size(found), size(hw.match(optimum(layer, data), layer))
            rows.append({"m": m, "d": d, "k": k, "n": n, "seed": seed, "status": fit.status.kind,
                         "heads found": fit.layer.heads, "noise estimated": fit.stats["noise"],
                         "error": learned, "optimum's": best, "ratio": learned / best, "seconds": seconds})
            print(rows[-1], flush=True)
    record("noise", "python bench/noise.py", {
        "instances": len(rows), "largest ratio": max(r["ratio"] for r in rows),
        "called noise": sum(r["status"] == "noise" for r in rows) / len(rows)}, rows)


if __name__ == "__main__":
    main()
