"""Tiny random models of every supported architecture, and what transformers itself generates with them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

ARCHITECTURES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}

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
    return model_class(config_class(**(sizes | changes))).to(dtype).eval()


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
