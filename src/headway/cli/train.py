"""``headway train``: sweeps of the second paper's experiments, written to a run folder with their figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from headway.cli.console import Json, err, progress, say
from headway.core.names import RULES, STARTS

if TYPE_CHECKING:
    from headway.training import Labelled


def train(
    out: Annotated[Path, typer.Option(help="New run folder.")],
    data: Annotated[str, typer.Option(help="mixture, planted, or a safetensors file with X and y.")] = "mixture",
    heads: Annotated[str, typer.Option(help="Head counts, as 1,4,16.")] = "1,4,16",
    step: Annotated[str, typer.Option(help="Step sizes, as 1,0.1; or sqrt for √H.")] = "1",
    zeta: Annotated[str, typer.Option(help="Parts of relevant tokens (mixture), as 0.1,0.3.")] = "0.1",
    count: Annotated[str, typer.Option(help="Training sequences, as 100,1000.")] = "100",
    test_count: Annotated[int, typer.Option(help="Test sequences.")] = 300,
    tokens: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 10,
    width: Annotated[int, typer.Option(help="Features of a token.")] = 10,
    strength: Annotated[float, typer.Option(help="Norm S of the means (mixture).")] = 2.0,
    nuisance: Annotated[int, typer.Option(help="Nuisance means M (mixture).")] = 4,
    noise: Annotated[float, typer.Option(help="Deviation of the noise (mixture).")] = 0.5,
    start: Annotated[str, typer.Option(help=" or ".join(STARTS) + ".")] = "zero",
    rule: Annotated[str, typer.Option(help=" or ".join(RULES) + ".")] = "constant",
    steps: Annotated[int, typer.Option(help="Iterations.")] = 400,
    trials: Annotated[int, typer.Option(help="Draws of the data for each setting.")] = 1,
    theory: Annotated[bool, typer.Option(help="Margins, bounds and curvature as well.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the first trial.")] = 0,
    as_json: Json = False,
) -> None:
    """Train by gradient descent with the theory beside it: one setting, or a sweep over heads, steps and more."""
    grid = list(itertools.product(_numbers("heads", heads), step.split(","), _numbers("zeta", zeta),
                                  _numbers("count", count)))
    config = {name: value for name, value in locals().items() if name not in ("out", "as_json", "grid")}

    from headway import training
    from headway.core import checks
    from headway.core.files import write_json
    from headway.runs import store

    checks.whole("trials", trials)
    law = {"strength": strength, "nuisance": nuisance, "noise": noise}
    run = store.Run.create(out, {"command": "train", **config})
    table, results = [], []
    with progress("training", len(grid) * trials) as tick:
        for h, s, z, n in grid:
            rate = math.sqrt(h) if s == "sqrt" else _numbers("step", s)[0]
            for trial in range(trials):
                shape = {"tokens": tokens, "width": width, "zeta": z, **law}
                known = data in ("mixture", "planted")
                test = _drawn(data, test_count, 100_000 + seed + trial, shape) if known else None
                done = training.train(
                    _drawn(data, int(n), seed + trial, shape), int(h), test=test, begin=start, step=rate,
                    steps=steps, rule=rule, theory=theory and trial == 0, seed=seed + trial)
                results.append({"heads": int(h), "step": rate, "zeta": z, "count": int(n), "trial": trial,
                                **done.asdict()})
                tick()
            last = results[-trials:]
            table.append((f"H={h:g}, η={rate:g}, ζ={z:g}, n={int(n)}", last))
    run.begin()
    write_json(out / "results.json", {"kind": "headway-train-1", "results": results, "versions": store.versions()})
    figures = _training_figures(out, table)
    shown = Table(box=None, pad_edge=False)
    for name in ("setting", "loss", "test error", "bound a priori", "bound a posteriori", "γ"):
        shown.add_column(name, justify="left" if name == "setting" else "right")
    for label, last in table:
        first = last[0]
        shown.add_row(label, f"{_mean(r['columns']['loss'][-1] for r in last):.2e}",
                      _shown_error(last),
                      _bound(first), _certified(first),
                      "–" if first["start"] is None else f"{max(first['start']['margin_primal'], 0):.3g}")
    err.print(shown)
    err.print(results[0]["sentence"], markup=False)
    err.print(f"Run folder: {out} (results.json, {', '.join(figures)})", markup=False)
    if as_json:
        say({"run": str(out), "settings": [
            {"setting": label, "loss": _mean(r["columns"]["loss"][-1] for r in last)} for label, last in table]})


def _drawn(data: str, n: int, seed: int, shape: dict[str, Any]) -> Labelled:
    from headway import training
    from headway.core import checks
    from headway.core.files import read_tensors

    if data == "mixture":
        return training.mixture(n, seed=seed, **shape)
    if data == "planted":
        return training.planted(n, seed=seed, tokens=shape["tokens"], width=shape["width"])
    tensors, _ = read_tensors(Path(data))
    if not {"X", "y"} <= set(tensors):
        checks.refuse(data, "tensors X (n, T, d) and y (n,)", sorted(tensors), "save both in one safetensors file")
    return training.labelled(tensors["X"], tensors["y"])


def _shown_error(last: list[dict[str, Any]]) -> str:
    if not last[0]["test"]["test_error"]:
        return "–"
    return f"{_mean(r['test']['test_error'][-1] for r in last):.3f}"


def _bound(entry: Mapping[str, Any]) -> str:
    for one in entry["bounds"]:
        if one["form"] == "safe" and one["ground"] == "a priori":
            if one["failing"]:
                return "does not apply"
            return f"{one['training']:.2e}" + (" (vacuous)" if one["training_vacuous"] else "")
    return "–"


def _certified(entry: Mapping[str, Any]) -> str:
    found = entry["certificate"]
    if found is None or not found["descent_held"]:
        return "–"
    return f"{found['bound']:.2e}" + (" (vacuous)" if found["vacuous"] else "")


def _training_figures(folder: Path, table: list[tuple[str, list[dict[str, Any]]]]) -> list[str]:
    """One PNG for each quantity, a line for each setting (its first trial)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from headway.report.figures import plot_training
    from headway.runs.traces import PANELS, SAMPLED

    runs = [(label, last[0]) for label, last in table]
    names = []
    for what in (*PANELS, *SAMPLED):
        if what in SAMPLED and not all(_finite(run["test"][what]) for _, run in runs):
            continue
        fig, ax = plt.subplots(figsize=(5.0, 3.4), layout="constrained")
        plot_training(runs, what, ax)
        fig.savefig(folder / f"{what}.png", dpi=160)
        plt.close(fig)
        names.append(f"{what}.png")
    return names


def _finite(values: list[float]) -> bool:
    return bool(values) and all(math.isfinite(v) for v in values)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _numbers(name: str, text: str) -> list[float]:
    from headway.core import checks

    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        checks.refuse(f"--{name}", "numbers separated by commas", repr(text), f"--{name} 1,4,16")
    for value in found:
        checks.number(f"--{name}", value, strictly=True)
        if name in ("heads", "count") and value != int(value):
            checks.refuse(f"--{name}", "whole numbers", repr(text), f"--{name} 1,4,16")
    return found
