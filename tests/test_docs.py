"""What README and documentation show runs: code in order, commands in a folder of their own, gallery, figure.

What takes seconds is marked docs and run by make check-docs; benchmarks are run in small by test_bench.py.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
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
from headway import recheck
from headway.cli.main import app
from headway.core.shards import write

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md",
         *sorted(path for path in (ROOT / "docs").rglob("*.md") if not {"_build", "gallery"} & set(path.parts))]
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
WORDS = "".join(page.read_text() for page in PAGES)


def blocks(path):
    """(kind, body) of the fenced blocks, in order."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", path.read_text(), flags=re.S | re.M)


def run(line):
    """A shell line of the documentation; ``# exit code N`` behind it says what is expected."""
    expected = int((re.search(r"# exit code (\d)", line) or [0, 0])[1])
    words = shlex.split(line, comments=True)
    result = CliRunner().invoke(app, words[1:])
    code = 2 if isinstance(result.exception, hw.InputError) else result.exit_code
    assert code == expected, (line, result.output, result.exception)


@pytest.mark.docs
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
                elif line.startswith("python -m headway.recheck "):
                    assert recheck.main(shlex.split(line)[3:]) == 0
                else:
                    assert line.split()[0] in ("make", "python"), f"{line!r} is not run by any test"
    if name == "README.md":
        said = capsys.readouterr().out
        assert said.startswith("Recovered to the floor of the arithmetic: 4 heads")
        assert max(names["match"].theta_error) < 1e-14
        assert names["mine"].status.ok
        assert [names["cert"][name].holds for name in ("held-out quantile", "held-out mean")] == ["yes"] * 2
    if name == "docs/sculpting.md":
        assert names["event"]["sum_error"] < 1e-2
    if name == "docs/certificates.md":
        assert names["certificate"]["distance to the truth"].holds == "yes"
    if name == "docs/hardness.md":
        assert names["certificate"]["non-degeneracy"].holds == "no"
    if name == "docs/training.md":
        assert names["done"].path.columns["loss"][-1] < names["done"].path.columns["loss"][0]


SPHINX = ("{eval-rst}", "{toctree}", "{include}")  # blocks that make docs reads


def test_blocks_are_of_known_kinds():
    for page in PAGES:
        for kind, _ in blocks(page):
            assert kind in ("python", "sh", "") or kind.split()[0] in SPHINX, f"{page}: a block of kind {kind!r}"


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
    for name, count, length, seed in (("EXAMPLES", 30_000, 2, 1), ("FRESH", 800, 4, 2), ("MORE", 800, 4, 3)):
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


@pytest.mark.docs
@pytest.mark.xdist_group("world")  # in one process, which makes the world once
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


TARGETS = {  # what each is for, as the words of its recipe
    "demo": ["headway demo"], "test": ["ruff check", "mypy", "-m pytest", '-m "not docs"'],
    "check-docs": ["-m pytest", "-m docs"], "fuzz": ["FUZZ_EXAMPLES", "FUZZ_SECONDS", "-m hypothesis"],
    "docs": ["sphinx -W"], "bench": ["bench/all.py"], "clean": ["rm -rf"]}


def recipe(target, tmp_path):
    """What make would do on a machine that has nothing yet."""
    return subprocess.run(["make", "-n", target, f"VENV={tmp_path / 'none'}"], cwd=ROOT, capture_output=True,
                          text=True, check=True).stdout


@pytest.mark.parametrize("target", TARGETS)
def test_a_make_target_does_what_is_said_of_it(target, tmp_path):
    said = recipe(target, tmp_path)
    for words in TARGETS[target]:
        assert words in said


def test_every_make_target_is_named_and_known():
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", WORDS, flags=re.M))  # as code, or a line of the shell
    assert {"demo", "test", "docs"} <= named <= set(TARGETS)
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.M)[1].split()
    assert set(phony) == set(TARGETS)
    for target in TARGETS:
        assert f"make {target}" in WORDS, f"no page says what make {target} is for"


def test_each_target_installs_its_own_part_and_no_more(tmp_path):
    installed = {target: re.findall(r"-e '?\.(\[\w+\])?", recipe(target, tmp_path)) for target in TARGETS}
    assert installed["demo"] == [""]
    assert installed["test"] == installed["fuzz"] == installed["bench"] == ["", "[test]"]
    assert installed["check-docs"] == ["", "[test]", "[docs]"]
    assert installed["docs"] == ["", "[docs]"]
    assert installed["clean"] == []
    for target in ("demo", "docs"):
        assert "browser.py" not in recipe(target, tmp_path)
    said = recipe("test", tmp_path)
    assert said.index("tests/browser.py") < said.index("-m pytest"), "the browser is there before any test runs"


def test_continuous_integration_runs_tests_documentation_and_site():
    said = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert said == ["make test", "make check-docs", "make docs"]


@pytest.mark.docs
def test_pinned_versions_install_on_the_first_python_that_is_promised():
    # Marked docs, because there the packages of make docs are installed beside those of make test.
    promised = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert f"Python {promised} or later" in (ROOT / "README.md").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M))
    checked = 0
    for name, version in pinned.items():
        try:
            found = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if found["Version"].split("+")[0] == version:
            least = re.search(r">=\s*([\d.]+)", found.get("Requires-Python", ">=3"))[1]
            assert tuple(map(int, least.split("."))) <= (*map(int, promised.split(".")), 0), (
                f"{name} {version} needs Python {least}")
            checked += 1
    assert checked > 50


def test_the_numbers_of_a_benchmark_are_kept_under_the_command_that_is_shown():
    shown = {" ".join(words.split()) for words in re.findall(r"`(python bench/[^`]+)`", WORDS)}
    assert len(shown) > 15
    kept = {}
    for path in (ROOT / "bench" / "results").glob("*.json"):
        result = json.loads(path.read_text())
        kept[result["command"]] = result
    for command in shown:
        assert (ROOT / command.split()[1]).exists(), command
        if Path(command.split()[1]).stem in ("gpu_check", "all", "pages"):  # these measure nothing of their own
            continue
        assert command in kept, f"run {command} and commit its results"
        assert kept[command]["summary"] or kept[command]["rows"], f"{command} kept nothing"


EXAMPLES = sorted((ROOT / "docs" / "examples").glob("plot_*.py"))


@pytest.mark.docs
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


@pytest.mark.docs
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


@pytest.mark.docs
def test_the_pages_are_pictured(tmp_path, monkeypatch):
    from tests import browser

    browser.chromium()
    monkeypatch.setattr(sys, "argv", ["screens.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "docs" / "screens.py"), run_name="__main__")
    kept = {path.name for path in (ROOT / "docs" / "screens").glob("*.png")}
    assert kept == {path.name for path in tmp_path.glob("*.png")} == set(
        re.findall(r"\(\S*screens/(\w+\.png)\)", WORDS))
    for name in kept:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_every_public_name_is_in_the_reference():
    named = set(re.findall(r"^\.\. auto(?:class|function|exception):: headway\.(\w+)$",
                           (ROOT / "docs" / "api.md").read_text(), flags=re.M))
    assert set(hw.__all__) - named == set()


def test_every_public_name_has_an_example():
    shown = "".join(body for kind, body in blocks(ROOT / "docs" / "api.md") if kind == "python")
    without = {name for name in hw.__all__
               if f"hw.{name}" not in shown and ">>>" not in (getattr(hw, name).__doc__ or "")}
    assert without == set()


def test_core_says_where_each_of_its_modules_belongs():
    import headway.core

    there = {path.stem for path in Path(headway.core.__file__).parent.glob("*.py")} - {"__init__"}
    assert there - set(re.findall(r"\w+", headway.core.__doc__)) == set()


def test_the_glossary_is_short_and_the_questions_have_short_answers():
    terms = re.findall(r"^\| (?!word)(.+?) \|", (ROOT / "docs" / "glossary.md").read_text(), flags=re.M)
    assert 10 < len(terms) <= 25
    assert len(set(terms)) == len(terms)
    asked = re.split(r"^\*\*", (ROOT / "docs" / "questions.md").read_text(), flags=re.M)[1:]
    assert len(asked) == 5
    for one in asked:
        (answer,) = re.findall(r"```python\n(.*?)```", one, flags=re.S)
        assert len(answer.strip().splitlines()) <= 3


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            if not target.startswith("gallery/"):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


@pytest.mark.docs
def test_all_mathematics_can_be_typeset():
    """What the converter does not know it leaves as it stands, with its backslash."""
    from latex2mathml.converter import convert

    words = {page: re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.S) for page in PAGES}
    found = [(page, part) for page in PAGES for part in re.findall(
        r"\$\$(.+?)\$\$|\$([^$\n][^$]*?)\$", words[page], flags=re.S)]
    assert len(found) > 30
    for page, (display, inline) in found:
        made = convert(display or inline)
        assert "\\" not in made, f"{page.relative_to(ROOT)}: {display or inline}"
