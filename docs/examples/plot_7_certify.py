"""
A certificate finds a planted error
===================================

A certificate is computed from examples the learner has not seen. It says yes to a layer that is right, and a
single entry that is off by a thousandth does not pass.
"""

import matplotlib.pyplot as plt

import headway as hw

truth = hw.AttentionLayer.random(heads=2, width=8, seed=0)
fit = hw.learn(hw.draw(truth, count=600, length=6, seed=1))
fresh = hw.draw(truth, count=1000, length=6, seed=2)

good = hw.certify(fit.layer, fresh)
print(good)
assert good["held-out quantile"].holds == "yes"
assert good["distance to the truth"].holds == "yes"

# %%
# The same layer with one entry changed.

spoiled = hw.AttentionLayer(fit.layer.Theta.clone(), fit.layer.W)
spoiled.Theta[1, 3, 4] += 1e-3
bad = hw.certify(spoiled, fresh)
print(bad["held-out quantile"])
assert bad["held-out quantile"].holds == "no"
assert bad["distance to the truth"].holds != "yes"

# %%
# The radius within which the true layer must lie, against how far the entry is off.

sizes, answers = [1e-9, 1e-7, 1e-5, 1e-3], []
for size in sizes:
    layer = hw.AttentionLayer(fit.layer.Theta.clone(), fit.layer.W)
    layer.Theta[1, 3, 4] += size
    answers.append(hw.certify(layer, fresh)["held-out quantile"].holds)
print(dict(zip(sizes, answers, strict=True)))
assert answers[0] == "yes" and answers[-1] == "no"

figure, axis = plt.subplots(figsize=(5, 2.4), layout="constrained")
axis.semilogx(sizes, [answer == "yes" for answer in answers], "o-")
axis.set_yticks([0, 1], ["no", "yes"])
axis.set_xlabel("error planted in one entry")
axis.set_ylabel("passes at 1e-6")
plt.show()
