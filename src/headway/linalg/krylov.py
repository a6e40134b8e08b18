"""Solves and eigenvalues from products alone: conjugate gradients, and Lanczos with an error bound."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor], precondition: Callable[[Tensor], Tensor], g: Tensor, tolerance: float,
    limit: int,
) -> Tensor:
    """(A v = g) to a relative error of ``tolerance`` in the norm of the preconditioner."""
    v, r = torch.zeros_like(g), g
    z = precondition(r)
    p, rz = z, float((r * z).sum())
    goal = tolerance**2 * rz
    for _ in range(limit):
        Ap = apply(p)
        curvature = float((p * Ap).sum())
        if not curvature > 0 or not math.isfinite(curvature):
            break
        v = v + (rz / curvature) * p
        r = r - (rz / curvature) * Ap
        z = precondition(r)
        rz, old = float((r * z).sum()), rz
        if not rz > goal:
            break
        p = z + (rz / old) * p
    return v


def lanczos(
    apply: Callable[[Tensor], Tensor], start: Tensor, steps: int,
    enough: Callable[[Tensor], bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """Ritz values of a symmetric operator after ``steps`` products, ascending, and the vector of the least one.
    ``enough`` looks at the values every five products and may end it sooner.

    Reorthogonalised in full, twice: a lost direction would pass for a zero eigenvalue.
    """
    basis = [start / start.norm()]
    alpha: list[float] = []
    beta: list[float] = []
    for j in range(steps):
        w = apply(basis[j])
        alpha.append(float((w * basis[j]).sum()))
        for _ in range(2):
            for b in basis:
                w = w - (w * b).sum() * b
        beta.append(float(w.norm()))
        if beta[-1] < 1e-6 * max(abs(a) for a in alpha):
            break
        basis.append(w / beta[-1])
        if enough is not None and j % 5 == 4 and enough(_ritz(alpha, beta)[0]):
            break
    values, vectors = _ritz(alpha, beta)
    least = sum((float(vectors[j, 0]) * basis[j] for j in range(len(alpha))), torch.zeros_like(start))
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
