"""How many questions a layer needs: chosen ones, random examples and the published count, side by side.

    python bench/queries.py            # every size: recovered? with how many calls and rows?
    python bench/queries.py 8 16       # these widths, beside those that the record has from the same commit
    python bench/queries.py noise      # noisy and float32 answers, against least squares from the truth
    python bench/queries.py breaks     # where it ends otherwise: saturated, low rank, narrow, causal

Layers are random (scale 2, key biases, offset), seeds 1000 and up; the thresholds were chosen on seeds 900 to 902.
Recovered means every head within 1e-9. The record is written anew after every size. Seconds are of one core.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import headway as hw
from common import COMMIT, RESULTS, record
from headway.core.counting import Size
from noise import optimum, size

FIRST, K, EXACT = 1000, 16, 1e-9
HEADS, WIDTHS = (1, 2, 4, 8, 12), (8, 16, 32, 64)
SEEDS = {8: 10, 16: 10, 32: 3, 64: 1}  # by width
TIMES = (3, 4, 6, 8, 12)  # the counting floor, in random examples
BESIDE = {8: 2, 16: 2, 32: 0, 64: 0}  # seeds for these, by width
SECONDS = 30.0  # for one of these
NOISE = [(1, 8), (2, 8), (2, 16)]
NOISE_SEEDS = range(2)


def truth(m: int, d: int, seed: int, **options: Any) -> hw.AttentionLayer:
    given = {"scale": 2.0, "key_bias": True, "offset": True, **options}
    return hw.AttentionLayer.random(heads=m, width=d, seed=seed, **given)


def asked(oracle: Callable[[Any], Any], d: int, seed: int, **options: Any) -> tuple[hw.Fit, float]:
    begun = time.process_time()
    fit = hw.learn(hw.ask(oracle, width=d, length=K, plan="chosen", seed=seed, **options))
    return fit, time.process_time() - begun


def worst(fit: hw.Fit, layer: hw.AttentionLayer) -> float:
    return hw.match(fit.layer, layer).worst if fit.layer.heads == layer.heads else math.inf


def random_calls(m: int, d: int, seeds: range) -> int | None:
    """Random ±1 sequences from which ``learn``, told the count, recovers the layers of all these seeds."""
    if not seeds:
        return None
    for times in TIMES:
        n = math.ceil(times * Size(d, d, K).floor(m))
        layers = [truth(m, d, seed) for seed in seeds]
        if all(worst(hw.learn(hw.draw(layer, count=n, length=K, seed=7), heads=m, seconds=SECONDS), layer) <= EXACT
               for layer in layers):
            return n
    return None


def others(widths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Rows of other widths, measured at this commit."""
    path = RESULTS / "queries.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    return [row for row in kept.get("rows", []) if row["d"] not in widths] if kept.get("commit") == COMMIT else []


def grid(widths: tuple[int, ...]) -> None:
    rows: list[dict[str, Any]] = []
    for d in widths:
        for m in HEADS:
            found = []
            for seed in range(FIRST, FIRST + SEEDS[d]):
                layer = truth(m, d, seed)
                fit, seconds = asked(layer, d, seed)
                found.append({"error": worst(fit, layer), "status": fit.status.kind, "seconds": seconds,
                              "heads": fit.layer.heads == m, **{w: fit.stats[w] for w in ("calls", "plan")}})
                print(m, d, seed, found[-1], flush=True)
            calls = [f["calls"] for f in found]
            beside = random_calls(m, d, range(FIRST, FIRST + BESIDE[d]))
            plans = sorted({f["plan"] for f in found})
            rows.append({
                "m": m, "d": d, "seeds": len(found), "recovered": sum(f["error"] <= EXACT for f in found),
                "count right": sum(f["heads"] for f in found), "calls": int(statistics.median(calls)),
                "most calls": max(calls), "rows": int(statistics.median(calls)) * K,
                "floor, rows": math.ceil(Size(d, d, K).unknowns(m) / d), "random calls": beside,
                "random rows": None if beside is None else beside * K, "published": 4 * m * d * d - 2 * m + 1,
                "worst error": max(f["error"] for f in found), "plan": " or ".join(plans),
                "flattering": sum(f["status"] == "recovered" and f["error"] > EXACT for f in found),
                "seconds": statistics.median(f["seconds"] for f in found)})
            whole = sorted([*rows, *others(widths)], key=lambda row: (row["d"], row["m"]))
            every, good = sum(r["seeds"] for r in whole), sum(r["recovered"] for r in whole)
            record("queries", "python bench/queries.py", {
                "instances": every, "recovered to 1e-9": good / every,
                "count right": sum(r["count right"] for r in whole) / every,
                "said to be recovered, and not": sum(r["flattering"] for r in whole)}, whole)


def noisy() -> None:
    rows = []
    for kind in ("noise 1e-6", "float32"):
        for m, d in NOISE:
            for seed in range(FIRST, FIRST + len(NOISE_SEEDS)):
                layer = truth(m, d, seed)
                draw, kept = torch.Generator().manual_seed(seed), []
                if kind == "float32":
                    layer = layer.to(torch.float32)

                def oracle(X: torch.Tensor, layer: Any = layer, draw: Any = draw, kept: Any = kept,
                           exact: bool = kind == "float32") -> torch.Tensor:
                    Y = layer(X)
                    if not exact:
                        Y = Y + 1e-6 * Y.std() * torch.randn(Y.shape, generator=draw, dtype=torch.float64)
                    kept.append((X.double(), Y.double()))
                    return Y

                fit, seconds = asked(oracle, d, seed, dtype=layer.Theta.dtype)
                exact = layer.to(torch.float64)
                data = hw.Examples(*(torch.cat([pair[j] for pair in kept]) for j in (0, 1)))
                found = size(hw.match(fit.layer, exact)) if fit.layer.heads == m else math.inf
                best = size(hw.match(optimum(exact, data), exact))
                rows.append({"answers": kind, "m": m, "d": d, "seed": seed, "calls": fit.stats["calls"],
                             "status": fit.status.kind, "error": found, "optimum's": best, "ratio": found / best,
                             "seconds": seconds})
                print(rows[-1], flush=True)
    record("queries_noise", "python bench/queries.py noise", {
        "instances": len(rows), "largest ratio": max(r["ratio"] for r in rows),
        "at most 3": sum(r["ratio"] <= 3 for r in rows) / len(rows)}, rows)


def breaks() -> None:
    d = 16
    cases: dict[str, tuple[Any, int]] = {
        "scores of deviation 4": (truth(4, d, FIRST, scale=4.0), d),
        "scores of deviation 8": (truth(4, d, FIRST, scale=8.0), d),
        "scores of deviation 16": (truth(4, d, FIRST, scale=16.0), d),
        "rank 2": (truth(4, d, FIRST, rank=2), d),
        "4 outputs, 2 heads": (truth(2, d, FIRST, out_width=4), d),
        "4 outputs, 4 heads": (truth(4, d, FIRST, out_width=4), d),
        "a layer that looks back only": (truth(4, d, FIRST, mask="causal"), d)}
    rows = []
    for name, (layer, width) in cases.items():
        exact = layer.to(torch.float64)
        try:
            fit, seconds = asked(exact, width, FIRST)
        except hw.InputError as refused:
            rows.append({"what": name, "ends": f"refused, {str(refused).split(':')[0]}"})
        else:
            rows.append({"what": name, "ends": fit.status.kind, "heads": exact.heads, "found": fit.layer.heads,
                         "calls": fit.stats["calls"], "plan": fit.stats["plan"], "worst error": worst(fit, exact),
                         "held out": fit.stats["held_out_error"], "seconds": seconds})
        print(rows[-1], flush=True)
    columns = ("what", "ends", "heads", "found", "calls", "plan", "worst error", "held out", "seconds")
    record("queries_breaks", "python bench/queries.py breaks", {"cases": len(rows)},
           [{name: row.get(name) for name in columns} for row in rows])


def main() -> None:
    words = sys.argv[1:]
    if words and words[0] in ("noise", "breaks"):
        {"noise": noisy, "breaks": breaks}[words[0]]()
    else:
        grid(tuple(map(int, words)) or WIDTHS)


if __name__ == "__main__":
    main()
