"""Bands that are dealt to workers whole, so that those which run at once read the same keys."""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np
import numpy.typing as npt

from sennit.plan.line import Line, fullest

__all__ = ["MOST_BANDS", "deal"]

Int64Array = npt.NDArray[np.int64]

MOST_BANDS = 128  # a worker; plans of more would take longer to make, and more room, than they are worth


def deal(line: Line, cuts: Int64Array) -> tuple[Line, Int64Array]:
    """Put the bands of strands that are ``dealt`` into the order of dealing, where that delays the step little or not.

    Cuts that balance a line perfectly begin every worker's share at another key. Where rows of one request are many
    tiles, all of its keys are then read by all workers, at different times, and whatever else streams through a
    device's cache has them read from memory each time. Bands that are dealt longest first, each to the worker that is
    free first, begin together and have like lengths: their keys are read once for all of them. Nor are there parts to
    be merged.

    A strand stays as it is where it has more than ``MOST_BANDS`` bands a worker, and where dealing would make its
    fullest worker more than ``Strand.dealt`` times as full, unless the other strand takes longer beside it.

    Args:
        line: tiles in the order of segments.
        cuts: int64 ``[strands, num_workers + 1]``, as :func:`~sennit.plan.line.balance` gives them.

    Returns:
        The line, and its cuts.
    """
    config = line.config
    if line.chunks is not None or not len(line):
        return line, cuts
    workers = line.strand_workers
    shares = line.strand_times / workers
    for strand, count in enumerate(workers.tolist()):
        if config.strands[strand].dealt:
            enough = config.strands[strand].dealt * fullest(line, cuts[strand])
            if config.combine == "max":
                enough = max(enough, *shares)
            line, cuts = _deal_strand(line, cuts, strand, count, enough)
    return line, cuts


def _deal_strand(line: Line, cuts: Int64Array, strand: int, count: int, enough: float) -> tuple[Line, Int64Array]:
    first, last = line.strand_blocks[strand : strand + 2]
    bands = line.num_bands[first:last]
    if bands.sum() > MOST_BANDS * count:
        return line, cuts
    block = np.arange(first, last).repeat(bands)
    times = line.band_time[block]
    order = (-times).argsort(kind="stable")
    free = [(0.0, worker) for worker in range(count)]
    heapify(free)
    owner = np.empty(len(order), np.int64)
    for place, time in enumerate(times[order].tolist()):
        load, owner[place] = free[0]
        heapreplace(free, (load + time, int(owner[place])))
    if max(free)[0] > enough:
        return line, cuts
    hands = owner.argsort(kind="stable")
    order = order[hands]
    band = np.arange(len(block)) - (bands.cumsum() - bands).repeat(bands)
    line = line.single_bands(block[order], band[order], first, last)
    cuts = cuts.copy()
    ends = owner[hands].searchsorted(np.arange(1, count), side="left")
    cuts[strand, 1:count] = line.unit_start[first + ends]
    return line, cuts
