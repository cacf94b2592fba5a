"""What a causal batch costs at least: visible pairs, operations and bytes, counted exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sennit.spec import AttentionSpec

__all__ = ["SeenKeys", "Work", "count_work", "seen_keys"]


@dataclass(frozen=True)
class Work:
    """What one attention call over a batch has to do.

    Attributes:
        pairs: (query row, key) pairs that are visible; the same for every head.
        flops: operations of both matrix products, ``2 * (head_dim_qk + head_dim_vo)`` a pair and query head.
        bytes: of all keys and values that some row sees, read once, and of the queries and outputs.
    """

    pairs: int
    flops: int
    bytes: int


@dataclass(frozen=True)
class SeenKeys:
    """The keys of a request that some row sees: ``0 : sinks`` and ``first : last``, which do not overlap."""

    sinks: int
    first: int
    last: int

    @property
    def count(self) -> int:
        """How many they are."""
        return self.sinks + self.last - self.first


def count_work(spec: AttentionSpec, q_lens: Sequence[int], kv_lens: Sequence[int]) -> Work:
    """Count the work of a causal batch; a window and sink tokens of the spec are counted, masks of functions are not.

    >>> import torch
    >>> spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    >>> count_work(spec, [3, 1], [3, 5])
    Work(pairs=11, flops=1408, bytes=2048)
    """
    lengths = list(zip(q_lens, kv_lens, strict=True))
    pairs = sum(_pairs(spec, *request) for request in lengths)
    keys = sum(seen_keys(spec, *request).count for request in lengths)
    dims = spec.head_dim_qk + spec.head_dim_vo
    elements = sum(q_lens) * spec.num_qo_heads * dims
    return Work(
        pairs=pairs,
        flops=2 * dims * spec.num_qo_heads * pairs,
        bytes=keys * spec.kv_bytes_per_token + elements * spec.dtype.itemsize,
    )


def seen_keys(spec: AttentionSpec, q_len: int, kv_len: int) -> SeenKeys:
    """The keys that some row of a causal request sees.

    >>> import torch
    >>> seen_keys(AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=8, dtype=torch.float32, window_left=3), 2, 9)
    SeenKeys(sinks=0, first=4, last=9)
    """
    if q_len == 0 or kv_len == 0:
        return SeenKeys(0, 0, 0)
    first, _, sinks = _row_ranges(spec, max(kv_len - q_len, 0), kv_len)
    return SeenKeys(int(sinks[0]), int(first[0]), kv_len)


def _pairs(spec: AttentionSpec, q_len: int, kv_len: int) -> int:
    first, last, sinks = _row_ranges(spec, kv_len - q_len, kv_len)
    return int((last - first + sinks).sum())


def _row_ranges(spec: AttentionSpec, start: int, end: int) -> tuple[npt.NDArray[Any], ...]:
    """``(first, last, sinks)`` of rows at positions ``start : end``: each sees ``first : last`` and ``0 : sinks``."""
    last = np.arange(start + 1, end + 1).clip(0)
    behind = end - start if spec.window_left is None else spec.window_left + 1
    first = np.zeros_like(last) if spec.window_left is None else (last - behind).clip(0)
    return first, last, np.minimum(first, spec.num_sink_tokens)
