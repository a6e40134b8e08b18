"""Settings of the baselines in the zoo, Adam and L-BFGS: tuned on layers and seeds that the zoo does not use.

Three instances (width 16 with 3 heads, width 24 with 2 heads and biases, width 32 with 4 heads), eight seconds of
processor time and one thread each, as in `headway bench`. A setting is ranked by how many it brings below a
relative error of 1e-3, then by the geometric mean of its errors. Where all come down to the rounding of single
precision, or to where L-BFGS stops, that mean says little: the defaults of headway.learning.baselines are settings
that share the first place, and among Adam's rates the one that bench/adam_tuning.py found fastest.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

import headway as hw
from common import record
from headway.core.counting import Size
from headway.learning.baselines import Setting, adam, lbfgs
from headway.learning.source import Source, find_frame
from stopwatch import fair

SECONDS = 8.0
LAYERS: tuple[tuple[dict[str, Any], int, int], ...] = (
    ({"heads": 3, "width": 16}, 2000, 8), ({"heads": 2, "width": 24, "key_bias": True, "offset": True}, 2000, 8),
    ({"heads": 4, "width": 32}, 4000, 16))


def main() -> None:
    with fair():
        tune()


def tune() -> None:
    sources = []
    for j, (settings, count, length) in enumerate(LAYERS):
        data = hw.draw(hw.AttentionLayer.random(seed=900 + j, **settings), count=count, length=length, seed=950 + j)
        source = Source(data)
        source.frame = find_frame(data, source.fit, source.device)
        sources.append((source, settings["heads"], Size(source.d, source.d, length).floor(settings["heads"])))
    choices: list[tuple[str, dict[str, Any]]] = [
        ("adam", {"rate": rate, "rows": rows}) for rate, rows in itertools.product(
            (3e-3, 5e-3, 1e-2), (512, 1024))]
    choices += [("lbfgs", {"history": history, "floors": floors, "scale": scale}) for history, floors, scale in
                itertools.product((20, 50), (6, 12), (0.5, 2.0))]
    rows = []
    for name, choice in choices:
        errors = []
        for source, heads, floor in sources:
            draw = torch.Generator().manual_seed(0)
            if name == "adam":
                found = adam(source, heads, Setting(**choice), seed=draw, seconds=SECONDS)
            else:
                found = lbfgs(source, heads, seed=draw, seconds=SECONDS, history=choice["history"],
                              scale=choice["scale"], sequences=choice["floors"] * floor)
            errors.append(found.error)
        rows.append({"learner": name, "setting": str(choice), "below 1e-3": sum(e < 1e-3 for e in errors),
                     "mean error": math.exp(sum(math.log(e) for e in errors) / len(errors)),
                     "errors": ", ".join(f"{e:.1e}" for e in errors)})
        print(rows[-1], flush=True)
    ranked = sorted(rows, key=lambda row: (-row["below 1e-3"], row["mean error"]))
    best = {name: next(row["setting"] for row in ranked if row["learner"] == name) for name in ("adam", "lbfgs")}
    record("baselines", "python bench/baselines.py", best, rows)


if __name__ == "__main__":
    main()
