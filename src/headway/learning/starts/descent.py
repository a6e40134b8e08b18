"""min over (A, B, V, O, c) of E‖Y − Σ_i softmax(X̃A_iB_iᵀXᵀ) X V_iO_i − 1cᵀ‖² by Adam: heads as people train them.

The unknowns are thin factors in plain coordinates: tokens centred and divided by one number, never whitened
(whitened coordinates and full Θ_i are what makes Adam slow). There are more heads than needed, so that none is
missed; spare ones end up empty or as copies and are taken away afterwards (prune.py). It serves where moments do
not: inputs that are far from white, few sequences, saturated heads, masks.

A step costs about 24·d·m·q flops a row. On a GPU it is captured once as a graph and replayed: launching its kernels
one by one takes five times as long as running them.

The rate is held, after a short rise, until the error on other sequences is small or no longer falls, and then
lowered to zero over half as many steps again, so that nobody has to know in advance how many are needed. Steps on
small batches leave an error of their own, which looks like that of a head still missing: where the error is not far
from small and stays, half the rate is tried. If it falls then, all heads are there and the end begins; if not, the
whole rate goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from headway.core.devices import FULL, fast_products
from headway.learning.gauss_newton import OutOfTimeError
from headway.learning.parts import Parted, own_of
from headway.learning.snapshots import NONE, Snapshot
from headway.learning.source import Frame, Source, bytes_of, spaced
from headway.learning.starts.batches import (
    LOOKED,
    MET,
    Batches,
    FedBatches,
    Feed,
    Model,
    Reader,
    SplitBatches,
    Table,
    feed_of,
    table_of,
)
from headway.linalg.thin import Thin
from headway.linalg.totals import ALONE, Alone
from headway.runs.store import Stage

RISE = 100  # steps over which the rate rises to its value
GRAIN = 10  # steps between two looks at the clock for a snapshot
PLACE = ("best", "best_at", "ending", "begun_at", "done", "spread_fit", "lowered", "part")  # in a snapshot
LOOK = 100  # steps between two looks at other sequences
STEPS = 6000  # at most
SELECT = 1000  # other sequences looked at, at most
TARGET = 0.1  # relative error on other sequences at which a refinement is in its basin
FALLS = 0.97  # part of the least error so far that a look must find at most, or it has not fallen
FOUND = 0.3  # error below which all heads may be found, and what is left is the noise of the steps
CALM, LOWER = 2, 0.5  # looks without a lesser error until that is tried, and the part of the rate with which it is
BY_HEART = 0.7  # part of the error on others below which the error on a batch says that rows are learned by heart
HEART_WAITS, WAITS = 5, 10  # looks without a lesser error until it ends, where rows are learned by heart and else
HELD = 20  # the same where weights are held down: errors first rise
ENDS = 3  # looks at least while the rate is lowered to zero
WIDE = 128  # width from which the rate is lower and a batch larger
SMALL = 32  # width up to which projections of full rank cost little
FEW = 2  # digits of the products in a step
ROWS = {"cuda": 16_384, "cpu": 2_048}  # of a batch


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

    def like(self, parts: Sequence[Tensor]) -> Factors:
        return Factors(*parts)

    @property
    def model(self) -> Model:
        return _model

    def keep(self, heads: Tensor) -> Self:
        return replace(self, A=self.A[heads], B=self.B[heads], V=self.V[heads], O=self.O[heads])


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
    factors: Any  # Factors, or FormFactors of formed_start.py
    error: float  # relative, on the sequences looked at
    fitted: float  # relative, on the last batch
    steps: int
    reason: str  # target, flat, by heart, limit, time, diverged
    sequences: int  # different ones that were held on the way
    asked: int  # of them, those that a black box was asked for
    curve: tuple[tuple[int, float, float], ...]  # step, error on a batch, error on others


def descend(
    fit: Table, select: Table, begin: Any, *, generator: torch.Generator, rate: float = 2e-3,
    decay: float = 0.0,
    limit: int = 20_000, target: float = TARGET, rows: int | None = None, feed: Feed | None = None,
    report: Callable[[float], None] | None = None, batches: Batches | None = None, ranks: Alone = ALONE,
    looked: int = LOOKED, snapshot: Snapshot = NONE, kept: Stage | None = None,
) -> Descended:
    """Adam on random batches of ``fit`` until the relative error on ``select`` is below ``target`` or no longer
    falls, be it that the heads are not found or that rows are learned by heart. What is in ``fit`` is replaced by
    what comes from the ``feed``, where there is one. ``batches``, where ``ranks`` have parts of them: what a rank
    has of each; gradients are then added up, and every rank makes the same steps."""
    spread, spread_fit = select.spread(ranks), fit.spread(ranks)
    if batches is None:
        size = min(len(fit.X), batch_of(fit, rows))
        batches = Batches(fit, size, generator, feed, MET.get(fit.X.device.type, 1))
    model: Model = begin.model
    step = Step(batches, model, begin.parts(), decay=decay, ranks=ranks)
    curve: list[tuple[int, float, float]] = []
    best, best_at, ending, done, reason = math.inf, 0, 0, 0, "limit"
    begun_at, lowered, part = 0, 0, 1.0
    if kept is not None:
        step.restore(kept[0])
        batches.restore(*kept)
        best, best_at, ending, begun_at, done, spread_fit, lowered, part = (kept[1][name] for name in PLACE)
        curve = [(at, fitted, error) for at, fitted, error in kept[1]["curve"]]
    often = isinstance(feed, Reader) or feed is None  # a black box would have to answer once more
    try:
        while done < limit:
            if often and done % GRAIN == 0 and snapshot.due():
                parts, said = batches.state()
                place = dict(zip(PLACE, (best, best_at, ending, begun_at, done, spread_fit, lowered, part),
                                 strict=True))
                snapshot.keep({**step.state(), **parts}, {**said, **place, "curve": curve})
            if ending:
                left = 1 - (done - begun_at) / ending
                if left <= 0:
                    break
                step.rate(rate * part * left)
            else:
                step.rate(rate * part * min(1.0, (done + 1) / RISE))
            step.make()
            done += 1
            if done % LOOK:
                continue
            error = math.sqrt(select.error(model, step.values, looked, ranks) / spread)
            batch = math.sqrt(step.loss() / spread_fit)
            curve.append((done, batch, error))
            if report is not None:
                report(error)
            if not math.isfinite(error):
                reason = "diverged"
                break
            if ending:
                continue
            if error < FALLS * best:
                best, best_at = error, done
            waited = done - best_at
            if part < 1.0 and waited:
                part = 1.0  # smaller steps find no more: a head is missing
            if error < target:
                reason = "target"
            elif part < 1.0:
                reason = "calm"
            elif error < FOUND and waited >= CALM * LOOK and done - lowered >= max(CALM * LOOK, done // 4):
                part, lowered = LOWER, done
                continue
            elif batches.again and batch < BY_HEART * error and waited >= max(HEART_WAITS * LOOK, done // 3):
                reason = "by heart"
            elif waited >= max((HELD if decay else WAITS) * LOOK, done // 2):
                reason = "flat"
            else:
                continue
            ending, begun_at = max(ENDS * LOOK, done // 2 // LOOK * LOOK), done
    except OutOfTimeError:
        reason = "time"
    error = math.sqrt(select.error(model, step.values, looked, ranks) / spread)
    return Descended(begin.like(step.now()), error, math.sqrt(step.loss() / spread_fit), done, reason,
                     int(batches.different), 0 if feed is None else feed.asked, tuple(curve))


def batch_of(table: Table, rows: int | None = None) -> int:
    """Sequences of a batch of so many rows, or of as many as serve the device."""
    return max(8, (rows or ROWS.get(table.X.device.type, ROWS["cpu"])) // table.X.shape[1])


def _model(X: Tensor, values: Sequence[Tensor], see: Tensor | None) -> Tensor:
    return predict(X, Factors(*values), see)


class Step:
    """One step of Adam on a random batch, in the precision of the table; on a GPU a captured graph; ``fast``: with
    products in fewer digits where the device has them."""

    def __init__(
        self, batches: Batches, model: Model, begin: Sequence[Tensor], *, decay: float = 0.0, fast: bool = True,
        ranks: Alone = ALONE,
    ) -> None:
        self.batches, self.model, self.ranks, X = batches, model, ranks, batches.table.X
        self.values = [part.detach().clone().to(X).requires_grad_() for part in begin]
        captured = X.device.type == "cuda" and ranks.alone  # a sum over ranks is no part of a graph
        eps = 1e-8 if X.dtype == torch.float32 else 1e-20  # below the gradients at the floor
        self.speed = torch.zeros((), device=X.device)
        self.last = torch.zeros((), device=X.device)
        self.adam = torch.optim.AdamW(self.values, lr=self.speed if captured else 0.0, betas=(0.9, 0.99),
                                      eps=eps, weight_decay=decay, capturable=captured,
                                      fused=None if captured else True)
        self.digits = FEW if fast else FULL
        self.graph: torch.cuda.CUDAGraph | None = None
        if captured:
            self._capture()

    def now(self) -> list[Tensor]:
        """The unknowns as they are, apart from those that further steps change."""
        return [value.detach().clone() for value in self.values]

    def state(self) -> dict[str, Tensor]:
        """The unknowns, what Adam remembers, and the last loss."""
        found = {"last": self.last}
        for i, value in enumerate(self.values):
            found[f"value {i}"] = value.detach()
            found |= {f"{name} {i}": part for name, part in self.adam.state[value].items()}
        return found

    def restore(self, found: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.last.copy_(found["last"])
            for i, value in enumerate(self.values):
                value.copy_(found[f"value {i}"])
                held = self.adam.state[value]
                for name in ("step", "exp_avg", "exp_avg_sq"):
                    if f"{name} {i}" not in found:
                        continue  # nothing yet
                    if name in held:
                        held[name].copy_(found[f"{name} {i}"])
                    else:
                        held[name] = found[f"{name} {i}"].to(value.device).clone()

    def rate(self, value: float) -> None:
        if self.graph is None:
            self.adam.param_groups[0]["lr"] = value
        else:
            self.speed.fill_(value)

    def loss(self) -> float:
        return float(self.last)

    def make(self) -> None:
        self.batches.advance()
        if self.graph is None:
            self._once()
        else:
            self.graph.replay()

    def _once(self) -> None:
        part = self.batches.now()
        for value in self.values:
            value.grad = None
        if not self.ranks.alone:
            self._shared(part)
            return
        with fast_products(part.X.device, self.digits):
            loss = part.mean_square(self.model(part.inputs, self.values, part.see) - part.Y)
            loss.backward()  # type: ignore[no-untyped-call]
        self.adam.step()
        self.last.copy_(loss.detach())

    def _shared(self, part: Table) -> None:
        """The same step from what each rank has of the batch: squares, their gradient and their number are added
        up, in one call."""
        with fast_products(part.X.device, self.digits):
            R = self.model(part.inputs, self.values, part.see) - part.Y
            squares = (R if part.valid is None else R * part.valid).square().sum()
            squares.backward()  # type: ignore[no-untyped-call]
        rows = R.numel() if part.valid is None else float(part.valid.sum()) * R.shape[2]
        grads = [torch.zeros_like(value) if value.grad is None else value.grad for value in self.values]
        *grads, total, count = self.ranks.totals(*grads, squares.detach(), R.new_tensor(rows))
        for value, grad in zip(self.values, grads, strict=True):
            value.grad = grad / count
        self.adam.step()
        self.last.copy_(total / count)

    def _capture(self) -> None:
        """Three steps to settle what is allocated, taken back, then one that is recorded. Their rate is not zero:
        Adam divides by it."""
        begin = self.now()
        self.speed.fill_(1e-12)
        with fast_products(self.speed.device, self.digits):
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
    report: Callable[[float], None] | None = None, *, pulse: Callable[[], None] | None = None, already: int = 0,
    snapshot: Snapshot = NONE,
) -> Descended:
    """From random factors, with the settings that serve a layer of this width on this device; ``pulse`` is called
    before more is read or asked for, ``already`` is how much a black box was asked before."""
    assert source.frame is not None
    ranks, k = source.ranks, source.examples.length
    feed = feed_of(source.seen_through(source.frame.unwhitened()), generator, already, pulse)
    if not ranks.alone and len(source.fit) > source.most():
        snapshot = NONE  # each rank has batches of its own from what it reads on the way
    kept = snapshot.found()
    try:
        fit, select = tables(source, feed, kept)
        begin = random_factors(heads, source.examples.width, source.examples.out_width, q, p, generator,
                               source.device)
        wide = source.d >= WIDE
        rows = None if wide or source.device.type == "cuda" else 512
        batches = None if ranks.alone else split_batches(source, fit, batch_of(fit, rows), generator, feed)
        return descend(fit, select, begin, generator=generator, rate=2e-3 if wide else 4e-3, decay=decay,
                       rows=rows, limit=STEPS, feed=feed, report=report, batches=batches, ranks=ranks,
                       looked=source.budget.some(LOOKED, 4 * k * heads * (4 * max(q, p) + 3 * k), "kept"),
                       snapshot=snapshot, kept=kept)
    finally:
        if feed is not None:
            feed.close()


def tables(source: Source, feed: Feed | None = None, kept: Stage | None = None) -> tuple[Table, Table]:
    """Sequences to fit and to look at, in plain coordinates: centred, divided by one number."""
    assert source.frame is not None
    plain = source.seen_through(source.frame.unwhitened())
    count = min(len(source.fit), source.most())
    chosen = spaced(source.fit, count)
    if feed is not None:
        with source.ranks.together():
            if kept is not None and isinstance(feed, Reader):
                fit = feed.again(kept[0]["slots"], kept[1]["place"])
            else:
                fit = feed.first(len(own_of(source.examples, chosen)))
    others = source.budget.some(min(len(source.select), SELECT), bytes_of(source.examples))
    return table_of(plain, chosen) if feed is None else fit, table_of(plain, spaced(source.select, others))


def split_batches(
    source: Source, fit: Table, size: int, generator: torch.Generator, feed: Feed | None
) -> Batches:
    """What this rank has of every batch."""
    count = min(len(source.fit), source.most())
    chosen = spaced(source.fit, count)
    assert isinstance(source.examples, Parted)
    if len(source.fit) == count:
        return SplitBatches(fit, min(count, size), generator, source.examples.own(chosen), source.ranks)
    own = len(own_of(source.examples, source.fit))
    share = 0 if feed is None else max(1, round(size * own / len(source.fit)))
    return FedBatches(fit, min(share, len(fit.X)), generator, feed, MET.get(source.device.type, 1), source.ranks)


def whitened(factors: Factors, frame: Frame) -> Thin:
    """The same heads in working coordinates: z_plain = Tz, T = L/s."""
    T = frame.unwhitened().back @ frame.out
    d = factors.B.shape[1]
    A, B, V = (part.to(T) for part in (factors.A, factors.B, factors.V))
    return Thin.joined(torch.cat([T.mT @ A[:, :d], A[:, d:]], dim=1), T.mT @ B, T.mT @ V)
