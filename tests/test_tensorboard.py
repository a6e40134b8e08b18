"""What TensorBoard shows of a run, read back with TensorBoard's own reader."""

from __future__ import annotations

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from tests.commands import headway

import headway as hw
from headway.cli.console import time_left
from headway.learning.policy import Facts, plan
from headway.runs.tensorboard import memory


def read(folder):
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def values(board, name):
    return [event.value for event in board.Scalars(name)]


def texts(board, name):
    return [event.tensor_proto.string_val[0].decode() for event in board.Tensors(f"{name}/text_summary")]


def settings(board):
    """What the table of hyperparameters holds of a run."""
    data = board.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    given = plugin_data_pb2.HParamsPluginData.FromString(data).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in given.items()}


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("board")
    truth = hw.AttentionLayer.random(heads=2, width=6, seed=40)
    also: list[dict] = []
    with hw.TensorBoard(folder, also.append) as board:
        fit = hw.learn(hw.draw(truth, count=240, length=5, seed=41), seed=3, progress=board)
    return fit, read(folder), also


def test_the_residual_is_that_of_the_fit_step_by_step(learned):
    _, board, also = learned
    reported = [event["residual"] for event in also if event["residual"] is not None]
    assert values(board, "residual") == pytest.approx(reported, rel=1e-6)
    assert [event.step for event in board.Scalars("residual")] == list(range(1, len(reported) + 1))
    assert min(reported) < 1e-10
    of_stages = [name for name in board.Tags()["scalars"] if name.startswith("residual of a stage/")]
    assert sum(len(values(board, name)) for name in of_stages) == len(reported)


def test_every_stage_says_why_it_was_chosen(learned):
    fit, board, _ = learned
    told = texts(board, "stages")
    for event in fit.trace:
        assert any(line.startswith(f"**{event['stage']}**") for line in told), event["stage"]
        assert event["stage"] == "frame" or event["why"], event["stage"]
    assert all(line.partition("**: ")[2] for line in told), told
    assert texts(board, "verdict") == [fit.status.sentence]


def test_settings_and_results_are_a_row_of_the_table(learned):
    fit, board, _ = learned
    found = settings(board)
    assert found["seed"] == 3.0
    assert found["method"] == "auto"
    assert values(board, "result/held_out_error") == pytest.approx([fit.stats["held_out_error"]])
    assert values(board, "result/ok") == [1.0]


def test_rate_and_memory_are_there(learned):
    _, board, _ = learned
    assert min(values(board, "steps a second")) > 0
    assert 10 < max(values(board, "memory, MiB/host")) <= memory()["host"] * (1 + 1e-6)


def test_what_is_no_number_is_left_out(tmp_path):
    with hw.TensorBoard(tmp_path) as board:
        board({"stage": "one", "heads": 1, "residual": None})
        for residual in (0.5, float("nan"), float("inf"), 0.25):
            board({"stage": "one", "heads": 1, "residual": residual})
    assert values(read(tmp_path), "residual") == [0.5, 0.25]


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(hw.InputError, match="a folder, or one to be made"):
        hw.TensorBoard(tmp_path / "file")


def test_the_package_is_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(hw.InputError, match=r"headway\[tensorboard\]"):
        hw.TensorBoard(tmp_path)


def test_learn_and_train_write_for_it(tmp_path):
    data = tmp_path / "data"
    assert headway("make", data, "--heads", 1, "--width", 4, "--length", 4, "--count", 120).returncode == 0
    done = headway("learn", data, "--out", tmp_path / "run", "--tensorboard", tmp_path / "logs", "--json")
    assert done.returncode == 0, done.stderr
    stats = json.loads(done.stdout)["stats"]
    assert values(read(tmp_path / "logs"), "result/heads") == [stats["heads"]] == [1.0]
    done = headway("train", "--out", tmp_path / "trained", "--heads", "1,2", "--steps", 5, "--no-theory",
                   "--tensorboard", tmp_path / "sweep")
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "trained" / "results.json").read_text())["results"]
    folders = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    assert len(folders) == len(kept) == 2
    for folder, one in zip(folders, kept, strict=True):
        board = read(folder)
        assert values(board, "loss") == pytest.approx(one["columns"]["loss"], rel=1e-6)
        assert settings(board)["heads"] == one["heads"]


def test_bench_writes_a_row_a_run(tmp_path, monkeypatch):
    from headway.racing import race

    row = {"suite": "zoo", "instance": "generic", "learner": "starts", "seed": 0, "budget": 1.0, "success": True,
           "worst_head_error": 1e-12, "seconds": 0.5, "status": "recovered", "heads": 2, "judged": "heads",
           "identifiable": True, "where": {}, "examples": 10}

    def ran(folder, todo, workers, report, **others):
        report(row)
        return [row]

    monkeypatch.setattr(race, "race", ran)
    done = headway("bench", tmp_path / "race", "--quick", "--suite", "zoo", "--tensorboard", tmp_path / "logs")
    assert done.returncode == 0, done.stderr
    board = read(tmp_path / "logs" / "zoo.generic.starts.0")
    assert settings(board)["learner"] == "starts"
    assert values(board, "result/success") == [1.0]


def _next(steps, answer):
    """The next action; None at the end."""
    try:
        return steps.send(answer)
    except StopIteration:
        return None


def test_every_action_of_the_policy_has_a_reason():
    """Without solving anything: answers that lead through starts, growth and the search for more."""
    from headway.core.counting import Size
    from headway.learning import actions
    from headway.learning.candidate import Seen

    facts = Facts("auto", None, "auto", 4, 2, 50, 500, 500, Size(6, 6, 5, "none", None), True, 1e-12)
    steps, answer, told = plan(facts), None, []
    heads: dict[str, int] = {}
    while (action := _next(steps, answer)) is not None:
        told.append(action.why)
        if isinstance(action, actions.Unmix):
            heads[f"{action.name}:0"] = action.heads
        answer = {actions.Glance: "", actions.Probe: True, actions.Place: False, actions.Spare: False,
                  actions.SetAside: 0, actions.Span: actions.Spanned(1, 3.0),
                  actions.Unmix: actions.Unmixed((f"{action.name}:0",), (0.6,))}.get(type(action))
        if answer is None:
            count = getattr(action, "heads", None) or (
                heads[action.base] - action.drop + (action.grow is not None))
            heads[action.name] = count
            answer = Seen(action.name, count, 0.3, 0.4, "stalled")
    assert len(told) > 10, "the way was walked to its end"
    assert all(told)
    assert len(set(told)) > 5


@pytest.mark.parametrize(("steps", "most", "until", "said"), [
    (10, 30, None, ", within 4 s"), (10, 30, 2.0, ", within 2 s"), (10, None, None, ""), (40, 30, None, ""),
    (10, None, -1.0, ", within 0 s")])
def test_the_bar_says_how_long_it_may_take(steps, most, until, said):
    assert time_left(steps, most, 5.0, until) == said
