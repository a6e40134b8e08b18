"""H(Q, K, V, G, own) of any form at one point, its derivative and the adjoint of that.

    Q̂ = R_a n(Q),  K̂ = R_b n(K),  S = cap(Q̂K̂ᵀ + offsets),  P = softmax(S in sight, sink),  H = σ(G) ⊙ PV

Q, K, V and G are what queries, keys, values and gates are before anything is done to them, (n, m, k, ·), every head
with keys of its own. The rules are written out: torch.func computes the same in three times the time (it is the
reference in the tests).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from headway.core.attention import softmax_rule
from headway.core.forms import Form, normed
from headway.core.positions import OffsetTable

Parts = dict[str, Tensor]  # of Q, K, V, gate (n, m, k, ·) by the names of the factors, and the form's unknowns
ALIKE = ("norm_query", "norm_key", "cap")  # unknowns that all heads share


@dataclass(frozen=True)
class Chain:
    """What heads compute on the way from queries, keys and values to H, kept for products."""

    form: Form
    own: Parts
    Q: Tensor  # before norms and turns
    K: Tensor
    q_turned: Tensor
    k_turned: Tensor
    V: Tensor
    P: Tensor  # (n, m, k, l)
    bent: Tensor | None  # tanh(S/c) under a cap
    sunk: Tensor | None  # what the sink takes, (n, m, k, 1)
    gate: Tensor | None  # σ(G)
    attended: Tensor  # PV
    here: Tensor
    there: Tensor

    @classmethod
    def of(
        cls, parts: Mapping[str, Tensor], form: Form, own: Mapping[str, Tensor], see: Tensor | None, here: Tensor,
        there: Tensor,
    ) -> Chain:
        """``parts``: query, key, value and, where outputs are gated, gate, one number for each token and column."""
        Q, K, V = parts["query"], parts["key"], parts["value"]
        q, k = Q, K
        if form.normed is not None:
            q, k = normed(Q, own["norm_query"], form.normed.eps), normed(K, own["norm_key"], form.normed.eps)
        if form.rotary is not None:
            q, k = form.rotary.turn(q, here), form.rotary.turn(k, there)
        S = q @ k.mT
        if form.offsets is not None:
            S = S + form.offsets.added(own, there.unsqueeze(-2) - here.unsqueeze(-1))
        bent = None
        if form.cap is not None:
            bent = torch.tanh(S / own["cap"])
            S = own["cap"] * bent
        if see is not None:
            S = S.masked_fill(~see.unsqueeze(1), float("-inf"))
        sunk = None
        if form.sink is None:
            P = torch.softmax(S, dim=3)
        else:
            sink = own["sink"].view(1, -1, 1, 1).expand(*S.shape[:3], 1)
            P = torch.softmax(torch.cat([S, sink], dim=3), dim=3)
            P, sunk = P[..., :-1], P[..., -1:]
        gate = None if form.gate is None else torch.sigmoid(parts["gate"])
        return cls(form, dict(own), Q, K, q, k, V, P, bent, sunk, gate, P @ V, here, there)

    @property
    def H(self) -> Tensor:
        """(n, m, k, p)."""
        return self.attended if self.gate is None else self.gate * self.attended

    def to(self, dtype: torch.dtype) -> Chain:
        """The same in another precision; positions stay as they are."""
        if self.P.dtype == dtype:
            return self
        moved = {field.name: getattr(self, field.name).to(dtype) for field in fields(self)
                 if field.name not in ("here", "there") and isinstance(getattr(self, field.name), Tensor)}
        return replace(self, **moved, own={name: value.to(dtype) for name, value in self.own.items()})

    # -- derivative -----------------------------------------------------------------------------------------

    def push(self, d: Mapping[str, Tensor]) -> Tensor:
        """dH for changes of everything: query, key, value, gate (n, m, k, ·) and the form's unknowns."""
        dQ = self._prepared(self.Q, d["query"], "norm_query", d, self.here)
        dK = self._prepared(self.K, d["key"], "norm_key", d, self.there)
        dS = dQ @ self.k_turned.mT + self.q_turned @ dK.mT
        if self.form.offsets is not None:
            dS = dS + self.form.offsets.added(d, self.delta)
        if self.bent is not None:
            dS = (1 - self.bent.square()) * dS
            dS = dS + d["cap"] * self._by_cap() if "cap" in d else dS
        dA = self.sunk_rule(dS, d.get("sink")) @ self.V + self.P @ d["value"]
        if self.gate is None:
            return dA
        return self.gate * (dA + (1 - self.gate) * self.attended * d["gate"])

    def pull(self, g: Tensor) -> Parts:
        """Adjoint of ``push``: g (n, m, k, p) to changes of everything."""
        found: Parts = {}
        if self.gate is not None:
            found["gate"] = g * self.gate * (1 - self.gate) * self.attended
            g = g * self.gate
        found["value"] = self.P.mT @ g
        gS, gs = self.of_scores(g)
        if gs is not None:
            found["sink"] = gs.sum((0, 2, 3))
        if self.bent is not None:
            found["cap"] = (gS * self._by_cap()).sum()
            gS = gS * (1 - self.bent.square())
        if self.form.offsets is not None:
            found.update(self._offsets_back(gS))
        found.update(self.of_raw_scores(gS))
        return found

    def of_scores(self, g: Tensor) -> tuple[Tensor, Tensor | None]:
        """What scores, after the cap, and the sink are worth: PV answers to them with g (n, m, k, p)."""
        gP = g @ self.V.mT
        inner = (self.P * gP).sum(3, keepdim=True)
        return self.P * (gP - inner), None if self.sunk is None else -self.sunk * inner

    def of_raw_scores(self, gS: Tensor) -> Parts:
        """What query, key and gains are worth to Q̂K̂ᵀ with gS (n, m, k, l)."""
        found: Parts = {}
        for name, x, other, turned, places in (
            ("query", self.Q, "norm_query", gS @ self.k_turned, self.here),
            ("key", self.K, "norm_key", gS.mT @ self.q_turned, self.there),
        ):
            g = turned if self.form.rotary is None else self.form.rotary.turn(turned, -places)
            if self.form.normed is not None:
                r = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.form.normed.eps)
                found[other] = (g * x * r).sum((0, 1, 2))
                g = self.own[other] * g
                g = r * (g - x * r.square() * (x * g).mean(-1, keepdim=True))
            found[name] = g
        return found

    def sunk_rule(self, dS: Tensor, ds: Tensor | None) -> Tensor:
        """dP for a change of the scores and of the sinks; what is out of sight has P = 0."""
        if self.sunk is None:
            return softmax_rule(self.P, dS)
        assert ds is not None
        inner = (self.P * dS).sum(3, keepdim=True) + self.sunk * ds.view(1, -1, 1, 1)
        return self.P * (dS - inner)

    def flatness(self) -> Tensor | None:
        """dS/dS before the cap."""
        return None if self.bent is None else 1 - self.bent.square()

    @property
    def delta(self) -> Tensor:
        return self.there.unsqueeze(-2) - self.here.unsqueeze(-1)

    def _prepared(self, x: Tensor, dx: Tensor, gain: str, d: Mapping[str, Tensor], places: Tensor) -> Tensor:
        if self.form.normed is not None:
            r = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.form.normed.eps)
            dx = self.own[gain] * r * (dx - x * r.square() * (x * dx).mean(-1, keepdim=True)) + d[gain] * x * r
        return dx if self.form.rotary is None else self.form.rotary.turn(dx, places)

    def _by_cap(self) -> Tensor:
        """∂(c·tanh(S/c))/∂c = t − (1 − t²)·artanh(t), with S/c kept as artanh(t)."""
        assert self.bent is not None
        t = self.bent
        inside = t.clamp(-1 + torch.finfo(t.dtype).eps, 1 - torch.finfo(t.dtype).eps)
        return t - (1 - t.square()) * torch.atanh(inside)

    def _offsets_back(self, gS: Tensor) -> Parts:
        offsets, delta = self.form.offsets, self.delta
        if not isinstance(offsets, OffsetTable):
            return {"slope": (gS * delta.to(gS.dtype).unsqueeze(-3)).sum((0, 2, 3))}
        m, buckets = self.own["offsets"].shape
        at = offsets.bucket(delta)
        if delta.ndim == 2:  # the same for all sequences
            flat, at = gS.sum(0).flatten(1), at.flatten()
        else:
            flat, at = gS.transpose(0, 1).flatten(1), at.flatten()
        return {"offsets": gS.new_zeros(m, buckets).index_add(1, at, flat)}
