"""Same function or not, by which mistake, heads without gauge: against planted answers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import headway as hw
from commands import headway
from headway.core import causes, gauge
from headway.core.layer import save_layer

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import same as bench


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


FORMS = {
    "plain": hw.Form(),
    "rotary": hw.Form(rotary=hw.Rotary(), sight=hw.Sight(causal=True)),
    "partial": hw.Form(rotary=hw.Rotary(turned=2, layout="pairs")),
    "table": hw.Form(offsets=hw.OffsetTable(normal(4, 9)), sight=hw.Sight(window=3)),
    "t5": hw.Form(offsets=hw.OffsetTable(normal(4, 8), kind="t5", far=16)),
    "slope": hw.Form(offsets=hw.Slope(normal(4)), sight=hw.Sight(causal=True)),
    "cap": hw.Form(cap=hw.Cap(3.0)),
    "sink": hw.Form(sink=hw.Sink(normal(4)), rotary=hw.Rotary(turned=2)),
    "sink and table": hw.Form(sink=hw.Sink(normal(4)), offsets=hw.OffsetTable(normal(4, 9))),
    "normed": hw.Form(normed=hw.Normed(1 + normal(4) / 4, 1 + normal(4, seed=1) / 4), rotary=hw.Rotary()),
    "gated": hw.Form(gate=hw.Gated(normal(4, 9, 4))),
}


def layer(form="plain", seed=1, **more):
    return hw.FactoredLayer.random(4, 8, size=4, groups=2, form=FORMS[form], seed=seed, **more)


@pytest.mark.parametrize("form", FORMS)
def test_other_factors_of_one_function_have_the_same_heads(form):
    mine = layer(form)
    found = hw.match(mine.canonical(), mine)
    assert found.worst < 1e-13
    assert hw.compare(mine, mine.canonical()).same
    assert hw.compare(mine, mine).kind == "same"


@pytest.mark.parametrize("form", FORMS)
def test_a_small_change_of_any_tensor_shows(form):
    mine, X = layer(form), normal(3, 6, 8)
    for name, value in mine.tensors().items():
        other = mine.with_tensors({name: value + 1e-5 * normal(*value.shape, seed=5)})
        gap = float((mine(X) - other(X)).abs().max())
        assert gap > 1e-7, name
        assert 0.02 * gap < hw.match(other, mine).worst < 1e-2, name


@pytest.mark.parametrize(("form", "name", "cause"), [
    ("rotary", "query", None), ("rotary", "out", None), ("gated", "value", None), ("normed", "key", None),
    ("sink", "sink", "sink"), ("table", "offsets", "offsets"), ("normed", "norm_key", "norm gain")])
def test_a_change_that_is_no_known_mistake_gets_no_cause_but_its_part(form, name, cause):
    mine = layer(form)
    value = mine.tensors()[name]
    found = hw.compare(mine, mine.with_tensors({name: value + 1e-2 * normal(*value.shape, seed=5)}))
    assert (found.kind, found.cause) == ("differs", cause)


@pytest.mark.parametrize("form", ["plain", "rotary", "sink"])
def test_invisible_constants_do_not_show(form):
    mine = layer(form)
    other = bench.unseen(mine, 0)
    X = normal(3, 6, 8)
    assert_close(other(X), mine(X), rtol=1e-10, atol=1e-10)
    assert hw.compare(mine, other).same


def test_qk_and_ov_are_the_matrices_that_scores_and_values_come_from():
    mine = layer("partial", biases=False)
    heads = hw.heads_of(mine)
    X, one = normal(6, 8), torch.ones(6, 1, dtype=torch.float64)
    Z = torch.cat([X, one], 1)
    delta = torch.arange(6).unsqueeze(0) - torch.arange(6).unsqueeze(1)
    for i in range(4):
        S = torch.zeros(6, 6, dtype=torch.float64)
        for name, M in heads.qk(i).items():
            if name == gauge.STILL:
                S = S + Z @ M @ Z.T
            else:
                turned = torch.polar(torch.ones_like(S), name[0] * delta.double())
                S = S + ((Z.to(M) @ M @ Z.to(M).T) * turned).real
        assert_close(torch.softmax(S, 1), mine.patterns(X)[i], rtol=1e-10, atol=1e-12)
    assert_close(heads.ov(2), mine.value[1] @ mine.out[2])


def test_layouts_with_their_weights_are_one_function_and_bases_are_not():
    mine = layer("rotary")
    other = bench.converted(mine, 0)
    assert hw.compare(mine, other).same
    wrong = replace(other, form=replace(other.form, rotary=replace(other.form.rotary, layout="half")))
    assert hw.compare(mine, wrong).cause == "rotary layout"
    based = replace(mine, form=replace(mine.form, rotary=hw.Rotary(base=5e5)))
    assert hw.compare(based, mine).cause == "rotary base"


def test_order_is_told_from_equality():
    mine = layer("rotary")
    assert hw.compare(mine, bench.reordered(mine, 0)).kind == "same up to head order"
    assert hw.match(bench.reordered(mine, 0), mine).worst < 1e-13


def test_equal_heads_are_merged_and_dead_ones_dropped():
    mine = layer("slope", seed=3)
    parts = {name: value.repeat_interleave(2, 0) for name, value in mine.tensors().items() if name != "offset"}
    split = replace(mine, **{n: parts[n] for n in ("query", "key", "value")},
                    out=torch.cat([mine.out * 0.25, mine.out * 0.75], 1).reshape(8, 4, 8),
                    form=replace(mine.form, offsets=hw.Slope(parts["slope"])))
    X = normal(2, 5, 8)
    assert_close(split(X), mine(X))
    assert hw.compare(split, mine).same
    silent = replace(mine, out=mine.out * torch.tensor([1.0, 0.0, 1.0, 1.0]).view(4, 1, 1).double())
    assert "4 heads against 3" in hw.compare(mine, silent).where


def test_two_mistakes_are_named_together():
    mine = layer("rotary")
    other = replace(mine, query=mine.query / 2, offset=None)
    found = hw.compare(mine, other)
    assert set(found.cause.split(" and ")) == {"scale", "bias"}


def test_the_example_shows_the_difference():
    mine = layer("rotary")
    other = replace(mine, query=mine.query * 2)
    found = hw.compare(mine, other)
    gap = (mine(found.example) - other(found.example)).abs().max()
    assert found.difference > 0.1
    assert float(gap) > 0.1 * float(mine(found.example).std())
    assert "Cause: scale" in str(found)


def test_functions_and_modules_are_asked():
    mine = layer("rotary", biases=True)
    assert hw.compare(mine, lambda X: mine(X)).same
    single = mine.to(torch.float32)
    found = hw.compare(lambda X: single(X), mine)  # takes float32 only: equal to its rounding
    assert (found.same, found.by) == (True, "inputs")
    assert found.largest > 1e-9
    rounded = hw.compare(lambda X: single(X.float()).double(), mine)  # takes float64, and should do better
    assert (rounded.same, rounded.cause) == (False, "rounding")
    assert "float32" in rounded.why
    half = mine.to(torch.bfloat16)
    assert "bfloat16" in hw.compare(mine, lambda X: half(X.bfloat16()).double()).why
    less = hw.compare(lambda X: replace(mine, offset=None)(X), mine)
    assert (less.kind, less.cause) == ("differs", "bias")
    boxes = hw.compare(lambda X: mine(X), lambda X: mine(X) + 1.0, width=8)
    assert (boxes.cause, boxes.match) == ("bias", None)
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64).eval()
    assert hw.compare(module, hw.from_torch(module)).same
    wrapped = torch.nn.Sequential(module)
    assert hw.compare((wrapped, "0"), module).same


def test_bad_sides_are_refused(refused):
    with refused("layer_a", "a function of X"):
        hw.compare(3, layer())
    with refused("width", "neither side says it"):
        hw.compare(lambda X: X, lambda X: X)
    with refused("layer_a", "8 outputs"):
        hw.compare(lambda X: X[..., :3], layer())
    with refused("module", "answers to X alone"):
        hw.compare(torch.nn.Bilinear(8, 8, 8), layer())
    with refused("learned", "causal against all keys in sight"):
        hw.match(layer("rotary"), layer("plain"))
    narrow = hw.Examples(normal(4, 3, 5), normal(4, 3, 8))
    with refused("on", "width 8"):
        hw.match(layer(), layer(), on=narrow)
    with refused("on", "width 8"):
        hw.compare(layer(), lambda X: X, on=narrow)
    with refused("on", "headway.Examples"):
        hw.compare(layer(), layer(), on=normal(4, 3, 8))
    with refused("width", "at least 1"):
        hw.compare(lambda X: X, lambda X: X, width=0)
    with refused("path", "no 'nope'"):
        hw.compare((torch.nn.Sequential(torch.nn.MultiheadAttention(8, 2)), "nope"), layer())
    for ask in (hw.heads_of, lambda module: hw.match(module, layer()), lambda module: hw.match(layer(), module)):
        with refused("layer", "from_torch"):
            ask(torch.nn.MultiheadAttention(8, 2))


def test_directions_that_no_token_visits_do_not_count():
    """Tokens behind a layer norm never have a mean: what heads do with it is nobody's business."""
    mine = layer("rotary")
    mean = torch.ones(8, 8, dtype=torch.float64) / 8
    moved = {name: torch.cat([F[:, :8] + mean @ normal(*F[:, :8].shape, seed=7), F[:, 8:]], 1)
             for name, F in (("query", mine.query), ("key", mine.key), ("value", mine.value))}
    other = mine.with_tensors(moved)
    X = torch.nn.functional.layer_norm(normal(40, 6, 8), (8,))
    assert_close(other(X), mine(X))
    data = hw.Examples(X, mine(X))
    assert not hw.compare(mine, other).same
    assert hw.compare(mine, other, on=data).same
    assert hw.match(mine, other, on=data).worst < 1e-12
    gain, bias = 1 + normal(8) / 3, normal(8, seed=2)  # with gain and bias the tokens lie in a plane beside zero
    free = torch.cat([1 / gain, -(bias / gain).sum(0, keepdim=True)])
    shift = free.unsqueeze(1) @ normal(1, 4, seed=3)
    other = replace(mine, query=mine.query + shift, key=mine.key - shift, value=mine.value + 2 * shift)
    X = X * gain + bias
    assert_close(other(X), mine(X))
    assert hw.compare(mine, other, on=hw.Examples(X, mine(X))).same


def test_on_examples_the_worst_input_stays_among_their_tokens():
    mine = layer("plain")
    X = torch.nn.functional.layer_norm(normal(40, 6, 8), (8,))
    found = hw.compare(mine, replace(mine, query=mine.query * 2), on=hw.Examples(X, mine(X)))
    assert found.cause == "scale"
    assert float(found.example.mean(1).abs().max()) < 1e-9


def turned(mine, **parts):
    return replace(mine, form=replace(mine.form, rotary=replace(mine.form.rotary, **parts)))


@pytest.mark.parametrize("off", [1e-5, 1e-6, 1e-7])
def test_a_base_that_is_a_little_off_is_another_function(off):
    mine = layer("rotary")
    found = hw.compare(mine, turned(mine, base=1e4 * (1 + off)))
    assert (found.kind, found.cause) == ("differs", "rotary base")
    assert off / 10 < found.largest < off
    assert hw.compare(mine, turned(mine, base=1e4 * (1 + off)), 1e-4).same


def test_positions_that_a_layer_gives_its_tokens_count():
    mine = layer("rotary")
    other = replace(mine, positions=2.0 * torch.arange(9))
    found = hw.compare(mine, other)
    assert not found.same
    assert "other positions" in str(found)
    assert len(found.example) == 9
    assert float((mine(found.example) - other(found.example)).abs().max()) > 0.1
    assert hw.compare(mine, replace(mine, positions=5.0 + torch.arange(9))).same  # only differences of them matter
    assert hw.compare(layer("plain"), replace(layer("plain"), positions=2.0 * torch.arange(9))).same
    assert hw.match(other, mine).worst == 0.0  # heads are the same all the same


@pytest.mark.parametrize("form", ["rotary", "gated", "normed", "sink"])
def test_a_single_entry_that_is_off_is_no_rounding(form):
    mine = layer(form)
    for name in ("query", "key", "value", "out", "offset"):
        value = mine.tensors()[name].clone()
        value.view(-1)[value.numel() // 2] += 1e-7
        found = hw.compare(mine, mine.with_tensors({name: value}))
        assert (found.kind, found.cause) == ("differs", None), name
    assert hw.compare(mine, mine.canonical().to(torch.float32)).cause == "rounding"


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1e-2])
def test_a_function_that_is_off_by_as_much_as_a_rounding_is_not_said_to_be_rounded(size):
    mine = layer("rotary")
    other = replace(mine, out=mine.out + size * normal(*mine.out.shape, seed=3))
    found = hw.compare(mine, lambda X: other(X))
    assert (found.kind, found.cause) == ("differs", None)
    for dtype in (torch.bfloat16, torch.float16):
        rough = mine.to(dtype)
        assert hw.compare(mine, lambda X, rough=rough: rough(X.to(rough.query.dtype)).double()).cause == "rounding"


def test_a_mistake_is_named_in_a_function_that_is_in_float32_inside():
    mine = layer("rotary")
    rough = mine.to(torch.float32)
    for other, cause in ((replace(rough, offset=None), "bias"), (replace(rough, query=rough.query * 2), "scale")):
        found = hw.compare(mine, lambda X, other=other: other(X.float()).double())
        assert found.cause == cause


def test_half_precision_does_not_hide_everything():
    mine = layer("rotary")
    half = mine.to(torch.bfloat16)
    found = hw.compare(half, lambda X: half(X))
    assert found.same
    assert "which the rounding of bfloat16 may make" in found.where
    other = replace(mine, out=mine.out + 0.015 * normal(*mine.out.shape, seed=3))
    assert not hw.compare(half, lambda X: other(X)).same


def test_layers_that_cannot_be_asked_the_same_are_compared_all_the_same():
    mine, crossed = layer(), layer(cross=True, key_width=6)
    for one, other, words in (
            (mine, crossed, "keys of another sequence in the second only"),
            (replace(mine, cross=True), mine, "keys of another sequence in the first only"),
            (crossed, layer(cross=True, key_width=5), "keys of width 6 against 5")):
        found = hw.compare(one, other)
        assert (found.kind, found.cause, found.example) == ("differs", None, None)
        assert words in str(found)
        assert "No input was found that shows it" in str(found)
    placed, other = (hw.Form(rotary=hw.Rotary(frequencies=normal(2, c).abs())) for c in (2, 3))
    other = hw.FactoredLayer.random(4, 8, size=4, form=other)
    for form in (placed, FORMS["rotary"], FORMS["plain"]):
        one = hw.FactoredLayer.random(4, 8, size=4, form=form)
        assert not hw.compare(one, other).same


def test_layers_of_other_heads_are_compared():
    for planes in (lambda n: hw.Rotary(turned=2 * n), lambda n: hw.Rotary(frequencies=normal(n).abs())):
        one, other = (hw.FactoredLayer.random(8 // q, 8, size=q, form=hw.Form(rotary=planes(q // 2)))
                      for q in (4, 8))
        assert hw.compare(one, other).kind == hw.compare(other, one).kind == "differs"
    mine = hw.FactoredLayer.random(4, 8, size=2)
    less = replace(mine, query=mine.query[:3], key=mine.key[:3], value=mine.value[:3], out=mine.out[:3])
    assert "4 heads against 3, merged and without dead ones; without partner: 4 of the first" in hw.compare(
        mine, less).where
    dead = replace(mine, out=mine.out * torch.tensor([1.0, 0.0, 1.0, 1.0]).view(4, 1, 1).double())
    assert "without partner: 2 of the second" in hw.compare(dead, mine).where
    whole = hw.AttentionLayer.random(heads=3, width=6)
    assert "without partner: 1 of the first" in hw.compare(
        whole, hw.AttentionLayer(whole.Theta[1:], whole.W[1:])).where
    seen = hw.FactoredLayer.random(4, 8, size=4, form=hw.Form(offsets=hw.OffsetTable(normal(4, 9))))
    blind = replace(seen, form=replace(seen.form, sight=hw.Sight(causal=True)))
    assert hw.compare(seen, blind).cause == "mask"


def test_heads_are_named_by_their_place_in_the_layer():
    mine = layer("plain")
    dead = replace(mine, out=mine.out * torch.tensor([0.0, 1.0, 1.0, 1.0]).view(4, 1, 1).double())
    other = replace(dead, out=dead.out.clone())
    other.out[2, 0, 0] += 0.1
    found = hw.compare(dead, other)
    assert "head 3 against head 3" in found.where
    assert "2 of 3 heads agree, not 3" in found.where
    whole = hw.AttentionLayer.random(heads=3, width=6, seed=0)
    W = whole.W.clone()
    for i in range(3):
        W[i, 4, 3] += 1e-3
        found = hw.compare(whole, replace(whole, W=W.clone()))
        W[i, 4, 3] -= 1e-3
        assert f"W of head {i + 1} against head {i + 1}, entry (5, 4)" in found.where
    assert "not" not in hw.compare(mine, replace(mine, offset=None)).where
    biased = replace(whole, key_bias=normal(3, 6))
    assert hw.compare(biased, whole).why == "the second lacks the key bias u of the first"


def test_merged_and_dead_heads_are_no_other_order():
    mine = layer("plain")
    dead = replace(mine, out=mine.out * torch.tensor([1.0, 0.0, 1.0, 1.0]).view(4, 1, 1).double())
    other = replace(dead, query=dead.query.clone())
    other.query[1] = normal(9, 4)
    assert hw.compare(dead, other).kind == "same"
    silent = replace(mine, out=mine.out * 0)  # nobody looks where nothing is answered
    assert hw.compare(silent, replace(silent, query=mine.query * 2)).same
    whole = hw.AttentionLayer.random(heads=2, width=4)
    assert hw.compare(replace(whole, W=whole.W * 0), replace(whole, Theta=whole.Theta * 2, W=whole.W * 0)).same


def test_gated_heads_are_merged_and_channels_of_one_gate_mixed():
    mine = hw.FactoredLayer.random(4, 8, size=4, form=FORMS["gated"], seed=1)
    X, more = normal(2, 5, 8), normal(4, 8)
    heads = torch.tensor([0, 1, 2, 3, 0])
    out = mine.out[heads]
    out[0], out[4] = out[0] - more, more
    split = replace(mine, query=mine.query[heads], key=mine.key[heads], value=mine.value[heads], out=out,
                    form=replace(mine.form, gate=hw.Gated(mine.form.gate.weight[heads])))
    assert_close(split(X), mine(X))
    assert hw.compare(split, mine).same
    assert not hw.compare(replace(split, out=mine.out[heads]), mine).same
    gate = mine.form.gate.weight[..., [0, 0, 1, 1]]  # one gate for two channels: they mix as without gates
    mine = replace(mine, form=replace(mine.form, gate=hw.Gated(gate)))
    M = torch.block_diag(normal(2, 2, seed=4), normal(2, 2, seed=5))
    other = replace(mine, value=mine.value @ M, out=torch.linalg.inv(M) @ mine.out)
    assert_close(other(X), mine(X))
    assert hw.compare(mine, other).largest < 1e-13
    swapped = replace(mine, value=mine.value[..., [2, 1, 0, 3]])
    assert not hw.compare(mine, swapped).same
    moved = replace(mine, form=replace(mine.form, gate=hw.Gated(gate + 1e-6 * gate.sign())))
    assert 1e-7 < hw.compare(mine, moved).largest < 1e-5
    back = torch.cat([mine.out[:, :1], -mine.out[:, :1]] * 2, 1)
    opposite = replace(mine, value=mine.value[..., [0, 0, 0, 0]], out=back,
                       form=replace(mine.form, gate=hw.Gated(normal(4, 9, 4, seed=6))))
    none = replace(opposite, out=opposite.out * 0)
    assert not hw.compare(opposite, none).same  # channels that would cancel, but for their gates


def test_large_constants_do_not_hide_the_scores():
    """A sink, or an offset, of a billion below stands for none in files."""
    table = torch.zeros(4, 9).double()
    table[:, :4] = -1e9
    for form in (hw.Form(sink=hw.Sink(table[0, 3:7])), hw.Form(offsets=hw.OffsetTable(table))):
        mine = hw.FactoredLayer.random(4, 8, size=4, form=form)
        found = hw.compare(mine, replace(mine, query=mine.query * (1 + 1e-5)))
        assert (found.kind, found.cause) == ("differs", "scale")
        assert 1e-6 < found.largest < 1e-4


def test_what_no_short_input_shows_is_named_by_the_weights():
    mine = layer("rotary")
    wide, wider = (replace(mine, form=replace(mine.form, sight=hw.Sight(True, far))) for far in (4096, 4097))
    found = hw.compare(wide, wider)
    assert (found.cause, found.example) == ("window", None)
    assert "by 0.0e+00 times" not in str(found)
    table = normal(4, 32)
    mine = layer("t5")
    one, other = (replace(mine, form=replace(mine.form, offsets=hw.OffsetTable(values, kind="t5")))
                  for values in (table, torch.cat([table[:, :-1], table[:, -1:] + 1], 1)))
    found = hw.compare(one, other)
    assert found.cause == "offsets"
    assert found.difference > 0.01
    still = replace(layer("plain"), query=layer("plain").query * 0)  # scores are zero: tokens stay of size 1
    found = hw.compare(still, replace(still, offset=None))
    assert found.difference > 0.1
    assert float(found.example.abs().max()) < 10


def test_norms_that_are_lost_with_their_gains_are_named():
    mine = layer("normed")
    assert hw.compare(mine, replace(mine, form=replace(mine.form, normed=None))).cause == "norm"


def test_caps_are_told_apart_in_words():
    mine = layer("cap")
    other = replace(mine, form=replace(mine.form, cap=hw.Cap(3.0 * (1 + 1e-7))))
    assert "a cap of 3 against 3.0000003" in hw.compare(mine, other).where
    assert hw.compare(mine, replace(mine, form=replace(mine.form, cap=hw.Cap(3.0 * (1 + 1e-12))))).same


def test_answers_that_are_no_numbers_have_no_cause():
    found = hw.compare(lambda X: X * float("nan"), lambda X: X * float("nan"), width=4)
    assert (found.same, found.cause) == (False, None)
    assert "not all finite" in str(found)


@pytest.mark.parametrize("kind", range(len(bench.MISTAKES)))
def test_a_planted_mistake_is_named(kind):
    _, wanted, plant, names = bench.MISTAKES[kind]
    name = names[-1]
    make = bench.window if isinstance(wanted, dict) and wanted.get(name) == "window" else plant
    found = hw.compare(bench.factors(name, 200 + kind), make(name, 200 + kind))
    assert found.cause == (wanted if isinstance(wanted, str) else wanted[name])
    assert found.cause in causes.CAUSES


def test_checkpoints_are_compared_from_the_shell(tmp_path):
    import transformers as hf

    torch.manual_seed(0)
    model = hf.LlamaModel(hf.LlamaConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=8,
        vocab_size=20, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "two")
    file = tmp_path / "two" / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("layers.1.self_attn.q_proj.weight"))
    tensors[name] = tensors[name] * 2
    save_file(tensors, file, {"format": "pt"})
    one, two = (tmp_path / folder / "model.safetensors" for folder in ("one", "two"))
    assert headway("compare", f"{one}:0", f"{two}:0").returncode == 0
    found = headway("compare", f"{one}:1", f"{two}:1", "--json", "--figure", tmp_path / "who.png",
                    "--worst", tmp_path / "x.safetensors")
    assert found.returncode == 1
    data = json.loads(found.stdout)
    assert (data["cause"], data["kind"], data["same"], data["order"]) == ("scale", "differs", False, [0, 1, 2, 3])
    assert [row["partner"] for row in data["heads"]] == [0, 1, 2, 3]
    assert data["heads"][0]["scores"] == pytest.approx(0.5)
    assert data["heads"][0]["values"] == 0.0  # equal tensors, so nothing at all
    assert (tmp_path / "who.png").stat().st_size > 1000
    assert load_file(tmp_path / "x.safetensors")["X"].shape[1] == 16
    assert hw.compare((one, 1), f"{two}:1").cause == "scale"
    save_layer(tmp_path / "own.safetensors", hw.from_checkpoint(one, 1))
    assert hw.compare(tmp_path / "own.safetensors", (one, 1)).same


def test_the_shell_answers_where_there_is_nothing_to_draw_or_to_write(tmp_path):
    mine = layer("rotary")
    wide = replace(mine, form=replace(mine.form, sight=hw.Sight(True, 4096)))
    save_layer(tmp_path / "one.safetensors", mine)
    save_layer(tmp_path / "two.safetensors", wide)
    found = headway("compare", tmp_path / "one.safetensors", tmp_path / "two.safetensors", "--json", "--figure",
                    tmp_path / "who.pdf", "--worst", tmp_path / "x.safetensors")
    assert found.returncode == 1
    assert json.loads(found.stdout)["cause"] == "window"
    assert "No figure" in found.stderr
    assert "Nothing written" in found.stderr
    assert not list(tmp_path.glob("who*")) + list(tmp_path.glob("x*"))


def test_the_shell_counts_heads_by_their_place_in_the_file(tmp_path):
    mine = hw.AttentionLayer.random(heads=3, width=6)
    save_layer(tmp_path / "one.safetensors", mine)
    save_layer(tmp_path / "two.safetensors", replace(mine, Theta=mine.Theta[[1, 2, 0]], W=mine.W[[1, 2, 0]]))
    found = headway("compare", tmp_path / "one.safetensors", tmp_path / "two.safetensors", "--json")
    data = json.loads(found.stdout)
    assert data["order"] == [row["partner"] for row in data["heads"]] == [1, 2, 0]
