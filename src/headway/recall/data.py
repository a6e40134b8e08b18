"""Recall: a random string of different letters, then the same string again and again, for 32 letters in all.

    q k z b a … q k z b a … q k

From the second time on every letter is known in advance: it is the one that followed last time. The length of the
string differs from sequence to sequence, so that no fixed distance back is right: one has to look for the letter.
"""

from __future__ import annotations

import string

import torch
from torch import Tensor

from headway.core import checks

ALPHABET = string.ascii_lowercase
LENGTH = 32  # letters in a sequence
SHORTEST, LONGEST = 8, 20  # letters in the string that is repeated


def sequences(count: int, draw: torch.Generator) -> Tensor:
    """Letters as numbers, (count, LENGTH)."""
    checks.whole("count", count)
    order = torch.rand(count, len(ALPHABET), generator=draw).argsort(1)
    period = torch.randint(SHORTEST, LONGEST + 1, (count, 1), generator=draw)
    return order.gather(1, torch.arange(LENGTH) % period)


def known(ids: Tensor) -> Tensor:
    """Where the next letter can be known: this one was there before, and there is a next. (n, k), true or false."""
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    before = same.tril(-1).any(2)
    before[:, -1] = False
    return before


def letters(ids: Tensor) -> list[list[str]]:
    """Each sequence as its letters, one string each."""
    return [[ALPHABET[i] for i in row] for row in ids.tolist()]
