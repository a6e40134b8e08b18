"""What README and docs say about the truth of what ``learn`` says: rows and a block for bench/claims.py.

A record that has not been made yet is left out of the table: no row without a number behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from pages import Record, kept, listed, of, prose, span, upto

LEARNED = 1e-6  # error on other sequences of a layer that counts as learned
MORE = ("form told", "adam", "lbfgs")  # methods that are told more
Row = tuple[str, str, Record]


def rows() -> list[Row]:
    """For README's table, those whose record is there."""
    wanted: tuple[tuple[str, Callable[[], str], str], ...] = (
        ("is what it says true? layers, five functions that are none, noise, outliers, too few examples; d = 12",
         verdicts, "verdicts"),
        ("1 % and 5 % of 1,000 sequences with wrong labels, 3 heads, d = 16", outliers, "outliers"),
        ("examples as a new user might bring them, each wrong in its own way", trial_short, "trial"),
        ("all layers of a small trained GPT (d = 64) and encoder (d = 32), a minute each, nothing told", gpts,
         "gpts"),
        ("what heads do, told from their patterns: ten planted heads of each of four kinds, and ten of none",
         planted_heads, "behaviours"),
        ("linear attention (no softmax), d up to 32, rank up to 4, nothing told", linear_layers, "linear"),
        ("a black box whose inputs are chosen: random layers, biases, sequences of 16, nothing told",
         queries_short, "queries"),
    )
    found = [(what, said(), Record(name)) for what, said, name in wanted if kept(name)]
    encoder = "layers of a sentence encoder (12 heads, width 384) from {}, one H200"
    for name, words in (
        ("text_few", "5,000 random ±1 sequences of 32; nothing told"),
        ("text_told", "2,000 random ±1 sequences of 32; told 12 heads of size 32"),
        ("text_own", "their own activations on 40,000 pieces of text; nothing told"),
        ("text_4000", "their own activations on 4,000 pieces; nothing told"),
        ("text_4000_rest", "the same, the other layers"),
    ):
        if kept(name):
            found.append((encoder.format(words), text(name), Record(name)))
    return found


def linear_layers() -> str:
    """README: operators of linear layers."""
    r = Record("linear")
    s, rows = r.summary, [row for row in r.rows if row["part"] == "found"]
    right = of(row["success"] and row["rank found"] == row["rank"] for row in rows)
    return (f"operator within {upto(s['worst error'])} and rank right for {right}; other heads of one operator "
            f"declared the same in {s['declared the same']} of {s['pairs of one operator']} pairs, another "
            f"operator told apart in {s['told apart with an input']} of {s['pairs of two']}")


def linear() -> str:
    """docs/linear.md: what was measured of both."""
    made = [said for name, said in (("linear", _operators), ("linear_samples", _sequences)) if kept(name)]
    return "\n\n".join(prose(said()) for said in made)


def _operators() -> str:
    r = Record("linear")
    s, rows = r.summary, [row for row in r.rows if row["part"] == "found"]
    widths, ranks = (listed(sorted({row[name] for row in rows})) for name in ("d", "rank"))
    return (f"{rows[0]['times']:g} times the floor, nothing told (widths {widths}, ranks {ranks}, Gaussian and ±1 "
            f"tokens, causal and not, half of the layers made of twice as many heads as their rank): "
            f"{linear_layers()}. That fewer heads cannot do is proved for "
            f"{of(row['least proved'] == row['rank'] for row in rows)}. With 1 % noise on the labels "
            f"{s['noise called so, rank right']} of {s['noisy labels']} are called noise, their rank right; of "
            f"{s['labels of a softmax']} layers with a softmax {s['refused']} are refused ({r.command}, measured "
            f"at {r.commit}).")


def _sequences() -> str:
    r = Record("linear_samples")
    told, whole = ([row for row in r.rows if row["part"] == part] for part in ("told", "whole"))

    def at(rows: list[dict[str, Any]]) -> str:
        return listed([f"{of(row['success'] for row in rows if row['times'] == times)} at {times:g} times"
                       for times in sorted({row["times"] for row in rows})])

    wrong = sum(row.get("status") == "recovered" and not row["success"] for row in told)
    widths = [listed(sorted({row["d"] for row in rows})) for rows in (told, whole)]
    return (f"Told the count, `learn` finds the operator from Gaussian tokens of {at(told)} the floor (widths "
            f"{widths[0]}; those it chooses and judges by are counted and not fitted; recovered by its own word, "
            f"and wrong: {wrong}). Least squares over all operators at once, fitted to every sequence, width "
            f"{widths[1]}, finds {at(whole)} the floor ({r.command}, measured at {r.commit}).")


def queries_short() -> str:
    r = Record("queries")
    sizes = [(row["m"], row["d"]) for row in r.rows]
    known = [row["random calls"] for row in r.rows if row["random calls"] is not None]
    of_them = "" if len(known) == len(sizes) else f" for {len(known)} of the sizes"
    beside = f"; random examples, told the head count, take {span(known)}{of_them}" if known else ""
    good, every = sum(r.column("recovered")), sum(r.column("seeds"))
    return (f"recovered to 1e-9: {good} of {every} layers of {len(sizes)} sizes, head count right "
            f"in {sum(r.column('count right'))}, {span(r.column('calls'))} calls{beside}")


def queries() -> str:
    """docs/questions_needed.md: one row a size."""
    r = Record("queries")
    head = ("heads, width", "recovered", "calls (most)", "rows", "floor, rows", "random: calls", "rows ",
            "published", "worst error", "asked")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in r.rows:
        random = [f"{row[name]:,}" if row[name] is not None else "–" for name in ("random calls", "random rows")]
        right = of(seed < row["recovered"] for seed in range(row["seeds"]))
        lines.append("| " + " | ".join([
            f"{row['m']}, {row['d']}", right,
            f"{row['calls']:,} ({row['most calls']:,})", f"{row['rows']:,}", f"{row['floor, rows']:,}", *random,
            f"{row['published']:,}", upto([row["worst error"]]) if math.isfinite(row["worst error"]) else "–",
            {"both": "counted, then random"}.get(row["plan"], row["plan"])]) + " |")
    commits = list(dict.fromkeys(commit[:7] for row in r.rows for commit in row["commit"].split()))
    return "\n".join(lines) + f"\n\n{r.command}, measured at {listed(commits)}.\n"


def queries_noise() -> str:
    r = Record("queries_noise")
    parts = []
    for kind in dict.fromkeys(r.column("answers")):
        ratios = r.column("ratio", answers=kind)
        parts.append(f"{kind}: {of(ratio <= 3 for ratio in ratios)} within 3 times, the largest {max(ratios):.2g} "
                     f"times, errors up to {upto(r.column('error', answers=kind))}")
    return prose("Error beside that of least squares started at the truth, with the same calls: "
                 f"{'; '.join(parts)} "
                 f"({r.command}, measured at {r.commit}).")


def queries_breaks() -> str:
    r = Record("queries_breaks")
    lines = ["| what | how it ends | heads found | calls | worst head error |", "|---|---|---|---|---|"]
    for row in r.rows:
        found = "–" if row["found"] is None else f"{row['found']} of {row['heads']}"
        error = row["worst error"]
        shown = "–" if error is None or not math.isfinite(error) else upto([error])
        lines.append(f"| {row['what']} | {row['ends']} | {found} | {row['calls'] or '–'} | {shown} |")
    return "\n".join(lines) + f"\n\n{r.command}, measured at {r.commit}.\n"


def planted_heads() -> str:
    r = Record("behaviours")
    aimed = [row["right"] for row in r.rows if row["planted"] != "mixed"]
    none = [row["right"] for row in r.rows if row["planted"] == "mixed"]
    return f"{of(aimed)} named right; no name given to {of(none, 'others')}"


def text(name: str) -> str:
    """The layers that were learned, and those that were not."""
    r = Record(name)
    parts = []
    good = [row for row in r.rows if row["heads found"] == 12 and row["error on other sequences"] < LEARNED]
    if good:
        heads = [row["worst head error"] for row in good if "worst head error" in row]
        parts.append(f"{_layers(good)}: 12 heads found, " + (
            f"each within {upto(heads)}" if heads else
            f"error on other sequences at most {upto(row['error on other sequences'] for row in good)}")
            + f", {span([row['seconds'] for row in good], '.0f')} s")
    for row in r.rows:
        if row not in good:
            parts.append(f"not learned: {_layers([row])} ({row['heads found']} heads, error "
                         f"{upto([row['error on other sequences']])} after {row['seconds']:.0f} s)")
    return "; ".join(parts)


def _layers(rows: list[dict[str, Any]]) -> str:
    return ("layers " if len(rows) > 1 else "layer ") + listed(sorted(row["layer"] for row in rows))


def verdicts() -> str:
    r = Record("verdicts")
    failing = {kind: [not row["true"] for row in r.rows if row["labels"] == kind]
               for kind in dict.fromkeys(r.column("labels"))}
    lost = ", ".join(f"{kind} {sum(bad)}" for kind, bad in failing.items() if any(bad))
    return (f"{of(r.column('true'), 'statements')} true" + (f" (false: {lost})" if lost else "")
            + f"; said to be ok, and false: {_flattering(r.rows)}")


def outliers() -> str:
    r = Record("outliers")
    named = math.floor(100 * min(r.column("share named")))
    heads = of(r.column("heads within 1e-9"))
    return (f"every head within 1e-9, count not told, for {heads}; at least {named} % of "
            f"the wrong sequences named, at most {max(r.column('false alarms'))} of the right ones")


def trial_short() -> str:
    r = Record("trial")
    return (f"{of(r.column('true'), 'statements')} true ([table](docs/verdicts.md)); said to be ok, and false: "
            f"{_flattering(r.rows)}")


def gpts() -> str:
    r = Record("gpts")
    parts = []
    for inputs, words in (("task", "on their own task"), ("random", "on random tokens")):
        rows = [row for row in r.rows if row["inputs"] == inputs]
        good = [row for row in rows if row["true"]]
        worst = f", error at most {upto(row['error on other sequences'] for row in good)} on others" if good else ""
        parts.append(f"{words} {of(row['true'] for row in rows)} with the head count right{worst}")
    return "; ".join(parts)


def _flattering(rows: Iterable[dict[str, Any]]) -> int:
    return sum(row["ok"] and not row["true"] for row in rows)


def trial() -> str:
    """docs/verdicts.md: every case with the sentence that was said."""
    if not kept("trial"):
        return "Not measured yet (`bench/trial.py`)."
    r = Record("trial")
    lines = [prose(f"{of(r.column('true'), 'statements')} true, {of(r.column('in time'), 'runs')} in time "
                   f"({r.command}, measured at {r.commit})."), "",
             "| case | what was said | ok | seconds | true |", "|---|---|---|---|---|"]
    for row in r.rows:
        verdict = "yes" if row["true"] else f"no: {row['why not true']}"
        cells = (row["case"], row["sentence"], "yes" if row["ok"] else "no", f"{row['seconds']:.1f}", verdict)
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def rules() -> str:
    """docs/rules.md: every rule, what stood in its place, and what that did."""
    if not kept("rules"):
        return "Not measured yet (`bench/rules.py`)."
    r = Record("rules")
    idle = r.summary["rules that buy nothing"] or "none"
    lines = [prose(f"{r.summary['rules that buy something']} of {r.summary['rules with a row']} rules buy "
                   f"something: {r.summary['buy truth']} truth, {r.summary['buy error']} a smaller error, "
                   f"{r.summary['buy time']} time. Nothing was seen of: {idle} ({r.command}, measured at "
                   f"{r.commit})."), "",
             "| rule | what it is | value | instead | examples | buys | with it | without it |",
             "|---|---|---|---|---|---|---|---|"]
    for row in r.rows:
        sides = [f"{row['true' + side]} true ({row['said' + side]}); heads {row['heads' + side]}; error "
                 f"{math.nan if row['error' + side] is None else row['error' + side]:.0e}; "
                 f"{row['seconds' + side]:.1f} s; {row['products' + side]:,} products"
                 for side in ("", " without")]
        cells = (f"`{row['rule']}`", *(row[name] for name in ("what it is", "value", "instead", "scene", "buys")),
                 *sides)
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def methods() -> str:
    """docs/methods.md: what every method made of the same examples."""
    if not kept("methods"):
        return "Not measured yet (`bench/methods.py`)."
    r = Record("methods")
    names = list(dict.fromkeys(r.column("method")))
    lines = [prose(f"Median seconds, and the largest error on other sequences, of {len(set(r.column('seed')))} "
                   f"seeds ({r.command}, measured at {r.commit}, {r.kept['machine']}). **Bold**: all learned, to "
                   "a millionth or to a third of the noise, and no method told no more was faster. Baselines "
                   "use all their seconds. A dash: examples refused, or not tried."), "",
             "| examples | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for words in dict.fromkeys(r.column("examples")):
        rows = {name: [row for row in r.rows if (row["examples"], row["method"]) == (words, name)]
                for name in names}
        first = min((name for name in names if name not in MORE and rows[name] and all(map(_learned, rows[name]))),
                    key=lambda name: median(row["seconds"] for row in rows[name]), default=None)
        cells = [f"**{_method(rows[name])}**" if name == first else _method(rows[name]) for name in names]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _learned(row: dict[str, Any]) -> bool:
    return row["error"] is not None and row["error"] <= max(LEARNED, row["noise"] / 3)


def _method(rows: list[dict[str, Any]]) -> str:
    errors = [row["error"] for row in rows if row["error"] is not None]
    if len(errors) < len(rows) or not rows:
        return "–"
    return f"{median(row['seconds'] for row in rows):.1f} s, {upto(errors)}"
