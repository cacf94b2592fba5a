"""What an expression graph is made of: nodes that each apply one operation, and the tensors that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

__all__ = ["INPUTS", "Capture", "Kind", "Node", "NodeList"]

Kind = Literal["score", "mask"]
INPUTS: dict[Kind, tuple[str, ...]] = {
    "score": ("score", "b", "h", "q_idx", "kv_idx"),
    "mask": ("b", "h", "q_idx", "kv_idx"),
}


@dataclass(frozen=True)
class Capture:
    """A tensor that a traced function reads: given to ``run`` by this name, with this dtype and number of dimensions.

    Its sizes are free, but not zero, and may change from run to run.
    """

    name: str
    dtype: torch.dtype
    ndim: int


@dataclass(frozen=True, eq=False)
class Node:
    """One value of a graph, a scalar of one pair of query and key: an operation on values of earlier nodes.

    ========================  =========================================================================================
    op                        value, where ``a, b, c`` are the arguments in order
    ========================  =========================================================================================
    score                     the logit: float32, or float64 where the backend computes in float64
    b, h, q_idx, kv_idx       request in the batch, query head, position of the query, of the key: int32
    const                     the Python number ``value``: bool, int (dtype int64) or float (dtype float64)
    index                     the element of capture ``value`` at the argument indices, one a dimension. A negative
                              index counts from the end, as in PyTorch; one that is out of range even so is clamped into
                              it, since kernels evaluate pairs that no mask lets through
    cast                      ``a`` in the node's dtype; float to int drops the fraction, int to int wraps around,
                              anything to bool is ``a != 0``
    neg, abs                  ``-a``, ``|a|`` of a number
    not                       of a bool, or of each bit of an int
    exp, exp2, log, log2,     of a float
    tanh, sqrt, sin, cos,
    floor
    add, sub, mul             of numbers; ints wrap around
    truediv                   ``a / b`` of floats
    floordiv                  ``a / b`` of ints, rounded toward minus infinity
    mod                       ``a - b * floor(a / b)`` of numbers: it has the sign of ``b``
    pow                       ``a ** b`` of floats
    minimum, maximum          of numbers; NaN if either is
    eq, ne, lt, le, gt, ge    a bool; comparisons with NaN are false but for ne
    and, or, xor              of bools, or of each bit of ints
    where                     ``b`` if ``a`` (a bool), else ``c``
    ========================  =========================================================================================

    Every result is rounded to the node's dtype, float16 and bfloat16 included. Dividing an int by zero, and casting a
    float that the int type cannot hold, may give any value but never fault: pairs that no mask lets through may do so.

    Attributes:
        op: the operation.
        dtype: of the value, by PyTorch's promotion of 0-dim tensors and Python numbers, where the score is float32.
        args: places of the arguments in the graph's nodes, all before this one.
        value: the number of a const, the name of the capture of an index.
    """

    op: str
    dtype: torch.dtype
    args: tuple[int, ...] = ()
    value: bool | int | float | str | None = None

    @property
    def identity(self) -> tuple[str, torch.dtype, tuple[int, ...], str]:
        """What tells this node from others; NaN equals itself, and 0.0 is not -0.0."""
        return self.op, self.dtype, self.args, repr(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


class NodeList:
    """Nodes in the order in which they were made, each distinct one once."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._places: dict[Node, int] = {}

    def add(
        self, op: str, dtype: torch.dtype, args: Sequence[int] = (), value: bool | float | str | None = None
    ) -> int:
        """Place of this node, which is new or was there."""
        node = Node(op, dtype, tuple(args), value)
        place = self._places.setdefault(node, len(self._nodes))
        if place == len(self._nodes):
            self._nodes.append(node)
        return place

    def __getitem__(self, place: int) -> Node:
        return self._nodes[place]

    def reachable(self, output: int) -> tuple[Node, ...]:
        """The nodes that ``output`` needs, arguments first, itself last, in an order that its structure decides."""
        places: dict[int, int] = {}
        stack = [output]
        while stack:
            missing = [arg for arg in self._nodes[stack[-1]].args if arg not in places]
            if missing:
                stack.extend(reversed(missing))
            else:
                places.setdefault(stack.pop(), len(places))
        return tuple(
            replace(node, args=tuple(places[arg] for arg in node.args)) for node in (self._nodes[old] for old in places)
        )
