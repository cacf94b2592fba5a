"""Where results go: rows of the output, learned sinks included, or partial results and their merge."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sennit.backends.gpus.kernels.plan import load_merge, load_segment, packed_rows
from sennit.backends.gpus.kernels.softmax import lse_and_factor, with_sinks
from sennit.backends.hopper.kernels.names import synchronize
from sennit.backends.hopper.kernels.pauses import pause
from sennit.backends.hopper.variant import WIDE_PARTS as _WIDE_PARTS

__all__ = ["now", "store_sums", "store_times"]

LOG2E = gl.constexpr(1.4426950408889634)
WIDE_PARTS = gl.constexpr(_WIDE_PARTS)  # each of which counts by itself
MERGED_ROWS = gl.constexpr(16)  # at once


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
def of_columns(values, columns_first: gl.constexpr):
    return values[:, None] if columns_first else values[None, :]


@gluon.jit
def of_rows(values, columns_first: gl.constexpr):
    return values[None, :] if columns_first else values[:, None]


@gluon.jit
def store_rows(
    sums, lse_values, tokens, heads, exists, columns, outputs, columns_first: gl.constexpr, variant: gl.constexpr
):
    """Final rows and, if it is wanted, their LSE; the values of rows are in either order."""
    out, out_row, out_head = outputs[0]
    lse, lse_row, lse_head = outputs[1]
    row, head = tokens.to(gl.int64), heads.to(gl.int64)
    at = of_rows(out + row * out_row + head * out_head, columns_first) + of_columns(columns, columns_first)
    known = of_rows(exists, columns_first) & of_columns(columns < variant.dim_vo, columns_first)
    gl.store(at, sums.to(out.dtype.element_ty), mask=known)
    if lse is not None:
        gl.store(lse + row * lse_row + head * lse_head, lse_values, mask=exists)


@gluon.jit
def finish_rows(
    sums, lse_values, factor, lanes, there, row_start, num_rows, q_start, kv_head, columns, outputs, sinks,
    columns_first: gl.constexpr, variant: gl.constexpr,
):  # fmt: skip
    """Sums times ``factor``, with learned sinks, as final rows: those of ``lanes`` that are ``there``."""
    tokens, of_group, _exists = packed_rows(row_start, num_rows, lanes, variant.group_size)
    heads = kv_head * variant.group_size + of_group
    if sinks is not None:
        lse_values, sink_factor = with_sinks(lse_values, heads, sinks)
        factor *= sink_factor
    sums *= of_rows(factor, columns_first)
    store_rows(sums, lse_values, q_start + tokens, heads, there, columns, outputs, columns_first, variant)


@gluon.jit
def merge_rows(plan, index, first, end, outputs, sinks, variant: gl.constexpr):
    """Rows ``first : end`` of a merge, part by part in their order."""
    partial_out, partial_lse = outputs[2]
    segment_index, row_start, num_rows, kv_head, first_row, num_parts, stride, _strand = load_merge(plan, index)
    segment, _tree = load_segment(plan, segment_index, None)
    lanes_across: gl.constexpr = min(32, variant.columns // 4)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // lanes_across, lanes_across], [4, 1], [1, 0])
    columns = gl.arange(0, variant.columns, gl.SliceLayout(0, layout))
    for start in range(first, end, MERGED_ROWS):
        lanes = start + gl.arange(0, MERGED_ROWS, gl.SliceLayout(1, layout))
        largest = gl.full([MERGED_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        total = gl.full([MERGED_ROWS], 0.0, gl.float32, gl.SliceLayout(1, layout))
        sums = gl.full([MERGED_ROWS, variant.columns], 0.0, gl.float32, layout)
        for part in range(num_parts):
            row = (first_row + part * stride + lanes).to(gl.int64)
            # What other multiprocessors have written is not looked for in this one's own cache.
            logits = gl.load(partial_lse + row, mask=lanes < num_rows, other=float("-inf"), cache_modifier=".cg")
            there = (logits != float("-inf"))[:, None] & (columns < variant.dim_vo)[None, :]
            at = (partial_out + row * variant.dim_vo)[:, None] + columns[None, :]
            values = gl.load(at, mask=there, other=0.0, cache_modifier=".cg")
            most = gl.maximum(largest, logits)
            base = gl.where(most == float("-inf"), 0.0, most)
            weight = gl.exp2((logits - base) * LOG2E)
            factor = gl.exp2((largest - base) * LOG2E)
            largest = most
            total = total * factor + weight
            sums = sums * factor[:, None] + values * weight[:, None]
        lse_values, factor = lse_and_factor(largest * LOG2E, total)
        finish_rows(
            sums, lse_values, factor, lanes, (lanes < num_rows) & (lanes < end), row_start, num_rows, segment[1],
            kv_head, columns, outputs, sinks, False, variant,
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
    lse_values, factor = lse_and_factor(largest, total)
    if partial_row >= 0:
        sums *= of_rows(factor, columns_first)
        row = (partial_row + (kv_head - item[3]) * num_rows + lanes).to(gl.int64)
        at = of_rows(partial_out + row * variant.dim_vo, columns_first) + of_columns(columns, columns_first)
        exists = lanes < num_rows
        known = of_rows(exists, columns_first) & of_columns(columns < variant.dim_vo, columns_first)
        gl.store(at, sums, mask=known)
        gl.store(partial_lse + row, lse_values, mask=exists)
        index = item[9] + kv_head - item[3]
        num_parts = load_merge(plan, index)[5]
        counter = outputs[3] + index * WIDE_PARTS + part
        pause(variant)
        synchronize()  # all of these warps have stored, and the count publishes it
        pause(variant)
        if gl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
            rows: gl.constexpr = lanes.shape[0]
            merge_rows(plan, index, part * rows, gl.minimum((part + 1) * rows, num_rows), outputs, sinks, variant)
            gl.store(counter, 0)
    else:
        finish_rows(
            sums, lse_values, factor, lanes, lanes < num_rows, row_start, num_rows, segment[1], kv_head, columns,
            outputs, sinks, columns_first, variant,
        )  # fmt: skip
