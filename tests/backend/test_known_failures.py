"""What has gone wrong in other kernels and planners, each as a test."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from solving import assert_right, each_backend, gqa, solve

import sennit
from sennit.check.compare import compare
from sennit.check.problems import make_problem
from sennit.plan.cost import KernelConfig, Strand
from sennit.plan.plan import make_plan
from sennit.plan.tensors import PlanArrays

SPEC = gqa(2, 16)


@pytest.mark.parametrize("form", ["csr", "padded"])
def test_page_ids_are_checked_against_the_pool(form):
    problem = make_problem(np.random.default_rng(0), SPEC, [3], [40], page_size=4, form=form)
    attn = sennit.BatchAttention(SPEC, page_size=4, device="cpu")
    plan = attn.plan(problem.batch)
    small = tuple(pool[:5] for pool in problem.kv)
    with pytest.raises(sennit.PlanMismatch, match="kv_pages"):
        attn.run(plan, problem.q, small, sm_scale=1.0)
    problem.batch.pages.entries[2] = -7
    with pytest.raises(sennit.InvalidInput, match="page table of request 0"):
        attn.plan(problem.batch)


@each_backend
@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32, np.int16, np.uint8, torch.int64, torch.int32])
def test_lengths_of_any_integer_dtype_are_read_as_what_they_are(dtype, backend, device):
    kinds = {"length_dtype": dtype} if not isinstance(dtype, torch.dtype) else {}
    problem = make_problem(np.random.default_rng(1), SPEC, [3, 1], [40, 9], page_size=4, device=device, **kinds)
    if isinstance(dtype, torch.dtype):
        indptr = torch.tensor([0, 3, 4], dtype=dtype)
        pages = problem.batch.pages
        batch = sennit.Batch.csr(
            qo_indptr=indptr, kv_lens=torch.tensor([40, 9], dtype=dtype), kv_indices=pages.entries,
            kv_indptr=torch.tensor([*pages.starts, pages.starts[-1] + pages.widths[-1]], dtype=dtype),
        )  # fmt: skip
        problem = dataclasses.replace(problem, batch=batch)
    assert_right(problem, backend)


@each_backend
def test_pages_beyond_32_bit_offsets_are_the_ones_that_are_read(backend, device):
    spec = gqa(1, 64, kv_heads=1, dtype=torch.bfloat16)
    page, far = 2**16, 2**31 // (2**16 * 64)  # the far page begins at element 2**31, where an int32 turns negative
    # On a CPU mere addresses: what is not written takes no memory.
    pools = tuple(torch.empty(far + 1, page, 1, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    keys = [torch.randn(9, 1, 64, device=device).bfloat16() for _ in range(2)]
    for pool, rows in zip(pools, keys, strict=True):
        pool[far, :9] = rows
        pool[0, :9] = torch.nan
    q = torch.randn(2, 1, 64, device=device).bfloat16()
    attn = sennit.BatchAttention(spec, page_size=page, device=device, backend=backend)
    batch = sennit.Batch.csr(qo_indptr=[0, 2], kv_lens=[9], kv_indptr=[0, 1], kv_indices=[far])
    plan = attn.plan(batch)
    attn.append(plan, keys[0][7:], keys[1][7:], pools)
    problem = make_problem(np.random.default_rng(2), spec, [2], [9], device=device)
    problem = dataclasses.replace(problem, q=q, keys=[keys[0]], values=[keys[1]], sm_scale=0.1)
    comparison = compare(problem, *attn.run(plan, q, pools, sm_scale=0.1, return_lse=True))
    assert comparison.passed, comparison


def test_plans_and_kernels_cannot_disagree_about_chunks_since_kernels_only_read_them():
    problem = make_problem(np.random.default_rng(3), SPEC, [70, 1], [300, 900], page_size=4)
    attn = sennit.BatchAttention(SPEC, page_size=4, device="cpu", backend="reference-items")
    plan = attn.plan(problem.batch)
    arrays = PlanArrays(plan.tensors.host.numpy())
    right = attn.run(plan, problem.q, problem.kv, sm_scale=1.0)
    arrays.items[:, 6] = arrays.items[:, 5]  # no item has a key any more
    arrays.items[:, 8:10] = arrays.items[:, 5:6]
    assert not attn.run(plan, problem.q, problem.kv, sm_scale=1.0).any()
    assert right.any()


def test_every_segment_has_a_tile_of_its_own_size_whatever_the_average():
    config = KernelConfig(
        "two", (Strand("wide", 128, 128, 1.0, 1.85, 2.06, 1.0), Strand("narrow", 16, 64, 0.5, 0.4, 1.03, 0.4)), 132
    )
    spec = gqa(4, 128, kv_heads=8, dtype=torch.bfloat16)
    plan = make_plan(
        sennit.Batch.parse("2048@2048 + 300*1@2048", page_size=16), spec=spec, owner="", backend="",
        configs=(config,), page_size=16, device=torch.device("cpu"),
    )  # fmt: skip
    wide = plan.schedule.items[:, : plan.schedule.worker_indptr[0, -1]]
    narrow = plan.schedule.items[:, plan.schedule.worker_indptr[1, 0] :]
    assert set(wide[0].tolist()) == {0}
    assert set(narrow[0].tolist()) == set(range(1, 301))


@each_backend
def test_partial_results_have_room_for_any_number_of_kv_heads(backend, device):
    spec = gqa(1, 8, kv_heads=11)
    problem = make_problem(np.random.default_rng(4), spec, [1, 9], [700, 300], page_size=4, device=device)
    assert_right(problem, backend)
    assert_right(problem, backend, split_size=4)


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "sinks", "alibi_slopes", "captures"])
def test_no_option_is_accepted_and_ignored(name):
    problem = make_problem(np.random.default_rng(5), SPEC, [2], [9], page_size=4)
    attn = sennit.BatchAttention(SPEC, page_size=4, device="cpu")
    plan = attn.plan(problem.batch)
    value = {"x": torch.zeros(4)} if name == "captures" else 0.5 if "scale" in name else torch.zeros(4)
    with pytest.raises((sennit.InvalidInput, sennit.UnsupportedFeature), match=name):
        attn.run(plan, problem.q, problem.kv, sm_scale=1.0, **{name: value})


@each_backend
def test_the_lse_is_a_natural_logarithm_everywhere(backend, device):
    attn = sennit.BatchAttention(gqa(1, 8, kv_heads=1), page_size=4, device=device, backend=backend)
    plan = attn.plan(sennit.Batch.parse("1@1000", page_size=4), split_size=64)
    pools = torch.zeros(250, 4, 1, 8, device=device), torch.ones(250, 4, 1, 8, device=device)
    out, lse = attn.run(plan, torch.zeros(1, 1, 8, device=device), pools, sm_scale=1.0, return_lse=True)
    assert lse.item() == pytest.approx(np.log(1000), rel=1e-6)
    merged, merged_lse = sennit.merge_states([(out, lse), (out, lse)])
    assert merged_lse.item() == pytest.approx(np.log(2000), rel=1e-6)
    torch.testing.assert_close(merged, out)


@each_backend
def test_partial_results_without_a_key_merge_to_zeros_and_never_to_nan(backend, device):
    spec = SPEC.replace(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx < 0)
    problem = make_problem(np.random.default_rng(6), SPEC, [2, 1], [200, 100], page_size=4, device=device)
    problem = dataclasses.replace(problem, spec=spec)
    out, lse = solve(problem, backend, split_size=32)
    assert not out.any()
    assert torch.isneginf(lse).all()
    empty = torch.zeros(2, 1, 4, device=device), torch.full((2, 1), -torch.inf, device=device)
    merged, merged_lse = sennit.merge_states([empty] * 3)
    assert not merged.any()
    assert torch.isneginf(merged_lse).all()


def test_a_plan_whose_buffers_were_rewritten_is_refused():
    problem = make_problem(np.random.default_rng(8), SPEC, [3, 1], [41, 9], page_size=16)
    attn = sennit.BatchAttention(SPEC, page_size=16, device="cpu")
    buffers = attn.buffers(max_requests=4, max_tokens=16, max_pages=32)
    first = attn.plan(problem.batch, into=buffers)
    attn.plan(problem.batch, into=buffers)
    with pytest.raises(sennit.StalePlan):
        attn.run(first, problem.q, problem.kv, sm_scale=1.0)


def test_keys_of_operators_leave_no_parameter_out():
    bias, other = torch.zeros(4), torch.zeros(4)
    changed = [
        {}, {"num_qo_heads": 8}, {"num_kv_heads": 4}, {"head_dim": 8}, {"head_dim_qk": 24, "head_dim_vo": 16},
        {"dtype": torch.float16}, {"kv_dtype": torch.bfloat16}, {"window_left": 3}, {"window_left": 4},
        {"window_right": 3}, {"window_left": 3, "num_sink_tokens": 2}, {"learned_sinks": True}, {"alibi": True},
        {"logits_soft_cap": 5.0}, {"logits_soft_cap": 5.5}, {"score_mod": lambda s, b, h, q, k: s + bias[h]},
        {"score_mod": lambda s, b, h, q, k: s + other[h]}, {"score_mod": lambda s, b, h, q, k: s + 2 * bias[h]},
        {"mask_mod": lambda b, h, q, k: q > k}, {"num_kv_heads": 1, "latent": True},
    ]  # fmt: skip
    specs = [SPEC.replace(**fields) for fields in changed]
    assert len({spec.key for spec in specs}) == len(specs)
    assert len(set(specs)) == len(specs)


def test_a_backend_that_fails_raises_and_is_not_only_logged(monkeypatch):
    from sennit.backends.reference import ReferenceBackend

    problem = make_problem(np.random.default_rng(9), SPEC, [3], [41], page_size=16)
    attn = sennit.BatchAttention(SPEC, page_size=16, device="cpu", backend="reference")
    plan = attn.plan(problem.batch)

    def fail(self, launch):
        raise RuntimeError("launch failed")

    monkeypatch.setattr(ReferenceBackend, "attend", fail)
    with pytest.raises(RuntimeError, match="launch failed"):
        attn.run(plan, problem.q, problem.kv, sm_scale=1.0)
