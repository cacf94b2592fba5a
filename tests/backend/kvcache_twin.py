"""Small caches, and what tests compare of them beside what their twins do."""

from __future__ import annotations

import torch

import sennit
from sennit.check import twin
from sennit.check.oracle import Rules, dense_attention
from sennit.check.twin import SCALE, Fault, StepFault, fill_with_nan, host_state
from sennit.kvcache import KVCache

__all__ = [
    "SCALE", "Fault", "StepFault", "Twin", "assert_right", "assert_same_contents", "assert_same_state", "attend_all",
    "contents", "fill_with_nan", "gqa_spec", "host_state", "make_cache", "mla_spec", "whole_state",
]  # fmt: skip


def gqa_spec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=8, head_dim_vo=8, dtype=torch.float32, **fields):
    return sennit.AttentionSpec(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        dtype=dtype,
        **fields,
    )


def mla_spec(dtype=torch.float32):
    return sennit.AttentionSpec.mla(num_qo_heads=3, kv_lora_rank=16, qk_rope_head_dim=8, dtype=dtype)


def make_cache(specs=None, *, num_pages=40, page_size=4, **options):
    """A small cache whose every slot holds NaN, as fresh memory may; each group has so many pages."""
    options = {"device": "cpu"} | options
    return fill_with_nan(
        KVCache(specs or [gqa_spec()] * 2, num_tokens=num_pages * page_size, page_size=page_size, **options)
    )


def contents(cache):
    """What every layer has stored for every sequence."""
    return {(seq, layer): cache.read(seq, layer) for seq in cache.sequences for layer in cache.layers}


def whole_state(cache):
    return host_state(cache), contents(cache)


def assert_same_contents(got, expected):
    """Bit for bit; rows whose page has been released are NaN in both."""
    assert got.keys() == expected.keys()
    for key, pair in expected.items():
        for ours, theirs in zip(got[key], pair, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0)), f"sequence, layer {key}"
            assert ours is None or torch.equal(ours.isnan(), theirs.isnan()), f"sequence, layer {key}"


def assert_same_state(got, expected):
    assert got[0] == expected[0]
    assert_same_contents(got[1], expected[1])


def attend_all(cache, step):
    """Let every layer attend to zeros."""
    for layer, spec in zip(cache.layers, cache.specs, strict=True):
        rows, options = step.num_tokens, {"dtype": spec.dtype, "device": cache.device}
        k = torch.zeros(rows, spec.num_kv_heads, spec.head_dim_qk, **options)
        v = torch.zeros(rows, spec.num_kv_heads, spec.head_dim_vo, **options)
        q = torch.zeros(rows, spec.num_qo_heads, spec.head_dim_qk, **options)
        step.attend(layer, q, *((None, None) if layer in cache.kv_owner else (k, v)), sm_scale=SCALE)


def dense(spec, q, k, v, *, causal, dtype):
    if spec.latent:
        k, v = k[:, None], k[:, None, : spec.head_dim_vo]
    rules = Rules(window_left=spec.window_left, num_sink_tokens=spec.num_sink_tokens)
    return dense_attention(q, k, v, causal=causal, sm_scale=SCALE, rules=rules, dtype=dtype)[0]


def assert_right(spec, requests, *, causal=True):
    """The error against float64 is at most twice that of a plain computation in the spec's dtype, and one rounding.

    ``requests``: ``(out, q, k, v)`` of each.
    """
    error = plain_error = largest = torch.zeros((), dtype=torch.float64)
    for out, q, k, v in requests:
        exact = dense(spec, q, k, v, causal=causal, dtype=torch.float64)
        plain = dense(spec, q, k, v, causal=causal, dtype=spec.dtype)
        assert out.shape == exact.shape
        if exact.numel():
            error = torch.maximum(error, (out - exact).abs().max().cpu())
            plain_error = torch.maximum(plain_error, (plain - exact).abs().max().cpu())
            largest = torch.maximum(largest, exact.abs().max().cpu())
    assert error <= 2 * plain_error + torch.finfo(spec.dtype).eps * max(1.0, float(largest))


class Twin(twin.Twin):
    """The twin of the long check, whose comparisons must pass."""

    def step(self, items, **options):
        found = super().step(items, **options)
        for comparison in found:
            assert comparison.passed, f"{items}: {comparison}"
        assert not options.get("verify") or len(found) == self.cache.num_layers
        return found
