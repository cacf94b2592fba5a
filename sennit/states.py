"""Merging attention results over disjoint sets of keys, by log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sennit import ops  # noqa: F401  # defines torch.ops.sennit.merge_states
from sennit.backends import registry
from sennit.errors import InvalidInput
from sennit.spec import QUERY_DTYPES

__all__ = ["merge_states"]


def merge_states(states: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention results over disjoint sets of keys, such as a shared prefix and what follows it.

    Args:
        states: ``(out [rows, heads, dim], lse [rows, heads])`` of each set, ``out`` in a dtype of specs; LSE is
            natural-log, float32. ``-inf`` marks a row without keys; ``+inf``, which no finite logits give, would make
            that row NaN.

    Returns:
        ``(out, lse)`` over all keys together: ``lse = log(sum(exp(lse_i)))``, ``out = sum(out_i exp(lse_i - lse))``
        (Milakov and Gimelshein, arXiv:1805.02867). Rows that are empty everywhere give zeros and ``-inf``.

    Raises:
        InvalidInput: no state, one that is no pair of such tensors, or shapes, dtypes or devices that differ.

    >>> out, lse = merge_states([(torch.ones(1, 1, 2), torch.zeros(1, 1)), (torch.zeros(1, 1, 2), torch.zeros(1, 1))])
    >>> out, lse
    (tensor([[[0.5000, 0.5000]]]), tensor([[0.6931]]))
    """
    try:
        pairs = iter(states)
    except TypeError:
        raise InvalidInput("states", expected="a list of (out, lse)", got=type(states).__name__) from None
    outs: list[torch.Tensor] = []
    lses: list[torch.Tensor] = []
    for index, pair in enumerate(pairs):
        out, lse = _checked_pair(f"states[{index}]", pair)
        if outs and (out.shape != outs[0].shape or out.dtype != outs[0].dtype or out.device != outs[0].device):
            raise InvalidInput(
                f"states[{index}]: out",
                expected=f"{outs[0].dtype} {tuple(outs[0].shape)} on {outs[0].device}, as states[0]",
                got=f"{out.dtype} {tuple(out.shape)} on {out.device}",
            )
        outs.append(out)
        lses.append(lse)
    if not outs:
        raise InvalidInput("states", expected="at least one (out, lse)", got="none")
    backend = registry.candidates("auto", outs[0].device)[-1]
    merged: tuple[torch.Tensor, torch.Tensor] = torch.ops.sennit.merge_states(
        backend, torch.stack(outs), torch.stack(lses)
    )
    return merged


def _checked_pair(name: str, pair: object) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        got = f"{len(pair)} entries" if isinstance(pair, (tuple, list)) else type(pair).__name__
        raise InvalidInput(name, expected="a pair (out, lse)", got=got)
    for part, tensor in zip(("out", "lse"), pair, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInput(f"{name}: {part}", expected="a tensor", got=type(tensor).__name__)
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise InvalidInput(f"{name}: {part}", expected="a dense tensor", got=f"a {kind} one")
        if tensor.requires_grad:
            raise InvalidInput(
                f"{name}: {part}", expected="a tensor without gradients", got="one with requires_grad=True",
                hint="Sennit is for inference: run the model under torch.inference_mode() or torch.no_grad()",
            )  # fmt: skip
    out, lse = pair
    if out.dim() != 3 or out.dtype not in QUERY_DTYPES:
        raise InvalidInput(
            f"{name}: out", expected=f"[rows, heads, dim] of {', '.join(map(str, QUERY_DTYPES))}",
            got=f"{out.dtype} {tuple(out.shape)}",
        )  # fmt: skip
    if lse.shape != out.shape[:-1] or lse.dtype != torch.float32 or lse.device != out.device:
        raise InvalidInput(
            f"{name}: lse", expected=f"float32 {tuple(out.shape[:-1])} on {out.device}",
            got=f"{lse.dtype} {tuple(lse.shape)} on {lse.device}",
        )  # fmt: skip
    return out, lse
