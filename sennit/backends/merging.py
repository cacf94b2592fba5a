"""The merge of results over disjoint keys in plain PyTorch, for backends that have no kernel of their own for it."""

from __future__ import annotations

import torch

__all__ = ["merge_states"]


def merge_states(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge results over disjoint keys: ``out = sum(out_i * exp(lse_i - lse))``, ``lse = log(sum(exp(lse_i)))``.

    Sums are float32, or float64 where the results are.

    Args:
        outs: ``[states, ..., dim]``, of any floating-point dtype, which the merged one has too.
        lses: ``[states, ...]``, natural log.

    Returns:
        ``(out [..., dim], lse [...])``; where every state is empty, zeros and ``-inf``.
    """
    lse = lses.logsumexp(dim=0)
    weights = (lses - lse.masked_fill(lse.isneginf(), 0)).exp_().unsqueeze(-1)
    # A state of weight zero may hold anything, and zero times NaN is NaN.
    exact = outs.to(torch.promote_types(outs.dtype, torch.float32))
    return (weights * exact.masked_fill(weights == 0, 0)).sum(dim=0).to(outs.dtype), lse
