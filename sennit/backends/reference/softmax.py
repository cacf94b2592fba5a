"""Attention weights from logits, and the merge of partial results: the arithmetic that defines what is right."""

from __future__ import annotations

import torch

__all__ = ["add_sinks", "attend_block", "merge_states"]


def attend_block(logits: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over keys, times values.

    Args:
        logits: ``[heads, rows, keys]``, ``-inf`` where a key is hidden.
        v: ``[heads, keys, head_dim_vo]``.

    Returns:
        ``(out [heads, rows, head_dim_vo], lse [heads, rows])``; a row that sees no key gives zeros and ``-inf``.
    """
    if not logits.shape[-1]:
        return logits.new_zeros(*logits.shape[:2], v.shape[-1]), logits.new_full(logits.shape[:2], -torch.inf)
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


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Let learned sinks into the denominator, once and after every merge: keys with a logit and a value of zero.

    Args:
        out: ``[..., dim]``.
        lse: ``[...]``.
        sinks: ``[...]``, the logit of each row's head.
    """
    with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * (lse - with_sinks.masked_fill(with_sinks.isneginf(), 0)).exp_().unsqueeze(-1), with_sinks
