"""Every benchmark runs, in small: the scripts behind the numbers are not left to rot between long runs."""

from __future__ import annotations

import importlib
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import headway as hw
from headway.learning.baselines import Setting

pytestmark = pytest.mark.docs
BENCH = Path(__file__).parent.parent / "bench"
TINY = {"heads": 2, "width": 16}
SMALL = {  # constants of the script, for a run of seconds
    "speed": {"SEEDS": (0,), "TUNED": Setting(steps=120), "SINGLE": (Setting(steps=50),)},
    "time_to": {"SEEDS": (20,), "SIZE": TINY, "RANK": 4, "COUNT": 1200, "REPEATS": 1, "TARGETS": (0.9, 1e-12),
                "SINGLE": (Setting(steps=200), Setting(steps=100)),
                "DOUBLE": (Setting(steps=100, dtype=torch.float64, last=1e-3),)},
    "rank": {"SEEDS": (0,)},
    "success": {"SEEN": range(1), "FRESH": range(1000, 1001)},
    "few": {"COUNT": 2},
    "noise": {"CASES": [(2, 8, 8, 600)], "SEEDS": (0,)},
    "memory": {"SIZE": ["--heads", "2", "--width", "8", "--length", "8", "--count", "500", "--shards", "2"]},
    "modules": {"SEEDS": (0,)},
    "inputs": {"SEEDS": {"words": 1, "narrow": 1, "trained": 0}, "WIDTH": 28, "HEADS": 2, "RANK": 4, "COUNT": 400},
    "sculpt": {"CASES": {"m1-d8-k2": (1, 8, 2, 20_000, 1, 1)}},
    "cost": {"SEEDS": (200,), "HEADS": range(1, 2)},
    "coverage": {"REPETITIONS": 2, "WHOLE": 4000, "LAYERS": range(1)},
    "certify_large": {"SHAPE": {**TINY, "rank": 4}, "COUNT": 200},
    "mixture": {"HEADS": (1, 2), "TRIALS": 1, "STEPS": 10},
    "planted": {"HEADS": (1,), "TRIALS": 1, "STEPS": 3},
    "guarantee": {"RUNS": (("short", {"zeta": 0.5, "noise": 0.1}, 4, 0.1, 30),), "SIZES": ((200, 20),),
                  "FAR": 400_000},
    "selecting": {"STEPS": 300, "SEEDS": (0,)},
    "baselines": {"SECONDS": 0.02, "LAYERS": (({"heads": 1, "width": 6}, 200, 4),)},
    "trained": {"STEPS": 3},
    "adam_tuning": {"SEEDS": (900,), "SIZE": TINY, "COUNT": 600, "RANK": 4, "RATES": (1e-2,), "ROWS": (512,),
                    "STEPS": (600,), "DOUBLE": ((100, 1e-3),)},
    "gpu_check": {"CASES": [(2, 8, 4, 8, 600)]},
    "report": {"HEADS": 2, "WIDTH": 8, "VISITS": 1},
    "zoo": {"FRESH_SEEDS": (100,), "INSTANCES": ["generic"], "LEARNERS": ("starts",), "SECONDS": 4.0},
}
WORDS = {"gpu_check": ["cpu"], "zoo": ["fresh"]}
SAID = {  # sentences of README and docs that are made from what the script records
    "speed": ["speed"], "time_to": ["time_to"], "rank": ["rank"], "success": ["success"], "few": ["few"],
    "noise": ["noise"], "memory": ["memory"], "modules": ["modules"], "coverage": ["coverage_short", "radius"],
    "guarantee": ["posterior", "risk"], "report": ["page"]}


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run a script's main with other constants; the records it wrote, by name."""
    monkeypatch.syspath_prepend(str(BENCH))
    results = tmp_path / "results"
    for module in ("common", "pages"):  # nothing is written to the repository
        monkeypatch.setattr(importlib.import_module(module), "RESULTS", results)

    def go(name, constants, *words):
        script = importlib.import_module(name)
        importlib.reload(script)
        for constant, value in constants.items():
            assert hasattr(script, constant), f"bench/{name}.py has no {constant}"
            monkeypatch.setattr(script, constant, value)
        results.mkdir(exist_ok=True)
        for what, other in {"RESULTS": results, "trained_folder": lambda: tmp_path / "trained"}.items():
            if hasattr(script, what):
                monkeypatch.setattr(script, what, other)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        script.main()
        return {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}

    threads = torch.get_num_threads()
    yield go
    torch.set_num_threads(threads)


def positive(*values):
    return all(0 < value < 1e4 for value in values)


def every(rows, **wanted):
    return rows and all(row[key] == value for row in rows for key, value in wanted.items())


EXPECTED = {  # what a small run must have found: script -> record -> of its summary and rows
    "speed": {"speed": lambda s, r: r[0]["heads found"] == 4 and s["worst head error"] < 1e-12 and positive(
        r[0]["learn, s"], r[0]["Adam, s"], r[0]["ratio"], r[0]["its ratio"])
        and r[0]["Adam, s"] > r[0]["its s"]},
    "time_to": {"time_to": lambda s, r: s["layers"] == 2 and len(r) == 6 and all(
        positive(row["s to 9e-01"]) and (row["s to 1e-12"] is None) == (row["learner"] == "Adam") for row in r)
        and all("A, B, W" not in row["by"] for row in r[:3] if row["by"])},
    "adam_tuning": {"adam_tuning": lambda s, r: len(r) == 12 and any(
        row["seconds"] for row in r if row["target"] == "1e-06") and s["full rank, fastest to 1e-06"]},
    "rank": {"rank": lambda s, r: every(r, status="recovered") and r[0]["rank found"] == 8
             and s["worst head error"] < 1e-12},
    "success": {"success": lambda s, r: len(r) == 2 and s["recovered to 1e-8"] == s["head count right"] == 1.0},
    "few": {"few": lambda s, r: len(r) == 2 and s["recovered to 1e-8, m given"] == 1.0
            and s["flattering statuses"] == 0},
    "noise": {"noise": lambda s, r: s["called noise"] == 1.0 and 0.5 < s["largest ratio"] < 1.5
              and 0.008 < r[0]["noise estimated"] < 0.012},
    "memory": {"memory": lambda s, r: (s["status"], s["heads found"]) == ("recovered", 2) and positive(
        s["peak of make and learn, GiB"], s["examples on disk, GiB"]) and s["worst head error"] < 1e-9},
    "inputs": {"inputs": lambda s, r: s["head count right"] == len(r) == 2 and s["worst error"] < 1e-9},
    "modules": {"modules": lambda s, r: every(r, heads=8) and s["largest difference of outputs"] < 1e-9},
    "sculpt": {"sculpt": lambda s, r: s == {"m1-d8-k2": "1 of 1 (wanted 1)"} and r[0]["after polish"] < 1e-9},
    "cost": {"cost": lambda s, r: {row["method"] for row in r} == {"moments", "sculpt"} and positive(
        *(row["examples"] for row in r), *(row["seconds"] for row in r))},
    "coverage": {"coverage": lambda s, r: len(r) == 6 and all(0 <= row["covered"] <= 1 for row in r),
                 "radius": lambda s, r: every(r, decided="yes", inside=True, **{"planted error": "no"})},
    "certify_large": {"certify_large": lambda s, r: s["holds"] == "yes" and positive(
        r[0]["parameters"], s["seconds"])},
    "mixture": {"mixture": lambda s, r: {row["heads"] for row in r} == {1, 2} and all(
        0 < row["training loss"] < 1 and 0 <= row["test error"] <= 1 for row in r)},
    "planted": {"planted": lambda s, r: {row["heads"] for row in r} == {1} and all(
        0 < row["training loss"] < 1 and 0 <= row["test error"] <= 1 for row in r)},
    "guarantee": {"guarantee_training": lambda s, r: every(r, **{"descent held": True}) and r[0]["ratio"] > 1,
                  "guarantee": lambda s, r: all(row["loss + gap"] > row["training loss"] > 0 for row in r)},
    "selecting": {"selecting": lambda s, r: positive(s["least factor, normalized"], s["least factor, Polyak"])
                  and {row["seed"] for row in r} == {0}},
    "baselines": {"baselines": lambda s, r: set(s) == {"adam", "lbfgs"} and all(
        row["mean error"] > 0 for row in r)},
    "trained": {"trained": lambda s, r: {row["task"] for row in r} == {"histogram", "recall"} and all(
        0 <= row["answers right"] <= 1 for row in r)},
    "report": {"report": lambda s, r: positive(s["page, MB"], s["seconds to open it, median"])},
    "zoo": {"zoo_fresh": lambda s, r: every(r, instance="generic", seed=100, success=True)
            and s["starts, successes"] == s["starts, runs"] == 1},
}


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_benchmark_runs_in_small(name, bench, capsys):
    told = bench(name, SMALL[name], *WORDS.get(name, []))
    if name == "gpu_check":
        assert "Recovered" in capsys.readouterr().out  # it prints, for a machine that keeps no results
        return
    assert set(told) == set(EXPECTED[name])
    for stem, found in EXPECTED[name].items():
        kept = told[stem]
        assert kept["command"].startswith(f"python bench/{name}.py")
        assert re.fullmatch(r"[0-9a-f]{12}(\+changes)?|unknown", kept["commit"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", kept["date"])
        assert "CPU threads" in kept["machine"]
        assert {"python", "torch", "headway"} <= set(kept["versions"])
        assert found(kept["summary"], kept["rows"]), (kept["summary"], kept["rows"])
    claims = importlib.import_module("claims")
    for claim in SAID.get(name, []):
        assert re.search(r"\d", getattr(claims, claim)())  # the sentence finds the columns it speaks of


def test_every_benchmark_is_among_them():
    others = {"common", "stopwatch", "encoder", "real", "swap", "text", "all", "pages", "claims"}
    scripts = {path.stem for path in BENCH.glob("*.py")} - others
    assert scripts == set(SMALL)
    assert set(EXPECTED) == set(SMALL) - {"gpu_check"}


def small_encoder(folder, width=64, heads=4, blocks=2):
    """A random encoder with BERT's names."""
    draw = torch.Generator().manual_seed(0)
    weights = {}

    def add(name, *shape, scale=0.3):
        weights[name] = scale * torch.randn(*shape, generator=draw)

    def dense(name, rows, columns):
        add(f"{name}.weight", rows, columns, scale=columns**-0.5)
        add(f"{name}.bias", rows, scale=0.1)

    for name, count in (("word", 50), ("position", 32), ("token_type", 2)):
        add(f"embeddings.{name}_embeddings.weight", count, width)
    norms = ["embeddings.LayerNorm"]
    for block in range(blocks):
        stem = f"encoder.layer.{block}."
        for part in ("query", "key", "value"):
            dense(f"{stem}attention.self.{part}", width, width)
        dense(f"{stem}attention.output.dense", width, width)
        dense(f"{stem}intermediate.dense", 2 * width, width)
        dense(f"{stem}output.dense", width, 2 * width)
        norms += [f"{stem}attention.output.LayerNorm", f"{stem}output.LayerNorm"]
    for name in norms:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = torch.ones(width), torch.zeros(width)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(
        {"num_attention_heads": heads, "num_hidden_layers": blocks, "layer_norm_eps": 1e-12}))
    (folder / "tokenizer.json").write_text("{}")


class Words:
    """Stands for a tokenizer: letters become numbers."""

    @classmethod
    def from_file(cls, path):
        assert Path(path).exists()
        return cls()

    def encode_batch(self, sentences):
        return [types.SimpleNamespace(ids=[1 + ord(c) % 48 for c in sentence[:12]]) for sentence in sentences]


def test_an_encoders_layers_are_learned_and_put_back(bench, tmp_path, monkeypatch):
    small_encoder(tmp_path / "model")
    found = bench(
        "real", {"HEADS": 4, "LENGTH": 16}, "--model", tmp_path / "model", "--device", "cpu",
        "--layers", 1, "--count", 4000, "--rates", 1e-3, "--adam", 0.1, "--keep", tmp_path / "kept")["real_cpu"]
    assert found["summary"]["recovered to 1e-6"] == 1
    assert found["rows"][0]["heads found"] == 4
    assert found["rows"][0]["Adam head size"] == 16 and positive(found["rows"][0]["Adam steps"])
    assert "CPU threads" in found["machine"]
    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=Words))
    told = bench("swap", {}, tmp_path / "kept", "--model", tmp_path / "model")
    assert [row["layers replaced"] for row in told["swap"]["rows"]] == ["1", "all"]
    assert 0 <= told["swap"]["summary"]["largest 1 − cosine"] < 1e-16


def test_adam_and_the_learner_are_timed_on_an_encoders_layer(bench, tmp_path):
    small_encoder(tmp_path / "model", width=34, heads=2)
    found = bench("time_to", {"HEADS": 2, "TOKENS": 12, "REPEATS": 1, "TARGETS": (0.5, 1e-12), "EXACT": (),
                              "WIDE": (Setting(steps=300, rate=1e-2, warm=10),)}, "--model", tmp_path / "model",
                  "--device", "cpu", "--layers", 1, "--count", 3000)["time_to_real"]
    assert found["command"] == "python bench/time_to.py --device cpu --layers 1"
    learned, alone, adam = found["rows"]
    assert learned["s to 1e-12"] and alone["s to 1e-12"] and adam["s to 1e-12"] is None
    assert positive(adam["s to 5e-01"]) and "A, B, V, O" in adam["by"]
    assert "encoder, layer 1: `learn` is at 1e-12 in" in importlib.import_module("claims").time_to("time_to_real")


def test_of_several_ways_the_first_to_an_error_counts(bench, monkeypatch):
    stopwatch = importlib.import_module("stopwatch")
    now = 0.0

    def adam(source, heads, setting, *, seed, size, out_size, watch):
        """A second a look, after each of which the error is less by a factor."""
        nonlocal now
        for look in range(1, 10):
            now += 1.0
            if watch(setting.rate**look, None, None):
                break

    monkeypatch.setattr(stopwatch, "adam", adam)
    monkeypatch.setattr(stopwatch, "clock", lambda device: now)
    monkeypatch.setattr(stopwatch, "find_frame", lambda *_: types.SimpleNamespace(leave=lambda error, *_: error))
    monkeypatch.setattr(stopwatch, "relative_error", lambda error, unseen: error)
    data = hw.draw(hw.AttentionLayer.random(heads=1, width=2), count=4, length=2)
    ways = [stopwatch.Way(1, Setting(rate=rate, dtype=torch.float64)) for rate in (0.5, 0.09, 0.4)]
    found = stopwatch.adam_to(data, data, ways, (0.5, 0.01, 1e-20))
    assert found.to == {0.5: 1.0, 0.01: 2.0} and found.error == pytest.approx(0.09**9)
    assert " at 0.5," in found.by[0.5] and " at 0.09," in found.by[0.01]
    assert found.seconds == 27.0  # none was stopped while an error was still to be reached
    found = stopwatch.adam_to(data, data, ways, (0.5, 0.01))
    assert found.seconds == 7.0 + 2.0 + 2.0  # the third cannot be the first any more after two looks
    assert stopwatch.adam_to(data, data, ways[:1], (1e-20,), limit=3.0).seconds == 3.0


def test_an_encoders_layer_is_learned_from_its_own_activations(bench, tmp_path):
    small_encoder(tmp_path / "model", width=32, heads=4)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    draw = torch.Generator().manual_seed(1)
    weights["ids"] = torch.randint(0, 50, (700, 8), generator=draw).to(torch.int16)
    save_file(weights, tmp_path / "pack.safetensors")
    found = bench("text", {"HEADS": 4, "LENGTH": 8, "APART": 100}, tmp_path / "pack.safetensors", "--device", "cpu",
                  "--inputs", "text", "--layers", 1, "--count", 600, "--seconds", 60)["text"]
    row = found["rows"][0]
    assert row["inputs"] == "text" and row["sequences"] == 600
    assert row["heads found"] == 4 == row["patterns met to 1e-6"]
    assert row["error on other sequences"] < 1e-6
