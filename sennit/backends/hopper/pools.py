"""How pools of keys and values are copied: as boxes of a matrix of rows, or row by row."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sennit.backends.gpus.launching import ALIGNED

__all__ = ["Rows", "box_rows", "rows_aligned", "rows_of"]

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
    """Tokens that can be copied at once; 1 where they are too few for the copy engine.

    >>> [box_rows(size) for size in (16, 48, 256, 8, 12, 1)]
    [16, 16, 64, 8, 1, 1]
    """
    if page_size is None:
        return PACKED_BOX_ROWS
    rows = min(page_size & -page_size, MOST_BOX_ROWS)
    return rows if rows >= FEWEST_BOX_ROWS else 1


def rows_of(pool: torch.Tensor, columns: int) -> Rows | None:
    """An NHD view of a pool, or packed keys, as rows of which boxes of so many columns can be copied.

    None where no matrix of rows has its strides, or where boxes would reach into the next head, which may hold
    infinities: a query of zero does not cancel them.
    """
    *pages, slots, heads, dim = pool.shape
    *page_stride, stride, head_stride, _ = pool.stride()
    if heads == 1:
        head_stride = 0
    page_rows, off = divmod(page_stride[0], stride) if pages and pages[0] > 1 else (slots, 0)
    inside = head_stride < stride
    head_rows, head_columns = (0, head_stride) if inside else (head_stride // stride, head_stride % stride)
    if off or (head_rows and head_columns) or (head_columns and dim < columns):
        return None
    count = ((pages[0] - 1) * page_rows if pages else 0) + slots + (heads - 1) * head_rows
    return Rows(count, (heads - 1) * head_columns + dim, stride, page_rows, head_rows, head_columns)


def rows_aligned(pool: torch.Tensor) -> bool:
    """Whether every token and head begins at a multiple of 16 bytes, which can be copied at once."""
    size = pool.element_size()
    strides = [stride for stride, length in zip(pool.stride()[:-1], pool.shape, strict=False) if length > 1]
    bytes_wide = pool.shape[-1] * size
    return all(number % ALIGNED == 0 for number in (pool.data_ptr(), bytes_wide, *(n * size for n in strides)))
