"""What README and documentation show runs: code in order, commands in a folder of their own, gallery, figure.

Benchmarks are run in small by test_bench.py.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
import torch
from typer.testing import CliRunner

import headway as hw
from headway.cli.main import app
from headway.core.examples import write

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md",
         *sorted(path for path in (ROOT / "docs").rglob("*.md") if not {"_build", "gallery"} & set(path.parts))]
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
WORDS = "".join(page.read_text() for page in PAGES)


def blocks(path):
    """(kind, body) of the fenced blocks, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), flags=re.S | re.M)


def run(line):
    """A shell line of the documentation; ``# exit code N`` behind it says what is expected."""
    expected = int((re.search(r"# exit code (\d)", line) or [0, 0])[1])
    words = shlex.split(line, comments=True)
    result = CliRunner().invoke(app, words[1:])
    code = 2 if isinstance(result.exception, hw.InputError) else result.exit_code
    assert code == expected, (line, result.output, result.exception)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_runs_from_top_to_bottom(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mine = hw.draw(hw.AttentionLayer.random(heads=1, width=4, seed=0), count=100, length=4, seed=1)
    names = {"X": mine.X.to(torch.float64), "Y": mine.Y} if name == "README.md" else {}
    for kind, body in blocks(ROOT / name):
        if kind == "python":
            exec(compile(body, name, "exec"), names)
        elif kind == "sh":
            for line in body.splitlines():
                if line.startswith("headway "):
                    run(line)
                else:
                    assert line.split()[0] in ("make", "python"), f"{line!r} is not run by any test"
    if name == "README.md":
        said = capsys.readouterr().out
        assert said.startswith("Recovered to the floor of the arithmetic: 4 heads")
        assert max(names["match"].theta_error) < 1e-14
        assert names["mine"].status.ok
        assert names["cert"]["held-out quantile"].holds == "yes"
    if name == "docs/sculpting.md":
        assert names["event"]["sum_error"] < 1e-2
    if name == "docs/certificates.md":
        assert names["certificate"]["distance to the truth"].holds == "yes"
    if name == "docs/hardness.md":
        assert names["certificate"]["non-degeneracy"].holds == "no"
    if name == "docs/training.md":
        assert names["done"].path.columns["loss"][-1] < names["done"].path.columns["loss"][0]


def test_blocks_are_of_known_kinds():
    for page in PAGES:
        for kind, _ in blocks(page):
            assert kind in ("python", "sh", ""), f"{page}: a block of kind {kind!r}"


# -- commands inside sentences ----------------------------------------------------------------------------------

INLINE = sorted({" ".join(words.split()) for words in re.findall(r"`(headway [^`]+)`", WORDS)})
SHORTER = {  # the same command on less, because it would take long
    "headway bench FOLDER": "--suite parity --learner starts --seconds 1 --seeds 1 --quick",
    "headway train --out RUN --heads 1,4,16 --step 1": "--steps 20",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with what the placeholders of the documentation stand for."""
    base = tmp_path_factory.mktemp("world")
    layer = hw.AttentionLayer.random(heads=2, width=8, seed=0)
    # Of two ±1 tokens there are few: fresh ones are longer, or some would be those that were learned from.
    for name, count, length, seed in (("EXAMPLES", 30_000, 2, 1), ("FRESH", 800, 4, 2)):
        write(base / name, [hw.draw(layer, count=count, length=length, seed=seed)], truth=layer)
    before = Path.cwd()
    os.chdir(base)
    try:
        run("headway learn EXAMPLES --out RUN --heads 2")
    finally:
        os.chdir(before)
    shutil.copy(base / "EXAMPLES" / "truth.safetensors", base / "LAYER.safetensors")
    for name in ("A", "B"):
        shutil.copytree(base / "RUN", base / name)
    return base


@pytest.mark.parametrize("line", INLINE)
def test_a_command_in_a_sentence_runs(line, world, tmp_path, monkeypatch):
    for path in world.iterdir():  # each command finds the same world
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    if len(line.split()) == 2 or "--help" in line:
        assert CliRunner().invoke(app, [*line.split()[1:2], "--help"]).exit_code == 0
        return
    if "--out RUN" in line:
        shutil.rmtree("RUN")
    if "make FRESH" in line:
        shutil.rmtree("FRESH")
    run(f"{line} {SHORTER.get(line, '')}")


# -- what make and python do ------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make (demo|test|bench|docs|clean)", WORDS))))
def test_a_make_target_exists(target):
    # CI runs `make test`; the others name commands that tests run: headway demo, the benchmarks, the gallery.
    said = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wanted = {"demo": "headway demo", "test": "pytest", "bench": "bench/$name.py", "docs": "sphinx", "clean": "rm"}
    assert wanted[target] in said


@pytest.mark.parametrize("script", sorted(set(re.findall(r"python (bench/\w+\.py)", WORDS))))
def test_the_benchmarks_named_exist_and_have_results(script):
    assert (ROOT / script).exists()
    name = Path(script).stem
    if name != "gpu_check":
        assert (ROOT / "bench" / "results" / f"{name}.json").exists(), f"run {script} and commit its results"


EXAMPLES = sorted((ROOT / "docs" / "examples").glob("plot_*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_of_the_gallery_shows_what_it_asserts(script, capsys):
    import matplotlib.pyplot as plt

    matplotlib.use("Agg")
    runpy.run_path(str(script), run_name="__main__")
    figures = plt.get_fignums()
    plt.close("all")
    assert figures, "an example draws something"
    assert capsys.readouterr().out or "print" not in script.read_text()
    assert "assert " in script.read_text()


def test_the_figure_is_drawn(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("figure", ROOT / "docs" / "figure.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "WIDTH", 8)
    monkeypatch.setattr(script, "COUNT", 600)
    monkeypatch.setattr(sys, "argv", ["figure.py", str(tmp_path / "figure.png")])
    script.main()
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert (ROOT / "docs" / "figure.png").exists()
    assert "docs/figure.png" in (ROOT / "README.md").read_text()


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            if not target.startswith("gallery/"):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
