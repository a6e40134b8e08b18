"""One side of a comparison, whatever it is given as: its weights where they can be read, and what it answers."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headway.core import attention, checks
from headway.core.checkpoints import factors_from_checkpoint
from headway.core.convert import as_function
from headway.core.factored import FactoredLayer
from headway.core.gauge import as_factored
from headway.core.inputs import Inputs
from headway.core.layer import AttentionLayer, load_layer
from headway.core.modules import factors_from_torch
from headway.core.oracle import DTYPES
from headway.core.sites import refuse_dropout

Layer = AttentionLayer | FactoredLayer
CHECKPOINT = re.compile(r"(.+):(\d+)")


@dataclass(frozen=True, eq=False)
class Side:
    """A function on inputs, with its weights (float64, on the CPU) where they are known.

    dense: the layer itself where it was given as Θ and W. A layer of linear scores answers as a function does, and
    is kept as ``linear``. stored: the dtype of its weights; taken: that in which a
    function was asked, once it was.
    """

    layer: FactoredLayer | None
    dense: AttentionLayer | None
    stored: torch.dtype
    box: Callable[[Inputs], Tensor] | None = None
    width: int | None = None
    taken: Sequence[torch.dtype] = ()
    linear: AttentionLayer | None = None  # where it was given and its scores are linear: it has no factors

    @property
    def rounding(self) -> float:
        """The unit of rounding of its weights or of its arithmetic, whichever is coarser."""
        return max(torch.finfo(dtype).eps for dtype in (self.stored, *self.taken))

    def __call__(self, inputs: Inputs) -> Tensor:
        if self.layer is not None:
            return inputs.to(self.layer)
        assert self.box is not None
        return self.box(inputs)


def read(name: str, given: Any, heads: int | None = None) -> Side:
    """The side that was given: a layer, a module (or a model and a path in it), a file (or a checkpoint and the
    number of a layer in it, also as "file:number"), or a function of X."""
    if isinstance(given, (AttentionLayer, FactoredLayer)):
        return _known(given)
    if isinstance(given, tuple) and len(given) == 2:
        first, which = given
        if isinstance(first, nn.Module) and isinstance(which, str):
            return _module(first, which)
        if isinstance(first, (str, os.PathLike)):
            return _known(factors_from_checkpoint(first, checks.whole(f"{name}[1]", which, 0), heads))
    if isinstance(given, (str, os.PathLike)):
        return _known(layer_at(given, heads))
    if isinstance(given, nn.Module):
        return _module(given, None)
    if callable(given):
        return _function(given, None)
    return checks.refuse(name, "a layer, a torch module, (model, path), a file, (checkpoint, layer number) or a "
                         "function of X", type(given).__name__, "headway.from_torch(module)")


def layer_at(place: str | os.PathLike[str], heads: int | None = None) -> Layer:
    """The layer that a text names: a file of ours, or "checkpoint.safetensors:3", attention number 3 in it."""
    found = CHECKPOINT.fullmatch(os.fspath(place))
    if found is None or Path(place).exists():
        return load_layer(place)
    return factors_from_checkpoint(found[1], int(found[2]), heads)


def _known(layer: Layer) -> Side:
    if isinstance(layer, AttentionLayer) and layer.linear:
        return _linear(layer)
    whole = as_factored(layer).to("cpu")
    return Side(whole.to(torch.float64), layer if isinstance(layer, AttentionLayer) else None, whole.query.dtype)


def _linear(layer: AttentionLayer) -> Side:
    own = layer.to("cpu").to(torch.float64)

    def answers(inputs: Inputs) -> Tensor:
        if inputs.Z is not None:
            checks.refuse("layer", "sequences that are their own keys, with linear scores",
                          "keys of another sequence", "a layer in factors with cross=True")
        X = inputs.X.double()  # the layer itself would cut the gradient
        see = attention.allowed(X, own.mask, inputs.padding)
        weight = attention.linear_weight(X, see, own.scores == "linear/k")
        H = attention.attend(attention.linear_patterns(X, own.Theta, weight), X)
        return attention.project(H, own.W, own.offset)

    return Side(None, None, layer.Theta.dtype, answers, layer.width, (torch.float64,), own)


def _module(module: nn.Module, path: str | None) -> Side:
    try:
        layer = factors_from_torch(module, path)
    except checks.InputError as refused:
        try:
            inner = module if path is None else module.get_submodule(path)
        except AttributeError:  # a path that names nothing: what was refused says which there are
            raise refused from None
        refuse_dropout("module", inner)
        return _function(inner, str(refused))
    own = next(iter(module.parameters())).dtype
    return Side(layer.to("cpu").to(torch.float64), None, own)


def _function(oracle: Callable[..., Any], unread: str | None) -> Side:
    """A black box: a module is asked as a copy in float64, a function in the first precision that it takes."""
    width, dtype = None, torch.float64
    taken: list[torch.dtype] = []
    if isinstance(oracle, nn.Module):
        first = next(oracle.parameters(), None)
        dtype = torch.float64 if first is None else first.dtype
        dtype = dtype if dtype == torch.float64 else torch.float32  # parts of it may stay in float32 all the same
        oracle, taken = copy.deepcopy(oracle).double().cpu(), [torch.float64]
        if isinstance(oracle, nn.MultiheadAttention):
            width, oracle = int(oracle.embed_dim), as_function(oracle)

    def answers(inputs: Inputs) -> Tensor:
        given = (inputs.X,) if inputs.Z is None else (inputs.X, inputs.Z)
        if not taken:
            taken.append(_taken(oracle, given))
        try:
            answer = oracle(*(part.to(taken[0]) for part in given))
        except (TypeError, RuntimeError, IndexError) as error:
            if unread is None:  # a function of the user's: its own complaint says most
                raise
            checks.refuse("module", "one whose weights can be read, or that answers to X alone",
                          f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]} (weights: {unread})",
                          "lambda X: module(X, ...)[0], with the arguments that it needs")
        answer = answer[0] if isinstance(answer, (tuple, list)) else answer
        if not isinstance(answer, Tensor):
            checks.refuse("the function's answer", "one tensor Y (n, k, e)", type(answer).__name__,
                          "lambda X: module(X)[0], where the first of several is meant")
        checks.shape("the function's answer", answer, (*inputs.X.shape[:2], "e"), "one output row per token of X")
        return answer.double().cpu()

    return Side(None, None, dtype, answers, width, taken)


def _taken(oracle: Callable[..., Any], given: tuple[Tensor, ...]) -> torch.dtype:
    """The first precision that a function takes, finest first."""
    said: Exception | None = None
    for dtype in sorted(DTYPES, key=lambda d: torch.finfo(d).eps):
        try:
            with torch.no_grad():
                oracle(*(part.to(dtype) for part in given))
        except (RuntimeError, ValueError, TypeError) as error:
            said = said or error
            continue
        return dtype
    assert said is not None
    raise said
