"""What examples hardly determine of turned queries and keys, and how steps go there.

Planes that turn little within a sequence make a rotary head all but plain: A_iT, B_iT⁻ᵀ with any T among their
columns say nearly what A_i, B_i say, and so do keys with another bias. With frequencies ω over k tokens the
curvature there is (ωk)² of what it is elsewhere: 1e-8 with bases in use. Two things follow.

A step far along T = exp(E) must follow the curve, A exp(E) and B exp(−Eᵀ): along its tangent (AE, −BEᵀ) the second
order of E, which the curve does not have, costs more than the step gains (``along``).

And conjugate gradients need the curvature C_i in E and in the keys' bias β, D being far from it. With g = ωOᵀ for a
random ω for each row, as in saturated.py, and s_a what the scores are worth to g, it is the mean of Σ_a z_az_aᵀ,

    z_a = (q_a ⊗ R_aᵀ Σ_b s_ab k̂_b − Σ_b s_ab (R_bᵀq̂_a) ⊗ k_b,  Σ_b s_ab R_bᵀq̂_a)      of E and of β.

What preconditions is (C_i + what a step costs)⁻¹ there and D⁻¹ on all that is orthogonal to it under D.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from headway.core.forms import Form
from headway.core.tangents import Chain
from headway.learning.shapes import inverse, lifted
from headway.linalg.krylov import Linear

SLOW = 3.0  # radians that a plane turns at most, from one end of the positions to the other, to count as slow
SEEN = 4  # rows from which C_i is formed, times its size
WIDEST = 4160  # E and β of one head, at most: all columns of a head of size 64
FARTHEST = 2.0  # of E in one step; what is longer is cut
PIECE = 1 << 25  # numbers of R_bᵀq̂_a at once
ALMOST = 1e-6  # of the mean of the diagonal of a part of D, added for the same
LIFT = {torch.float32: 1e-6, torch.float64: 1e-12}  # of the mean of the diagonal, added so that C_i has an inverse
Sides = Mapping[str, tuple[Tensor, Tensor]]  # what changes x of "query" and "key" cost: tr(xᵀ left x right)


class Shaped(Protocol):
    """Unknowns by name."""

    def parts(self, v: Tensor) -> dict[str, Tensor]: ...
    def gathered(self, parts: Mapping[str, Tensor]) -> Tensor: ...


def slow_columns(form: Form, size: int, here: Tensor, there: Tensor) -> Tensor:
    """Columns of queries and keys that are not turned, or by less than SLOW from one end to the other."""
    if form.rotary is None or form.normed is not None:
        return torch.arange(0)
    angles = torch.cat([form.rotary.angles(at, size).flatten(0, -2) for at in (here, there)])
    slow = (angles.amax(0) - angles.amin(0) <= SLOW).cpu()
    one, two, rest = form.rotary.planes(torch.arange(size))
    return torch.cat([one[slow], two[slow], rest]).sort().values


def along(A: Tensor, B: Tensor, dA: Tensor, dB: Tensor) -> tuple[Tensor, Tensor]:
    """A and B moved by dA and dB, the part (AE, −BEᵀ) that is nearest to them along its curve."""
    PA, PB = lifted(A.mT @ A, ALMOST), lifted(B.mT @ B, ALMOST)
    a, U = torch.linalg.eigh(PA)
    b, V = torch.linalg.eigh(PB)
    # PA·E + E·PB = Aᵀ dA − dBᵀ B
    E = U @ ((U.mT @ (A.mT @ dA - dB.mT @ B) @ V) / (a.unsqueeze(2) + b.unsqueeze(1))) @ V.mT
    farthest = torch.linalg.matrix_norm(E, keepdim=True)
    short = E * (FARTHEST / farthest.clamp_min(FARTHEST))
    T = torch.linalg.matrix_exp(torch.cat([short, -short.mT]))
    return (A + dA - A @ E) @ T[: len(A)], (B + dB + B @ E.mT) @ T[len(A) :]


def squares(chain: Chain, worth: Tensor, columns: Tensor, sequences: int) -> Tensor:
    """Σ_a z_az_aᵀ over the first sequences, (m, s² + s, s² + s); ``worth`` is g for every row, (n, m, k, p)."""
    rotary, s = chain.form.rotary, len(columns)
    assert rotary is not None
    gS, _ = chain.of_scores(worth)
    flat = chain.flatness()
    gS = gS if flat is None else gS * flat
    asked = chain.of_raw_scores(gS)["query"]
    m, k, q = chain.Q.shape[1:]
    keys = chain.K.shape[2]
    each = chain.there.ndim == (2 if rotary.vectors is None else 3)  # places of every sequence's own
    piece = max(1, PIECE // (k * keys * q))
    total = gS.new_zeros(m, s * s + s, s * s + s)
    for begin in range(0, sequences, piece):
        some = slice(begin, min(begin + piece, sequences))
        n = some.stop - begin
        places = chain.there[some] if each else chain.there.expand(n, *chain.there.shape)
        at = -places.flatten(0, 1).unsqueeze(1).expand(n * keys, k, *places.shape[2:])
        for i in range(m):
            # Every query turned back from the place of every key.
            asking = chain.q_turned[some, i].unsqueeze(1).expand(n, keys, k, q).reshape(n * keys, 1, k, q)
            told = gS[some, i].mT.unsqueeze(3) * rotary.turn(asking, at).view(n, keys, k, q)[..., columns]
            second = told.permute(0, 2, 3, 1) @ chain.K[some, i][..., columns].unsqueeze(1)
            first = chain.Q[some, i][..., columns].unsqueeze(3) * asked[some, i][..., columns].unsqueeze(2)
            z = torch.cat([(first - second).flatten(2), told.sum(1)], dim=2).flatten(0, 1)
            total[i].addmm_(z.mT, z)
    return total


@dataclass(frozen=True)
class Slow:
    """Z: (E, β) ↦ (AE, −BEᵀ + eβᵀ), E row by row, in the slow columns; e is the row of biases."""

    columns: Tensor  # s of them
    A: Tensor  # (m, r, s)
    B: Tensor
    sides: Sides  # D
    C: Tensor  # (m, s² + s, s² + s), summed over all rows

    @classmethod
    def of(cls, columns: Tensor, A: Tensor, B: Tensor, sides: Sides, C: Tensor) -> Slow:
        return cls(columns, A[..., columns], B[..., columns], sides, C)

    def out(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Zx for coefficients x (m, s² + s)."""
        E, beta = self._apart(x)
        dB = -self.B @ E.mT
        dB[:, -1] += beta
        return self._wide(self.A @ E), self._wide(dB)

    def back(self, gA: Tensor, gB: Tensor) -> Tensor:
        """Zᵀ."""
        gA, gB = gA[..., self.columns], gB[..., self.columns]
        return torch.cat([(self.A.mT @ gA - gB.mT @ self.B).flatten(1), gB[:, -1]], dim=1)

    def cost(self, sides: Sides) -> Tensor:
        """ZᵀXZ for a cost X."""
        (S, RA), (M, RB) = (sides[name] for name in ("query", "key"))
        RA, RB, m, s = self._inner(RA), self._inner(RB), len(self.A), len(self.columns)
        whole = _kron(self.A.mT @ S @ self.A, RA) + _kron(RB, self.B.mT @ M @ self.B)
        mixed = -(RB.unsqueeze(2) * (M[:, -1:] @ self.B).unsqueeze(3)).reshape(m, s * s, s)
        return torch.cat([torch.cat([whole, mixed], 2), torch.cat([mixed.mT, M[:, -1:, -1:] * RB], 2)], 1)

    def solved(self, g: Tensor) -> Tensor:
        """(ZᵀDZ)⁻¹. With P = AᵀSA, μ = M_ee, b = (MB)_e/μ: β is eliminated, which leaves B°ᵀMB° = BᵀMB − μbbᵀ in

            P E R_A + R_B E B°ᵀMB° = g_E + g_β bᵀ,     β = R_B⁻¹g_β/μ + E b."""
        gE, g_beta = self._apart(g)
        left, right, sizes, bias, b = self._split
        E = left @ ((left.mT @ (gE + g_beta.unsqueeze(2) * b) @ right) / sizes) @ right.mT
        beta = (bias @ g_beta.unsqueeze(2) + E @ b.mT).squeeze(2)
        return torch.cat([E.flatten(1), beta], dim=1)

    @cached_property
    def _split(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        (S, RA), (M, RB) = (self.sides[name] for name in ("query", "key"))
        mu = M[:, -1:, -1:]
        b = M[:, -1:] @ self.B / mu
        first, left = _together(self.A.mT @ S @ self.A, self._inner(RB))
        second, right = _together(self._inner(RA), self.B.mT @ M @ self.B - mu * b.mT @ b)
        bias = inverse(lifted(self._inner(RB), ALMOST)) / mu
        return left, right, first.unsqueeze(2) * second.unsqueeze(1) + 1, bias, b

    def _apart(self, x: Tensor) -> tuple[Tensor, Tensor]:
        s = len(self.columns)
        return x[:, : s * s].view(-1, s, s), x[:, s * s :]

    def around(self, near: Linear, held: Sides, shape: Shaped) -> Linear:
        """D⁻¹ on what is orthogonal to Z under D, (C + Zᵀ held Z)⁻¹ on Z."""
        within = inverse(lifted(self.C + self.cost(held), LIFT[self.C.dtype]))

        def priced(x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            """D x."""
            a, b = (self.sides[name][0] @ x[name] @ self.sides[name][1] for name in ("query", "key"))
            return a, b

        def less(x: Mapping[str, Tensor], pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            return {**x, "query": x["query"] - pair[0], "key": x["key"] - pair[1]}

        def solve(g: Tensor) -> Tensor:
            parts = shape.parts(g)
            inside = self.back(parts["query"], parts["key"])
            a, b = self.out(self.solved(inside))
            x = shape.parts(near(shape.gathered(less(parts, priced({"query": a, "key": b})))))
            x = less(x, self.out(self.solved(self.back(*priced(x)))))
            return shape.gathered(less(x, self.out(-(within @ inside.unsqueeze(2)).squeeze(2))))

        return solve

    def _wide(self, x: Tensor) -> Tensor:
        full = x.new_zeros(*x.shape[:2], self.sides["query"][1].shape[-1])
        full[..., self.columns] = x
        return full

    def _inner(self, right: Tensor) -> Tensor:
        return right[..., self.columns, :][..., self.columns]


def _kron(P: Tensor, R: Tensor) -> Tensor:
    """P_i ⊗ R_i, the matrix of E ↦ P_iER_i on E row by row."""
    m, s = len(P), P.shape[-1]
    return (P.unsqueeze(3).unsqueeze(2) * R.unsqueeze(2).unsqueeze(1)).reshape(m, s * s, s * s)


def _together(P: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """λ and L with LᵀPL = diag(λ) and LᵀRL = 1."""
    root = torch.linalg.cholesky(lifted(R, ALMOST))
    inside = torch.linalg.solve_triangular(root, P, upper=False)
    inside = torch.linalg.solve_triangular(root, inside.mT, upper=False)
    values, vectors = torch.linalg.eigh((inside + inside.mT) / 2)
    return values.clamp_min(0), torch.linalg.solve_triangular(root.mT, vectors, upper=True)
