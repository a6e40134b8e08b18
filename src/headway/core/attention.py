"""F(X) = Σ_i softmax(XΘ_iXᵀ + 1(Xu_i)ᵀ + mask) X W_i + 1cᵀ, its Jacobian and its adjoint.

Attention as every learner and every certificate computes it; two modules have patterns in another layout:
linalg.thin, whose heads stay thin factors, and training.select, with one query. Everything is batched
over n sequences of k tokens, and the heads ride on the query axis: patterns are held as P[n, a, i, b]
(sequence, query, head, key), so that every product is either one large matrix product or one batched
product per sequence, without transposes.

The key bias is the last row of an augmented attention matrix: a constant 1 appended to each query x_a
makes x̃_aᵀ[Θ; uᵀ]x_b = x_aᵀΘx_b + u·x_b. ``Theta`` below has d or d + 1 rows; both work everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor


def augment(Theta: Tensor, key_bias: Tensor | None) -> Tensor:
    """[Θ_i; u_iᵀ]: (m, d, d) and (m, d) to (m, d + 1, d); Θ itself when there is no key bias."""
    return Theta if key_bias is None else torch.cat([Theta, key_bias.unsqueeze(1)], dim=1)


def split(Theta: Tensor) -> tuple[Tensor, Tensor | None]:
    """Inverse of ``augment``, told apart by the number of rows."""
    d = Theta.shape[2]
    return (Theta, None) if Theta.shape[1] == d else (Theta[:, :d], Theta[:, d])


def queries(X: Tensor, Theta: Tensor) -> Tensor:
    """X, or [X | 1] when ``Theta`` carries a key bias as its last row."""
    if Theta.shape[1] == X.shape[2]:
        return X
    return torch.cat([X, X.new_ones(*X.shape[:2], 1)], dim=2)


def allowed(X: Tensor, mask: str, padding: Tensor | None) -> Tensor | None:
    """Which key b may be seen from query a: bool (1 or n, k, k), or None when all may.

    ``padding`` is True where a token is filling. A filled query keeps itself in sight, so that its
    pattern stays finite; its output row means nothing and is ignored by every caller.
    """
    if mask == "none" and padding is None:
        return None
    k = X.shape[1]
    see = torch.ones(1, k, k, dtype=torch.bool, device=X.device)
    if mask == "causal":
        see = see.tril()
    return see if padding is None else unfilled(see, padding)


def unfilled(see: Tensor, padding: Tensor) -> Tensor:
    """``see`` (1 or n, k, k) without filled keys; a filled query sees itself."""
    itself = torch.eye(see.shape[1], dtype=torch.bool, device=see.device)
    return (see & ~padding.unsqueeze(1)) | (itself & padding.unsqueeze(2))


def patterns(X: Tensor, Theta: Tensor, see: Tensor | None = None) -> Tensor:
    """P[n, a, i, b] = softmax over b of x̃_aᵀΘ_i x_b, for Θ of shape (m, d or d + 1, d)."""
    return softmax(scores(X, Theta), see)


def softmax(S: Tensor, see: Tensor | None) -> Tensor:
    """Patterns from scores S[n, a, i, b]; keys out of sight get none."""
    if see is not None:
        S = S.masked_fill(~see.unsqueeze(2), float("-inf"))
    return torch.softmax(S, dim=3)


def linear_weight(X: Tensor, see: Tensor | None, mean: bool) -> Tensor | None:
    """What multiplies linear scores: 1 for a key in sight and 0 for others, divided by their number if ``mean``;
    (1 or n, k, k), None where it is 1 everywhere."""
    if mean:
        return uniform(X, see)[:, :, 0]
    return None if see is None else see.to(X.dtype)


def linear_patterns(X: Tensor, Theta: Tensor, weight: Tensor | None) -> Tensor:
    """Scores x_aᵀΘ_i x_b as they are, weighted: what stands where softmax attention has its patterns."""
    return weighted(scores(X, Theta), weight)


def weighted(S: Tensor, weight: Tensor | None) -> Tensor:
    return S if weight is None else S * weight.unsqueeze(2)


def uniform(X: Tensor, see: Tensor | None = None) -> Tensor:
    """The pattern of Θ = 0: equal weight on every key in sight, (n, k, 1, k)."""
    n, k, _ = X.shape
    if see is None:
        return X.new_full((1, 1, 1, 1), 1.0 / k).expand(n, k, 1, k)
    weight = see.to(X.dtype)
    return (weight / weight.sum(2, keepdim=True)).unsqueeze(2).expand(n, k, 1, k)


def attend(P: Tensor, X: Tensor) -> Tensor:
    """H[n, a, i] = Σ_b P[n, a, i, b] x_b: what each head hands to its projection, (n, k, m, d)."""
    n, k, m, _ = P.shape
    return torch.bmm(P.reshape(n, k * m, k), X).view(n, k, m, X.shape[2])


def project(H: Tensor, W: Tensor, offset: Tensor | None = None) -> Tensor:
    """Σ_i W_iᵀ h_i (+ c): (n, k, m, d) and (m, d, e) to (n, k, e)."""
    n, k, m, d = H.shape
    e = W.shape[2]
    Y = (H.reshape(n * k, m * d) @ W.reshape(m * d, e)).view(n, k, e)
    return Y if offset is None else Y + offset


def forward(X: Tensor, Theta: Tensor, W: Tensor, offset: Tensor | None, see: Tensor | None) -> Tensor:
    return project(attend(patterns(X, Theta, see), X), W, offset)


def tangent(P: Tensor, X: Tensor, dTheta: Tensor) -> Tensor:
    """dH for a change dΘ: dS = X̃ dΘ Xᵀ; dP = P∘(dS − Σ_b P∘dS); dH = dP X. Shape (n, k, m, d).

    P may have one head and dΘ several: then dΘ_j are m probes of the same pattern.
    """
    return attend(softmax_rule(P, scores(X, dTheta)), X)


def cotangent(P: Tensor, X: Tensor, gH: Tensor, rows: int) -> Tensor:
    """Adjoint of ``tangent``: gS = P∘(gH Xᵀ − Σ_b P∘gH Xᵀ); gΘ_i = Σ X̃ᵀ gS_i X. Shape (m, rows, d)."""
    n, k, m, d = gH.shape
    T = key_side(P, X, gH).reshape(n * k, m * d)
    flat = X.reshape(n * k, d)
    G = (flat.T @ T).view(d, m, d).transpose(0, 1)
    if rows == d:
        return G
    return torch.cat([G, T.sum(0).view(m, 1, d)], dim=1)


def key_side(P: Tensor, X: Tensor, gH: Tensor) -> Tensor:
    """C_i,a gH[n, a, i] with C_i,a = Σ_b p_b (x_b − h)(x_b − h)ᵀ, without forming C: (n, k, m, d)."""
    return attend(score_side(P, X, gH), X)


def score_side(P: Tensor, X: Tensor, gH: Tensor) -> Tensor:
    """gS = P∘(gH Xᵀ − Σ_b P∘gH Xᵀ): what a change of the scores is worth, (n, k, m, k)."""
    n, k, m, d = gH.shape
    return softmax_rule(P, torch.bmm(gH.reshape(n, k * m, d), X.transpose(1, 2)).view(n, k, m, k))


def apart(X: Tensor, A: Tensor) -> Tensor:
    """XA_i for every head, heads before tokens: (n, k, d) and (m, d, q) to (n, m, k, q)."""
    n, k, d = X.shape
    m, _, q = A.shape
    return (X.reshape(n * k, d) @ A.transpose(0, 1).reshape(d, m * q)).view(n, k, m, q).transpose(1, 2)


def together(X: Tensor, G: Tensor) -> Tensor:
    """Adjoint of ``apart`` in A: Σ Xᵀ G_i, (n·k, d) and (n, m, k, q) to (m, d, q)."""
    n, m, k, q = G.shape
    return (X.T @ G.transpose(1, 2).reshape(n * k, m * q)).view(-1, m, q).transpose(0, 1)


def spread(U: Tensor, W: Tensor) -> Tensor:
    """Adjoint of ``project``: gH[n, a, i] = W_i U[n, a], (n, k, e) to (n, k, m, d)."""
    n, k, e = U.shape
    m, d, _ = W.shape
    return (U.reshape(n * k, e) @ W.reshape(m * d, e).T).view(n, k, m, d)


def jvp(
    X: Tensor, P: Tensor, W: Tensor, dTheta: Tensor, dW: Tensor, dc: Tensor | None = None
) -> Tensor:
    """dF = Σ_i (dP_i X) W_i + (P_iX) dW_i + 1dcᵀ."""
    return project(tangent(P, X, dTheta), W) + project(attend(P, X), dW, dc)


def vjp(X: Tensor, P: Tensor, W: Tensor, U: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Adjoint of ``jvp``: (gΘ, gW, gc) with ⟨U, jvp(dΘ, dW, dc)⟩ = ⟨gΘ, dΘ⟩ + ⟨gW, dW⟩ + ⟨gc, dc⟩."""
    n, k, m, _ = P.shape
    d, e = W.shape[1:]
    flat = U.reshape(n * k, e)
    gW = (attend(P, X).view(n * k, m * d).T @ flat).view(m, d, e)
    return cotangent(P, X, spread(U, W), rows), gW, flat.sum(0)


def scores(X: Tensor, Theta: Tensor) -> Tensor:
    """S[n, a, i, b] = x̃_aᵀΘ_i x_b."""
    n, k, d = X.shape
    m, r, _ = Theta.shape
    Q = queries(X, Theta).reshape(n * k, r) @ Theta.transpose(0, 1).reshape(r, m * d)
    return torch.bmm(Q.view(n, k * m, d), X.transpose(1, 2)).view(n, k, m, k)


def softmax_rule(P: Tensor, S: Tensor) -> Tensor:
    """P∘(S − Σ_b P∘S): the softmax's Jacobian, which is its own adjoint."""
    return P * (S - (P * S).sum(3, keepdim=True))
