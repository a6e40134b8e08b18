"""Small models of transformers with random weights: one for every kind of attention that Headway reads.

Transformers computes norms, softmax and rotations in float32 whatever the dtype; within ``double()`` they are
computed in float64, so that a reading can be compared to 1e-10.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import transformers as hf
from torch.overrides import TorchFunctionMode

hf.utils.logging.set_verbosity_error()
hf.utils.logging.disable_progress_bar()

TOKENS = {"vocab_size": 30, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
         "intermediate_size": 16, "head_dim": 8, "max_position_embeddings": 64, **TOKENS}
BERT = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 16,
        "max_position_embeddings": 64, **TOKENS}
GPT2 = {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 64, **TOKENS}
T5 = {"d_model": 24, "d_kv": 8, "num_heads": 4, "d_ff": 16, "num_layers": 2, "decoder_start_token_id": 1, **TOKENS}
WHISPER = {"d_model": 24, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 2,
           "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_source_positions": 10,
           "num_mel_bins": 6, "decoder_start_token_id": 1, **TOKENS}
SCALED = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 16}
EXPERTS = {"num_experts_per_tok": 1, "experts_implementation": "eager"}


@dataclass(frozen=True)
class Case:
    model: str
    config: str
    settings: dict
    path: str
    number: int = 1
    stack: str | None = None
    words: str = ""  # how the form is described

    def make(self, dtype=torch.float32, **more):
        """The model in evaluation mode, its weights drawn so that every part matters."""
        model = getattr(hf, self.model)(getattr(hf, self.config)(**{**self.settings, **more})).to(dtype).eval()
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, part in model.named_parameters():
                gain = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
                part.copy_(gain + 0.3 * torch.randn(part.shape, generator=draw, dtype=torch.float64))
        return model

    def inputs(self, dtype=torch.float32):
        """What the model is called with: two sequences, the second with filling where the model takes a mask."""
        draw = torch.Generator().manual_seed(1)
        ids = torch.randint(3, 30, (2, 9), generator=draw)
        mask = torch.ones_like(ids)
        mask[1, 6:] = 0
        if self.model == "ViTModel":
            return {"pixel_values": torch.randn(2, 3, 16, 16, generator=draw).to(dtype)}
        if self.model == "WhisperModel":
            return {"input_features": torch.randn(2, 6, 20, generator=draw).to(dtype), "decoder_input_ids": ids}
        if self.model == "T5Model":
            return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :7]}
        if "add_cross_attention" in self.settings:
            other = torch.randn(2, 5, 24, generator=draw).to(dtype)
            return {"input_ids": ids, "attention_mask": mask, "encoder_hidden_states": other}
        return {"input_ids": ids, "attention_mask": mask}


def _llama(model, config, words, **more):
    return Case(model, config, {**LLAMA, **more}, "layers.1.self_attn", words=words)


TURNED = "rotary scores, base 10,000, halves"
CASES = {
    "gpt2": Case("GPT2Model", "GPT2Config", GPT2, "h.1.attn"),
    "gpt2 cross": Case("GPT2Model", "GPT2Config", {**GPT2, "add_cross_attention": True}, "h.1.crossattention",
                       stack="cross", words="plain scores"),
    "bert": Case("BertModel", "BertConfig", BERT, "encoder.layer.1.attention"),
    "mpnet": Case("MPNetModel", "MPNetConfig", BERT, "encoder.layer.1.attention.attn",
                  words="T5's table of 32 offsets"),
    "vit": Case("ViTModel", "ViTConfig", {
        "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 16,
        "image_size": 16, "patch_size": 8}, "layers.1.attention"),
    "llama": _llama("LlamaModel", "LlamaConfig", f"{TURNED}; causal"),
    "llama 3": _llama("LlamaModel", "LlamaConfig", "rotary scores, given frequencies, halves; causal",
                      rope_parameters=SCALED),
    "mistral": _llama("MistralModel", "MistralConfig", f"{TURNED}; causal, a window of 4", sliding_window=4),
    "qwen 2": _llama("Qwen2Model", "Qwen2Config", f"{TURNED}; causal"),
    "qwen 3": _llama("Qwen3Model", "Qwen3Config", f"{TURNED}; normed queries and keys; causal"),
    "qwen 3 next": _llama(
        "Qwen3NextModel", "Qwen3NextConfig",
        f"{TURNED}, 4 coordinates turned; normed queries and keys; gated heads; causal",
        layer_types=["full_attention"] * 2, num_experts=2, moe_intermediate_size=8,
        shared_expert_intermediate_size=8, **{**EXPERTS, "head_dim": 16}),
    "smollm 3": _llama("SmolLM3Model", "SmolLM3Config", "rotary scores, base 2,000,000, halves; causal"),
    "smollm 3 unturned": _llama("SmolLM3Model", "SmolLM3Config", "plain scores; causal", no_rope_layers=[1, 0]),
    "gemma 2": _llama("Gemma2Model", "Gemma2Config", f"{TURNED}; capped at 3; causal, a window of 4",
                      sliding_window=4, query_pre_attn_scalar=12, attn_logit_softcapping=3.0,
                      layer_types=["full_attention", "sliding_attention"], attn_implementation="eager"),
    "gemma 3": _llama("Gemma3TextModel", "Gemma3TextConfig",
                      "rotary scores, base 1,000,000, halves; normed queries and keys; causal",
                      query_pre_attn_scalar=12, layer_types=["sliding_attention", "full_attention"]),
    "gpt-oss": _llama("GptOssModel", "GptOssConfig",
                      "rotary scores, given frequencies, halves; sinks; causal, a window of 4", num_local_experts=2,
                      sliding_window=4, layer_types=["full_attention", "sliding_attention"], rope_parameters=YARN,
                      **EXPERTS),
    "gpt-neox": Case("GPTNeoXModel", "GPTNeoXConfig", {**BERT, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.67}}, "layers.1.attention",
        words=f"{TURNED}, 4 coordinates turned; causal"),
    "cohere": _llama("CohereModel", "CohereConfig", "rotary scores, base 500,000, pairs; causal"),
    "t5 encoder": Case("T5Model", "T5Config", T5, "encoder.block.1.layer.0.SelfAttention", stack="encoder",
                       words="T5's table of 32 offsets"),
    "t5 decoder": Case("T5Model", "T5Config", T5, "decoder.block.0.layer.0.SelfAttention", 0, "decoder",
                       "T5's table of 32 offsets, backwards only; causal"),
    "t5 cross": Case("T5Model", "T5Config", T5, "decoder.block.1.layer.1.EncDecAttention", stack="cross",
                     words="plain scores"),
    **{f"whisper {stack}": Case("WhisperModel", "WhisperConfig", WHISPER, path, stack=stack, words=words)
       for stack, path, words in (("encoder", "encoder.layers.1.self_attn", ""),
                                  ("decoder", "decoder.layers.1.self_attn", ""),
                                  ("cross", "decoder.layers.1.encoder_attn", "plain scores"))},
}


class double(TorchFunctionMode):  # noqa: N801
    """Within it float32 is float64: what a library rounds on its way stays whole."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].double()
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*(torch.float64 if part is torch.float32 else part for part in args), **kwargs)


@cache
def doubled(name):
    """A model in float64, made once."""
    with double():
        return CASES[name].make(torch.float64)
