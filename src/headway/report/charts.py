"""A run's figures as plotly specifications: plain dictionaries, each with a caption and a text for those who cannot
see it. Colours of axes and text are the page's to choose, so that they suit light and dark.

Matrices travel as small integers times a step, deflated: a twelfth of what their numbers would take as text.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.core.layer import AttentionLayer
from headway.report.samples import Written, true_patterns
from headway.report.story import Story
from headway.runs import traces
from headway.runs.traces import COLOURS, LOG2, PANELS, SAMPLED

SMALL = 64 * 64  # entries of a matrix that are all told apart by eye
MOST_NAMED = 8  # curves with names above the figure; hovering names all
FINE = 1 << 20  # cells up to which a matrix entry has 16 bits, above it 8
SHAPES = ("circle", "square", "diamond", "triangle-up", "cross", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
KEY = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}  # above the figure, whatever its height
NAMES = {
    "accepted": "rows accepted", "gap": "gap across the hull", "sum_error": "error of ΣW",
    "center_error": "error of Θ̄", "hull_angle": "angle to the true hull", "residual": "median residual"}


@dataclass(frozen=True)
class Chart:
    """A figure of the page: ``frames``, where there are several, are chosen with a slider. Without ``data`` the
    caption says it all."""

    name: str
    title: str
    caption: str
    alt: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 300
    small: bool = False  # two of them fit side by side
    section: str = "run"
    frames: tuple[Mapping[str, Any], ...] = ()

    def spec(self) -> dict[str, Any]:
        return {"data": self.data, "layout": {**self.layout, "height": self.height}, "frames": list(self.frames)}


def charts(story: Story) -> list[Chart]:
    """Every figure that the run has the numbers for, in the order of the page; none of a comparison."""
    if story.kind != "report":
        return []
    made = [chart(story) for chart in (
        _turning, _offsets, _biases, _stages, _residual, _spectrum, _starts, _rounds, _loss, _panels)]
    return [one for part in made for one in part]


def _turning(story: Story) -> list[Chart]:
    """How strongly each head turns with the offset, by the tokens that one turn takes."""
    if story.shown is None or not story.shown.turning:
        return []
    tokens = [f"{_turn(one)} " for one in story.shown.turning]
    sizes = torch.stack(list(story.shown.turning.values()), dim=1)
    z = [[_short(float(v)) for v in row] for row in sizes / sizes.norm(dim=1, keepdim=True).clamp_min(1e-300)]
    strongest = "; ".join(f"{tokens[row.index(max(row))].strip()} for head {j + 1}" for j, row in enumerate(z[:8]))
    return [Chart(
        "turning", "How scores turn with the offset", "A plane of queries and keys turns once in so many tokens. "
        "Where it takes few, scores tell neighbours apart; where many, it matters little how far away a key is. "
        "Shown is the part of each head's scores that turns so (the squares of a row add up to 1). It is largest "
        f"at {strongest}.", f"Heat map, heads by tokens of one turn. Parts are largest at {strongest}.",
        [_heat(z, tokens, "head %{y}, one turn in %{x}: %{z:.3g}") | {"zmin": 0.0}], _rows("tokens of one turn"),
        130 + 24 * len(z), section="heads")]


def _turn(tokens: float) -> str:
    return "never" if math.isinf(tokens) else f"{tokens:.3g}" if tokens < 1000 else f"{tokens:,.0f}"


def _offsets(story: Story) -> list[Chart]:
    """What is added to the scores of each head for an offset."""
    if story.shown is None or story.shown.offsets is None:
        return []
    names, values = story.shown.offsets
    z = [[_short(float(v)) for v in row] for row in values]
    top = max(max(abs(v) for v in row) for row in z)
    return [Chart(
        "offsets", "Added for the offset", "What is added to a score for the place of the key less that of the "
        "query: negative is behind, 0 the token itself.",
        f"Heat map, heads by {len(names)} offsets, from {float(values.min()):.3g} to {float(values.max()):.3g}.",
        [_heat(z, [f"{name} " for name in names], "head %{y}, offset %{x}: %{z:.4g}")],
        _rows("key's place less query's"), 130 + 24 * len(z), section="heads")] if top else []


def _heat(z: list[list[float]], across: list[str], hover: str) -> dict[str, Any]:
    """Heads as rows; one scale around zero."""
    top = max(max(abs(v) for v in row) for row in z) or 1.0
    return {"type": "heatmap", "z": z, "x": across, "y": [f"{j + 1} " for j in range(len(z))], "zmin": -top,
            "zmax": top, "colorbar": {"thickness": 10, "outlinewidth": 0},
            "hovertemplate": f"{hover}<extra></extra>"}


def _rows(across: str) -> dict[str, Any]:
    """Heads from above; what stands below are names, not numbers."""
    return {"xaxis": {"title": {"text": across}, "type": "category"},
            "yaxis": {"title": {"text": "head"}, "type": "category", "autorange": "reversed"}}


def _biases(story: Story) -> list[Chart]:
    """Key biases as one row a head, the offset as the last; nothing for layers without either."""
    if story.fit is None:
        return []
    layer = story.fit.layer
    rows: dict[str, Tensor] = {}
    if isinstance(layer, AttentionLayer) and layer.key_bias is not None:
        rows |= {f"u of head {j + 1}": u for j, u in enumerate(layer.key_bias)}
    if layer.offset is not None and layer.out_width == layer.width:
        rows["offset c"] = layer.offset
    if not rows:
        return []
    z = [[_short(float(v)) for v in row] for row in rows.values()]
    top = max(max(abs(v) for v in row) for row in z) or 1.0
    told = ", ".join(f"‖{name}‖ = {float(row.norm()):.3g}" for name, row in list(rows.items())[:6])
    data = [{"type": "heatmap", "z": z, "x": list(range(1, layer.width + 1)), "y": [f"{name} " for name in rows],
             "zmin": -top, "zmax": top, "colorbar": {"thickness": 10, "outlinewidth": 0},
             "hovertemplate": "%{y}[%{x}] = %{z:.4g}<extra></extra>"}]
    return [Chart(
        "biases", "Biases", f"{'What a head adds to the score of a key, and what' if len(rows) > 1 else 'What'} is "
        f"added to every output. {told}.",
        f"Heat map of key biases and offset. {told}.", data,
        {"xaxis": {"title": {"text": "feature"}}, "yaxis": {"autorange": "reversed"}}, 110 + 24 * len(rows),
        section="heads")]


# -- the run ----------------------------------------------------------------------------------------------------

KINDS = {"span": 0, "unmix": 2, "start": 3, "polish": 1, "sculpt": 4, "search": 2, "descent": 0, "refine": 1,
         "form": 2, "clues": 3}


def _stages(story: Story) -> list[Chart]:
    if story.fit is None:
        return []
    trace = story.fit.trace
    if not trace:
        return []
    begun, bars = 0.0, []
    for event in trace:
        seconds = float(event.get("seconds", 0.0))
        left = event.get("error", event.get("unseen"))
        note = f"{event['stage']}: {seconds:.2f} s"
        if left is not None:
            note += f", {left:.1e} left on other rows"
        bars.append((event["stage"], begun, seconds, note))
        begun += seconds
    longest = max(bars, key=lambda bar: bar[2])
    shown = bars if len(bars) <= 40 else sorted(sorted(bars, key=lambda bar: -bar[2])[:40], key=lambda bar: bar[1])
    hidden = len(bars) - len(shown)
    data = [{
        "type": "bar", "orientation": "h", "y": [f"{name} " for name, *_ in shown],
        "x": [max(seconds, begun / 400) for _, _, seconds, _ in shown], "base": [at for _, at, _, _ in shown],
        "customdata": [note for *_, note in shown], "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": [COLOURS[KINDS.get(name.split("-")[0], 5)] for name, *_ in shown]}}]
    return [Chart(
        "stages", "Stages", f"{len(bars)} stages in {begun:.2f} s, one after the other"
        + (f"; the {hidden} shortest are left out." if hidden else "."),
        f"Time line of {len(bars)} stages. The longest, {longest[0]}, took {longest[2]:.2f} of {begun:.2f} s.",
        data, {"xaxis": {"title": {"text": "seconds"}}, "yaxis": {"autorange": "reversed", "automargin": True},
               "bargap": 0.35, "showlegend": False}, 90 + 26 * len(shown))]


def _residual(story: Story) -> list[Chart]:
    curves = [] if story.fit is None else traces.residuals(story.fit.trace)
    if not curves:
        return []
    data = [{"type": "scatter", "mode": "lines+markers", "name": curve.stage, "x": list(curve.seconds),
             "y": list(curve.residual), "line": {"color": COLOURS[j % 6], "dash": DASHES[j // 6 % 5]},
             "marker": {"symbol": SHAPES[j % 6], "size": 6},
             "hovertemplate": f"{curve.stage}: %{{y:.2e}} at %{{x:.2f}} s<extra></extra>"}
            for j, curve in enumerate(curves)]
    first, last = curves[0].residual[0], min(min(curve.residual) for curve in curves)
    return [Chart(
        "residual", "Residual against time", "Relative residual on the rows each stage fits, stage after stage.",
        f"Relative residual against seconds, from {first:.1e} down to {last:.1e} in {len(curves)} stages.",
        data, {"xaxis": {"title": {"text": "seconds"}},
               "yaxis": {"title": {"text": "relative residual"}, "type": "log", **_decades(first / last)},
               "showlegend": 1 < len(curves) <= MOST_NAMED, "legend": KEY}, 340)]


def _spectrum(story: Story) -> list[Chart]:
    found = None if story.fit is None else traces.spectrum(story.fit.trace)
    if found is None:
        return []
    numbers = list(range(1, len(found.values) + 1))
    data = []
    for name, low, high, colour, shape in (("heads", 0, found.heads, COLOURS[0], "circle"),
                                           ("floor", found.heads, len(numbers), COLOURS[1], "circle-open")):
        data.append({"type": "scatter", "mode": "markers", "name": name, "x": numbers[low:high],
                     "y": list(found.values[low:high]), "marker": {"color": colour, "symbol": shape, "size": 10},
                     "hovertemplate": "direction %{x}: %{y:.4g}<extra></extra>"})
    edge = found.heads + 0.5
    assert story.fit is not None
    learned = story.fit.layer.heads
    told = (f"Singular values of the moments fall by a factor {found.gap:.2g} after {found.heads}: so many stand "
            "out from the sampling floor." if found.gap > 1.2 else
            "Singular values of the moments show no clear gap: they do not tell the number of heads.")
    if learned != found.heads:
        told += f" The layer that was learned has {learned}."
    return [Chart(
        "spectrum", "How many heads", told,
        f"Singular values of the moments: {found.heads} before the gap, of factor {found.gap:.2g}.",
        data, {"xaxis": {"title": {"text": "direction"}, "dtick": max(1, len(numbers) // 10)},
               "yaxis": {"title": {"text": "singular value"}, "rangemode": "tozero"},
               "shapes": [{"type": "line", "x0": edge, "x1": edge, "yref": "paper", "y0": 0, "y1": 1,
                           "line": {"dash": "dash", "width": 1.5, "color": COLOURS[1]}}],
               "legend": KEY})]


def _starts(story: Story) -> list[Chart]:
    several = [] if story.fit is None else traces.starts(story.fit.trace)
    if not several:
        return []
    data = [{"type": "scatter", "mode": "markers", "name": one.stage, "x": list(range(1, len(one.residuals) + 1)),
             "y": list(one.residuals),
             "marker": {"color": COLOURS[j % 6], "symbol": SHAPES[j % 6], "size": 10, "opacity": 0.85},
             "hovertemplate": f"{one.stage}, start %{{x}}: %{{y:.3g}} left<extra></extra>"}
            for j, one in enumerate(several)]
    if all(len(one.residuals) == 1 for one in several):
        told = "; ".join(f"{one.stage}: one start, which left {one.residuals[0]:.2g}" for one in several[:6])
        return [Chart("starts", "Do the starts agree", "A start that leaves less than half of the labels' spread "
                      f"on other rows is polished at once, and no other is needed. {told}.", "", [], {})]
    told = "; ".join(f"{one.stage}: {one.agreeing} of {len(one.residuals)} at the least residual"
                     for one in several[:6])
    return [Chart(
        "starts", "Do the starts agree", "Where independent starts ended, judged on rows they did not fit. A first "
        f"start that leaves less than half is polished at once. {told}.",
        f"Residual of each start. {told}.", data,
        {"xaxis": {"title": {"text": "start"}, "dtick": 1,
                   "range": [0.4, 0.6 + max(len(one.residuals) for one in several)]},
         "yaxis": {"title": {"text": "residual on other rows"}, "rangemode": "tozero"},
         "showlegend": len(several) > 1, "legend": KEY})]


def _rounds(story: Story) -> list[Chart]:
    found = [] if story.fit is None else traces.rounds(story.fit.trace)
    if not found:
        return []
    widths = [w for one in found for w in one.half_widths]
    low, high = math.log10(min(widths)) - 0.2, math.log10(max(widths)) + 0.2
    frames, bars = [], []
    for one in found:
        n = len(one.half_widths)
        told = "; ".join(f"{NAMES[name]} {value:,.0f}" if name == "accepted" else f"{NAMES[name]} {value:.3g}"
                         for name, value in one.numbers.items())
        bars.append([{
            "type": "bar", "x": list(range(1, n + 1)), "y": list(one.half_widths),
            "marker": {"color": [COLOURS[0] if j < one.kept else COLOURS[1] for j in range(n)],
                       "pattern": {"shape": ["" if j < one.kept else "/" for j in range(n)]}},
            "hovertemplate": "direction %{x}: half-width %{y:.3g}<extra></extra>"}])
        frames.append({"name": one.name, "text": f"R{one.name[1:]}: {told}.", "data": bars[-1]})
    last = found[-1]
    across = last.half_widths[last.kept] if last.kept < len(last.half_widths) else math.nan
    first = found[0].half_widths[last.kept] if last.kept < len(found[0].half_widths) else math.nan
    return [Chart(
        "rounds", "The body, round by round", "Half-widths of the convex body in its longest directions: "
        f"{last.kept} along the affine hull of the heads (plain), the next ones across it (hatched), which shrink.",
        f"Half-widths of the body in {len(found)} rounds; across the hull from {first:.2g} to {across:.2g}.",
        bars[-1], {"xaxis": {"title": {"text": "direction, longest first"}, "dtick": 1},
                   "yaxis": {"title": {"text": "half-width of the body"}, "type": "log", "range": [low, high],
                             **_decades(max(widths) / min(widths))},
                   "showlegend": False}, 320, frames=tuple(frames))]


# -- training ---------------------------------------------------------------------------------------------------


def _loss(story: Story) -> list[Chart]:
    if not story.training:
        return []
    data: list[dict[str, Any]] = []
    highest, lowest, applies, certified = LOG2, LOG2, 0, 0
    for j, (label, run) in enumerate(story.training):
        colour, loss = COLOURS[j % 6], run["columns"]["loss"]
        data.append(_line(label, range(len(loss)), loss, colour))
        highest, lowest = max(highest, *loss), min(lowest, *loss)
        limit = traces.bound(run)
        if limit is not None:
            applies += 1
            data.append({**_line(f"{label}: bound", *limit, colour), "line": {"color": colour, "dash": "dash"}})
            highest = max(highest, *limit[1])
        after = run["certificate"]
        if after is not None and after["descent_held"]:
            certified += 1
            data.append({"type": "scatter", "mode": "markers", "name": f"{label}: certified afterwards",
                         "x": [run["steps"]], "y": [after["bound"]],
                         "marker": {"color": colour, "symbol": "diamond-open", "size": 11},
                         "hovertemplate": f"{label}: at most %{{y:.2e}}, computed afterwards<extra></extra>"})
    top = math.log10(highest) + 0.1
    count = len(story.training)
    return [Chart(
        "loss", "Loss and bound", "Training loss against the iteration; dashed, the training bound known "
        f"beforehand (its hypotheses hold for {applies} of {count} settings); diamonds, the bound computed "
        f"afterwards ({certified} of {count}). Above log 2, shaded, a bound says no more than guessing would.",
        f"Training loss of {count} settings on a logarithmic axis. A bound applies beforehand to {applies}, "
        f"afterwards to {certified}. The region above log 2 is marked as vacuous.",
        data, {"xaxis": {"title": {"text": "iteration"}},
               "yaxis": {"title": {"text": "training loss"}, "type": "log",
                         **_decades(highest / max(lowest, 1e-300))},
               "shapes": [{"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": LOG2, "y1": 10**top,
                           "fillcolor": "rgba(128,128,128,0.22)", "line": {"width": 0}, "layer": "below"}],
               "annotations": [{"xref": "paper", "x": 0.99, "y": math.log10(LOG2), "yanchor": "bottom",
                                "xanchor": "right", "text": "vacuous", "showarrow": False}],
               "legend": KEY}, 420)]


def _panels(story: Story) -> list[Chart]:
    made = []
    titles = {name: title for name, (title, _) in PANELS.items() if name != "loss"} | SAMPLED
    for what, title in titles.items():
        lines = []
        for j, (label, run) in enumerate(story.training):
            across, values = ((run["test"]["iteration"], run["test"][what]) if what in SAMPLED
                              else (range(len(run["columns"][what])), run["columns"][what]))
            if len(values) and all(v is not None and math.isfinite(v) for v in values):
                lines.append(_line(label, across, values, COLOURS[j % 6]))
        if lines:
            ends = "; ".join(f"{line['name']}: {line['y'][-1]:.3g}" for line in lines[:6])
            made.append(Chart(
                f"panel-{what}", title.capitalize() if title[0].isalpha() else title, f"At the end: {ends}.",
                f"{title} against the iteration. At the end: {ends}.", lines,
                {"xaxis": {"title": {"text": "iteration"}}, "yaxis": {"title": {"text": title}},
                 "showlegend": len(lines) > 1, "legend": KEY}, small=True))
    return made


def _decades(ratio: float) -> dict[str, int]:
    """The ticks of a logarithmic axis that spans this ratio: whole decades, about five, where there are some."""
    return {"dtick": max(1, round(math.log10(ratio) / 5))} if ratio > 30 else {}


def _line(label: str, x: Sequence[int] | range, y: Sequence[float], colour: str) -> dict[str, Any]:
    """At most about 400 points: a screen shows no more."""
    step = max(1, len(y) // 400)
    keep = sorted({*range(0, len(y), step), len(y) - 1})
    return {"type": "scatter", "mode": "lines", "name": label, "x": [x[i] for i in keep], "y": [y[i] for i in keep],
            "line": {"color": colour}, "hovertemplate": f"{label}: %{{y:.3g}} at %{{x}}<extra></extra>"}


# -- the heads --------------------------------------------------------------------------------------------------


def maps(story: Story) -> list[dict[str, Any]]:
    """For each head its two matrices, and the true ones, and its patterns: deflated integers, on one scale for
    learned and true."""
    if story.shown is None:
        return []
    cells = sum(matrices.numel() for matrices in story.shown.matrices.values())
    kind = np.dtype("<i2") if cells <= FINE else np.dtype("i1")
    heads = []
    for head in story.heads:
        j, i = head.number - 1, None if head.partner is None else head.partner - 1
        spectra = {name: [_short(s) for s in values] for name, values in head.spectra.items()}
        entry: dict[str, Any] = {"name": f"Head {head.number}", "spectra": spectra, "ranks": dict(head.ranks)}
        for name, learned in story.shown.matrices.items():
            true = None if story.truth is None or i is None else story.truth.matrices[name][i]
            entry[name] = _packed(learned[j], true, kind)
        for sample in story.looks.samples:
            true = true_patterns(sample, j, story.match)
            entry[f"P{sample.number}"] = {**_packed(sample.patterns[j], true, np.dtype("<i2")), "positive": True}
        heads.append(entry)
    return heads


def tokens(story: Story) -> dict[str, Any]:
    """What a page shows patterns on: strings of the samples, what heads do, what they write."""
    looks = story.looks
    def raised(row: Written) -> dict[str, Any]:
        return {"token": row.token, "words": [(word, _short(value)) for word, value in row.words]}

    samples = [{"number": one.number, "queries": one.queries, "keys": one.keys,
                "writes": [[raised(row) for row in rows] for rows in one.writes]} for one in looks.samples]
    return {"order": story.order, "named": looks.named, "does": [str(one) for one in looks.does],
            "samples": samples}


def _packed(learned: Tensor, true: Tensor | None, kind: np.dtype[Any]) -> dict[str, Any]:
    """The true matrix travels as its difference from the learned one: next to nothing where they agree."""
    A = learned.detach().double().cpu().numpy()
    B = None if true is None else true.detach().double().cpu().numpy()
    top = max(float(abs(A).max()), 0.0 if B is None else float(abs(B).max()), 1e-300)
    step = top / np.iinfo(kind).max
    q = np.rint(A / step).astype(kind)
    # A few large entries would leave a large matrix pale: colours end where all but one in a hundred lie.
    shade = float(np.quantile(abs(A), 0.99)) if A.size > SMALL else top
    packed = {"rows": A.shape[0], "columns": A.shape[1], "step": step, "top": top, "shade": shade or top,
              "bytes": kind.itemsize, "learned": _deflated(q)}
    if B is not None:
        packed["difference"] = _deflated((np.rint(B / step).astype(kind) - q).astype(kind))  # wraps, and back again
    return packed


def _deflated(values: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(values.tobytes(), 9)).decode()


def _short(value: float) -> float:
    return float(f"{value:.5g}")
