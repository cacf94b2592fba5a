"""Builds the modules that FlashInfer's peers need, side by side: one after the other they would take many minutes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from sennit.bench.fresh_process import Say, run_alone
from sennit.bench.workloads import Workload
from sennit.spec import AttentionSpec

__all__ = ["DTYPES", "LATENT_DIMS", "XQA_PAGE_SIZES", "Module", "build_modules", "needed_modules"]

DTYPES = (torch.bfloat16, torch.float16)  # that kernels with tensor cores take
XQA_PAGE_SIZES = (16, 32, 64, 128)
LATENT_DIMS = (576, 512)  # of keys and values: the only ones that its kernels for latents are compiled for


@dataclass(frozen=True)
class Module:
    """A module of FlashInfer 0.6.

    Attributes:
        name: for people.
        place: module and function of FlashInfer that describe it.
        arguments: of that function.
    """

    name: str
    place: tuple[str, str]
    arguments: tuple[Any, ...]


def needed_modules(workloads: Sequence[Workload], dtype: torch.dtype, page_size: int) -> list[Module]:
    """What all peers together need for these workloads, each once."""
    found: dict[Module, None] = {}
    for workload in workloads:
        spec = AttentionSpec(dtype=dtype, **workload.heads, **workload.masks)
        q_lens = set(workload.lengths[0])
        if dtype not in DTYPES or spec.features or workload.score is not None:
            continue
        modules = _latent_modules(spec) if spec.latent else _modules(spec, page_size, q_lens)
        found |= dict.fromkeys(modules)
    return list(found)


def _latent_modules(spec: AttentionSpec) -> list[Module]:
    if (spec.head_dim_qk, spec.head_dim_vo) != LATENT_DIMS:
        return []
    columns, rest = spec.head_dim_vo, spec.head_dim_qk - spec.head_dim_vo
    types = (spec.dtype, spec.kv_dtype, spec.dtype, torch.int32)
    place = "flashinfer.jit", "gen_batch_mla_module"
    return [Module(f"MLA {b.upper()}", place, (b, *types, columns, rest, False)) for b in ("fa2", "fa3")]


def _modules(spec: AttentionSpec, page_size: int, q_lens: set[int]) -> list[Module]:
    """Their arguments: dtypes and dimensions; then no positional encoding, window, soft cap, sums in half precision."""
    types, dims = (spec.dtype, spec.kv_dtype, spec.dtype), (spec.head_dim_qk, spec.head_dim_vo)
    indexed, plain = (*types, torch.int32, *dims), (0, False, False)
    jit = "flashinfer.jit"
    found = [
        Module(f"prefill {b.upper()}", (jit, "gen_batch_prefill_module"), (b, *indexed, *plain, False))
        for b in ("fa2", "fa3")
    ]
    found.append(Module("BatchAttention", (jit, "gen_batch_attention_module"), (*indexed, *plain)))
    if q_lens == {1} and page_size in XQA_PAGE_SIZES:
        shape = page_size, spec.head_dim_qk, spec.group_size
        found.append(Module("XQA", ("flashinfer.jit.xqa", "gen_xqa_module"), (*types[:2], *shape, False, types[2], 1)))
    if 1 in q_lens and len(q_lens) > 1:
        sides = (*types, spec.head_dim_qk, *plain, False, torch.int32, *plain)
        found.append(Module("batch POD", (jit, "gen_batch_pod_module"), sides))
    return found


def build_modules(modules: Sequence[Module], tell: Callable[[Module, str], None]) -> None:
    """Build them all, each in a process of its own, and tell of each when it is there or why it is not.

    A module that cannot be built here is no error: the peer that needs it tries once more, and says what is wrong.

    Args:
        modules: what to build; those that lie in FlashInfer's cache take seconds.
        tell: told a module, and an empty text or what went wrong.
    """
    answers: SimpleQueue[tuple[Module, str]] = SimpleQueue()
    for module in modules:
        # Daemons: Python does not wait for them when it is interrupted, and the processes end with this one.
        Thread(target=lambda module=module: answers.put((module, _try(module))), daemon=True).start()
    for _ in modules:
        tell(*answers.get())


def _try(module: Module) -> str:
    """Build a module; what went wrong, or nothing."""
    try:
        run_alone(_build, module, on_stage=lambda stage: None)
    except Exception as error:  # FlashInfer and ninja raise what they like
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ""


def _build(say: Say, module: Module) -> None:
    # By itself ninja runs a compiler on every processor, here once for each module; some need 8 GB.
    os.environ.setdefault("MAX_JOBS", str(max(1, (os.cpu_count() or 1) // 2)))
    place, function = module.place
    getattr(import_module(place), function)(*module.arguments).build_and_load()
