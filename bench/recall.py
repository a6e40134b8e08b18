"""The small transformer that recalls, of the second act of the demo: trained here, stored with the package.

    python bench/recall.py      # a minute or two of one core; writes src/headway/recall/recall.safetensors

Width 32, a layer of four heads and one of two, AdamW, seed 2: the same weights every time on one machine. It must
be right on more than 99.9 % of the letters that can be known, in sequences drawn by another seed, with a head in
the first layer that looks at the letter before and an induction head in the second; otherwise nothing is written.
"""

from __future__ import annotations

import sys

import torch
from torch.optim.lr_scheduler import OneCycleLR

import headway as hw
from common import record
from headway.core.behaviour import behaviours
from headway.core.files import write_tensors
from headway.recall.data import sequences
from headway.recall.model import FIRST, LAST, Recaller, loss, measured, own, stored

SEED, UNSEEN_SEED = 2, 1000
STEPS, BATCH, RATE, PLACES = 3000, 64, 4e-3, 64
UNSEEN = 2000  # sequences it is measured on
LEAST = 0.999  # of the letters that can be known


def train(steps: int) -> Recaller:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)  # torch's layers take no generator
        model = Recaller()
    draw = torch.Generator().manual_seed(SEED)
    adam = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01)
    pace = OneCycleLR(adam, RATE, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        ids = sequences(BATCH, draw)
        # It may begin anywhere, or the first layer would learn each place by itself, and that nobody looks back at
        # the last ones.
        mean, right = loss(model, ids, int(torch.randint(PLACES, (), generator=draw)))
        adam.zero_grad()
        mean.backward()  # type: ignore[no-untyped-call]
        adam.step()
        pace.step()
        if step % 500 == 0:
            print(f"step {step}: loss {mean.item():.4f}, right {right.item():.4f}", flush=True)
    return model.eval()


def main() -> None:
    torch.set_num_threads(1)  # sums come out the same
    model = train(STEPS)
    ids = sequences(UNSEEN, torch.Generator().manual_seed(UNSEEN_SEED))
    score = measured(model, ids)
    rows = []
    for number, path in enumerate((FIRST, LAST), 1):
        layer, some = own(model, path), ids[:200]
        seen = behaviours(layer.patterns(hw.capture(model, path, [some]).X), some)
        rows += [{"layer": number, "head": head, "what it does": one.kind, "share": one.share, "chance": one.chance}
                 for head, one in enumerate(seen, 1)]
    for row in rows:
        print(row, flush=True)
    kinds = [(row["layer"], row["what it does"]) for row in rows]
    good = score.accuracy > LEAST and (1, "previous token") in kinds and (2, "induction") in kinds
    if good:
        write_tensors(stored(), model.state_dict(), {"made by": "python bench/recall.py"})
    else:
        print("Not good enough: nothing is written.", file=sys.stderr)
    record("recall", "python bench/recall.py",
           {"steps": STEPS, "loss": score.loss, "accuracy": score.accuracy, "written": good}, rows)


if __name__ == "__main__":
    main()
