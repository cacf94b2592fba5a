"""The logits of some rows, heads and keys of a segment: scaled, capped, biased, changed by the user, and masked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sennit.backends.base import Attend
from sennit.backends.reference.keys import Segment
from sennit.backends.reference.variants import evaluate
from sennit.spec import AttentionSpec
from sennit.variants import Graph

__all__ = ["Block", "block_logits"]


@dataclass(frozen=True)
class Block:
    """Rows, heads and keys of one segment.

    Attributes:
        segment: whose they are.
        tokens: int64 ``[rows]``, the token of each row.
        heads: int64 ``[heads, rows]``, the query head of each row, under every KV head.
        keys: int64 ``[keys]``.
    """

    segment: Segment
    tokens: torch.Tensor
    heads: torch.Tensor
    keys: torch.Tensor


def block_logits(launch: Attend, block: Block, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """What softmax is taken of, ``-inf`` where a key is hidden.

    Args:
        launch: the launch.
        block: which rows, heads and keys.
        q: ``[heads, rows, head_dim_qk]``.
        k: ``[heads, keys, head_dim_qk]``.

    Returns:
        ``[heads, rows, keys]`` in q's dtype.
    """
    spec, segment = launch.spec, block.segment
    logits = (q @ k.transpose(1, 2)).mul_(launch.sm_scale)
    if spec.logits_soft_cap is not None:
        logits = logits.div_(spec.logits_soft_cap).tanh_().mul_(spec.logits_soft_cap)
    row_position, key_position = segment.row_positions(block.tokens)[:, None], segment.key_positions(block.keys)
    if launch.alibi_slopes is not None:
        slopes = launch.alibi_slopes.to(logits.dtype)[block.heads].unsqueeze(-1)
        logits = logits + slopes * (key_position - row_position)
    inputs = {
        "b": torch.tensor(segment.request, dtype=torch.int32, device=q.device),
        "h": block.heads.unsqueeze(-1).int(),
        "q_idx": row_position.int(),
        "kv_idx": key_position.int(),
    }
    if isinstance(spec.score_mod, Graph):
        logits = evaluate(spec.score_mod, {"score": logits, **inputs}, launch.captures).to(logits.dtype)
        logits = logits.expand(*block.heads.shape, len(block.keys))
    visible = _visible(spec, launch, block, row_position, key_position)
    if isinstance(spec.mask_mod, Graph):
        visible = visible & evaluate(spec.mask_mod, inputs, launch.captures)
    return logits.masked_fill(~visible, -torch.inf)


def _visible(
    spec: AttentionSpec, launch: Attend, block: Block, row_position: torch.Tensor, key_position: torch.Tensor
) -> torch.Tensor:
    """bool ``[rows, keys]``: what lengths, causality or tree, window and packed mask let a row see."""
    segment = block.segment
    seen = segment.visible(block.tokens, block.keys, row_position)
    behind = row_position - key_position
    if spec.window_left is not None or spec.window_right is not None:
        near = torch.ones_like(seen)
        if spec.window_left is not None:
            near &= behind <= spec.window_left
        if spec.window_right is not None:
            near &= behind >= -spec.window_right
        seen = seen & (near | (key_position < spec.num_sink_tokens))
    if launch.packed_mask is not None:
        bit = block.tokens[:, None] * segment.kv_len + block.keys
        seen = seen & (launch.packed_mask[segment.mask_at + bit // 8] >> (bit % 8) & 1).bool()
    return seen
