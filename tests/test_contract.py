"""What holds for the package as a whole: import order, import cost, silence, and every learner's contract."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headway as hw

SOURCE = Path(hw.__file__).parent
ORDER = [*(f"core.{name}" for name in (
             "checks", "files", "devices", "attention", "layer", "counting", "examples", "convert", "match",
             "conditions", "results")), "core",
         "linalg.krylov", "linalg.projected", "linalg", "runs", "runs.store",
         *(f"learning.{name}" for name in (
             "shapes", "gauss_newton", "source", "moments", "unmix", "thin", "polish", "prune", "refine", "starts",
             "starts.descent", "baselines", "stages", "route")), "learning",
         *(f"sculpting.{name}" for name in ("body", "simplex", "sculpt", "net", "provable")), "sculpting",
         *(f"certificates.{name}" for name in ("held_out", "jacobian", "identify", "radius", "report")),
         "certificates",
         *(f"training.{name}" for name in (
             "network", "data", "starts", "descent", "margin", "bounds", "select", "run")), "training",
         "hardness.families", "hardness.secrets", "hardness", "hardness.zoo", "racing", "racing.race", "",
         "runs.traces", "report.figures", "report.story", "report.charts", "report.page", "report",
         "cli.train", "cli.hard", "cli.main", "cli", "__main__"]
ASKED_FOR_BY_NAME = {("learning.route", "sculpting.provable"), ("learning.route", "sculpting.sculpt")}


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
        assert "print" not in named or name in ("cli.main", "cli.train"), name


def test_import_needs_only_the_four_parts():
    code = ("import sys, torch, numpy, scipy.optimize, safetensors.torch; before = set(sys.modules); "
            "import headway; "
            "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
            "print(sorted(new & {'typer', 'rich', 'matplotlib', 'plotly', 'click'}))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("method", ["moments", "descent"])
class TestEveryLearner:
    def data(self):
        truth = hw.AttentionLayer.random(heads=1, width=4, offset=True, seed=0)
        return truth, hw.draw(truth, count=300, length=4, seed=1)

    def test_returns_a_fit_that_predicts(self, method):
        truth, data = self.data()
        fit = hw.learn(data, heads=1, method=method)
        assert isinstance(fit, hw.Fit)
        assert fit.layer.heads == 1
        assert fit.layer.Theta.dtype == torch.float64
        assert fit.status.sentence.endswith(".")
        unseen = hw.draw(truth, count=100, length=4, seed=2)
        error = float((fit.layer(unseen.X) - unseen.Y).norm() / (unseen.Y - unseen.Y.mean((0, 1))).norm())
        assert error < max(1e-3, 3 * fit.stats["held_out_error"]), "the reported error does not flatter"

    def test_reports_the_same_counters(self, method):
        _, data = self.data()
        fit = hw.learn(data, heads=1, method=method)
        assert {"heads", "held_out_error", "fitted_error", "noise", "examples", "floor"} <= set(fit.stats)
        assert all("stage" in event and event["seconds"] >= 0 for event in fit.trace)

    def test_refuses_what_is_no_example(self, method):
        with pytest.raises(hw.InputError, match="examples"):
            hw.learn(torch.zeros(3, 4, 5), heads=1, method=method)


def test_certify_imports_nothing_from_the_learners():
    inside = [name for name in MODULES if name.split(".")[0] == "certificates"]
    assert len(inside) > 3
    for name in inside:
        taken = set(imported(MODULES[name]))
        assert not any(target.split(".")[0] in ("learning", "sculpting") for target in taken), name
