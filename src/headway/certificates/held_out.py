"""Error on inputs the layer has not seen: what n fresh examples allow to say about all the others.

Both claims are about e = ‖Y − F(X)‖_F/√(entries), the root mean square error of one sequence, under the law the
examples were drawn from; neither needs to know that law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy import special
from torch import Tensor

from headway.core.examples import Examples
from headway.core.factored import FactoredLayer
from headway.core.freedom import value_bias_shows
from headway.core.layer import AttentionLayer
from headway.core.results import Claim, Verdict

BATCH = 512
CHUNK = 1 << 24  # numbers in the patterns of one batch, where sequences are long
FRESH = "the examples are independent draws from the law in question, and the layer was fixed before they were seen"


@dataclass(frozen=True)
class Errors:
    """Root mean square error of each sequence, the labels' deviation, and bounds on what an error can be."""

    each: Tensor  # (n,), ascending
    deviation: float  # of the labels from their mean
    widest: float  # largest norm of a token, or of a key where keys come from another sequence
    boolean: bool  # all of them ±1
    row_bound: float  # no output row of this layer is longer, for tokens (keys) no longer than ``widest``
    out_width: int
    tokens: str = "tokens"  # what these bounds are about
    degree: int = 1  # the power of their length with which rows grow


def errors(layer: AttentionLayer | FactoredLayer, examples: Examples) -> Errors:
    """One pass over the examples in float64, each called with the keys, positions and filling it has."""
    layer = layer.to(torch.float64)
    each: list[Tensor] = []
    total = count = 0.0
    label = torch.zeros(examples.out_width, dtype=torch.float64)
    widest, boolean = 0.0, True
    first = examples.take([0])
    pairs = layer.heads * examples.length * (first.X if first.keys is None else first.keys).shape[1]
    for batch in examples.batches(max(1, min(BATCH, CHUNK // pairs))):
        X, Y = batch.X.double().cpu(), batch.Y.double().cpu()
        given = {name: value.cpu() for name, value in batch.arguments().items()}
        if batch.keys is not None:
            given["Z"] = given["Z"].double()
        keep = _real(X, batch.padding).double()
        wrong = (layer(X, **given) - Y).square().sum(2) * keep
        each.append((wrong.sum(1) / (keep.sum(1) * Y.shape[2])).sqrt())
        total += float((Y.square().sum(2) * keep).sum())
        label += (Y * keep.unsqueeze(2)).sum((0, 1))
        count += float(keep.sum())
        tokens = X[keep.bool()] if batch.keys is None else given["Z"][_real(given["Z"], batch.key_padding)]
        widest = max(widest, float(tokens.norm(dim=1).max()))
        boolean = boolean and bool((tokens.abs() == 1).all())
    deviation = math.sqrt(max(total / count - float((label / count).square().sum()), 1e-300) / examples.out_width)
    cubic = isinstance(layer, AttentionLayer) and layer.linear
    return Errors(torch.cat(each).sort().values, deviation, widest, boolean,
                  row_bound(layer, widest, examples.length), examples.out_width,
                  "tokens" if first.keys is None else "keys", 3 if cubic else 1)


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


def binomial_below(k: int, n: int, success: float) -> float:
    """P(Bin(n, success) ≤ k), as an incomplete beta function: 0 ≤ k ≤ n."""
    return 1.0 if k >= n else float(special.betainc(n - k, k + 1, 1.0 - success))


def binomial_quantile(p: float, n: int, success: float) -> int:
    """The least k with P(Bin(n, success) ≤ k) ≥ p, by bisection."""
    low, high = -1, n  # P(Bin ≤ low) < p ≤ P(Bin ≤ high)
    while high - low > 1:
        k = (low + high) // 2
        low, high = (low, k) if binomial_below(k, n, success) >= p else (k, high)
    return high


def _verdict(yes: bool, no: bool) -> Verdict:
    return Verdict.YES if yes else Verdict.NO if no else Verdict.UNDECIDED


def quantile_claim(found: Errors, confidence: float, fraction: float, tolerance: float) -> Claim:
    """At most ``fraction`` of all inputs have an error above t, t an order statistic of the sample.

    The number of sample errors below the (1 − fraction)-quantile is binomial whatever the law, so the r-th smallest
    is above that quantile with probability P(Bin(n, 1 − fraction) < r).
    """
    e, n = found.each, len(found.each)
    goal = tolerance * found.deviation
    numbers = {"sequences": float(n), "confidence": confidence, "tolerance": goal, "largest": float(e[-1]),
               "beyond_largest": 1.0 - (1.0 - confidence) ** (1.0 / n)}
    statement = (f"At most {fraction:.3g} of all inputs have an error above {{}} ({tolerance:.1e} of the labels' "
                 f"deviation is allowed), with confidence {confidence:g}")
    rank = binomial_quantile(confidence, n, 1.0 - fraction) + 1
    if rank > n:
        need = math.ceil(math.log(1.0 - confidence) / math.log(1.0 - fraction))
        return Claim("held-out quantile", statement.format("t"), FRESH, Verdict.UNDECIDED,
                     f"{n} sequences cannot support it, {need} can. What they do support: at most "
                     f"{numbers['beyond_largest']:.2g} of all inputs have an error above {float(e[-1]):.1e}",
                     {**numbers, "needed": float(need)})
    bound = float(e[rank - 1])
    low = binomial_quantile(1.0 - confidence, n, 1.0 - fraction)  # P(Bin ≥ low) ≥ confidence
    numbers["bound"] = bound
    numbers["at_least"] = float(e[low - 1]) if low >= 1 else 0.0
    holds = _verdict(bound <= goal, numbers["at_least"] > goal)
    reason = {Verdict.YES: f"the {rank}-th smallest of {n} errors is {bound:.1e}",
              Verdict.NO: f"with the same confidence more than {fraction:.3g} exceed {numbers['at_least']:.1e}",
              Verdict.UNDECIDED: f"the quantile is between {numbers['at_least']:.1e} and {bound:.1e}"}[holds]
    return Claim("held-out quantile", statement.format(f"{bound:.1e}"), FRESH, holds, reason, numbers)


def mean_claim(
    found: Errors, confidence: float, tolerance: float, teacher_bound: float | None, token_bound: float | None
) -> Claim:
    """E[e²] ≤ mean + √(2V ln(2/δ)/n) + 7B ln(2/δ)/(3(n − 1)), B a bound on e² (Maurer and Pontil).

    How long a row of this layer can be follows from how long tokens are (``row_bound``); how long a row of the
    teacher may be has to be given.
    """
    z, n = found.each.square(), len(found.each)
    goal = (tolerance * found.deviation) ** 2
    name = "held-out mean"
    statement = (f"The root mean square error over all inputs is at most {{}} ({tolerance:.1e} of the labels' "
                 f"deviation is allowed), with confidence {confidence:g}")
    numbers = {"sequences": float(n), "confidence": confidence, "mean_square": float(z.mean()),
               "tolerance": math.sqrt(goal)}
    R = token_bound if token_bound is not None else found.widest if found.boolean else None
    if teacher_bound is None or R is None:
        missing = "teacher_bound (how long an output row of the teacher can be)" if teacher_bound is None else (
            f"token_bound (how long a {'token' if found.tokens == 'tokens' else 'key'} can be)")
        return Claim(name, statement.format("…"), FRESH, Verdict.UNDECIDED,
                     f"an error must be known to be bounded, and nothing says so: pass {missing}", numbers)
    longer = max(1.0, R / max(found.widest, 1e-300)) ** found.degree
    B = (teacher_bound + found.row_bound * longer) ** 2 / found.out_width
    log = math.log(2.0 / (1.0 - confidence))
    width = math.sqrt(2.0 * float(z.var()) * log / n) + 7.0 * B * log / (3.0 * (n - 1)) if n > 1 else math.inf
    upper, lower = float(z.mean()) + width, float(z.mean()) - width
    numbers |= {"bound": math.sqrt(upper), "largest_possible": math.sqrt(B)}
    given = " (they are ±1)" if found.boolean and token_bound is None else ""
    assumption = (f"{FRESH}; output rows of the teacher are no longer than {teacher_bound:g}, {found.tokens} no "
                  f"longer than {R:.3g}{given}")
    holds = _verdict(upper <= goal, lower > goal)
    reason = f"the sample's is {math.sqrt(float(z.mean())):.1e}, the bound {math.sqrt(upper):.1e}"
    if holds == Verdict.UNDECIDED:
        needed = math.ceil(7.0 * B * log / (3.0 * max(goal - float(z.mean()), 1e-300)))
        reason += f"; about {needed:.2g} sequences would decide" if goal > float(z.mean()) else ""
    return Claim(name, statement.format(f"{math.sqrt(upper):.1e}"), assumption, holds, reason, numbers)
