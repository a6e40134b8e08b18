"""Hard instances keep their promises; the zoo runs; a race goes on where it stopped."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.commands import headway

import headway as hw
from headway.core import conditions
from headway.core.files import write_json
from headway.hardness import FAMILIES, family, low_degree, parity, parity_output, rounding, rounding_output
from headway.hardness.secrets import rounded
from headway.hardness.zoo import SUITES, instances, zoo
from headway.racing import apart, race, tables
from headway.runs import jobs
from headway.sculpting.thresholds import Thresholds

ROOT = Path(__file__).parent.parent
PAIRS = [(1, 8, 0), (2, 9, 1), (3, 12, 2)]


@pytest.mark.parametrize(("size", "width", "seed"), PAIRS)
def test_the_parity_instance_computes_its_parity(size, width, seed):
    secret = parity(size, width, seed=seed)
    assert secret.layer.heads == 2 * size
    X = hw.draw(secret.layer, count=3000, length=2, seed=seed).X.double()
    Y = secret.layer(X)[:, 0]
    torch.testing.assert_close(Y[:, 0], parity_output(secret, X), rtol=0, atol=1e-7)
    assert not bool(Y[:, 1:].any())
    z = (X[:, 1] - X[:, 0]) / 2
    assert float(Y[z[:, secret.known[1]] == 0, 0].abs().max()) < 1e-7, "all heads agree, and cancel"
    # Where it speaks, the output is 0 or −2 by the product of the hidden bits.
    told = secret.speaking(X)
    product = X[:, :, secret.hidden == 1].prod(2).prod(1)[told]
    wanted = -1 + (-1) ** size * product
    torch.testing.assert_close(Y[told, 0], wanted.double(), rtol=0, atol=1e-7)


@pytest.mark.parametrize(("size", "width", "seed"), PAIRS[:2])
def test_nothing_below_the_hidden_degree_is_seen(size, width, seed):
    secret = parity(size, width, seed=seed)
    data = hw.draw(secret.layer, count=6000, length=2, seed=seed + 5)
    y = secret.signed(data.X.double(), data.Y[:, 0, 0])
    for degree in range(1, 2 * size):
        seen = low_degree(data.X, y, degree, skip=secret.known)
        assert not seen.anything, f"seed {seed}: {seen}"
    seen = low_degree(data.X, y, 2 * size, skip=secret.known)
    assert seen.largest > 3 * seen.chance, "the hidden product itself is there"


@pytest.mark.parametrize(("numbers", "modulus", "levels"), [(2, 4, 2), (3, 4, 4), (2, 8, 2)])
def test_the_rounding_instance_rounds_an_inner_product(numbers, modulus, levels):
    secret = rounding(numbers, modulus, levels, seed=numbers)
    bits = modulus.bit_length() - 1
    X = hw.draw(secret.layer, count=4000, length=2, seed=1).X.double()
    X = X[secret.speaking(X)]
    assert len(X) > 50
    # The integers spelled by the two tokens, from their bits.
    u = ((X[:, :, 3:] + 1) / 2).view(len(X), 2, numbers, bits) @ (2.0 ** torch.arange(bits, dtype=torch.float64))
    w = secret.hidden[3::bits]
    inner = ((u[:, 1] - u[:, 0]) @ w).round().long()
    wanted = torch.tensor([rounded(int(v), modulus, levels) for v in inner], dtype=torch.float64)
    torch.testing.assert_close(rounding_output(secret, X, modulus, levels), wanted, rtol=0, atol=1e-6)
    assert len(wanted.unique()) == levels


def test_the_certificate_says_why_parities_are_hard():
    secret = parity(2, 9, seed=0)
    found = hw.certify(secret.layer, hw.draw(secret.layer, count=400, length=2, seed=3))
    claim = found["non-degeneracy"]
    assert claim.holds == "no"
    assert "parallel" in claim.reason
    assert "rank one" in claim.reason
    generic = conditions.measure(*(getattr(hw.AttentionLayer.random(3, 8), name) for name in ("Theta", "W")))
    assert not any("parallel" in words for words in conditions.broken(generic))


def test_a_small_parity_is_learned_though_its_moments_mislead():
    # Unmixing explains nothing, rows at six times the floor are learned by heart; then random starts on more rows.
    secret = parity(2, 7, beta=2.0, seed=1)
    fit = hw.learn(hw.draw(secret.layer, count=20_000, length=2, seed=1), seed=1)
    stages = [event["stage"] for event in fit.trace]
    assert "start-3-unmixed" in stages
    assert "polish-3-0" not in stages, "an unmixed fit that leaves most is not polished before others are tried"
    X = hw.draw(secret.layer, count=500, length=2, seed=2).X
    assert float((fit.layer(X) - secret.layer(X)).norm() / secret.layer(X).norm()) < 1e-9


@pytest.mark.parametrize("seed", [0, 2])
def test_sculpting_a_parity_ends_with_the_broken_condition(seed):
    # ΣW_i = 0 and saturated patterns: rows met to the last digit, sums without full rank. The polish may find the
    # layer all the same, outside the theorem.
    secret = parity(1, 6, beta=2.0, seed=seed)
    fit = hw.learn(hw.draw(secret.layer, count=20_000, length=2, seed=seed), heads=2, seed=seed,
                   method=hw.Sculpt(limit=20, thresholds=Thresholds(sharpen=0)))
    assert "ΣW_i is singular" in fit.status.sentence, fit.status.sentence
    X = hw.draw(secret.layer, count=500, length=2, seed=9).X
    error = float((fit.layer(X) - secret.layer(X)).norm() / secret.layer(X).norm())
    assert fit.status.kind in ("recovered", "degenerate")
    # How far a polish of 20 iterations gets here is a matter of rounding; that it says so is not.
    assert error < 1e-11 if fit.status.kind == "recovered" else error > 1e-14


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dial_at_zero_is_generic_and_turned_up_is_not(name):
    easy, hard = (family(name, dial, seed=1) for dial in (0.0, FAMILIES[name].dials[-1]))
    assert conditions.broken(conditions.measure(easy.Theta, easy.W)) == []
    before, after = (conditions.measure(one.Theta, one.W) for one in (easy, hard))
    if name == "saturated":
        assert float(hard.Theta.norm()) > 10 * float(easy.Theta.norm())
    elif name == "crowded":
        assert hard.heads > hard.width
    else:
        turned = {"equal": "head_distance", "cancelling": "sum_strength", "weak": "head_weight",
                  "quiet": "norm_ratio", "rank-one": "effective_rank"}[name]
        if name == "cancelling":
            assert float(hard.W.sum(0).norm()) < 1e-3 * float(easy.W.sum(0).norm())
        else:
            assert after[turned] < 0.4 * before[turned]


def test_bad_words_are_refused(refused):
    with refused("family", "weak"):
        family("weaker", 1.0)
    with refused("dial"):
        family("weak", -1.0)
    with refused("width", "three known coordinates"):
        parity(4, 6)
    with refused("modulus", "power of two"):
        rounding(2, 6)
    with refused("suite", "zoo"):
        instances("zoos")
    with refused("learner", "moments"):
        apart.tasks("zoo", ["magic"], [0], 1.0)


def test_the_zoo_has_distinct_names_and_buildable_layers():
    names = [one.name for one in zoo()]
    assert len(set(names)) == len(names)
    for suite in SUITES:
        whole = {one.name: one for one in instances(suite)}
        for one in instances(suite, quick=True):
            layer = one.build(0)
            data = one.examples(layer, 0, 20)
            assert (len(data), data.length, data.width) == (20, one.length, layer.width)
            same = whole[one.name]  # a name means one instance, in a quick race as in a whole one
            assert replace(same, build=one.build) == one
            assert torch.equal(same.build(0).Theta, layer.Theta)
    for suite in ("floor", "dials", "heads"):
        assert len(instances(suite, quick=True)) < len(instances(suite)), "quick is less"
    few = next(one for one in zoo() if one.name == "few")
    assert few.count < 50


def test_trained_layers_are_those_that_learned_their_task():
    rows = json.loads((ROOT / "bench" / "results" / "trained.json").read_text())["rows"]
    assert [row["task"] for row in rows] == ["histogram", "recall"]
    for row in rows:
        layer = next(one for one in zoo() if one.name == f"trained-{row['task']}").build(0)
        assert row["answers right"] > 0.99
        assert (layer.heads, layer.width) == (row["heads"], row["width"])
        # The stored layer is the one whose answers were counted.
        assert float(layer.augmented.flatten(1).norm(dim=1).max()) == pytest.approx(row["largest ‖Θ‖"], rel=1e-9)
        # And it is far from where such layers begin.
        with torch.random.fork_rng():
            torch.manual_seed(0)
            modules = [torch.nn.MultiheadAttention(layer.width, layer.heads, batch_first=True) for _ in range(5)]
        begun = [hw.from_torch(module.double().eval()) for module in modules]
        largest = max(float(one.Theta.flatten(1).norm(dim=1).max()) for one in begun)
        assert float(layer.Theta.flatten(1).norm(dim=1).min()) > 1.2 * largest


def test_one_run_is_judged_by_its_heads():
    found = apart.run(apart.Task("zoo", "generic", "moments", 3, 20.0))
    assert found["success"]
    assert found["heads_found"] == found["heads"] == found["heads_right"] == 3
    assert found["worst_head_error"] < 1e-12
    assert found["function_error"] < 1e-12
    poor = apart.run(apart.Task("zoo", "generic", "adam", 3, 0.2))
    assert not poor["success"]
    assert poor["worst_head_error"] > 1e-3


def test_a_race_goes_on_where_it_stopped_and_its_table_tells(tmp_path):
    todo = apart.tasks("heads", ["moments", "lbfgs"], [0], 2.0, quick=True)
    assert [task.instance for task in todo[::2]] == ["heads-1", "heads-2", "heads-4"]
    race.race(tmp_path, todo[:2], workers=2)
    first = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    seen = []
    rows = race.race(tmp_path, todo[:3], workers=1, report=seen.append)
    assert len(rows) == 3
    assert [row["instance"] for row in seen] == ["heads-2"], "only what was missing"
    assert all((tmp_path / "runs" / name).stat().st_mtime_ns == at for name, at in first.items())
    assert all(row["success"] for row in rows if row["learner"] == "moments")
    assert all(row["peak_memory_mib"] > 50 for row in rows)
    text = (tmp_path / "table.md").read_text()
    assert "| heads-1 | 1/1" in text
    assert json.loads((tmp_path / "results.json").read_text())["zoo"] == "1"


def test_a_run_that_fails_or_hangs_is_a_row(tmp_path, monkeypatch):
    task, stop = apart.Task("dials", "weak-1", "moments", 0, 0.1), threading.Event()
    monkeypatch.setattr(apart.sys, "executable", "/bin/false")
    row = apart.apart(task, stop)
    assert row["status"] == "failed"
    assert row["where"] == {"weak": 1.0}
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(apart.sys, "executable", str(sleeper))
    monkeypatch.setattr(apart, "SLACK", 0.0)
    row = apart.apart(task, stop)
    assert (row["status"], row["success"]) == ("stopped", False)
    assert "0/1, lost" in tables.table([row])
    stop.set()
    with pytest.raises(jobs.LostError):  # an interrupted run leaves nothing behind
        apart.apart(task, stop)


def test_crowded_heads_are_new_ones_for_every_seed():
    layers = [family("crowded", 1.0, seed=seed) for seed in (0, 1, 3)]
    every = torch.cat([layer.Theta.flatten(1) for layer in layers])
    apart = torch.cdist(every, every) + 100 * torch.eye(len(every), dtype=torch.float64)
    assert float(apart.min()) > 0.5


def test_the_command_that_makes_hard_instances(tmp_path):
    done = headway("hard", "parity", tmp_path / "secret", "--size", 1, "--width", 8, "--count", 4000, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [row["anything"] for row in told["statistics"][:2]] == [False, True]
    assert any("parallel" in words for words in told["failing"])
    assert len(hw.Examples.open(tmp_path / "secret")) == 4000
    assert headway("hard", "weak", tmp_path / "secret").returncode == 2, "nothing is overwritten"
    assert headway("hard", "strong", tmp_path / "other").returncode == 2


def test_the_command_that_races(tmp_path):
    # Two of its three runs are there already, made in this process.
    first, *others = apart.tasks("heads", ["moments"], [0], 5.0, quick=True)
    (tmp_path / "runs").mkdir()
    for task in others:
        write_json(tmp_path / "runs" / f"{task.name}.json", apart.run(task))
    done = headway("bench", tmp_path, "--suite", "heads", "--learner", "moments", "--quick", "--seconds", 5,
                   "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "runs" / f"{first.name}.json").read_text())["success"]
    assert json.loads(done.stdout)["figures"] == ["heads.png"]
    assert (tmp_path / "heads.png").stat().st_size > 5000
    assert "| heads-4 | 1/1" in (tmp_path / "table.md").read_text()
    assert headway("bench", tmp_path, "--suite", "zoos").returncode == 2


def test_figures_of_a_race():
    plot = pytest.importorskip("headway.report.figures", reason="figures need matplotlib")
    rows = [{"learner": who, "success": who == "moments", "seconds": 1.0 + j, "where": {
        "examples over the floor": x, "scale": y}} for who in ("moments", "adam") for j, (x, y) in enumerate(
            [(1.0, 1.0), (2.0, 1.0), (1.0, 4.0)])]
    axis = plot.plot_phase(rows, "moments")
    assert [text.get_text() for text in axis.texts] == ["1/1"] * 3
    dials = [{**row, "where": {"weak": row["seconds"]}} for row in rows]
    lines = plot.plot_dial(dials, "weak").lines
    assert [line.get_label() for line in lines] == ["moments", "adam"]
    assert [set(line.get_ydata()) for line in lines] == [{1.0}, {0.0}], "a rate is drawn where it is"
    cost = plot.plot_cost(dials, "weak")
    assert cost.get_yscale() == "log"
    import matplotlib.pyplot as plt

    plt.close("all")
