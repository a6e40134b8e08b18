"""Figures for papers, in matplotlib: each takes a result and an optional axis, and returns the axis."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core import checks
from headway.core.factored import FactoredLayer
from headway.report.heads import portraits
from headway.runs import traces
from headway.runs.traces import COLOURS, LOG2, PANELS, SAMPLED

LEGIBLE = 12  # heads of which numbers fit into cells of a figure of usual size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from headway.core.examples import Examples
    from headway.core.layer import AttentionLayer
    from headway.core.results import Fit


def _axis(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        checks.refuse("plot", "matplotlib", "none installed", "pip install 'headway[plot]'")
    axis: Axes = plt.subplots(figsize=(4.2, 3.0), layout="constrained")[1]
    return axis


def _named(axis: Axes, across: str, up: str, size: int) -> Axes:
    """With names of both directions, a faint grid and a key of that font size."""
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    axis.grid(alpha=0.3, linewidth=0.4)
    axis.legend(frameon=False, fontsize=size)
    return axis


def save(axis: Axes, path: Path) -> None:
    """Write an axis' figure, by its name's ending, to a temporary name first; and let go of it."""
    import matplotlib.pyplot as plt

    figure = axis.get_figure(root=True)
    assert figure is not None
    hidden = path.with_name(f".{path.name}")
    figure.savefig(hidden, dpi=200, format=path.suffix[1:])
    os.replace(hidden, path)
    plt.close(figure)


def matrices(fit: Fit) -> tuple[str, str]:
    """What ``plot_heads`` draws of this fit."""
    return ("QK", "OV") if isinstance(fit.layer, FactoredLayer) else ("Theta", "W")


def plot_heads(fit: Fit, head: int = 0, what: str | None = None, ax: Axes | None = None) -> Axes:
    """A head's Θ_i (``what="Theta"``, the default, the key bias as its last row where there is one) or W_i ("W") as
    a heat map, zero in white. Of linear scores: of the canonical heads, which are a choice. Of a layer in factors
    "QK", its scores of a query and a key at one place, or "OV"."""
    kinds = matrices(fit)
    what = checks.choice("what", kinds[0] if what is None else what, kinds)
    checks.whole("head", head, 0, fit.layer.heads - 1)
    axis = _axis(ax)
    layer = fit.layer
    M = (layer.W if what == "W" else portraits(layer).matrices[what] if what != "Theta" else
         layer.Theta if layer.linear else layer.augmented)[head].detach().double().cpu().numpy()
    top = max(float(abs(M).max()), 1e-300)
    image = axis.imshow(M, cmap="RdBu_r", vmin=-top, vmax=top, interpolation="nearest")
    axis.figure.colorbar(image, ax=axis, shrink=0.8)
    axis.set_title(f"{'Θ' if what == 'Theta' else what} of head {head + 1}", fontsize=10)
    return axis


def plot_match(
    one: AttentionLayer | FactoredLayer, other: AttentionLayer | FactoredLayer, on: Examples | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Who matches whom: how far every head of one layer is from every head of another, free of gauge (the root mean
    square of the relative distances of QK and OV, 1.41 for heads that have nothing in common); partners in frames,
    with what they moved by."""
    from headway.core import gauge
    from headway.core.match import match_heads

    strange = gauge.unlike(gauge.as_factored(one), gauge.as_factored(other))
    if strange is not None:
        checks.refuse("one", "two layers of one form", strange, "headway.compare, which says what differs")
    heads = gauge.heads_of(one, on), gauge.heads_of(other, on)
    found, pairs = gauge.distances(*heads), match_heads(*heads)
    far = ((found.scores**2 + found.values**2) / 2) ** 0.5
    axis, most = _axis(ax), max(far.shape)
    if ax is None and most > LEGIBLE:
        figure = axis.get_figure(root=True)
        assert figure is not None
        figure.set_size_inches(figure.get_size_inches() * most / LEGIBLE)
    image = axis.imshow(far, cmap="Blues_r", vmin=0.0, vmax=2**0.5, interpolation="nearest")
    axis.figure.colorbar(image, ax=axis, shrink=0.8, label="distance of heads")
    size = 6.5 - 0.2 * min(most, LEGIBLE)
    for i, j in enumerate(pairs.order):
        if j < 0:
            continue
        moved = ((pairs.theta_error[i] ** 2 + pairs.w_error[i] ** 2) / 2) ** 0.5  # exact, where far is to 1e-8
        colour = "white" if moved < 0.8 else "black"
        axis.plot([j - 0.5, j + 0.5, j + 0.5, j - 0.5, j - 0.5], [i - 0.5, i - 0.5, i + 0.5, i + 0.5, i - 0.5],
                  color="black", linewidth=0.6)
        axis.text(j, i, f"{moved:.2g}" if moved >= 1e-3 else "0" if not moved else f"{moved:.0e}", ha="center",
                  va="center", fontsize=size, color=colour)
    for put, label, count, text in ((axis.set_xticks, axis.set_xlabel, far.shape[1], "head of the first"),
                                    (axis.set_yticks, axis.set_ylabel, far.shape[0], "head of the second")):
        put(range(count), [str(i + 1) for i in range(count)], fontsize=7)
        label(text)
    return axis


def plot_spectrum(fit: Fit, ax: Axes | None = None) -> Axes:
    """Singular values of the moments with the gap after which no head is expected."""
    axis = _axis(ax)
    found = traces.spectrum(fit.trace)
    if found is None:
        checks.refuse("fit", "a trace with singular_values", "one without",
                      "a run with moments: more examples, or method='moments'")
    axis.plot(range(1, len(found.values) + 1), found.values, "o", color=COLOURS[0], markersize=4)
    axis.axvline(found.heads + 0.5, color=COLOURS[1], linestyle="--", linewidth=1, label=f"gap after {found.heads}")
    axis.set_ylim(bottom=0)
    return _named(axis, "direction", "singular value", 8)


def plot_residual(fit: Fit, ax: Axes | None = None) -> Axes:
    """Relative residual against seconds, stage after stage."""
    axis = _axis(ax)
    curves = traces.residuals(fit.trace)
    for j, curve in enumerate(curves):
        axis.plot(curve.seconds, curve.residual, marker=".", linewidth=1, color=COLOURS[j % len(COLOURS)],
                  label=curve.stage)
    if not curves:
        checks.refuse("fit", "a trace with residuals", "one without", "a run made by this version")
    axis.set_yscale("log")
    return _named(axis, "seconds", "relative residual", 7)


def plot_starts(fit: Fit, ax: Axes | None = None) -> Axes:
    """Where the first several starts ended: agreement at the least residual is evidence."""
    axis = _axis(ax)
    several = traces.starts(fit.trace)
    if not several:
        checks.refuse("fit", "a trace with starts", "one without", "method='moments' or 'starts'")
    first = several[0]
    count = len(first.residuals)
    axis.plot(range(1, count + 1), first.residuals, "o", color=COLOURS[0], markersize=5)
    axis.axhline(min(first.residuals), color=COLOURS[1], linestyle="--", linewidth=1,
                 label=f"{first.agreeing} of {count} at the least")
    axis.set_xticks(range(1, count + 1))
    axis.set_ylim(bottom=0)
    return _named(axis, "start", "residual on other rows", 8)


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
        limit = traces.bound(run) if what == "loss" else None
        if limit is not None:
            axis.plot(*limit, color=colour, linestyle="--", label=f"{label}, bound")
            axis.axhspan(LOG2, max(LOG2, *limit[1]), color="0.9", zorder=0)
            axis.annotate("vacuous", (0.98, LOG2), xycoords=("axes fraction", "data"), ha="right",
                          va="bottom", fontsize=8, color="0.4")
    axis.set_xlabel("iteration")
    axis.set_ylabel(SAMPLED[what] if what in SAMPLED else PANELS[what][0])
    if what in PANELS and PANELS[what][1]:
        axis.set_yscale("log")
    axis.grid(alpha=0.3, linewidth=0.4)
    axis.legend(frameon=False, fontsize=8)
    return axis


def plot_phase(rows: Sequence[Mapping[str, Any]], learner: str, ax: Axes | None = None) -> Axes:
    """Success of a learner over a plane: examples over the counting floor across, scale of the scores up.

    ``rows`` as in results.json of ``headway bench``; every cell says successes of runs.
    """
    mine = [row for row in rows if row["learner"] == learner]
    if not mine:
        checks.refuse("learner", "one with results", repr(learner), "headway bench FOLDER --suite floor")
    across, up = "examples over the floor", "scale"
    xs, ys = (sorted({row["where"][name] for row in mine}) for name in (across, up))
    axis = _axis(ax)
    for i, y in enumerate(ys):
        for j, x in enumerate(xs):
            cell = [row["success"] for row in mine if row["where"][across] == x and row["where"][up] == y]
            if not cell:
                continue
            part = sum(cell) / len(cell)
            axis.add_patch(_square(j, i, part))
            axis.text(j, i, f"{sum(cell)}/{len(cell)}", ha="center", va="center", fontsize=8,
                      color="white" if part > 0.5 else "black")
    axis.set_xlim(-0.5, len(xs) - 0.5)
    axis.set_ylim(-0.5, len(ys) - 0.5)
    axis.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
    axis.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
    axis.set_xlabel(across)
    axis.set_ylabel("deviation of the scores")
    axis.set_title(learner, fontsize=10)
    return axis


def _square(j: int, i: int, part: float) -> Any:
    from matplotlib.patches import Rectangle

    light, dark = (0.93, 0.93, 0.93), (0.0, 0.27, 0.55)
    colour = tuple(a + part * (b - a) for a, b in zip(light, dark, strict=True))
    return Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=colour, edgecolor="white")


def plot_dial(rows: Sequence[Mapping[str, Any]], dial: str, ax: Axes | None = None) -> Axes:
    """Part of the runs that succeed against a dial, a line for each learner."""
    axis = _axis(ax)
    for j, (learner, xs, groups) in enumerate(_along(rows, dial)):
        part = [sum(row["success"] for row in group) / len(group) for group in groups]
        # Lines that coincide stay visible: the later ones are thinner, their markers smaller, over the earlier.
        axis.plot(xs, part, marker="os^Dv"[j % 5], color=COLOURS[j % len(COLOURS)], label=learner,
                  markersize=max(3.0, 10.0 - 2.0 * j), linewidth=max(1.0, 5.4 - 1.3 * j))
    axis.set_ylim(-0.12, 1.08)
    return _named(axis, dial, "success", 7)


def plot_cost(rows: Sequence[Mapping[str, Any]], dial: str, ax: Axes | None = None) -> Axes:
    """Median seconds of a run against a dial, a line for each learner; hollow where fewer than half succeed."""
    axis = _axis(ax)
    for j, (learner, xs, groups) in enumerate(_along(rows, dial)):
        colour = COLOURS[j % len(COLOURS)]
        seconds = [sorted(row["seconds"] for row in group)[len(group) // 2] for group in groups]
        axis.plot(xs, seconds, color=colour, label=learner, linewidth=1.2)
        for x, y, group in zip(xs, seconds, groups, strict=True):
            won = 2 * sum(row["success"] for row in group) >= len(group)
            axis.plot([x], [y], marker="os^Dv"[j % 5], markersize=5, color=colour,
                      markerfacecolor=colour if won else "white")
    axis.set_yscale("log")
    return _named(axis, dial, "seconds", 7)


def plot_samples(rows: Sequence[Mapping[str, Any]], ax: Axes | None = None) -> Axes:
    """Part of layers of linear scores whose operator is learned, against sequences over the counting floor: by the
    fewest heads (lines) and by least squares over all operators at once (dashed), a colour for each rank.

    ``rows`` as in the record of bench/linear.py: "part" is "told" or "whole", "d", "rank", "times", "success".
    """
    kinds = (("told", "-", "o"), ("whole", "--", "s"))
    mine = [row for row in rows if row.get("part") in [part for part, _, _ in kinds]]
    if not mine:
        checks.refuse("rows", "rows whose part is told or whole", "none", "the rows of bench/results/linear.json")
    axis = _axis(ax)
    ranks, widths = (sorted({row[name] for row in mine}) for name in ("rank", "d"))
    for part, style, marker in kinds:
        for d, m in itertools.product(widths, ranks):
            here = [row for row in mine if (row["part"], row["d"], row["rank"]) == (part, d, m)]
            if not here:
                continue
            xs = sorted({row["times"] for row in here})
            groups = [[row["success"] for row in here if row["times"] == x] for x in xs]
            words = f"d = {d}, rank {m}" + (", all operators" if part == "whole" else "")
            axis.plot(xs, [sum(group) / len(group) for group in groups], linestyle=style, marker=marker,
                      color=COLOURS[ranks.index(m) % len(COLOURS)], markersize=3 + widths.index(d), linewidth=1.2,
                      alpha=1.0 if d == widths[0] else 0.5, label=words)
    axis.set_xscale("log")
    ticks = sorted({row["times"] for row in mine})
    axis.set_xticks(ticks, [f"{x:g}" for x in ticks], fontsize=7)
    axis.minorticks_off()
    axis.set_ylim(-0.05, 1.05)
    return _named(axis, "sequences over the counting floor", "operators within 1e-9", 6)


def _along(
    rows: Sequence[Mapping[str, Any]], dial: str
) -> list[tuple[str, list[float], list[list[Mapping[str, Any]]]]]:
    """(learner, settings of the dial, rows at each)."""
    mine = [row for row in rows if dial in row.get("where", {})]
    if not mine:
        checks.refuse("dial", "one that the rows have", repr(dial), "headway bench FOLDER --suite dials")
    found = []
    for learner in dict.fromkeys(row["learner"] for row in mine):
        here = [row for row in mine if row["learner"] == learner]
        xs = sorted({row["where"][dial] for row in here})
        found.append((learner, xs, [[row for row in here if row["where"][dial] == x] for x in xs]))
    return found
