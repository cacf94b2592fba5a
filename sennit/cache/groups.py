"""What a layer group keeps of every sequence: all of its pages, or those that its window can still see."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sennit.cache.demand import pages_for
from sennit.cache.pages import PagePool

__all__ = ["PageGroup", "pages_of_window"]

Int64Array = NDArray[np.int64]

SLACK_PAGES = 2  # of a sequence: where its window begins inside a page, and where its next token goes


def pages_of_window(window_left: int, num_sink_tokens: int, page_size: int, max_trim: int = 0) -> int:
    """Pages that a window keeps of a sequence at most, one for its next token included.

    >>> pages_of_window(31, 4, page_size=16)
    5
    """
    return pages_for(window_left + max_trim, page_size) + pages_for(num_sink_tokens, page_size) + SLACK_PAGES


@dataclass(frozen=True)
class PageGroup:
    """The pages of the layers whose storage agrees.

    With a window, a sequence of ``n`` tokens keeps the pages that its next row, at position ``n``, can see, and those
    of its sink tokens. What lies between them has been released, and cannot be had again::

        page 0       sink_pages          released        pages_for(n)
        |-- sinks kept --|---- released ----|---- kept -------|
                                <= n - sight - max_trim       n

    Attributes:
        pool: the pages.
        page_size: tokens a page.
        window_left: keys more than this many positions behind a row are hidden from it; None: no limit.
        num_sink_tokens: the first tokens, which the window never hides.
        name: of the group, for the errors of caches with more than one.
        max_trim: a sequence can always be cut to so many tokens below the longest it has been.
    """

    pool: PagePool
    page_size: int
    window_left: int | None = None
    num_sink_tokens: int = 0
    name: str = ""
    max_trim: int = 0

    @property
    def sink_pages(self) -> int:
        """Pages that hold sink tokens; they are never released."""
        return pages_for(self.num_sink_tokens, self.page_size)

    @property
    def sight(self) -> int:
        """Positions before the next row whose pages it needs: the window's, and the last token's whatever it sees."""
        assert self.window_left is not None
        return max(self.window_left, 1)

    def kept_at_most(self) -> int:
        """Pages that a sequence of any length needs beside those of a step's tokens."""
        assert self.window_left is not None
        return pages_of_window(self.window_left, self.num_sink_tokens, self.page_size, self.max_trim)

    def hidden_after(self, lengths: Int64Array) -> Int64Array:
        """Up to where pages are hidden from the next rows of sequences of these lengths, sinks aside."""
        return np.zeros_like(lengths) if self.window_left is None else (lengths - self.sight) // self.page_size

    def released_after(self, lengths: Int64Array, released: Int64Array) -> Int64Array:
        """Up to where pages are released once sequences have these lengths, given what was released before."""
        return np.maximum(self.hidden_after(lengths - self.max_trim), released)

    def shortest(self, released: int) -> int:
        """The least length from which on everything that a row can see is held (0: nothing was released)."""
        if self.window_left is None or released <= self.sink_pages:
            return 0
        return released * self.page_size + self.sight

    def holds(self, length: int, released: int) -> bool:
        """Whether everything is held that rows from position ``length`` on can see of the first ``length`` tokens."""
        return length >= self.shortest(released) or pages_for(length, self.page_size) <= self.sink_pages

    def released_within(self, length: int, released: int) -> int:
        """Up to where the first ``length`` tokens of a sequence are released, for a length that :meth:`holds`."""
        return released if length >= self.shortest(released) else self.sink_pages
