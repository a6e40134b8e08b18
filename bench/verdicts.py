"""Is what ``learn`` says true? Twelve kinds of labels, ten seeds each, head count never told.

    python bench/verdicts.py [--seeds FIRST LAST] [--kinds KIND ...] [--workers N]

Gaussian tokens of width 12, 800 sequences of 8. TRUE says for every kind of labels which statuses are true of them
and what else must hold; anything else is false, running out of time included. Seeds 0 to 9 are for tuning
(``--seeds 0 9``), seeds 100 to 109 and 200 to 209 were looked at on the way, seeds 300 to 309 are shown; only a
whole run on those is recorded.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import headway as hw
import judged
import labels
import workers
from common import record
from headway.core.counting import Size
from judged import LABEL_NOISE, NO_LAYER, SPOILT, TOO_FEW, Case, Truth

FIRST, LAST = 300, 309
HEADS, WIDTH, LENGTH, COUNT, FRESH = 3, 12, 8, 800, 500
SECONDS = 60.0
Change = Callable[[Tensor, Tensor, torch.Generator], Tensor]  # right labels and tokens to the labels given


def truth(seed: int) -> hw.AttentionLayer:
    return hw.AttentionLayer.random(heads=HEADS, width=WIDTH, seed=seed)


def tokens(seed: int, count: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Those to learn from, others, and the generator for what comes next."""
    draw = torch.Generator().manual_seed(10_000 + seed)
    X = labels.normal(draw, count + FRESH, LENGTH, WIDTH)
    return X[:count], X[count:], draw


def clean(seed: int, count: int) -> Case:
    """The layer's own labels."""
    layer, (X, others, _) = truth(seed), tokens(seed, count)
    return Case(hw.Examples(X, layer(X)), others, layer(others), layer)


def other(make: Callable[[int, torch.Generator], labels.Rule]) -> Callable[[int], Case]:
    """Labels of a function that is no layer."""

    def case(seed: int) -> Case:
        X, others, draw = tokens(seed, COUNT)
        rule = make(seed, draw)
        return Case(hw.Examples(X, rule(X)), others, rule(others))

    return case


def noise(change: Change) -> Callable[[int], Case]:
    """Labels of a layer, with noise."""

    def case(seed: int) -> Case:
        layer, (X, others, draw) = truth(seed), tokens(seed, COUNT)
        right = layer(X)
        Y = change(right, X, draw)
        return Case(hw.Examples(X, Y), others, layer(others), layer, judged.planted_noise(right, Y))

    return case


def outliers(seed: int) -> Case:
    layer, (X, others, draw) = truth(seed), tokens(seed, COUNT)
    Y, at = labels.blocks_too_large(layer(X), 0.02, draw)
    return Case(hw.Examples(X, Y), others, layer(others), layer, wrong=judged.indices(at))


def half_the_floor(seed: int) -> Case:
    return clean(seed, Size(WIDTH, WIDTH, LENGTH).floor(HEADS) // 2)


KINDS: dict[str, Callable[[int], Case]] = {
    "layer": lambda seed: clean(seed, COUNT),
    "rotary": other(lambda seed, draw: labels.rotary(truth(seed))),
    "relu": other(lambda seed, draw: labels.relu(truth(seed))),
    "normed": other(lambda seed, draw: labels.normed(truth(seed))),
    "mlp": other(lambda seed, draw: labels.mlp(WIDTH, draw)),
    "linear": other(lambda seed, draw: labels.linear(WIDTH, draw)),
    "noise-1": noise(lambda Y, X, draw: labels.noisy(Y, 0.01, draw)),
    "noise-10": noise(lambda Y, X, draw: labels.noisy(Y, 0.1, draw)),
    "noise-50": noise(lambda Y, X, draw: labels.noisy(Y, 0.5, draw)),
    "noise-growing": noise(lambda Y, X, draw: labels.growing(Y, X, 0.1, draw)),
    "outliers": outliers,
    "too-few": half_the_floor,
}
TRUE: dict[str, Truth] = {
    "layer": {"recovered": (judged.heads_within(1e-9),)},
    **dict.fromkeys(("rotary", "relu", "normed", "mlp", "linear"), NO_LAYER),
    **dict.fromkeys(("noise-1", "noise-10", "noise-50", "noise-growing"), LABEL_NOISE),
    "outliers": SPOILT,
    "too-few": TOO_FEW,
}
SHOWN = tuple(KINDS)


def run(kind: str, seed: int) -> dict[str, Any]:
    case = KINDS[kind](seed)
    said = judged.ask(case, seconds=SECONDS)
    found = {"labels": kind, "seed": seed, **judged.row(said, case, judged.judge(said, case, TRUE[kind]))}
    print(found, flush=True)
    return found


def told(rows: list[dict[str, Any]]) -> str:
    """How many statements are true, and which were made."""
    said = Counter(row["said"] for row in rows)
    return (f"{sum(row['true'] for row in rows)} of {len(rows)} true; said: "
            + ", ".join(f"{kind} {count}" for kind, count in said.most_common()))


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), default=[FIRST, LAST])
    words.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(SHOWN))
    workers.option(words)
    asked = words.parse_args()
    first, last = asked.seeds
    cases = [(kind, seed) for kind in asked.kinds for seed in range(first, last + 1)]
    rows = workers.each(run, cases, asked.workers)
    by_kind = {kind: told([row for row in rows if row["labels"] == kind]) for kind in asked.kinds}
    for kind, line in by_kind.items():
        print(f"{kind}: {line}", flush=True)
    if (first, last, set(asked.kinds)) == (FIRST, LAST, set(SHOWN)):  # a part says less than the whole
        record("verdicts", "python bench/verdicts.py", {
            "statements": len(rows), "true": sum(row["true"] for row in rows),
            "ok and false": sum(row["ok"] and not row["true"] for row in rows), **by_kind}, rows)


if __name__ == "__main__":
    main()
