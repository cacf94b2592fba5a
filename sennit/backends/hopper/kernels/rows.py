"""Keys and values that warps copy themselves, token by token, where the copy engine cannot."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sennit.backends.hopper.kernels.buffers import row_major
from sennit.backends.hopper.kernels.names import copy_rows, synchronize

__all__ = ["PAGE_SLOTS", "keep_pages", "load_rows", "publish_rows"]

PAGE_SLOTS = gl.constexpr(4)  # of values, a step behind their keys; of keys; and of those to come; a power of two
GATHERED = gl.constexpr(16)  # rows at once


@gluon.jit
def keep_pages(pages, slot):
    """Put pages where all warps find them."""
    slot.store(pages)
    synchronize()


@gluon.jit
def load_rows(
    pool, to, pages, step, kv_start, kv_head, dim: gl.constexpr, tile: gl.constexpr, variant: gl.constexpr
):  # fmt: skip
    """Copy the keys, or the values, of a step, wherever they lie; what is not there becomes zeros."""
    start, page_stride, slot_stride, head_stride = pool
    layout: gl.constexpr = row_major(variant.columns, variant.loader_warps)
    columns = gl.arange(0, variant.columns, gl.SliceLayout(0, layout))
    head = start + kv_head.to(gl.int64) * head_stride
    for part in gl.static_range(tile.keys // GATHERED):
        keys = step[0] + part * GATHERED + gl.arange(0, GATHERED, gl.SliceLayout(1, layout))
        page = pages.slice(part * GATHERED, GATHERED).load(gl.SliceLayout(1, layout))
        there = page >= 0
        if variant.page_size is None:
            offset = (kv_start + keys).to(gl.int64) * slot_stride
        else:
            offset = page.to(gl.int64) * page_stride + (keys % variant.page_size).to(gl.int64) * slot_stride
        known = there[:, None] & (columns < dim)[None, :]
        at = to.slice(part * GATHERED, GATHERED)
        if variant.aligned:
            rows = gl.multiple_of(head + gl.multiple_of(gl.where(there, offset, 0), 8), 16)  # elements, bytes
            copy_rows(at, rows[:, None] + columns[None, :], known)
        else:
            at.store(gl.load((head + offset)[:, None] + columns[None, :], mask=known, other=0.0))
    commit_group()


@gluon.jit
def publish_rows(told, number, left: gl.constexpr, full, tile: gl.constexpr):
    """Tell that loads are there, all of ``number`` but the last ``left``; ``told`` of them have been. How many then."""
    wait_group(left)
    fence_async_shared()
    synchronize()
    for load in range(told, number - left):
        mbarrier.arrive(full.index(load % tile.buffers), count=1)
    return gl.maximum(told, number - left)
