"""min over all factors and the form's unknowns of E‖Y − F(X)‖² by Adam, from a random start (starts/descent.py).

Heads as in descent on plain factors, each with keys of its own; what a form adds begins where it does nothing:
slopes and offsets 0, sinks 0, gates half open, gains that make scores of about unit size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.core import attention
from headway.core.forms import Form
from headway.core.positions import OffsetTable
from headway.core.tangents import Chain
from headway.learning.formed import MAPS
from headway.learning.formed_source import FormSource
from headway.learning.source import spaced
from headway.learning.starts.batches import Model, feed_of, table_of
from headway.learning.starts.descent import STEPS, TARGET, WIDE, Descended, descend


@dataclass(frozen=True)
class FormFactors:
    """All unknowns of a layer of this form, by name."""

    form: Form
    tensors: Mapping[str, Tensor]

    def parts(self) -> list[Tensor]:
        return list(self.tensors.values())

    def like(self, parts: Sequence[Tensor]) -> FormFactors:
        return FormFactors(self.form, dict(zip(self.tensors, parts, strict=True)))

    @property
    def model(self) -> Model:
        return lambda inputs, values, see: predict(inputs, self.like(values), see)


def predict(inputs: Any, f: FormFactors, see: Tensor | None) -> Tensor:
    """F(X) from tokens with a last column of ones."""
    X, Z, here, there = inputs if isinstance(inputs, tuple) else (inputs, None, None, None)
    keys = X if Z is None else Z
    t = f.tensors
    parts = {name: attention.apart(keys if name in ("key", "value") else X, t[name]) for name in MAPS if name in t}
    here = _places(X) if here is None else here
    there = there if there is not None else here if Z is None else _places(Z)
    own = {name: t[name] for name in t if name not in (*MAPS, "out", "offset")}
    if f.form.cap is not None and "cap" not in own:
        own["cap"] = torch.full((), f.form.cap.value, dtype=X.dtype, device=X.device)
    H = Chain.of(parts, f.form, own, see, here, there).H
    return attention.project(H.transpose(1, 2), t["out"], t["offset"])


def _places(X: Tensor) -> Tensor:
    return torch.arange(X.shape[1], dtype=torch.float64, device=X.device)


def random_start(
    form: Form, heads: int, width: int, key_width: int, out_width: int, size: int, out_size: int,
    generator: torch.Generator, device: torch.device, free_cap: bool = False,
) -> FormFactors:
    """Scores and outputs of about unit size for tokens with unit entries."""
    m, d, z, e, q, p = heads, width, key_width, out_width, size, out_size

    def normal(*shape: int, scale: float) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    def factor(rows: int, columns: int, scale: float) -> Tensor:
        return torch.cat([normal(m, rows, columns, scale=scale * rows**-0.5), torch.zeros(m, 1, columns)], dim=1)

    tensors = {"query": factor(d, q, q**-0.25), "key": factor(z, q, q**-0.25), "value": factor(z, p, 1.0),
               "out": normal(m, p, e, scale=(m * p) ** -0.5), "offset": torch.zeros(e)}
    if form.normed is not None:
        tensors |= {"norm_query": torch.full((q,), q**-0.25), "norm_key": torch.full((q,), q**-0.25)}
        tensors |= {"query": factor(d, q, 1.0), "key": factor(z, q, 1.0)}
    if form.offsets is not None:
        table = isinstance(form.offsets, OffsetTable)
        tensors |= {"offsets": torch.zeros(m, form.offsets.values.shape[1])} if table else {"slope": torch.zeros(m)}
    if form.sink is not None:
        tensors["sink"] = torch.zeros(m)
    if form.gate is not None:
        tensors["gate"] = factor(d, p, 0.5)
    if form.cap is not None and free_cap:
        tensors["cap"] = torch.tensor(form.cap.value)
    return FormFactors(form, {name: value.to(device) for name, value in tensors.items()})


def template(form: Form, heads: int, width: int, size: int, out_size: int) -> Form:
    """The form with unknowns of these sizes in place of its own, which are not looked at."""
    draw = torch.Generator().manual_seed(0)
    start = random_start(form, heads, width, width, 1, size, out_size, draw, torch.device("cpu"))
    return form.with_tensors({name: start.tensors[name].double() for name in form.tensors()})


def form_descended(
    source: FormSource, heads: int, size: int, out_size: int, generator: torch.Generator, *, limit: int = STEPS,
    target: float = TARGET, decay: float = 0.0, report: Callable[[float], None] | None = None,
    pulse: Callable[[], None] | None = None,
) -> Descended:
    """From random factors, with the settings that serve a layer of this width on this device."""
    plain = source.unwhitened()
    data = source.examples
    feed = feed_of(plain, generator, source.tally.asked, pulse)
    try:
        count = min(len(source.fit), source.most())
        fit = table_of(plain, spaced(source.fit, count)) if feed is None else feed.first(count)
        select = table_of(plain, spaced(source.select, min(len(source.select), 1000)))
        key_width = data.width if data.key_width is None else data.key_width
        begin = random_start(source.form, heads, data.width, key_width, data.out_width, size, out_size, generator,
                             source.device, source.free_cap)
        wide = data.width >= WIDE
        return descend(fit, select, begin, generator=generator, rate=2e-3 if wide else 4e-3, decay=decay,
                       rows=None if wide or source.device.type == "cuda" else 512, limit=limit, target=target,
                       feed=feed, report=report)
    finally:
        if feed is not None:
            source.tally.asked += feed.asked
            feed.close()
