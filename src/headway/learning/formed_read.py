"""What a table of offsets says of itself: is β_i(Δ) = s_iΔ + c_i, or one number for each of T5's buckets?

A constant a head is free, so only differences are looked at. Simpler forms begin at the closest of their kind and
are refined by whoever asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from headway.core.forms import Form
from headway.core.positions import OffsetTable, Slope, buckets_of

BUCKETS = (8, 16, 32, 64)  # of T5's tables, in use
FARTHEST = (16, 32, 64, 128, 256)  # from where on their offsets are alike
CLOSE = 1e-2  # part of a table that a simpler one may miss and still be tried


def read_off(form: Form, tensors: dict[str, Tensor], length: int) -> Iterator[tuple[Form, dict[str, Tensor]]]:
    """Simpler forms that are close to the table of this fit, fewest unknowns first."""
    table = form.offsets
    assert isinstance(table, OffsetTable)
    beta = tensors["offsets"].double()
    delta = _offsets(table, beta.shape[1])
    slope = _slope(beta, delta)
    line = slope.unsqueeze(1) * delta
    rest = {name: value for name, value in tensors.items() if name != "offsets"}
    if _close(beta, line):
        yield replace(form, offsets=Slope(slope)), {**rest, "slope": slope}
    side = 4 if table.both else 2
    tried = sorted((count, far) for count, far in product(BUCKETS, FARTHEST) if far > count // side)
    for count, far in tried:
        where = buckets_of(delta.long(), "t5", count, table.both, far)
        if len(set(where.tolist())) == len(delta):
            continue
        values = beta.new_zeros(len(beta), count)
        for bucket in set(where.tolist()):
            values[:, bucket] = beta[:, where == bucket].mean(1)
        if _close(beta, values[:, where]):
            yield (replace(form, offsets=OffsetTable(values, kind="t5", both=table.both, far=far)),
                   {**rest, "offsets": values})
            return  # others with these buckets are the same on sequences of this length


def _offsets(table: OffsetTable, buckets: int) -> Tensor:
    """Δ of every bucket of a clipped table."""
    if table.both:
        reach = buckets // 2
        return torch.arange(-reach, reach + 1, dtype=torch.float64, device=table.values.device)
    return -torch.arange(buckets, dtype=torch.float64, device=table.values.device)


def _slope(beta: Tensor, delta: Tensor) -> Tensor:
    """The slope of the closest line to every row."""
    x = delta - delta.mean()
    return (beta - beta.mean(1, keepdim=True)) @ x / x.square().sum()


def _close(beta: Tensor, other: Tensor) -> bool:
    """Whether two tables are the same apart from a constant a head."""
    apart = beta - other
    apart, beta = (part - part.mean(1, keepdim=True) for part in (apart, beta))
    return float(apart.norm()) < CLOSE * float(beta.norm())
