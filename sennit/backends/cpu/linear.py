"""Products of few rows with a linear layer's weights, read once and where they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from sennit.backends.cpu.failures import built
from sennit.backends.cpu.instructions import PAIR_SETS, instruction_set
from sennit.backends.cpu.libraries import function, linear_source
from sennit.backends.cpu.threads import parallel_function

__all__ = ["MOST_ROWS", "can_multiply", "linear", "ready"]

MOST_ROWS = 32  # of more, PyTorch's own products were as fast on Zen 4
UNIT = 32  # numbers that the kernel takes at once
PLAIN = (torch.Tensor, torch.nn.Parameter)


def ready() -> bool:
    """Whether the processor multiplies pairs of bfloat16 and the kernel is there; it is built now if it can be."""
    return instruction_set().name in PAIR_SETS and built(_kernel).accepted


def can_multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether :func:`linear` takes these: few rows, bfloat16 on a CPU, whole units, and no gradients asked for.

    Subclasses of tensors are how quantised, sharded and adapted weights come; they compute by themselves.
    """
    if type(x) is not torch.Tensor or type(weight) not in PLAIN or not x.dim():
        return False
    dim = x.shape[-1]
    return (
        not torch._C._are_functorch_transforms_active()
        and x.dtype == weight.dtype == torch.bfloat16
        and x.is_cpu
        and weight.is_cpu
        and weight.layout == torch.strided
        and 0 < x.numel() <= MOST_ROWS * dim
        and weight.dim() == 2
        and weight.shape[1] == dim
        and dim % UNIT == 0
        and weight.stride(1) == 1
        and (bias is None or _fits(bias, weight))
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``, with sums in float32, for what :func:`can_multiply` holds; subnormal numbers count as 0.

    PyTorch rearranges weights in every such call, which takes longer than reading them.

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


def _fits(bias: torch.Tensor, weight: torch.Tensor) -> bool:
    kind = type(bias) in PLAIN and bias.dtype == torch.bfloat16 and bias.is_cpu and bias.layout == torch.strided
    return kind and bias.shape == weight.shape[:1] and bias.is_contiguous()


@cache
def _kernel() -> Callable[..., Any]:
    return function(linear_source(), "linear")
