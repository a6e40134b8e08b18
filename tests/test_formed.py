"""Layers of any form learned in their factors: products, refinement, cuts, groups and the door."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import headway as hw
from headway.core.forms import heads_out, in_sight
from headway.core.shards import write
from headway.core.tangents import ALIKE
from headway.learning import formed_learn, which
from headway.learning.formed import Formed, FormedModel, FormRows, features, pushed
from headway.learning.formed_evidence import depends
from headway.learning.formed_groups import grouped
from headway.learning.formed_learn import determined, patterns
from headway.learning.formed_refine import FormCandidate, refine_form
from headway.learning.formed_source import FormSource
from headway.learning.gauss_newton import OutOfTimeError, gauss_newton
from headway.learning.thin import ThinModel
from headway.linalg.projected import Problem, Rows
from headway.linalg.thin import Thin
from headway.runs.store import Run

D, M, Q, K = 8, 2, 4, 6


def normal(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gains(seed: int) -> Tensor:
    return 1.5 * Q**-0.25 * (1 + 0.3 * normal(Q, seed=seed))


CAUSAL = hw.Sight(causal=True)
FORMS = {
    "plain": hw.Form(), "causal": hw.Form(sight=CAUSAL),
    "window": hw.Form(sight=hw.Sight(causal=True, window=3)),
    "rotary": hw.Form(rotary=hw.Rotary(base=100.0)),
    "pairs": hw.Form(rotary=hw.Rotary(base=100.0, layout="pairs"), sight=CAUSAL),
    "partial": hw.Form(rotary=hw.Rotary(base=100.0, turned=2)),
    "table": hw.Form(offsets=hw.OffsetTable(normal(M, 7))),
    "t5": hw.Form(offsets=hw.OffsetTable(normal(M, 8), kind="t5", far=16)),
    "slope": hw.Form(offsets=hw.Slope(0.3 * normal(M)), sight=CAUSAL),
    "cap": hw.Form(cap=hw.Cap(3.0)), "sink": hw.Form(sink=hw.Sink(normal(M))),
    "normed": hw.Form(normed=hw.Normed(gains(1), gains(2), eps=0.1)),
    "normed rotary": hw.Form(rotary=hw.Rotary(base=100.0), normed=hw.Normed(gains(1), gains(2), eps=0.1)),
    "gated": hw.Form(gate=hw.Gated(normal(M, D + 1, Q) / math.sqrt(D))),
}
EVERYTHING = hw.Form(
    rotary=hw.Rotary(base=100.0), offsets=hw.Slope(0.2 * normal(M)), sight=hw.Sight(causal=True, window=4),
    cap=hw.Cap(4.0), sink=hw.Sink(normal(M)), normed=hw.Normed(gains(1), gains(2)),
    gate=hw.Gated(normal(M, D + 1, Q) / math.sqrt(D)))


def layer_of(form: hw.Form, seed: int = 1, **more: object) -> hw.FactoredLayer:
    return hw.FactoredLayer.random(M, D, size=Q, form=form, seed=seed, **more)  # type: ignore[arg-type]


def rows_of(layer: hw.FactoredLayer, n: int, seed: int = 5) -> tuple[Tensor, FormRows]:
    X = normal(n, K, D, seed=seed)
    ones = torch.ones(n, K, 1, dtype=X.dtype)
    return X, FormRows(torch.cat([X, ones], dim=2), layer(X), in_sight(layer.form.sight, X))


def unknowns(layer: hw.FactoredLayer) -> Formed:
    return Formed.of({n: t for n, t in layer.tensors().items() if n not in ("out", "offset")}, layer.form)


@pytest.mark.parametrize("name", [*FORMS, "everything", "free cap"])
def test_products_are_those_of_automatic_differentiation(name: str) -> None:
    form = FORMS["cap"] if name == "free cap" else EVERYTHING if name == "everything" else FORMS[name]
    layer = layer_of(form)
    X, rows = rows_of(layer, 5)
    tensors = {n: t for n, t in layer.tensors().items() if n not in ("out", "offset")}
    tensors |= {"cap": torch.tensor(3.0, dtype=torch.float64)} if name == "free cap" else {}
    shape = Formed.of(tensors, form)
    model = FormedModel(Problem((rows,)))
    point = model.evaluate(shape)
    chain = point.kept[0][0]

    def H(value: Tensor) -> Tensor:
        parts = {**form.tensors(), **shape.like(value).tensors}
        return features(rows, heads_out(X, None, parts, form, rows.see).transpose(1, 2), False)

    v = normal(*shape.value.shape, seed=8)
    out, dH = torch.func.jvp(H, (shape.value,), (v,))
    u = normal(*dH.shape, seed=9)
    torch.testing.assert_close(features(rows, chain.H, False), out, rtol=1e-12, atol=1e-12)
    mine = features(rows, chain.push(pushed(rows, shape.parts(v))), False)
    torch.testing.assert_close(mine, dH, rtol=1e-11, atol=1e-11)
    back = torch.func.vjp(H, shape.value)[1](u)[0]
    operator = model.products(point, shape, torch.float64)
    torch.testing.assert_close(operator._back(rows, chain, u), back, rtol=1e-11, atol=1e-11)


def test_plain_products_are_those_of_thin_factors() -> None:
    layer = layer_of(hw.Form(), biases=False)
    X, rows = rows_of(layer, 20)
    Y = rows.Y + 0.1 * normal(*rows.Y.shape)
    formed = FormedModel(Problem((FormRows(rows.X, Y),)))
    shape = unknowns(layer)
    thin = ThinModel(Problem((Rows(X, Y),)))
    small = Thin.joined(layer.query, layer.key[:, :-1], layer.value[:, :-1])
    one, two = formed.evaluate(shape), thin.evaluate(small)
    assert one.loss == pytest.approx(two.loss, rel=1e-12)
    v = normal(*small.value.shape, seed=3)
    dA, dB, dV = small.parts(v)
    none = torch.zeros(M, 1, Q, dtype=torch.float64)
    wide = shape.gathered({"query": dA, "key": torch.cat([dB, none], 1), "value": torch.cat([dV, none], 1)})
    mine = shape.parts(formed.products(one, shape, torch.float64).curvature(wide))
    theirs = small.parts(thin.products(two, small, torch.float64).curvature(v))
    torch.testing.assert_close(mine["query"], theirs[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mine["key"][:, :-1], theirs[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mine["value"][:, :-1], theirs[2], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", FORMS)
def test_refinement_recovers_every_form(name: str) -> None:
    layer = layer_of(FORMS[name])
    _, rows = rows_of(layer, 120)
    model = FormedModel(Problem((rows,)))
    shape = unknowns(layer)
    noise = {n: 0.05 * t.abs().mean() * normal(*t.shape, seed=4) * (M if n in ALIKE else 1)
             for n, t in shape.tensors.items()}
    found = gauss_newton(model, shape.moved(shape.gathered(noise)), damping=1e-2, inner=torch.float64,
                         generator=torch.Generator().manual_seed(0), limit=40)
    assert found.history[0] > 1e-2
    learned = layer.with_tensors(found.point.tensors())
    X = normal(20, K, D, seed=11)
    assert float((learned(X) - layer(X)).norm() / layer(X).norm()) < 1e-9
    torch.testing.assert_close(learned.patterns(X), layer.patterns(X), rtol=0, atol=1e-9)


def test_coordinates_are_left_as_they_were_entered() -> None:
    layer = layer_of(FORMS["gated"])
    X = 3 * normal(400, K, D) @ normal(D, D, seed=2) + 5
    data = hw.Examples(X, layer(X))
    source = FormSource(data, layer.form)
    assert source.frame is not None and not source.frame.plain
    t = layer.tensors()
    t |= {"out": t["out"] / source.frame.scale, "offset": t["offset"] / source.frame.scale}
    inside = source.entered(t)
    assert source.misses(source.judge, inside) < 1e-10
    for name, value in source.left(inside).items():
        torch.testing.assert_close(value, layer.tensors()[name], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["rotary", "sink"])
def test_learn_finds_heads_of_a_form(name: str) -> None:
    layer = layer_of(FORMS[name], seed=2)
    data = hw.draw(layer, count=500, length=K, law="gaussian", seed=3)
    fit = hw.learn(data, form=FORMS[name], seed=1)
    assert fit.status.kind == "recovered", fit.status
    assert (fit.layer.heads, fit.layer.size, fit.stats["form"]) == (M, Q, FORMS[name].describe())
    X = normal(20, K, D, seed=11)
    torch.testing.assert_close(fit.predict(X), layer(X), rtol=0, atol=1e-9)
    fresh, truth = fit.layer.patterns(X), layer.patterns(X)
    order = [int((fresh - truth[:, i : i + 1]).abs().sum((0, 2, 3)).argmin()) for i in range(M)]
    torch.testing.assert_close(fresh[:, order], truth, rtol=0, atol=1e-9)


def test_after_a_first_attempt_heads_of_narrow_layers_are_larger_and_wide_layers_have_more() -> None:
    """Two turned heads, each half of 16 wide, met nothing before the third attempt, which also had four times the
    heads."""
    def tried(width: int, size: int | None = None) -> list[tuple[int, int]]:
        wanted = formed_learn.Wanted(None, size, None, 0)
        return [(heads, q) for heads, q, _ in formed_learn.attempts(hw.Form(), wanted, width)]

    assert tried(16) == [(8, 4), (8, 8), (16, 8), (16, 16), (32, 16)]
    assert tried(64) == [(8, 16), (16, 16), (32, 32), (64, 32), (64, 64)]
    assert tried(16, 5) == [(8, 5), (16, 5), (32, 5), (64, 5), (64, 5)]


def test_learn_takes_keys_of_other_sequences() -> None:
    layer = hw.FactoredLayer.random(1, 5, size=2, cross=True, key_width=4, out_width=3, seed=0)
    data = hw.draw(layer, count=300, length=5, law="gaussian", seed=1)
    fit = hw.learn(data, form=hw.Form(), heads=1, rank=2)
    assert fit.status.kind == "recovered", fit.status
    assert fit.layer.cross and fit.layer.key_width == 4
    torch.testing.assert_close(fit.predict(data.X, Z=data.keys), data.Y, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["plain", "rotary", "sink"])
def test_groups_are_read_off(name: str) -> None:
    form = hw.Form(sink=hw.Sink(normal(4))) if name == "sink" else FORMS[name]
    truth = hw.FactoredLayer.random(4, D, size=Q, groups=2, form=form, seed=3)
    apart = hw.FactoredLayer(truth.query, truth.key.repeat_interleave(2, 0), truth.value.repeat_interleave(2, 0),
                             truth.out, truth.offset, truth.form)
    found = grouped(apart.canonical(), 1e-8)
    assert found.groups == 2
    X = normal(10, K, D)
    torch.testing.assert_close(found(X), truth(X), rtol=0, atol=1e-9)
    other = layer_of(FORMS["plain"])
    assert grouped(other, 1e-8).groups == M


@pytest.mark.parametrize("off", [3e-6, 1e-3])
def test_the_error_told_is_that_of_the_layer_with_shared_keys(off, monkeypatch) -> None:
    truth = hw.FactoredLayer.random(2, D, size=Q, groups=1, form=FORMS["rotary"], seed=3).to(torch.float32)
    X = normal(300, K, D).float()
    data = hw.Examples(X, truth(X))

    def roughly(layer: hw.FactoredLayer, tolerance: float) -> hw.FactoredLayer:
        found = grouped(layer, tolerance)
        return replace(found, out=(1 + off) * found.out)

    monkeypatch.setattr(formed_learn, "grouped", roughly)
    fit = hw.learn(data, form=FORMS["rotary"], heads=2, rank=Q)
    part = data.take(FormSource(data, FORMS["rotary"]).judge)
    Y = part.Y.double()
    left = float((fit.predict(part.X.double()) - Y).norm() / (Y - Y.mean((0, 1))).norm())
    assert fit.stats["held_out_error"] == pytest.approx(left, rel=0.05)
    assert fit.layer.groups == fit.stats["groups"] == (1 if off < 1e-5 else 2)


@pytest.mark.parametrize("wrong", [{"form": "rotary"}, {"form": hw.Form(), "method": "moments"},
                                   {"form": hw.Form(), "run": 3}, {"form": hw.Form(), "rank": None}])
def test_what_is_not_used_is_refused(wrong: dict[str, object]) -> None:
    data = hw.draw(layer_of(hw.Form()), count=20, length=3)
    with pytest.raises(hw.InputError):
        hw.learn(data, **wrong)  # type: ignore[arg-type]


def candidate(
    layer: hw.FactoredLayer, data: hw.Examples, form: hw.Form | None = None
) -> tuple[FormSource, FormCandidate]:
    """The layer, or its factors in another form, as if it had been found."""
    layer = layer if form is None else replace(layer, form=form)
    source = FormSource(data, layer.form)
    assert source.frame is not None
    t = layer.tensors()
    t |= {"out": t["out"] / source.frame.scale, "offset": t["offset"] / source.frame.scale}
    inside = source.entered(t)
    return source, FormCandidate(inside, 0.0, source.misses(source.select, inside), "floor", len(source.fit), 1, 0)


def test_a_head_that_hands_on_the_same_of_every_key_is_not_determined() -> None:
    one = layer_of(FORMS["gated"])
    value, gate = one.value.clone(), one.form.tensors()["gate"].clone()
    value[1, :-1], gate[1] = 0.0, gate[0]  # the other head's bias could do all that it does
    two = one.with_tensors({"value": value, "gate": gate})
    for layer, known, kinds in ((one, True, 2), (two, False, 1)):
        X = normal(200, K, D)
        source, found = candidate(layer, hw.Examples(X, layer(X)))
        assert found.error < 1e-12
        assert (determined(source, found, 0), patterns(source, found)) == (known, kinds)


TURN = hw.Form(rotary=hw.Rotary(base=100.0))


@pytest.mark.parametrize(("true", "told", "dtype", "noise", "found"), [
    (TURN, TURN, torch.float64, 0.1, False), (TURN, TURN, torch.bfloat16, 0.0, False),
    (FORMS["sink"], FORMS["sink"], torch.float64, 0.01, False),
    (TURN, hw.Form(), torch.float64, 0.0, True), (TURN, hw.Form(), torch.float64, 0.1, True),
    (FORMS["cap"], hw.Form(cap=hw.Cap(3.3)), torch.bfloat16, 0.0, True),
    (FORMS["slope"], FORMS["causal"], torch.float64, 0.0, True),
    (FORMS["sink"], FORMS["plain"], torch.float64, 0.0, True),
    (FORMS["window"], hw.Form(sight=hw.Sight(causal=True, window=2)), torch.float64, 0.0, True)])
def test_what_another_form_leaves_depends_on_the_inputs_and_noise_does_not(true, told, dtype, noise, found) -> None:
    layer = layer_of(true)
    X = normal(400, K, D).to(dtype)
    Y = layer(X.double())
    Y = Y + noise * Y.std() * normal(*Y.shape, seed=8)
    padding = torch.arange(K) >= 2 + torch.arange(400).unsqueeze(1) % (K - 1) if true.offsets is not None else None
    Y = Y if padding is None else layer(X, padding=padding)
    source, begun = candidate(layer, hw.Examples(X, Y.to(dtype), padding), told)
    best = refine_form(source, begun.tensors, generator=torch.Generator().manual_seed(0), least=M, sizes=False,
                       limit=20)
    assert depends(source, best, torch.Generator().manual_seed(0)) == found


def test_half_precision_does_not_make_another_form_recovered(monkeypatch) -> None:
    monkeypatch.setattr(formed_learn, "attempts", lambda *_: iter([(3, 2, 0), (4, 2, 1)]))
    layer = hw.FactoredLayer.random(1, 4, size=2, form=hw.Form(cap=hw.Cap(3.0)), seed=1)
    X = 2 * normal(400, 6, 4)
    data = hw.Examples(X.bfloat16(), layer(X.bfloat16().double()).bfloat16())
    fit = hw.learn(data, form=hw.Form(cap=hw.Cap(3.2)), heads=1, rank=2)
    assert fit.stats["held_out_error"] < 0.0156 and fit.stats["depends"]
    assert fit.status.kind == "limit" and "depends on the inputs" in fit.status.sentence
    fit = hw.learn(data, form=layer.form, heads=1, rank=2)
    assert fit.status.ok and fit.stats["depends"] is False, fit.status
    assert len(fit.trace) == 2, "labels that are met to their rounding are met"


def test_time_that_runs_out_after_a_better_attempt_is_said(turned, monkeypatch) -> None:
    form, data = turned
    ordinary, made = formed_learn.refinement, []

    def refinement(*given):
        found = ordinary(*given)
        made.append(replace(found, error=0.5, reason="time") if made else replace(found, error=0.3))
        return made[-1]

    monkeypatch.setattr(formed_learn, "refinement", refinement)
    fit = hw.learn(data, form=form, heads=1, rank=2, seed=1)
    assert len(made) == 2 and fit.stats["out_of_time"]


def test_directions_that_tokens_never_visit_are_said(monkeypatch) -> None:
    layer = hw.FactoredLayer.random(1, 4, size=2, seed=1)
    X = torch.nn.functional.layer_norm(normal(300, 5, 4), (4,))
    data = hw.Examples(X, layer(X))
    fit = hw.learn(data, form=hw.Form(), heads=1, rank=2)
    assert fit.status.kind == "recovered" and fit.stats["unidentified_directions"] == 1
    assert "1 of 4 token directions are never visited" in fit.status.sentence
    monkeypatch.setattr(formed_learn, "determined", lambda *_: (_ for _ in ()).throw(OutOfTimeError))
    fit = hw.learn(data, form=hw.Form(), heads=1, rank=2)
    assert fit.status.kind == "fitted" and fit.stats["determined"] is None
    assert "was not asked: time ran out" in fit.status.sentence


def test_labels_that_were_set_aside_are_said(turned) -> None:
    form, data = turned
    Y = data.Y.clone()
    Y[[3, 50, 200]] *= 100
    fit = hw.learn(hw.Examples(data.X, Y, mask="causal"), form=form, heads=1, rank=2, seed=1)
    assert fit.status.kind == "recovered" and fit.stats["outliers"] == 3
    assert "3 of 300 sequences have labels that stand far out" in fit.status.sentence
    assert fit.trace[-1]["outliers"] == [3, 50, 200]


# Runs


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


@pytest.fixture(scope="module")
def turned() -> tuple[hw.Form, hw.Examples]:
    """One small head whose scores turn."""
    form = hw.Form(rotary=hw.Rotary(base=100.0), sight=CAUSAL)
    layer = hw.FactoredLayer.random(1, 4, size=2, form=form, seed=1)
    return form, hw.draw(layer, count=300, length=5, law="gaussian", seed=3)


def alike(one: hw.Fit, other: hw.Fit) -> bool:
    mine, theirs = one.layer.tensors(), other.layer.tensors()
    return mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_a_run_of_any_form_killed_before_any_stage_ends_the_same(turned, tmp_path, monkeypatch) -> None:
    form, _ = turned
    layer = hw.FactoredLayer.random(1, 4, size=2, form=form, seed=1)
    data = hw.ask(layer, 300, 5, 4, law="gaussian", seed=3, fresh=True)  # what it was asked counts across kills
    monkeypatch.setattr(which, "SHORT", 400)
    monkeypatch.setattr(which.Way, "first", lambda way: iter([replace(form, rotary=None), form]))
    asked = {"form": "auto", "heads": 1, "rank": 2, "seed": 1}
    whole = hw.learn(data, run=tmp_path / "whole", **asked)
    stages = [event["stage"] for event in whole.trace]
    assert stages == ["clues-1", "form-1", "form-2", "descent-1", "refine-1"]
    assert [f"{name}.safetensors" for name in sorted(stages)] == sorted(
        path.name for path in (tmp_path / "whole" / "stages").iterdir())
    ordinary = Run.stage
    for stop in (stages[0], *stages[1:]):

        def stage(self, name, compute, stop=stop):
            if name == stop:
                raise Killed
            return ordinary(self, name, compute)

        monkeypatch.setattr(Run, "stage", stage)
        with pytest.raises(Killed):
            hw.learn(data, run=tmp_path / "cut", **asked)
    monkeypatch.setattr(Run, "stage", ordinary)
    again = hw.learn(data, run=tmp_path / "cut", **asked)
    assert alike(again, whole)
    assert again.stats["forms_tried"] == whole.stats["forms_tried"]
    assert again.stats["asked"] == whole.stats["asked"] > whole.trace[0]["asked"] > 0
    assert Run.open(tmp_path / "cut").finished
    monkeypatch.setattr(Run, "stage", lambda *_: pytest.fail("a finished run is read back"))
    back = hw.learn(data, run=tmp_path / "cut", **asked)
    assert alike(back, whole) and back.status == again.status and back.stats == again.stats


def test_a_run_of_a_form_belongs_to_its_settings_and_goes_on_after_its_seconds(turned, tmp_path, refused) -> None:
    form, data = turned
    whole = hw.learn(data, form=form, heads=1, rank=2, seed=1)
    short = hw.learn(data, form=form, heads=1, rank=2, seed=1, seconds=1e-3, run=tmp_path / "run")
    assert short.status.kind == "limit" and short.stats["out_of_time"], short.status
    assert "Out of time" in short.status.sentence
    assert not (tmp_path / "run" / "stages").exists(), "a stage that was cut short is not kept"
    run = Run.open(tmp_path / "run")
    assert run.out_of_time and run.fit().layer.form.rotary == form.rotary
    for other, words in (({"form": hw.Form(rotary=hw.Rotary(base=99.0))}, "form=rotary scores, base 99, halves."),
                         ({"form": "auto"}, "got form=auto"),
                         ({"form": form, "heads": 2}, "heads=1"), ({"form": "plain"}, "got form=plain")):
        with refused("run", words):
            hw.learn(data, **{"heads": 1, "rank": 2, "seed": 1, "run": tmp_path / "run", **other})
    with refused("run", "other ones"):
        hw.learn(data.take(range(200)), form=form, heads=1, rank=2, seed=1, run=tmp_path / "run")
    long = hw.learn(data, form=form, heads=1, rank=2, seed=1, run=tmp_path / "run")
    assert long.status.kind == "recovered"
    for name, value in whole.layer.tensors().items():
        torch.testing.assert_close(long.layer.tensors()[name], value, rtol=1e-9, atol=1e-9)


def test_shards_are_learned_like_examples_in_memory(tmp_path) -> None:
    layer = hw.FactoredLayer.random(1, 4, size=2, cross=True, key_width=3, seed=1)
    data = hw.draw(layer, count=300, length=5, law="gaussian", seed=1)
    kept = write(tmp_path / "data", iter([data]), 1, layer)
    fit = hw.learn(kept, form=hw.Form(), heads=1, rank=2, run=tmp_path / "run")
    assert fit.status.kind == "recovered" and fit.layer.cross
    assert Run.open(tmp_path / "run").config["command"] == "learn"
