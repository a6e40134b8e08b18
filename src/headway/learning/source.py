"""The examples as the learner sees them: split into fit, select and judge, in working coordinates.

*fit* is fitted; *select* chooses starts, counts, ranks and rows; *judge* is read once, by the verdict. Sequences
that occur more than once are all in the same part. Those whose labels stand far out in size are set aside at first.
All of that goes by a sequence's number in the list. Where the list is split over ranks (parts.py) each has the rows
of its own sequences, and sums over rows are totals.

Working coordinates z are centred and white: x = μ + Lz. A layer in x is one in z with Θ_z = LᵀΘL,
u_z = Lᵀ(Θᵀμ + u), W_z = LᵀW, c_z = c + ΣW_iᵀμ; and back with L⁺ in place of L. Directions the tokens never
visit have no z: they come back as zero and are counted, not filled in. Labels are divided by a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headway.core import attention, checks
from headway.core.budget import BUDGET, Budget
from headway.core.examples import Examples
from headway.core.layer import AttentionLayer
from headway.learning.parts import Parted, Sample, own_of, ranks_of, store_of
from headway.linalg.projected import Problem, Rows
from headway.linalg.totals import Alone

SELECT, JUDGE, MOST = 0.1, 0.05, 1000  # parts of the sequences, and the most of either
CHECKED = 65_536  # sequences among which repeats and labels that stand out are looked for
STANDS_OUT = 3.0  # times the median error of a sequence
LARGE = 6.0  # times the median size of labels
GAP = 1.25  # ratio by which what stands out is apart from the rest
FEW = 0.06  # part of the sequences that may stand out
FRAME_SEQUENCES = 16384
LOOKED = 1024  # sequences looked through at a time
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FAR = 1e3  # deviations from zero beyond which labels are centred


@dataclass(frozen=True)
class Frame:
    """x = μ + Lz, z = L⁺(x − μ); y = scale · (label in working units)."""

    mean: Tensor  # (d,)
    out: Tensor  # L, (d, r)
    back: Tensor  # L⁺, (r, d)
    scale: float
    plain: bool  # tokens were white already: nothing is changed
    label: Tensor | None = None  # taken from the labels first, where they are far from zero

    def tokens(self, X: Tensor) -> Tensor:
        return X if self.plain else (X - self.mean.to(X)) @ self.back.to(X).T

    def unwhitened(self) -> Frame:
        """Plain coordinates: centred, all directions divided by one number."""
        if self.plain:
            return self
        d = len(self.mean)
        size = float(self.out.square().sum() / d) ** 0.5
        eye = torch.eye(d, dtype=self.out.dtype, device=self.out.device)
        return Frame(self.mean, size * eye, eye / size, self.scale, False, self.label)

    def leave(self, Theta: Tensor, W: Tensor, offset: Tensor, mask: str) -> AttentionLayer:
        """The layer in the user's coordinates."""
        Theta, u = attention.split(Theta)
        assert u is not None
        W, offset = W * self.scale, offset * self.scale
        if self.label is not None:
            offset = offset + self.label.to(offset)
        if not self.plain:
            Theta = self.back.T @ Theta @ self.back
            u = u @ self.back - (Theta.mT @ self.mean)
            W = self.back.T @ W
            offset = offset - torch.einsum("mde,d->e", W, self.mean)
        return AttentionLayer(Theta, W, u, offset, mask)


def find_frame(
    examples: Examples, index: np.ndarray, device: torch.device, centred: bool = True, budget: Budget = BUDGET
) -> Frame:
    """Mean and covariance of the tokens; no change of coordinates where they are white within sampling error.
    Without ``centred`` zero stays zero, μ = 0, and L is that of the second moments.

    A covariance formed in one go knows directions down to 1e-8 of the largest only, and labels may depend on
    smaller ones: what a layer norm computed in float32 leaves of the direction it removes is one. So tokens are
    whitened twice: once roughly, then what is left of that, in which every direction is about of unit size.
    """
    d = examples.width
    chosen = spaced(index, min(len(index), FRAME_SEQUENCES))
    _refuse_sizes(examples, chosen, device, budget)
    first = examples.take(chosen[:1])
    zero = torch.zeros(d, dtype=torch.float64, device=device)
    eye = torch.eye(d, dtype=torch.float64, device=device)
    near = first.X.reshape(-1, d)[0].to(device, torch.float64)  # any point among the tokens: sums stay small
    near = near if centred else zero
    N, mean, covariance = _spread_of(examples, chosen, device, near, eye, centred, budget)
    mean = mean + near
    scale, label = _label_scale(examples, chosen, first, device, budget)
    noise = 8.0 / math.sqrt(N)
    if float(mean.abs().max()) < noise and float((covariance - eye).abs().max()) < noise:
        return Frame(zero, eye, eye, scale, True, label)
    each = covariance.diagonal().clamp_min(0).sqrt()
    each = torch.where(each > 1e-14 * (mean.abs() + each.max() * 1e-100), each, each.max().expand_as(each))
    smallest = (16 * torch.finfo(examples.dtype).eps) ** 2  # variances below are not seen in the labels
    clamp = max(1e-14, smallest)
    values, vectors = torch.linalg.eigh(covariance / each / each.unsqueeze(1))
    root = values.clamp_min(clamp * float(values[-1])).sqrt()
    back, out = (vectors / root).T / each, each.unsqueeze(1) * (vectors * root)
    _, shift, rest = _spread_of(examples, chosen, device, mean, back, centred, budget)
    values, vectors = torch.linalg.eigh(rest)
    alive = values > max(0.25 * smallest / clamp, 1e-14)  # the least that sums in float64 can tell from nothing
    root, E = values[alive].sqrt(), vectors[:, alive]
    # What no label could show: the complement of what is visited. Nothing is read from it.
    blind = torch.linalg.qr(back.T @ vectors[:, ~alive])[0]
    out, back, mean = out @ (E * root), (E / root).T @ back, mean + out @ shift
    back = back - (back @ blind) @ blind.T
    U, sizes, Vh = torch.linalg.svd(out)
    if bool(alive.all()) and float(sizes[-1]) > 1e-3 * float(sizes[0]):
        # The symmetric root keeps z close to x. Not where directions differ much in size: turned, the rounding of
        # the smallest would reach all coordinates.
        out, back = out @ Vh.T @ U.T, U @ Vh @ back
    return Frame(mean, out, back, scale, False, label)


def _parts(
    examples: Examples, chosen: np.ndarray, device: torch.device, budget: Budget = BUDGET
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels of these sequences, of a rank its own, filling left out, in float64."""
    chosen, store = own_of(examples, chosen), store_of(examples)
    size = budget.some(LOOKED, bytes_of(examples))
    for start in range(0, len(chosen), size):
        budget.tidy()
        part = store.take(chosen[start : start + size])
        rows = slice(None) if part.padding is None else ~part.padding.reshape(-1)
        yield (part.X.reshape(-1, part.width)[rows].to(device, torch.float64),
               part.Y.reshape(-1, part.out_width)[rows].to(device, torch.float64))


def bytes_of(examples: Examples) -> int:
    """Of one sequence in float64."""
    return 8 * examples.length * (examples.width + examples.out_width)


def _refuse_sizes(examples: Examples, chosen: np.ndarray, device: torch.device, budget: Budget) -> None:
    """Numbers whose squares leave the range of float64."""
    peaks, ranks = {"X": 0.0, "Y": 0.0}, ranks_of(examples)
    with ranks.together():
        for x, y in _parts(examples, chosen, device, budget):
            peaks = {"X": max(peaks["X"], float(x.abs().max())), "Y": max(peaks["Y"], float(y.abs().max()))}
    for what, peak in peaks.items():
        peak = ranks.largest(peak)
        if peak > 0 and not 1e-140 < peak < 1e150:
            checks.refuse(f"examples.{what}", "numbers whose squares can be added up, from 1e-140 to 1e150 in size",
                          f"numbers up to {peak:.1e}", f"{what} divided by their size")


def _spread_of(
    examples: Examples, chosen: np.ndarray, device: torch.device, near: Tensor, back: Tensor, centred: bool,
    budget: Budget,
) -> tuple[int, Tensor, Tensor]:
    """Rows, mean and covariance of (x − near) · backᵀ; with second moments about zero, which counts as the mean,
    unless ``centred``."""
    d, ranks = len(back), ranks_of(examples)
    N, total = 0, torch.zeros(d, dtype=torch.float64, device=device)
    squares = torch.zeros(d, d, dtype=torch.float64, device=device)
    with ranks.together():
        for x, _ in _parts(examples, chosen, device, budget):
            z = (x - near) @ back.T
            N, total, squares = N + len(z), total + z.sum(0), squares + z.T @ z
    N, total, squares = ranks.totals(N, total, squares)
    mean = total / N if centred else torch.zeros_like(total)
    return N, mean, squares / N - torch.outer(mean, mean)


def _label_scale(
    examples: Examples, chosen: np.ndarray, first: Examples, device: torch.device, budget: Budget
) -> tuple[float, Tensor | None]:
    """The labels' deviation as a power of two, and their mean where it is so much larger that sums of squares would
    lose what varies. Sums are of differences from the first label: they stay small."""
    N, squares, largest, ranks = 0, 0.0, 0.0, ranks_of(examples)
    total = torch.zeros(examples.out_width, dtype=torch.float64, device=device)
    near = next(_parts(first, np.arange(1), device))[1][0]
    with ranks.together():
        for _, y in _parts(examples, chosen, device, budget):
            largest = max(largest, float(y.abs().max()))
            y = y - near
            N, total, squares = N + len(y), total + y.sum(0), squares + float(y.square().sum())
    N, total, squares = ranks.totals(N, total, squares)
    largest = ranks.largest(largest)
    variation = squares / N - float((total / N).square().sum())
    if not variation > 1e-30 * max(largest**2, 1e-300):
        checks.refuse("examples.Y", "labels that vary", "the same output row everywhere",
                      "check that Y is the layer's output on X")
    scale, mean = float(2.0 ** round(0.5 * math.log2(variation / examples.out_width))), near + total / N
    return scale, mean if float(mean.abs().max()) > FAR * scale else None


def spaced(index: np.ndarray, count: int) -> np.ndarray:
    """``count`` entries spread evenly over ``index``: a sorted file is sampled throughout."""
    at = ((np.arange(count) + 0.5) * len(index) / count).astype(np.int64)
    return np.asarray(index[at])


@dataclass(frozen=True)
class Split:
    """Disjoint indices; ``kinds`` has for every one of ``fit`` a number that equal sequences share."""

    fit: np.ndarray
    select: np.ndarray
    judge: np.ndarray
    aside: np.ndarray
    kinds: np.ndarray

    @property
    def different(self) -> np.ndarray:
        """The first of each kind in ``fit``."""
        return np.asarray(self.fit[np.sort(np.unique(self.kinds, return_index=True)[1])])

    @property
    def distinct(self) -> int:
        return len(np.unique(self.kinds))

    def without(self, aside: np.ndarray) -> Split:
        """With these sequences set aside as well."""
        kept, select = ~np.isin(self.fit, aside), self.select[~np.isin(self.select, aside)]
        return Split(self.fit[kept], select, self.judge, np.union1d(self.aside, aside), self.kinds[kept])


def split(examples: Examples, budget: Budget = BUDGET) -> Split:
    n = len(examples)
    everything = np.arange(n)
    if n > CHECKED:  # a list as long is taken to have no repeats
        looked = spaced(everything, CHECKED)
        _, sizes = _prints(examples, looked, budget)
        aside = looked[far_out(sizes**2, times=LARGE)]
        kinds = np.delete(everything, aside)
        group = np.arange(len(kinds))
    else:
        prints, sizes = _prints(examples, everything, budget)
        aside = np.flatnonzero(far_out(sizes**2, times=LARGE))
        kinds = np.delete(everything, aside)
        first, group = np.unique(prints[kinds], return_index=True, return_inverse=True)[1:]
        group = np.argsort(np.argsort(first))[group.reshape(-1)]  # numbered as they come
    U = int(group.max()) + 1
    if U < 3:
        checks.refuse("examples", "at least 3 different sequences: to fit, to choose by and to judge on", U, "more")
    judge = _scattered(U, min(max(1, round(JUDGE * U)), MOST))
    rest = np.setdiff1d(np.arange(U), judge)
    select = rest[_scattered(len(rest), min(max(1, round(SELECT * U)), MOST))]
    part = np.zeros(U, dtype=np.int8)
    part[select], part[judge] = 1, 2
    fit, chosen, judged = (kinds[part[group] == j] for j in range(3))
    return Split(fit, chosen, judged, aside, group[part[group] == 0])


def prints_of(X: Tensor) -> np.ndarray:
    """A number for every sequence that equal tokens share: a sum of their bit patterns times fixed odd numbers, in
    integers, exact in any order."""
    draw = torch.Generator().manual_seed(0)
    odd = 2 * torch.randint(-(2**62), 2**62, (X[0].numel(),), generator=draw) + 1
    bits = (X + 0).contiguous().view(INTEGERS[X.element_size()]).flatten(1).long()  # −0 counts as 0
    for shift in (20, 40, 52):  # round numbers have their bits at the top, where products lose them
        bits = bits ^ (bits >> shift)
    found: np.ndarray = (bits * odd.to(bits.device)).sum(1).cpu().numpy()
    return found


def _prints(examples: Examples, index: np.ndarray, budget: Budget) -> tuple[np.ndarray, np.ndarray]:
    """Of every sequence a number that equal tokens share, and the size of its labels."""
    size = budget.some(LOOKED, bytes_of(examples))
    first = examples.take(spaced(index, min(len(index), 256, size)))
    middle = first.Y.double().flatten(0, 1).median(0).values
    prints, sizes = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
    ranks, own = ranks_of(examples), own_of(examples, index)
    with ranks.together():
        for at in np.array_split(own, math.ceil(len(own) / size)) if len(own) else ():
            budget.tidy()
            part = store_of(examples).take(at)
            prints.append(prints_of(part.X))
            Y = part.Y.double() - middle
            rows = Y.square().mean(2)
            if part.padding is not None:
                rows = rows * ~part.padding
            sizes.append(rows.mean(1).sqrt().cpu().numpy())
    return (everywhere(examples, index, np.concatenate(prints)),
            everywhere(examples, index, np.concatenate(sizes)))


def everywhere(examples: Examples, index: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A number for each of these sequences, on every rank, from those for its own."""
    if not isinstance(examples, Parted):
        return values
    whole = np.zeros(len(index), dtype=values.dtype)
    whole[examples.own(index)] = values
    found: np.ndarray = examples.ranks.total(torch.from_numpy(whole)).numpy()
    return found


def far_out(squares: np.ndarray, least: float = 0.0, times: float = STANDS_OUT) -> np.ndarray:
    """Which squares stand out from the others (by ``times`` the median size, and by a gap) and are above ``least``;
    none if they are too many."""
    none = np.zeros(len(squares), dtype=bool)
    bound = max(times**2 * float(np.median(squares)), least)
    order = np.sort(squares)
    first = int(np.searchsorted(order, bound, side="right"))
    if first in (0, len(order)) or not bound > 0:
        return none
    # Where right sequences end there is a gap; a tail that goes on and on has none.
    ratios = order[first:] / np.maximum(order[first - 1 : -1], bound / times**2)
    widest = int(ratios.argmax())
    far: np.ndarray = squares >= order[first + widest]
    return far if far.mean() <= FEW and float(ratios[widest]) >= GAP**2 else none


def _scattered(n: int, count: int) -> np.ndarray:
    """``count`` of n, one drawn from each of as many equal pieces: a sorted file is sampled throughout, and one
    with a period is not met at the same place each time."""
    edges = np.linspace(0, n, count + 1).astype(np.int64)
    at: np.ndarray = np.random.default_rng(0).integers(edges[:-1], edges[1:])
    return at


class Source:
    """Working rows of a set of examples."""

    def __init__(
        self, examples: Examples, device: torch.device | str | None = None, parts: Split | None = None,
        budget: Budget = BUDGET,
    ) -> None:
        self.examples, self.budget = examples, budget
        self.parts = split(examples, budget) if parts is None else parts
        self.device = examples.device if device is None else torch.device(device)
        self.frame: Frame | None = None

    @property
    def fit(self) -> np.ndarray:
        return self.parts.fit

    @property
    def select(self) -> np.ndarray:
        return self.parts.select

    @property
    def judge(self) -> np.ndarray:
        return self.parts.judge

    def without(self, aside: np.ndarray) -> Source:
        """With these sequences set aside as well."""
        other = copy(self)
        other.parts = self.parts.without(aside)
        return other

    def seen_through(self, frame: Frame) -> Source:
        """The same sequences in other coordinates."""
        other = copy(self)
        other.frame = frame
        return other

    @property
    def d(self) -> int:
        """Width in working coordinates."""
        assert self.frame is not None
        return int(self.frame.out.shape[1])

    @property
    def ranks(self) -> Alone:
        return ranks_of(self.examples)

    def sample(self, index: np.ndarray) -> Source:
        """With these sequences, and no others, read by every rank: for what is not worth splitting."""
        if self.ranks.alone:
            return self
        other = copy(self)
        other.examples = Sample(self.examples.take(index), index)
        return other

    def rows(self, index: np.ndarray, dtype: torch.dtype) -> Rows:
        return self.rows_of(store_of(self.examples).take(index), dtype)

    def rows_of(self, part: Examples, dtype: torch.dtype) -> Rows:
        """These examples in working coordinates."""
        assert self.frame is not None
        X = self.frame.tokens(part.X.to(self.device, dtype if self.frame.plain else torch.float64)).to(dtype)
        Y = part.Y.to(self.device, torch.float64)
        if self.frame.label is not None:
            Y = Y - self.frame.label
        Y = (Y / self.frame.scale).to(dtype)
        padding = None if part.padding is None else part.padding.to(self.device)
        see = attention.allowed(X, part.mask, padding)
        if padding is None:
            return Rows(X, Y, see)
        valid = (~padding).unsqueeze(2).to(dtype)
        return Rows(X, Y * valid, see, valid)

    def stream(self, index: np.ndarray, heads: int, dtype: torch.dtype) -> Iterator[Rows]:
        """Rows of these sequences; of a rank its own, or if it has none of them one that does not count."""
        size, index = self.chunk(heads), own_of(self.examples, index)
        if not len(index) and isinstance(self.examples, Parted):
            yield self.nothing(dtype)
        for start in range(0, len(index), size):
            self.budget.tidy()
            yield self.rows(index[start : start + size], dtype)

    def nothing(self, dtype: torch.dtype) -> Rows:
        assert isinstance(self.examples, Parted)
        rows = self.rows_of(self.examples.blank(), dtype)
        return replace(rows, Y=0 * rows.Y, valid=rows.X.new_zeros(*rows.X.shape[:2], 1))

    def problem(self, index: np.ndarray, heads: int, dtype: torch.dtype) -> Problem:
        with self.ranks.together():
            chunks = tuple(self.stream(index, heads, dtype))
        return Problem(chunks, ranks=self.ranks, budget=self.budget)

    def chunk(self, heads: int) -> int:
        k = self.examples.length
        return max(1, self.budget.at(self.device, "chunk") // (8 * k * heads * max(self.d, k)))

    def most(self) -> int:
        """Sequences that may be held at once for a solve, in both precisions."""
        each = 12 * self.examples.length * (self.d + self.examples.out_width)
        return max(16, self.budget.at(self.device, "rows") // each)

    def most_thin(self, m: int, q: int, p: int) -> int:
        """The same for heads in thin factors, with what they keep: queries, keys, values and patterns."""
        k = self.examples.length
        each = 12 * m * k * (2 * q + p + k)
        return min(self.most(), max(16, self.budget.at(self.device, "kept") // each))

    def afford(self, m: int, features: int, thin: bool) -> None:
        """Refuse a limit of memory that m heads do not fit under, whatever the rows: matrices of features, vectors
        of unknowns, and of every head some d × d."""
        d, e = self.d, self.examples.out_width
        each = 8 * d * (d + 1) * (14 if thin else 24)
        size = 8.0 * (5 * features**2 + 4 * features * e) + m * each
        self.budget.need(size, f"{m} head{'s' * (m != 1)} of width {d}")

    def answer(self, rows: Rows, Theta: Tensor, W: Tensor, offset: Tensor) -> Tensor:
        """F(X) in working coordinates."""
        return attention.forward(rows.X, Theta, W, offset, rows.see)

    def error(self, index: np.ndarray, Theta: Tensor, W: Tensor, offset: Tensor) -> float:
        """‖Y − F(X)‖ / ‖Y − mean‖ in float64 over these sequences."""
        wrong, spread = self.errors(index, Theta, W, offset)
        return math.sqrt(float(wrong.sum()) / max(spread, 1e-300))

    def errors(
        self, index: np.ndarray, Theta: Tensor, W: Tensor, offset: Tensor
    ) -> tuple[np.ndarray, float]:
        """‖Y − F(X)‖² of every sequence, in float64, and ‖Y − mean‖² of all."""
        wrong, total = [], 0.0
        count, label = 0, torch.zeros(self.examples.out_width, dtype=torch.float64, device=self.device)
        Theta, W, offset = Theta.double(), W.double(), offset.double()
        with self.ranks.together():
            for rows in self.stream(index, Theta.shape[0], torch.float64):
                R = rows.Y - self.answer(rows, Theta, W, offset)
                if rows.valid is not None:
                    R = R * rows.valid
                wrong.append(R.square().sum((1, 2)).cpu().numpy())
                total += float(rows.Y.square().sum())
                label += rows.Y.sum((0, 1))
                count += rows.count
        total, label, count = self.ranks.totals(total, label, count)
        own = np.concatenate(wrong)[: len(own_of(self.examples, index))]
        return everywhere(self.examples, index, own), total - float(label.square().sum()) / max(count, 1)
