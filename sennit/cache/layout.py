"""How the layers of a cache are laid out in memory, and how many pages fit: the arithmetic, without the memory."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sennit.cache.capacity import byte_budget, format_bytes
from sennit.cache.demand import is_integer, pages_for
from sennit.cache.groups import pages_of_window
from sennit.errors import InvalidInput
from sennit.pools import KVLayout
from sennit.spec import AttentionSpec

__all__ = ["StorageLayout", "aligned", "count_pages", "pages_of_windows", "read_page_size", "refuse_size"]

ALIGNMENT = 256  # bytes; every pool starts at a multiple, which covers what vector and TMA loads ask for
MAX_PAGES = 2**31 - 1  # page ids are int32 ...
MAX_PAGE_SIZE = 2**31 - 1  # ... and so are rows in a page


def aligned(size: int) -> int:
    """``size`` bytes rounded up to where the next pool may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class StorageLayout:
    """The pools of one layer group: of the layers in it that own keys and values.

    >>> spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    >>> layout = StorageLayout(spec, num_layers=3, page_size=16, kv_layout="NHD")
    >>> layout.bytes_per_page, layout.total_bytes(10)
    (6144, 61440)
    """

    spec: AttentionSpec
    num_layers: int
    page_size: int
    kv_layout: KVLayout  # a latent layer has no heads, and looks the same in both

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page takes in all layers."""
        return self.num_layers * self.page_size * self.spec.kv_bytes_per_token

    @property
    def page_shapes(self) -> list[tuple[int, ...]]:
        """The shape of one page in each pool of a layer: keys, then values; a latent layer has one pool."""
        spec = self.spec
        if spec.latent:
            return [(self.page_size, spec.head_dim_qk)]
        rows = (self.page_size, spec.num_kv_heads) if self.kv_layout == "NHD" else (spec.num_kv_heads, self.page_size)
        return [(*rows, spec.head_dim_qk), (*rows, spec.head_dim_vo)]

    def pool_bytes(self, num_pages: int) -> list[int]:
        """Bytes of each pool of a layer."""
        return [num_pages * math.prod(shape) * self.spec.kv_dtype.itemsize for shape in self.page_shapes]

    def total_bytes(self, num_pages: int) -> int:
        """Bytes of one allocation for ``num_pages`` pages of all layers, the pools' alignment included."""
        return self.num_layers * sum(aligned(size) for size in self.pool_bytes(num_pages))


def read_page_size(page_size: object) -> int:
    """Tokens a page, as a Python integer. Raises :class:`InvalidInput`."""
    if not is_integer(page_size) or not 1 <= page_size <= MAX_PAGE_SIZE:
        raise InvalidInput("page_size", expected=f"a positive integer, at most {MAX_PAGE_SIZE}", got=repr(page_size))
    return int(page_size)


def pages_of_windows(group: StorageLayout, max_sequences: int, max_step_tokens: int, max_trim: int = 0) -> int | None:
    """Pages that so many sequences and one step of so many tokens need of a group with a window; None without one.

    The step's tokens are all held until it ends.
    """
    spec, size = group.spec, group.page_size
    if spec.window_left is None:
        return None
    held = pages_of_window(spec.window_left, spec.num_sink_tokens, size, max_trim)
    return max_sequences * held + pages_for(max_step_tokens, size)


def count_pages(
    memory: object,
    num_tokens: int | None,
    groups: Sequence[StorageLayout],
    caps: Sequence[int | None],
    device: torch.device,
) -> list[int]:
    """Pages of each layer group of a cache that may take ``memory`` or, instead, has room for ``num_tokens`` tokens.

    All groups hold the same number of tokens, but that none gets more pages than its cap.

    Raises:
        InvalidInput: both or none are given, one is out of range, the memory is too little for one page, or they are
            more pages than there are ids.
    """
    if (memory is None) == (num_tokens is None):
        raise InvalidInput(
            "memory, num_tokens",
            expected="exactly one of the two",
            got="none" if memory is None else "both",
            hint='memory="4GiB", or num_tokens=100_000',
        )
    if num_tokens is None:
        pages = _pages_in(byte_budget(memory, device), groups, caps)
    elif is_integer(num_tokens) and num_tokens > 0:
        pages = pages_for(int(num_tokens), groups[0].page_size)
    else:
        raise InvalidInput("num_tokens", expected="a positive integer", got=repr(num_tokens))
    counts = _capped(pages, caps)
    if max(counts) > MAX_PAGES:
        raise InvalidInput(
            "memory" if num_tokens is None else "num_tokens",
            expected=f"at most {MAX_PAGES} pages",
            got=f"{memory if num_tokens is None else num_tokens}, which is {max(counts)} pages of "
            f"{groups[0].page_size} tokens",
            hint="ask for less",
        )
    return counts


def refuse_size(
    argument: str, groups: Sequence[StorageLayout], counts: Sequence[int], device: torch.device
) -> InvalidInput:
    """The error for a cache of that size, asked for by ``argument``, for which there is no memory."""
    size = _total_bytes(groups, counts)
    pages = ", ".join(
        f"{count} pages of {group.page_size} tokens in {group.num_layers} layers"
        for group, count in zip(groups, counts, strict=True)
    )
    return InvalidInput(
        argument,
        expected=f"no more than fits into the free memory of {device}",
        got=f"a cache of {size} bytes ({format_bytes(size)}): {pages}",
        hint="ask for less, or free some first",
    )


def _capped(pages: int, caps: Sequence[int | None]) -> list[int]:
    return [pages if cap is None else min(pages, cap) for cap in caps]


def _total_bytes(groups: Sequence[StorageLayout], counts: Sequence[int]) -> int:
    return sum(group.total_bytes(count) for group, count in zip(groups, counts, strict=True))


def _pages_in(budget: int, groups: Sequence[StorageLayout], caps: Sequence[int | None]) -> int:
    """Most pages, the same of every group but for the caps, whose allocations stay within ``budget`` bytes.

    Raises:
        InvalidInput: not even one does.
    """

    def total(pages: int) -> int:
        return _total_bytes(groups, _capped(pages, caps))

    growing = [group for group, cap in zip(groups, caps, strict=True) if cap is None]
    most = budget // sum(group.bytes_per_page for group in growing) if growing else max(cap or 0 for cap in caps)
    pages = bisect_right(range(1, min(most, sys.maxsize - 1) + 1), budget, key=total)
    if pages < 1:
        layers, size = sum(group.num_layers for group in groups), groups[0].page_size
        raise InvalidInput(
            "memory",
            expected=f"at least {total(1)} bytes, which one page of {size} tokens takes in {layers} layers",
            got=f"{budget} bytes",
            hint="give more memory or take a smaller page_size",
        )
    return pages
