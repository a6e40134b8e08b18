"""``headway certify``: what may be claimed of a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from headway.cli.console import Json, err, say


def certify(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    source: Annotated[Path, typer.Option("--examples", help="Folder of examples the learner has not seen.")],
    confidence: Annotated[float, typer.Option(help="Of the statistical claims.")] = 0.99,
    tolerance: Annotated[float, typer.Option(help="Relative error that counts as none.")] = 1e-6,
    fraction: Annotated[float, typer.Option(help="Part of all inputs that may exceed it.")] = 0.01,
    teacher_bound: Annotated[float | None, typer.Option(help="Longest output row the teacher can have.")] = None,
    token_bound: Annotated[float | None, typer.Option(help="Longest token there can be.")] = None,
    require: Annotated[list[str] | None, typer.Option(help="A claim that must hold; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Say what may be claimed about a learned layer from examples it was not learned from; writes certificate.json.

    Exit 1 unless every required claim holds (default: held-out quantile and identifiability).
    """
    import headway as hw
    from headway.core import checks
    from headway.runs import store

    run = store.Run.open(folder)
    layer = run.fit().layer
    data = hw.Examples.open(source)
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
        say({"run": str(folder), "holds": {c.name: c.holds for c in found.claims},
             "statements": {c.name: c.statement for c in found.claims},
             "reasons": {c.name: c.reason for c in found.claims},
             "numbers": {c.name: dict(c.numbers) for c in found.claims}, "failed": failed})
    if failed:
        err.print(f"Not established: {', '.join(failed)}.")
        raise typer.Exit(1)
