"""
Loss against its bound
======================

The second paper bounds the training loss of gradient descent before it starts. With 10¹⁴ equal heads its
hypotheses hold at a practical step, and the bound, though valid, says less than guessing would: it lies in
the shaded, vacuous region. A bound computed afterwards from measured quantities is within a small factor of
the loss.
"""

import matplotlib.pyplot as plt

from headway.report.figures import plot_training
from headway.training import mixture, train

law = {"tokens": 4, "width": 6, "zeta": 0.5, "strength": 1.0, "noise": 0.1}
done = train(mixture(100, **law), heads=10**14, step=0.1, steps=300)
print(done.sentence)

loss = done.path.columns["loss"]
before = next(bound for bound in done.bounds if bound.form == "safe" and bound.ground == "a priori")
assert before.holds
assert before.training >= loss[-1]
assert before.vacuous("training")
after = done.certificate
assert after.descent_held
assert loss[-1] <= after.bound < 20 * loss[-1]

plot_training([("H = 1e14", done.asdict())])
plt.show()
