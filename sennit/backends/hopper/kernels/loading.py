"""The warp that loads a strand: queries of its items, and their keys and values, step by step, into a ring."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sennit.backends.gpus.kernels.plan import load_item, load_segment, worker_items
from sennit.backends.hopper.kernels.buffers import row_major
from sennit.backends.hopper.kernels.names import as_shape, copy_box, copy_rows, synchronize
from sennit.backends.hopper.kernels.pauses import pause
from sennit.backends.hopper.kernels.steps import plan_steps, step_at

__all__ = ["load_strand"]

NUMBER_BYTES = gl.constexpr(2)
GATHERED = gl.constexpr(16)  # rows at once


@gluon.jit
def load_queries(boxes, to, barrier, first_row, segment, item, kv_head, rows: gl.constexpr, variant: gl.constexpr):
    """Copy ``rows`` packed rows of an item, and after its last ones whatever there is."""
    packed = item[1] + first_row
    token = segment[1] + packed // variant.group_size
    head = kv_head * variant.group_size + packed % variant.group_size
    mbarrier.expect(barrier, rows * variant.columns * NUMBER_BYTES)
    shape: gl.constexpr = boxes.block_shape
    layout: gl.constexpr = boxes.layout
    copy_box(boxes, [token, head, 0], barrier, as_shape(to, shape, layout))


@gluon.jit
def row_of(key, end, kv_start, page_table, page_rows, variant: gl.constexpr):
    """Where a box begins, in rows of the pool; before all of them where there is nothing, which is copied as zeros."""
    if variant.page_size is None:
        row = gl.where(key < end, kv_start + key, -variant.box_rows)
    else:
        page = gl.load(page_table + kv_start + key // variant.page_size, mask=key < end, other=-1)
        row = gl.where(page >= 0, page * page_rows + key % variant.page_size, -variant.box_rows)
    return row


@gluon.jit
def load_boxes(pool, to, full, step, kv_start, kv_head, page_table, tile: gl.constexpr, variant: gl.constexpr):
    """Copy the keys, or the values, of a step: the copy engine counts bytes for ``full``."""
    boxes, page_rows, head_rows, head_columns = pool
    mbarrier.expect(full, tile.keys * variant.columns * NUMBER_BYTES)
    for box in gl.static_range(tile.keys // variant.box_rows):
        row = row_of(step[0] + box * variant.box_rows, step[2], kv_start, page_table, page_rows, variant)
        copy_box(
            boxes, [gl.where(row >= 0, row + kv_head * head_rows, row), kv_head * head_columns], full,
            to.slice(box * variant.box_rows, variant.box_rows),
        )  # fmt: skip


@gluon.jit
def load_rows(
    pool, to, step, kv_start, kv_head, page_table, dim: gl.constexpr, tile: gl.constexpr, variant: gl.constexpr
):
    """The same key by key, by these warps, wherever they lie; what is not there becomes zeros."""
    start, page_stride, slot_stride, head_stride = pool
    layout: gl.constexpr = row_major(variant.columns, variant.loader_warps)
    columns = gl.arange(0, variant.columns, gl.SliceLayout(0, layout))
    head = start + kv_head.to(gl.int64) * head_stride
    for part in gl.static_range(tile.keys // GATHERED):
        keys = step[0] + part * GATHERED + gl.arange(0, GATHERED, gl.SliceLayout(1, layout))
        there = keys < step[2]
        if variant.page_size is None:
            offset = (kv_start + keys).to(gl.int64) * slot_stride
        else:
            page = gl.load(page_table + kv_start + keys // variant.page_size, mask=there, other=-1)
            there = page >= 0
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
def publish_rows(number, full, left: gl.constexpr, tile: gl.constexpr):
    """Tell that the rows of a load are there: all but the last ``left`` ones before it have been."""
    wait_group(left)
    fence_async_shared()
    synchronize()
    mbarrier.arrive(full.index(number % tile.buffers), count=1)


@gluon.jit
def load_step(
    pool, ring, number, step, kv_start, kv_head, page_table, dim: gl.constexpr, tile: gl.constexpr,
    variant: gl.constexpr,
):  # fmt: skip
    """Copy the keys, or the values, of a step into the ring's next buffer."""
    buffers, full, empty = ring
    at = number % tile.buffers
    pause(variant)
    mbarrier.wait(empty.index(at), ((number // tile.buffers) & 1) ^ 1)
    if variant.boxes:
        load_boxes(pool, buffers.index(at), full.index(at), step, kv_start, kv_head, page_table, tile, variant)
    else:
        load_rows(pool, buffers.index(at), step, kv_start, kv_head, page_table, dim, tile, variant)
        ahead: gl.constexpr = tile.ahead
        if number >= ahead:
            publish_rows(number - ahead, full, ahead, tile)


@gluon.jit
def load_strand(
    plan, page_table, kv_lens, query_boxes, k, v, queries, ring, strand: gl.constexpr, tile: gl.constexpr,
    parts: gl.constexpr, variant: gl.constexpr,
):  # fmt: skip
    """Everything that the items of a strand read. Queries are in ``parts``, each for a group of warps."""
    buffers, ready, taken = queries
    rows: gl.constexpr = tile.rows // parts
    number = 0
    asked = 0
    first_item, last_item = worker_items(plan, strand, gl.program_id(0))
    for index in range(first_item, last_item):
        item = load_item(plan, index)
        segment, _tree = load_segment(plan, item[0], kv_lens)
        steps = plan_steps(segment, item, tile.keys, variant)
        num_steps = steps[3]
        for kv_head in range(item[3], item[3] + item[4]):
            for step in range(num_steps + 1):  # values follow a step behind their keys
                if step < num_steps:
                    load_step(
                        k, ring, number, step_at(step, steps, tile.keys, variant), segment[3], kv_head, page_table,
                        variant.dim_qk, tile, variant,
                    )  # fmt: skip
                    number += 1
                if step == 0:
                    if variant.query_boxes:
                        for part in gl.static_range(parts):
                            pause(variant)
                            mbarrier.wait(taken.index(part), (asked & 1) ^ 1)
                            load_queries(
                                query_boxes, buffers.index(part), ready.index(part), part * rows, segment, item,
                                kv_head, rows, variant,
                            )  # fmt: skip
                        asked += 1
                else:
                    load_step(
                        v, ring, number, step_at(step - 1, steps, tile.keys, variant), segment[3], kv_head, page_table,
                        variant.dim_vo, tile, variant,
                    )  # fmt: skip
                    number += 1
    if not variant.boxes:
        ahead: gl.constexpr = tile.ahead
        for last in gl.static_range(ahead):
            if number + last >= ahead:
                publish_rows(number + last - ahead, ring[1], ahead - 1 - last, tile)
