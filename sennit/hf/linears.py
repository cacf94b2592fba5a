"""Linear layers of a model on the CPU backend's kernel for few rows, for the duration of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["few_row_linears", "linears_of"]


def linears_of(model: Any) -> list[torch.nn.Linear]:
    """A model's plain linear layers, without those of derived classes."""
    return [module for module in model.modules() if type(module) is torch.nn.Linear]


@contextmanager
def few_row_linears(layers: Sequence[torch.nn.Linear]) -> Iterator[None]:
    """Where the CPU backend can, let these layers multiply few rows (decodes, chosen rows of the head) by its kernel.

    Whatever else they are given goes to PyTorch, as before, and layers whose ``forward`` somebody has replaced stay so.
    Results are rounded once, to bfloat16, from float32 sums.
    """
    from sennit.backends.cpu import linear as kernel

    changed = [layer for layer in layers if not _replaced(layer)] if kernel.ready() else []
    try:
        for layer in changed:
            layer.__dict__["forward"] = _forward(layer, kernel)
        yield
    finally:
        for layer in changed:
            layer.__dict__.pop("forward", None)


def _replaced(layer: torch.nn.Linear) -> bool:
    return "forward" in layer.__dict__


def _forward(layer: torch.nn.Linear, kernel: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(input: torch.Tensor) -> torch.Tensor:  # named as torch.nn.Linear's, for calls by keyword
        if torch.compiler.is_compiling() or not kernel.can_multiply(input, layer.weight, layer.bias):
            return type(layer).forward(layer, input)
        result: torch.Tensor = kernel.linear(input, layer.weight, layer.bias)
        return result

    return forward
