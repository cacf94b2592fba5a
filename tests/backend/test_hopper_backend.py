"""The Hopper backend by itself: every feature on hostile problems, on the GPUs that it runs on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from solving import assert_right, gqa, solve

import sennit
from sennit.backends import registry
from sennit.backends.hopper.configs import kernel_configs, takes
from sennit.backends.hopper.pools import Rows, rows_aligned, rows_of
from sennit.check.problems import make_problem

hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


BF16, FP16 = torch.bfloat16, torch.float16
MIXED = [300, 1, 0, 3, 2, 9, 1], [470, 1041, 9, 2, 0, 700, 64]
TREES = [[-1, 0, 0, 1, 1], None, [-1, 0, 1], [-1, -1, 0, 1, 2, 3]]
SPECS = {
    "bfloat16": gqa(4, 128, dtype=BF16),
    "float16": gqa(1, 64, dtype=FP16),
    "columns that there are not": gqa(2, 96, 80, dtype=BF16),
    "few columns": gqa(8, 40, 24, dtype=FP16),
    "256 columns": gqa(4, 256, dtype=BF16),
    "192 columns and 128": gqa(2, 192, 128, dtype=BF16),
    "odd columns": gqa(4, 20, 13, dtype=BF16),
    "odd group": gqa(3, 128, dtype=BF16),
    "large group": gqa(16, 128, kv_heads=1, dtype=BF16),
    "window": gqa(4, 128, dtype=BF16).replace(window_left=100),
    "short window": gqa(4, 64, dtype=BF16).replace(window_left=3),
    "window and sink tokens": gqa(4, 128, dtype=FP16).replace(window_left=150, num_sink_tokens=5),
    "cap, ALiBi and sinks": gqa(4, 128, dtype=BF16).replace(logits_soft_cap=9.0, alibi=True, learned_sinks=True),
}
STORAGES = {
    "page-1": {"page_size": 1},
    "page-4-HND": {"page_size": 4, "kv_layout": "HND"},
    "page-12-interleaved": {"page_size": 12, "pool": "interleaved"},
    "page-16-strided": {"page_size": 16, "pool": "strided"},
    "page-8": {"page_size": 8},
    "page-24-HND": {"page_size": 24, "kv_layout": "HND"},
    "page-16-gaps": {"page_size": 16, "gaps": True},
    "page-64-interleaved": {"page_size": 64, "pool": "interleaved"},
    "page-128-interleaved-HND": {"page_size": 128, "pool": "interleaved", "kv_layout": "HND"},
    "packed": {"page_size": None},
}


def problem_of(spec, q_lens, kv_lens, **options):
    return make_problem(np.random.default_rng(sum(kv_lens)), spec, q_lens, kv_lens, device="cuda", **options)


@hopper
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_kind_of_layer_matches_the_oracle_whole_and_split(spec):
    problem = problem_of(spec, *MIXED)
    assert_right(problem, "hopper")
    assert_right(problem, "hopper", split_size=256)


@hopper
@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
@pytest.mark.parametrize("group", [3, 4])
def test_every_kind_of_storage_matches_the_oracle(storage, group):
    assert_right(problem_of(gqa(group, 128, dtype=BF16), *MIXED, **storage), "hopper")


@hopper
@pytest.mark.parametrize(
    "storage", [{"page_size": 16}, {"page_size": 16, "kv_layout": "HND"}, {"page_size": None}], ids=str
)
def test_rows_without_any_key_in_memory_are_zeros(storage):
    problem = problem_of(gqa(4, 128, dtype=BF16), [3, 1, 200], [0, 0, 0], **storage)
    assert_right(replace(problem, kv=tuple(pool[:0] for pool in problem.kv)), "hopper")


@hopper
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_what_one_head_holds_is_not_seen_by_another(layout):
    problem = problem_of(gqa(2, 96, dtype=BF16), *MIXED, kv_layout=layout)
    expected = solve(problem, "hopper")
    heads = 2 if layout == "NHD" else 1
    for pool in problem.kv:
        pool.select(heads, 1).fill_(torch.inf)
    for got, wanted in zip(solve(problem, "hopper"), expected, strict=True):
        assert torch.equal(got[:, :2], wanted[:, :2])


@hopper
@pytest.mark.parametrize("causal", [False, [True, False, False, True, False, True, False]], ids=str)
def test_windows_reach_ahead_without_causality(causal):
    spec = gqa(4, 64, dtype=BF16).replace(window_left=20, window_right=7, num_sink_tokens=5)
    assert_right(problem_of(spec, *MIXED, causal=[causal] * 7 if causal is False else causal), "hopper")


@hopper
def test_trees_and_packed_masks_hide_what_they_say():
    spec = gqa(4, 128, dtype=BF16).replace(window_left=30, alibi=True)
    assert_right(problem_of(spec, [5, 1, 3, 4], [90, 30, 3, 70], trees=TREES), "hopper")
    assert_right(problem_of(spec, *MIXED, masked=True), "hopper", split_size=64)
    assert_right(problem_of(gqa(4, 128, dtype=BF16), *MIXED, masked=True), "hopper")


@hopper
def test_exact_lengths_on_the_device_are_taken_and_nothing_behind_a_window_is_read():
    spec = gqa(4, 128, dtype=BF16).replace(window_left=20, num_sink_tokens=3)
    assert_right(problem_of(spec, *MIXED, bounds=[490, 1600, 20, 9, 4, 900, 64]), "hopper")


@hopper
@pytest.mark.parametrize("sm_scale", [-0.3, 0.0, 1e-60, 1e-42, 1e3, -1e12])
def test_any_scale_is_right_where_steps_have_no_masks(sm_scale):
    problem = problem_of(gqa(4, 128, dtype=FP16), [140, 9], [700, 400])
    assert_right(replace(problem, sm_scale=sm_scale), "hopper")


@hopper
@pytest.mark.parametrize("number", range(7))
def test_every_configuration_is_right(number, monkeypatch):
    problem = problem_of(gqa(4, 128, dtype=BF16), [300, 1, 4, 9], [700, 9000, 470, 700])
    one = (kernel_configs(problem.spec, 132)[number],)
    monkeypatch.setattr(type(registry.load("hopper")), "configs", lambda *_: one)
    assert_right(problem, "hopper")
    assert_right(problem, "hopper", split_size=512)


RANDOM = {
    "bfloat16": (SPECS["bfloat16"], {"page_size": 16}),
    "float16": (SPECS["float16"], {"page_size": 64, "kv_layout": "HND"}),
    "odd group": (SPECS["odd group"], {"page_size": 8, "pool": "interleaved"}),
    "window and sink tokens": (SPECS["window and sink tokens"], {"page_size": 16, "gaps": True}),
    "cap, ALiBi and sinks": (SPECS["cap, ALiBi and sinks"], {"page_size": None}),
    "page of one token": (SPECS["bfloat16"], {"page_size": 1}),
}


def random_problem_of(rng, spec, most_keys, **storage):
    """A mixed batch of no to twelve requests."""
    kv_lens = [int(rng.integers(0, rng.choice([3, 40, 300, most_keys]))) for _ in range(rng.integers(0, 13))]
    q_lens = [int(rng.choice([0, 1, 1, rng.integers(0, 9), rng.integers(0, min(n, 600) + 3)])) for n in kv_lens]
    causal = [bool(rng.random() < 0.8) for _ in kv_lens]
    return make_problem(rng, spec, q_lens, kv_lens, causal=causal, device="cuda", **storage)


@hopper
@pytest.mark.parametrize("name", ["bfloat16", "odd group", "window and sink tokens", "page of one token"])
def test_pauses_in_all_warps_change_no_bit(name, monkeypatch):
    backend = type(registry.load("hopper"))
    quick = backend.attend
    for seed in range(40):
        spec, storage = RANDOM[name]
        problem = random_problem_of(np.random.default_rng(seed), spec, most_keys=3000, **storage)
        monkeypatch.setattr(backend, "attend", quick)
        expected = solve(problem, "hopper")
        monkeypatch.setattr(backend, "attend", backend.attend_with_pauses)
        for got, wanted in zip(solve(problem, "hopper"), expected, strict=True):
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), seed


@hopper
@pytest.mark.thorough
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("name", RANDOM)
def test_ten_thousand_random_batches_match_triton(name, part):
    spec, storage = RANDOM[name]
    most = 4 * torch.finfo(spec.dtype).eps
    for seed in range(600 * part, 600 * (part + 1)):
        problem = random_problem_of(np.random.default_rng(seed), spec, most_keys=2000, **storage)
        (out, lse), (expected, expected_lse) = solve(problem, "hopper"), solve(problem, "triton")
        error = (out.float() - expected.float()).norm(dim=-1)
        assert (error <= most * expected.float().norm(dim=-1)).all(), seed
        assert torch.allclose(lse, expected_lse, rtol=1e-5, atol=1e-4), seed


REFUSED = {
    "latent": (sennit.AttentionSpec.mla(num_qo_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, dtype=BF16), "latent"),
    "wide heads": (gqa(2, 264, dtype=BF16), "over 256"),
    "wide values": (gqa(2, 128, 512, dtype=FP16), "over 256"),
    "float32": (gqa(2, 128), "float32"),
    "two dtypes": (gqa(2, 128, dtype=BF16).replace(kv_dtype=FP16), "by keys in torch.float16"),
}


@pytest.mark.parametrize(("spec", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_has_a_reason(spec, reason):
    assert reason in takes(spec).reason


def test_pools_are_matrices_of_rows():
    nhd = torch.zeros(5, 16, 8, 128, dtype=BF16)
    assert rows_of(nhd, 128) == Rows(80, 1024, 1024, 16, 0, 128)
    hnd = torch.zeros(5, 8, 16, 128, dtype=BF16).transpose(1, 2)
    assert rows_of(hnd, 128) == Rows(640, 128, 128, 128, 16, 0)
    pair = torch.zeros(5, 2, 16, 8, 128, dtype=BF16)
    assert rows_of(pair[:, 1], 128) == Rows(144, 1024, 1024, 32, 0, 128)
    assert rows_of(torch.zeros(100, 8, 64, dtype=BF16), 64) == Rows(100, 512, 512, 100, 0, 64)
    assert rows_of(torch.zeros(5, 16, 9, 128, dtype=BF16)[:, :, 1:], 128) == Rows(80, 1024, 1152, 16, 0, 128)
    assert rows_of(torch.zeros(5, 16 * 1024 + 8, dtype=BF16)[:, : 16 * 1024].view(5, 16, 8, 128), 128) is None
    assert rows_of(nhd, 256) is None
    assert rows_of(hnd, 256) == rows_of(hnd, 128)


def test_what_is_copied_at_once_begins_at_multiples_of_16_bytes():
    assert rows_aligned(torch.zeros(5, 16, 8, 40, dtype=BF16))
    assert not rows_aligned(torch.zeros(5, 16, 8, 129, dtype=BF16)[..., :128])
    assert not rows_aligned(torch.zeros(5, 16, 8, 20, dtype=BF16))
    assert not rows_aligned(torch.zeros(2049, dtype=BF16)[1:].view(1, 16, 1, 128))
