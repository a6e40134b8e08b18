"""Layers as they are shipped, to this form and back, against the modules' own forward in float64."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import headway as hw
from headway.core.convert import factored, key_groups, ranks, unfactored

X = torch.randn(5, 7, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def attention(seed=0, bias=True, width=12, heads=3, batch_first=True):
    torch.manual_seed(seed)
    module = nn.MultiheadAttention(width, heads, bias=bias, batch_first=batch_first, dtype=torch.float64).eval()
    if bias:
        with torch.no_grad():
            module.in_proj_bias.normal_()
            module.out_proj.bias.normal_()
    return module


def outputs(module, X, causal=False):
    k = X.shape[1]
    mask = torch.ones(k, k, dtype=torch.bool).triu(1) if causal else None
    with torch.no_grad():
        if module.batch_first:
            return module(X, X, X, attn_mask=mask, need_weights=False)[0]
        Z = X.transpose(0, 1)
        return module(Z, Z, Z, attn_mask=mask, need_weights=False)[0].transpose(0, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("bias", "batch_first"), [(True, True), (False, True), (True, False)])
def test_a_module_and_its_layer_are_one_function(bias, batch_first, causal):
    module = attention(1, bias, batch_first=batch_first)
    layer = hw.from_torch(module, causal=causal)
    assert (layer.heads, layer.mask) == (3, "causal" if causal else "none")
    torch.testing.assert_close(layer(X), outputs(module, X, causal), rtol=0, atol=1e-12)
    assert ranks(layer) == (4, 4)


def test_an_encoder_layer_gives_its_attention():
    torch.manual_seed(2)
    block = nn.TransformerEncoderLayer(12, 3, batch_first=True, dtype=torch.float64).eval()
    torch.testing.assert_close(hw.from_torch(block)(X), outputs(block.self_attn, X), rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_there_and_back_again(bias):
    module = attention(3, bias)
    again = hw.to_torch(hw.from_torch(module), head_dim=4)
    torch.testing.assert_close(outputs(again, X), outputs(module, X), rtol=0, atol=1e-12)
    assert again.num_heads == 3
    # Fewer heads than fit: the rest stay silent.
    one = hw.from_torch(module)
    short = hw.AttentionLayer(one.Theta[:2], one.W[:2], None if one.key_bias is None else one.key_bias[:2])
    torch.testing.assert_close(outputs(hw.to_torch(short, head_dim=4), X), short(X), rtol=0, atol=1e-12)


def test_learned_heads_work_inside_torch():
    module = attention(4, width=8, heads=2)
    law = hw.from_torch(module)
    fit = hw.learn(hw.draw(law, count=600, length=6, seed=1))
    assert fit.status.kind == "recovered"
    Z = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    again = hw.to_torch(fit.layer, head_dim=4)
    torch.testing.assert_close(outputs(again, Z), outputs(module, Z), rtol=0, atol=1e-9)


def test_grouped_queries_share_their_keys_and_are_recognised():
    draw = torch.Generator().manual_seed(6)
    Q, O = (torch.randn(12, 12, generator=draw, dtype=torch.float64) for _ in range(2))  # noqa: E741
    K, V = (torch.randn(6, 12, generator=draw, dtype=torch.float64) for _ in range(2))
    layer = hw.from_weights(Q, K, V, O, heads=4)
    expected = torch.zeros(5, 7, 12, dtype=torch.float64)
    for i in range(4):
        g = i // 2
        q, k, v = X @ Q[3 * i : 3 * i + 3].T, X @ K[3 * g : 3 * g + 3].T, X @ V[3 * g : 3 * g + 3].T
        expected += torch.softmax(q @ k.mT / math.sqrt(3), 2) @ v @ O[:, 3 * i : 3 * i + 3].T
    torch.testing.assert_close(layer(X), expected, rtol=0, atol=1e-12)
    assert key_groups(layer) == [[0, 1], [2, 3]]
    assert key_groups(hw.from_torch(attention(7))) == [[0], [1], [2]]
    assert key_groups(hw.AttentionLayer.random(heads=2, width=4, seed=0)) == [[0], [1]]


def bert(module, prefix=""):
    Q, K, V = module.in_proj_weight.detach().chunk(3)
    b = module.in_proj_bias.detach().chunk(3)
    stem = f"{prefix}encoder.layer.1.attention."
    named = {"self.query": (Q, b[0]), "self.key": (K, b[1]), "self.value": (V, b[2]),
             "output.dense": (module.out_proj.weight.detach(), module.out_proj.bias.detach())}
    return {f"{stem}{name}.{part}": t.contiguous().clone() for name, pair in named.items()
            for part, t in zip(("weight", "bias"), pair, strict=True)}


def gpt2(module, prefix="transformer."):
    stem = f"{prefix}h.1.attn."
    return {f"{stem}c_attn.weight": module.in_proj_weight.detach().T.contiguous(),
            f"{stem}c_attn.bias": module.in_proj_bias.detach().clone(),
            f"{stem}c_proj.weight": module.out_proj.weight.detach().T.contiguous(),
            f"{stem}c_proj.bias": module.out_proj.bias.detach().clone()}


@pytest.mark.parametrize(("names", "causal"), [(bert, False), (lambda m: bert(m, "bert."), False), (gpt2, True)])
def test_checkpoints_are_read(tmp_path, names, causal):
    module = attention(8)
    save_file(names(module), tmp_path / "model.safetensors")
    layer = hw.from_checkpoint(tmp_path / "model.safetensors", 1, heads=3)
    torch.testing.assert_close(layer(X), outputs(module, X, causal), rtol=0, atol=1e-12)


def test_what_cannot_be_represented_is_refused_by_name(tmp_path, refused):
    with refused("module", "dropout 0.1", "eval()"):
        hw.from_torch(nn.MultiheadAttention(12, 3, dropout=0.1).train())
    with refused("module", "extra key"):
        hw.from_torch(nn.MultiheadAttention(12, 3, add_bias_kv=True).eval())
    with refused("module", "kdim 5"):
        hw.from_torch(nn.MultiheadAttention(12, 3, kdim=5).eval())
    with refused("module", "nn.MultiheadAttention", "Linear"):
        hw.from_torch(nn.Linear(3, 3))
    rotary = {"encoder.layer.1.attention.rotary.freqs": torch.ones(3)}
    save_file({**bert(attention(9)), **rotary}, tmp_path / "r.safetensors")
    with refused(str(tmp_path / "r.safetensors"), "rotary positions"):
        hw.from_checkpoint(tmp_path / "r.safetensors", 1, heads=3)
    save_file(bert(attention(9)), tmp_path / "b.safetensors")
    with refused(str(tmp_path / "b.safetensors"), "attention number 7; got number 1 alone"):
        hw.from_checkpoint(tmp_path / "b.safetensors", 7, heads=3)
    for wrong in (3, None, nn.Linear(2, 2)):
        with refused("layer", f"an AttentionLayer or a FactoredLayer; got {type(wrong).__name__}"):
            hw.to_torch(wrong)
    with refused("dtype", "a dtype of torch; got 'float32'"):
        hw.to_torch(hw.AttentionLayer.random(heads=1, width=4, seed=0), dtype="float32")
    with refused("heads", "a divisor of 12"):
        hw.from_checkpoint(tmp_path / "b.safetensors", 1, heads=5)


def test_a_rank_that_does_not_fit_is_refused_with_its_value(refused):
    layer = hw.AttentionLayer.random(heads=2, width=12, rank=5, seed=0)
    with refused("head_dim", "at least 5, the rank of the attention matrices", "headway.replace"):
        hw.to_torch(layer, head_dim=4)
    with refused("head_dim", "at least 12, the rank of the projections", "headway.replace"):
        hw.to_torch(layer, head_dim=6)
    thin = hw.AttentionLayer(layer.Theta, layer.W @ layer.W[0, :, :2] @ layer.W[1, :2])
    with refused("head_dim", "at least 5", "Try: head_dim=6."):
        hw.to_torch(thin, head_dim=4)
    with refused("head_dim", "divisor of 12"):
        hw.to_torch(layer, head_dim=5)
    with refused("layer", "as many outputs"):
        hw.to_torch(hw.AttentionLayer.random(heads=2, width=12, out_width=3, seed=0), head_dim=6)


def test_a_layer_known_to_single_precision_becomes_a_module_of_its_own_size():
    torch.manual_seed(11)
    module = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    exact = hw.from_torch(module).to(torch.float64)
    draw = torch.Generator().manual_seed(0)
    near = hw.AttentionLayer(*(part * (1 + 1e-6 * torch.randn(part.shape, generator=draw, dtype=torch.float64))
                               for part in (exact.Theta, exact.W)), exact.key_bias, exact.offset)
    with pytest.raises(hw.InputError, match=r"at least 16, the rank of the attention matrices; got 4, with .* Try: "
                                            r"tolerance=\d?e-06, if that may be left out"):
        hw.to_torch(near)
    status = hw.Status("recovered", "")
    fit = hw.Fit(near, status, {"held_out_error": 1e-6}, ())
    again = hw.to_torch(fit, dtype=torch.float32)
    assert (again.num_heads, again.in_proj_weight.dtype) == (4, torch.float32)
    Z = X[..., :8].repeat(1, 1, 2).float()
    torch.testing.assert_close(outputs(again, Z), outputs(module, Z), rtol=0, atol=1e-5)
    assert hw.to_torch(exact.to(torch.float32)).head_dim == 4  # what single precision leaves is not asked for


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_module_is_learned_as_a_black_box_and_built_again(batch_first):
    module = attention(8, width=16, heads=2, batch_first=batch_first)
    fit = hw.learn(hw.ask(module, length=8))
    assert fit.status.kind == "recovered"
    again = hw.to_torch(fit.layer, head_dim=8)
    Z = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(outputs(again, Z), outputs(module, Z), rtol=0, atol=1e-9)


def test_any_function_is_asked_random_inputs_only():
    layer = hw.AttentionLayer.random(heads=2, width=6, mask="causal", seed=4)
    asked = []

    def box(X):
        asked.append(X)
        return layer(X).numpy()

    fit = hw.learn(hw.ask(box, 600, 5, 6, mask="causal"))
    assert fit.status.kind == "recovered"
    assert hw.match(fit.layer, layer).worst < 1e-9
    assert all(bool((X.abs() == 1).all()) for X in asked), "±1 tokens and nothing else"
    words = torch.randn(40, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert hw.match(hw.learn(hw.ask(box, law=words, length=5, mask="causal")).layer, layer).worst < 1e-9


def test_a_black_box_is_asked_before_it_is_learned(refused):
    with refused("examples", "headway.ask"):
        hw.learn(hw.AttentionLayer.random(heads=1, width=4, seed=0))


def test_a_causal_module_is_asked_with_its_mask():
    module = attention(9, width=8, heads=2)
    fit = hw.learn(hw.ask(module, length=6, mask="causal"), heads=2)
    assert fit.status.kind == "recovered"
    torch.testing.assert_close(fit.layer(X[..., :8]), outputs(module, X[..., :8], causal=True), rtol=0, atol=1e-9)


def test_learned_heads_come_factored_and_shared_keys_are_seen():
    draw = torch.Generator().manual_seed(5)
    w = [torch.randn(rows, 16, generator=draw, dtype=torch.float64) / 4 for rows in (16, 8, 8)]
    out = torch.randn(16, 16, generator=draw, dtype=torch.float64) / 4
    layer = hw.from_weights(*w, out, heads=4, query_bias=torch.ones(16, dtype=torch.float64))
    fit = hw.learn(hw.draw(layer, count=3000, length=8, seed=6))
    assert fit.status.kind == "recovered"
    groups = fit.stats["key_groups"]
    order = hw.match(fit.layer, layer).order
    assert sorted(sorted(order.index(i) for i in group) for group in groups) == [[0, 1], [2, 3]]
    parts, X2 = factored(layer, 4, 4), torch.randn(3, 5, 16, generator=draw, dtype=torch.float64)
    torch.testing.assert_close(parts.query @ parts.key.mT, layer.augmented, rtol=0, atol=1e-12)
    torch.testing.assert_close(parts.value @ parts.out, layer.W, rtol=0, atol=1e-12)
    torch.testing.assert_close(unfactored(parts, layer.offset)(X2), layer(X2), rtol=0, atol=1e-12)
