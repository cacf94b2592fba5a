"""Segments, the planner's only input: query rows times a range of keys, checked against pages and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sennit.errors import InvalidInput
from sennit.plan.batch import Batch
from sennit.plan.integers import INT32_MAX, host_array
from sennit.plan.tree import Tree, read_trees
from sennit.spec import AttentionSpec

__all__ = ["Segments", "Window", "from_batch"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    """How far behind and ahead of itself a row sees (None: any distance), and the first keys that it always sees."""

    left: int | None
    right: int | None
    num_sinks: int

    @classmethod
    def of(cls, spec: AttentionSpec) -> Window | None:
        """The window of a spec, if it has one."""
        if spec.window_left is None and spec.window_right is None:
            return None
        return cls(spec.window_left, spec.window_right, spec.num_sink_tokens)


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
        tree_len: keys at the end that form a tree; 0: none.
        tree_at: where the tree's words begin among those of all trees; 0 without one.
        mask_at: where the packed mask's bytes begin; -1: none.
        trees: one or None a segment, or empty.
        window: of all segments.
        inexact: lengths are upper bounds.
    """

    request: Int64Array
    q_start: Int64Array
    q_len: Int64Array
    kv_start: Int64Array
    kv_len: Int64Array
    key_offset: Int64Array
    causal: Int64Array
    tree_len: Int64Array
    tree_at: Int64Array
    mask_at: Int64Array
    trees: Sequence[Tree | None]
    window: Window | None
    inexact: bool

    def __len__(self) -> int:
        return len(self.q_len)


def from_batch(
    batch: Batch,
    *,
    needed: Int64Array | None,
    causal: bool | Sequence[bool],
    trees: Sequence[Tree | None] | None = None,
    window: Window | None = None,
    masked: bool = False,
) -> Segments:
    """One segment a request, in the order of the batch.

    Args:
        batch: lengths and tables.
        needed: pages that each request's keys take; None for packed keys.
        causal: one flag, or one a request.
        trees: one token tree or None a request; None: there are none.
        window: what the spec says of it.
        masked: a packed mask is given.

    Raises:
        InvalidInput: a page table is too short for its request, a count does not fit 32 bits, or ``causal`` or
            ``trees`` do not fit the batch.
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
    flags, none = _causal_flags(causal, count), np.zeros(count, np.int64)
    pending = read_trees(trees, batch.q_lens, batch.kv_lens, flags)
    tree_len = np.array([len(tree or ()) for tree in pending], np.int64) if pending else none
    return Segments(
        request=np.arange(count),
        q_start=batch.q_starts,
        q_len=batch.q_lens,
        kv_start=kv_start,
        kv_len=batch.kv_lens,
        key_offset=none,
        causal=flags,
        tree_len=tree_len,
        tree_at=_starts(tree_words(tree_len, batch.q_lens)) if pending else none,
        mask_at=_starts(mask_bytes(batch)) if masked else none - 1,
        trees=pending,
        window=window,
        inexact=batch.kv_lens_device is not None,
    )


def tree_words(tree_len: Int64Array, q_lens: Int64Array) -> Int64Array:
    """int32 words that each request's tree takes, see :meth:`Tree.words`."""
    words: Int64Array = tree_len + q_lens * -(-tree_len // 32)
    return words


def mask_bytes(batch: Batch) -> Int64Array:
    """Bytes of each request's packed mask: a bit for every row and key, rounded up."""
    bytes_: Int64Array = -(-batch.q_lens * batch.kv_lens // 8)
    return bytes_


def _starts(sizes: Int64Array) -> Int64Array:
    starts: Int64Array = sizes.cumsum() - sizes
    return starts


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
