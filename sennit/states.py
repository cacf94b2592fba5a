"""Merging attention results over disjoint sets of keys, by log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sennit import ops  # noqa: F401  # defines torch.ops.sennit.merge_states
from sennit.backends import registry
from sennit.errors import InvalidInput

__all__ = ["merge_states"]


def merge_states(states: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention results over disjoint sets of keys, such as a shared prefix and what follows it.

    Args:
        states: ``(out [rows, heads, dim], lse [rows, heads])`` of each set; LSE is natural-log, float32.

    Returns:
        ``(out, lse)`` over all keys together: ``lse = log(sum(exp(lse_i)))``, ``out = sum(out_i exp(lse_i - lse))``
        (Milakov and Gimelshein, arXiv:1805.02867). Rows that are empty everywhere give zeros and ``-inf``.

    Raises:
        InvalidInput: no state, or shapes, dtypes or devices that differ.

    >>> out, lse = merge_states([(torch.ones(1, 1, 2), torch.zeros(1, 1)), (torch.zeros(1, 1, 2), torch.zeros(1, 1))])
    >>> out, lse
    (tensor([[[0.5000, 0.5000]]]), tensor([[0.6931]]))
    """
    if not states:
        raise InvalidInput("states", expected="at least one (out, lse)", got="none")
    first, _ = states[0]
    for index, (out, lse) in enumerate(states):
        if out.shape != first.shape or out.dtype != first.dtype or out.device != first.device:
            raise InvalidInput(
                f"states[{index}]: out", expected=f"{first.dtype} {tuple(first.shape)} on {first.device}",
                got=f"{out.dtype} {tuple(out.shape)} on {out.device}",
            )  # fmt: skip
        if lse.shape != out.shape[:-1] or lse.dtype != torch.float32 or lse.device != first.device:
            raise InvalidInput(
                f"states[{index}]: lse", expected=f"float32 {tuple(out.shape[:-1])} on {first.device}",
                got=f"{lse.dtype} {tuple(lse.shape)} on {lse.device}",
            )  # fmt: skip
    backend = registry.candidates("auto", first.device)[-1]
    outs, lses = torch.stack([out for out, _ in states]), torch.stack([lse for _, lse in states])
    merged: tuple[torch.Tensor, torch.Tensor] = torch.ops.sennit.merge_states(backend, outs, lses)
    return merged
