"""The Jacobian of F in all factors and the form's own unknowns on a set of examples, as its triangle R: JᵀJ = RᵀR.

Every unknown acts on one number of a token or on none, and heads know nothing of each other, so a push along one
entry of all heads' factors at once gives a column for each of them: dH_i O_i for head i, summed over the heads of a
group or, for what all heads share, over all. Rows are folded into R piece by piece, which keeps all the digits of
small singular values; a normal matrix would lose half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.certificates import chained
from headway.core.examples import Examples
from headway.core.factored import FactoredLayer, free_dimensions
from headway.core.freedom import freedom
from headway.core.tangents import ALIKE, Chain

CHUNK = 1 << 24  # numbers in one piece of the Jacobian
PUSH = 1 << 22  # numbers in what is pushed at a time
OF_KEYS = ("key", "value")
MAPS = ("query", "key", "value", "gate")


@dataclass(frozen=True)
class Triangle:
    """R of the Jacobian on some examples, columns as ``layer.tensors()`` has them, and how far each may be off."""

    layer: FactoredLayer
    R: Tensor  # (at most unknowns, unknowns)
    off: Tensor  # (unknowns,): a bound on the error of each column of the Jacobian, from the way there
    turned: float  # a bound on the relative error of each column, from the reflections that made R
    sequences: int
    equations: int
    about_scores: int  # what the labels can say about scores at most

    @property
    def unknowns(self) -> int:
        return self.R.shape[1]


def unknowns(layer: FactoredLayer) -> int:
    """Numbers in the factors, the offset and the form."""
    return sum(value.numel() for value in layer.tensors().values())


def score_unknowns(layer: FactoredLayer) -> int:
    """Dimensions of scores that the form does not leave free."""
    free = freedom(layer.tensors(), layer.form)
    values = ("value", "out", "offset", "gate")
    held = sum(value.numel() for name, value in layer.tensors().items() if name not in values)
    return held - free["scores"] - free["offsets"]


def per_sequence(layer: FactoredLayer, examples: Examples) -> int:
    """Equations about scores that one sequence gives at most: a row with κ keys in sight has m·(κ − 1) free pattern
    entries (κ with sinks), and e answers."""
    k = examples.length
    keys = k if not layer.cross else examples.take([0]).arguments()["Z"].shape[1]
    see = layer.form.sight.mask(k, keys)
    seen = [keys] * k if see is None else see.sum(1).tolist()
    free = 1 if layer.form.sink is None else 0
    return sum(min(layer.out_width, layer.heads * (count - free)) for count in seen)


def triangle(layer: FactoredLayer, examples: Examples, sequences: int | None) -> Triangle:
    """On sequences spread evenly over the examples: by default five times what counting asks for."""
    k, e, p = examples.length, layer.out_width, unknowns(layer)
    about = per_sequence(layer, examples)
    floor = max(math.ceil((p - free_dimensions(layer)) / (k * e)),
                math.ceil(score_unknowns(layer) / max(about, 1)))
    count = max(1, min(5 * floor if sequences is None else sequences, len(examples)))
    index = ((np.arange(count) + 0.5) * len(examples) / count).astype(np.int64)
    step = max(1, CHUNK // (k * e * p))
    R, squared, equations, turned = layer.query.new_zeros(0, p), layer.query.new_zeros(p), 0, 0.0
    eps = torch.finfo(layer.query.dtype).eps
    for start in range(0, count, step):
        J, off = piece(layer, examples.take(index[start : start + step]))
        squared += off.square()
        equations += len(J)
        turned += eps * (len(R) + len(J)) * p
        R = torch.linalg.qr(torch.cat([R, J]), mode="r")[1]
    return Triangle(layer, R, squared.sqrt(), turned, count, equations, about * count)


def piece(layer: FactoredLayer, part: Examples) -> tuple[Tensor, Tensor]:
    """J on these examples, (rows·e, unknowns) without rows of filling, and a bound on the error of each column."""
    like = layer.query
    X, given = part.X.to(like.dtype), part.arguments()
    if part.keys is not None:
        given["Z"] = part.keys.to(like.dtype)
    chain = layer.chain(X, **given)
    X = torch.cat([X, torch.ones_like(X[..., :1])], dim=2)
    Z = X if part.keys is None else torch.cat([given["Z"], torch.ones_like(given["Z"][..., :1])], dim=2)
    n, k, e = X.shape[0], X.shape[1], layer.out_width
    blocks = []
    for name, value in layer.tensors().items():
        J = like.new_zeros(n, k, e, value.numel())
        for columns, at in _columns(layer, chain, name, X, Z):
            J[..., at] = columns
        blocks.append(J)
    whole = torch.cat(blocks, dim=3).view(n * k, e, -1)
    real = torch.ones(n * k, dtype=torch.bool, device=X.device) if part.padding is None else ~part.padding.flatten()
    off = chained.columns(layer, chain, X, Z, real.view(n, k))
    return whole[real].flatten(0, 1), off


def _columns(
    layer: FactoredLayer, chain: Chain, name: str, X: Tensor, Z: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """∂F/∂(entries of one tensor), (n, k, e, columns), and which entries they belong to."""
    e = layer.out_width
    n, m, k, p = chain.H.shape
    if name == "offset":
        yield torch.eye(e).to(X).expand(n, k, e, e), torch.arange(e)
    elif name == "out":
        J = torch.einsum("nmkp,of->nkompf", chain.H, torch.eye(e).to(X))
        yield J.reshape(n, k, e, -1), torch.arange(layer.out.numel())
    else:
        shape = layer.tensors()[name].shape
        across = 1 if name in ALIKE else shape[0]  # columns that one push gives: one for each head or group
        make, count = _directions(name, shape, X, Z)
        step = max(1, PUSH // (n * m * k * max(chain.P.shape[3], e, p)))
        for start in range(0, count, step):
            at = torch.arange(start, min(start + step, count))
            dH = torch.func.vmap(lambda d: chain.push({**_still(chain), name: d}))(make(at.to(X.device)))
            J = torch.einsum("anmkp,mpe->anmke", dH, layer.out).view(len(at), n, across, -1, k, e).sum(3)
            yield J.permute(1, 3, 4, 2, 0).reshape(n, k, e, -1), (torch.arange(across).unsqueeze(1) * count
                                                                  + at).flatten()


def _directions(name: str, shape: torch.Size, X: Tensor, Z: Tensor) -> tuple[Callable[[Tensor], Tensor], int]:
    """What changes in the chain along the given entries of every head's (r, c) factor or of its own unknowns."""
    if name in MAPS:
        T, c = Z if name in OF_KEYS else X, shape[2]
        eye = torch.eye(c).to(X)
        return lambda at: torch.einsum("nka,ac->ankc", T[..., at // c], eye[at % c]).unsqueeze(2), shape[1] * c
    if name in ALIKE:
        return lambda at: torch.eye(shape[0]).to(X)[at], shape[0]
    if len(shape) == 1:
        return lambda at: X.new_ones(len(at), shape[0]), 1
    return lambda at: torch.eye(shape[1]).to(X)[at].unsqueeze(1).expand(-1, *shape), shape[1]


def _still(chain: Chain) -> dict[str, Tensor]:
    """No change of anything."""
    found = {"query": torch.zeros_like(chain.Q), "key": torch.zeros_like(chain.K),
             "value": torch.zeros_like(chain.V)}
    found |= {name: torch.zeros_like(value) for name, value in chain.own.items() if name != "cap"}
    return found if chain.gate is None else {**found, "gate": torch.zeros_like(chain.gate)}
