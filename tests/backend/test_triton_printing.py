"""User functions printed as Triton, over hostile values, against PyTorch and the reference evaluator.

In Triton's interpreter where TRITON_INTERPRET=1 is set, else compiled for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from printed_functions import (
    DTYPES,
    HEADS,
    REQUEST,
    USUAL,
    Case,
    Pairs,
    Printed,
    check_comparisons,
    check_functions_as_users_write_them,
    check_functions_of_float32,
    check_functions_of_float64_and_powers,
    check_hidden_pairs_never_fault,
    check_operations,
    check_random_functions,
    random_pairs,
)

import sennit

triton = pytest.importorskip("triton")
if not (triton.knobs.runtime.interpret or torch.cuda.is_available()):
    pytest.skip("there is no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

import triton.language as tl  # noqa: E402

from sennit.backends.gpus import functions  # noqa: E402

# NumPy, which the interpreter computes with, warns of what functions do on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
MOST_KEYS = 512  # of a tile


@triton.jit(do_not_specialize=["request"])  # which kernels read from a plan
def tile(
    scores, request, heads, q_positions, kv_positions, captures, steps,
    change: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    query = tl.arange(0, QUERIES)[:, None]
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)[None, :]
    places = key * QUERIES + query
    changed = change(
        tl.load(scores + places, mask=key < steps, other=0.0),
        request,
        tl.load(heads + query),
        tl.load(q_positions + query),
        tl.load(kv_positions + key, mask=key < steps, other=0),
        captures,
    )
    tl.store(scores + places, changed, mask=key < steps)


def prepared(cases: Sequence[Case]) -> list[Printed]:
    return [partial(applied, functions.graph_function(spec_of(case)), spec_of(case), case) for case in cases]


def spec_of(case: Case) -> sennit.AttentionSpec:
    return sennit.AttentionSpec(
        num_qo_heads=HEADS, num_kv_heads=HEADS, head_dim=8, dtype=torch.float32,
        score_mod=case.score_mod, mask_mod=case.mask_mod,
    )  # fmt: skip


def applied(change: object, spec: sennit.AttentionSpec, case: Case, pairs: Pairs) -> torch.Tensor:
    """What a printed function makes of the pairs, in tiles of some keys."""
    steps, queries = pairs.score.shape
    scores = pairs.score.to(DEVICE, copy=True)
    kv_idx = pairs.kv_idx if pairs.kv_idx.ndim == 1 else pairs.kv_idx[:, 0].contiguous()
    indices = (index.to(DEVICE, torch.int32) for index in (pairs.h, pairs.q_idx, kv_idx))
    captures = functions.capture_arguments(spec, {name: t.to(DEVICE) for name, t in case.captured.items()})
    keys = min(triton.next_power_of_2(steps), MOST_KEYS)
    # Without fusion of products and sums: every operation of a graph is rounded, as PyTorch does it.
    tile[(triton.cdiv(steps, keys),)](
        scores, REQUEST, *indices, captures, steps, change, queries, keys, num_warps=16, enable_fp_fusion=False
    )
    return scores.cpu()


def test_functions_as_users_write_them():
    check_functions_as_users_write_them(prepared, random_pairs(1)[:1])


@pytest.mark.parametrize("dtypes", [USUAL, pytest.param(set(DTYPES) - set(USUAL), marks=pytest.mark.slow)])
def test_operations_are_those_of_pytorch(dtypes):
    check_operations(prepared, dtypes)


def test_comparisons_are_those_of_pytorch():
    check_comparisons(prepared)


def test_functions_of_float32_err_by_few_units_in_the_last_place():
    limits = {
        torch.exp: 1.5, torch.exp2: 1.5, torch.tanh: 2.5, torch.log: 1.5, torch.log2: 1.5,
        torch.sin: 2.0, torch.cos: 2.0, torch.sqrt: 0.6,
    }  # fmt: skip
    check_functions_of_float32(prepared, limits)


def test_functions_of_float64_and_powers_are_those_of_pytorch():
    check_functions_of_float64_and_powers(prepared, 2e-13)


def test_what_hidden_pairs_compute_never_faults():
    check_hidden_pairs_never_fault(prepared)


@pytest.mark.parametrize(("seed", "count"), [(0, 12), pytest.param(1, 60, marks=pytest.mark.slow)])
def test_random_functions_give_what_the_reference_evaluator_gives(seed, count):
    check_random_functions(prepared, count, random_pairs(seed)[:1], seed)
