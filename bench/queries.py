"""How many questions a layer needs: chosen ones, random examples and the published count, side by side.

    python bench/queries.py            # every size: recovered? with how many calls and rows? and "random" below
    python bench/queries.py 12,8 64    # these sizes, and all of this width
    python bench/queries.py --again 8  # measured anew; else layers that were measured are left as they are
    python bench/queries.py random 8   # how many random examples do, as far as that is affordable
    python bench/queries.py noise      # noisy and float32 answers, against least squares from the truth
    python bench/queries.py breaks     # where it ends otherwise: saturated, low rank, narrow, causal

Layers are random (scale 2, key biases, offset), seeds 1000 and up; the thresholds were chosen on seeds 900 to 902.
Recovered means every head within 1e-9. Every layer is a row of queries_layers, written at once with the commit it
was measured at: a run goes on where the last one ended, cheap sizes first. Seconds are of the processor, one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
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
SEEDS = 10
TIMES = (3, 4, 6, 8, 12)  # the counting floor, in random examples
BESIDE, MOST = 2, 2500  # seeds for these, and the unknowns up to which they are looked for
SECONDS = 30.0  # for one of these
NOISE = [(1, 8), (2, 8), (2, 16), (4, 32)]
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


def random_calls(m: int, d: int) -> int | None:
    """Random ±1 sequences from which ``learn``, told the count, recovers the layers of all these seeds."""
    layers = [truth(m, d, seed) for seed in range(FIRST, FIRST + BESIDE)]
    for times in TIMES:
        n = math.ceil(times * Size(d, d, K).floor(m))
        if all(worst(hw.learn(hw.draw(layer, count=n, length=K, seed=7), heads=m, seconds=SECONDS), layer) <= EXACT
               for layer in layers):
            return n
    return None


def kept(name: str) -> list[dict[str, Any]]:
    """Rows of a record, where there is one."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def sizes(words: list[str]) -> list[tuple[int, int]]:
    """Sizes (m, d), the cheapest first: "12,8" is one, "8" a width, nothing all of them."""
    every = sorted(itertools.product(HEADS, WIDTHS), key=lambda size: size[0] * size[1] ** 2)
    return [(m, d) for m, d in every if not words or f"{m},{d}" in words or str(d) in words]


def learned(m: int, d: int, seed: int) -> dict[str, Any]:
    layer = truth(m, d, seed)
    fit, seconds = asked(layer, d, seed)
    return {"m": m, "d": d, "seed": seed, "error": worst(fit, layer), "status": fit.status.kind,
            "count right": fit.layer.heads == m, "calls": fit.stats["calls"], "plan": fit.stats["plan"],
            "seconds": round(seconds, 2), "commit": COMMIT}


def grid(wanted: list[tuple[int, int]], again: bool) -> None:
    rows = [row for row in kept("queries_layers") if not again or (row["m"], row["d"]) not in wanted]
    known = {(row["m"], row["d"], row["seed"]) for row in rows}
    seeds = range(FIRST, FIRST + SEEDS)
    for m, d in wanted:
        for seed in seeds:
            if (m, d, seed) not in known:
                rows.append(learned(m, d, seed))
                print(rows[-1], flush=True)
                rows.sort(key=lambda row: (row["d"], row["m"], row["seed"]))
                write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    """The layers, and a row for each size. Sizes that were measured before layers were kept stay as they are."""
    record("queries_layers", "python bench/queries.py", {
        "instances": len(rows), "recovered to 1e-9": sum(row["error"] <= EXACT for row in rows)}, rows)
    beside = {(row["m"], row["d"]): row["calls"] for row in kept("queries_random")}
    found = {(row["m"], row["d"]): row for row in kept("queries")}
    for md in dict.fromkeys((row["m"], row["d"]) for row in rows):
        found[md] = of_size(*md, [row for row in rows if (row["m"], row["d"]) == md], beside.get(md))
    each = sorted(found.values(), key=lambda row: (row["d"], row["m"]))
    every = sum(row["seeds"] for row in each)
    record("queries", "python bench/queries.py", {
        "instances": every, "recovered to 1e-9": sum(row["recovered"] for row in each) / every,
        "count right": sum(row["count right"] for row in each) / every,
        "said to be recovered, and not": sum(row["flattering"] for row in each)}, each)


def of_size(m: int, d: int, found: list[dict[str, Any]], beside: int | None) -> dict[str, Any]:
    calls = [row["calls"] for row in found]
    return {
        "m": m, "d": d, "seeds": len(found), "recovered": sum(row["error"] <= EXACT for row in found),
        "count right": sum(row["count right"] for row in found), "calls": int(statistics.median(calls)),
        "most calls": max(calls), "rows": int(statistics.median(calls)) * K,
        "floor, rows": math.ceil(Size(d, d, K).unknowns(m) / d), "random calls": beside,
        "random rows": None if beside is None else beside * K, "published": 4 * m * d * d - 2 * m + 1,
        "worst error": max(row["error"] for row in found), "plan": " or ".join(sorted({r["plan"] for r in found})),
        "flattering": sum(row["status"] == "recovered" and row["error"] > EXACT for row in found),
        "seconds": statistics.median(row["seconds"] for row in found),
        "commit": " ".join(dict.fromkeys(row["commit"] for row in found))}


def random(wanted: list[tuple[int, int]], again: bool) -> None:
    rows = [row for row in kept("queries_random") if not again or (row["m"], row["d"]) not in wanted]
    known = {(row["m"], row["d"]) for row in rows}
    for m, d in wanted:
        if (m, d) not in known and Size(d, d, K).unknowns(m) <= MOST:
            rows.append({"m": m, "d": d, "seeds": BESIDE, "calls": random_calls(m, d), "commit": COMMIT})
            rows.sort(key=lambda row: (row["d"], row["m"]))
            record("queries_random", "python bench/queries.py random", {"sizes": len(rows)}, rows)
    write(kept("queries_layers"))


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
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("what", nargs="*", help="random, noise or breaks; sizes such as 12,8, or widths")
    words.add_argument("--again", action="store_true", help="measure anew what the record has")
    given = words.parse_args()
    torch.set_num_threads(1)
    if given.what[:1] in (["noise"], ["breaks"]):
        {"noise": noisy, "breaks": breaks}[given.what[0]]()
    elif given.what[:1] == ["random"]:
        random(sizes(given.what[1:]), given.again)
    else:
        grid(sizes(given.what), given.again)
        if not given.what:
            random(sizes([]), given.again)


if __name__ == "__main__":
    main()
