"""Runs a user's score or mask function once, on stand-ins, and gives the expression graph of what it did."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from sennit.errors import InvalidInput
from sennit.variants.frames import name_of, place_of_code, place_of_error
from sennit.variants.functions import TO_PYTHON, find
from sennit.variants.graph import Graph
from sennit.variants.nodes import INPUTS, Kind
from sennit.variants.recorder import Recorder
from sennit.variants.symbols import Refused, Rows, Symbol, described

__all__ = ["trace"]

RANDOM = ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial")
# What a captured tensor may be asked for: the same in every run, or only for messages.
ASKED = ("dtype", "device", "ndim", "dim", "layout", "requires_grad", "is_floating_point", "hash", "repr", "format")


def trace(function: Callable[..., Any], kind: Kind, captured: dict[str, torch.Tensor] | None = None) -> Graph:
    """Trace a function with FlexAttention's signature.

    The function runs once, with a stand-in for each argument: its arithmetic, comparisons, calls of torch and tensor
    methods, and its reads of tensors from outside become the graph. Python around them (flags, loops over numbers,
    other functions) runs as it is, so numbers from outside are constants of the graph. Tensors from outside are
    captures, named by the variable that the code reads: a variable of an enclosing function, a global, a parameter
    bound by a default or ``functools.partial``, or an attribute. They are read element by element,
    ``table[b, h]``, and only their names, dtypes and dimensions are kept.

    The arguments are 0-dim tensors: the score float32, the others int32, and dtypes follow PyTorch's promotion with
    float32 as the default. A layer of float64 evaluates the same graph with a score of float64, and what is promoted
    with the score is then float64 too.

    Args:
        function: ``f(score, b, h, q_idx, kv_idx)`` or ``f(b, h, q_idx, kv_idx)``.
        kind: ``"score"`` or ``"mask"``.
        captured: tensors that other functions read, by name, to which those of this one are added; for functions that
            are given their captures together, so that no name may stand for two tensors.

    Raises:
        InvalidInput: the function does something else; the text shows where, and what to write instead.

    >>> slopes = torch.tensor([0.5, 0.25])
    >>> def alibi(score, b, h, q_idx, kv_idx):
    ...     return score + slopes[h] * (kv_idx - q_idx)
    >>> graph = trace(alibi, "score")
    >>> graph
    <alibi: score + slopes[h] * (kv_idx - q_idx)>
    >>> graph.captures
    (Capture(name='slopes', dtype=torch.float32, ndim=1),)
    """
    if not isinstance(kind, str) or kind not in INPUTS:
        raise InvalidInput("kind", expected=" or ".join(map(repr, INPUTS)), got=repr(kind))
    _check_signature(function, kind)
    recorder = Recorder(find, functools.partial(name_of, below=trace.__code__), {} if captured is None else captured)
    arguments = [recorder.argument(name) for name in INPUTS[kind]]
    try:
        with torch.device("cpu"), _Recording(recorder):  # constants made inside are read, whatever the default device
            result = function(*arguments)
            place = _result(recorder, result, kind)
    except Refused as error:
        where = place_of_error(error) or place_of_code(function)
        raise InvalidInput(
            f"{kind}_mod", expected=error.expected, got=f"{error.what}{where}", hint=error.hint
        ) from error
    except Exception as error:
        where = place_of_error(error) or place_of_code(function)
        raise InvalidInput(
            f"{kind}_mod",
            expected="a function that runs on stand-ins for 0-dim tensors",
            got=f"{type(error).__name__}: {error}{where}",
            hint="make a tensor of a NumPy array outside the function" if isinstance(error, IndexError) else "",
        ) from error
    return Graph(kind, recorder.nodes.reachable(place), _name(function))


class _Recording(TorchFunctionMode):
    """Sees every use of torch while the function runs: of stand-ins, of captured tensors, and of constants."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _torch_name(func)
        if not any(map(self.recorder.records, _flat((args, kwargs)))):
            if name in RANDOM:
                raise Refused(f"torch's `{name}`", "make random numbers outside the function, in a tensor")
            return self.recorder.made(func(*args, **kwargs))
        if name in ASKED and isinstance(args[0], torch.Tensor):
            return func(*args, **kwargs)
        if name == "getitem":
            return self.recorder.capture(args[0])[args[1]]
        return self.recorder.call(name, *args, **kwargs)


def _torch_name(func: Any) -> str:
    """``add`` for ``torch.add``, ``Tensor.add`` and ``Tensor.__add__``; the attribute's name for reading one."""
    if func is torch.Tensor.where:
        return "Tensor.where"
    name: str = func.__name__
    if name == "__get__":
        return str(resolve_name(func)).split(".")[-2]
    return name[2:-2] if name.startswith("__") and name not in TO_PYTHON else name


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _flat(part)
    else:
        yield value


def _check_signature(function: Any, kind: Kind) -> None:
    """A callable that takes as many positional arguments as the kind has."""
    names = ", ".join(INPUTS[kind])
    if not callable(function):
        raise InvalidInput(f"{kind}_mod", expected=f"a function of ({names})", got=described(function))
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built in: calling it will tell
        return
    try:
        signature.bind(*INPUTS[kind])
    except TypeError:
        got = f"{_name(function)}{signature}{place_of_code(function)}"
        raise InvalidInput(f"{kind}_mod", expected=f"a function of ({names})", got=got) from None


def _result(recorder: Recorder, result: Any, kind: Kind) -> int:
    """Place of what the function gave, if it is of the right kind."""
    expected = "a bool for each pair of query and key" if kind == "mask" else "a number for each pair of query and key"
    if isinstance(result, Rows):
        raise Refused(f"a result that is {result}", expected=expected)
    if not recorder.is_number(result) or (isinstance(result, torch.Tensor) and recorder.records(result)):
        hint = "" if result is not None else "end the function with `return`"
        raise Refused(f"a result that is {described(result)}", hint, expected)
    symbol = Symbol(recorder, recorder.place(result))
    if kind == "mask" and symbol.dtype != torch.bool:
        raise Refused(f"`{symbol}` of {symbol.dtype}", "compare it with something, as in `x != 0`", expected)
    if kind == "score" and symbol.dtype == torch.bool:
        raise Refused(
            f"the bool `{symbol}`", "give it as mask_mod=, or use torch.where(x, score, -float('inf'))", expected
        )
    return symbol.place


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")
