"""Traced functions over paged batches, against FlexAttention's eager mode on the same functions and dense tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from solving import each_backend_and_dtype
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import and_masks, or_masks

import sennit
from sennit import variants
from sennit.check.compare import compare
from sennit.check.problems import Problem, make_problem

Q_LENS, KV_LENS = [33, 0, 5, 1, 3], [33, 9, 20, 7, 3]
LONGEST, REQUESTS, HEADS = max(KV_LENS), len(KV_LENS), 4
RNG = torch.Generator().manual_seed(3)

slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
prefix_length = torch.tensor([9, 2, 15, 0, 1], dtype=torch.int32)
document_id = torch.randint(0, 3, (REQUESTS, LONGEST), generator=RNG)
bias = torch.randn(REQUESTS, HEADS, LONGEST, LONGEST, generator=RNG)
table = torch.randn(HEADS, 2 * 6 + 1, generator=RNG).to(torch.bfloat16)
gain = torch.tensor(0.7, dtype=torch.float64)

Mods = tuple[Callable[..., Any] | None, Callable[..., Any] | None]


def natten(b, h, q_idx, kv_idx):
    q_x, q_y = q_idx // 6, q_idx % 6
    kv_x, kv_y = kv_idx // 6, kv_idx % 6
    return ((q_x.clamp(1, 4) - kv_x).abs() <= 1) & ((q_y.clamp(1, 4) - kv_y).abs() <= 1)


def some_heads(b, h, q_idx, kv_idx):
    return (h != 1) & (kv_idx % 3 != b)


def causal_by_score(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def full_bias(bias: torch.Tensor) -> Callable[..., Any]:
    return lambda score, b, h, q_idx, kv_idx: score + bias[b, h, q_idx, kv_idx]


def scaled(gain: torch.Tensor) -> Callable[..., Any]:
    return lambda score, b, h, q_idx, kv_idx: score * gain - 0.1 * (b + 1)


def packed_documents(document_id: torch.Tensor) -> Callable[..., Any]:
    return and_masks(variants.causal, variants.document(document_id))


# (score_mod, mask_mod) made of the tensors that they close over, and those tensors.
CASES: dict[str, tuple[Callable[..., Mods], dict[str, torch.Tensor]]] = {
    "causal": (lambda: (None, variants.causal), {}),
    "causal_by_score": (lambda: (causal_by_score, None), {}),
    "sliding_window": (lambda: (None, variants.sliding_window(5)), {}),
    "natten": (lambda: (None, natten), {}),
    "rows_that_see_nothing": (lambda: (None, some_heads), {}),
    "prefix_lm": (lambda prefix_length: (None, variants.prefix_lm(prefix_length)), {"prefix_length": prefix_length}),
    "documents": (lambda document_id: (None, packed_documents(document_id)), {"document_id": document_id}),
    "alibi": (lambda slopes: (variants.alibi(slopes), None), {"slopes": slopes}),
    "soft_cap": (lambda: (variants.soft_cap(1.5), None), {}),
    "relative_bias": (lambda table: (variants.relative_bias(table, 6), None), {"table": table}),
    "full_bias": (lambda bias: (full_bias(bias), None), {"bias": bias}),
    "scaled": (lambda gain: (scaled(gain), None), {"gain": gain}),
    "alibi_and_documents": (
        lambda slopes, document_id: (variants.alibi(slopes), packed_documents(document_id)),
        {"slopes": slopes, "document_id": document_id},
    ),
    "bias_and_prefix_or_documents": (
        lambda bias, prefix_length, document_id: (
            full_bias(bias),
            or_masks(variants.prefix_lm(prefix_length), variants.document(document_id)),
        ),
        {"bias": bias, "prefix_length": prefix_length, "document_id": document_id},
    ),
}


@dataclass(frozen=True, eq=False)
class Dense:
    """A paged problem laid out densely, solved by FlexAttention: what ``compare`` asks for."""

    problem: Problem
    score_mod: Callable[..., Any] | None
    mask_mods: Sequence[Callable[..., Any]]

    @property
    def spec(self) -> sennit.AttentionSpec:
        return self.problem.spec

    def solve(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        p = self.problem
        shape = (REQUESTS, LONGEST)
        q = torch.zeros(*shape, HEADS, self.spec.head_dim_qk, dtype=dtype)
        k, v = (torch.zeros(*shape, self.spec.num_kv_heads, self.spec.head_dim_qk, dtype=dtype) for _ in range(2))
        places = [
            (r, slice(kv_len - q_len, kv_len), slice(start, start + q_len))
            for r, (q_len, kv_len, start) in enumerate(zip(Q_LENS, KV_LENS, p.batch.q_starts.tolist(), strict=True))
        ]
        for r, positions, rows in places:
            q[r, positions] = p.q[rows].to(dtype)
            k[r, : KV_LENS[r]], v[r, : KV_LENS[r]] = p.keys[r].to(dtype), p.values[r].to(dtype)
        lengths = torch.tensor(KV_LENS)
        mask = and_masks(lambda b, h, q_idx, kv_idx: kv_idx < lengths[b], *self.mask_mods)
        dense_out, aux = flex.flex_attention(
            *(t.transpose(1, 2) for t in (q, k, v)),
            score_mod=self.score_mod,
            block_mask=flex.create_block_mask(mask, REQUESTS, HEADS, LONGEST, LONGEST, device="cpu"),
            scale=p.sm_scale,
            enable_gqa=True,
            return_aux=flex.AuxRequest(lse=True),
        )
        out, lse = torch.zeros(p.q.shape, dtype=dtype), torch.full(p.q.shape[:2], -torch.inf, dtype=dtype)
        for r, positions, rows in places:
            out[rows], lse[rows] = dense_out[r, :, positions].transpose(0, 1), aux.lse[r, :, positions].T.to(dtype)
        return out, lse


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention without torch.compile, which it otherwise uses even for its eager mode."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


@pytest.mark.usefixtures("eager_flex")
@each_backend_and_dtype(torch.float32, torch.float64)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", CASES)
def test_traced_functions_give_what_flex_attention_gives(case, causal, dtype, backend, device):
    make, captures = CASES[case]
    # The tensors that a function closes over while it is traced are not those of the run.
    score_mod, mask_mod = make(
        **{name: torch.zeros_like(tensor[:1] if tensor.ndim else tensor) for name, tensor in captures.items()}
    )
    spec = sennit.AttentionSpec(
        num_qo_heads=HEADS, num_kv_heads=2, head_dim=16, dtype=dtype, score_mod=score_mod, mask_mod=mask_mod
    )
    problem = make_problem(np.random.default_rng(5), spec, Q_LENS, KV_LENS, page_size=4, causal=causal)
    score_mod, mask_mod = make(**captures)
    masks = [mask for mask in (mask_mod, variants.causal if causal else None) if mask is not None]
    dense = Dense(problem, score_mod, masks)
    attn = sennit.BatchAttention(spec, page_size=4, device=device, backend=backend)
    plan = attn.plan(problem.batch, causal=causal)
    out, lse = attn.run(
        plan,
        problem.q.to(device),
        tuple(pool.to(device) for pool in problem.kv),
        sm_scale=problem.sm_scale,
        return_lse=True,
        captures={name: tensor.to(device) for name, tensor in captures.items()},
    )
    comparison = compare(dense, out.cpu(), lse.cpu())
    assert comparison.passed, comparison
