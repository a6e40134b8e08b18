"""One layer of every form at width 64, head count and size not told, beside Adam with the same time and both told.

Layers: 4 heads of size 16 (grouped: 2 groups), biases, scores of deviation 2; standard normal tokens, sequences of
16. Errors are on sequences nobody used: of outputs relative to their spread, and of patterns, head by head in the
order that fits best (the largest entry of the difference).
"""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any

import torch
from torch import Tensor

import headway as hw
import workers
from common import record, timed
from headway.learning.formed_learn import Clock, layer_of
from headway.learning.formed_refine import FormCandidate
from headway.learning.formed_source import FormSource
from headway.learning.formed_start import form_descended, template

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
    return {
        "plain": (hw.Form(), None), "causal": (hw.Form(sight=causal), None),
        "window": (hw.Form(sight=hw.Sight(causal=True, window=6)), None),
        "rotary": (hw.Form(rotary=hw.Rotary(), sight=causal), None),
        "rotary pairs": (hw.Form(rotary=hw.Rotary(base=500_000.0, layout="pairs")), None),
        "rotary grouped": (hw.Form(rotary=hw.Rotary(), sight=causal), 2),
        "table": (hw.Form(offsets=hw.OffsetTable(normal(M, 15))), None),
        "t5": (hw.Form(offsets=hw.OffsetTable(normal(M, 16), kind="t5", far=32)), None),
        "slope": (hw.Form(offsets=hw.Slope(0.3 * normal(M)), sight=causal), None),
        "cap": (hw.Form(cap=hw.Cap(5.0)), None), "sink": (hw.Form(sink=hw.Sink(normal(M))), None),
        "normed": (hw.Form(normed=hw.Normed(gain(), gain()), rotary=hw.Rotary()), None),
        "gated": (hw.Form(gate=hw.Gated(torch.cat([normal(M, D, Q) / math.sqrt(D), normal(M, 1, Q) / 2], 1))),
                  None)}


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


def adam(data: hw.Examples, form: hw.Form, seconds: float, device: str, seed: int) -> hw.FactoredLayer:
    """Descent alone, with the form, the number and the size of the heads given, for as long."""
    source = FormSource(data, template(form, M, D, Q, Q), device)
    clock = Clock(seconds, None)
    down = form_descended(source, M, Q, Q, torch.Generator().manual_seed(seed), limit=10**6, target=0.0,
                          report=lambda _: clock.pulse(), pulse=clock.pulse)
    tensors = source.entered({name: value.double() for name, value in down.factors.tensors.items()}, True)
    return layer_of(source, FormCandidate(tensors, 0.0, down.error, down.reason, 0, 1, 0))


def row(name: str, seed: int, count: int, device: str, limit: float | None) -> dict[str, Any]:
    form, groups = forms(seed)[name]
    truth = hw.FactoredLayer.random(M, D, size=Q, groups=groups, form=form, seed=seed)
    data = hw.draw(truth, count=count, length=K, law="gaussian", seed=1000 + seed)
    fresh = hw.draw(truth, count=256, length=K, law="gaussian", seed=2000 + seed)
    fit, seconds = timed(lambda: hw.learn(data, form=form, device=device, seconds=limit, seed=seed))
    out, patterns = errors(fit.layer, truth, fresh)
    beside, _ = errors(adam(data, form, seconds, device, seed), truth, fresh)
    said = {"form": name, "seed": seed, "heads": fit.layer.heads, "groups": fit.layer.groups,
            "size": fit.layer.size, "status": fit.status.kind, "output error": out, "pattern error": patterns,
            "seconds": seconds, "Adam's output error": beside}
    print(said, flush=True)
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--only", nargs="*", default=None, help="names of forms")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    parser.add_argument("--dry", action="store_true", help="print, do not record")
    workers.option(parser)
    asked = parser.parse_args()
    rows = workers.each(row, [(name, seed, asked.count, asked.device, asked.seconds)
                              for name in asked.only or list(forms(0)) for seed in asked.seeds], asked.workers)
    exact = [r for r in rows if r["pattern error"] < 1e-9 and r["output error"] < 1e-9]
    summary = {"layers": len(rows), "all heads to 1e-9": len(exact),
               "median seconds": statistics.median(r["seconds"] for r in rows),
               "Adam's best output error": min(r["Adam's output error"] for r in rows)}
    if asked.dry:
        print(summary)
    else:
        record("forms", f"python bench/forms.py --device {asked.device}", summary, rows, device=asked.device)


if __name__ == "__main__":
    main()
