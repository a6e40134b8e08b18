"""What holds for the package as a whole: import order, import cost, silence, and every learner's contract."""

from __future__ import annotations

import ast
import dataclasses
import functools
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headway as hw
from headway.core.names import BASELINES, METHODS

SOURCE = Path(hw.__file__).parent
ORDER = [*(f"core.{name}" for name in (
             "names", "plain", "checks", "files", "devices", "budget", "attention", "positions", "forms",
             "tangents", "freedom", "operator", "layer", "factored", "counting", "examples", "shards", "gauge",
             "convert", "configs", "weights", "sites", "calls", "asking", "modules", "stored", "checkpoints",
             "replaced", "capture", "oracle", "sources", "match", "words", "behaviour", "inputs", "sides", "causes",
             "same", "conditions", "measured", "results")), "core",
         "linalg.krylov", "linalg.totals", "linalg.projected", "linalg.thin", "linalg.convex", "linalg", "runs",
         "runs.schema", "runs.store", "runs.jobs", "runs.cluster",
         *(f"learning.{name}" for name in (
             "shapes", "gauss_newton", "parts", "source", "saturated", "thin", "snapshots", "candidate", "white",
             "determined", "actions", "policy", "settings", "starts", "starts.moments", "starts.unmix",
             "starts.random", "starts.batches", "starts.descent", "ranks", "ladder", "polish", "prune", "refine",
             "baselines", "evidence", "loop",
             "verdict", "formed_slow", "formed_steps", "formed", "formed_source", "formed_start", "formed_groups",
             "formed_refine", "formed_evidence", "formed_learn", "formed_read", "clues", "questions",
             "which", "linear_evidence", "linear", "linear_verdict", "kept", "chosen", "chosen.line",
             "chosen.place", "chosen.tensors", "chosen.plan", "chosen.seed", "chosen.conversation",
             "chosen.opening", "chosen.everywhere", "chosen.endings", "chosen.scattered", "chosen.learner",
             "learn")),
         "learning",
         *(f"sculpting.{name}" for name in (
             "thresholds", "rows", "simplex", "body", "crude", "sculpt", "hull", "refine", "sharpen", "resculpt",
             "net", "provable")), "sculpting",
         *(f"certificates.{name}" for name in (
             "betting", "held_out", "jacobian", "rounding", "scaled", "thin", "spectrum", "identify", "newton",
             "slopes", "accurate", "linear", "chained", "factors", "kernel", "radius", "wide", "bars", "known",
             "report")),
         "certificates",
         *(f"training.{name}" for name in (
             "network", "constants", "data", "starts", "descent", "curvature", "convergence", "generalization",
             "bounds", "afterwards", "realizability", "one_step", "select", "run", "grid")), "training",
         "runs.tensorboard", "hardness.families", "hardness.secrets", "hardness", "hardness.zoo", "racing",
         "racing.apart", "racing.tables", "racing.race", "",
         "recheck", "recall", "recall.data", "recall.model",
         "runs.traces", "report.heads", "report.figures", "report.given", "report.samples", "report.story",
         "report.pair", "report.charts", "report.page", "report",
         "cli.console", "cli.ranks", "cli.show", "cli.demo", "cli.make", "cli.capture", "cli.learn", "cli.certify",
         "cli.compare", "cli.train", "cli.hard", "cli.main", "cli", "__main__"]
# Imported when asked for, or for the types alone.
ASKED_FOR_BY_NAME = {("learning.learn", "sculpting.provable"), ("learning.settings", "sculpting.thresholds"),
                     ("core.examples", "core.shards"), ("core.layer", "core.factored"),
                     ("core.convert", "core.results")}


def module_of(path):
    parts = list(path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "headway":
            base = (node.module or "").removeprefix("headway").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                yield inner if inner in MODULES else base
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "headway":
                    yield alias.name.removeprefix("headway").lstrip(".")


def test_every_module_has_its_place():
    assert set(MODULES) == set(ORDER)


@pytest.mark.parametrize("name", ORDER, ids=lambda name: name or "headway")
def test_a_module_imports_only_from_above(name):
    above = ORDER[: ORDER.index(name)]
    assert [m for m in imported(MODULES[name])
            if m not in above and (name, m) not in ASKED_FOR_BY_NAME] == []


def test_the_library_prints_nothing():
    for name, path in MODULES.items():
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        named = [getattr(call.func, "id", "") for call in calls]
        assert "print" not in named, name


def test_import_needs_only_the_four_parts():
    code = ("import sys, torch, numpy, scipy.optimize, safetensors.torch; before = set(sys.modules); "
            "import headway; "
            "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
            "print(sorted(new & {'typer', 'rich', 'matplotlib', 'plotly', 'click'}))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_learning_and_certifying_wait_for_nothing_they_do_not_use():
    """scipy.stats alone takes longer to import than scipy.special and scipy.linalg together."""
    code = ("import sys, headway as hw; hw.certify, hw.learn; "
            "print([m for m in ('scipy.stats', 'plotly', 'matplotlib', 'typer') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("method", METHODS)
class TestEveryLearner:
    truth = hw.AttentionLayer.random(heads=1, width=4, offset=True, seed=0)

    @staticmethod
    @functools.cache
    def fitted(method):
        """What was given, as it was and as it is after, and the fit."""
        data = hw.draw(TestEveryLearner.truth, count=300, length=4, seed=1)
        before, state = (data.X.clone(), data.Y.clone()), torch.get_rng_state()
        fit = hw.learn(data, heads=1, method=method, seed=3)
        return before, data, fit, torch.equal(state, torch.get_rng_state())

    def test_returns_a_fit_that_predicts(self, method):
        *_, fit, _ = self.fitted(method)
        assert isinstance(fit, hw.Fit)
        assert fit.layer.heads == 1
        assert fit.layer.Theta.dtype == torch.float64
        assert fit.status.sentence.endswith(".")
        unseen = hw.draw(self.truth, count=100, length=4, seed=2)
        error = float((fit.layer(unseen.X) - unseen.Y).norm() / (unseen.Y - unseen.Y.mean((0, 1))).norm())
        assert error < 1e-3
        assert error < max(1e-12, 3 * fit.stats["held_out_error"]), "the reported error does not flatter"

    def test_says_recovered_only_at_the_floor(self, method):
        *_, fit, _ = self.fitted(method)
        exact = method not in BASELINES
        assert fit.status.kind == ("recovered" if exact else "fitted"), fit.status
        assert (fit.stats["held_out_error"] < 1e-12) == (fit.status.kind == "recovered")
        assert (hw.match(fit.layer, self.truth).worst < 1e-12) == exact

    def test_reports_the_same_counters(self, method):
        *_, fit, _ = self.fitted(method)
        assert set(fit.stats) == set(self.fitted("moments")[2].stats)
        assert {"heads", "held_out_error", "fitted_error", "noise", "examples", "floor"} <= set(fit.stats)
        assert len(fit.trace) >= 2
        assert all("stage" in event and event["seconds"] >= 0 for event in fit.trace)

    def test_leaves_its_input_and_the_global_generator_alone(self, method):
        (X, Y), data, _, untouched = self.fitted(method)
        assert torch.equal(data.X, X)
        assert torch.equal(data.Y, Y)
        assert untouched

    def test_refuses_what_is_no_example(self, method):
        with pytest.raises(hw.InputError, match="examples"):
            hw.learn(torch.zeros(3, 4, 5), heads=1, method=method)


def hints(path):
    """The last argument of every refusal: what to try, as far as it is written out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "refuse":
            yield from (part.value for part in ast.walk(node.args[-1])
                        if isinstance(part, ast.Constant) and isinstance(part.value, str))


def test_what_a_refusal_says_to_try_exists():
    named = {(name, found) for name, path in MODULES.items() for hint in hints(path)
             for found in re.findall(r"\bheadway(?:\.\w+)+", hint)}
    assert len(named) > 3
    missing = []
    for name, found in sorted(named):
        try:
            pkgutil.resolve_name(found)
        except (ImportError, AttributeError):
            missing.append(f"{name} says to try {found}")
    assert missing == []


def test_certify_imports_nothing_from_the_learners():
    inside = [name for name in MODULES if name.split(".")[0] == "certificates"]
    assert len(inside) > 3
    for name in inside:
        taken = set(imported(MODULES[name]))
        assert not any(target.split(".")[0] in ("learning", "sculpting") for target in taken), name


def test_names_are_found_when_asked_for():
    for name in hw.__all__:
        assert name in dir(hw)
        assert getattr(hw, name).__module__.startswith("headway.")
    assert hw.training.__name__ == "headway.training"
    with pytest.raises(AttributeError, match="nonsense"):
        _ = hw.nonsense


def test_words_listed_for_the_command_line_are_those_there_are():
    from headway import hardness
    from headway.core import names
    from headway.hardness import zoo
    from headway.racing import apart

    assert tuple(hardness.FAMILIES) == names.FAMILIES
    assert tuple(zoo.SUITES) == names.SUITES
    assert tuple(apart.LEARNERS) == names.LEARNERS


def test_a_stored_claim_has_the_fields_of_a_claim():
    from headway.runs.schema import CLAIM

    assert set(CLAIM) == {field.name for field in dataclasses.fields(hw.Claim)}
