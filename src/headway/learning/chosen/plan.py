"""How many calls each way of asking takes, and which is cheapest: the table of docs/questions_needed.md as a rule.

In sequences of k tokens, with the counting floor N of m heads (core/counting.py, and counted_floor below):

    random       RANDOM · N, with those kept for choosing and judging
    chosen       a line of keys, 2 ⌈1.5 m + 1⌉ steps around one point, (NEAR + FREE) · N, and those kept aside

Which head count to put in is known only once heads were counted, which takes about ten chosen calls; so random
sequences that follow are learned with the count told ("both").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.core.counting import Size

HALF = 2  # of the numbers in a pattern one tells
NEAR, FREE = 2.5, 1.0  # times the floor: sequences near the line, and sequences drawn at random
SPARE = 0.4  # part of the sequences near the line that may be left out
RANDOM = 5.0  # times the floor: random sequences from which the learner, told the count, finds heads
SELECT, JUDGE = 0.03, 0.05  # part of the sequences that choose, and that judge
LEAST_SELECT, LEAST_JUDGE = 3, 4  # sequences that choose, and that judge


@dataclass(frozen=True)
class Calls:
    """Calls to come for m heads."""

    steps: int
    near: int
    free: int
    select: int
    judge: int
    random: int

    @property
    def chosen(self) -> int:
        return self.steps + self.near + self.free + self.select + self.judge

    @property
    def least(self) -> int:
        """With which it may do: fewer near the line."""
        return self.chosen - int(SPARE * self.near)

    @property
    def fewest(self) -> int:
        return min(self.chosen, self.random)


def directions(m: int, d: int) -> int:
    """In which the base point is moved, for m heads."""
    return min(d, math.ceil(1.5 * m) + 1)


def counted_floor(m: int, d: int, e: int, k: int) -> int:
    """Sequences with as many equations as unknowns, if of the k − 1 numbers that a pattern has one in HALF tells.

    That is what one head makes of its rows where scores are of order one: most of its weight is on few keys. Where
    outputs are fewer than that, they are what limits, and the count is the usual one.
    """
    size = Size(d, e, k)
    about_theta = k * min(e, m * (k - 1) / HALF)
    return max(size.floor(m), math.ceil(size.theta_unknowns(m) / about_theta))


def foreseen(m: int, d: int, e: int, k: int) -> Calls:
    floor = counted_floor(m, d, e, k)
    near, free = math.ceil(NEAR * floor), math.ceil(FREE * floor)
    select = max(LEAST_SELECT, math.ceil(SELECT * (near + free)))
    judge = max(LEAST_JUDGE, math.ceil(JUDGE * (near + free)))
    return Calls(2 * directions(m, d), near, free, select, judge, math.ceil(RANDOM * floor))
