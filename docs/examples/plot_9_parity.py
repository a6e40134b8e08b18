"""
What statistics cannot see
==========================

A layer can hide a parity: the product of four bits decides its output, and no product of fewer shows any
relation to it. This is why an exponential dependence on the number of heads cannot be avoided in the worst
case.
"""

import matplotlib.pyplot as plt

import headway as hw
from headway.hardness import low_degree, parity

secret = parity(size=2, width=9, seed=1)
data = hw.draw(secret.layer, count=6000, length=2, seed=2)
label = secret.signed(data.X.double(), data.Y[:, 0, 0])
seen = [low_degree(data.X, label, degree, skip=secret.known) for degree in (1, 2, 3, 4)]
for one in seen:
    print(one)
assert not any(one.anything for one in seen[:3])
assert seen[3].largest > 3 * seen[3].chance

# %%
# The certificate names the reason: the theorem's conditions exclude such layers.

claim = hw.certify(secret.layer, hw.draw(secret.layer, count=400, length=2, seed=3))["non-degeneracy"]
print(claim)
assert claim.holds == "no"

figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
axis.bar([1, 2, 3, 4], [one.largest for one in seen], label="largest correlation")
axis.plot([1, 2, 3, 4], [one.chance for one in seen], "k_", markersize=30, label="by chance")
axis.set_xticks([1, 2, 3, 4])
axis.set_xlabel("degree")
axis.legend(frameon=False)
plt.show()
