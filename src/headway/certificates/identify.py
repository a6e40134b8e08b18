"""Do the examples pin the parameters down? The smallest singular values of the Jacobian, and what they belong to.

Small layers: the dense normal matrix, scaled to unit diagonal, all eigenvalues. Large ones: W and c are eliminated
exactly through the features' Gram matrix, and Lanczos on products bounds the least eigenvalue of what is left,
preconditioned by its Kronecker blocks; a positive bound for both is full rank. Where the attention matrices have
low rank the claim is about layers of that rank, and says so: there are far fewer parameters, and they are what a
layer with that head size has.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headway.certificates.jacobian import Sample
from headway.core.examples import Examples
from headway.core.layer import AttentionLayer
from headway.core.results import Claim
from headway.linalg.krylov import lanczos, lanczos_error
from headway.linalg.projected import Products, evaluate

DENSE = 4000  # parameters up to which the normal matrix is formed
FREE = 1e-7  # singular values below this, relative to the largest of the scaled Jacobian, are free directions
CLEAR = 1e-5  # and above this they are not; between, undecided
NAME = "identifiability"


def causes(layer: AttentionLayer, examples: Examples, found: Sample) -> list[str]:
    """Known reasons for free directions, each in words."""
    A, W = layer.augmented.double().flatten(1), layer.W.double().flatten(1)
    named = []
    weight = W.norm(dim=1)
    for i in torch.nonzero(weight <= 1e-8 * weight.max()).flatten().tolist():
        named.append(f"head {i + 1} is dead (‖W‖ = {float(weight[i]):.1e}): its attention matrix is free")
    for i in range(layer.heads):
        for j in range(i):
            size = float(torch.maximum(A[i].norm(), A[j].norm()))
            if float((A[i] - A[j]).norm()) <= 1e-6 * max(size, 1e-300):
                named.append(f"heads {j + 1} and {i + 1} have equal attention matrices: only the sum of their "
                             "projections is determined")
    if found.equations < found.unknowns or found.about_theta < found.theta_unknowns:
        named.append(f"too few examples: {found.sequences} sequences give at most {found.equations} equations for "
                     f"{found.unknowns} parameters, {found.about_theta} of them about the {found.theta_unknowns} "
                     "of the attention matrices")
    named += still_directions(examples)
    return named


def still_directions(examples: Examples) -> list[str]:
    """Token directions that never change, named as coordinates where they are."""
    part = examples.take(range(min(len(examples), 2048)))
    X = part.X.double().reshape(-1, part.width)
    if part.padding is not None:
        X = X[~part.padding.reshape(-1)]
    X = X - X.mean(0)
    values, vectors = torch.linalg.eigh(X.T @ X / len(X))
    still = vectors[:, values <= 1e-12 * values[-1]]
    if not still.shape[1]:
        return []
    share = still.square().sum(1)
    coordinates = torch.nonzero(share > 0.999).flatten().tolist()
    named = [f"coordinate {j + 1} of the tokens is constant: it tells no key from another" for j in coordinates]
    if still.shape[1] > len(coordinates):
        named.append(f"{still.shape[1] - len(coordinates)} further token directions never change")
    return named


def identifiability(
    layer: AttentionLayer, examples: Examples, found: Sample, confidence: float, generator: torch.Generator,
    steps: int,
) -> Claim:
    named = causes(layer, examples, found)
    assumption = "none: a property of the layer and these inputs"
    statement = (f"The {found.unknowns} parameters are determined, to first order, by {found.sequences} sequences "
                 f"of {examples.length} tokens")
    if found.rank is not None:
        statement += f", among layers whose attention matrices have rank at most {found.rank}"
    numbers = {"parameters": float(found.unknowns), "sequences": float(found.sequences)}
    if found.unknowns <= DENSE and found.rank is None:
        more, holds, reason = _dense(found)
    elif any(word.startswith(("too few", "head", "coordinate")) for word in named):
        more, holds, reason = {}, "no", "free directions of known cause"
    else:
        more, holds, reason = _by_products(found, confidence, generator, steps)
        assumption += "; the bound rests on a random start of Lanczos' method"
    if named:
        reason = "; ".join(named) if holds == "no" else reason + "; " + "; ".join(named)
    return Claim(NAME, statement, assumption, holds, reason, {**numbers, **more})


def _dense(found: Sample) -> tuple[dict[str, float], str, str]:
    N, _ = found.normal
    scale = N.diagonal().clamp_min(1e-300).rsqrt()
    empty = int((N.diagonal() <= 1e-24 * N.diagonal().max()).sum())
    values, vectors = torch.linalg.eigh(N * scale[:, None] * scale[None, :])
    s = values.clamp_min(0).sqrt() / values[-1].sqrt()
    free = max(int((s <= FREE).sum()), empty)
    numbers = {"least_singular_value": float(s[0]), "free_directions": float(free)}
    if free:
        return numbers, "no", f"{free} free directions; the weakest lies in {_where(found, vectors[:, 0])}"
    if float(s[0]) < CLEAR:
        return numbers, "undecided", f"the least singular value is {float(s[0]):.1e} of the largest"
    return numbers, "yes", f"the least singular value of the scaled Jacobian is {float(s[0]):.1e} of the largest"


def _where(found: Sample, v: Tensor) -> str:
    """Which parameters a direction moves most: its weight by head and kind."""
    m = found.layer.heads
    theta = v[: found.theta_unknowns].view(m, -1).norm(dim=1)
    W = v[found.theta_unknowns : found.theta_unknowns + found.layer.W.numel()].view(m, -1).norm(dim=1)
    i, j = int(theta.argmax()), int(W.argmax())
    return f"the attention matrix of head {i + 1}" if theta[i] >= W[j] else f"the projection of head {j + 1}"


def _by_products(
    found: Sample, confidence: float, generator: torch.Generator, steps: int
) -> tuple[dict[str, float], str, str]:
    problem, Theta = found.problem, found.layer.augmented
    point = evaluate(problem, Theta)
    # The features' Gram matrix from its Cholesky factor, scaled to unit diagonal.
    G = (point.factor @ point.factor.T).double()
    root = G.diagonal().clamp_min(1e-300).rsqrt()
    features = torch.linalg.eigvalsh(G * root[:, None] * root[None, :])
    apply = _scaled_curvature(found, Products(problem, point, problem.dtype), generator)

    def bound(values: Tensor) -> tuple[float, float]:
        """A lower bound of the spectrum; λ_max and λ_min are each missed with half the probability allowed."""
        epsilon = lanczos_error(len(values), found.theta_unknowns, 1.0 - (1.0 - confidence) / 2)
        top = float(values[-1]) / max(1.0 - epsilon, 1e-9)
        return float(values[0]) - epsilon * top, epsilon

    floor = 100 * torch.finfo(problem.dtype).eps
    start = torch.randn(Theta.shape, generator=generator, dtype=torch.float32).to(Theta)
    values, v = lanczos(apply, start, steps, lambda ritz: bound(ritz)[0] > 0 or
                        float(ritz[0]) < floor * float(ritz[-1]))
    used = len(values)
    least, epsilon = bound(values)
    numbers = {"least_ritz_value": float(values[0]), "largest_ritz_value": float(values[-1]),
               "lower_bound": least, "lanczos_error": epsilon, "products": float(used),
               "features_least": float(features[0] / features[-1])}
    if float(features[0]) < floor * float(features[-1]):
        return numbers, "no", "the features of the heads depend on each other"
    if float(values[0]) < floor * float(values[-1]):
        head = int(v.flatten(1).norm(dim=1).argmax())
        return numbers, "no", f"a direction in the attention matrix of head {head + 1} leaves no trace"
    if least <= 0:
        need = math.ceil(used * math.sqrt(epsilon * float(values[-1]) / float(values[0]))) + 1
        return numbers, "undecided", (f"after {used} products the least eigenvalue is between 0 and "
                                      f"{float(values[0]):.1e}; steps={need} would decide")
    return numbers, "yes", (f"the least eigenvalue of the scaled normal matrix is at least {least:.1e}, with the "
                            f"largest at {float(values[-1]):.1e} ({used} Lanczos steps, error {epsilon:.1e})")


def _scaled_curvature(found: Sample, operator: Products, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """v ↦ R·T·D^{-1/2} JᵀJ D^{-1/2}·T·R v: definite exactly when JᵀJ is, T the tangent space of one rank's layers.

    D holds the Kronecker blocks Q ⊗ M_i. They overrate one direction a head, that of Θ_i itself: a softmax answers
    little to scores that only grow. R stretches it to curvature 1. Off the tangent space the operator is twice the
    identity, so that rounding cannot pass for a zero.
    """
    Theta = found.layer.augmented
    Q, M = operator.blocks(generator)
    left, right = _inverse_root(Q), _inverse_root(M)
    scaled = torch.linalg.solve(left, Theta) @ torch.linalg.inv(right)
    if found.rank is not None:
        U, _, Vh = torch.linalg.svd(scaled, full_matrices=False)
        U, Vh = U[:, :, : found.rank], Vh[:, : found.rank]

    def tangent(v: Tensor) -> Tensor:
        if found.rank is None:
            return v
        across = v - U @ (U.mT @ v)
        inside: Tensor = v - across + (across @ Vh.mT) @ Vh
        return inside

    def inner(v: Tensor) -> Tensor:
        inside = tangent(v)
        curved: Tensor = left @ operator.curvature(left @ inside @ right) @ right
        return tangent(curved) + 2 * (v - inside)

    along = scaled / scaled.flatten(1).norm(dim=1).clamp_min(1e-30).view(-1, 1, 1)
    answer = (along * inner(along)).sum((1, 2), keepdim=True)
    stretch = answer.clamp_min(1e-30).rsqrt().clamp(1.0, 20.0) - 1.0

    def stretched(v: Tensor) -> Tensor:
        longer: Tensor = v + stretch * along * (along * v).sum((1, 2), keepdim=True)
        return longer

    return lambda v: stretched(inner(stretched(v)))


def _inverse_root(D: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(D)
    cut = torch.finfo(D.dtype).eps * values[..., -1:].clamp_min(1e-30)
    root: Tensor = (vectors * values.clamp_min(cut).rsqrt().unsqueeze(-2)) @ vectors.mT
    return root
