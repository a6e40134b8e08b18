"""How far computed columns of a Jacobian in factors can be from the exact ones, for any form.

A forward analysis to first order, of one eps (u below). Every step on the way is bounded by lengths: the largest of
a head's queries, keys and values, as they are computed. Sums of t products are off by t·u times the lengths; a
score off by s changes a weight by a factor of at most 1 + 2s; norms, turns, caps and gates pass an error on times
their largest slope, and add what their own arithmetic does. A change dS of a row's scores, |dS_b| ≤ D and off by ε,
moves what the head hands on by at most 2D|v|, and that is off by

    |v|(2ε + D(3π + (4l + 24)u)) + 2D·δv,      π the weights' relative error, l the number of keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.factored import FactoredLayer
from headway.core.positions import Slope
from headway.core.tangents import ALIKE, Chain


@dataclass(frozen=True)
class Side:
    """Queries or keys, each head (m,): their length, its error, the slope from factors to them, its error."""

    length: Tensor
    off: Tensor
    slope: Tensor
    slope_off: Tensor
    gain: Tensor  # error of the unit change that a gain makes, at most √q long


def columns(layer: FactoredLayer, chain: Chain, X: Tensor, Z: Tensor, real: Tensor) -> Tensor:
    """A bound on the error of every column, as ``layer.tensors()`` has them. X and Z end in a column of ones."""
    lengths = _Lengths(layer, chain, X, Z)
    wide, whole = torch.linalg.matrix_norm(layer.out, 2), layer.out.flatten(1).norm(dim=1)
    rows = float(real.sum())
    asking = X[real].norm(dim=0)  # √Σ x², of every feature over the rows
    most = (Z.abs().amax(1).square() * real.sum(1, keepdim=True)).sum(0).sqrt()  # keys: the largest of a sequence
    found = []

    def told(moved: Tensor, off: Tensor) -> Tensor:
        """(m,): of dH_i O_i, for dH so long and so far off."""
        found: Tensor = off * wide + (layer.value_size + 2) * lengths.u * moved * whole
        return found

    def over(features: Tensor, each: Tensor, value: Tensor) -> Tensor:
        """Of a factor's entries (r, c), for the columns of one head or group."""
        return each.view(len(value), -1).sum(1).view(-1, 1, 1) * features.view(1, -1, 1).expand_as(value)

    for name, value in layer.tensors().items():
        if name == "offset":
            off = torch.zeros_like(value)
        elif name == "out":
            off = (math.sqrt(rows) * lengths.handed_off).view(-1, 1, 1).expand_as(value)
        elif name == "value":
            off = over(most, told(*lengths.by_value()), value)
        elif name == "gate":
            off = over(asking, told(*lengths.by_gate()), value)
        elif name == "query":
            off = over(asking, told(*lengths.by_side(lengths.q, lengths.k)), value)
        elif name == "key":
            off = over(most, told(*lengths.by_side(lengths.k, lengths.q)), value)
        elif name in ALIKE:
            mine, other = (lengths.q, lengths.k) if name == "norm_query" else (lengths.k, lengths.q)
            off = (math.sqrt(rows) * told(*lengths.by_gain(mine, other)).sum()).expand_as(value)
        else:  # added to scores: a sink, an offset, a slope
            size = 1.0
            if name == "slope" and isinstance(layer.form.offsets, Slope):
                size = float(chain.delta.abs().max())
            each = told(*lengths.by_scores(X.new_full((layer.heads,), size), 3 * lengths.u * size))
            off = (math.sqrt(rows) * each).view(-1, *[1] * (value.ndim - 1)).expand_as(value)
        found.append(off.reshape(-1))
    return torch.cat(found)


class _Lengths:
    """Of one piece of examples, each head (m,)."""

    def __init__(self, layer: FactoredLayer, chain: Chain, X: Tensor, Z: Tensor) -> None:
        self.u = u = torch.finfo(X.dtype).eps
        form, self.l, self.size = layer.form, chain.P.shape[3], layer.size
        share = layer.heads // layer.groups
        asking, keys = float(X.norm(dim=2).max()), float(Z.norm(dim=2).max())

        def factor(F: Tensor, tokens: float) -> Tensor:
            """Of [x; 1]ᵀF: a sum of as many terms as F has rows."""
            off: Tensor = (F.shape[1] + 1) * u * tokens * F.flatten(1).norm(dim=1)
            return off

        off_q = factor(layer.query, asking)
        off_k, self.off_v = (factor(F, keys).repeat_interleave(share, 0) for F in (layer.key, layer.value))
        self.q = self._side(layer, chain.Q, chain.q_turned, off_q, "norm_query", chain.here, u)
        self.k = self._side(layer, chain.K, chain.k_turned, off_k, "norm_key", chain.there, u)
        self.v = _longest(chain.V)
        size = self.q.length * self.k.length
        s = (layer.size + 2) * u * size + self.q.off * self.k.length + self.q.length * self.k.off
        if form.offsets is not None:
            added = chain.form.offsets.added(chain.own, chain.delta)  # type: ignore[union-attr]
            most = added.abs().amax((-2, -1))
            most = most if most.ndim == 1 else most.amax(0)
            size = size + most
            s = s + 3 * u * size
        self.flat = torch.zeros_like(s)  # error of 1 − tanh²
        if form.cap is not None:
            self.flat = 2 * (s / form.cap.value + 4 * u)
            s = s + 4 * u * form.cap.value
            size = size.clamp_max(form.cap.value)
        if form.sink is not None:
            size = size + form.sink.values.abs()
        self.weight = 2 * (s + 2 * u * size) + (self.l + 6) * u
        off = (self.weight + (self.l + 2) * u) * self.v + self.off_v
        self.gated: Tensor = torch.zeros_like(off)  # error of σ(G)
        if form.gate is not None:
            self.gated = factor(form.gate.weight, asking) / 4 + 4 * u
        self.attended_off, self.handed_off = off, off + self.gated * self.v

    @staticmethod
    def _side(
        layer: FactoredLayer, raw: Tensor, ready: Tensor, off: Tensor, gain: str, places: Tensor, u: float
    ) -> Side:
        form, q = layer.form, layer.size
        slope, slope_off, by_gain = torch.ones_like(off), torch.zeros_like(off), torch.zeros_like(off)
        length = _longest(ready)
        if form.normed is not None:
            largest = float(form.tensors()[gain].abs().max())
            r = torch.rsqrt(raw.square().mean(-1) + form.normed.eps).amax((0, 2))
            nu = r * off / math.sqrt(q)  # relative error of rms(q), and of the direction
            slope, slope_off = largest * r, largest * r * (3 * nu + (2 * q + 12) * u)
            by_gain = math.sqrt(q) * (nu + (q + 6) * u)
            off = slope * off + (q + 6) * u * largest * math.sqrt(q)
        if form.rotary is not None:  # angles are computed in float64, whatever the precision of the rest
            exponent = 3 + (abs(math.log(form.rotary.base)) if form.rotary.frequencies is None else 0.0)
            angle = float(form.rotary.angles(places, q).abs().max()) * exponent * 2.0**-52 + 4 * u
            off, slope_off = off + angle * length, slope_off + angle * slope
            by_gain = by_gain + angle * math.sqrt(q)
        return Side(length, off, slope, slope_off, by_gain)

    def by_scores(self, D: Tensor, off: Tensor | float) -> tuple[Tensor, Tensor]:
        """How long a change of what the head hands on is for |dS| ≤ D, off by so much; and its error."""
        off = off + self.flat * D
        moved = 2 * D * self.v
        wrong = self.v * (2 * off + D * (3 * self.weight + (4 * self.l + 24) * self.u)) + 2 * D * self.off_v
        return moved, wrong + self.gated * moved

    def by_side(self, mine: Side, other: Side) -> tuple[Tensor, Tensor]:
        """For a change of one entry of the query's (key's) factor, times |x| of its feature."""
        return self._by_product(mine.slope, mine.slope_off, other)

    def by_gain(self, mine: Side, other: Side) -> tuple[Tensor, Tensor]:
        """For a change of one gain: a coordinate of q/rms(q), at most √q."""
        return self._by_product(torch.full_like(mine.gain, math.sqrt(self.size)), mine.gain, other)

    def _by_product(self, length: Tensor, off: Tensor, other: Side) -> tuple[Tensor, Tensor]:
        """For a change of a query (key), so long and so far off, in its product with a key (query)."""
        D = length * other.length
        return self.by_scores(D, off * other.length + length * other.off + (self.size + 2) * self.u * D)

    def by_value(self) -> tuple[Tensor, Tensor]:
        ones = torch.ones_like(self.weight)
        return ones, self.weight + (self.l + 2) * self.u + self.gated

    def by_gate(self) -> tuple[Tensor, Tensor]:
        return self.v / 4, self.attended_off + self.v * (self.gated + 6 * self.u)


def _longest(x: Tensor) -> Tensor:
    """(m,) of (n, m, k, ·)."""
    found: Tensor = x.norm(dim=3).amax((0, 2))
    return found
