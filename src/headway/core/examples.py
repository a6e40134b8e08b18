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

BLOCK = 1024  # sequences drawn or hashed at a time; part of what a seed and a digest mean, so never changed


class Examples:
    """n pairs (X, Y), Y = F(X) + noise, of an unknown layer F: X (n, k, d), Y (n, k, e).

    padding (n, k), optional, is True where a token is filling; those rows of Y are ignored. ``mask`` says
    what a query may see: "none" (everything) or "causal". ±1 tokens may be int8.

    >>> data = Examples(torch.randn(8, 4, 3), torch.randn(8, 4, 2))
    >>> len(data), data.width, data.out_width
    (8, 3, 2)
    """

    def __init__(self, X: Any, Y: Any, padding: Any = None, mask: str = "none") -> None:
        X = checks.floating("examples.X", X, keep_int8=True)
        Y = checks.floating("examples.Y", Y)
        checks.shape("examples.X", X, ("n", "k", "d"), "one (k, d) matrix per sequence, stacked")
        n, k, _ = X.shape
        checks.shape("examples.Y", Y, (n, k, "e"), "the n and k of X; did you transpose?")
        some_columns("examples.Y", tuple(Y.shape))
        if padding is not None:
            padding = torch.as_tensor(padding, device=X.device)
            if padding.dtype != torch.bool:
                checks.refuse("examples.padding", "bool, True where a token is filling",
                              padding.dtype, "padding.bool()")
            checks.shape("examples.padding", padding, (n, k), "one entry per token")
            if bool(padding.all(1).any()):
                checks.refuse("examples.padding", "at least one real token per sequence",
                              "a sequence of filling only", "drop such sequences")
        if X.device != Y.device:
            checks.refuse("examples.Y", f"device {X.device}, as X", Y.device, "Y.to(X.device)")
        self.X: Tensor = X
        self.Y: Tensor = Y
        self.padding: Tensor | None = padding
        self.mask = checks.choice("examples.mask", mask, MASKS)

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
        part.padding = None if self.padding is None else self.padding[at]
        return part

    def batches(self, size: int) -> Iterator[Examples]:
        """All sequences in order, ``size`` at a time, in memory one batch at a time."""
        checks.whole("size", size)
        for start in range(0, len(self), size):
            yield self.take(range(start, min(start + size, len(self))))

    def digest(self) -> str:
        """SHA-256 over the contents: says whether two sets of examples are the same one."""
        sha = hashlib.sha256(self.mask.encode())
        for batch in self.batches(BLOCK):
            for part in (compact(batch.X), batch.Y, batch.padding):
                if part is not None:
                    sha.update(f"{part.dtype}{tuple(part.shape[1:])}".encode())
                    sha.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()

    def hashes(self) -> np.ndarray:
        """One number for every sequence, (n,) int64: says which sequences two sets of examples share.

        BLAKE2b over the rows that count, X beside Y, in float32: filling does not matter, and a sequence stored in
        another precision is known again. Eight bytes each; two sets of a million unlike sequences share one by
        chance with probability 5e-8.
        """
        sizes = self.width.to_bytes(8, "little") + self.out_width.to_bytes(8, "little")
        found = []
        for batch in self.batches(BLOCK):
            rows = torch.cat([batch.X.float(), batch.Y.float()], dim=2).add_(0.0).cpu().numpy()  # no −0
            keep = None if batch.padding is None else (~batch.padding).cpu().numpy()
            for i, row in enumerate(rows):
                found.append(hashlib.blake2b(row if keep is None else row[keep[i]], digest_size=8,
                                             person=sizes).digest())
        return np.frombuffer(b"".join(found), dtype="<i8").astype(np.int64)

    @classmethod
    def pad(cls, Xs: Sequence[Any], Ys: Sequence[Any], mask: str = "none") -> Examples:
        """Sequences of several lengths, filled up with zeros to the longest, with the padding mask."""
        if len(Xs) != len(Ys) or not len(Xs):
            checks.refuse("Xs, Ys", "as many outputs as inputs, at least one",
                          f"{len(Xs)} and {len(Ys)}", "one Y for every X")
        xs = [checks.floating(f"Xs[{i}]", x) for i, x in enumerate(Xs)]
        ys = [checks.floating(f"Ys[{i}]", y) for i, y in enumerate(Ys)]
        for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
            checks.shape(f"Xs[{i}]", x, ("k", "d"), "tokens as rows")
            checks.shape(f"Ys[{i}]", y, ("k", "e"), "one output row per token")
            checks.shape(f"Xs[{i}]", x, ("k", xs[0].shape[-1]), "tokens as rows, one width for all")
            checks.shape(f"Ys[{i}]", y, (x.shape[0], ys[0].shape[-1]), "one output row per token")
        pad = torch.nn.utils.rnn.pad_sequence
        lengths = torch.tensor([len(x) for x in xs], device=xs[0].device)
        longest = torch.arange(int(lengths.max()), device=xs[0].device)
        return cls(pad(xs, True), pad(ys, True), longest >= lengths.unsqueeze(1), mask)

    @staticmethod
    def open(folder: str | os.PathLike[str]) -> Shards:
        """Examples streamed from a folder of shards; see ``write``."""
        from headway.core.shards import Shards  # a kind of Examples, so it stands below

        return Shards(folder)

    def __repr__(self) -> str:
        return (f"{type(self).__name__}({len(self)} sequences of {self.length} tokens, "
                f"width {self.width} → {self.out_width}, {self.dtype})")


def some_columns(name: str, shape: tuple[int, ...]) -> None:
    if shape[-1] == 0:
        checks.refuse(name, "at least one output column", f"shape {shape}", "check how Y was made")


def join(parts: list[Examples]) -> Examples:
    """One after the other, with padding where any has some."""
    if len(parts) == 1:
        return parts[0]
    padding = None
    if any(p.padding is not None for p in parts):
        full = [torch.zeros(p.Y.shape[:2], dtype=torch.bool, device=p.device) for p in parts]
        padding = torch.cat([f if p.padding is None else p.padding for p, f in zip(parts, full, strict=True)])
    return Examples(torch.cat([p.X for p in parts]), torch.cat([p.Y for p in parts]), padding,
                    parts[0].mask)


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
