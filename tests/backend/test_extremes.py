"""Every backend at the ends of what numbers can be: the largest logits, NaN that a request owns, lengths that lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from solving import assert_right, each_backend, gqa

import sennit
from sennit.check.compare import compare
from sennit.check.problems import make_problem

LOWEST = torch.finfo(torch.float32).min


def hide_padding(score, b, h, q_idx, kv_idx):
    return torch.where(kv_idx >= 4, score, LOWEST)


def deepen(score, b, h, q_idx, kv_idx):
    return score - 2.5e38


def packed(n: int, device: str, **fields: object) -> tuple[sennit.AttentionSpec, torch.Tensor, list[torch.Tensor]]:
    """A spec of one KV head and ``n`` tokens that are their own keys."""
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(n, 2, 8, generator=rng).to(device)
    return gqa(2, 8, kv_heads=1).replace(**fields), q, [torch.randn(n, 1, 8, generator=rng).to(device) for _ in "kv"]


def run(spec, q, kv, backend, q_len=None, **options):
    attn = sennit.BatchAttention(spec, page_size=None, device=q.device, backend=backend)
    rows = q if q_len is None else q[-q_len:]
    plan = attn.plan(sennit.Batch.ragged(qo_indptr=[0, len(rows)], kv_indptr=[0, len(q)]), **options)
    return attn.run(plan, rows, kv, sm_scale=1.0, return_lse=True)


@each_backend
@pytest.mark.parametrize("function", [hide_padding, deepen])
def test_finite_logits_stay_finite(function, backend, device):
    """The lowest float is how people hide keys: a row that sees no others attends to all of them alike."""
    spec, q, kv = packed(8, device, score_mod=function)
    out, lse = run(spec, q, kv, backend)
    torch.testing.assert_close(out[2], kv[1][:3].mean(dim=0).expand(2, -1), rtol=1e-5, atol=1e-6)
    assert (lse[2] < -1e38).all()
    assert torch.isfinite(lse).all()


@each_backend
@pytest.mark.parametrize("logit", [3e38, -3e38])
def test_products_near_the_largest_float_stay_finite(logit, backend, device):
    spec, q, kv = packed(8, device)
    q, kv[0] = torch.full_like(q, 1e19), torch.full_like(kv[0], logit / 8e19)
    out, _ = run(spec, q, kv, backend)
    torch.testing.assert_close(out[7], kv[1].mean(dim=0).expand(2, -1), rtol=1e-5, atol=1e-6)


@each_backend
@pytest.mark.parametrize("options", [{}, {"split_size": 16}], ids=["whole", "split"])
@pytest.mark.parametrize("q_len", [1, 40])
def test_nan_that_a_request_owns_reaches_output_and_lse(q_len, options, backend, device):
    """An LSE of -inf would say that there was no key, and a merge would drop the NaN without a word."""
    spec, q, kv = packed(48, device)
    kv[0][3] = torch.nan
    out, lse = run(spec, q, kv, backend, q_len, **options)
    assert out.isnan().all()
    assert lse.isnan().all()


@each_backend
@pytest.mark.parametrize("q_len", [1, 40])
def test_pages_behind_a_window_are_not_read_where_lengths_are_only_on_the_device(q_len, backend, device):
    spec = gqa(2, 16).replace(window_left=16, num_sink_tokens=3)
    length = 320
    k, v = (torch.randn(21, 16, 2, 16, generator=torch.Generator().manual_seed(i)).to(device) for i in range(2))
    table = np.arange(1, 21)

    def attend(table, **lengths):
        attn = sennit.BatchAttention(spec, page_size=16, device=device, backend=backend)
        batch = sennit.Batch.csr(
            qo_indptr=[0, q_len], kv_lens=[length], kv_indptr=[0, 20], kv_indices=table.tolist(), **lengths
        )
        q = torch.randn(q_len, 4, 16, generator=torch.Generator().manual_seed(2)).to(device)
        return attn.run(attn.plan(batch), q, (k, v), sm_scale=0.25)

    exact = attend(table)
    k[0] = v[0] = torch.nan  # a page for entries that nobody reads, as engines have one
    table[1 : (length - q_len - 16) // 16] = 0
    out = attend(table, kv_lens_device=torch.tensor([length], dtype=torch.int32, device=device))
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-6)


@each_backend
def test_lengths_on_the_device_below_zero_mean_no_keys(backend, device):
    spec = gqa(2, 16)
    attn = sennit.BatchAttention(spec, page_size=16, device=device, backend=backend)
    lengths = torch.tensor([-(2**31) + 5, 40], dtype=torch.int32, device=device)
    batch = sennit.Batch.csr(
        qo_indptr=[0, 1, 2], kv_lens=[600, 40], kv_indptr=[0, 38, 41], kv_indices=range(41), kv_lens_device=lengths
    )
    k, v = (torch.randn(41, 16, 2, 16, device=device) for _ in "kv")
    plan = attn.plan(batch)
    attn.append(plan, torch.randn(2, 2, 16, device=device), torch.randn(2, 2, 16, device=device), (k, v))
    out, lse = attn.run(plan, torch.randn(2, 4, 16, device=device), (k, v), sm_scale=0.25, return_lse=True)
    assert not out[0].any()
    assert lse[0].isneginf().all()
    assert lse[1].isfinite().all()


@each_backend
def test_the_narrowest_soft_cap_flattens_all_logits(backend, device):
    problem = make_problem(
        np.random.default_rng(3), gqa(2, 16).replace(logits_soft_cap=1.2e-38), [5, 1], [50, 9], device=device
    )
    assert_right(problem, backend)
    assert_right(replace(problem, sm_scale=1e-5), backend)


def test_soft_caps_that_are_no_numbers_of_float32_are_refused():
    with pytest.raises(sennit.InvalidInput, match="logits_soft_cap: expected a positive number"):
        gqa(2, 16).replace(logits_soft_cap=1e-46)


def test_more_rows_of_a_head_than_int32_can_number_are_refused():
    spec = sennit.AttentionSpec(num_qo_heads=128, num_kv_heads=1, head_dim=1, dtype=torch.bfloat16)
    attn = sennit.BatchAttention(spec, device="cpu", backend="reference")
    with pytest.raises(sennit.InvalidInput, match=r"at most 16777215 new tokens a request"):
        attn.plan(sennit.Batch.ragged(qo_indptr=[0, 2**24], kv_indptr=[0, 1]), causal=False)


def test_outputs_that_meet_queries_in_memory_of_numpys_are_refused():
    spec, _, kv = packed(3, "cpu")
    memory = np.zeros(60, np.float32)
    attn = sennit.BatchAttention(spec, page_size=None, device="cpu", backend="reference")
    plan = attn.plan(sennit.Batch.ragged(qo_indptr=[0, 3], kv_indptr=[0, 3]))
    q, out = (torch.from_numpy(part).view(3, 2, 8) for part in (memory[:48], memory[4:52]))
    with pytest.raises(sennit.InvalidInput, match="memory apart from q"):
        attn.run(plan, q, kv, sm_scale=1.0, out=out)


def test_nan_is_never_right_even_where_the_dtype_overflows():
    problem = make_problem(np.random.default_rng(1), gqa(2, 8, dtype=torch.float16), [5], [50])
    problem = replace(problem, q=problem.q * 1000, keys=[problem.keys[0] * 1000], sm_scale=1.0)
    nan = torch.full((5, 4, 8), torch.nan)
    assert not compare(problem, nan.half(), nan[:, :, 0]).passed
    assert compare(problem, problem.solve()[0].half(), problem.solve()[1].float()).passed
