"""The first paper's way to the span of the Θ_i: phases 1 to 5, on random examples without noise.

1  crude sum   Ŵ = mean of (1/k) Xᵀ J Y ≈ Σ W_i
2  sculpt      a row is accepted when some q in the simplex makes ‖y_a − qᵀXŴ‖ small: then all heads look at the
               row with the pattern q, and every pair of tokens with weight gives a constraint that all Θ_i meet:
               |⟨Θ, x_a(x_b − x_c)ᵀ⟩ − log(q_b/q_c)| ≤ ε
3  proxy       the point Θ̄ of least norm, and a better Ŵ from rows on which the heads agree
4  re-sculpt   2 and 3 again with fewer, better rows, until the body stops shrinking
5  hull        the m − 1 directions in which the body is long, sharpened to first order

The phases are the paper's, as far as its description is known to us; their form in linear algebra is a
reconstruction. How many rows are accepted, how they are weighed, the choice of rows by the hull and the sharpening
are ours: named in ``Thresholds``, recorded in the trace. Examples pass by in batches; what is kept
is a reservoir of the best rows and a d² × d² Gram matrix.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from headway.core import attention, checks
from headway.core.layer import AttentionLayer
from headway.linalg.krylov import conjugate_gradients
from headway.linalg.projected import Rows
from headway.sculpting.body import Body, Gram, Hull
from headway.sculpting.simplex import affine_bound, simplex_fit

Batches = Callable[[], Iterable[Rows]]
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


@dataclass(frozen=True)
class Thresholds:
    """Every constant of sculpting: ours, chosen by measurement, not taken from the paper."""

    first: float = 0.04  # part of all rows accepted in the first round
    shrink: float = 0.5  # each later round accepts this part of what the one before accepted,
    last: float = 24.0  # but at least this many times d²/(k − 1): a row gives k − 1 independent constraints
    least_weight: float = 0.02  # tokens with less weight than this give no constraint
    floor: float = 2.0  # residuals below that of the (floor · d²)-th best row count as equal
    sum_rows: float = 200.0  # rows for the refined sum, times d
    trim: float = 0.2  # of those, the worst part by residual is dropped
    radius: float = 1.0  # distance of the heads from Θ̄, in units of √(m − 1)·‖Θ̄‖, right for orthogonal heads
    rounds: int = 8  # of sculpting and refining, at most
    settled: float = 0.05  # stop when the rows are few and ΣW moves by less than this part of its crude error
    equal_tokens: bool = False  # use sequences with two equal tokens; of ±1 tokens these are common at small d only
    most_tuples: int = 200_000  # phase 6 by a net is as fine as this allows
    sharpen: int = 10  # rounds of first-order sharpening at the end, at most; 0 for none
    sharpen_rows: float = 48.0  # rows for it, times d²/(k − 1)
    sweeps: int = 4  # alternations in one such round

    def __post_init__(self) -> None:
        for name in ("first", "shrink", "least_weight", "trim", "settled"):
            value = getattr(self, name)
            if not 0 <= checks.number(f"thresholds.{name}", value) < 1:
                checks.refuse(f"thresholds.{name}", "a part, at least 0 and below 1", value, "the default")
        for name in ("last", "floor", "sum_rows", "radius", "sharpen_rows"):
            checks.number(f"thresholds.{name}", getattr(self, name), strictly=True)
        for name, least in (("rounds", 1), ("sweeps", 1), ("sharpen", 0), ("most_tuples", 1)):
            checks.whole(f"thresholds.{name}", getattr(self, name), least)

    def asdict(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Sculpted:
    """What the phases leave: the sum of the projections, the hull, and the best rows of the last body."""

    total: Tensor  # Ŵ ≈ ΣW_i, (d, e)
    hull: Hull
    body: Body
    events: tuple[dict[str, Any], ...]


def crude_sum(batches: Batches) -> tuple[Tensor, int]:
    """Phase 1: the mean of (1/k) Xᵀ J Y, and the number of sequences.

    E = Σ_i W_i up to a bias; for Gaussian tokens exactly Σ_i (I + Θ_iC_i)W_i with C_i head i's mean attention
    covariance, by Stein's identity for a shift of all tokens at once.
    """
    total: Tensor | float = 0.0
    n = 0
    for rows in batches():
        total = total + (rows.X.sum(1).T @ rows.Y.sum(1)).double() / rows.X.shape[1]
        n += rows.X.shape[0]
    assert isinstance(total, Tensor)
    return total / n, n


class _Reservoir:
    """The ``size`` rows of least score in a stream."""

    def __init__(self, size: int) -> None:
        self.size, self.threshold, self.held = size, math.inf, 0
        self.parts: list[dict[str, Tensor]] = []

    def add(self, score: Tensor, **row: Tensor) -> None:
        good = score < self.threshold
        self.parts.append({"score": score[good], **{name: part[good] for name, part in row.items()}})
        self.held += int(good.sum())
        if self.held > 2 * self.size:
            self._settle()

    def _settle(self) -> None:
        whole = {name: torch.cat([part[name] for part in self.parts]) for name in self.parts[0]}
        if self.held > self.size:
            best = torch.topk(whole["score"], self.size, largest=False).indices
            whole = {name: part[best] for name, part in whole.items()}
            self.threshold = float(whole["score"].max())
            self.held = self.size
        self.parts = [whole]

    def rows(self) -> dict[str, Tensor]:
        self._settle()
        return self.parts[0]


class Sculptor:
    """The state that phases hand to each other."""

    def __init__(
        self, batches: Batches, heads: int, thresholds: Thresholds, truth: AttentionLayer | None = None,
        report: Callable[[float | None], None] | None = None,
    ) -> None:
        self.batches, self.m, self.at = batches, heads, thresholds
        self.report = report
        self.events: list[dict[str, Any]] = []
        self.known = None if truth is None else _Known(truth)
        begun = time.perf_counter()
        self.total, self.n = crude_sum(batches)
        first = next(iter(batches()))
        self.k, self.d = first.X.shape[1:]
        self.hull: Hull | None = None
        self.body: Body | None = None
        self._note("crude sum", 0, begun, rows=self.n * self.k)

    def run(self) -> Sculpted:
        """Phases 2 to 5. Stops when the rows are as few as they may get and the sum has settled."""
        at, N = self.at, self.n * self.k
        least = math.ceil(at.last * self.d**2 / (self.k - 1))
        crude = self.total
        for j in range(at.rounds):
            size = max(least, math.ceil(at.first * at.shrink**j * N))
            self.sculpt(j, min(size, N))
            before = self.total
            self.refine(j)
            if size == least and self._settled(before, crude):
                break
        for j in range(at.sharpen):
            before = self.total
            self.sharpen(j)
            if self._settled(before, crude):
                break
        assert self.hull is not None and self.body is not None
        return Sculpted(self.total, self.hull, self.body, tuple(self.events))

    def _settled(self, before: Tensor, crude: Tensor) -> bool:
        return float((self.total - before).norm()) < self.at.settled * float((self.total - crude).norm())

    # -- phase 2 and 4 --------------------------------------------------------------------------------------

    def sculpt(self, j: int, size: int) -> None:
        """Collect the rows that one pattern explains best, and build the body from their pairs of tokens."""
        begun = time.perf_counter()
        best = _Reservoir(size)
        seen = 0
        for rows in self.batches():
            W = self.total.to(rows.X)
            Z = rows.X @ W
            # A row is as good as its best constraint: the residual over what a shift of weight between two tokens
            # would show. Its least possible value, with q = (1/2, 1/2) on the farthest pair, is had without q.
            far = torch.cdist(Z, Z).flatten(1).max(1).values.clamp_min(1e-30)
            lower = (affine_bound(Z, rows.Y) / (far[:, None] / 4)).flatten()
            if not self.at.equal_tokens:
                lower = torch.where(_told_apart(rows.X).repeat_interleave(self.k), lower, torch.inf)
            # Saturated rows pass the bound and give no constraint, so in the first batch more are looked at.
            limit = best.threshold
            if not math.isfinite(limit):
                part = min(1.0, 4.0 * size / (self.n * self.k) + 0.02)
                limit = float(lower.kthvalue(max(1, math.ceil(part * len(lower)))).values)
                limit = math.inf if part == 1.0 else limit
            at = torch.nonzero(lower <= limit).squeeze(1)
            seen += len(lower)
            n, a = at // self.k, at % self.k
            q, residual = simplex_fit(Z[n], rows.Y[n, a])
            usable = (q >= self.at.least_weight).sum(1) > 1
            quality = (_pair_weight(q) * torch.cdist(Z[n], Z[n])).flatten(1).max(1).values.clamp_min(1e-30)
            score = torch.where(usable, residual / quality, torch.inf)
            best.add(score, X=rows.X[n], a=a, q=q, residual=residual)
            self._tell(None)
        found = best.rows()
        keep = torch.isfinite(found["score"])
        found = {name: part[keep] for name, part in found.items()}
        self._build(found)
        r = found["residual"].double()
        quantiles = torch.quantile(_thin(r), torch.tensor(QUANTILES, dtype=torch.float64, device=r.device))
        assert self.hull is not None
        self._note("sculpt", j, begun, rows=seen, accepted=len(r),
                   threshold=float(found["score"].max()), residual_quantiles=[float(v) for v in quantiles],
                   singular_values=[float(v) for v in self.hull.values[: self.m + 3]],
                   gap=self.hull.gap if self.m > 1 else None, distance=self.hull.distance,
                   constraints=self.constraints)

    def _build(self, found: dict[str, Tensor]) -> None:
        """Constraints of all pairs of tokens with weight.

        A residual r leaves the weights uncertain by r/‖Ŵᵀ(x_b − x_c)‖, hence log(q_b/q_c) by (1/q_b + 1/q_c) times
        that: the slack ε. Rows are weighed by 1/ε.
        """
        X, q, r = found["X"], found["q"], found["residual"]
        x = X[torch.arange(len(X), device=X.device), found["a"]]
        rank = min(len(r), math.ceil(self.at.floor * self.d**2))
        W = self.total.to(X)
        # Labels met to the last digit, as saturated patterns are, are still only known to the last digit.
        digit = torch.finfo(X.dtype).eps * float((X @ W).norm(dim=2).max())
        floor = max(float(r.kthvalue(max(1, rank)).values), digit, 1e-30)
        gram = Gram(self.d, X.device)
        kept: list[tuple[Tensor, Tensor, Tensor]] = []
        best = torch.topk(r, min(len(r), 8 * self.d**2), largest=False).indices
        for b in range(self.k):
            for c in range(b + 1, self.k):
                good = (q[:, b] >= self.at.least_weight) & (q[:, c] >= self.at.least_weight)
                delta = X[:, b] - X[:, c]
                reach = (delta @ W).norm(dim=1)
                good &= reach > 1e-6 * reach.max().clamp_min(1e-30)
                level = torch.log(q[:, b].clamp_min(1e-30) / q[:, c].clamp_min(1e-30))
                slack = (r + floor) / reach.clamp_min(1e-30) * (
                    1 / q[:, b].clamp_min(1e-9) + 1 / q[:, c].clamp_min(1e-9))
                at = torch.nonzero(good).squeeze(1)
                gram.add(x[at].unsqueeze(2) * delta[at].unsqueeze(1), level[at], slack[at])
                at = best[good[best]]
                kept.append((x[at].unsqueeze(2) * delta[at].unsqueeze(1), level[at], slack[at]))
        self.hull = gram.hull(self.m)
        self.constraints = gram.count
        self.body = Body(*(torch.cat(part).double() for part in zip(*kept, strict=True)))

    # -- phase 3 --------------------------------------------------------------------------------------------

    def refine(self, j: int) -> None:
        """Σ W_i by least squares of y_a on Xᵀ p̄_a over the rows on which the heads are predicted to agree."""
        begun = time.perf_counter()
        assert self.hull is not None
        best = _Reservoir(math.ceil(self.at.sum_rows * self.d))
        seen = 0
        for rows in self.batches():
            P = attention.patterns(rows.X, self.hull.center.to(rows.X).unsqueeze(0))
            h = attention.attend(P, rows.X).squeeze(2)
            error = self._spread(rows.X) if self.m > 1 else _noise(h)
            if not self.at.equal_tokens:
                error = torch.where(_told_apart(rows.X)[:, None], error, torch.inf)
            best.add(error.flatten(), h=h.flatten(0, 1), y=rows.Y.flatten(0, 1))
            seen += error.numel()
            self._tell(None)
        found = best.rows()
        h, y = found["h"].double(), found["y"].double()
        weight = 1.0 / (found["score"] + found["score"].median().clamp_min(1e-30)).double().unsqueeze(1)
        W = _least_squares(h * weight, y * weight)
        wrong = ((y - h @ W) * weight).norm(dim=1)
        keep = wrong <= torch.quantile(_thin(wrong), 1.0 - self.at.trim)
        self.total = _least_squares(h[keep] * weight[keep], y[keep] * weight[keep])
        left = (y[keep] - h[keep] @ self.total).norm(dim=1)
        self._note("refine", j, begun, rows=seen, accepted=int(keep.sum()),
                   threshold=float(found["score"].max()), residual=float(left.median()))

    def _spread(self, X: Tensor) -> Tensor:
        """How far apart the heads' averages of a row lie, as the hull predicts it: (n, k).

        Heads sit about ρ = √(m − 1)·‖Θ̄‖ from Θ̄ when they are orthogonal and of one size; the spread is half the
        distance of Xᵀp under Θ̄ + ρV_j and under Θ̄ − ρV_j, over all j.
        """
        assert self.hull is not None
        center, V = self.hull.center.to(X), self.hull.directions.to(X)
        rho = self.at.radius * math.sqrt(max(self.m - 1, 1)) * center.norm()
        H = attention.attend(attention.patterns(X, torch.cat([center + rho * V, center - rho * V])), X)
        j = len(V)
        apart: Tensor = (H[:, :, :j] - H[:, :, j:]).flatten(2).norm(dim=2) / 2
        return apart

    # -- phase 5 --------------------------------------------------------------------------------------------

    def sharpen(self, j: int) -> None:
        """One sweep of alternating least squares on the first-order model around Θ̄:

            y_a − Ŵᵀh̄_a ≈ Ŵᵀt_0 + Σ_j B_jᵀt_j,   t_j = C̄_aV_jᵀx_a,   V_0 the error of Θ̄,   B_j = Σ_i a_ij W_i

        on rows whose spread is small: first B for given V, then (V_0, V) for given (Ŵ, B). Only the residuals know
        where the hull is; rows chosen by V alone would confirm any V.
        """
        begun = time.perf_counter()
        assert self.hull is not None
        best = _Reservoir(math.ceil(self.at.sharpen_rows * self.d**2 / (self.k - 1)))
        seen = 0
        for rows in self.batches():
            score = self._disagreement(rows.X)
            if not self.at.equal_tokens:
                score = torch.where(_told_apart(rows.X)[:, None], score, torch.inf)
            at = torch.nonzero(score.flatten() < best.threshold).squeeze(1)
            n, a = at // self.k, at % self.k
            best.add(score.flatten()[at], X=rows.X[n], a=a, y=rows.Y[n, a])
            seen += score.numel()
            self._tell(None)
        found = best.rows()
        if len(found["a"]) < self.m * self.d**2:  # every pattern puts all its weight on one token
            self._note("sharpen", j, begun, rows=seen, accepted=0)
            return
        model = _FirstOrder(found["X"].double(), found["a"], found["y"].double())
        center, V, W = self.hull.center, self.hull.directions, self.total
        for _ in range(self.at.sweeps):
            center, V, W = model.sweep(center, V)
        self.hull, self.total = replace(self.hull, center=center, directions=V), W
        self._note("sharpen", j, begun, rows=seen, accepted=len(found["a"]), threshold=float(found["score"].max()),
                   residual=model.residual)

    def _disagreement(self, X: Tensor) -> Tensor:
        """Deviation of the scores that hull directions of length ρ add to a row, in the row's own pattern, relative
        to that pattern's spread; rows with all weight on one token tell nothing and get inf: (n, k)."""
        assert self.hull is not None
        center, V = self.hull.center.to(X), self.hull.directions.to(X)
        rho = self.at.radius * math.sqrt(self.m - 1) * center.norm()
        P = attention.patterns(X, center.unsqueeze(0))
        room = 1.0 - P.square().sum(3).squeeze(2)
        if self.m > 1:
            S = attention.scores(X, rho * V)
            variance = (P * S.square()).sum(3) - (P * S).sum(3).square()
            score = (variance.clamp_min(0).sum(2) / room.clamp_min(1e-9)).sqrt()
        else:
            score = _noise(room)
        enough: Tensor = torch.where(room > 2 * self.at.least_weight, score, torch.inf)
        return enough

    # -- records --------------------------------------------------------------------------------------------

    def _tell(self, residual: float | None) -> None:
        if self.report is not None:
            self.report(residual)

    def _note(self, phase: str, j: int, begun: float, **numbers: Any) -> None:
        errors = {} if self.known is None else self.known.errors(self.total, self.hull)
        self.events.append({"phase": phase, "round": j, **numbers, **errors,
                            "seconds": time.perf_counter() - begun})


class _FirstOrder:
    """Alternating least squares for y_a ≈ Ŵᵀh̄ + Σ_j B_jᵀ C̄_a V_jᵀx_a on chosen rows a of sequences X."""

    def __init__(self, X: Tensor, a: Tensor, y: Tensor) -> None:
        self.X, self.y = X, y
        self.rows = torch.arange(len(X), device=X.device)
        self.a = a
        self.residual = math.inf

    def _at(self, whole: Tensor) -> Tensor:
        return whole[self.rows, self.a]

    def sweep(self, center: Tensor, V: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """First (Ŵ, B) for given V, then (V_0, V) for given (Ŵ, B); Θ̄ is moved by V_0 and brought back to the point
        of least norm."""
        d, e = center.shape[0], self.y.shape[1]
        P = attention.patterns(self.X, center.unsqueeze(0))
        h = self._at(attention.attend(P, self.X)).squeeze(1)
        t = self._at(attention.tangent(P, self.X, V)).flatten(1) if len(V) else h[:, :0]
        B = _least_squares(torch.cat([h, t], dim=1), self.y)
        W, B = B[:d], B.view(-1, d, e)  # B_0 = Ŵ goes with V_0, the error of Θ̄
        left = self.y - h @ W
        self.residual = float((left - t @ B[1:].flatten(0, 1)).square().sum() / left.square().sum()) ** 0.5

        def image(U: Tensor) -> Tensor:
            return torch.einsum("rmd,mde->re", self._at(attention.tangent(P, self.X, U)), B)

        def adjoint(R: Tensor) -> Tensor:
            full = self.X.new_zeros(*self.X.shape[:2], len(B), d)
            full[self.rows, self.a] = torch.einsum("re,mde->rmd", R, B)
            return attention.cotangent(P, self.X, full, d)

        start = torch.cat([torch.zeros_like(center).unsqueeze(0), V])
        wanted = adjoint(left - image(start))
        step = conjugate_gradients(lambda U: adjoint(image(U)), lambda v: v, wanted, 1e-4, 200)
        U = start + step
        Q: Tensor = torch.linalg.qr(U[1:].flatten(1).T)[0]
        moved = (center + U[0]).flatten()
        moved = moved - Q @ (Q.T @ moved)
        return moved.view(d, d), Q.T.reshape(-1, d, d), W


class _Known:
    """Errors against a known truth, for the trace."""

    def __init__(self, truth: AttentionLayer) -> None:
        self.total = truth.W.double().sum(0)
        Theta = truth.Theta.double()
        base, rest = Theta[0].flatten(), (Theta[1:] - Theta[:1]).flatten(1)
        self.V: Tensor = torch.linalg.qr(rest.T)[0] if len(rest) else base.new_zeros(len(base), 0)
        self.center = base - self.V @ (self.V.T @ base)

    def errors(self, total: Tensor, hull: Hull | None) -> dict[str, float]:
        found = {"sum_error": float((total.cpu() - self.total).norm() / self.total.norm())}
        if hull is not None:
            found["center_error"] = float(
                (hull.center.flatten().cpu() - self.center).norm() / self.center.norm())
            if hull.directions.shape[0] == self.V.shape[1] > 0:
                found["hull_angle"] = hull_angle(hull.directions.flatten(1).cpu(), self.V.T)
        return found


def hull_angle(A: Tensor, B: Tensor) -> float:
    """The largest principal angle between the row spaces of A and B, accurate for small angles."""
    Q: Tensor = torch.linalg.qr(A.T)[0]
    R: Tensor = torch.linalg.qr(B.T)[0]
    return math.asin(min(1.0, float(torch.linalg.matrix_norm(Q - R @ (R.T @ Q), 2))))


def _least_squares(F: Tensor, Y: Tensor) -> Tensor:
    G, right = F.T @ F, F.T @ Y
    ridge = 1e-12 * G.diagonal().mean() * torch.eye(len(G), dtype=G.dtype, device=G.device)
    solution, info = torch.linalg.solve_ex(G + ridge, right)
    if int(info):
        # Where patterns put all weight on one token, the rows chosen may not span all directions.
        solution = torch.linalg.pinv(G, rtol=1e-12, hermitian=True) @ right
    found: Tensor = solution
    return found


def _told_apart(X: Tensor) -> Tensor:
    """Whether all tokens of a sequence differ, (n,). Two equal tokens tell ΣW_i however the heads look at them: at
    small d the examples would give it away, at large d they never occur."""
    k = X.shape[1]
    near = torch.cdist(X, X) + torch.eye(k, dtype=X.dtype, device=X.device)
    return near.flatten(1).min(1).values > 1e-3


def _pair_weight(q: Tensor) -> Tensor:
    """q_bq_c/(q_b + q_c): what a residual is divided by to give the uncertainty of log(q_b/q_c), (n, k, k)."""
    return (q.unsqueeze(1) * q.unsqueeze(2)) / (q.unsqueeze(1) + q.unsqueeze(2)).clamp_min(1e-9)


def _thin(values: Tensor) -> Tensor:
    """At most a million of the values, evenly spread: torch.quantile takes no more."""
    return values[:: max(1, math.ceil(len(values) / 1_000_000))]


def _noise(rows: Tensor) -> Tensor:
    """With one head every row is as good as another: keep an arbitrary, reproducible part."""
    index = torch.arange(rows.shape[0] * rows.shape[1], device=rows.device, dtype=torch.float64)
    return ((index * 0.6180339887) % 1.0).view(rows.shape[:2]).to(rows)
