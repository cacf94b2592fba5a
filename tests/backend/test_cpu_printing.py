"""User functions printed as C++ and compiled, over hostile values, against PyTorch and the reference evaluator."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
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
    assert_equal,
    check_comparisons,
    check_functions_as_users_write_them,
    check_functions_of_float32,
    check_functions_of_float64_and_powers,
    check_hidden_pairs_never_fault,
    check_operations,
    check_random_functions,
    documents,
    expected,
    random_pairs,
    slopes,
)

import sennit
from sennit import jit, variants
from sennit.backends.cpu import printing
from sennit.backends.cpu.instructions import instruction_set
from sennit.errors import BuildUnavailable
from sennit.variants import trace

try:
    LANES = instruction_set().lanes
except BuildUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)


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


def prepared(cases: Sequence[Case], function: str = "apply<{}>") -> list[Printed]:
    """The cases' functions, all compiled in one library; ``function`` is what C++ makes of each case's class."""
    structs = (printing.print_struct(f"G{i}", c.score_mod, c.mask_mod, c.captures) for i, c in enumerate(cases))
    functions = ",\n".join(function.format(f"G{i}") for i in range(len(cases)))
    units = (("graphs.cpp", UNIT.format(structs="".join(structs), functions=functions)),)
    source = jit.Source("cpu-graph-tests", units, printing.HEADERS, (*instruction_set().flags, *printing.FLAGS))
    module = jit.load(source)
    return [partial(applied, int(module["address"](i)), case) for i, case in enumerate(cases)]


by_lane = partial(prepared, function=BY_LANE)


def applied(address: int, case: Case, pairs: Pairs, gap: int = LANES) -> torch.Tensor:
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


def test_functions_as_users_write_them():
    check_functions_as_users_write_them(prepared, random_pairs(1))


@pytest.mark.parametrize("dtypes", [USUAL, pytest.param(set(DTYPES) - set(USUAL), marks=pytest.mark.slow)])
def test_operations_are_those_of_pytorch(dtypes):
    check_operations(by_lane, dtypes)


def test_comparisons_are_those_of_pytorch():
    check_comparisons(by_lane)


def test_functions_of_float32_err_by_few_units_in_the_last_place():
    limits = {
        torch.exp: 1.5, torch.exp2: 1.5, torch.tanh: 2.5, torch.log: 1.5, torch.log2: 1.5,
        torch.sin: 0.6, torch.cos: 0.6, torch.sqrt: 0.6,
    }  # fmt: skip
    check_functions_of_float32(prepared, limits)


def test_functions_of_float64_and_powers_are_those_of_pytorch():
    check_functions_of_float64_and_powers(by_lane, 1e-14)


def test_what_hidden_pairs_compute_never_faults():
    check_hidden_pairs_never_fault(by_lane)


@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 12), pytest.param(1, 60, marks=pytest.mark.slow), pytest.param(2, 200, marks=pytest.mark.thorough)],
)
def test_random_functions_give_what_the_reference_evaluator_gives(seed, count):
    check_random_functions(prepared, count, random_pairs(seed), seed)


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
