"""Sizes: how large a batcher's cache is when nobody says, and the check of those that somebody gives."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

import torch

from sennit.cache.capacity import free_bytes
from sennit.cache.demand import is_integer, pages_for
from sennit.cache.groups import pages_of_window
from sennit.cache.layout import StorageLayout, pages_of_windows
from sennit.errors import InvalidInput
from sennit.kvcache import KVCache
from sennit.spec import AttentionSpec

__all__ = ["default_tokens", "longest_alone", "positive", "tokens_for"]

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
    """
    layouts = [StorageLayout(spec, layers, page_size, "NHD") for spec, layers in Counter(specs).items()]
    caps = [pages_of_windows(layout, max_requests, max_batch_tokens) for layout in layouts]

    def size(pages: int) -> int:
        held = (pages if cap is None else min(pages, cap) for cap in caps)
        return sum(layout.bytes_per_page * count for layout, count in zip(layouts, held, strict=True))

    affordable = int(free_bytes(device) * FRACTION.get(device.type, 0.25))
    return max(1, bisect_right(range(1, pages_for(wanted, page_size) + 1), affordable, key=size)) * page_size


def longest_alone(cache: KVCache) -> int | None:
    """Return the tokens of the longest sequence that a cache holds beside no other; None: of any length.

    Without a window every token stays; with windows in all layers, room for what they keep is enough.
    """
    windows = [spec.window_left for spec in cache.specs]
    kept = [pages_of_window(window, 0, cache.page_size) for window in windows if window is not None]
    endless = None not in windows and max(kept) < min(group.num_pages for group in cache.stats().groups)
    return None if endless else cache.num_tokens


def tokens_for(lengths: Sequence[int], *, page_size: int, max_requests: int) -> int:
    """Return the cache's tokens with which requests of these full lengths never wait for memory.

    Only ``max_requests`` of them run at a time; each has its own last page, and one to grow into when it joins.

    >>> tokens_for([1, 40, 16], page_size=16, max_requests=2)
    96
    """
    longest = sorted(lengths, reverse=True)[:max_requests]
    return sum(-(-length // page_size) + 1 for length in longest) * page_size


def positive(name: str, value: object) -> int:
    """Return ``value`` if it is an integer of at least 1, NumPy's included, or raise :class:`InvalidInput`."""
    if not is_integer(value) or value < 1:
        raise InvalidInput(name, expected="an integer of at least 1", got=repr(value))
    return int(value)
