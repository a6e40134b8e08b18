"""
A PyTorch module as a black box
===============================

``nn.MultiheadAttention`` is shown random inputs and nothing else. What is learned is built into a module
again, and the two agree.
"""

import matplotlib.pyplot as plt
import torch

import headway as hw

torch.manual_seed(0)
module = torch.nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
torch.nn.init.normal_(module.in_proj_bias, std=0.3)
torch.nn.init.normal_(module.out_proj.bias, std=0.3)

fit = hw.learn(hw.ask(module))
print(fit.status)
assert fit.layer.heads == 4

# %%
# Heads of a module have rank d/m, and biases; both show.

again = hw.to_torch(fit.layer, head_dim=8)
X = torch.randn(200, 10, 32, dtype=torch.float64)
with torch.no_grad():
    difference = float((again(X, X, X)[0] - module(X, X, X)[0]).abs().max())
print("largest difference of outputs", difference)
assert difference < 1e-10

# %%
# Singular values of the learned attention matrices: eight, then nothing.

figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
for j, Theta in enumerate(fit.layer.Theta):
    s = torch.linalg.svdvals(Theta)
    assert int((s > 1e-9 * s[0]).sum()) == 8
    axis.semilogy(range(1, 33), s.clamp_min(1e-18), "o", markersize=3, label=f"head {j + 1}")
axis.set_xlabel("number")
axis.set_ylabel("singular value of Θ")
axis.legend(frameon=False)
plt.show()
