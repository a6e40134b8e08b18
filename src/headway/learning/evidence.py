"""What a fit leaves: does the residual depend on the inputs, which labels are wrong?

**Probes.** A probe asks whether the residuals r have a relation of one kind to the inputs: features φ of the
inputs and coefficients B are taken from one half of the sequences, and on the other half

    t = Σ_s c_s,    c_s = Σ_a ⟨φ_a B, r_a⟩ over the rows a of sequence s,

is compared with Σ_s ±c_s for random signs. If r, given the inputs, is as likely as −r (noise of any size, which
may depend on the inputs), then t is as likely to be the largest as any other: an exact test, whatever the features.
Each probe gives the part of the sign patterns that reach t, for either half in turn, twice the lesser of the two;
with J probes the residual is said to depend on the inputs if one part is at most LEVEL/J.

The residuals are those of the rows fitted: there the error of the estimate itself leaves no trace, to first order.
A probe looks at a sample of bounded size. Where examples are split over ranks, each reads all of that sample and
finds the same: to split it would save less than to agree would take.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headway.core import attention
from headway.learning.candidate import Candidate
from headway.learning.source import CHECKED, Source, far_out, spaced
from headway.learning.starts import moments
from headway.linalg.projected import Rows

MOVED = ("attention, from the row", "attention, reversed")  # probes for labels away from their tokens
LEVEL = 0.01  # chance that pure noise is said to depend on the inputs
FLIPS = 4999  # random signs
TURNS = (1.0, 0.3)  # radians a place, of the probe for scores that depend on the distance
ROWS = {"cuda": 65_536, "cpu": 16_384}  # looked at by a probe
OWN = 0.05  # part of sign patterns above which a row shows no attention of its own
SHUFFLES = 999  # of the rows of each sequence: what is left depends on the place if none does as well
ORDERS = 99  # the same, for tokens that come in some order
PAIRS = 125_000_000  # of rows, times shuffles, that are looked at
CURVED = 128  # random features of a probe for anything nonlinear
SHARP = 256  # features at most of a probe for other rules of the scores
MOST = 0.1  # part of the squared error that those which stand out must carry
CLOSE = 1e-4  # residual below which float64 is needed to look at what is left

CAUSES = {  # what labels that are no layer's may be, and what to do about it
    "token": "They are a linear function of the token in the same row: no attention shows in them.",
    "causal": "The first row depends on its own token alone, as it does under a causal mask: try "
              "Examples(X, Y, mask='causal').",
    "shifted": "They show attention from another row (the one before, the one after, or in reverse order) and none "
               "from their own: check that row a of Y belongs to row a of X.",
    "place": "They depend on where tokens stand in the sequence, which a layer without a mask does not see: rotary "
             "or other positions inside the layer do that, and a mask that was not given.",
    "around": "A layer and a linear function of the row's own token together explain them, as if a connection "
              "around the layer had been captured with it: try labels without it (Y - X).",
}

Features = Callable[[Rows], Tensor]


def left_over(rows: Rows, taken: Candidate) -> Rows:
    """The same rows with what ``taken`` leaves of their labels."""
    Theta, W, offset = (t.to(rows.X) for t in (taken.Theta, taken.W, taken.offset))
    R = rows.Y - attention.forward(rows.X, Theta, W, offset, rows.see)
    return replace(rows, Y=R if rows.valid is None else R * rows.valid)


def glance(source: Source, floor: float) -> str:
    """Whether the labels are a linear function of the row's own token, or those of the first row are: a cause's
    name, or nothing. By regression on half of up to 512 sequences, looked at on the other half."""
    index = spaced(source.fit, min(len(source.fit), 512))
    source = source.sample(index)
    rows = source.rows(index, torch.float64)
    if rows.valid is not None or len(index) * rows.X.shape[1] < 6 * (source.d + 1):
        return ""

    def left(X: Tensor, Y: Tensor) -> float:
        F = torch.cat([X, X.new_ones(*X.shape[:2], 1)], dim=2)
        half = slice(None, None, 2), slice(1, None, 2)
        (A, a), (B, b) = ((F[part].flatten(0, 1), Y[part].flatten(0, 1)) for part in half)
        C = torch.linalg.lstsq(A, a).solution
        return float((b - B @ C).norm() / (b - b.mean(0)).norm().clamp_min(1e-300))

    met = min(1e3 * floor, 1e-6)
    if left(rows.X, rows.Y) < met:
        return "token"
    alone = source.examples.mask == "none" and rows.X.shape[1] > 1 and len(index) >= 4 * (source.d + 1)
    return "causal" if alone and left(rows.X[:, :1], rows.Y[:, :1]) < met else ""


def shifted(source: Source, generator: torch.Generator) -> bool:
    """Whether the labels show attention from another row and none from their own."""
    every = source.parts.different
    index = spaced(every, min(len(every), 1024))
    source = source.sample(index)
    halves = [list(source.stream(half, 2, torch.float32)) for half in (index[::2], index[1::2])]
    linear = moments.residualise(lambda: halves[0])[0]
    first, second = ([moments.without_linear(part, linear) for part in half] for half in halves)
    found = {}
    for name, change in _attention_probes(source).items():
        both = [[change(part) for part in half] for half in (first, second)]
        found[name] = _responses(both[0], both[1], generator)
    probes = parts_of(found, generator)
    moved = [part for name, part in probes.items() if name.startswith(MOVED)]
    return min(moved, default=1.0) <= LEVEL / len(probes) and probes["attention"] > OWN


# -- does it depend on the inputs? --------------------------------------------------------------------------


def structure(
    source: Source, best: Candidate, generator: torch.Generator, pulse: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """For every probe, the part of random signs under which the residual looks as related to the inputs."""
    rows = source.budget.some(ROWS.get(source.device.type, ROWS["cpu"]), 8 * source.d, "probe")
    every = source.parts.different  # a sequence and its copy, one in either half, would look like a relation
    count = min(len(every), best.sequences or len(every), max(32, rows // source.examples.length))
    index = spaced(every, count)
    source = source.sample(index)
    # What a close fit leaves is below the rounding of float32, which depends on the inputs.
    dtype = torch.float32 if best.residual > CLOSE else torch.float64
    first, second = ([left_over(part, best) for part in source.stream(half, best.heads, dtype)]
                     for half in (index[::2], index[1::2]))
    ways = [_looked_at(source, best, *halves, generator, pulse) for halves in ((first, second), (second, first))]
    return {name: min(1.0, 2 * min(way[name] for way in ways)) for name in ways[0]}


def _looked_at(
    source: Source, best: Candidate, first: list[Rows], second: list[Rows], generator: torch.Generator,
    pulse: Callable[[], None],
) -> dict[str, float]:
    """Every probe's part, with coefficients of the first half, on the second."""
    found: dict[str, Tensor] = {}
    for name, features in _linear_probes(source, best, generator).items():
        pulse()
        found[name] = by_rule(first, second, features)
    for name, change in _attention_probes(source).items():
        pulse()
        halves = [[change(part) for part in half] for half in (first, second)]
        found[name] = _responses(halves[0], halves[1], generator)
    if source.examples.length > 1:
        pulse()
        found["distance"] = _by_distance(first, second, best)
    return parts_of(found, generator)


def dependent(probes: dict[str, float]) -> bool:
    return min(probes.values()) <= LEVEL / len(probes)


def parts_of(found: dict[str, Tensor], generator: torch.Generator) -> dict[str, float]:
    """Of every probe, the part of sign patterns, the given one among them, whose sum reaches Σc. All are held
    against the same signs: a bound on the sum of their levels asks no more."""
    C = torch.stack(list(found.values()), dim=1)
    signs = 2.0 * torch.randint(0, 2, (FLIPS, len(C)), generator=generator).to(C) - 1
    reached = 1 + (signs @ C >= C.sum(0)).sum(0)
    return {name: float(count) / (FLIPS + 1) for name, count in zip(found, reached, strict=True)}


def _linear_probes(source: Source, best: Candidate, generator: torch.Generator) -> dict[str, Features]:
    d, m = source.d, best.heads
    G = torch.randn((m + 2) * d, CURVED, generator=generator) / math.sqrt((m + 2) * d)
    shift = torch.randn(CURVED, generator=generator)

    def curved(rows: Rows) -> Tensor:
        H = attention.attend(attention.patterns(rows.X, best.Theta.to(rows.X), rows.see), rows.X)
        every = torch.cat([of_token(rows), H.flatten(2)], dim=2)
        return torch.relu(every @ G.to(every) + shift.to(every))

    def sharpness(rows: Rows) -> Tensor:
        """How the output of each head moves if its scores grow, also with the size of the token and to second
        order: what another rule for the scores would show."""
        Theta = best.Theta.to(rows.X)
        S = attention.scores(rows.X, Theta)
        P = attention.softmax(S, rows.see)
        first = attention.softmax_rule(P, S)
        second = attention.softmax_rule(P, (S - (P * S).sum(3, keepdim=True)).square())
        H = torch.cat([attention.attend(part, rows.X).flatten(2) for part in (first, second)], dim=2)
        H = torch.cat([H, H * rows.X.square().mean(2, keepdim=True)], dim=2)
        return H if H.shape[2] <= SHARP else H @ few.to(H)

    few = torch.randn(4 * m * d, SHARP, generator=generator) / math.sqrt(4 * m * d)
    return {**ANY, "curved": curved, "sharpness": sharpness}


def mean_of(rows: Rows) -> Tensor:
    """Of the keys in sight."""
    return attention.attend(attention.uniform(rows.X, rows.see), rows.X).squeeze(2)


def of_token(rows: Rows) -> Tensor:
    return torch.cat([rows.X, mean_of(rows)], dim=2)


def of_place(rows: Rows) -> Tensor:
    k = rows.X.shape[1]
    bins = torch.arange(k, device=rows.X.device) * min(k, 64) // k
    return torch.nn.functional.one_hot(bins).to(rows.X).expand(len(rows.X), -1, -1)


def of_neighbours(rows: Rows) -> Tensor:
    X = rows.X if rows.valid is None else rows.X * rows.valid
    before, after = torch.zeros_like(X), torch.zeros_like(X)
    before[:, 1:], after[:, :-1] = X[:, :-1], X[:, 1:]
    return torch.cat([before, after], dim=2)


def of_size(rows: Rows) -> Tensor:
    norm = rows.X.square().mean(2, keepdim=True)
    return torch.cat([norm, norm * rows.X, mean_of(replace(rows, X=norm))], dim=2)


# Features of inputs alone, whatever the layer.
ANY: dict[str, Features] = {"token": of_token, "position": of_place, "neighbours": of_neighbours, "size": of_size}


def by_rule(first: list[Rows], second: list[Rows], features: Features) -> Tensor:
    """c_s of the second half, with ridge coefficients of the first."""
    F = torch.cat([_valid(part, features(part)).flatten(0, 1) for part in first]).double()
    R = torch.cat([part.Y.flatten(0, 1) for part in first]).double()
    middle, size = F.mean(0), F.std(0).clamp_min(1e-300)
    F = (F - middle) / size
    ridge = max(0.05 * len(F), F.shape[1]) * torch.eye(F.shape[1], dtype=F.dtype, device=F.device)
    B = torch.linalg.solve(F.T @ F + ridge, F.T @ R)
    parts = []
    for part in second:
        F = (_valid(part, features(part)).double() - middle) / size
        parts.append(((F @ B) * part.Y.double()).sum((1, 2)))
    return torch.cat(parts).cpu()


def _valid(rows: Rows, F: Tensor) -> Tensor:
    return F if rows.valid is None else F * rows.valid


def _attention_probes(source: Source) -> dict[str, Callable[[Rows], Rows]]:
    """The residual as the answer of one more head: over all keys, over near ones, over those before; and the same
    with the residuals moved along the sequence, where labels do not stand beside their tokens."""
    k = source.examples.length

    def seen(rows: Rows, allowed: Tensor) -> Rows:
        allowed = allowed.to(rows.X.device)
        return replace(rows, see=allowed if rows.see is None else (
            rows.see & allowed) | torch.eye(k, dtype=torch.bool, device=rows.X.device))

    at = torch.arange(k)
    near = ((at.unsqueeze(1) - at).abs() <= 1).unsqueeze(0)
    before = (at.unsqueeze(1) >= at).unsqueeze(0)
    probes: dict[str, Callable[[Rows], Rows]] = {"attention": lambda rows: rows}
    if k > 2:
        probes["attention, near"] = lambda rows: seen(rows, near)
    if k > 1:
        if source.examples.mask == "none":
            probes["attention, before"] = lambda rows: seen(rows, before)
        probes["attention, from the row before"] = lambda rows: replace(rows, Y=rows.Y.roll(-1, 1))
        probes["attention, from the row after"] = lambda rows: replace(rows, Y=rows.Y.roll(1, 1))
        probes["attention, reversed"] = lambda rows: replace(rows, Y=rows.Y.flip(1))
    return probes


def _responses(first: list[Rows], second: list[Rows], generator: torch.Generator) -> Tensor:
    """c_s of the second half, in the leading directions of the moments of the first."""
    found = moments.span(lambda: first, 2, generator=generator, passes=4)
    T, V = found.basis, found.outputs * found.values.view(-1, 1, 1)
    parts = []
    for part in second:
        h = attention.tangent(attention.uniform(part.X, part.see), part.X, T.to(part.X))
        parts.append((attention.project(h, V.to(h)) * part.Y).sum((1, 2)))
    return torch.cat(parts).double().cpu()


def _by_distance(first: list[Rows], second: list[Rows], best: Candidate) -> Tensor:
    """c_s of the second half, for scores of the fitted heads that depend on how far apart two tokens are."""
    weights = turned(first[0].X.shape[1])
    return (_pairs(first, second, best) * weights).sum((1, 2, 3))


def turned(k: int) -> Tensor:
    """Cosines and sines of the distance b − a, (·, k, k)."""
    at = torch.arange(k, dtype=torch.float64)
    return torch.stack([kind(turn * (at - at.unsqueeze(1))) for turn in TURNS for kind in (torch.cos, torch.sin)])


def _pairs(first: list[Rows], second: list[Rows], best: Candidate) -> Tensor:
    """What each pair of rows (a, b) of the second half says for scores that depend on the distance, (n, ·, k, k):
    to be weighted by the cosines and sines, and added.

    To the score of query a and key b is added Σ_g g(b − a) x̃_aᵀT_{i,g}x̃_b, g a cosine or a sine, x̃ = [x, 1]: as
    rotary attention does, and biases by the distance. T is the gradient of the first half's residuals in it. The
    fit knows W_i and P_i, so that this sees far more than moments would.
    """
    weights = turned(first[0].X.shape[1])

    def gradient(rows: Rows) -> Tensor:
        """By the scores, (n, k, m, k)."""
        P = attention.patterns(rows.X, best.Theta.to(rows.X), rows.see)
        return attention.score_side(P, rows.X, attention.spread(rows.Y, best.W.to(rows.X)))

    T = torch.zeros(len(weights), best.heads, *2 * (first[0].X.shape[2] + 1,)).to(first[0].X)
    for part in first:
        Z, G = _with_one(part.X), gradient(part)
        for j, weight in enumerate(weights.to(G)):
            keys = torch.bmm((G * weight.unsqueeze(1)).flatten(1, 2), Z).view(*G.shape[:3], -1)
            T[j] += torch.einsum("nap,namq->mpq", Z, keys)
    pairs = []
    for part in second:
        Z, G = _with_one(part.X), gradient(part)
        pairs.append(torch.stack([(torch.einsum("nap,mpq,nbq->namb", Z, one, Z) * G).sum(2) for one in T], dim=1))
    return torch.cat(pairs).double().cpu()


def _with_one(X: Tensor) -> Tensor:
    return torch.cat([X, X.new_ones(*X.shape[:2], 1)], dim=2)


def placed(source: Source, best: Candidate, generator: torch.Generator) -> bool:
    """Whether what a fit without a mask leaves depends on where tokens stand, and the tokens themselves do not.

    A layer without a mask gives the same rows in another order for the same tokens in another order, and so does
    what it leaves of another such layer. So if tokens come in any order alike, rows may be shuffled within each
    sequence, tokens and residuals together: the relation to the distance is held against SHUFFLES of them.
    """
    k = source.examples.length
    if source.examples.mask != "none" or k < 2 or source.examples.take([0]).padding is not None:
        return False
    every = source.parts.different
    index = spaced(every, min(len(every), best.sequences or len(every), 2 * max(16, PAIRS // (SHUFFLES * k * k))))
    source = source.sample(index)
    dtype = torch.float32 if best.residual > CLOSE else torch.float64
    first, second = ([left_over(part, best) for part in source.stream(half, best.heads, dtype)]
                     for half in (index[::2], index[1::2]))
    weights = turned(k)
    X, Z = (torch.cat([_with_one(part.X) for part in half]).double().cpu() for half in (first, second))
    among = [torch.einsum("nap,ab,nbq->pq", X, weight, X) for weight in weights]
    order = torch.stack([torch.einsum("nap,pq,nbq->nab", Z, one, Z) for one in among], dim=1)
    return (_unreached(_pairs(first, second, best), weights, generator, SHUFFLES)
            and not _unreached(order, weights, generator, ORDERS))


def _unreached(pairs: Tensor, weights: Tensor, generator: torch.Generator, shuffles: int) -> bool:
    """Whether no shuffle of so many has a weighted sum of pairs (n, ·, k, k) as large as the given order has.
    Tokens and residuals move together: the pairs stay, their distances change."""
    n, _, k, _ = pairs.shape
    given = float((pairs * weights).sum())
    for _ in range(shuffles):
        at = torch.rand(n, k, generator=generator).argsort(1)
        turned = weights[:, at.unsqueeze(2), at.unsqueeze(1)].transpose(0, 1)
        if float((pairs * turned).sum()) >= given:
            return False
    return True


# -- which labels are wrong? --------------------------------------------------------------------------------


def standing_out(source: Source, best: Candidate) -> np.ndarray:
    """Sequences to fit and to select by that the fit misses by far, if they are few and carry most of the error."""
    index = np.concatenate([source.fit, source.select])
    if len(index) > CHECKED:
        index = spaced(index, CHECKED)
    errors, _ = source.errors(index, best.Theta, best.W, best.offset)
    far = far_out(errors)
    if not far.any() or errors[far].sum() < MOST * errors.sum():
        return index[:0]
    return np.sort(index[far])


def outliers(source: Source, best: Candidate, floor: float, index: np.ndarray) -> np.ndarray:
    """Of these sequences, those the fit misses by far: more than rounding, and more than it misses the rest."""
    errors, spread = source.errors(index, best.Theta, best.W, best.offset)
    least = (100 * floor) ** 2 * spread / max(len(index), 1)
    found: np.ndarray = index[far_out(errors, least)]
    return found
