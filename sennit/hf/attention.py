"""The attention function registered in transformers: packed steps over a KVCache, and padded batches without one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from sennit.attention import BatchAttention
from sennit.errors import InvalidInput, PlanMismatch, UnsupportedFeature
from sennit.hf.masks import KeyRanges, key_ranges
from sennit.hf.models import check_attention_module
from sennit.spec import AttentionSpec

__all__ = ["NAME", "attention_forward", "register"]

# The name under which both functions are registered: `attn_implementation="sennit"`.
NAME = "sennit"

# Keywords that say nothing which attention would have to obey.
HARMLESS = frozenset({"position_ids", "use_cache", "output_hidden_states", "num_items_in_batch"})

ADVICE = {
    "output_attentions": "attention weights are never formed; use attn_implementation='eager' for them",
    "sliding_window": "no supported architecture has been tested with a window",
    "softcap": "no supported architecture caps its logits",
    "s_aux": "no supported architecture has learned sinks",
}


def register() -> None:
    """Enter the attention and the mask function into transformers' registries under :data:`NAME`.

    Under ``torch.compile`` both run as they are, between compiled pieces: they plan on the host.
    """
    AttentionInterface.register(NAME, _between_graphs(attention_forward))
    AttentionMaskInterface.register(NAME, _between_graphs(key_ranges))


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: KeyRanges | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, as transformers' models call it.

    Args:
        module: the attention layer.
        query: ``[batch, num_qo_heads, q_length, head_dim]``.
        key, value: ``[batch, num_kv_heads, kv_length, head_dim]``, cached tokens included.
        attention_mask: what :func:`sennit.hf.masks.key_ranges` returned for this forward.
        scaling: factor of the logits; the layer's own ``scaling`` when left out.
        dropout: must be 0.
        **kwargs: ``sennit_step=step`` makes this a packed step: ``batch`` is 1, its tokens are those of the open
            :class:`sennit.KVCache` step, whose cache holds everything before them. Anything else that would change
            the result is refused.

    Returns:
        ``([batch, q_length, num_qo_heads, head_dim], None)``; a query that sees no key gives zeros.

    Raises:
        UnsupportedModel: the layer belongs to an architecture that has not been tested.
        UnsupportedFeature: a mask, keyword, dropout or gradient that Sennit cannot serve.
        InvalidInput: shapes disagree with the mask, or the mask is not Sennit's.
    """
    step = kwargs.pop("sennit_step", None)
    check_attention_module(module)
    _refuse_unsupported(module, (query, key, value), dropout, kwargs)
    sm_scale: float = module.scaling if scaling is None else scaling  # type: ignore[assignment]
    if step is not None:
        return _attend_step(module, step, (query, key, value), sm_scale), None
    return _attend_padded(query, key, value, attention_mask, sm_scale), None


def _attend_step(
    module: torch.nn.Module, step: Any, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], sm_scale: float
) -> torch.Tensor:
    query, key, _ = qkv
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise InvalidInput(
            "sennit_step",
            expected="one packed row of new tokens, input_ids [1, tokens], without a transformers cache",
            got=f"batch {query.shape[0]}, {query.shape[2]} queries and {key.shape[2]} keys",
            hint="pass use_cache=False",
        )
    q, k, v = (t[0].transpose(0, 1) for t in qkv)
    out: torch.Tensor = step.attend(module.layer_idx, q, k, v, sm_scale=sm_scale)
    return out.unsqueeze(0)


def _attend_padded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ranges: KeyRanges | None, sm_scale: float
) -> torch.Tensor:
    ranges = _check_ranges(ranges, query, key)
    heads, dim = query.shape[1], query.shape[3]
    spec = AttentionSpec(
        num_qo_heads=heads,
        num_kv_heads=key.shape[1],
        head_dim_qk=dim,
        head_dim_vo=value.shape[3],
        dtype=query.dtype,
        kv_dtype=key.dtype,
    )
    attention = _batch_attention(spec, query.device)
    plan = ranges.plans.get((spec, query.device))
    if plan is None:
        batch, causal = ranges.requests()
        plan = ranges.plans[spec, query.device] = attention.plan(batch, causal=causal)
    keys, values = (_packed(t[:, :, : ranges.visible]) for t in (key, value))
    out: torch.Tensor = attention.run(plan, _packed(query), (keys, values), sm_scale=sm_scale)
    return out.view(ranges.batch_size, ranges.q_length, heads, value.shape[3])


def _between_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    # `disable` alone would cost every layer of every step more than ten microseconds.
    disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call


@lru_cache(maxsize=64)
def _batch_attention(spec: AttentionSpec, device: torch.device) -> BatchAttention:
    return BatchAttention(spec, device=device)


def _packed(padded: torch.Tensor) -> torch.Tensor:
    """``[batch, heads, length, dim]`` as rows ``[batch * length, heads, dim]``."""
    return padded.transpose(1, 2).reshape(-1, padded.shape[1], padded.shape[3])


def _check_ranges(ranges: Any, query: torch.Tensor, key: torch.Tensor) -> KeyRanges:
    if not isinstance(ranges, KeyRanges):
        got = type(ranges).__name__ + (f" of shape {tuple(ranges.shape)}" if isinstance(ranges, torch.Tensor) else "")
        raise InvalidInput(
            "attention_mask",
            expected="no mask, or a padding mask [batch, length]",
            got="nothing at the attention layer" if ranges is None else got,
            hint="call the layer through its model, which asks Sennit for the mask; 4-D masks need "
            "attn_implementation='sdpa'",
        )
    if ranges.problem:
        raise UnsupportedFeature("attention_mask", ranges.problem)
    expected = (ranges.batch_size, ranges.q_length, ranges.kv_length)
    got_sizes = (query.shape[0], query.shape[2], key.shape[2])
    if expected != got_sizes:
        raise PlanMismatch(
            "query and key",
            expected=f"batch {expected[0]} with {expected[1]} queries and {expected[2]} keys, as the mask was made for",
            got=f"batch {got_sizes[0]} with {got_sizes[1]} queries and {got_sizes[2]} keys",
        )
    return ranges


def _refuse_unsupported(
    module: torch.nn.Module, tensors: tuple[torch.Tensor, ...], dropout: float, kwargs: dict[str, Any]
) -> None:
    if dropout:
        raise UnsupportedFeature("dropout", f"attention dropout of {dropout} belongs to training; call model.eval()")
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise UnsupportedFeature(
            "requires_grad", "Sennit is for inference; run the model under torch.inference_mode() or torch.no_grad()"
        )
    if not (getattr(module, "is_causal", True) and kwargs.get("is_causal") in (None, True)):
        raise UnsupportedFeature("is_causal", "only causal attention is supported")
    config = getattr(module, "config", None)
    asked = {"output_attentions": getattr(config, "output_attentions", None) or None} | kwargs
    for name, value in asked.items():
        if name in HARMLESS or name == "is_causal" or value is None or (name == "output_attentions" and not value):
            continue
        raise UnsupportedFeature(name, ADVICE.get(name, "this attention keyword is not known to Sennit"))
