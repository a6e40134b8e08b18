"""How scores know about places: keys and queries turned (rotary), or something added for the offset Δ = b − a.

    rotary   (R_a q)·(R_b k) = qᵀ R(Δ) k, R turning plane j by position × ω_j
    table    q·k + β_i[bucket(Δ)]
    slope    q·k + s_i Δ

Positions are 0 … k − 1 unless given: real numbers (k,) or (n, k), or vectors (k, c) or (n, k, c) where the
frequencies are vectors too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.core import checks

LAYOUTS = ("half", "pairs")
TABLES = ("clipped", "t5")
HAIR = 1e-9  # of a bucket: logarithms of whole powers may come out that much too small
T5_FAR = 128  # from here on T5's buckets no longer tell offsets apart


class Part:
    """One part of a form: ``settings`` for what is plain data, ``tensors`` for its unknowns; equal if both are."""

    def settings(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Part) or type(other) is not type(self):
            return NotImplemented
        mine, theirs = self.tensors(), other.tensors()
        return self.settings() == other.settings() and mine.keys() == theirs.keys() and all(
            torch.equal(value, theirs[name]) for name, value in mine.items())

    def __hash__(self) -> int:
        return hash((type(self).__name__, json.dumps(self.settings(), sort_keys=True)))


@dataclass(frozen=True, eq=False)
class Rotary(Part):
    """(R_a q)·(R_b k): plane j of queries and keys is turned by position × ω_j, ω_j = base^(−2j/turned).

    layout: "half" has planes (j, j + turned/2), as Llama in transformers; "pairs" has (2j, 2j + 1), as GPT-J and
    GGUF files. turned: how many of the first coordinates are turned, all if None. frequencies: ω itself, (planes,),
    or (planes, c) where positions are vectors of c numbers; then base is not used.

    >>> Rotary().turn(torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([math.pi / 3])).round(decimals=3)
    tensor([[[[0.5000, 0.8660]]]])
    """

    base: float = 10_000.0
    layout: str = "half"
    turned: int | None = None
    frequencies: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", checks.number("rotary.base", self.base, strictly=True))
        checks.choice("rotary.layout", self.layout, LAYOUTS)
        if self.turned is not None and checks.whole("rotary.turned", self.turned, 2) % 2:
            checks.refuse("rotary.turned", "an even number: planes have two coordinates", self.turned,
                          f"turned={self.turned - 1}")
        if self.frequencies is not None:
            omega = checks.floating("rotary.frequencies", self.frequencies).to(torch.float64)
            if omega.ndim not in (1, 2) or not omega.numel():
                checks.refuse("rotary.frequencies", "shape (planes,) or (planes, c)", f"shape {tuple(omega.shape)}",
                              "one frequency for each plane")
            if self.turned is not None and 2 * len(omega) != self.turned:
                checks.refuse("rotary.frequencies", f"{self.turned // 2} planes, half of turned", len(omega),
                              f"turned={2 * len(omega)}")
            object.__setattr__(self, "frequencies", omega)

    @property
    def vectors(self) -> int | None:
        """How many numbers a position has; None where it is one number."""
        return None if self.frequencies is None or self.frequencies.ndim == 1 else self.frequencies.shape[1]

    def coordinates(self, size: int) -> int:
        """How many of ``size`` coordinates are turned."""
        turned = self.turned or (size if self.frequencies is None else 2 * len(self.frequencies))
        if turned > size or turned % 2:
            checks.refuse("rotary", f"an even number of turned coordinates, at most {size}, the size of a head",
                          turned, "turned=, or frequencies for half as many planes")
        return turned

    def omega(self, size: int, device: torch.device | None = None) -> Tensor:
        """ω in float64, (planes,) or (planes, c)."""
        turned = self.coordinates(size)
        if self.frequencies is not None:
            return self.frequencies.to(device)
        exponent = torch.arange(0, turned, 2, dtype=torch.float64, device=device) / -turned
        return torch.exp(exponent * math.log(self.base))

    def angles(self, positions: Tensor, size: int) -> Tensor:
        """Position × ω_j in float64: (…, planes) for positions (…), or (…, c) where they are vectors."""
        omega = self.omega(size, positions.device)
        places = positions.to(torch.float64)
        return places.unsqueeze(-1) * omega if omega.ndim == 1 else places @ omega.mT

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """R x for x (n, heads, k, size) at positions (k,), (n, k), (k, c) or (n, k, c)."""
        angles = self.angles(positions, x.shape[-1])
        angles = angles if angles.ndim == 2 else angles.unsqueeze(1)  # one for all sequences, or one for each
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        one, two, rest = self.planes(x)
        turned = (one * cos - two * sin, one * sin + two * cos)
        if self.layout == "half":
            return torch.cat([*turned, rest], dim=-1)
        return torch.cat([torch.stack(turned, dim=-1).flatten(-2), rest], dim=-1)

    def planes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """First and second coordinates of the planes, (…, planes) each, and what is not turned."""
        turned = self.coordinates(x.shape[-1])
        inside, rest = x[..., :turned], x[..., turned:]
        if self.layout == "half":
            return inside[..., : turned // 2], inside[..., turned // 2 :], rest
        return inside[..., 0::2], inside[..., 1::2], rest

    def settings(self) -> dict[str, Any]:
        return {"base": self.base, "layout": self.layout, "turned": self.turned,
                "frequencies": None if self.frequencies is None else self.frequencies.tolist()}

    def describe(self) -> str:
        omega = f"base {self.base:,g}" if self.frequencies is None else "given frequencies"
        if self.frequencies is None and self.base >= 1e6:
            omega = f"base {self.base:,.0f}"
        words = ["rotary scores", omega, "halves" if self.layout == "half" else "pairs"]
        words += [] if self.turned is None else [f"{self.turned} coordinates turned"]
        words += [] if self.vectors is None else [f"positions of {self.vectors} numbers"]
        return ", ".join(words)


@dataclass(frozen=True, eq=False)
class OffsetTable(Part):
    """q·k + β_i[bucket(b − a)] with β (m, buckets), one row for each head.

    kind "clipped": one bucket for each offset, those further away in the last; with both sides 2r + 1 buckets for
    −r … r, otherwise r + 1 buckets for how far back, 0 … r. kind "t5": T5's buckets, half of them exact and the
    rest logarithmic up to ``far`` (128); with both sides half of all for keys ahead. Without ``both`` keys ahead
    are in bucket 0.
    """

    values: Tensor
    kind: str = "clipped"
    both: bool = True
    far: int | None = None

    def __post_init__(self) -> None:
        values = checks.floating("offsets.values", self.values)
        checks.shape("offsets.values", values, ("m", "buckets"), "one row of offsets for each head")
        object.__setattr__(self, "values", values)
        checks.choice("offsets.kind", self.kind, TABLES)
        checks.flag("offsets.both", self.both)
        buckets = values.shape[1]
        if self.kind == "clipped":
            if buckets < 1 or (self.both and buckets % 2 == 0):
                checks.refuse("offsets.values", "2r + 1 buckets for the offsets −r … r" if self.both else
                              "r + 1 buckets for 0 … r tokens back", f"{buckets} buckets",
                              "both=False, or another table")
            reach = buckets // 2 if self.both else buckets - 1
            if self.far not in (None, reach):
                checks.refuse("offsets.far", f"{reach}, which {buckets} buckets reach", self.far, "far=None")
            object.__setattr__(self, "far", reach)
        else:
            exact = buckets // (4 if self.both else 2)
            if not exact:
                checks.refuse("offsets.values", f"at least {4 if self.both else 2} buckets", f"{buckets} buckets",
                              "32 buckets, as T5 has")
            far = checks.whole("offsets.far", T5_FAR if self.far is None else self.far, exact + 1)
            object.__setattr__(self, "far", far)

    def bucket(self, delta: Tensor) -> Tensor:
        """The bucket of every offset Δ = b − a (whole numbers; others are rounded)."""
        buckets = self.values.shape[1]
        return buckets_of(delta.round().long(), self.kind, buckets, self.both, int(self.far or 0))

    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind, "both": self.both, "far": self.far}

    def tensors(self) -> dict[str, Tensor]:
        return {"offsets": self.values}

    def added(self, tensors: Mapping[str, Tensor], delta: Tensor) -> Tensor:
        """β_i[bucket(Δ)]: (m, k, l) for Δ (k, l), (n, m, k, l) for Δ (n, k, l)."""
        found = tensors["offsets"][:, self.bucket(delta)]
        return found if delta.ndim == 2 else found.transpose(0, 1)

    def describe(self) -> str:
        name = "T5's table" if self.kind == "t5" else "a table"
        return f"{name} of {self.values.shape[1]} offsets" + ("" if self.both else ", backwards only")


def buckets_of(delta: Tensor, kind: str, buckets: int, both: bool, far: int) -> Tensor:
    """T5's or clipped buckets of whole offsets Δ = b − a."""
    if kind == "clipped":
        return delta.clamp(-far, far) + far if both else (-delta).clamp(0, far)
    side = buckets // 2 if both else buckets
    ahead = side * (delta > 0) if both else 0
    away = delta.abs() if both else (-delta).clamp_min(0)
    exact = side // 2
    steps = (away.clamp_min(1).to(torch.float64) / exact).log() * ((side - exact) / math.log(far / exact))
    wide = exact + (steps + HAIR).long()
    return ahead + torch.where(away < exact, away, wide.clamp_max(side - 1))


@dataclass(frozen=True, eq=False)
class Slope(Part):
    """q·k + s_i (b − a) with slopes s (m,): ALiBi. What is the same for all keys of a query cancels."""

    values: Tensor

    def __post_init__(self) -> None:
        values = checks.floating("offsets.values", self.values)
        checks.shape("offsets.values", values, ("m",), "one slope for each head")
        object.__setattr__(self, "values", values)

    def settings(self) -> dict[str, Any]:
        return {"kind": "slope"}

    def tensors(self) -> dict[str, Tensor]:
        return {"slope": self.values}

    def added(self, tensors: Mapping[str, Tensor], delta: Tensor) -> Tensor:
        """s_iΔ: (m, k, l) for Δ (k, l), (n, m, k, l) for Δ (n, k, l)."""
        slope = tensors["slope"].view(-1, 1, 1)
        return slope * delta.to(slope.dtype).unsqueeze(-3)

    def describe(self) -> str:
        return "slopes"
