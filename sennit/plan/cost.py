"""What a backend tells the planner of its kernels: tile shapes, workers, and the time that work takes on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from sennit.errors import InvalidInput
from sennit.plan.segments import Segments, Window

__all__ = [
    "Combine",
    "KernelConfig",
    "Strand",
    "choose_config",
    "place",
    "prefix_sums",
    "share_workers",
    "strand_haste",
]

# How strands share a device: a worker runs them one after the other or side by side; or each has workers of its own,
# which run when those of the other have ended, or at the same time.
Combine: TypeAlias = Literal["sum", "max", "turns", "apart"]
FloatArray = npt.NDArray[np.float64]
_Number = TypeVar("_Number", bound="np.integer[Any] | np.floating[Any]")

WORTH_DIVIDING = 0.9


@dataclass(frozen=True)
class Strand:
    """One kind of tile of a kernel. Times are microseconds on one worker.

    Attributes:
        name: ``"wide"`` (many query rows, compute-bound) or ``"narrow"`` (few, memory-bound).
        tile_rows: packed query rows of a tile: tokens times query heads of one KV head.
        key_step: keys that the kernel's inner loop takes at once; cuts fall on its multiples.
        item_time: fixed time of a work item and KV head: reading queries, writing outputs.
        compute_time: arithmetic of one key step, in a tile of all its rows.
        memory_time: bringing the keys and values of one key step.
        split_time: writing one partial result and merging it later.
        workers: how many there are where the strand has the device for itself, if not all of the configuration's.
        haste: how many times faster a key step is than its time says where other workers leave the bus to it.
        row_step: rows that arithmetic takes at once, which divides ``tile_rows``, where a tile of few rows takes less.
        heads: KV heads that a work item takes together, which divides the layer's; cuts divide the keys of all of them.
        dealt: workers take whole bands of tiles (see :mod:`~sennit.plan.deal`) if the fullest gets so many times as
            full as by cuts, or less. 0: never, as beside a strand that the same worker runs before or after it. Tiles
            of one request are taken to read its keys from memory once.
    """

    name: Literal["wide", "narrow"]
    tile_rows: int
    key_step: int
    item_time: float
    compute_time: float
    memory_time: float
    split_time: float
    workers: int | None = None
    haste: float = 1.0
    row_step: int | None = None
    heads: int = 1
    dealt: float = 0.0


@dataclass(frozen=True)
class KernelConfig:
    """One way in which a backend can run a plan.

    Attributes:
        name: appears in the plan, in reports and in the operator's key.
        strands: one or two; segments are placed on the one that suits them.
        num_workers: persistent workers (SMs, threads) that take work items.
        combine: a worker runs its strands one after the other (``"sum"``) or side by side (``"max"``); or each strand
            has workers of its own: those of the second begin when those of the first have ended (``"turns"``), or all
            share the device (``"apart"``), each strand with as many as its part of the work asks for.
    """

    name: str
    strands: tuple[Strand, ...]
    num_workers: int
    combine: Combine = "sum"

    def __post_init__(self) -> None:
        # Such strands are cut together, and dealing moves what the cuts of one are made of.
        if self.combine == "sum" and len(self.strands) > 1 and any(strand.dealt for strand in self.strands):
            raise InvalidInput(
                "strands",
                expected="no dealt strand where workers run two strands one after the other",
                got=[strand.name for strand in self.strands if strand.dealt],
                hint='set dealt=0, or combine="max"',
            )

    def step_times(self, strand: npt.NDArray[np.int64], rows: npt.NDArray[Any]) -> FloatArray:
        """Times of a key step in tiles of ``rows``, of the shape of both: arithmetic and loads overlap.

        >>> narrow = Strand("narrow", 16, 64, 1.0, 4.0, 2.0, 1.0, row_step=4)
        >>> KernelConfig("x", (narrow,), 2).step_times(np.zeros(4, np.int64), np.array([1, 8, 9, 16])).tolist()
        [2.0, 2.0, 3.0, 4.0]
        """
        taken = np.ceil(rows / self.row_steps[strand]) * (self.row_steps / self.tile_rows)[strand]
        times: FloatArray = np.maximum(self.compute_times[strand] * taken, self.memory_times[strand])
        return times

    @property
    def max_merges(self) -> int:
        """Merges that cuts can give: each divides the keys of as many heads as an item of its strand takes."""
        return self.num_workers * sum(strand.heads for strand in self.strands)

    @property
    def max_partial_rows(self) -> int:
        """Rows of partial results that cuts can give: each ends one item and begins another, of any strand."""
        return 2 * self.num_workers * sum(strand.tile_rows * strand.heads for strand in self.strands)

    @cached_property
    def workers(self) -> npt.NDArray[np.int64]:
        """Workers of each strand that has the device for itself, ``[strands]``."""
        return np.array([s.workers or self.num_workers for s in self.strands])

    @cached_property
    def tile_rows(self) -> npt.NDArray[np.int64]:
        """Packed query rows of a tile, ``[strands]``; this and the next are indexed by strand."""
        return np.array([s.tile_rows for s in self.strands])

    @cached_property
    def key_steps(self) -> npt.NDArray[np.int64]:
        """Keys of a step, ``[strands]``."""
        return np.array([s.key_step for s in self.strands])

    @cached_property
    def item_times(self) -> FloatArray:
        """Fixed time of an item and head, ``[strands]``."""
        return np.array([s.item_time for s in self.strands])

    @cached_property
    def row_steps(self) -> npt.NDArray[np.int64]:
        """Rows that arithmetic takes at once, ``[strands]``."""
        return np.array([s.row_step or s.tile_rows for s in self.strands])

    @cached_property
    def heads(self) -> npt.NDArray[np.int64]:
        """KV heads that an item takes together, ``[strands]``."""
        return np.array([s.heads for s in self.strands])

    @cached_property
    def compute_times(self) -> FloatArray:
        """Time of the arithmetic of a key step in a tile of all its rows, ``[strands]``."""
        return np.array([s.compute_time for s in self.strands])

    @cached_property
    def memory_times(self) -> FloatArray:
        """Time of a key step on the memory bus, ``[strands]``."""
        return np.array([s.memory_time for s in self.strands])

    @cached_property
    def dealt(self) -> npt.NDArray[np.bool_]:
        """Whether bands of a strand may be dealt, ``[strands]``."""
        return np.array([s.dealt > 0 for s in self.strands])

    @cached_property
    def core_times(self) -> FloatArray:
        """Time for which a key step has the cores to itself, ``[strands]``."""
        products = self.tile_rows * self.key_steps
        times: FloatArray = products * (self.compute_times / products).min()
        return times

    @cached_property
    def split_times(self) -> FloatArray:
        """Time of a partial result, ``[strands]``."""
        return np.array([s.split_time for s in self.strands])


def prefix_sums(values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """``[0, v0, v0 + v1, ...]``, one entry longer than ``values``."""
    sums = np.zeros(len(values) + 1, values.dtype)
    values.cumsum(out=sums[1:])
    return sums


def total(values: FloatArray) -> FloatArray:
    """Sums over the last axis, added up in order: a compiled planner must come to the same."""
    return values.cumsum(axis=-1)[..., -1] if values.shape[-1] else np.zeros(values.shape[:-1])


def segment_times(segments: Segments, group_size: int, num_kv_heads: int, config: KernelConfig) -> FloatArray:
    """Times ``[3, strands, segments]`` of all tiles and heads of a segment.

    On a worker; and on what strands that run side by side share: the memory bus, and the cores that multiply matrices.
    These are taken to be as fast in each strand as in the one that uses them best, and to wait where an item begins.
    """
    rows, tile_rows = segments.q_len * group_size, config.tile_rows[:, None]
    tiles = np.ceil(rows / tile_rows)
    keys: npt.NDArray[Any] = segments.kv_len
    if tiles.max(initial=0) > 1:
        # Under causality the rows of a tile see, on average, half of the new keys that other tiles see.
        keys = keys - segments.causal * segments.q_len * (0.5 - 0.5 / np.maximum(tiles, 1))
    if segments.window is not None:
        keys = np.minimum(keys, _window_keys(segments, segments.window, tiles))
    steps = np.ceil(keys / config.key_steps[:, None])
    strand = np.arange(len(config.strands))[:, None]
    # All tiles are full but for the last.
    last = config.step_times(strand, rows - (tiles - 1) * tile_rows)
    of_steps = steps * ((tiles - 1) * config.step_times(strand, tile_rows) + last)
    times = np.empty((3, *tiles.shape))
    np.multiply(num_kv_heads, tiles * config.item_times[:, None] + of_steps, out=times[0])
    reads = np.where(config.dealt[:, None], np.minimum(tiles, 1), tiles)
    np.multiply(num_kv_heads, reads * (steps * config.memory_times[:, None]), out=times[1])
    on_cores = config.item_times[:, None] + steps * config.core_times[:, None]
    np.multiply(num_kv_heads, tiles * on_cores, out=times[2])
    return times


def _window_keys(segments: Segments, window: Window, tiles: FloatArray) -> FloatArray:
    """Keys ``[strands, segments]`` that the window leaves to the tile in the middle of a segment, at most."""
    behind = segments.kv_len if window.left is None or segments.inexact else window.left + window.num_sinks
    ahead = np.where(segments.causal > 0, 0, segments.kv_len if window.right is None else window.right)
    keys: FloatArray = behind + ahead + segments.q_len / np.maximum(tiles, 1)
    return keys


def place(
    segments: Segments, group_size: int, num_kv_heads: int, config: KernelConfig, *, alone: bool
) -> tuple[npt.NDArray[np.int64], float]:
    """Put every segment on a strand.

    Strands that run one after the other share a worker's time, so each segment takes the strand that is faster for it.
    Side by side the fullest of both strands, and of the memory bus and the cores that they share, counts: segments in
    the order of how much they prefer the first strand are divided where that is least.

    Args:
        segments: the step's segments.
        group_size: query heads per KV head.
        num_kv_heads: KV heads.
        config: the configuration; its first strand is number 0.
        alone: decide for each segment by itself, whatever its neighbours (batch invariance).

    Returns:
        ``(strand [segments], time)``, where ``time`` is the predicted makespan before any imbalance.
    """
    times = segment_times(segments, group_size, num_kv_heads, config)
    totals = total(times)
    if totals.shape[1] == 1:
        return np.zeros(len(segments), np.int64), float(totals[0, 0]) / config.num_workers
    if config.combine in ("turns", "apart"):
        return _place_apart(times, config)
    first, second = times[0]
    shared = times[1:]
    strand = (second < first).astype(np.int64)
    count = int(strand.sum())
    if count in (0, len(strand)):  # all on one strand
        of_all = totals[:, int(count > 0)]
        load, least, on_shared = float(totals[0, 1] * (count > 0)), float(of_all[0]), float(of_all[1:].max())
    else:
        load = float(total(second * strand))  # of the second strand
        least = load + float(totals[0, 0] - total(first * strand))
        on_shared = float(total(np.where(strand, shared[:, 1], shared[:, 0])).max())
    if config.combine == "sum":
        return strand, least / config.num_workers
    makespan = max(load, least - load, on_shared)
    # No placement takes less than half of the least time on both strands, or than the least on what they share.
    least_shared = float(total(np.minimum(shared[:, 0], shared[:, 1])).max())
    if not alone and max(least / 2, least_shared) < WORTH_DIVIDING * makespan:
        divided, time = _divide(first, second, shared)
        # A second strand brings more cuts and merges than are counted here.
        if time < WORTH_DIVIDING * makespan:
            strand, makespan = divided, time
    return strand, makespan / config.num_workers


def _place_apart(times: FloatArray, config: KernelConfig) -> tuple[npt.NDArray[np.int64], float]:
    """Every segment on the strand of which it takes the smaller part of the device."""
    device = times / config.workers[:, None]
    (first, second), bus, _ = device
    strand = (second < first).astype(np.int64)
    alone = np.array([float(total(first * (1 - strand))), float(total(second * strand))])
    if config.combine == "turns":
        return strand, float(alone.sum())
    fullest = (alone / _parts(config, alone) / strand_haste(config, alone)).max()
    return strand, max(float(fullest), float(total(np.where(strand, bus[1], bus[0]))))


def strand_haste(config: KernelConfig, times: FloatArray) -> FloatArray:
    """Haste of each strand beside the other: 1 where one has no work and takes no time."""
    return np.where(times.all(), [strand.haste for strand in config.strands], 1.0)


def _parts(config: KernelConfig, alone: FloatArray) -> FloatArray:
    """Each strand's part of the device, such that both end together; all of it where there is no other.

    What strands are given are SMs, of which each has room for some workers. Of the two ways to round, the better one.
    """
    if len(alone) == 1 or not alone.all():
        return np.ones(len(alone))
    places = int(config.workers.min())
    hasty = alone / strand_haste(config, alone)
    if places == 1:
        return np.ones(2)
    few = min(max(int(places * float(hasty[0] / hasty.sum())), 1), places - 1)
    parts = [np.array([first, places - first]) / places for first in (few, min(few + 1, places - 1))]
    return min(parts, key=lambda part: float((hasty / part).max()))


def share_workers(config: KernelConfig, totals: FloatArray) -> npt.NDArray[np.int64]:
    """Workers of each strand.

    Args:
        config: strands, and how they share the device.
        totals: time of each strand's work, on one worker, ``[strands]``.

    >>> wide = Strand("wide", 128, 64, 1.0, 2.0, 1.0, 1.0, workers=132)
    >>> narrow = Strand("narrow", 16, 64, 1.0, 1.0, 2.0, 1.0)
    >>> config = KernelConfig("apart", (wide, narrow), 264, "apart")
    >>> [share_workers(config, np.array(totals)).tolist() for totals in ((9.0, 18.0), (9.0, 0.0))]
    [[66, 132], [132, 264]]
    """
    if config.combine != "apart":
        return config.workers
    return np.rint(config.workers * _parts(config, totals / config.workers)).astype(np.int64)


def _divide(first: FloatArray, second: FloatArray, shared: FloatArray) -> tuple[npt.NDArray[np.int64], float]:
    """Divide segments, in the order of how much they prefer the first strand, where the fullest side is least."""
    order = (first / np.maximum(second, 1e-9)).argsort(kind="stable")
    before, after = prefix_sums(first[order]), prefix_sums(second[order])
    fullest = np.maximum(before, after[-1] - after)
    for on_first, on_second in shared[:, :, order]:
        before, after = prefix_sums(on_first), prefix_sums(on_second)
        fullest = np.maximum(fullest, before + (after[-1] - after))
    count = int(fullest.argmin())
    strand = np.ones(len(order), np.int64)
    strand[order[:count]] = 0
    return strand, float(fullest[count])


def choose_config(
    segments: Segments, group_size: int, num_kv_heads: int, configs: Sequence[KernelConfig], *, alone: bool
) -> tuple[KernelConfig, npt.NDArray[np.int64]]:
    """The configuration of least predicted makespan (the first of ``configs`` if ``alone``), and the strands in it."""
    offered = configs[:1] if alone else configs
    placed = [(config, *place(segments, group_size, num_kv_heads, config, alone=alone)) for config in offered]
    config, strand, _ = min(placed, key=lambda candidate: candidate[2])
    return config, strand
