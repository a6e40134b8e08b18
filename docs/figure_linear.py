"""The figure of docs/linear.md, from bench/results/linear_samples.json.

    python docs/figure_linear.py [FILE]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from headway.report.figures import plot_samples, save

RECORD = Path(__file__).parents[1] / "bench" / "results" / "linear_samples.json"


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("linear.png")
    save(plot_samples(json.loads(RECORD.read_text())["rows"]), path)


if __name__ == "__main__":
    main()
