"""Sequences by id: adding, forking, trimming and removing them, and what a step reserves, commits or takes back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sennit.cache.demand import MAX_TOKENS, Demand, is_integer, pages_for, pages_to_copy, read_items
from sennit.cache.groups import PageGroup
from sennit.cache.pages import PoolMark
from sennit.cache.tables import NO_PAGE, PageTables, cells_of
from sennit.errors import InvalidInput, OutOfPages, PagesReleased, StepClosed, StepOpen, UnknownSequence

__all__ = ["GroupChange", "OpenStep", "PageCopies", "Reservation", "Sequences"]

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class PageCopies:
    """Page copies that must come before a step's first write, in one layer group."""

    source: Int32Array  # pages shared until now ...
    target: Int32Array  # ... and the fresh page that replaces each in the table of the sequence that writes


@dataclass(frozen=True)
class Reservation:
    """What a step may do: its requests in batch order, and what it must copy first."""

    slots: Int64Array  # [requests] table rows
    q_lens: Int64Array  # [requests] tokens of the step
    kv_lens: Int64Array  # [requests] tokens stored once those that are appended are in
    copies: tuple[PageCopies, ...]  # of each layer group
    max_pages: int  # of the longest request


@dataclass(frozen=True)
class GroupChange:
    """What a step changes in one layer group from its reservation to its end."""

    rows: Int64Array  # table cells: first those that get a fresh page ...
    cols: Int64Array
    num_fresh: int  # ... so many, and then those whose pages are released on commit
    cells: Int32Array  # what they held
    num_copies: int  # of the first cells: as many as there are copies
    released: Int64Array  # [requests] up to which page the window has released ...
    released_after: Int64Array  # ... and will have
    mark: PoolMark


@dataclass(frozen=True)
class OpenStep:
    """What a step leaves and what was there before: absolute values, right to restore from any half-done state."""

    owner: object  # who reserved it, and alone may commit it or roll it back
    slots: Int64Array
    lengths: Int64Array
    lengths_after: Int64Array
    page_counts: Int64Array
    first_changed: Int64Array
    changes: tuple[GroupChange, ...]  # one a layer group


class Sequences:
    """The sequences of a cache over the page pools of its layer groups. Ids are never used again.

    Token ``i`` of a sequence is row ``i % page_size`` of page ``tables.pages[group, slots[seq], i // page_size]``.
    All groups have the same sequences with the same lengths.

    Attributes:
        groups: the page pool of each layer group, and what its window keeps.
        page_size: tokens a page, the same in all groups.
        tables: page tables and lengths, by slot. While a step is open, pages for its tokens are in them and its tokens
            are not in the lengths.
        slots: the slot of every sequence, oldest sequence first.
        open_step: the step that is reserved and neither committed nor rolled back, if any.

    >>> from sennit.cache.pages import PagePool
    >>> sequences = Sequences([PageGroup(PagePool(8), page_size=4)])
    >>> a = sequences.add()
    >>> owner = object()
    >>> sequences.reserve(owner, [(a, 6)]).kv_lens.tolist()
    [6]
    >>> sequences.commit(owner)
    >>> b = sequences.fork(a, 5)
    >>> sequences.length(b), sequences.pages(b).tolist(), sequences.pages_needed([(a, 1), (b, 1)])
    (5, [0, 1], 1)
    """

    def __init__(self, groups: Sequence[PageGroup]) -> None:
        self.groups = tuple(groups)
        self.page_size = self.groups[0].page_size
        self.slots: dict[int, int] = {}
        self.tables = PageTables(len(self.groups), slots=16, capacity=16)
        self.open_step: OpenStep | None = None
        self.next_id = 0

    def length(self, seq: int) -> int:
        """Tokens stored; those of an open step do not count yet. Raises :class:`UnknownSequence`."""
        return int(self.tables.lengths[self._slot(seq)])

    def pages(self, seq: int, group: int = 0) -> Int32Array:
        """The pages of a sequence's stored tokens in one group, in order, -1 where a window has released them.

        Raises :class:`UnknownSequence`.
        """
        slot = self._slot(seq)
        count = pages_for(int(self.tables.lengths[slot]), self.page_size)
        pages: Int32Array = self.tables.pages[group, slot, :count].copy()
        return pages

    def shortest(self, seq: int) -> int:
        """The least length that a sequence can be cut to, as every one from there on can be; 0 if nothing is released.

        Raises :class:`UnknownSequence`.
        """
        slot = self._slot(seq)
        released = self.tables.released[:, slot].tolist()
        return max(group.shortest(end) for group, end in zip(self.groups, released, strict=True))

    def pages_needed(self, items: Iterable[tuple[int, int]]) -> int:
        """Free pages that a step over these ``(sequence, tokens)`` would take, page copies included, in all groups.

        Raises as :meth:`reserve` does, but for :class:`OutOfPages`.
        """
        demand = self._demand("pages_needed", items, append=True)
        return sum(demand.pages(group) for group in range(len(self.groups)))

    def missing_pages(self, items: Iterable[tuple[int, int]], spare: int, max_step_tokens: int | None = None) -> int:
        """Pages that the worst group lacks for a step over these ``(sequence, tokens)`` and ``spare`` pages more.

        With ``max_step_tokens`` for as many steps as they take: what a window does not keep counts for one step only,
        and for nothing to spare.

        Raises as :meth:`pages_needed` does.
        """
        demand = self._demand("missing_pages", items, append=True)
        missing = [pages + spare for pages in self._missing(demand)]
        for index, group in enumerate(self.groups):
            if max_step_tokens is not None and group.window_left is not None:
                missing[index] = self._pages_in_steps(index, demand, max_step_tokens) - group.pool.num_free
        return max(0, *missing)

    def add(self) -> int:
        """Start an empty sequence and return its id. Raises :class:`StepOpen`."""
        self.require_no_step("add")
        return self._start(np.empty((len(self.groups), 0), np.int32), 0, [group.sink_pages for group in self.groups])

    def fork(self, seq: int, length: int | None = None) -> int:
        """Start a sequence with the first ``length`` tokens of another (all by default), sharing their pages.

        Raises:
            StepOpen: a step is open.
            UnknownSequence: ``seq`` is not in the cache.
            InvalidInput: ``length`` is not between 0 and the sequence's length.
            PagesReleased: a window has released a page that rows after ``length`` tokens would see.
        """
        self.require_no_step("fork")
        slot = self._slot(seq)
        tokens = int(self.tables.lengths[slot]) if length is None else self._length_within(seq, length)
        released = self._released_within(seq, tokens)
        return self._start(self.tables.pages[:, slot, : pages_for(tokens, self.page_size)], tokens, released)

    def trim(self, seq: int, length: int) -> None:
        """Keep the first ``length`` tokens and let go of the pages past them. Raises as :meth:`fork` does."""
        self.require_no_step("trim")
        tokens = self._length_within(seq, length)
        self._cut(self._slot(seq), tokens, self._released_within(seq, tokens))

    def remove(self, seq: int) -> None:
        """Forget a sequence and let go of its pages. Raises :class:`StepOpen` and :class:`UnknownSequence`."""
        self.require_no_step("remove")
        slot = self._slot(seq)
        self._cut(slot, 0, [0] * len(self.groups))
        self.tables.give(slot)
        del self.slots[seq]

    def clear(self, *, abandon_step: bool = False) -> None:
        """Forget all sequences; their ids are not used again.

        An open step is closed too if it is to be abandoned; otherwise raises :class:`StepOpen`.
        """
        if not abandon_step:
            self.require_no_step("clear")
        for group in self.groups:
            group.pool.clear()
        self.tables = PageTables(*self.tables.pages.shape)
        self.slots = {}
        self.open_step = None

    def holds_step(self, owner: object) -> bool:
        """Whether the open reservation is ``owner``'s."""
        return self.open_step is not None and self.open_step.owner is owner

    def require_no_step(self, operation: str) -> None:
        """Raise :class:`StepOpen` while a reservation is neither committed nor rolled back."""
        if self.open_step is not None:
            raise StepOpen(f"{operation}: a step of this cache is open; leave its `with` block first")

    def reserve(self, owner: object, items: Iterable[tuple[int, int]], *, append: bool = True) -> Reservation:
        """Take the pages that a step over these ``(sequence, tokens)`` needs, or raise and change nothing.

        Only ``owner``, told apart by identity, can commit the reservation or roll it back. It may do the latter however
        far this came, as it knows the owner even when an interrupt keeps the result from it.

        A sequence about to write into a page that others hold too gets a fresh page in its place; copying the content
        is left to the caller. With ``append=False`` nothing is taken and nothing grows.

        Raises:
            StepOpen: the last reservation is still open.
            UnknownSequence: an id that is not in the cache.
            InvalidInput: an id twice, or a count that is not a non-negative integer.
            OutOfPages: too few pages of a group are free.
            PagesReleased: with ``append=False``, rows would see pages that a window has released.
        """
        demand = self._demand("step", items, append=append)
        if max(missing := self._missing(demand)) > 0:
            raise self._out_of_pages(demand, missing.index(max(missing)))
        counts_after = demand.page_counts + demand.growth
        max_pages = int(counts_after.max(initial=0))
        self.tables.grow(capacity=max_pages)
        first = demand.first_changed()
        changes = tuple(self._change(group, demand) for group in range(len(self.groups)))
        # From here on `rollback` restores everything, wherever the rest is interrupted.
        self.open_step = OpenStep(
            owner, demand.slots, demand.lengths, demand.lengths_after, demand.page_counts, first, changes
        )
        copies = tuple(self._take(group, change) for group, change in enumerate(changes))
        self.tables.page_counts[demand.slots] = counts_after
        self.tables.mark_dirty(demand.slots, first, counts_after)
        return Reservation(demand.slots, demand.counts, demand.lengths_after, copies, max_pages)

    def commit(self, owner: object) -> None:
        """Keep what ``owner`` reserved: sequences have their new lengths, and pages that windows left behind are free.

        Raises :class:`StepClosed`.
        """
        if not self.holds_step(owner):
            raise StepClosed("commit: this step has nothing reserved")
        step = self.open_step
        assert step is not None
        for group, change in enumerate(step.changes):
            if change.num_fresh < len(change.rows):
                self._release(group, step.slots, change)
        self.tables.lengths[step.slots] = step.lengths_after
        self.open_step = None

    def rollback(self, owner: object) -> None:
        """Put everything back as before ``reserve``, the free lists' order included.

        Of no effect unless ``owner`` has something reserved: another's reservation stays.
        """
        if (step := self.open_step) is None or step.owner is not owner:
            return
        tables = self.tables
        for group, change in enumerate(step.changes):
            tables.pages[group, change.rows, change.cols] = change.cells
            tables.released[group, step.slots] = change.released
            self.groups[group].pool.restore(change.mark)
        tables.page_counts[step.slots] = step.page_counts
        tables.lengths[step.slots] = step.lengths
        tables.mark_dirty(step.slots, step.first_changed, step.page_counts)
        self.open_step = None

    def _change(self, group: int, demand: Demand) -> GroupChange:
        """What a step over this demand will change in a group; nothing has changed yet."""
        tables, pool = self.tables, self.groups[group].pool
        rows, cols = demand.cells(group)
        num_fresh, num_copies = len(rows), len(demand.copied[group])
        released = after = tables.released[group, demand.slots]
        if self.groups[group].window_left is not None:
            after = self.groups[group].released_after(demand.lengths_after, released)
            behind = cells_of(demand.slots, released, after - released)
            rows, cols = np.concatenate([rows, behind[0]]), np.concatenate([cols, behind[1]])
        cells = tables.pages[group, rows, cols]
        held = cells[cells != NO_PAGE]  # of a cell in use; a fresh page may be released too, and has no holder yet
        return GroupChange(
            rows, cols, num_fresh, cells, num_copies, released, after, pool.mark(held, count=num_fresh)
        )  # fmt: skip

    def _take(self, group: int, change: GroupChange) -> PageCopies:
        """Fresh pages into a group's cells, and no longer count this step's writers as holders of what they replace."""
        pool, source = self.groups[group].pool, change.cells[: change.num_copies]
        fresh = pool.alloc(change.num_fresh)
        pool.unshare(source)
        self.tables.pages[group, change.rows[: change.num_fresh], change.cols[: change.num_fresh]] = fresh
        return PageCopies(source, fresh[: change.num_copies])

    def _release(self, group: int, slots: Int64Array, change: GroupChange) -> None:
        """Let go of a group's pages that these sequences' next rows cannot see."""
        rows, cols = change.rows[change.num_fresh :], change.cols[change.num_fresh :]
        pages = self.tables.pages[group, rows, cols]
        self.tables.pages[group, rows, cols] = NO_PAGE
        self.tables.released[group, slots] = change.released_after
        self.groups[group].pool.release(pages)

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
        if is_integer(seq) and 0 <= seq < self.next_id:
            reason = "it was removed, and ids are not used again"
        return UnknownSequence(f"sequence {seq!r} is not in the cache: {reason}")

    def _length_within(self, seq: int, length: int) -> int:
        stored = self.length(seq)
        if not is_integer(length) or not 0 <= length <= stored:
            raise InvalidInput("length", expected=f"an integer from 0 to the {stored} tokens stored", got=repr(length))
        return int(length)

    def _released_within(self, seq: int, length: int) -> list[int]:
        """Up to where each group has released the first ``length`` tokens, if rows after them see none of those."""
        released = self.tables.released[:, self._slot(seq)].tolist()
        if not all(group.holds(length, end) for group, end in zip(self.groups, released, strict=True)):
            shortest, stored = self.shortest(seq), self.length(seq)
            raise PagesReleased(
                f"sequence {seq} cannot go back to {length} tokens: its window has released pages that rows after them "
                f"see; any length from {shortest} to its {stored} is possible, and so is starting again; a cache made "
                f"with a larger max_trim keeps more",
                sequence=seq,
                length=length,
                shortest=shortest,
            )
        return [group.released_within(length, end) for group, end in zip(self.groups, released, strict=True)]

    def _start(self, pages: Int32Array, tokens: int, released: list[int]) -> int:
        slot = self.tables.take(pages, tokens=tokens, released=np.array(released))
        for group, held in zip(self.groups, self.tables.pages[:, slot, : pages.shape[1]], strict=True):
            group.pool.share(held[held != NO_PAGE])
        seq = self.next_id
        self.next_id += 1
        self.slots[seq] = slot
        return seq

    def _cut(self, slot: int, tokens: int, released: list[int]) -> None:
        count = pages_for(tokens, self.page_size)
        dropped = self.tables.cut(slot, pages=count, tokens=tokens, released=np.array(released))
        for group, pages in zip(self.groups, dropped, strict=True):
            group.pool.release(pages[pages != NO_PAGE])

    def _demand(self, operation: str, items: Iterable[tuple[int, int]], *, append: bool) -> Demand:
        ids, counts = read_items(items)  # runs code of the caller's, which may change everything read below
        self.require_no_step(operation)
        slots = self._slots(ids)
        tables, page_size = self.tables, self.page_size
        lengths, page_counts = tables.lengths[slots], tables.page_counts[slots]
        if not append:
            self._require_held(ids, slots, lengths, counts)
            none = np.empty(0, np.int64)
            growth, copied = np.zeros_like(counts), (none,) * len(self.groups)
            return Demand(slots, lengths, lengths, page_counts, counts, growth, copied, page_size)
        self._check_lengths(ids, lengths + counts)
        growth = pages_for(lengths + counts, page_size) - page_counts
        partial = np.flatnonzero((counts > 0) & (lengths % page_size > 0))
        cells, partial_lengths = (slots[partial], lengths[partial] // page_size), lengths[partial]
        copied = tuple(
            partial[pages_to_copy(tails, group.pool.refs[tails], partial_lengths)]
            for group, pages in zip(self.groups, tables.pages, strict=True)
            for tails in (pages[cells],)
        )
        return Demand(slots, lengths, lengths + counts, page_counts, counts, growth, copied, page_size)

    def _require_held(self, ids: list[int], slots: Int64Array, lengths: Int64Array, counts: Int64Array) -> None:
        """Raise :class:`PagesReleased` where a sequence's last ``counts`` positions see what a window has released."""
        shortest = np.zeros_like(lengths)
        for group, released in zip(self.groups, self.tables.released[:, slots], strict=True):
            if group.window_left is not None:
                seen = np.where(released > group.sink_pages, released * group.page_size + group.sight, 0)
                shortest = np.maximum(shortest, seen)
        if len(wrong := np.flatnonzero((counts > 0) & (lengths - counts < shortest) & (shortest > 0))):
            seq, start, least = ids[wrong[0]], int((lengths - counts)[wrong[0]]), int(shortest[wrong[0]])
            raise PagesReleased(
                f"sequence {seq}: rows from position {start} on see pages that its window has released; without "
                f"append only those from {least} on can attend",
                sequence=seq,
                length=start,
                shortest=least,
            )

    def _check_lengths(self, ids: list[int], lengths: Int64Array) -> None:
        """Refuse lengths that kernels cannot be told."""
        if len(wrong := np.flatnonzero(lengths > MAX_TOKENS)):
            raise InvalidInput(
                "items", expected=f"sequences of at most {MAX_TOKENS} tokens",
                got=f"{lengths[wrong[0]]} for sequence {ids[wrong[0]]}", hint="trim it, or start another",
            )  # fmt: skip

    def _missing(self, demand: Demand) -> list[int]:
        """Pages that each group lacks for this demand; those left over count below 0."""
        return [demand.pages(index) - group.pool.num_free for index, group in enumerate(self.groups)]

    def _pages_in_steps(self, index: int, demand: Demand, max_step_tokens: int) -> int:
        """Free pages that this demand takes of a group with a window at most, in steps of at most so many tokens."""
        group, step = self.groups[index], min(int(demand.counts.sum()), max_step_tokens)
        pages = self.tables.pages[index, demand.slots]
        # What others hold as well does not come back when the window has passed it.
        kept = ((pages != NO_PAGE) & (group.pool.refs[pages] == 1)).sum(axis=1)
        lasting = np.minimum(demand.growth, np.maximum(group.kept_at_most() - kept, 0))
        pages = int(lasting.sum()) + len(demand.copied[index]) + pages_for(step, self.page_size)
        return min(pages, demand.pages(index))

    def _out_of_pages(self, demand: Demand, index: int) -> OutOfPages:
        pool, num_copies = self.groups[index].pool, len(demand.copied[index])
        needed, free, total = demand.pages(index), pool.num_free, pool.num_pages
        copies = f", {num_copies} of them copies of shared pages," if num_copies else ""
        where = f" in {self.groups[index].name}" if len(self.groups) > 1 else ""
        window = self.groups[index].window_left is not None
        sized = " (max_sequences= and max_step_tokens= decide how much of it windows get)" if window else ""
        return OutOfPages(
            f"a step of {int(demand.counts.sum())} tokens over {len(demand.slots)} sequences needs {needed} pages of "
            f"{self.page_size} tokens{where}{copies} and {free} of {total} are free; nothing has changed: take fewer "
            f"requests or tokens, trim or remove sequences, or give the cache more memory{sized}",
            needed=needed,
            free=free,
            total=total,
        )
