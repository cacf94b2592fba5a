"""How the layers of a cache are laid out in memory, and how many pages fit: the arithmetic, without the memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from sennit.cache.capacity import byte_budget, format_bytes
from sennit.cache.demand import is_integer, pages_for
from sennit.errors import InvalidInput, UnsupportedFeature
from sennit.pools import KVLayout
from sennit.spec import AttentionSpec

__all__ = ["StorageLayout", "aligned", "count_pages", "read_layers", "read_page_size", "refuse_size"]

STORAGE_FIELDS = ("num_kv_heads", "head_dim_qk", "head_dim_vo", "kv_dtype", "latent", "window_left")
ALIGNMENT = 256  # bytes; every pool starts at a multiple, which covers what vector and TMA loads ask for
MAX_PAGES = 2**31 - 1  # page ids are int32 ...
MAX_PAGE_SIZE = 2**31 - 1  # ... and so are rows in a page


def aligned(size: int) -> int:
    """``size`` bytes rounded up to where the next pool may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class StorageLayout:
    """The pools of layers whose storage agrees.

    >>> spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    >>> layout = StorageLayout(spec, num_layers=3, page_size=16, kv_layout="NHD")
    >>> layout.bytes_per_page, layout.total_bytes(10), layout.pages_in(61440)
    (6144, 61440, 10)
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

    def pages_in(self, budget: int) -> int:
        """Most pages whose allocation stays within ``budget`` bytes.

        Raises:
            InvalidInput: not even one does.
        """
        pages = budget // self.bytes_per_page
        while pages and self.total_bytes(pages) > budget:
            pages -= 1
        if pages < 1:
            raise InvalidInput(
                "memory",
                expected=f"at least {self.total_bytes(1)} bytes, which one page of {self.page_size} tokens takes in "
                f"{self.num_layers} layers",
                got=f"{budget} bytes",
                hint="give more memory or take a smaller page_size",
            )
        return pages


def read_layers(specs: Sequence[AttentionSpec]) -> tuple[AttentionSpec, ...]:
    """The specs of a cache's layers, one each.

    Raises:
        InvalidInput: not specs, or none.
        UnsupportedFeature: layers that store different things.
    """
    if isinstance(specs, AttentionSpec) or not isinstance(specs, Iterable):
        raise InvalidInput(
            "specs", expected="a list with one spec a layer", got=type(specs).__name__, hint="[spec] * 32"
        )
    layers = tuple(specs)
    if not layers or not all(isinstance(spec, AttentionSpec) for spec in layers):
        names = ", ".join(sorted({type(spec).__name__ for spec in layers})) or "none"
        raise InvalidInput("specs", expected="AttentionSpecs, one a layer", got=names)
    for layer, spec in enumerate(layers):
        for name in STORAGE_FIELDS:
            if (theirs := getattr(spec, name)) != (first := getattr(layers[0], name)):
                raise UnsupportedFeature(
                    "layer groups",
                    f"layer {layer} has {name}={theirs}, layer 0 has {first}; in this release the layers of one cache "
                    "must store the same: make a cache for each kind of layer",
                )
    return layers


def read_page_size(page_size: object) -> int:
    """Tokens a page, as a Python integer. Raises :class:`InvalidInput`."""
    if not is_integer(page_size) or not 1 <= page_size <= MAX_PAGE_SIZE:
        raise InvalidInput("page_size", expected=f"a positive integer, at most {MAX_PAGE_SIZE}", got=repr(page_size))
    return int(page_size)


def count_pages(memory: object, num_tokens: int | None, layout: StorageLayout, device: torch.device) -> int:
    """Pages of a cache that may take ``memory`` or, instead, has room for ``num_tokens`` tokens.

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
        pages = layout.pages_in(byte_budget(memory, device))
    elif is_integer(num_tokens) and num_tokens > 0:
        pages = pages_for(int(num_tokens), layout.page_size)
    else:
        raise InvalidInput("num_tokens", expected="a positive integer", got=repr(num_tokens))
    if pages > MAX_PAGES:
        raise InvalidInput(
            "memory" if num_tokens is None else "num_tokens",
            expected=f"at most {MAX_PAGES} pages",
            got=f"{memory if num_tokens is None else num_tokens}, which is {pages} pages of {layout.page_size} tokens",
            hint="ask for less",
        )
    return pages


def refuse_size(argument: str, layout: StorageLayout, num_pages: int, device: torch.device) -> InvalidInput:
    """The error for a cache of that size, asked for by ``argument``, for which there is no memory."""
    size = layout.total_bytes(num_pages)
    return InvalidInput(
        argument,
        expected=f"no more than fits into the free memory of {device}",
        got=f"a cache of {size} bytes ({format_bytes(size)}): {num_pages} pages of {layout.page_size} tokens in "
        f"{layout.num_layers} layers",
        hint="ask for less, or free some first",
    )
