"""Other endings: no calls are left, it is no layer, or what is left is the answers' own noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from headway.core.results import Fit, Status
from headway.learning.chosen.conversation import Conversation
from headway.learning.chosen.everywhere import into
from headway.learning.chosen.plan import foreseen
from headway.learning.chosen.seed import Seed
from headway.learning.polish import polish
from headway.learning.source import Split
from headway.learning.verdict import conclude, heads_of


def spent(talk: Conversation, seed: Seed | None) -> Fit:
    """What there is, with a status that says that more calls are needed, and how many."""
    m = talk.heads or 1
    need = talk.asking.calls + foreseen(m, talk.d, talk.e, talk.k).fewest
    counted = f"{heads_of(m)} were counted" if talk.heads else "heads were not counted yet"
    more = "." if talk.heads else f" for {heads_of(m)}, more for more."
    fit = rough(talk, m, seed)
    return replace(fit, status=Status(
        "too_few", f"The budget of {talk.asking.oracle.budget} calls does not do: {counted}, and about {need} "
        f"calls are needed{more}", {"needed": float(need), "heads": float(m)}), stats={
            **fit.stats, "out_of_time": True})  # a run with a larger budget goes on


def no_layer(talk: Conversation, bent: float) -> Fit:
    fit = rough(talk, 1, None)
    return replace(fit, status=Status(
        "not_realisable", "Not the labels of such a layer. Its answer to equal tokens is an affine function of "
        f"the token; here answers to 0, x and 2x differ from one by {bent:.1e} of their size.", {"bent": bent}))


def rough(talk: Conversation, m: int, seed: Seed | None) -> Fit:
    """The seed if there is one, or heads that attend to all keys alike, on all that was asked."""
    examples = talk.asking.examples()
    judge = np.array(talk.free[-1:])
    fit = np.setdiff1d(np.arange(len(examples)), judge)
    loop = talk.loop(examples, None, Split(fit, judge, judge, np.arange(0), np.arange(len(fit))))
    assert loop.source.frame is not None
    d = loop.source.d
    start = torch.zeros(m, d + 1, d, dtype=torch.float64, device=loop.source.device)
    if seed is not None:
        start = into(loop.source.frame, seed.theta())
    best = polish(loop.source, start, len(fit), rank=None, generator=loop.generator("rough"), exact=True, limit=0)
    return conclude(loop, replace(best, reason="limit", name="rough"), False)


def beside_the_noise(talk: Conversation, fit: Fit) -> Fit:
    """The noise of the answers is known: much more than that is no noise, and about as much no sign of anything."""
    left = fit.stats["held_out_error"]
    if fit.status.kind == "noise" and 0 < talk.allowed < fit.stats["noise"]:
        return replace(fit, status=Status("not_realisable", (
            f"Not met by {heads_of(fit.layer.heads)}: {left:.2e} of the labels' spread is left, and it is not "
            f"noise: the same question is answered alike to {talk.noise:.1e}."),
            {**fit.status.numbers, "residual_floor": left}))
    if fit.status.kind == "not_realisable" and talk.noisy and left <= talk.allowed:
        return replace(fit, status=Status("too_few", (
            f"Too few examples to average the noise out: {heads_of(fit.layer.heads)} leave {left:.2e} of the "
            f"labels' spread on sequences kept for the judgement, {fit.stats['fitted_error']:.2e} on those fitted, "
            f"and the same question is answered alike to {talk.noise:.1e} only."), fit.status.numbers))
    return fit
