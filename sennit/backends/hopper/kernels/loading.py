"""The warps that load a strand: queries of its items, and their keys and values, step by step, into a ring."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sennit.backends.gpus.kernels.plan import load_item, load_segment, worker_items
from sennit.backends.hopper.kernels.names import as_shape, copy_box
from sennit.backends.hopper.kernels.pauses import pause
from sennit.backends.hopper.kernels.rows import PAGE_SLOTS, keep_pages, load_rows, publish_rows
from sennit.backends.hopper.kernels.steps import plan_steps, step_at

__all__ = ["load_strand"]

NUMBER_BYTES = gl.constexpr(2)


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
def ask_pages(step, kv_start, page_table, tile: gl.constexpr, variant: gl.constexpr):
    """Page of every box of a step, or of every key where there are none, a lane each; -1 where there is nothing.

    Packed keys lie in one page.
    """
    boxes: gl.constexpr = tile.keys // variant.box_rows
    lanes: gl.constexpr = boxes if boxes > 32 else 32
    keys = step[0] + variant.box_rows * gl.arange(0, lanes, gl.BlockedLayout([1], [32], [variant.loader_warps], [0]))
    known = (keys < step[2]) & (keys < step[0] + tile.keys)
    if variant.page_size is None:
        pages = gl.where(known, 0, -1)
    else:
        pages = gl.load(page_table + kv_start + keys // variant.page_size, mask=known, other=-1)
    return pages


@gluon.jit
def load_boxes(pool, to, full, pages, step, kv_start, kv_head, tile: gl.constexpr, variant: gl.constexpr):
    """Copy the keys, or the values, of a step: the copy engine counts bytes for ``full``.

    Boxes of which there is nothing begin before all rows of the pool, where there are zeros.
    """
    boxes, page_rows, head_rows, head_columns = pool
    lanes = gl.arange(0, pages.shape[0], pages.type.layout)
    mbarrier.expect(full, tile.keys * variant.columns * NUMBER_BYTES)
    for box in gl.static_range(tile.keys // variant.box_rows):
        page = gl.sum(gl.where(lanes == box, pages, 0), 0)
        key = step[0] + box * variant.box_rows
        row = kv_start + key
        if variant.page_size is not None:
            row = page * page_rows + key % variant.page_size
        row = gl.where(page >= 0, row + kv_head * head_rows, -variant.box_rows)
        copy_box(boxes, [row, kv_head * head_columns], full, to.slice(box * variant.box_rows, variant.box_rows))


@gluon.jit
def wait_for_room(ring, number, tile: gl.constexpr, variant: gl.constexpr):
    """Where the next load goes, once nobody needs what is there, and what is told that it has come."""
    buffers, full, empty = ring
    at = number % tile.buffers
    pause(variant)
    mbarrier.wait(empty.index(at), ((number // tile.buffers) & 1) ^ 1)
    return buffers.index(at), full.index(at)


@gluon.jit
def load_strand(
    plan, page_table, kv_lens, query_boxes, k, v, queries, ring, page_slots, strand: gl.constexpr, tile: gl.constexpr,
    parts: gl.constexpr, variant: gl.constexpr,
):  # fmt: skip
    """Everything that the items of a strand read. Queries are in ``parts``, each for a group of warps."""
    buffers, ready, taken = queries
    rows: gl.constexpr = tile.rows // parts
    ahead: gl.constexpr = tile.ahead
    full = ring[1]
    number = 0  # of loads
    told = 0  # of those by rows, the ones that are known to have come
    turn = 0  # of steps
    asked = 0
    first_item, last_item = worker_items(plan, strand, gl.program_id(0))
    for index in range(first_item, last_item):
        item = load_item(plan, index)
        segment, _tree = load_segment(plan, item[0], kv_lens)
        kv_start = segment[3]
        steps = plan_steps(segment, item, tile.keys, variant)
        num_steps = steps[3]
        pages = ask_pages(step_at(0, steps, tile.keys, variant), kv_start, page_table, tile, variant)
        last_pages = pages
        if not variant.boxes:
            keep_pages(pages, page_slots.index(turn % PAGE_SLOTS))
        for kv_head in range(item[3], item[3] + item[4]):
            for step in range(num_steps + 1):  # values follow a step behind their keys
                here = step_at(step, steps, tile.keys, variant)
                last = step_at(step - 1, steps, tile.keys, variant)
                # Pages are asked for a step ahead; behind the last one comes the first one of the next head.
                next_step = step_at(gl.where(step < num_steps, step + 1, 0), steps, tile.keys, variant)
                next_pages = ask_pages(next_step, kv_start, page_table, tile, variant)
                if step < num_steps:
                    to, there = wait_for_room(ring, number, tile, variant)
                    number += 1
                    if variant.boxes:
                        load_boxes(k, to, there, pages, here, kv_start, kv_head, tile, variant)
                    else:
                        slot = page_slots.index(turn % PAGE_SLOTS)
                        load_rows(k, to, slot, here, kv_start, kv_head, variant.dim_qk, tile, variant)
                        told = publish_rows(told, number, ahead, full, tile)
                if step == 0:
                    if variant.query_boxes:
                        if not variant.boxes:  # who frees queries waits for all keys before
                            told = publish_rows(told, number, 0, full, tile)
                        for part in gl.static_range(parts):
                            pause(variant)
                            mbarrier.wait(taken.index(part), (asked & 1) ^ 1)
                            load_queries(
                                query_boxes, buffers.index(part), ready.index(part), part * rows, segment, item,
                                kv_head, rows, variant,
                            )  # fmt: skip
                        asked += 1
                else:
                    to, there = wait_for_room(ring, number, tile, variant)
                    number += 1
                    if variant.boxes:
                        load_boxes(v, to, there, last_pages, last, kv_start, kv_head, tile, variant)
                    else:
                        slot = page_slots.index((turn + PAGE_SLOTS - 1) % PAGE_SLOTS)
                        load_rows(v, to, slot, last, kv_start, kv_head, variant.dim_vo, tile, variant)
                        told = publish_rows(told, number, ahead, full, tile)
                turn += 1
                last_pages = pages
                pages = next_pages
                if not variant.boxes:
                    keep_pages(pages, page_slots.index(turn % PAGE_SLOTS))
    if not variant.boxes:
        publish_rows(told, number, 0, full, tile)
