"""How much may be held at once: sizes are chosen for two cores and a few gigabytes, and grow on an accelerator.

And how much was.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

FULL = 7  # digits of float32
GROWTH = 32  # an accelerator is slow on small pieces, and has the memory for large ones


def room(device: torch.device, size: int) -> int:
    """``size`` bytes on a CPU; on an accelerator up to 32 times that, at most a twelfth of its memory."""
    if device.type != "cuda":
        return size
    return max(size, min(GROWTH * size, torch.cuda.get_device_properties(device).total_memory // 12))


def peak(device: torch.device | None = None) -> dict[str, int]:
    """The most bytes that this process held since it began: "host", resident memory, with libraries and what else
    the process did; "gpu", where ``device`` is one or one is in use, what torch had allocated there.

    >>> 10**7 < peak()["host"] < 10**13
    True
    """
    host = _resident()
    found = {} if host is None else {"host": host}
    if torch.cuda.is_initialized() if device is None else device.type == "cuda":  # type: ignore[no-untyped-call]
        found["gpu"] = int(torch.cuda.max_memory_allocated(device))
    return found


def give_back() -> None:
    """Return to the system what was freed: the allocator keeps it, in holes that the next pieces do not fit, and
    reading on and on the process would grow. Where it has no such call nothing is done."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return
    trim(0)


def held() -> int | None:
    """Bytes that this process holds now; None where the system does not tell."""
    return _marked("VmRSS", Path("/proc/self/status"))


def _marked(name: str, status: Path) -> int | None:
    try:
        found = re.search(rf"^{name}:\s*(\d+) kB$", status.read_text(), flags=re.M)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


def _resident(status: Path = Path("/proc/self/status")) -> int | None:
    # Linux hands the getrusage of a process on to what it starts: a small child of a large process would look
    # large. The mark in its status is its own.
    marked = _marked("VmHWM", status)
    if marked is not None:
        return marked
    try:
        import resource
    except ImportError:  # no such counts on this system
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def normal(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Independent standard normal numbers in the shape of ``like``, drawn where it is: a GPU has them long before a
    CPU could draw and send them. What is drawn depends on the generator and the kind of device."""
    if like.device.type != "cuda":
        return torch.randn(like.shape, generator=generator, dtype=torch.float32).to(like)
    seed = int(torch.randint(0, 2**62, (), generator=generator))
    there = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=there, dtype=torch.float32, device=like.device).to(like)


@contextmanager
def fast_products(device: torch.device, digits: int = FULL) -> Iterator[None]:
    """Products of float32 matrices with at least so many digits, in the least time, as long as this lasts: whatever
    the caller has set for torch. On a GPU TF32 has three. On a CPU torch may be allowed bfloat16, which has two;
    where it has no use for that it multiplies by another library instead, with all digits, on some processors in
    half the time."""
    name = "highest"
    if device.type == "cuda" and digits <= 3:
        name = "high"
    elif device.type == "cpu" and (digits <= 2 or _medium_is_full()):
        name = "medium"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@cache
def _medium_is_full() -> bool:
    """Whether this CPU keeps all digits of float32 where it may use bfloat16: tried once."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=draw) for _ in range(2))
    with fast_products(a.device, digits=0):
        error = float((a @ b - (a.double() @ b.double())).norm() / b.norm())
    return error < 1e-4
