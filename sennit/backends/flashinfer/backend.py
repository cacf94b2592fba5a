"""The FlashInfer backend: what its wrappers can do, planned once for each of Sennit's plans."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from sennit.backends.base import Append, Attend, Support
from sennit.backends.flashinfer.parts import Part, divide, new_keys
from sennit.backends.gpus.device import ampere_or_newer, current_stream, made_current
from sennit.backends.merging import merge_states
from sennit.errors import BackendUnavailable, UnsupportedFeature
from sennit.plan.cost import KernelConfig, Strand
from sennit.spec import AttentionSpec

__all__ = ["FlashInferBackend"]

PACKAGE, OLDEST = "flashinfer-python", (0, 6)
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
ALIGNED = 16  # bytes
WORKSPACE_BYTES = 512 * 2**20  # what its plans have been seen to need; it says so where they need more
# What this backend's wrappers do not do, or do silently wrong, by the name that specs and plans have for it.
REFUSED = {
    "ragged": "its paged wrappers are what this backend runs; packed keys have no pages",
    "kv_lens_device": "it plans on the host, from exact lengths",
    "into": "its plans lie in memory of their own, so that a graph could not be replayed for another one",
    "split_size": "of its kernels only FA2 has a fixed split, in pages",
    "tree": "this backend does not turn trees into its masks of a bit for every row and key",
    "packed_mask": "this backend divides plans into batches, and does not divide masks",
    "sinks": "its FA2 and FA3 wrappers take sinks and ignore them",
    "alibi": "its FA3 kernels have no ALiBi, and those of FA2 have slopes of their own",
    "num_sink_tokens": "its windows have no sink tokens",
    "window_right": "its windows look back only",
    "score_mod": "it cannot call a function of yours",
    "mask_mod": "it cannot call a function of yours",
}


class _Planned(NamedTuple):
    """A part, planned by a wrapper."""

    wrapper: Any
    rows: slice | torch.Tensor  # of the query tensor


class _Plan(NamedTuple):
    parts: list[_Planned]
    unseeing: torch.Tensor  # int64, rows that see no key


@dataclass(frozen=True)
class FlashInferBackend:
    """Its paged prefill wrapper: FA2 for requests with one new token, and what it thinks best for those with more."""

    name: str = "flashinfer"

    def available(self, device: torch.device) -> Support:
        """On GPUs from Ampere on, where FlashInfer is installed."""
        if device.type != "cuda":
            return Support.no(f"it runs on GPUs, not on {device}")
        support = _installed()
        return ampere_or_newer(device) if support.accepted else support

    def supports(self, spec: AttentionSpec, features: frozenset[str], device: torch.device) -> Support:
        """Plain, windowed and soft-capped attention over pages, without what :data:`REFUSED` names."""
        if spec.latent:
            return Support.no("its wrapper for latents wants them and positions in tensors of their own")
        if spec.dtype not in DTYPES or spec.kv_dtype != spec.dtype:
            got = f"{spec.dtype} and {spec.kv_dtype}"
            return Support.no(f"it takes bfloat16 or float16 for queries and keys alike, not {got}")
        if spec.head_dim_qk != spec.head_dim_vo or spec.head_dim_qk not in HEAD_DIMS:
            return Support.no(f"this backend runs its kernels of head dimensions {', '.join(map(str, HEAD_DIMS))}")
        for name in sorted(_asked(spec) | features):
            if name in REFUSED:
                return Support.no(f"{name}: {REFUSED[name]}")
        return Support.yes()

    def configs(self, spec: AttentionSpec, device: torch.device) -> Sequence[KernelConfig]:
        """One without choices: FlashInfer schedules its own work."""
        anything = Strand("wide", 128, 128, item_time=1, compute_time=1, memory_time=1, split_time=1)
        return (KernelConfig("wrappers", (anything,), num_workers=1),)

    def attend(self, launch: Attend) -> None:
        """See :class:`~sennit.backends.base.Backend`."""
        with made_current(launch.q.device):
            self._attend(launch)

    def _attend(self, launch: Attend) -> None:
        _check(launch)
        plan = _wrappers_of(launch)
        if len(plan.unseeing):
            launch.out.index_fill_(0, plan.unseeing, 0)
            if launch.lse is not None:
                launch.lse.index_fill_(0, plan.unseeing, -math.inf)
        for wrapper, rows in plan.parts:
            q, pools = _aligned(launch.q[rows]), (launch.k, launch.v)
            if launch.lse is None:
                launch.out[rows] = wrapper.run(q, pools, return_lse=False)
            else:
                launch.out[rows], lse = wrapper.run(q, pools, return_lse=True)
                launch.lse[rows] = lse * math.log(2)

    def append(self, launch: Append) -> None:
        """See :class:`~sennit.backends.base.Backend`."""
        assert launch.kv_lens is None
        rows, slots = _slots(launch)
        pages = slots // launch.page_size, slots % launch.page_size
        launch.k_pages[pages] = launch.k[rows]
        if launch.v is not None and launch.v_pages is not None:
            launch.v_pages[pages] = launch.v[rows]

    def merge(self, outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~sennit.backends.base.Backend`."""
        return merge_states(outs, lses)

    def copy_pages(self, pages: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """See :class:`~sennit.backends.base.Backend`."""
        pages[target] = pages[source]


@cache
def _installed() -> Support:
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return Support.no(f"it is not installed: pip install {PACKAGE} (0.6.13 is tested)")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        return Support.no(f"{PACKAGE} {version} is older than {OLDEST[0]}.{OLDEST[1]}")
    return Support.yes()


def _asked(spec: AttentionSpec) -> set[str]:
    """Which of :data:`REFUSED` a spec asks for."""
    asked = {
        "sinks": spec.learned_sinks,
        "alibi": spec.alibi,
        "num_sink_tokens": spec.num_sink_tokens > 0,
        "window_right": spec.window_right is not None,
        "score_mod": spec.score_mod is not None,
        "mask_mod": spec.mask_mod is not None,
    }
    return {name for name, wanted in asked.items() if wanted}


# By the plan's tensor on the device, then by what its wrappers are told beside it: layers may differ in their scale,
# and launches of several streams at once must not meet in a workspace.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _check(launch: Attend) -> None:
    """What is known only when tensors are there, and what FlashInfer does not check itself."""
    k, v = launch.k, launch.v
    used = [i for i, size in enumerate(k.shape[:-1]) if size > 1]  # the others' strides mean nothing
    for pool in (k, v):
        if pool.data_ptr() % ALIGNED or any(pool.stride(i) * pool.itemsize % ALIGNED for i in used):
            raise UnsupportedFeature("kv_pages", f"backend 'flashinfer' reads rows that begin at {ALIGNED} bytes")
    if any(k.stride(i) != v.stride(i) for i in used):
        raise UnsupportedFeature("kv_pages", "backend 'flashinfer' reads keys and values of the same strides")
    if not launch.sm_scale > 0:
        raise UnsupportedFeature(
            f"sm_scale={launch.sm_scale}", "backend 'flashinfer' takes the largest logit before it multiplies"
        )


def _wrappers_of(launch: Attend) -> _Plan:
    known = _known.setdefault(launch.plan, {})
    stream = current_stream(launch.q.device) if launch.q.is_cuda else 0
    key = launch.spec, launch.page_size, launch.sm_scale, stream
    if key not in known:
        if launch.q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedFeature(
                "graph capture", "backend 'flashinfer' plans in a stream's first call, on the host"
            )
        known[key] = _plan(launch, stream)
    found: _Plan = known[key]
    return found


def _plan(launch: Attend, stream: int) -> _Plan:
    assert launch.page_size is not None
    parts, unseeing = divide(launch.arrays.segments, launch.page_size)
    device = launch.q.device
    if launch.spec.window_left is not None and any(not (part.narrow or part.causal) for part in parts):
        reason = "backend 'flashinfer' plans too few keys for rows that see those behind them"
        raise UnsupportedFeature("window_left without causality", reason)
    planned = [_Planned(_plan_part(part, launch, stream), _on_device(part.rows, device)) for part in parts]
    return _Plan(planned, torch.from_numpy(unseeing).to(device))


def _plan_part(part: Part, launch: Attend, stream: int) -> Any:
    """A wrapper of its own: planning one again would overwrite what a launch may not have read yet."""
    spec, device = launch.spec, launch.q.device
    entries = launch.page_table[torch.from_numpy(part.entries).to(device)]
    workspace = _workspace(device, stream)
    # FA3 reads pages that lie before a window, which may have been released.
    kernels = "fa2" if part.narrow or spec.window_left is not None else "auto"
    try:
        wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernels)
        wrapper.plan(
            *(torch.from_numpy(bounds.astype("int32")) for bounds in (part.qo_indptr, part.kv_indptr)),
            entries,
            torch.from_numpy(part.last_page_len.astype("int32")),
            spec.num_qo_heads,
            spec.num_kv_heads,
            spec.head_dim_qk,
            launch.page_size,
            causal=part.causal,
            sm_scale=launch.sm_scale,
            window_left=-1 if spec.window_left is None else spec.window_left,
            logits_soft_cap=spec.logits_soft_cap or 0.0,
            q_data_type=spec.dtype,
            kv_data_type=spec.kv_dtype,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # FlashInfer, its compiler and ninja raise what they like
        raise BackendUnavailable(f"backend 'flashinfer': FlashInfer cannot plan this step: {error}") from error
    if device.type == "cuda":  # it copies from pinned memory, which would be free as soon as the wrapper is
        torch.cuda.current_stream(device).synchronize()
    return wrapper


def _aligned(q: torch.Tensor) -> torch.Tensor:
    q = q.contiguous()
    return q.clone() if q.data_ptr() % ALIGNED else q


def _on_device(rows: Any, device: torch.device) -> slice | torch.Tensor:
    """Rows as a slice where they follow each other."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows) and (rows[1:] > rows[:-1]).all():
        return slice(first, last + 1)
    return torch.from_numpy(rows).to(device)


@cache
def _workspace(device: torch.device, stream: int) -> torch.Tensor:
    """Where wrappers keep partial results of a launch; launches of one stream follow each other."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _slots(launch: Append) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are stored, and the slots that they go to, int64 on the device."""
    found = new_keys(launch.arrays.segments, launch.page_size)
    rows, entries, offsets = (torch.from_numpy(part).to(launch.k.device) for part in found)
    if launch.slots is None:
        return rows, launch.page_table[entries].long() * launch.page_size + offsets
    rows = rows[launch.slots[rows] >= 0]
    return rows, launch.slots[rows]
