"""``headway make`` and ``headway count``: examples on disk, and how many of them a layer takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.console import Json, err, given, progress, say
from headway.core.names import SCORES

if TYPE_CHECKING:
    from headway.core.examples import Examples
    from headway.core.factored import FactoredLayer
    from headway.core.layer import AttentionLayer

KINDS = "Of the scores: " + ", ".join(SCORES) + " (without a softmax; divided by the number of keys)."
STORED = 1_000_000_007  # apart from the seeds of inputs that are drawn with their layer
# What a random layer is given.
DRAWN = ("heads", "width", "scale", "rank", "key_bias", "offset", "causal", "scores", "dtype")


def make(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="New folder for the shards.")],
    layer: Annotated[Path | None, typer.Option(help="A stored layer to draw from; default: a random one.")] = None,
    heads: Annotated[int, typer.Option(help="Heads of the random layer.")] = 4,
    width: Annotated[int, typer.Option(help="Features of a token.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 16,
    count: Annotated[int, typer.Option(help="Sequences.")] = 4000,
    scale: Annotated[float, typer.Option(help="Standard deviation of the scores on ±1 tokens.")] = 2.0,
    rank: Annotated[int | None, typer.Option(help="Rank of the attention matrices; default: full.")] = None,
    key_bias: Annotated[bool, typer.Option("--key-bias", help="Give every head a key bias.")] = False,
    offset: Annotated[bool, typer.Option("--offset", help="Add a constant to the outputs.")] = False,
    causal: Annotated[bool, typer.Option("--causal", help="Queries see earlier tokens only.")] = False,
    scores: Annotated[str, typer.Option(help=KINDS)] = "softmax",
    law: Annotated[str, typer.Option(help="boolean, gaussian, or a safetensors file with one matrix.")] = "boolean",
    noise: Annotated[float, typer.Option(help="Label noise relative to the labels' root mean square.")] = 0.0,
    shards: Annotated[int, typer.Option(help="Files to write.")] = 1,
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    seed: Annotated[int, typer.Option(help="Seed of a random layer; the inputs take the next one.")] = 0,
    as_json: Json = False,
) -> None:
    """Write examples of a random or a stored layer to shards; the layer itself goes to truth.safetensors."""
    import torch

    import headway as hw
    from headway.core import checks
    from headway.core.layer import load_layer
    from headway.core.shards import even, rebatch, write
    from headway.core.sources import draw_batches

    checks.whole("count", count)
    checks.whole("shards", shards, 1, count)
    kind = getattr(torch, checks.choice("dtype", dtype, ("float64", "float32")))
    if layer is not None:
        described = given(context, *DRAWN)
        if described:
            checks.refuse(f"--{described[0].replace('_', '-')}",
                          "nothing that describes a random layer, with --layer", "one such option",
                          "leave it out; the stored layer has its own")
        truth: AttentionLayer | FactoredLayer = load_layer(layer)
    else:
        truth = hw.AttentionLayer.random(
            heads=heads, width=width, scale=scale, rank=rank, key_bias=key_bias, offset=offset,
            mask="causal" if causal else "none", scores=scores, seed=seed, dtype=kind)
    sizes = even(count, shards)
    # Fresh examples of a stored layer must not be those it came with, whatever the seeds.
    inputs = seed + 1 if layer is None else seed + STORED
    drawn = draw_batches(truth, count, length, law=_law(law), noise=noise, seed=inputs)
    with progress("writing shards", shards) as step:
        written = write(folder, _counted(rebatch(drawn, sizes), step), shards, truth)
    err.print(f"Wrote {count} sequences to {folder} ({shards} shard{'s' * (shards > 1)}); "
              f"the layer is in {folder / 'truth.safetensors'}.", markup=False)
    if as_json:
        say({"folder": str(folder), "sequences": len(written), "shards": shards})


def count(
    heads: Annotated[int, typer.Option(help="Heads of the layer.")] = 4,
    width: Annotated[int, typer.Option(help="Features of a token.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 16,
    out_width: Annotated[int | None, typer.Option(help="Features of an output row; default: the width.")] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of the attention matrices; default: full.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Queries see earlier tokens only.")] = False,
    scores: Annotated[str, typer.Option(help=KINDS)] = "softmax",
    as_json: Json = False,
) -> None:
    """How many examples does a layer of this size take? Its unknowns against the equations that sequences give."""
    from headway.core import checks
    from headway.core.counting import LinearSize, Size

    checks.whole("heads", heads)
    d, k = checks.whole("width", width), checks.whole("length", length, 2)
    e = d if out_width is None else checks.whole("out-width", out_width)
    mask = "causal" if causal else "none"
    size: Size | LinearSize = Size(d, e, k, mask, None if rank is None else checks.whole("rank", rank, 1, d))
    if checks.choice("--scores", scores, SCORES) != "softmax":
        if rank is not None:
            checks.refuse("--rank", "nothing with linear scores, whose heads have no rank of their own", rank,
                          "leave it out")
        size = LinearSize(d, e, k, mask)
    floor, unknowns = size.floor(heads), size.unknowns(heads)
    err.print(f"{heads} head{'s' * (heads > 1)} of width {d}: {unknowns:,} unknowns. Below {floor:,} sequences of "
              f"{k} tokens nothing can tell them; {3 * floor:,} are usually enough, {6 * floor:,} always were.")
    if as_json:
        say({"unknowns": unknowns, "floor": floor, "usual": 3 * floor, "safe": 6 * floor})


def _counted(batches: Iterator[Examples], step: Callable[[], None]) -> Iterator[Examples]:
    for batch in batches:
        yield batch
        step()


def _law(text: str) -> Any:
    if text in ("boolean", "gaussian"):
        return text
    from headway.core import checks
    from headway.core.files import read_tensors

    tensors, _ = read_tensors(Path(text))
    if len(tensors) != 1:
        checks.refuse("--law", "a safetensors file with one matrix, one row per word", sorted(tensors),
                      "--law boolean")
    return next(iter(tensors.values()))
