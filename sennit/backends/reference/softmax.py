"""Attention of some rows over some keys, and the merge of such results: the arithmetic that defines what is right."""

from __future__ import annotations

import torch

__all__ = ["attend_block", "merge_states"]


def attend_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of ``rows`` queries over ``keys`` keys, heads side by side.

    Args:
        q: ``[heads, rows, head_dim_qk]``.
        k: ``[heads, keys, head_dim_qk]``.
        v: ``[heads, keys, head_dim_vo]``.
        visible: bool ``[rows, keys]``.
        sm_scale: factor of the logits.

    Returns:
        ``(out [heads, rows, head_dim_vo], lse [heads, rows])`` in q's dtype; a row that sees no key gives zeros and
        ``-inf``.
    """
    logits = (q @ k.transpose(1, 2)).mul_(sm_scale).masked_fill_(~visible, -torch.inf)
    if not logits.shape[-1]:
        return q.new_zeros(*q.shape[:2], v.shape[-1]), q.new_full(q.shape[:2], -torch.inf)
    largest = logits.amax(dim=-1, keepdim=True)
    weights = (logits - largest.masked_fill(largest.isneginf(), 0)).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    out = (weights @ v) / total.masked_fill(total == 0, 1)
    return out, (largest + total.log()).squeeze(-1)


def merge_states(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge results over disjoint keys: ``out = sum(out_i * exp(lse_i - lse))``, ``lse = log(sum(exp(lse_i)))``.

    Args:
        outs: ``[states, ..., dim]``.
        lses: ``[states, ...]``, natural log.

    Returns:
        ``(out [..., dim], lse [...])``; where every state is empty, zeros and ``-inf``.
    """
    lse = lses.logsumexp(dim=0)
    weights = (lses - lse.masked_fill(lse.isneginf(), 0)).exp_().unsqueeze(-1)
    # A state of weight zero may hold anything, and zero times NaN is NaN.
    return (weights * outs.masked_fill(weights == 0, 0)).sum(dim=0), lse
