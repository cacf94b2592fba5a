"""Hostile attention problems: shuffled pages, NaN in unowned slots, absurd table entries, odd sizes, strided views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch

from sennit.check.functions import Functions, random_functions
from sennit.check.oracle import Rules, dense_attention
from sennit.plan.batch import Batch
from sennit.plan.mask import pack_mask
from sennit.plan.tree import Tree
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
        rules: of each request, for the oracle; empty where there are none.
        plan_options: further keywords of ``plan``: trees and packed masks.
        run_options: further keywords of ``run``: sinks, slopes and captures.
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
    rules: Sequence[Rules] = ()
    plan_options: Mapping[str, Any] = field(default_factory=dict)
    run_options: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    def solve(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense results ``(out, lse)`` in ``dtype``; zero and ``-inf`` in rows that no request covers."""
        out = self.q.new_zeros(len(self.q), self.spec.num_qo_heads, self.spec.head_dim_vo, dtype=dtype)
        lse = self.q.new_full((len(self.q), self.spec.num_qo_heads), -torch.inf, dtype=dtype)
        for r, (start, q_len) in enumerate(zip(self.batch.q_starts.tolist(), self.batch.q_lens.tolist(), strict=True)):
            rows = slice(start, start + q_len)
            out[rows], lse[rows] = dense_attention(
                self.q[rows],
                self.keys[r],
                self.values[r],
                causal=self.causal[r],
                sm_scale=self.sm_scale,
                rules=self.rules[r] if self.rules else Rules(),
                dtype=dtype,
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
    bounds: Sequence[int] | None = None,
    functions: Functions | None = None,
    trees: Sequence[Sequence[int] | None] | None = None,
    masked: bool = False,
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
        bounds: upper bounds that the host is told instead of ``kv_lens``, which then only the device has; with pages.
        functions: go into the spec.
        trees: parents of each request's last keys, or None.
        masked: hide a random third of all pairs by a packed mask.
        length_dtype: NumPy dtype of lengths.
        device: of the tensors.
    """
    if functions is not None:
        spec = spec.replace(score_mod=functions.score_mod, mask_mod=functions.mask_mod)
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
        "kv_lens": _cast(kv_lens if bounds is None else bounds, length_dtype),
        "kv_lens_device": None if bounds is None else torch.tensor(kv_lens, dtype=torch.int32, device=device),
    }
    starts = q_starts if gaps else None
    if page_size is None:
        batch, kv = _packed(rng, spec, lengths, starts, keys, values, q.device)
    else:
        hidden = [
            _behind_window(spec, n, max(q_len, len(parents or ())))
            for n, q_len, parents in zip(kv_lens, q_lens, trees or [None] * len(q_lens), strict=True)
        ]
        batch, kv = _paged(rng, spec, lengths, starts, keys, values, hidden, page_size, kv_layout, form, pool, q.device)
    captures = {} if functions is None else {name: t.to(q.device) for name, t in functions.captures.items()}
    run_options: dict[str, Any] = {"captures": captures} if captures else {}
    for name, wanted in (("sinks", spec.learned_sinks), ("alibi_slopes", spec.alibi)):
        if wanted:
            run_options[name] = normal(spec.num_qo_heads, dtype=torch.float32)
    shapes = zip(q_lens, kv_lens if bounds is None else bounds, strict=True)
    masks = [torch.from_numpy(rng.random(shape) < 0.67).to(q.device) for shape in shapes]
    plan_options: dict[str, Any] = {"packed_mask": pack_mask(masks).to(q.device)} if masked else {}
    if trees is not None:
        plan_options["tree"] = [None if parents is None else Tree(parents) for parents in trees]
    rules = [
        Rules(
            window_left=spec.window_left,
            window_right=spec.window_right,
            num_sink_tokens=spec.num_sink_tokens,
            logits_soft_cap=spec.logits_soft_cap,
            alibi_slopes=run_options.get("alibi_slopes"),
            sinks=run_options.get("sinks"),
            parents=None if trees is None else trees[r],
            mask=masks[r][:, : kv_lens[r]] if masked else None,
            score_mod=None if functions is None else _closed_over(functions.score_mod, captures),
            mask_mod=None if functions is None else _closed_over(functions.mask_mod, captures),
            request=r,
        )
        for r in range(len(q_lens))
    ]
    text = (
        f"{batch} {spec} page={page_size} {kv_layout} {form} {pool} causal={flags} gaps={gaps} trees={trees} "
        f"masked={masked} kv_lens={list(kv_lens)}"
    )
    scale = float(rng.choice([1.0, 0.5, 2.0])) * spec.head_dim_qk**-0.5
    return Problem(
        spec, page_size, kv_layout, batch, flags, q, kv, keys, values, scale, rules, plan_options, run_options, text
    )  # fmt: skip


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
    spec = spec.replace(**_random_fields(rng))
    count = int(rng.integers(0, max_requests + 1))
    kv_lens = [int(rng.choice([0, 1, int(rng.integers(0, max_tokens))])) for _ in range(count)]
    q_lens = [int(rng.choice([0, 1, int(rng.integers(0, n + 4)), int(rng.integers(0, 6))])) for n in kv_lens]
    pools = (
        ["pair", "strided"]
        if spec.latent or spec.head_dim_qk != spec.head_dim_vo
        else ["pair", "strided", "interleaved"]
    )
    functions, trees = None, None
    if rng.random() < 0.3:
        positions = max([*q_lens, *kv_lens, 1])
        heads = spec.num_qo_heads
        functions = random_functions(rng, heads=heads, requests=count, positions=positions, dtype=_wide(dtype))
    if rng.random() < 0.2:
        trees = [_random_tree(rng, m, n) for m, n in zip(q_lens, kv_lens, strict=True)]
    page_size = None if rng.random() < 0.15 else int(rng.choice([1, 2, 3, 5, 8, 16, 64]))
    bounds = [n + int(rng.integers(0, 40)) for n in kv_lens] if page_size and rng.random() < 0.2 else None
    longest = max(bounds or kv_lens, default=0)
    lengths_fit = [d for d in LENGTH_DTYPES if np.iinfo(d).max >= max(sum(q_lens), longest)]
    return make_problem(
        rng,
        spec,
        q_lens,
        kv_lens,
        page_size=page_size,
        kv_layout="NHD" if rng.random() < 0.5 else "HND",
        form=str(rng.choice(["csr", "padded"])),
        pool=str(rng.choice(pools)),
        causal=[bool(rng.random() < 0.7) or bool(trees and trees[r]) for r in range(count)],
        gaps=bool(rng.random() < 0.3),
        bounds=bounds,
        functions=functions,
        trees=trees,
        masked=bool(rng.random() < 0.15),
        length_dtype=lengths_fit[int(rng.integers(len(lengths_fit)))],
        device=device,
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that logits are computed in."""
    return torch.promote_types(dtype, torch.float32)


def _random_fields(rng: np.random.Generator) -> dict[str, Any]:
    """Fields of a spec that half of all problems leave as they are."""
    fields: dict[str, Any] = {}
    if rng.random() < 0.5:
        return fields
    if rng.random() < 0.6:
        fields["window_left"] = int(rng.choice([0, 1, 5, 17, 40]))
        fields["num_sink_tokens"] = int(rng.choice([0, 0, 1, 4, 9]))
    if rng.random() < 0.3:
        fields["window_right"] = int(rng.choice([0, 1, 3, 20]))
    for name in ("learned_sinks", "alibi"):
        fields[name] = bool(rng.random() < 0.3)
    if rng.random() < 0.3:
        fields["logits_soft_cap"] = float(rng.choice([1.0, 5.0, 30.0]))
    return fields


def _random_tree(rng: np.random.Generator, q_len: int, kv_len: int) -> list[int] | None:
    """Parents of at least ``q_len`` and at most ``kv_len`` nodes."""
    if q_len > kv_len or rng.random() < 0.3:
        return None
    nodes = int(rng.integers(q_len, min(kv_len, q_len + 8) + 1))
    return [int(rng.integers(-1, node)) for node in range(nodes)]


def _closed_over(function: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The same function, closing over the same tensors where they are on the problem's device."""
    if function is None or not function.__closure__:
        return function
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    closure = tuple(CellType(tensors.get(name, cell.cell_contents)) for name, cell in cells)
    return FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)


def _behind_window(spec: AttentionSpec, kv_len: int, rows: int) -> set[int]:
    """Keys that neither the last ``rows`` positions nor any later one can see."""
    if spec.window_left is None:
        return set()
    return set(range(spec.num_sink_tokens, max(kv_len - rows - spec.window_left, 0)))


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
    extents = lengths["kv_lens"].astype(np.int64) + rng.integers(0, 3, len(keys))
    indptr = np.append(0, np.cumsum(extents, dtype=np.int64))
    packed = []
    for tensors, dim in ((keys, spec.head_dim_qk), (values, spec.head_dim_vo)):
        like = torch.empty(0, dtype=spec.kv_dtype, device=device)
        rows = like.new_full((int(indptr[-1]), spec.num_kv_heads, dim), torch.nan)
        for start, tensor in zip(indptr, tensors, strict=False):
            rows[start : start + len(tensor)] = tensor
        packed.append(rows)
    batch = Batch.ragged(
        qo_indptr=lengths["qo_indptr"],
        kv_indptr=indptr,
        kv_lens=lengths["kv_lens"],
        qo_starts=q_starts,
    )
    return batch, packed[0][:, 0] if spec.latent else tuple(packed)


def _paged(
    rng: np.random.Generator,
    spec: AttentionSpec,
    lengths: dict[str, Any],
    q_starts: list[int] | None,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    hidden: list[set[int]],
    page_size: int,
    kv_layout: KVLayout,
    form: str,
    pool: str,
    device: torch.device,
) -> tuple[Batch, Any]:
    exact = lengths["kv_lens_device"]
    counts = [-(-len(k) // page_size) for k in keys]
    num_pages = sum(counts) + int(rng.integers(1, 5))
    shuffled = rng.permutation(num_pages)[: sum(counts)].tolist()
    tables = [[shuffled.pop() for _ in range(count)] for count in counts]
    like = torch.empty(0, dtype=spec.kv_dtype, device=device)
    pools = _empty_pools(like, spec, num_pages, page_size, kv_layout, pool)
    views = _nhd(pools, spec, kv_layout)
    for table, k, v, behind in zip(tables, keys, values, hidden, strict=True):
        for j, page in enumerate(table):
            part = slice(j * page_size, min((j + 1) * page_size, len(k)))
            if behind.issuperset(range(j * page_size, (j + 1) * page_size)):
                # Where only the device knows where windows begin, the host can tell no other id from a wrong one.
                table[j] = -1 if exact is not None else int(rng.choice(ABSURD_PAGES))
                continue
            for tensor, view in zip((k, v), views, strict=False):
                view[page, : part.stop - part.start] = tensor[part]
    for table, bound in zip(tables, lengths["kv_lens"].tolist(), strict=True):
        table += rng.integers(0, num_pages, -(-bound // page_size) - len(table)).tolist()
    width = max(map(len, tables), default=0) + int(rng.integers(0, 3))
    if form == "padded":
        padded = np.asarray(rng.choice(ABSURD_PAGES, (len(tables), width)), np.int64)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        batch = Batch.padded(
            query_start_loc=lengths["qo_indptr"],
            seq_lens=lengths["kv_lens"],
            kv_lens_device=exact,
            block_table=padded,
            qo_starts=q_starts,
        )
    else:
        spare = [[*table, int(rng.choice(ABSURD_PAGES))] if rng.random() < 0.3 else table for table in tables]
        batch = Batch.csr(
            qo_indptr=lengths["qo_indptr"],
            kv_lens=lengths["kv_lens"],
            kv_indptr=np.append(0, np.cumsum([len(table) for table in spare], dtype=np.int64)),
            kv_indices=np.asarray([page for table in spare for page in table], np.int64),
            kv_lens_device=exact,
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
