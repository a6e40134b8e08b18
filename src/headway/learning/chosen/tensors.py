"""Rank-one terms of a third-order array T = Σ_i d_i ⊗ v_i ⊗ a_i, in closed form.

Where the v_i and the a_i are independent (m ≤ s, e) two random mixtures of the slices are V D Aᵀ and V D' Aᵀ, so
the v_i are eigenvectors of V D D'⁻¹ V⁻¹: Jennrich's method, as in Leurgans, Ross and Abel, "A decomposition for
three-way arrays" (1993). Of several pairs of mixtures the best counts, and a few rounds of alternating least
squares use all slices.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALL = 1e-300
TRIES = 12  # pairs of mixtures, of which the best counts
ROUNDS = 10  # of alternating least squares


def numerical_rank(sizes: Tensor, noise: float) -> int:
    """Singular values above ``noise``, as a part of the largest."""
    if not len(sizes) or float(sizes[0]) <= SMALL:
        return 0
    return int((sizes > noise * sizes[0]).sum())


def rank_one_terms(T: Tensor, m: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """v_i and a_i, as columns of length one, of an array (R, s, e) of rank m ≤ s, e."""
    _, s, e = T.shape
    pairs = _eigen(T, m, generator)
    if pairs is None:  # no two mixtures that can be inverted: an array of lower rank
        return torch.eye(s, m).to(T), torch.eye(e, m).to(T)
    v, a = pairs
    for _ in range(ROUNDS):  # alternating least squares: all slices, not two mixtures of them
        d = _solved(T.flatten(1), _pairs(v, a))
        v = _unit(_solved(T.transpose(0, 1).flatten(1), _pairs(d, a)))
        a = _unit(_solved(T.permute(2, 0, 1).flatten(1), _pairs(d, v)))
    return v, a


def _pairs(one: Tensor, two: Tensor) -> Tensor:
    """Rows one_i ⊗ two_i, (m, s·e)."""
    return torch.einsum("sm,em->mse", one, two).flatten(1)


def _solved(matrix: Tensor, terms: Tensor) -> Tensor:
    """X with X · terms nearest to the matrix."""
    driver = "gelsd" if matrix.device.type == "cpu" else None
    answer: Tensor = torch.linalg.lstsq(terms.T, matrix.T, driver=driver)[0].T.contiguous()
    return answer


def _unit(columns: Tensor) -> Tensor:
    unit: Tensor = columns / columns.norm(dim=0, keepdim=True).clamp_min(SMALL)
    return unit


def _random(like: Tensor, generator: torch.Generator, *size: int) -> Tensor:
    return torch.randn(*size, generator=generator, dtype=torch.float64).to(like)


def _eigen(T: Tensor, m: int, generator: torch.Generator) -> tuple[Tensor, Tensor] | None:
    left = torch.linalg.svd(T.transpose(0, 1).flatten(1), full_matrices=False)[0][:, :m]
    right = torch.linalg.svd(T.permute(2, 0, 1).flatten(1), full_matrices=False)[0][:, :m]
    core = left.T @ T @ right
    best: tuple[float, Tensor, Tensor] | None = None
    for _ in range(TRIES):
        one, two = torch.einsum("tr,rse->tse", _random(T, generator, 2, len(T)), core)
        vectors = _real_eigenvectors(one, two)
        if vectors is None:
            continue
        v = _unit(vectors)
        # one = V D Aᵀ, so V⁻¹ · one has the a_i as rows.
        a = _unit(torch.linalg.lstsq(v, one)[0].T)
        d = _solved(core.flatten(1), _pairs(v, a))
        wrong = float((core.flatten(1) - d @ _pairs(v, a)).norm())
        if best is None or wrong < best[0]:
            best = wrong, left @ v, right @ a
    return None if best is None else best[1:]


def _real_eigenvectors(one: Tensor, two: Tensor) -> Tensor | None:
    """Of one · two⁻¹; real parts of those that noise made complex."""
    try:
        _, vectors = torch.linalg.eig(torch.linalg.solve(two.T, one.T).T)
    except RuntimeError:  # singular
        return None
    turned = vectors * torch.exp(-1j * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).angle())
    found = turned.real.contiguous()
    return found if bool(torch.isfinite(found).all()) else None
