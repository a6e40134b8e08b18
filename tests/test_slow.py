"""Planes that hardly turn: steps along what data hardly tell, its curvature, one matrix a head in their place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headway as hw
from headway.core.tangents import Chain
from headway.learning.formed import Formed, FormedModel, chain_of
from headway.learning.formed_refine import FormCuts, FormedLadder, loosened, refine_form, tightened
from headway.learning.formed_slow import Slow, along, slow_columns, squares
from headway.learning.formed_source import FormSource, placed
from headway.learning.formed_start import template
from headway.learning.formed_steps import slowest

D, Q, M, K = 10, 8, 2, 7
ROTARY = {"half": hw.Rotary(base=1000.0), "pairs": hw.Rotary(base=1000.0, layout="pairs"),
          "partial": hw.Rotary(base=100.0, turned=6)}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def at_truth(
    rotary: hw.Rotary, count: int = 60, width: int = D, size: int = Q, length: int = K
) -> tuple[FormSource, Formed]:
    """Examples of a rotary layer and its own factors in working coordinates."""
    form = hw.Form(rotary=rotary, sight=hw.Sight(causal=True))
    truth = hw.FactoredLayer.random(M, width, size=size, form=form, seed=1)
    source = FormSource(hw.draw(truth, count=count, length=length, law="gaussian", seed=2), form)
    source = source.of_form(template(form, M, width, size, size))
    tensors = source.entered(truth.tensors())
    return source, Formed.of({name: value for name, value in tensors.items() if name not in ("out", "offset")},
                             source.form)


def model_of(source: FormSource) -> FormedModel:
    return FormedModel(source.problem(source.fit, M, torch.float64))


def mixed(shape: Formed, seed: int) -> Formed:
    """Slow columns of queries and keys in another basis, of which the second head's has det < 0."""
    rotary = shape.form.rotary
    assert rotary is not None
    at = torch.arange(K, dtype=torch.float64)
    columns = slow_columns(shape.form, shape.q, at, at)
    A, B = shape.tensors["query"].clone(), shape.tensors["key"].clone()
    for i in range(M):
        T = normal(len(columns), len(columns), seed=seed + i)
        T[0] *= torch.linalg.det(T).sign() * (1 - 2 * i)
        A[i][:, columns] = A[i][:, columns] @ T
        B[i][:, columns] = torch.linalg.solve(T, B[i][:, columns].mT).mT
    return Formed.of({**shape.tensors, "query": A, "key": B}, shape.form)


def test_a_step_along_the_curve_is_the_exponential_and_to_first_order_the_sum():
    A, B, E = normal(M, D, Q, seed=1), normal(M, D, Q, seed=2), 0.3 * normal(M, Q, Q, seed=3) / Q
    new_A, new_B = along(A, B, A @ E, -B @ E.mT)
    # what is added so that small roots have inverses is 1e-6 of their mean
    assert float((new_A @ new_B.mT - A @ B.mT).norm()) < 1e-5 * float((A @ B.mT).norm())
    assert float((new_A - A @ torch.matrix_exp(E)).norm()) < 1e-5 * float(A.norm())
    dA, dB = 1e-5 * normal(M, D, Q, seed=4), 1e-5 * normal(M, D, Q, seed=5)
    new_A, new_B = along(A, B, dA, dB)
    assert float((new_A - A - dA).norm()) < 1e-3 * float(dA.norm())
    assert float((new_B - B - dB).norm()) < 1e-3 * float(dB.norm())


def test_the_longest_step_stays_finite():
    A, B = normal(M, D, Q, seed=1), normal(M, D, Q, seed=2)
    new_A, new_B = along(A, B, 1e6 * A, -1e6 * B)
    assert bool(new_A.isfinite().all()) and bool(new_B.isfinite().all())


def test_slow_columns_are_those_that_turn_little_and_those_that_do_not():
    at = torch.arange(10, dtype=torch.float64)
    form = hw.Form(rotary=hw.Rotary(base=100.0))  # 1, 0.316, 0.1, 0.03 radians a place
    assert slow_columns(form, 8, at, at).tolist() == [1, 2, 3, 5, 6, 7]
    assert slow_columns(hw.Form(rotary=hw.Rotary(base=100.0, turned=4)), 8, at, at).tolist() == [1, 3, 4, 5, 6, 7]
    assert slow_columns(hw.Form(), 8, at, at).tolist() == []
    assert slowest(hw.Rotary(base=100.0), 8, 6).tolist() == [1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize("rotary", ROTARY.values(), ids=ROTARY)
def test_the_curvature_of_what_is_hardly_determined_is_that_of_the_derivative(rotary):
    source, shape = at_truth(rotary, 30)
    model = model_of(source)
    op = model.products(model.evaluate(shape), shape, torch.float64)
    rows, (chain, _) = model.problem.chunks[0], op.kept[0]
    columns = slow_columns(shape.form, Q, chain.here, chain.there)
    s, n = len(columns), 5
    sides = {name: (torch.eye(D + 1).double().expand(M, -1, -1), torch.eye(Q).double().expand(M, -1, -1))
             for name in ("query", "key")}
    zero = torch.zeros(M, s * s + s, s * s + s, dtype=torch.float64)
    slow = Slow.of(columns, shape.tensors["query"], shape.tensors["key"], sides, zero)
    found = torch.zeros_like(zero)
    for j in range(chain.V.shape[3]):
        worth = torch.zeros_like(chain.V)
        worth[..., j] = 1.0
        found += squares(chain, worth, columns, n)
    for i in range(M):
        J = []
        for c in range(s * s + s):
            x = torch.zeros(M, s * s + s, dtype=torch.float64)
            x[i, c] = 1.0
            A, B = slow.out(x)
            d = {**{name: torch.zeros_like(t) for name, t in shape.tensors.items()}, "query": A, "key": B}
            J.append(op._push(rows, chain, d)[:n, i].flatten())
        J = torch.stack(J)
        assert float((found[i] - J @ J.T).norm()) < 1e-12 * float(found[i].norm())


def test_costs_and_solves_within_it_are_those_of_matrices():
    _, shape = at_truth(ROTARY["partial"], 30)
    at = torch.arange(K, dtype=torch.float64)
    columns = slow_columns(shape.form, Q, at, at)
    s = len(columns)
    n = s * s + s

    def definite(*size: int, seed: int) -> Tensor:
        x = normal(*size, seed=seed)
        return x @ x.mT + torch.eye(size[-1], dtype=torch.float64)

    sides = {"query": (definite(D + 1, D + 1, seed=1), definite(M, Q, Q, seed=2)),
             "key": (definite(M, D + 1, D + 1, seed=3), definite(M, Q, Q, seed=4))}
    C = definite(M, n, n, seed=5)
    slow = Slow.of(columns, shape.tensors["query"], shape.tensors["key"], sides, C)
    unit = torch.eye(n, dtype=torch.float64)
    Z = torch.stack([torch.cat([part.flatten(1) for part in slow.out(unit[j].expand(M, -1))], 1)
                     for j in range(n)], 2)
    X = torch.stack([torch.block_diag(*(torch.kron(a if a.ndim == 2 else a[i], b[i]) for a, b in (
        sides["query"], sides["key"]))) for i in range(M)])
    assert float((slow.cost(sides) - Z.mT @ X @ Z).norm()) < 1e-12 * float(X.norm()) * float(Z.norm()) ** 2
    g = normal(M, n, seed=6)
    exact = torch.linalg.solve(Z.mT @ X @ Z, g.unsqueeze(2)).squeeze(2)
    assert float((slow.solved(g) - exact).norm()) < 1e-4 * float(exact.norm())
    # D⁻¹ on what is orthogonal to Z, (C + ZᵀXZ)⁻¹ on Z
    inverse = torch.linalg.inv(X)
    solve = slow.around(lambda v: (inverse @ v.unsqueeze(2)).squeeze(2), sides, _Two(D + 1, Q))
    off = torch.eye(X.shape[1]).double() - Z @ torch.linalg.solve(Z.mT @ X @ Z, Z.mT @ X)
    wanted = off @ inverse @ off.mT + Z @ torch.linalg.solve(C + Z.mT @ X @ Z, Z.mT)
    v = normal(M, X.shape[1], seed=7)
    assert float((solve(v) - (wanted @ v.unsqueeze(2)).squeeze(2)).norm()) < 1e-4 * float(solve(v).norm())


class _Two:
    """Queries and keys alone."""

    def __init__(self, rows: int, columns: int) -> None:
        self.size = rows, columns

    def parts(self, v: Tensor) -> dict[str, Tensor]:
        half = v.shape[1] // 2
        return {"query": v[:, :half].view(-1, *self.size), "key": v[:, half:].view(-1, *self.size)}

    def gathered(self, parts: dict[str, Tensor]) -> Tensor:
        return torch.cat([parts["query"].flatten(1), parts["key"].flatten(1)], 1)


# -- one matrix a head in the place of slow planes ----------------------------------------------------------------


def shaken(shape: Formed) -> Formed:
    t = dict(shape.tensors)
    for j, name in enumerate(("step", "drift")):
        t[name] = t[name] + 0.02 * normal(*t[name].shape, seed=8 + j)
    return Formed.of(t, shape.form)


@pytest.mark.parametrize("rotary", ROTARY.values(), ids=ROTARY)
def test_scores_by_powers_are_those_of_loops(rotary):
    source, shape = at_truth(rotary)
    loose = shaken(loosened(source, shape))
    rows = model_of(source).problem.chunks[0]
    P, drift = loose.tensors["step"], loose.tensors["drift"]
    s = slowest(rotary, Q, P.shape[1])
    fast = torch.tensor([c for c in range(Q) if c not in s.tolist()])
    A, B = loose.tensors["query"], loose.tensors["key"]
    X, chain = rows.X[:2], chain_of(rows, loose)
    S = torch.zeros(2, M, K, K, dtype=torch.float64)
    for n in range(2):
        for i in range(M):
            for a in range(K):
                for b in range(a + 1):
                    q, k = X[n, a] @ A[i], X[n, b] @ B[i]
                    turned = rotary.turn(q.view(1, 1, 1, Q), torch.tensor([float(a - b)])).view(Q)
                    S[n, i, a, b] = (turned[fast] * k[fast]).sum()
                    # keys without their bias go by P, the bias by what it gains from place to place
                    key = X[n, b, :-1] @ B[i][:-1][:, s]
                    far = torch.linalg.matrix_power(torch.linalg.inv(P[i]), a)
                    gained = sum((torch.linalg.matrix_power(P[i], j) @ drift[i] for j in range(b)),
                                 torch.zeros(len(s), dtype=torch.float64))
                    S[n, i, a, b] += q[s] @ far @ (torch.linalg.matrix_power(P[i], b) @ key + gained)
    see = torch.ones(K, K, dtype=torch.bool).tril()
    exact = torch.softmax(S.masked_fill(~see, float("-inf")), 3)
    assert float((chain.P[:2] - exact).abs().max()) < 1e-12


@pytest.mark.parametrize("rotary", ROTARY.values(), ids=ROTARY)
def test_their_derivative_and_its_adjoint(rotary):
    source, shape = at_truth(rotary)
    loose, model = shaken(loosened(source, shape)), model_of(source)
    rows = model.problem.chunks[0]
    op = model.products(model.evaluate(loose), loose, torch.float64)
    chain, v = op.kept[0][0], normal(*loose.value.shape, seed=11)
    _, exact = torch.func.jvp(lambda value: chain_of(rows, loose.like(value)).H, (loose.value,), (v,))
    found = op._push(rows, chain, loose.biased(loose.parts(v)))
    assert float((found - exact).norm()) < 1e-11 * float(exact.norm())
    g = normal(*found.shape, seed=12)
    back = op._back(rows, chain, g.transpose(1, 2).reshape(-1, M * Q))
    assert float((back * v).sum()) == pytest.approx(float((found * g).sum()), rel=1e-10)


def test_what_the_keys_bias_costs_where_it_goes_by_its_drift_is_its_curvature():
    """It was 0 once, and conjugate gradients for one matrix a head never came to an end."""
    source, shape = at_truth(ROTARY["half"])
    loose, model = shaken(loosened(source, shape)), model_of(source)
    rows = model.problem.chunks[0]
    op = model.products(model.evaluate(loose), loose, torch.float64)

    def said(drift: Tensor) -> Tensor:
        moved = Formed.of({**loose.tensors, "drift": drift}, loose.form)
        return torch.einsum("nmkp,mpe->mnke", chain_of(rows, moved).H, op.O.view(M, Q, -1)).flatten(1)

    J = torch.autograd.functional.jacobian(said, loose.tensors["drift"], strategy="forward-mode",
                                           vectorize=True)
    exact = torch.stack([J[i, :, i].mT @ J[i, :, i] for i in range(M)])
    assert float((op.small()["drift"] - exact).norm()) < 1e-10 * float(exact.norm())
    assert float(exact.norm()) > 1.0  # of all rows, labels with a variance of 1


@pytest.mark.parametrize("rotary", ROTARY.values(), ids=ROTARY)
def test_planes_come_back_from_any_basis(rotary):
    """From P = T⁻¹R(1)T, whatever T; in both orientations, and with the keys' bias."""
    source, shape = at_truth(rotary)
    rows = model_of(source).problem.chunks[0]
    exact = chain_of(rows, shape).P
    loose, away = loosened(source, shape), loosened(source, mixed(shape, 20))
    assert float((chain_of(rows, loose).P - exact).abs().max()) < 1e-12
    P = torch.linalg.lstsq(away.tensors["query"][:, :, s := slowest(rotary, Q, loose.tensors["step"].shape[1])],
                           shape.tensors["query"][:, :, s]).solution  # A' P = A, so that A' = A P⁻¹
    t = dict(away.tensors)
    t["step"] = P @ loose.tensors["step"] @ torch.linalg.inv(P)
    t["drift"] = (P @ loose.tensors["drift"].unsqueeze(2)).squeeze(2)
    there = Formed.of(t, shape.form)
    assert float((chain_of(rows, there).P - exact).abs().max()) < 1e-10
    assert float((chain_of(rows, tightened(there)).P - exact).abs().max()) < 1e-9
    assert float((chain_of(rows, mixed(shape, 20)).P - exact).abs().max()) > 1e-2  # the wrong planes are seen


def test_a_layer_is_found_from_planes_in_any_basis():
    """Where steps crept before: planes that turn by 0.2 and 0.01 radians in all, mixed, one head the other way."""
    source, shape = at_truth(hw.Rotary(base=10_000.0), 150, 6, 6, 6)
    begin = mixed(shape, 30)
    begin = {name: t + 0.02 * t.std() * normal(*t.shape, seed=31) for name, t in begin.tensors.items()}
    model = model_of(source)
    point = model.evaluate(Formed.of(begin, shape.form))
    assert point.loss > 1e-3 * model.variation()
    found = refine_form(source, point.tensors(), generator=torch.Generator().manual_seed(0), sizes=False)
    assert found.error < 1e-12 and found.heads == M and "step" not in found.tensors


@pytest.mark.parametrize(("residual", "ends"), [(8e-13, False), (1e-8, True)])
def test_steps_that_gain_little_end_it_but_not_next_to_rounding(residual, ends):
    """Heads were right to 2e-9 and not to 1e-12 where outputs were met to 8e-13."""
    source, shape = at_truth(ROTARY["half"])
    at = FormedLadder(source, shape, FormCuts(), torch.Generator().manual_seed(0))
    at.dtype, at.residual, at.other = torch.float64, residual, 1.2 * residual
    assert at.slow("limit", 3 * residual) is ends
    assert not at.slow("limit", 30 * residual)  # it gained much


def test_no_matrix_where_places_are_given_or_planes_turn_fast():
    source, shape = at_truth(ROTARY["half"])
    form = hw.Form(rotary=hw.Rotary(frequencies=torch.tensor([2.0, 1.0, 1.5, 3.0]).double()))
    assert loosened(source, Formed.of(shape.tensors, form)) is None
    data = source.examples
    placed = hw.Examples(data.X, data.Y, positions=torch.arange(K).double().expand(len(data), K))
    assert loosened(FormSource(placed, source.form), shape) is None
    assert isinstance(chain_of(model_of(source).problem.chunks[0], shape), Chain)


def test_given_frequencies_lie_where_the_work_is_done():
    """A captured graph copies nothing between devices."""
    meta = torch.device("meta")
    form = placed(hw.Form(rotary=hw.Rotary(frequencies=torch.tensor([1.0, 0.1]))), torch.device("cpu"))
    assert form.rotary is not None and form.rotary.frequencies is not None
    assert form.rotary.frequencies.device.type == "cpu" and placed(form, torch.device("cpu")) is form
    assert placed(hw.Form(), meta) == hw.Form()
