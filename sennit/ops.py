"""Public operations as ``torch.library`` operators over tensors and scalars, for torch.compile and exporters.

An operator finds what it runs by a key that names spec, page size, layout, backend and configuration, never one plan:
everything that changes from step to step is in tensors, so nothing recompiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from sennit import env
from sennit.backends import registry
from sennit.backends.base import Append, Attend, MeasuresItems
from sennit.errors import InvalidInput, PlanMismatch, StalePlan, UnsupportedFeature
from sennit.plan.cost import KernelConfig
from sennit.plan.tensors import Header, PlanArrays
from sennit.spec import AttentionSpec

__all__ = ["Operator", "measuring_items", "register", "registered"]

_LIBRARY = torch.library.Library("sennit", "DEF")

_PLAN = "Tensor plan_host, Tensor plan_device, Tensor page_table, Tensor stamp, Tensor? kv_lens"
_LIBRARY.define(
    f"attend(str key, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, {_PLAN}, Tensor? packed_mask, "
    "Tensor? sinks, Tensor? alibi_slopes, Tensor[] captures, float sm_scale, bool fresh) -> ()"
)
_LIBRARY.define(
    f"append(str key, Tensor k, Tensor? v, Tensor(a!) k_pages, Tensor(b!)? v_pages, {_PLAN}, Tensor? slots) -> ()"
)
_LIBRARY.define("copy_pages(str backend, Tensor(a!) pages, Tensor source, Tensor target) -> ()")
_LIBRARY.define("merge_states(str backend, Tensor outs, Tensor lses) -> (Tensor, Tensor)")


@dataclass(frozen=True)
class Operator:
    """What a key stands for."""

    spec: AttentionSpec
    page_size: int | None
    backend: str
    config: KernelConfig


_OPERATORS: dict[str, Operator] = {}


def register(key: str, operator: Operator) -> None:
    """Make ``key`` known to the operators; the same key always means the same."""
    _OPERATORS.setdefault(key, operator)


def registered(key: str) -> bool:
    """Whether ``key`` is known in this process."""
    return key in _OPERATORS


_item_times: ContextVar[list[torch.Tensor] | None] = ContextVar("item_times", default=None)


@contextmanager
def measuring_items() -> Iterator[list[torch.Tensor]]:
    """Attention in here is computed by kernels that tell when each work item began and ended.

    The list is given an int64 ``[items, 2]`` tensor a launch, nanoseconds of a clock that begins anywhere.

    Raises:
        UnsupportedFeature: at a launch, where the backend cannot tell.
    """
    found: list[torch.Tensor] = []
    token = _item_times.set(found)
    try:
        yield found
    finally:
        _item_times.reset(token)


def _measured(name: str, launch: Attend) -> torch.Tensor:
    backend = registry.load(name)
    if not isinstance(backend, MeasuresItems):
        raise UnsupportedFeature("measuring items", f"backend {name!r} cannot tell when its work items run")
    return backend.measure(launch)


def _attend(
    key: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    plan_host: torch.Tensor,
    plan_device: torch.Tensor,
    page_table: torch.Tensor,
    stamp: torch.Tensor,
    kv_lens: torch.Tensor | None,
    packed_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    captures: list[torch.Tensor],
    sm_scale: float,
    fresh: bool,
) -> None:
    """Attention of a step over NHD views of keys and values.

    ``captures`` are in the order of ``spec.captures``. ``fresh``: ``out`` is new memory, in which rows that no request
    covers become zero.
    """
    operator = _operator(key)
    arrays = _read(plan_host, stamp)
    check_rows("q", q, arrays[Header.NUM_ROWS])
    _check_pages(k, arrays, operator)
    if env.debug():
        _check_device_data(arrays, page_table, kv_lens, k.shape[0], operator)
    captured = {known.name: tensor for known, tensor in zip(operator.spec.captures, captures, strict=True)}
    if not fresh or lse is not None:
        read = {"q": q, "k": k, "v": v, "sinks": sinks, "alibi_slopes": alibi_slopes, "packed_mask": packed_mask}
        read |= {f"captures[{name!r}]": tensor for name, tensor in captured.items()}
        if not fresh:
            _check_written("out", out, read)
        if lse is not None:
            _check_written("lse", lse, read | {"out": out})
    if fresh and arrays[Header.NUM_TOKENS] < q.shape[0]:
        out.zero_()
    launch = Attend(
        spec=operator.spec,
        config=operator.config,
        page_size=operator.page_size,
        arrays=arrays,
        plan=plan_device,
        page_table=page_table,
        kv_lens=kv_lens,
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        sm_scale=sm_scale,
        packed_mask=packed_mask,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        captures=captured,
    )
    found = _item_times.get()
    with _no_autocast(q.device):
        if found is None:
            registry.load(operator.backend).attend(launch)
        else:
            found.append(_measured(operator.backend, launch))


def _append(
    key: str,
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    plan_host: torch.Tensor,
    plan_device: torch.Tensor,
    page_table: torch.Tensor,
    stamp: torch.Tensor,
    kv_lens: torch.Tensor | None,
    slots: torch.Tensor | None,
) -> None:
    """New keys and values into the slots of their pages, NHD views; those of latents are None."""
    operator = _operator(key)
    assert operator.page_size is not None
    arrays = _read(plan_host, stamp)
    check_rows("k", k, arrays[Header.NUM_ROWS])
    _check_pages(k_pages, arrays, operator, Header.LARGEST_SLOT_PAGE if slots is not None else Header.LARGEST_PAGE)
    if env.debug():
        _check_device_data(arrays, page_table, kv_lens, k_pages.shape[0], operator)
    _check_written("kv_pages: k", k_pages, {"k": k, "v": v})
    if v_pages is not None:
        _check_written("kv_pages: v", v_pages, {"k": k, "v": v})
        if _overlap(k_pages, v_pages) and _share_elements(k_pages, v_pages):
            raise InvalidInput("kv_pages: v", expected="memory of its own", got="memory of the keys")
    registry.load(operator.backend).append(
        Append(
            spec=operator.spec,
            page_size=operator.page_size,
            arrays=arrays,
            plan=plan_device,
            page_table=page_table,
            kv_lens=kv_lens,
            slots=slots,
            k=k.unsqueeze(-2) if operator.spec.latent else k,
            v=v,
            k_pages=k_pages,
            v_pages=v_pages,
        )
    )


def _copy_pages(backend: str, pages: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    _check_written("kv_pages", pages, {})
    registry.load(backend).copy_pages(pages, source, target)


def _merge_states(backend: str, outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with _no_autocast(outs.device):
        return registry.load(backend).merge(outs, lses)


def _no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast switched off; entering torch's own context for that takes as long as a small launch."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()


def _operator(key: str) -> Operator:
    if key not in _OPERATORS:
        raise InvalidInput(
            "key", expected="one that a BatchAttention of this process has registered", got=repr(key),
            hint="run the plan through an equal BatchAttention first",
        )  # fmt: skip
    return _OPERATORS[key]


def _check_written(name: str, tensor: torch.Tensor, read: dict[str, torch.Tensor | None]) -> None:
    """Refuse memory that is read meanwhile, or that PyTorch will not let us write.

    Storages are compared first, which is quick and mostly enough.
    """
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise InvalidInput(
            name, expected="an ordinary tensor", got="one made in torch.inference_mode()",
            hint="write to it in inference mode too, or make it outside",
        )  # fmt: skip
    storage = _storage(tensor)
    for other, source in read.items():
        if source is not None and _meet(storage, _storage(source)) and _overlap(tensor, source):
            got = f"memory between the first and the last element of {other}"
            raise InvalidInput(name, expected=f"memory apart from {other}", got=got)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the stretches of memory from first to last element of two tensors meet."""
    return _meet(_stretch(a), _stretch(b))


def _meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return max(a[0], b[0]) < min(a[1], b[1])


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte of a tensor's storage and behind its last."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()


def _stretch(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and behind its last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def _share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, in each of which every element has memory of its own, may have an element in common.

    Those that lie between each other's elements are told apart where their strides are equal.
    """
    distance, rest = divmod(b.data_ptr() - a.data_ptr(), a.itemsize)
    if rest or a.stride() != b.stride():
        return True
    # Which sums of steps along the dimensions, the longest steps first, bring the distance to zero?
    left = {distance}
    for stride, length, other in sorted(zip(a.stride(), a.shape, b.shape, strict=True), reverse=True):
        steps = {(part, part // stride + more) for part in left for more in (0, 1)}
        left = {part - count * stride for part, count in steps if -other < count < length}
    return 0 in left


def _read(plan_host: torch.Tensor, stamp: torch.Tensor) -> PlanArrays:
    arrays = PlanArrays(plan_host.numpy())
    if int(stamp) != arrays[Header.GENERATION]:
        raise StalePlan(
            f"plan: its buffers have been rewritten since (it is plan {int(stamp)} of them, they hold plan "
            f"{arrays[Header.GENERATION]}); run a plan before the next one is made into the same buffers"
        )
    return arrays


def check_rows(name: str, tensor: torch.Tensor, num_rows: int) -> None:
    """Raise :class:`PlanMismatch` where a tensor has fewer rows than a plan."""
    if tensor.shape[0] < num_rows:
        raise PlanMismatch(name, expected=f"at least the plan's {num_rows} rows", got=tensor.shape[0])


def _check_pages(k: torch.Tensor, arrays: PlanArrays, operator: Operator, word: Header = Header.LARGEST_PAGE) -> None:
    if operator.page_size is None:
        if k.shape[0] < arrays[Header.NUM_KEY_ROWS]:
            raise PlanMismatch("kv", expected=f"at least the plan's {arrays[Header.NUM_KEY_ROWS]} rows", got=k.shape[0])
    elif arrays[word] >= k.shape[0]:
        raise PlanMismatch(
            "kv_pages",
            expected=f"more than {arrays[word]} pages, the largest page id that the plan uses",
            got=k.shape[0],
        )


def _nothing_fake(*arguments: object) -> None:
    return None


def _check_device_data(
    arrays: PlanArrays, page_table: torch.Tensor, kv_lens: torch.Tensor | None, num_pages: int, operator: Operator
) -> None:
    """Debugging only: read page ids and exact lengths back from the device, and check those that keys use."""
    exact, spec = None if kv_lens is None else kv_lens.tolist(), operator.spec
    for request, _, q_len, kv_start, kv_len, _, _, tree_len, *_ in arrays.segments.tolist():
        if exact is not None and not 0 <= exact[request] <= kv_len:
            raise InvalidInput(
                f"kv_lens_device[{request}]", expected=f"at most the host's bound {kv_len}", got=exact[request]
            )
        if operator.page_size is not None:
            length = kv_len if exact is None else exact[request]
            ids = page_table[kv_start : kv_start - (-length // operator.page_size)].tolist()
            if spec.window_left is not None:
                behind = max(length - max(q_len, tree_len) - spec.window_left, 0) // operator.page_size
                ids = ids[: min(behind, -(-spec.num_sink_tokens // operator.page_size))] + ids[behind:]
            if ids and not 0 <= min(ids) <= max(ids) < num_pages:
                raise InvalidInput(
                    f"page table of request {request}", expected=f"page ids from 0 to {num_pages - 1}", got=ids
                )


def _merge_states_fake(backend: str, outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


for _name, _implementation, _fake in (
    ("attend", _attend, _nothing_fake),
    ("append", _append, _nothing_fake),
    ("copy_pages", _copy_pages, _nothing_fake),
    ("merge_states", _merge_states, _merge_states_fake),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sennit::{_name}", _fake, lib=_LIBRARY)
