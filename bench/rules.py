"""What every rule of the learner buys: the same examples with it, and with another number in its place.

    python bench/rules.py [--part plain|asked] [--only NAME ...] [--workers N]

A rule is a field of ``policy.Rules``, or a constant of a module of ``headway.learning`` that decides something.
TABLE has for each one or more rows: a number in its place (off, or far away) and scenes (scenes.py) that show it. A
scene is run on the same seeds with the rule and without; the run with all rules as they are is shared by the rows.
What a rule may buy, in this order:

truth     more statements are true with it
error     without it the error on other sequences is ten times as large or more, where both statements are true
calls     without it a black box is asked at least a fifth more sequences
time      without it at least a fifth more products and steps of descent are made, or twice the processor time goes
          by and half a second more (other work on the machine sways it by half)

A row that buys nothing, or costs, says so. SIZES has the constants that need no row, and why: a test keeps the two
lists complete. Scenes and numbers were chosen on seeds 0 and 1; seed 700 is shown. Only a whole part is recorded:
the plain learner and forms (rules), or chosen questions and linear scores, with rows in asked.py (rules_asked).
Every run has one thread and SECONDS of processor time: where without a rule only those statements are missing that
are not made in time, what it buys is time.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import math
import pkgutil
import re
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

import asked
import headway.learning
import judged
import workers
from common import record
from headway.learning import formed_learn, loop, policy, refine, verdict
from headway.learning.source import Source
from headway.learning.starts.descent import Descended
from scenes import SCENES

FIRST, LAST = 700, 700
SECONDS = 10.0  # of processor time, for one run
MORE, LONGER, WORSE = 1.2, 2.0, 10.0  # ratios of work, of processor time and of errors that count as bought
LEAST = 0.5  # seconds a run that count at all
EXACT = 1e-12  # errors below are the floor of the arithmetic
ROOM = "headway.learning."
BASELINES = ("baselines",)  # what the learner is compared with: no rules of its own


class Trial(NamedTuple):
    """A rule, a number in its place, and the scenes that show the difference."""

    rule: str  # Rules.near, or refine.STEPS
    instead: Any
    scenes: tuple[str, ...]


def _inner(times: float) -> tuple[int, ...]:
    return tuple(round(times * most) for most in refine.INNER)


OFF, FAR = 1e-9, 10**9  # as good as never and always
TABLE: tuple[Trial, ...] = (
    # what counts as near, small, clear
    Trial("Rules.fitted", 1e-14, ("words, d = 26, rank 4", "far from zero")),
    Trial("Rules.near", OFF, ("noise of 1 %", "white, few")),
    Trial("Rules.enough", 0.0, ("white, many heads",)),
    Trial("Rules.enough", 1.0, ("noise of 50 %",)),
    Trial("Rules.clear", 0.0, ("rows moved",)),
    Trial("Rules.clear", 1e9, ("white",)),
    Trial("Rules.shown", 0, ("white, d = 6, 100", "noise of 10 %, few")),
    Trial("Rules.done", 1e-300, ("far from zero",)),
    # which start
    Trial("Rules.moment_rows", 0.0, ("white, three times the floor",)),
    Trial("Rules.moment_rows", 1e9, ("white, many heads",)),
    Trial("Rules.white_rows", 0.0, ("wide, low rank, few",)),
    Trial("Rules.wide", FAR, ("wide, low rank, few",)),
    Trial("Rules.very_wide", 64, ("wide, low rank",)),
    Trial("Rules.coloured", FAR, ("words, d = 28",)),
    Trial("Rules.coloured", 0, ("words",)),
    Trial("Rules.promising", 0.0, ("words, d = 26, rank 4",)),
    Trial("Rules.promising", 1e9, ("noise alone by factors",)),
    Trial("Rules.lacking", 0.0, ("eight heads, d = 26",)),
    Trial("Rules.hold", 0.0, ("white by factors, few",)),
    Trial("Rules.scant", 0.0, ("white by factors, few", "wide, low rank, few")),
    Trial("Rules.crammed", 0.0, ("white by factors, few", "low rank by factors")),
    Trial("Rules.small", 0, ("words, d = 28",)),
    Trial("Rules.head_size", 4, ("low rank by factors", "words, d = 28")),
    Trial("Rules.student_heads", 1, ("encoder, layer 1", "white by factors")),
    Trial("Rules.student_width", 0, ("eight heads, rank told",)),
    Trial("Rules.halved", OFF, ("words, peaked",)),
    # how many heads, how many starts
    Trial("Rules.better", 1.0, ("noise of 10 %, few",)),
    Trial("Rules.better", 0.3, ("white, five heads, few",)),
    Trial("Rules.misses", 1, ("normed, four heads at most",)),
    Trial("Rules.blind_misses", 0, ("white, five heads, few", "noise of 10 %, few")),
    Trial("Rules.unsure", 0, ("noise of 10 %, few", "white, d = 6, 100")),
    Trial("Rules.unsure", FAR, ("noise of 50 %",)),
    Trial("Rules.by_heart", 0.0, ("a template", "white, at the floor")),
    Trial("Rules.spent", 10.0, ("a template", "white, at the floor")),
    Trial("Rules.more_rows", 1, ("a template",)),
    Trial("Rules.short", 1000, ("white, at the floor",)),
    Trial("Rules.hopeless", 100, ("linear", "white, too few")),
    Trial("Rules.spare", 0.0, ("words, d = 28", "white, two tokens")),
    Trial("Rules.agree", 6, ("white, few",)),
    Trial("Rules.agree", 1, ("white, five heads, few",)),
    Trial("Rules.same", 1.0, ("white, few", "noise of 10 %")),
    Trial("Rules.same", 2.0, ("white, few", "noise of 10 %")),
    Trial("Rules.unmixed", 1, ("noise of 10 %", "white, peaked")),
    Trial("Rules.unmixed", 6, ("noise of 10 %",)),
    Trial("Rules.tries", FAR, ("rotary, two heads at most", "normed, four heads at most")),
    Trial("Rules.search_agree", FAR, ("white, one head too few told",)),
    Trial("Rules.search_agree", 2, ("white, one head too few told",)),
    Trial("Rules.search_limit", 1000, ("white, one head too few told",)),
    Trial("Rules.asides", 0, ("5 % wrong",)),
    Trial("Rules.around", 0, ("a connection around",)),
    Trial("Rules.met", 0.0, ("a connection around",)),
    Trial("Rules.met", 1.0, ("white, one head too few told",)),
    Trial("policy.ROWS", 1, ("white", "white, many heads")),
    Trial("policy.ROWS", 100, ("white, d = 32",)),
    Trial("policy.LEAST", 1, ("white, d = 6, 100", "white, two tokens")),
    Trial("starts.random.SIZES", (1.0,), ("white, few", "white, peaked, few")),
    Trial("starts.random.BUDGET", FAR, ("white, five heads, few", "white, at the floor")),
    Trial("starts.random.TARGET", 0.0, ("white, few",)),
    Trial("starts.unmix.AGREE", FAR, ("noise of 10 %",)),
    Trial("starts.unmix.COLUMNS", FAR, ("white, d = 32",)),
    # descent on factors
    Trial("starts.descent.RISE", 1, ("white by factors", "words by factors")),
    Trial("starts.descent.TARGET", 0.01, ("white by factors",)),
    Trial("starts.descent.TARGET", 0.5, ("white by factors", "encoder, layer 1")),
    Trial("starts.descent.FALLS", 1.0, ("noise alone by factors",)),
    Trial("starts.descent.FOUND", 0.0, ("many spare heads", "noise of 10 % by factors")),
    Trial("starts.descent.FOUND", 1.0, ("a peaked head by factors", "eight heads, rank told")),
    Trial("starts.descent.CALM", 10, ("many spare heads", "noise of 10 % by factors")),
    Trial("starts.descent.LOWER", 0.99, ("many spare heads", "noise of 10 % by factors")),
    Trial("starts.descent.FEW", 7, ("wide, low rank, few",)),
    Trial("starts.descent.BY_HEART", 0.0, ("white by factors, few",)),
    Trial("starts.descent.HEART_WAITS", 1000, ("white by factors, few",)),
    Trial("starts.descent.WAITS", 1, ("white by factors",)),
    Trial("starts.descent.WAITS", 1000, ("noise alone by factors",)),
    Trial("starts.descent.HELD", 1, ("white by factors, few",)),
    Trial("starts.descent.ENDS", 0, ("words by factors",)),
    # refinement
    Trial("refine.STEPS", 20, ("encoder, layer 1", "words by factors")),
    Trial("refine.TRIAL", 1, ("many spare heads", "white by factors")),
    Trial("refine.TRIAL", 12, ("white by factors",)),
    Trial("refine.INNER", _inner(10), ("encoder, layer 1",)),
    Trial("refine.INNER", _inner(0.13), ("encoder, layer 1",)),
    Trial("ladder.SLOW", 1.0, ("encoder, layer 1",)),
    Trial("refine.BATCH", 1.0, ("many spare heads",)),
    Trial("refine.BOLD", 0.0, ("many spare heads", "noise of 10 % by factors")),
    Trial("ladder.CREEPS", OFF, ("encoder, layer 1", "noise of 10 % by factors")),
    Trial("ladder.PATIENCE", 1000, ("encoder, layer 1", "noise of 10 % by factors")),
    Trial("saturated.SATURATED", 0.0, ("a peaked head by factors", "a head that looks back")),
    Trial("refine.SOFTER", 0.999, ("a peaked head by factors", "a head that looks back")),
    Trial("refine.GIVEN", 1.0, ("a peaked head by factors", "a head that looks back")),
    Trial("refine.HARD", 2, ("a head that looks back", "words by factors, peaked")),
    Trial("refine.LAZY", OFF, ("a head that looks back", "words by factors, peaked")),
    Trial("refine.LAZIER", OFF, ("a head that looks back", "words by factors, peaked")),
    Trial("refine.BALANCED", 20, ("a head that looks back", "words by factors, peaked")),
    Trial("refine.MISSED", 0.0, ("full rank by factors",)),
    Trial("refine.FREE", 0.0, ("many spare heads", "noise of 10 % by factors")),
    Trial("ranks.NARROW", 0.0, ("low rank by factors", "words by factors")),
    Trial("ladder.CLOSE", 0.0, ("low rank by factors", "white by factors")),
    Trial("ladder.NEARLY", 0.0, ("encoder, layer 1", "gpt, layer 0", "noise of 1e-4 by factors")),
    Trial("refine.AGAIN", 1e9, ("many spare heads", "encoder, layer 1")),
    Trial("refine.AGAIN", 0.0, ("noise of 10 % by factors",)),
    Trial("ladder.ROWS", 1, ("white by factors", "low rank by factors")),
    Trial("ladder.FEWEST", 1, ("a peaked head by factors", "words by factors, peaked")),
    Trial("thin.PRICE", 0.0, ("a head that looks back", "encoder, layer 1")),
    Trial("saturated.WIDEST", 0, ("a head that looks back", "a peaked head by factors")),
    Trial("saturated.SEEN", 0.25, ("a head that looks back",)),
    Trial("saturated.LIFT", 1.0, ("a head that looks back",)),
    Trial("gauss_newton.DEARER", 1.0, ("a head that looks back", "words by factors, peaked")),
    Trial("gauss_newton.CHEAPER", 1.0, ("a head that looks back", "words by factors, peaked")),
    Trial("gauss_newton.STALE", FAR, ("a head that looks back", "encoder, layer 1")),
    Trial("gauss_newton.FAILED", 1.5, ("white, peaked", "encoder, layer 1")),
    Trial("gauss_newton.WELL", 2.0, ("white", "white by factors")),
    Trial("gauss_newton.FAIR", 1.0, ("white, peaked", "encoder, layer 1")),
    Trial("gauss_newton.FORESEEN", 2.0, ("white, peaked", "encoder, layer 1")),
    Trial("gauss_newton.PARTLY", 1.0, ("white, peaked", "encoder, layer 1")),
    Trial("thin.LIFT", 1e-12, ("encoder, layer 1", "a head that looks back")),
    Trial("prune.TRIED", 0, ("many spare heads", "white by factors")),
    Trial("ladder.DISAGREE", FAR, ("a peaked head by factors", "words by factors, peaked")),
    Trial("ladder.SETTLED", FAR, ("white, three times the floor", "white, peaked, few")),
    Trial("ladder.GROW", 2, ("white, peaked", "wide, low rank")),
    Trial("refine.GROW", 64, ("a peaked head by factors", "words by factors, peaked")),
    Trial("ladder.HOPE", 1.0, ("white", "wide, low rank")),
    Trial("ladder.CARE", 1e-4, ("white, peaked", "white, few")),
    Trial("ladder.FORESEEN", 0.0, ("white, peaked", "white, few")),
    Trial("ladder.AFRESH", 1e-12, ("white, peaked", "a peaked head by factors")),
    Trial("ladder.HASTY", {"patience": 4, "least_gain": 1e-3}, ("wide, low rank", "wide, low rank, few")),
    Trial("polish.LOOK", 0.0, ("wide, low rank", "white, d = 32")),
    Trial("gauss_newton.NEAR", 0.0, ("white", "white by factors")),
    Trial("ranks.STEP", 1e9, ("wide, low rank",)),
    Trial("polish.EARLY", FAR, ("wide, low rank",)),
    # layers of other forms
    Trial("formed_learn.FIRST", 1, ("rotary, form told",)),
    Trial("formed_learn.SPARE", 1.0, ("five heads with sinks, form and heads told",)),
    Trial("formed_learn.HOPELESS", FAR, ("noise alone, form told",)),
    Trial("formed_learn.AGAIN", 0, ("larger gates, form told",)),
    Trial("formed_learn.SAME", OFF, ("larger gates, form told",)),
    Trial("formed_refine.TRIED", 0, ("gates, form told", "rotary, form told")),
    Trial("formed_slow.SLOW", 1e-9, ("rotary, slow planes",)),
    Trial("formed_refine.TIGHT", 1e-2, ("rotary, slow planes",)),
    Trial("formed_refine.FINE", OFF, ("rotary, slow planes",)),
    Trial("formed_refine.DIGITS", 1e-2, ("rotary, slow planes",)),
    Trial("formed_slow.FARTHEST", 100.0, ("rotary, slow planes",)),
    Trial("formed_learn.PUSH", 1e-14, ("sinks, form told",)),
    Trial("formed_learn.BACK", 1.0, ("a template, form told",)),
    Trial("formed_learn.STEPS", 1, ("sinks, form told",)),
    # which form
    Trial("which.BASES", (1e7,), ("rotary, form not told",)),
    Trial("which.REACH", 2, ("offsets, form not told",)),
    Trial("which.SHORT", 100, ("offsets, form not told", "sinks, form not told")),
    Trial("which.MARKED", OFF, ("sinks, form not told",)),
    Trial("which.DECISIVE", 0.0, ("offsets, form not told",)),
    Trial("which.AS_WELL", 1e9, ("sinks, form not told",)),
    Trial("which.PARTS", 0, ("sinks, form not told",)),
    Trial("which.SUNK", -20.0, ("sinks, form not told",)),
    Trial("which.CAPPED", 1.0, ("a cap, form not told",)),
    Trial("formed_read.CLOSE", 0.0, ("slopes, form not told",)),
    Trial("clues.MET", 1e9, ("looking back, form not told",)),
    Trial("clues.EXACT", 0.0, ("looking back, form not told",)),
    Trial("clues.SEEN", 1e9, ("looking back, form not told",)),
    Trial("clues.APART", 1e9, ("offsets, form not told",)),
    Trial("clues.CLEARLY", 1e9, ("looking back, form not told",)),
    Trial("questions.ROUNDING", 1.0, ("a black box with sinks",)),
    Trial("questions.FAR", 1.0, ("a black box with a cap",)),
    Trial("questions.TURNED", OFF, ("a black box with norms",)),
    Trial("questions.ALIKE", 1e9, ("a black box with sinks",)),
    Trial("questions.SOME", 1.0, ("a black box with sinks",)),
    # what may be said
    Trial("ladder.FITTED", 1e-13, ("words by factors",)),
    Trial("ladder.FITTED", 1e-2, ("noise of 1 %",)),
    Trial("evidence.LEVEL", OFF, ("white, one head too few told",)),
    Trial("evidence.LEVEL", 5.0, ("noise of 1 %",)),
    Trial("evidence.TURNS", (0.0,), ("rotary, heads told", "rotary, two heads at most")),
    Trial("evidence.OWN", -1.0, ("neighbours alike",)),
    Trial("evidence.MOST", 1.0, ("5 % wrong",)),
    Trial("evidence.MOST", 0.0, ("noise of many sizes",)),
    Trial("evidence.CLOSE", 0.0, ("noise of 1e-7",)),
    Trial("determined.FLAT", 0.0, ("a template", "white, one head too many told")),
    Trial("determined.FLAT", 1e-3, ("words", "white, peaked")),
    Trial("determined.PRODUCTS", 5, ("many spare heads", "low rank by factors")),
    Trial("white.EMPTY", 1e-300, ("a template",)),
    Trial("verdict.OPEN", 0.0, ("a template",)),
    Trial("source.STANDS_OUT", 100.0, ("5 % wrong",)),
    Trial("source.STANDS_OUT", 1.0, ("noise of many sizes",)),
    Trial("source.LARGE", 1e9, ("2 % wrong",)),
    Trial("source.LARGE", 1.0, ("white, peaked",)),
    Trial("source.GAP", 10.0, ("5 % wrong",)),
    Trial("source.GAP", 1.0, ("noise of many sizes", "noise that grows")),
    Trial("source.FEW", 0.0, ("5 % too large",)),
    Trial("source.FEW", 1.0, ("noise of many sizes", "noise that grows")),
    Trial("source.FAR", 1e99, ("far from zero",)),
    Trial("verdict.STALLED", 0.0, ("a peaked head by factors", "words by factors, peaked")),
    Trial("verdict.NOTHING", 2.0, ("noise alone",)),
    Trial("verdict.DOMINATES", 1e9, ("mlp, few", "rotary, heads told")),
    Trial("verdict.SAFE", 1, ("white, at the floor", "white, twice the floor")),
    Trial("verdict.APART", 1e9, ("white, at the floor", "white, too few")),
    Trial("verdict.APART", 1.0, ("noise of 10 %",)),
)
SAMPLE, MEMORY, NAMES = "the size of a sample", "how much memory is used", "names and words, no number"
SIZES: dict[str, str] = {
    "candidate.PARTS": NAMES, "evidence.MOVED": NAMES, "evidence.CAUSES": NAMES,
    "evidence.ANY": NAMES, "parts.PIECE": MEMORY,
    "formed.MAPS": NAMES, "formed_source.OF_KEYS": NAMES, "formed_source.ON_TOKENS": NAMES,
    "clues.POSSIBLE": NAMES, "which.PLACED": NAMES, "clues.LOOKED": SAMPLE, "questions.DRAWS": SAMPLE,
    "questions.ASKED": SAMPLE, "clues.REGRESSED": MEMORY,
    "questions.SMALL": "a small number: where limits at zero are looked at",
    "formed_read.BUCKETS": "tables in use", "formed_read.FARTHEST": "tables in use",
    "formed.STEPS": NAMES, "formed_slow.SEEN": SAMPLE, "formed_slow.PIECE": MEMORY, "formed_slow.WIDEST": MEMORY,
    "formed_slow.LIFT": "the rounding of float32 and float64", "formed_slow.ALMOST": "the rounding of float32",
    "formed_steps.FLAT": "the rounding of float64",
    "formed.SAMPLE": SAMPLE, "formed_learn.LOOKED": SAMPLE, "formed_refine.LOOKED": SAMPLE,
    "formed_learn.WIDE": "begins at width 512, beyond examples of seconds",
    "formed_learn.WIDE_HEAD": "begins at width 512, beyond examples of seconds",
    "formed_learn.MOST": "begins at more than 32 heads, beyond examples of seconds",
    "formed_learn.GRACE": "taken where time ran out only, and the runs measured have no limit",
    "formed_learn.ROUGH": NAMES, "formed_evidence.NEAR": SAMPLE,
    "settings.LEARNERS": NAMES, "ladder.ENDS": NAMES, "source.INTEGERS": NAMES,
    "evidence.FLIPS": SAMPLE, "evidence.ROWS": SAMPLE, "evidence.CURVED": SAMPLE, "evidence.SHARP": SAMPLE,
    "evidence.SHUFFLES": SAMPLE, "evidence.ORDERS": SAMPLE, "evidence.PAIRS": SAMPLE,
    "ladder.LOOKED_AT": SAMPLE, "source.CHECKED": SAMPLE, "source.FRAME_SEQUENCES": SAMPLE,
    "starts.random.OTHERS": SAMPLE, "starts.descent.ROWS": SAMPLE,
    "source.SELECT": "how the examples are divided", "source.JUDGE": "how the examples are divided",
    "source.MOST": "how the examples are divided",
    "source.LOOKED": MEMORY, "starts.descent.GRAIN": "how often the clock is looked at",
    "starts.descent.PLACE": NAMES, "ladder.KEPT": NAMES, "ladder.NOW": NAMES,
    "snapshots.NONE": NAMES, "snapshots.EVERY": "how much of a long stage may be lost",
    "starts.batches.LOOKED": MEMORY,
    "starts.descent.SELECT": SAMPLE,
    "ladder.FLOORS": "what exact means in the labels' precision: a definition",
    "saturated.NARROW": "decides the precision of what preconditions at widths of hundreds",
    "refine.WIDE": "begins at widths of hundreds, beyond examples of seconds",
    "gauss_newton.SMALL": "decides how a GPU is given its work",
    "determined.LEVEL": "a level that is stated", "determined.MISSED": "follows from the level",
    "determined.PART": "what counts as part of a head: a definition", "determined.DENSE": MEMORY,
    "determined.WORK": "how much work an exact count may be", "determined.VECTORS": SAMPLE,
    "determined.APART": "when vectors count as different: a definition", "determined.ENOUGH": SAMPLE,
    "determined.MORE": SAMPLE, "white.FAINT": "the rounding of float64",
    "white.RANK": "what counts to a rank: a definition", "verdict.GROUPS": "how long a sentence may be",
    "verdict.TIMES": "a number in an advice", "starts.batches.AHEAD": MEMORY,
    "starts.batches.MET": "how fast files are read beside a GPU",
    "gauss_newton.ROUGH": "decides the precision of products on a GPU alone",
    "Rules.head_part": "begins at width 192, beyond examples of seconds",
    "Rules.search_starts": "begins where the heads are 1,000 wide together, beyond examples of seconds",
    "Rules.search_size": "begins where the heads are 333 wide together, beyond examples of seconds",
    "refine.SOFTEST": "how often SOFTER is tried",
    "starts.descent.LOOK": "the grain of the descent's clock: the other rules count in it",
    "starts.descent.STEPS": "the limit of a descent",
    "starts.descent.SMALL": "used by the baselines alone",
    "starts.descent.WIDE": "begins at width 128, beyond examples of seconds",
    "starts.moments.WIDE": "begins at 512 regressors, beyond examples of seconds",
    "starts.unmix.WIDE": "begins at width 128, beyond examples of seconds",
    **asked.SIZES,
}
ASKED = tuple(Trial(*row) for row in asked.TABLE)
EVERY = {**SCENES, **asked.SCENES}


# -- the rules there are, and others in their place -------------------------------------------------------------


@cache
def modules() -> dict[str, ModuleType]:
    """Every module of the learner by its name inside the room."""
    found = pkgutil.walk_packages(headway.learning.__path__, ROOM)
    return {one.name.removeprefix(ROOM): importlib.import_module(one.name) for one in found}


@cache
def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))


def constants(module: ModuleType) -> list[str]:
    """Names in capitals that the module gives a value to."""
    found: list[str] = []
    for node in _tree(module).body:
        targets = node.targets if isinstance(node, ast.Assign) else (
            [node.target] if isinstance(node, ast.AnnAssign) else [])
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            found += [part.id for part in parts if isinstance(part, ast.Name) and part.id.isupper()
                      and len(part.id) > 1]
    return found


def known() -> list[str]:
    """Every rule of the learner: fields of Rules, constants of modules."""
    own = [f"{name}.{constant}" for name, module in modules().items()
           if name not in BASELINES for constant in constants(module)]
    return [f"Rules.{field.name}" for field in fields(policy.Rules)] + own


def about(rule: str) -> str:
    """What it is, in the words that stand beside it."""
    where, name = rule.rsplit(".", 1)
    source = inspect.getsource(policy.Rules if where == "Rules" else modules()[where])
    line = rf"^ *(?:\w+, )*{name}\b(?:, \w+)*(?:: [^=]+)? = .*?  # (.*(?:\n +# .*)*)"
    found = re.search(line, source, flags=re.M)
    return "" if found is None else re.sub(r"\n +# ", " ", found[1])


def value_of(rule: str) -> Any:
    where, name = rule.rsplit(".", 1)
    return getattr(policy.Rules(), name) if where == "Rules" else getattr(modules()[where], name)


@contextlib.contextmanager
def changed(rule: str | None, instead: Any) -> Iterator[None]:
    """The learner with another number in the place of one rule."""
    if rule is None:
        yield
        return
    with contextlib.ExitStack() as undo:
        where, name = rule.rsplit(".", 1)
        if where == "Rules":
            _set(undo, loop, "Rules", partial(policy.Rules, **{name: instead}))
        else:
            owner = modules()[where]
            for function, at in _defaults(owner, name):
                if isinstance(at, int):
                    given = function.__defaults__ or ()
                    _set(undo, function, "__defaults__", (*given[:at], instead, *given[at + 1 :]))
                else:
                    _set(undo, function, "__kwdefaults__", {**(function.__kwdefaults__ or {}), at: instead})
            for module in (owner, *_importers(ROOM + where, name)):
                _set(undo, module, name, instead)
        yield


def _set(undo: contextlib.ExitStack, on: Any, name: str, value: Any) -> None:
    undo.callback(setattr, on, name, getattr(on, name))
    setattr(on, name, value)


def _importers(owner: str, name: str) -> list[ModuleType]:
    """Modules that hold the constant under its name too."""
    return [module for module in modules().values() for node in ast.walk(_tree(module))
            if isinstance(node, ast.ImportFrom) and node.module == owner
            and any(alias.name == name for alias in node.names)]


def _defaults(owner: ModuleType, name: str) -> Iterator[tuple[FunctionType, int | str]]:
    """Functions and methods of the module that have the constant as a default, and of which argument: a place among
    the defaults, or a name."""
    inside = {node: parent.name for parent in ast.walk(_tree(owner)) if isinstance(parent, ast.ClassDef)
              for node in parent.body}
    for node in ast.walk(_tree(owner)):
        if isinstance(node, ast.FunctionDef):
            holder = getattr(owner, inside[node]) if node in inside else owner
            known = dict(enumerate(node.args.defaults)) | {
                argument.arg: default for argument, default in zip(
                    node.args.kwonlyargs, node.args.kw_defaults, strict=True)}
            for at, default in known.items():
                if isinstance(default, ast.Name) and default.id == name:
                    yield getattr(holder, node.name), at


# -- one run ----------------------------------------------------------------------------------------------------


DESCENTS: dict[tuple[Any, ...], tuple[Descended, float]] = {}  # of this process, with the seconds each took
BEFORE = ("starts.", "source.", "shapes.")  # rules that a descent depends on


@contextlib.contextmanager
def remembered(scene: str, seed: int, rule: str | None) -> Iterator[list[float]]:
    """Descents of the same examples, sizes and draws are made once: of rules that come after them most of the time
    would go into making them again. Yields the seconds that were not spent in this way, to be added."""
    saved: list[float] = []
    if rule is not None and rule.startswith(BEFORE):
        yield saved
        return
    plain = loop.descended

    def once(source: Source, *words: Any, **named: Any) -> Descended:
        key = (scene, seed, len(source.fit), *words[:4])  # heads, sizes, decay: the draw is named after them
        if key in DESCENTS:
            saved.append(DESCENTS[key][1])
            return DESCENTS[key][0]
        begun = time.process_time()
        found = plain(source, *words, **named)
        if found.reason != "time":
            DESCENTS[key] = found, time.process_time() - begun
        return found

    with contextlib.ExitStack() as undo:
        _set(undo, loop, "descended", once)
        yield saved


@dataclass(frozen=True)
class Found:
    """One run of one scene."""

    said: str
    true: bool
    heads: int | None
    error: float
    seconds: float  # of the processor
    work: int  # products with the Jacobian or its transpose, and steps of descent
    calls: int = 0  # of a black box whose inputs are chosen


def run(scene: str, seed: int, rule: str | None, instead: Any) -> dict[str, Any]:
    """``Found``, as a row that processes can hand on."""
    one = EVERY[scene]
    case = one.make(seed)
    begun = time.process_time()
    with contextlib.ExitStack() as undo:
        for module in (formed_learn, loop, verdict):
            _set(undo, module, "time", SimpleNamespace(perf_counter=time.process_time))
        undo.enter_context(changed(rule, instead))
        saved = undo.enter_context(remembered(scene, seed, rule))
        said = judged.ask(case, **{"seconds": SECONDS, **one.options})
    if said.kind == "crash" and rule is None:  # without a rule it is one more statement that is not true
        raise RuntimeError(f"{scene}, seed {seed}, {rule} = {instead}: {said.sentence}")
    seconds, fit = time.process_time() - begun + sum(saved), said.fit
    work = 0 if fit is None else fit.stats["products"] + sum(event.get("steps", 0) for event in fit.trace)
    calls = 0 if fit is None else fit.stats.get("calls", 0)
    row = asdict(Found(said.kind, not judged.judge(said, case, one.true), None if fit is None else fit.layer.heads,
                       judged.fresh_error(said, case), seconds, work, calls))
    print(scene, seed, rule, instead, row, flush=True)
    return row


# -- what it buys -----------------------------------------------------------------------------------------------


def compared(rule: str, instead: Any, scene: str, before: list[Found], after: list[Found]) -> dict[str, Any]:
    """A row: the same seeds with the rule and without."""
    return {"rule": rule, "what it is": about(rule), "value": _shown(value_of(rule)), "instead": _shown(instead),
            "scene": scene, "buys": bought(before, after),
            "true": f"{sum(f.true for f in before)} of {len(before)}",
            "true without": f"{sum(f.true for f in after)} of {len(after)}",
            "said": _listed(f.said for f in before), "said without": _listed(f.said for f in after),
            "heads": _listed(f.heads for f in before), "heads without": _listed(f.heads for f in after),
            "error": _worst(before), "error without": _worst(after),
            "seconds": round(sum(f.seconds for f in before), 2),
            "seconds without": round(sum(f.seconds for f in after), 2),
            "products": sum(f.work for f in before), "products without": sum(f.work for f in after),
            "calls": sum(f.calls for f in before), "calls without": sum(f.calls for f in after)}


def bought(before: list[Found], after: list[Found]) -> str:
    """What the rule buys on one scene; "costs …" where it is better off without it."""
    gain = sum(f.true for f in before) - sum(f.true for f in after)
    if gain > 0:
        late = all(a.said == "limit" for b, a in zip(before, after, strict=True) if b.true and not a.true)
        return "time" if late else "truth"
    if gain < 0:
        return "costs truth"
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if b.true and a.true]
    ratios = [_ratio(a.error, b.error) for b, a in pairs]
    if ratios and statistics.median(ratios) >= WORSE:
        return "error"
    if ratios and statistics.median(ratios) <= 1 / WORSE:
        return "costs error"
    calls = _ratio(sum(f.calls for f in after), sum(f.calls for f in before))
    if calls >= MORE or calls <= 1 / MORE:
        return "calls" if calls > 1 else "costs calls"
    work = _ratio(sum(f.work for f in after), sum(f.work for f in before))
    taken = _ratio(sum(f.seconds for f in after), sum(f.seconds for f in before))
    apart = abs(sum(f.seconds for f in after) - sum(f.seconds for f in before)) > LEAST * len(before)
    if work >= MORE or (apart and taken >= LONGER and work > 1 / MORE):
        return "time"
    return "costs time" if work <= 1 / MORE or (apart and taken <= 1 / LONGER) else "nothing"


def _ratio(a: float, b: float) -> float:
    """a/b, of errors down to the floor of the arithmetic."""
    return max(a, EXACT) / max(b, EXACT)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{str(key).removeprefix('torch.')} {_shown(one)}" for key, one in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))


def _worst(found: list[Found]) -> float | None:
    return judged.finite(max((f.error for f in found if math.isfinite(f.error)), default=math.nan))


def verdicts(rows: list[dict[str, Any]]) -> dict[str, str]:
    """For every rule the best that any of its rows says."""
    best: dict[str, str] = {}
    for row in rows:
        said = best.setdefault(row["rule"], "nothing")
        order = ("truth", "error", "calls", "time")
        if row["buys"] in order and (said not in order or order.index(row["buys"]) < order.index(said)):
            best[row["rule"]] = row["buys"]
    return best


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    best = verdicts(rows)
    named = {what: [rule for rule, said in best.items() if said == what] for what in (
        "truth", "error", "calls", "time", "nothing")}
    return {"rules with a row": len(best), "rules that buy something": len(best) - len(named["nothing"]),
            **{f"buy {what}": len(named[what]) for what in ("truth", "error", "calls", "time")},
            "rules that buy nothing": ", ".join(named["nothing"]) or 0, "sizes, without a row": len(SIZES)}


# -- all of them ------------------------------------------------------------------------------------------------


def measure(table: Iterable[Trial], seeds: range, count: int) -> list[dict[str, Any]]:
    """Every row of the table. Runs of one scene and seed follow each other, the one with all rules first: what they
    share is then made once in a process."""
    table = list(table)
    used = dict.fromkeys(scene for trial in table for scene in trial.scenes)
    plain = [(scene, None, None) for scene in used]
    wanted = [(scene, trial.rule, trial.instead) for trial in table for scene in trial.scenes]
    cases = [(scene, seed, rule, instead) for one in used for seed in seeds
             for scene, rule, instead in (*plain, *wanted) if scene == one]
    found = {(scene, seed, rule, str(instead)): Found(**row) for (scene, seed, rule, instead), row in zip(
        cases, workers.each(run, cases, count), strict=True)}

    def runs(scene: str, rule: str | None, instead: Any) -> list[Found]:
        return [found[scene, seed, rule, str(instead)] for seed in seeds]

    return [compared(rule, instead, scene, runs(scene, None, None), runs(scene, rule, instead))
            for scene, rule, instead in wanted]


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--part", choices=("plain", "asked"), help="one of the two records")
    words.add_argument("--only", nargs="+", metavar="NAME", help="rules, such as Rules.near or refine.STEPS")
    workers.option(words)
    words.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), default=[FIRST, LAST])
    given = words.parse_args()
    torch.set_num_threads(1)
    for part, name, table in (("plain", "rules", TABLE), ("asked", "rules_asked", ASKED)):
        chosen = [Trial(*trial) for trial in table if given.only is None or trial[0] in given.only]
        if given.part not in (None, part) or not chosen:
            continue
        rows = measure(chosen, range(given.seeds[0], given.seeds[1] + 1), given.workers)
        for rule, said in verdicts(rows).items():
            print(f"{rule}: {said}", flush=True)
        if given.only is None and given.seeds == [FIRST, LAST]:  # a part says less than the whole
            command = "python bench/rules.py" + (" --part asked" if part == "asked" else "")
            record(name, command, summary(rows), rows)


if __name__ == "__main__":
    main()
