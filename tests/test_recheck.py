"""The second program: no code of the first, the same errors to what rounding allows, the same verdicts."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.test_certify_forms import filled
from tests.test_freedom import NAMES, forms

import headway as hw
from headway import recheck
from headway.certificates.held_out import errors
from headway.core.files import read_tensors, write_tensors
from headway.core.layer import save_layer
from headway.core.shards import write
from headway.runs.store import COUNTED, Run


def certified(folder, layer, data, *later, **options):
    """A run with this layer, certified with these examples, in folders 0, 1, …"""
    run, found = Run(folder / "run", {}), None
    (folder / "run").mkdir()
    save_layer(folder / "run" / "layer.safetensors", layer)
    for j, part in enumerate((data, *later)):
        shards = write(folder / str(j), (part.take(range(a, b)) for a, b in ((0, 7), (7, len(part)))), 2)
        found = hw.certify(layer, shards, so_far=found, **options)
    run.certified(found, {})
    return [str(folder / "run"), *(str(folder / str(j)) for j in range(1 + len(later)))], found


def told(words, capsys):
    code = recheck.main(["--json", *words])
    said = capsys.readouterr()
    return code, said.err, json.loads(said.out) if said.out else None


def spoiled(layer, size):
    Theta = layer.Theta.clone()
    Theta[0, 1, 2] += size
    return replace(layer, Theta=Theta)


def test_it_shares_no_code_with_headway():
    tree = ast.parse(Path(recheck.__file__).read_text())
    taken = {name.split(".")[0] for node in ast.walk(tree) for name in (
        [alias.name for alias in node.names] if isinstance(node, ast.Import) else
        [node.module or ""] if isinstance(node, ast.ImportFrom) else [])}
    assert taken - set(sys.stdlib_module_names) == {"numpy", "safetensors"}
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))
    assert not {"importlib", "subprocess", "runpy"} & taken
    code = ("import sys, headway.recheck; print(sorted(m for m in sys.modules if m.split('.')[0] in "
            "('torch', 'scipy') or m.startswith('headway.')))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['headway.recheck']"


def test_it_states_the_numbers_of_the_bet_again():
    from headway.certificates import betting, held_out

    assert list(betting.SHARES) == recheck.SHARES
    assert list(betting.MONEY) == recheck.MONEY
    assert (held_out.FIRST, held_out.CLIP) == (recheck.FIRST, recheck.CLIP)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_errors_of_every_form_agree(name, cross, tmp_path):
    if cross and forms(1, 2, 4)[name].sight.causal:
        return
    m = 4 if name == "everything" else 2
    layer = hw.FactoredLayer.random(m, 4, size=4, groups=m // 2, form=forms(m, 4, 4)[name], out_width=3,
                                    cross=cross, key_width=3 if cross else None, biases=name != "plain")
    data = filled(layer, 12)
    noisy = hw.Examples(data.X, data.Y + 0.1 * torch.linspace(-1, 1, 12).view(12, 1, 1), **data.beside())
    save_layer(tmp_path / "layer.safetensors", layer)
    other = recheck.Layer(tmp_path / "layer.safetensors")
    for examples, size in ((data, 0.0), (noisy, 0.1)):
        write(tmp_path / f"e{size}", iter([examples]), 1)
        e, off, deviation, first = recheck.measured(other, [tmp_path / f"e{size}"])
        found = errors(layer, examples)
        assert bool((np.abs(e - found.each.numpy()) <= 2 * off).all())
        assert float(off.max()) < 1e-9, "and this is small"
        assert float(np.abs(e - found.each.numpy()).max()) < 1e-13
        assert deviation == pytest.approx(found.deviation, rel=1e-13)
        assert first == found.first == 12
    assert float(e.max()) > 0.05


def test_the_rounding_claimed_holds_of_errors_that_can_be_seen(monkeypatch):
    """In float32 numbers are off by less than a bound with its eps says, and by more than nothing."""
    layer = recheck.Layer.__new__(recheck.Layer)
    draw = np.random.default_rng(0)
    layer.plain, layer.cross, layer.heads = False, False, 2
    layer.form = {"sight": {"causal": True, "window": None, "prefix": 0}, "cap": {"value": 3.0}, "sink": {},
                  "normed": {"eps": 1e-6}, "gate": {}, "offsets": {"kind": "clipped", "both": True, "far": 1}}
    sizes = {"query": (2, 6, 4), "key": (1, 6, 4), "value": (1, 6, 4), "out": (2, 4, 3), "offset": (3,),
             "sink": (2,), "norm_query": (4,), "norm_key": (4,), "gate": (2, 6, 4), "offsets": (2, 3)}
    parts = {name: draw.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    X = draw.normal(size=(20, 7, 5)).astype(np.float32)
    layer.parts = {name: value.astype(np.float64) for name, value in parts.items()}
    fine = layer.rows({"X": X.astype(np.float64)})
    layer.parts = parts
    monkeypatch.setattr(recheck, "EPS", float(np.finfo(np.float32).eps))
    rough = layer.rows({"X": X})
    assert rough.value.dtype == np.float32
    away = np.abs(rough.value - fine.value)
    assert bool((away <= rough.off).all())
    assert float(away.max()) > 1e-7
    assert float(fine.off.max()) < 1e-10


@pytest.mark.parametrize(("size", "holds"), [(0.0, "yes"), (1e-6, "undecided"), (1e-3, "no")])
def test_verdicts_and_order_statistics_are_the_same(size, holds, tmp_path, capsys):
    """Over two folders of two shards each; int8 tokens, a mask, a bias and an offset."""
    truth = hw.AttentionLayer.random(heads=2, width=5, key_bias=True, offset=True, mask="causal", seed=1)
    parts = [hw.draw(truth, count=count, length=8, seed=seed) for count, seed in ((300, 1), (400, 2))]
    layer = spoiled(truth, size)
    options = {"tolerance": 2e-7} if holds == "undecided" else {}
    words, found = certified(tmp_path, layer, *parts, confidence=0.95, fraction=0.02, **options)
    code, said, answer = told(words, capsys)
    assert code == 0, said
    assert "The certificate agrees." in said
    claim = found["held-out quantile"]
    assert answer["held-out quantile"]["holds"] == claim.holds
    assert claim.holds == holds or holds == "undecided"
    assert answer["sequences"] == 700
    each, bound = np.sort(found.held_out.each.numpy()), claim.numbers["bound"]
    rank = np.searchsorted(each, bound)
    assert abs(answer["held-out quantile"]["bound"] - each[rank]) < 1e-14, "the same order statistic"
    assert answer["held-out mean"]["bound"] == pytest.approx(found["held-out mean"].numbers["bound"], rel=1e-8)
    assert answer["held-out mean"]["holds"] == found["held-out mean"].holds


def test_what_does_not_agree_is_named(tmp_path, capsys):
    truth = hw.AttentionLayer.random(heads=2, width=4, seed=1)
    words, _ = certified(tmp_path, spoiled(truth, 1e-3), hw.draw(truth, count=520, length=8, seed=3))
    run = Path(words[0])
    whole, layer = json.loads((run / "certificate.json").read_text()), (run / "layer.safetensors").read_bytes()

    def edited(change):
        said = json.loads(json.dumps(whole))
        change(said, {claim["name"]: claim for claim in said["claims"]})
        (run / "certificate.json").write_text(json.dumps(said))

    one, two = "held-out quantile", "held-out mean"
    cases = [(lambda said, claims: claims[one].update(holds="yes"), "held-out quantile is no, not yes"),
             (lambda said, claims: claims[two].update(holds="no"), "held-out mean is yes, not no"),
             (lambda said, claims: claims[one]["numbers"].update(bound=1e-9), "is not the 520-th smallest of"),
             (lambda said, claims: claims[two]["numbers"].update(bound=1e-9), "the bound of held-out mean is"),
             (lambda said, claims: said.update(layer_sha256="0" * 64), "the layer is not the one certified")]
    for change, sentence in cases:
        edited(change)
        code, said, answer = told(words, capsys)
        assert code == 1
        assert sentence in said
        assert len(answer["differs"]) == 1
    edited(lambda said, claims: None)
    tensors, about = read_tensors(run / COUNTED)
    moved = tensors["errors"].clone()
    moved[3] += 1e-10
    write_tensors(run / COUNTED, {**tensors, "errors": moved}, about)
    assert "the error of sequence 3 is" in told(words, capsys)[1]
    write_tensors(run / COUNTED, tensors, about)
    save_layer(run / "layer.safetensors", truth)
    code, said, _ = told(words, capsys)
    assert code == 1
    assert "SHA-256" in said
    assert "held-out quantile is yes, not no" in said
    (run / "layer.safetensors").write_bytes(layer)
    assert told(words, capsys)[0] == 0


def test_outliers_that_the_learner_set_aside_are_counted_here_too(tmp_path, capsys):
    truth = hw.AttentionLayer.random(heads=2, width=4, seed=1)
    data = hw.draw(truth, count=520, length=8, seed=3)
    words, _ = certified(tmp_path, truth, data)
    run = Path(words[0])
    fit = hw.Fit(truth, hw.Status("recovered", "Recovered."), {"outliers": 3, "examples": 300}, ())
    found = hw.certify(fit, data, fraction=0.05)
    Run(run, {}).certified(found, {})
    code, said, answer = told(words, capsys)
    assert code == 0, said
    assert answer["held-out quantile"]["holds"] == found["held-out quantile"].holds == "yes"
    assert answer["held-out mean"]["bound"] > 0.1 * found["held-out mean"].numbers["clip"]


def test_what_cannot_be_rechecked_is_said(tmp_path, capsys):
    truth = hw.AttentionLayer.random(heads=1, width=3, seed=1)
    words, _ = certified(tmp_path, truth, hw.draw(truth, count=40, length=8, seed=3))
    run = Path(words[0])
    kept = {name: (run / name).read_bytes() for name in ("certificate.json", "layer.safetensors", COUNTED)}

    def refused(sentence, *given):
        code, said, answer = told(given or words, capsys)
        assert code == 2, said
        assert sentence in said
        assert answer is None
        for name, data in kept.items():
            (run / name).write_bytes(data)

    refused("80 sequences are given and 40 were counted", *words, words[1])
    refused("not all", str(run), str(run))
    (run / "certificate.json").unlink()
    refused("headway certify RUN")
    (run / COUNTED).write_bytes(b"nothing")
    refused("cannot be read by numpy")
    save_layer(run / "layer.safetensors", truth.to(torch.bfloat16))
    refused("bfloat16")
    tensors, about = hw.FactoredLayer.of(truth).stored()
    write_tensors(run / "layer.safetensors", tensors, {**about, "form": json.dumps(
        {**json.loads(about["form"]), "spiral": {}})})
    refused("scores with spiral are a form this program does not know")
    write_tensors(run / "layer.safetensors", tensors, {"kind": "something"})
    refused("is no layer that headway wrote")
    stored = json.loads(kept["certificate.json"])
    del stored["settings"]["counted"]
    (run / "certificate.json").write_text(json.dumps(stored))
    refused("of an older headway")
    whole = {**stored["settings"], "counted": 40}
    for settings in ({**whole, "fraction": "much"}, {"counted": 40, "outliers": 0.0}, 7):
        (run / "certificate.json").write_text(json.dumps({**stored, "settings": settings}))
        refused("not as headway writes them")
    bound = hw.certify(truth, hw.Examples.open(words[1]), teacher_bound=9.0)
    Run(run, {}).certified(bound, {})
    code, said, answer = told(words, capsys)
    assert code == 0, said
    assert "held-out mean" not in answer
