"""Tiles laid end to end in one line of time, and where to cut it so that all workers finish together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sennit.plan.cost import FloatArray, KernelConfig, prefix_sums, share_workers
from sennit.plan.segments import Segments
from sennit.plan.visible import KeySteps, key_steps, last_keys, window_starts

__all__ = ["Line", "balance", "count_chunks", "fullest", "make_line"]

Int64Array = npt.NDArray[np.int64]

COARSE_UNITS = 48  # units a worker below which single units are worth moving
MAX_PASSES = 6


@dataclass(frozen=True, eq=False)
class Line:
    """All tiles of a step end to end, strand after strand, measured in units that are never cut.

    A block is one tile of a segment, or one fixed chunk of its keys, for ``num_bands`` bands of KV heads: all of them,
    unless bands are dealt (see :mod:`~sennit.plan.deal`). A band is as many heads as the strand takes together, and
    ``band_units`` units long: its key steps, or one where chunks are fixed. A band takes its base time once and its
    unit time a unit; a band in two parts takes the base time twice, and the split time for each part::

        block 0                     block 1
        |band 0    |band 1    |...  |band 0  |band 1  |...
        |base|u|u|u|base|u|u|u|     |base|u|u|base|u|u|

    Arrays have one entry a block.
    """

    config: KernelConfig
    num_heads: int
    strand: Int64Array
    segment: Int64Array
    row_start: Int64Array
    num_rows: Int64Array
    keys: KeySteps
    band_units: Int64Array
    chunks: Chunks | None  # fixed chunks, in which case bands are not divisible
    head_start: Int64Array
    num_bands: Int64Array

    def __len__(self) -> int:
        return len(self.segment)

    @cached_property
    def band_heads(self) -> Int64Array:
        """Heads of a band."""
        return self.config.heads[self.strand]

    @cached_property
    def base_time(self) -> FloatArray:
        """Time that a band takes once: reading queries, and writing results (to be merged, if chunks are fixed)."""
        base = self.config.item_times[self.strand] * self.band_heads
        if self.chunks is not None:
            base = base + self.split_time * (self.chunks.count > 1)
        return base

    @cached_property
    def unit_time(self) -> FloatArray:
        """Time of a unit."""
        time = self.config.step_times(self.strand, self.num_rows) * self.band_heads
        return time if self.chunks is None else time * self.chunks.steps

    @cached_property
    def split_time(self) -> FloatArray:
        """Time of writing the partial results of a part of a band, and of merging them."""
        return self.config.split_times[self.strand] * self.band_heads

    @cached_property
    def band_time(self) -> FloatArray:
        """Time of one undivided band of each block."""
        time: FloatArray = self.base_time + self.band_units * self.unit_time
        return time

    @cached_property
    def unit_start(self) -> Int64Array:
        """First unit of each block, and the line's length."""
        return prefix_sums(self.band_units * self.num_bands)

    @cached_property
    def time_start(self) -> FloatArray:
        """Time at which each block begins, and the whole."""
        return prefix_sums(self.band_time * self.num_bands)

    @property
    def strand_blocks(self) -> list[int]:
        """First block of every strand, and the number of blocks."""
        strands = len(self.config.strands)
        return [0, len(self)] if strands == 1 else [0, int(self.strand.searchsorted(1)), len(self)]

    @property
    def strand_times(self) -> FloatArray:
        """Time of every strand's work on one worker."""
        return np.diff(self.time_start[self.strand_blocks])

    @property
    def strand_workers(self) -> Int64Array:
        """Workers that every strand is cut for."""
        return share_workers(self.config, self.strand_times)

    def block_at(self, unit: Int64Array) -> Int64Array:
        """Block that holds each unit; the end of the line belongs to the last."""
        return self.unit_start[1:-1].searchsorted(unit, side="right")

    def unit_at(self, time: FloatArray) -> Int64Array:
        """Unit boundary nearest to each time."""
        block = self.time_start[1:-1].searchsorted(time, side="right")
        band, rest = np.divmod(time - self.time_start[block], self.band_time[block])
        # Both ends of a band are boundaries; in between, the base time comes before the first unit.
        units = self.band_units[block]
        base = self.base_time[block] if self.chunks is None else 0.0
        within = np.rint((rest - base) / self.unit_time[block])
        within = np.minimum(np.maximum(within, 0), units)
        return self.unit_start[block] + (band * units + within).astype(np.int64)

    def times_between(self, start: Int64Array, end: Int64Array) -> FloatArray:
        """Time of one worker for units ``start : end``, repeated base and split times included."""
        if not len(self):
            return np.zeros(np.broadcast(start, end).shape)
        start_block, start_band, start_time, start_extra = self.locate(start)
        end_block, end_band, end_time, _ = self.locate(end)
        # Beginning inside a band repeats its base time; each part of a divided band is one partial result.
        inside_end = end_band >= 0
        same_band = inside_end & (start_band == end_band) & (start_block == end_block)
        split = np.where(inside_end & ~same_band, self.split_time[end_block], 0.0)
        return np.where(start < end, end_time - start_time + start_extra + split, 0.0)

    def single_bands(self, blocks: Int64Array, bands: Int64Array, first: int, last: int) -> Line:
        """The same line with single ``bands`` of ``blocks`` in place of the blocks ``first : last``."""
        taken = np.concatenate([np.arange(first), blocks, np.arange(last, len(self))])
        columns = self.strand[taken], self.segment[taken], self.row_start[taken], self.num_rows[taken]
        head_start, num_bands = self.head_start[taken], self.num_bands[taken]
        single = slice(first, first + len(blocks))
        head_start[single] += bands * self.band_heads[blocks]
        num_bands[single] = 1
        units = self.band_units[taken]
        return Line(self.config, self.num_heads, *columns, self.keys.take(taken), units, None, head_start, num_bands)

    def locate(self, unit: Int64Array) -> tuple[Int64Array, Int64Array, FloatArray, FloatArray]:
        """Block of a boundary, the band that it divides (-1: none), its time, and the extra time of beginning there."""
        block = self.block_at(unit)
        band, within = np.divmod(unit - self.unit_start[block], self.band_units[block])
        inside = within > 0
        base = self.base_time[block]
        time = self.time_start[block] + band * self.band_time[block]
        time = time + np.where(inside, base + within * self.unit_time[block], 0.0)
        extra = np.where(inside, base + self.split_time[block], 0.0)
        return block, np.where(inside, band, -1), time, extra


@dataclass(frozen=True, eq=False)
class Chunks:
    """Fixed chunks of tiles' keys, an entry a block: the chunk's index among its tile's, their count, and key steps."""

    index: Int64Array
    count: Int64Array
    steps: Int64Array


def make_line(
    segments: Segments,
    strand: Int64Array,
    config: KernelConfig,
    *,
    group_size: int,
    num_kv_heads: int,
    page_size: int,
    split_size: int | None,
) -> Line:
    """Lay out the tiles of all segments, strand after strand, cut into chunks if ``split_size`` is given.

    Args:
        segments: the step's segments.
        strand: int64 ``[segments]``, the strand each was placed on.
        config: strands and times.
        group_size: query heads per KV head.
        num_kv_heads: KV heads.
        page_size: tokens a page; 1 for packed keys.
        split_size: keys of a fixed chunk, or None.
    """
    tiles = _make_tiles(segments, strand, config, group_size)
    num_sinks = segments.window.num_sinks if segments.window is not None else 0
    if split_size is not None:
        return _chunked(tiles, config, num_kv_heads, num_sinks, page_size, split_size)
    step = config.key_steps[tiles.strand]
    if segments.window is None:
        keys = KeySteps(np.zeros_like(tiles.key_end), tiles.key_end, tiles.key_end, tiles.key_end)
    else:
        keys = key_steps(np.zeros_like(tiles.key_end), tiles.key_end, tiles.window_start, num_sinks, step, page_size)
    # A tile that sees no key still takes a step: it writes zeros.
    return _line(config, num_kv_heads, tiles, keys, np.maximum(keys.count(step), 1), None)


class _Tiles(NamedTuple):
    """Columns of one entry a tile, strand after strand: whose it is, its packed rows, and which keys they see."""

    strand: Int64Array
    segment: Int64Array
    row_start: Int64Array
    num_rows: Int64Array
    window_start: Int64Array
    key_end: Int64Array


def _make_tiles(segments: Segments, strand: Int64Array, config: KernelConfig, group_size: int) -> _Tiles:
    segment = strand.argsort(kind="stable")
    strand = strand[segment]
    num_rows = segments.q_len[segment] * group_size
    tile_rows = config.tile_rows[strand]
    count = -(-num_rows // tile_rows)
    row_start = np.zeros_like(count)
    single = (count == 1).all()
    if not single:
        tile = np.arange(count.sum()) - (count.cumsum() - count).repeat(count)
        segment, strand, num_rows, tile_rows = (c.repeat(count) for c in (segment, strand, num_rows, tile_rows))
        row_start = tile * tile_rows
        num_rows = np.minimum(num_rows - row_start, tile_rows)
    if single and segments.window is None:
        key_end = segments.kv_len[segment]
    else:
        key_end = last_keys(segments, segment, (row_start + num_rows - 1) // group_size)
    # Where lengths are upper bounds nobody knows where windows begin, and kernels look for themselves.
    if segments.window is None or segments.inexact:
        starts = np.zeros_like(row_start)
    else:
        starts = window_starts(segments, segment, row_start // group_size)
    return _Tiles(strand, segment, row_start, num_rows, starts, key_end)


def _chunked(
    tiles: _Tiles, config: KernelConfig, num_kv_heads: int, num_sinks: int, page_size: int, split_size: int
) -> Line:
    """Tiles cut at multiples of ``split_size``: the chunks with sink tokens, then those that the window reaches."""
    reached, sunk, count = _chunk_counts(tiles, num_sinks, split_size)
    index = np.arange(count.sum()) - (count.cumsum() - count).repeat(count)
    tiles = _Tiles(*(column.repeat(count) for column in tiles))
    reached, sunk, count = (column.repeat(count) for column in (reached, sunk, count))
    first = (index + np.where(index < sunk, 0, reached - sunk)) * split_size
    key_end = np.minimum(tiles.key_end, first + split_size)
    step = config.key_steps[tiles.strand]
    keys = key_steps(np.minimum(first, key_end), key_end, tiles.window_start, num_sinks, step, page_size)
    chunks = Chunks(index, count, np.maximum(keys.count(step), 1))
    return _line(config, num_kv_heads, tiles, keys, np.ones_like(index), chunks)


def _chunk_counts(tiles: _Tiles, num_sinks: int, split_size: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Of every tile the first chunk that the window reaches, chunks with sink tokens before it, and all its chunks."""
    reached = tiles.window_start // split_size
    sunk = np.minimum(-(-np.minimum(num_sinks, tiles.key_end) // split_size), reached)
    # A chunk that sees no key still takes a step, as a tile does.
    return reached, sunk, np.maximum(-(-tiles.key_end // split_size) - reached + sunk, 1)


def count_chunks(
    segments: Segments, strand: Int64Array, config: KernelConfig, *, group_size: int, split_size: int
) -> int:
    """Chunks that :func:`make_line` cuts with a ``split_size``; of tiles, memory is taken for these alone."""
    num_sinks = segments.window.num_sinks if segments.window is not None else 0
    tiles = _make_tiles(segments, strand, config, group_size)
    return int(_chunk_counts(tiles, num_sinks, split_size)[2].sum())


def _line(
    config: KernelConfig, num_heads: int, tiles: _Tiles, keys: KeySteps, units: Int64Array, chunks: Chunks | None
) -> Line:
    columns = tiles.strand, tiles.segment, tiles.row_start, tiles.num_rows
    bands = num_heads // config.heads[tiles.strand]
    return Line(config, num_heads, *columns, keys, units, chunks, np.zeros_like(bands), bands)


def balance(line: Line) -> Int64Array:
    """Cut a line into one range a strand and worker: int64 ``[strands, num_workers + 1]`` units.

    Strands are cut one by one, for the workers that each has. Only those that every worker runs one after the other are
    cut together, so that a worker's share may be all of one, all of the other or some of both.

    Prefix sums divide the time equally, with the base and split times that cuts repeat counted in. Where single units
    are large beside a worker's share, cuts are then moved one by one.
    """
    config, strands = line.config, len(line.config.strands)
    if not len(line):
        return np.zeros((strands, config.num_workers + 1), np.int64)
    blocks = line.strand_blocks
    together = config.combine == "sum" and strands == 2
    rows = [(0, len(line))] if together else list(pairwise(blocks))
    times = [(float(line.time_start[first]), float(line.time_start[last])) for first, last in rows]
    workers = line.strand_workers.tolist()
    cuts = np.empty((len(rows), config.num_workers + 1), np.int64)
    used = [row for row, (first, last) in enumerate(rows) if first < last]
    # Where one row holds both strands, the second one's times stand for both.
    wanted = [_equal_shares(line, 1 if together else row, workers[row], *times[row]) for row in used]
    ends = np.cumsum([len(share) for share in wanted])
    found = dict(zip(used, np.split(line.unit_at(np.concatenate(wanted)), ends[:-1]), strict=True))
    for row, (first, last) in enumerate(rows):
        cuts[row, 0], cuts[row, 1:] = line.unit_start[first], line.unit_start[last]
        if row in used:
            cuts[row, 1 : workers[row]] = found[row]
    shares = [(end - start) / count for (start, end), count in zip(times, workers, strict=False)]
    for cut, share, count in zip(cuts, shares, workers, strict=False):
        # Beside a fuller strand nothing is gained by it.
        enough = max(1.01 * share, *shares) if config.combine == "max" else 1.01 * share
        if 0 < cut[-1] - cut[0] < COARSE_UNITS * count and fullest(line, cut) > enough:
            cut[: count + 1] = _polish(line, cut[: count + 1])
    if together:
        bounds = line.unit_start[blocks][:, None]
        cuts = np.minimum(np.maximum(cuts, bounds[:-1]), bounds[1:])
    return cuts


def _equal_shares(line: Line, strand: int, workers: int, start: float, end: float) -> FloatArray:
    """Times from ``start`` to ``end`` at which every worker but the first begins, what cuts repeat counted in."""
    share = np.arange(1.0, workers)
    if line.chunks is not None:
        return start + share * ((end - start) / workers)
    item, split = (
        times[strand] * line.config.heads[strand] for times in (line.config.item_times, line.config.split_times)
    )
    repeated = item + 2 * split
    # Every worker but the first begins, and every one but the last ends, with a part of a band.
    each = max(end - start - repeated, 0.0) / workers
    times: FloatArray = np.minimum(share * each + (start + repeated - split), end)
    return times


def fullest(line: Line, cuts: Int64Array) -> float:
    """Time of the fullest of the workers that cuts divide units among."""
    return float(line.times_between(cuts[:-1], cuts[1:]).max())


def _polish(line: Line, cuts: Int64Array) -> Int64Array:
    """From the given cuts, and from those at whole bands, move cuts while that helps; the better result."""
    table = _UnitTable(line, int(cuts[0]), int(cuts[-1]))
    cuts = cuts - cuts[0]
    low, high = table.band_begin[cuts], table.band_end[cuts]
    nearer = np.where(cuts - low <= high - cuts, low, high)
    best = min((table.improve(c) for c in (cuts, nearer)), key=table.fullest)
    return best + table.first


class _UnitTable:
    """A short stretch of a line written out unit by unit, so that trying a cut costs a few look-ups."""

    def __init__(self, line: Line, first: int, last: int) -> None:
        self.first = first
        unit = np.arange(first, last + 1)
        block, band, self.time, self.extra = line.locate(unit)
        units = line.band_units[block]
        inside = band >= 0
        self.band_begin = unit - (unit - line.unit_start[block]) % units - first
        self.band_end = np.where(inside, self.band_begin + units, unit - first)
        self.split = np.where(inside, line.split_time[block], 0.0)

    def times(self, start: Int64Array, end: Int64Array) -> FloatArray:
        """The same as ``Line.times_between``, units counted from ``first``."""
        begin = self.band_begin[end]
        split = np.where((begin == self.band_begin[start]) & (start > begin), 0.0, self.split[end])
        return np.where(start < end, self.time[end] - self.time[start] + self.extra[start] + split, 0.0)

    def fullest(self, cuts: Int64Array) -> float:
        """Time of the fullest worker."""
        return float(self.times(cuts[:-1], cuts[1:]).max())

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
                low, high = self.band_begin[here], self.band_end[here]
                lower, higher = self.band_begin[np.maximum(low - 1, 0)], self.band_end[np.minimum(high + 1, last)]
                moves = np.stack([here, here - 1, here + 1, low, high, lower, higher])
                moves = np.minimum(np.maximum(moves, left), right)
                fuller = np.maximum(self.times(left, moves), self.times(moves, right))
                cuts[at] = moves[fuller.argmin(axis=0), np.arange(len(here))]
            if (cuts == before).all():
                break
        return cuts
