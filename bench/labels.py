"""Labels for tokens X (n, k, d): functions that are no layer, and what can go wrong with the labels of one.

A function that is no layer is drawn with its weights and returned as a map X → Y (n, k, d), so that it can label
tokens nobody has learned from. What goes wrong with labels is drawn from a generator that is passed in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import headway as hw

Rule = Callable[[Tensor], Tensor]


def normal(draw: torch.Generator, *size: int) -> Tensor:
    return torch.randn(*size, generator=draw, dtype=torch.float64)


def deviation(Y: Tensor) -> float:
    """Root mean square of Y − mean, over all rows and columns."""
    return float((Y - Y.mean((0, 1))).square().mean().sqrt())


# -- functions that are no layer --------------------------------------------------------------------------------


def rotary(layer: hw.AttentionLayer) -> Rule:
    """Scores (R_a Θᵀx_a)·(R_b x_b) with R_a the rotation of position a, as in rotary attention."""

    def turned(Z: Tensor) -> Tensor:
        k, d = Z.shape[-2:]
        angle = torch.arange(k, dtype=Z.dtype).unsqueeze(1) * 1e4 ** (-torch.arange(0, d, 2, dtype=Z.dtype) / d)
        a, b = Z[..., 0::2], Z[..., 1::2]
        cos, sin = angle.cos(), angle.sin()
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)

    return _mixed(layer, lambda Q, X: torch.softmax(turned(Q) @ turned(X).mT, dim=-1))


def relu(layer: hw.AttentionLayer) -> Rule:
    """Patterns max(S, 0)/k in place of softmax(S)."""
    return _mixed(layer, lambda Q, X: (Q @ X.mT).relu() / X.shape[-2])


def normed(layer: hw.AttentionLayer, scale: float = 8.0) -> Rule:
    """Queries and keys divided by their norms: scores are cosines times ``scale``."""

    unit = torch.nn.functional.normalize
    return _mixed(layer, lambda Q, X: torch.softmax(scale * unit(Q, dim=-1) @ unit(X, dim=-1).mT, dim=-1))


def _mixed(layer: hw.AttentionLayer, pattern: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """Σ_i pattern(XΘ_i, X) X W_i."""

    def labels(X: Tensor) -> Tensor:
        return torch.stack([pattern(X @ Theta, X) @ X @ W
                            for Theta, W in zip(layer.Theta, layer.W, strict=True)]).sum(0)

    return labels


def mlp(width: int, draw: torch.Generator) -> Rule:
    """tanh(xA)B for each token on its own, 4·width units inside."""
    A, B = normal(draw, width, 4 * width) / width**0.5, normal(draw, 4 * width, width) / (4 * width) ** 0.5
    return lambda X: torch.tanh(X @ A) @ B


def linear(width: int, draw: torch.Generator) -> Rule:
    """xM for each token on its own: for Gaussian tokens no softmax does that exactly."""
    M = normal(draw, width, width) / width**0.5
    return lambda X: X @ M


# -- labels of a layer that are wrong ---------------------------------------------------------------------------


def noisy(Y: Tensor, level: float, draw: torch.Generator) -> Tensor:
    """Gaussian noise, ``level`` times the labels' deviation."""
    return Y + level * deviation(Y) * normal(draw, *Y.shape)


def growing(Y: Tensor, X: Tensor, level: float, draw: torch.Generator) -> Tensor:
    """Noise in proportion to ‖x_a‖², ``level`` times the labels' deviation in the root mean square."""
    size = X.square().sum(2, keepdim=True)
    return Y + level * deviation(Y) * size / size.square().mean().sqrt() * normal(draw, *Y.shape)


def chosen(n: int, share: float, draw: torch.Generator) -> Tensor:
    """Which of n are spoilt: a share of them, at least one, in order."""
    return torch.randperm(n, generator=draw)[: max(1, round(share * n))].sort().values


def blocks_too_large(Y: Tensor, share: float, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """In a share of the sequences a run of rows replaced by random ones, 10 to 100 times as large."""
    n, k, e = Y.shape
    at, size, wrong = chosen(n, share, draw), deviation(Y), Y.clone()
    for j in at.tolist():
        rows = int(torch.randint(1, k + 1, (), generator=draw))
        first = int(torch.randint(0, k - rows + 1, (), generator=draw))
        times = 10 ** float(1 + torch.rand((), generator=draw))
        wrong[j, first : first + rows] = times * size * normal(draw, rows, e)
    return wrong, at


def scaled_up(Y: Tensor, share: float, draw: torch.Generator, times: float = 100.0) -> tuple[Tensor, Tensor]:
    """A share of the sequences with labels ``times`` too large."""
    at, wrong = chosen(len(Y), share, draw), Y.clone()
    wrong[at] *= times
    return wrong, at


WRONGNESS = ("too large", "of another sequence", "noise")


def mixed_up(Y: Tensor, share: float, draw: torch.Generator) -> tuple[Tensor, dict[int, str]]:
    """In a share of the sequences labels 100 times too large, or those of another sequence, or noise of the labels'
    own size: which of the three is drawn for each."""
    wrong, size = Y.clone(), deviation(Y)
    why: dict[int, str] = {}
    for j in chosen(len(Y), share, draw).tolist():
        why[j] = WRONGNESS[int(torch.randint(0, 3, (), generator=draw))]
        if why[j] == "too large":
            wrong[j] *= 100
        elif why[j] == "noise":
            wrong[j] = size * normal(draw, *Y.shape[1:])
        else:
            other = int(torch.randint(1, len(Y), (), generator=draw))
            wrong[j] = Y[(j + other) % len(Y)]
    return wrong, why


def rows_shuffled(Y: Tensor, share: float, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """A share of all rows with their labels shuffled among them; the sequences that have such rows."""
    flat = Y.flatten(0, 1).clone()
    at = chosen(len(flat), share, draw)
    flat[at] = flat[at[torch.randperm(len(at), generator=draw)]]
    wrong = flat.view_as(Y)
    return wrong, (wrong != Y).flatten(1).any(1).nonzero().flatten()
