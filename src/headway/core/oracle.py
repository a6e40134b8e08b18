"""A black box: its answers checked, and, where its inputs are chosen, counted, kept and never asked for twice."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headway.core import checks
from headway.core.convert import as_function
from headway.core.counting import Size
from headway.core.examples import Examples, some_columns
from headway.core.files import read_tensors, write_tensors

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PLANS = ("random", "chosen", "auto")
BATCH = 64  # sequences that the box is given at a time, and that are lost at most where a run is killed
TRIES = 4  # with one batch, where the box fails
WAIT = 0.1  # seconds before the second try, then twice as long each time
SHORTEST = 5  # tokens in a sequence from which heads show on a line of keys
ASIDE = 8  # calls at the least for choosing and judging


def box_of(
    oracle: Callable[[Tensor], Any], mask: str, dtype: torch.dtype | None, device: torch.device | str | None
) -> Box:
    """The oracle with the precision and the device it is asked in: given, or those of its parameters."""
    first = next(oracle.parameters(), None) if isinstance(oracle, nn.Module) else None
    if dtype is None:
        dtype = torch.float64 if first is None else first.dtype
    if dtype not in DTYPES:
        checks.refuse("dtype", "float16, bfloat16, float32 or float64", dtype, "dtype=torch.float32")
    if device is None:
        device = "cpu" if first is None else first.device
    checks.device("device", device, "device='cpu'")
    if isinstance(oracle, nn.MultiheadAttention):
        oracle = as_function(oracle, causal=mask == "causal")
    return Box(oracle, dtype, torch.device(device))


@dataclass(frozen=True)
class Box:
    """A black box, its answers checked."""

    oracle: Callable[[Tensor], Any]
    dtype: torch.dtype
    device: torch.device

    def __call__(self, X: Tensor, out_width: int | str = "e") -> Tensor:
        # Copies both ways: an oracle may work in place, or answer in a buffer that it uses again.
        with torch.no_grad():
            Y = self.oracle(X.to(self.device, self.dtype, copy=True))
        if Y is None or isinstance(Y, (tuple, dict)):
            checks.refuse("the oracle's answer", "one tensor Y (n, k, e)", type(Y).__name__,
                          "lambda X: module(X)[0], where the first of several is meant")
        Y = checks.floating("the oracle's answer", Y, hint="look at what the oracle does to such an X")
        checks.shape("the oracle's answer", Y, (*X.shape[:2], out_width), "one output row per token of X")
        some_columns("the oracle's answer", tuple(Y.shape))
        return Y.to(self.device, copy=True)

    def probe(self, X: Tensor) -> None:
        """Refuse a box that does not take this dtype, or that answers differently to the same input."""
        try:
            one = self(X)
        except RuntimeError as error:
            other = self._other(X) if "type" in str(error) else None
            if other is None:
                raise
            checks.refuse("dtype", "the one that the oracle computes in",
                          f"{self.dtype}, to which it says: {str(error).splitlines()[0]}",
                          f"headway.ask(oracle, ..., dtype={other})")
        # Sums in another order are the same answer; a dropped unit is not.
        if float((one - self(X)).abs().max()) > 1e3 * torch.finfo(one.dtype).eps * float(one.abs().max()):
            checks.refuse("oracle", "the same answer to the same input", "two that differ",
                          "module.eval(), or learn from stored examples, with their noise")

    def _other(self, X: Tensor) -> torch.dtype | None:
        """A dtype that the oracle does take."""
        for dtype in DTYPES:
            try:
                with torch.no_grad():
                    self.oracle(X.to(self.device, dtype, copy=True))
            except RuntimeError:
                continue
            return dtype
        return None


@dataclass(frozen=True)
class Oracle:
    """A black box and how it may be asked: what ``ask`` returns for ``plan="chosen"`` and ``"auto"``. Nothing is
    asked until ``learn`` does."""

    box: Box
    width: int
    length: int
    plan: str
    budget: int | None = None
    seed: int = 0
    mask: str = "none"

    def __post_init__(self) -> None:
        if self.plan == "chosen" and self.mask != "none":
            checks.refuse("mask", "'none' with plan='chosen'", repr(self.mask), "plan='random'")
        if self.plan == "chosen" and self.length < SHORTEST:
            checks.refuse("length", f"at least {SHORTEST} with plan='chosen': shorter lines of keys do not tell a "
                          "head from its mirror image", self.length, f"length={SHORTEST}, or plan='random'")
        if self.budget is not None:
            checks.whole("budget", self.budget)
            self.enough(1)

    def enough(self, heads: int) -> None:
        """Refuse a budget that no learner could do with, before anything is asked."""
        least = self.least(heads)
        if self.budget is not None and self.budget < least:
            few = "1 head" if heads == 1 else f"{heads} heads"
            checks.refuse("budget", f"at least {least} calls: fewer sequences of {self.length} tokens have fewer "
                          f"equations than {few} of width {self.width} unknowns, with {ASIDE} kept for choosing "
                          "and judging", self.budget, f"budget={10 * least}, or longer sequences (length=)")

    def least(self, heads: int) -> int:
        """Calls below which no outputs, however wide, determine so many heads."""
        return Size(self.width, 4096, self.length).floor(heads) + ASIDE

    def digest(self) -> str:
        """Of all that decides what is asked, but for when to stop. Whether it is the same function nobody can know
        without asking."""
        own = [self.width, self.length, self.plan, self.seed, self.mask, str(self.box.dtype)]
        return hashlib.sha256(json.dumps(own).encode()).hexdigest()

    def __repr__(self) -> str:
        most = "" if self.budget is None else f", at most {self.budget} calls"
        return f"Oracle(width {self.width}, sequences of {self.length} tokens, plan {self.plan!r}{most})"


class SpentError(Exception):
    """The budget does not allow what was to be asked."""


class Asking:
    """One conversation with a black box. ``folder``: where every answer is kept as it comes; those that are there
    already are not asked for again."""

    def __init__(self, oracle: Oracle, folder: Path | None = None) -> None:
        self.oracle, self.folder = oracle, folder
        self.failures = 0  # of the box, that later tries made good
        self.known: dict[bytes, Tensor] = {}
        self.held: set[bytes] = set()  # of this conversation
        self.X: list[Tensor] = []
        self.Y: list[Tensor] = []
        self.files = 0
        self.dtype = oracle.box.dtype
        for path in sorted(folder.glob("*.safetensors")) if folder is not None and folder.is_dir() else []:
            tensors, _ = read_tensors(path)
            if set(tensors) != {"X", "Y"} or len(tensors["X"]) != len(tensors["Y"]):
                checks.refuse(str(path), "answers kept by headway", f"{sorted(tensors)}",
                              "delete it: they are asked for again")
            self.known.update(zip(_names(tensors["X"]), tensors["Y"], strict=True))
            self.files += 1
        self.replayed = len(self.known)

    @property
    def calls(self) -> int:
        """Sequences the answers are to, none counted twice."""
        return len(self.X)

    @property
    def rows(self) -> int:
        return self.calls * self.oracle.length

    @property
    def left(self) -> float:
        return math.inf if self.oracle.budget is None else self.oracle.budget - self.calls

    def __call__(self, X: Tensor) -> Tensor:
        """Answers to X (n, k, d) in float64. Raises ``SpentError`` before asking more than the budget allows."""
        asked = X.to(self.oracle.box.device, self.dtype)
        names = _names(asked)
        new = {name: i for i, name in reversed(list(enumerate(names))) if name not in self.held}
        if len(new) > self.left:
            raise SpentError
        order = sorted(new.values())
        absent = [i for i in order if names[i] not in self.known]
        for start in range(0, len(absent), BATCH):
            part = absent[start : start + BATCH]
            Y = self._answer(asked[part])
            self.known.update((names[i], y) for i, y in zip(part, Y.cpu(), strict=True))
            self._keep(asked[part], Y)
        self.held.update(new)
        for i in order:
            self.X.append(asked[i].cpu())
            self.Y.append(self.known[names[i]])
        return torch.stack([self.known[name] for name in names]).to(self.oracle.box.device, torch.float64)

    def _answer(self, X: Tensor) -> Tensor:
        for tried in range(TRIES):
            if tried:
                time.sleep(WAIT * 2 ** (tried - 1))
            try:
                return self.oracle.box(X, self.Y[0].shape[-1] if self.Y else "e")
            except checks.InputError:
                raise
            except Exception as error:  # whatever a service may fail with
                if checks.out_of_memory(error):
                    raise
                self.failures += 1
                words = (str(error).strip() or "no message").splitlines()[0].rstrip(".")
                said = f"{type(error).__name__}: {words}"
        kept = "" if self.folder is None else f"; what it answered so far ({len(self.known)} calls) is kept"
        return checks.refuse(
            "oracle", f"an answer to {len(X)} sequences of {X.shape[1]} tokens of width {X.shape[2]} in {TRIES} "
            f"tries", f"none, the last time {said}{kept}", "dtype=torch.float32 or length= where it takes no "
            "others; the same call later, with run=FOLDER, goes on from what is kept")

    def again(self, X: Tensor) -> Tensor:
        """Asked once more although the answer is kept: whether the box answers alike."""
        return self._answer(X.to(self.oracle.box.device, self.dtype)).to(torch.float64)

    def _keep(self, X: Tensor, Y: Tensor) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.files += 1
            write_tensors(self.folder / f"{self.files:06d}.safetensors", {"X": X, "Y": Y}, {})

    def examples(self) -> Examples:
        """All that was asked, in order."""
        device = self.oracle.box.device
        return Examples(torch.stack(self.X).to(device), torch.stack(self.Y).to(device), mask=self.oracle.mask)


def _names(X: Tensor) -> list[bytes]:
    """Of every sequence a name that no other one has."""
    data = X.detach().cpu().contiguous().view(torch.uint8).flatten(1).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in data]
