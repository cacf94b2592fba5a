"""CUDA graphs: one that is captured once serves every plan in its buffers, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from solving import RUNS_ON, gqa, must_take

import sennit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BACKENDS = [name for name in ("triton", "hopper") if name in RUNS_ON]
SPEC = gqa(4, 64, dtype=torch.bfloat16)
MLA = sennit.AttentionSpec.mla(num_qo_heads=16, kv_lora_rank=64, qk_rope_head_dim=16, dtype=torch.bfloat16)
MAX_REQUESTS, MAX_TOKENS, MAX_PAGES, PAGE_SIZE = 128, 1500, 6000, 16
NUM_LAYERS = 4


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


def random_lengths(rng):
    """New tokens and all tokens of up to 128 requests: decodes, verifications, chunks, and nothing at all."""
    count = int(rng.integers(1, MAX_REQUESTS + 1))
    q_lens = rng.choice([1, 1, 1, 1, 0, 4, 7], count)
    q_lens[rng.random(count) < 0.03] = rng.integers(30, 200)
    q_lens[np.cumsum(q_lens) > MAX_TOKENS] = 0
    kv_lens = q_lens + rng.integers(0, rng.choice([5, 100, 600]), count)
    return q_lens.tolist(), kv_lens.tolist()


def random_batch(rng):
    q_lens, kv_lens = random_lengths(rng)
    pages = [-(-kv_len // PAGE_SIZE) for kv_len in kv_lens]
    table = rng.permutation(MAX_PAGES)[: sum(pages)]
    return sennit.Batch.csr(
        qo_indptr=np.append(0, np.cumsum(q_lens)), kv_lens=kv_lens, kv_indptr=np.append(0, np.cumsum(pages)),
        kv_indices=table,
    )  # fmt: skip


def captured(function):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        function()
    return graph


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", [SPEC, MLA], ids=["gqa", "mla"])
def test_one_graph_serves_200_random_batches_bit_for_bit(spec, backend):
    if not must_take(backend, spec):
        pytest.skip(f"{backend} is not for {spec}")
    rng = np.random.default_rng(0)
    attn = sennit.BatchAttention(spec, page_size=PAGE_SIZE, device="cuda", backend=backend)
    buffers = attn.buffers(max_requests=MAX_REQUESTS, max_tokens=MAX_TOKENS, max_pages=MAX_PAGES)
    shape = MAX_PAGES, PAGE_SIZE, *(() if spec.latent else (spec.num_kv_heads,))
    k = normal(*shape, spec.head_dim_qk)
    kv = k if spec.latent else (k, normal(*shape, spec.head_dim_vo, seed=1))
    q = normal(MAX_TOKENS, spec.num_qo_heads, spec.head_dim_qk, seed=2)
    out, lse = torch.zeros_like(q[..., : spec.head_dim_vo]).contiguous(), torch.zeros(q.shape[:2], device="cuda")

    def run(plan):
        attn.run(plan, q, kv, sm_scale=0.1, out=out, lse=lse)

    first = attn.plan(random_batch(rng), into=buffers)
    graph = captured(lambda: run(first))
    for turn in range(200):
        batch = random_batch(rng)
        plan = attn.plan(batch, into=buffers)
        results = []
        for compute in (lambda plan=plan: run(plan), graph.replay):
            out.zero_(), lse.zero_()
            compute()
            results.append((out.clone(), lse.clone()))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True)), batch
        if turn % 25 == 0:
            reference = sennit.BatchAttention(spec, page_size=PAGE_SIZE, device="cuda", backend="reference")
            rows = batch.num_tokens
            expected = reference.run(reference.plan(batch), q, kv, sm_scale=0.1)[:rows]
            torch.testing.assert_close(results[1][0][:rows].float(), expected.float(), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_serves_whole_steps_of_a_model_with_four_layers(backend):
    rng = np.random.default_rng(1)
    heads, dim = SPEC.num_qo_heads, SPEC.head_dim_qk
    weights = [normal(heads * dim, (heads + 2 * SPEC.num_kv_heads) * dim, seed=s) / 40 for s in range(NUM_LAYERS)]
    tokens = normal(MAX_TOKENS, heads * dim, seed=9)
    out = torch.zeros_like(tokens)

    def make():
        cache = sennit.KVCache(
            [SPEC] * NUM_LAYERS, num_tokens=MAX_PAGES * PAGE_SIZE, page_size=PAGE_SIZE, device="cuda", backend=backend
        )
        attn = sennit.BatchAttention(
            SPEC, page_size=PAGE_SIZE, kv_layout=cache.kv_layout, device="cuda", backend=backend
        )
        return cache, attn.buffers(max_requests=MAX_REQUESTS, max_tokens=MAX_TOKENS, max_pages=MAX_PAGES)

    def model(step):
        x = tokens
        for layer, weight in enumerate(weights):
            q, k, v = (x @ weight).view(MAX_TOKENS, -1, dim).split([heads, SPEC.num_kv_heads, SPEC.num_kv_heads], 1)
            x = step.attend(layer, q, k, v, sm_scale=dim**-0.5).flatten(1)
        out.copy_(x)

    (eager, eager_buffers), (replayed, buffers) = make(), make()
    ids = [(eager.add(), replayed.add()) for _ in range(40)]
    graph = torch.cuda.CUDAGraph()
    for cache, room, side in ((eager, eager_buffers, 0), (replayed, buffers, 1)):
        with cache.step([(ids[0][side], 3)], into=room) as step:
            model(step)
        torch.cuda.synchronize()
        with cache.step([(ids[0][side], 1)], into=room) as step:
            if side:
                with torch.cuda.graph(graph):
                    model(step)
                graph.replay()
            else:
                model(step)
    for _ in range(40):
        chosen = rng.choice(len(ids), int(rng.integers(1, 41)), replace=False)
        counts = rng.choice([1, 1, 1, 2, 30], len(chosen))
        counts[np.cumsum(counts) > MAX_TOKENS] = 0
        items = [[(ids[i][side], int(n)) for i, n in zip(chosen, counts, strict=True)] for side in (0, 1)]
        results = []
        for cache, room, side in ((eager, eager_buffers, 0), (replayed, buffers, 1)):
            with cache.step(items[side], into=room) as step:
                out.zero_()
                graph.replay() if side else model(step)
                results.append(out[: step.num_tokens].clone())
        assert torch.equal(*results)
    for one, other in ids:
        assert eager.length(one) == replayed.length(other)
        assert all(torch.equal(*pair) for pair in zip(eager.read(one, 3), replayed.read(other, 3), strict=True))
