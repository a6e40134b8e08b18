"""Learning from inputs one may choose: heads on a line of keys, the conversation with a black box, statuses."""

from __future__ import annotations

import pytest
import torch
from tests import dense

import headway as hw
from headway.core import oracle as oracles
from headway.learning.chosen.line import Line, Logits, eliminated, fitted, grid
from headway.learning.chosen.plan import directions, foreseen
from headway.learning.chosen.tensors import numerical_rank, rank_one_terms

F64 = torch.float64


class Counted:
    """A black box that counts what it is asked, and may fail."""

    def __init__(self, f, fail=lambda call: None):
        self.f, self.fail, self.calls, self.batches, self.seen = f, fail, 0, 0, set()

    def __call__(self, X):
        self.batches += 1
        self.fail(self.batches)
        self.calls += len(X)
        self.seen |= {x.numpy().tobytes() for x in X}
        return self.f(X)


def truth(heads=2, width=8, seed=1, **options):
    return hw.AttentionLayer.random(heads, width, seed=seed, **{"key_bias": True, "offset": True, **options})


def chosen(f, width=8, **options):
    return hw.ask(f, width=width, **{"plan": "chosen", "length": 12, **options})


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(oracles, "WAIT", 0.0)


# -- on a line ----------------------------------------------------------------------------------------------------


def on_lines(layer, n=4, r=3, k=7):
    draw = torch.Generator().manual_seed(3)
    origin, delta, *B = torch.randn(r + 2, layer.width, generator=draw, dtype=F64)
    B, s, t = torch.stack(B, 1), torch.randn(n, r, generator=draw, dtype=F64), grid(k, origin)
    b = origin + s @ B.T
    Y = layer(b.unsqueeze(1) + t.view(1, -1, 1) * delta)
    right = Logits(torch.einsum("dr,mdf,f->mr", B, layer.Theta, delta),
                   torch.einsum("d,mdf,f->m", origin, layer.Theta, delta) + layer.key_bias @ delta,
                   torch.einsum("d,mdf,f->m", delta, layer.Theta, delta))
    return b, delta, Line(t, s, Y), right


def test_answers_on_a_line_are_those_of_the_slow_twin():
    layer = truth()
    b, delta, line, _ = on_lines(layer)
    slow = torch.stack([dense.answer_on_a_line(layer, one, delta, line.t) for one in b])
    assert float((slow - line.Y).abs().max()) < 1e-12


def test_the_true_logits_leave_nothing_and_are_found_again():
    layer = truth()
    _, delta, line, right = on_lines(layer, n=8)
    _, _, a, R = eliminated(line, right)
    assert float(R.norm()) < 1e-12 * float(line.Y.norm())
    assert torch.allclose(a, layer.W.mT @ delta, atol=1e-9)
    found = fitted(line, Logits(right.v + 0.05, right.w - 0.05, 1.05 * right.kappa))
    assert found.residual < 1e-10
    assert torch.allclose(found.logits.w, right.w, atol=1e-7)


def test_mirrored_logits_do_not_fit():
    """With two tokens they would: the steps of the grid grow."""
    _, _, line, right = on_lines(truth(heads=1), n=8)
    mirrored = fitted(line, Logits(-right.v, -right.w, -right.kappa))
    assert mirrored.residual > 1e-6
    _, _, two, right = on_lines(truth(heads=1), n=8, k=2)
    shift = -float(two.t.sum()) / 2  # tokens at ±h about it
    assert shift != 0
    R = eliminated(two, Logits(-right.v, -right.w, -right.kappa))[3]
    assert float(R.norm()) < 1e-12 * float(two.Y.norm())


def test_rank_one_terms_are_those_planted():
    draw = torch.Generator().manual_seed(0)
    d, v, a = (torch.randn(n, 4, generator=draw, dtype=F64) for n in (9, 6, 5))
    T = torch.einsum("rm,sm,em->rse", d, v, a)
    assert numerical_rank(torch.linalg.svdvals(T.flatten(1)), 1e-10) == 4
    found_v, found_a = rank_one_terms(T, 4, draw)
    for right, found in ((v, found_v), (a, found_a)):
        cosines = (right / right.norm(dim=0)).T @ found
        assert torch.allclose(cosines.abs().max(1).values, torch.ones(4, dtype=F64), atol=1e-9)


def test_calls_grow_with_what_is_to_be_found():
    one, more = foreseen(2, 16, 16, 16), foreseen(4, 16, 16, 16)
    assert (one.chosen, one.random) < (more.chosen, more.random)
    assert one.least < one.chosen
    assert directions(4, 5) == 5
    wide = foreseen(8, 64, 64, 16)
    assert wide.chosen < wide.random, "at width 64 chosen questions are the cheaper ones"
    small = foreseen(1, 4, 4, 16)
    assert small.random < small.chosen, "at width 4 random ones"


# -- recovered ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "width", "seed"), [(1, 6, 0), (2, 8, 9), (3, 8, 2)])
def test_heads_are_counted_and_found(heads, width, seed):
    layer = truth(heads, width, seed)
    box = Counted(layer)
    fit = hw.learn(chosen(box, width))
    assert (fit.status.kind, fit.layer.heads) == ("recovered", heads)
    assert hw.match(fit.layer, layer).worst < 1e-9
    assert fit.stats["plan"] == "chosen"
    assert box.calls == fit.stats["calls"] == len(box.seen), "every call counted, none made twice"
    assert fit.stats["rows"] == 12 * box.calls
    assert f"{box.calls} sequences were asked" in fit.status.sentence


def test_float32_answers():
    layer = truth(seed=4).to(torch.float32)
    fit = hw.learn(chosen(layer, dtype=torch.float32))
    assert fit.status.ok
    assert hw.match(fit.layer, layer.to(F64)).worst < 1e-4


def test_noisy_answers():
    layer, draw = truth(seed=5), torch.Generator().manual_seed(0)

    def noisy(X):
        Y = layer(X)
        return Y + 1e-6 * Y.std() * torch.randn(Y.shape, generator=draw, dtype=F64)

    fit = hw.learn(chosen(noisy))
    assert fit.status.kind in ("noise", "fitted")
    assert 1e-7 < fit.stats["answer_noise"] < 1e-5
    assert hw.match(fit.layer, layer).worst < 1e-4


def test_as_many_heads_as_outputs_are_learned_at_random():
    layer = truth(heads=2, width=5, out_width=2, seed=6)
    fit = hw.learn(chosen(layer, 5))
    assert fit.stats["plan"] == "both"
    assert "as many heads as outputs" in fit.status.sentence
    assert hw.match(fit.layer, layer).worst < 1e-9


def test_auto_takes_what_is_cheaper_and_says_so():
    layer = truth(heads=1, width=5, seed=7)
    fit = hw.learn(chosen(layer, 5, plan="auto"))
    assert fit.stats["plan"] == "both"
    assert "to count the heads" in fit.status.sentence
    assert hw.match(fit.layer, layer).worst < 1e-9


def test_auto_draws_at_random_where_order_matters():
    layer = truth(heads=1, width=4, seed=8, mask="causal")
    fit = hw.learn(chosen(layer, 4, plan="auto", mask="causal", budget=150, length=6))
    assert fit.stats["plan"] == "random"
    assert hw.match(fit.layer, layer).worst < 1e-9
    form = hw.Form(sight=hw.Sight(causal=True))
    fit = hw.learn(chosen(layer, 4, plan="auto", budget=150, length=6), form=form, seconds=0.5)
    assert fit.stats["plan"] == "random"
    assert "all at random" in fit.status.sentence


# -- the conversation ---------------------------------------------------------------------------------------------


def test_an_oracle_that_fails_now_and_then_changes_nothing():
    layer = truth(seed=9)

    def now_and_then(batch):
        if batch % 3 == 0:
            raise ConnectionError("try again")

    steady, flaky = Counted(layer), Counted(layer, now_and_then)
    one, other = hw.learn(chosen(steady)), hw.learn(chosen(flaky))
    assert torch.allclose(one.layer.Theta, other.layer.Theta, rtol=0, atol=1e-10)
    assert steady.calls == flaky.calls
    assert other.stats["failures"] == flaky.batches // 3 > 0


def test_an_oracle_that_always_fails_is_given_up_with_a_sentence():
    def always(_):
        raise ConnectionError("no route to host")

    box = Counted(truth(), always)
    with pytest.raises(hw.InputError, match="4 tries; got none, the last time ConnectionError: no route to host"):
        hw.learn(chosen(box))
    assert box.batches == oracles.TRIES


def test_a_run_that_was_killed_goes_on_without_asking_again(tmp_path):
    layer = truth(seed=9)
    whole = Counted(layer)
    right = hw.learn(chosen(whole), run=tmp_path / "whole")

    def killed(batch):
        if batch == 5:
            raise KeyboardInterrupt

    first, second = Counted(layer, killed), Counted(layer)
    with pytest.raises(KeyboardInterrupt):
        hw.learn(chosen(first), run=tmp_path / "cut")
    fit = hw.learn(chosen(second), run=tmp_path / "cut")
    assert 0 < first.calls < whole.calls
    assert first.calls + second.calls == whole.calls == fit.stats["calls"]
    assert not first.seen & second.seen
    assert torch.allclose(fit.layer.Theta, right.layer.Theta, rtol=0, atol=1e-10)
    third = Counted(layer)
    again = hw.learn(chosen(third), run=tmp_path / "cut")
    assert third.calls == 0
    assert again.status.sentence == fit.status.sentence
    with pytest.raises(hw.InputError, match="digest"):
        hw.learn(chosen(third, seed=3), run=tmp_path / "cut")


def test_a_budget_that_runs_out_is_told_and_a_larger_one_goes_on(tmp_path):
    layer = truth(heads=3, seed=11)
    box = Counted(layer)
    fit = hw.learn(chosen(box, budget=25), run=tmp_path / "run")
    assert fit.status.kind == "too_few"
    assert "The budget of 25 calls does not do: 3 heads were counted" in fit.status.sentence
    assert box.calls <= 25
    fit = hw.learn(chosen(box, budget=100), run=tmp_path / "run")
    assert fit.status.kind == "recovered"
    assert box.calls == fit.stats["calls"] <= 100


def test_an_oracle_of_one_length_is_asked_in_that_length():
    layer = truth(seed=9)

    def fixed(X):
        assert X.shape[1] == 12
        return layer(X)

    assert hw.learn(chosen(fixed)).status.kind == "recovered"


# -- what is no layer, and what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("f", [
    lambda X: torch.tanh(X @ truth().W[0]),
    lambda X: truth()(X) ** 2,
    lambda X: X * X.mean(1, keepdim=True),
], ids=["tanh", "square", "product"])
def test_what_is_no_layer_is_never_called_one(f):
    fit = hw.learn(chosen(f, budget=400))
    assert fit.status.kind == "not_realisable", fit.status
    assert not fit.status.ok


def sloppy():
    draw = torch.Generator().manual_seed(0)
    return lambda X: truth()(X) + torch.randn(X.shape, generator=draw, dtype=F64)


@pytest.mark.parametrize(("f", "said"), [
    (lambda X: truth()(X)[:, :1], "one output row per token"),
    (lambda X: truth()(X) / 0, "finite numbers"),
    (lambda X: truth()(X).sum(), "one output row per token"),
    (sloppy(), "same answer to the same input"),
    (lambda X: truth()(X + torch.arange(12, dtype=F64).view(1, -1, 1)), "order of tokens matters"),
    (truth(mask="causal"), "order of tokens matters"),
], ids=["shape", "nan", "number", "differs", "positions", "causal"])
def test_answers_that_do_not_serve_are_refused(f, said):
    with pytest.raises(hw.InputError, match=said):
        hw.learn(chosen(f))


@pytest.mark.parametrize(("options", "said"), [
    ({"budget": 5}, "budget: expected at least 9 calls"),
    ({"budget": 0}, "budget"),
    ({"plan": "best"}, "plan: expected one of 'random', 'chosen', 'auto'"),
    ({"length": 4}, "length: expected at least 5"),
    ({"count": 100}, "count: expected nothing"),
    ({"fresh": True}, "fresh: expected nothing"),
    ({"law": "gaussian"}, "law: expected nothing"),
    ({"mask": "causal"}, "mask: expected 'none'"),
    ({"plan": "random", "budget": 10, "count": 20}, "budget: expected no fewer calls than count"),
], ids=lambda given: ",".join(given) if isinstance(given, dict) else "")
def test_settings_that_do_not_serve_are_refused_before_the_first_call(options, said):
    box = Counted(truth())
    with pytest.raises(hw.InputError, match=said):
        chosen(box, **options)
    assert box.calls == 0


@pytest.mark.parametrize(("options", "said"), [
    ({"method": "moments"}, "method: expected 'auto'"),
    ({"heads": 40}, "budget: expected at least"),
    ({"form": hw.Form(sight=hw.Sight(causal=True))}, "plan: expected 'random' or 'auto'"),
    ({"heads": 0}, "heads"),
], ids=["method", "heads", "form", "none"])
def test_settings_of_learn_that_do_not_serve_are_refused_before_the_first_call(options, said):
    box = Counted(truth())
    with pytest.raises(hw.InputError, match=said):
        hw.learn(chosen(box, budget=20), **options)
    assert box.calls == 0


def test_a_random_plan_with_a_budget_asks_for_as_many():
    box = Counted(truth())
    data = hw.ask(box, width=8, budget=50)
    assert isinstance(data, hw.Examples)
    assert len(data) == 50


def test_a_function_that_is_no_layer_is_not_called_noise_where_answers_have_none():
    layer = truth(width=6, key_bias=False, offset=False, seed=0)

    def squares(X):
        S = torch.einsum("nad,mde,nbe->nmab", X, layer.Theta, X).square() + 1e-6
        return torch.einsum("nmab,nbd,mde->nae", S / S.sum(-1, keepdim=True), X, layer.W)

    fit = hw.learn(chosen(squares, width=6, length=8, budget=300))
    assert fit.status.kind == "not_realisable", fit.status
    assert fit.stats["answer_noise"] < 1e-12


def test_a_layer_without_softmax_is_told_from_its_answers_to_equal_tokens():
    box = Counted(hw.AttentionLayer.random(2, 6, scores="linear", seed=3))
    fit = hw.learn(chosen(box, width=6))
    assert fit.status.kind == "not_realisable" and "equal tokens" in fit.status.sentence
    assert box.calls < 100


def test_a_form_that_is_given_keeps_to_the_budget_and_asks_nothing_twice(tmp_path):
    layer, ended = hw.AttentionLayer.random(2, 6, scores="linear", seed=3), []
    box = Counted(layer)

    class Progress:
        def __call__(self, event):
            pass

        def finished(self, fit):
            ended.append(fit)

    def learned():
        return hw.learn(hw.ask(box, width=6, length=6, plan="auto", budget=200), form="linear",
                        run=tmp_path / "run", progress=Progress())

    fit = learned()
    assert (box.calls, fit.stats["calls"], len(ended)) == (200, 200, 1)
    assert fit.status.kind == "recovered" and "all at random" in fit.status.sentence
    again = learned()
    assert (box.calls, again.status.sentence) == (200, fit.status.sentence)


def noisy(layer, level, seed):
    draw = torch.Generator().manual_seed(seed)

    def answer(X):
        Y = layer(X)
        return Y + level * Y.std() * torch.randn(Y.shape, generator=draw, dtype=F64)

    return answer


@pytest.mark.parametrize(("heads", "width", "level", "seed"), [(1, 8, 1e-3, 901), (2, 8, 1e-3, 902)],
                         ids=["one fitted to a few rows", "a head below the noise"])
def test_auto_is_not_led_astray_by_the_noise_of_a_few_answers(heads, width, level, seed):
    """Eight noisy sequences are met much better than others, and a faint head is not counted at first."""
    layer = truth(heads, width, seed)
    fit = hw.learn(hw.ask(noisy(layer, level, seed), width=width, length=16, plan="auto", seed=seed))
    assert fit.status.kind == "noise", fit.status
    assert fit.layer.heads == heads
    assert hw.match(fit.layer, layer).worst < 30 * level


def test_a_budget_too_small_for_noisy_answers_is_called_too_small():
    layer = truth(2, 8, 902)
    fit = hw.learn(hw.ask(noisy(layer, 1e-3, 902), width=8, length=16, plan="auto", seed=902, budget=26))
    assert fit.status.kind == "too_few", fit.status
    assert "answers have noise" in fit.status.sentence or "budget" in fit.status.sentence
