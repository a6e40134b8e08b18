"""Which method when: the same examples for every method that takes them, each with the same seconds.

    python bench/methods.py [--only SITUATION ...] [--workers N]

Situations are scenes of scenes.py, and short sequences for the first paper's algorithm. Nobody is told anything
but the baselines, which need the number of heads, and "form told", which knows how scores come about. A run has one
thread and SECONDS of wall clock; nothing was tuned on the seeds shown. Errors are on other sequences, relative to
the spread of the labels. The baselines use all their seconds; where a method refuses the examples, its row says so.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

import headway as hw
import judged
import scenes
import workers
from common import record
from judged import Case

SEEDS = (800, 801, 802)
SECONDS = 30.0
LEARNED = 1e-6
TOLD = ("adam", "lbfgs")  # the number of heads
METHODS = ("auto", "moments", "factors", "starts", "sculpt", *TOLD)
FORMS = ("form told", "form=auto")  # tried where scores are not plain, and on one layer whose are


def pairs(seed: int) -> Case:
    """Two ±1 tokens, as in the first paper."""
    layer = hw.AttentionLayer.random(1, 6, seed=seed)
    data = hw.draw(layer, count=8000, length=2, seed=1000 + seed)
    X = hw.draw(layer, count=scenes.FRESH, length=2, seed=2000 + seed).X.to(torch.float64)
    return Case(data, X, layer(X), layer)


SITUATIONS: dict[str, tuple[str, Callable[[int], Case]]] = {
    "white": ("white tokens, many (4 heads, d = 32, 2,500 sequences of 8)", scenes.white(4, 32, 8, 2500)),
    "few": ("white tokens, few (3 heads, d = 12, six times the floor)",
            scenes.white(3, 12, 8, scenes.floors(3, 12, 8, 6))),
    "pairs": ("two ±1 tokens, many sequences (1 head, d = 6, 8,000)", pairs),
    "words": ("words and positions behind a layer norm (3 heads, d = 28, 800 sequences of 10)",
              scenes.words(3, 28, 800)),
    "encoder": ("a trained layer on its own activations (4 heads, d = 16, 800 sequences)",
                scenes.trained("encoder", 1)),
    "wide": ("wide, low rank, few (4 heads of rank 8, d = 64, 600 sequences of 16)",
             scenes.white(4, 64, 16, 600, rank=8, out_rank=8, law="boolean")),
    "noise": ("white tokens, 10 % noise (3 heads, d = 12, 800 sequences of 8)", scenes.noisy(0.1)),
    "rotary": ("turned queries and keys, causal (2 heads, d = 8, 500 sequences of 6)",
               scenes.formed(scenes.rotary)),
}


OF_FORMS = ("rotary", "encoder")


def run(situation: str, method: str, seed: int) -> dict[str, Any]:
    words, make = SITUATIONS[situation]
    case = make(seed)
    assert case.truth is not None
    options: dict[str, Any] = {"method": method}
    if method in FORMS:
        plain = hw.Form(sight=hw.Sight(causal=case.data.mask == "causal"))
        form = case.truth.form if isinstance(case.truth, hw.FactoredLayer) else plain
        options = {"form": "auto" if method == "form=auto" else form}
    if method in TOLD:
        options["heads"] = case.truth.heads
    said = judged.ask(case, **options, seconds=SECONDS, seed=seed)
    heads = None if said.fit is None else said.fit.layer.heads
    found = {"situation": situation, "examples": words, "method": method, "seed": seed,
             "said": said.kind, "heads": heads, "count right": heads == case.truth.heads,
             "error": judged.finite(judged.fresh_error(said, case)), "noise": case.noise,
             "seconds": round(said.seconds, 2)}
    print(found, flush=True)
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest method of those that learn most seeds, by situation."""
    best: dict[str, Any] = {}
    for situation in dict.fromkeys(row["situation"] for row in rows):
        by = {method: [row for row in rows if (row["situation"], row["method"]) == (situation, method)]
              for method in (*METHODS, *FORMS)}
        score = {method: (sum(learned(row) for row in mine), -statistics.median(row["seconds"] for row in mine))
                 for method, mine in by.items() if mine}
        first = max(score, key=lambda method: score[method])
        best[situation] = first if score[first][0] else "none"
    return best


def learned(row: dict[str, Any]) -> bool:
    """To a millionth; to a third of the noise, where there is some."""
    return row["error"] is not None and row["error"] <= max(LEARNED, row["noise"] / 3)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--only", nargs="*", choices=list(SITUATIONS), default=None)
    workers.option(words)
    asked = words.parse_args()
    torch.set_num_threads(1)
    rows = workers.each(run, [(situation, method, seed) for situation in asked.only or list(SITUATIONS)
                              for method in (*METHODS, *(FORMS if situation in OF_FORMS else ()))
                              for seed in SEEDS], asked.workers)
    if asked.only is None:  # a part says less than the whole
        record("methods", "python bench/methods.py", summary(rows), rows)
    else:
        print(summary(rows))


if __name__ == "__main__":
    main()
