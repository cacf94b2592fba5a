"""Which keys the rows of an item may see."""

import triton
import triton.language as tl

__all__ = ["key_ranges"]


@triton.jit
def key_ranges(segment, item, variant: tl.constexpr):
    """``(sink_start, sink_end, start, end, bare_start, bare_end)``: what some row of an item may see of its keys.

    Sink tokens have a range of their own where there is a window. All rows see all keys of the bare range::

        |sinks|    hidden    | some rows | bare: all rows | some rows |
        sink_start           start                                  end
    """
    _, _, q_len, _, _, exact_len, key_offset, causal, tree_len, _ = segment
    _, row_start, num_rows, _, _, _, key_start, hole_start, key_end, _ = item
    # Positions of the first and the last row, or limits of them.
    first = exact_len - q_len + row_start // variant.group_size
    last = exact_len - q_len + (row_start + num_rows - 1) // variant.group_size
    committed = exact_len - tree_len
    if variant.trees:
        first = tl.where(tree_len > 0, committed, first)
        last = tl.where(tree_len > 0, exact_len - 1, last)
    ordered = (causal != 0) & (tree_len == 0)
    end = tl.minimum(key_end, exact_len)
    end = tl.where(ordered, tl.minimum(end, last + 1 - key_offset), end)
    sink_start = key_start
    sink_end = key_start
    start = key_start
    if variant.num_sink_tokens > 0:
        sink_end = tl.maximum(tl.minimum(tl.minimum(hole_start, variant.num_sink_tokens - key_offset), end), key_start)
        start = sink_end
    bare_end = end
    bare_end = tl.where(ordered, tl.minimum(bare_end, first + 1 - key_offset), bare_end)
    if variant.trees:
        bare_end = tl.where(tree_len > 0, tl.minimum(bare_end, committed), bare_end)
    if variant.window_right is not None:
        reach = last.to(tl.int64) + variant.window_right + 1 - key_offset
        end = tl.minimum(reach, end).to(tl.int32)
        reach = first.to(tl.int64) + variant.window_right + 1 - key_offset
        bare_end = tl.minimum(reach, bare_end).to(tl.int32)
    bare_start = start
    if variant.window_left is not None:
        reach = first.to(tl.int64) - variant.window_left - key_offset
        start = tl.maximum(reach, start).to(tl.int32)
        reach = last.to(tl.int64) - variant.window_left - key_offset
        bare_start = tl.minimum(tl.maximum(reach, start), tl.maximum(end, start)).to(tl.int32)
    return sink_start, sink_end, start, end, bare_start, bare_end
