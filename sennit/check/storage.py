"""Puts keys and values where a batch finds them: shuffled pages among absurd ids, or packed rows among NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sennit.plan.batch import Batch
from sennit.pools import KVLayout
from sennit.spec import AttentionSpec

__all__ = ["Contents", "Storage", "pack_rows", "place_in_pages"]

ABSURD_PAGES = (-1, 2**31 - 1, 10**6)


@dataclass(frozen=True)
class Storage:
    """How keys and values are stored.

    Attributes:
        page_size: tokens a page; None for packed keys.
        kv_layout: of the pools.
        form: ``"csr"`` or ``"padded"`` page tables.
        pool: ``"pair"`` of tensors, ``"interleaved"`` in one, or ``"strided"`` views into larger ones.
    """

    page_size: int | None = 16
    kv_layout: KVLayout = "NHD"
    form: str = "csr"
    pool: str = "pair"


@dataclass(frozen=True, eq=False)
class Contents:
    """What each request of a batch has.

    Attributes:
        spec: the layer.
        qo_indptr: ``[requests + 1]`` of any integer dtype.
        q_starts: explicit first query rows, or None.
        kv_lens: ``[requests]``: what the host is told.
        exact: int32 ``[requests]`` on the device, where ``kv_lens`` are upper bounds.
        keys, values: ``[kv_len, num_kv_heads, dim]`` of each request.
        behind: the keys of each request that its window has passed.
    """

    spec: AttentionSpec
    qo_indptr: Any
    q_starts: list[int] | None
    kv_lens: Any
    exact: torch.Tensor | None
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    behind: Sequence[range]


def pack_rows(rng: np.random.Generator, contents: Contents, device: torch.device) -> tuple[Batch, Any]:
    """Packed keys and values, with NaN between the requests, and the batch that reads them."""
    spec, keys = contents.spec, contents.keys
    extents = contents.kv_lens.astype(np.int64) + rng.integers(0, 3, len(keys))
    indptr = np.append(0, np.cumsum(extents, dtype=np.int64))
    packed = []
    for tensors, dim in ((keys, spec.head_dim_qk), (contents.values, spec.head_dim_vo)):
        shape = int(indptr[-1]), spec.num_kv_heads, dim
        rows = torch.full(shape, torch.nan, dtype=spec.kv_dtype, device=device)
        for start, tensor in zip(indptr, tensors, strict=False):
            rows[start : start + len(tensor)] = tensor
        packed.append(rows)
    batch = Batch.ragged(
        qo_indptr=contents.qo_indptr, kv_indptr=indptr, kv_lens=contents.kv_lens, qo_starts=contents.q_starts
    )
    return batch, packed[0][:, 0] if spec.latent else tuple(packed)


def place_in_pages(
    rng: np.random.Generator, contents: Contents, storage: Storage, device: torch.device
) -> tuple[Batch, Any]:
    """Pools with NaN in every slot that no request owns, and the batch that reads them.

    Pages that a window has passed are not there: their entries hold absurd ids.
    """
    page_size = storage.page_size
    assert page_size is not None
    counts = [-(-len(k) // page_size) for k in contents.keys]
    num_pages = sum(counts) + int(rng.integers(1, 5))
    shuffled = rng.permutation(num_pages)[: sum(counts)].tolist()
    tables = [[shuffled.pop() for _ in range(count)] for count in counts]
    pools = _empty_pools(contents.spec, num_pages, storage, device)
    views = _nhd(pools, contents.spec, storage.kv_layout)
    for table, k, v, behind in zip(tables, contents.keys, contents.values, contents.behind, strict=True):
        for j, page in enumerate(table):
            start, end = j * page_size, (j + 1) * page_size
            if start >= behind.start and end <= behind.stop:
                # Where only the device knows where windows begin, the host can tell no other id from a wrong one.
                table[j] = -1 if contents.exact is not None else int(rng.choice(ABSURD_PAGES))
                continue
            for tensor, view in zip((k, v), views, strict=False):
                part = tensor[start:end]
                view[page, : len(part)] = part
    for table, bound in zip(tables, contents.kv_lens.tolist(), strict=True):
        table += rng.integers(0, num_pages, -(-bound // page_size) - len(table)).tolist()
    return (_padded if storage.form == "padded" else _csr)(rng, contents, tables), pools


def _padded(rng: np.random.Generator, contents: Contents, tables: list[list[int]]) -> Batch:
    width = max(map(len, tables), default=0) + int(rng.integers(0, 3))
    padded = np.asarray(rng.choice(ABSURD_PAGES, (len(tables), width)), np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return Batch.padded(
        query_start_loc=contents.qo_indptr,
        seq_lens=contents.kv_lens,
        kv_lens_device=contents.exact,
        block_table=padded,
        qo_starts=contents.q_starts,
    )


def _csr(rng: np.random.Generator, contents: Contents, tables: list[list[int]]) -> Batch:
    spare = [[*table, int(rng.choice(ABSURD_PAGES))] if rng.random() < 0.3 else table for table in tables]
    return Batch.csr(
        qo_indptr=contents.qo_indptr,
        kv_lens=contents.kv_lens,
        kv_lens_device=contents.exact,
        kv_indptr=np.append(0, np.cumsum([len(table) for table in spare], dtype=np.int64)),
        kv_indices=np.asarray([page for table in spare for page in table], np.int64),
        qo_starts=contents.q_starts,
    )


def _empty_pools(spec: AttentionSpec, num_pages: int, storage: Storage, device: torch.device) -> Any:
    """Pools full of NaN."""
    page_size, heads = storage.page_size, spec.num_kv_heads
    assert page_size is not None

    def nan(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=spec.kv_dtype, device=device)

    def shape(dim: int) -> tuple[int, ...]:
        if spec.latent:
            return num_pages, page_size, dim
        hnd = storage.kv_layout == "HND"
        return (num_pages, heads, page_size, dim) if hnd else (num_pages, page_size, heads, dim)

    def strided(dim: int) -> torch.Tensor:
        first, second, *rest = shape(dim)
        return nan(first, second + 1, *rest[:-1], dim + 3)[:, 1:, ..., 2 : 2 + dim]

    make = strided if storage.pool == "strided" else lambda dim: nan(*shape(dim))
    if spec.latent:
        return make(spec.head_dim_qk)
    if storage.pool == "interleaved":
        return nan(num_pages, 2, *shape(spec.head_dim_qk)[1:])
    return make(spec.head_dim_qk), make(spec.head_dim_vo)


def _nhd(pools: Any, spec: AttentionSpec, kv_layout: KVLayout) -> list[torch.Tensor]:
    if spec.latent:
        return [pools.unsqueeze(2)]
    pair = [pools[:, 0], pools[:, 1]] if isinstance(pools, torch.Tensor) else list(pools)
    return [t.transpose(1, 2) if kv_layout == "HND" else t for t in pair]
