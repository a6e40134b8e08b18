"""Which directions of the heads the inputs determine: counts against the null space of a dense Jacobian, for free
heads and for heads of low rank, and what is said of them."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import binom

import dense
import headway as hw
from headway.core import attention
from headway.learning import determined as module
from headway.learning.candidate import Candidate
from headway.learning.determined import LEVEL, VECTORS, Determined, asked, dependence, determined, left_of
from headway.learning.shapes import Factored
from headway.learning.source import Source, find_frame
from headway.learning.thin import ThinModel
from headway.learning.verdict import _open
from headway.learning.white import FreeWhite, ThinWhite
from headway.linalg.projected import Problem, Rows, evaluate
from headway.linalg.thin import Thin

HEADS, WIDTH, LENGTH, COUNT, RANK = 2, 4, 4, 60, 2


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(seed=0):
    return torch.Generator().manual_seed(seed)


# -- inputs that leave something open ---------------------------------------------------------------------------


def varied(seed=0):
    return Rows(normal(COUNT, LENGTH, WIDTH, seed=seed), torch.zeros(0))


def causal(X):
    return attention.allowed(X, "causal", None)


def first_row_only():
    """A feature that only the first row has, which sees nothing but itself: it is no query's."""
    X = normal(COUNT, LENGTH, WIDTH)
    X[:, 1:, 3] = 0
    return Rows(X, torch.zeros(0), causal(X))


def alike_in_a_sequence():
    """A feature that is the same throughout a sequence: it tells no key from another."""
    X = normal(COUNT, LENGTH, WIDTH)
    X[:, :, 3] = X[:, :1, 3]
    return Rows(X, torch.zeros(0))


def template():
    """All sequences have the tokens of the first, but for one."""
    X = normal(1, LENGTH, WIDTH).repeat(COUNT, 1, 1)
    X[:, 2] = normal(COUNT, WIDTH, seed=1)
    return Rows(X, torch.zeros(0))


def one_token():
    return Rows(normal(COUNT, 1, WIDTH).repeat(1, LENGTH, 1), torch.zeros(0))


def few_words():
    ids = torch.randint(0, 4, (COUNT, LENGTH), generator=drawn(2))
    return Rows(normal(4, WIDTH)[ids], torch.zeros(0))


def two_tokens():
    return Rows(normal(4 * COUNT, 2, WIDTH), torch.zeros(0))


def filled():
    """A feature that only filling has."""
    X = normal(COUNT, LENGTH, WIDTH)
    padding = torch.zeros(COUNT, LENGTH, dtype=torch.bool)
    padding[::2, -2:] = True
    X[:, :, 1] = torch.where(padding, X[:, :, 1], 0.0)
    return Rows(X, torch.zeros(0), attention.allowed(X, "none", padding), (~padding).unsqueeze(2).double())


INPUTS = {"varied": varied, "first row only": first_row_only, "alike in a sequence": alike_in_a_sequence,
          "template": template, "one token": one_token, "few words": few_words, "two tokens": two_tokens,
          "filled": filled}


def heads_of(kind, hot=1.0):
    """(Θ, W), (A, B, W) or (A, B, V, O); the scores of the second head times ``hot``."""
    times = torch.tensor([1.0, hot], dtype=torch.float64).view(-1, 1, 1)
    if kind == "free":
        return times * normal(HEADS, WIDTH + 1, WIDTH, seed=9) / 2, normal(HEADS, WIDTH, WIDTH, seed=10)
    low = times * normal(HEADS, WIDTH + 1, RANK, seed=5) / 2, normal(HEADS, WIDTH, RANK, seed=6)
    if kind == "low":
        return *low, normal(HEADS, WIDTH, WIDTH, seed=10)
    return *low, normal(HEADS, WIDTH, RANK, seed=7), normal(HEADS, RANK, WIDTH, seed=8)


def fit_of(kind, rows, hot=1.0):
    """A problem with the labels of such heads, and them as its fit."""
    heads = heads_of(kind, hot)
    Theta = heads[0] if kind == "free" else heads[0] @ heads[1].mT
    W = heads[2] @ heads[3] if kind == "thin" else heads[-1]
    offset = normal(WIDTH, seed=11)
    Y = dense.layer(rows.X, Theta, W, offset, rows.see)
    rows = Rows(rows.X, Y if rows.valid is None else Y * rows.valid, rows.see, rows.valid)
    best = Candidate(Theta, W, offset, 0.0, 0.0, "floor", COUNT, 0, None if kind == "free" else RANK, 0,
                     RANK if kind == "thin" else None)
    return Problem((rows,)), best, heads


KINDS = ("free", "low", "thin")


def expected(kind, problem, heads):
    rows = problem.chunks[0]
    return dense.flat_directions(rows.X, heads, normal(WIDTH, seed=11), rows.see, rows.valid)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_flat_directions_are_those_of_the_dense_null_space(kind, inputs, monkeypatch):
    problem, best, heads = fit_of(kind, INPUTS[inputs]())
    wanted = expected(kind, problem, heads)
    for limit in (module.DENSE, 0):
        monkeypatch.setattr(module, "DENSE", limit)
        found = asked(problem, best, drawn())
        assert found.settled, found
        if found.exact:
            assert found.flat == wanted, found
        for count, true in zip(found.flat, wanted, strict=True):
            assert abs(count - true) <= 4 * math.sqrt(2 * true / VECTORS), (found, wanted)
        assert found.exact or limit == 0 or kind == "thin"
    if inputs in ("varied", "two tokens"):
        assert not any(wanted)
    if inputs in ("one token", "first row only", "filled", "few words"):
        assert all(wanted)


def test_what_counts_as_a_direction():
    free, low, thin = (asked(*fit_of(kind, varied())[:2], drawn()) for kind in KINDS)
    assert free.directions == (WIDTH * (WIDTH + 1),) * HEADS
    assert low.directions == (RANK * (2 * WIDTH + 1 - RANK),) * HEADS
    assert thin.directions == (low.directions[0] + RANK * (WIDTH - RANK),) * HEADS, "no gauge of the factors"
    assert free.everything and low.everything and thin.everything


def test_a_head_of_lower_rank_than_the_others_has_fewer_directions():
    problem, best, heads = fit_of("thin", varied())
    Theta, W = best.Theta.clone(), best.W.clone()
    Theta[1], W[1] = heads[0][1, :, :1] @ heads[1][1, :, :1].T, heads[2][1, :, :1] @ heads[3][1, :1]
    rows = problem.chunks[0]
    rows = Rows(rows.X, dense.layer(rows.X, Theta, W, best.offset))
    found = asked(Problem((rows,)), Candidate(Theta, W, best.offset, 0.0, 0.0, "floor", COUNT, 0, RANK, 0, RANK),
                  drawn())
    assert found.directions[1] == (2 * WIDTH + 1 - 1) + (WIDTH - 1)
    assert found.everything, found


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_saturated_beyond_rounding_is_open_and_the_other_is_not(kind):
    found = asked(*fit_of(kind, varied(), hot=1e6)[:2], drawn())
    assert found.flat[0] == 0 and found.settled
    assert found.flat[1] >= (WIDTH if kind == "free" else RANK) * (WIDTH + 1), found
    warm = asked(*fit_of(kind, varied(), hot=3.0)[:2], drawn())
    assert not any(warm.flat), warm


def test_what_one_head_changes_and_another_undoes_is_open_in_both():
    """W_2 = −W_1 and Θ_2 = Θ_1: what both change alike leaves no trace."""
    problem, best, _ = fit_of("free", varied())
    Theta, W = best.Theta[[0, 0]], torch.stack([best.W[0], -best.W[0] + 1e-3 * best.W[1]])
    X = problem.chunks[0].X
    rows = Rows(X, dense.layer(X, Theta, W, best.offset))
    found = asked(Problem((rows,)), Candidate(Theta, W, best.offset, 0.0, 0.0, "floor", COUNT, 0, None, 0), drawn())
    assert found.flat == dense.flat_directions(X, (Theta, W), best.offset)


@pytest.mark.parametrize("inputs", ["varied", "first row only", "filled"])
@pytest.mark.parametrize("low", [False, True])
def test_the_matrix_is_that_of_the_products(inputs, low):
    problem, best, _ = fit_of("low" if low else "free", INPUTS[inputs]())
    shape = Factored.of(best.Theta, RANK) if low else None
    white = FreeWhite(problem, evaluate(problem, best.Theta), shape, drawn())
    C = white.dense()
    y = white.project(normal(*best.Theta.shape, seed=3))
    by_matrix = white.project((C @ y.flatten()).view_as(y))
    torch.testing.assert_close(by_matrix, white.curvature(y), rtol=1e-9, atol=1e-10)


def test_products_in_thin_factors_are_symmetric_and_do_not_see_a_gauge():
    problem, best, _ = fit_of("thin", varied())
    shape = Thin.of(best.Theta, best.W, RANK, RANK)
    white = ThinWhite(problem, ThinModel(problem).evaluate(shape), shape, drawn())
    size = white.like().numel()
    C = torch.stack([white.curvature(white.project(one.view_as(white.like()))).flatten()
                     for one in torch.eye(size, dtype=torch.float64)])
    torch.testing.assert_close(C, C.T, rtol=1e-9, atol=1e-11)
    values = torch.linalg.eigvalsh(C)
    assert int((values > 1e-6).sum()) == sum(white.directions), "as many as there are directions, and no more"


# -- random vectors ---------------------------------------------------------------------------------------------


class Diagonal:
    """A stand-in: one head whose C is diagonal."""

    def __init__(self, values):
        self.values, self.directions, self.empty, self.count = values.view(1, -1), (len(values),), (0,), 0

    def like(self):
        return torch.zeros_like(self.values)

    def project(self, y):
        return y

    def curvature(self, y):
        self.count += 1
        return self.values * y


def test_a_flat_direction_is_missed_as_seldom_as_stated():
    spread = torch.linspace(0.05, 1.0, 300, dtype=torch.float64)
    flat = torch.cat([torch.zeros(1, dtype=torch.float64), spread])
    draws = 400
    missed = sum(left_of(Diagonal(flat), drawn(seed)).nothing for seed in range(draws))
    assert missed <= binom.ppf(0.9999, draws, LEVEL)
    bounds = [left_of(Diagonal(spread), drawn(seed)) for seed in range(100)]
    assert all(left.nothing and left.least <= 0.05 for left in bounds)
    assert all(left.least >= 1e-3 for left in bounds), "and the bound is not an idle one"


def test_flat_directions_are_counted_where_few_and_estimated_where_many():
    spread = torch.linspace(0.05, 1.0, 300, dtype=torch.float64)
    problem = Problem((varied(),))
    for flat in (1, 2, 3, 40):
        every = torch.cat([torch.zeros(flat, dtype=torch.float64), spread])
        found = module.estimated(Diagonal(every), problem, drawn(flat))
        assert found.exact == (flat < VECTORS)
        assert abs(found.flat[0] - flat) <= (0 if found.exact else 4 * math.sqrt(2 * flat / VECTORS)), found


def test_what_products_do_not_settle_is_bounded():
    """Curvatures over ten decades: a few products cannot tell the least of them from nothing."""
    values = torch.logspace(-8, 0, 3000, dtype=torch.float64)
    found = module.estimated(Diagonal(values), Problem((varied(),)), drawn())
    assert not found.settled and not any(found.flat)
    below = int((values < 1e-5).sum())
    assert below // 2 < found.more < 3000


# -- the same of a learner's fit --------------------------------------------------------------------------------


def source_of(data):
    found = Source(data)
    found.frame = find_frame(data, found.fit, found.device)
    return found


def fitted(X, truth, **change):
    """A source of a layer's labels, and the layer as a fit, both in working coordinates that are plain."""
    source = source_of(hw.Examples(X, truth(X)))
    assert source.frame.plain
    m, d, e = truth.W.shape
    given = {"residual": 1e-15, "error": 1e-15, "reason": "floor", "sequences": len(source.fit), "equations": 0,
             "rank": None, "products": 0, **change}
    Theta = torch.cat([truth.Theta, truth.Theta.new_zeros(m, 1, d)], 1)
    return source, Candidate(Theta, truth.W / source.frame.scale, truth.W.new_zeros(e), **given)


def test_more_sequences_are_asked_where_few_leave_something_open():
    """A feature that only the last sequences show: those first asked may miss it."""
    truth = hw.AttentionLayer.random(heads=2, width=5, seed=1)
    X = normal(600, 4, 5)
    source, best = fitted(X, truth)
    assert determined(source, best, drawn()).sequences < 200
    X[:, :, 0] = X[:, :1, 0]
    source, best = fitted(X, truth)
    found = determined(source, best, drawn())
    assert found.sequences == len(source.fit) and found.flat == (6, 6)


def test_few_words_do_not_determine_the_scores():
    truth = hw.AttentionLayer.random(heads=2, width=4, seed=0)
    # Five words: 20 pairs of different ones, fewer than what Θ and its key bias hold.
    found = hw.learn(hw.draw(truth, count=400, length=2, law=normal(5, 4), seed=1))
    assert found.status.kind == "fitted" and all(found.stats["undetermined"]), found.status
    assert "not determined in" in found.status.sentence
    event = next(event for event in found.trace if event["stage"] == "determined")
    assert event["flat"] == found.stats["undetermined"] and event["directions"] == [20, 20]


def test_heads_that_are_open_for_the_most_part_are_not_offered():
    truth = hw.AttentionLayer.random(heads=1, width=5, seed=1)
    X = normal(300, 1, 5).repeat(1, 4, 1)
    found = hw.learn(hw.Examples(X, truth(X)))
    assert found.status.kind == "too_few" and found.stats["undetermined"] == [30], found.status
    assert "Head 1 is not determined in any of its 30 directions" in found.status.sentence


def test_where_all_is_determined_every_head_says_so():
    truth = hw.AttentionLayer.random(heads=2, width=5, seed=1)
    X = normal(400, 4, 5)
    found = hw.learn(hw.Examples(X, truth(X)))
    assert found.status.kind == "recovered" and found.stats["undetermined"] == [0, 0]
    assert found.stats["perhaps_undetermined"] == 0
    noisy = hw.learn(hw.Examples(X, truth(X) + 0.01 * normal(400, 4, 5, seed=3)))
    assert noisy.status.kind == "noise" and noisy.stats["undetermined"] == [0, 0]


@pytest.mark.parametrize(
    ("flat", "exact", "more", "said"),
    [((0, 0, 0), True, 0, ""),
     ((4, 0, 4), True, 0, " Heads 1 and 3 are not determined in 4 of their 72 directions each by these inputs."),
     ((4, 0, 9), False, 0, " Head 1 is not determined in about 4 of its 72 directions by these inputs. Head 3 is "
      "not determined in about 9 of its 72 directions by these inputs."),
     ((1, 2, 3, 4), True, 0, " 4 heads are not determined in 1 to 4 of their 72 directions by these inputs."),
     ((0, 0), True, 5, " Whether the inputs determine all directions of the heads is not settled: up to 5 of "
      "144 may be open."),
     ((72, 0), True, 3, " Head 1 is not determined in any of its 72 directions by these inputs. Whether the "
      "inputs determine the other directions of the heads is not settled: up to 3 of 144 may be open.")],
    ids=lambda value: str(value)[:20])
def test_sentences(flat, exact, more, said):
    assert _open(Determined(flat, (72,) * len(flat), exact, more, 0.0, 0, 0)) == said


# -- are the W_i unique? ----------------------------------------------------------------------------------------


def test_equal_heads_depend_on_each_other_and_others_do_not():
    X = normal(300, 5, 6)
    truth = hw.AttentionLayer.random(heads=2, width=6, seed=1)
    source, best = fitted(X, truth)
    assert dependence(source, best, 200) > 1e-2
    twin = hw.AttentionLayer(truth.Theta[[0, 0]], truth.W)
    source, best = fitted(X, twin)
    assert dependence(source, best, 200) < 1e-7


def test_with_two_tokens_a_head_its_reflection_and_uniform_attention_depend_on_each_other():
    X = normal(600, 2, 5)
    one = hw.AttentionLayer.random(heads=1, width=5, seed=1)
    Theta = torch.cat([one.Theta, -one.Theta, torch.zeros_like(one.Theta)])
    three = hw.AttentionLayer(Theta, normal(3, 5, 5, seed=2))
    assert dependence(*fitted(X, three), 300) < 1e-7
    assert dependence(*fitted(X, hw.AttentionLayer(Theta[:2], three.W[:2])), 300) > 1e-2


def test_thin_heads_depend_on_each_other_where_their_own_features_do():
    def low(seed):
        return normal(2, 8, 2, seed=seed) @ normal(2, 2, 8, seed=seed + 1) / 4

    X = normal(300, 5, 8)
    truth = hw.AttentionLayer(low(1), low(3))
    assert dependence(*fitted(X, truth, rank=2, out_rank=2), 200) > 1e-2
    twin = hw.AttentionLayer(truth.Theta[[0, 0]], truth.W[[0, 0]])
    assert dependence(*fitted(X, twin, rank=2, out_rank=2), 200) < 1e-5
