"""One call of an attention module, whatever its arguments are called: tokens, keys, what is in sight, positions."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.core import checks
from headway.core.sites import is_stand

KEYS = ("key_value_states", "encoder_hidden_states", "key", "context", "memory")  # another sequence
MASKS = ("attention_mask", "mask", "attn_mask")
KEY_MASKS = ("encoder_attention_mask",)  # the mask, where keys come from another sequence
CACHES = ("past_key_values", "past_key_value", "layer_past")
PLACES = ("position_ids", "cache_position")
READ = {*KEYS, *MASKS, *KEY_MASKS, *CACHES, *PLACES, "value", "key_padding_mask", "position_embeddings",
        "position_bias"}
HIDDEN = -1e4  # what is added to a score that is out of sight is at most this; BERT's was exactly this


@dataclass(frozen=True)
class Call:
    """X (n, k, d) and, where keys are of another sequence, Z (n, l, z); see (1 or n, k, l): what the arguments
    leave in sight, None if they say nothing; causal: whether they, or the module, say so without a mask of rows."""

    X: Tensor
    Z: Tensor | None
    see: Tensor | None
    causal: bool
    positions: Tensor | None
    cache: Any
    arguments: Mapping[str, Any]


def called_as(module: nn.Module) -> nn.Module:
    """The module whose arguments count: the one that stood there, where a layer was put in its place."""
    return module.old if is_stand(module) else module  # type: ignore[return-value]


def named(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names that the module's forward has for them; the first is "X"."""
    signature = inspect.signature(module.forward)
    bound = signature.bind_partial(*args, **kwargs)
    given: dict[str, Any] = {}
    first = next(iter(signature.parameters), None)
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            given |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            given |= {("X" if name == first and not i else f"{name}[{i}]"): part for i, part in enumerate(value)}
        else:
            given["X" if name == first else name] = value
    return given


def read(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], ignore: Collection[str] = (),
    cached: bool = False,
) -> Call:
    """What one call says. ignore: names of tensors that the answer does not depend on. cached: tokens that came
    before may be in a cache; otherwise they are refused, for their keys cannot be seen."""
    module = called_as(module)
    given = {name: value for name, value in named(module, args, kwargs).items() if name not in ignore}
    _known(given)
    X = given.get("X")
    if not isinstance(X, Tensor) or not X.is_floating_point() or X.ndim != 3:
        got = f"shape {tuple(X.shape)}, {X.dtype}" if isinstance(X, Tensor) else type(X).__name__
        checks.refuse("the module's input", "tokens of shape (n, k, d) as its first argument", got,
                      "the path of the attention itself")
    torch_own = isinstance(module, nn.MultiheadAttention)
    first = not torch_own or module.batch_first
    Z = next((given[name] for name in KEYS if given.get(name) is not None), None)
    value = given.get("value")
    if Z is not None and value is not None and value is not Z and not torch.equal(value, Z):
        checks.refuse("the module's input", "keys and values of one sequence", "two that differ",
                      "a module that takes both from one place")
    own = Z is None or Z is X
    keys: Tensor | None = None if own else Z
    if not first:
        X, keys = X.transpose(0, 1), None if keys is None else keys.transpose(0, 1)
    cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
    if cache is not None and not cached and past(cache, module, own):
        checks.refuse("the module's input", "whole sequences", "tokens after others that are in a cache",
                      "one forward pass for each sequence, without generate()")
    names = _mask_names(module, not own)
    see = _mask(given, X, keys, names, torch_own)
    rows = any(getattr(given.get(name), "ndim", 2) > 2 for name in names)  # a row for each query: it says it all
    causal = given.get("is_causal")
    if causal is None:
        lazy = getattr(getattr(module, "config", None), "_attn_implementation", None) != "eager"
        causal = bool(getattr(module, "is_causal", False)) and lazy
    causal = own and bool(causal) and not rows and X.shape[1] > 1
    return Call(X, keys, see, causal, _positions(given, X), cache, given)


def _known(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        inner = value if isinstance(value, (tuple, list)) else (value,)
        if name != "X" and name not in READ and any(isinstance(part, Tensor) for part in inner):
            checks.refuse("the module's input", f"tensors of known names: {', '.join(sorted(READ))}",
                          f"a tensor {name!r}", f"ignore=({name!r},) if its answer does not depend on it")


def past(cache: Any, module: nn.Module, own: bool) -> int:
    """How many tokens a cache holds already."""
    if isinstance(cache, (tuple, list)):
        return int(cache[0].shape[-2]) if cache and isinstance(cache[0], Tensor) else 0
    inner = getattr(cache, "self_attention_cache" if own else "cross_attention_cache", cache)
    length = getattr(inner, "get_seq_length", None)
    if length is None:
        return 0
    number = layer_number(module)
    return int(length() if number is None else length(number))


def layer_number(module: nn.Module) -> int | None:
    """Under which number a module keeps its keys in a cache."""
    said = (getattr(module, name, None) for name in ("layer_idx", "layer_id"))
    return next((number for number in said if isinstance(number, int)), None)


def _mask_names(module: nn.Module, cross: bool) -> tuple[str, ...]:
    """A module that knows two masks takes the second for keys of another sequence."""
    return KEY_MASKS if cross and KEY_MASKS[0] in inspect.signature(module.forward).parameters else MASKS


def _mask(
    given: Mapping[str, Any], X: Tensor, Z: Tensor | None, names: tuple[str, ...], torch_own: bool
) -> Tensor | None:
    """What may be seen, bool (1 or n, k, l); None if no mask is given."""
    n, k, keys = X.shape[0], X.shape[1], (X if Z is None else Z).shape[1]
    name = next((name for name in names if given.get(name) is not None), None)
    see = None if name is None else _visible(name, given[name], n, k, torch_own)
    bias = given.get("position_bias")
    if bias is not None and bool((bias <= HIDDEN).any()):  # older T5s hand over bias and mask in one
        hidden = _visible("position_bias", torch.where(bias <= HIDDEN, bias, 0.0), n, k, False)
        see = hidden if see is None else see & hidden
    filling = given.get("key_padding_mask")
    if filling is not None:
        keep = (~filling if filling.dtype == torch.bool else filling > HIDDEN).unsqueeze(1)
        see = keep if see is None else see & keep
    if see is not None and see.shape[-1] < keys:
        checks.refuse(f"the module's {name or 'mask'}", f"an entry for each of {keys} keys",
                      f"shape {tuple(see.shape)}", "a mask of shape (n, 1, k, l)")
    if see is not None and (see.ndim != 3 or see.shape[0] not in (1, n) or see.shape[1] not in (1, k)):
        checks.refuse(f"the module's {name or 'mask'}", f"one for {n} sequences of {k} tokens, as X has",
                      f"shape {tuple(see.shape)}", "a module that takes X as (n, k, d), not as (k, n, d)")
    return see


def _visible(name: str, mask: Any, n: int, k: int, torch_own: bool) -> Tensor:
    if not isinstance(mask, Tensor):
        checks.refuse(f"the module's {name}", "a tensor", type(mask).__name__,
                      "model.set_attn_implementation('eager') or 'sdpa'")
    if mask.dtype == torch.bool:
        see = ~mask if torch_own else mask
    elif mask.is_floating_point() and not (mask.ndim == 2 and mask.shape[0] == n and not torch_own
                                           and bool(((mask == 0) | (mask == 1)).all())):
        added = (mask != 0) & (mask > HIDDEN)
        if bool(added.any()):
            checks.refuse(f"the module's {name}", "0 for what is in sight and a large negative number for the rest",
                          f"{float(mask[added][0]):g}: something is added to the scores",
                          "a module that adds it itself")
        see = mask == 0
    else:
        see = mask != 0
    if see.ndim == 2:  # a row for each query, or for each sequence
        by_query = torch_own or (see.shape[0] == k != n)
        return see.unsqueeze(0) if by_query else see.unsqueeze(1)
    if see.ndim == 3 and see.shape[0] not in (1, n):
        see = see.view(n, -1, *see.shape[1:])  # torch: one for each head
    if see.ndim == 4:
        if see.shape[1] > 1 and not torch.equal(see, see[:, :1].expand_as(see)):
            checks.refuse(f"the module's {name}", "one mask for all heads", "heads with masks of their own",
                          "a module whose heads see the same keys")
        see = see[:, 0]
    return see


def _positions(given: Mapping[str, Any], X: Tensor) -> Tensor | None:
    """Positions (1 or n, k) if the call has them; rotations that are those of consecutive places count as none."""
    for name in PLACES:
        places = given.get(name)
        if places is not None:
            found: Tensor = places.reshape(-1, X.shape[1]) if places.ndim < 3 else places
            if found.shape[0] not in (1, X.shape[0]) or found.shape[1] != X.shape[1]:
                checks.refuse(f"the module's {name}", "one position for each token", f"shape {tuple(places.shape)}",
                              "a model whose positions are one number each")
            return found
    turned = given.get("position_embeddings")
    if isinstance(turned, (tuple, list)) and len(turned) == 2 and not _consecutive(*turned):
        checks.refuse("the module's position_embeddings", "rotations of consecutive positions, or position_ids",
                      "others", "sequences without filling on the left")
    return None


def _consecutive(cos: Tensor, sin: Tensor) -> bool:
    """Whether every step turns by the same angle: z_{a+1} z̄_a is constant for z = cos + i sin."""
    z = torch.complex(cos.to(torch.float64), sin.to(torch.float64))
    step = z[..., 1:, :] * z[..., :-1, :].conj()
    if step.shape[-2] < 2:
        return True
    return float((step - step[..., :1, :]).abs().max()) <= 5e-2 * float(step.abs().max())
