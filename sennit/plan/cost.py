"""What a backend tells the planner of its kernels: tile shapes, workers, and the time that work takes on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from sennit.plan.segments import Segments

__all__ = ["KernelConfig", "Strand", "choose_config", "place"]

FloatArray = npt.NDArray[np.float64]


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


def segment_times(
    segments: Segments, group_size: int, num_kv_heads: int, strand: Strand
) -> tuple[FloatArray, FloatArray]:
    """Time ``[segments]`` of each segment on a strand, all tiles and KV heads together, and its time on the memory bus."""
    tiles = -(-(segments.q_len * group_size) // strand.tile_rows)
    # Under causality the rows of tile t see, on average, half of the new keys that other tiles see.
    hidden = segments.causal * segments.q_len * (1 - 1 / np.maximum(tiles, 1)) / 2
    steps = np.ceil(np.maximum(segments.kv_len - hidden, 0) / strand.key_step)
    heads = tiles * num_kv_heads
    return heads * (strand.item_time + steps * strand.step_time), heads * steps * strand.memory_time


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
    both = [segment_times(segments, group_size, num_kv_heads, strand) for strand in config.strands]
    if len(both) == 1:
        return np.zeros(len(segments), np.int64), float(both[0][0].sum()) / config.num_workers
    (first, first_bus), (second, second_bus) = both
    strand = (second < first).astype(np.int64)
    if config.combine == "sum":
        return strand, float(np.minimum(first, second).sum()) / config.num_workers
    if not alone:
        order = np.argsort(first / np.maximum(second, 1e-9), kind="stable")
        load = _prefix(first[order])
        other = _suffix(second[order])
        bus = _prefix(first_bus[order]) + _suffix(second_bus[order])
        count = int(np.argmin(np.maximum(np.maximum(load, other), bus)))
        strand = np.ones(len(segments), np.int64)
        strand[order[:count]] = 0
    on_first = strand == 0
    loads = (
        first[on_first].sum(),
        second[~on_first].sum(),
        np.where(on_first, first_bus, second_bus).sum(),
    )
    return strand, float(max(loads)) / config.num_workers


def _prefix(times: FloatArray) -> FloatArray:
    return np.append(0.0, np.cumsum(times))


def _suffix(times: FloatArray) -> FloatArray:
    return times.sum() - _prefix(times)


def choose_config(
    segments: Segments, group_size: int, num_kv_heads: int, configs: Sequence[KernelConfig], *, alone: bool
) -> tuple[KernelConfig, npt.NDArray[np.int64]]:
    """The configuration of least predicted makespan (the first of ``configs`` if ``alone``), and the strands in it."""
    offered = configs[:1] if alone else configs
    placed = [(config, *place(segments, group_size, num_kv_heads, config, alone=alone)) for config in offered]
    config, strand, _ = min(placed, key=lambda candidate: candidate[2])
    return config, strand
