"""From segments to work items: who computes which rows, heads and keys, and which partial results are merged."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from sennit.plan.cost import FloatArray, KernelConfig, prefix_sums
from sennit.plan.line import Line, balance, concatenate, make_line
from sennit.plan.segments import Segments

__all__ = ["ROW_WIDTH", "Item", "Merge", "Schedule", "make_schedule"]

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]

ROW_WIDTH = 8  # int32 words of an item, a merge and a segment


class Item(IntEnum):
    """Columns of a work item.

    It is packed query rows ``ROW_START : ROW_START + NUM_ROWS`` of a segment, for ``NUM_HEADS`` KV heads from
    ``HEAD_START``, over keys ``KEY_START : KEY_END``. Packed row ``r`` is token ``r // group_size`` and query head
    ``r % group_size`` of the KV head's group. ``PARTIAL_ROW`` is -1 where the item writes the output itself; otherwise
    its head ``h`` writes the partial results' rows from ``PARTIAL_ROW + (h - HEAD_START) * NUM_ROWS``.
    """

    SEGMENT = 0
    ROW_START = 1
    NUM_ROWS = 2
    HEAD_START = 3
    NUM_HEADS = 4
    KEY_START = 5
    KEY_END = 6
    PARTIAL_ROW = 7


class Merge(IntEnum):
    """Columns of a merge: part ``i`` of a split tile lies at partial row ``FIRST_ROW + i * STRIDE``."""

    SEGMENT = 0
    ROW_START = 1
    NUM_ROWS = 2
    HEAD = 3
    FIRST_ROW = 4
    NUM_PARTS = 5
    STRIDE = 6


@dataclass(frozen=True, eq=False)
class Schedule:
    """All work of a step.

    Attributes:
        items: int32 ``[ROW_WIDTH, items]``, rows as in :class:`Item`, in the order in which workers take them.
        worker_indptr: int64 ``[strands, num_workers + 1]``; worker ``w`` runs items
            ``worker_indptr[s, w] : worker_indptr[s, w + 1]`` of strand ``s``.
        merges: int32 ``[ROW_WIDTH, merges]``, rows as in :class:`Merge`.
        num_partial_rows: rows that the partial results take.
        lines: each strand's tiles end to end.
        cuts: where each strand's line was cut, units ``[num_workers + 1]``.
    """

    items: Int32Array
    worker_indptr: Int64Array
    merges: Int32Array
    num_partial_rows: int
    lines: tuple[Line, ...]
    cuts: tuple[Int64Array, ...]

    @property
    def num_items(self) -> int:
        """Work items of all strands."""
        return int(self.items.shape[1])

    @property
    def num_merges(self) -> int:
        """Split tiles."""
        return int(self.merges.shape[1])

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
        make_line(segments, (strand == s).nonzero()[0], config.strands[s], group_size, num_kv_heads, split_size)
        for s in range(len(config.strands))
    ]
    if config.combine == "sum" and len(lines) == 2:
        # One after the other: both strands are one line, so that a worker's share may be all wide, all narrow or both.
        cuts = balance(concatenate(lines), config.num_workers)
        boundary = lines[0].num_units
        cuts_by_strand = [np.minimum(cuts, boundary), np.maximum(cuts, boundary) - boundary]
    else:
        cuts_by_strand = [balance(line, config.num_workers) for line in lines]
    return _join(lines, cuts_by_strand)


def _join(lines: list[Line], cuts_by_strand: list[Int64Array]) -> Schedule:
    """Items and merges of every strand, one strand after the other, with partial rows numbered throughout."""
    items, merges = [], []
    indptr = np.zeros((len(lines), len(cuts_by_strand[0])), np.int64)
    num_items = num_partial_rows = 0
    for line, cuts, first_item in zip(lines, cuts_by_strand, indptr, strict=True):
        if len(line):
            strand_items, block, first = _items(line, cuts)
            strand_merges, rows = _partials(line, strand_items, block, num_partial_rows)
            items.append(strand_items)
            merges.append(strand_merges)
            first_item[:] = first
            num_partial_rows += rows
        first_item += num_items
        num_items = int(first_item[-1])
    return Schedule(
        _side_by_side(items), indptr, _side_by_side(merges), num_partial_rows, tuple(lines), tuple(cuts_by_strand)
    )


def _side_by_side(tables: list[Int32Array]) -> Int32Array:
    if len(tables) == 1:
        return tables[0]
    return np.concatenate(tables, axis=1) if tables else np.zeros((ROW_WIDTH, 0), np.int32)


def _items(line: Line, cuts: Int64Array) -> tuple[Int32Array, Int64Array, Int64Array]:
    """Work items of one strand but for their partial rows, the block of each, and the first item of every worker.

    Blocks, cuts, and the ends of the heads that cuts divide bound the items: between two neighbours lie whole heads of
    one block, or a part of one head::

        block      |                                        |
        heads      |         |         |         |          |
        cuts                      |                  |
        items      |         |    |    |         |   |      |
    """
    inner = cuts[1:-1]
    divided = line.block_at(inner)
    units = line.head_units[divided]
    within = (inner - line.unit_start[divided]) % units
    inside = within.nonzero()[0]
    begins = inner[inside] - within[inside]
    bounds = np.concatenate([line.unit_start, inner, begins, begins + units[inside]])
    bounds.sort(kind="stable")  # sorted runs: merges
    new = bounds[1:] != bounds[:-1]
    starts, ends = bounds[:-1][new], bounds[1:][new]
    length = ends - starts
    block = line.block_at(starts)
    units = line.head_units[block]
    offset = starts - line.unit_start[block]
    items = np.empty((ROW_WIDTH, len(starts)), np.int32)
    np.take(line.columns, block, axis=1, out=items[:3])
    head = np.floor_divide(offset, units)
    items[Item.HEAD_START] = head
    np.maximum(length // units, 1, out=items[Item.NUM_HEADS], casting="unsafe")
    if line.divisible:
        step = line.key_step[block]
        first_key = (offset - head * units) * step
        items[Item.KEY_START] = first_key
        np.minimum(first_key + np.minimum(length, units) * step, line.key_end[block], out=items[Item.KEY_END], casting="unsafe")
        items[Item.PARTIAL_ROW] = length < units
    else:
        items[Item.KEY_START] = line.key_start[block]
        items[Item.KEY_END] = line.key_end[block]
        items[Item.PARTIAL_ROW] = line.num_chunks[block] > 1
    items[Item.PARTIAL_ROW] -= 1
    return items, block, starts.searchsorted(cuts)


def _partials(line: Line, items: Int32Array, block: Int64Array, first_row: int) -> tuple[Int32Array, int]:
    """Number the partial rows, where ``PARTIAL_ROW`` marks them, and list the merges: ``(merges, rows)``."""
    at = (items[Item.PARTIAL_ROW] == 0).nonzero()[0]
    if not len(at):
        return np.zeros((ROW_WIDTH, 0), np.int32), 0
    if line.divisible:
        # The parts of a head follow each other in the line: a merge begins where a head does.
        rows = items[Item.NUM_ROWS, at].astype(np.int64)
        offsets = first_row + prefix_sums(rows)
        items[Item.PARTIAL_ROW, at] = offsets[:-1]
        begins = (items[Item.KEY_START, at] == 0).nonzero()[0]
        tiles = at[begins]
        merges = items.take(tiles, axis=1)  # segment, row_start, num_rows and head are the same columns
        merges[Merge.FIRST_ROW] = offsets[begins]
        merges[Merge.NUM_PARTS, :-1] = begins[1:] - begins[:-1]
        merges[Merge.NUM_PARTS, -1] = len(at) - begins[-1]
        merges[Merge.STRIDE] = rows[begins]
        return merges, int(offsets[-1]) - first_row
    # Fixed chunks: chunk c and head h of a tile lie at (c * heads + h) * num_rows of the tile's partial rows.
    block_rows = np.where(line.num_chunks > 1, line.num_rows * line.num_heads, 0)
    offsets = first_row + prefix_sums(block_rows)
    items[Item.PARTIAL_ROW, at] = offsets[block[at]] + items[Item.HEAD_START, at] * line.num_rows[block[at]]
    tiles = ((line.num_chunks > 1) & (line.chunk == 0)).nonzero()[0]
    owner = tiles.repeat(line.num_heads)
    head = np.tile(np.arange(line.num_heads), len(tiles))
    merges = np.empty((ROW_WIDTH, len(owner)), np.int32)
    merges[Merge.SEGMENT] = line.segment[owner]
    merges[Merge.ROW_START] = line.row_start[owner]
    merges[Merge.NUM_ROWS] = line.num_rows[owner]
    merges[Merge.HEAD] = head
    merges[Merge.FIRST_ROW] = offsets[owner] + head * line.num_rows[owner]
    merges[Merge.NUM_PARTS] = line.num_chunks[owner]
    merges[Merge.STRIDE] = block_rows[owner]
    merges[-1] = 0
    return merges, int(offsets[-1]) - first_row
