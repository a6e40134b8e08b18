"""Layers from files by the names in use, and back into copies of them; against the modules that wrote the files."""

from __future__ import annotations

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models import BERT, CASES, GPT2, T5, TOKENS, Case, double, doubled, hf

import headway as hw

pytestmark = pytest.mark.xdist_group("transformers")  # imported by one process only


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder a model was saved to, each once."""
    made = {}

    def folder(name, **more):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name.replace(" ", "-"))
            doubled(name).save_pretrained(made[name], **more)
        return made[name]

    return folder


def changed(layer):
    """Another layer of the same form."""
    if isinstance(layer, hw.AttentionLayer):
        return hw.AttentionLayer(layer.Theta * 1.5, layer.W.flip(0) / 2, layer.key_bias, layer.offset, layer.mask)
    return layer.with_tensors({name: value * 1.5 for name, value in layer.tensors().items() if name != "offsets"})


def asked(layer):
    draw = torch.Generator().manual_seed(0)
    X, Z = (torch.randn(2, 6, 24, generator=draw, dtype=torch.float64) for _ in range(2))
    return layer(X, Z) if getattr(layer, "cross", False) else layer(X)


@pytest.mark.parametrize("name", CASES)
def test_a_stored_layer_is_the_module_and_goes_back_into_a_copy(name, saved, tmp_path):
    case, source = CASES[name], saved(name)
    with double():
        expected = hw.from_torch(doubled(name), case.path)
    layer = hw.from_checkpoint(source / "model.safetensors", case.number, stack=case.stack)
    assert type(layer) is type(expected)
    for part, value in expected.tensors().items():
        torch.testing.assert_close(layer.tensors()[part], value, rtol=0, atol=1e-14)
    assert isinstance(layer, hw.AttentionLayer) or layer.form.settings() == expected.form.settings()
    assert getattr(layer, "mask", None) == getattr(expected, "mask", None)
    # Into a copy of the folder, and out of it again; the rest of the file stays as it was.
    other = changed(layer)
    hw.to_checkpoint(other, source, tmp_path / "copy", case.number, stack=case.stack)
    again = hw.from_checkpoint(tmp_path / "copy", case.number, stack=case.stack)
    torch.testing.assert_close(asked(again), asked(other), rtol=0, atol=1e-12)
    assert float((asked(again) - asked(layer)).abs().max()) > 1e-2
    one, two = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "copy"))
    assert {key: (value.shape, value.dtype) for key, value in one.items()} == {
        key: (value.shape, value.dtype) for key, value in two.items()}
    differ = [key for key, value in one.items() if not torch.equal(value, two[key])]
    assert differ and all(f".{case.number}." in f".{key}" for key in differ), differ


def test_a_copy_is_the_model_with_the_layer_in_it(saved, tmp_path):
    case = CASES["qwen 2"]
    model = case.make()
    model.save_pretrained(tmp_path / "model", max_shard_size="8KB")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    layer = changed(hw.from_checkpoint(tmp_path / "model", 1))
    hw.to_checkpoint(layer, tmp_path / "model", tmp_path / "copy", 1)
    again = type(model).from_pretrained(tmp_path / "copy").eval()
    with torch.no_grad(), hw.replace(model, case.path, layer):
        expected = model(**case.inputs())[0]
    kept = case.inputs()["attention_mask"].bool()
    torch.testing.assert_close(again(**case.inputs())[0][kept].detach(), expected[kept], rtol=0, atol=1e-5)


def test_fewer_heads_and_the_other_layout_find_their_place(saved, tmp_path):
    layer = hw.from_checkpoint(saved("gpt2"), 1)
    short = hw.AttentionLayer(layer.Theta[:3], layer.W[:3], layer.key_bias[:3], layer.offset, "causal")
    hw.to_checkpoint(short, saved("gpt2") / "model.safetensors", tmp_path / "short.safetensors", 1)
    again = hw.from_checkpoint(tmp_path / "short.safetensors", 1, heads=4)
    torch.testing.assert_close(asked(again), asked(short), rtol=0, atol=1e-12)
    half = hw.from_checkpoint(saved("llama"), 1)
    order = torch.arange(8).view(2, 4).T.reshape(-1)
    pairs = hw.FactoredLayer(half.query[..., order], half.key[..., order], half.value, half.out, half.offset,
                             hw.Form(hw.Rotary(layout="pairs"), sight=half.form.sight))
    torch.testing.assert_close(asked(pairs), asked(half), rtol=0, atol=1e-12)
    hw.to_checkpoint(pairs, saved("llama"), tmp_path / "pairs", 1)
    assert torch.equal(hw.from_checkpoint(tmp_path / "pairs", 1).key, half.key)


def test_what_does_not_fit_a_file_is_refused(saved, tmp_path, refused):
    layer = hw.from_checkpoint(saved("llama"), 1)
    source, out = saved("llama"), tmp_path / "out"
    other = hw.FactoredLayer(layer.query, layer.key, layer.value, layer.out, None,
                             hw.Form(hw.Rotary(500.0), sight=hw.Sight(True)))
    with refused("layer", "rotary scores, base 10,000, halves; causal", "base 500"):
        hw.to_checkpoint(other, source, out, 1)
    apart = layer.with_tensors({name: layer.tensors()[name].repeat_interleave(2, 0) for name in ("key", "value")})
    with refused("layer.key", "shape (2, 25, 8), as stored"):
        hw.to_checkpoint(apart, source, out, 1)
    biased = layer.with_tensors({"key": layer.key + 0.1})
    with refused("layer", "no key bias: the file has no tensor for one"):
        hw.to_checkpoint(biased, source, out, 1)
    full = hw.AttentionLayer.random(heads=2, width=24, mask="causal", seed=0)
    with refused("layer", "heads of size 6, as stored", "beyond it", "tolerance="):
        hw.to_checkpoint(full, saved("gpt2"), out, 1)
    with refused("out", "a folder, as source is one"):
        hw.to_checkpoint(layer, source, tmp_path / "out.safetensors", 1)
    with refused("out", "a new name", "which is there already"):
        hw.to_checkpoint(layer, source, source, 1)
    with refused("source", "GGUF file, which is read only"):
        hw.to_checkpoint(layer, tmp_path / "m.gguf", tmp_path / "n.gguf", 1)
    assert not out.exists()


def test_what_cannot_be_read_is_refused_by_name(saved, tmp_path, refused):
    whole = saved("whisper cross")
    with refused("stack", "which of several", "decoder.layers.1.self_attn., encoder.layers.1.self_attn."):
        hw.from_checkpoint(whole, 1)
    with refused("heads", "where no config.json stands beside the file"):
        shutil.copy(saved("bert") / "model.safetensors", tmp_path / "bert.safetensors")
        hw.from_checkpoint(tmp_path / "bert.safetensors", 1)
    assert hw.from_checkpoint(tmp_path / "bert.safetensors", 1, heads=4).heads == 4
    with refused(str(tmp_path / "llama.safetensors"), "config.json beside the file, with the rotary settings"):
        shutil.copy(saved("llama") / "model.safetensors", tmp_path / "llama.safetensors")
        hw.from_checkpoint(tmp_path / "llama.safetensors", 1, heads=4)
    other = tmp_path / "other"
    shutil.copytree(saved("llama"), other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "newer"}))
    with refused(str(other), "a model_type of llama", "'newer'", "from_torch(model, path)"):
        hw.from_checkpoint(other, 1)
    stored = load_file(other / "model.safetensors")
    weight = stored.pop("layers.1.self_attn.q_proj.weight")
    (other / "config.json").write_text(json.dumps(config))
    save_file({**stored, "layers.1.self_attn.q_proj.qweight": weight.to(torch.int8)}, other / "model.safetensors")
    with refused(str(other), "quantised blocks that are not known here (layers.1.self_attn.q_proj.qweight)"):
        hw.from_checkpoint(other, 1)
    small = {**stored, "layers.1.self_attn.q_proj.weight": weight.to(torch.float8_e4m3fn)}
    save_file(small, other / "model.safetensors")
    with refused(f"{other}: layers.1.self_attn.q_proj.weight", "float8_e4m3fn, quantised"):
        hw.from_checkpoint(other, 1)
    more = {f"layers.1.self_attn.{part}.weight": weight.clone() for part in ("q_proj", "q_mix")}
    save_file({**stored, **more}, other / "model.safetensors")
    with refused(str(other), "another part (layers.1.self_attn.q_mix.weight)"):
        hw.from_checkpoint(other, 1)
    with refused(str(other), "attention number 9"):
        hw.from_checkpoint(other, 9)
    with refused(str(tmp_path), "a folder with model.safetensors"):
        hw.from_checkpoint(tmp_path, 1)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b.safetensors"}}))
    with refused(str(tmp_path / "model.safetensors.index.json"), "files beside it"):
        hw.from_checkpoint(tmp_path, 1)


@pytest.mark.parametrize("name", ["t5 encoder", "mpnet"])
def test_a_table_that_all_layers_share_stays_as_it_is(name, saved, tmp_path, refused):
    case, order = CASES[name], [2, 0, 3, 1]
    layer = hw.from_checkpoint(saved(name), case.number, stack=case.stack)
    parts = {part: value if part == "offset" else value[order] for part, value in layer.tensors().items()}
    parts["offsets"] = parts["offsets"] + torch.arange(4.0).unsqueeze(1)  # a constant a head changes nothing
    other = layer.with_tensors(parts)  # as a learner may return it
    torch.testing.assert_close(asked(other), asked(layer), rtol=0, atol=1e-12)
    hw.to_checkpoint(other, saved(name), tmp_path / "copy", case.number, stack=case.stack)
    one, two = (load_file(folder / "model.safetensors") for folder in (saved(name), tmp_path / "copy"))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=0, atol=1e-14)
    bent = layer.with_tensors({"offsets": layer.form.offsets.values.square()})
    with refused("layer.offsets", "which other layers use too", "headway.replace"):
        hw.to_checkpoint(bent, saved(name), tmp_path / "bent", case.number, stack=case.stack)


@pytest.mark.parametrize(("name", "model", "settings"), [
    ("umt5", "UMT5Model", T5), ("gptj", "GPTJModel", {**GPT2, "rotary_dim": 4}), ("biogpt", "BioGptModel", BERT),
    ("squeezebert", "SqueezeBertModel", {**BERT, "embedding_size": 24})])
def test_kinds_that_only_have_the_names_are_refused(name, model, settings, tmp_path, refused):
    stack = "encoder" if name == "umt5" else None  # each layer has a table of its own
    getattr(hf, model)(getattr(hf, model.replace("Model", "Config"))(**settings)).save_pretrained(tmp_path / name)
    with refused(str(tmp_path / name), "a model_type of", f"got '{name}'", "from_torch"):
        hw.from_checkpoint(tmp_path / name, 1, stack=stack)


@pytest.mark.parametrize(("model", "settings", "path"), [
    ("CLIPText", {**BERT, "hidden_act": "gelu"}, "encoder.layers.1.self_attn"),
    ("DistilBert", {"dim": 24, "n_heads": 4, "n_layers": 2, "hidden_dim": 16, **TOKENS},
     "transformer.layer.1.attention")])
def test_further_kinds_are_read_as_they_answer(model, settings, path, tmp_path):
    case = Case(f"{model}Model", f"{model}Config", settings, path)
    with double():
        made = case.make(torch.float64)
        made.save_pretrained(tmp_path)
        known, data = hw.from_torch(made, path), hw.capture(made, path, [case.inputs()])
    layer = hw.from_checkpoint(tmp_path, 1)
    assert layer.mask == known.mask == data.mask == ("causal" if model == "CLIPText" else "none")
    torch.testing.assert_close(layer.Theta, known.Theta, rtol=0, atol=1e-14)
    kept = ~data.padding
    torch.testing.assert_close(layer(data.X, **data.arguments())[kept], data.Y[kept], rtol=0, atol=1e-10)


def test_names_of_folders_may_have_dots(saved, tmp_path, refused):
    layer = hw.from_checkpoint(saved("llama"), 1)
    hw.to_checkpoint(layer, saved("llama"), tmp_path / "Llama-0.1B", 1)
    assert hw.from_checkpoint(tmp_path / "Llama-0.1B", 1).heads == 4
    with refused("out", "a safetensors file, as source is one"):
        hw.to_checkpoint(layer, saved("llama") / "model.safetensors", tmp_path / "file", 1)


def test_arguments_of_wrong_kinds_are_refused(saved, tmp_path, refused):
    source = saved("llama")
    for name, said, call in (
            ("path", "None (NoneType)", lambda: hw.from_checkpoint(None, 1)),
            ("dtype", "'float64'", lambda: hw.from_checkpoint(source, 1, dtype="float64")),
            ("dtype", "torch.int32", lambda: hw.from_checkpoint(source, 1, dtype=torch.int32)),
            ("stack", "3 (int)", lambda: hw.from_checkpoint(source, 1, stack=3)),
            ("stack", "'decoder', where there are 'layers.1.self_attn.'",
             lambda: hw.from_checkpoint(source, 1, stack="decoder")),
            ("heads", "32 rows of query, 8 for each; got 2. Try: heads=4",
             lambda: hw.from_checkpoint(source, 1, heads=2)),
            (str(source), "number 5; got numbers 0 to 1", lambda: hw.from_checkpoint(source, 5)),
            (str(source / "no"), "nothing of that name", lambda: hw.from_checkpoint(source / "no", 1)),
            ("layer", "an AttentionLayer or a FactoredLayer; got int", lambda: hw.to_checkpoint(3, source, "o", 1)),
            ("out", "a path; got None", lambda: hw.to_checkpoint(hw.from_checkpoint(source, 1), source, None, 1))):
        with refused(name, said):
            call()


@pytest.mark.parametrize(("settings", "name"), [
    ({"rope_parameters": "x"}, "rope_parameters"), ({"rms_norm_eps": "x"}, "rms_norm_eps"),
    ({"layer_types": "full"}, "layer_types"), ({"head_dim": "8"}, "head_dim"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": "x"}}, "partial_rotary_factor")])
def test_a_config_of_wrong_kinds_is_refused(settings, name, saved, tmp_path, refused):
    shutil.copy(saved("llama") / "model.safetensors", tmp_path / "model.safetensors")
    config = json.loads((saved("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **settings}))
    with refused(f"config.{name}"):
        hw.from_checkpoint(tmp_path, 1)


def test_an_index_must_say_where_things_are(tmp_path, refused):
    CASES["llama"].make().save_pretrained(tmp_path / "model", max_shard_size="8KB")
    index = tmp_path / "model" / "model.safetensors.index.json"
    layer, listed = hw.from_checkpoint(index, 1), json.loads(index.read_text())
    with refused("source", "the folder of several", "an index"):  # else one file of several would be the copy
        hw.to_checkpoint(layer, index, tmp_path / "copy.safetensors", 1)
    key = "layers.1.self_attn.q_proj.weight"
    file = listed["weight_map"][key]
    other = next(name for name in listed["weight_map"].values() if name != file)
    for place, said in (("../model.safetensors", "'../model.safetensors'"), (other, f"the tensor {key}"),
                        ("gone.safetensors", "nothing of that name")):
        index.write_text(json.dumps({"weight_map": {**listed["weight_map"], key: place}}))
        with pytest.raises(hw.InputError, match="Try: ") as caught:
            hw.from_checkpoint(index, 1)
        assert said in str(caught.value)


def test_old_configs_say_the_same_in_other_words():
    from headway.core import configs

    class Old:
        model_type = "gemma3_text"
        sliding_window, sliding_window_pattern = 512, 6
        rope_theta, rope_local_base_freq, rope_scaling = 1e6, 1e4, {"rope_type": "linear", "factor": 8.0}

    assert [configs.layer_type(Old, i) == "sliding_attention" for i in range(7)] == [True] * 5 + [False, True]
    assert configs.window(Old, 5) is None and configs.window(Old, 0) == 512
    assert configs.rotary(Old, 8, 0)[0] == hw.Rotary(1e4)
    slow, _ = configs.rotary(Old, 8, 5)
    torch.testing.assert_close(slow.omega(8), hw.Rotary(1e6).omega(8) / 8)
    assert configs.window({"model_type": "gemma2", "sliding_window": 4}, 0) == 4
    assert configs.window({"model_type": "gemma2", "sliding_window": 4}, 1) is None
    late = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2}
    assert [configs.window(late, i) for i in range(4)] == [None, None, 4, 4]
    assert configs.window({**late, "use_sliding_window": False}, 3) is None
    assert configs.rotary({"model_type": "llama"}, 8, 0)[0] == hw.Rotary(10_000.0)


def write_gguf(path, model, kind, quantise=None, **fields):
    """As llama.cpp's converter does: for Llama the rows of query and key are put into pairs."""
    writer = gguf.GGUFWriter(path, kind)
    config = model.config
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_embedding_length(config.hidden_size)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for name, value in fields.items():
        writer.add_float32(name, value) if isinstance(value, float) else writer.add_string(name, value)
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
             "q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
    for name, value in model.layers[1].self_attn.named_parameters():
        module, part = name.split(".")
        array = value.detach().numpy()
        if kind == "llama" and module in ("q_proj", "k_proj"):
            heads = array.shape[0] // config.head_dim
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        name = f"blk.1.{names[module]}.{part}"
        if quantise is None or module.endswith("norm"):
            writer.add_tensor(name, array.copy())
        else:
            writer.add_tensor(name, gguf.quants.quantize(array.astype(np.float32), quantise), raw_dtype=quantise)
    if "freqs" in fields.get("words", ""):
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 4, config.head_dim // 2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("name", "kind"), [("llama", "llama"), ("qwen 2", "qwen2"), ("qwen 3", "qwen3")])
def test_gguf_files_are_read_in_their_own_layout(name, kind, tmp_path):
    model = CASES[name].make()
    write_gguf(tmp_path / "m.gguf", model, kind)
    layer = hw.from_checkpoint(tmp_path / "m.gguf", 1)
    assert layer.form.rotary.layout == ("pairs" if kind == "llama" else "half")
    expected = hw.from_torch(model, CASES[name].path).to(torch.float64)
    torch.testing.assert_close(asked(layer), asked(expected), rtol=0, atol=1e-6)


def test_gguf_blocks_are_dequantised_and_frequencies_scaled(tmp_path, refused):
    model = CASES["llama"].make(hidden_size=32)
    write_gguf(tmp_path / "q.gguf", model, "llama", gguf.GGMLQuantizationType.Q8_0, words="freqs",
               **{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0})
    layer = hw.from_checkpoint(tmp_path / "q.gguf", 1)
    close = hw.from_torch(model, "layers.1")
    error = (layer.value - close.value.to(torch.float64)).abs().max()
    assert 1e-4 < float(error) < 2e-2
    torch.testing.assert_close(layer.form.rotary.omega(8),
                               hw.Rotary().omega(8) / 2 / torch.linspace(1, 4, 4, dtype=torch.float64))
    strange = gguf.GGUFReader(tmp_path / "q.gguf").tensors[0]._replace(tensor_type=gguf.GGMLQuantizationType.Q8_K)
    from headway.core.stored import open_weights

    stored = open_weights(tmp_path / "q.gguf")
    stored.tensors["blk.1.attn_q.weight"] = strange
    with refused(f"{tmp_path / 'q.gguf'}: blk.1.attn_q.weight", "blocks of type Q8_K"):
        stored["blk.1.attn_q.weight"]
    write_gguf(tmp_path / "n.gguf", model, "newer")
    with refused(str(tmp_path / "n.gguf"), "an architecture of llama", "newer"):
        hw.from_checkpoint(tmp_path / "n.gguf", 1)
    (tmp_path / "b.gguf").write_bytes(b"GGUF, but nothing else")
    with refused(str(tmp_path / "b.gguf"), "a whole GGUF file"):
        hw.from_checkpoint(tmp_path / "b.gguf", 1)
