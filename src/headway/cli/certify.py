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
    anew: Annotated[bool, typer.Option("--anew", help="Count from the start: another law of inputs.")] = False,
    require: Annotated[list[str] | None, typer.Option(help="A claim that must hold; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Say what may be claimed about a learned layer from examples it was not learned from; writes certificate.json.

    Called again with more examples it adds them to those counted before, for the claims on held-out error: these
    hold at every number of examples, so one may look and go on. Sequences counted already are not counted again.

    Exit 1 unless every required claim holds (default: held-out quantile and identifiability).
    """
    import headway as hw
    from headway.core import checks
    from headway.runs import store

    run = store.Run.open(folder)
    fit = run.fit()
    data = hw.Examples.open(source)
    counted = None if anew else run.counted()
    before = None if counted is None else hw.Certificate((), confidence, {}, counted)
    with err.status("certifying"):
        found = hw.certify(fit, data, confidence, tolerance=tolerance, fraction=fraction,
                           teacher_bound=teacher_bound, token_bound=token_bound, seen=run.seen(), so_far=before)
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
    total, had = found.settings["counted"], 0 if counted is None else len(counted)
    more = f"; {total - had} of them are new, and errors are counted on {total} in all" if had else ""
    err.print(f"From {len(data)} sequences in {source}{more}. Assumptions and numbers: {path}", markup=False)
    failed = [name for name in wanted if not found.established(name)]
    if as_json:
        say({"run": str(folder), "holds": {c.name: c.holds for c in found.claims},
             "statements": {c.name: c.statement for c in found.claims},
             "reasons": {c.name: c.reason for c in found.claims},
             "numbers": {c.name: dict(c.numbers) for c in found.claims}, "counted": total, "new": total - had,
             "failed": failed})
    if failed:
        err.print(f"Not established: {', '.join(failed)}.")
        raise typer.Exit(1)
