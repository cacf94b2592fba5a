"""The narrow strand: one group of warps, for tiles of few rows, bound by reading keys and values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sennit.backends.gpus.kernels.plan import worker_items
from sennit.backends.hopper.kernels.buffers import clear_values, get_queries
from sennit.backends.hopper.kernels.items import open_item, rows_of_head
from sennit.backends.hopper.kernels.names import synchronize
from sennit.backends.hopper.kernels.output import now, store_sums, store_times
from sennit.backends.hopper.kernels.pauses import pause
from sennit.backends.hopper.kernels.steps import step_at
from sennit.backends.hopper.kernels.weights import weigh_step

__all__ = ["compute_narrow"]


@gluon.jit
def publish(weights, to):
    """Put weights, of which warps have different keys, where products read them."""
    to.permute((1, 0)).store(weights.to(to.dtype))
    fence_async_shared()
    synchronize()


@gluon.jit
def compute_narrow(
    plan, q, inputs, outputs, queries, ring, weight_buffers, variant: gl.constexpr, change: gl.constexpr
):  # fmt: skip
    """Tiles of all narrow items, with keys as the rows of products, and packed query rows as their few columns.

    While the weights of a step are made, its predecessor's meet their values.
    Weights alternate between two buffers: some warps may write those of a step while others' products read the last.
    """
    kv_lens, sinks, alibi_slopes = inputs[0], inputs[2], inputs[3]
    times = outputs[4]
    tile: gl.constexpr = variant.narrow
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile.rows, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, layout)
    query_buffers, taken = queries[0], queries[2]
    buffers, full, empty = ring
    query = query_buffers.index(0).permute((1, 0))
    key_lanes = gl.arange(0, tile.keys, gl.SliceLayout(1, layout))
    nothing = gl.full([tile.keys, tile.rows], 0.0, gl.float32, layout)
    lanes = gl.arange(0, tile.rows, row_layout)
    number = 0
    asked = 0
    first_item, last_item = worker_items(plan, variant.narrow_strand, gl.program_id(0))
    for index in range(first_item, last_item):
        start = index
        if times is not None:
            start = now()
        item, segment, tree, steps, item_rows = open_item(plan, index, kv_lens, lanes, tile.keys, variant)
        num_steps = steps[3]
        for kv_head in range(item[3], item[3] + item[4]):
            rows = rows_of_head(item_rows, kv_head, alibi_slopes, variant)
            largest = gl.full([tile.rows], float("-inf"), gl.float32, row_layout)
            total = gl.full([tile.keys, tile.rows], 0.0, gl.float32, layout)
            sums = gl.full([variant.columns, tile.rows], 0.0, gl.float32, layout)
            get_queries(q, queries, asked, segment, item, kv_head, 0, variant)
            asked += 1
            if num_steps > 0:
                at = number % tile.buffers
                mbarrier.wait(full.index(at), (number // tile.buffers) & 1)
                products = warpgroup_mma(buffers.index(at), query, nothing, use_acc=False, is_async=True)
                products = warpgroup_mma_wait(0, deps=(products,))
                mbarrier.arrive(empty.index(at), count=1)
                number += 1
                step = step_at(0, steps, tile.keys, variant)
                weights, factor, largest, total = weigh_step(
                    products, step, key_lanes, rows, segment, tree, inputs, largest, total, True, variant, change
                )
                publish(weights, weight_buffers.index(0))
                for later in range(1, num_steps):
                    at = number % tile.buffers
                    pause(variant)
                    mbarrier.wait(full.index(at), (number // tile.buffers) & 1)
                    products = warpgroup_mma(buffers.index(at), query, nothing, use_acc=False, is_async=True)
                    values_at = (number + 1) % tile.buffers
                    mbarrier.wait(full.index(values_at), ((number + 1) // tile.buffers) & 1)
                    if variant.num_sink_tokens > 0:  # else only the last step can reach past the last key
                        clear_values(buffers, values_at, step[0], segment[5], variant.box_rows)
                    sums = warpgroup_mma(
                        buffers.index(values_at).permute((1, 0)),
                        weight_buffers.index((later - 1) % 2).permute((1, 0)), sums, is_async=True,
                    )  # fmt: skip
                    products = warpgroup_mma_wait(1, deps=(products,))
                    pause(variant)
                    mbarrier.arrive(empty.index(at), count=1)
                    step = step_at(later, steps, tile.keys, variant)
                    weights, factor, largest, total = weigh_step(
                        products, step, key_lanes, rows, segment, tree, inputs, largest, total, True, variant, change
                    )
                    sums = warpgroup_mma_wait(0, deps=(sums,))
                    pause(variant)
                    mbarrier.arrive(empty.index(values_at), count=1)
                    publish(weights, weight_buffers.index(later % 2))
                    sums = sums * factor[None, :]
                    number += 2
                pause(variant)
                mbarrier.arrive(taken.index(0), count=1)
                at = number % tile.buffers
                mbarrier.wait(full.index(at), (number // tile.buffers) & 1)
                clear_values(buffers, at, step[0], segment[5], variant.box_rows)
                sums = warpgroup_mma(
                    buffers.index(at).permute((1, 0)), weight_buffers.index((num_steps - 1) % 2).permute((1, 0)), sums,
                    is_async=True,
                )  # fmt: skip
                sums = warpgroup_mma_wait(0, deps=(sums,))
                mbarrier.arrive(empty.index(at), count=1)
                number += 1
            else:
                mbarrier.arrive(taken.index(0), count=1)
            store_sums(
                sums, largest, gl.sum(total, 0), lanes, gl.arange(0, variant.columns, gl.SliceLayout(1, layout)),
                item, segment, kv_head, plan, outputs, sinks, 0, True, variant,
            )  # fmt: skip
        store_times(times, index, start)
