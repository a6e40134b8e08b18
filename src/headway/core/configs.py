"""What a model's config says of one attention layer: how positions enter, how far it looks, how scores are scaled.

A config is a mapping (config.json) or any object with such attributes. Rotary frequencies are computed here in
float64 from the base and the scaling that is named:

    default   ω_j = base^(−2j/t), t the number of turned coordinates
    linear    ω_j/factor
    llama3    ω_j where the wave is short, ω_j/factor where it is long, blended between
    yarn      the same with a ramp over j; and scores times a factor of their own, squared
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from headway.core import checks
from headway.core.positions import Rotary

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead")  # how their number is called
SLIDING = "sliding_attention"  # in a config's layer_types
# Kinds of model whose mask leaves only keys behind in sight, though their modules say is_causal = False.
MASKED = tuple(f"{name}_text_model" for name in (
    "aimv2", "clip", "clipseg", "groupvit", "metaclip_2", "owlvit", "owlv2", "videoprism", "xclip"))
OLD_BASE = {"llama": 10_000.0, "mistral": 10_000.0}  # configs of 2023 leave the base out


def get(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these entries that is there and not None."""
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return value
    return default


def text_part(config: Any) -> Any:
    """The part about the text model, where a config speaks of several."""
    return get(config, "text_config", default=config)


def layer_type(config: Any, number: int | None) -> str | None:
    """What layer_types calls this layer; older configs say it in other words."""
    types = get(config, "layer_types")
    if isinstance(types, str):
        _missed("layer_types", "a list with a word for each layer", repr(types))
    if types is not None and number is not None and number < len(types):
        return str(types[number])
    if types is not None or number is None or get(config, "sliding_window") is None:
        return None
    pattern = get(config, "sliding_window_pattern", default=2 if get(config, "model_type") == "gemma2" else None)
    if pattern is not None:
        return SLIDING if (number + 1) % int(pattern) else "full_attention"
    if get(config, "use_sliding_window") is not None:
        late = number >= int(get(config, "max_window_layers", default=0))
        return SLIDING if get(config, "use_sliding_window") and late else "full_attention"
    return None


def window(config: Any, number: int | None) -> int | None:
    """How many tokens back this layer looks, itself included; None: all."""
    size = get(config, "sliding_window")
    kind = layer_type(config, number)
    if kind not in (None, "full_attention", SLIDING):
        _missed("layer_types", "full_attention or sliding_attention", kind)
    if size is None or kind == "full_attention" or get(config, "use_sliding_window") is False:
        return None
    return checks.whole("config.sliding_window", size)


def turns(config: Any, number: int | None) -> bool:
    """Whether this layer turns its queries and keys at all: some models leave every fourth without."""
    listed = get(config, "no_rope_layers")
    if listed is None or number is None or not len(listed):
        return True
    return bool(listed[number])


def rotary(config: Any, size: int, number: int | None, layout: str = "half") -> tuple[Rotary, float]:
    """The rotation of heads of ``size``, and what it multiplies turned queries and keys by (1 but for yarn)."""
    said = _rope(config, number)
    if said.get("mrope_section") is not None:
        _missed("mrope_section", "positions of one number each", said["mrope_section"])
    kind = str(said.get("rope_type") or said.get("type") or "default")
    base = said.get("rope_theta") or OLD_BASE.get(str(get(config, "model_type")))
    if base is None:
        _missed("rope_theta", "the base of the rotary frequencies", "none")
    base = checks.number("config.rope_theta", base, strictly=True)
    part = checks.number("config.partial_rotary_factor", said.get("partial_rotary_factor") or 1.0)
    turned = int(size * part)
    whole = None if turned == size else turned
    if kind == "default":
        return Rotary(base, layout, whole), 1.0
    omega = torch.exp(torch.arange(0, turned, 2, dtype=torch.float64) / -turned * math.log(base))
    if kind == "linear":
        return Rotary(base, layout, whole, omega / _number(said, "factor")), 1.0
    if kind == "llama3":
        return Rotary(base, layout, whole, _llama3(omega, said)), 1.0
    if kind == "yarn":
        return Rotary(base, layout, whole, _yarn(omega, base, said)), _yarn_factor(said)
    return _missed("rope_type", "default, linear, llama3 or yarn: frequencies that sequences do not change", kind)


def _rope(config: Any, number: int | None) -> dict[str, Any]:
    """Rotary settings in one mapping, from today's rope_parameters or from what came before it."""
    said = get(config, "rope_parameters")
    for name, held in (("rope_parameters", said), ("rope_scaling", get(config, "rope_scaling"))):
        if held is not None and not isinstance(held, Mapping):
            _missed(name, "rotary settings by name", repr(held))
    if said is not None:
        said = dict(said)
        nested = {name: value for name, value in said.items() if isinstance(value, Mapping)}
        if nested:
            kind = layer_type(config, number)
            if kind not in nested:
                _missed("rope_parameters", f"an entry for layers of type {kind!r}", sorted(nested))
            said = dict(nested[kind])
    else:
        said = dict(get(config, "rope_scaling", default={}))
        local = get(config, "rope_local_base_freq")
        if local is not None and layer_type(config, number) == SLIDING:
            said = {"rope_theta": local}
    said.setdefault("rope_theta", get(config, "rope_theta", "rotary_emb_base"))
    said.setdefault("partial_rotary_factor", get(config, "partial_rotary_factor", "rotary_pct"))
    if said.get("factor") is None and said.get("original_max_position_embeddings"):
        longest = get(config, "max_position_embeddings", default=0)
        said["factor"] = longest / said["original_max_position_embeddings"]
    said.setdefault("original_max_position_embeddings", get(
        config, "original_max_position_embeddings", "max_position_embeddings"))
    return said


def _llama3(omega: Tensor, said: Mapping[str, Any]) -> Tensor:
    factor, low, high, old = (_number(said, name) for name in (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    turns = old * omega / (2 * math.pi)  # of plane j over the length the model was first trained on
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return omega * (blend + (1 - blend) / factor)


def _yarn(omega: Tensor, base: float, said: Mapping[str, Any]) -> Tensor:
    factor, old = _number(said, "factor"), _number(said, "original_max_position_embeddings")
    turned = 2 * len(omega)
    edges = [turned * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (
        float(said.get("beta_fast") or 32.0), float(said.get("beta_slow") or 1.0))]
    if said.get("truncate") is not False:
        edges = [math.floor(edges[0]), math.ceil(edges[1])]
    low, high = max(edges[0], 0), min(edges[1], turned - 1)
    high += 0.001 if low == high else 0.0  # as everybody does
    ramp = ((torch.arange(len(omega), dtype=torch.float64) - low) / (high - low)).clamp(0.0, 1.0)
    return omega * (1 - ramp) + omega / factor * ramp


def _yarn_factor(said: Mapping[str, Any]) -> float:
    def scale(times: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * times * math.log(factor) + 1.0

    factor = _number(said, "factor")
    if said.get("attention_factor") is not None:
        return float(said["attention_factor"])
    if said.get("mscale") and said.get("mscale_all_dim"):
        return scale(float(said["mscale"])) / scale(float(said["mscale_all_dim"]))
    return scale(1.0)


def _number(said: Mapping[str, Any], name: str) -> float:
    value = said.get(name)
    if value is None:
        _missed(name, "a number beside the other rotary settings", "none")
    return checks.number(f"config.{name}", value, strictly=True)


def _missed(name: str, expected: str, got: object) -> NoReturn:
    checks.refuse(f"config.{name}", expected, got, "headway.FactoredLayer with the factors and a form of your own")
