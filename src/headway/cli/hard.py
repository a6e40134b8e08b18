"""``headway hard`` and ``headway bench``: hard instances on disk, and learners compared on the zoo."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from headway.cli.console import Board, Cluster, Json, board, err, executor, progress, resumed, say
from headway.core.names import FAMILIES, LEARNERS, SECRETS, SUITES

if TYPE_CHECKING:
    from headway.core.examples import Examples
    from headway.hardness.secrets import Secret
    from headway.racing.apart import Task

MOST = 100_000  # products of one degree looked at
LOOK = 4000  # sequences the statistics are shown on
QUICK = (("zoo", 8.0), ("parity", 8.0))
RACED = ("success", "heads_right", "worst_head_error", "function_error", "seconds", "peak_memory_mib")
FULL = (("zoo", 8.0), ("parity", 8.0), ("heads", 8.0), ("dials", 8.0), ("floor", 8.0))


def hard(
    name: Annotated[str, typer.Argument(help=" or ".join((*SECRETS, *FAMILIES)) + ".")],
    folder: Annotated[Path, typer.Argument(help="New folder for the shards.")],
    size: Annotated[int, typer.Option(help="parity: half the hidden bits; rounding: hidden numbers.")] = 2,
    modulus: Annotated[int, typer.Option(help="rounding: the modulus, a power of two.")] = 4,
    beta: Annotated[float, typer.Option(help="parity, rounding: how hard the steps are.")] = 20.0,
    dial: Annotated[float, typer.Option(help="Families: 0 is easy.")] = 1.0,
    heads: Annotated[int, typer.Option(help="Families: heads.")] = 3,
    width: Annotated[int, typer.Option(help="Features of a token (rounding: what its bits need).")] = 12,
    length: Annotated[int, typer.Option(help="Families: tokens of a sequence.")] = 8,
    count: Annotated[int, typer.Option(help="Sequences.")] = 10000,
    shards: Annotated[int, typer.Option(help="Files to write.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the instance; the inputs take the next one.")] = 0,
    as_json: Json = False,
) -> None:
    """Write a hard instance to shards, and show what statistics and the theorem's conditions see of it."""
    from headway import hardness
    from headway.core import checks, conditions
    from headway.core.shards import even, rebatch, write
    from headway.core.sources import draw_batches

    checks.choice("name", name, (*SECRETS, *FAMILIES))
    checks.whole("shards", shards, 1, checks.whole("count", count))
    secret: Secret | None = None
    if name == "parity":
        secret = hardness.parity(size, width, beta=beta, seed=seed)
    elif name == "rounding":
        secret = hardness.rounding(size, modulus, beta=beta, seed=seed)
    layer = secret.layer if secret else hardness.family(name, dial, heads=heads, width=width, seed=seed)
    sizes = even(count, shards)
    drawn = draw_batches(layer, count, 2 if secret else length, seed=seed + 1)
    written = write(folder, rebatch(drawn, sizes), shards, layer)
    what = {"parity": f"a parity of {2 * size} bits", "rounding": f"a rounded inner product mod {modulus}"}.get(
        name) or hardness.FAMILIES[name].what
    err.print(f"{name}: {what}. {layer.heads} heads, width {layer.width}, {count} sequences of "
              f"{written.length} tokens in {folder}; the layer is in {folder / 'truth.safetensors'}.", markup=False)
    seen = _statistics(secret, written) if secret else []
    measured = conditions.measure(layer.Theta, layer.W)
    failing = conditions.broken(measured)
    err.print("Conditions that fail: " + ("; ".join(failing) if failing else "none") + ".")
    if as_json:
        say({"folder": str(folder), "heads": layer.heads, "statistics": seen, "conditions": measured,
             "failing": failing})


def _statistics(secret: Secret, data: Examples) -> list[dict[str, Any]]:
    """Correlations of the label, freed of the known coordinates, with products of few of the others."""
    from headway import hardness

    part = data.take(range(min(LOOK, len(data))))
    y = secret.signed(part.X.double(), part.Y[:, 0, 0])
    told = y.abs() > 1e-3  # where the known coordinates do not hide it
    table = Table(box=None, pad_edge=False)
    for column in ("degree", "products", "largest correlation", "chance shows", ""):
        table.add_column(column, justify="right")
    rows = []
    entries = 2 * (part.width - len(secret.known))
    for degree in range(1, 5):
        if math.comb(entries, degree) > MOST:
            err.print(f"Degree {degree} has {math.comb(entries, degree):,} products: not looked at.")
            break
        seen = hardness.low_degree(part.X, y, degree, skip=secret.known)
        rows.append({**vars(seen), "anything": seen.anything})
        table.add_row(str(degree), str(seen.monomials), f"{seen.largest:.3f}", f"{seen.chance:.3f}",
                      "seen" if seen.anything else "nothing")
    err.print(f"What low degrees see in {len(part)} sequences ({int(told.sum())} of them with an output):")
    err.print(table)
    return rows


def bench(
    context: typer.Context,
    folder: Annotated[Path | None, typer.Argument(help="Folder of the race; an unfinished one goes on.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The zoo and parities once, under 10 minutes.")] = False,
    suite: Annotated[list[str] | None, typer.Option(help=" or ".join(SUITES) + "; may be repeated.")] = None,
    learner: Annotated[list[str] | None, typer.Option(help=" or ".join(LEARNERS) + "; repeated.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each pair.")] = 0,
    seconds: Annotated[float | None, typer.Option(help="Budget of one run; default: the suite's.")] = None,
    workers: Annotated[int, typer.Option(help="Runs at a time, one thread each.")] = 2,
    cluster: Cluster = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the race in this folder.")] = None,
    tensorboard: Board = None,
    as_json: Json = False,
) -> None:
    """Run learners on the zoo: success, head errors, examples, seconds, memory; JSON, a table and figures.

    Every learner gets the same examples and time. Baselines are told the head count, the default learner is not.
    Runs are kept as they end, and the table with them.
    """
    from headway.core import checks
    from headway.hardness.zoo import VERSION
    from headway.racing import apart, race, tables

    if resume is not None:
        resumed(context, resume, "folder", "quick", "suite", "learner", "seeds", "seconds")
        folder = resume
        todo, words = race.begun(folder)
    elif folder is not None:
        todo = _todo(quick, suite, learner, seeds, seconds)
        words = shlex.join(["headway", "bench", *sys.argv[2:]])
    else:
        checks.refuse("headway bench", "FOLDER, or --resume FOLDER", "neither", "headway bench RACE --quick")
    left = race.missing(folder, todo)
    err.print(f"Zoo version {VERSION}: {len(todo)} runs of {len({t.instance for t in todo})} instances"
              + (f", {len(todo) - len(left)} of them done." if len(left) < len(todo) else "."))
    with (progress("racing", len(left)) as step, board(tensorboard) as shown_by,
          executor(context, cluster if left else None) as others):

        def ended(row: Mapping[str, Any]) -> None:
            step()
            if shown_by is not None:
                shown_by.row({key: row[key] for key in ("suite", "instance", "learner", "seed", "budget")},
                             {key: row[key] for key in RACED if key in row}, apart.name_of(row))

        rows = race.race(folder, todo, workers, ended, executor=others, command=words)
    found = tables.summary(rows)
    figures = _figures(folder, rows)
    table = Table(box=None, pad_edge=False)
    for column in ("learner", "recovered", "of", "seconds"):
        table.add_column(column, justify="right")
    for name, numbers in found.items():
        table.add_row(name, str(numbers["successes"]), str(numbers["runs"]), f"{numbers['seconds']:.0f}")
    err.print("Identifiable instances of the zoo:")
    err.print(table)
    lost = [row for row in rows if row.get("status") == race.LOST]
    if lost:
        err.print(f"Lost with their workers: {len(lost)} runs, the first {apart.name_of(lost[0])} "
                  f"({lost[0]['reason']}). Try: headway bench --resume {folder}", markup=False)
    err.print(f"Everything: {folder / 'table.md'}, {folder / 'results.json'}"
              + (f", {len(figures)} figures" if figures else "; figures need pip install 'headway[plot]'"),
              markup=False)
    if as_json:
        say({"folder": str(folder), "summary": found, "lost": len(lost), "figures": figures})


def _todo(
    quick: bool, suite: list[str] | None, learner: list[str] | None, seeds: int, seconds: float | None
) -> list[Task]:
    """The runs that the options ask for."""
    from headway.core import checks
    from headway.racing.apart import tasks

    budgets = dict(QUICK if quick else FULL)
    found: list[Task] = []
    for name in suite or list(budgets):
        checks.choice("--suite", name, SUITES)
        budget = checks.number("--seconds", seconds, strictly=True) if seconds is not None else (
            budgets.get(name) or dict(FULL)[name])
        runs = checks.whole("--seeds", seeds) if seeds else 1 if quick or name in ("floor", "dials", "heads") else 3
        found += tasks(name, learner or list(LEARNERS), range(runs), budget, quick)
    return found


def _figures(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    from headway.report import figures as plot

    made = []

    def of(suite: str) -> list[Mapping[str, Any]]:
        return [row for row in rows if row["suite"] == suite and "seconds" in row]

    learners = [name for name in LEARNERS if any(row["learner"] == name for row in of("floor"))]
    if learners:
        figure, axes = plt.subplots(1, len(learners), figsize=(3.1 * len(learners), 3.0), layout="constrained",
                                    squeeze=False, sharey=True)
        for axis, name in zip(axes[0], learners, strict=True):
            plot.plot_phase(of("floor"), name, ax=axis)
        made.append(_save(figure, folder / "floor.png"))
    if of("dials"):
        figure, axes = plt.subplots(2, 4, figsize=(12.0, 5.4), layout="constrained")
        flat = list(axes.flat)
        turned = [name for name in FAMILIES if any(name in row["where"] for row in of("dials"))]
        for axis, name in zip(flat, turned, strict=False):
            plot.plot_dial(of("dials"), name, ax=axis)
        for axis in flat[len(turned):]:
            axis.remove()
        made.append(_save(figure, folder / "dials.png"))
    for suite, what in (("heads", "heads"), ("parity", "hidden bits")):
        if of(suite):
            figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.0), layout="constrained")
            plot.plot_dial(of(suite), what, ax=axes[0])
            plot.plot_cost(of(suite), what, ax=axes[1])
            made.append(_save(figure, folder / f"{suite}.png"))
    return made


def _save(figure: Any, path: Path) -> str:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path.name
