"""Ways to write the unknown attention matrices: freely, as products of thin factors, or inside a span.

Each shape maps its own unknowns to Θ (m, r, d), r = d or d + 1, and offers what Gauss–Newton needs:
``push`` (directional derivative of Θ), ``pull`` (its adjoint), ``moved`` (a step) and a ``metric``, the
approximation D ≈ JᵀJ used for damping and preconditioning. In Θ itself D is Kronecker-factored: head i's
block is Q ⊗ M_i with Q the queries' second moment and M_i = Σ_rows C W_iW_iᵀ C the keys' side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headway.linalg.krylov import Linear


@dataclass(frozen=True)
class Metric:
    """D and D⁻¹: what a step costs, to first order. ``under`` says, for a damping λ and the loss times the price on
    changes of scores, what is added to the curvature (λD unless more is known) and a metric near the sum, by which
    to precondition (D itself)."""

    apply: Linear
    solve: Linear
    under: Callable[[float, float], tuple[Linear, Metric]] | None = None

    def damped(self, damping: float, held: float) -> tuple[Linear, Metric]:
        if self.under is not None:
            return self.under(damping, held)
        return lambda v: damping * self.apply(v), self


class Shape(Protocol):
    value: Tensor

    def theta(self) -> Tensor: ...
    def growth(self) -> Tensor: ...
    def push(self, v: Tensor) -> Tensor: ...
    def pull(self, G: Tensor) -> Tensor: ...
    def moved(self, v: Tensor) -> Shape: ...
    def to(self, dtype: torch.dtype) -> Shape: ...
    def metric(self, Q: Tensor, M: Tensor) -> Metric: ...


class Full:
    """Θ_i itself: m·r·d unknowns."""

    def __init__(self, Theta: Tensor) -> None:
        self.value = Theta

    def theta(self) -> Tensor:
        return self.value

    def growth(self) -> Tensor:
        return self.value

    def push(self, v: Tensor) -> Tensor:
        return v

    def pull(self, G: Tensor) -> Tensor:
        return G

    def moved(self, v: Tensor) -> Full:
        return Full(self.value + v)

    def to(self, dtype: torch.dtype) -> Full:
        return Full(self.value.to(dtype))

    def metric(self, Q: Tensor, M: Tensor) -> Metric:
        Qi, Mi = inverse(Q), inverse(M)
        return Metric(lambda v: Q @ v @ M, lambda g: Qi @ g @ Mi)


class Factored:
    """Θ_i = A_iB_iᵀ with q columns: m·(r + d)·q unknowns, held as [A; B] of shape (m, r + d, q).

    The q × q gauge A → AG, B → BG⁻ᵀ is left free: conjugate gradients started at zero never move along it.
    """

    def __init__(self, value: Tensor, rows: int) -> None:
        self.value, self.rows = value, rows
        self.A, self.B = value[:, :rows], value[:, rows:]

    @classmethod
    def of(cls, Theta: Tensor, q: int) -> Factored:
        """The best rank-q approximation, with balanced factors."""
        U, s, Vh = torch.linalg.svd(Theta, full_matrices=False)
        root = s[:, :q].sqrt().unsqueeze(1)
        return cls(torch.cat([U[:, :, :q] * root, Vh[:, :q].mT * root], dim=1), Theta.shape[1])

    def theta(self) -> Tensor:
        return self.A @ self.B.mT

    def growth(self) -> Tensor:
        return self.value

    def push(self, v: Tensor) -> Tensor:
        return v[:, : self.rows] @ self.B.mT + self.A @ v[:, self.rows :].mT

    def pull(self, G: Tensor) -> Tensor:
        return torch.cat([G @ self.B, G.mT @ self.A], dim=1)

    def moved(self, v: Tensor) -> Factored:
        return Factored(self.value + v, self.rows)

    def to(self, dtype: torch.dtype) -> Factored:
        return Factored(self.value.to(dtype), self.rows)

    def metric(self, Q: Tensor, M: Tensor) -> Metric:
        """For A: Q ⊗ BᵀMB; for B: M ⊗ AᵀQA. The coupling of A and B is left to the iteration."""
        right, left = lifted(self.B.mT @ M @ self.B), lifted(self.A.mT @ Q @ self.A)
        Qi, Mi, Ri, Li = inverse(Q), inverse(M), inverse(right), inverse(left)
        r = self.rows

        def apply(v: Tensor) -> Tensor:
            return torch.cat([Q @ v[:, :r] @ right, M @ v[:, r:] @ left], dim=1)

        def solve(g: Tensor) -> Tensor:
            return torch.cat([Qi @ g[:, :r] @ Ri, Mi @ g[:, r:] @ Li], dim=1)

        return Metric(apply, solve)


class Span:
    """Θ_i = Σ_j A_ij B_j for given matrices B_j (L, r, d): m·L unknowns."""

    def __init__(self, coefficients: Tensor, basis: Tensor) -> None:
        self.value, self.basis = coefficients, basis

    def theta(self) -> Tensor:
        return self.push(self.value)

    def growth(self) -> Tensor:
        return self.value

    def push(self, v: Tensor) -> Tensor:
        return torch.einsum("ml,lrd->mrd", v, self.basis)

    def pull(self, G: Tensor) -> Tensor:
        return torch.einsum("mrd,lrd->ml", G, self.basis)

    def moved(self, v: Tensor) -> Span:
        return Span(self.value + v, self.basis)

    def to(self, dtype: torch.dtype) -> Span:
        return Span(self.value.to(dtype), self.basis.to(dtype))

    def metric(self, Q: Tensor, M: Tensor) -> Metric:
        """The Gram matrix of the basis under Q ⊗ M_i, one L × L block for each head."""
        B = self.basis.flatten(1)
        QB = (Q @ self.basis).unsqueeze(0) @ M.unsqueeze(1)  # (m, L, r, d)
        return gram_metric(B @ QB.flatten(2).mT)


def gram_metric(D: Tensor) -> Metric:
    """v ↦ D_i v_i for one matrix a head."""
    D = lifted(D)
    Di = inverse(D)
    return Metric(lambda v: torch.einsum("mlk,mk->ml", D, v), lambda g: torch.einsum("mlk,mk->ml", Di, g))


def lifted(D: Tensor, part: float = 1e-4) -> Tensor:
    """D + a small part of its own mean diagonal, so that an empty direction does not make it singular."""
    mean = D.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).unsqueeze(-1)
    lift = (part * mean).clamp_min(torch.finfo(D.dtype).tiny * 1e6)
    return (D + D.mT) / 2 + lift * torch.eye(D.shape[-1], dtype=D.dtype, device=D.device)


def inverse(D: Tensor) -> Tensor:
    """D⁻¹, formed: it only preconditions, and products are several times faster than triangular solves."""
    factor, info = torch.linalg.cholesky_ex(D)
    if bool((info != 0).any()):
        factor = torch.linalg.cholesky(lifted(lifted(D)))
    return torch.cholesky_inverse(factor)
