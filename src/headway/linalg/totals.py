"""Σ over ranks: the one thing that processes which learn together share.

Examples are split over the ranks of a torch.distributed group, and all that a solver needs of them is a sum:
moments, Gram matrices, gradients, curvature products, losses, counts. ``total`` adds up what each rank has, where
such a sum ends; everything after it is done by all ranks alike, on the same bits.

Fixed order: what ranks 0, 1, … have is added in that order, in float64, and rounded once to the precision that it
came in. No rank sees another order, so none decides otherwise. A long vector is cut in as many pieces as there are
ranks: each adds up one piece and sends it to the others, 2·(N − 1)/N of the vector's bytes a rank, as few as any
way takes. Short ones, and those of two ranks, go to everybody at once: (N − 1) times their bytes.

``Alone`` is one process by itself: nothing is copied, counted or sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from headway.core.checks import InputError

SHORT = 1 << 16  # bytes up to which a vector goes to everybody at once: waiting for two calls takes longer
T = TypeVar("T")
Told = tuple[Any, Mapping[str, Tensor]]  # what JSON can say, and tensors


class RankLostError(RuntimeError):
    """A process of the group is gone."""


class Alone:
    """One process, which has all examples: every total is what it has."""

    rank, size = 0, 1
    calls = sent = 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    def total(self, x: T) -> T:
        """Σ over ranks of a tensor or a number, the same bits on each."""
        return x

    def totals(self, *xs: Any) -> tuple[Any, ...]:
        """The same of several, sent as one, in the widest of their precisions."""
        return xs

    def largest(self, x: float) -> float:
        return x

    def own(self, generator: torch.Generator) -> torch.Generator:
        """For numbers drawn for each row: another generator on every rank, and one draw of what they share."""
        return generator

    def decided(self, value: bool) -> bool:
        """What rank 0 says: clocks differ."""
        return value

    def led(self, compute: Callable[[], Told]) -> Told:
        """What rank 0 computes, on every rank; what it raises is raised by all."""
        return compute()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what one rank may fail at and another not, as reading a file: if one fails all do, naming it."""
        yield

    @property
    def counted(self) -> dict[str, int]:
        """Calls so far, and bytes that this rank sent."""
        return {"calls": self.calls, "bytes": self.sent}


ALONE = Alone()


class Group(Alone):
    """The ranks of torch.distributed's default group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.calls = self.sent = 0
        config = str(dist.get_backend_config())
        self._hosts = "cpu:" in config  # whether memory of the host may be sent as it is
        self._devices = "cuda:nccl" in config

    def total(self, x: T) -> T:
        if not isinstance(x, Tensor):
            return cast(T, self.totals(x)[0])
        flat = x.detach().contiguous().view(-1)
        if not len(flat):
            return x
        short = self.size == 2 or flat.nbytes <= SHORT
        found = _added(self._everybody(flat)) if short else self._in_pieces(flat)
        return cast(T, found.to(x.dtype).view(x.shape))

    def totals(self, *xs: Any) -> tuple[Any, ...]:
        tensors = [x for x in xs if isinstance(x, Tensor)]
        like = tensors[0] if tensors else torch.empty(0)
        dtype = torch.int64 if all(isinstance(x, int) for x in xs) else torch.float64
        if len(tensors) == len(xs):
            for x in tensors:
                dtype = x.dtype if x is like else torch.promote_types(dtype, x.dtype)
        flat = torch.cat([torch.as_tensor(x, dtype=dtype, device=like.device).reshape(-1) for x in xs])
        parts = torch.split(self.total(flat), [x.numel() if isinstance(x, Tensor) else 1 for x in xs])
        return tuple(part.view(x.shape).to(x.dtype) if isinstance(x, Tensor) else type(x)(part.item())
                     for x, part in zip(xs, parts, strict=True))

    def largest(self, x: float) -> float:
        return max(float(part) for part in self._everybody(torch.tensor([x], dtype=torch.float64)))

    def own(self, generator: torch.Generator) -> torch.Generator:
        seed = int(torch.randint(2**40, (), generator=generator))
        return torch.Generator(generator.device).manual_seed(seed * self.size + self.rank)

    def decided(self, value: bool) -> bool:
        return bool(self._from_first(torch.tensor([value], dtype=torch.uint8)))

    def led(self, compute: Callable[[], Told]) -> Told:
        wrong: Exception | None = None
        value, tensors, head = None, dict[str, Tensor](), b""
        if self.rank == 0:
            try:
                value, found = compute()
                tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}
                said: dict[str, Any] = {"value": value, "tensors": {
                    name: [str(part.dtype).removeprefix("torch."), list(part.shape)]
                    for name, part in tensors.items()}}
                head = json.dumps(said).encode()
            except Exception as error:  # raised again when the others know
                wrong, head = error, json.dumps(_told(error)).encode()
        length = self._from_first(torch.tensor([len(head)]))
        buffer = torch.frombuffer(bytearray(head), dtype=torch.uint8) if head else torch.empty(
            int(length), dtype=torch.uint8)
        said = json.loads(bytes(self._from_first(buffer).numpy()))
        if "kind" in said:
            raise wrong or _error(said)
        for name, (dtype, shape) in said["tensors"].items():
            part = tensors.get(name)
            if part is None:
                part = torch.empty(shape, dtype=getattr(torch, dtype))
            tensors[name] = self._from_first(part)
        return said["value"], tensors

    @contextmanager
    def together(self) -> Iterator[None]:
        wrong: Exception | None = None
        try:
            yield
        except Exception as error:  # raised again when the others know
            wrong = error
        words = b"" if wrong is None else json.dumps(_told(wrong, f"rank {self.rank}: ")).encode()
        lengths = [int(n) for n in self._everybody(torch.tensor([len(words)]))]
        if not any(lengths):
            return
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(words)] = torch.frombuffer(bytearray(words or b" "), dtype=torch.uint8)[: len(words)]
        said = self._everybody(mine)
        first = next(r for r, n in enumerate(lengths) if n)
        raise _error(json.loads(bytes(said[first][: lengths[first]].cpu().numpy()))) from wrong

    # -- what is sent ---------------------------------------------------------------------------------------

    def _count(self, sent: int) -> None:
        self.calls += 1
        self.sent += sent

    def _bytes(self, flat: Tensor) -> Tensor:
        """As bytes, where they may be sent from: every type goes the same way, and nothing is rounded on it."""
        flat = (flat.to(torch.uint8) if flat.dtype == torch.bool else flat).contiguous()
        there = flat.is_cuda if self._hosts else True
        if flat.is_cuda and not self._devices:
            there = False
        return (flat.cuda() if there else flat.cpu()).view(torch.uint8)

    def _everybody(self, flat: Tensor) -> list[Tensor]:
        """What each rank has, in their order."""
        mine = self._bytes(flat)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with _connected():
            dist.all_gather(parts, mine)
        self._count((self.size - 1) * mine.nbytes)
        return [part.view(_sent(flat)).to(flat.device) for part in parts]

    def _in_pieces(self, flat: Tensor) -> Tensor:
        each = -(-len(flat) // self.size)
        padded = torch.nn.functional.pad(flat, (0, each * self.size - len(flat)))
        mine = self._bytes(padded)
        theirs = torch.empty_like(mine)
        with _connected():
            dist.all_to_all_single(theirs, mine)
        self._count((self.size - 1) * mine.nbytes // self.size)
        piece = _added(list(theirs.view(_sent(flat)).view(self.size, each).unbind(0)))
        return torch.cat(self._everybody(piece))[: len(flat)].to(flat.device)

    def _from_first(self, x: Tensor) -> Tensor:
        flat = x.contiguous().view(-1)
        if not len(flat):
            return x
        data = self._bytes(flat).clone()
        with _connected():
            dist.broadcast(data, 0)
        self._count(data.nbytes if self.rank == 0 else 0)
        return data.view(_sent(flat)).to(x.device, x.dtype).view(x.shape)


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"another rank ended, and none goes on without it ({str(error).splitlines()[0]})"
                            ) from error


def _sent(flat: Tensor) -> torch.dtype:
    return torch.uint8 if flat.dtype == torch.bool else flat.dtype


def _added(parts: list[Tensor]) -> Tensor:
    """In the order given, in float64 (whole numbers as they are), rounded once."""
    dtype = parts[0].dtype
    total = parts[0].double() if dtype.is_floating_point else parts[0].clone()
    for part in parts[1:]:
        total = total + part.to(total.dtype)
    return total.to(dtype)


def _told(error: Exception, who: str = "") -> dict[str, str]:
    kind = "input" if isinstance(error, (InputError, OSError)) else "fault"
    said = str(error) if isinstance(error, (InputError, OSError)) else f"{type(error).__name__}: {error}"
    return {"kind": kind, "words": who + said}


def _error(said: Mapping[str, str]) -> Exception:
    return (InputError if said["kind"] == "input" else RuntimeError)(said["words"])


def ranks() -> Alone:
    """The ranks of the default group, where one of more than one process was started."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Group()
    return ALONE


def price(numbers: int, size: int, ranks: int) -> tuple[int, int]:
    """Calls, and bytes that each rank sends, for a total of so many numbers of ``size`` bytes: a model, which the
    counters are held against."""
    if ranks == 1:
        return 0, 0
    if ranks == 2 or numbers * size <= SHORT:
        return 1, (ranks - 1) * numbers * size
    return 2, 2 * (ranks - 1) * -(-numbers // ranks) * size
