"""Examples (X, Y), Y = F(X) + noise: the container, what it holds, and what tells two sets of them apart."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headway.core import checks
from headway.core.layer import MASKS

if TYPE_CHECKING:
    from headway.core.shards import Shards

# What a sequence may have beside X and Y, in the order of the constructor; each has n rows.
BESIDE = ("padding", "keys", "key_padding", "positions", "key_positions")
BLOCK = 1024  # sequences drawn or hashed at a time; part of what a seed and a digest mean, so never changed


class Examples:
    """n pairs (X, Y), Y = F(X) + noise, of an unknown layer F: X (n, k, d), Y (n, k, e).

    padding (n, k), optional, is True where a token is filling; those rows of Y are ignored. ``mask`` says
    what a query may see: "none" (everything) or "causal". ±1 tokens may be int8.

    keys Z (n, l, z), optional: the sequences that keys and values come from, where that is not X; key_padding
    (n, l) is True where a token of Z is filling. positions (k,), (n, k) or (n, k, c), optional: places of the
    tokens, where they are not 0 … k − 1; key_positions likewise for Z.

    >>> data = Examples(torch.randn(8, 4, 3), torch.randn(8, 4, 2))
    >>> len(data), data.width, data.out_width
    (8, 3, 2)
    """

    padding: Tensor | None
    keys: Tensor | None
    key_padding: Tensor | None
    positions: Tensor | None
    key_positions: Tensor | None

    def __init__(
        self, X: Any, Y: Any, padding: Any = None, mask: str = "none", *, keys: Any = None, key_padding: Any = None,
        positions: Any = None, key_positions: Any = None,
    ) -> None:
        X = checks.floating("examples.X", X, keep_int8=True)
        Y = checks.floating("examples.Y", Y)
        checks.shape("examples.X", X, ("n", "k", "d"), "one (k, d) matrix per sequence, stacked")
        n, k, _ = X.shape
        checks.shape("examples.Y", Y, (n, k, "e"), "the n and k of X; did you transpose?")
        some_columns("examples.Y", tuple(Y.shape))
        if X.device != Y.device:
            checks.refuse("examples.Y", f"device {X.device}, as X", Y.device, "Y.to(X.device)")
        self.X: Tensor = X
        self.Y: Tensor = Y
        self.padding = _filling("examples.padding", padding, X)
        self.positions = _places("examples.positions", positions, X)
        self.mask = checks.choice("examples.mask", mask, MASKS)
        self.keys = self.key_padding = self.key_positions = None
        if keys is not None:
            self.keys = checks.floating("examples.keys", keys, keep_int8=True)
            checks.shape("examples.keys", self.keys, (n, "l", "z"), "one (l, z) matrix for every sequence of X")
            if not self.keys.shape[1] or self.keys.device != X.device:
                checks.refuse("examples.keys", f"at least one key, on device {X.device}, as X",
                              f"{self.keys.shape[1]} on {self.keys.device}", "keys.to(X.device)")
            self.key_padding = _filling("examples.key_padding", key_padding, self.keys)
            self.key_positions = _places("examples.key_positions", key_positions, self.keys)
        elif key_padding is not None or key_positions is not None:
            checks.refuse("examples.keys", "the sequences that key_padding and key_positions are about", "none",
                          "padding and positions, where keys are those of X")

    def __len__(self) -> int:
        return self.X.shape[0]

    @property
    def length(self) -> int:
        return self.X.shape[1]

    @property
    def width(self) -> int:
        return self.X.shape[2]

    @property
    def out_width(self) -> int:
        return self.Y.shape[2]

    @property
    def key_width(self) -> int | None:
        """Features of a key, where keys come from another sequence."""
        return None if self.keys is None else self.keys.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Of the labels: it sets the floor of the arithmetic."""
        return self.Y.dtype

    @property
    def device(self) -> torch.device:
        return self.X.device

    def take(self, index: Sequence[int] | Tensor | np.ndarray) -> Examples:
        """The sequences with these indices, in memory."""
        at = torch.as_tensor(whole_index(index, len(self)), device=self.device)
        part = Examples.__new__(Examples)  # checked already, as a whole
        part.X, part.Y, part.mask = self.X[at], self.Y[at], self.mask
        for name in BESIDE:
            value = getattr(self, name)
            setattr(part, name, None if value is None else value[at])
        return part

    def beside(self) -> dict[str, Tensor]:
        """What the sequences have beside X and Y, by name."""
        return {name: getattr(self, name) for name in BESIDE if getattr(self, name) is not None}

    def arguments(self) -> dict[str, Tensor]:
        """What a layer is called with beside X: ``layer(data.X, **data.arguments())``."""
        return {"Z" if name == "keys" else name: value for name, value in self.beside().items()}

    def batches(self, size: int) -> Iterator[Examples]:
        """All sequences in order, ``size`` at a time, in memory one batch at a time."""
        checks.whole("size", size)
        for start in range(0, len(self), size):
            yield self.take(range(start, min(start + size, len(self))))

    def digest(self) -> str:
        """SHA-256 over the contents: says whether two sets of examples are the same one."""
        sha = hashlib.sha256(self.mask.encode())
        for batch in self.batches(BLOCK):
            for name, part in {"X": compact(batch.X), "Y": batch.Y, **batch.beside()}.items():
                part = compact(part) if name == "keys" else part
                named = name if name not in ("X", "Y", "padding") else ""  # these had no names once
                sha.update(f"{named}{part.dtype}{tuple(part.shape[1:])}".encode())
                sha.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()

    def hashes(self) -> np.ndarray:
        """One number for every sequence, (n,) int64: says which sequences two sets of examples share.

        BLAKE2b over the rows that count, X beside Y and positions, then keys, in float32: filling does not matter,
        and a sequence stored in another precision is known again. Eight bytes each; two sets of a million unlike
        sequences share one by chance with probability 5e-8.
        """
        sizes = self.width.to_bytes(8, "little") + self.out_width.to_bytes(8, "little")
        found = []
        for batch in self.batches(BLOCK):
            rows = _rows([batch.X, batch.Y], batch.positions, batch.padding)
            others = None if batch.keys is None else _rows([batch.keys], batch.key_positions, batch.key_padding)
            for i, row in enumerate(rows):
                sha = hashlib.blake2b(row, digest_size=8, person=sizes)
                if others is not None:
                    sha.update(others[i])
                found.append(sha.digest())
        return np.frombuffer(b"".join(found), dtype="<i8").astype(np.int64)

    @classmethod
    def pad(
        cls, Xs: Sequence[Any], Ys: Sequence[Any], mask: str = "none", *, keys: Sequence[Any] | None = None,
        positions: Sequence[Any] | None = None, key_positions: Sequence[Any] | None = None,
    ) -> Examples:
        """Sequences of several lengths, filled up with zeros to the longest, with the padding mask."""
        if len(Xs) != len(Ys) or not len(Xs):
            checks.refuse("Xs, Ys", "as many outputs as inputs, at least one",
                          f"{len(Xs)} and {len(Ys)}", "one Y for every X")
        xs, padding = _filled("Xs", Xs, "tokens as rows, one width for all")
        lengths = [len(x) for x in Xs]
        ys, _ = _filled("Ys", Ys, "one output row per token", lengths)
        beside: dict[str, Tensor] = {}
        if keys is not None:
            if len(keys) != len(Xs):
                checks.refuse("keys", f"{len(Xs)}, one for every X", len(keys), "a list as long as Xs")
            beside["keys"], beside["key_padding"] = _filled("keys", keys, "keys as rows, one width for all")
        if positions is not None:
            beside["positions"], _ = _filled("positions", positions, "one position per token", lengths)
        if key_positions is not None:
            beside["key_positions"], _ = _filled("key_positions", key_positions, "one position per key",
                                                 [len(z) for z in keys or ()])
        return cls(xs, ys, padding, mask, **beside)

    @staticmethod
    def open(folder: str | os.PathLike[str]) -> Shards:
        """Examples streamed from a folder of shards; see ``write``."""
        from headway.core.shards import Shards  # a kind of Examples, so it stands below

        return Shards(folder)

    def __repr__(self) -> str:
        width = f"{self.width}" if self.key_width is None else f"{self.width} and {self.key_width}"
        return (f"{type(self).__name__}({len(self)} sequences of {self.length} tokens, "
                f"width {width} → {self.out_width}, {self.dtype})")


def some_columns(name: str, shape: tuple[int, ...]) -> None:
    if shape[-1] == 0:
        checks.refuse(name, "at least one output column", f"shape {shape}", "check how Y was made")


def keys_of_their_own(examples: Examples, hint: str = "headway.Examples(X, Y, padding, mask)") -> None:
    """Refuse what plain scores know nothing of: keys of other sequences, and positions."""
    given = sorted({"keys", "positions"} & set(examples.take([0]).beside()))
    if given:
        checks.refuse("examples", "sequences that are their own keys, without positions",
                      f"examples with {given[0]}", hint)


def join(parts: list[Examples]) -> Examples:
    """One after the other, with padding where any has some."""
    if len(parts) == 1:
        return parts[0]
    beside = {name: torch.cat([_or_default(name, part) for part in parts])
              for name in BESIDE if any(getattr(part, name) is not None for part in parts)}
    return Examples(torch.cat([p.X for p in parts]), torch.cat([p.Y for p in parts]), mask=parts[0].mask, **beside)


def _or_default(name: str, part: Examples) -> Tensor:
    """What the part has of that name, or what stands for nothing: no filling, positions 0 … k − 1."""
    value: Tensor | None = getattr(part, name)
    rows = part.keys if name.startswith("key") else part.X
    if value is not None:
        return value
    if rows is None:
        checks.refuse("parts", "keys of another sequence in all of them", "some without",
                      "join those that have some")
    n, k = rows.shape[:2]
    if name.endswith("padding"):
        return torch.zeros(n, k, dtype=torch.bool, device=rows.device)
    return torch.arange(k, dtype=torch.float64, device=rows.device).expand(n, k)


def _filling(name: str, padding: Any, X: Tensor) -> Tensor | None:
    if padding is None:
        return None
    found: Tensor = torch.as_tensor(padding, device=X.device)
    if found.dtype != torch.bool:
        checks.refuse(name, "bool, True where a token is filling", found.dtype, "padding.bool()")
    checks.shape(name, found, tuple(X.shape[:2]), "one entry per token")
    if bool(found.all(1).any()):
        checks.refuse(name, "at least one real token per sequence", "a sequence of filling only",
                      "drop such sequences")
    return found


def _places(name: str, positions: Any, X: Tensor) -> Tensor | None:
    """Positions of every sequence, (n, k) or (n, k, c); those given for all are not copied."""
    if positions is None:
        return None
    n, k = X.shape[:2]
    found = checks.floating(name, positions).to(X.device)
    if found.ndim == 1:
        checks.shape(name, found, (k,), "one position per token")
        return found.expand(n, k)
    checks.shape(name, found, (n, k, "c") if found.ndim == 3 else (n, k), "one position per token, or (n, k, c)")
    return found


def _rows(parts: list[Tensor], positions: Tensor | None, padding: Tensor | None) -> list[bytes]:
    """The float32 numbers of every sequence: all parts side by side, without filling."""
    if positions is not None:
        parts = [*parts, positions if positions.ndim == 3 else positions.unsqueeze(2)]
    rows = torch.cat([part.float() for part in parts], dim=2).add_(0.0).cpu().numpy()  # no −0
    if padding is None:
        return [row.tobytes() for row in rows]
    return [row[keep].tobytes() for row, keep in zip(rows, (~padding).cpu().numpy(), strict=True)]


def _filled(
    name: str, given: Sequence[Any], hint: str, lengths: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of several lengths, filled up with zeros to the longest, and where they are filled."""
    found = [checks.floating(f"{name}[{i}]", part) for i, part in enumerate(given)]
    if lengths is not None and len(found) != len(lengths):
        checks.refuse(name, f"{len(lengths)}, one for every sequence", len(found), "a list as long as Xs")
    wide = found[0].ndim == 2 or not name.endswith("positions")
    for i, part in enumerate(found):
        checks.shape(f"{name}[{i}]", part, ("k", "d") if wide else ("k",), hint)
        last = (found[0].shape[1],) if wide else ()
        checks.shape(f"{name}[{i}]", part, ("k" if lengths is None else lengths[i], *last), hint)
    counts = torch.tensor([len(part) for part in found], device=found[0].device)
    places = torch.arange(int(counts.max()), device=found[0].device)
    return torch.nn.utils.rnn.pad_sequence(found, True), places >= counts.unsqueeze(1)


def whole_index(index: Sequence[int] | Tensor | np.ndarray, n: int) -> np.ndarray:
    at = np.asarray(index.cpu() if isinstance(index, Tensor) else index)
    if at.dtype == bool or at.ndim != 1 or (at.size and not np.issubdtype(at.dtype, np.integer)):
        checks.refuse("index", "a list of whole numbers", f"{at.dtype} of shape {at.shape}",
                      "mask.nonzero() for a mask")
    if at.size and (at.min() < 0 or at.max() >= n):
        checks.refuse("index", f"0 to {n - 1}", f"{at.min()} to {at.max()}", "a valid index")
    return at.astype(np.int64)


def compact(X: Tensor) -> Tensor:
    """±1 tokens as int8, anything else as it is."""
    X = X.contiguous().cpu()
    return X.to(torch.int8) if bool((X.abs() == 1).all()) else X
