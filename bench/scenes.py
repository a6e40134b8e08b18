"""Small examples on which a rule of the learner can show what it buys: a few seconds each, a seed for each drawing.

A scene is a way to make examples from a seed, what is true of them (judged.py) and the options of ``learn``. Their
kinds: white tokens with many and with few rows, words behind a layer norm, layers of a small trained encoder, wide
layers of low rank, noise, wrong labels, functions that are no layer, too few examples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

import headway as hw
import judged
import labels
import nets
from headway.core.counting import Size
from judged import AS_GOOD_AS_EXACT, LABEL_NOISE, NO_LAYER, SPOILT, TOO_FEW, Case, Truth

FRESH = 300  # other sequences, to measure the error on
EXACT: Truth = {"recovered": (judged.heads_within(1e-9),)}
FITTED: Truth = {**EXACT, "fitted": (judged.count_right, judged.function_within(judged.FITTED))}
NOTHING: Truth = dict.fromkeys(("not_realisable", "noise"), (judged.not_ok,))
UNDETERMINED: Truth = {"too_few": (), "fitted": (judged.not_determined_said,)}
ROTARY, SINKS, GATES = (
    hw.Form(**part) for part in (  # of a form that is told only the kind is read
        {"rotary": hw.Rotary(base=100.0), "sight": hw.Sight(causal=True)}, {"sink": hw.Sink(torch.zeros(1))},
        {"gate": hw.Gated(torch.zeros(1, 2, 1))}))
SLOW = hw.Form(rotary=hw.Rotary(), sight=hw.Sight(causal=True))  # planes of 1, 0.1, 0.01 and 0.001 radians a place
UNTOLD: dict[str, Any] = {"form": "auto", "seconds": 30.0}  # several descents
Labels = Callable[[hw.AttentionLayer, Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Scene:
    make: Callable[[int], Case]
    true: Truth
    options: dict[str, Any] = field(default_factory=dict)


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(30_000 + seed)


def shown(layer: hw.AttentionLayer, X: Tensor, **known: Any) -> Case:
    """The layer's own labels; the last sequences are the others."""
    Y, n = layer(X), len(X) - FRESH
    return Case(hw.Examples(X[:n], Y[:n], mask=layer.mask), X[n:], Y[n:], layer, **known)


# -- the layer's own labels -------------------------------------------------------------------------------------


def white(
    heads: int, width: int, length: int, count: int, *, scale: float = 2.0, rank: int | None = None,
    out_rank: int | None = None, peaked: float = 1.0, law: str = "gaussian",
    change: Callable[[Tensor], Tensor] | None = None,
) -> Callable[[int], Case]:
    """A random layer on white tokens, the first head's scores ``peaked`` times as large; ``change`` maps the tokens
    it is learned from."""

    def make(seed: int) -> Case:
        layer, draw = hw.AttentionLayer.random(heads, width, scale=scale, rank=rank, seed=seed), drawn(seed)
        if out_rank is not None:
            W = labels.normal(draw, heads, width, out_rank) @ labels.normal(draw, heads, out_rank, width)
            layer = hw.AttentionLayer(layer.Theta, W / width)
        if peaked != 1.0:
            layer = with_peak(layer, peaked)
        X = labels.normal(draw, count + FRESH, length, width)
        if law == "boolean":
            X = X.sign()
        if change is None:
            return shown(layer, X)
        others = X[count:]
        X = change(X[:count])
        return Case(hw.Examples(X, layer(X)), others, layer(others), layer)

    return make


def formed(
    form: Callable[[torch.Generator], hw.Form], *, heads: int = 2, width: int = 8, size: int = 4, length: int = 6,
    count: int = 500, change: Callable[[Tensor], Tensor] | None = None, told: bool = True, box: bool = False,
) -> Callable[[int], Case]:
    """A random layer of a form, with unknowns drawn for it; ``change`` as above. ``told``: that it is causal, where
    it is; ``box``: it may be asked for more."""

    def make(seed: int) -> Case:
        draw = drawn(seed)
        layer = hw.FactoredLayer.random(heads, width, size=size, form=form(draw), seed=seed)
        X = labels.normal(draw, count + FRESH, length, width)
        tokens = X[:count] if change is None else change(X[:count])
        mask = "causal" if layer.form.sight.causal and told else "none"
        if box:
            data = hw.ask(layer, count, length, width, law="gaussian", mask=mask, seed=seed, fresh=True)
            return Case(data, X[count:], layer(X[count:]), layer)
        return Case(hw.Examples(tokens, layer(tokens), mask=mask), X[count:], layer(X[count:]), layer)

    return make


def plain(draw: torch.Generator) -> hw.Form:
    return hw.Form()


def rotary(draw: torch.Generator) -> hw.Form:
    return hw.Form(rotary=hw.Rotary(base=100.0), sight=hw.Sight(causal=True))


def slow(draw: torch.Generator) -> hw.Form:
    return SLOW


def sinks(draw: torch.Generator) -> hw.Form:
    return hw.Form(sink=hw.Sink(labels.normal(draw, 2)))


def caps(draw: torch.Generator) -> hw.Form:
    return hw.Form(cap=hw.Cap(3.0))


def norms(draw: torch.Generator) -> hw.Form:
    return hw.Form(normed=hw.Normed(*(1 + 0.3 * labels.normal(draw, 2, 4))))


def offsets(draw: torch.Generator) -> hw.Form:
    return hw.Form(offsets=hw.OffsetTable(labels.normal(draw, 2, 11)))


def slopes(draw: torch.Generator) -> hw.Form:
    return hw.Form(offsets=hw.Slope(0.4 * labels.normal(draw, 2)))


def causal(draw: torch.Generator) -> hw.Form:
    return hw.Form(sight=hw.Sight(causal=True))


def gates_of_two(draw: torch.Generator) -> hw.Form:
    return hw.Form(gate=hw.Gated(labels.normal(draw, 2, 9, 4) / 3))


def more_sinks(draw: torch.Generator) -> hw.Form:
    return hw.Form(sink=hw.Sink(labels.normal(draw, 5)))


def gates(draw: torch.Generator) -> hw.Form:
    return hw.Form(gate=hw.Gated(labels.normal(draw, 2, 7, 2) / 2))


def alike(seed: int) -> Case:
    """Tokens that are much like those before them: what one row's labels show, its neighbours' show too."""
    layer, draw = hw.AttentionLayer.random(3, 8, seed=seed), drawn(seed)
    steps = labels.normal(draw, 400 + FRESH, 8, 8)
    X = steps.clone()
    for a in range(1, 8):
        X[:, a] = 0.9 * X[:, a - 1] + 0.436 * steps[:, a]
    return shown(layer, X)


def with_peak(layer: hw.AttentionLayer, times: float) -> hw.AttentionLayer:
    """The layer with the first head's scores so many times as large."""
    Theta = layer.Theta.clone()
    Theta[0] *= times
    return hw.AttentionLayer(Theta, layer.W)


def floors(heads: int, width: int, length: int, times: float) -> int:
    """Sequences: so many times those that counting asks for, before some are kept for choosing and judging."""
    return round(times * Size(width, width, length).floor(heads))


def words(
    heads: int, width: int, count: int, *, length: int = 10, scale: float = 2.0, peaked: float = 1.0,
    rank: int | None = None,
) -> Callable[[int], Case]:
    """200 words with Zipf's frequencies and positions behind a layer norm; the first head's scores are ``peaked``
    times as large."""

    def make(seed: int) -> Case:
        draw = drawn(seed)
        table = torch.randn(200, width, generator=draw)
        places = 0.5 * torch.randn(length, width, generator=draw)
        often, n = 1 / torch.arange(1, 201.0), count + FRESH
        ids = torch.multinomial(often, n * length, replacement=True, generator=draw).view(n, length)
        layer = with_peak(hw.AttentionLayer.random(heads, width, scale=scale, rank=rank, seed=seed), peaked)
        return shown(layer, layer_norm(table[ids] + places, (width,)).double())

    return make


def looking_back(seed: int) -> Case:
    """Words with positions, and three heads of size 8 of which the first looks at the token before (the first token
    at itself), all but exactly."""
    draw, k, d = drawn(seed), 8, 20
    places, table = 1.5 * labels.normal(draw, k, d), labels.normal(draw, 60, d)
    space = torch.linalg.svd(places)[2][:k]
    table = table - 0.8 * (table @ space.T) @ space
    X = table[torch.randint(0, 60, (600 + FRESH, k), generator=draw)] + places
    layer = hw.AttentionLayer.random(3, d, scale=3.0, rank=8, seed=seed)
    W = labels.normal(draw, 3, d, 8) @ labels.normal(draw, 3, 8, d) / d
    seen = torch.linalg.pinv(places - places.mean(0))
    Theta = layer.Theta.clone()
    Theta[0] = 10 * (seen[:, 1:] @ seen[:, :-1].T + seen[:, :1] @ seen[:, :1].T)
    return shown(hw.AttentionLayer(Theta, W), X)


TRAINING = {"encoder": 300, "gpt": 800}  # steps


@cache
def _trained(name: str, seed: int) -> tuple[list[hw.AttentionLayer], list[Tensor]]:
    draw = drawn(seed)
    net = {"encoder": nets.encoder, "gpt": nets.gpt}[name](seed, TRAINING[name], draw, width=16)
    return net.layers(), net.tokens(800 + FRESH, draw)


def trained(name: str, number: int) -> Callable[[int], Case]:
    """A layer of a small trained network (width 16, 4 heads) on its own activations."""

    def make(seed: int) -> Case:
        layers, own = _trained(name, seed)
        return shown(layers[number], own[number])

    return make


# -- other labels -----------------------------------------------------------------------------------------------


def relabelled(
    change: Labels, heads: int = 3, width: int = 12, count: int = 800, length: int = 8, right: bool = False,
) -> Callable[[int], Case]:
    """Labels that are no layer's; ``right``: those of one, with errors in them."""

    def make(seed: int) -> Case:
        layer, draw = hw.AttentionLayer.random(heads, width, seed=seed), drawn(seed)
        X = labels.normal(draw, count + FRESH, length, width)
        Y, clean = change(layer, X, draw), layer(X)
        if not right:
            return Case(hw.Examples(X[:count], Y[:count]), X[count:], Y[count:])
        noise = judged.planted_noise(clean[:count], Y[:count])
        return Case(hw.Examples(X[:count], Y[:count]), X[count:], clean[count:], layer, noise)

    return make


def noisy(level: float, **size: int) -> Callable[[int], Case]:
    return relabelled(lambda layer, X, draw: labels.noisy(layer(X), level, draw), right=True, **size)


def growing(layer: hw.AttentionLayer, X: Tensor, draw: torch.Generator) -> Tensor:
    return labels.growing(layer(X), X, 0.1, draw)


def heavy(layer: hw.AttentionLayer, X: Tensor, draw: torch.Generator) -> Tensor:
    """Noise whose size differs between sequences, log-normally: many tails, no outliers."""
    Y = layer(X)
    size = torch.exp(0.8 * labels.normal(draw, len(X), 1, 1))
    return Y + 0.1 * labels.deviation(Y) * size * labels.normal(draw, *Y.shape)


def spoilt(share: float, width: int = 12, count: int = 800, noise: float = 0.0) -> Callable[[int], Case]:
    """A share of the sequences with labels too large, of another sequence, or noise."""

    def make(seed: int) -> Case:
        layer, draw = hw.AttentionLayer.random(3, width, seed=seed), drawn(seed)
        X = labels.normal(draw, count + FRESH, 8, width)
        right = layer(X[:count])
        Y, why = labels.mixed_up(labels.noisy(right, noise, draw), share, draw)
        return Case(hw.Examples(X[:count], Y), X[count:], layer(X[count:]), layer, wrong=judged.indices(why))

    return make


def large(share: float) -> Callable[[int], Case]:
    """A share of the sequences with labels a hundred times too large."""

    def make(seed: int) -> Case:
        layer, draw = hw.AttentionLayer.random(3, 12, seed=seed), drawn(seed)
        X = labels.normal(draw, 800 + FRESH, 8, 12)
        Y, at = labels.scaled_up(layer(X[:800]), share, draw)
        return Case(hw.Examples(X[:800], Y), X[800:], layer(X[800:]), layer, wrong=judged.indices(at))

    return make


def noise_alone(layer: hw.AttentionLayer, X: Tensor, draw: torch.Generator) -> Tensor:
    return labels.normal(draw, *X.shape)


def template(X: Tensor) -> Tensor:
    """All sequences have the tokens of the first, but for the third."""
    filled = X[:1].repeat(len(X), 1, 1)
    filled[:, 2] = X[:, 2]
    return filled


SCENES: dict[str, Scene] = {
    "white": Scene(white(3, 12, 8, 800), EXACT),
    "white, many heads": Scene(white(6, 12, 8, 1500), EXACT),
    "white, d = 32": Scene(white(4, 32, 8, 2500), EXACT),
    "white, few": Scene(white(3, 12, 8, floors(3, 12, 8, 6)), EXACT),
    "white, three times the floor": Scene(white(3, 8, 8, floors(3, 8, 8, 4)), EXACT),
    "white, too few": Scene(white(3, 12, 8, floors(3, 12, 8, 0.5)), TOO_FEW),
    "white, five heads, few": Scene(white(5, 8, 8, floors(5, 8, 8, 4)), EXACT),
    "white, peaked, few": Scene(white(3, 8, 8, floors(3, 8, 8, 6), scale=6.0), FITTED),
    "white, at the floor": Scene(white(2, 8, 8, floors(2, 8, 8, 1.4)), TOO_FEW),
    "white, twice the floor": Scene(white(2, 8, 8, floors(2, 8, 8, 1.9)), {**EXACT, **TOO_FEW}),
    "white, two tokens": Scene(white(2, 8, 2, 600, law="boolean"), {**EXACT, "too_few": ()}),
    "white, peaked": Scene(white(3, 12, 8, 800, scale=8.0), FITTED),
    "white, one head too few told": Scene(white(3, 12, 8, 800), {"not_realisable": ()}, {"heads": 2}),
    "white, one head too many told": Scene(white(3, 8, 8, 600), TOO_FEW, {"heads": 4}),
    "wide, low rank": Scene(white(4, 64, 8, 5000, rank=8, out_rank=8, law="boolean"), FITTED),
    "wide, low rank, few": Scene(white(4, 64, 16, 600, rank=8, out_rank=8, law="boolean"), FITTED),
    "white, d = 6, 100": Scene(white(2, 6, 6, 100), EXACT),
    "neighbours alike": Scene(alike, AS_GOOD_AS_EXACT),
    "white by factors, few": Scene(white(3, 16, 8, 48), {**FITTED, **TOO_FEW}, {"method": "factors"}),
    "white by factors": Scene(white(3, 16, 8, 1000), FITTED, {"method": "factors"}),
    "full rank by factors": Scene(white(3, 16, 8, 300), FITTED, {"method": "factors"}),
    "eight heads, d = 26": Scene(words(8, 26, 1500, rank=4), AS_GOOD_AS_EXACT, {"method": "factors"}),
    "low rank by factors": Scene(white(4, 32, 8, 1000, rank=8, out_rank=8), FITTED, {"method": "factors"}),
    "many spare heads": Scene(white(3, 16, 8, 600, rank=3, out_rank=3), FITTED, {"method": "factors", "rank": 3}),
    "eight heads, rank told": Scene(
        white(8, 16, 8, 800, rank=2, out_rank=2), FITTED, {"method": "factors", "rank": 2}),
    "a peaked head by factors": Scene(white(4, 12, 8, 500, peaked=10.0), FITTED, {"method": "factors"}),
    "a head that looks back": Scene(looking_back, AS_GOOD_AS_EXACT, {"method": "factors", "rank": 8}),
    "a template": Scene(white(2, 8, 6, 600, change=template), UNDETERMINED),
    "words": Scene(words(3, 16, 1500), AS_GOOD_AS_EXACT),
    "words, peaked": Scene(words(3, 16, 600, peaked=8.0), AS_GOOD_AS_EXACT),
    "words, d = 28": Scene(words(3, 28, 800), AS_GOOD_AS_EXACT),
    "words, d = 26, rank 4": Scene(words(2, 26, 500, length=8, rank=4), AS_GOOD_AS_EXACT),
    "words by factors": Scene(words(2, 12, 800), AS_GOOD_AS_EXACT, {"method": "factors"}),
    "words by factors, peaked": Scene(words(2, 12, 800, peaked=15.0), AS_GOOD_AS_EXACT, {"method": "factors"}),
    "encoder, layer 1": Scene(trained("encoder", 1), AS_GOOD_AS_EXACT, {"method": "factors"}),
    "gpt, layer 0": Scene(trained("gpt", 0), AS_GOOD_AS_EXACT, {"method": "factors"}),
    "noise of 1 %": Scene(noisy(0.01), LABEL_NOISE),
    "noise of 10 %": Scene(noisy(0.1), LABEL_NOISE),
    "noise of 50 %": Scene(noisy(0.5), LABEL_NOISE),
    "noise of 10 %, few": Scene(noisy(0.1, heads=1, width=6, count=80), LABEL_NOISE,
                                {"method": hw.Auto(max_heads=3, starts=2)}),
    "noise of 1e-4 by factors": Scene(noisy(1e-4, heads=2), LABEL_NOISE, {"method": "factors"}),
    "noise of 10 % by factors": Scene(noisy(0.1, heads=2), LABEL_NOISE, {"method": "factors"}),
    "noise of 1e-7": Scene(noisy(1e-7), {**LABEL_NOISE, "fitted": (judged.count_right,)}),
    "noise alone by factors": Scene(
        relabelled(noise_alone, width=8, count=300), NOTHING, {"method": hw.Factors(max_heads=2, starts=1)}),
    "noise that grows": Scene(relabelled(growing, right=True), LABEL_NOISE),
    "noise of many sizes": Scene(relabelled(heavy, right=True), LABEL_NOISE),
    "noise alone": Scene(relabelled(noise_alone, width=8), NOTHING),
    "2 % wrong": Scene(spoilt(0.02), SPOILT),
    "5 % wrong": Scene(spoilt(0.05), SPOILT),
    "5 % too large": Scene(large(0.05), SPOILT),
    "rotary, heads told": Scene(
        relabelled(lambda layer, X, draw: labels.rotary(layer)(X), heads=2, width=8, count=150), NO_LAYER,
        {"heads": 2}),
    "mlp, few": Scene(relabelled(lambda layer, X, draw: labels.mlp(X.shape[2], draw)(X), width=8, count=60),
                      NO_LAYER, {"method": hw.Auto(max_heads=2, starts=2)}),
    "rotary, two heads at most": Scene(
        relabelled(lambda layer, X, draw: labels.rotary(layer)(X), heads=2, width=8, count=400), NO_LAYER,
        {"method": hw.Auto(max_heads=2, starts=2)}),
    "normed, four heads at most": Scene(
        relabelled(lambda layer, X, draw: labels.normed(layer)(X), heads=1, width=6, count=300, length=6), NO_LAYER,
        {"method": hw.Auto(max_heads=4)}),
    "linear": Scene(relabelled(lambda layer, X, draw: labels.linear(X.shape[2], draw)(X)), NO_LAYER),
    "a connection around": Scene(
        relabelled(lambda layer, X, draw: layer(X) + X, heads=2, width=8, count=600, length=6), NO_LAYER),
    "far from zero": Scene(relabelled(lambda layer, X, draw: layer(X) + 1e7, heads=2, width=8, count=400),
                           {**NO_LAYER, "not_realisable": (judged.not_ok, lambda said, case: "it is a layer")}),
    "rotary, form told": Scene(formed(rotary), EXACT, {"form": ROTARY}),
    "rotary, slow planes": Scene(formed(slow, size=8, length=8, count=600), EXACT,
                                 {"form": SLOW, "rank": 8, "seconds": 30.0}),
    "sinks, form told": Scene(formed(sinks), EXACT, {"form": SINKS}),
    "five heads with sinks, form and heads told": Scene(
        formed(more_sinks, heads=5, size=2), EXACT, {"form": SINKS, "heads": 5, "rank": 2}),
    "sinks, another form told": Scene(formed(sinks), {"not_realisable": (), "limit": ()}, {"form": hw.Form()}),
    "gates, form told": Scene(formed(gates, width=6, size=2, count=400), AS_GOOD_AS_EXACT, {"form": GATES}),
    "a template, form told": Scene(formed(plain, heads=1, width=4, length=3, change=template), UNDETERMINED,
                                   {"form": hw.Form()}),
    "noise alone, form told": Scene(
        relabelled(noise_alone, width=12, length=6, count=400), {**NOTHING, **TOO_FEW, "limit": ()},
        {"form": hw.Form(), "heads": 2, "rank": 4, "seconds": 20.0}),
    "larger gates, form told": Scene(formed(gates_of_two), AS_GOOD_AS_EXACT, {"form": GATES, "seconds": 60.0}),
    "looking back, form not told": Scene(formed(causal, told=False), EXACT, {"form": "auto"}),
    "offsets, form not told": Scene(formed(offsets), AS_GOOD_AS_EXACT, UNTOLD),
    "slopes, form not told": Scene(formed(slopes), EXACT, UNTOLD),
    "a cap, form not told": Scene(formed(caps), AS_GOOD_AS_EXACT, UNTOLD),
    "a black box with sinks": Scene(formed(sinks, box=True), EXACT, UNTOLD),
    "a black box with a cap": Scene(formed(caps, box=True), AS_GOOD_AS_EXACT, UNTOLD),
    "a black box with norms": Scene(formed(norms, box=True), AS_GOOD_AS_EXACT, UNTOLD),
    "rotary, form not told": Scene(formed(rotary), EXACT, UNTOLD),
    "sinks, form not told": Scene(formed(sinks), EXACT, UNTOLD),
    "rows moved": Scene(relabelled(lambda layer, X, draw: layer(X).roll(1, 1), width=8, count=600), NO_LAYER),
}
