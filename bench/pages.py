"""Measured numbers in README and docs are written from bench/results, never by hand.

    python bench/pages.py            # is what the pages say what was measured? exit code 1 if not
    python bench/pages.py --write    # write it anew

A page holds a block between two marks that Markdown does not show,

    <!-- numbers:begin NAME -->
    ...
    <!-- numbers:end -->

and bench/claims.py says what stands in the block NAME. The tests check every page.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT
from headway.core.files import write_bytes

PAGES = ("README.md", "bench/NOTES.md", "docs/certificates.md", "docs/hardness.md", "docs/howto/cluster.md",
         "docs/howto/count.md", "docs/learning.md", "docs/linear.md", "docs/methods.md", "docs/questions_needed.md",
         "docs/rules.md", "docs/scale.md", "docs/sculpting.md", "docs/training.md", "docs/verdicts.md")
MARKED = re.compile(r"(<!-- numbers:begin (\S+) -->\n)(.*?)(<!-- numbers:end -->)", flags=re.S)


class Record:
    """A file of bench/results: its rows, its summary, where it comes from."""

    def __init__(self, name: str) -> None:
        self.kept: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
        self.rows: list[dict[str, Any]] = self.kept["rows"]
        self.summary: dict[str, Any] = self.kept["summary"]

    def column(self, name: str, **where: Any) -> list[Any]:
        """The values of a column in the rows that have ``where``."""
        return [row[name] for row in self.rows if all(row[key] == value for key, value in where.items())]

    @property
    def command(self) -> str:
        return f"`{self.kept['command']}`"

    @property
    def commit(self) -> str:
        """Short; ≤ where only the commit that stored the record is known."""
        if "commit" not in self.kept:
            return f"≤ {self.kept['stored_in'][:7]}"
        base, *changes = self.kept["commit"].split("+")
        return "+".join([base[:7], *changes])


def kept(name: str) -> bool:
    """Whether the measurement has been made."""
    return (RESULTS / f"{name}.json").exists()


def upto(values: Iterable[float] | float) -> str:
    """A bound that holds: one digit, rounded up."""
    largest = values if isinstance(values, float) else max(values)
    return f"{float(Context(prec=1, rounding=ROUND_CEILING).create_decimal(repr(largest))):.0e}"


def span(values: Sequence[float], form: str = ".0f") -> str:
    """Least to largest."""
    ends = [format(min(values), form), format(max(values), form)]
    return " to ".join(dict.fromkeys(ends))


def of(good: Iterable[Any], words: str = "") -> str:
    """``all 40 layers``, or ``39 of 40 layers``."""
    each = [bool(one) for one in good]
    count = f"all {len(each)}" if all(each) else f"{sum(each)} of {len(each)}"
    return f"{count} {words}".strip()


def listed(values: Iterable[Any]) -> str:
    """a, b and c."""
    *first, last = [f"{v:,}" if isinstance(v, int) else str(v) for v in values]
    return f"{', '.join(first)} and {last}" if first else last


def prose(text: str) -> str:
    """As wide as the pages; what stands in backticks stays on one line."""
    whole = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", "\0"), text)
    return textwrap.fill(whole, 120, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def table(rows: Sequence[tuple[str, str, Record]], *, first: str = "what") -> str:
    """Markdown: what, result, command, commit."""
    lines = [f"| {first} | result | command | measured at |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {said} | {record.command} | {record.commit} |"
                                for what, said, record in rows)])


def renewed(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """The page with every marked block as the results have it."""
    if text.count("<!-- numbers:begin ") != len(MARKED.findall(text)):
        raise ValueError("a block of numbers is opened and not closed")
    return MARKED.sub(lambda found: f"{found[1]}{blocks[found[2]]()}\n{found[4]}", text)


def main() -> int:
    from claims import BLOCKS

    stale = []
    for name in PAGES:
        path: Path = ROOT / name
        before = path.read_text()
        after = renewed(before, BLOCKS)
        if after != before:
            stale.append(name)
            if "--write" in sys.argv[1:]:
                write_bytes(path, after.encode())
    for name in stale:
        print(f"{name}: " + ("written" if "--write" in sys.argv[1:] else "says what was not measured"), flush=True)
    return int(bool(stale) and "--write" not in sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
