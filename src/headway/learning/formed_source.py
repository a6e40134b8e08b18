"""Examples of a layer of any form in working coordinates.

Queries, keys, values and gates are affine functions of tokens, so that a change of coordinates x = μ + Lz of the
tokens, of those of the keys where they come from other sequences, and a scale of the labels change the factors and
nothing else: A_z = [LᵀA; b + μᵀA]. Norms, turns, caps and sinks see the same queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headway.core.examples import Examples
from headway.core.forms import Form, in_sight
from headway.learning.formed import Formed, FormRows, chain_of
from headway.learning.source import Frame, Source, find_frame
from headway.linalg.thin import features

OF_KEYS = ("key", "value")
ON_TOKENS = ("query", "gate")


class Tally:
    """How many sequences a black box was asked for; all copies of a source share one."""

    def __init__(self) -> None:
        self.asked = 0


class FormSource(Source):
    """Working rows of examples whose layer has a form. ``free_cap``: its cap is where to begin and not known."""

    def __init__(self, examples: Examples, form: Form, device: torch.device | str | None = None) -> None:
        super().__init__(examples, device)
        self.form, self.free_cap, self.tally = placed(form, self.device), False, Tally()
        self.frame = find_frame(examples, self.fit, self.device)
        self.key_frame = self.frame
        if examples.key_width is not None:
            self.key_frame = find_frame(_Keys(examples), self.fit, self.device)

    def of_form(self, form: Form) -> FormSource:
        """The same sequences for another form."""
        other = copy(self)
        other.form = placed(form, self.device)
        return other

    def unwhitened(self) -> FormSource:
        """In plain coordinates: centred, all directions divided by one number."""
        assert self.frame is not None
        other = copy(self)
        other.frame, other.key_frame = self.frame.unwhitened(), self.key_frame.unwhitened()
        return other

    def rows_of(self, part: Examples, dtype: torch.dtype) -> FormRows:
        assert self.frame is not None
        X = self._tokens(self.frame, part.X, dtype)
        Z = None if part.keys is None else self._tokens(self.key_frame, part.keys, dtype)
        Y = part.Y.to(self.device, torch.float64)
        Y = Y if self.frame.label is None else Y - self.frame.label
        Y = (Y / self.frame.scale).to(dtype)
        padding, hidden = (None if mark is None else mark.to(self.device)
                           for mark in (part.padding, part.key_padding))
        see = in_sight(self.form.sight, X, Z, padding, hidden)
        here, there = (None if at is None or not self.form.uses_positions else at.to(self.device, torch.float64)
                       for at in (part.positions, part.key_positions))
        if padding is None:
            return FormRows(X, Y, see, None, Z, here, there)
        valid = (~padding).unsqueeze(2).to(dtype)
        return FormRows(X, Y * valid, see, valid, Z, here, there)

    def _tokens(self, frame: Frame, X: Tensor, dtype: torch.dtype) -> Tensor:
        X = frame.tokens(X.to(self.device, dtype if frame.plain else torch.float64)).to(dtype)
        return torch.cat([X, X.new_ones(*X.shape[:2], 1)], dim=2)

    def entered(self, tensors: Mapping[str, Tensor], plain: bool = False) -> dict[str, Tensor]:
        """Factors in the caller's coordinates, or in plain ones, as factors in working coordinates."""
        found = dict(tensors)
        for name in (*OF_KEYS, *ON_TOKENS):
            if name in tensors:
                frame = self._frame(name)
                F = tensors[name].to(frame.out)
                L = frame.unwhitened().back @ frame.out if plain else frame.out
                bias = F[:, -1:] if plain or frame.plain else F[:, -1:] + (frame.mean @ F[:, :-1]).unsqueeze(1)
                found[name] = torch.cat([F[:, :-1] if frame.plain else L.mT @ F[:, :-1], bias], dim=1)
        return found

    def left(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Factors in working coordinates as those of the caller."""
        assert self.frame is not None
        found = {name: value.double() for name, value in tensors.items()}
        for name in (*OF_KEYS, *ON_TOKENS):
            frame = self._frame(name)
            if name in tensors and not frame.plain:
                F = frame.back.mT @ found[name][:, :-1]
                found[name] = torch.cat([F, found[name][:, -1:] - (frame.mean @ F).unsqueeze(1)], dim=1)
        found["out"] = found["out"] * self.frame.scale
        found["offset"] = found["offset"] * self.frame.scale
        if self.frame.label is not None:
            found["offset"] = found["offset"] + self.frame.label
        return found

    def _frame(self, name: str) -> Frame:
        assert self.frame is not None
        return self.key_frame if name in OF_KEYS else self.frame

    def misses(self, index: np.ndarray, tensors: Mapping[str, Tensor]) -> float:
        """‖Y − F(X)‖ / ‖Y − mean‖ in float64 over these sequences."""
        tensors = {name: value.double() for name, value in tensors.items()}
        shape = Formed.of(tensors, self.form)
        out, wrong, total, count = tensors["out"].flatten(0, 1), 0.0, 0.0, 0
        label = torch.zeros(out.shape[1], dtype=torch.float64, device=self.device)
        for rows in self.stream(index, shape.heads, torch.float64):
            H = features(rows, chain_of(rows, shape).H, False)
            c = tensors["offset"] if rows.valid is None else rows.valid.reshape(-1, 1) * tensors["offset"]
            Y = rows.Y.flatten(0, 1)
            wrong += float((Y - H @ out - c).square().sum())
            total += float(Y.square().sum())
            label += Y.sum(0)
            count += rows.count
        return math.sqrt(wrong / max(total - float(label.square().sum()) / max(count, 1), 1e-300))


def placed(form: Form, device: torch.device) -> Form:
    """The form with given frequencies on this device: a captured graph copies nothing to it."""
    rotary = form.rotary
    if rotary is None or rotary.frequencies is None or rotary.frequencies.device == device:
        return form
    return replace(form, rotary=replace(rotary, frequencies=rotary.frequencies.to(device)))


class _Keys(Examples):
    """The sequences of the keys, as if they were those of the queries; labels are not looked at."""

    def __init__(self, examples: Examples) -> None:
        self.whole = examples
        first = self.take([0])
        self.X, self.Y, self.mask = first.X, first.Y, first.mask

    def take(self, index: object) -> Examples:
        part = self.whole.take(index)  # type: ignore[arg-type]
        return Examples(part.keys, part.keys, part.key_padding)
