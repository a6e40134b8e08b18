"""Every constant of sculpting, by name. The phases are the paper's; these numbers are ours."""

from __future__ import annotations

from dataclasses import dataclass, fields

from headway.core import checks


@dataclass(frozen=True)
class Thresholds:
    """Every constant of sculpting: ours, chosen by measurement, not taken from the paper."""

    first: float = 0.04  # part of all rows accepted in the first round
    shrink: float = 0.5  # each later round accepts this part of what the one before accepted,
    last: float = 24.0  # but at least this many times d²/(k − 1): a row gives k − 1 independent constraints
    least_weight: float = 0.02  # tokens with less weight than this give no constraint
    floor: float = 2.0  # residuals below that of the (floor · d²)-th best row count as equal
    sum_rows: float = 200.0  # rows for the refined sum, times d
    trim: float = 0.2  # of those, the worst part by residual is dropped
    radius: float = 1.0  # distance of the heads from Θ̄, in units of √(m − 1)·‖Θ̄‖, right for orthogonal heads
    rounds: int = 8  # of sculpting and refining, at most
    settled: float = 0.05  # stop when the rows are few and ΣW moves by less than this part of its crude error
    equal_tokens: bool = False  # use sequences with two equal tokens; of ±1 tokens these are common at small d only
    most_tuples: int = 200_000  # phase 6 by a net is as fine as this allows
    sharpen: int = 10  # rounds of first-order sharpening at the end, at most; 0 for none
    sharpen_rows: float = 48.0  # rows for it, times d²/(k − 1)
    sweeps: int = 4  # alternations in one such round

    def __post_init__(self) -> None:
        for name in ("first", "shrink", "least_weight", "trim", "settled"):
            value = getattr(self, name)
            if not 0 <= checks.number(f"thresholds.{name}", value) < 1:
                checks.refuse(f"thresholds.{name}", "a part, at least 0 and below 1", value, "the default")
        for name in ("last", "floor", "sum_rows", "radius", "sharpen_rows"):
            checks.number(f"thresholds.{name}", getattr(self, name), strictly=True)
        for name, least in (("rounds", 1), ("sweeps", 1), ("sharpen", 0), ("most_tuples", 1)):
            checks.whole(f"thresholds.{name}", getattr(self, name), least)

    def asdict(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
