"""What came out of a race: its rows, results.json and table.md, which are made from the rows."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.core import checks, conditions
from headway.core.files import write_bytes, write_json
from headway.hardness.zoo import VERSION, instances
from headway.racing.apart import LEARNERS
from headway.runs.store import versions


def results(folder: Path) -> list[dict[str, Any]]:
    """What a race has so far, in order."""
    files = sorted((folder / "runs").glob("*.json"))
    if not files:
        checks.refuse("folder", "a race with results", f"{folder}, which has none", "headway bench FOLDER")
    return [json.loads(path.read_text()) for path in files]


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Success of every learner over the identifiable instances of the zoo that it could be run on."""
    found: dict[str, Any] = {}
    named = [row for row in rows if row["suite"] == "zoo" and row.get("identifiable", True)]
    for learner in dict.fromkeys(row["learner"] for row in rows):
        mine = [row for row in named if row["learner"] == learner]
        if mine:
            used = [row["examples_used"] / row["examples"] for row in mine if "examples_used" in row]
            found[learner] = {"runs": len(mine), "successes": sum(row["success"] for row in mine),
                              "seconds": sum(row.get("seconds", 0.0) for row in mine),
                              "peak_memory_mib": max(row.get("peak_memory_mib", 0.0) for row in mine),
                              "part_of_examples_used": sorted(used)[len(used) // 2] if used else None}
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: instances down, learners across; successes of runs, worst head error and median seconds."""
    parts = []
    for suite in dict.fromkeys(row["suite"] for row in rows):
        mine = [row for row in rows if row["suite"] == suite]
        learners = [name for name in LEARNERS if any(row["learner"] == name for row in mine)]
        order = [one.name for one in instances(suite)]
        names = sorted({row["instance"] for row in mine}, key=lambda n: (order.index(n) if n in order else 999, n))
        lines = [f"## {suite}", "", "| instance | " + " | ".join(learners) + " | conditions that fail |",
                 "|---" * (len(learners) + 2) + "|"]
        for name in names:
            here = [row for row in mine if row["instance"] == name]
            cells = [_cell([row for row in here if row["learner"] == who]) for who in learners]
            lines.append(f"| {name} | " + " | ".join([*cells, _failing(suite, name)]) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


@functools.cache
def _failing(suite: str, name: str) -> str:
    """Which of the theorem's conditions the instance breaks, in words without their numbers."""
    for one in instances(suite) + instances(suite, True):
        if one.name == name:
            layer = one.build(0)
            broken = conditions.broken(conditions.measure(layer.Theta, layer.W))
            return "; ".join(words.split(",")[0] for words in broken) or "none"
    return "–"


def _cell(rows: list[Mapping[str, Any]]) -> str:
    if not rows:
        return "–"
    wins = sum(row["success"] for row in rows)
    which = "function_error" if rows[0].get("judged") == "function" else "worst_head_error"
    errors = [row.get(which) for row in rows]
    worst = "lost" if any(e is None for e in errors) else f"{max(float(e) for e in errors if e is not None):.0e}"
    used = sorted(row.get("seconds", math.nan) for row in rows)[len(rows) // 2]
    return f"{wins}/{len(rows)}, {worst}, {used:.1f} s"


def conclude(folder: Path, command: str) -> dict[str, Any]:
    """results.json and table.md from the runs of the folder."""
    rows = results(folder)
    found = summary(rows)
    write_json(folder / "results.json", {
        "zoo": VERSION, "command": command, "versions": versions(), "cores": os.cpu_count(), "summary": found,
        "rows": rows})
    head = [f"# Headway's zoo, version {VERSION}", "", f"Made by `{command}`. A cell says successes of runs, the "
            "worst error of any head (of the function for parities and equal heads; lost: a head is missing), and "
            "the median time with one thread. Baselines are told the number of heads, `moments` is not.", ""]
    for learner, numbers in found.items():
        part = numbers["part_of_examples_used"]
        head.append(f"- {learner}: {numbers['successes']} of {numbers['runs']} runs on identifiable instances, "
                    f"{numbers['seconds']:.0f} s in all, at most {numbers['peak_memory_mib']:.0f} MiB"
                    + ("" if part is None else f", its last solve on {part:.0%} of the examples (median)"))
    write_bytes(folder / "table.md", ("\n".join(head) + "\n\n" + table(rows)).encode())
    return found
