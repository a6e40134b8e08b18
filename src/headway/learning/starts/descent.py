"""min over (A, B, V, O, c) of E‖Y − Σ_i softmax(X̃A_iB_iᵀXᵀ) X V_iO_i − 1cᵀ‖² by Adam: heads as people train them.

The unknowns are thin factors in plain coordinates: tokens centred and divided by one number, never whitened
(whitened coordinates and full Θ_i are what makes Adam slow). There are more heads than needed, so that none is
missed; spare ones end up empty or as copies and are taken away afterwards (prune.py). It serves where moments do
not: inputs that are far from white, few sequences, saturated heads, masks.

A step costs about 24·d·m·q flops a row. On a GPU it is captured once as a graph and replayed: launching its kernels
one by one takes five times as long as running them.

The rate is held, after a short rise, until the error on other sequences is small or no longer falls, and then
lowered to zero over half as many steps again, so that nobody has to know in advance how many are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from headway.core.devices import fast_products
from headway.learning.gauss_newton import OutOfTimeError
from headway.learning.source import Frame, Source, spaced
from headway.learning.thin import Thin

RISE = 100  # steps over which the rate rises to its value
LOOK = 100  # steps between two looks at other sequences
STEPS = 6000  # at most
TARGET = 0.1  # relative error on other sequences at which a refinement is in its basin
FALLS = 0.97  # part of the least error so far that a look must find at most, or it has not fallen
BY_HEART = 0.7  # part of the error on others below which the error on a batch says that rows are learned by heart
HEART_WAITS, WAITS = 5, 10  # looks without a lesser error until it ends, where rows are learned by heart and else
ENDS = 3  # looks at least while the rate is lowered to zero
WIDE = 128  # width from which the rate is lower and a batch larger
SMALL = 32  # width up to which projections of full rank cost little
ROWS = {"cuda": 16_384, "cpu": 2_048}  # of a batch
Model = Callable[[Tensor, Sequence[Tensor], Tensor | None], Tensor]  # F(X) from X, the unknowns and what is seen


@dataclass(frozen=True)
class Factors:
    """Θ_i = A_iB_iᵀ with A (m, d + 1, q), the last row a query bias, B (m, d, q); W_i = V_iO_i; offset c."""

    A: Tensor
    B: Tensor
    V: Tensor
    O: Tensor  # noqa: E741 - the paper's letter
    offset: Tensor

    @property
    def Theta(self) -> Tensor:
        return self.A @ self.B.mT

    @property
    def W(self) -> Tensor:
        return self.V @ self.O

    def parts(self) -> list[Tensor]:
        return [self.A, self.B, self.V, self.O, self.offset]

    def keep(self, heads: Tensor) -> Self:
        return replace(self, A=self.A[heads], B=self.B[heads], V=self.V[heads], O=self.O[heads])


@dataclass(frozen=True)
class Table:
    """Sequences on one device: X (n, k, d), Y (n, k, e), what is seen (1 or n, k, k), which rows count."""

    X: Tensor
    Y: Tensor
    see: Tensor | None = None
    valid: Tensor | None = None

    def pick(self, index: Tensor) -> Table:
        see = self.see if self.see is None or self.see.shape[0] == 1 else self.see[index]
        return Table(self.X[index], self.Y[index], see, None if self.valid is None else self.valid[index])

    def mean_square(self, R: Tensor) -> Tensor:
        if self.valid is None:
            return R.square().mean()
        return (R * self.valid).square().sum() / (self.valid.sum() * R.shape[2]).clamp_min(1)

    @property
    def rows(self) -> int:
        """Rows that count."""
        return self.Y.shape[0] * self.Y.shape[1] if self.valid is None else int(self.valid.sum())

    def spread(self) -> float:
        """Mean square of the labels about their mean: what a constant would leave."""
        Y = self.Y.flatten(0, 1) if self.valid is None else self.Y[self.valid.squeeze(2) > 0]
        return float((Y.double() - Y.double().mean(0)).square().mean())

    @torch.no_grad()
    def error(self, model: Model, values: Sequence[Tensor], sequences: int = 512) -> float:
        """Mean square error of a model, in pieces that fit."""
        total = 0.0
        for at in torch.split(torch.arange(len(self.X), device=self.X.device), sequences):
            part = self.pick(at)
            total += part.rows * float(part.mean_square(model(part.X, values, part.see) - part.Y))
        return total / self.rows


def random_factors(
    heads: int, width: int, out_width: int, size: int, out_size: int, generator: torch.Generator,
    device: torch.device,
) -> Factors:
    """Scores and outputs of about unit size for tokens with unit entries."""
    m, d, e, q, p = heads, width, out_width, size, out_size

    def normal(*shape: int, scale: float) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(device)

    root = q**-0.25 * d**-0.5
    A = normal(m, d + 1, q, scale=root)
    A[:, d] = 0.0
    return Factors(A, normal(m, d, q, scale=root), normal(m, d, p, scale=d**-0.5),
                   normal(m, p, e, scale=(m * p) ** -0.5), torch.zeros(e, device=device))


def predict(X: Tensor, f: Factors, see: Tensor | None) -> Tensor:
    """F(X) from factors; every product is over all heads at once."""
    (n, k, d), (m, _, q), p = X.shape, f.A.shape, f.V.shape[2]

    def apart(Z: Tensor, size: int) -> Tensor:
        return Z.view(n, k, m, size).transpose(1, 2)

    def joined(part: Tensor) -> Tensor:
        return part.transpose(0, 1).reshape(d, -1)

    Q = apart(X @ joined(f.A[:, :d]) + f.A[:, d].reshape(-1), q)
    S = Q @ apart(X @ joined(f.B), q).mT
    if see is not None:
        S = S.masked_fill(~see.unsqueeze(1), float("-inf"))
    H = torch.softmax(S, dim=3) @ apart(X @ joined(f.V), p)
    return H.transpose(1, 2).reshape(n, k, m * p) @ f.O.reshape(m * p, -1) + f.offset


@dataclass(frozen=True)
class Descended:
    factors: Factors
    error: float  # relative, on the sequences looked at
    fitted: float  # relative, on the last batch
    steps: int
    reason: str  # target, flat, by heart, limit, time, diverged
    curve: tuple[tuple[int, float, float], ...]  # step, error on a batch, error on others


def descend(
    fit: Table, select: Table, begin: Factors, *, generator: torch.Generator, rate: float = 2e-3,
    decay: float = 0.0,
    limit: int = 20_000, target: float = TARGET, rows: int | None = None,
    report: Callable[[float], None] | None = None,
) -> Descended:
    """Adam on random batches of ``fit`` until the relative error on ``select`` is below ``target`` or no longer
    falls, be it that the heads are not found or that rows are learned by heart."""
    device = fit.X.device
    k = fit.X.shape[1]
    size = min(len(fit.X), max(8, (rows or ROWS.get(device.type, ROWS["cpu"])) // k))
    spread, spread_fit = select.spread(), fit.spread()
    step = Step(fit, _model, begin.parts(), size, generator, decay=decay)
    curve: list[tuple[int, float, float]] = []
    best, best_at, ending, done, reason = math.inf, 0, 0, 0, "limit"
    begun_at = 0
    while done < limit:
        if ending:
            left = 1 - (done - begun_at) / ending
            if left <= 0:
                break
            step.rate(rate * left)
        else:
            step.rate(rate * min(1.0, (done + 1) / RISE))
        step.make()
        done += 1
        if done % LOOK:
            continue
        error = math.sqrt(select.error(_model, step.values) / spread)
        batch = math.sqrt(step.loss() / spread_fit)
        curve.append((done, batch, error))
        try:
            if report is not None:
                report(error)
        except OutOfTimeError:
            reason = "time"
            break
        if not math.isfinite(error):
            reason = "diverged"
            break
        if ending:
            continue
        if error < FALLS * best:
            best, best_at = error, done
        if error < target:
            reason = "target"
        elif batch < BY_HEART * error and done - best_at >= max(HEART_WAITS * LOOK, done // 3):
            reason = "by heart"
        elif done - best_at >= max(WAITS * LOOK, done // 2):
            reason = "flat"
        else:
            continue
        ending, begun_at = max(ENDS * LOOK, done // 2 // LOOK * LOOK), done
    error = math.sqrt(select.error(_model, step.values) / spread)
    return Descended(Factors(*step.now()), error, math.sqrt(step.loss() / spread_fit), done, reason, tuple(curve))


def _model(X: Tensor, values: Sequence[Tensor], see: Tensor | None) -> Tensor:
    return predict(X, Factors(*values), see)


class Step:
    """One step of Adam on a random batch, in the precision of the table; on a GPU a captured graph, with ``fast``
    products in TF32."""

    def __init__(
        self, table: Table, model: Model, begin: Sequence[Tensor], size: int, generator: torch.Generator, *,
        decay: float = 0.0, fast: bool = True,
    ) -> None:
        self.table, self.model, self.size, self.generator = table, model, size, generator
        self.values = [part.detach().clone().to(table.X).requires_grad_() for part in begin]
        device = table.X.device
        captured = device.type == "cuda"
        eps = 1e-8 if table.X.dtype == torch.float32 else 1e-20  # below the gradients at the floor
        self.index = torch.zeros(size, dtype=torch.long, device=device)
        self.speed = torch.zeros((), device=device)
        self.last = torch.zeros((), device=device)
        self.adam = torch.optim.AdamW(self.values, lr=self.speed if captured else 0.0, betas=(0.9, 0.99),
                                      eps=eps, weight_decay=decay, capturable=captured,
                                      fused=None if captured else True)
        self.order = torch.empty(0, dtype=torch.long)
        self.graph: torch.cuda.CUDAGraph | None = None
        if captured:
            self._capture(fast)

    def now(self) -> list[Tensor]:
        """The unknowns as they are, apart from those that further steps change."""
        return [value.detach().clone() for value in self.values]

    def rate(self, value: float) -> None:
        if self.graph is None:
            self.adam.param_groups[0]["lr"] = value
        else:
            self.speed.fill_(value)

    def loss(self) -> float:
        return float(self.last)

    def make(self) -> None:
        if len(self.order) < self.size:  # a pass without replacement: every sequence is met as often as any other
            self.order = torch.randperm(len(self.table.X), generator=self.generator)
            self.order = self.order.to(self.index.device)
        self.index.copy_(self.order[: self.size])
        self.order = self.order[self.size :]
        if self.graph is None:
            self._once()
        else:
            self.graph.replay()

    def _once(self) -> None:
        part = self.table.pick(self.index)
        for value in self.values:
            value.grad = None
        loss = part.mean_square(self.model(part.X, self.values, part.see) - part.Y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.adam.step()
        self.last.copy_(loss.detach())

    def _capture(self, fast: bool) -> None:
        """Three steps to settle what is allocated, taken back, then one that is recorded. Their rate is not zero:
        Adam divides by it."""
        begin = self.now()
        self.speed.fill_(1e-12)
        with fast_products(self.index.device, fast):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._once()
            torch.cuda.current_stream().wait_stream(side)
            for state in self.adam.state.values():
                for part in state.values():
                    part.zero_()
            with torch.no_grad():
                for value, was in zip(self.values, begin, strict=True):
                    value.copy_(was)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._once()


def descended(
    source: Source, heads: int, q: int, p: int, decay: float, generator: torch.Generator,
    report: Callable[[float], None] | None = None,
) -> Descended:
    """From random factors, with the settings that serve a layer of this width on this device."""
    fit, select = tables(source)
    begin = random_factors(heads, source.examples.width, source.examples.out_width, q, p, generator, source.device)
    wide = source.d >= WIDE
    return descend(fit, select, begin, generator=generator, rate=2e-3 if wide else 4e-3, decay=decay,
                   rows=None if wide or source.device.type == "cuda" else 512, limit=STEPS, report=report)


def tables(source: Source, most: int | None = None) -> tuple[Table, Table]:
    """Sequences to fit and to look at, in plain coordinates: centred, divided by one number."""
    assert source.frame is not None
    plain = source.seen_through(source.frame.unwhitened())
    count = min(len(source.fit), source.most(), most or len(source.fit))
    return (table_of(plain, spaced(source.fit, count)),
            table_of(plain, spaced(source.select, min(len(source.select), 1000))))


def table_of(source: Source, index: np.ndarray, dtype: torch.dtype = torch.float32) -> Table:
    """These sequences in one piece, in the coordinates of the source."""
    parts = list(source.stream(index, 1, dtype))
    see = parts[0].see
    if see is not None and see.shape[0] > 1:
        see = torch.cat([part.see for part in parts if part.see is not None])
    valid = None if parts[0].valid is None else torch.cat([part.valid for part in parts if part.valid is not None])
    return Table(torch.cat([part.X for part in parts]), torch.cat([part.Y for part in parts]), see, valid)


def whitened(factors: Factors, frame: Frame) -> Thin:
    """The same heads in working coordinates: z_plain = Tz, T = L/s."""
    T = frame.unwhitened().back @ frame.out
    d = factors.B.shape[1]
    A, B, V = (part.to(T) for part in (factors.A, factors.B, factors.V))
    return Thin.joined(torch.cat([T.mT @ A[:, :d], A[:, d:]], dim=1), T.mT @ B, T.mT @ V)
