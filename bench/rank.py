"""d = 64, m = 8, rank 8, k = 16, 20,000 examples: every head, with neither count nor rank told."""

from __future__ import annotations

import headway as hw
from common import record, timed

SEEDS = (0, 1, 2)


def main() -> None:
    rows = []
    for seed in SEEDS:
        layer = hw.AttentionLayer.random(heads=8, width=64, rank=8, scale=2.0, seed=seed)
        data = hw.draw(layer, count=20_000, length=16, seed=50 + seed)
        fit, seconds = timed(lambda data=data: hw.learn(data))
        rows.append({"seed": seed, "heads found": fit.layer.heads, "rank found": fit.stats["rank"],
                     "status": fit.status.kind, "worst head error": hw.match(fit.layer, layer).worst,
                     "sequences in the last solve": fit.stats["used"], "seconds": seconds})
        print(rows[-1], flush=True)
    record("rank", "python bench/rank.py", {
        "instances": len(rows), "worst head error": max(r["worst head error"] for r in rows)}, rows)


if __name__ == "__main__":
    main()
