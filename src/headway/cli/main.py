"""The command line: demo, make, learn, certify, compare, train, hard, bench, show, plot, report.

Human text on stderr, --json on stdout.

Exit 0: done. 1: the layer was not established (see the status). 2: bad usage or bad input.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import headway as hw
from headway.cli import hard as cli_hard
from headway.cli import train as cli_train
from headway.core import checks, examples
from headway.core.convert import rank_shown
from headway.core.files import read_tensors
from headway.core.layer import load_layer, save_layer
from headway.learning.route import METHODS
from headway.runs import store
from headway.sculpting.provable import SEARCHES

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Learn a multi-head attention layer from examples of what it does.")
OPTIONS = {"heads", "method", "search", "polish", "rank", "max_heads", "starts", "limit", "seconds", "seed",
           "device"}
STORED = 1_000_000_007  # apart from the seeds of inputs that are drawn with their layer
DRAWN = ("heads", "width", "scale", "rank", "key_bias", "offset", "causal", "dtype")  # what a random layer is given
err = Console(stderr=True, highlight=False)
app.command()(cli_train.train)
app.command()(cli_hard.hard)
app.command()(cli_hard.bench)


def main() -> None:
    """The ``headway`` command: complaints about input become one sentence and exit code 2."""
    try:
        app(standalone_mode=True)
    except checks.InputError as error:
        err.print(f"headway: {error}", style="red", markup=False)
        sys.exit(2)
    except OSError as error:
        err.print(f"headway: {error}. Try: another path, or free space on it.", style="red", markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("headway: interrupted; stages that finished are kept in the run folder")
        sys.exit(130)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Run folder; default: the next free runs/demo-N.")] = None,
    heads: Annotated[int, typer.Option(help="Heads of the hidden layer.")] = 4,
    width: Annotated[int, typer.Option(help="Width of the hidden layer.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the hidden layer.")] = 0,
    as_json: cli_train.Json = False,
) -> None:
    """Hide a random layer, learn it from 4,000 examples, compare with the truth, write a page to look at."""
    from headway.report import write_report

    folder = out or _free(Path("runs"), "demo")
    truth = hw.AttentionLayer.random(heads=heads, width=width, seed=seed)
    data = hw.draw(truth, count=4000, length=16, seed=seed + 1)
    err.print(f"A hidden layer: {heads} heads, width {width}, scores of deviation 2. Nobody tells the learner "
              f"how many heads.\nIt sees {len(data)} random ±1 sequences of 16 tokens and what the layer made of "
              "them.\n")
    run = store.Run.create(folder, {"command": "demo", "examples": "drawn", "digest": data.digest(),
                                    "hidden_heads": heads, "width": width, "seed": seed})
    run.begin()
    save_layer(folder / "truth.safetensors", truth)
    with _watch() as progress:
        fit = hw.learn(data, seed=seed, run=run, progress=progress)
    fresh = hw.draw(truth, count=500, length=16, seed=seed + 2)
    with err.status("certifying, drawing"):
        found = hw.certify(fit.layer, fresh, seen=data)
        run.certified(found, {"examples": "drawn", "digest": fresh.digest()})
        page = write_report(folder)
    _tell(fit, folder, truth, as_json, page=page)


@app.command()
def make(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="New folder for the shards.")],
    layer: Annotated[Path | None, typer.Option(help="A stored layer to draw from; default: a random one.")] = None,
    heads: Annotated[int, typer.Option(help="Heads of the random layer.")] = 4,
    width: Annotated[int, typer.Option(help="Features of a token.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 16,
    count: Annotated[int, typer.Option(help="Sequences.")] = 4000,
    scale: Annotated[float, typer.Option(help="Standard deviation of the scores on ±1 tokens.")] = 2.0,
    rank: Annotated[int | None, typer.Option(help="Rank of the attention matrices; default: full.")] = None,
    key_bias: Annotated[bool, typer.Option("--key-bias", help="Give every head a key bias.")] = False,
    offset: Annotated[bool, typer.Option("--offset", help="Add a constant to the outputs.")] = False,
    causal: Annotated[bool, typer.Option("--causal", help="Queries see earlier tokens only.")] = False,
    law: Annotated[str, typer.Option(help="boolean, gaussian, or a safetensors file with one matrix.")] = "boolean",
    noise: Annotated[float, typer.Option(help="Label noise relative to the labels' root mean square.")] = 0.0,
    shards: Annotated[int, typer.Option(help="Files to write.")] = 1,
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    seed: Annotated[int, typer.Option(help="Seed of a random layer; the inputs take the next one.")] = 0,
    as_json: cli_train.Json = False,
) -> None:
    """Write examples of a random or a stored layer to shards; the layer itself goes to truth.safetensors."""
    checks.whole("count", count)
    checks.whole("shards", shards, 1, count)
    kind = getattr(torch, checks.choice("dtype", dtype, ("float64", "float32")))
    if layer is not None:
        sources = {name: context.get_parameter_source(name) for name in DRAWN}
        given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
        if given:
            checks.refuse(f"--{given[0].replace('_', '-')}", "nothing that describes a random layer, with --layer",
                          "one such option", "leave it out; the stored layer has its own")
        truth = load_layer(layer)
    else:
        truth = hw.AttentionLayer.random(
            heads=heads, width=width, scale=scale, rank=rank, key_bias=key_bias, offset=offset,
            mask="causal" if causal else "none", seed=seed, dtype=kind)
    sizes = examples.even(count, shards)
    # Fresh examples of a stored layer must not be those it came with, whatever the seeds.
    inputs = seed + 1 if layer is None else seed + STORED
    drawn = examples.draw_batches(truth, count, length, law=_law(law), noise=noise, seed=inputs)
    with cli_train.progress(err, "writing shards", shards) as step:
        written = examples.write(folder, _counted(examples.rebatch(drawn, sizes), step), shards, truth)
    err.print(f"Wrote {count} sequences to {folder} ({shards} shard{'s' * (shards > 1)}); "
              f"the layer is in {folder / 'truth.safetensors'}.", markup=False)
    if as_json:
        print(json.dumps({"folder": str(folder), "sequences": len(written), "shards": shards}))


@app.command()
def learn(
    folder: Annotated[Path | None, typer.Argument(metavar="EXAMPLES", help="Folder of shards.")] = None,
    out: Annotated[Path | None, typer.Option(help="New run folder.")] = None,
    heads: Annotated[str, typer.Option(help="Head count, or auto.")] = "auto",
    method: Annotated[str, typer.Option(help=" or ".join(METHODS) + ".")] = "moments",
    search: Annotated[str, typer.Option(help="With sculpt: " + " or ".join(SEARCHES) + ".")] = SEARCHES[0],
    polish: Annotated[bool, typer.Option(help="With sculpt: go on to the floor of the arithmetic.")] = True,
    truth: Annotated[Path | None, typer.Option(help="With sculpt: a stored layer to trace distances to.")] = None,
    rank: Annotated[str, typer.Option(help="Rank of the attention matrices: auto, none or a number.")] = "auto",
    max_heads: Annotated[int, typer.Option(help="Most heads to try with --heads auto.")] = 32,
    starts: Annotated[int, typer.Option(help="Random starts before giving up.")] = 6,
    limit: Annotated[int, typer.Option(help="Gauss–Newton iterations in one solve.")] = 100,
    seconds: Annotated[float | None, typer.Option(help="Stop after about this long with the best so far.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the learner's own randomness.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    resume: Annotated[Path | None, typer.Option(help="Go on with this run folder instead.")] = None,
    as_json: cli_train.Json = False,
) -> None:
    """Learn a layer from a folder of examples, or go on with an interrupted run."""
    if resume is not None:
        if folder is not None or out is not None:
            checks.refuse("--resume", "nothing but --resume RUN", "EXAMPLES or --out as well", "one or the other")
        run = store.Run.open(resume)
        if run.finished:
            _tell(run.fit(), run.path, run.truth(), as_json)
            return
        if set(run.config.get("options", {})) != OPTIONS:
            checks.refuse("--resume", "a run made by headway learn", f"{resume}, made by another command",
                          "that command again, with another --out")
        source = examples.Examples.open(run.config["examples"])
        if source.digest() != run.config["digest"]:
            checks.refuse("--resume", "the examples this run began with", "others in " + str(source.folder),
                          "headway learn afresh")
    else:
        if folder is None or out is None:
            checks.refuse("headway learn", "EXAMPLES and --out RUN, or --resume RUN", "neither",
                          "headway learn EXAMPLES --out RUN")
        source = examples.Examples.open(folder)
        options = {
            "heads": _number_or("heads", heads, "auto"), "method": checks.choice("method", method, METHODS),
            "search": checks.choice("search", search, SEARCHES), "polish": polish,
            "rank": None if rank == "none" else _number_or("rank", rank, "auto"), "max_heads": max_heads,
            "starts": starts, "limit": limit, "seconds": seconds, "seed": seed, "device": _device(device)}
        run = store.Run.create(out, {"command": "learn", "examples": str(folder.resolve()),
                                     "digest": source.digest(), "options": options})
    known = load_layer(truth) if truth is not None else None
    with _watch() as progress:
        fit = hw.learn(source, run=run, progress=progress, truth=known, **run.config["options"])
    _tell(fit, run.path, run.truth(), as_json)


@app.command()
def certify(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    source: Annotated[Path, typer.Option("--examples", help="Folder of examples the learner has not seen.")],
    confidence: Annotated[float, typer.Option(help="Of the statistical claims.")] = 0.99,
    tolerance: Annotated[float, typer.Option(help="Relative error that counts as none.")] = 1e-6,
    fraction: Annotated[float, typer.Option(help="Part of all inputs that may exceed it.")] = 0.01,
    teacher_bound: Annotated[float | None, typer.Option(help="Longest output row the teacher can have.")] = None,
    token_bound: Annotated[float | None, typer.Option(help="Longest token there can be.")] = None,
    require: Annotated[list[str] | None, typer.Option(help="A claim that must hold; may be repeated.")] = None,
    as_json: cli_train.Json = False,
) -> None:
    """Say what may be claimed about a learned layer from examples it was not learned from; writes certificate.json.

    Exit 1 unless every required claim holds (default: held-out quantile and identifiability).
    """
    run = store.Run.open(folder)
    layer = run.fit().layer
    data = examples.Examples.open(source)
    with err.status("certifying"):
        found = hw.certify(layer, data, confidence, tolerance=tolerance, fraction=fraction,
                           teacher_bound=teacher_bound, token_bound=token_bound, seen=run.seen())
    wanted = require or ["held-out quantile", "identifiability"]
    names = [claim.name for claim in found.claims]
    for name in wanted:
        checks.choice("--require", name, names)
    path = run.certified(found, {"examples": str(source.resolve()), "digest": data.digest()})
    table = Table(box=None, pad_edge=False)
    for column in ("claim", "holds", "what", "because"):
        table.add_column(column, overflow="fold")
    colour = {"yes": "green", "no": "red", "undecided": "yellow"}
    for claim in found.claims:
        table.add_row(claim.name, f"[{colour[claim.holds]}]{claim.holds}[/]", claim.statement, claim.reason)
    err.print(table)
    err.print(f"From {len(data)} sequences in {source}. Assumptions and numbers: {path}", markup=False)
    failed = [name for name in wanted if not found.established(name)]
    if as_json:
        print(json.dumps({"run": str(folder), "holds": {c.name: c.holds for c in found.claims},
                          "statements": {c.name: c.statement for c in found.claims},
                          "reasons": {c.name: c.reason for c in found.claims},
                          "numbers": {c.name: dict(c.numbers) for c in found.claims}, "failed": failed}))
    if failed:
        err.print(f"Not established: {', '.join(failed)}.")
        raise typer.Exit(1)


@app.command()
def compare(
    one: Annotated[Path, typer.Argument(help="A run folder or a stored layer.")],
    other: Annotated[Path, typer.Argument(help="Another one.")],
    tolerance: Annotated[float, typer.Option(help="Relative difference that counts as none.")] = 1e-9,
    as_json: cli_train.Json = False,
) -> None:
    """Are two layers the same function, up to the order of their heads? Exit 1 if not."""
    a, b = (store.Run.open(path).fit().layer if path.is_dir() else load_layer(path) for path in (one, other))
    found = hw.compare(a, b, tolerance)
    err.print(str(found))
    if as_json:
        print(json.dumps({"same": found.same, "largest": found.largest if math.isfinite(found.largest) else None,
                          "where": found.where, "order": found.match.order}))
    if not found.same:
        raise typer.Exit(1)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    truth: Annotated[Path | None, typer.Option(help="A stored layer to compare with.")] = None,
    as_json: cli_train.Json = False,
) -> None:
    """Show what a finished run learned and how it got there."""
    run = store.Run.open(folder)
    fit = run.fit()
    _tell(fit, folder, load_layer(truth) if truth else run.truth(), as_json, stages=True)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder, of learn, demo or train.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: RUN/report.html.")] = None,
    truth: Annotated[Path | None, typer.Option(help="A stored layer to set beside the learned one.")] = None,
    as_json: cli_train.Json = False,
) -> None:
    """Write one page that explains a run: its heads, how sure they are, how they were found. Opens offline."""
    from headway.report import write_report

    with err.status("drawing"):
        path = write_report(folder, out, truth)
    err.print(f"Wrote {path} ({path.stat().st_size / 1e6:.1f} MB).", soft_wrap=True, markup=False)
    if as_json:
        print(json.dumps({"report": str(path), "bytes": path.stat().st_size}))


@app.command("plot")
def plot_run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the figures; default: RUN/figures.")] = None,
    kind: Annotated[str, typer.Option("--format", help="pdf, png or svg.")] = "pdf",
) -> None:
    """Write a run's figures for papers: its heads, the gap that counts them, the residual, the starts."""
    from headway.report import figures as plot
    from headway.runs import traces

    checks.choice("--format", kind, ("pdf", "png", "svg"))
    fit = store.Run.open(folder).fit()
    target = out or folder / "figures"
    target.mkdir(parents=True, exist_ok=True)
    figures: list[tuple[str, Callable[[], Any]]] = [("residual", lambda: plot.plot_residual(fit))]
    if traces.spectrum(fit.trace) is not None:
        figures.append(("spectrum", lambda: plot.plot_spectrum(fit)))
    if traces.starts(fit.trace):
        figures.append(("starts", lambda: plot.plot_starts(fit)))
    for j in range(fit.layer.heads):
        for what in ("Theta", "W"):
            figures.append((f"head-{j + 1}-{what}", partial(plot.plot_heads, fit, j, what)))
    with cli_train.progress(err, "drawing", len(figures)) as step:
        for name, make_figure in figures:
            plot.save(make_figure(), target / f"{name}.{kind}")
            step()
    err.print(f"Wrote {len(figures)} figures to {target}.", markup=False)


def _tell(
    fit: hw.Fit, folder: Path, truth: hw.AttentionLayer | None, as_json: bool, stages: bool = False,
    page: Path | None = None,
) -> None:
    """The story of a run; exits 1 when the status is not ok."""
    match = hw.match(fit.layer, truth) if truth is not None else None
    err.print(fit.status.sentence, style="bold", markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("head", "‖Θ‖", "rank", "‖u‖", "‖W‖") + (("true head", "Θ error", "W error") if match else ()):
        table.add_column(name, justify="right")
    for j in range(fit.layer.heads):
        Theta, W, u = fit.layer.Theta[j], fit.layer.W[j], fit.layer.key_bias
        cells = [str(j + 1), f"{float(Theta.norm()):.3f}", str(rank_shown(torch.linalg.svdvals(Theta).tolist())),
                 "–" if u is None else f"{float(u[j].norm()):.3f}", f"{float(W.norm()):.3f}"]
        if match is not None:
            i = match.order.index(j) if j in match.order else None
            cells += ["none"] if i is None else [
                str(i + 1), f"{match.theta_error[i]:.1e}", f"{match.w_error[i]:.1e}"]
        table.add_row(*cells)
    err.print(table)
    if match is not None and match.missing:
        err.print(f"Missing: true head {', '.join(str(i + 1) for i in match.missing)}.")
    for group in fit.stats.get("key_groups", ()):
        err.print(f"Heads {', '.join(str(i + 1) for i in group)} share their keys (grouped queries).")
    if stages:
        _stages(fit.trace)
    stats = fit.stats
    err.print(f"{stats['examples']} sequences ({stats['held_out']} held out, {stats['used']} used by the last "
              f"solve; counting floor {stats['floor']}), {stats['products']} products, {stats['seconds']:.1f} s. "
              f"Run folder: {folder}", markup=False)
    if page is not None:
        err.print(f"Look at it: {page}", soft_wrap=True, markup=False)
    if as_json:
        found = None if match is None else {
            "order": match.order, "theta_error": match.theta_error, "w_error": match.w_error,
            "missing": match.missing, "excess": match.excess}
        print(json.dumps({
            "run": str(folder), "status": fit.status.kind, "sentence": fit.status.sentence,
            "numbers": dict(fit.status.numbers), "stats": dict(fit.stats), "match": found,
            **({} if page is None else {"report": str(page)})}))
    if not fit.status.ok:
        raise typer.Exit(1)


def _stages(trace: tuple[Mapping[str, Any], ...]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "seconds", "residual", "held out", "note"):
        table.add_column(name, justify="left" if name in ("stage", "note") else "right")
    for event in trace:
        note = str(event.get("reason", ""))
        if "gap" in event:
            note = f"gap {event['gap']:.2f} after {event['heads']}, {event['sequences']} sequences"
        elif "agreeing" in event:
            note = f"{event['agreeing']} of {len(event['starts'])} starts agree"
        left = event.get("residual", min(event.get("residuals", [math.nan])))
        held = event.get("held", event.get("unseen", math.nan))
        table.add_row(event["stage"], f"{event['seconds']:.2f}",
                      *("" if math.isnan(x) else f"{x:.1e}" for x in (left, held)), note)
        for phase in event.get("phases", ()):
            name = f"  {phase['phase']} {phase['round'] + 1}"
            table.add_row(name, f"{phase['seconds']:.2f}", "", "", _phase(phase))
    err.print(table)


def _phase(event: Mapping[str, Any]) -> str:
    """One phase of sculpting in a line: rows accepted, and the distances to a known layer where there is one."""
    words = [f"{event['accepted']:,} of {event['rows']:,} rows"] if "accepted" in event else []
    for name, shown in (("sum_error", "ΣW"), ("center_error", "Θ̄"), ("hull_angle", "hull angle")):
        if name in event:
            words.append(f"{shown} {event[name]:.1e}")
    return ", ".join(words)


@contextmanager
def _watch() -> Iterator[Any]:
    """A line with stage, residual and rate, and a bar over its decimal digits; nothing off a terminal."""
    if not err.is_terminal:
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description:<18}"), BarColumn(24),
               TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bars:
        task = bars.add_task("reading", total=15.0, note="")
        begun, steps = time.perf_counter(), 0

        def update(event: Mapping[str, Any]) -> None:
            nonlocal begun, steps
            left = event["residual"]
            if left is None:
                begun, steps = time.perf_counter(), 0
                bars.update(task, description=event["stage"], completed=0, note="")
                return
            steps += 1
            rate = steps / max(time.perf_counter() - begun, 1e-9)
            bars.update(task, completed=max(0.0, -math.log10(max(left, 1e-16))),
                        note=f"residual {left:.1e}, {rate:.1f} steps/s")

        yield update


def _counted(batches: Iterator[hw.Examples], step: Any) -> Iterator[hw.Examples]:
    for batch in batches:
        yield batch
        step()


def _free(parent: Path, stem: str) -> Path:
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"


def _number_or(name: str, text: str, word: str) -> int | str:
    if text == word:
        return word
    try:
        return int(text)
    except ValueError:
        checks.refuse(f"--{name}", f"a whole number or {word}", repr(text), f"--{name} {word}")


def _device(name: str) -> str:
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        checks.refuse("--device", "a device this machine has", f"{name!r} ({str(error).splitlines()[0]})",
                      "--device cpu")
    return name


def _law(text: str) -> Any:
    if text in ("boolean", "gaussian"):
        return text
    tensors, _ = read_tensors(Path(text))
    if len(tensors) != 1:
        checks.refuse("--law", "a safetensors file with one matrix, one row per word", sorted(tensors),
                      "--law boolean")
    return next(iter(tensors.values()))
