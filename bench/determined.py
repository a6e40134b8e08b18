"""Does a certificate know which part of a head these inputs determine? Text-like activations, layer by layer.

A layer is learned, its directions are sorted by how well the certificate knows them from fresh examples, and along
every one the learned head is compared with the true one: of the directions called known to ε, relative to the head,
which part is within ε? The leading order alone is measured beside it, and so is the part that is known at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

import headway as hw
import labels
import scenes
from common import record
from headway.certificates.bars import Tried
from headway.certificates.jacobian import sample
from headway.certificates.known import Known, known
from headway.certificates.newton import Newton
from headway.certificates.spectrum import Spectrum
from judged import Case

SEEDS = range(100, 102)  # thresholds were chosen on seeds 0 to 3
FITTED = 1e-6  # what "fitted" promises
LEVEL = 1e-3  # of ε, up to which a direction counts as known


def decades(heads: int, width: int, count: int, span: float) -> Callable[[int], Case]:
    """Gaussian tokens whose covariance spans so many decades."""

    def make(seed: int) -> Case:
        draw = scenes.drawn(seed)
        size = 10 ** torch.linspace(0, -span / 2, width, dtype=torch.float64)
        turn = torch.linalg.qr(labels.normal(draw, width, width))[0]
        X = labels.normal(draw, count + scenes.FRESH, 10, width) * size @ turn * width**0.5 / size.norm()
        return scenes.shown(hw.AttentionLayer.random(heads, width, seed=seed), X)

    return make


SCENES: dict[str, Callable[[int], Case]] = {
    "words behind a layer norm": scenes.words(3, 16, 1500),
    "words, one head peaked": scenes.words(3, 16, 1500, peaked=4.0),
    "an encoder's first layer": scenes.trained("encoder", 0),
    "an encoder's second layer": scenes.trained("encoder", 1),
    "a GPT's second layer": scenes.trained("gpt", 1), "covariance over 4 decades": decades(3, 16, 1500, 4.0),
    "covariance over 8 decades": decades(3, 16, 1500, 8.0)}


def in_order(fit: hw.Fit, truth: hw.AttentionLayer, data: hw.Examples) -> hw.AttentionLayer:
    """The learned heads in the order of the true ones, in the class of the truth."""
    order = list(hw.match(fit.layer, truth, on=data).order)
    layer = fit.layer
    return replace(layer, Theta=layer.Theta[order], W=layer.W[order],
                   key_bias=None if layer.key_bias is None else layer.key_bias[order])


def judged(pair: tuple[Known, Known], learned: tuple[Tensor, Tensor], true: tuple[Tensor, Tensor]) -> list[Tensor]:
    """ε and error of every direction of Θ and of W of a head, relative to it."""
    found = []
    for one, a, b in zip(pair, learned, true, strict=True):
        change = one.left.mT @ (a - b)
        error = change.norm(dim=1) / change.shape[1] ** 0.5 if one.right is None else (change @ one.right).abs()
        found.append(torch.stack([one.epsilon.flatten(), error.flatten() / a.norm()]))
    return found


def measured(case: Case, seed: int) -> dict[str, object]:
    fit = hw.learn(case.data, seed=seed, seconds=60.0)
    truth = case.truth
    assert isinstance(truth, hw.AttentionLayer)
    row: dict[str, object] = {"seed": seed, "status": fit.status.kind}
    if not isinstance(fit.layer, hw.AttentionLayer) or fit.layer.heads != truth.heads:
        return {**row, "heads": getattr(fit.layer, "heads", None)}
    layer = in_order(fit, truth, case.data)
    fresh = hw.Examples(case.X, case.Y, mask=truth.mask)
    found = sample(layer, fresh, len(fresh), torch.float64)
    draw = torch.Generator().manual_seed(seed)
    newton = Newton(found, Spectrum.of(found, 0.99, draw, 200))
    heads = known(found, newton, Tried.of(found, newton, draw), draw)
    bias = truth.augmented.new_zeros(truth.heads, 1, truth.width)
    Theta = truth.augmented if layer.key_bias is None or truth.key_bias is not None else torch.cat(
        [truth.augmented, bias], dim=1)
    parts: Sequence[Sequence[Tensor]] = [
        judged(pair, (layer.augmented[i], layer.W[i]), (Theta[i], truth.W[i])) for i, pair in enumerate(heads)]
    for at, name in enumerate(("Θ", "W")):
        epsilon, error = torch.cat([part[at] for part in parts], dim=1)
        there = epsilon <= LEVEL
        row |= {f"{name} known": float(there.double().mean()),
                f"{name} within ε": float((error <= epsilon)[there].double().mean()) if bool(there.any()) else None,
                f"{name} not known, off by more than that": float((error > LEVEL)[~there].double().mean())
                if bool((~there).any()) else None}
    return {**row, "match": hw.match(fit.layer, truth).worst,
            "match on these inputs": hw.match(fit.layer, truth, on=case.data).worst,
            "one function there": hw.compare(fit.layer, truth, tolerance=FITTED, on=case.data).same}


def main() -> None:
    rows = []
    for name, make in SCENES.items():
        for seed in SEEDS:
            rows.append({"inputs": name, **measured(make(seed), seed)})
            print(rows[-1], flush=True)
    judged_rows = [row for row in rows if row.get("Θ within ε") is not None]
    record("determined", "python bench/determined.py", {
        "layers": len(rows), "judged": len(judged_rows),
        "least share of directions within ε": min(
            float(str(row[name])) for row in judged_rows for name in ("Θ within ε", "W within ε"))}, rows)


if __name__ == "__main__":
    main()
