"""The zoo on this machine's processes, and on a Dask cluster whose workers are killed in the middle: one table?

    python bench/sweep.py [--workers N]

The learners are those that stop by themselves, with a minute each, so that no clock decides what comes out: every
row has to agree to the last bit but for its seconds and its memory. A worker is killed (signal 9) KILLS times, each
time one that has a run in hand, spread over the race; Dask starts another in its place.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster

from common import record, timed
from headway.hardness.zoo import instances
from headway.racing.apart import Task, tasks
from headway.racing.race import race
from headway.runs.cluster import cluster

SEED = 0
SECONDS = 60.0
LEARNERS = ("moments", "starts")
INSTANCES = tuple(one.name for one in instances("zoo", True) if one.identifiable)
KILLS = 4
MEASURED = ("seconds", "peak_memory_mib")  # what no two runs of a program share


class Killer:
    """Kills a worker that has a run in hand, after each of some numbers of rows."""

    def __init__(self, client: Client, after: list[int]) -> None:
        self.client, self.after = client, after
        self.rows, self.killed = 0, 0
        self.pids: dict[str, int] = {}

    def ended(self, row: Mapping[str, Any]) -> None:
        self.rows += 1

    def watch(self, end: threading.Event) -> None:
        while self.after and not end.is_set():
            busy = [worker for worker, keys in self.client.processing().items() if keys]
            if self.rows >= self.after[0] and busy:
                pid = self.client.run(os.getpid, workers=busy[:1])[busy[0]]
                os.kill(pid, signal.SIGKILL)
                self.killed += 1
                self.after.pop(0)
            end.wait(0.5)


def on_a_cluster(folder: Path, todo: list[Task], workers: int) -> tuple[list[dict[str, Any]], int]:
    """The rows, and how many workers were killed."""
    with (LocalCluster(workers, threads_per_worker=1, dashboard_address=":0", host="127.0.0.1",
                       silence_logs=logging.CRITICAL) as local, Client(local) as client,
          cluster(local.scheduler_address, 60.0) as executor):
        killer, end = Killer(client, [len(todo) * j // KILLS for j in range(KILLS)]), threading.Event()
        watching = threading.Thread(target=killer.watch, args=(end,))
        watching.start()
        try:
            rows = race(folder, todo, report=killer.ended, executor=executor)
        finally:
            end.set()
            watching.join()
    return rows, killer.killed


def fixed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in MEASURED}


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--workers", type=int, default=2)
    workers = words.parse_args().workers
    todo = [task for task in tasks("zoo", LEARNERS, [SEED], SECONDS, True) if task.instance in INSTANCES]
    with tempfile.TemporaryDirectory() as folder:
        here, alone = timed(lambda: race(Path(folder) / "here", todo, workers))
        (there, killed), together = timed(lambda: on_a_cluster(Path(folder) / "there", todo, workers))
    rows = [{"instance": one["instance"], "learner": one["learner"], "success": one["success"],
             "on the cluster": other["success"], "status": one["status"],
             "worst head error": one.get("worst_head_error"), "same to the last bit": fixed(one) == fixed(other)}
            for one, other in zip(here, there, strict=True)]
    record("sweep", "python bench/sweep.py", {
        "runs": len(rows), "workers": workers, "workers killed": killed, "seed": SEED,
        "rows the same to the last bit": sum(row["same to the last bit"] for row in rows),
        "successes here": sum(row["success"] for row in rows),
        "successes on the cluster": sum(row["on the cluster"] for row in rows),
        "lost": sum(row["status"] == "lost" for row in there),
        "seconds here": alone, "seconds on the cluster": together}, rows)


if __name__ == "__main__":
    main()
