"""Where results go: rows of the output, learned sinks included, or partial results and their merge."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sennit.backends.gpus.kernels.plan import load_merge, packed_rows
from sennit.backends.gpus.kernels.softmax import lse_and_factor, with_sinks
from sennit.backends.hopper.kernels.names import synchronize
from sennit.backends.hopper.kernels.pauses import pause
from sennit.backends.hopper.variant import WIDE_PARTS as _WIDE_PARTS

__all__ = ["now", "store_sums", "store_times"]

LOG2E = gl.constexpr(1.4426950408889634)
WIDE_PARTS = gl.constexpr(_WIDE_PARTS)  # each of which counts by itself


@gluon.jit
def now():
    """Nanoseconds, by a clock that all SMs share."""
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def store_times(times, index, start):
    """When an item began and ended, where this is measured."""
    if times is not None:
        gl.store(times + 2 * index, start)
        gl.store(times + 2 * index + 1, now())


@gluon.jit
def not_before(lanes):
    """The same; what follows from it is not computed earlier, and kept in registers while a loop needs them."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def of_columns(values, columns_first: gl.constexpr):
    return values[:, None] if columns_first else values[None, :]


@gluon.jit
def of_rows(values, columns_first: gl.constexpr):
    return values[None, :] if columns_first else values[:, None]


@gluon.constexpr_function
def in_lines(columns):
    """Layout of 64 rows in the warps that multiplied them, in which a thread has 8 neighbouring columns instead of 2.

    Rows are then stored in pieces of 64 bytes instead of 16, with a quarter of the instructions.
    """
    further = [[0, 1 << bit] for bit in range(5, columns.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], *further, [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def store_rows(values, at, exists, columns, columns_first: gl.constexpr, variant: gl.constexpr):
    """Final rows, whose values are in either order."""
    known = of_rows(exists, columns_first) & of_columns(columns < variant.dim_vo, columns_first)
    gl.store(of_rows(at, columns_first) + of_columns(columns, columns_first), values, mask=known)


@gluon.jit
def finish_rows(
    sums, lse_values, factor, lanes, there, row_start, num_rows, q_start, kv_head, columns, outputs, sinks,
    columns_first: gl.constexpr, product: gl.constexpr, variant: gl.constexpr,
):  # fmt: skip
    """Sums times ``factor``, with learned sinks, as final rows, and their LSE: those ``lanes`` that are ``there``."""
    out, out_row, out_head = outputs[0]
    lse, lse_row, lse_head = outputs[1]
    tokens, of_group, _exists = packed_rows(row_start, num_rows, lanes, variant.group_size)
    heads = kv_head * variant.group_size + of_group
    if sinks is not None:
        lse_values, sink_factor = with_sinks(lse_values, heads, sinks)
        factor *= sink_factor
    row, head = (q_start + tokens).to(gl.int64), heads.to(gl.int64)
    if lse is not None:
        gl.store(lse + row * lse_row + head * lse_head, lse_values, mask=there)
    values = (sums * of_rows(factor, columns_first)).to(out.dtype.element_ty)
    at = out + row * out_row + head * out_head
    if product:
        layout: gl.constexpr = in_lines(variant.columns)
        values = gl.convert_layout(values, layout)
        at = gl.convert_layout(at, gl.SliceLayout(1, layout))
        there = gl.convert_layout(there, gl.SliceLayout(1, layout))
        columns = gl.arange(0, variant.columns, gl.SliceLayout(0, layout))
    store_rows(values, at, there, columns, columns_first, variant)


@gluon.jit
def merge_rows(
    merge, q_start, first, end, outputs, sinks, at_once: gl.constexpr, variant: gl.constexpr
):  # fmt: skip
    """Rows ``first : end`` of a merge, part by part in their order, and so many ``at_once``."""
    partial_out, partial_lse = outputs[2]
    _segment, row_start, num_rows, kv_head, first_row, num_parts, stride, _strand = merge
    lanes_across: gl.constexpr = min(32, variant.columns // 4)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // lanes_across, lanes_across], [4, 1], [1, 0])
    columns = gl.arange(0, variant.columns, gl.SliceLayout(0, layout))
    for start in range(first, end, at_once):
        lanes = start + gl.arange(0, at_once, gl.SliceLayout(1, layout))
        largest = gl.full([at_once], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        total = gl.full([at_once], 0.0, gl.float32, gl.SliceLayout(1, layout))
        sums = gl.full([at_once, variant.columns], 0.0, gl.float32, layout)
        for part in range(num_parts):
            row = (first_row + part * stride + lanes).to(gl.int64)
            # What other multiprocessors have written is not looked for in this one's own cache.
            there = lanes < num_rows
            logits = gl.load(partial_lse + row, mask=there, other=float("-inf"), cache_modifier=".cg")
            at = (partial_out + row * variant.dim_vo)[:, None] + columns[None, :]
            known = there[:, None] & (columns < variant.dim_vo)[None, :]
            values = gl.load(at, mask=known, other=0.0, cache_modifier=".cg")
            most = gl.maximum(largest, logits)
            base = gl.where(most == float("-inf"), 0.0, most)
            weight = gl.exp2((logits - base) * LOG2E)
            factor = gl.exp2((largest - base) * LOG2E)
            largest = most
            total = total * factor + weight
            sums = sums * factor[:, None] + values * weight[:, None]
        lse_values, factor = lse_and_factor(largest * LOG2E, total)
        finish_rows(
            sums, lse_values, factor, lanes, (lanes < num_rows) & (lanes < end), row_start, num_rows, q_start,
            kv_head, columns, outputs, sinks, False, False, variant,
        )  # fmt: skip


@gluon.jit
def store_sums(
    sums, largest, total, lanes, columns, item, segment, kv_head, plan, outputs, sinks, part: gl.constexpr,
    columns_first: gl.constexpr, variant: gl.constexpr,
):  # fmt: skip
    """What the rows ``lanes`` of an item come to. Whichever warps store the last part of a merge's rows merge them.

    Which these are differs from run to run, but not what they compute. They leave the counters at zero.
    """
    partial_out, partial_lse = outputs[2]
    row_start, num_rows, partial_row = item[1], item[2], item[5]
    lanes = not_before(lanes)
    lse_values, factor = lse_and_factor(largest, total)
    if partial_row >= 0:
        index = item[9] + kv_head - item[3]
        merge = load_merge(plan, index)  # which takes as long as what is stored now
        sums *= of_rows(factor, columns_first)
        row = (partial_row + (kv_head - item[3]) * num_rows + lanes).to(gl.int64)
        at = of_rows(partial_out + row * variant.dim_vo, columns_first) + of_columns(columns, columns_first)
        exists = lanes < num_rows
        known = of_rows(exists, columns_first) & of_columns(columns < variant.dim_vo, columns_first)
        gl.store(at, sums, mask=known)
        gl.store(partial_lse + row, lse_values, mask=exists)
        counter = outputs[3] + index * WIDE_PARTS + part
        pause(variant)
        synchronize()  # all of these warps have stored, and the count publishes it
        pause(variant)
        if gl.atomic_add(counter, 1, sem="acq_rel") == merge[5] - 1:
            rows: gl.constexpr = lanes.shape[0]
            # Numbers a thread of what is merged: warps of wide tiles have more registers.
            at_once: gl.constexpr = (16 if columns_first else 32) * 128 // variant.columns
            end = gl.minimum((part + 1) * rows, num_rows)
            merge_rows(merge, segment[1], part * rows, end, outputs, sinks, at_once, variant)
            gl.store(counter, 0)
    else:
        finish_rows(
            sums, lse_values, factor, lanes, lanes < num_rows, row_start, num_rows, segment[1], kv_head, columns,
            outputs, sinks, columns_first, not columns_first, variant,
        )  # fmt: skip
