"""From factors of any form that are nearly right to the floor, with as few heads and columns as it takes.

The ladder and the cuts between its steps are those of plain heads (ladder.py, refine.py). What may go is asked of
the function and not of the form: a head whose removal costs little with O and c solved again; two heads whose
patterns do the same to what one of them hands on; columns of V_iO_i that cost little, and of A_iB_iᵀ where scores
are plain products; every other plane of turned queries and keys, which are the planes of heads half the size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.core.counting import Size
from headway.core.positions import Rotary
from headway.core.tangents import Chain
from headway.learning.formed import Formed, FormedModel, FormedPoint
from headway.learning.formed_slow import slow_columns
from headway.learning.formed_source import FormSource
from headway.learning.formed_steps import settled, turns
from headway.learning.gauss_newton import NEAR, OutOfTimeError
from headway.learning.ladder import FEWEST, HOPE, ROWS, Ladder, Pace, floor_of
from headway.learning.prune import columns_needed, leading, root_of, solved, step_down, truncated, without_cost
from headway.learning.ranks import NARROW
from headway.learning.refine import BATCH, BOLD, FREE, Cuts, tried
from headway.linalg.projected import Problem, cholesky

TRIED = 6  # ways to join two heads of which the loss is computed
TIGHT = 1e-7  # relative residual at which planes come in the place of one matrix a head
FINE = 0.02  # relative residual from which float64 is worth its time then: float32 hardly tells slow planes apart
DIGITS = 1e-5  # to which steps are solved while they do not: what is told least counts as much as the rest
LOOKED = 32  # sequences on which patterns are compared


@dataclass(frozen=True)
class FormCandidate:
    """A fit in working coordinates, and how it came out."""

    tensors: dict[str, Tensor]
    residual: float
    error: float
    reason: str
    sequences: int
    equations: int
    products: int

    @property
    def heads(self) -> int:
        return len(self.tensors["query"])


class FormedLadder(Ladder):
    """The ladder on factors of any form."""

    source: FormSource

    def most(self, shape: Formed) -> int:
        k = self.source.examples.length
        each = 12 * shape.heads * k * (4 * shape.q + 3 * shape.p + 3 * k)
        kept = self.source.budget.at(self.source.device, "kept")
        return min(len(self.source.fit), self.source.most(), max(16, kept // each))

    def sequences(self, shape: Formed) -> int:
        if self.given is not None:
            return min(self.times * self.given, self.most(shape))
        data = self.source.examples
        mask = "causal" if shape.form.sight.causal else "none"
        size = Size(self.source.d, data.out_width, data.length, mask, min(shape.q, self.source.d), shape.p)
        return min(max(FEWEST, ROWS * self.times * size.floor(shape.heads)), self.most(shape))

    def sizes(self) -> tuple[int, int]:
        return self.shape.q, self.shape.p

    def solve_on(self, problem: Problem) -> None:
        self.model = FormedModel(problem)
        self.scale = self.model.variation()
        self.take(self.shape, self.model.evaluate(self.shape))

    def error_of(self, point: FormedPoint, everywhere: bool = False) -> float:
        index = self.source.select if everywhere else self.others
        return self.source.of_form(point.shape.form).misses(index, point.tensors())

    def slow(self, reason: str, before: float) -> bool:
        """Near the rounding of the labels steps go on to their end: what still falls there is what is told least,
        planes that hardly turn, of which heads are made as of any others."""
        return self.residual > floor_of(torch.float64) and super().slow(reason, before)

    def found(self, reason: str) -> FormCandidate:
        tensors = {name: value.double() for name, value in self.point.tensors().items()}
        return FormCandidate(tensors, self.residual, self.error_of(self.point, True), reason, self.count,
                             self.problem.equations, self.products)


class FormCuts(Cuts):
    """Heads and columns taken away between steps, whatever the form; never below ``least`` heads."""

    def __init__(self, least: int = 1, sizes: bool = True, loose: bool = False) -> None:
        super().__init__(softening=False)
        self.least, self.sizes, self.loose = least, sizes, loose

    @property
    def pace(self) -> Pace:
        return replace(super().pace, digits=DIGITS) if self.loose else super().pace

    def before(self, at: Ladder) -> None:
        self.cut(at)
        if self.loose and at.residual <= FINE:
            at.sharpen()

    def enough(self, at: Ladder) -> bool:
        """Near enough for the planes' own columns."""
        return self.loose and at.residual <= TIGHT and not at.overfitted

    def more(self, at: Ladder) -> int:
        return 2

    def weigh(self, at: Ladder) -> None:
        """Rows are left as they are."""

    def after(self, at: Ladder, reason: str, before: float) -> bool:
        """Nothing is weighted."""
        return False

    def last(self, at: Ladder) -> bool:
        """At the end cuts that were refused are tried once more, and larger ones."""
        if self.refused == at.residual:
            return False
        heads = at.shape.heads
        self.fold(at, BOLD)
        self.refused = at.residual
        return bool(at.shape.heads < heads)

    def cut(self, at: Ladder) -> None:
        heads = at.shape.heads
        if at.residual < 0.3 * self.freed:
            shape, point = self._free(at, FREE * at.point.loss)
            self.freed = at.rest(point)
            if shape.heads < heads:
                at.take(shape, point)
        while at.residual < 0.3 * self.refused or self.refused == math.inf:
            if not self.fold(at):
                self.refused = at.residual
                break
        if self.sizes and at.residual < NARROW and not at.overfitted:
            self.narrow(at)

    def _free(self, at: Ladder, allowed: float) -> tuple[Formed, FormedPoint]:
        shape, point, spent = at.shape, at.point, 0.0
        while shape.heads > self.least:
            costs = without_cost(point, shape.heads)
            i = int(costs.argmin())
            spent += float(costs[i])
            if spent > allowed:
                break
            shape = shape.keep([h for h in range(shape.heads) if h != i])
            point = at.model.evaluate(shape)
        return shape, point

    def fold(self, at: Ladder, batch: float = BATCH) -> bool:
        allowed = min(batch * at.point.loss, at.point.loss + NEAR**2 * at.scale)
        allowed = max(allowed, (at.floor / 16) ** 2 * at.scale)
        cuts: list[tuple[Formed, float]] = []
        shape, point = at.shape, at.point
        while shape.heads > self.least:
            shape, point = cheapest(at.model, shape, point)
            if cuts and point.loss > allowed:
                break
            cuts.append((shape, max(point.loss - at.point.loss, 0.0)))
            if point.loss > allowed:
                break
        while cuts:
            if tried(at, cuts[-1][0], cuts[-1][1], f"{at.shape.heads - cuts[-1][0].heads} heads fewer"):
                return True
            cuts = cuts[: len(cuts) // 2]
        return False

    def narrow(self, at: Ladder) -> None:
        """Fewer columns: those of V that cost next to nothing go, then a step down of their sizes is tried; so too
        for A and B where scores are products of the two; half the planes where they are turned."""
        self._narrow_out(at)
        form = at.shape.form
        if self.loose:
            return
        if form.normed is None and form.rotary is None:
            self._narrow_scores(at)
        elif form.rotary is not None and _halves(form.rotary, at.shape.q):
            key = (at.shape.q // 2, 0)
            if at.residual <= 0.1 * self.failed.get(key, math.inf):
                self.failed[key] = at.residual
                smaller = halved(at.shape)
                point = at.model.evaluate(smaller)
                tried(at, smaller, max(point.loss - at.point.loss, 0.0), f"columns {at.shape.q} → {key[0]}")

    def _narrow_out(self, at: Ladder) -> None:
        values = out_values(at)
        p = at.shape.p
        for fewer in sorted({min(p, columns_needed(values, FREE * at.point.loss)), step_down(values)}):
            if fewer >= p or at.residual > 0.1 * self.failed.get((0, fewer), math.inf):
                continue
            self.failed[0, fewer] = at.residual
            cost = float(values[:, fewer:].square().sum())
            if tried(at, narrowed_out(at.shape, at.point, fewer), cost, f"columns of V {p} → {fewer}"):
                return

    def _narrow_scores(self, at: Ladder) -> None:
        A, B = score_roots(at)
        values = torch.linalg.svdvals(A @ B.mT)
        q = at.shape.q
        for fewer in sorted({min(q, columns_needed(values, FREE * at.point.loss)), step_down(values[:, :q])}):
            if fewer >= q or at.residual > 0.1 * self.failed.get((fewer, 0), math.inf):
                continue
            self.failed[fewer, 0] = at.residual
            cost = float(values[:, fewer:].square().sum())
            if tried(at, narrowed_scores(at.shape, at, fewer), cost, f"columns {q} → {fewer}"):
                return


def cheapest(model: FormedModel, shape: Formed, point: FormedPoint) -> tuple[Formed, FormedPoint]:
    """The one head fewer that costs least, O and c solved again: left out, or joined with another."""
    m = shape.heads
    drop = without_cost(point, m)
    i = int(drop.argmin())
    tries = [shape.keep([h for h in range(m) if h != i])]
    join = merge_cost(point)
    for flat in join.flatten().argsort()[:TRIED].tolist():
        if float(join.flatten()[flat]) < 2 * float(drop[i]):
            tries.append((merged if shape.form.gate is None else gathered)(shape, point, flat // m, flat % m))
    points = [model.evaluate(smaller) for smaller in tries]
    best = min(range(len(tries)), key=lambda j: points[j].loss)
    return tries[best], points[best]


def merge_cost(point: FormedPoint) -> Tensor:
    """(m, m): Σ‖(P_i − P_j)V_iO_i‖², what head i loses with the pattern of head j, on some of the rows, as if all
    were like these."""
    shape, chain = point.shape, point.kept[0][0]
    m, n = shape.heads, min(LOOKED, len(chain.P))
    out = point.out.view(m, shape.p, -1)
    P, V = chain.P[:n], chain.V[:n]
    cost = P.new_zeros(m, m)
    for j in range(m):
        lost = torch.einsum("nmkp,mpe->nmke", (P - P[:, j : j + 1]) @ V, out)
        cost[:, j] = lost.square().sum((0, 2, 3))
    every = sum(len(chunk.P) for chunk, _ in point.kept)
    return (cost.double() * every / n).fill_diagonal_(math.inf)


def merged(shape: Formed, point: FormedPoint, i: int, j: int) -> Formed:
    """Head i joins head j: its pattern is that of j, their V_iO_i are added."""
    m, p = shape.heads, shape.p
    V, out = shape.tensors["value"].double().clone(), point.out.double().view(m, p, -1)
    V[j] = leading(torch.cat([V[i], V[j]], dim=1), torch.cat([out[i], out[j]]), p)
    keep = [h for h in range(m) if h != i]
    return Formed.of({**shape.tensors, "value": V.to(shape.value)}, shape.form).keep(keep)


def gathered(shape: Formed, point: FormedPoint, i: int, j: int) -> Formed:
    """Head i joins head j where channels are gated one by one: the p of both together that say most, found by
    leaving out one after the other, each time the cheapest, the others solved again."""
    m, p, chain = shape.heads, shape.p, point.kept[0][0]
    n = min(LOOKED, len(chain.P))
    assert chain.gate is not None
    H = torch.cat([chain.gate[:n, h] * (chain.P[:n, j] @ chain.V[:n, h]) for h in (i, j)], dim=2).flatten(0, 1)
    G = (H.mT @ H).double()
    whole = G @ torch.cat([point.out.double().view(m, p, -1)[h] for h in (i, j)])
    left = list(range(2 * p))
    while len(left) > p:
        back = torch.cholesky_inverse(cholesky(G[left][:, left]))
        O = back @ whole[left]  # noqa: E741 - the paper's letter
        left.pop(int((O.square().sum(1) / back.diagonal()).argmin()))
    t = dict(shape.tensors)
    for name in ("value", "gate"):
        t[name] = t[name].clone()
        t[name][j] = torch.cat([shape.tensors[name][i], shape.tensors[name][j]], dim=1)[:, left]
    return Formed.of(t, shape.form).keep([h for h in range(m) if h != i])


def _gram(chains: tuple[tuple[Chain, Tensor], ...]) -> Tensor:
    """Σ h_ih_iᵀ of what every head hands on, (m, p, p)."""
    parts = [chain.H.transpose(0, 1).flatten(1, 2).double() for chain, _ in chains]
    return torch.stack([x.mT @ x for x in parts]).sum(0)


def out_values(at: Ladder) -> Tensor:
    """Singular values of every head's output H_iO_i, (m, p): what columns of V cost."""
    shape: Formed = at.shape
    point: FormedPoint = at.point
    root = root_of(_gram(point.kept))
    out = point.out.double().view(shape.heads, shape.p, -1)
    if shape.form.gate is not None:  # channels are gated one by one and cannot be mixed
        sizes = root.norm(dim=1) * out.norm(dim=2)
        return torch.sort(sizes, dim=1, descending=True)[0]
    values: Tensor = torch.linalg.svdvals(root @ out)[:, : shape.p]
    return values


def narrowed_out(shape: Formed, point: FormedPoint, p: int) -> Formed:
    """p columns of V, those that matter most to the output."""
    m, t = shape.heads, dict(shape.tensors)
    root, out = root_of(_gram(point.kept)), point.out.double().view(m, shape.p, -1)
    if shape.form.gate is not None:
        best = (root.norm(dim=1) * out.norm(dim=2)).argsort(dim=1, descending=True)[:, :p]
        for name in ("value", "gate"):
            t[name] = t[name].gather(2, best.unsqueeze(1).expand(-1, t[name].shape[1], -1))
        form = shape.form.with_tensors({"gate": t["gate"]})
        return Formed.of(t, form)
    U = torch.linalg.svd(root @ out, full_matrices=False)[0][:, :, :p]
    mix = solved(root, U)
    return Formed.of({**t, "value": (t["value"].double() @ mix).to(shape.value)}, shape.form)


def score_roots(at: Ladder) -> tuple[Tensor, Tensor]:
    """A and B in the metric in which scores cost: S^½A and M^½B, as factors of which the singular values count."""
    shape: Formed = at.shape
    S, M = _score_metric(at)
    A, B = shape.tensors["query"].double(), shape.tensors["key"].double()
    return S @ A, M @ B


def _score_metric(at: Ladder) -> tuple[Tensor, Tensor]:
    found = at.model.products(at.point, at.shape, at.dtype).moments(at.generator).parts
    S, M = (found["asking"] / found["rows"]).double(), found["key_in"].double()
    return root_of(S), root_of(M)


def narrowed_scores(shape: Formed, at: Ladder, q: int) -> Formed:
    """The best A_iB_iᵀ with q columns, in the metric in which scores cost."""
    S, M = _score_metric(at)
    left, right = truncated(shape.tensors["query"].double(), shape.tensors["key"].double(), S, M, q)
    return Formed.of({**shape.tensors, "query": left.to(shape.value), "key": right.to(shape.value)}, shape.form)


def _halves(rotary: Rotary, size: int) -> bool:
    return rotary.turned is None and rotary.frequencies is None and size % 4 == 0


def halved(shape: Formed) -> Formed:
    """Every other plane: a head of half the size has those frequencies."""
    rotary, t = shape.form.rotary, dict(shape.tensors)
    assert rotary is not None
    one, two, _ = rotary.planes(torch.arange(shape.q))
    one, two = one[::2], two[::2]
    at = torch.cat([one, two]) if rotary.layout == "half" else torch.stack([one, two], dim=1).flatten()
    for name in ("query", "key", "norm_query", "norm_key"):
        if name in t:
            t[name] = t[name][..., at.to(t[name].device)]
    if shape.form.normed is None:
        return Formed.of(t, shape.form)
    # The mean square is over half as many coordinates.
    for name in ("norm_query", "norm_key"):
        t[name] = t[name] / math.sqrt(2)
    for name in ("query", "key"):
        t[name] = t[name] / math.sqrt(2)
    own = {name: t[name] for name in ("norm_query", "norm_key")}
    return Formed.of(t, shape.form.with_tensors(own))


def refine_form(
    source: FormSource, tensors: dict[str, Tensor], *, generator: torch.Generator, least: int = 1,
    sizes: bool = True, limit: int = 100, report: Callable[[float], None] | None = None,
    pulse: Callable[[], None] | None = None, log: Callable[[str], None] | None = None,
) -> FormCandidate:
    """The least-squares solution from ``tensors`` on, with as few heads and columns as it takes; out of time, what
    was reached, with the reason "time".

    Where planes turn little within a sequence, first with one matrix a head in their place (formed_steps.py), then
    with the planes that it has.
    """
    unknowns = {name: value for name, value in tensors.items() if name not in ("out", "offset")}
    shape = Formed.of(unknowns, source.form)
    reason, products = "", 0

    def climbed(begin: Formed, damping: float = HOPE) -> FormedLadder:
        nonlocal reason, products
        at = FormedLadder(source, begin, FormCuts(least, sizes, "step" in begin.shapes), generator,
                          limit=0 if reason == "time" else limit, report=report, pulse=pulse, log=log)
        at.damping = damping
        try:
            reason = at.climb() if reason != "time" else reason
        except OutOfTimeError:
            reason = "time"
        products += at.products
        return at

    loose = loosened(source, shape) if limit else None
    if loose is None:
        return replace(climbed(shape).found(reason), products=products)
    there = climbed(loose)
    near = climbed(tightened(there.shape), min(there.damping, HOPE))
    return replace(near.found(reason), products=products)


def loosened(source: FormSource, shape: Formed) -> Formed | None:
    """One matrix a head for the slow planes; None where places are given or there are no two such planes."""
    data, rotary = source.examples, shape.form.rotary
    if rotary is None or data.key_width is not None or data.length < 2 or data.take([0]).positions is not None:
        return None
    at = torch.arange(data.length, dtype=torch.float64, device=shape.value.device)
    columns = slow_columns(shape.form, shape.q, at, at).to(at.device)
    if len(columns) < 4:
        return None
    P = turns(rotary, shape.q, columns, 2, shape.value)[1].mT.expand(shape.heads, -1, -1)
    bias = shape.tensors["key"][:, -1, columns].unsqueeze(2)
    return Formed.of({**shape.tensors, "step": P, "drift": (P @ bias - bias).squeeze(2)}, shape.form)


def tightened(shape: Formed) -> Formed:
    """Its planes in place of the matrix."""
    t, rotary = dict(shape.tensors), shape.form.rotary
    assert rotary is not None
    t["query"], t["key"] = settled(t["query"], t["key"], t.pop("step"), t.pop("drift"), rotary)
    return Formed.of(t, shape.form)
