"""Which part of every head do these inputs determine, and how well?

Let r be what the layer leaves of the labels and v a direction of Θ_i, v = a ⊗ b of queries × keys. To first order
the layer with exact labels differs along v by ⟨v, J⁺r⟩, so by at most

    ε_v = ‖r‖·√(vᵀS⁻¹v),      S = J_1ᵀ(I − Π)J_1,

rounding counted with ‖r‖; relative to ‖Θ_i‖. To leading order S is S_i ⊗ M_i in head i, S_i the second moment of
queries where the head can be moved and M_i = Σ_rows C W_iW_iᵀ C that of keys: along its eigenvectors vᵀS⁻¹v is
about 1/(s_a m_b). For W_i, with the rows h = P_iX, it is the block of (HᵀH)⁻¹, exact were Θ known. What other heads
and W can undo makes vᵀS⁻¹v larger; by how much is measured. The steps for random labels have the covariance (JᵀJ)⁻¹
in all directions at once, so their squares along the directions of a decade of ε, over the leading order, have the
factor as their mean: hundreds of directions of a head, with the steps that error bars need anyhow.

Where the least eigenvalue is told from zero these are the steps of the error bars. Elsewhere, as on text, they are
solved for in white coordinates y, δ = R_i y K_iᵀ with RᵀSR = I and KᵀMK = I on directions that S_i and M_i have;
there what is determined is short work for conjugate gradients, and what is not shows: a random ω is compared with
what labels show of it. A decade of which more than FLAT is left counts as not determined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.certificates.accurate import Answers
from headway.certificates.bars import Tried, random_labels
from headway.certificates.jacobian import Sample
from headway.certificates.newton import Newton
from headway.certificates.thin import ThinScaled
from headway.core.results import Claim, Verdict
from headway.linalg.krylov import conjugate_gradients
from headway.linalg.projected import Products

NAME = "what is determined"
LEVELS = (1e-12, 1e-9, 1e-6, 1e-3)  # of ε, in the table
EMPTY = 1e-9  # eigenvalue of S_i or M_i, relative to their mean, below which a direction is not there
FLAT = 0.02
LOOKS = 3  # random labels, and random changes, where nothing is known of the least eigenvalue
SOLVED, PRODUCTS = 1e-4, 300  # of their solves: relative residual, and when to stop
LEAST = 1e-300


@dataclass(frozen=True)
class Known:
    """Of one matrix of one head: the directions' bases, ε for each of them, relative to the matrix."""

    left: Tensor  # columns: directions of queries, or of what W_i reads
    right: Tensor | None  # of keys; None for W_i, whose outputs are all alike
    epsilon: Tensor  # (left, right), or (left,)

    def share(self, level: float) -> float:
        """Part of the directions known to ``level``."""
        return float((self.epsilon <= level).double().mean())


class Directions:
    """Eigenvectors of S_i and of M_i, what a change along them shows to leading order, and which are not there."""

    def __init__(self, S: Tensor, M: Tensor) -> None:
        (self.s, self.left), (self.t, self.right) = (torch.linalg.eigh(D) for D in (S, M))
        self.lives = [values > EMPTY * values.mean(1, keepdim=True).clamp_min(LEAST) for values in (self.s, self.t)]
        self.live = self.lives[0].unsqueeze(2) & self.lives[1].unsqueeze(1)
        lead = self.s.clamp_min(0.0).unsqueeze(2) * self.t.clamp_min(0.0).unsqueeze(1)
        self.variance = torch.where(self.live, 1 / lead.clamp_min(LEAST), math.inf)

    def seen(self, change: Tensor) -> Tensor:
        """y of a change of Θ; 0 where there is none."""
        y: Tensor = torch.where(self.live, self.left.mT @ change @ self.right / self.variance.sqrt(), 0.0)
        return y


class White(Directions):
    """N = J_1ᵀ(I − Π)J_1 in the coordinates y, a row and a column for each eigenvector of S_i and of M_i."""

    def __init__(self, products: Products, generator: torch.Generator) -> None:
        super().__init__(*products.moments(generator))
        self.products = products
        sides = zip((self.left, self.right), (self.s, self.t), self.lives, strict=True)
        self.roots = [vectors * torch.where(live, values.clamp_min(LEAST).rsqrt(), 0.0).unsqueeze(1)
                      for vectors, values, live in sides]

    def out(self, y: Tensor) -> Tensor:
        change: Tensor = self.roots[0] @ y @ self.roots[1].mT
        return change

    def into(self, G: Tensor) -> Tensor:
        """Adjoint of ``out``."""
        y: Tensor = self.roots[0].mT @ G @ self.roots[1]
        return y

    def __call__(self, y: Tensor) -> Tensor:
        return self.into(self.products.curvature(self.out(y)))

    def solved(self, labels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(y, B) of least squares."""
        g = self.into(self.products.back(labels, self.products.following(labels)))
        y = conjugate_gradients(self, lambda x: x, g, SOLVED, PRODUCTS)[0]
        images = self.products.images(self.out(y))[0]
        return y, self.products.following([a - b for a, b in zip(labels, images, strict=True)])

    def unseen(self, generator: torch.Generator) -> Tensor:
        """What labels do not show of a random y, squared."""
        w = torch.randn(self.live.shape, generator=generator, dtype=torch.float64).to(self.s) * self.live
        rest: Tensor = w - conjugate_gradients(self, lambda x: x, self(w), SOLVED, PRODUCTS)[0]
        return rest.square()


@dataclass(frozen=True)
class Looked:
    """Over the leading order, along every direction: what random labels make of Θ, squared; what is not seen of a
    random change, squared, and what such a change is; and the labels' d[W; c]."""

    factor: Tensor
    open_: Tensor
    change: Tensor
    B: list[Tensor]


def _free(found: Sample, tried: Tried, products: Products, generator: torch.Generator) -> tuple[Directions, Looked]:
    white = White(products, generator)
    open_, ones = torch.zeros_like(white.variance), torch.ones_like(white.variance)
    if tried.sure:
        steps = [(white.seen(probe.Theta), probe.B) for probe in tried.probes]
    else:
        steps = [white.solved(random_labels(found, tried.step.left, generator)) for _ in range(LOOKS)]
        open_ = torch.stack([white.unseen(generator) for _ in range(LOOKS)]).mean(0)
    factor = torch.stack([y for y, _ in steps]).square().mean(0)
    return white, Looked(factor, open_, ones, [B for _, B in steps])


def _thin(
    found: Sample, newton: Newton, tried: Tried, operator: ThinScaled, generator: torch.Generator
) -> tuple[Directions, Looked]:
    """Of heads in thin factors, in the coordinates of thin.py; a random change is one of these."""
    white = Directions(*operator.moments[:2])
    open_, change = torch.zeros_like(white.variance), torch.ones_like(white.variance)
    steps = tried.probes
    if not tried.sure:
        steps = tuple(newton.step(random_labels(found, tried.step.left, generator), SOLVED, PRODUCTS)
                      for _ in range(LOOKS))
        looks = []
        for _ in range(LOOKS):
            v = operator.start(generator)
            rest = v - conjugate_gradients(operator, lambda x: x, operator(v), SOLVED, PRODUCTS)[0]
            looks.append([white.seen(operator.theta(operator.scaled(x))).square() for x in (rest, v)])
        open_, change = (torch.stack(part).mean(0) for part in zip(*looks, strict=True))
    factor = torch.stack([white.seen(step.Theta) for step in steps]).square().mean(0)
    return white, Looked(factor, open_, change, [step.B for step in steps])


def known(found: Sample, newton: Newton, tried: Tried, generator: torch.Generator) -> list[tuple[Known, Known]]:
    """Θ_i and W_i of every head."""
    layer, operator = found.layer, newton.spectrum.operator
    answers = Answers.of(found)
    size = answers.size + answers.off
    m, d = layer.heads, layer.width
    if isinstance(operator, ThinScaled):
        white, looked = _thin(found, newton, tried, operator, generator)
        e, ways = torch.linalg.eigh(operator.moments[2])
        least = EMPTY * e.mean(1, keepdim=True).clamp_min(LEAST)
        e = torch.where(e > least, 1 / e.clamp_min(LEAST), math.inf)
    else:
        white, looked = _free(found, tried, operator.products, generator)
        inverse, far = _inverse(operator.gram)
        blocks = [inverse[i * d : (i + 1) * d, i * d : (i + 1) * d] for i in range(m)]
        e, ways = torch.linalg.eigh(torch.stack(blocks))
        e = torch.where(e < far, e.clamp_min(LEAST), math.inf)
    heads = []
    for i in range(m):
        theta = _measured(white.variance[i], looked.factor[i], looked.open_[i], looked.change[i]).sqrt() * size
        shown = torch.stack([(ways[i].mT @ B[i * d : (i + 1) * d]).square().mean(1) for B in looked.B]).mean(0)
        of_w = _measured(e[i], shown / e[i], torch.zeros_like(e[i]), torch.ones_like(e[i])).sqrt() * size
        heads.append((Known(white.left[i], white.right[i], theta / layer.augmented[i].norm().clamp_min(LEAST)),
                      Known(ways[i], None, of_w / layer.W[i].norm().clamp_min(LEAST))))
    return heads


def _measured(variance: Tensor, factor: Tensor, open_: Tensor, change: Tensor) -> Tensor:
    """The variance, in every decade times the mean factor that was seen there; infinite where too much of a change
    is open."""
    there = variance.isfinite()
    decade = torch.floor(torch.where(there, variance, 1.0).log10() / 2).long().flatten()
    at = torch.unique(decade, return_inverse=True)[1]

    def even(values: Tensor) -> Tensor:
        total = torch.zeros(2, int(at.max()) + 1, dtype=values.dtype, device=values.device)
        total.index_add_(1, at, torch.stack([(values * there).flatten(), there.to(values).flatten()]))
        mean: Tensor = (total[0] / total[1].clamp_min(1.0))[at].view_as(values)
        return mean

    return torch.where(even(open_) > FLAT * even(change), math.inf, variance * even(factor).clamp_min(1.0))


def _inverse(G: Tensor) -> tuple[Tensor, float]:
    """G⁻¹, of G lifted by its rounding, and what in it only the lift keeps finite."""
    lift = 1e-14 * len(G)
    scale = G.diagonal().clamp_min(LEAST).rsqrt()
    eye = torch.eye(len(G), dtype=G.dtype, device=G.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(G * scale[:, None] * scale[None, :] + lift * eye))
    return inverse * scale[:, None] * scale[None, :], 1e-3 / lift * float(scale.square().mean())


def determined(
    found: Sample, newton: Newton, tried: Tried, tolerance: float, generator: torch.Generator
) -> Claim:
    """The claim that all of it is known to ``tolerance``, and how much is to other levels."""
    heads = known(found, newton, tried, generator)
    numbers: dict[str, float] = {}
    words = []
    for i, pair in enumerate(heads):
        for name, one in zip(("theta", "w"), pair, strict=True):
            numbers[f"{name}_{i + 1}_known"] = one.share(tolerance)
            numbers |= {f"{name}_{i + 1}_to_{level:.0e}": one.share(level) for level in LEVELS}
        theta, w = (_percent(one.share(tolerance)) for one in pair)
        words.append(f"head {i + 1}: Θ {theta}, W {w}")
    whole = all(one.share(tolerance) == 1.0 for pair in heads for one in pair)
    low = "attention matrices" + ("" if found.out_ranks is None else " and projections")
    among = "" if found.ranks is None else f", among layers whose {low} have the ranks of these"
    worst = max(float(one.epsilon.max()) for pair in heads for one in pair)
    numbers["worst"] = min(worst, 1e300)
    reason = (f"the least known direction is known to {worst:.1e}" if whole else
              "the others are not determined by these inputs to that accuracy")
    return Claim(NAME, f"Every direction of every head is known to {tolerance:.0e} of the head{among}; known are, "
                 + ", ".join(words), "the labels are exact, and a layer of this shape near this one made them; to "
                 "first order", Verdict.YES if whole else Verdict.NO, reason, numbers)


def _percent(share: float) -> str:
    return "all" if share == 1.0 else f"{math.floor(1000 * share) / 10:g} %"
