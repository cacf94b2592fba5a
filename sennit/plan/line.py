"""Tiles laid end to end in one line of time, and where to cut it so that all workers finish together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sennit.plan.cost import FloatArray, Strand, prefix_sums
from sennit.plan.segments import Segments

__all__ = ["Line", "balance", "concatenate", "make_line"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

COARSE_UNITS = 48  # units a worker below which single units are worth moving
MAX_PASSES = 6


@dataclass(frozen=True, eq=False)
class Line:
    """Blocks laid end to end, measured in units that are never cut.

    A block is one tile of a segment, or one fixed chunk of its keys, for all KV heads. Each head of it is
    ``head_units`` units long: its key steps if the line is divisible, otherwise one. A head takes ``base_time`` once
    and ``unit_time`` a unit; a head in two parts takes ``base_time`` twice, and ``split_time`` for each part::

        block 0                     block 1
        |head 0    |head 1    |...  |head 0  |head 1  |...
        |base|u|u|u|base|u|u|u|     |base|u|u|base|u|u|

    All arrays have one entry a block.
    """

    segment: Int64Array
    row_start: Int64Array
    num_rows: Int64Array
    key_start: Int64Array
    key_end: Int64Array
    chunk: Int64Array  # index of the block among the chunks of its tile
    num_chunks: Int64Array  # above 1 every item of the block is a partial result
    key_step: Int64Array
    head_units: Int64Array
    base_time: FloatArray
    unit_time: FloatArray
    split_time: FloatArray
    num_heads: int
    divisible: bool

    def __len__(self) -> int:
        return len(self.segment)

    @cached_property
    def head_time(self) -> FloatArray:
        """Time of one undivided head of each block."""
        time: FloatArray = self.base_time + self.head_units * self.unit_time
        return time

    @cached_property
    def columns(self) -> npt.NDArray[np.int32]:
        """int32 ``[3, blocks]``: segment, row start and rows, the columns that a work item takes over as they are."""
        columns = np.empty((3, len(self.segment)), np.int32)
        columns[0], columns[1], columns[2] = self.segment, self.row_start, self.num_rows
        return columns

    @cached_property
    def unit_start(self) -> Int64Array:
        """First unit of each block, and the line's length."""
        return prefix_sums(self.head_units * self.num_heads)

    @cached_property
    def time_start(self) -> FloatArray:
        """Time at which each block begins, and the whole."""
        return prefix_sums(self.head_time * self.num_heads)

    @property
    def num_units(self) -> int:
        """Length of the line."""
        return int(self.unit_start[-1])

    def block_at(self, unit: Int64Array) -> Int64Array:
        """Block that holds each unit."""
        return self.unit_start[1:-1].searchsorted(unit, side="right")

    def unit_at(self, time: FloatArray) -> Int64Array:
        """Unit boundary nearest to each time."""
        block = self.time_start[1:-1].searchsorted(time, side="right")
        head_time = self.head_time[block]
        head, rest = np.divmod(time - self.time_start[block], head_time)
        # Both ends of a head are boundaries; in between, the base time comes before the first unit.
        inside = (rest - self.base_time[block]) / self.unit_time[block] if self.divisible else rest / head_time
        units = self.head_units[block]
        within = np.minimum(np.maximum(np.rint(inside), 0), units)
        return self.unit_start[block] + (head * units + within).astype(np.int64)

    def times_between(self, start: Int64Array, end: Int64Array) -> FloatArray:
        """Time of one worker for units ``start : end``, repeated base and split times included."""
        if not len(self):
            return np.zeros(np.broadcast(start, end).shape)
        start_block, start_head, start_time, start_extra = self._locate(start)
        end_block, end_head, end_time, _ = self._locate(end)
        # Beginning inside a head repeats its base time; each part of a divided head is one partial result.
        inside_end = end_head >= 0
        same_head = inside_end & (start_head == end_head) & (start_block == end_block)
        times = end_time - start_time + start_extra + np.where(inside_end & ~same_head, self.split_time[end_block], 0.0)
        return np.where(start < end, times, 0.0)

    def _locate(self, unit: Int64Array) -> tuple[Int64Array, Int64Array, FloatArray, FloatArray]:
        """Block of a boundary, the head that it divides (-1: none), its time, and the extra time of beginning there."""
        block = self.block_at(unit)
        head, within = np.divmod(unit - self.unit_start[block], self.head_units[block])
        inside = within > 0
        base = self.base_time[block]
        time = self.time_start[block] + head * self.head_time[block]
        time = time + np.where(inside, base + within * self.unit_time[block], 0.0)
        return block, np.where(inside, head, -1), time, np.where(inside, base + self.split_time[block], 0.0)


COLUMNS = tuple(name for name in Line.__dataclass_fields__ if name not in ("num_heads", "divisible"))


def make_line(
    segments: Segments,
    chosen: Int64Array,
    strand: Strand,
    group_size: int,
    num_kv_heads: int,
    split_size: int | None,
) -> Line:
    """Lay out the tiles of the ``chosen`` segments on a strand, cut into chunks if ``split_size`` is given."""
    if not len(chosen):
        return _empty_line(num_kv_heads, split_size is None)
    packed_rows = segments.q_len[chosen] * group_size
    tiles = -(-packed_rows // strand.tile_rows)
    segment, row_start, num_rows = chosen, np.zeros_like(chosen), packed_rows
    if not (tiles == 1).all():
        segment = chosen.repeat(tiles)
        tile = np.arange(len(segment)) - (tiles.cumsum() - tiles).repeat(tiles)
        row_start = tile * strand.tile_rows
        num_rows = np.minimum(packed_rows.repeat(tiles) - row_start, strand.tile_rows)
    key_end = _visible_keys(segments, segment, (row_start + num_rows - 1) // group_size)
    key_start = chunk = np.zeros_like(key_end)
    num_chunks = key_start + 1
    if split_size is not None:
        num_chunks = np.maximum(-(-key_end // split_size), 1)
        chunk = np.arange(num_chunks.sum()) - (num_chunks.cumsum() - num_chunks).repeat(num_chunks)
        segment, row_start, num_rows, key_end, num_chunks = (
            column.repeat(num_chunks) for column in (segment, row_start, num_rows, key_end, num_chunks)
        )
        key_start = chunk * split_size
        key_end = np.minimum(key_end, key_start + split_size)
    # A tile that sees no key still takes a step: it writes zeros.
    steps = np.maximum(-(-(key_end - key_start) // strand.key_step), 1)
    ones = np.ones_like(steps)
    divisible = split_size is None
    return Line(
        segment=segment,
        row_start=row_start,
        num_rows=num_rows,
        key_start=key_start,
        key_end=key_end,
        chunk=chunk,
        num_chunks=num_chunks,
        key_step=ones * strand.key_step,
        head_units=steps if divisible else ones,
        base_time=ones * strand.item_time + (0.0 if divisible else strand.split_time * (num_chunks > 1)),
        unit_time=(ones if divisible else steps) * strand.step_time,
        split_time=ones * strand.split_time,
        num_heads=num_kv_heads,
        divisible=divisible,
    )


@cache
def _empty_line(num_heads: int, divisible: bool) -> Line:
    columns: dict[str, Any] = dict.fromkeys(COLUMNS, np.empty(0, np.int64))
    return Line(**columns, num_heads=num_heads, divisible=divisible)


def _visible_keys(segments: Segments, segment: Int64Array, last_token: Int64Array) -> Int64Array:
    """Keys that the rows up to ``last_token`` of each tile's segment see."""
    kv_len = segments.kv_len[segment]
    seen = kv_len - segments.q_len[segment] + last_token + 1
    return np.where(segments.causal[segment] > 0, np.maximum(np.minimum(seen, kv_len), 0), kv_len)


def concatenate(lines: list[Line]) -> Line:
    """Several lines end to end."""
    if not len(lines[0]) or not len(lines[1]):
        return lines[1] if not len(lines[0]) else lines[0]
    columns = {name: np.concatenate([getattr(line, name) for line in lines]) for name in COLUMNS}
    return Line(**columns, num_heads=lines[0].num_heads, divisible=lines[0].divisible)


def balance(line: Line, num_workers: int) -> Int64Array:
    """Cut a line into one range a worker: int64 ``[num_workers + 1]`` units, from 0 to the line's end.

    Prefix sums divide the time equally, with the base and split times that cuts repeat counted in. Where single units
    are large beside a worker's share, cuts are then moved one by one.
    """
    cuts = np.zeros(num_workers + 1, np.int64)
    if not len(line):
        return cuts
    total, share = line.time_start[-1], np.arange(1, num_workers)
    times: FloatArray = share * (total / num_workers)
    if line.divisible:
        block = line.time_start[1:-1].searchsorted(times, side="right")
        before, after = line.split_time[block], line.base_time[block] + line.split_time[block]
        repeated = before + after
        times = share * ((total + repeated.sum()) / num_workers) - (repeated.cumsum() - after)
    np.maximum.accumulate(line.unit_at(np.minimum(np.maximum(times, 0.0), line.time_start[-1])), out=cuts[1:-1])
    cuts[-1] = line.num_units
    np.minimum(cuts, cuts[-1], out=cuts)
    return _polish(line, cuts) if line.num_units < COARSE_UNITS * num_workers else cuts


def _polish(line: Line, cuts: Int64Array) -> Int64Array:
    """From the given cuts, and from those at whole heads, move cuts while that helps; the better result."""
    table = _UnitTable(line)
    low, high = table.head_begin[cuts], table.head_end[cuts]
    nearer = np.where(cuts - low <= high - cuts, low, high)
    return min(
        (table.improve(start) for start in (cuts, nearer)), key=lambda c: float(table.times(c[:-1], c[1:]).max())
    )


class _UnitTable:
    """A short line written out unit by unit, so that trying a cut costs a few look-ups."""

    def __init__(self, line: Line) -> None:
        unit = np.arange(line.num_units + 1)
        block, head, self.time, self.extra = line._locate(unit)
        within = (unit - line.unit_start[block]) % line.head_units[block]
        inside = head >= 0
        self.head_begin = unit - within
        self.head_end = np.where(inside, self.head_begin + line.head_units[block], unit)
        self.split = np.where(inside, line.split_time[block], 0.0)

    def times(self, start: Int64Array, end: Int64Array) -> FloatArray:
        """The same as ``Line.times_between``."""
        begin = self.head_begin[end]
        split = np.where((begin == self.head_begin[start]) & (start > begin), 0.0, self.split[end])
        return np.where(start < end, self.time[end] - self.time[start] + self.extra[start] + split, 0.0)

    def improve(self, cuts: Int64Array) -> Int64Array:
        """Move every second cut, then the others, to whichever near place makes its fuller neighbour least full."""
        cuts = cuts.copy()
        last = cuts[-1]
        for _ in range(MAX_PASSES):
            before = cuts.copy()
            for parity in (1, 2):
                at = slice(parity, len(cuts) - 1, 2)
                here = cuts[at]
                left, right = cuts[parity - 1 : len(cuts) - 2 : 2], cuts[parity + 1 :: 2]
                low, high = self.head_begin[here], self.head_end[here]
                moves = np.stack(
                    [
                        here,
                        here - 1,
                        here + 1,
                        low,
                        high,
                        self.head_begin[low - 1],
                        self.head_end[np.minimum(high + 1, last)],
                    ]
                )
                moves = np.minimum(np.maximum(moves, left), right)
                fuller = np.maximum(self.times(left, moves), self.times(moves, right))
                cuts[at] = moves[fuller.argmin(axis=0), np.arange(len(here))]
            if (cuts == before).all():
                break
        return cuts
