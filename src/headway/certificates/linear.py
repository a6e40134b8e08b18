"""What may be claimed of a layer of linear scores: of its operator, since single heads are not determined.

A change of m heads (dΘ, dW) moves the operator by Σ_i vec(dΘ_i)vec(W_i)ᵀ + vec(Θ_i)vec(dW_i)ᵀ, and mixing them
moves nothing: dΘ = GΘ, dW = −GᵀW, m² directions where the Θ_i, and the W_i, are linearly independent. So the
examples determine the operator among those of m heads, to first order, if the Jacobian in (Θ, W, c) has a kernel of
m² dimensions and no more; and among all operators if the features of the convex problem (linalg.convex) are
independent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.certificates.identify import DENSE, NAME
from headway.certificates.spectrum import FREE
from headway.core import attention, operator
from headway.core.counting import LinearSize
from headway.core.examples import Examples
from headway.core.layer import AttentionLayer
from headway.core.results import Claim, Verdict
from headway.linalg import convex
from headway.linalg.projected import LinearRows, Problem

ROWS = 5  # times the counting floor of sequences, by default
CHUNK = 1 << 23  # numbers in one piece of the Jacobian
SINGLE = ("single heads are not determined, since any invertible mixing of them is the same function: it is not "
          "asked of linear scores")


def claims(layer: AttentionLayer, examples: Examples, sequences: int | None) -> list[Claim]:
    """identifiability and fewest heads; what is about single heads stays undecided, with the reason."""
    layer = layer.to("cpu").to(torch.float64).canonical()
    return [_determined(layer, examples, sequences), _fewest(layer),
            *(Claim(name, statement, "–", Verdict.UNDECIDED, SINGLE) for name, statement in (
                ("distance to the truth", "The layer that made the labels is near this one"),
                ("error bars", "Errors per head"),
                ("what is determined", "Directions of each head that these inputs determine"),
                ("non-degeneracy", "The heads are in general position, as the provable algorithm asks")))]


def _determined(layer: AttentionLayer, examples: Examples, sequences: int | None) -> Claim:
    m, d, e = layer.heads, layer.width, layer.out_width
    size = LinearSize(d, e, examples.length, layer.mask)
    count = min(len(examples), sequences or max(8, ROWS * size.floor(m)))
    unknowns = m * d * (d + e) + (0 if layer.offset is None else e)
    statement = (f"The operator of {m} head{'s' * (m != 1)} is determined, to first order, by {count} sequences of "
                 f"{examples.length} tokens")
    ground = "none: a property of the layer and these inputs"
    numbers = {"parameters": float(unknowns), "sequences": float(count)}
    if unknowns > DENSE:
        return Claim(NAME, statement, ground, Verdict.UNDECIDED,
                     f"its heads have {unknowns} numbers: the Jacobian's kernel is counted up to {DENSE}", numbers)
    rows = rows_of(layer, examples.take(range(count)))
    G = gram(layer, rows)
    scale = G.diagonal().clamp_min(1e-300).rsqrt()
    values = torch.linalg.eigvalsh(G * scale[:, None] * scale[None, :])
    s = values.clamp_min(0).sqrt() / values[-1].sqrt()
    free = int((s <= FREE).sum()) - m * m
    numbers |= {"free_directions": float(free), "least_singular_value": float(s[min(m * m, len(s) - 1)])}
    if free > 0:
        return Claim(NAME, statement, ground, Verdict.NO, f"{free} directions beyond the {m * m} of mixing heads "
                     "leave the outputs as they are", numbers)
    reason = (f"nothing but the {m * m} directions of mixing heads leaves the outputs as they are; the least other "
              f"singular value is {numbers['least_singular_value']:.1e} of the largest")
    features, problem = convex.columns(d), Problem((rows,))
    if features <= min(convex.MOST, problem.rows) and convex.solve(problem).determined:
        reason += "; and no other operator of any number of heads answers alike"
    return Claim(NAME, statement, ground, Verdict.YES, reason, numbers)


def rows_of(layer: AttentionLayer, part: Examples) -> LinearRows:
    """These sequences, weighted as the layer weights them."""
    X, Y = part.X.cpu().double(), part.Y.cpu().double()
    padding = None if part.padding is None else part.padding.cpu()
    see = attention.allowed(X, layer.mask, padding)
    valid = None if padding is None else (~padding).unsqueeze(2).double()
    return LinearRows(X, Y if valid is None else Y * valid, see, valid,
                      attention.linear_weight(X, see, layer.scores == "linear/k"))


def gram(layer: AttentionLayer, rows: LinearRows) -> Tensor:
    """JᵀJ in (Θ, W, c), in this order: ∂y_a[s]/∂Θ_i[p, q] = x_a[p] (C_aW_i)[q, s], ∂y_a[s]/∂W_i[r, s] =
    (C_aΘ_iᵀx_a)[r]."""
    m, d, e = layer.heads, layer.width, layer.out_width
    n, k, _ = rows.X.shape
    unknowns = m * d * (d + e) + (0 if layer.offset is None else e)
    G = layer.W.new_zeros(unknowns, unknowns)
    weight = torch.ones(1, k, k, dtype=torch.float64) if rows.weight is None else rows.weight
    H = attention.attend(rows.patterns(layer.Theta), rows.X)  # (n, k, m, d)
    step = max(1, CHUNK // (k * e * unknowns))
    eye = torch.eye(e, dtype=torch.float64)
    for at in range(0, n, step):
        X, own = rows.X[at : at + step], weight if len(weight) == 1 else weight[at : at + step]
        C = torch.einsum("nab,nbq,nbr->naqr", own.expand(len(X), k, k), X, X)
        parts = [torch.einsum("nap,naqr,mrs->nasmpq", X, C, layer.W).flatten(3),
                 torch.einsum("namr,st->nasmrt", H[at : at + step], eye).flatten(3)]
        if layer.offset is not None:
            parts.append(eye.expand(len(X), k, e, e))
        J = torch.cat(parts, dim=3)
        J = J if rows.valid is None else J * rows.valid[at : at + step].unsqueeze(3)
        J = J.flatten(0, 2)
        G += J.mT @ J
    return G


def _fewest(layer: AttentionLayer) -> Claim:
    m, least = layer.heads, operator.fewest(layer.Theta, layer.W)
    statement = f"No set of fewer than {m} head{'s' * (m != 1)} computes this operator"
    ground = "none: a property of the layer; eigenvalues below 1e-9 of the largest count as zero"
    numbers = {"heads": float(m), "least": float(least)}
    if least >= m:
        return Claim("fewest heads", statement, ground, Verdict.YES,
                     f"a matrix made of it has {least} eigenvalues of one sign, which takes as many heads", numbers)
    return Claim("fewest heads", statement, ground, Verdict.UNDECIDED,
                 f"the eigenvalues of matrices made of it ask for {least} at least, and prove no more", numbers)
