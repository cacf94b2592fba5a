"""Memory for pools of pages: on CPUs in huge pages, where the system has them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

import torch

from sennit.cache.capacity import MAX_BYTES

__all__ = ["allocate"]

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14


def allocate(size: int, device: torch.device) -> torch.Tensor:
    """Return ``size`` bytes that hold anything, uint8.

    Pages of a cache are read in no order. With the system's usual pages of 4 KiB each of them costs a walk through page
    tables that are not in any cache either, which halves the bandwidth.

    Raises:
        MemoryError: there are not so many, on whatever device.
    """
    if size > MAX_BYTES:
        raise MemoryError(f"{size} bytes are more than a tensor can have")
    try:
        memory = torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        # Without a type of its own on a CPU; any other failure of a GPU is not about memory.
        if device.type == "cpu" or isinstance(error, torch.OutOfMemoryError):
            raise MemoryError(str(error)) from error
        raise
    if device.type == "cpu" and size >= 2 * HUGE_PAGE and (advise := _madvise()):
        start = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        end = (memory.data_ptr() + size) // HUGE_PAGE * HUGE_PAGE
        advise(start, end - start, MADV_HUGEPAGE)  # advice: where it is not taken, nothing is lost
    return memory


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Linux's ``madvise``."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
