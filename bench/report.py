"""The page of a 12-head, width-384 run: how large it is, and how long a browser takes to open it and draw every
figure.

    python bench/report.py

A random layer stands for the truth and, changed a little everywhere, for what was learned: the worst case for
the size, since nothing of the truth can be told by its difference from the learned one.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

import headway as hw
from common import record
from headway.core.layer import save_layer
from headway.core.results import Status
from headway.report import write_report
from headway.runs.store import Run

HEADS, WIDTH, VISITS = 12, 384, 5
QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]


def opened(page: Path) -> float:
    """Seconds from asking for the page until every figure of it is drawn, in a browser that is already running."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=QUIET)
        visit = browser.new_page()
        visit.goto("about:blank")
        begun = time.perf_counter()
        visit.goto(page.resolve().as_uri())
        visit.wait_for_selector("html[data-drawn=yes]", timeout=60_000)
        spent = time.perf_counter() - begun
        browser.close()
    return spent


def main() -> None:
    rank = max(1, WIDTH // HEADS)
    truth = hw.AttentionLayer.random(heads=HEADS, width=WIDTH, rank=rank, key_bias=True, offset=True, seed=0)
    noise = torch.randn(truth.Theta.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    learned = hw.AttentionLayer(truth.Theta + 0.3 * noise / WIDTH, truth.W + 0.1 * noise / WIDTH**0.5,
                                truth.key_bias, truth.offset)
    trace = tuple({"stage": f"polish-{j}", "seconds": 1.0, "curve": [[i / 50, 10.0**-i] for i in range(15)]}
                  for j in range(20))
    stats = {"rank": rank, "held_out_error": 1e-15, "examples": 40_000, "floor": 1000, "seconds": 20.0,
             "products": 0, "held_out": 2000, "used": 10_000}
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder) / "run", {"made by": "bench/report.py"})
        run.begin()
        save_layer(run.path / "truth.safetensors", truth)
        run.finish(hw.Fit(learned, Status("recovered", "A page as large as it gets."), stats, trace))
        begun = time.perf_counter()
        page = write_report(run.path)
        wrote = time.perf_counter() - begun
        times = [opened(page) for _ in range(VISITS)]
        size = page.stat().st_size / 1e6
    record("report", "python bench/report.py", {
        "heads": HEADS, "width": WIDTH, "page, MB": size, "seconds to write it": wrote,
        "seconds to open it, median": median(times), "slowest": max(times)}, [])


if __name__ == "__main__":
    main()
