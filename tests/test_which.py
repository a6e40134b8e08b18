"""Which form a layer has: what a black box answers, what labels show, what a table says of itself, the door."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import headway as hw
from headway.core.positions import buckets_of
from headway.learning import which
from headway.learning.clues import POSSIBLE, Clues, clues_of, sight_of
from headway.learning.formed_learn import Clock, Wanted
from headway.learning.formed_read import read_off
from headway.learning.formed_refine import FormCandidate
from headway.learning.formed_source import FormSource
from headway.learning.questions import DRAWS, clues_from

D, M, Q, K = 12, 2, 4, 8
BACK = hw.Sight(causal=True)


def normal(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gains(seed: int) -> Tensor:
    return 1.5 * Q**-0.25 * (1 + 0.3 * normal(Q, seed=seed))


NORMED = hw.Normed(gains(1), gains(2))
GATE = hw.Gated(torch.cat([normal(M, D, Q) / math.sqrt(D), normal(M, 1, Q) / 2], dim=1))
CASES: dict[str, tuple[hw.Form, set[str], set[str]]] = {  # what must be part of it, what else may be
    "plain": (hw.Form(), set(), set()), "causal": (hw.Form(sight=BACK), set(), set()),
    "window": (hw.Form(sight=hw.Sight(causal=True, window=3)), set(), set()),
    "a window on both sides": (hw.Form(sight=hw.Sight(window=3)), set(), set()),
    "prefix": (hw.Form(sight=hw.Sight(causal=True, prefix=4)), set(), set()),
    "rotary": (hw.Form(rotary=hw.Rotary(), sight=BACK), {"rotary"}, set()),
    "partial": (hw.Form(rotary=hw.Rotary(turned=2)), {"rotary"}, set()),
    "table": (hw.Form(offsets=hw.OffsetTable(normal(M, 15))), set(), {"rotary", "offsets"}),
    "slope": (hw.Form(offsets=hw.Slope(0.3 * normal(M)), sight=BACK), set(), {"rotary", "offsets"}),
    "cap": (hw.Form(cap=hw.Cap(5.0)), {"cap"}, set()), "large cap": (hw.Form(cap=hw.Cap(50.0)), {"cap"}, set()),
    "sink": (hw.Form(sink=hw.Sink(normal(M))), {"sink"}, {"gate"}),
    "normed": (hw.Form(normed=NORMED), {"normed"}, set()),
    "normed rotary": (hw.Form(normed=NORMED, rotary=hw.Rotary()), {"normed"}, {"rotary", "offsets"}),
    "gate": (hw.Form(gate=GATE), {"gate"}, set()),
}


def layer_of(form: hw.Form, seed: int = 1, **more: object) -> hw.FactoredLayer:
    return hw.FactoredLayer.random(M, D, size=Q, form=form, seed=seed, **more)  # type: ignore[arg-type]


def box_of(layer: object, law: str = "gaussian", **more: object) -> hw.Examples:
    return hw.ask(layer, 20, K, D, law=law, **{"fresh": True, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
@pytest.mark.parametrize("name", CASES)
def test_a_black_box_says_what_its_form_is(name: str, dtype: torch.dtype) -> None:
    form, must, else_may = CASES[name]
    layer = layer_of(form, biases=False)
    asked = []

    def oracle(X: Tensor) -> Tensor:
        asked.append(len(X))
        return layer.to(dtype)(X)

    data = box_of(oracle, dtype=dtype)
    before = sum(asked)
    found = clues_from(data)  # type: ignore[arg-type]
    assert found.sights == (form.sight,)
    assert (found.must, found.may) == (must, must | else_may)
    assert found.placed == form.uses_positions
    assert sum(asked) - before == found.asked < 30 * DRAWS


def test_biases_leave_turns_and_offsets_to_descents() -> None:
    found = clues_from(box_of(layer_of(CASES["rotary"][0])))  # type: ignore[arg-type]
    assert found.placed and not found.must and found.may == {"rotary", "offsets"}


def test_no_more_is_asked_than_was_allowed() -> None:
    data = box_of(layer_of(hw.Form()), fresh=100)
    found = clues_from(data)  # type: ignore[arg-type]
    assert found.asked <= 100


def test_a_box_that_refuses_strange_tokens_has_not_answered() -> None:
    layer = layer_of(hw.Form(sight=BACK))

    def shy(X: Tensor) -> Tensor:
        if X.abs().max() > 1e3 or X.shape[1] != K:
            raise RuntimeError("out of range")
        return layer(X)

    found = clues_from(box_of(shy))  # type: ignore[arg-type]
    assert found.sights == (BACK,) and {"normed", "cap"} <= found.may and not found.must


@pytest.mark.parametrize("name", ["plain", "causal", "window", "a window on both sides", "prefix", "rotary",
                                  "gate"])
def test_what_is_in_sight_shows_in_mean_effects(name: str) -> None:
    form = CASES[name][0]
    layer = layer_of(form)
    X = normal(1500, K, D, seed=5)
    found = clues_of(hw.Examples(X, layer(X)))
    assert found.sights[0] == form.sight
    assert found.words and not found.asked and found.may == POSSIBLE


def test_offsets_show_in_mean_effects_and_plain_keys_have_none() -> None:
    X = normal(1500, K, D, seed=5)
    table, plain = (clues_of(hw.Examples(X, layer_of(CASES[name][0])(X))) for name in ("table", "plain"))
    assert table.offsets and not plain.offsets


def test_few_rows_show_nothing_and_nothing_is_left_out() -> None:
    X = normal(60, K, D)
    found = clues_of(hw.Examples(X, layer_of(hw.Form(sight=BACK))(X)))
    assert found.sights == (hw.Sight(), BACK) and found.may == POSSIBLE and not found.words
    told = clues_of(hw.Examples(X, layer_of(hw.Form(sight=BACK))(X), mask="causal"))
    assert told.sights == (BACK,)


@pytest.mark.parametrize("sight", [hw.Sight(), BACK, hw.Sight(window=2), hw.Sight(causal=True, window=4),
                                   hw.Sight(causal=True, prefix=3)])
def test_a_sight_is_told_by_its_mask(sight: hw.Sight) -> None:
    mask = sight.mask(6, 6)
    see = torch.ones(6, 6) if mask is None else mask.double()
    assert sight_of(2 * see - 1) == sight


def test_a_table_says_whether_it_is_a_slope_or_buckets() -> None:
    delta = torch.arange(-7, 8)
    slope, count = normal(M), 1e-9 * normal(M, 15, seed=9)
    for kind, beta in (("slope", slope.unsqueeze(1) * delta + 3), ("t5", normal(M, 16)[
            :, buckets_of(delta, "t5", 16, True, 32)]), (None, normal(M, 15))):
        table = hw.OffsetTable(beta + count)
        found = list(read_off(hw.Form(offsets=table), {"offsets": table.values}, K))
        assert [form.offsets.settings()["kind"] for form, _ in found] == ([kind] if kind else [])
        for form, tensors in found:
            assert form.offsets is not None
            moved = form.offsets.added(tensors, delta.unsqueeze(0))[:, 0] - table.values
            assert float((moved - moved[:, :1]).abs().max()) < 1e-7


def answers_agree(fit: hw.Fit, layer: hw.FactoredLayer) -> None:
    X = normal(20, K, D, seed=11)
    torch.testing.assert_close(fit.predict(X), layer(X), rtol=0, atol=1e-6)


def test_auto_asks_a_black_box_and_finds_its_cap() -> None:
    layer = hw.FactoredLayer.random(1, D, size=Q, form=hw.Form(cap=hw.Cap(4.0)), seed=3)
    fit = hw.learn(hw.ask(layer, 300, K, D, law="gaussian", fresh=True), form="auto", heads=1, rank=Q)
    assert fit.status.ok and "scores are capped" in fit.status.sentence
    assert fit.layer.form.cap is not None and abs(fit.layer.form.cap.value - 4) < 1e-6
    assert fit.stats["asked"] > 100 and [entry["by"] for entry in fit.stats["forms_tried"]] == ["fit"]
    answers_agree(fit, layer)


def test_auto_finds_a_window_in_examples() -> None:
    layer = hw.FactoredLayer.random(1, D, size=Q, form=CASES["window"][0], seed=3)
    X = normal(600, K, D, seed=5)
    fit = hw.learn(hw.Examples(X, layer(X)), form="auto", heads=1, rank=Q)
    assert fit.status.ok and fit.stats["form"] == "plain scores; causal, a window of 3" and "asked" not in fit.stats
    assert "causal, a window of 3" in fit.stats["form_because"][0]
    answers_agree(fit, layer)


def test_descents_that_time_cuts_short_are_not_compared() -> None:
    X = normal(200, K, D, seed=5)
    fit = hw.learn(hw.Examples(X, layer_of(CASES["rotary"][0])(X)), form="auto", seconds=1e-3)
    assert fit.status.kind == "limit" and fit.stats["out_of_time"], fit.status
    assert [entry["by"] for entry in fit.stats["forms_tried"]] == ["fit"]


def test_a_long_table_has_buckets_and_is_not_read_as_one_of_all_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(which, "REACH", 2)
    layer = hw.FactoredLayer.random(1, 6, size=2, form=hw.Form(offsets=hw.OffsetTable(normal(1, 15))), seed=3)
    data = hw.ask(layer, 400, K, 6, law="gaussian", fresh=True)
    fit = hw.learn(data, form="auto", heads=1, rank=2)
    assert fit.status.ok and fit.stats["form"].startswith("T5's table of 32 offsets"), fit.status
    X = normal(20, K, 6, seed=11)
    torch.testing.assert_close(fit.predict(X), layer(X), rtol=0, atol=1e-6)


def test_what_did_as_well_is_said_once_and_clues_of_no_layer_are_no_facts() -> None:
    layer = layer_of(hw.Form())
    X = normal(60, K, D)
    source = FormSource(hw.Examples(X, layer(X)), hw.Form())
    clues = Clues((hw.Sight(),), words=("outputs are gated",), asked=9)
    way = which.Way(source, clues, Wanted(1, Q, None, 0), Clock(None, None))
    found = FormCandidate({}, 0.1, 0.1, "stalled", 1, 1, 1)
    way.best = hw.Form(), found
    way.tried = [{"form": name, "by": "refinement", "error": error}
                 for name, error in (("sinks", 0.105), ("a cap", 0.2), ("sinks", 0.105))]
    said = list(which.how(clues, way))
    assert "as if it were such a layer: outputs are gated" in said[0] and said[1].startswith("2 other forms were")
    assert "these did as well: sinks;" in which.as_well(hw.Form(), way, K)
    way.best = hw.Form(), replace(found, error=1e-12)
    assert "as if" not in next(which.how(clues, way)) and "as well" not in which.as_well(hw.Form(), way, K)
