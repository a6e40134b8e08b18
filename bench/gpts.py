"""Every attention layer of a small GPT and of a small encoder, trained here; head count and rank are not told.

    python bench/gpts.py [--seeds FIRST LAST] [--workers N]

gpt       width 64, 4 heads, causal, two layers; it repeats a sequence
encoder   width 32, 4 heads, no mask, two layers; it says how many tokens come before each in the alphabet

Each layer is learned from what its own network gives it on the task, and from random Gaussian tokens, in float64,
in at most a minute. True: recovered or fitted, with the right number of heads and an error of at most 1e-6 on
sequences the learner was not given. Only a whole run on seeds 100 to 102 is recorded.
"""

from __future__ import annotations

import argparse
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import headway as hw
import judged
import labels
import nets
import workers
from common import record
from judged import AS_GOOD_AS_EXACT, Case

FIRST, LAST = 100, 102
NETS = {"gpt": 400, "encoder": 1200}  # steps of training
COUNT, FRESH = 3000, 300
SECONDS = 60.0
INPUTS = ("task", "random")  # of a layer


@lru_cache(maxsize=1)
def trained(name: str, seed: int) -> tuple[nets.Trained, list[tuple[Tensor, Tensor]]]:
    """A network, and for each of its layers what the task gives it and random tokens; kept for the next case."""
    draw = torch.Generator().manual_seed(seed)
    net = {"gpt": nets.gpt, "encoder": nets.encoder}[name](seed, NETS[name], draw)
    return net, [(own, labels.normal(draw, *own.shape)) for own in net.tokens(COUNT + FRESH, draw)]


def run(name: str, seed: int, number: int, inputs: str) -> dict[str, Any]:
    net, tokens = trained(name, seed)
    layer, X = net.layers()[number], tokens[number][INPUTS.index(inputs)]
    Y = layer(X)
    case = Case(hw.Examples(X[:COUNT], Y[:COUNT], mask=layer.mask), X[COUNT:], Y[COUNT:], layer)
    said = judged.ask(case, seconds=SECONDS)
    found = {"net": name, "seed": seed, "training loss": net.loss, "layer": number, "inputs": inputs,
             "true heads": layer.heads, **judged.row(said, case, judged.judge(said, case, AS_GOOD_AS_EXACT))}
    print(found, flush=True)
    return found


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), default=[FIRST, LAST])
    workers.option(words)
    asked = words.parse_args()
    first, last = asked.seeds
    cases = [(name, seed, number, inputs) for name in NETS for seed in range(first, last + 1)
             for number in range(nets.BLOCKS) for inputs in INPUTS]
    rows = workers.each(run, cases, asked.workers)
    if (first, last) == (FIRST, LAST):
        record("gpts", "python bench/gpts.py", {
            "layers": len(rows), "head count right": sum(row["heads"] == row["true heads"] for row in rows),
            "to 1e-6 or better": sum(row["true"] for row in rows),
            "slowest, s": max(row["seconds"] for row in rows)}, rows)


if __name__ == "__main__":
    main()
