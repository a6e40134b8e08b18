"""The headway command: its commands, one file for each family, and its exit codes.

Human text on stderr, --json on stdout. Exit 0: done. 1: the claim was not established (the status says why).
2: bad usage or bad input, in one sentence. 3: a fault of Headway. 130: interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import typer

from headway.cli import capture, certify, compare, demo, hard, learn, make, show, train
from headway.cli.console import err
from headway.cli.ranks import leave, rank, refuse_doubled

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Learn a multi-head attention layer from examples of what it does.")
for command in (demo.demo, make.make, make.count, capture.capture, learn.learn, certify.certify, compare.compare,
                train.train, hard.hard, hard.bench, show.show, show.report):
    app.command()(command)
app.command("plot")(show.plot_run)
DONE, NOT_ESTABLISHED, REFUSED, FAULT, INTERRUPTED = 0, 1, 2, 3, 130
TRACEBACK = "HEADWAY_TRACEBACK"  # set to 1: a fault shows where it happened


def main() -> None:
    """The ``headway`` command: whatever goes wrong becomes one sentence on stderr and an exit code."""
    # Threads that wait for each other in a busy loop take the cores that the others need: beside other work
    # learning then takes many times as long. Read when torch is loaded, which no command has done yet.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        refuse_doubled(next((word for word in sys.argv[1:] if not word.startswith("-")), ""))
        code = app(standalone_mode=True)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as ended:
        code = ended.code
    except Exception as error:
        code = _told(error)
    if code == INTERRUPTED:
        err.print("headway: interrupted; stages that finished are kept in the run folder")
    leave(code)


def _told(error: Exception) -> int:
    """Say what happened in a sentence; the exit code it deserves."""
    from headway.core import checks

    if checks.out_of_memory(error):
        error = checks.too_large("this command", error)
    if isinstance(error, checks.InputError):
        if rank():  # what one rank of a group is refused all are, and the first says it
            return REFUSED
        err.print(f"headway: {error}", style="red", markup=False)
        return REFUSED
    if isinstance(error, OSError):
        err.print(f"headway: {error}. Try: another path, or free space on it.", style="red", markup=False)
        return REFUSED
    if type(error).__name__ == "RankLostError":
        err.print(f"headway: rank {rank()}: {error}. Try: what that rank said; torchrun --max-restarts 3 starts "
                  "all again, headway learn --resume RUN goes on.", style="red", markup=False)
        return FAULT
    last = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(f"{type(error).__name__}: {error}".split())
    shown = os.environ.get(TRACEBACK) not in (None, "", "0")
    err.print(f"headway: this is a fault of Headway, not of your input: {words} ({Path(last.filename).name}, line "
              f"{last.lineno}). " + ("" if shown else f"Try: {TRACEBACK}=1 before the command shows where; ")
              + "please report it.", style="red", markup=False)
    if shown:
        traceback.print_exception(error)
    return FAULT
