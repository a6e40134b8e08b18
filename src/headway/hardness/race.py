"""Any learner on any instance, each in a process of its own: success, errors, examples, seconds, peak memory.

A race is a folder: one JSON for every (instance, learner, seed), written when it is done, so that a race that was
stopped goes on where it was; results.json and table.md are made from them. Every learner gets the same examples and
the same time. The baselines are told the number of heads; ``moments`` is not.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway import checks
from headway.files import write_bytes, write_json
from headway.hardness.zoo import VERSION, Instance, instances
from headway.learn.route import learn
from headway.match import match
from headway.store import versions

LEARNERS = {  # name: method of learn(), whether it is told the head count
    "moments": ("moments", False), "starts": ("starts", True), "sculpt": ("sculpt", True),
    "adam": ("descent", True), "lbfgs": ("lbfgs", True)}
FRESH = 500  # sequences the function is judged on
SLACK = 30.0  # seconds beyond the budget after which a process is stopped


@dataclass(frozen=True)
class Task:
    suite: str
    instance: str
    learner: str
    seed: int
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.suite}.{self.instance}.{self.learner}.{self.seed}"


def feasible(instance: Instance, learner: str) -> bool:
    """The first paper's algorithm is for short sequences of ±1 tokens without noise, and many of them."""
    return learner != "sculpt" or (instance.length <= 2 and instance.law == "boolean" and instance.noise == 0)


def tasks(
    suite: str, learners: Sequence[str], seeds: Iterable[int], seconds: float, quick: bool = False
) -> list[Task]:
    for learner in learners:
        checks.choice("learner", learner, tuple(LEARNERS))
    return [Task(suite, one.name, learner, seed, seconds)
            for seed in seeds for one in instances(suite, quick) for learner in learners if feasible(one, learner)]


def run(task: Task) -> dict[str, Any]:
    """One learner on one instance, in this process."""
    instance = next(one for one in instances(task.suite) + instances(task.suite, True) if one.name == task.instance)
    truth = instance.build(task.seed)
    data = instance.examples(truth, 2 * task.seed + 1)
    method, told = LEARNERS[task.learner]
    begun = time.perf_counter()
    fit = learn(data, truth.heads if told else "auto", method, seconds=task.seconds, seed=task.seed)
    spent = time.perf_counter() - begun
    fresh = instance.examples(truth, 2 * task.seed + 2, FRESH)
    Y = truth(fresh.X)  # without noise
    wrong = float((fit.layer(fresh.X) - Y).norm() / (Y - Y.mean((0, 1))).norm())
    found = match(fit.layer, truth)
    # What a missing or spare head costs is in the count; the heads that are there are judged as heads.
    pairs = [max(a, b) for a, b in zip(found.theta_error, found.w_error, strict=True)]
    worst = max(pairs, default=math.inf)
    right = worst <= instance.tolerance and not found.excess if instance.judged == "heads" else (
        wrong <= instance.tolerance)
    return {
        "suite": task.suite, "instance": task.instance, "learner": task.learner, "seed": task.seed,
        "budget": task.seconds, "zoo": VERSION, "where": dict(instance.where),
        "identifiable": instance.identifiable, "judged": instance.judged, "success": bool(right),
        "status": fit.status.kind, "heads": truth.heads,
        "heads_found": fit.layer.heads, "heads_right": sum(e <= instance.tolerance for e in pairs),
        "worst_head_error": worst if math.isfinite(worst) else None, "function_error": wrong,
        "examples": len(data), "examples_used": fit.stats["used"], "seconds": spent,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def race(
    folder: Path, todo: Sequence[Task], workers: int = 2, report: Callable[[Mapping[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """Run what is not done yet, ``workers`` at a time with one thread each; every result of the folder."""
    runs = folder / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    missing = [task for task in todo if not (runs / f"{task.name}.json").exists()]

    def one(task: Task) -> dict[str, Any]:
        result = _apart(task)
        write_json(runs / f"{task.name}.json", result)
        return result

    with ThreadPoolExecutor(checks.whole("workers", workers)) as pool:
        waiting = [pool.submit(one, task) for task in missing]
        try:
            for future in as_completed(waiting):
                if report is not None:
                    report(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results(folder)


def _apart(task: Task) -> dict[str, Any]:
    """``run`` in a process of its own: its memory is its own, and it can be stopped."""
    plain = {"suite": task.suite, "instance": task.instance, "learner": task.learner, "seed": task.seed,
             "budget": task.seconds, "zoo": VERSION, "success": False}
    command = [sys.executable, "-m", "headway.hardness.race", json.dumps(vars(task))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * task.seconds + SLACK,
                              check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    except subprocess.TimeoutExpired:
        return {**plain, "status": "stopped", "seconds": 2 * task.seconds + SLACK}
    if done.returncode:
        return {**plain, "status": "failed", "reason": (done.stderr.strip().splitlines() or ["no word"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def results(folder: Path) -> list[dict[str, Any]]:
    """What a race has so far, in order."""
    files = sorted((folder / "runs").glob("*.json"))
    if not files:
        checks.refuse("folder", "a race with results", f"{folder}, which has none", "headway bench FOLDER")
    return [json.loads(path.read_text()) for path in files]


def rates(rows: Sequence[Mapping[str, Any]], by: str) -> Iterator[tuple[str, str, list[Mapping[str, Any]]]]:
    """(value of ``by``, learner, rows), in order of appearance."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((str(row[by]), str(row["learner"])), []).append(row)
    for (value, learner), found in groups.items():
        yield value, learner, found


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Success of every learner over the identifiable instances of the zoo that it could be run on."""
    found: dict[str, Any] = {}
    named = [row for row in rows if row["suite"] == "zoo" and row.get("identifiable", True)]
    for learner in dict.fromkeys(row["learner"] for row in rows):
        mine = [row for row in named if row["learner"] == learner]
        if mine:
            found[learner] = {"runs": len(mine), "successes": sum(row["success"] for row in mine),
                              "seconds": sum(row.get("seconds", 0.0) for row in mine)}
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: instances down, learners across; successes of runs, worst head error and median seconds."""
    parts = []
    for suite in dict.fromkeys(row["suite"] for row in rows):
        mine = [row for row in rows if row["suite"] == suite]
        learners = [name for name in LEARNERS if any(row["learner"] == name for row in mine)]
        order = [one.name for one in instances(suite)]
        names = sorted({row["instance"] for row in mine}, key=lambda n: (order.index(n) if n in order else 999, n))
        lines = [f"## {suite}", "", "| instance | " + " | ".join(learners) + " |",
                 "|---" * (len(learners) + 1) + "|"]
        for name in names:
            cells = [_cell([r for r in mine if r["instance"] == name and r["learner"] == who]) for who in learners]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


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
        head.append(f"- {learner}: {numbers['successes']} of {numbers['runs']} runs on identifiable instances, "
                    f"{numbers['seconds']:.0f} s in all")
    write_bytes(folder / "table.md", ("\n".join(head) + "\n\n" + table(rows)).encode())
    return found


def main() -> None:
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(run(Task(**json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
