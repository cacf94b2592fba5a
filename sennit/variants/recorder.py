"""Builds the graph of a function while it runs: nodes for what it computes, captures for the tensors it reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sennit.variants.nodes import Node, NodeList
from sennit.variants.promotion import DTYPES, common_dtype, operand_dtypes, result_dtype
from sennit.variants.symbols import Refused, Rows, Symbol, described, dimensions

__all__ = ["Recorder"]

NUMBER_OF = {torch.bool: bool, torch.int64: int, torch.float64: float}
OF_BOOLS = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}  # what PyTorch means by them
NOT_OF_BOOLS = ("neg", "abs", "sub", "floordiv", "mod", "pow")
NOT_OF_FLOATS = ("and", "or", "xor", "not")
SUPPORTED = "there are " + ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)


class Recorder:
    """Nodes of one function while it runs.

    Args:
        find: gives what records a function or method of torch, by its name.
        name_of: finds the user's variable that holds a tensor.
        captures: the tensors that have been read so far, by name.
    """

    def __init__(
        self,
        find: Callable[[str], Callable[..., Any]],
        name_of: Callable[[torch.Tensor], str],
        captures: dict[str, torch.Tensor],
    ) -> None:
        self.nodes = NodeList()
        self.find, self._name_of = find, name_of
        self._captures = captures
        self._made: dict[int, torch.Tensor] = {}  # by id: what the function made of numbers alone, its constants

    def argument(self, name: str) -> Symbol:
        """One of the function's arguments."""
        return Symbol(self, self.nodes.add(name, torch.float32 if name == "score" else torch.int32))

    def made(self, result: Any) -> Any:
        """Remember what the function made of numbers alone."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._made[id(tensor)] = tensor
        return result

    def records(self, value: object) -> bool:
        """Whether a value differs from pair to pair or from run to run, so that what is done with it is recorded."""
        return isinstance(value, (Symbol, Rows)) or (isinstance(value, torch.Tensor) and id(value) not in self._made)

    def is_number(self, value: object) -> bool:
        """Whether a value is a scalar to compute with."""
        return isinstance(value, (Symbol, bool, int, float, np.generic)) or (
            isinstance(value, torch.Tensor) and value.ndim == 0
        )

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Record a function, method or operator of torch."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Rows):
                raise value.refusal()
            if isinstance(value, torch.Tensor) and value.ndim and self.records(value):
                raise Refused(
                    f"`{name}` of `{self._name_of(value)}`, a tensor of {dimensions(value)}",
                    "do it outside the function, which then reads elements of the result, or a number",
                )
        function = self.find(name)
        try:
            inspect.signature(function).bind(self, *args, **kwargs)
        except TypeError as error:
            raise Refused(f"torch's `{name}` with these arguments ({error})") from None
        return function(self, *args, **kwargs)

    def apply(self, op: str, *values: Any) -> Symbol:
        """Record an operation on symbols, captured 0-dim tensors, constants and numbers."""
        places = [self.place(value) for value in values]
        operands = [self.nodes[place] for place in places]
        op = _checked(op, operands)
        known = _known(op, operands)
        if known is not None:
            return Symbol(self, places[known])
        return Symbol(self, self.nodes.add(op, result_dtype(op, operands), places))

    def cast(self, value: Any, dtype: object) -> Symbol:
        """Record a conversion."""
        place = self.place(value)
        node = self.nodes[place]
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
            raise Refused(f"a conversion to {dtype}", SUPPORTED)
        unchanged = node.dtype == dtype and (node.op != "const" or dtype == torch.bool)
        return Symbol(self, place if unchanged else self.nodes.add("cast", dtype, (place,)))

    def capture(self, tensor: torch.Tensor) -> Rows:
        """A tensor that the function has from outside, to be indexed."""
        if id(tensor) in self._made:
            raise Refused(
                f"a tensor of {dimensions(tensor)} made inside the function",
                "make it outside, in a variable that the function reads",
            )
        name = self._name_of(tensor)
        if self._captures.setdefault(name, tensor) is not tensor:
            raise Refused(f"two different tensors called `{name}`", "rename one: `captures` are given by name")
        if tensor.dtype not in DTYPES:
            raise Refused(f"`{name}` of dtype {tensor.dtype}", SUPPORTED)
        return Rows(self, name, tensor)

    def place(self, value: Any) -> int:
        """Place of the node of anything that can be computed with."""
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, Symbol):
            if value.recorder is not self:
                raise Refused("a value from another call of the function", "keep nothing from call to call")
            return value.place
        if isinstance(value, Rows):
            raise value.refusal()
        if isinstance(value, torch.Tensor):
            return self._place_of_tensor(value)
        if not isinstance(value, (bool, int, float)):
            raise Refused(
                f"a computation with a value {described(value)}", "use numbers, and tensors made outside the function"
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise Refused(f"the number {value}", "integers have 64 bits")
        dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
        return self.nodes.add("const", dtype, value=NUMBER_OF[dtype](value))

    def _place_of_tensor(self, tensor: torch.Tensor) -> int:
        if tensor.ndim == 0 and id(tensor) in self._made:
            return self.cast(tensor.item(), tensor.dtype).place
        return self.place(self.capture(tensor)[()])


def _checked(op: str, operands: Sequence[Node]) -> str:
    """The operation that PyTorch applies to these operands, if there is one."""
    dtype = common_dtype(operands)
    if dtype == torch.bool:
        if op in NOT_OF_BOOLS:
            raise Refused(f"`{op}` of bools", "use &, |, ^ and ~ for masks; .to(torch.int32) to count with them")
        op = OF_BOOLS.get(op, op)
    if dtype.is_floating_point and op in NOT_OF_FLOATS:
        raise Refused(
            f"`{op}` of {dtype}", "compare first, in parentheses: `&` and `|` bind stronger than `==` and `<`"
        )
    if op == "where" and operands[0].dtype != torch.bool:
        raise Refused(f"torch.where with a condition of {operands[0].dtype}", "compare it with something: `x != 0`")
    if op in ("floordiv", "mod") and not dtype.is_floating_point and operands[1].value == 0:
        raise Refused("a division by zero")
    for node, wanted in zip(operands, operand_dtypes(op, operands), strict=True):
        if isinstance(node.value, int) and wanted not in (torch.bool, torch.int64) and not wanted.is_floating_point:
            limits = torch.iinfo(wanted)
            if not limits.min <= node.value <= limits.max:
                raise Refused(f"the number {node.value} beside values of {wanted}", "convert them: .to(torch.int64)")
    return op


def _known(op: str, operands: Sequence[Node]) -> int | None:
    """Which operand is the result already, where a constant bool decides it."""
    if op in ("and", "or") and all(node.dtype == torch.bool for node in operands):
        for constant, other in ((0, 1), (1, 0)):
            if operands[constant].op == "const":
                return other if operands[constant].value is (op == "and") else constant
    return None
