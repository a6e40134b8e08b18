"""The learner: recovery up to permutation where the conditions hold, refusal or an honest status where not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import headway as hw
from headway.core.counting import Size
from headway.learning.baselines import Setting, adam, sizes
from headway.learning.gauss_newton import OutOfTimeError
from headway.learning.loop import Loop
from headway.learning.source import Source, find_frame


def recovered(fit: hw.Fit, truth: hw.AttentionLayer, tolerance: float = 1e-9) -> None:
    assert fit.status.kind == "recovered", fit.status.sentence
    assert fit.status.ok
    assert hw.match(fit.layer, truth).worst <= tolerance


CASES = {
    "plain": {"heads": 3, "width": 10},
    "one head": {"heads": 1, "width": 8},
    "low rank": {"heads": 3, "width": 12, "rank": 2},
    "biased": {"heads": 2, "width": 8, "key_bias": True, "offset": True},
    "causal": {"heads": 3, "width": 8, "mask": "causal"},
    "peaked": {"heads": 2, "width": 8, "scale": 4.0},
    "faint": {"heads": 2, "width": 8, "scale": 0.5},
    "narrow output": {"heads": 2, "width": 8, "out_width": 3},
    "wide output": {"heads": 2, "width": 6, "out_width": 11},
}


@pytest.mark.parametrize("law", ["boolean", "gaussian"])
@pytest.mark.parametrize("name", CASES)
def test_every_head_is_found(name, law):
    truth = hw.AttentionLayer.random(**CASES[name], seed=11)
    fit = hw.learn(hw.draw(truth, count=600, length=6, law=law, seed=12))
    recovered(fit, truth)
    assert (fit.layer.key_bias is None) == (truth.key_bias is None)
    assert (fit.layer.offset is None) == (truth.offset is None)
    assert fit.layer.mask == truth.mask


def test_two_tokens_are_enough():
    truth = hw.AttentionLayer.random(heads=2, width=8, seed=3)
    recovered(hw.learn(hw.draw(truth, count=1500, length=2, seed=4)), truth)


def test_the_default_size_with_the_count_unknown():
    truth = hw.AttentionLayer.random(heads=4, width=32, scale=2.0, seed=0)
    fit = hw.learn(hw.draw(truth, count=4000, length=16, seed=1))
    recovered(fit, truth)
    stages = [event["stage"] for event in fit.trace]
    assert stages[:3] == ["frame", "span", "unmix-4"], "the moments route is the one taken"
    assert fit.stats["heads"] == 4
    assert fit.stats["products"] > 0


def test_rank_is_read_off_the_singular_values():
    truth = hw.AttentionLayer.random(heads=3, width=16, rank=3, seed=5)
    data = hw.draw(truth, count=800, length=8, seed=6)
    fit = hw.learn(data)
    recovered(fit, truth)
    assert fit.stats["rank"] == 3
    assert hw.learn(data, heads=3, rank=None).stats["rank"] is None


def test_a_known_rank_makes_do_with_fewer_examples(refused):
    truth = hw.AttentionLayer.random(heads=2, width=24, rank=1, seed=7)
    full, low = Size(24, 24, 4).floor(2), Size(24, 24, 4, rank=2).floor(2)
    data = hw.draw(truth, count=full, length=4, seed=8)
    used = len(Source(data).fit)
    assert low < used < full, "enough for rank two, not for any matrix"
    with refused("heads", f"{used} different sequences", f"at least {full} sequences"):
        hw.learn(data, heads=2, rank=None)
    recovered(hw.learn(data, heads=2, rank=2), truth)


@pytest.mark.parametrize("seed", range(4))
def test_few_examples(seed):
    truth = hw.AttentionLayer.random(heads=3, width=8, seed=seed)
    count = 6 * Size(8, 8, 8).floor(3)
    data = hw.draw(truth, count=count, length=8, seed=20 + seed)
    recovered(hw.learn(data, heads=3), truth)


def test_tokens_that_are_not_white():
    truth = hw.AttentionLayer.random(heads=2, width=8, scale=1.0, offset=True, seed=9)
    draw = torch.Generator().manual_seed(10)
    mix = torch.eye(8, dtype=torch.float64) + 0.3 * torch.randn(8, 8, generator=draw, dtype=torch.float64)
    X = torch.randn(700, 6, 8, generator=draw, dtype=torch.float64) @ mix + 0.7
    fit = hw.learn(hw.Examples(X, truth(X)))
    recovered(fit, truth, 1e-8)
    assert not fit.trace[0]["white"]


def test_a_vocabulary_that_misses_directions_says_so():
    truth = hw.AttentionLayer.random(heads=2, width=8, scale=1.0, seed=13)
    draw = torch.Generator().manual_seed(14)
    words = torch.randn(40, 5, generator=draw, dtype=torch.float64) @ torch.randn(
        5, 8, generator=draw, dtype=torch.float64)
    fit = hw.learn(hw.draw(truth, count=600, length=6, law=words, seed=15))
    assert fit.status.kind == "recovered", fit.status.sentence
    assert fit.stats["unidentified_directions"] == 3
    assert "3 of 8 token directions" in fit.status.sentence
    unseen = hw.draw(truth, count=50, length=6, law=words, seed=16)
    torch.testing.assert_close(fit.layer(unseen.X), unseen.Y, rtol=0, atol=1e-9)
    blind = torch.linalg.svd(words)[2][5:]
    torch.testing.assert_close(fit.layer.W.mT @ blind.T, torch.zeros(2, 8, 3).double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_padded_sequences(mask):
    truth = hw.AttentionLayer.random(heads=2, width=6, mask=mask, seed=17)
    draw = torch.Generator().manual_seed(18)
    Xs = [torch.randn(int(torch.randint(2, 8, (), generator=draw)), 6, generator=draw, dtype=torch.float64)
          for _ in range(400)]
    data = hw.Examples.pad(Xs, [truth(x) for x in Xs], mask=mask)
    spoiled = torch.where(data.padding.unsqueeze(2), torch.full_like(data.Y, 99.0), data.Y)
    recovered(hw.learn(hw.Examples(data.X, spoiled, data.padding, mask)), truth)


def test_float32_labels_are_met_to_their_rounding():
    truth = hw.AttentionLayer.random(heads=2, width=8, seed=19)
    data = hw.draw(truth, count=500, length=6, seed=20)
    fit = hw.learn(hw.Examples(data.X, data.Y.float()))
    recovered(fit, truth, 1e-6)
    assert fit.stats["held_out_error"] > 1e-9


@pytest.mark.parametrize("factor", [1e-9, 1e9])
def test_units_do_not_matter(factor):
    truth = hw.AttentionLayer.random(heads=2, width=6, seed=21)
    data = hw.draw(truth, count=300, length=6, seed=22)
    fit = hw.learn(hw.Examples(data.X, data.Y * factor))
    scaled = hw.AttentionLayer(truth.Theta, truth.W * factor)
    recovered(fit, scaled)


def test_noise_is_recognised_and_measured():
    truth = hw.AttentionLayer.random(heads=3, width=10, seed=23)
    data = hw.draw(truth, count=900, length=8, noise=0.01, seed=24)
    fit = hw.learn(data)
    assert fit.status.kind == "noise", fit.status.sentence
    assert fit.layer.heads == 3
    spread = float((data.Y - data.Y.mean((0, 1))).square().mean().sqrt() / data.Y.square().mean().sqrt())
    assert fit.stats["noise"] == pytest.approx(0.01 / spread, rel=0.05)
    assert hw.match(fit.layer, truth).worst < 5e-3


def test_pure_noise_is_not_a_layer():
    draw = torch.Generator().manual_seed(25)
    X = torch.randn(300, 4, 5, generator=draw, dtype=torch.float64)
    Y = torch.randn(300, 4, 5, generator=draw, dtype=torch.float64)
    fit = hw.learn(hw.Examples(X, Y), method=hw.Moments(max_heads=2, starts=2))
    assert fit.status.kind != "recovered"
    assert fit.stats["held_out_error"] > 0.9


def test_too_few_heads_are_not_called_noise():
    truth = hw.AttentionLayer.random(heads=3, width=8, seed=26)
    data = hw.draw(truth, count=700, length=6, seed=27)
    fit = hw.learn(data, heads=2, method=hw.Auto(starts=2))
    assert fit.status.kind == "not_realisable", fit.status.sentence
    assert fit.status.numbers["residual_floor"] > 0.05
    with pytest.raises(hw.NotLearnedError) as caught:
        hw.learn(data, heads=1, method=hw.Auto(starts=1), strict=True)
    assert caught.value.fit.layer.heads == 1


def test_another_function_is_not_called_a_layer():
    draw = torch.Generator().manual_seed(28)
    X = torch.randn(500, 4, 5, generator=draw, dtype=torch.float64)
    Y = torch.tanh(2 * X[:, :, [1, 2, 3, 4, 0]] * X.mean(1, keepdim=True)) * X
    fit = hw.learn(hw.Examples(X, Y), method=hw.Moments(max_heads=2, starts=1))
    assert fit.status.kind == "not_realisable", fit.status.sentence
    assert not fit.status.ok


def test_too_few_examples_says_how_many():
    truth = hw.AttentionLayer.random(heads=3, width=10, seed=29)
    fit = hw.learn(hw.draw(truth, count=8, length=4, seed=30))
    assert fit.status.kind == "too_few", fit.status.sentence
    need = int(fit.status.numbers["needed"])
    assert str(need) in fit.status.sentence
    assert need > 8


def test_inputs_that_do_not_determine_the_layer_are_not_called_recovered():
    words = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    truth = hw.AttentionLayer.random(heads=2, width=4, seed=0)
    fit = hw.learn(hw.draw(truth, count=400, length=2, law=words, seed=1))
    assert hw.match(fit.layer, truth).worst > 1e-3, "another layer that does the same on these words"
    assert fit.status.kind == "fitted", fit.status.sentence
    assert "Heads 1 and 2 are not determined in 1 of their 20 directions" in fit.status.sentence


def test_repeated_sequences_count_once():
    truth = hw.AttentionLayer.random(heads=2, width=5, seed=0)
    few = hw.draw(truth, count=4, length=6, seed=1)
    fit = hw.learn(few.take(list(range(4)) * 30), method=hw.Moments(max_heads=2, starts=1, limit=8))
    assert fit.status.kind == "too_few", fit.status.sentence


def test_half_precision_labels_are_met_to_their_rounding_only():
    truth = hw.AttentionLayer.random(heads=2, width=6, seed=1)
    data = hw.draw(truth, count=500, length=6, seed=2)
    fit = hw.learn(hw.Examples(data.X, data.Y.bfloat16()))
    assert fit.status.kind == "recovered"
    assert hw.match(fit.layer, truth).worst < 1e-2
    draw = torch.Generator().manual_seed(3)
    noisy = data.Y + 0.3 * torch.randn(data.Y.shape, generator=draw, dtype=torch.float64)
    assert hw.learn(hw.Examples(data.X, noisy.bfloat16()), heads=2).status.kind == "noise"


def test_labels_without_relation_to_the_inputs_are_not_ok():
    X = torch.randn(400, 5, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    Y = torch.randn(400, 5, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    fit = hw.learn(hw.Examples(X, Y), heads=2, method=hw.Auto(starts=2))
    assert not fit.status.ok
    assert "Nothing learned" in fit.status.sentence


def test_constant_attention_is_one_head():
    W = hw.AttentionLayer.random(heads=1, width=6, seed=6).W
    truth = hw.AttentionLayer(torch.zeros(1, 6, 6, dtype=torch.float64), W)
    recovered(hw.learn(hw.draw(truth, count=500, length=6, seed=7)), truth)


def test_wrong_labels_are_set_aside_and_named():
    truth = hw.AttentionLayer.random(heads=2, width=6, seed=1)
    data = hw.draw(truth, count=400, length=6, seed=2)
    wrong = [7, 60, 61, 200, 399]
    Y = data.Y.clone()
    Y[wrong] = Y[wrong].flip(0, 1)  # as large as any, of other sequences and tokens
    fit = hw.learn(hw.Examples(data.X, Y))
    recovered(fit, truth)
    assert fit.stats["outliers"] == 5
    assert "5 of 400 sequences" in fit.status.sentence
    assert next(event["outliers"] for event in fit.trace if event["stage"] == "outliers") == wrong


def test_time_that_runs_out_is_named():
    truth = hw.AttentionLayer.random(heads=3, width=10, seed=8)
    fit = hw.learn(hw.draw(truth, count=400, length=6, seed=9), seconds=1e-3)
    assert fit.status.kind == "limit"
    assert "Out of time" in fit.status.sentence


def test_out_of_time_in_a_polish_the_rough_fit_is_kept(monkeypatch):
    truth = hw.AttentionLayer.random(heads=2, width=8, seed=8)
    polish, interrupted = Loop._polish, []

    def late(self, action):
        if not interrupted:
            interrupted.append(action.name)
            raise OutOfTimeError
        return polish(self, action)

    monkeypatch.setattr(Loop, "_polish", late)
    fit = hw.learn(hw.draw(truth, count=600, length=6, seed=9), heads=2, method="starts")
    assert interrupted[0].startswith("polish-start-2-")
    assert interrupted[0].replace("polish", "late") in [event["stage"] for event in fit.trace]
    assert fit.layer.heads == 2
    assert fit.stats["held_out_error"] < 1e-3


@pytest.mark.parametrize("seed", [0, 2])
def test_labels_that_are_mostly_noise_still_tell_the_heads(seed):
    # The right heads leave most of the labels; that is no reason to prefer a random start.
    truth = hw.AttentionLayer.random(heads=3, width=10, seed=seed)
    fit = hw.learn(hw.draw(truth, count=1000, length=6, noise=1.5, seed=100 + seed), heads=3)
    assert max(hw.match(fit.layer, truth).theta_error) < 0.3, f"seed {seed}"
    assert not fit.status.ok, "what is left outweighs what is explained"
    assert fit.status.sentence.startswith("Mostly unexplained: with 3 heads, 0.8"), fit.status.sentence


@pytest.mark.parametrize(("noise", "ok"), [(0.5, True), (0.9, True), (1.2, False)])
def test_noise_is_ok_as_long_as_less_of_it_is_left_than_is_explained(noise, ok):
    """In units of the labels' own spread: 1 makes up half of the variance."""
    truth = hw.AttentionLayer.random(heads=1, width=4, seed=1)
    data = hw.draw(truth, count=2000, length=4, seed=2)
    draw = torch.Generator().manual_seed(3)
    Y = data.Y + noise * data.Y.std() * torch.randn(data.Y.shape, generator=draw, dtype=torch.float64)
    fit = hw.learn(hw.Examples(data.X, Y), heads=1)
    assert fit.stats["held_out_error"] == pytest.approx(noise / math.sqrt(1 + noise**2), rel=0.05)
    assert (fit.status.ok, fit.status.kind == "noise") == (ok, ok), fit.status.sentence


def test_sequences_and_their_copies_in_either_half_are_no_relation():
    """Eleven sequences do not show that labels depend on the inputs, however often they are repeated."""
    truth = hw.AttentionLayer.random(heads=2, width=8, seed=0)
    few = hw.draw(truth, count=13, length=6, law="gaussian", seed=1)
    fit = hw.learn(few.take(list(range(13)) * 20))
    assert fit.status.kind in ("recovered", "too_few"), fit.status.sentence
    assert fit.status.kind == "recovered" or fit.status.numbers["needed"] > 13


def test_a_limit_is_named():
    truth = hw.AttentionLayer.random(heads=6, width=12, scale=4.0, seed=31)
    fit = hw.learn(hw.draw(truth, count=900, length=6, seed=32), heads=6,
                   method=hw.Moments(limit=1, starts=1))
    assert fit.status.kind == "limit", fit.status.sentence
    assert "the limit of 1 iterations" in fit.status.sentence


def test_equal_and_dead_heads_are_counted_once():
    truth = hw.AttentionLayer.random(heads=2, width=8, seed=33)
    W = torch.stack([truth.W[0] * 0.25, truth.W[1], truth.W[0] * 0.75])
    doubled = hw.AttentionLayer(truth.Theta[[0, 1, 0]], W)
    fit = hw.learn(hw.draw(doubled, count=500, length=6, seed=34))
    recovered(fit, truth)


def test_more_heads_than_there_are_find_the_same_function():
    truth = hw.AttentionLayer.random(heads=2, width=6, seed=35)
    data = hw.draw(truth, count=500, length=6, seed=36)
    fit = hw.learn(data, heads=3)
    unseen = hw.draw(truth, count=50, length=6, seed=37)
    torch.testing.assert_close(fit.layer(unseen.X), unseen.Y, rtol=0, atol=1e-6)


def test_the_same_seed_gives_the_same_layer_and_nothing_global_moves():
    truth = hw.AttentionLayer.random(heads=2, width=6, seed=38)
    data = hw.draw(truth, count=200, length=5, seed=39)
    state, before = torch.random.get_rng_state(), (data.X.clone(), data.Y.clone())
    numpy_state = np.random.get_state()[1].copy()
    first, second = hw.learn(data, seed=1), hw.learn(data, seed=1)
    assert torch.equal(first.layer.Theta, second.layer.Theta)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert torch.equal(data.X, before[0])
    assert torch.equal(data.Y, before[1])


def test_progress_is_told_and_sequences_kept_from_the_fit_are_few():
    truth = hw.AttentionLayer.random(heads=2, width=6, seed=40)
    seen: list[dict] = []
    fit = hw.learn(hw.draw(truth, count=200, length=5, seed=41), progress=lambda event: seen.append(dict(event)))
    assert {"stage", "residual", "heads"} <= set(seen[0])
    assert any(event["residual"] is not None and event["residual"] < 1e-10 for event in seen)
    assert (fit.stats["held_out"], fit.stats["selected_by"]) == (10, 20), "judged by, and chosen by"


@pytest.mark.parametrize("method", ["adam", "descent"])
def test_adam_finds_a_small_layer_and_does_not_claim_the_floor(method):
    truth = hw.AttentionLayer.random(heads=2, width=6, seed=42)
    fit = hw.learn(hw.draw(truth, count=600, length=6, seed=43), heads=2, method=method)
    assert fit.status.kind == "fitted", fit.status
    assert hw.match(fit.layer, truth).worst < 1e-4


@pytest.mark.parametrize("rank", ["auto", 2])
def test_adam_in_plain_coordinates_comes_back_to_the_users(rank):
    """Tokens with a mean and directions of unequal size, one of them never visited; told a rank, thin factors."""
    truth = hw.AttentionLayer.random(heads=2, width=6, rank=2, offset=True, seed=42)
    draw = torch.Generator().manual_seed(43)
    X = torch.randn(1500, 6, 6, generator=draw, dtype=torch.float64) @ torch.diag(torch.tensor(
        [2.0, 1.5, 1.0, 1.0, 0.7, 0.0], dtype=torch.float64)) + 0.5
    fit = hw.learn(hw.Examples(X[:1200], truth(X[:1200])), heads=2, method="adam", rank=rank)
    Y = truth(X[1200:])
    assert float((fit.layer(X[1200:]) - Y).norm() / (Y - Y.mean((0, 1))).norm()) < 1e-4
    assert fit.stats["unidentified_directions"] == 1
    assert fit.stats["rank"] == (None if rank == "auto" else 2)


def test_adam_takes_thin_heads_on_both_sides():
    truth = hw.AttentionLayer.random(heads=2, width=8, rank=2, seed=5)
    draw = torch.Generator().manual_seed(6)
    W = truth.W @ torch.randn(2, 8, 2, generator=draw, dtype=torch.float64) @ torch.randn(
        2, 2, 8, generator=draw, dtype=torch.float64) / 4
    truth = hw.AttentionLayer(truth.Theta, W)
    data = hw.draw(truth, count=800, length=8, seed=7)
    source = Source(data)
    source.frame = find_frame(data, source.fit, source.device)
    errors = {}
    for out_size in (2, 1):
        found = adam(source, 2, Setting(steps=750 * out_size, rate=1e-2), size=2, out_size=out_size,
                     seed=torch.Generator().manual_seed(0))
        errors[out_size] = found.error
        assert found.W.shape == (2, 8, 8) and int(torch.linalg.matrix_rank(found.W[0], rtol=1e-6)) == out_size
    assert errors[2] < 1e-5 < 0.1 < errors[1]  # too thin is too thin


def test_beyond_small_widths_a_rank_makes_both_sides_thin():
    small, wide = (hw.draw(hw.AttentionLayer.random(heads=1, width=d), count=2, length=2) for d in (32, 33))
    assert sizes(small, 4) == (4, None) and sizes(wide, 4) == (4, 4)
    assert sizes(wide, "auto") == sizes(wide, None) == sizes(wide, 33) == (None, None)


def test_adams_rate_ends_with_its_budget():
    cosine, exponential = Setting(rate=2.0, warm=10), Setting(rate=2.0, last=1e-6)
    assert [round(cosine.rate_at(part, 99, 32), 12) for part in (0.0, 0.5, 1.0)] == [2.0, 1.0, 0.0]
    assert cosine.rate_at(0.0, 0, 32) == pytest.approx(0.2)
    assert exponential.rate_at(0.1, 99, 32) == 2.0
    assert exponential.rate_at(1.0, 99, 32) == pytest.approx(2e-6)
    usual = [Setting().rate_at(0.0, 99, width) for width in (8, 32, 128)]
    assert usual[0] == usual[1] == pytest.approx(2 * usual[2])


def test_adam_uses_its_seconds_and_is_watched():
    data = hw.draw(hw.AttentionLayer.random(heads=1, width=4, seed=0), count=300, length=4, seed=1)
    fit = hw.learn(data, heads=1, method="adam", seconds=1.0)
    assert 0.9 < fit.stats["seconds"] < 3.0
    source = Source(data)
    source.frame = find_frame(data, source.fit, source.device)
    shown = []

    def watch(Theta, W, offset):
        shown.append(source.error(source.select, Theta, W, offset))
        return len(shown) == 3

    found = adam(source, 1, seed=torch.Generator().manual_seed(0), watch=watch)
    assert found.products == 2 * 150 and found.error == shown[-1] < shown[0]


def test_adam_in_double_precision_goes_below_single():
    data = hw.draw(hw.AttentionLayer.random(heads=1, width=4, seed=0), count=300, length=4, seed=1)
    source = Source(data)
    source.frame = find_frame(data, source.fit, source.device)
    found = adam(source, 1, Setting(dtype=torch.float64, last=1e-5), seed=torch.Generator().manual_seed(0))
    assert found.error < 1e-12  # in single precision it ends at 1e-7


BAD = {
    "heads zero": ({"heads": 0}, "heads"),
    "heads negative": ({"heads": -2}, "heads"),
    "heads word": ({"heads": "many"}, "heads"),
    "heads half": ({"heads": 1.5}, "heads"),
    "method": ({"method": "magic"}, "method"),
    "rank zero": ({"rank": 0}, "rank"),
    "rank beyond the width": ({"rank": 9}, "rank"),
    "too many heads": ({"heads": 40}, "heads"),
    "adam without a count": ({"method": "adam"}, "heads"),
    "descent without a count": ({"method": "descent"}, "heads"),
    "seed": ({"seed": -1}, "seed"),
    "seconds": ({"seconds": 0.0}, "seconds"),
    "rank with whole matrices": ({"heads": 1, "method": "descent", "rank": 2}, "rank"),
    "rank with L-BFGS": ({"heads": 1, "method": "lbfgs", "rank": None}, "rank"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_refused(name):
    data = hw.draw(hw.AttentionLayer.random(heads=1, width=6, seed=0), count=60, length=4, seed=1)
    settings, argument = BAD[name]
    with pytest.raises(hw.InputError) as caught:
        hw.learn(data, **settings)
    message = str(caught.value)
    assert message.startswith(f"{argument}:"), message
    assert "expected" in message
    assert "got" in message
    assert "Try:" in message


OWN = {
    "starts of Adam": (lambda: hw.Adam(starts=3), "starts", "it has none"),
    "a misspelt one": (lambda: hw.Moments(max_head=3), "max_head", "max_heads, starts, limit"),
    "a search without a hull": (lambda: hw.Factors(search="net"), "search", "max_heads, starts, limit"),
    "no start": (lambda: hw.Starts(starts=0), "starts", "0"),
    "half a head": (lambda: hw.Auto(max_heads=1.5), "max_heads", "1.5"),
    "no iteration": (lambda: hw.Sculpt(limit=0), "limit", "0"),
}


@pytest.mark.parametrize("name", OWN)
def test_a_setting_that_a_learner_does_not_have_is_refused(refused, name):
    make, argument, word = OWN[name]
    with refused(argument, word):
        make()


def test_settings_reach_the_fit_and_a_name_stands_for_the_defaults():
    data = hw.draw(hw.AttentionLayer.random(heads=1, width=4, seed=0), count=60, length=4, seed=1)
    own = hw.learn(data, method=hw.Starts(max_heads=2, starts=3, limit=50)).settings
    assert (own["method"], own["max_heads"], own["starts"], own["limit"]) == ("starts", 2, 3, 50)
    assert hw.learn(data, method="starts").settings == hw.learn(data, method=hw.Starts()).settings
    assert "starts" not in hw.learn(data, 1, hw.Adam(), seconds=0.1).settings


def test_three_different_sequences_are_the_least(refused):
    data = hw.draw(hw.AttentionLayer.random(heads=1, width=3, seed=0), count=3, length=4, seed=1)
    assert hw.learn(data).status.kind == "too_few"
    with refused("examples", "at least 3 sequences"):
        hw.learn(data.take([0, 1]))
    with refused("examples", "at least 3 different sequences"):
        hw.learn(data.take([0, 1, 0, 1, 0]))


@pytest.mark.parametrize("what", ["one token", "constant tokens", "constant labels", "one sequence", "arrays"])
def test_bad_examples_are_refused(what):
    X = torch.randn(20, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = {
        "one token": lambda: hw.Examples(X[:, :1], X[:, :1]),
        "constant tokens": lambda: hw.Examples(torch.ones_like(X), X),
        "constant labels": lambda: hw.Examples(X, torch.ones_like(X)),
        "one sequence": lambda: hw.Examples(X[:1], X[:1]),
        "arrays": lambda: X.numpy(),
    }[what]()
    with pytest.raises(hw.InputError, match=r"examples.*expected.*got.*Try:"):
        hw.learn(data)
