"""User functions printed as C++ and compiled, over blocks of hostile values, against PyTorch and the reference evaluator."""

from __future__ import annotations

import ctypes
import operator
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

import sennit
from sennit import jit, variants
from sennit.backends.cpu import printing
from sennit.backends.cpu.instructions import instruction_set
from sennit.backends.reference.variants import evaluate
from sennit.check.functions import random_functions
from sennit.errors import BuildUnavailable
from sennit.variants import Graph, trace

try:
    LANES = instruction_set().lanes
except BuildUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

QUERIES, STEPS = 32, 77  # steps: more than are taken at once, and no multiple of the lanes
HEADS, REQUESTS, LONGEST, REQUEST = 3, 2, 90, 1
INT32_MIN = -(2**31)
RNG = torch.Generator().manual_seed(11)

# The library: as print_graphs makes it, but with a class for each of several pairs of functions.
UNIT = """#include <tvm/ffi/c_api.h>
#include "apply.h"
namespace sennit {{
namespace {{
{structs}
constexpr GraphFunction kFunctions[] = {{{functions}}};
}}
}}
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_address(void*, const TVMFFIAny* args, int32_t, TVMFFIAny* result) {{
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = reinterpret_cast<int64_t>(sennit::kFunctions[args[0].v_int64]);
  return 0;
}}
"""


class Capture(ctypes.Structure):
    """``sennit::GraphCapture``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )


class Block(ctypes.Structure):
    """``sennit::GraphBlock``."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("steps", ctypes.c_int32),
        ("vectors", ctypes.c_int32),
        ("step_stride", ctypes.c_int64),
        ("q_idx", ctypes.c_void_p),
        ("h", ctypes.c_void_p),
        ("kv_idx", ctypes.c_void_p),
        ("kv_per_lane", ctypes.c_bool),
        ("b", ctypes.c_int32),
        ("captures", ctypes.POINTER(Capture)),
    )


@dataclass(frozen=True)
class Case:
    """Functions, and the tensors that they read."""

    score_mod: Graph | None
    mask_mod: Graph | None = None
    captured: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def captures(self) -> tuple[variants.Capture, ...]:
        found = {c for graph in (self.score_mod, self.mask_mod) if graph for c in graph.captures}
        return tuple(sorted(found, key=lambda capture: capture.name))


@dataclass(frozen=True)
class Pairs:
    """What a block holds: logits ``[steps, queries]``, indices of queries, and those of keys for steps or for pairs."""

    score: torch.Tensor
    q_idx: torch.Tensor
    h: torch.Tensor
    kv_idx: torch.Tensor

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        kv_idx = self.kv_idx if self.kv_idx.ndim == 2 else self.kv_idx.unsqueeze(1)
        b = torch.tensor(REQUEST, dtype=torch.int32)
        return {"score": self.score, "b": b, "h": self.h, "q_idx": self.q_idx, "kv_idx": kv_idx}


def made(*functions: tuple[Callable[..., Any] | None, Callable[..., Any] | None, dict[str, torch.Tensor]]) -> list[Case]:
    return [Case(s and trace(s, "score"), m and trace(m, "mask"), captured) for s, m, captured in functions]


def compiled(cases: Sequence[Case]) -> list[int]:
    """Addresses of the cases' functions, all in one library."""
    structs = (printing.print_struct(f"G{i}", c.score_mod, c.mask_mod, c.captures) for i, c in enumerate(cases))
    functions = ", ".join(f"apply<G{i}>" for i in range(len(cases)))
    text = UNIT.format(structs="".join(structs), functions=functions)
    headers = printing.HEADERS
    source = jit.Source("cpu-graph-tests", (("graphs.cpp", text),), headers, (*instruction_set().flags, *printing.FLAGS))
    module = jit.load(source)
    return [int(module["address"](i)) for i in range(len(cases))]


def applied(address: int, case: Case, pairs: Pairs, gap: int = 0) -> torch.Tensor:
    """What a compiled function makes of a block whose steps are ``gap`` floats farther apart than they need be."""
    queries = pairs.score.shape[1]
    logits = torch.full((len(pairs.score), queries + gap), 7.0)
    logits[:, :queries] = pairs.score
    captured = [case.captured[capture.name] for capture in case.captures]
    numbers = [((ctypes.c_int64 * t.ndim)(*t.shape), (ctypes.c_int64 * t.ndim)(*t.stride())) for t in captured]
    captures = (Capture * len(captured))(
        *(Capture(t.data_ptr(), *shape) for t, shape in zip(captured, numbers, strict=True))
    )
    indices = [index.to(torch.int32).contiguous() for index in (pairs.q_idx, pairs.h, pairs.kv_idx)]
    block = Block(
        logits.data_ptr(), len(logits), queries // LANES, queries + gap, *(index.data_ptr() for index in indices),
        pairs.kv_idx.ndim == 2, REQUEST, captures,
    )  # fmt: skip
    ctypes.CFUNCTYPE(None, ctypes.POINTER(Block))(address)(block)
    assert (logits[:, queries:] == 7).all()
    return logits[:, :queries]


def expected(case: Case, pairs: Pairs) -> torch.Tensor:
    score = pairs.score
    if case.score_mod is not None:
        score = evaluate(case.score_mod, pairs.inputs, case.captured).expand(score.shape)
    if case.mask_mod is not None:
        score = torch.where(evaluate(case.mask_mod, pairs.inputs, case.captured), score, -torch.inf)
    return score


def assert_equal(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted.expand(got.shape), rtol=0, atol=0, equal_nan=True)


def random_pairs(seed: int) -> list[Pairs]:
    """The same logits with a key a step and with a key a lane; some logits are not finite."""
    rng = torch.Generator().manual_seed(seed)
    score = 3 * torch.randn(STEPS, QUERIES, generator=rng)
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    score.view(-1)[::101] = odd[torch.arange(0, score.numel(), 101) % len(odd)]
    q_idx = torch.randint(0, LONGEST, (QUERIES,), generator=rng, dtype=torch.int32)
    h = torch.randint(0, HEADS, (QUERIES,), generator=rng, dtype=torch.int32)
    shapes = ((STEPS,), (STEPS, QUERIES))
    return [
        Pairs(score, q_idx, h, torch.randint(0, LONGEST, shape, generator=rng, dtype=torch.int32)) for shape in shapes
    ]


# Functions as users write them.

bias = torch.randn(LONGEST, HEADS, REQUESTS, LONGEST, generator=RNG).permute(2, 1, 0, 3)  # strides in any order
shared_bias = torch.randn(HEADS, LONGEST, generator=RNG)[:, 1::2].unsqueeze(1).expand(HEADS, LONGEST, LONGEST // 2)
slopes = torch.tensor([0.5, 0.25, 0.125], dtype=torch.bfloat16)
documents = torch.randint(0, 5, (REQUESTS, LONGEST), generator=RNG)
lengths = torch.tensor([9, 40], dtype=torch.int32)
gain = torch.tensor(0.7, dtype=torch.float64)


def full_bias(score, b, h, q_idx, kv_idx):
    return score + bias[b, h, q_idx, kv_idx] - shared_bias[h, q_idx, kv_idx]


def bias_from_the_end(score, b, h, q_idx, kv_idx):
    return score * bias[-1, -h - 1, -q_idx - 1, 7]


def scaled(score, b, h, q_idx, kv_idx):
    return score * gain - 0.1 * (b + 1)


def natten(b, h, q_idx, kv_idx):
    q_x, q_y, kv_x, kv_y = q_idx // 9, q_idx % 9, kv_idx // 9, kv_idx % 9
    return ((q_x.clamp(1, 7) - kv_x).abs() <= 2) & ((q_y.clamp(1, 7) - kv_y).abs() <= 2)


def of_keys_alone(b, h, q_idx, kv_idx):
    return (kv_idx % 3 != b) & (documents[b, kv_idx] > 0)


def of_queries_alone(b, h, q_idx, kv_idx):
    return (h != 1) & (documents[b, q_idx] > 0)


def of_requests_alone(b, h, q_idx, kv_idx):
    return lengths[b] < 10


def constant(score, b, h, q_idx, kv_idx):
    return b * 0.5 + 1


def sinks(score, b, h, q_idx, kv_idx):
    return torch.where((kv_idx < 4) | (q_idx - kv_idx < lengths[b]), score, -float("inf"))


EXAMPLES = made(
    (None, variants.causal, {}),
    (None, variants.sliding_window(20), {}),
    (None, variants.prefix_lm(lengths), {"prefix_length": lengths}),
    (None, variants.document(documents), {"document_id": documents}),
    (variants.alibi(slopes), None, {"slopes": slopes}),
    (variants.alibi(slopes.float()), variants.causal, {"slopes": slopes.float()}),
    (variants.relative_bias(bias[0, :, 0], 16), None, {"table": bias[0, :, 0]}),
    (full_bias, variants.document(documents), {"bias": bias, "shared_bias": shared_bias, "document_id": documents}),
    (bias_from_the_end, natten, {"bias": bias}),
    (scaled, None, {"gain": gain}),
    (None, of_keys_alone, {"documents": documents}),
    (None, of_queries_alone, {"documents": documents}),
    (None, of_requests_alone, {"lengths": lengths}),
    (constant, of_keys_alone, {"documents": documents}),
    (sinks, of_queries_alone, {"lengths": lengths, "documents": documents}),
)
for seed in range(12):
    functions = random_functions(
        np.random.default_rng(seed), heads=HEADS, requests=REQUESTS, positions=LONGEST, dtype=torch.float32
    )
    if functions.score_mod or functions.mask_mod:
        EXAMPLES += made((functions.score_mod, functions.mask_mod, functions.captures))


def test_functions_as_users_write_them():
    addresses = compiled(EXAMPLES)
    for pairs in random_pairs(1):
        for case, address in zip(EXAMPLES, addresses, strict=True):
            got, wanted = applied(address, case, pairs, gap=LANES), expected(case, pairs)
            tolerance = 5e-7 if "tanh" in str(case.score_mod) else 0
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=0, equal_nan=True, msg=lambda m: f"{case}: {m}")


# Every operation on every dtype: of x[kv_idx] and y[q_idx].

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (torch.bool, *INTEGERS, *FLOATS)
WHOLE = (0, 1, -1, 2, 3, -3, 7, -8, 60, -100, 127, -128, 1000, -32768, 65537, 2**24 + 1, -(2**31), 2**40 + 3, -(2**63))
REAL = (0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 3.75, -0.3, 1e-3, -7.1, 60000.0, 65519.0, 1e-7, -3e-5, 1e30, -1e-40,
        float("inf"), -float("inf"), float("nan"))  # fmt: skip



def numpys(ufunc: np.ufunc, name: str) -> Callable[..., Any]:
    """NumPy's function on tensors, since PyTorch's vectorised ones round otherwise; PyTorch's name in traces."""

    def function(*args: Any) -> Any:
        if not isinstance(args[0], torch.Tensor):
            return getattr(torch, name)(*args)
        wide = torch.promote_types(args[0].dtype, torch.float32)
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(ufunc(*(arg.to(wide).numpy() for arg in args))).to(args[0].dtype)

    return function


sqrt, remainder = numpys(np.sqrt, "sqrt"), numpys(np.mod, "remainder")
Group = Callable[[Any, Any], list[Any]]
GROUPS: dict[str, tuple[Group, Sequence[torch.dtype]]] = {
    "arithmetic": (
        lambda x, y: [x + y, x - y, x * y, -x, abs(x), torch.minimum(x, y), torch.maximum(x, y)],
        (*INTEGERS, *FLOATS),
    ),
    "bits": (lambda x, y: [x & y, x | y, x ^ y, ~x], (torch.bool, *INTEGERS)),
    "floats": (lambda x, y: [x / y, torch.floor(x), sqrt(x), remainder(x, y)], FLOATS),
    "integers": (
        lambda x, y: [x // y, x % y, *(x // n for n in (1, 2, 3, 7, 64)), *(x % n for n in (1, 2, 3, 7, 64))],
        INTEGERS,
    ),
    "negative divisors": (lambda x, y: [*(x // n for n in (-1, -3, -8)), *(x % n for n in (-1, -3, -8))], INTEGERS[1:]),
    "choices": (lambda x, y: [torch.where(x == y, x, y), torch.where(x < y, y, x)], (*INTEGERS, *FLOATS)),
    "conversions": (lambda x, y: [x.to(dtype) for dtype in DTYPES], DTYPES),
}


def values(dtype: torch.dtype) -> torch.Tensor:
    """Hostile values of a dtype."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        return torch.tensor(REAL, dtype=torch.float64).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.tensor([*(n for n in WHOLE if limits.min <= n <= limits.max), limits.max], dtype=dtype)


def tables(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Values for every step and for every query."""
    found = values(dtype)
    return found[torch.arange(STEPS) % len(found)], found[torch.arange(QUERIES) % len(found)]


def value_pairs() -> list[Pairs]:
    """Logits of 0, and indices that meet in all pairs."""
    q_idx, kv_idx = torch.arange(QUERIES, dtype=torch.int32), torch.arange(STEPS, dtype=torch.int32)
    score, h = torch.zeros(STEPS, QUERIES), torch.zeros_like(q_idx)
    return [Pairs(score, q_idx, h, kv_idx), Pairs(score, q_idx, h, kv_idx.unsqueeze(1).expand(STEPS, QUERIES))]


def checked(group: Group, dtype: torch.dtype) -> Case:
    """A mask that is true where each result of a group is what PyTorch computes; all of its digits are compared."""
    x, y = tables(dtype)
    if group in (GROUPS["integers"][0], GROUPS["negative divisors"][0]):
        # PyTorch faults where it divides by 0, and where a result is too large.
        y = torch.where((y == 0) | (y == -1), 5, y)
        x = torch.where(x == torch.iinfo(dtype).min, x + 1, x)
    wanted = group(*torch.broadcast_tensors(x.unsqueeze(1), y))
    of = [result.dtype for result in wanted]
    wide = torch.float64 if len(set(of)) > 1 else of[0]  # results of several dtypes are small enough
    z = torch.stack([result.to(wide) for result in wanted])
    free = ~torch.stack([possible(x, dtype) for dtype in of])

    def mask(b, h, q_idx, kv_idx):
        seen = q_idx >= 0
        for i, result in enumerate(group(x[kv_idx], y[q_idx])):
            digits, expected = result.to(wide), z[i, kv_idx, q_idx]
            same = digits == expected
            if wide.is_floating_point:
                same = same | ((digits != digits) & (expected != expected))
            seen = seen & (same | free[i, kv_idx])
        return seen

    return Case(None, trace(mask, "mask"), {"x": x, "y": y, "z": z, "free": free})


def possible(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Whether values can be converted to a dtype: floats that an integer cannot hold may become anything."""
    if not x.is_floating_point() or dtype.is_floating_point or dtype == torch.bool:
        return torch.ones(x.shape, dtype=torch.bool)
    limits = torch.iinfo(dtype)
    return (x.double() > limits.min - 1.0) & (x.double() < limits.max + 1.0) if dtype != torch.int64 else x.abs() < 2.0**63


def compared(dtype: torch.dtype) -> Case:
    """Six comparisons, as the bits of a score."""
    x, y = tables(dtype)

    def score_mod(score, b, h, q_idx, kv_idx):
        a, b = x[kv_idx], y[q_idx]
        return (a == b) + 2 * (a != b) + 4 * (a < b) + 8 * (a <= b) + 16 * (a > b) + 32 * (a >= b)

    return Case(trace(score_mod, "score"), None, {"x": x, "y": y})


def test_operations_are_those_of_pytorch():
    names = [(name, dtype) for name, (_, dtypes) in GROUPS.items() for dtype in dtypes]
    cases = [checked(GROUPS[name][0], dtype) for name, dtype in names]
    addresses = compiled(cases)
    for pairs in value_pairs():
        for name, case, address in zip(names, cases, addresses, strict=True):
            wrong = (applied(address, case, pairs) != 0).nonzero()
            assert not len(wrong), (name, [(case.captured["x"][s], case.captured["y"][q]) for s, q in wrong[:5]])


def test_comparisons_are_those_of_pytorch():
    cases = [compared(dtype) for dtype in DTYPES]
    for case, address in zip(cases, compiled(cases), strict=True):
        x, y = case.captured["x"].unsqueeze(1), case.captured["y"]
        signs = [x == y, x != y, x < y, x <= y, x > y, x >= y]
        wanted = sum(sign.float() * 2**bit for bit, sign in enumerate(signs))
        for pairs in value_pairs():
            assert_equal(applied(address, case, pairs), wanted)
