"""The kernel: both strands side by side on every SM, each with warps that compute and one that loads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sennit.backends.hopper.kernels.loading import load_strand
from sennit.backends.hopper.kernels.narrow import compute_narrow
from sennit.backends.hopper.kernels.rows import PAGE_SLOTS
from sennit.backends.hopper.kernels.wide import compute_wide

__all__ = ["attend_kernel"]


@gluon.jit
def make_barriers(number: gl.constexpr, arrivals: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(number):
        mbarrier.init(barriers.index(index), count=arrivals)
    return barriers


@gluon.jit
def make_shared(element: gl.constexpr, tile: gl.constexpr, parts: gl.constexpr, columns: gl.constexpr):
    """``(queries, ring)`` of a strand: buffers, barriers that say when they are full, and when they are free."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = (
        gl.allocate_shared_memory(element, [parts, tile.rows // parts, columns], layout),
        make_barriers(parts, 1),
        make_barriers(parts, 1),
    )
    ring = (
        gl.allocate_shared_memory(element, [tile.buffers, tile.keys, columns], layout),
        make_barriers(tile.buffers, 1),
        make_barriers(tile.buffers, parts),
    )
    return queries, ring


@gluon.jit
def make_page_slots(ring, tile: gl.constexpr, variant: gl.constexpr):
    """Room for the pages of some steps; what stands for it where the copy engine brings boxes is not looked at."""
    if variant.boxes:
        slots = ring[1]
    else:
        slots = gl.allocate_shared_memory(gl.int32, [PAGE_SLOTS, tile.keys], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return slots


STEADY = [
    "plan", "page_table", "kv_lens", "lse", "partials", "counters", "times", "packed_mask", "sinks", "alibi_slopes"
]  # fmt: skip


@gluon.jit(do_not_specialize=["num_partial_rows"], do_not_specialize_on_alignment=STEADY)
def attend_kernel(
    plan,  # int32 [words]
    page_table,  # int32 [entries]
    kv_lens,  # int32 [requests], or None
    q,
    wide_boxes, narrow_boxes,  # descriptors of queries, [rows, heads, columns], with boxes of each strand
    k_pool, v_pool,  # descriptors of the pools as rows, or the pools
    out,
    lse,  # float32, or None
    partials,  # float32 [num_partial_rows * (dim_vo + 1)]: outputs, then LSEs
    counters,  # int32 [merges * 2], zeros
    times,  # int64 [items, 2], or None: see `store_times`
    packed_mask,  # uint8 [bytes], or None
    sinks,  # float32 [heads], or None
    alibi_slopes,  # float32 [heads], or None
    captures,  # what `change` takes
    sm_scale: gl.float32,
    num_partial_rows,
    q_row, q_head,  # strides, in elements
    k_page, k_slot, k_head,  # of rows: a page in rows, a head in rows and in columns; of pools: strides of their axes
    v_page, v_slot, v_head,
    out_row, out_head,
    lse_row, lse_head,
    variant: gl.constexpr,
    change: gl.constexpr,
):  # fmt: skip
    """All items of the worker on this SM."""
    element: gl.constexpr = q.dtype.element_ty
    partial_lse = partials + gl.to_tensor(num_partial_rows).to(gl.int64) * variant.dim_vo
    inputs = kv_lens, packed_mask, sinks, alibi_slopes, captures, sm_scale
    outputs = (out, out_row, out_head), (lse, lse_row, lse_head), (partials, partial_lse), counters, times
    query = q, q_row, q_head
    keys = k_pool, k_page, k_slot, k_head
    values = v_pool, v_page, v_slot, v_head
    wide: gl.constexpr = variant.wide
    narrow: gl.constexpr = variant.narrow
    loaders: gl.constexpr = variant.loader_warps
    loading: gl.constexpr = variant.loader_registers
    weighing: gl.constexpr = variant.wide_registers
    if narrow is not None:
        narrow_queries, narrow_ring = make_shared(element, narrow, 1, variant.columns)
        weights = gl.allocate_shared_memory(element, [2, narrow.rows, narrow.keys], gl.NVMMASharedLayout(128, 16, 2))
        narrow_pages = make_page_slots(narrow_ring, narrow, variant)
    if wide is not None:
        wide_queries, wide_ring = make_shared(element, wide, 2, variant.columns)
        wide_pages = make_page_slots(wide_ring, wide, variant)
    if narrow is None:
        gl.warp_specialize([
            (compute_wide, (plan, query, inputs, outputs, wide_queries, wide_ring, 0, variant, change)),
            (compute_wide, (plan, query, inputs, outputs, wide_queries, wide_ring, 1, variant, change)),
            (load_strand, (
                plan, page_table, kv_lens, wide_boxes, keys, values,
                wide_queries, wide_ring, wide_pages, 0, wide, 2, variant,
            )),
        ], [4, loaders], [weighing, loading])  # fmt: skip
    elif wide is None:
        gl.warp_specialize([
            (compute_narrow, (plan, query, inputs, outputs, narrow_queries, narrow_ring, weights, variant, change)),
            (load_strand, (
                plan, page_table, kv_lens, narrow_boxes, keys, values,
                narrow_queries, narrow_ring, narrow_pages, 0, narrow, 1, variant,
            )),
        ], [loaders], [loading])  # fmt: skip
    else:
        gl.warp_specialize([
            (compute_wide, (plan, query, inputs, outputs, wide_queries, wide_ring, 0, variant, change)),
            (compute_wide, (plan, query, inputs, outputs, wide_queries, wide_ring, 1, variant, change)),
            (compute_narrow, (plan, query, inputs, outputs, narrow_queries, narrow_ring, weights, variant, change)),
            (load_strand, (
                plan, page_table, kv_lens, wide_boxes, keys, values,
                wide_queries, wide_ring, wide_pages, 0, wide, 2, variant,
            )),
            (load_strand, (
                plan, page_table, kv_lens, narrow_boxes, keys, values,
                narrow_queries, narrow_ring, narrow_pages, 1, narrow, 1, variant,
            )),
        ], [4, 4, loaders, loaders], [weighing, narrow.registers, loading, loading])  # fmt: skip
