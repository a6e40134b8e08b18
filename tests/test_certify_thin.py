"""Certificates of heads in thin factors: operator, chart, slopes, rounding against dense ones; planted errors."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import headway as hw
from headway.certificates import identify, report, slopes
from headway.certificates.accurate import Answers, thin_scores
from headway.certificates.bars import Tried, error_bars_by_products
from headway.certificates.jacobian import dense_blocks, low_out_ranks, low_ranks, residuals, sample
from headway.certificates.known import known
from headway.certificates.newton import Newton, apart
from headway.certificates.spectrum import Spectrum
from headway.certificates.thin import ThinScaled
from headway.certificates.wide import Chart, radius_by_products
from headway.core import attention

CASES = [{}, {"key_bias": True, "offset": True}, {"mask": "causal"}]


def instance(seed=0, heads=2, width=7, count=300, length=5, size=2, **extra):
    """A layer whose matrices all have rank ``size``, the first head's projection one less."""
    layer = hw.AttentionLayer.random(heads=heads, width=width, rank=size, seed=seed, **extra)
    U, s, Vh = torch.linalg.svd(layer.W)
    s[:, size:], s[0, size - 1 :] = 0.0, 0.0
    layer = low(replace(layer, W=U @ torch.diag_embed(s) @ Vh), size)
    return layer, hw.draw(layer, count=count, length=length, law="gaussian", seed=seed + 1000)


def low(layer, size):
    """[Θ; u] brought to rank ``size``."""
    U, s, Vh = torch.linalg.svd(layer.augmented, full_matrices=False)
    s[:, size:] = 0.0
    Theta, key_bias = attention.split(U @ (s.unsqueeze(2) * Vh))
    return replace(layer, Theta=Theta, key_bias=key_bias)


def found_of(layer, data, count=100, dtype=torch.float64):
    found = sample(layer, data, count, dtype, low_ranks(layer), low_out_ranks(layer))
    assert found.out_ranks is not None
    return found


def look(found):
    return Spectrum.of(found, 0.99, torch.Generator().manual_seed(0), 200)


def nudged(layer, size, seed=0):
    """All entries off by about ``size``, of the same ranks."""
    draw = torch.Generator().manual_seed(seed)

    def off(M):
        U, s, Vh = torch.linalg.svd(M, full_matrices=False)
        q = (s > 1e-10 * s[:, :1]).unsqueeze(1)
        A, B = (F + size * torch.randn(F.shape, generator=draw, dtype=F.dtype) for F in (U * s.unsqueeze(1), Vh.mT))
        return (A * q) @ (B * q).mT

    Theta, key_bias = attention.split(off(layer.augmented))
    return replace(layer, Theta=Theta, key_bias=key_bias, W=off(layer.W))


def jacobian(found):
    """Dense, in (Θ̃, W, c)."""
    layer = found.layer
    size = layer.augmented.numel() + layer.W.numel() + (0 if layer.offset is None else layer.out_width)
    J = torch.zeros(found.problem.equations, size, dtype=torch.float64)

    def put(block, _, rows):
        J[rows] = block

    dense_blocks(replace(found, unknowns=size), put)
    return J


def columns(operator, J):
    """What the labels show of unit coordinates (Z, Y, K), and of O and c."""
    value, layer = operator.base.value, operator.found.layer
    first = []
    for one in torch.eye(value.numel(), dtype=torch.float64):
        v = operator.out(operator.tangent(one.view_as(value)))
        dA, dB, dV = operator.base.parts(v)
        dTheta = dA @ operator.base.B.mT + operator.base.A @ dB.mT
        move = torch.cat([dTheta.flatten(), (dV @ operator.out_map).flatten()])
        first.append(J[:, : len(move)] @ move)
    second, at = [], layer.augmented.numel()
    for one in torch.eye(operator.out_map.numel(), dtype=torch.float64):
        move = (operator.base.V @ one.view_as(operator.out_map)).flatten()
        second.append(J[:, at : at + len(move)] @ move)
    H = torch.cat([torch.stack(second, 1), J[:, at + layer.W.numel() :]], dim=1)
    return torch.stack(first, 1), H


@pytest.mark.parametrize("extra", CASES)
def test_the_operator_is_the_schur_complement_in_coordinates_without_gauge(extra):
    layer, data = instance(1, **extra)
    found = found_of(layer, data, 30)
    operator = ThinScaled(found, torch.Generator().manual_seed(0))
    J, H = columns(operator, jacobian(replace(found, layer=operator.layer)))
    U, s, _ = torch.linalg.svd(H, full_matrices=False)
    Q = U[:, s > 1e-10 * s[0]]
    rest = J - Q @ (Q.mT @ J)
    value = operator.base.value
    R = torch.stack([operator.scaled(one.view_as(value)).flatten()
                     for one in torch.eye(value.numel(), dtype=torch.float64)], 1)
    here = torch.stack([operator(one.view_as(value)).flatten()
                        for one in torch.eye(value.numel(), dtype=torch.float64)], 1)
    dense = R.mT @ rest.mT @ rest @ R
    torch.testing.assert_close(here, dense, rtol=1e-8, atol=1e-8 * float(dense.abs().max()))
    # As many directions as layers of these ranks have, less those of O and c: and no gauge among them.
    values = torch.linalg.eigvalsh(dense)
    assert int((values > 1e-9 * values[-1]).sum()) == operator.dimension
    whole = torch.linalg.svdvals(torch.cat([J, H], 1))
    assert int((whole > 1e-9 * whole[0]).sum()) == found.unknowns
    spectrum = look(found)
    least = float(values[values > 1e-9 * values[-1]][0])
    assert 0 < spectrum.clear <= least <= float(spectrum.values[0]) * (1 + 1e-6)


@pytest.mark.parametrize("extra", CASES)
def test_the_step_is_that_of_dense_least_squares(extra):
    layer, data = instance(2, **extra)
    found = found_of(nudged(layer, 1e-4), data)
    newton = Newton(found, look(found))
    operator = newton.spectrum.operator
    step = newton.step(residuals(found), 1e-7)
    J, H = columns(operator, jacobian(found))
    r = torch.cat([part.flatten() for part in residuals(found)])
    x = torch.linalg.lstsq(torch.cat([J, H], 1), r.unsqueeze(1), driver="gelsd", rcond=1e-11).solution.squeeze(1)
    t = x[: J.shape[1]].view_as(step.t)
    assert float((step.t - t).norm()) <= step.off + 1e-9 * float(t.norm()) < 1e-3 * float(t.norm())
    assert step.shown == pytest.approx(float((H @ x[J.shape[1] :]).norm()), rel=1e-3)
    left = r - torch.cat([J, H], 1) @ x
    assert float((torch.cat([part.flatten() for part in step.left]) - left).norm()) < 1e-4 * float(r.norm())
    assert float((step.Theta - (found.layer.augmented - layer.augmented)).norm()) < 1e-2 * float(step.Theta.norm())


def parts_at(operator, found, v, B):
    """[Θ; u], W and c at coordinates v and a change B of O and c."""
    dA, dB, dV = operator.base.parts(operator.out(operator.tangent(v)))
    base, m, p = operator.base, len(operator.U), operator.base.V.shape[2]
    W = (base.V + dV) @ (operator.out_map + B[: m * p].view_as(operator.out_map))
    offset = None if found.layer.offset is None else found.layer.offset + B[-1]
    return (base.A + dA) @ (base.B + dB).mT, W, offset


def composed(operator, found, v, B):
    """The layer there."""
    augmented, W, offset = parts_at(operator, found, v, B)
    Theta, key_bias = attention.split(augmented)
    return replace(found.layer, Theta=Theta, key_bias=key_bias, W=W, offset=offset)


@pytest.mark.parametrize("extra", CASES)
@pytest.mark.parametrize("part", [1e-3, 1.0])
def test_the_jacobian_changes_no_faster_than_told(extra, part):
    layer, data = instance(3, **extra)
    found = found_of(layer, data, 20)
    newton = Newton(found, look(found))
    operator = newton.spectrum.operator
    ball = part * 0.25 * min(operator.thinnest, operator.narrowest * math.sqrt(newton.features))
    bound = slopes.second_thin(found, operator, newton.features, ball)
    root = torch.linalg.cholesky(operator.gram)
    X = torch.cat([rows.X for rows in found.problem.chunks])
    value, e = operator.base.value, layer.out_width

    def outputs(flat):
        v, w = flat[: value.numel()].view_as(value), flat[value.numel() :].view(-1, e)
        B = torch.linalg.solve_triangular(root.mT, w, upper=True)
        see = attention.allowed(X, layer.mask, None)
        return attention.forward(X, *parts_at(operator, found, v, B), see).flatten()

    draw = torch.Generator().manual_seed(1)
    v = operator.start(draw)
    w = torch.randn(len(root), e, generator=draw, dtype=torch.float64)
    flat = torch.cat([v.flatten(), w.flatten()])
    flat = flat * ball / flat.norm()
    P = torch.stack([operator.tangent(one.view_as(value)).flatten()
                     for one in torch.eye(value.numel(), dtype=torch.float64)], 1)
    P = torch.block_diag(P, torch.eye(w.numel(), dtype=torch.float64))
    here, there = (torch.func.jacrev(outputs)(at) @ P for at in (torch.zeros_like(flat), flat))
    change = float(torch.linalg.matrix_norm(there - here, 2))
    assert change <= bound * ball
    assert change > 1e-5 * bound * ball, "no bound is worth having that is any looser"


def test_layers_of_these_ranks_have_one_chart_each_and_it_is_as_flat_as_told():
    layer, data = instance(4, key_bias=True, offset=True)
    found = found_of(layer, data)
    newton = Newton(found, look(found))
    operator = newton.spectrum.operator
    chart = Chart.of(newton, 0.25 * operator.narrowest * math.sqrt(newton.features))
    draw = torch.Generator().manual_seed(0)
    for j in range(8):
        v = operator.start(draw)
        B = torch.randn(len(operator.gram), layer.out_width, generator=draw, dtype=torch.float64)
        B[:2] *= operator.p[0].mT  # columns that the first head does not have
        size = chart.ball * 10.0 ** -(j % 4)
        shown = float((B * (operator.gram @ B)).sum().sqrt())
        v, B = v * size / v.norm() / 2, B * size / shown / 2
        length = math.hypot(float(v.norm()), size / 2)
        there = composed(operator, found, v, B)
        Theta = operator.theta(v)
        dV = operator.base.parts(operator.out(v))[2]
        W = dV @ operator.out_map + operator.base.V @ B[:-1].view_as(operator.out_map)
        first = replace(operator.layer, Theta=operator.layer.Theta + Theta[:, :-1],
                        key_bias=operator.layer.key_bias + Theta[:, -1], W=operator.layer.W + W,
                        offset=layer.offset + B[-1])
        assert apart(first, operator.layer) <= chart.out * length
        assert apart(there, first) <= chart.out * chart.curved * length**2 / 2 + 1e-13
        assert length <= chart.top * apart(there, operator.layer) * (1 + 1e-9)
        # Coordinates from the layer alone.
        scaled = operator.L.up @ there.augmented @ operator.R.up
        Y = scaled.mT @ operator.U - operator.V * operator.sigma
        left = scaled - operator.U @ (operator.U.mT @ scaled)
        Z = left @ operator.V @ torch.linalg.inv(torch.diag_embed(operator.sigma.squeeze(1)) + Y.mT @ operator.V
                                                 ) * operator.sigma
        parts = operator.base.parts(v)
        assert torch.allclose(parts[1], Y, atol=1e-9 * float(v.norm()) + 1e-12)
        assert torch.allclose(parts[0], Z, atol=1e-6 * float(v.norm()) + 1e-11)


@pytest.mark.parametrize("seed", range(3))
def test_float32_differs_from_float64_by_less_than_the_rounding_claimed(seed):
    layer, data = instance(seed, key_bias=True)
    fine, rough = (found_of(layer, data, 40, dtype) for dtype in (torch.float64, torch.float32))
    one = ThinSame(fine, None)
    other = ThinSame(rough, one)
    v = one.start(torch.Generator().manual_seed(9))
    v = v / v.norm()
    dense = [torch.stack([apply(x.view_as(v)).flatten() for x in torch.eye(v.numel(), dtype=torch.float64)])
             for apply in (one, one.given_w)]
    largest, rest = (float(torch.linalg.eigvalsh((D + D.mT) / 2)[-1]) for D in dense)
    away = float((one(v) - other(v.float()).double()).norm())
    assert 1e-9 < away <= other.rounding.ritz(1, largest, rest)


class ThinSame(ThinScaled):
    """With the coordinates of another, in a precision of its own."""

    def __init__(self, found, like):
        super().__init__(found, torch.Generator().manual_seed(0))
        if like is None:
            return
        from headway.certificates.rounding import ThinEliminated
        from headway.certificates.thin import Root
        from headway.linalg.thin import Thin, ThinProducts, point_at

        for name in ("U", "V", "u", "shrink", "narrow", "ways", "root", "out_map"):
            setattr(self, name, getattr(like, name).float())
        for name in ("L", "R", "E"):
            setattr(self, name, Root(getattr(like, name).down.float(), getattr(like, name).up.float()))
        self.base = Thin(like.base.value.float(), like.base.width, like.base.rows, like.base.q)
        point = point_at(found.problem, self.base, self.out_map, found.layer.offset)
        self.products = ThinProducts(found.problem, point, self.base, torch.float32)
        G = point.factor @ point.factor.T
        self.rounding = ThinEliminated.of(
            found, self.base, self.out_map, (self.L.down, self.R.down, self.E.down), self.shrink, self.narrow, G,
            float(like.features[0]), like.kappa)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_scores_of_factors_are_right_to_the_last_digit(scale):
    """Against extended precision, also where large terms cancel."""
    draw = torch.Generator().manual_seed(0)
    X = torch.randn(3, 5, 40, generator=draw, dtype=torch.float64)
    A = torch.randn(2, 41, 6, generator=draw, dtype=torch.float64)
    B = torch.randn(2, 40, 6, generator=draw, dtype=torch.float64)
    A[:, 0], B[:, 0] = scale * A[:, 1], scale * B[:, 1]
    X[:, :, 0] = -X[:, :, 1] / scale
    S, off = thin_scores(X, A, B)
    Xq = np.concatenate([X.numpy(), np.ones((3, 5, 1))], axis=2).astype(np.longdouble)
    wide = [part.numpy().astype(np.longdouble) for part in (X, A, B)]
    exact = np.einsum("nap,mpq,nbr,mrq->namb", Xq, wide[1], wide[0], wide[2], optimize=True)
    error = torch.from_numpy(np.abs(S.numpy() - exact).max(3).astype(np.float64))
    assert bool((error <= off).all())
    plain = torch.einsum("nap,mpq,nbr,mrq->namb", torch.from_numpy(Xq.astype(np.float64)).abs(), A.abs(), X.abs(),
                         B.abs()).amax(3)
    assert float((off / (90 * 2.0**-52 * plain)).max()) < 0.2, "what plain sums may be off"


@pytest.mark.parametrize("extra", CASES)
def test_float32_answers_of_factors_are_off_by_less_than_told(extra):
    layer, data = instance(7, **extra)
    fine, rough = (found_of(layer, data, 60, dtype) for dtype in (torch.float64, torch.float32))
    operator = ThinScaled(fine, torch.Generator().manual_seed(0))
    single = (type(operator.base)(operator.base.value.float(), operator.base.width, operator.base.rows,
                                  operator.base.q), operator.out_map.float())
    double = (type(operator.base)(single[0].value.double(), operator.base.width, operator.base.rows,
                                  operator.base.q), single[1].double())
    if layer.offset is not None:
        fine = replace(fine, layer=replace(fine.layer, offset=rough.layer.offset.double()))
    fine = replace(fine, problem=rough.problem.to(torch.float64))
    answers, exact = Answers.of(rough, single), Answers.of(fine, double)
    pairs = zip(answers.left, exact.left, strict=True)
    away = math.sqrt(sum(float((a.double() - b).square().sum()) for a, b in pairs))
    assert 1e-7 < away <= answers.off < 1e3 * away


def planted(layer, size):
    Theta = layer.Theta.clone()
    Theta[0, 1, 2] += size
    return replace(layer, Theta=Theta)


@pytest.mark.parametrize("extra", CASES)
def test_the_truth_is_inside_and_planted_errors_never_pass(extra):
    layer, data = instance(8, **extra)
    for size in (1e-13, 1e-9):
        learned = nudged(layer, size, 1)
        found = found_of(learned, data)
        claim = radius_by_products(found, look(found), 1e-6, look)
        assert claim.holds == "yes", claim
        away = apart(learned, layer)
        assert claim.numbers["at_least"] <= away <= claim.numbers["radius"] < max(100 * size, 1e-8)
    # A small entry raises a rank, and matrices of a rank bend sharply where that of a smaller one is near.
    small = found_of(planted(layer, 1e-4), data)
    assert radius_by_products(small, look(small), 1e-6, look).holds != "yes"
    for wrong in (planted(layer, 1e-3), replace(layer, W=layer.W.flip(0)),
                  replace(layer, W=layer.W * torch.tensor([1.0, 0.9], dtype=torch.float64).view(2, 1, 1))):
        found = found_of(wrong, data)
        claim = radius_by_products(found, look(found), 1e-6, look)
        assert claim.holds == "no", claim


def test_bars_cover_and_what_is_determined_holds():
    covered = 0
    for seed in range(6):
        layer, data = instance(20 + seed, heads=2, width=6, count=160)
        noise = torch.randn(data.Y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        near = nudged(layer, 1e-4, seed)
        found = found_of(near, hw.Examples(data.X, data.Y + 1e-3 * noise), len(data))
        draw = torch.Generator().manual_seed(seed)
        newton = Newton(found, Spectrum.of(found, 0.99, draw, 200))
        claim = error_bars_by_products(found, Tried.of(found, newton, draw), 0.9)
        assert claim.holds == "yes", claim
        pairs = (("theta", near.augmented, layer.augmented), ("w", near.W, layer.W))
        covered += all(float((a[i] - b[i]).norm() / a[i].norm()) <= claim.numbers[f"{name}_{i + 1}_at_most"]
                       for name, a, b in pairs for i in range(2))
        exact = found_of(near, data)
        newton = Newton(exact, look(exact))
        for i, (theta, W) in enumerate(known(exact, newton, Tried.of(exact, newton, draw), draw)):
            error = (theta.left.mT @ (near.Theta - layer.Theta)[i] @ theta.right).abs() / near.Theta[i].norm()
            assert float((error <= theta.epsilon).double().mean()) > 0.99
            off = (W.left.mT @ (near.W - layer.W)[i]).norm(dim=1) / 6**0.5 / near.W[i].norm()
            assert bool((off <= W.epsilon).all())
    assert covered >= 5


def test_certify_takes_thin_heads_and_names_their_ranks(monkeypatch):
    monkeypatch.setattr(identify, "DENSE", 0)
    monkeypatch.setattr(report, "DENSE", 0)
    layer, data = instance(9, width=8, count=500)
    found = hw.certify(nudged(layer, 1e-15), data)
    for name in ("identifiability", "distance to the truth", "error bars", "what is determined"):
        assert found[name].holds == "yes", found[name]
    claim = found["identifiability"]
    assert "attention matrices have rank at most 2 and whose projections have rank at most 1, 2, head by head" in (
        claim.statement)
    assert claim.numbers["parameters"] == 2 * 2 * (8 + 8 - 2) + (8 + 8 - 1) + 2 * (8 + 8 - 2)
    # Along a direction that tokens never take nothing is known, with nothing known of the least eigenvalue either.
    X = data.X.double() - data.X.double().mean(2, keepdim=True)
    still = hw.certify(layer, hw.Examples(X, layer(X)))
    assert still["identifiability"].holds == "no"
    assert still["what is determined"].numbers["theta_1_known"] == (7 / 8) ** 2
    assert still["what is determined"].numbers["w_2_known"] == 7 / 8
