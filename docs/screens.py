"""The pictures of pages in the documentation, taken in Debian's Chromium.

    python docs/screens.py [FOLDER]

tokens.png: where the heads look, from the page of the second act of ``headway demo``. compare.png: the top of the
page of two layers side by side, the learned one and another in which one head was changed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import headway as hw
from headway.recall.model import LAST, own, trained
from headway.report import write_comparison
from headway.runs.store import Run

QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]
WIDTH = 900


def pages(folder: Path) -> dict[str, tuple[Path, str | None]]:
    """By the picture's name, a page and the part of it that is shown; None: what fits the window."""
    run = folder / "demo"
    subprocess.run([sys.executable, "-m", "headway", "demo", "--out", str(run)], check=True)
    learned = Run.open(run / "recall").fit().layer
    layer = own(trained(), LAST)
    changed = layer.W.clone()
    changed[0] *= 1.01
    other = hw.AttentionLayer(layer.Theta, changed, layer.key_bias, layer.offset, layer.mask)
    beside = write_comparison(learned, other, folder / "compare.html", tolerance=1e-4)
    return {"tokens": (run / "recall" / "report.html", "section[aria-labelledby=looks-title]"),
            "compare": (beside, None)}


def main() -> None:
    from playwright.sync_api import sync_playwright

    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("screens")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=QUIET)
        for name, (page, part) in pages(Path(folder)).items():
            visit = browser.new_page(viewport={"width": WIDTH, "height": 1000})
            visit.goto(page.as_uri())
            visit.wait_for_selector(".js-plotly-plot")
            shown = visit if part is None else visit.locator(part)
            shown.screenshot(path=out / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
