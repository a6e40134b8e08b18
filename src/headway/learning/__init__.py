"""Examples in, Fit out: the span of the attention matrices, the heads inside it, Gauss–Newton to the floor."""

from headway.learning.learn import learn

__all__ = ["learn"]
