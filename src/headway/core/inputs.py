"""Inputs on which two functions are set side by side: fresh ones, those of examples, and the worst nearby."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.core import attention, gauge
from headway.core.examples import Examples
from headway.core.factored import FactoredLayer
from headway.core.forms import affine, heads_out, in_sight
from headway.core.positions import OffsetTable

SPREAD = 2.0  # deviation of the scores on fresh inputs: small ones hide mistakes, large ones saturate
TOKENS, SEQUENCES = 20, 4
LONGEST = 200  # tokens, to see past the edge of a window or of a table of offsets
STEPS, STEP = 12, 0.25  # of the ascent, of the size of the tokens
Answers = Callable[["Inputs"], Tensor]


@dataclass(frozen=True, eq=False)
class Inputs:
    """X (n, k, d), keys Z (n, l, z) or None, positions or None, padding or None; float64 on the CPU."""

    X: Tensor
    Z: Tensor | None = None
    positions: Tensor | None = None
    key_positions: Tensor | None = None
    padding: Tensor | None = None
    key_padding: Tensor | None = None

    def to(self, layer: FactoredLayer) -> Tensor:
        """What the layer answers."""
        X, Z = self.X.to(layer.query), None if self.Z is None else self.Z.to(layer.query)
        see = in_sight(layer.form.sight, X, Z, self.padding, self.key_padding)
        H = heads_out(X, Z, layer.tensors(), layer.form, see, self.places(layer), self.key_positions)
        return attention.project(H, layer.out, layer.offset).double()  # the layer itself would cut the gradient

    def places(self, layer: FactoredLayer) -> Tensor | None:
        """The positions, or those that the layer has where none are given."""
        if self.positions is None and layer.positions is not None:
            return layer.positions[: self.X.shape[1]]
        return self.positions

    def one(self, i: int) -> Inputs:
        """One sequence of them."""
        return Inputs(*(None if part is None else part[i : i + 1] for part in vars(self).values()))  # type: ignore[arg-type]


def fresh(layers: Sequence[FactoredLayer], width: int, seed: int, size: float = 1.0) -> Inputs:
    """Gaussian tokens on which the scores of the first layer have deviation ``SPREAD`` · size, or of that size if
    there is none or its scores are zero; long enough to see the edge of a window or of a table in any of them."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    if not layers:
        return Inputs(normal(SEQUENCES, TOKENS, width) * size)
    layer = layers[0]
    k = max(TOKENS, min(max(_edge(one) for one in layers) + 3, LONGEST))
    k = min(k, *(len(one.positions) for one in layers if one.positions is not None), LONGEST)
    X, Z = normal(SEQUENCES, k, width), normal(SEQUENCES, k, layer.key_width) if layer.cross else None
    vectors = next((v for v in map(vectors_of, layers) if v is not None), None)
    places = None if vectors is None else normal(SEQUENCES, k, vectors)
    if layer.form.normed is None:
        K = affine(X if Z is None else Z, layer.key).repeat_interleave(layer.heads // layer.groups, 1)
        scores = affine(X, layer.query) @ K.mT
        spread = float(scores.std())
        size *= math.sqrt(SPREAD / spread) if spread > 0 else 1.0
    return Inputs(X * size, None if Z is None else Z * size, places, places if layer.cross else None)


def vectors_of(layer: FactoredLayer) -> int | None:
    """How many numbers a position has where it is a vector."""
    return None if layer.form.rotary is None else layer.form.rotary.vectors


def _edge(layer: FactoredLayer) -> int:
    """The offset from which on a layer no longer tells offsets apart, by its window or its table."""
    table = layer.form.offsets
    return max(layer.form.sight.window or 0, int(table.far or 0) if isinstance(table, OffsetTable) else 0)


def seen(on: Examples, count: int = 64) -> Inputs:
    """The first sequences of examples."""
    part = on.take(range(min(len(on), count)))

    def wide(name: str) -> Tensor | None:
        value = getattr(part, name, None)
        return None if value is None else value.cpu() if value.dtype == torch.bool else value.cpu().double()

    X = wide("X")
    assert X is not None
    return Inputs(X, wide("keys"), wide("positions"), wide("key_positions"), wide("padding"), wide("key_padding"))


def gaps(a: Answers, b: Answers, inputs: Inputs) -> Tensor:
    """The largest difference of two answers to every sequence, of the spread of the first's over all (of the
    second's where the first's are all the same): (n,)."""
    return gaps_of(a(inputs), b(inputs), inputs)


def gaps_of(Ya: Tensor, Yb: Tensor, inputs: Inputs, rows: int = 0) -> Tensor:
    """The same for the answers themselves, compared from row ``rows`` on."""
    if Ya.shape != Yb.shape:
        return torch.full((inputs.X.shape[0],), math.inf, dtype=torch.float64)
    keep = torch.ones(Ya.shape[:2], dtype=torch.bool) if inputs.padding is None else ~inputs.padding
    keep[:, :rows] = False
    spreads = [float((Y - Y.mean((0, 1)))[keep].square().mean().sqrt()) for Y in (Ya, Yb)]
    spread = next((s for s in spreads if s > 0), 1.0)
    gap = (Ya - Yb).abs().amax(2) / spread
    return torch.where(keep & ~gap.isnan(), gap, torch.where(gap.isnan() & keep, math.inf, 0.0)).amax(1)


def worst(a: Answers, b: Answers, tried: list[Inputs], on: Examples | None, seed: int) -> tuple[Inputs, float]:
    """The input on which two functions were found to differ most, and by how much: the worst of those tried, then
    a few steps uphill from it among tokens of the same length (or in the directions that examples visit)."""
    best, gap = max(((inputs.one(int(g.argmax())), float(g.max())) for inputs in tried
                     for g in [gaps(a, b, inputs)]), key=lambda found: found[1])
    if not math.isfinite(gap) or gap == 0.0:
        return best, gap
    spread = float((a(best) - b(best)).abs().amax()) / gap  # of all that were tried, not of this one
    move = _moves(on)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        slope = _slope(a, b, best)
        if slope is None:
            slope = torch.randn(best.X.shape, generator=draw, dtype=torch.float64)
        slope = move(slope)
        size = best.X.square().mean().sqrt()
        X = best.X + STEP * size * slope / slope.square().mean().sqrt().clamp_min(1e-300)
        X = X if on is not None else X * (best.X.norm(dim=2, keepdim=True) / X.norm(dim=2, keepdim=True))
        after = replace(best, X=X)
        new = float((a(after) - b(after)).abs().amax()) / spread
        if new > gap:
            best, gap = after, new
    return best, gap


def _slope(a: Answers, b: Answers, inputs: Inputs) -> Tensor | None:
    """The gradient of the difference with respect to the tokens; None where an answer has none."""
    X = inputs.X.clone().requires_grad_()
    try:
        with torch.enable_grad():
            loss = (a(replace(inputs, X=X)) - b(replace(inputs, X=X))).square().sum()
            found: Tensor = torch.autograd.grad(loss, X)[0]
    except RuntimeError:
        return None
    return found if bool(found.isfinite().all()) and bool(found.any()) else None


def _moves(on: Examples | None) -> Callable[[Tensor], Tensor]:
    """Onto directions in which tokens of examples differ."""
    if on is None:
        return lambda slope: slope
    U = gauge.visited(on).queries
    free = torch.linalg.svd(U[-1:])[2][1:].mT  # combinations without a share of the 1
    N = torch.linalg.qr((U @ free)[:-1])[0]
    return lambda slope: slope @ N @ N.mT
