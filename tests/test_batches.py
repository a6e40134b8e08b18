"""Batches for descent: from a list that is longer than may be held, and from a black box."""

from __future__ import annotations

import math
import threading
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.test_factors import low_rank, normal
from torch.testing import assert_close

import headway as hw
from headway.core.budget import BUDGET
from headway.core.shards import Shards, rebatch, write
from headway.learning.gauss_newton import OutOfTimeError
from headway.learning.loop import Loop
from headway.learning.source import Source, find_frame, prints_of
from headway.learning.starts.batches import AHEAD, Batches, Fresh, Reader, Table, feed_of, table_of
from headway.learning.starts.descent import descend, descended, random_factors, tables
from headway.runs.store import Run

CPU = torch.device("cpu")
SAME = {"rtol": 0, "atol": 0}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def source_of(data):
    found = Source(data)
    found.frame = find_frame(data, found.fit, CPU)
    return found


def numbered(n=200, k=4, d=3, mask="none", padded=False):
    """Sequences whose labels are their number, in every row."""
    padding = torch.zeros(n, k, dtype=torch.bool) if padded else None
    if padded:
        padding[::3, -1] = True
    return hw.Examples(normal(n, k, d), torch.arange(n).double().view(n, 1, 1).expand(n, k, 2), padding, mask)


def long_list(tmp_path, most=32, n=200, **options):
    """Shards of more sequences than may be held."""
    data = numbered(n, **options)
    found = source_of(write(tmp_path / "list", rebatch([data], [n // 4] * 4), shards=4))
    found.budget = replace(BUDGET, rows=most * 12 * data.length * (data.width + data.out_width))
    assert found.most() == most < len(found.fit)
    return found


def numbers(source, table):
    return (table.Y[:, 0, 0].double() * source.frame.scale).round().long().tolist()


def met(source, steps, seed=0, size=8, times=1):
    """The numbers of the sequences of each batch."""
    draw = generator(seed)
    feed = feed_of(source, draw)
    try:
        batches = Batches(feed.first(source.most()), size, draw, feed, times)
        found = []
        for _ in range(steps):
            batches.advance()
            found.append(numbers(source, batches.now()))
        return found, batches
    finally:
        feed.close()


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "headway-reader"]


# -- a list that is too long to be held -------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 4])
def test_every_sequence_is_met(tmp_path, times):
    source = long_list(tmp_path)
    rounds, n = 3, len(source.fit)
    found, batches = met(source, rounds * times * n // 8, times=times)
    count = np.bincount(np.concatenate(found), minlength=200)
    assert set(np.flatnonzero(count)) == set(source.fit), "and none of those kept to choose and to judge"
    if times == 1:
        assert count[source.fit].min() >= rounds - 1 and count[source.fit].max() <= rounds + 1
        first = np.concatenate(found)[: n - source.most()]
        assert len(set(first)) == len(first), "none comes again before all have been read"
    assert batches.different == n
    assert not readers()


def test_the_order_is_that_of_the_seed_whatever_the_clock(tmp_path, monkeypatch):
    source = long_list(tmp_path)
    one, other = met(source, 60, seed=1)[0], met(source, 60, seed=2)[0]
    assert one != other
    take = Shards.take

    def slow(self, index):
        time.sleep(0.002)
        return take(self, index)

    monkeypatch.setattr(Shards, "take", slow)
    assert met(source, 60, seed=1)[0] == one
    # Where the list is on an accelerator, no thread reads ahead.
    monkeypatch.setattr(Shards, "device", torch.device("cuda"))
    assert met(source, 60, seed=1)[0] == one


def test_neighbours_are_torn_apart(tmp_path):
    """A sorted file: a batch comes from all over what is held, and what is held from all over the file."""
    source = long_list(tmp_path, most=64)
    spread = [max(batch) - min(batch) for batch in met(source, 40)[0]]
    assert np.mean(spread) > 100


def test_what_is_read_ahead_is_bounded(tmp_path, monkeypatch):
    source = long_list(tmp_path)
    take, reads, alive = Shards.take, [0], []

    def counted(self, index):
        part = take(self, index)
        reads[0] += 1
        alive.append(weakref.ref(part))
        return part

    monkeypatch.setattr(Shards, "take", counted)
    reader = feed_of(source, generator())
    assert reader.size <= source.most() // 4
    try:
        for given in range(12):
            for _ in range(200):  # until as much is read ahead as may be
                if reads[0] >= given + AHEAD:
                    break
                time.sleep(0.01)
            time.sleep(0.02)
            assert reads[0] == given + AHEAD
            assert sum(ref() is not None for ref in alive) <= AHEAD
            assert len(reader.give(reader.size).X) in (reader.size, len(source.fit) % reader.size)
    finally:
        reader.close()
    assert not readers()


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_batches_are_the_sequences_as_the_source_has_them(tmp_path, mask, padded):
    source = long_list(tmp_path, mask=mask, padded=padded)
    _, batches = met(source, 30)
    part = batches.now()
    own = source.rows(np.array(numbers(source, part)), torch.float32)
    assert_close(part.X, own.X)
    assert_close(part.Y, own.Y, **SAME)
    for one, two in ((part.see, own.see), (part.valid, own.valid)):
        assert (one is None) == (two is None)
        if one is not None:
            assert torch.equal(one, two)


def test_a_list_that_may_be_held_has_no_reader():
    source = source_of(numbered())
    assert feed_of(source, generator()) is None
    fit, _ = tables(source)
    batches = Batches(fit, 10, generator())
    found = []
    for _ in range(2 * (len(source.fit) // 10)):
        batches.advance()
        found += numbers(source, batches.now())
    assert set(found) == set(source.fit.tolist()) and len(source.fit) % 10 == 0
    assert batches.again and batches.used == 2 * batches.different


def test_a_shard_that_disappears_is_refused_by_name(refused, tmp_path):
    source = long_list(tmp_path)
    shards = source.examples
    shards.files[2].unlink()
    with refused(str(shards.files[2]), "no longer reads"):
        descended(source, 1, 2, 2, 0.0, generator())
    assert not readers()


def test_an_error_of_the_reader_does_not_go_away(tmp_path, monkeypatch):
    source = long_list(tmp_path)
    monkeypatch.setattr(Shards, "take", lambda self, index: 1 // 0)
    reader = Reader(source, source.fit, 8, 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            reader.give(1)
    reader.close()
    assert not readers()


@pytest.mark.parametrize("where", ["report", "pulse"])
def test_leaving_early_ends_the_reader(tmp_path, where):
    source = long_list(tmp_path)
    looks = []

    def late(*_):
        looks.append(len(readers()))
        if len(looks) > (10 if where == "pulse" else 0):
            raise OutOfTimeError

    found = descended(source, 1, 2, 2, 0.0, generator(), **{where: late})
    assert found.reason == "time"
    assert looks[-1] == 1, "it was reading until then"
    assert not readers()


@pytest.mark.parametrize("seed", [0])
def test_a_stream_leads_as_far_as_a_table(seed):
    """And holding as few sequences as the stream does leads nowhere."""
    layer = low_rank(2, 24, 4, seed=10 * seed, scale=4.0)
    data = hw.draw(layer, 1200, 6, law="gaussian", seed=seed)
    source = source_of(data)
    errors = {}
    for name, most in (("table", 2000), ("stream", 64)):
        source.budget = replace(BUDGET, rows=most * 12 * 6 * 48)
        found = descended(source, 4, 6, 6, 0.0, generator(seed))
        assert found.reason == "target"
        assert found.sequences == len(source.fit)
        errors[name] = found.error
    assert errors["stream"] < 1.3 * errors["table"] < 0.1
    few = table_of(source, source.fit[:64])
    draw = generator(seed)
    alone = descend(few, tables(source)[1], random_factors(4, 24, 24, 6, 6, draw, CPU), generator=draw, rate=4e-3,
                    rows=512, limit=1000)
    assert alone.error > 2 * errors["stream"]


# -- a black box ------------------------------------------------------------------------------------------------


class Box:
    """A layer that counts what it is shown, and keeps it."""

    def __init__(self, layer):
        self.layer, self.shown = layer, []

    def __call__(self, X):
        self.shown.append(prints_of(X))
        return self.layer(X)

    @property
    def count(self):
        return sum(map(len, self.shown))


def small_box():
    return Box(low_rank(2, 8, 2, seed=2, scale=4.0))


@pytest.mark.parametrize("law", ["boolean", "gaussian"])
def test_fresh_sequences_come_once_and_are_counted(law):
    box = small_box()
    data = hw.ask(box, 100, 6, 8, law=law, fresh=True)
    source, before = source_of(data), box.count
    given, draw = prints_of(data.X.double()), generator()
    box.shown.clear()
    feed = feed_of(source, draw)
    batches = Batches(feed.first(len(source.fit)), 10, draw, feed)
    for _ in range(60):
        batches.advance()
    part = batches.now()
    assert_close(part.Y.double() * source.frame.scale, box.layer(part.X.double()), rtol=1e-5, atol=1e-6)
    assert not batches.again and before >= 100
    shown = np.concatenate(box.shown)
    assert feed.asked == len(shown) == 600 and batches.fed == 590
    assert len(np.union1d(shown, given)) == 700, "none twice, and none of those given"
    assert not readers(), "a black box is asked by the thread that uses the answers"


def test_the_draws_belong_to_the_key():
    data = hw.ask(small_box(), 100, 6, 8, fresh=True)
    one, two, other = (data.inputs(50, key, 0) for key in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert not torch.equal(one, data.inputs(50, 1, 1))
    assert not torch.equal(data.inputs(100, 0, 0), data.X)


@pytest.mark.parametrize("most", [1, 130, 250])
def test_no_more_is_asked_than_allowed(most):
    box = small_box()
    source = source_of(hw.ask(box, 100, 6, 8, fresh=most))
    for already in (0, most // 2, most):
        draw, before = generator(), box.count
        feed = feed_of(source, draw, already)
        batches = Batches(feed.first(len(source.fit)), 10, draw, feed)
        for _ in range(60):
            batches.advance()
        assert feed.asked == box.count - before == most - already
        assert batches.fed == feed.asked
        assert batches.again, "then those that are held are met again"


def test_sequences_kept_for_the_verdict_are_not_asked_for():
    """Two tokens of three words: nine sequences, all of which come again and again."""
    words = np.array([[1.0, 2.0], [0.5, -1.0], [4.0, 0.0]])
    box = Box(low_rank(1, 2, 2))
    source = source_of(hw.ask(box, 100, 2, law=words, fresh=True))
    kept = prints_of(source.examples.take(np.concatenate([source.select, source.judge])).X)
    box.shown.clear()
    feed, draw = feed_of(source, generator()), generator()
    assert feed.different == 9
    batches = Batches(feed.first(len(source.fit)), 10, draw, feed)
    for _ in range(30):
        batches.advance()
    shown = np.concatenate(box.shown)
    assert not np.isin(shown, kept).any() and len(np.unique(shown)) + len(np.unique(kept)) == 9
    assert batches.again
    feed.kept = np.union1d(kept, shown)
    assert feed.piece() is None, "with nothing new to ask for it is not asked"


@pytest.mark.parametrize(
    ("answer", "word"),
    [(lambda Y: Y[:, :-1], "shape (60, 5, 8)"), (lambda Y: Y[..., :7], "shape (60, 6, 7)"),
     (lambda Y: Y * torch.nan, "finite numbers"), (lambda Y: (Y, Y), "one tensor"), (lambda Y: Y > 0, "bool")],
    ids=["short", "narrow", "nan", "tuple", "bool"])
def test_a_later_answer_is_checked_as_the_first(refused, answer, word):
    layer, change = low_rank(2, 8, 2, seed=2, scale=4.0), [lambda Y: Y]
    data = hw.ask(lambda X: change[0](layer(X)), 60, 6, 8, law="gaussian", fresh=True)
    change[0] = answer
    with refused("the oracle's answer", word):
        hw.learn(data, method="factors")


def test_a_fault_of_the_black_box_is_its_own():
    layer, broken = low_rank(2, 8, 2, seed=2), []

    def box(X):
        if broken:
            raise ConnectionError("no answer")
        return layer(X)

    data = hw.ask(box, 60, 6, 8, law="gaussian", fresh=True)
    broken.append(True)
    with pytest.raises(ConnectionError, match="no answer"):
        hw.learn(data, method="factors")


@pytest.mark.parametrize("fresh", [False, True])
def test_what_is_met_once_is_not_said_to_be_known_by_heart(fresh):
    """Labels that no layer gives, and large in few sequences, so that a batch may show a small error by chance.
    Forty sequences are learned by heart, fresh ones are not."""
    data = hw.ask(lambda X: torch.sin(1e3 * X) * X[:, :1, :1] ** 4, 400, 6, 8, law="gaussian", fresh=fresh)
    source, draw = source_of(data), generator()
    fit, select = tables(source)
    feed = Fresh(source, data, 0) if fresh else None
    fit = Table(fit.X[:40].clone(), fit.Y[:40].clone())
    found = descend(fit, select, random_factors(6, 8, 8, 8, 8, draw, CPU), generator=draw, rate=1e-2, rows=96,
                    limit=3000, feed=feed)
    assert found.reason == ("flat" if fresh else "by heart")
    assert (found.asked > 0) == fresh


def test_a_run_with_a_black_box_goes_on_to_the_same_result(refused, tmp_path, monkeypatch):
    def ask(fresh=2000):
        box = Box(low_rank(2, 8, 2, seed=2))
        return box, hw.ask(box, 120, 6, 8, law="gaussian", fresh=fresh)

    box, data = ask()
    before = box.count
    whole = hw.learn(data, method="factors", run=tmp_path / "whole")
    assert whole.status.kind == "recovered"
    assert 0 < whole.stats["asked"] == box.count - before <= 2000
    assert whole.stats["asked"] == sum(event.get("asked", 0) for event in whole.trace)

    def killed(self, action):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_refine", killed)
        with pytest.raises(KeyboardInterrupt):
            hw.learn(ask()[1], method="factors", run=tmp_path / "cut")
    box, data = ask()
    before = box.count
    again = hw.learn(data, method="factors", run=tmp_path / "cut")
    assert box.count == before, "what was asked for is kept"
    assert again.stats["asked"] == whole.stats["asked"]
    assert torch.equal(again.layer.Theta, whole.layer.Theta)
    assert Run.open(tmp_path / "cut").fit().stats["asked"] == whole.stats["asked"]
    for other in (False, True, 1000):
        with refused("run", "fresh=2000"):
            hw.learn(ask(other)[1], method="factors", run=tmp_path / "cut")
    hw.learn(ask(False)[1], method="factors", run=tmp_path / "given")
    with refused("run", "no fresh"):
        hw.learn(data, method="factors", run=tmp_path / "given")


def test_out_of_time_the_count_is_right_too(monkeypatch):
    looks = 0

    def pulse(self):
        nonlocal looks
        looks += self.current["stage"].startswith("descent")
        if looks > 20 and self.deadline < math.inf:
            raise OutOfTimeError

    monkeypatch.setattr(Loop, "pulse", pulse)
    box = small_box()
    data = hw.ask(box, 60, 6, 8, law="gaussian", fresh=True)
    before = box.count
    fit = hw.learn(data, method="factors", seconds=1e6)
    assert fit.stats["out_of_time"] and fit.stats["asked"] == box.count - before > 0
