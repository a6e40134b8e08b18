"""Which directions of the heads do the inputs determine?

Of a small change v of the heads the labels show vᵀNv, N = Jᵀ(I − Π)J, once W and c have followed as well as they
can. A direction is *flat* where that is nothing: other heads do the same on these inputs. All heads are looked at
together, so that what one of them changes and others undo is flat too; the flat directions of a head are its own
parts of these. "Nothing" is relative to what the change is worth if nothing undoes it (white.py), where also those
directions are found that are empty and so flat without more.

Small: C, which is N in white coordinates, is formed, and its eigenvalues below FLAT are counted.

Large: let ω be a Gaussian vector of that space. Whatever x is, ω − Cx has all that ω has in flat directions, and
that is more than MISSED, but once in a hundred times (LEVEL). So if minimal residuals end below MISSED, nothing is
flat. If they end in a vector that C does not see, it is a random flat vector, and the mean of its squared size is
the number of flat directions. If the products run out, what is left bounds that number from above.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy import special
from torch import Tensor

from headway.core.counting import Size
from headway.learning.candidate import Candidate
from headway.learning.shapes import Factored
from headway.learning.source import Source, spaced
from headway.learning.thin import ThinModel
from headway.learning.white import FreeWhite, ThinWhite, White
from headway.linalg.projected import Problem, evaluate
from headway.linalg.thin import Thin

FLAT = 1e-9  # curvature in white coordinates below which a direction is not determined
LEVEL = 0.01  # chance that a flat direction is missed
MISSED = float(special.chdtri(1, 1 - LEVEL))  # a Gaussian's square is below with that chance
PART = 1e-3  # of a flat direction that lies in a head and makes it one of that head
DENSE = 1000  # unknowns up to which C is formed
WORK = 2e10  # rows times squared unknowns that this may take
PRODUCTS = 200  # with C, for one random vector
VECTORS = 4  # random vectors by which flat directions are counted
APART = 1e-2  # singular value of these, relative to the largest, above which they differ
ENOUGH = 8  # times the counting floor of sequences, to begin with
MORE = 4  # times that, if something is flat

Pulse = Callable[[], None]


@dataclass(frozen=True)
class Determined:
    """``flat`` directions, out of ``directions``, head by head.

    ``exact``: these are counts; if not, some are estimates. There may be ``more``, all heads together; where that
    is 0 there are no others, up to a chance of LEVEL. ``least``: directions that are not flat have at least this
    curvature, in white coordinates; 0 where that is not known.
    """

    flat: tuple[int, ...]
    directions: tuple[int, ...]
    exact: bool
    more: int
    least: float
    products: int
    sequences: int

    @property
    def settled(self) -> bool:
        return not self.more

    @property
    def everything(self) -> bool:
        """Whether all is determined."""
        return self.settled and not any(self.flat)


def determined(
    source: Source, best: Candidate, generator: torch.Generator, settle: bool = True, pulse: Pulse = lambda: None
) -> Determined:
    """Which directions of the heads ``best``, in its order, the examples leave open.

    More rows only add curvature: few are asked first, and many if something is flat there, or if that is not
    settled and ``settle`` says that it has to be. No others than those fitted, unless the fit meets them too.
    """
    data, fitted = source.examples, min(best.sequences, len(source.fit))
    size = Size(source.d, data.out_width, data.length, data.mask, best.rank, best.out_rank)
    few = ENOUGH * size.floor(best.heads)

    def of(count: int) -> Determined:
        return asked(source.problem(spaced(source.fit, count), best.heads, torch.float64), best, generator, pulse)

    most = source.most()
    if _thin(best):
        assert best.rank is not None and best.out_rank is not None
        most = source.most_thin(best.heads, best.rank, best.out_rank)
    found = of(min(few, fitted, most))
    if found.everything or not (found.settled or settle):
        return found
    many = int(WORK / best.Theta.numel() ** 2 / data.length) if small(best) else MORE * few
    many = min(max(many, few), len(source.fit), most)
    if many > fitted and not _meets(source, best, spaced(source.fit, many)):
        many = fitted
    return of(many) if many > found.sequences else found


def small(best: Candidate) -> bool:
    """Whether the directions are counted, not estimated."""
    return best.Theta.numel() <= DENSE and not _thin(best)


def _thin(best: Candidate) -> bool:
    return best.rank is not None and best.out_rank is not None and (
        2 * max(best.rank, best.out_rank) <= best.Theta.shape[2])


def _meets(source: Source, best: Candidate, index: np.ndarray) -> bool:
    """Whether the fit explains these sequences as well as those it was fitted to or chosen by."""
    return source.error(index, best.Theta, best.W, best.offset) <= 3 * max(best.residual, best.error)


def asked(problem: Problem, best: Candidate, generator: torch.Generator, pulse: Pulse = lambda: None) -> Determined:
    """The same of the rows of a problem."""
    Theta, W, q, p = best.Theta.double(), best.W.double(), best.rank, best.out_rank
    if _thin(best):
        assert q is not None and p is not None
        shape = Thin.of(Theta, W, q, p)
        point = ThinModel(problem).evaluate(shape)
        return estimated(ThinWhite(problem, point, shape, generator), problem, generator, pulse)
    low = None if q is None or q >= Theta.shape[2] else Factored.of(Theta, q)
    white = FreeWhite(problem, evaluate(problem, Theta), low, generator)
    return counted(white, problem) if small(best) else estimated(white, problem, generator, pulse)


# -- counted ------------------------------------------------------------------------------------------------


def counted(white: FreeWhite, problem: Problem) -> Determined:
    """All eigenvalues of C, and how far its flat directions reach into each head."""
    m, r, d = white.Theta.shape
    basis, C = _basis(white), white.dense()
    C = C if basis is None else basis.T @ C @ basis
    values = torch.linalg.eigvalsh(C)
    rest = values[values >= FLAT]
    flat = C.new_zeros(0, m, r * d)
    if len(rest) < len(values):
        vectors = torch.linalg.eigh(C)[1][:, : len(values) - len(rest)]
        flat = (vectors if basis is None else basis @ vectors).T.reshape(-1, m, r * d)
    return _found(white, problem, _reach(flat), least=float(rest[0]) if len(rest) else 0.0)


def _basis(white: FreeWhite) -> Tensor | None:
    """Orthonormal, of the directions that count, (m·r·d, their number); None if all do."""
    m, r, d = white.Theta.shape
    live = white.scores.mask.flatten() > 0
    if white.scores.spaces is None:
        if bool(live.all()):
            return None
        return torch.eye(m * r * d, dtype=white.Theta.dtype, device=white.Theta.device)[:, live]
    ones = torch.eye(r * d, dtype=white.Theta.dtype, device=white.Theta.device).view(r * d, 1, r, d)
    onto = torch.stack([white.project(one.expand(m, r, d)).flatten(1) for one in ones], dim=1)  # (m, r·d, r·d)
    values, vectors = torch.linalg.eigh(onto)
    every = vectors.new_zeros(m, r * d, m, r * d)
    for i in range(m):
        every[i, :, i] = vectors[i]
    basis: Tensor = every.view(m * r * d, -1)[:, values.flatten() > 0.5]
    return basis


def _reach(flat: Tensor) -> tuple[int, ...]:
    """Dimension of each head's part of the span of orthonormal vectors (f, m, size)."""
    return tuple(int((torch.linalg.svdvals(part) > PART).sum()) if len(flat) else 0 for part in flat.unbind(1))


def _found(
    white: White, problem: Problem, flat: tuple[int, ...], exact: bool = True, more: int = 0, least: float = 0.0
) -> Determined:
    """With the empty directions, which are flat too."""
    every = tuple(min(a + b, n) for a, b, n in zip(flat, white.empty, white.directions, strict=True))
    return Determined(every, white.directions, exact, min(more, sum(white.directions) - sum(every)), least,
                      white.count, problem.sequences)


# -- estimated ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Left:
    """What minimal residuals leave of a random vector, r(C)ω with a polynomial r, r(0) = 1, r'(0) = −``slope``: its
    squared size and the curvature along it."""

    vector: Tensor
    mass: float
    along: float
    slope: float

    @property
    def least(self) -> float:
        return 0.5 / max(self.slope, 1e-300)

    @property
    def nothing(self) -> bool:
        """No direction has a curvature λ below ``least``, but with a chance of LEVEL: its part of ω is MISSED at
        least, so r(λ)² ≤ mass/MISSED, r(λ) < 1/2; while r(λ) ≥ 1 − λ·slope up to its first root."""
        return self.mass < MISSED / 4 and self.least > FLAT

    @property
    def flat(self) -> bool:
        return self.along < FLAT and self.mass >= MISSED / 4


def left_of(white: White, generator: torch.Generator, pulse: Pulse = lambda: None) -> Left:
    """min over x of ‖ω − Cx‖ for a random ω, by conjugate residuals, until it is nothing or flat."""
    like = white.like()
    r = white.project(torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like))
    Cp = Cr = white.curvature(r)
    rCr, p, slope = float((r * Cr).sum()), 1.0, 0.0  # p: the value at 0 of the search direction's polynomial
    for step in range(PRODUCTS):
        mass = float(r.square().sum())
        left = Left(r, mass, max(rCr, 0.0) / max(mass, 1e-300), slope)
        if left.nothing or left.flat or step == PRODUCTS - 1:
            break
        pulse()
        length = rCr / max(float(Cp.square().sum()), 1e-300)
        slope += length * p
        r = r - length * Cp
        Cr = white.curvature(r)
        rCr, old = float((r * Cr).sum()), rCr
        p, Cp = 1.0 + rCr / max(old, 1e-300) * p, Cr + rCr / max(old, 1e-300) * Cp
    return left


def estimated(
    white: White, problem: Problem, generator: torch.Generator, pulse: Pulse = lambda: None
) -> Determined:
    """Whether anything is flat, from one random vector; if so how much, from VECTORS."""
    none = (0,) * len(white.directions)
    first = left_of(white, generator, pulse)
    if first.nothing:
        return _found(white, problem, none, least=first.least)
    if not first.flat:
        return _found(white, problem, none, more=_most(first.mass))
    others = (left_of(white, generator, pulse) for _ in range(VECTORS - 1))
    flat = torch.stack([one.vector.flatten(1) for one in (first, *others) if one.flat])  # (vectors, m, size)
    _, s, Vh = torch.linalg.svd(flat.flatten(1), full_matrices=False)
    seen = _reach(Vh[s > APART * s[0]].view(-1, *flat.shape[1:]))
    share = flat.square().sum(2).mean(0).tolist()
    # Vectors that span less than their number span it all; as many as they are, there are more.
    count = tuple(n if n < len(flat) else max(n, round(part)) for n, part in zip(seen, share, strict=True))
    return _found(white, problem, count, exact=max(seen) < len(flat))


def _most(mass: float) -> int:
    """The largest f for which f squares of Gaussians add up to less than ``mass`` with a chance above LEVEL; 1 at
    least."""
    f = np.arange(1, 20 + math.ceil(2 * mass + 10 * math.sqrt(mass)))
    return int(f[special.chdtr(f, mass) > LEVEL].max(initial=1))


# -- are the W_i unique? ------------------------------------------------------------------------------------


def dependence(source: Source, best: Candidate, sequences: int) -> float:
    """Least over largest singular value of the features [P_1X | … | P_mX | 1]: where it is nothing, the W_i are not
    unique.

    Equal heads do that; so do, with two tokens, a head, its reflection and uniform attention.
    """
    m = best.heads
    if best.rank is not None and best.out_rank is not None:
        # Of thin heads the features are P_iXV_i, with V_i orthonormal.
        model = ThinModel(source.problem(spaced(source.fit, best.sequences), m, torch.float64))
        return condition(model.evaluate(Thin.of(best.Theta, best.W, best.rank, best.out_rank)).factor)
    count = min(sequences, len(source.fit))
    if source.examples.take([0]).padding is None:
        count = min(count, math.ceil(6 * (m * source.d + 1) / source.examples.length))
    return condition(evaluate(source.problem(spaced(source.fit, count), m, torch.float64), best.Theta).factor)


def condition(L: Tensor) -> float:
    """Smallest over largest singular value of a Cholesky factor, by power and inverse iteration where it is large:
    the Rayleigh quotients are off by a few per cent, and orders of magnitude are asked for."""
    if len(L) <= 512:
        s = torch.linalg.svdvals(L)
        return float(s[-1] / s[0])
    v = torch.randn(len(L), 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(L)
    w = v
    for _ in range(8):
        v, w = torch.linalg.qr(L @ (L.T @ v))[0], torch.linalg.qr(torch.cholesky_solve(w, L))[0]
    return float((L.T @ w).norm(dim=0).min() / (L.T @ v).norm(dim=0).max())
