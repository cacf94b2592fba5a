"""Prints the graphs of score and mask functions as C++: the source of a library that changes blocks of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Flag
from pathlib import Path

import torch

from sennit import jit
from sennit.backends.cpu.instructions import instruction_set
from sennit.spec import AttentionSpec
from sennit.variants import Capture, Graph, Node

__all__ = ["graph_source", "print_graphs", "print_struct"]

# Products and sums are not contracted: every operation of a graph is rounded, as PyTorch does it. At -O2, unlike -O3,
# loops over lanes are not unrolled before they can be vectorised. -Wno-psabi: no vector crosses a library's border.
FLAGS = ("-O2", "-ftree-vectorize", "-ffp-contract=off", "-Wno-psabi")
HEADERS = Path(__file__).parent / "csrc"
ELEMENTS = {
    torch.bool: "bool", torch.uint8: "uint8_t", torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int32_t",
    torch.int64: "int64_t", torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "float",
    torch.float64: "double",
}  # fmt: skip
NARROW = (torch.uint8, torch.int8, torch.int16)  # kept as int32
HALVES = (torch.float16, torch.bfloat16)  # kept as float32
LEAVES_NARROW = ("neg", "abs", "not", "add", "sub", "mul", "floordiv")  # the int32 may be more than the dtype holds
OPERATIONS = {
    **{name: f"{name}({{}})" for name in ("exp", "exp2", "log", "log2", "tanh", "sqrt", "sin", "cos", "floor")},
    "neg": "negative({})", "abs": "absolute({})", "not": "~{}",
    "add": "add({}, {})", "sub": "subtract({}, {})", "mul": "multiply({}, {})", "truediv": "{} / {}",
    "floordiv": "floor_divide({}, {})", "mod": "modulo({}, {})", "pow": "pow({}, {})",
    "minimum": "minimum({}, {})", "maximum": "maximum({}, {})",
    "eq": "equal({}, {})", "ne": "unequal({}, {})", "lt": "less({}, {})", "le": "at_most({}, {})",
    "gt": "less({1}, {0})", "ge": "at_most({1}, {0})",
    "and": "{} & {}", "or": "{} | {}", "xor": "{} ^ {}", "where": "select({}, {}, {})",
}  # fmt: skip
BY_CONSTANT = {"floordiv": "floor_divide_by<{}>({{}})", "mod": "modulo_by<{}>({{}})"}
UNIT = """#include <tvm/ffi/c_api.h>

#include "apply.h"

namespace sennit {{
namespace {{

{struct}
}}  // namespace
}}  // namespace sennit

extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_graph_function(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {{
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = reinterpret_cast<int64_t>(&sennit::apply<sennit::Graph>);
  return 0;
}}
"""
STRUCT = """struct {name} {{
  const GraphCapture* captures;
{of_block}
  explicit {name}(const GraphBlock& block) : captures(block.captures) {{
{from_block}  }}

  struct Query {{
{of_query}  }};
  SENNIT_INLINE Query query(i32x q_idx, i32x h) const {{
{from_query}  }}

  struct Key {{
{of_key}  }};
  SENNIT_INLINE Key key(i32x kv_idx) const {{
{from_key}  }}
  static SENNIT_INLINE Key lane(const Key& keys, int lane) {{
{from_lane}  }}

  SENNIT_INLINE f32x pair(f32x score, const Query& query, const Key& key) const {{
{from_pair}  }}
}};
"""


class Stage(Flag):
    """When a value can be computed: once a block, or once a query, a key or a pair of them."""

    BLOCK = 0
    QUERY = 1
    KEY = 2
    PAIR = QUERY | KEY


KEEPERS = {Stage.QUERY: "query", Stage.KEY: "key"}
INPUTS = {"b": Stage.BLOCK, "h": Stage.QUERY, "q_idx": Stage.QUERY, "kv_idx": Stage.KEY, "score": Stage.PAIR}


@dataclass(frozen=True)
class Value:
    """A vector of the printed program.

    Attributes:
        vector: its C++ type.
        text: an expression in which ``{0}``, ``{1}`` and so on stand for the arguments.
        args: places of other values.
        stage: when it can be computed.
        name: of the input that it is.
    """

    vector: str
    text: str
    args: tuple[int, ...] = ()
    stage: Stage = Stage.BLOCK
    name: str = ""

    @property
    def constant(self) -> bool:
        """Whether it is written where it is used."""
        return not (self.args or self.name)


class Program:
    """The values of graphs that are computed together, each distinct one once, arguments first."""

    def __init__(self, captures: Sequence[Capture]) -> None:
        self.values: list[Value] = []
        self._captures = {capture.name: place for place, capture in enumerate(captures)}
        self._places: dict[Value, int] = {}

    def add_graph(self, graph: Graph) -> int:
        """Place of a graph's result."""
        nodes = graph.typed()
        places: list[int] = []
        for node in nodes:
            places.append(self._add_node(node, [nodes[arg] for arg in node.args], [places[arg] for arg in node.args]))
        return places[-1]

    def add_input(self, name: str) -> int:
        """Place of an argument of the functions."""
        text = "splat<i32x>(block.b)" if name == "b" else name
        return self._place(Value("f32x" if name == "score" else "i32x", text, (), INPUTS[name], name))

    def add(self, vector: str, text: str, args: Sequence[int] = ()) -> int:
        """Place of what an expression makes of other values."""
        stage = Stage.BLOCK
        for arg in args:
            stage |= self.values[arg].stage
        return self._place(Value(vector, text, tuple(args), stage))

    def _place(self, value: Value) -> int:
        place = self._places.setdefault(value, len(self.values))
        if place == len(self.values):
            self.values.append(value)
        return place

    def _add_node(self, node: Node, operands: Sequence[Node], args: Sequence[int]) -> int:
        vector = _vector(node.dtype)
        if node.op in INPUTS:
            return self.add_input(node.op)
        if node.op == "const":
            return self.add(vector, f"splat<{vector}>({_number(node)})")
        if node.op == "index":
            return self._add_element(str(node.value), node.dtype, args)
        if node.op == "cast":
            return self.add(vector, _conversion(operands[0].dtype, node.dtype), args)
        divisor = operands[-1]
        if node.op in BY_CONSTANT and divisor.op == "const" and not node.dtype.is_floating_point and divisor.value:
            text, args = BY_CONSTANT[node.op].format(_number(divisor)), args[:1]
        else:
            text = OPERATIONS[node.op]
        if node.op in LEAVES_NARROW and node.dtype in NARROW:
            text = f"wrapped<{ELEMENTS[node.dtype]}>({text})"
        return self.add(vector, text, args)

    def _add_element(self, name: str, dtype: torch.dtype, indices: Sequence[int]) -> int:
        """An element of a capture; of the sum of its offsets, what is known early is added early."""
        capture = f"captures[{self._captures[name]}]"
        offsets = [
            self.add("i64x", f"offset({{}}, {capture}, {dimension})", (index,))
            for dimension, index in enumerate(indices)
        ]
        offsets.sort(key=lambda place: self.values[place].stage.value)
        total = offsets[0] if offsets else self.add("i64x", "i64x{{}}")
        for offset in offsets[1:]:
            total = self.add("i64x", "add({}, {})", (total, offset))
        return self.add(_vector(dtype), f"gather<{ELEMENTS[dtype]}>({capture}, {{}})", (total,))


def graph_source(spec: AttentionSpec) -> jit.Source:
    """Source of the library that applies a spec's ``score_mod`` and ``mask_mod``, of which it has at least one.

    Its function ``graph_function()`` gives the address of a ``sennit::GraphFunction`` (``csrc/graph.h``), which takes
    captures in the order of ``spec.captures``.
    """
    score_mod, mask_mod = (mod if isinstance(mod, Graph) else None for mod in (spec.score_mod, spec.mask_mod))
    text = print_graphs(score_mod, mask_mod, spec.captures)
    return jit.Source("cpu-graph", (("graph.cpp", text),), HEADERS, (*instruction_set().flags, *FLAGS))


def print_graphs(score_mod: Graph | None, mask_mod: Graph | None, captures: Sequence[Capture]) -> str:
    """The translation unit of a library; the same text for equal graphs.

    Args:
        score_mod: what becomes of a logit; None: it stays.
        mask_mod: where it is false, the logit becomes -inf; None: nowhere.
        captures: the tensors that the two read, in the order in which the function is given them.
    """
    return UNIT.format(struct=print_struct("Graph", score_mod, mask_mod, captures))


def print_struct(name: str, score_mod: Graph | None, mask_mod: Graph | None, captures: Sequence[Capture]) -> str:
    """The C++ class called ``name`` that ``sennit::apply`` (``csrc/apply.h``) computes with."""
    program = Program(captures)
    result = program.add_input("score") if score_mod is None else program.add_graph(score_mod)
    if mask_mod is not None:
        hidden = program.add("f32x", "splat<f32x>(-__builtin_inff())")
        result = program.add("f32x", "select({}, {}, {})", (program.add_graph(mask_mod), result, hidden))
    return STRUCT.format(name=name, **_parts(program.values, result))


def _parts(values: Sequence[Value], result: int) -> dict[str, str]:
    """What every stage computes and keeps for later ones, in C++."""

    def name(place: int) -> str:
        return values[place].name or f"v{place}"

    def reference(place: int, stage: Stage) -> str:
        value = values[place]
        if value.constant:
            return value.text.format()
        return name(place) if value.stage in (Stage.BLOCK, stage) else f"{KEEPERS[value.stage]}.{name(place)}"

    def expression(place: int) -> str:
        value = values[place]
        return value.text.format(*(reference(arg, value.stage) for arg in value.args))

    def computed(stage: Stage) -> str:
        return "".join(
            f"    const {values[place].vector} {name(place)} = {expression(place)};\n"
            for place in of_stage(stage)
            if not values[place].name
        )

    def of_stage(stage: Stage) -> list[int]:
        return [place for place, value in enumerate(values) if value.stage == stage and not value.constant]

    def declared(places: list[int], indent: str) -> str:
        return "".join(f"{indent}{values[place].vector} {name(place)};\n" for place in places)

    used_by_pairs = {arg for value in values if value.stage == Stage.PAIR for arg in value.args} | {result}
    queries, keys = ([p for p in of_stage(stage) if p in used_by_pairs] for stage in (Stage.QUERY, Stage.KEY))
    block = of_stage(Stage.BLOCK)
    columns = (f"splat<{values[place].vector}>(keys.{name(place)}[lane])" for place in keys)
    return {
        "of_block": declared(block, "  "),
        "from_block": "".join(f"    {name(place)} = {expression(place)};\n" for place in block),
        "of_query": declared(queries, "    "),
        "from_query": f"{computed(Stage.QUERY)}    return {{{', '.join(map(name, queries))}}};\n",
        "of_key": declared(keys, "    "),
        "from_key": f"{computed(Stage.KEY)}    return {{{', '.join(map(name, keys))}}};\n",
        "from_lane": f"    return {{{', '.join(columns)}}};\n",
        "from_pair": f"{computed(Stage.PAIR)}    return {reference(result, Stage.PAIR)};\n",
    }


def _vector(dtype: torch.dtype) -> str:
    """The type in which lanes of a dtype are kept."""
    if dtype in (torch.int64, torch.float64):
        return {torch.int64: "i64x", torch.float64: "f64x"}[dtype]
    return "f32x" if dtype.is_floating_point else "i32x"


def _conversion(source: torch.dtype, target: torch.dtype) -> str:
    """The expression that converts between two different dtypes."""
    if target == torch.bool:
        return "truth_of({})"
    text = "number_of({})" if source == torch.bool else "{}"
    if _vector(source) != _vector(target):
        text = f"convert<{_vector(target)}>({text})"
    if target in HALVES:
        return f"rounded_to<{ELEMENTS[target]}>({text})"
    return f"wrapped<{ELEMENTS[target]}>({text})" if target in NARROW else text


def _number(node: Node) -> str:
    """A constant in C++."""
    assert isinstance(node.value, (bool, int, float))
    if node.dtype == torch.bool:
        return "-1" if node.value else "0"
    if node.dtype.is_floating_point:
        return _float(torch.tensor(node.value, dtype=node.dtype).item())
    limits = torch.iinfo(node.dtype)
    value = (int(node.value) - limits.min) % (limits.max - limits.min + 1) + limits.min
    return "INT64_MIN" if value == -(2**63) else str(value)


def _float(value: float) -> str:
    if math.isnan(value):
        return '__builtin_nan("")'
    return value.hex() if math.isfinite(value) else "__builtin_inf()" if value > 0 else "-__builtin_inf()"
