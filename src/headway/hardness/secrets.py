"""Layers that hide a secret, for sequences of two tokens: our instances of what the first paper's lower bounds say.

That worst cases cost exponentially in the heads is the paper's statement; the layers below, which hide a parity or
a rounded inner product, were worked out here and are not claimed to be the ones of its proofs.

With z = (x_2 − x_1)/2 ∈ {−1, 0, 1}^d and Θ_i = β e_ℓ (v + b_i e_ℓ')ᵀ, the first query prefers the second token by
2β x_1ℓ (⟨v, z⟩ + b_i z_ℓ'). For large β a head is a step of the integer ⟨v, z⟩, and sums of steps,
W_i = a_i e_ℓ'' e_1ᵀ, are any function of it. All heads have rank one and parallel W_i: exactly what the theorem's
conditions exclude.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.core import checks
from headway.core.layer import AttentionLayer

BETA = 20.0  # scores differ by β at least: patterns are 0 or 1 to 2e-9
MOST = 1_000_000  # values of an inner product that are looked at for steps


@dataclass(frozen=True)
class Secret:
    """A layer, the direction v it hides, and the coordinates (ℓ, ℓ', ℓ'') anyone may know."""

    layer: AttentionLayer
    hidden: Tensor  # v, (d,)
    known: tuple[int, int, int]

    def inner(self, X: Tensor) -> Tensor:
        """⟨v, z⟩ for sequences X (n, 2, d)."""
        return self._z(X) @ self.hidden

    def signed(self, X: Tensor, y: Tensor) -> Tensor:
        """y · x_1ℓ z_ℓ' z_ℓ'': the label without what the known coordinates do to it, 0 where they hide it."""
        first, second, third = self.known
        Z = self._z(X)
        return y * X[:, 0, first].to(y) * Z[:, second] * Z[:, third]

    def speaking(self, X: Tensor) -> Tensor:
        """Where x_1ℓ = z_ℓ' = z_ℓ'' = 1: there the first row shows the function of ⟨v, z⟩ undisturbed."""
        first, second, third = self.known
        Z = self._z(X)
        return (X[:, 0, first] == 1) & (Z[:, second] == 1) & (Z[:, third] == 1)

    def _z(self, X: Tensor) -> Tensor:
        return (X[:, 1] - X[:, 0]).to(self.hidden.dtype) / 2


def _steps(v: Tensor, thresholds: Tensor, weights: Tensor, known: tuple[int, int, int], beta: float) -> Secret:
    m, d = len(thresholds), len(v)
    first, second, third = known
    Theta, W = torch.zeros(m, d, d, dtype=torch.float64), torch.zeros(m, d, d, dtype=torch.float64)
    Theta[:, first] = beta * v
    Theta[:, first, second] += beta * thresholds
    W[:, third, 0] = weights
    return Secret(AttentionLayer(Theta, W), v, known)


def _coordinates(width: int, needed: int, seed: int) -> list[int]:
    order = np.random.default_rng(seed).permutation(width)
    return [int(j) for j in order[:needed]]


def parity(size: int, width: int, *, beta: float = BETA, seed: int = 0) -> Secret:
    """2s heads that hide the parity of 2s bits: S ⊂ [d] of ``size`` s, thresholds −s + ½ … s − ½, signs in turn.

    The first row's first output is −2 x_1ℓ z_ℓ' z_ℓ'' [s + Σ_S z_j odd]: the odd part is ∏_{j∈S} x_1j x_2j, so that
    every statistic of lower degree in these 2s bits vanishes.

    >>> parity(3, 12).layer.heads
    6
    """
    s, d = checks.whole("size", size), checks.whole("width", width)
    if d < s + 3:
        checks.refuse("width", f"at least {s + 3}: the hidden set and three known coordinates", d, f"width={s + 3}")
    chosen = _coordinates(d, s + 3, checks.whole("seed", seed, 0))
    v = torch.zeros(d, dtype=torch.float64)
    v[chosen[3:]] = 1.0
    i = torch.arange(2 * s, dtype=torch.float64)
    return _steps(v, i - s + 0.5, (-1.0) ** i, (chosen[0], chosen[1], chosen[2]), checks.number("beta", beta))


def parity_output(secret: Secret, X: Tensor) -> Tensor:
    """The first row's first output, from the definition of the parity instance."""
    first, second, third = secret.known
    Z = secret._z(X)
    odd = (secret.hidden.sum() + secret.inner(X)) % 2
    return -2 * X[:, 0, first] * Z[:, second] * Z[:, third] * odd


def rounding(numbers: int, modulus: int, levels: int = 2, *, beta: float = BETA, seed: int = 0) -> Secret:
    """Learning with rounding: w ∈ Z_q^n hidden, x_1 and x_2 spell u_1, u_2 ∈ Z_q^n in bits (±1 for 1 and 0, least
    first), and the first output is the rounded inner product ⌊p ⟨w, u_2 − u_1⟩ mod q / q⌋, p ``levels``, as a sum
    of steps: one head for each, about 2p/q times the largest inner product. q must be a power of two.
    """
    n, q = checks.whole("numbers", numbers), checks.whole("modulus", modulus, 2)
    p = checks.whole("levels", levels, 2)
    b = q.bit_length() - 1
    if q != 1 << b or p > q:
        checks.refuse("modulus", f"a power of two, at least the {p} levels", q,
                      f"modulus={1 << max(b, (p - 1).bit_length(), 1)}")
    w = np.random.default_rng(checks.whole("seed", seed, 0)).integers(1, q, n)
    v = torch.zeros(n * b + 3, dtype=torch.float64)
    v[3:] = torch.tensor([float(w[j] << t) for j in range(n) for t in range(b)], dtype=torch.float64)
    reach = int(v.sum())
    if 2 * reach > MOST:
        checks.refuse("modulus", f"inner products of at most {MOST:,} values", f"{2 * reach + 1:,}", "modulus=16")
    levels_at = [rounded(value, q, p) for value in range(-reach, reach + 1)]
    jumps = [(value, after - before) for value, before, after in zip(
        range(-reach + 1, reach + 1), levels_at, levels_at[1:], strict=False) if after != before]
    # A step at ⟨v, z⟩ ≥ τ is one where ⟨v, z⟩ + b > 0 with b = ½ − τ.
    thresholds = torch.tensor([0.5 - value for value, _ in jumps], dtype=torch.float64)
    weights = torch.tensor([float(jump) for _, jump in jumps], dtype=torch.float64)
    return _steps(v, thresholds, weights, (0, 1, 2), checks.number("beta", beta))


def rounded(value: int, modulus: int, levels: int) -> int:
    """⌊p (value mod q)/q⌋."""
    return levels * (value % modulus) // modulus


def rounding_output(secret: Secret, X: Tensor, modulus: int, levels: int = 2) -> Tensor:
    """What the steps add up to where the instance speaks: the rounded inner product, from the layer's answers."""
    Y = secret.layer(X)[:, 0, 0]
    total = float(secret.layer.W[:, secret.known[2], 0].sum())
    reach = int(secret.hidden.sum())
    # y = x_1ℓ'' Σa + 2 z_ℓ'' Σ(steps taken); the lowest level is the one at −reach.
    taken = (Y - X[:, 0, secret.known[2]].to(Y) * total) / 2
    return taken + rounded(-reach, modulus, levels)


@dataclass(frozen=True)
class Seen:
    """The largest correlation of a label with a product of ``degree`` tokens' entries, beside what chance would
    show among as many."""

    degree: int
    monomials: int
    largest: float
    chance: float

    @property
    def anything(self) -> bool:
        return self.largest > self.chance


def low_degree(X: Tensor, y: Tensor, degree: int, skip: tuple[int, ...] = ()) -> Seen:
    """max over products χ of ``degree`` distinct entries of (x_1, x_2) of abs(mean yχ)/deviation of y, entries at
    the coordinates ``skip`` left out. Under no relation a correlation of n samples is Gaussian with deviation
    1/√n, and the largest of M stays below √(2 log(100 M)/n) in 99 of 100 cases.
    """
    checks.whole("degree", degree)
    checks.shape("X", X, ("n", "k", "d"), "tokens as rows, features last")
    keep = [j for j in range(X.shape[2]) if j not in skip]
    bits = X[:, :, keep].flatten(1).to(torch.float64)
    n, width = bits.shape
    y = y.to(torch.float64) - y.to(torch.float64).mean()
    y = y / y.square().mean().sqrt().clamp_min(1e-300)
    largest, count = 0.0, 0
    for block in _blocks(itertools.combinations(range(width), degree), 4096):
        chi = bits[:, torch.tensor(block)].prod(2)  # (n, block)
        largest = max(largest, float((chi.T @ y).abs().max()) / n)
        count += len(block)
    return Seen(degree, count, largest, math.sqrt(2 * math.log(100 * max(count, 1)) / n))


def _blocks(items: Iterator[tuple[int, ...]], size: int) -> Iterator[list[tuple[int, ...]]]:
    while block := list(itertools.islice(items, size)):
        yield block
