"""What may be done next, as data: the policy asks for it, the loop does it and answers with numbers.

Every action has a name, which is the name of its stage and of what it finds; its randomness is seeded by it. It
says why it was chosen, for people who watch; two that differ in that alone are one action.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.learning.candidate import Seen


def _why(usual: str) -> str:
    """The field with the usual reason of a kind of action; the policy gives another where there is one."""
    said: str = field(default=usual, compare=False, kw_only=True)
    return said


@dataclass(frozen=True)
class Span:
    """Moments of the labels, or of what ``beside`` leaves of them."""

    name: str
    beside: str | None = None
    why: str = _why("there are rows enough for moments to show the span of the heads")


@dataclass(frozen=True)
class Spanned:
    heads: int  # at the gap of the singular values
    gap: float  # the ratio there


@dataclass(frozen=True)
class Unmix:
    """Heads inside the span of the moments, from random starts until one leaves less than ``enough``."""

    name: str
    heads: int
    enough: float
    why: str = _why("heads are looked for inside the span of the moments")


@dataclass(frozen=True)
class Unmixed:
    names: tuple[str, ...]  # distinct results, the best first
    residuals: tuple[float, ...]


@dataclass(frozen=True)
class Start:
    """Gauss–Newton on all of Θ to a rough fit, from the random point of that number or from ``base``."""

    name: str
    heads: int
    number: int = 0
    base: str | None = None
    times: int = 1  # the usual rows
    own: bool = False  # beside a linear function of the row's own token
    limit: int | None = None  # iterations, if fewer than were asked for
    why: str = _why("a random start, refined roughly")


@dataclass(frozen=True)
class Glance:
    """Do the labels, as they stand, show what they are? Answered with a word of evidence.CAUSES, or none. ``rows``:
    do they show that they belong to other rows?"""

    name: str
    rows: bool = False
    why: str = _why("labels that show at once what they are end the search early")


@dataclass(frozen=True)
class Polish:
    """From ``base`` to the floor; ``grow`` adds a head first (from what is left, if there are moments of it),
    ``drop`` takes away the one missed least, ``merge`` makes equal ones one."""

    name: str
    base: str
    times: int = 1
    everything: bool = False  # on all rows
    free: bool = False  # without a low rank, whatever shows
    limit: int | None = None
    grow: str | None = None  # the name of a span, or "random"
    drop: bool = False
    merge: bool = False
    why: str = _why("this start came nearest: on to the floor")


@dataclass(frozen=True)
class Rung:
    """A student of the descent: heads of q columns in Θ and p in W, and how hard its weights are held down."""

    heads: int
    q: int
    p: int
    decay: float

    @property
    def name(self) -> str:
        return f"{self.heads}-{self.q}-{self.p}" + (f"-held-{self.decay:g}" if self.decay else "")


@dataclass(frozen=True)
class Descend:
    """Adam on factors."""

    name: str
    rung: Rung
    why: str = _why("tokens are not white, or too few for moments: descent on factors comes first")


@dataclass(frozen=True)
class Refine:
    """The descent of that name pruned and taken to the floor, in factors; ``limit``: in at most as many rounds."""

    name: str
    base: str
    heads: int
    limit: int | None = None
    why: str = _why("the descent came near: heads too many are pruned, the rest goes to the floor")


@dataclass(frozen=True)
class Probe:
    """Does what ``base`` leaves depend on the inputs? Answered with yes or no."""

    name: str
    base: str
    why: str = _why("something is left on other sequences: does it depend on the inputs?")


@dataclass(frozen=True)
class Place:
    """Does what ``base`` leaves depend on where tokens stand, though no layer's would? Answered with yes or no."""

    name: str
    base: str
    why: str = _why("something is left that depends on the inputs: does it depend on where tokens stand?")


@dataclass(frozen=True)
class Spare:
    """Do the features of the heads depend on each other to ``tolerance``? Answered with yes or no."""

    name: str
    base: str
    tolerance: float
    why: str = _why("the labels are met: is a head spare?")


@dataclass(frozen=True)
class SetAside:
    """Leave out the sequences that ``base`` misses by far; answered with their number."""

    name: str
    base: str
    why: str = _why("a fit may miss some sequences by far because their labels are wrong")


Action = Glance | Span | Unmix | Start | Polish | Descend | Refine | Probe | Place | Spare | SetAside
Answer = Spanned | Unmixed | Seen | bool | int | str
