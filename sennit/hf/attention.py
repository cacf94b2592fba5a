"""The attention function registered in transformers: packed steps over a KVCache, and padded batches without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from sennit.attention import BatchAttention
from sennit.errors import InvalidInput, PlanMismatch, UnsupportedFeature
from sennit.hf.latent import attend_latent
from sennit.hf.masks import KeyRanges, key_ranges, no_mask
from sennit.hf.models import architecture_of, window_left
from sennit.spec import AttentionSpec

__all__ = ["NAME", "attention_forward", "register"]

# The name under which both functions are registered: `attn_implementation="sennit"`.
NAME = "sennit"

# Keywords that say nothing which attention would have to obey.
HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_hidden_states", "output_router_logits", "num_items_in_batch"}
)

ADVICE = {
    "output_attentions": "attention weights are never formed; use attn_implementation='eager' for them",
    "sliding_window": "this architecture has not been tested with a window",
    "softcap": "this architecture has not been tested with a soft cap",
    "s_aux": "this architecture has not been tested with learned sinks",
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
            :class:`sennit.KVCache` step, whose cache holds everything before them; layers that store latents also
            need ``sennit_latents`` (:func:`sennit.hf.step_keywords` gives all of them). A window (``sliding_window``),
            soft cap (``softcap``) or learned sinks (``s_aux``, ``[num_qo_heads]``) are taken from the architectures
            that have them. Anything else that would change the result is refused.

    Returns:
        ``([batch, q_length, num_qo_heads, head_dim], None)``; a query that sees no key gives zeros.

    Raises:
        UnsupportedModel: the layer belongs to an architecture that has not been tested.
        UnsupportedFeature: a mask, keyword, dropout or gradient that Sennit cannot serve.
        InvalidInput: shapes disagree with the mask, or the mask is not Sennit's.
        PlanMismatch: window, cap or sinks are not those of the mask or of the step's cache.
    """
    step, latents = kwargs.pop("sennit_step", None), kwargs.pop("sennit_latents", None)
    layer = _Layer(**{name: kwargs.pop(name, None) for name in architecture_of(module).keywords})
    _refuse_unsupported(module, (query, key, value), dropout, kwargs)
    sm_scale: float = module.scaling if scaling is None else scaling  # type: ignore[assignment]
    if step is None:
        return _attend_padded((query, key, value), layer, attention_mask, sm_scale), None
    _refuse_mask(attention_mask, query.device)
    spec: AttentionSpec = step.plan(module.layer_idx).spec
    layer.check_spec(spec, module)
    if spec.latent:
        return attend_latent(module, step, latents, query, sm_scale).unsqueeze(0), None
    return _attend_step(module, step, (query, key, value), layer, sm_scale), None


@dataclass(frozen=True)
class _Layer:
    """What a layer asks for beyond plain attention, under the names of transformers' keywords."""

    sliding_window: int | None = None
    softcap: float | None = None
    s_aux: torch.Tensor | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The same as fields of an :class:`AttentionSpec`."""
        return {
            "window_left": window_left(self.sliding_window),
            "logits_soft_cap": self.softcap,
            "learned_sinks": self.s_aux is not None,
        }

    @property
    def sinks(self) -> torch.Tensor | None:
        """The learned sinks as ``run`` takes them."""
        return None if self.s_aux is None else self.s_aux.detach().float()

    def check_spec(self, spec: AttentionSpec, module: torch.nn.Module) -> None:
        """Refuse a cache whose layer computes something else."""
        for name, asked in self.fields.items():
            if (planned := getattr(spec, name)) != asked:
                raise PlanMismatch(
                    "sennit_step",
                    expected=f"a cache whose layer {module.layer_idx} has {name}={asked}, as the model's has",
                    got=f"{name}={planned}",
                    hint="make it of sennit.hf.layer_specs(model)",
                )


def _refuse_mask(mask: Any, device: torch.device) -> None:
    """Refuse a mask given to a packed step. (One that transformers makes of the step's positions says nothing.)"""
    given = mask.masked if isinstance(mask, KeyRanges) else mask is not None and mask is not no_mask(device)
    if given:
        raise UnsupportedFeature(
            "attention_mask", "a packed step has no padding: who sees whom is what its cache holds; leave the mask out"
        )


def _attend_step(
    module: torch.nn.Module,
    step: Any,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layer: _Layer,
    sm_scale: float,
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
    out: torch.Tensor = step.attend(module.layer_idx, q, k, v, sm_scale=sm_scale, sinks=layer.sinks)
    return out.unsqueeze(0)


def _attend_padded(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], layer: _Layer, ranges: KeyRanges | None, sm_scale: float
) -> torch.Tensor:
    query, key, value = qkv
    ranges = _check_ranges(ranges, query, key, layer.sliding_window)
    heads, dim = query.shape[1], query.shape[3]
    spec = AttentionSpec(
        num_qo_heads=heads,
        num_kv_heads=key.shape[1],
        head_dim_qk=dim,
        head_dim_vo=value.shape[3],
        dtype=query.dtype,
        kv_dtype=key.dtype,
        **layer.fields,
    )
    attention = _batch_attention(spec, query.device)
    plan = ranges.plans.get((spec, query.device))
    if plan is None:
        batch, causal = ranges.requests()
        plan = ranges.plans[spec, query.device] = attention.plan(batch, causal=causal)
    keys, values = (_packed(t[:, :, : ranges.visible]) for t in (key, value))
    out: torch.Tensor = attention.run(plan, _packed(query), (keys, values), sm_scale=sm_scale, sinks=layer.sinks)
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


def _check_ranges(ranges: Any, query: torch.Tensor, key: torch.Tensor, window: int | None) -> KeyRanges:
    if not isinstance(ranges, KeyRanges):
        got = type(ranges).__name__ + (f" of shape {tuple(ranges.shape)}" if isinstance(ranges, torch.Tensor) else "")
        raise InvalidInput(
            "attention_mask",
            expected="no mask, or a padding mask [batch, length]",
            got="nothing at the attention layer" if ranges is None else got,
            hint="call the layer through its model, which asks Sennit for the mask, and not while a batcher's step "
            "runs the model in another thread; 4-D masks need attn_implementation='sdpa'",
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
    if ranges.window != window:
        raise PlanMismatch(
            "sliding_window", expected=f"{ranges.window}, as the mask was made for", got=f"{window} at the layer"
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
