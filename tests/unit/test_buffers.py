"""Buffers that are made for a batch's sizes have room for every plan of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sennit.backends.cpu.costs import kernel_configs as cpu_configs
from sennit.backends.hopper.configs import kernel_configs as hopper_configs
from sennit.backends.triton.costs import H200
from sennit.backends.triton.costs import kernel_configs as triton_configs
from sennit.plan.batch import Batch
from sennit.plan.buffers import PlanBuffers
from sennit.plan.cost import KernelConfig, Strand
from sennit.plan.plan import make_plan
from sennit.spec import AttentionSpec

PAGE_SIZE = 16
CONFIGS = {
    "cpu": lambda spec: cpu_configs(spec, 3),
    "hopper": lambda spec: hopper_configs(spec, 132),
    "triton": lambda spec: triton_configs(spec, H200),
    "dealt": lambda spec: [
        KernelConfig("dealt", (Strand("wide", 16, 16, 1.0, 1.0, 1.0, 1.0, heads=2, dealt=1.1),), 5, "max")
    ],
}


def layer(num_kv_heads):
    return AttentionSpec(num_qo_heads=4 * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=64, dtype=torch.bfloat16)


def random_batch(rng):
    count = int(rng.choice([1, 2, 9, 60]))
    q_lens = rng.choice([[1], [0, 1, 5, 33], [1, 300, 2000]][rng.integers(3)], count)
    return " + ".join(f"{q}@{q + rng.integers(0, int(rng.choice([3, 400, 40000])))}" for q in q_lens)


def plan_into(text, spec, config):
    batch = Batch.parse(text, page_size=PAGE_SIZE)
    cpu = torch.device("cpu")
    buffers = PlanBuffers.allocate(
        owner="test", backend="none", config=config, group_size=spec.group_size, num_kv_heads=spec.num_kv_heads,
        max_requests=len(batch.q_lens), max_tokens=max(int(batch.q_lens.sum()), 1),
        max_pages=max(int(batch.pages_needed(PAGE_SIZE).sum()), 1), max_tree_nodes=0, device=cpu,
    )  # fmt: skip
    return make_plan(
        batch, spec=spec, owner="test", backend="none", configs=(config,), page_size=PAGE_SIZE, device=cpu,
        into=buffers,
    )  # fmt: skip


@pytest.mark.parametrize("backend", CONFIGS)
@pytest.mark.parametrize("num_kv_heads", [2, 8])
def test_random_plans_fit_buffers_of_their_sizes(backend, num_kv_heads):
    spec = layer(num_kv_heads)
    rng = np.random.default_rng(num_kv_heads)
    for config in CONFIGS[backend](spec):
        plans = [plan_into(text, spec, config) for text in ("1@40000", *(random_batch(rng) for _ in range(30)))]
        assert any(plan.schedule.num_merges for plan in plans)


def test_more_bands_than_plans_should_hold_are_cut_not_dealt():
    [config] = CONFIGS["dealt"](layer(8))
    few, many = (plan_into(f"{4 * tiles}@40000", layer(8), config).schedule for tiles in (160, 161))
    assert few.num_items == 160 * 4  # each tile's bands, of two heads
    assert not few.num_merges
    assert many.num_items < 161 + 3 * config.num_workers
