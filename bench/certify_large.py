"""Every claim about layers of thin heads, up to width 384 with 12 heads of size 32: what is decided, in what time.

    python bench/certify_large.py [--device cuda] [--layer 3] [--planted]

Random layers first, then one of the sentence encoder's (encoder.py), all on random ±1 tokens, rounded as a
learner leaves them; the labels are their own. With ``--planted`` the same of wrong layers: an entry of a head off
by 1e-3 and by 1e-6, a head dropped. Rows are kept as they come.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import headway as hw
from common import record
from encoder import model_folder
from headway.certificates.jacobian import low_out_ranks, low_ranks, sample

COUNT, LENGTH = 1200, 32
SHAPES = (4, 64, 16), (8, 128, 16), (8, 256, 32)  # heads, width, size
ENCODER = 12
ASKED = "distance to the truth", "error bars", "what is determined"
ROUNDED = 1e-15  # relative, of what a learner leaves


def thin(heads: int, width: int, size: int) -> hw.AttentionLayer:
    layer = hw.AttentionLayer.random(heads, width, rank=size, offset=True, scale=3.0, seed=0)
    U, s, Vh = torch.linalg.svd(layer.W, full_matrices=False)
    return replace(layer, W=U[:, :, :size] * s[:, None, :size] @ Vh[:, :size])


def near(layer: hw.AttentionLayer, size: int) -> hw.AttentionLayer:
    """Factors of the layer, each number off by its last digits."""
    draw = torch.Generator().manual_seed(1)

    def off(M: Tensor) -> Tensor:
        U, s, Vh = torch.linalg.svd(M, full_matrices=False)
        A, B = U[:, :, :size] * s[:, None, :size].sqrt(), Vh[:, :size] * s[:, :size, None].sqrt()
        A, B = (F * (1 + ROUNDED * torch.randn(F.shape, generator=draw, dtype=F.dtype)) for F in (A, B))
        return A @ B

    augmented = off(layer.augmented)
    bias = None if layer.key_bias is None else augmented[:, -1]
    return replace(layer, Theta=augmented[:, : layer.width], key_bias=bias, W=off(layer.W))


def entry(layer: hw.AttentionLayer, size: float) -> hw.AttentionLayer:
    Theta = layer.Theta.clone()
    Theta[0, 0, 1] += size
    return replace(layer, Theta=Theta)


def dropped(layer: hw.AttentionLayer) -> hw.AttentionLayer:
    bias = None if layer.key_bias is None else layer.key_bias[1:]
    return replace(layer, Theta=layer.Theta[1:], W=layer.W[1:], key_bias=bias)


def row(name: str, layer: hw.AttentionLayer, data: hw.Examples) -> dict[str, Any]:
    begun, spent = time.perf_counter(), time.process_time()
    found = hw.certify(layer, data)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - spent
    print(found, flush=True)
    at = sample(layer, data, None, torch.float64, low_ranks(layer), low_out_ranks(layer))
    numbers, distance = found["identifiability"].numbers, found["distance to the truth"].numbers
    products = sum(found[claim].numbers.get("products", 0.0)
                   for claim in ("identifiability", "distance to the truth", "error bars"))
    return {"width": layer.width, "heads": layer.heads, "error": name, "unknowns": at.unknowns,
            "sequences": at.sequences, "seconds": seconds, "processor seconds": cpu, "products": int(products),
            "lower bound": numbers.get("lower_bound"), "least Ritz value": numbers.get("least_ritz_value"),
            "largest Ritz value": numbers.get("largest_ritz_value"), "rounding": numbers.get("rounding"),
            "radius": distance.get("radius"), "allowed": distance.get("tolerance"),
            **{claim.name: str(claim.holds) for claim in found.claims}}


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--layer", type=int, default=3)
    words.add_argument("--device", default="cpu")
    words.add_argument("--planted", action="store_true")
    words.add_argument("--widest", type=int, default=384)
    asked = words.parse_args()
    layers = [(thin(*shape), shape[2]) for shape in SHAPES if shape[1] <= asked.widest]
    if asked.widest >= 384:
        path = model_folder() / "model.safetensors"
        layers.append((hw.from_checkpoint(path, asked.layer, heads=ENCODER), 384 // ENCODER))
    rows: list[dict[str, Any]] = []
    for truth, size in layers:
        data = hw.draw(truth, count=COUNT, length=LENGTH, seed=500)
        data = hw.Examples(data.X.to(asked.device), data.Y.to(asked.device))
        learned = near(truth, size)
        wrong = {"rounded": learned}
        if asked.planted:
            wrong = {"an entry off by 1e-3": entry(learned, 1e-3), "an entry off by 1e-6": entry(learned, 1e-6),
                     "a head dropped": dropped(learned)}
        for name, layer in wrong.items():
            rows.append(row(name, layer, data))
            print(rows[-1], flush=True)
            command = "python bench/certify_large.py" + (" --planted" if asked.planted else "")
            command += "" if asked.widest == 384 else f" --widest {asked.widest}"
            if asked.device == "cpu":
                record("certify_planted" if asked.planted else "certify_large", command, {
                    "widest": rows[-1]["width"], "yes where something is planted": sum(
                        one[claim] == "yes" for one in rows for claim in ASKED if one["error"] != "rounded"),
                    "undecided": sum(one[claim] == "undecided" for one in rows for claim in ASKED)}, rows)


if __name__ == "__main__":
    main()
