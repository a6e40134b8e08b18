"""Errors planted in a layer: is a held-out claim ever "yes" where it is false?

Every trial spoils a layer of its own in one way, certifies it from 500 fresh sequences of the layer it was, and
asks 10,000 others what is true. A claim is false if more than ``FRACTION`` of these have an error above the
tolerance, or their mean (clipped as the claim says) is above what it allows. Besides errors of five kinds, narrow
ones: the tolerance is put where half as many again as may exceed it do, and the mean allowed a tenth below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

import headway as hw
from common import record
from headway.certificates.held_out import CLIP, errors, mean_claim, quantile_claim

TRIALS, FRESH, TRUE = 200, 500, 10_000
CONFIDENCE, FRACTION, TOLERANCE = 0.99, 0.01, 1e-9
Layer = hw.AttentionLayer | hw.FactoredLayer


def entry(size: float) -> Callable[[hw.AttentionLayer], Layer]:
    def change(layer: hw.AttentionLayer) -> Layer:
        Theta = layer.Theta.clone()
        Theta[0, 0, 1] += size
        return replace(layer, Theta=Theta)

    return change


def dropped(layer: hw.AttentionLayer) -> Layer:
    u = layer.key_bias
    return replace(layer, Theta=layer.Theta[1:], W=layer.W[1:], key_bias=None if u is None else u[1:])


def swapped(layer: hw.AttentionLayer) -> Layer:
    W = layer.W.clone()
    W[[0, 1]] = layer.W[[1, 0]]
    return replace(layer, W=W)


def turned(layer: hw.FactoredLayer) -> Layer:
    rotary = layer.form.rotary
    assert rotary is not None
    return replace(layer, form=replace(layer.form, rotary=replace(rotary, base=1.01 * rotary.base)))


KINDS: dict[str, Callable[..., Layer]] = {
    "one entry of one head, by 1e-3": entry(1e-3), "one entry of one head, by 1e-6": entry(1e-6),
    "one head dropped": dropped, "W of two heads swapped": swapped, "rotary base, by 1 %": turned,
    "narrow": entry(1e-3)}


def truth(kind: str, seed: int) -> Layer:
    heads, width = 2 + seed % 3, (6, 8, 12)[seed // 3 % 3]
    if kind.startswith("rotary"):
        form = hw.Form(rotary=hw.Rotary(base=(100.0, 10_000.0)[seed % 2]), sight=hw.Sight(causal=seed % 4 > 1))
        return hw.FactoredLayer.random(heads=heads, width=width, size=4, form=form, seed=seed)
    return hw.AttentionLayer.random(heads=heads, width=width, key_bias=seed % 2 == 0, mask=("none", "causal")[
        seed // 2 % 2], seed=seed)


def trial(kind: str, seed: int) -> dict[str, tuple[bool, str]]:
    """Whether each claim is true, and what was said."""
    made = truth(kind, seed)
    layer = KINDS[kind](made)
    law = ("boolean", "gaussian")[seed % 2]
    found, whole = (errors(layer, hw.draw(made, count=count, length=8, law=law, seed=1000 * seed + count))
                    for count in (FRESH, TRUE))
    most = mean = TOLERANCE * found.deviation
    if kind == "narrow":
        most, mean = float(torch.quantile(whole.each, 1 - 1.5 * FRACTION)), narrow(whole.each)
    above = float((whole.each > most).double().mean())
    quantile = quantile_claim(found, CONFIDENCE, FRACTION, most / found.deviation)
    clipped = mean_claim(found, CONFIDENCE, mean / found.deviation, None, None)
    return {"held-out quantile": (above <= FRACTION, str(quantile.holds)),
            "held-out mean": (rms(whole.each, CLIP * mean) <= mean, str(clipped.holds))}


def rms(e: torch.Tensor, b: float) -> float:
    """Of min(e, b)."""
    return float(e.clamp_max(b).square().mean().sqrt())


def narrow(e: torch.Tensor) -> float:
    """The mean allowed of which the true one is 1.1 times: the true one, clipped, grows slower than it."""
    low, high = 0.0, float(e.max())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rms(e, CLIP * middle) > 1.1 * middle else (low, middle)
    return low


def main() -> None:
    rows: list[dict[str, object]] = []
    for kind in KINDS:
        trials = [trial(kind, seed) for seed in range(TRIALS)]
        for name in ("held-out quantile", "held-out mean"):
            false = [said for true, said in (one[name] for one in trials) if not true]
            rows.append({"error": kind, "claim": name, "trials": TRIALS, "false": len(false),
                         **{word: false.count(word) for word in ("yes", "no", "undecided")}})
            print(rows[-1], flush=True)
    record("spoiled", "python bench/spoiled.py", {
        "false claims": sum(int(str(r["false"])) for r in rows), "of them called yes": sum(
            int(str(r["yes"])) for r in rows), "seeds": f"0 to {TRIALS - 1}"}, rows)


if __name__ == "__main__":
    main()
