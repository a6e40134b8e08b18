"""Random batches for descent: from sequences that are all held, from a list too long for that, from a black box.

What is held is one table on the device, and a batch is a random part of it. Where there is more than that, the
sequences of a batch are replaced, once they were used, by the next of a feed. So every sequence is met, a batch is
mixed from all over the list, and the table's memory stays where it is, as a captured graph needs. A feed is a list
read piece by piece (Reader) or a black box asked again (Fresh). What comes when depends on the seed and not on the
clock.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.core.examples import BLOCK, Examples
from headway.core.sources import Answers
from headway.learning.parts import own_of, store_of
from headway.learning.source import Source, bytes_of, prints_of, spaced
from headway.linalg.totals import ALONE, Alone

Model = Callable[[Any, Sequence[Tensor], Tensor | None], Tensor]  # F(X) from inputs, the unknowns and what is seen
LOOKED = 512  # sequences of which the error is found at a time
AHEAD = 2  # pieces read and not yet used
MET = {"cuda": 8, "cpu": 1}  # times a sequence is met before another takes its place: a GPU outruns the files


@dataclass(frozen=True)
class Table:
    """Sequences on one device: X (n, k, d), Y (n, k, e), what is seen (1 or n, k, k), which rows count; keys of
    other sequences and positions, where there are some."""

    X: Tensor
    Y: Tensor
    see: Tensor | None = None
    valid: Tensor | None = None
    Z: Tensor | None = None
    here: Tensor | None = None
    there: Tensor | None = None

    @property
    def inputs(self) -> Any:
        """What a model is called with: X alone, or with keys and positions."""
        more = (self.Z, self.here, self.there)
        return self.X if all(part is None for part in more) else (self.X, *more)

    def pick(self, index: Tensor) -> Table:
        return self._each(lambda part: part[index])

    def put(self, index: Tensor, other: Table) -> None:
        """Write the sequences of another table over these, in place."""
        for part in fields(self):
            mine, new = getattr(self, part.name), getattr(other, part.name)
            if mine is not None and not (part.name == "see" and mine.shape[0] == 1):
                mine.index_copy_(0, index, new)

    def part(self, begin: int, end: int) -> Table:
        """The sequences from ``begin`` up to ``end``; no copy."""
        return self._each(lambda part: part[begin:end])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Table:
        """Every part changed that has one entry for each sequence."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return Table(**{name: part if part is None or (name == "see" and part.shape[0] == 1) else change(part)
                        for name, part in parts.items()})

    def empty(self, count: int) -> Table:
        """Memory for ``count`` such sequences."""

        def like(part: Tensor | None) -> Tensor | None:
            return None if part is None else part.new_empty(count, *part.shape[1:])

        return Table(self.X.new_empty(count, *self.X.shape[1:]), self.Y.new_empty(count, *self.Y.shape[1:]),
                     self.see if self.valid is None else like(self.see), like(self.valid), like(self.Z),
                     like(self.here), like(self.there))

    def mean_square(self, R: Tensor) -> Tensor:
        if self.valid is None:
            return R.square().mean()
        return (R * self.valid).square().sum() / (self.valid.sum() * R.shape[2]).clamp_min(1)

    @property
    def rows(self) -> int:
        """Rows that count."""
        return self.Y.shape[0] * self.Y.shape[1] if self.valid is None else int(self.valid.sum())

    def spread(self, ranks: Alone = ALONE) -> float:
        """Mean square of the labels about their mean: what a constant would leave."""
        Y = self.Y.flatten(0, 1) if self.valid is None else self.Y[self.valid.squeeze(2) > 0]
        if ranks.alone:
            return float((Y.double() - Y.double().mean(0)).square().mean())
        total, count = ranks.totals(Y.double().sum(0), Y.numel())
        apart = (Y.double() - total * len(total) / count).square().sum()
        return ranks.total(float(apart)) / int(count)

    @torch.no_grad()
    def error(
        self, model: Model, values: Sequence[Tensor], sequences: int = LOOKED, ranks: Alone = ALONE
    ) -> float:
        """Mean square error of a model, in pieces that fit."""
        total = 0.0
        for at in torch.split(torch.arange(len(self.X), device=self.X.device), sequences):
            part = self.pick(at)
            total += part.rows * float(part.mean_square(model(part.inputs, values, part.see) - part.Y))
        return ranks.total(total) / ranks.total(self.rows)


def table_of(source: Source, index: np.ndarray, dtype: torch.dtype = torch.float32) -> Table:
    """These sequences, of a rank its own, in one piece, in the coordinates of the source."""
    with source.ranks.together():
        parts = list(source.stream(index, 1, dtype))
    see = parts[0].see
    if see is not None and see.shape[0] > 1:
        see = torch.cat([part.see for part in parts if part.see is not None])

    def joined(name: str) -> Tensor | None:
        found = [getattr(part, name, None) for part in parts]
        return None if found[0] is None else torch.cat([part for part in found if part is not None])

    return Table(torch.cat([part.X for part in parts]), torch.cat([part.Y for part in parts]), see,
                 *(joined(name) for name in ("valid", "Z", "here", "there")))


class Batches:
    """Random batches of a table, pass by pass without replacement: every sequence is met as often as any other.
    With a feed, ``size // met`` sequences of every batch are replaced by the next of the feed."""

    def __init__(
        self, table: Table, size: int, generator: torch.Generator, feed: Feed | None = None, met: int = 1
    ) -> None:
        self.table, self.size, self.generator, self.feed = table, size, generator, feed
        self.index = torch.zeros(size, dtype=torch.long, device=table.X.device)
        self.order = torch.empty(0, dtype=torch.long)
        self.turnover = max(1, size // met)
        self.used = 0  # sequences in all batches together
        self.fed = 0  # sequences that came from the feed later on

    def advance(self) -> None:
        """Choose the next batch."""
        if self.used and self.feed is not None:
            self._replace(self.feed)
        if len(self.order) < self.size:
            self.order = torch.randperm(len(self.table.X), generator=self.generator)
            self.order = self.order.to(self.index.device)
        self.index.copy_(self.order[: self.size])
        self.order = self.order[self.size :]
        self.used += self.size

    def now(self) -> Table:
        """The batch, read from the same memory every time."""
        return self.table.pick(self.index)

    @property
    def different(self) -> float:
        """Sequences that were held so far, each counted once."""
        most = math.inf if self.feed is None else self.feed.different
        return min(len(self.table.X) + self.fed, most)

    @property
    def again(self) -> bool:
        """Whether sequences have been met more than once, on average. Until then none is known by heart."""
        return self.used > self.different

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Where it is: with ``restore`` the batches to come are the same."""
        parts = {"order": self.order, "index": self.index, "generator": self.generator.get_state()}
        said: dict[str, Any] = {"used": self.used, "fed": self.fed}
        if isinstance(self.feed, Reader):
            parts["slots"], said["place"] = self.feed.slots, list(self.feed.place)
        return parts, said

    def restore(self, parts: dict[str, Tensor], said: dict[str, Any]) -> None:
        """The table is filled again by whoever makes it (Reader.again)."""
        self.order = parts["order"].to(self.order.device)
        if len(parts["index"]) == len(self.index):  # a captured graph reads it where it is
            self.index.copy_(parts["index"])
        self.generator.set_state(parts["generator"].cpu())
        self.used, self.fed = said["used"], said["fed"]

    def _replace(self, feed: Feed) -> None:
        at = 0
        while at < self.turnover:
            new = feed.give(self.turnover - at)
            if new is None:
                break
            self.table.put(self.index[at : at + len(new.X)], new)
            feed.put_at(self.index[at : at + len(new.X)])
            at += len(new.X)
        self.fed += at


class SplitBatches(Batches):
    """The batches of one process, drawn from the numbers of all sequences: a rank has those of its table."""

    def __init__(
        self, table: Table, size: int, generator: torch.Generator, own: np.ndarray, ranks: Alone
    ) -> None:
        super().__init__(table, size, generator)
        self.count, self.ranks = len(own), ranks
        self.at = torch.full((self.count,), -1, dtype=torch.long)  # where in the table a sequence is, if at all
        self.at[torch.from_numpy(np.flatnonzero(own))] = torch.arange(int(own.sum()))

    def advance(self) -> None:
        if len(self.order) < self.size:
            self.order = torch.randperm(self.count, generator=self.generator)
        here = self.at[self.order[: self.size]]
        self.order = self.order[self.size :]
        self.index = here[here >= 0].to(self.table.X.device)
        self.used += self.size

    @property
    def different(self) -> float:
        return self.count


class FedBatches(Batches):
    """Where each rank has more than it may hold: batches of its own, as large as its part of all sequences, from
    what it reads on the way."""

    def __init__(
        self, table: Table, size: int, generator: torch.Generator, feed: Feed | None, met: int, ranks: Alone
    ) -> None:
        super().__init__(table, size, ranks.own(generator), feed, met)
        self.ranks = ranks

    def advance(self) -> None:
        with self.ranks.together():
            if self.size:
                super().advance()

    @property
    def different(self) -> float:
        return self.ranks.total(float(super().different) if self.size else 0.0)

    @property
    def again(self) -> bool:
        return self.ranks.total(float(self.used)) > self.different


class Feed(ABC):
    """Sequences one after the other, in pieces, in the coordinates of the source."""

    different: float  # sequences that come before any comes again
    asked = 0  # sequences that a black box was asked for

    def __init__(self, source: Source, pulse: Callable[[], None] | None) -> None:
        self.source, self.pulse = source, pulse
        self.left: Table | None = None  # of the last piece

    @abstractmethod
    def first(self, count: int) -> Table:
        """``count`` sequences to hold at first."""

    def give(self, most: int) -> Table | None:
        """The next sequences, ``most`` of them or fewer; None when there are no more."""
        if self.left is None:
            if self.pulse is not None:
                self.pulse()
            part = self.piece()
            if part is None:
                return None
            self.left = self.table(part)
        whole, n = self.left, len(self.left.X)
        self.left = whole.part(most, n) if most < n else None
        return whole.part(0, min(most, n))

    def table(self, part: Examples) -> Table:
        """These examples in the coordinates of the source."""
        rows = self.source.rows_of(part, torch.float32)
        return Table(rows.X, rows.Y, rows.see, rows.valid,
                     *(getattr(rows, name, None) for name in ("Z", "here", "there")))

    @abstractmethod
    def piece(self) -> Examples | None:
        """The next sequences as they are stored or answered; None when there are no more."""

    def put_at(self, index: Tensor) -> None:  # noqa: B027 - only one that can give them again has to know
        """Where in the table the sequences given last were put."""

    def close(self) -> None:  # noqa: B027 - nothing goes on beside, unless a feed says so
        """End what goes on beside."""


class Reader(Feed):
    """A long list over and over: pieces of neighbours in random order, another one each time, read ahead by a
    thread. What is held besides the table is ``AHEAD`` pieces, those being read included, and the one in use."""

    def __init__(
        self, source: Source, index: np.ndarray, size: int, seed: int, pulse: Callable[[], None] | None = None
    ) -> None:
        super().__init__(source, pulse)
        self.index, self.different = index, len(index)
        self.store = store_of(source.examples)
        self.starts = range(0, len(index), size)
        self.size, self.seed = size, seed
        self.slots = torch.empty(0, dtype=torch.long)  # the place in ``index`` of every sequence of the table
        self.given = torch.empty(0, dtype=torch.long)  # the same of those given last
        self.numbers = np.zeros(0, dtype=np.int64)  # and of the piece in use
        self.held: list[Tensor] = []  # the same, as long as the table is filled
        self.place = [0, 0]  # pieces begun, and how far the last of them is used
        self._begin(0)

    def _begin(self, skipped: int) -> None:
        self.turns = self._order(skipped)
        self.pieces: Iterator[Examples] = self._read(self._order(skipped))
        # A list on an accelerator is not read ahead: there is nothing to wait for, and no other thread may allocate
        # there while a graph is captured.
        self.ahead = Ahead(self.pieces, AHEAD) if self.store.device.type == "cpu" else None

    def first(self, count: int) -> Table:
        part = self.give(count)
        assert part is not None
        whole, at = part.empty(count), 0
        while part is not None:
            whole.put(torch.arange(at, at + len(part.X), device=part.X.device), part)
            at += len(part.X)
            part = self.give(count - at) if at < count else None
        self.slots = torch.cat(self.held)
        return whole

    def again(self, slots: Tensor, place: Sequence[int]) -> Table:
        """The table of a snapshot, and what comes next as it would have come: pieces are read and brought into the
        source's coordinates whole, as they were, so that every bit is the same."""
        self.close()
        self._begin(max(place[0] - 1, 0))
        self.left, self.place = None, [max(place[0] - 1, 0), 0]
        if place[0]:
            self.give(place[1])
        whole, of = None, slots.numpy() // self.size
        for j in np.unique(of):
            begin, here = int(j) * self.size, torch.from_numpy(np.flatnonzero(of == j))
            table = self.table(self.store.take(self.index[begin : begin + self.size]))
            whole = table.empty(len(slots)) if whole is None else whole
            whole.put(here.to(table.X.device), table.pick((slots[here] - begin).to(table.X.device)))
        assert whole is not None
        self.slots = slots.clone()
        return whole

    def give(self, most: int) -> Table | None:
        if self.left is None:
            j = next(self.turns)
            self.numbers, self.place = self._numbers(j), [self.place[0] + 1, 0]
        found = super().give(most)
        assert found is not None
        begin = self.place[1]
        self.place[1] = begin + len(found.X)
        self.given = torch.from_numpy(self.numbers[begin : self.place[1]])
        self.held.append(self.given)
        return found

    def put_at(self, index: Tensor) -> None:
        self.held.clear()
        self.slots[index.cpu()] = self.given

    def piece(self) -> Examples:
        return next(self.pieces if self.ahead is None else self.ahead)

    def close(self) -> None:
        if self.ahead is not None:
            self.ahead.close()

    def _order(self, skipped: int) -> Iterator[int]:
        """The pieces, another order each time, without so many at the beginning."""
        draw, at = np.random.default_rng(self.seed), 0
        while True:
            order = draw.permutation(len(self.starts))
            if skipped < at + len(order):
                yield from (int(j) for j in order[max(skipped - at, 0):])
            at += len(order)

    def _numbers(self, j: int) -> np.ndarray:
        begin = self.starts[j]
        return np.arange(begin, min(begin + self.size, len(self.index)))

    def _read(self, order: Iterator[int]) -> Iterator[Examples]:
        for j in order:
            yield self.store.take(self.index[self._numbers(j)])


class Ahead:
    """What an iterator gives, computed by a thread, at most ``count`` values before they are asked for. What it
    raises is raised where the value would have been."""

    def __init__(self, values: Iterator[Examples], count: int) -> None:
        self.values, self.stopped = values, False
        self.room = threading.Semaphore(count)
        self.ready: SimpleQueue[Examples | BaseException] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="headway-reader", daemon=True)
        self.thread.start()

    def __next__(self) -> Examples:
        found = self.ready.get()
        if isinstance(found, BaseException):
            self.ready.put(found)
            raise found
        self.room.release()
        return found

    def close(self) -> None:
        """End the thread: at once, or when what it is reading is read."""
        self.stopped = True
        self.room.release()
        self.thread.join()

    def _run(self) -> None:
        try:
            while True:
                self.room.acquire()
                if self.stopped:
                    return
                self.ready.put(next(self.values))
        except BaseException as error:  # raised again where somebody waits for the value
            self.ready.put(error)


class Fresh(Feed):
    """Answers of a black box to inputs drawn by the same law, never the same draw twice. It is asked by the thread
    that descends and not ahead: no more than is used, and under the settings of the thread that called ``learn``.
    Inputs kept for choosing and judging are left out, should the law be so narrow that they come again."""

    def __init__(
        self, source: Source, answers: Answers, seed: int, already: int = 0,
        pulse: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(source, pulse)
        self.answers, self.seed, self.block = answers, seed, 0
        self.different = answers.law.sequences
        self.most = math.inf if answers.fresh is None else answers.fresh - already
        self.kept = prints_of(answers.take(np.concatenate([source.select, source.judge])).X)

    def first(self, count: int) -> Table:
        return table_of(self.source, spaced(self.source.fit, count))

    def piece(self) -> Examples | None:
        count = min(BLOCK, len(self.answers), self.most - self.asked)
        if count <= 0:
            return None
        X = self.answers.inputs(int(count), self.seed, self.block)
        X = X[torch.as_tensor(~np.isin(prints_of(X), self.kept))]
        self.block += 1
        self.asked += len(X)
        return self.answers.to(X) if len(X) else None


def feed_of(
    source: Source, generator: torch.Generator, already: int = 0, pulse: Callable[[], None] | None = None
) -> Feed | None:
    """Where further sequences to fit come from, if there are more than may be held; ``already``: those that the
    black box was asked for before."""

    def seed() -> int:
        return int(torch.randint(2**62, (), generator=generator))

    if isinstance(source.examples, Answers):
        return Fresh(source, source.examples, seed(), already, pulse)
    most = source.most()
    if len(source.fit) <= most:
        return None
    each = bytes_of(source.examples)
    index, pulse = own_of(source.examples, source.fit), pulse if source.ranks.alone else None
    draw = seed()
    size = max(1, min(source.budget.piece // each, most // 4))
    return Reader(source, index, size, draw, pulse) if len(index) else None
