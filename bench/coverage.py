"""Do certificates keep their promises? Coverage of the statistical claims, and the radius against the truth.

500 repetitions of the quantile and the mean claim for a layer with a known error on fresh draws (the true quantile
and mean from 200,000 of them), at three levels; 20 recovered instances for the radius, each also with one entry of
one head changed by 1e-3.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import headway as hw
from common import record
from headway.certificates.held_out import errors, mean_claim, quantile_claim
from headway.certificates.jacobian import sample
from headway.certificates.radius import radius

REPETITIONS, SIZE, FRACTION = 500, 600, 0.02
WHOLE = 200_000  # sequences that stand for the law itself
LAYERS = range(20)


def coverage() -> list[dict[str, object]]:
    teacher = hw.AttentionLayer.random(heads=2, width=6, seed=0)
    other = hw.AttentionLayer.random(heads=2, width=6, seed=1)
    student = replace(teacher, Theta=teacher.Theta + 0.05 * other.Theta)
    whole = errors(student, hw.draw(teacher, count=WHOLE, length=5, seed=2))
    quantile = float(torch.quantile(whole.each, 1 - FRACTION))
    mean = float(whole.each.square().mean())
    bound = 6**0.5 * float(torch.linalg.matrix_norm(teacher.W, 2).sum())
    rows = []
    for confidence in (0.8, 0.9, 0.99):
        hits = {"quantile": 0, "mean": 0}
        for j in range(REPETITIONS):
            found = errors(student, hw.draw(teacher, count=SIZE, length=5, seed=10_000 + j))
            hits["quantile"] += quantile_claim(found, confidence, FRACTION, 1.0).numbers["bound"] >= quantile
            hits["mean"] += mean_claim(found, confidence, 1.0, bound, None).numbers["bound"] ** 2 >= mean
        rows += [{"claim": name, "nominal": confidence, "covered": count / REPETITIONS, "repetitions": REPETITIONS,
                  "seeds": f"10000 to {10_000 + REPETITIONS - 1}"} for name, count in hits.items()]
        print(rows[-2:], flush=True)
    return rows


def radii() -> list[dict[str, object]]:
    rows = []
    for seed in LAYERS:
        m, d = 1 + seed % 4, (6, 8, 12, 16)[seed // 5]
        layer = hw.AttentionLayer.random(heads=m, width=d, seed=300 + seed)
        data = hw.draw(layer, count=1500, length=6, law=("boolean", "gaussian")[seed % 2], seed=400 + seed)
        fit = hw.learn(data)
        match = hw.match(fit.layer, layer)
        learned = replace(fit.layer, Theta=fit.layer.Theta[list(match.order)], W=fit.layer.W[list(match.order)])
        fresh = hw.draw(layer, count=600, length=6, law=("boolean", "gaussian")[seed % 2], seed=500 + seed)
        claim = radius(sample(learned, fresh, None, torch.float64), 1e-6)
        away = float(((learned.Theta - layer.Theta).square().sum() + (learned.W - layer.W).square().sum()).sqrt())
        Theta = learned.Theta.clone()
        Theta[0, 0, 1] += 1e-3
        wrong = radius(sample(replace(learned, Theta=Theta), fresh, None, torch.float64), 1e-6)
        rows.append({"seed": seed, "heads": m, "width": d, "status": fit.status.kind, "decided": claim.holds,
                     "radius": claim.numbers.get("radius"), "true distance": away,
                     "inside": away <= claim.numbers.get("radius", 0.0), "planted error": wrong.holds})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    covered, found = coverage(), radii()
    record("coverage", "python bench/coverage.py", {
        "claims below nominal coverage": sum(r["covered"] < r["nominal"] for r in covered),  # type: ignore[operator]
        "radius decided": f"{sum(r['decided'] == 'yes' for r in found)} of {len(found)}",
        "truth inside": f"{sum(bool(r['inside']) for r in found)} of {len(found)}",
        "planted error passed": f"{sum(r['planted error'] == 'yes' for r in found)} of {len(found)}"},
        [*covered])
    record("radius", "python bench/coverage.py", {"instances": len(found)}, found)


if __name__ == "__main__":
    main()
