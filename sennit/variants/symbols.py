"""Stand-ins for a function's arguments and for rows of captured tensors: what Python does with them is recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from sennit.variants.promotion import INDEX_DTYPES, common_dtype
from sennit.variants.text import expression

if TYPE_CHECKING:
    from sennit.variants.recorder import Recorder

__all__ = ["Refused", "Rows", "Symbol"]

CHOICES = (
    "use torch.where for a choice; &, | and ~ for and, or and not; (a <= b) & (b < c) for a chain of comparisons; "
    "torch.minimum and torch.maximum for min and max"
)
NUMBERS = "use functions of torch (torch.exp for math.exp), and tensors made outside the function for look-ups"
IN_PLACE = "write `x = x + y` for `x += y`, and methods without the last underscore"


class Refused(AttributeError):
    """Something that cannot be traced: what it is, and what to write instead.

    An AttributeError, so that ``hasattr`` answers for what stand-ins lack.
    """

    def __init__(self, what: str, hint: str = "", expected: str = "arithmetic on one pair of query and key") -> None:
        self.what, self.hint, self.expected = what, hint, expected
        super().__init__(f"{what}; {hint}" if hint else what)


def _operator(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: self.recorder.call(name, self, other)


def _reflected(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: self.recorder.call(name, other, self)


def _unary(name: str) -> Callable[[Any], Any]:
    return lambda self: self.recorder.call(name, self)


def _refusing(what: str, hint: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *args: object) -> NoReturn:
        raise Refused(what, hint)

    return refuse


class Traced:
    """Operators that are recorded, and those that cannot be."""

    __array_ufunc__ = None  # NumPy's numbers leave operators to the right-hand side
    recorder: Recorder

    __add__, __radd__ = _operator("add"), _reflected("add")
    __sub__, __rsub__ = _operator("sub"), _reflected("sub")
    __mul__, __rmul__ = _operator("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _operator("div"), _reflected("div")
    __floordiv__, __rfloordiv__ = _operator("floor_divide"), _reflected("floor_divide")
    __mod__, __rmod__ = _operator("remainder"), _reflected("remainder")
    __pow__, __rpow__ = _operator("pow"), _reflected("pow")
    __and__, __rand__ = _operator("bitwise_and"), _reflected("bitwise_and")
    __or__, __ror__ = _operator("bitwise_or"), _reflected("bitwise_or")
    __xor__, __rxor__ = _operator("bitwise_xor"), _reflected("bitwise_xor")
    __lshift__, __rshift__ = _operator("bitwise_left_shift"), _operator("bitwise_right_shift")
    __lt__, __le__, __gt__, __ge__ = _operator("lt"), _operator("le"), _operator("gt"), _operator("ge")
    __eq__, __ne__ = _operator("eq"), _operator("ne")
    __neg__, __pos__, __abs__, __invert__ = _unary("neg"), _unary("positive"), _unary("abs"), _unary("bitwise_not")

    __bool__ = _refusing(
        "the truth of a value that differs from pair to pair (`if`, `and`, `or`, `not`, `in`, a chain of comparisons, "
        "min or max)",
        CHOICES,
    )
    __int__ = __float__ = __complex__ = __index__ = __round__ = __floor__ = __ceil__ = __trunc__ = _refusing(
        "a Python number made of a value that differs from pair to pair", NUMBERS
    )
    __len__ = __iter__ = __contains__ = _refusing("iteration over a value", "write the loop over Python numbers")
    __hash__ = _refusing("a look-up by a value that differs from pair to pair", NUMBERS)
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = __setitem__ = _refusing(
        "a change in place", IN_PLACE
    )
    __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = __iadd__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls reach the function mode of the trace first; past its end there is nobody to record them."""
        raise Refused(f"{func.__name__} after the function has returned", "keep no argument beyond the call")


class Symbol(Traced):
    """A scalar that differs from pair to pair: a node of the graph in the making."""

    def __init__(self, recorder: Recorder, place: int) -> None:
        self.recorder, self.place = recorder, place

    @property
    def dtype(self) -> torch.dtype:
        """Of the 0-dim tensor that it stands for."""
        return common_dtype([self.recorder.nodes[self.place]])

    @property
    def device(self) -> torch.device:
        """Where constants made for it are."""
        return torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        """It is a scalar."""
        return torch.Size(())

    @property
    def ndim(self) -> int:
        """It is a scalar."""
        return 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        name = "Tensor.where" if name == "where" else name
        self.recorder.find(name)
        return partial(self.recorder.call, name, self)

    def __getitem__(self, index: object) -> NoReturn:
        raise Refused(f"an index into `{self}`, which is a scalar", "only captured tensors have indices")

    def __repr__(self) -> str:
        return expression(self.recorder.nodes.reachable(self.place))


class Rows(Traced):
    """A captured tensor, some of its dimensions indexed."""

    def __init__(self, recorder: Recorder, name: str, like: torch.Tensor, indices: tuple[int, ...] = ()) -> None:
        self.recorder, self.name, self.like, self.indices = recorder, name, like, indices

    def __getitem__(self, index: object) -> Symbol | Rows:
        given = index if isinstance(index, tuple) else (index,)
        indices = (*self.indices, *(self._place(i) for i in given))
        if len(indices) > self.like.ndim:
            raise Refused(f"{len(indices)} indices into `{self.name}`, a tensor of {dimensions(self.like)}")
        if len(indices) == self.like.ndim:
            return Symbol(self.recorder, self.recorder.nodes.add("index", self.like.dtype, indices, self.name))
        return Rows(self.recorder, self.name, self.like, indices)

    def _place(self, index: object) -> int:
        if isinstance(index, (bool, np.bool_)) or not self.recorder.is_number(index):
            raise Refused(f"an index into `{self.name}` that is {described(index)}", "give one integer a dimension")
        place = self.recorder.place(index)
        node = self.recorder.nodes[place]
        if node.dtype not in INDEX_DTYPES or (node.op == "const" and abs(int(node.value or 0)) >= 2**31):
            raise Refused(f"an index into `{self.name}` of {node.dtype}, `{index}`", "use .to(torch.int32)")
        return place

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self.refusal()

    def __repr__(self) -> str:
        return f"`{self.name}`, a tensor of {dimensions(self.like)} with {len(self.indices)} of them indexed"

    def refusal(self) -> Refused:
        """Why it cannot be computed with."""
        return Refused(f"a computation with {self}", "index all of them; prepare tables outside the function")


def dimensions(tensor: torch.Tensor) -> str:
    """How many dimensions a tensor has, in words."""
    return "1 dimension" if tensor.ndim == 1 else f"{tensor.ndim} dimensions"


def described(value: object) -> str:
    """What a value is, in a few words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {dimensions(value)}"
    return "None" if value is None else f"of type {type(value).__name__}"
