"""The second paper's mixture experiment: n = 100 / 300, 5 trials, H = 1 to 64 from zero, at η = 1 and η = √H.

From a zero start all heads coincide and W moves at rate η/H: larger H at a fixed step is lazier, η ∝ √H undoes it.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise

import headway.training as ht
from common import record

HEADS, TRIALS, STEPS = (1, 2, 4, 8, 16, 32, 64), 5, 400


def main() -> None:
    rows, begun = [], time.perf_counter()
    for rule in ("1", "√H"):
        for H in HEADS:
            lost, wrong, mass = [], [], []
            for trial in range(TRIALS):
                data, test = ht.mixture(100, seed=trial), ht.mixture(300, seed=1000 + trial)
                step = 1.0 if rule == "1" else math.sqrt(H)
                path = ht.train(data, H, test=test, step=step, steps=STEPS, theory=False).path
                lost.append(path.columns["loss"][-1])
                wrong.append(path.test["test_error"][-1])
                mass.append(path.test["mass"][-1])
            rows.append({"step": rule, "heads": H, "training loss": sum(lost) / TRIALS,
                         "test error": sum(wrong) / TRIALS, "attention on relevant tokens": sum(mass) / TRIALS})
            print(rows[-1], flush=True)
    fixed = [r["training loss"] for r in rows if r["step"] == "1"]
    scaled = [r["training loss"] for r in rows if r["step"] == "√H"]
    record("mixture", "python bench/mixture.py", {
        "seconds for both sweeps": round(time.perf_counter() - begun, 1), "data seeds": "0 to 4 and 1000 to 1004",
        "more heads are lazier at η = 1": all(a < b for a, b in pairwise(fixed)),
        "and not at η = √H": all(a > b for a, b in pairwise(scaled))}, rows)


if __name__ == "__main__":
    main()
