"""Bounds on the mean μ of independent z_1, z_2, … in [0, 1] of one law that hold at every sample size at once.

Bet against "μ ≥ m". One unit of money is put down; before z_j is seen a share c of all that may be lost is staked
on z_j < m, and what is there is multiplied by 1 + c(m − z_j)/(1 − m), which is 1 − c at z_j = 1 and never negative.
With shares c_k and the money divided into w_k, all fixed beforehand, there is after n

    K_n(m) = Σ_k w_k Π_j (1 + c_k (m − z_j)/(1 − m)),   Σ_k w_k = 1.

If μ ≥ m every factor has mean at most 1, so K_n(m) is a supermartingale that begins at 1, and by Ville's inequality
it ever reaches 1/δ with probability at most δ. Every factor grows with m, so {m : K_n(m) ≥ 1/δ} is an interval up
to 1, and its lower end U_n has P(U_n < μ for some n) ≤ δ (were U_n < μ, then K_n(μ) ≥ 1/δ): whoever looks as often
as one likes and stops when one likes is wrong with probability δ at most. K_n does not depend on the order of the
z_j, only on which were seen.

All staked (c = 1) is the bet for errors that are none: while all z_j = 0, K_n = w/(1 − m)ⁿ, and with w = 1 U_n
would be the exact 1 − δ^{1/n} of a binomial that was looked at once. Most of the money goes there; the rest is
spread over shares near 1, for a few exceptions, and over halves of halves, for means of a law that is no rare
event.

Ville, Étude critique de la notion de collectif (1939). Mixtures of bets: Robbins, Annals of Mathematical Statistics
41 (1970); Cover, Universal portfolios, Mathematical Finance 1 (1991). Bounds that hold at every sample size:
Howard, Ramdas, McAuliffe and Sekhon, Annals of Statistics 49 (2021); for means by betting: Waudby-Smith and Ramdas,
Journal of the Royal Statistical Society B 86 (2024); for quantiles: Howard and Ramdas, Bernoulli 28 (2022). This
mixture of fixed shares is ours: it needs no order and no memory but the z_j. Cost of a bound: some 40 passes over
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

# Shares of what may be lost, all of it first, and the money on each.
SHARES = (1.0, 0.9375, 0.875, 0.75, 0.5, *(2.0**-k for k in range(2, 13)))
MONEY = (0.6, 0.08, 0.07, 0.06, 0.05, *(0.14 / 11,) * 11)
EPS = float(np.finfo(np.float64).eps)
FINE = 1e-9  # a bound is found to this part of itself, and rounded up
BLOCK = 1 << 14  # so many of the z_j at a time


def log_capital(z: np.ndarray, m: float) -> float:
    """ln K_n(m), less what rounding may have added to it: z (n,) in [0, 1], 0 < m < 1.

    ln of a factor is log1p(−z) − log1p(−m) where all is staked; elsewhere a factor is at least 1 − c ≥ 1/16, known
    to a few eps, so that its ln is known to 64 eps and a sum of n of them to n eps (64 + Σ|ln|).
    """
    total, size = np.log(MONEY), np.zeros(len(SHARES))
    for start in range(0, len(z), BLOCK):
        part = z[start : start + BLOCK]
        with np.errstate(divide="ignore"):
            each = np.log1p(np.outer(SHARES, (m - part) / (1.0 - m)))
            each[0] = np.log1p(-part) - math.log1p(-m)
        total += each.sum(1)
        size += np.abs(each).sum(1)
    return _sum(total.tolist()) - len(z) * EPS * (64.0 + float(size[np.isfinite(size)].max()))


def log_counted(above: int, n: int, m: float) -> float:
    """The same where ``above`` of the z_j are 1 and the others 0."""
    logs = []
    for share, money in zip(SHARES, MONEY, strict=True):
        lost = -math.inf if share == 1.0 and above else above * math.log1p(-share) if above else 0.0
        logs.append(math.log(money) + lost - (n - above) * math.log1p(-share * m / (1.0 - (1.0 - share) * m)))
    return _sum(logs) - EPS * (64.0 + 4.0 * n)


def _sum(logs: list[float]) -> float:
    top = max(logs)
    return top + math.log(sum(math.exp(one - top) for one in logs))


def upper(z: np.ndarray, confidence: float) -> float:
    """U_n: the mean is at most this; 1 where nothing less is known."""
    return _least(float(z.mean()) if len(z) else 0.0, lambda m: log_capital(z, m), confidence)


def lower(z: np.ndarray, confidence: float) -> float:
    """The mean is at least this."""
    return 1.0 - upper(1.0 - z, confidence)


def upper_share(above: int, n: int, confidence: float) -> float:
    """``upper`` where ``above`` of the n are 1 and the others 0: no more of all the rest are."""
    return _least(above / n if n else 0.0, lambda m: log_counted(above, n, m), confidence)


def most_above(n: int, share: float, confidence: float) -> int:
    """With this many of n above a bound, or fewer, at most ``share`` of all are; −1 if n is too few to say so."""
    goal, low, high = -math.log1p(-confidence), -1, n + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if log_counted(middle, n, share) >= goal else (low, middle)
    return low


def least_above(n: int, share: float, confidence: float) -> int:
    """With this many of n above a bound, or more, more than ``share`` of all are; n + 1 if n is too few to say so.

    The same bet on the others, of which there would be at least 1 − share: reached, there are fewer."""
    return n - most_above(n, 1.0 - share, confidence)


def needed(share: float, confidence: float) -> int:
    """How many it takes to say that at most ``share`` are above a bound, if none is."""
    low, high = 0, 1
    while most_above(high, share, confidence) < 0 and high < 2**1000:  # shares that no sample supports
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if most_above(middle, share, confidence) >= 0 else (middle, high)
    return high


def to_decide(z: np.ndarray, m: float, confidence: float) -> float:
    """About how many like these it takes until the mean is known to be at most m; ∞ if that may never be."""
    gain = (m - z) / (1.0 - m)
    with np.errstate(divide="ignore"):
        times = [(-math.log1p(-confidence) - math.log(money)) / rate
                 for share, money in zip(SHARES, MONEY, strict=True)
                 if (rate := float(np.log1p(np.maximum(share * gain, -1.0)).mean())) > 0]
    return min(times, default=math.inf)


def _least(mean: float, logs: Callable[[float], float], confidence: float) -> float:
    """The least m in (mean, 1) with logs(m) ≥ ln 1/δ, by bisection, from above; 1 if there is none."""
    goal, low, high = -math.log1p(-confidence), mean, 1.0 - EPS
    if low >= high or logs(high) < goal:
        return 1.0
    while high - low > FINE * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if logs(middle) >= goal else (middle, high)
    return high
