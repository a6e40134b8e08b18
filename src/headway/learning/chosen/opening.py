"""The first questions: may answers be trusted, at what size are scores of order one, can it be a layer?"""

from __future__ import annotations

import math

import torch

from headway.core import checks
from headway.learning.chosen.conversation import Conversation
from headway.learning.chosen.line import grid

ORDER = 1e-2  # of answers to the same tokens in another order: above, order matters
SURE = 4  # times the rounding, the least noise that answers are taken to have
STEEP, FLAT = 2.9, 2.1  # slopes between which the size of tokens is right
SIZES = 16  # tries
LARGEST = 40  # half powers of two: tokens are tried up to 2^20 times as large


def trust(talk: Conversation) -> float:
    """The noise of answers, relative to their spread, from two to one sequence, its tokens in both orders; an
    oracle is refused to which order matters, or chance."""
    X = talk.normal(1, talk.k, talk.d)
    one, other = talk.asking(torch.cat([X, X.flip(1)]))
    talk.free += [0]
    spread, whole = float((one - one.mean(0)).norm()), float(one.norm())
    eps = torch.finfo(talk.asking.Y[0].dtype).eps
    spread = max(spread if spread > 1e3 * eps * whole else whole, 1e-300)  # rows may all be alike
    apart = float((one - other.flip(0)).norm()) / spread
    if apart > ORDER:
        again = float((talk.asking.again(X)[0] - one).norm()) / spread
        if again > ORDER:
            checks.refuse("oracle", "the same answer to the same input", f"two that differ by {again:.0%} of "
                          "their spread", "module.eval(), or learn from stored examples, with their noise")
        if talk.asking.oracle.plan == "chosen":
            checks.refuse("plan", "'random' for an oracle to whose answers the order of tokens matters: chosen "
                          "questions know no positions and no mask", f"answers that differ by {apart:.0%} of "
                          "their spread", "plan='random', with mask= and form=, which find such layers")
    return max(apart, SURE * eps * whole / spread)


def size_of_tokens(talk: Conversation) -> float:
    """α such that scores of tokens with entries α·N(0, 1) are of order one.

    Differences of rows on a line grow like α³ while scores are small and like α once patterns are all but 0 and 1:
    in between the slope says where one is. If no size shows such a change 1 is as good as any.
    """
    b, delta = talk.normal(2, talk.d), talk.normal(2, talk.d)
    base = b.unsqueeze(1)
    along = grid(talk.k, b).view(1, -1, 1) * delta.unsqueeze(1)
    known: dict[int, float] = {}

    def spread(j: int) -> float:
        if j not in known:
            Y = talk.asking(2.0 ** (j / 2) * (base + along))
            known[j] = float((Y - Y.mean(1, keepdim=True)).norm())
        return known[j]

    low, high, j, step = -math.inf, math.inf, 0, 2
    for _ in range(SIZES):
        slope = math.log2(max(spread(j), 1e-300) / max(spread(j - 2), 1e-300))
        if FLAT <= slope <= STEEP:
            return float(2.0 ** (j / 2))
        if slope > STEEP:
            low = j
        else:
            high = j
        if high - low <= 1:
            return float(2.0 ** (low / 2))
        if math.isfinite(low) and math.isfinite(high):
            j = int((low + high) // 2)
        else:
            j, step = j + (step if slope > STEEP else -step), 2 * step
            if low >= LARGEST:
                break
            j = min(j, LARGEST)
    return 1.0


def bent(talk: Conversation) -> float:
    """‖F(0) + F(2x) − 2F(x)‖ / ‖F(2x) − F(0)‖ for sequences of equal tokens, which a layer answers with
    (ΣW_i)ᵀx + c."""
    x = (talk.scale * talk.normal(1, 1, talk.d)).expand(1, talk.k, talk.d)
    zero, one, two = talk.asking(torch.cat([0 * x, x, 2 * x]))
    sizes = float((two - zero).norm()), 1e-6 * float(one.norm())  # the second where they answer with a constant
    return float((zero + two - 2 * one).norm()) / max(*sizes, 1e-300)
