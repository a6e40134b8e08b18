"""Thin factors, the span's own coordinates, and what shows a rank: against dense twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import headway as hw
from headway.core import attention
from headway.core.layer import AttentionLayer
from headway.learning import polish, ranks
from headway.learning.determined import condition
from headway.learning.gauss_newton import _Products, gauss_newton
from headway.learning.loop import Loop
from headway.learning.saturated import balanced, blocks_of
from headway.learning.shapes import Span
from headway.learning.starts import moments
from headway.learning.starts.unmix import InSpan, unseen
from headway.learning.thin import ThinModel
from headway.linalg.projected import Problem, Rows, evaluate, features_of
from headway.linalg.thin import Thin

SETTINGS = {
    "plain": {}, "causal": {"mask": "causal"}, "padded": {"padded": True}, "in two pieces": {"pieces": 2},
    "no offset": {"offset": False}}
WEIGHTED = {**SETTINGS, "weighted": {"weighted": True}, "weighted and padded": {"weighted": True, "padded": True}}


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small(seed, mask="none", padded=False, pieces=1, offset=True, weighted=False):
    X, Y = normal(12, 3, 4, seed=seed), normal(12, 3, 5, seed=seed + 1)
    padding = torch.zeros(12, 3, dtype=torch.bool)
    if padded:
        padding[::3, 2] = True
    see = attention.allowed(X, mask, padding if padded else None)
    valid = (~padding).unsqueeze(2).double() if padded or weighted else None
    if weighted:
        valid = valid * normal(12, 3, 1, seed=seed + 2).exp()
    chunks = []
    for part in torch.arange(12).chunk(pieces):
        cut = see if see is None or len(see) == 1 else see[part]
        v = None if valid is None else valid[part]
        chunks.append(Rows(X[part], Y[part] if v is None else Y[part] * v, cut, v))
    return Problem(tuple(chunks), offset)


def dense_features(problem, Theta, V):
    """[P_1XV_1 | … | 1] over all rows, from the features with free W."""
    m, p = V.shape[0], V.shape[2]
    parts = []
    for rows in problem.chunks:
        H = features_of(rows, Theta, False)[1].view(-1, m, V.shape[1])
        F = torch.einsum("nmd,mdp->nmp", H, V).reshape(-1, m * p)
        if problem.offset:
            ones = torch.ones(len(F), 1, dtype=F.dtype) if rows.valid is None else rows.valid.reshape(-1, 1)
            F = torch.cat([F, ones], dim=1)
        parts.append(F)
    return torch.cat(parts), torch.cat([rows.Y.reshape(len(F), -1) for rows, F in zip(
        problem.chunks, parts, strict=True)])


@pytest.mark.parametrize("name", WEIGHTED)
def test_thin_products_against_the_dense_jacobian(name):
    problem = small(10, **WEIGHTED[name])
    shape = Thin.of(normal(2, 5, 4, seed=12), normal(2, 4, 5, seed=13), 2, 3)
    model = ThinModel(problem)
    point = model.evaluate(shape)
    H, Y = dense_features(problem, shape.theta(), shape.V)
    best = torch.linalg.lstsq(H, Y).solution
    assert point.loss == pytest.approx(float((Y - H @ best).square().sum()), rel=1e-9)
    assert_close(point.W, shape.V @ best[:6].view(2, 3, 5), rtol=1e-7, atol=1e-7)

    def outputs(flat):
        moved = shape.moved(flat.view(shape.value.shape))
        F, _ = dense_features(problem, moved.theta(), moved.V)
        return F[:, :6] @ point.out

    J = torch.autograd.functional.jacobian(outputs, torch.zeros(shape.value.numel(), dtype=torch.float64))
    projected = J - torch.einsum("nm,mep->nep", H @ torch.linalg.pinv(H), J)
    A = torch.einsum("nep,neq->pq", J, projected)
    operator = model.products(point, shape, torch.float64)
    v = normal(*shape.value.shape, seed=14)
    assert_close(operator.curvature(v).flatten(), A @ v.flatten(), rtol=1e-8, atol=1e-8)
    gradient = torch.einsum("nep,ne->p", J, Y - H @ best)
    assert_close(operator.gradient(point.residuals).flatten(), gradient, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_are_weighted_by_what_they_say_of_the_head_they_say_least_of(name):
    problem = small(50, **SETTINGS[name])
    shape = Thin.of(3 * normal(2, 5, 4, seed=52), normal(2, 4, 5, seed=53), 2, 3)
    point = ThinModel(problem).evaluate(shape)
    roots = torch.cat([rows.valid.reshape(-1) for rows in balanced(problem, shape.V, point).chunks])
    wanted = []
    for rows, r in zip(problem.chunks, point.residuals, strict=True):
        P = attention.patterns(rows.X, shape.theta(), rows.see)
        for s in range(len(rows.X)):
            for a in range(3):
                h = P[s, a] @ rows.X[s]
                moved = [sum(float(P[s, a, i, b] ** 2 * ((rows.X[s, b] - h[i]) @ point.W[i]).square().sum())
                             for b in range(3)) for i in range(2)]
                counts = rows.valid is None or bool(rows.valid[s, a] > 0)
                wanted.append(counts * (min(moved) + float(r[3 * s + a].square().sum())) ** -1)
    weights = torch.tensor(wanted, dtype=torch.float64)
    assert_close(roots.square(), weights / (weights.sum() / problem.rows), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["plain", "causal", "weighted and padded"])
def test_the_curvature_of_a_head_in_A_and_in_B_is_what_products_make_of_it(name):
    """By random vectors, so up to sampling."""
    problem = small(60, **WEIGHTED[name])
    shape = Thin.of(3 * normal(2, 5, 4, seed=62), normal(2, 4, 5, seed=63), 2, 3)
    operator = ThinModel(problem).products(ThinModel(problem).evaluate(shape), shape, torch.float64)
    draw = torch.Generator().manual_seed(0)
    out = operator.O.view(2, 3, -1)[1]
    parts = [blocks_of(1, problem, operator.kept, shape.A[1], out, draw) for _ in range(400)]
    operator.inverse = torch.zeros_like(operator.inverse)  # without what the elimination of O takes away
    sizes = 5 * 2, 4 * 2
    for found, first, n in ((sum(p.A for p in parts) / 400, 0, sizes[0]),
                            (sum(p.B for p in parts) / 400, sizes[0], sizes[1])):
        true = torch.zeros(n, n, dtype=torch.float64)
        for j in range(n):
            v = torch.zeros_like(shape.value)
            v[1, first + j] = 1.0
            true[:, j] = operator.curvature(v)[1, first : first + n]
        assert_close(found, true, rtol=0, atol=0.1 * float(true.abs().max()))


def test_thin_gauges_are_free_and_the_metric_inverts_itself_across_them():
    problem = small(20)
    shape = Thin.of(normal(2, 5, 4, seed=21), normal(2, 4, 5, seed=22), 2, 3)
    model = ThinModel(problem)
    operator = model.products(model.evaluate(shape), shape, torch.float64)
    G, T = normal(2, 2, 2, seed=23), normal(2, 3, 3, seed=24)
    gauge = torch.cat([(shape.A @ G).flatten(1), (-shape.B @ G.mT).flatten(1), (shape.V @ T).flatten(1)], dim=1)
    assert float(operator.curvature(gauge).abs().max()) < 1e-9 * float(gauge.abs().max())
    metric = operator.metric(torch.Generator().manual_seed(0))
    g = normal(*shape.value.shape, seed=25)
    step = metric.solve(g)
    # Up to the 1e-4 by which small blocks are lifted.
    assert_close(metric.solve(metric.apply(step)), step, rtol=0, atol=1e-2 * float(step.abs().max()))
    assert float((step * g).sum()) > 0


def test_a_planted_error_is_removed_in_thin_factors():
    A, B, V, out = (normal(2, 6, 2, seed=30 + i) / 2 for i in range(4))
    layer = AttentionLayer(A @ B.mT, V @ out.mT, offset=normal(6, seed=35))
    X = normal(60, 5, 6, seed=36)
    problem = Problem((Rows(X, layer(X)),))
    shape = Thin.of(layer.Theta, layer.W, 2, 2)
    shape = shape.moved(1e-2 * normal(*shape.value.shape, seed=37))
    found = gauss_newton(ThinModel(problem), shape, generator=torch.Generator().manual_seed(0))
    assert found.history[0] > 1e-4
    assert found.reason == "floor"
    assert_close(found.point.Theta, layer.Theta, rtol=0, atol=1e-11)
    assert_close(found.point.W, layer.W, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", SETTINGS)
def test_coefficients_in_a_span_are_the_shape_with_another_arithmetic(name):
    problem = small(40, **SETTINGS[name])
    shape = Span(normal(2, 3, seed=41), normal(3, 5, 4, seed=42))
    model = InSpan.of(problem, shape.basis, None)
    one, other = model.evaluate(shape), evaluate(problem, shape.theta())
    assert one.loss == pytest.approx(other.loss, rel=1e-10)
    v = normal(2, 3, seed=43)
    fast, slow = model.products(one, shape, torch.float64), _Products(problem, other, shape, torch.float64)
    assert_close(fast.curvature(v), slow.curvature(v), rtol=1e-9, atol=1e-9)
    assert_close(fast.gradient(one.residuals), slow.gradient(other.residuals), rtol=1e-9, atol=1e-9)
    assert unseen(one, model.problem) == pytest.approx((one.loss / problem.variation()) ** 0.5, rel=1e-9)
    metric = fast.metric(torch.Generator().manual_seed(0))
    assert_close(metric.solve(metric.apply(v)), v, rtol=1e-6, atol=1e-6)


def test_combinations_of_the_labels_are_fitted_where_asked():
    problem = small(50)
    mix = torch.linalg.qr(normal(5, 2, seed=51))[0]
    shape = Span(normal(2, 3, seed=52), normal(3, 5, 4, seed=53))
    fewer = replace(problem, chunks=tuple(replace(rows, Y=rows.Y @ mix) for rows in problem.chunks))
    found = InSpan.of(problem, shape.basis, mix).evaluate(shape)
    assert found.loss == pytest.approx(evaluate(fewer, shape.theta()).loss, rel=1e-10)


def test_a_rank_shows_through_noise_and_its_absence_too():
    A, B = normal(4, 60, 8, seed=60), normal(4, 60, 8, seed=61)
    rough = A @ B.mT / 8 + 0.05 * normal(4, 60, 60, seed=62)
    assert ranks.visible_rank(rough) == 8
    assert ranks.visible_rank(normal(4, 60, 60, seed=63)) is None
    rough[:3] = normal(3, 60, 60, seed=64)
    assert ranks.visible_rank(rough) is None, "one head of four is no evidence"
    assert ranks.visible_rank(normal(4, 60, 1, seed=65)) is None, "one output has no rank to show"


def test_the_condition_of_a_large_factor_is_estimated_well():
    s = torch.logspace(0, -4, 600, dtype=torch.float64)
    Q = torch.linalg.qr(normal(600, 600, seed=70))[0]
    L = torch.linalg.cholesky(Q @ torch.diag(s.square()) @ Q.T)
    assert condition(L) == pytest.approx(1e-4, rel=0.1)
    assert condition(torch.diag(s[:300])) == pytest.approx(float(s[299]), rel=1e-9)


def low(m, d, e, q, seed):
    return normal(m, d, q, seed=seed) @ normal(m, q, e, seed=seed + 1) / (q * d) ** 0.5


@pytest.mark.parametrize("heads", [2, "auto"])
def test_one_large_direction_is_no_rank(heads, monkeypatch):
    """A key bias makes one large singular value of [Θ; u]; a low rank of W alone is not enough either."""
    monkeypatch.setattr(polish, "EARLY", 32)
    Theta = normal(2, 32, 32, seed=80)
    Theta = 2 * Theta / Theta.flatten(1).norm(dim=1).view(2, 1, 1)
    u = torch.nn.functional.normalize(normal(2, 32, seed=81), dim=1)
    layer = AttentionLayer(Theta, low(2, 32, 32, 4, 82), u)
    fit = hw.learn(hw.draw(layer, count=1500, length=12, seed=83), heads)
    assert fit.status.kind == "recovered"
    assert hw.match(fit.layer, layer).worst < 1e-9


def test_ranks_are_counted_at_the_end(monkeypatch):
    monkeypatch.setattr(polish, "EARLY", 8)
    layer = AttentionLayer(2 * low(2, 16, 16, 3, 88), low(2, 16, 16, 3, 90))
    fit = hw.learn(hw.draw(layer, count=3000, length=8, seed=92))
    assert fit.status.kind == "recovered"
    assert (fit.stats["rank"], fit.stats["out_rank"]) == (3, 3)
    assert fit.factors.query.shape[2] == fit.factors.value.shape[2] == 3
    assert_close(fit.factors.value @ fit.factors.out, fit.layer.W, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_a_head_below_the_count_is_found_in_the_residual(monkeypatch, mask):
    """The first count is one short, and what is left shows the head, or a start beside the row's own token does."""
    monkeypatch.setattr(polish, "EARLY", 16)
    layer = AttentionLayer(2 * low(3, 16, 16, 3, 100), low(3, 16, 16, 4, 102), mask=mask)
    honest = Loop._span

    def short(self, action):
        found = honest(self, action)
        return replace(found, heads=2) if action.name == "span" else found

    monkeypatch.setattr(Loop, "_span", short)
    fit = hw.learn(hw.draw(layer, count=4000, length=8, seed=104))
    assert any(event["stage"].startswith(("grow-2-", "alone-3")) for event in fit.trace)
    assert fit.status.kind == "recovered"
    assert hw.match(fit.layer, layer).worst < 1e-9


def test_heads_that_are_given_are_never_exceeded():
    layer = AttentionLayer.random(heads=5, width=16, seed=2)
    fit = hw.learn(hw.draw(layer, count=3000, length=8, seed=3), 2, "moments", seconds=3)
    assert fit.layer.heads <= 2
    assert not fit.status.ok


def test_a_linear_residual_leaves_a_span_to_look_at():
    draw = torch.Generator().manual_seed(110)
    X = (2 * torch.randint(2, (60, 8, 256), generator=draw) - 1).float()
    Y = X.mean(1, keepdim=True).expand_as(X) @ torch.randn(256, 256, generator=draw)
    found = moments.span(lambda: [Rows(X, Y)], 4, generator=draw)
    assert found.explained > 1 - 1e-6
    assert bool(found.values.isfinite().all())


def test_much_padding_is_no_lack_of_examples():
    layer = AttentionLayer.random(heads=2, width=12, seed=5)
    draw = torch.Generator().manual_seed(6)
    Xs = [torch.randn(int(k), 12, generator=draw, dtype=torch.float64) for k in torch.randint(2, 20, (300,),
                                                                                             generator=draw)]
    Xs[0] = torch.randn(64, 12, generator=draw, dtype=torch.float64)
    fit = hw.learn(hw.Examples.pad(Xs, [layer(X) for X in Xs]), 2)
    assert fit.status.kind == "recovered"
    assert not any(event["stage"].startswith("spare") for event in fit.trace)


@pytest.mark.parametrize("method", ["adam", "lbfgs"])
def test_baselines_measure_padded_rows_as_rows(method):
    layer = AttentionLayer.random(heads=1, width=6, seed=7)
    draw = torch.Generator().manual_seed(8)
    Xs = [torch.randn(int(k), 6, generator=draw, dtype=torch.float64) for k in torch.randint(2, 12, (300,),
                                                                                            generator=draw)]
    Ys = [layer(X) for X in Xs]
    Ys = [Y + 0.1 * torch.randn(Y.shape, generator=draw, dtype=torch.float64) for Y in Ys]
    fit = hw.learn(hw.Examples.pad(Xs, Ys), 1, method, seconds=1.5)
    assert fit.stats["fitted_error"] == pytest.approx(fit.stats["held_out_error"], rel=0.4)
