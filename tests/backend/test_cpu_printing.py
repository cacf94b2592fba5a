"""User functions printed as C++ and compiled, over hostile values, against PyTorch and the reference evaluator."""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
constexpr GraphFunction kFunctions[] = {{
{functions}
}};
}}
}}
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_address(void*, const TVMFFIAny* args, int32_t, TVMFFIAny* result) {{
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = reinterpret_cast<int64_t>(sennit::kFunctions[args[0].v_int64]);
  return 0;
}}
"""


BY_LANE = "[](const GraphBlock& block) {{ apply_by_lane({0}(block), block); }}"  # less to compile


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


def made(
    *functions: tuple[Callable[..., Any] | None, Callable[..., Any] | None, dict[str, torch.Tensor]],
) -> list[Case]:
    return [Case(s and trace(s, "score"), m and trace(m, "mask"), captured) for s, m, captured in functions]


def compiled(cases: Sequence[Case], function: str = "apply<{}>") -> list[int]:
    """Addresses of the cases' functions, all in one library; ``function`` is what C++ makes of each case's class."""
    structs = (printing.print_struct(f"G{i}", c.score_mod, c.mask_mod, c.captures) for i, c in enumerate(cases))
    functions = ",\n".join(function.format(f"G{i}") for i in range(len(cases)))
    units = (("graphs.cpp", UNIT.format(structs="".join(structs), functions=functions)),)
    source = jit.Source("cpu-graph-tests", units, printing.HEADERS, (*instruction_set().flags, *printing.FLAGS))
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
for seed in range(8):
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
            tolerance = 5e-7 if "tanh" in str(case.score_mod) else 0  # of it and of PyTorch's
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=0, equal_nan=True)


# Every operation on every dtype: of x[kv_idx] and y[q_idx].

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (torch.bool, *INTEGERS, *FLOATS)
USUAL = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32)
WHOLE = (0, 1, -1, 2, 3, -3, 7, -8, 60, -100, 127, -128, 1000, -32768, 65537, 2**24 + 1, -(2**31), 2**40 + 3, -(2**63))
REAL = (0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 3.75, -0.3, 1e-3, -7.1, 60000.0, 65519.0, 65520.0, 1e-7, -3e-5,
        1e30, -1e-40, float("inf"), -float("inf"), float("nan"))  # fmt: skip


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
FLOORED = (operator.floordiv, operator.mod)
Group = Callable[[Any, Any], list[Any]]
GROUPS: dict[str, tuple[Group, Sequence[torch.dtype]]] = {
    "arithmetic": (
        lambda x, y: [
            x + y,
            x - y,
            x * y,
            -x,
            abs(x),
            torch.minimum(x, y),
            torch.maximum(x, y),
            torch.where(x == y, x, -y),
        ],
        (*INTEGERS, *FLOATS),
    ),
    "bits": (lambda x, y: [x & y, x | y, x ^ y, ~x], (torch.bool, *INTEGERS)),
    "floats": (lambda x, y: [x / y, torch.floor(x), sqrt(x), remainder(x, y)], FLOATS),
    "divisions": (lambda x, y: [x // y, x % y, *(f(x, n) for f in FLOORED for n in (1, 2, 3, 64))], INTEGERS),
    "negative divisors": (lambda x, y: [f(x, n) for f in FLOORED for n in (-1, -3, -8)], INTEGERS[1:]),
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


def value_pairs() -> Pairs:
    """Logits of 0, and indices that meet in all pairs; a key a lane."""
    q_idx, kv_idx = torch.arange(QUERIES, dtype=torch.int32), torch.arange(STEPS, dtype=torch.int32)
    return Pairs(torch.zeros(STEPS, QUERIES), q_idx, torch.zeros_like(q_idx), kv_idx.unsqueeze(1).expand(-1, QUERIES))


def checked(group: Group, dtype: torch.dtype) -> Case:
    """A mask that is true where each result of a group is what PyTorch computes; all of its digits are compared."""
    x, y = tables(dtype)
    if group in (GROUPS["divisions"][0], GROUPS["negative divisors"][0]):
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
    return (
        (x.double() > limits.min - 1.0) & (x.double() < limits.max + 1.0) if dtype != torch.int64 else x.abs() < 2.0**63
    )


def compared(dtype: torch.dtype) -> Case:
    """Six comparisons, as the bits of a score."""
    x, y = tables(dtype)

    def score_mod(score, b, h, q_idx, kv_idx):
        a, b = x[kv_idx], y[q_idx]
        return (a == b) + 2 * (a != b) + 4 * (a < b) + 8 * (a <= b) + 16 * (a > b) + 32 * (a >= b)

    return Case(trace(score_mod, "score"), None, {"x": x, "y": y})


@pytest.mark.parametrize("dtypes", [USUAL, pytest.param(set(DTYPES) - set(USUAL), marks=pytest.mark.slow)])
def test_operations_are_those_of_pytorch(dtypes):
    names = [(name, dtype) for name, (_, of) in GROUPS.items() for dtype in of if dtype in dtypes]
    cases = [checked(GROUPS[name][0], dtype) for name, dtype in names]
    addresses = compiled(cases, BY_LANE)
    for name, case, address in zip(names, cases, addresses, strict=True):
        wrong = (applied(address, case, value_pairs()) != 0).nonzero()
        assert not len(wrong), (name, [(case.captured["x"][s], case.captured["y"][q]) for s, q in wrong[:5]])


def test_comparisons_are_those_of_pytorch():
    cases = [compared(dtype) for dtype in DTYPES]
    for case, address in zip(cases, compiled(cases, BY_LANE), strict=True):
        x, y = case.captured["x"].unsqueeze(1), case.captured["y"]
        signs = [x == y, x != y, x < y, x <= y, x > y, x >= y]
        wanted = sum(sign.float() * 2**bit for bit, sign in enumerate(signs))
        assert_equal(applied(address, case, value_pairs()), wanted)


def test_functions_of_float32_err_by_few_units_in_the_last_place():
    limits = {
        torch.exp: 1.5, torch.exp2: 1.5, torch.tanh: 2.5, torch.log: 1.5, torch.log2: 1.5,
        torch.sin: 0.6, torch.cos: 0.6, torch.sqrt: 0.6,
    }  # fmt: skip
    cases = [Case(trace(lambda score, b, h, q_idx, kv_idx, f=f: f(score), "score")) for f in limits]
    rng = torch.Generator().manual_seed(5)
    any_bits = torch.randint(-(2**31), 2**31, (2000, QUERIES), generator=rng, dtype=torch.int32).view(torch.float32)
    moderate = torch.empty(1000, QUERIES).uniform_(-160, 160, generator=rng)
    near_1 = 1 + torch.empty(500, QUERIES).uniform_(-0.5, 0.5, generator=rng) ** 3
    small = torch.empty(500, QUERIES).uniform_(-1, 1, generator=rng) ** 5
    inf = torch.inf
    special = torch.tensor([0.0, -0.0, inf, -inf, torch.nan, 1.0, 2.0**-149, 2.0**-126, 88.8, -103.9, 128, -150])
    x = torch.cat([any_bits, moderate, near_1, small, special.repeat(QUERIES).view(-1, QUERIES)])
    nothing = torch.zeros(QUERIES, dtype=torch.int32)
    pairs = Pairs(x, nothing, nothing, torch.zeros(len(x), dtype=torch.int32))
    for (function, limit), case, address in zip(limits.items(), cases, compiled(cases), strict=True):
        got, exact = applied(address, case, pairs), function(x.double())
        wanted = exact.float()
        usual = wanted.isfinite() & got.isfinite() & (wanted != 0)
        unit = (torch.nextafter(wanted.abs(), torch.tensor(inf)) - wanted.abs()).double()
        assert ((got.double() - exact).abs() / unit)[usual].max() <= limit, function
        assert_equal(torch.where(usual, 0, got), torch.where(usual, 0, wanted))


def test_functions_of_float64_and_powers_are_those_of_pytorch():
    x, y = tables(torch.float64)
    functions = (torch.exp, torch.exp2, torch.tanh, torch.log, torch.log2, torch.sin, torch.cos)
    a, z = x.unsqueeze(1).abs() % 100, torch.stack([f(x % 100) for f in functions])
    powers, float32_powers = a**y, (a.float().double() ** y.float().double()).float()

    def mask(b, h, q_idx, kv_idx):
        base, exponent = x[kv_idx].abs() % 100, y[q_idx]
        results = [(f(x[kv_idx] % 100), z[i, kv_idx]) for i, f in enumerate(functions)]
        results.append((base**exponent, powers[kv_idx, q_idx]))
        results.append(((base.float() ** exponent.float()), float32_powers[kv_idx, q_idx]))
        same = [
            ((got - wanted).abs() <= wanted.abs() * (1e-14 if wanted.dtype == torch.float64 else 1e-7))
            | (got == wanted)
            | ((got != got) & (wanted != wanted))
            for got, wanted in results
        ]
        return functools.reduce(operator.and_, same)

    captured = {"x": x, "y": y, "z": z, "powers": powers, "float32_powers": float32_powers}
    case = Case(None, trace(mask, "mask"), captured)
    [address] = compiled([case], BY_LANE)
    assert_equal(applied(address, case, value_pairs()), torch.zeros(STEPS, QUERIES))


def test_what_hidden_pairs_compute_never_faults():
    """Division by 0 and of the smallest integer by -1, floats that no integer holds, and indices far outside."""

    def wrapped(n: int, dtype: torch.dtype) -> int:
        limits = torch.iinfo(dtype)
        return (n - limits.min) % (limits.max - limits.min + 1) + limits.min

    cases, wanted = [], []
    for dtype in INTEGERS:
        x, y = tables(dtype)
        z = torch.tensor([[wrapped(a // (b or 1), dtype) for b in y.tolist()] for a in x.tolist()], dtype=dtype)

        def divided(b, h, q_idx, kv_idx, x=x, y=y, z=z):
            quotient, rest = x[kv_idx] // y[q_idx], x[kv_idx] % y[q_idx]
            return (y[q_idx] == 0) | ((quotient == z[kv_idx, q_idx]) & (quotient * y[q_idx] + rest == x[kv_idx]))

        cases.append(Case(None, trace(divided, "mask"), {"x": x, "y": y, "z": z}))
        wanted.append(torch.zeros(STEPS, QUERIES))
    for source in FLOATS:
        x, _ = tables(source)

        def converted(score, b, h, q_idx, kv_idx, x=x):
            counts = sum((x[kv_idx].to(dtype) != 0).int() for dtype in INTEGERS)
            return torch.where(counts < 0, counts, score)

        cases.append(Case(trace(converted, "score"), None, {"x": x}))
        wanted.append(torch.zeros(STEPS, QUERIES))
    x, y = tables(torch.int64)
    few = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])

    def far(score, b, h, q_idx, kv_idx):
        return few[y[q_idx], x[kv_idx]]

    def place(n: int, size: int) -> int:
        return min(max(n + size if n < 0 else n, 0), size - 1)

    cases.append(Case(trace(far, "score"), None, {"few": few, "x": x, "y": y}))
    wanted.append(torch.tensor([[few[place(m, 2), place(n, 4)] for m in y.tolist()] for n in x.tolist()]))
    for case, address, right in zip(cases, compiled(cases, BY_LANE), wanted, strict=True):
        assert_equal(applied(address, case, value_pairs()), right)


# Random expressions, of operations that IEEE 754 rounds in one way only: what follows may jump, as floor does.

tiny_table = torch.tensor([7, -3, 100], dtype=torch.int8)
wide_table = torch.tensor([2**40, -5, 3])
half_table = torch.tensor([0.1, -2.5, 300.0], dtype=torch.float16)
double_table = torch.tensor([0.1, 1 / 3, -7.0], dtype=torch.float64)
flags = torch.tensor([True, False, True])
CAPTURED = {
    "tiny_table": tiny_table, "wide_table": wide_table, "half_table": half_table, "double_table": double_table,
    "flags": flags, "slopes": slopes, "documents": documents, "bias": bias,
}  # fmt: skip
# Functions and what they take: ints, floats and bools.
OF_INTS = [
    *((f, "ii") for f in (operator.add, operator.sub, operator.mul, operator.xor, torch.minimum, torch.maximum)),
    *((lambda i, n=n: i // n, "i") for n in (2, 3, -5)), *((lambda i, n=n: i % n, "i") for n in (4, 7, -3)),
    (operator.neg, "i"), (abs, "i"), (operator.invert, "i"), (lambda i: i & 13, "i"), (torch.where, "bii"),
    (lambda i, j: i // (j.abs() % 5 + 1), "ii"), (lambda i: i.to(torch.int16), "i"), (lambda i: i.to(torch.uint8), "i"),
    (lambda i: i.to(torch.int64), "i"), (lambda i: tiny_table[i.int() % 3], "i"), (lambda b: b.int(), "b"),
    (lambda i: wide_table[i.int() % 3], "i"), (lambda i, j: documents[i.int() & 1, j.int() % 90], "ii"),
    (lambda x: torch.clamp(torch.where(x == x, x, 0), -1e4, 1e4).int(), "f"),
]  # fmt: skip
OF_FLOATS = [
    *((f, "ff") for f in (operator.add, operator.sub, operator.mul, operator.truediv, torch.minimum, torch.maximum)),
    *((f, "fi") for f in (operator.add, operator.mul, operator.truediv)),
    *((f, "f") for f in (torch.neg, abs, torch.floor)),
    (torch.where, "bff"), (lambda x: x * 0.3 + 1, "f"), (lambda x: x.half(), "f"), (lambda x: x.bfloat16(), "f"),
    (lambda i: half_table[i.int() % 3], "i"), (lambda i: slopes[i.int() % 3], "i"), (lambda x: x.double(), "f"),
    (lambda i: double_table[i.int() % 3], "i"), (lambda i, j: bias[i.int() % 2, 1, 2, j.int() % 90], "ii"),
    (lambda i: i / 3, "i"), (lambda i: i.float(), "i"), (lambda b: b.float(), "b"),
]  # fmt: skip
OF_BOOLS = [
    *((f, kinds) for f in (operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge)
      for kinds in ("ii", "ff", "fi")),
    *((f, "bb") for f in (operator.and_, operator.or_, operator.xor, operator.eq)), (operator.invert, "b"),
    (lambda i: flags[i.int() % 3], "i"), (lambda i: i.bool(), "i"),
]  # fmt: skip
TABLES = {"i": OF_INTS, "f": OF_FLOATS, "b": OF_BOOLS}
LEAVES = {"i": ("b", "h", "q_idx", "kv_idx"), "f": ("score",)}


def random_tree(rng: np.random.Generator, kind: str, depth: int) -> Any:
    """A name, or a function and the trees of its arguments."""
    if depth == 0 and kind in LEAVES:
        return LEAVES[kind][rng.integers(len(LEAVES[kind]))]
    function, kinds = TABLES[kind][rng.integers(len(TABLES[kind]))]
    return function, *(random_tree(rng, argument, max(depth - 1, 0)) for argument in kinds)


def value(tree: Any, arguments: dict[str, Any]) -> Any:
    return arguments[tree] if isinstance(tree, str) else tree[0](*(value(part, arguments) for part in tree[1:]))


def random_case(rng: np.random.Generator) -> Case:
    score, mask = random_tree(rng, "f", 4), random_tree(rng, "b", 3)

    def score_mod(score_, b, h, q_idx, kv_idx):
        return value(score, {"score": score_, "b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx})

    def mask_mod(b, h, q_idx, kv_idx):
        return value(mask, {"score": q_idx * 0.5, "b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx})

    return Case(trace(score_mod, "score"), trace(mask_mod, "mask"), CAPTURED)


@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 12), pytest.param(1, 60, marks=pytest.mark.slow), pytest.param(2, 200, marks=pytest.mark.thorough)],
)
def test_random_functions_give_what_the_reference_evaluator_gives(seed, count):
    rng = np.random.default_rng(seed)
    cases = [random_case(rng) for _ in range(count)]
    for case, address in zip(cases, compiled(cases), strict=True):
        for pairs in random_pairs(seed):
            assert_equal(applied(address, case, pairs), expected(case, pairs))


def test_equal_functions_are_printed_alike_and_their_names_nowhere():
    def printed(name: str) -> str:
        def function(score, b, h, q_idx, kv_idx):
            return score * 2 + slopes[h]

        function.__name__ = name
        graph = trace(function, "score")
        return printing.print_graphs(graph, trace(variants.causal, "mask"), graph.captures)

    assert printed("*/ first") == printed("second")
    assert "slopes" not in printed("first")


def test_the_library_of_a_spec_gives_the_address_of_its_function():
    spec = sennit.AttentionSpec(
        num_qo_heads=HEADS, num_kv_heads=HEADS, head_dim=8, dtype=torch.float32,
        score_mod=variants.alibi(slopes), mask_mod=variants.document(documents),
    )  # fmt: skip
    case = Case(spec.score_mod, spec.mask_mod, {"slopes": slopes, "document_id": documents})
    address = int(jit.load(printing.graph_source(spec))["graph_function"]())
    for pairs in random_pairs(3):
        assert_equal(applied(address, case, pairs), expected(case, pairs))


SANITIZED = {
    "SENNIT_CXXFLAGS": "-O1 -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all",
    "ASAN_OPTIONS": "detect_leaks=0",  # Python leaks at its end
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("surroundings", "chosen"),
    [
        pytest.param({"SENNIT_CPU_ISA": "avx2"}, "test", id="avx2"),
        pytest.param({"SENNIT_CPU_ISA": "generic"}, "test", id="generic"),
        pytest.param({"CXX": "clang++"}, "test", id="clang"),
        pytest.param(SANITIZED, "users or never_faults or random", id="sanitizers"),
    ],
)
def test_other_instructions_compilers_and_sanitizers_agree(surroundings, chosen):
    """The fast tests above, in a process of their own."""
    if "CXX" in surroundings and not shutil.which(surroundings["CXX"]):
        pytest.skip(f"there is no {surroundings['CXX']}")
    if (isa := surroundings.get("SENNIT_CPU_ISA", "generic")) not in (*jit.find_toolchain().features, "generic"):
        pytest.skip(f"this machine has no {isa}")
    environment = {**os.environ, **surroundings}
    if surroundings is SANITIZED:
        found = [sanitizer_runtime(name) for name in ("libasan.so", "libubsan.so")]
        environment["LD_PRELOAD"] = " ".join(found)
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__, "-k", chosen]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def sanitizer_runtime(name: str) -> str:
    """A library that must be loaded before Python, which is built without it."""
    compiler = str(jit.find_toolchain().compiler)
    path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    if not os.path.isabs(path.stdout.strip()):
        pytest.skip(f"{compiler} has no {name}")
    return path.stdout.strip()
