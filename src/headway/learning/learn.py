"""learn(): from examples of F(X) = Σ_i softmax(XΘ_iXᵀ + 1(Xu_i)ᵀ) X W_i + 1cᵀ to every Θ_i, u_i, W_i and c.

The door: what was asked for is checked and resolved here, and the run it is kept in gets its identity. The way
itself is a loop over candidates (loop.py) that a policy decides (policy.py) and a verdict closes (verdict.py).
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headway.core import checks
from headway.core.budget import BUDGET, Budget, in_words, size_of, within
from headway.core.devices import give_back, held, peak
from headway.core.examples import Examples, keys_of_their_own
from headway.core.forms import Form
from headway.core.layer import of_softmax
from headway.core.names import BASELINES, LINEAR
from headway.core.oracle import Oracle
from headway.core.results import Fit, NotLearnedError
from headway.core.shards import Shards
from headway.core.sources import Answers
from headway.core.words import data_of, form_from
from headway.learning import baselines
from headway.learning.candidate import Candidate
from headway.learning.chosen.learner import at_random, learn_chosen
from headway.learning.formed_learn import Clock, Wanted, learn_form
from headway.learning.kept import everywhere, finish, kept_in, with_ranks
from headway.learning.linear_verdict import learn_linear
from headway.learning.loop import Asked, Loop, Progress
from headway.learning.parts import Parted, store_of
from headway.learning.settings import Auto, Sculpt, Settings, resolved
from headway.learning.source import spaced
from headway.learning.verdict import conclude
from headway.learning.which import learn_some_form
from headway.linalg.totals import Alone, ranks
from headway.runs.store import Run, Stage


@checks.memory("examples")
def learn(
    examples: Examples | Oracle,
    heads: int | str = "auto",
    method: str | Settings = "auto",
    *,
    form: Form | str = "plain",
    rank: int | str | None = "auto",
    seconds: float | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    run: str | os.PathLike[str] | Run | None = None,
    memory: int | str | None = None,
    strict: bool = False,
    progress: Progress | None = None,
) -> Fit:
    """Find m, Θ_i, u_i, W_i and c with Y = Σ_i softmax(XΘ_iXᵀ + 1(Xu_i)ᵀ + mask) X W_i + 1cᵀ.

    Assumes inputs that visit the directions of interest, at least the counting floor of examples
    (``fit.stats["floor"]``), heads that differ. Tokens may have any mean and covariance, some labels may be wrong.

    heads: "auto" finds the count. method: the name of a learner, or one with settings of its own, such as
    ``Moments(starts=12)``. "auto" chooses among the next three by the inputs; "moments" (span, unmix, polish;
    straight to Gauss–Newton from random starts when examples are few), "factors" (descent on thin factors, pruned
    and refined), "starts" (random starts in any case); "sculpt" (the first paper's algorithm, for 2 to 8 white
    tokens and many examples), or the baselines "adam", "descent" (Adam on whole Θ_i) and "lbfgs", which need
    ``heads`` and, given ``seconds``, use them all. rank: "auto" uses a low rank of the Θ_i where it shows, an int
    imposes it, None never. seconds: stop after about this long with the best fit so far (what a resumed run finds
    then depends on the clock).

    form: "plain" is the layer above. A ``Form`` says how else scores come about: turned queries and keys, offsets,
    windows, caps, sinks, norms, gates; of the unknowns in it only their kind is read. "auto" finds out which: a
    black box that may be asked for more is asked, else the errors of descents are compared. The
    layer of the fit is then a ``FactoredLayer`` with heads of size ``rank`` ("auto": found), keys may come from
    other sequences; another method than "auto" is refused. form="linear" is the layer without a softmax, Σ_i
    (XΘ_iXᵀ ∘ mask) X W_i + 1cᵀ, and "linear/k" the same divided by the number of keys in sight: found is its
    operator by the fewest heads, and no single heads (docs/linear.md). It takes heads, seconds, seed and device.

    In the place of examples ``headway.ask(f, plan="chosen")``, or "auto", is a black box that is asked on the way:
    what tells most, every call counted, with ``run`` each answer kept; it takes method "auto" alone.

    The examples are split in three: a tenth (1,000 at most) chooses starts, counts and ranks; a twentieth (1,000
    at most) is looked at once, by the verdict; the rest is fitted. strict=True raises NotLearnedError unless the
    status is ok. run: a folder that keeps the stages and the result; it belongs to these examples and settings, and
    others are refused. An interrupted run goes on, one whose seconds ran out goes on for as many more, a finished
    one is read back. Where a form is given a stage is a descent or a refinement; one that time cuts short is begun
    again. progress: called with {"stage", "residual", "heads", "why"}, first with residual None when a stage begins
    ("why": it was chosen; "before": what the last one found); if it has a method ``finished``, that is called with
    the fit. ``headway.TensorBoard(folder)`` is one.

    memory: bytes, or words such as "8GiB", that the process is kept under as long as it learns (each process, where
    there are several); on a CPU, for plain scores and the same methods. Under a limit fewer sequences are held, so
    that other ones may be fitted: it belongs to the run as the seed does. One that is too small for the layer is
    refused. ``fit.stats["peak_memory"]`` is what it came to.

    In a torch.distributed group of several processes all call this with the same arguments and work on one fit:
    each reads its own shards (or a part of what all have in memory), and gets the fit of one process. Rank 0 keeps
    the run and reports. Plain scores and the methods "auto", "moments", "factors" and "starts" can be learned so;
    others are refused.

    >>> from headway.core.layer import AttentionLayer
    >>> from headway.core.sources import draw
    >>> truth = AttentionLayer.random(heads=2, width=6, seed=0)
    >>> fit = learn(draw(truth, count=400, length=6, seed=1))
    >>> fit.layer.heads, fit.status.kind
    (2, 'recovered')
    """
    group, limit = ranks(), size_of("memory", memory)
    if isinstance(examples, Oracle):
        _unlimited(limit, "examples", "examples that are there, such as headway.ask(f, plan='random')")
        _one_process(group, "examples", "examples that are there, such as headway.ask(f, plan='random')")
        return _asked(examples, form, heads, method, rank, seconds, seed, device, run, strict, progress)
    if not (isinstance(form, str) and form == "plain"):
        _unlimited(limit, "form", "form='plain' (--form plain)")
        _one_process(group, "form", "form='plain' (--form plain), the only one that several processes share so far")
        return _any_form(examples, form, heads, method, rank, seconds, seed, device, run, strict, progress)
    settings = resolved(method)
    wanted = checks.count_or("heads", heads, "auto")
    rank = checks.count_or("rank", rank, "auto", None)
    if isinstance(settings, Sculpt) or settings.method in BASELINES:
        _unlimited(limit, "method", "method='auto', 'moments', 'factors' or 'starts'")
        _one_process(group, "method", "method='auto', 'moments', 'factors' or 'starts'")
    if not group.alone and isinstance(examples, Examples):
        examples, progress = Parted(examples, group), progress if group.rank == 0 else None
    _check(examples, settings, wanted, rank, seconds, seed)
    options = {"heads": wanted, "method": settings.method, "rank": rank, "seconds": seconds, "seed": int(seed),
               "device": None if device is None else str(device), **settings.options(),
               **({} if limit is None else {"memory": limit})}
    budget = BUDGET if limit is None else _budget(limit, examples, device)
    kept, finished = kept_in(run, examples, options, settings)
    if finished:
        fit = everywhere(examples, lambda: kept.fit() if kept is not None else None)
    else:
        own, before = settings if isinstance(settings, Auto) else Auto(), peak().get("host", 0)
        asked = Asked(settings.method, wanted if isinstance(wanted, int) else None, rank, own.max_heads, own.starts,
                      own.limit, seconds, int(seed))
        loop = Loop(examples, asked, device, kept, progress, budget=budget)
        made = replace(_learned(loop, settings), settings=options, seed=int(seed))
        made = _said(with_ranks(made, examples), limit, before)
        fit = everywhere(examples, lambda: made, made.layer.Theta.device)
        if run is not None:
            finish(kept, fit, examples)
    return _ended(fit, strict, progress)


def _unlimited(limit: int | None, name: str, hint: str) -> None:
    """Refuse a limit where it would not be kept."""
    if limit is not None:
        checks.refuse("memory", f"nothing with this {name}, whose learner keeps to no limit", in_words(limit),
                      f"leave it out, or {hint}")


def _budget(limit: int, examples: Examples, device: torch.device | str | None) -> Budget:
    """What there is to work with under this limit on every process."""
    store = store_of(examples)
    if isinstance(store, Answers):
        checks.refuse("memory", "nothing with a black box that may be asked for more: what it takes to answer is "
                      "its own", in_words(limit), "leave it out, or fresh=False")
    where = torch.device(device) if device is not None else store.device
    if where.type != "cpu":
        checks.refuse("memory", "nothing where it learns on another device than the CPU: there no limit is kept",
                      in_words(limit), "leave it out, or device='cpu'")
    first = store.take([0]) if len(store) and not isinstance(store, Shards) else None
    each = 0 if first is None else sum(part.nbytes for part in (first.X, first.Y, *first.beside().values()))
    give_back()  # what was freed is not held
    return within(limit, each * len(store), len(store), held())


def _said(fit: Fit, limit: int | None, before: int) -> Fit:
    """With a word about a limit that was not kept; ``before``: the peak when the learner began."""
    came_to = fit.stats["peak_memory"].get("host", 0)
    if limit is None or came_to <= max(limit, before):
        return fit
    words = f" It held {in_words(came_to)} at its peak, more than the {in_words(limit)} it was to be kept under."
    return replace(fit, status=replace(fit.status, sentence=fit.status.sentence + words))


def _one_process(group: Alone, name: str, hint: str) -> None:
    if not group.alone:
        checks.refuse(name, "what several processes can learn together", f"another, on {group.size} of them",
                      f"{hint}; or one process")


def _ended(fit: Fit, strict: bool, progress: Progress | None) -> Fit:
    finished = getattr(progress, "finished", None)
    if finished is not None:
        finished(fit)
    if strict and not fit.status.ok:
        raise NotLearnedError(fit)
    return fit


def _any_form(
    examples: Examples | Oracle, form: Form | str, heads: int | str, method: str | Settings, rank: int | str | None,
    seconds: float | None, seed: int, device: torch.device | str | None, run: Any, strict: bool,
    progress: Progress | None,
) -> Fit:
    """A layer in factors, whatever its form."""
    if not isinstance(form, Form) and not (isinstance(form, str) and form in ("auto", *LINEAR)):
        checks.refuse("form", "'plain', 'auto', 'linear', 'linear/k' or a headway.Form", repr(form),
                      "headway.Form(rotary=headway.Rotary())")
    if method != "auto":
        checks.refuse("method", "nothing where a form is given: all forms are learned alike", repr(method),
                      "leave it out, or form='plain'")
    if rank is None:
        checks.refuse("rank", "'auto' or the size of a head, where a form is given", None, "rank='auto'")
    wanted, size = checks.count_or("heads", heads, "auto"), checks.count_or("rank", rank, "auto")
    linear = isinstance(form, str) and form in LINEAR
    if linear and size != "auto":
        checks.refuse("rank", "'auto' with linear scores, whose heads have no rank of their own", repr(rank),
                      "leave it out")
    if not isinstance(examples, Oracle):
        _sound(examples, seconds, seed)
    if linear and not isinstance(examples, Oracle):
        keys_of_their_own(examples, "form='auto', or another form, which knows them")
    options = {"heads": wanted, "method": "auto", "rank": size, "seconds": seconds, "seed": int(seed),
               "device": None if device is None else str(device),
               "form": form if isinstance(form, str) else data_of(form)}
    oracle = examples if isinstance(examples, Oracle) else None
    if isinstance(examples, Oracle):
        kept = _claimed(examples, run, options)
        finished = kept is not None and kept.finished
    else:
        kept, finished = kept_in(run, examples, options, Auto())
    if kept is not None and finished:
        fit = kept.fit()
    else:
        if isinstance(examples, Oracle):
            examples = at_random(examples, kept)
            _sound(examples, seconds, seed)
        ask = Wanted(wanted if isinstance(wanted, int) else None, size if isinstance(size, int) else None, seconds,
                     int(seed))
        clock = Clock(seconds, progress, kept)
        # A resumed run knows of the form what its options say.
        if isinstance(form, Form):
            fit = learn_form(examples, form_from(data_of(form)), ask, device, clock=clock)
        elif linear:
            fit = learn_linear(examples, ask, device, mean=form == "linear/k", clock=clock)
        else:
            fit = learn_some_form(examples, ask, device, clock=clock)
        fit = replace(fit, settings=options, seed=int(seed))
        if oracle is not None:
            said = (f" {len(examples)} sequences were asked: all at random, since chosen questions know plain "
                    "scores only.")
            fit = replace(fit, status=replace(fit.status, sentence=fit.status.sentence + said), stats={
                **fit.stats, "calls": len(examples), "rows": len(examples) * oracle.length, "plan": "random"})
        if kept is not None:
            kept.finish(fit, examples.hashes())
    return _ended(fit, strict, progress)


def _claimed(oracle: Oracle, run: Any, options: dict[str, Any]) -> Run | None:
    """The run of this black box and these settings."""
    kept = None if run is None else run if isinstance(run, Run) else Run.at(run)
    if kept is not None:
        kept.claim({"digest": oracle.digest(), "examples": "a black box", "options": options})
    return kept


def _asked(
    oracle: Oracle, form: Form | str, heads: int | str, method: str | Settings, rank: int | str | None,
    seconds: float | None, seed: int, device: torch.device | str | None, run: Any, strict: bool,
    progress: Progress | None,
) -> Fit:
    """A black box that is asked on the way."""
    if not (isinstance(form, str) and form == "plain"):
        if oracle.plan == "chosen":
            checks.refuse("plan", "'random' or 'auto' where a form is given: chosen questions know plain scores "
                          "only", "'chosen'", "headway.ask(oracle, ..., plan='random')")
        return _any_form(oracle, form, heads, method, rank, seconds, seed, device, run, strict, progress)
    settings = resolved(method)
    if type(settings) is not Auto:
        checks.refuse("method", f"'auto' with plan={oracle.plan!r}", repr(settings.method),
                      "leave it out, or plan='random' to learn random examples in another way")
    wanted = checks.count_or("heads", heads, "auto")
    size = checks.count_or("rank", rank, "auto", None)
    checks.whole("seed", seed, 0)
    if seconds is not None:
        checks.number("seconds", seconds, strictly=True)
    if isinstance(size, int):
        checks.whole("rank", size, 1, oracle.width)
    options = {"heads": wanted, "method": "auto", "rank": size, "seconds": seconds, "seed": int(seed),
               "device": None if device is None else str(device), **settings.options()}
    kept = _claimed(oracle, run, options)
    if kept is not None and kept.finished:
        return _ended(kept.fit(), strict, progress)
    own = Asked("auto", wanted if isinstance(wanted, int) else None, size, settings.max_heads, settings.starts,
                settings.limit, seconds, int(seed))
    fit, examples = learn_chosen(oracle, own, device, kept, progress)
    fit = replace(fit, settings=options, seed=int(seed))
    if kept is not None:
        kept.finish(fit, examples.hashes())
    return _ended(fit, strict, progress)


def _learned(loop: Loop, settings: Settings) -> Fit:
    if isinstance(settings, Sculpt):
        # Sculpting stands below learning and is asked for by name only.
        from headway.sculpting.provable import sculpted

        return sculpted(loop, settings)
    if settings.method in BASELINES:
        return conclude(loop, _baseline(loop), False)
    return conclude(loop, *loop.search())


def _baseline(loop: Loop) -> Candidate:
    """One of the baselines, in one stage; they keep their own time."""
    method, m, left = loop.asked.method, loop.asked.heads, loop.left
    assert m is not None
    loop.deadline = math.inf
    draw = loop.generator(method)

    def compute() -> Stage:
        if method == "lbfgs":
            rows = loop.facts.rows_for(m)
            return baselines.lbfgs(loop.source, m, seed=draw, sequences=rows, seconds=left,
                                   report=loop.report).stage()
        size, out_size = baselines.sizes(loop.examples, loop.asked.rank if method == "adam" else None)
        return baselines.adam(loop.source, m, baselines.Setting(white=method == "descent"), seed=draw, size=size,
                              out_size=out_size, seconds=left, report=loop.report).stage()

    return Candidate.of(method, loop.stage(method, compute, m, why="asked for"))


def _check(
    examples: Any, settings: Settings, heads: int | str | None, rank: int | str | None, seconds: float | None,
    seed: int,
) -> None:
    _sound(examples, seconds, seed)
    if isinstance(settings, Sculpt) and settings.truth is not None:
        of_softmax("truth", settings.truth, "the layer these examples came from, or none")
    keys_of_their_own(examples, "form='auto' (--form auto), or another form, which knows them")
    if isinstance(rank, int):
        checks.whole("rank", rank, 1, examples.width)
    if settings.method in BASELINES and not isinstance(heads, int):
        checks.refuse("heads", f"a whole number with method={settings.method!r}", repr(heads),
                      "method='auto', which finds the count, or heads=4")
    if settings.method in ("descent", "lbfgs") and rank != "auto":
        checks.refuse("rank", f"nothing with method={settings.method!r}, which does not use it", repr(rank),
                      "leave it out, or method='adam'")


def _sound(examples: Any, seconds: float | None, seed: int) -> None:
    if not isinstance(examples, Examples):
        checks.refuse("examples", "an Examples object", type(examples).__name__,
                      "headway.Examples(X, Y), or headway.ask(f, …) for a black box")
    if len(examples) < 3:
        checks.refuse("examples", "at least 3 sequences: to fit, to choose by and to judge on", len(examples),
                      "more")
    first = examples.take(spaced(np.arange(len(examples)), min(256, len(examples))))
    checks.tokens(first.X, first.padding)
    checks.whole("seed", seed, 0)
    if seconds is not None:
        checks.number("seconds", seconds, strictly=True)
