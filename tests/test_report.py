"""The page that explains a run: in a real browser, as a person and a screen reader meet it, and what it says."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from hypothesis import given
from hypothesis import strategies as st
from tests.browser import Visit
from tests.commands import headway
from typer.testing import CliRunner

import headway as hw
from headway.cli.main import app
from headway.core.layer import load_layer, save_layer
from headway.core.results import Fit, Status
from headway.core.shards import write
from headway.core.words import data_of
from headway.report import write_report
from headway.report.charts import _packed, charts, maps
from headway.report.heads import portraits
from headway.report.page import render
from headway.report.story import PAPERS, command, gather
from headway.runs.store import Run

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.xdist_group("report")  # in one process, which makes the runs and pages once


def invoke(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output + str(result.exception)
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A demonstration, a sculpted run without truth and certificate, one that failed, and a trained one."""
    base = tmp_path_factory.mktemp("report")
    invoke("demo", "--out", base / "demo", "--heads", 3, "--width", 12)
    small = ("--heads", 2, "--width", 8, "--length", 6, "--count", 400)
    invoke("make", base / "own", *small, "--key-bias", "--offset")
    invoke("learn", base / "own", "--out", base / "biased")
    invoke("make", base / "two", "--heads", 2, "--width", 8, "--length", 2, "--count", 30_000)
    invoke("learn", base / "two", "--out", base / "sculpted", "--heads", 2, "--method", "sculpt")
    invoke("make", base / "few", "--heads", 3, "--width", 8, "--length", 6, "--count", 300, "--key-bias")
    invoke("learn", base / "few", "--out", base / "short", "--heads", 1, "--starts", 2, code=1)
    law = ("--zeta", 0.5, "--tokens", 4, "--width", 6, "--strength", 1, "--noise", 0.1)
    formed_run(base, "turned", hw.Form(rotary=hw.Rotary(base=100.0), sight=hw.Sight(causal=True)), groups=2)
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(4, 9, generator=draw, dtype=torch.float64)
    formed_run(base, "added", hw.Form(offsets=hw.OffsetTable(table), sink=hw.Sink(table[:, 0]), gate=hw.Gated(
        torch.randn(4, 9, 4, generator=draw, dtype=torch.float64))), cross=True, key_width=5)
    invoke("train", "--out", base / "trained", "--heads", "4,100000000000000", "--step", 0.1, "--steps", 60, *law)
    return base


def formed_run(base, name, form, **layer):
    """A run that learned a layer of this form, from examples that lie beside it: what its folder would hold."""
    truth = hw.FactoredLayer.random(4, 8, size=4, form=form, seed=5, **layer)
    data = hw.draw(truth, count=30, length=70 if name == "turned" else 7, law="gaussian", seed=1)
    write(base / f"{name}-data", iter([data]), 1, truth)
    options = {"heads": "auto", "method": "auto", "rank": "auto", "seconds": None, "seed": 0, "device": "cpu",
               "form": data_of(form)}
    run = Run.create(base / name, {"command": "learn", "examples": str(base / f"{name}-data"), "options": options,
                                   "digest": data.digest()})
    stats = {"rank": 4, "held_out_error": 1e-15, "examples": 30, "floor": 7, "seconds": 3.0, "products": 1,
             "held_out": 2, "used": 25}
    trace = ({"stage": "descent-1", "seconds": 1.0, "error": 0.1, "heads": 8, "curve": [[0.5, 0.5], [1.0, 0.1]]},
             {"stage": "refine-1", "seconds": 2.0, "error": 1e-15, "heads": 4, "curve": [[1.0, 1e-3], [2.0, 1e-9]]})
    run.finish(Fit(truth.canonical(), Status("recovered", f"Recovered: {form.describe()}."), stats, trace),
               data.hashes())


PAGES = ("demo", "biased", "sculpted", "short", "trained", "turned", "added")


@pytest.fixture(scope="module")
def pages(runs):
    truth = {"short": runs / "few" / "truth.safetensors",
             "turned": runs / "turned-data" / "truth.safetensors"}
    return {name: write_report(runs / name, truth=truth.get(name)) for name in PAGES}


# -- in the browser ---------------------------------------------------------------------------------------------


def drawn(visit):
    visit.page.wait_for_selector("html[data-drawn=yes]", timeout=60_000)


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "scheme"), [(1000, "light"), (390, "dark")])
def test_a_page_opens_draws_everything_and_asks_for_nothing(browser, pages, name, width, scheme):
    with Visit(browser, pages[name], width, scheme) as visit:
        drawn(visit)
        assert visit.complaints == []
        assert visit.requests == [visit.address]
        for plot in visit.page.query_selector_all(".plot"):
            if plot.get_attribute("data-side") == "true" and not plot.query_selector(".main-svg"):
                continue  # a learned head that stands for no true one; its caption says so
            box = plot.query_selector(".main-svg").bounding_box()
            assert box["width"] > 200 and box["height"] > 80, plot.get_attribute("id")
            marks = plot.query_selector_all(".points path, .lines path, .heatmaplayer image")
            assert marks, f"nothing drawn in {plot.get_attribute('id')}"
        wide = visit.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert wide[0] <= wide[1], "the page scrolls sideways"
        # A title that is a formula, or one longer word, must not run out of the page either.
        for box in visit.page.evaluate("Array.from(document.querySelectorAll('h1, h2, h3, p, pre, figcaption'), "
                                       "e => e.getBoundingClientRect().right)"):
            assert box <= width + 1


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_accessibility_problem(browser, pages, name, scheme):
    with Visit(browser, pages[name], scheme=scheme) as visit:
        drawn(visit)
        for summary in visit.page.query_selector_all("summary"):
            summary.click()
        found = Axe().run(visit.page).response["violations"]
    serious = [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found
               if one["impact"] in ("serious", "critical")]
    assert serious == []


def test_axe_would_find_a_problem(browser, pages, tmp_path):
    spoiled = tmp_path / "spoiled.html"
    spoiled.write_text(pages["demo"].read_text().replace("--soft: #5a6069", "--soft: #dddddd"))
    with Visit(browser, spoiled) as visit:
        drawn(visit)
        found = Axe().run(visit.page).response["violations"]
    assert "color-contrast" in [one["id"] for one in found]


def test_a_cell_tells_its_value_to_the_mouse_and_to_the_keyboard(browser, pages, runs):
    layer = load_layer(runs / "demo" / "layer.safetensors")
    with Visit(browser, pages["demo"]) as visit:
        drawn(visit)
        plot = visit.page.query_selector("#map-Θ-learned")
        image = plot.query_selector(".heatmaplayer image").bounding_box()
        cell = image["width"] / 12
        visit.page.mouse.move(image["x"] + 4.5 * cell, image["y"] + 2.5 * cell)
        visit.page.wait_for_selector("#map-Θ-learned .hoverlayer text")
        told = plot.query_selector(".hoverlayer").text_content().replace("−", "-")
        row, column, value = re.search(r"Θ\[(\d+), (\d+)\] = (-?[\d.e-]+)", told).groups()
        assert (row, column) == ("3", "5")
        assert float(value) == pytest.approx(float(layer.Theta[0, 2, 4]), abs=1e-4)
        # Focus may scroll the page under a resting pointer, and its leaving takes the label away: it leaves first.
        visit.page.mouse.move(0, 0)
        visit.page.wait_for_selector("#map-Θ-learned .hoverlayer text", state="detached")
        plot.focus()
        for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
            visit.page.keyboard.press(key)
        said = visit.page.text_content("#note-Θ-learned").replace("−", "-")
        row, column, value = re.search(r"Row (\d+), column (\d+): (-?[\d.e-]+)\.", said).groups()
        assert float(value) == pytest.approx(float(layer.Theta[0, int(row) - 1, int(column) - 1]), abs=1e-4)
        assert (row, column) == ("2", "2")
        # The keyboard shows what the mouse shows; labels follow with a delay that a busy machine makes longer.
        for _ in range(20):
            visit.page.wait_for_timeout(300)
            if "Θ[2, 2]" in plot.query_selector(".hoverlayer").text_content():
                break
        assert "Θ[2, 2]" in plot.query_selector(".hoverlayer").text_content()
        visit.page.focus("#map-W-learned")
        assert visit.page.text_content("#note-Θ-learned").startswith("Head 1, largest entry")


def test_another_head_is_shown_beside_its_own_true_one(browser, pages, runs):
    layer, truth = (load_layer(runs / "demo" / f"{name}.safetensors") for name in ("layer", "truth"))
    order = hw.match(layer, truth).order
    with Visit(browser, pages["demo"]) as visit:
        drawn(visit)
        visit.page.focus("input[name=head]:checked")
        visit.page.keyboard.press("ArrowRight")
        visit.page.wait_for_selector("#map-W-true[data-head='2']")
        for side, whole in (("learned", layer.W[1]), ("true", truth.W[order.index(1)])):
            z = visit.page.evaluate(
                f"Array.from(document.getElementById('map-W-{side}').data[0].z, row => Array.from(row))")
            torch.testing.assert_close(torch.tensor(z).double(), whole, rtol=0, atol=1e-4)
        assert "Head 2" in visit.page.text_content("#note-spectra")
        assert visit.complaints == []


def test_the_slider_goes_back_through_the_rounds(browser, pages):
    with Visit(browser, pages["sculpted"]) as visit:
        drawn(visit)
        bars = "Array.from(document.getElementById('chart-rounds').data[0].y)"
        last = visit.page.evaluate(bars)
        visit.page.focus("#slide-rounds")
        visit.page.keyboard.press("Home")
        first = visit.page.evaluate(bars)
        assert visit.page.text_content("#told-rounds").startswith("Round 1:")
        assert first[1] > 2 * last[1], "across the hull the body has shrunk"
        assert visit.complaints == []


def test_a_page_follows_the_change_from_light_to_dark(browser, pages):
    with Visit(browser, pages["demo"]) as visit:
        drawn(visit)
        look = ("[getComputedStyle(document.body).backgroundColor, "
                "document.getElementById('chart-stages').layout.font.color]")
        light = visit.page.evaluate(look)
        visit.page.emulate_media(color_scheme="dark")
        for _ in range(100):  # the page's own policy forbids waiting inside it
            dark = visit.page.evaluate(look)
            if dark[1] != light[1]:
                break
            visit.page.wait_for_timeout(50)
        assert dark[0] != light[0]
        assert dark[1] != light[1]
        assert visit.complaints == []


# -- what it says -----------------------------------------------------------------------------------------------


def text(page):
    """What a reader sees, without the embedded scripts."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", " ", page, flags=re.S))


def test_a_demonstration_tells_all(pages, runs):
    page = text(pages["demo"].read_text())
    for words in ("3 heads, recovered", "Recovered to the floor of the arithmetic",
                  "worst relative error of any head", "Its certificate answers", "held-out quantile",
                  "held-out mean", "headway demo --heads 3 --width 12 --seed 0",
                  "Provably learning a multi-head attention layer"):
        assert words in page
    assert "has no certificate" not in page
    assert "Θ known to 1e-06" in page
    claims = gather(runs / "demo").certificate.claims
    assert page.count("rests on") == len(claims)


def test_what_is_missing_is_said(pages):
    page = text(pages["sculpted"].read_text())
    assert "This run has no certificate" in page
    assert "The true layer is not known to this run" in page
    assert "true head" not in page


def test_a_layer_not_established_is_not_dressed_up(pages, runs):
    page = text(pages["short"].read_text())
    assert "1 head, not realisable" in page
    assert "Beside the true layer of 3 heads: missing" in page
    assert not gather(runs / "short").ok


def test_a_page_of_any_form_shows_what_is_free_of_gauge(pages, runs):
    page = " ".join(text(pages["turned"].read_text()).split())
    for words in ("Scores: rotary scores, base 100, halves; causal.", "in 2 groups", "Scores QK, learned",
                  "Outputs OV, true", "keys of group", "QK error", "How scores turn with the offset",
                  "Where the heads look", "the first 64 tokens are shown", "largest error", "Pattern, true",
                  "--form rotary:base=100,layout=half+causal"):
        assert words in page, words
    story = gather(runs / "turned")
    layer = story.fit.layer
    A, B = layer.query, layer.key.repeat_interleave(2, 0)
    torch.testing.assert_close(story.shown.matrices["QK"], A @ B.mT)  # at one place nothing is turned
    for sample in story.looks.samples:
        data = hw.Examples.open(runs / "turned-data").take([sample.number - 1])
        torch.testing.assert_close(sample.patterns, layer.patterns(data.X)[0, :, :64, :64])
    added = " ".join(text(pages["added"].read_text()).split())
    for words in ("another sequence", "every gate open", "A sink takes part", "counted with the sink",
                  "Added for the offset"):
        assert words in added, words
    assert "Where the heads look" not in text(pages["demo"].read_text()), "its examples are not kept"


def test_patterns_are_shown_of_the_sequences_learned_from_and_no_others(runs, tmp_path):
    shutil.copytree(runs / "turned", tmp_path / "run")
    layer = load_layer(runs / "turned" / "layer.safetensors")
    write(tmp_path / "data", iter([hw.draw(layer, count=30, length=9, law="gaussian", seed=2)]))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    for place, count in ((runs / "turned-data", 3), (tmp_path / "data", 0), (tmp_path / "none", 0)):
        config = json.loads((tmp_path / "run" / "config.json").read_text())
        (tmp_path / "run" / "config.json").write_text(json.dumps({**config, "examples": str(place)}))
        manifest["sha256"]["config.json"] = hashlib.sha256(
            (tmp_path / "run" / "config.json").read_bytes()).hexdigest()
        (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
        assert len(gather(tmp_path / "run").looks.samples) == count


def test_factors_that_compute_one_function_have_one_portrait():
    table = torch.tensor([[0.5, -1.0, 0.25, 0.0, 2.0]], dtype=torch.float64).repeat(2, 1)
    for form in (hw.Form(rotary=hw.Rotary(base=100.0)), hw.Form(offsets=hw.OffsetTable(table)),
                 hw.Form(offsets=hw.OffsetTable(table, kind="clipped", both=False), sight=hw.Sight(causal=True))):
        layer = hw.FactoredLayer.random(2, 5, size=4, groups=1, form=form, seed=1)
        mine, other = portraits(layer), portraits(layer.canonical())
        order = hw.match(layer.canonical(), layer).order
        for name, matrices in mine.matrices.items():
            torch.testing.assert_close(other.matrices[name][list(order)], matrices, rtol=0, atol=1e-9)
        for tokens, sizes in mine.turning.items():
            torch.testing.assert_close(other.turning[tokens][list(order)], sizes, rtol=0, atol=1e-9)
        if form.offsets is not None:
            names, values = mine.offsets
            assert names == (("≤ -2", "-1", "0", "1", "≥ 2") if form.offsets.both else (
                "≤ -4", "-3", "-2", "-1", "0"))
            buckets = range(5) if form.offsets.both else reversed(range(5))
            torch.testing.assert_close(values[0], table[0, list(buckets)])
    plain = hw.AttentionLayer.random(2, 5, key_bias=True)
    assert portraits(plain).names == ("Θ", "W") and portraits(plain, True).names == ("QK", "OV")
    torch.testing.assert_close(portraits(plain, True).matrices["QK"][:, :-1, :-1], plain.Theta)


def test_a_trained_run_shows_its_bounds(pages, runs):
    story = gather(runs / "trained")
    loss = next(chart for chart in charts(story) if chart.name == "loss")
    names = [line["name"] for line in loss.data]
    assert "H = 4" in names
    assert "H = 1e+14: bound" in names
    assert "hypotheses hold for 1 of 2 settings" in loss.caption
    (vacuous,) = loss.layout["shapes"]
    assert vacuous["y0"] == pytest.approx(math.log(2))
    assert "what fails" in text(pages["trained"].read_text())


def test_the_command_on_the_page_makes_the_same_layer_again(runs, tmp_path):
    for name in ("demo", "sculpted"):
        words = shlex.split(gather(runs / name).command.replace("RUN", str(tmp_path / name)))
        out = [] if "--out" in words else ["--out", tmp_path / name]
        invoke(*words[1:], *out)
        old, new = (load_layer(folder / name / "layer.safetensors") for folder in (runs, tmp_path))
        assert torch.equal(old.Theta, new.Theta)
    again = shlex.split(gather(runs / "trained").command.replace("RUN", str(tmp_path / "trained")))
    invoke(*again[1:])
    old, new = (json.loads((folder / "trained" / "results.json").read_text()) for folder in (runs, tmp_path))
    assert old["results"] == new["results"]


def test_a_run_made_from_python_says_so(tmp_path):
    layer = hw.AttentionLayer.random(heads=1, width=4, seed=0)
    run = Run.create(tmp_path / "run", {"mine": "<b>bold</b>"})
    hw.learn(hw.draw(layer, count=100, length=4, seed=1), run=run)
    page = write_report(tmp_path / "run").read_text()
    assert "made from Python" in page
    assert "<b>bold</b>" not in page, "what users wrote is text, not markup"
    assert command({"mine": 1}) is None


def test_every_figure_is_one_that_plotly_knows(runs):
    kinds = set()
    for name in PAGES:
        for chart in charts(gather(runs / name)):
            for data in [chart.data, *(frame["data"] for frame in chart.frames)]:
                go.Figure(data=data, layout=chart.layout)  # raises on an unknown property or value
            kinds.add(chart.name.split("-")[0])
            assert chart.caption
            assert chart.alt or not chart.data
    assert kinds == {"biases", "stages", "residual", "spectrum", "starts", "rounds", "loss", "panel", "turning",
                     "offsets"}


def opened(packed, side):
    kind = {1: "i1", 2: "<i2"}[packed["bytes"]]

    def read(name):
        return np.frombuffer(zlib.decompress(base64.b64decode(packed[name])), kind)

    steps = read("learned")
    if side == "true":
        steps = steps + read("difference")
    return steps.reshape(packed["rows"], packed["columns"]) * packed["step"]


@given(st.integers(0, 2**31), st.sampled_from(["i1", "<i2"]), st.floats(-12, 12), st.booleans())
def test_matrices_travel_to_within_half_a_step(seed, kind, size, far):
    draw = torch.Generator().manual_seed(seed)
    A = 10.0**size * torch.randn(5, 7, generator=draw, dtype=torch.float64)
    B = 10.0**size * torch.randn(5, 7, generator=draw, dtype=torch.float64) if far else A * (1 + 1e-9)
    packed = _packed(A, B, np.dtype(kind))
    for side, whole in (("learned", A), ("true", B)):
        assert abs(opened(packed, side) - whole.numpy()).max() <= 0.5001 * packed["step"], f"seed {seed}"


def test_twelve_heads_of_width_384_stay_under_15_megabytes(tmp_path):
    truth = hw.AttentionLayer.random(heads=12, width=384, rank=32, seed=0)
    off = replace(truth, Theta=truth.Theta + 0.3 * torch.randn(truth.Theta.shape, dtype=torch.float64) / 384)
    run = Run.create(tmp_path / "run", {"command": "demo", "hidden_heads": 12, "width": 384, "seed": 0})
    stats = {"rank": 32, "held_out_error": 1e-15, "examples": 40_000, "floor": 1000, "seconds": 9.0, "products": 1,
             "held_out": 2000, "used": 9000}
    # The worst case for the size: a truth that agrees nowhere.
    run.finish(Fit(off, Status("recovered", "Recovered."), stats, ({"stage": "polish", "seconds": 9.0},)))
    save_layer(tmp_path / "truth.safetensors", truth)
    path = write_report(tmp_path / "run", truth=tmp_path / "truth.safetensors")
    assert path.stat().st_size < 15e6
    assert len(maps(gather(tmp_path / "run"))) == 12


# -- bad input --------------------------------------------------------------------------------------------------


def test_bad_folders_are_refused_with_a_sentence(runs, tmp_path):
    half = tmp_path / "half"
    Run.create(half, {"command": "learn"}).begin()
    spoiled = tmp_path / "spoiled"
    spoiled.mkdir()
    for path in (runs / "demo").glob("*.*"):
        (spoiled / path.name).write_bytes(path.read_bytes())
    (spoiled / "layer.safetensors").write_bytes(b"no layer")
    other = tmp_path / "trained"
    Run.create(other, {"command": "train"}).begin()
    (other / "results.json").write_text('{"kind": "something else"}')
    for folder, words in ((tmp_path / "nowhere", "a run folder"), (runs / "few", "a run folder"),
                          (half, "a finished run"), (spoiled, "the file the manifest describes"),
                          (other, "results of kind")):
        before = sorted(folder.glob("*")) if folder.exists() else []
        done = headway("report", folder)
        assert done.returncode == 2
        said = " ".join(done.stderr.split())
        for part in ("headway: ", "expected", words, "Try: "):
            assert part in said, said
        assert "Traceback" not in said
        assert (sorted(folder.glob("*")) if folder.exists() else []) == before, "nothing is written"


def test_bad_places_are_refused(runs, refused, tmp_path):
    with refused("out", "a folder"):
        write_report(runs / "demo", tmp_path)
    with refused("out", "a folder that exists"):
        write_report(runs / "demo", tmp_path / "no" / "page.html")
    with pytest.raises(hw.InputError):
        write_report(runs / "demo", truth=runs / "demo" / "config.json")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with refused(str(pipe), "a device or a pipe"):
        write_report(runs / "demo", pipe)
    assert pipe.is_fifo(), "what is no file is not replaced by one"
    other = runs / "few" / "truth.safetensors"
    with refused(f"truth {other}", "shaped as the learned one"):
        write_report(runs / "demo", truth=other)
    with refused("truth", "none for a training run"):
        write_report(runs / "trained", truth=other)


@pytest.mark.parametrize(("file", "change"), [
    ("manifest.json", {"trace": [{}]}), ("manifest.json", {"trace": [1]}), ("manifest.json", {"stats": {}}),
    ("manifest.json", {"status": {}}), ("manifest.json", {"versions": None}), ("manifest.json", {"sha256": None}),
    ("certificate.json", {"claims": [{}]}), ("certificate.json", {"confidence": "x"})])
def test_contents_that_do_not_fit_are_refused(runs, tmp_path, file, change):
    copy = tmp_path / "run"
    shutil.copytree(runs / "demo", copy)
    (copy / file).write_text(json.dumps({**json.loads((copy / file).read_text()), **change}))
    with pytest.raises(hw.InputError, match="do not fit"):
        write_report(copy)


def test_a_run_with_an_empty_trace_still_has_a_page(runs, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(runs / "demo", copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "trace": []}))
    page = write_report(copy).read_text()
    assert "3 heads, recovered" in page
    assert "How it was learned" not in page


def test_a_path_with_brackets_is_shown_as_it_is(runs, tmp_path):
    said = invoke("report", runs / "demo", "--out", tmp_path / "p[red]q[bold].html").output
    assert "p[red]q[bold].html" in said.replace("\n", "")


def test_without_plotly_a_sentence_says_what_to_install(runs, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with refused("report", "pip install"):
        render(gather(runs / "demo"))


def test_the_papers_are_those_of_the_citation_file():
    cited = (ROOT / "CITATION.cff").read_text()
    for words, address in PAPERS:
        assert address in cited
        title = words.split(". ", 2)[-1].rsplit(". ", 1)[0]
        assert title in cited or title.split(". ")[-1] in cited
