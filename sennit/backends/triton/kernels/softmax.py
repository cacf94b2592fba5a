"""The online softmax: weights relative to the largest logit so far, and sums that follow it."""

import triton
import triton.language as tl

__all__ = ["empty_state", "empty_sums", "lse_and_factor", "weigh", "weigh_bare"]

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def empty_state(rows: tl.constexpr):
    """``(largest, total)`` of rows that have seen no key: the largest logit times log2(e), and the sum of weights."""
    return tl.full([rows], float("-inf"), tl.float32), tl.zeros([rows], tl.float32)


@triton.jit
def empty_sums(rows: tl.constexpr, variant: tl.constexpr):
    """Sums of values, and those of a second tile of columns, which is one column where there is none."""
    main: tl.constexpr = variant.vo.main
    tail: tl.constexpr = variant.vo.tail if variant.vo.tail > 0 else 1
    return tl.zeros([rows, main], tl.float32), tl.zeros([rows, tail], tl.float32)


@triton.jit
def weigh(logits, largest, total):
    """Weights of logits times log2(e), the factor of what was summed before, and the new ``(largest, total)``."""
    most = tl.maximum(largest, tl.max(logits, 1))
    base = tl.where(most == float("-inf"), 0.0, most)  # -inf - -inf is NaN
    weights = tl.exp2(logits - base[:, None])
    factor = tl.exp2(largest - base)
    return weights, factor, most, total * factor + tl.sum(weights, 1)


@triton.jit
def weigh_bare(products, scale, largest, total):
    """The same for products of keys that every row sees, times a positive ``scale``, in fewer instructions.

    The product is not rounded before the largest is subtracted, which is within reach of float32 as long as products
    times ``scale`` stay under ``2**30``.
    """
    most = tl.maximum(largest, tl.max(products, 1) * scale)
    weights = tl.exp2(products * scale - most[:, None])
    factor = tl.exp2(largest - most)
    return weights, factor, most, total * factor + tl.sum(weights, 1)


@triton.jit
def lse_and_factor(largest, total):
    """Natural-log LSE of rows, and the factor that makes their sums averages; ``-inf`` and 0 without a key.

    A total of NaN is not 0: it must not pass for a row without keys.
    """
    seen = total != 0
    total = tl.where(seen, total, 1.0)
    return tl.where(seen, (largest + tl.log2(total)) * LN2, float("-inf")), tl.where(seen, 1.0 / total, 0.0)
