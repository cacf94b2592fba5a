"""Products of few rows with a linear layer's weights, read once and where they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from sennit.backends.cpu.failures import built
from sennit.backends.cpu.libraries import function, linear_source
from sennit.backends.cpu.threads import parallel_function

__all__ = ["MOST_ROWS", "can_multiply", "linear", "ready"]

MOST_ROWS = 32  # of more, PyTorch's own products are as fast
UNIT = 32  # numbers that the kernel takes at once


def ready() -> bool:
    """Whether the processor multiplies pairs of bfloat16 and the kernel is there; it is built now if it can be."""
    return linear_source() is not None and built(_kernel).accepted


def can_multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether :func:`linear` takes these: few rows, bfloat16 on a CPU, whole units, and no gradients asked for."""
    dim = x.shape[-1]
    return (
        x.dtype == weight.dtype == torch.bfloat16
        and x.is_cpu
        and weight.is_cpu
        and 0 < x.numel() <= MOST_ROWS * dim
        and weight.dim() == 2
        and weight.shape[1] == dim
        and dim % UNIT == 0
        and weight.stride(1) == 1
        and (bias is None or (bias.dtype == torch.bfloat16 and bias.is_cpu and bias.is_contiguous()))
        and not torch.is_grad_enabled()
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``, with sums in float32, for what :func:`can_multiply` holds.

    PyTorch rearranges weights in every such call, and reads them at a third of the speed of memory.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]``, or None.

    Returns:
        ``[..., out]``.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = x.new_empty(len(rows), len(weight))
    _kernel()(parallel_function(), torch.get_num_threads(), rows, weight, bias, out)
    return out.view(*x.shape[:-1], len(weight))


@cache
def _kernel() -> Callable[..., Any]:
    source = linear_source()
    assert source is not None
    return function(source, "linear")
