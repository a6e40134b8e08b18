"""Identifiability of a layer of width 384 with 12 heads of rank 32 and biases, by products: time and the bound."""

from __future__ import annotations

import sys

import headway as hw
from common import record, timed

SHAPE, COUNT = {"heads": 12, "width": 384, "rank": 32}, 2000


def main() -> None:
    layer = hw.AttentionLayer.random(key_bias=True, offset=True, scale=3.0, seed=0, **SHAPE)
    data = hw.draw(layer, count=COUNT, length=32, seed=1)
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    data = hw.Examples(data.X.to(device), data.Y.to(device))
    found, seconds = timed(lambda: hw.certify(layer, data))
    claim = found["identifiability"]
    print(found)
    row = {"holds": claim.holds, "seconds": seconds, **claim.numbers}
    if device == "cpu":
        record("certify_large", "python bench/certify_large.py", {"holds": claim.holds, "seconds": seconds}, [row])


if __name__ == "__main__":
    main()
