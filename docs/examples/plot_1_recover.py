"""
A hidden layer, recovered
=========================

Four heads of width 32 are hidden. From 4,000 random sequences and what the layer made of them, every entry of
every matrix comes back to the last digit, and nobody says how many heads there are.
"""

import matplotlib.pyplot as plt

import headway as hw
from headway.report.figures import plot_heads, plot_residual

truth = hw.AttentionLayer.random(heads=4, width=32, scale=2.0, seed=0)
data = hw.draw(truth, count=4000, length=16, seed=1)
fit = hw.learn(data)
print(fit.status)

# %%
# The heads come in an order of their own; ``match`` undoes it.

match = hw.match(fit.layer, truth)
print("order", match.order, "worst error", match.worst)
assert fit.layer.heads == 4
assert match.worst < 1e-13

# %%
# One head beside the true one, and how the residual fell.

known = hw.Fit(truth, fit.status, fit.stats, fit.trace)
figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
plot_heads(fit, match.order[0], ax=axes[0]).set_title("Θ of head 1, learned")
plot_heads(known, 0, ax=axes[1]).set_title("Θ of head 1, true")
plot_residual(fit, ax=axes[2])
plt.show()
