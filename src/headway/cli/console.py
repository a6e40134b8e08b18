"""What every command shares: people read stderr, programs stdout; bars on a terminal, a few lines elsewhere."""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from headway.core.plain import finite

err = Console(stderr=True, highlight=False)
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
LINES = 100  # most lines a log gets from one command
FIRST = 10.0  # seconds into a stage for a first line about it; each further one after twice the time


def say(value: Mapping[str, Any]) -> None:
    """One line of strict JSON on stdout: what is no number (NaN, infinity) is null."""
    sys.stdout.write(json.dumps(finite(value), allow_nan=False) + "\n")
    sys.stdout.flush()


def given(context: typer.Context, *names: str) -> list[str]:
    """Those of the options that were written on the command line, not left at their defaults."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar that one call advances; ten lines at most off a terminal."""
    if not err.is_terminal:
        yield _counted(what, total)
        return
    from rich.progress import Progress

    with Progress(console=err, transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda: bars.advance(task)


def _counted(what: str, total: int) -> Callable[[], None]:
    begun, done = time.perf_counter(), 0

    def step() -> None:
        nonlocal done
        done += 1
        if done * 10 // total > (done - 1) * 10 // total:
            err.print(f"{what}: {done} of {total}, {time.perf_counter() - begun:.1f} s", markup=False)

    return step


@contextmanager
def watch() -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Follows learn(): stage, residual and rate beside a bar of decimal digits; off a terminal, log lines."""
    if not err.is_terminal:
        log = Log()
        yield log
        log.ended()
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

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


class Log:
    """A line for a stage that ended, and for one that lasts after 10, 20, 40 … s: stage, residual, seconds."""

    def __init__(self, write: Callable[[str], None] | None = None, most: int = LINES) -> None:
        self.write = write or (lambda line: err.print(line, markup=False, soft_wrap=True))
        self.left = most
        self.stage: str | None = None
        self.residual: float | None = None
        self.begun = self.next = 0.0

    def __call__(self, event: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        if event["residual"] is None:
            self.ended()
            self.stage, self.residual, self.begun, self.next = event["stage"], None, now, FIRST
            return
        self.residual = event["residual"]
        if now - self.begun > self.next:
            self.next *= 2
            self._line(" so far")

    def ended(self) -> None:
        if self.stage is not None:
            self._line("")
        self.stage = None

    def _line(self, tail: str) -> None:
        if self.left == 0:
            return
        self.left -= 1
        left = "" if self.residual is None else f"residual {self.residual:.1e}, "
        self.write(f"{self.stage}: {left}{time.perf_counter() - self.begun:.1f} s{tail}"
                   + ("; further stages are not shown" if self.left == 0 else ""))


@contextmanager
def warned() -> Iterator[None]:
    """What Headway warns of is a sentence here, without the place in its code."""
    def show(message: Warning | str, *place: Any, **more: Any) -> None:
        err.print(f"headway: {message}", style="yellow", markup=False)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message="[a-z]+: ", category=UserWarning)
        warnings.showwarning = show
        yield


def number_or(name: str, text: str, word: str) -> int | str:
    from headway.core import checks

    if text == word:
        return word
    try:
        return int(text)
    except ValueError:
        checks.refuse(f"--{name}", f"a whole number or {word}", repr(text), f"--{name} {word}")
