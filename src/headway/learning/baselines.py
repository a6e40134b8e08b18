"""Adam and L-BFGS from a random start: what people do today, kept as the baselines.

min over (Θ, u, W, c) of E‖Y − F(X)‖². Settings are chosen in bench/adam_tuning.py and bench/baselines.py, on seeds
that no comparison uses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from headway.core import attention
from headway.learning.candidate import Candidate
from headway.learning.source import Source, spaced

Report = Callable[[float], None]


class _Batch:
    """All working rows in one piece, in one precision."""

    def __init__(self, source: Source, sequences: int, heads: int, dtype: torch.dtype) -> None:
        problem = source.problem(spaced(source.fit, sequences), heads, dtype)
        chunks = problem.chunks
        self.X, self.Y = (torch.cat([getattr(c, name) for c in chunks]) for name in ("X", "Y"))
        self.see = chunks[0].see
        if self.see is not None and chunks[0].valid is not None:
            self.see = torch.cat([c.see for c in chunks if c.see is not None])
        self.valid = None
        if chunks[0].valid is not None:
            self.valid = torch.cat([c.valid for c in chunks if c.valid is not None])
        self.equations = problem.equations
        self.spread = problem.variation() / problem.equations

    def loss(self, parameters: list[Tensor], pick: Tensor | slice) -> Tensor:
        """Mean square over the sequences picked."""
        see = self.see if self.see is None or self.see.shape[0] == 1 else self.see[pick]
        R = attention.forward(self.X[pick], parameters[0], parameters[1], parameters[2], see) - self.Y[pick]
        if self.valid is None:
            return R.square().mean()
        valid = self.valid[pick]
        return (R * valid).square().sum() / (valid.sum() * R.shape[2])


def _start(source: Source, heads: int, scale: float, dtype: torch.dtype, seed: torch.Generator) -> list[Tensor]:
    d, e = source.d, source.examples.out_width
    Theta = scale / d * torch.randn(heads, d + 1, d, generator=seed)
    W = torch.randn(heads, d, e, generator=seed) / math.sqrt(d * heads)
    return [t.to(source.device, dtype).requires_grad_() for t in (Theta, W, torch.zeros(e))]


def descend(
    source: Source,
    heads: int,
    *,
    seed: torch.Generator,
    steps: int = 3000,
    batch: int = 64,
    rate: float = 3e-3,
    target: float = 0.0,
    seconds: float | None = None,
    report: Report | None = None,
) -> Candidate:
    """Adam on minibatches of the fitted sequences, in float32.

    ``rate`` falls along a half cosine to zero over ``steps``, or over ``seconds`` where they are given: the whole
    budget is used, whatever a step costs. With ``target`` the held-out error is looked at every 100 steps and the
    run ends when it is below.
    """
    rows = _Batch(source, min(len(source.fit), source.most()), heads, torch.float32)
    parameters = _start(source, heads, 0.5, torch.float32, seed)
    adam = torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.99))
    size = min(batch, len(source.fit))
    begun, done = time.perf_counter(), 0
    while True:
        part = done / steps if seconds is None else (time.perf_counter() - begun) / seconds
        if part >= 1:
            break
        adam.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * part))
        pick = torch.randint(len(rows.X), (size,), generator=seed).to(source.device)
        loss = rows.loss(parameters, pick)
        adam.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        done += 1
        if done % 100 == 0:
            error = math.sqrt(float(loss.detach()) / rows.spread)
            if report is not None:
                report(error)
            if error < 2 * target and source.error(source.select, *_plain(parameters)) <= target:
                break
    return _finished(source, parameters, rows, "limit", 2 * done)


def lbfgs(
    source: Source,
    heads: int,
    *,
    seed: torch.Generator,
    sequences: int,
    seconds: float | None = None,
    steps: int = 2000,
    history: int = 20,
    scale: float = 0.5,
    starts: int = 4,
    target: float = 1e-7,
    report: Report | None = None,
) -> Candidate:
    """L-BFGS with a strong Wolfe line search on ``sequences`` sequences at once, in float64, from random starts
    until one reaches ``target`` on them, ``starts`` are used up or the ``seconds`` are; the best on held-out ones
    counts.
    """
    most = min(len(source.fit), source.most())
    sequences = min(sequences, most)
    rows = _Batch(source, sequences, heads, torch.float64)
    begun, done = time.perf_counter(), 0
    best: tuple[float, list[Tensor]] | None = None
    everything = slice(None)

    def late() -> bool:
        return seconds is not None and time.perf_counter() - begun >= seconds

    for j in range(starts if seconds is None else 10**6):
        if j and late():
            break
        parameters = _start(source, heads, scale, torch.float64, seed)
        solver = torch.optim.LBFGS(parameters, max_iter=20, history_size=history, line_search_fn="strong_wolfe",
                                   tolerance_change=1e-14, tolerance_grad=1e-14)

        def closure(
            parameters: list[Tensor] = parameters, solver: torch.optim.LBFGS = solver, rows: _Batch = rows
        ) -> Tensor:
            nonlocal done
            done += 1
            solver.zero_grad(set_to_none=True)
            loss = rows.loss(parameters, everything)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        last = math.inf
        for _ in range(math.ceil(steps / 20)):
            loss = solver.step(closure)  # type: ignore[no-untyped-call]
            error = math.sqrt(float(loss.detach()) / rows.spread)
            if report is not None:
                report(error)
            if error <= target or not error < 0.999 * last or late():
                break
            last = error
        found = _plain(parameters)
        held = source.error(source.select, *found)
        if best is None or not best[0] <= held:
            best = held, found
        if held <= 10 * target:
            break
        if error < 0.05 and held > 0.5 and sequences < most:  # met by rote: more rows
            sequences = min(4 * sequences, most)
            rows = _Batch(source, sequences, heads, torch.float64)
    assert best is not None
    return _finished(source, best[1], rows, "limit", 2 * done)


def _plain(parameters: list[Tensor]) -> list[Tensor]:
    return [p.detach().double() for p in parameters]


def _finished(source: Source, parameters: list[Tensor], rows: _Batch, reason: str, products: int) -> Candidate:
    Theta, W, offset = _plain(parameters)
    held = source.error(source.select, Theta, W, offset)
    with torch.no_grad():
        same = [p.detach() for p in parameters]
        size = max(1, 1 << 22 >> max(1, (rows.X.shape[1] * Theta.shape[0]).bit_length()))
        parts = [slice(i, i + size) for i in range(0, len(rows.X), size)]
        weights = [len(rows.X[part]) if rows.valid is None else float(rows.valid[part].sum()) for part in parts]
        total = sum(w * float(rows.loss([p.to(rows.X) for p in same], part)) for w, part in zip(
            weights, parts, strict=True))
    fitted = math.sqrt(total / sum(weights) / rows.spread)
    return Candidate(Theta, W, offset, fitted, held, reason, len(rows.X), rows.equations, None, products)
