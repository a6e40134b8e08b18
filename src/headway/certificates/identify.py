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

from headway.certificates import rounding
from headway.certificates.jacobian import Sample
from headway.certificates.spectrum import FREE, Spectrum
from headway.core.examples import Examples
from headway.core.layer import AttentionLayer, alike
from headway.core.results import Claim, Verdict

DENSE = 4000  # parameters up to which the normal matrix is formed
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
            if alike(A[i], A[j], 1e-6):
                named.append(f"heads {j + 1} and {i + 1} have equal attention matrices: only the sum of their "
                             "projections is determined")
    if found.equations < found.unknowns or found.about_theta < found.theta_unknowns:
        named.append(f"too few examples: {found.sequences} sequences give at most {found.equations} equations for "
                     f"{found.unknowns} parameters, {found.about_theta} of them about the {found.theta_unknowns} "
                     "of the attention matrices")
    named += still_directions(examples)
    return named


def open_(named: list[str]) -> bool:
    """Whether one of these causes by itself leaves directions free."""
    return any(word.startswith(("too few", "head", "coordinate")) for word in named)


def still_directions(examples: Examples) -> list[str]:
    """Directions of tokens, and of keys of their own, that never change, named as coordinates where they are."""
    part = examples.take(range(min(len(examples), 2048)))
    named = _still(part.X, part.padding, "tokens")
    return named if part.keys is None else named + _still(part.keys, part.key_padding, "keys")


def _still(X: Tensor, padding: Tensor | None, whose: str) -> list[str]:
    X = X.double().flatten(0, 1) if padding is None else X[~padding].double()
    X = X - X.mean(0)
    values, vectors = torch.linalg.eigh(X.T @ X / len(X))
    still = vectors[:, values <= 1e-12 * values[-1]]
    if not still.shape[1]:
        return []
    share = still.square().sum(1)
    coordinates = torch.nonzero(share > 0.999).flatten().tolist()
    named = [f"coordinate {j + 1} of the {whose} is constant: it tells no key from another" for j in coordinates]
    further = still.shape[1] - len(coordinates)
    if further:
        named.append(f"{further} further direction{'s' if further > 1 else ''} of the {whose} never change"
                     f"{'' if further > 1 else 's'}")
    return named


def identifiability(
    layer: AttentionLayer, examples: Examples, found: Sample, spectrum: Callable[[], Spectrum]
) -> Claim:
    """``spectrum`` is asked for only where the dense matrix is too large and no cause of free directions is
    seen."""
    named = causes(layer, examples, found)
    assumption = "none: a property of the layer and these inputs"
    statement = (f"The {found.unknowns} parameters are determined, to first order, by {found.sequences} sequences "
                 f"of {examples.length} tokens")
    if found.ranks is not None:
        statement += f", among layers whose attention matrices have rank at most {_ranks(found.ranks)}"
        if found.out_ranks is not None:
            statement += f" and whose projections have rank at most {_ranks(found.out_ranks)}"
    numbers = {"parameters": float(found.unknowns), "sequences": float(found.sequences)}
    if found.unknowns <= DENSE and found.ranks is None:
        more, holds, reason = _dense(found)
    elif open_(named):
        more, holds, reason = {}, Verdict.NO, "free directions of known cause"
    else:
        more, holds, reason = _by_products(spectrum())
        assumption += "; the bound rests on a random start of Lanczos' method"
    if named:
        reason = "; ".join(named) if holds == Verdict.NO else reason + "; " + "; ".join(named)
    return Claim(NAME, statement, assumption, holds, reason, {**numbers, **more})


def _ranks(ranks: tuple[int, ...]) -> str:
    return str(ranks[0]) if len(set(ranks)) == 1 else f"{', '.join(map(str, ranks))}, head by head"


def _dense(found: Sample) -> tuple[dict[str, float], Verdict, str]:
    N, _ = found.normal
    scale = N.diagonal().clamp_min(1e-300).rsqrt()
    empty = int((N.diagonal() <= 1e-24 * N.diagonal().max()).sum())
    values, vectors = torch.linalg.eigh(N * scale[:, None] * scale[None, :])
    off = rounding.dense(found, scale, float(values[-1]))
    s = values.clamp_min(0).sqrt() / values[-1].sqrt()
    free = max(int((s <= FREE).sum()), empty)
    numbers = {"least_singular_value": float(s[0]), "free_directions": float(free), "rounding": off}
    if free:
        return numbers, Verdict.NO, f"{free} free directions; the weakest lies in {_where(found, vectors[:, 0])}"
    told = f"the least singular value of the scaled Jacobian is {float(s[0]):.1e} of the largest"
    if float(values[0]) <= off:
        alone = math.sqrt(off / float(values[-1]))
        return numbers, Verdict.UNDECIDED, f"{told}, and rounding alone could make {alone:.1e}"
    return numbers, Verdict.YES if float(s[0]) >= CLEAR else Verdict.UNDECIDED, told


def _where(found: Sample, v: Tensor) -> str:
    """Which parameters a direction moves most: its weight by head and kind."""
    m = found.layer.heads
    theta = v[: found.theta_unknowns].view(m, -1).norm(dim=1)
    W = v[found.theta_unknowns : found.theta_unknowns + found.layer.W.numel()].view(m, -1).norm(dim=1)
    i, j = int(theta.argmax()), int(W.argmax())
    return f"the attention matrix of head {i + 1}" if theta[i] >= W[j] else f"the projection of head {j + 1}"


def _by_products(spectrum: Spectrum) -> tuple[dict[str, float], Verdict, str]:
    """Full rank, because the least eigenvalue is above 0."""
    values, operator, size = spectrum.values, spectrum.operator, spectrum.size
    least, epsilon, off = spectrum.least, spectrum.epsilon, spectrum.off
    used, theta, largest, features = len(values), float(values[0]), float(values[-1]), operator.features
    numbers = {"least_ritz_value": theta, "largest_ritz_value": largest, "lower_bound": least - off,
               "lanczos_error": epsilon, "rounding": off, "dimension": float(size), "products": float(used),
               "features_least": float(features[0] / features[-1])}
    if float(features[0]) <= FREE**2 * float(features[-1]):
        return numbers, Verdict.NO, "the features of the heads depend on each other"
    if theta <= FREE**2 * largest:
        head = int(spectrum.vector.flatten(1).norm(dim=1).argmax())
        return numbers, Verdict.NO, f"a direction in the attention matrix of head {head + 1} leaves no trace"
    if least > off:
        return numbers, Verdict.YES, (
            f"the least eigenvalue of the scaled normal matrix is at least {least - off:.1e}, with the largest "
            f"at {largest:.1e} ({used} Lanczos steps in {size} dimensions, error {epsilon:.1e}, rounding "
            f"{off:.1e})")
    between = f"after {used} products the least eigenvalue is known to be at most {theta + off:.1e}"
    if theta <= off:
        return numbers, Verdict.UNDECIDED, f"{between}, and the products are rounded by up to {off:.1e}"
    # ε·λ_max/(1 − ε) = θ − rounding, were the Ritz values to stay; ε falls with the square of 2·steps − 1.
    need = math.ceil(0.5 + (used - 0.5) * math.sqrt(epsilon * (1.0 + largest / (theta - off))))
    return numbers, Verdict.UNDECIDED, f"{between}, not that it is above 0; about steps={need} could decide"
