"""The FlashInfer backend: what it refuses, and how plans reach its wrappers; on a CPU PyTorch stands for these."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from solving import assert_right, attention_for, gqa, solve

import sennit
from sennit.backends.base import Support
from sennit.backends.flashinfer import BACKEND, backend
from sennit.check.problems import make_problem
from sennit.errors import BackendUnavailable, UnsupportedFeature

REAL = BACKEND.available(torch.device("cuda")).accepted
PLAIN = gqa(4, 64, dtype=torch.bfloat16)
MIXED = [21, 1, 0, 3, 2, 1, 7], [70, 141, 9, 2, 0, 16, 7]


class Wrapper:
    """What a wrapper computes, request by request, with its checks, and those that it lacks."""

    planned = 0

    def __init__(self, workspace, kv_layout, *, backend):
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.backend = backend

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        causal, sm_scale, window_left, logits_soft_cap, q_data_type, kv_data_type,
    ):  # fmt: skip
        Wrapper.planned += 1
        for tensor in (qo_indptr, kv_indptr, kv_indices, last_page_len):
            assert tensor.dtype == torch.int32
        assert sm_scale is not None
        assert qo_indptr.diff().min() > 0
        assert kv_indptr.diff().min() > 0
        assert 1 <= last_page_len.min() <= last_page_len.max() <= page_size
        self.kv_lens = (kv_indptr.diff() - 1) * page_size + last_page_len
        assert not causal or (self.kv_lens >= qo_indptr.diff()).all()
        narrow, windowed = bool((qo_indptr.diff() == 1).all()), window_left >= 0
        assert self.backend == ("fa2" if narrow or windowed else "auto")
        assert causal or narrow or not windowed
        assert sm_scale > 0
        self.bounds, self.pages = qo_indptr.tolist(), torch.split(kv_indices.long(), kv_indptr.diff().tolist())
        self.causal, self.sm_scale, self.window_left, self.cap = causal, sm_scale, window_left, logits_soft_cap

    def read(self, pool, pages):
        """Pages behind a window, which nothing else reads, may not exist."""
        if self.window_left < 0:
            return pool[pages].flatten(0, 1)
        return pool[pages.clamp(0, len(pool) - 1)].flatten(0, 1).nan_to_num()

    def run(self, q, kv, *, return_lse):
        assert len(q) == self.bounds[-1]
        outs, lses = [], []
        for start, end, pages, kv_len in zip(self.bounds, self.bounds[1:], self.pages, self.kv_lens, strict=False):
            k, v = (self.read(pool, pages)[:kv_len].double() for pool in kv)
            group = q.shape[1] // k.shape[1]
            logits = torch.einsum("qhd,khd->hqk", q[start:end].double(), k.repeat_interleave(group, 1)) * self.sm_scale
            if self.cap:
                logits = self.cap * torch.tanh(logits / self.cap)
            position = torch.arange(end - start)[:, None] + kv_len - (end - start)
            key = torch.arange(int(kv_len))
            hidden = (key > position) if self.causal else torch.zeros(end - start, int(kv_len), dtype=torch.bool)
            if self.window_left >= 0:
                hidden = hidden | (key < position - self.window_left)
            logits = logits.masked_fill(hidden, -math.inf)
            outs.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1), v.repeat_interleave(group, 1)).to(q.dtype))
            lses.append(logits.logsumexp(-1).T.float() / math.log(2))
        out = torch.cat(outs)
        return (out, torch.cat(lses)) if return_lse else out


@pytest.fixture
def device(monkeypatch):
    """A GPU with FlashInfer, or a CPU with wrappers in plain PyTorch."""
    if REAL:
        return "cuda"
    monkeypatch.setattr(type(BACKEND), "available", lambda self, device: Support.yes())
    monkeypatch.setattr(
        backend, "import_module", lambda name: SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    )
    return "cpu"


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (PLAIN, {}),
        (PLAIN, {"causal": [True, False, False, True, False, False, False]}),
        (PLAIN, {"gaps": True, "form": "padded"}),
        (PLAIN.replace(window_left=9), {"page_size": 5, "kv_layout": "HND"}),
        (PLAIN.replace(logits_soft_cap=4.0), {"page_size": 1}),
        (gqa(1, 128, dtype=torch.float16), {"page_size": 64}),
    ],
    ids=["plain", "causal-and-not", "gaps", "window-HND", "soft-cap", "float16"],
)
def test_its_wrappers_match_the_oracle_where_a_plan_is_hostile_to_them(device, spec, options):
    assert_right(make_problem(np.random.default_rng(0), spec, *MIXED, device=device, **options), "flashinfer")


def test_one_plan_serves_all_layers_and_a_new_scale_is_planned_anew(device):
    problem = make_problem(np.random.default_rng(1), PLAIN, *MIXED, device=device)
    attn = attention_for(problem, "flashinfer")
    plan = attn.plan(problem.batch)
    before = Wrapper.planned
    outs = [attn.run(plan, problem.q, problem.kv, sm_scale=scale) for scale in (0.1, 0.1, 0.2)]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    if device == "cpu":
        assert Wrapper.planned - before == 4  # decodes and the others, for two scales


def test_new_keys_go_where_every_backend_puts_them(device):
    problem = make_problem(np.random.default_rng(2), PLAIN, [3, 1, 0, 5], [20, 17, 4, 3], page_size=4, device=device)
    k, v = (torch.randn(len(problem.q), 2, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    pools = {}
    for name in ("reference", "flashinfer"):
        attn = attention_for(problem, name)
        pools[name] = [pool.clone() for pool in problem.kv]
        attn.append(attn.plan(problem.batch), k, v, tuple(pools[name]))
        attn.copy_pages([1, 0], [2, 3], tuple(pools[name]))
    for ours, right in zip(pools["flashinfer"], pools["reference"], strict=True):
        assert torch.equal(ours.nan_to_num(7), right.nan_to_num(7))


def test_whole_steps_over_a_cache_are_right(device):
    torch.manual_seed(3)
    results = []
    for name in ("reference", "flashinfer"):
        cache = sennit.KVCache([PLAIN], num_tokens=512, page_size=16, device=device, backend=name)
        a, b = cache.add(), cache.add()
        rows = torch.Generator().manual_seed(4)
        for items in ([(a, 40), (b, 3)], [(a, 1), (b, 1)], [(a, 1), (b, 9)]):
            with cache.step(items) as step:
                q, k, v = (
                    torch.randn(step.num_tokens, heads, 64, generator=rows).bfloat16().to(device) for heads in (8, 2, 2)
                )
                out = step.attend(0, q, k, v, sm_scale=0.125)
        results.append(out.float().cpu())
    torch.testing.assert_close(results[1], results[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (
            sennit.AttentionSpec.mla(num_qo_heads=16, kv_lora_rank=64, qk_rope_head_dim=16, dtype=torch.bfloat16),
            "latents",
        ),
        (gqa(4, 64), "bfloat16 or float16"),
        (PLAIN.replace(kv_dtype=torch.float16), "alike"),
        (gqa(4, 80, dtype=torch.bfloat16), "head dimensions 64, 128, 256"),
        (gqa(4, 128, 64, dtype=torch.bfloat16), "head dimensions"),
        (PLAIN.replace(learned_sinks=True), "sinks: "),
        (PLAIN.replace(alibi=True), "alibi: "),
        (PLAIN.replace(window_left=4, num_sink_tokens=1), "num_sink_tokens: "),
        (PLAIN.replace(window_right=1), "window_right: "),
        (PLAIN.replace(score_mod=lambda score, b, h, q_idx, kv_idx: score * 2), "score_mod: "),
        (PLAIN.replace(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx > 3), "mask_mod: "),
    ],
)
def test_layers_that_it_cannot_do_are_refused_with_the_reason(device, spec, reason):
    with pytest.raises(UnsupportedFeature, match=reason):
        sennit.BatchAttention(spec, page_size=16, device=device, backend="flashinfer")


@pytest.mark.parametrize("feature", ["split_size", "packed_mask", "tree", "packed keys", "bounds"])
def test_plans_that_it_cannot_do_are_refused(device, feature):
    rng = np.random.default_rng(5)
    options = {
        "packed_mask": {"masked": True}, "tree": {"trees": [None, [-1, 0]]}, "packed keys": {"page_size": None},
        "bounds": {"bounds": [30, 8]}, "split_size": {},
    }  # fmt: skip
    problem = make_problem(rng, PLAIN, [5, 2], [20, 2], device=device, **options[feature])
    with pytest.raises(UnsupportedFeature, match="'flashinfer' does not take it"):
        solve(problem, "flashinfer", **({"split_size": 64} if feature == "split_size" else {}))


def test_explicit_slots_are_written_where_rows_have_a_position(device):
    problem = make_problem(np.random.default_rng(8), PLAIN, [3, 2], [1, 5], page_size=4, device=device)
    slots, pools = [-1, 6, 7, 1, -1], {}
    batch = dataclasses.replace(problem.batch, slot_mapping=np.array(slots))
    k, v = (torch.randn(5, 2, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    for name in ("reference", "flashinfer"):
        attn = attention_for(problem, name)
        pools[name] = [torch.zeros_like(pool) for pool in problem.kv]
        attn.append(attn.plan(batch), k, v, tuple(pools[name]))
    assert torch.equal(pools["flashinfer"][0], pools["reference"][0])
    assert pools["flashinfer"][1].any(dim=(2, 3)).sum() == 2


@pytest.mark.parametrize("sm_scale", [0.0, -0.1])
def test_scales_that_its_kernels_compute_wrongly_are_refused(device, sm_scale):
    problem = make_problem(np.random.default_rng(9), PLAIN, [5], [20], device=device)
    with pytest.raises(UnsupportedFeature, match="sm_scale"):
        solve(dataclasses.replace(problem, sm_scale=sm_scale), "flashinfer")


def test_windows_without_causality_are_refused(device):
    spec = PLAIN.replace(window_left=9)
    problem = make_problem(np.random.default_rng(10), spec, [5], [20], causal=False, device=device)
    with pytest.raises(UnsupportedFeature, match="without causality"):
        solve(problem, "flashinfer")


@pytest.mark.parametrize(("widths", "reason"), [((65, 65), "begin at 16 bytes"), ((64, 72), "the same strides")])
def test_pools_that_it_would_read_wrongly_are_refused(device, widths, reason):
    problem = make_problem(np.random.default_rng(7), PLAIN, [5], [20], device=device)
    pools = tuple(torch.zeros(2, 16, 2, width, dtype=torch.bfloat16, device=device)[..., :64] for width in widths)
    attn = attention_for(problem, "flashinfer")
    with pytest.raises(UnsupportedFeature, match=reason):
        attn.run(attn.plan(sennit.Batch.parse("5@20", page_size=16)), problem.q, pools, sm_scale=0.1)


def test_where_it_is_not_installed_or_there_is_no_gpu_it_says_so(monkeypatch):
    with pytest.raises(BackendUnavailable, match="it runs on GPUs, not on cpu"):
        sennit.BatchAttention(PLAIN, page_size=16, device="cpu", backend="flashinfer")
    if not REAL:
        assert "pip install flashinfer-python" in BACKEND.available(torch.device("cuda")).reason


def test_what_goes_wrong_in_flashinfer_is_told_as_an_error_of_the_backend(device, monkeypatch):
    class Broken(Wrapper):
        def plan(self, *args, **options):
            raise RuntimeError("ninja: no such file")

    monkeypatch.setattr(
        backend, "import_module", lambda name: SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Broken)
    )
    problem = make_problem(np.random.default_rng(6), PLAIN, [5, 2], [20, 2], device=device)
    with pytest.raises(BackendUnavailable, match="cannot plan this step: ninja"):
        solve(problem, "flashinfer")
