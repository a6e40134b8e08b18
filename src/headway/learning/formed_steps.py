"""Slow planes of turned queries and keys found without knowing which they are: min over P_i as well.

With frequencies ω over k places, columns that turn little say x_aA R(b − a) Bᵀz_b, and data tell A and B up to a
common T long before they tell which T it is (formed_slow.py). Searching T is hopeless from afar: half of all starts
have det T < 0, and with many slow planes there are as many valleys as orders and orientations of them. But

    x_aA P^{b − a} Bᵀz_b,     P any matrix, one a head,

has A → AT, P → T⁻¹PT, B → BT⁻ᵀ as an exact freedom, and what is linear in b − a shows P at once. The layer is one
of these, with P = T R(1) T⁻¹. So P is fitted beside A and B; at the end its eigenvectors are the planes (settled).
The keys' bias β shows through P^bβ = β + (1 + P + … + P^{b − 1})γ, γ = (P − 1)β, of which β says the same of all
keys: so γ is the unknown, which data tell as well as anything else, and not β, which they hardly do.

Written as what is done to queries and keys before they are turned: q_aU_a with U_a = P^{−a}R_a and k_bV_b with
V_b = (P^b)ᵀR_b.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from headway.core.positions import Rotary
from headway.core.tangents import Chain

FLAT = 1e-10  # singular values of P − 1, relative to the largest, that count as none


@dataclass(frozen=True)
class Steps:
    """Powers of P (m, s, s) at places 0 … k − 1, beside turns by R, and γ (m, s)."""

    columns: Tensor
    P: Tensor
    drift: Tensor  # γ
    inverse: Tensor
    turns: Tensor  # R_aᵀ, (k, s, s)
    ahead: Tensor  # P^a, (m, k, s, s)
    behind: Tensor  # P^{−a}

    @classmethod
    def of(cls, P: Tensor, drift: Tensor, rotary: Rotary, size: int, places: int) -> Steps:
        inverse, columns = torch.linalg.inv(P), slowest(rotary, size, P.shape[1]).to(P.device)
        return cls(columns, P, drift, inverse, turns(rotary, size, columns, places, P), _powers(P, places),
                   _powers(inverse, places))

    @property
    def _undone(self) -> tuple[Tensor, Tensor]:
        """U_a⁻¹ and V_b⁻¹."""
        return self.turns @ self.ahead, self.turns @ self.behind.mT

    def applied(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Queries and keys (n, m, k, q) with U and V; keys, which come without their bias, with γ."""
        found = self._turned(parts)
        drift = _before(self.ahead) @ self.drift[:, None, :, None]
        return {**found, "key": self._more(found["key"], (drift.mT @ self.turns.mT).squeeze(2))}

    def _turned(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        U, V = self.behind @ self.turns.mT, self.ahead.mT @ self.turns.mT
        return {**parts, "query": self._times(parts["query"], U), "key": self._times(parts["key"], V)}

    def _more(self, x: Tensor, more: Tensor) -> Tensor:
        """x (n, m, k, q) with (m, k, s) or (n, m, k, s) added in the columns."""
        return x.index_add(3, self.columns, more.expand(*x.shape[:3], -1))

    def pushed(self, chain: Chain, d: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Changes of queries, keys, P and γ as changes of what the chain is given."""
        found, dP = self._turned(d), d["step"]
        behind = _powers_of(self.behind, self.inverse, -self.inverse @ dP @ self.inverse)
        ahead = _powers_of(self.ahead, self.P, dP)
        drift = _before(ahead) @ self.drift[:, None, :, None] + _before(self.ahead) @ d["drift"][:, None, :, None]
        back_U, back_V = self._undone
        found["query"] = self._more(found["query"], _each(
            chain.Q[..., self.columns], back_U @ behind @ self.turns.mT))
        keys = _each(self._keys(chain), back_V @ ahead.mT @ self.turns.mT)
        found["key"] = self._more(found["key"], keys + (drift.mT @ self.turns.mT).squeeze(2))
        return found

    def pulled(self, chain: Chain, g: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Adjoint of ``pushed``."""
        U, V = self.behind @ self.turns.mT, self.ahead.mT @ self.turns.mT
        gQ, gK = (g[name][..., self.columns] for name in ("query", "key"))
        back_U, back_V = self._undone
        g_behind = back_U.mT @ _outer(chain.Q[..., self.columns], gQ) @ self.turns
        g_ahead = (back_V.mT @ _outer(self._keys(chain), gK) @ self.turns).mT
        moved = (gK.sum(0).unsqueeze(2) @ self.turns).mT  # what S_bγ is worth, (m, k, s, 1)
        g_drift = (_before(self.ahead).mT @ moved).sum(1).squeeze(2)
        g_ahead = g_ahead + _after(moved @ self.drift[:, None, None, :])
        of_inverse = _back_from(g_behind, self.behind, self.inverse)
        gP = _back_from(g_ahead, self.ahead, self.P) - self.inverse.mT @ of_inverse @ self.inverse.mT
        return {**g, "query": self._times(g["query"], U.mT), "key": self._times(g["key"], V.mT), "step": gP,
                "drift": g_drift}

    def _keys(self, chain: Chain) -> Tensor:
        """What the chain was given of the keys, without γ."""
        drift = _before(self.ahead) @ self.drift[:, None, :, None]
        return chain.K[..., self.columns] - (drift.mT @ self.turns.mT).squeeze(2)

    def _times(self, x: Tensor, by: Tensor) -> Tensor:
        return x.index_copy(3, self.columns, _each(x[..., self.columns], by))


def slowest(rotary: Rotary, size: int, columns: int) -> Tensor:
    """The columns that turn least, as many of them, in their order."""
    one, two, rest = rotary.planes(torch.arange(size))
    planes = rotary.omega(size).abs().argsort()[: (columns - len(rest)) // 2].cpu()
    return torch.cat([one[planes], two[planes], rest]).sort().values


def turns(rotary: Rotary, size: int, columns: Tensor, places: int, like: Tensor) -> Tensor:
    """R_aᵀ on these columns, (k, s, s)."""
    eye = torch.eye(size, dtype=like.dtype, device=like.device)[columns].view(-1, 1, 1, size)
    at = torch.arange(places, dtype=torch.float64, device=like.device)
    return rotary.turn(eye.expand(-1, 1, places, size), at)[:, 0][..., columns].transpose(0, 1)


def settled(
    A: Tensor, B: Tensor, P: Tensor, drift: Tensor, rotary: Rotary
) -> tuple[Tensor, Tensor]:
    """A and B in the planes' own columns, the keys' bias again in B's last row. Each eigenvector of P comes into
    the place of the frequency next to its own, what says most first; eigenvalues that are not turned lie in
    columns that say nothing, or are not turned in this form either."""
    one, two, rest = rotary.planes(torch.arange(A.shape[2]))
    omega, columns = rotary.omega(A.shape[2]), slowest(rotary, A.shape[2], P.shape[1]).to(A.device)
    place = {column: j for j, column in enumerate(columns.tolist())}
    planes = [j for j in range(len(one)) if int(one[j]) in place]
    B = B.clone()
    still_there = P - torch.eye(P.shape[1], dtype=P.dtype, device=P.device)
    B[:, -1, columns] = (torch.linalg.pinv(still_there, rtol=FLAT) @ drift.unsqueeze(2)).squeeze(2)
    new_A, new_B = A.clone(), B.clone()
    for i in range(len(A)):
        exact = P[i].cpu().double()
        values, vectors = torch.linalg.eig(exact)
        angles = values.angle()
        # Rounding may turn what is not turned by next to nothing: of more pairs than planes those that turn most.
        turned = [int(j) for j in angles.argsort(descending=True) if float(values[j].imag) > 0][: len(planes)]
        pairs = [torch.stack([vectors[:, j].real, -vectors[:, j].imag], dim=1) for j in turned]
        turns_by = [float(angles[j]) for j in turned]
        kept = torch.linalg.svd(exact - torch.eye(len(exact)))[2][len(exact) - len(rest) :]
        loose = [vectors[:, j].real for j in torch.nonzero(values.imag == 0).flatten().tolist()]
        loose.sort(key=lambda v: _says(A[i], B[i], columns, v.unsqueeze(1)))
        for j in range(0, min(len(loose) - 1, 2 * (len(planes) - len(pairs))), 2):
            pairs.append(torch.stack(loose[j : j + 2], dim=1))
            turns_by.append(0.0)
        if len(pairs) != len(planes):
            continue  # P does not turn as planes do: A and B stay as they are
        weight = torch.tensor([_says(A[i], B[i], columns, pair) for pair in pairs])
        cost = weight.unsqueeze(1) * (torch.tensor(turns_by).unsqueeze(1) - omega[planes].cpu()).abs()
        T = torch.zeros(P.shape[1:], dtype=torch.float64)
        for at, to in zip(*linear_sum_assignment(cost.numpy()), strict=True):
            T[:, [place[int(one[planes[to]])], place[int(two[planes[to]])]]] = pairs[at]
        for v, column in zip(kept, rest.tolist(), strict=True):
            T[:, place[column]] = v
        T = T.to(A)
        new_A[i][:, columns] = A[i][:, columns] @ T
        new_B[i][:, columns] = torch.linalg.solve(T, B[i][:, columns].mT).mT
    return new_A, new_B


def _says(A: Tensor, B: Tensor, columns: Tensor, pair: Tensor) -> float:
    """How much a head says through these directions of its columns."""
    pair = pair.to(A)
    return float((A[:, columns] @ pair).norm() * (B[:, columns] @ pair).norm() / pair.norm() ** 2)


def _outer(x: Tensor, g: Tensor) -> Tensor:
    """Σ_n x gᵀ, (m, k, s, t)."""
    return torch.einsum("nmks,nmkt->mkst", x, g)


def _before(powers: Tensor) -> Tensor:
    """Sums of the powers before each: 0, 1, 1 + P, …"""
    return powers.cumsum(1) - powers


def _after(g: Tensor) -> Tensor:
    """Adjoint of ``_before``."""
    return g.flip(1).cumsum(1).flip(1) - g


def _each(x: Tensor, by: Tensor) -> Tensor:
    """(n, m, k, s) times (m, k, s, t)."""
    return torch.einsum("nmks,mkst->nmkt", x, by)


def _powers(P: Tensor, places: int) -> Tensor:
    """P⁰ … P^{k−1}, (m, k, s, s)."""
    found = [torch.eye(P.shape[-1], dtype=P.dtype, device=P.device).expand_as(P)]
    for _ in range(places - 1):
        found.append(found[-1] @ P)
    return torch.stack(found, dim=1)


def _powers_of(powers: Tensor, P: Tensor, dP: Tensor) -> Tensor:
    """Their changes: dP^{a+1} = dP^a P + P^a dP."""
    found = [torch.zeros_like(P)]
    for a in range(powers.shape[1] - 1):
        found.append(found[-1] @ P + powers[:, a] @ dP)
    return torch.stack(found, dim=1)


def _back_from(g: Tensor, powers: Tensor, P: Tensor) -> Tensor:
    """Adjoint of ``_powers_of``."""
    later, total = torch.zeros_like(P), torch.zeros_like(P)
    for a in range(powers.shape[1] - 1, 0, -1):
        later = g[:, a] + later @ P.mT
        total = total + powers[:, a - 1].mT @ later
    return total
