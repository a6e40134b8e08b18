"""The zoo: a versioned table of named instances, and the sweeps behind the phase diagrams.

An instance is a layer, examples of it and what counts as success. The names and numbers of a version never change:
a new idea is a new instance, a correction a new version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from headway.core import checks
from headway.core.counting import Size
from headway.core.examples import Examples
from headway.core.layer import AttentionLayer, load_plain
from headway.core.sources import draw
from headway.hardness.families import FAMILIES, family
from headway.hardness.secrets import parity

VERSION = "1"
Build = Callable[[int], AttentionLayer]


@dataclass(frozen=True)
class Instance:
    """``build(seed)`` makes the layer. Success: every head within ``tolerance`` and the count right, or, where
    ``judged`` is "function", an error on fresh examples of at most ``tolerance`` times the labels' spread."""

    name: str
    what: str
    build: Build
    count: int
    length: int
    law: str = "boolean"
    noise: float = 0.0
    tolerance: float = 1e-3
    judged: str = "heads"
    identifiable: bool = True
    where: Mapping[str, float] = field(default_factory=dict)  # its place in a sweep

    def examples(self, layer: AttentionLayer, seed: int, fresh: int = 0) -> Examples:
        """What learners see, or ``fresh`` other sequences under the same law."""
        law: Any = self.law
        if law == "words":
            words = torch.randn(8 * layer.width, layer.width, generator=torch.Generator().manual_seed(1000 + seed),
                                dtype=torch.float64)
            law = words @ torch.diag(torch.linspace(0.5, 2.0, layer.width, dtype=torch.float64)) + 0.3
        return draw(layer, fresh or self.count, self.length, law=law, noise=self.noise,
                    seed=2 * seed + 1 + bool(fresh))


def _random(**settings: Any) -> Build:
    return lambda seed: AttentionLayer.random(seed=seed, **settings)


def _family(name: str, dial: float, **settings: Any) -> Build:
    return lambda seed: family(name, dial, seed=seed, **settings)


def trained_folder() -> Path:
    return Path(str(resources.files("headway.hardness"))) / "trained"


def _trained(name: str) -> Build:
    return lambda seed: load_plain(trained_folder() / f"{name}.safetensors")


def zoo() -> list[Instance]:
    """Version 1."""
    sixteen, twelve = {"heads": 3, "width": 16}, {"heads": 3, "width": 12}
    floor = Size(16, 16, 8).floor(3)
    return [
        Instance("generic", "3 heads, width 16", _random(**sixteen), 2000, 8),
        Instance("generic-32", "4 heads, width 32", _random(heads=4, width=32), 4000, 16),
        Instance("one-head", "1 head, width 24", _random(heads=1, width=24), 1500, 6),
        Instance("many-heads", "6 heads, width 16", _random(heads=6, width=16), 4000, 12),
        Instance("two-tokens", "2 heads, sequences of two tokens", _random(heads=2, width=10), 60000, 2),
        Instance("low-rank", "4 heads of rank 3, width 24", _random(heads=4, width=24, rank=3), 3000, 12),
        Instance("biased", "key biases and an offset", _random(key_bias=True, offset=True, **sixteen), 2000, 8),
        Instance("causal", "queries look back only", _random(mask="causal", **sixteen), 3000, 8),
        Instance("peaked", "scores of deviation 8", _random(scale=8.0, **sixteen), 6000, 8),
        Instance("weak-head", "one head a hundredth of the others", _family("weak", 2.0, **twelve), 4000, 8),
        Instance("near-equal", "two heads a tenth apart", _family("equal", 1.0, **twelve), 4000, 8),
        Instance("cancelling", "ΣW_i = 0 to four digits", _family("cancelling", 4.0, **twelve), 4000, 8),
        Instance("noisy", "1 % label noise", _random(**sixteen), 6000, 8, noise=0.01, tolerance=0.05),
        Instance("few", "three times the counting floor", _random(**sixteen), 3 * floor, 8),
        Instance("gaussian", "Gaussian tokens", _random(**sixteen), 2000, 8, law="gaussian"),
        Instance("words", "tokens from a vocabulary, correlated, with a mean", _random(**sixteen), 4000, 8,
                 law="words"),
        Instance("trained-histogram", "trained to count equal tokens", _trained("histogram"), 4000, 10),
        Instance("trained-recall", "trained to look up a value by its key", _trained("recall"), 4000, 10),
        Instance("parity-1", "hides the parity of 2 bits", _parity(1), 20000, 2, judged="function", tolerance=0.05,
                 identifiable=False),
        Instance("equal", "two equal heads: the function can be learned, the pair cannot",
                 _family("equal", 12.0, **twelve), 4000, 8, judged="function", tolerance=1e-3, identifiable=False),
    ]


def _parity(size: int) -> Build:
    return lambda seed: parity(size, size + 5, beta=2.0, seed=seed).layer


def floor_sweep(quick: bool) -> list[Instance]:
    """Examples over the counting floor, against the scale of the scores."""
    ratios: tuple[float, ...] = (1.0, 1.5, 2.0, 3.0, 6.0, 12.0)
    scales: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
    if quick:
        ratios, scales = ratios[1::2], scales[1::2]
    m, d, k = 2, 12, 6
    floor = Size(d, d, k).floor(m)
    return [Instance(f"floor-{ratio:g}-{scale:g}", f"{ratio:g} times the floor, scores of deviation {scale:g}",
                     _random(heads=m, width=d, scale=scale), math.ceil(ratio * floor / 0.85) + 1, k,
                     where={"examples over the floor": ratio, "scale": scale})
            for ratio in ratios for scale in scales]


def dial_sweep(quick: bool) -> list[Instance]:
    """Every near-degenerate family along its dial."""
    found = []
    for each in FAMILIES.values():
        dials = (each.dials[0], each.dials[-2]) if quick else each.dials
        for dial in dials:
            found.append(Instance(f"{each.name}-{dial:g}", each.what, _family(each.name, dial), 4000, 8,
                                  where={each.name: dial}))
    return found


def head_sweep(quick: bool) -> list[Instance]:
    """Cost against the number of heads."""
    counts = (1, 2, 4) if quick else (1, 2, 3, 4, 6, 8)
    return [Instance(f"heads-{m}", f"{m} heads, width 16", _random(heads=m, width=16), 4000, 12, where={"heads": m})
            for m in counts]


def parity_sweep(quick: bool) -> list[Instance]:
    """The parity family: 2s heads, 2s hidden bits, at one number of examples."""
    return [Instance(f"parity-{s}", f"hides the parity of {2 * s} bits", _parity(s), 20000, 2, judged="function",
                     tolerance=0.05, identifiable=False, where={"hidden bits": 2 * s}) for s in (1, 2, 3, 4)]


SUITES: dict[str, Callable[[bool], list[Instance]]] = {
    "zoo": lambda quick: zoo(), "floor": floor_sweep, "dials": dial_sweep, "heads": head_sweep,
    "parity": parity_sweep}


def instances(suite: str, quick: bool = False) -> list[Instance]:
    return SUITES[checks.choice("suite", suite, tuple(SUITES))](quick)
