"""Which functions and methods of torch can be traced, and what each is in a graph's operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sennit.variants.recorder import Recorder
from sennit.variants.symbols import IN_PLACE, NUMBERS, Refused, Symbol

__all__ = ["TO_PYTHON", "find"]

MOST_FACTORS = 16  # an integer power up to here is a product


def _unary(op: str) -> Callable[..., Symbol]:
    return lambda recorder, input: recorder.apply(op, input)


def _binary(op: str) -> Callable[..., Symbol]:
    return lambda recorder, input, other: recorder.apply(op, input, other)


def _logical(op: str) -> Callable[..., Symbol]:
    def function(r: Recorder, input: Any, other: Any) -> Symbol:
        return r.apply(op, r.cast(input, torch.bool), r.cast(other, torch.bool))

    return function


def _conversion(dtype: torch.dtype) -> Callable[..., Symbol]:
    return lambda recorder, input: recorder.cast(input, dtype)


def _same(r: Recorder, input: Any) -> Symbol:
    return Symbol(r, r.place(input))


def _div(r: Recorder, input: Any, other: Any, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode not in (None, "floor"):
        raise Refused(f"rounding_mode={rounding_mode!r}", 'use "floor"')
    return r.apply("truediv", input, other) if rounding_mode is None else _floor_divide(r, input, other)


def _floor_divide(r: Recorder, input: Any, other: Any) -> Symbol:
    a, b = _same(r, input), _same(r, other)
    if not (a.dtype.is_floating_point or b.dtype.is_floating_point):
        return r.apply("floordiv", a, b)
    multiple = r.apply("sub", a, r.apply("mod", a, b))
    return r.apply("floor", r.apply("truediv", multiple, b) + 0.5)  # an integer but for the rounding of the division


def _power(r: Recorder, input: Any, exponent: Any) -> Symbol:
    base = _same(r, input)
    if type(exponent) is int and 1 <= exponent <= MOST_FACTORS and base.dtype != torch.bool:
        return _product(r, base, exponent)
    power = _same(r, exponent)
    if not (base.dtype.is_floating_point or power.dtype.is_floating_point):
        raise Refused(
            f"an integer to the power of `{exponent}`",
            f"constant exponents from 1 to {MOST_FACTORS} can be traced, and floats: torch.exp2(x), or 2.0 ** x",
        )
    return r.apply("pow", base, power)


def _product(r: Recorder, base: Symbol, count: int) -> Symbol:
    if count == 1:
        return base
    half = _product(r, base, count // 2)
    even = r.apply("mul", half, half)
    return r.apply("mul", even, base) if count % 2 else even


def _floor(r: Recorder, input: Any) -> Symbol:
    x = _same(r, input)
    return r.apply("floor", x) if x.dtype.is_floating_point else x


def _ceil(r: Recorder, input: Any) -> Symbol:
    return r.apply("neg", _floor(r, r.apply("neg", input)))


def _clamp(r: Recorder, input: Any, min: Any = None, max: Any = None) -> Symbol:
    x = _same(r, input)
    x = x if min is None else r.apply("maximum", x, min)
    return x if max is None else r.apply("minimum", x, max)


def _extreme(op: str) -> Callable[..., Symbol]:
    def function(r: Recorder, input: Any, other: Any) -> Symbol:
        if isinstance(other, (bool, int, float)):
            raise Refused(f"an extreme along dimension {other}", f"torch.clamp takes a number, torch.{op} two values")
        return r.apply(op, input, other)

    return function


def _relu(r: Recorder, input: Any, inplace: bool = False) -> Symbol:
    if inplace:
        raise Refused("a change in place, `inplace=True`", "leave it out")
    return r.apply("maximum", input, 0)


def _sigmoid(r: Recorder, input: Any) -> Symbol:
    x = _same(r, input)
    x = x if x.dtype.is_floating_point else r.cast(x, torch.float32)
    result: Symbol = 1 / (1 + r.apply("exp", r.apply("neg", x)))
    return result


def _masked_fill(r: Recorder, input: Any, mask: Any, value: Any) -> Symbol:
    x = _same(r, input)
    return _where(r, mask, r.cast(value, x.dtype), x)


def _where(r: Recorder, condition: Any, input: Any, other: Any) -> Symbol:
    return r.apply("where", condition, input, other)


def _shift(left: bool) -> Callable[..., Symbol]:
    def function(r: Recorder, input: Any, other: Any) -> Symbol:
        x = _same(r, input)
        if type(other) is not int or other < 0 or x.dtype.is_floating_point:
            raise Refused("a shift by other than a constant", "multiply or divide: `x * 2**n`, `x // 2**n`")
        return r.apply("mul" if left else "floordiv", x, 2**other)

    return function


def _to(r: Recorder, input: Any, dtype: Any) -> Symbol:
    return r.cast(input, dtype.dtype if isinstance(dtype, (Symbol, torch.Tensor)) else dtype)


def _new_full(r: Recorder, input: Any, size: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return r.made(torch.full(size, fill_value, dtype=dtype or _same(r, input).dtype))


def _new_ones(r: Recorder, input: Any, size: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return _new_full(r, input, size, 1, dtype=dtype)


def _new_zeros(r: Recorder, input: Any, size: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return _new_full(r, input, size, 0, dtype=dtype)


def _new_tensor(r: Recorder, input: Any, data: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return r.made(torch.tensor(data, dtype=dtype or _same(r, input).dtype))


def _full_like(r: Recorder, input: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return _new_full(r, input, (), fill_value, dtype=dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _unary(name) for name in ("abs", "exp", "exp2", "log", "log2", "tanh", "sqrt", "sin", "cos")},
    **{name: _binary(name) for name in ("minimum", "maximum")},
    **{f"logical_{op}": _logical(op) for op in ("and", "or", "xor")},
    "logical_not": lambda r, input: r.apply("not", r.cast(input, torch.bool)),
    "max": _extreme("maximum"),
    "min": _extreme("minimum"),
    "clamp": _clamp,
    "clamp_min": lambda r, input, min: _clamp(r, input, min),
    "clamp_max": lambda r, input, max: _clamp(r, input, None, max),
    "floor": _floor,
    "ceil": _ceil,
    "relu": _relu,
    "square": lambda r, input: _power(r, input, 2),
    "reciprocal": lambda r, input: r.apply("truediv", 1, input),
    "rsqrt": lambda r, input: r.apply("truediv", 1, r.apply("sqrt", input)),
    "sigmoid": _sigmoid,
    "where": _where,
    "masked_fill": _masked_fill,
}
OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: _binary(name) for name in ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge")},
    **{f"bitwise_{op}": _binary(op) for op in ("and", "or", "xor")},
    "bitwise_not": _unary("not"),
    "bitwise_left_shift": _shift(left=True),
    "bitwise_right_shift": _shift(left=False),
    "neg": _unary("neg"),
    "positive": _same,
    "div": _div,
    "floor_divide": _floor_divide,
    "remainder": _binary("mod"),
    "pow": _power,
}
CONVERSIONS: dict[str, Callable[..., Any]] = {
    "to": _to,
    "type": _to,
    "type_as": _to,
    "bool": _conversion(torch.bool),
    "int": _conversion(torch.int32),
    "long": _conversion(torch.int64),
    "half": _conversion(torch.float16),
    "bfloat16": _conversion(torch.bfloat16),
    "float": _conversion(torch.float32),
    "double": _conversion(torch.float64),
    "new_full": _new_full,
    "new_ones": _new_ones,
    "new_zeros": _new_zeros,
    "new_tensor": _new_tensor,
    "full_like": _full_like,
    "ones_like": lambda r, input, *, dtype=None, device=None: _full_like(r, input, 1, dtype=dtype),
    "zeros_like": lambda r, input, *, dtype=None, device=None: _full_like(r, input, 0, dtype=dtype),
    **dict.fromkeys(("clone", "contiguous", "detach"), _same),
    "dim": lambda r, input: 0,
    "is_floating_point": lambda r, input: _same(r, input).dtype.is_floating_point,
}
ALIASES = {
    "absolute": "abs", "negative": "neg", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div",
    "truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "clip": "clamp", "invert": "bitwise_not",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not_equal": "ne", "less": "lt",
    "less_equal": "le", "greater": "gt", "greater_equal": "ge", "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}  # fmt: skip
REFLECTED = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
TO_PYTHON = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__complex__", "__index__")
IN_PLACE_OPERATORS = ("setitem", "iadd", "isub", "imul", "itruediv", "iand", "ior")


def find(name: str) -> Callable[..., Any]:
    """What records the function, method or operator of torch called ``name`` (without its underscores).

    Raises:
        Refused: it cannot be traced.
    """
    if name == "Tensor.where":
        return lambda r, input, condition, other: _where(r, condition, input, other)
    if name[1:] in REFLECTED and name[0] == "r":
        function = find(name[1:])
        return lambda r, input, other: function(r, other, input)
    name = ALIASES.get(name, name)
    for known in (FUNCTIONS, OPERATORS, CONVERSIONS):
        if name in known:
            return known[name]
    if name in TO_PYTHON:
        raise Refused(f"`{name}` of a value that differs from pair to pair or from run to run", NUMBERS)
    if name.endswith("_") or name in IN_PLACE_OPERATORS:
        raise Refused(f"a change in place, `{name}`", IN_PLACE)
    raise Refused(f"torch's `{name}`", f"there are operators, conversions, and {', '.join(sorted(FUNCTIONS))}")
