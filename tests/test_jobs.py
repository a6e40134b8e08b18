"""Jobs on any executor: none is lost with its worker, none is done twice, and the rows are those of one process."""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import subprocess
import sys
import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
from tests.commands import headway
from tests.deadly import DEADLY, FEW, deadly, given_out

import headway as hw
from headway.racing import apart, race
from headway.runs import cluster, jobs
from headway.runs.store import Run
from headway.training import grid, sweep


class Faulty(Executor):
    """Jobs done at once, or lost: ``losses`` of each."""

    def __init__(self, losses, error=None):
        self.left, self.error, self.tickets = losses, error or BrokenProcessPool("a process died"), []

    def submit(self, fn, work, job, ticket):
        future: Future = Future()
        self.tickets.append(ticket)
        if self.left[job] > 0:
            self.left[job] -= 1
            future.set_exception(self.error)
        else:
            future.set_result(fn(work, job, ticket))
        return future


def test_a_job_whose_worker_died_is_given_out_again_and_again_but_not_for_ever():
    pool = Faulty({1: 0, 2: 2, 3: 3})
    ended = {one.name: one for one in jobs.each(lambda n: {"n": n}, {"a": 1, "b": 2, "c": 3}, pool)}
    assert [ended[name].row for name in "abc"] == [{"n": 1}, {"n": 2}, None]
    assert ended["c"].reason == "BrokenProcessPool: a process died, 3 times"
    assert len(set(pool.tickets)) == len(pool.tickets) == 1 + 3 + 3, "no executor takes one call for another"


def test_what_a_job_raises_ends_the_list_and_is_no_loss():
    begun = []

    def work(n):
        begun.append(n)
        raise hw.InputError("n: expected more; got 1. Try: 2.")

    for executor in (None, Faulty({1: 0, 2: 0})):
        begun.clear()
        with pytest.raises(hw.InputError, match="expected more"):
            list(jobs.each(work, {"a": 1, "b": 2}, executor))
        assert begun.count(1) == 1


def test_what_has_not_begun_is_cancelled_where_the_list_is_left():
    gate, begun = threading.Event(), []

    def work(n):
        begun.append(n)
        return {"waited": gate.wait(10)}

    with ThreadPoolExecutor(1) as pool:
        ended = jobs.each(lambda n: {"n": n} if n == 0 else work(n), dict(zip("abcd", range(4), strict=True)), pool)
        assert next(ended).name == "a"
        ended.close()
        gate.set()
    assert begun in ([], [1])


def test_an_executor_that_takes_no_jobs_is_refused(refused):
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with refused("executor", "broken or closed", "what is done is kept"):
        list(jobs.each(dict, {"a": {}}, pool))
    with refused("workers"):
        jobs.Processes(0)


@pytest.fixture(scope="module")
def here():
    """The rows of one process."""
    return sweep(FEW)


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """Where it stands who was given which trial."""
    folder = tmp_path / "seen"
    folder.mkdir()
    monkeypatch.setenv("HEADWAY_TEST_SEEN", str(folder))
    monkeypatch.setattr(grid, "trained", deadly)
    return folder


def test_a_process_that_dies_loses_its_job_alone(here, seen):
    with jobs.Processes(1) as pool:
        assert sweep(FEW, executor=pool) == here
    told = given_out(seen)
    assert {heads: len(pids) for heads, pids in told.items()} == {1: 1, DEADLY: 2, 9: 1}
    assert told[1] == told[DEADLY][:1] != told[9] == told[DEADLY][1:], "a new process took the dead one's place"


def test_a_cluster_with_a_worker_killed_in_the_middle_has_the_rows_of_one_process(here, seen, tmp_path):
    from distributed import LocalCluster

    with (LocalCluster(2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1",
                       silence_logs=logging.CRITICAL) as local,
          cluster.cluster(local.scheduler_address) as workers):
        rows = sweep(FEW, Run.at(tmp_path / "run"), executor=workers)
    assert rows == here
    assert {heads: len(pids) for heads, pids in given_out(seen).items()} == {1: 1, DEADLY: 2, 9: 1}
    kept = sorted((tmp_path / "run" / "trials").iterdir())
    assert [json.loads(path.read_text())["row"] for path in kept] == rows


