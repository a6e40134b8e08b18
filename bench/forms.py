"""One layer of every form at width 64, head count and size not told, beside Adam with the same time and both told.

    python bench/forms.py [--device cuda] [--only NAME ...] [--seeds N ...]

The record is written after every layer, and a run that was cut short goes on with it, be it with other names. On a
CPU seconds are those of the processor and of one thread: what else the machine does is not counted, for nobody.

Layers: 4 heads of size 16 (grouped: 2 groups), biases, scores of deviation 2; standard normal tokens, sequences of
16. Errors are on sequences nobody used: of outputs relative to their spread, and of patterns, head by head in the
order that fits best (the largest entry of the difference); the head error is that of the worst head, free of gauge.
"""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any

import torch
from torch import Tensor

import headway as hw
from common import measured, record, timed
from rival import adam
from stopwatch import fair

D, M, Q, K = 64, 4, 16, 16
SEEDS = (100, 101, 102, 103, 104)  # thresholds were chosen on others, at widths 8 to 16


def forms(seed: int) -> dict[str, tuple[hw.Form, int | None]]:
    """Every form with unknowns of its own, and the groups of its keys."""
    draw = torch.Generator().manual_seed(10_000 + seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def gain() -> Tensor:
        return 1.5 * Q**-0.25 * (1 + 0.3 * normal(Q))

    causal = hw.Sight(causal=True)
    return {  # those that take longest last
        "plain": (hw.Form(), None), "causal": (hw.Form(sight=causal), None),
        "window": (hw.Form(sight=hw.Sight(causal=True, window=6)), None),
        "table": (hw.Form(offsets=hw.OffsetTable(normal(M, 15))), None),
        "t5": (hw.Form(offsets=hw.OffsetTable(normal(M, 16), kind="t5", far=32)), None),
        "slope": (hw.Form(offsets=hw.Slope(0.3 * normal(M)), sight=causal), None),
        "cap": (hw.Form(cap=hw.Cap(5.0)), None), "sink": (hw.Form(sink=hw.Sink(normal(M))), None),
        "gated": (hw.Form(gate=hw.Gated(torch.cat([normal(M, D, Q) / math.sqrt(D), normal(M, 1, Q) / 2], 1))),
                  None),
        "normed": (hw.Form(normed=hw.Normed(gain(), gain()), rotary=hw.Rotary()), None),
        "rotary": (hw.Form(rotary=hw.Rotary(), sight=causal), None),
        "rotary pairs": (hw.Form(rotary=hw.Rotary(base=500_000.0, layout="pairs")), None),
        "rotary grouped": (hw.Form(rotary=hw.Rotary(), sight=causal), 2)}


def errors(found: hw.FactoredLayer, truth: hw.FactoredLayer, fresh: hw.Examples) -> tuple[float, float]:
    """Of outputs, and of patterns where there are as many heads."""
    X = fresh.X.to(found.query.device, torch.float64)
    Y, Z = found(X).cpu(), fresh.Y.cpu()
    out = float((Y - Z).norm() / (Z - Z.mean((0, 1))).norm())
    if found.heads != truth.heads:
        return out, math.inf
    P, T = found.patterns(X[:64]).cpu(), truth.patterns(fresh.X[:64].to(torch.float64))
    apart = torch.stack([(P - T[:, i : i + 1]).abs().amax((0, 2, 3)) for i in range(truth.heads)])
    order = apart.argmin(1)
    return out, float(apart.min(1).values.max()) if len(order.unique()) == truth.heads else math.inf


def row(name: str, seed: int, count: int, device: str, limit: float | None) -> dict[str, Any]:
    form, groups = forms(seed)[name]
    truth = hw.FactoredLayer.random(M, D, size=Q, groups=groups, form=form, seed=seed)
    data = hw.draw(truth, count=count, length=K, law="gaussian", seed=1000 + seed)
    fresh = hw.draw(truth, count=256, length=K, law="gaussian", seed=2000 + seed)
    with fair(device):
        fit, seconds = timed(lambda: hw.learn(data, form=form, device=device, seconds=limit, seed=seed))
        beside, _ = errors(adam(data, truth, seconds, seed, device), truth, fresh)
    out, patterns = errors(fit.layer, truth, fresh)
    match = hw.match(fit.layer, truth).worst
    said = {"form": name, "seed": seed, "heads": fit.layer.heads, "groups": fit.layer.groups,
            "size": fit.layer.size, "status": fit.status.kind, "head error": match, "output error": out,
            "pattern error": patterns,
            "seconds": round(seconds, 2), "Adam's output error": beside}
    print(said, fit.status.sentence, flush=True)
    return said


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = ("head error", "output error", "pattern error")
    exact = [r for r in rows if all(r[error] < 1e-9 for error in errors)]
    return {"layers": len(rows), "all heads to 1e-9": len(exact),
            "median seconds": statistics.median(r["seconds"] for r in rows),
            "most seconds": max(r["seconds"] for r in rows),
            "Adam's best output error": min(r["Adam's output error"] for r in rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--only", nargs="*", default=None, help="names of forms")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    parser.add_argument("--dry", action="store_true", help="print, do not record")
    asked = parser.parse_args()
    if asked.device == "cpu":
        torch.set_num_threads(1)
    limit = "" if asked.seconds is None else f" --seconds {asked.seconds:g}"
    command = f"python bench/forms.py --device {asked.device} --count {asked.count}{limit}"
    # What is there already is kept, asked for or not.
    known = {} if asked.dry else measured("forms", ("form", "seed"), command, asked.device)
    every = [(name, seed) for seed in sorted({*SEEDS, *asked.seeds}) for name in forms(0)]
    for name, seed in every:
        if seed not in asked.seeds or name not in (asked.only or forms(0)) or (name, seed) in known:
            continue
        known[name, seed] = row(name, seed, asked.count, asked.device, asked.seconds)
        rows = [known[case] for case in every if case in known]
        if not asked.dry:
            record("forms", command, summary(rows), rows, device=asked.device)
    if asked.dry:
        print(summary(list(known.values())))


if __name__ == "__main__":
    main()
