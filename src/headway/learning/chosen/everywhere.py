"""From the heads on one line to heads everywhere: sequences near the line, then at random, one refinement.

Near the line tokens are x_j = b + t_jδ + τn_j: the rank-one Θ_i of the seed is right there but for τ, so
Gauss–Newton with W and c eliminated finds the rest. Of sequences drawn at random every direction counts alike.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headway.core.oracle import SpentError
from headway.core.results import Fit, Status
from headway.learning.actions import Probe
from headway.learning.candidate import Candidate
from headway.learning.chosen.conversation import Conversation
from headway.learning.chosen.line import grid
from headway.learning.chosen.plan import counted_floor, foreseen
from headway.learning.chosen.seed import Seed
from headway.learning.gauss_newton import Free, OutOfTimeError, gauss_newton
from headway.learning.ladder import FITTED
from headway.learning.loop import Loop
from headway.learning.polish import polish
from headway.learning.shapes import Full
from headway.learning.source import Frame, Split
from headway.learning.verdict import conclude, heads_of
from headway.runs.store import Stage

CLOSE = 1e-3  # relative residual near the line from which all sequences are fitted
ROUGH_STEPS, ROUGH_INNER = 40, 100  # of Gauss–Newton there, and products for each
ASIDES = 4  # times the sequences kept aside: random ones at least, where answers are noisy
ATTEMPTS = ((1.0, 0.3), (1.5, 0.15))  # near the line: times the sequences, and τ, as a part of the tokens' size


def everywhere(talk: Conversation, seed: Seed) -> Fit | None:
    """From a seed to a fit; none if nothing led there and there may be more calls."""
    for times, tau in ATTEMPTS:
        fit = attempt(talk, seed, times, tau)
        if fit is not None:
            return fit
    return None


def attempt(talk: Conversation, seed: Seed, times: float, tau: float) -> Fit | None:
    """Ask what remains, refine, judge; none if it led nowhere and there may be more calls."""
    m = seed.heads
    calls = foreseen(m, talk.d, talk.e, talk.k)
    near = math.ceil(times * calls.near)
    # Of few random sequences those kept aside would be missed where noise has to be averaged out.
    free = max(calls.free, ASIDES * (calls.select + calls.judge)) if talk.noisy else calls.free
    rest = free + calls.select + calls.judge
    if talk.asking.left < near + rest:
        near = int(talk.asking.left) - rest
        if near < counted_floor(m, talk.d, talk.e, talk.k):
            raise SpentError
    with talk.stage(f"near-{times:g}", "near the line the heads are known but for a little", m):
        before = talk.asking.calls
        talk.asking(near_the_line(talk, seed, near, tau))
        first = np.arange(before, talk.asking.calls)
    with talk.stage(f"everywhere-{times:g}", "random sequences: every direction of the heads, and a few to "
                    "choose and judge by", m):
        talk.random(free)
        select, judge = talk.random(calls.select), talk.random(calls.judge)
    n = talk.asking.calls
    fitted = np.setdiff1d(np.arange(n), [*select, *judge])
    parts = Split(fitted, np.array(select), np.array(judge), np.arange(0), np.arange(len(fitted)))
    loop = talk.loop(talk.asking.examples(), m, parts)
    best = refined(talk, loop, seed, first, f"chosen-{times:g}")
    if best.error > max(FITTED, talk.allowed) and best.reason != "time" and talk.asking.left > calls.near:
        return None
    structured = False
    if best.error > max(loop.floor, FITTED, talk.allowed) and best.reason != "time":
        loop.pool = loop.pool.with_candidate(best)
        structured = bool(loop.do(Probe(f"probe-{times:g}", best.name)))
    fit = conclude(loop, best, structured)
    if fit.status.kind == "not_realisable":
        # On the line a layer did fit. That none does elsewhere a search that ended early cannot say.
        fit = replace(fit, status=Status("limit", (
            f"Stalled with {heads_of(m)}, which fit on a line of keys and leave {best.error:.1e} elsewhere. It "
            "is not the output of such a layer, or the search did not find its way: a larger budget or another "
            "seed may help."), fit.status.numbers))
    return fit


def near_the_line(talk: Conversation, seed: Seed, n: int, tau: float) -> Tensor:
    b = seed.origin + talk.normal(n, seed.B.shape[1]) / math.sqrt(seed.B.shape[1]) @ seed.B.T
    on = b.unsqueeze(1) + grid(talk.k, b).view(1, -1, 1) * seed.delta
    return on + tau * talk.scale * talk.normal(n, talk.k, talk.d)


def refined(talk: Conversation, loop: Loop, seed: Seed, first: np.ndarray, name: str) -> Candidate:
    """From the seed to the floor: on sequences near the line, then on all."""
    source, m = loop.source, seed.heads
    assert source.frame is not None
    start = into(source.frame, seed.theta())

    def rough() -> Stage:
        problem = source.problem(first, m, torch.float64)
        found = gauss_newton(
            Free(problem), Full(start), generator=loop.generator(name), limit=ROUGH_STEPS, damping=1e-2,
            inner_limit=ROUGH_INNER, target=max(CLOSE, talk.allowed), report=loop.report, pulse=loop.pulse)
        return {"Theta": found.point.Theta}, {"residual": found.residual, "products": found.products,
                                              "reason": found.reason}

    def whole(limit: int) -> Candidate:
        return polish(source, start, len(source.fit), rank=loop.asked.rank, generator=loop.generator(name),
                      exact=True, limit=limit, report=loop.report, pulse=loop.pulse)

    try:
        tensors, _ = loop.stage(f"{name}-near", rough, m, ROUGH_STEPS, why="from the seed, near its line")
        start = tensors["Theta"]
        stage = loop.stage(f"{name}-all", lambda: whole(talk.asked.limit).stage(), m,
                           why="on everything that was asked, to the floor")
        return Candidate.of(name, stage)
    except OutOfTimeError:
        loop.deadline = math.inf
        return replace(whole(0), reason="time", name=name)


def into(frame: Frame, Theta: Tensor) -> Tensor:
    """[Θ_i; u_iᵀ] in working coordinates: LᵀΘ_iL and Lᵀ(Θ_iᵀμ + u_i)."""
    if frame.plain:
        return Theta
    inner, u = Theta[:, :-1], Theta[:, -1]
    bias = (inner.mT @ frame.mean + u) @ frame.out
    return torch.cat([frame.out.T @ inner @ frame.out, bias.unsqueeze(1)], dim=1)
