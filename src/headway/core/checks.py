"""Every complaint about bad input, in one voice: what was expected, what was got, what to try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor


class InputError(ValueError):
    """Input that Headway refuses. The message names the argument, what was expected, got, and to try."""


def refuse(name: str, expected: str, got: object, hint: str) -> NoReturn:
    raise InputError(f"{name}: expected {expected}; got {got}. Try: {hint}.")


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, of numpy's, of torch's on a device or of torch's on the CPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    words = ("allocate memory", "not enough memory", "Storage size calculation overflowed")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def too_large(name: str, error: BaseException) -> InputError:
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return InputError(f"{name}: expected sizes that fit this machine's memory; got larger ones ({said}). "
                      "Try: fewer or shorter sequences, a smaller width, or float32.")


@contextmanager
def memory(name: str) -> Iterator[None]:
    """Turns a failed allocation inside into a sentence about ``name``."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise too_large(name, error) from error


def floating(
    name: str, value: Any, *, keep_int8: bool = False, hint: str = "drop or repair those sequences"
) -> Tensor:
    """A tensor (or array, or nested list) of finite real numbers; integers become float64.

    int8 is kept where asked for: ±1 tokens are stored so, an eighth of the memory. hint: what to try where a number
    is not finite.
    """
    if isinstance(value, (list, tuple)) and _ragged(value):
        lengths = sorted({len(v) for v in value})
        refuse(name, "sequences of one length", f"lengths {lengths[0]} to {lengths[-1]}",
               "Examples.pad(list_of_X, list_of_Y), which pads them and records a padding mask")
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(_array(value))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{name}: expected a tensor or array of real numbers; got {type(value).__name__} "
            f"({error}). Try: torch.as_tensor(...) on it first."
        ) from None
    _readable(name, tensor)
    if tensor.is_complex() or tensor.dtype == torch.bool:
        refuse(name, "real numbers", f"dtype {tensor.dtype}", "convert to float32 or float64")
    if not tensor.is_floating_point() and not (keep_int8 and tensor.dtype == torch.int8):
        tensor = tensor.to(torch.float64)
    if tensor.is_floating_point():
        bad = ~torch.isfinite(tensor)
        if bad.any():
            where = tuple(bad.nonzero()[0].tolist())
            refuse(name, "finite numbers", f"{tensor[where].item()} at index {where} "
                   f"({int(bad.sum())} such entries)", hint)
    return tensor.detach()


def _readable(name: str, tensor: Tensor) -> None:
    """Refuse tensors whose entries cannot be computed with as they are."""
    if tensor.is_nested:
        refuse(name, "one dense tensor", "a nested one", "Examples.pad(list_of_X, list_of_Y)")
    if tensor.layout != torch.strided:
        refuse(name, "a dense tensor", f"layout {tensor.layout}", "tensor.to_dense()")
    if tensor.is_meta:
        refuse(name, "a tensor with values", "one on the meta device, which has a shape only",
               "load the values first")
    if tensor.is_quantized:
        refuse(name, "real numbers", f"dtype {tensor.dtype}", "tensor.dequantize()")
    if tensor.is_floating_point() and tensor.dtype.itemsize < 2:
        refuse(name, "float16, bfloat16, float32 or float64", f"dtype {tensor.dtype}", "tensor.to(torch.float32)")


def _array(value: Any) -> np.ndarray:
    """Nested lists, of tensors too; a copy where the memory may not be written to or runs backwards."""
    if isinstance(value, (list, tuple)):
        value = [v.detach().cpu().numpy() if isinstance(v, Tensor) else v for v in value]
    array = np.asarray(value)
    return array if array.flags.writeable and min(array.strides, default=0) >= 0 else array.copy()


def _ragged(value: Sequence[Any]) -> bool:
    """Whether all entries have a length, and not all the same."""
    try:
        return len({len(v) for v in value}) > 1
    except TypeError:
        return False


def shape(name: str, tensor: Tensor, expected: tuple[int | str, ...], hint: str) -> None:
    """Each entry of ``expected`` is a size, or a letter for any size."""
    fits = tensor.ndim == len(expected) and all(
        isinstance(want, str) or want == size
        for want, size in zip(expected, tensor.shape, strict=True)
    )
    if not fits:
        refuse(name, f"shape ({', '.join(map(str, expected))})", f"shape {tuple(tensor.shape)}", hint)


def whole(name: str, value: Any, at_least: int = 1, at_most: int | None = None) -> int:
    top = "" if at_most is None else f" and at most {at_most}"
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        refuse(name, f"a whole number of at least {at_least}{top}",
               f"{value!r} ({type(value).__name__})", f"{name}={max(1, at_least)}")
    if value < at_least or (at_most is not None and value > at_most):
        refuse(name, f"a whole number of at least {at_least}{top}", value,
               f"{name}={at_least if value < at_least else at_most}")
    return int(value)


def number(name: str, value: Any, at_least: float = 0.0, *, strictly: bool = False) -> float:
    low = "above" if strictly else "of at least"
    try:
        result = float(value)
    except (TypeError, ValueError):
        result = float("nan")
    if not np.isfinite(result) or result < at_least or (strictly and result == at_least):
        refuse(name, f"a finite number {low} {at_least:g}", repr(value), f"{name}=1.0")
    return result


def choice(name: str, value: Any, options: Sequence[str]) -> str:
    if value not in options:
        listed = ", ".join(repr(o) for o in options)
        refuse(name, f"one of {listed}", repr(value), f"{name}={options[0]!r}")
    return str(value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        refuse(name, "True or False", repr(value), f"{name}=True")
    return value


def device(name: str, value: torch.device | str | None, hint: str) -> None:
    """Refuse a device that is none, or that this machine does not have."""
    try:
        torch.zeros(1, device=value).item()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        refuse(name, "a device this machine has", f"{value!r} ({str(error).splitlines()[0]})", hint)


def count_or(name: str, value: Any, *words: str | None) -> int | str | None:
    """A whole number of at least 1, or one of the given words (None counts as a word)."""
    if value is None or isinstance(value, str):
        if value in words:
            return value
        listed = ", ".join(repr(w) for w in words)
        refuse(name, f"a whole number of at least 1, or {listed}", repr(value), f"{name}={words[0]!r}")
    return whole(name, value)


def tokens(X: Tensor, padding: Tensor | None) -> None:
    """What any learner needs of its inputs: two tokens to choose between, and tokens that differ."""
    n, k, d = X.shape
    if n == 0 or d == 0:
        refuse("examples.X", "at least one sequence of at least one feature", f"shape {tuple(X.shape)}",
               "check how X was loaded")
    if k < 2:
        refuse("examples.X", "sequences of at least 2 tokens", f"{k} token per sequence",
               "longer sequences: with one token every attention pattern is 1 and Theta leaves no trace")
    sample = X[: min(n, 256)].to(torch.float64)
    if padding is not None:
        sample = sample[~padding[: len(sample)]]
    flat = sample.reshape(-1, d)
    if flat.shape[0] and float((flat - flat[0]).abs().max()) == 0.0:
        refuse("examples.X", "tokens that differ", "the same token everywhere",
               "inputs drawn at random, such as law='boolean'")
