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
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm

import headway as hw
from common import record, timed

SEEDS = {"words": 10, "narrow": 5, "trained": 1}
WIDTH, HEADS, RANK, COUNT = 128, 8, 16, 1000  # of narrow
TRAINING, VOCABULARY, LENGTH = 400, 32, 24  # of trained
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


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor, kept: list[Tensor]) -> Tensor:
        z = self.first(x)
        kept.append(z.detach())
        x = x + self.attention(z, z, z, attn_mask=mask, need_weights=False)[0]
        return x + self.inner(self.second(x))


class Transformer(nn.Module):
    """Two blocks; the second half of a sequence repeats the first."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.last, self.out = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, kept: list[Tensor]) -> Tensor:
        mask = torch.triu(torch.full((LENGTH, LENGTH), float("-inf")), 1)
        x = self.words(ids) + self.places(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x, mask, kept)
        return self.out(self.last(x))


def task(count: int, draw: torch.Generator) -> Tensor:
    half = torch.randint(0, VOCABULARY, (count, LENGTH // 2), generator=draw)
    return torch.cat([half, half], dim=1)


def trained(seed: int) -> Iterator[Case]:
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = Transformer()
    adam = torch.optim.AdamW(net.parameters(), 1e-3)
    for _ in range(TRAINING):
        ids = task(64, draw)
        # Position a predicts position a + 1; from the middle on that can be known.
        said = net(ids, [])[:, LENGTH // 2 - 1 : -1]
        loss = cross_entropy(said.flatten(0, 1), ids[:, LENGTH // 2 :].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
    kept: list[Tensor] = []
    with torch.no_grad():
        net(task(3200, draw), kept)
    for number, z in enumerate(kept):
        own = hw.from_torch(net.blocks[number].attention).to(torch.float64)
        layer = hw.AttentionLayer(own.Theta, own.W, own.key_bias, own.offset, "causal")
        X = z.double()
        yield f"trained, layer {number}, loss {float(loss.detach()):.3f}", layer, X[:3000], X[3000:]


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
