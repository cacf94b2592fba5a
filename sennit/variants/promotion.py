"""Which dtype a value has, by PyTorch's promotion, and the form of a graph in which every conversion is a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch

from sennit.variants.nodes import Node, NodeList

__all__ = ["COMPARISONS", "DTYPES", "INDEX_DTYPES", "common_dtype", "operand_dtypes", "result_dtype", "typed"]

INDEX_DTYPES = (torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, *INDEX_DTYPES, *FLOATS)
ORDERINGS = ("lt", "le", "gt", "ge")
COMPARISONS = ("eq", "ne", *ORDERINGS)
OF_FLOATS = ("exp", "exp2", "log", "log2", "tanh", "sqrt", "sin", "cos", "floor", "truediv", "pow")
HALVES = (torch.float16, torch.bfloat16)
ROUNDED = (*OF_FLOATS, "add", "sub", "mul", "mod")  # their results have more digits than their arguments
DEFAULTS = (torch.bool, torch.int64, torch.float32)  # what Python's bool, int and float become; not the ambient default


def _category(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else 2 if dtype.is_floating_point else 1


def common_dtype(operands: Sequence[Node]) -> torch.dtype:
    """What PyTorch promotes operands to: Python numbers count only where they are of a higher kind than all others."""
    numbers = [_category(node.dtype) for node in operands if node.op == "const"]
    dtype = reduce(torch.promote_types, (node.dtype for node in operands if node.op != "const"), torch.bool)
    highest = max(numbers, default=0)
    return DEFAULTS[highest] if highest > _category(dtype) else dtype


def result_dtype(op: str, operands: Sequence[Node]) -> torch.dtype:
    """Dtype of an operation other than inputs, constants, indexing and casts."""
    if op in COMPARISONS:
        return torch.bool
    dtype = common_dtype(operands[1:] if op == "where" else operands)
    return torch.float32 if op in OF_FLOATS and not dtype.is_floating_point else dtype


def operand_dtypes(op: str, operands: Sequence[Node]) -> list[torch.dtype]:
    """What the operands of an operation are converted to before it is applied."""
    if op == "cast":
        return [operands[0].dtype]
    if op == "index":
        return [torch.int32 if node.op == "const" else node.dtype for node in operands]
    if op in COMPARISONS:
        dtype = common_dtype(operands)
        return [torch.int32 if dtype == torch.bool and op in ORDERINGS else dtype] * 2
    dtypes = [result_dtype(op, operands)] * len(operands)
    return [torch.bool, *dtypes[1:]] if op == "where" else dtypes


def typed(nodes: Sequence[Node], score_dtype: torch.dtype, output_dtype: torch.dtype) -> tuple[Node, ...]:
    """The same expression with every conversion written as a cast, for a score of ``score_dtype``."""
    made = NodeList()
    untyped: list[Node] = []  # with the dtypes that follow from score_dtype
    places: list[int] = []

    def converted(place: int, dtype: torch.dtype) -> int:
        node = untyped[place]
        if node.op == "const":
            return made.add("const", dtype, value=_number(node.value, dtype))
        return places[place] if node.dtype == dtype else made.add("cast", dtype, (places[place],))

    for node in nodes:
        operands = [untyped[arg] for arg in node.args]
        if node.op == "score":
            node = replace(node, dtype=score_dtype)
        elif operands and node.op not in ("index", "cast"):
            node = replace(node, dtype=result_dtype(node.op, operands))
        untyped.append(node)
        if node.op == "cast":
            places.append(converted(node.args[0], node.dtype))
        elif node.dtype in HALVES and node.op in ROUNDED:
            args = [converted(arg, torch.float32) for arg in node.args]
            places.append(made.add("cast", node.dtype, (made.add(node.op, torch.float32, args),)))
        else:
            dtypes = operand_dtypes(node.op, operands) if operands else ()
            args = [converted(arg, dtype) for arg, dtype in zip(node.args, dtypes, strict=True)]
            places.append(made.add(node.op, node.dtype, args, node.value))
    return made.reachable(converted(len(nodes) - 1, output_dtype))


def _number(value: object, dtype: torch.dtype) -> bool | int | float:
    assert isinstance(value, (bool, int, float))
    return (bool, int, float)[_category(dtype)](value)
