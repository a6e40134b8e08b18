"""Layers from inputs as people have them, on two CPU cores: head count and rank are never told.

    python bench/inputs.py [words narrow trained]

words     3 heads, width 16; 200 words with Zipf's frequencies, plus positions, behind a layer norm in float32
narrow    8 heads, width 128, Θ_i and W_i of rank 16; 1,000 random ±1 sequences of 16 tokens
trained   both layers of a small transformer (width 64, 4 heads, causal) trained here to repeat a sequence, from its
          own activations on its own task

Labels are computed in float64. The error is that on sequences which the learner has not been given.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

import headway as hw
import nets
from common import record, timed

SEEDS = {"words": 10, "narrow": 5, "trained": 1}
WIDTH, HEADS, RANK, COUNT = 128, 8, 16, 1000  # of narrow
TRAINING = 400  # steps, of trained
SECONDS = 120.0
STARTS = ("descent", "span", "start")  # stages that propose heads
Case = tuple[str, hw.AttentionLayer, Tensor, Tensor]  # name, truth, tokens to learn from, others


def words(seed: int) -> Iterator[Case]:
    draw = torch.Generator().manual_seed(seed)
    table, places = torch.randn(200, 16, generator=draw), 0.5 * torch.randn(10, 16, generator=draw)
    often = 1 / torch.arange(1, 201.0)
    ids = torch.multinomial(often, 22_000, replacement=True, generator=draw).view(2200, 10)
    X = layer_norm(table[ids] + places, (16,)).double()
    yield "words", hw.AttentionLayer.random(heads=3, width=16, seed=1000 + seed), X[:2000], X[2000:]


def narrow(seed: int) -> Iterator[Case]:
    draw = torch.Generator().manual_seed(seed)
    layer = hw.AttentionLayer.random(heads=HEADS, width=WIDTH, rank=RANK, seed=seed)
    W = torch.randn(HEADS, WIDTH, RANK, generator=draw, dtype=torch.float64) @ torch.randn(
        HEADS, RANK, WIDTH, generator=draw, dtype=torch.float64)
    layer = hw.AttentionLayer(layer.Theta, W / WIDTH)
    X = 2.0 * torch.randint(0, 2, (COUNT + 200, 16, WIDTH), generator=draw).double() - 1
    yield "narrow", layer, X[:COUNT], X[COUNT:]


def trained(seed: int) -> Iterator[Case]:
    draw = torch.Generator().manual_seed(seed)
    net = nets.gpt(seed, TRAINING, draw)
    for number, (layer, X) in enumerate(zip(net.layers(), net.tokens(3200, draw), strict=True)):
        yield f"trained, layer {number}, loss {net.loss:.3f}", layer, X[:3000], X[3000:]


def run(kind: str, seed: int, case: Case) -> dict[str, Any]:
    name, truth, X, others = case
    data = hw.Examples(X, truth(X), mask=truth.mask)
    fit, seconds = timed(lambda: hw.learn(data, seconds=SECONDS))
    Y = truth(others)
    error = float((fit.layer(others) - Y).norm() / (Y - Y.mean((0, 1))).norm())
    row = {"inputs": name, "seed": seed, "true heads": truth.heads, "heads found": fit.layer.heads,
           "status": fit.status.kind, "error on other sequences": error, "seconds": round(seconds, 1),
           "starts": ", ".join(e["stage"] for e in fit.trace if e["stage"].startswith(STARTS))}
    print(row, flush=True)
    return row


def main() -> None:
    kinds = {"words": words, "narrow": narrow, "trained": trained}
    rows: list[dict[str, Any]] = []
    for kind in sys.argv[1:] or kinds:
        for seed in range(SEEDS[kind]):
            rows += [run(kind, seed, case) for case in kinds[kind](seed)]
    if not sys.argv[1:]:  # a part says less than the whole
        record("inputs", "python bench/inputs.py", {
            "runs": len(rows), "head count right": sum(row["heads found"] == row["true heads"] for row in rows),
            "recovered": sum(row["status"] == "recovered" for row in rows),
            "worst error": max(row["error on other sequences"] for row in rows),
            "slowest, s": max(row["seconds"] for row in rows)}, rows)


if __name__ == "__main__":
    main()
