"""One step over a cache: reserve pages, plan, append and attend layer by layer, then commit, or leave no trace."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np
import torch

from sennit.attention import BatchAttention
from sennit.cache.demand import pages_for
from sennit.cache.layers import CacheLayers, Layer
from sennit.cache.sequences import Reservation, Sequences
from sennit.cache.storage import TableMirror, upload
from sennit.errors import IncompleteStep, InvalidInput, StepClosed
from sennit.plan.batch import Batch
from sennit.plan.buffers import PlanBuffers
from sennit.plan.plan import Plan
from sennit.pools import KVPages

__all__ = ["CacheParts", "Step", "StepOptions"]


@dataclass(frozen=True)
class CacheParts:
    """What a step uses of its cache; tuples have one entry a layer, in the order of ``layers``."""

    layers: CacheLayers
    attentions: tuple[BatchAttention, ...]  # layers with equal specs have the same object
    pages: tuple[KVPages, ...]  # those of the layer's owner
    sequences: Sequences
    mirror: TableMirror
    device: torch.device


@dataclass(frozen=True)
class StepOptions:
    """What ``KVCache.step`` takes beside its requests."""

    causal: bool | Sequence[bool]
    append: bool
    split_size: int | None
    into: PlanBuffers | None


@dataclass(frozen=True)
class _Open:
    """What an entered step has: a batch for each layer group, a plan a layer, and which layers have attended."""

    batches: list[Batch]
    plans: list[Plan]
    attended: list[bool]


class Step:
    """A step of a :class:`KVCache`, made by ``cache.step(...)`` and used in one ``with`` block.

    Entering the block reserves pages for all requests, or raises with nothing changed. Token rows are packed, requests
    in the order given. Every layer attends once; leaving the block then makes the new lengths final. An exception in
    the block, or layers that have not attended, roll everything back: lengths, page tables, free pages and stored
    content are what they were. (A fault of the device itself is fatal: memory it was writing cannot be trusted.)

    A step into graph buffers in which no layer attends counts as the replay of a captured graph, and commits.
    """

    def __init__(self, parts: CacheParts, items: Iterable[tuple[int, int]], options: StepOptions) -> None:
        self._parts = parts
        self._items = items
        self._options = options
        self._open: _Open | None = None
        self._used = False
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def __enter__(self) -> Step:
        """Reserve, plan, and enqueue the copies of shared pages that will be written to.

        Raises:
            StepOpen: another step of the cache is open.
            StepClosed: this one has been entered before.
            UnknownSequence, InvalidInput, OutOfPages, PagesReleased: see :meth:`KVCache.step`.
        """
        if self._used:
            raise StepClosed("step: it has been entered before; make a new one with cache.step(...)")
        sequences = self._parts.sequences
        sequences.require_no_step("step")
        try:
            self._used = True
            reservation = sequences.reserve(self, self._items, append=self._options.append)
            batches = self._make_batches(reservation)
            plans = self._make_plans(batches)
            self._copy_shared_pages(reservation)
            self._open = _Open(batches, plans, [False] * len(plans))
            return self
        except BaseException:
            sequences.rollback(self)
            self._open = None
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Commit, or roll back.

        Raises:
            IncompleteStep: a layer has not attended; the step is rolled back.
            StepClosed: the step is not open; nothing has changed.
        """
        if self._open is None:  # nothing may be rolled back here, not even of this step, which may be in `__enter__`
            raise _closed("leaving the block")
        try:
            if kind is None:
                self._require_complete()
                self._parts.sequences.commit(self)
        finally:
            self._parts.sequences.rollback(self)  # of no effect after a commit
            self._open = self._rows = None

    @property
    def batch(self) -> Batch:
        """Lengths of this step, and the page tables of the first group.

        Raises :class:`StepClosed` outside the block, as all of these do.
        """
        return self._require_open("batch").batches[0]

    @property
    def backends(self) -> frozenset[str]:
        """Names of the backends that compute the layers' attention."""
        return frozenset(plan.backend for plan in self._require_open("backends").plans)

    @property
    def num_tokens(self) -> int:
        """Rows of the query tensor: the tokens of all requests."""
        return self._require_open("num_tokens").batches[0].num_tokens

    @property
    def positions(self) -> torch.Tensor:
        """int64 ``[num_tokens]`` on the device: row ``i`` of a request is at ``kv_len - q_len + i``."""
        return self._row_tensors("positions")[0]

    @property
    def last_rows(self) -> torch.Tensor:
        """int64 ``[requests with tokens]`` on the device: the row of each one's last token, to sample from."""
        return self._row_tensors("last_rows")[1]

    def plan(self, layer: int) -> Plan:
        """The plan that a layer runs; layers of a group with equal specs have the same. Raises as :meth:`attend`."""
        return self._require_open("plan").plans[self._parts.layers.position(layer)]

    @overload
    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor | None = ..., v: torch.Tensor | None = ...,
        *, sm_scale: float | None = ..., return_lse: Literal[False] = ..., **options: Any,
    ) -> torch.Tensor: ...  # fmt: skip

    @overload
    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor | None = ..., v: torch.Tensor | None = ...,
        *, sm_scale: float | None = ..., return_lse: Literal[True], **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip

    @overload
    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor | None = ..., v: torch.Tensor | None = ...,
        *, sm_scale: float | None = ..., return_lse: bool, **options: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        *,
        sm_scale: float | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values, then compute its attention.

        Args:
            layer: one of ``KVCache.layers``; each attends once, in any order, but after the owner of its keys.
            q: ``[num_tokens, num_qo_heads, head_dim_qk]``; more rows are allowed and give zeros.
            k: ``[num_tokens, num_kv_heads, head_dim_qk]``, or ``[num_tokens, head_dim_qk]`` where the spec is latent;
                None in a step with ``append=False``, and for a layer that reads another's.
            v: ``[num_tokens, num_kv_heads, head_dim_vo]``; None where the spec is latent, and where k is.
            sm_scale: factor of the logits; required.
            return_lse: return the log-sum-exp too.
            options: further keywords of :meth:`BatchAttention.run`.

        Returns:
            ``[num_tokens, num_qo_heads, head_dim_vo]``, or that and the LSE, float32 ``[num_tokens, num_qo_heads]``.

        Raises:
            StepClosed: outside the step's block.
            InvalidInput: no such layer, it has attended in this step or the owner of its keys has not, or a tensor is
                wrong or missing.
        """
        state, index = self._require_open("attend"), self._parts.layers.position(layer)
        if state.attended[index]:
            raise InvalidInput("layer", expected="one that has not attended in this step", got=layer)
        attention, pages, info = (
            self._parts.attentions[index],
            self._parts.pages[index],
            self._parts.layers.entries[index],
        )
        if info.owns and self._options.append:
            if k is None:
                raise InvalidInput(
                    "k", expected="the keys of this step's tokens", got=None, hint="or step(append=False)"
                )
            attention.append(state.plans[index], k, v, pages)
        else:
            self._check_reader(state, info, stores=k is not None or v is not None)
        out = attention.run(state.plans[index], q, pages, sm_scale=sm_scale, return_lse=return_lse, **options)
        state.attended[index] = True
        return out

    def _check_reader(self, state: _Open, layer: Layer, *, stores: bool) -> None:
        """What holds for a layer that only reads: it brings no keys, and what it reads has been written."""
        if not self._options.append:
            if stores:
                raise InvalidInput("k, v", expected="None in a step with append=False", got="tensors")
            return
        if stores:
            raise InvalidInput(
                "k, v", expected=f"None, since layer {layer.index} reads those of layer {layer.owner}", got="tensors"
            )
        if not state.attended[self._parts.layers.position(layer.owner)]:
            raise InvalidInput(
                "layer", expected=f"layer {layer.owner} first, which stores the keys that layer {layer.index} reads",
                got=layer.index,
            )  # fmt: skip

    def _make_batches(self, reservation: Reservation) -> list[Batch]:
        """A batch a group over the live table rows: those of the device's own copy where there are many."""
        parts, slots, width = self._parts, reservation.slots, reservation.max_pages
        tables = parts.sequences.tables
        host = (pages[slots, :width] for pages in tables.pages)
        if self._options.into is not None:  # buffers hold a host table, and have room for pages, not for padding
            counts = pages_for(reservation.kv_lens, parts.sequences.page_size)
            used = np.arange(width) < counts[:, None]
            starts = np.append(0, np.cumsum(reservation.q_lens))
            return [
                Batch.csr(
                    qo_indptr=starts,
                    kv_lens=reservation.kv_lens,
                    kv_indptr=np.append(0, np.cumsum(counts)),
                    kv_indices=table[used],
                )
                for table in host
            ]
        sent = len(tables.pages) * len(slots) * width <= most_entries_sent(parts.device)
        rows = host if sent else parts.mirror.rows(tables, slots, width)
        return [Batch.of_table(reservation.q_lens, reservation.kv_lens, table) for table in rows]

    def _make_plans(self, batches: list[Batch]) -> list[Plan]:
        """A plan a layer, made once for each pair of group and spec."""
        options = self._options
        wanted = [(layer.group, a) for layer, a in zip(self._parts.layers, self._parts.attentions, strict=True)]
        plans = {
            (group, attention): attention.plan(
                batches[group], causal=options.causal, split_size=options.split_size, into=options.into
            )
            for group, attention in dict.fromkeys(wanted)
        }
        return [plans[pair] for pair in wanted]

    def _copy_shared_pages(self, reservation: Reservation) -> None:
        """Every owner's content of the pages that were shared, before anything is written."""
        if not any(len(copies.source) for copies in reservation.copies):
            return
        parts = self._parts
        for layer, attention, pages in zip(parts.layers, parts.attentions, parts.pages, strict=True):
            copies = reservation.copies[layer.group]
            if layer.owns and len(copies.source):
                attention.copy_pages(copies.source, copies.target, pages)

    def _require_open(self, what: str) -> _Open:
        if self._open is None or not self._parts.sequences.holds_step(self):
            raise _closed(what)
        return self._open

    def _require_complete(self) -> None:
        attended, layers = self._require_open("step").attended, self._parts.layers
        missing = [layer for layer, done in zip(layers.indices, attended, strict=True) if not done]
        if missing and not (self._options.into is not None and not any(attended)):
            count = len(attended) if layers.indices.start == 0 else layers.indices
            raise IncompleteStep(
                f"layers {', '.join(map(str, missing))} of {count} did not attend before the step ended, so it "
                "was rolled back; call step.attend once for every layer"
            )

    def _row_tensors(self, what: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and last rows, sent to the device together when first asked for."""
        batch = self._require_open(what).batches[0]
        if self._rows is None:
            ends = np.cumsum(batch.q_lens)
            positions = np.repeat(batch.kv_lens - ends, batch.q_lens) + np.arange(batch.num_tokens)
            rows = upload(np.concatenate([positions, ends[batch.q_lens > 0] - 1]), self._parts.device)
            self._rows = rows[: len(positions)], rows[len(positions) :]
        return self._rows


def most_entries_sent(device: torch.device) -> int:
    """Entries of page tables up to which they are sent with a plan; of more, the device has a copy of its own."""
    return sys.maxsize if device.type == "cpu" else 2**16


def _closed(what: str) -> StepClosed:
    return StepClosed(f"{what}: the step is not open; use it inside `with cache.step(...) as step:`")
