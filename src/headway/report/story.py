"""What a run has to say, gathered from its folder: sentences, numbers and layers, and what is missing. No drawing.

Two kinds of run tell a story: one that learned a layer, with or without a certificate and a known truth, and one
that trained by descent.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.core import checks
from headway.core.convert import rank_shown
from headway.core.files import read_json
from headway.core.layer import AttentionLayer, load_layer
from headway.core.match import Match, match
from headway.core.results import Certificate, Fit
from headway.runs import traces
from headway.runs.store import Run

TRAINED = "headway-train-1"
OUTCOMES = {
    "recovered": "recovered", "fitted": "fitted", "noise": "as well as the noise allows",
    "not_realisable": "not realisable", "too_few": "too few examples",
    "degenerate": "a condition fails", "limit": "stopped at a limit"}
# As in CITATION.cff.
PAPERS = (
    ("S. Chen and Y. Li. Provably learning a multi-head attention layer. 2024.", "https://arxiv.org/abs/2402.04084"),
    ("P. Deora, R. Ghaderi, H. Taheri and C. Thrampoulidis. On the Optimization and Generalization of Multi-head "
     "Attention. 2023.", "https://arxiv.org/abs/2310.12680"))


@dataclass(frozen=True)
class Head:
    """A learned head, beside the true one it stands for where that is known."""

    number: int
    norms: Mapping[str, float]  # of Θ, u and W
    spectra: Mapping[str, tuple[float, ...]]  # singular values of Θ and W, and of the true ones
    ranks: Mapping[str, int]
    partner: int | None = None  # the true head's number
    errors: tuple[float, float] | None = None  # of Θ (with u) and W


@dataclass(frozen=True)
class Story:
    """One run. ``missing`` says what it does not have, and how to come by it."""

    title: str
    ok: bool
    sentences: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    command: str | None
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    missing: Mapping[str, str] = field(default_factory=dict)
    fit: Fit | None = None
    heads: tuple[Head, ...] = ()
    truth: AttentionLayer | None = None
    match: Match | None = None
    certificate: Certificate | None = None
    training: tuple[tuple[str, Mapping[str, Any]], ...] = ()


def gather(folder: Path, truth: Path | None = None) -> Story:
    """The story of a run folder. ``truth``: a stored layer to set beside the learned one."""
    run = Run.open(folder)
    if (folder / "results.json").exists() and not run.finished:
        if truth is not None:
            checks.refuse("truth", "none for a training run, which has no hidden layer", str(truth), "leave it out")
        return _trained(run)
    fit = run.fit()
    known = load_layer(truth) if truth is not None else run.truth()
    if known is not None and (known.width, known.out_width, known.mask) != (
            fit.layer.width, fit.layer.out_width, fit.layer.mask):
        checks.refuse(f"truth {truth or run.path / 'truth.safetensors'}", "a layer shaped as the learned one, "
                      f"{_width(fit.layer)}, mask {fit.layer.mask}", f"{_width(known)}, mask {known.mask}",
                      "the layer these examples came from")
    return _learned(run, fit, known, run.certificate())


def _learned(run: Run, fit: Fit, truth: AttentionLayer | None, certificate: Certificate | None) -> Story:
    layer, stats = fit.layer, fit.stats
    found = match(layer, truth) if truth is not None else None
    missing: dict[str, str] = {}
    sentences = [fit.status.sentence]
    if certificate is None:
        missing["certificate"] = ("This run has no certificate. Fresh examples give one: "
                                  f"headway certify {shlex.quote(str(run.path))} --examples FRESH")
    else:
        sentences.append(_certified(certificate))
    if found is None:
        missing["truth"] = ("The true layer is not known to this run. If you have it: "
                            f"headway report {shlex.quote(str(run.path))} --truth LAYER.safetensors")
    elif found.missing or found.excess:
        lost = ", ".join(str(i + 1) for i in found.missing) or "none"
        sentences.append(f"Beside the true layer of {len(found.order)} heads: missing {lost}; "
                         f"{len(found.excess)} learned in excess.")
    else:
        worst = max(*found.theta_error, *found.w_error)
        sentences.append(f"Beside the true layer, the worst relative error of any head is {worst:.1e}.")
    count = f"{layer.heads} head" + "s" * (layer.heads != 1)
    fitted = int(fit.status.numbers.get("heads", layer.heads))
    if fitted != layer.heads:
        sentences.append(f"Of the {fitted} heads fitted, {layer.heads} differ and have weight.")
    heads = _heads(layer, truth, found)
    rank = max(head.ranks["Θ"] for head in heads)
    facts = [("heads", str(layer.heads)), ("width", _width(layer)),
             ("rank of Θ", "full" if rank == layer.width else str(rank)),
             ("held-out error", f"{stats['held_out_error']:.1e}"),
             ("sequences", f"{stats['examples']:,}"), ("counting floor", f"{stats['floor']:,}"),
             ("seconds", f"{stats['seconds']:.1f}"), ("products", f"{stats['products']:,}")]
    return Story(
        f"{count}, {OUTCOMES.get(fit.status.kind, fit.status.kind)}", fit.status.ok, tuple(sentences), tuple(facts),
        command(run.config), run.config, dict(run.manifest()["versions"]), missing, fit, heads, truth, found,
        certificate)


def _width(layer: AttentionLayer) -> str:
    return str(layer.width) if layer.width == layer.out_width else f"{layer.width} → {layer.out_width}"


def _certified(certificate: Certificate) -> str:
    counts = {word: sum(claim.holds == word for claim in certificate.claims) for word in ("yes", "no", "undecided")}
    told = ", ".join(f"{n} {word}" for word, n in counts.items() if n)
    return (f"Its certificate answers {len(certificate.claims)} questions from fresh examples at "
            f"{certificate.confidence:.0%} confidence: {told}.")


def _heads(layer: AttentionLayer, truth: AttentionLayer | None, found: Match | None) -> tuple[Head, ...]:
    heads = []
    for j in range(layer.heads):
        parts: dict[str, Tensor] = {"Θ": layer.Theta[j], "W": layer.W[j]}
        norms = {name: float(part.double().norm()) for name, part in parts.items()}
        if layer.key_bias is not None:
            norms["u"] = float(layer.key_bias[j].double().norm())
        partner, errors = None, None
        if truth is not None and found is not None and j in found.order:
            i = found.order.index(j)
            partner, errors = i + 1, (found.theta_error[i], found.w_error[i])
            parts |= {"true Θ": truth.Theta[i], "true W": truth.W[i]}
        spectra = {name: tuple(torch.linalg.svdvals(part.double().cpu()).tolist())
                   for name, part in parts.items()}
        ranks = {name: rank_shown(values) for name, values in spectra.items()}
        heads.append(Head(j + 1, norms, spectra, ranks, partner, errors))
    return tuple(heads)


def _trained(run: Run) -> Story:
    again = "headway train --out RUN again"
    found = read_json(run.path / "results.json", "the results of headway train", again)
    if found.get("kind") != TRAINED:
        checks.refuse(str(run.path / "results.json"), f"results of kind {TRAINED}", repr(found.get("kind")), again)
    if not found.get("results"):
        checks.refuse(str(run.path / "results.json"), "at least one setting", "none", again)
    results = found["results"]
    first = [result for result in results if result["trial"] == 0]
    training = tuple(zip(traces.labels(first), first, strict=True))
    best = min(first, key=lambda r: r["columns"]["loss"][-1])
    facts = (("settings", str(len(first))), ("trials", str(1 + max(r["trial"] for r in results))),
             ("iterations", f"{best['steps']:,}"), ("least loss", f"{best['columns']['loss'][-1]:.1e}"))
    return Story("Trained by descent", True, (traces.told(first, ("heads", "step")),), facts, command(run.config),
                 run.config, dict(found["versions"]), training=training)


def command(config: Mapping[str, Any]) -> str | None:
    """The command that makes this run again, with every option that was in force; none if Python made it."""
    made_by = config.get("command")
    needed = {"demo": {"hidden_heads", "width", "seed"}, "learn": {"examples", "options"},
              "train": {"heads", "steps"}}
    if not needed.get(str(made_by), {"nothing has this"}) <= set(config):
        return None
    if made_by == "demo":
        words = ["headway", "demo", "--heads", config["hidden_heads"], "--width", config["width"],
                 "--seed", config["seed"]]
    elif made_by == "learn":
        words = ["headway", "learn", config["examples"], "--out", "RUN", *_options(config["options"])]
    else:
        words = ["headway", "train", "--out", "RUN",
                 *_options({name: config[name] for name in config if name not in ("command", "kind")})]
    return shlex.join(str(word) for word in words)


def _options(options: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", str(value)]
        elif name == "rank":  # whose absence is a setting
            words += ["--rank", "none"]
    return words


def plain(config: Mapping[str, Any]) -> str:
    return json.dumps(dict(config), indent=2, sort_keys=True, default=str)
