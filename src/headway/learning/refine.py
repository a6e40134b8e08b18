"""From heads that are nearly right to the floor of the arithmetic, in thin factors.

Gauss–Newton (gauss_newton.py) on as few sequences as determine the factors, more when other sequences disagree.
Between its steps the fit is made smaller (prune.py): first what costs next to nothing of what is left, then, one at
a time, what a few steps give back. So head count and head size come out of the refinement; nobody tells them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from headway.core.counting import Size
from headway.core.devices import room
from headway.learning.gauss_newton import Solution, gauss_newton
from headway.learning.polish import KEPT, Polished, floor_of
from headway.learning.prune import (
    Moments,
    cheapest,
    columns_needed,
    free_cuts,
    narrowed,
    singular_values,
    step_down,
)
from headway.learning.source import Source, spaced
from headway.learning.thin import Thin, ThinModel, ThinPoint

STEPS = 2  # of Gauss–Newton between two looks at what may go
FREE = 0.3  # part of what is left that cuts may cost without being tried
TRY = 300.0  # times what is left that a cut may be expected to cost and still be tried
NARROW = 0.02  # relative residual below which ranks are read off
CLOSE = 1e-5  # relative residual at which float32 has done its part


@dataclass
class _State:
    """Where a refinement stands."""

    shape: Thin
    point: ThinPoint
    damping: float
    count: int  # sequences
    products: int = 0
    refused: float = math.inf  # residual at which a cut was last tried in vain
    tried: set[tuple[int, int]] = field(default_factory=set)  # columns tried in vain


def refine_factors(
    source: Source, shape: Thin, *, generator: torch.Generator, limit: int = 100,
    report: Callable[[float], None] | None = None, cutting: bool = True,
    log: Callable[[str], None] | None = None,
) -> Polished:
    """The least-squares solution from ``shape`` on, with as few heads and columns as it takes."""
    floor = floor_of(source.examples.dtype)
    k, e = source.examples.length, source.examples.out_width
    dtype = torch.float32
    most = min(len(source.fit), source.most())

    def sequences(shape: Thin, times: int) -> int:
        m, q, p = len(shape.value), shape.q, shape.V.shape[2]
        held = room(source.device, KEPT) // (12 * m * k * (2 * q + p + k))
        return min(max(16, times * Size(source.d, e, k, source.examples.mask, q, p).floor(m)), most, max(16, held))

    def model_for(count: int, heads: int, dtype: torch.dtype) -> ThinModel:
        return ThinModel(source.problem(spaced(source.fit, count), heads, dtype))

    times = 4
    count = sequences(shape, times)
    model = model_for(count, len(shape.value), dtype)
    shape = shape.to(dtype)
    state = _State(shape, model.evaluate(shape), 1e-2, count)
    scale = model.variation()
    reason, done = "limit", 0
    while done < limit:
        if cutting:
            _cut(model, state, scale, generator, report, log)
        solution = gauss_newton(model, state.shape, generator=generator, limit=STEPS, damping=state.damping,
                                inner=dtype, inner_limit=500, report=report)
        _take(state, solution)
        done += STEPS
        residual = solution.residual
        check = spaced(source.held, min(256, len(source.held)))
        held = source.error(check, state.point.Theta, state.point.W, state.point.offset)  # type: ignore[arg-type]
        if log is not None:
            log(f"{len(state.shape.value)} heads of {state.shape.q}, {state.shape.V.shape[2]}; {count} sequences, "
                f"residual {residual:.1e}, others {held:.1e}, {solution.reason}, damping {state.damping:.0e}")
        ended = solution.reason in ("floor", "converged", "stalled")
        coarse = dtype == torch.float32
        if held > 2 * residual and held > floor and count < most and (ended or held > 3 * residual):
            times *= 4
            wanted = sequences(state.shape, times)
            if wanted > count:
                count = wanted
                model = model_for(count, len(state.shape.value), dtype)
                scale = model.variation()
                state = _State(state.shape, model.evaluate(state.shape), max(state.damping, 1e-4), count,
                               state.products)
                continue
        if coarse and (residual < CLOSE or ended):
            dtype = torch.float64
            model = model_for(count, len(state.shape.value), dtype)
            scale = model.variation()
            shape = state.shape.to(dtype)
            state = _State(shape, model.evaluate(shape), state.damping, count, state.products)
            continue
        if ended:
            reason = solution.reason
            break
    residual = math.sqrt(state.point.loss / scale)
    point = state.point
    assert point.offset is not None
    held = source.error(source.held, point.Theta, point.W, point.offset)
    return Polished(point.Theta.double(), point.W.double(), point.offset.double(), residual, held, reason, count,
                    model.problem.equations, state.shape.q, state.products, state.shape.V.shape[2])


def _take(state: _State, solution: Solution) -> None:
    state.shape, state.point, state.damping = solution.shape, solution.point, solution.damping
    state.products += solution.products


def _narrow(
    model: ThinModel, state: _State, moments: Moments, scale: float, generator: torch.Generator,
    report: Callable[[float], None] | None, words: list[str],
) -> Moments:
    """Try the number of columns after which the singular values step down most, and heads as wide in Θ as in W."""
    theta, out = singular_values(state.shape, state.point, moments)
    p = state.shape.V.shape[2]
    for q in sorted({step_down(theta), min(p, state.shape.q)}):
        narrow = min(p, step_down(out))
        cost = float(theta[:, q:].square().sum() + out[:, narrow:].square().sum())
        if (q, narrow) == (state.shape.q, p) or cost > TRY * state.point.loss or (q, narrow) in state.tried:
            continue
        before = math.sqrt(state.point.loss / scale)
        trial = gauss_newton(model, narrowed(state.shape, state.point, moments, q, narrow), generator=generator,
                             limit=2 * STEPS, damping=max(state.damping, 1e-3), inner=model.dtype, inner_limit=200,
                             target=0.9 * before, report=report)
        state.products += trial.products
        if trial.residual > before:
            state.tried.add((q, narrow))
            words.append(f"not columns {q}, {narrow} ({trial.residual / before:.2g})")
            continue
        words.append(f"columns {state.shape.q}, {p} → {q}, {narrow} ({cost / state.point.loss:.2g})")
        _take(state, trial)
        return model.products(state.point, state.shape, model.dtype).moments(generator)
    return moments


def _cut(
    model: ThinModel, state: _State, scale: float, generator: torch.Generator,
    report: Callable[[float], None] | None, log: Callable[[str], None] | None,
) -> None:
    """Leave out what costs next to nothing, then try one cut that a few steps may give back."""
    state.shape, state.point, words = free_cuts(model, state.shape, state.point, FREE * state.point.loss)
    residual = math.sqrt(state.point.loss / scale)
    moments = model.products(state.point, state.shape, model.dtype).moments(generator)
    if residual < NARROW:
        theta, out = singular_values(state.shape, state.point, moments)
        q, p = (columns_needed(values, FREE * state.point.loss) for values in (theta, out))
        if q < state.shape.q or p < state.shape.V.shape[2]:
            q, p = min(q, state.shape.q), min(p, state.shape.V.shape[2])
            smaller = narrowed(state.shape, state.point, moments, q, p)
            point = model.evaluate(smaller)
            if point.loss < 4 * state.point.loss:
                words.append(f"columns {state.shape.q}, {state.shape.V.shape[2]} → {q}, {p}")
                state.shape, state.point = smaller, point
                moments = model.products(point, smaller, model.dtype).moments(generator)
        moments = _narrow(model, state, moments, scale, generator, report, words)
        residual = math.sqrt(state.point.loss / scale)
    while residual < 0.3 * state.refused:
        cut = cheapest(state.shape, state.point, moments)
        if cut is None or cut.cost > TRY * state.point.loss:
            break
        trial = gauss_newton(model, cut.shape, generator=generator, limit=2 * STEPS, inner=model.dtype,
                             damping=max(state.damping, 1e-3), inner_limit=200, target=0.9 * residual,
                             report=report)
        state.products += trial.products
        if trial.residual > residual:
            state.refused = residual
            words.append(f"not {cut.what} ({cut.cost / state.point.loss:.2g} → {trial.residual / residual:.2g})")
            break
        words.append(f"{cut.what} ({cut.cost / state.point.loss:.2g})")
        _take(state, trial)
        residual = trial.residual
        moments = model.products(state.point, state.shape, model.dtype).moments(generator)
    if log is not None and words:
        log("; ".join(words))
