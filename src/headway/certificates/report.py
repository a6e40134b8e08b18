"""certify(): the claims that a layer and examples it was not learned from support, each with its ground."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from headway.certificates.held_out import errors, mean_claim, quantile_claim
from headway.certificates.identify import DENSE, identifiability
from headway.certificates.jacobian import low_ranks, parameters, sample
from headway.certificates.radius import error_bars, radius
from headway.core import checks, conditions
from headway.core.examples import Examples
from headway.core.layer import AttentionLayer
from headway.core.results import Certificate, Claim, Verdict


def certify(
    layer: AttentionLayer,
    examples: Examples,
    confidence: float = 0.99,
    *,
    tolerance: float = 1e-6,
    fraction: float = 0.01,
    mean_tolerance: float = 0.1,
    teacher_bound: float | None = None,
    token_bound: float | None = None,
    sequences: int | None = None,
    steps: int = 200,
    seed: int = 0,
    seen: Examples | Collection[int] | np.ndarray | Tensor | str | None = None,
) -> Certificate:
    """What may be claimed about ``layer`` from examples (X, Y) of the function it stands for, and on what ground.

    held-out quantile: at most ``fraction`` of all inputs have a relative error above ``tolerance``. held-out mean:
    the root mean square error is at most ``mean_tolerance``, given bounds on the teacher's rows and on tokens.
    identifiability: the Jacobian on ``sequences`` of the examples (default: five times the counting floor) has full
    rank; for large layers by at most ``steps`` of Lanczos' method. distance to the truth: the exact solution is
    within ``tolerance``. error bars: expected errors under noise. non-degeneracy: the first paper's conditions.
    Each claim holds, does not, or is undecided. ``seen`` is what the layer was learned from: the examples, or their
    ``hashes()``, and a single sequence of them is refused; or their ``digest()``, and only all of them are.

    >>> from headway.core.sources import draw
    >>> truth = AttentionLayer.random(heads=2, width=4, seed=0)
    >>> found = certify(truth, draw(truth, count=600, length=4, seed=5))
    >>> found.established("held-out quantile"), found.established("identifiability")
    (True, True)
    """
    _check(layer, examples)
    if seen is not None:
        _refuse_seen(examples, seen)
    for name, value in (("confidence", confidence), ("fraction", fraction)):
        if not 0 < checks.number(name, value) < 1:
            checks.refuse(name, "a number strictly between 0 and 1", value,
                          "fraction=0.01" if name == "fraction" else "confidence=0.99")
    for name, bound in (("tolerance", tolerance), ("mean_tolerance", mean_tolerance)):
        checks.number(name, bound, strictly=True)
    for name, given in (("teacher_bound", teacher_bound), ("token_bound", token_bound)):
        if given is not None:
            checks.number(name, given, strictly=True)
    checks.whole("steps", steps, 2)
    if sequences is not None:
        checks.whole("sequences", sequences)
    draw = torch.Generator().manual_seed(checks.whole("seed", seed, 0))
    layer = layer.to(examples.device)
    found = errors(layer.to("cpu"), examples)
    claims = [quantile_claim(found, confidence, fraction, tolerance),
              mean_claim(found, confidence, mean_tolerance, teacher_bound, token_bound)]
    small = parameters(layer) <= DENSE
    basis = sample(layer, examples, sequences, torch.float64, None if small else low_ranks(layer))
    claims.append(identifiability(layer, examples, basis, confidence, draw, steps))
    if small:
        claims += [radius(basis, tolerance), error_bars(basis)]
    else:
        size = f"the layer has {parameters(layer)} parameters: a dense Jacobian is used up to {DENSE}"
        claims += [Claim("distance to the truth", "The layer that made the labels is near this one", "–",
                         Verdict.UNDECIDED, size, {}),
                   Claim("error bars", "Errors per head", "–", Verdict.UNDECIDED, size, {})]
    claims.append(_conditions(layer))
    return Certificate(tuple(claims), confidence, {
        "sequences": len(examples), "length": examples.length, "width": examples.width, "heads": layer.heads,
        "tolerance": tolerance, "fraction": fraction, "mean_tolerance": mean_tolerance, "seed": seed})


def _check(layer: AttentionLayer, examples: Examples) -> None:
    if not isinstance(layer, AttentionLayer):
        checks.refuse("layer", "an AttentionLayer", type(layer).__name__,
                      "fit.layer, or headway.core.layer.load_layer(path)")
    if not isinstance(examples, Examples):
        checks.refuse("examples", "an Examples object", type(examples).__name__, "headway.Examples(X, Y)")
    if len(examples) < 2:
        checks.refuse("examples", "at least 2 sequences", len(examples), "more; 459 support a 1 % quantile at 99 %")
    if (examples.width, examples.out_width) != (layer.width, layer.out_width):
        checks.refuse("examples", f"width {layer.width} → {layer.out_width}, as the layer",
                      f"{examples.width} → {examples.out_width}", "examples of the function the layer stands for")
    if examples.mask != layer.mask:
        checks.refuse("examples", f"mask {layer.mask!r}, as the layer", repr(examples.mask),
                      "examples with its mask")


def _refuse_seen(examples: Examples, seen: Examples | Collection[int] | np.ndarray | Tensor | str) -> None:
    """Refuses examples of which the learner had one: its error there says nothing about others."""
    if isinstance(seen, str):
        if examples.digest() == seen:
            checks.refuse("examples", "examples the learner did not use",
                          "the very ones it was fitted to (same hash)",
                          "fresh ones: error on fitted examples says nothing about others")
        return
    if isinstance(seen, Examples):
        known = seen.hashes()
    else:
        known = np.asarray(seen.cpu() if isinstance(seen, Tensor) else seen if isinstance(seen, np.ndarray) else
                           list(seen))
        if known.ndim != 1 or (known.size and known.dtype != np.int64):
            checks.refuse("seen", "Examples, what their hashes() or digest() returned, or None",
                          f"{known.dtype} of shape {known.shape}", "seen=the examples learned from")
    again = np.flatnonzero(np.isin(examples.hashes(), known))
    if again.size:
        checks.refuse("examples", "examples the learner did not use",
                      f"{again.size} of {len(examples)} sequences that it was fitted to (same hash), the first at "
                      f"index {again[0]}", "fresh ones: error on fitted examples says nothing about others")


def _conditions(layer: AttentionLayer) -> Claim:
    numbers = conditions.measure(layer.Theta, layer.W)
    failing = conditions.broken(numbers)
    return Claim("non-degeneracy", "The heads are in general position, as the provable algorithm asks",
                 "the kinds of condition are the paper's, the bounds Headway's",
                 Verdict.NO if failing else Verdict.YES,
                 "; ".join(failing) or ", ".join(f"{name} {value:.2g}" for name, value in numbers.items()), numbers)
