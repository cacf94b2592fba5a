"""What launches of kernels on GPUs share: which Triton, what is remembered of them, counters, users' functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from threading import Lock
from typing import Any, TypeVar

import torch

from sennit.backends.base import Attend, Support
from sennit.backends.floats import dense_columns
from sennit.backends.gpus.device import current_stream, made_current
from sennit.backends.gpus.variant import has_trees
from sennit.plan.cost import KernelConfig
from sennit.plan.tensors import Header
from sennit.spec import AttentionSpec

__all__ = [
    "ALIGNED", "Form", "addresses", "attend_dense", "contiguous", "form_key", "installed", "launch_captures",
    "printed_change", "remember", "room_for_merges",
]  # fmt: skip

_Value = TypeVar("_Value")
OLDEST = (3, 6)
ALIGNED = 16  # what Triton looks for: bytes of addresses, elements of strides
FEWEST_COUNTERS = 4096
MOST_FORMS = 256  # of launches that are remembered
PACKAGES = ("triton", "pytorch-triton", "triton-windows")
_lock = Lock()  # of additions


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


@dataclass(kw_only=True)
class Form:
    """What launches of one layer over tensors of the same form have in common, whatever kernels they are of.

    Attributes:
        spec, config: kept, since their addresses stand for them in :func:`form_key`.
        change: the layer's functions, printed, or None.
        strides: of all tensors, as the kernels take them.
        no_partials, no_counters: stand for partial results, and for counts of them, where there are none.
    """

    spec: AttentionSpec
    config: KernelConfig
    change: Any
    strides: tuple[int, ...]
    no_partials: torch.Tensor
    no_counters: torch.Tensor


def form_key(launch: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
    """What Triton compiles for, and what a :class:`Form` remembers, of a launch over these tensors."""
    lse = launch.lse
    return (
        id(launch.spec), id(launch.config), launch.page_size, has_trees(launch.arrays), q.device.index,
        launch.kv_lens is None, launch.packed_mask is None,
        q.stride(), k.stride(), v.stride(), out.stride(), None if lse is None else lse.stride(),
        q.data_ptr() % ALIGNED, k.data_ptr() % ALIGNED, v.data_ptr() % ALIGNED, out.data_ptr() % ALIGNED,
    )  # fmt: skip


def room_for_merges(
    launch: Attend, form: Form, device: torch.device, *, fixed: bool, counted: int = 1
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Rows of partial results, memory for them, and ``counted`` counters for each merge."""
    arrays, config = launch.arrays, form.config
    num_rows = config.max_partial_rows if fixed else arrays[Header.NUM_PARTIAL_ROWS]
    if not num_rows:
        return 0, form.no_partials, form.no_counters
    partials = torch.empty(num_rows * (form.spec.head_dim_vo + 1), dtype=torch.float32, device=device)
    num_merges = config.max_merges if fixed else arrays[Header.NUM_MERGES]
    return num_rows, partials, merge_counters(device, counted * num_merges)


def remember(known: dict[tuple[Any, ...], _Value], form: tuple[Any, ...], value: _Value) -> _Value:
    """What ``known`` has for a form, at most :data:`MOST_FORMS` of them."""
    with _lock:
        while len(known) >= MOST_FORMS:
            del known[next(iter(known))]
        return known.setdefault(form, value)


def attend_dense(launch: Attend, run: Callable[..., None]) -> None:
    """Attention by ``run(launch, q, out, fixed=...)``, whose tensors have dense columns, on their device.

    ``fixed``: a graph of this launch serves other plans at the same addresses.
    """
    arrays = launch.arrays
    fixed = arrays[Header.GENERATION] > 0
    if not (arrays[Header.NUM_ITEMS] or fixed):
        return
    q, out = dense_columns(launch.q), dense_columns(launch.out)
    with made_current(q.device):
        run(launch, q, out, fixed=fixed)
    if out is not launch.out:
        launch.out.copy_(out)


def addresses(tensors: tuple[torch.Tensor | None, ...]) -> list[int | None]:
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


def printed_change(spec: AttentionSpec) -> Any:
    """The spec's functions, printed, or None."""
    if spec.score_mod is None and spec.mask_mod is None:
        return None
    from sennit.backends.gpus.functions import graph_function

    return graph_function(spec)


def launch_captures(launch: Attend) -> tuple[Any, ...]:
    """What a launch's functions close over, as kernels take it."""
    if not launch.spec.captures:
        return ()
    from sennit.backends.gpus.functions import capture_arguments

    return capture_arguments(launch.spec, launch.captures)


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The same, or a copy whose elements follow each other."""
    return None if tensor is None else tensor.contiguous()
