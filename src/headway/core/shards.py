"""Examples on disk: files ``examples-00000-of-00010.safetensors`` in a folder, written whole and read in pieces."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.core import checks
from headway.core.examples import BESIDE, BLOCK, Examples, compact, join, some_columns, whole_index
from headway.core.factored import FactoredLayer
from headway.core.files import Slices, open_tensors, workshop, write_tensors
from headway.core.layer import MASKS, AttentionLayer, save_layer

SHARD = re.compile(r"examples-(\d{5})-of-(\d{5})\.safetensors")
KIND = "headway-examples-1"
GAP = 64 << 10  # bytes that are read and left out sooner than a reading is begun anew


class Shards(Examples):
    """Examples in files ``examples-00000-of-00010.safetensors``: the same interface, never all in memory."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.files = _shard_files(self.folder)
        self._heads: dict[int, Slices] = {}
        self._starts = [0]
        first: dict[str, Any] | None = None
        for path in self.files:
            head = _shard_head(path)
            first = first or head
            if {**head, "count": 0} != {**first, "count": 0}:
                checks.refuse(str(path), f"the shapes of {self.files[0].name}", "others",
                              "write all shards with one call of headway make")
            self._starts.append(self._starts[-1] + head["count"])
        assert first is not None
        self._head = first
        self.mask = first["mask"]

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def starts(self) -> list[int]:
        """The number of the first sequence of each shard, and that of all."""
        return list(self._starts)

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
    def key_width(self) -> int | None:
        return int(self._head["keys"][1]) if "keys" in self._head else None

    @property
    def dtype(self) -> torch.dtype:
        return self.take([0]).dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def _file(self, j: int) -> Slices:
        """Its header is read once: that costs more than reading one sequence."""
        if j not in self._heads:
            self._heads[j] = Slices(self.files[j])
        return self._heads[j]

    def take(self, index: Sequence[int] | Tensor | np.ndarray) -> Examples:
        at = whole_index(index, len(self))
        if not at.size:
            return self.take([0]).take([])
        names = [name for name in ("X", "Y", *BESIDE) if name in self._head]
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        # Runs of near neighbours are read in one piece, BLOCK at most, and what lies between is left out again; a
        # scattered index reads one sequence at a time.
        shard = np.searchsorted(self._starts, at, side="right") - 1
        near = 1 + GAP // (8 * self.length * (self.width + self.out_width))
        step = np.diff(at)
        cuts = (step < 1) | (step > near) | (np.diff(at // BLOCK) != 0) | (np.diff(shard) != 0)
        for run in np.split(at, np.flatnonzero(cuts) + 1):
            j = int(np.searchsorted(self._starts, run[0], side="right")) - 1
            low, high = int(run[0]) - self._starts[j], int(run[-1]) + 1 - self._starts[j]
            for name in names:
                part = self._file(j).rows(name, low, high)
                parts[name].append(part if len(part) == len(run) else part[torch.from_numpy(run - run[0])])
        whole = {name: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for name, pieces in parts.items()}
        for name in {"padding", "key_padding"} & set(whole):
            whole[name] = whole[name].bool()
        try:
            return Examples(**whole, mask=self.mask)
        except checks.InputError:
            self._name_what_is_not_finite()
            raise

    def _name_what_is_not_finite(self) -> None:
        """The first such entry of all, whatever part was being read: the same words however it was come upon."""
        for j, path in enumerate(self.files):
            for low in range(0, self._starts[j + 1] - self._starts[j], BLOCK):
                for name in (name for name in self._head if name not in ("count", "mask")):
                    part = self._file(j).rows(name, low, min(low + BLOCK, self._starts[j + 1] - self._starts[j]))
                    bad = (~torch.isfinite(part)).nonzero()
                    if not len(bad):
                        continue
                    row, token, *feature = bad[0].tolist()
                    last = f", feature {feature[0]}" if feature else ""
                    checks.refuse(
                        f"examples.{name}", "finite numbers", f"{part[tuple(bad[0])].item()} in {path.name}, "
                        f"row {low + row} there (sequence {self._starts[j] + low + row} of all), token {token}"
                        f"{last}", "drop or repair such sequences")


def write(
    folder: str | os.PathLike[str], batches: Iterable[Examples], shards: int | None = 1,
    truth: AttentionLayer | FactoredLayer | None = None,
) -> Shards:
    """Write batches to shards in a temporary folder beside ``folder``, and move it there when all are written.

    ``batches`` yields as many Examples as there are shards (None: how many is seen at the end). ±1 tokens are
    stored as int8. The layer they come from, if given, goes to truth.safetensors: for comparing afterwards, never
    read by a learner.
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
            _write_shard(inside / f"examples-{written:05d}-of-{shards or 0:05d}.safetensors", batch)
            written += 1
        if shards is None:
            shards = written
            for j in range(written):
                name = f"examples-{j:05d}-of-{{:05d}}.safetensors"
                os.replace(inside / name.format(0), inside / name.format(shards))
        if written != shards:
            checks.refuse("shards", "as many as there are batches", f"{shards} for {written}", f"shards={written}")
        if truth is not None:
            save_layer(inside / "truth.safetensors", truth)
        os.replace(inside, target)
    return Shards(target)


def _write_shard(path: Path, batch: Examples) -> None:
    tensors = {"X": compact(batch.X), "Y": batch.Y}
    for name, value in batch.beside().items():
        tensors[name] = value.to(torch.uint8) if value.dtype == torch.bool else value
    if "keys" in tensors:
        tensors["keys"] = compact(tensors["keys"])
    write_tensors(path, tensors, {"kind": KIND, "mask": batch.mask})


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
        whole = join(held)
        yield whole.take(range(size))
        held = [whole.take(range(size, len(whole)))]  # kept even if empty: it knows the shapes


def _shard_files(folder: Path) -> list[Path]:
    what = f"a folder of shards {SHARD.pattern.replace(chr(92), '')}".replace("(d{5})", "00000")
    if not folder.is_dir():
        checks.refuse("examples", what, f"{folder}, which is no folder", "headway make FOLDER ...")
    found = sorted(p for p in folder.iterdir() if SHARD.fullmatch(p.name))
    if not found:
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:4]) or "nothing"
        checks.refuse("examples", what, f"{folder} with {names}",
                      "headway make FOLDER ..., or headway.core.shards.write from Python")
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
        if not {"X", "Y"} <= names or names - {"X", "Y", *BESIDE}:
            checks.refuse(str(path), f"tensors X, Y and optionally {', '.join(BESIDE)}", sorted(names),
                          "headway make, or headway.core.shards.write")
        sizes = {name: tuple(file.get_slice(name).get_shape()) for name in ("X", "Y", *BESIDE) if name in names}
    if len(sizes["X"]) != 3 or len(sizes["Y"]) != 3 or sizes["X"][:2] != sizes["Y"][:2]:
        checks.refuse(str(path), "X (n, k, d) and Y (n, k, e)", json.dumps(sizes), "did you transpose?")
    for name, size in sizes.items():
        like = sizes.get("keys" if name.startswith("key") else "X", ())
        if size[:2] != like[:2] or size[0] != sizes["X"][0] or (name == "keys" and len(size) != 3):
            checks.refuse(str(path), f"{name} with a row for every token", json.dumps(sizes), "did you transpose?")
    some_columns(f"{path}: Y", sizes["Y"])
    return {"count": sizes["X"][0], **{name: size[1:] for name, size in sizes.items()},
            "mask": checks.choice("mask", meta.get("mask", "none"), MASKS)}
