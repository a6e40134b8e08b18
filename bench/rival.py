"""Adam on the factors of a layer of any form: what ``learn`` is compared with where scores are not plain."""

from __future__ import annotations

import math
import time

import torch

import headway as hw
from headway.learning.baselines import ROWS, TUNED
from headway.learning.formed_learn import layer_of
from headway.learning.formed_refine import FormCandidate
from headway.learning.formed_source import FormSource
from headway.learning.formed_start import random_start
from headway.learning.source import spaced
from headway.learning.starts.batches import Batches, table_of
from headway.learning.starts.descent import Step


def adam(
    data: hw.Examples, truth: hw.FactoredLayer, seconds: float, seed: int = 0, device: str | None = None
) -> hw.FactoredLayer:
    """Adam on all factors from a random start: form, number and size of heads given, the rate along a half cosine
    to zero over the seconds, all of which are used; on a GPU a captured graph, products in TF32."""
    draw = torch.Generator().manual_seed(seed)
    source = FormSource(data, truth.form, device)
    plain = source.unwhitened()
    table = table_of(plain, spaced(source.fit, min(len(source.fit), source.most())))
    begin = random_start(truth.form, truth.heads, truth.width, truth.key_width, truth.out_width, truth.size,
                         truth.value_size, draw, source.device)
    rows = ROWS.get(source.device.type, ROWS["cpu"])
    step = Step(Batches(table, min(len(table.X), max(8, rows // data.length)), draw), begin.model, begin.parts())
    begun, done = time.perf_counter(), 0
    while (part := (time.perf_counter() - begun) / seconds) < 1:
        step.rate(TUNED.rate_at(part, done, truth.width))
        step.make()
        done += 1
        if done % 50 == 0:
            step.loss()  # waits for the device: the clock is that of steps made, not of steps asked for
    found = begin.like([value.double() for value in step.now()]).tensors
    tensors = source.entered(found, plain=True)
    return layer_of(source, FormCandidate(tensors, math.inf, math.inf, "limit", len(source.fit), 1, 0))
