"""
How few examples will do
========================

Counting unknowns against equations gives a floor below which nothing can determine the layer. A little above
it, learning succeeds.
"""

import math

import matplotlib.pyplot as plt

import headway as hw
from headway.core.counting import Size

heads, width, length = 2, 8, 4
floor = Size(width, width, length).floor(heads)
ratios = [0.3, 0.6, 3.0, 6.0]
success = []
for ratio in ratios:
    # Fifteen in a hundred are kept for choosing and judging, so that much more is drawn.
    count = math.ceil(ratio * floor / 0.85)
    right = 0
    for seed in range(3):
        truth = hw.AttentionLayer.random(heads=heads, width=width, seed=seed)
        fit = hw.learn(hw.draw(truth, count=count, length=length, seed=50 + seed))
        good = fit.layer.heads == heads and hw.match(fit.layer, truth).worst < 1e-8
        assert good or fit.status.kind != "recovered", "never a wrong answer with a good face"
        right += good
    success.append(right / 3)
print(dict(zip(ratios, success, strict=True)))
assert success[0] == 0
assert success[-1] == 1

figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
axis.plot(ratios, success, "o-")
axis.axvline(1, color="0.5", linestyle="--", linewidth=1)
axis.set_xlabel("sequences over the counting floor")
axis.set_ylabel("part recovered")
plt.show()
