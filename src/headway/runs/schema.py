"""What the JSON files of a run hold, as rules: a file that anybody may have edited is checked when it is read.

A rule takes a value and the name of its place, and says what is wrong with it, or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headway.core import checks
from headway.core.names import LINEAR, METHODS, SEARCHES
from headway.core.words import form_from

Rule = Callable[[Any, str], str | None]
RUN, CERTIFIED = "headway-run-1", "headway-certificate-1"
# Those a manifest vouches for.
FILES = ("config.json", "layer.safetensors", "truth.safetensors", "seen.safetensors")
STATUSES = ("recovered", "fitted", "noise", "not_realisable", "too_few", "degenerate", "limit")
FREE = ("seconds", "device")  # settings that do not make a run another one


def check(path: Path, found: Any, rule: Rule, what: str, hint: str) -> None:
    """Refuse a file whose contents break the rule, naming the place."""
    wrong = rule(found, "")
    if wrong is not None:
        checks.refuse(str(path), what, f"contents that do not fit ({wrong})", hint)


# -- rules ------------------------------------------------------------------------------------------------------


def of_type(word: str, *types: type) -> Rule:
    def rule(value: Any, where: str) -> str | None:
        # To Python True is a number; here it is not.
        fits = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        return None if fits else f"{where or 'the file'} is {_shown(value)}, not {word}"

    return rule


def one_of(*words: Any) -> Rule:
    def rule(value: Any, where: str) -> str | None:
        fits = any(value is word or (isinstance(value, str) and value == word) for word in words)
        return None if fits else f"{where} is {_shown(value)}, not one of {', '.join(map(str, words))}"

    return rule


def either(*rules: Rule) -> Rule:
    def rule(value: Any, where: str) -> str | None:
        wrong = [one(value, where) for one in rules]
        return None if None in wrong else wrong[0]

    return rule


def listed(each: Rule, at_least: int = 0) -> Rule:
    def rule(value: Any, where: str) -> str | None:
        if not isinstance(value, list) or len(value) < at_least:
            return f"{where} is {_shown(value)}, not a list" + (f" of at least {at_least}" if at_least else "")
        return next((wrong for j, part in enumerate(value) if (wrong := each(part, f"{where}[{j}]"))), None)

    return rule


def mapping(each: Rule) -> Rule:
    """Names to values that all keep one rule."""

    def rule(value: Any, where: str) -> str | None:
        if not isinstance(value, dict):
            return f"{where} is {_shown(value)}, not a mapping"
        return next((wrong for name, part in value.items() if (wrong := each(part, f"{where}.{name}"))), None)

    return rule


def record(
    needed: Mapping[str, Rule], optional: Mapping[str, Rule] | None = None, *, more: bool = False,
    together: Mapping[str, tuple[str, ...]] | None = None,
) -> Rule:
    """A mapping with these names, and with others only if ``more``; ``together``: a name that calls for others."""
    known = {**needed, **(optional or {})}

    def rule(value: Any, where: str) -> str | None:
        if not isinstance(value, dict):
            return f"{where or 'the file'} is {_shown(value)}, not a mapping"
        dot = f"{where}." if where else ""
        for name, calls in {"": tuple(needed), **(together or {})}.items():
            lacking = [other for other in calls if other not in value] if name in ("", *value) else []
            if lacking:
                return f"{dot}{lacking[0]} is missing"
        for name, part in value.items():
            if name not in known and not more:
                return f"{dot}{name} is not known here"
            wrong = known[name](part, f"{dot}{name}") if name in known else None
            if wrong:
                return wrong
        return None

    return rule


def _hex(value: Any, where: str) -> str | None:
    fits = isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None
    return None if fits else f"{where} is {_shown(value)}, not a SHA-256"


def _anything(value: Any, where: str) -> None:
    return None


def _form(value: Any, where: str) -> str | None:
    try:
        form_from(value)
    except checks.InputError as wrong:
        return f"{where}: {wrong}"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


TEXT, NUMBER = of_type("text", str), of_type("a number", int, float)
WHOLE, FLAG = of_type("a whole number", int), of_type("true or false", bool)
NUMBERS = listed(NUMBER)

# -- the files --------------------------------------------------------------------------------------------------

OPTIONS = {
    "heads": either(WHOLE, one_of("auto")), "method": one_of(*METHODS), "rank": either(WHOLE, one_of("auto", None)),
    "seconds": either(NUMBER, one_of(None)), "seed": WHOLE, "device": either(TEXT, one_of(None))}
# Settings of one learner or another.
OWN = {"search": one_of(*SEARCHES), "polish": FLAG, "max_heads": WHOLE, "starts": WHOLE, "limit": WHOLE,
       "memory": WHOLE, "form": either(_form, one_of("auto", *LINEAR))}
CONFIG = record({"kind": one_of(RUN)}, {
    "command": TEXT, "examples": TEXT, "digest": _hex, "options": record(OPTIONS, OWN),
    "more": record({}, {"truth": _hex, "thresholds": mapping(_anything), "fresh": either(WHOLE, FLAG)}),
    "hidden_heads": WHOLE,
    "width": either(WHOLE, TEXT),  # a sweep over widths is written as it was asked for

    "seed": WHOLE}, more=True, together={"options": ("digest", "examples")})
PHASE = record({"phase": TEXT, "round": WHOLE, "seconds": NUMBER}, {
    "accepted": WHOLE, "rows": WHOLE, "sum_error": NUMBER, "center_error": NUMBER, "hull_angle": NUMBER,
    "singular_values": NUMBERS, "residual_quantiles": listed(NUMBER, 1)}, more=True,
    together={"accepted": ("rows",), "singular_values": ("residual_quantiles",)})
EVENT = record({"stage": TEXT, "seconds": NUMBER}, {
    "residual": NUMBER, "residuals": listed(NUMBER, 1), "error": NUMBER, "unseen": NUMBER, "gap": NUMBER,
    "heads": WHOLE, "sequences": WHOLE, "curve": listed(listed(NUMBER, 2)), "starts": NUMBERS, "agreeing": WHOLE,
    "reason": TEXT, "singular_values": NUMBERS, "phases": listed(PHASE)}, more=True,
    together={"gap": ("heads", "sequences"), "agreeing": ("starts",), "singular_values": ("gap",)})
MANIFEST = record({
    "kind": one_of(RUN),
    "status": record({"kind": one_of(*STATUSES), "sentence": TEXT, "numbers": mapping(NUMBER)}),
    "stats": record({"held_out_error": NUMBER, "examples": WHOLE, "held_out": WHOLE, "used": WHOLE, "floor": WHOLE,
                     "products": WHOLE, "seconds": NUMBER},
                    {"rank": either(WHOLE, one_of(None)), "out_rank": either(WHOLE, one_of(None)),
                     "key_groups": listed(listed(WHOLE)), "out_of_time": FLAG}, more=True),
    "trace": listed(EVENT), "versions": mapping(TEXT),
    # Names of the run's own files and no others: nothing else is opened on a manifest's word.
    "sha256": record(dict.fromkeys(FILES[:2], _hex), dict.fromkeys(FILES[2:], _hex))},
    {"ranks": listed(record({"sequences": WHOLE}, {"shards": listed(TEXT)}), 1)})
CLAIM = {"name": TEXT, "statement": TEXT, "assumption": TEXT, "holds": one_of("yes", "no", "undecided"),
         "reason": TEXT, "numbers": mapping(NUMBER)}
CERTIFICATE = record({"kind": one_of(CERTIFIED), "confidence": NUMBER, "settings": mapping(_anything),
                      "layer_sha256": _hex, "claims": listed(record(CLAIM))}, more=True)
