"""The Triton backend: launches of the kernels, and which layers and devices it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

import torch

from sennit import env
from sennit.backends.base import Attend, Support
from sennit.backends.floats import computed_in_float32
from sennit.backends.gpus.caching import PagedCache
from sennit.backends.gpus.device import ampere_or_newer
from sennit.backends.gpus.launching import (
    ALIGNED,
    addresses,
    attend_dense,
    contiguous,
    installed,
    launch_captures,
    merge_counters,
    printed_change,
    remember,
)
from sennit.backends.gpus.variant import has_trees, layer_facts
from sennit.backends.triton.costs import (
    TritonConfig,
    device_of,
    has_room,
    is_sixteen_bits,
    kernel_configs,
    possible_tile,
)
from sennit.backends.triton.variant import Variant
from sennit.plan.cost import KernelConfig
from sennit.plan.tensors import Header
from sennit.spec import AttentionSpec

__all__ = ["TritonBackend"]

MERGING_WORKERS = 8  # of one merge


@dataclass(frozen=True)
class TritonBackend(PagedCache):
    """Persistent kernels over the planner's work items; sums are float32."""

    name: str = "triton"

    def available(self, device: torch.device) -> Support:
        """On GPUs from Ampere on, and on CPUs in Triton's interpreter."""
        wanted = "cpu" if env.triton_interpreted() else "cuda"
        if device.type != wanted:
            if env.triton_interpreted():
                return Support.no(f"it runs on the CPU, since TRITON_INTERPRET is set, not on {device}")
            hint = ", unless TRITON_INTERPRET=1 asks for its interpreter" if device.type == "cpu" else ""
            return Support.no(f"it runs on GPUs, not on {device}{hint}")
        support = installed()
        if not support.accepted or wanted == "cpu":
            return support
        return ampere_or_newer(device)

    def supports(self, spec: AttentionSpec, features: frozenset[str], device: torch.device) -> Support:
        """Everything but float64, and heads of which even the smallest tiles have no room."""
        support = computed_in_float32(spec)
        return has_room(spec, device_of(device)) if support.accepted else support

    def configs(self, spec: AttentionSpec, device: torch.device) -> Sequence[KernelConfig]:
        """See :func:`~sennit.backends.triton.costs.kernel_configs`."""
        return _configs(spec, device)

    def attend(self, launch: Attend) -> None:
        """See :class:`~sennit.backends.base.Backend`."""
        attend_dense(launch, _run)


@dataclass(frozen=True)
class Kernels:
    """The kernels, which are imported when they are first needed."""

    attend: Any
    merge: Any


@cache
def _kernels() -> Kernels:
    from sennit.backends.triton.kernels.attention import attend_kernel
    from sennit.backends.triton.kernels.merge import merge_kernel

    return Kernels(attend_kernel, merge_kernel)


@dataclass
class Compiled:
    """What launches of one layer over tensors of the same form have in common.

    Attributes:
        spec, config: kept, since their addresses stand for them.
        strides: of all tensors, as the kernel takes them.
        variants: what the kernel is compiled for, one a strand.
        change: the layer's functions, printed, or None.
        no_partials, no_counters: stand for partial results, and for counts of them, where there are none.
        kernels: by strand, and whether the launch before may go on: once they are compiled, Triton need not look at
            every argument of a launch.
        merge: the kernel that merges, likewise.
    """

    spec: AttentionSpec
    config: TritonConfig
    strides: tuple[int, ...]
    variants: tuple[Variant, ...]
    change: Any
    no_partials: torch.Tensor
    no_counters: torch.Tensor
    kernels: dict[tuple[int, bool], Any] = field(default_factory=dict)
    merge: Any = None


_compiled: dict[tuple[Any, ...], Compiled] = {}  # the oldest first


def _run(launch: Attend, q: torch.Tensor, out: torch.Tensor, *, fixed: bool) -> None:
    """The attention kernel for each strand that has work, or may have when a graph is replayed."""
    spec, k, v, lse = launch.spec, launch.k, launch.v, launch.lse
    arrays, kv_lens, mask = launch.arrays, launch.kv_lens, launch.packed_mask
    key = (
        id(spec), id(launch.config), launch.page_size, has_trees(arrays), q.device.index, kv_lens is None, mask is None,
        q.stride(), k.stride(), v.stride(), out.stride(), None if lse is None else lse.stride(),
        q.data_ptr() % ALIGNED, k.data_ptr() % ALIGNED, v.data_ptr() % ALIGNED, out.data_ptr() % ALIGNED,
    )  # fmt: skip
    known = _compiled.get(key) or remember(_compiled, key, _form(launch, q, out))
    config = known.config
    num_partial_rows = config.max_partial_rows if fixed else arrays[Header.NUM_PARTIAL_ROWS]
    partials, counters = known.no_partials, known.no_counters
    if num_partial_rows:
        partials = q.new_empty(num_partial_rows * (spec.head_dim_vo + 1), dtype=torch.float32)
        counters = merge_counters(q.device, config.max_merges if fixed else arrays[Header.NUM_MERGES])
    tensors = (
        launch.plan, launch.page_table, contiguous(kv_lens), q, k, v, out, lse, partials, counters, mask,
        contiguous(launch.sinks), contiguous(launch.alibi_slopes),
    )  # fmt: skip
    others = launch_captures(launch), launch.sm_scale, num_partial_rows, *known.strides
    strands = range(len(config.strands)) if fixed else arrays.strands_with_items
    for strand in strands:
        tile = config.tiles[strand]
        grid = (int(config.workers[strand]), 1, 1)
        follows = strand > 0 and len(strands) > 1 and config.combine == "apart"
        kernel = known.kernels.get((strand, follows))
        if kernel is not None:
            kernel[grid](*addresses(tensors), *others, known.variants[strand], known.change)
            continue
        options = {"launch_pdl": True} if follows else {}
        compiled = _kernels().attend[grid](
            *tensors, *others, known.variants[strand], known.change,
            num_warps=tile.num_warps, enable_fp_fusion=True, **options,
        )  # fmt: skip
        if not spec.captures:  # whose forms are not in the key
            known.kernels[strand, follows] = compiled
    if num_partial_rows and 0 in strands and not known.variants[0].merges_itself:
        _merge(launch, out, partials, num_partial_rows, known)


def _merge(launch: Attend, out: torch.Tensor, partials: torch.Tensor, num_partial_rows: int, known: Compiled) -> None:
    """The kernel that merges what the first strand has split."""
    grid = (known.config.num_workers, MERGING_WORKERS, 1)
    tensors = launch.plan, out, launch.lse, partials, contiguous(launch.sinks)
    others = num_partial_rows, *known.strides[-4:], known.variants[0]
    if known.merge is None:
        known.merge = _kernels().merge[grid](*tensors, *others, enable_fp_fusion=True)
    else:
        known.merge[grid](*addresses(tensors), *others)


def _form(launch: Attend, q: torch.Tensor, out: torch.Tensor) -> Compiled:
    spec, lse, config = launch.spec, launch.lse, cast(TritonConfig, launch.config)
    pools = (*_pool_strides(launch.k), *_pool_strides(launch.v))
    written = (*out.stride()[:2], *((0, 0) if lse is None else lse.stride()))
    return Compiled(
        spec,
        config,
        strides=(*q.stride()[:2], *pools, *written),
        variants=tuple(_variant(launch, config, strand) for strand in range(len(config.tiles))),
        change=printed_change(spec),
        no_partials=q.new_empty(1, dtype=torch.float32),
        no_counters=q.new_zeros(1, dtype=torch.int32),
    )


def _variant(launch: Attend, config: TritonConfig, strand: int) -> Variant:
    spec = launch.spec
    strides, addresses = (
        (*_pool_strides(launch.k), *_pool_strides(launch.v)),
        (launch.k.data_ptr(), launch.v.data_ptr()),
    )
    aligned = all(number % ALIGNED == 0 for number in (*strides, *addresses))
    looks_up = has_trees(launch.arrays) or launch.packed_mask is not None
    tile = possible_tile(config.tiles[strand], spec, aligned=aligned, looks_up=looks_up)
    # Triton's interpreter cannot multiply matrices of bfloat16.
    floats = not is_sixteen_bits(spec) or (env.triton_interpreted() and spec.dtype == torch.bfloat16)
    return Variant(
        **layer_facts(launch),
        strand=strand,
        tile=replace(tile, keys_first=tile.keys_first and not floats),
        item_rows=config.tiles[strand].rows,
        overlaps=config.combine == "apart",
        latent=spec.latent,
        floats=floats,
        same_strides=launch.k.stride() == launch.v.stride(),
    )


def _pool_strides(pool: torch.Tensor) -> tuple[int, int, int]:
    """Strides of pages, slots and heads; packed keys have no pages."""
    *page, slot, head, _ = pool.stride()
    return (page[0] if page else 0), slot, head


@cache
def _configs(spec: AttentionSpec, device: torch.device) -> tuple[TritonConfig, ...]:
    return kernel_configs(spec, device_of(device))
