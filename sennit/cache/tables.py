"""The page tables themselves: growing int32 rows, how much of each is used, and which cells a device mirror lacks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["NO_PAGE", "PageTables", "cells_of"]

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

NO_PAGE = -1  # what cells past a row's last page hold, and those of released pages
CLEAN = 2**31 - 1  # first dirty column of a row that has none


def cells_of(rows: Int64Array, first: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Indices of the table cells ``[rows[r], first[r] : first[r] + counts[r]]`` of every ``r``, in order.

    >>> rows, cols = cells_of(np.array([7, 2]), np.array([3, 0]), np.array([2, 1]))
    >>> rows.tolist(), cols.tolist()
    ([7, 7, 2], [3, 4, 0])
    """
    ends = np.cumsum(counts)
    offsets = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return np.repeat(rows, counts), np.repeat(first, counts) + offsets


class PageTables:
    """One row a sequence in each layer group: its pages in order. Rows ("slots") are handed out and taken back.

    Lengths are the same in all groups, and so are page counts: a page that a window has released keeps its cell.

    Attributes:
        pages: int32 ``[groups, slots, capacity]``; the first ``page_counts[slot]`` cells are in use, the others hold
            -1; slots and capacity grow.
        released: int64 ``[groups, slots]``; the pages from the group's sink pages to this one, without it, have been
            released, and their cells hold -1.
        lengths: int64 ``[slots]`` tokens stored.
        page_counts: int64 ``[slots]`` pages of each row.

    >>> tables = PageTables(groups=1, slots=1, capacity=2)
    >>> tables.take(np.array([[4, 9]], np.int32), tokens=20, released=np.array([0]))
    0
    >>> tables.take(np.array([[7]], np.int32), tokens=3, released=np.array([0]))
    1
    >>> tables.pages.tolist()
    [[[4, 9], [7, -1]]]
    """

    def __init__(self, groups: int, slots: int, capacity: int) -> None:
        self.pages: Int32Array = np.full((groups, slots, capacity), NO_PAGE, np.int32)
        self.released: Int64Array = np.zeros((groups, slots), np.int64)
        self.lengths: Int64Array = np.zeros(slots, np.int64)
        self.page_counts: Int64Array = np.zeros(slots, np.int64)
        self.free_slots = list(range(slots))[::-1]
        # Cells [_dirty_lo, _dirty_hi) of a row, in any group, may differ from a device mirror.
        self._dirty_lo: Int64Array = np.full(slots, CLEAN, np.int64)
        self._dirty_hi: Int64Array = np.zeros(slots, np.int64)

    def take(self, pages: Int32Array, *, tokens: int, released: Int64Array) -> int:
        """Use a free row for ``tokens`` tokens in these ``[groups, n]`` pages, and return its slot."""
        if not self.free_slots:
            self.grow(slots=len(self.lengths) + 1)
        slot, count = self.free_slots.pop(), pages.shape[1]
        self.pages[:, slot, :count] = pages
        self.released[:, slot] = released
        self.lengths[slot], self.page_counts[slot] = tokens, count
        self._dirty_lo[slot], self._dirty_hi[slot] = 0, count
        return slot

    def cut(self, slot: int, *, pages: int, tokens: int, released: Int64Array) -> Int32Array:
        """Keep a row's first ``pages`` pages and ``tokens`` tokens; return the cells dropped, ``[groups, n]``."""
        dropped: Int32Array = self.pages[:, slot, pages : self.page_counts[slot]].copy()
        self.pages[:, slot, pages : self.page_counts[slot]] = NO_PAGE
        self.released[:, slot] = released
        self.lengths[slot], self.page_counts[slot] = tokens, pages
        return dropped

    def give(self, slot: int) -> None:
        """Take back a row that was cut to nothing."""
        self._dirty_lo[slot], self._dirty_hi[slot] = CLEAN, 0
        self.free_slots.append(slot)

    def grow(self, *, slots: int = 0, capacity: int = 0) -> None:
        """Make room for ``slots`` rows of ``capacity`` pages, at least doubling whichever is short."""
        _, rows, cols = self.pages.shape
        if slots <= rows and capacity <= cols:
            return
        more_rows = max(slots, 2 * rows) - rows if slots > rows else 0
        more_cols = max(capacity, 2 * cols) - cols if capacity > cols else 0
        pages = np.pad(self.pages, ((0, 0), (0, more_rows), (0, more_cols)), constant_values=NO_PAGE)
        released = np.pad(self.released, ((0, 0), (0, more_rows)))
        lengths, counts, hi = (np.pad(a, (0, more_rows)) for a in (self.lengths, self.page_counts, self._dirty_hi))
        lo = np.pad(self._dirty_lo, (0, more_rows), constant_values=CLEAN)
        free = list(range(rows, rows + more_rows))[::-1] + self.free_slots
        # One statement, so that an interrupt leaves no arrays of different sizes behind.
        (
            self.pages, self.released, self.lengths, self.page_counts, self._dirty_lo, self._dirty_hi, self.free_slots
        ) = pages, released, lengths, counts, lo, hi, free  # fmt: skip

    def mark_dirty(self, slots: Int64Array, first: Int64Array, end: Int64Array) -> None:
        """Cells ``first`` to ``end`` of these distinct rows may differ from the mirror from now on."""
        self._dirty_lo[slots] = np.minimum(self._dirty_lo[slots], first)
        self._dirty_hi[slots] = np.maximum(self._dirty_hi[slots], end)

    def dirty_cells(self) -> tuple[Int64Array, Int64Array]:
        """Rows and columns of the cells in use that a mirror may lack, until :meth:`mark_clean`; of every group.

        A cell whose page was released is not among them: nobody reads it.
        """
        ends = np.minimum(self._dirty_hi, self.page_counts)
        rows = np.flatnonzero(self._dirty_lo < ends)
        return cells_of(rows, self._dirty_lo[rows], ends[rows] - self._dirty_lo[rows])

    def mark_clean(self) -> None:
        """The mirror now has every cell in use."""
        self._dirty_lo.fill(CLEAN)
        self._dirty_hi.fill(0)
