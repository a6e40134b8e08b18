"""Small transformers trained on synthetic tasks; their attention goes to the zoo (src/headway/hardness/trained).

    python bench/trained.py

histogram: how often does this token occur in the sequence (width 16, 2 heads). recall: keys with their values and a
query key; say its value (width 24, 3 heads). One block, attention and a two-layer network, Adam, fixed seeds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import headway as hw
from common import record
from headway.core.layer import save_layer
from headway.hardness.zoo import trained_folder

STEPS = 3000


class Block(nn.Module):
    def __init__(self, words: int, length: int, width: int, heads: int, answers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(0.1 * torch.randn(length, width))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.rest = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, answers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places
        answer: Tensor = self.rest(x + self.attention(x, x, x, need_weights=False)[0])
        return answer


def histogram(draw: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(8, (count, 10), generator=draw)
    return tokens, (tokens.unsqueeze(2) == tokens.unsqueeze(1)).sum(2) - 1


def recall(draw: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Six tokens of a key and a value each (4·key + value), then a key that occurred (32 + key); only the last
    place is asked."""
    keys = torch.rand(count, 8, generator=draw).argsort(1)[:, :6]
    values = torch.randint(4, (count, 6), generator=draw)
    which = torch.randint(6, (count, 1), generator=draw)
    tokens = torch.cat([4 * keys + values, 32 + keys.gather(1, which)], dim=1)
    answers = torch.full_like(tokens, -100)
    answers[:, -1:] = values.gather(1, which)
    return tokens, answers


def main() -> None:
    rows = []
    tasks = (("histogram", histogram, (8, 10, 16, 2, 10)), ("recall", recall, (40, 7, 24, 3, 4)))
    trained_folder().mkdir(exist_ok=True)
    for name, task, shape in tasks:
        torch.manual_seed(0)
        draw = torch.Generator().manual_seed(1)
        model = Block(*shape)
        adam = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(STEPS):
            tokens, answers = task(draw, 128)
            loss = cross_entropy(model(tokens).flatten(0, 1), answers.flatten())
            adam.zero_grad()
            loss.backward()
            adam.step()
        tokens, answers = task(draw, 4000)
        asked = answers >= 0
        right = float((model(tokens).argmax(2) == answers)[asked].float().mean())
        layer = hw.from_torch(model.attention.double().eval())
        save_layer(trained_folder() / f"{name}.safetensors", layer)
        score = float(layer.augmented.flatten(1).norm(dim=1).max())
        rows.append({"task": name, "width": layer.width, "heads": layer.heads, "answers right": right,
                     "largest ‖Θ‖": score})
        print(rows[-1], flush=True)
    record("trained", "python bench/trained.py", {"tasks": len(rows), "least right": min(
        r["answers right"] for r in rows)}, rows)


if __name__ == "__main__":
    main()
