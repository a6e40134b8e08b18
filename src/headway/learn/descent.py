"""Adam with a cosine schedule from a random start: what people do today, kept as the baseline."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from headway import attention
from headway.learn.polish import Polished
from headway.learn.source import Source


def descend(
    source: Source,
    heads: int,
    *,
    seed: torch.Generator,
    steps: int = 3000,
    batch: int = 64,
    rate: float = 3e-3,
    target: float = 0.0,
    report: Callable[[float], None] | None = None,
) -> Polished:
    """min over (Θ, u, W, c) of E‖Y − F(X)‖² by Adam on minibatches of the fitted sequences, in float32.

    ``rate`` falls along a half cosine to zero over ``steps``. With ``target`` the held-out error is looked at
    every 100 steps and the run ends when it is below. Settings are chosen in bench/adam_tuning.py.
    """
    assert source.frame is not None
    d, e, device = source.d, source.examples.out_width, source.device
    Theta = 0.5 / d * torch.randn(heads, d + 1, d, generator=seed)
    W = torch.randn(heads, d, e, generator=seed) / math.sqrt(d * heads)
    parameters = [t.to(device).requires_grad_() for t in (Theta, W, torch.zeros(e))]
    adam = torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    size = min(batch, len(source.fit))
    everything = source.problem(source.fit[: source.most()], heads, torch.float32)
    X, Y = (torch.cat([getattr(c, name) for c in everything.chunks]) for name in ("X", "Y"))
    parts = [c.see for c in everything.chunks if c.see is not None]
    see = None
    if parts:
        see = parts[0] if everything.chunks[0].valid is None else torch.cat(parts)
    valid = None
    if everything.chunks[0].valid is not None:
        valid = torch.cat([c.valid for c in everything.chunks if c.valid is not None])
    spread = everything.variation() / everything.equations
    done, held = 0, float("inf")
    for step in range(steps):
        pick = torch.randint(len(X), (size,), generator=seed).to(device)
        sight = see if see is None or see.shape[0] == 1 else see[pick]
        R = attention.forward(X[pick], parameters[0], parameters[1], parameters[2], sight) - Y[pick]
        if valid is not None:
            R = R * valid[pick]
        loss = R.square().mean()
        adam.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        schedule.step()
        done = step + 1
        if done % 100 == 0:
            error = math.sqrt(float(loss.detach()) / spread)
            if report is not None:
                report(error)
            if error < 2 * target:
                held = source.error(source.held, *(p.detach() for p in parameters))
                if held <= target:
                    break
    final = [p.detach().double() for p in parameters]
    held = source.error(source.held, *final)
    fitted = source.error(source.fit[: len(X)], *final)
    return Polished(final[0], final[1], final[2], fitted, held, "limit", len(X),
                    everything.equations, None, 2 * done)
