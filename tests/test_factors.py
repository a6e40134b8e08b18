"""Descent on factors, what is pruned, the refinement, and tokens as people have them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import layer_norm
from torch.testing import assert_close

import headway as hw
from headway.learning import loop
from headway.learning.gauss_newton import OutOfTimeError, gauss_newton
from headway.learning.ladder import CARE, GROW, HOPE, Ladder, Strategy
from headway.learning.loop import Loop
from headway.learning.polish import ReadRank
from headway.learning.prune import (
    columns_needed,
    free_cuts,
    merge_cost,
    merged,
    narrowed,
    singular_values,
    step_down,
    without_cost,
)
from headway.learning.refine import Cuts, moments, refine_factors, widened
from headway.learning.shapes import Factored, Full
from headway.learning.source import Source, find_frame, spaced
from headway.learning.starts.batches import Table
from headway.learning.starts.descent import descend, predict, random_factors, tables, whitened
from headway.learning.thin import ThinModel
from headway.linalg.thin import Thin

CPU = torch.device("cpu")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def low_rank(heads, width, size, seed=0, scale=2.0):
    """A layer as trained ones are: Θ_i and W_i of rank ``size``."""
    Theta = normal(heads, width, size, seed=seed) @ normal(heads, size, width, seed=seed + 1)
    Theta *= scale / Theta.flatten(1).norm(dim=1).view(-1, 1, 1)
    W = normal(heads, width, size, seed=seed + 2) @ normal(heads, size, width, seed=seed + 3) / width
    return hw.AttentionLayer(Theta, W)


def uneven(n, k, d, seed=0, decades=2.0):
    """Tokens with a mean, correlated, their sizes spread over ``decades``."""
    sizes = torch.logspace(0, -decades, d, dtype=torch.float64)
    return normal(n, k, d, seed=seed) @ (normal(d, d, seed=seed + 1) * sizes) / math.sqrt(d) + 0.3


def source_of(data):
    found = Source(data)
    found.frame = find_frame(data, found.fit, CPU)
    return found


def thin_problem(seed=0, heads=4, d=6, q=2, n=60, k=5):
    """A fit of random factors to labels of another layer: nothing about it is special."""
    data = hw.draw(low_rank(3, d, 2, seed=seed), n, k, law="gaussian", seed=seed)
    source = source_of(data)
    model = ThinModel(source.problem(source.fit, heads, torch.float64))
    shape = Thin(normal(heads, (2 * d + 1) * q + d * q, seed=seed + 9), d, d + 1, q)
    return model, shape, model.evaluate(shape)


# -- descent ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("padded", [False, True])
def test_factors_predict_what_their_layer_does(mask, padded):
    X = normal(7, 5, 6)
    f = random_factors(3, 6, 4, 2, 3, torch.Generator().manual_seed(1), CPU)
    f.A[:, 6] = normal(3, 2, seed=3).float()
    padding = torch.zeros(7, 5, dtype=torch.bool)
    if padded:
        padding[2, 3:] = True
    Theta = f.Theta.double()
    layer = hw.AttentionLayer(Theta[:, :6], f.W.double(), Theta[:, 6], f.offset.double(), mask)
    data = hw.Examples(X, torch.zeros(7, 5, 4, dtype=torch.float64), mask=mask, padding=padding if padded else None)
    rows = source_rows(data)
    keep = ~padding
    assert_close(predict(X.float(), f, rows.see)[keep], layer(X, padding if padded else None)[keep].float())


def source_rows(data):
    from headway.core import attention

    part = data.take(range(len(data)))
    return Table(part.X, part.Y, attention.allowed(part.X, part.mask, part.padding))


def test_factors_mean_the_same_in_working_coordinates():
    layer = low_rank(2, 8, 3)
    X = uneven(80, 5, 8)
    source = source_of(hw.Examples(X, layer(X)))
    fit, _ = tables(source)
    f = random_factors(4, 8, 8, 3, 3, torch.Generator().manual_seed(0), CPU)
    plain = predict(fit.X.double(), type(f)(*(part.double() for part in f.parts())), None)
    shape = whitened(f, source.frame)
    index = spaced(source.fit, len(fit.X))
    rows = next(iter(source.stream(index, 1, torch.float64)))
    W = shape.V @ f.O.double()
    worked = hw.AttentionLayer(shape.theta()[:, :-1], W, shape.theta()[:, -1])(rows.X)
    # A mean of the tokens passes through V only in plain coordinates, as a constant.
    difference = plain[: len(worked)] - worked
    assert float((difference - difference.mean((0, 1))).norm()) < 1e-5 * float(plain.norm())


def test_random_labels_are_learned_by_heart_and_said_so():
    X, Y = normal(24, 6, 8).float(), normal(24, 6, 8, seed=1).float()
    draw = torch.Generator().manual_seed(0)
    found = descend(Table(X[:16], Y[:16]), Table(X[16:], Y[16:]), random_factors(6, 8, 8, 8, 8, draw, CPU),
                    generator=draw, rate=1e-2, rows=96, limit=3000)
    assert found.reason == "by heart"
    assert found.fitted < 0.7 * found.error


def test_weights_that_are_held_down_are_smaller():
    X, Y = normal(24, 6, 8).float(), normal(24, 6, 8, seed=1).float()
    sizes = []
    for decay in (0.0, 3.0):
        draw = torch.Generator().manual_seed(0)
        found = descend(Table(X[:16], Y[:16]), Table(X[16:], Y[16:]), random_factors(4, 8, 8, 4, 4, draw, CPU),
                        generator=draw, rate=1e-2, decay=decay, rows=96, limit=300)
        sizes.append(sum(float(part.square().sum()) for part in found.factors.parts()))
    assert sizes[1] < 0.8 * sizes[0]


# -- what may go ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_the_cost_of_a_head_is_what_leaving_it_out_costs(seed):
    model, shape, point = thin_problem(seed)
    expected = without_cost(point, 4)
    for i in range(4):
        fewer = Thin(shape.value[[h for h in range(4) if h != i]], shape.width, shape.rows, shape.q)
        assert_close(float(expected[i]), model.evaluate(fewer).loss - point.loss, rtol=1e-6, atol=1e-9)


def test_the_cost_of_joining_is_a_norm_of_the_difference():
    model, shape, point = thin_problem()
    S, M, T = model.products(point, shape, torch.float64).moments(torch.Generator().manual_seed(0))
    cost = merge_cost(shape, (S, M, T))
    for i in range(4):
        for j in range(4):
            if i != j:
                delta = shape.theta()[i] - shape.theta()[j]
                expected = max(float(torch.trace(S[h] @ delta @ M[h] @ delta.T)) for h in (i, j))
                assert_close(float(cost[i, j]), expected, rtol=1e-8, atol=1e-9)


def test_two_heads_with_one_pattern_are_joined_without_loss():
    model, shape, _ = thin_problem()
    value = shape.value.clone()
    pattern = (shape.rows + shape.width) * shape.q
    value[1, :pattern] = value[0, :pattern]  # head 2 looks where head 1 looks
    twin = Thin(value, shape.width, shape.rows, shape.q)
    point = model.evaluate(twin)
    wide = Thin.joined(*(torch.cat([part, torch.zeros_like(part[:, :, :2])], 2) if part is twin.V else part
                         for part in (twin.A, twin.B, twin.V)))
    one = merged(wide, point, 1, 0)  # their projections together have rank 4
    assert len(one.value) == 3
    assert model.evaluate(one).loss <= point.loss * (1 + 1e-9)


def test_heads_that_cost_nothing_go_and_no_others():
    model, shape, point = thin_problem()
    assert len(free_cuts(model, shape, point, 0.0)[0].value) == 4
    dead = shape.value.clone()
    dead[2, (shape.rows + shape.width) * shape.q :] = 0.0
    shape = Thin(dead, shape.width, shape.rows, shape.q)
    fewer, left = free_cuts(model, shape, model.evaluate(shape), 1e-9)
    assert len(fewer.value) == 3
    assert_close(left.loss, model.evaluate(shape).loss, rtol=1e-8, atol=0)


def test_columns_that_are_empty_go_without_loss():
    model, shape, point = thin_problem(q=2)
    A, B = (torch.cat([part, 1e-12 * normal(*part.shape, seed=5)], 2) for part in (shape.A, shape.B))
    more = Thin.joined(A, B, shape.V)
    point = model.evaluate(more)
    moments = model.products(point, more, torch.float64).moments(torch.Generator().manual_seed(0))
    theta, _ = singular_values(more, point, moments)
    assert columns_needed(theta, 1e-9) == 2
    assert step_down(theta) == 2
    smaller = narrowed(more, point, moments, 2, 2)
    assert_close(smaller.theta(), more.theta(), rtol=1e-6, atol=1e-8)
    assert_close(model.evaluate(smaller).loss, point.loss, rtol=1e-6, atol=0)


# -- saturated heads --------------------------------------------------------------------------------------------


def test_more_columns_are_the_same_function():
    model, shape, point = thin_problem()
    wide = widened(shape, 4, 3, torch.Generator().manual_seed(0))
    assert (wide.q, wide.V.shape[2]) == (4, 3)
    assert_close(wide.theta(), shape.theta())
    assert_close(wide.V[:, :, :2], shape.V)
    assert model.evaluate(wide).loss <= point.loss * (1 + 1e-9)


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_columns_that_went_too_soon_are_given_back(noise):
    """Heads of rank 4 with 3 columns: what is left is no noise, and goes with the fourth. Noise does not."""
    layer = low_rank(2, 8, 4)
    data = hw.draw(layer, 300, 6, law="gaussian", seed=1)
    source = source_of(hw.Examples(data.X, data.Y + noise * data.Y.std() * normal(*data.Y.shape, seed=2)))
    columns = 4 if noise else 3
    at = ladder(source, Thin.of(*layer_in(source, layer), columns, 4))
    at.strategy.given_up = [(columns + 1, 4)]
    at.climb()
    assert at.shape.q == 4
    assert (at.residual < 1e-12) == (noise == 0.0)


def layer_in(source, layer):
    """Θ, with the bias as its last row, and W in working coordinates."""
    L, mean = source.frame.out, source.frame.mean
    bias = torch.einsum("mde,d->me", layer.Theta, mean) @ L
    return torch.cat([L.T @ layer.Theta @ L, bias.unsqueeze(1)], 1), L.T @ layer.W / source.frame.scale


def with_a_hard_head(n=600, k=8, d=20, words=60, seed=0):
    """A layer of three heads of size 8, the first of which looks at the token before (the first at itself), all but
    exactly, and tokens that are words with positions."""
    position = normal(k, d, seed=seed) * 1.5
    word = normal(words, d, seed=seed + 1)
    space = torch.linalg.svd(position)[2][:k]
    word = word - 0.8 * (word @ space.T) @ space
    draw = torch.Generator().manual_seed(seed + 2)
    X = word[torch.randint(0, words, (n, k), generator=draw)] + position
    layer = low_rank(3, d, 8, seed=seed, scale=3.0)
    seen = torch.linalg.pinv(position - position.mean(0))
    Theta = layer.Theta.clone()
    Theta[0] = 10 * (seen[:, 1:] @ seen[:, :-1].T + seen[:, :1] @ seen[:, :1].T)
    return hw.AttentionLayer(Theta, layer.W), X


def near_the_truth(source, layer, grown, seed=3, off=0.03):
    """Thin factors in working coordinates, a little wrong, the first head's scores times ``grown``."""
    shape = Thin.of(*layer_in(source, layer), 8, 8)
    A, B, V = (part + off * part.square().mean().sqrt() * normal(*part.shape, seed=seed + i)
               for i, part in enumerate((shape.A, shape.B, shape.V)))
    A[0] *= grown
    return Thin.joined(A, B, V)


def ladder(source, shape):
    return Ladder(source, shape, Cuts(), torch.Generator().manual_seed(0))


@pytest.mark.parametrize("seed", [0, 1])
def test_scores_that_grew_too_large_are_made_smaller_and_no_others(seed):
    layer, X = with_a_hard_head(seed=seed)
    source = source_of(hw.Examples(X, layer(X)))
    shape = near_the_truth(source, layer, 3.0)
    at = ladder(source, shape)
    before, loss = at.shape.theta().clone(), at.point.loss
    at.strategy.soften(at)
    ratio = (at.shape.theta().flatten(1).norm(dim=1) / before.flatten(1).norm(dim=1)).tolist()
    assert ratio[0] < 0.6
    assert_close(torch.tensor(ratio[1:]), torch.ones(2), rtol=1e-6, atol=0)
    assert at.point.loss <= 4 * loss


@pytest.mark.parametrize("grown", [1.0, 2.0])
def test_a_saturated_head_is_taken_to_the_floor_with_the_others(grown):
    layer, X = with_a_hard_head()
    assert float((1 - layer.patterns(X)[:, 0].amax(-1)).median()) < 1e-2
    source = source_of(hw.Examples(X, layer(X)))
    found = refine_factors(source, near_the_truth(source, layer, grown), generator=torch.Generator().manual_seed(0))
    assert len(found.Theta) == 3
    assert found.error < 1e-12


def test_steps_that_overshoot_in_a_saturated_head_are_held_back_until_they_do_not():
    """Scores too large by half: a step as the linear model has it is thousands of times worse than none, whatever
    the damping in units of the curvature, of which such a head has next to none."""
    layer, X = with_a_hard_head()
    source = source_of(hw.Examples(X, layer(X)))
    model = ThinModel(source.problem(source.fit, 3, torch.float64))
    found = gauss_newton(model, near_the_truth(source, layer, 1.5, off=0.1), damping=1e-2, inner=torch.float64,
                         limit=7, inner_limit=100, generator=torch.Generator().manual_seed(0))
    assert found.residual < 3e-4


def test_two_heads_of_which_one_is_saturated_are_not_thought_alike():
    layer, X = with_a_hard_head()
    source = source_of(hw.Examples(X, layer(X)))
    at = ladder(source, near_the_truth(source, layer, 3.0))
    cost = merge_cost(at.shape, moments(at))
    assert float(cost[0].min()) > 1e-2 * at.scale


# -- the whole way ----------------------------------------------------------------------------------------------


def test_a_refinement_finds_count_and_size():
    layer = low_rank(2, 16, 4)
    X = uneven(400, 6, 16)
    data = hw.Examples(X, layer(X))
    source = source_of(data)
    draw = torch.Generator().manual_seed(0)
    fit, select = tables(source)
    start = descend(fit, select, random_factors(4, 16, 16, 6, 6, draw, CPU), generator=draw, rate=1e-2, rows=256,
                    limit=2000)
    assert start.error < 0.3
    found = refine_factors(source, whitened(start.factors, source.frame), generator=draw)
    assert (len(found.Theta), found.rank, found.out_rank) == (2, 4, 4)
    assert found.error < 1e-12


def test_a_close_fit_that_stalled_is_not_called_no_layer(monkeypatch):
    """A refinement that creeps beside a saturated head has found nothing out about the labels."""
    honest = loop.refine_factors

    def stalled(*given, **settings):
        return replace(honest(*given, **{**settings, "limit": 1}), reason="stalled")

    monkeypatch.setattr(loop, "refine_factors", stalled)
    layer = low_rank(2, 8, 2, seed=2, scale=4.0)
    X = uneven(300, 6, 8, seed=2)
    fit = hw.learn(hw.Examples(X, layer(X)), heads=2, rank=2, method="factors", seconds=60)
    assert 1e-6 < fit.stats["held_out_error"] < 0.05
    assert fit.status.kind == "limit"
    assert fit.status.sentence.startswith("Stalled with")


@pytest.mark.parametrize("seed", [1])
def test_uneven_tokens_are_learned_without_being_told_the_count(seed):
    layer = low_rank(3, 25, 6, seed=10 * seed, scale=4.0)
    X = uneven(300, 6, 25, seed=seed)
    fit = hw.learn(hw.Examples(X, layer(X)), method="factors", rank=6, seconds=120)
    assert fit.status.kind == "recovered", fit.status
    assert fit.layer.heads == 3
    fresh = uneven(100, 6, 25, seed=seed + 100)
    assert float((fit.layer(fresh) - layer(fresh)).norm()) < 1e-6 * float(layer(fresh).norm())


@pytest.mark.parametrize("seed", [0, 1])
def test_words_behind_a_layer_norm_in_float32_are_recovered(seed):
    """The direction a layer norm removes is left at 1e-8 by float32, and labels made in float64 see it."""
    draw = torch.Generator().manual_seed(seed)
    words, places = torch.randn(200, 16, generator=draw), 0.5 * torch.randn(10, 16, generator=draw)
    ids = torch.multinomial(1 / torch.arange(1, 201.0), 12000, True, generator=draw).view(1200, 10)
    X = layer_norm(words[ids] + places, (16,)).double()
    layer = hw.AttentionLayer.random(heads=3, width=16, seed=seed + 50)
    fit = hw.learn(hw.Examples(X, layer(X)), seconds=60)
    assert fit.status.kind == "recovered", fit.status
    assert fit.layer.heads == 3


# -- coordinates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [lambda X: X + 1e8, lambda X: X * torch.tensor([1e5] + [1.0] * 5),
                                    lambda X: 1e-6 * X, lambda X: X], ids=["far", "one large", "small", "plain"])
def test_working_tokens_are_white_whatever_the_scale(change):
    X = change(normal(400, 5, 6))
    source = source_of(hw.Examples(X, normal(400, 5, 6, seed=1)))
    rows = source.rows(source.fit, torch.float64)
    Z = rows.X.reshape(-1, source.d)
    assert source.d == 6
    assert_close(Z.T @ Z / len(Z) - torch.outer(Z.mean(0), Z.mean(0)), torch.eye(6, dtype=torch.float64), rtol=0,
                 atol=0.2 if source.frame.plain else 1e-6)


@pytest.mark.parametrize("law", ["gaussian"])
def test_labels_far_from_zero_are_learned(law):
    layer = hw.AttentionLayer.random(heads=2, width=8, seed=0)
    data = hw.draw(layer, 600, 6, law=law, seed=1)
    fit = hw.learn(hw.Examples(data.X, data.Y + 1e5), seconds=60)
    assert fit.status.kind == "fitted", fit.status
    assert not any(event["stage"].startswith("grow") for event in fit.trace), "rounding is no head"
    assert fit.layer.heads == 2
    assert_close(fit.layer.offset, torch.full((8,), 1e5, dtype=torch.float64), rtol=0, atol=1e-6)
    match = hw.match(fit.layer, layer)
    assert max(*match.theta_error, *match.w_error) < 1e-9


def test_directions_no_label_could_show_are_left_out():
    X = normal(300, 5, 6)
    X[:, :, 5] = X[:, :, 4]  # one direction is never visited
    assert source_of(hw.Examples(X, normal(300, 5, 6, seed=1))).d == 5
    X[:, :, 5] += 1e-9 * normal(300, 5, seed=2)
    assert source_of(hw.Examples(X, normal(300, 5, 6, seed=1))).d == 6, "float64 labels show it"
    assert source_of(hw.Examples(X.float(), normal(300, 5, 6, seed=1).float())).d == 5, "float32 ones do not"


@pytest.mark.parametrize(("stage", "times"), [("descent", 2), ("refine", 8)])
def test_out_of_time_the_best_so_far_is_what_counts(stage, times, monkeypatch):
    """Time is up in the middle of a stage, whatever the machine: at the so-manieth look at the clock there."""
    looks = 0

    def pulse(self):
        nonlocal looks
        looks += self.current["stage"].startswith(stage)
        if looks > times and self.deadline < math.inf:
            raise OutOfTimeError

    monkeypatch.setattr(Loop, "pulse", pulse)
    layer = low_rank(2, 8, 2, seed=2, scale=4.0)
    X = uneven(300, 6, 8, seed=2)
    fit = hw.learn(hw.Examples(X, layer(X)), heads=2, rank=2, method="factors", seconds=1e6)
    assert fit.status.kind == "limit"
    assert "Out of time" in fit.status.sentence
    assert fit.stats["held_out_error"] < 1.0, "what was reached is not thrown away"
    assert not any(event["stage"].startswith("late") for event in fit.trace)


# -- the ladder -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thin", [False, True], ids=["free", "thin"])
def test_more_sequences_are_taken_where_others_disagree(thin):
    """Begun on fewer sequences than there are unknowns, whatever way the heads are written."""
    layer = low_rank(2, 8, 2, seed=4, scale=2.0)
    X = normal(600, 5, 8, seed=5)
    source = source_of(hw.Examples(X, layer(X)))
    Theta = torch.cat([layer.Theta, torch.zeros(2, 1, 8, dtype=torch.float64)], 1)
    Theta = Theta + 0.05 * Theta.square().mean().sqrt() * normal(*Theta.shape, seed=6)
    shape = Thin.of(Theta, layer.W, 2, 2) if thin else Full(Theta)
    strategy = Strategy() if thin else ReadRank(False)
    at = Ladder(source, shape, strategy, torch.Generator().manual_seed(0), sequences=3)
    assert at.count == 3
    found = at.candidate(at.climb())
    assert found.sequences >= 3 * GROW
    assert found.reason == "floor"
    assert found.error <= at.floor


def test_a_rank_that_others_contradict_is_given_back():
    layer = hw.AttentionLayer.random(heads=2, width=6, seed=7)
    X = normal(600, 5, 6, seed=8)
    source = source_of(hw.Examples(X, layer(X)))
    Theta = torch.cat([layer.Theta, torch.zeros(2, 1, 6, dtype=torch.float64)], 1)
    at = Ladder(source, Factored.of(Theta, 3), ReadRank(True), torch.Generator().manual_seed(0), sequences=9)
    found = at.candidate(at.climb())
    assert found.rank is None
    assert found.error <= at.floor


def test_the_first_damping_is_what_a_trial_step_shows():
    layer = low_rank(2, 8, 2, seed=9, scale=2.0)
    X = normal(400, 5, 8, seed=10)
    source = source_of(hw.Examples(X, layer(X)))
    Theta = torch.cat([layer.Theta, torch.zeros(2, 1, 8, dtype=torch.float64)], 1)
    away = normal(*Theta.shape, seed=11)
    dampings = []
    for off in (1e-3, 1.0):
        shape = Full(Theta + off * away)
        at = Ladder(source, shape, ReadRank(False), torch.Generator().manual_seed(0), sequences=200)
        at.begin()
        dampings.append(at.damping)
    assert dampings[0] < HOPE, "near: the step gains what was foreseen, and is kept"
    assert dampings[1] >= CARE, "far: small steps"
