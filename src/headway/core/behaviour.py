"""What a head does, told from its patterns: where it looks, and how much more often than by chance."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from headway.core import checks
from headway.core.forms import Sight

CLEAR = 0.4  # of the way from chance to always: attention that has a target
EVEN = 0.7  # of the other keys in sight: attention that is broad
PLACES = 0.5  # of the variation: attention that places tell
FEWEST = 4  # rows on which a share is taken
AS_WELL = 0.6  # of what an aim has above chance: places alone tell as much
AIMED = {"previous token": "the token before", "first token": "the first token",
         "same token": "{copy} of the token", "induction": "the token after {copy}"}
KINDS = (*AIMED, "position", "broad", "mixed")
ROUNDING = 1e-3  # of a pattern's sum, in half precision


@dataclass(frozen=True)
class Behaviour:
    """What a head does: its kind, the share that this rests on, and what chance gives."""

    kind: str  # one of KINDS
    share: float  # of its attention, or of the variation of its patterns (position), or of the keys (broad)
    chance: float
    sentence: str
    scores: Mapping[str, float]  # of every kind that these sequences can tell: 0 by chance, 1 always

    @property
    def label(self) -> str:
        """The kind with its number, for a table."""
        return f"{self.kind}, {_percent(self.share)}{' at best' if self.kind == 'mixed' else ''}"

    def __str__(self) -> str:
        return self.sentence


def behaviours(
    patterns: Any, tokens: Tensor | Sequence[Sequence[Hashable]] | None = None, padding: Tensor | None = None, *,
    key_padding: Tensor | None = None, sight: Sight | None = None, cross: bool = False,
) -> tuple[Behaviour, ...]:
    """What does each head do, given its patterns P(s, a, b) on sequences s of tokens t(s, a)?

    A kind that aims has targets T(s, a) among the keys in sight V(s, a) of a query a: *previous token* {a − 1};
    *first token* the first of the sequence; *same token* {b ≠ a : t_b = t_a}; *induction* {b ≠ a : t_{b−1} = t_a,
    b − 1 ≠ a}. Over the rows R that have such a target and tell it from the kinds before (a first token that is the
    previous one does not count, nor a copy that is first or previous)

        share = mean over R of Σ_{b∈T} P(b),   chance = mean over R of #T/#V,
        score = (share − chance)/(1 − chance).

    With N_a = exp(entropy of P(a, ·)), the number of keys that a query looks at,

        broad:     share = Σ N_a/Σ #V_a,   score = Σ (N_a − 1)/Σ (#V_a − 1),
        position:  share = score = Σ_{s≠s'} D_s·D_{s'}/(n − 1) over Σ_s D_s·D_s,   D = P − 1/#V:

    how much of a pattern the patterns of the other sequences tell, which have the same places and other tokens.
    The kind is the aim of the largest score if that reaches ``CLEAR``; else broad if that score reaches ``EVEN``;
    else position if it reaches ``PLACES``; else mixed. Kinds with fewer than ``FEWEST`` rows are not asked for.

    patterns (n, m, k, l), as ``layer.patterns(X)`` gives them; rows are scaled to add up to 1, so what goes to a
    sink does not count. tokens (n, k): numbers or strings; without them copies are not asked for. padding (n, k),
    key_padding (n, l): True where a token is filling. sight: which keys can be seen; without it, those up to the
    query if no pattern looks ahead, else all. cross: keys are of another sequence (it shows where l ≠ k), where
    only first token, broad and position make sense. Cost: a few passes over the patterns; 30 sequences will do.

    >>> P = torch.eye(6, dtype=torch.float64).roll(-1, 1).tril() + torch.eye(6)[:1].T @ torch.eye(6)[:1]
    >>> print(behaviours(P.expand(3, 1, 6, 6))[0])
    Previous token: 100 % of its attention goes to the token before, 29 % by chance.
    """
    P = checks.floating("patterns", patterns).to(torch.float64)
    checks.shape("patterns", P, ("n", "m", "k", "l"), "layer.patterns(X) of sequences (n, k, d)")
    if not P.numel() or float(P.min()) < 0.0 or float(P.sum(3).max()) > 1.0 + ROUNDING:
        checks.refuse("patterns", "rows of weights that add up to at most 1",
                      "no rows, negative weights or larger sums", "layer.patterns(X)")
    n, _, k, keys = P.shape
    cross = checks.flag("cross", cross) or k != keys or key_padding is not None
    if cross and tokens is not None:
        checks.refuse("tokens", "none where keys are of another sequence: there are no copies", "some",
                      "tokens=None")
    filled = _filling("padding", padding, (n, k), P)
    unseen = _filling("key_padding", key_padding, (n, keys), P) if cross else filled
    see = _sight(P, filled, unseen, sight, cross)
    P = P * see.unsqueeze(1)
    P = P / P.sum(3, keepdim=True).clamp_min(1e-300)
    aims = _aims(see, None if tokens is None else _numbers(tokens, n, k).to(P.device), cross)
    copy = "an earlier copy" if not bool(see.any(0).triu(1).any()) else "another copy"
    told = {kind: _aimed(P, see, targets) for kind, targets in aims.items()}
    even, places = _evenness(P, see), _places(P, see)
    found = []
    for i in range(P.shape[1]):
        aimed = [Aimed(kind, AIMED[kind].format(copy=copy), *(float(column[i]) for column in columns))
                 for kind, columns in told.items() if columns is not None]
        found.append(_named(aimed, even[i], None if places is None else places[i]))
    return tuple(found)


@dataclass(frozen=True)
class Aimed:
    """How much of a head's attention goes to one kind of target, by chance and by places alone too."""

    kind: str
    words: str
    share: float
    chance: float
    by_places: float

    @property
    def score(self) -> float:
        return (self.share - self.chance) / (1.0 - self.chance)

    def __str__(self) -> str:
        return f"{_percent(self.share)} of its attention goes to {self.words}, {_percent(self.chance)} by chance."


def _named(aimed: Sequence[Aimed], even: tuple[float, float], places: float | None) -> Behaviour:
    """The kind whose score is large enough, in words."""
    scores = {**{one.kind: one.score for one in aimed}, **({} if places is None else {"position": places}),
              "broad": even[1]}
    kept = MappingProxyType(scores)
    best = max(aimed, key=lambda one: one.score, default=None)
    if best is not None and best.score >= CLEAR:
        words = f"{best.kind.capitalize()}: {best}"
        if "copy" in best.words and best.by_places - best.chance > AS_WELL * (best.share - best.chance):
            words += " Copies stand at the same places in all these sequences, so places alone would tell it too."
        return Behaviour(best.kind, best.share, best.chance, words, kept)
    if even[1] >= EVEN:
        return Behaviour("broad", even[0], 1.0, f"Broad: it looks at {_percent(even[0])} of the keys in sight, "
                         "as if evenly.", kept)
    if places is not None and places >= PLACES:
        return Behaviour("position", places, 0.0,
                         f"Position: places alone tell {_percent(places)} of where it looks.", kept)
    if best is None:
        return Behaviour("mixed", even[0], 1.0, f"Mixed: it looks at {_percent(even[0])} of the keys in sight, and "
                         "not by place.", kept)
    return Behaviour("mixed", best.share, best.chance, f"Mixed: nothing stands out. At best, {best}",
                     kept)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# -- which keys -------------------------------------------------------------------------------------------------


def _filling(name: str, padding: Any, shape: tuple[int, int], P: Tensor) -> Tensor:
    if padding is None:
        return torch.zeros(shape, dtype=torch.bool, device=P.device)
    filled = torch.as_tensor(padding, device=P.device)
    if filled.dtype != torch.bool:
        checks.refuse(name, "bool, True where a token is filling", filled.dtype, f"{name}.bool()")
    checks.shape(name, filled, shape, "one entry for each token of the patterns")
    return filled


def _numbers(tokens: Any, n: int, k: int) -> Tensor:
    """(n, k) whole numbers, the same for the same token."""
    rows = tokens.tolist() if hasattr(tokens, "tolist") else [list(row) for row in tokens]
    lengths = {len(row) if isinstance(row, list) else 0 for row in rows}
    if len(rows) != n or lengths != {k}:
        checks.refuse("tokens", f"{n} sequences of {k} tokens, as the patterns have",
                      f"{len(rows)} of {' or '.join(str(length) for length in sorted(lengths)) or 'none'}",
                      "the tokens that these patterns were computed on, filling included")
    known: dict[Hashable, int] = {}
    return torch.tensor([[known.setdefault(token, len(known)) for token in row] for row in rows])


def _sight(P: Tensor, filled: Tensor, unseen: Tensor, sight: Sight | None, cross: bool) -> Tensor:
    """V(s, a) as bool (n, k, l); filled queries see nothing."""
    k, keys = P.shape[2:]
    rows = ~filled.unsqueeze(2) & ~unseen.unsqueeze(1)
    if sight is None:
        ahead = torch.ones(k, keys, dtype=torch.bool, device=P.device).triu(1)
        looks = bool(((P > 0.0).any(1) & rows & ahead).any())
        sight = Sight(causal=not looks and not cross and k > 1)
    mask = sight.mask(k, keys, P.device)
    see = rows if mask is None else rows & mask
    if not bool(see.any()):
        checks.refuse("patterns", "queries with a key in sight", "none", "sequences that are not all filling")
    return see


def _aims(see: Tensor, tokens: Tensor | None, cross: bool) -> dict[str, Tensor]:
    """Targets of every kind that aims, bool (n, k, l): rows without any do not count."""
    k = see.shape[1]
    keys = see.any(1)  # those that anyone sees: the first of them is no filling
    first = torch.nn.functional.one_hot(keys.to(torch.int8).argmax(1), see.shape[2]).bool().unsqueeze(1) & see
    if cross:
        return {"first token": _telling(first, see)}
    place = torch.arange(k, device=see.device)
    before = (place.unsqueeze(1) - 1 == place) & see
    itself = torch.eye(k, dtype=torch.bool, device=see.device)
    aims = {"previous token": before, "first token": _without(first, before | itself)}
    if tokens is not None:
        alike = (tokens.unsqueeze(2) == tokens.unsqueeze(1)) & ~itself
        after = torch.zeros_like(alike)
        after[:, :, 1:] = alike[:, :, :-1] & ~itself[:, 1:] & keys[:, None, :-1]
        aims["same token"] = _without(alike & see, first | before)
        aims["induction"] = _without(after & see, first | before)
    return {kind: _telling(targets, see) for kind, targets in aims.items()}


def _telling(targets: Tensor, see: Tensor) -> Tensor:
    """No targets in rows that look at nothing else whatever they do."""
    return targets & (see & ~targets).any(2, keepdim=True)


def _without(targets: Tensor, others: Tensor) -> Tensor:
    """No targets in rows where one of them is a target of the others too."""
    return targets & ~(targets & others).any(2, keepdim=True)


# -- shares -----------------------------------------------------------------------------------------------------


def _aimed(P: Tensor, see: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Of every head: share, chance, and the share of the mean pattern of the other sequences, which knows places
    alone. None where too few rows have a target."""
    rows = targets.any(2)
    count = int(rows.sum())
    if count < FEWEST:
        return None
    aim = targets.to(P.dtype)
    share = torch.einsum("nmab,nab->m", P, aim) / count
    chance = (aim.sum(2) / see.sum(2).clamp_min(1))[rows].mean()
    others = (P.sum(0) - P) / (see.sum(0) - see.to(P.dtype)).clamp_min(1).unsqueeze(1)
    return share, chance.expand_as(share), torch.einsum("nmab,nab->m", others, aim) / count


def _evenness(P: Tensor, see: Tensor) -> list[tuple[float, float]]:
    """Of every head, the share of keys it looks at, and the same without the one that every query has."""
    seen = see.sum(2)
    rows = seen > 1
    if not bool(rows.any()):
        return [(1.0, 0.0)] * P.shape[1]
    looked = torch.special.entr(P).sum(3).exp()  # (n, m, k)
    number = (looked * rows.unsqueeze(1)).sum((0, 2))
    total, count = float(seen[rows].sum()), float(rows.sum())
    return list(zip((number / total).tolist(), ((number - count) / (total - count)).tolist(), strict=True))


def _spread(P: Tensor, see: Tensor) -> Tensor:
    """D = P − 1/|V|, without rows of a single key, in which there is nothing to choose."""
    weight = see.to(P.dtype)
    some = (see.sum(2, keepdim=True) > 1).unsqueeze(1)
    return (P - (weight / weight.sum(2, keepdim=True).clamp_min(1.0)).unsqueeze(1)) * some


def _places(P: Tensor, see: Tensor) -> list[float] | None:
    """How much of a pattern those of the other sequences tell; None where there is no other."""
    D, count = _spread(P, see), see.sum(0)
    shared = count > 1
    own = (D.square().sum(0) * shared).sum((1, 2))
    if not bool(shared.any()):
        return None
    pairs = ((D.sum(0).square() - D.square().sum(0)) / (count - 1).clamp_min(1) * shared).sum((1, 2))
    return (pairs / own.clamp_min(1e-300)).clamp(-1.0, 1.0).tolist()
