"""From segments to work items: who computes which rows, heads and keys, and which partial results are merged."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from sennit.plan.cost import FloatArray, KernelConfig, prefix_sums, strand_haste
from sennit.plan.deal import deal
from sennit.plan.line import Chunks, Line, balance, make_line
from sennit.plan.segments import Segments

__all__ = ["ROW_WIDTH", "Item", "Merge", "Schedule", "make_schedule"]

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]

ROW_WIDTH = 12  # int32 words of an item, a merge and a segment


class Item(IntEnum):
    """Columns of a work item.

    It is packed query rows ``ROW_START : ROW_START + NUM_ROWS`` of a segment, for ``NUM_HEADS`` KV heads from
    ``HEAD_START``, over keys ``KEY_START : KEY_END`` without ``HOLE_START : HOLE_END``. Packed row ``r`` is token
    ``r // group_size`` and query head ``r % group_size`` of the KV head's group. ``PARTIAL_ROW`` is -1 where the item
    writes the output itself; otherwise its head ``h`` writes the partial results' rows from
    ``PARTIAL_ROW + (h - HEAD_START) * NUM_ROWS``, which merge ``MERGE + h - HEAD_START`` reads.

    The hole, between sink tokens and a window, is hidden from all rows and may have no pages. Key steps are counted
    anew behind it. Where there is none it is empty and at the end.
    """

    SEGMENT = 0
    ROW_START = 1
    NUM_ROWS = 2
    HEAD_START = 3
    NUM_HEADS = 4
    KEY_START = 5
    KEY_END = 6
    PARTIAL_ROW = 7
    HOLE_START = 8
    HOLE_END = 9
    MERGE = 10


class Merge(IntEnum):
    """Columns of a merge: part ``i`` of a split tile lies at partial row ``FIRST_ROW + i * STRIDE``."""

    SEGMENT = 0
    ROW_START = 1
    NUM_ROWS = 2
    HEAD = 3
    FIRST_ROW = 4
    NUM_PARTS = 5
    STRIDE = 6
    STRAND = 7


@dataclass(frozen=True, eq=False)
class Schedule:
    """All work of a step.

    Attributes:
        items: int32 ``[ROW_WIDTH, items]``, rows as in :class:`Item`, in the order in which workers take them.
        worker_indptr: int64 ``[strands, num_workers + 1]``; worker ``w`` runs items
            ``worker_indptr[s, w] : worker_indptr[s, w + 1]`` of strand ``s``.
        merges: int32 ``[ROW_WIDTH, merges]``, rows as in :class:`Merge`.
        num_partial_rows: rows that the partial results take.
        line: all tiles end to end, strand after strand.
        cuts: int64 ``[strands, num_workers + 1]`` units, where the line was cut.
    """

    items: Int32Array
    worker_indptr: Int64Array
    merges: Int32Array
    num_partial_rows: int
    line: Line
    cuts: Int64Array

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
        return self.line.times_between(self.cuts[:, :-1], self.cuts[:, 1:])

    @property
    def combined_loads(self) -> FloatArray:
        """The same of all strands together: of each worker, or of every strand's own workers."""
        loads, config, line = self.loads, self.line.config, self.line
        combined: FloatArray = loads.sum(axis=0)
        if len(loads) == 1 or config.combine == "sum":
            return combined
        if config.combine == "max":
            combined = loads.max(axis=0)
        elif config.combine == "turns":  # what shares an SM follows each other on it
            index = np.arange(config.num_workers)
            combined = sum(row[index * count // len(index)] for row, count in zip(loads, config.workers, strict=True))
        elif line.strand_times.any():
            haste = strand_haste(config, line.strand_times)
            rows = zip(loads, line.strand_workers, haste, line.strand_times > 0, strict=True)
            combined = np.concatenate([row[:count] / factor for row, count, factor, used in rows if used])
        return combined


def make_schedule(
    segments: Segments,
    strand: Int64Array,
    *,
    group_size: int,
    num_kv_heads: int,
    config: KernelConfig,
    page_size: int | None = None,
    split_size: int | None = None,
) -> Schedule:
    """Cut segments into work items for the workers of ``config``.

    Args:
        segments: the step's segments.
        strand: int64 ``[segments]``, the strand each was placed on.
        group_size: query heads per KV head.
        num_kv_heads: KV heads.
        config: strands, workers and times.
        page_size: tokens a page, or None for packed keys.
        split_size: keys of a fixed chunk: a tile is then split at multiples of it and nowhere else, so that a
            request's results depend on that request alone.
    """
    line = make_line(
        segments,
        strand,
        config,
        group_size=group_size,
        num_kv_heads=num_kv_heads,
        page_size=page_size or 1,
        split_size=split_size,
    )
    line, cuts = deal(line, balance(line))
    if not len(line):
        return Schedule(_empty(), np.zeros_like(cuts), _empty(), 0, line, cuts)
    return _schedule(line, cuts)


def _empty() -> Int32Array:
    return np.zeros((ROW_WIDTH, 0), np.int32)


def _schedule(line: Line, cuts: Int64Array) -> Schedule:
    """Read work items and merges off a line and its cuts.

    Blocks, cuts, and the ends of the bands that cuts divide bound the items: between two neighbours lie whole bands of
    one block, or a part of one band::

        block      |                                        |
        bands      |         |         |         |          |
        cuts                      |                  |
        items      |         |    |    |         |   |      |
    """
    inner = np.concatenate([row[1:-1] for row in cuts if row[0] < row[-1]])
    divided = line.block_at(inner)
    units = line.band_units[divided]
    within = (inner - line.unit_start[divided]) % units
    inside = within.nonzero()[0]
    begins = inner[inside] - within[inside]
    bounds = np.concatenate([line.unit_start, inner, begins, begins + units[inside]])
    bounds.sort(kind="stable")  # sorted runs: merges
    distinct = (bounds[1:] != bounds[:-1]).nonzero()[0]
    starts = bounds[distinct]
    length = bounds[distinct + 1] - starts
    block = line.block_at(starts)
    units = line.band_units[block]
    band, unit = np.divmod(starts - line.unit_start[block], units)
    items = np.empty((ROW_WIDTH, len(starts)), np.int32)
    items[Item.SEGMENT] = line.segment[block]
    items[Item.ROW_START] = line.row_start[block]
    items[Item.NUM_ROWS] = line.num_rows[block]
    heads = line.band_heads[block]
    items[Item.HEAD_START] = line.head_start[block] + band * heads
    items[Item.NUM_HEADS] = np.maximum(length // units, 1) * heads
    if line.chunks is None:
        _set_keys(items, line, block, unit, np.minimum(length, units))
        partial = length < units
    else:
        keys = line.keys
        items[Item.KEY_START], items[Item.KEY_END] = keys.start[block], keys.end[block]
        items[Item.HOLE_START], items[Item.HOLE_END] = keys.hole_start[block], keys.hole_end[block]
        partial = line.chunks.count[block] > 1
    merges, rows = _partials(line, items, block, unit, partial.nonzero()[0])
    return Schedule(items, starts.searchsorted(cuts), merges, rows, line, cuts)


def _set_keys(items: Int32Array, line: Line, block: Int64Array, unit: Int64Array, count: Int64Array) -> None:
    """The keys of ``count`` units from ``unit`` of a band."""
    step, keys = line.config.key_steps[line.strand[block]], line.keys
    if keys.plain:
        items[Item.KEY_START] = unit * step
        items[Item.KEY_END] = items[Item.HOLE_START : Item.MERGE] = np.minimum((unit + count) * step, keys.end[block])
        return
    start, hole_start, hole_end = keys.start[block], keys.hole_start[block], keys.hole_end[block]
    before = -(-(hole_start - start) // step)  # steps before the hole
    last = unit + count - 1
    items[Item.KEY_START] = np.where(unit < before, start + unit * step, hole_end + (unit - before) * step)
    end = np.where(
        last < before,
        np.minimum(start + (last + 1) * step, hole_start),
        np.minimum(hole_end + (last - before + 1) * step, keys.end[block]),
    )
    crossed = (unit < before) & (last >= before)
    items[Item.KEY_END] = end
    items[Item.HOLE_START] = np.where(crossed, hole_start, end)
    items[Item.HOLE_END] = np.where(crossed, hole_end, end)


def _partials(
    line: Line, items: Int32Array, block: Int64Array, unit: Int64Array, at: Int64Array
) -> tuple[Int32Array, int]:
    """Number the partial rows of the items ``at``, and list the merges: ``(merges, rows)``."""
    items[Item.PARTIAL_ROW] = -1
    items[Item.MERGE :] = 0
    if not len(at):
        return _empty(), 0
    if line.chunks is not None:
        return _chunk_partials(line, line.chunks, items, block, at)
    # The parts of a band follow each other in the line: the merges of its heads begin where it does.
    heads = line.band_heads[block[at]]
    rows = items[Item.NUM_ROWS, at] * heads
    offsets = prefix_sums(rows)
    items[Item.PARTIAL_ROW, at] = offsets[:-1]
    begins = (unit[at] == 0).nonzero()[0]
    parts = np.diff(begins, append=len(at))
    first_merge = prefix_sums(heads[begins])
    items[Item.MERGE, at] = first_merge[:-1].repeat(parts)
    owner, parts = begins.repeat(heads[begins]), parts.repeat(heads[begins])
    head = np.arange(len(owner)) - first_merge[:-1].repeat(heads[begins])
    merges = items[:, at[owner]]  # segment, row_start, num_rows and head are the same columns
    merges[Merge.HEAD] += head
    merges[Merge.FIRST_ROW] = offsets[owner] + head * merges[Merge.NUM_ROWS]
    merges[Merge.NUM_PARTS] = parts
    merges[Merge.STRIDE] = rows[owner]
    merges[Merge.STRAND] = line.strand[block[at[owner]]]
    merges[Merge.STRAND + 1 :] = 0
    return merges, int(offsets[-1])


def _chunk_partials(
    line: Line, chunks: Chunks, items: Int32Array, block: Int64Array, at: Int64Array
) -> tuple[Int32Array, int]:
    """The same for fixed chunks: chunk ``c``, head ``h`` of a tile begin at its row ``(c * heads + h) * num_rows``."""
    block_rows = np.where(chunks.count > 1, line.num_rows * line.num_heads, 0)
    offsets = prefix_sums(block_rows)
    items[Item.PARTIAL_ROW, at] = offsets[block[at]] + items[Item.HEAD_START, at] * line.num_rows[block[at]]
    first = (chunks.count > 1) & (chunks.index == 0)
    items[Item.MERGE, at] = (first.cumsum()[block[at]] - 1) * line.num_heads + items[Item.HEAD_START, at]
    tiles = first.nonzero()[0]
    owner = tiles.repeat(line.num_heads)
    head = np.tile(np.arange(line.num_heads), len(tiles))
    merges = np.zeros((ROW_WIDTH, len(owner)), np.int32)
    merges[Merge.SEGMENT] = line.segment[owner]
    merges[Merge.ROW_START] = line.row_start[owner]
    merges[Merge.NUM_ROWS] = line.num_rows[owner]
    merges[Merge.HEAD] = head
    merges[Merge.FIRST_ROW] = offsets[owner] + head * line.num_rows[owner]
    merges[Merge.NUM_PARTS] = chunks.count[owner]
    merges[Merge.STRIDE] = block_rows[owner]
    merges[Merge.STRAND] = line.strand[owner]
    return merges, int(offsets[-1])
