"""Pools of more elements than 32 bits count: pages far inside are read, written and copied where they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from solving import gqa

import sennit

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 30 * 2**30, reason="needs a GPU with 30 GiB free"
)
SPEC = gqa(4, 128, kv_heads=8, dtype=torch.bfloat16)
PAGE_SIZE = 16
PAGE_ELEMENTS = PAGE_SIZE * 8 * 128


def test_thirty_requests_whose_pages_lie_beyond_2_to_the_31_and_32_elements_are_right():
    rng = np.random.default_rng(0)
    edges = [2**31 // PAGE_ELEMENTS, 2**32 // PAGE_ELEMENTS]
    ids = rng.permutation(np.concatenate([np.arange(64), *(np.arange(edge - 64, edge + 200) for edge in edges)]))
    q_lens = rng.integers(1, 21, 30)
    kv_lens = q_lens + rng.integers(0, 200, 30)
    pages = -(-kv_lens // PAGE_SIZE)
    assert pages.sum() + 4 <= len(ids)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def batch(table):
        return sennit.Batch.csr(
            qo_indptr=np.append(0, np.cumsum(q_lens)), kv_lens=kv_lens, kv_indptr=np.append(0, np.cumsum(pages)),
            kv_indices=table,
        )  # fmt: skip

    small = tuple(normal(len(ids), PAGE_SIZE, 8, 128) for _ in range(2))
    large = tuple(torch.empty(edges[1] + 200, PAGE_SIZE, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    places = torch.from_numpy(ids).cuda()
    for pool, content in zip(large, small, strict=True):
        pool[places] = content
    rows = int(q_lens.sum())
    q, k, v = normal(rows, 32, 128), normal(rows, 8, 128), normal(rows, 8, 128)
    copies = np.arange(len(ids) - 4, len(ids))
    outs = []
    for backend, pools, numbers in (("reference", small, np.arange(len(ids))), ("triton", large, ids)):
        attn = sennit.BatchAttention(SPEC, page_size=PAGE_SIZE, device="cuda", backend=backend)
        plan = attn.plan(batch(numbers[: pages.sum()]))
        attn.append(plan, k, v, pools)
        attn.copy_pages(numbers[:4], numbers[copies], pools)
        outs.append(attn.run(plan, q, pools, sm_scale=0.09).float())
    torch.testing.assert_close(outs[1], outs[0], rtol=0.02, atol=0.02)
    for pool, content in zip(large, small, strict=True):
        assert torch.equal(pool[places], content)
