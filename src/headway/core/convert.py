"""From layers as they are shipped to (Θ, u, W, c), and back to torch.nn.MultiheadAttention.

With q = W_Qx + b_Q and so on, heads of size r: Θ_i = W_Q,iᵀW_K,i/√r, u_i = W_K,iᵀb_Q,i/√r (the key bias adds one
number to all scores of a query and cancels), W_i = W_V,iᵀW_O,iᵀ, c = W_Ob_V + b_O, since patterns sum to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headway.core import attention, checks
from headway.core.layer import AttentionLayer, of_softmax

if TYPE_CHECKING:
    from headway.core.factored import FactoredLayer
    from headway.core.results import Fit


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


def left_out(layer: AttentionLayer, rank: int, out_rank: int) -> tuple[float, float]:
    """The largest singular value beyond a rank, of the first one: of any [Θ_i; u_i], and of any W_i."""
    found = []
    for part, r in ((layer.augmented, rank), (layer.W, out_rank)):
        s = torch.linalg.svdvals(part.double().cpu())
        beyond = s[:, r] / s[:, 0].clamp_min(torch.finfo(s.dtype).tiny) if r < s.shape[1] else s.new_zeros(1)
        found.append(float(beyond.max()))
    return found[0], found[1]


FACTORED = 1e-9  # of a head's size may be left out when it is factored, in float64
SMALL = 1e-2  # of a head beyond its size: less may be meant to be zero
ROUNDED = 100.0  # times the rounding of a shorter dtype, or the error of a fit


def to_torch(
    layer: AttentionLayer | FactoredLayer | Fit, head_dim: int | None = None, tolerance: float | None = None, *,
    dtype: torch.dtype | None = None,
) -> nn.MultiheadAttention:
    """A working ``nn.MultiheadAttention`` (batch_first) that computes this layer: Θ_i and W_i factored by their
    singular values, u_i as query bias, the offset as output bias. Heads left over stay zero; a causal layer takes
    its mask at the call, as always in torch.

    layer: a layer of plain scores, or the fit that holds it. head_dim: size of a head; None: the smallest that
    holds the heads. What lies beyond it must be below ``tolerance`` of a head; None: 1e-9, or what the rounding of
    the layer's dtype or the error of the fit accounts for. dtype: of the module (None: of the layer).
    """
    layer, tolerance = _plain(layer, tolerance)
    d = layer.width
    if layer.out_width != d:
        checks.refuse("layer", "as many outputs as features", f"{d} → {layer.out_width}",
                      "a layer of one width: nn.MultiheadAttention has no other")
    needs = dict(zip(("attention matrices", "projections"), ranks(layer, tolerance), strict=True))
    sizes = [k for k in range(1, d + 1) if d % k == 0 and layer.heads <= d // k]
    fits = [k for k in sizes if k >= max(needs.values())]
    r = fits[0] if head_dim is None and fits else sizes[-1] if head_dim is None and sizes else checks.whole(
        "head_dim", 1 if head_dim is None else head_dim)
    if d % r or layer.heads > d // r:
        checks.refuse("head_dim", f"a divisor of {d} with at least {layer.heads} heads of it", r,
                      f"head_dim={sizes[-1]}" if sizes else "fewer heads than features")
    for name, rank in needs.items():
        if rank > r:
            beyond = left_out(layer, r, r)[name == "projections"]
            tries = [f"head_dim={fits[0]}"] if fits else []
            tries += [f"tolerance={2 * beyond:.0e}, if that may be left out"] if beyond < SMALL else []
            checks.refuse("head_dim", f"at least {rank}, the rank of the {name}", f"{r}, with {beyond:.1e} of them "
                          "beyond it", " or ".join(tries) or "headway.replace, which takes heads of any rank")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        checks.refuse("dtype", "a dtype of torch", repr(dtype), "dtype=torch.float32")
    layer = layer if dtype is None else layer.to(dtype)
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


def _plain(
    layer: AttentionLayer | FactoredLayer | Fit, tolerance: float | None
) -> tuple[AttentionLayer, float]:
    """The layer multiplied out, and what may be left out of it."""
    fit: Any = layer if hasattr(layer, "stats") else None
    error = 0.0 if fit is None else float(fit.stats.get("held_out_error") or 0.0)
    held: Any = layer if fit is None else fit.layer
    if not isinstance(held, AttentionLayer) and not hasattr(held, "dense"):
        hint = "headway.from_torch(module)" if isinstance(held, nn.Module) else "a layer, or the fit that holds it"
        checks.refuse("layer", "an AttentionLayer or a FactoredLayer", type(held).__name__, hint)
    dense: AttentionLayer = (of_softmax("layer", held, "the layer itself, which is a function of X")
                             if isinstance(held, AttentionLayer) else held.dense())
    if tolerance is not None:
        return dense, checks.number("tolerance", tolerance)
    eps = torch.finfo(dense.Theta.dtype).eps
    return dense, max(FACTORED, ROUNDED * error, 0.0 if eps < FACTORED else ROUNDED * eps)


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
