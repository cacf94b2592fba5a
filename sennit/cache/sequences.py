"""Sequences by id: adding, forking, trimming and removing them, and what a step reserves, commits or takes back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sennit.cache.demand import Demand, is_integer, pages_for, pages_to_copy, read_items
from sennit.cache.pages import PagePool, PoolMark
from sennit.cache.tables import PageTables
from sennit.errors import InvalidInput, OutOfPages, StepClosed, StepOpen, UnknownSequence

__all__ = ["OpenStep", "Reservation", "Sequences"]

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class Reservation:
    """What a step may do: its requests in batch order, and the page copies that must come before its first write."""

    slots: Int64Array  # [requests] table rows
    q_lens: Int64Array  # [requests] tokens of the step
    kv_lens: Int64Array  # [requests] tokens stored once those that are appended are in
    copy_src: Int32Array  # pages shared until now ...
    copy_dst: Int32Array  # ... and the fresh page that replaces each in the table of the sequence that writes
    max_pages: int  # of the longest request


@dataclass(frozen=True)
class OpenStep:
    """What a step leaves and what was there before: absolute values, right to restore from any half-done state."""

    owner: object  # who reserved it, and alone may commit it or roll it back
    slots: Int64Array
    lengths: Int64Array
    lengths_after: Int64Array
    page_counts: Int64Array
    first_changed: Int64Array
    rows: Int64Array  # table cells that the step changes ...
    cols: Int64Array
    cells: Int32Array  # ... and what they held
    mark: PoolMark


class Sequences:
    """The sequences of one layer group over one page pool. Ids are never used again.

    Token ``i`` of a sequence is row ``i % page_size`` of page ``tables.pages[slots[seq], i // page_size]``.

    Attributes:
        pool: the pages.
        page_size: tokens a page.
        tables: page tables and lengths, by slot. While a step is open, pages for its tokens are in them and its tokens
            are not in the lengths.
        slots: the slot of every sequence, oldest sequence first.
        open_step: the step that is reserved and neither committed nor rolled back, if any.

    >>> sequences = Sequences(PagePool(8), page_size=4)
    >>> a = sequences.add()
    >>> owner = object()
    >>> sequences.reserve(owner, [(a, 6)]).kv_lens.tolist()
    [6]
    >>> sequences.commit(owner)
    >>> b = sequences.fork(a, 5)
    >>> sequences.length(b), sequences.pages(b).tolist(), sequences.pages_needed([(a, 1), (b, 1)])
    (5, [0, 1], 1)
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.slots: dict[int, int] = {}
        self.tables = PageTables(slots=16, capacity=16)
        self.open_step: OpenStep | None = None
        self._next_id = 0

    def length(self, seq: int) -> int:
        """Tokens stored; those of an open step do not count yet. Raises :class:`UnknownSequence`."""
        return int(self.tables.lengths[self._slot(seq)])

    def pages(self, seq: int) -> Int32Array:
        """The pages that hold a sequence's stored tokens, in order. Raises :class:`UnknownSequence`."""
        slot = self._slot(seq)
        count = pages_for(int(self.tables.lengths[slot]), self.page_size)
        pages: Int32Array = self.tables.pages[slot, :count].copy()
        return pages

    def pages_needed(self, items: Iterable[tuple[int, int]]) -> int:
        """Free pages that a step over these ``(sequence, tokens)`` would take, page copies included.

        Raises as :meth:`reserve` does, but for :class:`OutOfPages`.
        """
        return self._demand("pages_needed", items, append=True).total

    def add(self) -> int:
        """Start an empty sequence and return its id. Raises :class:`StepOpen`."""
        self.require_no_step("add")
        return self._start(np.empty(0, np.int32), tokens=0)

    def fork(self, seq: int, length: int | None = None) -> int:
        """Start a sequence with the first ``length`` tokens of another (all by default), sharing their pages.

        Raises:
            StepOpen: a step is open.
            UnknownSequence: ``seq`` is not in the cache.
            InvalidInput: ``length`` is not between 0 and the sequence's length.
        """
        self.require_no_step("fork")
        tokens = self.length(seq) if length is None else self._length_within(seq, length)
        return self._start(self.pages(seq)[: pages_for(tokens, self.page_size)], tokens)

    def trim(self, seq: int, length: int) -> None:
        """Keep the first ``length`` tokens and let go of the pages past them. Raises as :meth:`fork` does."""
        self.require_no_step("trim")
        tokens = self._length_within(seq, length)
        self.pool.release(self.tables.cut(self._slot(seq), pages=pages_for(tokens, self.page_size), tokens=tokens))

    def remove(self, seq: int) -> None:
        """Forget a sequence and let go of its pages. Raises :class:`StepOpen` and :class:`UnknownSequence`."""
        self.require_no_step("remove")
        slot = self._slot(seq)
        self.pool.release(self.tables.cut(slot, pages=0, tokens=0))
        self.tables.give(slot)
        del self.slots[seq]

    def clear(self) -> None:
        """Forget all sequences; their ids are not used again. Raises :class:`StepOpen`."""
        self.require_no_step("clear")
        self.pool.clear()
        self.tables = PageTables(*self.tables.pages.shape)
        self.slots = {}

    def require_no_step(self, operation: str) -> None:
        """Raise :class:`StepOpen` while a reservation is neither committed nor rolled back."""
        if self.open_step is not None:
            raise StepOpen(f"{operation}: a step of this cache is open; leave its `with` block first")

    def reserve(self, owner: object, items: Iterable[tuple[int, int]], *, append: bool = True) -> Reservation:
        """Take the pages that a step over these ``(sequence, tokens)`` needs, or raise and change nothing.

        Only ``owner``, told apart by identity, can commit the reservation or roll it back. It may do the latter however
        far this came, as it knows the owner even when an interrupt keeps the result from it.

        A sequence about to write into a page that others hold too gets a fresh page in its place; copying the content
        (``copy_src``, ``copy_dst``) is left to the caller. With ``append=False`` nothing is taken and nothing grows.

        Raises:
            StepOpen: the last reservation is still open.
            UnknownSequence: an id that is not in the cache.
            InvalidInput: an id twice, or a count that is not a non-negative integer.
            OutOfPages: too few pages are free.
        """
        demand = self._demand("step", items, append=append)
        if demand.total > self.pool.num_free:
            raise self._out_of_pages(demand)
        counts_after = demand.page_counts + demand.growth
        lengths_after = demand.lengths + demand.counts if append else demand.lengths
        max_pages = int(counts_after.max(initial=0))
        self.tables.grow(capacity=max_pages)
        rows, cols = demand.cells()
        cells = self.tables.pages[rows, cols]
        src, first = cells[: demand.num_copies], demand.first_changed()
        # From here on `rollback` restores everything, wherever the rest is interrupted.
        self.open_step = OpenStep(
            owner,
            demand.slots,
            demand.lengths,
            lengths_after,
            demand.page_counts,
            first,
            rows,
            cols,
            cells,
            self.pool.mark(src),
        )
        fresh = self.pool.alloc(demand.total)
        self.pool.unshare(src)
        self.tables.pages[rows, cols] = fresh
        self.tables.page_counts[demand.slots] = counts_after
        self.tables.mark_dirty(demand.slots, first, counts_after)
        return Reservation(demand.slots, demand.counts, lengths_after, src, fresh[: demand.num_copies], max_pages)

    def commit(self, owner: object) -> None:
        """Keep what ``owner`` reserved: the sequences now have their new lengths. Raises :class:`StepClosed`."""
        if (step := self.open_step) is None or step.owner is not owner:
            raise StepClosed("commit: this step has nothing reserved")
        self.tables.lengths[step.slots] = step.lengths_after
        self.open_step = None

    def rollback(self, owner: object) -> None:
        """Put everything back as before ``reserve``, the free list's order included.

        Of no effect unless ``owner`` has something reserved: another's reservation stays.
        """
        if (step := self.open_step) is None or step.owner is not owner:
            return
        self.tables.pages[step.rows, step.cols] = step.cells
        self.tables.page_counts[step.slots] = step.page_counts
        self.tables.lengths[step.slots] = step.lengths
        self.tables.mark_dirty(step.slots, step.first_changed, step.page_counts)
        self.pool.restore(step.mark)
        self.open_step = None

    def _slot(self, seq: int) -> int:
        # A dictionary also finds what only equals an id: True, 1.0.
        slot = self.slots.get(seq) if is_integer(seq) else None
        if slot is None:
            raise self._unknown(seq)
        return slot

    def _slots(self, seqs: list[int]) -> Int64Array:
        if set(map(type, seqs)) - {int}:  # the rare case; below, look-ups alone are right
            return np.array([self._slot(seq) for seq in seqs], np.int64)
        try:
            return np.array([self.slots[seq] for seq in seqs], np.int64)
        except KeyError as error:
            raise self._unknown(error.args[0]) from None

    def _unknown(self, seq: object) -> UnknownSequence:
        reason = "ids are integers that come from add() and fork()"
        if is_integer(seq) and 0 <= seq < self._next_id:
            reason = "it was removed, and ids are not used again"
        return UnknownSequence(f"sequence {seq!r} is not in the cache: {reason}")

    def _length_within(self, seq: int, length: int) -> int:
        stored = self.length(seq)
        if not is_integer(length) or not 0 <= length <= stored:
            raise InvalidInput("length", expected=f"an integer from 0 to the {stored} tokens stored", got=repr(length))
        return int(length)

    def _start(self, pages: Int32Array, tokens: int) -> int:
        slot = self.tables.take(pages, tokens)
        self.pool.share(pages)
        seq = self._next_id
        self._next_id += 1
        self.slots[seq] = slot
        return seq

    def _demand(self, operation: str, items: Iterable[tuple[int, int]], *, append: bool) -> Demand:
        ids, counts = read_items(items)  # runs code of the caller's, which may change everything read below
        self.require_no_step(operation)
        slots = self._slots(ids)
        tables, page_size = self.tables, self.page_size
        lengths, page_counts = tables.lengths[slots], tables.page_counts[slots]
        growth, copied = np.zeros_like(counts), np.empty(0, np.int64)
        if append:
            growth = pages_for(lengths + counts, page_size) - page_counts
            partial = np.flatnonzero((counts > 0) & (lengths % page_size > 0))
            tails = tables.pages[slots[partial], lengths[partial] // page_size]
            copied = partial[pages_to_copy(tails, self.pool.refs[tails], lengths[partial])]
        return Demand(slots, lengths, page_counts, counts, growth, copied, page_size)

    def _out_of_pages(self, demand: Demand) -> OutOfPages:
        needed, free, total = demand.total, self.pool.num_free, self.pool.num_pages
        copies = f", {demand.num_copies} of them copies of shared pages," if demand.num_copies else ""
        return OutOfPages(
            f"a step of {int(demand.counts.sum())} tokens over {len(demand.slots)} sequences needs {needed} pages of "
            f"{self.page_size} tokens{copies} and {free} of {total} are free; nothing has changed: take fewer requests "
            f"or tokens, trim or remove sequences, or give the cache more memory",
            needed=needed,
            free=free,
            total=total,
        )
