"""``headway show``, ``report`` and ``plot``: what a run folder holds, as text, as one page, as figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from headway.cli.console import Json, err, progress, say

if TYPE_CHECKING:
    from headway.core.factored import FactoredLayer
    from headway.core.layer import AttentionLayer
    from headway.core.match import Match
    from headway.core.results import Fit


def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    truth: Annotated[Path | None, typer.Option(help="A stored layer to compare with.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a finished run learned and how it got there."""
    from headway.core.layer import load_layer
    from headway.runs import store

    run = store.Run.open(folder)
    fit = run.fit()
    tell(fit, folder, load_layer(truth) if truth else run.truth(), as_json, stages=True)


def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder, of learn, demo or train.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: RUN/report.html.")] = None,
    truth: Annotated[Path | None, typer.Option(help="A stored layer to set beside the learned one.")] = None,
    tokens: Annotated[Path | None, typer.Option(
        help='Strings of the tokens: {"tokens": [["the", "cat"], …]}; default: RUN/tokens.json.')] = None,
    sequences: Annotated[str | None, typer.Option(
        metavar="N,N,…", help="Sequences to show, from 1; default: those that tell most.")] = None,
    unembedding: Annotated[Path | None, typer.Option(
        help="A matrix (vocabulary, e), .safetensors: what heads raise where they look.")] = None,
    vocabulary: Annotated[Path | None, typer.Option(help="Its words, a JSON list.")] = None,
    as_json: Json = False,
) -> None:
    """Write one page that explains a run: its heads, how sure they are, how they were found. Opens offline."""
    from headway.core import checks
    from headway.report import write_report

    numbers = None
    if sequences is not None:
        if not all(one.strip().isdigit() for one in sequences.split(",")):
            checks.refuse("--sequences", "numbers with commas between", repr(sequences), "--sequences 1,5")
        numbers = [int(one) for one in sequences.split(",")]
    with err.status("drawing"):
        path = write_report(folder, out, truth, tokens=tokens, sequences=numbers, unembedding=unembedding,
                            vocabulary=vocabulary)
    err.print(f"Wrote {path} ({path.stat().st_size / 1e6:.1f} MB).", soft_wrap=True, markup=False)
    if as_json:
        say({"report": str(path), "bytes": path.stat().st_size})


def plot_run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the figures; default: RUN/figures.")] = None,
    kind: Annotated[str, typer.Option("--format", help="pdf, png or svg.")] = "pdf",
) -> None:
    """Write a run's figures for papers: its heads, the gap that counts them, the residual, the starts."""
    from headway.core import checks
    from headway.report import figures as plot
    from headway.runs import store, traces

    checks.choice("--format", kind, ("pdf", "png", "svg"))
    fit = store.Run.open(folder).fit()
    target = out or folder / "figures"
    target.mkdir(parents=True, exist_ok=True)
    figures: list[tuple[str, Callable[[], Any]]] = []
    if traces.residuals(fit.trace):
        figures.append(("residual", lambda: plot.plot_residual(fit)))
    if traces.spectrum(fit.trace) is not None:
        figures.append(("spectrum", lambda: plot.plot_spectrum(fit)))
    if traces.starts(fit.trace):
        figures.append(("starts", lambda: plot.plot_starts(fit)))
    for j in range(fit.layer.heads):
        for what in plot.matrices(fit):
            figures.append((f"head-{j + 1}-{what}", partial(plot.plot_heads, fit, j, what)))
    with progress("drawing", len(figures)) as step:
        for name, make_figure in figures:
            plot.save(make_figure(), target / f"{name}.{kind}")
            step()
    err.print(f"Wrote {len(figures)} figures to {target}.", markup=False)


def tell(
    fit: Fit, folder: Path, truth: AttentionLayer | FactoredLayer | None, as_json: bool, stages: bool = False,
) -> None:
    """The story of a run; exits 1 when the status is not ok."""
    found = told(fit, folder, truth, stages)
    if as_json:
        say(found)
    if not fit.status.ok:
        raise typer.Exit(1)


def told(
    fit: Fit, folder: Path, truth: AttentionLayer | FactoredLayer | None, stages: bool = False,
    page: Path | None = None,
) -> dict[str, Any]:
    """The story of a run for people, and what a program is told of it."""
    import headway as hw

    linear = any(isinstance(one, hw.AttentionLayer) and one.linear for one in (fit.layer, truth))
    match = hw.match(fit.layer, truth) if truth is not None and not linear else None
    err.print(fit.status.sentence, style="bold", markup=False)
    _heads(fit.layer, None if linear else truth, match)
    beside = hw.compare(fit.layer, truth) if truth is not None and linear else None
    if beside is not None:
        err.print(f"Beside the true layer: {beside}", markup=False)
    if match is not None and match.missing:
        err.print(f"Missing: true head {', '.join(str(i + 1) for i in match.missing)}.")
    for group in fit.stats.get("key_groups", ()):
        err.print(f"Heads {', '.join(str(i + 1) for i in group)} share their keys (grouped queries).")
    if stages:
        _stages(fit.trace)
    stats = fit.stats
    on = f" on {stats['ranks']} processes" if "ranks" in stats else ""
    err.print(f"{stats['examples']} sequences ({stats['held_out']} held out, {stats['used']} used by the last "
              f"solve; counting floor {stats['floor']}), {stats['products']} products, {stats['seconds']:.1f} s"
              f"{on}. Run folder: {folder}", markup=False)
    if page is not None:
        err.print(f"Look at it: {page}", soft_wrap=True, markup=False)
    found = None if match is None else {
        "order": match.order, "theta_error": match.theta_error, "w_error": match.w_error,
        "missing": match.missing, "excess": match.excess}
    return {"run": str(folder), "status": fit.status.kind, "sentence": fit.status.sentence,
            "numbers": dict(fit.status.numbers), "stats": dict(fit.stats), "ranks": fit.stats.get("ranks", 1),
            "match": found, **({} if beside is None else {"same": beside.same, "operators": beside.largest}),
            **({} if page is None else {"report": str(page)})}


def _heads(layer: Any, truth: Any, match: Match | None) -> None:
    """A row for each head: how large what it shows is, its rank, numbers of its own, the true one it stands for."""
    import torch

    from headway.core.convert import rank_shown
    from headway.core.factored import FactoredLayer
    from headway.report.heads import portraits

    shown = portraits(layer, any(isinstance(one, FactoredLayer) for one in (layer, truth)))
    first, last = shown.names
    grouped = isinstance(layer, FactoredLayer) and layer.groups < layer.heads
    table = Table(box=None, pad_edge=False)
    for name in ("head", *(["keys of group"] if grouped else []), f"‖{first}‖", "rank", *shown.numbers, f"‖{last}‖",
                 *(["true head", f"{first} error", f"{last} error"] if match else [])):
        table.add_column(name, justify="right")
    for j in range(layer.heads):
        scores, values = (shown.matrices[name][j] for name in shown.names)
        cells = [str(j + 1), *([str(1 + j * layer.groups // layer.heads)] if grouped else []),
                 f"{float(scores.norm()):.3f}", str(rank_shown(torch.linalg.svdvals(scores).tolist())),
                 *(f"{float(numbers[j]):.3f}" for numbers in shown.numbers.values()), f"{float(values.norm()):.3f}"]
        if match is not None:
            i = match.order.index(j) if j in match.order else None
            cells += ["none"] if i is None else [
                str(i + 1), f"{match.theta_error[i]:.1e}", f"{match.w_error[i]:.1e}"]
        table.add_row(*cells)
    err.print(table)


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
        held = event.get("error", event.get("unseen", math.nan))
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
