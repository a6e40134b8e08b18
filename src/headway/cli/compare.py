"""``headway compare``: whether two layers are one function, by which mistake they are not, and who matches whom."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from headway.cli.console import Json, err, say

if TYPE_CHECKING:
    from headway.core.factored import FactoredLayer
    from headway.core.layer import AttentionLayer
    from headway.core.match import Match

WHAT = "A run folder, a stored layer, or checkpoint.safetensors:N for its layer N."


def compare(
    one: Annotated[str, typer.Argument(help=WHAT)],
    other: Annotated[str, typer.Argument(help="Another one.")],
    tolerance: Annotated[float, typer.Option(help="Relative difference that counts as none.")] = 1e-9,
    heads: Annotated[int | None, typer.Option(help="Of a checkpoint that does not say how many it has.")] = None,
    on: Annotated[Path | None, typer.Option(help="Folder of examples: only what they visit counts.")] = None,
    worst: Annotated[Path | None, typer.Option(
        help="Where they differ: write the input that shows it most (.safetensors).")] = None,
    page: Annotated[Path | None, typer.Option(
        help="Write one page that sets them side by side, head by head (.html). Opens offline.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw who matches whom (.pdf, .png or .svg).")] = None,
    as_json: Json = False,
) -> None:
    """Are two layers the same function, up to the order of their heads? Exit 1 if not, with the cause if it is a
    known mistake: rotary layout or base, scale, a bias lost, groups, mask, window, rounding and others."""
    import headway as hw
    from headway.core import checks
    from headway.core.files import write_tensors

    for name, path, ends in (("--worst", worst, (".safetensors",)), ("--page", page, (".html",)),
                             ("--figure", figure, (".pdf", ".png", ".svg"))):
        if path is not None and path.suffix not in ends:
            checks.refuse(name, f"a file that ends in {' or '.join(ends)}", path.name, f"{path.stem}{ends[0]}")
    a, b = (_layer(place, heads) for place in (one, other))
    examples = None if on is None else hw.Examples.open(on)
    with err.status("comparing"):
        found = hw.compare(a, b, tolerance, on=examples)
        pairs = _pairs(a, b, examples)
    err.print(str(found), markup=False)
    if pairs is not None:
        _show(pairs)
    if figure is not None and pairs is None:
        err.print("No figure: layers of two forms, or of linear scores, have no heads to set side by side.",
                  markup=False)
    elif figure is not None:
        from headway.report import figures

        figures.save(figures.plot_match(a, b, on=examples), figure)
        err.print(f"Wrote {figure}.", markup=False)
    if page is not None and any(isinstance(one, hw.AttentionLayer) and one.linear for one in (a, b)):
        err.print("No page: linear scores have no patterns and no heads to set side by side.", markup=False)
        page = None
    if page is not None:
        from headway.report import write_comparison

        config = {"command": "compare", "one": one, "other": other, "tolerance": tolerance, "heads": heads,
                  "on": None if on is None else str(on)}
        with err.status("drawing"):
            write_comparison(a, b, page, tolerance=tolerance, on=examples, found=found, config=config)
        err.print(f"Wrote {page}.", soft_wrap=True, markup=False)
    if worst is not None and found.example is None:
        err.print(f"Nothing written to {worst}: no input was found on which they differ.", markup=False)
    elif worst is not None and found.example is not None:
        parts = {"X": found.example, "Z": found.example_keys, "positions": found.example_positions}
        write_tensors(worst, {name: part for name, part in parts.items() if part is not None}, {})
        err.print(f"Wrote the input that shows it most to {worst}.", markup=False)
    if as_json:
        order = found.match if pairs is None else pairs  # heads by their place in the file
        say({"same": found.same, "largest": found.largest, "where": found.where,
             "order": order.order if order is not None else None, "kind": found.kind, "cause": found.cause,
             "why": found.why, "by": found.by, "difference": found.difference,
             **({} if page is None else {"page": str(page)}),
             "heads": None if pairs is None else [
                 {"head": i, "partner": j if j >= 0 else None, "scores": scores, "values": values}
                 for i, (j, scores, values) in enumerate(
                     zip(pairs.order, pairs.theta_error, pairs.w_error, strict=True))]})
    if not found.same:
        raise typer.Exit(1)


def _layer(place: str, heads: int | None) -> AttentionLayer | FactoredLayer:
    from headway.core.sides import layer_at
    from headway.runs import store

    return store.Run.open(Path(place)).fit().layer if Path(place).is_dir() else layer_at(place, heads)


def _pairs(a: AttentionLayer | FactoredLayer, b: AttentionLayer | FactoredLayer, on: object) -> Match | None:
    """Who matches whom, in the order of the files; None where forms are too different to ask."""
    import headway as hw

    try:
        return hw.match(a, b, on)  # type: ignore[arg-type]
    except hw.InputError:
        return None


def _show(pairs: Match) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("head of the second", "of the first", "QK moved by", "OV moved by"):
        table.add_column(name, justify="right")
    for i, j in enumerate(pairs.order):
        table.add_row(str(i + 1), *(("none", "", "") if j < 0 else (
            str(j + 1), f"{pairs.theta_error[i]:.1e}", f"{pairs.w_error[i]:.1e}")))
    err.print(table)
    if pairs.excess:
        err.print(f"Without partner in the second: {', '.join(str(j + 1) for j in pairs.excess)}.")
