"""Level 1 beyond plain runs: appends, slots, device lengths, outputs, packed keys, buffers, merges, fixed splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from solving import attention_for, each_backend

import sennit
from sennit.check.oracle import dense_attention
from sennit.check.problems import make_problem

SPEC = sennit.AttentionSpec(num_qo_heads=6, num_kv_heads=2, head_dim_qk=8, head_dim_vo=12, dtype=torch.float32)
MLA = sennit.AttentionSpec.mla(num_qo_heads=4, kv_lora_rank=8, qk_rope_head_dim=4, dtype=torch.float32)


def normal(*shape, device="cpu", seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def nan_pools(spec, pages, page_size, device):
    if spec.latent:
        return torch.full((pages, page_size, spec.head_dim_qk), torch.nan, device=device)
    return tuple(
        torch.full((pages, page_size, spec.num_kv_heads, dim), torch.nan, device=device)
        for dim in (spec.head_dim_qk, spec.head_dim_vo)
    )


def new_rows(spec, rows, device):
    if spec.latent:
        return normal(rows, spec.head_dim_qk, device=device), None
    k = normal(rows, spec.num_kv_heads, spec.head_dim_qk, device=device)
    return k, normal(rows, spec.num_kv_heads, spec.head_dim_vo, device=device, seed=1)


@each_backend
@pytest.mark.parametrize("spec", [SPEC, MLA], ids=["gqa", "mla"])
def test_appended_tokens_are_what_attention_sees_chunk_after_chunk(spec, backend, device):
    attn = sennit.BatchAttention(spec, page_size=4, device=device, backend=backend)
    pools = nan_pools(spec, 9, 4, device)
    q = normal(13, spec.num_qo_heads, spec.head_dim_qk, device=device, seed=2)
    k, v = new_rows(spec, 13, device)
    got = []
    for start, end in ((0, 5), (5, 6), (6, 13)):
        batch = sennit.Batch.csr(qo_indptr=[0, end - start], kv_lens=[end], kv_indptr=[0, 4], kv_indices=[7, 2, 8, 0])
        plan = attn.plan(batch)
        rows = slice(start, end)
        attn.append(plan, k[rows], None if v is None else v[rows], pools)
        got.append(attn.run(plan, q[rows], pools, sm_scale=0.3))
    keys = k[:, None] if spec.latent else k
    values = keys[..., : spec.head_dim_vo] if v is None else v
    expected, _ = dense_attention(q, keys, values, causal=True, sm_scale=0.3)
    torch.testing.assert_close(torch.cat(got).double(), expected, rtol=1e-5, atol=1e-6)


@each_backend
def test_append_writes_only_the_new_slots_and_skips_negative_positions(backend, device):
    attn = sennit.BatchAttention(SPEC, page_size=4, device=device, backend=backend)
    pools = nan_pools(SPEC, 4, 4, device)
    k, v = new_rows(SPEC, 7, device)
    batch = sennit.Batch.csr(qo_indptr=[0, 5, 7], kv_lens=[3, 6], kv_indptr=[0, 1, 3], kv_indices=[3, 1, 0])
    attn.append(attn.plan(batch), k, v, pools)
    for pool, rows in zip(pools, (k, v), strict=True):
        written = torch.full_like(pool, torch.nan)
        written[3, :3] = rows[2:5]  # five new tokens of three: the first two have no position
        written[0, :2] = rows[5:7]
        torch.testing.assert_close(pool, written, equal_nan=True)


@each_backend
@pytest.mark.parametrize("kv_lens", [[0, 5], [5, 0], [0], [0, 0]])
def test_rows_of_requests_without_keys_are_not_stored_wherever_their_table_ends(kv_lens, backend, device):
    attn = sennit.BatchAttention(SPEC, page_size=4, device=device, backend=backend)
    pools = nan_pools(SPEC, 3, 4, device)
    pages = [-(-n // 4) for n in kv_lens]
    batch = sennit.Batch.csr(
        qo_indptr=np.arange(len(kv_lens) + 1) * 2, kv_lens=kv_lens,
        kv_indptr=np.append(0, np.cumsum(pages)), kv_indices=list(range(sum(pages))),
    )  # fmt: skip
    attn.append(attn.plan(batch), *new_rows(SPEC, 2 * len(kv_lens), device), pools)
    stored = sum(min(2, n) for n in kv_lens)
    assert int((~pools[0].isnan()).sum()) == stored * 2 * 8


@each_backend
def test_an_explicit_slot_mapping_decides_where_rows_go(backend, device):
    attn = sennit.BatchAttention(SPEC, page_size=4, device=device, backend=backend)
    k, v = new_rows(SPEC, 3, device)
    slots = [9, -1, 2]
    for mapping in (slots, torch.tensor(slots, device=device)):
        pools = nan_pools(SPEC, 4, 4, device)
        batch = sennit.Batch.padded(query_start_loc=[0, 3], seq_lens=[3], block_table=[[1]], slot_mapping=mapping)
        attn.append(attn.plan(batch), k, v, pools)
        written = torch.full_like(pools[0], torch.nan)
        written[2, 1], written[0, 2] = k[0], k[2]
        torch.testing.assert_close(pools[0], written, equal_nan=True)


@each_backend
@pytest.mark.parametrize("page_size", [1, 3, 16, 17, 64])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("pool", ["pair", "strided", "interleaved", "latent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_appends_fill_their_slots_of_any_pool_and_touch_no_other_byte(
    dtype, pool, kv_layout, page_size, backend, device
):
    heads, dim, rows, num_pages = 3, 5, 40, 70
    if pool == "latent":
        spec = sennit.AttentionSpec.mla(num_qo_heads=3, kv_lora_rank=dim, qk_rope_head_dim=2, dtype=dtype)
        shape: tuple[int, ...] = (num_pages, page_size, dim + 2)
    else:
        spec = sennit.AttentionSpec(num_qo_heads=heads, num_kv_heads=heads, head_dim=dim, dtype=dtype)
        shape = (num_pages, page_size, heads, dim) if kv_layout == "NHD" else (num_pages, heads, page_size, dim)
    memory = normal(2 * num_pages * (page_size + 2) * (heads + 2) * (dim + 3), device=device).to(dtype)
    pools = views_of(memory, shape, pool)
    k, v = new_rows(spec, rows, device)
    # Rows that come from a wider projection, with dimensions that are not the last in memory.
    k = k.to(dtype).transpose(-1, -2).contiguous().transpose(-1, -2)
    v = None if v is None else torch.cat([v, v], dim=-1)[..., :dim].to(dtype)
    attn = sennit.BatchAttention(spec, page_size=page_size, kv_layout=kv_layout, device=device, backend=backend)
    batch, slots = scattered(rows, num_pages, page_size)
    expected = memory.clone()
    for tensor, view in zip((k, v), nhd(views_of(expected, shape, pool), pool, kv_layout), strict=False):
        for row, slot in enumerate(slots):
            if slot >= 0:
                view[slot // page_size, slot % page_size] = tensor[row]
    attn.append(attn.plan(batch), k, v, pools)
    assert torch.equal(memory, expected)


def views_of(memory, shape, pool):
    """Pools of a kind in one stretch of memory, with bytes before, between and behind them that are nobody's."""
    numel = int(np.prod(shape))
    if pool == "interleaved":
        return memory[7 : 7 + 2 * numel].view(shape[0], 2, *shape[1:])
    if pool == "strided":
        first, second, *rest = shape
        wider = first, second + 1, *rest[:-1], rest[-1] + 3
        whole = memory[7 : 7 + 2 * int(np.prod(wider))].view(2, *wider)
        return tuple(part[:, 1:, ..., 2 : 2 + shape[-1]] for part in whole)
    parts = tuple(memory[start : start + numel].view(shape) for start in (7, 20 + numel))
    return parts[0] if pool == "latent" else parts


def nhd(pools, pool, kv_layout):
    if pool == "latent":
        return [pools]
    pair = [pools[:, 0], pools[:, 1]] if pool == "interleaved" else pools
    return [part.transpose(1, 2) if kv_layout == "HND" else part for part in pair]


def scattered(rows, num_pages, page_size):
    """A batch of new tokens whose slots a mapping gives, or else its tables; and the slot of each, -1 for none."""
    rng = np.random.default_rng(page_size)
    slots = rng.permutation(num_pages * page_size)[:rows]
    slots[rng.random(rows) < 0.2] = -1
    q_lens, kv_lens = [rows - 9, 0, 9], [rows - 2, 5, 9]
    pages = [-(-n // page_size) for n in kv_lens]
    table = rng.permutation(num_pages)[: sum(pages)]
    lengths = {
        "qo_indptr": np.append(0, np.cumsum(q_lens)), "kv_lens": kv_lens,
        "kv_indptr": np.append(0, np.cumsum(pages)), "kv_indices": table,
    }  # fmt: skip
    if page_size % 2:
        return sennit.Batch.csr(**lengths, slot_mapping=slots), slots.tolist()
    found = []
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for position in range(kv_len - q_len, kv_len):
            page = table[sum(pages[:request]) + position // page_size]
            found.append(int(page) * page_size + position % page_size)
    return sennit.Batch.csr(**lengths), found


@each_backend
@pytest.mark.parametrize("spec", [SPEC, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_runs_write_their_rows_of_out_and_lse_and_no_other_byte(kv_layout, spec, backend, device):
    rng = np.random.default_rng(7)
    for q_lens, kv_lens in (([3, 0, 2, 40, 1], [9, 4, 2, 300, 700]), ([1] * 30, [*range(30)])):
        problem = make_problem(rng, spec, q_lens, kv_lens, page_size=4, kv_layout=kv_layout, gaps=True, device=device)
        attn = attention_for(problem, backend)
        pools = [pool.view(torch.int32).clone() for pool in as_pair(problem.kv)]
        q = problem.q.view(torch.int32).clone()
        for split_size in (None, 32):
            plan = attn.plan(problem.batch, split_size=split_size)
            out, lse = attn.run(plan, problem.q, problem.kv, sm_scale=1.0, return_lse=True)
            rows, heads, dim = out.shape
            wide = normal(rows + 4, heads + 3, dim + 5, device=device)
            wide_lse = normal(rows + 4, heads + 3, device=device)
            expected, expected_lse = wide.clone(), wide_lse.clone()
            for start, q_len in zip(problem.batch.q_starts, problem.batch.q_lens, strict=True):
                mine = slice(int(start), int(start + q_len))
                expected[2:-2, 1:-2, 3:-2][mine] = out[mine]
                expected_lse[2:-2, 1:-2][mine] = lse[mine]
            attn.run(plan, problem.q, problem.kv, sm_scale=1.0, out=wide[2:-2, 1:-2, 3:-2], lse=wide_lse[2:-2, 1:-2])
            assert torch.equal(wide, expected)
            assert torch.equal(wide_lse, expected_lse)
        for pool, before in zip(as_pair(problem.kv), pools, strict=True):
            assert torch.equal(pool.view(torch.int32), before)
        assert torch.equal(problem.q.view(torch.int32), q)


def as_pair(kv):
    return kv if isinstance(kv, tuple) else (kv,)


@each_backend
def test_strides_of_every_argument_are_read_and_written_as_they_are(backend, device):
    bias = normal(6, 3, device=device)

    def biased(score, b, h, q_idx, kv_idx):
        return score + bias[h, b]

    spec = SPEC.replace(learned_sinks=True, alibi=True, score_mod=biased)
    problem = make_problem(np.random.default_rng(8), SPEC, [20, 1, 3], [45, 9, 3], page_size=4, device=device)
    attn = sennit.BatchAttention(spec, page_size=4, device=device, backend=backend)
    exact = torch.tensor([45, 9, 3], dtype=torch.int32, device=device)

    def run(lens, q, bias, slopes, out, lse):
        pages = problem.batch.pages
        batch = sennit.Batch.csr(
            qo_indptr=[0, 20, 21, 24], kv_lens=[45, 9, 3], kv_lens_device=lens, kv_indices=pages.entries,
            kv_indptr=np.append(pages.starts, pages.starts[-1] + pages.widths[-1]),
        )  # fmt: skip
        options = {"captures": {"bias": bias}, "alibi_slopes": slopes, "sinks": -slopes, "out": out, "lse": lse}
        attn.run(attn.plan(batch), q, problem.kv, sm_scale=0.4, **options)

    slopes = normal(6, device=device, seed=3)
    out, lse = torch.empty(24, 6, 12, device=device), torch.empty(24, 6, device=device)
    run(exact, problem.q, bias, slopes, out, lse)
    strided_out, strided_lse = (
        torch.empty(6, 12, 24, device=device).permute(2, 0, 1),
        torch.empty(6, 24, device=device).T,
    )
    run(
        torch.stack([exact, exact * 0], dim=1)[:, 0],
        problem.q.transpose(0, 2).contiguous().transpose(0, 2),
        bias.T.contiguous().T,
        torch.stack([slopes, slopes * 0], dim=1)[:, 0],
        strided_out,
        strided_lse,
    )
    assert torch.equal(strided_out, out)
    assert torch.equal(strided_lse, lse)


@each_backend
def test_tensors_of_inference_mode_are_read_everywhere_and_written_inside(backend, device):
    problem = make_problem(np.random.default_rng(9), SPEC, [3, 1], [9, 5], page_size=4, device=device)
    attn = attention_for(problem, backend)
    plan = attn.plan(problem.batch)
    expected = attn.run(plan, problem.q, problem.kv, sm_scale=1.0)
    with torch.inference_mode():
        q, kv = problem.q.clone(), tuple(pool.clone() for pool in problem.kv)
        k, v = new_rows(SPEC, 4, device)
    assert torch.equal(attn.run(plan, q, kv, sm_scale=1.0), expected)
    with torch.inference_mode():
        assert torch.equal(attn.run(plan, q, kv, sm_scale=1.0), expected)
        attn.append(plan, k, v, kv)
    attn.append(plan, k, v, problem.kv)
    for inside, outside in zip(kv, problem.kv, strict=True):
        torch.testing.assert_close(inside, outside, rtol=0, atol=0, equal_nan=True)


@each_backend
def test_exact_lengths_on_the_device_overrule_upper_bounds_on_the_host(backend, device):
    exact, bounds, q_lens = [5, 9, 0, 30], [17, 9, 4, 64], [2, 1, 1, 7]
    problem = make_problem(np.random.default_rng(0), SPEC, q_lens, exact, page_size=4, device=device, form="padded")
    attn = attention_for(problem, backend)
    expected = attn.run(attn.plan(problem.batch), problem.q, problem.kv, sm_scale=1.0, return_lse=True)
    table = np.zeros((4, 16), np.int64)
    width = problem.batch.pages.widths[0]
    table[:, :width] = problem.batch.pages.entries.reshape(4, width)
    used = -(-np.asarray(exact) // 4)
    table[np.arange(16) >= used[:, None]] = 1  # a host table is checked up to the bounds
    batch = sennit.Batch.padded(
        query_start_loc=np.append(0, np.cumsum(q_lens)), seq_lens=bounds, block_table=table,
        kv_lens_device=torch.tensor(exact, dtype=torch.int32, device=device),
    )  # fmt: skip
    for table_on_device in {False, device != "cpu"}:
        if table_on_device:
            table[np.arange(16) >= used[:, None]] = 10**6  # one on the device may hold anything past the exact length
            batch = sennit.Batch.padded(
                query_start_loc=np.append(0, np.cumsum(q_lens)), seq_lens=bounds,
                block_table=torch.tensor(table, dtype=torch.int32, device=device),
                kv_lens_device=torch.tensor(exact, dtype=torch.int32, device=device),
            )  # fmt: skip
        got = attn.run(attn.plan(batch), problem.q, problem.kv, sm_scale=1.0, return_lse=True)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@each_backend
def test_uncovered_rows_are_zero_in_new_outputs_and_untouched_in_given_ones(backend, device):
    problem = make_problem(np.random.default_rng(1), SPEC, [3, 2], [9, 2], page_size=4, gaps=True, device=device)
    q = torch.cat([problem.q, torch.full_like(problem.q[:4], torch.nan)])
    attn = attention_for(problem, backend)
    plan = attn.plan(problem.batch)
    out, lse = attn.run(plan, q, problem.kv, sm_scale=1.0, return_lse=True)
    covered = torch.zeros(len(q), dtype=torch.bool, device=device)
    for start, q_len in zip(problem.batch.q_starts, problem.batch.q_lens, strict=True):
        covered[start : start + q_len] = True
    assert (out[~covered] == 0).all()
    assert lse[~covered].isneginf().all()
    given, given_lse = torch.full_like(out, 7.0), torch.full_like(lse, 7.0)
    result = attn.run(plan, q, problem.kv, sm_scale=1.0, out=given, lse=given_lse)
    assert result is given
    assert (given[~covered] == 7).all()
    assert (given_lse[~covered] == 7).all()
    torch.testing.assert_close(given[covered], out[covered])
    torch.testing.assert_close(given_lse[covered], lse[covered])


@each_backend
def test_debug_mode_checks_tables_and_lengths_that_the_host_cannot_see(backend, device, monkeypatch):
    attn = sennit.BatchAttention(SPEC, page_size=4, device=device, backend=backend)
    pools = nan_pools(SPEC, 3, 4, device)

    def run(table, exact):
        batch = sennit.Batch.padded(
            query_start_loc=[0, 1], seq_lens=[8], block_table=table,
            kv_lens_device=torch.tensor([exact], dtype=torch.int32, device=device),
        )  # fmt: skip
        return attn.run(attn.plan(batch), torch.zeros(1, 6, 8, device=device), pools, sm_scale=1.0)

    monkeypatch.setenv("SENNIT_DEBUG", "1")
    good = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
    run(good, 8)
    with pytest.raises(sennit.InvalidInput, match=r"kv_lens_device\[0\]: expected at most the host's bound 8, got 9"):
        run(good, 9)
    if device != "cpu":  # a table on the host is checked without it
        run(torch.tensor([[2, 7]], dtype=torch.int32, device=device), 4)  # the second page is not used
        with pytest.raises(sennit.InvalidInput, match="page table of request 0: expected page ids from 0 to 2"):
            run(torch.tensor([[2, 7]], dtype=torch.int32, device=device), 8)


@each_backend
def test_left_padded_packed_tensors_need_only_explicit_starts(backend, device):
    lengths, width = [3, 7, 5], 7
    k = normal(3 * width, 2, 8, device=device)
    v = normal(3 * width, 2, 12, device=device, seed=1)
    q = normal(3 * width, 6, 8, device=device, seed=2)
    starts = [r * width + width - n for r, n in enumerate(lengths)]
    indptr = np.append(0, np.cumsum(lengths))
    batch = sennit.Batch.ragged(qo_indptr=indptr, kv_indptr=indptr, qo_starts=starts, kv_starts=starts)
    attn = sennit.BatchAttention(SPEC, device=device, backend=backend)
    out = attn.run(attn.plan(batch), q, (k, v), sm_scale=0.4)
    for start, n in zip(starts, lengths, strict=True):
        rows = slice(start, start + n)
        expected, _ = dense_attention(q[rows], k[rows], v[rows], causal=True, sm_scale=0.4)
        torch.testing.assert_close(out[rows].double(), expected, rtol=1e-5, atol=1e-6)


@each_backend
def test_cross_attention_reads_packed_keys_of_any_length(backend, device):
    k, v = normal(20, 2, 8, device=device), normal(20, 2, 12, device=device, seed=1)
    q = normal(5, 6, 8, device=device, seed=2)
    batch = sennit.Batch.ragged(qo_indptr=[0, 4, 5], kv_indptr=[0, 3, 20])
    attn = sennit.BatchAttention(SPEC, device=device, backend=backend)
    out = attn.run(attn.plan(batch, causal=False), q, (k, v), sm_scale=0.4)
    for rows, keys in ((slice(0, 4), slice(0, 3)), (slice(4, 5), slice(3, 20))):
        expected, _ = dense_attention(q[rows], k[keys], v[keys], causal=False, sm_scale=0.4)
        torch.testing.assert_close(out[rows].double(), expected, rtol=1e-5, atol=1e-6)


@each_backend
def test_merged_states_of_two_halves_equal_attention_over_all_keys(backend, device):
    problem = make_problem(np.random.default_rng(2), SPEC, [4], [40], page_size=4, causal=False, device=device)
    attn = attention_for(problem, backend)
    pages = problem.batch.pages.entries[:10].tolist()

    def over(ids):
        batch = sennit.Batch.csr(qo_indptr=[0, 4], kv_lens=[4 * len(ids)], kv_indptr=[0, len(ids)], kv_indices=ids)
        return attn.run(attn.plan(batch, causal=False), problem.q, problem.kv, sm_scale=1.0, return_lse=True)

    empty = over([])
    assert (empty[0] == 0).all()
    assert empty[1].isneginf().all()
    merged = sennit.merge_states([over(pages[:3]), empty, over(pages[3:])])
    torch.testing.assert_close(merged, over(pages), rtol=1e-5, atol=1e-6)
    still_empty = sennit.merge_states([empty, empty])
    assert (still_empty[0] == 0).all()
    assert still_empty[1].isneginf().all()


@each_backend
def test_plans_in_fixed_buffers_equal_plans_of_their_own_and_keep_their_addresses(backend, device):
    rng = np.random.default_rng(3)
    attn = sennit.BatchAttention(SPEC, page_size=4, device=device, backend=backend)
    buffers = attn.buffers(max_requests=6, max_tokens=64, max_pages=120)
    address = buffers.device_array.data_ptr()
    for _ in range(20):
        count = int(rng.integers(0, 7))
        kv_lens = rng.integers(0, 70, count).tolist()
        problem = make_problem(rng, SPEC, rng.integers(0, 10, count).tolist(), kv_lens, page_size=4, device=device)
        own = attn.run(attn.plan(problem.batch), problem.q, problem.kv, sm_scale=1.0, return_lse=True)
        plan = attn.plan(problem.batch, into=buffers)
        fixed = attn.run(plan, problem.q, problem.kv, sm_scale=1.0, return_lse=True)
        assert plan.tensors.device.data_ptr() == address
        torch.testing.assert_close(fixed, own, rtol=1e-5, atol=1e-6)


def test_a_refused_batch_leaves_buffers_and_their_plan_as_they_were():
    attn = sennit.BatchAttention(SPEC, page_size=4, device="cpu")
    buffers = attn.buffers(max_requests=2, max_tokens=8, max_pages=8)
    problem = make_problem(np.random.default_rng(4), SPEC, [2, 1], [9, 5], page_size=4)
    plan = attn.plan(problem.batch, into=buffers)
    before = buffers.device_array.clone()
    expected = attn.run(plan, problem.q, problem.kv, sm_scale=1.0)
    with pytest.raises(sennit.CapacityExceeded):
        attn.plan(sennit.Batch.parse("3*1@4", page_size=4), into=buffers)
    assert (buffers.device_array == before).all()
    torch.testing.assert_close(attn.run(plan, problem.q, problem.kv, sm_scale=1.0), expected)


@each_backend
@pytest.mark.parametrize("spec", [SPEC, MLA], ids=["gqa", "mla"])
def test_with_fixed_splits_a_request_gives_the_same_bits_whatever_its_neighbours(spec, backend, device):
    rng = np.random.default_rng(5)
    attn = sennit.BatchAttention(spec, page_size=4, device=device, backend=backend)
    alone = make_problem(rng, spec, [5], [150], page_size=4, device=device)
    plan = attn.plan(alone.batch, split_size=32)
    expected = attn.run(plan, alone.q, alone.kv, sm_scale=0.5, return_lse=True)
    assert plan.schedule.num_merges > 0
    for others in (["1@300"], ["90@200", "3@7"], ["1@31"] * 9):
        before, after = rng.integers(0, 2, 2)
        lens = [
            tuple(map(int, text.split("@")))
            for text in others * int(before) + ["self"] + others * int(after)
            if text != "self"
        ]
        at = len(others) * int(before)
        q_lens, kv_lens = [q for q, _ in lens], [n for _, n in lens]
        q_lens.insert(at, 5)
        kv_lens.insert(at, 150)
        problem = make_problem(rng, spec, q_lens, kv_lens, page_size=4, device=device)
        rows = slice(problem.batch.q_starts[at], problem.batch.q_starts[at] + 5)
        problem.q[rows] = alone.q
        own = alone.batch.pages.entries[:38]
        pages = problem.batch.pages.entries[problem.batch.pages.starts[at] :][:38]
        pools, alone_pools = (k if isinstance(k, tuple) else (k,) for k in (problem.kv, alone.kv))
        for pool, source in zip(pools, alone_pools, strict=True):
            pool[pages.tolist()] = source[own.tolist()]
        out, lse = attn.run(
            attn.plan(problem.batch, split_size=32), problem.q, problem.kv, sm_scale=0.5, return_lse=True
        )
        assert torch.equal(out[rows], expected[0])
        assert torch.equal(lse[rows], expected[1])


@each_backend
def test_copied_pages_are_equal_and_no_other_page_changes(backend, device):
    attn = sennit.BatchAttention(SPEC, page_size=4, device=device, backend=backend)
    pools = tuple(normal(6, 4, 2, dim, device=device) for dim in (8, 12))
    before = [pool.clone() for pool in pools]
    attn.copy_pages([4, 0], np.array([1, 5]), pools)
    for pool, old in zip(pools, before, strict=True):
        old[1], old[5] = old[4], old[0]
        assert torch.equal(pool, old)


@each_backend
@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("spec", [SPEC, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_warmup_runs_for_every_form_of_storage(spec, page_size, kv_layout, backend, device):
    sennit.BatchAttention(spec, page_size=page_size, kv_layout=kv_layout, device=device, backend=backend).warmup()


def test_changing_the_callers_arrays_after_planning_changes_nothing():
    problem = make_problem(np.random.default_rng(6), SPEC, [2, 1], [9, 5], page_size=4)
    table, lens = problem.batch.pages.entries.astype(np.int32), problem.batch.kv_lens.copy()
    attn = sennit.BatchAttention(SPEC, page_size=4, device="cpu")
    batch = sennit.Batch.csr(
        qo_indptr=[0, 2, 3], kv_lens=lens, kv_indptr=np.append(problem.batch.pages.starts, len(table)), kv_indices=table
    )
    plan = attn.plan(batch)
    expected = attn.run(plan, problem.q, problem.kv, sm_scale=1.0)
    table[:] = -5
    lens[:] = 10**6
    torch.testing.assert_close(attn.run(plan, problem.q, problem.kv, sm_scale=1.0), expected)


def test_specs_compare_hash_and_print_by_value():
    assert SPEC.replace() == SPEC
    assert hash(SPEC) == hash(SPEC.replace())
    assert SPEC.replace(num_kv_heads=3) != SPEC
    assert "window_left=None" in repr(SPEC)
    assert SPEC.key != SPEC.replace(logits_soft_cap=2.0).key


def test_batches_print_in_the_grammar_that_they_are_written_in():
    text = "2048@16384 + 64*1@16384"
    assert str(sennit.Batch.parse(text, page_size=16)) == text
    assert str(sennit.Batch.parse("", page_size=16)) == "(empty)"


@each_backend
@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved", "latent"])
def test_pools_checked_once_serve_every_call(layout, backend, device):
    spec = MLA if layout == "latent" else SPEC.replace(head_dim_vo=8)
    attn = sennit.BatchAttention(
        spec, page_size=4, device=device, backend=backend, kv_layout="HND" if layout == "HND" else "NHD"
    )
    shape = (2, 4) if layout == "HND" else (4, 2)
    if layout == "latent":
        pools = normal(6, 4, spec.head_dim_qk, device=device)
    elif layout == "interleaved":
        pools = normal(6, 2, *shape, 8, device=device)
    else:
        pools = normal(6, *shape, 8, device=device), normal(6, *shape, 8, device=device, seed=1)
    again = pools.clone() if isinstance(pools, torch.Tensor) else tuple(pool.clone() for pool in pools)
    pages = attn.pages(pools)
    plan = attn.plan(sennit.Batch.csr(qo_indptr=[0, 3], kv_lens=[9], kv_indptr=[0, 3], kv_indices=[5, 0, 2]))
    q, (k, v) = normal(3, spec.num_qo_heads, spec.head_dim_qk, device=device), new_rows(spec, 3, device)
    outs = []
    for given in (pages, again):
        attn.copy_pages([5, 0], [1, 3], given)
        attn.append(plan, k, v, given)
        outs.append(attn.run(plan, q, given, sm_scale=0.3))
    assert torch.equal(*outs)
    for one, other in zip(pages.given, [again] if isinstance(again, torch.Tensor) else again, strict=True):
        assert torch.equal(one, other)


def test_pools_checked_for_another_kind_of_layer_are_refused():
    attn = sennit.BatchAttention(SPEC, page_size=4, device="cpu")
    pages = attn.pages(nan_pools(SPEC, 4, 4, "cpu"))
    other = sennit.BatchAttention(SPEC.replace(window_left=3), page_size=4, device="cpu")
    plan = other.plan(sennit.Batch.parse("1@9", page_size=4))
    packed = attn.plan(sennit.Batch.ragged(qo_indptr=[0, 1], kv_indptr=[0, 16]))
    for call in (
        lambda: other.run(plan, normal(1, 6, 8), pages, sm_scale=1.0),
        lambda: other.append(plan, *new_rows(SPEC, 1, "cpu"), pages),
        lambda: other.copy_pages([0], [1], pages),
        lambda: attn.run(packed, normal(1, 6, 8), pages, sm_scale=1.0),
    ):
        with pytest.raises(sennit.InvalidInput, match=r"kv(_pages)?: expected what has been checked for"):
            call()
    with pytest.raises(sennit.InvalidInput, match="page_size"):
        sennit.BatchAttention(SPEC, device="cpu").pages(nan_pools(SPEC, 4, 4, "cpu"))


def test_pools_in_which_elements_share_memory_are_read_but_not_written():
    attn = sennit.BatchAttention(SPEC, page_size=4, device="cpu")
    k, v = (pool[:1].expand(4, -1, -1, -1) for pool in nan_pools(SPEC, 1, 4, "cpu"))
    pages = attn.pages((k.nan_to_num(1.0)[:1].expand(4, -1, -1, -1), v.nan_to_num(1.0)[:1].expand(4, -1, -1, -1)))
    plan = attn.plan(sennit.Batch.parse("1@9", page_size=4))
    assert (attn.run(plan, normal(1, 6, 8), pages, sm_scale=1.0) == 1).all()
    for call in (
        lambda: attn.append(plan, *new_rows(SPEC, 1, "cpu"), pages),
        lambda: attn.copy_pages([0], [1], pages),
    ):
        with pytest.raises(sennit.InvalidInput, match=r"kv_pages: k: .*memory of its own"):
            call()
