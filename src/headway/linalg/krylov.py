"""Solves and eigenvalues from products alone: conjugate gradients, and Lanczos with an error bound."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

GROW = 32  # vectors for which Lanczos' method takes room at a time
LOOK = 8  # iterations between two looks at whether they are done, where they are recorded
Linear = Callable[[Tensor], Tensor]


def conjugate_gradients(
    apply: Linear, precondition: Linear, g: Tensor, tolerance: float, limit: int,
    pulse: Callable[[], None] | None = None, small: bool = False,
) -> tuple[Tensor, int]:
    """v with Av = g to a relative error of ``tolerance`` in the norm of the preconditioner, and the products made.
    ``pulse`` is called between them and may end it by raising.

    ``small``: on a GPU the products take less time than their launches. Then one iteration is recorded as a graph
    and replayed, and the host looks only now and then whether it is done. Scalars stay on the device for that; an
    iteration past the end changes nothing, so the result is the same.
    """
    state = _State(apply, precondition, g, tolerance)
    iterate: Callable[[], None] = state.iterate
    made, often = 0, 1
    while made < limit:
        if pulse is not None:
            pulse()
        if made == 0 and small and g.device.type == "cuda" and limit > 2 * LOOK:
            iterate, often = recorded(state.iterate, g.device), LOOK
        else:
            iterate()
        made += 1
        if made % often == 0 and not bool(state.alive):
            break
    return state.v, made


class _State:
    """v, r = g − Av, the direction p and ⟨r, z⟩ of conjugate gradients, changed in place."""

    def __init__(self, apply: Linear, precondition: Linear, g: Tensor, tolerance: float) -> None:
        self.apply, self.precondition = apply, precondition
        self.v, self.r = torch.zeros_like(g), g.clone()
        self.p = precondition(g).clone()
        self.rz = (self.r * self.p).sum().double()
        self.goal = tolerance**2 * self.rz
        self.alive = self.rz > 0

    def iterate(self) -> None:
        Ap = self.apply(self.p)
        curvature = (self.p * Ap).sum().double()
        self.alive &= (curvature > 0) & curvature.isfinite()
        step = torch.where(self.alive, self.rz / curvature, 0.0).to(Ap.dtype)
        self.v += step * self.p
        self.r -= step * Ap
        z = self.precondition(self.r)
        rz = (self.r * z).sum().double()
        self.alive &= rz > self.goal
        self.p.copy_(torch.where(self.alive, z + (rz / self.rz).to(z.dtype) * self.p, self.p))
        self.rz.copy_(rz)


class _Recorder:
    """Graphs recorded one after the other on a stream of their own share one pool of memory; the last is kept, so
    that its memory serves the next."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.last: torch.cuda.CUDAGraph | None = None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            work()  # once as it is: libraries take their workspaces at the first call on a stream
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        here.wait_stream(self.stream)
        self.last = graph
        return graph.replay


_recorders: dict[torch.device, _Recorder] = {}


def recorded(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """``work``, which never asks the device for a number, is done once, and comes back as one launch."""
    if device not in _recorders:
        _recorders[device] = _Recorder(device)
    return _recorders[device].record(work)


def lanczos(
    apply: Callable[[Tensor], Tensor], start: Tensor, steps: int,
    enough: Callable[[Tensor], bool] | None = None, project: Linear | None = None,
) -> tuple[Tensor, Tensor]:
    """Ritz values of a symmetric operator after ``steps`` products, ascending, and the vector of the least one.
    ``enough`` looks at the values every five products and may end it sooner.

    Reorthogonalised in full, twice: a lost direction would pass for a zero eigenvalue. So would what rounding
    leaves outside of the space that the operator lives on, which grows from step to step: ``project`` is onto that
    space.
    """
    basis = start.new_zeros(min(steps, GROW) + 1, start.numel())
    basis[0] = start.flatten() / start.norm()
    alpha: list[float] = []
    beta: list[float] = []
    for j in range(steps):
        w = apply(basis[j].view_as(start)).flatten()
        alpha.append(float(w @ basis[j]))
        for _ in range(2):
            w = w - (basis[: j + 1] @ w) @ basis[: j + 1]
            w = w if project is None else project(w.view_as(start)).flatten()
        beta.append(float(w.norm()))
        if beta[-1] < 1e-6 * max(abs(a) for a in alpha):
            break
        if j + 2 > len(basis):
            basis = torch.cat([basis, torch.zeros_like(basis[: min(GROW, steps - j)])])
        basis[j + 1] = w / beta[-1]
        if enough is not None and j % 5 == 4 and enough(_ritz(alpha, beta)[0]):
            break
    values, vectors = _ritz(alpha, beta)
    least = (vectors[:, 0].to(start) @ basis[: len(alpha)]).view_as(start)
    return values, least


def _ritz(alpha: list[float], beta: list[float]) -> tuple[Tensor, Tensor]:
    T = torch.diag(torch.tensor(alpha, dtype=torch.float64))
    for j in range(len(alpha) - 1):
        T[j, j + 1] = T[j + 1, j] = beta[j]
    values, vectors = torch.linalg.eigh(T)
    return values, vectors


def lanczos_error(steps: int, size: int, confidence: float) -> float:
    """ε with λ_min ≤ least Ritz value ≤ λ_min + ε(λ_max − λ_min), with this confidence, whatever the spectrum:
    1.648·√size·exp(−√ε(2·steps − 1)) ≤ 1 − confidence (Kuczyński and Woźniakowski, 1992). The largest is bounded
    alike, from below.

    ``size`` is the dimension of the space on whose sphere the start is uniform, and which the operator maps into
    itself: a Gaussian vector, projected where the operator lives on a subspace. What can go wrong is that the
    start has less than τ ≈ (1 − confidence)/(0.824·√size) of the least eigenvector; this one event covers every
    number of steps, so one may look at the values while it runs and stop when they suffice.
    """
    root = math.log(1.648 * math.sqrt(size) / (1.0 - confidence)) / (2 * steps - 1)
    return root**2
