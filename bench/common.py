"""Shared by the benchmarks: run, record, write bench/results/NAME.json and NAME.md."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from headway.core.files import write_bytes, write_json
from headway.runs.store import versions

RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} CPU threads, {platform.machine()}"


def record(name: str, command: str, summary: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """One JSON with everything, one Markdown table to read; both name the command that made them."""
    RESULTS.mkdir(exist_ok=True)
    write_json(RESULTS / f"{name}.json", {
        "command": command, "machine": machine(), "versions": versions(), "summary": summary, "rows": list(rows)})
    lines = [f"# {name}", "", f"Made by `{command}` on {machine()}.", ""]
    lines += [f"- {key}: {show(value)}" for key, value in summary.items()] + [""]
    if rows:
        columns = list(rows[0])
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(show(row.get(c)) for c in columns) + " |" for row in rows]
    write_bytes(RESULTS / f"{name}.md", ("\n".join(lines) + "\n").encode())
    print(f"{name}: " + ", ".join(f"{k} {show(v)}" for k, v in summary.items()), flush=True)


def show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    return call(), time.perf_counter() - begun
