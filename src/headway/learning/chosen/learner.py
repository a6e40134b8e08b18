"""Learning from inputs one may choose: what to ask, then the way all learners end.

1. Two answers to one sequence, its tokens in both orders, tell how far answers may be trusted and whether order
   matters. A few lines tell at which size of tokens scores are of order one (opening.py).
2. On one line of keys: head count, and Θ_iδ for one δ (seed.py).
3. Sequences near that line, then sequences drawn at random; the common refinement on everything, and the common
   verdict on random ones kept aside (everywhere.py).

Where there are as many heads as outputs the differences on a line do not count them; and where nothing fits the
line exactly it is no layer of this kind, or its heads are too much alike there. Then sequences of equal tokens tell
whether it can be a layer at all, and random ones are asked for, and learned as others are (scattered.py).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from headway.core.examples import Examples
from headway.core.oracle import SHORTEST, Asking, Oracle, SpentError
from headway.core.results import Fit
from headway.core.sources import input_law
from headway.learning.chosen.conversation import Conversation
from headway.learning.chosen.endings import beside_the_noise, no_layer, spent
from headway.learning.chosen.everywhere import everywhere
from headway.learning.chosen.opening import bent, size_of_tokens, trust
from headway.learning.chosen.plan import foreseen
from headway.learning.chosen.scattered import scattered
from headway.learning.chosen.seed import Lines, Seed, count, planted
from headway.learning.loop import Asked, Progress
from headway.learning.verdict import heads_of
from headway.runs.store import Run

LINES = (1.0, 0.7, 1.4)  # on which a seed is looked for: how large tokens are, as a part of the size found
# Heads all but saturated attend to the ends of a line: the size found is chance then, and so is the count.
SMALLER = 0.1  # the same for one line more, where the others count differently
BENT, LEAST_BENT = 1e3, 1e-9  # times the noise, and at least: how far from affine answers to equal tokens must be


def learn_chosen(
    oracle: Oracle, asked: Asked, device: torch.device | str | None, run: Run | None, progress: Progress | None
) -> tuple[Fit, Examples]:
    """Ask until the layer is known, as far as the budget goes; the fit, and all that was answered."""
    if asked.heads is not None:
        oracle.enough(asked.heads)
    folder = None
    if run is not None:
        run.begin()
        folder = run.path / "answers"
    asking = Asking(oracle, folder)
    draw = torch.Generator().manual_seed(oracle.seed)
    talk = Conversation(asking, draw, asked, device, run, progress, heads=asked.heads)
    way = Way(talk)
    try:
        fit = way.go()
    except SpentError:
        fit = spent(talk, way.seed)
    fit = beside_the_noise(talk, fit)
    told = f" {asking.calls} sequences were asked: {way.words}."
    status = replace(fit.status, sentence=fit.status.sentence + told)
    stats = {**fit.stats, "calls": asking.calls, "rows": asking.rows, "plan": way.plan, "answer_noise": talk.noise,
             "failures": asking.failures}
    return replace(fit, status=status, stats=stats), asking.examples()


def at_random(oracle: Oracle, run: Run | None) -> Examples:
    """Random ±1 sequences, as many as the budget allows, or as ``ask`` draws where there is none."""
    if run is not None:
        run.begin()
    asking = Asking(oracle, None if run is None else run.path / "answers")
    d, k = oracle.width, oracle.length
    count = max(2000, math.ceil(10 * d**2 / k)) if oracle.budget is None else oracle.budget
    draw = torch.Generator().manual_seed(oracle.seed)
    asking(input_law("boolean", d, k, oracle.box.dtype)(count, draw))
    return asking.examples()


class Way:
    """From a conversation to a fit: which questions, in which order."""

    def __init__(self, talk: Conversation) -> None:
        self.talk = talk
        self.seed: Seed | None = None
        self.plan, self.words = "chosen", "all chosen"

    def go(self) -> Fit:
        talk, oracle = self.talk, self.talk.asking.oracle
        if oracle.plan == "auto" and (oracle.mask != "none" or talk.k < SHORTEST):
            self.plan, self.words = "random", (
                "all at random, since chosen ones need sequences of five tokens that see each other")
            return scattered(talk, counted=False)
        with talk.stage("trust", "the same tokens in another order: do answers agree, and how well?") as found:
            found["noise"] = talk.noise = trust(talk)
        with talk.stage("size", "tokens at which scores are of order one are looked for") as found:
            found["scale"] = talk.scale = size_of_tokens(talk)
        seed = self.planted()
        if seed is None:
            with talk.stage("affine", "answers to equal tokens are affine in these, whatever the heads") as found:
                away = found["bent"] = bent(talk)
            if away > max(BENT * talk.noise, LEAST_BENT):
                self.plan, self.words = "chosen", "all chosen"
                return no_layer(talk, away)
            return scattered(talk, counted=True)
        fit = everywhere(talk, seed)
        if fit is not None:
            return fit
        self.plan, self.words = "both", "chosen ones first, which led nowhere, then at random"
        return scattered(talk, counted=True)

    def planted(self) -> Seed | None:
        """The seed, or none and a plan that does without."""
        talk, like = self.talk, self.talk.normal(1)
        told, counts = talk.asked.heads, set[int]()
        for number, part in enumerate((*LINES, SMALLER)):
            if number == len(LINES) and len(counts) < 2:
                break
            lines = Lines(talk.asking, talk.k, talk.d, part * talk.scale, talk.noise, talk.draw, like)
            with talk.stage(f"count-{number}", "differences of rows on a line of keys span as many dimensions as "
                            "there are heads") as found:
                m = count(lines)
                found["heads"] = 0 if m is None else m
            if m is None or m > talk.d or not m:
                talk.heads = told
                self.plan, self.words = "both", (
                    "at random but for the first, which show no head" if m == 0 else
                    "at random but for the first, which show as many heads as outputs or more")
                return None
            counts.add(m)
            talk.heads = m if told is None else told
            calls = foreseen(m, talk.d, talk.e, talk.k)
            if talk.asking.oracle.plan == "auto" and calls.random < calls.chosen:
                self.plan, self.words = "both", (
                    f"{talk.asking.calls} chosen to count the heads, the others at random: for {heads_of(m)} these "
                    f"take fewer calls (about {calls.random}) than chosen ones ({calls.chosen})")
                return None
            if calls.least > talk.asking.left:
                raise SpentError
            with talk.stage(f"seed-{number}", "small steps around a point of the line tell the heads apart",
                            m) as found:
                seed = planted(lines, m)
                found["residual"] = seed.fit.residual
            if seed.found:
                self.seed, talk.scale = seed, part * talk.scale
                return seed
        self.plan, self.words = "both", "at random after the first, to which no heads on a line of keys fit exactly"
        return None
