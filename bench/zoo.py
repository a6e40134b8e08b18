"""The zoo, twice: as ``headway bench`` runs it, and its identifiable instances on seeds nobody tuned on.

    python bench/zoo.py [seen | fresh]

The learner was worked on while seeds 0 to 2 were watched, until none of their runs was lost: what they count is no
forecast. Seeds 100 and 101 were chosen before anything was run on them, and are reported as they come out. Runs are
kept in bench/results/runs/COMMIT: a race that was stopped goes on, and two versions of the code never mix.

On a busy machine eight seconds on the wall are fewer of a processor. The fresh runs have one thread each and count
their seconds in processor time, so that what else the machine does takes nothing from any learner.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common import COMMIT, RESULTS, measured_at, origin, record
from headway.core.files import write_bytes, write_json
from headway.hardness.zoo import instances
from headway.racing.apart import run, tasks
from stopwatch import by_processor_time

FRESH_SEEDS = (100, 101)
INSTANCES = [one.name for one in instances("zoo") if one.identifiable]
LEARNERS = ("moments", "starts", "adam", "lbfgs")
SECONDS = 8.0  # what `headway bench` gives a run of the zoo
KEPT = ("seed", "success", "status", "heads", "heads_found", "worst_head_error", "seconds", "clock")


def main() -> None:
    asked = sys.argv[1:] or ["seen", "fresh"]
    folder = RESULTS / "runs" / COMMIT
    if "+" in COMMIT or COMMIT == "unknown":  # no name of the code: nothing to go on with
        shutil.rmtree(folder, ignore_errors=True)
    if "seen" in asked:
        seen(folder / "seen")
    if "fresh" in asked:
        fresh(folder / "fresh")


def seen(folder: Path) -> None:
    """Every suite on the seeds that were watched."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "headway", "bench", folder.name], cwd=folder.parent, check=True)
    home = RESULTS / "zoo"
    home.mkdir(exist_ok=True)
    for path in folder.glob("*.png"):
        shutil.copy(path, home)
    found = {**json.loads((folder / "results.json").read_text()), **origin("python bench/zoo.py seen")}
    write_json(home / "results.json", found)
    write_bytes(home / "table.md", with_origin((folder / "table.md").read_text(), found).encode())


def with_origin(table: str, found: dict[str, Any]) -> str:
    """The table with a line on its seeds and its commit under the title."""
    title, rest = table.split("\n\n", 1)
    return (f"{title}\n\nSeeds 0 to 2 (one seed in the sweeps), watched while the learner was worked on; "
            f"{measured_at(found)}, on {found['machine']}.\n\n{rest}")


def fresh(folder: Path) -> None:
    """The instances whose heads are determined, on seeds nobody looked at, one run after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    todo = [task for task in tasks("zoo", LEARNERS, FRESH_SEEDS, SECONDS) if task.instance in INSTANCES]
    for task in todo:
        path = folder / f"{task.name}.json"
        if not path.exists():
            with by_processor_time():
                found = run(task)
            write_json(path, {**found, "clock": "processor"})
            print(task.name, found["success"], flush=True)
    done = [(task, json.loads((folder / f"{task.name}.json").read_text())) for task in todo]
    rows = [{"instance": task.instance, "learner": task.learner, **{key: row.get(key) for key in KEPT}}
            for task, row in done]
    record("zoo_fresh", "python bench/zoo.py fresh", summary(rows), rows)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Successes of each learner, of how many."""
    found: dict[str, Any] = {"seeds": ", ".join(map(str, FRESH_SEEDS)),
                             "instances": len({row["instance"] for row in rows}), "seconds a run": SECONDS}
    for learner in LEARNERS:
        mine = [row for row in rows if row["learner"] == learner]
        found |= {f"{learner}, runs": len(mine), f"{learner}, successes": sum(row["success"] for row in mine)}
    return found


if __name__ == "__main__":
    main()
