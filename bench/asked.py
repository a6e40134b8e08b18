"""Rows of bench/rules.py for two learners beside the plain one: chosen questions, and layers of linear scores.

TABLE: a rule, a number in its place, the scenes that show it; SIZES: constants that need no row, and why. Numbers
and scenes were chosen on seeds 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import headway as hw
import judged
import labels
from headway.core.counting import LinearSize
from judged import Case, Truth
from scenes import EXACT, FRESH, NO_LAYER, UNDETERMINED, Scene, drawn, template

FOUND: Truth = dict.fromkeys(("recovered", "fitted"), (judged.heads_within(1e-9),))
REFUSED: Truth = {"refused": ()}
Labels = Callable[[hw.AttentionLayer, Tensor, torch.Generator], Tensor]


def right(layer: hw.AttentionLayer, X: Tensor, draw: torch.Generator) -> Tensor:
    return layer(X)


def noisy(level: float) -> Labels:
    return lambda layer, X, draw: labels.noisy(layer(X), level, draw)


def box(
    heads: int, width: int, answer: Labels = right, *, plan: str = "chosen", length: int = 12, level: float = 0.0,
    budget: int | None = None, dtype: torch.dtype = torch.float64, **options: Any,
) -> Callable[[int], Case]:
    """A black box that may be asked: a random layer with key biases and offset, what it answers changed."""

    def make(seed: int) -> Case:
        given = {"key_bias": True, "offset": True, "scale": 2.0, **options}
        layer, draw = hw.AttentionLayer.random(heads, width, seed=seed, **given), drawn(seed)

        def oracle(X: Tensor) -> Tensor:
            return answer(layer, X.double(), draw).to(dtype)

        X = labels.normal(drawn(seed + 1), FRESH, length, width)
        data = hw.ask(oracle, width=width, length=length, plan=plan, budget=budget, dtype=dtype, seed=seed)
        return Case(data, X, layer(X), layer, level)

    return make


def linear(
    heads: int, width: int, times: float, *, rank: int | None = None, noise: float = 0.0, softmax: bool = False,
    change: Callable[[Tensor], Tensor] | None = None,
) -> Callable[[int], Case]:
    """A layer of linear scores on so many times the counting floor of Gaussian sequences; more heads than its rank
    are mixtures."""

    def make(seed: int) -> Case:
        layer, draw = hw.AttentionLayer.random(rank or heads, width, scores="softmax" if softmax else "linear",
                                               seed=seed), drawn(seed)
        count = max(3, math.ceil(times * LinearSize(width, width, width, "none").floor(rank or heads)))
        X = labels.normal(draw, count + FRESH, width, width)
        given = X[:count] if change is None else change(X[:count])
        return Case(hw.Examples(given, labels.noisy(layer(given), noise, draw)), X[count:], layer(X[count:]), layer,
                    noise)

    return make


def operator_within(said: judged.Said, case: Case) -> str:
    assert said.fit is not None
    error = judged.fresh_error(said, case)
    return "" if error <= max(1e-9, 3 * case.noise) and said.fit.layer.heads == case.truth.heads else (
        f"{said.fit.layer.heads} heads, error {error:.1e}")


def near_the_noise(said: judged.Said, case: Case) -> str:
    worst = judged.worst_head(said, case)
    return "" if worst <= 10 * case.noise else f"heads off by {worst:.1e}"


def no_layer(layer: hw.AttentionLayer, X: Tensor, draw: torch.Generator) -> Tensor:
    return torch.tanh(X @ layer.W[0])


def normed(layer: hw.AttentionLayer, X: Tensor, draw: torch.Generator) -> Tensor:
    """Scores squared in place of their exponentials: answers to equal tokens are those of a layer."""
    S = torch.einsum("nad,mde,nbe->nmab", X, layer.Theta, X).square() + 1e-6
    return torch.einsum("nmab,nbd,mde->nae", S / S.sum(-1, keepdim=True), X, layer.W)


def placed(layer: hw.AttentionLayer, X: Tensor, draw: torch.Generator) -> Tensor:
    return layer(X + torch.arange(X.shape[1], dtype=X.dtype).view(1, -1, 1))


OPERATOR: Truth = {"recovered": (operator_within,)}
SCENES: dict[str, Scene] = {
    "questions": Scene(box(2, 8), EXACT),
    "questions, six heads": Scene(box(6, 12, length=16), FOUND),
    "questions, one head": Scene(box(1, 12), FOUND),
    "questions, small scores": Scene(box(2, 8, scale=1e-3), FOUND),
    "questions, large scores": Scene(box(2, 8, scale=100.0), FOUND),
    "questions, noise of 1e-3": Scene(box(2, 8, noisy(1e-3), level=1e-3), {"noise": (near_the_noise,)}),
    "questions, float32": Scene(box(2, 8, dtype=torch.float32),
                                dict.fromkeys(("recovered", "fitted", "noise"), (judged.heads_within(1e-4),))),
    "questions or not, noise of 1e-3": Scene(box(2, 8, noisy(1e-3), plan="auto", level=1e-3),
                                             {"noise": (near_the_noise,)}),
    "questions or not": Scene(box(2, 8, plan="auto"), EXACT),
    "questions, as many heads as outputs": Scene(box(3, 6, out_width=3), EXACT),
    "questions, 37 allowed": Scene(box(2, 8, budget=37), {**EXACT, "too_few": ()}),
    "questions, no layer": Scene(box(2, 6, no_layer, budget=400), NO_LAYER),
    "questions, squared scores": Scene(box(2, 6, normed, length=8, budget=300, key_bias=False, offset=False),
                                       {"not_realisable": (), "limit": ()}),
    "questions, places matter": Scene(box(2, 6, placed), REFUSED),
    "questions, answers at random": Scene(box(2, 6, noisy(1.0)), REFUSED),
    "linear scores": Scene(linear(3, 8, 5.0), OPERATOR, {"form": "linear"}),
    "linear scores, few": Scene(linear(2, 8, 3.0), OPERATOR, {"form": "linear"}),
    "linear scores, fewer": Scene(linear(2, 8, 2.0), {**OPERATOR, "too_few": (), "limit": ()}, {"form": "linear"}),
    "linear scores, d = 16": Scene(linear(2, 16, 5.0), OPERATOR, {"form": "linear"}),
    "linear scores, noise": Scene(linear(2, 8, 12.0, noise=0.01), {"noise": (operator_within,)},
                                  {"form": "linear"}),
    "linear scores, d = 14, noise": Scene(linear(2, 14, 12.0, noise=0.01), {"noise": (operator_within,)},
                                          {"form": "linear"}),
    "linear scores, a softmax": Scene(linear(2, 8, 30.0, softmax=True), {"not_realisable": ()},
                                      {"form": "linear"}),
    "linear scores, a template": Scene(linear(2, 6, 20.0, change=template), UNDETERMINED, {"form": "linear"}),
}
FAR = 10**9
TABLE: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    # questions: the first ones
    ("chosen.opening.ORDER", 1e9, ("questions, places matter", "questions, answers at random")),
    ("chosen.opening.SURE", 0, ("questions", "questions, float32")),
    ("chosen.opening.STEEP", 99.0, ("questions, small scores",)),
    ("chosen.opening.FLAT", -99.0, ("questions, large scores",)),
    ("chosen.opening.SIZES", 1, ("questions, small scores", "questions, large scores")),
    ("chosen.opening.LARGEST", 2, ("questions, small scores",)),
    # questions: noise
    ("chosen.conversation.EXACT", 1.0, ("questions or not, noise of 1e-3", "questions, noise of 1e-3")),
    ("chosen.conversation.EXACT", 0.0, ("questions", "questions or not")),
    ("chosen.conversation.NOISY", 1e-3, ("questions, noise of 1e-3", "questions, float32")),
    ("chosen.conversation.NOISY", 1e14, ("questions, squared scores",)),
    ("chosen.everywhere.ASIDES", 0, ("questions, noise of 1e-3",)),
    ("chosen.scattered.ROUNDS", 1, ("questions, as many heads as outputs", "questions or not, noise of 1e-3")),
    ("chosen.scattered.ROUNDS", 2, ("questions or not, noise of 1e-3",)),
    ("chosen.scattered.UNCOUNTED", 0.2, ("questions, as many heads as outputs",)),
    ("chosen.scattered.AGAIN", 1.0, ("questions or not, noise of 1e-3", "questions, as many heads as outputs")),
    ("chosen.learner.BENT", 1e14, ("questions, no layer",)),
    ("chosen.learner.LEAST_BENT", 1e9, ("questions, no layer",)),
    # questions: the line
    ("chosen.learner.LINES", (1.0,), ("questions", "questions, six heads", "questions, large scores")),
    ("chosen.learner.SMALLER", 1.0, ("questions, large scores",)),
    ("chosen.line.LEAST", -0.1, ("questions, six heads", "questions, one head")),
    ("chosen.line.MOST", 0.6, ("questions, six heads", "questions, one head")),
    ("chosen.line.STEPS", 10, ("questions, six heads",)),
    ("chosen.line.FAILED", 1.5, ("questions, six heads",)),
    ("chosen.line.WELL", 1.2, ("questions, six heads",)),
    ("chosen.line.FALLEN", 1e-2, ("questions, six heads",)),
    ("chosen.place.REACH", 2.0, ("questions, six heads", "questions")),
    ("chosen.place.CELLS", 7, ("questions, six heads", "questions")),
    ("chosen.place.SLOPES", (1.0,), ("questions, six heads", "questions")),
    ("chosen.place.KEPT", 1, ("questions, six heads", "questions")),
    ("chosen.place.ROUNDS", 1, ("questions, six heads", "questions")),
    ("chosen.place.FINER", 0.3, ("questions, six heads", "questions")),
    ("chosen.seed.FIRST", 1, ("questions", "questions, six heads")),
    ("chosen.seed.RANK", 0.1, ("questions, noise of 1e-3", "questions, float32")),
    ("chosen.seed.LEAST_RANK", 1e-16, ("questions", "questions, six heads")),
    ("chosen.seed.LEAST_RANK", 1e-3, ("questions, six heads",)),
    ("chosen.seed.STEPPED", 1e-1, ("questions", "questions, six heads")),
    ("chosen.seed.STEPPED", 1e-9, ("questions", "questions, six heads")),
    ("chosen.seed.MET", 0.01, ("questions, noise of 1e-3", "questions, float32")),
    ("chosen.seed.LEAST_MET", 1e-16, ("questions", "questions, six heads")),
    ("chosen.seed.SHORT", 2, ("questions, six heads", "questions")),
    ("chosen.seed.BASES", 1, ("questions, six heads", "questions")),
    ("chosen.tensors.TRIES", 1, ("questions, six heads", "questions, noise of 1e-3")),
    ("chosen.tensors.ROUNDS", 0, ("questions, six heads", "questions, noise of 1e-3")),
    # questions: how many
    ("chosen.plan.HALF", 1, ("questions, one head",)),
    ("chosen.plan.NEAR", 1.5, ("questions, six heads", "questions, one head")),
    ("chosen.plan.NEAR", 4.0, ("questions, six heads",)),
    ("chosen.plan.FREE", 0.3, ("questions, six heads", "questions, one head")),
    ("chosen.plan.FREE", 2.0, ("questions, six heads",)),
    ("chosen.plan.SPARE", 0.0, ("questions, 37 allowed",)),
    ("chosen.plan.RANDOM", 1.0, ("questions or not",)),
    ("chosen.plan.RANDOM", 20.0, ("questions or not",)),
    ("chosen.plan.SELECT", 0.3, ("questions, six heads",)),
    ("chosen.plan.JUDGE", 0.3, ("questions, six heads",)),
    ("chosen.plan.LEAST_SELECT", 1, ("questions", "questions, noise of 1e-3")),
    ("chosen.plan.LEAST_JUDGE", 1, ("questions, noise of 1e-3", "questions or not, noise of 1e-3")),
    # questions: everywhere
    ("chosen.everywhere.ATTEMPTS", ((1.0, 0.3),), ("questions", "questions, six heads")),
    ("chosen.everywhere.ATTEMPTS", ((1.0, 0.03),), ("questions, six heads",)),
    ("chosen.everywhere.ATTEMPTS", ((1.0, 1.0),), ("questions, six heads",)),
    ("chosen.everywhere.CLOSE", 1e-1, ("questions, six heads", "questions, one head")),
    ("chosen.everywhere.CLOSE", 1e-9, ("questions, six heads", "questions, one head")),
    ("chosen.everywhere.ROUGH_STEPS", 3, ("questions, six heads",)),
    ("chosen.everywhere.ROUGH_INNER", 10, ("questions, six heads",)),
    ("chosen.everywhere.ROUGH_INNER", 1000, ("questions, six heads",)),
    # linear scores
    ("linear.PASSES", (1,), ("linear scores, few", "linear scores, fewer")),
    ("linear.PASSES", (10,), ("linear scores", "linear scores, d = 16")),
    ("linear.STEPS", 20, ("linear scores, few", "linear scores, d = 16")),
    ("linear.BUDGET", 0.1, ("linear scores, few", "linear scores, d = 16")),
    ("linear.PRODUCTS", 100, ("linear scores, few", "linear scores")),
    ("linear.PRODUCTS", FAR, ("linear scores, few", "linear scores, d = 16")),
    ("linear.NEAR", 0.0, ("linear scores", "linear scores, d = 16")),
    ("linear.DIGITS", 0, ("linear scores", "linear scores, d = 16")),
    ("linear.CLOSE", 0.0, ("linear scores, few", "linear scores, fewer")),
    ("linear.LAST", 0.01, ("linear scores, noise", "linear scores, d = 14, noise")),
    ("linear.PATIENCE", 1, ("linear scores, few", "linear scores, d = 14, noise")),
    ("linear.PATIENCE", 12, ("linear scores, d = 14, noise",)),
    ("linear.BETTER", 0.3, ("linear scores", "linear scores, d = 14, noise")),
    ("linear.NEARLY", 1.0, ("linear scores, noise", "linear scores, d = 14, noise")),
    ("linear.ROWS", 1, ("linear scores", "linear scores, d = 16")),
    ("linear.FEWEST", 4, ("linear scores", "linear scores, noise")),
    ("linear.SAME", 2.0, ("linear scores, d = 14, noise",)),
    ("linear.SAME", 1.0, ("linear scores, d = 14, noise",)),
    ("linear.WHOLE", 2, ("linear scores, noise", "linear scores, a softmax")),
    ("linear.LIKE_NOISE", 0.0, ("linear scores, noise",)),
    ("linear.LIKE_NOISE", 2.0, ("linear scores, noise",)),
    ("linear.ENOUGH", FAR, ("linear scores, d = 14, noise",)),
    ("linear_verdict.PUSH", 1e-14, ("linear scores, few", "linear scores, d = 16")),
    ("linear_verdict.BACK", 1.0, ("linear scores, a template",)),
    ("linear_verdict.BACK", 1e-12, ("linear scores, d = 16",)),
    ("linear_verdict.STEPS", 1, ("linear scores, d = 16",)),
)
SAMPLE = "the size of a sample"
SIZES = {
    "linear_evidence.CUBIC": SAMPLE, "linear_verdict.MIXED": "names and words, no number",
    "chosen.place.TABLE": "how fine a table is", "chosen.place.FAR": "how far a table reaches",
    "chosen.tensors.SMALL": "the least that is divided by",
}
