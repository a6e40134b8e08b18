"""Attention weights under the names they are stored by, and the factors that they are.

With weights outputs first (nn.Linear), heads of size q and a scale s: A_i = s[W_Q,iᵀ; b_Q,iᵀ],
B_j = [W_K,jᵀ; b_K,jᵀ], V_j = [W_V,jᵀ; b_V,jᵀ], O_i = W_O,iᵀ, c = b_O. Where queries are normed, s is in
their gain.

The same names stand in a module (its parameters) and in a file (behind a stem), so both are read here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headway.core import checks
from headway.core.convert import from_weights
from headway.core.factored import FactoredLayer
from headway.core.forms import Form, Gated, Normed, Sink
from headway.core.layer import AttentionLayer
from headway.core.positions import OffsetTable


@dataclass(frozen=True)
class Place:
    """Where one part lies: a tensor, or block ``block`` of ``blocks`` equal ones of its rows.

    per_head: the blocks follow each other within every head, not once in the whole. inputs_first: stored as
    (inputs, outputs), as GPT-2 has it.
    """

    name: str
    block: int = 0
    blocks: int = 1
    per_head: bool = False
    inputs_first: bool = False

    def read(self, tensors: Mapping[str, Tensor], heads: int) -> Tensor:
        stored = self._rows(tensors[self.name])
        return self._cut(stored, heads)[:, self.block].reshape(-1, *stored.shape[1:])

    def write(self, tensors: MutableMapping[str, Tensor], value: Tensor, heads: int) -> None:
        """Put ``value`` there, in the dtype and on the device of what stands there; other blocks stay."""
        stored = self._rows(tensors[self.name]).clone()
        cut = self._cut(stored, heads)
        cut[:, self.block] = value.reshape(cut[:, self.block].shape).to(stored)
        tensors[self.name] = self._rows(stored).contiguous()

    def _rows(self, stored: Tensor) -> Tensor:
        return stored.T if self.inputs_first and stored.ndim == 2 else stored

    def _cut(self, stored: Tensor, heads: int) -> Tensor:
        apart = heads if self.per_head else 1
        if stored.shape[0] % (apart * self.blocks):
            checks.refuse(self.name, f"rows for {self.blocks} parts of {apart}", stored.shape[0], "check the sizes")
        return stored.view(apart, self.blocks, -1, *stored.shape[1:])


PARTS = ("query", "key", "value", "out")
# Four separate weights: query, key, value, out; "" where the module has no output projection of its own.
SEPARATE = (
    *((*(f"{c}_proj" for c in "qkv"), out) for out in ("o_proj", "out_proj", "dense")),
    ("q_lin", "k_lin", "v_lin", "out_lin"),
    ("q", "k", "v", "o"),
    *((*(f"{inner}{name}" for name in ("query", "key", "value")), "output.dense") for inner in (
        "self.", "attention.")),
    ("query", "key", "value", ""),
    ("attn_q", "attn_k", "attn_v", "attn_output"),
)
# One weight for all three: its name, the output's, whether blocks are within each head, whether inputs come first.
FUSED = (("c_attn", "c_proj", False), ("query_key_value", "dense", True), ("attn_qkv", "attn_output", False))
OTHERS = {  # part of a form: names in use
    "norm_query": ("q_norm.weight", "attn_q_norm.weight"), "norm_key": ("k_norm.weight", "attn_k_norm.weight"),
    "sink": ("sinks", "attn_sinks.weight", "attn_sinks"), "offsets": ("relative_attention_bias.weight",)}


def places(names: Collection[str], stem: str = "", inputs_first: bool | None = None) -> dict[str, Place] | None:
    """Where the parts of the attention under ``stem`` lie among these names; None if there is none.

    inputs_first: of GPT-2's weights; None: as GPT-2 stores them.
    """
    found = _weights(names, stem, True if inputs_first is None else inputs_first)
    if found is None:
        return None
    for part, known in OTHERS.items():
        for name in known:
            if stem + name in names:
                found[part] = Place(stem + name)
    return found


def transposed(module: Any) -> bool:
    """Whether a module's c_attn is stored inputs first: GPT-2's own kind of linear layer, not torch's."""
    return hasattr(getattr(module, "c_attn", None), "nf")


def _weights(names: Collection[str], stem: str, inputs_first: bool) -> dict[str, Place] | None:
    for parts in SEPARATE:
        if all(f"{stem}{name}.weight" in names for name in parts if name):
            return _both(names, {part: Place(stem + name) for part, name in zip(PARTS, parts, strict=True) if name})
    for fused, out, per_head in FUSED:
        if f"{stem}{fused}.weight" in names and f"{stem}{out}.weight" in names:
            first = inputs_first and fused == "c_attn"
            last = {"out": Place(stem + out, inputs_first=first)}
            if f"{stem}q_attn.weight" in names:  # cross-attention: keys and values in one, queries apart
                pair = {part: Place(stem + fused, i, 2, inputs_first=first) for i, part in enumerate(PARTS[1:3])}
                return _both(names, {"query": Place(f"{stem}q_attn", inputs_first=first), **pair, **last})
            return _both(names, {part: Place(stem + fused, i, 3, per_head, first)
                                 for i, part in enumerate(PARTS[:3])} | last)
    if f"{stem}out_proj.weight" in names and f"{stem}in_proj_weight" in names:  # nn.MultiheadAttention
        found = {part: Place(f"{stem}in_proj_weight", i, 3) for i, part in enumerate(PARTS[:3])}
    elif f"{stem}out_proj.weight" in names and f"{stem}q_proj_weight" in names:
        found = {part: Place(f"{stem}{part[0]}_proj_weight") for part in PARTS[:3]}
    else:
        return None
    if f"{stem}in_proj_bias" in names:
        found |= {f"{part}_bias": Place(f"{stem}in_proj_bias", i, 3) for i, part in enumerate(PARTS[:3])}
    return found | _both(names, {"out": Place(f"{stem}out_proj")})


def _both(names: Collection[str], layers: Mapping[str, Place]) -> dict[str, Place]:
    """Weight and, where there is one, bias of each linear layer."""
    found = {part: replace(at, name=f"{at.name}.weight") for part, at in layers.items()}
    return found | {f"{part}_bias": replace(at, name=f"{at.name}.bias", inputs_first=False)
                    for part, at in layers.items() if f"{at.name}.bias" in names}


def gated(found: Mapping[str, Place]) -> dict[str, Place]:
    """The same places where the rows of every head's query are followed by those of its gate."""
    halves = {name: replace(at, blocks=2, per_head=True) for name, at in found.items() if name in (
        "query", "query_bias")}
    gates = {name.replace("query", "gate"): replace(at, block=1) for name, at in halves.items()}
    return {**found, **halves, **gates}


@dataclass(frozen=True)
class Shape:
    """What the weights do not say: heads, the size of their queries, what multiplies scores."""

    heads: int
    size: int
    scale: float
    turn: float = 1.0  # multiplies turned queries and turned keys (yarn)
    gain: float = 0.0  # added to stored norm weights: Gemma stores them less 1
    eps: float = 1e-6  # of the norms


def read(
    tensors: Mapping[str, Tensor], at: Mapping[str, Place], shape: Shape, form: Form, cross: bool = False
) -> FactoredLayer:
    """The factors of the weights at these places; ``form`` brings what is not stored as a tensor."""
    m, q = shape.heads, shape.size
    parts = {name: place.read(tensors, m) for name, place in at.items()}
    _numbers(parts, at)
    g = _groups(parts, at, m, q)
    scale = torch.full((q,), shape.scale, dtype=torch.float64)
    if form.rotary is not None:
        scale[: form.rotary.coordinates(q)] *= shape.turn**2
    scale = scale.to(parts["query"])
    if "norm_query" in at:
        query, key = parts["norm_query"] + shape.gain, parts["norm_key"] + shape.gain
        for name, gain in (("norm_query", query), ("norm_key", key)):
            checks.shape(at[name].name, gain, (q,), "norms over each head, not over all at once")
        form, scale = replace(form, normed=Normed(query * scale, key, shape.eps)), torch.ones_like(scale)
    if "sink" in at:
        form = replace(form, sink=Sink(parts["sink"]))
    if "offsets" in at and isinstance(form.offsets, OffsetTable):
        form = replace(form, offsets=replace(form.offsets, values=parts["offsets"].T.contiguous()))
    if "gate" in at:
        form = replace(form, gate=Gated(_heads(parts, "gate", m)))
    value = _heads(parts, "value", g)
    p = value.shape[2]
    out = parts["out"].T if "out" in at else torch.eye(m * p, dtype=value.dtype, device=value.device)
    name = at["out"].name if "out" in at else "out"
    checks.shape(name, out, (m * p, "e"), "one column for each of the heads' outputs")
    return FactoredLayer(_heads(parts, "query", m) * scale, _heads(parts, "key", g), value,
                         out.reshape(m, p, -1), parts.get("out_bias"), form, cross=cross)


def plain(layer: FactoredLayer, tensors: Mapping[str, Tensor], at: Mapping[str, Place]) -> AttentionLayer | None:
    """The layer as Θ_i, u_i, W_i and c if its scores are plain and see all keys, or all behind; None if not, or
    if heads share their keys, which Θ_i would not show."""
    sight = layer.form.sight
    own = layer.groups == layer.heads and not layer.cross
    if not layer.form.is_plain or not own or sight.window is not None or sight.prefix:
        return None
    m, q = layer.heads, layer.size
    if layer.value_size != q or "out" not in at:
        return layer.dense()
    parts = {name: place.read(tensors, m) for name, place in at.items()}
    query = layer.query[:, :-1].mT.reshape(m * q, -1) * math.sqrt(q)
    bias = layer.query[:, -1].reshape(-1) * math.sqrt(q) if "query_bias" in at else None
    return from_weights(query, parts["key"], parts["value"], parts["out"], heads=m, query_bias=bias,
                        key_bias=parts.get("key_bias"), value_bias=parts.get("value_bias"),
                        out_bias=parts.get("out_bias"), causal=sight.causal)


def write(
    layer: FactoredLayer, tensors: MutableMapping[str, Tensor], at: Mapping[str, Place], shape: Shape,
    tolerance: float = 0.0,
) -> None:
    """Put a layer where another of the same form lies: the other way round of ``read``.

    A bias that the file has no place for is refused if it is above ``tolerance`` of the weights it belongs to.
    """
    m, scale = layer.heads, torch.full((layer.size,), shape.scale, dtype=torch.float64)
    if layer.form.rotary is not None:
        scale[: layer.form.rotary.coordinates(layer.size)] *= shape.turn**2
    form, scale = layer.form, scale.to(layer.query)
    parts: dict[str, Tensor] = {}
    if form.normed is not None:
        parts |= {"norm_query": form.normed.query / scale - shape.gain, "norm_key": form.normed.key - shape.gain}
        scale = torch.ones_like(scale)
    gate = {} if form.gate is None else {"gate": form.gate.weight}
    for name, F in {"query": layer.query / scale, "key": layer.key, "value": layer.value, **gate}.items():
        parts[name] = F[:, :-1].mT.reshape(-1, F.shape[1] - 1)
        parts[f"{name}_bias"] = F[:, -1].reshape(-1)
    parts["out"] = layer.out.reshape(-1, layer.out_width).T
    parts["out_bias"] = layer.out.new_zeros(layer.out_width) if layer.offset is None else layer.offset
    if form.sink is not None:
        parts["sink"] = form.sink.values
    if isinstance(form.offsets, OffsetTable):
        parts["offsets"] = form.offsets.values.T
    for name, value in parts.items():
        if name in at:
            at[name].write(tensors, value, m)
        elif float(value.abs().max()) > tolerance * float(parts[name.removesuffix("_bias")].abs().max()):
            checks.refuse("layer", f"no {name.replace('_', ' ')}: the file has no tensor for one",
                          f"one of size {float(value.abs().max()):.1e}", "a layer learned without it")


def _heads(parts: Mapping[str, Tensor], name: str, count: int) -> Tensor:
    """(count·r, d) and its bias to (count, d + 1, r)."""
    weight, bias = parts[name], parts.get(f"{name}_bias")
    r = weight.shape[0] // count
    last = weight.new_zeros(count, 1, r) if bias is None else bias.view(count, 1, r)
    return torch.cat([weight.view(count, r, -1).mT, last], dim=1)


def _groups(parts: Mapping[str, Tensor], at: Mapping[str, Place], m: int, q: int) -> int:
    rows, shared = parts["query"].shape[0], parts["key"].shape[0]
    if rows != m * q:
        checks.refuse(at["query"].name, f"{m * q} rows, for {m} heads of size {q}", rows, "check heads and sizes")
    g = shared // q
    if shared % q or not g or m % g:
        checks.refuse(at["key"].name, f"rows for a number of heads that divides {m}, of {q} each", shared,
                      "check heads and sizes")
    if parts["value"].shape[0] % g:
        checks.refuse(at["value"].name, f"rows for {g} groups", parts["value"].shape[0], "check heads and sizes")
    return g


def _numbers(parts: Mapping[str, Tensor], at: Mapping[str, Place]) -> None:
    for name, value in parts.items():
        quantised(at[name].name, value)


def quantised(name: str, value: Any) -> None:
    """Refuse weights that are no plain numbers, or have no values."""
    if isinstance(value, Tensor) and value.is_meta:
        checks.refuse(name, "weights with values", "a tensor on the meta device, which has a shape only",
                      "the model loaded whole")
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_quantized or (
            value.dtype.itemsize < 2):
        got = f"dtype {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        checks.refuse(name, "weights as float16, bfloat16, float32 or float64", f"{got}, quantised",
                      "the model as it was before, or dequantised: model.dequantize()")
