"""Tiny random models of every supported architecture, and what transformers itself generates with them."""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ARCHITECTURES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_window": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
}

WINDOW = 32

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 256}

# What makes each architecture what it is, in a size where it changes greedy tokens.
PECULIAR: dict[str, dict[str, Any]] = {
    "qwen3_window": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 6},
    "gemma3": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        },
    },
    "gpt_oss": {
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": YARN | {"truncate": False},
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 12,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "head_dim": 6,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
}

# The forward argument that takes a transformers cache; renamed in transformers 5.24.
CACHE_ARGUMENT = next(
    name for name in ("cache", "past_key_values") if name in inspect.signature(LlamaForCausalLM.forward).parameters
)

# 256 bytes and a few special tokens.
VOCAB_SIZE = 260
EOS = 257


def tiny_model(architecture: str, *, tied: bool = False, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A random model that is small but has everything: groups of heads, several layers, an odd feed-forward width."""
    config_class, model_class = ARCHITECTURES[architecture]
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        # Wide enough that greedy tokens of a random model vary instead of repeating one.
        "initializer_range": 0.3,
    }
    torch.manual_seed(11)
    model = model_class(config_class(**(sizes | deepcopy(PECULIAR.get(architecture, {})) | changes))).to(dtype).eval()
    if architecture in ("gpt_oss", "deepseek_v3"):
        model.set_experts_implementation("eager")  # the others know no float64
    for layer in model.model.layers if architecture == "gpt_oss" else ():
        torch.nn.init.normal_(layer.self_attn.sinks, mean=2.0)  # as large as logits
    return model


def reference_tokens(model: Any, prompt: list[int], max_new_tokens: int, **options: Any) -> list[int]:
    """Greedy tokens of transformers' own generate with eager attention, for one prompt alone."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                **options,
            )
    finally:
        model.set_attn_implementation(before)
    return out[0, len(prompt) :].tolist()


def reference_logprobs(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """Log-probability of each of ``tokens`` after what comes before it, by one eager forward pass."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    finally:
        model.set_attn_implementation(before)
    chosen = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), tokens]
    return chosen.tolist()
