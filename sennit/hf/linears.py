"""Linear layers of a model on the CPU backend's kernel for few rows, for the duration of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    changed = {layer: _FewRows(layer, kernel) for layer in layers if not _replaced(layer)} if kernel.ready() else {}
    try:
        for layer, forward in changed.items():
            layer.__dict__["forward"] = forward
        yield
    finally:
        for layer, forward in changed.items():
            if layer.__dict__.get("forward") is forward:
                del layer.__dict__["forward"]


def _replaced(layer: torch.nn.Linear) -> bool:
    return "forward" in layer.__dict__


class _FewRows:
    """A layer's ``forward`` for the duration of a step; copies that are made of the layer meanwhile have their own."""

    def __init__(self, layer: torch.nn.Linear, kernel: Any) -> None:
        self._layer, self._kernel = layer, kernel

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # named as torch.nn.Linear's, for calls by keyword
        layer, kernel = self._layer, self._kernel
        if torch.compiler.is_compiling() or not kernel.can_multiply(input, layer.weight, layer.bias):
            return type(layer).forward(layer, input)
        result: torch.Tensor = kernel.linear(input, layer.weight, layer.bias)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._layer, "forward")  # of a layer that is being copied and has no state yet: its class's
