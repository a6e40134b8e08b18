"""Small transformers trained here on small tasks: attention layers as people have them, with the tokens they see.

repeat    the second half of a sequence repeats the first; causal, as a GPT is
order     how many tokens of the sequence come before this one in the alphabet; no mask, as in an encoder
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import headway as hw

IGNORED = -100  # an answer that is not asked for
Task = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]  # sequences and answers, (n, k) both
VOCABULARY, LENGTH = 32, 24  # of repeat
LETTERS, SHORT = 24, 12  # of order
BLOCKS = 2


def repeat(count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    half = torch.randint(0, VOCABULARY, (count, LENGTH // 2), generator=draw)
    ids = torch.cat([half, half], dim=1)
    # Position a predicts position a + 1; from the middle on that can be known.
    answers = torch.full_like(ids, IGNORED)
    answers[:, LENGTH // 2 - 1 : -1] = half
    return ids, answers


def order(count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, LETTERS, (count, SHORT), generator=draw)
    return ids, (ids.unsqueeze(2) > ids.unsqueeze(1)).sum(2)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None, kept: list[Tensor]) -> Tensor:
        z = self.first(x)
        kept.append(z.detach())
        x = x + self.attention(z, z, z, attn_mask=mask, need_weights=False)[0]
        after: Tensor = x + self.inner(self.second(x))
        return after


class Transformer(nn.Module):
    """Two blocks; what each attention layer is given is appended to ``kept``."""

    def __init__(self, width: int, heads: int, words: int, length: int, answers: int, mask: str) -> None:
        super().__init__()
        self.mask = mask
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(BLOCKS))
        self.last, self.out = nn.LayerNorm(width), nn.Linear(width, answers)

    def forward(self, ids: Tensor, kept: list[Tensor]) -> Tensor:
        k = ids.shape[1]
        mask = torch.triu(torch.full((k, k), float("-inf")), 1) if self.mask == "causal" else None
        x = self.words(ids) + self.places(torch.arange(k))
        for block in self.blocks:
            x = block(x, mask, kept)
        answer: Tensor = self.out(self.last(x))
        return answer


@dataclass(frozen=True)
class Trained:
    """A network and the loss it ended with: its attention layers in float64, and what they are given."""

    net: Transformer
    task: Task
    loss: float

    def layers(self) -> list[hw.AttentionLayer]:
        own = [hw.from_torch(cast(Block, block).attention).to(torch.float64) for block in self.net.blocks]
        return [hw.AttentionLayer(one.Theta, one.W, one.key_bias, one.offset, self.net.mask) for one in own]

    def tokens(self, count: int, draw: torch.Generator) -> list[Tensor]:
        """What the network's task gives each attention layer, (count, k, d), in float64."""
        kept: list[Tensor] = []
        with torch.no_grad():
            self.net(self.task(count, draw)[0], kept)
        return [z.double() for z in kept]


def gpt(seed: int, steps: int, draw: torch.Generator, width: int = 64) -> Trained:
    """4 heads, causal."""
    return _trained(seed, steps, draw, repeat, (width, 4, VOCABULARY, LENGTH, VOCABULARY, "causal"))


def encoder(seed: int, steps: int, draw: torch.Generator, width: int = 32) -> Trained:
    """4 heads, no mask."""
    return _trained(seed, steps, draw, order, (width, 4, LETTERS, SHORT, SHORT, "none"))


def _trained(
    seed: int, steps: int, draw: torch.Generator, task: Task, shape: tuple[int, int, int, int, int, str]
) -> Trained:
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # torch's layers take no generator
        net = Transformer(*shape)
    adam = torch.optim.AdamW(net.parameters(), 1e-3)
    loss = torch.zeros(())
    for _ in range(steps):
        ids, answers = task(64, draw)
        loss = cross_entropy(net(ids, []).flatten(0, 1), answers.flatten(), ignore_index=IGNORED)
        adam.zero_grad()
        loss.backward()
        adam.step()
    return Trained(net, task, float(loss.detach()))
