"""Patterns on tokens: which sequences are shown, on which strings, what heads do and write there, what is refused;
in a browser, as a hand on the mouse and one on the keyboard meet them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from safetensors.torch import save_file
from tests.browser import Visit
from typer.testing import CliRunner

import headway as hw
from headway.cli.main import app
from headway.core.layer import load_layer, save_layer
from headway.core.results import Fit, Status
from headway.core.shards import write
from headway.report import write_report
from headway.report.given import read
from headway.report.story import gather
from headway.runs.store import Run

pytestmark = pytest.mark.xdist_group("looks")  # in one process, which makes the run and its page once
LETTERS, LENGTH, COUNT = 8, 12, 20
WORDS = ["<s>", " the", "cat", "internationalisation", " ", "a<b>&", "on", "mat"]


def planted():
    """Heads that look at the token before, after an earlier copy, and everywhere; each writes what it looks at."""
    d = 2 * LETTERS + LENGTH
    letter, place, before = torch.eye(d).double().split([LETTERS, LENGTH, LETTERS])
    Theta = torch.stack([7 * place[1:].T @ place[:-1], 7 * letter.T @ before, torch.zeros(d, d).double()])
    W = torch.stack([letter.T @ torch.eye(LETTERS).double() * (i + 1) for i in range(3)])
    return hw.AttentionLayer(Theta, W, mask="causal")


def sequences(seed=0):
    """X and letters; in every second sequence the last four tokens are filling."""
    letters = torch.randint(LETTERS, (COUNT, LENGTH), generator=torch.Generator().manual_seed(seed))
    words, places = torch.eye(LETTERS).double()[letters], torch.eye(LENGTH).double().expand(COUNT, -1, -1)
    before = torch.cat([torch.zeros(COUNT, 1, LETTERS).double(), words[:, :-1]], 1)
    padding = torch.zeros(COUNT, LENGTH, dtype=torch.bool)
    padding[::2, -4:] = True
    return torch.cat([words, places, before], 2), letters, padding


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run that learned the layer with its heads in another order, a little off, and what lies beside it."""
    base = tmp_path_factory.mktemp("looks")
    truth, (X, letters, padding) = planted(), sequences()
    data = hw.Examples(X, truth(X, padding), padding, mask="causal")
    write(base / "data", iter([data]), 1, truth)
    save_layer(base / "truth.safetensors", truth)
    order = [1, 2, 0]
    noise = torch.randn(truth.Theta.shape, generator=torch.Generator().manual_seed(1)).double()
    layer = hw.AttentionLayer((truth.Theta + 0.02 * noise)[order], truth.W[order], mask="causal")
    run = Run.create(base / "run", {"examples": str(base / "data"), "digest": data.digest()})
    stats = {"rank": None, "held_out_error": 1e-3, "examples": COUNT, "floor": 7, "seconds": 3.0, "products": 1,
             "held_out": 2, "used": 15}
    run.finish(Fit(layer, Status("fitted", "Fitted."), stats, ({"stage": "descent-1", "seconds": 1.0},)),
               data.hashes())
    real = [[WORDS[i] for i, filled in zip(row, gone, strict=True) if not filled]
            for row, gone in zip(letters.tolist(), padding.tolist(), strict=True)]
    (base / "run" / "tokens.json").write_text(json.dumps({"tokens": real}))
    save_file({"any": torch.eye(LETTERS)}, base / "u.safetensors")
    (base / "words.json").write_text(json.dumps(WORDS))
    return base


@pytest.fixture(scope="module")
def page(folder):
    return write_report(folder / "run", truth=folder / "truth.safetensors", unembedding=folder / "u.safetensors",
                        vocabulary=folder / "words.json")


def story(folder, **given):
    return gather(folder / "run", folder / "truth.safetensors", read(folder / "run", **given))


# -- what is shown ----------------------------------------------------------------------------------------------


def test_heads_are_named_and_sorted_by_what_they_do(folder):
    looks = story(folder).looks
    assert [one.kind for one in looks.does] == ["induction", "broad", "previous token"]
    assert looks.order == [2, 0, 1] and looks.named and looks.sequences == COUNT
    told = story(folder)
    at = told.columns.index("what it does")
    assert told.heads[0].cells[at] == f"induction, {100 * looks.does[0].share:.0f} %"


def test_strings_of_other_tokens_are_seen(folder):
    """A planted error: strings moved by one place are not those that the head looks for."""
    tokens = json.loads((folder / "run" / "tokens.json").read_text())["tokens"]
    moved = [row[2:] + row[:2] for row in tokens]
    assert story(folder, tokens=moved).looks.does[0].kind != "induction"
    assert story(folder, tokens=moved).looks.does[2].kind == "previous token"


def test_the_most_telling_sequences_are_shown(folder):
    X, _, padding = sequences()
    layer, truth = load_layer(folder / "run" / "layer.safetensors"), planted()
    error, sharp = [], []
    for i in range(COUNT):
        rows = ~padding[i]
        gap = layer(X[i], padding[i])[rows] - truth(X[i], padding[i])[rows]
        error.append(float(gap.square().sum(1).mean().sqrt()))
        sharp.append(float(layer.patterns(X[i], padding[i])[:, rows].max(2).values.mean()))
    shown = story(folder).looks.samples
    assert [one.why.split(",")[0] for one in shown] == ["largest error", "smallest error", "most peaked"]
    worst, best, peaked = (one.number - 1 for one in shown)
    assert (worst, best) == (error.index(max(error)), error.index(min(error)))
    assert sharp[peaked] == max(s for i, s in enumerate(sharp) if i not in (worst, best))


def test_patterns_stand_on_their_own_strings(folder):
    X, letters, padding = sequences()
    layer, truth = load_layer(folder / "run" / "layer.safetensors"), planted()
    for one in story(folder, sequences=[1, 2]).looks.samples:
        i, real = one.number - 1, ~padding[one.number - 1]
        assert one.why == "asked for" and one.keys == one.queries
        assert list(one.queries) == [WORDS[t] for t in letters[i][real]]
        for shown, known in ((one.patterns, layer), (one.true, truth)):
            torch.testing.assert_close(shown, known.patterns(X[i], padding[i])[:, real][:, :, real])
    filled = [[WORDS[t] for t in row] for row in letters.tolist()]  # strings of filling may be there too
    assert story(folder, tokens=filled, sequences=[1]).looks.samples[0].queries == one.queries or one.number == 2


def test_what_a_head_writes_is_what_its_outputs_raise(folder):
    looks = story(folder, unembedding=folder / "u.safetensors", vocabulary=folder / "words.json").looks
    for sample in looks.samples:
        for head, rows in enumerate(sample.writes):
            for row in rows:  # every head writes the token it looks at, with a weight of its own
                word, raised = row.words[0]
                assert word == row.token
                weight = [2.0, 3.0, 1.0][head]
                assert raised == pytest.approx(weight * (1 - 1 / LETTERS), rel=1e-6)
    first = looks.samples[0]
    most = first.patterns[2].sum(0).argmax()
    assert first.writes[2][0].token == first.keys[int(most)]


def test_what_layers_in_factors_write(folder):
    from headway.report.samples import _values

    layer = hw.FactoredLayer.random(4, 6, size=3, groups=2, out_width=5, seed=0)
    Z = torch.randn(7, 6, generator=torch.Generator().manual_seed(0)).double()
    for head in range(4):
        alone = replace(layer, out=torch.where(torch.arange(4).view(4, 1, 1) == head, layer.out, 0.0), offset=None)
        for b in range(7):  # one token alone gets all the attention
            torch.testing.assert_close(_values(layer, Z, head)[b], alone(Z[b : b + 1])[0])


def test_without_strings_places_stand_for_them(folder, tmp_path):
    moved = tmp_path / "run"
    moved.mkdir()
    for path in (folder / "run").glob("*.*"):
        if path.name != "tokens.json":
            (moved / path.name).write_bytes(path.read_bytes())
    looks = gather(moved).looks
    assert not looks.named and looks.samples[0].queries[:3] == ("1", "2", "3")
    assert "induction" not in looks.does[0].scores
    assert "--tokens FILE" in write_report(moved).read_text()


# -- in the browser ---------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_open_to_all(browser, page):
    with Visit(browser, page) as visit:
        view = visit.page
        view.wait_for_selector("html[data-drawn=yes]", timeout=60_000)
        assert len(view.query_selector_all(".cards canvas")) == 6
        for width, scheme in ((1000, "light"), (390, "dark")):
            view.emulate_media(color_scheme=scheme)
            view.set_viewport_size({"width": width, "height": 900})
            view.wait_for_timeout(300)  # it is drawn again
            wide = view.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
            assert wide == [width, width], "the page scrolls sideways"
            found = Axe().run(view).response["violations"]
            assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
        assert visit.complaints == [] and visit.requests == [visit.address]


def test_weights_are_read_with_the_mouse_and_with_the_keyboard(browser, page, folder):
    X, letters, padding = sequences()
    layer = load_layer(folder / "run" / "layer.safetensors")
    shown = story(folder).looks.samples
    with Visit(browser, page) as visit:
        view = visit.page
        view.wait_for_selector("html[data-drawn=yes]", timeout=60_000)
        assert view.text_content("#does").startswith("Head 3. Previous token: ")
        # Another head, by keyboard: the second card is the induction head, and the matrices follow.
        view.focus("input[name=look]:checked")
        view.keyboard.press("ArrowRight")
        view.wait_for_selector("#map-P-learned[data-head='1']")
        view.wait_for_selector("#map-W-learned[data-head='1']")
        assert view.text_content("#does").startswith("Head 1. Induction: ")
        assert view.is_checked("input[name=head][value='0']")
        # Another sequence, by mouse: the second with the smallest error.
        view.click("label:has(input[name=sample][value='1'])")
        i = shown[1].number - 1
        real = (~padding[i]).nonzero().flatten().tolist()
        P = layer.patterns(X[i], padding[i])[0]
        view.wait_for_selector(f"#map-P-learned[data-sample='{i + 1}']")
        assert len(view.query_selector_all("#strip [role=option]")) == len(real)
        view.focus("#strip")
        view.keyboard.press("Home")
        for _ in range(5):
            view.keyboard.press("ArrowRight")
        at = view.get_attribute("#strip", "aria-activedescendant")
        assert at == "strip-5" and view.get_attribute(f"#{at}", "aria-selected") == "true"
        top = int(P[5].argmax())
        word = WORDS[letters[i][top]].replace(" ", "␣")
        assert f"‘{word}’ ({top + 1}) {float(P[5, top]):.2f} (true " in view.text_content("#note-strip")
        view.click("#strip-2")
        top = int(P[2].argmax())
        title = view.get_attribute(f"#strip-{top}", "title")
        assert title.startswith(f"‘{WORDS[letters[i][top]].replace(' ', '␣')}’ ({top + 1}): {float(P[2, top]):.3f}")
        # The map: arrow keys read cells, and hovering names both tokens, markup and all.
        view.wait_for_selector(f"#map-P-true[data-sample='{i + 1}']")
        view.focus("#map-P-true")
        for _ in range(2):
            view.keyboard.press("ArrowRight")
        T = planted().patterns(X[i], padding[i])[1]
        word = WORDS[letters[i][1]].replace(" ", "␣")
        assert f"looks at ‘{word}’ (2): {float(T[0, 1]):.3f}." in view.text_content("#note-P-true")
        words = view.evaluate("document.getElementById('map-P-learned').data[0].customdata.flat()")
        assert len(words) == len(real) ** 2
        assert any("internationalisation" in one for one in words) or 3 not in letters[i][real]
        assert all("<" not in one for one in words), "plotly would take it for markup"
        raised = view.text_content("#writes tr")
        assert raised.count("‘") == 4 and "+1.75" in raised
        assert visit.complaints == []


# -- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "said"), [
    ({"tokens": [["a"] * LENGTH] * 3}, "tokens: expected 20 lists"),
    ({"tokens": [["a"] * 5] * COUNT}, "strings for sequence 1"),
    ({"tokens": [[1, 2]] * COUNT}, "expected strings of tokens"),
    ({"tokens": "nowhere.json"}, "no readable JSON"),
    ({"tokens": "words.json"}, "JSON of another kind"),
    ({"sequences": [0]}, "at least 1"), ({"sequences": [21]}, "at most 20"),
    ({"unembedding": "narrow.safetensors"}, r"a matrix \(vocabulary, 8\)"),
    ({"unembedding": "two.safetensors"}, "got 2 tensors"),
    ({"unembedding": "flat.safetensors"}, "shape"),
    ({"unembedding": "words.json"}, "a whole safetensors file"),
    ({"unembedding": "u.safetensors", "vocabulary": "few.json"}, "8 words, one for each row"),
    ({"unembedding": "u.safetensors", "vocabulary": "u.safetensors"}, "no readable JSON"),
    ({"vocabulary": "words.json"}, "none without an unembedding")])
def test_what_does_not_fit_is_refused(folder, given, said):
    for name, matrix in (("narrow", {"a": torch.eye(7)}), ("two", {"a": torch.eye(8), "b": torch.eye(8)}),
                         ("flat", {"a": torch.ones(8)})):
        save_file(matrix, folder / f"{name}.safetensors")
    (folder / "few.json").write_text('["a"]')
    given = {name: folder / value if isinstance(value, str) else value for name, value in given.items()}
    with pytest.raises(hw.InputError, match=said):
        write_report(folder / "run", folder / "no.html", **given)
    assert not (folder / "no.html").exists()


def test_strings_of_a_run_without_examples_are_refused_where_asked_for(folder, tmp_path):
    layer = planted()
    run = Run.create(tmp_path / "run", {"mine": 1})
    run.finish(Fit(layer, Status("fitted", "Fitted."), json.loads((folder / "run" / "manifest.json").read_text())[
        "stats"], ({"stage": "descent-1", "seconds": 1.0},)))
    with pytest.raises(hw.InputError, match="sequences: expected a run whose examples lie"):
        write_report(tmp_path / "run", sequences=[1])
    (tmp_path / "run" / "tokens.json").write_text('{"tokens": [["a"]]}')
    assert write_report(tmp_path / "run").exists(), "strings that lie there are no reason to fail"


def test_from_the_command_line(folder, tmp_path):
    run = folder / "run"
    words = ["report", run, "--out", tmp_path / "page.html", "--sequences", "3, 5", "--tokens", run / "tokens.json",
             "--unembedding", folder / "u.safetensors", "--vocabulary", folder / "words.json"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text()
    assert page.count("<small>asked for</small>") == 2 and "What the head writes" in page
    done = CliRunner().invoke(app, ["report", str(folder / "run"), "--sequences", "x"])
    assert isinstance(done.exception, hw.InputError) or done.exit_code == 2
