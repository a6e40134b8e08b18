"""Distance to the truth by products: every constant against a dense one, and planted errors that never pass."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import dense
import headway as hw
from headway.certificates import slopes
from headway.certificates.accurate import Answers, bits, cut, scores
from headway.certificates.jacobian import dense_blocks, low_ranks, residuals, sample
from headway.certificates.newton import Newton, apart
from headway.certificates.spectrum import Spectrum
from headway.certificates.wide import Chart, radius_by_products
from headway.core import attention

CASES = [{}, {"key_bias": True, "offset": True}, {"mask": "causal"}, {"rank": 2}]


def instance(seed=0, heads=2, width=6, count=300, length=5, **extra):
    layer = hw.AttentionLayer.random(heads=heads, width=width, seed=seed, **extra)
    return layer, hw.draw(layer, count=count, length=length, law="gaussian", seed=seed + 1000)


def newton_of(layer, data, count=80, low=True):
    found = sample(layer, data, count, torch.float64, low_ranks(layer) if low else None)
    return found, Newton(found, look(found))


def look(found):
    return Spectrum.of(found, 0.99, torch.Generator().manual_seed(0), 200)


def whole_jacobian(found):
    """In (Θ̃, B), B = [W; c]."""
    J = torch.zeros(found.problem.equations, found.layer.augmented.numel()
                    + found.layer.W.numel() + (0 if found.layer.offset is None else found.layer.out_width),
                    dtype=torch.float64)

    def put(block, _, rows):
        J[rows] = block

    dense_blocks(replace(found, unknowns=J.shape[1]), put)
    return J


def tangent_basis(operator, layer):
    """Orthonormal columns that span the scaled tangent space."""
    every = torch.eye(layer.augmented.numel(), dtype=torch.float64)
    values, vectors = torch.linalg.eigh(torch.stack([
        operator.tangent(one.view_as(layer.augmented)).flatten() for one in every]))
    return vectors[:, values > 0.5]


def nudged(layer, size, seed=0):
    """The layer with all entries off by about ``size``, of the same ranks."""
    draw = torch.Generator().manual_seed(seed)

    def off(M):
        return M + size * torch.randn(M.shape, generator=draw, dtype=torch.float64)

    U, s, Vh = torch.linalg.svd(layer.augmented, full_matrices=False)
    keep = s > 1e-10 * s[:, :1]
    Theta, key_bias = attention.split(off(U) * (s * keep).unsqueeze(1) @ off(Vh))
    return replace(layer, Theta=Theta, key_bias=key_bias, W=off(layer.W))


def shown(operator, B):
    """‖HB‖."""
    return float((B * (operator.gram @ B)).sum().sqrt())


def planted(layer, size):
    Theta = layer.Theta.clone()
    Theta[0, 1, 2] += size
    return replace(layer, Theta=Theta)


@pytest.mark.parametrize("extra", CASES)
def test_the_step_is_that_of_dense_least_squares_within_its_bound(extra):
    layer, data = instance(3, **extra)
    found, newton = newton_of(nudged(layer, 1e-3), data)
    operator = newton.spectrum.operator
    step = newton.step(residuals(found), 1e-6)
    Theta, B = dense.tangent_step(whole_jacobian(found), torch.cat([r.flatten() for r in residuals(found)]),
                                  tangent_basis(operator, layer), operator.left, operator.right)
    assert float((step.Theta - Theta).norm()) < 1e-5 * float(Theta.norm())
    B = B.view_as(step.B)
    assert float((step.B - B).norm()) < 1e-5 * float(B.norm())
    t = torch.linalg.solve(operator.left, Theta) @ torch.linalg.inv(operator.right)
    assert float((step.t - t).norm()) <= step.off < 1e-3 * float(t.norm())


@pytest.mark.parametrize("extra", CASES)
def test_norms_are_bounds_of_the_dense_ones(extra):
    """‖J⁺‖, ‖J_1‖ and g, in the coordinates that the argument uses."""
    found, newton = newton_of(*instance(4, **extra))
    operator, size = newton.spectrum.operator, found.layer.augmented.numel()
    J = whole_jacobian(found)
    scaled = torch.stack([J[:, :size] @ operator.out(one.view_as(found.layer.augmented)).flatten()
                          for one in torch.eye(size, dtype=torch.float64)], dim=1)
    ortho = torch.linalg.qr(J[:, size:])[0]
    known = float(torch.linalg.matrix_norm(scaled, 2))
    assert known <= newton.known < 1.5 * known
    K = torch.cat([scaled @ tangent_basis(operator, found.layer), ortho], dim=1)
    assert K.shape[1] == found.theta_unknowns + J.shape[1] - size
    least = float(torch.linalg.svdvals(K)[-1])
    assert 1 / newton.whole <= least < 100 / newton.whole
    g = float(torch.linalg.svdvals(J[:, size:])[-1]) ** 2
    assert newton.features <= g * (1 + 1e-9)
    assert newton.features > 1e-3 * g


@pytest.mark.parametrize("extra", CASES)
@pytest.mark.parametrize("distance", [1e-3, 0.1])
def test_the_jacobian_changes_no_faster_than_told(extra, distance):
    layer, data = instance(5, **extra)
    found, newton = newton_of(layer, data, low=False)
    operator = newton.spectrum.operator
    ball = distance * math.sqrt(newton.features) * float(layer.W.norm())
    bound = slopes.second(found, operator.left, operator.right, newton.features, ball)
    draw = torch.Generator().manual_seed(1)
    t = torch.randn(layer.augmented.shape, generator=draw, dtype=torch.float64)
    t *= ball / t.norm()
    B = torch.randn(len(operator.gram), layer.out_width, generator=draw, dtype=torch.float64)
    B *= ball / shown(operator, B)
    Theta, key_bias = attention.split(layer.augmented + operator.out(t))
    W = layer.W + B[: layer.W[..., 0].numel()].view_as(layer.W)
    other = replace(found, layer=replace(layer, Theta=Theta, key_bias=key_bias, W=W))
    size = layer.augmented.numel()
    change = whole_jacobian(other) - whole_jacobian(found)
    scaled = torch.stack([change[:, :size] @ operator.out(one.view_as(layer.augmented)).flatten()
                          for one in torch.eye(size, dtype=torch.float64)], dim=1)
    root = torch.linalg.cholesky(torch.block_diag(*[operator.gram] * 1))
    e = layer.out_width
    rest = change[:, size:].view(len(change), -1, e)
    white = torch.linalg.solve_triangular(root, rest.transpose(0, 1).reshape(len(root), -1), upper=False)
    white = white.view(len(root), len(change), e).transpose(0, 1).reshape(len(change), -1)
    moved = math.hypot(float(t.norm()), shown(operator, B))
    assert float(torch.linalg.matrix_norm(torch.cat([scaled, white], dim=1), 2)) <= bound * moved


def test_matrices_of_a_rank_have_one_chart_each_and_it_is_as_flat_as_told():
    layer, data = instance(6, rank=2)
    _, newton = newton_of(layer, data)
    operator = newton.spectrum.operator
    chart = Chart.of(newton, 0.25 * operator.thinnest)
    here = torch.linalg.solve(operator.left, layer.augmented) @ torch.linalg.inv(operator.right)
    for seed in range(20):
        away = nudged(layer, 10.0 ** -(1 + seed % 4) / 3, seed)
        there = torch.linalg.solve(operator.left, away.augmented) @ torch.linalg.inv(operator.right)
        t = operator.tangent(there - here)
        length = float(t.norm())
        assert length <= float((there - here).norm()) * (1 + 1e-12)
        if length < chart.ball:
            assert float((there - here - t).norm()) <= chart.curved * length**2 / 2 + 1e-12


@pytest.mark.parametrize("extra", CASES)
def test_float32_answers_are_off_by_less_than_told(extra):
    layer, data = instance(7, **extra)
    fine, rough = (sample(layer, data, 60, dtype) for dtype in (torch.float64, torch.float32))
    rough = replace(rough, layer=rough.layer.to(torch.float32))
    fine = replace(fine, layer=rough.layer.to(torch.float64), problem=rough.problem.to(torch.float64))
    answers, exact = Answers.of(rough), residuals(fine)
    away = math.sqrt(sum(float((a.double() - b).square().sum()) for a, b in zip(answers.left, exact, strict=True)))
    assert 1e-7 < away <= answers.off < 1e3 * away
    other = Answers.of(fine)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(other.left, exact, strict=True))


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_scores_are_right_to_the_last_digit(scale):
    """Against extended precision, also where large terms cancel."""
    draw = torch.Generator().manual_seed(0)
    X = torch.randn(3, 5, 40, generator=draw, dtype=torch.float64)
    Theta = torch.randn(2, 40, 40, generator=draw, dtype=torch.float64)
    Theta[:, 0] = scale * Theta[:, 1]
    X[:, :, 0] = -X[:, :, 1] / scale  # what is left is small beside its terms
    S, off = scores(X, Theta)
    wide = [part.numpy().astype(np.longdouble) for part in (X, Theta)]
    exact = np.einsum("nap,mpq,nbq->namb", wide[0], wide[1], wide[0])
    error = torch.from_numpy(np.abs(S.numpy() - exact).max(3).astype(np.float64))
    assert bool((error <= off).all())
    absolute = attention.scores(X.abs(), Theta.abs()).amax(3)
    assert float((off / (2 * 40 * 2.0**-52 * absolute)).max()) < 0.2, "what plain sums may be off"
    first, rest, power = cut(X, 2, 40)
    assert bool((first + rest == X).all())
    unit = power * 2.0 ** -(bits(X.dtype, 40) + 1)
    assert bool((first / unit == (first / unit).round()).all())
    assert bool((rest.abs() <= unit).all())
    assert float((power / unit).max()) ** 2 * 40 <= 2.0**53, "sums of products are exact"


@pytest.mark.parametrize("extra", CASES)
def test_the_truth_is_inside_and_planted_errors_never_pass(extra):
    layer, data = instance(8, **extra)
    for size in (1e-13, 1e-9):
        learned = nudged(layer, size, 1)
        found, newton = newton_of(learned, data)
        claim = radius_by_products(found, newton.spectrum, 1e-6, look)
        assert claim.holds == "yes", claim
        away = apart(learned, layer)
        assert claim.numbers["at_least"] <= away <= claim.numbers["radius"] < max(100 * size, 1e-8)
    for wrong in (planted(layer, 1e-3), planted(layer, 1e-4), replace(layer, W=layer.W.flip(0)),
                  replace(layer, W=layer.W * torch.tensor([1.0, 0.9], dtype=torch.float64).view(2, 1, 1))):
        found, newton = newton_of(wrong, data)
        claim = radius_by_products(found, newton.spectrum, 1e-6, look)
        assert claim.holds == "no", claim
