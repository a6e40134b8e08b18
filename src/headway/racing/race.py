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
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway.core import checks, conditions
from headway.core.files import write_bytes, write_json
from headway.core.match import match
from headway.hardness.zoo import VERSION, Instance, instances
from headway.learning.learn import learn
from headway.runs.store import versions

LEARNERS = {  # name: method of learn(), whether it is told the head count
    "moments": ("auto", False), "starts": ("starts", True), "sculpt": ("sculpt", True),
    "adam": ("adam", True), "lbfgs": ("lbfgs", True)}
FRESH = 500  # sequences the function is judged on
SLACK = 30.0  # seconds beyond twice the budget after which a process is stopped


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
    instance = _named(task)
    truth = instance.build(task.seed)
    data = instance.examples(truth, task.seed)
    method, told = LEARNERS[task.learner]
    begun = time.perf_counter()
    fit = learn(data, truth.heads if told else "auto", method, seconds=task.seconds, seed=task.seed)
    spent = time.perf_counter() - begun
    fresh = instance.examples(truth, task.seed, FRESH)
    Y = truth(fresh.X)  # without noise
    wrong = float((fit.layer(fresh.X) - Y).norm() / (Y - Y.mean((0, 1))).norm())
    found = match(fit.layer, truth)
    # What a missing or spare head costs is in the count; the heads that are there are judged as heads.
    pairs = [max(a, b) for a, b in zip(found.theta_error, found.w_error, strict=True)]
    worst = max(pairs, default=math.inf)
    right = worst <= instance.tolerance and not found.excess if instance.judged == "heads" else (
        wrong <= instance.tolerance)
    return {
        **_head(task, instance), "success": bool(right), "status": fit.status.kind, "heads": truth.heads,
        "heads_found": fit.layer.heads, "heads_right": sum(e <= instance.tolerance for e in pairs),
        "worst_head_error": worst if math.isfinite(worst) else None, "function_error": wrong,
        "examples": len(data), "examples_used": fit.stats["used"], "seconds": spent,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def _named(task: Task) -> Instance:
    return next(one for one in instances(task.suite) + instances(task.suite, True) if one.name == task.instance)


def _head(task: Task, instance: Instance) -> dict[str, Any]:
    return {"suite": task.suite, "instance": task.instance, "learner": task.learner, "seed": task.seed,
            "budget": task.seconds, "zoo": VERSION, "where": dict(instance.where),
            "identifiable": instance.identifiable, "judged": instance.judged}


def race(
    folder: Path, todo: Sequence[Task], workers: int = 2, report: Callable[[Mapping[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """Run what is not done yet (with this budget and version), ``workers`` at a time with one thread each; every
    result of the folder."""
    runs = folder / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()

    def one(task: Task) -> dict[str, Any] | None:
        result = _apart(task, stop)
        if result is not None:
            write_json(runs / f"{task.name}.json", result)
        return result

    with ThreadPoolExecutor(checks.whole("workers", workers)) as pool:
        waiting = [pool.submit(one, task) for task in todo if not _done(runs / f"{task.name}.json", task)]
        try:
            for future in as_completed(waiting):
                result = future.result()
                if report is not None and result is not None:
                    report(result)
        except BaseException:
            stop.set()  # running ones are ended and leave no result behind
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results(folder)


def _done(path: Path, task: Task) -> bool:
    if not path.exists():
        return False
    row = json.loads(path.read_text())
    return bool(row["budget"] == task.seconds and row["zoo"] == VERSION)


def _apart(task: Task, stop: threading.Event) -> dict[str, Any] | None:
    """``run`` in a process of its own: its memory is its own, and it can be ended. None if ``stop`` came first."""
    plain = {**_head(task, _named(task)), "success": False}
    command = [sys.executable, "-m", "headway.racing.race", json.dumps(vars(task))]
    begun = time.perf_counter()
    # A session of its own: an interrupt from the keyboard is for the race, which decides what becomes of its runs.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        while True:
            try:
                out, told = process.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                spent = time.perf_counter() - begun
                if stop.is_set() or spent > 2 * task.seconds + SLACK:
                    process.kill()
                    process.communicate()
                    return None if stop.is_set() else {**plain, "status": "stopped", "seconds": spent}
    if process.returncode:
        return {**plain, "status": "failed", "reason": (told.strip().splitlines() or ["no word"])[-1]}
    found: dict[str, Any] = json.loads(out)
    return found


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


def main() -> None:
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(run(Task(**json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
