"""Few examples: six times the counting floor, d ≤ 16, m ≤ 4, head count given and unknown."""

from __future__ import annotations

import math

import numpy as np

import headway as hw
from common import record, timed
from headway.core.counting import Size

COUNT = 40


def main() -> None:
    rows = []
    for seed in range(COUNT):
        draw = np.random.default_rng([77, seed])
        m, d = int(draw.integers(1, 5)), int(draw.choice([6, 8, 12, 16]))
        k = int(draw.choice([2, 3, 4, 8, 16]))
        scale = round(float(np.exp(draw.uniform(np.log(0.5), np.log(4)))), 2)
        law = str(draw.choice(["boolean", "gaussian"]))
        layer = hw.AttentionLayer.random(heads=m, width=d, scale=scale, seed=seed)
        size = Size(d, d, k)
        simple = size.unknowns(m) / (k * d)
        n = math.ceil(6 * size.floor(m))
        data = hw.draw(layer, count=n, length=k, law=law, seed=500 + seed)
        fit, seconds = timed(lambda data=data, m=m: hw.learn(data, heads=m))
        auto, _ = timed(lambda data=data: hw.learn(data))
        rows.append({"seed": seed, "m": m, "d": d, "k": k, "scale": scale, "law": law, "n": n,
                     "times unknowns/(k·e)": n / simple, "worst": hw.match(fit.layer, layer).worst,
                     "status": fit.status.kind, "worst, m unknown": hw.match(auto.layer, layer).worst,
                     "status, m unknown": auto.status.kind, "seconds": seconds})
        print(rows[-1], flush=True)
    record("few", "python bench/few.py", {
        "instances": len(rows), "recovered to 1e-8, m given": sum(r["worst"] <= 1e-8 for r in rows) / len(rows),
        "recovered to 1e-8, m unknown": sum(r["worst, m unknown"] <= 1e-8 for r in rows) / len(rows),
        "flattering statuses": sum(r["status"] == "recovered" and r["worst"] > 1e-8 for r in rows)}, rows)


if __name__ == "__main__":
    main()
