"""Where keys and values lie, and loading tiles of their columns."""

import triton
import triton.language as tl

__all__ = ["load_columns", "load_pages", "pair_offsets"]


@triton.jit
def page_and_slot(keys, page_size: tl.constexpr):
    """Which page of its request a key is in, and where in it. Keys are not negative, which saves shifts."""
    known = keys.to(tl.uint32, bitcast=True)
    return (known // page_size).to(tl.int32, bitcast=True), (known % page_size).to(tl.int32, bitcast=True)


@triton.jit
def load_pages(page_table, kv_start, keys, end, page_size: tl.constexpr):
    """The page of each key before ``end``; -1 for the others, of which no entry is read."""
    page, _ = page_and_slot(keys, page_size)
    return tl.load(page_table + kv_start + page, mask=keys < end, other=-1)


@triton.jit
def row_offsets(pages, kv_start, keys, page_stride, slot_stride, page_size: tl.constexpr):
    """Offset of each key's row, in elements."""
    if page_size is None:
        offsets = (kv_start + keys).to(tl.int64) * slot_stride
    else:
        _, slot = page_and_slot(keys, page_size)
        offsets = pages.to(tl.int64) * page_stride + slot.to(tl.int64) * slot_stride
    return offsets


@triton.jit
def pair_offsets(pages, kv_start, keys, k, v, variant: tl.constexpr):
    """Offsets of rows of keys and of values; pools are ``(pointer, page stride, slot stride, head stride)``."""
    k_offsets = row_offsets(pages, kv_start, keys, k[1], k[2], variant.page_size)
    v_offsets = k_offsets
    if not variant.same_strides:
        v_offsets = row_offsets(pages, kv_start, keys, v[1], v[2], variant.page_size)
    return k_offsets, v_offsets


@triton.jit
def load_columns(rows, there, first: tl.constexpr, width: tl.constexpr, dim: tl.constexpr, checked: tl.constexpr):
    """Columns ``first : first + width`` of rows that begin at ``rows``; zero past ``dim``.

    If ``checked``, rows that are not ``there`` are not read and become zero: slots that nobody owns may hold NaN, and a
    weight of zero does not cancel it.
    """
    columns = first + tl.arange(0, width)
    at = rows[:, None] + columns[None, :]
    known = (columns < dim)[None, :]
    if checked and first + width > dim:
        tile = tl.load(at, mask=there[:, None] & known, other=0.0)
    elif checked:
        tile = tl.load(at, mask=there[:, None], other=0.0)
    elif first + width > dim:
        tile = tl.load(at, mask=known, other=0.0)
    else:
        tile = tl.load(at)
    return tile
