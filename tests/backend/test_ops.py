"""Operators: their schema and fakes, and a model compiled whole that is not recompiled from step to step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from solving import attention_for, each_backend

import sennit
from sennit.check.problems import make_problem

SPEC = sennit.AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)


def planned(kv_lens, q_lens, backend="auto", device="cpu", seed=0):
    problem = make_problem(np.random.default_rng(seed), SPEC, q_lens, kv_lens, page_size=4, device=device)
    attn = attention_for(problem, backend)
    return problem, attn, attn.plan(problem.batch)


def tensors(plan):
    t = plan.tensors
    return t.host, t.device, t.page_table, t.stamp, t.kv_lens


@each_backend
def test_attend_passes_opcheck(backend, device):
    problem, _, plan = planned([9, 5], [3, 1], backend, device)
    out = torch.empty(4, 4, 8, device=device)
    lse = torch.empty(4, 4, device=device)
    arguments = (plan.key, problem.q, *problem.kv, out, lse, *tensors(plan), None, None, None, [], 0.3, False)
    torch.library.opcheck(torch.ops.sennit.attend.default, arguments)


def test_attend_passes_opcheck_with_every_optional_tensor():
    bias = torch.randn(4)
    spec = SPEC.replace(learned_sinks=True, alibi=True, score_mod=lambda score, b, h, q_idx, kv_idx: score + bias[h])
    problem = make_problem(np.random.default_rng(0), SPEC, [3, 1], [9, 5], page_size=4)
    mask = sennit.pack_mask([torch.ones(3, 9, dtype=torch.bool), torch.ones(1, 5, dtype=torch.bool)])
    plan = sennit.BatchAttention(spec, page_size=4, device="cpu").plan(problem.batch, packed_mask=mask)
    out, lse = torch.empty(4, 4, 8), torch.empty(4, 4)
    extras = (plan.tensors.packed_mask, torch.randn(4), torch.randn(4), [bias])
    arguments = (plan.key, problem.q, *problem.kv, out, lse, *tensors(plan), *extras, 0.3, False)
    torch.library.opcheck(torch.ops.sennit.attend.default, arguments)


@each_backend
def test_append_passes_opcheck(backend, device):
    problem, _, plan = planned([9, 5], [3, 1], backend, device)
    rows = [torch.randn(4, 2, 8, device=device) for _ in range(2)]
    arguments = (plan.key, *rows, *problem.kv, *tensors(plan), None)
    torch.library.opcheck(torch.ops.sennit.append.default, arguments)


def test_merge_states_passes_opcheck():
    torch.library.opcheck(
        torch.ops.sennit.merge_states.default, ("reference", torch.randn(3, 5, 2, 4), torch.randn(3, 5, 2))
    )


def test_copy_pages_passes_opcheck():
    arguments = ("reference", torch.randn(6, 4, 2, 8), torch.tensor([1, 3]), torch.tensor([0, 5]))
    torch.library.opcheck(torch.ops.sennit.copy_pages.default, arguments)


class TwoLayers(torch.nn.Module):
    """Projections around append and attention, as in a transformer."""

    def __init__(self, attn: sennit.BatchAttention) -> None:
        super().__init__()
        self.attn = attn
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(16, (4 + 2 + 2) * 8) for _ in range(2))
        self.out = torch.nn.ModuleList(torch.nn.Linear(32, 16) for _ in range(2))

    def forward(self, x, plan, pools):
        for layer, pages in enumerate(pools):
            q, k, v = self.qkv[layer](x).view(-1, 8, 8).split([4, 2, 2], dim=1)
            self.attn.append(plan, k, v, pages)
            heads = self.attn.run(plan, q, pages, sm_scale=8**-0.5)
            x = x + self.out[layer](heads.flatten(1))
        return x


def new_pools(interleaved, device):
    def pool():
        if interleaved:
            return torch.zeros(128, 2, 4, 2, 8, device=device)
        return torch.zeros(128, 4, 2, 8, device=device), torch.zeros(128, 4, 2, 8, device=device)

    return [pool() for _ in range(2)]


@each_backend
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_compiled_model_equals_eager_over_many_steps_without_recompiling(interleaved, backend, device):
    torch.manual_seed(0)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    batches = [
        ([11, 7], [3, 2]),
        ([7, 9, 4], [1, 3, 4]),
        ([20, 30, 5, 6], [1, 1, 1, 6]),
        ([40] * 7, [2] * 7),
        ([64, 64], [1, 64]),
    ]
    frames, keys = [], set()
    with torch.inference_mode():
        _, attn, _ = planned([1], [1], backend, device)
        model = TwoLayers(attn).to(device)
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        for seed, (kv_lens, q_lens) in enumerate(batches * 2):
            _, _, plan = planned(kv_lens, q_lens, backend, device, seed)
            x = torch.randn(sum(q_lens), 16, device=device)
            eager_pools, compiled_pools = new_pools(interleaved, device), new_pools(interleaved, device)
            expected = model(x, plan, eager_pools)
            torch.testing.assert_close(compiled(x, plan, compiled_pools), expected)
            for got, wanted in zip(compiled_pools, eager_pools, strict=True):
                torch.testing.assert_close(got, wanted)
            frames.append(counter.frame_count)
            keys.add(plan.key)
    # PyTorch compiles for the first sizes, once more for any size when others come, and for each further configuration
    # of the backend that plans take.
    assert frames[0] == 1
    assert set(frames[len(batches) - 1 :]) == {1 + len(keys)}


def test_a_layer_compiles_whole_before_it_has_ever_run():
    spec = SPEC.replace(window_left=77)
    attn = sennit.BatchAttention(spec, page_size=4, device="cpu")
    plan = attn.plan(sennit.Batch.parse("3@9", page_size=4))
    kv = torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2, 8)
    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)

    def layer(q, k, v, kv):
        attn.append(plan, k, v, kv)
        return attn.run(plan, q, kv, sm_scale=0.5)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(q, k, v, kv)
    torch.testing.assert_close(compiled, layer(q, k, v, kv))
