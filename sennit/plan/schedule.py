"""From segments to work items: who computes which rows, heads and keys, and which partial results are merged."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sennit.plan.cost import FloatArray, KernelConfig
from sennit.plan.line import Line, balance, concatenate, make_line
from sennit.plan.segments import Segments

__all__ = ["Items", "Merges", "Schedule", "make_schedule"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Items:
    """Work items, int64 ``[items]`` each, in the order in which a strand's workers take them.

    An item is packed query rows ``row_start : row_start + num_rows`` of a segment, for ``num_heads`` KV heads from
    ``head_start``, over keys ``key_start : key_end``. Packed row ``r`` is token ``r // group_size`` and query head
    ``r % group_size`` of the KV head's group. ``partial_row`` is -1 where the item writes the output itself; otherwise
    its head ``h`` writes rows of the partial results from ``partial_row + (h - head_start) * num_rows``.
    """

    segment: Int64Array
    row_start: Int64Array
    num_rows: Int64Array
    head_start: Int64Array
    num_heads: Int64Array
    key_start: Int64Array
    key_end: Int64Array
    partial_row: Int64Array

    def __len__(self) -> int:
        return len(self.segment)


@dataclass(frozen=True, eq=False)
class Merges:
    """Split tiles, int64 ``[merges]`` each: part ``i`` of a tile lies at partial row ``first_row + i * stride``."""

    segment: Int64Array
    row_start: Int64Array
    num_rows: Int64Array
    head: Int64Array
    first_row: Int64Array
    num_parts: Int64Array
    stride: Int64Array

    def __len__(self) -> int:
        return len(self.segment)


@dataclass(frozen=True, eq=False)
class Schedule:
    """All work of a step.

    Attributes:
        items: work items of all strands.
        worker_indptr: int64 ``[strands, num_workers + 1]``; worker ``w`` runs items
            ``worker_indptr[s, w] : worker_indptr[s, w + 1]`` of strand ``s``.
        merges: tiles whose keys were split.
        num_partial_rows: rows that the partial results take.
        lines: each strand's tiles end to end.
        cuts: where each strand's line was cut, units ``[num_workers + 1]``.
    """

    items: Items
    worker_indptr: Int64Array
    merges: Merges
    num_partial_rows: int
    lines: tuple[Line, ...]
    cuts: tuple[Int64Array, ...]

    @property
    def loads(self) -> FloatArray:
        """Predicted microseconds of every worker, ``[strands, num_workers]``."""
        return np.stack([line.times_between(c[:-1], c[1:]) for line, c in zip(self.lines, self.cuts, strict=True)])


def make_schedule(
    segments: Segments,
    strand: Int64Array,
    *,
    group_size: int,
    num_kv_heads: int,
    config: KernelConfig,
    split_size: int | None = None,
) -> Schedule:
    """Cut segments into work items for the workers of ``config``.

    Args:
        segments: the step's segments.
        strand: int64 ``[segments]``, the strand each was placed on.
        group_size: query heads per KV head.
        num_kv_heads: KV heads.
        config: strands, workers and times.
        split_size: keys of a fixed chunk: a tile is then split at multiples of it and nowhere else, so that a
            request's results depend on that request alone.
    """
    lines = [
        make_line(segments, np.flatnonzero(strand == s), config.strands[s], group_size, num_kv_heads, split_size)
        for s in range(len(config.strands))
    ]
    if config.combine == "sum" and len(lines) == 2:
        # One after the other: both strands are one line, so that a worker's share may be all wide, all narrow or both.
        line = concatenate(lines)
        cuts = balance(line, config.num_workers)
        boundary = lines[0].num_units
        cuts_by_strand = [np.minimum(cuts, boundary), np.maximum(cuts, boundary) - boundary]
    else:
        cuts_by_strand = [balance(line, config.num_workers) for line in lines]
    return _join(lines, cuts_by_strand)


def _join(lines: list[Line], cuts_by_strand: list[Int64Array]) -> Schedule:
    """Items and merges of every strand, one strand after the other, with partial rows numbered throughout."""
    items: list[Items] = []
    merges: list[Merges] = []
    indptr = []
    num_items = num_partial_rows = 0
    for line, cuts in zip(lines, cuts_by_strand, strict=True):
        strand_items, first_item, strand_merges, rows = _strand_items(line, cuts, num_partial_rows)
        items.append(strand_items)
        merges.append(strand_merges)
        indptr.append(first_item + num_items)
        num_items += len(strand_items)
        num_partial_rows += rows
    return Schedule(
        items=_concatenate_columns(items),
        worker_indptr=np.stack(indptr),
        merges=_concatenate_columns(merges),
        num_partial_rows=num_partial_rows,
        lines=tuple(lines),
        cuts=tuple(cuts_by_strand),
    )


def _strand_items(line: Line, cuts: Int64Array, first_partial_row: int) -> tuple[Items, Int64Array, Merges, int]:
    """Work items of one strand: ``(items, first item of every worker, merges, partial rows)``.

    Cuts and block starts together divide the line into ranges, each of one block and one worker. A range is at most
    three items: the rest of a split head, whole heads, and the beginning of another split head.
    """
    starts = np.concatenate([cuts[:-1], line.unit_start[:-1]])
    starts.sort(kind="stable")  # two sorted runs: a merge
    starts = starts[np.append(starts[1:] > starts[:-1], True)] if len(starts) else starts
    starts = starts[starts < line.num_units]
    ends = np.append(starts[1:], line.num_units) if len(starts) else starts
    block = line.block_at(starts)
    units = line.head_units[block]
    head0, unit0 = np.divmod(starts - line.unit_start[block], units)
    head1, unit1 = np.divmod(ends - line.unit_start[block], units)

    inside = head0 == head1  # a part of a head that neither begins nor ends in this range
    has_rest = (unit0 > 0) & ~inside
    first_whole = head0 + has_rest
    has_whole = ~inside & (head1 > first_whole)
    has_begin = unit1 > 0
    count = has_rest.astype(np.int64) + has_whole + has_begin
    first = np.cumsum(count) - count
    total = int(count.sum())
    columns = np.empty((5, total), np.int64)  # block, head_start, num_heads, unit_start, unit_end
    for mask, at, head, heads, begin, end in (
        (has_rest, first, head0, 1, unit0, units),
        (has_whole, first + has_rest, first_whole, head1 - first_whole, 0, units),
        (has_begin, first + has_rest + has_whole, head1, 1, np.where(inside, unit0, 0), unit1),
    ):
        where = at[mask]
        for row, value in enumerate((block, head, heads, begin, end)):
            columns[row, where] = value[mask] if isinstance(value, np.ndarray) else value
    item_block, head_start, num_heads, unit_start, unit_end = columns
    worker_first = np.append(first, total)[np.searchsorted(starts, cuts)]

    whole_head = (unit_start == 0) & (unit_end == line.head_units[item_block])
    partial = ~whole_head | (line.chunks[item_block] > 1)
    num_rows = line.num_rows[item_block]
    partial_row, merges, rows = _partials(line, item_block, head_start, num_heads, unit_start, partial, first_partial_row)
    step = np.where(line.divisible, line.key_step, 0)[item_block]
    key_start, key_end = line.key_start[item_block], line.key_end[item_block]
    items = Items(
        segment=line.segment[item_block],
        row_start=line.row_start[item_block],
        num_rows=num_rows,
        head_start=head_start,
        num_heads=num_heads,
        key_start=key_start + unit_start * step,
        key_end=np.where(whole_head, key_end, np.minimum(key_start + unit_end * step, key_end)),
        partial_row=partial_row,
    )
    return items, worker_first, merges, rows


def _partials(
    line: Line,
    block: Int64Array,
    head_start: Int64Array,
    num_heads: Int64Array,
    unit_start: Int64Array,
    partial: npt.NDArray[np.bool_],
    first_row: int,
) -> tuple[Int64Array, Merges, int]:
    """Number the partial rows and list the merges: ``(partial_row [items], merges, rows)``."""
    partial_row = np.full(len(block), -1, np.int64)
    at = np.flatnonzero(partial)
    if not len(at):
        return partial_row, Merges(*[np.empty(0, np.int64)] * 7), 0
    if line.divisible:
        # The parts of a head follow each other in the line: a merge begins where a head does.
        rows = line.num_rows[block[at]]
        offsets = first_row + np.cumsum(rows) - rows
        partial_row[at] = offsets
        begins = np.flatnonzero(unit_start[at] == 0)
        parts = np.diff(np.append(begins, len(at)))
        owner, head, stride = block[at[begins]], head_start[at[begins]], rows[begins]
        return partial_row, _merges(line, owner, head, offsets[begins], parts, stride), int(rows.sum())
    # Fixed chunks: chunk c and head h of a tile lie at (c * heads + h) * num_rows of the tile's partial rows.
    block_rows = np.where(line.chunks > 1, line.num_rows * line.num_heads, 0)
    block_first = first_row + np.cumsum(block_rows) - block_rows
    partial_row[at] = block_first[block[at]] + head_start[at] * line.num_rows[block[at]]
    tiles = np.flatnonzero((line.chunks > 1) & line.first_chunk)
    owner = np.repeat(tiles, line.num_heads)
    head = np.tile(np.arange(line.num_heads), len(tiles))
    offsets = block_first[owner] + head * line.num_rows[owner]
    return partial_row, _merges(line, owner, head, offsets, line.chunks[owner], block_rows[owner]), int(block_rows.sum())


def _merges(
    line: Line, block: Int64Array, head: Int64Array, first_row: Int64Array, parts: Int64Array, stride: Int64Array
) -> Merges:
    return Merges(line.segment[block], line.row_start[block], line.num_rows[block], head, first_row, parts, stride)


_Columns = TypeVar("_Columns", Items, Merges)


def _concatenate_columns(parts: list[_Columns]) -> _Columns:
    if len(parts) == 1:
        return parts[0]
    names = [field.name for field in fields(parts[0])]
    return type(parts[0])(*[np.concatenate([getattr(part, name) for part in parts]) for name in names])
