"""Which examples a rank has: neighbouring shards of a folder, or a stretch of those that all have in memory.

Sequences keep the numbers that they have in one process. So a choice among them, such as "so many, spread
evenly", is one choice of numbers wherever it is made, and each rank reads those of its own: ``own_of``. The few
that all must see, a sample for a probe or the first of all, are read by those who have them and sent to the others:
``take``.
"""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.core import checks
from headway.core.examples import BESIDE, BLOCK, Examples
from headway.core.shards import Shards
from headway.core.sources import Answers
from headway.linalg.totals import ALONE, Alone

PIECE = 1 << 26  # bytes of a sample that are sent at a time


class Parted(Examples):
    """Examples of which every rank reads its own alone, those from ``begin`` up to ``end``. What is asked here is
    asked by all ranks together, and answered alike."""

    def __init__(self, store: Examples, ranks: Alone) -> None:
        self.store, self.ranks, self.mask = store, ranks, store.mask
        if isinstance(store, Answers):
            checks.refuse("examples", "stored examples, with more than one rank",
                          "a black box that may be asked for more", "headway.core.shards.write, then Examples.open")
        self.edges, self.shards = _edges(store, ranks.size)
        self.begin, self.end = self.edges[ranks.rank], self.edges[ranks.rank + 1]
        _refuse_others(store, ranks)
        with ranks.together():
            kind: dict[str, Any] = {}
            if ranks.rank == _owner(self.edges):
                first = store.take([self.begin])
                kind = {name: [str(part.dtype).removeprefix("torch."), list(part.shape[1:])]
                        for name, part in _named(first).items()}
        self._kinds = _first_known(kind, ranks)
        self._hashes: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.store)

    @property
    def length(self) -> int:
        return int(self._kinds["X"][1][0])

    @property
    def width(self) -> int:
        return int(self._kinds["X"][1][1])

    @property
    def out_width(self) -> int:
        return int(self._kinds["Y"][1][1])

    @property
    def key_width(self) -> int | None:
        return int(self._kinds["keys"][1][1]) if "keys" in self._kinds else None

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self._kinds["Y"][0])
        return found

    @property
    def device(self) -> torch.device:
        return self.store.device

    def parts(self) -> list[dict[str, Any]]:
        """Of each rank how many sequences it has, and in which shards."""
        return [{"sequences": end - begin, **({"shards": self.shards[r]} if self.shards else {})}
                for r, (begin, end) in enumerate(pairwise(self.edges))]

    def own(self, index: np.ndarray) -> np.ndarray:
        """Which of these sequences this rank has."""
        found: np.ndarray = (index >= self.begin) & (index < self.end)
        return found

    def take(self, index: Any) -> Examples:
        """These sequences, on every rank: each reads its own, and a total of one and nothing is that one."""
        index = np.asarray(index, dtype=np.int64)
        mine = self.own(index)
        parts: dict[str, list[Tensor]] = {name: [] for name in self._kinds}
        each = sum(int(np.prod(shape)) * 8 for _, shape in self._kinds.values())
        step = max(1, PIECE // max(each, 1))
        for at in range(0, max(len(index), 1), step):
            some, here = index[at : at + step], mine[at : at + step]
            with self.ranks.together():
                read = _named(self.store.take(some[here])) if here.any() else {}
            for name, (dtype, shape) in self._kinds.items():
                whole = torch.zeros(len(some), *shape, dtype=getattr(torch, dtype), device=self.device)
                if here.any():
                    whole[torch.from_numpy(np.flatnonzero(here)).to(self.device)] = read[name]
                parts[name].append(self.ranks.total(whole))
        return Examples(**{name: torch.cat(pieces) for name, pieces in parts.items()}, mask=self.mask)

    def blank(self) -> Examples:
        """One sequence that no rank has, for one that has none; its rows are not to count."""
        made = {name: torch.zeros(1, *shape, dtype=getattr(torch, dtype), device=self.device)
                for name, (dtype, shape) in self._kinds.items()}
        return Examples(**made, mask=self.mask)

    def hashes(self) -> np.ndarray:
        if self._hashes is None:
            found = torch.zeros(len(self), dtype=torch.int64)
            with self.ranks.together():
                for at in range(self.begin, self.end, BLOCK):
                    end = min(at + BLOCK, self.end)
                    found[at:end] = torch.from_numpy(self.store.take(range(at, end)).hashes())
            self._hashes = self.ranks.total(found).numpy()
        return self._hashes

    def digest(self) -> str:
        return digest_of(self)


class Sample(Examples):
    """Some of a list, in memory under the numbers that they have in it."""

    def __init__(self, part: Examples, index: np.ndarray) -> None:
        super().__init__(part.X, part.Y, part.padding, part.mask, **{
            name: value for name, value in part.beside().items() if name != "padding"})
        self.order = np.argsort(index, kind="stable")
        self.index = index[self.order]

    def take(self, index: Any) -> Examples:
        return super().take(self.order[np.searchsorted(self.index, np.asarray(index, dtype=np.int64))])


def digest_of(examples: Examples) -> str:
    """Of the numbers of all sequences, each of which one rank can form: what tells two lists apart where nobody
    reads them from end to end."""
    return hashlib.sha256(examples.mask.encode() + examples.hashes().astype("<i8").tobytes()).hexdigest()


def ranks_of(examples: Examples) -> Alone:
    return examples.ranks if isinstance(examples, Parted) else ALONE


def own_of(examples: Examples, index: np.ndarray) -> np.ndarray:
    """Those of these sequences that this rank has."""
    return index[examples.own(index)] if isinstance(examples, Parted) else index


def store_of(examples: Examples) -> Examples:
    """What this rank reads its own from."""
    return examples.store if isinstance(examples, Parted) else examples


def _named(part: Examples) -> dict[str, Tensor]:
    return {"X": part.X, "Y": part.Y, **{name: value for name, value in part.beside().items() if name in BESIDE}}


def _edges(store: Examples, size: int) -> tuple[list[int], list[list[str]]]:
    """Where the part of each rank begins and the last ends, and the shards of each. Whole shards, as evenly as
    their sizes allow: each goes to the rank in whose part its middle lies."""
    n = len(store)
    if not isinstance(store, Shards):
        return [n * r // size for r in range(size + 1)], []
    starts = store.starts
    owners = [(low + high) * size // (2 * n) for low, high in pairwise(starts)]
    names = [[path.name for path, owner in zip(store.files, owners, strict=True) if owner == r]
             for r in range(size)]
    edges = [starts[sum(owner < r for owner in owners)] for r in range(size)]
    return [*edges, n], names


def _owner(edges: list[int]) -> int:
    """The first rank that has anything."""
    return next((r for r, (low, high) in enumerate(pairwise(edges)) if high > low), 0)


def _first_known(kind: dict[str, Any], ranks: Alone) -> dict[str, Any]:
    """What one rank knows, on all."""
    words = json.dumps(kind).encode() if kind else b""
    length = ranks.total(len(words))
    told = torch.zeros(length, dtype=torch.uint8)
    told[: len(words)] = torch.frombuffer(bytearray(words or b" "), dtype=torch.uint8)[: len(words)]
    found: dict[str, Any] = json.loads(bytes(ranks.total(told).numpy()))
    return found


def _refuse_others(store: Examples, ranks: Alone) -> None:
    """Ranks that were given different examples."""
    if isinstance(store, Shards):
        mine = json.dumps([[path.name for path in store.files], store.starts, store.mask])
    else:
        mine = f"{store.digest()}{store.dtype}"
    number = int.from_bytes(hashlib.sha256(mine.encode()).digest()[:6], "little")
    if ranks.total(number) != ranks.size * number or ranks.largest(number) != number:
        raise checks.InputError(
            "examples: expected the same on every rank, which then works on a part of them; got different ones. "
            "Try: Examples.open of the whole folder on each, or all of the examples.")
