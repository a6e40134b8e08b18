"""The span of the attention matrices, from second moments of inputs and outputs.

Let h_T(a) = C_a Tᵀx̃_a be the response of uniform attention to scores T, C_a the covariance of the tokens
in sight. The operator A(T) = E[h_T(a) y_aᵀ] is, for inputs with independent symmetric coordinates, close to
Σ_i c_i vec(W_i) vec(Θ_i)ᵀ with c_i > 0: its leading m right singular vectors nearly span the Θ_i, the left ones
the W_i. It is d² × d² and never formed: block power iteration, each half pass a streaming sum over examples.
Both halves are the Jacobian of attention at Θ = 0 and its adjoint, so they come from ``attention``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headway.core import attention
from headway.core.budget import BUDGET, Budget
from headway.learning.source import Source, spaced
from headway.linalg.projected import Rows
from headway.linalg.totals import ALONE, Alone

WIDE = 512  # regressors from which float32 will do
Batches = Callable[[], Iterable[Rows]]


@dataclass(frozen=True)
class Moments:
    basis: Tensor  # right singular vectors as matrices, (L, d + 1, d), orthonormal
    outputs: Tensor  # left singular vectors as matrices, (L, d, e)
    values: Tensor  # singular values, (L,), in units of the residualised labels
    explained: float  # part of the labels' variance that [x̄, x_a, 1] explains


def _linear_features(rows: Rows, P: Tensor) -> Tensor:
    """[x̄_a | x_a | 1], zero on rows that do not count: (n·k, 2d + 1)."""
    X = rows.X
    ones = X.new_ones(*X.shape[:2], 1)
    F = torch.cat([attention.attend(P, X).squeeze(2), X, ones], dim=2)
    return (F if rows.valid is None else F * rows.valid).view(-1, F.shape[2])


def residualise(batches: Batches, ranks: Alone = ALONE) -> tuple[Tensor, float, float, int]:
    """Least squares of y_a on [x̄_a, x_a, 1]: coefficients, variance explained, mean square left, rows."""
    G = R = None
    total, N, count = 0.0, 0, 0
    with ranks.together():
        for rows in batches():
            F = _linear_features(rows, attention.uniform(rows.X, rows.see))
            if F.shape[1] < WIDE:  # of a wide layer no more than the span is asked for, and float32 tells that
                F = F.double()
            Y = rows.Y.reshape(F.shape[0], -1).to(F)
            gram, cross = (F.T @ F).double(), (F.T @ Y).double()
            G = gram if G is None else G + gram
            R = cross if R is None else R + cross
            total += float(Y.double().square().sum())
            N += Y.numel() if rows.count else 0
            count += rows.count
    assert G is not None and R is not None
    G, R, total, N, count = ranks.totals(G, R, total, N, count)
    ridge = 1e-9 * float(G.diagonal().mean()) * torch.eye(len(G), dtype=G.dtype, device=G.device)
    coefficients = torch.linalg.solve(G + ridge, R)
    least = 1e-300 if len(G) < WIDE else 1e-7 * total  # what rounding leaves
    left = max(total - float((coefficients * R).sum()), least, 1e-300)
    return coefficients, 1.0 - left / max(total, 1e-300), left / max(N, 1), count


def without_linear(rows: Rows, coefficients: Tensor) -> Rows:
    """The same rows without what [x̄_a, x_a, 1] explains of their labels."""
    F = _linear_features(rows, attention.uniform(rows.X, rows.see))
    return replace(rows, Y=rows.Y - (F @ coefficients.to(rows.X)).view(rows.Y.shape))


def span(
    batches: Batches, L: int, *, generator: torch.Generator, passes: int = 6, ranks: Alone = ALONE,
    budget: Budget = BUDGET,
) -> Moments:
    """The L leading singular triples of A by at most ``passes`` power iterations.

    Stops early when no singular value moves by more than 2 % of the largest, or 10 % where the gap is clear. Costs
    about 8·d²·L flops a row and pass.
    """
    coefficients, explained, left, N = residualise(batches, ranks)

    def prepared() -> Iterator[tuple[Rows, Tensor, Tensor]]:
        if kept:
            yield from kept
            return
        total = 0
        for rows in batches():
            P = attention.uniform(rows.X, rows.see)
            Y = without_linear(rows, coefficients).Y / left**0.5
            ready = rows, P, Y
            total += Y.element_size() * (rows.X.numel() + 2 * rows.Y.numel())
            seen.append(ready)
            if total > keep:
                seen.clear()
            yield ready
        if total <= keep:
            kept.extend(seen)
        seen.clear()

    kept: list[tuple[Rows, Tensor, Tensor]] = []
    seen: list[tuple[Rows, Tensor, Tensor]] = []

    with ranks.together():
        first = next(iter(batches()))
    keep = budget.at(first.X.device, "moments")
    d, e = first.X.shape[2], first.Y.shape[2]
    L = min(L, d * e, d * (d + 1))
    V = _orthonormal(torch.randn(L, d * e, generator=generator, dtype=torch.float64)).view(L, d, e)
    V = V.to(first.X)
    values = first.X.new_zeros(L)
    basis = first.X.new_zeros(L, d + 1, d)
    for _ in range(passes):
        G = first.X.new_zeros(L, d + 1, d)
        with ranks.together():
            for rows, P, Y in prepared():
                G += attention.cotangent(P, rows.X, attention.spread(Y, V), d + 1)
        T = _orthonormal(ranks.total(G).flatten(1)).view(L, d + 1, d)
        A = first.X.new_zeros(L, d, e)
        with ranks.together():
            for rows, P, Y in prepared():
                response = attention.tangent(P, rows.X, T).view(-1, L * d)
                A += (response.T @ Y.reshape(-1, e)).view(L, d, e)
        A = ranks.total(A)
        U, s, Vh = torch.linalg.svd(A.flatten(1).T / N, full_matrices=False)
        V, basis = U.T.reshape(L, d, e), torch.einsum("kl,lrd->krd", Vh, T)
        moved = float((s - values).abs().max() / s.max().clamp_min(1e-30))
        values = s
        if moved < 0.02 or (moved < 0.1 and gap(values)[1] > 2):
            break
    return Moments(basis, V, values, explained)


def gap(values: Tensor, complete: bool = False) -> tuple[int, float]:
    """The head count at the widest ratio s_m/s_{m+1}, and that ratio; the last two values stand for the floor."""
    s = values.double().cpu().clamp_min(1e-300)
    if float(s[-1]) < 1e-7 * float(s[0]):
        # Labels in few directions: the operator has no more singular values, which is no gap.
        s, complete = s[s >= 1e-7 * s[0]], True
    if len(s) < 3:
        return 1, 1.0
    ratios = s[:-2] / s[1:-1]
    if flat(s):
        # Heads of very different strength above a level floor: the last step down counts, not the widest.
        above = torch.nonzero(ratios > 1.03).flatten()
        if len(above):
            m = int(above[-1])
            return m + 1, float(ratios[m])
    if complete:
        # Most singular values there are: the last ones fall off by themselves, with no floor to stand out from.
        ratios = ratios[: max(1, len(s) // 2)]
    m = int(ratios.argmax())
    return (m + 1, float(ratios[m])) if float(ratios[m]) > 1.1 else (1, 1.0)


def flat(values: Tensor) -> bool:
    """Whether the last third of the values, at least six, is a level floor: 1 % at most from one to the next."""
    s = values.double().cpu().clamp_min(1e-300)
    tail = s[-max(6, len(s) // 3) :]
    return len(s) >= 12 and bool((tail[:-1] / tail[1:] < 1.01).all())


def _orthonormal(rows: Tensor) -> Tensor:
    Q: Tensor = torch.linalg.qr(rows.T)[0]
    return Q.T.contiguous()


def find(
    source: Source, generator: torch.Generator, *, heads: int | None, most: int,
    left: Callable[[Rows], Rows] | None = None,
) -> tuple[Moments, int, float, int]:
    """Moments of the labels, or of what ``left`` leaves of them, on as many rows as make the gap clear: with the
    head count, the gap and the sequences used."""
    d = source.d
    L = 4 if left is not None else 8 if heads is None else heads + 4
    count = min(len(source.fit), max(256, math.ceil(8 * d * d / source.examples.length)))
    while True:
        index = spaced(source.fit, count)

        def batches(index: np.ndarray = index, L: int = L) -> Iterable[Rows]:
            for rows in source.stream(index, L, torch.float32):
                yield rows if left is None else left(rows)

        found = span(batches, L, generator=generator, ranks=source.ranks, budget=source.budget)
        m, ratio = gap(found.values, complete=2 * len(found.values) >= min(d, source.examples.out_width) * d)
        if found.explained > 1 - 1e-6:
            return found, 1, 1.0, count  # uniform attention says it all; what is left is rounding
        # Perhaps more heads than directions looked at; not above a level floor, which would not be one.
        hidden = m >= len(found.values) - 3 or (ratio < 1.3 and not flat(found.values))
        limit = min(most + 4, 2 * d)
        if hidden and heads is None and left is None and len(found.values) == L < limit:
            L = min(2 * L, limit)
        elif ratio < 1.5 and 1.25 * count < len(source.fit):
            count = min(4 * count, len(source.fit))
        else:
            return found, m, ratio, count
