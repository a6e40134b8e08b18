"""Rows y_a of a stream of examples (X, Y): what every phase is given, and the best rows by a score.

Examples pass by in batches and are never all held: a phase reads them once and keeps a reservoir of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.linalg.projected import Rows
from headway.sculpting.thresholds import Thresholds

Batches = Callable[[], Iterable[Rows]]


@dataclass(frozen=True)
class Given:
    """What phases 2 to 5 share: ``count`` sequences of ``length`` tokens (k) of ``width`` features (d)."""

    batches: Batches
    heads: int  # m
    at: Thresholds
    count: int
    length: int
    width: int
    report: Callable[[float | None], None] | None = None

    @property
    def rows(self) -> int:
        return self.count * self.length

    def stream(self) -> Iterator[Rows]:
        """All batches in order; ``report`` hears of each when it is done with."""
        for rows in self.batches():
            yield rows
            if self.report is not None:
                self.report(None)

    def leave_out(self, score: Tensor, X: Tensor) -> Tensor:
        """The scores (n, k), inf where two tokens of a sequence are equal, unless such sequences are wanted."""
        return score if self.at.equal_tokens else torch.where(told_apart(X)[:, None], score, torch.inf)


class Reservoir:
    """The ``size`` rows of least score in a stream."""

    def __init__(self, size: int) -> None:
        self.size, self.threshold, self.held = size, math.inf, 0
        self.parts: list[dict[str, Tensor]] = []

    def add(self, score: Tensor, **row: Tensor) -> None:
        good = score < self.threshold
        self.parts.append({"score": score[good], **{name: part[good] for name, part in row.items()}})
        self.held += int(good.sum())
        if self.held > 2 * self.size:
            self._settle()

    def _settle(self) -> None:
        whole = {name: torch.cat([part[name] for part in self.parts]) for name in self.parts[0]}
        if self.held > self.size:
            best = torch.topk(whole["score"], self.size, largest=False).indices
            whole = {name: part[best] for name, part in whole.items()}
            self.threshold = float(whole["score"].max())
            self.held = self.size
        self.parts = [whole]

    def rows(self) -> dict[str, Tensor]:
        self._settle()
        return self.parts[0]


def told_apart(X: Tensor) -> Tensor:
    """Whether all tokens of a sequence differ, (n,). Two equal tokens tell ΣW_i however the heads look at them: at
    small d the examples would give it away, at large d they never occur."""
    k = X.shape[1]
    near = torch.cdist(X, X) + torch.eye(k, dtype=X.dtype, device=X.device)
    return near.flatten(1).min(1).values > 1e-3


def thin(values: Tensor) -> Tensor:
    """At most a million of the values, evenly spread: torch.quantile takes no more."""
    return values[:: max(1, math.ceil(len(values) / 1_000_000))]


def arbitrary(rows: Tensor) -> Tensor:
    """With one head every row is as good as another: keep an arbitrary, reproducible part."""
    index = torch.arange(rows.shape[0] * rows.shape[1], device=rows.device, dtype=torch.float64)
    return ((index * 0.6180339887) % 1.0).view(rows.shape[:2]).to(rows)


def least_squares(F: Tensor, Y: Tensor) -> Tensor:
    G, right = F.T @ F, F.T @ Y
    ridge = 1e-12 * G.diagonal().mean() * torch.eye(len(G), dtype=G.dtype, device=G.device)
    solution, info = torch.linalg.solve_ex(G + ridge, right)
    if int(info):
        # Where patterns put all weight on one token, the rows chosen may not span all directions.
        solution = torch.linalg.pinv(G, rtol=1e-12, hermitian=True) @ right
    found: Tensor = solution
    return found
