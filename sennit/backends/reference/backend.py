"""The reference backend in PyTorch: directly per request, or work item by work item to prove planner and merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter_ns

import torch

from sennit.backends.base import Append, Attend, Support
from sennit.backends.merging import merge_states
from sennit.backends.reference.keys import Segment, new_slots, read_keys, read_segment
from sennit.backends.reference.logits import Block, block_logits
from sennit.backends.reference.softmax import add_sinks, attend_block
from sennit.errors import UnsupportedFeature
from sennit.plan.cost import KernelConfig, Strand
from sennit.spec import AttentionSpec

__all__ = ["ReferenceBackend"]

LOGITS_AT_ONCE = 2**24  # numbers; longer prefills are computed some rows at a time


@dataclass(frozen=True)
class ReferenceBackend:
    """Plain PyTorch on any device, computed in float32, or float64 where the spec is float64. Slow, and right.

    Attributes:
        name: by which ``backend=`` asks for it.
        by_items: run the plan's work items and merge their partial results; otherwise whole requests.
    """

    name: str
    by_items: bool

    def available(self, device: torch.device) -> Support:
        """Everywhere that PyTorch runs."""
        return Support.yes()

    def supports(self, spec: AttentionSpec, features: frozenset[str], device: torch.device) -> Support:
        """Everything that a spec or a plan can ask."""
        return Support.yes()

    def configs(self, spec: AttentionSpec, device: torch.device) -> Sequence[KernelConfig]:
        """One configuration with both strands; small tiles, so that small tests are cut and merged too."""
        wide = Strand("wide", 64, 32, item_time=4.0, compute_time=8.0, memory_time=2.0, split_time=2.0)
        narrow = Strand("narrow", 16, 32, item_time=2.0, compute_time=2.0, memory_time=3.0, split_time=1.0)
        return (KernelConfig("pytorch", (wide, narrow), num_workers=8),)

    def attend(self, launch: Attend) -> None:
        """See :class:`~sennit.backends.base.Backend`."""
        if self.by_items:
            _attend_items(launch)
        else:
            for index in range(len(launch.arrays.segments)):
                _attend_segment(launch, read_segment(launch, index))

    def measure(self, launch: Attend) -> torch.Tensor:
        """See :class:`~sennit.backends.base.MeasuresItems`; items run one after the other, whose worker they are."""
        if not self.by_items:
            raise UnsupportedFeature("measuring items", f"backend {self.name!r} has none; reference-items has")
        times = torch.zeros(len(launch.arrays.items), 2, dtype=torch.int64)
        _attend_items(launch, times)
        return times

    def append(self, launch: Append) -> None:
        """See :class:`~sennit.backends.base.Backend`."""
        for index in range(len(launch.arrays.segments)):
            segment = read_segment(launch, index)
            slots = new_slots(launch, segment)
            rows = segment.q_start + torch.nonzero(slots >= 0).squeeze(1)
            page, offset = slots[slots >= 0] // launch.page_size, slots[slots >= 0] % launch.page_size
            launch.k_pages[page, offset] = launch.k[rows].to(launch.k_pages.dtype)
            if launch.v_pages is not None and launch.v is not None:
                launch.v_pages[page, offset] = launch.v[rows].to(launch.v_pages.dtype)

    def merge(self, outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~sennit.backends.base.Backend`."""
        return merge_states(outs, lses)

    def copy_pages(self, pages: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """See :class:`~sennit.backends.base.Backend`."""
        pages[target] = pages[source]


def _compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Float32; float64 for float64, and for float32 on GPUs, where thousands of products are added up in a row."""
    exact = dtype == torch.float64 or (dtype == torch.float32 and device.type == "cuda")
    return torch.float64 if exact else torch.float32


def _attend_segment(launch: Attend, segment: Segment) -> None:
    """All rows and heads of a segment over all its keys, some rows at a time."""
    spec, device = launch.spec, launch.q.device
    dtype = _compute_dtype(spec.dtype, device)
    at_once = max(1, LOGITS_AT_ONCE // max(1, segment.kv_len * spec.num_qo_heads))
    heads = torch.arange(spec.num_qo_heads, device=device).view(spec.num_kv_heads, 1, spec.group_size)
    for start in range(0, segment.q_len, at_once):
        stop = min(start + at_once, segment.q_len)
        tokens = torch.arange(start, stop, device=device)
        keys = segment.keys(spec, start, stop - 1, device)
        k, v = read_keys(launch, segment, keys, dtype)
        rows = slice(segment.q_start + start, segment.q_start + stop)
        # [tokens, kv heads, group, dim] -> [kv heads, tokens * group, dim]
        q = launch.q[rows].to(dtype).unflatten(1, (spec.num_kv_heads, spec.group_size)).transpose(0, 1).flatten(1, 2)
        packed_heads = heads.expand(-1, len(tokens), -1).flatten(1)
        block = Block(segment, tokens.repeat_interleave(spec.group_size), packed_heads, keys)
        _write(launch, block, *attend_block(block_logits(launch, block, q, k), v))


def _attend_items(launch: Attend, times: torch.Tensor | None = None) -> None:
    """Every worker's items in order, then the merges: what a kernel does with a plan."""
    spec, dtype = launch.spec, _compute_dtype(launch.spec.dtype, launch.q.device)
    partial_rows = launch.arrays.merges.shape[0] and _partial_rows(launch)
    partial_out = torch.full((partial_rows, spec.head_dim_vo), torch.nan, dtype=dtype, device=launch.q.device)
    partial_lse = torch.full((partial_rows,), torch.nan, dtype=dtype, device=launch.q.device)
    for bounds in launch.arrays.worker_indptr.tolist():
        for first, last in pairwise(bounds):
            for number, item in enumerate(launch.arrays.items[first:last].tolist(), first):
                start = perf_counter_ns()
                _run_item(launch, item, partial_out, partial_lse, dtype)
                if times is not None:
                    if launch.q.device.type == "cuda":
                        torch.cuda.synchronize(launch.q.device)
                    times[number, 0], times[number, 1] = start, perf_counter_ns()
    for index, row_start, num_rows, head, first_row, num_parts, stride, *_ in launch.arrays.merges.tolist():
        parts = (first_row + torch.arange(num_parts)[:, None] * stride + torch.arange(num_rows)).to(launch.q.device)
        block = _block(launch, read_segment(launch, index), row_start, num_rows, head, parts.new_empty(0))
        out, lse = merge_states(partial_out[parts], partial_lse[parts])
        _write(launch, block, out[None], lse[None])


def _partial_rows(launch: Attend) -> int:
    _, _, num_rows, _, first_row, num_parts, stride, *_ = launch.arrays.merges.T
    return int((first_row + (num_parts - 1) * stride + num_rows).max())


def _run_item(
    launch: Attend, item: list[int], partial_out: torch.Tensor, partial_lse: torch.Tensor, dtype: torch.dtype
) -> None:
    index, row_start, num_rows, head_start, num_heads, key_start, key_end, partial_row, hole_start, hole_end, *_ = item
    segment, device = read_segment(launch, index), launch.q.device
    keys = torch.cat(
        [torch.arange(key_start, hole_start, device=device), torch.arange(hole_end, key_end, device=device)]
    )
    k, v = read_keys(launch, segment, keys, dtype)
    for head in range(head_start, head_start + num_heads):
        block = _block(launch, segment, row_start, num_rows, head, keys)
        q = launch.q[segment.q_start + block.tokens, block.heads].to(dtype)
        out, lse = attend_block(block_logits(launch, block, q, k[head : head + 1]), v[head : head + 1])
        if partial_row < 0:
            _write(launch, block, out, lse)
        else:
            first = partial_row + (head - head_start) * num_rows
            partial_out[first : first + num_rows] = out[0]
            partial_lse[first : first + num_rows] = lse[0]


def _block(launch: Attend, segment: Segment, row_start: int, num_rows: int, head: int, keys: torch.Tensor) -> Block:
    """Packed rows from ``row_start`` of one KV head."""
    packed = torch.arange(row_start, row_start + num_rows, device=keys.device)
    group = launch.spec.group_size
    return Block(segment, packed // group, (head * group + packed % group)[None], keys)


def _write(launch: Attend, block: Block, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Final results ``[heads, rows, dim]`` and ``[heads, rows]`` into the output, learned sinks included."""
    if launch.sinks is not None:
        out, lse = add_sinks(out, lse, launch.sinks[block.heads])
    tokens = block.segment.q_start + block.tokens
    launch.out[tokens, block.heads] = out.to(launch.out.dtype)
    if launch.lse is not None:
        launch.lse[tokens, block.heads] = lse.float()
