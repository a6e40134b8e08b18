"""Do the examples pin down a layer of any form, up to what its form leaves free? Its Jacobian's kernel says so.

Factors of one function form a set of a dimension that the form tells (core.freedom). The kernel of the Jacobian in
all factors, on these examples, holds the tangents of that set; the layer is determined, to first order, if it holds
nothing else: no layer has a Jacobian of larger rank, so the rank is the same nearby, and the factors with the same
answers form a set of just that dimension. A singular value above what rounding could have made is truly above 0, so
that the number of the others bounds the kernel's dimension from above.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from headway.certificates.factors import Triangle, score_unknowns
from headway.certificates.identify import CLEAR, NAME, still_directions
from headway.core.examples import Examples
from headway.core.factored import FactoredLayer, free_dimensions
from headway.core.freedom import blocks
from headway.core.gauge import Heads, distances, errors, heads_of
from headway.core.positions import OffsetTable
from headway.core.results import Claim, Verdict

OPEN = 1e-10  # singular values below this, relative to the largest of the scaled Jacobian, are open directions
LOOKED_AT = 1 << 24  # numbers in what open directions move of the heads, up to which that is computed
STEP = 1e-5  # of the differences by which it is computed, relative to the factors
MOVED = 1e-6  # what is less than this of a head, for a step of its size, is the differences' error


def identified(found: Triangle, examples: Examples) -> Claim:
    """The claim that the kernel has no more dimensions than the form leaves free."""
    layer = found.layer
    gauge = free_dimensions(layer)
    weak = _held_by_eps(layer) - gauge
    scale, empty = _scale(found.R)
    s = torch.linalg.svdvals(found.R * scale)
    s = torch.cat([s, s.new_zeros(found.unknowns - len(s))]).flip(0)
    top = float(s[-1].clamp_min(1e-300))
    # A column left out can only lower the rank, so its error is none.
    off = (float((found.off * scale).norm()) + found.turned * math.sqrt(found.unknowns - empty)
           + 10 * found.unknowns * torch.finfo(s.dtype).eps * top) / top
    s = s / top
    open_ = int((s <= OPEN).sum())
    least = float(s[gauge])
    # Where rounding hides what eps holds, the claim leaves those directions out and says so.
    allowed = gauge if least > off else gauge + weak
    firm = float(s[gauge + weak])
    numbers = {"parameters": float(found.unknowns), "sequences": float(found.sequences), "gauge": float(gauge),
               "held_by_eps": float(weak), "free_directions": float(open_), "least_singular_value": firm,
               "rounding": off}
    statement = (f"The {found.unknowns} numbers of the factors are determined, to first order, by "
                 f"{found.sequences} sequences of {examples.length} tokens, up to the {gauge} dimensions that the "
                 "form leaves free")
    if allowed > gauge:
        statement += f" and the {weak} sizes of normed factors that only the norms' eps holds"
    ground = "none: a property of the layer and these inputs"
    if open_ > gauge + weak:
        return Claim(NAME, statement, ground, Verdict.NO, _reason(found, examples, scale, open_, gauge), numbers)
    told = (f"the Jacobian's kernel has {open_} dimensions; the least singular value that is not of it, scaled, is "
            f"{firm:.1e} of the largest")
    if weak and allowed == gauge:
        told += f", and {least:.1e} for the sizes of normed factors, which only the norms' eps holds"
    if float(s[allowed]) <= off:
        told, holds = f"{told}, and rounding alone could make {off:.1e}", Verdict.UNDECIDED
    elif firm < CLEAR:
        told, holds = f"{told}, and {CLEAR:.0e} is asked for", Verdict.UNDECIDED
    else:
        holds = Verdict.YES
    return Claim(NAME, statement, ground, holds, told, numbers)


def _held_by_eps(layer: FactoredLayer) -> int:
    """Free dimensions if norms had no eps: the sizes of normed factors are held by it alone, and weakly."""
    norms = layer.form.normed
    if norms is None:
        return free_dimensions(layer)
    return free_dimensions(replace(layer, form=replace(layer.form, normed=replace(norms, eps=0.0))))


def _scale(R: Tensor) -> tuple[Tensor, int]:
    """1 over the length of every column, 0 for those that are nothing beside the longest; how many these are."""
    length = R.norm(dim=0)
    there = length > 1e-12 * length.max()
    return torch.where(there, 1 / length.clamp_min(1e-300), 0.0), int((~there).sum())


# -- why not ----------------------------------------------------------------------------------------------------


def _reason(found: Triangle, examples: Examples, scale: Tensor, open_: int, gauge: int) -> str:
    layer, more = found.layer, open_ - gauge
    heads = heads_of(layer)
    few = _few(found, gauge)
    named = [*few, *_unread(found), *_dead(heads), *_equal(heads), *_thin(layer), *still_directions(examples)]
    words = f"{more} more direction{'s are' if more > 1 else ' is'} open than the form leaves free"
    moved = {} if few else _moved(found, scale, open_, heads)
    if moved:
        words += "; they change " + ", ".join(f"head {i + 1} in {count}" for i, count in moved.items())
    return "; ".join([words, *named])


def _few(found: Triangle, gauge: int) -> list[str]:
    held, scores = found.unknowns - gauge, score_unknowns(found.layer)
    if found.equations >= held and found.about_scores >= scores:
        return []
    return [f"too few examples: {found.sequences} sequences give at most {found.equations} equations for {held} "
            f"unknowns, {found.about_scores} of them about the {scores} of the scores"]


def _unread(found: Triangle) -> list[str]:
    """Offsets of a table that no pair of these tokens has, though the form can reach them."""
    table, at, unread = found.layer.form.offsets, 0, 0
    if not isinstance(table, OffsetTable):
        return []
    for name, value in found.layer.tensors().items():
        if name == "offsets":
            empty = found.R[:, at : at + value.numel()].norm(dim=0).view(value.shape) == 0
            unread = int(empty.all(0).sum())
        at += value.numel()
    words = f"{unread} of the {table.values.shape[1]} offsets of the table occur at no pair of these tokens"
    return [words] if unread else []


def _dead(heads: Heads) -> list[str]:
    loud = torch.stack([heads.ov(i).norm() for i in range(heads.count)])
    return [f"head {i + 1} is dead (its values come to {float(loud[i]):.1e}): its scores are free"
            for i in torch.nonzero(loud <= 1e-8 * loud.max()).flatten().tolist()]


def _equal(heads: Heads) -> list[str]:
    if heads.gate is not None:  # two gates may tell equal scores apart
        return []
    apart = distances(heads, heads).scores
    return [f"heads {j + 1} and {i + 1} have equal scores: only the sum of their values is determined"
            for i in range(heads.count) for j in range(i)
            if apart[j, i] < 1e-6 and errors(heads.take([i]), heads.take([j]))[0][0] <= 1e-6]


def _thin(layer: FactoredLayer) -> list[str]:
    """Heads whose scores would do with fewer columns than their factors have."""
    if layer.form.normed is not None:
        return []
    B = layer.key.repeat_interleave(layer.heads // layer.groups, 0)
    spare = torch.zeros(layer.heads, dtype=torch.long)
    for block in blocks(layer.form, layer.size):
        a, b = block.read(layer.query).cpu(), block.read(B).cpu()
        s = torch.linalg.svdvals(torch.linalg.qr(a)[1] @ torch.linalg.qr(b)[1].mH)
        size = min(a.shape[1], b.shape[1], a.shape[2])
        spare += (size - (s[:, :size] > 1e-10 * s[:, :1].clamp_min(1e-300)).sum(1)) * (2 if block.two else 1)
    return [f"the scores of head {i + 1} do with {layer.size - spare[i]} of its {layer.size} columns"
            for i in torch.nonzero(spare).flatten().tolist()]


def _moved(found: Triangle, scale: Tensor, open_: int, heads: Heads) -> dict[int, int]:
    """Head by head the dimension of what the kernel moves of its scores, values and gates, free of gauge; empty
    where that is too much to look at."""
    layer = found.layer
    if open_ * _invariants(heads, 0).numel() > LOOKED_AT:
        return {}
    unit = torch.where(scale > 0, scale, scale.max())  # a column left out is an open direction by itself
    K = found.R * scale
    vectors = torch.linalg.eigh(K.mT @ K)[1][:, :open_] * unit.unsqueeze(1)
    size = torch.cat([value.flatten() for value in layer.tensors().values()]).norm()
    ways = torch.linalg.qr(vectors)[0].mT * (STEP * size)
    changes: list[list[Tensor]] = [[] for _ in range(layer.heads)]
    for way in ways:
        there, back = (heads_of(_stepped(layer, sign * way)) for sign in (1.0, -1.0))
        for i, kept in enumerate(changes):
            kept.append((_invariants(there, i) - _invariants(back, i)) / (2 * STEP))
    counts = {}
    for i, kept in enumerate(changes):
        s = torch.linalg.svdvals(torch.stack(kept))
        counts[i] = int((s > MOVED * max(float(_invariants(heads, i).norm()), float(s[0]))).sum())
    return {i: count for i, count in counts.items() if count}


def _invariants(heads: Heads, head: int) -> Tensor:
    parts = [torch.view_as_real(M).flatten() if M.is_complex() else M.flatten() for M in heads.qk(head).values()]
    parts += [heads.ov(head).flatten()] + ([] if heads.gate is None else [heads.gate[head].flatten()])
    return torch.cat(parts)


def _stepped(layer: FactoredLayer, way: Tensor) -> FactoredLayer:
    moved, at = {}, 0
    for name, value in layer.tensors().items():
        moved[name] = value + way[at : at + value.numel()].view_as(value)
        at += value.numel()
    return layer.with_tensors(moved)
