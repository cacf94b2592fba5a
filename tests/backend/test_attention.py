"""Every backend against the dense float64 oracle, on hostile data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from solving import BACKENDS, DEVICES, assert_right, gqa, solve

import sennit
from sennit.check.compare import compare
from sennit.check.problems import Problem, make_problem
from sennit.check.random_problems import random_problem


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_head_dims_and_dtypes_match_the_oracle(backend, dims, dtype, device):
    rng = np.random.default_rng(sum(dims))
    problem = make_problem(rng, gqa(4, *dims, dtype=dtype), [33, 1, 0, 5], [70, 41, 9, 3], device=device)
    assert_right(problem, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latent_attention_reads_v_from_the_first_columns_of_k(backend, dtype):
    spec = sennit.AttentionSpec.mla(num_qo_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, dtype=dtype)
    assert_right(make_problem(np.random.default_rng(0), spec, [9, 1, 3], [40, 65, 2], page_size=8), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", range(1, 17))
def test_every_group_size_matches_the_oracle(backend, group):
    assert_right(make_problem(np.random.default_rng(group), gqa(group, 16), [21, 1, 1], [50, 99, 1]), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("pool", ["pair", "strided", "interleaved"])
@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 16, 64, 255, 256])
def test_page_sizes_layouts_and_pools_match_the_oracle(backend, page_size, kv_layout, pool):
    rng = np.random.default_rng(page_size)
    problem = make_problem(
        rng, gqa(2, 16), [12, 1, 2], [300, 129, 1], page_size=page_size, kv_layout=kv_layout, pool=pool, form="padded"
    )
    assert_right(problem, backend)


@pytest.mark.parametrize("device", DEVICES)
def test_random_hostile_batches_are_right_and_items_equal_direct_execution(device):
    rng = np.random.default_rng(1)
    for _ in range(400):
        problem = random_problem(rng, device=device)
        assert_items_equal_direct(problem)


@pytest.mark.slow
def test_five_thousand_random_batches_executed_item_by_item_equal_direct_execution():
    rng = np.random.default_rng(2)
    for _ in range(5000):
        assert_items_equal_direct(random_problem(rng, dtype=torch.float32))


def assert_items_equal_direct(problem: Problem) -> None:
    direct = solve(problem, "reference")
    comparison = compare(problem, *direct)
    assert comparison.passed, f"{comparison}: {problem.text}"
    for options in ({}, {"split_size": 32}):
        for got, expected in zip(solve(problem, "reference-items", **options), direct, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6, msg=lambda m: f"{m}\n{problem.text}")
