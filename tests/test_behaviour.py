"""What heads do, told from their patterns: every kind planted by hand, what chance gives, what cannot be told."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import one_hot

import headway as hw
from headway.core.behaviour import AIMED, CLEAR, KINDS, behaviours

N, K, LETTERS = 12, 16, 7


def letters(n=N, k=K, seed=0):
    return torch.randint(LETTERS, (n, k), generator=torch.Generator().manual_seed(seed))


def sighted(causal, n=N, k=K, filled=None):
    see = torch.ones(n, k, k, dtype=torch.bool)
    see = see.tril() if causal else see
    return see if filled is None else see & ~filled.unsqueeze(1)


def uniform(see):
    return see.double() / see.sum(2, keepdim=True).clamp_min(1)


def head(see, target, share=0.8):
    """``share`` of the attention evenly on the target (n, k, k), where there is one, the rest even."""
    aim = uniform(target & see)
    some = (target & see).any(2, keepdim=True)
    return torch.where(some, share * aim + (1 - share) * uniform(see), uniform(see))


def targets(kind, tokens):
    """Bool (n, k, k), written the slow way."""
    n, k = tokens.shape
    aim = torch.zeros(n, k, k, dtype=torch.bool)
    for s in range(n):
        t = tokens[s].tolist()
        for a in range(k):
            for b in range(k):
                aim[s, a, b] = {"previous token": b == a - 1, "first token": b == 0,
                                "same token": b != a and t[b] == t[a],
                                "induction": b not in (0, a, a + 1) and t[b - 1] == t[a]}[kind]
    return aim


@pytest.mark.parametrize("kind", AIMED)
@pytest.mark.parametrize("causal", [True, False])
def test_a_planted_head_is_named(kind, causal):
    tokens, see = letters(), sighted(causal)
    told = behaviours(head(see, targets(kind, tokens)).unsqueeze(1), tokens)[0]
    assert told.kind == kind
    assert 0.8 < told.share < 0.95 and told.sentence.startswith(kind.capitalize())
    assert f"{100 * told.share:.0f} % of its attention goes to" in told.sentence
    assert told.label == f"{kind}, {100 * told.share:.0f} %"
    assert told.scores[kind] == max(told.scores[one] for one in AIMED)
    assert set(told.scores) == set(KINDS) - {"mixed"}
    # Of what is aimed, 80 % is put there and of the rest as much as by chance.
    assert told.scores[kind] == pytest.approx(0.8, abs=0.02)


def test_one_planted_wrongly_is_seen():
    """A head that looks two tokens back, and one that looks at the copy itself, are not what they resemble."""
    tokens, see = letters(), sighted(True)
    two_back = one_hot((torch.arange(K) - 2).clamp_min(0), K).bool().expand(N, K, K)
    told = behaviours(torch.stack([head(see, two_back, 0.95), head(see, targets("same token", tokens))], 1), tokens)
    assert [one.kind for one in told] == ["position", "same token"]
    assert told[0].share > 0.9 and "places alone tell" in told[0].sentence
    assert told[0].scores["previous token"] < CLEAR and told[1].scores["induction"] < CLEAR


def slow(P, tokens, filled, causal):
    """Scores of one head as the definitions say them, row by row."""
    n, k = tokens.shape
    sums = {kind: [] for kind in AIMED}
    looked = seen = rows = 0
    for s in range(n):
        real = [b for b in range(k) if not filled[s, b]]
        t = tokens[s].tolist()
        for a in real:
            V = [b for b in real if b <= a or not causal]
            p = {b: float(P[s, a, b]) for b in V}
            before, first = {a - 1} & set(V), {real[0]}
            aims = {"previous token": before,
                    "first token": first if not first & (before | {a}) else set(),
                    "same token": {b for b in V if b != a and t[b] == t[a]},
                    "induction": {b for b in V if b - 1 in real and b - 1 != a and t[b - 1] == t[a] and b != a}}
            for kind, aim in aims.items():
                told = kind in ("previous token", "first token") or not aim & (first | before)
                if aim and told and len(aim) < len(V):
                    sums[kind].append((sum(p[b] for b in aim), len(aim) / len(V)))
            if len(V) > 1:
                looked += math.exp(-sum(w * math.log(w) for w in p.values() if w > 0))
                seen, rows = seen + len(V), rows + 1
    found = {"broad": (looked - rows) / (seen - rows)}
    for kind, pairs in sums.items():
        share, chance = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        found[kind] = (share - chance) / (1 - chance)
    D = torch.zeros(n, k, k).double()
    for s in range(n):
        for a in range(k):
            V = [b for b in range(k) if not filled[s, b] and (b <= a or not causal)]
            if not filled[s, a] and len(V) > 1:
                D[s, a, V] = P[s, a, V] - 1 / len(V)
    if not filled.any():
        pairs = sum((D[s] * D[r]).sum() for s in range(n) for r in range(n) if r != s)
        found["position"] = float(pairs / (n - 1) / D.square().sum())
    return found


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("filling", [True, False])
def test_scores_are_what_the_definitions_say(causal, filling):
    draw = torch.Generator().manual_seed(3)
    tokens, filled = torch.randint(4, (6, 9), generator=draw), torch.zeros(6, 9, dtype=torch.bool)
    filled[:3, :2] = filled[3:, 6:] = filling
    see = sighted(causal, 6, 9, filled)
    S = (3 * torch.randn(6, 2, 9, 9, generator=draw).double()).masked_fill(~see.unsqueeze(1), -math.inf)
    P = torch.softmax(S, 3).nan_to_num()
    for i, one in enumerate(behaviours(P, tokens, filled if filling else None)):
        wanted = slow(P[:, i], tokens, filled, causal)
        assert {kind: one.scores[kind] for kind in wanted} == pytest.approx(wanted, abs=1e-12)


def test_what_chance_gives_does_not_count():
    """In sequences of three, an even head puts a third to a half of its attention on the first token."""
    see = sighted(True, 40, 3)
    told = behaviours(uniform(see).unsqueeze(1), letters(40, 3))[0]
    assert told.kind == "broad" and told.share == pytest.approx(1.0)
    assert all(abs(told.scores[kind]) < 1e-12 for kind in AIMED if kind in told.scores)
    draw = torch.Generator().manual_seed(0)
    scores = 8 * torch.randn(40, 1, 3, 3, generator=draw).double()
    peaked = torch.softmax(scores.masked_fill(~see[:, None], -math.inf), 3)
    told = behaviours(peaked, letters(40, 3))[0]
    assert told.kind == "mixed" and "At best" in told.sentence
    assert told.label == f"mixed, {100 * told.share:.0f} % at best"


def test_targets_that_coincide_do_not_count_twice():
    """Where two letters alternate, the token after an earlier copy is the previous one: it is named as that."""
    tokens = torch.tensor([[0, 1] * (K // 2)]).expand(N, K)
    see = sighted(True)
    told = behaviours(head(see, targets("previous token", tokens)).unsqueeze(1), tokens)[0]
    assert told.kind == "previous token" and "induction" not in told.scores
    # Copies at the same places everywhere: induction, but places would tell it too, and that is said.
    half = letters(N, K // 2, 3).argsort(1)
    for period, said in ((torch.cat([half, half], 1), True), (letters(), False)):
        told = behaviours(head(see, targets("induction", period)).unsqueeze(1), period)[0]
        assert told.kind == "induction" and ("places alone" in told.sentence) == said


def test_without_copies_or_tokens_they_are_not_asked_for():
    see = sighted(True)
    apart = torch.arange(K).expand(N, K)
    P = head(see, targets("previous token", apart)).unsqueeze(1)
    for tokens in (apart, None):
        told = behaviours(P, tokens)[0]
        assert told.kind == "previous token" and not {"same token", "induction"} & set(told.scores)
    told = behaviours(P[:1])[0]
    assert told.kind == "previous token" and "position" not in told.scores, "one sequence tells nothing of places"


@pytest.mark.parametrize("left", [True, False])
def test_filling_is_neither_first_nor_previous_nor_a_copy(left):
    tokens = letters()
    filled = torch.zeros(N, K, dtype=torch.bool)
    filled[: N // 2, :5 if left else None] = left
    filled[: N // 2, K - 5 :] |= not left
    tokens = tokens.masked_fill(filled, 99)
    see = sighted(True, filled=filled)
    start = (~filled).int().argmax(1)
    first = one_hot(start, K).bool().unsqueeze(1).expand(N, K, K)
    P = torch.stack([head(see, first, 0.9), head(see, targets("previous token", tokens), 0.9),
                     head(see, targets("induction", tokens), 0.9), uniform(see)], 1)
    P[filled[:, None].expand(N, 4, K)] = 1.0 / K  # rows of filling mean nothing
    told = behaviours(P, tokens, filled)
    assert [one.kind for one in told] == ["first token", "previous token", "induction", "broad"]
    assert told[3].share == pytest.approx(1.0)


def test_keys_of_another_sequence_have_no_copies():
    draw = torch.Generator().manual_seed(1)
    even = torch.full((N, 1, 5, 9), 1.0 / 9).double()
    first = even.clone()
    first[..., 0] += 2.0
    place = even + one_hot(torch.arange(5) + 2, 9).double()
    spread = torch.softmax(5 * torch.randn(N, 1, 5, 9, generator=draw).double(), 3)
    P = torch.cat([even, first, place, spread], 1)
    told = behaviours(P / P.sum(3, keepdim=True))
    assert [one.kind for one in told] == ["broad", "first token", "position", "mixed"]
    assert set(told[0].scores) == {"first token", "position", "broad"}
    square = (place + 1.0)[:, :, :, :5]
    assert set(behaviours(square / square.sum(3, keepdim=True), cross=True)[0].scores) == set(told[0].scores)
    with pytest.raises(hw.InputError, match="no copies"):
        behaviours(P / P.sum(3, keepdim=True), letters(N, 5))


def test_a_window_and_a_sink_are_what_the_layer_says():
    form = hw.Form(sight=hw.Sight(causal=True, window=4), sink=hw.Sink(torch.tensor([0.0, 5.0]).double()))
    layer = hw.FactoredLayer.random(2, 8, size=4, scale=1e-3, form=form, seed=0)
    X = hw.draw(layer, 10, 12, law="gaussian", seed=1).X
    for one in hw.behaviours(layer.patterns(X), sight=form.sight):
        assert one.kind == "broad" and one.share == pytest.approx(1.0, abs=1e-3)


def test_it_does_not_matter_how_tokens_are_given_or_on_what_they_are_told():
    tokens, see = letters(), sighted(True)
    P = head(see, targets("induction", tokens)).unsqueeze(1)
    words = [["abcdefg"[i] for i in row] for row in tokens.tolist()]
    one, other, third = (behaviours(P, given)[0] for given in (tokens, words, tokens.numpy()))
    assert one == other == third and str(one) == one.sentence
    half = behaviours(P.float(), tokens)[0]
    assert half.kind == "induction" and math.isclose(half.share, one.share, rel_tol=1e-5)
    assert torch.equal(P, head(see, targets("induction", tokens)).unsqueeze(1)), "the input is left alone"


@pytest.mark.parametrize(("wrong", "said"), [
    ({"patterns": torch.ones(2, 3, 4)}, "shape"), ({"patterns": -torch.ones(2, 1, 4, 4)}, "negative"),
    ({"patterns": torch.ones(2, 1, 4, 4)}, "larger sums"), ({"patterns": torch.zeros(0, 1, 4, 4)}, "no rows"),
    ({"tokens": [["a"] * 4]}, "2 sequences of 4 tokens"), ({"tokens": [["a"] * 4, ["b"] * 3]}, "3 or 4"),
    ({"padding": torch.zeros(2, 4)}, "bool"), ({"padding": torch.ones(2, 4, dtype=torch.bool)}, "filling"),
    ({"padding": torch.zeros(2, 5, dtype=torch.bool)}, "shape"), ({"cross": 1}, "True or False")])
def test_what_makes_no_sense_is_refused(wrong, said):
    given = {"patterns": torch.full((2, 1, 4, 4), 0.25), **wrong}
    with pytest.raises(hw.InputError, match=said):
        behaviours(**given)
