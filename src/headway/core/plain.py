"""Results as plain data for programs in any language: JSON knows no NaN and no infinity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """The same data with None wherever a float is no number; tuples become lists.

    >>> finite({"a": (1.0, float("inf"))})
    {'a': [1.0, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return value
