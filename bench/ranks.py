"""Learning on 1, 2 and 3 processes: the same heads, memory a rank, bytes a product, and processes that are killed.

    python bench/ranks.py            # all of it
    python bench/ranks.py --agree    # all but the kills
    python bench/ranks.py --kills    # the kills alone

One layer, 64 wide with 8 heads of rank 8, is learned from shards by torchrun's processes, gloo between them. Heads
are compared with those of one process. Then a smaller layer is learned again and again while one of two processes
is killed (kill -9) at a random moment: half of the times torchrun starts both again, half of the times the run is
gone on with by ``--resume`` on one or three processes.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import record, timed

SIZE = ["--heads", "8", "--width", "64", "--length", "32", "--count", "16000", "--shards", "12", "--rank", "8",
        "--seed", "3"]
SMALL = ["--heads", "3", "--width", "16", "--length", "8", "--count", "3000", "--shards", "4", "--seed", "4"]
RANKS = (1, 2, 3)
KILLS, SEED = 10, 0
HEADWAY = [sys.executable, "-m", "headway"]


def started(ranks: int, *words: str, restarts: int = 0) -> list[str]:
    """A command on so many processes."""
    if ranks == 1:
        return [sys.executable, *words]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
            "--max-restarts", str(restarts), *words]


def worker(data: str, run: str, out: str) -> None:
    """One process: learns, multiplies once, says what memory that took and what was sent."""
    import torch
    import torch.distributed as dist

    import headway as hw
    from headway.cli.ranks import group
    from headway.learning.parts import Parted
    from headway.learning.source import Source, find_frame, spaced
    from headway.learning.thin import ThinModel
    from headway.linalg.projected import Products, evaluate
    from headway.linalg.thin import Thin

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    with group() as ranks:
        shards = hw.Examples.open(data)
        fit, seconds = timed(lambda: hw.learn(shards, run=run))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        examples = shards if ranks.alone else Parted(shards, ranks)
        source = Source(examples)
        source.frame = find_frame(examples, source.fit, source.device)
        m, d = fit.layer.heads, fit.layer.width
        problem = source.problem(spaced(source.fit, 200), m, torch.float32)
        Theta = torch.cat([fit.layer.Theta, torch.zeros(m, 1, d)], dim=1).float()
        sent = {}
        shape = Thin.of(Theta, fit.layer.W.float(), 8, 8)
        thin = ThinModel(problem).products(ThinModel(problem).evaluate(shape), shape, torch.float32)
        free = Products(problem, evaluate(problem, Theta), torch.float32)
        for name, operator, v in (("thin", thin, shape.value), ("free", free, Theta)):
            was = ranks.counted
            operator.curvature(v)
            sent[name] = {key: now - was[key] for key, now in ranks.counted.items()}
        Path(f"{out}-{ranks.rank}.json").write_text(json.dumps({
            "before": before, "peak": peak, "seconds": seconds, "sent": sent, "heads": m, "unknowns": [
                shape.value.numel(), Theta.numel()], "kind": fit.status.kind,
            "error": fit.stats["held_out_error"], "all": fit.stats.get("communication", {"calls": 0, "bytes": 0})}))
        if dist.is_initialized():
            dist.barrier()


def modelled(heads: int, width: int, unknowns: list[int], ranks: int) -> dict[str, dict[str, int]]:
    """Calls and bytes of a product by the model: the projection's right-hand side, then the product itself."""
    from headway.linalg.totals import price

    found = {}
    columns = {"thin": (8 * heads + 1) * 8 * heads, "free": (heads * width + 1) * width}
    for (name, first), second in zip(columns.items(), unknowns, strict=True):
        calls, sent = zip(price(first, 4, ranks), price(second, 4, ranks), strict=True)
        found[name] = {"calls": sum(calls), "bytes": sum(sent)}
    return found


def apart(one: Path, other: Path) -> float:
    """The worst error of a head, those of ``one`` taken for the truth."""
    import headway as hw
    from headway.core.layer import load_layer

    return float(hw.match(load_layer(other), load_layer(one)).worst)


def agree(folder: Path) -> list[dict[str, Any]]:
    data = folder / "data"
    subprocess.run([*HEADWAY, "make", str(data), *SIZE], check=True)
    width, rows = int(SIZE[3]), []
    for ranks in RANKS:
        run, out = folder / f"run-{ranks}", folder / f"out-{ranks}"
        subprocess.run(started(ranks, __file__, "--worker", str(data), str(run), str(out)), check=True)
        said = [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(ranks)]
        first = said[0]
        model = modelled(first["heads"], width, first["unknowns"], ranks)
        rows.append({
            "ranks": ranks, "status": first["kind"], "heads": first["heads"], "held-out error": first["error"],
            "apart from one process": apart(folder / "run-1" / "layer.safetensors", run / "layer.safetensors"),
            "worst head error": apart(data / "truth.safetensors", run / "layer.safetensors"),
            "peak a rank, MiB": max(one["peak"] for one in said),
            "of it before learning": min(one["before"] for one in said), "seconds": first["seconds"],
            "calls in all": first["all"]["calls"], "MB sent by rank 0 in all": first["all"]["bytes"] / 1e6,
            **{f"{what} a {kind} product": sent[what] for kind, sent in first["sent"].items()
               for what in ("calls", "bytes")},
            "as the model says": all(one["sent"] == model for one in said)})
        print(rows[-1], flush=True)
    return rows


def children(pid: int) -> list[int]:
    try:
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def watched(command: list[str], env: dict[str, str]) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start, and wait for the processes."""
    begun = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found: list[int] = []
    while begun.poll() is None and len(found) < 2:
        found = children(begun.pid)
        time.sleep(0.02)
    return begun, found


def killed(command: list[str], after: float, which: int, env: dict[str, str]) -> bool:
    """Kill one of the processes so long after they began; whether it was still there."""
    begun, found = watched(command, env)
    time.sleep(after)
    hit = False
    if begun.poll() is None and which < len(found):
        try:
            os.kill(found[which], signal.SIGKILL)
            hit = True
        except ProcessLookupError:
            pass
    begun.wait(timeout=600)
    return hit


def kills(folder: Path) -> list[dict[str, Any]]:
    data, env = folder / "small", {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([*HEADWAY, "make", str(data), *SMALL], check=True)
    whole = folder / "whole"
    learn = ["-m", "headway", "learn", str(data), "--out"]
    first, _ = watched(started(2, *learn, str(whole)), env)
    _, seconds = timed(first.wait)
    draw, rows, tries = random.Random(SEED), [], 0
    while len(rows) < KILLS:
        tries += 1
        run, after, which = folder / f"killed-{tries}", draw.uniform(0, 0.9 * seconds), draw.randrange(2)
        by_torchrun = len(rows) % 2 == 0
        hit = killed(started(2, *learn, str(run), restarts=3 if by_torchrun else 0), after, which, env)
        if not hit:
            continue  # it had ended already
        stages = len(list((run / "stages").glob("*"))) if (run / "stages").exists() else 0
        ranks = 2
        if not by_torchrun:
            ranks = draw.choice((1, 3))
            begun = (run / "config.json").exists()  # else it was killed before anything was kept
            again = ["-m", "headway", "learn"]
            again += ["--resume", str(run)] if begun else [str(data), "--out", str(run)]
            subprocess.run(started(ranks, *again), check=True, env=env, stderr=subprocess.DEVNULL)
        layer = run / "layer.safetensors"
        rows.append({
            "killed": f"rank {which}", "after, s": after, "goes on by": "torchrun" if by_torchrun else "--resume",
            "on ranks": ranks, "stages kept before": None if by_torchrun else stages,
            "same bytes": layer.read_bytes() == (whole / "layer.safetensors").read_bytes(),
            "heads apart": apart(whole / "layer.safetensors", layer)})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "--kills" not in sys.argv[1:]:
            rows = agree(folder)
            record("ranks", "python bench/ranks.py", {
                "heads apart, at most": max(row["apart from one process"] for row in rows),
                "communication as the model says": all(row["as the model says"] for row in rows),
                "peak a rank, MiB": [round(row["peak a rank, MiB"]) for row in rows]}, rows)
        if "--agree" in sys.argv[1:]:
            return
        rows = kills(folder)
        record("ranks_killed", "python bench/ranks.py --kills", {
            "killed": len(rows), "same result": sum(row["heads apart"] < 1e-12 for row in rows),
            "same bytes where torchrun went on": sum(row["same bytes"] for row in rows
                                                     if row["goes on by"] == "torchrun")}, rows)


if __name__ == "__main__":
    if "--worker" in sys.argv[1:]:
        worker(*sys.argv[2:])
    else:
        main()
