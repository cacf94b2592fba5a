"""Tiles laid end to end in one line of time, and where to cut it so that all workers finish together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sennit.plan.cost import FloatArray, Strand
from sennit.plan.segments import Segments

__all__ = ["Line", "balance", "concatenate", "make_line"]

Int64Array = npt.NDArray[np.int64]

POLISH_ABOVE = 1.01  # imbalance (max over mean) above which cuts are moved one by one
POLISH_PASSES = 12


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
    chunks: Int64Array  # chunks of the block's tile; above 1 every item of the block is a partial result
    first_chunk: npt.NDArray[np.bool_]
    key_step: Int64Array
    head_units: Int64Array
    base_time: FloatArray
    unit_time: FloatArray
    split_time: FloatArray
    num_heads: int
    divisible: bool

    def __post_init__(self) -> None:
        head_time = self.base_time + self.head_units * self.unit_time
        for name, sizes in (("unit_start", self.head_units), ("time_start", head_time)):
            object.__setattr__(self, name, np.append(0, np.cumsum(sizes * self.num_heads)))
        object.__setattr__(self, "head_time", head_time)

    # Set once from the fields above: prefix sums over blocks, with the total as last entry.
    unit_start: Int64Array = None  # type: ignore[assignment]
    time_start: FloatArray = None  # type: ignore[assignment]
    head_time: FloatArray = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.segment)

    @property
    def num_units(self) -> int:
        """Length of the line."""
        return int(self.unit_start[-1])

    def block_at(self, unit: Int64Array) -> Int64Array:
        """Block that holds a unit; the end of the line belongs to the last."""
        return np.minimum(np.searchsorted(self.unit_start, unit, side="right") - 1, len(self) - 1)

    def unit_at(self, time: FloatArray) -> Int64Array:
        """Unit boundary nearest to a time."""
        block = np.clip(np.searchsorted(self.time_start, time, side="right") - 1, 0, len(self) - 1)
        head, rest = np.divmod(time - self.time_start[block], self.head_time[block])
        units, unit_time = self.head_units[block], self.unit_time[block]
        # Without units of time, or undivided, a head is cut at its nearer end.
        span = np.where(unit_time > 0, unit_time, 1.0)
        within = np.where(unit_time > 0, np.rint((rest - self.base_time[block]) / span), np.rint(rest / self.head_time[block]))
        unit = self.unit_start[block] + head.astype(np.int64) * units + np.clip(within, 0, units).astype(np.int64)
        return np.minimum(unit, self.num_units)

    def times_between(self, start: Int64Array, end: Int64Array) -> FloatArray:
        """Time of one worker for units ``start : end``, repeated base and split times included."""
        if not len(self):
            return np.zeros(np.broadcast(start, end).shape)
        start_block, start_time, start_inside = self._locate(start)
        end_block, end_time, end_inside = self._locate(end)
        times = end_time - start_time
        times = times + start_inside * (self.base_time[start_block] + self.split_time[start_block])
        # A part in the middle of a head is one partial result, not two.
        same_head = start_inside & end_inside & (times < self.head_time[start_block] + self.split_time[start_block])
        same_head &= start_block == end_block
        times = times + end_inside * ~same_head * self.split_time[end_block]
        return np.where(start < end, times, 0.0)

    def _locate(self, unit: Int64Array) -> tuple[Int64Array, FloatArray, npt.NDArray[np.bool_]]:
        """Block of a unit boundary, its time in the line, and whether it is inside a head."""
        block = self.block_at(unit)
        units = self.head_units[block]
        head, within = np.divmod(unit - self.unit_start[block], units)
        inside = within > 0
        time = self.time_start[block] + head * self.head_time[block]
        return block, time + inside * (self.base_time[block] + within * self.unit_time[block]), inside

    def head_bounds(self, unit: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Where the head that holds a unit begins and ends."""
        block = self.block_at(unit)
        within = (unit - self.unit_start[block]) % self.head_units[block]
        return unit - within, np.where(within > 0, unit - within + self.head_units[block], unit)


def make_line(
    segments: Segments,
    chosen: Int64Array,
    strand: Strand,
    group_size: int,
    num_kv_heads: int,
    split_size: int | None,
) -> Line:
    """Lay out the tiles of the ``chosen`` segments on a strand, cut into chunks if ``split_size`` is given."""
    packed_rows = segments.q_len[chosen] * group_size
    tiles = -(-packed_rows // strand.tile_rows)
    segment = np.repeat(chosen, tiles)
    tile = np.arange(len(segment)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    row_start = tile * strand.tile_rows
    num_rows = np.minimum(np.repeat(packed_rows, tiles) - row_start, strand.tile_rows)
    kv_len, q_len = segments.kv_len[segment], segments.q_len[segment]
    last_token = (row_start + num_rows - 1) // group_size
    key_end = np.where(segments.causal[segment] > 0, np.clip(kv_len - q_len + last_token + 1, 0, kv_len), kv_len)
    key_start = np.zeros_like(key_end)
    chunks = np.ones_like(key_end)
    first_chunk = np.ones(len(segment), np.bool_)
    if split_size is not None:
        chunks = np.maximum(-(-key_end // split_size), 1)
        chunk = np.arange(chunks.sum()) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        segment, row_start, num_rows, key_end, chunks = (
            np.repeat(a, chunks) for a in (segment, row_start, num_rows, key_end, chunks)
        )
        key_start = chunk * split_size
        key_end = np.minimum(key_end, key_start + split_size)
        first_chunk = chunk == 0
    steps = -(-(key_end - key_start) // strand.key_step)
    divisible = split_size is None
    ones = np.ones(len(segment))
    return Line(
        segment=segment,
        row_start=row_start,
        num_rows=num_rows,
        key_start=key_start,
        key_end=key_end,
        chunks=chunks,
        first_chunk=first_chunk,
        key_step=np.full(len(segment), strand.key_step),
        head_units=np.maximum(steps, 1) if divisible else np.ones_like(steps),
        base_time=strand.item_time + strand.split_time * (chunks > 1),
        unit_time=strand.step_time * (np.minimum(steps, 1) if divisible else steps),
        split_time=strand.split_time * ones,
        num_heads=num_kv_heads,
        divisible=divisible,
    )


def concatenate(lines: list[Line]) -> Line:
    """Several lines end to end."""
    names = list(Line.__dataclass_fields__)[:12]
    columns = {name: np.concatenate([getattr(line, name) for line in lines]) for name in names}
    return Line(**columns, num_heads=lines[0].num_heads, divisible=lines[0].divisible)


def balance(line: Line, num_workers: int) -> Int64Array:
    """Cut a line into one range a worker: int64 ``[num_workers + 1]`` units, from 0 to the line's end.

    Equal times by prefix sums first; then once more with the repeated base and split times that those cuts cause; then,
    if single units are still large beside a worker's share, cut by cut.
    """
    if not len(line):
        return np.zeros(num_workers + 1, np.int64)
    share = np.arange(1, num_workers)
    total = line.time_start[-1]
    overhead = np.zeros(num_workers)
    for _ in range(2):
        target = (total + overhead.sum()) / num_workers
        times = np.clip(share * target - np.cumsum(overhead)[:-1], 0, total)
        cuts = np.concatenate([[0], np.maximum.accumulate(line.unit_at(times)), [line.num_units]])
        loads = line.times_between(cuts[:-1], cuts[1:])
        overhead = loads - np.diff(line._locate(cuts)[1])
    if loads.max() <= POLISH_ABOVE * loads.mean():
        return cuts
    low, high = line.head_bounds(cuts)
    nearer = np.where(cuts - low <= high - cuts, low, high)
    candidates = [_polish(line, cuts), _polish(line, nearer)]
    return min(candidates, key=lambda c: float(line.times_between(c[:-1], c[1:]).max()))


def _polish(line: Line, cuts: Int64Array) -> Int64Array:
    """Move every second cut, then the others, to whichever near place makes its fuller neighbour least full."""
    cuts = cuts.copy()
    for _ in range(POLISH_PASSES):
        before = cuts.copy()
        for parity in (1, 2):
            at = np.arange(parity, len(cuts) - 1, 2)
            here, left, right = cuts[at], cuts[at - 1], cuts[at + 1]
            low, high = line.head_bounds(here)
            previous, _ = line.head_bounds(np.maximum(low - 1, 0))
            _, following = line.head_bounds(np.minimum(high + 1, line.num_units))
            moves = np.clip(np.stack([here, here - 1, here + 1, low, high, previous, following]), left, right)
            fuller = np.maximum(line.times_between(left, moves), line.times_between(moves, right))
            cuts[at] = moves[fuller.argmin(axis=0), np.arange(len(at))]
        if (cuts == before).all():
            break
    return cuts
