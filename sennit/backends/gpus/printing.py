"""Prints the graphs of score and mask functions as Triton: the source of a function that changes tiles of logits."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import count

import torch

from sennit.variants import Capture, Graph, Node

__all__ = ["ARGUMENTS", "print_function"]

ARGUMENTS = 2  # of a capture's dimension: its size and its stride
TYPES = {
    torch.bool: "tl.int1", torch.uint8: "tl.uint8", torch.int8: "tl.int8", torch.int16: "tl.int16",
    torch.int32: "tl.int32", torch.int64: "tl.int64", torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32", torch.float64: "tl.float64",
}  # fmt: skip
NARROW = (torch.uint8, torch.int8, torch.int16)  # kept as int32
HALVES = (torch.float16, torch.bfloat16)  # kept as float32
LEAVES_NARROW = ("neg", "abs", "not", "add", "sub", "mul", "floordiv")  # the int32 may be more than the dtype holds
# Where each argument of the function varies: over queries, keys, both, or neither.
QUERIES, KEYS = 1, 2
INPUTS = {
    "score": ("scores", QUERIES | KEYS),
    "b": ("request", 0),
    "h": ("heads", QUERIES),
    "q_idx": ("q_positions", QUERIES),
    "kv_idx": ("kv_positions", KEYS),
}
OPERATIONS = {
    "neg": "-{}", "abs": "tl.abs({})", "not": "~{}",
    **{name: f"tl.{name}({{}})" for name in ("exp", "exp2", "log", "log2", "sqrt", "sin", "cos", "floor")},
    "tanh": "operations.tanh_of_float64({})",
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "truediv": "{} / {}",
    "floordiv": "operations.floor_divide({}, {})", "mod": "operations.modulo({}, {})",
    "pow": "operations.power({}, {})",
    **{name: f"tl.{name}({{}}, {{}}, propagate_nan=tl.PropagateNan.ALL)" for name in ("minimum", "maximum")},
    "eq": "{} == {}", "ne": "{} != {}", "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}", "ge": "{} >= {}",
    "and": "{} & {}", "or": "{} | {}", "xor": "{} ^ {}", "where": "tl.where({}, {}, {})",
}  # fmt: skip
OF_FLOATS = {"neg": "{} * -1.0", "mod": "operations.remainder({}, {})"}  # 0 - 0.0 is not -0.0
OF_FLOAT32 = {
    **{name: f"operations.{name}({{}})" for name in ("exp", "exp2", "log", "log2", "tanh", "sin", "floor")},
    "abs": "operations.absolute({})", "sqrt": "tl.sqrt_rn({})", "truediv": "tl.div_rn({}, {})",
    "mod": "operations.remainder({}.to(tl.float64), {}.to(tl.float64)).to(tl.float32)",
    "pow": "operations.power({}.to(tl.float64), {}.to(tl.float64)).to(tl.float32)",
}  # fmt: skip
LAST_INTEGERS = {  # the largest floats that an integer dtype holds
    (torch.float32, torch.int32): 2.0**31 - 2.0**7, (torch.float32, torch.int64): 2.0**63 - 2.0**39,
    (torch.float64, torch.int32): 2.0**31 - 1, (torch.float64, torch.int64): 2.0**63 - 2.0**10,
}  # fmt: skip
MODULE = '''"""A score or mask function, printed by Sennit."""

import triton
import triton.language as tl

from sennit.backends.gpus.kernels import operations


@triton.jit
def change(scores, request, heads, q_positions, kv_positions, captures):
{body}
    return tl.broadcast_to({result}, scores.shape)
'''


class Program:
    """The lines of a function, each distinct value computed once."""

    def __init__(self, captures: Sequence[Capture]) -> None:
        self.lines: list[str] = []
        self._captures: dict[str, int] = {}  # by name, where its arguments begin
        place = 0
        for capture in captures:
            self._captures[capture.name] = place
            place += 1 + ARGUMENTS * capture.ndim
        self._names: dict[str, str] = {}
        self._varies = dict(INPUTS.values())

    def add_graph(self, graph: Graph) -> str:
        """Name of a graph's result."""
        nodes = graph.typed()
        names: list[str] = []
        for node in nodes:
            names.append(self._add_node(node, [nodes[arg] for arg in node.args], [names[arg] for arg in node.args]))
        return names[-1]

    def add(self, text: str, *args: str) -> str:
        """Name of what an expression makes of other values, for which it has ``{}``."""
        text = text.format(*args)
        name = self._names.setdefault(text, f"v{len(self._names)}")
        if name not in self._varies:
            self._varies[name] = 0
            for arg in args:
                self._varies[name] |= self._varies[arg]
            self.lines.append(f"    {name} = {text}")
        return name

    def add_number(self, value: bool | int | float, dtype: torch.dtype) -> str:
        """Name of a constant."""
        return self.add(f"tl.cast({_number(value, dtype)}, {TYPES[kept(dtype)]})")

    def _add_node(self, node: Node, operands: Sequence[Node], args: Sequence[str]) -> str:
        if node.op in INPUTS:
            return INPUTS[node.op][0]
        if node.op == "const":
            assert isinstance(node.value, (bool, int, float))
            return self.add_number(node.value, node.dtype)
        if node.op == "index":
            return self._add_element(str(node.value), node.dtype, args)
        if node.op == "cast":
            return self._add_conversion(operands[0].dtype, node.dtype, args[0])
        if text := _by_power_of_two(node, operands):
            result = self.add(text, args[0])
        else:
            result = self.add(_operation(node, operands), *args)
        return self._wrapped(node.dtype, result) if node.op in LEAVES_NARROW else result

    def _add_element(self, name: str, dtype: torch.dtype, indices: Sequence[str]) -> str:
        """An element of a capture; of the sum of its offsets, those of few values are added first."""
        first = self._captures[name]
        offsets = [
            self.add(f"operations.element_offset({{}}, captures[{place}], captures[{place + 1}])", index)
            for place, index in zip(count(first + 1, ARGUMENTS), indices, strict=False)
        ]
        offsets.sort(key=lambda offset: self._varies[offset].bit_count())
        address = [self.add(f"captures[{first}]")]
        if offsets:
            address.append(functools.reduce(functools.partial(self.add, "{} + {}"), offsets))
        element = self.add(f"tl.load({' + '.join('{}' for _ in address)})", *address)
        if dtype == torch.bool:
            return self.add("{} != 0", element)
        if dtype == torch.bfloat16:
            return self.add("operations.bfloat16_value({})", element)
        return element if kept(dtype) == dtype else self.add(f"{{}}.to({TYPES[kept(dtype)]})", element)

    def _add_conversion(self, source: torch.dtype, target: torch.dtype, value: str) -> str:
        if target == torch.bool:
            return self.add("{} != 0", value)
        origin, form = kept(source), kept(target)
        if origin.is_floating_point and not form.is_floating_point:
            last = LAST_INTEGERS[origin, form]
            limits = self.add_number(float(torch.iinfo(form).min), origin), self.add_number(last, origin)
            value = self.add(f"operations.to_integer({{}}, {{}}, {{}}, {TYPES[form]})", value, *limits)
        elif origin != form:
            value = self.add(f"{{}}.to({TYPES[form]})", value)
        if target == torch.bfloat16:
            return self.add("operations.rounded_to_bfloat16({})", value)
        if target == torch.float16:
            return self.add("{}.to(tl.float16).to(tl.float32)", value)
        return self._wrapped(target, value)

    def _wrapped(self, dtype: torch.dtype, value: str) -> str:
        """What a narrow integer keeps of an int32."""
        return self.add(f"{{}}.to({TYPES[dtype]}).to(tl.int32)", value) if dtype in NARROW else value


def print_function(score_mod: Graph | None, mask_mod: Graph | None, captures: Sequence[Capture]) -> str:
    """The module with the function that applies a ``score_mod``, a ``mask_mod`` or both; equal text for equal graphs.

    The function is ``change(scores, request, heads, q_positions, kv_positions, captures)``: ``scores`` is float32
    ``[M, N]``, and so is what it returns; ``request`` is an int32 scalar, ``heads`` and ``q_positions`` are int32
    ``[M, 1]``, ``kv_positions`` is int32 ``[1, N]``, and ``captures`` a tuple from ``functions.capture_arguments``.

    Args:
        score_mod: what becomes of a logit; None: it stays.
        mask_mod: where it is false, the logit becomes -inf; None: nowhere.
        captures: the tensors that the two read, in the order in which the function is given them.
    """
    program = Program(captures)
    result = "scores" if score_mod is None else program.add_graph(score_mod)
    if mask_mod is not None:
        result = program.add('tl.where({}, {}, float("-inf"))', program.add_graph(mask_mod), result)
    return MODULE.format(body="\n".join(program.lines), result=result)


def kept(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype are kept."""
    return torch.int32 if dtype in NARROW else torch.float32 if dtype in HALVES else dtype


def _operation(node: Node, operands: Sequence[Node]) -> str:
    dtype = kept(operands[-1].dtype)
    for dtypes, texts in (
        ((torch.float32,), OF_FLOAT32),
        ((torch.float32, torch.float64), OF_FLOATS),
    ):
        if dtype in dtypes and node.op in texts:
            return texts[node.op]
    return OPERATIONS[node.op]


def _by_power_of_two(node: Node, operands: Sequence[Node]) -> str:
    """The shift or the mask of bits that divides by a constant."""
    divisor = operands[-1].value if operands and operands[-1].op == "const" else None
    if node.op in ("floordiv", "mod") and type(divisor) is int and divisor > 0 and not divisor & (divisor - 1):
        return f"{{}} >> {divisor.bit_length() - 1}" if node.op == "floordiv" else f"{{}} & {divisor - 1}"
    return ""


def _number(value: bool | int | float, dtype: torch.dtype) -> str:
    """A constant in Triton."""
    if dtype == torch.bool:
        return str(bool(value))
    if dtype.is_floating_point:
        rounded = torch.tensor(value, dtype=dtype).item()
        return repr(rounded) if math.isfinite(rounded) else f'float("{rounded}")'
    limits = torch.iinfo(dtype)
    return str((int(value) - limits.min) % (limits.max - limits.min + 1) + limits.min)
