"""A spec means the same however it was made, and holds plain Python numbers."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from sennit import AttentionSpec

SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
MLA = AttentionSpec.mla(num_qo_heads=4, kv_lora_rank=8, qk_rope_head_dim=4, dtype=torch.float32)


def test_replacing_the_dtype_takes_a_kv_dtype_that_followed_it_along():
    for spec in (SPEC, MLA):
        changed = spec.replace(dtype=torch.bfloat16)
        assert (changed.dtype, changed.kv_dtype) == (torch.bfloat16, torch.bfloat16)


def test_replacing_the_dtype_leaves_a_kv_dtype_that_was_chosen():
    mixed = SPEC.replace(kv_dtype=torch.float16)
    assert mixed.replace(dtype=torch.bfloat16).kv_dtype == torch.float16
    assert mixed.replace(num_kv_heads=1).kv_dtype == torch.float16
    both = SPEC.replace(dtype=torch.bfloat16, kv_dtype=torch.float32)
    assert (both.dtype, both.kv_dtype) == (torch.bfloat16, torch.float32)


def test_head_dim_is_the_common_dimension_or_none():
    assert SPEC.head_dim == 8
    assert MLA.head_dim is None
    assert SPEC.replace(head_dim=16).head_dim == 16
    assert SPEC.replace(head_dim_qk=16).head_dim is None
    assert MLA.replace(head_dim_qk=8).head_dim == 8
    assert AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=8, head_dim_vo=8, dtype=torch.float32) == SPEC


@pytest.mark.parametrize("spec", [SPEC, MLA], ids=["gqa", "mla"])
def test_a_copied_spec_equals_the_first(spec):
    copies = (
        pickle.loads(pickle.dumps(spec)),
        copy.deepcopy(spec),
        dataclasses.replace(spec),
        AttentionSpec(**dataclasses.asdict(spec)),
        spec.replace(),
    )
    for twin in copies:
        assert twin == spec
        assert (hash(twin), twin.key, twin.head_dim) == (hash(spec), spec.key, spec.head_dim)


def test_numpy_numbers_are_stored_as_python_ones():
    spec = AttentionSpec(
        num_qo_heads=np.int64(4), num_kv_heads=np.uint8(2), head_dim=np.int32(8), dtype=torch.float32,
        window_left=np.int16(7), num_sink_tokens=np.int8(1), learned_sinks=np.True_, logits_soft_cap=np.float32(5),
    )  # fmt: skip
    plain = SPEC.replace(window_left=7, num_sink_tokens=1, learned_sinks=True, logits_soft_cap=5)
    assert spec == plain
    assert spec.key == plain.key
    kinds = {f.name: type(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
    integers = (
        "num_qo_heads",
        "num_kv_heads",
        "head_dim",
        "head_dim_qk",
        "head_dim_vo",
        "window_left",
        "num_sink_tokens",
    )
    assert {kinds[name] for name in integers} == {int}
    assert (kinds["learned_sinks"], kinds["logits_soft_cap"]) == (bool, float)
