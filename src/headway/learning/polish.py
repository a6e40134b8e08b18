"""Gauss–Newton on all Θ_i to the floor of the arithmetic: few rows and float32 first, low rank where it shows.

Where Θ_i and W_i both show a low rank, as in layers that are trained with heads of size d/m, the fit is made in
thin factors (thin.py): some fifty times cheaper at width 384.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from headway.core.counting import Size
from headway.core.devices import room
from headway.learning.candidate import Candidate
from headway.learning.gauss_newton import NEAR, Free, Solution, gauss_newton
from headway.learning.shapes import Factored, Full, Shape
from headway.learning.source import Source, spaced
from headway.learning.starts.unmix import WIDE
from headway.learning.thin import Thin, ThinModel
from headway.linalg.projected import evaluate

FLOORS = {torch.float64: 4096 * 2.0**-52, torch.float32: 64 * 2.0**-23}
FITTED = 1e-6  # relative error on other sequences that counts as small
STEP = 1.5  # ratio of neighbouring singular values that shows a rank in a rough estimate
KEPT = 4 << 30  # bytes of queries, keys, values and patterns that thin factors may keep
EARLY = 64  # width from which a low rank is looked for before the coarse fit is done
Report = Callable[[float], None]


def floor_of(dtype: torch.dtype) -> float:
    """Relative residual at which labels of this dtype count as met exactly.

    float64 labels carry the rounding of another order of summation, seen through the conditioning of the
    coordinates: 4096 ulp. float32 labels were mostly computed in float32 too: 64 ulp. Half precision is taken as
    rounding alone, 2 ulp: anything wider would call a poor fit exact.
    """
    return FLOORS.get(dtype, 2 * torch.finfo(dtype).eps)


def numerical_rank(Theta: Tensor, residual: float) -> int | None:
    """The rank r ≤ d/2 that every head keeps within, read off a gap of the singular values; None if no gap.

    A head's (Θ, u) is known to about ``residual``, so singular values below a few times that are empty. A gap
    counts when the next value is below a tenth of the last one kept.
    """
    d = Theta.shape[2]
    s = torch.linalg.svdvals(Theta.double())
    s = s / s[:, :1].clamp_min(1e-300)
    ranks = []
    for row in s:
        r = int((row > max(30 * residual, 1e-2)).sum())
        if r == 0 or r >= d or float(row[r]) > 0.1 * float(row[r - 1]):
            return None
        ranks.append(r)
    return max(ranks) if max(ranks) <= d // 2 else None


def polish(
    source: Source,
    Theta: Tensor,
    sequences: int,
    *,
    rank: int | str | None,
    generator: torch.Generator,
    exact: bool = False,
    limit: int = 100,
    report: Report | None = None,
) -> Candidate:
    """From a start near the truth to the least squares solution on ``sequences`` sequences, more if they do not
    determine it: while the held-out error is well above the fitted one, the rows are quadrupled. Thin factors
    need fewer and begin with those, unless ``exact``.
    """
    if rank is not None and source.d >= EARLY:
        found = thin_polish(source, Theta, sequences, exact, rank, generator, limit, report)
        if found is not None:
            return found
    m = Theta.shape[0]
    floor = floor_of(source.examples.dtype)
    most = min(len(source.fit), source.most())
    sequences = min(sequences, most)
    products = 0
    shape: Shape = Full(Theta.to(torch.float32))
    if isinstance(rank, int):
        shape = Factored.of(shape.theta(), rank)
    coarse = True
    while True:
        index = spaced(source.fit, sequences)
        if coarse:
            if rank == "auto" and source.d >= EARLY:
                # Low rank shows long before the end, and the last digits cost most: look for it on the way.
                solution = _coarse(source, index, m, shape, generator, limit, report, 2e-3)
                products += solution.products
                shape = solution.shape
                early = numerical_rank(shape.theta(), solution.residual) if solution.residual < 1e-2 else None
                if early is not None:
                    shape = Factored.of(shape.theta(), early)
            solution = _coarse(source, index, m, shape, generator, limit, report)
            products += solution.products
            shape = solution.shape
        used = rank if isinstance(rank, int) else None
        if rank == "auto" and solution.residual < 2e-2:
            used = numerical_rank(shape.theta(), solution.residual)
            if used is not None:
                shape = Factored.of(shape.theta(), used)
        problem = source.problem(index, m, torch.float64)
        solution = gauss_newton(Free(problem), shape.to(torch.float64), generator=generator, limit=limit,
                                damping=1e-4, report=report)
        products += solution.products
        shape, point = solution.shape, solution.point
        assert point.offset is not None
        held = source.error(source.select, point.Theta, point.W, point.offset)
        if used is not None and rank == "auto" and held > 2 * solution.residual and held > floor:
            # The gap was not a rank after all: give the empty directions back.
            rank, shape = None, Full(point.Theta)
            coarse = False
            continue
        if held <= floor or held <= 1.5 * solution.residual or sequences >= most:
            break
        sequences, coarse = min(4 * sequences, most), False
    return Candidate(point.Theta, point.W, point.offset, solution.residual, held, solution.reason, sequences,
                    problem.equations, used, products)


def visible_rank(parts: Tensor) -> int | None:
    """The rank at which singular values of rough estimates step down: noise fills the rest of the spectrum evenly.

    A head shows its rank by its last step of more than a third, if what is before it is three quarters of the head;
    half of the heads must show one, and the commonest counts.
    """
    most = min(parts.shape[1:]) // 2
    if most < 1:
        return None
    every = torch.linalg.svdvals(parts.double()).clamp_min(1e-300)
    shown = []
    for s in every:
        steps = torch.nonzero(s[:most] / s[1 : most + 1] > STEP).flatten() + 1
        if len(steps) and float(s[: int(steps[-1])].square().sum()) > 0.75 * float(s.square().sum()):
            shown.append(int(steps[-1]))
    return statistics.mode(sorted(shown, reverse=True)) if shown and 2 * len(shown) >= len(parts) else None


def thin_polish(
    source: Source, Theta: Tensor, sequences: int, exact: bool, rank: int | str, generator: torch.Generator,
    limit: int, report: Report | None,
) -> Candidate | None:
    """The polish in thin factors; None where no low rank shows."""
    m, d, k, e = Theta.shape[0], source.d, source.examples.length, source.examples.out_width
    q = rank if isinstance(rank, int) else visible_rank(Theta[:, :d])
    if q is not None and rank == "auto" and _beyond(Theta, q):
        q += 1
    if q is None or 2 * q > d:
        return None
    rows = min(math.ceil(4 * m * d / k), len(source.fit), source.most())
    first = source.problem(spaced(source.fit, rows), m, torch.float32)
    if first.rows < 2 * m * d:
        return None
    W = evaluate(first, Theta.to(torch.float32)).W
    p = visible_rank(W)
    if p is None:
        return None
    floor = floor_of(source.examples.dtype)
    most = min(len(source.fit), source.most(), max(16, room(source.device, KEPT) // (12 * m * k * (2 * q + p + k))))
    size = Size(d, e, k, source.examples.mask, q, p)
    count = min(sequences if exact else 8 * size.floor(m), most)
    shape = Thin.of(Theta.to(torch.float32), W, q, p)
    products, damping = 0, 1.0

    def coarse(target: float) -> Solution:
        # Far from the end a slow fit lacks a head, and what it leaves says more than its last digits.
        problem = source.problem(spaced(source.fit, count), m, torch.float32)
        return gauss_newton(ThinModel(problem), shape.to(torch.float32), generator=generator, limit=limit,
                            target=target, report=report, damping=damping, patience=3, least_gain=0.02)

    while True:
        solution = coarse(NEAR)
        products += solution.products
        shape, point = solution.shape, solution.point
        held = source.error(spaced(source.select, min(256, len(source.select))), point.Theta, point.W, point.offset)
        if held > 2 * solution.residual and count < most:
            # Saturated patterns say little about their head: better seen now than after the last digit.
            count, damping = min(4 * count, most), 1e-2
            continue
        if solution.residual < NEAR:
            damping = 1e-2
            solution = coarse(1e-5)
            products += solution.products
        shape = solution.shape.to(torch.float64)
        model = ThinModel(source.problem(spaced(source.fit, count), m, torch.float64))
        if solution.residual < NEAR:
            solution = gauss_newton(model, shape, generator=generator, limit=limit, damping=1e-4, report=report)
            products += solution.products
            shape = solution.shape
        point = model.evaluate(shape)
        residual = math.sqrt(point.loss / model.variation())
        assert point.offset is not None
        held = source.error(source.select, point.Theta, point.W, point.offset)
        if held <= max(floor, 1.5 * residual) or count >= most:
            break
        count, damping = min(4 * count, most), 1e-2
    if residual > NEAR and d < WIDE and rank == "auto":
        return None  # perhaps no rank after all, and a fit without one is affordable
    return Candidate(point.Theta, point.W, point.offset, residual, held, solution.reason, count,
                    model.problem.equations, q, products, p)


def _beyond(Theta: Tensor, q: int) -> bool:
    """Whether the key biases, the last row, lie outside the keys' space of the q leading directions: one more rank.

    Noise puts about √(Σ_{j>q} s_j²/d) into a row of a head; three times that, and most of the bias, in half of the
    heads is no noise.
    """
    d = Theta.shape[2]
    if Theta.shape[1] == d:
        return False
    _, s, Vh = torch.linalg.svd(Theta[:, :d].double(), full_matrices=False)
    u, space = Theta[:, d:].double(), Vh[:, :q]
    rest = (u - u @ space.mT @ space).flatten(1).norm(dim=1)
    noise = (s[:, q:].square().sum(1) / d).sqrt()
    return 2 * int((rest > (3 * noise).maximum(0.5 * u.flatten(1).norm(dim=1))).sum()) >= len(Theta)


def _coarse(
    source: Source, index: np.ndarray, m: int, shape: Shape, generator: torch.Generator, limit: int,
    report: Report | None, target: float = 1e-5,
) -> Solution:
    problem = source.problem(index, m, torch.float32)
    return gauss_newton(Free(problem), shape.to(torch.float32), generator=generator, limit=limit, target=target,
                        report=report)
