"""d = 32, m = 4, k = 16, scale 2, 4,000 examples: learn() against the time Adam takes to a relative error of 1e-6.

Both see the same examples in the same run, on one thread, and are timed in processor time, so that what else the
machine does is not counted. Adam is told the head count, learn() is not. Adam runs as shipped (``method="adam"``,
whose budget of steps also serves wider layers), and in all the ways of bench/time_to.py, of which the fastest on
this very instance counts: nobody knows it beforehand. learn() runs nine times, before, between and after, and its
median counts. bench/adam_tuning.py says what Adam searches: Θ_i and W_i whole, since these heads have full rank.
"""

from __future__ import annotations

from statistics import median

import headway as hw
from common import record, timed
from headway.learning.baselines import TUNED
from stopwatch import Way, adam_to, fair
from time_to import SINGLE

SEEDS = (0, 1, 2)
HEADS, TARGET = 4, 1e-6


def main() -> None:
    rows = []
    with fair():
        warm = hw.draw(hw.AttentionLayer.random(heads=2, width=32, seed=99), count=400, length=16, seed=99)
        hw.learn(warm, heads=2)
        for seed in SEEDS:
            layer = hw.AttentionLayer.random(heads=HEADS, width=32, scale=2.0, seed=seed)
            data, unseen = (hw.draw(layer, count=count, length=16, seed=seed + apart)
                            for count, apart in ((4000, 100), (300, 200)))
            runs = [timed(lambda data=data: hw.learn(data)) for _ in range(3)]
            shipped = adam_to(data, unseen, [Way(HEADS, TUNED)], [TARGET], seed=seed)
            runs += [timed(lambda data=data: hw.learn(data)) for _ in range(3)]
            best = adam_to(data, unseen, [Way(HEADS, setting) for setting in SINGLE], [TARGET], seed=seed)
            runs += [timed(lambda data=data: hw.learn(data)) for _ in range(3)]
            fit, seconds = runs[0][0], median(s for _, s in runs)
            rows.append({
                "seed": seed, "heads found": fit.layer.heads, "worst head error": hw.match(fit.layer, layer).worst,
                "learn, s": seconds, "Adam reached": shipped.error, "Adam, s": shipped.seconds,
                "ratio": shipped.seconds / seconds, "best Adam reached": best.error,
                "its s": best.to.get(TARGET, best.seconds),
                "its ratio": best.to.get(TARGET, best.seconds) / seconds, "its way": best.by.get(TARGET)})
            print(rows[-1], flush=True)
        record("speed", "python bench/speed.py", {
            "instances": len(rows), "worst head error": max(r["worst head error"] for r in rows),
            "least ratio, Adam as shipped": min(r["ratio"] for r in rows),
            "least ratio, the best Adam in hindsight": min(r["its ratio"] for r in rows)}, rows)


if __name__ == "__main__":
    main()
