"""What stands beside a run for its page: the strings of its tokens, and a matrix that turns outputs into words.

Strings: {"tokens": [["the", "cat", …], …]}, one list for each sequence of the examples. Without them places stand
for tokens. An unembedding U (vocabulary, e) says what an output y raises: the entries of U y.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.core import checks
from headway.core.examples import Examples
from headway.core.files import read_json, read_tensors, regular

TOKENS = "tokens.json"  # of a run folder
FORMAT = '{"tokens": [["the", "cat"], …]}, one list for each sequence of the examples'


@dataclass(frozen=True, eq=False)
class Unembedding:
    """U (vocabulary, e), and the words of its rows."""

    matrix: Tensor
    words: Sequence[str]


@dataclass(frozen=True, eq=False)
class Given:
    """All of it, read and checked as far as it can be without the examples."""

    tokens: Sequence[Sequence[str]] | None = None
    where: str = "tokens"  # they come from, for a complaint
    asked: bool = False  # whether someone named them, so that what does not fit is refused
    sequences: tuple[int, ...] = ()  # to be shown, counted from 1
    unembedding: Unembedding | None = None

    @property
    def named(self) -> dict[str, str | None]:
        """What somebody asked for, by the name of the argument."""
        return {"tokens": self.where if self.asked else None,
                "sequences": ", ".join(map(str, self.sequences)) or None,
                "unembedding": None if self.unembedding is None else "one"}


def read(
    folder: Path, tokens: Any = None, sequences: Sequence[int] | None = None, unembedding: Path | None = None,
    vocabulary: Path | None = None,
) -> Given:
    """``tokens``: a file, or lists of strings; by default tokens.json of the run folder, where there is one."""
    asked, where = tokens is not None, "tokens"
    if tokens is None and (folder / TOKENS).exists():
        tokens = folder / TOKENS
    if isinstance(tokens, (str, Path)):
        where = str(tokens)
        tokens = read_json(Path(tokens), f"strings of tokens, {FORMAT}", FORMAT).get("tokens")
    if tokens is not None:
        tokens = _strings(where, tokens)
    numbers = tuple(checks.whole("sequences", number) for number in sequences or ())
    if vocabulary is not None and unembedding is None:
        checks.refuse("vocabulary", "none without an unembedding", str(vocabulary),
                      "--unembedding FILE.safetensors")
    return Given(tokens, where, asked, tuple(dict.fromkeys(numbers)),
                 None if unembedding is None else _unembedding(unembedding, vocabulary))


def _strings(where: str, tokens: Any) -> list[list[str]]:
    """Lists of strings, whoever made them."""
    rows = list(tokens) if isinstance(tokens, (list, tuple)) else None
    if not rows or not all(isinstance(row, (list, tuple)) and row and all(isinstance(one, str) for one in row)
                           for row in rows):
        checks.refuse(where, f"strings of tokens, {FORMAT}", "something else", FORMAT)
    return [list(row) for row in rows]


def _unembedding(path: Path, vocabulary: Path | None) -> Unembedding:
    tensors, _ = read_tensors(path)
    if len(tensors) != 1:
        checks.refuse(str(path), "one matrix (vocabulary, e)", f"{len(tensors)} tensors",
                      "safetensors.torch.save_file({'unembedding': model.lm_head.weight}, FILE)")
    (matrix,) = tensors.values()
    matrix = checks.floating(str(path), matrix)
    checks.shape(str(path), matrix, ("vocabulary", "e"), "one row for each word, as model.lm_head.weight has")
    if vocabulary is None:
        return Unembedding(matrix, [f"#{i}" for i in range(len(matrix))])
    regular(vocabulary, "a list of words", '["the", "cat", …]')
    try:
        words = json.loads(vocabulary.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise checks.InputError(f"{vocabulary}: expected a list of words; got no readable JSON ({error}). "
                                'Try: ["the", "cat", …].') from None
    if isinstance(words, dict) and all(isinstance(at, int) for at in words.values()):
        words = [word for word, _ in sorted(words.items(), key=lambda pair: pair[1])]  # as tokenizers keep it
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        checks.refuse(str(vocabulary), "a list of words", "JSON of another kind", '["the", "cat", …]')
    if len(words) != len(matrix):
        checks.refuse(str(vocabulary), f"{len(matrix)} words, one for each row of {path}", f"{len(words)}",
                      "the vocabulary of the model that the matrix is from")
    return Unembedding(matrix, words)


def fitted(given: Given, data: Examples, out_width: int) -> Given:
    """The same, refused where it does not fit the examples."""
    if given.tokens is not None and len(given.tokens) != len(data):
        checks.refuse(given.where, f"{len(data)} lists, one for each sequence of the run's examples",
                      len(given.tokens), "the tokens of all of them, in their order")
    for number in given.sequences:
        checks.whole("sequences", number, 1, len(data))
    if given.unembedding is not None and given.unembedding.matrix.shape[1] != out_width:
        checks.refuse("unembedding", f"a matrix (vocabulary, {out_width}): so wide are the layer's outputs",
                      f"shape {tuple(given.unembedding.matrix.shape)}", "model.lm_head.weight")
    return given


def strings(given: Given, at: Sequence[int], part: Examples) -> list[list[str]] | None:
    """The strings of sequences ``at``, which are ``part``: one for each place, "" where a token is filling."""
    if given.tokens is None:
        return None
    found = []
    for i, number in enumerate(at):
        row, k = list(given.tokens[number]), part.length
        real = torch.ones(k, dtype=torch.bool) if part.padding is None else ~part.padding[i].cpu()
        if len(row) not in (k, int(real.sum())):
            checks.refuse(given.where, f"{int(real.sum())} strings for sequence {number + 1}, one for each token",
                          len(row), "the tokens that the layer saw, special ones included")
        if len(row) != k:
            places = iter(row)
            row = [next(places) if there else "" for there in real.tolist()]
        found.append(row)
    return found
