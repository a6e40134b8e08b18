"""Any learner on any instance: a race is a list of independent runs, on this machine or on a cluster.

It is kept in a folder: one JSON for every (instance, learner, seed), written when it is done, so that a race that
was stopped goes on where it was. results.json and table.md are made from them, and grow with them. race.json says
which runs they are: another list is refused, for its table would mix two races.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

from headway.core import checks
from headway.core.files import read_json, write_json
from headway.hardness.zoo import SUITES, VERSION, instances
from headway.racing.apart import LEARNERS, Task, apart, name_of, without_result
from headway.racing.tables import conclude, results
from headway.runs import jobs, schema
from headway.runs.store import versions

LOST = "lost"  # the status of a run whose workers died
GROWS = 5.0  # seconds between two states of the table
KIND = "headway-race-1"
RACE = schema.record({
    "kind": schema.one_of(KIND), "zoo": schema.TEXT, "headway": schema.TEXT, "command": schema.TEXT,
    "runs": schema.listed(schema.record({
        "suite": schema.one_of(*SUITES), "instance": schema.TEXT, "learner": schema.one_of(*LEARNERS),
        "seed": schema.WHOLE, "seconds": schema.NUMBER}), 1)})
Report = Callable[[Mapping[str, Any]], None]


def race(
    folder: Path, todo: Sequence[Task], workers: int = 2, report: Report | None = None, *,
    executor: Executor | None = None, command: str = "headway bench FOLDER",
) -> list[dict[str, Any]]:
    """Run what is not done yet, each run in a process of its own with one thread; every result of the folder.

    Without an executor ``workers`` run at a time on this machine. ``executor`` may be that of a cluster, such as
    ``client.get_executor()`` of dask.distributed: its workers need this version of Headway and no shared folder.
    A run whose worker dies is given out again, three times in all; then its row says "lost", and the next race in
    this folder tries again. ``report`` gets each row as it is kept; ``command`` is named as what makes the folder.
    """
    checks.whole("workers", workers)
    _claim(folder, todo, command)
    left = missing(folder, todo)
    if not left and (folder / "results.json").exists():
        return results(folder)
    if executor is not None:
        _keep(folder, jobs.each(apart, left, executor), left, report)
        return results(folder)
    stop = threading.Event()
    with ThreadPoolExecutor(workers) as pool:
        try:
            _keep(folder, jobs.each(functools.partial(apart, stop=stop), left, pool), left, report)
        except BaseException:
            stop.set()  # running ones are ended and leave no result behind
            raise
    return results(folder)


def begun(folder: Path) -> tuple[list[Task], str]:
    """The runs of the race in this folder, done or not, and the command that began it."""
    found = _read(folder)
    return [Task(**one) for one in found["runs"]], found["command"]


def missing(folder: Path, todo: Sequence[Task]) -> dict[str, Task]:
    """Those that have no row yet; one that was lost is missing too."""
    rows = {task.name: _path(folder, task.name) for task in todo}
    return {task.name: task for task in todo
            if not rows[task.name].exists() or json.loads(rows[task.name].read_text()).get("status") == LOST}


def _keep(
    folder: Path, ended: Generator[jobs.Ended], todo: Mapping[str, Task], report: Report | None
) -> None:
    """Each row in a file of its own as it comes, and in the tables soon after."""
    command, told = _read(folder)["command"], time.monotonic()
    (folder / "runs").mkdir(exist_ok=True)
    with closing(ended):
        for one in ended:
            row = one.row or {**without_result(todo[one.name]), "status": LOST, "reason": one.reason}
            write_json(_path(folder, one.name), row)
            if report is not None:
                report(row)
            if time.monotonic() - told > GROWS:
                conclude(folder, command)
                told = time.monotonic()
    conclude(folder, command)


def _claim(folder: Path, todo: Sequence[Task], command: str) -> None:
    """Make this the folder of these runs. It may have been that of some of them; with others, or with less time,
    its table would mix two races."""
    path = folder / "race.json"
    mine = {"kind": KIND, "zoo": VERSION, "headway": versions()["headway"], "command": command,
            "runs": [vars(task) for task in todo]}
    if path.exists():
        before = _read(folder)
        budgets = {name_of(one): one["seconds"] for one in before["runs"]}
    else:  # one to come, or one of before there was a race.json
        rows = results(folder) if any((folder / "runs").glob("*.json")) else []
        before = {**mine, "zoo": rows[0]["zoo"] if rows else VERSION, "runs": []}
        budgets = {name_of(row): row["budget"] for row in rows}
    for what, name in (("the zoo", "zoo"), ("Headway", "headway")):
        if before[name] != mine[name]:
            checks.refuse("folder", f"version {before[name]} of {what}, as {folder} began", mine[name],
                          "that version, or another folder")
    now = {task.name: task.seconds for task in todo}
    for name, seconds in budgets.items():
        if name not in now:
            _other(folder, f"the {len(budgets)} runs of {folder}, and more if you like", f"none of {name}")
        if now[name] != seconds:
            _other(folder, f"{seconds:g} s for {name}, as {folder} began", f"{now[name]:g} s")
    if before["runs"] != mine["runs"]:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, mine)


def _other(folder: Path, expected: str, got: str) -> NoReturn:
    checks.refuse("folder", expected, got, f"headway bench --resume {folder}, which takes its settings from there, "
                  "or another folder")


def _read(folder: Path) -> dict[str, Any]:
    path, again = folder / "race.json", "headway bench with another folder"
    found = read_json(path, "a race that has begun", again)
    schema.check(path, found, RACE, "a race as headway bench writes it", again)
    known = {suite: {one.name for one in instances(suite) + instances(suite, True)} for suite in SUITES}
    for one in found["runs"]:
        if found["zoo"] == VERSION and one["instance"] not in known[one["suite"]]:
            checks.refuse(str(path), f"instances of the suite {one['suite']}", repr(one["instance"]), again)
    return found


def _path(folder: Path, name: str) -> Path:
    return folder / "runs" / f"{name}.json"
