"""A trial whose first worker dies under it: for workers, which import this without the tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from headway.training.grid import Trial, trained

FEW = [Trial(heads=heads, step=0.1, steps=6, count=20, test_count=20, tokens=4, width=6, zeta=0.5, theory=theory)
       for heads, theory in ((1, True), (4, False), (9, False))]
DEADLY = 4


def deadly(trial):
    """``trained``; who was given which trial stands in a folder named by HEADWAY_TEST_SEEN."""
    seen = Path(os.environ["HEADWAY_TEST_SEEN"]) / f"{trial.heads}"
    with seen.open("a") as file:
        file.write(f"{os.getpid()}\n")
    if trial.heads == DEADLY and len(seen.read_text().split()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return trained(trial)


def given_out(folder):
    """The processes that were given each trial."""
    return {trial.heads: (folder / f"{trial.heads}").read_text().split() for trial in FEW}
