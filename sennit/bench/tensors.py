"""Makes a batch's tensors where they are wanted: on the host, those of a GPU's batches would take minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sennit.cache.capacity import format_bytes, free_bytes
from sennit.cache.memory import allocate
from sennit.check.functions import Functions
from sennit.check.problems import Problem, common_rules
from sennit.errors import InvalidInput
from sennit.plan.batch import Batch
from sennit.pools import KVLayout, nhd_views, split_pools
from sennit.spec import AttentionSpec

__all__ = ["as_pool", "check_memory", "make_tensors"]

SPARE = 8  # one page in so many is nobody's


def make_tensors(
    spec: AttentionSpec,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    page_size: int,
    kv_layout: KVLayout,
    functions: Functions | None,
    device: torch.device,
) -> Problem:
    """A causal problem over shuffled pages, with NaN in slots that no request owns; the same numbers every time.

    Pages are in the memory that a :class:`sennit.KVCache` would take for them.

    Raises:
        InvalidInput: the host's memory is too small for them.
    """
    check_memory(spec, sum(q_lens), 2 * sum(kv_lens), device)  # every key in a page, and in a tensor to check with
    if functions is not None:
        spec = spec.replace(score_mod=functions.score_mod, mask_mod=functions.mask_mod)
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(rows, heads, dim, generator=generator, dtype=dtype, device=device)

    tokens = sum(kv_lens)
    keys = normal(tokens, spec.num_kv_heads, spec.head_dim_qk, spec.kv_dtype)
    values = (
        keys[..., : spec.head_dim_vo]
        if spec.latent
        else normal(tokens, spec.num_kv_heads, spec.head_dim_vo, spec.kv_dtype)
    )
    counts = -(-np.asarray(kv_lens, np.int64) // page_size)
    num_pages = int(counts.sum()) * (SPARE + 1) // SPARE + 1
    batch = Batch.csr(
        qo_indptr=np.append(0, np.cumsum(q_lens, dtype=np.int64)),
        kv_lens=np.asarray(kv_lens, np.int64),
        kv_indptr=np.append(0, counts.cumsum()),
        kv_indices=np.random.default_rng(0).permutation(num_pages)[: int(counts.sum())],
    )
    captures = {} if functions is None else {name: t.to(device) for name, t in functions.captures.items()}
    run_options: dict[str, Any] = {"captures": captures} if captures else {}
    common = common_rules(spec, functions, run_options)
    return Problem(
        spec=spec,
        page_size=page_size,
        kv_layout=kv_layout,
        batch=batch,
        causal=[True] * len(q_lens),
        q=normal(sum(q_lens), spec.num_qo_heads, spec.head_dim_qk, spec.dtype),
        kv=_fill_pools(spec, batch, keys, values, num_pages, page_size, kv_layout),
        keys=torch.split(keys, list(kv_lens)),
        values=torch.split(values, list(kv_lens)),
        sm_scale=spec.head_dim_qk**-0.5,
        rules=[replace(common, request=request) for request in range(len(q_lens))],
        run_options=run_options,
    )


def check_memory(spec: AttentionSpec, rows: int, keys: int, device: torch.device) -> None:
    """Refuse queries and keys that the host has no memory for: it may end the process that asks, and not say no.

    Raises:
        InvalidInput: they are more than is free.
    """
    key_dim = spec.head_dim_qk + (0 if spec.latent else spec.head_dim_vo)
    size = rows * spec.num_qo_heads * spec.head_dim_qk * spec.dtype.itemsize
    size += keys * spec.num_kv_heads * key_dim * spec.kv_dtype.itemsize
    if device.type == "cpu" and size > (free := free_bytes(device)):
        raise InvalidInput(
            "batch", expected=f"tensors that fit into the free memory, {format_bytes(free)}", got=format_bytes(size),
            hint="ask for a smaller batch",
        )  # fmt: skip


def _fill_pools(
    spec: AttentionSpec,
    batch: Batch,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_pages: int,
    page_size: int,
    kv_layout: KVLayout,
) -> Any:
    """Pools as ``BatchAttention.run`` takes them: ``keys`` and ``values [tokens, heads, dim]`` where ``batch`` says."""

    def nan(dim: int) -> torch.Tensor:
        inner = (page_size, spec.num_kv_heads) if kv_layout == "NHD" else (spec.num_kv_heads, page_size)
        shape = (num_pages, page_size, dim) if spec.latent else (num_pages, *inner, dim)
        return _new_pool(shape, spec.kv_dtype, keys.device).fill_(torch.nan)

    pools = nan(spec.head_dim_qk) if spec.latent else (nan(spec.head_dim_qk), nan(spec.head_dim_vo))
    places = _places(batch, page_size, keys.device)
    views = nhd_views(*split_pools("kv", pools, spec, paged=True), spec, kv_layout, page_size)
    for view, rows in zip(views[:1] if spec.latent else views, (keys, values), strict=False):
        view[places] = rows
    return pools


def _places(batch: Batch, page_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and offset in it of every key, request after request, int64 ``[tokens]``."""
    assert batch.pages is not None
    starts = batch.kv_lens.cumsum() - batch.kv_lens
    positions = np.arange(batch.kv_lens.sum()) - starts.repeat(batch.kv_lens)
    entries = batch.pages.starts.repeat(batch.kv_lens) + positions // page_size
    pages = np.asarray(batch.pages.entries)[entries].astype(np.int64)
    return torch.from_numpy(pages).to(device), torch.from_numpy(positions % page_size).to(device)


def as_pool(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in memory as a cache allocates it."""
    return _new_pool(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


def _new_pool(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor that holds anything."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return allocate(size, device).view(dtype).view(tuple(shape))
