"""Claims about layers of any form: kernels against the table; planted errors and degenerate cases never pass."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tests.test_freedom import NAMES, forms, normal

import headway as hw
from headway.certificates import factors, report
from headway.certificates.factors import piece, triangle
from headway.certificates.held_out import errors, quantile_claim, row_bound
from headway.certificates.kernel import identified
from headway.core import attention
from headway.core.factored import free_dimensions
from headway.core.forms import heads_out, in_sight
from headway.core.shards import write

LENGTH = 9


def made(name, m=2, d=7, groups=None, count=300, seed=0, **extra):
    layer = hw.FactoredLayer.random(m, d, size=4, groups=groups, form=forms(m, d, 4)[name], seed=seed, **extra)
    return layer, hw.draw(layer, count=count, length=LENGTH, law="gaussian", seed=seed + 1)


def judged(layer, data, sequences=None):
    return identified(triangle(layer, data, sequences), data)


def relabelled(layer, data):
    return hw.Examples(data.X, layer(data.X, **data.arguments()), mask=data.mask, **data.beside())


def filled(layer, count, length=6, seed=0):
    """Examples with filling, keys where the layer reads some, and positions that are not whole."""
    draw = torch.Generator().manual_seed(seed)

    def some(width):
        return torch.randn(count, length, width, generator=draw, dtype=torch.float64)

    padding, hidden = (torch.zeros(count, length, dtype=torch.bool) for _ in range(2))
    padding[::2, length - 2:], hidden[1::3, length - 1:] = True, True
    given = {"padding": padding}
    if layer.form.uses_positions:
        moved = torch.rand(count, length, generator=draw, dtype=torch.float64)
        given["positions"] = 2 * torch.arange(length) + moved
    X = some(layer.width)
    if layer.cross:
        given |= {"key_padding": hidden, "keys": some(layer.key_width)}
    Y = layer(X, **{"Z" if name == "keys" else name: value for name, value in given.items()})
    return hw.Examples(X, Y, **given)


# -- the Jacobian -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_jacobian_in_factors_is_autograds(name, cross):
    if cross and forms(1, 2, 4)[name].sight.causal:
        return
    m = 4 if name == "everything" else 2
    layer = hw.FactoredLayer.random(m, 4, size=4, groups=m // 2, form=forms(m, 4, 4)[name], out_width=3,
                                    cross=cross, key_width=3 if cross else None)
    data = filled(layer, 4)
    given = data.arguments()
    Z = given.get("Z")
    see = in_sight(layer.form.sight, data.X, Z, data.padding, data.key_padding)

    def outputs(t):
        here = data.positions if layer.form.uses_positions else None
        return attention.project(heads_out(data.X, Z, t, layer.form, see, here), t["out"], t["offset"])

    blocks = torch.func.jacfwd(outputs)(layer.tensors()).values()
    expected = torch.cat([block.reshape(4 * 6, 3, -1) for block in blocks], dim=2)[~data.padding.flatten()]
    torch.testing.assert_close(piece(layer, data)[0], expected.flatten(0, 1), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_float32_differs_from_float64_by_less_than_the_rounding_claimed(name):
    """Columns computed in float32 are off by less than what is claimed of them, and by more than nothing."""
    layer = hw.FactoredLayer.random(2, 5, size=4, form=forms(2, 5, 4)[name], out_width=3).to(torch.float32)
    X = normal(8, LENGTH, 5).float()
    rough, off = piece(layer, hw.Examples(X, layer(X)))
    exact = layer.to(torch.float64)
    fine, small = piece(exact, hw.Examples(X.double(), exact(X.double())))
    away = (rough.double() - fine).norm(dim=0)
    assert bool((away <= off.double()).all())
    assert float(away.max()) > 1e-9
    assert float(small.norm() / fine.norm()) < 1e-9, "and float64 is good enough to decide"


def test_pieces_fold_into_one_triangle(monkeypatch):
    layer, data = made("rotary, halves", 1, count=5)
    whole = triangle(layer, data, 5)
    J = piece(layer, data)[0]
    torch.testing.assert_close(whole.R.T @ whole.R, J.T @ J)
    monkeypatch.setattr(factors, "CHUNK", 1)
    monkeypatch.setattr(factors, "PUSH", 1)
    pieces = triangle(layer, data, 5)
    torch.testing.assert_close(pieces.R.T @ pieces.R, J.T @ J)
    assert pieces.equations == whole.equations == len(J) == 5 * LENGTH * 7
    assert pieces.turned > whole.turned
    padded = filled(layer, 5)
    assert triangle(layer, padded, 5).equations == int((~padded.padding).sum()) * 7


# -- identifiability ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "groups", "e"), [(1, 1, 7), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_on_examples_is_what_the_form_leaves_free(name, m, groups, e):
    layer, data = made(name, m, groups=groups, out_width=e)
    claim = judged(layer, data)
    assert claim.holds == "yes", claim
    assert claim.numbers["free_directions"] == claim.numbers["gauge"] == free_dimensions(layer)
    assert claim.numbers["least_singular_value"] > 100 * claim.numbers["rounding"]


@pytest.mark.parametrize(("name", "groups", "beside_values"), [
    ("plain", 1, 4**2 + 4), ("plain", 2, 2 * (4**2 + 4)), ("rotary, halves", 2, 2 * 4), ("rotary, pairs", 2, 2 * 4),
    ("clipped table", 2, 2 * (4**2 + 4 + 1)), ("slope", 2, 2 * (4**2 + 4)), ("causal window", 2, 2 * (4**2 + 4)),
    ("cap", 2, 2 * 4**2), ("normed, rotary", 1, 4 // 2 + 2 + 1), ("normed, rotary", 2, 4 // 2 + 4)])
def test_the_table_of_forms_is_what_the_certificate_counts(name, groups, beside_values):
    """Per group GL(q), and the invisible key bias, for plain scores; q for turned ones; +1 a head for a table; q/2
    gains with a scale for every query and key factor for normed ones. Values add GL(q) and a bias a group."""
    layer, data = made(name, 2, groups=groups)
    assert judged(layer, data).numbers["free_directions"] == beside_values + groups * (4**2 + 4)


def test_a_gate_fixes_values_up_to_the_scale_of_each_channel():
    layer, data = made("gated", 2)
    assert judged(layer, data).numbers["free_directions"] == 2 * (4**2 + 4) + 2 * 4


def test_keys_of_another_sequence_and_given_positions():
    for name in ("plain", "rotary, halves", "sink", "gated"):
        layer = hw.FactoredLayer.random(2, 6, size=4, cross=True, key_width=5, form=forms(2, 6, 4)[name])
        claim = judged(layer, filled(layer, 300))
        assert claim.holds == "yes", claim
        assert claim.numbers["free_directions"] == free_dimensions(layer)
    omega = normal(2, 2, seed=4)
    layer = hw.FactoredLayer.random(2, 6, size=4, form=hw.Form(rotary=hw.Rotary(frequencies=omega)))
    X, places = normal(300, LENGTH, 6), normal(300, LENGTH, 2, seed=1)
    claim = judged(layer, hw.Examples(X, layer(X, positions=places), positions=places))
    assert claim.holds == "yes", claim
    still = torch.zeros_like(places)
    claim = judged(layer, hw.Examples(X, layer(X, positions=still), positions=still))
    assert claim.holds == "no", "nothing tells planes apart where all tokens are at one place"


def broken(name, case):
    layer, data = made(name, 3, d=5, out_width=4)
    t = dict(layer.tensors())
    if case == "equal":
        for part in ("query", "key", *layer.form.tensors()):
            t[part] = t[part][[0, 0, 2]]
    if case == "dead":
        t["out"] = t["out"] * torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64).view(3, 1, 1)
    if case == "thin":
        t["query"], t["key"] = t["query"].clone(), t["key"].clone()
        t["query"][1][:, [1, 3]] = t["key"][1][:, [1, 3]] = 0.0
    layer = layer.with_tensors(t)
    if case == "few":
        return layer, data.take(range(3))
    if case == "constant":
        data.X[:, :, 2] = 1.0
    return layer, relabelled(layer, data)


@pytest.mark.parametrize(("case", "words"), [
    ("equal", ["heads 1 and 2 have equal scores", "they change head 1 in ", "head 2 in "]),
    ("dead", ["head 2 is dead", "they change head 2 in "]), ("thin", ["the scores of head 2 do with 2 of its 4"]),
    ("few", ["too few examples: 3 sequences"]),
    ("constant", ["coordinate 3 of the tokens is constant", "they change head 1 in "])])
@pytest.mark.parametrize("name", ["plain", "rotary, halves"])
def test_a_degenerate_layer_is_not_called_identified_and_the_cause_is_named(name, case, words):
    claim = judged(*broken(name, case))
    assert claim.holds == "no", claim
    assert claim.numbers["free_directions"] > claim.numbers["gauge"]
    more = int(claim.numbers["free_directions"] - claim.numbers["gauge"])
    for word in (f"{more} more directions are open", *words):
        assert word in claim.reason, claim.reason
    if case in ("dead", "equal"):
        assert "head 3" not in claim.reason


def test_offsets_that_no_pair_of_tokens_has_are_named():
    layer = hw.FactoredLayer.random(2, 5, size=4, form=hw.Form(offsets=hw.OffsetTable(normal(2, 31))))
    short, long = (hw.draw(layer, count=300, length=length, law="gaussian") for length in (15, 16))
    claim = judged(layer, short)
    assert claim.holds == "no"
    assert "2 of the 31 offsets of the table occur at no pair" in claim.reason
    assert claim.numbers["free_directions"] - claim.numbers["gauge"] == 2 * 2
    assert judged(layer, long).holds == "yes"


@pytest.mark.parametrize(("eps", "exact"), [(1e-3, True), (1e-6, True), (1e-13, False)])
def test_sizes_that_only_the_norms_eps_holds_are_not_called_determined_beyond_rounding(eps, exact):
    norms = hw.Normed(normal(4), normal(4, seed=1), eps)
    layer = hw.FactoredLayer.random(2, 7, size=4, form=hw.Form(rotary=hw.Rotary(), normed=norms))
    claim = judged(layer, hw.draw(layer, count=300, length=LENGTH, law="gaussian"))
    assert claim.holds == "yes"
    assert claim.numbers["held_by_eps"] == 4
    assert ("and the 4 sizes of normed factors" in claim.statement) != exact
    loose = replace(layer, form=replace(layer.form, normed=replace(norms, eps=0.0)))
    assert claim.numbers["gauge"] + 4 == free_dimensions(loose)


def test_what_is_nearly_open_is_undecided():
    """Two heads whose scores differ by 1e-5 of their size: neither equal nor told apart."""
    layer, data = made("rotary, halves", 3)
    query, key = layer.query[[0, 0, 2]].clone(), layer.key[[0, 0, 2]]
    query[1] += 1e-5 * normal(*query[1].shape)
    layer = replace(layer, query=query, key=key)
    claim = judged(layer, relabelled(layer, data))
    assert claim.holds == "undecided", claim
    assert "1e-05 is asked for" in claim.reason


def test_what_rounding_could_have_made_is_never_a_yes():
    layer, data = made("sink", 2)
    rough = layer.to(torch.float32)
    assert judged(layer, data).holds == "yes"
    claim = judged(rough, hw.Examples(data.X.float(), data.Y.float()))
    assert claim.holds == "undecided"
    assert "rounding alone" in claim.reason


# -- held-out error -----------------------------------------------------------------------------------------------


def planted(layer, name, size=1e-3):
    """The layer with one entry of one tensor changed, which is no key bias."""
    value = layer.tensors()[name].clone()
    at = (0, 1, 1) if value.ndim == 3 else (0,) * value.ndim
    value[at] += size
    return layer.with_tensors({name: value})


@pytest.mark.parametrize("name", [name for name in NAMES if "causal" not in name])
def test_held_out_claims_of_any_form_and_of_one_planted_error(name):
    """Filling, keys and positions as the examples have them: the truth is a yes, one entry off by 1e-3 never is."""
    cross = name in ("plain", "rotary, halves", "sink", "gated")
    layer = hw.FactoredLayer.random(2, 6, size=4, form=forms(2, 6, 4)[name], cross=cross,
                                    key_width=5 if cross else None)
    data = filled(layer, 500)
    truth = hw.certify(layer, data, sequences=1, teacher_bound=50.0, token_bound=10.0, mean_tolerance=1.0)
    assert truth.established("held-out quantile"), truth["held-out quantile"]
    assert truth["held-out mean"].numbers["mean_square"] < 1e-20
    assert ("keys no longer than 10" in truth["held-out mean"].assumption) == cross
    for part in layer.tensors():
        claim = quantile_claim(errors(planted(layer, part), data), 0.99, 0.01, 1e-6)
        assert claim.holds == "no", (part, claim)
    assert truth.settings["form"] == layer.form.describe()
    json.dumps([dict(claim.numbers) for claim in truth.claims], allow_nan=False)


def test_a_base_off_by_one_percent_and_a_window_off_by_one_are_told():
    layer, data = made("rotary, halves", count=600)
    other = replace(layer, form=hw.Form(rotary=hw.Rotary(base=10_100.0)))
    assert hw.certify(layer, data).established("held-out quantile")
    assert hw.certify(other, data)["held-out quantile"].holds == "no"
    layer, data = made("causal window", count=600)
    other = replace(layer, form=hw.Form(sight=hw.Sight(causal=True, window=4)))
    assert hw.certify(layer, data).established("held-out quantile")
    assert hw.certify(other, data)["held-out quantile"].holds == "no"


@pytest.mark.parametrize("name", NAMES)
def test_no_row_is_longer_than_its_bound(name):
    """Also where patterns are peaked, so that a row is one key's."""
    layer = hw.FactoredLayer.random(2, 6, size=4, groups=1, form=forms(2, 6, 4)[name], scale=50.0, seed=1)
    data = hw.draw(layer, count=200, length=LENGTH)
    found = errors(layer, data)
    assert (found.boolean, found.tokens) == (True, "tokens")
    assert float(layer(data.X).norm(dim=2).max()) <= found.row_bound == row_bound(layer, found.widest)


def test_the_bound_on_a_row_is_met():
    """By one token along a head's only value, beside a sink that takes nothing or under a gate that is open."""
    for form in (hw.Form(), hw.Form(sink=hw.Sink([-60.0])), hw.Form(gate=hw.Gated(torch.full((1, 7, 1), 60.0)))):
        layer = hw.FactoredLayer.random(1, 6, size=1, form=form.to(torch.float64))
        layer = replace(layer, value=layer.value.abs())
        layer = replace(layer, offset=2 * layer.value[0, -1] @ layer.out[0])
        X = 3 * layer.value[0, :-1].T
        assert float(layer(X).norm()) == pytest.approx(row_bound(layer, float(X.norm())))


def test_keys_are_what_the_bound_is_about_where_they_come_from_another_sequence():
    layer = hw.FactoredLayer.random(2, 6, size=4, cross=True, key_width=4)
    Z = hw.draw(layer, count=50, length=5).keys
    data = hw.Examples(normal(50, 5, 6) * 100, normal(50, 5, 6), keys=Z.to(torch.int8))
    found = errors(layer, data)
    assert (found.boolean, found.tokens, found.widest) == (True, "keys", 2.0)
    assert "keys no longer than 2 (they are ±1)" in hw.certify(
        layer, data, teacher_bound=5.0)["held-out mean"].assumption
    loose = hw.Examples(data.X, data.Y, keys=Z * 0.5)
    assert "how long a key can be" in hw.certify(layer, loose, teacher_bound=5.0)["held-out mean"].reason


# -- the whole ----------------------------------------------------------------------------------------------------

NAMED = ["held-out quantile", "held-out mean", "identifiability", "distance to the truth", "error bars",
         "what is determined", "non-degeneracy"]


def test_plain_factors_have_every_claim():
    layer = hw.FactoredLayer.random(2, 6, size=3, seed=3)
    data = hw.draw(layer, count=600, length=6, seed=4)
    found = hw.certify(layer, data, teacher_bound=50.0)
    assert [claim.name for claim in found.claims] == NAMED
    assert found.established("identifiability") and found.established("distance to the truth")
    dense = hw.certify(layer.dense(), data, teacher_bound=50.0)
    for name in NAMED[3:5]:
        assert found[name].numbers == pytest.approx(dense[name].numbers)
    wrong = hw.certify(planted(layer, "query"), data)
    assert wrong["held-out quantile"].holds == "no"
    assert wrong["distance to the truth"].holds != "yes"
    causal = hw.FactoredLayer.random(2, 6, size=3, form=hw.Form(sight=hw.Sight(causal=True)), seed=3)
    data = hw.draw(causal, count=600, length=6, seed=4)
    for mask in ("causal", "none"):  # examples of a black box may not say that it looks back
        told = hw.certify(causal, hw.Examples(data.X, data.Y, mask=mask))
        assert told.established("identifiability") and told.established("distance to the truth"), mask


@pytest.mark.parametrize("name", ["rotary, halves", "causal window", "gated"])
def test_what_is_not_known_for_a_form_is_undecided_and_says_why(name):
    layer, data = made(name, count=600)
    found = hw.certify(layer, data)
    assert [claim.name for claim in found.claims] == NAMED
    for claim in found.claims[3:]:
        assert claim.holds == "undecided"
        assert "for plain scores over all keys of the same sequence" in claim.reason
        assert layer.form.describe() in claim.reason


def test_above_the_dense_size(monkeypatch):
    """Plain factors go by products with the Jacobian in (Θ, u, W, c); other forms are undecided, with a size."""
    monkeypatch.setattr(report, "DENSE", 50)
    monkeypatch.setattr("headway.certificates.identify.DENSE", 50)
    layer = hw.FactoredLayer.random(2, 8, size=2, seed=3)
    data = hw.draw(layer, count=600, length=6, seed=4)
    claim = hw.certify(layer, data)["identifiability"]
    assert claim.holds == "yes", claim
    assert "rank at most 2" in claim.statement and claim.numbers["products"] > 1
    layer, data = made("rotary, halves")
    claim = hw.certify(layer, data)["identifiability"]
    assert claim.holds == "undecided"
    assert f"the layer has {factors.unknowns(layer)} numbers in its factors" in claim.reason


def test_examples_are_streamed_and_shards_give_the_same_claims(tmp_path):
    layer = hw.FactoredLayer.random(2, 6, size=4, cross=True, key_width=5, form=hw.Form(rotary=hw.Rotary()))
    data = filled(layer, 300)
    stored = write(tmp_path / "e", iter([data]), 1)
    for one, other in zip(hw.certify(layer, data).claims, hw.certify(layer, stored).claims, strict=True):
        assert (one.holds, one.reason) == (other.holds, other.reason)


def test_one_sequence_that_was_learned_from_is_enough_to_refuse(refused):
    layer, data = made("rotary, halves", count=40)
    fresh = hw.draw(layer, count=40, length=LENGTH, law="gaussian", seed=9)
    assert hw.certify(layer, fresh, seen=data).claims
    mixed = hw.Examples(torch.cat([fresh.X, data.X[[3]]]), torch.cat([fresh.Y, data.Y[[3]]]))
    with refused("examples", "1 of 41 sequences", "index 40"):
        hw.certify(layer, mixed, seen=data)


def test_examples_that_lack_what_the_form_reads_are_refused(refused):
    layer, data = made("rotary, halves", count=10)
    cross = hw.FactoredLayer.random(2, 7, size=4, cross=True, key_width=5)
    pairs = filled(cross, 10)
    with refused("examples", "width 6"):
        hw.certify(hw.FactoredLayer.random(2, 6, size=4), data)
    with refused("examples", "keys of another sequence", "keys=Z"):
        hw.certify(cross, data)
    with refused("examples", "their own keys"):
        hw.certify(hw.FactoredLayer.random(2, 7, size=4), pairs)
    with refused("examples", "keys of width 4"):
        hw.certify(hw.FactoredLayer.random(2, 7, size=4, cross=True, key_width=4), pairs)
    with refused("examples", "mask 'none'", "rotary scores"):
        hw.certify(layer, hw.Examples(data.X, data.Y, mask="causal"))
    vectors = hw.Form(rotary=hw.Rotary(frequencies=normal(2, 3)))
    spatial = hw.FactoredLayer.random(2, 7, size=4, form=vectors)
    with refused("examples", "positions of 3 numbers", "none"):
        hw.certify(spatial, data)
    with refused("examples", "positions of 3 numbers", "(10, 9, 2)"):
        hw.certify(spatial, hw.Examples(data.X, data.Y, positions=normal(10, LENGTH, 2)))
    with refused("examples", "positions of one number"):
        hw.certify(layer, hw.Examples(data.X, data.Y, positions=normal(10, LENGTH, 2)))
    with refused("examples", "at most 5 tokens", "9 tokens"):
        hw.certify(replace(layer, positions=torch.arange(5.0)), data)
    with refused("examples", "key_positions of 3 numbers"):
        hw.certify(replace(cross, form=vectors), hw.Examples(pairs.X, pairs.Y, keys=pairs.keys,
                                                             positions=normal(10, 6, 3)))
