"""Evaluates expression graphs with PyTorch, node by node, on whole grids of pairs at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from sennit.variants import Graph

__all__ = ["evaluate"]

OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "not": torch.bitwise_not,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "tanh": torch.tanh,
    "sqrt": torch.sqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "floor": torch.floor,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.true_divide,
    "floordiv": lambda a, b: torch.floor_divide(a, _divisor(b)),
    "mod": lambda a, b: torch.remainder(a, _divisor(b)),
    "pow": torch.pow,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "where": torch.where,
}


def evaluate(graph: Graph, inputs: Mapping[str, torch.Tensor], captures: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What a graph computes for many pairs.

    Args:
        graph: of a score or a mask.
        inputs: ``b``, ``h``, ``q_idx`` and ``kv_idx`` of any integer dtype, and for scores ``score``, float32 or
            float64; shapes that broadcast, all on one device.
        captures: the tensors of ``graph.captures``, of their dtypes and dimensions, none of them empty.

    Returns:
        A bool, or the score's dtype, in a shape that broadcasts to that of all inputs together: what does not depend
        on an input lacks its dimensions.

    >>> from sennit.variants import causal, trace
    >>> q_idx, kv_idx = torch.arange(2).unsqueeze(1), torch.arange(3)
    >>> evaluate(trace(causal, "mask"), {"b": kv_idx, "h": kv_idx, "q_idx": q_idx, "kv_idx": kv_idx}, {})
    tensor([[ True, False, False],
            [ True,  True, False]])
    """
    values: list[torch.Tensor] = []
    for node in graph.typed(inputs["score"].dtype) if graph.kind == "score" else graph.typed():
        args = [values[arg] for arg in node.args]
        if node.op == "const":
            values.append(torch.tensor(node.value, dtype=node.dtype, device=inputs["q_idx"].device))
        elif node.op == "index":
            values.append(_element(captures[str(node.value)], args))
        elif node.op == "cast":
            values.append(args[0].to(node.dtype))
        else:
            values.append(OPERATIONS[node.op](*args) if args else inputs[node.op].to(node.dtype))
    return values[-1]


def _divisor(b: torch.Tensor) -> torch.Tensor:
    """PyTorch faults where an int is divided by zero; pairs that are hidden may do that."""
    return b if b.is_floating_point() else b.masked_fill(b == 0, 1)


def _element(table: torch.Tensor, indices: list[torch.Tensor]) -> torch.Tensor:
    bounded = [
        torch.where(index < 0, index + size, index).clamp(0, size - 1).long()
        for index, size in zip(indices, table.shape, strict=True)
    ]
    return table[tuple(bounded)] if bounded else table
