"""How many bytes a learner holds at once, and what for: one budget, of which every part of it has a share.

Without a limit the shares are what serves two cores and a few gigabytes. Under a limit of so many bytes for the
whole process, what Python and torch take (FIXED) and the examples in memory come off first; of the rest every share
is a part, and never more than without. They depend on the limit and on the sizes of the examples alone, not on what
is free at the moment: a run that goes on has the same.

The shares do not add up to the whole, because what they count is met several times over: rows in two precisions and
with what is left of them, features where a step begins and where it ends, intermediates some ten at once.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from headway.core import checks
from headway.core.devices import give_back, room

FIXED = 400 << 20  # bytes of Python, torch and their libraries at work
OF_EACH = 64  # bytes for every sequence of a list, wherever it lies: numbers of it, its hash
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
         "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
PARTS = {"rows": 0.2, "kept": 0.25, "cache": 0.18, "chunk": 0.025, "moments": 0.15, "piece": 0.015, "block": 0.06,
         "dense": 0.04, "probe": 0.05}
WHOLE = 8 << 30  # bytes that all of it comes to without a limit, about
HALF = 0.5  # of what is left may go to what depends on the layer alone


@dataclass(frozen=True)
class Budget:
    """Bytes of each kind at once. ``free``: what there is for all together; None: no limit was given."""

    rows: int = 768 << 20  # tokens and labels held for a solve
    kept: int = 4 << 30  # queries, keys, values and patterns that thin factors may keep
    cache: int = 1 << 30  # patterns and features of free heads; beyond it they are computed again
    chunk: int = 48 << 20  # one intermediate (n, k, m, d)
    moments: int = 128 << 20  # rows prepared for moments; beyond it they are read again
    piece: int = 16 << 20  # read at once from a long list
    block: int = 1 << 62  # sequences looked through, in float64
    dense: int = 64 << 20  # one intermediate where curvature is formed as a matrix
    probe: int = 1 << 62  # what one probe of the residual looks at
    limit: int | None = None
    free: int | None = None

    def at(self, device: torch.device, part: str) -> int:
        """This share on a device: an accelerator may have more, unless a limit was given."""
        size: int = getattr(self, part)
        return size if self.limit is not None else room(device, size)

    def some(self, count: int, each: float, part: str = "block") -> int:
        """``count``, or as many as this share holds of ``each`` bytes; 16 at least."""
        return min(count, max(16, int(getattr(self, part) / max(each, 1))))

    def tidy(self) -> None:
        """Between pieces, where there is a limit: what was freed goes back to the system."""
        if self.limit is not None:
            give_back()

    def need(self, size: float, what: str) -> None:
        """Refuse a limit under which ``size`` bytes, which depend on the layer alone, leave too little for rows."""
        if self.limit is None or self.free is None or size <= HALF * self.free:
            return
        least = math.ceil(1.05 * (self.limit - self.free + size / HALF) / 2**20)
        checks.refuse("memory", f"at least about {least} MiB for {what}", in_words(self.limit),
                      f"memory='{least}MiB', or more")


def within(limit: int, held: int, count: int, already: int | None) -> Budget:
    """The budget under a limit, for a list of ``count`` sequences that takes ``held`` bytes of memory; ``already``:
    what the process holds now."""
    free = limit - FIXED - held - OF_EACH * count
    least = math.ceil(1.05 * (FIXED + held + OF_EACH * count + (64 << 20)) / 2**20)
    if free < 32 << 20:
        own = f", {held >> 20} MiB for the examples in memory" if held >> 20 else ""
        checks.refuse("memory", f"at least about {least} MiB: {FIXED >> 20} MiB for Python and torch{own}, and "
                      "some to work with", in_words(limit), f"memory='{max(least, 1024)}MiB'")
    usual = Budget()
    shares = {name: min(getattr(usual, name), int(part * free)) for name, part in PARTS.items()}
    working = min(free, WHOLE)
    if already is not None and already - held > FIXED and already + working > limit:
        least = (already + working) // 2**20 + 1
        checks.refuse("memory", f"room for about {working >> 20} MiB beside what this process holds already "
                      f"({already >> 20} MiB)", in_words(limit),
                      f"memory='{least}MiB', or a process of its own (headway learn --memory)")
    return replace(usual, **shares, limit=limit, free=free)


def size_of(name: str, value: Any, hint: str = "8GiB") -> int | None:
    """Bytes, given as a number of them or in words such as 8GiB, 500 MB."""
    if value is None:
        return None
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", value)
        size = None if found is None or found[2].lower() not in UNITS else (
            float(found[1]) * UNITS[found[2].lower()])
    else:
        known = isinstance(value, (int, float)) and not isinstance(value, bool)
        size = float(value) if known and math.isfinite(value) else None
    if size is None or size < 1:
        checks.refuse(name, "bytes as a number above 0, or with a unit among KB, MB, GB, TB, KiB, MiB, GiB, TiB",
                      repr(value), f"{name}={hint}" if name.startswith("-") else f"{name}={hint!r}")
    return int(size)


def in_words(size: int) -> str:
    """1.5 GiB, 300 MiB, 20 bytes."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= UNITS[unit.lower()]:
            return f"{size / UNITS[unit.lower()]:.4g} {unit}"
    return f"{size} bytes"


assert set(PARTS) <= {field.name for field in fields(Budget)}
BUDGET = Budget()
