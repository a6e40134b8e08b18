"""Phase 5, the hull: the affine hull Θ̄ + span(V_1, …, V_{m−1}) of the attention matrices, as a body shows it.

If the Θ_i meet all constraints, so does their affine hull, and the body is long in exactly m − 1 directions: the
right singular vectors of the stacked constraints with the smallest singular values. With Θ̄, the point of least
norm, they span the Θ_i, and m shows in the gap. Reading them off singular vectors is ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.sculpting.body import Gram


@dataclass(frozen=True)
class Hull:
    """The affine hull of the attention matrices, as a body shows it: Θ̄ + span(V_1, …, V_{m−1})."""

    center: Tensor  # Θ̄, the point of least norm, (d, d)
    directions: Tensor  # V, orthonormal and orthogonal to Θ̄'s solution space, (m − 1, d, d)
    values: Tensor  # all singular values of the scaled constraints, ascending, over the root of their number

    @property
    def span(self) -> Tensor:
        return span_of(self.center, self.directions)

    @property
    def gap(self) -> float:
        """The longest direction left out, over the shortest kept: how clearly K is long in m − 1 directions."""
        j = len(self.directions)
        return float(self.values[j] / self.values[j - 1].clamp_min(1e-300)) if j else math.inf

    @property
    def distance(self) -> float:
        """Half the width of K across the hull, where it is widest: the body is this close to the hull."""
        return float(1.0 / self.values[len(self.directions)].clamp_min(1e-300))


def hull_of(gram: Gram, heads: int) -> Hull:
    """Θ̄ and the heads − 1 directions in which the constraints say least."""
    d, j = gram.width, heads - 1
    values, vectors = torch.linalg.eigh(gram.S / max(gram.count, 1))
    coefficients = (vectors.T @ gram.b) / max(gram.count, 1)
    # Directions no constraint touches (two-valued tokens leave some for small samples) stay at zero.
    alive = values > 1e-12 * values[-1]
    alive[:j] = False
    coefficients = torch.where(alive, coefficients / values.clamp_min(1e-300), torch.zeros_like(values))
    return Hull((vectors @ coefficients).view(d, d), vectors[:, :j].T.reshape(j, d, d),
                values.clamp_min(0).sqrt())


def span_of(center: Tensor, directions: Tensor) -> Tensor:
    """[Θ̄/‖Θ̄‖, V_1, …, V_{m−1}]: an orthonormal basis of the span of the Θ_i."""
    return torch.cat([(center / center.norm().clamp_min(1e-300)).unsqueeze(0), directions])


def hull_angle(A: Tensor, B: Tensor) -> float:
    """The largest principal angle between the row spaces of A and B, accurate for small angles."""
    Q: Tensor = torch.linalg.qr(A.T)[0]
    R: Tensor = torch.linalg.qr(B.T)[0]
    return math.asin(min(1.0, float(torch.linalg.matrix_norm(Q - R @ (R.T @ Q), 2))))
