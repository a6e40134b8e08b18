"""A limit of memory: how it is given, what it leaves for what, and that it is kept."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch

import headway as hw
from headway.core import checks
from headway.core.budget import BUDGET, FIXED, PARTS, in_words, size_of, within
from headway.core.shards import even, rebatch, write
from headway.learning.learn import _said
from headway.learning.source import Source, find_frame
from headway.runs.store import Run

MIB = 1 << 20


def data(count=300, width=6):
    return hw.draw(hw.AttentionLayer.random(heads=2, width=width, scale=2.0, seed=0), count=count, length=6, seed=1)


@pytest.mark.parametrize(("given", "size"), [
    ("8GiB", 8 << 30), ("8 gib", 8 << 30), ("1.5GB", 1_500_000_000), ("300 MB", 300_000_000), ("4096", 4096),
    (1 << 30, 1 << 30), (2e9, 2_000_000_000), (None, None)])
def test_sizes_in_words_and_in_bytes(given, size):
    assert size_of("memory", given) == size


@pytest.mark.parametrize("given", ["lots", "8 apples", "", "-1GiB", "0", 0, -5, float("nan"), float("inf"), True])
def test_sizes_that_are_none_are_refused(refused, given):
    with refused("memory", "bytes as a number", repr(given), "memory='8GiB'"):
        size_of("memory", given)


def test_a_limit_only_ever_lowers_what_is_held():
    sizes = [within(limit, 0, 1000, None) for limit in (600 * MIB, 2 << 30, 1 << 40)]
    for name in PARTS:
        shares = [getattr(budget, name) for budget in sizes]
        assert shares == sorted(shares) and shares[0] < shares[1] and shares[2] <= getattr(BUDGET, name)
    assert replace(sizes[2], limit=None, free=None, block=BUDGET.block, probe=BUDGET.probe) == BUDGET
    assert {field.name for field in fields(BUDGET)} == {*PARTS, "limit", "free"}
    assert within(2 << 30, 1 << 30, 1000, None).rows < within(2 << 30, 0, 1000, None).rows
    assert sizes[0].at(torch.device("cpu"), "rows") == sizes[0].rows


def test_limits_that_are_too_small_say_how_large_they_must_be(refused):
    with refused("memory", "for Python and torch", in_words(100 * MIB)):
        within(100 * MIB, 0, 10, None)
    with refused("memory", "1024 MiB for the examples in memory"):
        within(1 << 30, 1 << 30, 10, None)
    with refused("memory", "beside what this process holds already"):
        within(1 << 30, 0, 10, FIXED + 600 * MIB)
    budget = within(1 << 30, 0, 10, None)
    budget.need(0.4 * budget.free, "a layer that fits")
    with pytest.raises(checks.InputError, match=r"memory: .* for 32 heads of width 4096; got 1 GiB") as said:
        budget.need(100 << 30, "32 heads of width 4096")
    enough = within(size_of("memory", str(said.value).split("'")[1]), 0, 10, None)
    enough.need(100 << 30, "32 heads of width 4096")
    BUDGET.need(1e30, "no limit was given")


def test_a_wide_layer_under_a_small_limit_is_refused_in_a_sentence(refused):
    examples = hw.Examples(torch.randn(60, 4, 300, dtype=torch.float64), torch.randn(60, 4, 2, dtype=torch.float64))
    source = Source(examples, budget=within(512 * MIB, 0, 60, None))
    source.frame = find_frame(examples, source.fit, source.device)
    with refused("memory", "4 heads of width"):
        source.afford(4, 1201, thin=False)


def test_rows_that_are_read_depend_on_the_limit_and_answers_do_not(tmp_path):
    shards = write(tmp_path / "x", rebatch([data()], even(300, 3)), 3)
    fits = [hw.learn(shards, memory=memory) for memory in (None, "100GiB")]
    assert torch.equal(fits[0].layer.Theta, fits[1].layer.Theta)
    assert "memory" not in fits[0].settings and fits[1].settings["memory"] == 100 << 30


def test_a_limit_is_refused_where_it_would_not_be_kept(refused):
    for words in ({"form": "auto"}, {"form": "linear"}, {"method": "adam", "heads": 2}, {"method": "sculpt"}):
        with refused("memory", "keeps to no limit", "1 GiB"):
            hw.learn(data(), memory="1GiB", **words)
    with refused("memory", "keeps to no limit"):
        hw.learn(hw.ask(lambda X: X, length=6, width=3, plan="chosen"), memory="1GiB")
    with refused("memory", "a black box that may be asked for more"):
        box = hw.AttentionLayer.random(heads=1, width=3, seed=0)
        hw.learn(hw.ask(box, 20, 4, width=3, fresh=True), memory="1GiB")
    with refused("memory", "another device than the CPU"):
        hw.learn(data(), memory="1GiB", device="cuda")


def test_it_belongs_to_the_run(refused, tmp_path):
    hw.learn(data(), memory="100GiB", run=tmp_path / "with")
    assert Run.open(tmp_path / "with").config["options"]["memory"] == 100 << 30
    hw.learn(data(), memory=100 << 30, run=tmp_path / "with")
    for other in ("50GiB", None):
        with refused("run", f"memory={100 << 30}"):
            hw.learn(data(), memory=other, run=tmp_path / "with")
    hw.learn(data(), run=tmp_path / "without")
    with refused("run", "no memory"):
        hw.learn(data(), memory="100GiB", run=tmp_path / "without")


def test_a_limit_that_was_not_kept_is_said():
    fit = hw.learn(data(), method="starts", heads=2)
    over = replace(fit, stats={**fit.stats, "peak_memory": {"host": 3 << 30}})
    assert _said(over, 2 << 30, 1 << 30).status.sentence.endswith(
        "It held 3 GiB at its peak, more than the 2 GiB it was to be kept under.")
    for limit, before in ((4 << 30, 1 << 30), (None, 1 << 30), (2 << 30, 3 << 30)):
        assert _said(over, limit, before) is over


SCRIPT = """
import json, sys
import headway as hw
fit = hw.learn(hw.Examples.open(sys.argv[1]), memory=sys.argv[2], method="starts", heads=1)
print(json.dumps([fit.status.kind, fit.stats["peak_memory"]["host"]]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks of other systems are those of the parent too")
def test_the_limit_is_kept(tmp_path):
    """128 MiB of examples are looked through three times; Python and torch take some 290."""
    layer = hw.AttentionLayer.random(heads=1, width=8, scale=2.0, seed=0)
    first = write(tmp_path / "one", [hw.draw(layer, 2048, 64, law="gaussian", seed=1)]).files[0]
    (tmp_path / "x").mkdir()
    for j in range(8):
        (tmp_path / "x" / f"examples-{j:05d}-of-00008.safetensors").hardlink_to(first)
    made = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "x"), "450MiB"], check=True,
                          stdout=subprocess.PIPE)
    kind, peak = json.loads(made.stdout)
    assert kind == "recovered" and peak < 340 * MIB
