"""What to do next, against made-up answers: nothing is solved here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace

import pytest

from headway.core.counting import Size
from headway.learning.actions import (
    Descend,
    Glance,
    Place,
    Polish,
    Probe,
    Refine,
    Rung,
    SetAside,
    Span,
    Spanned,
    Spare,
    Start,
    Unmix,
    Unmixed,
)
from headway.learning.candidate import Seen
from headway.learning.policy import Facts, Rules, plan

FLOOR = 1e-12
PLAIN = Facts("auto", None, "auto", 32, 6, 100, 2000, 10**6, Size(8, 8, 6), True, FLOOR)
ENDLESS = 2000  # actions that no plan needs


def facts(d=8, k=6, **change):
    return replace(PLAIN, size=Size(d, d, k), **change)


@dataclass
class World:
    """Answers as numbers. ``left``: the error that so many heads leave, of more heads than listed the last one;
    ``rough``: residual and error of a random start, ``unmixed`` residuals inside the span, ``descended`` the error
    and reason of a descent, and what it leaves on its own rows. ``answers``: of one action or another, by how its
    name begins."""

    left: tuple[float, ...] = (0.4, FLOOR / 2)
    guess: int = 1
    gap: float = 2.0
    rough: tuple[float, float] = (0.2, 0.3)
    unmixed: tuple[float, ...] = (0.1, 0.2)
    descended: tuple[float, str] | tuple[float, str, float] = (0.9, "flat")
    refined: float = FLOOR / 2
    columns: int | None = None  # of the scores of what is refined
    structured: bool = True
    placed: bool = False
    spare: bool = False
    aside: int = 0
    ranked: bool = False
    used: int = 10**6  # sequences of a polish
    answers: dict = field(default_factory=dict)
    heads: dict = field(default_factory=dict)

    def error(self, heads):
        return self.left[min(heads, len(self.left)) - 1]

    def answer(self, action):
        for begins, told in self.answers.items():
            if action.name.startswith(begins):
                return told(self, action) if callable(told) else told
        match action:
            case Glance():
                return ""
            case Span():
                return Spanned(self.guess, self.gap)
            case Unmix():
                names = tuple(f"{action.name}:{j}" for j in range(len(self.unmixed)))
                self.heads |= dict.fromkeys(names, action.heads)
                return Unmixed(names, self.unmixed)
            case Start():
                return self.seen(action.name, action.heads, *self.rough)
            case Polish():
                heads = self.heads[action.base] + (action.grow is not None) - action.drop
                ranked = 3 if self.ranked and not action.free else None
                used = 10**6 if action.everything else self.used
                found = self.seen(action.name, heads, self.error(heads), self.error(heads))
                return replace(found, sequences=used, rank=ranked, out_rank=ranked)
            case Descend():
                error, reason, *own = self.descended
                return replace(self.seen(action.name, action.rung.heads, own[0] if own else error, error),
                               reason=reason)
            case Refine():
                found = self.seen(action.name, action.heads, self.refined, self.refined)
                return replace(found, rank=self.columns, out_rank=4)
            case Probe():
                return self.structured
            case Place():
                return self.placed
            case Spare():
                return self.spare
            case SetAside():
                return self.aside
        raise AssertionError(action)

    def seen(self, name, heads, residual, error):
        self.heads[name] = heads
        return Seen(name, heads, residual, error)


def walk(given, world, rules=None):
    """Every action in order, and where the plan ends. Actions of one name are one action: a run would take the one
    for the other."""
    steps, answer, asked = plan(given, rules), None, []
    world = replace(world, heads={})
    while len(asked) < ENDLESS:
        try:
            action = steps.send(answer)
        except StopIteration as stop:
            known = {action.name: action for action in asked}
            assert [action for action in asked if known[action.name] != action] == []
            return asked, stop.value
        asked.append(action)
        answer = world.answer(action)
    raise AssertionError(f"no end after {ENDLESS} actions, the last {asked[-3:]}")


def names(asked, kind=None):
    return [action.name for action in asked if kind is None or isinstance(action, kind)]


def tried(asked):
    """Head counts in the order in which starts or spans were tried at them."""
    return list(dict.fromkeys(action.heads for action in asked if isinstance(action, Start | Unmix)
                              and not getattr(action, "own", False)))


# -- the floor --------------------------------------------------------------------------------------------------


def test_at_the_floor_it_ends_at_once():
    asked, end = walk(facts(heads=2), World(left=(0.4, FLOOR / 2)))
    assert names(asked) == ["glance", "span", "unmix-2", "polish-2-0"]
    assert (end.best.name, end.structured, end.cause) == ("polish-2-0", False, "")


def test_at_the_floor_a_count_that_was_not_given_is_looked_at_once_more():
    asked, end = walk(facts(), World(guess=3, left=(FLOOR / 2,)))
    assert names(asked)[-2:] == ["features-3", "merge-3"]
    assert end.best.heads == 3
    asked, end = walk(facts(), World(guess=3, left=(FLOOR / 2,), spare=True))
    assert [name for name in names(asked) if name.startswith("spare")] == ["spare-2", "spare-1"]
    assert end.best.heads == 1


def test_a_head_that_is_missed_is_not_spare():
    world = World(guess=3, left=(0.4, 0.3, FLOOR / 2), spare=True)
    asked, end = walk(facts(), world)
    assert [name for name in names(asked) if name.startswith("spare")] == ["spare-2"]
    assert end.best.heads == 3


def test_labels_that_are_seen_through_need_no_search():
    asked, end = walk(facts(), World(answers={"glance": "causal"}))
    assert [type(action) for action in asked] == [Glance, Start, Polish]
    assert (end.structured, end.cause) == (True, "causal")


def test_labels_of_other_rows_are_asked_about_where_the_moments_show_no_gap():
    asked, end = walk(facts(), World(gap=1.2, answers={"rows": "shifted"}))
    assert [type(action) for action in asked] == [Glance, Span, Glance, Start, Polish]
    assert (end.structured, end.cause) == (True, "shifted")
    asked, end = walk(facts(), World(gap=2.0, answers={"rows": "shifted"}))
    assert len(names(asked, Glance)) == 1
    assert end.cause == ""


@pytest.mark.parametrize("guess", [2, 1])
def test_close_to_the_floor_no_further_head_is_looked_for(guess):
    asked, end = walk(facts(), World(guess=guess, left=(0.3, 1e-10)))
    assert max(tried(asked)) <= 2
    assert not end.structured


def test_where_not_even_one_head_is_determined_one_short_fit_shows_it():
    asked, end = walk(facts(n=2), World())
    assert [type(action) for action in asked] == [Start, Polish]
    assert asked[-1].limit == Rules().hopeless
    assert end.best.heads == 1


# -- more heads, and fewer --------------------------------------------------------------------------------------


def test_heads_are_added_while_they_help():
    asked, end = walk(facts(), World(left=(0.9, 0.6, 0.3, FLOOR / 2)))
    assert tried(asked) == [1, 2, 3], "the fourth is found in what three leave"
    grown = [name for name in names(asked, Polish) if name.startswith("grow")]
    assert grown == ["grow-1-2", "grow-2-3", "grow-3-4"]
    assert end.best.heads == 4


@pytest.mark.parametrize("misses", [0, 1, 2])
def test_growth_stops_after_so_many_counts_without_gain(misses):
    asked, end = walk(facts(), World(left=(0.04,)), Rules(misses=misses))
    counts = [action.heads for action in asked if isinstance(action, Unmix)]
    assert counts == list(range(1, misses + 3)), "so many may miss, the next one ends it"
    assert end.best.heads == 1
    assert end.structured


def test_what_depends_on_nothing_is_left_alone():
    asked, end = walk(facts(), World(left=(0.04,), structured=False))
    assert tried(asked) == [1]
    assert not end.structured


def test_few_rows_are_not_believed_when_they_show_nothing():
    world = World(left=(0.04,), structured=False, used=50)
    asked, _ = walk(facts(), world)
    assert names(asked)[-3:] == ["settle-1", "left-1-all", "aside-settle-1"]
    assert asked[-3].everything


def test_before_the_rest_is_called_noise_wrong_labels_are_looked_for_with_all_rows():
    """Few rows, some of them wrong, may give a fit that misses all of them alike."""
    def some(_, action):
        return 3 * ("without" not in action.name)

    world = World(left=(0.04,), structured=False, used=50, answers={"aside-settle": some, "aside-final": some})
    for given in (facts(), facts(heads=1)):
        asked, _ = walk(given, world)
        assert sum(isinstance(action, Glance) for action in asked) == 2, "begun again without them"
    asked, _ = walk(facts(), replace(world, structured=True))
    assert not [name for name in names(asked) if name.startswith(("aside-settle", "aside-final"))]


def test_heads_that_nobody_misses_are_taken_away():
    asked, end = walk(facts(), World(guess=4, left=(0.9, 0.04, 0.04, 0.04), structured=False))
    assert [name for name in names(asked) if name.startswith("prune")] == ["prune-3", "prune-2", "prune-1"]
    assert end.best.heads == 2, "one is too few"


@pytest.mark.parametrize(("most", "n"), [(3, 2000), (32, 6)])
def test_no_more_heads_than_allowed_or_determined(most, n):
    given = facts(max_heads=most, n=n)
    asked, end = walk(given, World(guess=9, left=(0.9, 0.8, 0.7, 0.6, 0.5, 0.4)))
    limit = min(most, given.size.most_heads(n))
    assert limit in (2, 3)
    assert max(tried(asked)) <= limit
    assert end.best.heads <= limit


@pytest.mark.parametrize("heads", [1, 2, 3, 5])
@pytest.mark.parametrize("method", ["auto", "moments", "starts", "factors"])
@pytest.mark.parametrize("left", [(0.9, 0.5, 0.3, 0.1, 0.05, 0.01), (0.4,), (0.04,), (1.1,)])
def test_heads_that_are_given_are_never_exceeded(heads, method, left):
    """More are tried on the way, to leave a wrong basin; none of them is returned."""
    for world in (World(left=left), World(left=left, structured=False), World(left=left, descended=(0.2, "target"),
                                                                             refined=0.1)):
        asked, end = walk(facts(heads=heads, method=method), world)
        assert end.best.heads == heads
        assert all(action.heads == heads for action in asked
                   if isinstance(action, Unmix | Descend | Refine) and hasattr(action, "heads"))


# -- starts -----------------------------------------------------------------------------------------------------


def test_rows_learned_by_heart_call_for_more_rows():
    asked, _ = walk(facts(method="starts", heads=2), World(rough=(0.01, 0.9), left=(0.3,)))
    first = [action.times for action in asked if isinstance(action, Start) and not action.own][:3]
    assert first[:2] == [1, Rules().more_rows]
    polished = [action.times for action in asked if isinstance(action, Polish)]
    assert polished[0] == max(first), "the polish too"


def test_rows_learned_by_heart_with_no_more_to_be_had_are_not_polished_long():
    given = facts(method="starts", heads=2, n=20)
    asked, _ = walk(given, World(rough=(0.01, 1.2), left=(0.3,)))
    assert next(action for action in asked if isinstance(action, Polish)).limit == Rules().short


def test_two_starts_that_agree_are_enough_and_the_first_near_one_too():
    given = facts(method="starts", heads=2)
    asked, _ = walk(given, World(rough=(0.3, 0.3), left=(0.3,), structured=False))
    assert names(asked, Start) == ["start-2-0", "start-2-1"]
    asked, _ = walk(given, World(rough=(0.01, 0.02), left=(0.3, FLOOR / 2)))
    assert names(asked, Start) == ["start-2-0"]
    apart = (0.4, 0.3, 0.2, 0.6, 0.7, 0.8)

    def differ(world, action):
        """Errors that differ, and residuals too."""
        return world.seen(action.name, 2, 0.7 * apart[action.number], apart[action.number])

    asked, _ = walk(given, World(left=(0.3,), structured=False, answers={"start": differ}))
    assert len(names(asked, Start)) == 6, "all of them, where no two agree"
    assert names(asked, Polish)[0] == "polish-start-2-2", "the best of them"
    asked, _ = walk(given, World(left=(0.3,), structured=False, answers={
        "start": lambda world, action: replace(differ(world, action), residual=0.19)}))
    assert len(names(asked, Start)) == 2, "the same residual on the same rows is the same fit"


def test_starts_that_agreed_before_are_not_made_again():
    given = facts(method="starts", heads=2)
    asked, _ = walk(given, World(left=(0.3,)), Rules(search_agree=2))
    assert names(asked, Start) == ["start-2-0", "start-2-1", "around-2"]
    asked, _ = walk(given, World(left=(0.3,)), Rules(search_agree=3))
    assert names(asked, Start) == ["start-2-0", "start-2-1", "around-2", "start-2-6"]


def test_an_unmixed_fit_that_leaves_most_is_a_start_like_others():
    asked, _ = walk(facts(heads=2), World(unmixed=(0.8, 0.9), left=(0.3, 0.3), structured=False))
    assert names(asked)[2:6] == ["unmix-2", "around-2", "start-2-unmixed", "start-2-0"]
    assert names(asked, Polish)[-2:] == ["polish-2-unmixed-0", "polish-2-unmixed-1"], "for labels that are noise"


# -- factors ----------------------------------------------------------------------------------------------------


FIRST = {  # width, sequences of 6 tokens, white: is descent tried first?
    "small and white": (32, 2000, True, False),
    "wide and white, rows enough": (64, 6000, True, False),
    "wide and white, few rows": (64, 4000, True, True),
    "very wide": (128, 10**5, True, True),
    "narrow, coloured": (31, 2000, False, False),
    "coloured": (32, 2000, False, True),
}


@pytest.mark.parametrize("name", FIRST)
def test_factors_come_first_where_width_and_whiteness_say_so(name):
    d, n, white, first = FIRST[name]
    asked, _ = walk(facts(d, n=n, white=white), World(descended=(0.1, "target")))
    assert isinstance(asked[1], Descend) == first
    for method in ("moments", "starts"):
        asked, _ = walk(facts(d, n=n, white=white, method=method), World(descended=(0.1, "target")))
        assert not names(asked, Descend), "those who ask for another way get it"


def test_factors_that_fit_are_the_end():
    asked, end = walk(facts(64, n=1000, white=False), World(descended=(0.1, "target")))
    assert [type(action) for action in asked] == [Glance, Descend, Refine]
    assert not end.structured
    asked, end = walk(facts(64, method="factors"), World(descended=(0.1, "target"), refined=0.01))
    assert [type(action) for action in asked][-1] == Probe
    assert end.structured


LADDERS = {
    "small": (facts(16, method="factors", n=10**5), [Rung(6, 16, 16, held) for held in (0.0, 3.0)]),
    "full rank where it costs little": (facts(32, method="factors", n=10**5), [
        Rung(6, 32, 32, held) for held in (0.0, 3.0)]),
    "few rows": (facts(64, method="factors"), [
        Rung(8, 24, 24, 3.0), Rung(8, 24, 64, 0.0)]),
    "wide": (facts(64, method="factors", n=10**5), [
        *(Rung(8, 24, 24, held) for held in (0.0, 3.0)), Rung(8, 24, 64, 0.0)]),
    "wider": (facts(384, method="factors", n=10**5), [
        *(Rung(24, 48, 48, held) for held in (0.0, 3.0)), Rung(24, 48, 384, 0.0)]),
    "heads and rank given": (facts(64, method="factors", heads=4, rank=5, n=10**5), [
        *(Rung(4, 5, 5, held) for held in (0.0, 3.0)), Rung(4, 5, 64, 0.0)]),
}


@pytest.mark.parametrize("name", LADDERS)
@pytest.mark.parametrize("reason", ["by heart", "flat"])
def test_the_rungs_of_the_ladder(name, reason):
    """Weights are held down only where a descent knows its own rows better than others."""
    given, rungs = LADDERS[name]
    asked, _ = walk(given, World(descended=(0.9, reason)))
    assert [action.rung for action in asked if isinstance(action, Descend)] == [
        rung for j, rung in enumerate(rungs) if reason == "by heart" or not rung.decay or not j]


def test_only_a_promising_descent_is_refined_and_the_first_that_fits_ends_the_ladder():
    given = facts(64, method="factors")
    asked, _ = walk(given, World(descended=(0.31, "flat")))
    assert names(asked, Refine) == ["refine-nearest"], "there is no other start"
    asked, end = walk(given, World(descended=(0.31, "flat"), answers={
        "refine-nearest": lambda world, action: world.seen(action.name, 3, 0.2, 0.2 if action.limit else 1e-3)}))
    assert names(asked, Refine) == ["refine-nearest", "refine-nearest-on"], "a few steps brought it near"
    assert end.best.error == 1e-3
    assert not names(walk(facts(64, n=20_000, white=False), World(descended=(0.31, "flat")))[0], Refine)
    asked, _ = walk(given, World(descended=(math.nan, "diverged")))
    assert not names(asked, Refine)
    asked, _ = walk(given, World(descended=(0.29, "by heart")))
    assert len(names(asked, Descend)) == len(names(asked, Refine)) == 1


def test_a_descent_that_found_some_heads_is_tried_with_twice_as_many():
    given, most = facts(64, method="factors", n=10**5), Rung(16, 24, 64, 0.0)

    def last(given, *descended, refined=0.4):
        asked, _ = walk(given, World(descended=descended, refined=refined))
        return [action.rung for action in asked if isinstance(action, Descend)][-1]

    assert last(facts(16, method="factors", n=10**5), 0.5, "flat") == Rung(12, 16, 16, 0.0)
    assert last(given, 0.5, "flat") == most
    assert last(given, 0.71, "flat").heads == 8, "it found none"
    assert last(given, 0.5, "by heart") == replace(most, decay=3.0)
    assert last(facts(64, method="factors", heads=4, n=10**5), 0.5, "flat").heads == 4
    assert last(given, 0.2, "flat", refined=0.1).heads == 8


def rungs(given, **world):
    """Of the descents, one that came near after the other."""
    asked, _ = walk(given, World(descended=(0.1, "target"), **world))
    return [action.rung for action in asked if isinstance(action, Descend)]


def test_scores_of_full_rank_are_tried_where_a_fit_used_every_column_it_could():
    given = facts(64, method="factors", n=10**5)
    usual, full = Rung(8, 24, 24, 0.0), Rung(8, 64, 64, 0.0)
    assert rungs(given, refined=0.01, columns=24) == [usual, full]
    assert full not in rungs(given, refined=0.01, columns=23), "fewer were enough"
    assert rungs(given, columns=24) == [usual], "nothing was left"
    assert not any(one.q == 64 for one in rungs(replace(given, rank=24), refined=0.01, columns=24)), "told"
    assert rungs(replace(given, heads=3), refined=0.01, columns=64)[-1] == Rung(3, 64, 64, 0.0)


def test_what_a_wide_layer_s_descents_learned_by_heart_is_said_to_be_too_few():
    """Nothing but descent serves a wide layer with few rows: no random start is tried after it."""
    crammed = World(descended=(0.9, "flat", 0.5), refined=0.8)
    asked, end = walk(facts(128, n=2000), crammed)
    assert not names(asked, Start)
    assert not names(asked, Span)
    assert end.cause == "by heart"
    assert walk(facts(128, n=2000), replace(crammed, descended=(0.9, "flat")))[1].cause == ""


def test_factors_are_tried_last_where_the_rest_leaves_structure():
    for given in (facts(white=False), facts(64, n=6000)):
        asked, end = walk(given, World(left=(0.2,), descended=(0.1, "target"), refined=0.01))
        assert names(asked, Refine)
        assert end.best.error == 0.01
        asked, end = walk(given, World(left=(0.2,), descended=(0.1, "target"), refined=0.19))
        assert end.best.error == 0.2, "half is the least that makes up for other heads"
    asked, _ = walk(facts(), World(left=(0.2,), descended=(0.1, "target"), refined=0.01))
    assert not names(asked, Descend), "nor for white tokens of a small width"


# -- wrong labels, and connections around the layer -------------------------------------------------------------


@pytest.mark.parametrize("method", ["moments", "starts", "factors"])
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("asides", [0, 1, 4])
def test_sequences_are_set_aside_so_many_times_at_most(method, heads, asides):
    world = World(left=(0.2,), aside=3, descended=(0.1, "target"), refined=0.1)
    asked, _ = walk(facts(method=method, heads=heads), world, Rules(asides=asides))
    assert len(names(asked, SetAside)) == asides
    assert sum(isinstance(action, Glance) for action in asked) == asides + 1, "each time from the beginning"


def test_after_setting_aside_nothing_is_begun_from_what_was_found_before():
    world = World(left=(0.2,), answers={"aside": lambda _, action: 3 * ("without" not in action.name)})
    asked, _ = walk(facts(heads=2), world)
    cut = next(j for j, action in enumerate(asked) if isinstance(action, SetAside))
    before = set(names(asked[: cut + 1]))
    for action in asked[cut + 1 :]:
        base = (getattr(action, "base", None) or "").split(":")[0]
        assert base not in before
        assert getattr(action, "grow", None) not in before


def test_a_linear_function_of_the_rows_own_token_is_tried_beside_heads():
    def around(_, action):
        return Seen(action.name, action.heads, 1e-6 if action.heads == 2 else 0.3, 0.3)

    asked, end = walk(facts(), World(left=(0.2,), answers={"around": around}))
    assert all(action.own for action in asked if action.name.startswith("around"))
    assert (end.cause, end.structured) == ("around", True)
    asked, end = walk(facts(), World(left=(0.2,), structured=False, answers={"around": around}))
    assert not any(action.name.startswith("around") for action in asked)


def test_a_connection_around_the_layer_is_asked_for_as_soon_as_something_is_left():
    asked, end = walk(facts(), World(left=(0.2,), answers={
        "around": lambda _, action: Seen(action.name, action.heads, 1e-6, 1e-6)}))
    assert names(asked)[-4:] == ["left-1", "place-polish-1-0", "around-2", "alone-2"]
    assert (end.cause, end.best.heads) == ("around", 1)


def test_a_connection_around_the_layer_is_asked_for_first_where_the_span_explains_little():
    asked, end = walk(facts(), World(guess=2, unmixed=(0.8, 0.9), left=(0.2,), answers={
        "around": lambda _, action: Seen(action.name, action.heads, 1e-6, 1e-6)}))
    assert names(asked) == ["glance", "span", "unmix-2", "around-2", "alone-2", "start-1-0", "polish-start-1-0"]
    assert (end.cause, end.structured) == ("around", True)


@pytest.mark.parametrize("heads", [None, 2])
def test_labels_that_depend_on_the_place_need_no_search(heads):
    asked, end = walk(facts(heads=heads), World(left=(0.2,), placed=True))
    assert [type(action) for action in asked][-2:] == [Probe, Place]
    assert (end.cause, end.structured) == ("place", True)
    asked, _ = walk(facts(heads=heads), World(left=(0.2,), placed=True, structured=False))
    assert not names(asked, Place)


@pytest.mark.parametrize("heads", [None, 2])
def test_where_the_layer_alone_meets_the_labels_there_is_no_connection_around_it(heads):
    """A layer with a head more is a layer and a linear function too: that of zero."""
    def met(world, action):
        return world.seen(action.name, action.heads, 1e-6, 1e-6)

    left = (0.4, FLOOR / 2) if heads is None else (0.4, 0.3)
    asked, end = walk(facts(heads=heads), World(left=left, answers={
        "around": met, "alone": met, "polish-alone": lambda world, action: world.seen(action.name, 2, 0.0, 0.0)}))
    assert "polish-alone-2" in names(asked)
    assert (end.cause, end.structured, end.best.heads) == ("", False, 2)


# -- rules ------------------------------------------------------------------------------------------------------


def unlike(world, action):
    """Starts that end apart."""
    return world.seen(action.name, action.heads, 0.2 + 0.02 * action.number, 0.3 + 0.02 * action.number)


UNLIKE = World(left=(0.3,), answers={"start": unlike})
RULES = {  # field: another value, facts, world. In each the way must differ.
    "fitted": (1e-3, facts(64, white=False), World(descended=(0.1, "target"), refined=1e-4)),
    "near": (0.01, facts(heads=2), World(left=(0.04,), structured=False)),
    "enough": (0.05, facts(heads=2), World(structured=False, left=(0.3,))),
    "moment_rows": (1000.0, facts(), World()),
    "white_rows": (1.0, facts(64, n=4000), World(descended=(0.1, "target"))),
    "wide": (256, facts(64, n=4000), World(descended=(0.1, "target"))),
    "very_wide": (256, facts(128, n=10**5), World(descended=(0.1, "target"))),
    "coloured": (64, facts(48, white=False), World(descended=(0.1, "target"))),
    "promising": (0.5, facts(64, method="factors"), World(descended=(0.4, "flat"))),
    "hold": (1.0, facts(64, method="factors"), World(descended=(0.9, "by heart"))),
    "scant": (0.0, facts(64, method="factors"), World()),
    "crammed": (0.7, facts(64, method="factors", n=10**5), World(descended=(0.9, "flat", 0.7))),
    "small": (8, facts(32, method="factors"), World()),
    "better": (0.5, facts(), World(left=(0.04, 0.03, 0.02))),
    "misses": (2, facts(), World(left=(0.04,))),
    "blind_misses": (1, facts(method="starts"), World(left=(0.3,), rough=(0.3, 0.3), structured=False)),
    "unsure": (4000, facts(), World(left=(0.95,), structured=False, unmixed=(0.9,))),
    "done": (1e-3, facts(), World(left=(1e-4,))),
    "clear": (3.0, facts(), World()),
    "shown": (10**6, facts(), World(answers={"span": Spanned(1, 1.2)})),
    "more_rows": (2, facts(method="starts"), World(rough=(0.01, 0.9))),
    "short": (3, facts(method="starts", heads=2, n=20), World(rough=(0.01, 1.2), left=(0.3,))),
    "hopeless": (3, facts(n=2), World()),
    "spare": (1e-6, facts(), World(guess=2)),
    "agree": (3, facts(method="starts", heads=2), World(left=(0.3,), structured=False)),
    "search_agree": (2, facts(method="starts", heads=2), World(left=(0.3,))),
    "asides": (2, facts(), World(left=(0.2,), aside=1)),
    "around": (1, facts(), World(left=(0.2,))),
    "head_size": (16, facts(64, method="factors"), World()),
    "head_part": (4, facts(384, method="factors", n=10**5), World()),
    "student_heads": (9, facts(16, method="factors"), World()),
    "student_width": (2, facts(64, method="factors"), World()),
    "lacking": (0.1, facts(16, method="factors"), World(descended=(0.5, "flat"), refined=0.4)),
    "halved": (0.9, facts(white=False), World(left=(0.2,), descended=(0.1, "target"), refined=0.15)),
    "by_heart": (0.3, facts(method="starts", heads=2), World(rough=(0.3, 0.9), left=(0.3,))),
    "spent": (1e-3, facts(method="starts", heads=2), World(rough=(0.01, 0.9), left=(0.3,))),
    "unmixed": (1, facts(heads=2), World(left=(0.3,), structured=False)),
    "same": (2.0, facts(method="starts", heads=2), UNLIKE),
    "tries": (3, facts(), UNLIKE),
    "search_limit": (10, facts(method="starts", heads=2), UNLIKE),
    "search_starts": (3, facts(128, method="starts", heads=9, n=10**5), UNLIKE),
    "search_size": (50, facts(method="starts", heads=2), UNLIKE),
    "met": (0.3, facts(), World(left=(0.2,))),
}


def test_every_rule_has_a_scenario():
    assert set(RULES) == {one.name for one in fields(Rules)}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_read(name):
    other, given, world = RULES[name]
    assert getattr(Rules(), name) != other
    usual, changed = (walk(given, world, rules)[0] for rules in (Rules(), Rules(**{name: other})))
    assert usual != changed


def test_the_same_answers_are_the_same_way():
    for given, world in ((given, world) for _, given, world in RULES.values()):
        assert walk(given, world) == walk(given, world)


# -- facts ------------------------------------------------------------------------------------------------------


def test_rows_for_a_solve_are_six_times_the_floor_within_what_there_is():
    given = facts(24, n=4000, most=3000)
    floor = given.size.floor(3)
    assert given.rows_for(3) == 6 * floor
    assert given.rows_for(3, 4) == 24 * floor
    assert given.rows_for(3, 10**6) == 3000, "what may be held"
    assert replace(given, n=50).rows_for(3) == 50, "what there is"
    assert facts(2).rows_for(1) == 16, "and sixteen at least"
    assert replace(given, n=50, copies=3.0).rows_for(3) == 150, "copies among them"
    assert not replace(given, n=5, copies=100.0).within(3), "though they determine nothing"
