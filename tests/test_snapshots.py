"""Snapshots inside a stage: what was cut short goes on from there and ends at the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.test_batches import generator, source_of
from tests.test_factors import low_rank

import headway as hw
from headway.core.budget import BUDGET
from headway.core.shards import even, rebatch, write
from headway.learning import gauss_newton, ladder, snapshots
from headway.learning.polish import polish
from headway.learning.refine import refine_factors
from headway.learning.snapshots import Snapshot
from headway.learning.starts import descent
from headway.learning.starts.descent import Step, descended
from headway.learning.thin import Thin
from headway.runs.store import Run


class CutError(Exception):
    """What stands for a process that is killed."""


@pytest.fixture(autouse=True)
def _always_due(monkeypatch):
    monkeypatch.setattr(snapshots, "EVERY", 0.0)


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "run", {})


def cut_after(count):
    """To be called at every look; raises at the one of that number."""
    seen = []

    def look(*_):
        seen.append(1)
        if len(seen) == count:
            raise CutError

    return look


def examples(count=600, width=12):
    return hw.draw(low_rank(2, width, 3, seed=0, scale=4.0), count, 6, law="gaussian", seed=0)


@pytest.mark.parametrize(("held", "cut"), [("all", 6), ("a part", 2)])
def test_a_descent_goes_on_to_the_same_bits(tmp_path, run, monkeypatch, held, cut):
    """At the held rate and while it is lowered; with all sequences in the table, and where others take their
    place."""
    shards = write(tmp_path / "x", rebatch([examples()], even(600, 4)), 4)
    source = source_of(shards)
    assert len(source.fit) > 500
    if held == "a part":
        source.budget = replace(BUDGET, rows=64 * 12 * 6 * 24)
    for name, value in (("STEPS", 360), ("TARGET", 0.5), ("LOOK", 40), ("RISE", 40), ("GRAIN", 40)):
        monkeypatch.setattr(descent, name, value)
    made = []
    monkeypatch.setattr(Step, "make", lambda self, make=Step.make: (made.append(1), make(self))[1])

    def go(report=None, kept=None):
        made.clear()
        return descended(source, 3, 4, 4, 0.0, generator(), report, snapshot=kept or Snapshot())

    whole, steps = go(), len(made)
    with pytest.raises(CutError):
        go(cut_after(cut), Snapshot(run, "descent"))
    again = go(None, Snapshot(run, "descent"))
    assert 0 < len(made) <= steps - (cut - 1) * descent.LOOK, "it went on and did not begin again"
    for mine, theirs in zip(again.factors.parts(), whole.factors.parts(), strict=True):
        assert torch.equal(mine, theirs)
    assert replace(again, factors=None) == replace(whole, factors=None)


def spare():
    """Factors near the truth with a head and columns too many, and a source: cuts are made on the way."""
    layer = low_rank(2, 16, 3, seed=3, scale=4.0)
    data = hw.draw(layer, 400, 8, law="gaussian", seed=4)
    source = source_of(data)
    draw = torch.Generator().manual_seed(5)
    Theta = torch.cat([layer.Theta, torch.zeros(2, 1, 16, dtype=torch.float64)], dim=1)
    Theta = torch.cat([Theta, Theta[:1]])
    W = torch.cat([layer.W * 0.5, layer.W[:1] * 0.5])
    Theta = Theta + 0.02 * torch.randn(Theta.shape, generator=draw, dtype=torch.float64)
    return source, Thin.of(Theta, W, 5, 5), Theta


@pytest.mark.parametrize("cut", [1, 5])
def test_a_refinement_goes_on_to_the_same_bits(run, cut):
    source, shape, _ = spare()
    whole = refine_factors(source, shape, generator=generator(1))
    assert whole.heads == 2 and whole.error < 1e-12
    with pytest.raises(CutError):
        refine_factors(source, shape, generator=generator(1), report=cut_after(cut), snapshot=Snapshot(run, "a"))
    again = refine_factors(source, shape, generator=generator(1), snapshot=Snapshot(run, "a"))
    for part in ("Theta", "W", "offset"):
        assert torch.equal(getattr(again, part), getattr(whole, part))
        again, whole = replace(again, **{part: None}), replace(whole, **{part: getattr(whole, part)})
    assert (again.residual, again.error, again.products, again.sequences) == (
        whole.residual, whole.error, whole.products, whole.sequences)


@pytest.mark.parametrize(("early", "cut"), [(8, 4), (64, 4)])
def test_a_polish_goes_on_to_the_same_bits(run, monkeypatch, early, cut):
    """In thin factors, and with free heads whose rank is read off on the way."""
    from headway.learning import polish as module

    monkeypatch.setattr(module, "EARLY", early)
    source, _, Theta = spare()
    Theta = Theta[:2]

    def go(**more):
        return polish(source, Theta, 120, rank="auto", generator=generator(1), **more)

    whole = go()
    with pytest.raises(CutError):
        go(report=cut_after(cut), snapshot=Snapshot(run, "a"))
    solves = []
    original = gauss_newton.gauss_newton
    monkeypatch.setattr(ladder, "gauss_newton", lambda *a, **k: (
        solves.append(k.get("midway")), original(*a, **k))[1])
    again = go(snapshot=Snapshot(run, "a"))
    assert torch.equal(again.Theta, whole.Theta) and torch.equal(again.W, whole.W)
    assert again.products == whole.products and solves[0] is not None


def test_a_run_goes_on_and_leaves_no_snapshot(tmp_path, monkeypatch):
    for name, value in (("STEPS", 300), ("LOOK", 40), ("RISE", 40), ("GRAIN", 40)):
        monkeypatch.setattr(descent, name, value)
    data, seen = examples(300), []
    whole = hw.learn(data, method="factors", heads=2, run=tmp_path / "whole", progress=lambda event: seen.append(
        event["stage"]))
    for part in ("descent", "refine"):
        stage = next(name for name in seen if name.startswith(part))
        looks = cut_after(3)
        with pytest.raises(CutError):
            hw.learn(data, method="factors", heads=2, run=tmp_path / "cut",
                     progress=lambda event, looks=looks, name=stage: (
                         looks() if event["stage"] == name else None))
        left = [path.stem for path in (tmp_path / "cut" / "snapshots").iterdir()]
        assert left == [stage]
    again = hw.learn(data, method="factors", heads=2, run=tmp_path / "cut")
    for name, tensor in whole.layer.tensors().items():
        assert torch.equal(tensor, again.layer.tensors()[name])
    assert not (tmp_path / "cut" / "snapshots").exists() and not (tmp_path / "whole" / "snapshots").exists()


def test_a_snapshot_that_does_not_serve_is_passed_over(tmp_path):
    run = Run.create(tmp_path / "run", {"a": 1})
    kept = Snapshot(run, "stage")
    assert kept.found() is None and kept.due()
    kept.keep({"x": torch.arange(3)}, {"done": 2})
    tensors, info = Snapshot(run, "stage").found()
    assert tensors["x"].tolist() == [0, 1, 2] and info == {"done": 2}
    assert Snapshot(Run(run.path, {"a": 2}), "stage").found() is None, "of other settings"
    path = run.path / "snapshots" / "stage.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    assert Snapshot(run, "stage").found() is None, "cut short by somebody else"
    run.stage("stage", lambda: ({}, {}))
    assert not path.exists()
    assert not Snapshot().due() and Snapshot().found() is None


def test_at_most_one_a_minute(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "EVERY", 60.0)
    kept = Snapshot(Run.create(tmp_path / "run", {}), "stage")
    assert not kept.due()
    kept.last -= 61
    assert kept.due()
    kept.keep({}, {"done": 1})
    assert not kept.due()
