"""Recovery over random instances: m 1–6, d 8–32, k 2–16, scale 0.5–4, full and low rank, bias, laws, masks.

Every instance has 16 times its counting floor of sequences (at least 64) and an unknown head count.
"""

from __future__ import annotations

import sys

import numpy as np

import headway as hw
from common import record, timed
from headway.core.counting import Size

SEEN = range(60)  # the learner's thresholds were chosen while looking at these
FRESH = range(1000, 1060)  # and not at these


def instance(seed: int) -> dict[str, object]:
    draw = np.random.default_rng([2024, seed])
    d = int(draw.choice([8, 12, 16, 24, 32]))
    return {
        "seed": seed, "m": int(draw.integers(1, 7)), "d": d, "k": int(draw.choice([2, 3, 4, 8, 12, 16])),
        "scale": round(float(np.exp(draw.uniform(np.log(0.5), np.log(4)))), 2),
        "rank": int(draw.integers(2, d // 2 + 1)) if draw.random() < 0.4 else None,
        "key_bias": bool(draw.random() < 0.5), "offset": bool(draw.random() < 0.5),
        "law": str(draw.choice(["boolean", "gaussian"])),
        "mask": "causal" if draw.random() < 0.2 else "none",
    }


def attempt(case: dict[str, object]) -> dict[str, object]:
    pick = {name: case[name] for name in ("scale", "rank", "key_bias", "offset", "mask", "seed")}
    layer = hw.AttentionLayer.random(heads=case["m"], width=case["d"], **pick)  # type: ignore[arg-type]
    d, k, m = (int(case[name]) for name in ("d", "k", "m"))  # type: ignore[call-overload]
    count = max(64, 16 * Size(d, d, k, str(case["mask"])).floor(m))
    data = hw.draw(layer, count=count, length=k, law=str(case["law"]), seed=10_000 + int(case["seed"]))  # type: ignore[call-overload]
    fit, seconds = timed(lambda: hw.learn(data))
    worst = hw.match(fit.layer, layer).worst
    return {**case, "n": count, "found": fit.layer.heads, "status": fit.status.kind, "worst": worst,
            "recovered": worst <= 1e-8, "count_right": fit.layer.heads == m, "seconds": round(seconds, 2)}


def main() -> None:
    rows = []
    only = [int(s) for s in sys.argv[1:]]
    for seed in only or [*SEEN, *FRESH]:
        rows.append(attempt(instance(seed)))
        print({k: v for k, v in rows[-1].items() if k != "count_right"}, flush=True)
    if not only:
        fresh = [r for r in rows if r["seed"] in FRESH]
        record("success", "python bench/success.py", {
            "instances": len(rows),
            "fresh seeds recovered to 1e-8": sum(bool(r["recovered"]) for r in fresh) / len(fresh),
            "recovered to 1e-8": sum(bool(r["recovered"]) for r in rows) / len(rows),
            "head count right": sum(bool(r["count_right"]) for r in rows) / len(rows),
            "flattering statuses": sum(r["status"] == "recovered" and not r["recovered"] for r in rows)}, rows)


if __name__ == "__main__":
    main()
