"""What rank is it? Read off singular values of heads that are known roughly, or nearly.

A rank that is read is a guess: the fit that uses it is looked at on other sequences. Ranks that are counted, in
heads known to the last digits, are core.convert.ranks.
"""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

NARROW = 0.02  # relative residual below which ranks are read off
STEP = 1.5  # ratio of neighbouring singular values that shows a rank in a rough estimate


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


def visible_rank_with_bias(Theta: Tensor) -> int | None:
    """The same of [Θ_i; u_i], one more where the key bias u_i, a last row, lies outside the keys' space of Θ_i.
    Looked at together they would show one large direction where there is no rank."""
    q = visible_rank(Theta[:, : Theta.shape[2]])
    return q if q is None else q + _beyond(Theta, q)


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
