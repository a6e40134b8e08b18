"""Every form of scores against its slow twin, its derivatives, and what is refused."""

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.testing import assert_close

import dense
import headway as hw
from headway.core import attention
from headway.core.forms import Form, heads_out, in_sight, patterns_of
from headway.core.layer import load_layer, load_plain, save_layer
from headway.core.positions import buckets_of

EXACT = {"rtol": 1e-12, "atol": 1e-12}
SAME = {"rtol": 0, "atol": 0}
M, D, Q, P = 4, 3, 4, 3  # heads, width, size of queries, size of values


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def vectors(planes=2, c=2):
    return hw.Rotary(frequencies=normal(planes, c, seed=8))


# One of every part, made for M heads.
FORMS = {
    "plain": {},
    "rotary, halves": {"rotary": hw.Rotary()},
    "rotary, pairs": {"rotary": hw.Rotary(base=500.0, layout="pairs")},
    "partial, halves": {"rotary": hw.Rotary(turned=2)},
    "partial, pairs": {"rotary": hw.Rotary(layout="pairs", turned=2)},
    "given frequencies": {"rotary": hw.Rotary(frequencies=normal(2, seed=7))},
    "fewer given frequencies": {"rotary": hw.Rotary(frequencies=normal(1, seed=7), layout="pairs")},
    "clipped table": {"offsets": hw.OffsetTable(normal(M, 5))},
    "clipped table backwards": {"offsets": hw.OffsetTable(normal(M, 3), both=False)},
    "T5's table": {"offsets": hw.OffsetTable(normal(M, 8), "t5", far=6)},
    "T5's table backwards": {"offsets": hw.OffsetTable(normal(M, 6), "t5", both=False, far=6)},
    "slope": {"offsets": hw.Slope(normal(M))},
    "window": {"sight": hw.Sight(window=2)},
    "causal": {"sight": hw.Sight(causal=True)},
    "causal window": {"sight": hw.Sight(causal=True, window=2)},
    "prefix": {"sight": hw.Sight(causal=True, prefix=2)},
    "prefix and window": {"sight": hw.Sight(causal=True, prefix=3, window=2)},
    "cap": {"cap": hw.Cap(1.5)},
    "sink": {"sink": hw.Sink(normal(M))},
    "normed": {"normed": hw.Normed(normal(Q), normal(Q, seed=1))},
    "gated": {"gate": hw.Gated(normal(M, D + 1, P))},
    "as Qwen 3": {"rotary": hw.Rotary(1e6), "normed": hw.Normed(normal(Q), normal(Q, seed=1)),
                  "sight": hw.Sight(causal=True)},
    "as Gemma 2": {"rotary": hw.Rotary(), "cap": hw.Cap(2.0), "sight": hw.Sight(causal=True, window=2)},
    "as gpt-oss": {"rotary": hw.Rotary(15e4), "sink": hw.Sink(normal(M)), "sight": hw.Sight(causal=True, window=3)},
}
forms = pytest.mark.parametrize("name", FORMS)


def layer_of(form, groups=2, cross=False, offset=True, seed=0, z=None):
    """A layer of other sizes everywhere, so that no two axes can be mistaken for each other."""
    z = D if z is None else z
    return hw.FactoredLayer(
        normal(M, D + 1, Q, seed=seed), normal(groups, z + 1, Q, seed=seed + 1),
        normal(groups, z + 1, P, seed=seed + 2), normal(M, P, 2, seed=seed + 3),
        normal(2, seed=seed + 4) if offset else None, form, cross=cross)


def assert_computes_the_formula(layer, X, Z=None, **given):
    Y, P = dense.formed(X, Z, layer.tensors(), layer.form, **given)
    assert_close(Y.imag.abs().max(), torch.zeros((), dtype=torch.float64), **SAME)
    assert_close(layer(X, Z, **given), Y.real, **EXACT)
    assert_close(layer.patterns(X, Z, **given), P.real, **EXACT)


# The function


@forms
def test_a_form_computes_its_formula(name):
    layer = layer_of(Form(**FORMS[name]))
    assert_computes_the_formula(layer, normal(2, 5, D, seed=9))


@forms
@pytest.mark.parametrize("groups", [1, 4])
def test_with_padding_and_other_groups(name, groups):
    layer = layer_of(Form(**FORMS[name]), groups, offset=False)
    padding = torch.tensor([[False, False, True, False], [True, False, False, True]])
    assert_computes_the_formula(layer, normal(2, 4, D, seed=9), padding=padding)


@forms
def test_keys_of_another_sequence(name):
    layer = layer_of(Form(**FORMS[name]), cross=True, z=2)
    hidden = torch.tensor([[False] * 5, [False] * 4 + [True]])
    assert_computes_the_formula(layer, normal(2, 3, D, seed=9), normal(2, 5, 2, seed=10), key_padding=hidden)


@pytest.mark.parametrize("shape", [(5,), (2, 5)], ids=str)
@pytest.mark.parametrize("name", [name for name, parts in FORMS.items() if {"rotary", "offsets"} & set(parts)])
def test_given_positions(name, shape):
    layer, places = layer_of(Form(**FORMS[name])), 3 * normal(*shape, seed=11)
    X = normal(2, 5, D, seed=9)
    assert_computes_the_formula(layer, X, positions=places)
    assert float((layer(X, positions=places) - layer(X)).abs().max()) > 1e-3


@pytest.mark.parametrize("shape", [(5, 2), (2, 5, 2)], ids=str)
def test_positions_that_are_vectors(shape):
    layer, places = layer_of(Form(rotary=vectors())), normal(*shape, seed=11)
    assert_computes_the_formula(layer, normal(2, 5, D, seed=9), positions=places)
    other = layer_of(Form(rotary=vectors()), cross=True, z=2)
    assert_computes_the_formula(other, normal(2, 5, D, seed=9), normal(2, 3, 2), positions=places,
                                key_positions=normal(2, 3, 2, seed=12))


@st.composite
def cases(draw):
    """A form of any parts together, with sequences for it."""
    seed = draw(st.integers(0, 99))
    m, q, d, p = draw(st.sampled_from([(1, 2, 3, 1), (2, 4, 2, 3), (4, 6, 3, 2)]))
    omega = draw(st.sampled_from([None, "given", "vectors"]))
    turned = draw(st.sampled_from([None, 2]))
    planes = (q if turned is None else turned) // 2
    given = {None: None, "given": normal(planes, seed=seed), "vectors": normal(planes, 2, seed=seed)}[omega]
    layout = draw(st.sampled_from(["half", "pairs"]))
    rotary = draw(st.sampled_from([None, hw.Rotary(draw(st.sampled_from([10.0, 1e4])), layout, turned, given)]))
    offsets = None
    if rotary is None or rotary.vectors is None:
        offsets = draw(st.sampled_from([
            None, hw.Slope(normal(m, seed=seed)), hw.OffsetTable(normal(m, 5, seed=seed)),
            hw.OffsetTable(normal(m, 4, seed=seed), both=False),
            hw.OffsetTable(normal(m, 8, seed=seed), "t5", far=5), hw.OffsetTable(normal(m, 5), "t5", False, 4)]))
    causal = draw(st.booleans())
    form = Form(
        rotary=rotary, offsets=offsets,
        sight=hw.Sight(causal, draw(st.sampled_from([None, 1, 2, 9])), draw(st.integers(0, 3)) if causal else 0),
        cap=draw(st.sampled_from([None, hw.Cap(0.7)])),
        sink=draw(st.sampled_from([None, hw.Sink(normal(m, seed=seed))])),
        normed=draw(st.sampled_from([None, hw.Normed(normal(q, seed=seed), normal(q, seed=seed + 1), 0.1)])),
        gate=draw(st.sampled_from([None, hw.Gated(normal(m, d + 1, p, seed=seed))])))
    cross = draw(st.booleans())
    g, z = draw(st.sampled_from([g for g in (1, 2, 4) if m % g == 0])), d + 1 if cross else d
    layer = hw.FactoredLayer(
        normal(m, d + 1, q, seed=seed), normal(g, z + 1, q, seed=seed + 1), normal(g, z + 1, p, seed=seed + 2),
        normal(m, p, 2, seed=seed + 3), draw(st.sampled_from([None, normal(2, seed=seed)])), form, cross=cross)
    words = {}
    last = () if rotary is None or rotary.vectors is None else (2,)
    keys = 5 if cross else 4
    if last or draw(st.booleans()):
        words["positions"] = 2 * normal(*draw(st.sampled_from([(4, *last), (2, 4, *last)])), seed=seed + 5)
        if cross:
            words["key_positions"] = 2 * normal(2, keys, *last, seed=seed + 6)
    if draw(st.booleans()):
        fill = torch.zeros(2, keys, dtype=torch.bool)
        fill[1, draw(st.integers(0, keys - 1))] = True
        words["key_padding" if cross else "padding"] = fill
    X = normal(2, 4, d, seed=seed + 7)
    Z = normal(2, keys, z, seed=seed + 8) if cross else None
    see = in_sight(form.sight, X, Z, words.get("padding"), words.get("key_padding"))
    assume(see is None or bool(see.any(2).all()))
    return layer, X, Z, words


@given(cases())
def test_parts_go_together(case):
    layer, X, Z, words = case
    assert_computes_the_formula(layer, X, Z, **words)
    words.pop("positions", None), words.pop("key_positions", None)  # buckets that 0 … k − 1 reach are kept
    if layer.form.rotary is None or layer.form.rotary.vectors is None:
        assert_close(layer.canonical()(X, Z, **words), layer(X, Z, **words), rtol=1e-9, atol=1e-9)
    back = Form.read(layer.form.settings(), layer.form.tensors())
    assert back == layer.form and hash(back) == hash(layer.form)


def test_a_plain_layer_in_factors_is_the_plain_layer():
    plain = hw.AttentionLayer.random(3, 4, out_width=2, rank=2, key_bias=True, offset=True, mask="causal", seed=1)
    X = normal(2, 6, 4)
    assert_close(hw.FactoredLayer.of(plain)(X), plain(X), **EXACT)
    thin = hw.FactoredLayer.of(replace(plain, key_bias=None), rank=2, out_rank=2)
    assert_close(thin(X), replace(plain, key_bias=None)(X), **EXACT)
    assert (thin.size, thin.value_size) == (2, 2)
    layer = hw.FactoredLayer.random(4, 5, groups=2, seed=2)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    assert_close(layer.dense()(normal(2, 6, 5), padding), layer(normal(2, 6, 5), padding=padding), **EXACT)


def test_turning_by_one_position_more_changes_nothing_but_the_offset_does():
    rotary = hw.Rotary(layout="pairs", turned=4)
    q, k = normal(1, 1, 1, 6), normal(1, 1, 1, 6, seed=1)

    def score(a, b):
        here, there = (rotary.turn(x, torch.tensor([float(place)])) for x, place in ((q, a), (k, b)))
        return float((here * there).sum())

    assert score(3, 8) == pytest.approx(score(103, 108), rel=1e-12)
    assert score(3, 8) != pytest.approx(score(3, 9), rel=1e-3)
    assert score(5, 5) == pytest.approx(float((q * k).sum()), rel=1e-12)


@pytest.mark.parametrize(("buckets", "both", "far"), [
    (32, True, 128), (32, False, 128), (64, True, 256), (10, True, 20), (12, False, 50)])
def test_buckets_are_those_of_t5(buckets, both, far):
    delta = torch.arange(-700, 701)
    found = buckets_of(delta, "t5", buckets, both, far)
    assert found.tolist() == [dense.t5_bucket(int(x), buckets, both, far) for x in delta]
    # What T5 itself writes down, in the single precision it computes in.
    side, away = (buckets // 2, delta.abs()) if both else (buckets, (-delta).clamp_min(0))
    exact = side // 2
    wide = exact + (torch.log(away.float() / exact) / math.log(far / exact) * (side - exact)).clamp_min(0).long()
    theirs = torch.where(away < exact, away, wide.clamp_max(side - 1)) + (side * (delta > 0) if both else 0)
    assert found.tolist() == theirs.tolist()


def test_numbers_of_t5_known_by_heart():
    table = hw.OffsetTable(normal(1, 32), "t5")
    delta = torch.tensor([0, -1, -7, -8, -11, -12, -16, -127, -128, -500, 1, 7, 8, 16, 500])
    assert table.bucket(delta).tolist() == [0, 1, 7, 8, 8, 9, 10, 15, 15, 15, 17, 23, 24, 26, 31]
    assert hw.OffsetTable(normal(1, 32), "t5", both=False).bucket(delta).tolist() == [
        0, 1, 7, 8, 11, 12, 16, 31, 31, 31, 0, 0, 0, 0, 0]


# Derivatives


def outputs(layer, X, Z=None):
    see = in_sight(layer.form.sight, X, Z)

    def function(t):
        return attention.project(heads_out(X, Z, t, layer.form, see), t["out"], t.get("offset"))

    return function


@forms
def test_products_agree_with_a_step_along_i(name):
    layer, X = layer_of(Form(**FORMS[name])), normal(2, 4, D, seed=9)
    t = layer.tensors()
    along = {key: normal(*value.shape, seed=20 + i) for i, (key, value) in enumerate(t.items())}
    stepped = {key: torch.complex(value, 1e-30 * along[key]) for key, value in t.items()}
    slow = dense.formed(X, None, stepped, layer.form)[0].imag / 1e-30
    function = outputs(layer, X)
    Y, forward = torch.func.jvp(function, (t,), (along,))
    assert_close(Y, layer(X), **EXACT)
    assert_close(forward, slow, rtol=1e-11, atol=1e-12)
    U = normal(*Y.shape, seed=40)
    back = torch.func.vjp(function, t)[1](U)[0]
    assert set(back) == set(t)
    assert_close(sum((back[key] * along[key]).sum() for key in t), (U * slow).sum(), rtol=1e-11, atol=1e-12)


@forms
def test_several_layers_and_several_products_at_once(name):
    layer, X = layer_of(Form(**FORMS[name])), normal(2, 4, D, seed=9)
    function = outputs(layer, X)
    t = layer.tensors()
    two = {key: torch.stack([value, 0.5 * value]) for key, value in t.items()}
    halved = layer.with_tensors({key: 0.5 * value for key, value in t.items()})
    assert_close(torch.func.vmap(function)(two), torch.stack([layer(X), halved(X)]), **EXACT)
    U = normal(3, *layer(X).shape)
    pull = torch.func.vjp(function, t)[1]
    many = torch.func.vmap(pull)(U)[0]
    assert_close(many["query"][1], pull(U[1])[0]["query"], **EXACT)


def test_a_cap_may_be_an_unknown_too():
    layer, X = layer_of(Form(cap=hw.Cap(1.5))), normal(2, 4, D, seed=9)
    function = outputs(layer, X)
    cap = torch.tensor(1.5, dtype=torch.float64)
    slope = torch.func.jacfwd(lambda c: function({**layer.tensors(), "cap": c}))(cap)
    above, below = (layer.with_tensors({"cap": cap + h})(X) for h in (1e-6, -1e-6))
    assert_close(slope, (above - below) / 2e-6, rtol=1e-7, atol=1e-8)


# What a form is


def test_a_form_in_words():
    assert Form().describe() == "plain scores"
    assert Form(rotary=hw.Rotary(), sight=hw.Sight(True)).describe() == "rotary scores, base 10,000, halves; causal"
    full = Form(rotary=hw.Rotary(1e6, "pairs", 2), offsets=hw.Slope(normal(M)), sight=hw.Sight(True, 128, 3),
                cap=hw.Cap(50), sink=hw.Sink(normal(M)), normed=hw.Normed(normal(Q), normal(Q)),
                gate=hw.Gated(normal(M, D + 1, P)))
    assert full.describe() == (
        "rotary scores, base 1,000,000, pairs, 2 coordinates turned; slopes; normed queries and keys; capped "
        "at 50; sinks; gated heads; causal, a window of 128, a prefix of 3")
    assert Form(offsets=hw.OffsetTable(normal(M, 32), "t5")).describe() == "T5's table of 32 offsets"
    assert Form(rotary=vectors()).describe() == "rotary scores, given frequencies, halves, positions of 2 numbers"
    assert repr(hw.FactoredLayer.random(4, 8, groups=2)) == (
        "FactoredLayer(4 heads in 2 groups of size 2, width 8 → 8: plain scores)")
    assert repr(layer_of(Form(sight=hw.Sight(True)), cross=True, z=2)) == (
        "FactoredLayer(4 heads in 2 groups of size 4, width 3 and 2 → 2, keys of another sequence: "
        "plain scores; causal)")


def test_plain_is_plain_whatever_is_in_sight():
    assert Form().is_plain and Form(sight=hw.Sight(True, 3)).is_plain
    assert not any(Form(**parts).is_plain for parts in FORMS.values() if set(parts) - {"sight"})


@forms
def test_equal_settings_and_unknowns_are_equal_forms(name):
    form = Form(**FORMS[name])
    assert form == form.with_tensors({})
    own = form.tensors()
    if own:
        assert form != form.with_tensors({key: value + 1 for key, value in own.items()})
    assert (form == Form()) == (name == "plain")


def test_parts_cannot_be_replaced_in_place():
    form, layer = Form(rotary=hw.Rotary()), layer_of(Form())
    for thing, part in ((form, "rotary"), (form.rotary, "base"), (form.sight, "causal"), (layer, "query")):
        with pytest.raises(FrozenInstanceError):
            setattr(thing, part, None)


@forms
def test_another_dtype(name):
    layer, X = layer_of(Form(**FORMS[name])), normal(2, 5, D, seed=9)
    single = layer.to(torch.float32)
    assert {value.dtype for value in single.tensors().values()} == {torch.float32}
    assert single(X.float()).dtype == torch.float32
    assert_close(single(X.float()).double(), layer(X), rtol=1e-3, atol=1e-4)
    assert single.to("cpu").form == single.form


def test_sizes_one_sequence_and_whole_numbers():
    layer = layer_of(Form(rotary=hw.Rotary()), cross=True, z=2)
    assert (layer.heads, layer.groups, layer.width, layer.key_width, layer.out_width, layer.size,
            layer.value_size) == (M, 2, D, 2, 2, Q, P)
    X, Z = normal(2, 5, D).sign().to(torch.int8), normal(2, 3, 2)
    assert_close(layer(X, Z), layer(X.double(), Z), **SAME)
    assert_close(layer(X[1], Z[1]), layer(X, Z)[1], **EXACT)
    hidden = torch.tensor([[False] * 3, [False, True, False]])
    one = layer.patterns(X[1], Z[1], key_padding=hidden[1])
    assert_close(one, layer.patterns(X, Z, key_padding=hidden)[1], **EXACT)


def test_positions_stay_with_the_layer():
    places = torch.tensor([0.0, 0.5, 2.0, 7.0])
    layer = layer_of(Form(rotary=hw.Rotary()))
    own, X = replace(layer, positions=places), normal(2, 3, D)
    assert_close(own(X), layer(X, positions=places[:3]), **SAME)
    assert_close(own(X, positions=places[1:]), layer(X, positions=places[1:]), **SAME)
    places2 = normal(4, 2)
    turned = replace(layer_of(Form(rotary=vectors())), positions=places2)
    assert_close(turned(X), turned(X, positions=places2[:3]), **SAME)


def test_nothing_is_changed_or_taped():
    layer, X = layer_of(Form(rotary=hw.Rotary(), sink=hw.Sink(normal(M)))), normal(2, 4, D).requires_grad_()
    before = [value.clone() for value in (X, *layer.tensors().values())]
    assert not layer(X).requires_grad
    layer.canonical()
    for old, new in zip(before, (X, *layer.tensors().values()), strict=True):
        assert_close(new, old, **SAME)


@pytest.mark.parametrize("seed", [0, 1])
def test_random_layers_have_scores_of_the_size_asked_for(seed):
    layer = hw.FactoredLayer.random(6, 64, groups=3, scale=3.0, biases=False, seed=seed)
    X = normal(200, 4, 64, seed=seed).sign()
    Q, K = (torch.einsum("nkd,mdq->nmkq", X, F[:, :-1]) for F in (layer.query, layer.key))
    S = Q @ K.repeat_interleave(2, 1).mT
    assert float(S.std()) == pytest.approx(3.0, rel=0.1)
    assert layer.offset is None
    again = hw.FactoredLayer.random(6, 64, groups=3, scale=3.0, biases=False, seed=seed)
    assert all(torch.equal(a, b) for a, b in zip(layer.tensors().values(), again.tensors().values(), strict=True))
    assert hw.FactoredLayer.random(2, 4, cross=True, key_width=3, out_width=5).key_width == 3


# Files


@forms
def test_a_layer_comes_back_from_its_file(name, tmp_path):
    layer = layer_of(Form(**FORMS[name]), cross=name == "slope")
    save_layer(tmp_path / "layer.safetensors", layer)
    back = load_layer(tmp_path / "layer.safetensors")
    assert back.form == layer.form and back.cross == layer.cross
    assert list(back.tensors()) == list(layer.tensors())
    for key, value in layer.tensors().items():
        assert_close(back.tensors()[key], value, **SAME)
    save_layer(tmp_path / "again.safetensors", back)
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "layer.safetensors").read_bytes()


def test_given_frequencies_and_positions_come_back(tmp_path):
    layer = replace(layer_of(Form(rotary=vectors())), positions=normal(4, 2))
    save_layer(tmp_path / "layer.safetensors", layer)
    back = load_layer(tmp_path / "layer.safetensors")
    assert_close(back.form.rotary.frequencies, layer.form.rotary.frequencies, **SAME)
    assert_close(back.positions, layer.positions, **SAME)


def test_who_needs_one_matrix_a_head_multiplies_out_or_refuses(tmp_path, refused):
    layer = hw.FactoredLayer.random(2, 4, form=Form(sight=hw.Sight(causal=True)))
    save_layer(tmp_path / "plain.safetensors", layer)
    X = normal(2, 5, 4)
    assert_close(load_plain(tmp_path / "plain.safetensors")(X), layer(X), **EXACT)
    save_layer(tmp_path / "turned.safetensors", hw.FactoredLayer.random(2, 4, form=Form(rotary=hw.Rotary())))
    with refused(str(tmp_path / "turned.safetensors"), "rotary scores"):
        load_plain(tmp_path / "turned.safetensors")


@pytest.mark.parametrize(("change", "word"), [
    ({"form": "{"}, "none that can be read"),
    ({"form": "[1]"}, "list"),
    ({"form": '{"turning": {}}'}, "turning"),
    ({"form": '{"rotary": {"bass": 3}}'}, "bass"),
    ({"form": '{"rotary": {"base": "low"}}'}, "low"),
    ({"form": '{"rotary": {"layout": "thirds"}}'}, "thirds"),
    ({"form": '{"rotary": {"turned": 9.5}}'}, "9.5"),
    ({"form": '{"rotary": null}'}, "NoneType"),
    ({"form": '{"sink": {}}'}, "sink"),
    ({"form": '{"offsets": {"kind": "slope"}}'}, "slope"),
    ({"form": '{"cap": {}}'}, "cap"),
    ({"form": '{"sight": {"causal": "yes"}}'}, "yes"),
    ({"cross": "3"}, "3"),
    ({"cross": None}, "none that can be read"),
])
def test_edited_files_are_refused_in_a_sentence(tmp_path, change, word):
    from headway.core.files import write_tensors

    tensors, words = layer_of(Form()).stored()
    words = {key: value for key, value in {**words, **change}.items() if value is not None}
    write_tensors(tmp_path / "layer.safetensors", tensors, words)
    with pytest.raises(hw.InputError, match=word):
        load_layer(tmp_path / "layer.safetensors")


@pytest.mark.parametrize("name", ["query", "out", "extra"])
def test_files_with_parts_too_many_or_too_few_are_refused(tmp_path, name, refused):
    from headway.core.files import write_tensors

    tensors, words = layer_of(Form()).stored()
    tensors = {**tensors, name: normal(3)} if name == "extra" else {k: v for k, v in tensors.items() if k != name}
    write_tensors(tmp_path / "layer.safetensors", tensors, words)
    with refused("layer", "tensors query, key, value, out"):
        load_layer(tmp_path / "layer.safetensors")


# Refusals


@pytest.mark.parametrize(("name", "make", "word"), [
    ("rotary.base", lambda: hw.Rotary(base=0), "0"),
    ("rotary.layout", lambda: hw.Rotary(layout="thirds"), "'thirds'"),
    ("rotary.turned", lambda: hw.Rotary(turned=3), "even"),
    ("rotary.turned", lambda: hw.Rotary(turned=True), "bool"),
    ("rotary.frequencies", lambda: hw.Rotary(frequencies=normal(2, 2, 2)), "(2, 2, 2)"),
    ("rotary.frequencies", lambda: hw.Rotary(frequencies=torch.tensor([torch.nan])), "nan"),
    ("rotary.frequencies", lambda: hw.Rotary(turned=2, frequencies=normal(2)), "1 planes"),
    ("offsets.values", lambda: hw.OffsetTable(normal(4)), "(4,)"),
    ("offsets.values", lambda: hw.OffsetTable(normal(2, 4)), "4 buckets"),
    ("offsets.values", lambda: hw.OffsetTable(normal(2, 3), "t5"), "at least 4"),
    ("offsets.kind", lambda: hw.OffsetTable(normal(2, 4), "alibi"), "'alibi'"),
    ("offsets.far", lambda: hw.OffsetTable(normal(2, 5), far=128), "128"),
    ("offsets.far", lambda: hw.OffsetTable(normal(2, 32), "t5", far=4), "4"),
    ("offsets.values", lambda: hw.Slope(normal(2, 2)), "(2, 2)"),
    ("cap.value", lambda: hw.Cap(-1.0), "-1.0"),
    ("cap.value", lambda: hw.Cap("high"), "'high'"),
    ("sink.values", lambda: hw.Sink(normal(2, 2)), "(2, 2)"),
    ("normed.key", lambda: hw.Normed(normal(4), normal(5)), "(5,)"),
    ("normed.eps", lambda: hw.Normed(normal(4), normal(4), -1e-6), "-1e-06"),
    ("gate.weight", lambda: hw.Gated(normal(4, 4)), "(4, 4)"),
    ("sight.window", lambda: hw.Sight(window=0), "0"),
    ("sight.causal", lambda: hw.Sight(causal="yes"), "'yes'"),
    ("sight.prefix", lambda: hw.Sight(prefix=2), "causal=True"),
    ("form.rotary", lambda: Form(rotary=10_000.0), "float"),
    ("form.sight", lambda: Form(sight=None), "NoneType"),
    ("form.offsets", lambda: Form(rotary=vectors(), offsets=hw.Slope(normal(M))), "Slope"),
    ("tensors", lambda: Form().with_tensors({"sink": normal(M)}), "none"),
])
def test_a_malformed_part_is_refused(refused, name, make, word):
    with refused(name, word):
        make()


@pytest.mark.parametrize(("name", "change", "word"), [
    ("query", {"query": normal(M, D + 1)}, "(4, 4)"),
    ("query", {"query": "heads"}, "str"),
    ("query", {"query": normal(0, D + 1, Q), "out": normal(0, P, 2)}, "(0, 4, 4)"),
    ("key", {"key": normal(2, D + 2, Q)}, "cross=True"),
    ("key", {"key": normal(2, D + 1, Q + 1)}, "(2, 4, 5)"),
    ("key", {"key": normal(3, D + 1, Q), "value": normal(3, D + 1, P)}, "divides the 4 heads"),
    ("value", {"value": normal(1, D + 1, P)}, "(1, 4, 3)"),
    ("out", {"out": normal(M, P + 1, 2)}, "(4, 4, 2)"),
    ("out", {"out": torch.full((M, P, 2), torch.inf)}, "inf"),
    ("offset", {"offset": normal(3)}, "(3,)"),
    ("form", {"form": "rotary"}, "str"),
    ("cross", {"cross": "no"}, "'no'"),
    ("positions", {"positions": normal(4, 2)}, "(4, 2)"),
    ("rotary", {"form": Form(rotary=hw.Rotary(turned=6))}, "at most 4"),
    ("offsets.values", {"form": Form(offsets=hw.Slope(normal(3)))}, "4 heads"),
    ("sink.values", {"form": Form(sink=hw.Sink(normal(3)))}, "4 heads"),
    ("normed.query", {"form": Form(normed=hw.Normed(normal(5), normal(5)))}, "(5,)"),
    ("gate.weight", {"form": Form(gate=hw.Gated(normal(M, D, P)))}, "(4, 3, 3)"),
    ("sink", {"form": Form(sink=hw.Sink(normal(M).float()))}, "float32"),
])
def test_a_malformed_layer_is_refused(refused, name, change, word):
    with refused(name, word):
        replace(layer_of(Form()), **change)


@pytest.mark.parametrize(("name", "call", "word"), [
    ("X", lambda one, two: one(normal(2, 5, 4)), "(2, 5, 4)"),
    ("X", lambda one, two: one(normal(2, 5, D).float()), "float32"),
    ("Z", lambda one, two: one(normal(2, 5, D), normal(2, 5, D)), "keys are those of X"),
    ("Z", lambda one, two: two(normal(2, 5, D)), "layer(X, Z)"),
    ("Z", lambda one, two: two(normal(2, 5, D), normal(3, 5, 2)), "(3, 5, 2)"),
    ("Z", lambda one, two: two(normal(2, 5, D), normal(5, 2)), "(1, 5, 2)"),
    ("Z", lambda one, two: two(normal(2, 5, D), normal(2, 1, 2), key_padding=torch.ones(2, 1).bool()), "see none"),
    ("key_padding, key_positions", lambda one, two: one(normal(2, 5, D), key_positions=normal(5)), "positions"),
    ("padding", lambda one, two: one(normal(2, 5, D), padding=torch.zeros(2, 5)), "float32"),
    ("padding", lambda one, two: one(normal(2, 5, D), padding=torch.zeros(2, 4).bool()), "(2, 4)"),
    ("positions", lambda one, two: one(normal(2, 5, D), positions=normal(4)), "(4,)"),
    ("positions", lambda one, two: one(normal(2, 5, D), positions=normal(3, 5)), "(3, 5)"),
    ("positions", lambda one, two: one(normal(2, 5, D), positions=[0, 1, 2, 3, float("nan")]), "nan"),
    ("X", lambda one, two: replace(one, positions=normal(4))(normal(2, 5, D)), "4 tokens"),
    ("positions", lambda one, two: layer_of(Form(rotary=vectors()))(normal(2, 5, D)), "none"),
    ("layer", lambda one, two: one.dense(), "rotary"),
    ("layer", lambda one, two: layer_of(Form(sight=hw.Sight(window=3))).dense(), "window"),
    ("target", lambda one, two: one.to(torch.int32), "int32"),
    ("tensors", lambda one, two: one.with_tensors({"Theta": normal(3)}), "Theta"),
    ("groups", lambda one, two: hw.FactoredLayer.random(4, 8, groups=3), "divides"),
    ("key_width", lambda one, two: hw.FactoredLayer.random(4, 8, key_width=3), "cross=True"),
    ("rank", lambda one, two: hw.FactoredLayer.of(hw.AttentionLayer.random(1, 3), rank=4), "at most 3"),
])
def test_bad_calls_are_refused(refused, name, call, word):
    with refused(name, word):
        call(layer_of(Form(rotary=hw.Rotary())), layer_of(Form(), cross=True, z=2))


def test_no_pattern_where_nothing_is_asked():
    layer = layer_of(Form(rotary=hw.Rotary()))
    assert layer(torch.zeros(0, 5, D, dtype=torch.float64)).shape == (0, 5, 2)
    assert patterns_of(normal(2, 5, D), None, layer.tensors(), layer.form, None).shape == (2, M, 5, 5)
