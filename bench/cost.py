"""What a head costs: the fewest examples, and the seconds with that many, by sculpting and by moments, m = 1 to 4.

d = 16, two ±1 tokens, ‖Θ_i‖ = 3. The number of examples is doubled until every seed succeeds: head errors below
1e-9, and for sculpting also ΣW_i and the hull within 1e-2 before the polish. Writes a figure beside the table.
"""

from __future__ import annotations

from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import headway as hw
from common import RESULTS, record, timed

SEEDS, HEADS = (200, 201, 202), range(1, 5)
FIRST = {"sculpt": {1: 125, 2: 6_250, 3: 25_000, 4: 31_250}, "moments": {1: 50, 2: 50, 3: 50, 4: 50}}
MOST = 8_000_000


def attempt(method: str, m: int, count: int, seed: int) -> tuple[bool, float]:
    layer = hw.AttentionLayer.random(heads=m, width=16, scale=3.0, seed=seed)
    data = hw.draw(layer, count=count, length=2, seed=60_000 + seed)
    learner = hw.Sculpt(truth=layer) if method == "sculpt" else method
    try:
        fit, seconds = timed(lambda: hw.learn(data, heads=m, method=learner))
    except ValueError:  # below the counting floor
        return False, 0.0
    good = hw.match(fit.layer, layer).worst < 1e-9
    if method == "sculpt":
        last = next(event for event in fit.trace if event["stage"] == f"sculpt-{m}")["phases"][-1]
        good = good and last["sum_error"] < 1e-2 and last.get("hull_angle", 0.0) < 1e-2
    return good, seconds


def needed(method: str, m: int) -> dict[str, object]:
    count = FIRST[method][m]
    while count <= MOST:
        times = []
        for seed in SEEDS:
            good, seconds = attempt(method, m, count, seed)
            print(method, m, count, seed, good, round(seconds, 2), flush=True)
            if not good:
                break
            times.append(seconds)
        if len(times) == len(SEEDS):
            return {"method": method, "heads": m, "examples": count, "seconds": median(times)}
        count *= 2
    return {"method": method, "heads": m, "examples": None, "seconds": None}


def figure(rows: list[dict[str, object]]) -> None:
    fig, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    panels = ((axes[0], "examples", "examples needed"), (axes[1], "seconds", "seconds with that many"))
    for ax, what, words in panels:
        for method, colour, mark in (("sculpt", "#0072B2", "o"), ("moments", "#D55E00", "s")):
            found = [r for r in rows if r["method"] == method and r[what] is not None]
            heads, values = [r["heads"] for r in found], [r[what] for r in found]
            ax.semilogy(heads, values, color=colour, marker=mark, label=method)
        ax.set_xlabel("heads m")
        ax.set_ylabel(words)
        ax.set_xticks(HEADS)
        ax.grid(alpha=0.3, which="both", linewidth=0.4)
    axes[0].legend(frameon=False)
    fig.savefig(RESULTS / "cost.png", dpi=160)


def main() -> None:
    rows = [needed(method, m) for method in ("moments", "sculpt") for m in HEADS]
    by = {(r["method"], r["heads"]): r["examples"] for r in rows}
    record("cost", "python bench/cost.py", {
        "examples by sculpting, m = 1 to 4": ", ".join(str(by["sculpt", m]) for m in HEADS),
        "examples by moments, m = 1 to 4": ", ".join(str(by["moments", m]) for m in HEADS)}, rows)
    figure(rows)


if __name__ == "__main__":
    main()
