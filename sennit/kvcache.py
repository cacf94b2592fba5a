"""Level 2: a paged cache that Sennit owns: sequences that grow, fork and shrink, and steps that attend over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from sennit.attention import BatchAttention
from sennit.cache.demand import is_integer
from sennit.cache.groups import PageGroup
from sennit.cache.invariants import check_sequences
from sennit.cache.layers import CacheLayers, Layer, read_layers
from sennit.cache.layout import StorageLayout, count_pages, pages_of_windows, read_page_size, refuse_size
from sennit.cache.pages import PagePool
from sennit.cache.report import CacheMemory, CacheStats, GroupMemory, GroupStats
from sennit.cache.sequences import Sequences
from sennit.cache.storage import KVStorage, Pools, TableMirror
from sennit.device import resolve_device
from sennit.errors import InvalidInput, UnsupportedFeature
from sennit.plan.buffers import PlanBuffers
from sennit.pools import KVLayout
from sennit.spec import AttentionSpec, checked_integer
from sennit.step import CacheParts, Step, StepOptions

__all__ = ["CacheMemory", "CacheStats", "KVCache"]


STEP_TOKENS = 2048  # of the largest step that windows have room for, when nobody says


class KVCache:
    """Keys and values of many sequences in pages that Sennit hands out, shares and takes back.

    Layers that store alike - KV heads, dims, ``kv_dtype``, latent or not, window and its sink tokens - form a *group*
    with pools and page tables of its own. All groups hold the same sequences, and a step is placed in all of them or
    in none. In a group with a window, the pages that the next row of a sequence cannot see go back to the pool when a
    step commits, those of the sink tokens excepted: a sequence may grow without end in a window's worth of memory.
    :meth:`shortest` says how far it can still be cut.

    Args:
        specs: what each layer computes, one :class:`AttentionSpec` a layer.
        page_size: tokens a page.
        device: where keys and values live; the current CUDA device if there is one, otherwise the CPU.
        memory: how much to take: ``"4GiB"``, bytes as an integer, or a fraction of what is free as a float in (0, 1].
            It is divided so that every group holds the same number of tokens.
        num_tokens: or, instead, how many tokens each group has room for; rounded up to whole pages.
        max_sequences: most sequences that there will be at a time, forks included. A group with a window then takes no
            more than those need: window, ``max_trim``, sink tokens and two pages each, and one step of
            ``max_step_tokens``; with ``memory`` the rest goes to the other groups. It only decides sizes, and those of
            windows alone: more sequences are placed as long as there are pages.
        max_step_tokens: new tokens of the largest step for which windows keep room, as the tokens of a step are all
            stored until it ends; with ``max_sequences`` only, and 2048 when left out.
        max_trim: windows keep the pages of so many tokens more, so that a sequence can always be trimmed to so many
            below the longest it has been: to drop the drafts of a speculative step.
        kv_layout: ``"NHD"`` or ``"HND"``; the first on a GPU and the second on a CPU when left out.
        backend: as in :class:`BatchAttention`.
        layers: global indices of the layers, a range of step 1 as long as ``specs``, for one stage of a pipeline:
            ``range(8, 16)``. Every layer is named by its global index. From 0 when left out.
        kv_owner: ``{layer: owner}`` for layers that read the keys and values of another and have none of their own.
            The owner stores the same and keeps at least what the layer's window sees.

    Attributes:
        specs: one a layer.
        layers: the layers' indices, a range.
        kv_owner: ``{layer: owner}`` of the layers that have no keys and values of their own.
        page_size: tokens a page.
        num_pages: pages in all, of every group's pools.
        num_tokens: tokens that the largest group has room for: sequences without a window fill a cache at this.
        kv_layout: layout of the pools.
        device: where they are.

    Raises:
        InvalidInput: an argument is out of range, ``memory`` is too little for one page, or there is no memory for
            the size asked for; or a layer cannot read its owner's keys and values.
        UnsupportedFeature: a spec that no backend can compute.

    Every operation either does all that it says or raises one of Sennit's errors and leaves lengths, pages and content
    as they were. A step does so whatever is raised, ``KeyboardInterrupt`` included. An interrupt in the middle of
    ``add``, ``fork``, ``trim`` or ``remove`` may leave it half done: :meth:`check` tells, and :meth:`clear` makes the
    cache as good as new; one in the middle of ``clear`` itself calls for another. One that comes exactly where Python
    enters or leaves a step's block may leave the step open: ``clear(abandon_step=True)`` closes it. One thread uses a
    cache at a time, and one step of it is open at a time.

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

    Layers of two kinds, of which one frees what its window has passed:

    >>> options = {"num_tokens": 1024, "max_sequences": 4, "max_step_tokens": 16, "page_size": 4, "device": "cpu"}
    >>> hybrid = KVCache([spec.replace(window_left=7), spec], **options)
    >>> [(group.name, group.num_pages) for group in hybrid.stats().groups]
    [('layer 0 with window_left=7', 20), ('layer 1', 256)]
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        *,
        page_size: int = 16,
        device: torch.device | str | None = None,
        memory: str | int | float | None = None,
        num_tokens: int | None = None,
        max_sequences: int | None = None,
        max_step_tokens: int | None = None,
        max_trim: int = 0,
        kv_layout: KVLayout | None = None,
        backend: str = "auto",
        layers: range | None = None,
        kv_owner: Mapping[int, int] | None = None,
    ) -> None:
        self._layers = read_layers(specs, layers=layers, kv_owner=kv_owner)
        self.specs = tuple(layer.spec for layer in self._layers)
        self.layers = self._layers.indices
        self.kv_owner = {layer.index: layer.owner for layer in self._layers if not layer.owns}
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
        layouts = [
            StorageLayout(owners[0].spec, len(owners), self.page_size, self.kv_layout) for owners in self._layers.owners
        ]
        max_trim = checked_integer("max_trim", max_trim, minimum=0)
        caps = _caps(layouts, max_sequences, max_step_tokens, max_trim)
        counts = count_pages(memory, num_tokens, layouts, caps, self.device)
        try:  # the storage first: too much is refused before the host's lists of that many pages are written
            self._storages = [KVStorage(*sizes, self.device) for sizes in zip(layouts, counts, strict=True)]
            pools = [PagePool(count) for count in counts]
        except MemoryError as error:
            argument = "memory" if num_tokens is None else "num_tokens"
            raise refuse_size(argument, layouts, counts, self.device) from error
        self.num_pages = sum(counts)
        self.num_tokens = max(counts) * self.page_size
        self._sequences = Sequences(_page_groups(self._layers, pools, self.page_size, max_trim))
        self._mirror = TableMirror(self.device)
        self._parts = CacheParts(
            self._layers,
            tuple(attentions[spec] for spec in self.specs),
            tuple(
                attentions[layer.spec].pages(self._storages[layer.group].pools(layer.pool)) for layer in self._layers
            ),
            self._sequences,
            self._mirror,
            self.device,
        )

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
        specs = " and ".join(f"{self.specs.count(spec)} layers of {spec}" for spec in dict.fromkeys(self.specs))
        return f"KVCache({specs}, {self.stats()}, kv_layout={self.kv_layout!r}, device={str(self.device)!r})"

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
            PagesReleased: rows after ``length`` tokens would see pages that a window has released; see
                :meth:`shortest`.
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

    def clear(self, *, abandon_step: bool = False) -> None:
        """Forget all sequences. Their ids are not used again.

        Args:
            abandon_step: also close a step that is open, whose block cannot be left any more because an interrupt came
                between entering it and its first line; its layers raise :class:`StepClosed` from then on.

        Raises:
            StepOpen: a step is open, and not to be abandoned.
        """
        self._sequences.clear(abandon_step=abandon_step)

    def length(self, seq: int) -> int:
        """Tokens stored of a sequence, without those of an open step. Raises :class:`UnknownSequence`."""
        return self._sequences.length(seq)

    def shortest(self, seq: int) -> int:
        """The least length such that :meth:`trim` and :meth:`fork` take it and every one up to the sequence's own.

        0 until a window has released pages of the sequence. Even then lengths that end inside the pages of the sink
        tokens of every group are taken, 0 included: nothing is released among those.

        Raises :class:`UnknownSequence`.

        >>> spec = AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=4, dtype=torch.float32, window_left=3)
        >>> cache = KVCache([spec], num_tokens=32, page_size=4, device="cpu")
        >>> a = cache.add()
        >>> with cache.step([(a, 21)]) as step:
        ...     out = step.attend(0, *(torch.randn(21, 1, 4) for _ in range(3)), sm_scale=0.5)
        >>> cache.page_table(a).tolist(), cache.shortest(a)
        ([-1, -1, -1, -1, 4, 5], 19)
        """
        return self._sequences.shortest(seq)

    def pages_needed(self, items: Iterable[tuple[int, int]]) -> int:
        """Free pages that ``step(items)`` would take, copies of shared pages included, of all groups together.

        Raises:
            StepOpen: a step is open, and what it takes is not decided.
            UnknownSequence, InvalidInput: as :meth:`step`.
        """
        return self._sequences.pages_needed(items)

    def missing_pages(
        self, items: Iterable[tuple[int, int]], *, spare: int = 0, max_step_tokens: int | None = None
    ) -> int:
        """Pages that must become free before ``step(items)`` fits; 0 where it would fit now.

        Args:
            items: as in :meth:`step`.
            spare: pages that are to stay free in every group beside.
            max_step_tokens: ask instead whether they fit in several steps, each of so many tokens at most. A group
                with a window then needs no more than its window keeps of each sequence, and one such step, and spares
                nothing.

        Returns:
            What the group that lacks most pages lacks.

        Raises:
            StepOpen: a step is open, and what it takes is not decided.
            UnknownSequence, InvalidInput: as :meth:`step`; ``spare`` is not a non-negative integer, or
                ``max_step_tokens`` not a positive one.

        >>> spec = AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=4, dtype=torch.float32, window_left=7)
        >>> cache = KVCache([spec], num_tokens=1000, max_sequences=2, max_step_tokens=8, page_size=4, device="cpu")
        >>> a = cache.add()
        >>> cache.num_pages, cache.missing_pages([(a, 400)]), cache.missing_pages([(a, 400)], max_step_tokens=8)
        (10, 90, 0)
        """
        steps = None if max_step_tokens is None else checked_integer("max_step_tokens", max_step_tokens, minimum=1)
        return self._sequences.missing_pages(items, checked_integer("spare", spare, minimum=0), steps)

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
                Row ``i`` is at position ``length - tokens + i``, and there may be more rows than stored tokens.
            split_size: as in :meth:`BatchAttention.plan`.
            into: graph buffers, likewise; all layers must then have one spec.

        Raises:
            StepOpen: a step is open.
            InvalidInput: ``append`` is not a boolean, or ``into`` is not graph buffers.
            UnknownSequence: on entering, an id that is not in the cache.
            InvalidInput: on entering, an id twice, or a count that is not a non-negative integer.
            OutOfPages: on entering, too few pages of a group are free; nothing has changed.
            PagesReleased: on entering with ``append=False``, rows that would see pages which a window has released.
            UnsupportedFeature: on entering, no backend accepts the plan, or a token tree in place of a count.
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
        return Step(self._parts, items, StepOptions(causal, append, split_size, into))

    def accept(self, paths: object) -> NoReturn:
        """Keep one path of each sequence's pending token tree. Raises :class:`UnsupportedFeature` in this release."""
        raise UnsupportedFeature("token trees", "steps over trees cannot be committed yet, so there is none to accept")

    def pools(self, layer: int) -> Pools:
        """A layer's memory as views, for connectors and offload.

        :class:`BatchAttention` takes them with ``kv_layout=cache.kv_layout``.

        Returns:
            ``(k_pages, v_pages)``: ``[num_pages, page_size, num_kv_heads, dim]`` or, as HND,
            ``[num_pages, num_kv_heads, page_size, dim]``; one tensor ``[num_pages, page_size, head_dim_qk]`` where the
            spec is latent. Slots that no sequence has filled may hold anything, NaN included.

        Raises:
            InvalidInput: no such layer.

        A layer with an owner has its owner's pools.
        """
        entry = self._layers.entries[self._layers.position(layer)]
        return self._storages[entry.group].pools(entry.pool)

    def page_table(self, seq: int, layer: int | None = None) -> np.ndarray[Any, np.dtype[np.int32]]:
        """int32 page ids of a sequence's stored tokens, in order; a copy.

        Args:
            seq: the sequence.
            layer: whose table, as every group has its own; needed where there are several.

        Returns:
            One entry a page, -1 where a window has released it.

        Raises:
            UnknownSequence: ``seq`` is not in the cache.
            InvalidInput: no such layer, or none given and the cache has several groups.
        """
        if layer is None and len(self._storages) > 1:
            raise InvalidInput(
                "layer", expected=f"a layer, since {len(self._storages)} groups have tables of their own", got=None,
                hint="page_table(seq, layer=0)",
            )  # fmt: skip
        return self._sequences.pages(seq, 0 if layer is None else self._entry(layer).group)

    def read(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copies of what a layer, or the owner of its keys, has stored for a sequence, gathered on the device.

        Returns:
            ``(k [length, num_kv_heads, head_dim_qk], v [length, num_kv_heads, head_dim_vo])``, or
            ``(k [length, head_dim_qk], None)`` where the spec is latent; NaN in rows whose page a window has released.

        Raises:
            UnknownSequence: ``seq`` is not in the cache.
            InvalidInput: no such layer.
        """
        entry = self._entry(layer)
        pages = self._sequences.pages(seq, entry.group)
        return self._storages[entry.group].read(entry.pool, pages, self._sequences.length(seq))

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds, of every group's pools; :meth:`missing_pages` tells whether a step fits."""
        return sum(group.pool.num_free for group in self._sequences.groups)

    def stats(self) -> CacheStats:
        """How full the cache is."""
        names, groups = self._layers.group_names, self._sequences.groups
        return CacheStats(
            groups=tuple(
                GroupStats(
                    name=name,
                    num_pages=group.pool.num_pages,
                    free_pages=group.pool.num_free,
                    shared_pages=int(np.count_nonzero(group.pool.refs > 1)),
                    page_size=self.page_size,
                )
                for name, group in zip(names, groups, strict=True)
            ),
            num_sequences=len(self._sequences.slots),
            num_tokens=int(self._sequences.tables.lengths.sum()),
            page_size=self.page_size,
        )

    def memory(self) -> CacheMemory:
        """What the cache's memory is spent on."""
        groups = (
            GroupMemory(
                name=name,
                num_layers=storage.layout.num_layers,
                num_pages=storage.num_pages,
                page_size=self.page_size,
                k_pool_bytes=sizes[0],
                v_pool_bytes=sum(sizes[1:]),
                bytes_per_token=storage.layout.num_layers * storage.layout.spec.kv_bytes_per_token,
                total_bytes=storage.buffer.numel(),
            )
            for name, storage in zip(self._layers.group_names, self._storages, strict=True)
            for sizes in (storage.layout.pool_bytes(storage.num_pages),)
        )
        return CacheMemory(tuple(groups), self._sequences.tables.pages.nbytes)

    def check(self) -> None:
        """Verify every invariant of ids, tables, lengths, windows, reference counts and the device's tables.

        For debugging.

        Raises:
            CacheCorrupt: one is broken; the text says which.
        """
        check_sequences(self._sequences)
        self._mirror.check(self._sequences.tables)

    def _entry(self, layer: int) -> Layer:
        return self._layers.entries[self._layers.position(layer)]


def _caps(
    layouts: Sequence[StorageLayout], max_sequences: int | None, max_step_tokens: int | None, max_trim: int
) -> list[int | None]:
    """Most pages of each group, or None where only ``memory`` or ``num_tokens`` decides."""
    if max_sequences is None:
        if max_step_tokens is not None:
            raise InvalidInput(
                "max_step_tokens", expected="None without max_sequences", got=repr(max_step_tokens),
                hint="both together say how much memory windows need",
            )  # fmt: skip
        return [None] * len(layouts)
    sequences = checked_integer("max_sequences", max_sequences, minimum=1)
    tokens = checked_integer("max_step_tokens", STEP_TOKENS if max_step_tokens is None else max_step_tokens, minimum=1)
    return [pages_of_windows(layout, sequences, tokens, max_trim) for layout in layouts]


def _page_groups(layers: CacheLayers, pools: Sequence[PagePool], page_size: int, max_trim: int) -> list[PageGroup]:
    specs = [owners[0].spec for owners in layers.owners]
    return [
        PageGroup(pool, page_size, spec.window_left, spec.num_sink_tokens, name, max_trim)
        for pool, spec, name in zip(pools, specs, layers.group_names, strict=True)
    ]
