"""The attention kernel: the persistent workers of one strand, each running its items."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sennit.backends.gpus.kernels.logits import change_logits, key_positions, row_positions, seen_keys, times_log2e
from sennit.backends.gpus.kernels.plan import load_item, load_segment, packed_rows, worker_items
from sennit.backends.gpus.kernels.ranges import key_ranges
from sennit.backends.gpus.kernels.softmax import (
    empty_state,
    empty_sums,
    empty_totals,
    lse_and_factor,
    sum_weights,
    weigh,
    weigh_bare,
    with_sinks,
)
from sennit.backends.triton.kernels.keys import load_columns, load_pages, pair_offsets
from sennit.backends.triton.kernels.merge import merge_if_last
from sennit.backends.triton.kernels.output import store_partial, store_rows

__all__ = ["attend_kernel"]

LOG2E = tl.constexpr(1.4426950408889634)
FLOATS_AT_ONCE = tl.constexpr(32)
LARGEST_SCALE = tl.constexpr(64.0)  # below which `weigh_bare` holds for any logits that make sense


@triton.jit
def masked_step(number, ranges, bare_first, num_bare, num_keys: tl.constexpr, variant: tl.constexpr):
    """First key and end of a step with masks: those over sink tokens, then those around the bare ones."""
    sink_start, sink_end, start, end, _, _ = ranges
    step = number
    if variant.num_sink_tokens > 0:
        step -= tl.cdiv(sink_end - sink_start, num_keys)
    step_start = start + (step + tl.where(step >= bare_first, num_bare, 0)) * num_keys
    step_end = end
    if variant.num_sink_tokens > 0:
        step_start = tl.where(step < 0, sink_start + number * num_keys, step_start)
        step_end = tl.where(step < 0, sink_end, step_end)
    return step_start, step_end


@triton.jit
def load_queries(rows, variant: tl.constexpr):
    """Tiles of queries; where products are of floats, the rows: their columns are read as needed."""
    main = rows
    tail = rows
    if not variant.floats:
        main = load_columns(rows, rows, 0, variant.qk.main, variant.dim_qk, False)
        if variant.qk.tail > 0:
            tail = load_columns(rows, rows, variant.qk.main, variant.qk.tail, variant.dim_qk, False)
    return main, tail


@triton.jit
def multiply_floats(
    query_rows, key_rows, there, num_rows: tl.constexpr, num_keys: tl.constexpr, variant: tl.constexpr,
    checked: tl.constexpr,
):  # fmt: skip
    """Products in float32, which no tensor core has: of some columns at a time, since all would not fit registers.

    Each time begins at zero: added to one after the other, long sums lose digits. The compiler lets ``tl.dot`` begin at
    what is added to its result, but not in a multiply-add.
    """
    products = tl.zeros([num_rows, num_keys], tl.float32)
    for first in range(0, variant.dim_qk, FLOATS_AT_ONCE):
        columns = first + tl.arange(0, FLOATS_AT_ONCE)
        known = (columns < variant.dim_qk)[None, :]
        query = tl.load(query_rows[:, None] + columns[None, :], mask=known, other=0.0).to(tl.float32)
        keys = known
        if checked:
            keys = known & there[:, None]
        key = tl.load(key_rows[:, None] + columns[None, :], mask=keys, other=0.0).to(tl.float32)
        products = tl.fma(tl.dot(query, tl.trans(key), input_precision="ieee"), 1.0, products)
    return products


@triton.jit
def multiply_keys(
    queries, key_rows, there, num_rows: tl.constexpr, num_keys: tl.constexpr, variant: tl.constexpr,
    checked: tl.constexpr, keys_first: tl.constexpr,
):  # fmt: skip
    """Products ``[rows, keys]`` or ``[keys, rows]``, and the tiles of keys, where these are not read piece by piece."""
    if variant.floats:
        products = multiply_floats(queries[0], key_rows, there, num_rows, num_keys, variant, checked)
        key = products
        tail = products
    else:
        key = load_columns(key_rows, there, 0, variant.qk.main, variant.dim_qk, checked)
        products = tl.dot(key, tl.trans(queries[0])) if keys_first else tl.dot(queries[0], tl.trans(key))
        tail = key
        if variant.qk.tail > 0:
            tail = load_columns(key_rows, there, variant.qk.main, variant.qk.tail, variant.dim_qk, checked)
            if keys_first:
                products = tl.dot(tail, tl.trans(queries[1]), products)
            else:
                products = tl.dot(queries[1], tl.trans(tail), products)
    return products, key, tail


@triton.jit
def add_product(weights, value, sums, factor, variant: tl.constexpr, keys_first: tl.constexpr):
    if variant.floats:  # see `multiply_floats`
        sums = tl.fma(sums, factor[:, None], tl.dot(weights, value, input_precision="ieee"))
    elif keys_first:
        sums = tl.dot(tl.trans(value), weights, sums * factor[None, :])
    else:
        sums = tl.dot(weights, value, sums * factor[:, None])
    return sums


@triton.jit
def add_values(
    weights, factor, sums, sums_tail, key, key_tail, value_rows, there, variant: tl.constexpr, checked: tl.constexpr,
    keys_first: tl.constexpr,
):  # fmt: skip
    """Sums times ``factor``, plus weights times values."""
    product_type = tl.float32 if variant.floats else key.dtype
    weights = weights.to(product_type)
    value = key
    if not variant.keys_are_values:
        value = load_columns(value_rows, there, 0, variant.vo.main, variant.dim_vo, checked).to(product_type)
    sums = add_product(weights, value, sums, factor, variant, keys_first)
    if variant.vo.tail > 0:
        value = key_tail
        if not variant.keys_are_values:
            value = load_columns(value_rows, there, variant.vo.main, variant.vo.tail, variant.dim_vo, checked)
            value = value.to(product_type)
        sums_tail = add_product(weights, value, sums_tail, factor, variant, keys_first)
    return sums, sums_tail


@triton.jit
def attend_head(
    segment, tree, item, ranges, kv_head, first_row, page_table, q, k, v, out, lse, partials, packed_mask, sinks,
    alibi_slopes, captures, sm_scale, variant: tl.constexpr, change: tl.constexpr,
):  # fmt: skip
    """One KV head of an item, of its rows those from ``first_row`` that a tile holds."""
    num_queries: tl.constexpr = variant.tile.rows
    num_keys: tl.constexpr = variant.tile.keys
    num_stages: tl.constexpr = variant.tile.stages
    # What looks things up key by key has no room in shared memory for the next steps.
    masked_stages: tl.constexpr = 1 if variant.trees or packed_mask is not None else num_stages
    keys_first: tl.constexpr = variant.tile.keys_first
    bare_loop: tl.constexpr = variant.tile.bare_loop and packed_mask is None
    request, q_start, q_len, kv_start, _, exact_len, key_offset, _, tree_len, _ = segment
    _, row_start, num_rows, head_start, _, partial_row, _, _, _, _ = item
    tokens, of_group, exists = packed_rows(
        row_start, num_rows, first_row + tl.arange(0, num_queries), variant.group_size
    )
    heads = kv_head * variant.group_size + of_group
    positions = row_positions(tokens, q_len, exact_len, tree_len, tree, variant.trees)
    transforms: tl.constexpr = variant.logits_soft_cap is not None or alibi_slopes is not None or change is not None
    slopes = positions
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads)
    scale = sm_scale * LOG2E  # where it is not too large
    wide_head = tl.full([], kv_head, tl.int64)
    row = (q_start + tokens).to(tl.int64)
    queries = load_queries(q[0] + row * q[1] + heads.to(tl.int64) * q[2], variant)
    k_head = k[0] + wide_head * k[3]
    v_head = v[0] + wide_head * v[3]
    largest, total = empty_state(num_queries)
    if keys_first or variant.floats:
        total = empty_totals(num_queries, num_keys, keys_first)
    sums, sums_tail = empty_sums(num_queries, variant, keys_first)
    lanes = tl.arange(0, num_keys)

    # Steps that need no masks, of all from `start`.
    sink_start, sink_end, start, end, bare_start, bare_end = ranges
    num_steps = tl.maximum(tl.cdiv(end - start, num_keys), 0)
    bare_first = 0
    num_bare = 0
    if bare_loop:
        bare_first = tl.minimum(tl.cdiv(bare_start - start, num_keys), num_steps)
        num_bare = tl.maximum((tl.maximum(bare_end, start) - start) // num_keys - bare_first, 0)
        num_bare = tl.where((sm_scale >= 0) & (sm_scale < LARGEST_SCALE), num_bare, 0)
    num_masked = num_steps - num_bare
    if variant.num_sink_tokens > 0:
        num_masked += tl.cdiv(sink_end - sink_start, num_keys)

    first, step_end = masked_step(0, ranges, bare_first, num_bare, num_keys, variant)
    pages = lanes
    if variant.page_size is not None:
        pages = load_pages(
            page_table, kv_start, first + lanes, tl.where(num_masked > 0, step_end, 0), variant.page_size
        )
    for number in tl.range(0, num_masked, num_stages=masked_stages):
        first, step_end = masked_step(number, ranges, bare_first, num_bare, num_keys, variant)
        keys = first + lanes
        there = keys < step_end
        if variant.page_size is not None:
            there &= pages >= 0  # given back behind a window
        k_offsets, v_offsets = pair_offsets(pages, kv_start, keys, k, v, variant)
        products, key, key_tail = multiply_keys(
            queries, k_head + k_offsets, there, num_queries, num_keys, variant, True, keys_first
        )
        if variant.page_size is not None:
            next_first, next_end = masked_step(number + 1, ranges, bare_first, num_bare, num_keys, variant)
            next_end = tl.where(number + 1 < num_masked, next_end, 0)
            pages = load_pages(page_table, kv_start, next_first + lanes, next_end, variant.page_size)
        key_position = key_positions(keys, key_offset, step_end, exact_len, tree_len, tree, variant.trees)
        if transforms:
            logits = change_logits(
                products, positions, key_position, heads, slopes, request, captures, sm_scale, variant, change,
                alibi_slopes is not None, keys_first,
            )  # fmt: skip
        else:
            logits = times_log2e(products * sm_scale)
        seen = seen_keys(there, keys, key_position, tokens, positions, segment, tree, packed_mask, variant, keys_first)
        logits = tl.where(seen, logits, float("-inf"))
        weights, factor, largest, total = weigh(logits, largest, total, keys_first)
        sums, sums_tail = add_values(
            weights, factor, sums, sums_tail, key, key_tail, v_head + v_offsets, there, variant, True, keys_first
        )

    if bare_loop:
        bare_at = start + bare_first * num_keys
        bare_stop = bare_at + num_bare * num_keys
        if variant.page_size is not None:
            pages = load_pages(page_table, kv_start, bare_at + lanes, bare_stop, variant.page_size)
        for first in tl.range(bare_at, bare_stop, num_keys, num_stages=num_stages):
            keys = first + lanes
            k_offsets, v_offsets = pair_offsets(pages, kv_start, keys, k, v, variant)
            products, key, key_tail = multiply_keys(
                queries, k_head + k_offsets, keys, num_queries, num_keys, variant, False, keys_first
            )
            if variant.page_size is not None:
                pages = load_pages(page_table, kv_start, keys + num_keys, bare_stop, variant.page_size)
            if transforms:
                logits = change_logits(
                    products, positions, key_offset + keys, heads, slopes, request, captures, sm_scale, variant, change,
                    alibi_slopes is not None, keys_first,
                )  # fmt: skip
                weights, factor, largest, total = weigh(logits, largest, total, keys_first)
            elif variant.floats:  # whose products may be large
                weights, factor, largest, total = weigh(times_log2e(products * sm_scale), largest, total, keys_first)
            else:
                weights, factor, largest, total = weigh_bare(products, scale, largest, total, keys_first)
            sums, sums_tail = add_values(
                weights, factor, sums, sums_tail, key, key_tail, v_head + v_offsets, keys, variant, False, keys_first
            )

    if keys_first:
        sums = tl.trans(sums)
        sums_tail = tl.trans(sums_tail)
    lse_values, factor = lse_and_factor(largest, sum_weights(total, keys_first))
    if partial_row >= 0:
        sums *= factor[:, None]
        sums_tail *= factor[:, None]
        at = partial_row + (kv_head - head_start) * num_rows + first_row
        store_partial(sums, sums_tail, lse_values, at, exists, partials, variant, num_queries)
    else:
        if sinks is not None:
            lse_values, sink_factor = with_sinks(lse_values, heads, sinks)
            factor *= sink_factor
        sums *= factor[:, None]
        sums_tail *= factor[:, None]
        store_rows(sums, sums_tail, lse_values, q_start + tokens, heads, exists, out, lse, variant)


STEADY = [
    "plan", "page_table", "kv_lens", "lse", "partials", "counters", "packed_mask", "sinks", "alibi_slopes"
]  # fmt: skip


@triton.jit(do_not_specialize=["num_partial_rows"], do_not_specialize_on_alignment=STEADY)
def attend_kernel(
    plan,  # int32 [words]
    page_table,  # int32 [entries]
    kv_lens,  # int32 [requests], or None
    q, k, v, out,
    lse,  # float32, or None
    partials,  # float32 [num_partial_rows * (dim_vo + 1)]: outputs, then LSEs
    counters,  # int32 [merges], zeros
    packed_mask,  # uint8 [bytes], or None
    sinks,  # float32 [heads], or None
    alibi_slopes,  # float32 [heads], or None
    captures,  # what `change` takes
    sm_scale: tl.float32,
    num_partial_rows,
    q_row, q_head,  # strides, in elements
    k_page, k_slot, k_head,
    v_page, v_slot, v_head,
    out_row, out_head,
    lse_row, lse_head,
    variant: tl.constexpr,
    change: tl.constexpr,
):  # fmt: skip
    """All items of one worker of a strand.

    Strands that share the device are launched one right after the other: the second may begin when all workers of the
    first have, and ends after them.
    """
    if variant.overlaps and variant.strand == 0:
        gdc_launch_dependents()
    partial_lse = partials + num_partial_rows.to(tl.int64) * variant.dim_vo
    sm_scale = tl.full([], sm_scale, tl.float32)  # in the interpreter it is a Python number
    first, last = worker_items(plan, variant.strand, tl.program_id(0))
    for index in range(first, last):
        item = load_item(plan, index)
        segment, tree = load_segment(plan, item[0], kv_lens)
        ranges = key_ranges(segment, item, variant)
        for kv_head in range(item[3], item[3] + item[4]):
            if variant.tile.rows >= variant.item_rows:  # without the loop, which takes registers
                attend_head(
                    segment, tree, item, ranges, kv_head, 0, page_table, (q, q_row, q_head),
                    (k, k_page, k_slot, k_head), (v, v_page, v_slot, v_head), (out, out_row, out_head),
                    (lse, lse_row, lse_head), (partials, partial_lse), packed_mask, sinks, alibi_slopes, captures,
                    sm_scale, variant, change,
                )  # fmt: skip
            else:
                for first_row in range(0, item[2], variant.tile.rows):
                    attend_head(
                        segment, tree, item, ranges, kv_head, first_row, page_table, (q, q_row, q_head),
                        (k, k_page, k_slot, k_head), (v, v_page, v_slot, v_head), (out, out_row, out_head),
                        (lse, lse_row, lse_head), (partials, partial_lse), packed_mask, sinks, alibi_slopes, captures,
                        sm_scale, variant, change,
                    )  # fmt: skip
            if variant.merges_itself:  # noqa: SIM102  # known when it is compiled
                if item[5] >= 0:
                    merge_if_last(
                        item[9] + kv_head - item[3], plan, (out, out_row, out_head), (lse, lse_row, lse_head),
                        (partials, partial_lse), counters, sinks, variant,
                    )  # fmt: skip
    if variant.overlaps and variant.strand == 1:
        gdc_wait()
