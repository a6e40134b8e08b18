"""The README's code runs and says what it claims; every command it names exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import headway as hw
from headway.cli import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(kind):
    return [body for name, body in re.findall(r"```(\w*)\n(.*?)```", README, flags=re.S) if name == kind]


def test_the_ten_lines_run(capsys):
    truth = hw.AttentionLayer.random(heads=1, width=4, seed=0)
    mine = hw.draw(truth, count=100, length=4, seed=1)
    names = {"X": mine.X.to(torch.float64), "Y": mine.Y}
    (code,) = blocks("python")
    exec(code, names)
    said = capsys.readouterr().out
    assert said.startswith("Recovered to the floor of the arithmetic: 4 heads")
    assert max(names["match"].theta_error) < 1e-14
    assert names["mine"].status.ok
    assert names["cert"]["held-out quantile"].holds == "yes"


@pytest.mark.parametrize("page", ["sculpting", "certificates", "training", "hardness"])
def test_the_code_on_a_page_runs(page, capsys):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    names = {}
    exec(code, names)
    assert capsys.readouterr().out
    if page == "sculpting":
        assert names["event"]["sum_error"] < 1e-2
    if page == "certificates":
        assert names["certificate"]["distance to the truth"].holds == "yes"
    if page == "hardness":
        assert names["certificate"]["non-degeneracy"].holds == "no"
    if page == "training":
        assert names["done"].path.columns["loss"][-1] < names["done"].path.columns["loss"][0]


def test_the_shell_lines_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [line.split("#")[0].strip() for block in blocks("") for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("headway ")]
    assert [words[0] for words in commands] == ["make", "learn", "learn", "show", "compare", "train", "hard"]
    for words in commands:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (words, result.output)


PAGES = README + "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))


@pytest.mark.parametrize("script", sorted(set(re.findall(r"python (bench/\w+\.py)", PAGES))))
def test_the_benchmarks_named_exist_and_have_results(script):
    assert (ROOT / script).exists()
    name = Path(script).stem
    if name != "gpu_check":
        assert (ROOT / "bench" / "results" / f"{name}.json").exists(), f"run {script} and commit its results"
