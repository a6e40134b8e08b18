"""A form as people write it, ``rotary:base=500000,layout=pairs+causal``, and as data for JSON.

Parts are joined by +, their settings follow a colon. Both say what has to be known before a layer of that form is
learned: which parts there are, and their sizes. The unknowns themselves are zeros of one head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from headway.core import checks
from headway.core.forms import Form
from headway.core.gauge import as_factored
from headway.core.layer import AttentionLayer, load_layer, of_softmax
from headway.core.positions import OffsetTable, Slope

STORED = ".safetensors"
ANSWERS = {"yes": True, "no": False}
EXAMPLE = "--form rotary:base=500000+causal"
Reader = Callable[[str], Any]


def _answer(text: str) -> bool:
    return ANSWERS[text]


# Part: its settings, and how each is read. "factors" adds nothing: plain scores, in factors.
PARTS: dict[str, dict[str, Reader]] = {
    "factors": {}, "rotary": {"base": float, "layout": str, "turned": int}, "slope": {},
    "table": {"reach": int, "both": _answer}, "t5": {"buckets": int, "far": int, "both": _answer},
    "cap": {"value": float}, "sink": {}, "normed": {"eps": float}, "gated": {}, "causal": {"prefix": int},
    "window": {"size": int}}
NEEDED = {"table": "reach", "cap": "value", "window": "size"}
KINDS = {"a whole number": int, "a number": float, "yes or no": _answer}


def form_of(text: str) -> Form:
    """The form that the words say, or that of the stored layer whose path they are.

    >>> form_of("rotary:layout=pairs+causal").describe()
    'rotary scores, base 10,000, pairs; causal'
    """
    if text.endswith(STORED):
        stored = load_layer(Path(text))
        if isinstance(stored, AttentionLayer):
            of_softmax("--form", stored, f"--form {stored.scores}")
        return as_factored(stored).form
    said: dict[str, dict[str, Any]] = {}
    for part in text.split("+"):
        name, _, rest = part.strip().partition(":")
        if name not in PARTS:
            checks.refuse("--form", "plain, auto, linear, linear/k, the path of a stored layer (it ends in "
                          f"{STORED}), or some of {', '.join(PARTS)} joined by +", repr(text), EXAMPLE)
        if name in said:
            checks.refuse("--form", f"{name} once", f"twice in {text!r}", EXAMPLE)
        said[name] = _settings(name, rest)
    if len({"table", "t5", "slope"} & set(said)) > 1:
        checks.refuse("--form", "one of table, t5 and slope", repr(text), EXAMPLE)
    return form_from(_data(said))


def _settings(name: str, text: str) -> dict[str, Any]:
    """What follows the colon, read."""
    known, found = PARTS[name], {}
    for one in text.split(",") if text else ():
        key, equals, value = one.strip().partition("=")
        if key not in known or not equals:
            listed = ", ".join(f"{name}=…" for name in known) or "nothing"
            checks.refuse(f"--form {name}", f"{listed} after the colon", repr(one), EXAMPLE)
        try:
            found[key] = known[key](value)
        except (ValueError, KeyError):
            kind = next(words for words, reader in KINDS.items() if reader is known[key])
            checks.refuse(f"--form {name}", f"{key}={kind}", repr(one), EXAMPLE)
    if name in NEEDED and NEEDED[name] not in found:
        checks.refuse(f"--form {name}", f"its {NEEDED[name]}", repr(name), f"--form {name}:{NEEDED[name]}=16")
    return found


def _data(said: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Words as data."""
    sight = {"causal": "causal" in said, "window": said.get("window", {}).get("size"),
             "prefix": said.get("causal", {}).get("prefix", 0)}
    data: dict[str, Any] = {"sight": sight}
    for name, stored in (("rotary", "rotary"), ("cap", "cap"), ("sink", "sink"), ("normed", "normed"),
                         ("gated", "gate")):
        if name in said:
            data[stored] = said[name]
    if "slope" in said:
        data["offsets"] = {"kind": "slope"}
    elif "t5" in said:
        data["offsets"] = {"kind": "t5", "buckets": 32, **said["t5"]}
    elif "table" in said:
        both = said["table"].get("both", True)
        reach = checks.whole("--form table:reach", said["table"]["reach"])
        data["offsets"] = {"kind": "clipped", "both": both, "buckets": (1 + both) * reach + 1}
    return data


def words_of(form: Form) -> str | None:
    """What ``form_of`` reads as this form; None where frequencies are given, which have no words."""
    rotary, table = form.rotary, form.offsets
    if rotary is not None and rotary.frequencies is not None:
        return None
    words = []
    if rotary is not None:
        turned = {} if rotary.turned is None else {"turned": rotary.turned}
        words.append(_part("rotary", base=rotary.base, layout=rotary.layout, **turned))
    if isinstance(table, OffsetTable):
        both = next(word for word, answer in ANSWERS.items() if answer is table.both)
        words.append(_part("table", reach=table.far, both=both) if table.kind == "clipped" else
                     _part("t5", buckets=table.values.shape[1], far=table.far, both=both))
    words += ["slope"] if isinstance(table, Slope) else []
    words += [] if form.cap is None else [_part("cap", value=form.cap.value)]
    words += [] if form.sink is None else ["sink"]
    words += [] if form.normed is None else [_part("normed", eps=form.normed.eps)]
    words += [] if form.gate is None else ["gated"]
    sight = form.sight
    words += [_part("causal", **({"prefix": sight.prefix} if sight.prefix else {}))] if sight.causal else []
    words += [] if sight.window is None else [_part("window", size=sight.window)]
    return "+".join(words or ["factors"])


def _part(name: str, **settings: Any) -> str:
    told = ",".join(f"{key}={value:g}" if isinstance(value, float) and float(f"{value:g}") == value else
                    f"{key}={value}" for key, value in settings.items())
    return f"{name}:{told}" if told else name


def data_of(form: Form) -> dict[str, Any]:
    """Its settings, and how many buckets a table has: what is known of a form before it is learned."""
    data = form.settings()
    if isinstance(form.offsets, OffsetTable):
        data["offsets"] = {**data["offsets"], "buckets": form.offsets.values.shape[1]}
    return data


def described(data: Any) -> str:
    """What a run's settings say of its form, for people; plain where they say nothing."""
    return "plain" if data is None else data if isinstance(data, str) else form_from(data).describe()


def form_from(data: Any) -> Form:
    """The other way round: its unknowns are zeros of one head."""
    one = torch.zeros(1, dtype=torch.float64)
    given = dict(data) if isinstance(data, Mapping) else data
    tensors = {"slope": one, "sink": one, "norm_query": one, "norm_key": one, "gate": one.new_zeros(1, 2, 1)}
    if isinstance(given, dict) and isinstance(given.get("offsets"), Mapping) and "buckets" in given["offsets"]:
        offsets = dict(given["offsets"])
        buckets = checks.whole("form.offsets.buckets", offsets.pop("buckets"))
        given["offsets"], tensors["offsets"] = offsets, one.new_zeros(1, buckets)
    return Form.read(given, tensors)
