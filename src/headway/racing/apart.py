"""One learner on one instance, in a process of its own: success, errors, examples, seconds, peak memory.

Every learner gets the same examples and the same time. The baselines are told the number of heads; ``moments`` is
not. The process is started by who does the run, a thread of the race or a worker of a cluster, and ends with it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.core import checks
from headway.core.devices import peak
from headway.core.match import match
from headway.hardness.zoo import VERSION, Instance, instances
from headway.learning.learn import learn
from headway.runs.jobs import LostError

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
        return name_of(vars(self))


def name_of(of: Mapping[str, Any]) -> str:
    return f"{of['suite']}.{of['instance']}.{of['learner']}.{of['seed']}"


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
        "peak_memory_mib": peak().get("host", 0) / 2**20}


def _named(task: Task) -> Instance:
    return next(one for one in instances(task.suite) + instances(task.suite, True) if one.name == task.instance)


def _head(task: Task, instance: Instance) -> dict[str, Any]:
    return {"suite": task.suite, "instance": task.instance, "learner": task.learner, "seed": task.seed,
            "budget": task.seconds, "zoo": VERSION, "where": dict(instance.where),
            "identifiable": instance.identifiable, "judged": instance.judged}


def apart(task: Task, stop: threading.Event | None = None) -> dict[str, Any]:
    """``run`` in a process of its own: its memory is its own, and it can be ended. It ends with this one too, which
    may be a worker that is killed: the pipe it reads from is closed then."""
    command = [sys.executable, "-m", "headway.racing.apart", json.dumps(vars(task))]
    begun = time.perf_counter()
    hears, held = os.pipe()
    try:
        # A session of its own: an interrupt from the keyboard is for the race, which decides about its runs.
        with subprocess.Popen(command, stdin=hears, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
            said = _until(process, begun + 2 * task.seconds + SLACK, stop)
    finally:
        os.close(hears)
        os.close(held)
    if stop is not None and stop.is_set():
        raise LostError("the race was stopped")
    if said is None:
        return {**without_result(task), "status": "stopped", "seconds": time.perf_counter() - begun}
    if process.returncode < 0:  # a fault of the learner has a code and words
        raise LostError(f"its process was ended by signal {-process.returncode}, as where memory is short")
    out, told = said
    if process.returncode:
        reason = (told.strip().splitlines() or ["no word"])[-1]
        return {**without_result(task), "status": "failed", "reason": reason}
    found: dict[str, Any] = json.loads(out)
    return found


def _until(
    process: subprocess.Popen[str], end: float, stop: threading.Event | None
) -> tuple[str, str] | None:
    """What the process said; None if it was ended, at ``end`` or by ``stop``."""
    while True:
        try:
            return process.communicate(timeout=0.5)
        except subprocess.TimeoutExpired:
            if (stop is not None and stop.is_set()) or time.perf_counter() > end:
                process.kill()
                process.communicate()
                return None


def without_result(task: Task) -> dict[str, Any]:
    """The row of a run that has no result."""
    return {**_head(task, _named(task)), "success": False}


def main() -> None:
    """In the process of one run."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(run(Task(**json.loads(sys.argv[1])))))


def _end_with_parent(heard: int = 0, end: Callable[[int], object] = os._exit) -> None:
    os.read(heard, 1)  # nobody writes there: it ends with the one who began this run
    end(1)


if __name__ == "__main__":
    main()
