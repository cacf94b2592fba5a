"""The wide strand: two groups of warps, each of which computes 64 rows of a tile, bound by arithmetic."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from sennit.backends.gpus.kernels.plan import worker_items
from sennit.backends.hopper.kernels.buffers import clear_values, get_queries
from sennit.backends.hopper.kernels.items import open_item, rows_of_head
from sennit.backends.hopper.kernels.output import now, store_sums, store_times
from sennit.backends.hopper.kernels.pauses import pause
from sennit.backends.hopper.kernels.steps import step_at
from sennit.backends.hopper.kernels.weights import weigh_step

__all__ = ["compute_wide"]

ROWS = gl.constexpr(64)  # of a group of warps


@gluon.jit
def compute_wide(
    plan, q, inputs, outputs, queries, ring, part: gl.constexpr, variant: gl.constexpr, change: gl.constexpr
):  # fmt: skip
    """Rows ``64 * part : 64 * part + 64`` of the tiles of all wide items.

    While the weights of a step are made, its predecessor's meet their values, and meanwhile the other group of warps
    multiplies::

        tensor cores | K0 |    | K1 V0 |    | K2 V1 |    | ...
        softmax      |    | s0 |       | s1 |       | s2 | ...
    """
    kv_lens, sinks, alibi_slopes = inputs[0], inputs[2], inputs[3]
    times = outputs[4]
    tile: gl.constexpr = variant.wide
    logit_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile.keys, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, variant.columns, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, logit_layout)
    query_buffers, taken = queries[0], queries[2]
    buffers, full, empty = ring
    query = query_buffers.index(part)
    key_lanes = gl.arange(0, tile.keys, gl.SliceLayout(0, logit_layout))
    nothing = gl.full([ROWS, tile.keys], 0.0, gl.float32, logit_layout)
    number = 0
    asked = 0
    first_item, last_item = worker_items(plan, 0, gl.program_id(0))
    for index in range(first_item, last_item):
        start = index
        if times is not None:
            start = now()
        lanes = part * ROWS + gl.arange(0, ROWS, row_layout)
        item, segment, tree, steps, item_rows = open_item(plan, index, kv_lens, lanes, tile.keys, variant)
        num_steps = steps[3]
        for kv_head in range(item[3], item[3] + item[4]):
            rows = rows_of_head(item_rows, kv_head, alibi_slopes, variant)
            largest = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
            total = gl.full([ROWS], 0.0, gl.float32, row_layout)
            sums = gl.full([ROWS, variant.columns], 0.0, gl.float32, sum_layout)
            get_queries(q, queries, asked, segment, item, kv_head, part, variant)
            asked += 1
            if num_steps > 0:
                at = number % tile.buffers
                mbarrier.wait(full.index(at), (number // tile.buffers) & 1)
                products = warpgroup_mma(
                    query, buffers.index(at).permute((1, 0)), nothing, use_acc=False, is_async=True
                )
                products = warpgroup_mma_wait(0, deps=(products,))
                mbarrier.arrive(empty.index(at), count=1)
                number += 1
                step = step_at(0, steps, tile.keys, variant)
                weights, factor, largest, total = weigh_step(
                    products, step, key_lanes, rows, segment, tree, inputs, largest, total, False, variant, change
                )
                weights = gl.convert_layout(weights.to(query.dtype), weight_layout)
                # No product may be under way where the loop begins anew: the compiler would wait for each instruction.
                for later in range(1, num_steps):
                    at = number % tile.buffers
                    pause(variant)
                    mbarrier.wait(full.index(at), (number // tile.buffers) & 1)
                    products = warpgroup_mma(
                        query, buffers.index(at).permute((1, 0)), nothing, use_acc=False, is_async=True
                    )
                    values_at = (number + 1) % tile.buffers
                    mbarrier.wait(full.index(values_at), ((number + 1) // tile.buffers) & 1)
                    if variant.num_sink_tokens > 0:  # else only the last step can reach past the last key
                        clear_values(buffers, values_at, step[0], segment[5], variant.box_rows)
                    sums = warpgroup_mma(weights, buffers.index(values_at), sums, is_async=True)
                    products = warpgroup_mma_wait(1, deps=(products,))
                    pause(variant)
                    mbarrier.arrive(empty.index(at), count=1)
                    step = step_at(later, steps, tile.keys, variant)
                    next_weights, factor, largest, total = weigh_step(
                        products, step, key_lanes, rows, segment, tree, inputs, largest, total, False, variant, change
                    )
                    sums = warpgroup_mma_wait(0, deps=(sums,))
                    pause(variant)
                    mbarrier.arrive(empty.index(values_at), count=1)
                    weights = gl.convert_layout(next_weights.to(query.dtype), weight_layout)
                    sums = sums * gl.convert_layout(factor, gl.SliceLayout(1, sum_layout))[:, None]
                    number += 2
                pause(variant)
                mbarrier.arrive(taken.index(part), count=1)
                at = number % tile.buffers
                mbarrier.wait(full.index(at), (number // tile.buffers) & 1)
                clear_values(buffers, at, step[0], segment[5], variant.box_rows)
                sums = warpgroup_mma(weights, buffers.index(at), sums, is_async=True)
                sums = warpgroup_mma_wait(0, deps=(sums,))
                mbarrier.arrive(empty.index(at), count=1)
                number += 1
            else:
                mbarrier.arrive(taken.index(part), count=1)
            store_sums(
                sums, gl.convert_layout(largest, gl.SliceLayout(1, sum_layout)),
                gl.convert_layout(total, gl.SliceLayout(1, sum_layout)),
                part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, sum_layout)),
                gl.arange(0, variant.columns, gl.SliceLayout(0, sum_layout)),
                item, segment, kv_head, plan, outputs, sinks, part, False, variant,
            )  # fmt: skip
        if part == 0:
            store_times(times, index, start)
