"""Jobs on any executor: none is lost with its worker, none is done twice, and the rows are those of one process."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import resource
import socket
import sys
import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from tests.commands import headway
from tests.deadly import DEADLY, FEW, deadly, given_out

import headway as hw
from headway.cli import hard, train
from headway.core import devices
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


# -- jobs -------------------------------------------------------------------------------------------------------


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


class Once:
    """A pool of one process that dies under the job 2, in the first of them."""

    made: ClassVar[list] = []

    def __init__(self):
        self.made.append(self)
        self.given, self.down = [], False

    def submit(self, fn, job):
        assert not self.down
        self.given.append(job)
        future: Future = Future()
        if job == 2 and len(self.made) == 1:
            future.set_exception(BrokenProcessPool("a process died"))
        else:
            future.set_result(fn(job))
        return future

    def shutdown(self, wait=True):
        self.down = True


def test_a_process_that_dies_loses_its_job_alone(monkeypatch):
    # With real processes: the page on clusters, whose commands are run, with --workers 2.
    monkeypatch.setattr(jobs, "_one", Once)
    with jobs.Processes(1) as pool:
        futures = [pool.submit(abs, n) for n in (1, 2, 3)]
        with pytest.raises(jobs.LostError, match="its process died"):
            futures[1].result()
        assert [futures[0].result(), futures[2].result(), pool.submit(abs, 2).result()] == [1, 3, 2]
    assert [one.given for one in Once.made] == [[1, 2], [3, 2]], "a new process took the dead one's place"
    assert all(one.down for one in Once.made)


def test_a_cluster_with_a_worker_killed_in_the_middle_has_the_rows_of_one_process(here, seen, tmp_path):
    from distributed import LocalCluster

    with (LocalCluster(1, threads_per_worker=1, dashboard_address=":0", host="127.0.0.1",
                       silence_logs=logging.CRITICAL) as local,
          cluster.cluster(local.scheduler_address) as workers):
        rows = sweep(FEW, Run.at(tmp_path / "run"), executor=workers)
    assert rows == here
    assert {heads: len(pids) for heads, pids in given_out(seen).items()} == {1: 1, DEADLY: 2, 9: 1}
    kept = sorted((tmp_path / "run" / "trials").iterdir())
    assert [json.loads(path.read_text())["row"] for path in kept] == rows




# -- races ------------------------------------------------------------------------------------------------------


@pytest.fixture
def raced(monkeypatch):
    """Races whose runs take no time: the row says when it was made."""
    made = []

    def at_once(task, stop=None):
        made.append(task.name)
        return {**apart.without_result(task), "success": True, "status": "recovered", "seconds": 1.0,
                "worst_head_error": 1e-15, "function_error": 1e-15, "peak_memory_mib": 100.0, "turn": len(made)}

    monkeypatch.setattr(hard, "_figures", lambda folder, rows: [])
    monkeypatch.setattr(race, "apart", at_once)
    monkeypatch.setattr(race, "GROWS", -1.0)
    return made


def test_a_race_on_an_executor_is_kept_row_by_row_and_repeats_nothing(raced, tmp_path):
    todo = apart.tasks("heads", ["moments", "adam"], [0], 2.0, quick=True)
    grown = []

    def count(row):
        grown.append(len(list((tmp_path / "runs").iterdir())))

    with ThreadPoolExecutor(1) as threads:
        rows = race.race(tmp_path, todo[:4], report=count, executor=threads, command="headway bench A")
        assert grown == [1, 2, 3, 4] == sorted(row["turn"] for row in rows)
        assert {row["turn"] for row in race.race(tmp_path, todo[:4], executor=threads)} == {1, 2, 3, 4}
        assert len(raced) == 4, "a finished race is read back"
        race.race(tmp_path, todo, executor=threads)
    assert raced == [task.name for task in todo], "more runs add to it"
    told, command = race.begun(tmp_path)
    assert (told, command) == (todo, "headway bench FOLDER")
    assert len(json.loads((tmp_path / "results.json").read_text())["rows"]) == 6


def test_the_table_grows_with_the_rows(raced, tmp_path):
    todo = apart.tasks("heads", ["moments"], [0], 2.0, quick=True)
    sizes = []

    def look(row):
        path = tmp_path / "table.md"
        sizes.append(path.read_text().count("1/1") if path.exists() else 0)

    race.race(tmp_path, todo, 1, look)
    assert sizes == [0, 1, 2]


def test_a_lost_run_is_a_row_that_the_next_race_replaces(raced, tmp_path, monkeypatch):
    todo = apart.tasks("heads", ["moments"], [0], 2.0, quick=True)
    real, dead = race.apart, {todo[1].name}

    def dying(task, stop=None):
        if task.name in dead:
            raced.append(task.name)
            raise jobs.LostError("its process was ended by signal 9")
        return real(task, stop)

    monkeypatch.setattr(race, "apart", dying)
    rows = {row["instance"]: row for row in race.race(tmp_path, todo)}
    assert raced.count(todo[1].name) == jobs.TRIES
    assert (rows["heads-2"]["status"], rows["heads-2"]["success"]) == ("lost", False)
    assert rows["heads-2"]["reason"] == "its process was ended by signal 9, 3 times"
    assert "| heads-2 | 0/1, lost" in (tmp_path / "table.md").read_text()
    dead.clear()
    done = headway("bench", "--resume", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    assert "3 runs of 3 instances, 2 of them done" in done.stderr
    assert json.loads(done.stdout)["lost"] == 0
    assert raced.count(todo[0].name) == 1
    assert all(row["success"] for row in race.results(tmp_path))


def test_a_folder_holds_one_race(raced, tmp_path, refused):
    todo = apart.tasks("heads", ["moments", "adam"], [0], 2.0, quick=True)
    race.race(tmp_path, todo)
    before = (tmp_path / "race.json").read_text()
    hint = f"headway bench --resume {tmp_path}"
    with refused("folder", "the 6 runs", f"none of {todo[0].name}", hint):
        race.race(tmp_path, todo[1:])
    with refused("folder", "2 s for", "4 s", hint):
        race.race(tmp_path, [dataclasses.replace(task, seconds=4.0) for task in todo])
    for name, words in (("zoo", "version 0 of the zoo"), ("headway", "version 0 of Headway")):
        (tmp_path / "race.json").write_text(json.dumps({**json.loads(before), name: "0"}))
        with refused("folder", words):
            race.race(tmp_path, todo)
    (tmp_path / "race.json").unlink()  # a folder of before there was one: its rows say what it is
    with refused("folder", "2 s for", "4 s"):
        race.race(tmp_path, [dataclasses.replace(task, seconds=4.0) for task in todo])
    race.race(tmp_path, todo)
    assert json.loads((tmp_path / "race.json").read_text())["runs"] == json.loads(before)["runs"]
    assert len(raced) == 6
    for damaged in ("{", "[]", before.replace("heads-1", "heads-77"), before.replace('"moments"', '"magic"')):
        (tmp_path / "race.json").write_text(damaged)
        done = headway("bench", "--resume", tmp_path)
        assert (done.returncode, "race.json" in done.stderr) == (2, True), damaged


def test_resume_takes_its_settings_from_the_folder(raced, tmp_path):
    for words in (["--resume", tmp_path / "none"], [], ["--resume", tmp_path, "--seconds", 3],
                  ["--resume", tmp_path, "--quick"], [tmp_path, "--resume", tmp_path],
                  [tmp_path, "--quick", "--cluster", "127.0.0.1:1", "--workers", 3]):
        done = headway("bench", *words)
        assert (done.returncode, "Try: " in done.stderr) == (2, True), words
    done = headway("bench", tmp_path / "race", "--suite", "heads", "--learner", "moments", "--quick", "--json")
    assert (done.returncode, len(raced)) == (0, 3), done.stderr
    command = json.loads((tmp_path / "race" / "race.json").read_text())["command"]
    assert command.startswith("headway bench ")
    table = (tmp_path / "race" / "table.md").read_text()
    again = headway("bench", "--resume", tmp_path / "race", "--json")
    assert (again.returncode, len(raced)) == (0, 3)
    assert again.stdout == done.stdout
    assert (tmp_path / "race" / "table.md").read_text() == table


def test_a_run_ends_with_the_worker_that_began_it():
    hears, held = os.pipe()
    ended = []
    listens = threading.Thread(target=apart._end_with_parent, args=(hears, ended.append))
    listens.start()
    assert ended == []
    os.close(held)  # as the end of its worker does
    listens.join(60)
    os.close(hears)
    assert ended == [1]


def test_the_peak_of_a_run_is_its_own(tmp_path):
    """getrusage of a process began as that of its parent: a run said the memory of the worker that began it."""
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t  999999 kB\nVmHWM:\t    2048 kB\nVmRSS:\t 1024 kB\n")
    assert devices._resident(status) == 2 << 20
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert devices._resident(tmp_path / "none") == most
    assert 50 << 20 < devices.peak()["host"] <= most + (1 << 20)


# -- sweeps of training runs ------------------------------------------------------------------------------------

WORDS = ["--heads", "1,4", "--steps", 5, "--count", 20, "--test-count", 20, "--tokens", 4, "--width", 6,
         "--zeta", 0.5, "--trials", 2, "--no-theory"]


def test_a_sweep_that_was_stopped_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "_training_figures", lambda folder, table: ["none"])
    whole = headway("train", "--out", tmp_path / "whole", *WORDS, "--json")
    assert whole.returncode == 0, whole.stderr
    run, real, made = tmp_path / "run", grid.trained, []

    def stopped(trial):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(trial)
        return real(trial)

    monkeypatch.setattr(grid, "trained", stopped)
    assert headway("train", "--out", run, *WORDS).returncode == 130
    assert len(list((run / "trials").iterdir())) == 3
    shown = headway("show", run)
    assert (shown.returncode, f"headway train --resume {run}" in " ".join(shown.stderr.split())) == (2, True)
    monkeypatch.setattr(grid, "trained", lambda trial: made.append(trial) or real(trial))
    other = headway("train", "--resume", run, "--steps", 6)
    assert (other.returncode, "--steps" in other.stderr) == (2, True)
    done = headway("train", "--resume", run, "--json")
    assert done.returncode == 0, done.stderr
    assert len(made) == len(set(made)) == 4
    assert json.loads(done.stdout)["settings"] == json.loads(whole.stdout)["settings"]
    assert [json.loads((tmp_path / name / "results.json").read_text())["results"] for name in ("run",)] == [
        json.loads((tmp_path / "whole" / "results.json").read_text())["results"]]
    again = headway("train", "--resume", run, "--json")
    assert (again.stdout, len(made)) == (done.stdout, 4), "a finished run is read back"


def test_a_sweeps_folder_holds_one_sweep(tmp_path, refused):
    sweep(FEW[1:], run := Run.at(tmp_path / "run"))
    with refused("run", "others (in 00000.json)"):
        sweep(FEW[:2], run)
    with refused("run", "others (in 00001.json)"):
        sweep(FEW[1:2], run)
    path = tmp_path / "run" / "trials" / "00000.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "headway": "0"}))
    with refused("run"):
        sweep(FEW[1:], run)
    for words in ([], ["--resume", tmp_path / "run"], ["--resume", tmp_path / "none"]):
        done = headway("train", *words)
        assert (done.returncode, "Try: " in done.stderr) == (2, True), words


def test_a_lost_trial_is_told_and_missing(tmp_path, here):
    lost = Faulty({FEW[0]: 0, FEW[1]: 3, FEW[2]: 0})
    rows = sweep(FEW, run := Run.at(tmp_path), executor=lost)
    assert [rows[0], rows[2]] == [here[0], here[2]]
    assert (rows[1]["heads"], rows[1]["reason"]) == (4, "BrokenProcessPool: a process died, 3 times")
    grid.finish(run, rows)
    kept = json.loads((tmp_path / "results.json").read_text())
    assert ([row["heads"] for row in kept["results"]], len(kept["lost"])) == ([1, 9], 1)
    assert sweep(FEW, run, executor=Faulty({FEW[1]: 0})) == here


def test_workers_read_the_file_the_sweep_began_with(tmp_path, refused):
    path = tmp_path / "mine.safetensors"
    X = torch.randn(6, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    save_file({"X": X, "y": torch.tensor([1.0, 1, 1, -1, -1, 1])}, path)
    mine = dataclasses.replace(FEW[1], data=str(path), digest=grid.digest(path))
    assert sweep([mine])[0]["count"] == 6
    save_file({"X": 2 * X, "y": torch.tensor([1.0, 1, 1, -1, -1, 1])}, path)
    with refused(str(path), "the file the sweep began with"):
        sweep([mine])
    assert headway("train", "--data", tmp_path / "none", "--out", tmp_path / "run").returncode == 2
    assert not (tmp_path / "run").exists()


# -- clusters ---------------------------------------------------------------------------------------------------


def test_an_address_where_nobody_answers_is_refused_in_time(refused):
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes calls and says nothing
        port = mute.getsockname()[1]
        with refused("--cluster", "nothing said in time"), cluster.cluster(f"tcp://127.0.0.1:{port}", 0.1):
            pass
    for address in (f"tcp://127.0.0.1:{port}", "nonsense", "smoke://signals", ""):
        with refused("--cluster", "where none answers"), cluster.cluster(address, 0.1):
            pass


def test_a_missing_package_is_named(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with refused("--cluster", "pip install 'headway[cluster]'"), cluster.cluster("tcp://127.0.0.1:1"):
        pass


def test_a_scheduler_that_goes_ends_the_list(monkeypatch, refused):
    class Client:
        status, given = "running", []

        def get_executor(self, pure):
            return self

        def submit(self, *job):
            self.given.append(Future())
            self.status = "connecting"  # it goes as soon as there is a job, whose future nobody ends
            threading.Timer(0.1, setattr, (self, "status", "closed")).start()
            return self.given[-1]

    monkeypatch.setattr(cluster, "WATCHED", 0.01)
    client = Client()
    workers = cluster.Workers(client, "tcp://s")
    with refused("executor", "the scheduler at tcp://s is gone", "--resume"):
        list(jobs.each(dict, {"a": {}}, workers))
    workers.shutdown()
    assert isinstance(client.given[0].exception(), jobs.LostError)
    assert len(client.given) == 1, "nothing is given out to a scheduler that is gone"


@pytest.mark.parametrize(("there", "words"), [
    (ModuleNotFoundError("No module named 'headway'", name="headway"), "none at tcp://w"),
    (ModuleNotFoundError("No module named 'headway.runs.cluster'", name="headway.runs.cluster"), "an older one"),
    ("0.0.9 (source 00000000)", "0.0.9 (source 00000000) at tcp://w")])
def test_workers_with_another_headway_are_refused(there, words, refused):
    class Client:
        def wait_for_workers(self, count, timeout):
            assert (count, timeout) == (1, 5.0)

        def run(self, function, on_error):
            return {"tcp://v": cluster.code(), "tcp://w": there}

    with refused("--cluster", "workers with Headway", cluster.code(), words):
        cluster._same_code(Client(), "tcp://s", 5.0)


def test_the_digest_of_the_source_tells_two_versions_in_the_making_apart(tmp_path, monkeypatch):
    one = cluster.code()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "cluster.py").write_text("x = 1\n")
    monkeypatch.setattr(cluster, "__file__", str(tmp_path / "runs" / "cluster.py"))
    cluster.code.cache_clear()
    assert cluster.code() != one
    monkeypatch.undo()
    cluster.code.cache_clear()
    assert cluster.code() == one
