"""Every claim of a certificate at widths where no dense Jacobian is formed: what is decided, with how many
products."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from torch import Tensor

import headway as hw
from common import record, timed
from headway.certificates.jacobian import parameters

SHAPES = ({"heads": 4, "width": 32}, {"heads": 4, "width": 64, "rank": 16}, {"heads": 8, "width": 128, "rank": 16})
LENGTH = 32


def near(layer: hw.AttentionLayer) -> hw.AttentionLayer:
    """As a layer learned to the floor of the arithmetic."""
    draw = torch.Generator().manual_seed(1)

    def off(M: Tensor) -> Tensor:
        return M * (1 + 1e-14 * torch.randn(M.shape, generator=draw, dtype=M.dtype))

    return replace(layer, Theta=off(layer.Theta), W=off(layer.W))


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    rows = []
    for shape in SHAPES:
        layer = hw.AttentionLayer.random(key_bias=True, offset=True, seed=0, **shape)  # type: ignore[arg-type]
        data = hw.draw(layer, count=500, length=LENGTH, seed=1)
        fresh = hw.Examples(data.X.to(device), data.Y.to(device))
        learned = near(layer)
        found, seconds = timed(lambda learned=learned, fresh=fresh: hw.certify(learned, fresh))  # type: ignore[misc]
        products = sum(found[name].numbers.get("products", 0.0)
                       for name in ("identifiability", "distance to the truth", "error bars"))
        rows.append({**shape, "parameters": parameters(layer), "seconds": seconds, "products": int(products),
                     "radius": found["distance to the truth"].numbers.get("radius"),
                     **{claim.name: str(claim.holds) for claim in found.claims}})
        print(rows[-1], flush=True)
    asked = ("identifiability", "distance to the truth", "error bars", "what is determined", "non-degeneracy")
    if device == "cpu":
        record("certify_wide", "python bench/certify_wide.py", {
            "undecided": sum(row[name] == "undecided" for row in rows for name in asked),
            "widest": max(int(str(row["width"])) for row in rows)}, rows)


if __name__ == "__main__":
    main()
