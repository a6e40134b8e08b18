"""The heads on one line of keys: how many there are, and Θ_iδ for one δ.

Tokens x_j = b + t_jδ (line.py). Rows of one answer differ by combinations of the a_i = W_iᵀδ, whatever b is, so all
differences together span as many dimensions as there are heads, if these are fewer than outputs. Small steps of b
along directions q_j give

    T[row, j, :] = Σ_i ψ''(ℓ_row,i) (v_iᵀq_j) a_i + (what is the same in every row),

less its mean over rows an array of rank m (tensors.py), whose terms are placed on ψ' (place.py) and then fitted
exactly (line.py). Whether the fit is right its residual says: it falls to the noise of the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.learning.chosen.line import Exact, Line, Logits, fitted, grid
from headway.learning.chosen.place import Curve, Place, placed
from headway.learning.chosen.plan import directions
from headway.learning.chosen.tensors import numerical_rank, rank_one_terms

Ask = Callable[[Tensor], Tensor]  # X (n, k, d) → Y (n, k, e)

FIRST = 3  # lines that are asked first
RANK = 100.0  # times the noise, relative to the largest singular value, below which one counts as none
LEAST_RANK = 1e-9  # the same, where answers have no noise to speak of
STEPPED = 1e-4  # least length of a step, in logits
MET = 50.0  # times the noise that a fit may leave
LEAST_MET = 3e-8  # residual that counts as none in any case
SHORT = 30  # steps to see whether another place is better
BASES = 2  # base points at most around which steps are made


@dataclass(frozen=True)
class Seed:
    """b = origin + Bs, x_j = b + t_jδ; logits and a_i there; residual of the fit and what it may be."""

    origin: Tensor
    B: Tensor
    delta: Tensor
    fit: Exact
    met: float

    @property
    def heads(self) -> int:
        return len(self.fit.logits.w)

    @property
    def found(self) -> bool:
        return self.fit.residual <= self.met

    def theta(self) -> Tensor:
        """[Θ_i; u_iᵀ] of rank one with the logits of the seed: Θ_iδ = v_i on the span of base points."""
        logits, delta = self.fit.logits, self.delta
        B = self.B / self.B.square().sum(0)  # columns are orthogonal
        left = B @ logits.v.T  # (d, m)
        rest = delta - self.B @ (B.T @ delta)
        # κ = δᵀΘδ has a part outside the span, and so has the origin: one direction each, δ's own and the bias.
        left = left + torch.outer(rest, (logits.kappa - delta @ left) / float(rest @ delta)) if (
            float(rest @ rest) > 1e-6 * float(delta @ delta)) else left
        bias = logits.w - self.origin @ left
        rows = torch.cat([left, bias.unsqueeze(0)])  # (d + 1, m)
        return torch.einsum("rm,d->mrd", rows, delta) / float(delta @ delta)


class Lines:
    """Questions on lines with one δ, and what was answered."""

    def __init__(self, ask: Ask, length: int, width: int, scale: float, noise: float, draw: torch.Generator,
                 like: Tensor) -> None:
        self.ask, self.noise, self.draw, self.scale = ask, noise, draw, scale
        self.d = width

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=draw, dtype=torch.float64).to(like)

        self.normal = normal
        self.t = grid(length, like)
        Q = torch.linalg.qr(normal(width, width))[0]
        self.origin, self.delta = scale * normal(width), scale * normal(width)
        self.B = scale * math.sqrt(width) * Q
        self.s = like.new_zeros(0, width)
        self.Y: Tensor | None = None
        self.counted = 0  # lines asked before any steps

    def add(self, s: Tensor) -> Tensor:
        """Ask at base points s (n, r); the answers."""
        s = torch.nn.functional.pad(s, (0, self.d - s.shape[1]))
        b = self.origin + s @ self.B.T
        Y = self.ask(b.unsqueeze(1) + self.t.view(1, -1, 1) * self.delta)
        self.s = torch.cat([self.s, s])
        self.Y = Y if self.Y is None else torch.cat([self.Y, Y])
        return Y

    def spread(self, n: int, r: int) -> Tensor:
        """Base points in r directions, logits there of about their own size."""
        return self.normal(n, r) / math.sqrt(r)

    def line(self, r: int) -> Line:
        assert self.Y is not None
        return Line(self.t, self.s[:, :r], self.Y)

    @property
    def threshold(self) -> float:
        return max(LEAST_RANK, RANK * self.noise)

    def rank(self) -> int:
        assert self.Y is not None
        differences = (self.Y - self.Y.mean(1, keepdim=True)).flatten(0, 1)
        return numerical_rank(torch.linalg.svdvals(differences), self.threshold)


def count(lines: Lines) -> int | None:
    """Head count, if there are fewer than outputs."""
    before = -1
    asked = 0
    while True:
        more = FIRST if not asked else max(2, asked // 2)
        s = torch.zeros(more, lines.d, dtype=lines.t.dtype, device=lines.t.device)
        for j in range(more):  # the first is the origin; then one direction more each time
            r = min(asked + j, lines.d)
            if r:
                s[j, :r] = lines.spread(1, r)[0]
        lines.add(s)
        asked += more
        lines.counted = asked
        assert lines.Y is not None
        rank = lines.rank()
        if rank >= lines.Y.shape[2]:
            return None
        if rank == before:
            return rank
        before = rank


def slices(lines: Lines, bases: Tensor, r: int) -> Tensor:
    """T (bases·k, r, e) by central differences, less the mean over rows."""
    step = max(STEPPED, lines.noise ** (1 / 3))
    eye = step * torch.eye(r, dtype=bases.dtype, device=bases.device)
    points = torch.cat([(base + sign * eye) for base in bases[:, :r] for sign in (1, -1)])
    Y = lines.add(points)
    Y = Y.view(len(bases), 2, r, *Y.shape[1:])
    T: Tensor = ((Y[:, 0] - Y[:, 1]) / (2 * step)).transpose(1, 2).flatten(0, 1)
    return T


def planted(lines: Lines, m: int) -> Seed:
    """From steps around base points to an exact fit; a second base point if the first is not enough."""
    r = max(directions(m, lines.d), min(lines.d, lines.counted - 1))
    met = max(LEAST_MET, MET * lines.noise)
    best, whole = None, None
    for base in range(BASES):
        part = slices(lines, lines.s[base : base + 1], r)
        whole = part if whole is None else torch.cat([whole, part])
        line = lines.line(r)
        fit = solved(line, *started(lines, whole - whole.mean(0), m, r), met)
        if best is None or fit.residual < best.fit.residual:
            best = Seed(lines.origin, lines.B[:, :r], lines.delta, fit, met)
        if best.found:
            break
    assert best is not None
    return best


def started(lines: Lines, T: Tensor, m: int, r: int) -> tuple[Tensor, list[list[tuple[float, Place]]]]:
    """v̂_i from the rank-one terms of the slices, and where each head may lie on its curve."""
    v, a = rank_one_terms(T, m, lines.draw)
    curve, s = Curve(lines.t), lines.s[: lines.counted, :r]
    assert lines.Y is not None
    Y = lines.Y[: lines.counted]
    given = torch.linalg.lstsq(a, (Y - Y.mean(1, keepdim=True)).flatten(0, 1).T)[0].T.view(*Y.shape[:2], m)
    return v, [placed(curve, given[..., i], s @ v[:, i], lines.t, 0.5 * math.sqrt(r)) for i in range(m)]


def solved(line: Line, v: Tensor, places: list[list[tuple[float, Place]]], met: float) -> Exact:
    """The exact fit from the best places, or from others of one head at a time while it is none."""

    def start(chosen: list[Place]) -> Logits:
        w, b, kappa = v.new_tensor(chosen).T
        return Logits((v * b).T.contiguous(), w, kappa)

    chosen = [each[0][1] for each in places]
    best = fitted(line, start(chosen))
    tries = sorted((place[0] / max(each[0][0], 1e-300), i, j) for i, each in enumerate(places)
                   for j, place in enumerate(each) if j)
    for _, i, j in tries[: 2 * len(places) + 2]:
        if best.residual <= met:
            break
        other = [*chosen[:i], places[i][j][1], *chosen[i + 1 :]]
        found = fitted(line, start(other), SHORT)
        if found.residual < best.residual / 2:
            best, chosen = fitted(line, found.logits), other
    return best
