"""Error bars: by products as by the dense Jacobian; above the errors that noise makes; no answer where it is no
noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import headway as hw
from headway.certificates.bars import Tried, error_bars, error_bars_by_products
from headway.certificates.jacobian import sample
from headway.certificates.newton import Newton
from headway.certificates.spectrum import Spectrum

CASES = [{}, {"key_bias": True, "offset": True}, {"mask": "causal"}]


def instance(seed=0, heads=2, width=6, count=300, length=5, noise=0.0, **extra):
    layer = hw.AttentionLayer.random(heads=heads, width=width, seed=seed, **extra)
    return layer, hw.draw(layer, count=count, length=length, law="gaussian", noise=noise, seed=seed + 1000)


def by_products(layer, data, seed=0):
    found = sample(layer, data, len(data), torch.float64)
    draw = torch.Generator().manual_seed(seed)
    newton = Newton(found, Spectrum.of(found, 0.99, draw, 200))
    return error_bars_by_products(found, Tried.of(found, newton, draw), 0.99)


def nudged(layer, size, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def off(M):
        return M + size * torch.randn(M.shape, generator=draw, dtype=torch.float64)

    return replace(layer, Theta=off(layer.Theta), W=off(layer.W))


@pytest.mark.parametrize("extra", CASES)
def test_products_give_the_bars_of_the_dense_jacobian(extra):
    layer, data = instance(1, noise=0.01, **extra)
    layer = nudged(layer, 1e-3)
    one, other = error_bars(sample(layer, data, len(data), torch.float64)), by_products(layer, data)
    assert one.holds == other.holds == "yes"
    assert one.numbers["noise"] == pytest.approx(other.numbers["noise"], rel=1e-3)
    for i in (1, 2):
        for name in (f"theta_{i}", f"w_{i}"):
            # Three standard errors are in the second, and few probes are as far off themselves.
            assert 0.9 < other.numbers[name] / one.numbers[name] < 1.7, name
            at_most = f"{name}_at_most"
            assert 0.9 < other.numbers[at_most] / one.numbers[at_most] < 2.5, name


@pytest.mark.parametrize("dense", [True, False])
def test_every_head_is_as_near_as_told(dense):
    """Layers off by as much as noise would have them, and by more: all bounds of one hold but once in a hundred
    times."""
    failed = 0
    for seed in range(20 if dense else 5):
        layer, data = instance(seed, count=120, noise=0.01)
        for size in (3e-4, 3e-3):
            near = nudged(layer, size, seed)
            found = sample(near, data, len(data), torch.float64)
            claim = error_bars(found) if dense else by_products(near, data, seed)
            assert claim.holds == "yes", claim
            for name, parts in (("theta", (near.Theta, layer.Theta)), ("w", (near.W, layer.W))):
                away = (parts[0] - parts[1]).flatten(1).norm(dim=1) / parts[0].flatten(1).norm(dim=1)
                failed += sum(float(away[i]) > claim.numbers[f"{name}_{i + 1}_at_most"] for i in range(2))
    assert failed == 0


@pytest.mark.parametrize("dense", [True, False])
def test_what_is_no_noise_around_a_layer_of_this_shape_is_not_called_so(dense):
    def claim(layer, data):
        return error_bars(sample(layer, data, len(data), torch.float64)) if dense else by_products(layer, data)

    layer, data = instance(3, noise=0.01)
    assert claim(layer, data).holds == "yes"
    fewer = hw.AttentionLayer(layer.Theta[:1], layer.W[:1])
    dropped = claim(fewer, data)
    assert dropped.holds == "undecided"
    assert "order" in dropped.reason or "answers to the inputs" in dropped.reason
    far = claim(replace(layer, Theta=layer.Theta.flip(0)), data)
    assert far.holds == "undecided"
    flipped = hw.Examples(data.X, data.Y + 0.3 * data.X.double().roll(1, 1))
    assert claim(layer, flipped).holds == "undecided"
    few = claim(layer, data.take(range(4)))
    assert few.holds == "undecided"
    assert "estimate the noise" in few.reason


def test_filling_counts_for_nothing():
    layer, data = instance(4, count=150, noise=0.01)
    padding = torch.zeros(150, 5, dtype=torch.bool)
    padding[::2, 3:] = True
    padded = hw.Examples(data.X.double(), layer(data.X, padding) + (data.Y - layer(data.X)), padding)
    one, other = error_bars(sample(layer, padded, 150, torch.float64)), by_products(layer, padded)
    assert one.holds == other.holds == "yes"
    assert one.numbers["noise"] == pytest.approx(other.numbers["noise"], rel=1e-3)


def test_few_rows_never_pass_a_missing_head_for_noise():
    """From ten sequences of six tokens one did: more are taken where there are more, else nothing is said."""
    truth = hw.AttentionLayer.random(2, 6, seed=7018)
    data = hw.draw(truth, count=500, length=6, law="gaussian", seed=8018)
    fewer = replace(truth, Theta=truth.Theta[1:], W=truth.W[1:])
    assert hw.certify(fewer, data)["error bars"].holds == "undecided"
    few = hw.certify(fewer, data, sequences=15)["error bars"]
    assert few.holds == "undecided"
    noisy = hw.draw(truth, count=500, length=6, law="gaussian", noise=0.01, seed=8018)
    assert hw.certify(truth, noisy)["error bars"].holds == "yes"
    short = hw.certify(truth, noisy, sequences=40)["error bars"]
    assert short.holds == "undecided"
    assert "240 rows are too few" in short.reason
