"""The tensor form of a plan: one int32 array with a header, which kernels and operators read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from sennit.plan.integers import IntArray
from sennit.plan.schedule import ROW_WIDTH, Schedule
from sennit.plan.segments import Segments

__all__ = [
    "SEGMENT_FIELDS",
    "Extents",
    "Header",
    "Int32Array",
    "Layout",
    "PlanArrays",
    "PlanTensors",
    "write_header",
    "write_sections",
    "write_tables",
]

Int32Array = npt.NDArray[np.int32]


class Header(IntEnum):
    """Words at the beginning of the array; ``*_AT`` are offsets of sections, in words."""

    GENERATION = 0  # plans have a copy of it, their stamp
    NUM_ROWS = 1  # rows that the query tensor must have
    NUM_TOKENS = 2  # rows that requests cover
    LARGEST_PAGE = 3  # -1: none, or unknown because the table is on a device
    LARGEST_SLOT_PAGE = 4  # the same for an explicit slot mapping
    NUM_KEY_ROWS = 5  # rows that packed keys must have; 0 with pages
    NUM_SEGMENTS = 6
    NUM_ITEMS = 7
    NUM_MERGES = 8
    NUM_PARTIAL_ROWS = 9
    NUM_STRANDS = 10
    NUM_WORKERS = 11
    SEGMENTS_AT = 12
    ITEMS_AT = 13
    WORKERS_AT = 14
    MERGES_AT = 15
    TREES_AT = 16
    TABLE_AT = 17


HEADER_WORDS = 24
SEGMENT_FIELDS = (
    "request", "q_start", "q_len", "kv_start", "kv_len", "key_offset", "causal", "tree_len", "tree_at", "mask_at",
)  # fmt: skip


@dataclass(frozen=True)
class Extents:
    """Header words of a plan that neither its layout nor its schedule knows; see :class:`Header`."""

    generation: int
    num_rows: int
    num_tokens: int
    largest_page: int
    largest_slot_page: int
    num_key_rows: int


@dataclass(frozen=True)
class Layout:
    """How many rows each section has room for; a plan of its own fits exactly, buffers keep their capacity.

    Attributes:
        segments, items, merges: rows of :data:`ROW_WIDTH` words.
        strands, workers: shape of ``worker_indptr``, ``[strands, workers + 1]``.
        trees: words of all token trees, each as :meth:`Tree.words` gives it.
        table: page table entries kept in the array (0: the table is the caller's device tensor).
    """

    segments: int
    items: int
    merges: int
    strands: int
    workers: int
    trees: int
    table: int

    @property
    def offsets(self) -> tuple[int, int, int, int, int, int, int]:
        """Offsets of segments, items, workers, merges, trees and table, and the total, in words."""
        segments_at = HEADER_WORDS
        items_at = segments_at + self.segments * ROW_WIDTH
        workers_at = items_at + self.items * ROW_WIDTH
        merges_at = workers_at + self.strands * (self.workers + 1)
        trees_at = merges_at + self.merges * ROW_WIDTH
        table_at = trees_at + self.trees
        return segments_at, items_at, workers_at, merges_at, trees_at, table_at, table_at + self.table


@dataclass(frozen=True, eq=False)
class PlanTensors:
    """What an operator receives of a plan.

    Attributes:
        host: int32 ``[words]`` on the CPU, the array that the functions below write.
        device: the same on the plan's device (the same tensor on a CPU).
        page_table: int32 ``[entries]`` on the plan's device; empty for packed keys.
        stamp: int32 ``[1]`` on the CPU, the generation of ``host`` for which the plan was made.
        kv_lens: int32 ``[requests]`` on the device where exact lengths are only there, otherwise None.
        slots: int64 ``[rows]`` explicit slots for ``append``, or None.
        packed_mask: uint8 ``[bytes]`` on the device, or None; see :func:`sennit.pack_mask`.
    """

    host: torch.Tensor
    device: torch.Tensor
    page_table: torch.Tensor
    stamp: torch.Tensor
    kv_lens: torch.Tensor | None
    slots: torch.Tensor | None
    packed_mask: torch.Tensor | None


class PlanArrays:
    """Named views into the array that the functions below write: int32 ``[rows, ROW_WIDTH]`` sections and header words.

    Columns are those of ``Item``, ``Merge`` and, for segments, the fields of ``Segments``.
    """

    def __init__(self, array: Int32Array) -> None:
        self._array = array
        self._header: list[int] = array[:HEADER_WORDS].tolist()

    def __getitem__(self, word: Header) -> int:
        return self._header[word]

    # Made when asked for: an operator of a native backend, called once a layer, needs words of the header alone.
    @property
    def segments(self) -> Int32Array:
        """What is computed."""
        return self._section(Header.SEGMENTS_AT, Header.NUM_SEGMENTS)

    @property
    def strands_with_items(self) -> list[int]:
        """Numbers of the strands that have work."""
        words, at = self[Header.NUM_WORKERS] + 1, self[Header.WORKERS_AT]
        firsts = range(at, at + self[Header.NUM_STRANDS] * words, words)
        return [strand for strand, first in enumerate(firsts) if self._array[first] < self._array[first + words - 1]]

    @property
    def items(self) -> Int32Array:
        """Work items of all strands and workers."""
        return self._section(Header.ITEMS_AT, Header.NUM_ITEMS)

    @property
    def merges(self) -> Int32Array:
        """Which partial results become one."""
        return self._section(Header.MERGES_AT, Header.NUM_MERGES)

    @property
    def worker_indptr(self) -> Int32Array:
        """``[strands, workers + 1]``: bounds of each worker's items."""
        at, strands, bounds = self[Header.WORKERS_AT], self[Header.NUM_STRANDS], self[Header.NUM_WORKERS] + 1
        return self._array[at : at + strands * bounds].reshape(strands, bounds)

    def _section(self, at: Header, count: Header) -> Int32Array:
        start, rows = self[at], self[count]
        return self._array[start : start + rows * ROW_WIDTH].reshape(rows, ROW_WIDTH)


def write_header(array: Int32Array, layout: Layout, extents: Extents, counts: tuple[int, int, int, int]) -> None:
    """Write the header.

    Args:
        array: int32 ``[layout.offsets[-1]]``, zeros.
        layout: capacities of the sections.
        extents: what neither layout nor counts say.
        counts: segments, items, merges and partial rows that there are.
    """
    header = (
        extents.generation,
        extents.num_rows,
        extents.num_tokens,
        extents.largest_page,
        extents.largest_slot_page,
        extents.num_key_rows,
        *counts,
        layout.strands,
        layout.workers,
        *layout.offsets[:-1],
    )
    array[: len(header)] = header


def write_sections(array: Int32Array, layout: Layout, *, segments: Segments, schedule: Schedule) -> None:
    """Write segments, items, workers and merges into a plan's array."""
    segments_at, items_at, workers_at, merges_at, *_ = layout.offsets
    for at, rows in ((items_at, schedule.items), (merges_at, schedule.merges)):
        array[at : at + rows.size].reshape(-1, ROW_WIDTH)[:] = rows.T
    columns = np.zeros((ROW_WIDTH, len(segments)), np.int32)  # written row by row, which is faster, and then turned
    for column, name in enumerate(SEGMENT_FIELDS):
        columns[column] = getattr(segments, name)
    array[segments_at : segments_at + columns.size].reshape(-1, ROW_WIDTH)[:] = columns.T
    array[workers_at : workers_at + schedule.worker_indptr.size] = schedule.worker_indptr.ravel()


def write_tables(array: Int32Array, layout: Layout, segments: Segments, table: IntArray | None) -> None:
    """Write token trees, and page ids that the array is to hold."""
    *_, trees_at, table_at, _ = layout.offsets
    for tree, at, q_len in zip(segments.trees, segments.tree_at.tolist(), segments.q_len.tolist(), strict=False):
        if tree is not None:
            words = tree.words(q_len)
            array[trees_at + at : trees_at + at + len(words)] = words
    if table is not None:
        array[table_at : table_at + table.size] = table
