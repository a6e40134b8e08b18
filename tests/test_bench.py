"""Every benchmark runs, in small: the scripts behind the numbers are not left to rot between long runs."""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.docs
BENCH = Path(__file__).parent.parent / "bench"
TINY = {"heads": 2, "width": 16}
SMALL = {  # constants of the script, for a run of seconds
    "speed": {"SEEDS": (0,), "FASTEST": {"steps": 30, "batch": 16, "rate": 3e-3}},
    "rank": {"SEEDS": (0,)},
    "success": {"SEEN": range(1), "FRESH": range(1000, 1001)},
    "few": {"COUNT": 2},
    "noise": {"CASES": [(2, 8, 8, 600)], "SEEDS": (0,)},
    "memory": {"SIZE": ["--heads", "2", "--width", "8", "--length", "8", "--count", "500", "--shards", "2"]},
    "modules": {"SEEDS": (0,)},
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
    "adam_tuning": {},
    "gpu_check": {"CASES": [(2, 8, 4, 8, 600)]},
    "report": {"HEADS": 2, "WIDTH": 8, "VISITS": 1},
}
LEFT = {"adam_tuning": "a search over settings whose outcome is kept; it has no numbers to make smaller"}


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run a script's main with other constants; what it would have recorded."""
    monkeypatch.syspath_prepend(str(BENCH))
    kept = []

    def go(name, constants, *words):
        script = importlib.import_module(name)
        importlib.reload(script)
        for constant, value in constants.items():
            assert hasattr(script, constant), f"bench/{name}.py has no {constant}"
            monkeypatch.setattr(script, constant, value)
        elsewhere = {"record": lambda *told: kept.append(told), "RESULTS": tmp_path,
                     "trained_folder": lambda: tmp_path / "trained"}
        for what, other in elsewhere.items():  # nothing is written to the repository
            if hasattr(script, what):
                monkeypatch.setattr(script, what, other)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        script.main()
        return kept

    threads = torch.get_num_threads()
    yield go
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", sorted(set(SMALL) - set(LEFT)))
def test_a_benchmark_runs_in_small(name, bench, capsys):
    told = bench(name, SMALL[name], *(["cpu"] if name == "gpu_check" else []))
    if name == "gpu_check":
        assert "Recovered" in capsys.readouterr().out  # it prints, for a machine that keeps no results
        return
    assert told, "it recorded nothing"
    for _, command, summary, rows in told:
        assert command.startswith(f"python bench/{name}.py")
        json.dumps([summary, rows])
        assert summary or rows


def test_every_benchmark_is_among_them():
    scripts = {path.stem for path in BENCH.glob("*.py")} - {"common", "encoder", "real", "swap"}
    assert scripts == set(SMALL)


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
    ((_, _, summary, rows),) = bench(
        "real", {"HEADS": 4, "LENGTH": 16, "PROBE": 2}, "--model", tmp_path / "model", "--device", "cpu",
        "--layers", 1, "--count", 4000, "--rates", 1e-3, "--adam", 0.1, "--keep", tmp_path / "kept")
    assert summary["recovered to 1e-6"] == 1
    assert rows[0]["heads found"] == 4
    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=Words))
    told = bench("swap", {}, tmp_path / "kept", "--model", tmp_path / "model")
    assert told[-1][2]["largest 1 − cosine"] < 1e-16
