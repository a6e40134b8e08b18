"""What a run has to say, gathered from its folder: sentences, numbers and layers, and what is missing. No drawing.

Two kinds of run tell a story: one that learned a layer, with or without a certificate and a known truth, and one
that trained by descent.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from headway.certificates.known import NAME as DETERMINED
from headway.core import checks, gauge
from headway.core.convert import rank_shown
from headway.core.factored import FactoredLayer
from headway.core.layer import AttentionLayer, load_layer, of_softmax
from headway.core.match import Match, match
from headway.core.results import Certificate, Fit
from headway.core.words import form_from, words_of
from headway.report import samples
from headway.report.given import Given
from headway.report.heads import Layer, Portraits, portraits, told
from headway.runs import traces
from headway.runs.store import Run
from headway.training import grid

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
    cells: tuple[str, ...]  # of its row, under the story's columns
    spectra: Mapping[str, tuple[float, ...]]  # singular values of its two matrices, and of the true ones
    ranks: Mapping[str, int]
    partner: int | None = None  # the true head's number


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
    columns: tuple[str, ...] = ()  # of the table of heads
    heads: tuple[Head, ...] = ()
    form: tuple[str, ...] = ()  # sentences about scores that are not plain
    shown: Portraits | None = None
    truth: Portraits | None = None
    looks: samples.Looks = field(default_factory=samples.Looks)
    match: Match | None = None
    certificate: Certificate | None = None
    training: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    sides: tuple[str, str] = ("learned", "true")  # what stands beside what
    kind: str = "report"
    sure: tuple[str, ...] = ()  # sentences on how sure, where there is no certificate to be had

    @property
    def order(self) -> list[int]:
        """Heads in the order of the page: by what they do; in a comparison those that differ most first."""
        if self.kind == "report" or self.match is None:
            return self.looks.order
        errors = [max(pair) for pair in zip(self.match.theta_error, self.match.w_error, strict=True)]
        apart = {j: errors[i] for i, j in enumerate(self.match.order) if j >= 0}
        return sorted(self.looks.order, key=lambda j: -apart.get(j, math.inf))


def gather(folder: Path, truth: Path | None = None, given: Given | None = None) -> Story:
    """The story of a run folder. ``truth``: a stored layer to set beside the learned one. ``given``: strings of
    tokens and an unembedding."""
    run, given = Run.open(folder), given or Given()
    if (folder / "results.json").exists() and not run.finished:
        for name, value in (("truth", truth), *given.named.items()):
            if value is not None:
                checks.refuse(name, "none for a training run, which has no hidden layer", str(value),
                              "leave it out")
        return _trained(run)
    fit = run.fit()
    if isinstance(fit.layer, AttentionLayer):
        of_softmax(str(folder), fit.layer, f"headway show {folder} or headway plot {folder}: a page shows patterns "
                   "and heads")
    known = load_layer(truth) if truth is not None else run.truth()
    strange = None if known is None else gauge.unlike(gauge.as_factored(fit.layer), gauge.as_factored(known))
    if strange is not None:
        checks.refuse(f"truth {truth or run.path / 'truth.safetensors'}", "a layer shaped as the learned one, of "
                      "its form", strange, "the layer these examples came from")
    return _learned(run, fit, known, run.certificate(), given)


def _learned(run: Run, fit: Fit, truth: Layer | None, certificate: Certificate | None, given: Given) -> Story:
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
    factors = isinstance(layer, FactoredLayer) or isinstance(truth, FactoredLayer)
    shown = portraits(layer, factors)
    true = None if truth is None else portraits(truth, factors)
    looks = samples.of_run(run, layer, truth, given)
    columns, heads = table(layer, shown, true, found, looks)
    if certificate is not None:
        columns, heads = with_known(columns, heads, certificate, shown.names)
    rank = max(head.ranks[shown.names[0]] for head in heads)
    facts = [("heads", str(layer.heads)), ("width", _width(layer)),
             (f"rank of {shown.names[0]}", "full" if rank == layer.width else str(rank)),
             ("held-out error", f"{stats['held_out_error']:.1e}"),
             ("sequences", f"{stats['examples']:,}"), ("counting floor", f"{stats['floor']:,}"),
             ("seconds", f"{stats['seconds']:.1f}"), ("products", f"{stats['products']:,}")]
    return Story(
        f"{count}, {OUTCOMES.get(fit.status.kind, fit.status.kind)}", fit.status.ok, tuple(sentences), tuple(facts),
        command(run.config, run.path), run.config, dict(run.manifest()["versions"]), missing, fit, columns, heads,
        tuple(told(layer)) if isinstance(layer, FactoredLayer) else (), shown, true, looks, found, certificate)


def _width(layer: Layer) -> str:
    keys = f" and {layer.key_width}" if isinstance(layer, FactoredLayer) and layer.cross else ""
    return f"{layer.width}{keys}" if layer.width == layer.out_width else f"{layer.width}{keys} → {layer.out_width}"


def _certified(certificate: Certificate) -> str:
    counts = {word: sum(claim.holds == word for claim in certificate.claims) for word in ("yes", "no", "undecided")}
    told = ", ".join(f"{n} {word}" for word, n in counts.items() if n)
    return (f"Its certificate answers {len(certificate.claims)} questions from fresh examples at "
            f"{certificate.confidence:.0%} confidence: {told}.")


def table(
    layer: Layer, shown: Portraits, truth: Portraits | None, found: Match | None, looks: samples.Looks,
    other: str = "true",
) -> tuple[tuple[str, ...], tuple[Head, ...]]:
    """The columns of the table of heads, and the heads; ``other``: what the other layer is."""
    heads, (first, last) = [], shown.names
    grouped = isinstance(layer, FactoredLayer) and layer.groups < layer.heads
    for j in range(layer.heads):
        parts = {name: parts[j] for name, parts in shown.matrices.items()}
        partner = found.order.index(j) if found is not None and j in found.order else None
        if truth is not None and partner is not None:
            parts |= {f"{other} {name}": matrices[partner] for name, matrices in truth.matrices.items()}
        spectra = {name: tuple(torch.linalg.svdvals(part).tolist()) for name, part in parts.items()}
        ranks = {name: rank_shown(values) for name, values in spectra.items()}
        cells = [str(1 + j * layer.groups // layer.heads)] if isinstance(layer, FactoredLayer) and grouped else []
        for name in shown.names:
            cells += [f"{float(parts[name].norm()):.3g}", str(ranks[name])]
        cells += [f"{float(values[j]):.3g}" for values in shown.numbers.values()]
        cells += [looks.does[j].label] if looks.does else []
        if found is not None:
            cells += ["none", "–", "–"] if partner is None else [
                str(partner + 1), *(f"{errors[partner]:.1e}" if math.isfinite(errors[partner]) else "–"
                                    for errors in (found.theta_error, found.w_error))]
        heads.append(Head(j + 1, tuple(cells), spectra, ranks, None if partner is None else partner + 1))
    columns = [*(["keys of group"] if grouped else []), f"‖{first}‖", f"rank of {first}", f"‖{last}‖",
               f"rank of {last}", *shown.numbers, *(["what it does"] if looks.does else [])]
    words = "error" if other == "true" else "moved by"
    columns += [f"{other} head", f"{first} {words}", f"{last} {words}"] if found is not None else []
    return tuple(columns), tuple(heads)


def with_known(
    columns: tuple[str, ...], heads: tuple[Head, ...], certificate: Certificate, names: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[Head, ...]]:
    """The table of heads with the part of each that the inputs of the certificate determine to its tolerance."""
    numbers = next((claim.numbers for claim in certificate.claims if claim.name == DETERMINED), {})
    if any(f"{name}_{head.number}_known" not in numbers for name in ("theta", "w") for head in heads):
        return columns, heads
    level = f"known to {certificate.settings.get('tolerance', 1e-6):.0e}"
    more = [tuple(f"{math.floor(100 * numbers[f'{name}_{head.number}_known'])} %" for name in ("theta", "w"))
            for head in heads]
    return (*columns, *(f"{name} {level}" for name in names)), tuple(
        replace(head, cells=head.cells + cells) for head, cells in zip(heads, more, strict=True))


def _trained(run: Run) -> Story:
    found = grid.results(run.path)
    results = found["results"]
    first = [trials[0] for trials in grid.settings(results)]
    training = tuple(zip(traces.labels(first), first, strict=True))
    best = min(first, key=lambda r: r["columns"]["loss"][-1])
    facts = (("settings", str(len(first))), ("trials", str(1 + max(r["trial"] for r in results))),
             ("iterations", f"{best['steps']:,}"), ("least loss", f"{best['columns']['loss'][-1]:.1e}"))
    return Story("Trained by descent", True, (traces.told(first, ("heads", "step")),), facts, command(run.config),
                 run.config, dict(found["versions"]), training=training)


def command(config: Mapping[str, Any], folder: Path | None = None) -> str | None:
    """The command that makes this run again, with every option that was in force; none if Python made it."""
    made_by = config.get("command")
    needed = {"demo": {"hidden_heads", "width", "seed"}, "learn": {"examples", "options"},
              "train": {"heads", "steps"}, "compare": {"one", "other"}}
    if not needed.get(str(made_by), {"nothing has this"}) <= set(config):
        return None
    if made_by == "demo":
        words = ["headway", "demo", "--heads", config["hidden_heads"], "--width", config["width"],
                 "--seed", config["seed"]]
    elif made_by == "compare":
        words = ["headway", "compare", config["one"], config["other"], "--page", "FILE.html",
                 *_options({name: config[name] for name in config if name not in ("command", "one", "other")})]
    elif made_by == "learn":
        options = _form(config["options"], folder)
        words = ["headway", "learn", config["examples"], "--out", "RUN", *_options(options)]
    else:
        words = ["headway", "train", "--out", "RUN",
                 *_options({name: config[name] for name in config if name not in ("command", "kind", "digest")})]
    return shlex.join(str(word) for word in words)


def _form(options: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """A form as words, or as the learned layer, which has it, where no words tell its frequencies."""
    if not isinstance(options.get("form"), Mapping):
        return dict(options)
    words = words_of(form_from(options["form"]))
    return {**options, "form": (folder or Path("RUN")) / "layer.safetensors" if words is None else words}


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
