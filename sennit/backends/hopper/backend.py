"""The Hopper backend: launches of the kernel, and which layers and devices it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch

from sennit import env
from sennit.backends.base import Attend, Support
from sennit.backends.gpus.caching import PagedCache
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
from sennit.backends.gpus.variant import layer_facts
from sennit.backends.hopper.configs import HopperConfig, columns_of, kernel_configs, takes
from sennit.backends.hopper.pools import Rows, box_rows, rows_aligned, rows_of
from sennit.backends.hopper.variant import WIDE_PARTS, Tile, Variant
from sennit.plan.cost import KernelConfig
from sennit.plan.tensors import Header
from sennit.spec import AttentionSpec

__all__ = ["HopperBackend"]

ORDINARY_SCALES = 2.0**-100, 64.0  # between which products may be weighed before they are scaled


@dataclass(frozen=True)
class HopperBackend(PagedCache):
    """Attention by a kernel in which both strands share every SM."""

    name: str = "hopper"

    def available(self, device: torch.device) -> Support:
        """On Hopper GPUs."""
        if device.type != "cuda":
            return Support.no(f"it runs on Hopper GPUs, not on {device}")
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


@dataclass(kw_only=True)
class HopperForm(Form):
    """What launches of one layer over tensors of the same form have in common.

    Attributes:
        variant: what the kernel is compiled for.
        query_boxes: descriptors for the wide strand and for the narrow one, of no tensor yet; None: it has none.
        pool_boxes: the same of keys and of values, None where they are copied by rows.
        kernel: once it is compiled, Triton need not look at every argument of a launch.
    """

    variant: Variant
    query_boxes: tuple[Any, ...]
    pool_boxes: tuple[Any, ...]
    kernel: Any = None


_forms: dict[tuple[Any, ...], HopperForm] = {}  # the oldest first


def _run(
    launch: Attend,
    q: torch.Tensor,
    out: torch.Tensor,
    *,
    fixed: bool,
    times: torch.Tensor | None = None,
    pauses: bool = False,
) -> None:
    k, v = _not_empty(launch.k), _not_empty(launch.v)
    key = (
        *form_key(launch, q, k, v, out), times is None, pauses, _is_ordinary(launch.sm_scale), q.shape, k.shape, v.shape
    )  # fmt: skip
    form = _forms.get(key) or remember(_forms, key, _form(launch, q, k, v, out, pauses=pauses))
    num_partial_rows, partials, counters = room_for_merges(launch, form, q.device, fixed=fixed, counted=WIDE_PARTS)
    read = launch.plan, launch.page_table, contiguous(launch.kv_lens), q
    query_boxes = [_described(q, boxes) for boxes in form.query_boxes]
    pools = [_described(pool, boxes) for pool, boxes in zip((k, v), form.pool_boxes, strict=True)]
    written = (
        out, launch.lse, partials, counters, times, launch.packed_mask,
        contiguous(launch.sinks), contiguous(launch.alibi_slopes),
    )  # fmt: skip
    others = launch_captures(launch), launch.sm_scale, num_partial_rows, *form.strides, form.variant, form.change
    grid = (form.config.num_workers, 1, 1)
    if form.kernel is not None:
        if not form.variant.boxes:
            pools = addresses((k, v))
        form.kernel[grid](*addresses(read), *query_boxes, *pools, *addresses(written), *others)
        return
    pools = [pool if boxes is None else boxes for pool, boxes in zip((k, v), pools, strict=True)]
    compiled = _kernel()[grid](*read, *query_boxes, *pools, *written, *others, num_warps=4)
    if not launch.spec.captures:  # whose forms are not in the key
        form.kernel = compiled


def _is_ordinary(sm_scale: float) -> bool:
    """Whether a scale is: others are 0 in float32, negative, or make logits that are no longer apart."""
    least, most = ORDINARY_SCALES
    return least < sm_scale < most


def _not_empty(pool: torch.Tensor) -> torch.Tensor:
    """A pool, or memory in its place where it holds nothing: boxes must be of something, and none is read."""
    return pool if pool.numel() else pool.new_empty(1, *pool.shape[1:])


def _boxes(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], box: list[int]) -> Any:
    """A descriptor for tensors of one form, which Triton has checked, and which keeps none of them."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    boxes = TensorDescriptor(tensor, list(shape), list(strides), box, NVMMASharedLayout(128, 16, len(box)))
    boxes.base = None
    return boxes


def _described(tensor: torch.Tensor, boxes: Any) -> Any:
    """The same descriptor, of a tensor; checking that again would take half of a launch."""
    if boxes is None:
        return None
    described = object.__new__(type(boxes))
    described.__dict__ = {**boxes.__dict__, "base": tensor}
    return described


def _form(
    launch: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, pauses: bool
) -> HopperForm:
    spec, config, lse = launch.spec, cast(HopperConfig, launch.config), launch.lse
    columns, group_size = columns_of(spec), spec.group_size
    rows = rows_of(k, columns), rows_of(v, columns)
    aligned = rows_aligned(k) and rows_aligned(v)
    queries_aligned = q.data_ptr() % ALIGNED == 0 and all(stride * 2 % ALIGNED == 0 for stride in q.stride()[:2])
    variant = Variant(
        **layer_facts(launch),
        wide=config.wide,
        narrow=config.narrow,
        columns=columns,
        box_rows=box_rows(launch.page_size) if aligned and all(rows) else 1,
        aligned=aligned,
        query_boxes=queries_aligned and group_size & (group_size - 1) == 0,
        ordinary_scale=_is_ordinary(launch.sm_scale),
        pauses=pauses,
    )
    pools = [_pool_boxes(pool, of, variant) for pool, of in zip((k, v), rows, strict=True)]
    return HopperForm(
        spec=spec,
        config=config,
        change=printed_change(spec),
        variant=variant,
        query_boxes=(
            _query_boxes(q, config.wide, WIDE_PARTS, variant),
            _query_boxes(q, config.narrow, 1, variant),
        ),
        pool_boxes=tuple(box for box, _ in pools),
        strides=(
            *q.stride()[:2],
            *(stride for _, strides in pools for stride in strides),
            *out.stride()[:2],
            *((0, 0) if lse is None else lse.stride()),
        ),
        no_partials=q.new_empty(1, dtype=torch.float32),
        no_counters=q.new_zeros(1, dtype=torch.int32),
    )


def _query_boxes(q: torch.Tensor, tile: Tile | None, parts: int, variant: Variant) -> Any:
    """Boxes of packed rows, a part of a tile each."""
    if tile is None or not variant.query_boxes:
        return None
    rows = tile.rows // parts
    heads = min(rows, variant.group_size)
    return _boxes(q, q.shape, q.stride(), [rows // heads, heads, variant.columns])


def _pool_boxes(pool: torch.Tensor, rows: Rows | None, variant: Variant) -> tuple[Any, tuple[int, ...]]:
    """Boxes of a pool, and its strides, as the kernel takes them."""
    if rows is None or not variant.boxes:
        return None, (0,) * (4 - pool.dim()) + pool.stride()[:-1]
    shape, strides = (rows.num_rows, rows.width), (rows.stride, 1)
    return _boxes(pool, shape, strides, [variant.box_rows, variant.columns]), rows[3:]


@cache
def _kernel() -> Any:
    from sennit.backends.hopper.kernels.attention import attend_kernel

    return attend_kernel


@cache
def _configs(spec: AttentionSpec, device: torch.device) -> tuple[HopperConfig, ...]:
    return kernel_configs(spec, torch.cuda.get_device_properties(device).multi_processor_count)
