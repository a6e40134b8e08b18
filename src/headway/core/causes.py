"""Mistakes that turn one attention layer into another, to be tried one after the other.

A change takes a layer to what a converter, or a second implementation, makes of it by one known mistake. Whether
that was the mistake is for the caller to see: the changed layer answers as the other one does, or it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from headway.core import attention, gauge
from headway.core.factored import FactoredLayer
from headway.core.forms import PARTS, Cap, Form, Normed, Sight, Sink, heads_out, in_sight
from headway.core.inputs import Inputs
from headway.core.positions import OffsetTable, Rotary

BASES = (1e4, 1e5, 5e5, 1e6, 1e7)  # of the rotations in use
CAPS = (50.0, 30.0, 20.0)  # of the scores in use
HALVES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
ROUNDING = "rounding"
CAUSES = (  # what ``compare`` may name, most specific first
    "bias", "scale", "rotary layout", "rotary base", "rotary", "groups", "head order", "number of heads",
    "transposed weight", "exchanged weights", "mask", "window", "sink", "cap", "norm gain", "norm", "offsets",
    "gate", "input gain", "output scale", ROUNDING)
FORM_WORDS = {"rotary": "rotary positions", "offsets": "offsets of positions", "cap": "cap", "sink": "sinks",
              "normed": "norms of queries and keys", "gate": "gates"}
FORM_CAUSES = {"normed": "norm"}


@dataclass(frozen=True)
class Change:
    """One mistake: its name, a sentence about {one} (the layer that is changed) and {other}, and the result.

    answers: instead of a layer, where no layer has such a sight; rows: those from which on it can be compared.
    """

    cause: str
    words: str
    layer: FactoredLayer | None = None
    answers: Callable[[Inputs], Tensor] | None = None
    rows: int = 0

    def __call__(self, inputs: Inputs) -> Tensor:
        if self.answers is not None:
            return self.answers(inputs)
        assert self.layer is not None
        return inputs.to(self.layer)


def changes(one: FactoredLayer, other: FactoredLayer | None) -> Iterator[Change]:
    """Every mistake that is known, made with ``one``; ``other``, if its weights are known, says how far to go."""
    for source in (
            _biases, _scales, _rotaries, _groups, _orders, _shapes, _sights, _parts, _norms, _gains, _rounded):
        yield from source(one, other)


def _with(layer: FactoredLayer, **parts: Tensor | None) -> FactoredLayer:
    return replace(layer, **parts)  # type: ignore[arg-type]


def _unbiased(F: Tensor) -> Tensor:
    return torch.cat([F[:, :-1], torch.zeros_like(F[:, -1:])], dim=1)


def _biases(one: FactoredLayer, other: FactoredLayer | None) -> Iterator[Change]:
    held = {name: getattr(one, name) for name in ("query", "key", "value") if bool(getattr(one, name)[:, -1].any())}
    offset = one.offset is not None and bool(one.offset.any())
    for name, F in held.items():
        yield Change("bias", f"{{other}} lacks the {name} bias of {{one}}", _with(one, **{name: _unbiased(F)}))
    if offset:
        yield Change("bias", "{other} lacks the output bias of {one}", _with(one, offset=None))
    if len(held) > 1:
        none = {name: _unbiased(F) for name, F in held.items()}
        yield Change("bias", f"{{other}} lacks the {', '.join(held)} biases of {{one}}", _with(one, **none))
        if offset:
            yield Change("bias", "{other} lacks all biases of {one}", _with(one, **none, offset=None))


def scaled(layer: FactoredLayer, times: float) -> FactoredLayer:
    """The layer with all its scores (before a cap) multiplied, apart from what is added to them."""
    if layer.form.normed is None:
        return _with(layer, query=layer.query * times)
    return layer.with_tensors({"norm_query": layer.form.normed.query * times})


def _scales(one: FactoredLayer, other: FactoredLayer | None) -> Iterator[Change]:
    q, d = one.size, one.width
    known = {math.sqrt(q): "√q", 1 / math.sqrt(q): "1/√q", float(q): "q", 1 / q: "1/q", math.sqrt(d): "√d",
             1 / math.sqrt(d): "1/√d", math.sqrt(q / d): "√(q/d)", math.sqrt(d / q): "√(d/q)"}
    tried, loud = dict(known), []
    if other is not None and (one.width, one.key_width) == (other.width, other.key_width):
        mine, theirs = gauge.heads_of(one), gauge.heads_of(other)
        sizes = [math.sqrt(sum(float(s.square().sum()) for s in _sizes(h))) for h in (mine, theirs)]
        if min(sizes) > 0:
            tried = {sizes[1] / sizes[0]: ""} | known
        loud = [math.sqrt(float(_norms_of(h.values).square().sum())) for h in (mine, theirs)]
    for times, words in tried.items():
        if abs(times - 1) > 1e-6:
            near = next((w for t, w in known.items() if abs(times / t - 1) < 1e-6), "")
            tail = f", which is {near} for heads of size q = {q}, width d = {d}" if near or words else ""
            yield Change("scale", f"the scores of {{other}} are {times:.6g} times those of {{one}}{tail}",
                         scaled(one, times))
    if loud and min(loud) > 0 and abs(loud[1] / loud[0] - 1) > 1e-6:
        times = loud[1] / loud[0]
        for offset in (one.offset, None if one.offset is None else one.offset * times):
            yield Change("output scale", f"heads of {{other}} answer {times:.6g} times as loud as those of {{one}}",
                         replace(one, out=one.out * times, offset=offset))


def _sizes(heads: gauge.Heads) -> list[Tensor]:
    return [_norms_of(pair) for name, pair in heads.scores.items() if name not in gauge.NORMS]


def _norms_of(pair: gauge.Pair) -> Tensor:
    """‖L_iR_iᵀ‖ for every i."""
    L, R = pair
    return ((L.mH @ L) * (R.mH @ R)).sum((1, 2)).real.clamp_min(0).sqrt()


def _rotaries(one: FactoredLayer, other: FactoredLayer | None) -> Iterator[Change]:
    mine = one.form.rotary
    if mine is None:
        return
    theirs = None if other is None else other.form.rotary

    def turned(rotary: Rotary) -> FactoredLayer:
        return replace(one, form=replace(one.form, rotary=rotary))

    planes = {"half": f"(j, j + {mine.coordinates(one.size) // 2})", "pairs": "(2j, 2j + 1)"}
    flipped = replace(mine, layout="pairs" if mine.layout == "half" else "half")
    yield Change("rotary layout", f"{{other}} turns planes {planes[flipped.layout]} of weights whose planes are "
                 f"{planes[mine.layout]}", turned(flipped))
    r = mine.coordinates(one.size)
    apart = torch.arange(r).view(2, -1).T.flatten()
    for order in (apart, apart.argsort()):
        at = torch.cat([order, torch.arange(r, one.size)])
        for names in (("query", "key"), ("query",), ("key",)):
            moved = {name: getattr(one, name)[..., at] for name in names}
            layer = one.with_tensors(moved)
            if one.form.normed is not None and len(names) == 2:
                layer = layer.with_tensors({f"norm_{name}": value[at] for name, value in (
                    ("query", one.form.normed.query), ("key", one.form.normed.key))})
            what = {2: "queries and keys", 1: "queries alone" if names == ("query",) else "keys alone"}[len(names)]
            yield Change("rotary layout", f"the {what} of {{other}} are in the order of the other layout of "
                         "planes, half against pairs", layer)
    if theirs is not None and other is not None and other.size == one.size:
        if mine.frequencies is None and theirs.frequencies is None and mine.base != theirs.base:
            yield Change("rotary base", f"the rotary base of {{other}} is {theirs.base:,.10g}, of {{one}} "
                         f"{mine.base:,.10g}", turned(replace(mine, base=theirs.base)))
        if mine.turned != theirs.turned and mine.frequencies is None and theirs.frequencies is None:
            yield Change("rotary", f"{{other}} turns {theirs.coordinates(one.size)} coordinates, {{one}} {r}",
                         turned(replace(mine, turned=theirs.turned)))
        same = replace(theirs, layout=mine.layout)
        if same != mine and theirs.vectors == mine.vectors:
            yield Change("rotary", f"{{other}} has {theirs.describe()}, {{one}} {mine.describe()}", turned(same))
    elif other is None and mine.frequencies is None:
        for base in BASES:
            if base != mine.base:
                yield Change("rotary base", f"the rotary base of {{other}} is {base:,.10g}, of {{one}} "
                             f"{mine.base:,.10g}", turned(replace(mine, base=base)))
    yield Change("rotary", "{other} turns the other way round", turned(
        replace(mine, frequencies=-mine.omega(one.size), turned=r)))


def _groups(one: FactoredLayer, other: FactoredLayer | None) -> Iterator[Change]:
    m, g = one.heads, one.groups
    if 1 < g < m:
        right, wrong = torch.arange(m) // (m // g), torch.arange(m) % g
        for names, what in ((("key", "value"), "keys and values"), (("key",), "keys"), (("value",), "values")):
            reads = {name: getattr(one, name)[wrong if name in names else right] for name in ("key", "value")}
            yield Change("groups", f"heads of {{other}} read the {what} of other groups: head i those of group "
                         f"i mod {g}, where in {{one}} it is i // {m // g}", _with(one, **reads))
    if g == m and other is not None and other.heads == m and other.groups < m:
        share = torch.arange(other.groups).repeat_interleave(m // other.groups) * (m // other.groups)
        yield Change("groups", f"in {{other}} heads share the keys and values of the first of every "
                     f"{m // other.groups}", _with(one, key=one.key[share], value=one.value[share]))


def _per_head(layer: FactoredLayer) -> dict[str, Tensor]:
    """Tensors with one entry for each head, or group."""
    return {name: value for name, value in layer.tensors().items()
            if name in ("query", "key", "value", "out", "sink", "offsets", "slope", "gate")}


def _orders(one: FactoredLayer, other: FactoredLayer | None) -> Iterator[Change]:
    """Heads of one part in another order than those of the rest."""
    mine = _per_head(one)
    if other is not None:
        theirs = _per_head(other)
        found = {}
        for name, part in mine.items():
            if name in theirs and theirs[name].shape == part.shape and len(part) > 1:
                rows = [F.reshape(len(part), -1) for F in (theirs[name], part)]
                cost = torch.cdist(rows[0], rows[1]).numpy()
                order = torch.as_tensor(linear_sum_assignment(cost)[1])
                if bool((order != torch.arange(len(order))).any()):
                    found[name] = part[order]
        for names in [(name,) for name in found] + ([("query", "key")] if {"query", "key"} <= set(found) else []):
            words = {"query": "queries", "key": "keys", "value": "values", "out": "output weights", "sink": "sinks",
                     "slope": "slopes", "gate": "gates"}
            what = " and ".join(words.get(name, name) for name in names)
            yield Change("head order", f"the {what} of {{other}} stand in another order of heads than the rest",
                         one.with_tensors({name: found[name] for name in names}))
    if one.heads > 1 and one.size > 1:
        whole = ("query", "key", "value", "out")
        for some in (whole, whole[:3], whole[3:], *((name,) for name in whole[:3])):
            for back in (False, True):
                parts = {name: _interleaved(mine[name], back, name == "out") for name in some}
                yield Change("head order", f"rows of the {', '.join(some)} weights of {{other}} are interleaved: "
                             "entry c of every head, then entry c + 1", one.with_tensors(parts))


def _interleaved(F: Tensor, back: bool, rows: bool) -> Tensor:
    """Entries (head, c) of the inner side in the order (c, head), or the other way round."""
    F = F if rows else F.mT
    m, q = F.shape[:2]
    flat = F.reshape(q, m, -1) if back else F.reshape(m, q, -1)
    F = flat.transpose(0, 1).reshape(m, q, -1)
    return F if rows else F.mT.contiguous()


def _shapes(one: FactoredLayer, other: FactoredLayer | None) -> Iterator[Change]:
    """Weights transposed, exchanged, or cut into another number of heads."""
    for name in ("query", "key", "value"):
        F = getattr(one, name)
        m, rows, q = F.shape
        if m * q == rows - 1:
            W = F[:, :-1].transpose(0, 1).reshape(rows - 1, m * q).T.reshape(rows - 1, m, q).transpose(0, 1)
            yield Change("transposed weight", f"the {name} weight of {{other}} is transposed",
                         _with(one, **{name: torch.cat([W, F[:, -1:]], dim=1)}))
    m, p, e = one.out.shape
    if m * p == e:
        yield Change("transposed weight", "the output weight of {other} is transposed",
                     _with(one, out=one.out.reshape(e, e).T.reshape(m, p, e)))
    if one.width == one.key_width:
        h = one.heads // one.groups
        yield Change("exchanged weights", "queries and keys are exchanged", _with(
            one, query=one.key.repeat_interleave(h, 0), key=one.query, value=one.value.repeat_interleave(h, 0)))
    if one.size == one.value_size:
        yield Change("exchanged weights", "keys and values are exchanged", _with(one, key=one.value, value=one.key))
    if other is not None and other.heads != one.heads and not set(one.form.tensors()) - {"norm_query", "norm_key"}:
        yield from _recut(one, other.heads, other.size)


def _recut(one: FactoredLayer, heads: int, size: int) -> Iterator[Change]:
    m, q = one.heads, one.size
    if m * q != heads * size or one.value_size != q or (one.groups * q) % size or one.form.normed is not None:
        return

    def cut(F: Tensor) -> Tensor:
        flat = F.transpose(0, 1).reshape(F.shape[1], -1)
        return flat.reshape(F.shape[1], -1, size).transpose(0, 1)

    groups = one.groups * q // size
    if heads % groups:
        return
    for times in (math.sqrt(q / size), 1.0):
        try:
            layer = _with(one, query=cut(one.query) * times, key=cut(one.key), value=cut(one.value),
                          out=one.out.reshape(heads, size, -1))
        except ValueError:  # a rotation that does not fit
            return
        yield Change("number of heads", f"{{other}} has {heads} heads of size {size}, {{one}} {m} of size {q}",
                     layer)


def _sights(one: FactoredLayer, other: FactoredLayer | None) -> Iterator[Change]:
    mine = one.form.sight

    def seen(sight: Sight) -> FactoredLayer:
        return replace(one, form=replace(one.form, sight=sight))

    def words(sight: Sight) -> str:
        said = sight.describe().split(", ") if sight != Sight() else ["all keys in sight"]
        return " and ".join("a causal mask" if part == "causal" else part for part in said)

    tried = [] if other is None else [other.form.sight]
    if not one.cross:
        tried += [Sight(causal=not mine.causal, window=mine.window)]
    if mine.window is not None:
        tried += [replace(mine, window=mine.window + 1), replace(mine, window=None)]
        tried += [replace(mine, window=mine.window - 1)] if mine.window > 1 else []
    tried += [replace(mine, prefix=0)] if mine.prefix else []
    for sight in dict.fromkeys(tried):
        if sight != mine:
            cause = "window" if (sight.causal, sight.prefix) == (mine.causal, mine.prefix) else "mask"
            by = "" if cause == "mask" or None in (sight.window, mine.window) else (
                " (off by one)" if abs((sight.window or 0) - (mine.window or 0)) == 1 else "")
            yield Change(cause, f"{{other}} has {words(sight)}, {{one}} {words(mine)}{by}", seen(sight))
    if mine.causal and not one.cross:
        yield Change("mask", "the mask of {other} is off by one: a query sees the key after its own",
                     answers=_shifted(one, 1))
        yield Change("mask", "the mask of {other} is off by one: a query does not see its own key",
                     answers=_shifted(one, -1), rows=1)


def _shifted(one: FactoredLayer, by: int) -> Callable[[Inputs], Tensor]:
    """The layer with a causal mask that ends ``by`` keys later; the first query keeps itself in sight."""
    def answers(inputs: Inputs) -> Tensor:
        see = in_sight(replace(one.form.sight, causal=False, prefix=0), inputs.X, None, inputs.padding)
        a = torch.arange(inputs.X.shape[1])
        edge = (a <= a.unsqueeze(1) + by) | ((a == 0) & (a.unsqueeze(1) == 0))
        see = edge.unsqueeze(0) if see is None else see & edge
        H = heads_out(inputs.X, None, one.tensors(), one.form, see, inputs.places(one))
        return attention.project(H, one.out, one.offset)

    return answers


def _parts(one: FactoredLayer, other: FactoredLayer | None) -> Iterator[Change]:
    """Parts of the form that one has and the other lacks, or has otherwise."""
    for name in PARTS:
        mine = getattr(one.form, name)
        theirs = None if other is None else getattr(other.form, name)
        cause = FORM_CAUSES.get(name, name)
        if mine is not None and theirs is None:
            layer = replace(one, form=_without(one.form, name))
            if name == "normed":
                layer = _with(layer, query=one.query * mine.query, key=one.key * mine.key)
            yield Change(cause, f"{{other}} lacks the {FORM_WORDS[name]} of {{one}}", layer)
            if name == "normed":  # the gains may be lost with the norms; the scale is in the gains, or in the query
                for scale in (one.size**-0.5, 1.0):
                    yield Change(cause, f"{{other}} lacks the {FORM_WORDS[name]} of {{one}}, and their gains",
                                 _with(layer, query=one.query * scale, key=one.key))
        elif mine is not None and theirs is not None and mine != theirs and name not in ("rotary", "normed"):
            try:
                layer = replace(one, form=replace(one.form, **{name: theirs}))
            except ValueError:  # of another number of heads
                continue
            words = (f"has a cap of {theirs.value:.10g}, {{one}} of {mine.value:.10g}" if isinstance(mine, Cap)
                     else f"has other {FORM_WORDS[name]} than {{one}}")
            yield Change(cause, f"{{other}} {words}", layer)
    table = one.form.offsets
    if isinstance(table, OffsetTable) and table.both:
        yield Change("offsets", "{other} takes the offsets of positions with the other sign",
                     replace(one, form=replace(one.form, offsets=replace(table, values=_mirrored(table)))))
    if one.form.cap is None and other is None:
        for cap in CAPS:
            yield Change("cap", f"{{other}} caps its scores at {cap:g}",
                         replace(one, form=replace(one.form, cap=Cap(cap))))
    if one.form.sink is None and other is None:
        zeros = Sink(one.query.new_zeros(one.heads))
        yield Change("sink", "{other} has a sink of 0 in every head",
                     replace(one, form=replace(one.form, sink=zeros)))


def _without(form: Form, name: str) -> Form:
    parts: dict[str, Any] = {name: None}
    return replace(form, **parts)


def _mirrored(table: OffsetTable) -> Tensor:
    """The table read at −Δ."""
    if table.kind == "clipped":
        return table.values.flip(1)
    side = table.values.shape[1] // 2
    values = table.values.clone()
    values[:, 1:side], values[:, side + 1 :] = table.values[:, side + 1 :], table.values[:, 1:side]
    return values


def _norms(one: FactoredLayer, other: FactoredLayer | None) -> Iterator[Change]:
    norms = one.form.normed
    if norms is None:
        return

    def gained(query: Tensor, key: Tensor, eps: float = norms.eps) -> FactoredLayer:
        return replace(one, form=replace(one.form, normed=Normed(query, key, eps)))

    one_ = torch.ones_like(norms.query)
    for scale in (one.size**-0.5, 1.0):
        for words, query, key in (
                ("query and key gains", one_ * scale, one_), ("query gain", one_ * scale, norms.key),
                ("key gain", norms.query, one_)):
            yield Change("norm gain", f"{{other}} lacks the {words} of the norms of {{one}}", gained(query, key))
        for words, query, key in (
                ("are those of {one} less 1", norms.query - scale, norms.key - 1.0),
                ("are those of {one} and 1", norms.query + scale, norms.key + 1.0)):
            yield Change("norm gain", f"the norm gains of {{other}} {words}: 1 + weight and weight are mixed up",
                         gained(query, key))
    theirs = None if other is None else other.form.normed
    if theirs is not None and theirs.query.shape == norms.query.shape and theirs != norms:
        for words, query, key, eps in (
                ("query gain", theirs.query, norms.key, norms.eps),
                ("key gain", norms.query, theirs.key, norms.eps),
                ("query and key gains", theirs.query, theirs.key, norms.eps),
                ("eps", norms.query, norms.key, theirs.eps)):
            yield Change("norm gain" if words != "eps" else "norm", f"the {words} of the norms differ",
                         gained(query, key, eps))


def _gains(one: FactoredLayer, other: FactoredLayer | None) -> Iterator[Change]:
    """Features of the tokens multiplied by a gain, as where a norm before the layer is folded into its weights."""
    names = ("query", "key", "value")
    if other is None or one.cross or any(getattr(one, n).shape != getattr(other, n).shape for n in names):
        return
    mine, theirs = (torch.cat([getattr(layer, n)[:, :-1].transpose(0, 1).flatten(1) for n in names], dim=1)
                    for layer in (one, other))
    gain = (mine * theirs).sum(1) / mine.square().sum(1).clamp_min(1e-300)
    if float((gain - 1).abs().max()) > 1e-6 and bool(gain.all()):
        rows = torch.cat([gain, torch.ones(1).to(gain)]).view(1, -1, 1)
        yield Change("input gain", "weights of {other} are those of {one} times one gain for each feature of the "
                     "tokens, as of a norm in front that is folded into one of them only",
                     _with(one, **{n: getattr(one, n) * rows for n in names}))


def _rounded(one: FactoredLayer, other: FactoredLayer | None) -> Iterator[Change]:
    rotary = one.form.rotary
    for dtype, name in HALVES.items():
        for scale in (1.0, one.size**-0.5):
            layer = scaled(one, 1 / scale)
            if max(float(value.abs().max()) for value in layer.tensors().values()) > torch.finfo(dtype).max:
                continue
            layer = scaled(layer.to(dtype).to(torch.float64), scale)
            yield Change(ROUNDING, f"{{other}} is {{one}} rounded to {name}", layer)
            if rotary is not None:  # a model that is rounded as a whole rounds its frequencies too
                omega = rotary.omega(one.size).to(dtype)
                coarse = replace(rotary, frequencies=omega, turned=rotary.coordinates(one.size))
                yield Change(ROUNDING, f"{{other}} is {{one}} rounded to {name}, its rotary frequencies too",
                             replace(layer, form=replace(layer.form, rotary=coarse)))
