"""Do certificates keep their promises? Coverage of the statistical claims, and the radius against the truth.

2,000 repetitions of the quantile and the mean claim, at three levels, for three laws of errors: a layer with a
known error on fresh draws (its true quantile and mean from 1,000,000 of them), errors of which one in thirty is of
the size of the labels, and errors with a tail so heavy that their mean square is infinite (truth by formula). Each
claim is asked once, at the end, and at the worst moment: whether its bound was wrong at any number of examples up
to then, which is what somebody who looks at every one may stop at. How many examples that costs beside a count that
is looked at once. 20 recovered instances for the radius, each also with one entry of one head changed by 1e-3. The
certificate of the layer that headway demo learns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.special import bdtr

import headway as hw
from common import record
from headway.certificates import betting
from headway.certificates.held_out import CLIP, FIRST, errors, mean_claim, quantile_claim
from headway.certificates.jacobian import sample
from headway.certificates.radius import radius
from headway.core.measured import Errors

REPETITIONS, SIZE, FRACTION = 2000, 600, 0.02
LEVELS = (0.8, 0.9, 0.99)
WHOLE = 1_000_000  # sequences that stand for the law itself
LAYERS = range(20)
MEAN = 0.1  # of the labels' deviation: the mean allowed, as certify has it
RARE = 1 / 30
HEAVY = 0.75  # P(e > t) = (SMALL/t)^(1/HEAVY): of infinite mean square
SMALL = 0.01
DEMO = {"heads": 4, "width": 32}


@dataclass(frozen=True)
class Sampled:
    """Errors of one repetition, and what is true of their law: q with P(e > q) ≤ FRACTION ≤ P(e ≥ q), and the mean
    of min(e, b)² and P(e > b) for the b that the claim takes."""

    found: Errors
    quantile: float
    clipped: float
    beyond: float
    bound: float | None = None  # on the rows of the teacher
    mean: float = math.inf  # of e²


def layers() -> Iterator[Sampled]:
    """A layer whose attention is off by 5 %, on fresh draws."""
    teacher = hw.AttentionLayer.random(heads=2, width=6, seed=0)
    other = hw.AttentionLayer.random(heads=2, width=6, seed=1)
    student = replace(teacher, Theta=teacher.Theta + 0.05 * other.Theta)
    whole = errors(student, hw.draw(teacher, count=WHOLE, length=5, seed=2)).each
    quantile = float(torch.quantile(whole, 1 - FRACTION))
    bound = 6**0.5 * float(torch.linalg.matrix_norm(teacher.W, 2).sum())
    for j in range(REPETITIONS):
        found = errors(student, hw.draw(teacher, count=SIZE, length=5, seed=10_000 + j))
        b = CLIP * MEAN * found.deviation
        clipped, beyond = float(whole.clamp_max(b).square().mean()), float((whole > b).double().mean())
        yield Sampled(found, quantile, clipped, beyond, bound, float(whole.square().mean()))


def _given(e: np.ndarray, *truth: float) -> Sampled:
    return Sampled(Errors(torch.from_numpy(e), 1.0, 1.0, True, 1.0, 1, first=FIRST), *truth)


def rare() -> Iterator[Sampled]:
    """1e-8, and one in thirty between 0 and 1."""
    b = CLIP * MEAN
    clipped = RARE * (b**3 / 3 + (1 - b) * b**2) + (1 - RARE) * 1e-16
    for j in range(REPETITIONS):
        draw = np.random.default_rng(20_000 + j)
        e = np.where(draw.random(SIZE) < RARE, draw.random(SIZE), 1e-8)
        yield _given(e, 1 - FRACTION / RARE, clipped, RARE * (1 - b))


def heavy() -> Iterator[Sampled]:
    """Pareto's law."""
    b, a = CLIP * MEAN, 1 / HEAVY
    # ∫ 2t P(e > t) dt up to b: t² up to SMALL, where P is 1, and a power beyond.
    clipped = SMALL**2 + 2 * SMALL**a * (b ** (2 - a) - SMALL ** (2 - a)) / (2 - a)
    for j in range(REPETITIONS):
        e = SMALL * np.random.default_rng(30_000 + j).random(SIZE) ** -HEAVY
        yield _given(e, SMALL * FRACTION**-HEAVY, clipped, (SMALL / b) ** a)


LAWS = {"a layer 5 % off": (layers, 10_000), "one in thirty large": (rare, 20_000), "heavy tail": (heavy, 30_000)}


def worst(z: np.ndarray, mean: float, confidence: float) -> bool:
    """Whether the bound on the mean was below it after any number of the z: K at the mean, step by step."""
    gain = (mean - z) / (1 - mean)
    with np.errstate(divide="ignore"):
        logs = [math.log(w) + np.cumsum(np.log1p(np.maximum(c * gain, -1.0)))
                for c, w in zip(betting.SHARES, betting.MONEY, strict=True)]
    return bool(np.logaddexp.reduce(logs).max() >= -math.log1p(-confidence))


def hits(one: Sampled, confidence: float) -> dict[str, bool]:
    """Whether each claim's bound is right."""
    found, e = one.found, one.found.each.numpy()
    b = CLIP * MEAN * found.deviation
    z = np.minimum(found.later / b, 1.0) ** 2
    clip = mean_claim(found, confidence, MEAN, None, None).numbers
    known = {"quantile": quantile_claim(found, confidence, FRACTION, 1.0).numbers["bound"] >= one.quantile,
             "quantile, worst moment": not worst((e >= one.quantile).astype(float), FRACTION, confidence),
             "clipped mean": clip["bound"] ** 2 >= one.clipped,
             "clipped mean, worst moment": not worst(z, one.clipped / b**2, confidence),
             "share beyond the clip": clip["at_most_above"] >= one.beyond}
    if one.bound is not None:
        known["mean"] = mean_claim(found, confidence, 1.0, one.bound, None).numbers["bound"] ** 2 >= one.mean
    return known


def coverage() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for law, (draws, seed) in LAWS.items():
        right: dict[tuple[str, float], int] = {}
        for one in draws():
            for confidence in LEVELS:
                for name, hit in hits(one, confidence).items():
                    right[name, confidence] = right.get((name, confidence), 0) + hit
        rows += [{"claim": name, "law": law, "nominal": confidence, "covered": count / REPETITIONS,
                  "repetitions": REPETITIONS, "seeds": f"{seed} to {seed + REPETITIONS - 1}"}
                 for (name, confidence), count in sorted(right.items())]
        print(*rows[-len(right) :], sep="\n", flush=True)
    return rows


def looks() -> list[dict[str, object]]:
    """Examples that "at most this share are above" takes, with so many that are: if one looks at every number of
    them, and if one looks once (the binomial)."""
    rows: list[dict[str, object]] = []
    for share, confidence in ((0.01, 0.99), (0.05, 0.95)):
        for above in (0, 1, 2, 5, 10):
            often = next(n for n in range(above + 1, 10**6) if betting.most_above(n, share, confidence) >= above)
            once = next(n for n in range(above + 1, 10**6) if bdtr(above, n, share) <= 1 - confidence)
            rows.append({"share": share, "confidence": confidence, "above": above, "at any time": often,
                         "looked at once": once})
    return rows


def stopped() -> list[dict[str, object]]:
    """How often the quantile's bound is right at every one of so many examples, computed: the count of errors at or
    above the quantile is the same random walk for every continuous law."""
    rows: list[dict[str, object]] = []
    for share, confidence in ((0.02, 0.8), (0.02, 0.9), (0.02, 0.99), (0.01, 0.99)):
        for count in (SIZE, 20 * SIZE):
            alive = np.zeros(count + 1)  # P(count so far is S, and the bound was never wrong)
            alive[0] = 1.0
            for n in range(1, count + 1):
                alive[1 : n + 1] = alive[1 : n + 1] * (1 - share) + alive[:n] * share
                alive[0] *= 1 - share
                alive[: betting.most_above(n, share, confidence) + 1] = 0.0
            rows.append({"share": share, "nominal": confidence, "examples": count, "covered": float(alive.sum())})
    return rows


def demonstrated() -> list[dict[str, object]]:
    """The certificate of the layer that headway demo learns, from its 500 fresh sequences."""
    truth = hw.AttentionLayer.random(**DEMO, seed=0)
    data = hw.draw(truth, count=4000, length=16, seed=1)
    found = hw.certify(hw.learn(data), hw.draw(truth, count=500, length=16, seed=2), seen=data)
    return [{"claim": claim.name, "holds": str(claim.holds), "reason": claim.reason} for claim in found.claims]


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
    covered, shown = coverage(), demonstrated()
    record("coverage", "python bench/coverage.py", {
        "claims below nominal coverage": sum(r["covered"] < r["nominal"] for r in covered)},  # type: ignore[operator]
        covered)
    exact = stopped()
    record("stopped", "python bench/coverage.py", {
        "below nominal": sum(r["covered"] < r["nominal"] for r in exact)}, exact)  # type: ignore[operator]
    record("looks", "python bench/coverage.py", {"settings": "share and confidence as in the rows"}, looks())
    record("demonstrated", "python bench/coverage.py", {
        "held-out claims decided": f"{sum(r['holds'] != 'undecided' for r in shown[:2])} of 2"}, shown)
    found = radii()
    record("radius", "python bench/coverage.py", {
        "instances": len(found), "radius decided": f"{sum(r['decided'] == 'yes' for r in found)} of {len(found)}",
        "truth inside": f"{sum(bool(r['inside']) for r in found)} of {len(found)}",
        "planted error passed": f"{sum(r['planted error'] == 'yes' for r in found)} of {len(found)}"}, found)


if __name__ == "__main__":
    main()
