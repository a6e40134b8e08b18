"""Examples far beyond memory: does what the learner holds stay where it is, and what does a pass cost?

    python bench/streams.py             # 2 and 200 GB of shards, and a black box that is asked for more
    python bench/streams.py --quick     # 2 GB and the black box

Nobody needs 200 GB of disk for that: one shard is written and linked under as many names as it takes, so that it is
opened, read and left again as if each were another one (from the system's cache of files: a pass is as fast as
reading and converting allow, not as a disk does). Under a limit of LIMIT shards are looked through as every
learner does, then a descent makes STEPS steps on what is read or asked on the way; then they are read on and on.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import record
from headway.core.budget import BUDGET, size_of

LAYER: dict[str, Any] = {"heads": 4, "width": 64, "rank": 8, "scale": 2.0, "seed": 3}
LENGTH, SHARD, ASKED = 128, 512, 2000  # tokens of a sequence, sequences of a shard and at first of a black box
LIMIT, STEPS, READ = "1GiB", 300, 3.0
SIZES: tuple[float, ...] = (2, 200)  # GB
OWN = ("LAYER", "LENGTH", "ASKED", "LIMIT", "STEPS", "READ")  # what the process that learns is told


def layer() -> Any:
    import headway as hw

    return hw.AttentionLayer.random(**LAYER)


def linked(folder: Path, size: float) -> int:
    """Shards of so many GB in all, each a link to the one that is there; how many."""
    first = folder.parent / "one"
    if not first.exists():
        import headway as hw
        from headway.core.shards import write

        write(first, [hw.draw(layer(), SHARD, LENGTH, law="gaussian", seed=1)])
    file = next(first.glob("*.safetensors"))
    count = max(1, math.ceil(size * 1e9 / file.stat().st_size))
    folder.mkdir()
    for j in range(count):
        (folder / f"examples-{j:05d}-of-{count:05d}.safetensors").hardlink_to(file)
    return count


def worker(what: str) -> None:
    """Look through a folder or a black box as a learner does, descend, say what was held; then read on and on for a
    while."""
    import torch

    import headway as hw
    from headway.core.devices import held, peak
    from headway.learning.learn import _budget
    from headway.learning.source import Source, find_frame
    from headway.learning.starts import descent

    if what == "asked":
        examples = hw.ask(layer(), ASKED, LENGTH, width=LAYER["width"], law="gaussian", seed=2, fresh=True)
    else:
        examples = hw.Examples.open(what)
    begun, clock = held() or 0, time.process_time()
    # What a black box takes to answer is its own: it is under no limit.
    budget = BUDGET if what == "asked" else _budget(size_of("memory", LIMIT) or 0, examples, None)
    source = Source(examples, budget=budget)
    source.frame = find_frame(examples, source.fit, source.device, budget=source.budget)
    looked, seen = time.process_time() - clock, list[int]()
    descent.STEPS, descent.TARGET = STEPS, 0.0
    made = descent.descended(source, LAYER["heads"], LAYER["rank"], LAYER["rank"], 0.0,
                             torch.Generator().manual_seed(0), lambda error: seen.append(held() or 0))
    found: dict[str, Any] = {
        "sequences": len(examples), "before learning, MiB": begun / 2**20, "peak, MiB": peak()["host"] / 2**20,
        "to look through, s": looked, "steps": made.steps, "a step, ms": 1e3 * (
            time.process_time() - clock - looked) / made.steps,
        "sequences met": made.sequences, "asked": made.asked,
        "more at the last look than at the first, MiB": (seen[-1] - seen[0]) / 2**20}
    if what != "asked":
        at, clock, read = 0, time.process_time(), 0
        while time.process_time() - clock < READ and at < len(examples):
            part = examples.take(range(at, min(at + 64, len(examples))))
            at, read = at + 64, read + part.X.nbytes + part.Y.nbytes
        speed = read / (time.process_time() - clock)
        found |= {"GB a second": speed / 1e9, "a pass, s": len(examples) * read / at / speed,
                  "peak after reading on, MiB": peak()["host"] / 2**20}
    print(json.dumps(found))


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for size in SIZES[:1] if "--quick" in sys.argv[1:] else SIZES:
            folder = Path(name) / f"{size}"
            rows.append({"examples": f"{size} GB", "shards": linked(folder, size), **said(str(folder))})
            print(rows[-1], flush=True)
        rows.append({"examples": "a black box", "shards": None, **said("asked")})
        print(rows[-1], flush=True)
    stored = [row for row in rows if row["shards"]]
    record("streams", "python bench/streams.py", {
        "limit": LIMIT, "steps of each": STEPS, "largest": stored[-1]["examples"],
        "peak, MiB, at most": max(row["peak, MiB"] for row in rows),
        "peak of the largest over that of the smallest, MiB": stored[-1]["peak, MiB"] - stored[0]["peak, MiB"],
        "grown between looks at most, MiB": max(
            row["more at the last look than at the first, MiB"] for row in rows),
        "sequences asked for": rows[-1]["asked"],
        "a pass over the largest, s": stored[-1]["a pass, s"], "GB a second": stored[-1]["GB a second"]}, rows)


def said(what: str) -> dict[str, Any]:
    own = json.dumps({name: globals()[name] for name in OWN})
    made = subprocess.run([sys.executable, __file__, "--worker", what, own], check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(made.stdout)
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        globals().update(json.loads(sys.argv[3]))
        worker(sys.argv[2])
    else:
        main()
