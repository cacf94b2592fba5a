"""Attention weights from logits, and learned sinks: the arithmetic that defines what is right."""

from __future__ import annotations

import torch

__all__ = ["add_sinks", "attend_block"]


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


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Let learned sinks into the denominator, once and after every merge: keys with a logit and a value of zero.

    Args:
        out: ``[..., dim]``.
        lse: ``[...]``.
        sinks: ``[...]``, the logit of each row's head.
    """
    with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * (lse - with_sinks.masked_fill(with_sinks.isneginf(), 0)).exp_().unsqueeze(-1), with_sinks
