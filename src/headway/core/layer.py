"""The layer F(X) = Σ_i softmax(XΘ_iXᵀ + 1(Xu_i)ᵀ + mask) X W_i + 1cᵀ as a frozen object; softmax or none."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from headway.core import attention, checks, operator
from headway.core.files import read_tensors, write_tensors
from headway.core.names import SCORES

if TYPE_CHECKING:
    from headway.core.factored import FactoredLayer

MASKS = ("none", "causal")
KIND = "headway-layer-1"
LINEAR = "headway-linear-1"
FACTORED = "headway-factored-1"
MATRICES = "matrices"  # factors of a layer that is one of Θ_i and W_i


@dataclass(frozen=True, eq=False, repr=False)
class AttentionLayer:
    """F(X) = Σ_i softmax(XΘ_iXᵀ + 1(Xu_i)ᵀ + mask) X W_i + 1cᵀ.

    Theta (m, d, d): attention matrices, query on the left. W (m, d, e): value and output maps merged.
    key_bias (m, d), optional: adds u_i·x_b to the score of key b. offset (e,), optional: c.
    mask: "none" or "causal"; padding belongs to the sequences and is given with them.
    scores: "softmax"; "linear", where scores are used as they are, F(X) = Σ_i (XΘ_iXᵀ ∘ mask) X W_i + 1cᵀ; or
    "linear/k", where they are divided by the number of keys in sight. What a linear layer computes is one operator,
    Σ_i vec(Θ_i)vec(W_i)ᵀ in its part symmetric in the two inner indices: its heads may be mixed by any invertible
    matrix, so nothing that is about single heads takes such a layer. It has no key bias.

    >>> layer = AttentionLayer.random(heads=2, width=4, seed=0)
    >>> layer(torch.ones(3, 5, 4, dtype=torch.float64)).shape
    torch.Size([3, 5, 4])
    """

    Theta: Tensor
    W: Tensor
    key_bias: Tensor | None = None
    offset: Tensor | None = None
    mask: str = "none"
    scores: str = "softmax"
    _factors: ClassVar[FactoredLayer | None] = None  # what this very object was multiplied out of, see in_factors

    def __post_init__(self) -> None:
        Theta, W = checks.floating("Theta", self.Theta), checks.floating("W", self.W)
        checks.shape("Theta", Theta, ("m", "d", "d"), "stack the heads' (d, d) matrices")
        m, d = Theta.shape[:2]
        checks.shape("Theta", Theta, (m, d, d), "each Theta_i must be square")
        checks.shape("W", W, (m, d, "e"), f"one ({d}, e) matrix for each of Theta's {m} heads")
        if not m:
            checks.refuse("Theta", "at least one head", f"shape {tuple(Theta.shape)}", "Theta of shape (1, d, d)")
        object.__setattr__(self, "Theta", Theta)
        object.__setattr__(self, "W", W)
        for name, size in (("key_bias", (m, d)), ("offset", (W.shape[2],))):
            value = getattr(self, name)
            if value is not None:
                value = checks.floating(name, value)
                checks.shape(name, value, size, "one entry per head and feature" if m else "None")
                object.__setattr__(self, name, value)
        for name, value in self.tensors().items():
            if value.dtype != Theta.dtype:
                checks.refuse(name, f"dtype {Theta.dtype}, as Theta", value.dtype, f"{name}.to(Theta)")
        checks.choice("mask", self.mask, MASKS)
        if checks.choice("scores", self.scores, SCORES) != "softmax" and self.key_bias is not None:
            checks.refuse("key_bias", f"None with scores={self.scores!r}", "a key bias",
                          "tokens with a constant 1 as one more feature, whose row of Theta does the same")

    @property
    def linear(self) -> bool:
        """Whether its scores go without a softmax."""
        return self.scores != "softmax"

    @property
    def heads(self) -> int:
        return self.Theta.shape[0]

    @property
    def width(self) -> int:
        return self.Theta.shape[1]

    @property
    def out_width(self) -> int:
        return self.W.shape[2]

    @property
    def augmented(self) -> Tensor:
        """[Θ_i; u_iᵀ], (m, d + 1, d); Θ itself when there is no key bias."""
        of_softmax("layer", self)
        return attention.augment(self.Theta, self.key_bias)

    def __call__(self, X: Any, padding: Tensor | None = None) -> Tensor:
        """F(X) for X of shape (n, k, d) or (k, d). Boolean tokens may be int8: they take Θ's dtype."""
        X, see, single = self._read(X, padding)
        if self.linear:
            weight = attention.linear_weight(X, see, self.scores == "linear/k")
            H = attention.attend(attention.linear_patterns(X, self.Theta, weight), X)
            Y = attention.project(H, self.W, self.offset)
        else:
            Y = attention.forward(X, self.augmented, self.W, self.offset, see)
        return Y[0] if single else Y

    def patterns(self, X: Any, padding: Tensor | None = None) -> Tensor:
        """P_i = softmax(XΘ_iXᵀ + 1(Xu_i)ᵀ + mask): (n, m, k, k), or (m, k, k) for one sequence."""
        of_softmax("layer", self)
        X, see, single = self._read(X, padding)
        P = attention.patterns(X, self.augmented, see).transpose(1, 2)
        return P[0] if single else P

    def _read(self, X: Any, padding: Tensor | None) -> tuple[Tensor, Tensor | None, bool]:
        X, single = tokens("X", X, self.width, self.Theta.dtype)
        padding = filling("padding", padding, X, single)
        return X, attention.allowed(X, self.mask, padding), single

    def to(self, target: torch.dtype | torch.device | str) -> AttentionLayer:
        """The same layer in another dtype or on another device."""
        if isinstance(target, torch.dtype) and not target.is_floating_point:
            checks.refuse("target", "a floating dtype or a device", target, "torch.float64")
        moved: dict[str, Any] = {name: value.to(target) for name, value in self.tensors().items()}
        return replace(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        """Name to tensor, without the parts this layer does not have."""
        parts = {"Theta": self.Theta, "W": self.W, "key_bias": self.key_bias, "offset": self.offset}
        return {name: value for name, value in parts.items() if value is not None}

    def canonical(self, tolerance: float = 1e-9) -> AttentionLayer:
        """The same function with equal heads merged, dead heads dropped, loudest head first.

        Heads i, j are equal when ‖(Θ, u)_i − (Θ, u)_j‖ ≤ tolerance · the larger norm (their W add up);
        a head is dead when ‖W_i‖ ≤ tolerance · the largest. Loudness is ‖(Θ, u)_i‖·‖W_i‖. The last
        head is never dropped. Of a linear layer: heads from the singular vectors of Σ_i vec(Θ_i)vec(W_i)ᵀ, as
        many as singular values above ``tolerance`` · the largest; a choice among all heads that do the same.
        """
        if self.linear:
            Theta, W = operator.canonical(self.Theta, self.W, tolerance)
            return replace(self, Theta=Theta, W=W)
        A, W = self.augmented, self.W
        groups: list[list[int]] = []
        for i in range(self.heads):
            for group in groups:
                if alike(A[i], A[group[0]], tolerance):
                    group.append(i)
                    break
            else:
                groups.append([i])
        Theta = torch.stack([A[g[0]] for g in groups])
        W = torch.stack([W[g].sum(0) for g in groups])
        weight = W.flatten(1).norm(dim=1)
        alive = weight > tolerance * weight.max()
        alive[weight.argmax()] = True
        loud = (Theta.flatten(1).norm(dim=1) * weight).masked_fill(~alive, -1.0)
        order = torch.argsort(loud, descending=True, stable=True)[: int(alive.sum())]
        Theta, key_bias = attention.split(Theta[order])
        return replace(self, Theta=Theta, W=W[order], key_bias=key_bias)

    @classmethod
    @checks.memory("heads, width")
    def random(
        cls,
        heads: int,
        width: int,
        *,
        out_width: int | None = None,
        scale: float = 2.0,
        rank: int | None = None,
        key_bias: bool = False,
        offset: bool = False,
        mask: str = "none",
        scores: str = "softmax",
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> AttentionLayer:
        """Θ_i Gaussian with ‖Θ_i‖_F = scale, W_i Gaussian with entries of variance 1/d.

        ``scale`` is the standard deviation of the scores on ±1 tokens. ``rank=r`` makes Θ_i a product of
        two d × r factors. A key bias has ‖u_i‖ = scale/2, an offset has unit-variance entries.
        """
        m, d = checks.whole("heads", heads), checks.whole("width", width)
        e = d if out_width is None else checks.whole("out_width", out_width)
        scale = checks.number("scale", scale)
        draw = torch.Generator().manual_seed(checks.whole("seed", seed, 0, 2**63 - 1))

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=draw, dtype=torch.float64)

        if rank is None:
            Theta = normal(m, d, d)
        else:
            r = checks.whole("rank", rank, 1, d)
            Theta = normal(m, d, r) @ normal(m, r, d)
        Theta *= scale / Theta.flatten(1).norm(dim=1).view(m, 1, 1)
        W = normal(m, d, e) / math.sqrt(d)
        u = normal(m, d)
        u *= scale / (2 * u.norm(dim=1, keepdim=True))
        c = normal(e)
        layer = cls(Theta, W, u if key_bias else None, c if offset else None, mask, scores)
        return layer if dtype == torch.float64 else layer.to(dtype)

    def __repr__(self) -> str:
        extras = [name for name in ("key_bias", "offset") if getattr(self, name) is not None]
        extras += [self.mask] if self.mask != "none" else []
        extras += [f"{self.scores} scores"] if self.linear else []
        tail = f", with {', '.join(extras)}" if extras else ""
        return f"AttentionLayer({self.heads} heads, width {self.width} → {self.out_width}{tail})"


def save_layer(path: str | os.PathLike[str], layer: AttentionLayer | FactoredLayer) -> None:
    write_tensors(Path(path), *stored_layer(layer))


def stored_layer(layer: AttentionLayer | FactoredLayer) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and words of a file; a layer that was multiplied out of factors is stored by these."""
    if not isinstance(layer, AttentionLayer):
        return layer.stored()
    if layer._factors is not None:
        tensors, words = layer._factors.stored()
        return tensors, {**words, "shown": MATRICES}
    own = {"kind": LINEAR, "scores": layer.scores} if layer.linear else {"kind": KIND}
    return layer.tensors(), {**own, "mask": layer.mask}


def load_layer(path: str | os.PathLike[str]) -> AttentionLayer | FactoredLayer:
    """The layer stored there, of either kind."""
    return restored_layer(str(path), *read_tensors(Path(path)))


def restored_layer(
    path: str, tensors: dict[str, Tensor], meta: Mapping[str, str]
) -> AttentionLayer | FactoredLayer:
    """The other way round."""
    if meta.get("kind") == FACTORED:
        from headway.core.factored import FactoredLayer, multiplied  # made of layers, so it stands below

        if meta.get("shown") != MATRICES:
            return FactoredLayer.restored(tensors, meta)
        return multiplied(FactoredLayer.restored({name: part.clone() for name, part in tensors.items()}, meta))
    unknown = set(tensors) - {"Theta", "W", "key_bias", "offset"}
    if unknown or not {"Theta", "W"} <= set(tensors):
        more = f" and {len(tensors) - 4} others" if len(tensors) > 4 else ""
        checks.refuse(str(path), "tensors Theta, W and optionally key_bias, offset", f"{sorted(tensors)[:4]}{more}",
                      "a layer.safetensors written by headway; layer 3 of a model's file is FILE:3 for headway "
                      "compare, headway.from_checkpoint(FILE, 3) in Python")
    linear = meta.get("kind") == LINEAR
    return AttentionLayer(**tensors, mask=meta.get("mask", "none"),
                          scores=meta.get("scores", "") if linear else "softmax")


def load_plain(path: str | os.PathLike[str]) -> AttentionLayer:
    """The layer stored there, its factors multiplied out; other than plain scores are refused."""
    layer = load_layer(path)
    if isinstance(layer, AttentionLayer):
        return of_softmax(str(path), layer)
    try:
        return layer.dense()
    except checks.InputError:
        return checks.refuse(str(path), "a layer of plain scores, which has one matrix a head", repr(layer),
                             "a layer of that kind")


def of_softmax(
    name: str, layer: AttentionLayer, hint: str = "headway.compare, which knows such layers"
) -> AttentionLayer:
    """The layer, unless its scores are linear: then what asks for it is about single heads or about patterns."""
    if layer.linear:
        checks.refuse(name, "softmax scores, with which a layer has patterns and determines each of its heads",
                      f"{layer.scores} scores, with which only the sum of all heads is determined", hint)
    return layer


def tokens(name: str, X: Any, width: int, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """What a layer of this dtype is called with, as (n, k, width), and whether it was one sequence (k, width)."""
    X = checks.floating(name, X, keep_int8=True)
    single = X.ndim == 2
    X = X.unsqueeze(0) if single else X
    checks.shape(name, X, ("n", "k", width), "tokens as rows, features last")
    if X.dtype not in (dtype, torch.int8):
        checks.refuse(name, f"dtype {dtype}, as the layer", X.dtype, f"layer.to({X.dtype}) or {name}.to({dtype})")
    return X.to(dtype), single


def filling(name: str, padding: Any, X: Tensor, single: bool) -> Tensor | None:
    """Which tokens of X (n, k, d) are filling, bool (n, k); given as (k,) where X was one sequence."""
    if padding is None:
        return None
    hidden: Tensor = torch.as_tensor(padding, device=X.device)
    if hidden.dtype != torch.bool:
        checks.refuse(name, "bool, True where a token is filling", hidden.dtype, "padding.bool()")
    hidden = hidden.unsqueeze(0) if single and hidden.ndim == 1 else hidden
    checks.shape(name, hidden, tuple(X.shape[:2]), "True where a token is filling")
    return hidden


def alike(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether two heads (Θ, u) are equal: ‖one − other‖ ≤ tolerance · the larger norm."""
    return float((one - other).norm()) <= tolerance * max(float(one.norm()), float(other.norm()))
