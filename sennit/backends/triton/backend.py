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
    Form,
    addresses,
    attend_dense,
    contiguous,
    form_key,
    installed,
    launch_captures,
    printed_change,
    remember,
    room_for_merges,
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


@dataclass(kw_only=True)
class TritonForm(Form):
    """What launches of one layer over tensors of the same form have in common.

    Attributes:
        config: that of this backend.
        variants: what the kernel is compiled for, one a strand.
        kernels: by strand, and whether the launch before may go on: once they are compiled, Triton need not look at
            every argument of a launch.
        merge: the kernel that merges, likewise.
    """

    config: TritonConfig
    variants: tuple[Variant, ...]
    kernels: dict[tuple[int, bool], Any] = field(default_factory=dict)
    merge: Any = None


_forms: dict[tuple[Any, ...], TritonForm] = {}  # the oldest first


def _run(launch: Attend, q: torch.Tensor, out: torch.Tensor, *, fixed: bool) -> None:
    """The attention kernel for each strand that has work, or may have when a graph is replayed."""
    key = form_key(launch, q, launch.k, launch.v, out)
    form = _forms.get(key) or remember(_forms, key, _form(launch, q, out))
    config = form.config
    num_partial_rows, partials, counters = room_for_merges(launch, form, q.device, fixed=fixed)
    tensors = (
        launch.plan, launch.page_table, contiguous(launch.kv_lens), q, launch.k, launch.v, out, launch.lse, partials,
        counters, launch.packed_mask, contiguous(launch.sinks), contiguous(launch.alibi_slopes),
    )  # fmt: skip
    others = launch_captures(launch), launch.sm_scale, num_partial_rows, *form.strides
    strands = range(len(config.strands)) if fixed else launch.arrays.strands_with_items
    for strand in strands:
        tile = config.tiles[strand]
        grid = (int(config.workers[strand]), 1, 1)
        follows = strand > 0 and len(strands) > 1 and config.combine == "apart"
        kernel = form.kernels.get((strand, follows))
        if kernel is not None:
            kernel[grid](*addresses(tensors), *others, form.variants[strand], form.change)
            continue
        options = {"launch_pdl": True} if follows else {}
        compiled = _kernels().attend[grid](
            *tensors, *others, form.variants[strand], form.change,
            num_warps=tile.num_warps, enable_fp_fusion=True, **options,
        )  # fmt: skip
        if not launch.spec.captures:  # whose forms are not in the key
            form.kernels[strand, follows] = compiled
    if num_partial_rows and 0 in strands and not form.variants[0].merges_itself:
        _merge(launch, out, partials, num_partial_rows, form)


def _merge(launch: Attend, out: torch.Tensor, partials: torch.Tensor, num_partial_rows: int, form: TritonForm) -> None:
    """The kernel that merges what the first strand has split."""
    grid = (form.config.num_workers, MERGING_WORKERS, 1)
    tensors = launch.plan, out, launch.lse, partials, contiguous(launch.sinks)
    others = num_partial_rows, *form.strides[-4:], form.variants[0]
    if form.merge is None:
        form.merge = _kernels().merge[grid](*tensors, *others, enable_fp_fusion=True)
    else:
        form.merge[grid](*addresses(tensors), *others)


def _form(launch: Attend, q: torch.Tensor, out: torch.Tensor) -> TritonForm:
    spec, lse, config = launch.spec, launch.lse, cast(TritonConfig, launch.config)
    pools = (*_pool_strides(launch.k), *_pool_strides(launch.v))
    written = (*out.stride()[:2], *((0, 0) if lse is None else lse.stride()))
    return TritonForm(
        spec=spec,
        config=config,
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
