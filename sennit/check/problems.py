"""Hostile attention problems: shuffled pages, NaN in unowned slots, absurd table entries, odd sizes, strided views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch

from sennit.check.functions import Functions
from sennit.check.oracle import Rules, dense_attention
from sennit.check.storage import Contents, Storage, pack_rows, place_in_pages
from sennit.plan.batch import Batch
from sennit.plan.mask import pack_mask
from sennit.plan.tree import Tree
from sennit.pools import KVLayout
from sennit.spec import AttentionSpec

__all__ = ["Problem", "common_rules", "make_problem"]


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
        page_size, kv_layout, form, pool: see :class:`Storage`.
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
    contents = Contents(
        spec=spec,
        qo_indptr=np.append(0, np.cumsum(q_lens, dtype=np.int64)).astype(length_dtype),
        q_starts=q_starts if gaps else None,
        kv_lens=np.asarray(kv_lens if bounds is None else bounds, np.int64).astype(length_dtype),
        exact=None if bounds is None else torch.tensor(kv_lens, dtype=torch.int32, device=device),
        keys=keys,
        values=values,
        behind=[
            _behind_window(spec, n, max(q_len, len(parents or ())))
            for n, q_len, parents in zip(kv_lens, q_lens, trees or [None] * len(q_lens), strict=True)
        ],
    )
    storage = Storage(page_size, kv_layout, form, pool)
    if page_size is None:
        batch, kv = pack_rows(rng, contents, q.device)
    else:
        batch, kv = place_in_pages(rng, contents, storage, q.device)
    captures = {} if functions is None else {name: t.to(q.device) for name, t in functions.captures.items()}
    run_options: dict[str, Any] = {"captures": captures} if captures else {}
    for name, wanted in (("sinks", spec.learned_sinks), ("alibi_slopes", spec.alibi)):
        if wanted:
            run_options[name] = normal(spec.num_qo_heads, dtype=torch.float32)
    plan_options: dict[str, Any] = {}
    parents: Sequence[Sequence[int] | None] = trees or [None] * len(q_lens)
    if trees is not None:
        plan_options["tree"] = [None if nodes is None else Tree(nodes) for nodes in parents]
    masks = []
    if masked:
        shapes = zip(q_lens, kv_lens if bounds is None else bounds, strict=True)
        masks = [torch.from_numpy(rng.random(shape) < 0.67).to(q.device) for shape in shapes]
        plan_options["packed_mask"] = pack_mask(masks).to(q.device)
    common = common_rules(spec, functions, run_options)
    rules = [
        replace(common, parents=nodes, mask=masks[r][:, : kv_lens[r]] if masked else None, request=r)
        for r, nodes in enumerate(parents)
    ]
    text = f"{batch} {spec} {storage} causal={flags} gaps={gaps} trees={trees} masked={masked} kv_lens={list(kv_lens)}"
    scale = float(rng.choice([1.0, 0.5, 2.0])) * spec.head_dim_qk**-0.5
    return Problem(
        spec, page_size, kv_layout, batch, flags, q, kv, keys, values, scale, rules, plan_options, run_options, text
    )  # fmt: skip


def common_rules(spec: AttentionSpec, functions: Functions | None, run_options: Mapping[str, Any]) -> Rules:
    """What all requests of a layer have in common."""
    given, captures = functions or Functions(), run_options.get("captures", {})
    return Rules(
        window_left=spec.window_left,
        window_right=spec.window_right,
        num_sink_tokens=spec.num_sink_tokens,
        logits_soft_cap=spec.logits_soft_cap,
        alibi_slopes=run_options.get("alibi_slopes"),
        sinks=run_options.get("sinks"),
        score_mod=_closed_over(given.score_mod, captures),
        mask_mod=_closed_over(given.mask_mod, captures),
    )


def _closed_over(function: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The same function, closing over the same tensors where they are on the problem's device."""
    if function is None or not function.__closure__:
        return function
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    closure = tuple(CellType(tensors.get(name, cell.cell_contents)) for name, cell in cells)
    return FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)


def _behind_window(spec: AttentionSpec, kv_len: int, rows: int) -> range:
    """Keys that neither the last ``rows`` positions nor any later one can see."""
    if spec.window_left is None:
        return range(0)
    return range(spec.num_sink_tokens, max(kv_len - rows - spec.window_left, 0))


def _query_rows(rng: np.random.Generator, q_lens: Sequence[int], gaps: bool) -> tuple[list[int], int]:
    if not gaps:
        return (np.cumsum(q_lens) - np.asarray(q_lens)).astype(int).tolist() if len(q_lens) else [], sum(q_lens)
    starts, row = [0] * len(q_lens), int(rng.integers(0, 3))
    for r in rng.permutation(len(q_lens)):
        starts[r] = row
        row += q_lens[r] + int(rng.integers(0, 3))
    return starts, row + int(rng.integers(0, 3))
