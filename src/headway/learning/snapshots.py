"""Where a long stage stands, kept on the way: killed in the middle, a run goes on from there.

A snapshot holds what cannot be computed again from the examples and the settings: unknowns, what an optimizer
remembers of its steps, the state of the generator, counters. So it is small. It is written at most once in EVERY
seconds, beside the stages and as they are (to a temporary name, then moved), by the first of several ranks, which
all come by at the same steps; what it holds is the same on all of them. A stage that ends takes its snapshot away.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headway.learning.shapes import Factored, Full
from headway.linalg.thin import Thin
from headway.linalg.totals import ALONE, Alone
from headway.runs.store import Run, Stage

EVERY = 60.0  # seconds between two snapshots of a stage, at least


class Snapshot:
    """Of one stage of a run; without a run there is none, and nothing is ever due."""

    def __init__(self, run: Run | None = None, name: str = "", ranks: Alone = ALONE) -> None:
        self.run, self.name, self.ranks = run, name, ranks
        self.kept = name != "" and ranks.decided(run is not None)  # of several ranks the first has the run
        self.last = time.perf_counter()

    def found(self) -> Stage | None:
        """What was kept when the stage was cut short, on every rank."""
        if not self.kept:
            return None

        def read() -> tuple[dict[str, Any], dict[str, Tensor]]:
            assert self.run is not None
            held = self.run.snapshot(self.name)
            return ({}, {}) if held is None else (held[1], held[0])

        info, tensors = self.ranks.led(read)
        return (dict(tensors), dict(info)) if info else None

    def due(self) -> bool:
        return self.kept and self.ranks.decided(time.perf_counter() - self.last >= EVERY)

    def keep(self, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        if self.run is not None:
            self.run.keep_snapshot(self.name, tensors, info)
        self.last = time.perf_counter()


NONE = Snapshot()


def of_shape(shape: Any, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The unknowns, and in words how they are written."""
    sizes = {part: getattr(shape, part) for part in ("width", "rows", "q") if hasattr(shape, part)}
    return {name: shape.value}, {name: {"kind": type(shape).__name__, **sizes}}


def shape_of(tensors: Mapping[str, Tensor], info: Mapping[str, Any], name: str, device: torch.device) -> Any:
    """The other way round."""
    said, value = dict(info[name]), tensors[name].to(device)
    kind = {"Thin": Thin, "Factored": Factored, "Full": Full}[said.pop("kind")]
    return kind(value, **said)
