"""A plan's segments in FlashInfer's form: batches of one kind, whose requests all have rows and keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Part", "divide", "new_keys"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Part:
    """Some segments of a plan.

    Attributes:
        narrow: each has one row. A wrapper takes one tile height for its whole batch, from the mean length, so that
            these are a batch of their own.
        causal: rows see no key behind them.
        rows: int64 ``[rows]`` of the query tensor, segment after segment.
        qo_indptr: int64 ``[segments + 1]`` into ``rows``.
        kv_indptr: int64 ``[segments + 1]`` into ``entries``.
        entries: int64 ``[pages]``, where in the page table their pages are.
        last_page_len: int64 ``[segments]``, keys in each last page.
    """

    narrow: bool
    causal: bool
    rows: IntArray
    qo_indptr: IntArray
    kv_indptr: IntArray
    entries: IntArray
    last_page_len: IntArray


def divide(segments: npt.NDArray[np.int32], page_size: int) -> tuple[list[Part], IntArray]:
    """Parts by number of rows and causality, and the rows that see no key.

    A wrapper is not defined for segments without rows or keys, nor for causal ones with more rows than keys, whose
    first rows see nothing; these rows are told apart here.

    Args:
        segments: ``PlanArrays.segments``.
        page_size: keys of a page.

    Returns:
        ``(parts, rows that see no key)``.

    >>> table = np.zeros((3, 12), np.int32)  # request, q_start, q_len, kv_start, kv_len, key_offset, causal
    >>> table[:, :7] = [0, 0, 1, 0, 9, 0, 1], [1, 1, 4, 3, 2, 0, 1], [2, 5, 2, 4, 0, 0, 1]
    >>> parts, unseeing = divide(table, 4)
    >>> [(part.narrow, part.rows.tolist(), part.entries.tolist(), part.last_page_len.tolist()) for part in parts]
    [(True, [0], [0, 1, 2], [1]), (False, [3, 4], [3], [2])]
    >>> unseeing.tolist()
    [1, 2, 5, 6]
    """
    q_start, q_len, kv_start, kv_len = segments[:, 1:5].astype(np.int64).T
    causal = segments[:, 6] != 0
    seeing = np.where(causal, np.minimum(q_len, kv_len), np.where(kv_len > 0, q_len, 0))
    hidden = _ranges(q_start, q_len - seeing)
    pages = -(-kv_len // page_size)
    parts = []
    narrow = seeing == 1
    # With one row, the last, causality hides nothing.
    for chosen, is_narrow, is_causal in (
        (narrow, True, False),
        ((seeing > 1) & causal, False, True),
        ((seeing > 1) & ~causal, False, False),
    ):
        at = chosen.nonzero()[0]
        if len(at):
            parts.append(
                Part(
                    narrow=is_narrow,
                    causal=is_causal,
                    rows=_ranges((q_start + q_len - seeing)[at], seeing[at]),
                    qo_indptr=np.append(0, seeing[at].cumsum()),
                    kv_indptr=np.append(0, pages[at].cumsum()),
                    entries=_ranges(kv_start[at], pages[at]),
                    last_page_len=(kv_len[at] - 1) % page_size + 1,
                )
            )
    return parts, hidden


def new_keys(segments: npt.NDArray[np.int32], page_size: int) -> tuple[IntArray, IntArray, IntArray]:
    """Of every new token with a position: its row, its entry in the page table, and its place in the page.

    >>> table = np.zeros((2, 12), np.int32)  # request, q_start, q_len, kv_start, kv_len
    >>> table[:, :5] = [0, 0, 2, 0, 5], [1, 2, 3, 2, 1]
    >>> [column.tolist() for column in new_keys(table, 4)]
    [[0, 1, 4], [0, 1, 2], [3, 0, 0]]
    """
    q_start, q_len, kv_start, kv_len = segments[:, 1:5].astype(np.int64).T
    stored = np.minimum(q_len, kv_len)
    position = _ranges(kv_len - stored, stored)
    entries = kv_start.repeat(stored) + position // page_size
    return _ranges(q_start + q_len - stored, stored), entries, position % page_size


def _ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """``starts[i] : starts[i] + counts[i]`` for each i, one after the other."""
    before = counts.cumsum() - counts
    found: IntArray = np.arange(int(counts.sum())) + (starts - before).repeat(counts)
    return found
