"""Do the error bars of certificates cover? Layers off by known errors, and fresh labels with noise of three laws.

A layer is moved by as much as noise would move a fit, in every parameter, and certified from fresh noisy labels,
from the dense Jacobian and by products. A bound of every head's Θ and W is stated, all together with the confidence
asked: how often do all hold? The mean of bound over error says how tight they are.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

import headway as hw
from common import record
from headway.certificates.bars import Tried, error_bars, error_bars_by_products
from headway.certificates.jacobian import sample
from headway.certificates.newton import Newton
from headway.certificates.spectrum import Spectrum

REPETITIONS = {"dense": 500, "products": 100}
LEVELS, NOISE, OFF = (0.8, 0.99), 0.02, 0.002  # nominal; of labels; of parameters
HEADS, WIDTH, COUNT, LENGTH = 2, 4, 100, 5


def laws(draw: torch.Generator, shape: torch.Size) -> dict[str, Tensor]:
    """Noise of deviation 1: normal, uniform, and Student's with three degrees of freedom."""
    normal = torch.randn(4, *shape, generator=draw, dtype=torch.float64)
    uniform = torch.rand(shape, generator=draw, dtype=torch.float64)
    return {"normal": normal[0], "uniform": math.sqrt(12) * (uniform - 0.5),
            "Student, 3": normal[0] / normal[1:].square().sum(0).sqrt()}


def nudged(layer: hw.AttentionLayer, draw: torch.Generator) -> hw.AttentionLayer:
    def off(M: Tensor) -> Tensor:
        return M + OFF * torch.randn(M.shape, generator=draw, dtype=torch.float64)

    return replace(layer, Theta=off(layer.Theta), W=off(layer.W))


def relative(near: hw.AttentionLayer, truth: hw.AttentionLayer) -> list[float]:
    """Errors of every head's Θ, then of every W."""
    pairs = ((near.augmented, truth.augmented), (near.W, truth.W))
    return [float((a[i] - b[i]).norm() / a[i].norm()) for a, b in pairs for i in range(truth.heads)]


def stated(near: hw.AttentionLayer, data: hw.Examples, way: str, level: float, draw: torch.Generator) -> hw.Claim:
    found = sample(near, data, len(data), torch.float64)
    if way == "dense":
        return error_bars(found, level)
    newton = Newton(found, Spectrum.of(found, 0.99, draw, 200))
    return error_bars_by_products(found, Tried.of(found, newton, draw), level)


def main() -> None:
    rows = []
    truth = hw.AttentionLayer.random(HEADS, WIDTH, seed=0)
    for way, repetitions in REPETITIONS.items():
        for law in ("normal", "uniform", "Student, 3"):
            for level in LEVELS:
                covered, undecided, ratios = 0, 0, []
                for j in range(repetitions):
                    draw = torch.Generator().manual_seed(50_000 + j)
                    near = nudged(truth, draw)
                    X = torch.randn(COUNT, LENGTH, WIDTH, generator=draw, dtype=torch.float64)
                    data = hw.Examples(X, truth(X) + NOISE * laws(draw, X.shape)[law])
                    claim = stated(near, data, way, level, draw)
                    if claim.holds == "undecided":
                        undecided += 1
                        continue
                    bounds = [claim.numbers[f"{name}_{i + 1}_at_most"] for name in ("theta", "w")
                              for i in range(HEADS)]
                    errors = relative(near, truth)
                    covered += all(error <= bound for error, bound in zip(errors, bounds, strict=True))
                    ratios += [bound / error for error, bound in zip(errors, bounds, strict=True)]
                said = repetitions - undecided
                rows.append({"by": way, "noise": law, "nominal": level, "covered": covered / max(said, 1),
                             "undecided": undecided, "repetitions": repetitions,
                             "mean bound over error": sum(ratios) / max(len(ratios), 1), "seeds": "50000 and on"})
                print(rows[-1], flush=True)
    record("bars", "python bench/bars.py", {
        "least coverage": {f"{level:g}": min(float(str(r["covered"])) for r in rows if r["nominal"] == level)
                           for level in LEVELS},
        "below nominal": sum(float(str(r["covered"])) < float(str(r["nominal"])) for r in rows)}, rows)


if __name__ == "__main__":
    main()
