"""Where results go: rows of the output, or partial results."""

import triton
import triton.language as tl

__all__ = ["store_partial", "store_rows"]


@triton.jit
def store_columns(rows, exists, values, first: tl.constexpr, width: tl.constexpr, dim: tl.constexpr):
    columns = first + tl.arange(0, width)
    at = rows[:, None] + columns[None, :]
    if first + width > dim:
        tl.store(at, values.to(rows.dtype.element_ty), mask=exists[:, None] & (columns < dim)[None, :])
    else:
        tl.store(at, values.to(rows.dtype.element_ty), mask=exists[:, None])


@triton.jit
def store_rows(values, tail, lse_values, rows, heads, exists, out, lse, variant: tl.constexpr):
    """Final rows and, if it is wanted, their LSE; ``out`` and ``lse`` are ``(pointer, row stride, head stride)``."""
    row, head = rows.to(tl.int64), heads.to(tl.int64)
    at = out[0] + row * out[1] + head * out[2]
    store_columns(at, exists, values, 0, variant.vo.main, variant.vo.dim)
    if variant.vo.tail > 0:
        store_columns(at, exists, tail, variant.vo.main, variant.vo.tail, variant.vo.dim)
    if lse[0] is not None:
        tl.store(lse[0] + row * lse[1] + head * lse[2], lse_values, mask=exists)


@triton.jit
def store_partial(values, tail, lse_values, first_row, exists, partials, variant: tl.constexpr, rows: tl.constexpr):
    """Partial results; ``partials`` is ``(outputs, LSEs)``."""
    row = (first_row + tl.arange(0, rows)).to(tl.int64)
    at = partials[0] + row * variant.vo.dim
    store_columns(at, exists, values, 0, variant.vo.main, variant.vo.dim)
    if variant.vo.tail > 0:
        store_columns(at, exists, tail, variant.vo.main, variant.vo.tail, variant.vo.dim)
    tl.store(partials[1] + row, lse_values, mask=exists)
