"""Models of known shapes with random weights: what they generate means nothing, and takes as long as if it did."""

from __future__ import annotations

from typing import Any

import torch

from sennit.errors import InvalidInput

__all__ = ["RANDOM", "SHAPES", "is_random", "random_model"]

RANDOM = "random:"  # what their names begin with
SEED = 0
# transformers' class of their configuration, and what it is told.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": (
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
    ),
    "deepseek-v3-small": (
        "DeepseekV3Config",
        {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "moe_intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "n_routed_experts": 16,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            "q_lora_rank": 768,
            "max_position_embeddings": 8192,
        },
    ),
    "llama-tiny": (
        "LlamaConfig",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
        },
    ),
}


def is_random(model: str) -> bool:
    """Whether a model is named by its shape.

    >>> is_random("random:llama-3-8b"), is_random("meta-llama/Meta-Llama-3-8B")
    (True, False)
    """
    return model.startswith(RANDOM)


def random_model(name: str, dtype: torch.dtype, device: str) -> Any:
    """Return a causal language model whose weights are drawn on the device, always the same there.

    Args:
        name: ``"random:"`` and one of :data:`SHAPES`.
        dtype: of the weights.
        device: where they go; ``"meta"`` for a model without them.

    Raises:
        InvalidInput: there is no such shape.
    """
    shape = name.removeprefix(RANDOM)
    if shape not in SHAPES:
        raise InvalidInput("model", expected=" or ".join(f"{RANDOM}{known}" for known in SHAPES), got=repr(name))
    import transformers

    kind, sizes = SHAPES[shape]
    config = getattr(transformers, kind)(**sizes)
    devices = [device] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(SEED)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
