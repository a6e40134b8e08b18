"""A run is a folder: config, stages, versions, hashes, layer.safetensors and, last, manifest.json.

Every file is written to a temporary name and moved, so that a run killed at any moment holds only whole
files. Stages are saved as they finish; a resumed run reads them back instead of computing them again.
Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.core import checks
from headway.core.files import read_json, read_tensors, write_json, write_tensors
from headway.core.layer import AttentionLayer, load_layer, save_layer
from headway.core.results import Certificate, Claim, Fit, Status

Stage = tuple[dict[str, Tensor], dict[str, Any]]
KIND = "headway-run-1"
CERTIFICATE = "headway-certificate-1"
MANIFEST = {"status", "stats", "trace", "versions", "sha256"}
SEEN = "seen.safetensors"  # a hash of every sequence the layer was learned from
FILES = ("config.json", "layer.safetensors", "truth.safetensors", SEEN)


class Run:
    """One run folder. ``stage`` runs a computation once and for all."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path, self.config = path, config

    def begin(self) -> None:
        """Make the folder and write its configuration, unless that is done."""
        if not (self.path / "config.json").exists():
            (self.path / "stages").mkdir(parents=True, exist_ok=True)
            write_json(self.path / "config.json", self.config)

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: Mapping[str, Any]) -> Run:
        """A run to come: the folder must be free, and appears with the first stage that finishes, so that input
        refused at the door leaves nothing behind."""
        folder = Path(path)
        whole = {"kind": KIND, **json.loads(json.dumps(dict(config)))}
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            checks.refuse("out", "a new or empty folder", f"{folder}, which is neither",
                          f"another name, or --resume {folder} to go on with that run")
        return cls(folder, whole)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Run:
        folder = Path(path)
        config = read_json(folder / "config.json", "a run folder written by headway learn")
        if config.get("kind") != KIND:
            checks.refuse(str(folder), f"a run of kind {KIND}", config.get("kind"), "headway learn again")
        return cls(folder, config)

    @property
    def finished(self) -> bool:
        return (self.path / "manifest.json").exists()

    def stage(self, name: str, compute: Callable[[], Stage]) -> Stage:
        """What ``compute`` returned the first time this stage was run.

        The result is always the one read back, and copied: a run that goes on and one that is resumed then work on
        tensors of the same layout and alignment, so that sums come out the same to the last bit.
        """
        path = self.path / "stages" / f"{name}.safetensors"
        if not path.exists():
            tensors, info = compute()
            self.begin()
            path.parent.mkdir(exist_ok=True)
            write_tensors(path, tensors, {"info": json.dumps(info), "config": self._digest()})
        try:
            tensors, meta = read_tensors(path)
        except checks.InputError:
            checks.refuse(str(path), "a whole stage", "a damaged file",
                          f"delete it, then headway learn --resume {self.path}")
        if meta.get("config") != self._digest():
            checks.refuse(str(path), "a stage made with this run's config.json", "one made with other settings",
                          "headway learn afresh")
        return {part: tensor.clone() for part, tensor in tensors.items()}, json.loads(meta["info"])

    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()

    def finish(self, fit: Fit, seen: np.ndarray | None = None) -> None:
        """Write the layer and what it was learned from, as hashes of the sequences; then the manifest: a run without
        a manifest is not finished."""
        self.begin()
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
        })

    def manifest(self) -> dict[str, Any]:
        if not self.finished:
            trained = self.config.get("command") == "train"
            checks.refuse(str(self.path), "a finished run", "one without manifest.json",
                          f"headway report {self.path}, which shows training runs that are done" if trained else
                          f"headway learn --resume {self.path}")
        found = read_json(self.path / "manifest.json", "a run folder written by headway learn")
        if found.get("kind") != KIND or not MANIFEST <= set(found):
            checks.refuse(str(self.path / "manifest.json"), f"a manifest of kind {KIND}",
                          f"one with {sorted(found) or 'nothing'}", "headway learn again")
        return found

    def fit(self) -> Fit:
        """The stored result; refused if a file is not the one the manifest vouches for."""
        manifest = self.manifest()
        for name, expected in manifest["sha256"].items():
            if not (self.path / name).exists() or _sha256(self.path / name) != expected:
                checks.refuse(str(self.path / name), "the file the manifest describes (sha256)",
                              "another or none", "headway learn again")
        layer = load_layer(self.path / "layer.safetensors")
        return Fit(layer, Status(**manifest["status"]), manifest["stats"], tuple(manifest["trace"]))

    def seen(self) -> np.ndarray | str | None:
        """What ``certify`` refuses: the hashes of the sequences learned from, or, in a run that has none, the digest
        of all of them together."""
        if (self.path / SEEN).exists():
            hashes: np.ndarray = read_tensors(self.path / SEEN)[0]["hashes"].numpy()
            return hashes
        return self.config.get("digest")

    def certified(self, certificate: Certificate, about: Mapping[str, Any]) -> Path:
        """Write certificate.json: the claims, what they were computed from, and with which versions."""
        path = self.path / "certificate.json"
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
        found = read_json(path, "a certificate written by headway certify", "headway certify again")
        about = found.get("layer_sha256")
        if found.get("kind") != CERTIFICATE or about != _sha256(self.path / "layer.safetensors"):
            checks.refuse(str(path), "a certificate of this run's layer", "one of another", "headway certify again")
        claims = tuple(Claim(**claim) for claim in found["claims"])
        return Certificate(claims, found["confidence"], found["settings"])

    def truth(self) -> AttentionLayer | None:
        """The hidden layer, where the run was a demonstration that knew it."""
        path = self.path / "truth.safetensors"
        return load_layer(path) if path.exists() else None


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
    return hashlib.sha256(path.read_bytes()).hexdigest()
