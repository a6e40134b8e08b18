"""Steps until W_t/‖W_t‖ is within a given distance of the max-margin direction: descent, normalized, Polyak."""

from __future__ import annotations

from common import record
from headway.training.select import max_margin, selection, turn

STEPS, SEEDS = 20_000, range(5)


def main() -> None:
    rows = []
    for seed in SEEDS:
        problem = selection(20, seed=seed)
        target = max_margin(problem)
        for rate in (1.0, 10.0):
            _, plain = turn(problem, steps=STEPS, step=rate, rule="constant", target=target)
            goal = plain[-1]
            steps = {"descent": len(plain)}
            for rule, step in (("normalized", 0.2), ("polyak", 1.0)):
                _, errors = turn(problem, steps=STEPS, step=step, rule=rule, target=target, goal=goal)
                steps[rule] = len(errors) if errors[-1] <= goal else STEPS * 10
            rows.append({"seed": seed, "descent's step": rate, "direction error": goal, **steps,
                         "times fewer, normalized": steps["descent"] / steps["normalized"],
                         "times fewer, Polyak": steps["descent"] / steps["polyak"]})
            print(rows[-1], flush=True)
    record("selecting", "python bench/selecting.py", {
        "least factor, normalized": min(r["times fewer, normalized"] for r in rows),
        "least factor, Polyak": min(r["times fewer, Polyak"] for r in rows)}, rows)


if __name__ == "__main__":
    main()
