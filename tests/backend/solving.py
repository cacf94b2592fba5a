"""Which tests run on which backends; and running a hostile problem on one, to compare the result with the oracle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

import sennit
from sennit.check.compare import compare
from sennit.check.problems import Problem
from sennit.env import triton_interpreted

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.float64)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9

# What each backend must take. They are not asked, since what one wrongly refused would then not be tested. All the rest
# they must refuse (test_attention.py).
RUNS_ON = {
    "cpu": ("cpu",),
    "reference": ("cpu", "cuda"),
    "reference-items": ("cpu", "cuda"),
    "triton": ("cpu",) if triton_interpreted() else ("cuda",),
    **({"hopper": ("cuda",)} if HOPPER else {}),
}
COMPUTES = {
    "cpu": FLOATS,
    "reference": DTYPES,
    "reference-items": DTYPES,
    "triton": FLOATS,
    "hopper": (torch.bfloat16, torch.float16),
}
BACKENDS = list(RUNS_ON)


def _params(*value: object, name: str = "", dtypes: Sequence[torch.dtype] = (torch.float32,)) -> Iterator[Any]:
    """Parameters ``(backend, device, *value)`` for all backends that must take ``dtypes``."""
    for backend in BACKENDS:
        if set(dtypes) <= set(COMPUTES[backend]):
            for device in filter(DEVICES.count, RUNS_ON[backend]):
                for form, marks in _forms(backend).items():
                    label = "-".join(filter(None, [form, device if len(DEVICES) > 1 else "", name]))
                    yield pytest.param(backend, device, *value, id=label, marks=marks)


def _forms(backend: str) -> dict[str, list[pytest.MarkDecorator]]:
    """How a backend is run, and the marks of each: the CPU backend also with wide tiles wherever there can be some."""
    if backend != "cpu":
        return {backend: []}
    return {"cpu": [pytest.mark.compiler], "cpu-wide": [pytest.mark.compiler, pytest.mark.wide_tiles]}


each_backend = pytest.mark.parametrize(("backend", "device"), list(_params()))


def each_backend_and_dtype(*dtypes: torch.dtype) -> pytest.MarkDecorator:
    """Parameters ``backend``, ``device`` and ``dtype``: the backends that must take each dtype."""
    params = [param for dtype in dtypes for param in _params(dtype, name=str(dtype)[6:], dtypes=[dtype])]
    return pytest.mark.parametrize(("backend", "device", "dtype"), params)


def each_backend_and_specs(specs: Mapping[str, Sequence[sennit.AttentionSpec]]) -> pytest.MarkDecorator:
    """Parameters ``backend``, ``device`` and ``specs``: the backends that must take all specs of a name."""
    params = []
    for name, layers in specs.items():
        dtypes = [dtype for spec in layers for dtype in (spec.dtype, spec.kv_dtype)]
        params += _params(layers, name=name, dtypes=dtypes)
    return pytest.mark.parametrize(("backend", "device", "specs"), params)


def must_take(backend: str, spec: sennit.AttentionSpec) -> bool:
    """Whether a backend must take a layer of dtypes that it computes."""
    largest = max(spec.head_dim_qk, spec.head_dim_vo)
    return backend != "hopper" or (spec.dtype == spec.kv_dtype and not spec.latent and largest <= 256)


def attention_for(problem: Problem, backend: str) -> sennit.BatchAttention:
    if not must_take(backend, problem.spec):
        pytest.skip(f"{backend} is not for {problem.spec}")
    return sennit.BatchAttention(
        problem.spec, page_size=problem.page_size, kv_layout=problem.kv_layout, device=problem.q.device, backend=backend
    )


def solve(problem: Problem, backend: str, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    attn = attention_for(problem, backend)
    plan = attn.plan(problem.batch, causal=problem.causal, **problem.plan_options, **options)
    return attn.run(plan, problem.q, problem.kv, sm_scale=problem.sm_scale, return_lse=True, **problem.run_options)


def assert_right(problem: Problem, backend: str, **options: object) -> None:
    comparison = compare(problem, *solve(problem, backend, **options))
    assert comparison.passed, f"{comparison}: {problem.text}"


def gqa(
    group: int, dim: int, dim_vo: int | None = None, kv_heads: int = 2, dtype=torch.float32
) -> sennit.AttentionSpec:
    return sennit.AttentionSpec(
        num_qo_heads=group * kv_heads, num_kv_heads=kv_heads, head_dim_qk=dim, head_dim_vo=dim_vo or dim, dtype=dtype
    )
