"""The first paper's phases, one by one and in order."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headway as hw
from headway.core import conditions
from headway.core.examples import Examples
from headway.core.shards import rebatch, write
from headway.core.sources import draw_batches
from headway.linalg.projected import Rows
from headway.runs.store import Run
from headway.sculpting.crude import crude_sum
from headway.sculpting.hull import hull_angle
from headway.sculpting.resculpt import Sculptor
from headway.sculpting.rows import Reservoir
from headway.sculpting.thresholds import Thresholds

PHASES = ("crude sum", "sculpt", "refine", "sharpen")
BRIEF = hw.Sculpt(thresholds=Thresholds(sharpen=1))  # sharpening is long where there is nothing to close in on


def instance(heads=2, width=6, count=60_000, length=2, seed=0, **law):
    layer = hw.AttentionLayer.random(heads=heads, width=width, scale=3.0, seed=seed)
    return layer, hw.draw(layer, count=count, length=length, seed=seed + 500, **law)


def batches(data, dtype=torch.float64, size=20_000):
    return lambda: (Rows(data.X[at : at + size].to(dtype), data.Y[at : at + size].to(dtype))
                    for at in range(0, len(data), size))


def last_phase(fit):
    return next(event for event in fit.trace if event["stage"].startswith("sculpt"))["phases"][-1]


@pytest.mark.parametrize("length", [2, 5])
def test_the_crude_sum_has_the_bias_that_steins_identity_gives(length):
    layer, data = instance(heads=2, width=4, count=200_000, length=length, law="gaussian", seed=3)
    found, n = crude_sum(batches(data))
    X = data.X.double()
    P = layer.patterns(X)
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for i in range(2):
        h = P[:, i] @ X
        C = (torch.einsum("nab,nbp,nbq->pq", P[:, i], X, X) - torch.einsum("nap,naq->pq", h, h)) / h[..., 0].numel()
        expected += (torch.eye(4, dtype=torch.float64) + layer.Theta[i] @ C) @ layer.W[i]
    # Sampling error of the mean, entry by entry, from the spread over sequences.
    each = torch.einsum("np,ne->npe", X.sum(1), data.Y.sum(1)) / length
    deviation = each.std(0) / n**0.5
    assert bool(((found - expected).abs() < 6 * deviation).all()), (found - expected) / deviation
    # The bias is there to be seen: without it the formula would fail.
    assert float(((layer.W.sum(0) - expected).abs() / deviation).max()) > 30


@given(seed=st.integers(0, 2**31), size=st.integers(1, 40))
def test_a_reservoir_keeps_the_best_of_the_stream(seed, size):
    draw = torch.Generator().manual_seed(seed)
    kept, everything = Reservoir(size), []
    for _ in range(5):
        score = torch.rand(int(torch.randint(1, 60, (), generator=draw)), generator=draw)
        everything.append(score)
        kept.add(score, twice=2 * score)
    rows = kept.rows()
    expected = torch.cat(everything).sort().values[:size]
    torch.testing.assert_close(rows["score"].sort().values, expected, rtol=0, atol=0)
    torch.testing.assert_close(rows["twice"], 2 * rows["score"], rtol=0, atol=0)


def test_an_angle_is_the_largest_principal_one():
    A = torch.eye(4, dtype=torch.float64)[:2]
    tilt = 1e-7
    B = torch.tensor([[1.0, 0, 0, 0], [0, 1.0, tilt, 0]], dtype=torch.float64)
    assert hull_angle(A, B) == pytest.approx(tilt, rel=1e-6)
    assert hull_angle(A, torch.eye(4, dtype=torch.float64)[2:]) == pytest.approx(torch.pi / 2)


@pytest.mark.parametrize(("length", "law"), [(2, "boolean"), (2, "gaussian"), (3, "boolean")])
def test_the_body_closes_in_on_the_hull_round_by_round(length, law):
    layer, data = instance(width=8, count=80_000, length=length, law=law, seed=1)
    sculptor = Sculptor(batches(data, torch.float32), 2, Thresholds(), layer)
    found = sculptor.run()
    events = sculptor.events
    assert [events[0]["phase"], events[1]["phase"], events[2]["phase"]] == ["crude sum", "sculpt", "refine"]
    assert {event["phase"] for event in events} == set(PHASES)
    assert events[0]["sum_error"] > 0.05
    assert events[-1]["sum_error"] < 1e-2
    assert events[-1]["hull_angle"] < 1e-2
    sculpts = [event for event in events if event["phase"] == "sculpt"]
    assert sculpts[-1]["distance"] < 0.7 * sculpts[0]["distance"]
    assert all(a["accepted"] >= b["accepted"] for a, b in itertools.pairwise(sculpts))
    for event in sculpts:
        assert event["residual_quantiles"] == sorted(event["residual_quantiles"])
        assert event["rows"] == len(data) * length
        assert len(event["singular_values"]) == 5
    # The heads lie in the span that was found.
    span = found.hull.span.flatten(1)
    heads = layer.Theta.flatten(1)
    assert float((heads - (heads @ span.T) @ span).norm() / heads.norm()) < 2e-2
    # And they meet nearly all constraints of the last body up to a few slacks; a wrong matrix does not.
    body = found.body

    def met(Theta):
        gap = (body.normals.flatten(1) @ Theta.flatten() - body.levels).abs()
        return float((gap < 4 * body.slacks).double().mean())

    assert min(met(T) for T in layer.Theta) > 0.7
    assert met(2 * layer.Theta[0]) < 0.4


@pytest.mark.parametrize("case", [
    {"heads": 1, "width": 8, "length": 4, "count": 4000}, {"heads": 2, "width": 8, "length": 2},
    {"heads": 2, "width": 8, "length": 2, "law": "gaussian"},
    {"heads": 2, "width": 8, "length": 3, "count": 80_000},
])
def test_the_whole_way_ends_at_the_floor(case):
    layer, data = instance(**case, seed=2)
    fit = hw.learn(data, heads=layer.heads, method=hw.Sculpt(truth=layer))
    assert fit.status.kind == "recovered", fit.status.sentence
    assert hw.match(fit.layer, layer).worst < 1e-9
    assert last_phase(fit)["sum_error"] < 1e-2
    assert fit.status.numbers["sum_singular"] > 0


def test_the_head_count_is_found_by_growing():
    layer, data = instance(width=8, seed=2)
    fit = hw.learn(data, method="sculpt")
    assert fit.layer.heads == 2
    assert hw.match(fit.layer, layer).worst < 1e-9
    stages = [event["stage"] for event in fit.trace]
    assert [name for name in stages if name.startswith("sculpt")] == ["sculpt-1", "sculpt-2"]


def test_the_net_comes_near_without_any_polish():
    layer, data = instance(width=8, seed=2)
    fit = hw.learn(data, heads=2, method=hw.Sculpt(search="net", polish=False))
    assert hw.match(fit.layer, layer).worst < 0.1
    assert fit.stats["held_out_error"] < 0.05
    assert fit.status.kind == "limit"
    assert "polish=True" in fit.status.sentence
    event = next(event for event in fit.trace if event["stage"] == "search-2")
    assert event["tuples"] == event["points"] * (event["points"] - 1) // 2


def test_truth_is_only_looked_at_for_the_trace():
    layer, data = instance(width=6, count=20_000, seed=4)
    plain = replace(BRIEF, polish=False)
    blind = hw.learn(data, heads=2, method=plain)
    told = hw.learn(data, heads=2, method=replace(plain, truth=layer))
    torch.testing.assert_close(blind.layer.Theta, told.layer.Theta, rtol=0, atol=0)
    assert "sum_error" not in last_phase(blind)
    assert "hull_angle" in last_phase(told)


def test_shards_and_a_resumed_run_give_the_same_layer(tmp_path):
    layer, data = instance(width=6, count=20_000, seed=4)
    drawn = draw_batches(layer, 20_000, 2, seed=504)
    stored = write(tmp_path / "shards", rebatch(drawn, [5000] * 4), 4, layer)
    assert isinstance(stored, Examples)
    whole = hw.learn(data, heads=2, method=BRIEF)
    run = Run.create(tmp_path / "run", {"digest": stored.digest()})
    first = hw.learn(stored, heads=2, method=BRIEF, run=run)
    torch.testing.assert_close(first.layer.Theta, whole.layer.Theta, rtol=0, atol=1e-12)
    (tmp_path / "run" / "manifest.json").unlink()
    (tmp_path / "run" / "stages" / "polish-2.safetensors").unlink()
    again = hw.learn(stored, heads=2, method=BRIEF, run=Run.open(tmp_path / "run"))
    torch.testing.assert_close(again.layer.Theta, first.layer.Theta, rtol=0, atol=0)
    assert run.fit().status.kind == "recovered"


def degenerate(name):
    layer, _ = instance(width=8, count=10, seed=1)
    W, Theta = layer.W.clone(), layer.Theta.clone()
    if name == "equal":
        Theta[1] = Theta[0]
    if name == "cancel":
        W[1] = -W[0]
    if name == "singular":
        U, s, Vh = torch.linalg.svd(W.sum(0))
        W[1] -= s[-1] * torch.outer(U[:, -1], Vh[-1])
    if name == "rank one":
        U, s, Vh = torch.linalg.svd(Theta)
        Theta = s[:, :1, None] * U[:, :, :1] @ Vh[:, :1]
    return replace(layer, W=W, Theta=Theta)


@pytest.mark.parametrize(("name", "number", "words"), [
    ("equal", None, "two are equal"), ("cancel", "sum_strength", "projections cancel"),
    ("singular", "sum_singular", "ΣW_i is singular"), ("rank one", "effective_rank", "rank one")])
def test_a_broken_condition_is_named_with_its_value_and_no_wrong_layer_passes(name, number, words):
    layer = degenerate(name)
    data = hw.draw(layer, count=40_000, length=2, seed=21)
    fit = hw.learn(data, heads=2, method=BRIEF)
    assert words in fit.status.sentence
    # With two tokens an idle second head may end as W = 0, or as Θ = 0 beside a reflected first one.
    names = [number] if number else ["head_weight", "norm_ratio", "head_distance"]
    assert any(f"{fit.status.numbers[name]:.1e} (wanted" in fit.status.sentence for name in names)
    fresh = hw.draw(layer, count=200, length=2, seed=10)
    error = float((fit.layer(fresh.X) - fresh.Y).norm() / fresh.Y.norm())
    assert (error < 1e-12) == fit.status.ok


def test_too_few_heads_and_noise_are_not_called_recovered():
    _, data = instance(heads=3, width=6, count=20_000, seed=1)
    assert hw.learn(data, heads=2, method=BRIEF).status.kind == "limit"
    _, noisy = instance(width=6, count=20_000, seed=1, noise=0.05)
    assert hw.learn(noisy, heads=2, method=BRIEF).status.kind == "limit"


def test_conditions_are_the_textbook_numbers():
    total = torch.diag(torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64))
    Theta = torch.stack([torch.eye(3, dtype=torch.float64), torch.diag(torch.tensor([2.0, 0, 0]).double())])
    W = torch.stack([torch.eye(3), 0.5 * torch.eye(3)]).double()
    found = conditions.measure(Theta, W, total=total, label_power=10.5)
    assert found["sum_singular"] == pytest.approx(0.25)
    assert found["sum_strength"] == pytest.approx(0.5)
    assert found["effective_rank"] == pytest.approx(1.0)
    assert found["norm_ratio"] == pytest.approx(3**0.5 / 2)
    assert found["head_distance"] == pytest.approx(3**0.5 / 2)
    assert found["head_weight"] == pytest.approx(0.5)


def test_what_the_algorithm_is_not_made_for_is_refused(refused):
    layer, data = instance(width=6, count=400)
    long = hw.draw(layer, count=50, length=9, seed=1)
    with refused("examples.X", "2 to 8 tokens", "9 tokens", "moments"):
        hw.learn(long, heads=2, method="sculpt")
    with refused("examples.mask", "no mask", "causal"):
        hw.learn(Examples(data.X, data.Y, mask="causal"), heads=2, method="sculpt")
    with refused("examples.X", "mean 0 and covariance I"):
        hw.learn(Examples(data.X.double() * 3 + 1, data.Y), heads=2, method="sculpt")
    with refused("search", "gauss-newton"):
        hw.Sculpt(search="grid")
    with refused("search", "tuples", "4 heads"):
        hw.learn(instance(heads=4, width=6, count=4000)[1], heads=4, method=hw.Sculpt(search="net"))
    with refused("thresholds.shrink", "below 1"):
        Thresholds(shrink=1.5)
    with refused("thresholds.last"):
        Thresholds(last=-1.0)


def test_time_that_runs_out_ends_a_sculpting_too():
    _, data = instance(width=6, count=20_000, noise=0.05)  # without noise the short solve at the end finds it
    fit = hw.learn(data, heads=2, method="sculpt", seconds=1e-3)
    assert not any(event["stage"].startswith(("search", "polish")) for event in fit.trace)
    assert fit.status.kind == "limit"
    assert "Out of time" in fit.status.sentence
