"""Writing into pages on GPUs: appends, copies of whole pages, and merges of states, the same for all backends there."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch

from sennit.backends.base import Append
from sennit.backends.floats import dense_columns
from sennit.backends.gpus.device import made_current
from sennit.backends.gpus.launching import ALIGNED, addresses, contiguous, remember
from sennit.backends.merging import merge_states

__all__ = ["PagedCache", "forget"]

ELEMENTS_AT_ONCE = 1024  # of a page that is copied
APPENDED_ROWS, SEGMENTS_AT_ONCE = 4, 128

_appends: dict[tuple[Any, ...], Any] = {}  # compiled kernels, the oldest first


def forget() -> None:
    """Forget compiled kernels, since another device takes the place of theirs."""
    _appends.clear()


class PagedCache:
    """What backends on GPUs do to pages."""

    def append(self, launch: Append) -> None:
        """See :class:`~sennit.backends.base.Backend`."""
        rows = launch.k.shape[0]
        if not rows:
            return
        k, v = dense_columns(launch.k), None if launch.v is None else dense_columns(launch.v)
        spec, k_pages, v_pages = launch.spec, launch.k_pages, launch.v_pages
        strides = (
            *k.stride()[:2],
            *((0, 0) if v is None else v.stride()[:2]),
            *k_pages.stride()[:3],
            *((0, 0, 0) if v_pages is None else v_pages.stride()[:3]),
        )
        tensors = (
            launch.plan, launch.page_table, contiguous(launch.kv_lens), launch.slots, k, v, k_pages, v_pages
        )  # fmt: skip
        others = (
            rows, *strides, launch.page_size, spec.head_dim_qk, spec.head_dim_vo, _power_of_two(spec.head_dim_qk),
            _power_of_two(spec.head_dim_vo), APPENDED_ROWS, SEGMENTS_AT_ONCE,
        )  # fmt: skip
        form = (
            k.dtype, k.device.index, launch.kv_lens is None, launch.slots is None, others[1:],
            *(None if pool is None else pool.data_ptr() % ALIGNED for pool in (k, v, k_pages, v_pages)),
        )  # fmt: skip
        grid = (-(-rows // APPENDED_ROWS), spec.num_kv_heads, 1)
        with made_current(k.device):
            if (known := _appends.get(form)) is not None:
                known[grid](*addresses(tensors), *others)
            else:
                compiled = _append_kernel()[grid](*tensors, *others, enable_fp_fusion=True)
                remember(_appends, form, compiled)

    def merge(self, outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~sennit.backends.base.Backend`."""
        return merge_states(outs, lses)

    def copy_pages(self, pages: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """See :class:`~sennit.backends.base.Backend`."""
        sizes, strides = _runs(pages)
        if not len(source) or not prod(sizes):
            return
        with made_current(pages.device):
            _copy_pages_kernel()[(len(source), -(-prod(sizes) // ELEMENTS_AT_ONCE), 1)](
                pages, source.long(), target.long(), *sizes, pages.stride(0), *strides,
                elements=ELEMENTS_AT_ONCE, enable_fp_fusion=True,
            )  # fmt: skip


@cache
def _append_kernel() -> Any:
    from sennit.backends.gpus.kernels.cache import append_kernel

    return append_kernel


@cache
def _copy_pages_kernel() -> Any:
    from sennit.backends.gpus.kernels.cache import copy_pages_kernel

    return copy_pages_kernel


def _runs(pages: torch.Tensor) -> tuple[list[int], list[int]]:
    """Four sizes and strides of a page's dimensions, of which those that lie together are one."""
    sizes, strides = [1], [1]
    for size, stride in zip(reversed(pages.shape[1:]), reversed(pages.stride()[1:]), strict=True):
        if size == 1:
            continue
        if stride == sizes[0] * strides[0] or sizes[0] == 1:
            sizes[0], strides[0] = sizes[0] * size, strides[0] if sizes[0] > 1 else stride
        else:
            sizes.insert(0, size)
            strides.insert(0, stride)
    missing = 4 - len(sizes)
    return [1] * missing + sizes, [0] * missing + strides


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
