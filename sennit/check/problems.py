"""Hostile attention problems: shuffled pages, NaN in unowned slots, absurd table entries, odd sizes, strided views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sennit.check.oracle import dense_attention
from sennit.plan.batch import Batch
from sennit.pools import KVLayout
from sennit.spec import AttentionSpec

__all__ = ["Problem", "make_problem", "random_problem"]

ABSURD_PAGES = (-1, 2**31 - 1, 10**6)
LENGTH_DTYPES = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)


@dataclass(frozen=True, eq=False)
class Problem:
    """A batch with its tensors, and the keys and values that each request truly has.

    Attributes:
        spec, page_size, kv_layout: for ``BatchAttention``; ``page_size`` is None for packed keys.
        batch: for ``plan``.
        causal: one flag a request.
        q: ``[rows, num_qo_heads, head_dim_qk]``; rows that no request covers hold NaN.
        kv: pools or packed tensors, as ``run`` takes them.
        keys, values: ``[kv_len, num_kv_heads, dim]`` of each request, the truth that pools hold scattered.
        sm_scale: factor of the logits.
        text: what was chosen, to print with a failure.
    """

    spec: AttentionSpec
    page_size: int | None
    kv_layout: KVLayout
    batch: Batch
    causal: Sequence[bool]
    q: torch.Tensor
    kv: Any
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    sm_scale: float
    text: str = field(default="")

    def solve(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense results ``(out, lse)`` in ``dtype``; zero and ``-inf`` in rows that no request covers."""
        out = self.q.new_zeros(len(self.q), self.spec.num_qo_heads, self.spec.head_dim_vo, dtype=dtype)
        lse = self.q.new_full((len(self.q), self.spec.num_qo_heads), -torch.inf, dtype=dtype)
        for r, (start, q_len) in enumerate(zip(self.batch.q_starts.tolist(), self.batch.q_lens.tolist(), strict=True)):
            rows = slice(start, start + q_len)
            out[rows], lse[rows] = dense_attention(
                self.q[rows], self.keys[r], self.values[r], causal=self.causal[r], sm_scale=self.sm_scale, dtype=dtype
            )
        return out, lse


def make_problem(
    rng: np.random.Generator,
    spec: AttentionSpec,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    page_size: int | None = 16,
    kv_layout: KVLayout = "NHD",
    form: str = "csr",
    pool: str = "pair",
    causal: Sequence[bool] | bool = True,
    gaps: bool = False,
    length_dtype: Any = np.int64,
    device: str | torch.device = "cpu",
) -> Problem:
    """Make a problem of given lengths.

    Args:
        rng: source of everything random.
        spec: the layer.
        q_lens, kv_lens: one entry a request.
        page_size: tokens a page; None for packed keys.
        kv_layout: of the pools.
        form: ``"csr"`` or ``"padded"`` page tables.
        pool: ``"pair"`` of tensors, ``"interleaved"`` in one, or ``"strided"`` views into larger ones.
        causal: one flag, or one a request.
        gaps: leave query rows that no request covers, and order requests differently in the query tensor.
        length_dtype: NumPy dtype of lengths.
        device: of the tensors.
    """
    flags = [bool(causal)] * len(q_lens) if isinstance(causal, (bool, np.bool_)) else list(causal)
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))

    def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    keys = [normal(n, spec.num_kv_heads, spec.head_dim_qk, dtype=spec.kv_dtype) for n in kv_lens]
    if spec.latent:
        values = [k[..., : spec.head_dim_vo] for k in keys]
    else:
        values = [normal(n, spec.num_kv_heads, spec.head_dim_vo, dtype=spec.kv_dtype) for n in kv_lens]
    q_starts, rows = _query_rows(rng, q_lens, gaps)
    q = torch.full((rows, spec.num_qo_heads, spec.head_dim_qk), torch.nan, dtype=spec.dtype, device=device)
    for start, q_len in zip(q_starts, q_lens, strict=True):
        q[start : start + q_len] = normal(q_len, spec.num_qo_heads, spec.head_dim_qk, dtype=spec.dtype)
    lengths = {
        "qo_indptr": _cast(np.append(0, np.cumsum(q_lens, dtype=np.int64)), length_dtype),
        "kv_lens": _cast(kv_lens, length_dtype),
    }
    starts = q_starts if gaps else None
    if page_size is None:
        batch, kv = _packed(rng, spec, lengths, starts, keys, values, q.device)
    else:
        batch, kv = _paged(rng, spec, lengths, starts, keys, values, page_size, kv_layout, form, pool, q.device)
    text = f"{batch} {spec.key} page={page_size} {kv_layout} {form} {pool} causal={flags} gaps={gaps}"
    scale = float(rng.choice([1.0, 0.5, 2.0])) * spec.head_dim_qk**-0.5
    return Problem(spec, page_size, kv_layout, batch, flags, q, kv, keys, values, scale, text)


def random_problem(
    rng: np.random.Generator,
    *,
    dtype: torch.dtype = torch.float32,
    max_requests: int = 5,
    max_tokens: int = 90,
    device: str | torch.device = "cpu",
) -> Problem:
    """A problem of random heads, dims, lengths (zero and ``kv_len < q_len`` included), pages and forms."""
    kv_heads = int(rng.integers(1, 4))
    group = int(rng.choice([1, 2, 3, 4, 5, 7, 8, 16]))
    if rng.random() < 0.15:
        spec = AttentionSpec.mla(
            num_qo_heads=group, kv_lora_rank=int(rng.choice([8, 16, 24])), qk_rope_head_dim=8, dtype=dtype
        )
    else:
        dim = int(rng.choice([4, 8, 16, 20]))
        dim_vo = int(rng.choice([dim, 8, 12]))
        spec = AttentionSpec(
            num_qo_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim_qk=dim, head_dim_vo=dim_vo, dtype=dtype
        )
    count = int(rng.integers(0, max_requests + 1))
    kv_lens = [int(rng.choice([0, 1, int(rng.integers(0, max_tokens))])) for _ in range(count)]
    q_lens = [int(rng.choice([0, 1, int(rng.integers(0, n + 4)), int(rng.integers(0, 6))])) for n in kv_lens]
    pools = (
        ["pair", "strided"]
        if spec.latent or spec.head_dim_qk != spec.head_dim_vo
        else ["pair", "strided", "interleaved"]
    )
    lengths_fit = [d for d in LENGTH_DTYPES if np.iinfo(d).max >= max(sum(q_lens), max(kv_lens, default=0))]
    return make_problem(
        rng,
        spec,
        q_lens,
        kv_lens,
        page_size=None if rng.random() < 0.15 else int(rng.choice([1, 2, 3, 5, 8, 16, 64])),
        kv_layout="NHD" if rng.random() < 0.5 else "HND",
        form=str(rng.choice(["csr", "padded"])),
        pool=str(rng.choice(pools)),
        causal=[bool(rng.random() < 0.7) for _ in range(count)],
        gaps=bool(rng.random() < 0.3),
        length_dtype=lengths_fit[int(rng.integers(len(lengths_fit)))],
        device=device,
    )


def _cast(values: Any, dtype: Any) -> Any:
    return np.asarray(values, np.int64).astype(dtype)


def _query_rows(rng: np.random.Generator, q_lens: Sequence[int], gaps: bool) -> tuple[list[int], int]:
    if not gaps:
        return (np.cumsum(q_lens) - np.asarray(q_lens)).astype(int).tolist() if len(q_lens) else [], sum(q_lens)
    starts, row = [0] * len(q_lens), int(rng.integers(0, 3))
    for r in rng.permutation(len(q_lens)):
        starts[r] = row
        row += q_lens[r] + int(rng.integers(0, 3))
    return starts, row + int(rng.integers(0, 3))


def _packed(
    rng: np.random.Generator,
    spec: AttentionSpec,
    lengths: dict[str, Any],
    q_starts: list[int] | None,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    device: torch.device,
) -> tuple[Batch, Any]:
    padding = rng.integers(0, 3, len(keys))
    extents = np.asarray([len(k) for k in keys], np.int64) + padding
    indptr = np.append(0, np.cumsum(extents, dtype=np.int64))
    packed = []
    for tensors, dim in ((keys, spec.head_dim_qk), (values, spec.head_dim_vo)):
        like = torch.empty(0, dtype=spec.kv_dtype, device=device)
        rows = like.new_full((int(indptr[-1]), spec.num_kv_heads, dim), torch.nan)
        for start, tensor in zip(indptr, tensors, strict=False):
            rows[start : start + len(tensor)] = tensor
        packed.append(rows)
    batch = Batch.ragged(
        qo_indptr=lengths["qo_indptr"], kv_indptr=indptr, kv_lens=lengths["kv_lens"], qo_starts=q_starts
    )
    return batch, packed[0][:, 0] if spec.latent else tuple(packed)


def _paged(
    rng: np.random.Generator,
    spec: AttentionSpec,
    lengths: dict[str, Any],
    q_starts: list[int] | None,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    page_size: int,
    kv_layout: KVLayout,
    form: str,
    pool: str,
    device: torch.device,
) -> tuple[Batch, Any]:
    counts = [-(-len(k) // page_size) for k in keys]
    num_pages = sum(counts) + int(rng.integers(1, 5))
    shuffled = rng.permutation(num_pages)[: sum(counts)].tolist()
    tables = [[shuffled.pop() for _ in range(count)] for count in counts]
    like = torch.empty(0, dtype=spec.kv_dtype, device=device)
    pools = _empty_pools(like, spec, num_pages, page_size, kv_layout, pool)
    views = _nhd(pools, spec, kv_layout)
    for table, k, v in zip(tables, keys, values, strict=True):
        for tensor, view in zip((k, v), views, strict=False):
            for j, page in enumerate(table):
                part = tensor[j * page_size : (j + 1) * page_size]
                view[page, : len(part)] = part
    width = max(counts, default=0) + int(rng.integers(0, 3))
    if form == "padded":
        padded = np.asarray(rng.choice(ABSURD_PAGES, (len(tables), width)), np.int64)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        batch = Batch.padded(
            query_start_loc=lengths["qo_indptr"], seq_lens=lengths["kv_lens"], block_table=padded, qo_starts=q_starts
        )
    else:
        spare = [[*table, int(rng.choice(ABSURD_PAGES))] if rng.random() < 0.3 else table for table in tables]
        batch = Batch.csr(
            qo_indptr=lengths["qo_indptr"],
            kv_lens=lengths["kv_lens"],
            kv_indptr=np.append(0, np.cumsum([len(table) for table in spare], dtype=np.int64)),
            kv_indices=np.asarray([page for table in spare for page in table], np.int64),
            qo_starts=q_starts,
        )
    return batch, pools


def _empty_pools(
    like: torch.Tensor, spec: AttentionSpec, num_pages: int, page_size: int, kv_layout: KVLayout, pool: str
) -> Any:
    """Pools full of NaN."""

    def nan(*shape: int) -> torch.Tensor:
        return like.new_full(shape, torch.nan)

    def shape(dim: int) -> tuple[int, ...]:
        if spec.latent:
            return num_pages, page_size, dim
        heads = spec.num_kv_heads
        return (num_pages, heads, page_size, dim) if kv_layout == "HND" else (num_pages, page_size, heads, dim)

    def strided(dim: int) -> torch.Tensor:
        first, second, *rest = shape(dim)
        return nan(first, second + 1, *rest[:-1], dim + 3)[:, 1:, ..., 2 : 2 + dim]

    make = strided if pool == "strided" else lambda dim: nan(*shape(dim))
    if spec.latent:
        return make(spec.head_dim_qk)
    if pool == "interleaved":
        return nan(num_pages, 2, *shape(spec.head_dim_qk)[1:])
    return make(spec.head_dim_qk), make(spec.head_dim_vo)


def _nhd(pools: Any, spec: AttentionSpec, kv_layout: KVLayout) -> list[torch.Tensor]:
    if spec.latent:
        return [pools.unsqueeze(2)]
    pair = [pools[:, 0], pools[:, 1]] if isinstance(pools, torch.Tensor) else list(pools)
    return [t.transpose(1, 2) if kv_layout == "HND" else t for t in pair]
