"""What a trace says, as series: for figures on paper (plot.py) and on the page (report/).

A trace is the list of a fit's stages as results.py stores them; a training run is Trained.asdict().
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.training.bounds import LOG2

__all__ = ["COLOURS", "LOG2", "PANELS", "SAMPLED", "bound", "labels", "residuals", "rounds", "spectrum", "starts",
           "told"]

Trace = Sequence[Mapping[str, Any]]

# Okabe and Ito's palette, told apart by colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
PANELS = {
    "loss": ("training loss", True), "train_error": ("training error", False),
    "margin": ("normalised margin", False), "norm": ("‖θ‖", False), "norm_W": ("‖W‖", False),
    "travel": ("‖θ − θ⁰‖", False)}
LETTERS = {"heads": "H", "step": "η", "zeta": "ζ", "count": "n", "width": "d", "strength": "S", "noise": "noise"}
SAMPLED = {"test_error": "test error", "test_loss": "test loss", "mass": "attention on relevant tokens"}


@dataclass(frozen=True)
class Curve:
    """The relative residual of one stage against the seconds since the beginning."""

    stage: str
    seconds: tuple[float, ...]
    residual: tuple[float, ...]


def residuals(trace: Trace) -> list[Curve]:
    found, begun = [], 0.0
    for event in trace:
        if event.get("curve"):
            found.append(Curve(event["stage"], tuple(begun + at for at, _ in event["curve"]),
                               tuple(left for _, left in event["curve"])))
        begun += event.get("seconds", 0.0)
    return found


@dataclass(frozen=True)
class Spectrum:
    """Singular values of the moments, and how many stand before the gap; ``gap`` is the ratio across it."""

    values: tuple[float, ...]
    heads: int
    gap: float


def spectrum(trace: Trace) -> Spectrum | None:
    for event in trace:
        if "singular_values" in event:
            return Spectrum(tuple(event["singular_values"]), int(event["heads"]), float(event["gap"]))
    return None


@dataclass(frozen=True)
class Starts:
    """Where several starts of one stage ended, in the order they were tried."""

    stage: str
    residuals: tuple[float, ...]

    @property
    def agreeing(self) -> int:
        """How many ended at the least residual: agreement is itself evidence."""
        return sum(r <= 1.01 * min(self.residuals) for r in self.residuals)


def starts(trace: Trace) -> list[Starts]:
    """The starts of every unmixing or search; random starts over all of Θ count together, by their head count."""
    found: dict[str, list[float]] = {}
    for event in trace:
        name = event["stage"]
        if event.get("starts"):
            found.setdefault(name, []).extend(event["starts"])
        elif name.startswith("start-") and "unseen" in event:
            found.setdefault(name.rsplit("-", 1)[0], []).append(event["unseen"])
    return [Starts(name, tuple(values)) for name, values in found.items()]


@dataclass(frozen=True)
class Round:
    """One round of sculpting: the half-widths of the body, longest first; ``kept`` of them lie in the hull."""

    name: str
    half_widths: tuple[float, ...]
    kept: int
    numbers: Mapping[str, float]


def rounds(trace: Trace) -> list[Round]:
    """The body round by round, of the last head count that was sculpted. Constraints of singular value s leave the
    body a half-width of 1/s in that direction."""
    found: list[Round] = []
    for event in trace:
        if "phases" not in event:
            continue
        found = []
        heads = int(event.get("heads", 1))
        for phase in event["phases"]:
            if phase["phase"] != "sculpt":
                continue
            wide = tuple(1.0 / max(s, 1e-12) for s in phase["singular_values"])
            names = ("accepted", "gap", "sum_error", "center_error", "hull_angle")
            told = {name: float(phase[name]) for name in names if phase.get(name) is not None}
            told["residual"] = float(phase["residual_quantiles"][len(phase["residual_quantiles"]) // 2])
            found.append(Round(f"round {phase['round'] + 1}", wide, heads - 1, told))
    return found


def labels(results: Sequence[Mapping[str, Any]], always: Sequence[str] = ()) -> list[str]:
    """Each setting by what tells it from the others, and by what is ``always`` named."""
    here = [name for name in LETTERS if all(name in result for result in results)]
    differ = [name for name in here if len({result[name] for result in results}) > 1 or name in always] or ["heads"]
    return [", ".join(f"{LETTERS[name]} = {result[name]:g}" for name in differ) for result in results]


def told(results: Sequence[Mapping[str, Any]], always: Sequence[str] = ()) -> str:
    """What is said of a sweep: the sentence of the setting with the least loss, and which setting that is."""
    best = min(range(len(results)), key=lambda j: results[j]["columns"]["loss"][-1])
    if len(results) == 1:
        return str(results[0]["sentence"])
    return (f"{len(results)} settings were trained. The one of least loss, {labels(results, always)[best]}: "
            f"{results[best]['sentence']}")


def bound(run: Mapping[str, Any]) -> tuple[list[int], list[float]] | None:
    """The a priori bound on the training loss against the iteration, where its hypotheses hold: it falls as 1/k."""
    for one in run["bounds"]:
        if one["form"] == "safe" and one["ground"] == "a priori" and not one["failing"]:
            total = run["steps"]
            steps = [k for k in range(1, total + 1) if k % max(1, total // 100) == 0]
            return steps, [one["training"] * total / k for k in steps]
    return None
