"""``headway demo``: a hidden layer, learned before your eyes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.console import Json, err, watch
from headway.cli.show import tell


def demo(
    out: Annotated[Path | None, typer.Option(help="Run folder; default: the next free runs/demo-N.")] = None,
    heads: Annotated[int, typer.Option(help="Heads of the hidden layer.")] = 4,
    width: Annotated[int, typer.Option(help="Width of the hidden layer.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the hidden layer.")] = 0,
    as_json: Json = False,
) -> None:
    """Hide a random layer, learn it from 4,000 examples, compare with the truth, write a page to look at."""
    import headway as hw
    from headway.report import write_report
    from headway.runs import store

    folder = out or _free(Path("runs"), "demo")
    truth = hw.AttentionLayer.random(heads=heads, width=width, seed=seed)
    data = hw.draw(truth, count=4000, length=16, seed=seed + 1)
    err.print(f"A hidden layer: {heads} heads, width {width}, scores of deviation 2. Nobody tells the learner "
              f"how many heads.\nIt sees {len(data)} random ±1 sequences of 16 tokens and what the layer made of "
              "them.\n")
    run = store.Run.create(folder, {"command": "demo", "examples": "drawn", "digest": data.digest(),
                                    "hidden_heads": heads, "width": width, "seed": seed}, truth)
    with watch() as progress:
        fit = hw.learn(data, seed=seed, run=run, progress=progress)
    fresh = hw.draw(truth, count=500, length=16, seed=seed + 2)
    with err.status("certifying, drawing"):
        found = hw.certify(fit.layer, fresh, seen=data)
        run.certified(found, {"examples": "drawn", "digest": fresh.digest()})
        page = write_report(folder)
    tell(fit, folder, truth, as_json, page=page)


def _free(parent: Path, stem: str) -> Path:
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"
