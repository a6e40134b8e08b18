"""sweep(): runs of descent over heads, steps, laws and draws, as a list of independent jobs on any executor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.core import checks
from headway.core.files import read_json, read_tensors, regular, write_json
from headway.runs import jobs
from headway.runs.store import Run, versions
from headway.training.data import Labelled, labelled, mixture, planted
from headway.training.run import train

Row = dict[str, Any]
KIND = "headway-train-1"
KEPT = "trials"  # folder of a run: a file for each trial that ended
LAWS = ("mixture", "planted")
SETTING = ("heads", "step", "zeta", "count", "width", "strength", "noise")  # what is swept
TEST = 100_000  # between the seed of a sample and that of its test sequences


@dataclass(frozen=True)
class Trial:
    """One run of a sweep, in plain values: any worker can be told them, and draws the same data.

    ``data``: a law, or the path of a safetensors file with X and y, which workers read where they are; ``digest``:
    its SHA-256, so that all read the same. ``seed``: of the sample, the start and the test sequences.
    """

    heads: int = 16
    step: float = 1.0
    zeta: float = 0.1
    count: int = 100
    width: int = 10
    strength: float = 2.0
    noise: float = 0.5
    data: str = "mixture"
    digest: str | None = None
    tokens: int = 10
    nuisance: int = 4
    test_count: int = 300
    start: str = "zero"
    rule: str = "constant"
    steps: int = 400
    theory: bool = True
    seed: int = 0
    trial: int = 0


def sweep(
    trials: Sequence[Trial], run: Run | None = None, *, executor: Executor | None = None,
    report: Callable[[Row], None] | None = None,
) -> list[Row]:
    """``train`` on every trial: rows in the order of the list, as results.json of ``headway train`` has them.

    One after the other in this process, or on the workers of ``executor``. ``run``: a folder in which each row is
    kept when it is there; called again with the same trials, the sweep does what is missing. Where workers died
    three times under a trial its row has a ``reason`` and no columns, and it is missing.

    >>> few = [Trial(heads=1, step=step, steps=5, count=20, theory=False) for step in (0.1, 1.0)]
    >>> [(row["step"], len(row["columns"]["loss"])) for row in sweep(few)]
    [(0.1, 6), (1.0, 6)]
    """
    names = {f"{j:05d}": trial for j, trial in enumerate(trials)}
    rows = {} if run is None else _kept(run, names)
    left = {name: trial for name, trial in names.items() if name not in rows}
    with closing(jobs.each(trained, left, executor)) as ended:
        for one in ended:
            asked = left[one.name]
            lost = {**{name: getattr(asked, name) for name in SETTING}, "trial": asked.trial, "reason": one.reason}
            # As one reads it back, so that a sweep that went on and one that was resumed have the same rows.
            rows[one.name] = json.loads(json.dumps(one.row or lost))
            if run is not None and one.row is not None:
                run.begin()
                _path(run, one.name).parent.mkdir(exist_ok=True)
                write_json(_path(run, one.name), {**_about(asked), "row": one.row})
            if report is not None:
                report(rows[one.name])
    return [rows[name] for name in names]


def trained(trial: Trial) -> Row:
    """One trial, in this process: what was in force, and what came out."""
    sample = _drawn(trial, trial.count, trial.seed)
    test = _drawn(trial, trial.test_count, TEST + trial.seed) if trial.data in LAWS else None
    done = train(sample, trial.heads, test=test, begin=trial.start, step=trial.step, steps=trial.steps,
                 rule=trial.rule, theory=trial.theory, seed=trial.seed)
    # A file brings its own count and width, and only a mixture has a law.
    own = {"count": len(sample), "width": sample.X.shape[2]}
    used = SETTING if trial.data == "mixture" else ("heads", "step", "count", "width")
    return {**{name: own.get(name, getattr(trial, name)) for name in used}, "trial": trial.trial, **done.asdict()}


def digest(path: Path) -> str:
    """SHA-256 of a file of sequences."""
    try:
        return hashlib.sha256(regular(path, "a safetensors file with X and y").read_bytes()).hexdigest()
    except OSError as error:
        raise checks.InputError(
            f"data: expected {', '.join(LAWS)} or a safetensors file with X and y; got {str(path)!r}, which does "
            f"not open ({error.strerror}). Try: data='mixture'.") from None


def results(folder: Path) -> dict[str, Any]:
    """What a sweep that ended left in its run folder: results, those that were lost, versions."""
    path, again = folder / "results.json", "headway train --out RUN again"
    found = read_json(path, "the results of headway train", again)
    if found.get("kind") != KIND:
        checks.refuse(str(path), f"results of kind {KIND}", repr(found.get("kind")), again)
    if not found.get("results"):
        checks.refuse(str(path), "at least one setting", "none", again)
    return found


def settings(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows with a result, the trials of each setting together."""
    found: list[list[Row]] = []
    for row in rows:
        same = bool(found) and all(row.get(name) == found[-1][0].get(name) for name in SETTING)
        if not same or row["trial"] <= found[-1][-1]["trial"]:
            found.append([])
        found[-1].append(row)
    return found


def finish(run: Run, rows: Sequence[Row]) -> None:
    """results.json, with which a sweep has ended."""
    run.begin()
    write_json(run.path / "results.json", {
        "kind": KIND, "results": [row for row in rows if "columns" in row],
        "lost": [row for row in rows if "columns" not in row], "versions": versions()})


def _drawn(trial: Trial, count: int, seed: int) -> Labelled:
    if trial.data == "mixture":
        return mixture(count, seed=seed, tokens=trial.tokens, width=trial.width, zeta=trial.zeta,
                       strength=trial.strength, noise=trial.noise, nuisance=trial.nuisance)
    if trial.data == "planted":
        return planted(count, seed=seed, tokens=trial.tokens, width=trial.width)
    found = digest(Path(trial.data))
    if trial.digest not in (None, found):
        checks.refuse(trial.data, f"the file the sweep began with (SHA-256 {str(trial.digest)[:12]}…)",
                      f"another one ({found[:12]}…)", "that file, or a new sweep")
    tensors, _ = read_tensors(Path(trial.data))
    if not {"X", "y"} <= set(tensors):
        checks.refuse(trial.data, "tensors X (n, T, d) and y (n,)", sorted(tensors),
                      "save both in one safetensors file")
    return labelled(tensors["X"], tensors["y"])


def _kept(run: Run, names: dict[str, Trial]) -> dict[str, Row]:
    """Rows of trials that have ended; refused if they are not of these."""
    rows = {}
    for path in sorted((run.path / KEPT).glob("*.json")):
        found = read_json(path, "a trial as headway train keeps it", "another folder")
        asked = names.get(path.stem)
        if asked is None or any(found.get(key) != value for key, value in _about(asked).items()) or not isinstance(
                found.get("row"), dict):
            checks.refuse("run", f"the settings that {run.path} began with", f"others (in {path.name})",
                          "the same ones, or another folder")
        rows[path.stem] = found["row"]
    return rows


def _about(trial: Trial) -> dict[str, Any]:
    """Whose row it is: with other settings, or from another Headway, it would be another one."""
    return {"asked": asdict(trial), "headway": versions()["headway"]}


def _path(run: Run, name: str) -> Path:
    return run.path / KEPT / f"{name}.json"
