"""
The body closes in
==================

The first paper's algorithm cuts a convex body out of the space of attention matrices: every row that one
pattern explains gives constraints that all heads meet. Round by round the body becomes thin across the affine
hull of the heads and stays long along it.
"""

import matplotlib.pyplot as plt

import headway as hw
from headway.runs.traces import rounds

truth = hw.AttentionLayer.random(heads=2, width=10, scale=2.0, seed=0)
data = hw.draw(truth, count=60_000, length=2, seed=1)
fit = hw.learn(data, heads=2, method=hw.Sculpt(truth=truth))
print(fit.status)
assert hw.match(fit.layer, truth).worst < 1e-9

found = rounds(fit.trace)
across = [one.half_widths[one.kept] for one in found]
assert across[-1] < across[0] / 2, "thin across the hull"

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for one in found:
    axes[0].semilogy(range(1, len(one.half_widths) + 1), one.half_widths, "o-", label=one.name)
axes[0].axvline(found[0].kept + 0.5, color="0.5", linestyle="--", linewidth=1)
axes[0].set_xlabel("direction, longest first")
axes[0].set_ylabel("half-width of the body")
axes[0].legend(frameon=False)
axes[1].semilogy([one.numbers["sum_error"] for one in found], "o-", label="error of ΣW")
axes[1].semilogy([one.numbers["hull_angle"] for one in found], "s-", label="angle to the hull")
axes[1].set_xlabel("round")
axes[1].legend(frameon=False)
plt.show()
