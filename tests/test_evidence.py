"""What a fit leaves and what it rests on: probes keep their level and find what they are made for, wrong labels are
found, undetermined heads are seen, and the parts of the examples stay apart."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binom

import headway as hw
from headway.learning import evidence
from headway.learning.candidate import Candidate
from headway.learning.ladder import floor_of
from headway.learning.source import FEW, Source, far_out, find_frame, split
from headway.linalg.projected import Rows

WIDTH, LENGTH = 4, 6
PROBES = ("token", "position", "neighbours", "size", "curved", "sharpness", "attention", "attention, near",
          "attention, before", "attention, from the row before", "attention, from the row after",
          "attention, reversed", "distance")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def source_of(data):
    found = Source(data)
    found.frame = find_frame(data, found.fit, found.device)
    return found


def candidate(Theta, W, sequences, **change):
    """A fit of these heads, with key bias and offset zero."""
    m, d, e = W.shape
    given = {"residual": 0.0, "error": 0.0, "reason": "floor", "sequences": sequences, "equations": 0, "rank": None,
             "products": 0, **change}
    return Candidate(torch.cat([Theta, Theta.new_zeros(m, 1, d)], 1), W, W.new_zeros(e), **given)


def probed(X, R, fitted, seed=0):
    """The parts that the probes give, of a fit that leaves R."""
    source = source_of(hw.Examples(X, fitted(X) + R))
    found = candidate(fitted.Theta, fitted.W / source.frame.scale, len(X), residual=1.0)
    return evidence.structure(source, found, torch.Generator().manual_seed(seed))


# -- the level of the probes ------------------------------------------------------------------------------------

DRAWS = 200


def noise(seed, width=3, length=4, n=40):
    """Tokens, and residuals as likely as their opposites: of a size that depends on the token, the place and the
    sequence, equal throughout a sequence up to sign."""
    X = normal(n, length, width, seed=2 * seed)
    size = X.square().sum(2, keepdim=True) * torch.arange(1.0, length + 1).view(1, -1, 1) * X[:, :1, :1].exp()
    sign = torch.where(normal(n, 1, 1, seed=2 * seed + 1) > 0, 1.0, -1.0)
    return X, size * sign


def test_noise_of_any_size_is_seldom_said_to_depend_on_the_inputs():
    """Up to chance each probe's part is at most 0.1 in a tenth of the draws, and one of J at most LEVEL/J in LEVEL
    of them."""
    fitted = hw.AttentionLayer.random(heads=1, width=3, seed=5)
    found = [probed(*noise(seed), fitted, seed=seed) for seed in range(DRAWS)]
    assert set(found[0]) == set(PROBES)
    told = sum(evidence.dependent(parts) for parts in found)
    assert told <= binom.ppf(0.9999, DRAWS, evidence.LEVEL)
    for probe in found[0]:
        assert sum(parts[probe] <= 0.1 for parts in found) <= binom.ppf(0.9999, DRAWS, 0.1), probe


# -- and what they find -----------------------------------------------------------------------------------------


def layer(seed=5, mask="none", scale=3.0):
    return hw.AttentionLayer.random(heads=1, width=WIDTH, scale=scale, mask=mask, seed=seed)


def near(X):
    """A head that sees its neighbours only."""
    at = torch.arange(LENGTH)
    scores = (X @ layer().Theta[0] @ X.mT).masked_fill((at.unsqueeze(1) - at).abs() > 1, -math.inf)
    return torch.softmax(scores, 2) @ X @ layer().W[0]


def by_distance(X):
    """A head whose scores also depend on how far apart two tokens are."""
    at = torch.arange(LENGTH, dtype=torch.float64)
    more = X @ normal(WIDTH, WIDTH, seed=1) @ X.mT * torch.cos(at.unsqueeze(1) - at)
    return (torch.softmax(X @ layer().Theta[0] @ X.mT + more, 2) @ X @ layer().W[0]) - layer()(X)


RELATIONS = {
    "token": lambda X: X @ normal(WIDTH, WIDTH, seed=1),
    "position": lambda X: normal(LENGTH, WIDTH, seed=1).expand(len(X), -1, -1),
    "neighbours": lambda X: X.roll(1, 1) @ normal(WIDTH, WIDTH, seed=1),
    "size": lambda X: X.square().mean(2, keepdim=True) * X,
    "curved": lambda X: torch.tanh(2 * X @ normal(WIDTH, WIDTH, seed=1)).square(),
    "sharpness": lambda X: layer(scale=6.0)(X) - layer()(X),
    "attention": lambda X: layer()(X),
    "attention, near": near,
    "attention, before": lambda X: layer(mask="causal")(X),
    "attention, from the row before": lambda X: layer()(X).roll(1, 1),
    "attention, from the row after": lambda X: layer()(X).roll(-1, 1),
    "attention, reversed": lambda X: layer()(X).flip(1),
    "distance": by_distance,
}


def test_every_probe_has_a_relation_it_is_made_for():
    assert tuple(RELATIONS) == PROBES


@pytest.mark.parametrize("name", RELATIONS)
def test_a_relation_is_found_by_its_probe(name):
    """Under noise as large as the relation."""
    X = normal(1200, LENGTH, WIDTH, seed=2)
    R = RELATIONS[name](X)
    R = R - R.mean((0, 1)) if name != "position" else R
    found = probed(X, R + float(R.std()) * normal(*R.shape, seed=3), layer())
    assert found[name] <= evidence.LEVEL / len(found), found
    assert evidence.dependent(found)


def test_where_no_row_has_neighbours_fewer_probes_are_asked():
    fitted = hw.AttentionLayer.random(heads=1, width=3, seed=5)
    found = probed(normal(60, 2, 3), normal(60, 2, 3, seed=1), fitted)
    assert set(found) == set(PROBES) - {"attention, near"}
    assert not {"attention, before", "distance"} & set(probed(normal(60, 1, 3), normal(60, 1, 3, seed=1), fitted))
    causal = source_of(hw.Examples(normal(60, 4, 3), normal(60, 4, 3, seed=1), mask="causal"))
    blank = candidate(torch.zeros(1, 3, 3).double(), torch.zeros(1, 3, 3).double(), 60)
    found = evidence.structure(causal, blank, torch.Generator().manual_seed(0))
    assert set(found) == set(PROBES) - {"attention, before"}


def test_the_probe_for_distances_is_the_gradient_of_such_scores():
    """T by the first half's residuals, and the second half's in that direction, by autograd."""
    X, R = normal(8, LENGTH, WIDTH, seed=2), normal(8, LENGTH, WIDTH, seed=3)
    first, second = ([Rows(X[half], R[half])] for half in (slice(0, 4), slice(4, 8)))
    fitted = layer()
    best = candidate(fitted.Theta, fitted.W, 8)
    at = torch.arange(LENGTH, dtype=torch.float64)
    weights = [f(turn * (at - at.unsqueeze(1))) for turn in evidence.TURNS for f in (torch.cos, torch.sin)]
    Z = torch.cat([X, torch.ones(8, LENGTH, 1, dtype=torch.float64)], 2)

    def matched(T):
        """⟨F_T(x_s), r_s⟩ for every sequence."""
        S = X @ fitted.Theta[0] @ X.mT + sum(g * (Z @ t @ Z.mT) for g, t in zip(weights, T, strict=True))
        return ((torch.softmax(S, 2) @ X @ fitted.W[0]) * R).sum((1, 2))

    T = torch.zeros(len(weights), WIDTH + 1, WIDTH + 1, dtype=torch.float64)
    J = torch.autograd.functional.jacobian(matched, T)
    wanted = torch.einsum("sgpq,gpq->s", J[4:], J[:4].sum(0))
    torch.testing.assert_close(evidence._by_distance(first, second, best), wanted)


def left_by(truth, X, heads, seed):
    """Whether what so many heads of a layer of two leave is said to depend on the place."""
    source = source_of(hw.Examples(X, truth(X)))
    plain = hw.AttentionLayer.random(heads=2, width=WIDTH, scale=3.0, seed=seed)
    back, mean = source.frame.out, source.frame.mean
    Theta = torch.cat([back.T @ plain.Theta @ back, (mean @ plain.Theta @ back).unsqueeze(1)], 1)[:heads]
    found = candidate(plain.Theta[:heads], back.T @ plain.W[:heads] / source.frame.scale, len(X), residual=1.0)
    return evidence.placed(source, replace(found, Theta=Theta), torch.Generator().manual_seed(seed))


def test_what_depends_on_the_place_is_told_from_a_head_that_is_missed():
    """A layer without a mask gives the same rows in another order for tokens in another order. Of tokens that come
    in an order of their own nothing is said."""
    told = 0
    order = normal(LENGTH, WIDTH, seed=9)
    at = torch.arange(LENGTH, dtype=torch.float64)
    for seed in range(10):
        plain = hw.AttentionLayer.random(heads=2, width=WIDTH, scale=3.0, seed=seed)

        def turned(X, plain=plain):
            """The same heads with scores that fall with the distance."""
            S = X.unsqueeze(1) @ plain.Theta @ X.unsqueeze(1).mT - (at.unsqueeze(1) - at).abs() / 2
            return (torch.softmax(S, 3) @ X.unsqueeze(1) @ plain.W).sum(1)

        X = normal(400, LENGTH, WIDTH, seed=50 + seed)
        assert not left_by(plain, X, 1, seed), "one of a thousand layers"
        told += left_by(turned, X, 2, seed)
        assert not left_by(turned, X + order, 2, seed)
        assert not left_by(plain, X + order, 1, seed)
    assert told >= 9


def test_what_a_close_fit_leaves_is_not_the_rounding_of_single_precision():
    X = normal(1200, LENGTH, WIDTH, seed=2)
    source = source_of(hw.Examples(X, layer()(X) + 1e-10 * normal(*X.shape, seed=3)))
    assert source.frame.plain
    close = candidate(layer().Theta, layer().W / source.frame.scale, 1000, residual=1e-10)
    assert not evidence.dependent(evidence.structure(source, close, torch.Generator().manual_seed(0)))
    rough = replace(close, residual=1.0)  # as if single precision would do
    assert evidence.dependent(evidence.structure(source, rough, torch.Generator().manual_seed(0)))


def test_filling_shows_nothing():
    """Labels of filling are anything; only rows that count are probed."""
    X, R = normal(400, 5, 4), normal(400, 5, 4, seed=1)
    padding = torch.zeros(400, 5, dtype=torch.bool)
    padding[::2, 3:] = True
    R[padding] = 1e3 * X[padding]
    source = source_of(hw.Examples(X, R, padding))
    blank = candidate(torch.zeros(1, 4, 4).double(), torch.zeros(1, 4, 4).double(), 400)
    assert not evidence.dependent(evidence.structure(source, blank, torch.Generator().manual_seed(0)))


# -- labels as they stand ---------------------------------------------------------------------------------------


def test_labels_are_seen_through_at_a_glance():
    X = normal(200, 5, 4)
    truth = hw.AttentionLayer.random(heads=2, width=4, seed=1)
    labels = {"token": X @ normal(4, 4, seed=2) + 1.0, "causal": replace(truth, mask="causal")(X), "": truth(X)}
    for cause, Y in labels.items():
        assert evidence.glance(source_of(hw.Examples(X, Y)), 1e-12) == cause
    half = hw.Examples(X, truth(X).bfloat16())
    assert evidence.glance(source_of(half), floor_of(half.dtype)) == "", "its floor is high, and no linear function"
    told = source_of(hw.Examples(X, labels["causal"], mask="causal"))
    assert evidence.glance(told, 1e-12) == "", "whoever says causal is not told so"
    few = source_of(hw.Examples(X[:6], labels["token"][:6]))
    assert evidence.glance(few, 1e-12) == "", "few rows are met by any linear function"


@pytest.mark.parametrize("move", [lambda Y: Y.roll(1, 1), lambda Y: Y.roll(-1, 1), lambda Y: Y.flip(1)],
                         ids=["the row before", "the row after", "reversed"])
def test_labels_that_belong_to_other_rows_are_found(move):
    X = normal(1000, LENGTH, WIDTH, seed=2)
    own = layer()(X)
    assert not evidence.shifted(source_of(hw.Examples(X, own)), torch.Generator().manual_seed(0))
    assert evidence.shifted(source_of(hw.Examples(X, move(own))), torch.Generator().manual_seed(0))


def test_labels_without_relation_are_seldom_said_to_belong_to_other_rows():
    told = 0
    for seed in range(DRAWS):
        source = source_of(hw.Examples(*noise(seed)))
        told += evidence.shifted(source, torch.Generator().manual_seed(seed))
    assert told <= binom.ppf(0.9999, DRAWS, evidence.LEVEL)


# -- which labels are wrong? ------------------------------------------------------------------------------------


def test_planted_outliers_are_found_and_noise_has_none():
    truth = hw.AttentionLayer.random(heads=2, width=6, seed=1)
    X = normal(400, 6, 6)
    wrong = [3, 77, 78, 250, 399]
    for seed in range(20):
        Y = truth(X) + 0.05 * normal(400, 6, 6, seed=100 + seed)
        for planted in ([], wrong):
            labels = Y.clone()
            labels[planted] = labels[planted].flip(1)
            source = source_of(hw.Examples(X, labels))
            best = candidate(truth.Theta, truth.W / source.frame.scale, 340)
            used = [i for i in planted if i not in source.judge]
            assert evidence.standing_out(source, best).tolist() == used, seed
            everything = np.arange(400)
            assert evidence.outliers(source, best, 1e-12, everything).tolist() == planted, "the judges too"


def test_what_stands_out_is_few_and_apart():
    draw = np.random.default_rng(0)
    usual = draw.chisquare(12, 1000)
    assert not far_out(usual).any()
    tails = [far_out(draw.exponential(size=1000)).any() for _ in range(50)]
    assert sum(tails) <= 3, "a tail that goes on seldom has a gap"
    some = usual.copy()
    some[:30] = 1e3
    assert far_out(some).nonzero()[0].tolist() == list(range(30))
    assert not far_out(some, least=1e4).any(), "rounding is no outlier"
    many = usual.copy()
    many[: int(1000 * FEW) + 1] = 1e3
    assert not far_out(many).any(), "so many are not wrong but another kind"


# -- the parts of the examples ----------------------------------------------------------------------------------


def unrelated(n, seed=0, length=4, width=3):
    return hw.Examples(normal(n, length, width, seed=seed), normal(n, length, width, seed=seed + 1))


@pytest.mark.parametrize("n", [3, 4, 10, 101, 1000, 30_000])
def test_the_parts_are_disjoint_and_nothing_is_lost(n):
    parts = split(unrelated(n, length=2, width=1))
    every = np.concatenate([parts.fit, parts.select, parts.judge, parts.aside])
    assert sorted(every.tolist()) == list(range(n))
    assert min(len(parts.fit), len(parts.select), len(parts.judge)) >= 1
    assert len(parts.select) == min(max(1, round(0.1 * n)), 1000)
    assert len(parts.judge) == min(max(1, round(0.05 * n)), 1000)
    assert parts.distinct == len(parts.fit)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32, torch.float64], ids=str)
def test_repeated_sequences_are_all_in_one_part(dtype):
    """Signs differ in one bit, the last one of a float: they are told apart all the same."""
    draw = torch.Generator().manual_seed(0)
    X = (2 * torch.randint(2, (200, 5, 6), generator=draw) - 1).to(dtype)
    order = torch.randint(200, (2000,), generator=draw)
    order[:200] = torch.arange(200)
    parts = split(hw.Examples(X[order], normal(2000, 5, 2)))
    kinds = [set(order[torch.from_numpy(part)].tolist()) for part in (parts.fit, parts.select, parts.judge)]
    assert len(kinds[0] | kinds[1] | kinds[2]) == sum(map(len, kinds)) == 200
    assert [len(kind) for kind in kinds] == [170, 20, 10]
    assert parts.distinct == 170


def test_zero_has_no_sign():
    X = normal(20, 3, 2)
    X[:, 0] = 0.0
    parts = split(hw.Examples(torch.cat([X, X.clone().index_fill_(1, torch.tensor(0), -0.0)]), normal(40, 3, 2)))
    assert parts.distinct == 17


@pytest.mark.parametrize("period", [2, 10, 20])
def test_examples_with_a_period_are_not_sampled_with_it(period):
    parts = split(unrelated(4000))
    for part in (parts.select, parts.judge):
        met = np.bincount(part % period, minlength=period)
        assert met.min() > 0.2 * len(part) / period
    assert np.histogram(parts.judge, 8, (0, 4000))[0].tolist() == [25] * 8, "and from everywhere"


def test_fewer_than_three_different_sequences_are_refused(refused):
    data = unrelated(2)
    with refused("examples", "at least 3 different sequences", "2"):
        split(data.take([0, 1] * 10))
    assert len(split(unrelated(3)).fit) == 1


def test_labels_that_are_far_too_large_are_set_aside_at_first():
    data = unrelated(300)
    Y = data.Y.clone()
    Y[[5, 100]] *= 50
    parts = split(hw.Examples(data.X, Y))
    assert parts.aside.tolist() == [5, 100]
    assert not np.isin([5, 100], np.concatenate([parts.fit, parts.select, parts.judge])).any()


def test_setting_aside_leaves_the_judges_alone():
    parts = split(unrelated(200))
    aside = np.concatenate([parts.fit[:3], parts.select[:2], parts.judge[:1]])
    fewer = parts.without(aside)
    assert len(fewer.fit) == len(parts.fit) - 3
    assert len(fewer.select) == len(parts.select) - 2
    assert fewer.judge.tolist() == parts.judge.tolist()
    assert fewer.distinct == parts.distinct - 3
