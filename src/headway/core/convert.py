"""From layers as they are shipped to (Θ, u, W, c), and back to torch.nn.MultiheadAttention.

With q = W_Qx + b_Q and so on, heads of size r: Θ_i = W_Q,iᵀW_K,i/√r, u_i = W_K,iᵀb_Q,i/√r (the key bias adds one
number to all scores of a query and cancels), W_i = W_V,iᵀW_O,iᵀ, c = W_Ob_V + b_O, since patterns sum to 1.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headway.core import attention, checks
from headway.core.files import read_tensors
from headway.core.layer import AttentionLayer

# What a checkpoint may hold that this form cannot: part of a tensor's name, and what it is called.
FOREIGN = {
    "rotary": "rotary positions", "relative_attention_bias": "relative position biases",
    "distance_embedding": "relative position biases", "rel_pos": "relative position biases",
    "q_norm": "normalised queries", "k_norm": "normalised keys"}
BERT = "encoder.layer.{}.attention."
GPT2 = "h.{}.attn."


def from_weights(
    query: Any, key: Any, value: Any, out: Any, *, heads: int, query_bias: Any = None, key_bias: Any = None,
    value_bias: Any = None, out_bias: Any = None, causal: bool = False,
) -> AttentionLayer:
    """A layer from its weights in the order of ``nn.Linear`` (outputs first): query (m·r, d), key and value
    (g·r, d), out (e, m·r). With g < m, m/g neighbouring heads share keys and values (grouped-query attention).

    >>> import torch
    >>> w = [torch.randn(6, 6, dtype=torch.float64) for _ in range(4)]
    >>> from_weights(*w, heads=3).heads
    3
    """
    m = checks.whole("heads", heads)
    Q, K, V, out = (checks.floating(name, w) for name, w in (
        ("query", query), ("key", key), ("value", value), ("out", out)))
    checks.shape("query", Q, ("m·r", "d"), "outputs first, as in nn.Linear")
    d = Q.shape[1]
    if Q.shape[0] % m:
        checks.refuse("heads", f"a divisor of {Q.shape[0]}, the rows of query", m,
                      f"heads={math.gcd(m, Q.shape[0])}")
    r = Q.shape[0] // m
    checks.shape("key", K, ("g·r", d), "as many columns as query")
    checks.shape("value", V, (K.shape[0], d), "the shape of key")
    checks.shape("out", out, ("e", m * r), "one column for each of the heads' outputs")
    g = K.shape[0] // r
    if K.shape[0] % r or not g or m % g:
        checks.refuse("key", f"rows for a number of heads that divides {m}, of {r} each", K.shape[0],
                      "check the sizes")
    share = torch.arange(m) // (m // g)
    Qh, Kh, Vh = Q.view(m, r, d), K.view(g, r, d)[share], V.view(g, r, d)[share]
    Theta = Qh.mT @ Kh / math.sqrt(r)
    W = Vh.mT @ out.view(-1, m, r).permute(1, 2, 0)

    def bias(name: str, b: Any, size: int) -> Tensor | None:
        if b is None:
            return None
        found = checks.floating(name, b)
        checks.shape(name, found, (size,), "one entry for each output")
        return found

    bq, bv, bo = bias("query_bias", query_bias, m * r), bias("value_bias", value_bias, g * r), bias(
        "out_bias", out_bias, out.shape[0])
    bias("key_bias", key_bias, g * r)  # checked, and without effect
    u = None if bq is None else torch.einsum("mrd,mr->md", Kh, bq.view(m, r)) / math.sqrt(r)
    c = bo
    if bv is not None:
        moved = out @ bv.view(g, r)[share].reshape(-1)
        c = moved if c is None else c + moved
    return AttentionLayer(Theta, W, u, c, "causal" if causal else "none")


def from_torch(module: nn.Module, *, causal: bool = False) -> AttentionLayer:
    """The attention of an ``nn.MultiheadAttention``, or of an ``nn.TransformerEncoderLayer`` (its self-attention
    alone: norms and the feed-forward part are other functions). Torch takes masks at the call: ``causal=True``.
    """
    if isinstance(module, nn.TransformerEncoderLayer):
        module = module.self_attn
    if not isinstance(module, nn.MultiheadAttention):
        checks.refuse("module", "nn.MultiheadAttention or nn.TransformerEncoderLayer", type(module).__name__,
                      "from_weights(query, key, value, out, heads=…) with its weights")
    assert isinstance(module, nn.MultiheadAttention)
    if module.bias_k is not None or module.add_zero_attn:
        checks.refuse("module", "keys that are the tokens", "an extra key (add_bias_kv or add_zero_attn)",
                      "a module without it: this form has no key of its own")
    _of_one_width(module)
    if module.training and module.dropout > 0:
        checks.refuse("module", "a function", f"dropout {module.dropout} in training mode", "module.eval() first")
    assert module.in_proj_weight is not None
    Q, K, V = module.in_proj_weight.detach().chunk(3)
    b = [None] * 3 if module.in_proj_bias is None else list(module.in_proj_bias.detach().chunk(3))
    out = module.out_proj
    return from_weights(Q, K, V, out.weight.detach(), heads=module.num_heads, query_bias=b[0], key_bias=b[1],
                        value_bias=b[2], out_bias=None if out.bias is None else out.bias.detach(), causal=causal)


def _of_one_width(module: nn.MultiheadAttention) -> None:
    if not module._qkv_same_embed_dim:
        checks.refuse("module", "keys and values of the tokens' width", f"kdim {module.kdim}, vdim {module.vdim}",
                      "self-attention")


def as_function(module: nn.MultiheadAttention, causal: bool = False) -> Callable[[Tensor], Tensor]:
    """X ↦ the module's self-attention on X (n, k, d), whatever its ``batch_first``."""
    _of_one_width(module)

    def answer(X: Tensor) -> Tensor:
        Z = X if module.batch_first else X.transpose(0, 1)
        hidden = torch.ones(X.shape[1], X.shape[1], dtype=torch.bool, device=X.device).triu(1) if causal else None
        Y: Tensor = module(Z, Z, Z, need_weights=False, attn_mask=hidden)[0]
        return Y if module.batch_first else Y.transpose(0, 1)

    return answer


def from_checkpoint(
    path: str | os.PathLike[str], layer: int, *, heads: int, dtype: torch.dtype = torch.float64
) -> AttentionLayer:
    """Attention number ``layer`` (from 0) of an encoder or decoder stored in one safetensors file: BERT's names
    (``encoder.layer.N.attention.self.query.weight`` …) or GPT-2's (``h.N.attn.c_attn.weight`` …, causal), with any
    prefix. Products of weights are formed in ``dtype``: in float32 the low rank of Θ_i would end at 1e-7."""
    tensors, _ = read_tensors(Path(path))
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    for name in tensors:
        for part, words in FOREIGN.items():
            if part in name:
                checks.refuse(str(path), "attention that depends on the tokens alone", f"{words} ({name})",
                              "a model without them")
    bert, gpt = (_find(tensors, pattern.format(layer)) for pattern in (BERT, GPT2))
    if bert is not None:
        names = ("self.query", "self.key", "self.value", "output.dense")
        w = [_part(tensors, path, f"{bert}{name}.weight") for name in names]
        b = [tensors.get(f"{bert}{name}.bias") for name in names]
        return from_weights(*w, heads=heads, query_bias=b[0], key_bias=b[1], value_bias=b[2], out_bias=b[3])
    if gpt is not None:
        # GPT-2 stores its weights with inputs first.
        Q, K, V = _part(tensors, path, f"{gpt}c_attn.weight").T.chunk(3)
        bias = tensors.get(f"{gpt}c_attn.bias")
        b = [None] * 3 if bias is None else list(bias.chunk(3))
        return from_weights(Q, K, V, _part(tensors, path, f"{gpt}c_proj.weight").T, heads=heads, query_bias=b[0],
                            key_bias=b[1], value_bias=b[2], out_bias=tensors.get(f"{gpt}c_proj.bias"), causal=True)
    return checks.refuse(
        str(path), f"tensors named …{BERT.format(layer)}… or …{GPT2.format(layer)}…",
                  f"{sorted(tensors)[0]} and {len(tensors) - 1} others" if tensors else "none",
                  "another layer number, or from_weights(...)")


def _find(tensors: dict[str, Tensor], stem: str) -> str | None:
    for name in sorted(tensors):
        at = name.find(stem)
        if at == 0 or (at > 0 and name[at - 1] == "."):
            return name[: at + len(stem)]
    return None


def _part(tensors: dict[str, Tensor], path: Any, name: str) -> Tensor:
    if name not in tensors:
        checks.refuse(str(path), f"a tensor {name}", "none of that name", "another file, or from_weights(...)")
    return tensors[name]


SHOWN = 1e-6  # of the first singular value: those above count for the rank that people are told


def ranks_of(values: Tensor, tolerance: float = SHOWN) -> Tensor:
    """How many singular values (…, r), largest first, are above ``tolerance`` of the first; none of zero."""
    return (values > tolerance * values[..., :1]).sum(-1)


def rank_shown(values: Sequence[float]) -> int:
    """The rank people are told."""
    return int(ranks_of(torch.tensor(values, dtype=torch.float64)))


def ranks(layer: AttentionLayer, tolerance: float = 1e-9) -> tuple[int, int]:
    """The largest rank of a [Θ_i; u_i] and of a W_i: the head size a factored layer needs."""
    found = []
    for part in (layer.augmented, layer.W):
        s = torch.linalg.svdvals(part.double().cpu())  # a GPU takes ten times as long
        found.append(int(ranks_of(s, tolerance).max()))
    return found[0], found[1]


def key_groups(layer: AttentionLayer, tolerance: float = 1e-6) -> list[list[int]]:
    """Heads whose keys span one space: [Θ_i; u_i]ᵀ has the same column space. Groups of more than one are what
    grouped-query attention looks like from outside."""
    spaces = []
    r, _ = ranks(layer, tolerance)
    for part in layer.augmented.double().cpu():
        _, s, Vh = torch.linalg.svd(part, full_matrices=False)
        spaces.append(Vh[: int(ranks_of(s, tolerance))])
    groups: list[list[int]] = []
    for i, V in enumerate(spaces):
        for group in groups:
            other = spaces[group[0]]
            # A space that is everything is shared by all, and says nothing.
            telling = max(len(V), len(other)) < layer.width
            if telling and float((V - (V @ other.T) @ other).norm()) <= 1e3 * tolerance * math.sqrt(r):
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def to_torch(layer: AttentionLayer, head_dim: int, tolerance: float = 1e-9) -> nn.MultiheadAttention:
    """A working ``nn.MultiheadAttention`` (batch_first) that computes this layer: Θ_i and W_i factored by their
    singular values, u_i as query bias, the offset as output bias. Heads left over stay zero; a causal layer takes
    its mask at the call, as always in torch. Refused where a rank does not fit ``head_dim``."""
    r, d = checks.whole("head_dim", head_dim), layer.width
    if layer.out_width != d:
        checks.refuse("layer", "as many outputs as features", f"{d} → {layer.out_width}",
                      "a layer of one width: nn.MultiheadAttention has no other")
    if d % r or layer.heads > d // r:
        checks.refuse("head_dim", f"a divisor of {d} with at least {layer.heads} heads of it", r,
                      f"head_dim={next((k for k in range(d // layer.heads, 0, -1) if d % k == 0), 1)}")
    for name, rank in zip(("attention matrices", "projections"), ranks(layer, tolerance), strict=True):
        if rank > r:
            checks.refuse("head_dim", f"at least {rank}, the rank of the {name}", r,
                          f"head_dim={next((k for k in range(rank, d + 1) if d % k == 0), d)}, if the heads fit")
    m = d // r
    module = nn.MultiheadAttention(d, m, bias=True, batch_first=True, dtype=layer.Theta.dtype,
                                   device=layer.Theta.device).eval()
    Q, K, V, D = (torch.zeros(m, r, d, dtype=layer.Theta.dtype, device=layer.Theta.device) for _ in range(4))
    bq = Q.new_zeros(m, r)
    for i in range(layer.heads):
        left, right = _factors(layer.augmented[i] * math.sqrt(r), r)  # (d or d + 1, r), (d, r)
        Q[i], K[i] = left[:d].T, right.T
        if layer.key_bias is not None:
            bq[i] = left[d]
        first, second = _factors(layer.W[i], r)
        V[i], D[i] = first.T, second.T
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat([part.reshape(d, d) for part in (Q, K, V)]))
        module.in_proj_bias.zero_()
        module.in_proj_bias[:d] = bq.flatten()
        module.out_proj.weight.copy_(D.reshape(d, d).T)
        module.out_proj.bias.copy_(torch.zeros(d) if layer.offset is None else layer.offset)
    return module


@dataclass(frozen=True)
class Factors:
    """[Θ_i; u_iᵀ] = query_i key_iᵀ and W_i = value_i out_i, heads first: what trained layers are made of."""

    query: Tensor  # (m, d, q), or (m, d + 1, q) with the key bias u as its last row
    key: Tensor  # (m, d, q)
    value: Tensor  # (m, d, p)
    out: Tensor  # (m, p, e)


def factored(layer: AttentionLayer, rank: int, out_rank: int) -> Factors:
    """The heads as products of thin factors of these ranks, balanced; what they leave out is what is beyond."""
    sides = [[_factors(part, r) for part in parts] for parts, r in (
        (layer.augmented, checks.whole("rank", rank)), (layer.W, checks.whole("out_rank", out_rank)))]
    (query, key), (value, out) = ((torch.stack(side) for side in zip(*pairs, strict=True)) for pairs in sides)
    return Factors(query, key, value, out.mT)


def unfactored(parts: Factors, offset: Tensor | None = None, mask: str = "none") -> AttentionLayer:
    """The layer that ``factored`` took apart."""
    Theta, key_bias = attention.split(parts.query @ parts.key.mT)
    return AttentionLayer(Theta, parts.value @ parts.out, key_bias, offset, mask)


def _factors(M: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """M = ABᵀ with r columns each, balanced."""
    U, s, Vh = torch.linalg.svd(M, full_matrices=False)
    root = s[:r].sqrt()
    return U[:, :r] * root, Vh[:r].T * root
