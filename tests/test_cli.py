"""The command line, as a stranger uses it: exit codes, JSON, resuming after a kill, nothing half-written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from tests.commands import headway

import headway as hw
from headway.core.examples import Examples
from headway.core.layer import load_layer, save_layer
from headway.core.shards import write
from headway.runs.store import Run

SMALL = ["--heads", "2", "--width", "6", "--length", "5", "--count", "240"]


def apart(*words):
    """The command line in a process of its own, with as many threads as the tests."""
    return subprocess.Popen([sys.executable, "-m", "headway", *map(str, words)], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "data"
    done = headway("make", folder, *SMALL, "--shards", 3, "--seed", 5)
    assert done.returncode == 0, done.stderr
    return folder


def test_make_learn_show(data, tmp_path):
    run = tmp_path / "run"
    done = headway("learn", data, "--out", run, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "recovered"
    assert result["stats"]["heads"] == 2
    assert "Recovered to the floor" in done.stderr
    assert {p.name for p in run.iterdir()} == {"config.json", "stages", "layer.safetensors", "manifest.json",
                                              "seen.safetensors"}
    config = json.loads((run / "config.json").read_text())
    assert config["options"]["heads"] == "auto"
    assert config["options"]["seed"] == 0
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["versions"]["torch"]
    truth = load_layer(data / "truth.safetensors")
    assert hw.match(load_layer(run / "layer.safetensors"), truth).worst < 1e-9
    shown = headway("show", run, "--truth", data / "truth.safetensors", "--json")
    assert shown.returncode == 0
    assert max(json.loads(shown.stdout)["match"]["theta_error"]) < 1e-9
    assert "true head" in shown.stderr


def test_fresh_examples_of_a_stored_layer(data, tmp_path):
    layer = data / "truth.safetensors"
    done = headway("make", tmp_path / "fresh", "--layer", layer, "--length", 5, "--count", 100, "--seed", 9)
    assert done.returncode == 0, done.stderr
    old, new = (hw.Examples.open(folder) for folder in (data, tmp_path / "fresh"))
    truth = load_layer(layer)
    torch.testing.assert_close(truth(new.take(range(100)).X), new.take(range(100)).Y)
    assert not torch.equal(old.take(range(100)).X, new.take(range(100)).X)
    done = headway("make", tmp_path / "more", "--layer", layer, "--heads", 3)
    assert done.returncode == 2
    assert "--heads: expected" in done.stderr
    assert not (tmp_path / "more").exists()


def test_demo_tells_a_story(tmp_path):
    (tmp_path / "runs" / "demo-1").mkdir(parents=True)  # an earlier one is left alone
    done = headway("demo", "--heads", 2, "--width", 8, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("hidden layer", "Recovered", "Θ error", "Run folder: runs/demo-2",
                  "Look at it: runs/demo-2/report.html"):
        assert words in done.stderr
    page = (tmp_path / "runs" / "demo-2" / "report.html").read_text()
    assert "held-out quantile" in page
    assert (tmp_path / "runs" / "demo-2" / "truth.safetensors").exists()
    for words in ("induction head", "Previous token", "the learned layer in its place", "The first act took",
                  "Look at it: runs/demo-2/recall/report.html"):
        assert words in done.stderr
    looks = (tmp_path / "runs" / "demo-2" / "recall" / "report.html").read_text()
    assert "What the head writes where it looks" in looks
    told = json.loads(done.stdout)  # strict JSON, and nothing else
    assert told["run"] == "runs/demo-2"
    assert told["report"] == "runs/demo-2/report.html"
    recall = told["recall"]
    assert (recall["status"], recall["run"]) == ("recovered", "runs/demo-2/recall")
    assert max(recall["match"]["theta_error"] + recall["match"]["w_error"]) < 1e-5
    assert {head["kind"] for head in recall["heads"]} == {"induction"}
    assert recall["heads"][recall["induction"] - 1]["share"] == max(head["share"] for head in recall["heads"])
    as_it_is, without, learned = recall["model"].values()
    assert abs(learned["loss"] - as_it_is["loss"]) < 1e-5 < as_it_is["loss"] < 0.01 * without["loss"]


def test_a_layer_not_established_exits_1(tmp_path):
    layer = hw.AttentionLayer.random(heads=3, width=6, seed=1)
    write(tmp_path / "data", [hw.draw(layer, count=300, length=5, seed=2)])
    done = headway("learn", tmp_path / "data", "--out", tmp_path / "run", "--heads", 1, "--starts", 1, "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["status"] == "not_realisable"


BAD = {
    "heads zero": (["--heads", "0"], "heads"),
    "heads negative": (["--heads", "-3"], "heads"),
    "heads word": (["--heads", "lots"], "--heads"),
    "too many heads": (["--heads", "99"], "heads"),
    "method": (["--method", "magic"], "method"),
    "rank": (["--rank", "70"], "rank"),
    "device": (["--device", "abacus"], "--device"),
    "starts of Adam": (["--heads", "1", "--method", "adam", "--starts", "3"], "--starts"),
    "a net in no hull": (["--search", "net"], "--search"),
    "a rank of whole matrices": (["--heads", "1", "--method", "descent", "--rank", "2"], "rank"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_exit_2_and_write_nothing(data, tmp_path, name):
    words, argument = BAD[name]
    done = headway("learn", data, "--out", tmp_path / "run", *words)
    assert done.returncode == 2, done.stderr
    message = " ".join(done.stderr.split())
    for part in (f"headway: {argument}:", "expected", "got", "Try:"):
        assert part in message
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def spoil_truncated(folder):
    path = sorted(folder.glob("examples-*"))[1]
    path.write_bytes(path.read_bytes()[:-100])


def spoil_pickle(folder):
    sorted(folder.glob("examples-*"))[0].write_bytes(pickle.dumps({"X": 1}))


def spoil_missing(folder):
    sorted(folder.glob("examples-*"))[2].unlink()


def spoil_foreign(folder):
    for path in folder.glob("examples-*"):
        path.unlink()
    (folder / "photo.jpg").write_bytes(b"\xff\xd8")


def spoil_nan(folder):
    layer = hw.AttentionLayer.random(heads=1, width=4, seed=0)
    drawn = hw.draw(layer, count=40, length=4, seed=1)
    drawn.Y[3, 1, 2] = float("nan")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    write(folder, [drawn])


@pytest.mark.parametrize("spoil", [spoil_truncated, spoil_pickle, spoil_missing, spoil_foreign, spoil_nan])
def test_bad_files_exit_2_and_write_nothing(tmp_path, spoil):
    layer = hw.AttentionLayer.random(heads=1, width=4, seed=0)
    folder = tmp_path / "data"
    write(folder, [hw.draw(layer, count=40, length=4, seed=s) for s in range(3)], shards=3)
    spoil(folder)
    done = headway("learn", folder, "--out", tmp_path / "run")
    assert done.returncode == 2, done.stderr
    assert "expected" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_folder_in_use_is_refused(data, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("keep")
    done = headway("learn", data, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["mine.txt"]


def test_usage_errors_exit_2():
    for words, said in ((["learn"], "EXAMPLES and --out RUN"), (["nonsense"], "No such command 'nonsense'"),
                        (["show", "/nowhere/at/all"], "expected a run folder"),
                        (["make"], "Missing argument")):
        done = headway(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in " ".join(done.stderr.split())
    assert headway("--help").returncode == 0


def test_a_process_of_its_own_ends_as_the_commands_here_do():
    process = apart("show", "/nowhere/at/all")
    out, told = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    here = headway("show", "/nowhere/at/all")
    assert (here.returncode, here.stdout, here.stderr) == (2, "", told)
    assert told.startswith("headway: ")


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def test_a_run_killed_after_any_stage_ends_the_same(tmp_path, monkeypatch):
    truth = hw.AttentionLayer.random(heads=3, width=8, seed=6)
    data = hw.draw(truth, count=400, length=6, noise=0.01, seed=7)
    whole = Run.create(tmp_path / "whole", {})
    reference = hw.learn(data, run=whole)
    stages = [event["stage"] for event in reference.trace if event["stage"] != "frame"]
    assert len(stages) >= 4
    for stop in range(len(stages)):
        run = Run.create(tmp_path / f"killed-{stop}", {})
        ordinary, made = Run.stage, []

        def stage(self, name, compute, ordinary=ordinary, made=made, stop=stop):
            if len(made) == stop:
                raise Killed
            made.append(name)
            return ordinary(self, name, compute)

        monkeypatch.setattr(Run, "stage", stage)
        with pytest.raises(Killed):
            hw.learn(data, run=run)
        monkeypatch.setattr(Run, "stage", ordinary)
        again = hw.learn(data, run=Run.open(run.path) if stop else run)
        for name, tensor in reference.layer.tensors().items():
            assert torch.equal(again.layer.tensors()[name], tensor), (stop, name)
        assert Run.open(run.path).finished


def test_resume_after_a_real_kill(tmp_path):
    done = headway("make", tmp_path / "data", "--heads", 3, "--width", 24, "--length", 8, "--count", 1200,
                   "--noise", "0.01")
    assert done.returncode == 0, done.stderr
    reference = headway("learn", tmp_path / "data", "--out", tmp_path / "whole")
    assert reference.returncode == 0, reference.stderr
    process = apart("learn", tmp_path / "data", "--out", tmp_path / "cut")
    stages = tmp_path / "cut" / "stages"
    patience = time.monotonic() + 60
    while not (stages.exists() and any(stages.iterdir())) and time.monotonic() < patience:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "cut" / "manifest.json").exists(), "killed too late to show anything"
    unfinished = headway("show", tmp_path / "cut")
    assert unfinished.returncode == 2
    assert "--resume" in unfinished.stderr
    resumed = headway("learn", "--resume", tmp_path / "cut")
    assert resumed.returncode == 0, resumed.stderr
    one, other = (load_layer(tmp_path / name / "layer.safetensors") for name in ("whole", "cut"))
    assert torch.equal(one.Theta, other.Theta)
    assert torch.equal(one.W, other.W)
    assert headway("learn", "--resume", tmp_path / "cut").returncode == 0, "a finished run is shown again"


def test_resume_refuses_other_examples(data, tmp_path):
    layer = hw.AttentionLayer.random(heads=1, width=4, seed=0)
    write(tmp_path / "data", [hw.draw(layer, count=60, length=4, seed=1)])
    assert headway("learn", tmp_path / "data", "--out", tmp_path / "run").returncode == 0
    (tmp_path / "run" / "manifest.json").unlink()  # as if it had been killed
    done = headway("learn", "--resume", tmp_path / "run", "--examples", data)
    assert done.returncode == 2
    assert "the examples" in done.stderr
    assert "other ones (digest" in " ".join(done.stderr.split())


def test_certify_writes_a_certificate_and_answers_with_its_exit_code(tmp_path):
    run = headway("make", tmp_path / "e", "--heads", 2, "--width", 6, "--length", 6, "--count", 400)
    assert run.returncode == 0, run.stderr
    learned = headway("learn", tmp_path / "e", "--out", tmp_path / "run")
    assert learned.returncode == 0, learned.stderr
    truth = load_layer(tmp_path / "e" / "truth.safetensors")
    fresh = hw.draw(truth, count=600, length=6, seed=99)
    write(tmp_path / "fresh", iter([fresh]), 1)
    good = headway("certify", tmp_path / "run", "--examples", tmp_path / "fresh", "--json")
    assert good.returncode == 0, good.stderr
    said = json.loads(good.stdout)
    assert said["holds"]["identifiability"] == "yes"
    assert said["failed"] == []
    assert set(said["reasons"]) == set(said["statements"]) == set(said["holds"])
    assert "parameters are determined" in said["statements"]["identifiability"]
    assert "singular value" in said["reasons"]["identifiability"]
    stored = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert {claim["name"] for claim in stored["claims"]} == set(said["holds"])
    assert all(claim["assumption"] for claim in stored["claims"])
    assert Run.open(tmp_path / "run").certificate()["distance to the truth"].holds == "yes"
    strict = headway("certify", tmp_path / "run", "--examples", tmp_path / "fresh", "--fraction", 0.001)
    assert strict.returncode == 1
    assert "Not established: held-out quantile" in strict.stderr
    learned_from = Examples.open(tmp_path / "e").take([9])
    write(tmp_path / "mixed", [Examples(torch.cat([fresh.X[:5], learned_from.X]),
                                        torch.cat([fresh.Y[:5], learned_from.Y]))])
    for words, message in (
        (["--examples", tmp_path / "e"], "did not use"), (["--examples", tmp_path / "mixed"], "1 of 6 sequences"),
        (["--examples", tmp_path / "nothing"], "Try"),
        (["--examples", tmp_path / "fresh", "--require", "beauty"], "held-out quantile")):
        bad = headway("certify", tmp_path / "run", *words)
        assert bad.returncode == 2
        assert message in " ".join(bad.stderr.split())


def test_a_certificate_of_another_layer_is_not_believed(tmp_path):
    layer = hw.AttentionLayer.random(heads=1, width=4, seed=0)
    data = hw.draw(layer, count=200, length=4, seed=1)
    run = Run.create(tmp_path / "run", {"digest": data.digest()})
    hw.learn(data, heads=1, run=run)
    assert run.certificate() is None
    run.certified(hw.certify(layer, hw.draw(layer, count=50, length=4, seed=2)), {})
    assert len(run.certificate().claims) == 7
    save_layer(tmp_path / "run" / "layer.safetensors", hw.AttentionLayer.random(heads=1, width=4, seed=9))
    with pytest.raises(hw.InputError, match="another"):
        run.certificate()


def test_compare_answers_with_its_exit_code(tmp_path):
    layer = hw.AttentionLayer.random(heads=2, width=4, seed=0)
    save_layer(tmp_path / "a.safetensors", layer)
    save_layer(tmp_path / "b.safetensors", hw.AttentionLayer(layer.Theta.flip(0), layer.W.flip(0)))
    save_layer(tmp_path / "c.safetensors", hw.AttentionLayer(layer.Theta, layer.W * 1.001))
    same = headway("compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json")
    assert same.returncode == 0
    assert json.loads(same.stdout)["same"] is True
    other = headway("compare", tmp_path / "a.safetensors", tmp_path / "c.safetensors")
    assert other.returncode == 1
    assert "W of head" in other.stderr


def test_sculpting_from_the_command_line_shows_its_phases(tmp_path):
    headway("make", tmp_path / "e", "--heads", 1, "--width", 5, "--length", 3, "--count", 2000, "--scale", 3)
    truth = tmp_path / "e" / "truth.safetensors"
    result = headway("learn", tmp_path / "e", "--out", tmp_path / "run", "--method", "sculpt", "--heads", 1,
                    "--truth", truth)
    assert result.returncode == 0, result.stderr
    shown = headway("show", tmp_path / "run")
    for words in ("crude sum 1", "sculpt 1", "refine 1", "sharpen 1", "ΣW"):
        assert words in shown.stderr, words


@pytest.fixture(scope="module")
def turned(tmp_path_factory):
    """Examples of a layer whose scores turn, made from its file, and a run that learned it."""
    base = tmp_path_factory.mktemp("turned")
    form = hw.Form(rotary=hw.Rotary(base=100.0), sight=hw.Sight(causal=True))
    save_layer(base / "layer.safetensors", hw.FactoredLayer.random(1, 4, size=2, form=form, seed=1))
    made = headway("make", base / "data", "--layer", base / "layer.safetensors", "--length", 5, "--count", 300,
                   "--law", "gaussian")
    assert made.returncode == 0, made.stderr
    done = headway("learn", base / "data", "--out", base / "run", "--form", "rotary:base=100+causal", "--heads", 1,
                   "--rank", 2, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "recovered"
    return base


def test_a_run_of_any_form_is_shown_drawn_and_compared(turned):
    truth = turned / "data" / "truth.safetensors"
    shown = headway("show", turned / "run", "--truth", truth, "--json")
    assert shown.returncode == 0, shown.stderr
    said = json.loads(shown.stdout)
    assert max(*said["match"]["theta_error"], *said["match"]["w_error"]) < 1e-9
    assert said["stats"]["form"] == "rotary scores, base 100, halves; causal"
    for words in ("QK error", "OV error", "descent-1", "refine-1", said["stats"]["form"]):
        assert words in " ".join(shown.stderr.split())
    done = headway("plot", turned / "run", "--format", "png")
    assert done.returncode == 0, done.stderr
    drawn = {path.name for path in (turned / "run" / "figures").iterdir()}
    assert drawn == {"residual.png", "head-1-QK.png", "head-1-OV.png"}
    assert headway("compare", turned / "run", truth).returncode == 0
    assert headway("compare", turned / "run", truth, "--on", turned / "data").returncode == 0
    page = headway("report", turned / "run", "--out", turned / "page.html", "--truth", truth)
    assert page.returncode == 0, page.stderr


def test_a_run_of_any_form_is_resumed(turned, tmp_path):
    """Its form is rebuilt from config.json; words that say the same are taken, others refused."""
    cut = tmp_path / "cut"
    shutil.copytree(turned / "run", cut)
    for name in ("manifest.json", "layer.safetensors", "seen.safetensors", "stages/refine-1.safetensors"):
        (cut / name).unlink()  # as if it had been killed
    for form, words in (("rotary:base=99+causal", "base 100, halves"), ("plain", "got plain"),
                        ("auto", "got auto")):
        other = headway("learn", "--resume", cut, "--form", form)
        assert other.returncode == 2
        assert "--form: expected rotary scores" in other.stderr
        assert words in " ".join(other.stderr.split())
    done = headway("learn", "--resume", cut, "--form", turned / "layer.safetensors")
    assert done.returncode == 0, done.stderr
    one, other = (load_layer(folder / "layer.safetensors") for folder in (turned / "run", cut))
    assert all(torch.equal(value, other.tensors()[name]) for name, value in one.tensors().items())


@pytest.mark.parametrize(("words", "said"), [
    (["--form", "rotaty"], "--form: expected plain, auto,"), (["--form", "rotary:base=big"], "base=a number"),
    (["--form", "rotary+causal", "--starts", "3"], "--starts: expected nothing with --form"),
    (["--form", "auto", "--method", "moments"], "--method: expected nothing with --form"),
    (["--form", "sink", "--rank", "none"], "rank: expected"),
    (["--form", "window:size=2"], "+causal behind --form"),
    (["--form", "none.safetensors"], "none.safetensors: expected a whole"),
    (["--form", "rotary:turned=64"], "at most"), (["--method", "sculpt", "--truth", "LAYER"], "one matrix a head")])
def test_what_a_form_cannot_take_is_refused(turned, tmp_path, words, said):
    words = [turned / "layer.safetensors" if word == "LAYER" else word for word in words]
    done = headway("learn", turned / "data", "--out", tmp_path / "run", *words)
    assert done.returncode == 2, done.stderr
    assert said in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("damage", "said"), [
    ({"form": {"rotary": {"base": "x"}}}, "options.form: rotary.base"), ({"form": "rotary"}, "options.form"),
    ({"form": {"offsets": {}}}, "options.form"), ({"form": None}, "options.form")])
def test_a_damaged_form_is_refused(turned, tmp_path, damage, said):
    copy = tmp_path / "run"
    shutil.copytree(turned / "run", copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "options": {**config["options"], **damage}}))
    for command in (["show", copy], ["learn", "--resume", copy], ["report", copy]):
        done = headway(*command)
        assert done.returncode == 2
        assert said in " ".join(done.stderr.split())


def test_a_run_is_drawn(data, tmp_path):
    run = tmp_path / "run"
    assert headway("learn", data, "--out", run).returncode == 0
    done = headway("plot", run, "--format", "png")
    assert done.returncode == 0, done.stderr
    drawn = {path.name for path in (run / "figures").iterdir()}
    assert drawn >= {"residual.png", "spectrum.png", "starts.png", "head-1-Theta.png", "head-2-W.png"}
    assert all((run / "figures" / name).stat().st_size > 3000 for name in drawn)
    assert headway("plot", run, "--format", "gif").returncode == 2
    assert headway("plot", tmp_path / "none").returncode == 2
