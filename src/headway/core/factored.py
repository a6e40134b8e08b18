"""The layer F(X, Z)_a = Σ_i g_ia ⊙ (Σ_b P_i(a, b) v_b) O_i + c in its factors, with any form of scores."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from headway.core import attention, checks
from headway.core.forms import Form, Sight, affine, heads_out, in_sight, patterns_of, places
from headway.core.freedom import canonical_tensors, freedom
from headway.core.layer import FACTORED, AttentionLayer, filling, tokens
from headway.core.tangents import Chain

OWN = ("query", "key", "value", "out", "offset")


@dataclass(frozen=True, eq=False, repr=False)
class FactoredLayer:
    """F(X, Z)_a = Σ_i g_ia ⊙ (Σ_b P_i(a, b) V_jᵀ[z_b; 1]) O_i + c, P_i = softmax of the form's scores.

    query (m, d + 1, q): A_i, the scale q^(−1/2) folded in. key (g, z + 1, q): B_j. value (g, z + 1, p): V_j.
    Last rows are biases. out (m, p, e): O_i. offset (e,), optional: c. g divides m; head i reads keys and values
    of group j = i // (m // g). form: everything else about the scores. Keys are those of X, or of another sequence
    Z where ``cross``. positions (k,) or (k, c), optional, stand for 0 … k − 1 where a call gives none.

    >>> layer = FactoredLayer.random(heads=4, width=8, groups=2, seed=0)
    >>> layer(torch.ones(3, 5, 8, dtype=torch.float64)).shape
    torch.Size([3, 5, 8])
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    offset: Tensor | None = None
    form: Form = field(default_factory=Form)
    positions: Tensor | None = None
    cross: bool = False

    def __post_init__(self) -> None:
        checks.flag("cross", self.cross)
        for name in OWN:
            if getattr(self, name) is not None or name != "offset":
                object.__setattr__(self, name, checks.floating(name, getattr(self, name)))
        checks.shape("query", self.query, ("m", "d + 1", "q"), "one matrix for each head, biases in its last row")
        m, rows, q = self.query.shape
        checks.shape("key", self.key, ("g", "z + 1" if self.cross else rows, q),
                     "as many columns as the query has; cross=True where keys are of another width")
        g, z = self.key.shape[:2]
        checks.shape("value", self.value, (g, z, "p"), "the groups and rows of the key")
        checks.shape("out", self.out, (m, self.value.shape[2], "e"), "one (p, e) matrix for each head")
        if not min(*self.query.shape, *self.key.shape, *self.value.shape, *self.out.shape):
            checks.refuse("query", "at least one head, with entries", f"shape {tuple(self.query.shape)}", "m = 1")
        if m % g:
            checks.refuse("key", f"a number of groups that divides the {m} heads", g, "one group for each head")
        if min(rows, z) < 2:
            checks.refuse("query", "d + 1 rows, the last one for the bias", f"{min(rows, z)} row",
                          "torch.cat([weight, bias])")
        if self.offset is not None:
            checks.shape("offset", self.offset, (self.out_width,), "one entry for each output column")
        if not isinstance(self.form, Form):
            checks.refuse("form", "a headway.Form", type(self.form).__name__, "headway.Form()")
        self._fits()
        for name, value in self.tensors().items():
            if value.dtype != self.query.dtype:
                checks.refuse(name, f"dtype {self.query.dtype}, as the query", value.dtype, f"{name}.to(query)")
        if self.positions is not None:
            c = self._vectors
            positions = checks.floating("positions", self.positions).to(torch.float64)
            checks.shape("positions", positions, ("k",) if c is None else ("k", c), "one position for each token")
            object.__setattr__(self, "positions", positions)

    def _fits(self) -> None:
        """Refuse a form made for another number or size of heads."""
        form, m, p = self.form, self.heads, self.value.shape[2]
        if form.rotary is not None:
            form.rotary.coordinates(self.size)
        if form.offsets is not None:
            table = form.offsets.values
            checks.shape("offsets.values", table, (m, *table.shape[1:]), f"one row for each of {m} heads")
        if form.sink is not None:
            checks.shape("sink.values", form.sink.values, (m,), f"one logit for each of {m} heads")
        if form.normed is not None:
            checks.shape("normed.query", form.normed.query, (self.size,), "one gain for each coordinate of a head")
        if form.gate is not None:
            checks.shape("gate.weight", form.gate.weight, (m, self.width + 1, p), "rows of query, columns of value")

    @property
    def heads(self) -> int:
        return self.query.shape[0]

    @property
    def groups(self) -> int:
        return self.key.shape[0]

    @property
    def width(self) -> int:
        return self.query.shape[1] - 1

    @property
    def key_width(self) -> int:
        return self.key.shape[1] - 1

    @property
    def out_width(self) -> int:
        return self.out.shape[2]

    @property
    def size(self) -> int:
        """Of a head: how many numbers its queries and keys have."""
        return self.query.shape[2]

    @property
    def value_size(self) -> int:
        return self.value.shape[2]

    @property
    def _vectors(self) -> int | None:
        return None if self.form.rotary is None else self.form.rotary.vectors

    def __call__(
        self, X: Any, Z: Any = None, *, padding: Tensor | None = None, key_padding: Tensor | None = None,
        positions: Any = None, key_positions: Any = None,
    ) -> Tensor:
        """F(X, Z) for X (n, k, d) or (k, d), and Z (n, l, z) or (l, z) where keys come from another sequence.

        padding and key_padding: True where a token of X or of Z is filling. positions: (k,), (n, k), or (n, k, c)
        where the frequencies are vectors; 0 … k − 1 if none are given here or with the layer.
        """
        X, Z, see, here, there, single = self._read(X, Z, padding, key_padding, positions, key_positions)
        H = heads_out(X, Z, self.tensors(), self.form, see, here, there)
        Y = attention.project(H, self.out, self.offset)
        return Y[0] if single else Y

    def patterns(
        self, X: Any, Z: Any = None, *, padding: Tensor | None = None, key_padding: Tensor | None = None,
        positions: Any = None, key_positions: Any = None,
    ) -> Tensor:
        """P_i: (n, m, k, l), or (m, k, l) for one sequence."""
        X, Z, see, here, there, single = self._read(X, Z, padding, key_padding, positions, key_positions)
        P = patterns_of(X, Z, self.tensors(), self.form, see, here, there)
        return P[0] if single else P

    def chain(
        self, X: Any, Z: Any = None, *, padding: Tensor | None = None, key_padding: Tensor | None = None,
        positions: Any = None, key_positions: Any = None,
    ) -> Chain:
        """What heads compute on the way from X (n, k, d) to what they hand to O_i, kept for derivatives."""
        X, Z, see, here, there, _ = self._read(X, Z, padding, key_padding, positions, key_positions)
        Z = X if Z is None else Z
        here = places(X) if here is None else here
        there = there if there is not None else places(Z) if self.cross else here
        share = self.heads // self.groups
        parts = {"query": affine(X, self.query), "key": affine(Z, self.key).repeat_interleave(share, 1),
                 "value": affine(Z, self.value).repeat_interleave(share, 1)}
        own = self.form.tensors()
        if "gate" in own:
            parts["gate"] = affine(X, own.pop("gate"))
        if self.form.cap is not None:
            own["cap"] = self.query.new_tensor(self.form.cap.value)
        return Chain.of(parts, self.form, own, see, here, there)

    def _read(
        self, X: Any, Z: Any, padding: Any, key_padding: Any, positions: Any, key_positions: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, bool]:
        X, single = tokens("X", X, self.width, self.query.dtype)
        if self.cross != (Z is not None):
            checks.refuse("Z", "the sequence of the keys, (n, l, z)" if self.cross else "none: keys are those of X",
                          "none" if Z is None else "one", "layer(X, Z)" if self.cross else "layer(X)")
        if Z is None and (key_padding is not None or key_positions is not None):
            checks.refuse("key_padding, key_positions", "none where keys are those of X", "some",
                          "padding and positions")
        if Z is not None:
            Z, one = tokens("Z", Z, self.key_width, self.query.dtype)
            checks.shape("Z", Z, (X.shape[0], "l", self.key_width), "one sequence of keys for each of queries")
            if one != single:
                checks.refuse("Z", f"{2 if single else 3} dimensions, as X", 2 if one else 3, "Z.unsqueeze(0)")
        padding = filling("padding", padding, X, single)
        key_padding = None if Z is None else filling("key_padding", key_padding, Z, single)
        see = in_sight(self.form.sight, X, Z, padding, key_padding)
        if Z is not None and see is not None and not bool(see.any(2).all()):
            checks.refuse("Z", "a key in sight of every query", "queries that see none",
                          "longer sequences Z, or another window")
        here = self._places("positions", positions, X, self.positions)
        there = self._places("key_positions", key_positions, Z, None) if Z is not None else None
        return X, Z, see, here, there, single

    def _places(self, name: str, given: Any, X: Tensor, own: Tensor | None) -> Tensor | None:
        """Positions (k,), (n, k), (k, c) or (n, k, c); None for 0 … k − 1."""
        n, k = X.shape[:2]
        if not self.form.uses_positions:
            return None
        c = self._vectors
        last = () if c is None else (c,)
        if given is None and own is not None:
            if len(own) < k:
                checks.refuse("X", f"at most {len(own)} tokens, as many as the layer has positions", k, f"{name}=")
            return own[:k].to(X.device)
        if given is None:
            if c is not None:
                checks.refuse(name, f"shape (n, k, {c}): the layer's frequencies are vectors", "none", f"{name}=")
            return None
        places = checks.floating(name, given).to(torch.float64).to(X.device)
        size = (k, *last) if places.ndim == 1 + len(last) else (n, k, *last)
        checks.shape(name, places, size, "one position for each token")
        return places

    def to(self, target: torch.dtype | torch.device | str) -> FactoredLayer:
        """The same layer in another dtype or on another device; positions and frequencies stay float64."""
        if isinstance(target, torch.dtype) and not target.is_floating_point:
            checks.refuse("target", "a floating dtype or a device", target, "torch.float64")
        moved: dict[str, Any] = {name: value.to(target) for name, value in self._own().items()}
        if self.positions is not None and not isinstance(target, torch.dtype):
            moved["positions"] = self.positions.to(target)
        return replace(self, **moved, form=self.form.to(target))

    def _own(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in OWN if getattr(self, name) is not None}

    def tensors(self) -> dict[str, Tensor]:
        """Name to tensor: the factors, the offset if there is one, the unknowns of the form."""
        return {**self._own(), **self.form.tensors()}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> FactoredLayer:
        """The same layer with these tensors instead; what is not named stays."""
        own: dict[str, Any] = {name: value for name, value in tensors.items() if name in OWN}
        rest = {name: value for name, value in tensors.items() if name not in OWN}
        return replace(self, **own, form=self.form.with_tensors(rest))

    def canonical(self) -> FactoredLayer:
        """The same function at positions 0 … k − 1, one for all factors that compute it; loudest head first.

        Factors of a group become singular vectors of their products (of every plane, where planes are turned).
        Biases that do not show become 0 or part of the offset, offsets of a table have mean 0. Equal heads are not
        merged. Where heads are larger than tokens (q > d), a constant may still move between biases and a sink or a
        table.
        """
        return self.with_tensors(canonical_tensors(self.tensors(), self.form))

    @classmethod
    @checks.memory("heads, width")
    def random(
        cls,
        heads: int,
        width: int,
        *,
        size: int | None = None,
        groups: int | None = None,
        form: Form | None = None,
        cross: bool = False,
        key_width: int | None = None,
        out_width: int | None = None,
        scale: float = 2.0,
        biases: bool = True,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> FactoredLayer:
        """Gaussian factors with ‖A_iB_jᵀ‖_F = scale apart from biases, V_jO_i with entries of variance about 1/z.

        ``scale`` is the standard deviation of plain scores on ±1 tokens. size: of queries, keys and values,
        width/heads if None. Biases add half as much to queries, keys and values as tokens do; the offset has
        entries of variance 1.
        """
        m, d = checks.whole("heads", heads), checks.whole("width", width)
        q = max(d // m, 1) if size is None else checks.whole("size", size)
        g = m if groups is None else checks.whole("groups", groups, 1, m)
        if key_width is not None and not cross:
            checks.refuse("key_width", "none where keys are those of X", key_width, "cross=True")
        z = d if key_width is None else checks.whole("key_width", key_width)
        e = d if out_width is None else checks.whole("out_width", out_width)
        scale = checks.number("scale", scale)
        if m % g:
            checks.refuse("groups", f"a number that divides the {m} heads", g, f"groups={m}")
        draw = torch.Generator().manual_seed(checks.whole("seed", seed, 0, 2**63 - 1))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        def factor(count: int, rows: int) -> Tensor:
            """Columns that give a ±1 token a variance of 1, and a bias of half its deviation."""
            return torch.cat([normal(count, rows, q) / math.sqrt(rows), normal(count, 1, q) / 2], dim=1)

        A, B, V = factor(m, d), factor(g, z), factor(g, z)
        reads = B.repeat_interleave(m // g, 0)
        A = A * (scale / (A[:, :-1] @ reads[:, :-1].mT).flatten(1).norm(dim=1)).view(m, 1, 1)
        out, c = normal(m, q, e) / math.sqrt(q), normal(e)
        if not biases:
            A, B, V = (torch.cat([F[:, :-1], torch.zeros_like(F[:, -1:])], dim=1) for F in (A, B, V))
        form = Form() if form is None else form
        return cls(A.to(dtype), B.to(dtype), V.to(dtype), out.to(dtype), c.to(dtype) if biases else None,
                   form.to(dtype), cross=cross)

    @classmethod
    def of(cls, layer: AttentionLayer, rank: int | None = None, out_rank: int | None = None) -> FactoredLayer:
        """The closest layer with [Θ_i; u_iᵀ] = A_iB_iᵀ of this rank and W_i = V_iO_i of that one (None: full)."""
        d, e = layer.width, layer.out_width
        q = d if rank is None else checks.whole("rank", rank, 1, d)
        p = min(d, e) if out_rank is None else checks.whole("out_rank", out_rank, 1, min(d, e))
        Theta = layer.augmented
        if layer.key_bias is None:
            Theta = torch.cat([Theta, torch.zeros_like(Theta[:, :1])], dim=1)
        A, B = thin(Theta, q)
        V, out = thin(layer.W, p)
        B, V = (torch.cat([F, torch.zeros_like(F[:, :1])], dim=1) for F in (B, V))
        return cls(A, B, V, out.mT, layer.offset, Form(sight=Sight(causal=layer.mask == "causal")))

    @property
    def multiplies_out(self) -> bool:
        """Whether ``dense`` has an answer: plain scores over all keys of the same sequence, or all behind."""
        return self.form.is_plain and not self.cross and self.form.sight in (Sight(), Sight(causal=True))

    def dense(self) -> AttentionLayer:
        """Θ_i = A_iB_jᵀ and W_i = V_jO_i multiplied out; only plain scores have one Θ for all places."""
        if not self.multiplies_out:
            got = "keys of another sequence" if self.cross else self.form.describe()
            checks.refuse("layer", "plain scores over all keys of the same sequence, or all behind", got,
                          "the factors themselves: layer.query, layer.key, layer.value, layer.out")
        d, h = self.width, self.heads // self.groups
        B, V = (F.repeat_interleave(h, 0) for F in (self.key, self.value))
        Theta = self.query @ B[:, :d].mT  # the key bias adds the same to all keys of a query
        W = V @ self.out
        offset = W[:, d].sum(0) if self.offset is None else W[:, d].sum(0) + self.offset
        return AttentionLayer(Theta[:, :d], W[:, :d], Theta[:, d], offset,
                              "causal" if self.form.sight.causal else "none")

    def stored(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors and words of a file; ``restored`` is the other way round."""
        own = {} if self.positions is None else {"positions": self.positions}
        words = {"form": json.dumps(self.form.settings(), sort_keys=True), "cross": json.dumps(self.cross)}
        return {**self.tensors(), **own}, {"kind": FACTORED, **words}

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> FactoredLayer:
        try:
            settings, cross = json.loads(words["form"]), json.loads(words["cross"])
        except (KeyError, ValueError, RecursionError) as error:
            checks.refuse("layer", "a form written by headway", f"none that can be read ({error!r})",
                          "headway.core.layer.save_layer")
        known = {part.name for part in fields(cls)} - {"form", "cross"}
        own = {name: value for name, value in tensors.items() if name in known}
        form = Form.read(settings, tensors)
        strange = sorted(set(tensors) - set(own) - set(form.tensors()))
        missing = sorted({"query", "key", "value", "out"} - set(own))
        if strange or missing:
            checks.refuse("layer", "tensors query, key, value, out and those of its form", sorted(tensors),
                          "a layer.safetensors written by headway")
        return cls(**own, form=form, cross=cross)

    def __repr__(self) -> str:
        width = f"{self.width} and {self.key_width}" if self.cross else f"{self.width}"
        groups = "" if self.groups == self.heads else f" in {self.groups} group{'s' if self.groups > 1 else ''}"
        tail = ", keys of another sequence" if self.cross else ""
        return (f"FactoredLayer({self.heads} head{'s' if self.heads > 1 else ''}{groups} of size {self.size}, "
                f"width {width} → {self.out_width}{tail}: {self.form.describe()})")


EXACT = 64 * 2.0**-52  # part of a head that factors may leave out as rounding


def in_factors(layer: AttentionLayer, rank: int, out_rank: int) -> AttentionLayer:
    """The same layer to rounding, multiplied out of factors of these ranks, which it carries and is stored by. One
    head at a time; the layer itself where factors are no smaller, or leave out more than rounding."""
    m, d, e = layer.heads, layer.width, layer.out_width
    smaller = (2 * d + 2) * rank + (d + 1 + e) * out_rank < d * (d + e)
    if layer.linear or not smaller or layer.Theta.dtype != torch.float64:
        return layer
    parts: list[list[Tensor]] = [[], [], [], []]
    for i in range(m):
        Theta = layer.Theta[i] if layer.key_bias is None else torch.cat([layer.Theta[i], layer.key_bias[i : i + 1]])
        for at, M, r in ((0, Theta, rank), (2, layer.W[i], out_rank)):
            one, other = (part[0] for part in thin(M.unsqueeze(0), r))
            if float((one @ other.mT - M).norm()) > EXACT * float(M.norm()):
                return layer
            parts[at].append(one)
            parts[at + 1].append(other)
    A, B, V, out = (torch.stack(part) for part in parts)
    one_more = torch.nn.functional.pad
    if layer.key_bias is None:
        A = one_more(A, (0, 0, 0, 1))
    return multiplied(FactoredLayer(A.contiguous(), one_more(B, (0, 0, 0, 1)), one_more(V, (0, 0, 0, 1)),
                                    out.mT.contiguous(), layer.offset,
                                    Form(sight=Sight(causal=layer.mask == "causal"))))


def multiplied(factors: FactoredLayer) -> AttentionLayer:
    """Θ_i = A_iB_iᵀ and W_i = V_iO_i of plain scores without biases of keys and values, one head at a time,
    carrying the factors. There is a key bias where a query has one."""
    d = factors.width
    heads = list(zip(factors.query, factors.key, factors.value, factors.out, strict=True))
    Theta = torch.stack([A @ B[:d].mT for A, B, _, _ in heads])
    bias = Theta[:, d] if bool((factors.query[:, d] != 0).any()) else None
    W = torch.stack([V[:d] @ out for _, _, V, out in heads])
    layer = AttentionLayer(Theta[:, :d], W, bias, factors.offset, "causal" if factors.form.sight.causal else "none")
    object.__setattr__(layer, "_factors", factors)
    return layer


def a_layer(layer: Any) -> None:
    """Refuse what is no layer."""
    if not isinstance(layer, (AttentionLayer, FactoredLayer)):
        hint = "fit.layer" if hasattr(layer, "layer") else "headway.from_torch(module)"
        checks.refuse("layer", "an AttentionLayer or a FactoredLayer", type(layer).__name__, hint)


def free_dimensions(layer: FactoredLayer, length: int | None = None) -> int:
    """Dimension of the set of factors with the function of this layer, near it: what no data can determine.

    By formula, for a layer with nothing special about its entries, at positions 0 … length − 1, of any length if
    None. Where queries and keys are normed with eps > 0 their scale counts as determined, though only as firmly as
    eps is large.

    >>> free_dimensions(FactoredLayer.random(heads=1, width=7, size=4, biases=False))  # GL(4) twice, and two biases
    36
    """
    return sum(freedom(layer.tensors(), layer.form, length).values())


def thin(M: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best A_iB_iᵀ of this rank to every M_i (m, r, c): (m, r, rank) and (m, c, rank), equally long columns."""
    U, s, Vh = torch.linalg.svd(M, full_matrices=False)
    root = s[:, None, :rank].sqrt()
    A, B = U[..., :rank] * root, Vh.mT[..., :rank] * root
    short = rank - A.shape[2]
    return (torch.nn.functional.pad(A, (0, short)), torch.nn.functional.pad(B, (0, short))) if short > 0 else (A, B)
