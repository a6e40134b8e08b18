"""How far a layer was off on examples it was not learned from: what a certificate counts, kept to be added to.

What is kept of a sequence is its error and a hash of it. That is enough to add later ones to the count, and to see
which have been counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.core import checks
from headway.core.factored import FactoredLayer
from headway.core.layer import AttentionLayer

KIND = "headway-held-out-1"
NUMBERS = ("deviation", "widest", "row_bound", "row_offset")
WORDS = (*NUMBERS, "boolean", "out_width", "tokens", "first", "layer", "degree", "keys")


@dataclass(frozen=True, eq=False, repr=False)
class Errors:
    """Root mean square error of each sequence, the labels' deviation, and bounds on what an error can be."""

    each: Tensor  # (n,) in the order they came
    deviation: float  # of the first labels from their mean: what tolerances are parts of
    widest: float  # largest norm of a token, or of a key where keys come from another sequence
    boolean: bool  # all of them ±1
    row_bound: float  # no output row of this layer is longer, for tokens (keys) no longer than ``widest``
    out_width: int
    tokens: str = "tokens"  # what these bounds are about
    row_offset: float = 0.0  # the part of ``row_bound`` that does not grow with the tokens
    first: int = 0  # how many sequences ``deviation`` is of
    layer: str = ""  # ``fingerprint`` of the layer whose errors they are
    hashes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # (n,) of the sequences
    keys: int = 1  # of the longest sequence: without a softmax rows grow with their number
    degree: int = 1  # the power of the tokens' length with which rows grow: 3 without a softmax

    def __len__(self) -> int:
        return len(self.each)

    def __repr__(self) -> str:
        return f"Errors(of {len(self)} sequences)"

    @property
    def later(self) -> np.ndarray:
        """Errors of the sequences after the first ones, (n − first,): the deviation is no choice of theirs."""
        return self.each[self.first :].numpy()

    def longest(self, R: float) -> float:
        """No output row of the layer is longer, for tokens (keys) no longer than R: ``row_bound`` grows as they
        do."""
        longer = (R / max(self.widest, 1e-300)) ** self.degree
        return (self.row_bound - self.row_offset) * longer + self.row_offset

    def stored(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors and words of a file; ``restored`` is the other way round."""
        return ({"errors": self.each, "hashes": torch.from_numpy(self.hashes)},
                {"kind": KIND, "about": json.dumps({name: getattr(self, name) for name in WORDS}, sort_keys=True)})

    @classmethod
    def restored(cls, name: str, tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> Errors:
        """The errors in a file of this name, refused if they are none that ``stored`` gave."""
        each, hashes = tensors.get("errors"), tensors.get("hashes")
        try:
            about: Any = json.loads(words.get("about", ""))
        except (ValueError, RecursionError):
            about = None
        whole = isinstance(about, dict) and set(about) == set(WORDS) and words.get("kind") == KIND
        if not (whole and each is not None and hashes is not None and each.dtype == torch.float64
                and hashes.dtype == torch.int64 and each.ndim == 1 and each.shape == hashes.shape
                and bool((each >= 0).all()) and _sound(about, len(each))):
            checks.refuse(name, "errors and hashes as headway certify keeps them", "others",
                          "headway certify RUN --examples FRESH --anew, which counts from the start")
        given: dict[str, Any] = {name: float(about[name]) if name in NUMBERS else about[name] for name in WORDS}
        return cls(each, **given, hashes=hashes.numpy())


def _sound(about: Mapping[str, Any], n: int) -> bool:
    numbers = [about[name] for name in NUMBERS]
    return (all(isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
                for value in numbers) and about["deviation"] > 0
            and type(about["boolean"]) is bool and type(about["out_width"]) is int and about["out_width"] > 0
            and type(about["first"]) is int and 0 < about["first"] <= n
            and about["tokens"] in ("tokens", "keys") and isinstance(about["layer"], str)
            and type(about["degree"]) is int and about["degree"] in (1, 3)
            and type(about["keys"]) is int and about["keys"] > 0)


def fingerprint(layer: AttentionLayer | FactoredLayer) -> str:
    """SHA-256 over what the layer computes with, in float64: whether errors are those of this very layer."""
    if isinstance(layer, AttentionLayer) and layer._factors is not None:
        layer = layer._factors  # which are the same wherever they are multiplied out
    form: dict[str, Any] = {"form": layer.form.settings(), "cross": layer.cross} if isinstance(
        layer, FactoredLayer) else {"mask": layer.mask, **({"scores": layer.scores} if layer.linear else {})}
    sha = hashlib.sha256(json.dumps(form, sort_keys=True).encode())
    own = {} if isinstance(layer, AttentionLayer) or layer.positions is None else {"positions": layer.positions}
    for name, value in sorted({**layer.tensors(), **own}.items()):
        sha.update(f"{name}{tuple(value.shape)}".encode())
        sha.update(value.detach().to("cpu", torch.float64).contiguous().numpy().tobytes())
    return sha.hexdigest()


def uncounted(counted: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Which of these sequences (n,) to add to those counted, bool (n,).

    None is counted twice. If all of those counted are here again, what there is beside them is new, repeats that
    the law itself makes included; if all of these were counted, none is. Anything between is refused: to leave out
    only what repeats would take away from the frequent ones.
    """
    values, at, times = np.unique(hashes, return_inverse=True, return_counts=True)
    had, again = np.unique(counted, return_counts=True)
    place = np.searchsorted(had, values)
    known = np.zeros(len(values), np.int64)
    inside = place < len(had)
    inside[inside] = had[place[inside]] == values[inside]
    known[inside] = again[place[inside]]
    common = int(np.minimum(known, times).sum())
    if common not in (0, len(counted), len(hashes)):
        checks.refuse("examples", "sequences none of which was counted before, or all that were and more",
                      f"{common} of {len(hashes)} that were, of {len(counted)} counted",
                      "the new ones alone, or, for another question, a certificate from the start (--anew)")
    order = np.argsort(at, kind="stable")  # equal ones side by side, in the order they came
    start = np.concatenate([[0], np.cumsum(times)])[at[order]]
    rank = np.empty(len(hashes), np.int64)
    rank[order] = np.arange(len(hashes)) - start
    return np.asarray(rank >= known[at])
