"""Figures for papers, in matplotlib: each takes a result and an optional axis, and returns the axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headway import checks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: told apart by colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PANELS = {
    "loss": ("training loss", True), "train_error": ("training error", False),
    "margin": ("normalised margin", False), "norm": ("‖θ‖", False), "norm_W": ("‖W‖", False),
    "travel": ("‖θ − θ⁰‖", False)}
SAMPLED = {"test_error": "test error", "test_loss": "test loss", "mass": "attention on relevant tokens"}
LOG2 = 0.6931471805599453


def _axis(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        checks.refuse("plot", "matplotlib", "none installed", "pip install 'headway[plot]'")
    axis: Axes = plt.subplots(figsize=(4.2, 3.0), layout="constrained")[1]
    return axis


def plot_training(
    runs: Sequence[tuple[str, Mapping[str, Any]]], what: str = "loss", ax: Axes | None = None
) -> Axes:
    """One quantity of training runs against the iteration, a line for each (label, Trained.asdict()).

    For the loss, a run whose a priori hypotheses hold also gets its bound, dashed, with the vacuous region shaded.
    """
    checks.choice("what", what, (*PANELS, *SAMPLED))
    axis = _axis(ax)
    for j, (label, run) in enumerate(runs):
        colour = COLOURS[j % len(COLOURS)]
        if what in SAMPLED:
            axis.plot(run["test"]["iteration"], run["test"][what], color=colour, label=label)
            continue
        values = run["columns"][what]
        axis.plot(range(len(values)), values, color=colour, label=label)
        if what == "loss":
            for one in run["bounds"]:
                if one["form"] == "safe" and one["ground"] == "a priori" and not one["failing"]:
                    steps = [k for k in range(1, len(values)) if k % max(1, len(values) // 100) == 0]
                    bound = [one["training"] * run["steps"] / k for k in steps]
                    axis.plot(steps, bound, color=colour, linestyle="--", label=f"{label}, bound")
                    axis.axhspan(LOG2, max(LOG2, max(bound)), color="0.9", zorder=0)
                    axis.annotate("vacuous", (0.98, LOG2), xycoords=("axes fraction", "data"), ha="right",
                                  va="bottom", fontsize=8, color="0.4")
    axis.set_xlabel("iteration")
    axis.set_ylabel(SAMPLED[what] if what in SAMPLED else PANELS[what][0])
    if what in PANELS and PANELS[what][1]:
        axis.set_yscale("log")
    axis.grid(alpha=0.3, linewidth=0.4)
    axis.legend(frameon=False, fontsize=8)
    return axis
