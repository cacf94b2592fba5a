"""Segments, the planner's only input: query rows times a range of keys, checked against pages and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sennit.errors import InvalidInput
from sennit.plan.batch import Batch
from sennit.plan.integers import INT32_MAX, host_array

__all__ = ["Segments", "from_batch", "largest_page"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Segments:
    """Arrays of one entry a segment, all int64.

    Row ``i`` of a segment has position ``p = kv_len - q_len + i``; key ``j`` of it has position ``key_offset + j``::

        key 0              p of row 0          p of the last row   (causal)
        |------ cached ---------|------- new tokens -------|
        0                  kv_len - q_len                 kv_len

    Attributes:
        request: index of the request in the batch.
        q_start: first query row.
        q_len: query rows.
        kv_start: first entry in the page table, or first row in packed keys.
        kv_len: keys; an upper bound where the exact length is on the device.
        key_offset: position of the segment's first key.
        causal: 1 where a row sees no key behind its own position.
    """

    request: Int64Array
    q_start: Int64Array
    q_len: Int64Array
    kv_start: Int64Array
    kv_len: Int64Array
    key_offset: Int64Array
    causal: Int64Array

    def __len__(self) -> int:
        return len(self.q_len)


def from_batch(batch: Batch, *, needed: Int64Array | None, causal: bool | Sequence[bool]) -> Segments:
    """One segment a request, in the order of the batch.

    Args:
        batch: lengths and tables.
        needed: pages that each request's keys take; None for packed keys.
        causal: one flag, or one a request.

    Raises:
        InvalidInput: a page table is too short for its request, a count does not fit 32 bits, or ``causal`` has the
            wrong length.
    """
    count = batch.num_requests
    if batch.pages is not None and needed is not None:
        short = needed > batch.pages.widths
        if short.any():
            r = int(short.argmax())
            raise InvalidInput(
                "page table",
                expected=f"{needed[r]} pages for the {batch.kv_lens[r]} keys of request {r}",
                got=f"{batch.pages.widths[r]} entries",
            )
        kv_start, entries = batch.pages.starts, batch.pages.entries.shape[0]
    else:
        assert batch.kv_starts is not None
        kv_start, entries = batch.kv_starts, int(batch.kv_starts.max(initial=0))
    for what, total in (("query rows", batch.num_rows), ("page table entries", entries)):
        if total > INT32_MAX:
            raise InvalidInput("batch", expected=f"at most {INT32_MAX} {what}", got=total)
    return Segments(
        request=np.arange(count),
        q_start=batch.q_starts,
        q_len=batch.q_lens,
        kv_start=kv_start,
        kv_len=batch.kv_lens,
        key_offset=np.zeros(count, np.int64),
        causal=_causal_flags(causal, count),
    )


def largest_page(batch: Batch, needed: Int64Array) -> int:
    """Largest page id that a visible key uses (-1: none, or the table is on a device).

    Args:
        batch: lengths and tables.
        needed: pages that each request's keys take.

    Raises:
        InvalidInput: a visible page id is negative, or does not fit 32 bits.
    """
    if batch.pages is None or not isinstance(batch.pages.entries, np.ndarray):
        return -1
    entries, starts = batch.pages.entries, batch.pages.starts
    total = int(needed.sum())
    if not total:
        return -1
    if len(entries) == total:  # no request needs more than it has, so every entry is visible
        visible = entries
    else:
        first = starts - needed.cumsum() + needed
        visible = entries[first.repeat(needed) + np.arange(total)]
    # One pass for both ends: as an unsigned number a negative id is larger than any allowed one.
    largest = int(visible.view(f"u{visible.dtype.itemsize}").max())
    if largest > INT32_MAX or (visible.dtype.itemsize < 4 and visible.min() < 0):
        bad = int(np.argmax((visible < 0) | (visible > INT32_MAX)))
        r = int(needed.cumsum().searchsorted(bad, side="right"))
        raise InvalidInput(
            f"page table of request {r}",
            expected=f"page ids from 0 to {INT32_MAX} in the {needed[r]} entries that its {batch.kv_lens[r]} keys use",
            got=int(visible[bad]),
        )
    return largest


def _causal_flags(causal: bool | Sequence[bool], count: int) -> Int64Array:
    if isinstance(causal, (bool, np.bool_)):
        return np.ones(count, np.int64) if causal else np.zeros(count, np.int64)
    flags = host_array("causal", causal, of="bools")
    if flags.dtype != np.bool_ and flags.size:
        dtype = getattr(causal, "dtype", flags.dtype)
        raise InvalidInput("causal", expected="a bool, or one bool a request", got=f"dtype {dtype}")
    if flags.shape != (count,):
        raise InvalidInput("causal", expected=f"a bool, or {count} bools", got=f"shape {flags.shape}")
    return flags.astype(np.int64)
