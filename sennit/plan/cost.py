"""What a backend tells the planner of its kernels: tile shapes, workers, and the time that work takes on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from sennit.plan.segments import Segments

__all__ = ["KernelConfig", "Strand", "choose_config", "place", "prefix_sums"]

FloatArray = npt.NDArray[np.float64]
_Number = TypeVar("_Number", bound="np.integer[Any] | np.floating[Any]")

WORTH_DIVIDING = 0.97


@dataclass(frozen=True)
class Strand:
    """One kind of tile of a kernel. Times are microseconds on one worker.

    Attributes:
        name: ``"wide"`` (many query rows, compute-bound) or ``"narrow"`` (few, memory-bound).
        tile_rows: packed query rows of a tile: tokens times query heads of one KV head.
        key_step: keys that the kernel's inner loop takes at once; cuts fall on its multiples.
        item_time: fixed time of a work item and KV head: reading queries, writing outputs.
        compute_time: arithmetic of one key step.
        memory_time: bringing the keys and values of one key step.
        split_time: writing one partial result and merging it later.
    """

    name: Literal["wide", "narrow"]
    tile_rows: int
    key_step: int
    item_time: float
    compute_time: float
    memory_time: float
    split_time: float

    @property
    def step_time(self) -> float:
        """Time of one key step: arithmetic and loads overlap."""
        return max(self.compute_time, self.memory_time)


@dataclass(frozen=True)
class KernelConfig:
    """One way in which a backend can run a plan.

    Attributes:
        name: appears in the plan, in reports and in the operator's key.
        strands: one or two; segments are placed on the one that suits them.
        num_workers: persistent workers (SMs, threads) that take work items.
        combine: a worker runs its strands one after the other (``"sum"``) or side by side (``"max"``).
    """

    name: str
    strands: tuple[Strand, ...]
    num_workers: int
    combine: Literal["sum", "max"] = "sum"

    @cached_property
    def columns(self) -> FloatArray:
        """Tile rows, key step, item, step and memory time of the strands: ``[5, strands, 1]``."""
        rows = [[s.tile_rows, s.key_step, s.item_time, s.step_time, s.memory_time] for s in self.strands]
        columns: FloatArray = np.array(rows).T[:, :, None]
        return columns


def prefix_sums(values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """``[0, v0, v0 + v1, ...]``, one entry longer than ``values``."""
    sums = np.zeros(len(values) + 1, values.dtype)
    values.cumsum(out=sums[1:])
    return sums


def segment_times(segments: Segments, group_size: int, num_kv_heads: int, config: KernelConfig) -> FloatArray:
    """Times ``[2, strands, segments]``, on a worker and on the memory bus, of all tiles and heads of a segment."""
    tile_rows, key_step, item_time, step_time, memory_time = config.columns
    tiles = np.ceil(segments.q_len * group_size / tile_rows)
    keys = segments.kv_len
    if tiles.max(initial=0) > 1:
        # Under causality the rows of a tile see, on average, half of the new keys that other tiles see.
        keys = keys - segments.causal * segments.q_len * (0.5 - 0.5 / np.maximum(tiles, 1))
    steps = np.ceil(keys / key_step)
    tiles *= num_kv_heads
    times = np.empty((2, *tiles.shape))
    np.multiply(tiles, item_time + steps * step_time, out=times[0])
    np.multiply(tiles, steps * memory_time, out=times[1])
    return times


def place(
    segments: Segments, group_size: int, num_kv_heads: int, config: KernelConfig, *, alone: bool
) -> tuple[npt.NDArray[np.int64], float]:
    """Put every segment on a strand.

    Strands that run one after the other share a worker's time, so each segment takes the strand that is faster for it.
    Side by side the fullest of both strands and the memory bus that they share counts: segments in the order of how
    much they prefer the first strand are divided where that is least.

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
    (first, *others), bus = times
    if not others:
        return np.zeros(len(segments), np.int64), float(first.sum()) / config.num_workers
    second = others[0]
    on_second = second < first
    least = np.minimum(first, second).sum()
    if config.combine == "sum":
        return on_second.astype(np.int64), float(least) / config.num_workers
    on_bus = float(np.where(on_second, bus[1], bus[0]).sum())
    load = float((second * on_second).sum())
    preferred = max(load, float(least) - load, on_bus)
    strand = on_second.astype(np.int64)
    # No placement takes less than half of the least time on both strands, or less than the least time on the bus.
    if not alone and max(float(least) / 2, float(np.minimum(*bus).sum())) < WORTH_DIVIDING * preferred:
        divided, time = _divide(first, second, bus)
        # A second strand brings more cuts and merges than are counted here.
        if time < WORTH_DIVIDING * preferred:
            strand, preferred = divided, time
    return strand, preferred / config.num_workers


def _divide(first: FloatArray, second: FloatArray, bus: FloatArray) -> tuple[npt.NDArray[np.int64], float]:
    """Divide segments, in the order of how much they prefer the first strand, where the fullest side is least."""
    order = (first / np.maximum(second, 1e-9)).argsort()
    before, bus_before = prefix_sums(first[order]), prefix_sums(bus[0, order])
    after, bus_after = (sums[-1] - sums for sums in (prefix_sums(second[order]), prefix_sums(bus[1, order])))
    fullest = np.maximum(np.maximum(before, after), bus_before + bus_after)
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
