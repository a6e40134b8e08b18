"""Near-degenerate families: a random layer with one dial, from easy (0) to hopeless.

Each turns one of the conditions the theorems ask for (conditions.py): what is lost first as it goes tells which of
them a learner really needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headway.core import checks
from headway.core.layer import AttentionLayer

Turn = Callable[[AttentionLayer, float, int], AttentionLayer]


@dataclass(frozen=True)
class Family:
    """``turn(layer, t, seed)`` at t = 0 is a generic layer; ``dials`` are the settings worth looking at."""

    name: str
    what: str
    turn: Turn
    dials: tuple[float, ...]


def _equal(layer: AttentionLayer, t: float, seed: int) -> AttentionLayer:
    Theta = layer.Theta.clone()
    Theta[1] = Theta[0] + 10.0**-t * (Theta[1] - Theta[0])
    return replace(layer, Theta=Theta)


def _cancelling(layer: AttentionLayer, t: float, seed: int) -> AttentionLayer:
    mean = layer.W.mean(0, keepdim=True)
    return replace(layer, W=layer.W - (1 - 10.0**-t) * mean)


def _weak(layer: AttentionLayer, t: float, seed: int) -> AttentionLayer:
    W = layer.W.clone()
    W[-1] *= 10.0**-t
    return replace(layer, W=W)


def _quiet(layer: AttentionLayer, t: float, seed: int) -> AttentionLayer:
    Theta = layer.Theta.clone()
    Theta[-1] *= 10.0**-t
    return replace(layer, Theta=Theta)


def _rank_one(layer: AttentionLayer, t: float, seed: int) -> AttentionLayer:
    U, s, Vh = torch.linalg.svd(layer.Theta)
    shrunk = s.clone()
    shrunk[:, 1:] *= 10.0**-t
    shrunk = shrunk * (s.norm(dim=1, keepdim=True) / shrunk.norm(dim=1, keepdim=True))
    return replace(layer, Theta=(U * shrunk.unsqueeze(1)) @ Vh)


def _saturated(layer: AttentionLayer, t: float, seed: int) -> AttentionLayer:
    return replace(layer, Theta=layer.Theta * 2.0**t)


def _crowded(layer: AttentionLayer, t: float, seed: int) -> AttentionLayer:
    """t times as many further heads as there are."""
    more = round(t * layer.heads)
    if not more:
        return layer
    others = AttentionLayer.random(heads=more, width=layer.width, scale=float(layer.Theta[0].norm()),
                                   seed=10_000 + seed)
    return replace(layer, Theta=torch.cat([layer.Theta, others.Theta]), W=torch.cat([layer.W, others.W]))


FAMILIES = {family.name: family for family in (
    Family("equal", "two heads approach each other: distance 10⁻ᵗ", _equal, (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)),
    Family("cancelling", "ΣW_i goes to 0: 10⁻ᵗ of it is left", _cancelling, (0.0, 1.0, 2.0, 4.0)),
    Family("weak", "one head's W goes to 0: 10⁻ᵗ of it is left", _weak, (0.0, 1.0, 2.0, 3.0, 4.0)),
    Family("quiet", "one head's Θ goes to 0: 10⁻ᵗ of it is left", _quiet, (0.0, 0.5, 1.0, 2.0)),
    Family("rank-one", "effective ranks go to 1: singular values after the first times 10⁻ᵗ", _rank_one,
           (0.0, 0.5, 1.0, 2.0)),
    Family("saturated", "scores grow 2ᵗ times, patterns become hard", _saturated, (0.0, 1.0, 2.0, 3.0, 4.0)),
    Family("crowded", "more heads than the width carries: 1 + t times as many", _crowded, (0.0, 1.0, 2.0, 4.0)),
)}


def family(
    name: str, dial: float, *, heads: int = 3, width: int = 12, scale: float = 2.0, seed: int = 0
) -> AttentionLayer:
    """The layer of a family at a setting of its dial.

    >>> family("weak", 2.0).heads
    3
    """
    checks.choice("family", name, tuple(FAMILIES))
    if checks.whole("heads", heads) < 2 and name == "equal":
        checks.refuse("heads", "at least 2 for heads that approach each other", heads, "heads=2")
    layer = AttentionLayer.random(heads=heads, width=width, scale=scale, seed=seed)
    return FAMILIES[name].turn(layer, checks.number("dial", dial), seed)
