"""Streams and devices: steps run where and when their caller's work does, and nothing waits for the GPU."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from solving import gqa

import sennit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SPEC = gqa(4, 64, dtype=torch.bfloat16)
HEADS, DIM = (SPEC.num_qo_heads, SPEC.num_kv_heads), SPEC.head_dim_qk
CYCLES = 100_000_000  # 50 ms of a GPU: longer than the host needs for everything below
STEPS = [[5, 300, 1], [1, 1, 1], [1, 40, 3], [2, 1, 1]]  # new tokens of each sequence


def contents(seed):
    """Queries, keys and values of every step."""
    rng = np.random.default_rng(seed)
    return [
        [torch.from_numpy(rng.standard_normal((sum(step), heads, DIM), np.float32)) for heads in (*HEADS, HEADS[1])]
        for step in STEPS
    ]


def outputs(tensors, device, backend, *, before_each=contextlib.nullcontext, sleep=0):
    """Of every step; queries, keys and values exist only once the stream has slept."""
    cache = sennit.KVCache([SPEC], num_tokens=1024, page_size=16, device=device, backend=backend)
    ids = [cache.add() for _ in STEPS[0]]
    ready = [[x.to(device, torch.bfloat16) for x in step] for step in tensors]
    given = [[torch.full_like(x, torch.nan) for x in step] for step in ready]
    torch.cuda.synchronize(device)
    found = []
    with before_each():
        for step, real, late in zip(STEPS, ready, given, strict=True):
            if sleep:
                torch.cuda._sleep(sleep)
            for target, source in zip(late, real, strict=True):
                target.copy_(source)
            with cache.step(list(zip(ids, step, strict=True))) as running:
                found.append(running.attend(0, *late, sm_scale=0.1))
    return found


@contextlib.contextmanager
def nothing_waits():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float().cpu(), other.float().cpu(), rtol=0.03, atol=0.03)


def test_steps_run_on_the_current_stream_after_what_is_there():
    tensors, side = contents(0), torch.cuda.Stream()
    expected = outputs(tensors, "cuda", "reference")
    found = outputs(tensors, "cuda", "triton", before_each=lambda: torch.cuda.stream(side), sleep=CYCLES)
    assert not side.query()  # the host is ahead: plans, tables and launches of all steps wait in the stream
    side.synchronize()
    assert_same(found, expected)


def test_steps_wait_for_nothing():
    tensors = contents(1)
    expected = outputs(tensors, "cuda", "reference")
    outputs(tensors, "cuda", "triton")  # compiles
    assert_same(outputs(tensors, "cuda", "triton", before_each=nothing_waits), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_steps_run_on_a_device_that_is_not_current():
    tensors = contents(2)
    expected = outputs(tensors, "cpu", "reference")
    with torch.cuda.device(0):
        found = outputs(tensors, "cuda:1", "triton")
        assert torch.cuda.current_device() == 0
    assert {out.device.index for out in found} == {1}
    assert_same(found, expected)
