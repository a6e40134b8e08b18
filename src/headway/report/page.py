"""The page: a template, a style sheet and a script, filled with a run's story and figures, in one file.

Everything is inside, plotly too; a content security policy forbids the page to ask for anything else.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from headway.core import checks
from headway.core.examples import Examples
from headway.core.factored import FactoredLayer
from headway.core.files import write_bytes
from headway.core.layer import AttentionLayer, of_softmax
from headway.core.plain import finite
from headway.core.same import Comparison, compare
from headway.report.charts import charts, maps
from headway.report.charts import tokens as strings
from headway.report.given import read
from headway.report.heads import WORDS, Layer
from headway.report.pair import beside
from headway.report.samples import MOST, looked
from headway.report.story import PAPERS, Story, gather, plain

NAME = "report.html"
MARKS = {"yes": "✓", "no": "✗", "undecided": "?"}


def write_report(
    run: str | os.PathLike[str], out: str | os.PathLike[str] | None = None,
    truth: str | os.PathLike[str] | None = None, *, tokens: Any = None, sequences: Sequence[int] | None = None,
    unembedding: str | os.PathLike[str] | None = None, vocabulary: str | os.PathLike[str] | None = None,
) -> Path:
    """Write the page of a finished run folder, by default to RUN/report.html; its path.

    truth: a stored layer to set beside the learned one; by default the one in the run folder, if any. Where the
    run's examples still lie there, patterns are shown on the sequences with these numbers, from 1; by default on
    those with the largest and the smallest error, and the one with the most peaked patterns. tokens: the strings of
    their tokens, one list for each sequence of the examples, or a file {"tokens": [["the", …], …]}; by default
    tokens.json of the run folder. unembedding: a file with one matrix (vocabulary, e), and vocabulary, a JSON list
    of its words: what each head raises where it looks.
    """
    folder = Path(run)
    target = folder / NAME if out is None else Path(out)
    if target.is_dir():
        checks.refuse("out", "a file name", f"{target}, a folder", f"{target / NAME}")
    try:
        given = read(folder, tokens, sequences, *(None if path is None else Path(path)
                                                  for path in (unembedding, vocabulary)))
        page = render(gather(folder, None if truth is None else Path(truth), given))
    except checks.InputError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        # Files of a run are JSON that anybody may have edited: what does not fit is bad input.
        raise checks.InputError(
            f"{folder}: expected a run as headway writes it; got contents that do not fit "
            f"({type(error).__name__}: {error}). Try: make the run again.") from error
    return _written(target, page)


def write_comparison(
    layer_a: Layer, layer_b: Layer, out: str | os.PathLike[str], *, tolerance: float | None = None,
    on: Examples | None = None, found: Comparison | None = None, config: Mapping[str, Any] | None = None,
) -> Path:
    """Write one page on two layers side by side; its path.

    Are they one function, by which mistake are they not, which head matches which, where do they look on the input
    that shows most of it, and how sure is that? tolerance and on: as ``headway.compare`` takes them. found: what it
    answered, where it has been asked already. config: how the page was made, to be written on it.
    """
    if Path(out).is_dir():
        checks.refuse("out", "a file name", f"{out}, a folder", f"{Path(out) / 'compare.html'}")
    if not all(isinstance(layer, (AttentionLayer, FactoredLayer)) for layer in (layer_a, layer_b)):
        checks.refuse("layer_a, layer_b", "two layers, whose weights are known",
                      f"{type(layer_a).__name__} and {type(layer_b).__name__}", "headway.from_torch(module)")
    for name, layer in (("layer_a", layer_a), ("layer_b", layer_b)):
        if isinstance(layer, AttentionLayer):
            of_softmax(name, layer, "headway.compare, which compares operators: a page shows heads")
    found = compare(layer_a, layer_b, tolerance, on=on) if found is None else found
    return _written(Path(out), render(beside(layer_a, layer_b, found, tolerance, on, config or {})))


def _written(target: Path, page: str) -> Path:
    if not target.parent.is_dir():
        checks.refuse("out", "a file in a folder that exists", str(target), "make that folder first")
    write_bytes(target, page.encode())
    return target


def render(story: Story) -> str:
    """The story as one page of HTML."""
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError:
        checks.refuse("report", "plotly and jinja2", "none installed", "pip install plotly jinja2")
    figures = charts(story)
    sides = dict(zip(("learned", "true"), story.sides, strict=True))
    data = {"charts": {one.name: one.spec() for one in figures}, "heads": maps(story),
            "looks": strings(story),
            "sides": {**sides, "none": "This head stands for no true one." if story.kind == "report" else
                      "This head has no partner in the second layer."}}
    room = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                       loader=FunctionLoader(_part))
    others = {j: _other(story, j) for j in story.order}
    page: str = room.get_template("page.html").render(
        others=others,
        story=story, charts=figures, marks=MARKS, papers=PAPERS, words=WORDS, config=plain(story.config),
        sides=sides, looked=looked(story.looks), most=MOST, shown=_shown, style=_part("page.css"),
        script=_part("page.js"), plotly=get_plotlyjs(), data=_embedded(data))
    return page


def _other(story: Story, j: int) -> str:
    """What the head beside head j does, where that is something else."""
    if story.match is None or j not in story.match.order or not story.looks.true_does:
        return ""
    mine, other = story.looks.does[j], story.looks.true_does[story.match.order.index(j)]
    return "" if mine.kind == other.kind else other.label


def _part(name: str) -> str:
    return (resources.files("headway.report") / name).read_text(encoding="utf-8")


def _embedded(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(finite(data), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c")


def _shown(value: float, otherwise: str = "–") -> str:
    """A number for a table, and a word where there is none."""
    return f"{value:.3g}" if math.isfinite(value) else otherwise
