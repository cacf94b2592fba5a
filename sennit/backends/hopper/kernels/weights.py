"""What both strands make of products of queries and keys: weights relative to the largest logit so far."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sennit.backends.gpus.kernels.logits import change_logits, key_positions, seen_keys, times_log2e
from sennit.backends.gpus.kernels.softmax import add_weights, of_keys, of_rows, weigh

__all__ = ["weigh_step"]

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def mask_step(logits, step, lanes, rows, segment, tree, packed_mask, keys_first: gl.constexpr, variant: gl.constexpr):
    """Logits of a step in which some rows do not see some keys."""
    first, low, high, _bare = step
    tokens, _heads, positions, _slopes = rows
    exact_len, key_offset, causal, tree_len = segment[5], segment[6], segment[7], segment[8]
    keys = first + lanes
    if variant.ordered and packed_mask is None:
        # Keys from `low` on are counted; before it they are, without a sign, more than any count.
        end = gl.where(causal != 0, gl.minimum(positions - key_offset + 1, high), high)
        count = gl.maximum(end - low, 0).to(gl.uint32, bitcast=True)
        seen = of_keys((keys - low).to(gl.uint32, bitcast=True), keys_first) < of_rows(count, keys_first)
    else:
        there = (keys >= low) & (keys < high)
        key_position = key_positions(keys, key_offset, high, exact_len, tree_len, tree, variant.trees)
        seen = seen_keys(there, keys, key_position, tokens, positions, segment, tree, packed_mask, variant, keys_first)
    return gl.where(seen, logits, float("-inf"))


@gluon.jit
def weigh_products(products, scale, largest, total, keys_first: gl.constexpr):
    """As ``softmax.weigh`` for products times a positive ``scale``, not rounded before the largest is subtracted."""
    most = gl.maximum(largest, gl.max(products, 0 if keys_first else 1) * scale)
    base = gl.where(most == float("-inf"), 0.0, most)
    weights = gl.exp2(products * scale - of_rows(base, keys_first))
    factor = gl.exp2(largest - base)
    return weights, factor, most, add_weights(weights, factor, total, keys_first)


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
        inputs: see ``attention.attend_kernel``.
        largest, total: of the steps before.
    """
    packed_mask, alibi_slopes, captures, sm_scale = inputs[1], inputs[3], inputs[4], inputs[5]
    transforms: gl.constexpr = variant.logits_soft_cap is not None or alibi_slopes is not None or change is not None
    logits = products
    if transforms:
        keys = step[0] + lanes
        key_position = key_positions(keys, segment[6], step[2], segment[5], segment[8], tree, variant.trees)
        logits = change_logits(
            products, rows[2], key_position, rows[1], rows[3], segment[0], captures, sm_scale, variant, change,
            alibi_slopes is not None, keys_first,
        )  # fmt: skip
    elif not variant.ordinary_scale:
        logits = times_log2e(products * sm_scale)
    bare = step[3]
    if packed_mask is not None:
        bare = False
    if not bare:
        logits = mask_step(logits, step, lanes, rows, segment, tree, packed_mask, keys_first, variant)
    if transforms or not variant.ordinary_scale:
        weights, factor, largest, total = weigh(logits, largest, total, keys_first)
    else:
        weights, factor, largest, total = weigh_products(logits, sm_scale * LOG2E, largest, total, keys_first)
    return weights, factor, largest, total
