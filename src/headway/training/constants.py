"""What both theorems rest on: ‖∇L̂‖ ≤ β₁L̂, λ_min(∇²L̂) ≥ −(β₃/√H)L̂, ‖∇²L̂‖ ≤ β₂ where ‖x_t‖ ≤ R and ‖U_h‖ ≤ M.

Whether the second held at points of a run is measured in curvature.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """β₁ (‖∇L̂‖ ≤ β₁L̂), β₃ (λ_min ≥ −(β₃/√H)L̂) and β₂ (smoothness) for tokens of length R and ‖U_h‖ ≤ M."""

    beta1: float
    beta2: float
    beta3: float


def constants(tokens: int, width: int, R: float, M: float, heads: float, form: str = "safe") -> Constants:
    """form "safe": rows of PX are no longer than R, attention covariances no larger than R², third cumulants at
    most 2R‖u‖R⁴‖C‖²; free of d. "paper": the paper's constants in the form in which they are known to us, not
    compared with its text; none is below the safe one, so what holds with them holds.
    """
    T, d = tokens, width
    if form == "paper":
        beta1 = math.sqrt(T) * R * (2 * R**2 * M + 1)
        beta3 = 2 * d * math.sqrt(T) * R**3 * (3 * math.sqrt(d) * R**2 * M + 1)
    else:
        beta1 = math.sqrt(T) * R * math.sqrt(1 + R**4 * M**2)
        beta3 = math.sqrt(T) * R**3 * (2 * R**2 * M + 1)
    return Constants(beta1, beta1**2 / 4 + beta3 / math.sqrt(heads), beta3)
