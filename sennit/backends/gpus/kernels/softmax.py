"""The online softmax: weights relative to the largest logit so far, and sums that follow it."""

import triton
import triton.language as tl

__all__ = [
    "add_weights",
    "empty_state",
    "empty_sums",
    "empty_totals",
    "lse_and_factor",
    "of_keys",
    "of_rows",
    "sum_weights",
    "weigh",
    "weigh_bare",
    "with_sinks",
]

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def of_rows(values, keys_first: tl.constexpr):
    """A value a row, as a tile ``[rows, 1]``, or ``[1, rows]`` where keys come first."""
    return values[None, :] if keys_first else values[:, None]


@triton.jit
def of_keys(values, keys_first: tl.constexpr):
    """A value a key, likewise."""
    return values[:, None] if keys_first else values[None, :]


@triton.jit
def empty_state(rows: tl.constexpr):
    """``(largest, total)`` of rows that have seen no key: the largest logit times log2(e), and the sum of weights."""
    return tl.full([rows], float("-inf"), tl.float32), tl.zeros([rows], tl.float32)


@triton.jit
def empty_totals(rows: tl.constexpr, keys: tl.constexpr, keys_first: tl.constexpr):
    """Sums of weights that are sums of rows in the end alone: a tile of one a key of a step.

    So that warps which share a row's keys need not add them up in each step; and of thousands of keys such sums are
    more exact.
    """
    return tl.zeros([keys, rows], tl.float32) if keys_first else tl.zeros([rows, keys], tl.float32)


@triton.jit
def empty_sums(rows: tl.constexpr, variant: tl.constexpr, columns_first: tl.constexpr):
    """Sums of values, and those of a second tile of columns, which is one column where there is none."""
    main: tl.constexpr = variant.vo.main
    tail: tl.constexpr = variant.vo.tail if variant.vo.tail > 0 else 1
    if columns_first:
        sums = tl.zeros([main, rows], tl.float32), tl.zeros([tail, rows], tl.float32)
    else:
        sums = tl.zeros([rows, main], tl.float32), tl.zeros([rows, tail], tl.float32)
    return sums


@triton.jit
def add_weights(weights, factor, total, keys_first: tl.constexpr):
    """The total, of either form, times ``factor``, and weights."""
    if len(total.shape) == 2:
        total = total * of_rows(factor, keys_first) + weights
    else:
        total = total * factor + tl.sum(weights, 1)
    return total


@triton.jit
def sum_weights(total, keys_first: tl.constexpr):
    """The total of each row."""
    return tl.sum(total, 0 if keys_first else 1) if len(total.shape) == 2 else total


@triton.jit
def weigh(logits, largest, total, keys_first: tl.constexpr):
    """Weights of logits times log2(e), the factor of what was summed before, and the new ``(largest, total)``."""
    most = tl.maximum(largest, tl.max(logits, 0 if keys_first else 1))
    base = tl.where(most == float("-inf"), 0.0, most)  # -inf - -inf is NaN
    weights = tl.exp2(logits - of_rows(base, keys_first))
    factor = tl.exp2(largest - base)
    return weights, factor, most, add_weights(weights, factor, total, keys_first)


@triton.jit
def weigh_bare(products, scale, largest, total, keys_first: tl.constexpr):
    """The same for products of keys that every row sees, times a positive ``scale``, in fewer instructions.

    The product is not rounded before the largest is subtracted, which is within reach of float32 as long as products
    times ``scale`` stay under ``2**30``.
    """
    most = tl.maximum(largest, tl.max(products, 0 if keys_first else 1) * scale)
    weights = tl.exp2(products * scale - of_rows(most, keys_first))
    factor = tl.exp2(largest - most)
    return weights, factor, most, add_weights(weights, factor, total, keys_first)


@triton.jit
def lse_and_factor(largest, total):
    """Natural-log LSE of rows, and the factor that makes their sums averages; ``-inf`` and 0 without a key.

    A total of NaN is not 0: it must not pass for a row without keys.
    """
    seen = total != 0
    total = tl.where(seen, total, 1.0)
    return tl.where(seen, (largest + tl.log2(total)) * LN2, float("-inf")), tl.where(seen, 1.0 / total, 0.0)


@triton.jit
def with_sinks(lse, heads, sinks):
    """LSE of rows with their heads' learned sinks, and the factor of their outputs."""
    sink = tl.load(sinks + heads)
    most = tl.maximum(lse, sink)
    most = tl.where(most == float("-inf"), 0.0, most)
    everything = sink == float("inf")  # whose difference from itself is NaN
    weight = tl.where(everything, 0.0, tl.exp(lse - most))
    total = tl.where(everything, 1.0, weight + tl.exp(sink - most))
    seen = total != 0  # NaN included
    return tl.where(seen, most + tl.log(total), float("-inf")), tl.where(seen, weight / total, 0.0)
