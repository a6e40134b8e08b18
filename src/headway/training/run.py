"""train(): one run of descent on L̂(θ) = (1/n)Σℓ(y_iΦ(X_i; θ)), with what the theorems say of it beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.core import checks
from headway.training.afterwards import Certificate, best_a_posteriori
from headway.training.bounds import Bounds, bounds
from headway.training.curvature import curvature_along
from headway.training.data import Labelled
from headway.training.descent import Path, descend
from headway.training.network import Network
from headway.training.realizability import Start, check_start
from headway.training.starts import start

SVM = 2000  # sequences up to which γ is computed


@dataclass(frozen=True)
class Trained:
    """A run and what the theory says of it: conditions at the start, bounds before and after, curvature between."""

    path: Path
    start: Start | None
    bounds: tuple[Bounds, ...]
    certificate: Certificate | None
    curvature: tuple[dict[str, float], ...]  # iteration, loss, least eigenvalue, if exact, what the theory allows

    @property
    def sentence(self) -> str:
        loss = self.path.columns["loss"][-1]
        said = f"Training loss {loss:.2e} after {self.path.steps} steps"
        if self.path.test.get("test_error"):
            said += f", test error {self.path.test['test_error'][-1]:.3f}"
        if self.start is not None and not self.start.margin.separable:
            return said + ". The gradients at the start are not separable (γ = 0): the theorem claims nothing."
        if self.certificate is not None:
            times = f"{self.certificate.ratio:.1f} times the measured loss"
            word = "vacuous" if self.certificate.vacuous else times
            said += f". A posteriori bound {self.certificate.bound:.2e} ({word})"
            if not self.certificate.descent_held:
                said += ", void because the loss did not fall at every step"
        for one in self.bounds:
            if one.ground == "a priori" and one.form == "safe":
                said += f". {_a_priori(one)}"
        return said + "."

    def asdict(self) -> dict[str, Any]:
        return {
            "sentence": self.sentence, "rule": self.path.rule, "step": self.path.step, "steps": self.path.steps,
            "heads": self.path.start.heads, "columns": self.path.columns, "test": self.path.test,
            "start": None if self.start is None else {
                "largest_head": self.start.largest_head, "largest_output": self.start.largest_output,
                "margin_primal": self.start.margin.primal, "margin_dual": self.start.margin.dual},
            "bounds": [one.asdict() for one in self.bounds],
            "certificate": None if self.certificate is None else {
                "bound": self.certificate.bound, "measured": self.certificate.measured,
                "ratio": self.certificate.ratio, "vacuous": self.certificate.vacuous,
                "comparison": self.certificate.comparison, "defect": self.certificate.defect,
                "distance": self.certificate.distance, "descent_held": self.certificate.descent_held},
            "curvature": list(self.curvature)}


def _a_priori(one: Bounds) -> str:
    """Each bound holds, or does not apply for reasons of its own."""
    if one.holds and one.holds_generalization:
        return "A priori the hypotheses of the training and of the generalization bound hold"
    if one.holds:
        return ("A priori the hypotheses of the training bound hold; the generalization bound does not apply "
                f"({'; '.join(one.failing_generalization)})")
    return f"A priori the theorem does not apply ({'; '.join(one.failing)})"


def train(
    data: Labelled, heads: int = 16, *, test: Labelled | None = None, begin: str | Network = "zero",
    step: float = 1.0, steps: int = 400, rule: str = "constant", theory: bool = True, seed: int = 0,
    report: Callable[[int, float], None] | None = None,
) -> Trained:
    """Run descent on (1/n)Σℓ(y_iΦ(X_i; θ)) and compare with the theorem.

    ``theory``: also γ of the start, bounds a priori and a posteriori (paper and safe constants), the a posteriori
    certificate against the end of a run four times as long, and the curvature at nine points of the path.

    >>> from headway.training import mixture, train
    >>> done = train(mixture(50, zeta=0.3, noise=0.0), heads=4, begin="balanced", step=0.01, steps=20)
    >>> done.start.margin.separable, done.certificate.descent_held
    (True, True)
    """
    if not isinstance(data, Labelled):
        checks.refuse("data", "labelled sequences", type(data).__name__, "headway.training.labelled(X, y)")
    if test is not None and test.X.shape[1:] != data.X.shape[1:]:
        checks.refuse("test", f"sequences of shape {tuple(data.X.shape[1:])}", tuple(test.X.shape[1:]), "one model")
    net = begin if isinstance(begin, Network) else start(begin, heads, data, seed=seed)
    marks = tuple(sorted({round(steps * j / 8) for j in range(9)}))
    path = descend(net, data, steps=steps, step=step, rule=rule, test=test, keep=marks, report=report)
    if not theory:
        return Trained(path, None, (), None, ())
    begun = check_start(net, data) if len(data) <= SVM else None
    found: list[Bounds] = []
    if begun is not None:
        star = begun.point(net, 1 / max(steps, 2))
        found = [bounds(net, data, step, steps, star=star, form=form, observed=observed, rule=rule)
                 for form in ("paper", "safe") for observed in (None, path)]
    certificate = None
    if rule == "constant" and steps:
        far = descend(path.end, data, steps=3 * steps, step=step).end
        certificate = best_a_posteriori(path, data, far)
    return Trained(path, begun, tuple(found), certificate, curvature_along(path, data, seed))
