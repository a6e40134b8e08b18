"""Forms in words and as data: each says all that is known of a form before it is learned."""

from __future__ import annotations

import json

import pytest
import torch

import headway as hw
from headway.core import names
from headway.core.layer import save_layer
from headway.core.words import PARTS, data_of, form_from, form_of, words_of

one = torch.zeros(1, dtype=torch.float64)
FORMS = {
    "factors": hw.Form(),
    "rotary:base=500000,layout=pairs,turned=4+causal": hw.Form(
        rotary=hw.Rotary(500_000.0, "pairs", 4), sight=hw.Sight(causal=True)),
    "table:reach=3,both=no": hw.Form(offsets=hw.OffsetTable(one.expand(1, 4), both=False)),
    "t5:buckets=8,far=20,both=yes": hw.Form(offsets=hw.OffsetTable(one.expand(1, 8), kind="t5", far=20)),
    "slope+causal:prefix=2+window:size=5": hw.Form(offsets=hw.Slope(one), sight=hw.Sight(True, 5, 2)),
    "cap:value=12.5+sink": hw.Form(cap=hw.Cap(12.5), sink=hw.Sink(one)),
    "normed:eps=0.1+gated": hw.Form(normed=hw.Normed(one, one, 0.1), gate=hw.Gated(one.expand(1, 2, 1)))}


@pytest.mark.parametrize("words", FORMS)
def test_words_and_data_say_the_same(words):
    form = FORMS[words]
    assert form_of(words) == form
    assert words_of(form) == words
    assert form_from(json.loads(json.dumps(data_of(form)))) == form


def test_every_part_has_a_word_and_common_settings_are_known():
    assert tuple(PARTS) == names.FORMS
    assert form_of("rotary").rotary == hw.Rotary()
    table = form_of("t5").offsets
    assert (table.values.shape[1], table.far) == (32, 128)
    assert form_of(" sink + normed").parts.keys() == {"sink", "normed"}
    base = hw.Form(rotary=hw.Rotary(1 / 3 + 1e4))
    assert form_of(words_of(base)) == base


def test_given_frequencies_have_data_but_no_words():
    form = hw.Form(rotary=hw.Rotary(frequencies=torch.tensor([1.0, 1 / 3], dtype=torch.float64)))
    assert words_of(form) is None
    again = form_from(json.loads(json.dumps(data_of(form))))
    assert torch.equal(again.rotary.frequencies, form.rotary.frequencies)


def test_a_stored_layer_gives_its_form(tmp_path):
    form = hw.Form(rotary=hw.Rotary(77.0), sink=hw.Sink(torch.ones(2, dtype=torch.float64)))
    save_layer(tmp_path / "a.safetensors", hw.FactoredLayer.random(2, 6, size=2, form=form))
    assert form_of(str(tmp_path / "a.safetensors")) == form
    save_layer(tmp_path / "b.safetensors", hw.AttentionLayer.random(2, 6, mask="causal"))
    assert form_of(str(tmp_path / "b.safetensors")) == hw.Form(sight=hw.Sight(causal=True))


@pytest.mark.parametrize(("words", "name", "said"), [
    ("rotaty", "--form", "'rotaty'"), ("", "--form", "auto"), ("rotary:bas=3", "--form rotary", "base=…"),
    ("rotary:base=big", "--form rotary", "base=a number"), ("rotary:base=-1", "rotary.base", "above 0"),
    ("rotary:layout=odd", "rotary.layout", "'pairs'"), ("causal:prefix=1.5", "--form causal", "a whole number"),
    ("table:reach=3,both=maybe", "--form table", "yes or no"), ("cap", "--form cap", "its value"),
    ("table", "--form table", "its reach"), ("sink+sink", "--form", "sink once"),
    ("slope+t5", "--form", "one of table"), ("sink:size=1", "--form sink", "nothing after the colon"),
    ("window:size=0", "sight.window", "at least 1"), ("none.safetensors", "none.safetensors", "whole safetensors")])
def test_other_words_are_refused(refused, words, name, said):
    with refused(name, said):
        form_of(words)


@pytest.mark.parametrize("data", [
    None, "rotary", 3, {"turned": {}}, {"rotary": {"base": "x"}}, {"rotary": {"bass": 1}}, {"offsets": {}},
    {"offsets": {"kind": "t5"}}, {"offsets": {"kind": "clipped", "buckets": "x"}}, {"sight": {"causal": 1}},
    {"cap": {}}, {"normed": {"eps": None}}, {"rotary": {"frequencies": ["a"]}}])
def test_other_data_is_refused(data):
    with pytest.raises(hw.InputError):
        form_from(data)
