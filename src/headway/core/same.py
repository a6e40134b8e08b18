"""Are two attention layers one function? If not, by which mistake, and where does it show most?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.core import causes, checks, gauge, inputs, operator, sides
from headway.core.examples import Examples
from headway.core.factored import FactoredLayer
from headway.core.layer import AttentionLayer
from headway.core.match import Match, match, match_heads, with_bias
from headway.core.sides import Side

TOLERANCE = 1e-9  # relative: weights that differ by less are called equal
ROUNDINGS = 64  # units of rounding by which two ways to compute one answer may differ
FEW_ROUNDINGS = 16  # of half precision: 64 of them would be half of all there is to see
UNSEEN = 1e-14  # of the answers' spread: less is the arithmetic
GONE = 0.05  # of the difference: what a correction may leave, and no more than rounding
HELPS = 0.7  # of the difference: a correction that leaves less is tried together with others
PAIRS = 3  # corrections that are
ALIKE = 4.0  # a factor: differences of one size, where both are rounding
NUDGE, ERRATIC = 0.25, 0.3  # tokens moved by this part of a rounding change roundings by more than this part
SPREAD_OUT = 0.1  # of the largest relative change of a row or column: what is less has not been rounded
KINDS = ("same", "same up to head order", "differs")


@dataclass(frozen=True)
class Comparison:
    """Whether two layers are one function for every input, up to the order of heads."""

    same: bool
    largest: float  # relative difference of a part, inf where a head has no partner; of answers, if by inputs
    where: str
    match: Match | None  # of heads, where the weights of both are known
    kind: str = "same"  # same, same up to head order, differs
    by: str = "weights"  # or "inputs", where those of one side are not known
    cause: str | None = None  # one of ``headway.core.causes.CAUSES``, or two with "and" between
    why: str | None = None  # the cause in a sentence
    difference: float = 0.0  # of the answers to ``example``, of their spread
    example: Tensor | None = None  # X (k, d), on which they were found to differ most
    example_keys: Tensor | None = None  # Z (l, z), where keys come from another sequence
    example_positions: Tensor | None = None

    def __str__(self) -> str:
        first = {"same": "The same function", "same up to head order": "The same function up to the order of heads",
                 "differs": "Different functions"}[self.kind]
        first = "No difference found" if self.same and self.by == "inputs" else first
        words = f"{first}: {self.where}."
        if self.why is not None:
            words += f" Cause: {self.cause}; {self.why}."
        if not self.same and self.by == "weights" and self.example is None:
            words += " No input was found that shows it."
        if self.example is not None:
            words += (f" On one input of {len(self.example)} tokens the answers differ by {self.difference:.1e} "
                      "times their usual spread.")
        return words


def compare(
    layer_a: Any, layer_b: Any, tolerance: float | None = None, *, on: Examples | None = None,
    heads: int | None = None, width: int | None = None, seed: int = 0,
) -> Comparison:
    """Are F_a and F_b equal for every input, up to the order of heads? If not, by which known mistake?

    Each may be a layer of either kind, a torch module or (model, path), of which the attention that ``from_torch``
    reads is meant, a file that Headway wrote, a checkpoint's layer as (file, number) or "file:number" (with
    ``heads`` where the file does not say), or any function of X (n, k, d). Where the weights of both are known they
    decide: equal heads merged, dead ones dropped, heads paired, all that inputs and outputs can show of a head
    compared relative to its own size, free of gauge. Elsewhere both answer fresh inputs, and "same" is said of
    those. Two layers of linear scores are one function if their operators agree, whatever their heads.

    Where they differ, known mistakes (``headway.core.causes.CAUSES``) are made with one side, one after the other
    and then in pairs; the cause is one that makes the difference vanish. ``example`` is the input, of those tried
    and after a few steps uphill, on which the answers differ most; None where none of them shows it.

    tolerance: 1e-9 for weights; for answers 64 units of the rounding of the coarser side, 16 in half precision. on:
    examples, if only what their tokens visit is to count. width: of the tokens, where neither side says it.

    >>> layer = AttentionLayer.random(heads=3, width=5, seed=0)
    >>> print(compare(layer, AttentionLayer(layer.Theta.flip(0), layer.W.flip(0))))
    The same function up to the order of heads: 3 heads agree exactly.
    >>> compare(layer, AttentionLayer(layer.Theta / 2, layer.W)).cause
    'scale'
    """
    if tolerance is not None:
        checks.number("tolerance", tolerance)
    if width is not None:
        checks.whole("width", width)
    if on is not None and not isinstance(on, Examples):
        checks.refuse("on", "headway.Examples", type(on).__name__, "headway.Examples(X, Y)")
    a, b = sides.read("layer_a", layer_a, heads), sides.read("layer_b", layer_b, heads)
    with torch.no_grad():
        if a.layer is not None and b.layer is not None:
            found = _by_weights(a, b, TOLERANCE if tolerance is None else tolerance, on)
            return found if found.same else _explained(found, a, b, on, width, seed)
        if a.linear is not None and b.linear is not None:
            found = _by_operators(a.linear, b.linear, TOLERANCE if tolerance is None else tolerance, on)
            return found if found.same else _shown(found, a, b, on, width, seed)
        tried = _tried(a, b, on, width, seed)
        one, other = (side(tried[0].one(0)).shape[2] for side in (a, b))
        if one != other:
            checks.refuse("layer_a", f"{other} outputs to a token, as the other", one,
                          "compare functions of one size")
        gap = max(float(inputs.gaps(a, b, part).max()) for part in tried)
        limit = _rounding(a, b) if tolerance is None else tolerance
        count = sum(part.X.shape[0] for part in tried)
        words = f"the largest difference of answers to {count} inputs is {gap:.1e} of their spread"
        if math.isinf(gap):
            words = f"answers to {count} inputs are not all finite numbers"
        elif gap > ROUNDINGS * torch.finfo(torch.float64).eps and gap <= limit and tolerance is None:
            words += f", which the rounding of {_coarser(a, b)} may make"
        found = Comparison(gap <= limit, gap, words, None, "same" if gap <= limit else "differs", "inputs")
        return found if found.same else _explained(found, a, b, on, width, seed)


def _rounding(a: Side, b: Side) -> float:
    eps = max(a.rounding, b.rounding)
    return (ROUNDINGS if eps <= torch.finfo(torch.float32).eps else FEW_ROUNDINGS) * eps


def _coarser(a: Side, b: Side) -> str:
    eps = max(a.rounding, b.rounding)
    return next((name for dtype, name in causes.HALVES.items() if torch.finfo(dtype).eps == eps), "float64")


def _by_weights(a: Side, b: Side, tolerance: float, on: Examples | None) -> Comparison:
    assert a.layer is not None and b.layer is not None
    sizes = [(side.layer.width, side.layer.out_width) for side in (a, b) if side.layer is not None]
    if sizes[0] != sizes[1]:
        checks.refuse("layer_a", "width {} → {}, as the other".format(*sizes[1]), "{} → {}".format(*sizes[0]),
                      "compare layers of one width")
    if a.dense is not None and b.dense is not None and on is None and a.dense.mask == b.dense.mask:
        return _dense(a.dense, b.dense, tolerance)
    whole = [gauge.heads_of(side.layer, on) for side in (a, b) if side.layer is not None]
    strange = gauge.unlike(a.layer, b.layer) or _elsewhere(a.layer, b.layer)
    if strange is not None:
        alike = all((getattr(a.layer.form, part) is None) == (getattr(b.layer.form, part) is None)
                    for part in ("normed", "gate")) and a.layer.key_width == b.layer.key_width
        return Comparison(False, math.inf, strange, match_heads(*whole) if alike else None, "differs")
    (one, at), (other, there) = (gauge.merged(heads, tolerance) for heads in whole)
    found = match_heads(one, other)
    if found.missing or found.excess:
        return _unpaired(found, at, there)
    silent = not any(bool((V @ out.mT).any()) for V, out in (one.values, other.values))
    spots = [(error, f"the {part} of head {at[j] + 1} against head {there[i] + 1}") for part, errors in (
        ("scores (QK)", [] if silent else found.theta_error), ("values (OV)", found.w_error))
        for i, (j, error) in enumerate(zip(found.order, errors, strict=False))]
    spots.append((found.offset_error, "the offset"))
    largest, spot = max(spots)
    same = largest <= tolerance
    where = f"the largest relative difference is {largest:.1e}, in {spot}" if largest else _agreed(other.count)
    moved = sorted(at[found.order[i]] + 1 for i in range(other.count)
                   if max(found.theta_error[i], found.w_error[i]) > tolerance and not silent)
    if not same and len(moved) < other.count:
        where += f"; {other.count - len(moved)} of {other.count} heads agree"
        where += f", not {', '.join(map(str, moved))}" if 0 < len(moved) < 9 else ""
    placed = whole[0].count == whole[1].count and max(max(part) for part in gauge.errors(*whole)) <= tolerance
    return Comparison(same, largest, where, found, _kind(same, placed or list(found.order) == sorted(found.order)))


def _by_operators(a: AttentionLayer, b: AttentionLayer, tolerance: float, on: Examples | None) -> Comparison:
    """Layers of linear scores: what they compute is one operator each, whatever their heads."""
    one, other = ((layer.width, layer.out_width) for layer in (a, b))
    if one != other:
        checks.refuse("layer_a", "width {} → {}, as the other".format(*other), "{} → {}".format(*one),
                      "compare layers of one width")
    heads = [(layer.Theta, layer.W) for layer in (a, b)]
    if on is not None:
        if on.width != a.width:
            checks.refuse("on", f"examples of width {a.width}", f"width {on.width}",
                          "examples of this layer's inputs")
        U = gauge.visited_about_zero(on)
        heads = [(U.mT @ Theta @ U, U.mT @ W) for Theta, W in heads]
    far, (p, q, r, s) = operator.distance(*heads)
    zero = a.W.new_zeros(a.out_width)
    c, own = (zero if layer.offset is None else layer.offset for layer in (a, b))
    size = max(float(c.norm()), float(own.norm()), *(operator.norm(*part) for part in heads))
    shifted = float((c - own).norm()) / size if size > 0 else 0.0
    silent = max(operator.norm(*part) for part in heads) == 0
    unlike = [words for words, differ in (
        (f"mask {a.mask!r} against {b.mask!r}", a.mask != b.mask),
        (f"{a.scores} scores against {b.scores}", a.scores != b.scores)) if differ and not silent]
    if unlike:
        return Comparison(False, math.inf, "; ".join(unlike), None, "differs")
    largest = max(far, shifted)
    same = largest <= tolerance
    ranks = [len(operator.canonical(*part)[0]) for part in heads]
    counts = f"{a.heads} head{'s' * (a.heads != 1)} and {b.heads}"
    if same:
        where = (f"{counts} of linear scores are one operator, of rank {ranks[0]}, to {largest:.1e} of its size; "
                 "single heads are not determined")
    else:
        entry = f", most at features {p + 1}, {q + 1}, {r + 1} to output {s + 1}" if on is None else ""
        where = (f"the operators, of rank {ranks[0]} and {ranks[1]}, differ by {far:.1e} of their size{entry}"
                 if far >= shifted else f"the offsets differ by {shifted:.1e} of what the layers compute")
    return Comparison(same, largest, where, None, KINDS[0] if same else KINDS[2])


def _shown(found: Comparison, a: Side, b: Side, on: Examples | None, width: int | None, seed: int) -> Comparison:
    """With the input that shows it most."""
    tried = _tried(a, b, on, width, seed)
    if max(float(inputs.gaps(a, b, part).max()) for part in tried) <= UNSEEN:
        return found
    example, difference = inputs.worst(a, b, tried, on, seed)
    return replace(found, difference=difference, example=example.X[0])


def _elsewhere(a: FactoredLayer, b: FactoredLayer) -> str | None:
    """Positions that two layers give their tokens, where they are not the same up to a constant (without one where
    keys have positions of their own)."""
    vectors = {inputs.vectors_of(layer) for layer in (a, b)}
    held = [layer.positions for layer in (a, b) if layer.form.uses_positions]
    given = [part.cpu() for part in held if part is not None]
    if not given or len(vectors) > 1 or (len(given) < len(held) and vectors != {None}):
        return None  # vectors that a layer has not come with the call
    count = min(map(len, given))
    places = [part[:count] for part in given] + [torch.arange(count).double()] * (len(held) - len(given))
    if not a.cross:
        places = [part - part[:1] for part in places]
    near = all(torch.allclose(part, places[0], rtol=TOLERANCE, atol=TOLERANCE) for part in places)
    return None if near else "layers that give their tokens other positions"


def _unpaired(found: Match, at: list[int], there: list[int]) -> Comparison:
    words = f"{len(at)} head{'s' if len(at) != 1 else ''} against {len(there)}, merged and without dead ones"
    lost = sorted([there[i] + 1 for i in found.missing] + [at[j] + 1 for j in found.excess])
    if len(lost) < 9:
        words += (f"; without partner: {', '.join(map(str, lost))} of "
                  f"{'the second' if found.missing else 'the first'}")
    return Comparison(False, math.inf, words, found, "differs")


def _agreed(count: int) -> str:
    return f"{count} heads agree exactly" if count != 1 else "1 head agrees exactly"


def _kind(same: bool, ordered: bool) -> str:
    """ordered: each head in its place, or all in order once equal ones are merged and dead ones gone."""
    return KINDS[2] if not same else KINDS[0] if ordered else KINDS[1]


def _dense(layer_a: AttentionLayer, layer_b: AttentionLayer, tolerance: float) -> Comparison:
    """The same for two layers given as Θ and W, entry by entry."""
    a, b = layer_a.canonical(tolerance), layer_b.canonical(tolerance)
    found = match(a, b)
    mine, theirs = _places(a, layer_a), _places(b, layer_b)
    if found.missing or found.excess:
        return _unpaired(found, mine, theirs)
    spots: list[tuple[float, str]] = []
    A, B = with_bias(a), with_bias(b)
    silent = not bool(a.W.any()) and not bool(b.W.any())
    for i, j in enumerate(found.order):
        for name, x, y in (("Θ", A[j], B[i]), ("W", a.W[j].double().cpu(), b.W[i].double().cpu())):
            gap = (x - y).abs()
            at = np.unravel_index(int(gap.argmax()), tuple(gap.shape))
            row, column = int(at[0]), int(at[1])
            part = "u" if name == "Θ" and row == a.width else name
            entry = f"entry {column + 1}" if part == "u" else f"entry ({row + 1}, {column + 1})"
            size = found.w_error[i] if name == "W" else 0.0 if silent else found.theta_error[i]
            spots.append((size, f"{part} of head {mine[j] + 1} against head {theirs[i] + 1}, {entry}, by "
                          f"{float(gap.max()):.1e}"))
    spots.append((found.offset_error, f"the offset, by {found.offset_error:.1e} of its size"))
    largest, where = max(spots)
    same = largest <= tolerance
    where = f"the largest relative difference is {largest:.1e}, in {where}" if largest else _agreed(a.heads)
    placed = layer_a.heads == layer_b.heads and all(
        float((x - y).norm()) <= tolerance * max(float(y.norm()), 1e-300)
        for X, Y in ((with_bias(layer_a), with_bias(layer_b)), (layer_a.W, layer_b.W))
        for x, y in zip(X.double().cpu(), Y.double().cpu(), strict=True))
    order = [mine[found.order[i]] for i in sorted(range(b.heads), key=theirs.__getitem__)]
    return Comparison(same, largest, where, found, _kind(same, placed or order == sorted(order)))


def _places(canonical: AttentionLayer, layer: AttentionLayer) -> list[int]:
    """Which heads of a layer those of its canonical form are, the first of those that were merged."""
    mine, all_ = with_bias(canonical), with_bias(layer)
    return [next(i for i in range(layer.heads) if torch.equal(all_[i], M)) for M in mine]


def _tried(a: Side, b: Side, on: Examples | None, width: int | None, seed: int) -> list[inputs.Inputs]:
    """Inputs that both sides answer to: small scores, usual ones and large ones; or those of examples."""
    checks.whole("seed", seed, 0)
    if on is not None:
        for layer in (side.layer for side in (a, b) if side.layer is not None):
            own = layer.width, layer.key_width if layer.cross else None
            if (on.width, on.key_width) != own:
                checks.refuse("on", f"examples of width {own[0]}" + (f", keys of width {own[1]}" if own[1] else ""),
                              f"width {on.width}" + (f", keys of width {on.key_width}" if on.key_width else ""),
                              "examples of this layer's inputs")
        return [inputs.seen(on)]
    known = [side.layer for side in (a, b) if side.layer is not None]
    width = known[0].width if known else width or a.width or b.width
    if width is None:
        checks.refuse("width", "the number of features of a token: neither side says it", None, "width=64")
    return [inputs.fresh(known, width, seed + i, size) for i, size in enumerate((1.0, 0.5, 2.0))]


def _explained(
    found: Comparison, a: Side, b: Side, on: Examples | None, width: int | None, seed: int
) -> Comparison:
    """With the cause, if a known mistake turns one side into the other, and the input that shows it most."""
    if a.layer is not None and b.layer is not None and not _one_input(a.layer, b.layer):
        return found
    tried = _tried(a, b, on, width, seed)
    before = max(float(inputs.gaps(a, b, part).max()) for part in tried)
    if math.isinf(before):  # some answer is no number: nothing can be read from it
        return found
    if before <= UNSEEN:
        cause, why = _cause_by_weights(a, b, on, min(TOLERANCE, GONE * found.largest))
        return replace(found, cause=cause, why=why)
    example, difference = inputs.worst(a, b, tried, on, seed)
    cause, why = _cause(a, b, tried, before)
    if cause is None and found.by == "weights" and _rounded(a, b, found, on):
        cause, why = causes.ROUNDING, "they differ by no more than the rounding of float32"
    if cause is None and found.by == "inputs":
        why = _coarse(a, b, tried, before)
        cause = None if why is None else causes.ROUNDING
    return replace(
        found, cause=cause, why=why, difference=difference, example=example.X[0],
        example_keys=None if example.Z is None else example.Z[0],
        example_positions=None if example.positions is None else example.positions[0])


def _one_input(a: FactoredLayer, b: FactoredLayer) -> bool:
    """Whether what one can be asked the other can."""
    places = {inputs.vectors_of(layer) for layer in (a, b) if layer.form.uses_positions}
    return (a.cross, a.key_width) == (b.cross, b.key_width) and len(places) < 2


def _cause_by_weights(
    a: Side, b: Side, on: Examples | None, tolerance: float
) -> tuple[str | None, str | None]:
    """A mistake that turns the weights of one into those of the other, where no input that was tried tells them
    apart: beyond a wide window, say."""
    for one, other, names in ((a, b, NAMES), (b, a, NAMES[::-1])):
        if one.layer is None or other.layer is None:
            continue
        for change in causes.changes(one.layer, other.layer):
            if change.layer is not None and _by_weights(
                    Side(change.layer, None, one.stored), other, tolerance, on).same:
                return change.cause, _words(names, change, one)
    return None, None


def _rounded(a: Side, b: Side, found: Comparison, on: Examples | None) -> bool:
    """Whether two layers differ by no more than float32 rounds, and all over: a few entries that are off are a
    change."""
    assert a.layer is not None and b.layer is not None
    if found.largest > 4 * torch.finfo(torch.float32).eps:
        return False
    one, other = (gauge.heads_of(layer, on) for layer in (a.layer, b.layer))
    if one.count != other.count:
        return True
    one = one.take(list(match_heads(one, other).order))
    parts = [(one.qk(i).get(name), M) for i in range(other.count) for name, M in other.qk(i).items()
             if name not in gauge.NORMS]
    values = [(V @ out.mT) for V, out in (one.values, other.values)]  # summed over channels that have gates
    parts += [(values[0][i], values[1][i]) for i in range(other.count)] + [(one.offset[None], other.offset[None])]
    for x, y in parts:
        off = torch.zeros_like(y) if x is None else (x - y).abs()
        if float(off.norm()) <= TOLERANCE * float(y.abs().norm()):
            continue
        for along in (0, 1):
            size = y.abs().norm(dim=along)
            lines = (off.norm(dim=along) / size)[size > 0]
            if len(lines) and float((lines > SPREAD_OUT * lines.max()).double().mean()) < 0.5:
                return False
    return True


def _coarse(a: Side, b: Side, tried: list[inputs.Inputs], before: float) -> str | None:
    """Whether a side with known weights, computed in another precision, is as far from itself as from the other,
    and that difference jumps about as roundings do when tokens hardly move."""
    known = a.layer or b.layer
    if known is None:
        return None
    for dtype, name in causes.HALVES.items():
        rough = known.to(dtype)
        size = max(float(inputs.gaps_of(part.to(known), part.to(rough), part).max()) for part in tried)
        if size / ALIKE <= before <= size * ALIKE and _erratic(a, b, tried, torch.finfo(dtype).eps):
            return f"they differ by as much as computing in {name} makes a difference"
    return None


def _erratic(a: Side, b: Side, tried: list[inputs.Inputs], eps: float) -> bool:
    draw = torch.Generator().manual_seed(0)
    size, change = 0.0, 0.0
    for part in tried:
        step = torch.randn(part.X.shape, generator=draw, dtype=torch.float64)
        moved = replace(part, X=part.X * (1 + NUDGE * eps * step))
        gap = a(part) - b(part)
        size += float(gap.square().sum())
        change += float((a(moved) - b(moved) - gap).square().sum())
    return change > ERRATIC**2 * size


NAMES = ("the first", "the second")


def _cause(a: Side, b: Side, tried: list[inputs.Inputs], before: float) -> tuple[str | None, str | None]:
    coarse = _rounding(a, b)
    if a.box is not None or b.box is not None:  # parts of a function may be in float32 whatever it is asked in
        coarse = max(coarse, ROUNDINGS * torch.finfo(torch.float32).eps)
    limit = min(max(TOLERANCE, coarse), GONE * before)
    parts = [tried[0].one(0), *tried]  # one sequence settles most of it
    singles = []
    for one, other, names in ((a, b, NAMES), (b, a, NAMES[::-1])):
        if one.layer is not None:
            asked = [(part, other(part)) for part in parts]
            for change in causes.changes(one.layer, other.layer):
                singles.append((_left(change, asked, HELPS * before), change, (other, asked), names, one))
    best = _best(singles, limit)
    if best is not None:
        _, change, _, names, one = best
        return change.cause, _words(names, change, one)
    if a.layer is None and b.layer is None:
        return _of_boxes(a, b, tried, limit)
    helpful = sorted((s for s in singles if s[0] <= HELPS * before and s[1].layer is not None), key=lambda s: s[0])
    pairs = []
    for _, first, (other, asked), names, one in helpful[:PAIRS]:
        assert first.layer is not None
        for second in causes.changes(first.layer, other.layer):
            if second.cause != first.cause:
                pairs.append((_left(second, asked, limit), second, one, names, first))
    both = _best(pairs, limit)
    if both is None:
        return None, None
    _, second, one, names, first = both
    return f"{first.cause} and {second.cause}", f"{_words(names, first, one)}, and {_words(names, second, one)}"


def _words(names: tuple[str, ...], change: causes.Change, one: Side) -> str:
    words = change.words
    if one.dense is not None:  # of a layer given as Θ and W, u_i stands where factors have the query's bias
        words = words.replace("query bias", "key bias u")
    return words.format(one=names[0], other=names[1])


def _best(found: list[Any], limit: float) -> Any:
    """The first of those that leave least, up to a factor of 10; None if none leaves less than ``limit``."""
    least = min((entry[0] for entry in found), default=math.inf)
    if least > limit:
        return None
    return next(entry for entry in found if entry[0] <= min(max(10 * least, 1e-13), limit))


def _left(change: causes.Change, asked: list[tuple[inputs.Inputs, Tensor]], enough: float) -> float:
    """The difference that is left, or as much of it as is more than enough."""
    left = 0.0
    for part, answer in asked:
        left = max(left, float(inputs.gaps_of(answer, change(part), part, change.rows).max()))
        if left > enough:
            break
    return left


def _of_boxes(a: Side, b: Side, tried: list[inputs.Inputs], limit: float) -> tuple[str | None, str | None]:
    """What two functions show by themselves: one constant apart, one factor apart, or other keys in sight."""
    constant, factor, last = 0.0, 0.0, 0.0
    for part in tried:
        Ya, Yb = a(part), b(part)
        spread = (Ya - Ya.mean((0, 1))).square().mean().sqrt().clamp_min(1e-300)
        gap = Ya - Yb
        if not bool(gap.isfinite().all()):
            return None, None
        constant = max(constant, float((gap - gap[:1, :1]).abs().max() / spread))
        times = (Ya * Yb).sum() / Yb.square().sum().clamp_min(1e-300)
        factor = max(factor, float((Ya - times * Yb).abs().max() / spread))
        last = max(last, float(gap[:, -1].abs().max() / spread))
    if constant <= limit:
        return "bias", "the answers differ by one row, the same for all tokens: an output or value bias"
    if factor <= limit:
        return "output scale", "the answers of one are a constant times those of the other"
    if last <= limit:
        return "mask", "the answers to the last token agree, others do not: one of them looks back only"
    return None, None
