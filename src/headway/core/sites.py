"""Where attention happens in a model: the module a path names, and where its input enters and its output leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from headway.core import checks
from headway.core.weights import PARTS, places

SHOWN = 12  # paths named in a complaint
DROPOUT = ("dropout", "pdrop")  # how a chance of dropping is named


@dataclass(frozen=True)
class Site:
    """Attention in a model: what enters ``entry`` is X, what leaves ``exit`` is Y.

    Two modules only where the output projection stands beside the heads (BERT: attention.self, then
    attention.output.dense); ``above`` are the modules that hold the entry, the nearest first.
    """

    path: str
    entry: nn.Module
    exit: nn.Module
    exit_path: str
    above: tuple[nn.Module, ...]

    @property
    def split(self) -> bool:
        return self.exit is not self.entry


def packing(site: Site) -> list[nn.TransformerEncoder]:
    """Encoders of torch around an attention that hand it nested tensors, without the filling: they need not, and
    ``use_nested_tensor`` says so."""
    return [part for part in site.above if isinstance(part, nn.TransformerEncoder)
            and getattr(part, "use_nested_tensor", False)]


def find(model: nn.Module, path: str | None = None) -> Site:
    """The attention that a path names: the module itself, or the only one inside it.

    A path that leads nowhere is refused with the attention modules there are. A module that is no attention we
    know, and holds none, is its own site: what it computes may still be learned.
    """
    if not isinstance(model, nn.Module):
        checks.refuse("module" if path is None else "model", "a torch.nn.Module", type(model).__name__,
                      "the model itself")
    path = "" if path is None else path
    if not isinstance(path, str):
        checks.refuse("path", "the name of a module of the model", f"{path!r} ({type(path).__name__})",
                      _listed(model))
    chain = [model]
    for name in path.split(".") if path else ():
        inner = dict(chain[-1].named_children()).get(name)
        if inner is None:
            got = f"{path!r}: no {name!r} in {type(chain[-1]).__name__}"
            checks.refuse("path", "the name of a module of the model", got, _listed(model))
        chain.append(inner)
    inside = list(_inside(chain[-1], path))
    if len(inside) > 1:
        checks.refuse("path", "one attention", f"{path!r}, which holds {len(inside)}" if path else
                      f"{type(model).__name__}, which holds {len(inside)}", _listed(chain[-1], path))
    if not inside:
        return Site(path, chain[-1], chain[-1], path, tuple(reversed(chain[:-1])))
    _, at, leave = inside[0]
    for name in at[len(path):].strip(".").split("."):
        chain += [getattr(chain[-1], name)] if name else []
    return Site(at, chain[-1], model.get_submodule(leave), leave, tuple(reversed(chain[:-1])))


def is_stand(module: nn.Module) -> bool:
    """Whether a layer of Headway's was put there (``headway.replace``)."""
    return getattr(type(module), "stands", False) is True


def attention_paths(model: nn.Module) -> list[str]:
    """The paths of all attention modules that are known by the names of their weights."""
    return [path for path, _, _ in _inside(model, "")]


def _inside(module: nn.Module, path: str) -> Iterator[tuple[str, str, str]]:
    """(path, entry, exit) of every attention at or below a module, outermost first, none inside another."""
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    stem = f"{path}." if path else ""
    if isinstance(module, nn.MultiheadAttention) or is_stand(module) or _direct(names):
        yield path, path, path
        return
    for inner in ("self", "attention"):
        if all(f"{inner}.{part}.weight" in names for part in PARTS[:3]) and "output.dense.weight" in names:
            yield path, f"{stem}{inner}", f"{stem}output.dense"
            return
    for name, child in module.named_children():
        yield from _inside(child, f"{stem}{name}")


def _direct(names: set[str]) -> bool:
    """Whether the weights are the module's own, not two levels down."""
    found = places(names)
    return found is not None and found["query"].name.count(".") < 2


def _listed(model: nn.Module, prefix: str = "") -> str:
    paths = [f"{prefix}.{path}".strip(".") for path in attention_paths(model)]
    if not paths:
        return "a path that model.named_modules() has; no attention of a known kind is among them"
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return f"one of {', '.join(paths[:SHOWN])}{more}"


def dropped(*modules: nn.Module) -> tuple[str, float] | None:
    """What a module in training mode leaves out at random, and how much of it; None if nothing."""
    for module in modules:
        for name, part in module.named_modules():
            if not part.training:
                continue
            said: dict[str, Any] = {f"{name}.p".strip("."): part.p} if isinstance(
                part, nn.modules.dropout._DropoutNd) else {
                key: value for key, value in vars(part).items() if any(word in key for word in DROPOUT)}
            for key, value in said.items():
                if isinstance(value, float) and value > 0:
                    return key, value
    return None


def refuse_dropout(name: str, *modules: nn.Module) -> None:
    found = dropped(*modules)
    if found is not None:
        what, rate = found
        words = "dropout" if isinstance(modules[0], nn.MultiheadAttention) else what
        checks.refuse(name, "a function", f"{words} {rate:g} in training mode: its outputs are random",
                      f"{name}.eval() first")
