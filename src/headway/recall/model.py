"""A small causal transformer that recalls: two layers of attention before a table of 26 letters, and nothing else.

The first layer has a head that looks at the letter before; the second one that looks at what came after the same
letter last time, an induction head. Trained by ``python bench/recall.py``, which writes recall.safetensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from headway.core import checks
from headway.core.files import read_tensors
from headway.core.layer import AttentionLayer
from headway.core.modules import from_torch
from headway.recall.data import ALPHABET, known

WIDTH, HEADS = 32, (4, 2)  # heads of the first layer and of the second
FIRST, LAST = "blocks.0.attention", "blocks.1.attention"  # where the two layers stand


class Block(nn.Module):
    """x + attention(norm(x)), which looks back only."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        k = x.shape[1]
        ahead = torch.ones(k, k, dtype=torch.bool, device=x.device).triu(1)
        z = self.norm(x)
        after: Tensor = x + self.attention(z, z, z, attn_mask=ahead, need_weights=False)[0]
        return after


class Recaller(nn.Module):
    """Letters (n, k) as numbers to scores of the next letter, (n, k, 26)."""

    def __init__(self, width: int = WIDTH, heads: tuple[int, ...] = HEADS) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(ALPHABET), width)
        self.blocks = nn.Sequential(*(Block(width, count) for count in heads))
        self.norm, self.out = nn.RMSNorm(width), nn.Linear(width, len(ALPHABET))

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        """start: the place of the first letter."""
        there = places(start + ids.shape[1], self.letters.embedding_dim)[start:]
        x = self.letters(ids) + there.to(self.letters.weight)
        scores: Tensor = self.out(self.norm(self.blocks(x)))
        return scores


def places(length: int, width: int) -> Tensor:
    """Sines and cosines of the place, (length, width): one place before is the same turn everywhere."""
    turn = 3.0 * 100.0 ** -torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64)
    angle = torch.arange(length, dtype=torch.float64).unsqueeze(1) * turn
    return torch.cat([angle.sin(), angle.cos()], dim=1)


@dataclass(frozen=True)
class Score:
    """Where the next letter can be known: the mean of −log p(next letter), and how often the likeliest is right."""

    loss: float
    accuracy: float


def loss(model: nn.Module, ids: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    """The mean of −log p(next letter) where it can be known, and the share of right answers there."""
    asked = known(ids)[:, :-1]
    scores, answers = model(ids, start)[:, :-1][asked], ids[:, 1:][asked]
    return cross_entropy(scores, answers), (scores.argmax(1) == answers).float().mean()


def measured(model: nn.Module, ids: Tensor) -> Score:
    """How well the model recalls in these sequences."""
    with torch.no_grad():
        mean, right = loss(model, ids)
    return Score(float(mean), float(right))


def own(model: Recaller, path: str) -> AttentionLayer:
    """The layer at this path, read off its weights. (That it looks back only, its mask says when it is called.)"""
    layer = from_torch(model, path, causal=True)
    assert isinstance(layer, AttentionLayer)
    return layer


def unembedding(model: Recaller) -> Tensor:
    """What an output raises of each letter, (26, width), but for the size that the last norm divides by."""
    return (model.out.weight * model.norm.weight).detach()


def stored() -> Path:
    """Where the trained weights lie."""
    return Path(str(resources.files("headway.recall"))) / "recall.safetensors"


def trained() -> Recaller:
    """The model that comes with Headway, in float32, ready to be asked."""
    tensors, _ = read_tensors(stored())
    model = Recaller()
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        said = str(error).splitlines()[-1].strip()
        checks.refuse(str(stored()), "weights of this model", f"others ({said})", "python bench/recall.py")
    return model.eval()
