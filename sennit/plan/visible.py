"""Which keys a stretch of query rows can see: those that causality, windows and trees hide are never planned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sennit.errors import InvalidInput
from sennit.plan.batch import Batch
from sennit.plan.integers import INT32_MAX
from sennit.plan.segments import Segments

__all__ = ["KeySteps", "key_steps", "largest_page", "last_keys", "window_starts"]

Int64Array = npt.NDArray[np.int64]


def last_keys(segments: Segments, segment: Int64Array, last_token: Int64Array) -> Int64Array:
    """Keys of each segment up to the last one that its rows up to ``last_token`` see."""
    kv_len = segments.kv_len[segment]
    ahead = kv_len - segments.q_len[segment] + last_token + 1
    window = segments.window
    hidden = segments.causal[segment] > 0
    if window is not None and window.right is not None:
        sunk = np.where(hidden, 0, window.num_sinks)  # without causality, sink tokens are seen from everywhere
        ahead = np.where(hidden, ahead, np.maximum(ahead + window.right, sunk))
        hidden = np.ones_like(hidden)
    return np.where(hidden, np.maximum(np.minimum(ahead, kv_len), 0), kv_len)


def window_starts(segments: Segments, segment: Int64Array, first_token: Int64Array) -> Int64Array:
    """The first key of each segment that the window lets rows from ``first_token`` see, sink tokens aside.

    A node of a tree is nearer to the committed keys than its row is, so its window is taken from the first node.
    """
    if segments.window is None or segments.window.left is None:
        return np.zeros_like(segment)
    position = segments.kv_len[segment] - segments.q_len[segment] + first_token
    if segments.trees:
        tree_len = segments.tree_len[segment]
        position = np.where(tree_len > 0, segments.kv_len[segment] - tree_len, position)
    starts: Int64Array = np.maximum(position - segments.window.left, 0)
    return starts


@dataclass(frozen=True, eq=False)
class KeySteps:
    """Keys ``start : end`` without ``hole_start : hole_end``, in steps from ``start`` and again from ``hole_end``.

    Where nothing is left out in the middle, the hole is empty and at the end.
    """

    start: Int64Array
    hole_start: Int64Array
    hole_end: Int64Array
    end: Int64Array

    @property
    def plain(self) -> bool:
        """Whether all keys from 0 are taken: there is no window."""
        return self.hole_start is self.end

    def take(self, index: Int64Array) -> KeySteps:
        """The entries of an index."""
        end = self.end[index]
        if self.plain:
            return KeySteps(self.start[index], end, end, end)
        return KeySteps(self.start[index], self.hole_start[index], self.hole_end[index], end)

    def count(self, step: Int64Array) -> Int64Array:
        """How many steps the keys take."""
        if self.plain:
            return -(-self.end // step)
        return -(-(self.hole_start - self.start) // step) + -(-(self.end - self.hole_end) // step)


def key_steps(
    first: Int64Array, end: Int64Array, window_start: Int64Array, num_sinks: int, step: Int64Array, page_size: int
) -> KeySteps:
    """Of keys ``first : end``, the steps that hold sink tokens or reach past ``window_start``.

    Ranges begin and end at steps from ``first`` or at pages, whichever takes fewer keys: no page is touched of which
    all keys are hidden.
    """
    sinks_end = np.minimum(np.maximum(num_sinks, first), end)
    end = np.where(window_start < end, end, sinks_end)
    reach = np.minimum(np.maximum(window_start, first), end)
    hole_end = np.maximum(first + (reach - first) // step * step, reach // page_size * page_size)
    hole_start = np.minimum(first + -(-(sinks_end - first) // step) * step, -(-sinks_end // page_size) * page_size)
    sinkless = sinks_end == first
    start = np.where(sinkless, hole_end, first)
    whole = sinkless | (hole_end <= hole_start)
    return KeySteps(start, np.where(whole, end, hole_start), np.where(whole, end, hole_end), end)


def largest_page(batch: Batch, segments: Segments, needed: Int64Array, page_size: int) -> int:
    """Largest page id that a visible or new key uses (-1: none, or the table is on a device).

    Args:
        batch: lengths and tables.
        segments: one a request.
        needed: pages that each request's keys take.
        page_size: tokens a page.

    Raises:
        InvalidInput: such a page id is negative, or does not fit 32 bits.
    """
    if batch.pages is None or not isinstance(batch.pages.entries, np.ndarray):
        return -1
    entries, starts, counts, request = batch.pages.entries, batch.pages.starts, needed, segments.request
    if segments.window is not None and not segments.inexact:
        first = np.minimum(window_starts(segments, request, np.zeros_like(request)) // page_size, needed)
        sinks = np.minimum(-(-segments.window.num_sinks // page_size), first)
        starts, counts = np.concatenate([starts, starts + first]), np.concatenate([sinks, needed - first])
        request = np.concatenate([request, request])
    total = int(counts.sum())
    if not total:
        return -1
    if segments.window is None and len(entries) == total:  # no request has more than it needs, so all are visible
        visible = entries
    else:
        visible = entries[(starts - counts.cumsum() + counts).repeat(counts) + np.arange(total)]
    if segments.window is not None and segments.inexact:
        # Windows may begin earlier than the bounds say; what has no page there is skipped.
        first = window_starts(segments, request, np.zeros_like(request)) // page_size
        entry = np.arange(total) - (counts.cumsum() - counts).repeat(counts)
        behind = (entry < first.repeat(counts)) & (entry >= -(-segments.window.num_sinks // page_size))
        visible = np.where(behind & (visible == -1), 0, visible)
    # One pass for both ends: as an unsigned number a negative id is larger than any allowed one.
    largest = int(visible.view(f"u{visible.dtype.itemsize}").max())
    if largest > INT32_MAX or (visible.dtype.itemsize < 4 and visible.min() < 0):
        bad = int(np.argmax((visible < 0) | (visible > INT32_MAX)))
        r = int(request[counts.cumsum().searchsorted(bad, side="right")])
        raise InvalidInput(
            f"page table of request {r}",
            expected=f"page ids from 0 to {INT32_MAX} in the entries that its {batch.kv_lens[r]} keys use",
            got=int(visible[bad]),
        )
    return largest
