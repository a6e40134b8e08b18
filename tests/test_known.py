"""What is determined: ε against exact solves, against the truth, and never for a direction that labels do not
show."""

from __future__ import annotations

from dataclasses import replace

import torch

import headway as hw
from headway.certificates.accurate import Answers
from headway.certificates.bars import Tried
from headway.certificates.jacobian import sample
from headway.certificates.known import determined, known
from headway.certificates.newton import Newton
from headway.certificates.spectrum import Spectrum


def instance(seed=0, heads=2, width=6, count=300, length=5, **extra):
    layer = hw.AttentionLayer.random(heads=heads, width=width, seed=seed, **extra)
    return layer, hw.draw(layer, count=count, length=length, law="gaussian", seed=seed + 1000)


def asked(layer, data, seed=0):
    found = sample(layer, data, len(data), torch.float64)
    draw = torch.Generator().manual_seed(seed)
    newton = Newton(found, Spectrum.of(found, 0.99, draw, 200))
    return found, newton, Tried.of(found, newton, draw), draw


def nudged(layer, size, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def off(M):
        return M + size * torch.randn(M.shape, generator=draw, dtype=torch.float64)

    return replace(layer, Theta=off(layer.Theta), W=off(layer.W))


def still(layer, data):
    """Tokens that never leave a hyperplane, as behind a layer norm."""
    X = data.X.double() - data.X.double().mean(2, keepdim=True)
    return hw.Examples(X, layer(X))


def test_epsilon_is_that_of_exact_solves_on_a_sample_of_directions():
    layer, data = instance(1, heads=3)
    found, newton, tried, draw = asked(nudged(layer, 1e-6), data)
    heads = known(found, newton, tried, draw)
    C = torch.linalg.inv(found.normal[0])
    size = Answers.of(found).size + Answers.of(found).off
    ratios, each = [], layer.augmented[0].numel()
    for i, (theta, W) in enumerate(heads):
        block = C[i * each : (i + 1) * each, i * each : (i + 1) * each]
        for a in range(0, 7 if layer.key_bias is not None else 6, 2):
            for b in range(6):
                v = torch.outer(theta.left[:, a], theta.right[:, b]).flatten()
                exact = size * float(v @ block @ v) ** 0.5 / float(found.layer.augmented[i].norm())
                ratios.append(float(theta.epsilon[a, b]) / exact)
        at = found.theta_unknowns + i * layer.W[0].numel()
        block = C[at : at + layer.W[0].numel(), at : at + layer.W[0].numel()].view(6, 6, 6, 6)
        for a in range(6):
            v = W.left[:, a]
            exact = size * float(torch.einsum("p,poqo,q->o", v, block, v).mean()) ** 0.5 / float(layer.W[i].norm())
            ratios.append(float(W.epsilon[a]) / exact)
    assert 0.5 < min(ratios) and max(ratios) < 2.0, (min(ratios), max(ratios))


def test_the_learned_head_is_within_epsilon_of_the_true_one_where_it_is_called_known():
    for seed in range(2):
        layer, data = instance(seed, count=150)
        for examples in (data, still(layer, data)):
            near = nudged(layer, 1e-6, seed)
            if examples is not data:
                # Along what is never visited the layer may be anything.
                near = replace(near, Theta=near.Theta + 0.1)
            found, newton, tried, draw = asked(near, examples)
            for i, (theta, W) in enumerate(known(found, newton, tried, draw)):
                error = (theta.left.mT @ (near.Theta - layer.Theta)[i] @ theta.right).abs() / near.Theta[i].norm()
                sure = theta.epsilon < 1e-3
                assert float((error <= theta.epsilon)[sure].double().mean()) >= 0.99
                assert int((~sure).sum()) == (0 if examples is data else 11), "a row and a column are never visited"
                off = (W.left.mT @ (near.W - layer.W)[i]).norm(dim=1) / 6**0.5 / near.W[i].norm()
                assert bool((off <= W.epsilon).all())


def test_the_claim_says_how_much_of_each_head_is_known():
    layer, data = instance(2)
    found, newton, tried, draw = asked(layer, data)
    claim = determined(found, newton, tried, 1e-6, draw)
    assert claim.holds == "yes", claim
    assert "head 2: Θ all, W all" in claim.statement
    found, newton, tried, draw = asked(layer, still(layer, data))
    claim = determined(found, newton, tried, 1e-6, draw)
    assert claim.holds == "no"
    assert claim.numbers["theta_1_known"] == 25 / 36
    assert claim.numbers["w_1_known"] == 5 / 6


def test_heads_that_only_their_sum_shows_are_not_known():
    """Equal heads: their scores are known, and how they share their projections is not."""
    layer, data = instance(3)
    equal = replace(layer, Theta=layer.Theta[[0, 0]])
    data = hw.Examples(data.X, equal(data.X))
    found, newton, tried, draw = asked(equal, data)
    claim = determined(found, newton, tried, 1e-6, draw)
    assert claim.holds == "no"
    assert claim.numbers["theta_1_known"] == 1.0
    assert claim.numbers["w_1_known"] == claim.numbers["w_2_known"] == 0.0
    dead = replace(layer, W=torch.stack([layer.W[0], torch.zeros_like(layer.W[1])]))
    found, newton, tried, draw = asked(dead, hw.Examples(data.X, dead(data.X)))
    claim = determined(found, newton, tried, 1e-6, draw)
    assert claim.numbers["theta_1_known"] == 1.0
    assert claim.numbers["theta_2_known"] == 0.0
