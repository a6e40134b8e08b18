"""min over Θ of min over (W, c) of ‖Y − F(X; Θ, W, c)‖²: Gauss–Newton with variable projection.

Given Θ the best (W, c) solve one linear least-squares problem with the features H = [P_1X | … | P_mX | 1],
so only Θ is searched. With Π the projector onto the columns of H the Jacobian of the projected residual is
taken as (I − Π)·(dH W) (Kaufman's form: the neglected term is of the size of the residual). Steps solve

    (Jᵀ(I − Π)J + λD) v = Jᵀr,        D the shape's metric,

by preconditioned conjugate gradients on products; no Jacobian is formed. The inner iteration runs in float32
whatever the outer precision: an error of 1e-3 in the step costs a digit-triple an iteration, no accuracy,
since residuals are always evaluated in the outer precision. It moves to the outer precision when that fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway import attention
from headway.learn.shapes import Metric, Shape

CACHE = 1 << 30  # bytes of patterns and features kept between products; beyond it they are recomputed


@dataclass(frozen=True)
class Rows:
    """Sequences in working coordinates: X (n, k, d), Y (n, k, e), what a query sees, which rows count."""

    X: Tensor
    Y: Tensor
    see: Tensor | None = None
    valid: Tensor | None = None  # (n, k, 1), 1 for rows that count; Y is 0 on the others

    def to(self, dtype: torch.dtype) -> Rows:
        valid = None if self.valid is None else self.valid.to(dtype)
        return Rows(self.X.to(dtype), self.Y.to(dtype), self.see, valid)

    @property
    def count(self) -> int:
        """Rows that count."""
        return self.X.shape[0] * self.X.shape[1] if self.valid is None else int(self.valid.sum())


@dataclass(frozen=True)
class Problem:
    """Least squares over chunks of rows; ``offset`` says whether a constant c is fitted."""

    chunks: tuple[Rows, ...]
    offset: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return self.chunks[0].X.dtype

    @property
    def rows(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def equations(self) -> int:
        return self.rows * self.chunks[0].Y.shape[2]

    def to(self, dtype: torch.dtype) -> Problem:
        return Problem(tuple(chunk.to(dtype) for chunk in self.chunks), self.offset)

    def variation(self) -> float:
        """Σ‖y − ȳ‖²: what a constant would leave; relative residuals are measured against it."""
        N = max(self.rows, 1)
        mean = sum((c.Y.double().sum((0, 1)) for c in self.chunks), torch.zeros(())) / N
        total = sum(float(c.Y.double().square().sum()) for c in self.chunks)
        return max(total - N * float(mean.square().sum()), 1e-300)


@dataclass(frozen=True)
class Point:
    """Θ with its best (W, c): loss Σ‖r‖², residuals, the Cholesky factor of HᵀH, kept P and H if small."""

    Theta: Tensor
    W: Tensor
    offset: Tensor | None
    loss: float
    residuals: tuple[Tensor, ...]
    factor: Tensor
    kept: tuple[tuple[Tensor, Tensor], ...] | None


@dataclass(frozen=True)
class Solution:
    shape: Shape
    point: Point
    history: tuple[float, ...]  # relative residuals, one per accepted step
    reason: str  # floor, target, converged, stalled, limit
    products: int  # Jacobian and adjoint products made

    @property
    def residual(self) -> float:
        return self.history[-1]


def _features(rows: Rows, Theta: Tensor, offset: bool) -> tuple[Tensor, Tensor]:
    P = attention.patterns(rows.X, Theta, rows.see)
    n, k = P.shape[:2]
    H = attention.attend(P, rows.X)
    if rows.valid is not None:
        H = H * rows.valid.unsqueeze(3)
    H = H.view(n * k, -1)
    if offset:
        ones = H.new_ones(n * k, 1) if rows.valid is None else rows.valid.reshape(n * k, 1)
        H = torch.cat([H, ones], dim=1)
    return P, H


def _cholesky(G: Tensor) -> Tensor:
    """Factor of G plus the least ridge that makes it numerically definite (equal or dead heads do not)."""
    factor: Tensor
    eye = torch.eye(len(G), dtype=G.dtype, device=G.device)
    ridge = 8 * torch.finfo(G.dtype).eps * float(G.diagonal().mean()) + torch.finfo(G.dtype).tiny
    for _ in range(12):
        factor, info = torch.linalg.cholesky_ex(G + ridge * eye)
        if int(info) == 0:
            return factor
        ridge *= 32
    factor = torch.linalg.cholesky(G + ridge * eye)
    return factor


def evaluate(problem: Problem, Theta: Tensor) -> Point:
    """The best (W, c) for Θ, by normal equations with one step of refinement."""
    m, _, d = Theta.shape
    size = m * d + problem.offset
    e = problem.chunks[0].Y.shape[2]
    width = Theta.element_size() * (size + m * problem.chunks[0].X.shape[1])
    keep = problem.rows * width <= CACHE
    G, R = Theta.new_zeros(size, size), Theta.new_zeros(size, e)
    kept: list[tuple[Tensor, Tensor]] = []
    for rows in problem.chunks:
        P, H = _features(rows, Theta, problem.offset)
        G += H.T @ H
        R += H.T @ rows.Y.reshape(-1, e)
        if keep:
            kept.append((P, H))
    factor = _cholesky(G)

    def features() -> Iterator[tuple[Rows, Tensor]]:
        for i, rows in enumerate(problem.chunks):
            yield rows, kept[i][1] if keep else _features(rows, Theta, problem.offset)[1]

    B = torch.cholesky_solve(R, factor)
    R = torch.zeros_like(R)
    for rows, H in features():
        R += H.T @ (rows.Y.reshape(-1, e) - H @ B)
    B = B + torch.cholesky_solve(R, factor)
    residuals = tuple(rows.Y.reshape(-1, e) - H @ B for rows, H in features())
    loss = sum(float(r.double().square().sum()) for r in residuals)
    offset = B[-1] if problem.offset else None
    return Point(Theta, B[: m * d].view(m, d, e), offset, loss, residuals, factor,
                 tuple(kept) if keep else None)


class _Products:
    """v ↦ Jᵀ(I − Π)J v at one point, in a chosen precision."""

    def __init__(self, problem: Problem, point: Point, shape: Shape, dtype: torch.dtype) -> None:
        self.problem = problem if problem.dtype == dtype else problem.to(dtype)
        self.shape = shape.to(dtype)
        eye = torch.eye(len(point.factor), dtype=point.factor.dtype, device=point.factor.device)
        # L⁻¹ once, so that each projection is two products: triangular solves of this size are slower.
        inverse = torch.linalg.solve_triangular(point.factor, eye, upper=False)
        self.Theta, self.W, self.inverse = (t.to(dtype) for t in (point.Theta, point.W, inverse))
        self.kept = None
        if point.kept is not None:
            self.kept = tuple((P.to(dtype), H.to(dtype)) for P, H in point.kept)
        self.count = 0

    def _at(self, i: int) -> tuple[Tensor, Tensor]:
        if self.kept is not None:
            return self.kept[i]
        return _features(self.problem.chunks[i], self.Theta, self.problem.offset)

    def gradient(self, residuals: Sequence[Tensor]) -> Tensor:
        """Jᵀr; r is orthogonal to the features already, so no projection is needed."""
        G = torch.zeros_like(self.Theta)
        for i, rows in enumerate(self.problem.chunks):
            U = residuals[i].to(G.dtype).view(*rows.X.shape[:2], -1)
            G += attention.cotangent(self._at(i)[0], rows.X, attention.spread(U, self.W), G.shape[1])
        self.count += 1
        return self.shape.pull(G)

    def curvature(self, v: Tensor) -> Tensor:
        dTheta = self.shape.push(v)
        images: list[Tensor] = []
        R: Tensor | float = 0.0
        for i, rows in enumerate(self.problem.chunks):
            P, H = self._at(i)
            dY = attention.project(attention.tangent(P, rows.X, dTheta), self.W)
            if rows.valid is not None:
                dY = dY * rows.valid
            images.append(dY.view(-1, dY.shape[2]))
            R = R + H.T @ images[-1]
        assert isinstance(R, Tensor)
        B = self.inverse.T @ (self.inverse @ R)
        G = torch.zeros_like(self.Theta)
        for i, rows in enumerate(self.problem.chunks):
            P, H = self._at(i)
            U = (images[i] - H @ B).view(*rows.X.shape[:2], -1)
            G += attention.cotangent(P, rows.X, attention.spread(U, self.W), G.shape[1])
        self.count += 2
        return self.shape.pull(G)

    def metric(self, generator: torch.Generator) -> Metric:
        """Q ⊗ M_i with M_i = Σ_rows C W_iW_iᵀ C estimated by one random probe ω per row:

        E[(C W_i ω)(C W_i ω)ᵀ] = C W_iW_iᵀ C, and C W_i ω is what ``cotangent`` sends to the key side.
        """
        m, r, d = self.Theta.shape
        M = self.Theta.new_zeros(m, d, d)
        Q = self.Theta.new_zeros(r, r)
        for i, rows in enumerate(self.problem.chunks):
            omega = torch.randn(rows.Y.shape, generator=generator, dtype=torch.float32).to(rows.Y)
            queries = attention.queries(rows.X, self.Theta)
            if rows.valid is not None:
                omega, queries = omega * rows.valid, queries * rows.valid
            T = attention.key_side(self._at(i)[0], rows.X, attention.spread(omega, self.W))
            M += torch.einsum("nkmd,nkme->mde", T, T)
            Q += torch.einsum("nkp,nkq->pq", queries, queries)
        eye = torch.eye(d, dtype=M.dtype, device=M.device)
        mean = M.diagonal(dim1=1, dim2=2).mean(1)
        lift = 1e-3 * mean + 1e-7 * mean.max() + torch.finfo(M.dtype).tiny * 1e6
        Q = Q / self.problem.rows + 1e-3 * torch.eye(r, dtype=Q.dtype, device=Q.device)
        return self.shape.metric(Q, M + lift.view(m, 1, 1) * eye)


def least_curvature(problem: Problem, point: Point, shape: Shape, generator: torch.Generator) -> float:
    """The smallest eigenvalue of Jᵀ(I − Π)J relative to D: zero where the rows leave a direction of Θ free.

    Two steps of inverse iteration, each a solve with a shift of 1e-10.
    """
    operator = _Products(problem, point, shape, torch.float64)
    metric = operator.metric(generator)
    v = torch.randn(shape.value.shape, generator=generator, dtype=torch.float64).to(shape.value)
    for _ in range(2):
        g = metric.apply(v)
        v = conjugate_gradients(lambda x: operator.curvature(x) + 1e-10 * metric.apply(x), metric, g, 1e-8,
                                 min(2 * v.numel(), 500))
        v = v / v.norm()
    return float((v * operator.curvature(v)).sum()) / max(float((v * metric.apply(v)).sum()), 1e-300)


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor], metric: Metric, g: Tensor, tolerance: float, limit: int
) -> Tensor:
    """(A v = g) to a relative error of ``tolerance`` in the norm of the preconditioner."""
    v, r = torch.zeros_like(g), g
    z = metric.solve(r)
    p, rz = z, float((r * z).sum())
    goal = tolerance**2 * rz
    for _ in range(limit):
        Ap = apply(p)
        curvature = float((p * Ap).sum())
        if not curvature > 0 or not math.isfinite(curvature):
            break
        v = v + (rz / curvature) * p
        r = r - (rz / curvature) * Ap
        z = metric.solve(r)
        rz, old = float((r * z).sum()), rz
        if not rz > goal:
            break
        p = z + (rz / old) * p
    return v


def gauss_newton(
    problem: Problem,
    shape: Shape,
    *,
    generator: torch.Generator,
    limit: int = 100,
    inner_limit: int = 300,
    target: float = 0.0,
    patience: int = 4,
    least_gain: float = 1e-3,
    damping: float = 1.0,
    report: Callable[[float], None] | None = None,
) -> Solution:
    """Minimise from ``shape``; stops at the floor of the arithmetic, at ``target``, when ``patience`` steps in a
    row gain less than ``least_gain`` of the loss (stalled), when a full step would gain less than 1e-9
    (converged), or at ``limit`` steps.
    """
    scale = problem.variation()
    eps = torch.finfo(problem.dtype).eps
    point = evaluate(problem, shape.theta())
    history = [math.sqrt(point.loss / scale)]
    inner = torch.float32
    products, slow, reason = 0, 0, "limit"
    metric: Metric | None = None
    for _ in range(limit):
        operator = _Products(problem, point, shape, inner)
        if metric is None or history[-1] > 1e-3:  # below, Θ hardly moves and the old one serves
            metric = operator.metric(generator)
        exact = operator if inner == problem.dtype else _Products(problem, point, shape, problem.dtype)
        g = exact.gradient(point.residuals)
        size = float(g.abs().max())
        if size == 0.0 or not math.isfinite(size):
            reason = "converged"
            break
        unit = (g / size).to(inner)
        # No more digits than the next residual can show: the last step may be a rough one.
        tolerance = max(min(0.3, history[-1]), 1e-3, min(eps / history[-1], 0.1))
        accepted = False
        for _ in range(10):
            lam = damping

            def apply(v: Tensor, op: _Products = operator, D: Metric = metric, lam: float = lam) -> Tensor:
                return op.curvature(v) + lam * D.apply(v)

            v = conjugate_gradients(apply, metric, unit, tolerance, inner_limit)
            # ‖r‖² falls by ⟨v, g + λDv⟩ if the model is right.
            gain = size**2 * float((v * (unit + lam * metric.apply(v))).sum())
            trial = shape.moved((v.to(g.dtype)) * size)
            new = evaluate(problem, trial.theta())
            ratio = (point.loss - new.loss) / max(gain, 1e-300)
            if math.isfinite(new.loss) and new.loss < point.loss and ratio > 1e-4:
                accepted = True
                break
            if gain < 1e-9 * point.loss or history[-1] < 100 * eps:
                break
            damping *= 6
        products += operator.count + (exact.count if exact is not operator else 0)
        if not accepted:
            if history[-1] < 1e4 * eps:
                reason = "floor"
            elif gain < 1e-9 * point.loss:
                reason = "converged"
            elif inner != problem.dtype:
                inner, damping, metric = problem.dtype, max(damping / 6**9, 1e-12), None
                continue
            else:
                reason = "stalled"
            break
        if ratio > 0.25:
            damping = max(damping / (12 if ratio > 0.75 else 4), 1e-12)
        drop = 1 - new.loss / point.loss
        shape, point = trial, new
        history.append(math.sqrt(point.loss / scale))
        if report is not None:
            report(history[-1])
        if history[-1] <= target:
            reason = "target"
            break
        if history[-1] < 8 * eps or (history[-1] < 1e4 * eps and drop < 0.75):
            reason = "floor"
            break
        if drop < 1e-9:
            reason = "converged"
            break
        slow = slow + 1 if drop < least_gain else 0
        if slow >= patience:
            reason = "stalled"
            break
    return Solution(shape, point, tuple(history), reason, products)
