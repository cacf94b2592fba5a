"""What both strands make of products of queries and keys: weights relative to the largest logit so far."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sennit.backends.triton.kernels.logits import change_logits, key_positions, seen_keys, times_log2e
from sennit.backends.triton.kernels.softmax import weigh, weigh_bare

__all__ = ["weigh_step"]

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def weigh_step(
    products, step, lanes, rows, segment, tree, inputs, largest, total, keys_first: gl.constexpr,
    variant: gl.constexpr, change: gl.constexpr,
):  # fmt: skip
    """Weights, the factor of what was summed before, and the new ``(largest, total)``.

    Args:
        products: of a step, ``[rows, keys]``, or ``[keys, rows]`` where keys come first.
        step: see ``steps.step_at``.
        lanes: number of each key in the step.
        rows: token, head and position of each row, and its ALiBi slope.
        segment, tree: see ``plan.load_segment``.
        inputs: see ``kernel.attend_kernel``.
        largest, total: of the steps before.
    """
    first, low, high, bare = step
    tokens, heads, positions, slopes = rows
    packed_mask, alibi_slopes, captures, sm_scale = inputs[1], inputs[3], inputs[4], inputs[5]
    request, exact_len, key_offset, tree_len = segment[0], segment[5], segment[6], segment[8]
    transforms: gl.constexpr = variant.logits_soft_cap is not None or alibi_slopes is not None or change is not None
    plain: gl.constexpr = variant.ordinary_scale and not transforms
    if packed_mask is not None:
        bare = False
    if plain and bare:
        weights, factor, largest, total = weigh_bare(products, sm_scale * LOG2E, largest, total, keys_first)
    else:
        keys = first + lanes
        there = (keys >= low) & (keys < high)
        key_position = key_positions(keys, key_offset, high, exact_len, tree_len, tree, variant.trees)
        if transforms:
            logits = change_logits(
                products, positions, key_position, heads, slopes, request, captures, sm_scale, variant, change,
                alibi_slopes is not None, keys_first,
            )  # fmt: skip
        else:
            logits = times_log2e(products * sm_scale)
        if not bare:
            seen = seen_keys(
                there, keys, key_position, tokens, positions, segment, tree, packed_mask, variant, keys_first
            )
            logits = gl.where(seen, logits, float("-inf"))
        weights, factor, largest, total = weigh(logits, largest, total, keys_first)
    return weights, factor, largest, total
