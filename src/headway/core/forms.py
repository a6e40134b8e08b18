"""Attention as people run it: what stands between inputs and the heads' outputs, apart from the factors.

    q_a = A_iᵀ[x_a; 1],   k_b = B_jᵀ[z_b; 1],   v_b = V_jᵀ[z_b; 1],   j the group of head i
    H_ia = g_ia ⊙ Σ_b P_i(a, b) v_b,   P_i = softmax over the b in sight of S_i(a, b)

A form is one frozen object: how scores come from queries, keys and positions, which keys are in sight, and the
unknowns of its own. ``heads_out`` and ``patterns_of`` compute with any of them, as pure functions of their tensors,
so that torch.func differentiates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headway.core import attention, checks
from headway.core.positions import OffsetTable, Part, Rotary, Slope


@dataclass(frozen=True)
class Sight:
    """b is in sight of a if (b ≤ a or b < prefix) and a − b < window; without ``causal`` if neither a − b nor b − a
    reaches the window."""

    causal: bool = False
    window: int | None = None
    prefix: int = 0

    def __post_init__(self) -> None:
        checks.flag("sight.causal", self.causal)
        if self.window is not None:
            checks.whole("sight.window", self.window)
        if checks.whole("sight.prefix", self.prefix, 0) and not self.causal:
            checks.refuse("sight.prefix", "0 where every key ahead is in sight", self.prefix, "causal=True")

    def mask(self, queries: int, keys: int, device: torch.device | None = None) -> Tensor | None:
        """Bool (queries, keys), or None where everything is in sight."""
        if not self.causal and self.window is None:
            return None
        a = torch.arange(queries, device=device).unsqueeze(1)
        b = torch.arange(keys, device=device)
        back = a - b
        if self.causal:
            see = (back >= 0) | (b < self.prefix)
            return see if self.window is None else see & (back < self.window)
        return back.abs() < int(self.window or 0)

    def settings(self) -> dict[str, Any]:
        return {"causal": self.causal, "window": self.window, "prefix": self.prefix}

    def describe(self) -> str:
        words = ["causal"] if self.causal else []
        words += [] if self.window is None else [f"a window of {self.window}"]
        words += [f"a prefix of {self.prefix}"] if self.prefix else []
        return ", ".join(words)


@dataclass(frozen=True, eq=False)
class Cap(Part):
    """S → c·tanh(S/c), before keys out of sight are left out."""

    value: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", checks.number("cap.value", self.value, strictly=True))

    def settings(self) -> dict[str, Any]:
        return {"value": self.value}


@dataclass(frozen=True, eq=False)
class Sink(Part):
    """One more logit s_i a head in the softmax, its column dropped: patterns add up to less than 1. values (m,)."""

    values: Tensor

    def __post_init__(self) -> None:
        values = checks.floating("sink.values", self.values)
        checks.shape("sink.values", values, ("m",), "one logit for each head")
        object.__setattr__(self, "values", values)

    def tensors(self) -> dict[str, Tensor]:
        return {"sink": self.values}


@dataclass(frozen=True, eq=False)
class Normed(Part):
    """q → gain ⊙ q/rms(q), k likewise, before the rotation; rms(q)² = mean(q²) + eps. query, key: gains (q,)."""

    query: Tensor
    key: Tensor
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("query", "key"):
            gain = checks.floating(f"normed.{name}", getattr(self, name))
            checks.shape(f"normed.{name}", gain, ("q",), "one gain for each coordinate of a head")
            object.__setattr__(self, name, gain)
        checks.shape("normed.key", self.key, tuple(self.query.shape), "as many gains as queries have")
        object.__setattr__(self, "eps", checks.number("normed.eps", self.eps))

    def settings(self) -> dict[str, Any]:
        return {"eps": self.eps}

    def tensors(self) -> dict[str, Tensor]:
        return {"norm_query": self.query, "norm_key": self.key}


@dataclass(frozen=True, eq=False)
class Gated(Part):
    """Head output ⊙ sigmoid(G_iᵀ[x_a; 1]). weight (m, d + 1, p), its last rows biases."""

    weight: Tensor

    def __post_init__(self) -> None:
        weight = checks.floating("gate.weight", self.weight)
        checks.shape("gate.weight", weight, ("m", "d + 1", "p"), "one matrix for each head, biases in its last row")
        object.__setattr__(self, "weight", weight)

    def tensors(self) -> dict[str, Tensor]:
        return {"gate": self.weight}


PARTS: dict[str, tuple[type, ...]] = {
    "rotary": (Rotary,), "offsets": (OffsetTable, Slope), "cap": (Cap,), "sink": (Sink,), "normed": (Normed,),
    "gate": (Gated,)}


@dataclass(frozen=True)
class Form:
    """How scores come from queries, keys and positions; ``Form()`` is plain: softmax(q·k) over all keys.

    >>> Form(rotary=Rotary(), sight=Sight(causal=True)).describe()
    'rotary scores, base 10,000, halves; causal'
    """

    rotary: Rotary | None = None
    offsets: OffsetTable | Slope | None = None
    sight: Sight = Sight()
    cap: Cap | None = None
    sink: Sink | None = None
    normed: Normed | None = None
    gate: Gated | None = None

    def __post_init__(self) -> None:
        for name, kinds in {**PARTS, "sight": (Sight,)}.items():
            part = getattr(self, name)
            if not isinstance(part, kinds) and (part is not None or name == "sight"):
                checks.refuse(f"form.{name}", " or ".join(f"headway.{kind.__name__}" for kind in kinds),
                              type(part).__name__, f"{name}=headway.{kinds[0].__name__}(...)")
        if self.offsets is not None and self.rotary is not None and self.rotary.vectors is not None:
            checks.refuse("form.offsets", "none where positions are vectors: they have no offset",
                          type(self.offsets).__name__, "frequencies of shape (planes,)")

    @property
    def parts(self) -> dict[str, Part]:
        """Name to part, of those it has; the sight is no part, every form has one."""
        return {name: getattr(self, name) for name in PARTS if getattr(self, name) is not None}

    @property
    def is_plain(self) -> bool:
        """Whether scores are q·k and patterns their softmax; some keys may be out of sight."""
        return not self.parts

    @property
    def uses_positions(self) -> bool:
        return self.rotary is not None or self.offsets is not None

    def tensors(self) -> dict[str, Tensor]:
        """The unknowns of the form's own."""
        return {name: value for part in self.parts.values() for name, value in part.tensors().items()}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Form:
        """The same form with these unknowns instead; what is not named stays. "cap" is taken too."""
        own = {name: value for name, value in tensors.items() if name in self.tensors()}
        strange = sorted(set(tensors) - set(own) - ({"cap"} if self.cap else set()))
        if strange:
            checks.refuse("tensors", f"the unknowns of the form: {', '.join(self.tensors()) or 'none'}",
                          strange[0], "form.tensors()")
        settings = self.settings()
        if self.cap is not None and "cap" in tensors:
            settings["cap"] = {"value": float(tensors["cap"])}
        return Form.read(settings, {**self.tensors(), **own})

    def to(self, target: torch.dtype | torch.device | str) -> Form:
        """The unknowns in another dtype or on another device."""
        form = self.with_tensors({name: value.to(target) for name, value in self.tensors().items()})
        omega = None if self.rotary is None else self.rotary.frequencies
        if self.rotary is None or omega is None or isinstance(target, torch.dtype):
            return form
        return replace(form, rotary=replace(self.rotary, frequencies=omega.to(target)))

    def settings(self) -> dict[str, Any]:
        """What is no tensor, as plain data for JSON."""
        return {"sight": self.sight.settings(), **{name: part.settings() for name, part in self.parts.items()}}

    @classmethod
    def read(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Form:
        """The form with these settings and unknowns: the other way round of ``settings`` and ``tensors``."""
        given: dict[str, Any] = {}
        for name, value in _fields("form", settings, {*PARTS, "sight"}).items():
            make = _maker(name, value)
            known, unknowns = READ[make]
            data = dict(_fields(f"form.{name}", value, known))
            if make is Slope:
                data.pop("kind")
            for argument, tensor in unknowns.items():
                if tensor not in tensors:
                    checks.refuse("tensors", f"{tensor}, which the form's {name} needs", sorted(tensors),
                                  "a layer.safetensors written by headway")
                data[argument] = tensors[tensor]
            if make is Cap and not data:
                checks.refuse("form.cap settings", "its value", "none", "what form.settings() returns")
            given[name] = make(**data)
        return cls(**given)

    def describe(self) -> str:
        """In a few words: 'rotary scores, base 10,000, halves; causal'."""
        first = [part.describe() for part in (self.rotary, self.offsets) if part is not None]
        words = first or ["plain scores"]
        words += [] if self.normed is None else ["normed queries and keys"]
        words += [] if self.cap is None else [f"capped at {self.cap.value:g}"]
        words += [] if self.sink is None else ["sinks"]
        words += [] if self.gate is None else ["gated heads"]
        words += [self.sight.describe()] if self.sight.describe() else []
        return "; ".join(words)


# Kind of part: its settings, and which argument is which tensor.
READ: dict[type, tuple[set[str], dict[str, str]]] = {
    Sight: ({"causal", "window", "prefix"}, {}),
    Rotary: ({"base", "layout", "turned", "frequencies"}, {}),
    OffsetTable: ({"kind", "both", "far"}, {"values": "offsets"}),
    Slope: ({"kind"}, {"values": "slope"}),
    Cap: ({"value"}, {}),
    Sink: (set(), {"values": "sink"}),
    Normed: ({"eps"}, {"query": "norm_query", "key": "norm_key"}),
    Gated: (set(), {"weight": "gate"}),
}


def _maker(name: str, settings: Any) -> type:
    slope = name == "offsets" and isinstance(settings, Mapping) and settings.get("kind") == "slope"
    return Slope if slope else Sight if name == "sight" else PARTS[name][0]


def _fields(name: str, settings: Any, known: set[str]) -> Mapping[str, Any]:
    """The settings, refused unless they are a mapping of known names."""
    if not isinstance(settings, Mapping) or not set(settings) <= known:
        checks.refuse(f"{name} settings", f"a mapping of {', '.join(sorted(known)) or 'nothing'}",
                      sorted(settings) if isinstance(settings, Mapping) else type(settings).__name__,
                      "what form.settings() returns")
    return settings


def in_sight(
    sight: Sight, X: Tensor, Z: Tensor | None = None, padding: Tensor | None = None,
    key_padding: Tensor | None = None,
) -> Tensor | None:
    """Which key b may be seen from query a: bool (1 or n, k, l), or None when all may.

    ``padding`` (n, k) is True where a token of X is filling, ``key_padding`` (n, l) the same for keys from another
    sequence Z. A filled query of X itself keeps itself in sight, so that its pattern stays finite.
    """
    queries, keys = X.shape[1], (X if Z is None else Z).shape[1]
    see = sight.mask(queries, keys, X.device)
    hidden = padding if Z is None else key_padding
    if hidden is None:
        return None if see is None else see.unsqueeze(0)
    see = torch.ones(1, queries, keys, dtype=torch.bool, device=X.device) if see is None else see.unsqueeze(0)
    return attention.unfilled(see, hidden) if Z is None else see & ~hidden.unsqueeze(1)


def patterns_of(
    X: Tensor, Z: Tensor | None, tensors: Mapping[str, Tensor], form: Form, see: Tensor | None,
    positions: Tensor | None = None, key_positions: Tensor | None = None,
) -> Tensor:
    """P (n, m, k, l) of the factors ``query`` (m, d + 1, q) and ``key`` (g, z + 1, q) and the form's unknowns.

    Z is the sequence of the keys, X itself if None. Unknowns of the form that ``tensors`` lacks are its own.
    """
    tensors = {**form.tensors(), **tensors}
    Q, K = affine(X, tensors["query"]), affine(X if Z is None else Z, tensors["key"])
    if form.normed is not None:
        Q = normed(Q, tensors["norm_query"], form.normed.eps)
        K = normed(K, tensors["norm_key"], form.normed.eps)
    here = places(X) if positions is None else positions
    there = key_positions if key_positions is not None else here if Z is None else places(Z)
    if form.rotary is not None:
        Q, K = form.rotary.turn(Q, here), form.rotary.turn(K, there)
    S = by_group(Q, K.mT)
    if form.offsets is not None:
        S = S + form.offsets.added(tensors, there.unsqueeze(-2) - here.unsqueeze(-1))
    if form.cap is not None:
        cap = tensors.get("cap", form.cap.value)
        S = cap * torch.tanh(S / cap)
    if see is not None:
        S = S.masked_fill(~see.unsqueeze(1), float("-inf"))
    if form.sink is None:
        return torch.softmax(S, dim=3)
    sink = tensors["sink"].view(1, -1, 1, 1).expand(*S.shape[:3], 1)
    return torch.softmax(torch.cat([S, sink], dim=3), dim=3)[..., :-1]


def heads_out(
    X: Tensor, Z: Tensor | None, tensors: Mapping[str, Tensor], form: Form, see: Tensor | None,
    positions: Tensor | None = None, key_positions: Tensor | None = None,
) -> Tensor:
    """H (n, k, m, p), H_ia = g_ia ⊙ Σ_b P_i(a, b) v_b, with ``value`` (g, z + 1, p) beside what P needs."""
    P = patterns_of(X, Z, tensors, form, see, positions, key_positions)
    H = by_group(P, affine(X if Z is None else Z, tensors["value"])).transpose(1, 2)
    if form.gate is None:
        return H
    gate = tensors.get("gate", form.gate.weight)
    return H * torch.sigmoid(affine(X, gate)).transpose(1, 2)


def affine(X: Tensor, A: Tensor) -> Tensor:
    """A_iᵀ[x; 1] for every token: (n, k, d) and (m, d + 1, q) to (n, m, k, q)."""
    return attention.apart(X, A[:, :-1]) + A[:, -1:]


def normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """gain ⊙ x/rms(x)."""
    return gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def by_group(L: Tensor, R: Tensor) -> Tensor:
    """L_i R_j for head i of group j: (n, m, k, s) and (n, g, s, t) to (n, m, k, t), one product a group."""
    n, m, k, s = L.shape
    g, t = R.shape[1], R.shape[3]
    return (L.reshape(n, g, m // g * k, s) @ R).reshape(n, m, k, t)


def places(X: Tensor) -> Tensor:
    """Positions 0 … k − 1 where none are given."""
    return torch.arange(X.shape[1], dtype=torch.float64, device=X.device)
