"""Files: written to a temporary name and moved, read as safetensors or JSON only, never unpickled."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headway.core import checks


def write_bytes(path: Path, data: bytes) -> None:
    """Write to a temporary name beside ``path``, flush to disk, move: whole or not at all."""
    if path.exists() and not path.is_file():
        checks.refuse(str(path), "a file, or a name for a new one", "a folder, a device or a pipe", "another name")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Copies, so that parts sharing memory are stored each on its own."""
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    write_bytes(path, save(copies, metadata=dict(metadata)))


def open_tensors(path: Path) -> Any:
    """A safetensors file opened for slicing; anything else is refused."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise checks.InputError(
            f"{path}: expected a whole safetensors file; got one that does not open ({error}). "
            "Try: write it again; pickled files are never read."
        ) from None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with open_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def read_json(path: Path, what: str, hint: str = "headway learn EXAMPLES --out RUN") -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise checks.InputError(
            f"{path}: expected {what}; got no readable JSON ({error}). Try: {hint}."
        ) from None
    if not isinstance(value, dict):
        checks.refuse(str(path), what, "JSON of another kind", hint)
    return value


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
