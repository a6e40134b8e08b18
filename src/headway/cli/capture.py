"""``headway capture``: examples on disk of an attention module at work in a model of your own."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.console import Json, err, progress, say, warned


def capture(
    source: Annotated[str, typer.Argument(
        metavar="FILE.py:FUNCTION", help="A function without arguments that returns a model and its batches; or "
        "package.module:FUNCTION.")],
    path: Annotated[str, typer.Argument(metavar="PATH", help="Where the attention stands in the model.")],
    folder: Annotated[Path, typer.Argument(metavar="EXAMPLES", help="New folder for the shards.")],
    limit: Annotated[int, typer.Option(help="Sequences in all.")] = 4000,
    length: Annotated[int | None, typer.Option(help="Tokens of a sequence; default: of the first batch.")] = None,
    mask: Annotated[str | None, typer.Option(help="none or causal, where the module does not say it.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(
        help="A tensor among the module's arguments that its answer does not depend on; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Write examples of an attention module at work: its inputs and outputs while the model runs on its batches."""
    import headway as hw

    model, batches = _made(source)
    with warned(), progress("capturing", limit) as step:
        done = 0

        def follow(count: int) -> None:
            nonlocal done
            for _ in range(count - done):
                step()
            done = count

        found = hw.capture(model, path, batches, limit=limit, to=folder, length=length, mask=mask,
                           ignore=ignore or (), progress=follow)
    err.print(f"Wrote {len(found)} sequences of {found.length} tokens to {folder}.", markup=False)
    if as_json:
        say({"folder": str(folder), "sequences": len(found), "tokens": found.length, "mask": found.mask})


def _made(source: str) -> tuple[Any, Any]:
    """What the function returns: (model, batches)."""
    import importlib
    import runpy

    from headway.core import checks
    from headway.core.files import regular

    place, _, name = source.rpartition(":")
    if not place or not name.isidentifier():
        checks.refuse("FILE.py:FUNCTION", "a file and a function in it", repr(source), "mine.py:model_and_batches")
    if place.endswith(".py"):
        if not Path(place).exists():
            checks.refuse("FILE.py:FUNCTION", "a Python file", f"{place}, which is not there", "another path")
        regular(Path(place), "a Python file")
        found = _run(f"{place}, a file that runs", lambda: runpy.run_path(place)).get(name)
    else:
        module = _run(f"{place}, a module that can be imported", lambda: importlib.import_module(place))
        found = getattr(module, name, None)
    if not callable(found):
        checks.refuse("FILE.py:FUNCTION", f"a function {name} in {place}", "none", "its name")
    made = _run(f"{name}, a function that returns a model and its batches", found)
    if not isinstance(made, tuple) or len(made) != 2:
        got = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        checks.refuse("FILE.py:FUNCTION", "a function that returns a model and its batches", got,
                      "return model, batches")
    model, batches = made
    return model, _each(batches, name) if isinstance(batches, Iterator) else batches


def _each(batches: Iterator[Any], name: str) -> Iterator[Any]:
    """The batches, which the user's own code makes one after the other."""
    end = object()
    while (batch := _run(f"batches of {name} that can be had to the last", lambda: next(batches, end))) is not end:
        yield batch


def _run(what: str, theirs: Callable[[], Any]) -> Any:
    """What the user's own code returns; where it fails, that is said, and of whose making it is."""
    from headway.core import checks

    try:
        return theirs()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(f"{type(error).__name__}: {error}".split())
        place = "" if last.filename == __file__ else f" ({Path(last.filename).name}, line {last.lineno})"
        checks.refuse("FILE.py:FUNCTION", what, f"{said}{place}", "running it in Python by itself")
