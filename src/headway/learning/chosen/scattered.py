"""Random sequences, learned as others are: where heads are not counted, or these take fewer calls than chosen ones.

Where few sequences judge, twice as many are asked for if nothing was found. Of noisy answers few say little: a fit
of eight leaves much less there than elsewhere, and looks as if it were no layer; the count may be too low, since
heads below the noise do not show. So some more are kept for choosing and judging; at last the count is not told.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from headway.core.counting import Size
from headway.core.oracle import SpentError
from headway.core.results import Fit
from headway.learning.chosen.conversation import Conversation
from headway.learning.chosen.plan import LEAST_JUDGE, foreseen
from headway.learning.source import Split
from headway.learning.verdict import conclude

UNCOUNTED = 1.5  # times the outputs: heads that random sequences are counted for where they could not be
AGAIN = 2.0  # times as many random sequences where those asked for were too few
ROUNDS = 3  # of asking


def scattered(talk: Conversation, counted: bool) -> Fit:
    """Random sequences, learned; more of them where they were too few. counted: the head count is known, or was
    looked for."""
    fit: Fit | None = None
    m = talk.heads or math.ceil(UNCOUNTED * talk.e)
    calls = foreseen(m, talk.d, talk.e, talk.k)
    aside = (calls.select, calls.judge) if talk.noisy else None
    wanted = calls.random + sum(aside or ())
    if not counted and talk.heads is None:
        wanted = max(2000, math.ceil(10 * talk.d**2 / talk.k))
    for number in range(ROUNDS):
        most = talk.asking.left
        if number and (most < 1 or fit is None or not _lacking(talk, fit)):
            break
        lacking = max(wanted - len(talk.free), 0)
        more = int(min(lacking, most))
        with talk.stage(f"random-{number}", "random sequences, learned as others are", talk.heads or 0):
            if more:
                talk.random(more)
        told = talk.asked.heads if talk.noisy and number == ROUNDS - 1 else talk.heads
        fit = _learned(talk, told, aside, f"random-{number}")
        if lacking > more:
            fit = _cut_short(talk, fit)
        wanted = math.ceil(AGAIN * wanted)
    assert fit is not None
    return fit


def _lacking(talk: Conversation, fit: Fit) -> bool:
    """Whether more sequences may end otherwise: where few judge, what was not found may be there all the same."""
    few = talk.noisy or fit.stats["held_out"] < LEAST_JUDGE
    return fit.status.kind == "too_few" or (few and not fit.status.ok)


def _learned(talk: Conversation, told: int | None, aside: tuple[int, int] | None, name: str) -> Fit:
    """From the random sequences there are; aside: how many choose and judge, if not as usual."""
    n = len(talk.free)
    if n < 3:
        raise SpentError
    kept = max(2, math.ceil(0.15 * n)) if aside is None else sum(aside)
    if told is not None and Size(talk.d, talk.e, talk.k).floor(told) > n - kept:
        raise SpentError
    parts = None
    if aside is not None and n > 2 * kept:
        fitted, select, judge = np.split(np.arange(n), [n - kept, n - aside[1]])
        parts = Split(fitted, select, judge, np.arange(0), np.arange(len(fitted)))
    loop = talk.loop(talk.asking.examples().take(talk.free), told, parts)
    loop.prefix = f"{name}-{n}-"  # a larger budget is another problem
    return conclude(loop, *loop.search())


def _cut_short(talk: Conversation, fit: Fit) -> Fit:
    """What may be said where the budget did not allow what was wanted."""
    left, judged, n = fit.stats["held_out_error"], fit.stats["held_out"], len(talk.free)
    why = ""
    if fit.status.kind == "noise" and judged < LEAST_JUDGE:
        why = f"and {judged} of them to judge by cannot tell noise from heads that were not found."
    elif talk.noisy and fit.status.kind == "not_realisable":
        why = f"and answers have noise of {talk.noise:.1e} themselves: so few cannot tell whether it is a layer."
    if why:
        fit = replace(fit, status=replace(fit.status, kind="too_few", sentence=(
            f"Too few examples: {n} random sequences leave {left:.2e} of the labels' spread, {why}")))
    if not fit.status.ok:
        fit = replace(fit, stats={**fit.stats, "out_of_time": True})  # a run with a larger budget goes on
    return fit
