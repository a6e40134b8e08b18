"""min over the factors of a layer of any form of ‖Y − F(X)‖², O and c eliminated: a model for Gauss–Newton.

As in thin.py, with features H = [σ(G_i) ⊙ P_iV_i | 1] and unknowns A, B, V (biases in their last rows) beside those
that the form owns: gates, sinks, offsets, slopes, gains. Every head has keys of its own. Products come from
core.tangents, whatever the form.

A step costs, to first order, what it changes under random probes ω of the labels, g = ωOᵀ. Each linear map has its
own Kronecker product for that:
    query, gate   rows apart: second moment of [x_a; 1] ⊗ that of the derivative with respect to q_a or G_a
    key           Σ_a(c_ac_aᵀ + ρ Σ_b gS_ab²[z_b; 1][z_b; 1]ᵀ) ⊗ E[ddᵀ], c_a = Σ_b gS_ab [z_b; 1], d = ∂S_ab/∂k_b;
                  ρ the part of d that differs from key to key (turned or normed ones), 0 for plain scores
    value         Σ_a h_ah_aᵀ ⊗ E[(σ(G) ⊙ g)(σ(G) ⊙ g)ᵀ], h_a = Σ_b P_ab [z_b; 1]
The few unknowns of the form's own have blocks computed column by column on some of the rows. Of planes that hardly
turn more is said than such products can: formed_slow.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from headway.core import attention
from headway.core.devices import normal
from headway.core.forms import Form, places
from headway.core.tangents import ALIKE, Chain
from headway.learning.formed_slow import SEEN, WIDEST, Slow, along, slow_columns, squares
from headway.learning.formed_steps import Steps, slowest
from headway.learning.gauss_newton import LeastSquares
from headway.learning.shapes import Metric, inverse, lifted
from headway.learning.thin import LIFT, PRICE
from headway.linalg.krylov import Linear
from headway.linalg.projected import Problem, Rows
from headway.linalg.thin import Eliminated, features, outputs

MAPS = ("query", "key", "value", "gate")  # unknowns that are linear maps of tokens, (m, r, ·)
STEPS = ("step", "drift")  # unknowns of formed_steps.py
SAMPLE = 64  # sequences on which the blocks of the form's own unknowns are computed
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class FormRows(Rows):
    """Rows of a layer of any form: X and Z with a last column of ones, and positions, which stay float64."""

    Z: Tensor | None = None
    here: Tensor | None = None
    there: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Self:
        if self.X.dtype == dtype:
            return self
        return replace(self, X=self.X.to(dtype), Y=self.Y.to(dtype),
                       valid=None if self.valid is None else self.valid.to(dtype),
                       Z=None if self.Z is None else self.Z.to(dtype))

    @property
    def keys(self) -> Tensor:
        return self.X if self.Z is None else self.Z


class Formed:
    """The unknowns of m heads but O and c, held as (m, L), one row a head. What heads share stands in every row,
    and its mean counts."""

    def __init__(self, value: Tensor, form: Form, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.value, self.form, self.shapes = value, form, dict(shapes)
        self.tensors = self.parts(value)
        self._steps: Steps | None = None
        self._biased: Tensor | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], form: Form) -> Formed:
        """From query, key and value (m, ·, ·) and the form's unknowns. If they are there, "cap" is an unknown, and
        "step" and "drift", by which slow planes and the keys' bias go from place to place (formed_steps.py)."""
        names = [name for name in ("query", "key", "value", *form.tensors(), "cap", *STEPS) if name in tensors]
        m = len(tensors["query"])
        shapes = {name: tuple(tensors[name].shape) if name in ALIKE else tuple(tensors[name].shape[1:])
                  for name in names}
        rows = [tensors[name].expand(m, *shapes[name]) if name in ALIKE else tensors[name] for name in names]
        return cls(torch.cat([row.reshape(m, -1) for row in rows], dim=1), form, shapes)

    def parts(self, v: Tensor) -> Tensors:
        """v (m, L) by name."""
        found, at = {}, 0
        for name, shape in self.shapes.items():
            size = int(torch.Size(shape).numel())
            part = v[:, at : at + size].reshape(len(v), *shape)
            found[name] = part.mean(0) if name in ALIKE else part
            at += size
        return found

    def gathered(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Adjoint of ``parts``."""
        m = len(self.value)
        rows = [(parts[name] / m).expand(m, *shape) if name in ALIKE else parts[name]
                for name, shape in self.shapes.items()]
        return torch.cat([row.reshape(m, -1) for row in rows], dim=1)

    @property
    def own(self) -> Tensors:
        """The form's unknowns, with a cap that is none."""
        found = {name: value for name, value in self.tensors.items() if name not in MAPS}
        if self.form.cap is not None and "cap" not in found:
            found["cap"] = self.value.new_tensor(self.form.cap.value)
        return found

    def steps(self, places: int) -> Steps | None:
        """What turns slow planes where that is an unknown."""
        P, rotary = self.tensors.get("step"), self.form.rotary
        if self._steps is None and P is not None:
            assert rotary is not None
            self._steps = Steps.of(P, self.tensors["drift"], rotary, self.q, places)
        return self._steps

    def biased(self, parts: Tensors) -> Tensors:
        """Without the keys' bias where "drift" stands in its place."""
        if "drift" not in self.shapes:
            return parts
        if self._biased is None:
            rotary = self.form.rotary
            assert rotary is not None
            self._biased = torch.ones(self.shapes["key"], dtype=self.value.dtype, device=self.value.device)
            self._biased[-1, slowest(rotary, self.q, self.shapes["drift"][0]).to(self.value.device)] = 0.0
        return {**parts, "key": parts["key"] * self._biased}

    @property
    def maps(self) -> Tensors:
        return self.biased({name: self.tensors[name] for name in MAPS if name in self.tensors})

    @property
    def heads(self) -> int:
        return len(self.value)

    @property
    def q(self) -> int:
        return self.shapes["query"][1]

    @property
    def p(self) -> int:
        return self.shapes["value"][1]

    def growth(self) -> Tensor:
        """No direction of which the metric is known to think too highly."""
        return torch.zeros_like(self.value)

    def like(self, value: Tensor) -> Formed:
        return Formed(value, self.form, self.shapes)

    def moved(self, v: Tensor) -> Formed:
        """v added; turned queries and keys go along the curve on which they say all but the same."""
        new, d = self.like(self.value + v), self.parts(v)
        if self.form.rotary is None or self.form.normed is not None or "step" in d:
            return new
        A, B = along(self.tensors["query"], self.tensors["key"], d["query"], d["key"])
        return Formed.of({**new.tensors, "query": A, "key": B}, self.form)

    def to(self, dtype: torch.dtype) -> Formed:
        return self.like(self.value.to(dtype))

    def keep(self, heads: list[int]) -> Formed:
        return self.like(self.value[heads])


@dataclass(frozen=True)
class FormedPoint:
    """O and c with their loss; what products need again."""

    shape: Formed
    out: Tensor  # O, (m·p, e)
    offset: Tensor
    loss: float
    residuals: tuple[Tensor, ...]
    factor: Tensor  # Cholesky, of HᵀH
    kept: tuple[tuple[Chain, Tensor], ...]

    def tensors(self) -> Tensors:
        """All of the layer's."""
        m, p = self.shape.heads, self.shape.p
        return {**self.shape.tensors, "out": self.out.view(m, p, -1), "offset": self.offset}


class FormedModel(LeastSquares):
    """The model of gauss_newton: all unknowns but O and c."""

    def evaluate(self, shape: Formed) -> FormedPoint:
        kept = []
        for rows in self.problem.chunks:
            chain = chain_of(rows, shape)
            kept.append((chain, features(rows, chain.H, True)))
        best, residuals, loss, factor = outputs(self.problem, [H for _, H in kept])
        return FormedPoint(shape, best[:-1], best[-1], loss, residuals, factor, tuple(kept))

    def products(self, point: FormedPoint, shape: Formed, dtype: torch.dtype) -> FormedProducts:
        return FormedProducts(self.problem, point, shape, dtype)


def chain_of(rows: Rows, shape: Formed) -> Chain:
    """Everything from tokens to H on these rows."""
    assert isinstance(rows, FormRows)
    parts = {name: attention.apart(rows.keys if name in ("key", "value") else rows.X, F)
             for name, F in shape.maps.items()}
    steps = shape.steps(rows.X.shape[1])
    parts = parts if steps is None else steps.applied(parts)
    here = places(rows.X) if rows.here is None else rows.here
    there = rows.there if rows.there is not None else here if rows.Z is None else places(rows.Z)
    return Chain.of(parts, shape.form, shape.own, rows.see, here, there)


class FormedProducts(Eliminated):
    """v ↦ Jᵀ(I − Π)J v at one point, in a chosen precision."""

    shape: Formed

    def __init__(self, problem: Problem, point: FormedPoint, shape: Formed, dtype: torch.dtype) -> None:
        super().__init__(problem, point, shape, dtype)
        self.kept = [(chain.to(dtype), H.to(dtype)) for chain, H in point.kept]

    def _parts(self, v: Tensor) -> Tensors:
        return self.shape.biased(self.shape.parts(v))

    def _back(self, rows: Rows, chain: Chain, gH: Tensor) -> Tensor:
        """Adjoint of unknowns ↦ H."""
        g, steps = chain.pull(self._apart(rows, gH)), self.shape.steps(chain.P.shape[2])
        return self.shape.gathered(self.shape.biased(pulled(rows, g if steps is None else steps.pulled(chain, g))))

    def _push(self, rows: Rows, chain: Chain, d: Mapping[str, Tensor]) -> Tensor:
        """Changes of the unknowns as changes of H."""
        parts, steps = pushed(rows, d), self.shape.steps(chain.P.shape[2])
        return chain.push(parts if steps is None else steps.pushed(chain, parts))

    def _apart(self, rows: Rows, gH: Tensor) -> Tensor:
        """(n·k, m·p) to (n, m, k, p), rows weighted."""
        n, k = rows.Y.shape[:2]
        gH = gH if rows.valid is None else gH * rows.valid.reshape(n * k, 1)
        return gH.view(n, k, self.shape.heads, self.shape.p).transpose(1, 2)

    # -- what a step costs ----------------------------------------------------------------------------------

    def moments(self, generator: torch.Generator) -> Moments:
        """Second moments under one random probe of every row; see the module."""
        total: Moments | None = None
        for rows, (chain, _) in zip(self.problem.chunks, self.kept, strict=True):
            found = self._moments(rows, chain, generator)
            total = found if total is None else total.plus(found)
        assert total is not None
        return total

    def _moments(self, rows: Rows, chain: Chain, generator: torch.Generator) -> Moments:
        assert isinstance(rows, FormRows)
        g = self._worth(rows, generator)
        back = chain.pull(g)
        handed = g if chain.gate is None else g * chain.gate
        gS, _ = chain.of_scores(handed)
        keys = rows.keys.unsqueeze(1)
        # How scores answer to queries and keys: random signs on all pairs in sight.
        signs = normal(chain.P, generator) * (chain.P > 0)
        flat = chain.flatness()
        any_scores = chain.of_raw_scores(signs if flat is None else signs * flat)
        pairs = float((chain.P > 0).sum()) / chain.P.shape[1]
        # The part of that which is the same for all keys of a query: one sign for all of them.
        sight = (chain.P > 0).to(signs.dtype)
        sight = normal(sight[..., :1], generator) * sight / sight.sum(3, keepdim=True).clamp_min(1)
        alike = chain.of_raw_scores(sight if flat is None else sight * flat)["key"].sum(2, keepdim=True)
        gS = gS if flat is None else gS * flat
        loud = rows.keys.unsqueeze(1) * gS.square().sum(2).sqrt().unsqueeze(3)
        asking = (rows.X if rows.valid is None else rows.X * rows.valid).flatten(0, 1)
        seen = rows.keys.flatten(0, 1)
        given = self._weighted(rows, chain.P @ keys)
        weight = _flat(back["query"]).norm(dim=2, keepdim=True)
        asking_i = weight * rows.X.reshape(1, -1, rows.X.shape[2])
        return Moments({
            "rows": asking.new_tensor(float(len(asking))), "pairs": asking.new_tensor(pairs),
            "tokens": asking.new_tensor(float(len(seen))),
            "asking": asking.mT @ asking, "seen": seen.mT @ seen,
            "asking_i": asking_i.mT @ asking_i, "query": _square(back["query"]),
            "key_in": _square(gS @ keys), "key_each": _square(loud), "alike": _square(alike),
            "to_query": _square(any_scores["query"]), "to_key": _square(any_scores["key"]),
            "handed": _square(given), "given": _flat(given).sum(1), "value": _square(handed),
            **({} if chain.gate is None else {"gate": _square(back["gate"])}), **self._stepped(chain, gS)})

    def _stepped(self, chain: Chain, gS: Tensor) -> Tensors:
        """Of Σ_b s_ab (b − a) q̂_a dP k̂_b, where P is unknown."""
        steps = self.shape.steps(chain.P.shape[2])
        if steps is None:
            return {}
        far = (gS * chain.delta.to(gS)) @ chain.k_turned[..., steps.columns]
        return {"turned": _square(chain.q_turned[..., steps.columns]), "stepped": _square(far)}

    def _worth(self, rows: Rows, generator: torch.Generator) -> Tensor:
        """What H is worth to one random probe of every row."""
        omega = normal(rows.Y, generator)
        return self._apart(rows, omega.reshape(-1, omega.shape[2]) @ self.O.T)

    def slow(self, sides: Mapping[str, tuple[Tensor, Tensor]], generator: torch.Generator) -> Slow | None:
        """What is hardly determined of turned queries and keys, from as many rows as it takes."""
        t, one = self.shape.tensors, self.kept[0][0]
        columns = slow_columns(self.shape.form, self.shape.q, one.here, one.there).to(self.O.device)
        size = len(columns) * (len(columns) + 1)
        if "step" in self.shape.shapes or not 0 < size <= WIDEST:
            return None
        C, seen = self.O.new_zeros(self.shape.heads, size, size), 0.0
        while seen < SEEN * size:
            for rows, (chain, _) in zip(self.problem.chunks, self.kept, strict=True):
                n, k = rows.Y.shape[:2]
                some = min(n, max(1, math.ceil((SEEN * size - seen) / k)))
                worth = self._worth(rows, generator)
                C += squares(chain, worth if chain.gate is None else worth * chain.gate, columns, some)
                seen += float(some * k if rows.valid is None else rows.valid[:some].square().sum())
                if seen >= SEEN * size:
                    break
        return Slow.of(columns, t["query"], t["key"], sides, C * (self.problem.rows / seen))

    @staticmethod
    def _weighted(rows: Rows, x: Tensor) -> Tensor:
        return x if rows.valid is None else x * rows.valid.unsqueeze(1)

    def small(self) -> dict[str, Tensor]:
        """Blocks of the form's own unknowns, column by column on some rows: (m, s, s), or (s, s) if shared."""
        names = [name for name in self.shape.shapes if name not in (*MAPS, "step")]
        if not names:
            return {}
        rows, chain = self._some()
        times = self.problem.rows / max(rows.count, 1)
        found: dict[str, Tensor] = {}
        zero = {name: torch.zeros_like(part) for name, part in (("query", chain.Q), ("key", chain.K),
                                                                ("value", chain.V))}
        if chain.gate is not None:
            zero["gate"] = torch.zeros_like(chain.gate)
        nothing = {name: torch.zeros_like(part) for name, part in self.shape.tensors.items() if name not in MAPS}
        heads, steps = self.shape.heads, self.shape.steps(chain.P.shape[2])
        out = self.O.view(heads, self.shape.p, -1)
        for name in names:
            like = self.shape.tensors[name]
            alike = name in ALIKE
            columns = []
            for j in range(like.numel() if alike else like[0].numel()):
                unit = torch.zeros_like(like)
                unit.view(-1 if alike else heads, *([] if alike else [-1]))[..., j] = 1.0
                change = {**zero, **nothing, name: unit}
                dH = self._weighted(rows, chain.push(change if steps is None else steps.pushed(chain, change)))
                dY = torch.einsum("nmkp,mpe->mnke", dH, out)
                columns.append((dY.sum(0) if alike else dY.flatten(1)).reshape(1 if alike else heads, -1))
            C = torch.stack(columns, dim=1)
            block = times * (C @ C.mT)
            found[name] = block[0] if alike else block
        return found

    def _some(self) -> tuple[Rows, Chain]:
        """A few sequences of the first chunk."""
        rows, chain = self.problem.chunks[0], self.kept[0][0]
        n = min(SAMPLE, len(rows.Y))
        if n == len(rows.Y):
            return rows, chain
        part = replace(rows, **{name: value[:n] for name, value in vars(rows).items()
                                if isinstance(value, Tensor) and len(value) == len(rows.Y) and value.ndim > 1})
        return part, chain_of(part, self.shape)

    def metric(self, generator: torch.Generator) -> Metric:
        """D: Kronecker products for the maps, dense blocks for the rest. Damped, with a price on changes of scores
        as in thin.py: PRICE · the loss for a change of all scores by one."""
        M = self.moments(generator).parts
        rows, pairs = M["rows"], M["pairs"].clamp_min(1)
        asking, seen = lifted(M["asking"] / rows), lifted(M["seen"] / M["tokens"])
        to_query, to_key = M["to_query"] / pairs, lifted(M["to_key"] / pairs)
        query, value = lifted(M["query"]), lifted(M["value"] / rows)
        apart = (1 - _trace(M["alike"] / rows) / _trace(to_key)).clamp_min(0)
        key = lifted(M["key_in"] + apart[:, None, None] * M["key_each"])
        handed = M["handed"]
        if self.shape.form.sink is not None and self.shape.form.gate is None:
            mean = M["given"].unsqueeze(2)
            handed = handed - mean @ mean.mT / rows  # what is the same for all rows goes to c
        handed = lifted(handed)
        strength = _trace(M["query"]).clamp_min(torch.finfo(asking.dtype).tiny * 1e6)
        asking_i = lifted(M["asking_i"] / strength[:, None, None], LIFT)
        own = {name: lifted(block) if block.numel() else block for name, block in self.small().items()}
        count = float(len(self.shape.value))

        def by(sides: Mapping[str, tuple[Tensor, Tensor]], blocks: Mapping[str, Tensor]) -> Linear:
            def apply(v: Tensor) -> Tensor:
                return self.shape.gathered({
                    name: sides[name][0] @ x @ sides[name][1] if name in sides else
                    _block(blocks[name], x, name in ALIKE) for name, x in self.shape.parts(v).items()})
            return apply

        def back(sides: Mapping[str, tuple[Tensor, Tensor]], blocks: Mapping[str, Tensor]) -> Linear:
            # Rows hold the same of what is shared, and its mean counts: D there has the inverse m² D⁻¹.
            return by({name: (inverse(a), inverse(b)) for name, (a, b) in sides.items()},
                      {name: inverse(block) * (count**2 if name in ALIKE else 1.0)
                       for name, block in blocks.items()})

        base = {"query": (asking, query), "key": (key, to_key), "value": (handed, value)}
        if "gate" in M:
            base["gate"] = (asking, lifted(M["gate"]))
        if "step" in self.shape.shapes:
            base["step"] = (lifted(M["turned"] / rows), lifted(M["stepped"]))
        slow = self.slow(base, generator)

        def under(damping: float, loss: float) -> tuple[Linear, Metric]:
            on_query = damping * query + PRICE * loss * to_query
            on_key = damping * key + PRICE * loss * seen
            held = {**{name: (damping * a, b) for name, (a, b) in base.items()},
                    "query": (asking, on_query), "key": (on_key, to_key)}
            ratio = _trace(on_query) / _trace(query).clamp_min(torch.finfo(query.dtype).tiny * 1e6)
            root = ratio.sqrt().clamp(1e-6, 1e3)[:, None, None]
            near = {**{name: ((1 + damping) * a, b) for name, (a, b) in base.items()},
                    "query": (lifted(asking_i + root * asking, LIFT), lifted(query + on_query / root)),
                    "key": (lifted(key + on_key), to_key)}
            small = {name: damping * block + PRICE * loss * _one(block) for name, block in own.items()}
            hold = by(held, small)
            both = {name: block + small[name] for name, block in own.items()}
            solve = back(near, both)
            return hold, Metric(hold, solve if slow is None else slow.around(solve, held, self.shape))

        return Metric(by(base, own), back(base, own), under)


@dataclass(frozen=True)
class Moments:
    """Sums over rows, by name."""

    parts: Tensors

    def plus(self, other: Moments) -> Moments:
        return Moments({name: value + other.parts[name] for name, value in self.parts.items()})


def pushed(rows: Rows, d: Mapping[str, Tensor]) -> Tensors:
    """Changes of the unknowns as changes of queries, keys, values and gates of these rows."""
    assert isinstance(rows, FormRows)
    return {name: attention.apart(rows.keys if name in ("key", "value") else rows.X, F) if name in MAPS else F
            for name, F in d.items()}


def pulled(rows: Rows, g: Mapping[str, Tensor]) -> Tensors:
    """Adjoint of ``pushed``."""
    assert isinstance(rows, FormRows)
    X, Z = rows.X.flatten(0, 1), rows.keys.flatten(0, 1)
    return {name: attention.together(Z if name in ("key", "value") else X, G) if name in MAPS else G
            for name, G in g.items()}


def _flat(x: Tensor) -> Tensor:
    """(n, m, k, s) to (m, n·k, s)."""
    return x.transpose(0, 1).flatten(1, 2)


def _square(x: Tensor) -> Tensor:
    """Σ xxᵀ for every head: (n, m, k, s) to (m, s, s)."""
    rows = _flat(x)
    return rows.mT @ rows


def _one(block: Tensor) -> Tensor:
    return torch.eye(block.shape[-1], dtype=block.dtype, device=block.device)


def _trace(M: Tensor) -> Tensor:
    return M.diagonal(dim1=-2, dim2=-1).sum(-1)


def _block(block: Tensor, x: Tensor, alike: bool) -> Tensor:
    if alike:
        return (block @ x.reshape(-1)).view_as(x)
    return torch.einsum("mst,mt->ms", block, x.reshape(len(x), -1)).view_as(x)
