"""Gauss–Newton with variable projection and the moments, against dense twins in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests import dense
from torch.testing import assert_close

from headway.core import attention
from headway.core.budget import BUDGET
from headway.core.counting import Size
from headway.core.layer import AttentionLayer
from headway.learning.gauss_newton import Free, _Products, gauss_newton
from headway.learning.ranks import numerical_rank
from headway.learning.shapes import Factored, Full, Span
from headway.learning.starts import moments
from headway.linalg.krylov import _State, conjugate_gradients
from headway.linalg.projected import Problem, Rows, evaluate


def normal(*size, seed):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small(seed, *, padded=False, causal=False, pieces=1):
    """A problem of 6 sequences, in one or several chunks, with a layer that does not fit it."""
    layer = AttentionLayer.random(heads=2, width=3, out_width=4, key_bias=True, seed=seed)
    X, Y = normal(6, 4, 3, seed=seed + 1), normal(6, 4, 4, seed=seed + 2)
    padding = None
    if padded:
        padding = torch.zeros(6, 4, dtype=torch.bool)
        padding[::2, 3] = True
    see = attention.allowed(X, "causal" if causal else "none", padding)
    valid = None if padding is None else (~padding).unsqueeze(2).double()
    rows = Rows(X, Y if valid is None else Y * valid, see, valid)
    if pieces == 1:
        return layer, Problem((rows,))

    def part(tensor, a, b):
        return tensor if tensor is None or tensor.shape[0] == 1 else tensor[a:b]

    cut = [(0, 2), (2, 6)]
    return layer, Problem(tuple(
        Rows(*(part(t, a, b) for t in (rows.X, rows.Y, rows.see, rows.valid))) for a, b in cut))


def features(problem, Theta):
    """[P_1X | … | P_mX | 1] row by row, rows that do not count left out; and the labels."""
    H, Y = [], []
    for rows in problem.chunks:
        P = attention.patterns(rows.X, Theta, rows.see)
        for n in range(rows.X.shape[0]):
            for a in range(rows.X.shape[1]):
                if rows.valid is None or rows.valid[n, a, 0]:
                    heads = [P[n, a, i] @ rows.X[n] for i in range(Theta.shape[0])]
                    H.append(torch.cat([*heads, torch.ones(1, dtype=torch.float64)]))
                    Y.append(rows.Y[n, a])
    return torch.stack(H), torch.stack(Y)


SETTINGS = [{}, {"padded": True}, {"causal": True}, {"padded": True, "causal": True, "pieces": 2}]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_best_projections_are_the_least_squares_ones(setting):
    layer, problem = small(40, **setting)
    point = evaluate(problem, layer.augmented)
    H, Y = features(problem, layer.augmented)
    B = torch.linalg.lstsq(H, Y).solution
    assert_close(torch.cat([point.W.reshape(6, 4), point.offset[None]]), B, rtol=0, atol=1e-11)
    assert point.loss == pytest.approx(float((Y - H @ B).square().sum()), rel=1e-12)


def shapes(Theta, seed):
    basis = normal(5, *Theta.shape[1:], seed=seed)
    span = Span(normal(2, 5, seed=seed + 1), basis)
    return {"full": Full(Theta), "factored": Factored.of(Theta, 2), "span": span}


@pytest.mark.parametrize("kind", ["full", "factored", "span"])
def test_push_is_the_derivative_and_pull_its_adjoint(kind):
    shape = shapes(normal(2, 4, 3, seed=50), 51)[kind]
    v, G = torch.randn_like(shape.value), normal(2, 4, 3, seed=53)
    step = 1e-6
    difference = (shape.moved(step * v).theta() - shape.moved(-step * v).theta()) / (2 * step)
    assert_close(shape.push(v), difference, rtol=0, atol=1e-8)
    assert float((shape.push(v) * G).sum()) == pytest.approx(float((v * shape.pull(G)).sum()), rel=1e-10)


@pytest.mark.parametrize("kind", ["full", "factored", "span"])
def test_a_metric_undoes_itself(kind):
    shape = shapes(normal(2, 4, 3, seed=60), 61)[kind]
    A, B = normal(4, 6, seed=62), normal(2, 3, 5, seed=63)
    metric = shape.metric(A @ A.T, B @ B.mT)
    v = torch.randn_like(shape.value)
    assert_close(metric.solve(metric.apply(v)), v, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", ["full", "factored", "span"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_curvature_and_gradient_against_the_dense_jacobian(kind, setting):
    layer, problem = small(70, **setting)
    shape = shapes(layer.augmented, 71)[kind]
    point = evaluate(problem, shape.theta())
    operator = _Products(problem, point, shape, torch.float64)
    H, Y = features(problem, shape.theta())
    size = shape.value.numel()

    def outputs(flat):
        moved = shape.moved(flat.view(shape.value.shape))
        rows, _ = features(problem, moved.theta())
        return rows[:, :-1] @ point.W.reshape(-1, 4)

    J = torch.autograd.functional.jacobian(outputs, torch.zeros(size, dtype=torch.float64))
    projected = J - torch.einsum("nm,mep->nep", H @ torch.linalg.pinv(H), J)
    A = torch.einsum("nep,neq->pq", J, projected)
    v = torch.randn_like(shape.value)
    assert_close(operator.curvature(v).flatten(), A @ v.flatten(), rtol=1e-9, atol=1e-9)
    residual = Y - H @ torch.linalg.lstsq(H, Y).solution
    gradient = torch.einsum("nep,ne->p", J, residual)
    assert_close(operator.gradient(point.residuals).flatten(), gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pieces", [1, 2])
def test_features_computed_again_change_nothing(pieces):
    layer, problem = small(80, pieces=pieces)
    shape, v = Full(layer.augmented), normal(2, 4, 3, seed=81)

    def products():
        point = evaluate(problem, layer.augmented)
        operator = _Products(problem, point, shape, torch.float64)
        return point, operator.curvature(v), operator.gradient(point.residuals)

    kept = products()
    problem = replace(problem, budget=replace(BUDGET, cache=0))
    again = products()
    assert kept[0].kept is not None
    assert again[0].kept is None
    assert again[0].loss == pytest.approx(kept[0].loss, rel=1e-13)
    for one, other in zip(kept[1:], again[1:], strict=True):
        assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_planted_error_is_removed():
    layer = AttentionLayer.random(heads=2, width=5, key_bias=True, seed=90)
    X = normal(60, 5, 5, seed=91)
    start = layer.augmented.clone()
    start[0, 1, 2] += 1e-2
    problem = Problem((Rows(X, layer(X)),))
    found = gauss_newton(Free(problem), Full(start), generator=torch.Generator().manual_seed(0))
    assert found.reason == "floor"
    assert found.history[0] > 1e-5
    assert_close(found.point.Theta, layer.augmented, rtol=0, atol=1e-12)


def test_moments_are_the_singular_vectors_of_the_formed_operator():
    X, Y = normal(40, 4, 3, seed=100), normal(40, 4, 2, seed=101)
    rows = Rows(X, Y)
    found = moments.span(lambda: [rows], 6, generator=torch.Generator().manual_seed(0), passes=400)
    mean = X.mean(1, keepdim=True).expand_as(X)
    F = torch.cat([mean, X, torch.ones(40, 4, 1, dtype=torch.float64)], dim=2).view(160, 7)
    R = Y.view(160, 2) - F @ torch.linalg.lstsq(F, Y.view(160, 2)).solution
    R = R / R.square().mean().sqrt()
    A = torch.zeros(6, 12, dtype=torch.float64)
    for column in range(12):
        T = torch.zeros(4, 3, dtype=torch.float64)
        T.view(-1)[column] = 1.0
        response = dense.uniform_response(X, T)
        A[:, column] = (response.reshape(160, 3).T @ R).flatten() / 160
    values = torch.linalg.svdvals(A)
    assert_close(found.values, values, rtol=0.02, atol=1e-3 * float(values[0]))
    top = torch.linalg.svd(A)[2][0]
    assert abs(float(found.basis[0].flatten() @ top)) > 0.99


def test_the_gap_counts_the_heads():
    assert moments.gap(torch.tensor([1.0, 0.9, 0.8, 0.2, 0.19, 0.18]))[0] == 3
    assert moments.gap(torch.tensor([1.0, 0.2, 0.19, 0.18]))[0] == 1


def test_rank_needs_a_gap_in_every_head():
    low = normal(2, 7, 2, seed=110) @ normal(2, 2, 6, seed=111)
    assert numerical_rank(low, 1e-6) == 2
    assert numerical_rank(torch.cat([low, normal(1, 7, 6, seed=112)]), 1e-6) is None
    assert numerical_rank(low + 0.05 * normal(2, 7, 6, seed=113), 1e-6) is None


def test_the_counting_floor():
    # One head, two tokens: one number a row about Θ, however many outputs.
    assert Size(d=16, e=16, k=2).floor(1) == -(-17 * 16 // 2)
    # Many tokens: all unknowns over k·e.
    wide = Size(d=8, e=8, k=16)
    assert wide.floor(4) == -(-wide.unknowns(4) // (16 * 8))
    assert Size(d=8, e=8, k=4, rank=2).theta_unknowns(1) == 2 * (9 + 8 - 2)
    assert Size(d=8, e=8, k=4, mask="causal").floor(1) > Size(d=8, e=8, k=4).floor(1)
    assert wide.most_heads(wide.floor(3)) >= 3
    assert wide.most_heads(1) == 0


# -- conjugate gradients ----------------------------------------------------------------------------------------


def definite(n, seed):
    M = normal(n, n, seed=seed)
    return M @ M.T + 0.1 * torch.eye(n, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
def test_conjugate_gradients_solve_and_count_their_products(seed):
    A, g = definite(20, seed), normal(20, seed=seed + 10)
    D = A.diagonal()
    asked = []
    v, made = conjugate_gradients(lambda x: A @ x, lambda x: x / D, g, 1e-10, 100, lambda: asked.append(1))
    assert_close(v, torch.linalg.solve(A, g), rtol=1e-7, atol=1e-8)
    assert made == len(asked) <= 40


def test_an_iteration_past_the_end_changes_nothing():
    """A GPU is asked only now and then whether it is done."""
    A, g = definite(8, 5), normal(8, seed=6)
    state = _State(lambda x: A @ x, lambda x: x, g, 1e-6)
    while bool(state.alive):
        state.iterate()
    end = state.v.clone()
    for _ in range(5):
        state.iterate()
    assert torch.equal(state.v, end)
    assert float((A @ end - g).norm()) < 1e-5 * float(g.norm())


def test_conjugate_gradients_end_where_there_is_no_curvature():
    g = normal(6, seed=7)
    v, made = conjugate_gradients(lambda x: -x, lambda x: x, g, 1e-6, 50)
    assert made == 1
    assert torch.equal(v, torch.zeros(6, dtype=torch.float64))
