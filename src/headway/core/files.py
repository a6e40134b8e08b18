"""Files: written to a temporary name and moved, read as safetensors or JSON only, never unpickled."""

from __future__ import annotations

import glob
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headway.core import checks


def regular(path: Path, expected: str = "a file", hint: str = "a path to a file") -> Path:
    """The path, refused if what stands there is no file: to read a pipe or a device may take for ever."""
    try:
        kind = os.stat(path).st_mode
    except (OSError, ValueError):
        return path  # the one who opens it says what is wrong
    if not stat.S_ISREG(kind):
        what = "a folder" if stat.S_ISDIR(kind) else "a pipe, a socket or a device"
        checks.refuse(str(path), expected, what, hint)
    return path


def write_bytes(path: Path, *data: bytes | memoryview) -> None:
    """Write to a temporary name beside ``path``, flush to disk, move: whole or not at all."""
    if path.exists() and not path.is_file():
        checks.refuse(str(path), "a file, or a name for a new one", "a folder, a device or a pipe", "another name")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def workshop(target: Path) -> Iterator[Path]:
    """A hidden folder beside ``target`` to make it in, gone afterwards.

    A process that is killed leaves its folder behind, and the next one that makes the same target removes it: the
    lock on a folder ends with the process that holds it, so folders still worked in are left alone.
    """
    prefix = f".{target.name}.making-"
    for old in target.parent.glob(f"{glob.escape(prefix)}*"):
        held = _lock(old)
        if held is not None:
            shutil.rmtree(old, ignore_errors=True)
            os.close(held)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as name:
        held = _lock(Path(name))
        try:
            yield Path(name)
        finally:
            if held is not None:
                os.close(held)


def _lock(folder: Path) -> int | None:
    """A handle that holds the folder; none if another process does, or nobody can."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system: leave everything in place
        return None
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Copies, so that parts sharing memory are stored each on its own; the same tensors give the same bytes."""
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    data = save(copies, metadata=dict(metadata))
    # A file is: the header's length in 8 bytes, the header in JSON, the tensors. The library shuffles the header.
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    write_bytes(path, len(header).to_bytes(8, "little"), header, memoryview(data)[end:])


def open_tensors(path: Path) -> Any:
    """A safetensors file opened for slicing; anything else is refused."""
    regular(path, "a whole safetensors file")
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


class Slices:
    """Rows of the tensors in a safetensors file, read as they are asked for and no others.

    The library maps a file into memory: what was read of it then counts as the process's own until it is closed, so
    that a list of shards would fill memory as it is passed through. Here bytes are read where they are to be, and
    nothing else is held; the file is open only while it is read.
    """

    KINDS: ClassVar[dict[str, torch.dtype]] = {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
        "BOOL": torch.bool}

    def __init__(self, path: Path) -> None:
        with open_tensors(path):  # the header and the file's length fit each other
            pass
        self.path = path
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self.head = json.loads(file.read(size))
        self.begin = 8 + size

    def rows(self, name: str, low: int, high: int) -> Tensor:
        """Those from ``low`` up to ``high`` of the tensor of that name."""
        held = self.head[name]
        if held["dtype"] not in self.KINDS:
            checks.refuse(f"{self.path}: {name}", f"numbers of a type among {', '.join(self.KINDS)}",
                          held["dtype"], "float32 or float64")
        dtype, shape = self.KINDS[held["dtype"]], (high - low, *held["shape"][1:])
        found = torch.empty(shape, dtype=dtype)
        if not found.numel():
            return found
        each = found.nbytes // (high - low)
        raw: Any = found.view(-1).view(torch.uint8).numpy()
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.begin + held["data_offsets"][0] + low * each)
                done = 0
                while done < len(raw):
                    got = file.readinto(memoryview(raw[done:]))
                    if not got:
                        raise OSError("it ends too soon")
                    done += got
        except OSError as error:
            checks.refuse(str(self.path), "the file that was opened", f"one that no longer reads ({error})",
                          "write it again, and leave it in place while it is read")
        return found


def read_json(path: Path, what: str, hint: str = "headway learn EXAMPLES --out RUN") -> dict[str, Any]:
    regular(path, what, hint)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
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
