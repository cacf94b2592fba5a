"""Pools of keys and values as rows of one matrix, boxes of which are copied at once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sennit.backends.gpus.launching import ALIGNED
from sennit.errors import InvalidInput

__all__ = ["Rows", "box_rows", "rows_of"]

MOST_BOX_ROWS = 64
PACKED_BOX_ROWS = 16  # whose last ones are cleared where nobody owns them
FEWEST_BOX_ROWS = 8  # shared memory is swizzled in eights


class Rows(NamedTuple):
    """A pool as rows.

    Attributes:
        num_rows: that there are.
        width: columns of a row that belong to a token.
        stride: from one to the next, in elements.
        page_rows: from a page to the next.
        head_rows, head_columns: from a head to the next.
    """

    num_rows: int
    width: int
    stride: int
    page_rows: int
    head_rows: int
    head_columns: int


def box_rows(page_size: int | None) -> int:
    """Tokens that can be copied at once; under 8 there are none.

    >>> [box_rows(size) for size in (16, 48, 256, 8, 12)]
    [16, 16, 64, 8, 4]
    """
    if page_size is None:
        return PACKED_BOX_ROWS
    return min(page_size & -page_size, MOST_BOX_ROWS)


def rows_of(name: str, pool: torch.Tensor) -> Rows:
    """An NHD view of a pool, or packed keys, as rows.

    Raises:
        InvalidInput: its strides are such that no matrix of rows holds it.
    """
    *pages, slots, heads, dim = pool.shape
    *page_stride, stride, head_stride, _ = pool.stride()
    if heads == 1:
        head_stride = 0
    page_rows, off = divmod(page_stride[0], stride) if pages and pages[0] > 1 else (slots, 0)
    inside = head_stride < stride
    head_rows, head_columns = (0, head_stride) if inside else (head_stride // stride, head_stride % stride)
    size = pool.element_size()
    aligned = all(number * size % ALIGNED == 0 for number in (stride, head_columns)) and pool.data_ptr() % ALIGNED == 0
    if off or (head_rows and head_columns) or not aligned:
        raise InvalidInput(
            name,
            expected="pages and heads a whole number of token strides apart, and rows at multiples of 16 bytes",
            got=f"strides {pool.stride()}",
            hint='a contiguous pool, or BatchAttention(backend="triton")',
        )
    count = ((pages[0] - 1) * page_rows if pages else 0) + slots + (heads - 1) * head_rows
    return Rows(count, (heads - 1) * head_columns + dim, stride, page_rows, head_rows, head_columns)
