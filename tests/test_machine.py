"""What a machine may rely on: exit codes, strict JSON, nothing that hangs, runs that belong to their data.

Commands are called inside this process, through the same door as from a shell.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import headway as hw
from headway.cli.main import main
from headway.core.files import write_tensors
from headway.core.layer import load_layer, save_layer
from headway.core.shards import write
from headway.runs.store import Run


@pytest.fixture
def headway(capsys, monkeypatch):
    def call(*words):
        monkeypatch.setattr(sys, "argv", ["headway", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return SimpleNamespace(code=ended.value.code or 0, out=said.out, err=" ".join(said.err.split()))

    return call


def strict(text):
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Examples of a small layer in two shards, and a finished run on them."""
    base = tmp_path_factory.mktemp("world")
    layer = hw.AttentionLayer.random(heads=2, width=5, seed=0)
    write(base / "data", [hw.draw(layer, count=100, length=4, seed=s) for s in (1, 2)], 2, layer)
    hw.learn(hw.Examples.open(base / "data"), heads=2, device="cpu", run=base / "run")
    return base


@pytest.fixture
def copy(world, tmp_path):
    shutil.copytree(world / "run", tmp_path / "run")
    return tmp_path / "run"


def edit(path, change):
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


# -- the cost of help -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--help"], ["learn", "--help"]], ids=" ".join)
def test_help_does_not_wait_for_torch(words):
    code = ("import sys; from headway.cli import main\n"
            f"sys.argv = ['headway', *{words!r}]\n"
            "try: main()\nexcept SystemExit as end: assert not end.code\n"
            "print('loaded', sorted({'torch', 'numpy', 'scipy'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded []"


# -- exit codes -------------------------------------------------------------------------------------------------


def test_a_fault_of_ours_has_a_code_of_its_own(headway, monkeypatch, tmp_path):
    def fail(*_):
        raise KeyError("a slip")

    monkeypatch.setattr(Run, "open", fail)
    done = headway("show", tmp_path)
    assert done.code == 3
    assert "a fault of Headway" in done.err
    assert "KeyError: 'a slip'" in done.err
    assert "Traceback" not in done.err
    monkeypatch.setenv("HEADWAY_TRACEBACK", "1")
    assert "Traceback" in headway("show", tmp_path).err


def test_an_interrupted_command_exits_130(headway, monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "open", interrupt)
    done = headway("show", tmp_path)
    assert done.code == 130
    assert "interrupted" in done.err


def test_what_does_not_fit_in_memory_is_refused_in_a_sentence(headway, refused, tmp_path):
    done = headway("make", tmp_path / "data", "--width", 10_000_000)
    assert done.code == 2
    assert "memory" in done.err
    assert list(tmp_path.iterdir()) == []
    with refused("count, length", "memory"):
        hw.draw(hw.AttentionLayer.random(heads=1, width=4, seed=0), count=1, length=10**15)


# -- JSON -------------------------------------------------------------------------------------------------------


def test_json_knows_no_infinity(headway, copy, tmp_path):
    save_layer(tmp_path / "more.safetensors", hw.AttentionLayer.random(heads=3, width=5, seed=7))
    done = headway("show", copy, "--truth", tmp_path / "more.safetensors", "--json")
    found = strict(done.out)
    assert None in found["match"]["theta_error"], "a head without a partner has no error"


def test_the_two_floors_have_two_names(headway, copy):
    found = strict(headway("show", copy, "--json").out)
    assert found["stats"]["floor"] == 6, "sequences: 115 unknowns, 20 equations from each"
    assert 0 < found["numbers"]["arithmetic_floor"] < 1e-6
    assert "floor" not in found["numbers"]


def test_a_command_says_how_many_examples_are_needed(headway):
    done = headway("count", "--heads", 4, "--width", 32, "--length", 16, "--json")
    assert done.code == 0
    # 4·(33·32 + 32·32) + 32 unknowns, 16·32 equations from each sequence.
    assert strict(done.out) == {"unknowns": 8352, "floor": 17, "usual": 51, "safe": 102}
    assert "8,352 unknowns" in done.err
    assert headway("count", "--heads", 0).code == 2
    assert headway("count", "--length", 1).code == 2


# -- edited run folders -----------------------------------------------------------------------------------------

EDITS = {
    "status a string": ("manifest.json", lambda m: m.update(status="recovered")),
    "status with an extra key": ("manifest.json", lambda m: m["status"].update(mood="good")),
    "status of no kind": ("manifest.json", lambda m: m["status"].update(kind="splendid")),
    "empty stats": ("manifest.json", lambda m: m.update(stats={})),
    "a count in words": ("manifest.json", lambda m: m["stats"].update(examples="many")),
    "hashes in a list": ("manifest.json", lambda m: m.update(sha256=["a"])),
    "no hash of the layer": ("manifest.json", lambda m: m["sha256"].pop("layer.safetensors")),
    "a device among the files": ("manifest.json", lambda m: m["sha256"].update({"/dev/zero": "0" * 64})),
    "a file outside": ("manifest.json", lambda m: m["sha256"].update({"../secret": "0" * 64})),
    "a stage without a name": ("manifest.json", lambda m: m.update(trace=[{}])),
    "a stage that is a number": ("manifest.json", lambda m: m.update(trace=[1])),
    "an extra key": ("manifest.json", lambda m: m.update(extra=1)),
    "no digest": ("config.json", lambda c: c.pop("digest")),
    "a digest that is none": ("config.json", lambda c: c.update(digest=["a"])),
    "options in a list": ("config.json", lambda c: c.update(options=[1])),
    "an option in words": ("config.json", lambda c: c["options"].update(seed="three")),
    "an option too many": ("config.json", lambda c: c["options"].update(colour="red")),
    "an option too few": ("config.json", lambda c: c["options"].pop("seed")),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_run_is_refused_in_a_sentence_by_every_command(headway, copy, name):
    file, change = EDITS[name]
    edit(copy / file, change)
    for words in (["show", copy], ["plot", copy], ["report", copy], ["learn", "--resume", copy]):
        done = headway(*words)
        assert done.code == 2, (words, done.err)
        assert "Traceback" not in done.err
        assert "expected" in done.err


@pytest.mark.parametrize("name", [name for name, (file, _) in EDITS.items() if file == "config.json"])
def test_an_edited_configuration_of_an_unfinished_run_is_refused(headway, copy, name):
    (copy / "manifest.json").unlink()  # which vouched for the configuration
    edit(copy / "config.json", EDITS[name][1])
    done = headway("learn", "--resume", copy)
    assert done.code == 2, done.err
    assert "contents that do not fit" in done.err


def test_a_run_on_a_device_that_is_absent_is_refused(headway, copy):
    (copy / "manifest.json").unlink()
    edit(copy / "config.json", lambda c: c["options"].update(device="cuda:99"))
    done = headway("learn", "--resume", copy)
    assert done.code == 2
    assert "--device: expected a device this machine has" in done.err


# -- files that are none ----------------------------------------------------------------------------------------


def test_a_pipe_is_refused_and_never_read(headway, copy, world, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    shutil.copytree(world / "data", tmp_path / "data")
    shard = sorted((tmp_path / "data").glob("examples-*"))[0]
    shard.unlink()
    os.mkfifo(shard)
    (copy / "layer.safetensors").unlink()
    os.mkfifo(copy / "layer.safetensors")
    for words in (["learn", tmp_path / "data", "--out", tmp_path / "new"], ["show", copy],
                  ["show", world / "run", "--truth", pipe], ["show", world / "run", "--truth", "/dev/zero"],
                  ["compare", pipe, pipe]):
        done = headway(*words)
        assert done.code == 2, (words, done.err)
        assert "a pipe, a socket or a device" in done.err


# -- a run belongs to its data ----------------------------------------------------------------------------------


def sets():
    one, other = (hw.AttentionLayer.random(heads=1, width=4, seed=s) for s in (0, 1))
    return hw.draw(one, count=100, length=4, seed=2), hw.draw(other, count=100, length=4, seed=2)


@pytest.mark.parametrize("how", ["path", "text", "run"])
def test_a_run_is_not_given_to_other_examples(refused, tmp_path, how):
    A, B = sets()
    fit = hw.learn(A, run=Run.create(tmp_path / "run", {}))
    again = {"path": tmp_path / "run", "text": str(tmp_path / "run"), "run": Run.open(tmp_path / "run")}[how]
    with refused("run", "other ones"):
        hw.learn(B, run=again)
    assert torch.equal(hw.learn(A, run=again).layer.Theta, fit.layer.Theta)


def test_a_run_is_not_given_to_other_settings(refused, tmp_path):
    A, _ = sets()
    hw.learn(A, heads=1, run=tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["digest"] == A.digest()
    assert config["options"]["heads"] == 1
    for name, other in (("heads", {"heads": "auto"}), ("seed", {"seed": 1}), ("method", {"method": "starts"}),
                        ("rank", {"rank": None}), ("limit", {"method": hw.Auto(limit=7)})):
        with refused("run", name):
            hw.learn(A, run=tmp_path / "run", **{"heads": 1, **other})
    with refused("run", "a folder"):
        hw.learn(A, run=3)


def test_a_finished_run_is_read_back_and_not_computed_again(tmp_path, monkeypatch):
    A, _ = sets()
    first = hw.learn(A, run=tmp_path / "run")
    monkeypatch.setattr(Run, "stage", lambda *_: pytest.fail("computed again"))
    again = hw.learn(A, run=tmp_path / "run", seconds=5)
    assert again.status == first.status
    assert again.stats == first.stats
    assert torch.equal(again.layer.Theta, first.layer.Theta)


def test_a_run_that_does_not_say_whose_it_is_is_refused(refused, tmp_path):
    A, _ = sets()
    run = Run.create(tmp_path / "run", {})
    run.stage("frame", lambda: ({}, {}))
    with refused("run", "config.json does not"):
        hw.learn(A, run=run)


# -- going on ---------------------------------------------------------------------------------------------------


def test_a_run_whose_time_ran_out_goes_on_with_more(headway, world, tmp_path):
    done = headway("learn", world / "data", "--out", tmp_path / "run", "--seconds", 1e-6, "--json")
    assert done.code == 1
    assert strict(done.out)["stats"]["out_of_time"]
    done = headway("learn", "--resume", tmp_path / "run", "--seconds", 60, "--json")
    assert done.code == 0, done.err
    assert strict(done.out)["status"] == "recovered"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["options"]["seconds"] == 60
    truth = load_layer(world / "data" / "truth.safetensors")
    assert hw.match(load_layer(tmp_path / "run" / "layer.safetensors"), truth).worst < 1e-9
    assert headway("show", tmp_path / "run").code == 0, "the manifest vouches for what is there now"


def test_an_option_that_differs_is_refused_on_resuming(headway, copy, world, tmp_path):
    for words in (["--heads", 3], ["--seed", 1], ["--rank", "none"], ["--method", "starts"], ["--no-polish"]):
        done = headway("learn", "--resume", copy, *words)
        assert done.code == 2, words
        assert "as the run began" in done.err
    assert headway("learn", "--resume", copy, "--heads", 2).code == 0, "the same one is no other"
    done = headway("learn", world / "data", "--out", tmp_path / "new", "--examples", world / "data")
    assert done.code == 2


def test_examples_that_were_moved_are_named_on_resuming(headway, world, tmp_path):
    for name in ("data", "run"):
        shutil.copytree(world / name, tmp_path / name)
    (tmp_path / "run" / "manifest.json").unlink()
    edit(tmp_path / "run" / "config.json", lambda c: c.update(examples=str(tmp_path / "gone")))
    done = headway("learn", "--resume", tmp_path / "run")
    assert done.code == 2
    assert "--examples DIR" in done.err
    done = headway("learn", "--resume", tmp_path / "run", "--examples", tmp_path / "data")
    assert done.code == 0, done.err
    assert (tmp_path / "run" / "layer.safetensors").read_bytes() == (
        world / "run" / "layer.safetensors").read_bytes()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["examples"] == str(tmp_path / "data")


def test_a_run_killed_as_it_began_can_be_made_again(headway, world, tmp_path):
    (tmp_path / "run" / "stages").mkdir(parents=True)
    (tmp_path / "run" / ".config.json.a1b2").write_text("{")
    done = headway("learn", "--resume", tmp_path / "run")
    assert done.code == 2
    assert "stopped before it wrote anything" in done.err
    assert headway("learn", world / "data", "--out", tmp_path / "run", "--heads", 2).code == 0


def test_what_a_killed_make_left_goes_with_the_next(tmp_path):
    words = [sys.executable, "-c", (
        "import os, sys, headway as hw\n"
        "from headway.core.shards import write\n"
        "data = hw.draw(hw.AttentionLayer.random(heads=1, width=3), count=4, length=3)\n"
        "def batches():\n    yield data\n    os.kill(os.getpid(), 9)\n"
        "write(sys.argv[1], batches(), 2)")]
    killed = subprocess.run([*words, str(tmp_path / "data")], check=False, capture_output=True)
    assert killed.returncode == -9, killed.stderr
    assert len(list(tmp_path.iterdir())) == 1, "what a kill leaves"
    data, _ = sets()

    def batches():
        (mine,) = tmp_path.iterdir()  # the old one is gone
        write(tmp_path / "data", [data], 1)  # another process at the same place
        assert mine.is_dir(), "a folder that is worked in is left alone"
        shutil.rmtree(tmp_path / "data")
        yield data

    write(tmp_path / "data", batches(), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


# -- words ------------------------------------------------------------------------------------------------------


def test_a_log_gets_a_line_for_each_stage(headway, world, tmp_path):
    done = headway("learn", world / "data", "--out", tmp_path / "run", "--heads", 2)
    stages = [event["stage"] for event in Run.open(tmp_path / "run").fit().trace]
    for stage in stages:
        assert f"{stage}: " in done.err
    assert "residual" in done.err
    assert done.err.index(" s ") > 0


def test_a_log_has_an_end():
    from headway.cli.console import Log

    lines = []
    log = Log(lines.append, most=5)
    for j in range(50):
        log({"stage": f"start-{j}", "residual": None})
        log({"stage": f"start-{j}", "residual": 0.5})
    log.ended()
    assert len(lines) == 5
    assert lines[0].startswith("start-0: residual 5.0e-01, ")
    assert lines[-1].endswith("further stages are not shown")


def test_a_shard_with_nan_is_named_with_the_row_in_it(headway, tmp_path, monkeypatch):
    data, _ = sets()
    spoiled = hw.draw(hw.AttentionLayer.random(heads=1, width=4, seed=0), count=1200, length=4, seed=3)
    spoiled.Y[1100, 2, 3] = float("nan")
    spoiled.Y[1150, 0, 0] = float("inf")
    write(tmp_path / "data", [data, spoiled], 2)
    words = "nan in examples-00001-of-00002.safetensors, row 1100 there (sequence 1200 of all), token 2, feature 3"
    stored = hw.Examples.open(tmp_path / "data")
    for read in (lambda: hw.learn(stored), stored.digest, lambda: stored.take([1250])):
        with pytest.raises(hw.InputError) as caught:
            read()
        assert words in str(caught.value)
    assert words in headway("learn", tmp_path / "data", "--out", tmp_path / "run").err


def test_labels_beyond_the_reach_of_squares_are_refused_with_a_true_sentence(refused):
    data, _ = sets()
    for factor in (1e300, 1e-300):
        with refused("examples.Y", "1e-140 to 1e150"):
            hw.learn(hw.Examples(data.X, data.Y * factor))
        with refused("examples.X", "1e-140 to 1e150"):
            hw.learn(hw.Examples(data.X.double() * factor, data.Y))


def test_equal_layers_are_equal_bytes(tmp_path):
    layer = hw.AttentionLayer.random(heads=2, width=4, key_bias=True, offset=True, seed=0)
    made = set()
    for j in range(16):
        save_layer(tmp_path / f"{j}.safetensors", layer)
        made.add((tmp_path / f"{j}.safetensors").read_bytes())
    assert len(made) == 1
    assert load_layer(tmp_path / "0.safetensors").tensors().keys() == layer.tensors().keys()


ODD = {
    "sparse": (lambda Y: Y.to_sparse(), "to_dense"),
    "meta": (lambda Y: Y.to("meta"), "values"),
    "quantized": (lambda Y: torch.quantize_per_tensor(Y.float(), 0.1, 0, torch.qint8), "dequantize"),
    "float8": (lambda Y: Y.to(torch.float8_e4m3fn), "float32"),
    "nested": (lambda Y: torch.nested.nested_tensor(list(Y)), "pad"),
    "no columns": (lambda Y: Y[:, :, :0], "at least one output column"),
}


@pytest.mark.filterwarnings("ignore")  # torch calls some of these types unfinished
@pytest.mark.parametrize("name", ODD)
def test_tensors_that_cannot_be_computed_with_are_refused(refused, name):
    data, _ = sets()
    change, hint = ODD[name]
    with refused("examples.Y", hint):
        hw.Examples(data.X, change(data.Y))


def test_arrays_that_run_backwards_are_copied():
    data, _ = sets()
    backwards = hw.Examples(data.X.numpy()[::-1], data.Y.numpy()[::-1])
    assert torch.equal(backwards.Y, data.Y.flip(0))


def test_shards_without_columns_are_refused(tmp_path):
    data, _ = sets()
    shard = tmp_path / "examples-00000-of-00001.safetensors"
    write_tensors(shard, {"X": data.X, "Y": data.Y[:, :, :0]}, {})
    with pytest.raises(hw.InputError, match="at least one output column"):
        hw.Examples.open(tmp_path)
