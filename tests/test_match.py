from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import headway as hw
from headway.core.layer import AttentionLayer
from headway.core.match import match

INF = float("inf")
seeds = pytest.mark.parametrize("seed", [0, 1, 2], ids="seed{}".format)


def pick(layer, order):
    bias = None if layer.key_bias is None else layer.key_bias[order]
    return replace(layer, Theta=layer.Theta[order], W=layer.W[order], key_bias=bias)


def inverse(order):
    """order[i] is the true head at learned place i; its inverse is the learned place of true head i."""
    return tuple(order.index(i) for i in range(len(order)))


def full(heads=4, seed=0):
    return AttentionLayer.random(heads, 5, out_width=3, key_bias=True, offset=True, seed=seed)


@seeds
def test_a_permuted_layer_matches_exactly(seed):
    truth = full(seed=seed)
    found = match(pick(truth, [2, 0, 3, 1]), truth)
    assert found.order == (1, 3, 0, 2)
    assert found.theta_error == found.w_error == (0.0,) * 4
    assert (found.missing, found.excess, found.offset_error, found.worst) == ((), (), 0.0, 0.0)


@given(data=st.data(), heads=st.integers(1, 6), seed=st.integers(0, 2**32), biased=st.booleans())
def test_errors_are_the_planted_ones(data, heads, seed, biased):
    order = data.draw(st.permutations(range(heads)))
    sizes = st.lists(st.floats(1e-9, 0.05), min_size=heads, max_size=heads)
    theta_size, w_size = data.draw(sizes), data.draw(sizes)
    truth = AttentionLayer.random(heads, 5, key_bias=biased, offset=True, seed=seed)
    other = AttentionLayer.random(heads, 5, key_bias=biased, seed=seed + 1)

    def planted(part, noise, size):
        flat = part.flatten(1)
        direction = noise.flatten(1) / noise.flatten(1).norm(dim=1, keepdim=True)
        scale = torch.tensor(size, dtype=torch.float64) * flat.norm(dim=1)
        return (flat + scale.unsqueeze(1) * direction).view_as(part)

    A = planted(truth.augmented, other.augmented, theta_size)
    learned = replace(truth, Theta=A[:, :5], W=planted(truth.W, other.W, w_size),
                      key_bias=A[:, 5] if biased else None)
    found = match(pick(learned, order), truth)
    assert found.order == inverse(order)
    assert_close(torch.tensor(found.theta_error), torch.tensor(theta_size), rtol=1e-5, atol=1e-14)
    assert_close(torch.tensor(found.w_error), torch.tensor(w_size), rtol=1e-5, atol=1e-14)
    assert found.worst == max(*found.theta_error, *found.w_error)
    assert (found.missing, found.excess, found.offset_error) == ((), (), 0.0)


@seeds
@pytest.mark.parametrize("part", ["Theta", "W", "key_bias"])
@pytest.mark.parametrize("head", [0, 3], ids="head{}".format)
def test_one_wrong_entry_shows_in_exactly_that_head(part, head, seed):
    truth = full(seed=seed)
    value = getattr(truth, part).clone()
    value[(head,) + (1,) * (value.ndim - 1)] += 1e-3
    found = match(pick(replace(truth, **{part: value}), [2, 0, 3, 1]), truth)
    wrong, right = found.w_error, found.theta_error
    whole = truth.W[head]
    if part != "W":
        wrong, right = right, wrong
        whole = truth.augmented[head]
    assert found.order == (1, 3, 0, 2)
    assert right == (0.0,) * 4
    assert [i for i, error in enumerate(wrong) if error] == [head]
    assert wrong[head] == pytest.approx(1e-3 / float(whole.norm()), rel=1e-9)
    assert found.worst == wrong[head]


@seeds
def test_missing_heads(seed):
    truth = full(seed=seed)
    found = match(pick(truth, [3, 1]), truth)
    assert (found.order, found.missing, found.excess) == ((-1, 1, -1, 0), (0, 2), ())
    assert found.theta_error == found.w_error == (INF, 0.0, INF, 0.0)
    assert found.worst == INF


@seeds
def test_heads_in_excess(seed):
    learned = full(seed=seed)
    found = match(learned, pick(learned, [3, 1]))
    assert (found.order, found.missing, found.excess) == ((3, 1), (), (0, 2))
    assert found.theta_error == found.w_error == (0.0, 0.0)
    assert found.worst == INF


def test_one_hopeless_head_does_not_decide_the_others():
    truth = full()
    Theta = truth.Theta.clone()
    Theta[1] *= -1e6
    found = match(pick(replace(truth, Theta=Theta), [2, 0, 3, 1]), truth)
    assert found.order == (1, 3, 0, 2)
    assert found.theta_error[0] == found.theta_error[2] == found.theta_error[3] == 0.0
    assert found.theta_error[1] > 1e5


@seeds
def test_an_absent_key_bias_is_a_zero_one(seed):
    bare = replace(full(seed=seed), key_bias=None)
    zero = replace(bare, key_bias=torch.zeros(4, 5, dtype=torch.float64))
    assert match(bare, zero).worst == match(zero, bare).worst == 0.0
    biased = full(seed=seed)
    expected = biased.key_bias.norm(dim=1) / biased.augmented.flatten(1).norm(dim=1)
    assert match(bare, biased).theta_error == pytest.approx(expected.tolist(), rel=1e-12)


@seeds
def test_the_offset_error_is_relative_to_the_larger_of_offset_and_projections(seed):
    truth = full(seed=seed)
    moved = replace(truth, offset=truth.offset + torch.tensor([0.0, 3e-3, 4e-3]))
    size = max(float(truth.offset.norm()), float(truth.W.flatten(1).norm(dim=1).max()))
    assert match(moved, truth).offset_error == pytest.approx(5e-3 / size, rel=1e-6)
    assert match(moved, truth).worst == match(moved, truth).offset_error
    absent = match(replace(truth, offset=None), truth)
    assert absent.offset_error == pytest.approx(float(truth.offset.norm()) / size, rel=1e-9)


def test_layers_of_two_dtypes_are_compared_in_float64():
    truth = full()
    found = match(truth.to(torch.float32), truth)
    assert found.order == (0, 1, 2, 3)
    assert 0 < found.worst < 1e-6


def test_layers_of_two_shapes_are_refused(refused):
    with refused("learned", "5 → 3", "5 → 5"):
        match(AttentionLayer.random(4, 5), full())


def test_layers_of_two_masks_are_refused(refused):
    with refused("learned", "causal"):
        match(replace(full(), mask="causal"), full())


def test_equal_functions_are_the_same_whatever_the_order_and_the_spelling():
    layer = hw.AttentionLayer.random(heads=3, width=5, key_bias=True, offset=True, seed=4)
    A, B = layer.W[2] * 0.3, layer.W[2] * 0.7
    split = hw.AttentionLayer(layer.Theta[[2, 0, 2, 1]], torch.stack([A, layer.W[0], B, layer.W[1]]),
                              layer.key_bias[[2, 0, 2, 1]], layer.offset)
    found = hw.compare(split, layer)
    assert found.same, found
    assert found.largest < 1e-15
    plain = hw.AttentionLayer(layer.Theta, layer.W)
    spelled = hw.AttentionLayer(layer.Theta, layer.W, torch.zeros(3, 5).double(), torch.zeros(5).double())
    assert hw.compare(plain, spelled).where == "3 heads agree exactly"


@pytest.mark.parametrize(("part", "words"), [
    ("Theta", "Θ of head"), ("W", "W of head"), ("key_bias", "u of head"), ("offset", "the offset")])
def test_a_difference_is_located(part, words):
    layer = hw.AttentionLayer.random(heads=3, width=5, key_bias=True, offset=True, seed=4).canonical()
    changed = getattr(layer, part).clone()
    changed.view(-1)[3] += 1e-4
    found = hw.compare(replace(layer, **{part: changed}), layer)
    assert not found.same
    assert words in found.where
    if part != "offset":
        assert "head 1 against head 1" in found.where
        assert "entry 4" in found.where or "entry (1, 4)" in found.where
        assert "1.0e-04" in found.where
    assert 1e-6 < found.largest < 1e-3
    assert hw.compare(replace(layer, **{part: changed}), layer, tolerance=1e-2).same


def test_a_missing_head_and_another_shape():
    layer = hw.AttentionLayer.random(heads=3, width=5, seed=4)
    fewer = hw.AttentionLayer(layer.Theta[:2], layer.W[:2])
    found = hw.compare(layer, fewer)
    assert not found.same
    assert found.largest == float("inf")
    assert "3 heads against 2" in str(found)
    with pytest.raises(hw.InputError, match="width"):
        hw.compare(layer, hw.AttentionLayer.random(heads=3, width=6, seed=4))


def test_the_figure_of_who_matches_whom_has_room_for_every_head():
    plot = pytest.importorskip("headway.report.figures", reason="figures need matplotlib")
    import matplotlib.pyplot as plt

    order = torch.arange(19, -1, -1)
    layer = AttentionLayer.random(heads=24, width=4, seed=0)
    axis = plot.plot_match(AttentionLayer(layer.Theta[order], layer.W[order]), layer)
    axis.figure.canvas.draw()
    assert {text.get_position() for text in axis.texts} == {(j, 19 - j) for j in range(20)}
    assert min(text.get_fontsize() for text in axis.texts) > 4
    for labels, count in ((axis.get_xticklabels(), 20), (axis.get_yticklabels(), 24)):
        boxes = [label.get_window_extent() for label in labels]
        assert len(boxes) == count
        assert not any(one.overlaps(other) for one, other in pairwise(boxes))
    plt.close(axis.figure)
