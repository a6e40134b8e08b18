"""Learning on several processes: totals in a fixed order, the answer of one process, faults that stop all.

Two processes are started once, talk over gloo, go through everything below that takes two, and write down what they
saw; each test looks at its part of that.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

import headway as hw
from headway.core.shards import even, rebatch, write
from headway.learning import snapshots
from headway.learning.loop import Loop
from headway.learning.parts import Parted, _edges
from headway.learning.snapshots import Snapshot
from headway.learning.source import Source, find_frame
from headway.learning.starts import descent
from headway.learning.thin import ThinModel
from headway.linalg import totals
from headway.linalg.projected import Problem, Rows
from headway.linalg.thin import Thin
from headway.runs.store import Run

WIDTH, HEADS, COUNT, LENGTH, SHARDS = 6, 2, 300, 6, 5
WRONG = "examples-00003-of-00005.safetensors"


def data():
    truth = hw.AttentionLayer.random(heads=HEADS, width=WIDTH, scale=2.0, seed=0)
    return hw.draw(truth, count=COUNT, length=LENGTH, seed=1)


def thin(ranks=totals.ALONE):
    """Thin heads at a point that is no solution, and the operator there."""
    draw = torch.Generator().manual_seed(3)
    layer = hw.AttentionLayer.random(heads=2, width=8, rank=3, seed=4)
    X = torch.randn(10, 5, 8, generator=draw, dtype=torch.float64)
    rows = Rows(X, layer(X))
    if not ranks.alone:
        own = slice(0, 7) if ranks.rank == 0 else slice(7, 10)
        rows = Rows(rows.X[own], rows.Y[own])
    shape = Thin.of(torch.randn(2, 9, 8, generator=draw, dtype=torch.float64), layer.W, 3, 3)
    model = ThinModel(Problem((rows,), ranks=ranks))
    return model, shape, torch.randn(shape.value.shape, generator=draw, dtype=torch.float64)


# -- what two processes do ------------------------------------------------------------------------------------


def adds_up(folder, ranks):
    """Sums whose order shows, short ones and in pieces; several as one; whole numbers; the largest."""
    mine = torch.tensor([1e16, 1.0, 0.1], dtype=torch.float64) if ranks.rank else torch.tensor(
        [1.0, -1e16, 0.2], dtype=torch.float64)
    short, pieces = ranks.total(mine), ranks._in_pieces(mine)
    first, second, count = ranks.totals(mine, torch.ones(2, 2, dtype=torch.float64), 3)
    return {"short": short.tolist(), "pieces": pieces.tolist(), "several": [first.tolist(), second.tolist(), count],
            "int8": ranks.total(torch.tensor([ranks.rank, -1], dtype=torch.int8)).tolist(),
            "bool": ranks.total(torch.tensor([ranks.rank == 1, False])).tolist(),
            "number": ranks.total(0.5), "whole": ranks.total(2**60 + ranks.rank),
            "largest": ranks.largest(ranks.rank),
            "first": ranks.decided(ranks.rank == 0), "led": ranks.led(lambda: ({"a": ranks.rank}, {}))[0]}


def products(folder, ranks):
    model, shape, v = thin(ranks)
    point = model.evaluate(shape)
    operator = model.products(point, shape, torch.float64)
    before = ranks.counted
    curved = operator.curvature(v)
    sent = {name: now - before[name] for name, now in ranks.counted.items()}
    return {"loss": point.loss, "gradient": operator.gradient(point.residuals).tolist(), "curved": curved.tolist(),
            "sent": sent, "rows": model.problem.rows, "variation": model.variation()}


def descends(folder, ranks):
    """A short descent, with all sequences in the table and with a feed."""
    examples = Parted(hw.Examples.open(folder / "data"), ranks) if ranks.size > 1 else data()
    found = {}
    for name, most in (("table", 10_000), ("fed", 40)):
        source = Source(examples)
        source.frame = find_frame(examples, source.fit, source.device)
        source.most = lambda most=most: most
        draw, steps = torch.Generator().manual_seed(5), descent.STEPS
        descent.STEPS = 40
        try:
            made = descent.descended(source, 3, 4, 4, 0.0, draw)
        finally:
            descent.STEPS = steps
        found[name] = {"error": made.error, "A": made.factors.A.flatten()[:5].tolist(), "fitted": made.fitted,
                       "sequences": made.sequences}
    return found


def learns(folder, ranks):
    fit = hw.learn(hw.Examples.open(folder / "data"), run=folder / "run")
    again = hw.learn(hw.Examples.open(folder / "data"), run=folder / "run")
    begun = hw.learn(hw.Examples.open(folder / "data"), run=folder / "begun")
    held = hw.learn(data(), method="starts", heads=HEADS, seconds=60.0)
    return {"kind": fit.status.kind, "stats": dict(fit.stats), "Theta": fit.layer.Theta.tolist(),
            "again": again.layer.Theta.tolist(), "memory": held.layer.Theta.tolist(),
            "begun": begun.layer.Theta.tolist(), "memory kind": held.status.kind}


def refuses(folder, ranks):
    said = {}
    shards = hw.Examples.open(folder / "data")
    for name, call in {
        "a broken shard": lambda: hw.learn(hw.Examples.open(folder / "broken")),
        "other examples": lambda: hw.learn(data() if ranks.rank else data().take(range(200))),
        "form": lambda: hw.learn(shards, form="auto"),
        "baseline": lambda: hw.learn(shards, method="adam", heads=2),
        "sculpt": lambda: hw.learn(shards, method="sculpt"),
        "another's run": lambda: hw.learn(shards, run=folder / "run", seed=7),
        "rank 0 alone": lambda: ranks.led(lambda: 1 / 0),
    }.items():
        try:
            call()
            said[name] = "nothing"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def is_killed(folder, ranks):
    """Rank 1 goes away after some steps of the last stage but one, without a word."""
    steps = []

    def gone(self, residual, report=Loop.report):
        if residual is not None and self.current["stage"].startswith("polish"):
            steps.append(residual)
        if len(steps) == 3 and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        report(self, residual)

    Loop.report, snapshots.EVERY = gone, 0.0
    try:
        hw.learn(hw.Examples.open(folder / "data"), run=folder / "killed")
    except totals.RankLostError as error:
        inside = [p.stem for p in (folder / "killed" / "snapshots").iterdir()]
        return {"error": str(error), "snapshots": inside,
                "stages": sorted(p.stem for p in (folder / "killed" / "stages").iterdir())}
    return {"error": ""}


def process(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    saw = {}
    for part in (adds_up, products, descends, learns, refuses, is_killed):
        saw[part.__name__] = part(folder, totals.ranks())
        (folder / f"saw-{rank}.json").write_text(json.dumps(saw))


@pytest.fixture(scope="module")
def saw(tmp_path_factory):
    """What the two processes saw, first that of rank 0."""
    folder = tmp_path_factory.mktemp("ranks")
    write(folder / "data", rebatch([data()], even(COUNT, SHARDS)), SHARDS)
    broken = data()
    broken.Y[200, 1, 1] = float("nan")
    write(folder / "broken", rebatch([broken], even(COUNT, SHARDS)), SHARDS)
    hw.learn(hw.Examples.open(folder / "data"), run=folder / "begun")  # by one process, and cut short
    for path in (folder / "begun" / "manifest.json", *(folder / "begun" / "stages").glob("polish*")):
        path.unlink()
    start = multiprocessing.get_context("spawn")
    both = [start.Process(target=process, args=(rank, folder)) for rank in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(timeout=120)
        if one.is_alive():
            one.kill()
            pytest.fail("two processes wait for each other")
    assert [one.exitcode for one in both] == [0, -signal.SIGKILL]
    return [json.loads((folder / f"saw-{rank}.json").read_text()) for rank in range(2)], folder


@pytest.fixture(scope="module")
def alone():
    return hw.learn(data())


# -- one process by itself --------------------------------------------------------------------------------------


def test_alone_nothing_is_touched():
    x, draw = torch.randn(3), torch.Generator()
    one = totals.ranks()
    assert one is totals.ALONE and one.alone
    assert one.total(x) is x and one.totals(x, 2)[0] is x and one.own(draw) is draw
    assert one.counted == {"calls": 0, "bytes": 0}
    with one.together(), pytest.raises(ZeroDivisionError):
        one.led(lambda: 1 / 0)


@pytest.mark.parametrize("sizes", [[10, 10, 10, 10], [1, 1, 1, 97], [50, 1, 49], [7]])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_shard_has_one_rank_and_neighbours_stay_together(tmp_path, sizes, ranks):
    shards = write(tmp_path / "x", rebatch([data()], sizes), len(sizes))
    edges, names = _edges(shards, ranks)
    assert edges[0] == 0 and edges[-1] == sum(sizes) and edges == sorted(edges)
    assert [name for part in names for name in part] == [path.name for path in shards.files]
    assert [high - low for low, high in pairwise(edges)] == [
        sum(len(hw.Examples.open(tmp_path / "x").take(range(*shards.starts[j : j + 2])))
            for j, path in enumerate(shards.files) if path.name in part) for part in names]


# -- two ------------------------------------------------------------------------------------------------------


def test_sums_are_made_in_the_order_of_ranks(saw):
    (first, second), _ = saw
    expected = [1.0 + 1e16, -1e16 + 1.0, 0.2 + 0.1]
    for found in (first["adds_up"], second["adds_up"]):
        assert found["short"] == found["pieces"] == expected
        assert found["several"] == [expected, [[2.0, 2.0], [2.0, 2.0]], 6]
        assert found["int8"] == [1, -2] and found["bool"] == [True, False]
        assert found["number"] == 1.0 and found["whole"] == 2**61 + 1 and found["largest"] == 1.0
        assert found["first"] is True and found["led"] == {"a": 0}


def test_products_are_those_of_one_process_and_send_what_the_model_says(saw):
    model, shape, v = thin()
    point = model.evaluate(shape)
    operator = model.products(point, shape, torch.float64)
    (first, second), _ = saw
    assert first["products"] == second["products"]
    found = first["products"]
    assert found["rows"] == model.problem.rows == 50
    for mine, theirs in ((point.loss, found["loss"]), (model.variation(), found["variation"])):
        assert theirs == pytest.approx(mine, rel=1e-12)
    for mine, theirs in ((operator.curvature(v), found["curved"]),
                         (operator.gradient(point.residuals), found["gradient"])):
        torch.testing.assert_close(torch.tensor(theirs, dtype=torch.float64), mine, rtol=1e-10, atol=1e-11)
    features, columns = 2 * 3 + 1, 2 * 3
    numbers = features * columns + v.numel()
    each = [totals.price(count, 8, 2) for count in (features * columns, v.numel())]
    assert found["sent"] == {"calls": sum(calls for calls, _ in each), "bytes": sum(sent for _, sent in each)}
    assert found["sent"] == {"calls": 2, "bytes": 8 * numbers}


def test_a_descent_makes_the_steps_of_one_process(saw):
    (first, second), folder = saw
    assert first["descends"] == {**second["descends"], "fed": first["descends"]["fed"]}
    one = descends(folder, totals.ALONE)
    assert first["descends"]["table"]["A"] == pytest.approx(one["table"]["A"], rel=1e-3)
    assert first["descends"]["table"]["error"] == pytest.approx(one["table"]["error"], rel=1e-3)
    assert first["descends"]["table"]["sequences"] == one["table"]["sequences"]
    # Batches of their own where not all can be held: other steps, to a fit as good.
    assert first["descends"]["fed"]["error"] == pytest.approx(one["fed"]["error"], rel=0.2)
    assert first["descends"]["fed"]["A"] == second["descends"]["fed"]["A"]


def test_two_ranks_find_what_one_finds(saw, alone):
    (first, second), folder = saw
    found = first["learns"]
    assert {**found, "stats": 0} == {**second["learns"], "stats": 0}
    for name in ("Theta", "again", "memory", "begun"):
        torch.testing.assert_close(torch.tensor(found[name], dtype=torch.float64), alone.layer.Theta,
                                   rtol=0, atol=1e-12)
    assert len(Run.open(folder / "begun").manifest()["ranks"]) == 2
    assert found["kind"] == found["memory kind"] == alone.status.kind == "recovered"
    assert found["stats"]["ranks"] == 2 and found["stats"]["communication"]["calls"] > 100
    assert found["stats"]["peak_memory"] == second["learns"]["stats"]["peak_memory"]
    assert "ranks" not in alone.stats
    run = Run.open(folder / "run")
    parts = run.manifest()["ranks"]
    assert [part["sequences"] for part in parts] == [120, 180]
    assert [len(part["shards"]) for part in parts] == [2, 3]
    torch.testing.assert_close(run.fit().layer.Theta, torch.tensor(found["Theta"], dtype=torch.float64), rtol=0,
                               atol=0)


def test_what_one_rank_cannot_do_none_goes_on_with(saw):
    (first, second), _ = saw
    first, second = first["refuses"], second["refuses"]
    assert first == {**second, "rank 0 alone": first["rank 0 alone"]}
    assert first["a broken shard"].startswith("InputError: rank 1: examples.Y: expected finite numbers")
    assert WRONG in first["a broken shard"]
    assert "the same on every rank" in first["other examples"]
    for name in ("form", "baseline", "sculpt"):
        assert "several processes can learn together" in first[name]
    assert "seed=0" in first["another's run"] and first["another's run"].startswith("InputError")
    assert first["rank 0 alone"].startswith("ZeroDivisionError")
    assert second["rank 0 alone"].startswith("RuntimeError: ZeroDivisionError")


def test_a_rank_that_is_killed_ends_the_others_and_one_process_goes_on(saw, alone):
    (first, second), folder = saw
    assert "another rank ended" in first["is_killed"]["error"] and "is_killed" not in second
    kept, (inside,) = first["is_killed"]["stages"], first["is_killed"]["snapshots"]
    assert inside.startswith("polish")
    found = Snapshot(Run.open(folder / "killed"), inside).found()
    assert found is not None and found[1]["now in"]["history"]
    assert kept and not any(name.startswith("polish") for name in kept)
    fit = hw.learn(hw.Examples.open(folder / "data"), run=folder / "killed")
    assert not (folder / "killed" / "snapshots").exists()
    torch.testing.assert_close(fit.layer.Theta, alone.layer.Theta, rtol=0, atol=1e-12)
    assert fit.status.kind == "recovered" and "ranks" not in Run.open(folder / "killed").manifest()
