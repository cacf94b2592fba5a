"""Which transformers architectures Sennit has been tested with, and the attention specs of a model's layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sennit.cache.demand import is_integer
from sennit.errors import InvalidInput, UnsupportedFeature, UnsupportedModel
from sennit.hf.latent import check_absorbable
from sennit.spec import AttentionSpec

__all__ = [
    "SUPPORTED",
    "Architecture",
    "architecture_of",
    "check_supported",
    "context_length",
    "layer_specs",
    "model_config",
    "model_device",
    "vocab_size",
    "window_left",
]


@dataclass(frozen=True)
class Architecture:
    """What transformers calls one architecture, and what its layers ask of attention beyond plain scaled attention.

    Attributes:
        model_type: of its configuration.
        causal_lm: class of its causal language model.
        attention: class of its attention layer, with its module.
        keywords: of the attention function that its layers pass: ``sliding_window`` (window), ``softcap`` (soft cap),
            ``s_aux`` (learned sinks).
        window_everywhere: the configuration's window is every layer's, whatever ``layer_types`` says.
        latent: its layers cache a latent instead of keys and values (MLA).
    """

    model_type: str
    causal_lm: str
    attention: str
    keywords: frozenset[str] = frozenset()
    window_everywhere: bool = False
    latent: bool = False


def _architecture(model_type: str, folder: str, prefix: str, *keywords: str, **flags: bool) -> Architecture:
    layer = f"transformers.models.{folder}.modeling_{folder}.{prefix}Attention"
    return Architecture(model_type, f"{prefix}ForCausalLM", layer, frozenset(keywords), **flags)


SUPPORTED = (
    _architecture("llama", "llama", "Llama"),
    _architecture("qwen3", "qwen3", "Qwen3", "sliding_window"),
    _architecture("mistral", "mistral", "Mistral", "sliding_window", window_everywhere=True),
    _architecture("gemma2", "gemma2", "Gemma2", "sliding_window", "softcap"),
    _architecture("gemma3_text", "gemma3", "Gemma3", "sliding_window"),
    _architecture("gpt_oss", "gpt_oss", "GptOss", "sliding_window", "s_aux"),
    _architecture("deepseek_v3", "deepseek_v3", "DeepseekV3", latent=True),
)

# Rotary frequencies that stay what they are when a longer sequence joins the batch. `dynamic` and `longrope` change
# with the longest position of a step: keys that are already in the cache would have been rotated by other frequencies.
FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

LAYER_TYPES = ("full_attention", "sliding_attention")


def check_supported(config: Any) -> Architecture:
    """Return the architecture that a transformers model configuration describes, or refuse it by name.

    An architecture is refused until it is tested: a mask, window or cap that only transformers knows about would
    otherwise be dropped silently.

    Args:
        config: a ``transformers.PreTrainedConfig``.

    Raises:
        UnsupportedModel: the architecture is none of :data:`SUPPORTED`.
        UnsupportedFeature: it is one of them, with a window or soft cap that its layers do not apply, attention that
            is not causal, or rotary frequencies that change with the longest sequence of a batch.
    """
    model_type = getattr(config, "model_type", None)
    named = list(getattr(config, "architectures", None) or [])
    found = next((a for a in SUPPORTED if a.model_type == model_type), None)
    if found is None or any(name != found.causal_lm for name in named):
        raise _unsupported(", ".join(named) or str(model_type or type(config).__name__))
    for name, right in (("is_causal", True), ("use_bidirectional_attention", False)):
        value = getattr(config, name, right)
        if value is not None and bool(value) is not right:
            raise UnsupportedFeature(f"{name}={value}", f"{found.causal_lm} is served as a causal model only")
    _windows(config, found)
    if "softcap" not in found.keywords and (cap := getattr(config, "attn_logit_softcapping", None)) is not None:
        raise UnsupportedFeature(f"attn_logit_softcapping={cap}", f"transformers' {found.causal_lm} does not apply it")
    for rope_type in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if rope_type not in FIXED_ROPE_TYPES:
            raise UnsupportedFeature(
                f"rope_type={rope_type!r}",
                f"rotary frequencies may not change while keys are cached; supported: {', '.join(FIXED_ROPE_TYPES)}",
            )
    return found


def architecture_of(module: Any) -> Architecture:
    """Return the architecture that an attention layer belongs to.

    Raises:
        UnsupportedModel: the module's class is not the attention layer of one of :data:`SUPPORTED`.
    """
    kind = type(module)
    found = _BY_LAYER.get(f"{kind.__module__}.{kind.__qualname__}")
    if found is not None:
        return found
    config = getattr(module, "config", None)
    named = ", ".join(getattr(config, "architectures", None) or []) or str(getattr(config, "model_type", "unknown"))
    raise _unsupported(f"{named} (attention layer {kind.__qualname__})")


def layer_specs(model: Any) -> list[AttentionSpec]:
    """Return the attention spec of every layer of a supported causal language model, in layer order.

    Args:
        model: a transformers causal language model of one of :data:`SUPPORTED`.

    Returns:
        One spec a layer; equal ones where layers are alike. A latent layer's is :meth:`AttentionSpec.mla`.

    Raises:
        InvalidInput: it is no transformers causal language model at all.
        UnsupportedModel: the model is of another class.
        UnsupportedFeature: see :func:`check_supported`; or a latent layer's weights cannot be absorbed.
    """
    config = model_config(model)
    architecture = check_supported(config)
    if type(model).__name__ != architecture.causal_lm:
        raise _unsupported(type(model).__name__)
    heads = config.num_attention_heads
    if architecture.latent:
        check_absorbable(model)
        rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
        spec = AttentionSpec.mla(num_qo_heads=heads, kv_lora_rank=rank, qk_rope_head_dim=rope, dtype=model.dtype)
        return [spec] * config.num_hidden_layers
    spec = AttentionSpec(
        num_qo_heads=heads,
        num_kv_heads=config.num_key_value_heads or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        logits_soft_cap=config.attn_logit_softcapping if "softcap" in architecture.keywords else None,
        learned_sinks="s_aux" in architecture.keywords,
        dtype=model.dtype,
    )
    return [spec.replace(window_left=window_left(window)) for window in _windows(config, architecture)]


def model_config(model: Any) -> Any:
    """Return the configuration of a transformers model. Raises :class:`InvalidInput` where it is no such model."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_input_embeddings"):
        raise InvalidInput("model", expected="a transformers causal language model", got=type(model).__name__)
    return config


def window_left(sliding_window: int | None) -> int | None:
    """Return the farthest that a key may be behind a query, of transformers' window, which counts the query itself.

    >>> window_left(4096), window_left(None)
    (4095, None)
    """
    return None if sliding_window is None else sliding_window - 1


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


def context_length(config: Any) -> int:
    """Return the tokens of the longest sequence that a model's positions are made for.

    Configurations differ in whether ``max_position_embeddings`` counts what rotary scaling adds: the larger is right.
    """
    longest = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    return max(longest, int(rope.get("factor", 1) * rope.get("original_max_position_embeddings", longest)))


def vocab_size(model: Any) -> int:
    """Return the number of rows of a model's token embedding: ids must be below it.

    Raises:
        UnsupportedFeature: the model has logits for more tokens than that, and could generate what it has no row for.
    """
    rows, head = int(model.get_input_embeddings().num_embeddings), model.get_output_embeddings()
    logits = getattr(head, "out_features", rows)
    if logits > rows:
        raise UnsupportedFeature(
            "lm_head", f"it has logits for {logits} tokens, and only {rows} have an embedding; cut it to {rows} rows"
        )
    return rows


_BY_LAYER = {a.attention: a for a in SUPPORTED}


def _windows(config: Any, architecture: Architecture) -> list[int | None]:
    """``sliding_window`` of every layer, as its attention will pass it; refused where that is not what is configured.

    Only architectures whose layers pass a window may have one; others would ignore it.
    """
    window, count = getattr(config, "sliding_window", None), config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window is not None else "full_attention"] * count
    sliding = [i for i, kind in enumerate(kinds) if kind != "full_attention"]
    where = f"{architecture.causal_lm}: this configuration has sliding_window={window} and windows in layers {sliding}"
    if unknown := sorted(set(kinds) - set(LAYER_TYPES)):
        raise UnsupportedFeature(", ".join(unknown), f"layers may be {' or '.join(LAYER_TYPES)}")
    if "sliding_window" not in architecture.keywords and (sliding or window is not None):
        raise UnsupportedFeature("sliding_window", f"{where}, and transformers does not apply them")
    if sliding and window is None:
        raise UnsupportedFeature("sliding_window", f"{where}, and no size for them")
    if sliding and (not is_integer(window) or window < 1):
        raise UnsupportedFeature(f"sliding_window={window}", "a window counts the token itself: it must be at least 1")
    if architecture.window_everywhere and window is not None and len(sliding) != count:
        raise UnsupportedFeature("layer_types", f"{where}, and transformers applies it in all of them")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _rope_types(parameters: dict[str, Any]) -> list[str]:
    """Kinds of rotary frequencies; Gemma3 nests the parameters of its local and its global layers."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [each.get("rope_type", "default") for each in nested or [parameters]]


def _unsupported(name: str) -> UnsupportedModel:
    tested = ", ".join(a.causal_lm for a in SUPPORTED)
    return UnsupportedModel(f"{name} has not been tested with Sennit; supported: {tested}")
