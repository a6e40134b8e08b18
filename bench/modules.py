"""nn.MultiheadAttention(64, 8) with random weights, learned as a black box and built again: five seeds."""

from __future__ import annotations

import torch
from torch import nn

import headway as hw
from common import record, timed

SEEDS = range(5)


def main() -> None:
    rows = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        module = nn.MultiheadAttention(64, 8, batch_first=True, dtype=torch.float64).eval()
        with torch.no_grad():  # biases start at zero in torch; a trained module has some
            module.in_proj_bias.normal_(0, 0.1)
            module.out_proj.bias.normal_(0, 0.1)
        fit, seconds = timed(lambda module=module, seed=seed: hw.learn(
            hw.ask(module, length=16, seed=seed), seed=seed))
        again = hw.to_torch(fit.layer, head_dim=8)
        X = torch.randn(100, 20, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            off = (again(X, X, X, need_weights=False)[0] - module(X, X, X, need_weights=False)[0]).abs().max()
        rows.append({"seed": seed, "sequences asked": fit.stats["examples"], "heads": fit.layer.heads,
                     "rank": fit.stats["rank"], "largest difference of outputs": float(off),
                     "seconds, learn": round(seconds, 2)})
        print(rows[-1], flush=True)
    record("modules", "python bench/modules.py", {
        "seeds": len(rows), "largest difference of outputs": max(r["largest difference of outputs"] for r in rows),
        "slowest, s": max(r["seconds, learn"] for r in rows)}, rows)


if __name__ == "__main__":
    main()
