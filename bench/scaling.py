"""What learning on many GPUs costs, predicted: arithmetic at the rate measured on one, sums over ranks at the
bandwidths stated here. No such machine was had; docs/scale.md says so where it shows this.

A product with the curvature in thin factors, n rows in all on G ranks, m heads of size q, width d:

    seconds = 18·d·m·q·(n/G) / rate + bytes / bandwidth,      bytes = 4·2·(G − 1)/G·((m·q)² + 3·d·m·q)

The bytes are those of two totals, counted in tests/test_ranks.py and bench/ranks.py: the right-hand side of the
projection, (m·q + 1) × m·q, and the product, one number for each unknown in A, B and V.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.core.counting import Size
from headway.linalg.totals import price
from pages import Record

INSIDE, BETWEEN, SLOW = 300e9, 50e9, 12.5e9  # bytes a second a GPU: NVLink; 400 and 100 Gb/s between machines
A_MACHINE = 8  # GPUs
LENGTH, TIMES = 32, 6  # tokens of a sequence; times the counting floor of them, as a refinement takes (ladder.ROWS)
SHAPES = ((384, 12, 32), (1024, 16, 64), (2048, 16, 128), (4096, 32, 128), (8192, 64, 128))
RANKS = (1, 8, 64)
BATCH = 256 * LENGTH  # rows of a step of the Adam whose steps were timed
WIDTH, HEADS = 384, 12  # of its layer


@dataclass(frozen=True)
class Product:
    """Rows in all, and what one product on so many ranks takes."""

    rows: int
    sent: int  # bytes, by each rank
    arithmetic: float  # seconds
    inside: float  # seconds on the way, NVLink or 400 Gb/s where there is more than one machine
    slow: float  # the same over 100 Gb/s

    @property
    def seconds(self) -> float:
        return self.arithmetic + self.inside


def rate() -> float:
    """Flops a second of one H200, from the steps of Adam on whole Θ and W in bench/results/real.json: forward 4d² +
    4kd a row and head, three times that with the gradient."""
    step = 3 * HEADS * (4 * WIDTH**2 + 4 * LENGTH * WIDTH) * BATCH
    rows = Record("real").rows
    return min(step * row["Adam steps"] / row["Adam, s"] for row in rows)


def product(width: int, heads: int, size: int, ranks: int, flops: float) -> Product:
    rows = TIMES * LENGTH * Size(width, width, LENGTH, "none", size, size).floor(heads)
    columns, unknowns = heads * size, 3 * width * heads * size
    sent = price((columns + 1) * columns, 4, ranks)[1] + price(unknowns + columns, 4, ranks)[1]
    fast = INSIDE if ranks <= A_MACHINE else BETWEEN
    return Product(rows, sent, 18 * width * columns * rows / ranks / flops, sent / fast, sent / SLOW)


def even(width: int, heads: int, size: int, flops: float, bandwidth: float, ranks: int = 64) -> float:
    """Rows a rank at which arithmetic takes as long as what is sent: below, communication dominates."""
    found = product(width, heads, size, ranks, flops)
    return found.sent / bandwidth * flops / (18 * width * heads * size)


def table() -> str:
    """docs/scale.md: one product, on one GPU, a machine of eight and eight such machines."""
    flops = rate()
    lines = ["| width, heads | rows in all | GPUs | sent by each, MB | arithmetic, ms | sums, ms | over 100 Gb/s, "
             "ms | faster than one GPU by |", "|---" * 8 + "|"]
    for width, heads, size in SHAPES:
        one = product(width, heads, size, 1, flops)
        for ranks in RANKS:
            it = product(width, heads, size, ranks, flops)
            cells = (f"{width}, {heads} × {size}", f"{it.rows:,}", ranks, f"{it.sent / 1e6:,.1f}",
                     _ms(it.arithmetic), _ms(it.inside), _ms(it.slow), f"{one.seconds / it.seconds:.1f}")
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def bounds() -> str:
    """The rows a rank below which sums take longer than products: with m·q = d the same at every width, but for the
    offset, since both are some d² numbers."""
    flops = rate()
    least = [max(even(*shape, flops, bandwidth) for shape in SHAPES) for bandwidth in (INSIDE, BETWEEN, SLOW)]
    return "{:,.0f}, {:,.0f} and {:,.0f}".format(*(10 * math.ceil(rows / 10) for rows in least))


def _ms(seconds: float) -> str:
    return "0" if seconds == 0 else f"{1e3 * seconds:.2g}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"
