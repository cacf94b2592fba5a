"""Packed masks: a bit for every query row and key of every request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import numpy as np
import torch

from sennit.errors import InvalidInput, UnsupportedFeature
from sennit.plan.batch import Batch
from sennit.plan.integers import INT32_MAX
from sennit.plan.segments import mask_bytes

__all__ = ["device_mask", "pack_mask"]


def pack_mask(masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pack one mask a request for ``plan(packed_mask=)``: what is 0 is hidden, whatever else would let it be seen.

    A request's part has a bit for each of its ``q_len * kv_len`` pairs, row after row: bit ``n % 8`` of byte ``n // 8``
    (the least significant is bit 0) is row ``n // kv_len`` and key ``n % kv_len``. Every request begins at a new byte.
    FlashInfer's packed custom masks have the same form. Keys count in the order in which they are stored.

    Args:
        masks: bool ``[q_len, kv_len]`` of each request, on one device.

    Returns:
        uint8 ``[bytes]`` on that device.

    Raises:
        InvalidInput: a mask is not a bool matrix, or masks are on different devices.

    >>> first = torch.tensor([[True, False, True], [True, True, True]])
    >>> pack_mask([first, torch.ones(1, 1, dtype=torch.bool)]).tolist()
    [61, 1]
    """
    if isinstance(masks, torch.Tensor) or not isinstance(masks, Sequence):
        raise InvalidInput("masks", expected="a list of one bool matrix a request", got=type(masks).__name__)
    parts = []
    for r, mask in enumerate(masks):
        if not _is_dense(mask) or mask.dtype != torch.bool or mask.dim() != 2 or mask.is_meta:
            raise InvalidInput(f"masks[{r}]", expected="a dense bool tensor [q_len, kv_len]", got=_described(mask))
        if mask.device != masks[0].device:
            raise InvalidInput(f"masks[{r}]", expected=f"a tensor on {masks[0].device}", got=f"one on {mask.device}")
        bits = torch.nn.functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8).to(torch.uint8)
        places = torch.arange(8, dtype=torch.uint8, device=mask.device)
        parts.append((bits << places).sum(dim=1, dtype=torch.uint8))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)


def device_mask(mask: object, batch: Batch, device: torch.device, *, fixed: bool) -> torch.Tensor:
    """A packed mask on ``device``, checked against the lengths of its batch.

    Args:
        mask: a uint8 tensor there or on the host, or a NumPy array.
        batch: the lengths.
        device: where it is needed.
        fixed: its address must last, so that it cannot come from the host.

    Raises:
        InvalidInput: another type, dtype, size or device.
        UnsupportedFeature: it is on the host, and must not be.
    """
    if isinstance(mask, np.ndarray) and mask.dtype == np.uint8:
        mask = torch.from_numpy(mask.copy())  # PyTorch warns of read-only memory
    if not _is_dense(mask) or mask.dtype != torch.uint8 or mask.dim() != 1 or not mask.is_contiguous():
        raise InvalidInput(
            "packed_mask", expected="a contiguous uint8 tensor [bytes]", got=_described(mask), hint="see pack_mask"
        )
    total = int(mask_bytes(batch).sum())
    if len(mask) != total or total > INT32_MAX:
        raise InvalidInput(
            "packed_mask",
            expected=f"{total} bytes, the sum of ceil(q_len * kv_len / 8), and at most {INT32_MAX}",
            got=len(mask),
        )
    if mask.device == device:
        return mask if fixed or device.type != "cpu" else mask.clone()  # the host's may change before the plan runs
    if mask.device.type != "cpu":
        raise InvalidInput("packed_mask", expected=f"a tensor on {device} or the host", got=f"one on {mask.device}")
    if fixed:
        raise UnsupportedFeature("packed_mask", "with into= it must be a device tensor, whose address you keep")
    return mask.pin_memory().to(device, non_blocking=True)


def _is_dense(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if not _is_dense(value):
        return f"a nested or sparse tensor ({value.layout})"
    return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
