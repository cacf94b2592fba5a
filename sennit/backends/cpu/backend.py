"""The CPU backend: native kernels over the planner's work items, on PyTorch's own threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sennit.backends.base import Append, Attend, Support
from sennit.backends.cpu.costs import kernel_configs
from sennit.backends.cpu.failures import built
from sennit.backends.cpu.libraries import (
    attention_source,
    cache_source,
    check_libraries,
    function,
    graph_address,
)
from sennit.backends.cpu.threads import parallel_function
from sennit.backends.floats import computed_in_float32, dense_columns
from sennit.backends.merging import merge_states
from sennit.plan.cost import KernelConfig
from sennit.plan.tensors import Header
from sennit.spec import AttentionSpec

__all__ = ["CpuBackend", "last_worker_times"]

NO_LIMIT = 2**31 - 1  # kNoLimit of launch.h


@dataclass(frozen=True)
class CpuBackend:
    """Kernels in C++, compiled for this machine when they are first needed. Everything accumulates in float32."""

    name: str = "cpu"

    def available(self, device: torch.device) -> Support:
        """On CPUs, where libraries can be built or are there; nothing is built to find out."""
        if device.type != "cpu":
            return Support.no(f"it runs on CPUs, not on {device}")
        return built(check_libraries)

    def supports(self, spec: AttentionSpec, features: frozenset[str], device: torch.device) -> Support:
        """Everything but float64; what a spec needs is built here, so that a failure to build is a reason."""
        support = computed_in_float32(spec)
        return built(_libraries, spec) if support.accepted else support

    def configs(self, spec: AttentionSpec, device: torch.device) -> Sequence[KernelConfig]:
        """See :func:`~sennit.backends.cpu.costs.kernel_configs`."""
        return kernel_configs(spec, torch.get_num_threads())

    def attend(self, launch: Attend) -> None:
        """See :class:`~sennit.backends.base.Backend`."""
        spec, partial_rows = launch.spec, launch.arrays[Header.NUM_PARTIAL_ROWS]
        partial_out = partial_lse = None
        if partial_rows:
            partials = torch.empty(partial_rows * (spec.head_dim_vo + 1), dtype=torch.float32)
            partial_out, partial_lse = partials.split([partial_rows * spec.head_dim_vo, partial_rows])
        out = dense_columns(launch.out)  # with what it holds, since rows without a request are left as they are
        _attention(spec.dtype, spec.kv_dtype)(
            parallel_function(),
            torch.get_num_threads(),
            launch.plan,
            launch.page_table,
            None if launch.kv_lens is None else launch.kv_lens.contiguous(),
            launch.page_size or 0,
            spec.group_size,
            dense_columns(launch.q),
            launch.k,
            launch.v,
            out,
            launch.lse,
            partial_out,
            partial_lse,
            launch.sm_scale,
            spec.logits_soft_cap or 0.0,
            NO_LIMIT if spec.window_left is None else spec.window_left,
            NO_LIMIT if spec.window_right is None else spec.window_right,
            spec.num_sink_tokens,
            None if launch.alibi_slopes is None else launch.alibi_slopes.contiguous(),
            None if launch.sinks is None else launch.sinks.contiguous(),
            launch.packed_mask,
            graph_address(spec),
            *launch.captures.values(),
        )
        if out is not launch.out:
            launch.out.copy_(out)

    def append(self, launch: Append) -> None:
        """See :class:`~sennit.backends.base.Backend`."""
        _append()(
            parallel_function(),
            torch.get_num_threads(),
            launch.plan,
            launch.arrays[Header.NUM_SEGMENTS],
            launch.page_table,
            None if launch.kv_lens is None else launch.kv_lens.contiguous(),
            launch.slots,
            dense_columns(launch.k),
            None if launch.v is None else dense_columns(launch.v),
            launch.k_pages,
            launch.v_pages,
        )

    def merge(self, outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~sennit.backends.base.Backend`."""
        return merge_states(outs, lses)

    def copy_pages(self, pages: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """See :class:`~sennit.backends.base.Backend`."""
        _copy_pages()(parallel_function(), torch.get_num_threads(), pages, source.long(), target.long())


def last_worker_times(dtype: torch.dtype, kv_dtype: torch.dtype) -> list[float]:
    """Microseconds that each worker's planned items took in this thread's last launch with these dtypes.

    A worker that ends early takes items of others, whose time still counts for those that they were planned for.
    """
    times = torch.empty(torch.get_num_threads(), dtype=torch.int64)
    function(attention_source(dtype, kv_dtype), "last_worker_times")(times)
    return (times / 1000).tolist()


@cache
def _attention(dtype: torch.dtype, kv_dtype: torch.dtype) -> Callable[..., Any]:
    return function(attention_source(dtype, kv_dtype), "attend")


@cache
def _append() -> Callable[..., Any]:
    return function(cache_source(), "append")


@cache
def _copy_pages() -> Callable[..., Any]:
    return function(cache_source(), "copy_pages")


@cache
def _libraries(spec: AttentionSpec) -> None:
    """Build all that a spec needs, unless it is there."""
    _attention(spec.dtype, spec.kv_dtype), _append(), graph_address(spec)
