"""certify(): the claims that a layer and examples it was not learned from support, each with its ground."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.certificates import linear
from headway.certificates.bars import ROWS, Tried, error_bars, error_bars_by_products
from headway.certificates.factors import triangle, unknowns
from headway.certificates.held_out import errors, mean_claim, quantile_claim
from headway.certificates.identify import DENSE, NAME, identifiability
from headway.certificates.jacobian import Sample, low_out_ranks, low_ranks, parameters, sample
from headway.certificates.kernel import identified
from headway.certificates.known import determined
from headway.certificates.newton import Newton
from headway.certificates.radius import radius
from headway.certificates.spectrum import Spectrum
from headway.certificates.wide import radius_by_products
from headway.core import checks, conditions
from headway.core.examples import Examples, keys_of_their_own
from headway.core.factored import FactoredLayer
from headway.core.layer import AttentionLayer
from headway.core.measured import Errors
from headway.core.results import Certificate, Claim, Fit, Verdict

CONDITIONS = "The heads are in general position, as the provable algorithm asks"
PLAIN = "plain scores over all keys of the same sequence, or over all behind,"


def certify(
    layer: AttentionLayer | FactoredLayer | Fit,
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
    so_far: Certificate | None = None,
) -> Certificate:
    """What may be claimed about ``layer`` from examples (X, Y) of the function it stands for, and on what ground.

    held-out quantile: at most ``fraction`` of all inputs have a relative error above ``tolerance``. held-out mean:
    the root mean square error is at most ``mean_tolerance``, given bounds on the teacher's rows and on tokens.
    identifiability: the Jacobian on ``sequences`` of the examples (default: five times the counting floor) has full
    rank; for large layers by at most ``steps`` of Lanczos' method. distance to the truth: the exact solution is
    within ``tolerance``. error bars: how far each head may be off under noise. what is determined: which part of
    each head these inputs determine to ``tolerance``. non-degeneracy: the first paper's conditions.
    A layer in factors, of any form, gets the same claims: identifiability is then about all its factors, up to what
    the form leaves free, and the last four stay undecided unless its scores are plain. Of linear scores it is
    about the operator, one more claim says whether fewer heads could compute it, and the last four stay undecided.
    Each claim holds, does not, or is undecided. ``seen`` is what the layer was learned from: the examples, or their
    ``hashes()``, and a single sequence of them is refused; or their ``digest()``, and only all of them are.

    Without those bounds the mean is that of errors cut off at a stated size, and the part beyond it is bounded.
    Held-out claims hold at every number of examples: ``so_far`` is an earlier certificate of the same layer, to
    whose sequences these are added, each counted once. With a ``Fit`` in place of the layer, what its learner set
    aside as outliers is held against them.

    >>> from headway.core.sources import draw
    >>> truth = AttentionLayer.random(heads=2, width=4, seed=0)
    >>> found = certify(truth, draw(truth, count=600, length=4, seed=5))
    >>> found.established("held-out quantile"), found.established("identifiability")
    (True, True)
    """
    layer, aside, noise = _unpacked(layer)
    _check(layer, examples)
    before = _before(so_far)
    hashes = examples.hashes()
    if seen is not None:
        _refuse_seen(examples, seen, hashes)
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
    found = errors(layer.to("cpu"), examples, before, hashes)
    claims = [quantile_claim(found, confidence, fraction, tolerance, aside),
              mean_claim(found, confidence, mean_tolerance, teacher_bound, token_bound, aside)]
    claims = [claim if claim.holds == Verdict.YES else replace(claim, reason=claim.reason + noise)
              for claim in claims]
    if isinstance(layer, AttentionLayer) and layer.linear:
        claims += linear.claims(layer, examples, sequences)
    elif isinstance(layer, AttentionLayer):
        claims += _of_matrices(layer, examples, sequences, confidence, draw, steps, tolerance)
    else:
        claims += _of_factors(layer.to(torch.float64), examples, sequences, confidence, draw, steps, tolerance)
    settings: dict[str, Any] = {
        "sequences": len(examples), "length": examples.length, "width": examples.width, "heads": layer.heads,
        "tolerance": tolerance, "fraction": fraction, "mean_tolerance": mean_tolerance, "seed": seed,
        "counted": len(found), "outliers": aside, "teacher_bound": teacher_bound, "token_bound": token_bound}
    if isinstance(layer, FactoredLayer):
        settings["form"] = layer.form.describe()
    return Certificate(tuple(claims), confidence, settings, found)


def _unpacked(fit: AttentionLayer | FactoredLayer | Fit) -> tuple[AttentionLayer | FactoredLayer, float, str]:
    """The layer, the part of its own sequences that its learner set aside, and what to say of noise it found."""
    if not isinstance(fit, Fit):
        return fit, 0.0, ""
    noise = fit.stats.get("noise") if fit.status.kind == "noise" else None
    said = f"; the learner found label noise of {noise:.1e} of their deviation, and it counts" if noise else ""
    return fit.layer, fit.stats.get("outliers", 0) / max(fit.stats.get("examples", 1), 1), said


def _before(so_far: Certificate | None) -> Errors | None:
    if so_far is None:
        return None
    if not isinstance(so_far, Certificate) or so_far.held_out is None:
        checks.refuse("so_far", "a certificate with the errors it counted", "one without" if isinstance(
            so_far, Certificate) else type(so_far).__name__, "what hw.certify or Run.certificate() returned")
    return so_far.held_out


def _of_matrices(
    layer: AttentionLayer, examples: Examples, sequences: int | None, confidence: float, draw: torch.Generator,
    steps: int, tolerance: float,
) -> list[Claim]:
    """What the Jacobian in (Θ, u, W, c) says, and the conditions."""
    small = parameters(layer) <= DENSE
    ranks = (None, None) if small else (low_ranks(layer), low_out_ranks(layer))
    basis = sample(layer, examples, sequences, torch.float64, *ranks)

    def look(at: Sample) -> Spectrum:
        return Spectrum.of(at, confidence, draw, steps)

    spectrum = cache(lambda: look(basis))
    first = identifiability(layer, examples, basis, spectrum)
    newton = Newton(basis, spectrum())
    tried = Tried.of(basis, newton, draw)
    if small:
        near = [radius(basis, tolerance), error_bars(_more(basis, examples, sequences), confidence)]
    elif first.holds == Verdict.YES:
        more = _more(basis, examples, sequences)
        seen = tried if more is basis else Tried.of(more, Newton(more, look(more)), draw)
        near = [radius_by_products(basis, spectrum(), tolerance, look),
                error_bars_by_products(more, seen, confidence)]
    else:
        near = _unsaid(*2 * ("the parameters are not known to be determined by these examples",))[:2]
    return [first, *near, determined(basis, newton, tried, tolerance, draw), _conditions(layer)]


def _more(basis: Sample, examples: Examples, sequences: int | None) -> Sample:
    """As many examples as it takes to tell noise from what answers to the inputs, unless a number was asked for."""
    rows = basis.problem.rows
    if sequences is not None or rows >= ROWS or basis.sequences == len(examples):
        return basis
    return sample(basis.layer, examples, math.ceil(1.2 * ROWS * basis.sequences / max(rows, 1)), torch.float64,
                  basis.ranks, basis.out_ranks)


def _of_factors(
    layer: FactoredLayer, examples: Examples, sequences: int | None, confidence: float, draw: torch.Generator,
    steps: int, tolerance: float,
) -> list[Claim]:
    """What the Jacobian in the factors says; plain scores multiply out, and the rest is said of Θ_i and W_i."""
    small = unknowns(layer) <= DENSE
    if layer.multiplies_out and not small:
        return _of_matrices(layer.dense(), examples, sequences, confidence, draw, steps, tolerance)
    first = Claim(NAME, "The factors are determined, to first order, up to what the form leaves free", "–",
                  Verdict.UNDECIDED, f"the layer has {unknowns(layer)} numbers in its factors: its Jacobian's "
                  f"kernel is counted up to {DENSE}, and larger Jacobians are bounded by products for {PLAIN} only")
    if small:
        first = identified(triangle(layer, examples, sequences), examples)
    if layer.multiplies_out:
        dense = layer.dense()
        return [first, *_of_matrices(dense, examples, sequences, confidence, draw, steps, tolerance)[1:]]
    here = f"({layer.form.describe()}{', keys of another sequence' if layer.cross else ''} here)"
    near = _unsaid("it takes a bound on how fast the Jacobian changes, and Headway has one for "
                   f"{PLAIN} only {here}",
                   f"they are computed in one matrix Θ_i a head, for {PLAIN} only {here}")
    return [first, *near, Claim("non-degeneracy", CONDITIONS, "–", Verdict.UNDECIDED,
                                f"it is not asked here: the conditions are measured for {PLAIN} only {here}")]


def _unsaid(distance: str, bars: str) -> list[Claim]:
    """The claims that need a Jacobian in (Θ, u, W, c), and why they are not made."""
    return [Claim("distance to the truth", "The layer that made the labels is near this one", "–",
                  Verdict.UNDECIDED, distance),
            Claim("error bars", "Errors per head", "–", Verdict.UNDECIDED, bars),
            Claim("what is determined", "Directions of each head that these inputs determine", "–",
                  Verdict.UNDECIDED, bars)]


def _check(layer: AttentionLayer | FactoredLayer, examples: Examples) -> None:
    if not isinstance(layer, (AttentionLayer, FactoredLayer)):
        checks.refuse("layer", "a Fit, an AttentionLayer or a FactoredLayer", type(layer).__name__,
                      "headway.core.layer.load_layer(path)")
    if not isinstance(examples, Examples):
        checks.refuse("examples", "an Examples object", type(examples).__name__, "headway.Examples(X, Y)")
    if len(examples) < 2:
        checks.refuse("examples", "at least 2 sequences", len(examples), "more; 500 support a 1 % quantile at 99 %")
    if isinstance(layer, AttentionLayer):
        keys_of_their_own(examples)
    if (examples.width, examples.out_width) != (layer.width, layer.out_width):
        checks.refuse("examples", f"width {layer.width} → {layer.out_width}, as the layer",
                      f"{examples.width} → {examples.out_width}", "examples of the function the layer stands for")
    if isinstance(layer, FactoredLayer):
        _check_form(layer, examples)
    elif examples.mask != layer.mask:
        checks.refuse("examples", f"mask {layer.mask!r}, as the layer", repr(examples.mask),
                      "examples with its mask")


def _check_form(layer: FactoredLayer, examples: Examples) -> None:
    """Refuse examples that lack what the form reads, or that see less than it does."""
    given = examples.take([0]).beside()
    keys = given.get("keys")
    if layer.cross != (keys is not None):
        checks.refuse("examples", "keys of another sequence, as the layer" if layer.cross else
                      "sequences that are their own keys, as for the layer", "none" if layer.cross else "keys",
                      "headway.Examples(X, Y, keys=Z)" if layer.cross else "headway.Examples(X, Y)")
    if keys is not None and keys.shape[2] != layer.key_width:
        checks.refuse("examples", f"keys of width {layer.key_width}, as the layer", keys.shape[2],
                      "examples of the function the layer stands for")
    if examples.mask == "causal" and not layer.form.sight.causal:
        checks.refuse("examples", f"mask 'none', as the layer's form ({layer.form.describe()})", "'causal'",
                      "examples of the function the layer stands for")
    if not layer.form.uses_positions:
        return
    vectors = None if layer.form.rotary is None else layer.form.rotary.vectors
    for name in ("positions", "key_positions") if layer.cross else ("positions",):
        found = given.get(name)
        if found is None and vectors is not None and (layer.positions is None or name == "key_positions"):
            checks.refuse("examples", f"{name} of {vectors} numbers for every token, which the form reads", "none",
                          f"headway.Examples(…, {name}=…)")
        if found is None and name == "positions" and layer.positions is not None and (
                len(layer.positions) < examples.length):
            checks.refuse("examples", f"positions, or at most {len(layer.positions)} tokens, as many as the layer "
                          "has positions for", f"{examples.length} tokens", "headway.Examples(…, positions=…)")
        if found is not None and (found.ndim == 3, found.shape[2:]) != (
                vectors is not None, () if vectors is None else (vectors,)):
            each = "one number" if vectors is None else f"{vectors} numbers"
            checks.refuse("examples", f"{name} of {each} for every token, as the form reads",
                          f"shape {(len(examples), *found.shape[1:])}", f"headway.Examples(…, {name}=…)")


def _refuse_seen(
    examples: Examples, seen: Examples | Collection[int] | np.ndarray | Tensor | str, hashes: np.ndarray
) -> None:
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
    again = np.flatnonzero(np.isin(hashes, known))
    if again.size:
        checks.refuse("examples", "examples the learner did not use",
                      f"{again.size} of {len(examples)} sequences that it was fitted to (same hash), the first at "
                      f"index {again[0]}", "fresh ones: error on fitted examples says nothing about others")


def _conditions(layer: AttentionLayer) -> Claim:
    numbers = conditions.measure(layer.Theta, layer.W)
    failing = conditions.broken(numbers)
    return Claim("non-degeneracy", CONDITIONS,
                 "the kinds of condition are the paper's, the bounds Headway's",
                 Verdict.NO if failing else Verdict.YES,
                 "; ".join(failing) or ", ".join(f"{name} {value:.2g}" for name, value in numbers.items()), numbers)
