"""Examples as a new user might bring them, each wrong in its own way: is what ``learn`` says of them true?

    python bench/trial.py [--only WORDS ...] [--workers N]

Two heads of width 8, 600 sequences of 6 Gaussian tokens, a minute each at most, unless the case says otherwise. The
head count is told only where the case says so. Each case comes with the statements that are true of it. A run of
all cases is recorded; ``--only 1e150 shard`` runs those that have one of these words in their name.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headway as hw
import judged
import labels
import nets
import workers
from common import record
from headway.core.shards import write
from judged import AS_GOOD_AS_EXACT, LABEL_NOISE, NO_LAYER, SPOILT, Case, Said, Truth

LAYER = hw.AttentionLayer.random(heads=2, width=8, seed=0)
COUNT, LENGTH, FRESH = 600, 6, 500
SECONDS = 60.0
TRAINING, OWN = 400, 3000  # steps of the trained network; sequences of its activations
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Trial:
    """A case, what is true of it, and words that a helpful sentence would have."""

    item: int  # its family, of the eight above CASES
    name: str
    make: Callable[[Path], Case]
    true: Truth
    options: dict[str, Any] = field(default_factory=dict)
    cause: str | None = None


# -- how examples are made --------------------------------------------------------------------------------------


def drawn(count: int, seed: int) -> Tensor:
    return labels.normal(torch.Generator().manual_seed(seed), count, LENGTH, LAYER.width)


def tokens() -> Tensor:
    return hw.draw(LAYER, COUNT, LENGTH, law="gaussian", seed=1).X


def beside(change: Change) -> Callable[[Path], Case]:
    """The layer's labels, beside tokens that were changed: another layer does the same on these."""

    def make(folder: Path) -> Case:
        X, others = tokens(), drawn(FRESH, 2)
        return Case(hw.Examples(change(X), LAYER(X)), change(others), LAYER(others), LAYER)

    return make


def labelled(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Path], Case]:
    """Labels that are a function of the tokens and of the layer's labels."""

    def make(folder: Path) -> Case:
        X, others = tokens(), drawn(FRESH, 2)
        return Case(hw.Examples(X, change(X, LAYER(X))), others, change(others, LAYER(others)), LAYER)

    return make


def from_tokens(pick: Change) -> Callable[[Path], Case]:
    """The layer's labels of tokens that say less than they seem to; the others are drawn freely."""

    def make(folder: Path) -> Case:
        X, others = pick(tokens()), drawn(FRESH, 2)
        return Case(hw.Examples(X, LAYER(X)), others, LAYER(others), LAYER)

    return make


def spoilt(spoil: Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Any]]) -> Callable[[Path], Case]:
    """The layer's labels with errors in them, and the sequences that have gross ones."""

    def make(folder: Path) -> Case:
        X, others = tokens(), drawn(FRESH, 2)
        right = LAYER(X)
        Y, at = spoil(right, X, torch.Generator().manual_seed(3))
        return Case(hw.Examples(X, Y), others, LAYER(others), LAYER, judged.planted_noise(right, Y),
                    judged.indices(at))

    return make


def ruled(make_rule: Callable[[int, torch.Generator], labels.Rule]) -> Callable[[Path], Case]:
    rule = make_rule(LAYER.width, torch.Generator().manual_seed(4))
    return labelled(lambda X, Y: rule(X))


def shards(folder: Path) -> Case:
    """Four shards, the third stored in float32."""
    X, others = tokens(), drawn(FRESH, 2)
    Y = LAYER(X)
    parts = [hw.Examples(x, y) for x, y in zip(X.split(COUNT // 4), Y.split(COUNT // 4), strict=True)]
    parts[2] = hw.Examples(parts[2].X.float(), parts[2].Y.float())
    data = write(folder / "shards", parts, shards=len(parts))
    return Case(data, others, LAYER(others), LAYER)


@cache
def network() -> tuple[list[hw.AttentionLayer], list[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    net = nets.gpt(0, TRAINING, draw)
    return net.layers(), net.tokens(OWN + FRESH, draw)


def trained(number: int) -> Callable[[Path], Case]:
    """A layer of a small GPT from its own activations."""

    def make(folder: Path) -> Case:
        layers, own = network()
        layer, X = layers[number], own[number]
        return Case(hw.Examples(X[:OWN], layer(X[:OWN]), mask=layer.mask), X[OWN:], layer(X[OWN:]), layer)

    return make


def causal(X: Tensor, Y: Tensor) -> Tensor:
    return hw.AttentionLayer(LAYER.Theta, LAYER.W, mask="causal")(X)


def one_feature(X: Tensor) -> Tensor:
    return X * torch.tensor([1e5] + [1.0] * (LAYER.width - 1), dtype=X.dtype)


def template(X: Tensor) -> Tensor:
    """All sequences have the tokens of the first, but for the third."""
    filled = X[:1].repeat(len(X), 1, 1)
    filled[:, 2] = X[:, 2]
    return filled


# -- what is true -----------------------------------------------------------------------------------------------


def in_time(seconds: float) -> judged.Check:
    """Within 10 % or 2 s of what was allowed."""
    return lambda said, case: "" if on_time(said, seconds) else f"{said.seconds:.1f} s, of {seconds:g} allowed"


def on_time(said: Said, seconds: float) -> bool:
    return said.seconds <= max(1.1 * seconds, seconds + 2)


KINDS = ("recovered", "fitted", "noise", "not_realisable", "too_few", "degenerate", "limit")
OR_REFUSED: Truth = {**AS_GOOD_AS_EXACT, "refused": ()}
REPEATED: Truth = {**AS_GOOD_AS_EXACT, "too_few": ()}
UNDETERMINED: Truth = {"too_few": (), "degenerate": (), "fitted": (judged.not_determined_said,),
                       "recovered": (judged.heads_within(judged.FITTED),)}
NOTHING: Truth = dict.fromkeys(("not_realisable", "noise", "degenerate"), (judged.not_ok,))
MISLABELLED: Truth = {**LABEL_NOISE, **SPOILT}
OUT_OF_STEP = r"\b(positions?|rows?|order|aligned)\b"

# 1 rows out of step; 2 tokens that repeat; 3 scales and shifts; 4 noise that is not plain; 5 something beside the
# layer, or no layer; 6 precisions mixed; 7 trained layers and the clock; 8 wrong labels.
CASES = (
    *(Trial(1, f"labels rolled by {by}", labelled(lambda X, Y, by=by: Y.roll(by, 1)),  # type: ignore[misc]
            NO_LAYER, cause=OUT_OF_STEP) for by in (1, 2, -1)),
    Trial(1, "labels in reverse order", labelled(lambda X, Y: Y.flip(1)), NO_LAYER, cause=OUT_OF_STEP),
    Trial(2, "13 sequences, each 46 times", from_tokens(lambda X: X[:13].repeat(46, 1, 1)), REPEATED),
    Trial(2, "60 sequences, each 10 times in a row", from_tokens(
        lambda X: X[:60].repeat_interleave(10, 0)), REPEATED),
    Trial(2, "one token repeated in each sequence", from_tokens(
        lambda X: X[:, :1].repeat(1, LENGTH, 1)), UNDETERMINED),
    Trial(2, "prompts from a template, one row varies", from_tokens(template), UNDETERMINED),
    Trial(3, "X * 1e-80", beside(lambda X: X * 1e-80), OR_REFUSED),
    Trial(3, "X * 1e150", beside(lambda X: X * 1e150), OR_REFUSED),
    Trial(3, "one feature times 1e5", beside(one_feature), AS_GOOD_AS_EXACT),
    Trial(3, "X + 1e8", beside(lambda X: X + 1e8), AS_GOOD_AS_EXACT),
    Trial(3, "X + 1e5", beside(lambda X: X + 1e5), AS_GOOD_AS_EXACT),
    Trial(3, "Y + 1e5", labelled(lambda X, Y: Y + 1e5), AS_GOOD_AS_EXACT),
    Trial(4, "noise of 5 % that grows with ‖x‖²", spoilt(
        lambda Y, X, draw: (labels.growing(Y, X, 0.05, draw), ())), LABEL_NOISE),
    Trial(4, "bfloat16 labels held as double", spoilt(
        lambda Y, X, draw: (Y.bfloat16().double(), ())), LABEL_NOISE),
    Trial(4, "5 % of the rows mislabelled", spoilt(
        lambda Y, X, draw: labels.rows_shuffled(Y, 0.05, draw)), MISLABELLED, cause="outlier|wrong"),
    Trial(5, "a residual connection, Y + X", labelled(lambda X, Y: Y + X), NO_LAYER,
          cause="residual connection|linear"),
    Trial(5, "a linear map of each token", ruled(labels.linear), NO_LAYER, cause="linear"),
    Trial(5, "a small network on each token", ruled(labels.mlp), NO_LAYER),
    Trial(5, "causal labels, the mask not told", labelled(causal), NO_LAYER, cause="mask|causal"),
    Trial(6, "one float32 shard among float64", shards, OR_REFUSED),
    *(Trial(7, f"layer {number} of a trained GPT, {words}", trained(number), AS_GOOD_AS_EXACT, options)
      for number in (0, 1) for words, options in (
          ("heads and rank told", {"heads": 4, "rank": 16}), ("nothing told", {}))),
    Trial(7, "10 s allowed for layer 0 of a trained GPT", trained(0), dict.fromkeys(KINDS, (in_time(10.0),)),
          {"seconds": 10.0}),
    Trial(8, "0.5 % of the sequences with labels 100 times as large", spoilt(
        lambda Y, X, draw: labels.scaled_up(Y, 0.005, draw)), SPOILT, cause="outlier|wrong"),
    Trial(8, "labels that are pure noise", spoilt(
        lambda Y, X, draw: (labels.normal(draw, *Y.shape), ())), NOTHING),
    Trial(8, "all labels shuffled among the sequences", spoilt(
        lambda Y, X, draw: (Y[torch.randperm(len(Y), generator=draw)], ())), NOTHING),
)
SHOWN = ("",)  # words of the cases that are run: all of them


def run(number: int) -> dict[str, Any]:
    trial = CASES[number]
    options = {"seconds": SECONDS, **trial.options}
    with tempfile.TemporaryDirectory() as folder:
        case = trial.make(Path(folder))
        said = judged.ask(case, **options)
    named = None if trial.cause is None else bool(re.search(trial.cause, said.sentence, flags=re.I))
    found = {"item": trial.item, "case": trial.name,
             **judged.row(said, case, judged.judge(said, case, trial.true)),
             "names the cause": named, "in time": on_time(said, options["seconds"])}
    print(found, flush=True)
    return found


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--only", nargs="+", metavar="WORDS")
    workers.option(words)
    asked = words.parse_args()
    chosen = [(j,) for j, trial in enumerate(CASES) if any(part in trial.name for part in asked.only or SHOWN)]
    rows = workers.each(run, chosen, asked.workers)
    if asked.only is None:  # a part says less than the whole
        record("trial", "python bench/trial.py", {
            "cases": len(rows), "true": sum(row["true"] for row in rows),
            "ok and false": sum(row["ok"] and not row["true"] for row in rows),
            "crashes": sum(row["said"] == "crash" for row in rows),
            "in time": sum(row["in time"] for row in rows)}, rows)


if __name__ == "__main__":
    main()
