"""What inputs and outputs can show of each head, whatever factors compute it.

Head i with group j has scores [x_a; 1]ᵀ M_i [z_b; 1] + …, where M_i is A_iB_jᵀ for coordinates that are not turned
(its column for the key bias left out where the same number for all keys of a query does not show), one complex
matrix for every frequency where they are, and the same with gains, beside A_iA_iᵀ and B_jB_jᵀ up to scale, where
queries and keys are normed. It answers with V_jO_i (its row for the value bias moved to the offset where patterns
add up to 1), or with one rank-one matrix and one gate for every channel. Two layers of one form are the same
function if all of these agree for heads in some order, and only then, unless heads are equal or dead.

Products are kept as their factors and compared through QR, so that a difference of 1e-16 is seen as one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from headway.core import checks
from headway.core.examples import BLOCK, Examples
from headway.core.factored import FactoredLayer
from headway.core.forms import Form, Normed, Sight
from headway.core.freedom import blocks, key_bias_shows, value_bias_shows
from headway.core.layer import AttentionLayer, of_softmax
from headway.core.positions import OffsetTable, Slope

STILL = "not turned"
NORMS = ("norms of queries", "norms of keys")
ONE_FREQUENCY = 1e-5  # relative: closer ones are compared with each other, their distance being an error of its own
VISITED = 1e-6  # of a feature's size: directions with less are rounding of float32 tokens, not visited
ONE_CAP = 1e-9  # relative: caps that are closer are one
PART_WORDS = {"cap": "a cap", "sink": "sinks", "normed": "norms of queries and keys", "gate": "gates"}
ONE_GATE = 1e-9  # relative: gates that are closer are one
CLIP = 4.0  # a pair that is further apart than this does not decide the others
Pair = tuple[Tensor, Tensor]  # (m, r, c) and (m, s, c): the products of every head


@dataclass(frozen=True, eq=False)
class Heads:
    """The heads of a layer without gauge, in float64 on the CPU; see the module's first lines.

    qk(i) and ov(i) are the matrices themselves. Rows of qk are features of x and then 1, its columns and the rows
    of ov features of z and then 1; what does not show is zero.
    """

    scores: dict[Hashable, Pair]
    values: Pair
    gate: Tensor | None  # (m, d + 1, p)
    constant: Tensor  # (m,): sink less what else is the same for all keys
    eps: Tensor  # (m, 2): of the norms, in units of the squares they are added to
    offset: Tensor
    form: Form

    @property
    def count(self) -> int:
        return self.values[0].shape[0]

    def qk(self, head: int) -> dict[Hashable, Tensor]:
        """Score matrices of one head: real for what is not turned, complex for every frequency."""
        checks.whole("head", head, 0, self.count - 1)
        return {name: L[head] @ R[head].mT for name, (L, R) in self.scores.items()}

    def ov(self, head: int) -> Tensor:
        """V_jO_i of one head; with gates one matrix for every channel."""
        checks.whole("head", head, 0, self.count - 1)
        V, out = self.values[0][head], self.values[1][head]
        return V @ out.mT if self.gate is None else torch.einsum("sp,ep->pse", V, out)

    def take(self, order: list[int]) -> Heads:
        """These heads only, in this order."""
        form = self.form.with_tensors({name: value[order] for name, value in self.form.tensors().items()
                                       if name in ("sink", "offsets", "slope", "gate")})
        return replace(self, scores={name: (L[order], R[order]) for name, (L, R) in self.scores.items()},
                       values=(self.values[0][order], self.values[1][order]), form=form,
                       gate=None if self.gate is None else self.gate[order],
                       constant=self.constant[order], eps=self.eps[order])


@dataclass(frozen=True, eq=False)
class Visited:
    """Orthonormal bases of what [x; 1] of queries and [z; 1] of keys visit, (d + 1, r) and (z + 1, s)."""

    queries: Tensor
    keys: Tensor


def visited(on: Examples) -> Visited:
    """Which directions the tokens of these examples visit, to ``VISITED`` of each feature's size."""
    grams: list[Any] = [0.0, 0.0]
    for batch in on.batches(BLOCK):
        grams[0] = grams[0] + _moments(batch.X, batch.padding)
        if batch.keys is not None:
            grams[1] = grams[1] + _moments(batch.keys, batch.key_padding)
    U = _span(grams[0])
    return Visited(U, U if on.key_width is None else _span(grams[1]))


def visited_about_zero(on: Examples) -> Tensor:
    """An orthonormal basis (d, r) of what the tokens themselves visit, without a constant beside them."""
    gram: Any = 0.0
    for batch in on.batches(BLOCK):
        gram = gram + _moments(batch.X, batch.padding)[:-1, :-1]
    return _span(gram)


def _moments(X: Tensor, padding: Tensor | None) -> Tensor:
    """Σ [x; 1][x; 1]ᵀ over the tokens that count."""
    rows = X.double().cpu() if padding is None else X[~padding].double().cpu()
    rows = rows.reshape(-1, X.shape[2])
    rows = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
    return rows.mT @ rows


def _span(gram: Tensor) -> Tensor:
    """An orthonormal basis of what tokens with these moments visit; features are brought to one size first."""
    size = gram.diagonal().sqrt()
    size = torch.where(size > 0, size, torch.ones_like(size))
    values, vectors = torch.linalg.eigh(gram / size.outer(size))
    seen = vectors[:, values > VISITED**2 * values.max()]
    basis: Tensor = torch.linalg.qr(size.unsqueeze(1) * seen)[0]
    return basis


def as_factored(layer: AttentionLayer | FactoredLayer) -> FactoredLayer:
    """The same layer in factors; Θ_i and W_i become factors as they are, beside an identity that heads share."""
    if isinstance(layer, FactoredLayer):
        return layer
    if not isinstance(layer, AttentionLayer):
        checks.refuse("layer", "a headway.AttentionLayer or headway.FactoredLayer", type(layer).__name__,
                      "headway.from_torch(module), or headway.compare, which takes modules and files")
    of_softmax("layer", layer)
    m, d = layer.heads, layer.width
    u = layer.Theta.new_zeros(m, d) if layer.key_bias is None else layer.key_bias
    eye = torch.cat([torch.eye(d).to(layer.Theta), layer.Theta.new_zeros(1, d)]).unsqueeze(0)
    return FactoredLayer(torch.cat([layer.Theta, u.unsqueeze(1)], dim=1), eye, eye, layer.W, layer.offset,
                         Form(sight=Sight(causal=layer.mask == "causal")))


def heads_of(layer: AttentionLayer | FactoredLayer, on: Examples | None = None) -> Heads:
    """What inputs and outputs can show of each head of a layer, whatever factors compute it.

    on: examples, if only what their tokens can show is meant: directions that no token has are left out. Features
    then are coordinates in an orthonormal basis of the directions that are visited.

    >>> layer = FactoredLayer.random(heads=2, width=6, seed=0)
    >>> heads_of(layer).qk(0)["not turned"].shape, heads_of(layer).ov(0).shape
    (torch.Size([7, 7]), torch.Size([7, 6]))
    """
    return _heads(as_factored(layer), None if on is None else visited(on))


def _heads(layer: FactoredLayer, seen: Visited | None) -> Heads:
    form = layer.form.to("cpu").to(torch.float64)
    t = {name: value.detach().cpu().double() for name, value in layer.tensors().items()}
    A, B, V, out, gate = (t.get(name) for name in ("query", "key", "value", "out", "gate"))
    assert A is not None and B is not None and V is not None and out is not None
    h = layer.heads // layer.groups
    if seen is not None:
        if (len(seen.queries), len(seen.keys)) != (A.shape[1], B.shape[1]):
            checks.refuse("on", f"examples of width {layer.width}", f"width {len(seen.queries) - 1}",
                          "examples of this layer's inputs")
        A, B, V = seen.queries.mT @ A, seen.keys.mT @ B, seen.keys.mT @ V
        gate = None if gate is None else seen.queries.mT @ gate
    one = _last(B) if seen is None else seen.keys[-1]  # the function that is 1 on every key
    me = _last(A) if seen is None else seen.queries[-1]
    constant, eps = torch.zeros(layer.heads).double(), torch.zeros(layer.heads, 2).double()
    scores: dict[Hashable, Pair] = {}
    if form.normed is not None:
        scores, eps = _normed(A, B.repeat_interleave(h, 0), form.normed)
        A, B = A * t["norm_query"], B * t["norm_key"]
    B = B.repeat_interleave(h, 0)
    for block in blocks(form, layer.size):
        a, b = block.read(A).conj(), block.read(B)
        if form.normed is not None:
            size = _size(t["query"] if seen is None else seen.queries.mT @ t["query"])
            other = _size(t["key"] if seen is None else seen.keys.mT @ t["key"]).repeat_interleave(h, 0)
            a, b = a * (layer.size / size), b / other
        name: Hashable = STILL
        if block.two:
            first = block.one[0]
            omega = form.rotary.omega(layer.size).reshape(-1, form.rotary.vectors or 1)  # type: ignore[union-attr]
            planes = form.rotary.planes(torch.arange(layer.size))[0].tolist()  # type: ignore[union-attr]
            name = tuple((omega[planes.index(first)] * block.sign[0]).tolist())
        elif not key_bias_shows(form):
            b = b - one.unsqueeze(1) * ((one @ b) / one.square().sum()).unsqueeze(1)
        elif form.normed is None and form.cap is None:  # the constant of all scores belongs to the sink
            a, b, moved = _without_constant(a, b, me, one)
            constant = constant - moved
        scores[name] = (a, b)
    if form.sink is not None:
        constant = constant + t["sink"]
    offset = t.get("offset", torch.zeros(layer.out_width).double())
    V = V.repeat_interleave(h, 0)
    if not value_bias_shows(form):
        bias = (one @ V) / one.square().sum()  # (m, p)
        offset = offset + torch.einsum("mp,mpe->e", bias, out)
        V = V - one.unsqueeze(1) * bias.unsqueeze(1)
    return Heads(scores, (V, out.mT), gate, constant, eps, offset, form)


def _last(F: Tensor) -> Tensor:
    """The last unit vector: the bias' row."""
    return torch.eye(F.shape[1], dtype=F.dtype)[-1]


def _size(F: Tensor) -> Tensor:
    found: Tensor = F.flatten(1).norm(dim=1).clamp_min(1e-300).view(-1, 1, 1)
    return found


def _normed(A: Tensor, B: Tensor, norms: Normed) -> tuple[dict[Hashable, Pair], Tensor]:
    """A_iA_iᵀ and B_jB_jᵀ up to scale, and eps in units of the squares that it is added to."""
    sizes = [_size(F) for F in (A, B)]
    parts: dict[Hashable, Pair] = {name: (F / size, F / size)
                                   for name, F, size in zip(NORMS, (A, B), sizes, strict=True)}
    return parts, torch.stack([norms.eps * A.shape[2] / size.flatten().square() for size in sizes], dim=1)


def _without_constant(a: Tensor, b: Tensor, me: Tensor, one: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """abᵀ without its part along me·oneᵀ, in twice as many columns, and that part."""
    here, there = (me @ a) / me.square().sum(), (one @ b) / one.square().sum()
    a0, b0 = a - me.unsqueeze(1) * here.unsqueeze(1), b - one.unsqueeze(1) * there.unsqueeze(1)
    left = torch.cat([a0, me.unsqueeze(1) * here.unsqueeze(1)], dim=2)
    return left, torch.cat([b, b0], dim=2), (here * there).sum(1)


def unlike(a: FactoredLayer, b: FactoredLayer) -> str | None:
    """What keeps two layers from having one form, in words; None if nothing does.

    Layouts and bases may differ: frequencies are matched one by one.
    """
    if a.cross != b.cross:
        return f"keys of another sequence in {'the first' if a.cross else 'the second'} only"
    for name, one, other in (("width", a.width, b.width), ("keys of width", a.key_width, b.key_width),
                             ("outputs of width", a.out_width, b.out_width)):
        if one != other:
            return f"{name} {one} against {other}"
    f, g = a.form, b.form
    if f.sight != g.sight:
        return f"{f.sight.describe() or 'all keys in sight'} against {g.sight.describe() or 'all keys in sight'}"
    for name, words in PART_WORDS.items():
        if (getattr(f, name) is None) != (getattr(g, name) is None):
            return f"{words} in {'the first' if getattr(g, name) is None else 'the second'} only"
    if f.cap is not None and g.cap is not None and not math.isclose(f.cap.value, g.cap.value, rel_tol=ONE_CAP):
        return f"a cap of {f.cap.value:.10g} against {g.cap.value:.10g}"
    return None


@dataclass(frozen=True)
class Distances:
    """Relative distances: scores[i, j] and values[i, j] of head j of one layer from head i of the other."""

    scores: np.ndarray
    values: np.ndarray

    def assignment(self) -> tuple[np.ndarray, np.ndarray]:
        cost = np.minimum(self.scores, CLIP) ** 2 + np.minimum(self.values, CLIP) ** 2
        rows, columns = linear_sum_assignment(cost)
        return rows, columns


def distances(one: Heads, other: Heads) -> Distances:
    """All pairs at once, through Gram matrices: to about 1e-8 of the size of a head."""
    square = torch.zeros(other.count, one.count, dtype=torch.float64)
    size = torch.zeros(other.count, dtype=torch.float64)  # what is added to scores may dwarf them
    for mine, theirs, off in _together(one, other):
        each = _gram(theirs, None)
        square, size = square + _gram(mine, theirs) + off**2 * each.unsqueeze(1), size + each
    x, y = _numbers(one, other)
    added, whole = (y.unsqueeze(1) - x).square().sum(2), size + y.square().sum(1)
    size = torch.where(size > 0, size, whole)
    scores = np.hypot(_root(square, size), _root(added, whole))
    if one.gate is None:
        values, whole = _gram(one.values, other.values), _gram(other.values, None)
    else:
        values, whole = _gated(one, other)
    return Distances(scores, _root(values, whole))


def _root(square: Tensor, size: Tensor) -> np.ndarray:
    size = torch.where(size > 0, size, torch.ones_like(size))
    found: np.ndarray = (square.clamp_min(0) / size.unsqueeze(1)).sqrt().numpy()
    return found


def _gram(mine: Pair, theirs: Pair | None) -> Tensor:
    """‖L_jR_jᵀ − L'_iR'_iᵀ‖² for all (i, j), or ‖L_jR_jᵀ‖² if there are no others."""
    def inner(x: Pair, y: Pair) -> Tensor:
        left, right = (torch.einsum("irc,jrd->ijcd", p.conj(), q) for p, q in zip(x, y, strict=True))
        return (left * right).sum((2, 3)).real

    def own(x: Pair) -> Tensor:
        return ((x[0].mH @ x[0]) * (x[1].mH @ x[1])).sum((1, 2)).real

    if theirs is None:
        return own(mine)
    return own(theirs).unsqueeze(1) + own(mine) - 2 * inner(theirs, mine)


def _gated(one: Heads, other: Heads) -> tuple[Tensor, Tensor]:
    """The same for Σ_c v_c ⊗ o_c ⊗ g_c, which fixes channels up to their order."""
    def inner(x: Heads, y: Heads) -> Tensor:
        assert x.gate is not None and y.gate is not None
        parts = zip((*x.values, x.gate), (*y.values, y.gate), strict=True)
        found = [torch.einsum("irc,jrd->ijcd", p, q) for p, q in parts]
        return (found[0] * found[1] * found[2]).sum((2, 3))

    size = inner(other, other).diagonal()
    return size.unsqueeze(1) + inner(one, one).diagonal() - 2 * inner(other, one), size


def _together(one: Heads, other: Heads) -> list[tuple[Pair, Pair, float]]:
    """Score matrices of both, those of one frequency side by side, and how far their frequencies are apart of their
    size, which is by how much scores are off one turn on; zero where one has none."""
    def zero(pair: Pair, count: int) -> Pair:
        return (pair[0].new_zeros(count, *pair[0].shape[1:2], 1), pair[1].new_zeros(count, *pair[1].shape[1:2], 1))

    left = dict(other.scores)
    found = []
    for name, pair in one.scores.items():
        off, partner = min(((_off(name, n), n) for n in left), key=lambda near: near[0], default=(math.inf, None))
        if off > ONE_FREQUENCY:
            found.append((pair, zero(pair, other.count), 0.0))
        else:
            found.append((pair, left.pop(partner), off))
    return found + [(zero(pair, one.count), pair, 0.0) for pair in left.values()]


def _off(name: Hashable, other: Hashable) -> float:
    if isinstance(name, str) or isinstance(other, str):
        return 0.0 if name == other else math.inf
    assert isinstance(name, tuple) and isinstance(other, tuple)
    return math.dist(name, other) / math.hypot(*name) if len(name) == len(other) else math.inf


def _numbers(one: Heads, other: Heads) -> tuple[Tensor, Tensor]:
    """What is added to scores for an offset, sinks and eps, (m, numbers) each: offsets −R … R that are in sight of
    both, their root mean square over R what counts, so that a table weighs as much as the scores that it is added
    to."""
    reach = max((int(heads.form.offsets.far or 0) + 1 for heads in (one, other)
                 if isinstance(heads.form.offsets, OffsetTable)), default=0)
    delta = torch.arange(-reach, reach + 1)
    for sight in (one.form.sight, other.form.sight):
        if sight.causal and not sight.prefix:
            delta = delta[delta <= 0]
        if sight.window is not None:
            delta = delta[delta > -sight.window]
            delta = delta if sight.causal else delta[delta < sight.window]
    return _added(one, delta), _added(other, delta)


def _added(heads: Heads, delta: Tensor) -> Tensor:
    form = heads.form
    constant, slope = heads.constant, torch.zeros(heads.count).double()
    table = torch.zeros(heads.count, len(delta)).double()
    if isinstance(form.offsets, OffsetTable):
        table = form.offsets.values.double()[:, form.offsets.bucket(delta)]
        if form.cap is None:
            mean = table.mean(1)
            table, constant = table - mean.unsqueeze(1), constant - (mean if form.sink is not None else 0.0)
    elif isinstance(form.offsets, Slope):
        slope = form.offsets.values.double()
    return torch.cat([table / math.sqrt(max(table.shape[1], 1)), slope.unsqueeze(1), constant.unsqueeze(1),
                      heads.eps], dim=1)


def errors(one: Heads, other: Heads) -> tuple[list[float], list[float]]:
    """Relative errors of the scores and of the values of head i of one from head i of the other, to rounding: of
    scores by their own size, of what is added to them by that of both."""
    square = torch.zeros(other.count, dtype=torch.float64)
    size = torch.zeros(other.count, dtype=torch.float64)
    for mine, theirs, off in _together(one, other):
        each = _gram(theirs, None)
        square, size = square + apart(mine, theirs) + off**2 * each, size + each
    x, y = _numbers(one, other)
    added, total = (y - x).square().sum(1), size + y.square().sum(1)
    size = torch.where(size > 0, size, total)
    if one.gate is None:
        values, whole = apart(one.values, other.values), _gram(other.values, None)
    else:
        values, whole = _channels(one, other)
    scores, more, out = ([math.sqrt(s / (w or 1.0)) for s, w in zip(part.tolist(), of.tolist(), strict=True)]
                         for part, of in ((square, size), (added, total), (values, whole)))
    return [math.hypot(*pair) for pair in zip(scores, more, strict=True)], out


def apart(mine: Pair, theirs: Pair) -> Tensor:
    """‖L_iR_iᵀ − L'_iR'_iᵀ‖² for every i, differences formed before they are squared."""
    left = torch.cat([mine[0], -theirs[0]], dim=2)
    right = torch.cat([mine[1], theirs[1]], dim=2)
    if left.shape[2] < min(left.shape[1], right.shape[1]):
        left, right = torch.linalg.qr(left, mode="r")[1], torch.linalg.qr(right, mode="r")[1]
    found: Tensor = (left @ right.mT).abs().square().sum((1, 2))
    if all(x.shape == y.shape for x, y in zip(mine, theirs, strict=True)):  # equal factors differ by nothing at all
        equal = [(x == y).flatten(1).all(1) for x, y in zip(mine, theirs, strict=True)]
        found = found.masked_fill(equal[0] & equal[1], 0.0)
    return found


def _channels(one: Heads, other: Heads) -> tuple[Tensor, Tensor]:
    """The same for gated heads, channels paired one by one (all channels of one gate as one): their matrices, and
    their gates by as much as they matter."""
    assert one.gate is not None and other.gate is not None
    found, sizes = [], []
    for i in range(other.count):
        (V, out, G), (V0, out0, G0) = ((h.values[0][i], h.values[1][i], h.gate[i])  # type: ignore[index]
                                       for h in (one, other))
        shared, shared0 = _gates(G), _gates(G0)
        if V.shape != V0.shape or max(map(len, shared + shared0)) > 1:
            moved, size = _shared((V, out, G), (V0, out0, G0), shared, shared0)
            found.append(moved)
            sizes.append(size)
            continue
        alike = (_cosines(V0, V) * _cosines(out0, out)).abs() + _cosines(G0, G)
        _, order = linear_sum_assignment(-alike.numpy())
        V, out, G = V[:, order], out[:, order], G[:, order]
        each = apart((V.T.unsqueeze(2), out.T.unsqueeze(2)), (V0.T.unsqueeze(2), out0.T.unsqueeze(2)))
        size = V0.square().sum(0) * out0.square().sum(0)
        moved = (G - G0).square().sum(0) / G0.square().sum(0).clamp_min(1e-300)
        found.append((each + size * moved).sum())
        sizes.append(size.sum())
    return torch.stack(found), torch.stack(sizes)


def _gates(G: Tensor) -> list[list[int]]:
    """Channels by their gate, those of equal gates together."""
    near = torch.cdist(G.mT, G.mT, compute_mode="donot_use_mm_for_euclid_dist")
    same = near <= ONE_GATE * G.norm(dim=0)
    found: list[list[int]] = []
    for c in range(G.shape[1]):
        home = next((group for group in found if same[group[0], c]), None)
        found.append([c]) if home is None else home.append(c)
    return found


def _shared(
    mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...], shared: list[list[int]], shared0: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """The error and the size of one head's values where channels share gates: only their V_cO_c together shows."""
    groups = [[(V[:, c], out[:, c], G[:, c[0]]) for c in by_gate]
              for (V, out, G), by_gate in ((mine, shared), (theirs, shared0))]
    sizes = [torch.stack([_gram((V[None], out[None]), None)[0].clamp_min(0) for V, out, _ in part])
             for part in groups]
    alike = torch.stack([torch.stack([
        ((V0.mT @ V) * (out0.mT @ out)).sum().abs() / (size0 * size).sqrt().clamp_min(1e-300)
        + _cosines(G0.unsqueeze(1), G.unsqueeze(1))[0, 0]
        for (V, out, G), size in zip(groups[0], sizes[0], strict=True)])
        for (V0, out0, G0), size0 in zip(groups[1], sizes[1], strict=True)])
    rows, columns = linear_sum_assignment(-alike.numpy())
    total = sum((sizes[at][k] for at, paired in ((0, columns), (1, rows)) for k in range(len(sizes[at]))
                 if k not in paired), torch.zeros(()).double())  # what has no partner is off by all of it
    for i, j in zip(rows.tolist(), columns.tolist(), strict=True):
        (V, out, G), (V0, out0, G0) = groups[0][j], groups[1][i]
        left, right = (torch.cat(pair, dim=1)[None] for pair in ((V, -V0), (out, out0)))
        each = (left @ right.mT).square().sum()
        turn = (G - G0).square().sum() / G0.square().sum().clamp_min(1e-300)
        total = total + each + sizes[1][i] * turn
    return total, sizes[1].sum()


def _cosines(x: Tensor, y: Tensor) -> Tensor:
    x, y = (v / v.norm(dim=0).clamp_min(1e-300) for v in (x, y))
    return x.mT @ y


def merged(heads: Heads, tolerance: float) -> tuple[Heads, list[int]]:
    """The same function with heads of equal scores merged (their values add up) and dead ones dropped, the last
    never; and which of the heads these are, the first of those that were merged."""
    found = distances(heads, heads).scores
    groups: list[list[int]] = []
    for i in range(heads.count):
        for group in groups:
            j = group[0]
            if found[j, i] < 1e-6 and errors(
                    heads.take([i]), heads.take([j]))[0][0] <= tolerance:
                group.append(i)
                break
        else:
            groups.append([i])
    kept = [group[0] for group in groups]
    if len(groups) < heads.count:
        V, out = heads.values
        most = max(map(len, groups))
        parts = [torch.stack([torch.cat([F[i] for i in g] + [torch.zeros_like(F[0])] * (most - len(g)), dim=1)
                              for g in groups]) for F in (V, out, *([] if heads.gate is None else [heads.gate]))]
        heads = replace(heads.take(kept), values=(parts[0], parts[1]),
                        gate=None if heads.gate is None else parts[2])
    V, out = heads.values  # gated channels cannot cancel each other
    loud = (_gram(heads.values, None) if heads.gate is None else
            (V.square().sum(1) * out.square().sum(1)).sum(1)).clamp_min(0).sqrt()
    alive = [i for i in range(heads.count) if loud[i] > tolerance * loud.max() or i == int(loud.argmax())]
    return (heads if len(alive) == heads.count else heads.take(alive)), [kept[i] for i in alive]
