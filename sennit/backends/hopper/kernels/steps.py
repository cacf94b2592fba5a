"""The steps over the keys of an item, in the order in which they are loaded and computed with."""

import triton
import triton.language as tl

from sennit.backends.gpus.kernels.ranges import key_ranges

__all__ = ["plan_steps", "step_at"]


@triton.jit
def plan_steps(segment, item, num_keys: tl.constexpr, variant: tl.constexpr):
    """``(ranges, start, sink steps, steps)`` of an item: steps over sink tokens come first, the others from ``start``.

    Steps begin where boxes do, and so may begin with keys that no row sees.
    """
    ranges = key_ranges(segment, item, variant)
    sink_start, sink_end, start, end, _, _ = ranges
    start = start // variant.box_rows * variant.box_rows
    num_sink_steps = tl.cdiv(sink_end - sink_start, num_keys)  # none where there are no sink tokens
    num_steps = num_sink_steps + tl.maximum(tl.cdiv(end - start, num_keys), 0)
    return ranges, start, num_sink_steps, num_steps


@triton.jit
def step_at(number, steps, num_keys: tl.constexpr, variant: tl.constexpr):
    """First key of a step, those from which and up to which it counts, and whether all rows see all of its keys."""
    ranges, start, num_sink_steps, _ = steps
    sink_start, sink_end, low, high, bare_start, bare_end = ranges
    first = start + number * num_keys
    if variant.num_sink_tokens > 0:
        sinks = number < num_sink_steps
        first = tl.where(sinks, sink_start // variant.box_rows * variant.box_rows, first - num_sink_steps * num_keys)
        first = tl.where(sinks, first + number * num_keys, first)
        low = tl.where(sinks, sink_start, low)
        high = tl.where(sinks, sink_end, high)
        bare_end = tl.where(sinks, 0, bare_end)
    return first, low, high, (first >= bare_start) & (first + num_keys <= bare_end)
