"""The convex body by linear programs and by linear algebra; patterns on the simplex; the net."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import dense
import headway as hw
from headway.linalg.projected import Problem, Rows
from headway.sculpting import net
from headway.sculpting.body import Body, Gram
from headway.sculpting.hull import hull_of
from headway.sculpting.simplex import RIDGE, affine_bound, simplex_fit

SEEDS = st.integers(0, 2**31)


def normal(seed, *size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- patterns on the simplex --------------------------------------------------------------------------------------


def ridged(Z):
    """ρ of simplex_fit, and how far from the best pattern p it may be for it: ρ(1 + √k)/(σ² + ρ)."""
    k = Z.shape[1]
    H = torch.eye(k, dtype=Z.dtype) - 1.0 / k
    rho = RIDGE * (Z**2).sum(2).mean(1)
    least = torch.linalg.eigvalsh(H @ Z @ Z.mT @ H)[:, 1].clamp_min(0)  # the first belongs to the ones
    return rho, rho * (1 + k**0.5) / (least + rho)


def tokens(seed, n, k, e, close):
    """Random tokens, the second of which is ``close`` to the first."""
    Z = normal(seed, n, k, e)
    Z[:, 1] = Z[:, 0] + close * Z[:, 1]
    return Z


CLOSE = st.sampled_from([1.0, 1e-1, 1e-3, 1e-6])


@given(seed=SEEDS, k=st.integers(2, 6), close=CLOSE)
def test_the_nearest_pattern_is_that_of_the_best_support(seed, k, close):
    Z, y = tokens(seed, 5, k, 7, close), normal(seed + 1, 5, 7)
    q, residual = simplex_fit(Z, y)
    rho, reach = ridged(Z)
    for j in range(5):
        p, best = dense.on_simplex(Z[j], y[j])
        assert float((q[j] - p).norm()) <= float(reach[j]) + 1e-9, f"seed {seed}"
        assert best**2 * (1 - 1e-12) <= float(residual[j]) ** 2, f"seed {seed}"
        over = 2 * float(rho[j] * reach[j]) * (1 + k**0.5)
        assert float(residual[j]) ** 2 <= best**2 * (1 + 1e-12) + over, f"seed {seed}"
    assert float(q.min()) >= 0
    torch.testing.assert_close(q.sum(1), torch.ones(5, dtype=torch.float64))


@given(seed=SEEDS, k=st.integers(2, 8), close=CLOSE)
@example(seed=32, k=8, close=1.0)  # nearly dependent tokens: q is off by 1e-4, as the ridge has it
def test_a_pattern_is_read_back_and_the_affine_bound_stays_below(seed, k, close):
    Z = tokens(seed, 4, k, 10, close)
    p = torch.softmax(2 * normal(seed + 1, 4, k), 1)
    y = (p.unsqueeze(1) @ Z).squeeze(1)
    q, residual = simplex_fit(Z, y)
    rho, reach = ridged(Z)
    assert bool(((q - p).norm(dim=1) <= reach + 1e-9).all()), f"seed {seed}"
    assert bool((residual**2 <= 2 * rho * reach * (1 + k**0.5) + 1e-18).all()), f"seed {seed}"
    Y = torch.cat([y.unsqueeze(1), normal(seed + 2, 4, k, 10)], dim=1)
    bound = affine_bound(Z, Y)
    lift = RIDGE * ((Z - Z[:, :1]) ** 2).sum(2)[:, 1:].mean(1)
    for a in range(k + 1):
        _, exact = simplex_fit(Z, Y[:, a])
        assert bool((bound[:, a] ** 2 <= exact**2 + lift + 1e-18).all()), f"seed {seed}"
    # Not below the best affine combination either: what is left of y − z_1 outside the span of the z_b − z_1.
    basis, R = torch.linalg.qr((Z[:, 1:] - Z[:, :1]).mT)[0], (Y - Z[:, :1]).mT
    least = (R - basis @ (basis.mT @ R)).norm(dim=1)
    assert bool((bound >= least - 1e-9).all()), f"seed {seed}"


def test_equal_tokens_do_no_harm():
    Z = normal(0, 3, 4, 6)
    Z[:, 1] = Z[:, 0]
    q, residual = simplex_fit(Z, Z[:, 0])
    assert bool(torch.isfinite(q).all())
    assert float(residual.max()) < 1e-5


# -- the body -----------------------------------------------------------------------------------------------------


def box(low, high):
    """low ≤ Θ_pq ≤ high, entry by entry."""
    d = low.shape[0]
    normals = torch.eye(d * d, dtype=torch.float64).view(d * d, d, d)
    return Body(normals, ((low + high) / 2).flatten(), ((high - low) / 2).flatten())


@given(seed=SEEDS)
def test_a_box_has_the_support_diameter_and_least_point_of_a_box(seed):
    low = normal(seed, 2, 2)
    high = low + normal(seed + 1, 2, 2).abs() + 0.1
    body, direction = box(low, high), normal(seed + 2, 2, 2)
    corner = torch.where(direction > 0, high, low)
    assert body.support(direction) == pytest.approx(float((corner * direction).sum()), rel=1e-7, abs=1e-9)
    assert body.diameter(direction) == pytest.approx(
        float(((high - low) * direction.abs()).sum() / direction.norm()), rel=1e-7)
    nearest = torch.minimum(torch.maximum(torch.zeros_like(low), low), high)
    torch.testing.assert_close(body.min_norm(), nearest, atol=1e-8, rtol=0)
    assert body.contains(nearest)
    assert not body.contains(high + 0.1)
    assert body.excess(corner) == pytest.approx(0.0, abs=1e-9)


def test_an_empty_and_an_unbounded_body_are_told_apart():
    M = torch.zeros(2, 2, 2, dtype=torch.float64)
    M[:, 0, 0] = 1.0
    empty = Body(M, torch.tensor([0.0, 5.0]), torch.tensor([1.0, 1.0]))
    assert empty.min_norm() is None
    assert empty.support(M[0]) == -math.inf
    open_ended = Body(M[:1], torch.tensor([3.0]), torch.tensor([1.0]))
    assert open_ended.support(torch.eye(2).roll(1, 0)) == math.inf
    torch.testing.assert_close(open_ended.min_norm(), 2.0 * M[0])


def around(seed, d, heads, slack, count=80):
    """A body that ``heads`` random matrices meet, with constraints in general position otherwise."""
    Theta = normal(seed, heads, d * d)
    V = torch.linalg.qr((Theta[1:] - Theta[:1]).T)[0] if heads > 1 else Theta.new_zeros(d * d, 0)
    M = normal(seed + 1, count, d * d)
    M = M - (M @ V) @ V.T
    level = M @ Theta[0] + slack * (2 * torch.rand(count, generator=torch.Generator().manual_seed(seed)) - 1)
    center = Theta[0] - V @ (V.T @ Theta[0])
    body = Body(M.view(-1, d, d), level, torch.full((count,), slack, dtype=torch.float64))
    return body, Theta.view(heads, d, d), center.view(d, d), V


@given(seed=SEEDS, heads=st.integers(1, 3))
def test_linear_programs_and_linear_algebra_see_the_same_body(seed, heads):
    d, slack = 3, 1e-3
    body, Theta, center, V = around(seed, d, heads, slack)
    assert all(body.contains(T) for T in Theta)
    gram = Gram(d)
    gram.add(body.normals, body.levels, body.slacks)
    hull = hull_of(gram, heads)
    exact = body.min_norm()
    # Both centers are within the slack's reach of the true one, and the body's is inside the body.
    assert body.contains(exact, 1e-6), f"seed {seed}"
    assert float((hull.center - center).norm()) < 20 * slack
    assert float((exact - center).norm()) < 50 * slack
    assert float(exact.norm()) <= float(hull.center.norm()) + 20 * slack
    # Long exactly along the hull: without end in the LP, at zero in the Gram matrix.
    for v in hull.directions:
        assert float((V.T @ v.flatten()).norm()) == pytest.approx(1.0, abs=1e-6)
    for v in V.T:
        assert body.diameter(v.view(d, d)) > 1e6 * slack
    for _, v in zip(range(2), torch.linalg.eigh(gram.S)[1].T[heads - 1 :], strict=False):
        assert body.diameter(v.view(d, d)) < 4 * len(body.slacks) ** 0.5 * hull.distance
    assert hull.gap > 1e3 if heads > 1 else hull.gap == math.inf


def test_a_gram_matrix_does_not_mind_how_its_constraints_arrive():
    body, *_ = around(3, 3, 2, 0.1)
    whole, parts = Gram(3), Gram(3)
    whole.add(body.normals, body.levels, body.slacks)
    for at in (slice(0, 7), slice(7, 60), slice(60, None)):
        parts.add(body.normals[at], body.levels[at], body.slacks[at])
    torch.testing.assert_close(whole.S, parts.S)
    torch.testing.assert_close(whole.b, parts.b)


# -- the net ------------------------------------------------------------------------------------------------------


def problem(layer, count, seed):
    data = hw.draw(layer, count=count, length=3, seed=seed)
    return Problem((Rows(data.X.double(), data.Y),), offset=False)


def test_the_net_finds_the_best_tuple_as_a_plain_loop_does():
    layer = hw.AttentionLayer.random(heads=2, width=4, scale=2.0, seed=5)
    center, half = layer.Theta.mean(0), (layer.Theta[0] - layer.Theta[1]) / 2
    V = (half / half.norm()).unsqueeze(0)
    Theta = net.candidates(center, V, 1.1 * float(half.norm()), 7)
    fit, check = problem(layer, 40, 1), problem(layer, 40, 2)
    found, error, tried = net.search(fit, check, Theta, 2)

    def features(part, pair):
        return torch.cat([hw.AttentionLayer(T[None], torch.eye(4, dtype=torch.float64)[None])(part.chunks[0].X)
                          for T in pair], dim=2).flatten(0, 1)

    losses = {}
    for pair in itertools.combinations(range(7), 2):
        B = torch.linalg.lstsq(features(fit, Theta[list(pair)]), fit.chunks[0].Y.flatten(0, 1)).solution
        losses[pair] = float((features(check, Theta[list(pair)]) @ B - check.chunks[0].Y.flatten(0, 1)).norm())
    best = min(losses, key=losses.get)
    torch.testing.assert_close(found, Theta[list(best)])
    assert error == pytest.approx(losses[best] / check.variation() ** 0.5, rel=1e-4)
    assert tried == net.tuples(7, 2) == 21


def test_a_net_that_is_too_large_is_refused_with_its_size(refused):
    with refused("search", f"{math.comb(343, 4):,}", "4 heads"):
        net.net_points(4, 200_000)
    assert net.net_points(1, 1) == 1
    assert net.tuples(net.net_points(3, 200_000), 3) <= 200_000
