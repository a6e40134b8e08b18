"""Layers from modules: weights by their names, the rest from attributes and config, and the module is asked.

Nothing here imports the libraries that the modules come from. What attributes leave open (which coordinates are a
plane, whether a module looks back only) is tried, and whatever was read is compared with what the module answers to
a few random tokens: a reading that does not give the same answer is never returned.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from headway.core import calls, checks, configs, weights
from headway.core.asking import disagreement
from headway.core.factored import FactoredLayer
from headway.core.forms import Cap, Form, Sight, Sink
from headway.core.gauge import as_factored
from headway.core.layer import AttentionLayer
from headway.core.positions import OffsetTable, Rotary
from headway.core.sites import Site, find, is_stand, refuse_dropout

SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "d_head", "d_kv")
SCALES = ("scaling", "scale", "softmax_scale")
AGREE = 1e-3  # of the answers' spread: a reading is off by more, where it is wrong, and rounding by less
PLACED = ("pos", "rot", "freq", "alibi", "bias")  # in the name of an argument: it brings places into the scores
REFUSED = ("clip_qkv", "attention_chunk_size", "attn_temperature_tuning", "position_embedding_type")  # in a config


def from_torch(
    module: nn.Module, path: str | None = None, *, causal: bool | None = None, cross: bool | None = None
) -> AttentionLayer | FactoredLayer:
    """The layer that an attention module computes: Θ_i, u_i, W_i and c where scores are plain and see every key or
    every key behind, and each head has its own (AttentionLayer); elsewhere the factors with their form
    (FactoredLayer).

    module: ``nn.MultiheadAttention``, ``nn.TransformerEncoderLayer``, or an attention module of transformers or of
    your own with projections of such names (q_proj, c_attn, query, q, query_key_value …); or a whole model with the
    ``path`` of one, so that what stands elsewhere in it (rotary frequencies, a table of offsets) is found too.
    Norms, residual connections and dropout around the attention are other functions. causal: whether queries see
    only keys behind, where the module does not say so itself (of masks that its model makes only those are known
    that are in use with its kind). cross: whether keys come from another sequence.

    The layer has the module's dtype (float32 for half precision). What cannot be read is refused by name.

    >>> module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> from_torch(module, causal=True)
    AttentionLayer(2 heads, width 8 → 8, with key_bias, offset, causal)
    """
    for name, said in (("causal", causal), ("cross", cross)):
        if said is not None:
            checks.flag(name, said)
    layer, dense = _found(module, path, causal, cross)
    return layer if dense is None else dense


def factors_from_torch(module: nn.Module, path: str | None = None, *, causal: bool | None = None,
                       cross: bool | None = None) -> FactoredLayer:
    """What ``from_torch`` reads, in factors whatever its form: biases stand where the module has them."""
    return _found(module, path, causal, cross)[0]


def _found(
    module: nn.Module, path: str | None, causal: bool | None, cross: bool | None
) -> tuple[FactoredLayer, AttentionLayer | None]:
    site = find(module, path)
    refuse_dropout("module", site.entry, site.exit)
    if is_stand(site.entry):
        put: AttentionLayer | FactoredLayer = site.entry.layer  # type: ignore[assignment]
        return as_factored(put), put if isinstance(put, AttentionLayer) else None
    _of_torch(site.entry)
    with torch.no_grad():
        return _read(_Source.of(site), causal, cross)


@dataclass(frozen=True)
class _Source:
    """A module to read: its tensors (half precision widened), where the parts lie, its config, its arguments."""

    site: Site
    tensors: Mapping[str, Tensor]
    at: Mapping[str, weights.Place]
    config: Any
    number: int | None
    arguments: Mapping[str, inspect.Parameter]

    @classmethod
    def of(cls, site: Site) -> _Source:
        module = site.entry
        own = dict(module.named_parameters(remove_duplicate=False))
        found = weights.places(own, inputs_first=weights.transposed(module)) or _unknown(module, own)
        for place in found.values():
            weights.quantised(f"module.{place.name}", own[place.name])
        if site.split:
            own |= {f"exit.{name}": value for name, value in site.exit.named_parameters()}
            last = {"out": weights.Place("exit.weight"), "out_bias": weights.Place("exit.bias")}
            found |= {part: place for part, place in last.items() if place.name in own}
        left = sorted(set(own) - {place.name for place in found.values()})
        if left:
            checks.refuse("module", "attention made of projections, norms of heads, sinks and a table of offsets",
                          f"another part, {left[0]}, in {type(module).__name__}",
                          "headway.FactoredLayer with the factors, or headway.capture and learn")
        wide = {name: value.detach().float() if value.dtype.itemsize < 4 else value.detach()
                for name, value in own.items()}
        config = configs.text_part(getattr(module, "config", None))
        number = getattr(module, "layer_idx", None)
        return cls(site, wide, found, config, number if isinstance(number, int) else None,
                   inspect.signature(module.forward).parameters)

    def said(self, *names: str) -> Any:
        """The module's own attribute of the first of these names that it has, or None."""
        return next((getattr(self.site.entry, name) for name in names
                     if getattr(self.site.entry, name, None) is not None), None)


def _unknown(module: nn.Module, names: Mapping[str, Any]) -> NoReturn:
    for name, child in module.named_children():
        if callable(getattr(child, "weight", None)):  # torch's quantised layers have no parameters
            weights.quantised(f"module.{name}.weight", child.weight())  # type: ignore[operator]
    inner = ", ".join(f"{name} ({type(child).__name__})" for name, child in module.named_children())
    checks.refuse("module", "nn.MultiheadAttention, or attention with weights of names in use: q_proj, k_proj, "
                  "v_proj; q, k, v; query, key, value; c_attn; query_key_value", f"{type(module).__name__} with "
                  + (inner or ", ".join(sorted(names)[:4]) or "none"),
                  "from_weights(query, key, value, out, heads=…) with its weights")


def _read(source: _Source, causal: bool | None, cross: bool | None) -> tuple[FactoredLayer, AttentionLayer | None]:
    """The first reading that answers as the module does; as Θ and W too where it is plain."""
    _foreign(source)
    cross = _crosses(source) if cross is None else cross
    m, q = _sizes(source)
    at = dict(source.at)
    if at["query"].read(source.tensors, m).shape[0] == 2 * m * q:
        at = weights.gated(at)
    form = _form(source, m, cross)
    shape = replace(_norms(source, q), heads=m)
    worst, fault = math.inf, None
    for seen, scale, (rotary, turn) in itertools.product(
            _sights(source, causal, cross), _scales(source, q), _rotaries(source, q)):
        made = replace(form, sight=seen, rotary=rotary)
        layer = weights.read(source.tensors, at, replace(shape, scale=scale, turn=turn), made, cross)
        try:
            error = disagreement(source.site, layer, turn)
        except checks.InputError:
            raise
        except Exception as stopped:  # whatever a module raises is its own
            fault = stopped
            continue
        if error <= AGREE:
            return layer, weights.plain(layer, source.tensors, at)
        worst = min(worst, error)
    kind = type(source.site.entry).__name__
    if worst == math.inf and fault is not None:
        return checks.refuse(
            "module", "a forward that answers to tokens, positions and a mask",
            f"{kind}, which says: {type(fault).__name__}: {(str(fault).splitlines() or [''])[0]}",
            "model.set_attn_implementation('eager'), cross=True, or headway.FactoredLayer with the factors")
    return checks.refuse(
        "module", "attention that its attributes describe",
        f"{kind}, which answers otherwise by {worst:.1e} of the answers' spread",
        "headway.capture and learn, or headway.FactoredLayer with the factors")


def _foreign(source: _Source) -> None:
    """Refuse what changes the function and has no place in any form here."""
    for name in REFUSED:
        value = configs.get(source.config, name)
        if value not in (None, False, "absolute"):
            checks.refuse("module", f"attention without {name}", f"config.{name} = {value!r}", "another model")
    for name in source.arguments:
        if name not in calls.READ and any(word in name for word in PLACED):
            checks.refuse("module", "arguments of known names in its forward", f"{name!r}, which may change scores",
                          "headway.FactoredLayer with the factors, or headway.capture and learn")


def _of_torch(module: nn.Module) -> None:
    """Refuse what nn.MultiheadAttention can do and no form here does."""
    if isinstance(module, nn.MultiheadAttention):
        if module.bias_k is not None:
            checks.refuse("module", "keys that are the tokens", "an extra key (add_bias_kv)",
                          "a module without it: no form here has a key of its own")
        if module.kdim != module.vdim:
            checks.refuse("module", "keys and values of one width", f"kdim {module.kdim}, vdim {module.vdim}",
                          "kdim = vdim")


def _crosses(source: _Source) -> bool:
    """Whether keys come from another sequence, as far as the module says."""
    module = source.site.entry
    for held in (module, *source.site.above[:1]):
        if isinstance(getattr(held, "is_cross_attention", None), bool):
            return bool(held.is_cross_attention)
    if isinstance(module, nn.MultiheadAttention):
        return module.kdim != module.embed_dim or source.site.path.endswith("multihead_attn")
    asks = any(name in source.arguments for name in calls.KEYS)
    last = source.site.path.split(".")[-1].lower()
    if any(word in last for word in ("cross", "encdec", "encoder_attn")):
        return asks
    return asks and getattr(module, "is_decoder", False) is True and getattr(module, "is_causal", None) is False


def _sizes(source: _Source) -> tuple[int, int]:
    """Heads m and the size q of their queries."""
    m = source.said(*configs.HEADS) or configs.get(source.config, *configs.HEADS)
    q = source.said(*SIZES)
    place = source.at["query"]
    rows = place.read(source.tensors, m or 1).shape[0]
    if not isinstance(m, int) and not isinstance(q, int):
        checks.refuse("module", f"an attribute {' or '.join((*configs.HEADS[:2], SIZES[0]))}", "none of them",
                      "module.num_heads = …, or from_weights(..., heads=…)")
    if not isinstance(m, int):
        m = rows // int(q)
    if not isinstance(q, int):
        q = rows // m
    if m < 1 or rows not in (m * q, 2 * m * q):
        checks.refuse("module", f"rows for {m} heads of size {q} in {place.name}", rows, "check the module's sizes")
    return m, q


def _sights(source: _Source, causal: bool | None, cross: bool) -> Iterator[Sight]:
    """What queries may see: as told, as the module says, or to be tried."""
    if cross:
        yield Sight()
        return
    masked = configs.get(source.config, "model_type") in configs.MASKED
    said = (masked or getattr(source.site.entry, "is_causal", None)) if causal is None else causal
    torch_own = isinstance(source.site.entry, nn.MultiheadAttention)
    options = (bool(said),) if isinstance(said, bool) or torch_own else (False, True)
    if said is None and getattr(source.site.entry, "is_decoder", False) is True:
        options = (True, False)  # whose mask its model hands over
    own = vars(source.site.entry)
    far = own["sliding_window"] if "sliding_window" in own else configs.window(source.config, source.number)
    if configs.layer_type(source.config, source.number) == "full_attention":
        far = None  # EXAONE's modules know a window that other layers have
    for option in options:
        yield Sight(option, far if isinstance(far, int) else None)


def _scales(source: _Source, q: int) -> list[float]:
    said = source.said(*SCALES)
    tried = [float(said)] if isinstance(said, (int, float)) and said > 0 else []
    return list(dict.fromkeys([*tried, q**-0.5, 1.0]))


def _rotaries(source: _Source, q: int) -> list[tuple[Rotary | None, float]]:
    """Rotations to be tried, with what they multiply queries and keys by; None where nothing is turned."""
    held = [part for _, part in source.site.entry.named_children() if hasattr(part, "inv_freq")]
    turned = "position_embeddings" in source.arguments or bool(held)
    if not turned or source.said("use_rope") in (0, False) or not configs.turns(source.config, source.number):
        return [(None, 1.0)]
    if source.config is None:
        checks.refuse("module", "a config with the rotary settings", "none (module.config)",
                      "headway.FactoredLayer with a headway.Rotary")
    found: list[tuple[Rotary | None, float]] = []
    for layout in ("half", "pairs"):
        rotary, factor = configs.rotary(source.config, q, source.number, layout)
        found.append(_as_held(source, rotary, factor, q))
    return [*found, (None, 1.0)]  # some layers are handed rotations and do not use them


def _as_held(source: _Source, rotary: Rotary, factor: float, q: int) -> tuple[Rotary, float]:
    """Frequencies that the model holds, where they are others than its config says."""
    holder = _turner(source)
    if holder is None:
        return rotary, factor
    kind = configs.layer_type(source.config, source.number)
    prefix = f"{kind}_" if hasattr(holder, f"{kind}_inv_freq") else ""
    omega = getattr(holder, f"{prefix}inv_freq").detach().double().cpu()
    factor = float(getattr(holder, f"{prefix}attention_scaling", factor))
    mine = rotary.omega(q)
    if omega.shape == mine.shape and torch.allclose(omega, mine, rtol=1e-5, atol=0.0):
        return rotary, factor
    return replace(rotary, frequencies=omega, turned=2 * len(omega)), factor


def _turner(source: _Source) -> nn.Module | None:
    """The nearest module that holds rotary frequencies."""
    for held in (source.site.entry, *source.site.above):
        for part in held.modules():
            if any(name.endswith("inv_freq") for name, _ in part.named_buffers(recurse=False)):
                return part
    return None


def _form(source: _Source, m: int, cross: bool) -> Form:
    """Cap, sinks of torch, table of offsets: the module's own, or one that stands elsewhere in the model."""
    module = source.site.entry
    cap = source.said("attn_logit_softcapping")
    form = Form(cap=None if cap is None else Cap(float(cap)))
    if getattr(module, "add_zero_attn", False):  # one more key that is zero, and its value too
        form = replace(form, sink=Sink(next(iter(source.tensors.values())).new_zeros(m)))
    if "position_bias" not in source.arguments or cross:
        return form
    owner = module if "offsets" in source.at else _table_owner(source, m)
    table = owner.get_parameter("relative_attention_bias.weight").detach()
    far = getattr(owner, "relative_attention_max_distance", 128)
    values = table.T.contiguous().to(next(iter(source.tensors.values())))
    offsets = OffsetTable(values, "t5", getattr(owner, "is_decoder", False) is not True, int(far))
    return replace(form, offsets=offsets)


def _table_owner(source: _Source, m: int) -> nn.Module:
    """The module that holds the table which all layers of a stack share."""
    for held in source.site.above:
        found: list[nn.Module] = [part for part in held.modules() if isinstance(
            getattr(part, "relative_attention_bias", None), nn.Embedding)]
        if len(found) == 1 and found[0].get_parameter("relative_attention_bias.weight").shape[1] == m:
            return found[0]
    return checks.refuse("module", "a table of offsets, relative_attention_bias", "none in the module: it is "
                         "handed over as position_bias", "from_torch(model, path), which finds it")


def _norms(source: _Source, q: int) -> weights.Shape:
    """eps of the norms of queries and keys, and whether their weights are gains or gains less 1."""
    shape = weights.Shape(1, q, 1.0)
    if "norm_query" not in source.at:
        return shape
    gains, eps = set(), set()
    for part in ("norm_query", "norm_key"):
        name = source.at[part].name.removesuffix(".weight")
        norm = source.site.entry.get_submodule(name)
        small = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        weight = source.tensors[f"{name}.weight"]
        eps.add(torch.finfo(weight.dtype).eps if small is None else float(small))
        gains.add(_gain(name, norm, weight))
    if len(gains) > 1 or len(eps) > 1:
        checks.refuse("module", "norms of queries and keys of one kind", "two kinds", "another module")
    return replace(shape, gain=gains.pop(), eps=eps.pop())


def _gain(name: str, norm: nn.Module, weight: Tensor) -> float:
    """0 where a norm multiplies by its weight, 1 where by 1 + weight: it is asked."""
    norm = copy.deepcopy(norm).to(weight.dtype)
    x = torch.randn(4, *weight.shape, generator=torch.Generator().manual_seed(0)).to(weight) * 10.0
    y = norm(x) * x.square().mean(-1, keepdim=True).sqrt() / x
    for plus in (0.0, 1.0):
        if float((y - weight - plus).abs().max()) <= AGREE * float(1 + weight.abs().max()):
            return plus
    return checks.refuse("module", f"{name} that divides by the root mean square", type(norm).__name__,
                         "another module")
