"""Sizes: how large a batcher's cache is when nobody says, and the checks of numbers and flags that somebody gives."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from sennit.cache.capacity import free_bytes
from sennit.cache.demand import MAX_TOKENS, is_integer, pages_for
from sennit.cache.groups import pages_of_window
from sennit.cache.layout import StorageLayout, pages_of_windows
from sennit.errors import InvalidInput
from sennit.kvcache import KVCache
from sennit.spec import AttentionSpec

__all__ = ["default_tokens", "flag", "longest_alone", "longest_step", "positive", "tokens_for"]

# Of the memory that is free after the model has been loaded. Activations need some too; a host has other programs.
FRACTION = {"cuda": 0.5, "cpu": 0.25}


def default_tokens(
    wanted: int,
    specs: Sequence[AttentionSpec],
    device: torch.device,
    *,
    page_size: int,
    max_requests: int,
    max_batch_tokens: int,
) -> int:
    """Return ``wanted`` tokens, or as many as a sensible part of the free memory holds if that is less.

    Layers with a window take what ``max_requests`` sequences and a step of ``max_batch_tokens`` need, however many
    tokens the others have room for.

    Raises:
        InvalidInput: there is no memory for a single page.
    """
    layouts = [StorageLayout(spec, layers, page_size, "NHD") for spec, layers in Counter(specs).items()]
    caps = [pages_of_windows(layout, max_requests, max_batch_tokens) for layout in layouts]

    def size(pages: int) -> int:
        held = (pages if cap is None else min(pages, cap) for cap in caps)
        return sum(layout.bytes_per_page * count for layout, count in zip(layouts, held, strict=True))

    free = free_bytes(device)
    if size(1) > free:
        raise InvalidInput(
            "page_size",
            expected=f"pages that fit the memory ({free} bytes are free)",
            got=f"{page_size}, {size(1)} bytes a page",
        )
    affordable = int(free * FRACTION.get(device.type, 0.25))
    return max(1, bisect_right(range(1, pages_for(wanted, page_size) + 1), affordable, key=size)) * page_size


def longest_alone(cache: KVCache) -> int | None:
    """Return the tokens of the longest sequence that a cache holds beside no other; None: of any length.

    Without a window every token stays; with windows in all layers, room for what they keep is enough.
    """
    return None if _pages_beside_windows(cache) > 0 else cache.num_tokens


def longest_step(cache: KVCache, *, max_batch_tokens: int) -> int:
    """Return the tokens of a step, ``max_batch_tokens`` or less, that fit beside what windows keep of a sequence.

    So many at a time, a sequence of any length passes through a cache of which :func:`longest_alone` is None.
    """
    pages = _pages_beside_windows(cache)
    return min(pages * cache.page_size, max_batch_tokens) if pages > 0 else max_batch_tokens


def _pages_beside_windows(cache: KVCache) -> int:
    """Pages for a step's tokens beside what windows keep of one sequence; none where a layer has no window."""
    windows = [spec.window_left for spec in cache.specs]
    kept = [pages_of_window(window, 0, cache.page_size) for window in windows if window is not None]
    return min(group.num_pages for group in cache.stats().groups) - max(kept) if None not in windows else 0


def tokens_for(lengths: Sequence[int], *, page_size: int, max_requests: int) -> int:
    """Return the cache's tokens with which requests of these full lengths never wait for memory.

    Only ``max_requests`` of them run at a time; each has its own last page, and one to grow into when it joins.

    >>> tokens_for([1, 40, 16], page_size=16, max_requests=2)
    96
    """
    longest = sorted(lengths, reverse=True)[:max_requests]
    return sum(pages_for(length, page_size) + 1 for length in longest) * page_size


def positive(name: str, value: object) -> int:
    """Return ``value`` if it is an integer of at least 1, NumPy's included, or raise :class:`InvalidInput`."""
    if not is_integer(value) or value < 1:
        raise InvalidInput(name, expected="an integer of at least 1", got=repr(value))
    if value > MAX_TOKENS:
        raise InvalidInput(name, expected=f"an integer of at most {MAX_TOKENS}", got=repr(value))
    return int(value)


def flag(name: str, value: object) -> bool:
    """Return ``value`` if it is a boolean, NumPy's included, or raise :class:`InvalidInput`."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidInput(name, expected="a boolean", got=repr(value))
    return bool(value)
