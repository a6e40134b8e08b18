"""What is shown of each head: two matrices that its answers determine, whatever factors compute them.

A plain head shows Θ_i and W_i. Head i of a layer in factors has the scores [x_a; 1]ᵀ M_i(b − a) [z_b; 1] and
answers with V_jO_i, rows [z_b; 1]. Shown are QK = M_i(0), the scores that query and key have at one place, and OV =
V_jO_i. Where keys and queries are turned, M_i(Δ) = Σ_ω Re(e^{iωΔ} Q_ω): one complex matrix Q_ω for every
frequency; their sizes say how far from another a head tells offsets apart.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core import gauge
from headway.core.factored import FactoredLayer
from headway.core.forms import Form
from headway.core.layer import AttentionLayer
from headway.core.positions import OffsetTable, Slope

PLAIN, FORMED = ("Θ", "W"), ("QK", "OV")
WORDS = {"Θ": "Attention matrix Θ", "W": "Projection W", "QK": "Scores QK", "OV": "Outputs OV"}
Layer = AttentionLayer | FactoredLayer


@dataclass(frozen=True, eq=False)
class Portraits:
    """The heads of one layer, float64 on the CPU. matrices: name to (m, rows, columns). numbers: name to (m,)."""

    matrices: dict[str, Tensor]
    numbers: dict[str, Tensor]
    turning: dict[float, Tensor]  # turned planes: tokens for one turn, and (m,) the size of scores that turn so
    offsets: tuple[tuple[str, ...], Tensor] | None  # what is added to scores: names of the offsets, (m, offsets)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.matrices)


def portraits(layer: Layer, as_factors: bool = False) -> Portraits:
    """``as_factors``: QK and OV of a plain layer too, to set it beside one in factors."""
    if isinstance(layer, AttentionLayer) and not as_factors:
        numbers = {} if layer.key_bias is None else {"‖u‖": layer.key_bias.double().cpu().norm(dim=1)}
        return Portraits({"Θ": layer.Theta.detach().double().cpu(), "W": layer.W.detach().double().cpu()}, numbers,
                         {}, None)
    heads = gauge.heads_of(layer)
    form = heads.form
    pairs = {name: pair for name, pair in heads.scores.items() if name not in gauge.NORMS}
    scores = torch.stack([(L @ R.mT).real for L, R in pairs.values()]).sum(0)
    V, out = heads.values
    numbers = {"slope": form.offsets.values} if isinstance(form.offsets, Slope) else {}
    numbers |= {} if form.sink is None else {"sink": heads.constant}
    return Portraits({"QK": scores, "OV": V @ out.mT}, numbers, _turning(pairs), _offsets(form))


def _turning(pairs: dict[Hashable, gauge.Pair]) -> dict[float, Tensor]:
    """By tokens, few first; what is not turned takes infinitely many. Positions of several numbers have none."""
    found: dict[float, Tensor] = {}
    for name, (L, R) in pairs.items():
        if isinstance(name, tuple) and len(name) > 1:
            return {}
        tokens = 2 * math.pi / abs(name[0]) if isinstance(name, tuple) else math.inf
        found[tokens] = (L @ R.mT).abs().square().sum((1, 2)).sqrt()
    return dict(sorted(found.items())) if len(found) > 1 or math.inf not in found else {}


def _offsets(form: Form) -> tuple[tuple[str, ...], Tensor] | None:
    """β_i by bucket, of the buckets in sight, the smallest offset first."""
    table, sight = form.offsets, form.sight
    if not isinstance(table, OffsetTable):
        return None
    far = int(table.far or 0)
    back = far + 1 if sight.window is None else min(far + 1, sight.window - 1)
    ahead = 0 if not table.both or (sight.causal and not sight.prefix) else far + 1
    ahead = ahead if sight.window is None or sight.causal else min(ahead, sight.window - 1)
    delta = torch.arange(-back, ahead + 1)
    bucket = table.bucket(delta).tolist()
    reached: dict[int, list[int]] = {}
    for at, offset in zip(bucket, delta.tolist(), strict=True):
        reached.setdefault(at, []).append(offset)
    values = table.values.double().cpu()[:, list(reached)]
    return tuple(_span(offsets, -far - 1, far + 1) for offsets in reached.values()), values


def _span(offsets: Sequence[int], least: int, most: int) -> str:
    low, high = min(offsets), max(offsets)
    if low == least:
        return f"≤ {high}"
    if high == most:
        return f"≥ {low}"
    return str(low) if low == high else f"{low} … {high}"


def told(layer: FactoredLayer) -> list[str]:
    """Sentences about the form: what the scores are, who shares keys, what QK and OV leave out."""
    form, said = layer.form, [f"Scores: {layer.form.describe()}."]
    if layer.cross:
        said.append("Keys and values come from another sequence.")
    if layer.groups < layer.heads:
        each = layer.heads // layer.groups
        said.append("All heads share their keys and values." if layer.groups == 1 else
                    f"Heads share their keys and values in {layer.groups} groups of {each}, in order.")
    where = " of a query and a key at one place, where turns cancel" if form.rotary is not None else ""
    qk = f"QK is the matrix of scores{where}: rows are features of the query, columns of the key"
    said.append(f"{qk}, the last of each is the constant 1 of the biases. OV is what a key at full attention adds "
                "to the output. Both are the same for all factors that compute this layer.")
    if form.normed is not None:
        said.append("Queries and keys are normed, so QK is shown for factors of one size, gains included.")
    if form.gate is not None:
        said.append("OV is shown with every gate open.")
    if form.sink is not None:
        said.append("A sink takes part of every query's attention: rows of patterns add up to less than 1.")
        turned = 0 if form.rotary is None else form.rotary.coordinates(layer.size)
        if form.cap is None and form.normed is None and turned < layer.size:
            said.append("What scores have in common for all queries and keys is counted with the sink: the last "
                        "cell of QK is 0, and its rank may be one more than the size of a head.")
    return said
