"""Is what ``learn`` says true? What was said, and checks of it against what the labels were made by.

A table {status kind: checks} says which kinds are true of some examples and what else must then hold; a kind that
is not in the table is false, and so is an ok sentence that speaks of another number of heads than the layer has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

import headway as hw
from common import timed
from headway.core.counting import Size

FITTED = 1e-6  # the error that "fitted" promises
NEAR = 3.0  # heads may be this many times as far off as least squares told the count (0.8 to 1.1 on seeds 0 to 5)
WORDS = 300  # characters of an error's message that a record keeps


@dataclass(frozen=True)
class Case:
    """Examples to learn from, other tokens with their right labels, and what is known of how they were made."""

    data: hw.Examples
    X: Tensor
    Y: Tensor
    truth: hw.AttentionLayer | hw.FactoredLayer | None = None
    noise: float = 0.0  # ‖noise‖ / ‖labels − mean‖
    wrong: frozenset[int] = frozenset()  # sequences whose labels are not the layer's


@dataclass(frozen=True)
class Said:
    """How ``learn`` ended: its status, or "refused" or "crash" with the message in place of the sentence."""

    kind: str
    sentence: str
    ok: bool
    seconds: float
    fit: hw.Fit | None = None

    @property
    def named(self) -> frozenset[int]:
        """The sequences set aside as outliers: the last list of the trace."""
        lists = [event["outliers"] for event in (self.fit.trace if self.fit else ()) if "outliers" in event]
        return frozenset(int(j) for j in lists[-1]) if lists else frozenset()

    @property
    def noise(self) -> float:
        """The noise level stated, relative to the labels' spread."""
        if self.fit is None:
            return math.nan
        return float(self.fit.status.numbers.get("noise", self.fit.stats.get("noise", math.nan)))


Check = Callable[[Said, Case], str]  # what is not true; "" if all is
Truth = Mapping[str, tuple[Check, ...]]


def ask(case: Case, **options: Any) -> Said:
    """What ``learn`` says of the examples. It may refuse them; an error is kept, so that the others are run."""

    def call() -> tuple[str, str, bool, hw.Fit | None]:
        try:
            fit = hw.learn(case.data, **options)
        except hw.InputError as refusal:
            return "refused", str(refusal), False, None
        except Exception as error:  # whatever it is, it is what a user would have got
            return "crash", f"{type(error).__name__}: {error}"[:WORDS], False, None
        return fit.status.kind, fit.status.sentence, fit.status.ok, fit

    (kind, sentence, ok, fit), seconds = timed(call)
    return Said(kind, sentence, ok, seconds, fit)


def judge(said: Said, case: Case, truth: Truth) -> str:
    """Why what was said is not true; "" if it is."""
    if said.kind not in truth:
        return f"{said.kind}, where {' or '.join(truth)} would be true"
    found = [heads_agree(said, case), *(check(said, case) for check in truth[said.kind])]
    return "; ".join(filter(None, found))


def row(said: Said, case: Case, why: str) -> dict[str, Any]:
    """The columns that every judged run has."""
    return {"said": said.kind, "ok": said.ok, "true": not why,
            "heads": None if said.fit is None else said.fit.layer.heads,
            "error on other sequences": finite(fresh_error(said, case)), "seconds": round(said.seconds, 1),
            "sentence": said.sentence, "why not true": why or None}


# -- measures ---------------------------------------------------------------------------------------------------


def finite(value: float) -> float | None:
    """JSON knows no infinity."""
    return value if math.isfinite(value) else None


def fresh_error(said: Said, case: Case) -> float:
    """‖F(X) − Y‖/‖Y − mean‖ on tokens nobody has learned from."""
    if said.fit is None:
        return math.nan
    wrong = said.fit.layer(case.X) - case.Y
    return float(wrong.norm() / (case.Y - case.Y.mean((0, 1))).norm())


def worst_head(said: Said, case: Case) -> float:
    """The largest relative error of any Θ_i or W_i, or of what stands for them in layers of other forms; infinite
    where the head count or the form is wrong."""
    if said.fit is None or case.truth is None:
        return math.inf
    try:
        return hw.match(said.fit.layer, case.truth).worst
    except hw.InputError:  # heads of two forms have nothing to compare
        return math.inf


def allowed_by_noise(case: Case) -> float:
    """σ·√(unknowns/equations): about what least squares is off by, heads told."""
    assert case.truth is not None
    data = case.data
    unknowns = Size(data.width, data.out_width, data.length, data.mask).unknowns(case.truth.heads)
    return case.noise * math.sqrt(unknowns / (len(data) * data.length * data.out_width))


def planted_noise(clean: Tensor, labels: Tensor) -> float:
    """‖noise‖/‖labels − mean‖ of the labels as they are given."""
    return float((labels - clean).norm() / (labels - labels.mean((0, 1))).norm())


def share_named(said: Said, case: Case) -> float:
    return len(said.named & case.wrong) / max(len(case.wrong), 1)


def indices(at: Iterable[int] | Tensor | np.ndarray) -> frozenset[int]:
    return frozenset(int(j) for j in (at.tolist() if isinstance(at, (Tensor, np.ndarray)) else at))


# -- checks -----------------------------------------------------------------------------------------------------


def heads_agree(said: Said, case: Case) -> str:
    """The sentence and the layer have one number of heads, where the layer is offered as an answer."""
    spoken = re.search(r"\b(\d+) heads?\b", said.sentence)
    if not said.ok or spoken is None or said.fit is None or int(spoken[1]) == said.fit.layer.heads:
        return ""
    return f"the sentence says {spoken[0]}, the layer has {said.fit.layer.heads}"


def count_right(said: Said, case: Case) -> str:
    assert said.fit is not None and case.truth is not None
    found, true = said.fit.layer.heads, case.truth.heads
    return "" if found == true else f"{found} heads, there are {true}"


def heads_within(tolerance: float) -> Check:
    def check(said: Said, case: Case) -> str:
        worst = worst_head(said, case)
        return "" if worst <= tolerance else f"heads off by {worst:.1e}"

    return check


def function_within(tolerance: float) -> Check:
    def check(said: Said, case: Case) -> str:
        error = fresh_error(said, case)
        return "" if error <= tolerance else f"error {error:.1e} on other sequences"

    return check


def heads_as_noise_allows(said: Said, case: Case) -> str:
    worst, most = worst_head(said, case), NEAR * allowed_by_noise(case)
    return "" if worst <= most else f"heads off by {worst:.1e}, the noise allows {most:.1e}"


def noise_stated(said: Said, case: Case) -> str:
    """Within 20 % of the level planted."""
    right = abs(said.noise / case.noise - 1) <= 0.2
    return "" if right else f"noise said to be {said.noise:.2e}, it is {case.noise:.2e}"


def outliers_named(said: Said, case: Case) -> str:
    """At least 95 % of the wrong sequences, and at most one right one in a hundred."""
    false, right = len(said.named - case.wrong), len(case.data) - len(case.wrong)
    if share_named(said, case) < 0.95:
        return f"{len(said.named & case.wrong)} of {len(case.wrong)} outliers named"
    return "" if false <= 0.01 * right else f"{false} right sequences called outliers"


def not_determined_said(said: Said, case: Case) -> str:
    """The sentence says that the examples leave something of the heads open."""
    return "" if re.search(r"determine|identif", said.sentence) else "it does not say what stays undetermined"


def not_ok(said: Said, case: Case) -> str:
    return "ok, though nothing was there to learn" if said.ok else ""


# -- what is true of some examples ------------------------------------------------------------------------------

SAME_FUNCTION = {kind: (function_within(FITTED),) for kind in ("recovered", "fitted", "noise")}
NO_LAYER: Truth = {"not_realisable": (), **SAME_FUNCTION}
LABEL_NOISE: Truth = {"noise": (count_right, heads_as_noise_allows, noise_stated)}
SPOILT: Truth = dict.fromkeys(("recovered", "fitted"), (heads_within(1e-9), outliers_named))
AS_GOOD_AS_EXACT: Truth = dict.fromkeys(("recovered", "fitted"), (count_right, function_within(FITTED)))
TOO_FEW: Truth = {"too_few": ()}
