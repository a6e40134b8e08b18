"""``python -m headway WORDS`` in this process, where importing torch again for every command is saved."""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock


def headway(*words, cwd="."):
    """What a process would have said and returned: ``returncode``, ``stdout``, ``stderr``."""
    said, told, code = io.StringIO(), io.StringIO(), 0
    argv = ["headway", *map(str, words)]
    with (mock.patch.object(sys, "argv", argv), contextlib.chdir(Path(cwd)), contextlib.redirect_stdout(said),
          contextlib.redirect_stderr(told)):
        try:
            runpy.run_module("headway", run_name="__main__")
        except SystemExit as left:
            code = left.code or 0
    return subprocess.CompletedProcess(argv, code, said.getvalue(), told.getvalue())
