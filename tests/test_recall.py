"""The model that comes with Headway recalls; its layer can be captured, taken out and put back."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import headway as hw
from headway.core.behaviour import behaviours
from headway.core.files import write_tensors
from headway.recall import data, model
from headway.recall.model import FIRST, LAST, measured

IDS = data.sequences(400, torch.Generator().manual_seed(77))


@pytest.fixture(scope="module")
def trained():
    return model.trained()


def test_a_letter_seen_before_is_followed_by_the_one_that_followed_it_then():
    assert IDS.shape == (400, data.LENGTH)
    lengths = set()
    for row in data.letters(IDS):
        followed = {}
        for one, after in pairwise(row):
            assert followed.setdefault(one, after) == after
        lengths.add(len(followed))
    assert lengths == set(range(data.SHORTEST, data.LONGEST + 1)), "how far back is not always the same"


def test_known_is_where_the_letter_was_there_before():
    for row, asked in zip(IDS[:20].tolist(), data.known(IDS[:20]).tolist(), strict=True):
        assert asked == [a in row[:at] and at + 1 < len(row) for at, a in enumerate(row)]


def test_sequences_are_drawn_again_from_the_same_generator():
    again = data.sequences(400, torch.Generator().manual_seed(77))
    assert torch.equal(IDS, again)
    with pytest.raises(hw.InputError, match="count: expected a whole number"):
        data.sequences(0, torch.Generator())


def test_the_stored_model_recalls(trained):
    score = measured(trained, IDS)
    assert score.accuracy > 0.999, "what bench/recall.py promises"
    assert score.loss < 0.02
    assert model.stored().stat().st_size < 500_000
    assert {value.dtype for value in trained.state_dict().values()} == {torch.float32}
    with torch.no_grad():  # the score by hand, letter by letter
        surprise = -torch.log_softmax(trained(IDS).double(), 2)
    total = [float(surprise[s, a, IDS[s, a + 1]]) for s in range(5) for a in range(31) if data.known(IDS)[s, a]]
    assert measured(trained, IDS[:5]).loss == pytest.approx(sum(total) / len(total), rel=1e-4)


def test_letters_to_come_change_nothing(trained):
    other = IDS[:50].clone()
    other[:, 20:] = (other[:, 20:] + 1) % len(data.ALPHABET)
    with torch.no_grad():
        one, two = trained(IDS[:50]), trained(other)
    torch.testing.assert_close(one[:, :20], two[:, :20], rtol=0, atol=1e-5)
    assert float((one - two)[:, 20:].abs().max()) > 0.1, "and those that are there do"


def test_one_layer_looks_at_the_letter_before_and_the_next_at_what_followed(trained):
    for path, kind in ((FIRST, "previous token"), (LAST, "induction")):
        layer = model.own(trained, path)
        does = behaviours(layer.patterns(hw.capture(trained, path, [IDS[:100]]).X), IDS[:100])
        best = max((one for one in does if one.kind == kind), key=lambda one: one.share)
        assert best.share > 0.6 > 3 * best.chance


def test_the_layer_put_back_does_the_same_and_none_does_far_worse(trained):
    before, layer = measured(trained, IDS), model.own(trained, LAST)
    with hw.replace(trained, LAST, layer):
        assert abs(measured(trained, IDS).loss - before.loss) < 1e-6
    nothing = hw.AttentionLayer(layer.Theta, torch.zeros_like(layer.W), mask=layer.mask)
    with hw.replace(trained, LAST, nothing):
        worse = measured(trained, IDS)
    assert worse.loss > 100 * before.loss and worse.accuracy < 0.2
    assert measured(trained, IDS) == before, "and the model is left as it was"


def test_other_weights_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "recall.safetensors"
    monkeypatch.setattr(model, "stored", lambda: path)
    with pytest.raises(hw.InputError, match=r"recall\.safetensors: expected a whole safetensors file"):
        model.trained()
    write_tensors(path, {"out.weight": torch.zeros(2, 2)}, {})
    with pytest.raises(hw.InputError, match="expected weights of this model"):
        model.trained()
