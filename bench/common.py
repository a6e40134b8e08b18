"""Shared by the benchmarks: run, record, write bench/results/NAME.json and NAME.md.

A number is worth what is known of how it came about: every record says the command, the commit of the code that
ran, the day, the machine and the versions.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from headway.core.files import write_bytes
from headway.runs.store import versions

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
MEASURED = ("src", "bench", "constraints.txt", ":!bench/results")  # what a number depends on: not docs, not results


def commit(root: Path = ROOT) -> str:
    """The commit of the code, with ``+changes`` where code that can move a number differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--", *MEASURED).strip()
        return git("rev-parse", "--short=12", "HEAD").strip() + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # not a git checkout


# Of the code as it was loaded: a commit made while a long benchmark runs is not what ran. Where code was carried
# without its history, the commit is given.
COMMIT = os.environ.get("HEADWAY_COMMIT") or commit()


def machine(device: str = "cpu") -> str:
    """What did the arithmetic, in words."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} CPU threads, {_processor()}"


def _processor() -> str:
    """The processor's own name where the system tells it, else its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({platform.machine()})" if names else platform.processor() or platform.machine()


def origin(command: str, device: str = "cpu") -> dict[str, Any]:
    """Where a number comes from."""
    return {"command": command, "commit": COMMIT, "date": datetime.now(UTC).date().isoformat(),
            "machine": machine(device), "versions": versions()}


def record(
    name: str, command: str, summary: dict[str, Any], rows: Sequence[dict[str, Any]], *, device: str = "cpu"
) -> None:
    """One JSON with everything, one Markdown table to read; both say where they come from."""
    RESULTS.mkdir(exist_ok=True)
    kept = {**origin(command, device), "summary": summary, "rows": list(rows)}
    write_bytes(RESULTS / f"{name}.json", as_json(kept).encode())
    write_bytes(RESULTS / f"{name}.md", page(name, kept).encode())
    print(f"{name}: " + ", ".join(f"{k} {show(v)}" for k, v in summary.items()), flush=True)


def measured(
    name: str, by: Sequence[str], command: str, device: str = "cpu"
) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows of a record that was begun by this very code, command and machine, by what their cases are named by: a
    run that was cut short goes on after them."""
    try:
        kept = json.loads((RESULTS / f"{name}.json").read_text())
    except (OSError, ValueError):
        return {}
    here = origin(command, device)
    same = all(kept.get(part) == here[part] for part in ("command", "commit", "machine"))
    if COMMIT.endswith("+changes") or not same:
        return {}
    return {tuple(row[key] for key in by): row for row in kept["rows"]}


def as_json(kept: dict[str, Any]) -> str:
    """Keys in the order they were given: the table is made from the JSON, and its columns are the rows' keys."""
    return json.dumps(kept, indent=2, ensure_ascii=False) + "\n"


def page(name: str, kept: dict[str, Any]) -> str:
    """A record as Markdown."""
    lines = [f"# {name}", "", f"Made by `{kept['command']}` on {kept['machine']}, {measured_at(kept)}.", ""]
    lines += [f"- {key}: {show(value)}" for key, value in kept["summary"].items()] + [""]
    rows = kept["rows"]
    if rows:
        columns = list(rows[0])
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(show(row.get(c)) for c in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def measured_at(kept: dict[str, Any]) -> str:
    """The commit in words. Records from before commits were kept know only the commit that stored them."""
    if "commit" in kept:
        return f"commit {kept['commit']}, {kept['date']}"
    return f"at or before commit {kept['stored_in']}"


def show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    return call(), time.perf_counter() - begun
