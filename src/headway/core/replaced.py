"""A layer put into a model in place of the attention that stood there, called as that was; and taken out again."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from headway.core import attention, calls, checks, weights
from headway.core.factored import FactoredLayer, a_layer
from headway.core.forms import Form, Sight, heads_out, patterns_of
from headway.core.layer import AttentionLayer
from headway.core.sites import Site, find, packing


class Replacement:
    """A layer in a model. ``undo()`` puts back what stood there before; so does the end of a ``with`` block."""

    def __init__(self, model: nn.Module, site: Site, module: Stand) -> None:
        self.model, self.site, self.module = model, site, module
        self._in, self._dtype = False, module.query.dtype
        self._put(site.path, module)
        if site.split:
            self._put(site.exit_path, nn.Identity())
        self._around = packing(site)
        for part in self._around:
            part.use_nested_tensor = False
        self._in = True

    def undo(self) -> None:
        """Put back what stood there, on the device where the model is now, and in another dtype if the model was
        given one; a second time does nothing. A layer that was put there later is taken out first."""
        if not self._in:
            return
        if self.model.get_submodule(self.site.path) is not self.module:
            checks.refuse("undo", f"the layer in its place at {self.site.path}", "another module",
                          "undo() of what was put there later, first")
        query = self.module.query
        dtype = query.dtype if query.dtype != self._dtype else None
        for path, module in {self.site.path: self.site.entry, self.site.exit_path: self.site.exit}.items():
            self._put(path, module.to(query.device, dtype))
        for part in self._around:
            part.use_nested_tensor = True
        self._in = False

    def _put(self, path: str, module: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self.model.get_submodule(parent), name, module)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"Replacement({self.site.path}: {self.module.layer!r}{'' if self._in else ', undone'})"


def replace(model: nn.Module, path: str, layer: AttentionLayer | FactoredLayer) -> Replacement:
    """Put a layer into a model: the module at ``path`` is replaced by one that is called and answers as it did,
    and computes F(X, Z) in the model's dtype, where the model is.

    What the model's masks hide stays hidden, beside what the layer itself does not see; positions and caches of
    earlier tokens are those of the model. ``undo()`` of what is returned puts the old module back.

    >>> model = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with replace(nn.Sequential(model), "0.self_attn", AttentionLayer.random(heads=2, width=8)) as put:
    ...     put
    Replacement(0.self_attn: AttentionLayer(2 heads, width 8 → 8))
    """
    a_layer(layer)
    site = find(model, path)
    if not site.path:
        checks.refuse("path", "a module inside the model", repr(path),
                      "a model that holds it: nn.Sequential(module)")
    _fits(site, layer)
    like = next(site.entry.parameters(), None)
    like = next(model.parameters(), None) if like is None else like
    factors = layer if isinstance(layer, FactoredLayer) else as_factors(layer)
    if like is not None:
        factors = factors.to(like.dtype if like.is_floating_point() else torch.float32).to(like.device)
    return Replacement(model, site, Stand(factors, layer, site.entry))


def as_factors(layer: AttentionLayer) -> FactoredLayer:
    """The same layer exactly: Θ_i as queries of size d, and one group whose keys and values are the tokens."""
    d = layer.width
    Theta = layer.augmented
    if layer.key_bias is None:
        Theta = torch.cat([Theta, torch.zeros_like(Theta[:, :1])], dim=1)
    itself = torch.eye(d + 1, d, dtype=Theta.dtype, device=Theta.device).unsqueeze(0)
    return FactoredLayer(Theta, itself, itself, layer.W, layer.offset, Form(sight=Sight(layer.mask == "causal")))


def _fits(site: Site, layer: AttentionLayer | FactoredLayer) -> None:
    """Refuse a layer of another width than the module's, where its weights say what that is."""
    own = dict(site.entry.named_parameters())
    at = weights.places(own, inputs_first=weights.transposed(site.entry))
    if at is None or any(not own[place.name].is_floating_point() for place in at.values()):
        return
    wide = at["query"].read(own, 1).shape[1] if at["query"].blocks == 1 or not at["query"].per_head else None
    last = site.exit.weight if site.split else at["out"].read(own, 1) if "out" in at else None
    out = last.shape[0] if isinstance(last, Tensor) else None
    for name, has, wants in (("width", layer.width, wide), ("out_width", layer.out_width, out)):
        if wants is not None and has != wants:
            checks.refuse("layer", f"{name} {wants}, as the module at {site.path}", has, "a layer learned there")


class Stand(nn.Module):
    """Computes a layer where a module stood. What is asked of it otherwise, the old module answers."""

    stands = True

    def __init__(self, factors: FactoredLayer, layer: AttentionLayer | FactoredLayer, old: nn.Module) -> None:
        super().__init__()
        learns = any(part.requires_grad for part in old.parameters())
        for name, value in factors.tensors().items():
            setattr(self, name, nn.Parameter(value.clone(), requires_grad=learns))
        self.names = tuple(factors.tensors())
        self.layer, self.form, self.cross = layer, factors.form, factors.cross
        self._old = (calls.called_as(old),)  # in a tuple: no part of this module
        self._answer: tuple[Any, ...] | list[Any] | None = None
        self._qkv_same_embed_dim = False  # torch's encoder then calls it, and does not look inside
        self.train(old.training)

    @property
    def old(self) -> nn.Module:
        """What stood there first, and is called as this is."""
        first: nn.Module = self._old[0]
        return first

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            old = self.__dict__.get("_old")
            if old is None or name.startswith("__"):
                raise
            return getattr(old[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = calls.read(self.old, args, kwargs, cached=not self.cross)
        if self.cross and call.Z is None:
            checks.refuse("the module's input", "keys of another sequence, as the layer has", "none",
                          "a layer learned from this module")
        X = call.X.to(self.query.dtype)
        Z, here, there = self._keys(call, X)
        keys = (X if Z is None else Z).shape[1]
        see = self._sight(call, X.shape[1], keys, X.device)
        tensors = {name: getattr(self, name) for name in self.names}
        H = heads_out(X, Z, tensors, self.form, see, here, there)
        Y = attention.project(H, self.out, tensors.get("offset")).to(call.X.dtype)
        self._answer = _sample(self.old, call, args, kwargs) if self._answer is None else self._answer
        return self._answered(call, Y, keys, lambda: patterns_of(X, Z, tensors, self.form, see, here, there))

    def _keys(self, call: calls.Call, X: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The sequence of the keys, None if it is X; positions of queries and of keys, None for 0, 1, …"""
        if self.cross:
            assert call.Z is not None
            return call.Z.to(X.dtype), call.positions, None
        if call.Z is not None:
            checks.refuse("the module's input", "keys of the same sequence, as the layer has", "of another",
                          "a layer learned from this module")
        here = None if call.positions is None else call.positions.to(torch.float64)
        if call.cache is None:
            return None, here, None
        inner = getattr(call.cache, "self_attention_cache", call.cache)
        before = calls.past(call.cache, self.old, True)
        n, k, _ = X.shape
        if here is None:
            here = torch.arange(before, before + k, dtype=torch.float64, device=X.device)
        # The cache keeps tokens and their places where it kept keys and values.
        places = here.expand(n, k).reshape(n, 1, k, 1)
        try:
            tokens, there = inner.update(X.unsqueeze(1), places, calls.layer_number(self.old) or 0)
        except RuntimeError as error:  # room was made for keys and values of one dtype
            if checks.out_of_memory(error):
                raise
            tokens = None
        if tokens is None or tokens.shape[2] > before + k:
            checks.refuse("the module's cache", "one that grows with the tokens", "one of fixed length",
                          "generate(..., cache_implementation='dynamic')")
        return tokens[:, 0], here, there[:, 0, :, 0]

    def _sight(self, call: calls.Call, k: int, keys: int, device: torch.device) -> Tensor | None:
        """What both the layer and the call leave in sight; with cached tokens, queries are the last k of all."""
        see = self.form.sight.mask(k if self.cross else keys, keys, device)
        see = None if see is None else see[-k:].unsqueeze(0)
        if call.causal:
            behind = torch.ones(1, keys, keys, dtype=torch.bool, device=device).tril()[:, -k:]
            see = behind if see is None else see & behind
        if call.see is not None:
            shown = call.see[..., -keys:]
            see = shown if see is None else see & shown
        if see is None:
            return None
        return see | ~see.any(2, keepdim=True)  # filling that sees nothing would be no number

    def _answered(self, call: calls.Call, Y: Tensor, keys: int, patterns: Callable[[], Tensor]) -> Any:
        """Y in the shape of the old module's answers: alone, or first of several."""
        old = self.old
        if isinstance(old, nn.MultiheadAttention):
            Y = Y if old.batch_first else Y.transpose(0, 1)
            if not call.arguments.get("need_weights", True):
                return Y, None
            P = patterns()
            return Y, P.mean(1) if call.arguments.get("average_attn_weights", True) else P
        if not self._answer:
            return Y
        rest: list[Any] = [patterns() if isinstance(part, Tensor) and part.ndim == 4 else None
                           for part in self._answer[1:]]
        if rest and hasattr(old, "compute_bias"):  # T5: later layers take the first one's table from its answer
            rest[0] = call.arguments.get("position_bias")
            if rest[0] is None and getattr(old, "has_relative_attention_bias", False):
                whole: Tensor = old.compute_bias(keys, keys, device=Y.device)  # type: ignore[operator]
                rest[0] = whole[:, :, -Y.shape[1]:].to(Y.dtype)
        return [Y, *rest] if isinstance(self._answer, list) else (Y, *rest)


def _sample(old: nn.Module, call: calls.Call, args: Any, kwargs: Any) -> tuple[Any, ...] | list[Any]:
    """What the old module answers, to see of how many parts: () if of one."""
    if isinstance(old, nn.MultiheadAttention):
        return ()
    like = call.X
    bound = inspect.signature(old.forward).bind_partial(*args, **kwargs)
    for name in calls.CACHES:  # which it would write to
        for held in (bound.arguments, bound.arguments.get("kwargs", {})):
            if name in held:
                held[name] = None
    with torch.no_grad():
        answer = copy.deepcopy(old).to(like.device, like.dtype)(*bound.args, **bound.kwargs)
    return answer if isinstance(answer, (tuple, list)) else ()
