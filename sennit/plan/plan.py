"""The plan: everything that one launch needs, frozen, made on the host from a batch and a kernel configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from sennit.errors import CapacityExceeded, InvalidInput, UnsupportedFeature
from sennit.plan.batch import Batch
from sennit.plan.buffers import PlanBuffers
from sennit.plan.cost import FloatArray, KernelConfig
from sennit.plan.integers import INT32_MAX
from sennit.plan.mask import device_mask
from sennit.plan.schedule import Schedule
from sennit.plan.segments import Segments, Window, from_batch, tree_words
from sennit.plan.tensors import Extents, Layout, PlanTensors, write_header, write_tables
from sennit.plan.tree import Tree
from sennit.plan.visible import largest_page
from sennit.plan.work import Cutting, Work, Write, make_work, schedule_in_numpy
from sennit.spec import AttentionSpec

__all__ = ["Plan", "make_plan", "plan_features"]


FIRST_STAMP = torch.zeros(1, dtype=torch.int32)  # of every plan that has its array to itself


@dataclass(frozen=True, eq=False)
class Plan:
    """A frozen plan of one step; every layer with the same spec runs it.

    Attributes:
        owner: the ``BatchAttention`` that it is for: spec, page size, layout and device.
        key: the operator that runs it: the owner, backend and configuration.
        spec: what the layers compute.
        batch: what was planned.
        page_size: tokens a page, or None for packed keys.
        backend: name of the backend.
        cutting: how segments were cut.
        segments: query rows times keys.
        work: the configuration chosen, and what the work items come to.
        tensors: the tensor form.
    """

    owner: str
    key: str
    spec: AttentionSpec
    batch: Batch
    page_size: int | None
    backend: str
    cutting: Cutting
    segments: Segments
    work: Work
    tensors: PlanTensors

    @property
    def config(self) -> KernelConfig:
        """The configuration chosen."""
        return self.work.config

    @property
    def split_size(self) -> int | None:
        """Keys of a fixed chunk, or None."""
        return self.cutting.split_size

    @cached_property
    def schedule(self) -> Schedule:
        """Work items, merges and predicted loads, for whoever looks at them: made again, since launches need none."""
        return schedule_in_numpy(self.segments, [self.config], self.cutting)

    @property
    def device(self) -> torch.device:
        """Where the plan runs."""
        return self.tensors.device.device

    @property
    def num_rows(self) -> int:
        """Rows that the query tensor must at least have."""
        return self.batch.num_rows

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """Shape of the output for a query tensor without further rows."""
        return self.num_rows, self.spec.num_qo_heads, self.spec.head_dim_vo

    @property
    def loads(self) -> FloatArray:
        """Predicted microseconds of each worker; of all strands' workers, where each has its own."""
        return self.schedule.combined_loads

    def __repr__(self) -> str:
        return (
            f"Plan({self.batch}, {self.backend}/{self.config.name}, {self.work.num_items} items, "
            f"{self.work.num_merges} merges, {self.config.num_workers} workers)"
        )


def plan_features(
    batch: Batch,
    *,
    tree: object = None,
    packed_mask: object = None,
    split_size: int | None = None,
    into: object = None,
) -> frozenset[str]:
    """What a backend must be able to do for a plan, beyond its spec."""
    present = {
        "paged": batch.pages is not None,
        "ragged": batch.pages is None,
        "kv_lens_device": batch.kv_lens_device is not None,
        "slot_mapping": batch.slot_mapping is not None,
        "tree": tree is not None,
        "packed_mask": packed_mask is not None,
        "split_size": split_size is not None,
        "into": into is not None,
    }
    return frozenset(name for name, used in present.items() if used)


def make_plan(
    batch: Batch,
    *,
    spec: AttentionSpec,
    owner: str,
    backend: str,
    configs: Sequence[KernelConfig],
    page_size: int | None,
    device: torch.device,
    causal: bool | Sequence[bool] = True,
    tree: Sequence[Tree | None] | None = None,
    packed_mask: torch.Tensor | None = None,
    split_size: int | None = None,
    into: PlanBuffers | None = None,
) -> Plan:
    """Plan a batch: segments, strands, work items, tensors.

    Args:
        batch: lengths and tables.
        spec: what the layers compute.
        owner: the ``BatchAttention`` that it is for.
        backend: name of the backend.
        configs: configurations that the backend offers, in its order of preference.
        page_size: tokens a page, or None for packed keys.
        device: where the plan's tensors go.
        causal: one flag, or one a request.
        tree: one token tree or None a request.
        packed_mask: bits of every row and key, see :func:`sennit.pack_mask`.
        split_size: keys of a fixed chunk.
        into: buffers of fixed capacity.
    """
    if split_size is not None and not 1 <= split_size <= INT32_MAX:
        raise InvalidInput("split_size", expected=f"from 1 to {INT32_MAX} keys", got=split_size)
    needed = batch.pages_needed(page_size) if page_size is not None else None
    segments = from_batch(
        batch, needed=needed, causal=causal, trees=tree, window=Window.of(spec), masked=packed_mask is not None
    )
    if int(segments.q_len.max(initial=0)) * spec.group_size > INT32_MAX:  # rows of a KV head, numbered in int32
        raise InvalidInput(
            "batch", expected=f"at most {INT32_MAX // spec.group_size} new tokens a request, with {spec.group_size} "
            "query heads a KV head", got=int(segments.q_len.max()),
        )  # fmt: skip
    mask = None if packed_mask is None else device_mask(packed_mask, batch, device, fixed=into is not None)
    fixed = split_size is not None or into is not None
    cutting = Cutting(spec.group_size, spec.num_kv_heads, page_size, split_size, alone=fixed)
    work, write = make_work(segments, configs, cutting)
    extents = Extents(
        generation=0 if into is None else into.generation + 1,
        num_rows=batch.num_rows,
        num_tokens=batch.num_tokens,
        largest_page=-1 if needed is None or page_size is None else largest_page(batch, segments, needed, page_size),
        largest_slot_page=-1 if page_size is None else _largest_slot(batch) // page_size,
        num_key_rows=_key_rows(batch),
    )
    if max(work.num_partial_rows, extents.largest_slot_page, extents.num_key_rows) > INT32_MAX:
        raise InvalidInput(
            "batch",
            expected=f"at most {INT32_MAX} partial rows, page ids and key rows",
            got=f"{work.num_partial_rows}, {extents.largest_slot_page} and {extents.num_key_rows}",
            hint="use a larger split_size, or smaller slots and starts",
        )
    tensors = _make_tensors(batch, segments, work, write, extents, device, mask, into)
    key = f"{owner}/{backend}/{work.config.name}"
    return Plan(owner, key, spec, batch, page_size, backend, cutting, segments, work, tensors)


def _make_tensors(
    batch: Batch,
    segments: Segments,
    work: Work,
    write: Write,
    extents: Extents,
    device: torch.device,
    mask: torch.Tensor | None,
    into: PlanBuffers | None,
) -> PlanTensors:
    entries = batch.pages.entries if batch.pages is not None else None
    table = entries if isinstance(entries, np.ndarray) else None
    if table is not None and table.dtype == np.int32 and device.type == "cpu" and into is None:
        entries, table = torch.from_numpy(table), None  # the batch's own copy serves as it is
    layout = Layout(
        segments=len(segments),
        items=work.num_items,
        merges=work.num_merges,
        strands=len(work.config.strands),
        workers=work.config.num_workers,
        trees=int(tree_words(segments.tree_len, segments.q_len).sum()) if segments.trees else 0,
        table=0 if table is None else table.size,
    )
    if into is not None:
        if table is None:
            raise CapacityExceeded("into: buffers hold the page table, so it must be on the host; got a device tensor")
        if isinstance(batch.slot_mapping, np.ndarray):
            raise UnsupportedFeature("slot_mapping", "with into= it must be a device tensor, whose address you keep")
        into.check(layout, extents.num_rows, work.num_partial_rows)
        layout = into.layout
    *_, table_at, total = layout.offsets
    array = np.zeros(total, np.int32)  # there are words that nothing is written to
    write_header(array, layout, extents, (len(segments), work.num_items, work.num_merges, work.num_partial_rows))
    write(array, layout)
    write_tables(array, layout, segments, table)
    if into is None:
        host = torch.from_numpy(array)
        on_device = host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
    else:
        into.write(array)
        host, on_device = into.host_array, into.device_array
    return PlanTensors(
        host=host,
        device=on_device,
        page_table=entries if isinstance(entries, torch.Tensor) else on_device[table_at:],
        stamp=FIRST_STAMP if into is None else host[:1].clone(),  # the header's first word
        kv_lens=batch.kv_lens_device,
        slots=_device_slots(batch, device),
        packed_mask=mask,
    )


def _key_rows(batch: Batch) -> int:
    if batch.kv_starts is None:
        return 0
    return int((batch.kv_starts + batch.kv_lens)[batch.kv_lens > 0].max(initial=0))


def _largest_slot(batch: Batch) -> int:
    return int(batch.slot_mapping.max(initial=-1)) if isinstance(batch.slot_mapping, np.ndarray) else -1


def _device_slots(batch: Batch, device: torch.device) -> torch.Tensor | None:
    if isinstance(batch.slot_mapping, np.ndarray):
        return torch.from_numpy(batch.slot_mapping).to(device)
    return batch.slot_mapping
