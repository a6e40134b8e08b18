"""The README's figure: a head learned and true, and the way there beside Adam's.

    python docs/figure.py [FILE]

Adam is told the number of heads and has the best of several budgets; the learner is told nothing. One thread each,
in processor time: what else the machine does is not drawn.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import headway as hw
from headway.report.figures import plot_heads, save
from headway.runs.traces import COLOURS, residuals

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from stopwatch import fair

HEADS, WIDTH, COUNT = 4, 32, 4000
BUDGETS = (0.5, 0.7, 1.0, 1.4, 2.0, 4.0, 8.0)  # seconds; the first with which Adam comes below 1e-6 is shown


def raced(data: hw.Examples) -> hw.Fit:
    """Adam with the least budget that is enough."""
    for seconds in BUDGETS:
        fit = hw.learn(data, heads=HEADS, method="adam", seconds=seconds)
        if fit.stats["held_out_error"] < 1e-6:
            return fit
    raise SystemExit("No budget brought Adam below 1e-6: a figure would be unfair to it.")


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("figure.png")
    truth = hw.AttentionLayer.random(heads=HEADS, width=WIDTH, seed=0)
    data = hw.draw(truth, count=COUNT, length=16, seed=1)
    with fair():
        hw.learn(data)  # what is set up once
        fit = hw.learn(data)
        adam = raced(data)
    match = hw.match(fit.layer, truth)
    assert match.worst < 1e-12
    axes = plt.subplots(1, 3, figsize=(11.5, 3.3), layout="constrained", width_ratios=(1, 1, 1.35))[1]
    plot_heads(fit, match.order[0], ax=axes[0]).set_title("Θ of a head, learned", fontsize=10)
    known = hw.Fit(truth, fit.status, fit.stats, fit.trace)
    plot_heads(known, 0, ax=axes[1]).set_title("the true one", fontsize=10)
    axis = axes[2]
    for name, found, colour, mark in (("Headway, count unknown", fit, COLOURS[0], "o"),
                                      ("Adam, told the count", adam, COLOURS[1], "")):
        curves = residuals(found.trace)
        axis.plot([s for curve in curves for s in curve.seconds], [r for curve in curves for r in curve.residual],
                  marker=mark, markersize=3, linewidth=1.3, color=colour, label=name)
    axis.set_yscale("log")
    axis.set_xlabel("seconds of one processor")
    axis.set_title("relative residual", fontsize=10)
    axis.grid(alpha=0.3, linewidth=0.4)
    axis.legend(frameon=False, fontsize=9)
    save(axis, path)


if __name__ == "__main__":
    main()
