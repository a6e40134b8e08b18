"""Linear attention: the operator within 1e-9 and its rank; other heads of one operator; from how many sequences.

    python bench/linear.py            # ranks not told, pairs of layers, what is said of noise and of a softmax
    python bench/linear.py samples    # how many sequences it takes, and least squares over all operators at once

Nothing was chosen on these seeds: the learner's numbers of starts and of products were chosen on others, below 100.
"""

from __future__ import annotations

import argparse
import itertools
import math
from typing import Any

import torch

import headway as hw
import workers
from common import record, timed
from headway.core import operator
from headway.core.counting import LinearSize
from headway.learning.linear import LinearSource
from headway.linalg import convex

SEEDS = tuple(range(100, 110))
WIDTHS, HEADS = (8, 16, 32), (1, 2, 4)
INPUTS = (("gaussian", "none"), ("boolean", "none"), ("gaussian", "causal"), ("boolean", "causal"))
WIDE = 32  # from here on the first and the last of these only
USUAL = 5.0  # sequences over the counting floor, where the count is found
TIMES = {8: (2.0, 3.0, 5.0), 16: (3.0, 5.0)}  # the same, where it is told: starts that fail take minutes
WHOLE = (2.0, 3.0, 5.0, 8.0, 12.0, 16.0)  # the same, for all operators at once; width 8
EXACT = 1e-9


def truth(m: int, d: int, mask: str, seed: int) -> hw.AttentionLayer:
    """Rank m: of m heads for even seeds, of 2m that are mixtures of them for odd ones."""
    layer = hw.AttentionLayer.random(m, d, mask=mask, scores=("linear", "linear/k")[seed // 2 % 2],
                                     offset=seed % 3 == 0, seed=seed)
    return mixed(layer, 2 * m, seed) if seed % 2 else layer


def mixed(layer: hw.AttentionLayer, heads: int, seed: int) -> hw.AttentionLayer:
    """As many heads with the same operator."""
    draw = torch.Generator().manual_seed(seed)
    G = torch.randn(heads, layer.heads, generator=draw, dtype=torch.float64)
    back = torch.linalg.pinv(G).mT
    Theta, W = (torch.einsum("ji,ipq->jpq", by, part) for by, part in ((G, layer.Theta), (back, layer.W)))
    return hw.AttentionLayer(Theta, W, None, layer.offset, layer.mask, layer.scores)


def examples(
    layer: hw.AttentionLayer, m: int, times: float, law: str, seed: int, noise: float = 0.0
) -> hw.Examples:
    d = layer.width
    count = max(3, math.ceil(times * LinearSize(d, d, d, layer.mask).floor(m)))
    return hw.draw(layer, count, d, law=law, seed=1000 + seed, noise=noise)


def found(d: int, m: int, law: str, mask: str, times: float, told: bool, seed: int) -> dict[str, Any]:
    """One layer learned, its count told or not."""
    layer = truth(m, d, mask, seed)
    data = examples(layer, m, times, law, seed)
    fit, seconds = timed(lambda: hw.learn(data, heads=m if told else "auto", form=layer.scores, seed=seed))
    error = hw.compare(fit.layer, layer).largest
    return {"part": "told" if told else "found", "d": d, "rank": m, "heads": layer.heads, "law": law, "mask": mask,
            "seed": seed, "times": times, "sequences": len(data), "rank found": fit.layer.heads, "error": error,
            "status": fit.status.kind, "starts": sum(len(e.get("starts", ())) for e in fit.trace),
            "least proved": fit.stats["fewest_heads"], "seconds": seconds, "success": error <= EXACT}


def whole(m: int, law: str, mask: str, times: float, seed: int) -> dict[str, Any]:
    """All operators at once, on every sequence: whether there are enough for the only solution to be the layer."""
    layer = truth(m, 8, mask, seed)
    data = examples(layer, m, times, law, seed)
    source = LinearSource(data, layer.scores == "linear/k")
    every = source.problem(torch.arange(len(data)).numpy(), 8, torch.float64)
    solved, seconds = timed(lambda: convex.solve(every))
    Z = convex.operator_of(solved.coefficients, source.d) * source.frame.scale
    back = source.frame.back
    if not source.frame.plain:
        Z = torch.einsum("ap,bq,cr,abcs->pqrs", back, back, back, Z)
    T = torch.stack(list(operator.slices(layer.Theta, layer.W)))
    error = float((Z - T).norm() / T.norm())
    return {"part": "whole", "d": 8, "rank": m, "heads": layer.heads, "law": law, "mask": mask, "seed": seed,
            "times": times, "sequences": len(data), "error": error, "seconds": seconds, "success": error <= EXACT}


def same(d: int, m: int, seed: int) -> dict[str, Any]:
    """Other heads of one operator, and an operator that is another one by 1e-6 of one head."""
    layer = hw.AttentionLayer.random(m, d, scores="linear", mask=("none", "causal")[seed % 2], seed=seed)
    other = mixed(layer, m + seed % 3, seed)
    draw = torch.Generator().manual_seed(seed)
    a, b, f, g = (torch.randn(d, generator=draw, dtype=torch.float64) for _ in range(4))
    # Symmetric in the two inner indices: Θ = abᵀ, W = fgᵀ and Θ = afᵀ, W = bgᵀ.
    one, two = (hw.AttentionLayer(torch.cat([layer.Theta, torch.outer(a, left)[None]]),
                                  torch.cat([layer.W, torch.outer(right, g)[None]]), scores="linear")
                for left, right in ((b, f), (f, b)))
    moved = layer.Theta.clone()
    moved[0] += 1e-6 * torch.randn(d, d, generator=draw, dtype=torch.float64)
    away = hw.compare(layer, hw.AttentionLayer(moved, layer.W, mask=layer.mask, scores="linear"))
    return {"part": "same", "d": d, "rank": m, "heads": other.heads, "seed": seed,
            "mixed are same": hw.compare(layer, other).same, "swapped are same": hw.compare(one, two).same,
            "moved differ": not away.same and away.example is not None, "error": hw.compare(layer, other).largest}


def said(kind: str, seed: int) -> dict[str, Any]:
    """What is said where labels are noisy, or those of a layer with a softmax."""
    layer = truth(2, 8, "none", seed) if kind == "noise" else hw.AttentionLayer.random(2, 8, seed=seed)
    data = (examples(layer, 2, 12.0, "gaussian", seed, 0.01) if kind == "noise" else
            hw.draw(layer, 300, 8, law="gaussian", seed=1000 + seed))
    fit, seconds = timed(lambda: hw.learn(data, form=layer.scores if kind == "noise" else "linear", seed=seed))
    return {"part": kind, "d": 8, "rank": 2, "seed": seed, "sequences": len(data), "rank found": fit.layer.heads,
            "error": hw.compare(fit.layer, layer).largest, "status": fit.status.kind, "seconds": seconds}


def run(kind: str, *case: Any) -> dict[str, Any]:
    row = {"found": found, "whole": whole, "same": same, "said": said}[kind](*case)
    print(row, flush=True)
    return row


def layers() -> list[tuple[Any, ...]]:
    every: list[tuple[Any, ...]] = []
    for d, m, seed in itertools.product(WIDTHS, HEADS, SEEDS):
        every.append(("same", d, m, seed))
        for law, mask in INPUTS if d < WIDE else (INPUTS[0], INPUTS[-1]):
            every.append(("found", d, m, law, mask, USUAL, False, seed))
    return every + [("said", kind, seed) for kind in ("noise", "softmax") for seed in SEEDS]


def samples() -> list[tuple[Any, ...]]:
    """On the first kind of inputs."""
    every: list[tuple[Any, ...]] = [("whole", m, *INPUTS[0], times, seed)
                                    for m, times, seed in itertools.product(HEADS, WHOLE, SEEDS)]
    for d, m in itertools.product(TIMES, HEADS):
        every += [("found", d, m, *INPUTS[0], times, True, seed)
                  for times, seed in itertools.product(TIMES[d], SEEDS)]
    return every


def of_layers(rows: list[dict[str, Any]]) -> dict[str, Any]:
    known, pairs, noisy, soft = ([row for row in rows if row["part"] == part]
                                 for part in ("found", "same", "noise", "softmax"))
    return {
        "layers": len(known), "operator within 1e-9": sum(row["success"] for row in known),
        "rank right": sum(row["rank found"] == row["rank"] for row in known),
        "rank proved": sum(row["least proved"] == row["rank"] for row in known),
        "worst error": max((row["error"] for row in known), default=0.0),
        "said recovered, and wrong": sum(row["status"] == "recovered" and not row["success"] for row in known),
        "pairs of one operator": 2 * len(pairs),
        "declared the same": sum(row["mixed are same"] + row["swapped are same"] for row in pairs),
        "pairs of two": len(pairs), "told apart with an input": sum(row["moved differ"] for row in pairs),
        "noisy labels": len(noisy), "noise called so, rank right": sum(
            (row["status"], row["rank found"]) == ("noise", 2) for row in noisy),
        "labels of a softmax": len(soft), "refused": sum(row["status"] == "not_realisable" for row in soft),
        "median s, widest, most heads": _median([row["seconds"] for row in known if (row["d"], row["rank"]) == (
            max(WIDTHS), max(HEADS))])}


def of_samples(rows: list[dict[str, Any]]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for part in ("told", "whole"):
        for times in sorted({row["times"] for row in rows if row["part"] == part}):
            here = [row["success"] for row in rows if (row["part"], row["times"]) == (part, times)]
            said[f"{part}, {times:g}"] = f"{sum(here)} of {len(here)}"
    return {**said, "said recovered, and wrong": sum(
        row.get("status") == "recovered" and not row["success"] for row in rows)}


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else math.nan


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("what", nargs="?", choices=("layers", "samples"), default="layers")
    workers.option(words)
    asked = words.parse_args()
    name, cases, told = (("linear", layers, of_layers) if asked.what == "layers" else
                         ("linear_samples", samples, of_samples))
    rows = workers.each(run, cases(), asked.workers)
    columns = dict.fromkeys(column for row in rows for column in row)
    command = "python bench/linear.py" + (" samples" if asked.what == "samples" else "")
    record(name, command, told(rows), [{column: row.get(column) for column in columns} for row in rows])


if __name__ == "__main__":
    main()
