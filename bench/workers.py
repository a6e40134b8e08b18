"""Cases run side by side: each in a process with one thread, so that none waits for another's.

A script names its cases by plain values (a kind, a seed, a number) and has a function that runs one of them; the
rows come back in the order of the cases, whoever was first.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

Row = dict[str, Any]


def option(words: argparse.ArgumentParser) -> None:
    """``--workers N``."""
    words.add_argument("--workers", type=int, default=1, metavar="N", help="processes of one thread each")


def each(run: Callable[..., Row], cases: Sequence[tuple[Any, ...]], workers: int = 1) -> list[Row]:
    """``run(*case)`` for every case; in this process if ``workers`` is 1."""
    if workers <= 1:
        return [run(*case) for case in cases]
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the new processes when they load their libraries
    torch.set_num_threads(1)  # what a record says of the machine is true of every case
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        return list(pool.map(run, *zip(*cases, strict=True)))
