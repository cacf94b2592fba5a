"""Writing into pages: new keys and values into their slots, and copies of whole pages."""

import triton
import triton.language as tl

from sennit.backends.gpus.kernels.plan import load_segment, num_segments

__all__ = ["append_kernel", "copy_pages_kernel"]


@triton.jit
def segments_of(plan, rows, count: tl.constexpr, at_once: tl.constexpr):
    """The segment that covers each query row, or -1."""
    found = tl.full([count], -1, tl.int32)
    total = num_segments(plan)
    for first in range(0, total, at_once):
        index = first + tl.arange(0, at_once)
        segment, _ = load_segment(plan, tl.minimum(index, total - 1), None)
        start, length = segment[1], segment[2]
        covers = (rows[:, None] >= start[None, :]) & (rows[:, None] < (start + length)[None, :])
        covers &= (index < total)[None, :]
        found = tl.maximum(found, tl.max(tl.where(covers, index[None, :], -1), 1))
    return found


@triton.jit
def copy_row(source, target, writes, dim: tl.constexpr, width: tl.constexpr):
    columns = tl.arange(0, width)
    mask = writes[:, None] & (columns < dim)[None, :]
    tl.store(target[:, None] + columns[None, :], tl.load(source[:, None] + columns[None, :], mask=mask), mask=mask)


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["plan", "page_table", "kv_lens", "slots"]
)  # fmt: skip
def append_kernel(
    plan,  # int32 [words]
    page_table,  # int32 [entries]
    kv_lens,  # int32 [requests], or None
    slots,  # int64 [rows], or None
    k, v, k_pages, v_pages,  # v and v_pages may be None
    num_rows,
    k_row, k_head,  # strides, in elements
    v_row, v_head,
    k_page, k_slot, k_page_head,
    v_page, v_slot, v_page_head,
    page_size: tl.constexpr,
    dim_qk: tl.constexpr,
    dim_vo: tl.constexpr,
    width_qk: tl.constexpr,
    width_vo: tl.constexpr,
    rows_at_once: tl.constexpr,
    segments_at_once: tl.constexpr,
):  # fmt: skip
    """Some rows and one head of new keys and values."""
    if num_segments(plan) == 0:
        return
    rows = tl.program_id(0) * rows_at_once + tl.arange(0, rows_at_once)
    head = tl.program_id(1).to(tl.int64)
    index = segments_of(plan, rows, rows_at_once, segments_at_once)
    segment, _ = load_segment(plan, tl.maximum(index, 0), kv_lens)
    _, q_start, q_len, kv_start, _, exact_len, _, _, _, _ = segment
    position = exact_len - q_len + rows - q_start
    writes = (index >= 0) & (position >= 0) & (rows < num_rows)
    if slots is None:
        page = tl.load(page_table + kv_start + position // page_size, mask=writes, other=0).to(tl.int64)
        slot = (position % page_size).to(tl.int64)
        writes &= page >= 0
    else:
        given = tl.load(slots + rows, mask=writes, other=-1)
        writes &= given >= 0
        page = given // page_size
        slot = given % page_size
    row = rows.to(tl.int64)
    copy_row(
        k + row * k_row + head * k_head, k_pages + page * k_page + slot * k_slot + head * k_page_head, writes,
        dim_qk, width_qk,
    )  # fmt: skip
    if v is not None:
        copy_row(
            v + row * v_row + head * v_head, v_pages + page * v_page + slot * v_slot + head * v_page_head, writes,
            dim_vo, width_vo,
        )  # fmt: skip


@triton.jit
def copy_pages_kernel(
    pages, source, target,  # int64 page ids
    size_1, size_2, size_3, size_4,  # of a page
    stride_0, stride_1, stride_2, stride_3, stride_4,  # in elements
    elements: tl.constexpr,
):  # fmt: skip
    """Some elements of one page, in the order of its dimensions."""
    index = tl.program_id(1).to(tl.int64) * elements + tl.arange(0, elements)
    fourth = index % size_4
    rest = index // size_4
    third = rest % size_3
    rest = rest // size_3
    offset = rest // size_2 * stride_1 + rest % size_2 * stride_2 + third * stride_3 + fourth * stride_4
    mask = rest // size_2 < size_1
    page = tl.program_id(0)
    values = tl.load(pages + tl.load(source + page) * stride_0 + offset, mask=mask)
    tl.store(pages + tl.load(target + page) * stride_0 + offset, values, mask=mask)
