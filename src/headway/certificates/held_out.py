"""Error on inputs the layer has not seen: what n fresh examples allow to say about all the others.

Both claims are about e = ‖Y − F(X)‖_F/√(entries), the root mean square error of one sequence, under the law the
examples were drawn from; neither needs to know that law. Both hold at every n at once (``betting``), so that more
examples may be added for as long as one likes.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headway.certificates import betting
from headway.core import checks
from headway.core.examples import Examples
from headway.core.factored import FactoredLayer
from headway.core.freedom import value_bias_shows
from headway.core.layer import AttentionLayer
from headway.core.measured import Errors, fingerprint, uncounted
from headway.core.results import Claim, Verdict

BATCH = 512
CHUNK = 1 << 24  # numbers in the patterns of one batch, where sequences are long
FIRST = 16  # sequences whose labels say what tolerances are parts of
CLIP = 5.0  # an error counts up to so many times the mean that is allowed
FRESH = ("the examples are independent draws from the law in question, in an order that nobody chose by looking; "
         "the layer, the fraction and the confidence were fixed before they were seen. An error is the distance "
         "from the label as it is given, its noise included, as float64 computes it. The claim holds at every "
         "number of examples, so more may be added at will")


def errors(
    layer: AttentionLayer | FactoredLayer, examples: Examples, before: Errors | None = None,
    hashes: np.ndarray | None = None,
) -> Errors:
    """One pass over the examples in float64, each called with the keys, positions and filling it has.

    ``before``: the errors of this layer on earlier ones, to which those not counted yet are added.
    """
    layer = layer.to(torch.float64)
    own = fingerprint(layer)
    hashes = examples.hashes() if hashes is None else hashes
    if before is not None and before.layer != own:
        checks.refuse("so_far", "a certificate of this layer", "one of another", "so_far=None, from the start")
    new = torch.from_numpy(np.ones(len(hashes), bool) if before is None else uncounted(before.hashes, hashes))
    each: list[Tensor] = []
    widest, boolean, start = 0.0, True, 0
    first = examples.take([0])
    pairs = layer.heads * examples.length * (first.X if first.keys is None else first.keys).shape[1]
    for batch in examples.batches(max(1, min(BATCH, CHUNK // pairs))):
        some = new[start : start + len(batch)]
        start += len(batch)
        if not bool(some.any()):
            continue
        batch = batch if bool(some.all()) else batch.take(some.nonzero().flatten())
        X, Y = batch.X.double().cpu(), batch.Y.double().cpu()
        given = {name: value.cpu() for name, value in batch.arguments().items()}
        if batch.keys is not None:
            given["Z"] = given["Z"].double()
        keep = _real(X, batch.padding)
        wrong = (layer(X, **given) - Y).square().sum(2) * keep
        each.append((wrong.sum(1) / (keep.sum(1) * Y.shape[2])).sqrt())
        tokens = X[keep] if batch.keys is None else given["Z"][_real(given["Z"], batch.key_padding)]
        widest = max(widest, float(tokens.norm(dim=1).max()))
        boolean = boolean and bool((tokens.abs() == 1).all())
    kept = hashes[new.numpy()]
    keys = max(examples.length, 1 if before is None else before.keys)
    if before is not None:
        widest, boolean = max(widest, before.widest), boolean and before.boolean
        return replace(before, each=torch.cat([before.each, *each]), hashes=np.concatenate([before.hashes, kept]),
                       widest=widest, boolean=boolean, row_bound=row_bound(layer, widest, keys), keys=keys)
    size = min(FIRST, len(examples))
    return Errors(torch.cat(each), _deviation(examples.take(range(size))), widest, boolean,
                  row_bound(layer, widest, keys), examples.out_width,
                  "tokens" if first.keys is None else "keys", row_bound(layer, 0.0), size, own, kept,
                  keys, 3 if isinstance(layer, AttentionLayer) and layer.linear else 1)


def _deviation(first: Examples) -> float:
    """Of labels from their mean."""
    Y = first.Y.double().cpu()[_real(first.X, first.padding)]
    return max(float((Y - Y.mean(0)).square().mean().sqrt()), 1e-150)


def _real(X: Tensor, padding: Tensor | None) -> Tensor:
    """Which rows are no filling: bool (n, k)."""
    return torch.ones(X.shape[:2], dtype=torch.bool) if padding is None else ~padding.cpu()


def row_bound(layer: AttentionLayer | FactoredLayer, R: float, keys: int = 1) -> float:
    """No output row is longer, for tokens (keys, where they come from another sequence) no longer than R.

    What a head hands on is in the hull of the v_b, so ‖Σ_b P v_b O_i‖ ≤ max_b ‖v_bO_i‖ ≤ R‖V_jO_i‖ + ‖b_jO_i‖. A
    sink shrinks it; where patterns add up to 1 the biases join the offset. A gate in (0, 1) shrinks every channel
    by itself, and ‖(g ⊙ h)O_i‖ ≤ ‖h‖‖O_i‖ is all that is left. Without a softmax there are ``keys`` weights of at
    most R²‖Θ_i‖ each, or as many divided by their number.
    """
    if isinstance(layer, AttentionLayer) and layer.linear:
        sizes = [torch.linalg.matrix_norm(part.double().cpu(), 2) for part in (layer.Theta, layer.W)]
        c = 0.0 if layer.offset is None else float(layer.offset.double().norm())
        return float(R**3 * (sizes[0] * sizes[1]).sum()) * (1 if layer.scores == "linear/k" else keys) + c
    if isinstance(layer, AttentionLayer):
        W, own = layer.W.cpu(), torch.zeros(1, dtype=torch.float64)
        offset = own if layer.offset is None else layer.offset.cpu()
    else:
        V, out = layer.value.cpu().repeat_interleave(layer.heads // layer.groups, 0), layer.out.cpu()
        offset = out.new_zeros(layer.out_width) if layer.offset is None else layer.offset.cpu()
        if layer.form.gate is not None:
            longest = R * torch.linalg.matrix_norm(V[:, :-1], 2) + V[:, -1].norm(dim=1)
            return float((longest * torch.linalg.matrix_norm(out, 2)).sum() + offset.norm())
        W, biases = V[:, :-1] @ out, torch.einsum("mp,mpe->me", V[:, -1], out)
        shows = value_bias_shows(layer.form)
        own = biases.norm(dim=1) if shows else biases.new_zeros(1)
        offset = offset if shows else offset + biases.sum(0)
    return float(R * torch.linalg.matrix_norm(W, 2).sum() + own.sum() + offset.norm())


def _verdict(yes: bool, no: bool) -> Verdict:
    return Verdict.YES if yes else Verdict.NO if no else Verdict.UNDECIDED


def quantile_claim(
    found: Errors, confidence: float, fraction: float, tolerance: float, aside: float = 0.0
) -> Claim:
    """At most ``fraction`` of all inputs have an error above t, t an order statistic of the sample.

    Let q be the least t with P(e > t) ≤ f. If t = e_(n − S) is below q, no more than S errors are q or more, of
    which there are at least a part f among all inputs: a bet against that on the fixed event {e ≥ q} has then won
    1/δ, if S is the largest count at which it has. That happens, at any n, with probability δ at most, whatever the
    law and however the tolerance came about. The bound on how many exceed the tolerance is a bet on {e > tolerance}
    for the sequences that did not set it.

    ``aside``: the part of its own sequences that the learner set aside because their labels stood out. Nothing is
    set aside here; where fewer such sequences are among these than that part makes expect, the missing ones are
    counted.
    """
    e, n = found.each.sort().values, len(found)
    goal = tolerance * found.deviation
    above = int((found.each > goal).sum())
    missing = max(0, round(aside * n) - above)
    later = found.later
    over = int((later > goal).sum())
    numbers = {"sequences": float(n), "confidence": confidence, "tolerance": goal, "largest": float(e[-1]),
               "above": float(above),
               "at_most_above": betting.upper_share(min(over + missing, len(later)), len(later), confidence)}
    statement = (f"At most {fraction:.3g} of all inputs have an error above {{}} ({tolerance:.1e} of the labels' "
                 f"deviation is allowed), with confidence {confidence:g}")
    name, some = "held-out quantile", betting.most_above(n, fraction, confidence)
    if some < 0:
        need = betting.needed(fraction, confidence)
        return Claim(name, statement.format("t"), FRESH, Verdict.UNDECIDED,
                     f"{n} sequences cannot support it, {need} can. What they do support: {above} of them are "
                     f"above what is allowed, and so are at most {numbers['at_most_above']:.2g} of all inputs"
                     + _counted(missing, aside),
                     {**numbers, "needed": float(need)})
    bound = float(e[n - some + missing - 1]) if some >= missing else math.inf
    fewest = betting.least_above(n, fraction, confidence)
    numbers["at_least"] = float(e[n - fewest]) if fewest <= n else 0.0
    if bound < math.inf:
        numbers["bound"] = bound
    holds = _verdict(bound <= goal, numbers["at_least"] > goal)
    reason = {Verdict.YES: f"the {n - some + missing}-th smallest of {n} errors is {bound:.1e}",
              Verdict.NO: f"with the same confidence more than {fraction:.3g} exceed {numbers['at_least']:.1e}",
              Verdict.UNDECIDED: f"the quantile is between {numbers['at_least']:.1e} and "
                                 f"{'any size' if bound == math.inf else f'{bound:.1e}'}"}[holds]
    if above or missing:
        reason += (f"; {above} of the {n} sequences are above what is allowed, and so are at most "
                   f"{numbers['at_most_above']:.2g} of all inputs")
    return Claim(name, statement.format("any bound" if bound == math.inf else f"{bound:.1e}"), FRESH, holds,
                 reason + _counted(missing, aside), numbers)


def _counted(missing: int, aside: float) -> str:
    return "" if not missing else (
        f"; the learner set {aside:.2g} of its own sequences aside as outliers, fewer are among these, and "
        f"{missing} more {'is' if missing == 1 else 'are'} counted")


def mean_claim(
    found: Errors, confidence: float, tolerance: float, teacher_bound: float | None, token_bound: float | None,
    aside: float = 0.0,
) -> Claim:
    """E[min(e, b)²] ≤ b²U and so P(e ≥ b) ≤ U, with U a bound on the mean of z = min(e, b)²/b² in [0, 1].

    b is ``CLIP`` times the mean allowed, a part of the labels' deviation in the first sequences: given these, it is
    fixed, and z of the others are independent of it, with one law. One bet gives both bounds, by Markov's
    inequality 1{e ≥ b} ≤ z, and no confidence is divided. Without b nothing can be said: a mean may hide one huge
    error that no sample shows. With ``teacher_bound``, that no output row of the teacher is longer, no error is
    larger than B = (teacher_bound + longest row of this layer)/√e, which follows from how long tokens are: then b =
    B, no error exceeds it and the mean is that of all errors. ``aside`` as in ``quantile_claim``: missing ones
    count as b.
    """
    goal = tolerance * found.deviation
    R = token_bound if token_bound is not None else found.widest if found.boolean else None
    if teacher_bound is None or R is None:
        missing = "teacher_bound (how long an output row of the teacher can be)" if teacher_bound is None else (
            f"token_bound (how long a {'token' if found.tokens == 'tokens' else 'key'} can be)")
        tail = "" if teacher_bound is None else f"; pass {missing} for all of an error"
        return _clipped(found, confidence, tolerance, aside, tail)
    B = (teacher_bound + found.longest(R)) / math.sqrt(found.out_width)
    given = " (they are ±1)" if found.boolean and token_bound is None else ""
    assumption = (f"{FRESH}; output rows of the teacher are no longer than {teacher_bound:g}, {found.tokens} no "
                  f"longer than {R:.3g}{given}")
    statement = (f"The root mean square error over all inputs is at most {{}} ({tolerance:.1e} of the labels' "
                 f"deviation is allowed), with confidence {confidence:g}")
    wrong = (f"a {found.tokens.removesuffix('s')} is {found.widest:.3g} long" if found.widest > R * (1 + 1e-12) else
             f"an error is {float(found.each.max()):.3g}, and none could exceed {B:.3g}"
             if float(found.each.max()) > B else "")
    if wrong:
        return Claim("held-out mean", statement.format("…"), assumption, Verdict.UNDECIDED,
                     f"the bounds given do not hold of these examples: {wrong}",
                     {"sequences": float(len(found)), "confidence": confidence, "tolerance": goal})
    claim = _mean(found.each.numpy(), B, confidence, goal, aside, statement, assumption)
    return replace(claim, numbers={**claim.numbers, "largest_possible": B})


def _clipped(found: Errors, confidence: float, tolerance: float, aside: float, tail: str) -> Claim:
    """The mean of min(e, b)², and how many are above b."""
    goal = tolerance * found.deviation
    b = CLIP * goal
    statement = (f"The root mean square of min(error, {b:.1e}) over all inputs is at most {{}} ({tolerance:.1e} of "
                 "the labels' deviation is allowed) and at most {share} of them have a larger error, with "
                 f"confidence {confidence:g}")
    if not len(found.later):
        return Claim("held-out mean", statement.format("…", share="…"), FRESH, Verdict.UNDECIDED,
                     f"the first {found.first} sequences only say what the labels' deviation is; more are needed",
                     {"sequences": 0.0, "confidence": confidence, "tolerance": goal, "clip": b})
    claim = _mean(found.later, b, confidence, goal, aside, statement,
                  f"{FRESH}; the first {found.first} sequences say what the labels' deviation is, and are left out")
    share = (claim.numbers["bound"] / b) ** 2
    return replace(claim, reason=claim.reason + tail, numbers={**claim.numbers, "clip": b, "at_most_above": share})


def _mean(
    e: np.ndarray, b: float, confidence: float, goal: float, aside: float, statement: str, assumption: str
) -> Claim:
    """About E[min(e, b)²]: ``statement`` takes its root, and ``share`` of those above b."""
    z = np.minimum((np.minimum(e, b) / b) ** 2, 1.0)
    clipped, n = int((e > b).sum()), len(e)
    missing = max(0, round(aside * n) - clipped)
    counted = np.concatenate([np.sort(z)[missing:], np.ones(missing)])
    U, L = betting.upper(counted, confidence), betting.lower(z, confidence)
    sample, bound = b * math.sqrt(float(z.mean())), b * math.sqrt(U)
    numbers = {"sequences": float(n), "confidence": confidence, "mean_square": sample**2, "tolerance": goal,
               "bound": bound, "at_least": b * math.sqrt(L), "above": float(clipped)}
    holds = _verdict(bound <= goal, numbers["at_least"] > goal)
    reason = f"the sample's is {sample:.1e}, the bound {bound:.1e}"
    if clipped:
        reason += f"; {clipped} of {n} sequences are above {b:.1e}"
    if holds == Verdict.UNDECIDED:
        needed = betting.to_decide(counted, min((goal / b) ** 2, 0.5), confidence)
        reason += f"; about {needed:.2g} sequences like these would decide" if needed < math.inf else ""
    return Claim("held-out mean", statement.format(f"{bound:.1e}", share=f"{U:.2g}"), assumption, holds,
                 reason + _counted(missing, aside), numbers)
