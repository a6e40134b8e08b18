"""Adam and L-BFGS from a random start: what people do today, as strong as we can make it.

min over the unknowns of E‖Y − F(X)‖². Adam searches Θ_i and W_i themselves, or thin factors Θ_i = A_iB_iᵀ and
W_i = V_iO_i where the size of the heads is told; L-BFGS the former. Settings are chosen in bench/adam_tuning.py and
bench/baselines.py, on seeds that no comparison uses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core import attention
from headway.core.examples import Examples
from headway.learning.candidate import Candidate
from headway.learning.source import Frame, Source, spaced
from headway.learning.starts.batches import Batches, Table, table_of
from headway.learning.starts.descent import SMALL, Factors, Step, predict, random_factors

Report = Callable[[float], None]
Watch = Callable[[Tensor, Tensor, Tensor], bool]  # shown Θ, W and c; whether that is enough
LOOK = 50  # steps between two reports
HOLD = 0.15  # part of the budget before an exponential fall begins
RATE = 1e-2  # up to width 32; wider layers want less
ROWS = {"cuda": 16_384, "cpu": 1024}  # of a batch


@dataclass(frozen=True)
class Setting:
    """How Adam runs. The rate rises over ``warm`` steps and falls along a half cosine to zero; with ``last`` it is
    held and then falls exponentially to that part of itself, which reaches more digits and, in float32, none that
    count. ``white``: in whitened coordinates, else in plain ones (centred, divided by one number)."""

    rate: float | None = None  # None: by the width
    steps: int = 3000
    rows: int | None = None  # of a batch; None: by the device
    warm: int = 100
    last: float = 0.0
    dtype: torch.dtype = torch.float32
    fast: bool = True  # products in TF32 or bfloat16, where the device has them
    white: bool = False

    def rate_at(self, part: float, step: int, width: int) -> float:
        """The rate when ``part`` of the budget is spent and ``step`` steps are made."""
        top = RATE * min(1.0, math.sqrt(32 / width)) if self.rate is None else self.rate
        top *= min(1.0, (step + 1) / max(self.warm, 1))
        if not self.last:
            return top * 0.5 * (1 + math.cos(math.pi * part))
        return top * math.exp(math.log(self.last) * max(0.0, part - HOLD) / (1 - HOLD))


TUNED = Setting()


def adam(
    source: Source,
    heads: int,
    setting: Setting = TUNED,
    *,
    seed: torch.Generator,
    size: int | None = None,
    out_size: int | None = None,
    seconds: float | None = None,
    report: Report | None = None,
    watch: Watch | None = None,
) -> Candidate:
    """Adam on random batches of the fitted sequences; on a GPU every step is one captured graph.

    ``size`` is the number of columns of A_i and B_i, ``out_size`` that of V_i; without them Θ_i and W_i are
    searched whole, which is faster where heads have full rank. The rate ends with ``setting.steps``, or with
    ``seconds`` where they are given: the whole budget is used, whatever a step costs. ``watch`` is shown (Θ, W, c)
    in working coordinates every 50 steps and ends the run with True.
    """
    assert source.frame is not None
    own = source.frame
    frame = own if setting.white else own.unwhitened()
    index = spaced(source.fit, min(len(source.fit), source.most()))
    table = table_of(source.seen_through(frame), index, setting.dtype)
    begin = _unknowns(heads, table, size, out_size, seed)
    (_, k, d), device = table.X.shape, table.X.device
    batch = min(len(table.X), max(8, (setting.rows or ROWS.get(device.type, ROWS["cpu"])) // k))
    step = Step(Batches(table, batch, seed), _model, begin, fast=setting.fast)
    spread = table.spread()

    def working() -> tuple[Tensor, Tensor, Tensor]:
        return _working(_merged([value.double() for value in step.now()]), own, frame)

    begun, done = time.perf_counter(), 0
    while True:
        part = done / setting.steps if seconds is None else (time.perf_counter() - begun) / seconds
        if part >= 1:
            break
        step.rate(setting.rate_at(part, done, d))
        step.make()
        done += 1
        if done % LOOK:
            continue
        error = math.sqrt(step.loss() / spread)
        if report is not None:
            report(error)
        if watch is not None and watch(*working()):
            break
    fitted = math.sqrt(table.error(_model, step.now()) / spread)
    return _finished(source, working(), fitted, table, 2 * done, size)


def sizes(examples: Examples, rank: int | str | None) -> tuple[int | None, int | None]:
    """``size`` and ``out_size`` for heads of this rank. Trained heads are as thin in W_i as in Θ_i; where a whole
    W_i costs little, that is not presumed."""
    d, e = examples.width, examples.out_width
    if not isinstance(rank, int) or rank >= d:
        return None, None
    return rank, rank if d > SMALL and rank < e else None


def _unknowns(
    heads: int, table: Table, size: int | None, out_size: int | None, seed: torch.Generator
) -> list[Tensor]:
    """(Θ, W, c); with ``size`` (A, B, W, c); with ``out_size`` too (A, B, V, O, c)."""
    d, e = table.X.shape[2], table.Y.shape[2]
    Theta, W, c = _whole(heads, d, e, 0.5, seed)
    if size is None:
        return [part.to(table.X) for part in (Theta, W, c)]
    thin = random_factors(heads, d, e, size, out_size or 1, seed, table.X.device)
    return [part.to(table.X) for part in ((thin.A, thin.B, W, c) if out_size is None else thin.parts())]


def _whole(heads: int, d: int, e: int, scale: float, seed: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    Theta = scale / d * torch.randn(heads, d + 1, d, generator=seed)
    W = torch.randn(heads, d, e, generator=seed) / math.sqrt(d * heads)
    return Theta, W, torch.zeros(e)


def _merged(values: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(Θ, W, c) from the unknowns, whichever they are."""
    *parts, c = values
    if len(parts) == 2:
        return parts[0], parts[1], c
    return parts[0] @ parts[1].mT, parts[2] if len(parts) == 3 else parts[2] @ parts[3], c


def _model(X: Tensor, values: Sequence[Tensor], see: Tensor | None) -> Tensor:
    """F(X). Products of thin factors are formed first where W_i is whole: its features cost as much anyway."""
    if len(values) == 5:
        return predict(X, Factors(*values), see)
    return attention.forward(X, *_merged(values), see)


def _working(
    heads: tuple[Tensor, Tensor, Tensor], frame: Frame, given: Frame
) -> tuple[Tensor, Tensor, Tensor]:
    """Heads found in the coordinates of ``given`` in those of ``frame``, which has the same centre."""
    Theta, W, c = heads
    if given is frame:
        return heads
    T = given.back @ frame.out
    Theta = torch.cat([T.mT @ Theta[:, :-1], Theta[:, -1:]], dim=1) @ T
    return Theta, T.mT @ W, c


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
    table = table_of(source, spaced(source.fit, sequences), torch.float64)
    begun, done = time.perf_counter(), 0
    best: tuple[float, list[Tensor]] | None = None

    def late() -> bool:
        return seconds is not None and time.perf_counter() - begun >= seconds

    for j in range(starts if seconds is None else 10**6):
        if j and late():
            break
        parameters = [part.to(table.X).requires_grad_() for part in _whole(
            heads, source.d, table.Y.shape[2], scale, seed)]
        solver = torch.optim.LBFGS(parameters, max_iter=20, history_size=history, line_search_fn="strong_wolfe",
                                   tolerance_change=1e-14, tolerance_grad=1e-14)

        def closure(
            parameters: list[Tensor] = parameters, solver: torch.optim.LBFGS = solver, table: Table = table
        ) -> Tensor:
            nonlocal done
            done += 1
            solver.zero_grad(set_to_none=True)
            loss = table.mean_square(_model(table.X, parameters, table.see) - table.Y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        last, spread = math.inf, table.spread()
        for _ in range(math.ceil(steps / 20)):
            loss = solver.step(closure)  # type: ignore[no-untyped-call]
            error = math.sqrt(float(loss.detach()) / spread)
            if report is not None:
                report(error)
            if error <= target or not error < 0.999 * last or late():
                break
            last = error
        found = [part.detach() for part in parameters]
        held = source.error(source.select, *found)
        if best is None or not best[0] <= held:
            best = held, found
        if held <= 10 * target:
            break
        if error < 0.05 and held > 0.5 and sequences < most:  # learned by heart: more rows
            sequences = min(4 * sequences, most)
            table = table_of(source, spaced(source.fit, sequences), torch.float64)
    assert best is not None
    fitted = math.sqrt(table.error(_model, best[1]) / table.spread())
    return _finished(source, _merged(best[1]), fitted, table, 2 * done)


def _finished(
    source: Source, heads: tuple[Tensor, Tensor, Tensor], fitted: float, table: Table, products: int,
    rank: int | None = None,
) -> Candidate:
    held = source.error(source.select, *heads)
    return Candidate(*heads, fitted, held, "limit", len(table.X), table.rows * table.Y.shape[2], rank, products)
