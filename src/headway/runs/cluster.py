"""A cluster that others keep: its workers do jobs through dask.distributed (the extra ``cluster``).

Headway starts no workers and schedules nothing: it is one more client of a scheduler that is there. Dask sends
functions and values between its processes as pickles, so a cluster is as trusted as this process; files are never
read that way.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from headway.core import checks
from headway.runs.jobs import LostError
from headway.runs.store import versions

ANSWERS = 10.0  # seconds in which a scheduler answers, and then a worker
WATCHED = 1.0  # seconds between two looks whether the scheduler is still there


@contextmanager
def cluster(address: str, seconds: float = ANSWERS) -> Iterator[Executor]:
    """The workers behind a scheduler such as tcp://10.0.0.1:8786, as an executor.

    Refused: an address where no scheduler answers, a scheduler without workers, workers with another Headway.
    """
    distributed = _distributed()
    with _quiet():
        try:
            with ThreadPoolExecutor(1) as aside:  # a notebook has a loop of its own running here
                aside.submit(asyncio.run, _greet(address, seconds)).result()
            client = distributed.Client(address, timeout=seconds, set_as_default=False)
        except Exception as error:  # what does not speak Dask's language may answer anything
            checks.refuse("--cluster", "the address of a Dask scheduler, such as tcp://10.0.0.1:8786",
                          f"{address!r}, where none answers ({_why(error)})", "dask scheduler, which tells its own")
        with client:
            _same_code(client, address, seconds)
            workers = Workers(client, address)
            try:
                yield workers
            finally:
                workers.shutdown(wait=False, cancel_futures=True)


def _distributed() -> Any:
    try:
        return import_module("distributed")
    except ImportError:
        checks.refuse("--cluster", "the package distributed", "an installation without it",
                      "pip install 'headway[cluster]', here and where the workers are")


async def _greet(address: str, seconds: float) -> None:
    """Shake hands and leave: a client waits for ever for an answer from what listens and says nothing."""
    distributed = _distributed()
    settings = distributed.Security().get_connection_args("client")
    hello = distributed.comm.connect(address, timeout=seconds, **settings)
    comm = await asyncio.wait_for(hello, seconds + 1)
    await comm.close()


class Workers(Executor):
    """The executor of a Dask client, for one list of jobs: where the scheduler goes, its futures end.

    Dask's own are cancelled, and what is given out while the client looks for its scheduler would wait for ever.
    """

    def __init__(self, client: Any, address: str) -> None:
        self._client, self._address = client, address
        self._inner = client.get_executor(pure=False)
        self._given: set[Future[Any]] = set()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        while self._client.status == "connecting":  # for as long as it was given to connect, then it closes
            time.sleep(0.1)
        if self._client.status != "running":
            raise RuntimeError(f"the scheduler at {self._address} is gone")
        future: Future[Any] = self._inner.submit(fn, *args, **named)
        self._given.add(future)
        future.add_done_callback(self._given.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._ended.set()
        if self._client.status == "running":
            self._inner.shutdown(wait=wait and not cancel_futures)

    def _watch(self) -> None:
        while not self._ended.wait(WATCHED):
            if self._client.status in ("closing", "closed"):
                for future in list(self._given):
                    with suppress(InvalidStateError):
                        future.set_exception(LostError(f"the scheduler at {self._address} is gone"))
                return


def _same_code(client: Any, address: str, seconds: float) -> None:
    """Refuse workers that would run another Headway: their rows would not be of this one."""
    try:
        client.wait_for_workers(1, timeout=seconds)
    except TimeoutError:
        checks.refuse("--cluster", "a cluster with workers", f"{address}, which has none",
                      f"dask worker {address}, on each machine")
    here = code()
    for worker, there in sorted(client.run(code, on_error="return").items()):
        if there != here:
            found = "none" if isinstance(there, ModuleNotFoundError) and there.name == "headway" else (
                f"an older one ({_line(there)})" if isinstance(there, Exception) else there)
            checks.refuse("--cluster", f"workers with Headway {here}, as here", f"{found} at {worker}",
                          "the same Headway installed in each worker's Python, and the workers started again")


@functools.cache
def code() -> str:
    """The version of this Headway, and a digest of its source: a version in the making has many."""
    sources, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        sources.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{versions()['headway']} (source {sources.hexdigest()[:8]})"


@contextmanager
def _quiet() -> Iterator[None]:
    """Dask's own log tells of workers that come and go; what that means for the jobs is in their rows."""
    levels = {handler: handler.level for handler in logging.getLogger("distributed").handlers}
    for handler in levels:
        handler.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Mismatched versions found")
            yield
    finally:
        for handler, level in levels.items():
            handler.setLevel(level)


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "nothing said in time"
    return _line(error) if isinstance(error, (OSError, ValueError)) else "what does is no such scheduler"


def _line(error: object) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
