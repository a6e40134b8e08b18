"""How tight are the bounds? The a posteriori training bound on mixture data, and a generalization certificate below
log 2.

With H = 10¹⁴ equal heads from zero, ‖U_h‖ ≤ 4g₀/√H throughout, so β₁ = √T·R and β₃ = √T·R³ to many digits, and the
theorem's hypotheses can be met a priori; g₀ is the distance to a point of loss at most 1/K that a longer run found.
"""

from __future__ import annotations

import math

import headway.training as ht
from common import record
from headway.training.bounds import LOG2, bounds
from headway.training.descent import descend
from headway.training.margin import Margin, Start

H = 10**14
SHORT = {"tokens": 4, "width": 6, "zeta": 0.5, "strength": 1.0, "noise": 0.1}
RUNS = (  # data, heads, step, steps
    ("default mixture", {}, 16, 1.0, 400), ("ζ = 0.3, noise 0.2", {"zeta": 0.3, "noise": 0.2}, 16, 0.1, 400),
    ("ζ = 0.3, noise 0.2", {"zeta": 0.3, "noise": 0.2}, H, 0.01, 400),
    ("T = 4, S = 1, ζ = 0.5", SHORT, H, 0.1, 1000))
FAR = 40_000 * 400  # steps times sequences of the longer run
SIZES = ((2000, 400), (8000, 400), (16000, 400))  # training sequences, steps


def training() -> list[dict[str, object]]:
    rows = []
    for label, law, heads, step, steps in RUNS:
        done = ht.train(ht.mixture(100, **law), heads, step=step, steps=steps)
        found = done.certificate
        rows.append({"data": label, "heads": float(heads), "step": step, "steps": steps,
                     "measured loss": found.measured, "a posteriori bound": found.bound, "ratio": found.ratio,
                     "vacuous": found.vacuous, "descent held": found.descent_held})
        print(rows[-1], flush=True)
    return rows


def generalization() -> list[dict[str, object]]:
    rows = []
    for n, K in SIZES:
        data, test = ht.mixture(n, **SHORT), ht.mixture(20_000, seed=1, **SHORT)
        net = ht.start("zero", H, data)
        begun = Start(0.0, 0.0, Margin(1.0, 1.0, data.y, None))  # γ is not needed: g₀ is measured
        step = 0.99 / (4 * data.radius**2)
        path = descend(net, data, steps=K, step=step, test=test, every=K)
        far = descend(path.end, data, steps=FAR // n, step=20 * step)
        # The first point of the longer run with loss at most 1/K.
        target = next(k for k, loss in enumerate(far.columns["loss"]) if loss <= 1 / K)
        star = descend(path.end, data, steps=target, step=20 * step).end
        g0 = star.minus(net).norm()
        said = bounds(begun, data, H, step, K, path.columns["loss"][0], g0=g0, equal=float(H))
        enough = H >= said.heads_for_generalization
        total = path.columns["loss"][-1] + said.generalization
        rows.append({"n": n, "steps": K, "step": step, "g0": g0, "training loss": path.columns["loss"][-1],
                     "gap bound": said.generalization, "risk bound": total, "log 2": LOG2,
                     "below log 2": total < LOG2, "hypotheses hold": said.holds and enough,
                     "test loss": path.test["test_loss"][-1]})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    first, second = training(), generalization()
    best = min(r["ratio"] for r in first if r["descent held"])
    record("guarantee_training", "python bench/guarantee.py", {"least ratio of bound to loss": best}, first)
    good = [r["n"] for r in second if r["below log 2"] and r["hypotheses hold"]]
    record("guarantee", "python bench/guarantee.py", {
        "certified below log 2 from n =": min(good) if good else None, "log 2": math.log(2)}, second)


if __name__ == "__main__":
    main()
