"""What no data can determine: counted by formula and by the kernel of a Jacobian; the canonical form uses it up."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import headway as hw
from headway.core import attention
from headway.core.factored import free_dimensions
from headway.core.forms import Form, heads_out, in_sight
from headway.core.freedom import balanced, freedom

EXACT = {"rtol": 1e-10, "atol": 1e-10}
LENGTH = 7


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def forms(m, d, q):
    """Every row of the table of forms, and parts that meddle with each other; norms without eps."""
    turned, normed = hw.Rotary(), hw.Normed(normal(q), normal(q, seed=1), 0.0)
    sink, gate, table = hw.Sink(normal(m)), hw.Gated(normal(m, d + 1, q)), hw.OffsetTable(normal(m, 7))
    t5 = hw.OffsetTable(normal(m, 8), "t5", far=6)
    return {
        "plain": Form(),
        "causal window": Form(sight=hw.Sight(causal=True, window=3)),
        "rotary, halves": Form(rotary=turned),
        "rotary, pairs": Form(rotary=hw.Rotary(layout="pairs")),
        "rotary, partial": Form(rotary=hw.Rotary(turned=2)),
        "rotary, one frequency twice": Form(rotary=hw.Rotary(frequencies=[0.5, -0.5])),
        "rotary, one frequency 0": Form(rotary=hw.Rotary(frequencies=[0.5, 0.0])),
        "clipped table": Form(offsets=table),
        "T5's table": Form(offsets=t5),
        "T5's table, causal": Form(offsets=t5, sight=hw.Sight(causal=True)),
        "slope": Form(offsets=hw.Slope(normal(m))),
        "cap": Form(cap=hw.Cap(3.0)),
        "sink": Form(sink=sink),
        "normed": Form(normed=normed),
        "normed, rotary": Form(normed=normed, rotary=turned),
        "normed, partial": Form(normed=normed, rotary=hw.Rotary(turned=2)),
        "gated": Form(gate=gate),
        "gated, sink": Form(gate=gate, sink=sink),
        "table, sink": Form(offsets=table, sink=sink),
        "table, cap": Form(offsets=table, cap=hw.Cap(3.0)),
        "table, cap, sink": Form(offsets=table, cap=hw.Cap(3.0), sink=sink),
        "partial, sink": Form(rotary=hw.Rotary(layout="pairs", turned=2), sink=sink),
        "everything": Form(rotary=hw.Rotary(turned=2), offsets=table, cap=hw.Cap(3.0), normed=normed, gate=gate,
                           sink=sink),
    }


NAMES = list(forms(1, 2, 4))


def kernel(layer, keys=None):
    """Dimension of the kernel of dF/d(tensors), columns on one scale, and the gap it is told by."""
    X = normal(50, LENGTH, layer.width, seed=5)
    Z = normal(50, keys, layer.key_width, seed=6) if layer.cross else None
    see = in_sight(layer.form.sight, X, Z)

    def outputs(t):
        return attention.project(heads_out(X, Z, t, layer.form, see), t["out"], t.get("offset")).flatten()

    blocks = torch.func.jacfwd(outputs)(layer.tensors())
    J = torch.cat([block.reshape(len(block), -1) for block in blocks.values()], dim=1)
    size = J.norm(dim=0)
    J = torch.where(size > 1e-10 * size.max(), J / size, 0.0)
    s = torch.linalg.eigvalsh(J.T @ J).clamp_min(0).sqrt().flip(0)
    rank = int((s > 1e-6 * s[0]).sum())
    assert float(s[rank - 1] / s[0]) > 1e-3, "the rest is no kernel, only small"
    return J.shape[1] - rank


@pytest.mark.parametrize(("m", "groups", "d"), [(1, 1, 7), (2, 1, 5), (2, 2, 3)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_free_dimensions_are_those_of_the_kernel(name, m, groups, d):
    layer = hw.FactoredLayer.random(m, d, size=4, groups=groups, form=forms(m, d, 4)[name], out_width=2)
    if groups == 1 and m == 2:
        layer = replace(layer, offset=None)
    assert free_dimensions(layer, LENGTH) == kernel(layer)


def test_free_dimensions_across_two_sequences():
    for name in ("plain", "rotary, halves", "sink"):
        layer = hw.FactoredLayer.random(2, 4, size=2, cross=True, key_width=3, form=forms(2, 4, 2)[name])
        assert free_dimensions(layer) == kernel(layer, keys=5), name


@pytest.mark.parametrize(("name", "scores"), [
    ("plain", 4**2 + 4),  # GL(4), and the key bias is invisible
    ("rotary, halves", 4),  # a complex scale for each of two planes; the key bias is visible
    ("clipped table", 4**2 + 4), ("slope", 4**2 + 4), ("causal window", 4**2 + 4),
    ("cap", 4**2), ("sink", 4**2),  # the key bias is visible
    ("normed, rotary", 4 // 2 + 2),  # a gain for each plane, the scales of queries and of keys
    ("gated", 4**2 + 4)])
def test_the_table_of_forms(name, scores):
    """Free dimensions of one head's scores at d = 7, q = 4, as the documentation lists them."""
    layer = hw.FactoredLayer.random(1, 7, size=4, form=forms(1, 7, 4)[name])
    assert freedom(layer.tensors(), layer.form)["scores"] == scores


def test_one_constant_a_head_is_free_in_a_table_and_a_value_channel_in_a_gate():
    made = forms(3, 7, 4)
    table, gate = (hw.FactoredLayer.random(3, 7, size=4, form=made[name]) for name in ("clipped table", "gated"))
    assert freedom(table.tensors(), table.form)["offsets"] == 3
    assert freedom(gate.tensors(), gate.form)["values"] == 3 * 4
    assert freedom(gate.tensors(), Form())["values"] == 3 * (4**2 + 4)


def test_groups_share_their_freedom():
    one, three = (hw.FactoredLayer.random(3, 7, size=4, groups=g) for g in (1, 3))
    assert freedom(three.tensors(), Form())["scores"] == 3 * freedom(one.tensors(), Form())["scores"]


def test_an_eps_fixes_the_scale_of_normed_factors_as_firmly_as_it_is_large():
    layer = hw.FactoredLayer.random(1, 7, size=4, form=forms(1, 7, 4)["normed, rotary"])
    firm = replace(layer, form=replace(layer.form, normed=replace(layer.form.normed, eps=0.1)))
    assert free_dimensions(layer) == free_dimensions(firm) + 2
    assert free_dimensions(firm) == kernel(firm)


# The canonical form


def other_factors(layer, seed=0):
    """The same function in other factors, by a random choice of everything that is free."""
    t, form = dict(layer.tensors()), layer.form
    (m, _, q), (g, _, p) = layer.query.shape, layer.value.shape
    h = m // g
    draw = torch.Generator().manual_seed(seed)

    def some(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    mix = torch.eye(q, dtype=torch.float64).repeat(g, 1, 1)
    plain = list(range(q))
    if form.rotary is not None:
        one, two, rest = form.rotary.planes(torch.arange(q))
        plain = rest.tolist()
        for j in range(g):
            for a, b in zip(one.tolist(), two.tolist(), strict=True):
                x, y = some(2).tolist()
                mix[j, [[a], [b]], [a, b]] = torch.tensor([[x, -y], [y, x]], dtype=torch.float64)
    for j in range(g):
        at = torch.tensor(plain, dtype=torch.long)
        mix[j, at.unsqueeze(1), at] = some(len(plain), len(plain))
    if form.normed is None:
        t["query"] = t["query"] @ mix.repeat_interleave(h, 0)
        t["key"] = t["key"] @ torch.linalg.inv(mix).mT
        if form.cap is None and form.sink is None:
            hidden = torch.zeros(g, 1, q, dtype=torch.float64)
            hidden[..., plain] = some(g, 1, len(plain))
            t["key"] = torch.cat([t["key"][:, :-1], t["key"][:, -1:] + hidden], dim=1)
    else:
        t["query"], t["key"] = t["query"] * some(m, 1, 1).abs(), t["key"] * some(g, 1, 1).abs()
        trade, flip = some(q).abs(), some(2, q).sign()
        if form.rotary is not None:
            trade[two] = trade[one]
        t["query"], t["key"] = t["query"] * flip[0], t["key"] * flip[1]
        t["norm_query"], t["norm_key"] = t["norm_query"] * trade * flip[0], t["norm_key"] / trade * flip[1]
    if form.gate is None:
        values = some(g, p, p)
        t["value"], t["out"] = t["value"] @ values, torch.linalg.inv(values).repeat_interleave(h, 0) @ t["out"]
    else:
        scale, order = some(g, 1, p), torch.randperm(p, generator=draw)
        t["value"] = (t["value"] * scale)[..., order]
        t["out"] = (t["out"] / scale.mT.repeat_interleave(h, 0))[:, order]
        t["gate"] = t["gate"][..., order]
    if form.gate is None and form.sink is None:
        bias = some(g, 1, p)
        t["value"] = torch.cat([t["value"][:, :-1], t["value"][:, -1:] + bias], dim=1)
        t["offset"] = t["offset"] - (bias.repeat_interleave(h, 0) @ t["out"]).sum((0, 1))
    if "offsets" in t and form.cap is None:
        constant = some(m, 1)
        t["offsets"] = t["offsets"] + constant
        if "sink" in t:
            t["sink"] = t["sink"] + constant.squeeze(1)
    groups = torch.randperm(g, generator=draw)
    heads = (groups.unsqueeze(1) * h + torch.randperm(h, generator=draw)).flatten()
    for name in t:
        if name in ("query", "out", "sink", "slope", "offsets", "gate"):
            t[name] = t[name][heads]
        elif name in ("key", "value"):
            t[name] = t[name][groups]
    return layer.with_tensors(t)


@pytest.mark.parametrize("name", [name for name in NAMES if "one frequency" not in name])
def test_all_factors_of_a_function_have_one_canonical_form(name):
    layer = hw.FactoredLayer.random(4, 5, size=4, groups=2, form=forms(4, 5, 4)[name], out_width=3, seed=3)
    X = normal(3, 5, 5, seed=4)
    fixed = layer.canonical()
    assert_close(fixed(X), layer(X), **EXACT)
    assert_close(fixed.canonical()(X), layer(X), **EXACT)
    for seed in (0, 1):
        other = other_factors(layer, seed)
        assert_close(other(X), layer(X), rtol=1e-9, atol=1e-9)
        assert float((other.query - layer.query).norm()) > 0.1
        for key, value in other.canonical().tensors().items():
            assert_close(value, fixed.tensors()[key], rtol=1e-8, atol=1e-8, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", [name for name in NAMES if "one frequency" in name])
def test_planes_of_one_frequency_are_mixed_like_one_block(name):
    layer = hw.FactoredLayer.random(2, 5, size=4, form=forms(2, 5, 4)[name], seed=3)
    X = normal(3, 5, 5, seed=4)
    assert_close(layer.canonical()(X), layer(X), **EXACT)


def test_an_eps_keeps_the_scale_where_it_is():
    form = replace(forms(2, 5, 4)["normed"], normed=hw.Normed(normal(4), normal(4, seed=1), 0.5))
    layer, X = hw.FactoredLayer.random(2, 5, size=4, form=form), normal(3, 5, 5)
    assert_close(layer.canonical()(X), layer(X), **EXACT)


def test_a_missing_offset_appears_where_a_value_bias_moves_there():
    layer, X = replace(hw.FactoredLayer.random(2, 5), offset=None), normal(3, 5, 5)
    fixed = layer.canonical()
    assert_close(fixed(X), layer(X), **EXACT)
    assert fixed.offset is not None and not bool(fixed.value[:, -1].any())
    bare = hw.FactoredLayer.random(2, 5, biases=False)
    assert bare.canonical().offset is None


def test_loudest_head_first():
    layer = hw.FactoredLayer.random(4, 6, groups=2)
    loud = replace(layer, out=layer.out * torch.tensor([1.0, 3.0, 9.0, 27.0], dtype=torch.float64).view(4, 1, 1))
    fixed = loud.canonical()
    W = (fixed.value.repeat_interleave(2, 0) @ fixed.out)[:, :-1].flatten(1).norm(dim=1)
    theirs = (loud.value.repeat_interleave(2, 0) @ loud.out)[:, :-1].flatten(1).norm(dim=1)
    assert_close(W, theirs[[3, 2, 1, 0]], **EXACT)


def test_balanced_factors_of_thin_products():
    for rows, columns, c in ((6, 5, 3), (2, 5, 4), (3, 2, 5)):
        A, B = normal(2, rows, c), normal(2, columns, c, seed=1)
        a, b = balanced(A, B)
        assert a.shape == A.shape and b.shape == B.shape
        assert_close(a @ b.mT, A @ B.mT, **EXACT)
        assert_close(a.mT @ a, b.mT @ b, **EXACT)
    A, B = torch.complex(A, normal(2, 3, 5, seed=2)), torch.complex(B, normal(2, 2, 5, seed=3))
    a, b = balanced(A, B)
    assert_close(a @ b.mT, A @ B.mT, **EXACT)
    top = b.gather(1, b.abs().argmax(1, keepdim=True))[..., :2]
    assert_close(top, top.abs().to(top.dtype), **EXACT)
