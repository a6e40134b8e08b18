"""How many sequences determine a layer: unknowns against equations.

Two counts must both be met. Every row of an example gives e equations, so n·k·e ≥ all unknowns. But with W
known a row with κ keys in sight speaks about Θ only through m·(κ − 1) free pattern entries, so it gives at most
min(e, m·(κ − 1)) equations about Θ: with two tokens and one head that is one equation a row, however wide the
output. The floor is the larger of the two; below it no method can succeed on generic layers of this size.

Without the softmax a layer is an operator of m·d(d + e) numbers less the m² of mixing its heads, and never more
than the d·d(d + 1)/2·e of all operators. Over all keys the rows of a sequence share C = Σ_b x_bx_bᵀ and are one
linear function of their own tokens, of which d of them tell everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Shape of the problem: width d, outputs e, length k, mask, and ranks of Θ and W (None: full)."""

    d: int
    e: int
    k: int
    mask: str = "none"
    rank: int | None = None
    out_rank: int | None = None

    def theta_unknowns(self, m: int) -> int:
        r, d, q = self.d + 1, self.d, self.rank
        return m * (r * d if q is None or q >= d else q * (r + d - q))

    def unknowns(self, m: int) -> int:
        d, e, p = self.d, self.e, self.out_rank
        return self.theta_unknowns(m) + m * (d * e if p is None or p >= min(d, e) else p * (d + e - p)) + e

    def floor(self, m: int) -> int:
        """Fewest sequences with as many equations as unknowns."""
        seen = range(1, self.k + 1) if self.mask == "causal" else [self.k] * self.k
        about_theta = sum(min(self.e, m * (keys - 1)) for keys in seen)
        return max(
            math.ceil(self.unknowns(m) / (self.k * self.e)),
            math.ceil(self.theta_unknowns(m) / max(about_theta, 1)),
        )

    def most_heads(self, n: int, limit: int = 64) -> int:
        """The largest head count whose floor n sequences reach (0 if none does)."""
        return max((m for m in range(1, limit + 1) if self.floor(m) <= n), default=0)


@dataclass(frozen=True)
class LinearSize:
    """The same for a layer of linear scores."""

    d: int
    e: int
    k: int
    mask: str = "none"

    @property
    def any_heads(self) -> int:
        """Unknowns of an operator of any rank."""
        return self.d * self.d * (self.d + 1) // 2 * self.e + self.e

    def unknowns(self, m: int) -> int:
        m = min(m, self.d * self.d, self.d * self.e)  # the operator, as a matrix, has no larger rank
        return min(m * self.d * (self.d + self.e) - m * m + self.e, self.any_heads)

    def floor(self, m: int) -> int:
        """Fewest sequences with as many equations as unknowns."""
        rows = self.k if self.mask == "causal" else min(self.k, self.d)
        return math.ceil(self.unknowns(m) / (rows * self.e))

    def most_heads(self, n: int, limit: int = 64) -> int:
        """The largest head count whose floor n sequences reach (0 if none does)."""
        return max((m for m in range(1, limit + 1) if self.floor(m) <= n), default=0)
