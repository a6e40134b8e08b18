"""Which heads share their keys and values? Two heads do where one's keys and values are invertible combinations of
the other's, of the kind that the form leaves free: any within a block of columns that are not turned or turned
alike, signs where they are normed. Then the one's factors can be written with the keys of the other."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headway.core.factored import FactoredLayer
from headway.core.freedom import blocks, key_bias_shows, value_bias_shows


def grouped(layer: FactoredLayer, tolerance: float) -> FactoredLayer:
    """The same function with groups, where heads fall into groups of one size; else the layer itself."""
    m = layer.heads
    if layer.groups != m or layer.form.gate is not None or m < 2:
        return layer
    found: list[list[int]] = []
    for i in range(m):
        home = next((group for group in found if _shared(layer, group[0], i, tolerance) is not None), None)
        if home is None:
            found.append([i])
        else:
            home.append(i)
    if len(found) == m or len({len(group) for group in found}) > 1:
        return layer
    A, out = layer.query.clone(), layer.out.clone()
    for group in found:
        for i in group[1:]:
            both = _shared(layer, group[0], i, tolerance)
            assert both is not None
            A[i], out[i] = both
    order = torch.tensor([i for group in found for i in group])
    first = torch.tensor([group[0] for group in found])
    own = {name: value[order] for name, value in layer.form.tensors().items()
           if name in ("sink", "offsets", "slope")}
    return replace(layer, query=A[order], key=layer.key[first], value=layer.value[first], out=out[order],
                   form=layer.form.with_tensors(own)).canonical()


def _shared(layer: FactoredLayer, j: int, i: int, tolerance: float) -> tuple[Tensor, Tensor] | None:
    """A_i and O_i such that head i reads keys and values of head j; None where it cannot."""
    rows = slice(None) if value_bias_shows(layer.form) else slice(None, -1)
    mix = _combination(layer.value[j][rows], layer.value[i][rows], tolerance)
    if mix is None:
        return None
    A = layer.query[i]
    if layer.form.normed is not None:
        sign = torch.where((layer.key[i] * layer.key[j]).sum(0) < 0, -1.0, 1.0).to(A)
        near = (layer.key[i] - layer.key[j] * sign).norm() <= tolerance * layer.key[i].norm()
        return (A * sign, mix @ layer.out[i]) if bool(near) else None
    for block in blocks(layer.form, layer.size):
        rows = slice(None) if block.two or key_bias_shows(layer.form) else slice(None, -1)
        T = _combination(block.read(layer.key[j])[rows], block.read(layer.key[i])[rows], tolerance)
        if T is None:
            return None
        A = block.write(A, block.read(A) @ T.mH)
    return A, mix @ layer.out[i]


def _combination(F: Tensor, G: Tensor, tolerance: float) -> Tensor | None:
    """T with FT = G, if there is one."""
    T: Tensor = torch.linalg.lstsq(F, G, driver="gelsd" if F.device.type == "cpu" else None).solution
    return T if float((F @ T - G).norm()) <= tolerance * float(G.norm()) else None
