import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import dense
from headway.core import attention

EXACT = {"rtol": 1e-11, "atol": 1e-12}
CASES = [
    pytest.param(*case, id="-".join(str(c) for c in case))
    for case in itertools.product(
        ("bias", "no_bias"), ("offset", "no_offset"), ("none", "causal"), ("padded", "full")
    )
]
every_case = pytest.mark.parametrize(("bias", "shift", "mask", "filled"), CASES)
seeds = pytest.mark.parametrize("seed", [0, 1], ids="seed{}".format)


class Problem:
    """A small random layer with inputs, and directions to differentiate along."""

    def __init__(self, seed, bias="bias", shift="offset", mask="none", filled="full", size=(2, 4, 3, 2, 2)):
        n, k, d, m, e = size
        source = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=source, dtype=torch.float64)

        def parts():
            return {"Theta": normal(m, d, d), "W": normal(m, d, e),
                    "key_bias": normal(m, d) if bias == "bias" else None,
                    "offset": normal(e) if shift == "offset" else None}

        self.X, self.U = normal(n, k, d), normal(n, k, e)
        self.at, self.along = parts(), parts()
        self.mask = mask
        self.padding = torch.zeros(n, k, dtype=torch.bool) if filled == "padded" else None
        if self.padding is not None:
            self.padding[0, -1] = True
            self.padding[-1, 0] = True
        self.see = attention.allowed(self.X, mask, self.padding)
        self.rows = d + 1 if bias == "bias" else d
        self.P = attention.patterns(self.X, self.augmented(self.at), self.see)

    @staticmethod
    def augmented(parts):
        return attention.augment(parts["Theta"], parts["key_bias"])

    def forward(self, parts):
        return attention.forward(self.X, self.augmented(parts), parts["W"], parts["offset"], self.see)

    def jvp(self):
        v = self.along
        return attention.jvp(self.X, self.P, self.at["W"], self.augmented(v), v["W"], v["offset"])

    def vjp(self):
        gA, gW, gc = attention.vjp(self.X, self.P, self.at["W"], self.U, self.rows)
        gTheta, gu = attention.split(gA)
        parts = {"Theta": gTheta, "W": gW, "key_bias": gu, "offset": gc}
        return {name: value for name, value in parts.items() if self.at[name] is not None}

    def present(self, parts):
        return {name: value for name, value in parts.items() if value is not None}


@every_case
def test_forward_and_patterns_equal_the_loops(bias, shift, mask, filled):
    p = Problem(0, bias, shift, mask, filled)
    P = dense.stack(dense.patterns(p.X, p.at["Theta"], p.at["key_bias"], mask, p.padding))
    Y = dense.forward(p.X, mask=mask, padding=p.padding, **p.at)
    assert_close(p.P.transpose(1, 2), P, **EXACT)
    assert_close(p.forward(p.at), Y, **EXACT)


@every_case
def test_products_with_the_jacobian_equal_the_dense_ones(bias, shift, mask, filled):
    p = Problem(1, bias, shift, mask, filled, size=(2, 3, 2, 2, 2))
    J = dense.jacobian(p.X, mask=mask, padding=p.padding, **p.at)
    assert_close(p.jvp().flatten(), dense.jvp(J, p.along), **EXACT)
    expected = dense.vjp(J, p.U)
    found = p.vjp()
    assert found.keys() == expected.keys()
    for name in expected:
        assert_close(found[name].flatten(), expected[name], **EXACT)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own call
@seeds
@every_case
def test_jvp_and_vjp_equal_autograd(bias, shift, mask, filled, seed):
    p = Problem(seed, bias, shift, mask, filled, size=(3, 5, 4, 2, 3))
    at, along = p.present(p.at), p.present(p.along)
    absent = {name: None for name in p.at if name not in at}

    _, forward_mode = torch.func.jvp(lambda parts: p.forward({**parts, **absent}), (at,), (along,))
    assert_close(p.jvp(), forward_mode, **EXACT)

    leaves = {name: value.clone().requires_grad_() for name, value in at.items()}
    p.forward({**leaves, **absent}).backward(p.U)
    for name, value in p.vjp().items():
        assert_close(value, leaves[name].grad, **EXACT)


@every_case
def test_jvp_and_vjp_equal_central_differences(bias, shift, mask, filled):
    p = Problem(2, bias, shift, mask, filled)
    step = 1e-5

    def moved(t):
        return {name: None if v is None else v + t * p.along[name] for name, v in p.at.items()}

    slope = (p.forward(moved(step)) - p.forward(moved(-step))) / (2 * step)
    assert_close(p.jvp(), slope, rtol=1e-7, atol=1e-8)
    along_v = sum((g * p.along[name]).sum() for name, g in p.vjp().items())
    assert_close(along_v, (p.U * slope).sum(), rtol=1e-7, atol=1e-8)


sizes = st.tuples(*(st.integers(1, top) for top in (3, 6, 5, 4, 4)))


@given(
    size=sizes,
    seed=st.integers(0, 2**32),
    bias=st.sampled_from(["bias", "no_bias"]),
    shift=st.sampled_from(["offset", "no_offset"]),
    mask=st.sampled_from(["none", "causal"]),
    filled=st.sampled_from(["padded", "full"]),
)
def test_vjp_is_the_adjoint_of_jvp(size, seed, bias, shift, mask, filled):
    p = Problem(seed, bias, shift, mask, filled, size)
    outside = (p.U * p.jvp()).sum()
    inside = sum((g * p.along[name]).sum() for name, g in p.vjp().items())
    scale = float(p.U.norm() * p.jvp().norm()) + 1.0
    assert_close(inside, outside, rtol=0, atol=1e-12 * scale)


@given(size=sizes, seed=st.integers(0, 2**32), bias=st.sampled_from(["bias", "no_bias"]))
def test_cotangent_is_the_adjoint_of_tangent_and_spread_of_project(size, seed, bias):
    p = Problem(seed, bias, size=size)
    dH = attention.tangent(p.P, p.X, p.augmented(p.along))
    gH = attention.spread(p.U, p.at["W"])
    scale = float(dH.norm() * gH.norm()) + 1.0
    gA = attention.cotangent(p.P, p.X, gH, p.rows)
    assert gA.shape == p.augmented(p.at).shape
    assert_close((gA * p.augmented(p.along)).sum(), (gH * dH).sum(), rtol=0, atol=1e-12 * scale)
    assert_close((p.U * attention.project(dH, p.at["W"])).sum(), (gH * dH).sum(), rtol=0, atol=1e-12 * scale)


@seeds
@pytest.mark.parametrize("bias", ["bias", "no_bias"])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_one_pattern_answers_many_probes(bias, mask, seed):
    p = Problem(seed, bias, mask=mask, size=(2, 4, 3, 5, 2))
    one = p.P[:, :, :1]
    probes = p.augmented(p.along)
    together = attention.tangent(one, p.X, probes)
    assert together.shape == (2, 4, 5, 3)
    for j in range(5):
        alone = attention.tangent(one, p.X, probes[j : j + 1])
        assert_close(together[:, :, j], alone[:, :, 0], **EXACT)


@pytest.mark.parametrize("bias", ["bias", "no_bias"])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("filled", ["padded", "full"])
def test_tangent_of_the_uniform_pattern_is_the_response_to_probes(bias, mask, filled):
    p = Problem(3, bias, "offset", mask, filled)
    probes = p.augmented(p.along)
    found = attention.tangent(attention.uniform(p.X, p.see), p.X, probes)
    for j, T in enumerate(probes):
        assert_close(found[:, :, j], dense.uniform_response(p.X, T, mask, p.padding), **EXACT)


@seeds
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_key_side_multiplies_by_the_covariance_under_the_pattern(mask, seed):
    p = Problem(seed, mask=mask)
    gH = attention.spread(p.U, p.at["W"])
    C = dense.covariance(p.P.transpose(1, 2), p.X)
    expected = torch.stack([
        torch.stack([C[s, i, a] @ gH[s, a, i] for i in range(2)]) for s in range(2) for a in range(4)
    ]).view(2, 4, 2, 3)
    assert_close(attention.key_side(p.P, p.X, gH), expected, **EXACT)


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("filled", ["padded", "full"])
@pytest.mark.parametrize("rows", [3, 4])
def test_uniform_is_the_pattern_of_zero(mask, filled, rows):
    p = Problem(4, mask=mask, filled=filled)
    zero = torch.zeros(1, rows, 3, dtype=torch.float64)
    found = attention.uniform(p.X, p.see)
    assert_close(found, attention.patterns(p.X, zero, p.see), **EXACT)
    loops = dense.stack(dense.patterns(p.X, zero[:, :3], None, mask, p.padding))
    assert_close(found.transpose(1, 2), loops, **EXACT)


@seeds
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_padded_keys_get_no_weight_and_rows_sum_to_one(mask, seed):
    p = Problem(seed, mask=mask, filled="padded")
    assert_close(p.P.sum(3), torch.ones(2, 4, 2, dtype=torch.float64), **EXACT)
    for s, a, b in itertools.product(range(2), range(4), range(4)):
        if p.padding[s, b] and a != b:
            assert (p.P[s, a, :, b] == 0).all(), (s, a, b)
    if mask == "causal":
        assert (p.P.transpose(1, 2).triu(1) == 0).all()


@seeds
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("at", ["front", "back"])
def test_a_padded_sequence_gives_the_rows_of_the_shorter_one(mask, at, seed):
    p = Problem(seed, mask=mask, size=(2, 5, 3, 2, 2))
    real = slice(2, None) if at == "front" else slice(None, 3)
    padding = torch.ones(2, 5, dtype=torch.bool)
    padding[:, real] = False
    A, short = p.augmented(p.at), p.X[:, real]
    long = attention.forward(p.X, A, p.at["W"], p.at["offset"], attention.allowed(p.X, mask, padding))
    expected = attention.forward(short, A, p.at["W"], p.at["offset"], attention.allowed(short, mask, None))
    assert_close(long[:, real], expected, **EXACT)


def test_everything_in_sight_is_said_with_none():
    assert attention.allowed(torch.zeros(1, 3, 2), "none", None) is None


@seeds
@pytest.mark.parametrize("bias", ["bias", "no_bias"])
def test_split_inverts_augment(bias, seed):
    p = Problem(seed, bias)
    Theta, key_bias = attention.split(p.augmented(p.at))
    assert_close(Theta, p.at["Theta"], rtol=0, atol=0)
    if bias == "bias":
        assert_close(key_bias, p.at["key_bias"], rtol=0, atol=0)
    else:
        assert key_bias is None


def test_large_scores_stay_finite():
    p = Problem(5)
    P = attention.patterns(p.X, 1e4 * p.augmented(p.at), p.see)
    assert torch.isfinite(P).all()
    assert_close(P.sum(3), torch.ones(2, 4, 2, dtype=torch.float64), **EXACT)
