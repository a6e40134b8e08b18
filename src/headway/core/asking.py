"""Modules asked: does one answer random tokens as a layer does? Its arguments are told by their names.

A layer that was read from attributes is compared with the module itself, so that what attributes do not say (which
coordinates make a plane, whether a module looks ahead) is found out, and what they say wrongly does no harm.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headway.core import calls, checks
from headway.core.factored import FactoredLayer
from headway.core.forms import affine, in_sight
from headway.core.positions import Rotary
from headway.core.sites import Site

SPREAD = 2.0  # deviation of the scores that a module is asked with: small ones hide mistakes, large ones saturate
TOKENS, SEQUENCES = 7, 2  # it is asked with


def disagreement(site: Site, layer: FactoredLayer, turn: float = 1.0) -> float:
    """How far a module's answers to random tokens are from the layer's, of their spread.

    turn: what the model multiplies its cosines and sines by.
    """
    draw = torch.Generator().manual_seed(0)

    def tokens(width: int) -> Tensor:
        return torch.randn(SEQUENCES, TOKENS, width, generator=draw, dtype=torch.float64).to(layer.query)

    X, Z = tokens(layer.width), tokens(layer.key_width) if layer.cross else None
    worst = 0.0
    cap = layer.form.cap
    for spread in (SPREAD, *([cap.value] if cap is not None else [])):
        K = affine(X if Z is None else Z, layer.key).repeat_interleave(layer.heads // layer.groups, 1)
        scores = affine(X, layer.query) @ K.mT
        size = math.sqrt(spread / max(float(scores.std()), 1e-30)) if layer.form.normed is None else 1.0
        X, Z = X * size, None if Z is None else Z * size
        Y = layer(X, Z) if layer.cross else layer(X)
        answer = _answer(site, layer, X, Z, turn)
        spread = float((Y - Y.mean((0, 1))).square().mean().sqrt())
        worst = max(worst, float((answer.to(Y) - Y).abs().max()) / max(spread, 1e-30))
    return worst


def _answer(site: Site, layer: FactoredLayer, X: Tensor, Z: Tensor | None, turn: float) -> Tensor:
    """What the module answers, called by the names of its arguments."""
    entry, leave = site.entry, site.exit
    if next(entry.parameters()).dtype != X.dtype:  # half precision would hide a mistake
        entry, leave = copy.deepcopy(entry).to(X.dtype), copy.deepcopy(leave).to(X.dtype)
    see = in_sight(layer.form.sight, X, Z)
    hidden = None if see is None else torch.zeros_like(see, dtype=X.dtype).masked_fill(~see, float("-inf"))
    if isinstance(entry, nn.MultiheadAttention):
        K = X if Z is None else Z
        turned = [t if entry.batch_first else t.transpose(0, 1) for t in (X, K, K)]
        Y = entry(*turned, need_weights=False, attn_mask=None if hidden is None else hidden[0])[0]
        return Y if entry.batch_first else Y.transpose(0, 1)  # type: ignore[no-any-return]
    given = _arguments(entry, layer, X, Z, hidden)
    stopped: Exception | None = None
    best: Tensor | None = None
    rotary = layer.form.rotary
    if rotary is None and "position_embeddings" in inspect.signature(entry.forward).parameters:
        rotary = Rotary()  # a layer that is not turned must not care
    for rotation in _rotations(rotary, X, layer.size, turn):
        if rotation is not None:
            given["position_embeddings"] = rotation
        try:
            answer = entry(X, **given)
        except (RuntimeError, ValueError, IndexError) as error:  # cosines of another shape
            stopped = error
            continue
        Y = answer[0] if isinstance(answer, (tuple, list)) else answer
        Y = leave(Y) if site.split else Y
        mine = layer(X, Z) if layer.cross else layer(X)
        if Y.shape == mine.shape and (best is None or (Y - mine).abs().max() < (best - mine).abs().max()):
            best = Y
    if best is not None:
        return best
    if stopped is not None:
        raise stopped
    return checks.refuse("module", f"one answer of {layer.out_width} numbers for each token", "others",
                         "headway.capture and learn")


def _arguments(
    entry: nn.Module, layer: FactoredLayer, X: Tensor, Z: Tensor | None, hidden: Tensor | None
) -> dict[str, Any]:
    """What the forward of a module is given beside X: keys, mask, what is added to the scores."""
    given: dict[str, Any] = {}
    kind = getattr(getattr(entry, "config", None), "_attn_implementation", None)
    if hidden is None and kind not in (None, "eager"):
        # Without a mask transformers may take a module for causal; the model of one that is not hands one over.
        hidden = X.new_zeros(1, X.shape[1], (X if Z is None else Z).shape[1])
    for name, parameter in list(inspect.signature(entry.forward).parameters.items())[1:]:
        if name in calls.KEYS and (Z is not None or parameter.default is parameter.empty):
            given[name] = X if Z is None else Z
        elif name in calls.MASKS:
            given[name] = None if hidden is None else hidden.unsqueeze(1).expand(X.shape[0], -1, -1, -1)
        elif name == "position_bias" and layer.form.offsets is not None:
            places = torch.arange(X.shape[1], device=X.device)
            given[name] = None if hasattr(entry, "relative_attention_bias") else layer.form.offsets.added(
                layer.form.tensors(), places - places.unsqueeze(1)).unsqueeze(0)
        elif name == "position_ids":
            given[name] = torch.arange(X.shape[1], device=X.device).unsqueeze(0)
        elif name in calls.READ or parameter.default is not parameter.empty:
            if parameter.default is parameter.empty:
                given[name] = None
        elif parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            checks.refuse("module", "arguments of known names in its forward", f"{name!r}, which must be given",
                          "headway.FactoredLayer with the factors, or headway.capture and learn")
    return given


def _rotations(rotary: Rotary | None, X: Tensor, size: int, turn: float) -> Iterator[tuple[Tensor, Tensor] | None]:
    """Cosines and sines as models hand them over: for each coordinate, in either layout, or for each plane."""
    if rotary is None:
        yield None
        return
    angles = rotary.angles(torch.arange(X.shape[1], device=X.device), size).unsqueeze(0)
    for each in (torch.cat([angles, angles], -1), angles.repeat_interleave(2, -1), angles):
        yield (each.cos() * turn).to(X), (each.sin() * turn).to(X)
