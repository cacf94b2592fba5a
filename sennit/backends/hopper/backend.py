"""The Hopper backend: launches of the kernel, and which layers and devices it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import torch

from sennit import env
from sennit.backends.base import Attend, Support
from sennit.backends.gpus.caching import PagedCache
from sennit.backends.gpus.launching import (
    ALIGNED,
    attend_dense,
    contiguous,
    installed,
    launch_captures,
    merge_counters,
    printed_change,
)
from sennit.backends.gpus.variant import layer_facts
from sennit.backends.hopper.configs import HopperConfig, columns_of, kernel_configs, takes
from sennit.backends.hopper.pools import Rows, box_rows, rows_aligned, rows_of
from sennit.backends.hopper.variant import WIDE_PARTS, Variant
from sennit.plan.cost import KernelConfig
from sennit.plan.tensors import Header
from sennit.spec import AttentionSpec

__all__ = ["HopperBackend"]

LARGEST_SCALE = 64.0  # below which products may be weighed before they are scaled


@dataclass(frozen=True)
class HopperBackend(PagedCache):
    """Attention by a kernel in which both strands share every SM."""

    name: str = "hopper"

    def available(self, device: torch.device) -> Support:
        """On Hopper GPUs."""
        if device.type != "cuda":
            return Support.no(f"it runs on Hopper GPUs, not on {device}")
        if not env.unfinished():
            return Support.no(
                "it is not finished: results have not been tested enough; SENNIT_UNFINISHED=1 lets it run"
            )
        if env.triton_interpreted():
            return Support.no("Triton's interpreter does not run it")
        support = installed()
        if not support.accepted:
            return Support.no(support.reason)  # which Triton's own backend says with a warning
        if torch.cuda.get_device_capability(device)[0] != 9:
            return Support.no(f"it runs on Hopper GPUs, not on {torch.cuda.get_device_name(device)}")
        return Support.yes()

    def supports(self, spec: AttentionSpec, features: frozenset[str], device: torch.device) -> Support:
        """See :func:`~sennit.backends.hopper.configs.takes`."""
        return takes(spec)

    def configs(self, spec: AttentionSpec, device: torch.device) -> Sequence[KernelConfig]:
        """See :func:`~sennit.backends.hopper.configs.kernel_configs`."""
        return _configs(spec, device)

    def attend(self, launch: Attend) -> None:
        """See :class:`~sennit.backends.base.Backend`."""
        attend_dense(launch, _run)

    def measure(self, launch: Attend) -> torch.Tensor:
        """The same, by a kernel that tells when each item began and ended: nanoseconds, int64 ``[items, 2]``.

        The clock is one for all SMs; groups of warps that share a wide item end at different times, the first's count.
        """
        times = torch.zeros(launch.arrays[Header.NUM_ITEMS], 2, dtype=torch.int64, device=launch.q.device)
        attend_dense(launch, partial(_run, times=times))
        return times

    def attend_with_pauses(self, launch: Attend) -> None:
        """The same as ``attend``, bit for bit, by a kernel in which every warp sleeps now and then; for tests."""
        attend_dense(launch, partial(_run, pauses=True))


def _run(
    launch: Attend,
    q: torch.Tensor,
    out: torch.Tensor,
    *,
    fixed: bool,
    times: torch.Tensor | None = None,
    pauses: bool = False,
) -> None:
    spec, config, arrays = launch.spec, cast(HopperConfig, launch.config), launch.arrays
    k, v = _not_empty(launch.k), _not_empty(launch.v)
    num_partial_rows = config.max_partial_rows if fixed else arrays[Header.NUM_PARTIAL_ROWS]
    partials, counters = None, None
    if num_partial_rows:
        partials = q.new_empty(num_partial_rows * (spec.head_dim_vo + 1), dtype=torch.float32)
        most = config.num_workers * len(config.strands)
        counters = merge_counters(q.device, WIDE_PARTS * (most if fixed else arrays[Header.NUM_MERGES]))
    columns = columns_of(spec)
    k_rows, v_rows = rows_of(k, columns), rows_of(v, columns)
    variant = replace(_variant(launch, config, q), aligned=rows_aligned(k) and rows_aligned(v), pauses=pauses)
    if variant.aligned and k_rows and v_rows:
        variant = replace(variant, box_rows=box_rows(launch.page_size))
    lse = launch.lse
    (k_pool, k_strides), (v_pool, v_strides) = _pool(k, k_rows, variant), _pool(v, v_rows, variant)
    query_boxes = [_query_boxes(q, tile.rows // parts, variant) if tile and variant.query_boxes else None
             for tile, parts in ((config.wide, WIDE_PARTS), (config.narrow, 1))]  # fmt: skip
    _kernel()[(config.num_workers, 1, 1)](
        launch.plan, launch.page_table, contiguous(launch.kv_lens), q, *query_boxes,
        k_pool, v_pool, out, lse,
        launch.plan if partials is None else partials, launch.plan if counters is None else counters,
        launch.packed_mask, contiguous(launch.sinks), contiguous(launch.alibi_slopes),
        launch_captures(launch), times, launch.sm_scale, num_partial_rows, *q.stride()[:2], *k_strides, *v_strides,
        *out.stride()[:2], *((0, 0) if lse is None else lse.stride()), variant, printed_change(spec),
        num_warps=4,
    )  # fmt: skip


def _not_empty(pool: torch.Tensor) -> torch.Tensor:
    """A pool, or memory in its place where it holds nothing: boxes must be of something, and none is read."""
    return pool if pool.numel() else pool.new_empty(1, *pool.shape[1:])


def _variant(launch: Attend, config: HopperConfig, q: torch.Tensor) -> Variant:
    spec, group_size = launch.spec, launch.spec.group_size
    aligned = q.data_ptr() % ALIGNED == 0 and all(stride * 2 % ALIGNED == 0 for stride in q.stride()[:2])
    return Variant(
        **layer_facts(launch),
        wide=config.wide,
        narrow=config.narrow,
        columns=columns_of(spec),
        query_boxes=aligned and group_size & (group_size - 1) == 0,
        ordinary_scale=0 < launch.sm_scale < LARGEST_SCALE,
    )


def _query_boxes(q: torch.Tensor, rows: int, variant: Variant) -> Any:
    """Queries whose boxes are ``rows`` packed rows."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    heads = min(rows, variant.group_size)
    box = [rows // heads, heads, variant.columns]
    return TensorDescriptor(q, list(q.shape), list(q.stride()), box, NVMMASharedLayout(128, 16, 3))


def _pool(pool: torch.Tensor, rows: Rows | None, variant: Variant) -> tuple[Any, tuple[int, ...]]:
    """A pool and its strides, as the kernel takes them."""
    if rows is None or not variant.boxes:
        return pool, (0,) * (4 - pool.dim()) + pool.stride()[:-1]
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(128, 16, 2)
    shape, strides = [rows.num_rows, rows.width], [rows.stride, 1]
    return TensorDescriptor(pool, shape, strides, [variant.box_rows, variant.columns], layout), rows[3:]


@cache
def _kernel() -> Any:
    from sennit.backends.hopper.kernels.attention import attend_kernel

    return attend_kernel


@cache
def _configs(spec: AttentionSpec, device: torch.device) -> tuple[HopperConfig, ...]:
    return kernel_configs(spec, torch.cuda.get_device_properties(device).multi_processor_count)
