"""Layers of linear scores: what they compute, what of it is determined, learned and compared as one operator."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import dense
import headway as hw
from commands import headway
from headway import recheck
from headway.certificates import linear as claims
from headway.core import operator
from headway.core.counting import LinearSize
from headway.core.examples import join
from headway.core.layer import load_layer, load_plain, save_layer
from headway.learning.linear import LinearSource
from headway.linalg import convex
from headway.linalg.projected import Problem, evaluate, features_of
from headway.report import figures, write_comparison, write_report

KINDS = [(mask, scores, filled) for mask in ("none", "causal") for scores in ("linear", "linear/k")
         for filled in (False, True)]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(heads=2, width=5, scores="linear", seed=1, **more):
    return hw.AttentionLayer.random(heads, width, scores=scores, seed=seed, **more)


def padding(n, k):
    return torch.arange(k).expand(n, k) >= (k - torch.arange(n) % 3).unsqueeze(1)


def mixed(one, G):
    """Σ_i G_ji Θ_i beside the pseudoinverse's adjoint: the same operator, by as many heads as G has rows."""
    back = torch.linalg.pinv(G).mT
    return replace(one, Theta=torch.einsum("ji,ipq->jpq", G, one.Theta), W=torch.einsum("ji,ipq->jpq", back, one.W))


def apart(one, other):
    return operator.distance((one.Theta, one.W), (other.Theta, other.W))[0]


# -- what it computes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mask", "scores", "filled"), KINDS)
def test_answers_are_those_of_the_slow_one(mask, scores, filled):
    one = layer(2, 3, scores, out_width=2, offset=True, mask=mask)
    X, hidden = normal(3, 4, 3), padding(3, 4) if filled else None
    slow = dense.linear(X, one.Theta, one.W, one.offset, mask, hidden, scores == "linear/k")
    assert_close(one(X, hidden), slow, rtol=0, atol=1e-12)
    assert_close(one(X[0], None if hidden is None else hidden[0]), slow[0], rtol=0, atol=1e-12)
    assert float((replace(one, scores="softmax")(X, hidden) - slow).abs().max()) > 1e-2


def test_the_operator_is_that_of_the_slow_one():
    one = layer(2, 3, out_width=2)
    Z = dense.operator(one.Theta, one.W)
    assert_close(torch.stack(list(operator.slices(one.Theta, one.W))), Z)
    assert operator.norm(one.Theta, one.W) == pytest.approx(float(Z.norm()))
    X = normal(2, 4, 3)
    C = torch.einsum("nbq,nbr->nqr", X, X)
    assert_close(one(X), torch.einsum("nap,nqr,pqrs->nas", X, C, Z))


@given(st.integers(1, 3), st.integers(0, 2), st.integers(0, 1000), st.sampled_from(KINDS))
def test_mixed_heads_are_one_function(m, more, seed, kind):
    mask, scores, filled = kind
    one = layer(m, 4, scores, seed, mask=mask, offset=bool(seed % 2))
    other = mixed(one, normal(m + more, m, seed=seed))
    X, hidden = normal(3, 5, 4, seed=seed), padding(3, 5) if filled else None
    assert_close(one(X, hidden), other(X, hidden), rtol=0, atol=1e-8 * float(other.Theta.norm() * other.W.norm()))
    found = hw.compare(one, other, 1e-8)
    assert found.same
    assert found.kind == "same"
    assert found.by == "weights"
    assert other.canonical(1e-8).heads == m == one.canonical().heads
    assert operator.fewest(other.Theta, other.W, 1e-6) <= m


@given(st.integers(0, 1000))
def test_only_the_symmetric_part_is_seen(seed):
    """Θ = abᵀ, W = fgᵀ and Θ = afᵀ, W = bgᵀ are one function, and Σ vec(Θ)vec(W)ᵀ is another matrix."""
    a, b, f, g = (normal(4, seed=seed + i) for i in range(4))
    one, other = (hw.AttentionLayer(torch.outer(a, left)[None], torch.outer(right, g)[None], scores="linear")
                  for left, right in ((b, f), (f, b)))
    assert hw.compare(one, other).same
    assert_close(one(normal(2, 3, 4)), other(normal(2, 3, 4)))
    assert float((one.Theta - other.Theta).norm()) > 1e-3


@given(st.integers(1, 3), st.integers(0, 1000), st.floats(1e-7, 1e-1))
def test_distance_is_the_size_of_a_planted_error(m, seed, size):
    one = layer(m, 4, seed=seed)
    other = replace(one, W=one.W * (1 + size))
    assert apart(one, other) == pytest.approx(size / (1 + size), rel=1e-6)
    found = hw.compare(one, other)
    assert not found.same
    assert found.example is not None
    assert float((one(found.example) - other(found.example)).abs().max()) > 0


@pytest.mark.parametrize(("m", "d"), [(1, 4), (2, 4), (3, 6)])
def test_eigenvalues_prove_the_number_of_generic_heads(m, d):
    one = layer(m, d)
    assert operator.fewest(one.Theta, one.W) == m
    Z = torch.stack(list(operator.slices(one.Theta, one.W)))
    assert operator.fewest_of(Z) == m
    many = layer(6, 4)
    assert operator.fewest(many.Theta, many.W) < 6  # proves less where 2m > d, and never more


def test_canonical_heads_are_orthogonal_and_balanced():
    one = mixed(layer(2, 4), normal(5, 2)).canonical()
    A, B = one.Theta.flatten(1), one.W.flatten(1)
    for gram in (A @ A.T, B @ B.T):
        assert float((gram - torch.diag(gram.diagonal())).abs().max()) < 1e-12
    assert_close(A.norm(dim=1), B.norm(dim=1))
    assert float(A[0].norm()) >= float(A[1].norm())
    assert bool((A.gather(1, A.abs().argmax(1, keepdim=True)) > 0).all())
    silent = replace(one, W=torch.zeros_like(one.W)).canonical()
    assert silent.heads == 1


# -- products and the convex problem ----------------------------------------------------------------------------


def rows(one, n=6, k=4, filled=False, seed=3):
    X = normal(n, k, one.width, seed=seed)
    hidden = padding(n, k) if filled else None
    data = hw.Examples(X, one(X, hidden), hidden, one.mask)
    return claims.rows_of(one, data), data


@pytest.mark.parametrize(("mask", "scores", "filled"), KINDS)
def test_products_are_those_of_autograd(mask, scores, filled):
    one = layer(2, 3, scores, mask=mask, out_width=2, offset=True)
    part, _ = rows(one, 3, 4, filled)

    def handed(Theta):
        return features_of(part, Theta, False)[1]

    v, U = normal(2, 3, 3, seed=4), normal(12, 6, seed=5)
    _, slope = torch.autograd.functional.jvp(handed, one.Theta, v)
    moved = part.tangent(part.patterns(one.Theta), v)
    moved = moved if part.valid is None else moved * part.valid.unsqueeze(3)
    assert_close(moved.reshape(12, 6), slope)
    g = part.cotangent(part.patterns(one.Theta), (U.view(3, 4, 2, 3) if part.valid is None else
                                                  U.view(3, 4, 2, 3) * part.valid.unsqueeze(3)), one.Theta)
    assert float((g * v).sum()) == pytest.approx(float((U * slope).sum()))

    def outputs(Theta, W, offset):
        Y = convex.answer(part, Theta, W, offset)
        return (Y if part.valid is None else Y * part.valid).flatten()

    blocks = torch.autograd.functional.jacobian(outputs, (one.Theta, one.W, one.offset))
    J = torch.cat([block.reshape(len(block), -1) for block in blocks], dim=1)
    assert_close(claims.gram(one, part), J.T @ J)


@pytest.mark.parametrize(("mask", "scores", "filled"), KINDS)
def test_the_convex_problem_has_the_layer_for_its_solution(mask, scores, filled):
    one = layer(2, 3, scores, mask=mask, out_width=2, offset=True)
    part, _ = rows(one, 30, 4, filled)
    found = convex.solve(Problem((part,)))
    assert found.determined
    assert found.residual < 1e-13
    Z = dense.operator(one.Theta, one.W)
    assert_close(convex.operator_of(found.coefficients, 3), Z)
    assert_close(found.coefficients[-1], one.offset)
    assert float(found.coefficients[:-1].norm()) == pytest.approx(float(Z.norm()))
    noisy = replace(part, Y=part.Y + (normal(*part.Y.shape) if part.valid is None else
                                      normal(*part.Y.shape) * part.valid))
    least = convex.solve(Problem((noisy,)))
    assert 0 < least.loss < evaluate(Problem((noisy,)), one.Theta).loss  # no heads go below it
    few, _ = rows(one, 2, 4, filled)
    assert not convex.solve(Problem((few,))).determined


@pytest.mark.parametrize(("mask", "k"), [("none", 4), ("causal", 4), ("none", 7), ("causal", 2)])
def test_the_counting_floor_is_where_the_kernel_shrinks_to_the_mixing(mask, k):
    one = layer(2, 4, mask=mask)
    floor = LinearSize(4, 4, k, mask).floor(2)

    def free(n):
        s = torch.linalg.svdvals(claims.gram(one, rows(one, n, k)[0]))
        return int((s < 1e-12 * s[0]).sum()) - 4  # less the mixing of two heads

    assert free(floor) <= 4  # the offset counts as unknown, and may be the last
    assert free(floor + 1) == 0
    assert free(floor - 2) > 0
    assert LinearSize(4, 4, k, mask).unknowns(500) == LinearSize(4, 4, k, mask).any_heads == 164


# -- learning ---------------------------------------------------------------------------------------------------


def examples(one, count=60, k=5, law="gaussian", seed=7, **more):
    return hw.draw(one, count, k, law=law, seed=seed, **more)


@pytest.mark.parametrize(("mask", "scores", "law"), [
    ("none", "linear", "gaussian"), ("causal", "linear/k", "boolean"), ("causal", "linear", "gaussian")])
def test_the_operator_and_its_rank_are_found(mask, scores, law):
    one = layer(2, 4, scores, mask=mask, out_width=3, offset=scores == "linear")
    many = mixed(one, normal(5, 2))
    data = examples(many, law=law)
    fit = hw.learn(data, form=scores)
    assert fit.status.kind == "recovered", fit.status
    assert fit.layer.heads == fit.stats["operator_rank"] == 2
    assert fit.stats["fewest_heads"] == 2
    assert (fit.layer.scores, fit.layer.mask) == (scores, mask)
    assert (fit.layer.offset is None) == (one.offset is None)
    assert hw.compare(fit.layer, many).same
    assert fit.stats["held_out_error"] < 1e-12
    assert fit.factors is None
    assert_close(fit.predict(data.X[:2]), data.Y[:2])
    assert "Only the operator is determined" in fit.status.sentence


def test_filling_and_tokens_with_a_mean_in_a_subspace():
    one = layer(1, 5, "linear/k")
    basis = normal(4, 5, seed=2)
    X = (normal(80, 6, 4, seed=3) * torch.tensor([1.0, 0.1, 3.0, 1.0]).double() + 2.0) @ basis
    hidden = padding(80, 6)
    fit = hw.learn(hw.Examples(X, one(X, hidden), hidden), form="linear/k")
    assert fit.status.kind == "recovered", fit.status
    assert fit.stats["unidentified_directions"] == 1
    assert "1 of 5 token directions are never visited" in fit.status.sentence
    fresh = normal(5, 6, 4, seed=9) @ basis
    assert_close(fit.layer(fresh), one(fresh), rtol=0, atol=1e-9)
    assert not hw.compare(fit.layer, one).same
    assert hw.compare(fit.layer, one, 1e-8, on=hw.Examples(X, one(X), hidden)).same


def test_noise_is_called_noise_and_the_convex_problem_bounds_it():
    one = layer(2, 4, "linear")
    fit = hw.learn(examples(one, 300, noise=0.05), form="linear")
    assert fit.status.kind == "noise", fit.status
    assert fit.layer.heads == 2
    assert fit.stats["convex"]["residual"] <= fit.stats["fitted_error"]
    assert "Over operators of any rank" in fit.status.sentence
    assert apart(fit.layer, one) < 0.05


def test_other_labels_are_refused_and_other_divisors_named():
    soft = hw.AttentionLayer.random(2, 4, seed=1)
    fit = hw.learn(examples(soft, 300), form="linear")
    assert fit.status.kind == "not_realisable", fit.status
    assert "what no layer of these scores explains" in fit.status.sentence
    with pytest.raises(hw.NotLearnedError):
        hw.learn(examples(soft, 300), form="linear", heads=1, strict=True)
    one = layer(1, 4, "linear", mask="causal")
    fit = hw.learn(examples(one, 100), form="linear/k", heads=1)
    assert fit.status.kind == "not_realisable"
    assert "try form='linear'" in fit.status.sentence


def test_too_few_heads_told_and_too_few_examples():
    one = layer(2, 4)
    fit = hw.learn(examples(one, 100), form="linear", heads=1)
    assert fit.status.kind == "not_realisable"
    assert "of 2 heads at least" in fit.status.sentence
    fit = hw.learn(examples(one, 100), form="linear", heads=3)
    assert (fit.status.kind, fit.layer.heads) == ("recovered", 2)
    floor = LinearSize(4, 4, 5).floor(2)
    fit = hw.learn(examples(one, floor), form="linear", heads=2)
    assert fit.status.kind == "too_few", fit.status
    assert fit.stats["floor"] == floor
    assert fit.status.numbers["needed"] > floor


def test_float32_labels_are_met_to_their_floor():
    one = layer(2, 4)
    data = examples(one, 60)
    fit = hw.learn(hw.Examples(data.X.float(), data.Y.float()), form="linear")
    assert fit.status.kind == "recovered"
    assert fit.layer.heads == 2
    assert 1e-12 < apart(fit.layer, one) < 1e-5


def test_a_run_is_kept_read_back_and_resumed(tmp_path):
    one, heard = layer(2, 4, "linear/k"), []
    data = examples(one, 40)
    fit = hw.learn(data, form="linear/k", run=tmp_path / "run", progress=heard.append)
    assert heard[0]["residual"] is None
    assert {"stage", "heads", "why"} <= set(heard[0])
    again = hw.learn(data, form="linear/k", run=tmp_path / "run")
    assert torch.equal(again.layer.Theta, fit.layer.Theta)
    assert again.layer.scores == "linear/k"
    (tmp_path / "run" / "manifest.json").unlink()
    more = hw.learn(data, form="linear/k", run=tmp_path / "run")
    assert torch.equal(more.layer.Theta, fit.layer.Theta)
    assert more.status == fit.status
    assert torch.equal(hw.learn(data, form="linear/k").layer.Theta, fit.layer.Theta)
    with pytest.raises(hw.InputError, match="form"):
        hw.learn(data, form="linear", run=tmp_path / "run")


def test_no_time_still_ends_in_a_layer():
    fit = hw.learn(examples(layer(3, 6), 60), form="linear", seconds=1e-9)
    assert fit.status.kind in ("limit", "too_few", "recovered")
    assert fit.layer.scores == "linear"
    assert fit.stats["out_of_time"] == (fit.status.kind != "recovered")


def test_working_coordinates_are_left_exactly():
    one = layer(2, 4, "linear", offset=True)
    X = normal(50, 4, 4) @ normal(4, 4, seed=8) + 1.0
    data = hw.Examples(X, one(X))
    source = LinearSource(data, False)
    assert not source.frame.plain
    assert not bool(source.frame.mean.any())
    L, scale = source.frame.out, source.frame.scale
    Theta, W = L.T @ one.Theta @ L, L.T @ one.W / scale
    assert source.error(source.fit, Theta, W, one.offset / scale) < 1e-13
    assert apart(source.leave(Theta, W, one.offset / scale), one) < 1e-12


# -- compare, certify, and who refuses --------------------------------------------------------------------------


def test_what_keeps_two_layers_apart():
    one = layer(2, 4, "linear", offset=True)
    assert hw.compare(one, one.canonical()).same
    for other, words in ((replace(one, mask="causal"), "mask"), (replace(one, scores="linear/k"), "linear/k"),
                         (replace(one, offset=one.offset + 1), "offsets"), (layer(2, 4, seed=5), "operators"),
                         (replace(one, scores="softmax"), "answers")):
        found = hw.compare(one, other)
        assert not found.same
        assert words in found.where
        assert found.example is not None
        assert found.difference > 1e-3
    quiet = replace(one, W=torch.zeros_like(one.W))
    assert hw.compare(quiet, replace(quiet, mask="causal", scores="linear/k")).same
    assert hw.compare(one, lambda X: one(X)).by == "inputs"
    assert hw.compare(lambda X: one(X), one).same


def test_comparing_refuses_other_sizes(refused):
    one = layer(1, 4)
    with refused("layer_a", "width"):
        hw.compare(one, layer(1, 5))
    with refused("on", "width 4"):
        hw.compare(one, one, on=examples(layer(1, 5), 5))


def test_claims_are_about_the_operator():
    one = layer(2, 4, "linear", offset=True)
    fresh = examples(one, 600, seed=11)
    found = hw.certify(one, fresh, teacher_bound=1e3, token_bound=6.0)
    assert found.established("held-out quantile")
    assert found.established("identifiability")
    assert "no other operator" in found["identifiability"].reason
    assert found["identifiability"].numbers["free_directions"] == 0
    assert found.established("fewest heads")
    for name in ("distance to the truth", "error bars", "non-degeneracy"):
        assert found[name].holds == "undecided"
        assert "mixing" in found[name].reason
    wrong = replace(one, Theta=one.Theta * 1.01)
    assert hw.certify(wrong, fresh)["held-out quantile"].holds == "no"
    assert not hw.certify(one, examples(one, 3, seed=12), sequences=3).established("identifiability")
    many = hw.certify(layer(6, 4), fresh)["fewest heads"]
    assert many.holds == "undecided"
    flat = fresh.X.clone()
    flat[:, :, 0] = 0.0
    assert hw.certify(one, hw.Examples(flat, one(flat)))["identifiability"].holds == "no"


@pytest.mark.parametrize("scores", ["linear", "linear/k"])
def test_no_row_is_longer_than_the_bound_of_the_mean(scores):
    from headway.certificates.held_out import errors

    one = layer(2, 4, scores, offset=True)
    data = examples(one, 20)
    found = errors(one, data)
    assert float(one(data.X).norm(dim=2).max()) <= found.row_bound
    assert found.degree == 3
    wide = 2 * data.X
    assert float(one(wide).norm(dim=2).max()) <= found.row_bound * 2**found.degree


def test_nothing_about_single_heads_takes_such_a_layer(refused, tmp_path):
    one, data = layer(2, 4), examples(layer(2, 4), 10)
    model = torch.nn.Sequential(torch.nn.MultiheadAttention(4, 2, batch_first=True))
    save_layer(tmp_path / "one.safetensors", one)
    for name, ask in (
        ("layer", lambda: one.patterns(data.X)), ("layer", lambda: one.augmented),
        ("learned", lambda: hw.match(one, one)), ("truth", lambda: hw.match(replace(one, scores="softmax"), one)),
        ("layer", lambda: hw.match(one, one, on=data)), ("layer", lambda: hw.heads_of(one)),
        ("layer", lambda: hw.to_torch(one)), ("layer", lambda: hw.FactoredLayer.of(one)),
        ("layer", lambda: hw.replace(model, "0", one)), ("layer", lambda: figures.plot_match(one, one)),
        ("layer_a", lambda: write_comparison(one, one, tmp_path / "page.html")),
        ("truth", lambda: hw.learn(data, method=hw.Sculpt(truth=one))),
        (str(tmp_path / "one.safetensors"), lambda: load_plain(tmp_path / "one.safetensors")),
    ):
        with refused(name, "linear scores"):
            ask()


def test_bad_input_is_refused(refused):
    data = examples(layer(1, 4), 10)
    with refused("key_bias", "None"):
        layer(1, 4, key_bias=True)
    with refused("scores", "'softmax', 'linear', 'linear/k'"):
        layer(1, 4, "relu")
    with refused("form", "'linear/k'"):
        hw.learn(data, form="linear/m")
    with refused("rank", "no rank of their own"):
        hw.learn(data, form="linear", rank=2)
    with refused("rank"):
        hw.learn(data, form="linear", rank=None)
    with refused("method"):
        hw.learn(data, form="linear", method="moments")
    with refused("heads"):
        hw.learn(data, form="linear", heads=0)
    with refused("examples", "keys"):
        hw.learn(hw.Examples(data.X, data.Y, keys=data.X), form="linear")


def test_layers_are_stored_with_their_scores(tmp_path, refused):
    one = layer(2, 4, "linear/k", mask="causal", offset=True)
    save_layer(tmp_path / "one.safetensors", one)
    again = load_layer(tmp_path / "one.safetensors")
    assert (again.scores, again.mask) == ("linear/k", "causal")
    assert torch.equal(again.Theta, one.Theta)
    assert repr(again) == "AttentionLayer(2 heads, width 4 → 4, with offset, causal, linear/k scores)"
    assert again.to(torch.float32).scores == "linear/k"
    soft = replace(one, scores="softmax")
    save_layer(tmp_path / "soft.safetensors", soft)
    assert load_layer(tmp_path / "soft.safetensors").scores == "softmax"
    from headway.core.files import write_tensors

    write_tensors(tmp_path / "odd.safetensors", one.tensors(), {"kind": "headway-linear-1", "mask": "none"})
    with refused("scores"):
        load_layer(tmp_path / "odd.safetensors")


def test_a_black_box_is_learned_as_one():
    one = layer(1, 4, "linear")
    fit = hw.learn(hw.ask(lambda X: one(X), count=60, length=4, width=4, law="gaussian"), form="linear")
    assert hw.compare(fit.layer, one).same
    assert len(join([examples(one, 3), examples(one, 3)])) == 6


# -- shell and figures ------------------------------------------------------------------------------------------


def test_commands_know_linear_scores(tmp_path):
    def said(code, *words):
        done = headway(*words, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        return done

    said(0, "make", "EX", "--heads", 2, "--width", 4, "--length", 5, "--count", 60, "--law", "gaussian", "--scores",
         "linear/k", "--causal")
    told = said(0, "count", "--width", 4, "--heads", 2, "--length", 5, "--scores", "linear", "--json").stdout
    assert json.loads(told)["floor"] == LinearSize(4, 4, 5).floor(2)
    said(0, "learn", "EX", "--out", "RUN", "--form", "linear/k")
    shown = json.loads(said(0, "show", "RUN", "--truth", "EX/truth.safetensors", "--json").stdout)
    assert shown["status"] == "recovered"
    assert shown["same"]
    assert shown["match"] is None
    assert json.loads(said(0, "compare", "RUN", "EX/truth.safetensors", "--json").stdout)["same"]
    said(0, "make", "FRESH", "--layer", "EX/truth.safetensors", "--length", 5, "--count", 600, "--law", "gaussian")
    said(0, "certify", "RUN", "--examples", "FRESH", "--require", "fewest heads")
    assert recheck.recheck(tmp_path / "RUN", [tmp_path / "FRESH"])["differs"] == []
    assert "linear/k scores" in said(2, "report", "RUN").stderr.replace("\n", " ")
    said(2, "learn", "EX", "--out", "OTHER", "--form", "linear", "--method", "starts")
    said(2, "learn", "EX", "--out", "OTHER", "--form", "EX/truth.safetensors")
    said(2, "make", "OTHER", "--scores", "relu")
    said(2, "count", "--scores", "linear", "--rank", 2)
    with pytest.raises(hw.InputError, match="linear/k scores"):
        write_report(tmp_path / "RUN")


def test_the_figure_of_samples_says_what_the_rows_say(refused):
    import matplotlib as mpl

    mpl.use("Agg")
    rows_ = [{"part": part, "d": 8, "rank": m, "times": times, "success": times > m}
             for part in ("told", "whole", "found") for m in (1, 2) for times in (1.0, 2.0, 4.0) for _ in range(2)]
    axis = figures.plot_samples(rows_)
    lines = {line.get_label(): line.get_ydata().tolist() for line in axis.get_lines()}
    assert lines["d = 8, rank 1"] == [0.0, 1.0, 1.0]
    assert lines["d = 8, rank 2, all operators"] == [0.0, 0.0, 1.0]
    assert len(lines) == 4
    with refused("rows"):
        figures.plot_samples([])
    one = layer(2, 4)
    fit = hw.Fit(one, hw.Status("recovered", "."), {}, ())
    image = figures.plot_heads(fit, 1, "Theta").get_images()[0].get_array()
    assert math.isclose(float(abs(image).max()), float(one.Theta[1].abs().max()))


def test_large_labels_that_are_met_are_no_outliers():
    truth = layer(width=6, scores="linear/k", mask="causal")
    fit = hw.learn(hw.draw(truth, count=300, length=6, law="gaussian", seed=2), form="linear/k")
    assert (fit.status.kind, fit.stats["outliers"]) == ("recovered", 0)
    assert hw.certify(fit, hw.draw(truth, count=800, length=6, law="gaussian", seed=12)).established(
        "held-out quantile")


def test_a_bound_on_rows_knows_the_longest_sequence_counted():
    truth, bounds = layer(width=6), {"teacher_bound": 1e4, "token_bound": 8.0}
    long, short = (hw.draw(truth, count=60, length=k, law="gaussian", seed=k) for k in (12, 4))
    first = hw.certify(truth, long, **bounds)
    both = hw.certify(truth, short, so_far=first, **bounds)
    largest = [found["held-out mean"].numbers["largest_possible"] for found in (first, both)]
    assert largest[1] >= largest[0]
