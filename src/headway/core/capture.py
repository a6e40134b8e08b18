"""Examples of an attention module at work: what enters it, after the norm, and what leaves it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headway.core import calls, checks
from headway.core.examples import Examples, join
from headway.core.layer import MASKS, AttentionLayer
from headway.core.modules import from_torch
from headway.core.shards import Shards, write
from headway.core.sites import Site, find, packing, refuse_dropout

SHARD = 256 << 20  # bytes of activations in one file, about


def capture(
    model: nn.Module,
    path: str,
    batches: Iterable[Any],
    *,
    limit: int | None = None,
    to: str | os.PathLike[str] | None = None,
    length: int | None = None,
    mask: str | None = None,
    ignore: Collection[str] = (),
    progress: Callable[[int], None] | None = None,
) -> Examples | Shards:
    """n pairs (X, Y) of the attention at ``path``: X (n, k, d) as it enters, after the norm, Y (n, k, e) as it
    leaves.

    batches: what the model is called with, one after the other: mappings (``model(**batch)``), tuples
    (``model(*batch)``) or single tensors. They are put on the model's device; the model is run without gradients
    and only as far as the module, whose first call counts. limit: sequences in all. to: a new folder, for shards
    that are written while the model runs, so that memory stays bounded; otherwise examples are held in memory, on
    the CPU. length: tokens of a sequence; shorter ones are filled up, longer ones refused (default: of the longest,
    with ``to`` of the first batch).

    Masks and padding are those of the call: filling becomes the examples' padding, a causal mask (a window is one
    too) their mask; ``mask`` says it where the module does not. Keys of another sequence, and positions that are
    not 0, 1, 2 …, come along. ignore: names of tensors among the module's arguments that its answer does not depend
    on; others that are not known are refused. progress is called with the number of sequences so far.
    """
    site = find(model, path)
    refuse_dropout("model", site.entry, site.exit)
    if limit is not None:
        checks.whole("limit", limit)
    if length is not None:
        checks.whole("length", length)
    if mask is not None:
        checks.choice("mask", mask, MASKS)
    ignore = (ignore,) if isinstance(ignore, str) else ignore
    if not isinstance(ignore, Collection):
        checks.refuse("ignore", "names of arguments", type(ignore).__name__, "ignore=('name',)")
    if to is not None and not isinstance(to, (str, os.PathLike)):
        checks.refuse("to", "the path of a new folder", f"{to!r} ({type(to).__name__})", "to='EXAMPLES'")
    if isinstance(batches, (Mapping, Tensor, str)) or not isinstance(batches, Iterable):
        checks.refuse("batches", "a list of batches, or anything that gives them one by one",
                      type(batches).__name__, "[batch]")
    pieces = _limited(_pieces(model, site, batches, _Reader(site, mask, ignore)), limit, progress)
    if to is None:
        found = list(pieces)
        if not found:
            _nothing(path)
        longest, keys = (max((piece.size(part) or 0 for piece in found), default=0) or None for part in ("X", "Z"))
        _too_long(longest, length)
        return _trimmed(join([piece.filled(length or longest, keys).examples() for piece in found]))
    return write(to, _grouped(pieces, length, path), None)


@dataclass(frozen=True)
class _Piece:
    """What one call of the module gave."""

    parts: Mapping[str, Tensor | None]  # X, Y, Z, padding, key_padding, positions, key_positions
    mask: str

    def __len__(self) -> int:
        X = self.parts["X"]
        assert X is not None
        return X.shape[0]

    def size(self, part: str) -> int | None:
        value = self.parts[part]
        return None if value is None else value.shape[1]

    @property
    def bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts.values() if part is not None)

    def take(self, count: int) -> _Piece:
        return self.each(lambda part: part[:count])

    def each(self, change: Callable[[Tensor], Tensor]) -> _Piece:
        parts = {name: None if part is None else change(part) for name, part in self.parts.items()}
        return replace(self, parts=parts)

    def filled(self, tokens: int | None, keys: int | None) -> _Piece:
        """Sequences of so many tokens (and keys), filled up with zeros that padding marks."""
        parts = dict(self.parts)
        for names, hidden, size in ((("X", "Y", "positions"), "padding", tokens),
                                    (("Z", "key_positions"), "key_padding", keys)):
            first = parts[names[0]]
            if first is None or size is None or first.shape[1] == size:
                continue
            more = size - first.shape[1]
            if parts[hidden] is None:
                parts[hidden] = torch.zeros(first.shape[:2], dtype=torch.bool)
            for name in (*names, hidden):
                value = parts[name]
                if value is not None:
                    ends = (0, 0) * (value.ndim - 2) + (0, more)
                    parts[name] = nn.functional.pad(value, ends, value=name == hidden)
        return replace(self, parts=parts)

    def examples(self) -> Examples:
        X, Y, padding = (self.parts[name] for name in ("X", "Y", "padding"))
        others = {"keys": self.parts["Z"], **{name: self.parts[name] for name in (
            "key_padding", "positions", "key_positions")}}
        given = {name: value for name, value in others.items() if value is not None}
        return Examples(X, Y, padding, self.mask, **given)


class _Enough(BaseException):
    """The module has answered: the rest of the model need not run."""


def _pieces(model: nn.Module, site: Site, batches: Iterable[Any], reader: _Reader) -> Iterator[_Piece]:
    device = next((part.device for part in model.parameters()), torch.device("cpu"))
    for batch in batches:
        held: dict[str, Any] = {}

        def enters(module: nn.Module, args: Any, kwargs: Any, held: dict[str, Any] = held) -> None:
            held["call"] = calls.read(module, args, kwargs, reader.ignore)

        def leaves(module: nn.Module, args: Any, answer: Any, held: dict[str, Any] = held) -> None:
            if "call" not in held:  # some models swap the entry for another module while they run
                return
            held["Y"] = answer[0] if isinstance(answer, (tuple, list)) else answer
            raise _Enough

        hooks = (site.entry.register_forward_pre_hook(enters, with_kwargs=True),
                 site.exit.register_forward_hook(leaves))
        around = packing(site)
        try:
            for part in around:
                part.use_nested_tensor = False
            with torch.no_grad():
                batch = _on(batch, device)
                if isinstance(batch, Mapping):
                    model(**batch)
                elif isinstance(batch, (tuple, list)):
                    model(*batch)
                else:
                    model(batch)
        except _Enough:
            pass
        except checks.InputError:
            raise
        except Exception as error:
            if checks.out_of_memory(error):
                raise
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise checks.InputError(
                f"batches: expected what the model can be called with; got one at which it fails ({said}). Try: a "
                "mapping of its arguments by name, a tuple or a tensor.") from error
        finally:
            for hook in hooks:
                hook.remove()
            for part in around:
                part.use_nested_tensor = True
        if "Y" in held:
            yield reader.piece(held["call"], held["Y"], batch)


def _on(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _on(part, device) for name, part in batch.items()}
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return type(batch)(_on(part, device) for part in batch)
    return batch


class _Reader:
    """Turns calls and answers into pieces that belong together."""

    def __init__(self, site: Site, mask: str | None, ignore: Collection[str]) -> None:
        self.site, self.told, self.ignore = site, mask, ignore
        self.mask: str | None = None
        self.silent: str | None = None  # what the module sees where nobody says so
        self.warned = False

    def piece(self, call: calls.Call, Y: Any, batch: Any) -> _Piece:
        X, Z = call.X, call.Z
        module = calls.called_as(self.site.entry)
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first and isinstance(Y, Tensor):
            Y = Y.transpose(0, 1)
        if not isinstance(Y, Tensor) or Y.shape[:2] != X.shape[:2] or Y.ndim != 3:
            got = f"shape {tuple(Y.shape)}" if isinstance(Y, Tensor) else type(Y).__name__
            checks.refuse("the module's answer", f"one row for each token, shape ({X.shape[0]}, {X.shape[1]}, e)",
                          got, "the path of the attention itself")
        self._half(Y.dtype)
        hints = _hints(batch, X, Z is not None)
        if Z is None:
            padding, word = self._own_sight(call, hints)
            key_padding = None
        else:
            padding, key_padding, word = hints[0] if hints else None, _key_padding(call, hints), "none"
        if self.told == "none" and word == "causal" and (call.see is not None or call.causal):
            checks.refuse("mask", "'causal': the module was called so that queries see only keys behind", "'none'",
                          "without mask=")
        word = self.told or word or self.mask or ("causal" if getattr(module, "is_causal", False) else "none")
        if self.mask not in (None, word):
            checks.refuse("the module's mask", f"{self.mask!r} in all batches", repr(word),
                          "mask=, or one kind of batch")
        self.mask = word
        parts: dict[str, Tensor | None] = {
            "X": X, "Y": Y, "Z": Z, "padding": padding, "key_padding": key_padding,
            "positions": _places(call.positions, X), "key_positions": None}
        for name, hidden in (("X", padding), ("Y", padding), ("Z", key_padding)):
            value = parts[name]
            if value is not None and hidden is not None:
                parts[name] = value.masked_fill(hidden.unsqueeze(2), 0.0)
        # Whole sequences of filling teach nothing.
        keep = slice(None) if padding is None else ~padding.all(1)
        return _Piece(parts, word).each(lambda part: part[keep].detach().cpu())

    def _own_sight(self, call: calls.Call, hints: list[Tensor]) -> tuple[Tensor | None, str | None]:
        if call.see is None:
            if call.causal:
                return None, "causal"
            return (hints[0] if hints and bool(hints[0].any()) and self.told else None), self._unsaid(call)
        see = call.see.expand(call.X.shape[0], call.X.shape[1], -1)
        see = see.tril() if call.causal else see
        padding, word = _decomposed(see, hints)
        one_row = word == "none" and call.see.shape[1] == 1  # which keys are filling, and no word on order
        return padding, self._unsaid(call) if one_row else word

    def _unsaid(self, call: calls.Call) -> str:
        """Where neither a mask nor an attribute says what is seen, the module is asked, if it can be read."""
        module = self.site.entry
        if self.silent is None:
            self.silent = "none"
            asked = getattr(module, "is_causal", None) is None and not isinstance(module, nn.MultiheadAttention)
            if asked and self.told is None:
                try:
                    layer = from_torch(module)
                except checks.InputError:
                    layer = None
                if isinstance(layer, AttentionLayer):
                    self.silent = layer.mask
                elif layer is not None and layer.form.sight.causal:
                    self.silent = "causal"
        return self.silent

    def _half(self, dtype: torch.dtype) -> None:
        if dtype.itemsize < 4 and not self.warned:
            self.warned = True
            eps = torch.finfo(dtype).eps
            warnings.warn(
                f"capture: the activations are {dtype}, rounded to about {eps:.0e} of their size. On them a layer "
                f"can be shown to agree with this module to about {eps:.0e}, and no closer; model.float() before "
                "the capture allows more.", stacklevel=2)


def _hints(batch: Any, X: Tensor, cross: bool) -> list[Tensor]:
    """Padding (n, k) as the batch itself has it, most likely first."""
    if not isinstance(batch, Mapping):
        return []
    names = ["decoder_attention_mask"] if cross and "decoder_input_ids" in batch else [
        "attention_mask", "decoder_attention_mask", "encoder_attention_mask"]
    return [batch[name] == 0 for name in names if isinstance(batch.get(name), Tensor)
            and batch[name].shape == X.shape[:2]]


def _decomposed(see: Tensor, hints: list[Tensor]) -> tuple[Tensor | None, str | None]:
    """Padding, and "causal" or "none" (None if one token is all there is to see), from what may be seen (n, k, k).

    Rows of filling mean nothing; the others must see every real key, every one behind, or those of a window.
    """
    k = see.shape[1]
    if hints and bool(hints[0].all()):  # nothing but filling, which is left out
        return hints[0], None
    itself = see.diagonal(dim1=1, dim2=2)
    ahead = see.triu(1).any(2)
    back = torch.arange(k, device=see.device).unsqueeze(1) - torch.arange(k, device=see.device)
    for padding in (*hints, ~itself, ~itself | ahead):
        real = ~padding
        shown = see & real.unsqueeze(2)
        if not bool(real.any()) or not bool(shown.any()):
            continue
        distance = back.expand_as(see)[shown]
        causal = not bool((distance < 0).any())
        far = int(distance.abs().max()) + 1
        base = (back >= 0) & (back < far) if causal else back.abs() < far
        if bool(((see == (base & real.unsqueeze(1))) | padding.unsqueeze(2)).all()):
            word = None if far == 1 else "causal" if causal else "none"
            return (padding if bool(padding.any()) else None), word
    return checks.refuse("the module's mask", "padding, with all keys, those behind or those of a window in sight",
                         "another pattern", "one sequence to a row: no packing of several, no prefix")


def _key_padding(call: calls.Call, hints: list[Tensor]) -> Tensor | None:
    if call.see is None or call.Z is None:
        return None
    see = call.see.expand(call.X.shape[0], -1, -1)[..., : call.Z.shape[1]]
    shown = see.any(1)
    real = ~hints[0].unsqueeze(2) if hints else torch.ones(1, 1, 1, dtype=torch.bool, device=see.device)
    if not bool(((see == shown.unsqueeze(1)) | ~real).all()):
        checks.refuse("the module's mask", "the same keys in sight of every query", "others",
                      "a module that looks at all of the other sequence")
    return None if bool(shown.all()) else ~shown


def _places(positions: Tensor | None, X: Tensor) -> Tensor | None:
    """Positions (n, k) in float64."""
    if positions is None:
        return None
    return positions.to(torch.float64).expand(X.shape[0], *positions.shape[1:])


def _limited(
    pieces: Iterator[_Piece], limit: int | None, progress: Callable[[int], None] | None
) -> Iterator[_Piece]:
    done = 0
    for piece in pieces:
        if limit is not None and done + len(piece) > limit:
            piece = piece.take(limit - done)
        done += len(piece)
        if len(piece):
            yield piece
            if progress is not None:
                progress(done)
        if done == limit:
            return


def _grouped(pieces: Iterator[_Piece], length: int | None, path: str) -> Iterator[Examples]:
    """Examples of about one shard each, all of one length, with padding throughout."""
    held: list[Examples] = []
    size, other, bytes_held = length, None, 0
    for piece in pieces:
        size = piece.size("X") if size is None else size
        other = piece.size("Z") if other is None else other
        _too_long(piece.size("X"), size)
        _too_long(piece.size("Z"), other)
        for name, first in (("padding", "X"), ("key_padding", "Z")):
            like = piece.parts[first]
            if piece.parts[name] is None and like is not None:
                piece = replace(piece, parts={**piece.parts, name: torch.zeros(like.shape[:2], dtype=torch.bool)})
        held.append(piece.filled(size, other).examples())
        bytes_held += piece.bytes
        if bytes_held >= SHARD:
            yield join(held)
            held, bytes_held = [], 0
    if held:
        yield join(held)
    elif size is None:
        _nothing(path)


def _trimmed(found: Examples) -> Examples:
    """Without positions that are 0, 1, 2 … up to a constant: only differences of positions matter."""
    positions = getattr(found, "positions", None)
    if positions is None:
        return found
    steps = positions.diff(dim=1) == 1
    if found.padding is not None:
        steps = steps | found.padding[:, 1:] | found.padding[:, :-1]
    if bool(steps.all()):
        found.positions = None
    return found


def _too_long(found: int | None, length: int | None) -> None:
    if found is not None and length is not None and found > length:
        checks.refuse("length", f"at least {found}, the tokens of a batch", length,
                      f"length={found}, or shorter sequences")


def _nothing(path: str) -> None:
    checks.refuse("batches", f"at least one that the module at {path} is called with, and that is not all filling",
                  "none", "another path, or batches that are not used up already")
