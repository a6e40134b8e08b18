"""Attention modules as people have them, read, put back and written: against the modules' own answers."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.models import BERT, CASES, GPT2, LLAMA, TOKENS, Case, double, doubled
from torch import nn

import headway as hw

pytestmark = pytest.mark.xdist_group("transformers")  # imported by one process only


def answers(layer, data):
    """The layer's on the rows that count, beside the module's."""
    Y = layer(data.X, **data.arguments())
    return (Y, data.Y) if data.padding is None else (Y[~data.padding], data.Y[~data.padding])


@pytest.mark.parametrize("name", CASES)
def test_a_module_is_read_and_answers_as_captured(name):
    case, model = CASES[name], doubled(name)
    with double():
        layer = hw.from_torch(model, case.path)
        data = hw.capture(model, case.path, [case.inputs(torch.float64)])
    torch.testing.assert_close(*answers(layer, data), rtol=0, atol=1e-10)
    assert layer.heads == 4
    if case.words:
        assert layer.form.describe() == case.words
    else:
        assert layer.mask == data.mask
    if isinstance(layer, hw.FactoredLayer):
        assert layer.cross == (data.keys is not None) == (case.stack == "cross")


@pytest.mark.parametrize("name", CASES)
def test_a_replaced_module_leaves_the_model_as_it_was(name):
    case = CASES[name]
    model, inputs = case.make(), case.inputs()
    with torch.no_grad():
        before = model(**inputs)[0]
        layer = hw.from_torch(model, case.path)
        with hw.replace(model, case.path, layer.to(torch.float64)) as put:
            during = model(**inputs)[0]
            assert hw.from_torch(model, case.path) is put.module.layer
            turned = layer.with_tensors({"out": layer.out.flip(2)}) if isinstance(layer, hw.FactoredLayer) else (
                hw.AttentionLayer(layer.Theta, layer.W.flip(2), layer.key_bias, layer.offset, layer.mask))
            with hw.replace(model, case.path, turned):
                other = model(**inputs)[0]
        after = model(**inputs)[0]
    kept = inputs.get("attention_mask")
    real = slice(None) if kept is None or kept.shape != before.shape[:2] else kept.bool()
    torch.testing.assert_close(during[real], before[real], rtol=0, atol=1e-5)
    assert float((other - before)[real].abs().max()) > 1e-2, "the module is the one that computes"
    assert torch.equal(after, before)


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_a_module_can_be_read_as_its_model_masks_it(kind):
    case = CASES["llama"]
    module = case.make(attn_implementation=kind).get_submodule(case.path)
    assert hw.from_torch(module).form.sight.causal
    assert not hw.from_torch(module, causal=False).form.sight.causal


ALONE = ("gpt2", "vit", "llama", "mistral", "qwen 3", "gemma 2", "gemma 3", "gpt-oss", "gpt-neox", "cohere",
         "whisper cross", "t5 decoder", "t5 cross")


@pytest.mark.parametrize("name", ALONE)
def test_a_module_alone_is_read_as_in_its_model(name):
    case, model = CASES[name], doubled(name)
    with double():
        alone, inside = hw.from_torch(model.get_submodule(case.path)), hw.from_torch(model, case.path)
    for part, value in inside.tensors().items():
        assert torch.equal(alone.tensors()[part], value)
    assert type(alone) is type(inside)
    assert isinstance(alone, hw.AttentionLayer) or alone.form == inside.form


def test_where_the_heads_stand_apart_from_their_projection_both_are_found():
    model, case = doubled("bert"), CASES["bert"]
    whole, inner = hw.from_torch(model, "encoder.layer.1"), hw.from_torch(model, f"{case.path}.self")
    assert (whole.out_width, inner.out_width) == (24, 24)
    dense = model.encoder.layer[1].attention.output.dense
    data = hw.capture(model, f"{case.path}.self", [case.inputs()])
    torch.testing.assert_close(*answers(inner, data), rtol=0, atol=1e-10)
    torch.testing.assert_close(dense(inner(data.X)), whole(data.X), rtol=0, atol=1e-10)


class Own(nn.Module):
    """Somebody's own causal attention, as in many small GPTs."""

    def __init__(self, causal=True, bias=True):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(12, 36, bias=bias), nn.Linear(12, 12, bias=bias)
        self.n_head, self.seen = 3, causal
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        n, k, _ = x.shape
        Q, K, V = (part.view(n, k, 3, 4).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=2))
        Y = nn.functional.scaled_dot_product_attention(Q, K, V, is_causal=self.seen)
        return self.dropout(self.c_proj(Y.transpose(1, 2).reshape(n, k, 12)))


@pytest.mark.parametrize("causal", [True, False])
def test_a_module_of_ones_own_is_asked_whether_it_looks_ahead(causal):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), Own(causal)).double().eval()
    layer = hw.from_torch(model, "1")
    X = torch.randn(4, 6, 12, dtype=torch.float64)
    assert layer.mask == ("causal" if causal else "none")
    torch.testing.assert_close(layer(X), model[1](X), rtol=0, atol=1e-10)
    data = hw.capture(model, "1", [X, X[:2, :4]])
    assert (data.mask, len(data), data.length) == (layer.mask, 6, 6)
    torch.testing.assert_close(*answers(layer, data), rtol=0, atol=1e-10)
    with hw.replace(model, "1", layer):
        torch.testing.assert_close(model(X), model[1](model[0](X)), rtol=0, atol=0)
    torch.testing.assert_close(data.Y[:4], model(X), rtol=0, atol=1e-10)


def test_attention_of_torch_with_keys_of_another_width_or_a_key_of_zeros():
    torch.manual_seed(1)
    X, Z = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 7, 8, dtype=torch.float64)
    cross = nn.MultiheadAttention(12, 3, kdim=8, vdim=8, batch_first=True, dtype=torch.float64).eval()
    layer = hw.from_torch(cross)
    torch.testing.assert_close(layer(X, Z), cross(X, Z, Z)[0], rtol=0, atol=1e-10)
    zero = nn.MultiheadAttention(12, 3, add_zero_attn=True, dtype=torch.float64).eval()
    layer = hw.from_torch(zero, causal=True)
    assert layer.form.describe() == "plain scores; sinks; causal"
    T, hidden = X.transpose(0, 1), torch.ones(5, 5, dtype=torch.bool).triu(1)
    torch.testing.assert_close(layer(X), zero(T, T, T, attn_mask=hidden)[0].transpose(0, 1), rtol=0, atol=1e-10)


def test_what_a_module_does_beyond_its_attributes_is_found_out(refused):
    model = doubled("llama")
    module = copy.deepcopy(model.layers[1].self_attn)
    del module.scaling
    module.scaling = 0.5  # another scale is read, since the module says so itself
    assert hw.from_torch(module) is not None
    plain = module.forward
    module.forward = lambda hidden_states, position_embeddings=None, attention_mask=None: (
        plain(hidden_states, position_embeddings, attention_mask)[0] + 0.1 * hidden_states.square(), None)
    with refused("module", "that its attributes describe", "LlamaAttention, which answers otherwise by"):
        hw.from_torch(module)


def test_what_is_not_understood_is_refused_by_name(refused):
    with refused("module", "names in use", "Sequential with 0 (Linear)"):
        hw.from_torch(nn.Sequential(nn.Linear(3, 3)))
    with refused("path", "one attention", "which holds 2", "h.0.attn, h.1.attn"):
        hw.from_torch(doubled("gpt2"))
    with refused("path", "no 'attention' in GPT2Block", "h.0.attn, h.1.attn"):
        hw.from_torch(doubled("gpt2"), "h.1.attention")
    with refused("module", "relative_attention_bias", "from_torch(model, path)"):
        hw.from_torch(doubled("mpnet").encoder.layer[0].attention.attn)
    with refused("module", "a torch.nn.Module"):
        hw.from_torch(lambda X: X)
    odd = Own().double().eval()
    odd.c_norm = nn.Linear(4, 4)
    with refused("module", "another part, c_norm.bias, in Own"):
        hw.from_torch(odd)
    del odd.c_norm, odd.n_head
    with refused("module", "num_heads or num_attention_heads or head_dim"):
        hw.from_torch(odd)
    odd.n_head = 5
    with refused("module", "rows for 5 heads"):
        hw.from_torch(odd)
    with refused("module", "dropout.p 0.1 in training mode", "module.eval()"):
        hw.from_torch(Own().train())
    asks = Own().double().eval()
    asks.forward = lambda x, weather: x
    with refused("module", "'weather', which must be given"):
        hw.from_torch(asks)
    asks.forward = lambda x, rotary=None: x
    with refused("module", "'rotary', which may change scores"):
        hw.from_torch(asks)
    packed = Own().eval()
    packed.c_attn.weight = nn.Parameter(torch.zeros(36, 12, dtype=torch.uint8), requires_grad=False)
    with refused("module.c_attn.weight", "dtype torch.uint8, quantised", "dequantised"):
        hw.from_torch(packed)
    long = CASES["llama"].make(rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0})
    with refused("config.rope_type", "that sequences do not change", "dynamic"):
        hw.from_torch(long, "layers.1")


def test_what_has_no_numbers_is_refused(refused):
    model, path = CASES["llama"].make(), CASES["llama"].path
    with refused("path", "3 (int)"):
        hw.from_torch(model, 3)
    with refused("causal", "True or False"):
        hw.from_torch(model, path, causal=3)
    with refused("module.q_proj.weight", "weights with values", "meta device"):
        hw.from_torch(copy.deepcopy(model).to("meta"), path)
    packed = model.get_submodule(path)
    weight = packed.q_proj.weight.detach().to(torch.int8)
    packed.q_proj = nn.Module()  # torch's quantised layers have no parameters
    packed.q_proj.weight = lambda: weight
    with refused("module.q_proj.weight", "torch.int8, quantised"):
        hw.from_torch(model, path)
    normed = Case("CohereModel", "CohereConfig", {**LLAMA, "use_qk_norm": True}, path).make()
    with refused("module", "q_norm that divides by the root mean square", "CohereLayerNorm"):
        hw.from_torch(normed, path)


MORE = {  # kinds that are read beside those of CASES
    "cohere 2 unturned": Case("Cohere2Model", "Cohere2Config", {
        **LLAMA, "layer_types": ["sliding_attention", "full_attention"]}, "layers.1.self_attn",
        words="plain scores; causal"),
    "exaone 4 unturned": Case("Exaone4Model", "Exaone4Config", {
        **LLAMA, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}, "layers.1.self_attn",
        words="plain scores; normed queries and keys; causal"),
    "distilbert": Case("DistilBertModel", "DistilBertConfig", {
        "dim": 24, "n_heads": 4, "n_layers": 2, "hidden_dim": 16, "max_position_embeddings": 64, **TOKENS},
        "transformer.layer.1.attention"),
    "layoutlm": Case("LayoutLMModel", "LayoutLMConfig", {**BERT, "attn_implementation": "sdpa"},
                     "encoder.layer.1.attention"),
    "openai": Case("OpenAIGPTModel", "OpenAIGPTConfig", {**GPT2, "afn": "gelu"}, "h.1.attn"),
    "gpt-neo": Case("GPTNeoModel", "GPTNeoConfig", {
        **BERT, "num_heads": 4, "num_layers": 2, "attention_types": [[["global"], 2]]}, "h.1.attn.attention"),
}


@pytest.mark.parametrize("name", MORE)
def test_other_kinds_are_read_and_replaced(name):
    case = MORE[name]
    with double():
        model = case.make(torch.float64)
        inputs = case.inputs()
        layer = hw.from_torch(model, case.path)
        data = hw.capture(model, case.path, [inputs])
        torch.testing.assert_close(*answers(layer, data), rtol=0, atol=1e-10)
        before, kept = model(**inputs)[0], inputs["attention_mask"].bool()
        with hw.replace(model, case.path, layer):
            torch.testing.assert_close(model(**inputs)[0][kept], before[kept], rtol=0, atol=1e-9)
    assert layer.form.describe() == case.words if case.words else layer.mask == data.mask


def test_half_precision_is_read_exactly_and_replaced_in_kind():
    case = CASES["llama"]
    model = case.make(torch.bfloat16)
    layer = hw.from_torch(model, case.path)
    assert layer.query.dtype == torch.float32
    assert torch.equal(layer.key[0, :-1, 0], model.layers[1].self_attn.k_proj.weight[0].float())
    with torch.no_grad(), hw.replace(model, case.path, layer) as put:
        assert put.module.query.dtype == torch.bfloat16
        assert model(**case.inputs())[0].dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "whole"), [
    ("llama", "LlamaForCausalLM"), ("mistral", "MistralForCausalLM"), ("gpt2", "GPT2LMHeadModel")])
def test_a_model_writes_on_with_a_layer_in_it(name, whole, refused):
    import transformers as hf

    case = CASES[name]
    torch.manual_seed(0)
    model = getattr(hf, whole)(getattr(hf, case.config)(**case.settings)).eval()
    base = model.get_submodule(model.base_model_prefix)
    base.load_state_dict(case.make().state_dict())
    path = f"{model.base_model_prefix}.{case.path}"
    ids = torch.tensor([[5, 6, 7, 8, 9], [0, 0, 4, 5, 6]])  # filled on the left
    asked = {"input_ids": ids, "attention_mask": (ids > 0).long(), "max_new_tokens": 8, "do_sample": False}
    before = model.generate(**asked)
    with hw.replace(model, path, hw.from_torch(model, path)):
        assert torch.equal(model.generate(**asked), before)
        with refused("the module's cache", "one of fixed length", "cache_implementation='dynamic'"):
            model.generate(**asked, cache_implementation="static")


def test_decoding_step_by_step_keeps_a_shared_table():
    case = CASES["t5 decoder"]
    model, ids = case.make(), case.inputs()["input_ids"]

    def steps():
        encoded = model.encoder(input_ids=ids)
        answer = model(encoder_outputs=encoded, decoder_input_ids=ids[:, :3], use_cache=True)
        found = [answer[0]]
        for j in range(3, 6):
            answer = model(encoder_outputs=encoded, decoder_input_ids=ids[:, j : j + 1], use_cache=True,
                           past_key_values=answer.past_key_values)
            found.append(answer[0])
        return torch.cat(found, dim=1)

    with torch.no_grad():
        before = steps()
        with hw.replace(model, case.path, hw.from_torch(model, case.path)):
            torch.testing.assert_close(steps(), before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("batch_first", [True, False])
def test_an_encoder_of_torch_takes_a_layer_with_its_padding(batch_first):
    torch.manual_seed(2)
    block = nn.TransformerEncoderLayer(12, 3, 16, batch_first=batch_first, dropout=0.0)
    model = nn.TransformerEncoder(block, 2, enable_nested_tensor=False).eval()
    X = torch.randn(3, 5, 12)
    filling = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    tokens = X if batch_first else X.transpose(0, 1)
    with torch.no_grad():
        before = model(tokens, src_key_padding_mask=filling)
        data = hw.capture(model, "layers.1", [(tokens, None, filling)])
        layer = hw.from_torch(model, "layers.1")
        torch.testing.assert_close(*answers(layer, data), rtol=0, atol=1e-5)
        with hw.replace(model, "layers.1", layer) as put:
            during = model(tokens, src_key_padding_mask=filling)
            Y, P = put.module(tokens, tokens, tokens)
    kept = ~filling if batch_first else ~filling.T
    torch.testing.assert_close(during[kept], before[kept], rtol=0, atol=1e-5)
    expected = model.layers[1].self_attn(tokens, tokens, tokens)
    torch.testing.assert_close((Y, P), expected, rtol=0, atol=1e-5)
    assert torch.equal(data.padding, filling)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_of_torch_that_leaves_filling_out_is_told_not_to():
    torch.manual_seed(2)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), 2).eval()
    X, filling = torch.randn(3, 5, 12), torch.arange(5) >= torch.tensor([[5], [3], [4]])
    with torch.no_grad():
        before = model(X, src_key_padding_mask=filling)
        data = hw.capture(model, "layers.1", [{"src": X, "src_key_padding_mask": filling}])
        layer = hw.from_torch(model, "layers.1")
        torch.testing.assert_close(*answers(layer, data), rtol=0, atol=1e-5)
        with hw.replace(model, "layers.1", layer):
            during = model(X, src_key_padding_mask=filling)
    torch.testing.assert_close(during[~filling], before[~filling], rtol=0, atol=1e-5)
    assert torch.equal(data.padding, filling)
    assert model.use_nested_tensor, "as it was"


def test_what_cannot_be_put_there_is_refused(refused):
    model = CASES["gpt2"].make()
    with refused("layer", "width 24, as the module at h.1.attn"):
        hw.replace(model, "h.1.attn", hw.AttentionLayer.random(heads=2, width=8, seed=0))
    with refused("layer", "an AttentionLayer or a FactoredLayer", "headway.from_torch(module)"):
        hw.replace(model, "h.1.attn", model.h[0].attn)
    with refused("path", "a module inside the model"):
        hw.replace(model.h[1].attn, "", hw.AttentionLayer.random(heads=2, width=24, seed=0))
    cross = hw.FactoredLayer.random(heads=2, width=24, cross=True, seed=0)
    with hw.replace(model, "h.1.attn", cross), refused("the module's input", "keys of another sequence"):
        model(**CASES["gpt2"].inputs())
    put = hw.replace(model, "h.1.attn", hw.AttentionLayer.random(heads=2, width=24, seed=0))
    assert repr(put).startswith("Replacement(h.1.attn: AttentionLayer(2 heads")
    later = hw.replace(model, "h.1.attn", hw.AttentionLayer.random(heads=2, width=24, seed=0))
    with refused("undo", "the layer in its place at h.1.attn", "put there later"):
        put.undo()
    later.undo()
    put.undo()
    put.undo()
    assert repr(put).endswith("undone)")
    assert type(model.h[1].attn).__name__ == "GPT2Attention"


def test_what_comes_back_has_the_dtype_that_the_model_was_given():
    case = CASES["bert"]
    model = case.make()
    with hw.replace(model, case.path, hw.from_torch(model, case.path)):
        model.double()
    assert {part.dtype for part in model.parameters()} == {torch.float64}


def test_a_replaced_layer_may_be_trained_on():
    case = CASES["llama"]
    model = case.make()
    with hw.replace(model, case.path, hw.from_torch(model, case.path)) as put:
        model(**case.inputs())[0].square().sum().backward()
        assert float(put.module.query.grad.abs().max()) > 0
        assert put.module.layer_idx == 1
    assert not any("query" in name for name, _ in model.named_parameters())
