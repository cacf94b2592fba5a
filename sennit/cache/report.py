"""What a cache says about itself: how full it is, and what its memory is spent on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sennit.cache.capacity import format_bytes

__all__ = ["CacheMemory", "CacheStats", "GroupMemory", "GroupStats"]


@dataclass(frozen=True)
class GroupStats:
    """How full the pool of one layer group is.

    Attributes:
        name: the group's layers, in words.
        num_pages: pages of the pool.
        free_pages: pages that no sequence holds.
        shared_pages: pages that more than one sequence holds.
        page_size: tokens a page.
    """

    name: str
    num_pages: int
    free_pages: int
    shared_pages: int
    page_size: int

    @property
    def used_pages(self) -> int:
        """Pages that are not free; those that an open step has reserved are among them."""
        return self.num_pages - self.free_pages

    def __str__(self) -> str:
        return (
            f"{self.used_pages} of {self.num_pages} pages of {self.page_size} used ({self.shared_pages} shared), "
            f"{self.free_pages} free"
        )


@dataclass(frozen=True)
class CacheStats:
    """How full a cache is; page counts are those of all layer groups together.

    Attributes:
        groups: one a layer group, in the order of the first layers that own keys and values.
        num_sequences: sequences.
        num_tokens: their lengths added up; a token shared by two sequences counts twice.
        page_size: tokens a page.
    """

    groups: tuple[GroupStats, ...]
    num_sequences: int
    num_tokens: int
    page_size: int

    @property
    def num_pages(self) -> int:
        """Pages of all pools."""
        return sum(group.num_pages for group in self.groups)

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return sum(group.free_pages for group in self.groups)

    @property
    def used_pages(self) -> int:
        """The others; those that an open step has reserved are among them."""
        return sum(group.used_pages for group in self.groups)

    @property
    def shared_pages(self) -> int:
        """Used pages that more than one sequence holds."""
        return sum(group.shared_pages for group in self.groups)

    def __str__(self) -> str:
        return f"{_listed(self.groups)}; {self.num_sequences} sequences, {self.num_tokens} tokens"


@dataclass(frozen=True)
class GroupMemory:
    """What one layer group's memory is spent on; all sizes in bytes.

    Attributes:
        name: the group's layers, in words.
        num_layers: layers with pools of their own.
        num_pages: pages of each pool.
        page_size: tokens a page.
        k_pool_bytes: one layer's keys (for a latent layer, all that it stores).
        v_pool_bytes: one layer's values; 0 for a latent layer.
        bytes_per_token: keys and values of one token in all layers.
        total_bytes: the allocation that holds all pools.
    """

    name: str
    num_layers: int
    num_pages: int
    page_size: int
    k_pool_bytes: int
    v_pool_bytes: int
    bytes_per_token: int
    total_bytes: int

    def __str__(self) -> str:
        pools = f"{format_bytes(self.k_pool_bytes)} of keys"
        if self.v_pool_bytes:
            pools += f" and {format_bytes(self.v_pool_bytes)} of values"
        return (
            f"{self.num_pages * self.page_size} tokens of {format_bytes(self.bytes_per_token)} in "
            f"{self.num_pages} pages of {self.page_size}; {self.num_layers} layers with {pools} each"
        )


@dataclass(frozen=True)
class CacheMemory:
    """What a cache's memory is spent on; all sizes in bytes.

    Attributes:
        groups: one a layer group, in the order of the first layers that own keys and values.
        table_bytes: page tables, on the host and again on a GPU.
    """

    groups: tuple[GroupMemory, ...]
    table_bytes: int

    @property
    def num_layers(self) -> int:
        """Layers with pools of their own."""
        return sum(group.num_layers for group in self.groups)

    @property
    def num_pages(self) -> int:
        """Pages of each pool of a layer, added up over the groups."""
        return sum(group.num_pages for group in self.groups)

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.groups[0].page_size

    @property
    def num_tokens(self) -> int:
        """Tokens that fit the largest pool when no page is partly filled; a window's may be smaller."""
        return max(group.num_pages for group in self.groups) * self.page_size

    @property
    def k_pool_bytes(self) -> int:
        """One layer's keys, of the layer that takes most (for a latent layer, all that it stores)."""
        return max(group.k_pool_bytes for group in self.groups)

    @property
    def v_pool_bytes(self) -> int:
        """One layer's values, likewise; 0 where all are latent."""
        return max(group.v_pool_bytes for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_page(self) -> int:
        """The same for a page of every group."""
        return self.bytes_per_token * self.page_size

    @property
    def total_bytes(self) -> int:
        """The memory of all pools."""
        return sum(group.total_bytes for group in self.groups)

    def __str__(self) -> str:
        return f"{format_bytes(self.total_bytes)}: {_listed(self.groups)}; page tables {format_bytes(self.table_bytes)}"


def _listed(groups: Sequence[GroupStats] | Sequence[GroupMemory]) -> str:
    """Each group in words, by name where there are several."""
    return "; ".join(f"{group.name}: {group}" if len(groups) > 1 else str(group) for group in groups)
