"""What was asked of a black box so far and what it was for, and the examples that makes for a learner."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headway.core.examples import Examples
from headway.core.oracle import Asking
from headway.learning.loop import Asked, Loop, Progress
from headway.learning.source import Split
from headway.runs.store import Run

EXACT = 1e-11  # noise above which answers are taken to be noisy: more sequences are kept for choosing and judging
NOISY = 30.0  # times the noise of answers that a fit may leave


@dataclass
class Conversation:
    """A black box asked, the settings of ``learn``, and what is known of the answers."""

    asking: Asking
    draw: torch.Generator
    asked: Asked
    device: torch.device | str | None
    run: Run | None
    progress: Progress | None
    noise: float = 0.0  # of an answer, relative to its spread
    scale: float = 1.0  # of tokens of which scores are of order one
    heads: int | None = None  # told, or counted
    free: list[int] = field(default_factory=list)  # places of sequences drawn at random
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def d(self) -> int:
        return self.asking.oracle.width

    @property
    def e(self) -> int:
        """Outputs; as many as inputs before anything was answered."""
        return self.asking.Y[0].shape[-1] if self.asking.Y else self.d

    @property
    def k(self) -> int:
        return self.asking.oracle.length

    @property
    def noisy(self) -> bool:
        return self.noise > EXACT

    @property
    def allowed(self) -> float:
        """What a fit may leave of noisy answers."""
        return NOISY * self.noise

    def normal(self, *size: int) -> Tensor:
        drawn = torch.randn(*size, generator=self.draw, dtype=torch.float64)
        return drawn.to(self.asking.oracle.box.device)

    def random(self, n: int) -> list[int]:
        """Ask n sequences drawn at random; their places."""
        before = self.asking.calls
        self.asking(self.scale * self.normal(n, self.k, self.d))
        places = list(range(before, self.asking.calls))
        self.free += places
        return places

    def stage(self, name: str, why: str, heads: int = 0) -> _Stage:
        return _Stage(self, name, why, heads)

    def loop(self, examples: Examples, heads: int | None, parts: Split | None) -> Loop:
        """A learner of these examples, the questions in its trace."""
        loop = Loop(examples, replace(self.asked, heads=heads), self.device, self.run, self.progress, parts=parts)
        loop.trace[:0] = self.events
        return loop


class _Stage:
    """A stage of asking, as the trace and the progress know stages."""

    def __init__(self, talk: Conversation, name: str, why: str, heads: int) -> None:
        self.talk, self.name, self.why, self.heads = talk, name, why, heads

    def __enter__(self) -> dict[str, Any]:
        self.begun, self.before = time.perf_counter(), self.talk.asking.calls
        self.found: dict[str, Any] = {}
        if self.talk.progress is not None:
            before = {"before": self.talk.events[-1]} if self.talk.events else {}
            self.talk.progress({"stage": self.name, "heads": self.heads, "why": self.why, "residual": None,
                                **before})
        return self.found

    def __exit__(self, *_: object) -> None:
        asked = self.talk.asking.calls - self.before
        self.talk.events.append({"stage": self.name, "why": self.why, "calls": asked, **self.found,
                                 "seconds": time.perf_counter() - self.begun})
