import json
import os
import pickle
import stat
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

from headway import recheck
from headway.core import files
from headway.core.checks import InputError
from headway.core.factored import in_factors
from headway.core.layer import AttentionLayer, load_layer, save_layer
from headway.core.measured import fingerprint
from headway.core.results import Fit, NotLearnedError, Status
from headway.runs import store
from headway.runs.store import Run

SAME = {"rtol": 0, "atol": 0}


def layer(**options):
    return AttentionLayer.random(2, 4, **{"out_width": 3, "key_bias": True, "offset": True, **options})


def fit(**options):
    status = Status("noise", "The residual is label noise.", {"residual": 0.125, "floor": 1e-300})
    stats = {"held_out_error": 0.1, "examples": 90, "held_out": 9, "used": 81, "floor": 7, "products": 30,
             "seconds": 0.5, "passes": 7}
    trace = ({"stage": "span", "gap": 2.5, "heads": 2, "sequences": 81, "seconds": 0.25},
             {"stage": "polish", "seconds": 0.25})
    return Fit(layer(**options), status, stats, trace)


def assert_same_layer(one, two):
    assert one.mask == two.mask
    assert list(one.tensors()) == list(two.tensors())
    for name, value in one.tensors().items():
        assert_close(value, two.tensors()[name], **SAME)


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def finished(tmp_path):
    run = Run.create(tmp_path / "run", {"heads": 2})
    run.finish(fit())
    return run


# Files


@pytest.mark.parametrize("old", [None, b"old"], ids=["new", "replaced"])
def test_write_bytes(tmp_path, old):
    path = tmp_path / "a.bin"
    if old:
        path.write_bytes(old)
    files.write_bytes(path, b"new")
    assert content(tmp_path) == {"a.bin": b"new"}


@pytest.mark.parametrize("broken", ["replace", "fsync"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_the_old_content_only(tmp_path, monkeypatch, broken, error):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def fail(*_):
        raise error("stopped")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(error, match="stopped"):
        files.write_bytes(path, b"new")
    assert content(tmp_path) == {"a.bin": b"old"}


def test_files_have_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").touch()
    store.write_json(tmp_path / "a.json", {})
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


# Layers


@pytest.mark.parametrize("key_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("offset", [False, True], ids=["no_offset", "offset"])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_layers_round_trip(tmp_path, key_bias, offset, mask, dtype):
    kept = layer(key_bias=key_bias, offset=offset, mask=mask, dtype=dtype)
    save_layer(tmp_path / "layer.safetensors", kept)
    assert_same_layer(load_layer(tmp_path / "layer.safetensors"), kept)


def test_parts_that_share_memory_are_saved(tmp_path):
    square = layer().Theta
    kept = AttentionLayer(square, square, offset=square[0, 0])
    save_layer(tmp_path / "layer.safetensors", kept)
    assert_same_layer(load_layer(tmp_path / "layer.safetensors"), kept)


def test_parts_that_are_not_contiguous_are_saved(tmp_path):
    kept = AttentionLayer(layer().Theta.mT, layer().W[:, :, ::2])
    save_layer(tmp_path / "layer.safetensors", kept)
    assert_same_layer(load_layer(tmp_path / "layer.safetensors"), kept)


def test_foreign_layer_files_are_refused(refused, tmp_path):
    path = tmp_path / "layer.safetensors"
    with refused(str(path), "does not open"):
        load_layer(path)
    path.write_bytes(pickle.dumps({"Theta": [1.0]}))
    with refused(str(path), "pickled files are never read"):
        load_layer(path)
    save_layer(path, layer())
    path.write_bytes(path.read_bytes()[:-1])
    with refused(str(path), "does not open"):
        load_layer(path)
    save_file({"X": torch.zeros(1)}, path)
    with refused(str(path), "['X']"):
        load_layer(path)
    save_file({"Theta": torch.zeros(1, 2, 2)}, path)
    with refused(str(path), "['Theta']"):
        load_layer(path)
    save_file(layer().tensors(), path, metadata={"mask": "both"})
    with refused("mask", "'both'"):
        load_layer(path)


# Runs


def test_a_run_remembers_its_configuration(tmp_path):
    made = Run.create(tmp_path / "deep" / "run", {"heads": "auto", "seed": 3, "sizes": (1, 2)})
    assert not made.path.exists(), "input refused at the door must leave nothing behind"
    made.begin()
    again = Run.open(tmp_path / "deep" / "run")
    assert again.config == made.config
    assert again.config == {"kind": store.KIND, "heads": "auto", "seed": 3, "sizes": [1, 2]}
    assert not again.finished


def test_a_run_is_not_made_in_a_folder_in_use(refused, finished, tmp_path):
    before = content(tmp_path)
    with refused("out", "--resume"):
        Run.create(finished.path, {"heads": 2})
    with refused("out"):
        Run.create(finished.path / "config.json", {})
    assert content(tmp_path) == before


def test_a_configuration_that_is_not_data_makes_no_folder(tmp_path):
    with pytest.raises(TypeError):
        Run.create(tmp_path / "run", {"heads": object()})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("reopened", [False, True], ids=["same", "reopened"])
def test_a_stage_is_computed_once(tmp_path, reopened):
    calls = []

    def compute():
        calls.append(1)
        base = torch.arange(12.0).view(3, 4)
        tensors = {"basis": base.T, "again": base, "steps": torch.tensor(3), "ok": torch.tensor([True])}
        return tensors, {"gap": 0.1, "note": "Θ", "kept": [1, 2], "none": None}

    run = Run.create(tmp_path / "run", {})
    first, info = run.stage("span", compute)
    if reopened:
        run = Run.open(tmp_path / "run")
    second, again = run.stage("span", compute)
    assert calls == [1]
    assert again == info
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert_close(second[name], value, **SAME)


def test_stages_are_told_apart_by_name_and_may_be_empty(tmp_path):
    run = Run.create(tmp_path / "run", {})
    assert run.stage("span", lambda: ({}, {"n": 1})) == ({}, {"n": 1})
    assert run.stage("unmix", lambda: ({}, {"n": 2})) == ({}, {"n": 2})
    assert run.stage("span", lambda: pytest.fail("computed twice")) == ({}, {"n": 1})


def test_a_stage_that_raises_leaves_no_file_and_can_be_tried_again(tmp_path):
    run = Run.create(tmp_path / "run", {})

    def fail():
        raise ArithmeticError("no gap")

    before = content(run.path)
    with pytest.raises(ArithmeticError, match="no gap"):
        run.stage("span", fail)
    assert content(run.path) == before
    assert run.stage("span", lambda: ({}, {"n": 1}))[1] == {"n": 1}


def test_a_truncated_stage_is_refused(refused, tmp_path):
    run = Run.create(tmp_path / "run", {})
    run.stage("span", lambda: ({"basis": torch.ones(3)}, {}))
    path = run.path / "stages" / "span.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with refused(str(path), "delete it", "--resume"):
        run.stage("span", lambda: pytest.fail("computed twice"))


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_a_finished_run_gives_its_fit_back(tmp_path, mask):
    made = Run.create(tmp_path / "run", {})
    assert not made.finished
    made.finish(fit(mask=mask))
    again = Run.open(tmp_path / "run")
    assert again.finished
    found, kept = again.fit(), fit(mask=mask)
    assert_same_layer(found.layer, kept.layer)
    assert (found.status, found.stats, found.trace) == (kept.status, kept.stats, kept.trace)
    assert again.manifest()["versions"].keys() == {
        "python", "headway", "torch", "numpy", "scipy", "safetensors"
    }
    assert again.truth() is None


def test_a_run_knows_the_sequences_it_was_learned_from(tmp_path, refused):
    older = Run.create(tmp_path / "older", {"digest": "d" * 64})
    older.finish(fit())
    assert Run.open(older.path).seen() == "d" * 64, "a run from before hashes were kept has the digest"
    run = Run.create(tmp_path / "run", {"digest": "d" * 64})
    run.finish(fit(), np.array([5, -(2**63), 2**63 - 1]))
    assert Run.open(run.path).seen().tolist() == [5, -(2**63), 2**63 - 1]
    (run.path / store.SEEN).unlink()
    with refused(str(run.path / store.SEEN), "manifest"):
        Run.open(run.path).fit()


def test_a_run_may_know_the_truth(tmp_path):
    run = Run.create(tmp_path / "run", {})
    run.begin()
    save_layer(run.path / "truth.safetensors", layer(seed=5))
    run.finish(fit(), np.arange(3))
    assert_same_layer(Run.open(run.path).truth(), layer(seed=5))
    assert set(run.manifest()["sha256"]) == set(store.FILES)


def test_a_stage_made_with_other_settings_is_refused(refused, tmp_path):
    run = Run.create(tmp_path / "run", {"heads": 2})
    run.stage("span", lambda: ({"a": torch.ones(1)}, {}))
    (run.path / "config.json").write_text(json.dumps({**run.config, "heads": 3}))
    with refused(str(run.path / "stages" / "span.safetensors"), "other settings"):
        Run.open(run.path).stage("span", lambda: ({}, {}))


def test_an_unfinished_run_has_no_fit(refused, tmp_path):
    run = Run.create(tmp_path / "run", {})
    with refused(str(run.path), "without manifest.json", "--resume"):
        run.fit()


def test_a_run_that_dies_before_the_manifest_is_not_finished(tmp_path, monkeypatch):
    run = Run.create(tmp_path / "run", {})
    run.begin()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(store, "write_json", fail)
    with pytest.raises(OSError, match="disk full"):
        run.finish(fit())
    assert not Run.open(run.path).finished


@pytest.mark.parametrize("name", ["layer.safetensors", "config.json"])
@pytest.mark.parametrize("how", ["changed", "removed"])
def test_a_tampered_file_is_refused(refused, finished, name, how):
    path = finished.path / name
    if how == "removed":
        path.unlink()
    elif name == "config.json":
        store.write_json(path, {**finished.config, "heads": 3})
    else:
        save_layer(path, layer(seed=1))
    with refused(str(path), "sha256"):
        finished.fit()


def test_one_flipped_bit_is_refused(finished):
    path = finished.path / "layer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="sha256"):
        finished.fit()


def test_foreign_folders_are_refused(refused, tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with refused(str(folder / "config.json"), "no readable JSON"):
            Run.open(folder)
    (tmp_path / "config.json").write_text(json.dumps({"kind": "of_other_software"}))
    with refused(str(tmp_path), "of_other_software"):
        Run.open(tmp_path)
    assert list(content(tmp_path)) == ["config.json"]
    assert not (tmp_path / "stages").exists()


CORRUPT = [b"", b"{", b'{"kind": ', b"[1, 2]", b"\xff\xfe\x00", b"{}"]


@pytest.mark.parametrize("data", CORRUPT, ids=repr)
def test_a_corrupted_configuration_is_refused(finished, data):
    (finished.path / "config.json").write_bytes(data)
    with pytest.raises(InputError, match=r"expected .* got .* Try: "):
        Run.open(finished.path)


@pytest.mark.parametrize("data", CORRUPT, ids=repr)
def test_a_corrupted_manifest_is_refused(refused, finished, data):
    path = finished.path / "manifest.json"
    path.write_bytes(data)
    with refused(str(path)):
        finished.fit()


# Results


@pytest.mark.parametrize(
    ("kind", "ok"),
    [("recovered", True), ("noise", True), ("not_realisable", False), ("too_few", False), ("limit", False)],
)
def test_a_status_says_whether_the_layer_may_be_used(kind, ok):
    status = Status(kind, "A sentence.")
    assert (status.ok, str(status)) == (ok, "A sentence.")
    failed = NotLearnedError(Fit(layer(), status, {}, ()))
    assert str(failed) == "A sentence."
    assert failed.fit.status is status
    assert repr(failed.fit) == f"Fit({layer()!r}, {kind}: A sentence.)"


# -- layers that were multiplied out of factors -----------------------------------------------------------------


def of_low_rank(key_bias, mask, rank=3):
    """A layer of thin heads, W too; exactly of that rank but for rounding."""
    layer = AttentionLayer.random(heads=3, width=20, rank=rank, offset=True, mask=mask, seed=3)
    draw = torch.Generator().manual_seed(4)
    W = torch.randn(3, 20, rank, generator=draw, dtype=torch.float64) @ torch.randn(
        3, rank, 20, generator=draw, dtype=torch.float64)
    u = layer.Theta[:, 0] * 0.5 if key_bias else None  # in the keys' space
    return replace(layer, W=W, key_bias=u)


@pytest.mark.parametrize("key_bias", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_a_thin_layer_is_stored_by_its_factors_and_read_to_the_last_bit(tmp_path, key_bias, mask):
    layer = of_low_rank(key_bias, mask)
    made = in_factors(layer, 3, 3)
    assert made is not layer and (made.key_bias is None) == (not key_bias) and made.mask == mask
    for name, tensor in layer.tensors().items():
        torch.testing.assert_close(made.tensors()[name], tensor, rtol=0, atol=1e-13)
    save_layer(tmp_path / "thin.safetensors", made)
    save_layer(tmp_path / "whole.safetensors", layer)
    back = load_layer(tmp_path / "thin.safetensors")
    assert isinstance(back, AttentionLayer)
    assert_same_layer(back, made)
    assert fingerprint(back) == fingerprint(made)
    small, large = ((tmp_path / f"{name}.safetensors").stat().st_size for name in ("thin", "whole"))
    assert small < 0.5 * large
    assert_same_layer(load_layer(tmp_path / "whole.safetensors"), layer)  # as it has always been stored
    other = recheck.Layer(tmp_path / "thin.safetensors")
    X = torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    rows = other.rows({"X": X.numpy()})
    assert float((torch.from_numpy(rows.value) - made(X)).abs().max()) <= 2 * float(rows.off.max()) < 1e-10


def test_what_is_changed_afterwards_is_not_stored_by_old_factors(tmp_path):
    made = in_factors(of_low_rank(False, "none"), 3, 3)
    other = replace(made, W=2 * made.W)
    save_layer(tmp_path / "layer.safetensors", other)
    assert_same_layer(load_layer(tmp_path / "layer.safetensors"), other)


def test_factors_that_are_larger_or_leave_something_out_are_not_used():
    layer = of_low_rank(False, "none")
    assert in_factors(layer, 2, 3) is layer and in_factors(layer, 3, 2) is layer
    assert in_factors(layer, 15, 15) is layer
    assert in_factors(layer.to(torch.float32), 3, 3).Theta.dtype == torch.float32


def test_a_run_gives_back_the_layer_that_was_learned_and_counts_go_by_it(tmp_path):
    made = replace(fit(), layer=in_factors(of_low_rank(True, "none"), 3, 3))
    run = Run.create(tmp_path / "run", {})
    run.finish(made)
    assert_same_layer(Run.open(tmp_path / "run").fit().layer, made.layer)
    assert fingerprint(Run.open(tmp_path / "run").fit().layer) == fingerprint(made.layer)
