"""What must always hold of a cache's integers: one function that looks at all of it and says what is broken."""

from __future__ import annotations

import numpy as np

from sennit.cache.demand import pages_for
from sennit.cache.sequences import Sequences
from sennit.cache.tables import UNUSED
from sennit.errors import CacheCorrupt

__all__ = ["check_sequences"]


def check_sequences(sequences: Sequences) -> None:
    """Verify ids, tables, lengths and reference counts, between steps and inside one.

    A page's reference count is the number of tables that hold it; free and used pages are all pages, and none is both;
    lengths fit their tables; a page that the open step writes into is held by the writing sequence alone.

    Raises:
        CacheCorrupt: one of these does not hold; the text says which, and where.
    """
    sequences.pool.check()
    _check_slots(sequences)
    _check_lengths(sequences)
    _check_cells(sequences)
    _check_writes(sequences)


def _check_slots(sequences: Sequences) -> None:
    tables, used = sequences.tables, list(sequences.slots.values())
    if sorted(used + tables.free_slots) != list(range(len(tables.lengths))):
        raise CacheCorrupt(
            f"slots: used {used} and free {tables.free_slots} are not all {len(tables.lengths)}, once each"
        )
    if np.any(tables.page_counts[tables.free_slots]) or np.any(tables.lengths[tables.free_slots]):
        raise CacheCorrupt(f"slots: one of the free slots {tables.free_slots} has pages or tokens")


def _check_lengths(sequences: Sequences) -> None:
    tables = sequences.tables
    lengths = tables.lengths.copy()
    if (step := sequences.open_step) is not None:
        lengths[step.slots] = step.lengths_after
    expected = pages_for(lengths, sequences.page_size)
    if len(wrong := np.flatnonzero((tables.page_counts != expected) | (lengths < tables.lengths))):
        slot = wrong[0]
        raise CacheCorrupt(
            f"slot {slot}: {lengths[slot]} tokens take {expected[slot]} pages of {sequences.page_size}, "
            f"and its table has {tables.page_counts[slot]}"
        )


def _check_cells(sequences: Sequences) -> None:
    pages, counts, pool = sequences.tables.pages, sequences.tables.page_counts, sequences.pool
    in_use = np.arange(pages.shape[1]) < counts[:, None]
    if np.any(pages[~in_use] != UNUSED):
        raise CacheCorrupt("tables: a cell past a sequence's last page holds a page")
    held = pages[in_use]
    if np.any((held < 0) | (held >= pool.num_pages)):
        raise CacheCorrupt(f"tables: expected pages below {pool.num_pages}, got {held.min()} to {held.max()}")
    for slot in sequences.slots.values():
        row = pages[slot, : counts[slot]]
        if len(np.unique(row)) != len(row):
            raise CacheCorrupt(f"slot {slot}: a page occurs twice in {row.tolist()}")
    holders = np.bincount(held, minlength=pool.num_pages)
    if len(wrong := np.flatnonzero(holders != pool.refs)):
        page = wrong[0]
        raise CacheCorrupt(f"page {page}: {holders[page]} tables hold it, and its count is {pool.refs[page]}")


def _check_writes(sequences: Sequences) -> None:
    if (step := sequences.open_step) is None:
        return
    for slot, start, end in zip(step.slots, step.lengths, step.lengths_after, strict=True):
        first, last = start // sequences.page_size, pages_for(int(end), sequences.page_size)
        written = sequences.tables.pages[slot, first:last] if end > start else np.empty(0, np.int32)
        if np.any(sequences.pool.refs[written] != 1):
            raise CacheCorrupt(
                f"slot {slot}: the open step writes into {written.tolist()}, which other tables hold too"
            )
