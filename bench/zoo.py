"""The zoo, twice: as ``headway bench`` runs it, and its identifiable instances on seeds nobody tuned on.

    python bench/zoo.py [seen | fresh]

The learner was worked on while seeds 0 to 2 were watched, until none of their runs was lost: what they count is no
forecast. Seeds 100 to 102 were chosen before anything was run on them, and are reported as they come out. Runs are
kept in bench/results/runs/COMMIT: a race that was stopped goes on, and two versions of the code never mix.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import COMMIT, RESULTS, origin, record
from headway.core.files import write_json
from headway.hardness.zoo import instances
from headway.racing.race import race, tasks

FRESH_SEEDS = (100, 101, 102)
LEARNERS = ("moments", "starts", "adam", "lbfgs")
SECONDS = 8.0  # what `headway bench` gives a run of the zoo
WORKERS = 1
KEPT = ("seed", "success", "status", "heads", "heads_found", "worst_head_error", "function_error", "seconds")


def main() -> None:
    asked = sys.argv[1:] or ["seen", "fresh"]
    folder = RESULTS / "runs" / COMMIT
    if "+" in COMMIT:
        shutil.rmtree(folder, ignore_errors=True)
    if "seen" in asked:
        seen(folder / "seen")
    if "fresh" in asked:
        fresh(folder / "fresh", [one.name for one in instances("zoo") if one.identifiable])


def seen(folder: Path) -> None:
    """Every suite on the seeds that were watched."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "headway", "bench", folder.name], cwd=folder.parent, check=True)
    home = RESULTS / "zoo"
    home.mkdir(exist_ok=True)
    for path in [folder / "table.md", *folder.glob("*.png")]:
        shutil.copy(path, home)
    found = json.loads((folder / "results.json").read_text())
    write_json(home / "results.json", {**found, **origin("python bench/zoo.py seen")})


def fresh(folder: Path, names: Sequence[str]) -> None:
    todo = [task for task in tasks("zoo", LEARNERS, FRESH_SEEDS, SECONDS) if task.instance in names]
    done = race(folder, todo, WORKERS, lambda row: print(
        row["instance"], row["learner"], row["seed"], row["success"], flush=True))
    rows = [{"instance": name, "learner": learner, **{key: row.get(key) for key in KEPT}}
            for name in names for learner in LEARNERS for row in done
            if (row["instance"], row["learner"]) == (name, learner)]
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
