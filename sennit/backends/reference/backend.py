"""The reference backend in PyTorch: directly per request, or work item by work item to prove planner and merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from sennit.backends.base import Append, Attend, Support
from sennit.backends.reference.keys import Segment, new_slots, read_keys, read_segment
from sennit.backends.reference.softmax import attend_block, merge_states
from sennit.plan.cost import KernelConfig, Strand
from sennit.spec import AttentionSpec

__all__ = ["ReferenceBackend"]

LOGITS_AT_ONCE = 2**24  # numbers; longer prefills are computed some rows at a time
NOT_YET = frozenset(
    {
        "window_left",
        "window_right",
        "num_sink_tokens",
        "learned_sinks",
        "alibi",
        "logits_soft_cap",
        "score_mod",
        "mask_mod",
    }
)


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
        """Plain masks, causal or not; any heads, dims, pages and layouts."""
        missing = sorted(spec.features & NOT_YET)
        return Support.no(f"{', '.join(missing)} not implemented") if missing else Support.yes()

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
        out, lse = merge_states(outs.to(_compute_dtype(outs.dtype)), lses)
        return out.to(outs.dtype), lse

    def copy_pages(self, pages: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """See :class:`~sennit.backends.base.Backend`."""
        pages[target] = pages[source]


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _attend_segment(launch: Attend, segment: Segment) -> None:
    """All rows and heads of a segment over all its keys, some rows at a time."""
    spec, dtype = launch.spec, _compute_dtype(launch.spec.dtype)
    k, v = read_keys(launch, segment, 0, segment.kv_len, dtype)
    at_once = max(1, LOGITS_AT_ONCE // max(1, segment.kv_len * spec.num_qo_heads))
    for start in range(0, segment.q_len, at_once):
        tokens = torch.arange(start, min(start + at_once, segment.q_len), device=launch.q.device)
        rows = slice(segment.q_start + start, segment.q_start + start + len(tokens))
        # [tokens, kv heads, group, dim] -> [kv heads, tokens * group, dim]
        q = launch.q[rows].to(dtype).unflatten(1, (spec.num_kv_heads, spec.group_size)).transpose(0, 1).flatten(1, 2)
        visible = segment.visible(tokens, 0, segment.kv_len).repeat_interleave(spec.group_size, dim=0)
        out, lse = attend_block(q, k, v, visible, launch.sm_scale)
        shape = (spec.num_kv_heads, len(tokens), spec.group_size)
        launch.out[rows] = out.unflatten(1, shape[1:]).transpose(0, 1).flatten(1, 2).to(launch.out.dtype)
        if launch.lse is not None:
            launch.lse[rows] = lse.unflatten(1, shape[1:]).transpose(0, 1).flatten(1, 2).float()


def _attend_items(launch: Attend) -> None:
    """Every worker's items in order, then the merges: what a kernel does with a plan."""
    spec, dtype = launch.spec, _compute_dtype(launch.spec.dtype)
    partial_rows = launch.arrays.merges.shape[0] and _partial_rows(launch)
    partial_out = torch.full((partial_rows, spec.head_dim_vo), torch.nan, dtype=dtype, device=launch.q.device)
    partial_lse = torch.full((partial_rows,), torch.nan, dtype=dtype, device=launch.q.device)
    for bounds in launch.arrays.worker_indptr.tolist():
        for first, last in pairwise(bounds):
            for item in launch.arrays.items[first:last].tolist():
                _run_item(launch, item, partial_out, partial_lse, dtype)
    for index, row_start, num_rows, head, first_row, num_parts, stride, _ in launch.arrays.merges.tolist():
        parts = (first_row + torch.arange(num_parts)[:, None] * stride + torch.arange(num_rows)).to(launch.q.device)
        out, lse = merge_states(partial_out[parts], partial_lse[parts])
        _write(launch, read_segment(launch, index), row_start, head, out, lse)


def _partial_rows(launch: Attend) -> int:
    _, _, num_rows, _, first_row, num_parts, stride, _ = launch.arrays.merges.T
    return int((first_row + (num_parts - 1) * stride + num_rows).max())


def _run_item(
    launch: Attend, item: list[int], partial_out: torch.Tensor, partial_lse: torch.Tensor, dtype: torch.dtype
) -> None:
    index, row_start, num_rows, head_start, num_heads, key_start, key_end, partial_row = item
    spec, segment = launch.spec, read_segment(launch, index)
    packed = torch.arange(row_start, row_start + num_rows, device=launch.q.device)
    tokens, member = packed // spec.group_size, packed % spec.group_size
    k, v = read_keys(launch, segment, key_start, key_end, dtype)
    visible = segment.visible(tokens, key_start, key_end)
    for head in range(head_start, head_start + num_heads):
        q = launch.q[segment.q_start + tokens, head * spec.group_size + member].to(dtype)
        out, lse = attend_block(q[None], k[head : head + 1], v[head : head + 1], visible, launch.sm_scale)
        if partial_row < 0:
            _write(launch, segment, row_start, head, out[0], lse[0])
        else:
            first = partial_row + (head - head_start) * num_rows
            partial_out[first : first + num_rows] = out[0]
            partial_lse[first : first + num_rows] = lse[0]


def _write(launch: Attend, segment: Segment, row_start: int, head: int, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Packed rows from ``row_start`` of one KV head into the output."""
    packed = torch.arange(row_start, row_start + len(out), device=out.device)
    tokens = segment.q_start + packed // launch.spec.group_size
    heads = head * launch.spec.group_size + packed % launch.spec.group_size
    launch.out[tokens, heads] = out.to(launch.out.dtype)
    if launch.lse is not None:
        launch.lse[tokens, heads] = lse.float()
