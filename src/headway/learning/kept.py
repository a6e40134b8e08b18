"""The run that a fit is kept in: of these examples and settings and no others, of one process or several.

Of several ranks the first alone has the folder; what it reads there all of them get.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from headway.core import checks
from headway.core.examples import Examples
from headway.core.layer import AttentionLayer, restored_layer, stored_layer
from headway.core.results import Fit, Status
from headway.core.shards import Shards
from headway.core.sources import Answers
from headway.learning.parts import Parted, digest_of, ranks_of, store_of
from headway.learning.settings import Sculpt, Settings
from headway.runs.store import Run


def kept_in(
    run: str | os.PathLike[str] | Run | None, examples: Examples, options: dict[str, Any], settings: Settings
) -> tuple[Run | None, bool]:
    """The run of these examples and settings, and whether it is finished; a folder that belongs to others is
    refused. Of several ranks the first has it."""
    if run is None:
        return None, False
    if not isinstance(run, (str, os.PathLike, Run)):
        checks.refuse("run", "the path of a folder", type(run).__name__, "run='runs/first'")
    group, mine = ranks_of(examples), list[Run]()

    def opened() -> tuple[bool, dict[str, Tensor]]:
        """Whether it knows its examples by the hashes of the sequences, each of which one rank can form, and not by
        one hash over all of them, which one process has to read: runs that several ranks began do."""
        mine.append(run if isinstance(run, Run) else Run.at(run))
        begun = "digest" in mine[0].config
        return mine[0].config.get("digest_of") == "sequences" if begun else not group.alone, {}

    of_each = group.led(opened)[0]
    known = {"digest": digest_of(examples), "digest_of": "sequences"} if of_each else {}

    def claimed() -> tuple[bool, dict[str, Tensor]]:
        digest = known or {"digest": store_of(examples).digest()}
        mine[0].claim(_own(examples, options, settings, digest))
        return mine[0].finished, {}

    finished = bool(group.led(claimed)[0])
    return mine[0] if mine else None, finished


def _own(
    examples: Examples, options: dict[str, Any], settings: Settings, digest: dict[str, str]
) -> dict[str, Any]:
    """What makes a run the one of these examples and settings."""
    own: dict[str, Any] = {**digest, "examples": "in memory", "options": options}
    examples = store_of(examples)
    if isinstance(examples, Shards):
        own["examples"] = str(examples.folder.resolve())
    more: dict[str, Any] = {}
    if isinstance(settings, Sculpt) and settings.thresholds is not None:
        more["thresholds"] = asdict(settings.thresholds)
    if isinstance(settings, Sculpt) and settings.truth is not None:
        more["truth"] = hashlib.sha256(b"".join(
            name.encode() + tensor.detach().cpu().to(torch.float64).contiguous().numpy().tobytes()
            for name, tensor in sorted(settings.truth.tensors().items()))).hexdigest()
    if isinstance(examples, Answers):  # what it may ask for makes it another run
        more["fresh"] = True if examples.fresh is None else examples.fresh
    if more:
        own["more"] = more
    if isinstance(examples, Shards) and "thresholds" not in more:
        own["command"] = "learn"  # which makes it again
    return own


def everywhere(
    examples: Examples, find: Callable[[], Fit | None], device: torch.device | None = None
) -> Fit:
    """The fit that rank 0 has, on every rank."""
    group = ranks_of(examples)
    if group.alone:
        fit = find()
        assert fit is not None
        return fit

    def found() -> tuple[dict[str, Any], dict[str, Tensor]]:
        fit = find()
        assert fit is not None
        tensors, words = stored_layer(fit.layer)
        return {"layer": words, "status": asdict(fit.status), "stats": dict(fit.stats),
                "trace": [dict(event) for event in fit.trace], "settings": dict(fit.settings),
                "seed": fit.seed}, tensors

    said, tensors = group.led(found)
    layer = restored_layer("fit", dict(tensors), said.pop("layer"))
    if device is not None and device.type != "cpu":
        layer = layer.to(device)
    assert isinstance(layer, AttentionLayer)
    return Fit(layer, Status(**said.pop("status")), said["stats"], tuple(said["trace"]), said["settings"],
               said["seed"])


def with_ranks(fit: Fit, examples: Examples) -> Fit:
    """With the number of ranks, what rank 0 sent, and the memory of the rank that took most."""
    group = ranks_of(examples)
    if group.alone:
        return fit
    most = {where: int(group.largest(float(held))) for where, held in sorted(fit.stats["peak_memory"].items())}
    return replace(fit, stats={**fit.stats, "ranks": group.size, "communication": group.counted,
                               "peak_memory": most})


def finish(kept: Run | None, fit: Fit, examples: Examples) -> None:
    hashes, group = examples.hashes(), ranks_of(examples)

    def finished() -> tuple[None, dict[str, Tensor]]:
        assert kept is not None
        kept.finish(fit, hashes, examples.parts() if isinstance(examples, Parted) else None)
        return None, {}

    group.led(finished)
