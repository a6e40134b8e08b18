"""Claims: each is checked against an independent computation, and against a planted error that must turn it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headway as hw
from headway.certificates import held_out, identify, report, rounding, spectrum
from headway.certificates.bars import error_bars
from headway.certificates.held_out import errors
from headway.certificates.identify import identifiability
from headway.certificates.jacobian import dense_blocks, gram, low_ranks, sample
from headway.certificates.radius import lipschitz, radius
from headway.certificates.scaled import Scaled
from headway.certificates.spectrum import Spectrum
from headway.core import attention
from headway.core.shards import write
from headway.linalg.krylov import lanczos, lanczos_error

SEEDS = st.integers(0, 2**31)
CASES = [{}, {"key_bias": True}, {"offset": True, "key_bias": True}, {"mask": "causal"}, {"rank": 1}]


def instance(seed=0, heads=2, width=4, count=300, length=5, **extra):
    layer = hw.AttentionLayer.random(heads=heads, width=width, seed=seed, **extra)
    return layer, hw.draw(layer, count=count, length=length, seed=seed + 1000)


def parameters(layer):
    return torch.cat([layer.augmented.flatten(), layer.W.flatten(),
                      *([] if layer.offset is None else [layer.offset])])


def rebuilt(layer, theta):
    """The layer with these parameters, in the Jacobian's order."""
    m, d = layer.heads, layer.width
    size = layer.augmented.numel()
    A = theta[:size].view(m, -1, d)
    W = theta[size : size + layer.W.numel()].view_as(layer.W)
    u = None if layer.key_bias is None else A[:, d]
    return replace(layer, Theta=A[:, :d], key_bias=u, W=W,
                   offset=None if layer.offset is None else theta[-layer.out_width :])


def jacobian(layer, data):
    found = sample(layer, data, len(data), torch.float64)
    J = torch.zeros(found.problem.equations, found.unknowns, dtype=torch.float64)
    r = torch.zeros(found.problem.equations, dtype=torch.float64)

    def put(block, left, rows):
        J[rows], r[rows] = block, left

    dense_blocks(found, put)
    return found, J, r


def planted(layer, size=1e-3):
    Theta = layer.Theta.clone()
    Theta[0, 1, 2] += size
    return replace(layer, Theta=Theta)


# -- the Jacobian -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", CASES)
def test_the_dense_jacobian_is_autograds(extra):
    layer, data = instance(3, count=4, **extra)

    def outputs(theta):
        A = theta[: layer.augmented.numel()].view_as(layer.augmented)
        W = theta[layer.augmented.numel() :][: layer.W.numel()].view_as(layer.W)
        c = None if layer.offset is None else theta[-layer.out_width :]
        see = attention.allowed(data.X.double(), layer.mask, None)
        return attention.forward(data.X.double(), A, W, c, see).flatten()

    expected = torch.autograd.functional.jacobian(outputs, parameters(layer))
    found, J, r = jacobian(layer, data)
    torch.testing.assert_close(J, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(r, outputs(parameters(layer)) - data.Y.flatten(), rtol=0, atol=1e-13)
    N, g = gram(found)
    torch.testing.assert_close(N, J.T @ J)
    torch.testing.assert_close(g, J.T @ r, rtol=0, atol=1e-11)


def test_filling_has_no_equations():
    layer, data = instance(4, count=20)
    padding = torch.zeros(20, 5, dtype=torch.bool)
    padding[::2, 3:] = True
    padded = hw.Examples(data.X.double(), layer(data.X, padding), padding)
    found = sample(layer, padded, 20, torch.float64)
    N, g = gram(found)
    short = hw.Examples(data.X[::2, :3].double(), layer(data.X[::2, :3]))
    parts = [sample(layer, short, 10, torch.float64), sample(layer, data.take(range(1, 20, 2)), 10, torch.float64)]
    torch.testing.assert_close(N, gram(parts[0])[0] + gram(parts[1])[0])
    assert float(g.abs().max()) < 1e-11


@given(seed=SEEDS, distance=st.floats(1e-3, 0.1))
def test_the_lipschitz_constant_bounds_the_change_of_the_jacobian(seed, distance):
    layer, data = instance(seed % 50, count=6, length=3, key_bias=seed % 2 == 0)
    found, J, _ = jacobian(layer, data)
    step = torch.randn(J.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    step *= distance / step.norm()
    _, K, _ = jacobian(rebuilt(layer, parameters(layer) + step), data)
    assert float(torch.linalg.matrix_norm(K - J, 2)) <= lipschitz(found, 0.1) * distance


@given(seed=SEEDS)
def test_lanczos_keeps_its_promise(seed):
    draw = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(60, 60, generator=draw, dtype=torch.float64))[0]
    spectrum = torch.rand(60, generator=draw, dtype=torch.float64)
    A = Q @ torch.diag(spectrum) @ Q.T
    values, v = lanczos(lambda x: A @ x, torch.randn(60, generator=draw, dtype=torch.float64), 20)
    least, largest = float(spectrum.min()), float(spectrum.max())
    epsilon = lanczos_error(20, 60, 0.999)
    assert least - 1e-12 <= float(values[0]) <= least + epsilon * (largest - least), f"seed {seed}"
    assert float(v @ A @ v / (v @ v)) == pytest.approx(float(values[0]), rel=1e-6)
    whole, _ = lanczos(lambda x: A @ x, torch.randn(60, generator=draw, dtype=torch.float64), 60)
    assert float(whole[0]) == pytest.approx(least, abs=1e-9)


# -- held-out error -----------------------------------------------------------------------------------------------


def test_errors_are_those_of_a_plain_loop():
    layer, data = instance(5, count=30)
    other = planted(layer, 0.1)
    found = errors(other, data)
    plain = [float((other(data.X[j]) - data.Y[j]).norm()) / math.sqrt(5 * 4) for j in range(30)]
    torch.testing.assert_close(found.each, torch.tensor(plain, dtype=torch.float64))
    assert found.boolean
    assert found.widest == pytest.approx(2.0)
    rows = other(data.X).norm(dim=2)
    assert float(rows.max()) <= found.row_bound
    first = data.Y[: held_out.FIRST].flatten(0, 1)
    centred = first - first.mean(0)
    assert found.deviation == pytest.approx(float(centred.square().mean().sqrt()))


# -- identifiability ----------------------------------------------------------------------------------------------


def judged(layer, data, sequences=None, steps=200, dtype=torch.float64):
    found = sample(layer, data, sequences, dtype)
    return of(layer, data, found, 0, steps)


def of(layer, data, found, seed, steps):
    draw = torch.Generator().manual_seed(seed)
    return identifiability(layer, data, found, lambda: Spectrum.of(found, 0.99, draw, steps))


@pytest.mark.parametrize("extra", CASES)
def test_a_generic_layer_is_identifiable_and_the_numbers_are_those_of_the_svd(extra):
    layer, data = instance(6, **extra)
    claim = judged(layer, data, 60)
    assert claim.holds == "yes", claim
    _, J, _ = jacobian(layer, data.take(range(0, 300, 5)))
    found = sample(layer, data, 60, torch.float64)
    N, _ = gram(found)
    s = torch.linalg.svdvals(N * N.diagonal().rsqrt()[:, None] * N.diagonal().rsqrt()[None, :])
    assert claim.numbers["least_singular_value"] == pytest.approx(float((s[-1] / s[0]).sqrt()), rel=1e-6)
    assert int(torch.linalg.matrix_rank(J)) == found.unknowns


def broken(name):
    layer, data = instance(6)
    if name == "equal":
        layer = replace(layer, Theta=layer.Theta[[0, 0]])
    if name == "dead":
        layer = replace(layer, W=torch.stack([layer.W[0], torch.zeros_like(layer.W[1])]))
    if name == "few":
        data = data.take(range(2))
    if name == "constant":
        X = data.X.double().clone()
        X[:, :, 2] = 1.0
        data = hw.Examples(X, layer(X))
    return layer, data


@pytest.mark.parametrize(("name", "words"), [
    ("equal", "heads 1 and 2 have equal attention matrices"), ("dead", "head 2 is dead"),
    ("few", "too few examples: 2 sequences"), ("constant", "coordinate 3 of the tokens is constant")])
@pytest.mark.parametrize("dense", [True, False])
def test_the_cause_of_a_free_direction_is_named(monkeypatch, name, words, dense):
    if not dense:
        monkeypatch.setattr(identify, "DENSE", 0)
    claim = judged(*broken(name))
    assert claim.holds == "no"
    assert words in claim.reason
    if dense:
        assert claim.numbers["free_directions"] >= 1


def test_products_decide_what_the_dense_matrix_decides(monkeypatch):
    layer, data = instance(7, width=5, key_bias=True)
    assert judged(layer, data).holds == "yes"
    monkeypatch.setattr(identify, "DENSE", 0)
    claim = judged(layer, data)
    assert claim.holds == "yes", claim
    assert 0 < claim.numbers["lower_bound"] < claim.numbers["least_ritz_value"] - claim.numbers["rounding"]
    short = judged(layer, data, steps=4)
    assert short.holds == "undecided"
    assert "could decide" in short.reason
    assert "known to be at most" in short.reason, "a Ritz value is an upper bound"


def test_what_rounding_could_have_made_is_never_a_yes(monkeypatch):
    """The same layer and examples in float32: the bound is positive, and so is what rounding may add to it."""
    layer, data = instance(7, width=5, key_bias=True)
    monkeypatch.setattr(identify, "DENSE", 0)
    claim = judged(layer, data, dtype=torch.float32)
    assert claim.holds == "undecided"
    assert claim.numbers["least_ritz_value"] < claim.numbers["rounding"]
    assert "rounded by up to" in claim.reason


def ranked(dtype=torch.float64):
    """A layer whose heads have ranks 1 and 2, as a sample in these ranks."""
    layer, data = instance(7, width=6)
    U, s, Vh = torch.linalg.svd(layer.Theta)
    s[0, 1:], s[1, 2:] = 0.0, 0.0
    layer = replace(layer, Theta=U @ torch.diag_embed(s) @ Vh)
    data = hw.Examples(data.X, layer(data.X))
    return layer, data, sample(layer, data, 60, dtype, low_ranks(layer))


def dense_operator(operator, like):
    """The matrix of a map of tensors, in float64."""
    basis = torch.eye(like.numel(), dtype=like.dtype).view(-1, *like.shape)
    return torch.stack([operator(v).flatten() for v in basis]).double()


def test_lanczos_lives_in_the_tangent_space_and_counts_its_dimension(monkeypatch):
    """The bound's dimension, that of the space the operator acts on, and that of the matrices of ranks 1 and 2."""
    layer, data, found = ranked()
    calls, sizes = [], []

    def kept(apply, start, steps, enough=None, project=None):
        calls.append((apply, start))
        return lanczos(apply, start, steps, enough, project)

    def counted(steps, size, confidence):
        sizes.append(size)
        return lanczos_error(steps, size, confidence)

    monkeypatch.setattr(spectrum, "lanczos", kept)
    monkeypatch.setattr(spectrum, "lanczos_error", counted)
    claim = of(layer, data, found, 0, 10)
    dimension = 1 * (6 + 6 - 1) + 2 * (6 + 6 - 2)
    assert calls[0][0] == calls[1][0].given_w, "the norm with W known is that on all matrices"
    for apply, start in calls[1:]:
        values, vectors = torch.linalg.eigh(dense_operator(apply, layer.Theta))
        acted_on = values > 1e-10 * values[-1]
        assert int(acted_on.sum()) == dimension < layer.Theta.numel()
        outside = vectors[:, ~acted_on].T @ start.flatten()
        assert float(outside.norm()) < 1e-10 * float(start.norm()), "the start lies where the operator acts"
    assert set(sizes[1:]) == {dimension}
    assert sizes[0] == layer.Theta.numel()
    assert claim.numbers["dimension"] == found.theta_unknowns == dimension
    assert "rank at most 1, 2, head by head" in claim.statement


def test_the_bound_is_below_the_least_eigenvalue_on_the_tangent_space():
    layer, data, found = ranked()
    for seed in range(10):
        claim = of(layer, data, found, seed, 200)
        operator = Scaled(found, torch.Generator().manual_seed(seed))
        values = torch.linalg.eigvalsh(dense_operator(operator, layer.Theta))
        least = float(values[-found.theta_unknowns])
        assert float(values[-found.theta_unknowns - 1]) < 1e-12 < least, "zero off the tangent space, only there"
        assert 0 < claim.numbers["lower_bound"] <= least <= claim.numbers["least_ritz_value"] * (1 + 1e-9)
        assert claim.holds == "yes", claim


def test_the_operator_is_the_schur_complement_of_the_dense_normal_matrix():
    """At a layer that did not make the labels: the Jacobian is that of the layer, whatever they are."""
    layer, data = instance(7, width=5)
    found = sample(layer, data, 60, torch.float64)
    other = replace(found, layer=replace(found.layer, W=2 * layer.W.flip(0)))
    N, _ = gram(other)
    t = layer.Theta.numel()
    schur = N[:t, :t] - N[:t, t:] @ torch.linalg.solve(N[t:, t:], N[t:, :t])
    operator = Scaled(other, torch.Generator().manual_seed(0))
    here = dense_operator(operator.products.curvature, layer.Theta)
    torch.testing.assert_close(here, schur, rtol=1e-9, atol=1e-9 * float(schur.abs().max()))


@pytest.mark.parametrize("seed", range(5))
def test_float32_differs_from_float64_by_less_than_the_rounding_claimed(seed):
    """Products and dense normal matrices: the bounds hold of errors that can be seen."""
    layer, data = instance(seed, width=5, key_bias=True)
    fine, rough = (sample(layer, data, 40, dtype) for dtype in (torch.float64, torch.float32))
    one, other = (Scaled(found, torch.Generator().manual_seed(seed)) for found in (fine, rough))
    for name in ("left", "right", "along", "stretch"):
        setattr(other, name, getattr(one, name).float())
    v = torch.nn.functional.normalize(one.start(torch.Generator().manual_seed(9)).flatten(), dim=0)
    v = v.view_as(layer.augmented)
    largest, known = (float(torch.linalg.eigvalsh(dense_operator(apply, layer.augmented))[-1])
                      for apply in (one, one.given_w))
    away = float((one(v) - other(v.float()).double()).norm())
    assert 1e-9 < away <= other.rounding.ritz(1, largest, known)
    N, K = gram(fine)[0], gram(rough)[0]
    scale = N.diagonal().rsqrt()
    away = float(torch.linalg.matrix_norm((N - K) * scale[:, None] * scale[None, :], 2))
    top = float(torch.linalg.eigvalsh(N * scale[:, None] * scale[None, :])[-1])
    assert 1e-9 < away <= rounding.dense(rough, scale.float(), top)


def test_products_see_a_free_direction_nobody_named(monkeypatch):
    """Tokens whose first two coordinates are equal: no coordinate is constant, yet a direction is never visited."""
    layer, data = instance(8, width=5)
    X = data.X.double().clone()
    X[:, :, 1] = X[:, :, 0]
    same = hw.Examples(X, layer(X))
    assert judged(layer, same).holds == "no"
    monkeypatch.setattr(identify, "DENSE", 0)
    claim = judged(layer, same)
    assert claim.holds == "no"
    assert "never change" in claim.reason


# -- distance to the truth ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", CASES)
def test_the_truth_lies_within_the_radius_and_a_planted_error_never_passes(extra):
    layer, data = instance(9, **extra)
    fit = hw.learn(data, heads=2)
    # In the class of the truth, so that parameters can be compared one by one.
    order = list(hw.match(fit.layer, layer).order)
    learned = replace(fit.layer, Theta=fit.layer.Theta[order], W=fit.layer.W[order],
                      key_bias=None if layer.key_bias is None else fit.layer.key_bias[order],
                      offset=None if layer.offset is None else fit.layer.offset)
    fresh = hw.draw(layer, count=200, length=5, seed=77)
    claim = radius(sample(learned, fresh, 60, torch.float64), 1e-6)
    assert claim.holds == "yes", claim
    away = float((parameters(learned) - parameters(layer)).norm())
    assert away <= claim.numbers["radius"] < 1e-9
    for size in (1e-3, 1e-5):
        wrong = radius(sample(planted(learned, size), fresh, 60, torch.float64), 1e-6)
        assert wrong.holds != "yes", wrong
    assert radius(sample(planted(learned, 1e-2), fresh, 60, torch.float64), 1e-6).holds == "no"


def test_an_undecided_radius_names_the_quantity_that_failed():
    layer, fresh = instance(9)
    near = radius(sample(planted(layer, 1e-3), fresh, 60, torch.float64), 1.0)
    assert near.holds == "yes", "Newton's method leads to the truth, and a unit is allowed"
    assert near.numbers["at_least"] <= 1e-3 <= near.numbers["radius"] < 1.1e-3
    noisy = hw.draw(layer, count=200, length=5, noise=0.1, seed=77)
    claim = radius(sample(planted(layer, 1e-3), noisy, 60, torch.float64), 1.0)
    assert claim.holds == "undecided"
    assert "2ηL/σ" in claim.reason
    equal = replace(layer, Theta=layer.Theta[[0, 0]])
    flat = radius(sample(equal, hw.draw(equal, count=200, length=5, seed=1), 60, torch.float64), 1e-6)
    assert flat.holds == "undecided"
    assert "not told from zero" in flat.reason


def test_error_bars_are_the_errors_that_noise_makes():
    layer = hw.AttentionLayer.random(heads=2, width=4, seed=11)
    ratios = []
    for seed in range(6):
        data = hw.draw(layer, count=200, length=5, noise=0.01, seed=seed)
        fit = hw.learn(data, heads=2)
        order = list(hw.match(fit.layer, layer).order)
        plain = hw.AttentionLayer(fit.layer.Theta[order], fit.layer.W[order], fit.layer.key_bias[order],
                                  fit.layer.offset)
        claim = error_bars(sample(plain, data, len(data), torch.float64))
        error = hw.match(plain, layer)
        ratios += [error.theta_error[i] / claim.numbers[f"theta_{i + 1}"] for i in range(2)]
        ratios += [error.w_error[i] / claim.numbers[f"w_{i + 1}"] for i in range(2)]
    assert 0.7 < sum(ratios) / len(ratios) < 1.3, ratios
    away = error_bars(sample(planted(plain, 0.3), data, len(data), torch.float64))
    assert away.holds == "undecided"
    few = error_bars(sample(layer, data, 2, torch.float64))
    assert few.holds == "undecided"


# -- the whole ----------------------------------------------------------------------------------------------------


def test_a_certificate_of_the_truth_and_of_a_planted_error():
    layer, data = instance(12, width=6, count=1000)
    good = hw.certify(layer, data, teacher_bound=50.0)
    assert [good[name].holds for name in ("held-out quantile", "identifiability", "distance to the truth",
                                          "non-degeneracy")] == ["yes"] * 4
    bad = hw.certify(planted(layer), data, teacher_bound=50.0)
    assert bad["held-out quantile"].holds == "no"
    assert bad["distance to the truth"].holds != "yes"
    assert "held-out quantile: no" in str(bad)
    with pytest.raises(KeyError, match="no claim 'beauty'"):
        bad["beauty"]
    one = hw.certify(replace(layer, W=torch.stack([layer.W[0], -layer.W[0]])), data)
    assert one["non-degeneracy"].holds == "no"


def test_examples_are_streamed_and_shards_give_the_same_certificate(tmp_path, monkeypatch):
    layer, data = instance(13, count=700)
    stored = write(tmp_path / "e", iter([data]), 1, layer)
    monkeypatch.setattr(held_out, "BATCH", 64)
    one, other = hw.certify(layer, data), hw.certify(layer, stored)
    assert [claim.holds for claim in one.claims] == [claim.holds for claim in other.claims]
    assert one["held-out quantile"].numbers["bound"] == pytest.approx(other["held-out quantile"].numbers["bound"])


def test_a_large_layer_goes_by_products():
    layer, data = instance(14, heads=4, width=24, count=200, length=8)
    found = hw.certify(layer, data)
    claim = found["identifiability"]
    assert claim.numbers["parameters"] == 2 * 4 * 24**2 > identify.DENSE
    assert claim.holds == "yes", claim
    assert "rank" not in claim.statement
    assert claim.numbers["products"] > 10
    assert found.established("distance to the truth") and found.established("error bars")


def test_low_rank_is_claimed_as_such_and_needs_fewer_examples():
    layer, data = instance(14, heads=4, width=24, rank=3, key_bias=True, count=150, length=8)
    claim = hw.certify(layer, data)["identifiability"]
    assert claim.holds == "yes", claim
    assert "rank at most 4" in claim.statement
    assert claim.numbers["parameters"] == 4 * 4 * (25 + 24 - 4) + 4 * 24**2


def test_one_sequence_that_was_learned_from_is_enough_to_refuse(refused):
    """A subset, in another order, precision or filling, beside fresh ones: however it is told what was seen."""
    layer, data = instance(15, width=6, count=600, length=6)
    fresh = hw.draw(layer, count=40, length=6, seed=5)
    mixed = hw.Examples(torch.cat([fresh.X[:30], data.X[[500, 3]], fresh.X[30:]]),
                        torch.cat([fresh.Y[:30], data.Y[[500, 3]], fresh.Y[30:]]))
    zeros = torch.zeros(len(mixed), 2, 6)
    longer = hw.Examples(torch.cat([mixed.X.float(), zeros], 1), torch.cat([mixed.Y.float(), zeros + 7], 1),
                         torch.tensor([[False] * 6 + [True] * 2]).expand(len(mixed), 8))
    known = data.hashes()
    for seen in (data, known, torch.from_numpy(known), set(known.tolist())):
        for examples in (mixed, longer):
            with refused("examples", "did not use", "2 of 42 sequences", "index 30"):
                hw.certify(layer, examples, seen=seen)
        assert hw.certify(layer, fresh, seen=seen).claims
    with refused("examples", "600 of 600"):
        hw.certify(layer, data, seen=data)
    assert hw.certify(layer, fresh, seen=set()).claims
    with refused("seen", "hashes()"):
        hw.certify(layer, fresh, seen=[0.5])


def test_one_parameter_beyond_the_dense_limit_is_decided_too(monkeypatch):
    layer, data = instance(14, width=6, rank=2, key_bias=True)
    whole = 2 * 7 * 6 + 2 * 6**2
    for limit in (whole - 1, whole):
        for module in (identify, report):
            monkeypatch.setattr(module, "DENSE", limit)
        found = hw.certify(layer, data)
        assert found["identifiability"].numbers["parameters"] == (whole if limit == whole else whole - 2 * 12)
        for name in ("identifiability", "distance to the truth", "error bars"):
            assert found.established(name), found[name]


def test_a_verdict_is_a_word_and_neither_true_nor_false():
    claim = hw.Claim("sun", "It shines", "none", "no", "clouds")
    assert claim.holds is hw.Verdict.NO
    assert claim.holds == "no" != "yes"
    assert f"{claim.holds} {claim}" == "no sun: no. It shines: clouds."
    assert json.dumps({"holds": claim.holds}) == '{"holds": "no"}'
    assert {"no": 1}[claim.holds] == 1
    for use in (bool, lambda v: not v, lambda v: v and 1):
        with pytest.raises(TypeError, match="established"):
            use(claim.holds)
    with pytest.raises(ValueError, match="perhaps"):
        hw.Claim("sun", "It shines", "none", "perhaps", "clouds")
    certificate = hw.Certificate((claim, replace(claim, name="moon", holds="yes"),
                                  replace(claim, name="rain", holds=hw.Verdict.UNDECIDED)), 0.99, {})
    assert [certificate.established(name) for name in ("sun", "moon", "rain")] == [False, True, False]
    with pytest.raises(KeyError, match="no claim 'wind'"):
        certificate.established("wind")


def test_bad_input_is_refused(refused):
    layer, data = instance(15)
    with refused("examples", "did not use", "same hash", "fresh"):
        hw.certify(layer, data, seen=data.digest())
    with refused("examples", "width 4"):
        hw.certify(layer, instance(1, width=5)[1])
    with refused("examples", "mask 'none'"):
        hw.certify(layer, hw.Examples(data.X, data.Y, mask="causal"))
    with refused("confidence", "between 0 and 1"):
        hw.certify(layer, data, confidence=1.0)
    with refused("fraction", "between 0 and 1"):
        hw.certify(layer, data, fraction=0.0)
    with refused("tolerance"):
        hw.certify(layer, data, tolerance=-1.0)
    with refused("teacher_bound"):
        hw.certify(layer, data, teacher_bound=math.nan)
    with refused("layer", "AttentionLayer"):
        hw.certify(data, data)
    with refused("examples", "Examples object"):
        hw.certify(layer, data.X)
    with refused("examples", "at least 2"):
        hw.certify(layer, data.take([0]))
