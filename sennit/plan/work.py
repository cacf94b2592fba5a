"""The work of a plan: made by a compiled planner, or by NumPy, to the same words, where nothing can be compiled.

``csrc`` has a twin of each of the modules :mod:`~sennit.plan.cost`, :mod:`~sennit.plan.visible`,
:mod:`~sennit.plan.line`, :mod:`~sennit.plan.deal` and :mod:`~sennit.plan.schedule`. Those say what plans mean, and are
what is tested against.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt

from sennit.errors import BuildFailed, BuildUnavailable, InvalidInput
from sennit.plan.cost import Combine, FloatArray, KernelConfig, choose_config
from sennit.plan.line import count_chunks
from sennit.plan.schedule import Schedule, make_schedule
from sennit.plan.segments import Segments
from sennit.plan.tensors import SEGMENT_FIELDS, Int32Array, Layout, write_sections

if TYPE_CHECKING:
    from sennit.jit import Source

__all__ = [
    "Cutting",
    "Work",
    "Write",
    "make_work",
    "make_work_in_numpy",
    "planner",
    "planner_source",
    "schedule_in_numpy",
]

CSRC = Path(__file__).parent / "csrc"
COMBINES: tuple[str, ...] = get_args(Combine)
MOST_KNOWN = 64  # sequences of configurations whose numbers are kept
MOST_CHUNKS = 2**24  # fixed ones of a plan, each of which is a work item; planning takes some 200 bytes for each

Write = Callable[[Int32Array, Layout], None]  # segments, items, workers and merges into a plan's int32 array


@dataclass(frozen=True)
class Work:
    """What the work of a plan comes to.

    Attributes:
        config: the configuration chosen.
        num_items: work items of all strands.
        num_merges: split tiles.
        num_partial_rows: rows that their partial results take.
    """

    config: KernelConfig
    num_items: int
    num_merges: int
    num_partial_rows: int


@dataclass(frozen=True)
class Cutting:
    """How segments are to be cut, beside what a configuration says.

    Attributes:
        group_size: query heads per KV head.
        num_kv_heads: KV heads.
        page_size: tokens a page, or None for packed keys.
        split_size: keys of a fixed chunk, or None.
        alone: the first configuration, and strands for each segment by itself; see
            :func:`~sennit.plan.cost.choose_config`.
    """

    group_size: int
    num_kv_heads: int
    page_size: int | None
    split_size: int | None
    alone: bool


def make_work(segments: Segments, configs: Sequence[KernelConfig], cutting: Cutting) -> tuple[Work, Write]:
    """Choose a configuration and cut segments into work items for it.

    Returns:
        What it comes to, and a function that writes it.

    Raises:
        InvalidInput: fixed splits come to more work items than anybody can want.
    """
    _check_chunks(segments, configs[0], cutting)
    library = planner()
    if library is None:
        return make_work_in_numpy(segments, configs, cutting)
    if cutting.alone:
        configs = configs[:1]
    options = np.array(
        (
            cutting.group_size, cutting.num_kv_heads, cutting.page_size or 1, cutting.split_size or 0,
            *_window_words(segments), segments.inexact, bool(segments.trees), cutting.alone,
        )
    )  # fmt: skip
    columns, results = np.array([getattr(segments, name) for name in SEGMENT_FIELDS]), np.empty(5, np.int64)
    numbers = _numbers(configs)
    _done(
        library.plan(
            _address(columns), len(segments), _address(numbers), len(configs), _address(options), _address(results)
        )
    )
    chosen, *counts, address = results.tolist()
    made = _Made(library, address)

    def write(array: Int32Array, layout: Layout) -> None:
        offsets = np.array(layout.offsets)
        _done(library.write(made.address, _address(array), _address(columns), len(segments), _address(offsets)))

    return Work(configs[chosen], *counts), write


def _check_chunks(segments: Segments, config: KernelConfig, cutting: Cutting) -> None:
    """Refuse too many fixed chunks before they take memory; they are counted where a bound does not tell."""
    size, group_size = cutting.split_size, cutting.group_size
    if size is None or not len(segments):
        return
    narrowest = min(strand.tile_rows for strand in config.strands)
    tiles, chunks = -(-int(segments.q_len.max()) * group_size // narrowest), -(-int(segments.kv_len.max()) // size)
    if len(segments) * tiles * max(chunks, 1) <= MOST_CHUNKS:
        return
    _, strand = choose_config(segments, group_size, cutting.num_kv_heads, [config], alone=True)
    count = int((-(-segments.q_len * group_size // config.tile_rows[strand])).sum())  # tiles: a chunk or more each
    if count <= MOST_CHUNKS:
        count = count_chunks(segments, strand, config, group_size=group_size, split_size=size)
    if count > MOST_CHUNKS:
        raise InvalidInput(
            "split_size", expected=f"at most {MOST_CHUNKS} work items", got=f"{count} or more, with {size}",
            hint="use a larger split_size, or a smaller batch",
        )  # fmt: skip


def make_work_in_numpy(segments: Segments, configs: Sequence[KernelConfig], cutting: Cutting) -> tuple[Work, Write]:
    """The same as :func:`make_work`, without a compiler."""
    schedule = schedule_in_numpy(segments, configs, cutting)
    work = Work(schedule.line.config, schedule.num_items, schedule.num_merges, schedule.num_partial_rows)
    return work, partial(write_sections, segments=segments, schedule=schedule)


def schedule_in_numpy(segments: Segments, configs: Sequence[KernelConfig], cutting: Cutting) -> Schedule:
    """The schedule for the configuration that is chosen, ``schedule.line.config``."""
    heads = cutting.group_size, cutting.num_kv_heads
    config, strand = choose_config(segments, *heads, configs, alone=cutting.alone)
    return make_schedule(
        segments,
        strand,
        group_size=cutting.group_size,
        num_kv_heads=cutting.num_kv_heads,
        config=config,
        page_size=cutting.page_size,
        split_size=cutting.split_size,
    )


def planner_source() -> Source:
    """The library's source. Its sums must be those of NumPy, in which nothing is fused, whatever flags a user adds."""
    from sennit import jit  # imported when it is needed: importing Sennit should take no time

    last_flags = "-fno-fast-math", "-ffp-contract=off"
    return jit.Source.in_folder(CSRC, "planner", ("planner.cpp",), ("-O2",), last_flags=last_flags)


@cache
def planner() -> Any | None:
    """The compiled library; None where nothing can be compiled, and NumPy plans instead."""
    from sennit import jit

    try:
        return jit.load(planner_source())
    except BuildUnavailable:
        return None
    except BuildFailed as error:
        warnings.warn(f"plans take longer to make than they need: {error}", stacklevel=2)
        return None


def _window_words(segments: Segments) -> tuple[int, int, int, int]:
    """Whether there is a window, how far it reaches (-1: any distance), and its sink tokens."""
    window = segments.window
    if window is None:
        return 0, -1, -1, 0
    left, right = (-1 if distance is None else distance for distance in (window.left, window.right))
    return 1, left, right, window.num_sinks


class _Made:
    """A schedule in the library's memory, for as long as this object lives."""

    def __init__(self, library: Any, address: int) -> None:
        self.address = address
        self._release = library.release

    def __del__(self) -> None:
        self._release(self.address)


def _address(array: npt.NDArray[Any]) -> int:
    """Of its first element; ``array.ctypes`` takes ten times as long."""
    return int(array.__array_interface__["data"][0])


_known: dict[tuple[int, ...], tuple[Sequence[KernelConfig], FloatArray]] = {}


def _numbers(configs: Sequence[KernelConfig]) -> FloatArray:
    """Configurations as ``csrc/planner.cpp`` reads them, float64 ``[configurations, words]``."""
    key = tuple(map(id, configs))
    if key not in _known:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = tuple(configs), np.array([_words(config) for config in configs], np.float64)
    return _known[key][1]


def _words(config: KernelConfig) -> list[float]:
    words: list[float] = [config.num_workers, COMBINES.index(config.combine), len(config.strands)]
    for strand, workers in zip(config.strands, config.workers.tolist(), strict=True):
        words += [strand.tile_rows, strand.key_step, strand.row_step or strand.tile_rows, strand.heads, workers]
        words += [strand.item_time, strand.compute_time, strand.memory_time, strand.split_time, strand.haste]
        words.append(strand.dealt)
    return words + [0.0] * (11 * (2 - len(config.strands)))


def _done(status: int) -> None:
    if status:
        raise MemoryError("there is not enough memory for the items of this plan; use a larger split_size")
