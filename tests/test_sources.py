"""Where examples come from: a layer under a law, and a black box."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headway as hw
from headway.core.examples import BLOCK
from headway.core.layer import AttentionLayer
from headway.core.sources import draw, draw_batches

SAME = {"rtol": 0, "atol": 0}
EXACT = {"rtol": 1e-11, "atol": 1e-12}
VOCABULARY = np.array([[1.0, 2.0, 0.0], [0.5, -1.0, 3.0], [4.0, 0.0, -2.0]])
LAWS = {"boolean": "boolean", "gaussian": "gaussian", "vocabulary": VOCABULARY}
seeds = pytest.mark.parametrize("seed", [0, 1], ids="seed{}".format)
laws = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)


def layer(seed=0, **options):
    return AttentionLayer.random(2, 3, out_width=2, offset=True, seed=seed, **options)


# Drawing


@seeds
@laws
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_draw_labels_its_inputs_with_the_layer(law, mask, seed):
    truth = layer(mask=mask)
    data = draw(truth, 20, 5, law=law, seed=seed)
    assert (len(data), data.length, data.width, data.out_width) == (20, 5, 3, 2)
    assert (data.mask, data.dtype, data.device) == (mask, torch.float64, torch.device("cpu"))
    assert_close(data.Y, truth(data.X), **EXACT)


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_draw_labels_inputs_with_a_layer_in_factors(cross):
    form = hw.Form(rotary=hw.Rotary(), sight=hw.Sight(causal=True))
    truth = hw.FactoredLayer.random(2, 4, out_width=3, form=form, cross=cross)
    data = draw(truth, BLOCK + 5, 5, law="gaussian", noise=0.0)
    assert (data.mask, data.out_width, data.key_width) == ("causal", 3, 4 if cross else None)
    assert_close(data.Y, truth(data.X, **data.arguments()), **EXACT)
    placed = dataclasses.replace(truth, positions=[0.0, 0.5, 3.0, 4.0, 8.0, 9.0])
    far = draw(placed, 20, 5, law="gaussian")
    assert far.positions[3].tolist() == [0.0, 0.5, 3.0, 4.0, 8.0]
    assert_close(far.Y, truth(far.X, **far.arguments()), **EXACT)
    noisy = draw(truth, 2000, 5, noise=0.1)
    left = noisy.Y - truth(noisy.X, **noisy.arguments())
    assert float(left.std() / noisy.Y.square().mean().sqrt()) == pytest.approx(0.1, rel=0.05)


def test_draw_of_more_tokens_than_positions_is_refused(refused):
    truth = hw.FactoredLayer.random(2, 4, form=hw.Form(rotary=hw.Rotary()))
    with refused("length", "at most 3"):
        draw(dataclasses.replace(truth, positions=[0, 1, 2]), 10, 5)


@seeds
def test_the_laws_are_what_they_say(seed):
    signs = draw(layer(), 2000, 5, law="boolean", seed=seed).X
    assert signs.dtype == torch.int8
    assert set(signs.unique().tolist()) == {-1, 1}
    assert abs(float(signs.double().mean())) < 6 / signs.numel() ** 0.5

    bells = draw(layer(), 2000, 5, law="gaussian", seed=seed).X
    assert abs(float(bells.mean())) < 6 / bells.numel() ** 0.5
    assert abs(float(bells.var()) - 1) < 6 * (2 / bells.numel()) ** 0.5

    words = draw(layer(), 600, 5, law=VOCABULARY, seed=seed).X.reshape(-1, 3)
    found, counts = words.unique(dim=0, return_counts=True)
    assert_close(found, torch.as_tensor(VOCABULARY).unique(dim=0), **SAME)
    assert (abs(counts / 3000 - 1 / 3) < 6 * (2 / 9 / 3000) ** 0.5).all()


@laws
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_draw_is_its_seed(law, noise):
    one, two, other = (draw(layer(), 20, 5, law=law, noise=noise, seed=seed) for seed in (3, 3, 4))
    assert one.digest() == two.digest() != other.digest()
    assert not torch.equal(one.X, other.X)


def test_a_draw_leaves_the_global_generators_alone():
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    draw(layer(), 5, 4, noise=0.1)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


@seeds
@pytest.mark.parametrize("noise", [0.05, 0.5])
def test_noise_is_relative_to_the_root_mean_square_of_the_labels(noise, seed):
    truth = layer()
    noisy = draw(truth, 1500, 5, noise=noise, seed=seed)
    assert_close(noisy.X, draw(truth, 1500, 5, seed=seed).X, **SAME)
    clean = truth(noisy.X)
    level = (noisy.Y - clean).square().mean().sqrt() / clean.square().mean().sqrt()
    assert abs(float(level) / noise - 1) < 0.1
    assert abs(float((noisy.Y - clean).mean())) < 6 * float((noisy.Y - clean).std()) / noisy.Y.numel() ** 0.5


def test_blocks_are_what_draw_joins():
    count = BLOCK + 10
    blocks = list(draw_batches(layer(), count, 2, noise=0.1, seed=5))
    assert [len(block) for block in blocks] == [BLOCK, 10]
    whole = draw(layer(), count, 2, noise=0.1, seed=5)
    assert_close(whole.Y, torch.cat([block.Y for block in blocks]), **SAME)
    assert not torch.equal(blocks[0].X[:10], blocks[1].X)


def test_a_float32_layer_gives_float32_labels():
    data = draw(layer(dtype=torch.float32), 5, 4, law="gaussian", noise=0.1)
    assert (data.X.dtype, data.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("count", 0, "0"),
        ("length", 2.5, "2.5"),
        ("noise", -0.1, "-0.1"),
        ("noise", float("nan"), "nan"),
        ("seed", -1, "-1"),
        ("law", "cauchy", "'cauchy'"),
        ("law", None, "NoneType"),
        ("law", np.ones((4, 2)), "shape (4, 2)"),
        ("law", np.ones((0, 3)), "(0, 3)"),
        ("law", np.array([[1.0, np.nan, 0.0]]), "nan at index (0, 1)"),
    ],
    ids=["count", "length", "noise", "noise_nan", "seed", "law", "law_none", "law_width", "law_empty",
         "law_nan"],
)
def test_draw_refuses(refused, name, value, word):
    with refused(name, word):
        draw(layer(), **{"count": 4, "length": 3, name: value})


# Asking


@laws
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_asking_a_layer_gives_what_drawing_from_it_gives(law, mask):
    truth = layer(mask=mask)
    count = BLOCK + 7
    asked = hw.ask(truth, count, 4, 3, law=law, mask=mask, seed=5)
    assert asked.digest() == draw(truth, count, 4, law=law, seed=5).digest()
    assert asked.digest() != hw.ask(truth, count, 4, 3, law=law, mask=mask, seed=6).digest()


@pytest.mark.parametrize(("width", "length", "count"), [(3, 4, 2000), (40, 2, 8000), (31, 3, 3204)])
def test_the_count_grows_with_the_square_of_the_width(width, length, count):
    data = hw.ask(lambda X: X[..., :1], length=length, width=width)
    assert (len(data), data.length, data.width, data.out_width) == (count, length, width, 1)


def test_sixteen_tokens_if_nothing_is_said():
    assert hw.ask(lambda X: X, 3, width=2).length == 16


def test_the_width_is_read_off_a_module_or_a_vocabulary():
    module = nn.MultiheadAttention(6, 2, dtype=torch.float64)
    assert hw.ask(module, 5, 3).width == 6
    assert hw.ask(lambda X: X, 5, 4, law=VOCABULARY).width == 3


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_a_module_answers_as_the_layer_it_is(batch_first, mask):
    module = nn.MultiheadAttention(6, 2, batch_first=batch_first, dtype=torch.float64)
    data = hw.ask(module, 20, 5, law="gaussian", mask=mask)
    known = hw.from_torch(module, causal=mask == "causal")
    assert data.mask == mask
    assert_close(data.Y, known(data.X), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("law", ["boolean", "gaussian"])
def test_a_module_is_asked_in_the_precision_of_its_parameters(dtype, law):
    shown = set()

    class Box(nn.Linear):
        def forward(self, X):
            shown.add(X.dtype)
            return super().forward(X)

    data = hw.ask(Box(4, 2, dtype=dtype), 5, 3, 4, law=law)
    assert shown == {dtype}
    assert data.dtype == dtype
    assert data.X.dtype == (torch.int8 if law == "boolean" else dtype)
    assert not data.Y.requires_grad


def test_a_float32_function_without_parameters_is_asked_in_float32():
    weight = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    data = hw.ask(lambda X: X @ weight, 50, 3, 4, law="gaussian", dtype=torch.float32)
    assert (data.X.dtype, data.dtype) == (torch.float32, torch.float32)
    assert_close(data.Y, data.X @ weight)


PRODUCTS = {"matmul": torch.matmul, "linear": lambda X, w: nn.functional.linear(X, w.T),
            "einsum": lambda X, w: torch.einsum("nkd,de->nke", X, w)}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_another_dtype_is_refused_by_name_with_the_one_that_works(refused, product):
    weight = torch.eye(4)
    with refused("dtype", "got torch.float64", "headway.ask", "dtype=torch.float32"):
        hw.ask(lambda X: product(X, weight), 5, 3, 4)


def test_another_dtype_than_the_parameters_is_refused(refused):
    with refused("dtype", "got torch.float32", "dtype=torch.float64"):
        hw.ask(nn.MultiheadAttention(4, 2, dtype=torch.float64), 5, 3, dtype=torch.float32)


def test_a_fault_of_the_oracle_is_its_own():
    def broken(X):
        raise RuntimeError("no such type of thing")

    with pytest.raises(RuntimeError, match="no such type of thing"):
        hw.ask(broken, 5, 3, 4)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        hw.ask(nn.Linear(5, 2, dtype=torch.float64), 5, 3, 4)


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (lambda X: X.sum(1), "shape (5, 3, e)"),
        (lambda X: X.transpose(0, 1), "shape (3, 5, 4)"),
        (lambda X: X[:, :2], "shape (5, 2, 4)"),
        (lambda X: X[1:], "shape (4, 3, 4)"),
        (lambda X: X[..., :0], "at least one output column"),
        (lambda X: X / 0, "finite numbers"),
        (lambda X: X * torch.nan, "nan at index (0, 0, 0)"),
        (lambda X: None, "NoneType"),
        (lambda X: (X, None), "tuple"),
        (lambda X: {"Y": X}, "dict"),
        (lambda X: "Y", "str"),
        (lambda X: X > 0, "bool"),
        (lambda X: X.to(torch.complex128), "complex"),
    ],
    ids=["summed", "transposed", "short", "few", "empty", "inf", "nan", "none", "tuple", "dict", "word", "bool",
         "complex"],
)
def test_an_answer_that_is_no_output_is_refused(refused, answer, word):
    with refused("the oracle's answer", word):
        hw.ask(answer, 5, 3, 4)


@pytest.mark.parametrize("several", [lambda X: (X, None), lambda X: (X, X), lambda X: {"Y": X}],
                         ids=["tuple", "pair", "dict"])
def test_of_several_answers_one_is_to_be_chosen(refused, several):
    with refused("the oracle's answer", "one tensor", "module(X)[0]"):
        hw.ask(several, 5, 3, 4)


def test_a_nan_that_comes_late_is_refused_too(refused):
    def box(X):
        return X * (torch.nan if len(X) > 8 else 1.0)

    with refused("the oracle's answer", "nan"):
        hw.ask(box, 20, 3, 4)


def test_an_oracle_that_changes_its_mind_is_refused(refused):
    draw = torch.Generator().manual_seed(0)
    with refused("oracle", "two that differ"):
        hw.ask(lambda X: X + 1e-3 * torch.randn(X.shape, generator=draw, dtype=X.dtype), 5, 3, 4)
    with refused("oracle", "module.eval()"):
        hw.ask(nn.MultiheadAttention(8, 2, dropout=0.5), 50)


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("oracle", {"oracle": "layer"}, "str"),
        ("count", {"count": 0}, "0"),
        ("length", {"length": 2.5}, "2.5"),
        ("width", {"width": None}, "width=64"),
        ("width", {"width": "4"}, "'4'"),
        ("law", {"law": "bolean"}, "'bolean'"),
        ("law", {"law": VOCABULARY}, "shape (v, 4)"),
        ("law", {"law": [1.0, 2.0], "width": None}, "shape (2,)"),
        ("mask", {"mask": "both"}, "'both'"),
        ("seed", {"seed": -1}, "-1"),
        ("fresh", {"fresh": -1}, "-1"),
        ("fresh", {"fresh": "yes"}, "'yes'"),
        ("dtype", {"dtype": torch.int8}, "torch.int8"),
        ("dtype", {"dtype": "float32"}, "float32"),
        ("device", {"device": "nowhere"}, "'nowhere'"),
        ("module", {"oracle": nn.MultiheadAttention(8, 2, kdim=4, vdim=4)}, "kdim 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ask_refuses(refused, name, change, word):
    asked = []
    given = {"oracle": lambda X: asked.append(X) or X, "count": 4, "length": 3, "width": 4, **change}
    with refused(name, word):
        hw.ask(given.pop("oracle"), **given)
    assert not asked, "what is refused is refused before the oracle is asked"


@pytest.mark.parametrize("law", [*LAWS.values()], ids=LAWS)
def test_fresh_answers_are_the_same_examples_and_can_be_added_to(law):
    truth, count = layer(), BLOCK + 5
    plain = hw.ask(truth, count, 4, 3, law=law, seed=5)
    assert type(plain) is hw.Examples
    fresh = hw.ask(truth, count, 4, 3, law=law, seed=5, fresh=True)
    assert fresh.digest() == plain.digest()
    assert fresh.fresh is None and hw.ask(truth, 5, 4, 3, law=law, fresh=7).fresh == 7
    more = fresh.to(fresh.inputs(20, 3, 0))
    assert (len(more), more.length, more.width, more.out_width) == (20, 4, 3, 2)
    assert (more.dtype, more.X.dtype) == (plain.dtype, plain.X.dtype)
    assert_close(more.Y, truth(more.X), **EXACT)
    assert type(fresh.take([0, 1])) is hw.Examples


def test_a_law_says_how_many_sequences_it_has():
    counts = [hw.ask(lambda X: X, 2, k, 3, law=law, fresh=1).law.sequences
              for k, law in ((4, "boolean"), (5, VOCABULARY), (4, "gaussian"), (1000, "boolean"))]
    assert counts == [2**12, 3**5, float("inf"), float("inf")]


def test_an_answer_that_changes_its_width_is_refused(refused):
    with refused("the oracle's answer", "shape (9, 3, 4)", "shape (9, 3, 3)"):
        hw.ask(lambda X: X[..., : 3 if len(X) == 9 else 4], BLOCK + 9, 3, 4)


def test_an_oracle_may_work_in_place_and_answer_in_a_buffer():
    count = BLOCK + 9
    plain = hw.ask(lambda X: 2 * X, count, 3, 4, law="gaussian")
    assert hw.ask(lambda X: X.mul_(2), count, 3, 4, law="gaussian").digest() == plain.digest()
    buffer = torch.empty(BLOCK, 3, 4, dtype=torch.float64)

    def answer(X):
        return buffer[: len(X)].copy_(2 * X)

    assert hw.ask(answer, count, 3, 4, law="gaussian").digest() == plain.digest()
    counter = iter(range(9))
    with pytest.raises(hw.InputError, match="two that differ"):
        hw.ask(lambda X: answer(X + next(counter)), 5, 3, 4)


def test_asking_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    hw.ask(lambda X: X, 5, 3, 4, law="gaussian")
    assert torch.equal(torch.get_rng_state(), state)
