"""min over Θ of min over (W, c) of ‖Y − F(X; Θ, W, c)‖²: Gauss–Newton with variable projection.

W and c are eliminated (projected.py), so only Θ is searched. Steps solve

    (Jᵀ(I − Π)J + λD) v = Jᵀr,        D the shape's metric,

by preconditioned conjugate gradients on products; no Jacobian is formed. The inner iteration runs in float32
whatever the outer precision: an error of 1e-3 in the step costs a digit-triple an iteration, no accuracy,
since residuals are always evaluated in the outer precision. It moves to the outer precision when that fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.core.devices import FULL, fast_products
from headway.learning.shapes import Metric, Shape
from headway.linalg.krylov import conjugate_gradients
from headway.linalg.projected import Point, Problem, Products, evaluate

ROUGH = 1e-3  # relative residual above which steps need no more than three digits
SMALL = 40_000  # rows up to which launching a product takes longer than the product
FAILED, WELL, FAIR = 6.0, 12.0, 4.0  # damping: times this after a step that fails, divided after one as foreseen
DEARER, CHEAPER = 6.0, 6.0  # the same of the price on changes of scores
FORESEEN, PARTLY = 0.75, 0.25  # parts of the foreseen gain
STALE = 0.1  # by which a gain may differ from the foreseen one until what preconditions is formed again
NEAR = 0.05  # relative residual below which steps are worth a better preconditioner


class OutOfTimeError(Exception):
    """Raised by ``report`` or ``pulse`` to end a solve; what it had reached is what counts."""


class Operator(Protocol):
    """J and its adjoint at one point, in the unknowns of a shape."""

    def gradient(self, residuals: Any) -> Tensor: ...
    def curvature(self, v: Tensor) -> Tensor: ...
    def metric(self, generator: torch.Generator) -> Metric: ...


class Model(Protocol):
    """What is fitted: a loss for every shape (a point has ``loss`` and ``residuals``) and products there."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def small(self) -> bool: ...
    def variation(self) -> float: ...
    def evaluate(self, shape: Any) -> Any: ...
    def products(self, point: Any, shape: Any, dtype: torch.dtype) -> Operator: ...


@dataclass(frozen=True)
class Solution:
    shape: Any
    point: Any
    history: tuple[float, ...]  # relative residuals, one per accepted step
    reason: str  # floor, target, converged, stalled, limit
    products: int  # Jacobian and adjoint products made
    damping: float = 1.0  # the last one, with which to go on
    price: float = 1.0  # the same of the price on changes of scores
    ratio: float = 0.0  # of what the last step gained to what was foreseen
    inner: torch.dtype = torch.float32  # in which steps were solved at last

    @property
    def residual(self) -> float:
        return self.history[-1]


@dataclass(frozen=True)
class Midway:
    """Where a solve stands between two steps, with which it goes on as if it had not stopped."""

    shape: Any
    history: tuple[float, ...]
    steps: int
    products: int
    slow: int
    damping: float
    price: float
    ratio: float
    inner: torch.dtype
    generator: Tensor  # its state
    metric: tuple[Any, torch.dtype, Tensor] | None  # where it was formed: shape, precision, state of the generator


@dataclass(frozen=True)
class LeastSquares:
    """What every model of a least-squares problem answers alike."""

    problem: Problem

    @property
    def dtype(self) -> torch.dtype:
        return self.problem.dtype

    @property
    def small(self) -> bool:
        """Whether a GPU takes longer to be told of a product than to make it, and may make it without the host: a
        sum over ranks it may not."""
        return self.problem.ranks.alone and self.problem.rows <= SMALL

    def variation(self) -> float:
        return self.problem.variation()


class Free(LeastSquares):
    """Heads with free W_i, which are eliminated together with c (projected.py)."""

    def evaluate(self, shape: Shape) -> Point:
        return evaluate(self.problem, shape.theta())

    def products(self, point: Point, shape: Shape, dtype: torch.dtype) -> Operator:
        return _Products(self.problem, point, shape, dtype)


class _Products(Products):
    """The same products in the unknowns of a shape."""

    def __init__(self, problem: Problem, point: Point, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__(problem, point, dtype)
        self.shape = shape.to(dtype)

    def gradient(self, residuals: Any) -> Tensor:
        return self.shape.pull(super().gradient(residuals))

    def curvature(self, v: Tensor) -> Tensor:
        return self.shape.pull(super().curvature(self.shape.push(v)))

    def metric(self, generator: torch.Generator) -> Metric:
        return self.shape.metric(*self.blocks(generator))


def _stretched(operator: Operator, metric: Metric, v: Tensor) -> Callable[[Tensor], Tensor]:
    """D⁻¹ with one direction a head corrected: D overrates that of Θ_i itself, since a softmax answers little to
    scores that only grow. With v_i the head's unknowns and s_i = ⟨v_i, Dv_i⟩/⟨v_i, Av_i⟩ measured by one product,

        g ↦ D⁻¹g + (s_i − 1) v_i⟨v_i, g⟩/⟨v_i, Dv_i⟩

    is exact on v_i up to the coupling of heads, and m small eigenvalues no longer cost a few steps each.
    """
    heads = tuple(range(1, v.ndim))
    rated = (v * metric.apply(v)).sum(heads, keepdim=True).clamp_min(1e-30)
    true = (v * operator.curvature(v)).sum(heads, keepdim=True).clamp_min(1e-30)
    gain = ((rated / true).clamp(1.0, 100.0) - 1.0) / rated
    return lambda g: metric.solve(g) + gain * (v * g).sum(heads, keepdim=True) * v


def _formed_again(model: Model, midway: Midway, generator: torch.Generator) -> Metric | None:
    """The metric that a solve had, and its generator as it was."""
    metric = None
    if midway.metric is not None:
        shape, dtype, state = midway.metric
        generator.set_state(state)
        metric = model.products(model.evaluate(shape), shape, dtype).metric(generator)
    generator.set_state(midway.generator)
    return metric


def gauss_newton(
    model: Model,
    shape: Any,
    *,
    generator: torch.Generator,
    limit: int = 100,
    inner_limit: int = 300,
    digits: float = 1e-3,
    target: float = 0.0,
    patience: int = 4,
    least_gain: float = 1e-3,
    damping: float = 1.0,
    price: float = 1.0,
    budget: float = math.inf,
    inner: torch.dtype = torch.float32,
    wary: bool = False,
    report: Callable[[float], None] | None = None,
    pulse: Callable[[], None] | None = None,
    midway: Midway | None = None,
    keep: Callable[[Midway], None] | None = None,
) -> Solution:
    """Minimise from ``shape``; stops at the floor of the arithmetic, at ``target``, when ``patience`` steps in a
    row gain less than ``least_gain`` of the loss (stalled), when a full step would gain less than 1e-9
    (converged), at ``limit`` steps, or after ``budget`` products with J and its transpose (limit). Steps are solved
    to ``digits`` at best. ``report`` hears of every step, ``pulse`` is called at every product; either may end it
    by raising. ``keep`` is told where it stands between steps, ``midway`` is such a place to go on from.
    """
    scale = model.variation()
    eps = torch.finfo(model.dtype).eps
    products, slow, reason, ratio, begun = 0, 0, "limit", 0.0, 0
    metric: Metric | None = None
    formed: tuple[Any, torch.dtype, Tensor] | None = None
    if midway is not None:
        shape, products, slow, ratio, begun = (midway.shape, midway.products, midway.slow, midway.ratio,
                                               midway.steps)
        damping, price, inner = midway.damping, midway.price, midway.inner
        metric, formed = _formed_again(model, midway, generator), midway.metric
    point = model.evaluate(shape)
    history = [math.sqrt(point.loss / scale)] if midway is None else list(midway.history)
    for step in range(begun, limit):
        if keep is not None:
            keep(Midway(shape, tuple(history), step, products, slow, damping, price, ratio, inner,
                        generator.get_state(), formed))
        operator = model.products(point, shape, inner)
        if metric is None or history[-1] > 1e-3 or abs(ratio - 1) > STALE:  # else Θ hardly moves
            formed = shape, inner, generator.get_state()
            metric = operator.metric(generator)
        exact = operator if inner == model.dtype else model.products(point, shape, model.dtype)
        g = exact.gradient(point.residuals)
        products += 1
        size = float(g.abs().max())
        if size == 0.0 or not math.isfinite(size):
            reason = "converged"
            break
        unit = (g / size).to(inner)
        # No more digits than the next residual can show: the last step may be a rough one.
        tolerance = max(min(0.3, history[-1]), digits, min(eps / history[-1], 0.1))
        accepted = False
        for _ in range(10):
            hold, near = metric.damped(damping, price * point.loss)

            def apply(v: Tensor, op: Operator = operator, hold: Callable[[Tensor], Tensor] = hold) -> Tensor:
                return op.curvature(v) + hold(v)

            precondition = near.solve
            if history[-1] < NEAR:
                precondition = _stretched(operator, near, shape.growth().to(inner))
                products += 2
            with fast_products(unit.device, 3 if history[-1] > ROUGH else FULL):
                v, made = conjugate_gradients(apply, precondition, unit, tolerance, inner_limit, pulse, model.small)
            products += 2 * made
            # ‖r‖² falls by ⟨v, g⟩ and what holds v back if the model is right.
            gain = size**2 * float((v * (unit + hold(v))).sum())
            trial = shape.moved((v.to(g.dtype)) * size)
            new = model.evaluate(trial)
            ratio = (point.loss - new.loss) / max(gain, 1e-300)
            if math.isfinite(new.loss) and new.loss < point.loss and ratio > 1e-4:
                accepted = True
                break
            if gain < 1e-9 * point.loss or history[-1] < 100 * eps:
                break
            damping, price = damping * FAILED, price * DEARER
        if not accepted:
            if history[-1] < 1e4 * eps:
                reason = "floor"
            elif gain < 1e-9 * point.loss:
                reason = "converged"
            elif inner != model.dtype:
                inner, damping, metric, formed = model.dtype, max(damping / FAILED**9, 1e-12), None, None
                continue
            else:
                reason = "stalled"
            break
        if ratio > PARTLY:
            damping = max(damping / (WELL if ratio > FORESEEN else FAIR), 1e-12)
            price = max(price / CHEAPER, 1.0)
        drop = 1 - new.loss / point.loss
        if wary and inner != model.dtype and (made >= inner_limit or ratio < FORESEEN):
            inner, metric, formed = model.dtype, None, None  # float32 cannot solve for these steps
        shape, point = trial, new
        history.append(math.sqrt(point.loss / scale))
        if report is not None:
            report(history[-1])
        if history[-1] <= target:
            reason = "target"
            break
        if history[-1] < 32 * eps or (history[-1] < 1e4 * eps and drop < 0.75):
            reason = "floor"
            break
        if drop < 1e-9:
            reason = "converged"
            break
        slow = slow + 1 if drop < least_gain else 0
        if slow >= patience:
            reason = "stalled"
            break
        if products > budget:
            break
    return Solution(shape, point, tuple(history), reason, products, damping, price, ratio, inner)
