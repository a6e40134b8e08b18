"""Gauss–Newton on all Θ_i to the floor of the arithmetic: few rows and float32 first, low rank where it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.learn.gauss_newton import Solution, gauss_newton
from headway.learn.shapes import Factored, Full, Shape
from headway.learn.source import Source, spaced

FLOORS = {torch.float64: 4096 * 2.0**-52, torch.float32: 64 * 2.0**-23}
EARLY = 64  # width from which a low rank is looked for before the coarse fit is done
Report = Callable[[float], None]


@dataclass(frozen=True)
class Polished:
    Theta: Tensor
    W: Tensor
    offset: Tensor
    residual: float  # relative, on the rows fitted
    held: float  # relative, on held-out sequences
    reason: str
    sequences: int
    equations: int
    rank: int | None
    products: int


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
    limit: int = 100,
    report: Report | None = None,
) -> Polished:
    """From a start near the truth to the least squares solution on ``sequences`` sequences, more if they do not
    determine it: while the held-out error is well above the fitted one, the rows are quadrupled.
    """
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
        solution = gauss_newton(problem, shape.to(torch.float64), generator=generator, limit=limit,
                                damping=1e-4, report=report)
        products += solution.products
        shape, point = solution.shape, solution.point
        assert point.offset is not None
        held = source.error(source.held, point.Theta, point.W, point.offset)
        if used is not None and rank == "auto" and held > 2 * solution.residual and held > floor:
            # The gap was not a rank after all: give the empty directions back.
            rank, shape = None, Full(point.Theta)
            coarse = False
            continue
        if held <= floor or held <= 1.5 * solution.residual or sequences >= most:
            break
        sequences, coarse = min(4 * sequences, most), False
    return Polished(point.Theta, point.W, point.offset, solution.residual, held, solution.reason, sequences,
                    problem.equations, used, products)


def _coarse(
    source: Source, index: np.ndarray, m: int, shape: Shape, generator: torch.Generator, limit: int,
    report: Report | None, target: float = 1e-5,
) -> Solution:
    problem = source.problem(index, m, torch.float32)
    return gauss_newton(problem, shape.to(torch.float32), generator=generator, limit=limit, target=target,
                        report=report)
