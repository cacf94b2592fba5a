"""The merge of partial results by log-sum-exp: of few rows by the worker that stores the last part, or a kernel."""

import triton
import triton.language as tl

from sennit.backends.gpus.kernels.plan import load_merge, load_segment, num_merges, packed_rows
from sennit.backends.gpus.kernels.softmax import empty_state, empty_sums, lse_and_factor, with_sinks
from sennit.backends.triton.kernels.output import store_rows

__all__ = ["merge_if_last", "merge_kernel"]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_parts(partials, at, there, first: tl.constexpr, width: tl.constexpr, dim: tl.constexpr):
    """Columns ``first : first + width`` of parts ``[parts, rows]``; zero where there is nothing.

    Other workers have written them: what the multiprocessor itself remembers is passed over.
    """
    columns = first + tl.arange(0, width)
    pointers = partials + at.to(tl.int64)[:, :, None] * dim + columns[None, None, :]
    return tl.load(pointers, mask=there[:, :, None] & (columns < dim)[None, None, :], other=0.0, cache_modifier=".cg")


@triton.jit
def merge_rows(merge, first, plan, out, lse, partials, sinks, variant: tl.constexpr):
    """Some rows of a merge from ``first``, some parts at a time and these in their order."""
    rows: tl.constexpr = variant.merged_rows
    parts: tl.constexpr = variant.merged_parts
    index, row_start, num_rows, kv_head, first_row, num_parts, stride, _ = merge
    lanes = first + tl.arange(0, rows)
    largest, total = empty_state(rows)
    sums, sums_tail = empty_sums(rows, variant, False)
    for part in range(0, num_parts, parts):
        numbers = part + tl.arange(0, parts)
        at = first_row + numbers[:, None] * stride + lanes[None, :]
        there = (numbers < num_parts)[:, None] & (lanes < num_rows)[None, :]
        logits = tl.load(partials[1] + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        there &= logits != float("-inf")  # values of a part without keys are zero
        values = load_parts(partials[0], at, there, 0, variant.vo.main, variant.dim_vo)
        most = tl.maximum(largest, tl.max(logits, 0))
        base = tl.where(most == float("-inf"), 0.0, most)
        # Subtracted first: a product that is not rounded, less one that is, is as wrong as the largest is rounded.
        weights = tl.exp2((logits - base[None, :]) * LOG2E)
        factor = tl.exp2((largest - base) * LOG2E)
        largest = most
        total = total * factor + tl.sum(weights, 0)
        sums = sums * factor[:, None] + tl.sum(weights[:, :, None] * values, 0)
        if variant.vo.tail > 0:
            values = load_parts(partials[0], at, there, variant.vo.main, variant.vo.tail, variant.dim_vo)
            sums_tail = sums_tail * factor[:, None] + tl.sum(weights[:, :, None] * values, 0)
    lse_values, factor = lse_and_factor(largest * LOG2E, total)
    segment, _ = load_segment(plan, index, None)
    tokens, of_group, exists = packed_rows(row_start, num_rows, lanes, variant.group_size)
    heads = kv_head * variant.group_size + of_group
    if sinks is not None:
        lse_values, sink_factor = with_sinks(lse_values, heads, sinks)
        factor *= sink_factor
    sums *= factor[:, None]
    sums_tail *= factor[:, None]
    store_rows(sums, sums_tail, lse_values, segment[1] + tokens, heads, exists, out, lse, variant)


@triton.jit
def merge_if_last(index, plan, out, lse, partials, counters, sinks, variant: tl.constexpr):
    """Count a part of a merge that has been stored; whoever stored the last one merges them all.

    Which worker that is differs from run to run, but not what it computes. It leaves the counter at zero.
    """
    merge = load_merge(plan, index)
    tl.debug_barrier()  # the whole worker has stored, and the count publishes it
    if tl.atomic_add(counters + index, 1, sem="acq_rel") == merge[5] - 1:
        for first in range(0, merge[2], variant.merged_rows):
            merge_rows(merge, first, plan, out, lse, partials, sinks, variant)
        tl.store(counters + index, 0)


STEADY = ["plan", "lse", "partials", "sinks"]


@triton.jit(do_not_specialize=["num_partial_rows"], do_not_specialize_on_alignment=STEADY)
def merge_kernel(
    plan,  # int32 [words]
    out,
    lse,  # float32, or None
    partials,  # float32 [num_partial_rows * (dim_vo + 1)]: outputs, then LSEs
    sinks,  # float32 [heads], or None
    num_partial_rows,
    out_row, out_head,  # strides, in elements
    lse_row, lse_head,
    variant: tl.constexpr,
):  # fmt: skip
    """All merges of a strand: some for each first index of the grid, and some of their rows for each second one."""
    partial_lse = partials + num_partial_rows.to(tl.int64) * variant.dim_vo
    for index in range(tl.program_id(0), num_merges(plan), tl.num_programs(0)):
        merge = load_merge(plan, index)
        if merge[7] == variant.strand:
            rows: tl.constexpr = variant.merged_rows
            for first in range(tl.program_id(1) * rows, merge[2], tl.num_programs(1) * rows):
                merge_rows(
                    merge, first, plan, (out, out_row, out_head), (lse, lse_row, lse_head), (partials, partial_lse),
                    sinks, variant,
                )  # fmt: skip
