"""Measured numbers: README and docs say what bench/results holds, and every record says where it comes from."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
RECORDS = sorted(RESULTS.glob("*.json"))
TEXTS = [ROOT / "README.md", ROOT / "bench" / "NOTES.md",
         *sorted(path for path in (ROOT / "docs").rglob("*.md") if not {"_build", "gallery"} & set(path.parts))]


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


# -- pages and results ------------------------------------------------------------------------------------------


def test_the_pages_say_what_was_measured():
    import claims
    import pages

    for name in pages.PAGES:
        text = (ROOT / name).read_text()
        assert pages.renewed(text, claims.BLOCKS) == text, f"{name}: run python bench/pages.py --write"


def test_every_block_stands_on_a_page_that_is_checked():
    import claims
    import pages

    marked = {str(path.relative_to(ROOT)) for path in TEXTS if "<!-- numbers:begin" in path.read_text()}
    assert marked == set(pages.PAGES)
    used = {name for page in pages.PAGES for _, name, _, _ in pages.MARKED.findall((ROOT / page).read_text())}
    assert used == set(claims.BLOCKS)


MEASURED = re.compile(r"\d (?:ms|s|KiB|MiB|GiB|MB|minutes|hours)\b|\b\d+ of \d+\b|\d times\b|\de-\d+")
GIVEN = {"within 1e-3 (5 %": "the zoo's tolerance, not a result",
         "known to 1e-12, 1e-9": "levels that are counted at, not results",
         "theta_1_to_1e-09": "names of such levels"}


@pytest.mark.parametrize("path", [path for path in TEXTS if path.name != "NOTES.md"], ids=lambda path: path.name)
def test_no_measured_number_is_written_by_hand(path):
    import pages

    text = pages.MARKED.sub("", path.read_text())
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)  # what code shows is run by test_docs.py
    lines = [line for line in text.splitlines() if not any(words in line for words in GIVEN)]
    found = [line for line in lines if MEASURED.search(line)]
    assert not found, "put it into bench/claims.py, or leave it out"


def test_a_result_that_changes_changes_the_sentence(monkeypatch, tmp_path):
    import claims
    import pages

    shutil.copytree(RESULTS, tmp_path / "results")
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "results")
    path = tmp_path / "results" / "success.json"
    kept = json.loads(path.read_text())
    before = claims.success()
    kept["rows"][-1]["recovered"] = False  # a fresh seed
    path.write_text(json.dumps(kept))
    assert before.startswith("all 120 ") and before.endswith("all 60")
    assert claims.success().startswith("119 of 120 ") and claims.success().endswith("59 of 60")
    page = "<!-- numbers:begin measured -->\n| old |\n<!-- numbers:end -->\n"
    assert "119 of 120" in pages.renewed(page, claims.BLOCKS)
    with pytest.raises(ValueError, match="not closed"):
        pages.renewed("<!-- numbers:begin measured -->\n| old |\n", claims.BLOCKS)


def test_a_stale_page_is_told_and_mended(monkeypatch, tmp_path, capsys):
    import pages

    (tmp_path / "README.md").write_text("<!-- numbers:begin floor -->\n0.35 s\n<!-- numbers:end -->\n")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "PAGES", ("README.md",))
    for words, code, said in (([], 1, "README.md"), (["--write"], 0, "written"), ([], 0, "")):
        monkeypatch.setattr(sys, "argv", ["pages.py", *words])
        assert pages.main() == code
        assert said in capsys.readouterr().out
    assert "0.35 s" not in (tmp_path / "README.md").read_text()


def test_bounds_are_rounded_up_and_spans_have_both_ends():
    import pages

    assert [pages.upto(x) for x in (5.004e-16, 8.7e-26, 9.1e-7, 0.02)] == ["6e-16", "9e-26", "1e-06", "2e-02"]
    assert pages.upto([1e-3, 3.1e-3]) == "4e-03"
    assert pages.span([0.412, 0.476], ".2f") == "0.41 to 0.48"
    assert pages.span([3.0, 3.04], ".1f") == "3.0"
    assert pages.of([True, True]) == "all 2"
    assert pages.of([True, False], "layers") == "1 of 2 layers"
    assert pages.listed([200, 25000, "x"]) == "200, 25,000 and x"


# -- where a record comes from ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*RECORDS, RESULTS / "zoo" / "results.json"], ids=lambda path: path.stem)
def test_a_record_says_where_it_comes_from(path):
    import common

    kept = json.loads(path.read_text())
    assert {"command", "machine", "versions", "summary", "rows"} <= set(kept)
    if "commit" in kept:
        assert re.fullmatch(r"[0-9a-f]{12}", kept["commit"]), "measure with the code committed"
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", kept["date"])
    else:
        assert re.fullmatch(r"[0-9a-f]{7,12}", kept["stored_in"])
    if path.parent == RESULTS:  # the table to read is the record
        assert path.with_suffix(".md").read_text() == common.page(path.stem, kept)


def test_the_zoos_table_is_its_record(monkeypatch):
    import common
    from headway.racing import tables

    monkeypatch.setattr(tables, "_failing", lambda suite, name: "")  # builds every layer, and is not compared
    kept = json.loads((RESULTS / "zoo" / "results.json").read_text())
    text = (RESULTS / "zoo" / "table.md").read_text()
    assert common.measured_at(kept) in text
    rows = [line for line in tables.table(kept["rows"]).splitlines() if line.endswith("|  |")]
    assert len(rows) > 80
    for row in rows:
        assert row.removesuffix(" |  |") in text
    assert kept["summary"] == tables.summary(kept["rows"])


def test_a_race_on_the_watched_seeds_is_kept_with_its_commit(monkeypatch, tmp_path):
    import zoo

    def raced(command, cwd, check):
        assert command[1:] == ["-m", "headway", "bench", "seen"]
        (cwd / "seen" / "results.json").write_text('{"command": "headway bench seen", "summary": {}, "rows": []}')
        (cwd / "seen" / "table.md").write_text("# The zoo\n\nMade by a race.\n")
        (cwd / "seen" / "heads.png").write_bytes(b"picture")

    monkeypatch.setattr(zoo, "RESULTS", tmp_path)
    monkeypatch.setattr(subprocess, "run", raced)
    zoo.seen(tmp_path / "runs" / "0123" / "seen")
    kept = json.loads((tmp_path / "zoo" / "results.json").read_text())
    assert (kept["command"], kept["commit"]) == ("python bench/zoo.py seen", zoo.COMMIT)
    title, line, rest = (tmp_path / "zoo" / "table.md").read_text().split("\n\n")
    assert (title, rest) == ("# The zoo", "Made by a race.\n")
    assert zoo.COMMIT in line
    assert (tmp_path / "zoo" / "heads.png").read_bytes() == b"picture"


def test_a_budget_in_processor_time_is_not_spent_by_waiting():
    import stopwatch

    wall = time.perf_counter
    with stopwatch.by_processor_time():
        begun = time.perf_counter()
        time.sleep(0.3)
        assert time.perf_counter() - begun < 0.2
    assert time.perf_counter is wall


def test_one_command_makes_every_record_again():
    import all as everything

    steps = {step.split()[0] for step in (*everything.SCRIPTS, *everything.REAL)}
    for step in steps:
        assert (ROOT / step).exists()
    for path in RECORDS:
        assert json.loads(path.read_text())["command"].split()[1] in steps, path.name
    assert "bench/zoo.py" in steps
    assert "bench/all.py" in (ROOT / "Makefile").read_text()


def test_what_would_run_is_listed(monkeypatch, capsys):
    import all as everything

    monkeypatch.setattr(sys, "argv", ["all.py", "--list", "--real"])
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("--list runs nothing"))
    everything.main()
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("python bench/real.py --device cuda --keep ")
    assert said[1].split()[1:] == ["bench/swap.py", said[0].split()[-1]]
    assert said[-1] == "python bench/pages.py --write"


@pytest.fixture
def checkout(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed here, so that no commit can be asked for; apt-get install git")

    def git(*words):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org", *words],
                       check=True, capture_output=True)

    git("init", "-q")
    for name in ("src/code.py", "bench/speed.py", "bench/results/speed.json", "constraints.txt", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    git("add", "-A")
    git("commit", "-qm", "one")
    return tmp_path


def test_the_commit_is_of_the_code_that_was_measured(checkout):
    import common

    clean = common.commit(checkout)
    assert re.fullmatch(r"[0-9a-f]{12}", clean)
    for name in ("README.md", "bench/results/speed.json"):  # written by the measuring itself
        (checkout / name).write_text("2\n")
    assert common.commit(checkout) == clean
    for name in ("src/code.py", "bench/speed.py", "src/new.py"):
        (checkout / name).write_text("2\n")
        assert common.commit(checkout) == f"{clean}+changes"
        (checkout / name).write_text("1\n")
    assert common.commit(checkout) == f"{clean}+changes"  # src/new.py is not committed


def test_without_a_checkout_the_commit_is_unknown(tmp_path):
    import common

    assert common.commit(tmp_path) == "unknown"


def test_a_record_is_kept_whole(monkeypatch, tmp_path, capsys):
    import common

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "COMMIT", "0123456789ab")
    common.record("toy", "python bench/toy.py", {"b": 1, "a": 2.0}, [{"z": 1, "y": None}])
    kept = json.loads((tmp_path / "toy.json").read_text())
    assert kept["commit"] == "0123456789ab"
    assert list(kept["summary"]) == ["b", "a"] and list(kept["rows"][0]) == ["z", "y"]  # the table's order
    text = (tmp_path / "toy.md").read_text()
    assert text == common.page("toy", kept)
    assert "commit 0123456789ab" in text and "| z | y |" in text
    assert "toy: b 1, a 2" in capsys.readouterr().out
