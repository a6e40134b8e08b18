"""Weights on disk, read tensor by tensor: one safetensors file, several with an index, or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from headway.core import checks
from headway.core.files import open_tensors, read_json, regular

INDEX = "model.safetensors.index.json"
# GGUF architectures whose attention is known here, and whether positions turn its queries and keys.
ARCHITECTURES = {"llama": True, "qwen2": True, "qwen3": True, "gpt2": False}


class Stored(Mapping[str, Tensor]):
    """Name to tensor, each read when asked for; ``config`` is what stands beside the weights about the model."""

    def __init__(self, names: Mapping[str, Path], config: Mapping[str, Any] | None) -> None:
        self.files, self.config = dict(names), config
        self._open: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        path = self.files[name]
        if path not in self._open:
            _there(path, "a file that the index beside it names")
            self._open[path] = open_tensors(path)
        try:
            tensor: Tensor = self._open[path].get_tensor(name)
        except SafetensorError:
            checks.refuse(str(path), f"the tensor {name}, as the index beside it says", "none",
                          "the whole model again")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def divisors(self) -> Tensor | None:
        """What each rotary frequency is divided by, if the file itself says so."""
        return None


def open_weights(path: Path) -> Stored:
    """A file, an index of several, or a folder with either; config.json beside it is read too."""
    _there(path, "a folder, a safetensors file, an index of several or a GGUF file")
    if path.is_dir():
        inside = [path / name for name in (INDEX, "model.safetensors") if (path / name).exists()]
        if not inside:
            found = sorted(p.name for p in path.iterdir())[:4]
            checks.refuse(str(path), f"a folder with model.safetensors or {INDEX}", ", ".join(found) or "nothing",
                          "the path of a safetensors or GGUF file; pickled files are never read")
        path = inside[0]
    beside = path.parent / "config.json"
    if path.suffix == ".gguf":
        return _Gguf(path)
    config = read_json(beside, "the model's config", "another folder") if beside.exists() else None
    if path.suffix == ".json":
        listed = read_json(path, "an index of files", "the path of a safetensors file").get("weight_map")
        named = list(listed.values()) if isinstance(listed, dict) else []
        away = [name for name in named if not isinstance(name, str) or Path(name).name != name]
        if not named or away:
            checks.refuse(str(path), "a weight_map from tensors to files beside it",
                          repr(away[0]) if away else "none", "the path of a safetensors file")
        return Stored({name: path.parent / file for name, file in (listed or {}).items()}, config)
    with open_tensors(path) as file:
        return Stored(dict.fromkeys(file.keys(), path), config)


def _there(path: Path, expected: str) -> None:
    if not path.exists():
        checks.refuse(str(path), expected, "nothing of that name", "another path")


class _Gguf(Stored):
    """A GGUF file, its blocks dequantised; its fields in the words of a config."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError:
            checks.refuse(str(path), "the package gguf, which reads such files", "none installed",
                          "pip install 'headway[gguf]'")
        regular(path, "a whole GGUF file")
        try:
            self.reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            checks.refuse(str(path), "a whole GGUF file", f"one that does not open ({error})", "write it again")
        self.path = path
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        super().__init__(dict.fromkeys(self.tensors, path), self._config())

    def __getitem__(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        held = self.tensors[name]
        try:
            values = dequantize(held.data, held.tensor_type)
        except (NotImplementedError, KeyError):
            checks.refuse(f"{self.path}: {name}", "blocks that the package gguf can dequantise",
                          f"blocks of type {held.tensor_type.name}", "a file of another quantisation, such as Q8_0")
        return torch.from_numpy(values.copy()).reshape(*(int(n) for n in reversed(held.shape)))

    def _field(self, name: str, default: Any = None) -> Any:
        field = self.reader.get_field(name)
        return default if field is None else field.contents()

    def _config(self) -> dict[str, Any]:
        kind = str(self._field("general.architecture"))
        if kind not in ARCHITECTURES:
            checks.refuse(str(self.path), f"an architecture of {', '.join(ARCHITECTURES)}", kind,
                          "the model as safetensors")

        def own(name: str, default: Any = None) -> Any:
            return self._field(f"{kind}.{name}", default)

        heads = int(own("attention.head_count"))
        size = int(own("attention.key_length", int(own("embedding_length")) // heads))
        said: dict[str, Any] = {
            "model_type": kind, "num_attention_heads": heads, "head_dim": size,
            "rms_norm_eps": own("attention.layer_norm_rms_epsilon")}
        if not ARCHITECTURES[kind]:
            return said
        scaling = str(own("rope.scaling.type", "none"))
        if scaling not in ("none", "linear"):
            checks.refuse(str(self.path), "rotary frequencies as they are, or scaled linearly", scaling,
                          "the model as safetensors")
        rope = {"rope_type": "default", "rope_theta": float(own("rope.freq_base", 10_000.0)),
                "partial_rotary_factor": float(own("rope.dimension_count", size)) / size}
        if scaling == "linear":
            rope |= {"rope_type": "linear", "factor": float(own("rope.scaling.factor"))}
        return {**said, "rope_parameters": rope}

    def divisors(self) -> Tensor | None:
        """Llama 3's scaling comes so."""
        return self["rope_freqs.weight"].double() if "rope_freqs.weight" in self.tensors else None
