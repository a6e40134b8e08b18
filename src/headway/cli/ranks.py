"""Processes that torchrun starts: joining their group, and one voice for all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from headway.linalg.totals import Alone

SHARED = ("learn",)  # commands that several processes work on together
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells a process
CONNECT, WAIT = timedelta(minutes=3), timedelta(hours=6)  # for all to be there; for what one of them does


def rank() -> int:
    """Of this process among those that torchrun started; 0 for one by itself."""
    return int(os.environ["RANK"]) if launched() else 0


def launched() -> bool:
    """Whether torchrun started this process as one of several."""
    return all(name in os.environ for name in NEEDED) and int(os.environ["WORLD_SIZE"]) > 1


def again() -> bool:
    """Whether torchrun started it anew, after a process had died."""
    return launched() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def refuse_doubled(command: str) -> None:
    """Refuse commands that each process would carry out by itself."""
    if launched() and command not in SHARED:
        from headway.core import checks

        checks.refuse(f"headway {command}", "one process", f"{os.environ['WORLD_SIZE']} of them",
                      "it without torchrun; headway learn is what several processes do together")


def leave(code: int | str | None) -> NoReturn:
    """End this process: of several at once, since threads of torch that are still there may otherwise abort it, and
    torchrun would take a run that is finished for one that failed."""
    if launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
    sys.exit(code)


@contextmanager
def group() -> Iterator[Alone]:
    """The processes that torchrun started, as a group: gloo between CPUs, NCCL between GPUs."""
    from headway.linalg.totals import ALONE, ranks

    if not launched():
        yield ALONE
        return
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # Processes started anew meet at the store of those before them, and gloo would take the addresses of the dead.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, rank, size = next(rendezvous("env://", timeout=CONNECT))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", rank=rank,
                            world_size=size, store=PrefixStore(f"attempt-{attempt}", store), timeout=CONNECT)
    # Of a process that dies the others hear at once; one that reads for long is waited for.
    later = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if later is not None:
        later(WAIT)
    try:
        yield ranks()
    finally:
        dist.destroy_process_group()


def device_of(name: str) -> str:
    """One GPU for each process of a machine, where "cuda" is asked for."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if launched() and name == "cuda" else name
