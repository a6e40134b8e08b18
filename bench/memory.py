"""50,000 sequences of 32 tokens, d = 128, m = 8, from shards: peak resident memory of the learner.

The examples are written by one process and learned by another, whose peak is read from the operating system.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from common import record, timed

SIZE = ["--heads", "8", "--width", "128", "--length", "32", "--count", "50000", "--shards", "25", "--rank", "16",
        "--seed", "3"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data, run = Path(folder) / "data", Path(folder) / "run"
        command = [sys.executable, "-m", "headway"]
        subprocess.run([*command, "make", str(data), *SIZE], check=True)
        made = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        size_gib = sum(p.stat().st_size for p in data.iterdir()) / 2**30
        done, seconds = timed(lambda: subprocess.run(
            [*command, "learn", str(data), "--out", str(run), "--json"], check=False, stdout=subprocess.PIPE))
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        result = json.loads(done.stdout)
        shown = subprocess.run([*command, "show", str(run), "--truth", str(data / "truth.safetensors"), "--json"],
                               check=False, stdout=subprocess.PIPE)
        match = json.loads(shown.stdout)["match"]
    record("memory", "python bench/memory.py", {
        "examples on disk, GiB": size_gib, "peak of make, GiB": made, "peak of make and learn, GiB": peak,
        "status": result["status"], "heads found": result["stats"]["heads"], "rank found": result["stats"]["rank"],
        "held-out error": result["stats"]["held_out_error"],
        "worst head error": max(*match["theta_error"], *match["w_error"]), "seconds": seconds}, [])


if __name__ == "__main__":
    main()
