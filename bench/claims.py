"""What README and docs say was measured: one function for a block, every number taken from bench/results.

A sentence that holds only as long as a number does is made from that number: "all 54" becomes "53 of 54" by itself.
Bounds are rounded up, never down.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import scaling
import statements
from pages import Record, kept, listed, of, prose, span, table, upto

TIMES = ("seconds to an error on unseen sequences, `learn` and Adam told head count and rank; Adam in many ways, "
         "of which the fastest to each error counts")


def measured() -> str:
    """README: what runs on a CPU."""
    return table([
        ("d = 32, 4 heads, count unknown, 4,000 examples", speed(), Record("speed")),
        (f"d = 32, 4 heads, 4,000 examples: {TIMES}, on one thread", time_to(), Record("time_to")),
        ("d = 64, 8 heads of rank 8, count and rank unknown", rank(), Record("rank")),
        ("random instances (1–6 heads, d 8–32, 2–16 tokens, scores of deviation 0.5–4, biases, masks, laws)",
         success(), Record("success")),
        ("six times the counting floor of examples, d ≤ 16, up to 4 heads", few(), Record("few")),
        ("1 % label noise", noise(), Record("noise")),
        ("50,000 sequences of 32 tokens, d = 128, 8 heads, from shards", memory(), Record("memory")),
        ("the first paper's algorithm, two to eight ±1 tokens, d 8–32", sculpt_short(), Record("sculpt")),
        ("certificates: coverage of the statistical claims, three laws of errors", coverage_short(),
         Record("coverage")),
        ("certificates: errors planted in 200 layers, six ways each", spoiled(), Record("spoiled")),
        ("certificates: radius on recovered layers", radius(), Record("radius")),
        *certified(),
        ("the second paper: a posteriori training bound over measured loss", posterior(),
         Record("guarantee_training")),
        ("the second paper: one run's training loss plus the bound on the average gap, below log 2", risk(),
         Record("guarantee")),
        ("200 words behind a float32 layer norm, 3 heads, d = 16", inputs("words"), Record("inputs")),
        ("8 heads of rank 16, d = 128, from 1,000 random sequences of 16", inputs("narrow"), Record("inputs")),
        ("both layers of a small trained transformer (d = 64, 4 heads) from its own activations", inputs("trained"),
         Record("inputs")),
        *statements.rows(),
        ("`nn.MultiheadAttention(64, 8)` as a black box, learned and built again", modules(), Record("modules")),
        ("the page of a 12-head, width-384 run, truth beside it", page(), Record("report")),
        ("the zoo: identifiable instances, seeds 0 to 2, watched while the learner was worked on", zoo_seen(),
         Record("zoo/results")),
        ("the same instances, seeds 100 and 101, which nobody tuned on", zoo_fresh(), Record("zoo_fresh")),
    ])


def real() -> str:
    """README: the layers of a sentence encoder."""
    return table([
        ("one H200", real_gpu(), Record("real")),
        (f"the same GPU, Adam, told the {_told()}, the best of three rates", real_adam(), Record("real")),
        *([(f"one layer on the same GPU: {TIMES}", time_to("time_to_real"), Record("time_to_real"))]
          if kept("time_to_real") else []),
        ("two CPU cores, one layer", real_cpu(), Record("real_cpu")),
        ("all six put in place of the originals, 50 English sentences", swap(), Record("swap")),
    ], first="where")


# -- the learner ------------------------------------------------------------------------------------------------


def speed() -> str:
    r = Record("speed")
    counts = of(found == 4 for found in r.column("heads found"))
    return (f"count right for {counts} seeds, every Θ_i and W_i within {upto(r.column('worst head error'))}, in "
            f"{span(r.column('learn, s'), '.2f')} s of one thread; Adam, told the count, takes "
            f"{span(r.column('Adam, s'), '.1f')} s to a relative error of {upto(r.column('Adam reached'))} "
            f"({span(r.column('ratio'), '.1f')} times as long), {span(r.column('its s'), '.1f')} s with the rate "
            f"and the number of steps that turned out best for each ({span(r.column('its ratio'), '.1f')} times)")


def time_to(name: str = "time_to") -> str:
    """learn()'s seconds, told and not, then Adam's to each error, over the layers of a kind."""
    r = Record(name)
    kinds = dict.fromkeys(row["layer"].split(", seed")[0] for row in r.rows)
    return "; ".join(_times(kind, [row for row in r.rows if row["layer"].startswith(kind)]) for kind in kinds)


def _times(kind: str, rows: list[dict[str, Any]]) -> str:
    columns = [name for name in rows[0] if name.startswith("s to ")]

    def seconds(learner: str, told: str, column: str) -> str:
        mine = [row[column] for row in rows if (row["learner"], row["told"]) == (learner, told)]
        reached = [value for value in mine if value is not None]
        missed = f" ({len(reached)} of {len(mine)})" if len(reached) < len(mine) else ""
        return f"{span(reached, '.2g')} s{missed}" if reached else "never"

    last = columns[-1]
    adam = ", ".join(f"{name.removeprefix('s to ')} in {seconds('Adam', 'heads, rank', name)}" for name in columns)
    return (f"{kind}: `learn` is at {last.removeprefix('s to ')} in {seconds('learn', 'heads, rank', last)}, told "
            f"nothing in {seconds('learn', 'nothing', last)}; Adam reaches {adam}")


def rank() -> str:
    r = Record("rank")
    right = of((row["heads found"], row["rank found"]) == (8, 8) for row in r.rows)
    return f"both found for {right} seeds, every head within {upto(r.column('worst head error'))}"


def success() -> str:
    r = Record("success")
    good = [row["recovered"] and row["count_right"] for row in r.rows]
    fresh = [ok for ok, row in zip(good, r.rows, strict=True) if row["seed"] >= 1000]
    return (f"{of(good)} recovered to 1e-8 with the head count right; of the seeds first run after the thresholds "
            f"were set, {of(fresh)}")


def few() -> str:
    r = Record("few")
    return (f"with the count given {of(e <= 1e-8 for e in r.column('worst'))} recovered to 1e-8, without it "
            f"{of(e <= 1e-8 for e in r.column('worst, m unknown'))}")


def noise() -> str:
    r = Record("noise")
    return (f"{of((s == 'noise' for s in r.column('status')), 'instances')} called noise; error at most "
            f"{math.ceil(100 * max(r.column('ratio'))) / 100:.2f} times that of least squares started at the truth")


def memory() -> str:
    s = Record("memory").summary
    return (f"{s['status']}, every head within {upto(s['worst head error'])}; "
            f"{s['peak of make and learn, GiB']:.1f} GiB peak memory")


def modules() -> str:
    r = Record("modules")
    return (f"outputs within {upto(r.column('largest difference of outputs'))} on {len(r.rows)} seeds, "
            f"{span(r.column('seconds, learn'), '.1f')} s")


def page() -> str:
    s = Record("report").summary
    return (f"{s['page, MB']:.0f} MB; a browser opens it and draws every figure in "
            f"{s['seconds to open it, median']:.1f} s")


def floor() -> str:
    """README and docs/learning.md: how many examples."""
    r = Record("zoo/results")
    here = {ratio: [row["success"] for row in r.rows if row["suite"] == "floor" and row["learner"] == "moments"
                    and row["where"]["examples over the floor"] == ratio] for ratio in (1.5, 2.0, 3.0, 6.0)}
    counts = ", ".join(f"{of(good)} at {ratio:g} times" for ratio, good in here.items())
    return prose(f"Of five layers (2 heads, d = 12, six tokens, scores of deviation 0.5 to 8) `learn` recovers "
                 f"{counts} the floor ({r.command}, measured at {r.commit}).")


# -- real layers ------------------------------------------------------------------------------------------------


def real_gpu() -> str:
    r = Record("real")
    return (f"{of((n == 12 for n in r.column('heads within 1e-6')), 'layers')}, every Θ_i and W_i within "
            f"{upto(r.column('worst head error'))}, in {span(r.column('seconds'))} s")


def _told() -> str:
    return "count and the head size" if "Adam head size" in Record("real").rows[0] else "count"


def real_adam() -> str:
    r = Record("real")
    times = [row["Adam, s"] / row["seconds"] for row in r.rows]
    exact = sum(r.column("Adam heads within 1e-6"))
    return (f"given {span(times, '.1f')} times as long as `learn` took: {exact} heads within 1e-6; within 10 %: "
            f"{listed(r.column('Adam heads within 0.1'))} of twelve (layers 0 to 5)")


def real_cpu() -> str:
    r = Record("real_cpu")
    return (f"every head within {upto(r.column('worst head error'))} in {max(r.column('seconds')) / 60:.0f} "
            f"minutes, from {max(r.column('sequences')):,} sequences")


def swap() -> str:
    return f"embeddings within 1 − cosine = {upto(Record('swap').summary['largest 1 − cosine'])} of the original's"


def notes() -> str:
    """bench/NOTES.md: results at real size."""
    r, cpu, large = Record("real"), Record("real_cpu"), Record("certify_large")
    rates = r.column("Adam rate")
    low = sum(rate == min(rates) for rate in rates)
    return "\n".join([
        f"- {r.command}: {real_gpu()} (one run each, seeds 100–105; {r.commit}).",
        f"- Adam, told the {_told()}, the best of three rates: {real_adam()}; the lowest rate is the best "
        f"for {low} of {len(rates)}.",
        f"- {cpu.command}: {cpu.column('seconds')[0]:,.0f} s ({cpu.commit}).",
        f"- {Record('swap').command}: {swap()} ({Record('swap').commit}).",
        f"- Every claim of a certificate by products in thin factors, {large.command}: {decided_thin()} "
        f"({large.commit})."])


def decided_thin() -> str:
    r = Record("certify_large")
    last = r.rows[-1]
    said = "all decided" if not r.summary["undecided"] else f"{r.summary['undecided']} undecided"
    return (f"{said} up to width {last['width']} ({last['heads']} heads, {last['unknowns']:,} unknowns, "
            f"{last['sequences']} sequences), there with {last['products']} products in "
            f"{last['processor seconds']:,.0f} s of one processor")


def busy(r: Record) -> str:
    return " beside other work" if "beside other work" in r.kept["machine"] else ""


# -- the papers -------------------------------------------------------------------------------------------------


def _reached(heads: int) -> str:
    good = Record("sculpt").column("reached", heads=heads)
    return f"{sum(good)} of {len(good)}"


def sculpt_short() -> str:
    return (f"m = 1 to 5: {', '.join(_reached(m) for m in range(1, 5))} and {_reached(5)}: ΣW_i and the hull "
            "within 1e-2 before the polish, heads within 1e-9 after it")


def sculpt() -> str:
    """docs/sculpting.md."""
    r, cost = Record("sculpt"), Record("cost")
    lines = ["| m | d | tokens | examples | reached | worst hull angle | worst head after the polish | slowest, "
             "s |",
             "|---|---|---|---|---|---|---|---|"]
    for case in dict.fromkeys(r.column("case")):
        rows = [row for row in r.rows if row["case"] == case]
        one = rows[0]
        lines.append("| " + " | ".join([
            str(one["heads"]), str(one["width"]), str(one["length"]), f"{one['sequences']:,}",
            f"{sum(row['reached'] for row in rows)} of {len(rows)}",
            upto(row["hull angle"] for row in rows) if one["heads"] > 1 else "–",
            upto(row["after polish"] for row in rows), f"{max(row['seconds'] for row in rows):.0f}"]) + " |")
    by = {method: cost.column("examples", method=method) for method in ("sculpt", "moments")}
    times = [f"{a / b:.3g}" for a, b in zip(by["sculpt"], by["moments"], strict=True)]
    return "\n".join([
        prose(f"Random layers with ‖Θ_i‖_F = 3 ({r.command}, measured at {r.commit}). Reached: ΣW_i and the hull "
              "within 1e-2 before the polish, heads within 1e-9 after it."), "", *lines, "",
        prose("The fewest examples with which three instances of three succeeded, doubling from below (d = 16, two "
              f"tokens; {cost.command}, measured at {cost.commit}): {listed(by['sculpt'])} for m = 1 to 4 by "
              f"sculpting, {listed(by['moments'])} by moments: {listed(times)} times as many.")])


def inputs(kind: str) -> str:
    rows = [row for row in Record("inputs").rows if row["inputs"].startswith(kind)]
    right = of(row["heads found"] == row["true heads"] for row in rows)
    worst = max(row["error on other sequences"] for row in rows)
    return (f"head count right, not told, for {right}; error on other sequences at most {worst:.0e}; "
            f"{span([row['seconds'] for row in rows], '.1f')} s")


def posterior() -> str:
    r = Record("guarantee_training")
    held, void = r.column("ratio", **{"descent held": True}), r.column("ratio", **{"descent held": False})
    said = f"{listed(f'{x:.1f}' for x in sorted(held))} in the {len(held)} runs where the loss fell at every step"
    if void:
        said += (f"; {listed(f'{x:.0f}' for x in void)} where it did not, which the bound assumes: there it claims "
                 "nothing")
    return said


def risk() -> str:
    r = Record("guarantee")
    parts = [f"{row['loss + gap']:.2f} at n = {row['n']:,}" + (
        f" (measured test loss {row['test loss']:.3f})" if row["below log 2"] and row["holds on this sample"]
        else "") for row in r.rows]
    return (f"{'; '.join(parts)}; log 2 = {math.log(2):.2f}; hypotheses met on the sample at hand, with 10¹⁴ "
            f"heads, for {of(r.column('holds on this sample'))}")


def training() -> str:
    """docs/training.md."""
    mix, plant, choose = Record("mixture"), Record("planted"), Record("selecting")
    lazier, not_root = mix.summary["more heads are lazier at η = 1"], mix.summary["and not at η = √H"]
    return table([
        (f"mixture experiment, H = {span(mix.column('heads'))}, both steps: are more heads lazier?",
         f"at η = 1 {'yes' if lazier else 'no'}, at η = √H {'no' if not_root else 'yes'}", mix),
        (f"planted experiment, H = {span(plant.column('heads'))}, both steps",
         f"test error {span(plant.column('test error'), '.2f')} after {plant.summary['steps']} steps, mean of "
         f"{plant.summary['trials']} trials", plant),
        ("a posteriori training bound over measured loss", posterior(), Record("guarantee_training")),
        ("generalization: one run's training loss plus the bound on the average gap "
         "([what this is worth](#the-example-with-16000-sequences))", risk(), Record("guarantee")),
        ("steps to the direction error that descent reaches in 20,000",
         f"normalized: at least {math.floor(choose.summary['least factor, normalized'])} times fewer; Polyak: at "
         f"least {math.floor(choose.summary['least factor, Polyak']):,} times", choose),
    ])


# -- certificates -----------------------------------------------------------------------------------------------


def coverage_short() -> str:
    r = Record("coverage")
    count = max(r.column("repetitions"))
    below = [f"{row['claim']}, {row['law']}: {row['covered']:.3g} at {row['nominal']:g}, of which the standard "
             f"deviation is {math.sqrt(row['nominal'] * (1 - row['nominal']) / count):.1g}"
             for row in r.rows if row["covered"] < row["nominal"]]
    return (f"below nominal {'never' if not below else listed(below)} over {count:,} repetitions at 0.8, 0.9 and "
            "0.99, also for whoever stops at the worst moment")


def stopped() -> str:
    """The same without chance."""
    r = Record("stopped")
    return "; ".join(f"{row['covered']:.4f} at nominal {row['nominal']:g}"
                     for row in r.rows if row["share"] == 0.02 and row["examples"] == max(r.column("examples")))


def spoiled() -> str:
    r = Record("spoiled")
    false, yes = r.summary["false claims"], r.summary["of them called yes"]
    return f"held-out claims that were false: {false:,}; called yes: {yes}"


def looks() -> str:
    """What it costs to be allowed to look."""
    r = Record("looks")
    return "; ".join(
        f"with {above or 'none'} above, {often:,} where a count looked at once takes {once:,}"
        for above, often, once in zip(*(r.column(name, share=0.01) for name in (
            "above", "at any time", "looked at once")), strict=True) if above < 5)


def demonstrated() -> str:
    r = Record("demonstrated")
    said = listed(f"{row['claim']} {row['holds']}" for row in r.rows if row["claim"].startswith("held-out"))
    return f"{r.summary['held-out claims decided']} decided: {said}"


def least(claim: str, level: float) -> float:
    """Coverage, the least of all laws."""
    return float(min(Record("coverage").column("covered", claim=claim, nominal=level)))


def radius() -> str:
    r = Record("radius")
    return (f"decided for {of(d == 'yes' for d in r.column('decided'))}, the truth inside for "
            f"{of(r.column('inside'))}; with one entry changed by 1e-3 the claim held for "
            f"{sum(p == 'yes' for p in r.column('planted error'))}")


def certified() -> list[tuple[str, str, Record]]:
    """What certificates say beyond radius and quantile, and whether it is so."""
    said = {"bars": ("error bars of every head, three laws of noise", _bars),
            "wrong": ("layers with a planted error (an entry, a head, two projections, a rotary base)", _wrong),
            "determined": ("what text-like inputs determine of each head", _determined),
            "certify_wide": ("claims on the Jacobian at widths where it is not formed", _wide)}
    return [(f"certificates: {what}", words(Record(name)), Record(name))
            for name, (what, words) in said.items() if kept(name)]


def _bars(r: Record) -> str:
    level = ", ".join(f"{share:.3g} at nominal {name}" for name, share in r.summary["least coverage"].items())
    over = span(r.column("mean bound over error"), ".1f")
    return f"least coverage {level}; a bound is {over} times the error, in the mean"


def _wrong(r: Record) -> str:
    return (f"{r.summary['certificates']} certificates of {r.summary['trials']} layers: "
            f"{r.summary['false yes'] or 'none'} with a yes where the claim is false")


def _determined(r: Record) -> str:
    shares = [math.floor(100 * row["Θ known"]) for row in r.rows if row.get("Θ known") is not None]
    least = float(r.summary["least share of directions within ε"])
    along = "all" if least == 1.0 else f"at least {100 * least:.4g} %"
    return (f"of {r.summary['judged']} layers learned (of {r.summary['layers']}, in 60 s each), {min(shares)} to "
            f"{max(shares)} % of the directions of Θ are known to 1e-3; along {along} of these the learned "
            "layer is within the stated ε of the true one")


def _wide(r: Record) -> str:
    last = r.rows[-1]
    said = "all decided" if not r.summary["undecided"] else f"{r.summary['undecided']} undecided"
    return (f"{said} up to width {last['width']} ({last['parameters']:,} parameters), there with "
            f"{last['products']} products in {last['seconds']:,.0f} s{busy(r)}")


def certificates() -> str:
    """docs/certificates.md."""
    r, large = Record("coverage"), Record("certify_large")
    names = ("quantile", "clipped mean", "share beyond the clip", "mean")
    levels, count = sorted(set(r.column("nominal"))), max(r.column("repetitions"))

    def told(when: str, names: tuple[str, ...]) -> str:
        return "; ".join(
            f"{listed(f'{name} {least(name + when, level):.3g}' for name in names)} at nominal {level:g}"
            for level in levels)

    return table([
        (f"coverage over {count:,} repetitions, the least of three laws of errors", told("", names), r),
        ("the same for somebody who looks after every example and stops when the bound is wrong",
         told(", worst moment", names[:2]), r),
        ("the quantile at the worst of 12,000 moments, computed", stopped(), Record("stopped")),
        ("examples it takes to say that at most 1 % are above, at 99 %", looks(), Record("looks")),
        ("errors planted in 200 layers, six ways each", spoiled(), Record("spoiled")),
        ("held-out claims about the layer that `headway demo` learns, 500 fresh sequences", demonstrated(),
         Record("demonstrated")),
        (f"radius on {len(Record('radius').rows)} recovered layers (d ≤ 16)", radius(), Record("radius")),
        *((words.removeprefix("certificates: "), *rest) for words, *rest in certified()),
        ("claims on the Jacobian where projections have low rank too", decided_thin(), large)])


# -- the zoo ----------------------------------------------------------------------------------------------------


def zoo_seen() -> str:
    s = Record("zoo/results").summary
    told = ", ".join(f"{words} {s[name]['successes']}" for name, words in TOLD.items())
    mine = f"{s['moments']['successes']} of {s['moments']['runs']}"
    return (f"`learn`, which is not told the head count, {mine} in eight seconds a run; told it, {told} "
            "([table](bench/results/zoo/table.md))")


def zoo_fresh() -> str:
    s = Record("zoo_fresh").summary
    told = ", ".join(f"{words} {s[f'{name}, successes']}" for name, words in TOLD.items())
    mine = f"{s['moments, successes']} of {s['moments, runs']}"
    return (f"`learn` {mine} in eight seconds of processor time; told the count, {told} "
            "([table](bench/results/zoo_fresh.md), [how it was run](docs/hardness.md))")


TOLD = {"starts": "Gauss–Newton from random starts", "adam": "Adam", "lbfgs": "L-BFGS"}


def _lost(record: Record, learner: str) -> str:
    """Instances with a run lost, and how many."""
    lost = [row["instance"] for row in record.rows if row["learner"] == learner and not row["success"]
            and row.get("suite", "zoo") == "zoo" and row.get("identifiable", True)]
    return ", ".join(f"{name} {lost.count(name)}" for name in dict.fromkeys(lost)) or "none"


def _by_the_wall(fresh: Record) -> str:
    """Where some runs were first made by the wall clock: which of them stand, and which were made again."""
    first = [row for row in fresh.rows if row.get("first_by_the_wall") is not None]
    again = [row for row in first if not row["first_by_the_wall"]]
    won = ", ".join(f"`{row['learner']}` on {row['instance']}" for row in again if row["success"])
    return "" if not first else (
        f". {len(first)} of the {len(fresh.rows)} were first made by the wall clock of a busy machine, where eight "
        f"seconds are fewer: the {len(first) - len(again)} that succeeded stand, the {len(again)} that did not "
        f"were made again by processor time, and of these succeeded: {won or 'none'}")


def zoo() -> str:
    """docs/hardness.md: the identifiable instances on both sets of seeds, then the parities."""
    seen, fresh = Record("zoo/results"), Record("zoo_fresh")
    said = (f"Seeds 0 to 2 ({seen.command}, measured at {seen.commit}) were watched while the learner was worked "
            f"on, until none of its runs was lost; seeds {fresh.summary['seeds']} ({fresh.command}, measured at "
            f"{fresh.commit}) were not. A fresh run has eight seconds of processor time")
    lines = [prose(f"{said}{_by_the_wall(fresh)}. Behind each count stand the instances with runs lost."), "",
             "| learner | seeds 0 to 2 | runs lost | fresh seeds | runs lost |", "|---|---|---|---|---|"]
    for name in ("moments", *TOLD):
        old, new = seen.summary[name], fresh.summary
        lines.append(f"| `{name}` | {old['successes']} of {old['runs']} | {_lost(seen, name)} | "
                     f"{new[f'{name}, successes']} of {new[f'{name}, runs']} | {_lost(fresh, name)} |")
    names = " | ".join(f"`{name}`" for name in PARITY)
    lines += ["", "Parities, successes of three seeds in eight seconds:", "",
              f"| hidden bits | {names} |", "|---" * (1 + len(PARITY)) + "|"]
    for s in (1, 2, 3, 4):
        cells = [sum(row["success"] for row in seen.rows if row["suite"] == "parity" and row["learner"] == name
                     and row["instance"] == f"parity-{s}") for name in PARITY]
        lines.append(f"| {2 * s} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


PARITY = ("moments", "starts", "adam", "lbfgs", "sculpt")

def ranks() -> str:
    """docs/scale.md: one layer on one to three processes."""
    record = Record("ranks")
    lines = ["| processes | heads found | apart from one process | peak memory of each, MiB | calls in all | bytes "
             "each sends a product, thin and free |", "|---" * 6 + "|"]
    for row in record.rows:
        cells = (row["ranks"], f"{row['heads']}, {row['status']}",
                 "–" if row["ranks"] == 1 else upto(row["apart from one process"]),
                 f"{row['peak a rank, MiB']:.0f}", f"{row['calls in all']:,}",
                 f"{row['bytes a thin product']:,} and {row['bytes a free product']:,}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    said = ("Calls and bytes of a product were in all cases those of the model" if all(
        record.column("as the model says")) else "Calls and bytes of a product were not always those of the model")
    before = min(record.column("of it before learning"))
    return "\n".join([*lines, "", prose(
        f"{said}. {before:.0f} MiB of each process are Python and torch before anything is read. {record.command}, "
        f"measured at {record.commit}.")])


def ranks_killed() -> str:
    """docs/scale.md: kill -9."""
    record = Record("ranks_killed")
    torchrun = [row["same bytes"] for row in record.rows if row["goes on by"] == "torchrun"]
    return prose(
        f"One of two processes was killed (kill -9) at a random moment, {len(record.rows)} times. Gone on with by "
        f"torchrun on the same two, the layer was the same to the last byte in {sum(torchrun)} of {len(torchrun)}; "
        f"with `--resume` on one or three processes it was the same within "
        f"{upto(row['heads apart'] for row in record.rows if row['goes on by'] != 'torchrun')} in "
        f"{of(row['heads apart'] < 1e-12 for row in record.rows if row['goes on by'] != 'torchrun')} "
        f"({record.command}, measured at {record.commit}).")


def streams() -> str:
    """docs/scale.md: examples beyond memory."""
    record = Record("streams")
    (small, *_, large), asked = ([row for row in record.rows if row["shards"]],
                                 next(row for row in record.rows if not row["shards"]))
    each = (large["peak, MiB"] - small["peak, MiB"]) * 2**20 / (large["sequences"] - small["sequences"])
    return prose(
        f"{large['examples']} of shards ({large['shards']:,} names of one file, {large['sequences']:,} sequences), "
        f"a limit of {record.summary['limit']}, {record.summary['steps of each']} steps of descent: at most "
        f"{large['peak, MiB']:.0f} MiB were held, with {small['examples']} {small['peak, MiB']:.0f}, so {each:.0f} "
        f"bytes more a sequence. A black box asked for {asked['asked']:,} sequences more is under no limit: "
        f"{asked['peak, MiB']:.0f} MiB, with what it takes itself to answer 1,024 at a time. In all, from the "
        f"first look to the last it was {record.summary['grown between looks at most, MiB']:.0f} MiB more at most. "
        f"To look through the list took {large['to look through, s']:.0f} s of processor, a pass over all of it "
        f"{large['a pass, s']:.0f} s ({large['GB a second']:.1f} GB a second, from the system's cache of files; "
        f"counted on a part). {record.command}, measured at {record.commit}.")


def scale() -> str:
    """docs/scale.md: predicted, not measured."""
    source = Record("real")
    return "\n".join([scaling.table(), "", prose(
        f"A prediction. Arithmetic at {scaling.rate() / 1e12:.0f} Tflop/s, the rate of Adam's steps on one "
        f"{source.kept['machine']} in {source.command} (measured at {source.commit}); sums over NVLink at "
        f"{scaling.INSIDE / 1e9:.0f} GB/s a GPU up to eight, {scaling.BETWEEN / 1e9:.0f} GB/s (400 Gb/s) beyond, "
        f"and for comparison {scaling.SLOW / 1e9:.3g} GB/s (100 Gb/s). Sums take longer than arithmetic below "
        f"{scaling.bounds()} rows a rank at these three, whatever the width: both are some d² numbers, where the "
        "heads together are as wide as the layer.")])


def sweeps() -> str:
    """docs/howto/cluster.md."""
    r = Record("sweep")
    s = r.summary
    names = listed([f"`{name}`" for name in dict.fromkeys(r.column("learner"))])
    return prose(
        f"The identifiable instances of the zoo with {names}, {s['runs']} runs, on {s['workers']} processes of "
        f"this machine and on a Dask cluster of {s['workers']} workers on it, one of which was killed (signal 9) "
        f"with a run in hand {s['workers killed']} times: {of(r.column('same to the last bit'))} rows the same to "
        f"the last bit, but for seconds and memory; {s['lost']} runs lost ({r.command}, measured at {r.commit}).")


BLOCKS: dict[str, Callable[[], str]] = {
    block.__name__: block for block in (measured, real, floor, notes, sculpt, training, certificates, zoo, ranks,
                                        ranks_killed, streams, scale, sweeps, statements.trial, statements.rules,
                                        statements.methods, statements.linear, statements.queries,
                                        statements.queries_noise, statements.queries_breaks)}
