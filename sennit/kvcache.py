"""Level 2: a paged cache that Sennit owns: sequences that grow, fork and shrink, and steps that attend over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from sennit.attention import BatchAttention
from sennit.cache.demand import is_integer
from sennit.cache.invariants import check_sequences
from sennit.cache.layout import StorageLayout, count_pages, read_layers, read_page_size, refuse_size
from sennit.cache.pages import PagePool
from sennit.cache.report import CacheMemory, CacheStats
from sennit.cache.sequences import Sequences
from sennit.cache.storage import KVStorage, Pools, TableMirror
from sennit.device import resolve_device
from sennit.errors import InvalidInput, UnsupportedFeature
from sennit.plan.buffers import PlanBuffers
from sennit.pools import KVLayout
from sennit.spec import AttentionSpec
from sennit.step import LayerGroup, Step, StepOptions

__all__ = ["CacheMemory", "CacheStats", "KVCache"]


class KVCache:
    """Keys and values of many sequences in pages that Sennit hands out, shares and takes back.

    Args:
        specs: what each layer computes, one :class:`AttentionSpec` a layer. In this release all must store the same:
            KV heads, dims, ``kv_dtype``, latent or not, window.
        page_size: tokens a page.
        device: where keys and values live; the current CUDA device if there is one, otherwise the CPU.
        memory: how much to take: ``"4GiB"``, bytes as an integer, or a fraction of what is free as a float in (0, 1].
        num_tokens: or, instead, how many tokens to have room for; rounded up to whole pages.
        kv_layout: ``"NHD"`` or ``"HND"``; the first on a GPU and the second on a CPU when left out.
        backend: as in :class:`BatchAttention`.
        layers: global indices of a pipeline stage's layers (not available yet).
        kv_owner: layers that read another layer's keys and values (not available yet).

    Attributes:
        specs: one a layer.
        page_size: tokens a page.
        num_pages: pages in all.
        kv_layout: layout of the pools.
        device: where they are.

    Raises:
        InvalidInput: an argument is out of range, ``memory`` is too little for one page, or there is no memory for
            the size asked for.
        UnsupportedFeature: layers that store different things, or a spec that no backend can compute.

    Every operation either does all that it says or raises one of Sennit's errors and leaves lengths, pages and content
    as they were. A step does so whatever is raised, ``KeyboardInterrupt`` included. An interrupt in the middle of
    ``add``, ``fork``, ``trim`` or ``remove`` may leave it half done: :meth:`check` tells, and :meth:`clear` makes the
    cache as good as new; one in the middle of ``clear`` itself calls for another. One thread uses a cache at a time,
    and one step of it is open at a time.

    >>> spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    >>> cache = KVCache([spec] * 2, num_tokens=1024, page_size=16, device="cpu")
    >>> a = cache.add()
    >>> with cache.step([(a, 5)]) as step:
    ...     for layer in range(cache.num_layers):
    ...         q, k, v = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    ...         out = step.attend(layer, q, k, v, sm_scale=8**-0.5)
    >>> b = cache.fork(a, length=3)
    >>> cache.length(a), cache.length(b), cache.pages_needed([(b, 1)])
    (5, 3, 1)
    >>> print(cache.stats())
    1 of 64 pages of 16 used (1 shared), 63 free; 2 sequences, 8 tokens
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        *,
        page_size: int = 16,
        device: torch.device | str | None = None,
        memory: str | int | float | None = None,
        num_tokens: int | None = None,
        kv_layout: KVLayout | None = None,
        backend: str = "auto",
        layers: object = None,
        kv_owner: object = None,
    ) -> None:
        _refuse_later_features(layers=layers, kv_owner=kv_owner)
        self.specs = read_layers(specs)
        self.page_size = read_page_size(page_size)
        self.device = resolve_device(device)
        default: KVLayout = "HND" if self.device.type == "cpu" else "NHD"
        self.kv_layout: KVLayout = default if kv_layout is None else kv_layout
        attentions = {
            spec: BatchAttention(
                spec, page_size=self.page_size, kv_layout=self.kv_layout, device=self.device, backend=backend
            )
            for spec in dict.fromkeys(self.specs)
        }
        layout = StorageLayout(self.specs[0], len(self.specs), self.page_size, self.kv_layout)
        self.num_pages = count_pages(memory, num_tokens, layout, self.device)
        try:  # the storage first: too much is refused before the host's lists of that many pages are written
            self._storage = KVStorage(layout, self.num_pages, self.device)
            self._sequences = Sequences(PagePool(self.num_pages), self.page_size)
        except MemoryError as error:
            argument = "memory" if num_tokens is None else "num_tokens"
            raise refuse_size(argument, layout, self.num_pages, self.device) from error
        self._mirror = TableMirror(self.device)
        layer_attentions = tuple(attentions[spec] for spec in self.specs)
        self._group = LayerGroup(layer_attentions, self._sequences, self._storage, self._mirror)

    @property
    def num_layers(self) -> int:
        """Layers in the cache."""
        return len(self.specs)

    @property
    def sequences(self) -> list[int]:
        """Ids of all sequences, oldest first."""
        return list(self._sequences.slots)

    def __contains__(self, seq: object) -> bool:
        return is_integer(seq) and seq in self._sequences.slots

    def __repr__(self) -> str:
        return (
            f"KVCache({self.num_layers} layers of {self.specs[0]}, {self.stats()}, "
            f"kv_layout={self.kv_layout!r}, device={str(self.device)!r})"
        )

    def add(self) -> int:
        """Start an empty sequence.

        Returns:
            Its id; ids are never used again.

        Raises:
            StepOpen: a step is open.
        """
        return self._sequences.add()

    def fork(self, seq: int, length: int | None = None) -> int:
        """Start a sequence with the first ``length`` tokens of another; all of them when left out.

        Pages are shared, a partly filled last one too: whoever writes into a shared page first gets its own copy.

        Raises:
            StepOpen: a step is open.
            UnknownSequence: ``seq`` is not in the cache.
            InvalidInput: ``length`` is not from 0 to the sequence's length.
        """
        return self._sequences.fork(seq, length)

    def trim(self, seq: int, *, length: int) -> None:
        """Keep a sequence's first ``length`` tokens. Raises as :meth:`fork` does."""
        self._sequences.trim(seq, length)

    def remove(self, seq: int) -> None:
        """Forget a sequence; pages that no other one holds become free.

        Raises:
            StepOpen: a step is open.
            UnknownSequence: ``seq`` is not in the cache.
        """
        self._sequences.remove(seq)

    def clear(self) -> None:
        """Forget all sequences. Their ids are not used again. Raises :class:`StepOpen`."""
        self._sequences.clear()

    def length(self, seq: int) -> int:
        """Tokens stored of a sequence, without those of an open step. Raises :class:`UnknownSequence`."""
        return self._sequences.length(seq)

    def pages_needed(self, items: Iterable[tuple[int, int]]) -> int:
        """Free pages that ``step(items)`` would take, copies of shared pages included.

        Raises:
            StepOpen: a step is open, and what it takes is not decided.
            UnknownSequence, InvalidInput: as :meth:`step`.
        """
        return self._sequences.pages_needed(items)

    def step(
        self,
        items: Iterable[tuple[int, int]],
        *,
        causal: bool | Sequence[bool] = True,
        append: bool = True,
        split_size: int | None = None,
        into: PlanBuffers | None = None,
    ) -> Step:
        """A step over ``(sequence, new tokens)`` pairs, to be used in a ``with`` block.

        Pages are reserved when the block is entered, and that is when errors in ``items`` are raised. No tokens for a
        sequence, and no sequences, are ordinary.

        Args:
            items: each sequence at most once.
            causal: as in :meth:`BatchAttention.plan`.
            append: store the new tokens' keys and values. Without it nothing grows, ``attend`` takes no keys and
                values, and rows attend to what is stored (a cross-attention cache; usually with ``causal=False``).
            split_size: as in :meth:`BatchAttention.plan`.
            into: graph buffers, likewise; all layers must then have one spec.

        Raises:
            StepOpen: a step is open.
            InvalidInput: ``append`` is not a boolean, or ``into`` is not graph buffers.
            UnknownSequence: on entering, an id that is not in the cache.
            InvalidInput: on entering, an id twice, or a count that is not a non-negative integer.
            OutOfPages: on entering, too few pages are free; nothing has changed.
            UnsupportedFeature: on entering, no backend accepts the plan.
        """
        self._sequences.require_no_step("step")
        if not isinstance(append, (bool, np.bool_)):
            raise InvalidInput("append", expected="a boolean", got=repr(append))
        if into is not None and not isinstance(into, PlanBuffers):
            raise InvalidInput(
                "into", expected="graph buffers", got=type(into).__name__, hint="see BatchAttention.buffers"
            )
        if into is not None and len(set(self.specs)) > 1:
            raise UnsupportedFeature(
                "into", "buffers hold one plan, and the layers of this cache need one for each spec"
            )
        return Step(self._group, items, StepOptions(causal, append, split_size, into))

    def accept(self, paths: object) -> NoReturn:
        """Keep one path of each sequence's pending token tree. Raises :class:`UnsupportedFeature` in this release."""
        raise UnsupportedFeature("token trees", "steps over trees are not in this release, so there is none to accept")

    def pools(self, layer: int) -> Pools:
        """A layer's memory as views, for connectors and offload; in the form that :class:`BatchAttention` takes.

        Returns:
            ``(k_pages, v_pages)``: ``[num_pages, page_size, num_kv_heads, dim]`` or, as HND,
            ``[num_pages, num_kv_heads, page_size, dim]``; one tensor ``[num_pages, page_size, head_dim_qk]`` where the
            spec is latent. Slots that no sequence has filled may hold anything, NaN included.

        Raises:
            InvalidInput: no such layer.
        """
        return self._storage.pools(self._layer(layer))

    def page_table(self, seq: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """int32 page ids of a sequence's stored tokens, in order; a copy. Raises :class:`UnknownSequence`."""
        return self._sequences.pages(seq)

    def read(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copies of what a layer has stored for a sequence, gathered on the device.

        Returns:
            ``(k [length, num_kv_heads, head_dim_qk], v [length, num_kv_heads, head_dim_vo])``, or
            ``(k [length, head_dim_qk], None)`` where the spec is latent.

        Raises:
            UnknownSequence: ``seq`` is not in the cache.
            InvalidInput: no such layer.
        """
        return self._storage.read(self._layer(layer), self._sequences.pages(seq), self._sequences.length(seq))

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return self._sequences.pool.num_free

    def stats(self) -> CacheStats:
        """How full the cache is."""
        pool, sequences = self._sequences.pool, self._sequences
        return CacheStats(
            num_pages=pool.num_pages,
            free_pages=pool.num_free,
            used_pages=pool.num_pages - pool.num_free,
            shared_pages=int(np.count_nonzero(pool.refs > 1)),
            num_sequences=len(sequences.slots),
            num_tokens=int(sequences.tables.lengths.sum()),
            page_size=self.page_size,
        )

    def memory(self) -> CacheMemory:
        """What the cache's memory is spent on."""
        return self._storage.memory(self._sequences.tables.pages.nbytes)

    def check(self) -> None:
        """Verify every invariant of ids, tables, lengths, reference counts and the device's tables; for debugging.

        Raises:
            CacheCorrupt: one is broken; the text says which.
        """
        check_sequences(self._sequences)
        self._mirror.check(self._sequences.tables)

    def _layer(self, layer: int) -> int:
        if not is_integer(layer) or not 0 <= layer < self.num_layers:
            raise InvalidInput("layer", expected=f"an integer from 0 to {self.num_layers - 1}", got=repr(layer))
        return layer


def _refuse_later_features(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise UnsupportedFeature(name, "not in this release; every layer of a cache has its own keys and values")
