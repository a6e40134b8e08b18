"""A run is a folder: config, stages, versions, hashes, layer.safetensors and, last, manifest.json.

Every file is written to a temporary name and moved, so that a run killed at any moment holds only whole
files. Stages are saved as they finish; a resumed run reads them back instead of computing them again.

A run belongs to its examples and settings: config.json holds the digest of the one and all of the other, and every
stage carries a hash of both. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.core import checks
from headway.core.factored import FactoredLayer
from headway.core.files import read_json, read_tensors, regular, write_json, write_tensors
from headway.core.layer import AttentionLayer, load_layer, save_layer
from headway.core.measured import Errors, fingerprint
from headway.core.names import BASELINES
from headway.core.results import Certificate, Claim, Fit, Status
from headway.core.words import described
from headway.runs import schema
from headway.runs.schema import FILES, FREE

Stage = tuple[dict[str, Tensor], dict[str, Any]]
KIND = schema.RUN
CERTIFICATE = schema.CERTIFIED
WRITTEN = "a run folder written by headway learn"
SEEN = "seen.safetensors"  # a hash of every sequence the layer was learned from
COUNTED = "counted.safetensors"  # hash and error of every sequence that a certificate counted


class Run:
    """One run folder. ``stage`` runs a computation once and for all."""

    def __init__(self, path: Path, config: dict[str, Any], truth: AttentionLayer | None = None) -> None:
        self.path, self.config, self._truth = path, config, truth

    @property
    def begun(self) -> bool:
        return (self.path / "config.json").exists()

    def begin(self) -> None:
        """Make the folder and write its configuration, unless that is done."""
        if not self.begun:
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "config.json", self.config)
            if self._truth is not None:
                save_layer(self.path / "truth.safetensors", self._truth)

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], config: Mapping[str, Any], truth: AttentionLayer | None = None
    ) -> Run:
        """A run to come: the folder must be free, and appears with the first stage that finishes, so that input
        refused at the door leaves nothing behind. ``truth``: the hidden layer of a demonstration, kept beside."""
        folder = Path(path)
        whole = {"kind": KIND, **json.loads(json.dumps(dict(config)))}
        if folder.exists() and not _vacant(folder):
            # Only these go on with a run.
            goes_on = config.get("command", "learn") in ("learn", "train")
            resume = f", or --resume {folder} to go on with that run" * goes_on
            checks.refuse("out", "a new or empty folder", f"{folder}, which is neither", f"another name{resume}")
        return cls(folder, whole, truth)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Run:
        """The run in this folder; refused if its configuration is not one that headway writes."""
        folder = Path(path)
        if folder.is_dir() and any(folder.iterdir()) and _vacant(folder):
            checks.refuse(str(folder), "a run that has begun", "one stopped before it wrote anything",
                          f"the command that made it once more, with --out {folder}: nothing is lost")
        config = read_json(folder / "config.json", WRITTEN)
        if config.get("kind") != KIND:
            checks.refuse(str(folder), f"a run of kind {KIND}", config.get("kind"), "headway learn again")
        schema.check(folder / "config.json", config, schema.CONFIG, "a configuration as headway writes it",
                     "make the run again")
        return cls(folder, config)

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Run:
        """The run in this folder if there is one, else one to come."""
        folder = Path(path)
        return cls.open(folder) if (folder / "config.json").exists() else cls.create(folder, {})

    @property
    def finished(self) -> bool:
        return (self.path / "manifest.json").exists()

    @property
    def out_of_time(self) -> bool:
        """Whether the run ended only because its seconds did, so that more of them may end it better."""
        if not self.finished:
            return False
        found = self.manifest()
        return bool(found["stats"].get("out_of_time")) and not Status(**found["status"]).ok

    # -- whose run it is ------------------------------------------------------------------------------------

    def claim(self, own: Mapping[str, Any]) -> None:
        """Make this the run of ``own`` (digest, options, examples, more): write it down the first time, refuse what
        differs ever after. Seconds, device and the place of the examples may change while a run goes on."""
        own = json.loads(json.dumps(dict(own)))
        mine = self.config
        if "digest" in mine and mine["digest"] != own["digest"]:
            checks.refuse("run", f"the examples {self.path} began with (digest {mine['digest'][:12]}…)",
                          f"other ones (digest {own['digest'][:12]}…)", "another folder for these")
        if "options" not in mine:
            if self.finished or any((self.path / "stages").glob("*")):
                checks.refuse("run", "a run that says which settings it was made with",
                              f"{self.path}, whose config.json does not", "another folder")
            self._rewrite({**own, **mine, "digest": own["digest"], "options": own["options"]})
            return
        for name, value in _fixed({**mine["options"], **mine.get("more", {})}).items():
            other = {**own["options"], **own.get("more", {})}.get(name)
            if other != value:
                shown = described if name == "form" else repr
                checks.refuse("run", f"{name}={shown(value)}, as {self.path} began", f"{name}={shown(other)}",
                              "the same setting, or another folder")
        extra = {*own.get("more", {}), *_fixed(own["options"])} - {*mine.get("more", {}), *mine["options"]}
        if extra:
            checks.refuse("run", f"no {sorted(extra)[0]}, as {self.path} began", "one", "another folder")
        if self.out_of_time:
            # The layer to come is another one: what was said of this one goes with the manifest.
            for name in ("manifest.json", "certificate.json", COUNTED):
                (self.path / name).unlink(missing_ok=True)
        if not self.finished:
            place = own["examples"] if Path(own["examples"]).is_absolute() else mine["examples"]
            self._rewrite({**mine, "examples": place, "options": own["options"]})

    def _rewrite(self, config: dict[str, Any]) -> None:
        if config != self.config:
            self.config = config
            if self.begun:
                write_json(self.path / "config.json", config)

    def has(self, stage: str) -> bool:
        """Whether this stage is kept."""
        return (self.path / "stages" / f"{stage}.safetensors").exists()

    def stage(self, name: str, compute: Callable[[], Stage]) -> Stage:
        """What ``compute`` returned the first time this stage was run.

        The result is always the one read back, and copied: a run that goes on and one that is resumed then work on
        tensors of the same layout and alignment, so that sums come out the same to the last bit.
        """
        path = self.path / "stages" / f"{name}.safetensors"
        if not self.has(name):
            tensors, info = compute()
            self.begin()
            path.parent.mkdir(exist_ok=True)
            write_tensors(path, tensors, {"info": json.dumps(info), "config": self._digest()})
        self._drop_snapshot(name)
        try:
            tensors, meta = read_tensors(path)
            info = json.loads(meta.get("info", ""))
        except ValueError:  # which a complaint about input is too
            checks.refuse(str(path), "a whole stage", "a damaged file",
                          f"delete it, then headway learn --resume {self.path}")
        if meta.get("config") != self._digest():
            checks.refuse(str(path), "a stage made with this run's config.json", "one made with other settings",
                          "headway learn afresh")
        return {part: tensor.clone() for part, tensor in tensors.items()}, info

    # -- inside a stage -------------------------------------------------------------------------------------

    def _snapshot(self, stage: str) -> Path:
        return self.path / "snapshots" / f"{stage}.safetensors"

    def keep_snapshot(self, stage: str, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        """Where a stage stands that is not finished, in the place of what was kept before."""
        self.begin()
        path = self._snapshot(stage)
        path.parent.mkdir(exist_ok=True)
        write_tensors(path, tensors, {"info": json.dumps(dict(info)), "config": self._digest()})

    def snapshot(self, stage: str) -> Stage | None:
        """What was kept of it; none where there is none that can be read and is of these settings: then the stage
        begins again, which leads to the same."""
        path = self._snapshot(stage)
        if not path.exists():
            return None
        try:
            tensors, meta = read_tensors(path)
            info = json.loads(meta.get("info", ""))
        except ValueError:
            return None
        whole = meta.get("config") == self._digest() and isinstance(info, dict)
        return ({part: tensor.clone() for part, tensor in tensors.items()}, info) if whole else None

    def _drop_snapshot(self, stage: str) -> None:
        path = self._snapshot(stage)
        path.unlink(missing_ok=True)
        if path.parent.exists() and not any(path.parent.iterdir()):
            path.parent.rmdir()

    def _digest(self) -> str:
        """Of what the stages depend on: not where the examples lie, nor how long the run may take and on what."""
        config = {name: value for name, value in self.config.items() if name != "examples"}
        if "options" in config:
            config["options"] = _fixed(config["options"])
        return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()

    def finish(
        self, fit: Fit, seen: np.ndarray | None = None, ranks: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Write the layer and what it was learned from, as hashes of the sequences; then the manifest: a run
        without a manifest is not finished. ranks: what each had of the examples, where there were several."""
        self.begin()
        shutil.rmtree(self.path / "snapshots", ignore_errors=True)  # of stages that this end did without
        if seen is not None:
            write_tensors(self.path / SEEN, {"hashes": torch.from_numpy(seen)}, {})
        save_layer(self.path / "layer.safetensors", fit.layer)
        hashes = {name: _sha256(self.path / name) for name in FILES if (self.path / name).exists()}
        write_json(self.path / "manifest.json", {
            "kind": KIND,
            "status": {"kind": fit.status.kind, "sentence": fit.status.sentence,
                       "numbers": dict(fit.status.numbers)},
            "stats": dict(fit.stats),
            "trace": [dict(event) for event in fit.trace],
            "versions": versions(),
            "sha256": hashes,
            **({} if ranks is None else {"ranks": [dict(part) for part in ranks]}),
        })

    def manifest(self) -> dict[str, Any]:
        if not self.finished:
            hint = f"headway learn --resume {self.path}"
            if self.config.get("command") == "train":
                done = (self.path / "results.json").exists()
                hint = (f"headway report {self.path}, which shows training runs" if done else
                        f"headway train --resume {self.path}")
            checks.refuse(str(self.path), "a finished run", "one without manifest.json", hint)
        path = self.path / "manifest.json"
        found = read_json(path, WRITTEN)
        schema.check(path, found, schema.MANIFEST, f"a manifest of kind {KIND}", "headway learn again")
        return found

    def fit(self) -> Fit:
        """The stored result; refused if a file is not the one the manifest vouches for."""
        manifest = self.manifest()
        for name, expected in manifest["sha256"].items():
            if not (self.path / name).exists() or _sha256(self.path / name) != expected:
                checks.refuse(str(self.path / name), "the file the manifest describes (sha256)",
                              "another or none", "headway learn again")
        layer = load_layer(self.path / "layer.safetensors")
        options = self.config.get("options", {})
        return Fit(layer, Status(**manifest["status"]), manifest["stats"], tuple(manifest["trace"]), options,
                   options.get("seed", 0))

    def seen(self) -> np.ndarray | str | None:
        """What ``certify`` refuses: the hashes of the sequences learned from, or, in a run that has none, the
        digest of all of them together."""
        if (self.path / SEEN).exists():
            hashes: np.ndarray = read_tensors(self.path / SEEN)[0]["hashes"].numpy()
            return hashes
        return self.config.get("digest")

    def certified(self, certificate: Certificate, about: Mapping[str, Any]) -> Path:
        """Write certificate.json: the claims, what they were computed from, and with which versions; before it the
        errors that were counted, so that later examples can be added."""
        path = self.path / "certificate.json"
        if certificate.held_out is not None:
            write_tensors(self.path / COUNTED, *certificate.held_out.stored())
        write_json(path, {
            "kind": CERTIFICATE, **about, "confidence": certificate.confidence,
            "settings": dict(certificate.settings), "versions": versions(),
            "layer_sha256": _sha256(self.path / "layer.safetensors"),
            "claims": [{"name": c.name, "holds": c.holds, "statement": c.statement, "assumption": c.assumption,
                        "reason": c.reason, "numbers": dict(c.numbers)} for c in certificate.claims]})
        return path

    def certificate(self) -> Certificate | None:
        """The stored certificate; none if there is none, or if it speaks of another layer."""
        path = self.path / "certificate.json"
        if not path.exists():
            return None
        what, again = "a certificate written by headway certify", "headway certify again"
        found = read_json(path, what, again)
        schema.check(path, found, schema.CERTIFICATE, what, again)
        if found["layer_sha256"] != _sha256(self.path / "layer.safetensors"):
            checks.refuse(str(path), "a certificate of this run's layer", "one of another", "headway certify again")
        claims = tuple(Claim(**claim) for claim in found["claims"])
        return Certificate(claims, found["confidence"], found["settings"], self.counted())

    def counted(self) -> Errors | None:
        """The errors that certificates of this run's layer have counted; none if there are none, or of another."""
        path = self.path / COUNTED
        if not path.exists():
            return None
        found = Errors.restored(str(path), *read_tensors(path))
        return found if found.layer == fingerprint(load_layer(self.path / "layer.safetensors")) else None

    def truth(self) -> AttentionLayer | FactoredLayer | None:
        """The hidden layer, where the run was a demonstration that knew it."""
        path = self.path / "truth.safetensors"
        return load_layer(path) if path.exists() else None


def _fixed(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make a run what it is: for the baselines, which use all their seconds, these too."""
    free = FREE if options["method"] not in BASELINES else ("device",)
    return {name: value for name, value in options.items() if name not in free}


def _vacant(folder: Path) -> bool:
    """Whether a run may be made here: nothing inside, or only what one leaves that was killed as it began."""
    def left_over(entry: Path) -> bool:
        return entry.name.startswith(".config.json.") or (
            entry.name == "stages" and entry.is_dir() and not any(entry.iterdir()))

    return folder.is_dir() and all(left_over(entry) for entry in folder.iterdir())


def versions() -> dict[str, str]:
    names = ("headway", "torch", "numpy", "scipy", "safetensors")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def _sha256(path: Path) -> str:
    return hashlib.sha256(regular(path).read_bytes()).hexdigest()
