"""Every backend against the dense float64 oracle, on hostile data."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from solving import (
    BACKENDS,
    COMPUTES,
    DEVICES,
    DTYPES,
    FLOATS,
    RUNS_ON,
    assert_right,
    each_backend,
    each_backend_and_dtype,
    each_backend_and_specs,
    gqa,
    solve,
)

import sennit
from sennit.backends import registry
from sennit.bench.correctness import find_truth
from sennit.check.compare import compare
from sennit.check.problems import Problem, make_problem
from sennit.check.random_problems import random_problem

DIMS = [(n, n) for n in (1, 2, 7, 8, 16, 31, 33, 40, 64, 80, 96, 100, 128, 160, 256)]
PAIRS = {
    f"{str(a)[6:]}-of-{str(b)[6:]}": [
        gqa(4, dim, dim_vo, dtype=a).replace(kv_dtype=b) for dim, dim_vo in ((64, 64), (33, 7))
    ]
    for a, b in itertools.permutations(FLOATS, 2)
}
MIXED = {"float32-of-float16": PAIRS.pop("float32-of-float16")}


@pytest.mark.compiler
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_backend_does_not_take_it_refuses_with_the_reason(backend):
    runs_here = [device for device in RUNS_ON[backend] if device in DEVICES]
    for device, dtype in itertools.product(runs_here, set(DTYPES) - set(COMPUTES[backend])):
        for spec in (gqa(2, 16, dtype=dtype), gqa(2, 16).replace(kv_dtype=dtype)):
            with pytest.raises(sennit.UnsupportedFeature, match=rf"{backend}.*dtype={dtype} is not computed"):
                sennit.BatchAttention(spec, page_size=4, device=device, backend=backend)
    for device in {"cpu", "cuda"} - set(RUNS_ON[backend]):
        support = registry.load(backend).available(torch.device(device))
        assert not support.accepted
        assert f"not on {device}" in support.reason


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_by_itself_a_cpu_takes_its_own_backend_and_for_float64_the_reference(dtype):
    attn = sennit.BatchAttention(gqa(2, 16, dtype=dtype), page_size=4, device="cpu")
    plan = attn.plan(sennit.Batch.parse("3@9", page_size=4))
    assert plan.backend == ("cpu" if dtype in COMPUTES["cpu"] else "reference")


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_by_itself_a_gpu_takes_the_backend_made_for_it_then_triton_and_for_float64_the_reference(dtype):
    attn = sennit.BatchAttention(gqa(2, 16, dtype=dtype), page_size=4, device="cuda")
    plan = attn.plan(sennit.Batch.parse("3@9", page_size=4))
    taking = [name for name in ("hopper", "triton", "reference") if name in RUNS_ON and dtype in COMPUTES[name]]
    assert plan.backend == taking[0]


@each_backend_and_dtype(*DTYPES)
@pytest.mark.parametrize("dims", [*DIMS, (192, 128), (128, 192), (33, 7), (7, 33), (576, 512)], ids=str)
def test_head_dims_and_dtypes_match_the_oracle(dims, dtype, backend, device):
    rng = np.random.default_rng(sum(dims))
    problem = make_problem(rng, gqa(4, *dims, dtype=dtype), [33, 1, 0, 5], [70, 41, 9, 3], device=device)
    assert_right(problem, backend)


@each_backend_and_dtype(torch.float32, torch.bfloat16)
def test_latent_attention_reads_v_from_the_first_columns_of_k(backend, dtype, device):
    spec = sennit.AttentionSpec.mla(num_qo_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, dtype=dtype)
    problem = make_problem(np.random.default_rng(0), spec, [9, 1, 3], [40, 65, 2], page_size=8, device=device)
    assert_right(problem, backend)


@each_backend
@pytest.mark.parametrize("group", [*range(1, 18), 71, 128])
def test_every_group_size_matches_the_oracle(group, backend, device):
    rng = np.random.default_rng(group)
    assert_right(make_problem(rng, gqa(group, 16), [21, 1, 1], [50, 99, 1], device=device), backend)


@each_backend_and_dtype(*FLOATS)
@pytest.mark.parametrize("group", [1, 3])
def test_any_number_of_rows_around_the_borders_of_tiles_matches_the_oracle(group, dtype, backend, device):
    rows = [*range(1, 19), *(n + d for n in (32, 64, 128, 256, 320) for d in (-1, 0, 1))]
    rng = np.random.default_rng(group)
    q_lens = sorted({-(-n // group) for n in rows})
    kv_lens = [n + int(rng.integers(40)) for n in q_lens]
    for kv_heads in (1, 2):
        spec = gqa(group, 16, kv_heads=kv_heads, dtype=dtype)
        assert_right(make_problem(rng, spec, q_lens, kv_lens, device=device), backend)


@each_backend_and_dtype(*FLOATS)
@pytest.mark.parametrize("causal", [True, False])
def test_any_number_of_keys_around_the_borders_of_blocks_matches_the_oracle(causal, dtype, backend, device):
    kv_lens = sorted({n + d for n in (1, 4, 8, 16, 32, 64, 128, 256, 384, 512) for d in (-1, 0, 1)})
    rng = np.random.default_rng(0)
    for rows in (1, 23):
        spec = gqa(1, 24, kv_heads=1, dtype=dtype)
        problem = make_problem(rng, spec, [rows] * len(kv_lens), kv_lens, causal=causal, device=device)
        assert_right(problem, backend)
        assert_right(problem, backend, split_size=64)


@each_backend_and_specs(MIXED)
def test_queries_and_keys_of_different_dtypes_match_the_oracle(specs, backend, device):
    assert_mixed_right(specs, backend, device)


@pytest.mark.slow
@each_backend_and_specs(PAIRS)
def test_queries_and_keys_of_any_two_dtypes_match_the_oracle(specs, backend, device):
    """Each pair of dtypes is a library of its own on the CPU backend."""
    assert_mixed_right(specs, backend, device)


def assert_mixed_right(specs, backend, device):
    for seed, spec in enumerate(specs):
        rng = np.random.default_rng(seed)
        assert_right(make_problem(rng, spec, [33, 1, 0, 5, 90], [70, 41, 9, 3, 200], device=device), backend)


@each_backend_and_dtype(*FLOATS)
@pytest.mark.parametrize("sm_scale", [-0.3, 0.0, -0.0, 1e-6, 1e-42, 1e-60, 1e3, -1e3, 1e12, -1e12])
def test_any_scale_matches_the_oracle(sm_scale, dtype, backend, device):
    spec = gqa(3, 40, dtype=dtype)
    for fields in ({}, {"logits_soft_cap": 9.0, "alibi": True}):
        rng = np.random.default_rng(3)
        problem = make_problem(rng, spec.replace(**fields), [33, 1, 7], [150, 141, 9], device=device)
        assert_right(replace(problem, sm_scale=sm_scale), backend)


@each_backend
def test_sums_over_thousands_of_keys_are_as_exact_as_those_over_few(backend, device):
    """A sum to which every key is added in turn loses a digit by 8192 keys."""
    problem = make_problem(np.random.default_rng(3), gqa(2, 64), [40, 1], [8192, 8192], device=device)
    check = find_truth(problem).check(solve(problem, backend)[0])
    assert check.passed, check


@each_backend_and_dtype(*FLOATS)
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_garbage_in_slots_that_nobody_owns_reaches_no_result(garbage, dtype, backend, device):
    for dim, page_size, pool in ((16, 16, "pair"), (33, 3, "strided"), (64, 40, "interleaved"), (24, None, "pair")):
        rng = np.random.default_rng(dim)
        problem = make_problem(
            rng, gqa(2, dim, dtype=dtype), [3, 1, 40], [41, 9, 101], page_size=page_size, pool=pool, device=device
        )
        for part in problem.kv if isinstance(problem.kv, tuple) else (problem.kv,):
            whole = part if part._base is None else part._base
            whole[whole.isnan()] = garbage
        assert_right(problem, backend)


@each_backend
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("pool", ["pair", "strided", "interleaved"])
@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 16, 17, 64, 255, 256])
def test_page_sizes_layouts_and_pools_match_the_oracle(page_size, kv_layout, pool, backend, device):
    rng = np.random.default_rng(page_size)
    storage = {"page_size": page_size, "kv_layout": kv_layout, "pool": pool, "form": "padded"}
    problem = make_problem(rng, gqa(2, 16), [12, 1, 2], [300, 129, 1], **storage, device=device)
    assert_right(problem, backend)


@pytest.mark.parametrize("device", DEVICES)
def test_random_hostile_batches_are_right_and_items_equal_direct_execution(device):
    rng = np.random.default_rng(1)
    for _ in range(400):
        problem = random_problem(rng, device=device)
        assert_items_equal_direct(problem)


@each_backend_and_dtype(*FLOATS)
def test_random_hostile_batches_are_right_split_and_whole(dtype, backend, device):
    """Without users' functions, each of which the CPU backend compiles."""
    rng = np.random.default_rng(3)
    for _ in range(40):
        problem = random_problem(rng, dtype=dtype, device=device)
        if problem.spec.score_mod is None and problem.spec.mask_mod is None:
            assert_right(problem, backend)
            assert_right(problem, backend, split_size=32)


@pytest.mark.parametrize(
    "count", [pytest.param(1000, marks=pytest.mark.slow), pytest.param(5000, marks=pytest.mark.thorough)]
)
def test_thousands_of_random_batches_executed_item_by_item_equal_direct_execution(count):
    rng = np.random.default_rng(2)
    for _ in range(count):
        assert_items_equal_direct(random_problem(rng, dtype=torch.float32))


def assert_items_equal_direct(problem: Problem) -> None:
    direct = solve(problem, "reference")
    comparison = compare(problem, *direct)
    assert comparison.passed, f"{comparison}: {problem.text}"
    for options in ({}, {"split_size": 32}):
        for got, expected in zip(solve(problem, "reference-items", **options), direct, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6, msg=lambda m: f"{m}\n{problem.text}")
