"""The Triton backend: launches of the kernels, and which layers and devices it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from math import prod
from threading import Lock
from typing import Any, TypeVar, cast

import torch

from sennit import env
from sennit.backends.base import Append, Attend, Support
from sennit.backends.floats import computed_in_float32, dense_columns
from sennit.backends.gpus import ampere_or_newer, current_stream, made_current
from sennit.backends.merging import merge_states
from sennit.backends.triton.costs import (
    TritonConfig,
    device_of,
    is_sixteen_bits,
    has_room,
    kernel_configs,
    possible_tile,
)
from sennit.backends.triton.variant import Variant
from sennit.plan.cost import KernelConfig
from sennit.plan.tensors import Header
from sennit.spec import AttentionSpec

__all__ = ["TritonBackend", "installed", "launch_captures", "merge_counters", "printed_change"]

_Value = TypeVar("_Value")
OLDEST = (3, 6)
ELEMENTS_AT_ONCE = 1024  # of a page that is copied
APPENDED_ROWS, SEGMENTS_AT_ONCE = 4, 128
FEWEST_COUNTERS = 4096
MERGING_WORKERS = 8  # of one merge
MOST_FORMS = 256  # of launches that are remembered
ALIGNED = 16  # what Triton looks for: bytes of addresses, elements of strides
PACKAGES = ("triton", "pytorch-triton", "triton-windows")


@dataclass(frozen=True)
class TritonBackend:
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
        arrays = launch.arrays
        fixed = arrays[Header.GENERATION] > 0  # a graph of this launch serves other plans at the same addresses
        if not (arrays[Header.NUM_ITEMS] or fixed):
            return
        q, out = dense_columns(launch.q), dense_columns(launch.out)
        with made_current(q.device):
            _run(launch, q, out, fixed=fixed)
        if out is not launch.out:
            launch.out.copy_(out)

    def append(self, launch: Append) -> None:
        """See :class:`~sennit.backends.base.Backend`."""
        rows = launch.k.shape[0]
        if not rows:
            return
        k, v = dense_columns(launch.k), None if launch.v is None else dense_columns(launch.v)
        spec, k_pages, v_pages = launch.spec, launch.k_pages, launch.v_pages
        strides = (
            *k.stride()[:2],
            *((0, 0) if v is None else v.stride()[:2]),
            *k_pages.stride()[:3],
            *((0, 0, 0) if v_pages is None else v_pages.stride()[:3]),
        )
        tensors = (
            launch.plan, launch.page_table, _contiguous(launch.kv_lens), launch.slots, k, v, k_pages, v_pages
        )  # fmt: skip
        others = (
            rows, *strides, launch.page_size, spec.head_dim_qk, spec.head_dim_vo, _power_of_two(spec.head_dim_qk),
            _power_of_two(spec.head_dim_vo), APPENDED_ROWS, SEGMENTS_AT_ONCE,
        )  # fmt: skip
        form = (
            k.dtype, k.device.index, launch.kv_lens is None, launch.slots is None, others[1:],
            *(None if pool is None else pool.data_ptr() % ALIGNED for pool in (k, v, k_pages, v_pages)),
        )  # fmt: skip
        grid = (-(-rows // APPENDED_ROWS), spec.num_kv_heads, 1)
        with made_current(k.device):
            if (known := _appends.get(form)) is not None:
                known[grid](*_addresses(tensors), *others)
            else:
                compiled = _kernels().append[grid](*tensors, *others, enable_fp_fusion=True)
                _remember(_appends, form, compiled)

    def merge(self, outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~sennit.backends.base.Backend`."""
        return merge_states(outs, lses)

    def copy_pages(self, pages: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """See :class:`~sennit.backends.base.Backend`."""
        sizes, strides = _runs(pages)
        if not len(source) or not prod(sizes):
            return
        with made_current(pages.device):
            _kernels().copy_pages[(len(source), -(-prod(sizes) // ELEMENTS_AT_ONCE), 1)](
                pages, source.long(), target.long(), *sizes, pages.stride(0), *strides,
                elements=ELEMENTS_AT_ONCE, enable_fp_fusion=True,
            )  # fmt: skip


@dataclass(frozen=True)
class Kernels:
    """The kernels, which are imported when they are first needed."""

    attend: Any
    merge: Any
    append: Any
    copy_pages: Any


@cache
def _kernels() -> Kernels:
    from sennit.backends.triton.kernels.attention import attend_kernel
    from sennit.backends.triton.kernels.cache import append_kernel, copy_pages_kernel
    from sennit.backends.triton.kernels.merge import merge_kernel

    return Kernels(attend_kernel, merge_kernel, append_kernel, copy_pages_kernel)


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
_appends: dict[tuple[Any, ...], Any] = {}  # compiled kernels, likewise
_lock = Lock()  # of additions


def _run(launch: Attend, q: torch.Tensor, out: torch.Tensor, *, fixed: bool) -> None:
    """The attention kernel for each strand that has work, or may have when a graph is replayed."""
    spec, k, v, lse = launch.spec, launch.k, launch.v, launch.lse
    arrays, kv_lens, mask = launch.arrays, launch.kv_lens, launch.packed_mask
    trees = arrays[Header.TREES_AT] < arrays[Header.TABLE_AT]
    key = (
        id(spec), id(launch.config), launch.page_size, trees, q.device.index, kv_lens is None, mask is None,
        q.stride(), k.stride(), v.stride(), out.stride(), None if lse is None else lse.stride(),
        q.data_ptr() % ALIGNED, k.data_ptr() % ALIGNED, v.data_ptr() % ALIGNED, out.data_ptr() % ALIGNED,
    )  # fmt: skip
    known = _compiled.get(key) or _remember(_compiled, key, _form(launch, q, out, trees=trees))
    config = known.config
    num_partial_rows = config.max_partial_rows if fixed else arrays[Header.NUM_PARTIAL_ROWS]
    partials, counters = known.no_partials, known.no_counters
    if num_partial_rows:
        partials = q.new_empty(num_partial_rows * (spec.head_dim_vo + 1), dtype=torch.float32)
        most = config.num_workers * len(config.strands)
        counters = merge_counters(q.device, most if fixed else arrays[Header.NUM_MERGES])
    tensors = (
        launch.plan, launch.page_table, _contiguous(kv_lens), q, k, v, out, lse, partials, counters, mask,
        _contiguous(launch.sinks), _contiguous(launch.alibi_slopes),
    )  # fmt: skip
    others = launch_captures(launch), launch.sm_scale, num_partial_rows, *known.strides
    strands = range(len(config.strands)) if fixed else arrays.strands_with_items
    for strand in strands:
        tile = config.tiles[strand]
        grid = (int(config.workers[strand]), 1, 1)
        follows = strand > 0 and len(strands) > 1 and config.combine == "apart"
        kernel = known.kernels.get((strand, follows))
        if kernel is not None:
            kernel[grid](*_addresses(tensors), *others, known.variants[strand], known.change)
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
    tensors = launch.plan, out, launch.lse, partials, _contiguous(launch.sinks)
    others = num_partial_rows, *known.strides[-4:], known.variants[0]
    if known.merge is None:
        known.merge = _kernels().merge[grid](*tensors, *others, enable_fp_fusion=True)
    else:
        known.merge[grid](*_addresses(tensors), *others)


def _addresses(tensors: tuple[torch.Tensor | None, ...]) -> list[int | None]:
    """What takes the place of tensors in a launch: of those, Triton would ask the driver where they are."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


_counters: dict[tuple[int, int], torch.Tensor] = {}  # by device and stream, in the order of which kernels use them


def merge_counters(device: torch.device, count: int) -> torch.Tensor:
    """At least ``count`` zeros for kernels to count merges with, which leave zeros behind."""
    if device.type == "cpu" or torch.cuda.is_current_stream_capturing():  # a graph may be replayed on any stream
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device.index, current_stream(device)
    known = _counters.get(key)
    if known is None or len(known) < count:
        known = _counters[key] = torch.zeros(max(count, FEWEST_COUNTERS), dtype=torch.int32, device=device)
    return known


def _remember(known: dict[tuple[Any, ...], _Value], form: tuple[Any, ...], value: _Value) -> _Value:
    """What ``known`` has for a form, at most :data:`MOST_FORMS` of them."""
    with _lock:
        while len(known) >= MOST_FORMS:
            del known[next(iter(known))]
        return known.setdefault(form, value)


def _form(launch: Attend, q: torch.Tensor, out: torch.Tensor, *, trees: bool) -> Compiled:
    spec, lse, config = launch.spec, launch.lse, cast(TritonConfig, launch.config)
    pools = (*_pool_strides(launch.k), *_pool_strides(launch.v))
    written = (*out.stride()[:2], *((0, 0) if lse is None else lse.stride()))
    return Compiled(
        spec,
        config,
        strides=(*q.stride()[:2], *pools, *written),
        variants=tuple(_variant(launch, config, strand, trees=trees) for strand in range(len(config.tiles))),
        change=printed_change(spec),
        no_partials=q.new_empty(1, dtype=torch.float32),
        no_counters=q.new_zeros(1, dtype=torch.int32),
    )


def _variant(launch: Attend, config: TritonConfig, strand: int, *, trees: bool) -> Variant:
    spec = launch.spec
    strides, addresses = (
        (*_pool_strides(launch.k), *_pool_strides(launch.v)),
        (launch.k.data_ptr(), launch.v.data_ptr()),
    )
    aligned = all(number % ALIGNED == 0 for number in (*strides, *addresses))
    looks_up = trees or launch.packed_mask is not None
    tile = possible_tile(config.tiles[strand], spec, aligned=aligned, looks_up=looks_up)
    # Triton's interpreter cannot multiply matrices of bfloat16.
    floats = not is_sixteen_bits(spec) or (env.triton_interpreted() and spec.dtype == torch.bfloat16)
    return Variant(
        strand=strand,
        tile=replace(tile, keys_first=tile.keys_first and not floats),
        item_rows=config.tiles[strand].rows,
        overlaps=config.combine == "apart",
        group_size=spec.group_size,
        dim_qk=spec.head_dim_qk,
        dim_vo=spec.head_dim_vo,
        latent=spec.latent,
        floats=floats,
        page_size=launch.page_size,
        same_strides=launch.k.stride() == launch.v.stride(),
        window_left=spec.window_left,
        window_right=spec.window_right,
        num_sink_tokens=spec.num_sink_tokens,
        logits_soft_cap=spec.logits_soft_cap,
        trees=trees,
    )


def printed_change(spec: AttentionSpec) -> Any:
    """The spec's functions, printed, or None."""
    if spec.score_mod is None and spec.mask_mod is None:
        return None
    from sennit.backends.triton.functions import graph_function

    return graph_function(spec)


def launch_captures(launch: Attend) -> tuple[Any, ...]:
    """What a launch's functions close over, as kernels take it."""
    if not launch.spec.captures:
        return ()
    from sennit.backends.triton.functions import capture_arguments

    return capture_arguments(launch.spec, launch.captures)


def _pool_strides(pool: torch.Tensor) -> tuple[int, int, int]:
    """Strides of pages, slots and heads; packed keys have no pages."""
    *page, slot, head, _ = pool.stride()
    return (page[0] if page else 0), slot, head


def _runs(pages: torch.Tensor) -> tuple[list[int], list[int]]:
    """Four sizes and strides of a page's dimensions, of which those that lie together are one."""
    sizes, strides = [1], [1]
    for size, stride in zip(reversed(pages.shape[1:]), reversed(pages.stride()[1:]), strict=True):
        if size == 1:
            continue
        if stride == sizes[0] * strides[0] or sizes[0] == 1:
            sizes[0], strides[0] = sizes[0] * size, strides[0] if sizes[0] > 1 else stride
        else:
            sizes.insert(0, size)
            strides.insert(0, stride)
    missing = 4 - len(sizes)
    return [1] * missing + sizes, [0] * missing + strides


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@cache
def _configs(spec: AttentionSpec, device: torch.device) -> tuple[TritonConfig, ...]:
    return kernel_configs(spec, device_of(device))


@cache  # packages do not come and go in a process, and looking them up takes a fifth of a step
def installed() -> Support:
    """Whether there is a Triton that is new enough."""
    for name in PACKAGES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            return Support.not_yet(f"Triton {version} is older than 3.6; pip install -U triton")
        return Support.yes()
    return Support.not_yet("Triton is not installed; pip install triton")
