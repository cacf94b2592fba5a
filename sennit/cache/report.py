"""What a cache says about itself: how full it is, and what its memory is spent on."""

from __future__ import annotations

from dataclasses import dataclass

from sennit.cache.capacity import format_bytes

__all__ = ["CacheMemory", "CacheStats"]


@dataclass(frozen=True)
class CacheStats:
    """How full a cache is.

    Attributes:
        num_pages: pages of the pool.
        free_pages: pages that no sequence holds.
        used_pages: the others; those that an open step has reserved are among them.
        shared_pages: used pages that more than one sequence holds.
        num_sequences: sequences.
        num_tokens: their lengths added up; a token shared by two sequences counts twice.
        page_size: tokens a page.
    """

    num_pages: int
    free_pages: int
    used_pages: int
    shared_pages: int
    num_sequences: int
    num_tokens: int
    page_size: int

    def __str__(self) -> str:
        return (
            f"{self.used_pages} of {self.num_pages} pages of {self.page_size} used ({self.shared_pages} shared), "
            f"{self.free_pages} free; {self.num_sequences} sequences, {self.num_tokens} tokens"
        )


@dataclass(frozen=True)
class CacheMemory:
    """What a cache's memory is spent on; all sizes in bytes.

    Attributes:
        num_layers: layers, each with its own pools.
        num_pages: pages of each pool.
        page_size: tokens a page.
        k_pool_bytes: one layer's keys (for a latent layer, all that it stores).
        v_pool_bytes: one layer's values; 0 for a latent layer.
        bytes_per_token: keys and values of one token in all layers.
        bytes_per_page: the same for a page.
        table_bytes: page tables, on the host and again on a GPU.
        total_bytes: the allocation that holds all pools.
    """

    num_layers: int
    num_pages: int
    page_size: int
    k_pool_bytes: int
    v_pool_bytes: int
    bytes_per_token: int
    bytes_per_page: int
    table_bytes: int
    total_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens that fit when no page is partly filled."""
        return self.num_pages * self.page_size

    def __str__(self) -> str:
        pools = f"{format_bytes(self.k_pool_bytes)} of keys"
        if self.v_pool_bytes:
            pools += f" and {format_bytes(self.v_pool_bytes)} of values"
        return (
            f"{format_bytes(self.total_bytes)}: {self.num_tokens} tokens of {format_bytes(self.bytes_per_token)} in "
            f"{self.num_pages} pages of {self.page_size}; {self.num_layers} layers with {pools} each; "
            f"page tables {format_bytes(self.table_bytes)}"
        )
