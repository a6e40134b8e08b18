"""Which changes of factors leave the layer's function as it is: how many there are, and one choice among them.

Coordinates of queries and keys fall into blocks that the form keeps apart: those that are not turned, with scores
q·k, and planes turned by one frequency, whose two coordinates are one complex number, with scores
Re(conj(q)·k·e^(iωΔ)). A block of c columns may be multiplied by any invertible matrix on the side of queries and
by its inverse adjoint on that of the keys: c² dimensions, or 2c² where the columns are complex. Norms forbid that
and leave the gains to be traded between queries and keys. Biases of keys and values may be invisible as well.

Counts are those of a layer with nothing special about its entries, at positions 0 … k − 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.forms import Form, Sight
from headway.core.positions import OffsetTable


@dataclass(frozen=True)
class Block:
    """Columns that may be mixed: first and second coordinates of planes with one frequency, or single columns."""

    one: tuple[int, ...]
    two: tuple[int, ...] = ()  # none where the columns are not turned
    sign: tuple[float, ...] = ()  # −1 where a plane is turned the other way round

    def read(self, F: Tensor) -> Tensor:
        """The block's columns of F (…, q): real, or complex (…, planes)."""
        if not self.two:
            return F[..., list(self.one)]
        return torch.complex(F[..., list(self.one)], F[..., list(self.two)] * F.new_tensor(self.sign))

    def write(self, F: Tensor, columns: Tensor) -> Tensor:
        """F with the block's columns replaced."""
        F = F.clone()
        if not self.two:
            F[..., list(self.one)] = columns
        else:
            F[..., list(self.one)] = columns.real
            F[..., list(self.two)] = columns.imag * F.new_tensor(self.sign)
        return F


def blocks(form: Form, size: int) -> list[Block]:
    """Planes of equal frequency together, whichever way round; planes of frequency 0 beside what is not turned."""
    if form.rotary is None:
        return [Block(tuple(range(size)))]
    one, two, rest = (part.tolist() for part in form.rotary.planes(torch.arange(size)))
    planes: dict[tuple[float, ...], list[tuple[int, int, float]]] = {}
    for first, second, omega in zip(one, two, form.rotary.omega(size).reshape(len(one), -1).tolist(), strict=True):
        sign = next((1.0 if w > 0 else -1.0 for w in omega if w), 0.0)
        if not sign:
            rest += [first, second]
        else:
            planes.setdefault(tuple(sign * w for w in omega), []).append((first, second, sign))
    found = [Block(*map(tuple, zip(*group, strict=True))) for group in planes.values()]
    return found + ([Block(tuple(rest))] if rest else [])


def key_bias_shows(form: Form) -> bool:
    """Whether adding the same to all scores of a query changes anything."""
    return form.cap is not None or form.sink is not None or form.normed is not None


def value_bias_shows(form: Form) -> bool:
    """Whether patterns may add up to something else than 1, or outputs are gated."""
    return form.sink is not None or form.gate is not None


def reached(table: OffsetTable, sight: Sight, length: int | None = None) -> Tensor:
    """Which buckets are read at positions 0 … length − 1, of any length if None: bool (buckets,)."""
    far = max(int(table.far or 0), table.values.shape[1]) + 1 if length is None else length - 1
    ahead = far if not sight.causal else min(far, max(sight.prefix - 1, 0))
    back = far
    if sight.window is not None:
        back = min(back, sight.window - 1)
        ahead = ahead if sight.causal else min(ahead, sight.window - 1)
    found = torch.zeros(table.values.shape[1], dtype=torch.bool)
    found[table.bucket(torch.arange(-back, ahead + 1))] = True
    return found


def freedom(tensors: Mapping[str, Tensor], form: Form, length: int | None = None) -> dict[str, int]:
    """Free dimensions by cause: of scores, of what the form adds to them, of values."""
    (m, rows, size), (g, keys, _) = tensors["query"].shape, tensors["key"].shape
    h, full = m // g, False
    if form.normed is not None:
        scores = sum(len(block.one) for block in blocks(form, size)) + (m + g if form.normed.eps == 0 else 0)
    else:
        scores = 0
        for block in blocks(form, size):
            c, complex_ = len(block.one), bool(block.two)
            seen = keys if complex_ or key_bias_shows(form) else keys - 1
            scores += g * (1 + complex_) * (c * (h * rows + keys) - product_dimension(h * rows, c, seen))
            full = full or (not complex_ and c >= min(h * rows, seen))
    return {"scores": scores, "offsets": _free_offsets(form, m, full, length),
            "values": _free_values(tensors, form)}


def product_dimension(rows: int, inner: int, columns: int) -> int:
    """Dimension of the matrices (rows, columns) of rank ``inner`` at most."""
    rank = min(rows, inner, columns)
    return rank * (rows + columns - rank)


def _free_offsets(form: Form, m: int, full: bool, length: int | None) -> int:
    """Buckets that nobody reads, and constants that may move from one place to another.

    A constant added to the scores of a head is invisible, or moves its sink; a cap makes it visible. It may sit in
    the table, in the sink, and, where factors have as many columns as rows, in the product of the two biases.
    """
    table = form.offsets if isinstance(form.offsets, OffsetTable) else None
    unread = 0 if table is None else m * int((~reached(table, form.sight, length)).sum())
    sink = form.sink is not None and form.cap is None
    sources = int(table is not None) + int(sink) + int(full and key_bias_shows(form))
    return unread + m * (max(sources - 1, 0) if key_bias_shows(form) else sources)


def _free_values(tensors: Mapping[str, Tensor], form: Form) -> int:
    (g, keys, p), (m, _, e) = tensors["value"].shape, tensors["out"].shape
    h = m // g
    if form.gate is not None:
        return g * p
    if value_bias_shows(form):
        return g * (p * (keys + h * e) - product_dimension(keys, p, h * e))
    bias = g * p - (0 if "offset" in tensors else min(g * p, e))
    return g * (p * (keys - 1 + h * e) - product_dimension(keys - 1, p, h * e)) + bias


def canonical_tensors(tensors: Mapping[str, Tensor], form: Form) -> dict[str, Tensor]:
    """The same function with every freedom used up: singular vectors for a block's factors, biases that do not show
    moved or zero, offsets of mean 0, loudest head first (groups by their loudest head)."""
    t = {name: value.double() for name, value in tensors.items()}
    t = _canonical_offsets(_canonical_values(_canonical_scores(t, form), form), form)
    order, groups = loudest_first(t, form)
    by_head = ("query", "out", "sink", "offsets", "slope", "gate")
    t = {name: value[order] if name in by_head else value[groups] if name in ("key", "value") else value
         for name, value in t.items()}
    return {name: value.to(tensors["query"].dtype) for name, value in t.items()}


def _canonical_scores(t: dict[str, Tensor], form: Form) -> dict[str, Tensor]:
    A, B = t["query"], t["key"]
    g, size = B.shape[0], A.shape[2]
    if form.normed is not None:
        return _canonical_gains(t, form)
    for block in blocks(form, size):
        a, b = block.read(A), block.read(B)
        if not block.two and not key_bias_shows(form):
            b = torch.cat([b[:, :-1], torch.zeros_like(b[:, -1:])], dim=1)
        left, b = balanced(a.conj().reshape(g, -1, a.shape[2]), b)
        A, B = block.write(A, left.conj().reshape(a.shape)), block.write(B, b)
    return {**t, "query": A, "key": B}


def _canonical_gains(t: dict[str, Tensor], form: Form) -> dict[str, Tensor]:
    """Gains positive and equally large on both sides; factors of norm 1 where no eps fixes it."""
    t = dict(t)
    for factor, gain in (("query", "norm_query"), ("key", "norm_key")):
        sign = torch.where(t[gain] < 0, -1.0, 1.0).to(t[gain])
        t[factor], t[gain] = t[factor] * sign, t[gain] * sign
        if form.normed is not None and form.normed.eps == 0:
            t[factor] = t[factor] / t[factor].flatten(1).norm(dim=1).clamp_min(1e-300).view(-1, 1, 1)
    for block in blocks(form, t["query"].shape[2]):
        columns = [block.one] if not block.two else [block.one, block.two]
        at = torch.tensor(columns)
        q, k = (t[name][at].norm(dim=0) for name in ("norm_query", "norm_key"))
        ratio = torch.where((q > 0) & (k > 0), (k / q.clamp_min(1e-300)).sqrt(), torch.ones_like(q))
        for name, times in (("norm_query", ratio), ("norm_key", 1 / ratio)):
            t[name] = t[name].index_put((at,), t[name][at] * times)
    return t


def _canonical_values(t: dict[str, Tensor], form: Form) -> dict[str, Tensor]:
    V, out = t["value"], t["out"]
    (g, _, p), (m, _, e) = V.shape, out.shape
    h = m // g
    if not value_bias_shows(form):
        moved = torch.einsum("gp,ghpe->e", V[:, -1], out.view(g, h, p, e))
        if "offset" in t or bool(moved.any()):
            t = {**t, "offset": t.get("offset", torch.zeros_like(moved)) + moved}
        V = torch.cat([V[:, :-1], torch.zeros_like(V[:, -1:])], dim=1)
    right = out.view(g, h, p, e).transpose(2, 3).reshape(g, h * e, p)
    if form.gate is None:
        right, V = balanced(right, V)
        return {**t, "value": V, "out": right.view(g, h, e, p).transpose(2, 3).reshape(m, p, e)}
    size, other = V.norm(dim=1, keepdim=True), right.norm(dim=1, keepdim=True)
    both = (size > 0) & (other > 0)
    scale = torch.where(both, (other / size.clamp_min(1e-300)).sqrt(), torch.ones_like(size)) * phase(V)
    order = (size * other).squeeze(1).argsort(dim=1, descending=True, stable=True)
    V, right = (F.gather(2, order.unsqueeze(1).expand_as(F)) for F in (V * scale, right / scale))
    heads = order.repeat_interleave(h, 0).unsqueeze(1).expand_as(t["gate"])
    return {**t, "value": V, "out": right.view(g, h, e, p).transpose(2, 3).reshape(m, p, e),
            "gate": t["gate"].gather(2, heads)}


def _canonical_offsets(t: dict[str, Tensor], form: Form) -> dict[str, Tensor]:
    if not isinstance(form.offsets, OffsetTable):
        return t
    read = reached(form.offsets, form.sight).to(t["offsets"].device)
    table = t["offsets"] * read
    if form.cap is not None:
        return {**t, "offsets": table}
    mean = table.sum(1, keepdim=True) / read.sum()
    t = {**t, "offsets": (table - mean) * read}
    return t if form.sink is None else {**t, "sink": t["sink"] - mean.squeeze(1)}


def loudest_first(t: Mapping[str, Tensor], form: Form) -> tuple[Tensor, Tensor]:
    """Order of the heads and of the groups by ‖score map‖·‖V_jO_i‖; heads of a group stay together."""
    A, B, V, out = (t[name] for name in ("query", "key", "value", "out"))
    m, g = A.shape[0], B.shape[0]
    h = m // g
    loud = (V.repeat_interleave(h, 0) @ out).flatten(1).norm(dim=1)
    if form.normed is None:  # with norms all heads have scores of one size
        squares = torch.zeros_like(loud)
        for block in blocks(form, A.shape[2]):
            a, b = block.read(A).conj(), block.read(B).repeat_interleave(h, 0)
            squares = squares + (a @ b.mT).flatten(1).abs().square().sum(1)
        loud = loud * squares.sqrt()
    by_group = loud.view(g, h)
    groups = by_group.max(dim=1).values.argsort(descending=True, stable=True)
    inside = by_group.argsort(dim=1, descending=True, stable=True)
    return (groups.unsqueeze(1) * h + inside[groups]).flatten(), groups


def balanced(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """A_jB_jᵀ = U S Vᴴ again as (U√S)(√S Vᴴ), the largest entry of every column of B positive.

    A (g, r, c), B (g, s, c), real or complex, c of any size: the product is never formed.
    """
    c = A.shape[2]
    Qa, Ra = torch.linalg.qr(A)
    Qb, Rb = torch.linalg.qr(B)
    U, s, Vh = torch.linalg.svd(Ra @ Rb.mT, full_matrices=False)
    root = s.sqrt().unsqueeze(1)
    A, B = (Qa @ U) * root, (Qb @ Vh.mT) * root
    turn = phase(B)
    A, B = A / turn.conj(), B * turn.conj()
    short = c - A.shape[2]
    A, B = (torch.cat([F, F.new_zeros(*F.shape[:2], short)], dim=2) for F in (A, B))
    return A, B


def phase(B: Tensor) -> Tensor:
    """The sign, or phase, of the largest entry of every column: (g, 1, c); 1 for a column of zeros."""
    at = B.abs().argmax(dim=1, keepdim=True)
    top = B.gather(1, at)
    return torch.where(top.abs() > 0, torch.sgn(top), torch.ones_like(top))
