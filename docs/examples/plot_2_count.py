"""
How many heads? The gap tells
=============================

Second moments of inputs and outputs give an operator whose leading singular vectors nearly span the attention
matrices. As many singular values stand out from the sampling floor as there are heads.
"""

import matplotlib.pyplot as plt

import headway as hw
from headway.report.figures import plot_spectrum
from headway.runs.traces import spectrum

figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained", sharey=True)
for axis, heads in zip(axes, (1, 3, 6), strict=True):
    layer = hw.AttentionLayer.random(heads=heads, width=24, seed=heads)
    fit = hw.learn(hw.draw(layer, count=4000, length=12, seed=1))
    plot_spectrum(fit, axis).set_title(f"{heads} heads")
    assert fit.layer.heads == heads
    assert spectrum(fit.trace).heads == heads, "the first guess was right"
plt.show()
