"""Every rule of the learner has a row that shows what it buys (bench/rules.py), or a reason why it has none."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from headway.learning import loop, policy, refine, source, verdict
from headway.learning.starts import descent

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def rules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("rules")


def test_every_rule_has_a_row_or_a_reason(rules):
    known, rows, reasons = set(rules.known()), {trial.rule for trial in (*rules.TABLE, *rules.ASKED)}, set(
        rules.SIZES)
    assert {"Rules.near", "refine.STEPS", "refine.GIVEN", "starts.descent.RISE", "verdict.APART",
            "linear.PASSES", "linear_verdict.PUSH", "chosen.plan.NEAR", "chosen.everywhere.CLOSE"} <= known
    assert not known - rows - reasons, "give each a row of TABLE in bench/rules.py, or a reason in SIZES"
    assert not (rows | reasons) - known, "there is no such rule any more"
    assert not rows & reasons
    assert all(reason.strip() for reason in rules.SIZES.values())


def test_every_row_puts_another_number_in_the_place_and_names_scenes_there_are(rules):
    for trial in (*rules.TABLE, *rules.ASKED):
        assert trial.instead != rules.value_of(trial.rule), trial
        assert trial.scenes and set(trial.scenes) <= set(rules.EVERY), trial
        assert rules.about(trial.rule), f"{trial.rule} is not documented where it stands"


def test_a_rule_is_changed_wherever_it_is_held_and_put_back(rules):
    before = loop.Rules(), source.far_out.__defaults__, refine.Cuts.fold.__defaults__, verdict.FITTED
    with rules.changed("Rules.near", 0.5):
        assert loop.Rules() == replace(policy.Rules(), near=0.5)
    with rules.changed("source.STANDS_OUT", 9.0):
        assert source.far_out.__defaults__ == (0.0, 9.0) and source.STANDS_OUT == 9.0
    with rules.changed("refine.BATCH", 1.0):
        assert refine.Cuts.fold.__defaults__ == (1.0,)
    with rules.changed("starts.descent.TARGET", 0.5):
        assert descent.descend.__kwdefaults__["target"] == 0.5
    with rules.changed("ladder.FITTED", 1e-3):
        assert verdict.FITTED == refine.FITTED == 1e-3
    with rules.changed("refine.STEPS", 7):
        assert refine.Cuts().pace.stride == 7
    with rules.changed(None, None):
        pass
    assert descent.descend.__kwdefaults__["target"] == descent.TARGET
    assert before == (
        loop.Rules(), source.far_out.__defaults__, refine.Cuts.fold.__defaults__, verdict.FITTED)


def test_what_a_rule_buys_is_read_off_the_runs(rules):
    def runs(true=True, error=1e-12, seconds=1.0, work=100, calls=40):
        return [rules.Found("recovered", true, 3, error, seconds, work, calls)] * 2

    for after, said in (
        (runs(), "nothing"), (runs(true=False), "truth"), (runs(error=2e-11), "error"),
        (runs(error=1e-15), "nothing"),
        (runs(calls=50), "calls"), (runs(calls=30, work=1000), "costs calls"),
        (runs(work=130), "time"), (runs(seconds=2.5), "time"), (runs(work=70), "costs time"),
        (runs(seconds=0.4), "costs time"), (runs(true=False, work=10), "truth"),
    ):
        assert rules.bought(runs(), after) == said, after
    assert rules.bought(runs(true=False), runs()) == "costs truth"
    assert rules.bought(runs(error=1e-9), runs(error=1e-12)) == "costs error"
    rows = [{"rule": "a", "buys": "time"}, {"rule": "a", "buys": "truth"}, {"rule": "b", "buys": "costs time"}]
    assert rules.verdicts(rows) == {"a": "truth", "b": "nothing"}
    assert rules.summary(rows)["rules that buy something"] == 1
    assert rules.summary(rows)["rules that buy nothing"] == "b"
