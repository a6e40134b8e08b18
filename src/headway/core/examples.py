"""Examples (X, F(X)): in memory, drawn from a layer under a law, or streamed from shards on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.core import checks
from headway.core.files import open_tensors, workshop, write_tensors
from headway.core.layer import MASKS, AttentionLayer, save_layer

BLOCK = 1024  # sequences drawn at a time; part of what a seed means, so never changed
SHARD = re.compile(r"examples-(\d{5})-of-(\d{5})\.safetensors")
KIND = "headway-examples-1"


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
        _columns("examples.Y", tuple(Y.shape))
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
        at = torch.as_tensor(_whole_index(index, len(self)), device=self.device)
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
            for part in (_compact(batch.X), batch.Y, batch.padding):
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
        return Shards(folder)

    def __repr__(self) -> str:
        return (f"{type(self).__name__}({len(self)} sequences of {self.length} tokens, "
                f"width {self.width} → {self.out_width}, {self.dtype})")


class Shards(Examples):
    """Examples in files ``examples-00000-of-00010.safetensors``: the same interface, never all in memory."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.files = _shard_files(self.folder)
        self._open: dict[int, Any] = {}
        self._starts = [0]
        first: dict[str, Any] | None = None
        for path in self.files:
            head = _shard_head(path)
            first = first or head
            if {k: head[k] for k in ("X", "Y", "padding", "mask")} != {
                k: first[k] for k in ("X", "Y", "padding", "mask")
            }:
                checks.refuse(str(path), f"the shapes of {self.files[0].name}", "others",
                              "write all shards with one call of headway make")
            self._starts.append(self._starts[-1] + head["count"])
        assert first is not None
        self._head = first
        self.mask = first["mask"]

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def length(self) -> int:
        return int(self._head["X"][0])

    @property
    def width(self) -> int:
        return int(self._head["X"][1])

    @property
    def out_width(self) -> int:
        return int(self._head["Y"][1])

    @property
    def dtype(self) -> torch.dtype:
        return self.take([0]).dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def _file(self, j: int) -> Any:
        """Opened once: opening costs more than reading one sequence."""
        if j not in self._open:
            self._open[j] = open_tensors(self.files[j])
        return self._open[j]

    def take(self, index: Sequence[int] | Tensor | np.ndarray) -> Examples:
        at = _whole_index(index, len(self))
        if not at.size:
            return self.take([0]).take([])
        shard = np.searchsorted(self._starts, at, side="right") - 1
        names = ["X", "Y"] + (["padding"] if self._head["padding"] else [])
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        # Runs of neighbours are read in one piece; a scattered index reads one sequence at a time.
        cuts = np.flatnonzero((np.diff(at) != 1) | (np.diff(shard) != 0)) + 1
        for run in np.split(np.arange(at.size), cuts):
            j = int(shard[run[0]])
            low = int(at[run[0]]) - self._starts[j]
            for name in names:
                parts[name].append(self._file(j).get_slice(name)[low : low + len(run)])
        whole = {name: torch.cat(pieces) for name, pieces in parts.items()}
        padding = whole["padding"].bool() if "padding" in whole else None
        try:
            return Examples(whole["X"], whole["Y"], padding, self.mask)
        except checks.InputError:
            self._name_what_is_not_finite()
            raise

    def _name_what_is_not_finite(self) -> None:
        """The first such entry of all, whatever part was being read: the same words however it was come upon."""
        for j, path in enumerate(self.files):
            for low in range(0, self._starts[j + 1] - self._starts[j], BLOCK):
                for name in ("X", "Y"):
                    part = self._file(j).get_slice(name)[low : low + BLOCK]
                    bad = (~torch.isfinite(part)).nonzero()
                    if not len(bad):
                        continue
                    row, token, feature = bad[0].tolist()
                    checks.refuse(
                        f"examples.{name}", "finite numbers", f"{part[row, token, feature].item()} in {path.name}, "
                        f"row {low + row} there (sequence {self._starts[j] + low + row} of all), token {token}, "
                        f"feature {feature}", "drop or repair such sequences")


def write(
    folder: str | os.PathLike[str], batches: Iterable[Examples], shards: int = 1,
    truth: AttentionLayer | None = None,
) -> Shards:
    """Write batches to shards in a temporary folder beside ``folder``, and move it there when all are written.

    ``batches`` yields as many Examples as there are shards. ±1 tokens are stored as int8. The layer they come from,
    if given, goes to truth.safetensors: for comparing afterwards, never read by a learner.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        checks.refuse("folder", "a new or empty folder", f"{target}, which is neither", "another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    with workshop(target) as hidden:
        inside = hidden / target.name
        inside.mkdir()
        written = 0
        for batch in batches:
            _write_shard(inside / f"examples-{written:05d}-of-{shards:05d}.safetensors", batch)
            written += 1
        if written != shards:
            checks.refuse("shards", "as many as there are batches", f"{shards} for {written}", f"shards={written}")
        if truth is not None:
            save_layer(inside / "truth.safetensors", truth)
        os.replace(inside, target)
    return Shards(target)


def _write_shard(path: Path, batch: Examples) -> None:
    tensors = {"X": _compact(batch.X), "Y": batch.Y}
    if batch.padding is not None:
        tensors["padding"] = batch.padding.to(torch.uint8)
    write_tensors(path, tensors, {"kind": KIND, "mask": batch.mask})


@checks.memory("count, length")
def draw(
    layer: AttentionLayer,
    count: int,
    length: int,
    *,
    law: str | Any = "boolean",
    noise: float = 0.0,
    seed: int = 0,
) -> Examples:
    """n pairs (X, F(X) + noise) with X from a law.

    law: "boolean" (entries ±1), "gaussian" (standard normal entries), or a vocabulary matrix (v, d)
    whose rows are drawn uniformly. noise: standard deviation of Gaussian label noise relative to the root
    mean square of the labels (estimated once from sequences of their own).
    """
    return _join(list(draw_batches(layer, count, length, law=law, noise=noise, seed=seed)))


def draw_batches(
    layer: AttentionLayer,
    count: int,
    length: int,
    *,
    law: str | Any = "boolean",
    noise: float = 0.0,
    seed: int = 0,
) -> Iterator[Examples]:
    """What ``draw`` draws, ``BLOCK`` sequences at a time."""
    inputs = input_law(law, layer.width, checks.whole("length", length), layer.Theta.dtype)
    count = checks.whole("count", count)
    noise, seed = checks.number("noise", noise), checks.whole("seed", seed, 0)
    device = layer.Theta.device
    sigma = 0.0
    if noise > 0:
        pilot = layer(inputs(256, _block_generator(seed, 2**32 - 1)).to(device))
        sigma = noise * float(pilot.to(torch.float64).square().mean().sqrt())
    for block, start in enumerate(range(0, count, BLOCK)):
        source = _block_generator(seed, block)
        X = inputs(min(BLOCK, count - start), source).to(device)
        Y = layer(X)
        if sigma:
            Y = Y + sigma * torch.randn(Y.shape, generator=source, dtype=torch.float64).to(Y)
        yield Examples(X, Y, mask=layer.mask)


def ask(
    oracle: Callable[[Tensor], Any], count: int, length: int, width: int, *, law: str | Any = "boolean",
    mask: str = "none", seed: int = 0, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu",
) -> Examples:
    """n pairs (X, oracle(X)) with X from a law, as in ``draw``: the black box is shown random inputs and nothing
    else. It is given X (n, k, d) of ``dtype`` and answers with Y (n, k, e). One that answers differently to the
    same input is refused: dropout, or a batch norm in training.

    >>> from headway.core.layer import AttentionLayer
    >>> ask(AttentionLayer.random(heads=1, width=4), count=10, length=3, width=4)
    Examples(10 sequences of 3 tokens, width 4 → 4, torch.float64)
    """
    if not callable(oracle):
        checks.refuse("oracle", "a function of X (n, k, d)", type(oracle).__name__, "module.forward, or a lambda")
    count, length, width = (checks.whole(name, value) for name, value in (
        ("count", count), ("length", length), ("width", width)))
    checks.whole("seed", seed, 0)
    inputs = input_law(law, width, length, dtype)

    def answer(X: Tensor) -> Tensor:
        with torch.no_grad():
            Y = oracle(X.to(device, dtype))
        Y = checks.floating("the oracle's answer", Y)
        checks.shape("the oracle's answer", Y, (len(X), length, "e"), "one output row per token of X")
        return Y.detach().to(device)

    first = inputs(min(count, 8), _block_generator(seed, 0))
    one, other = answer(first), answer(first)
    # Sums in another order are the same answer; a dropped unit is not.
    if float((one - other).abs().max()) > 1e3 * torch.finfo(one.dtype).eps * float(one.abs().max()):
        checks.refuse("oracle", "the same answer to the same input", "two that differ",
                      "module.eval(), or learn from stored examples, with their noise")
    parts = []
    for block, start in enumerate(range(0, count, BLOCK)):
        X = inputs(min(BLOCK, count - start), _block_generator(seed, block))
        parts.append(Examples(X.to(device), answer(X), mask=mask))
    return _join(parts)


def _block_generator(seed: int, block: int) -> torch.Generator:
    word = np.random.SeedSequence([seed, block]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(word >> np.uint64(1)))


def input_law(
    law: str | Any, width: int, length: int, dtype: torch.dtype
) -> Callable[[int, torch.Generator], Tensor]:
    """(n, generator) ↦ X (n, length, width) on the CPU; ±1 tokens as int8."""
    vocabulary: Tensor | None = None
    if isinstance(law, str):
        checks.choice("law", law, ("boolean", "gaussian"))
    else:
        vocabulary = checks.floating("law", law)
        checks.shape("law", vocabulary, ("v", width), "one row per word of the vocabulary")
        if not len(vocabulary):
            checks.refuse("law", "a vocabulary of at least one word", f"shape {tuple(vocabulary.shape)}",
                          "law='boolean'")

    def inputs(size: int, generator: torch.Generator) -> Tensor:
        shape = (size, length, width)
        if vocabulary is not None:
            words = torch.randint(len(vocabulary), shape[:2], generator=generator)
            return vocabulary.cpu()[words].to(dtype)
        if law == "boolean":
            return (2 * torch.randint(2, shape, generator=generator) - 1).to(torch.int8)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return inputs


def even(count: int, parts: int) -> list[int]:
    """``count`` as a sum of ``parts`` sizes that differ by one at most."""
    return [count // parts + (j < count % parts) for j in range(parts)]


def rebatch(batches: Iterable[Examples], sizes: Sequence[int]) -> Iterator[Examples]:
    """The same sequences cut into batches of the given sizes; holds one batch and one block at a time."""
    source = iter(batches)
    held: list[Examples] = []
    for size in sizes:
        checks.whole("sizes", size, 0)
        while sum(map(len, held)) < size:
            block = next(source, None)
            if block is None:
                checks.refuse("sizes", f"at most {sum(map(len, held))} more sequences", size,
                              "sizes that add up to the number of sequences")
            held.append(block)
        whole = _join(held)
        yield whole.take(range(size))
        held = [whole.take(range(size, len(whole)))]  # kept even if empty: it knows the shapes


def _columns(name: str, shape: tuple[int, ...]) -> None:
    if shape[-1] == 0:
        checks.refuse(name, "at least one output column", f"shape {shape}", "check how Y was loaded")


def _join(parts: list[Examples]) -> Examples:
    if len(parts) == 1:
        return parts[0]
    padding = None
    if any(p.padding is not None for p in parts):
        full = [torch.zeros(p.Y.shape[:2], dtype=torch.bool, device=p.device) for p in parts]
        padding = torch.cat([f if p.padding is None else p.padding for p, f in zip(parts, full, strict=True)])
    return Examples(torch.cat([p.X for p in parts]), torch.cat([p.Y for p in parts]), padding,
                    parts[0].mask)


def _whole_index(index: Sequence[int] | Tensor | np.ndarray, n: int) -> np.ndarray:
    at = np.asarray(index.cpu() if isinstance(index, Tensor) else index)
    if at.dtype == bool or at.ndim != 1 or (at.size and not np.issubdtype(at.dtype, np.integer)):
        checks.refuse("index", "a list of whole numbers", f"{at.dtype} of shape {at.shape}",
                      "mask.nonzero() for a mask")
    if at.size and (at.min() < 0 or at.max() >= n):
        checks.refuse("index", f"0 to {n - 1}", f"{at.min()} to {at.max()}", "a valid index")
    return at.astype(np.int64)


def _compact(X: Tensor) -> Tensor:
    """±1 tokens as int8, anything else as it is."""
    X = X.contiguous().cpu()
    return X.to(torch.int8) if bool((X.abs() == 1).all()) else X


def _shard_files(folder: Path) -> list[Path]:
    what = f"a folder of shards {SHARD.pattern.replace(chr(92), '')}".replace("(d{5})", "00000")
    if not folder.is_dir():
        checks.refuse("examples", what, f"{folder}, which is no folder", "headway make FOLDER ...")
    found = sorted(p for p in folder.iterdir() if SHARD.fullmatch(p.name))
    if not found:
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:4]) or "nothing"
        checks.refuse("examples", what, f"{folder} with {names}",
                      "headway make FOLDER ..., or headway.core.examples.write from Python")
    total = int(SHARD.fullmatch(found[0].name).group(2))  # type: ignore[union-attr]
    expected = [f"examples-{j:05d}-of-{total:05d}.safetensors" for j in range(total)]
    if [p.name for p in found] != expected:
        missing = sorted(set(expected) - {p.name for p in found})
        checks.refuse("examples", f"all {total} shards", f"{len(found)} of them"
                      + (f", without {missing[0]}" if missing else ""), "write the folder again")
    return found


def _shard_head(path: Path) -> dict[str, Any]:
    """Count, shapes and mask of a shard, from its header alone."""
    with open_tensors(path) as file:
        names = set(file.keys())
        meta = file.metadata() or {}
        if not {"X", "Y"} <= names or names - {"X", "Y", "padding"}:
            checks.refuse(str(path), "tensors X, Y and optionally padding", sorted(names),
                          "headway make, or headway.core.examples.write")
        sizes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    if len(sizes["X"]) != 3 or len(sizes["Y"]) != 3 or sizes["X"][:2] != sizes["Y"][:2]:
        checks.refuse(str(path), "X (n, k, d) and Y (n, k, e)", json.dumps(sizes), "did you transpose?")
    _columns(f"{path}: Y", sizes["Y"])
    return {"count": sizes["X"][0], "X": sizes["X"][1:], "Y": sizes["Y"][1:],
            "padding": "padding" in names, "mask": checks.choice("mask", meta.get("mask", "none"), MASKS)}
