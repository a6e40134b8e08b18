"""Independent jobs on any ``concurrent.futures.Executor``: a race, a grid of training runs.

A job is a function that every worker can import and one plain value. What it returns comes back as it ends, in any
order. An executor that loses a worker loses the job that ran there, which is given out again; after ``TRIES`` of
them the job is said to be lost. What the function itself raises is no loss: it ends the list.

There is no scheduler here: who runs what, and where, is the executor's business.
"""

from __future__ import annotations

import queue
import signal
import uuid
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch

from headway.core import checks

Row = dict[str, Any]
TRIES = 3  # times a job is given out whose worker died


class LostError(RuntimeError):
    """The process that did a job died before the job ended."""


@dataclass(frozen=True)
class Ended:
    """A job that ended: its row, or why there is none."""

    name: str
    row: Row | None
    reason: str = ""


@dataclass(frozen=True)
class _Answer:
    """What a worker sends back: apart from this, what comes through a future is about the worker, not the job."""

    row: Row | None
    error: Exception | None = None


def each(
    work: Callable[[Any], Row], jobs: Mapping[str, Any], executor: Executor | None = None, *, tries: int = TRIES
) -> Generator[Ended]:
    """``work(job)`` of every job, as it ends; without an executor one after the other, in this process.

    The first exception that ``work`` raises is raised here; what has not begun is cancelled then, and where the
    iteration is left.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with ThreadPoolExecutor(2) as threads:
    ...     print(sorted((end.name, end.row["n"]) for end in each(lambda n: {"n": n}, {"a": 1, "b": 2}, threads)))
    [('a', 1), ('b', 2)]
    """
    if executor is None:
        yield from (Ended(name, work(job)) for name, job in jobs.items())
        return
    ended: queue.SimpleQueue[Future[_Answer]] = queue.SimpleQueue()
    waiting: dict[Future[_Answer], tuple[str, int]] = {}
    ticket = uuid.uuid4().hex  # an executor that keeps the results of equal calls has none of this one

    def give_out(name: str, turn: int) -> None:
        future = _submitted(executor, work, jobs[name], f"{ticket}.{name}.{turn}")
        waiting[future] = name, turn
        future.add_done_callback(ended.put)

    try:
        for name in jobs:
            give_out(name, 1)
        while waiting:
            future = ended.get()
            name, turn = waiting.pop(future)
            lost = _loss(future)
            if lost is None:
                answer = future.result()
                if answer.error is not None:
                    raise answer.error
                yield Ended(name, answer.row)
            elif turn < tries:
                give_out(name, turn + 1)
            else:
                yield Ended(name, None, f"{lost}, {tries} times")
    finally:
        for future in waiting:
            future.cancel()


def _submitted(executor: Executor, work: Callable[[Any], Row], job: Any, ticket: str) -> Future[_Answer]:
    try:
        return executor.submit(_answer, work, job, ticket)
    except RuntimeError as error:  # a pool of processes that lost one, or that was shut down
        raise checks.InputError(
            f"executor: expected one that takes jobs; got one that is broken or closed ({_said(error)}). "
            "Try: the same again with another, --resume on the command line; what is done is kept.") from None


def _answer(work: Callable[[Any], Row], job: Any, ticket: str) -> _Answer:
    """In the worker."""
    try:
        return _Answer(work(job))
    except LostError:
        raise
    except Exception as error:
        return _Answer(None, error)


def _loss(future: Future[_Answer]) -> str | None:
    """Why the worker gave no answer; None if it did."""
    if future.cancelled():
        return "the executor gave the job up"
    error = future.exception()
    return None if error is None else _said(error)


def _said(error: BaseException) -> str:
    words = " ".join(str(error).split())
    own = type(error) in (LostError, RuntimeError)  # which say in words what happened
    return words if own else f"{type(error).__name__}: {words}".removesuffix(": ")


class Processes(Executor):
    """``workers`` processes of one thread each, started when first needed.

    In a ProcessPoolExecutor one process that dies breaks all of it. Here it fails the job it had, and the next job
    gets a new process: a pool of one process for each of as many threads.
    """

    def __init__(self, workers: int) -> None:
        self._threads = ThreadPoolExecutor(checks.whole("workers", workers))
        self._idle: queue.SimpleQueue[ProcessPoolExecutor] = queue.SimpleQueue()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        return self._threads.submit(self._apart, fn, args, named)

    def _apart(self, fn: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        try:
            one = self._idle.get_nowait()
        except queue.Empty:
            one = _one()
        try:
            return one.submit(fn, *args, **named).result()
        except BrokenExecutor:
            one.shutdown(wait=False)
            one = _one()  # its process starts with its first job
            raise LostError("its process died") from None
        finally:
            self._idle.put(one)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait, cancel_futures=cancel_futures)
        while not self._idle.empty():
            self._idle.get().shutdown(wait)


def _one() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), _alone)


def _alone() -> None:
    """In a process that does jobs: one thread, and an interrupt from the keyboard ends it without a word, for it is
    told to the one who gave the jobs out too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
