"""What a step asks of the cache: its requests as given, and the pages they take, copies of shared pages included."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from sennit.cache.tables import cells_of
from sennit.errors import InvalidInput, UnsupportedFeature

__all__ = ["MAX_TOKENS", "Demand", "is_integer", "pages_for", "pages_to_copy", "read_items"]

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Count = TypeVar("Count", int, Int64Array)

MAX_TOKENS = 2**31 - 1  # of one request in one step: the largest length that a kernel can be told


def pages_for(tokens: Count, page_size: int) -> Count:
    """Pages that ``tokens`` tokens take: the quotient, rounded up."""
    return -(-tokens // page_size)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether ``value`` is a Python or NumPy integer; booleans are not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def read_items(items: Iterable[tuple[int, int]]) -> tuple[list[int], Int64Array]:
    """Ids and token counts of a step's requests, validated but for whether the ids exist.

    Raises:
        InvalidInput: not pairs, an id twice, or a count that is not a non-negative integer.
        UnsupportedFeature: a token tree in place of a count.

    >>> read_items([(3, 512), (0, 1)])
    ([3, 0], array([512,   1]))
    """
    given = list(items) if isinstance(items, Iterable) else None  # an error of the caller's iterator is its own
    try:
        pairs: list[tuple[int, Any]] = [(seq, count) for seq, count in given]
        repeated = len(dict(pairs)) != len(pairs)
    except (TypeError, ValueError):
        got = repr(items if given is None else given)
        raise InvalidInput(
            "items", expected="(sequence id, number of tokens) pairs", got=got, hint="[(a, 512), (b, 1)]"
        ) from None
    ids, counts = [seq for seq, _ in pairs], [count for _, count in pairs]
    if repeated:
        twice = next(seq for i, seq in enumerate(ids) if seq in ids[:i])
        raise InvalidInput("items", expected="every sequence once", got=f"sequence {twice!r} more than once")
    if set(map(type, counts)) - {int} or (counts and not 0 <= min(counts) <= max(counts) <= MAX_TOKENS):
        for seq, count in pairs:
            if type(count).__name__ == "Tree":  # sennit.Tree, which this layer may not import
                raise UnsupportedFeature("token trees", "a cache takes counts of tokens; trees cannot be committed yet")
            if not is_integer(count) or not 0 <= count <= MAX_TOKENS:
                raise InvalidInput("items", expected="a count of tokens, 0 or more", got=f"({seq!r}, {count!r})")
    if sum(map(int, counts)) > MAX_TOKENS:
        raise InvalidInput("items", expected=f"at most {MAX_TOKENS} tokens in all", got=sum(map(int, counts)))
    return ids, np.array(counts, np.int64)


def pages_to_copy(pages: Int32Array, refs: Int32Array, lengths: Int64Array) -> Int64Array:
    """Which of these writers must first get their own copy of the partly filled page that they will write into.

    Args:
        pages: ``[writers]`` the page each writer would write into.
        refs: ``[writers]`` tables that hold that page.
        lengths: ``[writers]`` lengths before the write.

    Returns:
        Indices of writers, ascending. A page that only its writers hold needs one copy less than it has writers. The
        one that stays is the longest: it writes past the tokens of all the others, so their content survives even if
        the step is rolled back after the write.

    >>> pages_to_copy(np.array([5, 5, 9, 4]), np.array([2, 2, 1, 2]), np.array([7, 6, 3, 2])).tolist()
    [1, 3]
    """
    shared = np.flatnonzero(refs > 1)
    if not len(shared):
        return shared
    order = shared[np.lexsort((lengths[shared], pages[shared]))]  # by page, the longest writer of a page last
    last = np.flatnonzero(np.append(np.diff(pages[order]) != 0, True))
    writers = np.diff(last, prepend=-1)
    stays = last[writers == refs[order[last]]]
    return np.sort(np.delete(order, stays))


@dataclass(frozen=True)
class Demand:
    """What a step over some requests takes; one entry a request but for ``copied``."""

    slots: Int64Array  # [requests] table rows
    lengths: Int64Array  # [requests] tokens before
    lengths_after: Int64Array  # [requests] and after
    page_counts: Int64Array  # [requests] pages before, the same in every layer group
    counts: Int64Array  # [requests] tokens that the step brings
    growth: Int64Array  # [requests] pages to add, in every group
    copied: tuple[Int64Array, ...]  # of each group the requests whose last page must be copied, ascending
    page_size: int

    def pages(self, group: int) -> int:
        """Free pages that the step takes of a group, copies of shared pages included."""
        return int(self.growth.sum()) + len(self.copied[group])

    def first_changed(self) -> Int64Array:
        """``[requests]`` the first table column that changes in any group, or the number of pages where none does."""
        first: Int64Array = self.page_counts.copy()
        for copied in self.copied:
            first[copied] = self.lengths[copied] // self.page_size
        return first

    def cells(self, group: int) -> tuple[Int64Array, Int64Array]:
        """Rows and columns of a group's cells that get a fresh page: those of the copies, then those of new pages."""
        copied = self.copied[group]
        new_rows, new_cols = cells_of(self.slots, self.page_counts, self.growth)
        copy_rows, copy_cols = self.slots[copied], self.lengths[copied] // self.page_size
        return np.concatenate([copy_rows, new_rows]), np.concatenate([copy_cols, new_cols])
