"""A run as it goes, in TensorBoard's own files, through its own writer (the extra ``tensorboard``).

    with hw.TensorBoard("logs/first") as board:        # to look at: tensorboard --logdir logs
        fit = hw.learn(data, progress=board)

What stands there, against the number of reports so far: the residual, that of each stage by itself, steps a
second, memory; after each stage the heads and the error it ended with, and as text why it was chosen. At the end
settings and what came of them, as a row of TensorBoard's table of hyperparameters. A folder is one run.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from headway.core import checks
from headway.core.devices import peak

if TYPE_CHECKING:
    from headway.core.results import Fit

WRITTEN = 2.0  # seconds between what is written and what can be read
AFTER = ("heads", "error", "unseen", "residual", "held_out_error")  # numbers of a stage that ended
RESULTS = ("held_out_error", "heads", "seconds", "products", "examples")  # of a fit


class TensorBoard:
    """Progress of ``learn`` as TensorBoard shows it: give it as ``progress``. A folder holds one run.

    ``also`` is called with every event too, for a bar beside it.

    >>> import tempfile
    >>> from headway import AttentionLayer, draw, learn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     data = draw(AttentionLayer.random(heads=1, width=4, seed=0), count=100, length=4)
    ...     with TensorBoard(folder) as board:
    ...         fit = learn(data, progress=board)
    ...     any("tfevents" in path.name for path in Path(folder).iterdir())
    True
    """

    def __init__(self, folder: str | os.PathLike[str], also: Any = None) -> None:
        place = Path(folder)
        if place.exists() and not place.is_dir():
            checks.refuse("folder", "a folder, or one to be made", f"{place}, a file", "TensorBoard('logs/first')")
        self.folder, self.also = place, also
        self._writer = _writer(place)
        self._count = 0  # reports so far
        self._stage, self._begun, self._steps = "", time.perf_counter(), 0

    def __call__(self, event: Mapping[str, Any]) -> None:
        """One event of ``learn``: a stage begins (residual None), or a step of it was made."""
        if self.also is not None:
            self.also(event)
        if event["residual"] is None:
            self._ended(event.get("before"))
            self._stage, self._begun, self._steps = event["stage"], time.perf_counter(), 0
            self._writer.add_text("stages", f"**{event['stage']}**: {event.get('why', '')}", self._count)
            return
        self._count += 1
        self._steps += 1
        self._put("residual", event["residual"])
        self._put(f"residual of a stage/{event['stage']}", event["residual"])
        self._put("steps a second", self._steps / max(time.perf_counter() - self._begun, 1e-9))
        for name, size in memory().items():
            self._put(f"memory, MiB/{name}", size)

    def _ended(self, stage: Mapping[str, Any] | None) -> None:
        """What a stage found."""
        for name in AFTER:
            value = None if stage is None else stage.get(name)
            if isinstance(value, (int, float)):
                self._put(f"after a stage/{name}", value)

    def _put(self, name: str, value: float) -> None:
        if math.isfinite(value):
            self._writer.add_scalar(name, value, self._count)

    def finished(self, fit: Fit) -> None:
        """``learn`` calls it with the fit: the verdict in words, settings and results as a row of the table."""
        self._ended(fit.trace[-1] if fit.trace else None)
        self._writer.add_text("verdict", fit.status.sentence, self._count)
        results = {name: fit.stats[name] for name in RESULTS if name in fit.stats}
        self.row(fit.settings, {**results, "ok": fit.status.ok})

    def row(self, settings: Mapping[str, Any], results: Mapping[str, Any], name: str = ".") -> None:
        """Settings and what came of them, as a row of the table of hyperparameters; ``name``: of a folder for it,
        where one folder has many rows."""
        told = {key: value if isinstance(value, (bool, int, float, str)) else str(value)
                for key, value in settings.items() if value is not None}
        numbers = {f"result/{key}": float(value) for key, value in results.items()
                   if isinstance(value, (bool, int, float)) and math.isfinite(value)}
        self._writer.add_hparams(told, numbers, run_name=name, global_step=self._count)
        self._writer.flush()

    def curve(self, name: str, values: Any, steps: Any = None) -> None:
        """A column of numbers, one to a step."""
        values = list(values)
        for step, value in zip(range(len(values)) if steps is None else steps, values, strict=True):
            if math.isfinite(value):
                self._writer.add_scalar(name, value, int(step))
        self._writer.flush()

    def within(self, name: str) -> TensorBoard:
        """A run of its own in a folder inside this one."""
        return TensorBoard(self.folder / name)

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def memory() -> dict[str, float]:
    """The most that this process held so far, MiB, on the host and on a GPU."""
    return {where: held / 2**20 for where, held in peak().items()}


def _writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        checks.refuse("TensorBoard", "the package tensorboard", "none installed",
                      "pip install 'headway[tensorboard]'")
    return SummaryWriter(str(folder), flush_secs=WRITTEN)
