"""The learned attention put in place of the original inside the encoder: embeddings of fifty English sentences.

    python bench/swap.py KEPT [--model FOLDER]

KEPT is the folder ``bench/real.py --keep`` wrote. Each learned layer alone, then all of them together. The learner
saw random ±1 sequences of 32 tokens and no sentence.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Tokenizer

import headway as hw
from common import record
from encoder import Encoder, model_folder
from headway.core.convert import Factors, unfactored
from headway.core.files import read_tensors

SENTENCES = [line.strip() for line in (Path(__file__).parent / "sentences.txt").read_text().splitlines()]


def learned(path: Path) -> hw.AttentionLayer:
    tensors, _ = read_tensors(path)
    parts = Factors(*(tensors[name] for name in ("query", "key", "value", "out")))
    return unfactored(parts, tensors["offset"])


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("kept", type=Path)
    words.add_argument("--model")
    asked = words.parse_args()
    folder = model_folder(asked.model)
    encoder = Encoder(folder)
    ids = [item.ids for item in Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(SENTENCES)]
    ids = [[token for token in row if token] for row in ids]  # 0 is padding
    original = [encoder(row, {}) for row in ids]
    found = {int(path.stem.split("-")[1]): learned(path) for path in sorted(asked.kept.glob("layer-*.safetensors"))}
    rows = []
    for name, swapped in [*((str(block), {block: layer}) for block, layer in found.items()), ("all", found)]:
        after = [encoder(row, swapped) for row in ids]
        # Of unit vectors: 1 − cos = ‖a − b‖²/2, without the cancellation.
        off = [float((a - b).square().sum()) / 2 for a, b in zip(original, after, strict=True)]
        own = {block: encoder.attention(block) for block in swapped}
        same = [encoder(row, own) for row in ids]
        converted = [float((a - b).square().sum()) / 2 for a, b in zip(original, same, strict=True)]
        rows.append({"layers replaced": name, "sentences": len(ids), "largest 1 − cosine": max(off),
                     "by the original weights in this form": max(converted)})
    record("swap", "python bench/swap.py KEPT", {
        "sentences": len(ids), "layers": len(found),
        "largest 1 − cosine": max(r["largest 1 − cosine"] for r in rows)}, rows)


if __name__ == "__main__":
    main()
