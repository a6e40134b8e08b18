"""The first paper's algorithm on random instances: before polish (error of ΣW_i, angle of the hull) and after it.

The thresholds were chosen while looking at seeds 0 to 3; the seeds here are others. Case names as arguments run
those only, and record nothing: a record is one run of one version of the code.
"""

from __future__ import annotations

import sys

import headway as hw
from common import record, timed

SEEDS = range(100, 110)
CASES = {  # heads, width, length, sequences, seeds, wanted
    "m1-d8-k2": (1, 8, 2, 20_000, 2, 2), "m1-d16-k4": (1, 16, 4, 20_000, 2, 2),
    "m1-d32-k2": (1, 32, 2, 50_000, 2, 2), "m1-d32-k8": (1, 32, 8, 20_000, 2, 2),
    "m1-d16-k8": (1, 16, 8, 20_000, 2, 2),
    "m2-d10-k2": (2, 10, 2, 400_000, 10, 10), "m2-d16-k2": (2, 16, 2, 400_000, 10, 10),
    "m2-d10-k3": (2, 10, 3, 400_000, 10, 8), "m2-d10-k4": (2, 10, 4, 400_000, 10, 8),
    "m3-d10-k2": (3, 10, 2, 2_000_000, 10, 9), "m3-d16-k2": (3, 16, 2, 2_000_000, 10, 9),
    "m4-d16-k2": (4, 16, 2, 4_000_000, 5, 4), "m5-d16-k2": (5, 16, 2, 4_000_000, 1, 0),
}


def attempt(name: str, seed: int) -> dict[str, object]:
    m, d, k, n, _, _ = CASES[name]
    layer = hw.AttentionLayer.random(heads=m, width=d, scale=3.0, seed=seed)
    data = hw.draw(layer, count=n, length=k, seed=50_000 + seed)
    fit, seconds = timed(lambda: hw.learn(data, heads=m, method=hw.Sculpt(truth=layer)))
    phases = next(event for event in fit.trace if event["stage"] == f"sculpt-{m}")["phases"]
    last = phases[-1]
    worst = hw.match(fit.layer, layer).worst
    angle = last.get("hull_angle", 0.0)
    return {"case": name, "seed": seed, "heads": m, "width": d, "length": k, "sequences": n,
            "crude sum error": phases[0]["sum_error"], "rounds": 1 + max(p["round"] for p in phases),
            "sum error": last["sum_error"], "hull angle": angle, "center error": last["center_error"],
            "after polish": worst, "status": fit.status.kind, "seconds": round(seconds, 1),
            "reached": bool(last["sum_error"] < 1e-2 and angle < 1e-2 and worst < 1e-9)}


def main() -> None:
    rows: list[dict[str, object]] = []
    for name in sys.argv[1:] or CASES:
        for seed in SEEDS[: CASES[name][4]]:
            rows.append(attempt(name, seed))
            print(rows[-1], flush=True)
        if sys.argv[1:]:
            continue
        summary = {}
        for case, (*_, seeds, wanted) in CASES.items():
            done = [row for row in rows if row["case"] == case]
            if done:
                summary[case] = f"{sum(row['reached'] for row in done)} of {seeds} (wanted {wanted})"
        record("sculpt", "python bench/sculpt.py", summary, rows)


if __name__ == "__main__":
    main()
