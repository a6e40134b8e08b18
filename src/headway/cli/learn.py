"""``headway learn``: from a folder of examples to a run folder, or on with a run that was cut short."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.console import Board, Json, board, given, number_or, watch
from headway.cli.ranks import again, device_of, group
from headway.cli.show import tell
from headway.core.names import FORMS, LINEAR, METHODS, SEARCHES

if TYPE_CHECKING:
    from headway.core.forms import Form
    from headway.learning.settings import Settings
    from headway.linalg.totals import Alone
    from headway.runs.store import Run

OPTIONS = ("heads", "method", "form", "rank", "seconds", "seed", "device", "memory")  # of every learner
OWN = ("search", "polish", "truth", "max_heads", "starts", "limit")  # of one or another
WHOLE = ("auto", *LINEAR)  # forms that are one word, and no Form
KINDS = ("How scores come about: plain; auto, which finds out; linear, without a softmax; linear/k, divided by the "
         "number of keys as well; the path of a stored layer of that form; or parts "
         "joined by +, such as rotary:base=500000,layout=pairs+causal. Parts: " + ", ".join(FORMS) + ".")


def learn(
    context: typer.Context,
    folder: Annotated[Path | None, typer.Argument(metavar="EXAMPLES", help="Folder of shards.")] = None,
    out: Annotated[Path | None, typer.Option(help="New run folder.")] = None,
    heads: Annotated[str, typer.Option(help="Head count, or auto.")] = "auto",
    method: Annotated[str, typer.Option(help=" or ".join(METHODS) + ".")] = "auto",
    form: Annotated[str, typer.Option(help=KINDS)] = "plain",
    search: Annotated[str, typer.Option(help="With sculpt: " + " or ".join(SEARCHES) + ".")] = SEARCHES[0],
    polish: Annotated[bool, typer.Option(help="With sculpt: go on to the floor of the arithmetic.")] = True,
    truth: Annotated[Path | None, typer.Option(help="With sculpt: a stored layer to trace distances to.")] = None,
    rank: Annotated[str, typer.Option(help="Rank of the attention matrices: auto, none or a number.")] = "auto",
    max_heads: Annotated[int, typer.Option(help="Most heads to try with --heads auto.")] = 32,
    starts: Annotated[int, typer.Option(help="Random starts before giving up.")] = 6,
    limit: Annotated[int, typer.Option(help="Gauss–Newton iterations in one solve.")] = 100,
    seconds: Annotated[float | None, typer.Option(help="Stop after about this long with the best so far.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the learner's own randomness.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    memory: Annotated[str | None, typer.Option(
        help="Most that each process may hold, such as 8GiB (plain scores, on a CPU).")] = None,
    resume: Annotated[Path | None, typer.Option(
        help="Go on with this run folder: after a kill, or for more --seconds.")] = None,
    moved: Annotated[Path | None, typer.Option(
        "--examples", help="With --resume: where the examples lie now.")] = None,
    tensorboard: Board = None,
    as_json: Json = False,
) -> None:
    """Learn a layer from a folder of examples, or go on with an interrupted run.

    Started by torchrun in several processes, these learn together: torchrun --nproc-per-node 4 -m headway learn
    EXAMPLES --out RUN.
    """
    from headway.core import checks, words
    from headway.core.budget import size_of

    options: dict[str, Any] = {
        "heads": number_or("heads", heads, "auto"), "method": checks.choice("method", method, METHODS),
        "rank": None if rank == "none" else number_or("rank", rank, "auto"), "seconds": seconds, "seed": seed,
        "device": device}
    if memory is not None:
        options["memory"] = size_of("--memory", memory)
    if form != "plain":
        options["form"] = form if form in WHOLE else words.data_of(words.form_of(form))
    own = {"search": search, "polish": polish, "truth": None if truth is None else str(truth),
           "max_heads": max_heads, "starts": starts, "limit": limit}
    options |= {name: own[name] for name in given(context, *OWN)}
    with group() as ranks:
        if resume is None:
            task = ranks.led(lambda: (_begun(folder, out, moved, options), {}))[0]
        else:
            if folder is not None or out is not None:
                checks.refuse("--resume", "nothing but --resume RUN", "EXAMPLES or --out as well",
                              "one or the other; --examples DIR says where the examples lie now")
            changed = {name: options.get(name) for name in given(context, *OPTIONS, *OWN)}
            task = ranks.led(lambda: (_gone_on(resume, moved, changed), {}))[0]
        _carried_out(task, ranks, tensorboard, as_json)


def _begun(folder: Path | None, out: Path | None, moved: Path | None, options: dict[str, Any]) -> dict[str, Any]:
    """What is to be done: options, where the examples lie, where the run goes."""
    from headway.core import checks
    from headway.runs import store

    if folder is None or out is None or moved is not None:
        checks.refuse("headway learn", "EXAMPLES and --out RUN, or --resume RUN",
                      "neither" if moved is None else "--examples, which goes with --resume",
                      "headway learn EXAMPLES --out RUN")
    if not again():  # torchrun starts the same command anew: the run goes on
        store.Run.create(out, {})  # refuses a folder in use
    return {"options": options, "place": str(folder), "target": str(out), "done": False}


def _gone_on(resume: Path, moved: Path | None, changed: dict[str, Any]) -> dict[str, Any]:
    """The same of a run that is to go on."""
    from headway.runs import store

    run = store.Run.open(resume)
    options = _resumed(run, changed)
    done = run.finished and not run.out_of_time
    return {"options": options, "place": "" if done else str(_place(run, moved)), "target": str(resume),
            "done": done}


def _carried_out(task: dict[str, Any], ranks: Alone, tensorboard: Path | None, as_json: bool) -> None:
    import headway as hw
    from headway.core import checks
    from headway.runs import store

    options, target = task["options"], Path(task["target"])
    if task["done"]:
        if ranks.rank == 0:
            run = store.Run.open(target)
            tell(run.fit(), run.path, run.truth(), as_json)
        return
    with ranks.together():
        source = hw.Examples.open(task["place"])
        options["device"] = device_of(options["device"])
        checks.device("--device", options["device"], "--device cpu")
    learner = {name: options.pop(name) for name in ("method", *OWN) if name in options}
    if "form" in options:
        options |= {"form": _form(options["form"], learner)}
    else:
        options["method"] = _learner(learner)
    if ranks.rank:
        hw.learn(source, run=target, **options)
        return
    with watch(options["seconds"]) as bar, board(tensorboard, bar) as progress:
        fit = hw.learn(source, run=target, progress=progress, **options)
    tell(fit, target, store.Run.open(target).truth(), as_json)


def _form(data: Any, learner: dict[str, Any]) -> Form | str:
    """The form to learn; settings of learners that know no forms are refused under their flags."""
    from headway.core import checks
    from headway.core.words import form_from

    for name, value in learner.items():
        if (name, value) != ("method", "auto"):
            checks.refuse(f"--{name.replace('_', '-')}", "nothing with --form: all forms are learned alike",
                          repr(value), "leave it out, or --form plain")
    return data if data in WHOLE else form_from(data)


def _learner(words: dict[str, Any]) -> Settings:
    """The learner of that name with the settings given; one it does not have is refused under its flag."""
    from dataclasses import fields

    from headway.core import checks
    from headway.core.layer import load_plain
    from headway.learning.settings import LEARNERS

    kind = LEARNERS[words.pop("method")]
    known = [field.name for field in fields(kind)]
    for name in words:
        if name not in known:
            users = [method for method, one in LEARNERS.items() if name in [field.name for field in fields(one)]]
            checks.refuse(f"--{name.replace('_', '-')}", f"nothing with --method {kind.method}, which has no such "
                          "setting", repr(words[name]), f"leave it out, or --method {' or '.join(users)}")
    if "truth" in words:
        words["truth"] = load_plain(words["truth"])
    return kind(**words)


def _resumed(run: Run, changed: dict[str, Any]) -> dict[str, Any]:
    """The settings to go on with: those the run began with, but for what may change on the way."""
    from headway.core import checks
    from headway.core.words import described
    from headway.runs.schema import FREE

    stored = run.config.get("options")
    if stored is None or run.config.get("command") == "demo":
        checks.refuse("--resume", "a run made by headway learn", f"{run.path}, made by another command",
                      "that command again, with another --out")
    if run.config.get("examples") == "a black box" and not (run.finished and not run.out_of_time):
        checks.refuse("--resume", "a run on examples, or a finished one", f"{run.path}, which asks a black box",
                      "the same headway.learn(headway.ask(...), run=...) in Python, which goes on with it")
    for name, value in changed.items():
        if name not in FREE and stored.get(name) != value:
            shown = described if name == "form" else repr
            checks.refuse(f"--{name.replace('_', '-')}", f"{shown(stored.get(name))}, as the run began",
                          shown(value), "leave it out, or headway learn EXAMPLES --out ANOTHER")
    return {**stored, **{name: value for name, value in changed.items() if name in FREE}}


def _place(run: Run, moved: Path | None) -> Path:
    from headway.core import checks

    place = Path(run.config["examples"]) if moved is None else moved
    if moved is None and not place.is_dir():
        checks.refuse("--resume", "the examples where the run found them",
                      f"{run.config['examples']}, which is no folder", "--examples DIR, where they lie now")
    return place
