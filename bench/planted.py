"""The second paper's planted experiment: Gaussian tokens labelled by a network, n = 1000 / 3000, 5 trials."""

from __future__ import annotations

import math

import headway.training as ht
from common import record

HEADS, TRIALS, STEPS = (1, 4, 16), 5, 400


def main() -> None:
    rows = []
    for rule in ("1", "√H"):
        for H in HEADS:
            lost, wrong = [], []
            for trial in range(TRIALS):
                data, test = ht.planted(1000, seed=trial), ht.planted(3000, seed=1000 + trial)
                step = 1.0 if rule == "1" else math.sqrt(H)
                path = ht.train(data, H, test=test, step=step, steps=STEPS, theory=False).path
                lost.append(path.columns["loss"][-1])
                wrong.append(path.test["test_error"][-1])
            rows.append({"step": rule, "heads": H, "training loss": sum(lost) / TRIALS,
                         "test error": sum(wrong) / TRIALS})
            print(rows[-1], flush=True)
    record("planted", "python bench/planted.py", {"trials": TRIALS, "steps": STEPS}, rows)


if __name__ == "__main__":
    main()
