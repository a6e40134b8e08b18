"""Does compare name the mistake in a converted layer, and call harmless changes the same?

    python bench/same.py            # forty mistakes (ten kinds, four models each), forty harmless changes

Models are attention modules of transformers, built from small configs with random weights (seeds 0 to 3; those
that causes and thresholds were chosen on are 100 to 103). A mistake is made in a copy of the module
where one can be, else in the factors, or in a second implementation that is handed over as a function. The answer
counts as right if its cause is the kind that was planted; a harmless change if the answer is "same" or "same up to
head order".
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import headway as hw
from common import record, timed
from headway.core.forms import affine, in_sight
from headway.core.modules import factors_from_torch

COMMAND = "python bench/same.py"
WIDTH, HEADS, GROUPS, SIZE = 64, 4, 2, 16
SEED, EACH = 0, 4  # the first seed, models for every kind of mistake


def model(name: str, seed: int) -> nn.Module:
    """A small model with one attention module, all its weights random (biases, gains and sinks too), in float64."""
    import transformers as hf

    torch.manual_seed(seed)
    rope = {"rope_theta": 10_000.0, "rope_type": "default"}
    usual: dict[str, Any] = {
        "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": SIZE,
        "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 50, "attn_implementation": "eager",
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    made: dict[str, Callable[[], nn.Module]] = {
        "gpt2": lambda: hf.GPT2Model(hf.GPT2Config(n_embd=WIDTH, n_head=HEADS, n_layer=1, vocab_size=50,
                                                   bos_token_id=1, eos_token_id=2, attn_implementation="eager")),
        "bert": lambda: hf.BertModel(hf.BertConfig(**{k: v for k, v in usual.items() if k != "head_dim"})),
        "vit": lambda: hf.ViTModel(hf.ViTConfig(
            hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=1, intermediate_size=64,
            image_size=32, attn_implementation="eager")),
        "t5": lambda: hf.T5EncoderModel(hf.T5Config(
            d_model=WIDTH, num_heads=HEADS, d_kv=SIZE, num_layers=1, d_ff=64, vocab_size=50)),
        "llama": lambda: hf.LlamaModel(hf.LlamaConfig(**usual, rope_parameters=rope)),
        "mistral": lambda: hf.MistralModel(hf.MistralConfig(**usual, rope_parameters=rope, sliding_window=8)),
        "qwen2": lambda: hf.Qwen2Model(hf.Qwen2Config(**usual, rope_parameters=rope)),
        "qwen3": lambda: hf.Qwen3Model(hf.Qwen3Config(**usual, rope_parameters=rope)),
        "gemma2": lambda: hf.Gemma2Model(hf.Gemma2Config(
            **usual, rope_parameters=rope, query_pre_attn_scalar=SIZE, attn_logit_softcapping=5.0,
            sliding_window=8)),
        "gptoss": lambda: hf.GptOssModel(hf.GptOssConfig(
            **usual, rope_parameters=rope, num_local_experts=2, num_experts_per_tok=1, sliding_window=8)),
    }
    whole = made[name]().eval().double()
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.5 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=WIDTH**-0.5)
    return whole


PATHS = {
    "gpt2": "h.0.attn", "bert": "encoder.layer.0.attention", "vit": "layers.0.attention",
    "t5": "encoder.block.0.layer.0.SelfAttention"}


def attention(whole: nn.Module, name: str) -> tuple[nn.Module, str]:
    return whole, PATHS.get(name, "layers.0.self_attn")


def factors(name: str, seed: int) -> hw.FactoredLayer:
    return factors_from_torch(*attention(model(name, seed), name))


# Mistakes: kind, models, and what is made of a model.


def weights_of(name: str, seed: int) -> tuple[nn.Module, nn.Module]:
    """A copy of the model to be spoiled, and its attention."""
    whole = copy.deepcopy(model(name, seed))
    return whole, whole.get_submodule(attention(whole, name)[1])


def rotary_layout(name: str, seed: int) -> Any:
    """Weights permuted as for the other layout, read as if they were not (what converters from GGUF forget)."""
    whole, module = weights_of(name, seed)
    order = torch.arange(SIZE).view(2, -1).T.flatten()
    with torch.no_grad():
        for part in (module.q_proj, module.k_proj):
            W = part.weight.view(-1, SIZE, WIDTH)
            part.weight.copy_(W[:, order].reshape(-1, WIDTH))
            if part.bias is not None:
                part.bias.copy_(part.bias.view(-1, SIZE)[:, order].flatten())
    return attention(whole, name)


def rotary_base(name: str, seed: int) -> Any:
    layer = factors(name, seed)
    base = (500_000.0, 1_000_000.0)[seed % 2]
    return replace(layer, form=replace(layer.form, rotary=hw.Rotary(base=base)))


def scale(name: str, seed: int) -> Any:
    """The scores' scale forgotten, or taken of the width."""
    layer = factors(name, seed)
    times = SIZE**0.5 if seed % 2 else (SIZE / WIDTH) ** 0.5
    if name == "t5":
        times = SIZE**-0.5
    return replace(layer, query=layer.query * times)


LOST = {"gpt2": ("c_attn.bias", slice(0, WIDTH)), "bert": ("self.value.bias", slice(None)),
        "qwen2": ("k_proj.bias", slice(None)), "vit": ("o_proj.bias", slice(None)),
        "gptoss": ("q_proj.bias", slice(None))}


def bias(name: str, seed: int) -> Any:
    whole, module = weights_of(name, seed)
    where, rows = LOST[name]
    with torch.no_grad():
        module.get_parameter(where)[rows] = 0.0
    return attention(whole, name)


def groups(name: str, seed: int) -> Any:
    """Keys and values repeated as a block, not each beside itself."""
    layer = factors(name, seed)
    wrong = torch.arange(HEADS) % GROUPS
    return replace(layer, key=layer.key[wrong], value=layer.value[wrong])


def mask(name: str, seed: int) -> Any:
    """A second implementation whose causal mask lets a query see one key too many, or not its own."""
    layer = factors(name, seed)
    by = 1 if seed % 2 else -1

    def answers(X: Tensor) -> Tensor:
        a = torch.arange(X.shape[1])
        see = a <= a.unsqueeze(1) + by
        see[0, 0] = True
        far = in_sight(replace(layer.form.sight, causal=False), X)
        Q, K, V = (affine(X, F) for F in (layer.query, layer.key, layer.value))
        if layer.form.rotary is not None:
            Q, K = (layer.form.rotary.turn(F, a) for F in (Q, K))
        K, V = (F.repeat_interleave(layer.heads // layer.groups, 1) for F in (K, V))
        S = Q @ K.mT
        S = S if layer.form.cap is None else layer.form.cap.value * torch.tanh(S / layer.form.cap.value)
        S = S.masked_fill(~(see if far is None else see & far), float("-inf"))
        Y = torch.einsum("nmkp,mpe->nke", torch.softmax(S, -1) @ V, layer.out)
        return Y if layer.offset is None else Y + layer.offset

    return answers


def window(name: str, seed: int) -> Any:
    layer = factors(name, seed)
    far = (layer.form.sight.window or 0) + (1 if seed % 2 else -1)
    return replace(layer, form=replace(layer.form, sight=replace(layer.form.sight, window=far)))


def head_order(name: str, seed: int) -> Any:
    """Heads of the output weights in another order than those of the rest."""
    layer = factors(name, seed)
    order = torch.randperm(HEADS, generator=torch.Generator().manual_seed(seed))
    order = order if bool((order != torch.arange(HEADS)).any()) else order.roll(1)
    return replace(layer, out=layer.out[order])


def transposed(name: str, seed: int) -> Any:
    whole, module = weights_of(name, seed)
    names = {"gpt2": "c_proj.weight", "bert": "self.query.weight", "vit": "v_proj.weight", "llama": "o_proj.weight"}
    with torch.no_grad():
        held = module.get_parameter(names[name])
        held.copy_(held.T.clone())
    return attention(whole, name)


def forgotten(name: str, seed: int) -> Any:
    """Norm gains, sinks, caps and tables of offsets left out."""
    layer = factors(name, seed)
    if name == "qwen3":
        assert layer.form.normed is not None
        one = torch.ones(SIZE, dtype=torch.float64)
        bare = hw.Normed(one * SIZE**-0.5, one, layer.form.normed.eps)
        return replace(layer, form=replace(layer.form, normed=bare))
    part = {"gptoss": "sink", "gemma2": "cap", "t5": "offsets"}[name]
    return replace(layer, form=replace(layer.form, **{part: None}))


def rounding(name: str, seed: int) -> Any:
    dtype = (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16)[seed % 4]
    whole, _ = weights_of(name, seed)
    return attention(whole.to(dtype).double(), name)


MISTAKES: list[tuple[str, str | dict[str, str], Callable[[str, int], Any], tuple[str, ...]]] = [
    ("rotary layout", "rotary layout", rotary_layout, ("llama", "mistral", "qwen2", "gemma2")),
    ("rotary base", "rotary base", rotary_base, ("llama", "mistral", "gemma2", "qwen3")),
    ("scale", "scale", scale, ("gpt2", "bert", "t5", "llama")),
    ("bias lost", "bias", bias, ("gpt2", "bert", "qwen2", "vit")),
    ("groups", "groups", groups, ("llama", "mistral", "qwen3", "gemma2")),
    ("mask or window off by one", {"mistral": "window"}, mask, ("gpt2", "llama", "gemma2", "mistral")),
    ("head order of one part", "head order", head_order, ("gpt2", "bert", "t5", "llama")),
    ("weight transposed", "transposed weight", transposed, ("gpt2", "bert", "vit", "llama")),
    ("part forgotten", {"qwen3": "norm gain", "gptoss": "sink", "gemma2": "cap", "t5": "offsets"}, forgotten,
     ("qwen3", "gptoss", "gemma2", "t5")),
    ("rounding", "rounding", rounding, ("gpt2", "llama", "bert", "gptoss")),
]

# Harmless changes: each takes factors to other factors of the same function.


def _draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def reordered(layer: hw.FactoredLayer, seed: int) -> hw.FactoredLayer:
    """Groups in another order, and heads within them."""
    m, g = layer.heads, layer.groups
    by_group = torch.arange(g).roll(1 + seed % max(g - 1, 1))
    inside = torch.stack([torch.randperm(m // g, generator=_draw(seed + j)) for j in range(g)])
    order = (by_group.unsqueeze(1) * (m // g) + inside).flatten()
    per_head = {name: value[order] for name, value in layer.tensors().items()
                if name in ("query", "out", "sink", "offsets", "slope", "gate")}
    return layer.with_tensors({**per_head, "key": layer.key[by_group], "value": layer.value[by_group]})


def regauged(layer: hw.FactoredLayer, seed: int) -> hw.FactoredLayer:
    """Values and, where nothing forbids it, queries and keys in other coordinates."""
    draw, g, h = _draw(seed), layer.groups, layer.heads // layer.groups
    p = layer.value_size
    M = torch.linalg.qr(torch.randn(g, p, p, generator=draw, dtype=torch.float64))[0] * 1.7
    value, out = layer.value @ M, torch.linalg.inv(M).repeat_interleave(h, 0) @ layer.out
    layer = replace(layer, value=value, out=out)
    norms = layer.form.normed
    if norms is not None:
        return layer.with_tensors({"norm_query": norms.query * 2, "norm_key": norms.key / 2})
    if layer.form.rotary is None:
        q = layer.size
        N = torch.randn(g, q, q, generator=draw, dtype=torch.float64)
        return replace(layer, query=layer.query @ torch.linalg.inv(N).mT.repeat_interleave(h, 0), key=layer.key @ N)
    one, two, _ = layer.form.rotary.planes(torch.arange(layer.size))
    z = torch.polar(0.5 + torch.rand(g, len(one), generator=draw, dtype=torch.float64),
                    6.3 * torch.rand(g, len(one), generator=draw, dtype=torch.float64)).unsqueeze(1)

    def turned(F: Tensor, by: Tensor) -> Tensor:
        c = torch.complex(F[..., one], F[..., two]) * by
        F = F.clone()
        F[..., one], F[..., two] = c.real, c.imag
        return F

    back = (1 / z.conj()).repeat_interleave(h, 0)
    return replace(layer, query=turned(layer.query, back), key=turned(layer.key, z))


def converted(layer: hw.FactoredLayer, seed: int) -> hw.FactoredLayer:
    """The other rotary layout with its weights permuted; without rotation, heads' coordinates in another order."""
    if layer.form.rotary is None:
        order = torch.randperm(layer.size, generator=_draw(seed))
        return replace(layer, query=layer.query[..., order], key=layer.key[..., order])
    order = torch.arange(layer.size).view(2, -1).T.flatten()
    norms = {} if layer.form.normed is None else {
        "norm_query": layer.form.normed.query[order], "norm_key": layer.form.normed.key[order]}
    layer = layer.with_tensors({"query": layer.query[..., order], "key": layer.key[..., order], **norms})
    return replace(layer, form=replace(layer.form, rotary=replace(layer.form.rotary, layout="pairs")))


def unseen(layer: hw.FactoredLayer, seed: int) -> hw.FactoredLayer:
    """Constants moved to where they do not show: value biases to the output, key biases, offsets of a table."""
    draw, form = _draw(seed), layer.form
    parts: dict[str, Tensor] = {}
    if form.sink is None and form.gate is None:
        bias = layer.value[:, -1].repeat_interleave(layer.heads // layer.groups, 0)
        moved = torch.einsum("mp,mpe->e", bias, layer.out)
        zero = torch.cat([layer.value[:, :-1], torch.zeros_like(layer.value[:, -1:])], dim=1)
        parts |= {"value": zero, "offset": moved if layer.offset is None else layer.offset + moved}
    if form.is_plain or (form.offsets is not None and form.sink is None and form.cap is None):
        shift = torch.zeros_like(layer.key)
        shift[:, -1] = torch.randn(layer.groups, layer.size, generator=draw, dtype=torch.float64)
        parts |= {"key": layer.key + shift}
    if form.offsets is not None:
        parts |= {"offsets": form.offsets.values + 3.0}
    if form.sink is not None:  # biases show here; that keys are stored once for each head does not
        h = layer.heads // layer.groups
        parts |= {"key": layer.key.repeat_interleave(h, 0), "value": layer.value.repeat_interleave(h, 0)}
    return layer.with_tensors(parts)


HARMLESS = (("head and group order", reordered), ("gauge", regauged), ("layout converted properly", converted),
            ("constants that do not show", unseen))
MODELS = ("gpt2", "bert", "vit", "t5", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gptoss")


def mistakes() -> list[dict[str, Any]]:
    rows, seed = [], SEED
    for kind, wanted, plant, names in MISTAKES:
        for i, name in enumerate(names[:EACH]):
            want = wanted if isinstance(wanted, str) else wanted.get(name, "mask")
            make = window if want == "window" else plant
            one, other = attention(model(name, seed + i), name), make(name, seed + i)
            found, seconds = timed(lambda one=one, other=other: hw.compare(one, other))
            rows.append({"change": kind, "model": name, "seed": seed + i, "wanted": want, "answer": found.kind,
                         "cause": found.cause, "right": not found.same and found.cause == want, "by": found.by,
                         "difference": found.difference, "seconds": seconds, "why": found.why})
    return rows


def harmless() -> list[dict[str, Any]]:
    rows, seed = [], SEED
    for kind, change in HARMLESS:
        for i, name in enumerate(MODELS):
            one, other = attention(model(name, seed + i % 4), name), change(factors(name, seed + i % 4), seed + i)
            found, seconds = timed(lambda one=one, other=other: hw.compare(one, other))
            rows.append({"change": kind, "model": name, "seed": seed + i % 4, "wanted": "same",
                         "answer": found.kind, "cause": found.cause, "right": found.same, "by": found.by,
                         "difference": found.largest, "seconds": seconds, "why": found.why})
    return rows


def main() -> None:
    planted, kept = mistakes(), harmless()
    summary = {"mistakes named": f"{sum(row['right'] for row in planted)} of {len(planted)}",
               "harmless changes called the same": f"{sum(row['right'] for row in kept)} of {len(kept)}",
               "most seconds": max(row["seconds"] for row in planted + kept)}
    record("same", COMMAND, summary, planted + kept)


if __name__ == "__main__":
    main()
