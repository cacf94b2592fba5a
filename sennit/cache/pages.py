"""Which pages are free, and how many page tables hold each of the others: integers only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sennit.errors import CacheCorrupt, OutOfPages

__all__ = ["PagePool", "PoolMark"]

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class PoolMark:
    """A moment that :meth:`PagePool.restore` goes back to: absolute values of all that may change until then."""

    num_free: int
    next: Int32Array  # free pages that `alloc` may take, as they are on the stack
    pages: Int32Array  # held pages that `unshare` and `release` may change, and their counts
    refs: Int32Array


class PagePool:
    """Reference counts of ``num_pages`` pages, and the free ones on a stack: the last page freed is the first reused.

    Attributes:
        num_pages: pages in the pool.
        num_free: pages that no table holds.
        refs: ``[num_pages]`` int32, the number of tables that hold each page.

    >>> pool = PagePool(4)
    >>> pages = pool.alloc(3)
    >>> pages.tolist(), pool.num_free
    ([0, 1, 2], 1)
    >>> pool.share(pages[:1])
    >>> pool.release(pages)
    >>> pool.refs.tolist(), pool.num_free
    ([1, 0, 0, 0], 3)
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.clear()

    def clear(self) -> None:
        """Free every page; the order of the free list is that of a new pool."""
        self.num_free = self.num_pages
        self.refs: Int32Array = np.zeros(self.num_pages, np.int32)
        # The free pages are _stack[:num_free], top last.
        self._stack: Int32Array = np.arange(self.num_pages - 1, -1, -1, dtype=np.int32)

    @property
    def free(self) -> Int32Array:
        """The free pages, the next one to be handed out last."""
        pages: Int32Array = self._stack[: self.num_free].copy()
        return pages

    def alloc(self, count: int) -> Int32Array:
        """Take ``count`` pages, each now held by one table, or raise :class:`OutOfPages` and take none."""
        if count > self.num_free:
            raise OutOfPages(
                f"{count} pages are needed and {self.num_free} of {self.num_pages} are free",
                needed=count,
                free=self.num_free,
                total=self.num_pages,
            )
        top = self.num_free
        pages: Int32Array = self._stack[top - count : top][::-1].copy()
        self.num_free = top - count
        self.refs[pages] = 1
        return pages

    def share(self, pages: Int32Array) -> None:
        """Count one more holder of each of these distinct pages."""
        self.refs[pages] += 1

    def release(self, pages: Int32Array) -> None:
        """Count one holder less for each occurrence of a page in ``pages``; pages without holders become free."""
        np.subtract.at(self.refs, pages, 1)
        freed = np.unique(pages[self.refs[pages] == 0])
        self._stack[self.num_free : self.num_free + len(freed)] = freed[::-1]
        self.num_free += len(freed)

    def unshare(self, pages: Int32Array) -> None:
        """Count one holder less for each occurrence of a page in ``pages``; every page keeps at least one holder."""
        np.subtract.at(self.refs, pages, 1)

    def mark(self, pages: Int32Array, *, count: int) -> PoolMark:
        """Remember this moment: ``count`` pages will be taken, and of those held ``pages`` be unshared or released."""
        return PoolMark(
            self.num_free, self._stack[self.num_free - count : self.num_free].copy(), pages, self.refs[pages]
        )

    def restore(self, mark: PoolMark) -> None:
        """Undo everything since the mark, the order of the free list included.

        Pages that were taken since may have been released too. Only absolute values are written, so this is also right
        when one of these was interrupted half-way.
        """
        self._stack[mark.num_free - len(mark.next) : mark.num_free] = mark.next
        self.refs[mark.next] = 0
        self.refs[mark.pages] = mark.refs
        self.num_free = mark.num_free

    def check(self) -> None:
        """Raise :class:`CacheCorrupt` unless every page is either free once with no holder, or held."""
        free = self._stack[: self.num_free]
        if not 0 <= self.num_free <= self.num_pages or np.any((free < 0) | (free >= self.num_pages)):
            raise CacheCorrupt(f"free list: expected ids below {self.num_pages}, got {free.tolist()}")
        listed = np.zeros(self.num_pages, bool)
        listed[free] = True
        if np.count_nonzero(listed) != len(free):
            raise CacheCorrupt(f"free list: expected distinct pages, got {free.tolist()}")
        if np.any(self.refs[free]):
            raise CacheCorrupt(f"pages {free[self.refs[free] != 0].tolist()} are free and have holders")
        if (held := np.count_nonzero(self.refs > 0)) + self.num_free != self.num_pages:
            raise CacheCorrupt(f"{held} pages held + {self.num_free} free is not {self.num_pages}: a page is lost")
