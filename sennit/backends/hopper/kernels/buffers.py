"""What warps do to shared memory before products read it: queries of their own, and values that nobody owns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sennit.backends.gpus.kernels.plan import packed_rows
from sennit.backends.hopper.kernels.names import as_shape, synchronize

__all__ = ["clear_values", "get_queries", "row_major"]

SWIZZLED = gl.constexpr(64)  # columns of 16 bits, 128 bytes


@gluon.constexpr_function
def row_major(columns, warps=4):
    """16 bytes a thread."""
    lanes = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def get_queries(q, queries, asked, segment, item, kv_head, part: gl.constexpr, variant: gl.constexpr):
    """Wait until the queries of a part are in shared memory, or put them there."""
    buffers, ready, _taken = queries
    if variant.query_boxes:
        mbarrier.wait(ready.index(part), asked & 1)
    else:
        to = buffers.index(part)
        layout: gl.constexpr = row_major(variant.columns)
        rows: gl.constexpr = to.shape[0]
        lanes = part * rows + gl.arange(0, rows, gl.SliceLayout(1, layout))
        columns = gl.arange(0, variant.columns, gl.SliceLayout(0, layout))
        tokens, of_group, exists = packed_rows(item[1], item[2], lanes, variant.group_size)
        row = (segment[1] + tokens).to(gl.int64) * q[1]
        head = (kv_head * variant.group_size + of_group).to(gl.int64) * q[2]
        known = (columns < variant.dim_qk)[None, :] & exists[:, None]
        values = gl.load(q[0] + (row + head)[:, None] + columns[None, :], mask=known, other=0.0)
        synchronize()  # nobody reads the last ones any more
        to.store(values)
        fence_async_shared()
        synchronize()


@gluon.jit
def clear_values(buffers, at, first, exact_len, box_rows: gl.constexpr):
    """Zeros in place of values that nobody owns: a weight of zero does not cancel their NaN.

    Boxes behind the last key are copied as zeros; what there is to clear is the end of the box with the last key.
    """
    keys: gl.constexpr = buffers.shape[1]
    halves: gl.constexpr = buffers.shape[2] // SWIZZLED
    left = exact_len - first
    if box_rows > 1 and (left > 0) & (left < keys) & (left % box_rows != 0):
        # Columns lie in halves, one behind the other, and boxes in each of them.
        layout: gl.constexpr = row_major(SWIZZLED)
        boxes: gl.constexpr = keys // box_rows
        shape: gl.constexpr = [buffers.shape[0] * halves * boxes, box_rows, SWIZZLED]
        all_boxes = as_shape(buffers, shape, gl.NVMMASharedLayout(128, 16, 2))
        lanes = gl.arange(0, box_rows, gl.SliceLayout(1, layout))
        for half in gl.static_range(halves):
            rows = all_boxes.index((at * halves + half) * boxes + left // box_rows)
            values = rows.load(layout)
            rows.store(gl.where((lanes < left % box_rows)[:, None], values, gl.full_like(values, 0.0)))
        fence_async_shared()
        synchronize()
