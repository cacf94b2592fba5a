"""The Triton backend by itself: every feature on small hostile problems, in the interpreter where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from solving import DEVICES, RUNS_ON, assert_right, attention_for, gqa

import sennit
from sennit.backends import registry
from sennit.backends.gpus.caching import _runs
from sennit.backends.triton import costs
from sennit.check.compare import compare
from sennit.check.problems import make_problem

DEVICE = next(filter(DEVICES.count, RUNS_ON["triton"]), None)
pytestmark = pytest.mark.skipif(DEVICE is None, reason="needs a GPU, or TRITON_INTERPRET=1")
MIXED = [21, 1, 0, 3, 2], [70, 141, 9, 2, 0]
slow = pytest.mark.slow
TREES = [[-1, 0, 0, 1, 1], None, [-1, 0, 1], [-1, -1, 0, 1, 2, 3]]
LATENT = sennit.AttentionSpec.mla(num_qo_heads=16, kv_lora_rank=64, qk_rope_head_dim=16, dtype=torch.float16)
SPECS = {
    "bfloat16": gqa(3, 40, 8, dtype=torch.bfloat16),
    "bfloat16-aligned": gqa(3, 32, dtype=torch.bfloat16),
    "float16": gqa(1, 80, dtype=torch.float16),
    "float32": gqa(4, 33, 7),
    "float32-of-bfloat16": gqa(2, 24).replace(kv_dtype=torch.bfloat16),
    "latent": LATENT,
    "latent-float32": LATENT.replace(dtype=torch.float32),
    "window": gqa(4, 24, dtype=torch.float16).replace(window_left=20),
    "window-and-sink-tokens": gqa(4, 24, dtype=torch.float16).replace(window_left=20, num_sink_tokens=5),
    "cap-alibi-sinks": gqa(4, 24).replace(logits_soft_cap=9.0, alibi=True, learned_sinks=True),
}
COVERED_BY_OTHERS = ("float16", "latent-float32", "window", "float32-of-bfloat16")  # but for numbers
STORAGES = {
    "page-1": {"page_size": 1},
    "page-3-strided-HND": {"page_size": 3, "pool": "strided", "kv_layout": "HND"},
    "page-16-gaps": {"page_size": 16, "gaps": True},
    "page-64-interleaved": {"page_size": 64, "pool": "interleaved"},
    "packed": {"page_size": None},
}


def problem_of(spec, q_lens, kv_lens, **options):
    return make_problem(np.random.default_rng(sum(kv_lens)), spec, q_lens, kv_lens, device=DEVICE, **options)


@pytest.mark.parametrize(
    "spec",
    [pytest.param(spec, id=name, marks=slow if name in COVERED_BY_OTHERS else ()) for name, spec in SPECS.items()],
)
def test_every_kind_of_layer_matches_the_oracle_whole_and_split(spec):
    problem = problem_of(spec, *MIXED)
    assert_right(problem, "triton")
    assert_right(problem, "triton", split_size=64)


@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
def test_every_kind_of_storage_matches_the_oracle(storage):
    assert_right(problem_of(gqa(2, 16, dtype=torch.float16), *MIXED, **storage), "triton")


@pytest.mark.parametrize("causal", [False, [True, False, False, True, False]], ids=str)
def test_windows_reach_ahead_without_causality(causal):
    spec = gqa(4, 24).replace(window_left=20, window_right=7, num_sink_tokens=5)
    assert_right(problem_of(spec, *MIXED, causal=[causal] * 5 if causal is False else causal), "triton")


def test_trees_and_packed_masks_hide_what_they_say():
    spec = gqa(4, 24).replace(window_left=30, alibi=True)
    assert_right(problem_of(spec, [5, 1, 3, 4], [90, 30, 3, 70], trees=TREES), "triton")
    assert_right(problem_of(spec, *MIXED, masked=True), "triton", split_size=64)


def test_exact_lengths_on_the_device_are_taken_and_nothing_behind_a_window_is_read():
    spec = gqa(4, 24).replace(window_left=20, num_sink_tokens=3)
    assert_right(problem_of(spec, *MIXED, bounds=[90, 160, 20, 9, 4]), "triton")


@pytest.mark.parametrize("sm_scale", [-0.3, *(pytest.param(scale, marks=slow) for scale in (0.0, 1e-42, 1e3)), -1e12])
def test_any_scale_is_right_where_steps_have_no_masks(sm_scale):
    problem = problem_of(gqa(4, 16, dtype=torch.float16), [40, 9], [300, 200])
    assert_right(replace(problem, sm_scale=sm_scale), "triton")


TILES = [
    *(shape.tile for shape in (*costs.WIDE, *costs.NARROW, *costs.NARROW_LATENT)),
    costs.possible_tile(costs.WIDE[0].tile, gqa(4, 128), aligned=False, looks_up=False),
]


@pytest.mark.parametrize("tile", [pytest.param(tile, id=str(i)) for i, tile in enumerate(dict.fromkeys(TILES))])
def test_every_tile_is_right_on_either_strand(tile, monkeypatch):
    spec = gqa(4, 64, dtype=torch.float16)
    problem = problem_of(spec, [21, 1, 4], [150, 141, 70])
    if costs.shared_memory(tile, spec, hopper=True) > 220_000 // tile.residency:
        pytest.skip("no room for it")
    monkeypatch.setattr(costs, "WIDE", [costs.Shape(tile, flops=1e8, item_time=1.0)])
    for narrow in (costs.Shape(tile, flops=1e8, item_time=1.0), costs.NARROW[0]):
        monkeypatch.setattr(costs, "NARROW", [narrow])
        monkeypatch.setattr(type(registry.load("triton")), "configs", lambda _, *args: fresh_configs(*args))
        assert_right(problem, "triton")


def fresh_configs(spec, device):
    return costs.kernel_configs(spec, costs.device_of(device))


@pytest.mark.parametrize("storage", ["page-16", "odd strides", "even strides"])
@pytest.mark.parametrize("dims", [(33, 7), (40, 64), (64, 8), (64, 33), (33, 64), (128, 16), (96, 80)], ids=str)
def test_dims_and_strides_that_tensor_cores_do_not_like_are_right(dims, storage):
    options = STORAGES["page-3-strided-HND"] if storage == "odd strides" else {"page_size": 16}
    for masked in (False, True):
        problem = problem_of(gqa(4, *dims, dtype=torch.float16), *MIXED, masked=masked, **options)
        if storage == "even strides":  # rows begin at multiples of 256 bytes, whatever their columns
            problem = replace(problem, kv=tuple(part_of_wider_rows(part) for part in problem.kv))
        assert_right(problem, "triton")


def part_of_wider_rows(pool):
    wide = torch.full((*pool.shape[:-1], 128), torch.nan, dtype=pool.dtype, device=pool.device)
    wide[..., : pool.shape[-1]] = pool
    return wide[..., : pool.shape[-1]]


def test_appended_keys_and_values_are_found():
    spec = gqa(2, 24, 40)
    problem = problem_of(spec, [5, 1, 0, 4], [20, 1, 3, 2], page_size=3, pool="strided")
    attn = attention_for(problem, "triton")
    plan = attn.plan(problem.batch)
    pages = [torch.full_like(part, torch.nan) for part in problem.kv]
    expected = [part.clone() for part in pages]
    reference = attention_for(problem, "reference")
    k, v = (torch.randn(len(problem.q), 2, dim, device=DEVICE) for dim in (24, 40))
    attn.append(plan, k, v, pages)
    reference.append(reference.plan(problem.batch), k, v, expected)
    for got, wanted in zip(pages, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
        assert got.isfinite().any()


def test_what_a_graph_would_replay_serves_other_plans_in_the_same_buffers():
    spec = gqa(4, 24, dtype=torch.float16)
    problems = [problem_of(spec, q, kv, page_size=4) for q, kv in (MIXED, ([1, 9], [190, 40]))]
    attn = attention_for(problems[0], "triton")
    buffers = attn.buffers(max_requests=5, max_tokens=64, max_pages=200)
    for problem in problems:
        plan = attn.plan(problem.batch, into=buffers)
        result = attn.run(plan, problem.q, problem.kv, sm_scale=problem.sm_scale, return_lse=True)
        assert compare(problem, *result).passed


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (0, 4, 2, 1, 3)])
def test_copied_pages_are_equal_whatever_their_strides(order):
    pages = torch.randn(9, 2, 3, 4, 5, device=DEVICE).permute(order)
    expected, source, target = pages.clone(), torch.tensor([1, 7]), torch.tensor([4, 0])
    expected[target] = expected[source]
    registry.load("triton").copy_pages(pages, source.to(DEVICE), target.to(DEVICE))
    assert torch.equal(pages, expected)


def test_dimensions_that_lie_together_are_copied_as_one():
    assert _runs(torch.empty(9, 2, 3, 4, 5)) == ([1, 1, 1, 120], [0, 0, 0, 1])
    assert _runs(torch.empty(9, 2, 3, 8, 5)[:, :, :, :4]) == ([1, 1, 6, 20], [0, 0, 40, 1])
