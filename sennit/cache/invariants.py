"""What must always hold of a cache's integers: one function that looks at all of it and says what is broken."""

from __future__ import annotations

import numpy as np

from sennit.cache.demand import pages_for
from sennit.cache.groups import PageGroup
from sennit.cache.sequences import Sequences
from sennit.cache.tables import NO_PAGE
from sennit.errors import CacheCorrupt

__all__ = ["check_sequences"]


def check_sequences(sequences: Sequences) -> None:
    """Verify ids, tables, lengths and reference counts of every layer group, between steps and inside one.

    A page's reference count is the number of tables that hold it; free and used pages are all pages, and none is both;
    lengths fit their tables; only pages that a window has left behind are missing from a table, and no sink page is;
    a page that the open step writes into is held by the writing sequence alone.

    Raises:
        CacheCorrupt: one of these does not hold; the text says which, and where.
    """
    _check_slots(sequences)
    _check_lengths(sequences)
    for index, group in enumerate(sequences.groups):
        group.pool.check()
        _check_cells(sequences, index, group)
        _check_windows(sequences, index, group)
        _check_writes(sequences, index, group)


def _check_slots(sequences: Sequences) -> None:
    tables, used = sequences.tables, list(sequences.slots.values())
    if sorted(used + tables.free_slots) != list(range(len(tables.lengths))):
        raise CacheCorrupt(
            f"slots: used {used} and free {tables.free_slots} are not all {len(tables.lengths)}, once each"
        )
    if np.any(tables.page_counts[tables.free_slots]) or np.any(tables.lengths[tables.free_slots]):
        raise CacheCorrupt(f"slots: one of the free slots {tables.free_slots} has pages or tokens")
    if wrong := [seq for seq in sequences.slots if not 0 <= seq < sequences.next_id]:
        raise CacheCorrupt(f"ids {wrong} are not among the {sequences.next_id} that were given out")


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


def _check_cells(sequences: Sequences, index: int, group: PageGroup) -> None:
    """Pages where there must be some, none elsewhere, none twice in a row, and as many holders as are counted."""
    tables, pool, pages = sequences.tables, group.pool, sequences.tables.pages[index]
    columns = np.arange(pages.shape[1])
    in_use = columns < tables.page_counts[:, None]
    if np.any(pages[~in_use] != NO_PAGE):
        raise CacheCorrupt("tables: a cell past a sequence's last page holds a page")
    gone = in_use & (columns >= group.sink_pages) & (columns < tables.released[index][:, None])
    if np.any(pages[gone] != NO_PAGE):
        raise CacheCorrupt("tables: a cell behind a window still holds its page")
    held = pages[in_use & ~gone]
    if np.any((held < 0) | (held >= pool.num_pages)):
        raise CacheCorrupt(f"tables: expected pages below {pool.num_pages}, got {held.min()} to {held.max()}")
    ordered = np.sort(pages, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_PAGE)
    if len(wrong := np.flatnonzero(twice.any(axis=1))):
        raise CacheCorrupt(f"slot {wrong[0]}: a page occurs twice in {pages[wrong[0]][in_use[wrong[0]]].tolist()}")
    holders = np.bincount(held, minlength=pool.num_pages)
    if len(wrong := np.flatnonzero(holders != pool.refs)):
        page = wrong[0]
        raise CacheCorrupt(f"page {page}: {holders[page]} tables hold it, and its count is {pool.refs[page]}")


def _check_windows(sequences: Sequences, index: int, group: PageGroup) -> None:
    """Pages are released as far as the window of a sequence's next row goes at most, and never sinks."""
    tables, used = sequences.tables, np.array(list(sequences.slots.values()), np.int64)
    released, lengths = tables.released[index][used], tables.lengths[used]
    allowed = np.maximum(group.hidden_after(lengths), group.sink_pages)
    if len(wrong := np.flatnonzero((released < group.sink_pages) | (released > allowed))):
        slot = used[wrong[0]]
        raise CacheCorrupt(
            f"slot {slot}: pages up to {released[wrong[0]]} are released, which may be from {group.sink_pages}, behind "
            f"its sinks, to {allowed[wrong[0]]}, where its window begins"
        )


def _check_writes(sequences: Sequences, index: int, group: PageGroup) -> None:
    if (step := sequences.open_step) is None:
        return
    for slot, start, end in zip(step.slots, step.lengths, step.lengths_after, strict=True):
        first, last = start // sequences.page_size, pages_for(int(end), sequences.page_size)
        written = sequences.tables.pages[index, slot, first:last] if end > start else np.empty(0, np.int32)
        if np.any(group.pool.refs[written] != 1):
            raise CacheCorrupt(
                f"slot {slot}: the open step writes into {written.tolist()}, which other tables hold too"
            )
