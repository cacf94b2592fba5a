"""Running a hostile problem on a backend, and comparing the result with the oracle."""

from __future__ import annotations

import torch

import sennit
from sennit.check.compare import compare
from sennit.check.problems import Problem

BACKENDS = ["cpu", "reference", "reference-items"]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def solve(problem: Problem, backend: str, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    attn = sennit.BatchAttention(
        problem.spec,
        page_size=problem.page_size,
        kv_layout=problem.kv_layout,
        device=problem.q.device,
        backend=backend,
    )
    plan = attn.plan(problem.batch, causal=problem.causal, **problem.plan_options, **options)
    return attn.run(plan, problem.q, problem.kv, sm_scale=problem.sm_scale, return_lse=True, **problem.run_options)


def assert_right(problem: Problem, backend: str, **options: object) -> None:
    comparison = compare(problem, *solve(problem, backend, **options))
    assert comparison.passed, f"{comparison}: {problem.text}"


def gqa(
    group: int, dim: int, dim_vo: int | None = None, kv_heads: int = 2, dtype=torch.float32
) -> sennit.AttentionSpec:
    return sennit.AttentionSpec(
        num_qo_heads=group * kv_heads, num_kv_heads=kv_heads, head_dim_qk=dim, head_dim_vo=dim_vo or dim, dtype=dtype
    )
