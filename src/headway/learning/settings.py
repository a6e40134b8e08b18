"""A learner's own settings: small frozen objects, one for each method of learn().

``learn(data, method=Moments(starts=12))`` is the learner with these settings; ``method="moments"`` takes the
defaults. A setting that a learner does not have is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from headway.core import checks
from headway.core.names import METHODS, SEARCHES

if TYPE_CHECKING:
    from headway.core.layer import AttentionLayer
    from headway.sculpting.thresholds import Thresholds


@dataclass(frozen=True)
class Settings:
    """What all of them do: refuse what they do not know, check what they do."""

    method: ClassVar[str]

    def __new__(cls, *_: Any, **given: Any) -> Settings:
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                checks.refuse(name, f"a setting of {cls.__name__}: {', '.join(known) or 'it has none'}",
                              f"{name}={given[name]!r}", f"{cls.__name__}() for the defaults")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("starts", "limit", "max_heads"):
            if hasattr(self, name):
                checks.whole(name, getattr(self, name))

    def options(self) -> dict[str, Any]:
        """Plain numbers and words, as a run keeps them."""
        return {field.name: getattr(self, field.name) for field in fields(self)
                if field.name not in ("thresholds", "truth")}


@dataclass(frozen=True)
class Auto(Settings):
    """Chooses among moments, factors and starts by the inputs. ``max_heads``: the most heads it looks for.
    ``starts``: random starts at one head count. ``limit``: Gauss–Newton iterations in one solve."""

    method: ClassVar[str] = "auto"
    max_heads: int = 32
    starts: int = 6
    limit: int = 100


@dataclass(frozen=True)
class Moments(Auto):
    """The span of the attention matrices from second moments, the heads inside it, Gauss–Newton to the floor."""

    method: ClassVar[str] = "moments"


@dataclass(frozen=True)
class Factors(Auto):
    """Descent on thin factors with more heads than needed, pruned and refined."""

    method: ClassVar[str] = "factors"


@dataclass(frozen=True)
class Starts(Auto):
    """Gauss–Newton from random points."""

    method: ClassVar[str] = "starts"


@dataclass(frozen=True)
class Sculpt(Auto):
    """The first paper's algorithm, for 2 to 8 white tokens and many examples. ``search``: inside the hull,
    "gauss-newton" or the paper's "net". ``polish``: whether to go on to the floor of the arithmetic.
    ``thresholds``: the constants of sculpting, which are ours. ``truth``: a layer to which the trace then gives
    distances and at which nothing else looks."""

    method: ClassVar[str] = "sculpt"
    search: str = SEARCHES[0]
    polish: bool = True
    thresholds: Thresholds | None = None
    truth: AttentionLayer | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("search", self.search, SEARCHES)


@dataclass(frozen=True)
class Adam(Settings):
    """Adam on thin factors if ``rank`` is told, else on whole Θ_i and W_i, in plain coordinates: a baseline."""

    method: ClassVar[str] = "adam"


@dataclass(frozen=True)
class Descent(Settings):
    """Adam on whole Θ_i and W_i in whitened coordinates: a baseline."""

    method: ClassVar[str] = "descent"


@dataclass(frozen=True)
class Lbfgs(Settings):
    """L-BFGS with a line search: a baseline."""

    method: ClassVar[str] = "lbfgs"


LEARNERS: dict[str, type[Settings]] = {
    kind.method: kind for kind in (Auto, Moments, Factors, Starts, Sculpt, Adam, Descent, Lbfgs)}


def resolved(method: str | Settings) -> Settings:
    """Settings from a name or from themselves."""
    if isinstance(method, Settings):
        return method
    return LEARNERS[checks.choice("method", method, METHODS)]()
