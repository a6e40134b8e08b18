"""Labelled sequences: the paper's tokenized mixture and planted models, or a user's arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.core import checks
from headway.training.network import Network


@dataclass(frozen=True)
class Labelled:
    """X (n, T, d), y (n,) of ±1; where known, which tokens are relevant (n, T) and the means μ₊, μ₋, ν_1, …"""

    X: Tensor
    y: Tensor
    relevant: Tensor | None = None
    means: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def radius(self) -> float:
        """R: the longest token."""
        return float(self.X.norm(dim=2).max())

    def take(self, index: slice | Tensor) -> Labelled:
        relevant = None if self.relevant is None else self.relevant[index]
        return Labelled(self.X[index], self.y[index], relevant, self.means)


def labelled(X: Any, y: Any) -> Labelled:
    """A user's arrays: X (n, T, d) of finite numbers, y (n,) of ±1."""
    X = checks.floating("X", X).double()
    checks.shape("X", X, ("n", "T", "d"), "one (T, d) matrix a sequence, stacked")
    y = checks.floating("y", y).double()
    checks.shape("y", y, (len(X),), "one label a sequence")
    if len(y) < 1:
        checks.refuse("y", "at least one label", "none", "more data")
    other = y[(y != 1) & (y != -1)]
    if len(other):
        checks.refuse("y", "labels +1 and −1", f"{float(other[0]):g} among them", "2 * y − 1 for labels 0 and 1")
    return Labelled(X, y)


def mixture(
    count: int, *, tokens: int = 10, width: int = 10, zeta: float = 0.1, strength: float = 2.0, nuisance: int = 4,
    noise: float = 0.5, seed: int = 0, basis_seed: int = 0,
) -> Labelled:
    """y uniform; ζT positions carry μ_y, the others ν_j + z with j uniform and z Gaussian of deviation ``noise`` an
    entry; μ₊, μ₋, ν_1, …, ν_M orthogonal of norm S. ``basis_seed`` draws the means, ``seed`` everything else."""
    n, T, d, M = (checks.whole(name, value) for name, value in (
        ("count", count), ("tokens", tokens), ("width", width), ("nuisance", nuisance)))
    checks.number("strength", strength, strictly=True)
    checks.number("noise", noise)
    marked = checks.number("zeta", zeta) * T
    if abs(marked - round(marked)) > 1e-9 or not 1 <= round(marked) <= T:
        checks.refuse("zeta", "a part of the tokens, at most 1, with zeta·tokens a whole number of at least 1",
                      f"{zeta:g}·{T} = {marked:g}", f"zeta={min(max(1, round(marked)), T) / T:g}")
    if M + 2 > d:
        checks.refuse("width", f"at least {M + 2}, for {M} nuisance means and two signals at right angles", d,
                      f"width={M + 2}")
    first = torch.Generator().manual_seed(checks.whole("basis_seed", basis_seed, 0))
    draw = torch.Generator().manual_seed(checks.whole("seed", seed, 0))
    means: Tensor = strength * torch.linalg.qr(torch.randn(d, M + 2, generator=first, dtype=torch.float64))[0].T
    y = 2.0 * torch.randint(0, 2, (n,), generator=draw).double() - 1.0
    which = 2 + torch.randint(0, M, (n, T), generator=draw)
    order = torch.rand(n, T, generator=draw).argsort(1)
    relevant = order < round(marked)
    signal = (y < 0).long().unsqueeze(1).expand(n, T)
    X = means[torch.where(relevant, signal, which)]
    Z = noise * torch.randn(n, T, d, generator=draw, dtype=torch.float64)
    return Labelled(torch.where(relevant.unsqueeze(2), X, X + Z), y, relevant, means)


def planted(
    count: int, *, tokens: int = 10, width: int = 10, heads: int = 4, scale: float = 1.0, seed: int = 0,
    teacher_seed: int = 0,
) -> Labelled:
    """Gaussian tokens of variance 1/d an entry, y = sign Φ(X; θ) for a random network of ``heads`` heads."""
    n, T, d, H = (checks.whole(name, value) for name, value in (
        ("count", count), ("tokens", tokens), ("width", width), ("heads", heads)))
    first = torch.Generator().manual_seed(checks.whole("teacher_seed", teacher_seed, 0))
    draw = torch.Generator().manual_seed(checks.whole("seed", seed, 0))
    U = torch.randn(H, T, d, generator=first, dtype=torch.float64)
    W = scale * torch.randn(H, d, d, generator=first, dtype=torch.float64)
    X = torch.randn(n, T, d, generator=draw, dtype=torch.float64) / d**0.5
    y = torch.sign(Network(U, W, torch.ones(H, dtype=torch.float64))(X))
    return Labelled(X, torch.where(y == 0, torch.ones_like(y), y))
