"""Every benchmark runs, in small: the scripts behind the numbers are not left to rot between long runs."""

from __future__ import annotations

import importlib
import json
import re
import sys
import types
from operator import attrgetter
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
    "methods": {"SEEDS": (900,), "SECONDS": 6.0, "LEARNED": 1e-12, "METHODS": ("auto", "lbfgs"), "OF_FORMS": (),
                # lbfgs stops at 5e-7, at once: with the script's own target the seconds of a busy one would decide
                "SITUATIONS": {"white": ("white tokens", lambda seed: importlib.import_module("scenes").white(
                    1, 4, 4, 150)(seed))}},
    "ranks": {"SIZE": ["--heads", "2", "--width", "8", "--length", "8", "--count", "500", "--shards", "3"],
              "RANKS": (1, 2)},
    "streams": {"LAYER": {"heads": 1, "width": 4, "rank": 2, "seed": 3}, "LENGTH": 4, "SHARD": 64, "ASKED": 60,
                "SIZES": (2e-4, 1e-3), "STEPS": 100, "READ": 0.05},
    "memory": {"SIZE": ["--heads", "2", "--width", "8", "--length", "8", "--count", "500", "--shards", "2"]},
    "modules": {"SEEDS": (0,)},
    "which": {"SEEDS": (100,), "forms": lambda seed: {"window": hw.Form(sight=hw.Sight(causal=True, window=3))},
              "HEADS": 1, "SIZE": 2, "WIDTH": 8, "LENGTH": 6, "COUNT": 500},
    "forms": {"SEEDS": (100,), "forms": lambda seed: {"causal": (hw.Form(sight=hw.Sight(causal=True)), None)},
              "D": 4, "M": 1, "Q": 2, "K": 5},
    "models": {"LENGTH": 5, "FRESH": 100, "layers": lambda pack: {"smollm2-tiny": hw.FactoredLayer.random(
        1, 4, size=2, form=hw.Form(rotary=hw.Rotary(base=100.0, layout="pairs"), sight=hw.Sight(causal=True)))}},
    "linear": {"SEEDS": (300,), "WIDTHS": (4,), "HEADS": (1, 2),
               "INPUTS": (("gaussian", "none"), ("boolean", "causal"))},
    "same": {"SEED": 300, "EACH": 1, "MODELS": ("gpt2", "qwen3")},
    "behaviours": {"SEEDS": (0,), "SEQUENCES": 12},
    "inputs": {"SEEDS": {"words": 1, "narrow": 1, "trained": 0}, "WIDTH": 28, "HEADS": 2, "RANK": 4, "COUNT": 400},
    "verdicts": {"LAST": 300, "SHOWN": ("layer", "noise-1", "too-few"), "COUNT": 300, "SECONDS": 20.0},
    "queries": {"HEADS": (2,), "WIDTHS": (6,), "SEEDS": 1, "BESIDE": 1, "TIMES": (8,), "K": 10},
    "outliers": {"LAST": 300, "SHARES": (0.01,), "HEADS": 2, "WIDTH": 6, "COUNT": 300, "SECONDS": 3.0},
    "trial": {"SHOWN": ("1e150", "shard", "pure noise"), "SECONDS": 10.0},
    "rules": {"LAST": 700, "TABLE": [("Rules.asides", 0, ["5 % wrong"]), ("refine.BATCH", 1.0, ["white"])],
              "ASKED": (),
              "LEAST": float("inf")},  # products alone decide: seconds of a busy machine say nothing here
    "gpts": {"LAST": 100, "NETS": {"encoder": 5}, "COUNT": 300, "FRESH": 50, "SECONDS": 2.0},
    "sculpt": {"CASES": {"m1-d8-k2": (1, 8, 2, 20_000, 1, 1)}},
    "cost": {"SEEDS": (200,), "HEADS": range(1, 2)},
    "coverage": {"REPETITIONS": 2, "WHOLE": 4000, "LAYERS": range(1), "DEMO": {"heads": 2, "width": 8}},
    "spoiled": {"TRIALS": 2, "TRUE": 1000},
    "bars": {"REPETITIONS": {"dense": 2, "products": 1}, "LEVELS": (0.9,)},
    "wrong": {"TRIALS": range(2), "MANY": 200},
    "determined": {"SEEDS": (0,), "SCENES": {"words": lambda seed: importlib.import_module("scenes").words(
        2, 8, 500)(seed)}},
    "certify_wide": {"SHAPES": ({"heads": 2, "width": 10, "rank": 3},), "LENGTH": 8},
    "certify_large": {"SHAPES": ((2, 16, 4),), "COUNT": 500, "LENGTH": 16},
    "mixture": {"HEADS": (1, 2), "TRIALS": 1, "STEPS": 10},
    "planted": {"HEADS": (1,), "TRIALS": 1, "STEPS": 3},
    "guarantee": {"RUNS": (("short", {"zeta": 0.5, "noise": 0.1}, 4, 0.1, 30),), "SIZES": ((200, 20),),
                  "FAR": 400_000},
    "selecting": {"STEPS": 300, "SEEDS": (0,)},
    "baselines": {"SECONDS": 0.02, "LAYERS": (({"heads": 1, "width": 6}, 200, 4),)},
    "trained": {"STEPS": 3},
    "recall": {"STEPS": 3, "UNSEEN": 100},
    "adam_tuning": {"SEEDS": (900,), "SIZE": TINY, "COUNT": 600, "RANK": 4, "RATES": (1e-2,), "ROWS": (512,),
                    "STEPS": (600,), "DOUBLE": ((100, 1e-3),)},
    "gpu_check": {"CASES": [(2, 8, 4, 8, 600)]},
    "report": {"HEADS": 2, "WIDTH": 8, "VISITS": 1},
    "zoo": {"FRESH_SEEDS": (100,), "INSTANCES": ["generic"], "LEARNERS": ("starts",), "SECONDS": 4.0},
    "sweep": {"INSTANCES": ("one-head",), "LEARNERS": ("moments",), "KILLS": 1},
}
WORDS = {"gpu_check": ["cpu"], "certify_large": ["--widest", "100"],
         "ranks": ["--agree"], "zoo": ["fresh"], "forms": ["--count", "400"],
         "models": ["--pack", "PACK", "--device", "cpu", "--count", "400", "--forms", "told"]}
SAID = {  # sentences of README and docs that are made from what the script records
    "speed": ["speed"], "time_to": ["time_to"],
    "rank": ["rank"], "success": ["success"], "few": ["few"], "noise": ["noise"],
    "memory": ["memory"], "ranks": ["ranks"], "modules": ["modules"],
    "coverage": ["coverage_short", "radius", "looks", "stopped", "demonstrated"],
    "spoiled": ["spoiled"],
    "guarantee": ["posterior", "risk"], "report": ["page"], "verdicts": ["statements.verdicts"],
    "outliers": ["statements.outliers"], "trial": ["statements.trial_short", "statements.trial"],
    "rules": ["statements.rules"], "gpts": ["statements.gpts"], "behaviours": ["statements.planted_heads"],
    "methods": ["statements.methods"], "sweep": ["sweeps"], "linear": ["statements.linear_layers"],
    "queries": ["statements.queries_short", "statements.queries"]}


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run a script's main with other constants; the records it wrote, by name."""
    monkeypatch.syspath_prepend(str(BENCH))
    results = tmp_path / "results"
    # Nothing is written to the repository. Both are imported first: pages takes its folder from common.
    for module in [importlib.import_module(name) for name in ("common", "pages")]:
        monkeypatch.setattr(module, "RESULTS", results)

    def go(name, constants, *words):
        script = importlib.import_module(name)
        importlib.reload(script)
        for constant, value in constants.items():
            assert hasattr(script, constant), f"bench/{name}.py has no {constant}"
            monkeypatch.setattr(script, constant, value)
        results.mkdir(exist_ok=True)
        for what, other in {"RESULTS": results, "trained_folder": lambda: tmp_path / "trained",
                            "stored": lambda: tmp_path / "recall.safetensors"}.items():
            if hasattr(script, what):
                monkeypatch.setattr(script, what, other)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        script.main()
        return {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}

    threads = torch.get_num_threads()
    yield go
    torch.set_num_threads(threads)


def test_a_record_that_was_cut_short_goes_on_with_what_this_very_code_measured(bench, monkeypatch):
    common, made = importlib.import_module("common"), []

    def row(name, seed, *_):
        made.append((name, seed))
        return {"form": name, "seed": seed, "head error": 0.0, "output error": 0.0, "pattern error": 0.0,
                "seconds": 1.0, "Adam's output error": 1.0}

    fake = {"SEEDS": (100, 101), "forms": lambda seed: {"plain": (hw.Form(), None), "cap": (hw.Form(), None)},
            "row": row}
    monkeypatch.setattr(common, "COMMIT", "one")
    bench("forms", fake, "--seeds", "101", "--only", "cap")
    record = bench("forms", fake)["forms"]
    assert made == [("cap", 101), ("plain", 100), ("cap", 100), ("plain", 101)]
    assert [(row["form"], row["seed"]) for row in record["rows"]] == [
        ("plain", 100), ("cap", 100), ("plain", 101), ("cap", 101)]
    bench("forms", fake, "--count", "7")  # other cases: nothing is taken over
    assert len(made) == 8
    for commit in ("two", "one+changes", "one+changes"):  # other code, and code nobody can name
        monkeypatch.setattr(common, "COMMIT", commit)
        bench("forms", fake, "--seeds", "100", "--only", "cap")
    assert made[8:] == 3 * [("cap", 100)]


def positive(*values):
    return all(0 < value < 1e4 for value in values)


def every(rows, **wanted):
    return rows and all(row[key] == value for row in rows for key, value in wanted.items())


EXPECTED = {  # what a small run must have found: script -> record -> of its summary and rows
    "speed": {"speed": lambda s, r: r[0]["heads found"] == 4 and s["worst head error"] < 1e-12 and positive(
        r[0]["learn, s"], r[0]["Adam, s"], r[0]["ratio"], r[0]["its ratio"])
        and r[0]["Adam reached"] < r[0]["best Adam reached"]},  # 120 steps and 50
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
    "ranks": {"ranks": lambda s, r: every(r, status="recovered", heads=2, **{"as the model says": True})
              and s["heads apart, at most"] < 1e-12 and [row["ranks"] for row in r] == [1, 2]},
    "inputs": {"inputs": lambda s, r: s["head count right"] == len(r) == 2 and s["worst error"] < 1e-9},
    "methods": {"methods": lambda s, r: s["white"] == "auto" and len(r) == 2 and every(r[:1], said="recovered")
                and r[0]["error"] < 1e-12 < r[1]["error"]},
    "modules": {"modules": lambda s, r: every(r, heads=8) and s["largest difference of outputs"] < 1e-9},
    "which": {"which": lambda s, r: len(r) == 2 and all(row["right"] and row["does as well"] for row in r)
              and s["black box: form right"] == 1 and r[1]["asked"] > r[0]["compared"] == 1},
    "forms": {"forms": lambda s, r: every(r, status="recovered", heads=1, size=2) and s["all heads to 1e-9"] == 1
              and positive(r[0]["Adam's output error"], r[0]["seconds"])},
    "models": {"models": lambda s, r: s["all heads within 1e-9"] == 1 == len(r) and r[0]["heads found"] == 1
               and r[0]["error on fresh inputs"] < 1e-9 < r[0]["Adam, error on fresh inputs"]},
    "linear": {"linear": lambda s, r: s["operator within 1e-9"] == s["rank right"] == s["layers"] == 4
               and s["declared the same"] == s["pairs of one operator"] == 4 and s["said recovered, and wrong"] == 0
               and s["refused"] == s["labels of a softmax"] == s["told apart with an input"] - 1 == 1},
    "same": {"same": lambda s, r: every(r, right=True) and len(r) == 18
             and s["mistakes named"] == "10 of 10" and s["harmless changes called the same"] == "8 of 8"},
    "behaviours": {"behaviours": lambda s, r: every(r, right=True) and s["heads"] == s["named right"] == 4
                   and s["heads without a name"] == s["given none"] == 1},
    "verdicts": {"verdicts": lambda s, r: every(r, true=True) and s["true"] == len(r) == 3
                 and [row["said"] for row in r] == ["recovered", "noise", "too_few"]},
    "queries": {"queries": lambda s, r: s["recovered to 1e-9"] == s["count right"] == 1 == len(r)
                and r[0]["calls"] < r[0]["published"] == 285 and positive(r[0]["random calls"]),
                "queries_layers": lambda s, r: every(r, m=2, d=6, seed=1000, plan="chosen") and s["instances"] == 1,
                "queries_random": lambda s, r: every(r, m=2, d=6, seeds=1) and positive(r[0]["calls"])},
    "outliers": {"outliers": lambda s, r: len(r) == 1 and r[0]["outliers"] == 3 and 0 <= r[0]["share named"] <= 1},
    "trial": {"trial": lambda s, r: every(r, true=True) and [row["item"] for row in r] == [3, 6, 8]
              and r[0]["said"] == "refused" and s["crashes"] == 0},
    "rules": {"rules": lambda s, r: [row["buys"] for row in r] == ["truth", "nothing"]
              and s["rules that buy nothing"] == "refine.BATCH" and s["buy truth"] == 1},
    "gpts": {"gpts": lambda s, r: [(row["layer"], row["inputs"]) for row in r] == [
        (0, "task"), (0, "random"), (1, "task"), (1, "random")] and positive(
            *(row["error on other sequences"] for row in r))},
    "sculpt": {"sculpt": lambda s, r: s == {"m1-d8-k2": "1 of 1 (wanted 1)"} and r[0]["after polish"] < 1e-9},
    "cost": {"cost": lambda s, r: {row["method"] for row in r} == {"moments", "sculpt"} and positive(
        *(row["examples"] for row in r), *(row["seconds"] for row in r))},
    "spoiled": {"spoiled": lambda s, r: len(r) == 12 and s["of them called yes"] == 0 < s["false claims"] and every(
        r[:10], false=2, no=2)},
    "coverage": {"coverage": lambda s, r: len(r) == 48 and all(0 <= row["covered"] <= 1 for row in r),
                 "looks": lambda s, r: (r[0]["at any time"], r[0]["looked at once"]) == (491, 459),
                 "stopped": lambda s, r: s["below nominal"] == 0 < len(r) and all(row["covered"] < 1 for row in r),
                 "demonstrated": lambda s, r: every(r[:2], holds="yes"),
                 "radius": lambda s, r: every(r, decided="yes", inside=True, **{"planted error": "no"})},
    "bars": {"bars": lambda s, r: len(r) == 6 and all(row["covered"] == 1.0 and row["undecided"] == 0 for row in r)
             and positive(*(row["mean bound over error"] for row in r))},
    "wrong": {"wrong": lambda s, r: s["false yes"] == 0 and s["certificates"] == 8 and all(
        row["yes"] == 2 for row in r if row["error"] == "none")},
    "determined": {"determined": lambda s, r: s["layers"] == s["judged"] == 1 and 0.5 < r[0]["Θ known"] < 1
                   and s["least share of directions within ε"] >= 0.99 and r[0]["one function there"]},
    "certify_wide": {"certify_wide": lambda s, r: s["undecided"] == 0 and every(
        r, **{"distance to the truth": "yes", "error bars": "yes"})},
    "certify_large": {"certify_large": lambda s, r: s["undecided"] == 0 and every(
        r, **{"distance to the truth": "yes", "error bars": "yes", "what is determined": "yes"})},
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
    "recall": {"recall": lambda s, r: s["written"] is False and positive(s["loss"]) and [
        (row["layer"], row["head"]) for row in r] == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2)]},
    "report": {"report": lambda s, r: positive(s["page, MB"], s["seconds to open it, median"])},
    "sweep": {"sweep": lambda s, r: every(r, success=True, **{"same to the last bit": True})
              and (s["runs"], s["workers killed"], s["lost"]) == (1, 1, 0)},
    "streams": {"streams": lambda s, r: s["sequences asked for"] == r[-1]["asked"] > 0 and all(
        row["steps"] == s["steps of each"] and row["sequences met"] > 0 for row in r)},
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
        assert re.search(r"\d", attrgetter(claim)(claims)())  # the sentence finds the columns it speaks of


def test_the_prediction_is_the_formula_of_the_page(bench):
    model = importlib.import_module("scaling")
    one, many = (model.product(4096, 32, 128, ranks, 40e12) for ranks in (1, 64))
    d = 4096
    assert (one.sent, one.inside, one.slow) == (0, 0, 0)
    assert one.arithmetic == pytest.approx(18 * d * d * one.rows / 40e12) == pytest.approx(64 * many.arithmetic)
    assert many.sent == pytest.approx(8 * 63 / 64 * (d * d + 3 * d * d), rel=1e-3)
    assert many.inside == many.sent / 50e9 and many.seconds == many.arithmetic + many.inside
    rows = model.even(4096, 32, 128, 40e12, 50e9)  # so many a rank, and both take as long
    assert 18 * d * d * rows / 40e12 == pytest.approx(many.inside)


def test_every_benchmark_is_among_them():
    others = {"common", "stopwatch", "encoder", "real", "swap", "text", "all", "pages", "claims", "statements",
              "scaling", "judged", "labels", "nets", "scenes", "asked", "smol", "workers", "rival"}
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
                  "--inputs", "text", "--layers", 1, "--count", 600, "--seconds", 600)["text"]
    row = found["rows"][0]
    assert row["inputs"] == "text" and row["sequences"] == 600
    assert row["heads found"] == 4 == row["patterns met to 1e-6"]
    assert row["error on other sequences"] < 1e-6


# -- the benchmarks of true statements --------------------------------------------------------------------------


@pytest.fixture
def beside(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def stated(kind, layer, sentence="2 heads", noise=0.1, outliers=()):
    import judged

    status = hw.Status(kind, sentence, {"noise": noise})
    fit = hw.Fit(layer, status, {}, ({"stage": "aside", "outliers": list(outliers)},))
    return judged.Said(kind, sentence, status.ok, 1.0, fit)


def test_a_statement_is_held_against_what_made_the_labels(beside):
    import judged
    from judged import LABEL_NOISE, NO_LAYER, SPOILT, TOO_FEW

    layer, other = (hw.AttentionLayer.random(heads=2, width=4, seed=seed) for seed in (0, 1))
    one = hw.AttentionLayer(layer.Theta[:1], layer.W[:1])
    X = hw.draw(layer, 100, 5, law="gaussian", seed=2).X
    case = judged.Case(hw.Examples(X, layer(X)), X, layer(X), layer, noise=0.1, wrong=frozenset({3, 7}))
    exact = {"recovered": (judged.heads_within(1e-9),)}
    for told, truth, why in (
        (stated("recovered", layer), exact, ""),
        (stated("recovered", other), exact, "heads off by"),
        (stated("limit", layer), exact, "limit, where recovered would be true"),
        (stated("recovered", layer, "3 heads"), exact, "the sentence says 3 heads, the layer has 2"),
        (stated("not_realisable", other), NO_LAYER, ""),
        (stated("noise", layer), NO_LAYER, ""),  # it is the function, after all
        (stated("noise", other), NO_LAYER, "on other sequences"),
        (stated("limit", other), NO_LAYER, "limit, where"),
        (stated("noise", layer), LABEL_NOISE, ""),
        (stated("noise", layer, noise=0.07), LABEL_NOISE, "noise said to be 7.00e-02, it is 1.00e-01"),
        (stated("noise", other), LABEL_NOISE, "the noise allows"),
        (stated("noise", one, "1 head"), LABEL_NOISE, "1 heads, there are 2"),
        (stated("fitted", layer, outliers=[3, 7]), SPOILT, ""),
        (stated("fitted", layer, outliers=[3]), SPOILT, "1 of 2 outliers named"),
        (stated("fitted", layer, outliers=[3, 7, 8]), SPOILT, "1 right sequences called outliers"),
        (stated("fitted", other, outliers=[3, 7]), SPOILT, "heads off by"),
        (stated("too_few", other), TOO_FEW, ""),
        (stated("recovered", layer), TOO_FEW, "recovered, where too_few would be true"),
    ):
        found = judged.judge(told, case, truth)
        assert found == "" if not why else why in found, (told, truth, found)


def test_a_run_that_refuses_or_breaks_is_kept_as_such(beside, monkeypatch):
    import judged

    layer = hw.AttentionLayer.random(heads=1, width=4, seed=0)
    data = hw.draw(layer, 50, 4, law="gaussian", seed=1)
    case = judged.Case(data, data.X, data.Y, layer)
    assert judged.ask(case, heads=0).kind == "refused"

    def breaks(*args, **options):
        raise RuntimeError("no")

    monkeypatch.setattr(hw, "learn", breaks)
    said = judged.ask(case)
    assert (said.kind, said.sentence, said.ok) == ("crash", "RuntimeError: no", False)
    assert judged.row(said, case, "broken")["error on other sequences"] is None


def test_labels_are_what_their_names_say(beside):
    import labels

    layer = hw.AttentionLayer.random(heads=2, width=6, seed=0)
    draw = torch.Generator().manual_seed(1)
    X = labels.normal(draw, 400, 7, 6)
    Y, order = layer(X), torch.randperm(7, generator=draw)
    rules = {"rotary": labels.rotary(layer), "relu": labels.relu(layer), "normed": labels.normed(layer),
             "mlp": labels.mlp(6, draw), "linear": labels.linear(6, draw)}
    for name, rule in rules.items():
        moved = (rule(X[:, order]) - rule(X)[:, order]).abs().max()
        assert (moved > 0.1) == (name == "rotary"), name  # of these only rotary scores know positions
        assert (rule(X) - Y).norm() > 0.2 * Y.norm()
    # With one position there is nothing to turn against.
    torch.testing.assert_close(rules["rotary"](X[:, :1]), layer(X[:, :1]))
    torch.testing.assert_close(labels.normed(layer, 0.0)(X), X.mean(1, keepdim=True).expand_as(X) @ layer.W.sum(0))
    for noise in (labels.noisy(Y, 0.1, draw) - Y, labels.growing(Y, X, 0.1, draw) - Y):
        assert 0.095 < float(noise.square().mean().sqrt()) / labels.deviation(Y) < 0.105
    small, large = X.square().sum(2).flatten().argsort()[[0, -1]].tolist()
    assert noise.flatten(0, 1)[large].norm() > 5 * noise.flatten(0, 1)[small].norm()


def test_spoilt_labels_are_those_that_are_named(beside):
    import labels

    Y = labels.normal(torch.Generator().manual_seed(0), 200, 5, 3)
    for spoil, count in ((labels.blocks_too_large, 8), (labels.scaled_up, 8), (labels.mixed_up, 8),
                         (labels.rows_shuffled, None)):
        wrong, at = spoil(Y, 0.04, torch.Generator().manual_seed(1))
        changed = (wrong != Y).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == sorted(int(j) for j in at)
        assert count is None or len(changed) == count
    assert set(labels.mixed_up(Y, 0.5, torch.Generator().manual_seed(1))[1].values()) == set(labels.WRONGNESS)


def test_networks_answer_what_their_task_asks(beside):
    import nets

    draw = torch.Generator().manual_seed(0)
    ids, answers = nets.repeat(3, draw)
    asked = answers != nets.IGNORED
    assert asked.sum() == 3 * nets.LENGTH // 2
    assert (answers[:, :-1] == ids[:, 1:])[asked[:, :-1]].all()  # what comes next
    ids, answers = nets.order(3, draw)
    assert answers[0].tolist() == [sum(b < a for b in ids[0].tolist()) for a in ids[0].tolist()]
    net = nets.encoder(0, 1, draw)
    (z, _), layer, block = net.tokens(4, draw), net.layers()[0], net.net.blocks[0].double()
    torch.testing.assert_close(layer(z), block.attention(z, z, z, need_weights=False)[0].detach())


def test_a_benchmark_not_run_yet_has_no_row(beside, monkeypatch, tmp_path):
    import pages
    import statements

    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    assert statements.rows() == []
    assert statements.trial() == "Not measured yet (`bench/trial.py`)."


def test_cases_run_side_by_side_come_back_in_order(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    workers, threads = importlib.import_module("workers"), torch.get_num_threads()
    cases = [(1, 2), (3, 4), (5, 6)]
    try:
        assert workers.each(divmod, cases, 2) == workers.each(divmod, cases) == [(0, 1), (0, 3), (0, 5)]
    finally:
        torch.set_num_threads(threads)
