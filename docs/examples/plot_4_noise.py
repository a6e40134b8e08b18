"""
Noise is told from structure
============================

With noisy labels the residual stops falling. Is what is left noise, or a missing head? The learner compares
the residual's relation to the inputs with that of residuals whose signs are drawn at random. The error of the
heads falls as one over the root of the number of examples, as it must.
"""

import matplotlib.pyplot as plt
import numpy as np

import headway as hw

truth = hw.AttentionLayer.random(heads=2, width=8, seed=0)
counts = [250, 1000, 4000, 16000]
errors = []
for n in counts:
    fit = hw.learn(hw.draw(truth, count=n, length=6, noise=0.01, seed=1))
    assert fit.status.kind == "noise", fit.status
    assert fit.layer.heads == 2
    errors.append(hw.match(fit.layer, truth).worst)
print(fit.status)

slope = np.polyfit(np.log(counts), np.log(errors), 1)[0]
print("slope", slope)
assert -0.65 < slope < -0.35

# %%
# One head too few leaves structure, and is not called noise.

short = hw.learn(hw.draw(truth, count=1000, length=6, noise=0.01, seed=1), heads=1)
print(short.status)
assert short.status.kind == "not_realisable"

figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
axis.loglog(counts, errors, "o-", label="worst head error")
axis.loglog(counts, errors[0] * np.sqrt(counts[0] / np.array(counts)), "--", color="0.5", label="one over the root")
axis.set_xlabel("sequences")
axis.legend(frameon=False)
plt.show()
