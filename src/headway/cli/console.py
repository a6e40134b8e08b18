"""What every command shares: people read stderr, programs stdout; bars on a terminal, a few lines elsewhere."""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headway.core.plain import finite

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from headway.runs.tensorboard import TensorBoard

err = Console(stderr=True, highlight=False)
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Board = Annotated[Path | None, typer.Option(
    "--tensorboard", metavar="DIR", help="Write what happens for TensorBoard: tensorboard --logdir DIR.")]
Cluster = Annotated[str | None, typer.Option(
    "--cluster", metavar="ADDRESS", help="Have a Dask cluster do the work: where its scheduler listens.")]
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
def executor(context: typer.Context, address: str | None, workers: int = 1) -> Iterator[Executor | None]:
    """The workers of the cluster named, or that many processes; None for the one that is here."""
    from headway.core import checks

    if address is not None:
        from headway.runs.cluster import cluster

        if given(context, "workers"):
            checks.refuse("--workers", "nothing with --cluster, which has its own", "both", "one or the other")
        with cluster(address) as found:
            yield found
    elif workers > 1:
        from headway.runs.jobs import Processes

        with Processes(workers) as processes:
            yield processes
    else:
        yield None


def resumed(context: typer.Context, folder: Path, *settings: str) -> None:
    """Refuse what is given beside --resume, which takes all settings from the folder."""
    from headway.core import checks

    for name in given(context, *settings):
        flag = name if name == "folder" else f"--{name.replace('_', '-')}"
        checks.refuse(flag, f"nothing with --resume: {folder} says what it is", "both", "leave it out")


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
def watch(seconds: float | None = None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Follows learn(): stage, residual, rate and the time left beside a bar of decimal digits; off a terminal, log
    lines. seconds: after which learning stops."""
    if not err.is_terminal:
        log = Log()
        yield log
        log.ended()
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description:<16}"), BarColumn(8),
               TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bars:
        task = bars.add_task("reading", total=15.0, note="")
        first = begun = time.perf_counter()
        steps, most = 0, None

        def update(event: Mapping[str, Any]) -> None:
            nonlocal begun, steps, most
            left, now = event["residual"], time.perf_counter()
            if left is None:
                begun, steps, most = now, 0, event.get("most")
                bars.update(task, description=event["stage"], completed=0, note="")
                return
            steps += 1
            rate = steps / max(now - begun, 1e-9)
            ends = time_left(steps, most, rate, None if seconds is None else first + seconds - now)
            bars.update(task, completed=max(0.0, -math.log10(max(left, 1e-16))),
                        note=f"residual {left:.1e}, {rate:.1f} steps/s{ends}")

        yield update


@contextmanager
def board(folder: Path | None, also: Callable[[Mapping[str, Any]], None] | None = None) -> Iterator[Any]:
    """Progress for TensorBoard in a folder, beside a bar; the bar alone where no folder is named."""
    if folder is None:
        yield also
        return
    from headway.runs.tensorboard import TensorBoard

    found: TensorBoard = TensorBoard(folder, also)
    try:
        yield found
    finally:
        found.close()


def time_left(steps: int, most: int | None, rate: float, until: float | None) -> str:
    """Until learning stops, or until this stage has made all the steps it may, which it seldom does: the sooner."""
    known = [] if until is None else [max(until, 0.0)]
    known += [] if most is None or steps > most else [(most - steps) / rate]
    return f", within {min(known):.0f} s" if known else ""


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
