"""Which transformers architectures Sennit has been tested with, and the attention specs of a model's layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sennit.errors import InvalidInput, UnsupportedFeature, UnsupportedModel
from sennit.spec import AttentionSpec

__all__ = [
    "SUPPORTED",
    "Architecture",
    "check_attention_module",
    "check_supported",
    "layer_specs",
    "model_device",
    "vocab_size",
]


@dataclass(frozen=True)
class Architecture:
    """Names that transformers gives to one architecture's configuration, model and attention layer."""

    model_type: str
    causal_lm: str
    attention: str


SUPPORTED = (
    Architecture("llama", "LlamaForCausalLM", "transformers.models.llama.modeling_llama.LlamaAttention"),
    Architecture("qwen3", "Qwen3ForCausalLM", "transformers.models.qwen3.modeling_qwen3.Qwen3Attention"),
)

# Rotary frequencies that stay what they are when a longer sequence joins the batch. `dynamic` and `longrope` change
# with the longest position of a step: keys that are already in the cache would have been rotated by other frequencies.
FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def check_supported(config: Any) -> Architecture:
    """Return the architecture that a transformers model configuration describes, or refuse it by name.

    An architecture is refused until it is tested: a mask, window or cap that only transformers knows about would
    otherwise be dropped silently.

    Args:
        config: a ``transformers.PreTrainedConfig``.

    Raises:
        UnsupportedModel: the architecture is none of :data:`SUPPORTED`.
        UnsupportedFeature: it is one of them, with sliding-window layers, attention that is not causal, or rotary
            frequencies that change with the longest sequence of a batch.
    """
    model_type = getattr(config, "model_type", None)
    named = list(getattr(config, "architectures", None) or [])
    found = next((a for a in SUPPORTED if a.model_type == model_type), None)
    if found is None or any(name != found.causal_lm for name in named):
        raise _unsupported(", ".join(named) or str(model_type or type(config).__name__))
    if not getattr(config, "is_causal", True):
        raise UnsupportedFeature("is_causal=False", f"{found.causal_lm} is served as a causal model only")
    sliding = [i for i, kind in enumerate(getattr(config, "layer_types", None) or []) if kind != "full_attention"]
    if sliding or getattr(config, "sliding_window", None) is not None:
        where = f"layers {sliding}" if sliding else f"sliding_window={config.sliding_window}"
        raise UnsupportedFeature(
            "sliding_window",
            f"{found.causal_lm} is tested with full attention only, and this configuration has {where}",
        )
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in FIXED_ROPE_TYPES:
        raise UnsupportedFeature(
            f"rope_type={rope_type!r}",
            f"rotary frequencies may not change while keys are cached; supported: {', '.join(FIXED_ROPE_TYPES)}",
        )
    return found


def check_attention_module(module: Any) -> None:
    """Refuse an attention layer that belongs to no tested architecture.

    Raises:
        UnsupportedModel: the module's class is not the attention layer of one of :data:`SUPPORTED`.
    """
    kind = type(module)
    if f"{kind.__module__}.{kind.__qualname__}" in _ATTENTION_CLASSES:
        return
    config = getattr(module, "config", None)
    named = ", ".join(getattr(config, "architectures", None) or []) or str(getattr(config, "model_type", "unknown"))
    raise _unsupported(f"{named} (attention layer {kind.__qualname__})")


def layer_specs(model: Any) -> list[AttentionSpec]:
    """Return the attention spec of every layer of a supported causal language model, in layer order.

    Args:
        model: a transformers ``LlamaForCausalLM`` or ``Qwen3ForCausalLM``.

    Raises:
        UnsupportedModel: the model is of another class.
        UnsupportedFeature: see :func:`check_supported`.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_input_embeddings"):
        raise InvalidInput("model", expected="a transformers causal language model", got=type(model).__name__)
    architecture = check_supported(config)
    if type(model).__name__ != architecture.causal_lm:
        raise _unsupported(type(model).__name__)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    spec = AttentionSpec(
        num_qo_heads=heads, num_kv_heads=config.num_key_value_heads or heads, head_dim=head_dim, dtype=model.dtype
    )
    return [spec] * config.num_hidden_layers


def model_device(model: Any) -> torch.device:
    """Return the one device that holds all of a model's weights.

    Raises:
        UnsupportedFeature: the weights are spread over several devices, or were never loaded (device ``meta``).
    """
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) != 1:
        raise UnsupportedFeature(
            "device_map", f"the model is spread over {', '.join(devices) or 'no device'}; load it on one device"
        )
    if devices[0] == "meta":
        raise UnsupportedFeature("device meta", "the model has no weights yet; load them before serving it")
    return torch.device(devices[0])


def vocab_size(model: Any) -> int:
    """Return the number of rows of a model's token embedding: ids must be below it."""
    return int(model.get_input_embeddings().num_embeddings)


_ATTENTION_CLASSES = frozenset(a.attention for a in SUPPORTED)


def _unsupported(name: str) -> UnsupportedModel:
    tested = " and ".join(a.causal_lm for a in SUPPORTED)
    return UnsupportedModel(f"{name} has not been tested with Sennit; supported: {tested}")
