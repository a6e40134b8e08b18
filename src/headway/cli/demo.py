"""``headway demo``: a hidden layer learned before your eyes, then a layer of a small model that does something."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from headway.cli.console import Json, err, say, watch
from headway.cli.show import told

if TYPE_CHECKING:
    from torch import Tensor

    from headway.core.behaviour import Behaviour
    from headway.core.results import Fit
    from headway.recall.model import Recaller

LEARNED, UNSEEN, LOOKED_AT = 2000, 1000, 100  # sequences of the second act: to learn from, to measure on, for heads


def demo(
    out: Annotated[Path | None, typer.Option(help="Run folder; default: the next free runs/demo-N.")] = None,
    heads: Annotated[int, typer.Option(help="Heads of the hidden layer of the first act.")] = 4,
    width: Annotated[int, typer.Option(help="Width of the hidden layer of the first act.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the hidden layer of the first act.")] = 0,
    as_json: Json = False,
) -> None:
    """Hide a random layer and learn it; then learn a layer of a small model at its task, and put it back."""
    folder = out or _free(Path("runs"), "demo")
    begun = time.perf_counter()
    err.rule("One: a hidden layer", align="left", style="none")
    first, found = _hidden(folder, heads, width, seed)
    between = time.perf_counter()
    err.print()
    err.rule("Two: a layer of a model that recalls", align="left", style="none")
    second, also = _recalled(folder / "recall")
    err.print(f"\nThe first act took {between - begun:.1f} s, the second {time.perf_counter() - between:.1f} s.")
    if as_json:
        say({**found, "recall": also})
    if not (first.status.ok and second.status.ok):
        raise typer.Exit(1)


def _free(parent: Path, stem: str) -> Path:
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"


# -- the first act ----------------------------------------------------------------------------------------------


def _hidden(folder: Path, heads: int, width: int, seed: int) -> tuple[Fit, dict[str, Any]]:
    """A random layer, learned from 4,000 examples, compared with the truth, certified and drawn."""
    import headway as hw
    from headway.report import write_report
    from headway.runs import store

    truth = hw.AttentionLayer.random(heads=heads, width=width, seed=seed)
    data = hw.draw(truth, count=4000, length=16, seed=seed + 1)
    err.print(f"A hidden layer: {heads} heads, width {width}, scores of deviation 2. Nobody tells the learner "
              f"how many heads. It sees {len(data)} random ±1 sequences of 16 tokens and what the layer made of "
              "them.\n")
    run = store.Run.create(folder, {"command": "demo", "examples": "drawn", "digest": data.digest(),
                                    "hidden_heads": heads, "width": width, "seed": seed}, truth)
    with watch() as progress:
        fit = hw.learn(data, seed=seed, run=run, progress=progress)
    fresh = hw.draw(truth, count=500, length=16, seed=seed + 2)
    with err.status("certifying, drawing"):
        certificate = hw.certify(fit, fresh, seen=data)
        run.certified(certificate, {"examples": "drawn", "digest": fresh.digest()})
        page = write_report(folder)
    return fit, told(fit, folder, truth, page=page)


# -- the second act ---------------------------------------------------------------------------------------------


def _recalled(folder: Path) -> tuple[Fit, dict[str, Any]]:
    """A layer of the model that comes with Headway, learned from its activations on its own data and put back."""
    import torch

    import headway as hw
    from headway.core.files import write_bytes, write_tensors
    from headway.recall.data import ALPHABET, LENGTH, letters, sequences
    from headway.recall.model import LAST, own, trained, unembedding
    from headway.report import write_report
    from headway.runs import store

    model, draw = trained(), torch.Generator().manual_seed(1)
    ids, unseen = sequences(LEARNED, draw), sequences(UNSEEN, draw)
    err.print("A small transformer that comes with Headway reads a random string of letters, again and again:\n\n  "
              f"{' '.join(letters(unseen[:1])[0])}\n\nFrom the second time on it knows what comes next. Its second "
              f"attention layer is learned from what goes in and comes out on {LEARNED} sequences of {LENGTH} "
              "letters, and put back. Nobody tells the learner how many heads.\n")
    run = store.Run.create(folder, {"layer": f"{LAST} of the model that recalls"}, own(model, LAST))
    run.begin()
    data = hw.capture(model, LAST, [ids], to=folder / "examples")
    words, vocabulary = folder / "unembedding.safetensors", folder / "vocabulary.json"
    write_bytes(folder / "tokens.json", json.dumps({"tokens": letters(ids)}).encode())
    write_bytes(vocabulary, json.dumps(list(ALPHABET)).encode())
    write_tensors(words, {"unembedding": unembedding(model)}, {})
    with watch() as progress:
        fit = hw.learn(data, run=run, progress=progress)
    with err.status("drawing"):
        page = write_report(folder, unembedding=words, vocabulary=vocabulary)
    found = told(fit, folder, run.truth(), page=page)
    back, does = _put_back(model, fit, unseen), _what_heads_do(model, fit, unseen[:LOOKED_AT])
    return fit, {**found, **back, **does}


def _put_back(model: Recaller, fit: Fit, unseen: Tensor) -> dict[str, Any]:
    """How well the model recalls as it is, with its attention taken out, with the learned layer in its place."""
    import torch

    import headway as hw
    from headway.recall.model import LAST, measured

    silent = hw.AttentionLayer(fit.layer.Theta, torch.zeros_like(fit.layer.W), mask=fit.layer.mask)
    found = {"as it is": measured(model, unseen)}
    for name, layer in (("its attention taken out", silent), ("the learned layer in its place", fit.layer)):
        with hw.replace(model, LAST, layer):
            found[name] = measured(model, unseen)
    table = Table(box=None, pad_edge=False)
    table.add_column(f"the model on {len(unseen)} sequences not seen before")
    table.add_column("loss", justify="right")
    table.add_column("right", justify="right")
    for name, score in found.items():
        table.add_row(name, f"{score.loss:.6f}", f"{score.accuracy:.2%}")
    err.print()
    err.print(table)
    return {"model": {name: {"loss": score.loss, "accuracy": score.accuracy} for name, score in found.items()}}


def _what_heads_do(model: Recaller, fit: Fit, ids: Tensor) -> dict[str, Any]:
    """Each learned head in a sentence, the induction head first of all, and where it gets what it compares."""
    import headway as hw
    from headway.core.behaviour import behaviours
    from headway.recall.model import FIRST, LAST, own

    def seen(path: str, layer: Any) -> tuple[Behaviour, ...]:
        return behaviours(layer.patterns(hw.capture(model, path, [ids]).X.to(layer.W)), ids)

    does, before = seen(LAST, fit.layer), seen(FIRST, own(model, FIRST))
    err.print()
    induction = _most(does, "induction")
    if induction is None:
        err.print("None of the learned heads is an induction head on these sequences.", style="bold")
    else:
        alone = sum(one.kind == "induction" for one in does) == 1
        err.print(f"Learned head {induction + 1} is {'the' if alone else 'the clearest'} induction head.",
                  style="bold")
    for j, one in enumerate(does):
        err.print(f"Head {j + 1}. {one}", markup=False)
    previous = _most(before, "previous token")
    if previous is not None:
        err.print("It can compare because the first layer writes down which letter came before. There, head "
                  f"{previous + 1}. {before[previous]}", markup=False)
    return {"heads": [{"kind": one.kind, "share": one.share, "chance": one.chance, "sentence": one.sentence}
                      for one in does], "induction": None if induction is None else induction + 1}


def _most(does: tuple[Behaviour, ...], kind: str) -> int | None:
    """The head of this kind that does it most."""
    return max((j for j, one in enumerate(does) if one.kind == kind), key=lambda j: does[j].share, default=None)
