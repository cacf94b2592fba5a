"""What becomes of products before the softmax: scale, cap, ALiBi, users' functions, and what rows do not see."""

import triton
import triton.language as tl

from sennit.backends.gpus.kernels.operations import tanh
from sennit.backends.gpus.kernels.softmax import of_keys, of_rows

__all__ = ["change_logits", "key_positions", "row_positions", "seen_keys", "times_log2e"]

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(3.4028234663852886e38)  # float32


@triton.jit
def row_positions(tokens, q_len, exact_len, tree_len, tree, trees: tl.constexpr):
    """Position of each token of a segment."""
    positions = exact_len - q_len + tokens
    if trees:
        depths = tl.load(tree + tree_len - q_len + tokens, mask=tokens < tree_len, other=0)
        positions = tl.where(tree_len > 0, exact_len - tree_len + depths, positions)
    return positions


@triton.jit
def key_positions(keys, key_offset, end, exact_len, tree_len, tree, trees: tl.constexpr):
    """Position of each key; those from ``end`` on may have any."""
    positions = key_offset + keys
    if trees:
        committed = exact_len - tree_len
        pending = (keys >= committed) & (keys < end)  # none without a tree
        depths = tl.load(tree + keys - committed, mask=pending, other=0)
        positions = tl.where(pending, committed + depths, positions)
    return positions


@triton.jit
def times_log2e(logits):
    """Logits times log2(e), which makes none of them infinite that is not."""
    limited = tl.minimum(tl.maximum(logits * LOG2E, -LARGEST), LARGEST)
    return tl.where(tl.abs(logits) <= LARGEST, limited, logits)


@triton.jit
def change_logits(
    products, row_position, key_position, heads, slopes, request, captures, sm_scale, variant: tl.constexpr,
    change: tl.constexpr, alibi: tl.constexpr, keys_first: tl.constexpr,
):  # fmt: skip
    """Logits times log2(e) from products, before masks other than a user's."""
    logits = products * sm_scale
    if variant.logits_soft_cap is not None:
        logits = variant.logits_soft_cap * tanh(logits / variant.logits_soft_cap)
    if alibi:
        distance = of_keys(key_position, keys_first) - of_rows(row_position, keys_first)
        logits += of_rows(slopes, keys_first) * distance.to(tl.float32)
    if change is not None:
        head, row = of_rows(heads, keys_first), of_rows(row_position, keys_first)
        logits = change(logits, request, head, row, of_keys(key_position, keys_first), captures)
    return times_log2e(logits)


@triton.jit
def seen_keys(
    there, keys, key_position, tokens, row_position, segment, tree, packed_mask, variant: tl.constexpr,
    keys_first: tl.constexpr,
):  # fmt: skip
    """Which of the keys that are ``there`` each row sees: bool ``[rows, keys]``, or ``[keys, rows]``."""
    _, _, _, _, kv_len, exact_len, _, causal, tree_len, mask_at = segment
    there = of_keys(there, keys_first)
    keys = of_keys(keys, keys_first)
    tokens = of_rows(tokens, keys_first)
    key = of_keys(key_position, keys_first)
    row = of_rows(row_position, keys_first)
    # In one comparison: a tree, or no causality, lets rows see up to the last position that there is.
    last = tl.where((causal != 0) & (tree_len == 0), row, 2147483647)
    seen = there & (key <= last)
    if variant.window_left is not None or variant.window_right is not None:
        near = there
        if variant.window_left is not None:
            start = tl.maximum(row_position.to(tl.int64) - variant.window_left, -2147483648).to(tl.int32)
            near &= key >= of_rows(start, keys_first)
        if variant.window_right is not None:
            end = tl.minimum(row_position.to(tl.int64) + variant.window_right, 2147483647).to(tl.int32)
            near &= key <= of_rows(end, keys_first)
        seen &= near | (key < variant.num_sink_tokens)
    if variant.trees:
        node = keys - (exact_len - tree_len)
        pending = there & (node >= 0)  # none without a tree
        words = (tree_len + 31) // 32
        at = tree + tree_len + tokens * words + node // 32
        bits = tl.load(at, mask=seen & pending, other=0) >> (node % 32)
        seen &= (node < 0) | ((bits & 1) != 0)
    if packed_mask is not None:
        bit = tokens.to(tl.int64) * kv_len + keys
        bits = tl.load(packed_mask + mask_at + bit // 8, mask=seen, other=0).to(tl.int32) >> (bit % 8).to(tl.int32)
        seen &= (bits & 1) != 0
    return seen
