"""Every mask and every change of the logits, alone and together, against the dense oracle; and what plans refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from solving import assert_right, attention_for, each_backend, each_backend_and_dtype, gqa, solve

import sennit
from sennit.check.functions import random_functions
from sennit.check.problems import make_problem

WINDOWS = {
    "left": {"window_left": 20},
    "none-behind": {"window_left": 0},
    "right": {"window_right": 3},
    "both": {"window_left": 9, "window_right": 2},
    "sinks": {"window_left": 20, "num_sink_tokens": 5},
    "sinks-over-pages": {"window_left": 7, "num_sink_tokens": 37},
}
SCORES = {"soft-cap": {"logits_soft_cap": 2.0}, "alibi": {"alibi": True}, "learned-sinks": {"learned_sinks": True}}
LENGTHS = [33, 1, 0, 5, 7, 2], [150, 141, 9, 3, 0, 80]
TREES = [None, [-1], [], None, None, [-1, 0, 0, 1, 1, 3]]


@each_backend
@pytest.mark.parametrize("page_size", [4, 16, None])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", [*WINDOWS, *SCORES])
def test_one_feature_alone_matches_the_oracle(name, causal, page_size, backend, device):
    spec = gqa(3, 16).replace(**(WINDOWS | SCORES)[name])
    problem = make_problem(np.random.default_rng(1), spec, *LENGTHS, page_size=page_size, causal=causal, device=device)
    assert_right(problem, backend)
    assert_right(problem, backend, split_size=24)


@each_backend
@pytest.mark.parametrize("window", [{}, {"window_left": 20}, {"window_left": 2, "num_sink_tokens": 3}])
def test_trees_match_the_oracle_alone_and_with_windows_and_alibi(window, backend, device):
    for seed, spec in enumerate([gqa(2, 16), gqa(2, 16).replace(alibi=True)]):
        rng = np.random.default_rng(seed)
        chain_of_40 = [-1, *range(39)]
        wide = [-1] * 35
        trees = [chain_of_40, wide, *TREES[2:]]
        problem = make_problem(rng, spec.replace(**window), *LENGTHS, page_size=4, trees=trees, device=device)
        assert_right(problem, backend)
        assert_right(problem, backend, split_size=24)


def test_a_chain_is_what_causality_is():
    rng = np.random.default_rng(2)
    problem = make_problem(rng, gqa(2, 16), [5], [40], trees=[[-1, 0, 1, 2, 3, 4, 5]])
    plain = make_problem(np.random.default_rng(2), gqa(2, 16), [5], [40])
    assert torch.equal(solve(problem, "reference")[0], solve(plain, "reference")[0])


@each_backend
def test_packed_masks_match_the_oracle_alone_and_with_a_window(backend, device):
    for spec in (gqa(2, 16), gqa(2, 16).replace(window_left=9, num_sink_tokens=2)):
        for page_size in (4, None):
            rng = np.random.default_rng(3)
            problem = make_problem(rng, spec, *LENGTHS, page_size=page_size, masked=True, causal=False, device=device)
            assert_right(problem, backend)


@each_backend_and_dtype(torch.float32, torch.bfloat16, torch.float64)
def test_functions_match_calling_them_on_grids(dtype, backend, device):
    rng = np.random.default_rng(4)
    kept = torch.promote_types(dtype, torch.float32)
    for _ in range(12):
        functions = random_functions(rng, heads=6, requests=6, positions=160, dtype=kept)
        spec = gqa(3, 16, dtype=dtype).replace(window_left=[None, 40][int(rng.integers(2))])
        assert_right(make_problem(rng, spec, *LENGTHS, page_size=4, functions=functions, device=device), backend)


@each_backend
def test_latent_attention_has_every_feature_too(backend, device):
    spec = sennit.AttentionSpec.mla(num_qo_heads=4, kv_lora_rank=16, qk_rope_head_dim=8, dtype=torch.float32)
    spec = spec.replace(
        window_left=20, num_sink_tokens=3, learned_sinks=True, alibi=True, logits_soft_cap=3.0
    )  # fmt: skip
    rng = np.random.default_rng(5)
    functions = random_functions(rng, heads=4, requests=6, positions=160, dtype=torch.float32)
    options = {"functions": functions, "trees": TREES, "masked": True, "device": device}
    assert_right(make_problem(rng, spec, *LENGTHS, **options), backend)


def test_a_sink_alone_gives_zeros_and_its_own_logit():
    spec = gqa(1, 8, kv_heads=1).replace(learned_sinks=True)
    attn = sennit.BatchAttention(spec, device="cpu")
    plan = attn.plan(sennit.Batch.ragged(qo_indptr=[0, 2], kv_indptr=[0, 0]))
    kv = torch.zeros(0, 1, 8), torch.zeros(0, 1, 8)
    out, lse = attn.run(plan, torch.randn(2, 1, 8), kv, sm_scale=1.0, sinks=torch.tensor([0.7]), return_lse=True)
    assert (out == 0).all()
    assert torch.equal(lse, torch.full((2, 1), 0.7))


def test_masks_are_packed_a_request_a_time_least_significant_bit_first():
    first = torch.zeros(3, 3, dtype=torch.bool)
    first[0, 1] = first[2, 2] = True  # bits 1 and 8
    assert sennit.pack_mask([first, torch.ones(1, 2, dtype=torch.bool)]).tolist() == [2, 1, 3]
    assert sennit.pack_mask([]).numel() == 0


def test_trees_in_fixed_buffers_need_room_for_their_nodes():
    spec = gqa(2, 16)
    trees = [[-1, 0, 0], None]
    problem = make_problem(np.random.default_rng(6), spec, [3, 1], [9, 5], page_size=4, trees=trees)
    attn = sennit.BatchAttention(spec, page_size=4, device="cpu")
    options = {"causal": problem.causal, **problem.plan_options}
    small = attn.buffers(max_requests=4, max_tokens=16, max_pages=32)
    with pytest.raises(sennit.CapacityExceeded, match="max_tree_nodes"):
        attn.plan(problem.batch, into=small, **options)
    buffers = attn.buffers(max_requests=4, max_tokens=16, max_pages=32, max_tree_nodes=3)
    fixed, own = attn.plan(problem.batch, into=buffers, **options), attn.plan(problem.batch, **options)
    outs = [attn.run(plan, problem.q, problem.kv, sm_scale=1.0) for plan in (fixed, own)]
    assert torch.equal(*outs)


@each_backend
@pytest.mark.parametrize("window", [{"window_left": 5}, {"window_left": 5, "window_right": 1, "num_sink_tokens": 3}])
def test_windows_follow_exact_lengths_on_the_device(window, backend, device):
    q_lens, exact, bounds = [3, 1, 2], [30, 17, 2], [41, 17, 9]
    spec = gqa(2, 16).replace(**window)
    problem = make_problem(np.random.default_rng(7), spec, q_lens, exact, page_size=4, device=device, form="padded")
    pages = problem.batch.pages
    width = -(-max(bounds) // 4)
    table = np.full((3, width), -1)
    for r, start in enumerate(pages.starts):
        row = np.asarray(pages.entries)[start : start + pages.widths[r]]
        table[r, : min(len(row), width)] = row[:width]
        table[r, -(-exact[r] // 4) :] = 0  # bounds reach further than the sequences
        table[r][table[r] > 1000] = -1
    batch = sennit.Batch.padded(
        query_start_loc=[0, 3, 4, 6], seq_lens=bounds, block_table=torch.from_numpy(table).int().to(device),
        kv_lens_device=torch.tensor(exact, dtype=torch.int32, device=device),
    )  # fmt: skip
    attn = attention_for(problem, backend)
    plan = attn.plan(batch)
    out = attn.run(plan, problem.q, problem.kv, sm_scale=problem.sm_scale)
    torch.testing.assert_close(out.double(), problem.solve()[0], rtol=0, atol=1e-5)


@each_backend
@pytest.mark.parametrize("window_left", [30, 90])
def test_with_fixed_splits_and_a_window_a_request_keeps_its_bits(window_left, backend, device):
    fields = {"window_left": window_left, "num_sink_tokens": 5, "learned_sinks": True, "logits_soft_cap": 5.0}
    spec = gqa(2, 16).replace(**fields)
    rng = np.random.default_rng(8)
    alone = make_problem(rng, spec, [5], [150], page_size=None, device=device)
    expected = solve(alone, backend, split_size=32)
    problem = make_problem(rng, spec, [40, 5, 1], [90, 150, 300], page_size=None, device=device)
    problem.q[40:45] = alone.q
    start = int(problem.batch.kv_starts[1])
    for packed, own in zip(problem.kv, alone.kv, strict=True):
        packed[start : start + 150] = own[:150]
    problem.run_options["sinks"].copy_(alone.run_options["sinks"])
    attn = attention_for(problem, backend)
    plan = attn.plan(problem.batch, split_size=32)
    options = {"sm_scale": alone.sm_scale, "return_lse": True, **problem.run_options}
    for got, want in zip(attn.run(plan, problem.q, problem.kv, **options), expected, strict=True):
        assert torch.equal(got[40:45], want)


def test_pages_that_only_an_exact_length_sees_are_checked_too():
    spec = gqa(1, 8, kv_heads=1).replace(window_left=3)
    attn = sennit.BatchAttention(spec, page_size=4, device="cpu")
    pools = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)

    def plan(table):
        exact = torch.tensor([20], dtype=torch.int32)
        return attn.plan(
            sennit.Batch.padded(query_start_loc=[0, 1], seq_lens=[40], block_table=[table], kv_lens_device=exact)
        )

    good = plan([-1, -1, -1, -1, 1, 0, 0, 0, 0, 0])
    assert attn.run(good, torch.zeros(1, 1, 8), pools, sm_scale=1.0).shape == (1, 1, 8)
    with pytest.raises(sennit.PlanMismatch, match="more than 99 pages"):
        attn.run(plan([0, 0, 0, 0, 99, 0, 0, 0, 0, 0]), torch.zeros(1, 1, 8), pools, sm_scale=1.0)
    with pytest.raises(sennit.InvalidInput, match="page table of request 0"):
        plan([0] * 9 + [-1])
