from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import dense
from headway.core import checks
from headway.core.layer import AttentionLayer

SAME = {"rtol": 0, "atol": 0}
EXACT = {"rtol": 1e-11, "atol": 1e-12}
seeds = pytest.mark.parametrize("seed", [0, 1, 2], ids="seed{}".format)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def full(seed=0, **options):
    return AttentionLayer.random(
        3, 4, **{"out_width": 2, "key_bias": True, "offset": True, "seed": seed, **options}
    )


def parts(layer):
    return {**layer.tensors(), "mask": layer.mask}


# The function


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_the_layer_computes_the_formula(mask):
    layer, X = full(mask=mask), normal(2, 5, 4)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    Y = dense.forward(X, padding=padding, **parts(layer))
    P = dense.stack(dense.patterns(X, layer.Theta, layer.key_bias, mask, padding))
    assert_close(layer(X, padding), Y, **EXACT)
    assert_close(layer.patterns(X, padding), P, **EXACT)


def test_one_sequence_needs_no_batch():
    layer, X = full(mask="causal"), normal(2, 5, 4)
    padding = torch.tensor([[False] * 5, [True] + [False] * 4])
    assert_close(layer(X[1], padding[1]), layer(X, padding)[1], **EXACT)
    assert_close(layer.patterns(X[1], padding[1]), layer.patterns(X, padding)[1], **EXACT)
    assert layer.patterns(X[1]).shape == (3, 5, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_int8_tokens_take_the_dtype_of_the_layer(dtype):
    layer, X = full(dtype=dtype), normal(2, 5, 4).sign()
    Y = layer(X.to(torch.int8))
    assert Y.dtype == dtype
    assert_close(Y, layer(X.to(dtype)), **SAME)


def test_arrays_and_lists_are_read():
    layer, X = full(), normal(2, 5, 4)
    assert_close(layer(X.numpy()), layer(X), **SAME)
    assert_close(layer(X.tolist()), layer(X), **SAME)


def test_a_read_only_array_is_read_without_a_warning():
    layer, X = full(), normal(2, 5, 4)
    array = X.numpy().copy()
    array.setflags(write=False)
    assert_close(layer(array), layer(X), **SAME)


def test_no_sequences_give_no_outputs():
    assert full()(torch.zeros(0, 5, 4, dtype=torch.float64)).shape == (0, 5, 2)


def test_inputs_are_not_changed():
    layer, X = full(mask="causal"), normal(2, 5, 4)
    padding = torch.tensor([[False] * 5, [True] + [False] * 4])
    before = [value.clone() for value in (X, padding, *layer.tensors().values())]
    layer(X, padding)
    layer.patterns(X, padding)
    layer.canonical()
    layer.to(torch.float32)
    for old, new in zip(before, (X, padding, *layer.tensors().values()), strict=True):
        assert_close(new, old, **SAME)


def test_nothing_is_taped():
    Theta, W = normal(2, 3, 3).requires_grad_(), normal(2, 3, 2).requires_grad_()
    layer = AttentionLayer(Theta, W)
    assert not layer(normal(2, 4, 3).requires_grad_()).requires_grad


def test_sizes_parts_and_text():
    layer = full(mask="causal")
    assert (layer.heads, layer.width, layer.out_width) == (3, 4, 2)
    assert list(layer.tensors()) == ["Theta", "W", "key_bias", "offset"]
    assert repr(layer) == "AttentionLayer(3 heads, width 4 → 2, with key_bias, offset, causal)"
    plain = AttentionLayer(layer.Theta, layer.W)
    assert list(plain.tensors()) == ["Theta", "W"]
    assert plain.augmented.shape == (3, 4, 4)
    assert layer.augmented.shape == (3, 5, 4)


def test_to_changes_the_dtype_of_every_part():
    layer = full().to(torch.float32)
    assert {value.dtype for value in layer.tensors().values()} == {torch.float32}
    assert_close(layer(normal(2, 5, 4).float()), full()(normal(2, 5, 4).float().double()).float(),
                 rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Theta", "W", "key_bias", "offset", "mask"])
def test_parts_cannot_be_replaced_in_place(name):
    layer = full()
    with pytest.raises(FrozenInstanceError):
        setattr(layer, name, None)


# Refusals


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("Theta", {"Theta": normal(3, 4, 5)}, "shape (3, 4, 5)"),
        ("Theta", {"Theta": normal(4, 4)}, "shape (4, 4)"),
        ("Theta", {"Theta": "heads"}, "str"),
        ("Theta", {"Theta": normal(3, 4, 4, dtype=torch.complex128)}, "complex128"),
        ("Theta", {"Theta": torch.zeros(3, 4, 4, dtype=torch.bool)}, "bool"),
        ("W", {"W": normal(2, 4, 2)}, "shape (2, 4, 2)"),
        ("W", {"W": normal(3, 5, 2)}, "shape (3, 5, 2)"),
        ("W", {"W": torch.full((3, 4, 2), torch.inf)}, "inf at index (0, 0, 0)"),
        ("key_bias", {"key_bias": normal(3, 5)}, "shape (3, 5)"),
        ("key_bias", {"key_bias": torch.full((3, 4), torch.nan)}, "nan at index (0, 0)"),
        ("offset", {"offset": normal(4)}, "shape (4,)"),
        ("mask", {"mask": "sideways"}, "'sideways'"),
        ("mask", {"mask": None}, "None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_malformed_layer_is_refused(refused, name, change, word):
    with refused(name, word):
        replace(full(), **change)


@pytest.mark.parametrize("name", ["W", "key_bias", "offset"])
def test_parts_of_two_dtypes_are_refused(refused, name):
    with refused(name, "float32"):
        replace(full(), **{name: getattr(full(), name).float()})


def test_a_layer_without_heads_is_refused(refused):
    with refused("Theta", "shape (0, 4, 4)"):
        AttentionLayer(torch.zeros(0, 4, 4), torch.zeros(0, 4, 2))


@pytest.mark.parametrize(
    ("X", "word"),
    [
        (normal(2, 5, 3), "shape (2, 5, 3)"),
        (normal(4), "shape (4,)"),
        (normal(1, 2, 5, 4), "shape (1, 2, 5, 4)"),
        (normal(2, 5, 4, dtype=torch.float32), "float32"),
        (normal(2, 5, 4).bool(), "bool"),
        ([[1.0] * 4, [1.0] * 3], "lengths 3 to 4"),
        (None, "NoneType"),
    ],
    ids=["width", "one_axis", "four_axes", "float32", "bool", "ragged", "none"],
)
def test_malformed_inputs_are_refused(refused, X, word):
    with refused("X", word):
        full()(X)
    with refused("X", word):
        full().patterns(X)


def test_a_nan_is_refused_with_its_index(refused):
    X = normal(2, 5, 4)
    X[1, 3, 2] = torch.nan
    with refused("X", "nan at index (1, 3, 2) (1 such entries)"):
        full()(X)


def test_padding_of_another_shape_is_refused(refused):
    with refused("padding", "shape (5, 2)"):
        full()(normal(2, 5, 4), torch.zeros(5, 2, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float64], ids=str)
def test_padding_that_is_not_bool_is_refused(refused, dtype):
    with refused("padding", "bool", str(dtype)):
        full()(normal(2, 5, 4), torch.zeros(2, 5, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool], ids=str)
def test_a_layer_is_not_cut_down_to_integers(dtype):
    with pytest.raises(checks.InputError):
        full().to(dtype)


@pytest.mark.parametrize(
    "value",
    [
        [torch.tensor(1.0), torch.tensor(2.0)],
        [np.array(1.0), np.array(2.0)],
        [torch.ones(1, requires_grad=True), torch.ones(1)],
    ],
    ids=["scalar_tensors", "scalar_arrays", "with_grad"],
)
def test_lists_of_tensors_are_read(value):
    assert checks.floating("offset", value).shape[0] == 2


def test_numbers_among_lists_are_refused(refused):
    with refused("X"):
        checks.floating("X", [1, [1, 2], [1, 2, 3]])


# Random layers


@seeds
@pytest.mark.parametrize("scale", [0.5, 3.0])
@pytest.mark.parametrize("rank", [None, 1, 3])
def test_random_layers_have_the_scale_and_rank_asked_for(scale, rank, seed):
    layer = AttentionLayer.random(5, 6, scale=scale, rank=rank, key_bias=True, seed=seed)
    norms = layer.Theta.flatten(1).norm(dim=1)
    assert_close(norms, torch.full((5,), scale, dtype=torch.float64), **EXACT)
    assert_close(layer.key_bias.norm(dim=1), norms / 2, **EXACT)
    assert (torch.linalg.matrix_rank(layer.Theta) == (rank or 6)).all()


@seeds
def test_random_projections_have_entries_of_variance_one_over_width(seed):
    layer = AttentionLayer.random(8, 25, out_width=40, offset=True, seed=seed)
    values = layer.W.flatten() * 5
    assert abs(float(values.mean())) < 6 / values.numel() ** 0.5
    assert abs(float(values.var()) - 1) < 6 * (2 / values.numel()) ** 0.5
    assert layer.offset.shape == (40,)


@seeds
def test_scale_is_the_deviation_of_the_scores_on_signs(seed):
    layer = AttentionLayer.random(1, 8, scale=1.5, seed=seed)
    X = normal(4000, 2, 8, seed=seed).sign()
    scores = torch.einsum("np,pq,nq->n", X[:, 0], layer.Theta[0], X[:, 1])
    assert abs(float(scores.std()) / 1.5 - 1) < 0.12


@seeds
def test_random_layers_are_their_seed(seed):
    one, two, other = full(seed), full(seed), full(seed + 1)
    for name, value in one.tensors().items():
        assert_close(value, two.tensors()[name], **SAME)
        assert not torch.equal(value, other.tensors()[name])


def test_optional_parts_leave_the_rest_as_it_was():
    bare = full(key_bias=False, offset=False)
    assert bare.key_bias is None
    assert bare.offset is None
    assert_close(bare.Theta, full().Theta, **SAME)
    assert_close(bare.W, full().W, **SAME)
    assert_close(full(dtype=torch.float32).W, full().W.float(), **SAME)


def test_random_leaves_the_global_generators_alone():
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    full()
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


@pytest.mark.parametrize(
    ("name", "value"),
    [("heads", 0), ("heads", 2.0), ("heads", True), ("width", -1), ("out_width", 0), ("scale", -1.0),
     ("scale", float("nan")), ("scale", "large"), ("rank", 0), ("rank", 5), ("seed", -1), ("seed", 2**70),
     ("mask", "diagonal")],
)
def test_random_refuses(refused, name, value):
    with refused(name, str(value)):
        AttentionLayer.random(**{"heads": 2, "width": 4, name: value})


# Canonical form


def disguise(layer, source):
    """The same function with heads split in two, dead heads added, and all heads shuffled."""

    def choose(*size):
        return torch.randn(*size, generator=source, dtype=torch.float64)

    m, d, e = layer.W.shape
    part = choose(m, d, e)
    Theta = torch.cat([layer.Theta, layer.Theta, choose(2, d, d)])
    W = torch.cat([layer.W - part, part, torch.zeros(2, d, e, dtype=torch.float64)])
    bias = None if layer.key_bias is None else torch.cat([layer.key_bias, layer.key_bias, choose(2, d)])
    order = torch.randperm(2 * m + 2, generator=source)
    return replace(layer, Theta=Theta[order], W=W[order], key_bias=None if bias is None else bias[order])


@given(
    seed=st.integers(0, 2**32),
    heads=st.integers(1, 4),
    width=st.integers(2, 5),
    key_bias=st.booleans(),
    mask=st.sampled_from(["none", "causal"]),
)
def test_canonical_is_the_same_function_undisguised(seed, heads, width, key_bias, mask):
    layer = AttentionLayer.random(heads, width, key_bias=key_bias, offset=True, mask=mask, seed=seed)
    hidden = disguise(layer, torch.Generator().manual_seed(seed + 1))
    X = normal(3, 4, width, seed=seed)
    found, plain = hidden.canonical(), layer.canonical()
    assert_close(found(X), layer(X), rtol=1e-9, atol=1e-10)
    assert found.heads == heads
    assert (found.mask, found.key_bias is None) == (mask, not key_bias)
    for name, value in plain.tensors().items():
        assert_close(found.tensors()[name], value, rtol=1e-9, atol=1e-10)
    loudness = found.augmented.flatten(1).norm(dim=1) * found.W.flatten(1).norm(dim=1)
    assert (loudness.diff() <= 0).all()


@given(seed=st.integers(0, 2**32), heads=st.integers(1, 4), key_bias=st.booleans())
def test_canonical_is_idempotent(seed, heads, key_bias):
    layer = AttentionLayer.random(heads, 3, key_bias=key_bias, seed=seed)
    once = disguise(layer, torch.Generator().manual_seed(seed + 1)).canonical()
    for name, value in once.canonical().tensors().items():
        assert_close(value, once.tensors()[name], **SAME)


@seeds
@pytest.mark.parametrize("part", ["Theta", "key_bias"])
@pytest.mark.parametrize(("gap", "heads"), [(0.5, 1), (2.0, 2)], ids=["within", "beyond"])
def test_near_equal_heads_are_merged_within_the_tolerance_only(part, gap, heads, seed):
    tolerance = 1e-6
    one = AttentionLayer.random(1, 4, key_bias=True, seed=seed)
    twin = getattr(one, part).clone()
    twin[(0,) * twin.ndim] += gap * tolerance * float(one.augmented.norm())
    near = replace(one, **{part: twin})
    both = AttentionLayer(torch.cat([one.Theta, near.Theta]), torch.cat([one.W, one.W]),
                          torch.cat([one.key_bias, near.key_bias]))
    found = both.canonical(tolerance)
    assert found.heads == heads
    if heads == 1:
        assert_close(found.W, 2 * one.W, **EXACT)


@seeds
@pytest.mark.parametrize(("weight", "heads"), [(0.5, 1), (2.0, 2)], ids=["within", "beyond"])
def test_quiet_heads_are_dropped_within_the_tolerance_only(weight, heads, seed):
    layer = AttentionLayer.random(2, 4, seed=seed)
    W = layer.W / layer.W.flatten(1).norm(dim=1).view(2, 1, 1)
    W[0] *= weight * 1e-6
    found = replace(layer, W=W).canonical(1e-6)
    assert found.heads == heads
    assert_close(found.Theta[0], layer.Theta[1], **SAME)


def test_heads_that_cancel_leave_one_silent_head():
    layer = AttentionLayer.random(1, 3, seed=0)
    both = AttentionLayer(layer.Theta.repeat(2, 1, 1), torch.cat([layer.W, -layer.W]))
    found = both.canonical()
    assert found.heads == 1
    assert (found(normal(2, 4, 3)) == 0).all()
