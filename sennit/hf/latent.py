"""Latent attention (MLA) in packed steps: a layer's latents go to the cache as they are, its weights into q and out."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch

from sennit.errors import InvalidInput, UnsupportedFeature

__all__ = ["LatentRows", "attend_latent", "check_absorbable", "latent_keywords"]


class LatentRows:
    """Takes the place of a transformers cache in one packed step over latent layers (transformers 5.15 and newer).

    A layer hands what it would cache to :meth:`update`, before it expands it to keys and values of every head. Here
    the new tokens' latents wait for :func:`attend_latent`, and one row goes back, so that next to nothing is expanded.
    """

    def __init__(self) -> None:
        self._rows: dict[int, torch.Tensor] = {}

    def update(
        self, latent: torch.Tensor, rope: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep what a layer would cache of its new tokens.

        Args:
            latent: ``[1, 1, tokens, kv_lora_rank]``.
            rope: rotated keys, ``[1, 1, tokens, qk_rope_head_dim]``.
            layer_idx: the layer.

        Returns:
            The first row of each.
        """
        if latent.shape[0] != 1:
            raise InvalidInput(
                "sennit_step",
                expected="one packed row of new tokens, input_ids [1, tokens]",
                got=f"batch {latent.shape[0]}",
            )
        self._rows[layer_idx] = torch.cat([latent, rope], dim=-1)[0, 0]
        return latent[:, :, :1], rope[:, :, :1]

    def take(self, layer_idx: int) -> torch.Tensor | None:
        """Return what a layer handed over, ``[tokens, kv_lora_rank + qk_rope_head_dim]``, if it did, and forget it."""
        return self._rows.pop(layer_idx, None)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Zero: positions come from the step."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """No keys but the new ones, from the first: transformers asks while it makes a mask, which a step ignores."""
        return query_length, 0


def latent_keywords(model: Any) -> dict[str, Any]:
    """Return the keywords with which one packed step of a model with latent layers is called beside the others.

    They are the stand-in for a cache, under the name that transformers gives the argument (``past_key_values`` up to
    5.23, ``cache`` from 5.24) and under the one by which the attention function finds it.
    """
    rows = LatentRows()
    model_class: Any = type(model)
    return {_cache_argument(model_class): rows, "sennit_latents": rows}


@cache
def _cache_argument(model_class: Any) -> str:
    return "cache" if "cache" in inspect.signature(model_class.forward).parameters else "past_key_values"


def attend_latent(
    module: Any, step: Any, rows: LatentRows | None, query: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """Attention of one latent layer over the step's cache, without ever expanding keys and values.

    The layer's ``kv_b_proj`` holds, for each head, ``W_UK`` and ``W_UV``, with which a key is ``W_UK c`` and a value
    ``W_UV c`` of the latent ``c``. So ``q . (W_UK c)`` is ``(W_UK^T q) . c``, and a weighted sum of values is ``W_UV``
    times that sum of latents (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

    Args:
        module: the attention layer.
        step: the open step of a cache of :meth:`sennit.AttentionSpec.mla` layers.
        rows: what stood in for the cache of this forward.
        query: ``[1, heads, tokens, qk_nope_head_dim + qk_rope_head_dim]``.
        sm_scale: factor of the logits.

    Returns:
        ``[tokens, heads, v_head_dim]``.

    Raises:
        InvalidInput: nothing stood in for the cache.
        UnsupportedFeature: the weights cannot be absorbed.
    """
    latents = None if rows is None else rows.take(module.layer_idx)
    if latents is None:
        raise InvalidInput(
            "sennit_latents",
            expected="sennit.hf.step_keywords(model, step) among the arguments of the forward",
            got="nothing that the layer's latents went to",
            hint="they go to what stands in for a transformers cache",
        )
    _check_projection(module, query.dtype)
    nope, rope = module.qk_nope_head_dim, module.qk_rope_head_dim
    weight = module.kv_b_proj.weight.view(module.num_heads, nope + module.v_head_dim, module.kv_lora_rank)
    w_uk, w_uv = torch.split(weight, [nope, module.v_head_dim], dim=1)
    q_nope, q_rope = torch.split(query[0], [nope, rope], dim=-1)
    q = torch.cat([q_nope @ w_uk, q_rope], dim=-1).transpose(0, 1)
    out: torch.Tensor = step.attend(module.layer_idx, q, latents, sm_scale=sm_scale)
    return (out.transpose(0, 1) @ w_uv.transpose(1, 2)).transpose(0, 1)


def check_absorbable(model: Any) -> None:
    """Refuse a model whose latent layers have weights that are more than a plain matrix.

    Raises:
        UnsupportedFeature: a ``kv_b_proj`` is quantized, adapted or otherwise no plain ``torch.nn.Linear``, or
            has hooks.
    """
    for module in model.modules():
        if hasattr(module, "kv_b_proj"):
            _check_projection(module, model.dtype)


def _check_projection(module: Any, dtype: torch.dtype) -> None:
    projection = module.kv_b_proj
    weight = getattr(projection, "weight", None)
    # Subclasses of both are how quantized, sharded and adapted weights come.
    plain = type(projection) is torch.nn.Linear and type(weight) is torch.nn.Parameter and projection.bias is None
    held_dtype = getattr(weight, "dtype", None)
    if not plain or held_dtype != dtype:
        kind, held = type(projection).__name__, f"{type(weight).__name__} of {held_dtype}"
        raise UnsupportedFeature(
            "kv_b_proj",
            f"its weights are absorbed into queries and outputs, which takes a plain torch.nn.Linear of {dtype} "
            f"without a bias, and layer {module.layer_idx} has a {kind} with a {held}; merge adapters, or load the "
            "model unquantized",
        )
    if "forward" in vars(projection) or projection._forward_hooks or projection._forward_pre_hooks:
        raise UnsupportedFeature(
            "kv_b_proj",
            f"its weights are absorbed into queries and outputs, so that its forward never runs, and that of layer "
            f"{module.layer_idx} has hooks or was replaced; remove them",
        )
