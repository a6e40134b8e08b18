"""The statistical claims: bounds that hold at every number of examples, clipped means, examples that come later."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom
from tests.commands import headway
from tests.dense import capital

import headway as hw
from headway.certificates import betting, held_out
from headway.certificates.held_out import Errors, errors, mean_claim, quantile_claim
from headway.core.files import read_tensors, write_tensors
from headway.core.measured import fingerprint, uncounted
from headway.core.shards import write
from headway.runs.store import COUNTED, Run

SEEDS = st.integers(0, 2**31)
# Laws on [0, 1] and their means; the last is heavy in the tail: mostly nothing, seldom all.
LAWS = {"even": (lambda draw, n: draw.random(n), 0.5), "small": (lambda draw, n: draw.random(n) ** 9, 0.1),
        "seldom": (lambda draw, n: (draw.random(n) < 0.03) * draw.random(n) ** 0.1, 0.03 / 1.1)}


def as_errors(values, deviation=1.0, boolean=True, first=0):
    return Errors(torch.as_tensor(values, dtype=torch.float64), deviation, 2.0, boolean, 3.0, 1, first=first)


def instance(seed=0, heads=2, width=4, count=300, length=5, **extra):
    layer = hw.AttentionLayer.random(heads=heads, width=width, seed=seed, **extra)
    return layer, hw.draw(layer, count=count, length=length, seed=seed + 1000)


def spoiled(layer, size=1e-3):
    Theta = layer.Theta.clone()
    Theta[0, 1, 2] += size
    return replace(layer, Theta=Theta)


# -- betting ------------------------------------------------------------------------------------------------------


def test_the_money_is_one_and_no_share_is_more_than_all():
    assert sum(betting.MONEY) == pytest.approx(1.0, abs=1e-12) and sum(betting.MONEY) <= 1.0 + 1e-15
    assert len(betting.SHARES) == len(betting.MONEY)
    assert all(0 < share <= 1 for share in betting.SHARES)


@pytest.mark.parametrize("law", [{0.0: 0.5, 0.3: 0.3, 1.0: 0.2}, {0.0: 0.99, 1.0: 0.01}, {0.2: 0.6, 0.25: 0.4}])
def test_the_bet_is_fair(law):
    """The mean of K over all samples of four, enumerated: 1 at the law's own mean, less below it, more above it."""
    mean = sum(value * p for value, p in law.items())

    def expected(m):
        return sum(math.prod(law[value] for value in sample) * math.exp(betting.log_capital(np.array(sample), m))
                   for sample in itertools.product(law, repeat=4))

    assert expected(mean) == pytest.approx(1.0, abs=1e-10)
    assert expected(0.9 * mean) < 1.0 < expected(min(1.1 * mean, 0.99))


@given(seed=SEEDS, n=st.integers(1, 60), m=st.floats(0.001, 0.999))
def test_capital_is_that_of_a_plain_loop_and_counts_are_a_case_of_it(seed, n, m):
    draw = np.random.default_rng(seed)
    z = draw.random(n) ** draw.integers(1, 20)
    assert betting.log_capital(z, m) == pytest.approx(math.log(capital(z, m)), abs=1e-9)
    ones = (draw.random(n) < 0.1).astype(float)
    assert betting.log_counted(int(ones.sum()), n, m) == pytest.approx(betting.log_capital(ones, m), abs=1e-9)


@given(seed=SEEDS, n=st.integers(2, 40), confidence=st.sampled_from([0.5, 0.9, 0.99]))
def test_bounds_are_those_of_a_grid(seed, n, confidence):
    draw = np.random.default_rng(seed)
    z = draw.random(n) ** draw.integers(1, 8)
    grid = np.linspace(0.01, 0.99, 50)
    above = [m for m in grid if capital(z, m) >= 1 / (1 - confidence)]
    below = [m for m in grid if capital(1 - z, 1 - m) >= 1 / (1 - confidence)]
    assert betting.upper(z, confidence) <= min(above, default=1.0) <= betting.upper(z, confidence) + 0.021
    assert betting.lower(z, confidence) >= max(below, default=0.0) >= betting.lower(z, confidence) - 0.021


@given(n=st.integers(1, 3000), share=st.floats(0.001, 0.5), confidence=st.sampled_from([0.8, 0.99]))
def test_the_counts_are_the_largest_that_pass(n, share, confidence):
    goal = math.log(1 / (1 - confidence))
    most = betting.most_above(n, share, confidence)
    assert most < 0 or betting.log_counted(most, n, share) >= goal
    assert most == n or betting.log_counted(most + 1, n, share) < goal
    assert most < 0 or binom.cdf(most, n, share) <= 1 - confidence, "never more than when looked at once"
    fewest = betting.least_above(n, share, confidence)
    assert fewest > n or betting.log_counted(n - fewest, n, 1 - share) >= goal
    assert fewest > n or binom.sf(fewest - 1, n, share) <= 1 - confidence
    assert most < fewest
    need = betting.needed(share, confidence)
    assert betting.most_above(need, share, confidence) >= 0 > betting.most_above(need - 1, share, confidence)


def test_five_hundred_without_an_exception_are_enough_at_the_defaults():
    """Looked at once it would be 459; a thousand bear one exception."""
    assert betting.needed(0.01, 0.99) == 491
    assert betting.needed(0.001, 0.99) == 4932
    assert betting.most_above(1000, 0.01, 0.99) == 1


@pytest.mark.parametrize("name", LAWS)
def test_whoever_looks_after_every_example_is_wrong_no_more_often_than_said(name):
    """At nominal 0.8, 300 rows of 400 examples: K at the true mean ever at 1/δ is the worst moment to stop."""
    law, mean = LAWS[name]
    draw = np.random.default_rng(5)
    z = law(draw, (300, 400))
    worst = {}
    for side, values, m in (("upper", z, mean), ("lower", 1 - z, 1 - mean)):
        gain = (m - values) / (1 - m)
        paths = sum(w * np.cumprod(1 + c * gain, 1) for c, w in zip(betting.SHARES, betting.MONEY, strict=True))
        worst[side] = (paths.max(1) >= 5.0).mean()
        j, n = np.unravel_index(paths.argmax(), paths.shape)
        assert math.log(paths[j, n]) == pytest.approx(betting.log_capital(values[j, : n + 1], m), abs=1e-8)
        if paths[j, n] > 5.0:
            assert betting.upper(values[j, : n + 1], 0.8) < m, "this is where the bound would be wrong"
    assert max(worst.values()) <= 0.2 + 3 * math.sqrt(0.16 / 300), worst
    assert max(worst.values()) > 0.01, "a bound that is never wrong says too little"
    assert betting.upper(z[0], 0.99) < 2.5 * mean + 0.02


# -- the quantile -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "fraction", "confidence"),
                         [(500, 0.01, 0.99), (100, 0.1, 0.95), (2000, 0.05, 0.9)])
def test_the_quantile_is_an_order_statistic_whose_rank_the_bet_gives(n, fraction, confidence):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    values = torch.arange(1, n + 1, dtype=torch.float64)[order]
    claim = quantile_claim(as_errors(values), confidence, fraction, 1e9)
    rank, low = int(claim.numbers["bound"]), int(claim.numbers["at_least"])
    goal = 1 / (1 - confidence)

    def counted(above, share):
        return capital([1.0] * above + [0.0] * (n - above), share)

    assert counted(n - rank, fraction) >= goal > counted(n - rank + 1, fraction)
    # Fewer than low are at or below anything less than the low-th: too few, were there 1 − fraction of them.
    assert counted(low - 1, 1 - fraction) >= goal > counted(low, 1 - fraction)
    assert binom.cdf(n - rank, n, fraction) <= 1 - confidence


def test_a_quantile_claim_has_three_answers():
    values = torch.linspace(1.0, 2.0, 1000)
    assert quantile_claim(as_errors(values), 0.99, 0.05, 2.5).holds == "yes"
    assert quantile_claim(as_errors(values), 0.99, 0.05, 1.95).holds == "undecided"
    no = quantile_claim(as_errors(values), 0.99, 0.05, 1.5)
    assert no.holds == "no"
    assert no.numbers["above"] == 500
    assert 0.5 < no.numbers["at_most_above"] < 0.6
    assert "500 of the 1000 sequences are above what is allowed, and so are at most 0.5" in no.reason
    few = quantile_claim(as_errors(values[:100]), 0.99, 0.01, 2.5)
    assert few.holds == "undecided"
    assert few.numbers["needed"] == 491
    assert "491" in few.reason
    assert "0 of them are above" in few.reason


def test_the_quantile_covers_at_every_number_of_examples():
    """Nominal 0.8, 80 rows: a heavy tail, and a law of two values, where "above" must not count what is equal."""
    draw = np.random.default_rng(7)
    for law, quantile in ((lambda: draw.random(400) ** -0.7, 0.1**-0.7),
                          (lambda: 1.0 * (draw.random(400) < 0.1), 0.0),
                          (lambda: 1.0 * (draw.random(400) < 0.11), 1.0)):
        over = under = 0
        for _ in range(80):
            e = law()
            claims = [quantile_claim(as_errors(e[:n]), 0.8, 0.1, 1.0).numbers for n in (20, 50, 100, 200, 400)]
            over += any(c.get("bound", math.inf) < quantile for c in claims)
            under += any(c.get("at_least", 0.0) > quantile for c in claims)
        assert max(over, under) <= 0.2 * 80 + 3 * math.sqrt(80 * 0.16)
        e = law()
        assert quantile_claim(as_errors(e), 0.8, 0.1, 1.0).numbers["bound"] < 1e9


# -- the mean -----------------------------------------------------------------------------------------------------


def test_a_mean_is_that_of_clipped_errors_and_one_bet_bounds_the_rest():
    values = [7.0] * 16 + [0.02] * 480 + [9.0] * 4
    claim = mean_claim(as_errors(values, first=16), 0.99, 0.1, None, None)
    b = held_out.CLIP * 0.1
    z = np.array([(0.02 / b) ** 2] * 480 + [1.0] * 4)
    U = betting.upper(z, 0.99)
    assert claim.numbers["sequences"] == 484, "the first say what the deviation is"
    assert claim.numbers["clip"] == b
    assert claim.numbers["above"] == 4
    assert claim.numbers["bound"] == pytest.approx(b * math.sqrt(U), rel=1e-12)
    assert claim.numbers["at_most_above"] == pytest.approx(U, rel=1e-12)
    assert claim.holds == "yes", claim
    assert f"min(error, 5.0e-01) over all inputs is at most {b * math.sqrt(U):.1e}" in claim.statement
    assert f"at most {U:.2g} of them have a larger error" in claim.statement
    assert "4 of 484 sequences are above 5.0e-01" in claim.reason
    assert "the first 16 sequences" in claim.assumption
    large = mean_claim(as_errors(torch.full((600,), 0.2), first=16), 0.99, 0.1, None, None)
    assert large.holds == "no"
    near = mean_claim(as_errors(torch.full((30,), 0.02), first=16), 0.99, 0.1, None, None)
    assert near.holds == "undecided"
    assert "sequences like these would decide" in near.reason
    none = mean_claim(as_errors(torch.full((9,), 0.02), first=9), 0.99, 0.1, None, None)
    assert none.holds == "undecided"
    assert "more are needed" in none.reason


def test_how_many_would_decide_is_about_right():
    def claim(count):
        return mean_claim(as_errors(torch.full((16 + int(count),), 0.07), first=16), 0.99, 0.1, None, None)

    assert claim(44).holds == "undecided"
    need = float(claim(44).reason.split("about ")[1].split(" ")[0])
    assert claim(1.1 * need).holds == "yes"
    assert claim(0.5 * need).holds == "undecided"


def test_with_a_bound_on_the_teacher_the_mean_is_that_of_all_errors():
    values = [1e-3] * 4000
    loose = mean_claim(as_errors(values, boolean=False), 0.99, 0.1, 1.0, None)
    assert "token_bound" in loose.reason
    assert "min(error" in loose.statement
    claim = mean_claim(as_errors(values), 0.99, 1.0, 1.0, None)
    # No error is larger than 1 + 3.
    U = betting.upper(np.full(4000, (1e-3 / 4) ** 2), 0.99)
    assert claim.numbers["bound"] == pytest.approx(4 * math.sqrt(U), rel=1e-12)
    assert claim.numbers["bound"] ** 2 < 1e-6 + 7 * 16 * math.log(200) / (3 * 3999), "Maurer and Pontil, at one n"
    assert claim.holds == "yes"
    assert "±1" in claim.assumption
    assert "min(" not in claim.statement
    assert mean_claim(as_errors(torch.full((100_000,), 0.9)), 0.99, 0.1, 1.0, None).holds == "no"


def test_bounds_that_the_examples_contradict_decide_nothing():
    wrong = mean_claim(as_errors(torch.full((4000,), 5.0)), 0.99, 10.0, 1.0, None)
    assert wrong.holds == "undecided"
    assert "an error is 5" in wrong.reason
    short = mean_claim(as_errors(torch.full((4000,), 0.1), boolean=False), 0.99, 1.0, 1.0, 1.5)
    assert short.holds == "undecided"
    assert "a token is 2 long" in short.reason


@pytest.mark.parametrize("name", LAWS)
def test_the_mean_claim_covers(name):
    """Nominal 0.8, 60 rows, looked at three times; bench/coverage.py does 500 and looks at the worst moment."""
    law, _ = LAWS[name]
    draw = np.random.default_rng(11)
    b = held_out.CLIP * 0.1
    mean = float((np.minimum(law(draw, 1_000_000), b) ** 2).mean())
    wrong = 0
    for _ in range(60):
        e = law(draw, 300)
        wrong += any(mean_claim(as_errors(e[:n], first=16), 0.8, 0.1, None, None).numbers["bound"] ** 2 < mean
                     for n in (30, 100, 300))
    assert wrong <= 0.2 * 60 + 3 * math.sqrt(60 * 0.16)


# -- outliers and noise -------------------------------------------------------------------------------------------


def learned(layer, outliers, examples=1000):
    stats = {"outliers": outliers, "examples": examples}
    return hw.Fit(layer, hw.Status("recovered", "Recovered."), stats, ())


def test_outliers_among_the_fresh_examples_are_part_of_the_statement():
    layer, data = instance(2, count=600)
    Y = data.Y.clone()
    Y[[50, 200, 400]] *= 30.0
    found = hw.certify(layer, hw.Examples(data.X, Y))
    assert found["held-out quantile"].holds != "yes"
    assert "3 of the 600 sequences are above what is allowed" in found["held-out quantile"].reason
    part = found["held-out quantile"].numbers["at_most_above"]
    assert 3 / 600 < part < 0.04
    assert f"so are at most {part:.2g} of all inputs" in found["held-out quantile"].reason
    assert found["held-out mean"].holds == "yes"
    assert 3 / 600 < found["held-out mean"].numbers["at_most_above"] < 0.04
    looser = hw.certify(layer, hw.Examples(data.X, Y), fraction=0.03)
    assert looser["held-out quantile"].holds == "yes"


def test_what_the_learner_set_aside_is_held_against_the_claim():
    layer, data = instance(3, count=600)
    assert hw.certify(learned(layer, 0), data).established("held-out quantile")
    found = hw.certify(learned(layer, 20), data)
    claim = found["held-out quantile"]
    assert claim.holds == "undecided", claim
    assert ("the learner set 0.02 of its own sequences aside as outliers, fewer are among these, and 12 more are "
            "counted") in claim.reason
    assert "any bound" in claim.statement
    assert found["held-out mean"].numbers["at_most_above"] > 20 / 1000
    assert hw.certify(learned(layer, 20), data, fraction=0.06).established("held-out quantile")
    assert hw.certify(learned(layer, 1, 100_000), data).established("held-out quantile"), "less than one in 600"
    Y = data.Y.clone()
    Y[100:120] *= 30.0
    there = hw.certify(learned(layer, 20), hw.Examples(data.X, Y), fraction=0.1)["held-out quantile"]
    assert "learner" not in there.reason, "they are among these already"
    assert there.numbers["above"] == 20


def test_noise_is_counted_as_error_and_the_assumption_says_so():
    layer = hw.AttentionLayer.random(heads=2, width=4, seed=4)
    noisy = hw.certify(layer, hw.draw(layer, count=500, length=5, noise=0.01, seed=1))
    assert noisy["held-out quantile"].holds == "no"
    assert noisy["held-out mean"].holds == "yes"
    for name in ("held-out quantile", "held-out mean"):
        assert "its noise included" in noisy[name].assumption
    fit = hw.Fit(layer, hw.Status("noise", "Noise."), {"outliers": 0, "examples": 9, "noise": 0.01}, ())
    told = hw.certify(fit, hw.draw(layer, count=500, length=5, noise=0.01, seed=1))
    assert "the learner found label noise of 1.0e-02" in told["held-out quantile"].reason
    assert "noise" not in told["held-out mean"].reason, "it is a yes all the same"


# -- examples that come later -------------------------------------------------------------------------------------


def same(one, other, names=("held-out quantile", "held-out mean")):
    for name in names:
        assert one[name] == other[name]


def test_examples_in_parts_give_what_all_of_them_give():
    layer, data = instance(5, count=700)
    wrong = spoiled(layer)
    parts = [data.take(range(a, b)) for a, b in ((0, 100), (100, 350), (350, 700))]
    found = None
    for part in parts:
        found = hw.certify(wrong, part, so_far=found)
    whole = hw.certify(wrong, data)
    same(found, whole)
    assert found.settings["counted"] == 700
    other = hw.certify(wrong, parts[2], so_far=hw.certify(wrong, parts[0], so_far=hw.certify(wrong, parts[1])))
    assert other["held-out quantile"].numbers["bound"] == whole["held-out quantile"].numbers["bound"]


def test_nothing_is_counted_twice(refused):
    layer, data = instance(6, count=400)
    some, rest = data.take(range(150)), data.take(range(150, 400))
    found = hw.certify(layer, some)
    same(hw.certify(layer, some, so_far=found), found)
    grown = hw.certify(layer, data, so_far=found)
    same(grown, hw.certify(layer, data))
    same(hw.certify(layer, some, so_far=grown), grown)
    with refused("examples", "50 of 150 that were, of 150 counted"):
        hw.certify(layer, data.take(range(100, 250)), so_far=found)
    with refused("so_far", "another"):
        hw.certify(spoiled(layer), rest, so_far=found)
    with refused("so_far", "one without"):
        hw.certify(layer, rest, so_far=replace(found, held_out=None))
    with refused("so_far", "int"):
        hw.certify(layer, rest, so_far=3)
    assert "Errors(of 150 sequences)" == repr(found.held_out)
    assert found == replace(found, held_out=None), "what a certificate says is its claims"


@given(st.lists(st.integers(0, 8), min_size=1, max_size=12), st.lists(st.integers(0, 8), min_size=1, max_size=12))
def test_what_is_new_is_what_a_count_says(counted, fresh):
    had, new = Counter(counted), Counter(fresh)
    common = sum((had & new).values())
    given = np.array(counted), np.array(fresh)
    if common not in (0, len(counted), len(fresh)):
        with pytest.raises(hw.InputError, match="counted before"):
            uncounted(*given)
        return
    found = uncounted(*given)
    assert Counter(given[1][found].tolist()) == new - had


def test_a_fingerprint_is_of_what_the_layer_computes():
    layer, _ = instance(7)
    form = hw.Form(rotary=hw.Rotary(), sight=hw.Sight(causal=True))
    turned = hw.FactoredLayer.random(heads=1, width=4, size=2, form=form)
    base = replace(turned, form=replace(form, rotary=hw.Rotary(base=500.0)))
    marks = [fingerprint(one) for one in (
        layer, spoiled(layer, 1e-15), replace(layer, mask="causal"), turned, base,
        replace(turned, positions=torch.arange(5.0)))]
    assert len(set(marks)) == len(marks)
    assert fingerprint(layer.to(torch.float64)) == marks[0]


def test_a_run_folder_keeps_what_was_counted(tmp_path, refused):
    layer, data = instance(8, count=200, length=9)  # ±1 tokens: no sequence comes twice by chance
    run = Run.create(tmp_path / "run", {"digest": data.digest()})
    hw.learn(data, heads=2, run=run)
    for name, seed in (("fresh", 31), ("more", 32)):
        write(tmp_path / name, iter([hw.draw(layer, count=400, length=9, seed=seed)]), 1)

    def certified(*words):
        done = headway("certify", tmp_path / "run", "--json", *words)
        assert done.returncode in (0, 1), done.stderr
        return done, json.loads(done.stdout)

    first, one = certified("--examples", tmp_path / "fresh")
    assert first.returncode == 1
    assert (one["counted"], one["new"], one["holds"]["held-out quantile"]) == (400, 400, "undecided")
    second, two = certified("--examples", tmp_path / "more")
    assert second.returncode == 0, second.stderr
    assert (two["counted"], two["new"], two["holds"]["held-out quantile"]) == (800, 400, "yes")
    assert "400 of them are new, and errors are counted on 800 in all" in " ".join(second.stderr.split())
    again = certified("--examples", tmp_path / "more")[1]
    assert (again["counted"], again["new"]) == (800, 0)
    assert again["numbers"]["held-out mean"] == two["numbers"]["held-out mean"]
    stored = run.certificate()
    assert len(stored.held_out) == 800
    learned = run.fit().layer
    third = hw.certify(learned, hw.draw(layer, count=100, length=9, seed=33), so_far=stored)
    assert third.settings["counted"] == 900
    anew = certified("--examples", tmp_path / "more", "--anew")[1]
    assert (anew["counted"], anew["holds"]["held-out quantile"]) == (400, "undecided")
    tensors, words = read_tensors(tmp_path / "run" / COUNTED)
    for edited in ({**tensors, "errors": -tensors["errors"] - 1}, {**tensors, "hashes": tensors["hashes"][1:]}):
        write_tensors(tmp_path / "run" / COUNTED, edited, words)
        with refused(str(tmp_path / "run" / COUNTED), "as headway certify keeps them", "--anew"):
            run.counted()
    about = json.loads(words["about"])
    for name, value in (("first", 0), ("deviation", True), ("widest", None), ("layer", 3)):
        write_tensors(tmp_path / "run" / COUNTED, tensors, {**words, "about": json.dumps({**about, name: value})})
        with refused(str(tmp_path / "run" / COUNTED), "--anew"):
            run.counted()
    other = {**words, "about": json.dumps({**about, "layer": "another"})}
    write_tensors(tmp_path / "run" / COUNTED, tensors, other)
    assert run.counted() is None
    assert errors(learned, hw.Examples.open(tmp_path / "more")).first == held_out.FIRST
