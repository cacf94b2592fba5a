"""The tensor form of a plan: one int32 array with a header, which kernels and operators read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from sennit.plan.integers import IntArray
from sennit.plan.schedule import Items, Merges, Schedule
from sennit.plan.segments import Segments

__all__ = ["ROW_WIDTH", "Header", "Layout", "PlanArrays", "PlanTensors", "pack"]

Int32Array = npt.NDArray[np.int32]

ROW_WIDTH = 8  # int32 words of a segment, an item and a merge


class Header(IntEnum):
    """Words at the beginning of the array; ``*_AT`` are offsets of sections, in words."""

    GENERATION = 0
    NUM_ROWS = 1  # rows that the query tensor must have
    NUM_TOKENS = 2  # rows that requests cover
    NUM_SEGMENTS = 3
    NUM_ITEMS = 4
    NUM_MERGES = 5
    NUM_PARTIAL_ROWS = 6
    LARGEST_PAGE = 7  # -1: none, or unknown because the table is on a device
    NUM_KEY_ROWS = 8  # rows that packed keys must have; 0 with pages
    LARGEST_SLOT = 9  # of an explicit slot mapping on the host, as a page id
    SEGMENTS_AT = 10
    ITEMS_AT = 11
    WORKERS_AT = 12
    MERGES_AT = 13
    TABLE_AT = 14
    NUM_STRANDS = 15
    NUM_WORKERS = 16
    SIZE = 24


SEGMENT_FIELDS = tuple(field.name for field in fields(Segments))
ITEM_FIELDS = tuple(field.name for field in fields(Items))
MERGE_FIELDS = tuple(field.name for field in fields(Merges))


@dataclass(frozen=True)
class Layout:
    """How many rows each section has room for; a plan of its own fits exactly, buffers keep their capacity.

    Attributes:
        segments, items, merges: rows of :data:`ROW_WIDTH` words.
        strands, workers: shape of ``worker_indptr``, ``[strands, workers + 1]``.
        table: page table entries kept in the array (0: the table is the caller's device tensor).
    """

    segments: int
    items: int
    merges: int
    strands: int
    workers: int
    table: int

    @property
    def offsets(self) -> tuple[int, int, int, int, int, int]:
        """Offsets of segments, items, workers, merges and table, and the total, in words."""
        segments_at = int(Header.SIZE)
        items_at = segments_at + self.segments * ROW_WIDTH
        workers_at = items_at + self.items * ROW_WIDTH
        merges_at = workers_at + self.strands * (self.workers + 1)
        table_at = merges_at + self.merges * ROW_WIDTH
        return segments_at, items_at, workers_at, merges_at, table_at, table_at + self.table


@dataclass(frozen=True, eq=False)
class PlanTensors:
    """What an operator receives of a plan.

    Attributes:
        host: int32 ``[words]`` on the CPU, the array of :func:`pack`.
        device: the same on the plan's device (the same tensor on a CPU).
        page_table: int32 ``[entries]`` on the plan's device; empty for packed keys.
        stamp: int32 ``[1]`` on the CPU, the generation of ``host`` for which the plan was made.
        kv_lens: int32 ``[requests]`` on the device where exact lengths are only there, otherwise None.
        slots: int64 ``[rows]`` explicit slots for ``append``, or None.
    """

    host: torch.Tensor
    device: torch.Tensor
    page_table: torch.Tensor
    stamp: torch.Tensor
    kv_lens: torch.Tensor | None
    slots: torch.Tensor | None


class PlanArrays:
    """Named views into the array of :func:`pack`: int32 ``[rows, ROW_WIDTH]`` sections and header words.

    Columns are in the order of the fields of ``Segments``, ``Items`` and ``Merges``.
    """

    def __init__(self, array: Int32Array) -> None:
        self.header = array[: Header.SIZE]
        self.segments = self._section(array, Header.SEGMENTS_AT, Header.NUM_SEGMENTS)
        self.items = self._section(array, Header.ITEMS_AT, Header.NUM_ITEMS)
        self.merges = self._section(array, Header.MERGES_AT, Header.NUM_MERGES)
        strands, workers = self[Header.NUM_STRANDS], self[Header.NUM_WORKERS]
        at = self[Header.WORKERS_AT]
        self.worker_indptr = array[at : at + strands * (workers + 1)].reshape(strands, workers + 1)

    def __getitem__(self, word: Header) -> int:
        return int(self.header[word])

    def _section(self, array: Int32Array, at: Header, count: Header) -> Int32Array:
        start, rows = self[at], self[count]
        return array[start : start + rows * ROW_WIDTH].reshape(rows, ROW_WIDTH)


def pack(
    array: Int32Array,
    layout: Layout,
    segments: Segments,
    schedule: Schedule,
    table: IntArray | None,
    words: dict[Header, int],
) -> None:
    """Write a plan into ``array``, which has room for ``layout``.

    Args:
        array: int32 ``[layout.offsets[-1]]``.
        layout: capacities of the sections.
        segments: the segments.
        schedule: items, merges and worker bounds.
        table: page ids to keep in the array, or None.
        words: header words that neither layout nor schedule knows.
    """
    segments_at, items_at, workers_at, merges_at, table_at, _ = layout.offsets
    words = words | {
        Header.NUM_SEGMENTS: len(segments),
        Header.NUM_ITEMS: len(schedule.items),
        Header.NUM_MERGES: len(schedule.merges),
        Header.NUM_PARTIAL_ROWS: schedule.num_partial_rows,
        Header.SEGMENTS_AT: segments_at,
        Header.ITEMS_AT: items_at,
        Header.WORKERS_AT: workers_at,
        Header.MERGES_AT: merges_at,
        Header.TABLE_AT: table_at,
        Header.NUM_STRANDS: layout.strands,
        Header.NUM_WORKERS: layout.workers,
    }
    array[list(words)] = list(words.values())
    for at, rows, names in (
        (segments_at, segments, SEGMENT_FIELDS),
        (items_at, schedule.items, ITEM_FIELDS),
        (merges_at, schedule.merges, MERGE_FIELDS),
    ):
        count = len(rows)
        section = array[at : at + count * ROW_WIDTH].reshape(count, ROW_WIDTH)
        for column, name in enumerate(names):
            section[:, column] = getattr(rows, name)
    array[workers_at : workers_at + schedule.worker_indptr.size] = schedule.worker_indptr.reshape(-1)
    if table is not None:
        array[table_at : table_at + table.size] = table
