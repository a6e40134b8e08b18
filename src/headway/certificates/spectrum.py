"""Between what bounds do the eigenvalues of the scaled normal matrix lie? Lanczos' method on products, once for all
claims that ask.

λ_min ≥ θ_min − ε·λ_max − rounding, θ_min the least Ritz value after ``steps`` products from a start that is uniform
on the tangent space's sphere, ε of that dimension. θ_min itself bounds λ_min from above only.

Three things may go wrong, each with a third of the probability allowed: a start that misses λ_min, one that misses
λ_max, and one that misses the largest eigenvalue with W known, which the rounding asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.certificates.jacobian import Sample
from headway.certificates.scaled import Scaled
from headway.certificates.thin import ThinScaled
from headway.linalg.krylov import lanczos, lanczos_error

FREE = 1e-7  # singular values below this, relative to the largest of the scaled Jacobian, are free directions
NORM = 12  # Lanczos steps for the norm of the Jacobian with W known, which its rounding asks for
NEAR = 0.5  # part of the least Ritz value that its lower bound reaches before the products end


def scaled(found: Sample, generator: torch.Generator) -> Scaled | ThinScaled:
    return Scaled(found, generator) if found.out_ranks is None else ThinScaled(found, generator)


@dataclass(frozen=True)
class Spectrum:
    """The operator, its Ritz values with the vector of the least, and bounds that hold with the confidence
    asked."""

    operator: Scaled | ThinScaled
    values: Tensor
    vector: Tensor
    size: int
    epsilon: float
    least: float  # a lower bound of the least eigenvalue, but for rounding
    most: float  # an upper bound of the largest
    known: float  # an upper bound of the largest with W known, ranks free
    off: float  # what rounding may add to a Ritz value

    @classmethod
    def of(cls, found: Sample, confidence: float, generator: torch.Generator, steps: int) -> Spectrum:
        """After at most ``steps`` products; fewer if the least eigenvalue is then known well, or is 0."""
        operator = scaled(found, generator)
        size = operator.dimension
        sure = 1.0 - (1.0 - confidence) / 3

        def most(values: Tensor, size: int = size) -> float:
            """An upper bound of the largest eigenvalue: a Ritz value is a lower one."""
            return float(values[-1]) / max(1.0 - lanczos_error(len(values), size, sure), 1e-9)

        every = operator.anywhere(generator)
        known = most(lanczos(operator.given_w, every, NORM)[0], operator.everywhere)

        def bound(values: Tensor) -> tuple[float, float, float, float]:
            epsilon, top = lanczos_error(len(values), size, sure), most(values)
            return float(values[0]) - epsilon * top, epsilon, top, operator.rounding.ritz(len(values), top, known)

        def enough(values: Tensor) -> bool:
            least, _, _, off = bound(values)
            return least > max(off, NEAR * float(values[0])) or float(values[0]) <= FREE**2 * float(values[-1])

        values, vector = lanczos(operator, operator.start(generator), steps, enough, operator.tangent)
        least, epsilon, top, off = bound(values)
        return cls(operator, values, vector, size, epsilon, least, top, known, off)

    @property
    def clear(self) -> float:
        """A lower bound of the least eigenvalue; what is not above 0 says nothing."""
        return self.least - self.off
