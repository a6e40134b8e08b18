"""The page of a comparison: what it says of two layers, whose patterns it shows, and that it works in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from tests.browser import Visit
from typer.testing import CliRunner

import headway as hw
from headway.cli.main import app
from headway.core.layer import save_layer
from headway.report import write_comparison
from headway.report.page import render
from headway.report.pair import beside

pytestmark = pytest.mark.xdist_group("pair")
CAUSAL = hw.Form(rotary=hw.Rotary(base=100.0), sight=hw.Sight(causal=True))


def formed(form=CAUSAL, **options):
    return hw.FactoredLayer.random(4, 8, size=4, groups=2, form=form, seed=5, scale=6.0, **options)


def moved(layer, head=2):
    """The same with the scores of one head changed."""
    query = layer.query.clone()
    query[head] += 0.3 * torch.randn(query[head].shape, generator=torch.Generator().manual_seed(0)).double()
    return replace(layer, query=query)


def said(layer_a, layer_b, on=None, **config):
    """What the page of these two says, and its story."""
    found = hw.compare(layer_a, layer_b, on=on)
    told = beside(layer_a, layer_b, found, None, on, config)
    page = re.sub(r"<(script|style).*?</\1>", " ", render(told), flags=re.S)
    return told, " ".join(re.sub(r"<[^>]+>", " ", page).split()), found


def test_two_layers_that_differ_in_one_head():
    a = formed()
    told, page, found = said(a, moved(a))
    for words in ("Headway comparison", "Different functions", "head 3 against head 3; 3 of 4 heads agree, not 3",
                  "QK moved by", "second head", "Scores QK, first", "Outputs OV, second", "Decided by weights",
                  "None of the known mistakes", "a few steps uphill", "Head, those that differ most first"):
        assert words in page, words
    assert told.order[0] == 2 and sorted(told.order) == [0, 1, 2, 3] and not told.ok
    sample = told.looks.samples[0]
    assert sample.why == f"where answers differ most, by {found.difference:.2g} times their spread"
    torch.testing.assert_close(sample.patterns, a.patterns(found.example))
    torch.testing.assert_close(sample.true, moved(a).patterns(found.example))
    apart = (sample.patterns - sample.true).abs().amax((1, 2))
    assert int(apart.argmax()) == 2 and float(apart[[0, 1, 3]].max()) == 0.0


def test_one_function_with_its_heads_in_another_order():
    plain = hw.AttentionLayer.random(heads=3, width=6, seed=0)
    told, page, _ = said(plain, hw.AttentionLayer(plain.Theta[[2, 0, 1]], plain.W[[2, 0, 1]]))
    assert "The same function, with heads in another order" in page and told.ok
    assert "Cause" not in page and "uphill" not in page and "the largest difference is 0.0e+00" in page
    assert [head.partner for head in told.heads] == [2, 3, 1]
    for head in told.heads:  # each beside the one that it is
        torch.testing.assert_close(told.shown.matrices["Θ"][head.number - 1],
                                   told.truth.matrices["Θ"][head.partner - 1])
    assert [one.why for one in told.looks.samples] == ["a random input"]


def test_a_cause_is_told_and_heads_of_unlike_forms_stand_in_their_order():
    a = formed()
    told, page, _ = said(a, replace(a, form=hw.Form(rotary=hw.Rotary(base=100.0))), command="compare",
                         one="A", other="B")
    for words in ("Cause: mask.", "so heads are set side by side in their order", "First: A, rotary scores",
                  "makes the difference vanish up to rounding", "headway compare A B --page FILE.html"):
        assert words in page, words
    assert [head.cells[-3:] for head in told.heads] == [(str(j + 1), "–", "–") for j in range(4)]
    less, few, _ = said(a, formed(hw.Form()).canonical())
    assert less.match is not None and "Different functions" in few


def test_heads_without_a_partner_are_named():
    plain = hw.AttentionLayer.random(heads=3, width=6, seed=0)
    less = hw.AttentionLayer(plain.Theta[:2], plain.W[:2])
    told, page, _ = said(plain, less)
    assert "Head 3 of the first has no partner in the second." in page and told.order[0] == 2
    told, page, _ = said(less, plain)
    assert "Head 3 of the second has no partner in the first." in page
    window = hw.FactoredLayer.of(less)
    told, page, _ = said(plain, replace(window, form=hw.Form(sight=hw.Sight(window=2))))
    assert told.match is None and "Scores QK, second" not in page and "Pattern, first" in page


def test_what_two_heads_do_is_told_where_they_do_not_do_the_same():
    even = hw.AttentionLayer(torch.zeros(1, 6, 6).double(), torch.eye(6).double()[None])
    told, page, _ = said(even, hw.AttentionLayer(9 * torch.randn(1, 6, 6).double(), even.W))
    assert [one.kind for one in (*told.looks.does, *told.looks.true_does)] == ["broad", "mixed"]
    assert re.search(r"1 broad 100 %; second: mixed, \d+ % at best", page)


@pytest.mark.parametrize("kind", ["cross", "vectors", "table of places", "float32"])
def test_layers_of_many_kinds_have_a_page(kind):
    if kind == "cross":
        a = hw.FactoredLayer.random(2, 6, size=3, cross=True, key_width=5, seed=0)
    elif kind == "vectors":
        rotary = hw.Rotary(frequencies=torch.randn(2, 2, generator=torch.Generator().manual_seed(0)).double())
        a = hw.FactoredLayer.random(2, 6, size=4, form=hw.Form(rotary=rotary), seed=0)
    elif kind == "table of places":
        a = replace(formed(), positions=torch.arange(7.0).double())
    else:
        a = formed().to(torch.float32)
    told, page, _ = said(a, moved(a, 1) if kind != "float32" else moved(a.to(torch.float64), 1))
    assert "Different functions" in page and len(told.heads) == a.heads
    assert told.looks.samples or kind == "vectors"


def test_on_examples_only_what_they_visit_counts():
    a = formed()
    data = hw.draw(a, 12, 9, law="gaussian", seed=3)
    X = data.X.clone()
    X[..., 4:] = 0.0
    padding = torch.zeros(12, 9, dtype=torch.bool)
    padding[0, 5:] = True
    told, page, _ = said(a, moved(a), hw.Examples(X, a(X, padding=padding), padding))
    assert "in the directions that the given examples visit" in page
    assert told.looks.source == "of the examples" and told.looks.sequences == 12
    assert told.looks.samples[-1].patterns.shape == (4, 5, 5), "filling is not shown"


def test_the_page_is_whole_and_open_to_all(browser, tmp_path):
    a = formed()
    page = write_comparison(a, moved(a), tmp_path / "page.html")
    with Visit(browser, page) as visit:
        view = visit.page
        view.wait_for_selector("html[data-drawn=yes]", timeout=60_000)
        assert view.text_content("#does").startswith("Head 3. ")  # the one that differs
        for plot in view.query_selector_all(".plot"):
            assert plot.query_selector(".main-svg"), plot.get_attribute("id")
        for width, scheme in ((1000, "light"), (390, "dark")):
            view.emulate_media(color_scheme=scheme)
            view.set_viewport_size({"width": width, "height": 900})
            view.wait_for_timeout(300)  # it is drawn again
            wide = view.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
            assert wide == [width, width], "the page scrolls sideways"
            found = Axe().run(view).response["violations"]
            assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
        view.focus("#strip")
        view.keyboard.press("Home")
        assert view.text_content("#note-strip") == "Head 3: token 1 looks at token 1 1.00 (second 1.00)."
        assert visit.complaints == [] and visit.requests == [visit.address]


def test_from_the_command_line(tmp_path):
    a = formed()
    for name, layer in (("a", a), ("b", moved(a))):
        save_layer(tmp_path / f"{name}.safetensors", layer)
    layers = [tmp_path / f"{name}.safetensors" for name in "ab"]
    words = ["compare", *layers, "--page", tmp_path / "p.html", "--json"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 1, done.output
    assert json.loads(done.stdout)["page"] == str(tmp_path / "p.html")
    assert "a.safetensors" in (tmp_path / "p.html").read_text()
    words[4] = tmp_path / "p.pdf"
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(done.exception, hw.InputError) and "--page" in str(done.exception)


def test_what_makes_no_page_is_refused(tmp_path):
    a = formed()
    for other, place, words in ((torch.nn.Linear(2, 2), tmp_path / "p.html", "whose weights are known"),
                                (a, tmp_path, "a folder"), (a, tmp_path / "no" / "p.html", "that exists")):
        with pytest.raises(hw.InputError, match=words):
            write_comparison(a, other, place)
