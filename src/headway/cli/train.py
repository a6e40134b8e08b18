"""``headway train``: sweeps of the second paper's experiments, written to a run folder with their figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from headway.cli.console import Board, Cluster, Json, board, err, executor, progress, resumed, say
from headway.core.names import RULES, STARTS

if TYPE_CHECKING:
    from headway.runs.tensorboard import TensorBoard
    from headway.training.grid import Trial

ALWAYS = ("heads", "step", "zeta", "count")  # named for every setting; the others where they differ
WHOLE = ("heads", "count", "width")
SWEPT = ("heads", "zeta", "count", "width", "strength", "noise")  # by several numbers, as the step
OPTIONS = ("data", "heads", "step", "zeta", "count", "test_count", "tokens", "width", "strength", "nuisance",
           "noise", "start", "rule", "steps", "trials", "theory", "seed")  # what makes a run what it is


def train(
    context: typer.Context,
    out: Annotated[Path | None, typer.Option(help="New run folder.")] = None,
    data: Annotated[str, typer.Option(help="mixture, planted, or a safetensors file with X and y.")] = "mixture",
    heads: Annotated[str, typer.Option(help="Head counts, as 1,4,16.")] = "1,4,16",
    step: Annotated[str, typer.Option(help="Step sizes, as 1,0.1; or sqrt for √H.")] = "1",
    zeta: Annotated[str, typer.Option(help="Parts of relevant tokens (mixture), as 0.1,0.3.")] = "0.1",
    count: Annotated[str, typer.Option(help="Training sequences, as 100,1000.")] = "100",
    test_count: Annotated[int, typer.Option(help="Test sequences.")] = 300,
    tokens: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 10,
    width: Annotated[str, typer.Option(help="Features of a token, as 10,20.")] = "10",
    strength: Annotated[str, typer.Option(help="Norms S of the means (mixture), as 1,2.")] = "2",
    nuisance: Annotated[int, typer.Option(help="Nuisance means M (mixture).")] = 4,
    noise: Annotated[str, typer.Option(help="Deviations of the noise (mixture), as 0,0.5.")] = "0.5",
    start: Annotated[str, typer.Option(help=" or ".join(STARTS) + ".")] = "zero",
    rule: Annotated[str, typer.Option(help=" or ".join(RULES) + ".")] = "constant",
    steps: Annotated[int, typer.Option(help="Iterations.")] = 400,
    trials: Annotated[int, typer.Option(help="Draws of the data for each setting.")] = 1,
    theory: Annotated[bool, typer.Option(help="Margins, bounds and curvature as well.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the first trial.")] = 0,
    workers: Annotated[int, typer.Option(help="Trials at a time, each in a process of one thread.")] = 1,
    cluster: Cluster = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run folder.")] = None,
    tensorboard: Board = None,
    as_json: Json = False,
) -> None:
    """Train by gradient descent with the theory beside it: one setting, or a sweep over heads, steps and more."""
    options = dict(locals())
    config = {name: options[name] for name in OPTIONS}

    from headway.core import checks
    from headway.runs import store
    from headway.training import grid

    if resume is not None:
        resumed(context, resume, "out", *OPTIONS)
        run = store.Run.open(resume)
        config = _stored(run.config, resume)
    elif out is not None:
        if data not in grid.LAWS:
            config |= {"data": str(Path(data).absolute()), "digest": grid.digest(Path(data))}
        run = store.Run.create(out, {"command": "train", **config})
    else:
        checks.refuse("headway train", "--out RUN, or --resume RUN", "neither", "headway train --out RUN")
    asked = _asked(config)
    checks.whole("--workers", workers)
    if not (run.path / "results.json").exists():
        with (progress("training", len(asked)) as tick, board(tensorboard) as shown_by,
              executor(context, cluster, workers) as others):

            def ended(row: Mapping[str, Any]) -> None:
                tick()
                if shown_by is not None and "columns" in row:
                    _put(shown_by, row)

            grid.finish(run, grid.sweep(asked, run, executor=others, report=ended))
    _tell(run.path, as_json)


def _tell(folder: Path, as_json: bool) -> None:
    """The table of a sweep that ended, and its figures."""
    from headway.runs.traces import labels, told
    from headway.training import grid

    found = grid.results(folder)
    groups = grid.settings(found["results"])
    firsts = [group[0] for group in groups]
    table = list(zip(labels(firsts, ALWAYS), groups, strict=True))
    figures = _training_figures(folder, table)
    shown = Table(box=None, pad_edge=False)
    for name in ("setting", "loss", "test error", "bound a priori", "bound a posteriori", "gap a priori", "γ"):
        shown.add_column(name, justify="left" if name == "setting" else "right")
    for label, last in table:
        first = last[0]
        shown.add_row(label, f"{_mean(r['columns']['loss'][-1] for r in last):.2e}",
                      _shown_error(last), _bound(first, "training", "failing"), _certified(first),
                      _bound(first, "generalization", "failing_generalization"),
                      "–" if first["start"] is None else f"{max(first['start']['margin_primal'], 0):.3g}")
    err.print(shown)
    err.print(told(firsts, ALWAYS), markup=False)
    lost = found.get("lost", [])
    if lost:
        err.print(f"Lost with their workers: {len(lost)} trials, the first with {lost[0]['heads']} heads "
                  f"({lost[0]['reason']}).", markup=False)
    err.print(f"Run folder: {folder} (results.json, {', '.join(figures)})", markup=False)
    if as_json:
        say({"run": str(folder), "settings": [_summary(*row) for row in table], "lost": len(lost)})


def _stored(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings a run began with."""
    from headway.core import checks

    if config.get("command") != "train" or not set(OPTIONS) <= set(config):
        checks.refuse("--resume", "a run made by headway train", f"{folder}, made by another command",
                      "that command again, with another --out")
    return {name: config[name] for name in (*OPTIONS, "digest") if name in config}


def _asked(config: Mapping[str, Any]) -> list[Trial]:
    """Every trial of every setting. The theory is that of a setting's first."""
    from headway.core import checks
    from headway.training.grid import Trial

    found = _grid({name: config[name] for name in SWEPT}, config["step"])
    _refuse_idle_sweeps(config["data"], found)
    alike = {name: config[name] for name in OPTIONS if name not in (*SWEPT, "step", "trials", "theory", "seed")}
    return [Trial(**setting, **alike, digest=config.get("digest"), theory=config["theory"] and trial == 0,
                  seed=config["seed"] + trial, trial=trial)
            for setting in found for trial in range(checks.whole("trials", config["trials"]))]


def _put(shown_by: TensorBoard, found: Mapping[str, Any]) -> None:
    """A trial as a run of TensorBoard's: a curve for each quantity, its last values in the table."""
    from headway.training.grid import SETTING

    setting = {name: found[name] for name in (*SETTING, "trial") if name in found}
    here = shown_by.within("-".join(f"{key}={value:g}" for key, value in setting.items()))
    for quantity, values in found["columns"].items():
        here.curve(quantity, values)
    error = found["test"]["test_error"]
    here.row(setting, {"loss": found["columns"]["loss"][-1], **({"test error": error[-1]} if error else {})})
    here.close()


def _grid(swept: dict[str, str], step: str) -> list[dict[str, Any]]:
    """Every combination of the numbers given; a step "sqrt" is √H."""
    names = list(swept)
    found = []
    for h, s, *rest in itertools.product(_numbers("heads", swept["heads"]), step.split(","),
                                         *(_numbers(name, swept[name]) for name in names[1:])):
        rate = math.sqrt(h) if s == "sqrt" else _numbers("step", s)[0]
        found.append({"heads": h, "step": rate, **dict(zip(names[1:], rest, strict=True))})
    return found


def _refuse_idle_sweeps(data: str, grid: list[dict[str, Any]]) -> None:
    """A number that the data do not use is not swept: its settings would differ in name alone."""
    from headway.core import checks

    if data == "mixture":
        return
    for name in ("zeta", "strength", "noise", *(() if data == "planted" else ("count", "width"))):
        if len({setting[name] for setting in grid}) > 1:
            checks.refuse(f"--{name}", f"one value, which --data {data} does not use", "several", "--data mixture")


def _summary(label: str, group: list[dict[str, Any]]) -> dict[str, Any]:
    """One setting for machines: means over its trials, the theory of the first."""
    from headway.runs.traces import LETTERS

    first = group[0]
    errors = [run["test"]["test_error"][-1] for run in group if run["test"]["test_error"]]
    return {
        "setting": label, **{name: first.get(name) for name in LETTERS},
        "loss": _mean(run["columns"]["loss"][-1] for run in group), "test_error": _mean(errors) if errors else None,
        "margin": None if first["start"] is None else max(first["start"]["margin_primal"], 0.0),
        "bounds": first["bounds"], "certificate": first["certificate"], "sentence": first["sentence"]}


def _shown_error(last: list[dict[str, Any]]) -> str:
    if not last[0]["test"]["test_error"]:
        return "–"
    return f"{_mean(r['test']['test_error'][-1] for r in last):.3f}"


def _bound(entry: Mapping[str, Any], name: str, failing: str) -> str:
    """A bound known beforehand, shown where none of its own hypotheses fails."""
    for one in entry["bounds"]:
        if one["form"] == "safe" and one["ground"] == "a priori":
            if one[failing]:
                return "does not apply"
            return f"{one[name]:.2e}" + (" (vacuous)" if one[f"{name}_vacuous"] else "")
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


def _numbers(name: str, text: str) -> list[Any]:
    from headway.core import checks

    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        checks.refuse(f"--{name}", "numbers separated by commas", repr(text), f"--{name} 1,4,16")
    for value in found:
        checks.number(f"--{name}", value, strictly=name != "noise")
        if name in WHOLE and value != int(value):
            checks.refuse(f"--{name}", "whole numbers", repr(text), f"--{name} 1,4,16")
    return [int(value) for value in found] if name in WHOLE else found
