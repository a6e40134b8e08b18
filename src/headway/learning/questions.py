"""Which form has a black box? A few questions, each with a yes or a no that nothing needs to be fitted for.

    sight      another token at b changes the answer at a only if b is in sight of a
    order      another order of the keys that a query sees changes its answer only if scores know places
    offsets    near X = 0 scores of unbiased queries vanish but offsets stay: the derivatives ∂Y_a/∂x_b at 0 are
               equal for all keys in sight b ≠ a unless there are some
    constant   X with all rows x gives Wx + c whatever the patterns, an affine map, unless patterns add up to less
               than 1 (a sink), or outputs are gated; a gate does not ask how many keys there are, a sink does
    scale      far out, x_b ↦ 10x_b turns patterns over, so that Y_a bends, unless scores are normed or capped; a
               small change of direction of x_b bends Y_a if they are normed, and not where the cap holds them

The tokens are those of the law, moved, scaled and shuffled. A box that refuses such tokens, or answers with what is
no number, has not answered, and nothing is concluded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headway.core import checks
from headway.core.forms import Sight
from headway.core.sources import Answers
from headway.learning.clues import POSSIBLE, Clues, sight_of

DRAWS = 8  # sequences that are asked about
ASKED = 4096  # sequences at most that one question takes
ROUNDING = 1e4  # times the unit of the arithmetic, relative to the largest answer: less is no change
SMALL = 1e-2  # part of a token near X = 0
FAR = 1e6  # times the tokens of the law: far out
TURNED = 0.03  # part of a token by which its direction is changed
ALIKE = 1e-2  # part of a change below which it counts as none, where limits are approached and not reached
SOME = 0.1  # part of the cases from which they count as such


class Box:
    """The answers of the examples' function, counted."""

    def __init__(self, answers: Answers, asked: int = 0) -> None:
        self.answers, self.count = answers, asked
        draw = answers.inputs(DRAWS, 0, 0)
        self.X = draw.double()
        self.eps = torch.finfo(answers.dtype).eps

    def __call__(self, X: Tensor) -> Tensor | None:
        """Y for X of any scale, float64 on the CPU; None where the box does not answer."""
        fresh = self.answers.fresh
        if fresh is not None and self.count + len(X) > fresh:
            return None
        self.count += len(X)
        try:
            return self.answers.to(X).Y.double().cpu()
        except (checks.InputError, RuntimeError):
            return None

    def changed(self, one: Tensor, other: Tensor) -> Tensor:
        """Where answers differ by more than rounding: bool, without the last dimension."""
        size = one.abs().max().clamp_min(1e-300)
        return (one - other).abs().amax(-1) > ROUNDING * self.eps * size


def clues_from(answers: Answers) -> Clues:
    """What the black box says of itself."""
    box = Box(answers)
    sight, sure, words = _sight(box, answers.mask == "causal")
    may, must, placed = set(POSSIBLE), set[str](), False
    if sure:
        ordered = _ordered(box, sight)
        if ordered is False:
            may -= {"rotary", "offsets"}
            words.append("the order of keys does not matter")
        elif ordered:
            placed = True
            words.append("the order of keys matters")
    gated, sunk, said = _constant(box)
    words += said
    may -= {name for name, is_there in (("gate", gated), ("sink", sunk)) if is_there is False}
    must |= {name for name, is_there in (("gate", gated), ("sink", sunk)) if is_there}
    normed, capped, said = _far(box, sight)
    words += said
    may -= {name for name, is_there in (("normed", normed), ("cap", capped)) if is_there is False}
    must |= {name for name, is_there in (("normed", normed), ("cap", capped)) if is_there}
    if placed and not normed and _same_at_zero(box, sight):
        must.add("rotary")
        may.discard("offsets")
        words.append("near zero all keys count alike, so it is queries and keys that are turned")
    return Clues((sight,), frozenset(may), frozenset(must), placed, words=tuple(words), asked=box.count)


def _sight(box: Box, causal: bool) -> tuple[Sight, bool, list[str]]:
    """Which tokens change which answers."""
    n = min(len(box.X), max(2, ASKED // (box.X.shape[1] + 1)))
    X, other, k = box.X[:n], box.X.roll(1, 0)[:n], box.X.shape[1]
    all_of_them = X.unsqueeze(1).repeat(1, k + 1, 1, 1)
    for b in range(k):
        all_of_them[:, b, b] = -other[:, b]
    Y = box(all_of_them.flatten(0, 1))
    if Y is None:
        return Sight(causal=causal), False, []
    Y = Y.view(n, k + 1, k, -1)
    seen = box.changed(Y[:, k:].expand_as(Y[:, :k]), Y[:, :k]).any(0).mT  # (query, key)
    sight = sight_of(2.0 * seen - 1.0, causal)
    mask = sight.mask(k, k)
    exact = torch.equal(seen.fill_diagonal_(True), torch.ones_like(seen) if mask is None else mask)
    if not exact:
        return Sight(causal=causal or not bool(seen.triu(1).any())), False, []
    words = sight.describe()
    return sight, True, [f"tokens change the answers that they should change if it is {words}" if words else
                         "every token changes every answer"]


def _ordered(box: Box, sight: Sight) -> bool | None:
    """Whether the last query notices another order of the keys before it."""
    k = box.X.shape[1]
    first = 0 if sight.window is None else max(0, k - sight.window)
    inside = list(range(first, k - 1))
    if len(inside) < 2:
        return None
    shuffled = box.X.clone()
    shuffled[:, inside] = box.X[:, inside[1:] + inside[:1]]
    Y = box(torch.cat([box.X, shuffled]))
    if Y is None:
        return None
    one, other = Y[:, -1].chunk(2)
    return bool(box.changed(one, other).any())


def _constant(box: Box) -> tuple[bool | None, bool | None, list[str]]:
    """Whether outputs are gated and whether there are sinks: yes, no or who knows."""
    n, k, _ = box.X.shape
    rows = box.X[:, 0].unsqueeze(1).expand(n, k, -1)
    other = rows.roll(1, 0)
    Y = box(torch.cat([rows, other, (rows + other) / 2]))
    if Y is None:
        return None, None, []
    one, two, middle = Y.chunk(3)
    if not bool(box.changed(one + two, 2 * middle).any()):
        return False, False, ["sequences of equal tokens are answered by an affine map, so there is no sink and "
                              "no gate"]
    less = box(rows[:, : max(1, k // 2)])
    if bool(box.changed(one, one[:, :1].expand_as(one)).any()):
        alike = False
    elif less is None:
        return None, None, ["sequences of equal tokens are not answered by an affine map"]
    else:
        alike = not bool(box.changed(one[:, : less.shape[1]], less).any())
    if alike:
        return True, False, ["equal tokens are answered alike, however many, and not by an affine map: outputs are "
                             "gated"]
    return None, True, ["answers to equal tokens depend on how many there are: there are sinks"]


def _far(box: Box, sight: Sight) -> tuple[bool | None, bool | None, list[str]]:
    """Whether scores are normed and whether they are capped."""
    X, k = FAR * box.X, box.X.shape[1]
    b = max(0, k - 2)  # the token before the last, in sight of the last query
    if k < 2 or (sight.window is not None and sight.window < 2):
        return None, None, []
    turn = X.roll(1, 0)[:, b]

    def with_token(x: Tensor) -> Tensor:
        changed = X.clone()
        changed[:, b] = x
        return changed

    asked = [X[:, b] * 10, X[:, b] * 19, X[:, b] + TURNED * turn, X[:, b] + 2 * TURNED * turn]
    Y = box(torch.cat([X, *map(with_token, asked)]))
    if Y is None:
        return None, None, []
    base, ten, nineteen, one, two = Y[:, -1].chunk(5)
    if float(_bend(base, ten, nineteen).gt(ALIKE).double().mean()) > SOME:
        return False, False, ["far out larger tokens turn patterns over, so scores are neither normed nor capped"]
    if float(_bend(base, one, two).median()) > TURNED * ALIKE:
        return True, False, ["far out the size of a token does not matter to the patterns, its direction does: "
                            "queries and keys are normed"]
    return False, True, ["far out patterns depend neither on the size of tokens nor on small turns: scores are "
                         "capped"]


def _bend(one: Tensor, two: Tensor, three: Tensor) -> Tensor:
    """‖(y₃ − y₂) − (y₂ − y₁)‖ / ‖y₂ − y₁‖ for three answers to tokens on a line."""
    first, second = two - one, three - two
    bend: Tensor = (second - first).norm(dim=-1) / first.norm(dim=-1).clamp_min(1e-300)
    return bend


def _same_at_zero(box: Box, sight: Sight) -> bool:
    """Whether the last query answers alike to a small token at any place but its own, all others zero."""
    k = box.X.shape[1]
    first = 0 if sight.window is None else max(0, k - sight.window)
    inside = list(range(first, k - 1))
    if len(inside) < 2:
        return False
    X = torch.zeros(2, len(inside), k, box.X.shape[2], dtype=torch.float64)
    for j, b in enumerate(inside):
        X[:, j, b] = torch.stack([SMALL * box.X[0, 0], -SMALL * box.X[0, 0]])
    Y = box(X.flatten(0, 1))
    if Y is None:
        return False
    up, down = Y[:, -1].view(2, len(inside), -1)
    slopes = up - down
    apart = float((slopes - slopes.mean(0)).norm())
    return apart < ALIKE * float(slopes.norm()) / math.sqrt(len(inside)) and math.isfinite(apart)
