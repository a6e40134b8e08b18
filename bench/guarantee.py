"""How tight are the bounds? The a posteriori training bound on mixture data, and the generalization bound beside
log 2.

With H = 10¹⁴ equal heads from zero, ‖U_h‖ ≤ 4g₀/√H throughout, so β₁ = √T·R and β₃ = √T·R³ to many digits, and the
conditions on heads and step can be met. They are met with numbers of this sample: g₀ is the distance to a point of
loss at most 1/K that a longer run found on it, R its longest token, where noise is Gaussian and has no longest.
The bound is on the average gap over samples; "loss + gap" adds it to the loss of one run, which is no bound on the
risk of that run.
"""

from __future__ import annotations

import math

import headway.training as ht
from common import record
from headway.training.bounds import LOG2, bounds
from headway.training.descent import descend

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
        step = 0.99 / (4 * data.radius**2)
        path = descend(net, data, steps=K, step=step, test=test, every=K)
        far = descend(path.end, data, steps=FAR // n, step=20 * step)
        # The first point of the longer run with loss at most 1/K.
        target = next(k for k, loss in enumerate(far.columns["loss"]) if loss <= 1 / K)
        star = descend(path.end, data, steps=target, step=20 * step).end
        said = bounds(net, data, step, K, star=star)
        total = path.columns["loss"][-1] + said.generalization
        rows.append({"n": n, "steps": K, "step": step, "g0": said.g0, "training loss": path.columns["loss"][-1],
                     "bound on the average gap": said.generalization, "loss + gap": total, "log 2": LOG2,
                     "below log 2": total < LOG2, "holds on this sample": said.holds_generalization,
                     "test loss": path.test["test_loss"][-1]})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    first, second = training(), generalization()
    best = min(r["ratio"] for r in first if r["descent held"])
    record("guarantee_training", "python bench/guarantee.py", {"least ratio of bound to loss": best}, first)
    good = [r["n"] for r in second if r["below log 2"] and r["holds on this sample"]]
    record("guarantee", "python bench/guarantee.py", {
        "loss + gap below log 2 from n =": min(good) if good else None, "log 2": math.log(2)}, second)


if __name__ == "__main__":
    main()
