"""Examples of modules at work: masks, padding, positions, other sequences, shards; and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tests.models import CASES, doubled
from torch import nn

import headway as hw
from headway.cli.main import main

pytestmark = pytest.mark.xdist_group("transformers")  # imported by one process only


def agree(layer, data, atol=1e-5):
    Y = layer(data.X, **data.arguments())
    kept = slice(None) if data.padding is None else ~data.padding
    torch.testing.assert_close(Y[kept], data.Y[kept], rtol=0, atol=atol)


def batch(ids, mask=None, **more):
    ids = torch.as_tensor(ids)
    return {"input_ids": ids, "attention_mask": (ids > 0).long() if mask is None else mask, **more}


def test_sequences_of_several_lengths_are_filled_up_and_limited():
    model = CASES["llama"].make()
    draw = torch.Generator().manual_seed(0)
    batches = [batch(torch.randint(3, 30, (3, k), generator=draw)) for k in (5, 8, 6, 7)]
    seen = []
    data = hw.capture(model, "layers.1.self_attn", iter(batches), limit=8, progress=seen.append)
    assert (len(data), data.length, data.mask, seen) == (8, 8, "causal", [3, 6, 8])
    assert data.padding.sum(1).tolist() == [3, 3, 3, 0, 0, 0, 2, 2]
    assert data.positions is None, "0, 1, 2 … need not be kept"
    agree(hw.from_torch(model, "layers.1.self_attn"), data)


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_filling_on_the_left_keeps_its_positions(name):
    model, path = CASES[name].make(), CASES[name].path
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [0, 0, 0, 4, 5, 6], [0, 0, 0, 0, 0, 0]])
    places = ((ids > 0).cumsum(1) - 1).clamp_min(0) * torch.tensor([[1], [2], [1]])
    data = hw.capture(model, path, [batch(ids[:2], position_ids=places[:2])])
    assert data.padding.sum(1).tolist() == [0, 3]
    assert data.positions[1].tolist() == [0, 0, 0, 0, 2, 4]
    agree(hw.from_torch(model, path), data)
    some = hw.capture(model, path, [batch(ids)])  # sequences of filling only are left out
    assert len(some) == 2


def test_shards_are_written_while_the_model_runs(tmp_path, monkeypatch):
    import headway.core.capture as module

    monkeypatch.setattr(module, "SHARD", 3000)  # bytes
    case = CASES["t5 cross"]
    model = case.make()
    draw = torch.Generator().manual_seed(0)

    def batches():
        for k in (7, 5, 7, 6):
            ids = torch.randint(3, 30, (2, 9), generator=draw)
            ids[1, k:] = 0
            yield batch(ids, decoder_input_ids=torch.randint(3, 30, (2, k), generator=draw))

    data = hw.capture(model, case.path, batches(), to=tmp_path / "shards")
    assert len(data.files) > 1 and (len(data), data.length) == (8, 7)
    assert type(data).__name__ == "Shards"
    whole = data.take(range(8))
    assert whole.key_padding.sum(1).tolist() == [0, 2, 0, 4, 0, 2, 0, 3]
    agree(hw.from_torch(model, case.path), whole)
    with pytest.raises(hw.InputError, match="length: expected at least 7"):
        hw.capture(model, case.path, batches(), to=tmp_path / "short", length=6)
    assert not (tmp_path / "short").exists()


def test_the_model_is_left_as_it_was():
    case = CASES["gemma 3"]
    model = case.make()
    with torch.no_grad():
        before = model(**case.inputs())[0]
        hw.capture(model, case.path, [case.inputs()] * 2)
        assert torch.equal(model(**case.inputs())[0], before)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.get_submodule(
        case.path).modules())
    ran = []
    model.layers[1].mlp.register_forward_hook(lambda *_: ran.append(1))
    hw.capture(model, case.path, [case.inputs()])
    assert not ran, "the model runs only as far as the module"


class Block(nn.Module):
    """Attention that is called with whatever it is given."""

    def __init__(self):
        super().__init__()
        self.inner = Odd()

    def forward(self, x, **kwargs):
        return self.inner(x, **kwargs)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x, **kwargs):
        return torch.softmax(x @ self.mix(x).mT, 2) @ x


def test_any_module_of_tokens_can_be_captured():
    model, X = Block(), torch.randn(3, 5, 4)
    data = hw.capture(model, "inner", [X], mask="none")
    assert torch.equal(data.X, X)
    assert torch.equal(data.Y, model(X))
    assert hw.capture(model, "inner", [(X,)]).mask == "none"
    assert hw.capture(model, "inner", [{"x": X, "labels": None}], mask="causal").mask == "causal"


def test_bad_input_is_refused_in_words(refused):
    model, inputs = CASES["bert"].make(), CASES["bert"].inputs()
    with refused("path", "no 'attn' in BertLayer", "encoder.layer.0.attention, encoder.layer.1.attention."):
        hw.capture(model, "encoder.layer.1.attn", [inputs])
    with refused("batches", "a list of batches", "[batch]"):
        hw.capture(model, "encoder.layer.1", inputs)
    with refused("batches", "at least one that the module at encoder.layer.1 is called with"):
        hw.capture(model, "encoder.layer.1", [])
    with refused("limit", "at least 1"):
        hw.capture(model, "encoder.layer.1", [inputs], limit=0)
    with refused("ignore", "names of arguments; got int"):
        hw.capture(model, "encoder.layer.1", [inputs], ignore=3)
    with refused("to", "3 (int)"):
        hw.capture(model, "encoder.layer.1", [inputs], to=3)
    with refused("path", "3 (int)", "encoder.layer.0.attention"):
        hw.capture(model, 3, [inputs])
    with refused("model", "dropout", "0.1 in training mode: its outputs are random", "model.eval()"):
        hw.capture(CASES["bert"].make().train(), "encoder.layer.1", [inputs])
    X = torch.randn(2, 3, 4)
    with refused("the module's input", "a tensor 'weather'", "ignore=('weather',)"):
        hw.capture(Block(), "inner", [{"x": X, "weather": X}])
    assert len(hw.capture(Block(), "inner", [{"x": X, "weather": X}], ignore=("weather",))) == 2
    with refused("the module's input", "a tensor 'weather'"):  # a name, not the letters in it
        hw.capture(Block(), "inner", [{"x": X, "weather": X}], ignore="weathercock")
    with refused("the module's input", "tokens of shape (n, k, d)"):
        hw.capture(Block(), "inner", [X[0]])
    with refused("the module's answer", "one row for each token", "shape (2, 24)"):
        hw.capture(CASES["bert"].make(), "pooler", [inputs])


def test_masks_of_no_known_pattern_are_refused(refused):
    X = torch.randn(3, 5, 4)
    with refused("the module's attention_mask", "3 sequences of 5 tokens", "shape (4, 1, 5)", "not as (k, n, d)"):
        hw.capture(Block(), "inner", [{"x": X, "attention_mask": torch.ones(4, 5, dtype=torch.bool)}])
    with refused("the module's attention_mask", "shape (3, 1, 1, 5, 5)"):
        hw.capture(Block(), "inner", [{"x": X, "attention_mask": torch.ones(3, 1, 1, 5, 5, dtype=torch.bool)}])
    model = CASES["llama"].make()
    ids = torch.randint(3, 30, (1, 6))
    packed = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).tril().bool().view(1, 1, 6, 6)
    with refused("the module's mask", "another pattern", "no packing"):
        hw.capture(model, "layers.1", [batch(ids, packed)])
    slanted = torch.linspace(-1, 0, 6).expand(1, 1, 6, 6)
    with refused("the module's attention_mask", "-1: something is added to the scores"):
        hw.capture(model, "layers.1", [batch(ids, slanted)])
    with torch.no_grad():
        held = model(ids, use_cache=True).past_key_values
    with refused("the module's input", "tokens after others that are in a cache"):
        hw.capture(model, "layers.1", [{"input_ids": ids, "past_key_values": held}])


def test_a_mask_that_the_call_contradicts_is_refused(refused):
    model, inputs = CASES["llama"].make(), CASES["llama"].inputs()
    with refused("mask", "queries see only keys behind", "'none'"):
        hw.capture(model, "layers.1", [inputs], mask="none")
    assert hw.capture(model, "layers.1", [inputs], mask="causal").mask == "causal"


def test_batches_of_nothing_but_filling_are_left_out(refused):
    model, inputs = CASES["llama"].make(), CASES["llama"].inputs()
    filling = batch(torch.zeros(2, 4, dtype=torch.long))
    data = hw.capture(model, "layers.1", [filling, inputs, filling])
    assert len(data) == 2
    with refused("batches", "not all filling"):
        hw.capture(model, "layers.1", [filling])


class Swapping(nn.Module):
    """As BigBird does: another module takes the place of the heads while the model runs."""

    def __init__(self):
        super().__init__()
        self.attention, self.output = nn.Module(), nn.Module()
        self.attention.self, self.attention.output = self.heads(), nn.Module()
        self.attention.output.dense = nn.Linear(4, 4)

    @staticmethod
    def heads():
        module = Odd()
        module.query, module.key, module.value = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        return module

    def forward(self, x):
        self.attention.self = self.heads()
        return self.attention.output.dense(self.attention.self(x))


def test_a_module_that_is_swapped_while_the_model_runs_was_not_called(refused):
    with refused("batches", "at least one that the module at attention is called with"):
        hw.capture(Swapping().eval(), "attention", [torch.randn(2, 3, 4)])


def test_half_precision_says_what_can_be_claimed():
    case = CASES["llama"]
    with pytest.warns(UserWarning, match=r"torch.bfloat16, rounded to about 8e-03.*no closer"):
        data = hw.capture(case.make(torch.bfloat16), case.path, [case.inputs()])
    assert data.dtype == torch.bfloat16


def test_what_was_replaced_can_be_captured_again():
    case = CASES["bert"]
    model = case.make()
    layer = hw.from_torch(model, case.path)
    before = hw.capture(model, case.path, [case.inputs()])
    with hw.replace(model, case.path, layer):
        after = hw.capture(model, case.path, [case.inputs()])
    torch.testing.assert_close(after.Y, before.Y, rtol=0, atol=1e-5)


SCRIPT = """
import torch
from tests.models import CASES

def made():
    case = CASES["vit"]
    return case.make(), [case.inputs()] * 3

def half():
    return made()[0]

def coarse():
    case = CASES["vit"]
    return case.make(torch.bfloat16), [case.inputs()]

def wrong():
    return made()[0], [{"pictures": torch.ones(1)}]

def broken():
    raise RuntimeError("no such file")

def short():
    def batches():
        yield made()[1][0]
        raise OSError("the disk is gone")
    return made()[0], batches()

def asks(question):
    return made()

def three():
    return 1, 2, 3
"""


def test_the_command_writes_shards(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "broken.py").write_text("def made(:")
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["headway", "capture", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, " ".join(said.err.split())

    code, out, words = run("mine.py:made", "layers.1.attention", "EXAMPLES", "--limit", "5", "--json")
    assert code == 0 and "Wrote 5 sequences of 5 tokens to EXAMPLES" in words
    assert json.loads(out) == {"folder": "EXAMPLES", "sequences": 5, "tokens": 5, "mask": "none"}
    assert len(hw.Examples.open("EXAMPLES")) == 5
    for source, said in (("mine.py:half", "returns a model and its batches"), ("mine.py:no", "a function no"),
                         ("mine.py", "a file and a function"), ("nowhere.py:made", "which is not there"),
                         ("no.such.module:made", "can be imported"), ("broken.py:made", "SyntaxError"),
                         ("mine.py:broken", "RuntimeError: no such file (mine.py"),
                         ("mine.py:short", "OSError: the disk is gone (mine.py"), ("mine.py:three", "a tuple of 3"),
                         ("mine.py:asks", "missing 1 required positional argument: 'question'. Try:"),
                         ("mine.py:wrong", "batches: expected what the model can be called with; got one")):
        code, out, words = run(source, "layers.1.attention", "OTHER")
        assert code == 2 and said in words
        assert not Path("OTHER").exists()
    code, out, words = run("mine.py:coarse", "layers.1.attention", "COARSE")
    assert code == 0 and "headway: capture: the activations are torch.bfloat16" in words and ".py:" not in words
    code, out, words = run("mine.py:made", "layers.7.attention", "OTHER")
    assert code == 2 and "layers.0.attention, layers.1.attention" in words


def test_a_model_in_double_is_captured_in_double():
    data = hw.capture(doubled("gpt2"), "h.0.attn", [CASES["gpt2"].inputs()])
    assert data.dtype == torch.float64
    agree(hw.from_torch(doubled("gpt2"), "h.0.attn"), data, 1e-10)
